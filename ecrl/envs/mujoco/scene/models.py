"""Models of MuJoCo that this process has loaded, and where the parts and objects of a model lie in its arrays."""

import os
from copy import copy
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import numpy as np

from ecrl.errors import ConfigError, UserError, extra

STATE = ("TIME", "QPOS", "QVEL", "ACT", "HISTORY", "WARMSTART", "MOCAP_POS", "MOCAP_QUAT", "PLUGIN", "PLASTIC")
"""Parts of a state, in MuJoCo's names and order; most have no numbers in most models."""

CONTROL = ("CTRL", "QFRC_APPLIED")
"""What acts on a simulation during a step: controls of the actuators, and forces along the degrees of freedom."""

Varied = tuple[tuple[str, str], ...]
"""Fields of the model that differ between simulations, each with the name of its object: `("body_mass", "cube")`."""

Backend = Literal["mujoco", "warp"]
"""What steps a model: MuJoCo itself, on the CPU, or MuJoCo Warp, for GPUs."""

_PREFIXES = ("body", "geom", "jnt", "dof", "actuator", "site", "tendon")


class Loaded(NamedTuple):
    """A model in the table of this process."""

    model: Any
    threads: int
    varied: Varied
    widths: tuple[int, int, int]  # numbers of a simulation in its state, control and parameters
    backend: Backend


_LOADED: dict[int, Loaded] = {}


def mujoco() -> Any:
    """The package mujoco, imported when first needed; MissingExtraError says how to install it.

    Its import opens the OpenGL that $MUJOCO_GL names, with or without cameras: UserError where that fails.
    """
    try:
        with extra("mujoco"):
            import mujoco.batch
    except (AttributeError, RuntimeError) as error:
        if not (named := os.environ.get("MUJOCO_GL")):
            raise
        told = f"MUJOCO_GL={named} does not work here ({error})"
        packages = "libosmesa6 for osmesa, libegl1 for egl"
        raise UserError(f"{told}; unset it, or install what it names, with apt-get: {packages}") from None
    log = getattr(mujoco, "MjLogConfig").get()  # noqa: B009  (its stubs do not have it)
    if log.logto_file:  # to the working directory; warnings are on stderr too
        log.logto_file = False
        log.set()
    return mujoco


def load(model: Any, threads: int = 0, varied: Varied = (), backend: Backend = "mujoco") -> int:
    """The handle of a model, a number made of its content, so that equal ones share it, in other processes too.

    Args:
        model: an `mujoco.MjModel`; a copy is kept.
        threads: 0 for as many as torch uses.
        varied: what may differ between simulations.
        backend: what steps it.
    """
    buffer = np.zeros(mujoco().mj_sizeModel(model), np.uint8)
    mujoco().mj_saveModel(model, None, buffer)
    content = sha256(buffer.tobytes() + repr((threads, varied, backend)).encode()).digest()
    handle = int.from_bytes(content[:7])
    if handle not in _LOADED:
        parameters = sum(len(rows_of(model, field, name)) for field, name in varied)
        widths = size_of(model, *STATE), size_of(model, *CONTROL), parameters
        _LOADED[handle] = Loaded(copy(model), threads, varied, widths, backend)
    return handle


def loaded(handle: int) -> Loaded:
    """The model of a handle; ConfigError where this process never loaded it."""
    if handle not in _LOADED:
        raise ConfigError(f"mujoco model {handle} is not loaded in this process; make its environment first")
    return _LOADED[handle]


def control_per_target(model: Any, i: int) -> float:
    """The control of actuator `i` per target position, target velocity or force that its joint is to have.

        torque = gear (gain control + bias1 gear q + bias2 gear dq/dt)

    so that it is -bias1 gear / gain for positions, -bias2 gear / gain for velocities and 1 / (gear gain) for forces.
    """
    gear, gain = float(model.actuator_gear[i, 0]), float(model.actuator_gainprm[i, 0])
    if model.actuator_biastype[i] == int(mujoco().mjtBias.mjBIAS_NONE):
        return 1.0 / (gear * gain)
    _, position, velocity = (float(x) for x in model.actuator_biasprm[i, :3])
    return -(position if position < 0.0 else velocity) * gear / gain


def follows(model: Any, i: int) -> bool:
    """Whether actuator `i` acts by its control, at once or filtered: an integrator or a muscle does not."""
    kinds, gains = mujoco().mjtDyn, mujoco().mjtGain
    direct = int(kinds.mjDYN_NONE), int(kinds.mjDYN_FILTER), int(kinds.mjDYN_FILTEREXACT)
    if model.actuator_gaintype[i] != int(gains.mjGAIN_FIXED) or model.actuator_dyntype[i] not in direct:
        return False
    return bool(model.actuator_gainprm[i, 0] * model.actuator_gear[i, 0])


def size_of(model: Any, *parts: str) -> int:
    """Numbers in these parts of a state."""
    states = mujoco().mjtState
    return sum(mujoco().mj_stateSize(model, getattr(states, f"mjSTATE_{part}").value) for part in parts)


def _dofs_of(model: Any, name: str) -> tuple[int, int]:
    """The first degree of freedom and how many there are, of a joint, or of a body: free joints are often unnamed."""
    kinds = mujoco().mjtObj.mjOBJ_JOINT, mujoco().mjtObj.mjOBJ_BODY
    joint, body = (mujoco().mj_name2id(model, kind, name) for kind in kinds)
    if joint < 0 <= body:
        return int(model.body_dofadr[body]), int(model.body_dofnum[body])
    joint = id_of(model, "jnt", name)
    return int(model.jnt_dofadr[joint]), (6, 3, 1, 1)[int(model.jnt_type[joint])]


def rows_of(model: Any, field: str, name: str) -> range:
    """Where the numbers of an object lie in a field of the model, counted in the flattened field.

    Raises: ConfigError naming a field or an object that the model does not have.
    """
    prefix, values = field.partition("_")[0], getattr(model, field, None)
    if prefix not in _PREFIXES or not isinstance(values, np.ndarray):
        raise ConfigError(f"{field!r} is no field of a MuJoCo model that can vary; such as body_mass, geom_friction")
    if prefix == "dof":
        first, many = _dofs_of(model, name)
    else:
        first, many = id_of(model, prefix, name), 1
    width = int(np.prod(values.shape[1:]))
    return range(first * width, (first + many) * width)


def id_of(model: Any, kind: str, name: str) -> int:
    """Index of a named object of a kind such as "body"; ConfigError with the names there are."""
    named = {"jnt": "joint"}.get(kind, kind)
    index = mujoco().mj_name2id(model, getattr(mujoco().mjtObj, f"mjOBJ_{named.upper()}"), name)
    if index < 0:
        count = model.nu if kind == "actuator" else getattr(model, f"n{kind}")
        known = [getattr(model, named)(i).name for i in range(count)]
        raise ConfigError(f"{named} {name!r} is not in the scene; it has: {', '.join(filter(None, known)) or 'none'}")
    return index
