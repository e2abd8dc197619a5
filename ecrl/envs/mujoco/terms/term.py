"""Types of the terms of a task, and settings that several terms share.

To define a term, register a function `make(cfg, sim)`, where `cfg` holds the term's settings and `sim` is a
`Simulation`. `make` returns a pure function of the task's state, or an `ActionTerm` or `IntegerTerm` that contains such
a function. The module `ecrl.envs.mujoco.task_step` describes the state.
"""

from collections.abc import Callable
from math import inf, pi
from typing import Annotated, NamedTuple, cast

from pydantic import AfterValidator, Field, model_validator
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
"""Function that maps (state, entry) to a new entry. In mode add, the argument `entry` is None.

The new entry is float32 `[*B, ...]`, a uint8 image `[*B, h, w, c]`, or, in an `IntegerTerm`, int64 `[*B, n]`. The state
may have a bool field `needed`, `[*B]`. The new entry is then used only where `needed` is True, so a slow term may skip
all other environments.
"""

Reward = Callable[[TensorDict, TensorDict], Tensor]
"""Function that maps (state before the step, state after the step) to an unweighted reward, float32 `[*B]`."""


class IntegerTerm(NamedTuple):
    """An observation term whose entry has integers, int64 `[*B, len(sizes)]`, such as the ids of words.

    Element i of the entry is between 0 and sizes[i] - 1.
    """

    observe: Observe
    sizes: tuple[int, ...]


class ActionTerm(NamedTuple):
    """An action term: the joints that it drives, the bounds of its action, and its function `control(state, action)`.

    The function `control` maps an action, `[*B, len(low)]`, to a control, `[*B, len(joints)]`. `drive` defines the
    meaning of the control: target positions, target velocities or forces, in units of m, rad, s and N. Target positions
    are clamped to the joint limits.
    """

    joints: tuple[str, ...]
    drive: Drive
    low: tuple[float, ...]
    high: tuple[float, ...]
    control: Callable[[TensorDict, Tensor], Tensor]


class EntityConfig(ConfigModel):
    """Config that names an object or a robot of the scene."""

    uid: str = Field(min_length=1, description="name of the object or robot")


def _distinct(entities: tuple[EntityConfig, ...]) -> tuple[EntityConfig, ...]:
    uids = [entity.uid for entity in entities]
    for uid in uids:
        if uids.count(uid) > 1:
            raise ValueError(f"names {uid!r} twice; name each object once")
    return entities


Entities = Annotated[tuple[EntityConfig, ...], Field(strict=False, min_length=1), AfterValidator(_distinct)]
"""Objects of the scene, without duplicates."""


class JointsConfig(ConfigModel):
    """Settings that select joints of the robot.

    By default, all joints of the robot are selected, or all joints of `env.cfg.control_parts` if this key is set.
    """

    robot_uid: str | None = Field(None, description="name of the robot")
    part_name: str | None = Field(None, description="part of the robot whose joints are used")
    joint_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)] | None = Field(
        None,
        description="indices of joints, from 0, among all joints of the robot, or among the joints of the parts in "
        "env.cfg.control_parts if this key is set",
    )

    @model_validator(mode="after")
    def _one_way(self) -> "JointsConfig":
        if self.part_name is not None and self.joint_ids is not None:
            raise ValueError("part_name and joint_ids both select joints; keep one")
        if self.joint_ids is not None and len(set(self.joint_ids)) < len(self.joint_ids):
            raise ValueError(f"joint_ids: {list(self.joint_ids)} names a joint twice; name each joint once")
        return self


def new_entry(value: Tensor | None, entry: Tensor) -> Tensor:
    """Return `entry`, the new entry of a term.

    Raises: ConfigError if the mode is modify. In this mode, `value` is the existing entry.
    """
    if value is not None:
        raise ConfigError("mode: this term makes a new entry; use mode add")
    return entry


def part_of(sim: Simulation, name: str, setting: str = "params.part_name") -> tuple[str, ...]:
    """Return the names of the joints in a part of the robot.

    Raises: ConfigError that names `setting` if the robot does not have the part.
    """
    if name not in sim.robot.parts:
        raise ConfigError(f"{setting}: unknown part {name!r}; {did_you_mean(name, sim.robot.parts)}")
    return sim.robot.parts[name]


