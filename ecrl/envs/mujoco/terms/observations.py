"""Terms of the observation: poses and velocities of the robot and of objects, targets, and joints scaled by limits.

All are of the world's frame and float32. A pose is a homogeneous 4x4 matrix, rotation and position in m.
"""

from typing import Annotated

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation, start
from ecrl.envs.mujoco.scene.config import Real
from ecrl.envs.mujoco.terms.term import (
    EntityConfig,
    JointsConfig,
    Observe,
    joints_of,
    object_of,
    ranges_of,
    target,
    tcp_of,
)
from ecrl.errors import ConfigError
from ecrl.registry import register_observation


class NormalizeJointsConfig(JointsConfig):
    """Which joints of the entry are scaled, and to what."""

    range: Annotated[tuple[Real, Real], Field(strict=False)] = Field(
        (0.0, 1.0), description="what the lower and the upper limit of a joint become"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "NormalizeJointsConfig":
        if self.range[0] >= self.range[1]:
            raise ValueError(f"range: {self.range[0]} is not below {self.range[1]}")
        return self


class EefConfig(ConfigModel):
    """An end effector."""

    part_name: str = Field("arm", description="the part of the robot whose end effector it is")


class RobotEefPoseConfig(EefConfig):
    """The pose of an end effector."""

    position_only: bool = Field(False, description="the position alone, x y z in m, instead of a 4x4 matrix")


class ObjectConfig(ConfigModel):
    """An object."""

    entity_cfg: EntityConfig = Field(description="the object")


class ObjectPoseConfig(ObjectConfig):
    """The pose of an object."""

    position_only: bool = Field(False, description="the position alone, x y z in m, instead of a 4x4 matrix")


class TargetPositionConfig(ConfigModel):
    """A target."""

    target_pose_key: str = Field("goal_pose", min_length=1, description="the store_key of the event that sets it")


def _added(value: Tensor | None, entry: Tensor) -> Tensor:
    """The new entry, refused where there was to be a changed one."""
    if value is not None:
        raise ConfigError("mode: this term makes a new entry; use mode add")
    return entry


def _given(state: TensorDict, value: Tensor | None, joints: tuple[str, ...]) -> Tensor:
    """The entry to be changed, refused where it has not one number for each joint."""
    if value is None:
        raise ConfigError("mode: this term changes an entry that is there; use mode modify")
    if value.shape[state.batch_dims :] != (len(joints),):
        told = f"name: this term is for an entry with one number for each joint: {', '.join(joints)}"
        raise ConfigError(f"{told}; this one has shape {list(value.shape[state.batch_dims :])}")
    return value


@register_observation("normalize_robot_joint_data")
def normalize_robot_joint_data(cfg: NormalizeJointsConfig, sim: Simulation) -> Observe:
    """Joints scaled by their limits, in an entry with a number for each joint such as robot/qpos; mode modify.

        value'[j] = a + (b - a) (value[j] - low[j]) / (high[j] - low[j]),  (a, b) = range

    `[*B, J]`, 1 for rad or m. A hinge without limits has +-pi. Numbers of joints that are not chosen stay.
    """
    known, chosen = sim.robot.joints, joints_of(cfg, sim)
    if others := [name for name in chosen if name not in known]:
        told = f"params.part_name: {', '.join(others)} are not among the observed joints, {', '.join(known)}"
        raise ConfigError(f"{told}; see control_parts")
    limits = dict(zip(chosen, zip(*ranges_of(sim, chosen), strict=True), strict=True))
    (low, high), (first, last) = zip(*(limits.get(name, (0.0, 1.0)) for name in known), strict=True), cfg.range
    scaled = [name in limits for name in known]

    def observe(state: TensorDict, value: Tensor | None) -> Tensor:
        given = _given(state, value, known)
        share = (given - given.new_tensor(low)) / (given.new_tensor(high) - given.new_tensor(low))
        return torch.where(torch.tensor(scaled, device=given.device), first + (last - first) * share, given)

    return observe


@register_observation("get_robot_eef_pose")
def get_robot_eef_pose(cfg: RobotEefPoseConfig, sim: Simulation) -> Observe:
    """The pose of an end effector, `[*B, 4, 4]`, or its position `[*B, 3]`, m; mode add."""
    site, position_only = tcp_of(sim, cfg.part_name), cfg.position_only

    def observe(state: TensorDict, value: Tensor | None) -> Tensor:
        pose = world.site_pose(sim, state["world"], site)
        return _added(value, pose[..., :3, 3] if position_only else pose)

    return observe


@register_observation("get_rigid_object_pose")
def get_rigid_object_pose(cfg: ObjectPoseConfig, sim: Simulation) -> Observe:
    """The pose of an object, `[*B, 4, 4]`, or its position `[*B, 3]`, m; mode add."""
    body, position_only = object_of(sim, cfg.entity_cfg, "entity_cfg"), cfg.position_only

    def observe(state: TensorDict, value: Tensor | None) -> Tensor:
        pose = world.body_pose(sim, state["world"], body)
        return _added(value, pose[..., :3, 3] if position_only else pose)

    return observe


@register_observation("target_position")
def target_position(cfg: TargetPositionConfig, sim: Simulation) -> Observe:
    """A target that an event stores, `[*B, 3]`, m; mode add."""
    return lambda state, value: _added(value, target(state, cfg.target_pose_key))


@register_observation("get_rigid_object_velocity")
def get_rigid_object_velocity(cfg: ObjectConfig, sim: Simulation) -> Observe:
    """The linear and the angular velocity of a dynamic object at its centre, `[*B, 6]`, m/s and rad/s; mode add."""
    body = object_of(sim, cfg.entity_cfg, "entity_cfg")
    try:
        world.body_velocity(sim, start(sim, ()), body)
    except ConfigError as error:
        raise ConfigError(f"params.entity_cfg.uid: {error}") from None

    def observe(state: TensorDict, value: Tensor | None) -> Tensor:
        return _added(value, torch.cat(world.body_velocity(sim, state["world"], body), -1))

    return observe


def _leading_to(sim: Simulation, site: str) -> tuple[str, ...]:
    """The joints between the world and a site, those that no action drives too."""
    model, names = sim.model, []
    body = int(model.site(site).bodyid[0])
    while body:
        first = int(model.body_jntadr[body])
        names += [model.joint(i).name for i in range(first, first + int(model.body_jntnum[body]))]
        body = int(model.body_parentid[body])
    return tuple(names)


@register_observation("get_robot_eef_velocity")
def get_robot_eef_velocity(cfg: EefConfig, sim: Simulation) -> Observe:
    """The linear and the angular velocity of an end effector, `[*B, 6]`, m/s and rad/s; mode add.

    velocity = J(q) dq/dt
    """
    site = tcp_of(sim, cfg.part_name)
    joints = _leading_to(sim, site)
    world.joint_velocities(sim, start(sim, ()), joints)  # refuses a robot that moves otherwise, such as on a free base

    def observe(state: TensorDict, value: Tensor | None) -> Tensor:
        slope = world.site_jacobian(sim, state["world"], site, joints)
        speed = world.joint_velocities(sim, state["world"], joints)
        return _added(value, (slope * speed.unsqueeze(-2)).sum(-1))

    return observe
