"""Terms of tasks with a gripper: an action, observations and rewards.

The fingers of a gripper are the bodies moved by the joints of the robot part `hand`, and by the joints that follow
these joints. If there is only one such body, its parent is the second finger. An object is grasped if two fingers press
on it from opposite sides:

    grasped  = |f[i]| >= w  and  |f[j]| >= w  and  f[i] . f[j] < 0        for two fingers i, j
    released = |f[i]| = 0                                                 for all fingers i

The force f[i] of finger i on the object (N) is the sum of all contact forces in the last physics step. The weight w of
the object (N) follows from its mass in the scene config. Forces below w do not count as a grasp. With friction 1, two
forces below w / 2 cannot lift the object. A reward for such forces would teach a policy only to touch the object.

Before the first step of an episode, f[i] is the force in the scene's initial state, even if an event has moved the
object.
"""

from collections.abc import Callable
from typing import Annotated

import torch
from numpy.linalg import norm
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel, Positive
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.scene.config import Real, Triple
from ecrl.envs.mujoco.scene.scene import contact_sensor
from ecrl.envs.mujoco.terms.term import (
    ActionTerm,
    EntityConfig,
    Observe,
    Reward,
    new_entry,
    object_of,
    part_of,
    target,
    tcp_of,
)
from ecrl.envs.scaling import LENGTH, PER_LENGTH
from ecrl.errors import ConfigError
from ecrl.registry import register_action, register_observation, register_reward

_NO_FORCE = 1e-9  # N
_Positions = Annotated[tuple[Real, ...], Field(strict=False, min_length=1)]


class OpenCloseConfig(ConfigModel):
    """Settings of `GripperTerm`: the gripper, and its joint positions when it is open and when it is closed."""

    part_name: str = Field("hand", description="part of the robot that is the gripper")
    open_qpos: _Positions | None = Field(
        None, description="joint positions of the open gripper, m or rad; by default, as the robot defines"
    )
    closed_qpos: _Positions | None = Field(
        None, description="joint positions of the closed gripper, m or rad; by default, as the robot defines"
    )

    @model_validator(mode="after")
    def _both(self) -> "OpenCloseConfig":
        if (self.open_qpos is None) != (self.closed_qpos is None):
            raise ValueError("open_qpos and closed_qpos belong together; give both or none")
        return self


class GraspedObjectConfig(ConfigModel):
    """Settings of a term about the grasp of an object."""

    object_cfg: EntityConfig = Field(description="the object, which must be dynamic")


class EefToObjectConfig(ConfigModel):
    """Settings of a term about an end effector and an object."""

    object_cfg: EntityConfig = Field(description="the object")
    part_name: str = Field("arm", description="part of the robot that has the end effector")


class ReachingObjectConfig(EefToObjectConfig):
    """Settings of `reaching_object`."""

    distance_scale: Annotated[Positive, PER_LENGTH] = Field(
        5.0, description="factor k of the distance in the reward, 1/m"
    )


class ObjectToTargetConfig(ConfigModel):
    """Settings of a term about an object and its target. An event or another object defines the target."""

    object_cfg: EntityConfig = Field(description="the object")
    target_pose_key: str = Field(
        "goal_pose", min_length=1, description="store_key of the event that sets the target; not used with target_cfg"
    )
    target_cfg: EntityConfig | None = Field(None, description="object whose centre + offset is the target")
    offset: Annotated[Triple, LENGTH] = Field(
        (0.0, 0.0, 0.0), description="x y z from the centre of target_cfg to the target, m"
    )


class NearTargetConfig(ObjectToTargetConfig):
    """Settings of `object_near_target` and `grasped_object_to_target`."""

    distance_scale: Annotated[Positive, PER_LENGTH] = Field(
        5.0, description="factor k of the distance in the reward, 1/m"
    )


def _forces(sim: Simulation, worlds: TensorDict, uid: str) -> Tensor:
    """Return the force of each finger on an object, `[*B, fingers, 3]` (N)."""
    return torch.stack([world.sensor(sim, worlds, contact_sensor(f, uid)) for f in sim.robot.fingers], -2)


