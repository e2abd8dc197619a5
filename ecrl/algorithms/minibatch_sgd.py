"""What algorithms that learn from minibatches share: their config, the passes over the rows, one gradient step.

A step is one function of tensors and can be compiled; which of its branches exist depends on config alone.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import Parts
from ecrl.algorithms.optimizer_config import OPTIMIZERS, LearningConfig, adapted_rate, optimizer_name, scheduled
from ecrl.config import Config
from ecrl.config.model import Count, Positive
from ecrl.distributed import all_mean
from ecrl.errors import ConfigError
from ecrl.kernels import clip_by_global_norm
from ecrl.kernels.scan_loop import Scan, chunking
from ecrl.policies import acting_params
from ecrl.pytree import flatten, mapped, replaced, unflatten
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

    `loss(policy, variant, params, batch, mask, hyper)` gives a 0-d loss and logs, all means over the rows where `mask`,
    and `count` of them; `variant` holds the algorithm's choices. `prepare(variant, rows, index, real)` gives fields of
    a whole minibatch that replace those of `rows`, as `loss` sees only a part of one at a time. `step` is the
    optimiser's; `sizes` are the rows of each minibatch; `scan` is the loop over minibatches and over parts of one.
    """

    loss: Callable[..., tuple[Tensor, Logs]]
    prepare: Callable[..., dict[str, Tensor]]
    policy: Any
    variant: Any
    step: Callable[..., tuple[TensorDict, TensorDict]]
    sizes: tuple[int, ...]
    n_epochs: int
    scan: Scan


def as_it_is(variant: Any, rows: TensorDict, index: Tensor, real: Tensor) -> dict[str, Tensor]:
    """The default `prepare`: nothing is replaced."""
    return {}


def learner_of(
    parts: Parts, loss: Callable[..., tuple[Tensor, Logs]], variant: Any = None, prepare: Callable[..., Any] = as_it_is
) -> Learner:
    """The learner of a run: the same for the same choices, whatever the numbers."""
    cfg, trainer = cast(Any, parts.cfg.algorithm.cfg), parts.cfg.trainer
    sizes = tuple(sizes_of(cfg, trainer.num_envs * trainer.buffer_size))
    step = OPTIMIZERS[optimizer_name(cfg)].step
    return Learner(loss, prepare, parts.policy, variant, step, sizes, cfg.n_epochs, parts.scan)


def pass_keys(state: TensorDict, n_epochs: int) -> Tensor:
    """A key for each pass over the rollout, `[n_epochs]`."""
    index = torch.arange(n_epochs, device=state["key"].device)
    return rng.stream(state["key"], rng.UPDATE, index, state["update_step"])


