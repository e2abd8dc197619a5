"""Simulations of scenes. The state of a simulation is a TensorDict called a world. The function `advance` steps worlds.

A world of batch shape `[*B]` has these fields, which the functions of `ecrl.envs.mujoco.world` read and write:
    physics     float64, the state that `ecrl.envs.mujoco.physics.step_op` steps
    sensors     float32, sensor readings of the last substep; absent if the scene has no sensors
    parameters  float64, values of model fields that differ between environments; absent if no field differs
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.envs.mujoco.physics import step_op, warp_model
from ecrl.envs.mujoco.robots.robot import Drive, Robot, robot_function
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.mujoco.scene.models import STATE, Backend, Varied, field_of, load, loaded, mujoco, rows_of, size_of
from ecrl.envs.mujoco.scene.scene import build
from ecrl.errors import ConfigError

_SUBSTEPS = 4  # default number of substeps; with substeps of 0.01 s, an environment takes 25 steps per simulated second
_HUGE = 1e10  # value of MuJoCo's mjMAXVAL; MuJoCo treats values of larger magnitude as invalid


@dataclass(frozen=True, eq=False)
class Simulation:
    """A scene that is ready to be simulated. The function `simulation` returns the same object for equal arguments.

    Attributes:
        model: the `MjModel` of the scene.
        robot: names of the robot's joints, parts and end effectors.
        handle: handle of the model, which `step_op.step` takes as an argument.
        substeps: number of physics steps per environment step.
        nu: number of actuators.
        nv: number of degrees of freedom.
        home: the `MjData` at the start of an episode.
        varied: pairs of a model field's name and an object's name, for all fields that differ between environments.
        row: value of a world's field `physics` at the start of an episode.
        sensors: value of a world's field `sensors` at the start of an episode.
        parameters: value of a world's field `parameters` at the start of an episode.
    """

    model: Any
    robot: Robot
    handle: int
    substeps: int
    nu: int
    nv: int
    home: Any
    varied: Varied
    row: np.ndarray
    sensors: np.ndarray
    parameters: np.ndarray

    @property
    def dt(self) -> float:
        """Duration of an environment step in seconds."""
        return self.substeps * self.model.opt.timestep

    @property
    def backend(self) -> Backend:
        """Library that steps the simulation, either "mujoco" (only on the CPU) or "warp"."""
        return loaded(self.handle).backend


@cache
def state_bits() -> int:
    """Return a bit mask of the components in `models.STATE`, with the bits of MuJoCo's `mjtState`."""
    return sum(getattr(mujoco().mjtState, f"mjSTATE_{name}").value for name in STATE)


def _substeps(cfg: SceneConfig, dt: float) -> int:
    """Return the number of physics steps, each of `dt` seconds, per environment step."""
    if cfg.target_control_frequency is None:
        return cfg.sim_steps_per_control or _SUBSTEPS
    exact = 1.0 / max(cfg.target_control_frequency * dt, 1e-300)
    if not 0.5 < exact < 10_000.5 or abs(exact - round(exact)) > 1e-6 * exact:
        actual = f"a step at {cfg.target_control_frequency} Hz takes {exact:.6g} physics steps of {dt} s"
        expected = "expected a whole number up to 10,000"
        raise ConfigError(f"target_control_frequency: {actual}, {expected}; change the frequency or physics.dt")
    return round(exact)


def simulation(
    cfg: SceneConfig,
    drives: tuple[tuple[str, Drive], ...] = (),
    varied: Varied = (),
    has_movable_base: bool = False,
) -> Simulation:
    """Return the simulation of a scene. Simulations are cached, so calls with equal arguments read the files only once.

    Args:
        cfg: config of the scene.
        drives: a pair for each joint whose drive is not a position drive, such as `(("elbow_joint", "velocity"),)`. A
            pair consists of the joint's name, without the robot's prefix, and the kind of drive.
        varied: pairs of a model field's name and an object's name, for all fields that differ between environments,
            such as `(("body_mass", "cube"), ("body_inertia", "cube"), ("geom_friction", "cube"))`.
        has_movable_base: True if events may move the base of the robot. The base is then a mocap body.

    Raises: ConfigError if the config is invalid (see `ecrl.envs.mujoco.scene.scene.build`), or if the backend does not
        support the scene.
    """
    return _simulation(cast(Any, cfg), drives, varied, has_movable_base, cfg.robot and robot_function(cfg.robot))


