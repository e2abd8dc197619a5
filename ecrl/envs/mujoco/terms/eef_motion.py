"""The action term that moves an end effector by a small step."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel, Positive
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation, start
from ecrl.envs.mujoco.robots.inverse_kinematics import solve
from ecrl.envs.mujoco.terms.term import ActionTerm, part_of, tcp_of
from ecrl.envs.scaling import LENGTH
from ecrl.registry import register_action

_DAMPING = 1e-3  # damping of the least-squares problem, in m^2 and rad^2
_MAX_STEP = 0.5  # largest change of a joint position in one step, rad or m


class DeltaEefPoseConfig(ConfigModel):
    """Settings of `DeltaEefPoseTerm`: a part of the robot, the number of actions, and their scales."""

    part_name: str = Field("arm", description="part of the robot that has the end effector")
    pose_dim: Literal[3, 6] = Field(
        3,
        description=(
            "3: actions only move the end effector, and the term holds the z axis of the end effector in its initial "
            "direction; 6: actions also rotate the end effector"
        ),
    )
    scale: Annotated[Positive, LENGTH] = Field(0.03, le=1e6, description="motion per unit of action, m")
    rotation_scale: Positive = Field(0.1, le=1e6, description="rotation per unit of action, rad; for pose_dim 6")


def _tilt(axis: Tensor, wanted: Tensor) -> Tensor:
    """Return the rotation vector `[*B, 3]` (rad) that turns the unit vector `axis` to the unit vector `wanted`.

    If the vectors are opposite, the result is 0.

    >>> _tilt(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 0.0]))  # a quarter turn about -x
    tensor([-1.5708,  0.0000,  0.0000])
    """
    turn = torch.linalg.cross(axis, wanted)
    sine = torch.linalg.vector_norm(turn, dim=-1, keepdim=True)
    angle = torch.atan2(sine, (axis * wanted).sum(-1, keepdim=True))
    return turn * (angle / sine.clamp_min(1e-6))


@register_action("DeltaEefPoseTerm")
def delta_eef_pose(cfg: DeltaEefPoseConfig, sim: Simulation) -> ActionTerm:
    """Move an end effector by a small step. The actions a are in [-1, 1].

        pose_dim 3: e = (scale a, turn)
        pose_dim 6: e = (scale a[0:3], rotation_scale a[3:6])
        target = q + scaled(J^T (J J^T + 0.001 I)^-1 e)

    The first part of e is a translation (m), and the second part is a rotation vector (rad), both in the world frame.
    `turn` turns the z axis of the end effector to the direction that this axis has in the scene's initial state.
    `scaled` scales the change down so that no joint moves by more than 0.5 rad or m. J is the Jacobian of the end
    effector's pose at the current joint positions q. With pose_dim 3, the rotation about the end effector's z axis is
    free, so the component of J about this axis is removed.
    """
    joints, site = part_of(sim, cfg.part_name), tcp_of(sim, cfg.part_name)
    world.actuators_of(sim, joints)
    home_axis = world.site_pose(sim, start(sim, ()), site)[:3, 2].tolist()

    def control(state: TensorDict, action: Tensor) -> Tensor:
        worlds = state["world"]
        q = world.joint_positions(sim, worlds, joints)
        pose, jacobian = world.site_motion(sim, worlds, site, joints, q)
        if cfg.pose_dim == 6:
            error = torch.cat((cfg.scale * action[..., :3], cfg.rotation_scale * action[..., 3:]), -1)
        else:
            axis = pose[..., :3, 2]
            error = torch.cat((cfg.scale * action, _tilt(axis, axis.new_tensor(home_axis).expand_as(axis))), -1)
            linear, turning = jacobian.split(3, -2)
            about_axis = (axis.unsqueeze(-1) * turning).sum(-2, keepdim=True)
            jacobian = torch.cat((linear, turning - axis.unsqueeze(-1) * about_axis), -2)
        gram = (jacobian.unsqueeze(-2) * jacobian.unsqueeze(-3)).sum(-1)
        right = solve(gram + _DAMPING * torch.eye(6, dtype=gram.dtype, device=gram.device), error)
        step = (jacobian * right.unsqueeze(-1)).sum(-2)
        return q + step * (_MAX_STEP / step.abs().amax(-1, keepdim=True).clamp_min(_MAX_STEP))

    return ActionTerm(joints, "position", (-1.0,) * cfg.pose_dim, (1.0,) * cfg.pose_dim, control)
