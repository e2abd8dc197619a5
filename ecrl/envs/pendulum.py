"""Pendulum: swing a rod up and hold it upright with a bounded torque.

With the default settings, the environment has the dynamics, rewards and episode ends of Gymnasium's `Pendulum-v1`.
"""

from math import pi

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Count, Positive
from ecrl.envs.core import NEVER, Env, constant_fields, state_of, time_limit
from ecrl.registry import register_env
from ecrl.spaces import Box, box


class PendulumConfig(ConfigModel):
    """Settings of Pendulum: physical constants in SI units, bounds, the time limit and the observation."""

    gravity: Positive = Field(10.0, description="gravitational acceleration, m/s^2")
    mass: Positive = Field(1.0, description="mass of the rod, kg")
    length: Positive = Field(1.0, description="length of the rod, m")
    dt: Positive = Field(0.05, description="time step, s")
    max_speed: Positive = Field(8.0, description="largest angular velocity in either direction, rad/s")
    max_torque: Positive = Field(2.0, description="largest torque in either direction, N m")
    max_episode_steps: Count = Field(200, description="time limit, steps")
    observe_velocity: bool = Field(True, description="observe theta_dot; if false, the task needs memory")


_CONSTANTS = ("gravity", "mass", "length")


@register_env("pendulum")
def pendulum(cfg: PendulumConfig) -> Env:
    """Swing up a uniform rod that turns about one of its ends, and hold the rod upright.

        u         = clip(action, -max_torque, max_torque)
        theta_acc = 3 gravity / (2 length) sin(theta) + 3 / (mass length^2) u

        next_theta_dot = clip(theta_dot + dt theta_acc, -max_speed, max_speed)
        next_theta     = theta + dt next_theta_dot

        reward = -(wrap(theta)^2 + 0.1 theta_dot^2 + 0.001 u^2);    wrap(theta) = theta modulo 2 pi, in [-pi, pi)

    The integrator is semi-implicit Euler. The observation `[*B, 3]` is cos(theta), sin(theta) and theta_dot (rad/s).
    The angle theta (rad) is 0 for an upright rod. The action `[*B, 1]` is the torque in N m. At the start, theta is
    uniform in [-pi, pi) and theta_dot is uniform in [-1, 1). Every episode is truncated at max_episode_steps. If
    observe_velocity is false, the observation `[*B, 2]` is cos(theta) and sin(theta).

    The state stores theta as `angle` and theta_dot as `speed`. The state also stores gravity, mass and length, each
    `[*B]`, so that events such as `randomize_field` can change these constants.

    Source: Gymnasium's `Pendulum-v1`.
    """

    def observed(theta: Tensor, theta_dot: Tensor) -> Tensor:
        angle = torch.cos(theta), torch.sin(theta)
        return torch.stack((*angle, theta_dot) if cfg.observe_velocity else angle, -1)

    def reset(keys: Tensor) -> TensorDict:
        unit_theta, theta_dot = (2.0 * rng.uniform(keys, (2,)) - 1.0).unbind(-1)
        theta = pi * unit_theta
        constants = constant_fields(cfg, _CONSTANTS, theta)
        return state_of(observed(theta, theta_dot), keys.shape, angle=theta, speed=theta_dot, **constants)

    def step(state: TensorDict, action: Tensor, noise: object) -> TensorDict:
        theta, theta_dot = state["angle"], state["speed"]
        gravity, mass, length = (state[name] for name in _CONSTANTS)
        torque = action[..., 0].clamp(-cfg.max_torque, cfg.max_torque)
        wrapped_theta = torch.remainder(theta + pi, 2.0 * pi) - pi
        theta_acc = 1.5 * gravity / length * torch.sin(theta) + 3.0 / (mass * length.square()) * torque
        next_theta_dot = (theta_dot + cfg.dt * theta_acc).clamp(-cfg.max_speed, cfg.max_speed)
        next_theta = theta + cfg.dt * next_theta_dot
        terminated = torch.zeros_like(state["terminated"])
        after = {
            "angle": next_theta,
            "speed": next_theta_dot,
            "obs": observed(next_theta, next_theta_dot),
            "reward": -(wrapped_theta.square() + 0.1 * theta_dot.square() + 0.001 * torque.square()),
            "terminated": terminated,
            "truncated": terminated.clone(),
        }
        return state.copy().update(after)

    bounds = (1.0, 1.0, cfg.max_speed) if cfg.observe_velocity else (1.0, 1.0)
    observation_space = Box(tuple(-b for b in bounds), bounds, (len(bounds),))
    action_space = box(-cfg.max_torque, cfg.max_torque, 1)

    def observe(state: TensorDict) -> Tensor:
        return observed(state["angle"], state["speed"])

    core = Env(reset, step, observation_space, action_space, observe=observe, lockstep=True, min_truncation_gap=NEVER)
    return time_limit(core, cfg.max_episode_steps)
