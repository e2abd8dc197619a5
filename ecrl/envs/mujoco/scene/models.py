"""Keep a table of the loaded MuJoCo models, and define the layout of a model's states and fields."""

import os
from copy import copy
from hashlib import sha256
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np

from ecrl.errors import ConfigError, UserError, extra

STATE = ("TIME", "QPOS", "QVEL", "ACT", "HISTORY", "WARMSTART", "MOCAP_POS", "MOCAP_QUAT", "PLUGIN", "PLASTIC")
"""Components of a simulation's state, named and ordered as in MuJoCo. In most models, many components are empty."""

CONTROL = ("CTRL", "QFRC_APPLIED")
"""Components of a step's input: the controls of the actuators, and the forces along the degrees of freedom."""

Varied = tuple[tuple[str, str], ...]
"""Pairs of a varied model field's name and an object's name, such as `("body_mass", "cube")`."""

Backend = Literal["mujoco", "warp"]
"""Library that steps a model: MuJoCo on the CPU, or MuJoCo Warp for GPUs."""

GRAVITY = "opt.gravity"
"""Name of the model field that holds the gravitational acceleration, m/s^2. The field belongs to no object."""

_PREFIXES = ("body", "geom", "jnt", "dof", "actuator", "site", "tendon")


class SpeedLimit(NamedTuple):
    """Limit of the norm of `count` neighbouring entries of `qvel`.

    `dof` is the index of the first of these entries. `position` is the index of the first entry of `qpos` that changes
    at the rate of these entries, or None for an angular velocity. `largest` is the largest norm, rad/s or m/s.
    """

    dof: int
    position: int | None
    count: int
    largest: float


class Loaded(NamedTuple):
    """A MuJoCo model that this process has loaded, with its settings."""

    model: Any
    threads: int
    varied: Varied
    widths: tuple[int, int, int]  # lengths of a simulation's state, control and parameters
    backend: Backend
    speed_limits: tuple[SpeedLimit, ...]


_LOADED: dict[int, Loaded] = {}


def mujoco() -> Any:
    """Import the package `mujoco` at the first call, and return the package.

    The import loads the OpenGL library that $MUJOCO_GL names, even if no camera is used.

    Raises: MissingExtraError with the install command, if the package is not installed. UserError if the OpenGL library
        does not work.
    """
    try:
        with extra("mujoco"):
            import mujoco.batch
    except (AttributeError, RuntimeError) as error:
        if not (library := os.environ.get("MUJOCO_GL")):
            raise
        fault = f"MUJOCO_GL={library} does not work here ({error})"
        packages = "libosmesa6 for osmesa, libegl1 for egl"
        raise UserError(f"{fault}; unset MUJOCO_GL, or install the library with apt-get: {packages}") from None
    log = getattr(mujoco, "MjLogConfig").get()  # noqa: B009  (MuJoCo's type stubs lack MjLogConfig)
    if log.logto_file:  # do not write a log file into the working directory; warnings still go to stderr
        log.logto_file = False
        log.set()
    return mujoco


def load(
    model: Any,
    threads: int = 0,
    varied: Varied = (),
    backend: Backend = "mujoco",
    speed_limits: tuple[SpeedLimit, ...] = (),
) -> int:
    """Store a copy of a model for this process, and return an integer that identifies the copy.

    The returned handle is a hash of all arguments, so equal arguments give the same handle in every process.

    Args:
        model: a `mujoco.MjModel`.
        threads: number of physics threads; 0 means as many threads as torch uses.
        varied: pairs of a model field's name and an object's name, for all fields that may differ between simulations.
        backend: the library that steps the model.
        speed_limits: limits that each physics step applies to the velocities.
    """
    buffer = np.zeros(mujoco().mj_sizeModel(model), np.uint8)
    mujoco().mj_saveModel(model, None, buffer)
    content = sha256(buffer.tobytes() + repr((threads, varied, backend, *speed_limits)).encode()).digest()
    handle = int.from_bytes(content[:7])
    if handle not in _LOADED:
        parameters = sum(len(rows_of(model, field, name)) for field, name in varied)
        widths = size_of(model, *STATE), size_of(model, *CONTROL), parameters
        _LOADED[handle] = Loaded(copy(model), threads, varied, widths, backend, speed_limits)
    return handle


def loaded(handle: int) -> Loaded:
    """Return the model with the given handle. Raise ConfigError if this process has not loaded the model."""
    if handle not in _LOADED:
        raise ConfigError(f"mujoco model {handle} is not loaded in this process; make its environment first")
    return _LOADED[handle]


