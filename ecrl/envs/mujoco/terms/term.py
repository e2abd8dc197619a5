"""What terms of a task are, and what their settings share.

Terms are registered functions `make(cfg, sim)` of a Config model and a `Simulation`; what they make is a pure function
of the task's state (`ecrl.envs.mujoco.task_step`).
"""

from collections.abc import Callable
from math import inf, pi
from typing import Annotated, NamedTuple, cast

from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.robots.robot import Drive
from ecrl.envs.mujoco.scene.models import mujoco
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean

Observe = Callable[[TensorDict, Tensor | None], Tensor]
"""(state, value of the entry if it is modified) -> the entry of the observation, float32 `[*B, ...]`."""

Reward = Callable[[TensorDict, TensorDict], Tensor]
"""(state before the step, state after it) -> reward, float32 `[*B]`, without its weight."""


class ActionTerm(NamedTuple):
    """A part of the action: the joints that it drives and how, its bounds, and `(state, action) -> control`.

    The action is `[*B, len(low)]`, the control `[*B, len(joints)]`: target positions, which are clamped to the joints'
    limits, or target velocities or forces, as `drive` says; m, rad, s, N.
    """

    joints: tuple[str, ...]
    drive: Drive
    low: tuple[float, ...]
    high: tuple[float, ...]
    control: Callable[[TensorDict, Tensor], Tensor]


class EntityConfig(ConfigModel):
    """An object of the scene."""

    uid: str = Field(min_length=1, description="its name")


class JointsConfig(ConfigModel):
    """Which joints of the robot; all if nothing is said."""

    robot_uid: str | None = Field(None, description="name of the robot")
    part_name: str | None = Field(None, description="the joints of this part of the robot")
    joint_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="places in the list of joints, from 0; in that of env.cfg.control_parts, where it is given"
    )

    @model_validator(mode="after")
    def _one_way(self) -> "JointsConfig":
        if self.part_name is not None and self.joint_ids is not None:
            raise ValueError("part_name and joint_ids both say which joints; keep one")
        if self.joint_ids is not None and len(set(self.joint_ids)) < len(self.joint_ids):
            raise ValueError(f"joint_ids: {list(self.joint_ids)} names a joint twice; name each once")
        return self


def part_of(sim: Simulation, name: str) -> tuple[str, ...]:
    """The joints of a part of the robot."""
    if name not in sim.robot.parts:
        raise ConfigError(f"params.part_name: unknown part {name!r}; {did_you_mean(name, sim.robot.parts)}")
    return sim.robot.parts[name]


def tcp_of(sim: Simulation, part: str) -> str:
    """The site of a part's end effector."""
    if part not in sim.robot.tcp:
        told = f"no end effector of {part!r}; {did_you_mean(part, sim.robot.tcp)}"
        raise ConfigError(f"params.part_name: {told}; robot.solver_cfg gives a part one")
    return sim.robot.tcp[part]


def object_of(sim: Simulation, entity: EntityConfig, key: str) -> str:
    """The body of the object that the setting `key` of a term names."""
    known = [sim.model.body(i).name for i in range(1, sim.model.nbody)]
    if entity.uid not in known:
        raise ConfigError(f"params.{key}.uid: unknown object {entity.uid!r}; {did_you_mean(entity.uid, known)}")
    return entity.uid


def joints_of(cfg: JointsConfig, sim: Simulation) -> tuple[str, ...]:
    """The joints that the settings of a term choose."""
    known = sim.robot.joints
    if cfg.robot_uid is not None and not all(name.startswith(f"{cfg.robot_uid}/") for name in known):
        raise ConfigError(f"params.robot_uid: no robot {cfg.robot_uid!r}; its joints are {', '.join(known) or 'none'}")
    if not known:
        raise ConfigError("this term is of a robot's joints, and the scene has none; give it a robot")
    if cfg.part_name is not None:
        return part_of(sim, cfg.part_name)
    for i in cfg.joint_ids or ():
        if i >= len(known):
            raise ConfigError(f"params.joint_ids: {i}, but there are {len(known)} joints: {', '.join(known) or 'none'}")
    return known if cfg.joint_ids is None else tuple(known[i] for i in cfg.joint_ids)


def ranges_of(sim: Simulation, joints: tuple[str, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Finite limits of joints: a hinge that turns freely has +-pi. ConfigError for a slide without limits."""
    low, high = world.joint_limits(sim, joints)
    slide = int(mujoco().mjtJoint.mjJNT_SLIDE)
    for name, bound in zip(joints, high, strict=True):
        if bound == inf and sim.model.joint(name).type[0] == slide:
            raise ConfigError(f"joint {name!r} has no limits that positions could be scaled by; give it a range")
    return tuple(max(x, -pi) if x == -inf else x for x in low), tuple(pi if x == inf else x for x in high)


def target(state: TensorDict, key: str) -> Tensor:
    """A target of the task that an event stores, a position `[*B, 3]`, m."""
    known = [str(name) for name, _ in cast(TensorDict, state["targets"]).items()] if "targets" in state else []
    if key not in known:
        told = f"no target {key!r}; an event such as randomize_target_pose stores one by its store_key"
        raise ConfigError(f"params.target_pose_key: {told}; {did_you_mean(key, known)}")
    place = state["targets", key]
    if (many := place.shape[-1]) != 3:
        told = f"target {key!r} has {many} numbers, expected 3, x y z of a position, m"
        raise ConfigError(f"params.target_pose_key: {told}; name another, or let its event store a position")
    return place
