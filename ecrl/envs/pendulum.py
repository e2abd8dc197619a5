"""Pendulum, step for step Gymnasium's `Pendulum-v1`: swing up and hold with bounded torque."""

from math import pi

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Count, Positive
from ecrl.envs.core import Env, state_of, time_limit
from ecrl.registry import register_env
from ecrl.spaces import Box, box


class PendulumConfig(ConfigModel):
    """Physical constants, SI units."""

    gravity: Positive = Field(10.0, description="m/s^2")
    mass: Positive = Field(1.0, description="kg")
    length: Positive = Field(1.0, description="m")
    dt: Positive = Field(0.05, description="time step, s")
    max_speed: Positive = Field(8.0, description="the speed is clipped there, rad/s")
    max_torque: Positive = Field(2.0, description="actions are clipped there, N m")
    max_episode_steps: Count = Field(200, description="time limit, steps")


def _observe(angle: Tensor, speed: Tensor) -> Tensor:
    return torch.stack((torch.cos(angle), torch.sin(angle), speed), -1)


@register_env("pendulum")
def pendulum(cfg: PendulumConfig) -> Env:
    """Observation `[*B, 3]`: cos and sin of the angle from upright, speed rad/s. Action `[*B, 1]`: torque, N m.

    reward = -(angle^2 + 0.1 speed^2 + 0.001 torque^2), angle in [-pi, pi)
    """

    def reset(keys: Tensor) -> TensorDict:
        angle, speed = (2.0 * rng.uniform(keys, (2,)) - 1.0).unbind(-1)
        return state_of(_observe(pi * angle, speed), keys.shape, angle=pi * angle, speed=speed)

    def step(state: TensorDict, action: Tensor, noise: object) -> TensorDict:
        angle, speed, torque = state["angle"], state["speed"], action[..., 0].clamp(-cfg.max_torque, cfg.max_torque)
        wrapped = torch.remainder(angle + pi, 2.0 * pi) - pi
        pull = 1.5 * cfg.gravity / cfg.length * torch.sin(angle) + 3.0 / (cfg.mass * cfg.length**2) * torque
        new_speed = (speed + cfg.dt * pull).clamp(-cfg.max_speed, cfg.max_speed)
        new_angle = angle + cfg.dt * new_speed
        no = torch.zeros_like(state["terminated"])
        after = {
            "angle": new_angle,
            "speed": new_speed,
            "obs": _observe(new_angle, new_speed),
            "reward": -(wrapped.square() + 0.1 * speed.square() + 0.001 * torque.square()),
            "terminated": no,
            "truncated": no.clone(),
        }
        return state.copy().update(after)

    space = Box((-1.0, -1.0, -cfg.max_speed), (1.0, 1.0, cfg.max_speed), (3,))
    torques = box(-cfg.max_torque, cfg.max_torque, 1)

    def observe(state: TensorDict) -> Tensor:
        return _observe(state["angle"], state["speed"])

    return time_limit(Env(reset, step, space, torques, observe=observe, lockstep=True), cfg.max_episode_steps)