def tcp_of(sim: Simulation, part: str, setting: str = "params.part_name") -> str:
    """Return the name of the site at the end effector of a part of the robot.

    Raises: ConfigError that names `setting` if the part has no end effector.
    """
    if part not in sim.robot.tcp:
        fault = f"no end effector of {part!r}; {did_you_mean(part, sim.robot.tcp)}"
        raise ConfigError(f"{setting}: {fault}; robot.solver_cfg adds end effectors")
    return sim.robot.tcp[part]


def object_of(sim: Simulation, entity: EntityConfig, key: str) -> str:
    """Return `entity.uid`. If the scene has no body of this name, raise a ConfigError that names the setting `key`."""
    known = [sim.model.body(i).name for i in range(1, sim.model.nbody)]
    if entity.uid not in known:
        raise ConfigError(f"params.{key}.uid: unknown object {entity.uid!r}; {did_you_mean(entity.uid, known)}")
    return entity.uid


def joints_of(cfg: JointsConfig, sim: Simulation) -> tuple[str, ...]:
    """Return the names of the joints that the settings of a term select."""
    known = sim.robot.joints
    if cfg.robot_uid is not None and not all(name.startswith(f"{cfg.robot_uid}/") for name in known):
        raise ConfigError(f"params.robot_uid: no robot {cfg.robot_uid!r}; known joints: {', '.join(known) or 'none'}")
    if not known:
        raise ConfigError("this term needs a robot's joints, but the scene has no robot; add a robot")
    if cfg.part_name is not None:
        return part_of(sim, cfg.part_name)
    for i in cfg.joint_ids or ():
        if i >= len(known):
            raise ConfigError(f"params.joint_ids: {i}, but there are {len(known)} joints: {', '.join(known) or 'none'}")
    return known if cfg.joint_ids is None else tuple(known[i] for i in cfg.joint_ids)


def named_joints(sim: Simulation, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the full names of the joints `names`, in the same order.

    The full name of a joint of a robot from the config begins with the name of the robot, as in `robot/elbow_joint`.
    `names` are given without this prefix.

    Raises: ConfigError that names the setting `joint_names` if a joint is unknown or named twice.
    """
    known = {joint.partition("/")[2] or joint: joint for joint in sim.robot.joints}
    for name in names:
        if name not in known:
            raise ConfigError(f"params.joint_names: unknown joint {name!r}; {did_you_mean(name, known)}")
        if names.count(name) > 1:
            raise ConfigError(f"params.joint_names: names joint {name!r} twice; name each joint once")
    return tuple(known[name] for name in names)


def ranges_of(sim: Simulation, joints: tuple[str, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the lowest and the highest positions of joints. For a hinge without limits, return -pi and pi.

    Raises: ConfigError if a slide has no limits.
    """
    low, high = world.joint_limits(sim, joints)
    slide = int(mujoco().mjtJoint.mjJNT_SLIDE)
    for name, bound in zip(joints, high, strict=True):
        if bound == inf and sim.model.joint(name).type[0] == slide:
            raise ConfigError(f"joint {name!r} has no limits, which this term needs; give the joint a range")
    return tuple(max(x, -pi) if x == -inf else x for x in low), tuple(pi if x == inf else x for x in high)


def target(state: TensorDict, key: str, setting: str = "params.target_pose_key") -> Tensor:
    """Return the position `[*B, 3]` (m) of the target with the name `key`, which an event stored.

    Raises: ConfigError that names `setting` if no target has this name, or if the target does not have 3 elements.
    """
    known = [str(name) for name, _ in cast(TensorDict, state["targets"]).items()] if "targets" in state else []
    if key not in known:
        fault = f"no target {key!r}; an event such as randomize_target_pose stores a target under its store_key"
        raise ConfigError(f"{setting}: {fault}; {did_you_mean(key, known)}")
    position = state["targets", key]
    if (size := position.shape[-1]) != 3:
        fault = f"target {key!r} has {size} elements, expected 3, the x, y and z of a position in m"
        raise ConfigError(f"{setting}: {fault}; name another target, or store a position as {key!r}")
    return position
