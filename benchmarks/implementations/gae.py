"""Advantages and value targets of time-major arrays `[T, N]` without time limits, which all libraries support."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.alternating_calls import Call
from benchmarks.implementations.common import Cost, Inputs, Make, awaited, compiled, jitted, tensors

GAMMA, LAMBDA = 0.99, 0.95


def inputs(envs: int, steps: int) -> Inputs:
    """Return rewards and ends `[T, N]` and values `[T + 1, N]`. A step ends its episode with probability 0.02."""
    draw = np.random.default_rng(0)
    reward, value = (draw.standard_normal((rows, envs), dtype=np.float32) for rows in (steps, steps + 1))
    return {"reward": reward, "value": value, "done": draw.random((steps, envs)) < 0.02}


def cost(envs: int, steps: int) -> Cost:
    """Return the cost: per step, three numbers are read and two are written, in eight operations."""
    return Cost(envs * steps * (4 + 4 + 1 + 4 + 4), envs * steps * 8)


def _ecrl(reward: Tensor, value: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of ecrl's kernel on transposed views."""
    from ecrl.kernels import gae

    r, v, d = reward.t(), value.t(), done.t()
    advantage, target = gae(r, v[:, :-1], v[:, 1:], d, d, gamma=GAMMA, gae_lambda=LAMBDA)
    return advantage.t(), target.t()


def ecrl_compiled(arrays: Inputs, device: str) -> Call:
    """Return a call of ecrl's kernel, compiled."""
    t, fn = tensors(arrays, device), compiled(_ecrl, device)
    return lambda: fn(t["reward"], t["value"], t["done"])


def ecrl_eager(arrays: Inputs, device: str) -> Call:
    """Return a call of ecrl's kernel, eager."""
    t, fn = tensors(arrays, device), awaited(_ecrl, device)
    return lambda: fn(t["reward"], t["value"], t["done"])


def ecrl_torch_compile(arrays: Inputs, device: str) -> Call:
    """Return a call of ecrl's kernel in a function that `torch.compile` compiles, as in another trainer."""
    t, fn = tensors(arrays, device), awaited(torch.compile(_ecrl, fullgraph=True), device)
    return lambda: fn(t["reward"], t["value"], t["done"])


def rlax_jitted(arrays: Inputs, device: str) -> Call:
    """Return a call of rlax, vmapped over the second axis and jitted. Each step of its loop reads a row of memory."""
    import jax
    import rlax

    batched = jax.vmap(rlax.truncated_generalized_advantage_estimation, in_axes=(1, 1, None, 1), out_axes=1)

    def fn(reward: Any, value: Any, done: Any) -> tuple[Any, Any]:
        advantage = batched(reward, GAMMA * (1.0 - done), LAMBDA, value)
        return advantage, advantage + value[:-1]

    return jitted(fn, arrays["reward"], arrays["value"], arrays["done"])


def sb3(arrays: Inputs, device: str) -> Call:
    """Return a call of Stable-Baselines3's buffer, a loop over time in NumPy. It runs on the CPU for any device."""
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import RolloutBuffer

    steps, envs = arrays["reward"].shape
    box = Box(-1.0, 1.0, (1,))
    buffer = RolloutBuffer(steps, box, Discrete(2), device="cpu", gae_lambda=LAMBDA, gamma=GAMMA, n_envs=envs)
    buffer.rewards, buffer.values = arrays["reward"], arrays["value"][:-1]
    buffer.episode_starts[1:] = arrays["done"][:-1]
    last, done = torch.tensor(arrays["value"][-1]), arrays["done"][-1]

    def call() -> tuple[np.ndarray, np.ndarray]:
        buffer.compute_returns_and_advantage(last, done)
        return buffer.advantages, buffer.returns

    return call


def _torchrl(name: str, arrays: Inputs, device: str) -> Call:
    import torchrl.objectives.value.functional as functional

    t, fn = tensors(arrays, device), awaited(getattr(functional, name), device)
    value, after = t["value"][:-1], t["value"][1:]  # environments, in place of features, are the last axis
    return lambda: fn(GAMMA, LAMBDA, value, after, t["reward"], t["done"], t["done"])


def torchrl(arrays: Inputs, device: str) -> Call:
    """Return a call of TorchRL's loop over time."""
    return _torchrl("generalized_advantage_estimate", arrays, device)


def torchrl_vec(arrays: Inputs, device: str) -> Call:
    """Return a call of TorchRL's vectorised function."""
    return _torchrl("vec_generalized_advantage_estimate", arrays, device)


ECRL: dict[str, Make] = {
    "ecrl compiled": ecrl_compiled,
    "ecrl torch.compile": ecrl_torch_compile,
    "ecrl eager": ecrl_eager,
}
OTHERS: dict[str, Make] = {"rlax jitted": rlax_jitted, "sb3 numpy": sb3, "torchrl": torchrl, "torchrl vec": torchrl_vec}
