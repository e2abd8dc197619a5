"""Scripted experts of MuJoCo tasks. `ecrl.envs.make_expert` makes them."""

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
from ecrl.envs.mujoco.tasks.reach import ReachConfig
from ecrl.envs.mujoco.tasks.reach_color import ReachColorConfig, block_offsets, is_goal
from ecrl.envs.mujoco.terms.actions import ScaledConfig
from ecrl.envs.mujoco.terms.term import target, tcp_of
from ecrl.errors import ConfigError
from ecrl.registry import register_expert

_KEEP_AWAY = 0.14  # m, distance at which the finger begins to go around a block
_AROUND, _AWAY = 0.12, 2.0  # m, and a factor: strengths of the motion around a block and away from it
_DAMPING = 1e-3  # of the least squares, m^2


class ExpertConfig(ConfigModel):
    """Settings of an expert: its noise and its bias."""

    noise: NonNegative = Field(0.0, description="standard deviation of the noise on the actions, as part of an action")
    bias: Real = Field(0.0, description="error of the aim along x, m, for biased demonstrations")


def _scale(cfg: TaskConfig) -> float:
    """Return the scale of the task's only action term, which must be DeltaQposTerm on all joints."""
    match list(cfg.actions.values()):
        case [ActionConfig(func="DeltaQposTerm", params=ScaledConfig(part_name=None, joint_ids=None, scale=scale))]:
            return scale
    raise ConfigError("env.cfg.actions: the expert needs one term, DeltaQposTerm, that drives all joints")


def _action(motion: Tensor, scale: float, noise: float, keys: Tensor) -> Tensor:
    """Return actions that move the joints by `motion`, or as far as one step can move them in the same direction."""
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
        gram = jacobian @ jacobian.mT + _DAMPING * torch.eye(3, device=offset.device)
        motion = jacobian.mT @ torch.linalg.solve(gram, offset.unsqueeze(-1))
        return _action(motion.squeeze(-1), scale, cfg.noise, keys)

    return act


@register_expert("ReachColorRL")
def reach_color_expert(cfg: ExpertConfig, env: Env, task: ReachColorConfig) -> Expert:
    """Move the finger to the goal, and go around each other block that is nearer than 0.14 m.

        motion = (goal - p + bias) + sum_i (0.12 t[i] + 2 (0.14 - d[i]) u[i])        over other blocks with d[i] < 0.14

    The finger is at p, and d[i] is its distance to block i. The unit vector u[i] points away from block i. The unit
    vector t[i] is perpendicular to u[i], on the side of the goal.
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