def shuffled(keys: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Row indices `[len(keys) * len(sizes), width]` of minibatches of these sizes, every pass in the order of its key.

    The width is at least `max(sizes)` and divides into parts (`ecrl.kernels.scan_loop.chunking`). What is
    missing is filled up with a minibatch's own first row; the second result, of the same shape, is False there.
    """
    order = rng.permutation(keys, sum(sizes))
    size = torch.tensor(sizes, device=keys.device).unsqueeze(1)
    slot = torch.arange(prod(chunking(max(sizes), keys.device)), device=keys.device)
    real = slot < size
    index = order[:, size.cumsum(0) - size + slot.where(real, 0)]
    return index.flatten(0, 1), real.expand(len(keys), -1, -1).flatten(0, 1)


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


def gradient_steps(cfg: Config) -> int:
    """Minibatch steps of an iteration."""
    of = cast(MinibatchConfig, cfg.algorithm.cfg)
    return of.n_epochs * len(sizes_of(of, cfg.trainer.num_envs * cfg.trainer.buffer_size))


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
    return mapped(lambda o, n: torch.where(stopped, o, n), old, new)


def _packed(params: TensorDict) -> TensorDict:
    """The parameters of each network as one vector: few large tensors are moved faster than many small ones."""
    leaves = {key: flatten(part)[0] for key, part in params.items()}
    return TensorDict({key: torch.cat([leaf.reshape(-1) for leaf in part]) for key, part in leaves.items()}, [])


def _unpacked(packed: TensorDict, like: TensorDict) -> TensorDict:
    def restored(vector: Tensor, part: Any) -> Any:
        leaves, structure = flatten(part)
        pieces = vector.split([leaf.numel() for leaf in leaves])
        return unflatten(
            structure, [p.reshape(leaf.shape).to(leaf.dtype) for p, leaf in zip(pieces, leaves, strict=True)]
        )

    return TensorDict({key: restored(packed[key], part) for key, part in like.items()}, [])


def _loss(
    params: TensorDict, learner: Learner, norm: TensorDict, batch: TensorDict, mask: Tensor, hyper: TensorDict
) -> tuple[Tensor, Logs]:
    return learner.loss(learner.policy, learner.variant, acting_params(params, norm), batch, mask, hyper)


def _gradient(
    learner: Learner,
    like: TensorDict,
    chosen: tuple[Tensor, Tensor, dict[str, Tensor]],
    packed: TensorDict,
    norm: TensorDict,
    rows: TensorDict,
    hyper: TensorDict,
) -> tuple[TensorDict, Logs]:
    """Of the mean over the chosen rows that count, packed; and its logs."""
    index, real, prepared = chosen
    batch = cast(TensorDict, rows[index]).update(prepared)
    gradient = torch.func.grad_and_value(_loss, has_aux=True)
    grads, (loss, logs) = gradient(_unpacked(packed, like), learner, norm, batch, batch["mask"] & real, hyper)
    return _packed(grads), logs | {"loss": loss}


def _part(
    learner: Learner, like: TensorDict, total: TensorDict, chosen: tuple[Tensor, Tensor, dict[str, Tensor]], *rest: Any
) -> tuple[TensorDict, Logs]:
    """Gradients of part of a minibatch, times the rows that count, added to those so far; and its logs."""
    grads, logs = _gradient(learner, like, chosen, *rest)
    return mapped(lambda t, g: t + g * logs["count"], total, grads), logs


def _gradients(
    learner: Learner, like: TensorDict, packed: TensorDict, chosen: tuple[Tensor, Tensor], *rest: Any
) -> tuple[TensorDict, Logs]:
    """Of the mean over the rows of a minibatch that count, packed, taken part by part; and its logs."""
    _, _, rows, _ = given = packed, *rest
    parts = *chosen, learner.prepare(learner.variant, rows, *chosen)
    if len(chosen[0]) == 1:
        return _gradient(learner, like, mapped(lambda x: x[0], parts), *given)
    total, logs = learner.scan(partial(_part, learner, like), mapped(torch.zeros_like, packed), parts, *given)
    count = logs["count"].sum()
    return mapped(lambda t: t / count.clamp(min=1.0), total), mean_logs(logs) | {"count": count}


def _minibatch(
    learner: Learner,
    like: TensorDict,
    moving: tuple[TensorDict, TensorDict, Tensor, Tensor],
    chosen: tuple[Tensor, Tensor],
    norm: TensorDict,
    rows: TensorDict,
    hyper: TensorDict,
) -> tuple[tuple[TensorDict, TensorDict, Tensor, Tensor], Logs]:
    """One gradient step on the rows that are chosen: moves (params, opt, rate, stopped), params packed.

    With `target_kl` in `hyper`, nothing moves once it was exceeded: not by the step that shows it, nor by later ones.
    Only an adaptive rate still answers to the KL that stopped the others.
    """
    params, opt, rate, stopped = moving
    numbers = cast(TensorDict, hyper["optimizer"])
    grads, logs = _gradients(learner, like, params, chosen, norm, rows, hyper)
    grads, kl, counted = all_mean((grads, logs["approx_kl"], logs["count"]), weight=logs["count"])
    grads, norms = _clipped(grads, hyper)
    if "adaptive" in hyper:  # no evidence, no change
        rate = torch.where(stopped | (counted == 0.0), rate, adapted_rate(rate, kl, hyper))
    moved, moved_opt = learner.step(params, grads, opt, learning_rate=rate, **dict(numbers.items()))
    logs = logs | norms
    if "target_kl" in hyper:
        stopped = stopped | (kl > hyper["target_kl"])
        logs |= {"count": logs["count"].masked_fill(stopped, 0.0), "skipped_frac": stopped.to(kl.dtype)}
        moved, moved_opt = _frozen(stopped, params, moved), _frozen(stopped, opt, moved_opt)
    return (moved, moved_opt, rate, stopped), logs


def mean_logs(logs: Logs) -> Logs:
    """Logs of several steps `[S]` as one: the means over steps, each weighted by its `count`."""
    weight = logs["count"] / logs["count"].sum().clamp(min=1.0)
    # Filled: a step that does not count may hold infinity, and 0 * inf is nan.
    means = {n: (column.masked_fill(weight == 0.0, 0.0) * weight).sum() for n, column in logs.items()}
    return {name: mean for name, mean in means.items() if name != "count"}


_READ = ("params", "opt", "hyper", "norm", "key", "update_step", "ref_params")


def passes(learner: Learner, state: TensorDict, rate: Tensor, rows: TensorDict) -> tuple[TensorDict, Tensor, Logs]:
    """`n_epochs` passes of minibatch steps over `rows` `[M]`: params and opt that moved, the last rate, mean logs."""
    hyper, params, norm = (cast(TensorDict, state[key]) for key in ("hyper", "params", "norm"))
    before = cast(TensorDict, state["opt"])
    slots = {name: slot for name, slot in before.items() if isinstance(slot, TensorDict)}
    opt = before.copy().update({name: _packed(slot) for name, slot in slots.items()})
    start = _packed(params), opt, rate, torch.zeros((), dtype=torch.bool, device=rate.device)
    parts = chunking(max(learner.sizes), rate.device)
    chosen = tuple(x.unflatten(1, parts) for x in shuffled(pass_keys(state, learner.n_epochs), learner.sizes))
    fixed = norm.select("obs", strict=False)
    step = partial(_minibatch, learner, params)  # of params only the shapes are used
    (packed, opt, rate, _), logs = learner.scan(step, start, chosen, fixed, rows, hyper)
    opt = opt.copy().update({name: _unpacked(opt[name], slot).clone() for name, slot in slots.items()})
    skipped = {"skipped_frac": logs.pop("skipped_frac").mean()} if "target_kl" in hyper else {}
    moved = TensorDict({"params": _unpacked(packed, params).clone(), "opt": opt}, [])
    return moved, rate, mean_logs(logs) | {"learning_rate": rate} | skipped


def learn(
    parts: Parts,
    state: TensorDict,
    update: Callable[..., tuple[TensorDict, Tensor, Logs]],
    learner: Learner,
    *rest: Any,
) -> tuple[TensorDict, Logs]:
    """The state after `update(learner, state, rate, *rest)`, which ends in `passes`, and its logs; compiled as one."""
    cfg: Any = parts.cfg.algorithm.cfg
    rate = scheduled(cfg.lr_scheduler, state, parts.cfg.trainer.iterations)
    moved, rate, logs = parts.jit(update, learner)(state.select(*_READ, strict=False), rate, *rest)
    rates = {"learning_rate": rate} if "learning_rate" in state else {}
    return replaced(state, dict(moved.items()) | rates), logs