def control_per_target(model: Any, i: int) -> float:
    """Return the factor that converts a target position, target velocity or force to the control of actuator `i`.

        torque = gear (gain control + bias1 gear q + bias2 gear dq/dt)

    The factor is -bias1 gear / gain for a target position and -bias2 gear / gain for a target velocity. For a force,
    the factor is 1 / (gear gain).
    """
    gear, gain = float(model.actuator_gear[i, 0]), float(model.actuator_gainprm[i, 0])
    if model.actuator_biastype[i] == int(mujoco().mjtBias.mjBIAS_NONE):
        return 1.0 / (gear * gain)
    _, position, velocity = (float(x) for x in model.actuator_biasprm[i, :3])
    return -(position if position < 0.0 else velocity) * gear / gain


def is_linear_in_control(model: Any, i: int) -> bool:
    """Return True if the force of actuator `i` is linear in the control or in the filtered control.

    The result is False for integrators and muscles, for gains that are not fixed, and if the gain or the gear is 0.
    """
    kinds, gains = mujoco().mjtDyn, mujoco().mjtGain
    direct = int(kinds.mjDYN_NONE), int(kinds.mjDYN_FILTER), int(kinds.mjDYN_FILTEREXACT)
    if model.actuator_gaintype[i] != int(gains.mjGAIN_FIXED) or model.actuator_dyntype[i] not in direct:
        return False
    return bool(model.actuator_gainprm[i, 0] * model.actuator_gear[i, 0])


def size_of(model: Any, *parts: str) -> int:
    """Return the total number of values in the given components of a model's state."""
    states = mujoco().mjtState
    return sum(mujoco().mj_stateSize(model, getattr(states, f"mjSTATE_{part}").value) for part in parts)


def columns_of(model: Any, part: str) -> slice:
    """Return the slice of a state in the layout of `STATE` that holds one component, such as "QPOS"."""
    first = size_of(model, *STATE[: STATE.index(part)])
    return slice(first, first + size_of(model, part))


def _dofs_of(model: Any, name: str) -> tuple[int, int]:
    """Return the index of the first degree of freedom of a joint, and the number of the joint's degrees of freedom.

    `name` may also be the name of the joint's body, because free joints often have no name.
    """
    kinds = mujoco().mjtObj.mjOBJ_JOINT, mujoco().mjtObj.mjOBJ_BODY
    joint, body = (mujoco().mj_name2id(model, kind, name) for kind in kinds)
    if joint < 0 <= body:
        return int(model.body_dofadr[body]), int(model.body_dofnum[body])
    joint = id_of(model, "jnt", name)
    return int(model.jnt_dofadr[joint]), (6, 3, 1, 1)[int(model.jnt_type[joint])]


def field_of(model: Any, field: str) -> np.ndarray:
    """Return a field of a model, such as `body_mass`, or an option, such as `opt.gravity`."""
    return attrgetter(field)(model)


def rows_of(model: Any, field: str, name: str) -> range:
    """Return the indices of an object's values in a flattened model field.

    The field `opt.gravity` belongs to no object, so `name` is then ignored.

    Raises: ConfigError if the model does not have the field or the object.
    """
    if field == GRAVITY:
        return range(3)
    prefix, values = field.partition("_")[0], getattr(model, field, None)
    if prefix not in _PREFIXES or not isinstance(values, np.ndarray):
        expected = "expected one such as body_mass or geom_friction"
        raise ConfigError(f"{field!r} is not a field of a MuJoCo model that can vary; {expected}")
    if prefix == "dof":
        first, count = _dofs_of(model, name)
    else:
        first, count = id_of(model, prefix, name), 1
    width = int(np.prod(values.shape[1:]))
    return range(first * width, (first + count) * width)


def id_of(model: Any, kind: str, name: str) -> int:
    """Return the index of an object in a model, given the object's name and its kind, such as "body".

    Raises: ConfigError if the object does not exist. The error message lists the names of all objects of the kind.
    """
    kind_name = {"jnt": "joint"}.get(kind, kind)
    index = mujoco().mj_name2id(model, getattr(mujoco().mjtObj, f"mjOBJ_{kind_name.upper()}"), name)
    if index < 0:
        count = model.nu if kind == "actuator" else getattr(model, f"n{kind}")
        known = [getattr(model, kind_name)(i).name for i in range(count)]
        names = ", ".join(filter(None, known)) or "none"
        raise ConfigError(f"{kind_name} {name!r} is not in the scene; the scene has: {names}")
    return index
