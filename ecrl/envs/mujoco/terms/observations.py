"""Observation terms for joint positions, for target positions, and for poses, velocities and properties of bodies.

Observations are float32. Poses, velocities and target positions are in the world frame. A pose is a homogeneous 4x4
matrix whose position is in m.
"""

from typing import Annotated

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation, start
from ecrl.envs.mujoco.robots.kinematics import quaternion_of
from ecrl.envs.mujoco.scene.config import Real
from ecrl.envs.mujoco.terms.ranges import look_up
from ecrl.envs.mujoco.terms.term import (
    EntityConfig,
    JointsConfig,
    Observe,
    joints_of,
    new_entry,
    object_of,
    ranges_of,
    target,
    tcp_of,
)
from ecrl.errors import ConfigError
from ecrl.registry import register_observation


class NormalizeJointsConfig(JointsConfig):
    """Settings of `normalize_robot_joint_data`: the joints to normalise, and the range of the result."""

    range: Annotated[tuple[Real, Real], Field(strict=False)] = Field(
        (0.0, 1.0), description="values of the lower and the upper limit of a joint after scaling"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "NormalizeJointsConfig":
        if self.range[0] >= self.range[1]:
            raise ValueError(f"range: {self.range[0]} is not below {self.range[1]}; give the lower value first")
        return self


class RobotQposConfig(JointsConfig):
    """Settings of `get_robot_qpos`: the joints, and the range of the result."""

    range: Annotated[tuple[Real, Real], Field(strict=False)] | None = Field(
        None, description="scaled values of a joint's lower and upper limit; if absent, positions are in rad or m"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "RobotQposConfig":
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError(f"range: {self.range[0]} is not below {self.range[1]}; give the lower value first")
        return self


class EefConfig(ConfigModel):
    """Settings of a term that observes an end effector."""

    part_name: str = Field("arm", description="part of the robot that has the end effector")


class RobotEefPoseConfig(EefConfig):
    """Settings of `get_robot_eef_pose`."""

    position_only: bool = Field(False, description="return only the position, x y z in m, instead of a 4x4 matrix")


class ObjectConfig(ConfigModel):
    """Settings of a term that observes an object."""

    entity_cfg: EntityConfig = Field(description="the object")


class ObjectPoseConfig(ObjectConfig):
    """Settings of `get_object_pose` and `get_rigid_object_pose`."""

    to_matrix: bool = Field(True, description="return a 4x4 matrix; false: x y z in m and the quaternion w x y z")

    position_only: bool = Field(False, description="return only the position, x y z in m; to_matrix then has no effect")


class TargetPositionConfig(ConfigModel):
    """Settings of `target_position`."""

    target_pose_key: str = Field("goal_pose", min_length=1, description="store_key of the event that sets the target")


def _joint_entry(state: TensorDict, value: Tensor | None, joints: tuple[str, ...]) -> Tensor:
    """Return `value`, the existing entry that a term modifies.

    Raises: ConfigError if the mode is add, or if the entry does not have one value per joint.
    """
    if value is None:
        raise ConfigError("mode: this term changes an existing entry; use mode modify")
    if value.shape[state.batch_dims :] != (len(joints),):
        expected = f"expected an entry with one value for each joint: {', '.join(joints)}"
        raise ConfigError(f"name: {expected}; this one has shape {list(value.shape[state.batch_dims :])}")
    return value


@register_observation("normalize_robot_joint_data")
def normalize_robot_joint_data(cfg: NormalizeJointsConfig, sim: Simulation) -> Observe:
    """Scale an entry such as robot/qpos from the joint limits to `range`. Requires `mode: "modify"`.

        value'[j] = a + (b - a) (value[j] - low[j]) / (high[j] - low[j]),  (a, b) = range

    The entry has one value per joint, `[*B, J]`. Scaled values have no unit. A hinge without limits is scaled as if its
    limits were -pi and pi. The values of joints that are not selected are unchanged.
    """
    known, chosen = sim.robot.joints, joints_of(cfg, sim)
    if others := [name for name in chosen if name not in known]:
        fault = f"params.part_name: {', '.join(others)} are not among the observed joints, {', '.join(known)}"
        raise ConfigError(f"{fault}; add the part to env.cfg.control_parts")
    limits = dict(zip(chosen, zip(*ranges_of(sim, chosen), strict=True), strict=True))
    (low, high), (first, last) = zip(*(limits.get(name, (0.0, 1.0)) for name in known), strict=True), cfg.range
    scaled = [name in limits for name in known]

    def observe(state: TensorDict, value: Tensor | None) -> Tensor:
        q = _joint_entry(state, value, known)
        fraction = (q - q.new_tensor(low)) / (q.new_tensor(high) - q.new_tensor(low))
        return torch.where(torch.tensor(scaled, device=q.device), first + (last - first) * fraction, q)

    return observe


@register_observation("get_robot_qpos")
def get_robot_qpos(cfg: RobotQposConfig, sim: Simulation) -> Observe:
    """Observe the positions of joints, `[*B, J]`, in rad or m, or scaled to `range`. Requires `mode: "add"`.

        value[j] = a + (b - a) (q[j] - low[j]) / (high[j] - low[j]),  (a, b) = range

    If positions are scaled, a hinge without limits is scaled as if its limits were -pi and pi.
    """
    joints = joints_of(cfg, sim)
    limits = None if cfg.range is None else ranges_of(sim, joints)

    def observe(state: TensorDict, value: Tensor | None) -> Tensor:
        q = world.joint_positions(sim, state["world"], joints)
        if cfg.range is None or limits is None:
            return new_entry(value, q)
        low, high = (q.new_tensor(limit) for limit in limits)
        return new_entry(value, cfg.range[0] + (cfg.range[1] - cfg.range[0]) * (q - low) / (high - low))

    return observe


@register_observation("get_robot_eef_pose")
def get_robot_eef_pose(cfg: RobotEefPoseConfig, sim: Simulation) -> Observe:
    """Observe the pose `[*B, 4, 4]` or the position `[*B, 3]` (m) of an end effector. Requires `mode: "add"`."""
    site, position_only = tcp_of(sim, cfg.part_name), cfg.position_only

    def observe(state: TensorDict, value: Tensor | None) -> Tensor:
        pose = world.site_pose(sim, state["world"], site)
        return new_entry(value, pose[..., :3, 3] if position_only else pose)

    return observe


@register_observation("get_object_pose")
@register_observation("get_rigid_object_pose")
def get_object_pose(cfg: ObjectPoseConfig, sim: Simulation) -> Observe:
    """Observe the pose of an object, of the robot's base or of a link. Requires `mode: "add"`.

    The entry is a matrix `[*B, 4, 4]`. If `to_matrix` is false, the entry is the position (m) and the quaternion
    w x y z with w >= 0, `[*B, 7]`. If `position_only` is set, the entry is the position (m), `[*B, 3]`.
    """
    body = object_of(sim, cfg.entity_cfg, "entity_cfg")

    def observe(state: TensorDict, value: Tensor | None) -> Tensor:
        pose = world.body_pose(sim, state["world"], body)
        position = pose[..., :3, 3]
        if cfg.position_only:
            return new_entry(value, position)
        return new_entry(value, pose if cfg.to_matrix else torch.cat((position, quaternion_of(pose)), -1))

    return observe


@register_observation("get_object_body_scale")
def get_object_body_scale(cfg: ObjectConfig, sim: Simulation) -> Observe:
    """Observe the size of an object divided by its size in the scene, along x, y and z, `[*B, 3]`, without a unit.

    The entry is 1 unless `randomize_rigid_object_scale` or `randomize_rigid_objects_scale` changes the size. Requires
    `mode: "add"`.
    """
    uid = object_of(sim, cfg.entity_cfg, "entity_cfg")
    look_up("entity_cfg.uid", lambda: world.body_scale(sim, start(sim, ()), uid))
    return lambda state, value: new_entry(value, world.body_scale(sim, state["world"], uid))


@register_observation("get_rigid_object_physics_attributes")
def get_rigid_object_physics_attributes(cfg: ObjectConfig, sim: Simulation) -> Observe:
    """Observe the damping, friction, inertia and mass of a dynamic object, `[*B, 6]`.

        [damping rate of the velocity (1/s), coefficient of sliding friction, inertia x y z (kg m^2), mass (kg)]

    The values include the changes by events such as `randomize_rigid_object_mass`. Requires `mode: "add"`.
    """
    uid = object_of(sim, cfg.entity_cfg, "entity_cfg")
    look_up("entity_cfg.uid", lambda: world.push(sim, uid, torch.zeros(3)))
    fields = ("dof_damping", "geom_friction", "body_inertia", "body_mass")
    look_up("entity_cfg.uid", lambda: world.field_value(sim, start(sim, ()), "geom_friction", uid))

    def observe(state: TensorDict, value: Tensor | None) -> Tensor:
        damping, friction, inertia, mass = (world.field_value(sim, state["world"], field, uid) for field in fields)
        return new_entry(value, torch.cat((damping[..., :1] / mass, friction[..., :1], inertia, mass), -1))

    return observe


@register_observation("target_position")
def target_position(cfg: TargetPositionConfig, sim: Simulation) -> Observe:
    """Observe a target position that an event stores, `[*B, 3]` (m). Requires `mode: "add"`."""
    return lambda state, value: new_entry(value, target(state, cfg.target_pose_key))


@register_observation("get_rigid_object_velocity")
def get_rigid_object_velocity(cfg: ObjectConfig, sim: Simulation) -> Observe:
    """Observe the velocity of a dynamic object in the world frame, `[*B, 6]`.

    The first three values are the linear velocity of the body's origin (m/s). The last three values are the angular
    velocity (rad/s).

    Requires `mode: "add"`.
    """
    body = object_of(sim, cfg.entity_cfg, "entity_cfg")
    try:
        world.body_velocity(sim, start(sim, ()), body)
    except ConfigError as error:
        raise ConfigError(f"params.entity_cfg.uid: {error}") from None

    def observe(state: TensorDict, value: Tensor | None) -> Tensor:
        return new_entry(value, torch.cat(world.body_velocity(sim, state["world"], body), -1))

    return observe


@register_observation("get_robot_eef_velocity")
def get_robot_eef_velocity(cfg: EefConfig, sim: Simulation) -> Observe:
    """Observe the linear and angular velocity of an end effector, `[*B, 6]` (m/s and rad/s). Requires `mode: "add"`.

        velocity = J(q) dq/dt

    J(q) is the Jacobian of the end effector's pose at the current joint positions q.
    """
    site = tcp_of(sim, cfg.part_name)
    joints = world.joints_to(sim, site)
    world.joint_velocities(sim, start(sim, ()), joints)  # raises ConfigError if a joint is not a hinge or slide

    def observe(state: TensorDict, value: Tensor | None) -> Tensor:
        jacobian = world.site_jacobian(sim, state["world"], site, joints)
        velocities = world.joint_velocities(sim, state["world"], joints)
        return new_entry(value, (jacobian * velocities.unsqueeze(-2)).sum(-1))

    return observe
