"""Action terms that set joint positions, changes of joint positions, end effector poses, joint velocities or forces.

Each term defines the bounds of its action. The task clamps target positions to the joint limits.
"""

from math import pi
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import LIST, NUMBER, ConfigModel, Count, Positive, by_kind
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation, start
from ecrl.envs.mujoco.robots import kinematics
from ecrl.envs.mujoco.robots.inverse_kinematics import inverse_kinematics
from ecrl.envs.mujoco.robots.robot import Drive
from ecrl.envs.mujoco.scene.config import Real
from ecrl.envs.mujoco.terms.term import ActionTerm, JointsConfig, joints_of, named_joints, part_of, ranges_of, tcp_of
from ecrl.envs.scaling import LENGTH
from ecrl.errors import ConfigError
from ecrl.registry import register_action

Scale = Annotated[float, Field(ge=1e-6, le=1e6)]
_MIN_LENGTH = 1e-6  # a shorter quaternion does not define a rotation


class ScaledConfig(JointsConfig):
    """Settings of a term that scales its actions: the joints, and the scale."""

    scale: Scale = Field(
        1.0,
        description="factor from action to position or change of position (rad or m), velocity (rad/s or m/s) or force "
        "(N m or N)",
    )


class DenormalizedConfig(ScaledConfig):
    """Settings of `QposDenormalizedTerm`: the joints, and the actions at the joint limits."""

    scale: Scale = Field(1.0, description="factor from action to a value between the two values of range")
    range: Annotated[tuple[Real, Real], Field(strict=False)] = Field(
        (-1.0, 1.0), description="scale * action at a joint's lowest and highest position"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "DenormalizedConfig":
        if self.range[0] >= self.range[1]:
            raise ValueError(f"range: {list(self.range)}, expected the lower value first")
        return self


class NormalizedConfig(DenormalizedConfig):
    """Settings of `QposNormalizedTerm`: the joints, and the actions at the joint limits."""

    range: Annotated[tuple[Real, Real], Field(strict=False)] = Field(
        (0.0, 1.0), description="scale * action at a joint's lowest and highest position"
    )


class EefSearchConfig(ConfigModel):
    """Settings of a term that moves an end effector: a part of the robot, and the search for joint positions."""

    robot_uid: str | None = Field(None, description="name of the robot")
    part_name: str = Field("arm", description="part of the robot that has the end effector")
    scale: Scale = Field(1.0, description="factor from action to position and angles, in m and rad")
    reach: Annotated[Positive, LENGTH] = Field(
        1.5, le=1e6, description="largest absolute x, y and z of the target position, m"
    )
    iterations: Count = Field(15, le=1000, description="steps of the inverse kinematics")
    position_tolerance: Positive = Field(
        1e-3, description="largest position error, m; if the error is larger, the joints of the part do not move"
    )
    rotation_tolerance: Positive = Field(
        1e-2, description="largest rotation error, rad; if the error is larger, the joints of the part do not move"
    )


class EefPoseConfig(EefSearchConfig):
    """Settings of `EefPoseTerm`: a part of the robot, the pose format, and the search for joint positions."""

    pose_dim: Literal[6, 7] = Field(7, description="6: position and Euler angles; 7: position and quaternion, w x y z")


class EefPoseGripperConfig(EefSearchConfig):
    """Settings of `EefPoseGripperTerm`: an arm, the search for joint positions, and a hand."""

    hand_name: str = Field("hand", description="part of the robot whose joints move the fingers")


class GripperConfig(ConfigModel):
    """Settings of `JointPositionGripperTerm`: an arm and a hand."""

    part_name: str = Field("arm", description="part of the robot that is the arm, with one action per joint")
    hand_name: str = Field("hand", description="part of the robot whose joints move the fingers")


_List = Annotated[tuple[Real, ...], Field(strict=False, min_length=1), LIST]
_Numbers = Annotated[Annotated[Real, NUMBER] | _List, by_kind("a number or a list of numbers")]


class DefaultPositionConfig(JointsConfig):
    """Settings of `DefaultJointPositionTerm`: the joints, the default posture, the scale and the largest action."""

    joint_names: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="names of joints in the order of the action; an alternative to joint_ids and part_name"
    )
    offset: _Numbers | None = Field(
        None, description="default posture, rad or m: one value, or one per joint; by default, the start posture"
    )
    scale: _Numbers = Field(
        1.0, description="change of the target position per unit of action, rad or m: one value, or one per joint"
    )
    clip: Positive | None = Field(
        None,
        le=1e6,
        description="actions are clamped to [-clip, clip]; if absent, their range is [-1, 1], and they are not clamped",
    )

    @model_validator(mode="after")
    def _one_choice(self) -> "DefaultPositionConfig":
        if self.joint_names is not None and (self.part_name is not None or self.joint_ids is not None):
            other = "joint_ids" if self.part_name is None else "part_name"
            raise ValueError(f"joint_names and {other} both select joints; keep one")
        if 0.0 in (self.scale if isinstance(self.scale, tuple) else (self.scale,)):
            raise ValueError("scale: 0 ignores the action of a joint; give another factor, or leave the joint out")
        return self


