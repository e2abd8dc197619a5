"""Proximal policy optimisation: GAE, advantages standardised over the rollout, clipped surrogate, minibatch epochs.

Source: Schulman et al. 2017, arXiv:1707.06347.
"""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import Algorithm, Parts
from ecrl.algorithms.optimizer import (
    OPTIMIZERS,
    OptimizerConfig,
    SchedulerConfig,
    hyper_tensors,
    optimizer_numbers,
    scheduled,
)
from ecrl.distributed import all_mean
from ecrl.errors import ConfigError
from ecrl.kernels import clip_by_global_norm, compute_gae, ppo_loss, standardize, transitions
from ecrl.registry import register_algorithm
from ecrl.strict import ConfigModel, Count, Fraction, NonNegative, Positive
from ecrl.types import Logs

_ADVANTAGE_EPS = 1e-8
_NUMBERS = ("gamma", "gae_lambda", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm")


class PPOConfig(ConfigModel):
    """Hyperparameters; the numbers live in the state and may change during a run."""

    learning_rate: Positive | None = Field(
        default=None, description="step size of Adam, 3e-4; or give an optimizer block"
    )
    optimizer: OptimizerConfig | None = Field(
        default=None, description='such as {"name": "adam", "learning_rate": 3e-4}'
    )
    lr_scheduler: SchedulerConfig | None = Field(
        default=None, description='such as {"name": "linear"}; constant if absent'
    )
    n_epochs: Count = Field(default=10, description="passes over each rollout")
    batch_size: Count = Field(default=64, description="transitions per gradient step; at most the rollout")
    gamma: Fraction = Field(default=0.99, description="discount per step")
    gae_lambda: Fraction = Field(default=0.95, description="0: one-step advantages, 1: Monte-Carlo")
    clip_coef: Positive = Field(default=0.2, description="half-width of the ratio's trust interval")
    ent_coef: NonNegative = Field(default=0.01, description="weight of the entropy bonus")
    vf_coef: NonNegative = Field(default=0.5, description="weight of the critic's error")
    max_grad_norm: Positive = Field(default=0.5, description="largest norm of all gradients together")

    @model_validator(mode="after")
    def _one_learning_rate(self) -> "PPOConfig":
        if self.optimizer is not None and self.learning_rate is not None:
            raise ValueError("learning_rate stands beside optimizer.learning_rate; keep one of them")
        return self


def _optimizer_config(cfg: PPOConfig) -> OptimizerConfig:
    if cfg.optimizer is not None or cfg.learning_rate is None:
        return cfg.optimizer or OptimizerConfig()
    return OptimizerConfig(learning_rate=cfg.learning_rate)


def init(parts: Parts, key: Tensor) -> dict[str, TensorDict]:
    """Parameters, optimiser state and hyperparameters."""
    if parts.policy.value is None:
        raise ConfigError(f"policy.name: {parts.cfg.policy.name} has no critic, which ppo needs; use actor_critic")
    cfg: Any = parts.cfg.algorithm.cfg
    optimizer = _optimizer_config(cfg)
    numbers: dict[str, Any] = {name: getattr(cfg, name) for name in _NUMBERS}
    numbers |= {"learning_rate": optimizer.learning_rate, "optimizer": optimizer_numbers(optimizer)}
    params = parts.policy.init(rng.fold_in(key, rng.INIT))
    return {
        "params": params,
        "opt": OPTIMIZERS[optimizer.name].init(params),
        "hyper": hyper_tensors(numbers, key.device),
    }


def _prepare(rollout: TensorDict, hyper: TensorDict) -> TensorDict:
    """The rollout as `[N * T]` rows with standardised advantages and value targets."""
    advantage, value_target = compute_gae(rollout, hyper["gamma"], hyper["gae_lambda"])
    steps = transitions(rollout)
    mask = steps["mask"] if "mask" in steps else torch.ones_like(steps["done"])
    rows = steps.select("obs", "action", "sample_log_prob", "done").update(
        {"advantage": standardize(advantage, mask, eps=_ADVANTAGE_EPS), "value_target": value_target, "mask": mask}
    )
    return rows.reshape(-1)


def shuffled(key: Tensor, rows: int, batch_size: int, n_epochs: int) -> tuple[Tensor, Tensor]:
    """Row indices `[n_epochs * ceil(rows / batch_size), batch_size]`, each epoch in an order of its own.

    The last minibatch of an epoch is filled up with its own first row where `rows` does not divide; the second result,
    of the same shape, is False there.
    """
    batches = -(-rows // batch_size)
    order = rng.permutation(rng.split(key, n_epochs), rows)
    missing = batches * batch_size - rows
    first = order[:, (batches - 1) * batch_size :][:, :1]
    index = torch.cat((order, first.expand(n_epochs, missing)), 1)
    real = (torch.arange(batches * batch_size, device=key.device) < rows).expand_as(index)
    return index.reshape(-1, batch_size), real.reshape(-1, batch_size)


def _loss(
    params: TensorDict, evaluate: Callable, value: Callable, batch: TensorDict, mask: Tensor, hyper: TensorDict
) -> tuple[Tensor, Logs]:
    empty = TensorDict({}, [])
    log_prob, entropy = evaluate(params, empty, batch["obs"], batch["action"], batch["done"])
    return ppo_loss(
        log_prob,
        batch["sample_log_prob"],
        batch["advantage"],
        entropy,
        value(params, empty, batch["obs"]),
        batch["value_target"],
        mask,
        clip_coef=hyper["clip_coef"],
        vf_coef=hyper["vf_coef"],
        ent_coef=hyper["ent_coef"],
    )


def _minibatch(
    evaluate: Callable,
    value: Callable,
    step: Callable,
    params: TensorDict,
    opt: TensorDict,
    rows: TensorDict,
    index: Tensor,
    real: Tensor,
    hyper: TensorDict,
    learning_rate: Tensor,
) -> tuple[TensorDict, TensorDict, Logs]:
    """One gradient step on the rows at `index`."""
    batch, numbers = cast(TensorDict, rows[index]), cast(TensorDict, hyper["optimizer"])
    gradient = torch.func.grad_and_value(_loss, has_aux=True)
    grads, (_, logs) = gradient(params, evaluate, value, batch, batch["mask"] & real, hyper)
    grads = all_mean(cast(TensorDict, grads), weight=logs["count"])
    grads, norm = clip_by_global_norm(grads, max_norm=hyper["max_grad_norm"])
    params, opt = step(params, grads, opt, learning_rate=learning_rate, **dict(numbers.items()))
    return params, opt, logs | {"grad_norm": norm}


def mean_logs(steps: list[Logs]) -> Logs:
    """Logs of an iteration: the mean over gradient steps, each weighted by its `count`."""
    names = [name for name in steps[0] if name != "count"]
    weight = torch.stack([logs["count"] for logs in steps])
    weight = weight / weight.sum().clamp(min=1.0)
    return {name: (torch.stack([logs[name] for logs in steps]) * weight).sum() for name in names}


def update(parts: Parts, state: TensorDict, rollout: TensorDict) -> tuple[TensorDict, Logs]:
    """`n_epochs` passes of minibatch steps over the rollout."""
    cfg: Any = parts.cfg.algorithm.cfg
    hyper, params, opt = (cast(TensorDict, state[key]) for key in ("hyper", "params", "opt"))
    rows = _prepare(rollout, hyper)
    key = rng.fold_in(rng.fold_in(state["key"], rng.UPDATE), state["update_step"])
    if cfg.batch_size > len(rows):
        text = f"algorithm.cfg.batch_size {cfg.batch_size} is above the rollout's {len(rows)}; using {len(rows)}"
        warnings.warn(text, stacklevel=2)  # said once: Python shows a warning of one place and text once
    index, real = shuffled(key, len(rows), min(cfg.batch_size, len(rows)), cfg.n_epochs)
    rate = scheduled(cfg.lr_scheduler, hyper["learning_rate"], state["update_step"], parts.cfg.trainer.iterations)
    step = OPTIMIZERS[_optimizer_config(cfg).name].step
    minibatch = parts.jit(_minibatch, parts.policy.evaluate, parts.policy.value, step)
    steps = []
    for i, r in zip(index.unbind(), real.unbind(), strict=True):
        params, opt, logs = minibatch(params, opt, rows, i, r, hyper, rate)
        steps.append(logs)
    return state.copy().update({"params": params, "opt": opt}), mean_logs(steps) | {"learning_rate": rate}


@register_algorithm("ppo")
def ppo(cfg: PPOConfig) -> Algorithm:
    """PPO; the policy needs a critic."""
    return Algorithm(init, update)
