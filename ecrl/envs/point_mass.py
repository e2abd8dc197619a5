"""Point mass: push a damped point to a goal in the plane, around two circular obstacles. Every step is differentiable.

The integrator is semi-implicit Euler. The task is EmbodiChain's `PointMassRL`, and is also registered under this name.
Unlike in EmbodiChain's task, gradients also flow through the state field `last_action`.
"""

from math import inf, sqrt

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Count, NonNegative, Positive
from ecrl.envs.core import NEVER, Env, state_of, time_limit
from ecrl.registry import register_env
from ecrl.spaces import box

_GOAL, _START, _OBSTACLE = 0.7, 0.6, 0.8  # largest random coordinates in units of workspace_half
_TRIES = 8  # candidate positions per obstacle; by default, 93 % of the candidates are far enough from the goal
_WEIGHTS = {"distance": 1.0, "near": 0.5, "penetration": -2.0, "speed": -0.01, "change": -0.001}
_NEAR = 0.05  # standard deviation of the Gaussian bonus around the goal, in m


class PointMassConfig(ConfigModel):
    """Settings of the point mass: physical constants in SI units, the workspace, success, obstacles and time limit."""

    max_episode_steps: Count = Field(100, description="time limit, steps")
    workspace_half: Positive = Field(1.0, description="positions are clamped to this bound of |x| and |y|, m")
    mass: Positive = Field(1.0, description="mass of the point, kg")
    force_scale: Positive = Field(5.0, description="force for an action of 1, N")
    linear_damping: NonNegative = Field(5.0, description="damping rate of the velocity, 1/s")
    dt: Positive = Field(1.0 / 60.0, description="time step, s")
    success_threshold: Positive = Field(0.03, description="distance to the goal, m, below which the episode ends")
    success_bonus: NonNegative = Field(0.0, description="additional reward of a step that reaches the goal")
    obstacle_radius_range: tuple[Positive, Positive] = Field(
        (0.08, 0.15), strict=False, description="smallest and largest radius of an obstacle, m"
    )
    obstacle_min_goal_distance: NonNegative = Field(
        0.25, description="smallest distance from an obstacle's centre to the goal, m"
    )

    @model_validator(mode="after")
    def _possible(self) -> "PointMassConfig":
        low, high = self.obstacle_radius_range
        if high < low:
            raise ValueError(f"obstacle_radius_range is [{low}, {high}]; give the smaller radius first")
        corner = _OBSTACLE * sqrt(2.0) * self.workspace_half
        if self.obstacle_min_goal_distance >= corner:
            raise ValueError(
                f"obstacle_min_goal_distance is {self.obstacle_min_goal_distance:g}, "
                f"expected less than {corner:.4g} m for this workspace_half"
            )
        return self


def _obstacles(uniforms: Tensor, goal: Tensor, half_width: float, min_distance: float) -> Tensor:
    """Return the centres of the two obstacles, in shape `[*B, 2, 2]`.

    Each centre is the first of `_TRIES` uniform candidates that is farther than `min_distance` from the goal `[*B, 2]`.
    If all candidates are too close, the centre is the corner opposite to the goal, which is always far enough.
    """
    corner = torch.where(goal < 0.0, half_width, -half_width)[..., None, None, :].expand(*goal.shape[:-1], 2, 1, 2)
    candidates = torch.cat(((2.0 * uniforms - 1.0) * half_width, corner), -2)
    far = torch.linalg.vector_norm(candidates - goal[..., None, None, :], dim=-1) > min_distance
    first = far & (far.cumsum(-1) == 1)
    return torch.where(first.unsqueeze(-1), candidates, 0.0).sum(-2)


def _observe(state: TensorDict) -> Tensor:
    fields = ("position", "velocity", "goal", "last_action")
    return torch.cat((*(state[f] for f in fields), state["obstacles"].flatten(-2), state["radii"]), -1)


def _info(terms: dict[str, Tensor], success: Tensor, distance: Tensor, path: Tensor, collisions: Tensor) -> TensorDict:
    metrics = {"final_distance": distance, "path_length": path, "collision_count": collisions}
    info = TensorDict({"success": success, "metrics": metrics, "rewards": terms}, success.shape)
    return info.clone()  # fields must not share a tensor: compiled code would depend on the sharing