def _joints(cfg: JointsConfig, sim: Simulation) -> tuple[str, ...]:
    """Return the joints of a term. Raise ConfigError if a joint does not have exactly one actuator."""
    joints = joints_of(cfg, sim)
    world.actuators_of(sim, joints)
    return joints


@register_action("DeltaQposTerm")
def delta_qpos(cfg: ScaledConfig, sim: Simulation) -> ActionTerm:
    """Set the target positions of joints (rad or m) to `qpos + scale * a`, where the action a is in [-1, 1].

    `qpos` contains the current positions of the joints.
    """
    joints = _joints(cfg, sim)

    def control(state: TensorDict, action: Tensor) -> Tensor:
        return world.joint_positions(sim, state["world"], joints) + cfg.scale * action

    return ActionTerm(joints, "position", (-1.0,) * len(joints), (1.0,) * len(joints), control)


@register_action("QposTerm")
def qpos(cfg: ScaledConfig, sim: Simulation) -> ActionTerm:
    """Set the target positions of joints (rad or m) to `scale * a`.

    The action a is in [lowest / scale, highest / scale], where lowest and highest are the joint limits. A hinge without
    limits is treated as if its limits were -pi and pi.
    """
    joints = _joints(cfg, sim)
    low, high = (tuple(x / cfg.scale for x in limits) for limits in ranges_of(sim, joints))
    return ActionTerm(joints, "position", low, high, lambda state, action: cfg.scale * action)


@register_action("QposDenormalizedTerm")
def qpos_denormalized(cfg: DenormalizedConfig, sim: Simulation) -> ActionTerm:
    """Set the target positions of joints (rad or m) by mapping actions from `range` to the joint limits.

        target = lowest + (scale * a - range[0]) / (range[1] - range[0]) * (highest - lowest)

    The action a is in [range[0] / scale, range[1] / scale]. A hinge without limits is treated as if its limits were -pi
    and pi.
    """
    joints, (first, last) = _joints(cfg, sim), cfg.range
    limits = ranges_of(sim, joints)

    def control(state: TensorDict, action: Tensor) -> Tensor:
        low, high = (action.new_tensor(limit) for limit in limits)
        return low + (cfg.scale * action - first) / (last - first) * (high - low)

    low, high = ((edge / cfg.scale,) * len(joints) for edge in cfg.range)
    return ActionTerm(joints, "position", low, high, control)


@register_action("QposNormalizedTerm")
def qpos_normalized(cfg: NormalizedConfig, sim: Simulation) -> ActionTerm:
    """Set the target positions of joints by mapping actions from `range`, by default [0, 1], to the joint limits.

    This term is `QposDenormalizedTerm` with a default `range` of [0, 1]. EmbodiChain's term of the same name computes
    the inverse map, from positions to `range`. A drive cannot use the result of this inverse map.
    """
    return qpos_denormalized(cfg, sim)


