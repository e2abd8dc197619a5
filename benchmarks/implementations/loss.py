"""PPO's loss with its gradients and its logs, on `[M]` rows."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.alternating_calls import Call
from benchmarks.implementations.common import Cost, Inputs, Make, awaited, compiled, jitted, tensors

CLIP, VF, ENT = 0.2, 0.5, 0.01
NAMES = ("log_prob", "old_log_prob", "advantage", "entropy", "value", "value_target")


def inputs(rows: int) -> Inputs:
    """Return the arrays in `NAMES`. The two log-probabilities are so close that only some ratios are clipped."""
    draw = np.random.default_rng(0)
    arrays = {name: draw.standard_normal(rows, dtype=np.float32) for name in NAMES}
    arrays["old_log_prob"] = arrays["log_prob"] + np.multiply(0.2, arrays["old_log_prob"], dtype=np.float32)
    return arrays


def cost(rows: int) -> Cost:
    """Return the cost: per row, six numbers are read and three gradients are written, in about forty operations."""
    return Cost(rows * 4 * (6 + 3), rows * 40)


def _ecrl(log_prob: Tensor, old: Tensor, advantage: Tensor, entropy: Tensor, value: Tensor, target: Tensor) -> Any:
    from ecrl.kernels import ppo_loss

    given = partial(ppo_loss, old_log_prob=old, advantage=advantage, value_target=target)

    def loss(log_prob: Tensor, entropy: Tensor, value: Tensor) -> Any:
        return given(log_prob=log_prob, entropy=entropy, value=value, clip_coef=CLIP, vf_coef=VF, ent_coef=ENT)

    grads, (total, logs) = torch.func.grad_and_value(loss, (0, 1, 2), has_aux=True)(log_prob, entropy, value)
    return total, *grads, logs["approx_kl"], logs["clip_frac"], logs["explained_variance"]


def ecrl_compiled(arrays: Inputs, device: str) -> Call:
    """Return a call of ecrl's kernel, compiled."""
    t, fn = tensors(arrays, device), compiled(_ecrl, device)
    return lambda: fn(*(t[name] for name in NAMES))


def ecrl_eager(arrays: Inputs, device: str) -> Call:
    """Return a call of ecrl's kernel, eager."""
    t, fn = tensors(arrays, device), awaited(_ecrl, device)
    return lambda: fn(*(t[name] for name in NAMES))


def cleanrl_loss(
    log_prob: Tensor, old: Tensor, advantage: Tensor, entropy: Tensor, value: Tensor, target: Tensor
) -> tuple[Tensor, ...]:
    """Return CleanRL's loss from its ppo.py, without the factor of one half in the critic's loss."""
    log_ratio = log_prob - old
    ratio = log_ratio.exp()
    with torch.no_grad():
        approx_kl = ((ratio - 1) - log_ratio).mean()
        clip_frac = ((ratio - 1.0).abs() > CLIP).float().mean()
        explained = 1 - (target - value).var(correction=0) / target.var(correction=0)
    surrogate = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)).mean()
    loss = surrogate - ENT * entropy.mean() + VF * ((value - target) ** 2).mean()
    return loss, approx_kl, clip_frac, explained


def cleanrl(arrays: Inputs, device: str) -> Call:
    """Return a call of CleanRL's loss with autograd, eager."""
    t = tensors(arrays, device)
    moving = [t[name].requires_grad_() for name in ("log_prob", "entropy", "value")]

    def call() -> tuple[Tensor, ...]:
        loss, *logs = cleanrl_loss(*(t[name] for name in NAMES))
        return loss.detach(), *torch.autograd.grad(loss, moving), *logs

    return awaited(call, device)


def rlax_jitted(arrays: Inputs, device: str) -> Call:
    """Return a call of rlax's surrogate, with the rest in jax, jitted."""
    import jax
    import jax.numpy as jnp
    import rlax

    def loss(log_prob: Any, entropy: Any, value: Any, old: Any, advantage: Any, target: Any) -> Any:
        log_ratio = log_prob - old
        ratio = jnp.exp(log_ratio)
        logs = (ratio - 1 - log_ratio).mean(), (jnp.abs(ratio - 1.0) > CLIP).mean()
        error = value - target
        total = rlax.clipped_surrogate_pg_loss(ratio, advantage, CLIP) + VF * (error**2).mean() - ENT * entropy.mean()
        return total, (*logs, 1.0 - error.var() / target.var())

    def fn(log_prob: Any, old: Any, advantage: Any, entropy: Any, value: Any, target: Any) -> Any:
        of = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        (total, logs), grads = of(log_prob, entropy, value, old, advantage, target)
        return total, *grads, *logs

    return jitted(fn, *(arrays[name] for name in NAMES))


ECRL: dict[str, Make] = {"ecrl compiled": ecrl_compiled, "ecrl eager": ecrl_eager}
OTHERS: dict[str, Make] = {"cleanrl eager": cleanrl, "rlax jitted": rlax_jitted}
