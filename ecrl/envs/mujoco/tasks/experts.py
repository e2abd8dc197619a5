"""Scripted experts of MuJoCo tasks, for `ecrl.envs.make_expert`."""

from typing import cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, NonNegative
from ecrl.envs.core import Env
from ecrl.envs.experts import Expert
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.scene.config import Real
from ecrl.envs.mujoco.task_config import ActionConfig, TaskConfig
from ecrl.envs.mujoco.task_scale import scale_of
from ecrl.envs.mujoco.tasks.push_cube import PushCubeConfig
from ecrl.envs.mujoco.tasks.reach import ReachConfig
from ecrl.envs.mujoco.tasks.reach_color import ReachColorConfig, block_offsets, is_goal
from ecrl.envs.mujoco.terms.actions import ScaledConfig
from ecrl.envs.mujoco.terms.term import target, tcp_of
from ecrl.errors import ConfigError
from ecrl.registry import register_expert

_KEEP_AWAY = 0.14  # m, distance at which the finger begins to go around a block
_AROUND, _AWAY = 0.12, 2.0  # strength of the motion around a block, m, and factor of the motion away from a block
_DAMPING = 1e-3  # damping of the least-squares problem, m^2
_BEHIND, _BESIDE = 0.13, 0.05  # m, distance behind the cube at which a push begins, and its largest sideways error
_AHEAD = 0.1  # m, distance from the cube to the target of a push
_HIGH, _LOW = 0.25, 0.06  # m, heights of the end effector on the way to the cube and during a push
_TURN = 0.3  # m, weight of the tool's direction in the least-squares problem


class ExpertConfig(ConfigModel):
    """Settings of an expert: its noise and its bias."""

    noise: NonNegative = Field(
        0.0, description="standard deviation of the noise on the actions, in units of the largest action"
    )
    bias: Real = Field(0.0, description="error along x of the expert's target, m, for biased demonstrations")


def _scale(cfg: TaskConfig) -> float:
    """Return the scale of the task's only action term, which must be DeltaQposTerm on all joints."""
    match list(cfg.actions.values()):
        case [ActionConfig(func="DeltaQposTerm", params=ScaledConfig(part_name=None, joint_ids=None, scale=scale))]:
            return scale
    given = ", ".join(f"{name} ({term.func})" for name, term in sorted(cfg.actions.items()))
    fault = f"{given or 'no term'}, but the expert needs one term, DeltaQposTerm, without part_name and joint_ids"
    raise ConfigError(
        f"env.cfg.actions: {fault}; change the terms, or record a trained policy with ecrl demo --run-dir"
    )


def _action(motion: Tensor, scale: float, noise: float, keys: Tensor) -> Tensor:
    """Return actions that move the joints by `motion`, plus noise. A motion too long for one step is scaled down."""
    action = motion / scale
    action = action / action.abs().amax(-1, keepdim=True).clamp(min=1.0)
    if noise:
        action = action + noise * rng.normal(keys, (motion.shape[-1],))
    return action.clamp(-1.0, 1.0)


@register_expert("ReachRL")
def reach_expert(cfg: ExpertConfig, env: Env, task: ReachConfig) -> Expert:
    """Move the end effector straight to its target, with damped least squares on the joint positions."""
    sim, scale, site = env.scene, _scale(task), tcp_of(env.scene, task.extensions.part_name)

    def act(state: TensorDict, keys: Tensor) -> Tensor:
        worlds = cast(TensorDict, state["world"])
        position = world.site_pose(sim, worlds, site)[..., :3, 3]
        offset = target(state, task.extensions.target_pose_key) - position
        offset = offset + offset.new_tensor([cfg.bias, 0.0, 0.0])
        jacobian = world.site_jacobian(sim, worlds, site, sim.robot.joints)[..., :3, :]
        return _action(_least_squares(jacobian, offset), scale, cfg.noise, keys)

    return act


def _least_squares(jacobian: Tensor, offset: Tensor) -> Tensor:
    """Return the joint motion J^T (J J^T + damping)^-1 offset."""
    gram = jacobian @ jacobian.mT + _DAMPING * torch.eye(offset.shape[-1], device=offset.device)
    return (jacobian.mT @ torch.linalg.solve(gram, offset.unsqueeze(-1))).squeeze(-1)