def is_released(sim: Simulation, worlds: TensorDict, uid: str) -> Tensor:
    """Return True for each world where no finger touches an object, bool `[*B]`."""
    return (torch.linalg.vector_norm(_forces(sim, worlds, uid), dim=-1) < _NO_FORCE).all(-1)


def is_grasped(sim: Simulation, worlds: TensorDict, uid: str) -> Tensor:
    """Return True for each world where two fingers press on an object from opposite sides, bool `[*B]`.

    The module docstring has the equation. Call `check_graspable` first, to check that the scene has the sensors.
    """
    forces, weight = _forces(sim, worlds, uid), float(sim.model.body(uid).mass[0] * norm(sim.model.opt.gravity))
    presses = torch.linalg.vector_norm(forces, dim=-1) >= max(weight, _NO_FORCE)
    opposite = forces @ forces.mT < 0.0
    return (opposite & presses.unsqueeze(-1) & presses.unsqueeze(-2)).flatten(-2).any(-1)


_NO_GRIPPER = "the robot has no gripper; add a component hand to robot.urdf_cfg, or a part hand to robot.control_parts"


def check_graspable(sim: Simulation, uid: str, key: str) -> None:
    """Raise ConfigError, which names the setting `key`, if the robot lacks two fingers or the object is not dynamic."""
    if len(sim.robot.fingers) < 2:
        raise ConfigError(f"{key}: {_NO_GRIPPER}")
    try:
        sim.model.sensor(contact_sensor(sim.robot.fingers[0], uid))
    except KeyError:
        raise ConfigError(f"{key}: {uid!r} is not a dynamic object of the scene config; choose another") from None


def _graspable(sim: Simulation, entity: EntityConfig) -> str:
    uid = object_of(sim, entity, "object_cfg")
    check_graspable(sim, uid, "params.object_cfg.uid")
    return uid


def _to_target(cfg: ObjectToTargetConfig, sim: Simulation) -> Callable[[TensorDict], Tensor]:
    """Return a function that maps a state to the vector from the object to its target, `[*B, 3]` (m)."""
    uid = object_of(sim, cfg.object_cfg, "object_cfg")
    other = None if cfg.target_cfg is None else object_of(sim, cfg.target_cfg, "target_cfg")

    def to_target(state: TensorDict) -> Tensor:
        position = world.body_position(sim, state["world"], uid)
        if other is None:
            return target(state, cfg.target_pose_key) - position
        return world.body_position(sim, state["world"], other) + position.new_tensor(cfg.offset) - position

    return to_target


def _distance(offset: Tensor) -> Tensor:
    return torch.linalg.vector_norm(offset, dim=-1)


def _from_eef(sim: Simulation, state: TensorDict, site: str, uid: str) -> Tensor:
    """Return the vector from an end effector to the centre of an object, `[*B, 3]` (m)."""
    return world.body_position(sim, state["world"], uid) - world.site_pose(sim, state["world"], site)[..., :3, 3]


