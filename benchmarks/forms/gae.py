"""Advantages and value targets of `[T, N]` memory, time-major, without time limits: what all libraries can express."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.forms.common import Cost, Inputs, Make, awaited, compiled, jitted, tensors
from benchmarks.turns import Call

GAMMA, LAMBDA = 0.99, 0.95


def inputs(envs: int, steps: int) -> Inputs:
    """Rewards and ends `[T, N]`, values `[T + 1, N]`; an episode in fifty ends at each step."""
    draw = np.random.default_rng(0)
    reward, value = (draw.standard_normal((rows, envs), dtype=np.float32) for rows in (steps, steps + 1))
    return {"reward": reward, "value": value, "done": draw.random((steps, envs)) < 0.02}


def cost(envs: int, steps: int) -> Cost:
    """Read reward, value and done once, write two arrays; delta, advantage and target are eight operations."""
    return Cost(envs * steps * (4 + 4 + 1 + 4 + 4), envs * steps * 8)


def ours(reward: Tensor, value: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
    """Our kernel on the transposes, which are views."""
    from ecrl.kernels import gae

    r, v, d = reward.t(), value.t(), done.t()
    advantage, target = gae(r, v[:, :-1], v[:, 1:], d, d, gamma=GAMMA, gae_lambda=LAMBDA)
    return advantage.t(), target.t()


def ecrl_compiled(given: Inputs, device: str) -> Call:
    """Ours, compiled."""
    t, fn = tensors(given, device), compiled(ours, device)
    return lambda: fn(t["reward"], t["value"], t["done"])


def ecrl_eager(given: Inputs, device: str) -> Call:
    """Ours, eager."""
    t, fn = tensors(given, device), awaited(ours, device)
    return lambda: fn(t["reward"], t["value"], t["done"])


def rlax_jitted(given: Inputs, device: str) -> Call:
    """Rlax over environments along the second axis: one loop over time, whose steps are rows of memory."""
    import jax
    import rlax

    batched = jax.vmap(rlax.truncated_generalized_advantage_estimation, in_axes=(1, 1, None, 1), out_axes=1)

    def fn(reward: Any, value: Any, done: Any) -> tuple[Any, Any]:
        advantage = batched(reward, GAMMA * (1.0 - done), LAMBDA, value)
        return advantage, advantage + value[:-1]

    return jitted(fn, given["reward"], given["value"], given["done"])


def sb3(given: Inputs, device: str) -> Call:
    """Stable-Baselines3's own buffer, a loop over time in NumPy; on the CPU also where the others have a GPU."""
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import RolloutBuffer

    steps, envs = given["reward"].shape
    box = Box(-1.0, 1.0, (1,))
    buffer = RolloutBuffer(steps, box, Discrete(2), device="cpu", gae_lambda=LAMBDA, gamma=GAMMA, n_envs=envs)
    buffer.rewards, buffer.values = given["reward"], given["value"][:-1]
    buffer.episode_starts[1:] = given["done"][:-1]
    last, done = torch.tensor(given["value"][-1]), given["done"][-1]

    def call() -> tuple[np.ndarray, np.ndarray]:
        buffer.compute_returns_and_advantage(last, done)
        return buffer.advantages, buffer.returns

    return call


def _torchrl(name: str, given: Inputs, device: str) -> Call:
    import torchrl.objectives.value.functional as functional

    t, fn = tensors(given, device), awaited(getattr(functional, name), device)
    value, after = t["value"][:-1], t["value"][1:]  # environments in the place of features: rows of memory again
    return lambda: fn(GAMMA, LAMBDA, value, after, t["reward"], t["done"], t["done"])


def torchrl(given: Inputs, device: str) -> Call:
    """TorchRL's loop over time."""
    return _torchrl("generalized_advantage_estimate", given, device)


def torchrl_vec(given: Inputs, device: str) -> Call:
    """TorchRL's vectorised form."""
    return _torchrl("vec_generalized_advantage_estimate", given, device)


OURS: dict[str, Make] = {"ecrl compiled": ecrl_compiled, "ecrl eager": ecrl_eager}
PEERS: dict[str, Make] = {"rlax jitted": rlax_jitted, "sb3 numpy": sb3, "torchrl": torchrl, "torchrl vec": torchrl_vec}
