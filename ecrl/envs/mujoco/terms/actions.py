"""Terms of the action: positions of joints, changes of them, poses of an end effector, velocities or forces.

The bounds of a term are its action's; what it asks of a joint beyond that joint's limits, the task clamps to them.
"""

from math import pi
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel, Count, Positive
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.robots import kinematics
from ecrl.envs.mujoco.robots.inverse_kinematics import inverse_kinematics
from ecrl.envs.mujoco.robots.robot import Drive
from ecrl.envs.mujoco.scene.config import Real
from ecrl.envs.mujoco.terms.term import ActionTerm, JointsConfig, joints_of, ranges_of, tcp_of
from ecrl.registry import register_action

Scale = Annotated[float, Field(ge=1e-6, le=1e6)]
_TINY = 1e-6  # length of a quaternion that says nothing


class ScaledConfig(JointsConfig):
    """Which joints, and how far an action goes."""

    scale: Scale = Field(1.0, description="what the action is multiplied by: rad or m, rad/s or m/s, N m or N, per 1")


class DenormalizedConfig(ScaledConfig):
    """Which joints, and what their limits are called."""

    range: Annotated[tuple[Real, Real], Field(strict=False)] = Field(
        (-1.0, 1.0), description="scaled actions at a joint's lowest and highest position"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "DenormalizedConfig":
        if self.range[0] >= self.range[1]:
            raise ValueError(f"range: {list(self.range)}, expected the lower first")
        return self


class NormalizedConfig(DenormalizedConfig):
    """Which joints, and what their limits are called."""

    range: Annotated[tuple[Real, Real], Field(strict=False)] = Field(
        (0.0, 1.0), description="scaled actions at a joint's lowest and highest position"
    )


class EefPoseConfig(ConfigModel):
    """A part of the robot, and how a pose of its end effector is written and reached."""

    robot_uid: str | None = Field(None, description="name of the robot")
    part_name: str = Field("arm", description="the part of the robot that reaches")
    pose_dim: Literal[6, 7] = Field(7, description="6: position and Euler angles; 7: position and quaternion, w x y z")
    scale: Scale = Field(1.0, description="what position and angles are multiplied by, m and rad per 1")
    reach: Positive = Field(1.5, le=1e6, description="positions go this far from the origin along each axis, m")
    iterations: Count = Field(15, le=1000, description="steps of the inverse kinematics")
    position_tolerance: Positive = Field(1e-3, description="a pose further from what was asked is not gone to, m")
    rotation_tolerance: Positive = Field(1e-2, description="a pose further turned is not gone to, rad")


def _joints(cfg: JointsConfig, sim: Simulation) -> tuple[str, ...]:
    """The joints of a term, all of which have an actuator."""
    joints = joints_of(cfg, sim)
    world.actuators_of(sim, joints)
    return joints


@register_action("DeltaQposTerm")
def delta_qpos(cfg: ScaledConfig, sim: Simulation) -> ActionTerm:
    """Target positions as changes of the present ones: `target = qpos + scale * a`, a in [-1, 1]; rad or m."""
    joints = _joints(cfg, sim)

    def control(state: TensorDict, action: Tensor) -> Tensor:
        return world.joint_positions(sim, state["world"], joints) + cfg.scale * action

    return ActionTerm(joints, "position", (-1.0,) * len(joints), (1.0,) * len(joints), control)


@register_action("QposTerm")
def qpos(cfg: ScaledConfig, sim: Simulation) -> ActionTerm:
    """Target positions: `target = scale * a`, a in [lowest / scale, highest / scale]; rad or m."""
    joints = _joints(cfg, sim)
    low, high = (tuple(x / cfg.scale for x in limits) for limits in ranges_of(sim, joints))
    return ActionTerm(joints, "position", low, high, lambda state, action: cfg.scale * action)


@register_action("QposDenormalizedTerm")
def qpos_denormalized(cfg: DenormalizedConfig, sim: Simulation) -> ActionTerm:
    """Target positions as places between the joints' limits, rad or m.

        target = lowest + (scale * a - range[0]) / (range[1] - range[0]) * (highest - lowest)

    with a in [range[0] / scale, range[1] / scale]. A hinge without limits has -pi and pi.
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
    """`QposDenormalizedTerm` with a range of [0, 1]: the action is the normalised position, 0 lowest and 1 highest.

    EmbodiChain's term of this name is the inverse of that map. It turns positions into numbers of the range, for what
    is done after an action; a drive could make nothing of them.
    """
    return qpos_denormalized(cfg, sim)


def _quaternion(angles: Tensor) -> Tensor:
    """Rotations `[*B, 3]`, rad, about x, then the y and z that turn with it, as a quaternion `[*B, 4]`, w x y z."""
    (cx, cy, cz), (sx, sy, sz) = torch.cos(0.5 * angles).unbind(-1), torch.sin(0.5 * angles).unbind(-1)
    real, x = cx * cy * cz - sx * sy * sz, sx * cy * cz + cx * sy * sz
    return torch.stack((real, x, cx * sy * cz - sx * cy * sz, cx * cy * sz + sx * sy * cz), -1)


@register_action("EefPoseTerm")
def eef_pose(cfg: EefPoseConfig, sim: Simulation) -> ActionTerm:
    """Target positions that bring the end effector of a part to a pose in the world, by inverse kinematics.

        x y z = scale * a[0:3], m                                 a in [-reach / scale, reach / scale]
        pose_dim 6: turned by scale * a[3:6] about x, then its own y, its own z, rad       [-pi / scale, pi / scale]
        pose_dim 7: turned by the quaternion a[3:7], w x y z, of any length but 0          [-1, 1]

    The search (`inverse_kinematics`) begins where the joints are. Where it ends further from the pose than
    `position_tolerance` or `rotation_tolerance`, or a quaternion is shorter than 1e-6, the targets are the present
    positions.
    """
    joints = _joints(JointsConfig(robot_uid=cfg.robot_uid, part_name=cfg.part_name, joint_ids=None), sim)
    site = tcp_of(sim, cfg.part_name)

    def control(state: TensorDict, action: Tensor) -> Tensor:
        place, turn = cfg.scale * action[..., :3], action[..., 3:]
        turn = _quaternion(cfg.scale * turn) if cfg.pose_dim == 6 else turn
        none = torch.linalg.vector_norm(turn, dim=-1, keepdim=True) < _TINY
        pose = kinematics.pose(place, torch.where(none, turn.new_tensor([1.0, 0.0, 0.0, 0.0]), turn))
        found = inverse_kinematics(sim, state["world"], site, joints, pose, iterations=cfg.iterations)
        failed = (found.distance > cfg.position_tolerance) | (found.angle > cfg.rotation_tolerance) | none[..., 0]
        return torch.where(failed[..., None], world.joint_positions(sim, state["world"], joints), found.positions)

    turned = (pi / cfg.scale,) * 3 if cfg.pose_dim == 6 else (1.0,) * 4
    high = (cfg.reach / cfg.scale,) * 3 + turned
    return ActionTerm(joints, "position", tuple(-x for x in high), high, control)


def _proportional(cfg: ScaledConfig, sim: Simulation, drive: Drive) -> ActionTerm:
    joints = _joints(cfg, sim)
    low, high = (-1.0,) * len(joints), (1.0,) * len(joints)
    return ActionTerm(joints, drive, low, high, lambda state, action: cfg.scale * action)


@register_action("QvelTerm")
def qvel(cfg: ScaledConfig, sim: Simulation) -> ActionTerm:
    """Target velocities: `target = scale * a`, a in [-1, 1], rad/s or m/s.

    The drive exerts damping * (target - qvel), up to max_effort, and holds no position. While max_effort limits it,
    MuJoCo takes it at its value before a time step, so it hunts around targets further than max_effort / damping from
    the velocity where damping * time step is above the inertia that the joint moves; give such a drive less damping.
    """
    return _proportional(cfg, sim, "velocity")


@register_action("QfTerm")
def qf(cfg: ScaledConfig, sim: Simulation) -> ActionTerm:
    """Forces: `force = scale * a`, a in [-1, 1], N m or N, up to max_effort."""
    return _proportional(cfg, sim, "force")
