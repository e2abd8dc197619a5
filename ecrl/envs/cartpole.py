"""CartPole, step for step Gymnasium's `CartPole-v1`: balance a pole on a cart by pushing left (0) or right (1).

Source: Barto, Sutton and Anderson 1983; dynamics without friction as corrected by Florian 2007, explicit Euler.
"""

from math import inf, pi

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Count, Positive
from ecrl.envs.core import Env, state_of, time_limit
from ecrl.registry import register_env
from ecrl.spaces import Box, Discrete


class CartPoleConfig(ConfigModel):
    """Physical constants, SI units."""

    gravity: Positive = Field(9.8, description="m/s^2")
    cart_mass: Positive = Field(1.0, description="kg")
    pole_mass: Positive = Field(0.1, description="kg")
    half_length: Positive = Field(0.5, description="half the pole's length, m")
    force: Positive = Field(10.0, description="push, N")
    dt: Positive = Field(0.02, description="time step, s")
    max_position: Positive = Field(2.4, description="the episode ends beyond it, m")
    max_angle: Positive = Field(12.0 * 2.0 * pi / 360.0, description="the episode ends beyond it, rad")
    start: Positive = Field(0.05, description="each start coordinate is uniform in +- this")
    max_episode_steps: Count = Field(500, description="time limit, steps")


def _accelerations(cfg: CartPoleConfig, obs: Tensor, force: Tensor) -> tuple[Tensor, Tensor]:
    """Of the cart, m/s^2, and of the pole, rad/s^2."""
    _, _, angle, spin = obs.unbind(-1)
    sin, cos = torch.sin(angle), torch.cos(angle)
    mass, moment = cfg.cart_mass + cfg.pole_mass, cfg.pole_mass * cfg.half_length
    push = (force + moment * spin.square() * sin) / mass
    turn = (cfg.gravity * sin - cos * push) / (cfg.half_length * (4.0 / 3.0 - cfg.pole_mass * cos.square() / mass))
    return push - moment * turn * cos / mass, turn


@register_env("cartpole")
def cartpole(cfg: CartPoleConfig) -> Env:
    """Observation `[*B, 4]`: position m, velocity m/s, angle rad, angular velocity rad/s. Reward 1 per step."""

    def reset(keys: Tensor) -> TensorDict:
        return state_of((2.0 * rng.uniform(keys, (4,)) - 1.0) * cfg.start, keys.shape)

    def step(state: TensorDict, action: Tensor, noise: object) -> TensorDict:
        obs = state["obs"]
        push, turn = _accelerations(cfg, obs, torch.where(action == 1, cfg.force, -cfg.force).to(obs.dtype))
        position, velocity, angle, spin = obs.unbind(-1)
        moved = (position + cfg.dt * velocity, velocity + cfg.dt * push, angle + cfg.dt * spin, spin + cfg.dt * turn)
        terminated = (moved[0].abs() > cfg.max_position) | (moved[2].abs() > cfg.max_angle)
        after = {
            "obs": torch.stack(moved, -1),
            "reward": torch.ones_like(position),
            "terminated": terminated,
            "truncated": torch.zeros_like(terminated),
        }
        return state.copy().update(after)

    bounds = (2.0 * cfg.max_position, inf, 2.0 * cfg.max_angle, inf)
    space = Box(tuple(-b for b in bounds), bounds, (4,))
    return time_limit(Env(reset, step, space, Discrete(2)), cfg.max_episode_steps)