def _quaternion(angles: Tensor) -> Tensor:
    """Convert angles `[*B, 3]` (rad) about x, the rotated y and the rotated z to quaternions `[*B, 4]` (w, x, y, z)."""
    (cx, cy, cz), (sx, sy, sz) = torch.cos(0.5 * angles).unbind(-1), torch.sin(0.5 * angles).unbind(-1)
    real, x = cx * cy * cz - sx * sy * sz, sx * cy * cz + cx * sy * sz
    return torch.stack((real, x, cx * sy * cz - sx * cy * sz, cx * cy * sz + sx * sy * cz), -1)


@register_action("EefPoseTerm")
def eef_pose(cfg: EefPoseConfig, sim: Simulation) -> ActionTerm:
    """Set target positions of joints that move an end effector to a pose in the world frame, by inverse kinematics.

        x y z = scale * a[0:3], m
        pose_dim 6: rotation by the angles scale * a[3:6], rad, about x, the rotated y and the rotated z
        pose_dim 7: rotation by the quaternion a[3:7], w x y z, which the term normalises

    The actions a[0:3] are in [-reach / scale, reach / scale], angles a[3:6] are in [-pi / scale, pi / scale], and the
    components of a quaternion a[3:7] are in [-1, 1].

    `inverse_kinematics` searches for the joint positions, starting from the current positions. The search fails if the
    remaining error is larger than `position_tolerance` or `rotation_tolerance`, or if the length of the quaternion is
    below 1e-6. If the search fails, the target positions are the current positions.
    """
    return _eef_pose(cfg, sim, cfg.pose_dim)


def _eef_pose(cfg: EefSearchConfig, sim: Simulation, pose_dim: int) -> ActionTerm:
    joints = _joints(JointsConfig(robot_uid=cfg.robot_uid, part_name=cfg.part_name, joint_ids=None), sim)
    site = tcp_of(sim, cfg.part_name)

    def control(state: TensorDict, action: Tensor) -> Tensor:
        position, rotation = cfg.scale * action[..., :3], action[..., 3:]
        quaternion = _quaternion(cfg.scale * rotation) if pose_dim == 6 else rotation
        too_short = torch.linalg.vector_norm(quaternion, dim=-1, keepdim=True) < _MIN_LENGTH
        identity = quaternion.new_tensor([1.0, 0.0, 0.0, 0.0])
        pose = kinematics.pose(position, torch.where(too_short, identity, quaternion))
        result = inverse_kinematics(sim, state["world"], site, joints, pose, iterations=cfg.iterations)
        failed = (result.distance > cfg.position_tolerance) | (result.angle > cfg.rotation_tolerance)
        failed = failed | too_short[..., 0]
        return torch.where(failed[..., None], world.joint_positions(sim, state["world"], joints), result.positions)

    high_rotation = (pi / cfg.scale,) * 3 if pose_dim == 6 else (1.0,) * 4
    high = (cfg.reach / cfg.scale,) * 3 + high_rotation
    return ActionTerm(joints, "position", tuple(-x for x in high), high, control)


def _with_gripper(arm: ActionTerm, hand_name: str, sim: Simulation) -> ActionTerm:
    """Add an action in [-1, 1] to the term of an arm. The action moves all fingers between their limits."""
    fingers = part_of(sim, hand_name, "params.hand_name")
    world.actuators_of(sim, fingers)
    limits, count = ranges_of(sim, fingers), len(arm.low)

    def control(state: TensorDict, action: Tensor) -> Tensor:
        low, high = (action.new_tensor(limit) for limit in limits)
        targets = low + 0.5 * (action[..., count:] + 1.0) * (high - low)
        return torch.cat((arm.control(state, action[..., :count]), targets), -1)

    return ActionTerm((*arm.joints, *fingers), "position", (*arm.low, -1.0), (*arm.high, 1.0), control)