@register_expert("PushCubeRL")
def push_cube_expert(cfg: ExpertConfig, env: Env, task: PushCubeConfig) -> Expert:
    """Move the end effector to the side of the cube opposite to the goal, lower the end effector, and push.

        u     = horizontal unit vector from the cube to the goal;    start = cube - 0.13 u
        back  = (cube - p) . u;    side = |cube - p - back u|        horizontally, for the end effector at p
        place = cube + 0.1 u    if p is below 0.12 m, back > 0 and side < 0.05 m, so that the end effector pushes
                start           otherwise
        z     = 0.06 m          if the end effector pushes, or is horizontally within 0.05 m of start
                0.25 m          otherwise

    The lengths are multiplied by the scale of the task. Damped least squares compute the joint motion that moves the
    end effector to (place, z), and points the tool down. `bias` shifts the cube along x in these equations.
    """
    sim, scale, ext, site = env.scene, _scale(task), task.extensions, tcp_of(env.scene, "arm")
    behind, beside, in_front, high, low = (scale_of(task) * x for x in (_BEHIND, _BESIDE, _AHEAD, _HIGH, _LOW))

    def act(state: TensorDict, keys: Tensor) -> Tensor:
        worlds = cast(TensorDict, state["world"])
        pose = world.site_pose(sim, worlds, site)
        tool, cube = pose[..., :3, 3], world.body_position(sim, worlds, ext.object_uid)[..., :2]
        cube = cube + cube.new_tensor([cfg.bias, 0.0])
        path = target(state, ext.target_pose_key)[..., :2] - cube
        ahead = path / torch.linalg.vector_norm(path, dim=-1, keepdim=True).clamp(min=1e-6)
        to_cube, start = cube - tool[..., :2], cube - behind * ahead
        back = (to_cube * ahead).sum(-1, keepdim=True)
        side = torch.linalg.vector_norm(to_cube - back * ahead, dim=-1, keepdim=True)
        pushes = (tool[..., 2:] < 2 * low) & (back > 0.0) & (side < beside)
        above = torch.linalg.vector_norm(start - tool[..., :2], dim=-1, keepdim=True) < beside
        place = torch.where(pushes, cube + in_front * ahead, start)
        height = torch.where(pushes | above, low, high)
        offset = torch.cat((place, height), -1) - tool
        jacobian = world.site_jacobian(sim, worlds, site, sim.robot.joints)
        down = pose[..., :3, 2]
        turn = _TURN * torch.linalg.cross(down, down.new_tensor([0.0, 0.0, -1.0]).expand_as(down))
        jacobian = torch.cat((jacobian[..., :3, :], _TURN * jacobian[..., 3:, :]), -2)
        return _action(_least_squares(jacobian, torch.cat((offset, turn), -1)), scale, cfg.noise, keys)

    return act


@register_expert("ReachColorRL")
def reach_color_expert(cfg: ExpertConfig, env: Env, task: ReachColorConfig) -> Expert:
    """Move the finger to the goal, and go around every other block that is nearer than 0.14 m.

        motion = (goal - p + bias) + sum_i (0.12 t[i] + 2 (0.14 - d[i]) u[i])        over other blocks with d[i] < 0.14

    The finger is at p, and d[i] is its distance to block i. The unit vector u[i] points away from block i. The unit
    vector t[i] is perpendicular to u[i], and points towards the goal.
    """
    sim, scale = env.scene, _scale(task)

    def act(state: TensorDict, keys: Tensor) -> Tensor:
        offsets, goal = block_offsets(task, sim, state), is_goal(task, state).unsqueeze(-1)
        motion = torch.where(goal, offsets, 0.0).sum(-2) + offsets.new_tensor([cfg.bias, 0.0])
        distance = torch.linalg.vector_norm(offsets, dim=-1, keepdim=True).clamp(min=1e-3)
        away = -offsets / distance
        around = torch.stack((-away[..., 1], away[..., 0]), -1)
        same_side = (around * motion.unsqueeze(-2)).sum(-1, keepdim=True) >= 0.0
        around = torch.where(same_side, around, -around)
        push = _AROUND * around + _AWAY * (_KEEP_AWAY - distance) * away
        motion = motion + torch.where((distance < _KEEP_AWAY) & ~goal, push, 0.0).sum(-2)
        return _action(motion, scale, cfg.noise, keys)

    return act
