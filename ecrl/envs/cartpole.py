"""CartPole: balance a pole on a cart by pushing the cart left (0) or right (1).

With the default settings, the environment has the dynamics, rewards and episode ends of Gymnasium's `CartPole-v1`.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf, pi

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Count, Fraction, Positive
from ecrl.envs.core import NEVER, Env, constant_fields, state_of, time_limit
from ecrl.registry import register_env, register_expert
from ecrl.spaces import Box, Discrete


class CartPoleConfig(ConfigModel):
    """Settings of CartPole: physical constants in SI units, bounds, start range, time limit and observation."""

    gravity: Positive = Field(9.8, description="gravitational acceleration, m/s^2")
    cart_mass: Positive = Field(1.0, description="mass of the cart, kg")
    pole_mass: Positive = Field(0.1, description="mass of the pole, kg")
    half_length: Positive = Field(0.5, description="half the pole's length, m")
    force: Positive = Field(10.0, description="force of a push, N")
    dt: Positive = Field(0.02, description="time step, s")
    max_position: Positive = Field(2.4, description="bound of |x|, m, beyond which the episode ends")
    max_angle: Positive = Field(
        12.0 * 2.0 * pi / 360.0, description="bound of |theta|, rad, beyond which the episode ends"
    )
    start: Positive = Field(
        0.05, description="x (m), x_dot (m/s), theta (rad) and theta_dot (rad/s) start uniformly in [-start, start)"
    )
    max_episode_steps: Count = Field(500, description="time limit, steps")
    observe_velocity: bool = Field(True, description="observe x_dot and theta_dot; if false, the task needs memory")


_CONSTANTS = ("gravity", "cart_mass", "pole_mass", "half_length", "force")


def _accelerations(state: TensorDict, theta: Tensor, theta_dot: Tensor, force: Tensor) -> tuple[Tensor, Tensor]:
    """Return the accelerations `x_acc` (m/s^2) and `theta_acc` (rad/s^2) from the equations in `cartpole`."""
    gravity, cart_mass, pole_mass, half_length = (state[name] for name in _CONSTANTS[:4])
    sin_theta, cos_theta = torch.sin(theta), torch.cos(theta)
    total_mass, pole_mass_length = cart_mass + pole_mass, pole_mass * half_length
    temp = (force + pole_mass_length * theta_dot.square() * sin_theta) / total_mass
    theta_acc = (gravity * sin_theta - cos_theta * temp) / (
        half_length * (4.0 / 3.0 - pole_mass * cos_theta.square() / total_mass)
    )
    x_acc = temp - pole_mass_length * theta_acc * cos_theta / total_mass
    return x_acc, theta_acc


@register_env("cartpole")
def cartpole(cfg: CartPoleConfig) -> Env:
    """Balance a pole that is hinged to a cart on a rail without friction.

        M = cart_mass + pole_mass;    m = pole_mass;    l = half_length;    F = force if action is 1, else -force

        temp      = (F + m l theta_dot^2 sin(theta)) / M
        theta_acc = (gravity sin(theta) - cos(theta) temp) / (l (4/3 - m cos(theta)^2 / M))
        x_acc     = temp - m l theta_acc cos(theta) / M

        next_x     = x + dt x_dot;            next_x_dot     = x_dot + dt x_acc
        next_theta = theta + dt theta_dot;    next_theta_dot = theta_dot + dt theta_acc

    The integrator is explicit Euler. The observation `[*B, 4]` is x (m), x_dot (m/s), theta (rad) and theta_dot
    (rad/s). The angle theta is 0 for an upright pole. The action `[*B]` is 0 or 1. The reward of every step is 1. The
    episode terminates if |next_x| exceeds max_position or |next_theta| exceeds max_angle, and is truncated at
    max_episode_steps.

    If observe_velocity is false, the observation `[*B, 2]` is x and theta, and the state has all four numbers in the
    field `motion`.

    The state also stores gravity, cart_mass, pole_mass, half_length and force, each `[*B]`, so that events such as
    `randomize_field` can change these constants.

    Source: Barto, Sutton and Anderson 1983, "Neuronlike adaptive elements that can solve difficult learning control
        problems"; equations of motion without friction from Florian 2007, "Correct equations for the dynamics of the
        cart-pole system".
    """

    def reset(keys: Tensor) -> TensorDict:
        obs = (2.0 * rng.uniform(keys, (4,)) - 1.0) * cfg.start
        return state_of(obs, keys.shape, **constant_fields(cfg, _CONSTANTS, obs[..., 0]))

    def step(state: TensorDict, action: Tensor, noise: object) -> TensorDict:
        obs = state["obs"]
        x, x_dot, theta, theta_dot = obs.unbind(-1)
        force = torch.where(action == 1, state["force"], -state["force"])
        x_acc, theta_acc = _accelerations(state, theta, theta_dot, force)
        next_x, next_x_dot = x + cfg.dt * x_dot, x_dot + cfg.dt * x_acc
        next_theta, next_theta_dot = theta + cfg.dt * theta_dot, theta_dot + cfg.dt * theta_acc
        terminated = (next_x.abs() > cfg.max_position) | (next_theta.abs() > cfg.max_angle)
        after = {
            "obs": torch.stack((next_x, next_x_dot, next_theta, next_theta_dot), -1),
            "reward": torch.ones_like(x),
            "terminated": terminated,
            "truncated": torch.zeros_like(terminated),
        }
        return state.copy().update(after)

    bounds = (2.0 * cfg.max_position, inf, 2.0 * cfg.max_angle, inf)
    space = Box(tuple(-b for b in bounds), bounds, (4,))
    core = Env(reset, step, space, Discrete(2), min_truncation_gap=NEVER)
    return time_limit(core if cfg.observe_velocity else _without_velocity(core, bounds[::2]), cfg.max_episode_steps)


def _without_velocity(env: Env, bounds: tuple[float, ...]) -> Env:
    """Return a CartPole whose observation is x and theta.

    `bounds` are the bounds of |x| and |theta| in the observation space.
    """

    def observe(state: TensorDict) -> Tensor:
        return torch.stack((state["motion"][..., 0], state["motion"][..., 2]), -1)

    def hidden(state: TensorDict) -> TensorDict:
        state = state.copy().set("motion", state["obs"])
        return state.set("obs", observe(state))

    def reset(keys: Tensor) -> TensorDict:
        return hidden(env.reset(keys))

    def step(state: TensorDict, action: Tensor, noise: object) -> TensorDict:
        return hidden(env.step(state.exclude("motion").set("obs", state["motion"]), action, noise))

    space = Box(tuple(-b for b in bounds), bounds, (2,))
    return replace(env, reset=reset, step=step, observation_space=space, observe=observe)


class CartPoleExpertConfig(ConfigModel):
    """Settings of the scripted expert of CartPole."""

    noise: Fraction = Field(0.0, description="probability of a random push")


_GAINS = (0.1, 0.3, 1.0, 0.5)
"""Weights of x, x_dot, theta and theta_dot in `cartpole_expert`."""


@register_expert("cartpole")
def cartpole_expert(cfg: CartPoleExpertConfig, env: Env) -> Callable[[TensorDict, Tensor], Tensor]:
    """Return a linear controller, which pushes right if 0.1 x + 0.3 x_dot + theta + 0.5 theta_dot is positive.

    Otherwise, the controller pushes left. With probability `noise`, the direction of a push is random.
    """

    def act(state: TensorDict, keys: Tensor) -> Tensor:
        motion = state["motion"] if "motion" in state else state["obs"]
        push = ((motion * motion.new_tensor(_GAINS)).sum(-1) > 0.0).long()
        random_push = rng.randint(rng.fold_in(keys, 1), low=0, high=2)
        return torch.where(rng.uniform(keys) < cfg.noise, random_push, push)

    return act