def _ends(
    cfg: OpenCloseConfig, sim: Simulation, joints: tuple[str, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the joint positions of the open and of the closed gripper.

    Raises: ConfigError if neither the settings nor the robot define the positions of all joints.
    """
    if cfg.open_qpos is None or cfg.closed_qpos is None:
        if unknown := [name for name in joints if name not in sim.robot.grip]:
            fault = f"the robot does not define how joint {unknown[0]!r} opens and closes"
            raise ConfigError(f"params: {fault}; give open_qpos and closed_qpos")
        rows = [sim.robot.grip[name] for name in joints]
        return tuple(first for first, _ in rows), tuple(last for _, last in rows)
    for key, given in (("open_qpos", cfg.open_qpos), ("closed_qpos", cfg.closed_qpos)):
        if len(given) != len(joints):
            raise ConfigError(
                f"params.{key}: {len(given)} values for {len(joints)} joints: {', '.join(joints)}; give one per joint"
            )
    return cfg.open_qpos, cfg.closed_qpos


@register_action("GripperTerm")
def gripper(cfg: OpenCloseConfig, sim: Simulation) -> ActionTerm:
    """Open or close a gripper with one action a in [-1, 1], which sets the targets of all gripper joints (m or rad).

    target = closed + (1 + a) / 2 (open - closed)
    """
    if cfg.part_name == "hand" and "hand" not in sim.robot.parts:
        raise ConfigError(f"params.part_name: {_NO_GRIPPER}")
    joints = part_of(sim, cfg.part_name)
    world.actuators_of(sim, joints)
    opened, closed = _ends(cfg, sim, joints)

    def control(state: TensorDict, action: Tensor) -> Tensor:
        first, last = action.new_tensor(closed), action.new_tensor(opened)
        return first + 0.5 * (1.0 + action) * (last - first)

    return ActionTerm(joints, "position", (-1.0,), (1.0,), control)


@register_observation("get_eef_to_object")
def get_eef_to_object(cfg: EefToObjectConfig, sim: Simulation) -> Observe:
    """Observe the vector from an end effector to the centre of an object, `[*B, 3]` (m). Use this term in mode add."""
    site, uid = tcp_of(sim, cfg.part_name), object_of(sim, cfg.object_cfg, "object_cfg")
    return lambda state, value: new_entry(value, _from_eef(sim, state, site, uid))


@register_observation("get_object_to_target")
def get_object_to_target(cfg: ObjectToTargetConfig, sim: Simulation) -> Observe:
    """Observe the vector from the centre of an object to its target, `[*B, 3]` (m). Use this term in mode add."""
    to_target = _to_target(cfg, sim)
    return lambda state, value: new_entry(value, to_target(state))


@register_observation("get_object_grasped")
def get_object_grasped(cfg: GraspedObjectConfig, sim: Simulation) -> Observe:
    """Observe 1 if an object is grasped, and 0 otherwise, `[*B, 1]`. Use this term in mode add."""
    uid = _graspable(sim, cfg.object_cfg)
    return lambda state, value: new_entry(value, is_grasped(sim, state["world"], uid).float().unsqueeze(-1))


@register_reward("reaching_object")
def reaching_object(cfg: ReachingObjectConfig, sim: Simulation) -> Reward:
    """Return a reward `[*B]`, 0 to 1, that grows as the end effector nears the centre of an object.

    reward = 1 - tanh(k |eef - object|),  k = distance_scale, 1/m
    """
    site, uid = tcp_of(sim, cfg.part_name), object_of(sim, cfg.object_cfg, "object_cfg")
    return lambda before, after: 1.0 - torch.tanh(cfg.distance_scale * _distance(_from_eef(sim, after, site, uid)))


@register_reward("grasp_reward")
def grasp_reward(cfg: GraspedObjectConfig, sim: Simulation) -> Reward:
    """Return 1 for each environment whose gripper grasps the object after the step, and 0 for all others, `[*B]`."""
    uid = _graspable(sim, cfg.object_cfg)
    return lambda before, after: is_grasped(sim, after["world"], uid).float()


@register_reward("object_near_target")
def object_near_target(cfg: NearTargetConfig, sim: Simulation) -> Reward:
    """Return a reward `[*B]`, 0 to 1, that grows as an object nears its target.

    reward = 1 - tanh(k |object - target|),  k = distance_scale, 1/m
    """
    to_target = _to_target(cfg, sim)
    return lambda before, after: 1.0 - torch.tanh(cfg.distance_scale * _distance(to_target(after)))


@register_reward("grasped_object_to_target")
def grasped_object_to_target(cfg: NearTargetConfig, sim: Simulation) -> Reward:
    """Return a reward `[*B]`, 0 to 1, that grows as a grasped object nears its target, and is 0 without a grasp.

    reward = grasped (1 - tanh(k |object - target|)),  k = distance_scale, 1/m
    """
    uid, to_target = _graspable(sim, cfg.object_cfg), _to_target(cfg, sim)

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        near = 1.0 - torch.tanh(cfg.distance_scale * _distance(to_target(after)))
        return is_grasped(sim, after["world"], uid).float() * near

    return reward