@register_env("PointMassRL")
@register_env("point_mass")
def point_mass(cfg: PointMassConfig) -> Env:
    """Push a point to a goal in the plane, around two obstacles.

        a  = clamp(action, -1, 1)
        v' = v (1 - linear_damping dt) + a dt force_scale / mass;    x' = clamp(x + v' dt, +-workspace_half)
        d  = |x' - goal|;    penetration = sum_obstacles(max(0, radius - |x' - centre|)^2)
        reward = -d + 0.5 exp(-d^2 / (2 0.05^2)) - 2 penetration - 0.01 |v'|^2 - 0.001 |a - a_before|^2
                 + success_bonus [d < success_threshold]

    The episode terminates if d < success_threshold. The observation `[*B, 14]` consists of the position (m), velocity
    (m/s), goal (m), last clamped action, obstacle centres (m) and obstacle radii (m). The action `[*B, 2]` is the force
    along each axis, in units of force_scale. `info` has the fields `success`, `rewards` and `metrics`. `rewards` holds
    each reward term without its weight. `metrics` has three fields: `final_distance` is d, `path_length` is the
    distance travelled so far (m), and `collision_count` is the number of steps so far inside an obstacle.

    Gradient: flows through every operation. The gradient of a norm at 0 is 0.
    Source: EmbodiChain's `PointMassRL`.
    """
    half, (low, high) = cfg.workspace_half, cfg.obstacle_radius_range

    def reset(keys: Tensor) -> TensorDict:
        uniforms = rng.uniform(keys, (6 + 4 * _TRIES,))
        goal, start = ((2.0 * uniforms[..., i : i + 2] - 1.0) * half * k for i, k in ((0, _GOAL), (2, _START)))
        candidates = uniforms[..., 6:].reshape(*keys.shape, 2, _TRIES, 2)
        zero = torch.zeros_like(goal)
        fields = {
            "position": start,
            "velocity": zero,
            "goal": goal,
            "last_action": zero.clone(),
            "obstacles": _obstacles(candidates, goal, _OBSTACLE * half, cfg.obstacle_min_goal_distance),
            "radii": low + (high - low) * uniforms[..., 4:6],
            "path_length": zero[..., 0].clone(),
            "collision_count": zero[..., 1].clone(),
        }
        state = state_of(_observe(TensorDict(fields, keys.shape)), keys.shape, **fields)
        zero_terms = {name: zero[..., 0].clone() for name in (*_WEIGHTS, "success")}
        info = _info(zero_terms, state["terminated"].clone(), *(zero[..., 0].clone() for _ in range(3)))
        return state.set("info", info)

    def step(state: TensorDict, action: Tensor, noise: object) -> TensorDict:
        action = action.clamp(-1.0, 1.0)
        velocity = state["velocity"] * (1.0 - cfg.linear_damping * cfg.dt)
        velocity = velocity + action * (cfg.force_scale / cfg.mass * cfg.dt)
        position = (state["position"] + velocity * cfg.dt).clamp(-half, half)
        distance = torch.linalg.vector_norm(position - state["goal"], dim=-1)
        centre_distance = torch.linalg.vector_norm(position.unsqueeze(-2) - state["obstacles"], dim=-1)
        depth = (state["radii"] - centre_distance).clamp(min=0.0)
        terminated = distance < cfg.success_threshold
        terms = {
            "distance": -distance,
            "near": torch.exp(-distance.square() / (2.0 * _NEAR**2)),
            "penetration": depth.square().sum(-1),
            "speed": velocity.square().sum(-1),
            "change": (action - state["last_action"]).square().sum(-1),
            "success": terminated.to(distance.dtype),
        }
        path = state["path_length"] + torch.linalg.vector_norm(position - state["position"], dim=-1)
        collisions = state["collision_count"] + (depth > 0.0).any(-1).to(distance.dtype)
        weights = _WEIGHTS | {"success": cfg.success_bonus}
        after = {
            "position": position,
            "velocity": velocity,
            "last_action": action,
            "path_length": path,
            "collision_count": collisions,
            "reward": sum(weight * terms[name] for name, weight in weights.items()),
            "terminated": terminated,
            "truncated": torch.zeros_like(terminated),
            "info": _info(terms, terminated, distance, path, collisions),
        }
        next_state = state.copy().update(after)
        return next_state.set("obs", _observe(next_state))

    core = Env(reset, step, box(-inf, inf, 14), box(-1.0, 1.0, 2), observe=_observe, min_truncation_gap=NEVER)
    return time_limit(core, cfg.max_episode_steps)