@register_action("JointPositionGripperTerm")
def joint_position_gripper(cfg: GripperConfig, sim: Simulation) -> ActionTerm:
    """Set the target positions of an arm's joints. The last action sets the targets of all fingers of a hand.

        target[arm] = a[:-1], rad or m;  target[finger] = lowest + (a[-1] + 1) / 2 * (highest - lowest)

    The actions of the arm are between the joint limits, or between -pi and pi for a hinge without limits. The last
    action is in [-1, 1].
    """
    joints = _joints(JointsConfig(robot_uid=None, part_name=cfg.part_name, joint_ids=None), sim)
    arm = ActionTerm(joints, "position", *ranges_of(sim, joints), lambda state, action: action)
    return _with_gripper(arm, cfg.hand_name, sim)


@register_action("EefPoseGripperTerm")
def eef_pose_gripper(cfg: EefPoseGripperConfig, sim: Simulation) -> ActionTerm:
    """Move an end effector to a pose, as `EefPoseTerm` with `pose_dim` 6 does. The last action moves all fingers.

        a = [x, y, z, three angles, fingers],  target[finger] = lowest + (a[6] + 1) / 2 * (highest - lowest)

    The last action is in [-1, 1].
    """
    return _with_gripper(_eef_pose(cfg, sim, 6), cfg.hand_name, sim)


def _per_joint(values: Any, joints: tuple[str, ...], key: str) -> tuple[float, ...]:
    """Return one value per joint. Raise ConfigError that names the setting `key` if the number of values is wrong."""
    if not isinstance(values, tuple):
        return (values,) * len(joints)
    if len(values) != len(joints):
        raise ConfigError(
            f"params.{key}: {len(values)} values for {len(joints)} joints: {', '.join(joints)}; give one per joint"
        )
    return values


@register_action("DefaultJointPositionTerm")
def default_joint_position(cfg: DefaultPositionConfig, sim: Simulation) -> ActionTerm:
    """Set the target positions of joints (rad or m) around a default posture.

        target = offset + scale * clamp(a, -clip, clip)

    The action a is in [-clip, clip], or in [-1, 1] without `clip`. Without `clip`, the term does not clamp actions.
    """
    if cfg.joint_names is None:
        joints = _joints(cfg, sim)
    else:
        joints = named_joints(sim, cfg.joint_names)
        world.actuators_of(sim, joints)
    home = tuple(world.joint_positions(sim, start(sim, ()), joints).tolist())
    offset = _per_joint(home if cfg.offset is None else cfg.offset, joints, "offset")
    scale, bound = _per_joint(cfg.scale, joints, "scale"), (cfg.clip or 1.0,) * len(joints)

    def control(state: TensorDict, action: Tensor) -> Tensor:
        action = action if cfg.clip is None else action.clamp(-cfg.clip, cfg.clip)
        return action.new_tensor(offset) + action.new_tensor(scale) * action

    return ActionTerm(joints, "position", tuple(-x for x in bound), bound, control)


def _proportional(cfg: ScaledConfig, sim: Simulation, drive: Drive) -> ActionTerm:
    joints = _joints(cfg, sim)
    low, high = (-1.0,) * len(joints), (1.0,) * len(joints)
    return ActionTerm(joints, drive, low, high, lambda state, action: cfg.scale * action)


@register_action("QvelTerm")
def qvel(cfg: ScaledConfig, sim: Simulation) -> ActionTerm:
    """Set the target velocities of joints (rad/s or m/s) to `scale * a`, where the action a is in [-1, 1].

    The drive applies the force damping * (target - qvel), limited to max_effort. The drive does not hold a position.
    The limit acts while the velocity differs from the target by more than max_effort / damping. MuJoCo then integrates
    the force explicitly. If damping * time step exceeds the inertia at the joint, the velocity can therefore overshoot
    the target in each step, and oscillate around the target. Reduce the damping if the velocity oscillates.
    """
    return _proportional(cfg, sim, "velocity")


@register_action("QfTerm")
def qf(cfg: ScaledConfig, sim: Simulation) -> ActionTerm:
    """Set the forces on joints (N m or N) to `scale * a`, where the action a is in [-1, 1].

    The drive setting `max_effort` limits the forces.
    """
    return _proportional(cfg, sim, "force")
