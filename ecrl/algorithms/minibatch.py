"""What algorithms that learn from minibatches share: their config, the passes over the rows, one gradient step.

A step is one function of tensors and can be compiled; which of its branches exist depends on config alone.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import Parts
from ecrl.algorithms.optimizer import OPTIMIZERS, LearningConfig, adapted_rate, optimizer_of, scheduled
from ecrl.distributed import all_mean
from ecrl.errors import ConfigError
from ecrl.kernels import clip_by_global_norm
from ecrl.policies import acting_params
from ecrl.strict import Count, Positive
from ecrl.types import Logs

_BATCH_SIZE = 64


class MinibatchConfig(LearningConfig):
    """How often and in which pieces a rollout is learnt from."""

    n_epochs: Count = Field(default=10, description="passes over each rollout")
    batch_size: Count | None = Field(
        default=None, description="transitions per gradient step, at most the rollout; 64 if num_minibatches is absent"
    )
    num_minibatches: Count | None = Field(default=None, description="gradient steps per pass, in place of batch_size")
    target_kl: Positive | None = Field(
        default=None, description="stop learning from a rollout once the policy has moved this far, nats"
    )

    @model_validator(mode="after")
    def _one_size(self) -> "MinibatchConfig":
        if self.batch_size is not None and self.num_minibatches is not None:
            raise ValueError("batch_size stands beside num_minibatches; keep one of them")
        return self


class Learner(NamedTuple):
    """What stays the same over the steps of a run.

    `loss(policy, variant, params, batch, mask, hyper)` gives a 0-d loss and logs with approx_kl and count; `variant`
    holds the algorithm's choices; `step` is the optimiser's.
    """

    loss: Callable[..., tuple[Tensor, Logs]]
    policy: Any
    variant: Any
    step: Callable[..., tuple[TensorDict, TensorDict]]


def shuffled(key: Tensor, sizes: list[int], n_epochs: int) -> tuple[Tensor, Tensor]:
    """Row indices `[n_epochs * len(sizes), max(sizes)]` of minibatches of these sizes, every epoch in its own order.

    A smaller minibatch is filled up with its own first row; the second result, of the same shape, is False there.
    """
    order = rng.permutation(rng.split(key, n_epochs), sum(sizes))
    size = torch.tensor(sizes, device=key.device).unsqueeze(1)
    slot = torch.arange(max(sizes), device=key.device)
    real = slot < size
    index = order[:, size.cumsum(0) - size + slot.where(real, 0)]
    return index.reshape(-1, max(sizes)), real.expand(n_epochs, -1, -1).reshape(-1, max(sizes))


@cache  # said once
def _held(key: str, given: int, rows: int) -> int:
    if given > rows:
        text = f"algorithm.cfg.{key} {given} is above the rollout's {rows} transitions; using {rows}"
        warnings.warn(text, stacklevel=2)
    return min(given, rows)


def sizes_of(cfg: MinibatchConfig, rows: int) -> list[int]:
    """Rows of each minibatch of a pass: the last one smaller by `batch_size`, all nearly equal by `num_minibatches`.

    A size or number that the rollout does not hold is lowered to what it does, which is said once.
    """
    if cfg.num_minibatches is None:
        size = _held("batch_size", cfg.batch_size or _BATCH_SIZE, rows)
        return [min(size, rows - first) for first in range(0, rows, size)]
    number = _held("num_minibatches", cfg.num_minibatches, rows)
    return [rows // number + (i < rows % number) for i in range(number)]


def check_groups(params: TensorDict, cfg: Any) -> None:
    """Refuse `critic_max_grad_norm` where there are no parameters of a critic of its own."""
    if cfg.critic_max_grad_norm is not None and "critic" not in params:
        have = ", ".join(sorted(map(str, params.keys())))
        raise ConfigError(f"algorithm.cfg.critic_max_grad_norm: the policy has no parameters 'critic', only {have}")


def _clipped(grads: TensorDict, hyper: TensorDict) -> tuple[TensorDict, Logs]:
    """Gradients held within the norms that `hyper` gives, and the norms they had."""
    if "critic_max_grad_norm" not in hyper:
        grads, norm = clip_by_global_norm(grads, max_norm=hyper["max_grad_norm"])
        return grads, {"grad_norm": norm}
    actor, norm = clip_by_global_norm(grads.exclude("critic"), max_norm=hyper["max_grad_norm"])
    critic, critic_norm = clip_by_global_norm(grads.select("critic"), max_norm=hyper["critic_max_grad_norm"])
    return actor.copy().update(critic), {"grad_norm": norm, "critic_grad_norm": critic_norm}


def _frozen(stopped: Tensor, old: TensorDict, new: TensorDict) -> TensorDict:
    return new.apply(lambda n, o: torch.where(stopped, o, n), old)


def _loss(
    params: TensorDict, learner: Learner, norm: TensorDict, batch: TensorDict, mask: Tensor, hyper: TensorDict
) -> tuple[Tensor, Logs]:
    return learner.loss(learner.policy, learner.variant, acting_params(params, norm), batch, mask, hyper)


def _minibatch(
    learner: Learner,
    params: TensorDict,
    opt: TensorDict,
    rate: Tensor,
    stopped: Tensor,
    norm: TensorDict,
    rows: TensorDict,
    index: Tensor,
    real: Tensor,
    hyper: TensorDict,
) -> tuple[TensorDict, TensorDict, Tensor, Tensor, Logs]:
    """One gradient step on the rows at `index`.

    With `target_kl` in `hyper`, nothing moves once it was exceeded: not by the step that shows it, nor by later ones.
    Only an adaptive rate still answers to the KL that stopped the others.
    """
    batch, numbers = cast(TensorDict, rows[index]), cast(TensorDict, hyper["optimizer"])
    gradient = torch.func.grad_and_value(_loss, has_aux=True)
    grads, (_, logs) = gradient(params, learner, norm, batch, batch["mask"] & real, hyper)
    grads = all_mean(cast(TensorDict, grads), weight=logs["count"])
    kl = all_mean(logs["approx_kl"], weight=logs["count"])
    grads, norms = _clipped(grads, hyper)
    counted = all_mean(logs["count"], weight=torch.ones_like(kl))
    rate = torch.where(stopped | (counted == 0.0), rate, adapted_rate(rate, kl, hyper))  # no evidence, no change
    moved, moved_opt = learner.step(params, grads, opt, learning_rate=rate, **dict(numbers.items()))
    if "target_kl" not in hyper:
        return moved, moved_opt, rate, stopped, logs | norms
    stopped = stopped | (kl > hyper["target_kl"])
    logs["count"] = logs["count"].masked_fill(stopped, 0.0)
    return _frozen(stopped, params, moved), _frozen(stopped, opt, moved_opt), rate, stopped, logs | norms


def mean_logs(steps: list[Logs]) -> Logs:
    """Logs of an iteration: the mean over gradient steps, each weighted by its `count`."""
    names = [name for name in steps[0] if name != "count"]
    weight = torch.stack([logs["count"] for logs in steps])
    weight = weight / weight.sum().clamp(min=1.0)
    columns = {name: torch.stack([logs[name] for logs in steps]) for name in names}
    # Filled: a step that does not count may hold infinity, and 0 * inf is nan.
    return {name: (column.masked_fill(weight == 0.0, 0.0) * weight).sum() for name, column in columns.items()}


def learn(
    parts: Parts, state: TensorDict, rows: TensorDict, loss: Callable[..., tuple[Tensor, Logs]], variant: Any
) -> tuple[TensorDict, Logs]:
    """`n_epochs` passes of minibatch steps over `rows` `[M]`: the state with params and opt moved on, and mean logs."""
    cfg: Any = parts.cfg.algorithm.cfg
    hyper, params, opt, norm = (cast(TensorDict, state[key]) for key in ("hyper", "params", "opt", "norm"))
    key = rng.fold_in(rng.fold_in(state["key"], rng.UPDATE), state["update_step"])
    index, real = shuffled(key, sizes_of(cfg, len(rows)), cfg.n_epochs)
    rate = scheduled(cfg.lr_scheduler, state, parts.cfg.trainer.iterations)
    stopped, steps, stops = torch.zeros((), dtype=torch.bool, device=key.device), [], []
    learner = Learner(loss, parts.policy, variant, OPTIMIZERS[optimizer_of(cfg).name].step)
    minibatch, norm = parts.jit(_minibatch, learner), cast(TensorDict, norm.select("obs", strict=False))
    for i, r in zip(index.unbind(), real.unbind(), strict=True):
        params, opt, rate, stopped, logs = minibatch(params, opt, rate, stopped, norm, rows, i, r, hyper)
        steps.append(logs)
        stops.append(stopped)
    state = state.copy().update({"params": params, "opt": opt})
    logs = mean_logs(steps) | {"learning_rate": rate}
    if "target_kl" in hyper:
        logs["skipped_frac"] = torch.stack(stops).to(rate.dtype).mean()
    return state.set("learning_rate", rate) if "learning_rate" in state else state, logs