@cache
def _simulation(
    cfg: SceneConfig,
    drives: tuple[tuple[str, Drive], ...],
    varied: Varied,
    has_movable_base: bool,
    robot: Callable | None,  # only a part of the cache's key: the function that is registered for the robot's name
) -> Simulation:
    offset = tuple(name for field, name in varied if field == "body_ipos")
    scene = build(cfg, dict(drives), offset, has_movable_base)
    model, data = scene.model, scene.data
    if cfg.physics.backend == "warp":
        warp_model.check(model, varied)
    row = np.empty(size_of(model, *STATE))
    mujoco().mj_getState(model, data, row, state_bits())
    probe = mujoco().MjData(model)
    mujoco().mj_setState(model, probe, row, state_bits())
    probe.ctrl[:] = data.ctrl
    mujoco().mj_forward(model, probe)
    numbers = [field_of(model, field).ravel()[rows_of(model, field, name)] for field, name in varied]
    parameters = np.concatenate([np.zeros(0), *numbers])
    handle = load(model, cfg.physics.threads, varied, cfg.physics.backend, scene.speed_limits)
    sensors = probe.sensordata.astype(np.float32)
    sizes = _substeps(cfg, model.opt.timestep), model.nu, model.nv
    return Simulation(model, scene.robot, handle, *sizes, data, varied, row, sensors, parameters)


def start(sim: Simulation, batch: Sequence[int], device: torch.device | str | None = None) -> TensorDict:
    """Return worlds `[*batch]` with the robot at its home position and all objects at their initial poses."""
    fields = {"physics": sim.row, "sensors": sim.sensors, "parameters": sim.parameters}
    batch = torch.Size(batch)
    tensors = {name: torch.from_numpy(row).to(device) for name, row in fields.items() if row.size}
    return TensorDict({name: row.expand(*batch, -1).clone() for name, row in tensors.items()}, batch)


def _inputs(sim: Simulation, world: TensorDict, control: Tensor, force: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Convert worlds, controls and forces to the arguments `state`, `control` and `parameters` of `step_op.step`."""
    row, batch = world["physics"], world.batch_size
    force = row.new_zeros(torch.Size((*batch, sim.nv))) if force is None else force.double()
    parameters = world["parameters"] if sim.varied else row.new_zeros(torch.Size((*batch, 0)))
    return row, torch.cat((control.double(), force), -1), parameters


def advance(
    sim: Simulation, world: TensorDict, control: Tensor, force: Tensor | None = None
) -> tuple[TensorDict, Tensor]:
    """Advance worlds by one environment step, and return a mask of the worlds whose step failed.

    Args:
        sim: the simulation.
        world: the worlds to step, `[*B]`.
        control: controls of the actuators, `[*B, nu]` float. The controls are constant during the step.
        force: forces (N or N m) along the degrees of freedom, `[*B, nv]` float; see `world.push`. None: no force.

    Returns: the worlds after the step, and a mask of the failed steps, bool `[*B]`. A step fails if the magnitude of a
        control, of a force or of an entry of the next state reaches 1e10, or if one of them is NaN. A world whose step
        failed is returned unchanged. The caller must end the episode of this world.
    Gradient: none. Raises ValueError if autograd would record the step.
    """
    before, inputs = world["physics"], _inputs(sim, world, control, force)
    after, sensors = step_op.step(*inputs, handle=sim.handle, substeps=sim.substeps)
    valid = (after.abs() < _HUGE).all(-1) & (inputs[1].abs() < _HUGE).all(-1)
    fields = {"physics": torch.where(valid.unsqueeze(-1), after, before)}
    if "sensors" in world:
        fields["sensors"] = torch.where(valid.unsqueeze(-1), sensors.float(), world["sensors"])
    return world.copy().update(fields), ~valid


def with_current_sensors(sim: Simulation, world: TensorDict, control: Tensor) -> TensorDict:
    """Recompute the sensor readings of worlds from the current state and a control `[*B, nu]`, with `mj_forward`."""
    _, sensors = step_op.step(*_inputs(sim, world, control, None), handle=sim.handle, substeps=0)
    return world.copy().set("sensors", sensors.float())


def to_data(sim: Simulation, row: Tensor, data: Any = None) -> Any:
    """Write the `physics` of one world to `data` (None: to a new `MjData`), run `mj_forward`, and return the data."""
    data = mujoco().MjData(sim.model) if data is None else data
    mujoco().mj_setState(sim.model, data, row.double().cpu().numpy(), state_bits())
    mujoco().mj_forward(sim.model, data)
    return data
