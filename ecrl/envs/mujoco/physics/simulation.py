"""Worlds and their steps: a world is a TensorDict with all that a simulation carries, `advance` a pure function of it.

A world `[*B]` has `physics` (float64, the state of `ecrl.envs.mujoco.physics.step_op`), `sensors` (float32, of the last
substep) where the scene has any, and `parameters` (float64) where models differ between environments. What is in it
is read and written by `ecrl.envs.mujoco.world`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.envs.mujoco.physics import step_op, warp_model
from ecrl.envs.mujoco.robots.robot import Drive, Robot
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.mujoco.scene.models import STATE, Backend, Varied, load, loaded, mujoco, rows_of, size_of
from ecrl.envs.mujoco.scene.scene import build
from ecrl.errors import ConfigError

_SUBSTEPS = 4  # of 0.01 s: 25 steps of the environment per second
_HUGE = 1e10  # what MuJoCo itself calls a bad number


@dataclass(frozen=True, eq=False)
class Simulation:
    """A scene ready to be stepped; equal configs give the same object.

    model: MuJoCo's. robot: names of its joints, parts and end effectors. handle: of the model, for `step_op.step`.
    substeps: physics steps per step of the environment. nu, nv: actuators and degrees of freedom. home: MuJoCo's data
    at the start. varied: what of the model differs between environments. row, sensors, parameters: of a world at the
    start.
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
        """Seconds per step of the environment."""
        return self.substeps * self.model.opt.timestep

    @property
    def backend(self) -> Backend:
        """What steps it: "mujoco", on the CPU alone, or "warp"."""
        return loaded(self.handle).backend


def _state_bits() -> int:
    return sum(getattr(mujoco().mjtState, f"mjSTATE_{name}").value for name in STATE)


def _substeps(cfg: SceneConfig, dt: float) -> int:
    """Physics steps of `dt` seconds per step of the environment."""
    if cfg.target_control_frequency is None:
        return cfg.sim_steps_per_control or _SUBSTEPS
    exact = 1.0 / max(cfg.target_control_frequency * dt, 1e-300)
    if not 0.5 < exact < 10_000.5 or abs(exact - round(exact)) > 1e-6 * exact:
        told = f"{cfg.target_control_frequency} Hz is {exact:.6g} physics steps of {dt} s, no whole number up to 10,000"
        raise ConfigError(f"target_control_frequency: {told}; change it or physics.dt")
    return round(exact)


@cache
def simulation(cfg: SceneConfig, drives: tuple[tuple[str, Drive], ...] = (), varied: Varied = ()) -> Simulation:
    """The simulation of a scene; its files are read once in a process.

    Args:
        cfg: the scene.
        drives: what the controls of joints are, where not target positions: `(("elbow_joint", "velocity"),)`.
        varied: fields of the model that differ between environments, each with the name of its object, such as
            `(("body_mass", "cube"), ("body_inertia", "cube"), ("geom_friction", "cube"))`.

    Raises: ConfigError, as `ecrl.envs.mujoco.scene.scene.build`, and for what the backend cannot do.
    """
    scene = build(cfg, dict(drives))
    model, data = scene.model, scene.data
    if cfg.physics.backend == "warp":
        warp_model.check(model, varied)
    row = np.empty(size_of(model, *STATE))
    mujoco().mj_getState(model, data, row, _state_bits())
    probe = mujoco().MjData(model)
    mujoco().mj_setState(model, probe, row, _state_bits())
    probe.ctrl[:] = data.ctrl
    mujoco().mj_forward(model, probe)
    numbers = [getattr(model, field).ravel()[rows_of(model, field, name)] for field, name in varied]
    parameters = np.concatenate([np.zeros(0), *numbers])
    handle = load(model, cfg.physics.threads, varied, cfg.physics.backend)
    sensors = probe.sensordata.astype(np.float32)
    sizes = _substeps(cfg, model.opt.timestep), model.nu, model.nv
    return Simulation(model, scene.robot, handle, *sizes, data, varied, row, sensors, parameters)


def start(sim: Simulation, batch: Sequence[int], device: torch.device | str | None = None) -> TensorDict:
    """Worlds `[*batch]` at the start: the robot at home and held there, objects where the scene puts them."""
    fields = {"physics": sim.row, "sensors": sim.sensors, "parameters": sim.parameters}
    batch = torch.Size(batch)
    tensors = {name: torch.from_numpy(row).to(device) for name, row in fields.items() if row.size}
    return TensorDict({name: row.expand(*batch, -1).clone() for name, row in tensors.items()}, batch)


def _inputs(sim: Simulation, world: TensorDict, control: Tensor, force: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """State, control and parameters, as `step_op.step` takes them."""
    row, batch = world["physics"], world.batch_size
    force = row.new_zeros(torch.Size((*batch, sim.nv))) if force is None else force.double()
    parameters = world["parameters"] if sim.varied else row.new_zeros(torch.Size((*batch, 0)))
    return row, torch.cat((control.double(), force), -1), parameters


def advance(
    sim: Simulation, world: TensorDict, control: Tensor, force: Tensor | None = None
) -> tuple[TensorDict, Tensor]:
    """Worlds after one step of the environment, and which of them could not take it.

    Args:
        sim: the simulation.
        world: `[*B]`.
        control: `[*B, nu]` float, of the actuators, held during the step.
        force: `[*B, nv]` float, along the degrees of freedom, N or N m; see `push`. None for none.

    Returns: the worlds, and bool `[*B]`: where the control, or a number of the state after it, is not finite or above
        1e10. Such a world is given back as it was; end its episode.
    Gradient: none; ValueError where one would be lost.
    """
    given, inputs = world["physics"], _inputs(sim, world, control, force)
    after, sensors = step_op.step(*inputs, handle=sim.handle, substeps=sim.substeps)
    sound = (after.abs() < _HUGE).all(-1) & (inputs[1].abs() < _HUGE).all(-1)
    fields = {"physics": torch.where(sound.unsqueeze(-1), after, given)}
    if "sensors" in world:
        fields["sensors"] = torch.where(sound.unsqueeze(-1), sensors.float(), world["sensors"])
    return world.copy().update(fields), ~sound


def sensed(sim: Simulation, world: TensorDict, control: Tensor) -> TensorDict:
    """Worlds with the sensors of the very state they are in, under a control `[*B, nu]`: one `mj_forward`."""
    _, sensors = step_op.step(*_inputs(sim, world, control, None), handle=sim.handle, substeps=0)
    return world.copy().set("sensors", sensors.float())


def to_data(sim: Simulation, row: Tensor, data: Any = None) -> Any:
    """One row `[nstate]` of `physics` as MuJoCo's data with everything worked out, to be rendered or looked into."""
    data = mujoco().MjData(sim.model) if data is None else data
    mujoco().mj_setState(sim.model, data, row.double().cpu().numpy(), _state_bits())
    mujoco().mj_forward(sim.model, data)
    return data
