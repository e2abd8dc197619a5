"""Stochastic gradient descent on minibatches, and its config, for use in several algorithms.

`minibatch_epochs` learns from the steps of a batch. `minibatch_sgd` learns from any rows.

Each gradient step is one function of tensors. Gradient steps can be compiled, because their branches depend only on the
config.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import SKIPPED_STEPS, Run, Static, loss_and_logs
from ecrl.algorithms.logprob_gap import logprob_gap
from ecrl.algorithms.optimizer import (
    Group,
    Layout,
    Packed,
    clip_gradients,
    groups_of,
    layout_of,
    learning_rates,
    number,
    optimizer_step,
    pack,
    pack_opt,
    rate_logs,
    unpack,
    unpack_opt,
)
from ecrl.algorithms.optimizer_config import LearningConfig
from ecrl.algorithms.rows import counted, rows_of
from ecrl.algorithms.schedules import adapted_rate
from ecrl.config.model import Count
from ecrl.distributed import all_mean, all_sum
from ecrl.errors import ConfigError
from ecrl.kernels.scan_loop import chunking, row_bytes, step_if
from ecrl.policies import acting_params, fixed_params
from ecrl.policies.contract import described
from ecrl.pytree import flatten, mapped, replaced
from ecrl.types import Logs

_BATCH_SIZE = 64
Loss = Callable[[Run, TensorDict, TensorDict, Tensor, TensorDict], tuple[Tensor, Logs]]
Whole = Callable[[Tensor, Tensor], Tensor]


class MinibatchConfig(LearningConfig):
    """Number and size of the minibatches of an iteration."""

    n_epochs: Count = Field(default=10, description="passes over each rollout")
    batch_size: Count | None = Field(
        default=None,
        description=(
            "transitions per gradient step on each rank, at most the size of the rollout; if neither batch_size nor "
            "num_minibatches is given, 64, or the length of a sequence if a sequence has more than 64 steps"
        ),
    )
    num_minibatches: Count | None = Field(default=None, description="gradient steps per pass, instead of batch_size")
    segment_length: Count | None = Field(
        default=None,
        description=(
            "steps per sequence for a policy with memory; must divide trainer.buffer_size, which is the default"
        ),
    )

    @model_validator(mode="after")
    def _one_size(self) -> "MinibatchConfig":
        if self.batch_size is not None and self.num_minibatches is not None:
            raise ValueError("batch_size and num_minibatches exclude each other; keep one")
        return self

    @property
    def needs_episodes(self) -> bool:
        """True if the loss needs all steps of an environment together, even for a policy without memory."""
        return False


class SGD(NamedTuple):
    """Config values and optimiser groups of `minibatch_sgd`, which determine the compiled graph.

    If `drop_masked` is True, minibatches are drawn only from rows with an unmasked step (see `minibatch_sgd`).
    """

    n_epochs: int
    batch_size: int | None
    num_minibatches: int | None
    groups: tuple[Group, ...]
    drop_masked: bool = False


def sgd_choices(cfg: MinibatchConfig, groups: tuple[Group, ...] | None = None, *, drop_masked: bool = False) -> SGD:
    """Return the `SGD` settings of a config. If `groups` is None, one optimiser group has all parameters."""
    groups = groups_of(cfg) if groups is None else groups
    return SGD(cfg.n_epochs, cfg.batch_size, cfg.num_minibatches, groups, drop_masked)


class Objective(NamedTuple):
    """Static arguments of a gradient step (see `minibatch_sgd`)."""

    run: Run
    loss: Loss
    whole: tuple[tuple[str, Whole], ...]
    distance: str | None
    limit: str | None
    layout: Layout
    n_epochs: int = 1


def pass_keys(state: TensorDict, n_epochs: int) -> Tensor:
    """Return one key for each pass over the rows, of shape `[n_epochs]`."""
    index = torch.arange(n_epochs, device=state["key"].device)
    return rng.stream(state["key"], rng.UPDATE, index, state["update_step"])


def _chunking(rows: TensorDict, most: int, length: int, device: torch.device) -> tuple[int, int]:
    """Return the number and size of the chunks for at most `most` rows of `length` steps each (see `chunking`)."""
    number, _ = chunking(most * length, device, row_bytes(rows) // length)
    number = min(most, number)
    return number, -(-most // number)


def shuffled(keys: Tensor, sizes: Sequence[int], width: int, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return shuffled row indices `[len(keys) * len(sizes), width]`, with one minibatch per key and size.

    `width` is at least `max(sizes)`. A minibatch with fewer rows repeats its first row. The second result is a mask of
    the same shape, which is False for repeated rows. `first` is None or a bool mask `[sum(sizes)]`. The rows for which
    `first` is True come first, in a random order.
    """
    order = rng.permutation(keys, sum(sizes))
    if first is not None:
        order = order.gather(-1, first[order].to(torch.uint8).sort(stable=True, dim=-1, descending=True)[1])
    size = torch.tensor(sizes, device=keys.device).unsqueeze(1)
    slot = torch.arange(width, device=keys.device)
    real = slot < size
    index = order[:, size.cumsum(0) - size + slot.where(real, 0)]
    return index.flatten(0, 1), real.expand(len(keys), -1, -1).flatten(0, 1)


@cache  # warn only once
def _at_most(key: str, value: int, most: int, unit: str) -> int:
    if value > most:
        text = f"algorithm.cfg.{key} {value} is above the rollout's {most} {unit}; using {most}"
        warnings.warn(text, stacklevel=2)
    return min(value, most)


def check_batch_size(cfg: MinibatchConfig | SGD, length: int) -> None:
    """Raise ConfigError for a `batch_size` below the number of steps per row, `run.static.row_steps`."""
    if cfg.batch_size is not None and cfg.batch_size < length:
        raise ConfigError(
            f"algorithm.cfg.batch_size: {cfg.batch_size} is below {length}, the length of the sequences that a "
            f"minibatch keeps whole; use at least {length}, or shorter sequences: set algorithm.cfg.segment_length for "
            "a policy with memory, or lower trainer.buffer_size if algorithm.cfg.ratio is sequence"
        )


def sizes_of(cfg: MinibatchConfig | SGD, rows: int, length: int = 1) -> list[int]:
    """Return the number of rows in each minibatch of one pass.

    With `batch_size`, the last minibatch may be smaller. With `num_minibatches`, the sizes differ by at most 1. A
    setting above the size of the rollout is lowered to this size, with one warning. A row has `length` steps and is
    never split. A minibatch has as many rows as fit into `batch_size` steps.

    Raises: ConfigError if `batch_size` is below the length of a row.

    >>> sizes_of(SGD(1, 64, None, ()), 5, 32)
    [2, 2, 1]
    """
    if cfg.num_minibatches is None:
        check_batch_size(cfg, length)
        size = _at_most("batch_size", cfg.batch_size or max(_BATCH_SIZE, length), rows * length, "transitions")
        size = size // length
        return [min(size, rows - first) for first in range(0, rows, size)]
    count = _at_most("num_minibatches", cfg.num_minibatches, rows, "transitions" if length == 1 else "sequences")
    return [rows // count + (i < rows % count) for i in range(count)]


def gradient_steps(cfg: MinibatchConfig, static: Static) -> int:
    """Return the number of gradient steps of an iteration. With `drop_masked`, an iteration may take fewer."""
    rows = static.num_envs * static.buffer_size // static.row_steps
    return cfg.n_epochs * len(sizes_of(cfg, rows, static.row_steps))


def _loss(
    params: TensorDict, of: Objective, fixed: TensorDict, minibatch: TensorDict, mask: Tensor, hyper: TensorDict
) -> tuple[Tensor, tuple[Tensor, Logs]]:
    """Return the loss, the number of elements over which the loss is a mean, and the logs."""
    label = f"algorithm {of.run.algorithm.name}: loss"
    out = of.loss(of.run, acting_params(params, fixed), minibatch, mask, hyper)
    loss, logs = loss_and_logs(of.run, out)
    for name, log in logs.items():
        if log.ndim:
            raise ConfigError(
                f"{label} returns the log {name} as {described(log)}, expected a 0-d tensor; return its mean"
            )
    if of.distance is not None and of.distance not in logs:
        known = ", ".join(logs) or "no logs"
        raise ConfigError(f"{label} returns no log {of.distance!r}, the `distance`, only {known}; add the log")
    count = logs.get("count", mask.sum().to(loss.dtype))
    return loss, (count, {name: log for name, log in logs.items() if name != "count"})


def _chunk_gradients(
    of: Objective,
    rows_of_chunk: tuple[Tensor, Tensor, dict[str, Tensor]],
    packed: Packed,
    fixed: TensorDict,
    rows: TensorDict,
    hyper: TensorDict,
) -> tuple[Packed, tuple[Tensor, Logs]]:
    """Return the gradients of the mean loss over the unmasked rows of a chunk, and the count and logs of `_loss`."""
    index, real, replaced_fields = rows_of_chunk
    minibatch = cast(TensorDict, rows[index]).update(replaced_fields)
    mask = counted(minibatch["mask"], real) if "mask" in minibatch else real
    gradient = torch.func.grad_and_value(_loss, has_aux=True)
    grads, (loss, (count, logs)) = gradient(unpack(packed, of.layout), of, fixed, minibatch, mask, hyper)
    return pack(grads, of.layout), (count, logs | {"loss": loss})


def _add_chunk(
    of: Objective, total: Packed, rows_of_chunk: tuple[Tensor, Tensor, dict[str, Tensor]], *rest: Any
) -> tuple[Packed, tuple[Tensor, Logs]]:
    """Add a chunk's gradients, weighted by the chunk's count, to the total, as the body of a scan over chunks."""
    grads, (count, logs) = _chunk_gradients(of, rows_of_chunk, *rest)
    return mapped(lambda t, g: t + g * count, total, grads), (count, logs)


def _gradients(
    of: Objective,
    packed: Packed,
    chosen: tuple[Tensor, Tensor],
    fixed: TensorDict,
    rows: TensorDict,
    hyper: TensorDict,
) -> tuple[Packed, tuple[Tensor, Logs]]:
    """Return the gradients of the mean loss over a minibatch's unmasked rows, and the count and logs of `_loss`.

    The gradients are computed chunk by chunk, to save memory.
    """
    index, real = chosen
    mask = counted(rows["mask"][index], real) if of.whole and "mask" in rows else real
    chunks = index, real, {name: fn(rows[name][index], mask) for name, fn in of.whole}
    rest = packed, fixed, rows, hyper
    if len(index) == 1:
        return _chunk_gradients(of, mapped(lambda x: x[0], chunks), *rest)
    total, (counts, logs) = of.run.scan(partial(_add_chunk, of), mapped(torch.zeros_like, packed), chunks, *rest)
    count = counts.sum()
    return mapped(lambda t: t / count.clamp(min=1.0), total), (count, mean_logs(logs, counts))


_Carry = tuple[Packed, Packed, dict[str, Tensor], Tensor]


def _gradient_step(
    of: Objective,
    carry: _Carry,
    chosen: tuple[Tensor, Tensor],
    fixed: TensorDict,
    rows: TensorDict,
    hyper: TensorDict,
) -> tuple[_Carry, tuple[Tensor, Tensor, Logs]]:
    """Take one step of every optimiser on one minibatch.

    Return the new carry (params, opts, rates, stopped), and the outputs (count, stopped, logs). `count` is the count
    from `_loss`, or 0 if the parameters did not change. The output `stopped` is a float. Once the distance of a step
    exceeds the limit, parameters and optimiser state no longer change. In the step that exceeds the limit, an adaptive
    learning rate still changes. If the run skips nonfinite steps, a step with NaN or infinity changes nothing.
    """
    params, opts, rates, stopped = carry
    grads, (count, logs) = _gradients(of, params, chosen, fixed, rows, hyper)
    distance = count if of.distance is None else logs[of.distance]
    grads, distance, counted = all_mean((grads, distance, count), weight=count)
    grads, norms = clip_gradients(grads, hyper, of.layout)
    is_limited, skips = of.limit is not None and of.limit in hyper, of.run.static.skips_nonfinite
    is_skipped = counted == 0.0
    if skips:
        is_skipped = is_skipped | ~_is_finite((grads, norms))
    for group in (part.group for part in of.layout.groups):
        if group.schedule == "adaptive":
            adapted = adapted_rate(rates[group.name], distance, number(hyper, group, "adaptive"))
            rates = rates | {group.name: torch.where(stopped | is_skipped, rates[group.name], adapted)}
    new_params, new_opts = optimizer_step(params, grads, opts, rates, hyper, of.layout)
    if is_limited:
        is_far = distance > hyper[of.limit]
        stopped = stopped | (is_far & ~is_skipped if skips else is_far)
    left_out = stopped
    if skips:
        nonfinite = ~_is_finite((grads, norms, new_params))
        left_out, norms = left_out | nonfinite, norms | {SKIPPED_STEPS: nonfinite.to(count.dtype)}
    if is_limited or skips:
        count = count.masked_fill(left_out, 0.0)
        keep = partial(torch.where, left_out)
        new_params, new_opts = mapped(keep, params, new_params), mapped(keep, opts, new_opts)
    return (new_params, new_opts, rates, stopped), (count, stopped.to(count.dtype), logs | norms)


def _gradient_step_if_due(
    of: Objective,
    carry: _Carry,
    chosen: tuple[Tensor, Tensor, Tensor],
    fixed: TensorDict,
    rows: TensorDict,
    hyper: TensorDict,
) -> tuple[_Carry, tuple[Tensor, Tensor, Logs]]:
    """Take a gradient step only if `due`, a 0-d bool, is True. Otherwise, change nothing, and return count 0.

    A compiled graph for the CPU does not compute steps that are not due. The output `stopped` and the logs of such
    steps are NaN.
    """
    index, real, due = chosen
    carry, (count, stopped, logs) = step_if(due, partial(_gradient_step, of), carry, (index, real), fixed, rows, hyper)
    return carry, (count.masked_fill(~due, 0.0), stopped, logs)


def _counted_rows(rows: TensorDict) -> Tensor:
    """Return a bool `[M]` that is True for rows with at least one unmasked step."""
    return cast(Tensor, rows["mask"]).reshape(len(rows), -1).any(-1)


def _is_finite(tree: Any) -> Tensor:
    """Return a 0-d bool that is True if all values in a tree are finite."""
    return torch.stack([x.isfinite().all() for x in flatten(tree)[0]]).all()


def mean_logs(logs: Logs, counts: Tensor) -> Logs:
    """Average logs of shape `[S]` over the S steps, weighting each step by its count."""
    weight = counts / counts.sum().clamp(min=1.0)
    # The logs of a step with weight 0 may be infinite, and 0 * inf is nan.
    return {name: (column.masked_fill(weight == 0.0, 0.0) * weight).sum() for name, column in logs.items()}


def minibatch_epochs(
    run: Run,
    state: TensorDict,
    batch: TensorDict,
    fields: Mapping[str, Tensor],
    loss: Loss,
    sgd: SGD,
    *,
    whole: Mapping[str, Whole] = MappingProxyType({}),
    distance: str | None = None,
    limit: str | None = None,
    to_rows: Callable[..., TensorDict] = rows_of,
) -> tuple[TensorDict, Logs]:
    """Take `n_epochs` passes of gradient steps over the steps of a batch, each pass in a new random order.

    Args:
        run: the run.
        state: same as for `minibatch_sgd`.
        batch: the batch that `collect` returned. A policy of unit "sequence" learns from all steps of an environment,
            or from segments of these steps. Other policies learn from single steps, or from all steps of an environment
            if the loss needs whole episodes (`MinibatchConfig.needs_episodes`).
        fields: fields `[N, T]` that the algorithm adds to the steps, such as advantages. A bool field `mask` is True
            for the steps to learn from. The policy's `act` may not return fields of the same names.
        loss: (run, params, minibatch, mask, hyper) -> loss and logs. `minibatch` has rows from `to_rows`, which include
            `fields`. Pass the minibatch to `run.policy.evaluate_and_value_rows`, or to `evaluate_rows` if the loss
            needs no values. With the default `to_rows`, the minibatch's `sample_log_prob` is summed over the tokens of
            an action.
        sgd, whole, distance, limit: same as for `minibatch_sgd`.
        to_rows: `rows_of`, or `token_rows_of` if `sample_log_prob` must keep its token axes.

    Returns: the result of `minibatch_sgd`, whose logs also contain the result of `logprob_gap`.
    """
    rows, gap = to_rows(run, batch, **fields), logprob_gap(run, state, batch)
    state, logs = minibatch_sgd(run, state, rows, loss, sgd, whole=whole, distance=distance, limit=limit)
    return state, logs | gap


def minibatch_sgd(
    run: Run,
    state: TensorDict,
    rows: TensorDict,
    loss: Loss,
    sgd: SGD,
    *,
    whole: Mapping[str, Whole] = MappingProxyType({}),
    distance: str | None = None,
    limit: str | None = None,
) -> tuple[TensorDict, Logs]:
    """Take `n_epochs` passes of gradient steps over rows, each pass in a new random order.

    Args:
        run: the run.
        state: state with `params`, `opt`, `hyper`, `norm`, `key`, `update_step` and `iterations`, with `learning_rate`
            if the rate is adaptive, and optionally with `frozen_params`.
        rows: TensorDict `[M]`. If some rows must be ignored, `rows` has a bool `mask` that is False for these rows. If
            each row is a sequence of T steps, `rows` must have a `mask`, of shape `[M, T]`. A minibatch never splits a
            row.
        loss: (run, params, minibatch, mask, hyper) -> 0-d loss and logs, all means over the elements whose `mask` is
            True. `params` include the observation statistics and the frozen parameters. If the means are over another
            number of elements, return this number as the log `count`.
        sgd: number and size of the minibatches, and the optimiser groups. If `sgd.drop_masked` is True, `rows` must
            have a `mask`. Each pass then draws its minibatches only from rows with an unmasked step, and may take fewer
            gradient steps. The last minibatch of a pass may be smaller. The shapes of tensors do not depend on the
            `mask`. A compiled graph for the CPU does not compute the gradient steps that are left out.
        whole: dict from the name of a field to a function `fn(field, mask)` that replaces this field of a minibatch.
            The function receives the field of a whole minibatch, while `loss` may receive a minibatch in several
            chunks.
        distance: name of the log that measures how far the policy moved from the policy that collected the rows.
            Adaptive rates need this log.
        limit: name of a hyperparameter in `hyper`. Once the distance in a step exceeds the value of this
            hyperparameter, this step and the remaining steps do not change the parameters.

    Returns: the state with new `params`, `opt` and, if the rate is adaptive, `learning_rate`, and the logs. The logs
        contain the logs of the loss function, `loss`, gradient norms, learning rates and, if there is a limit,
        `skipped_frac`, the share of gradient steps that the limit skipped. If `trainer.finite_guard` is "skip", a step
        whose gradients or new parameters hold NaN or infinity changes nothing. The log `skipped_steps` counts such
        steps.
    """
    if distance is None and any(group.schedule == "adaptive" for group in sgd.groups):
        raise ConfigError("minibatch_sgd: a learning rate is adaptive, but `distance` is None; name the log of the KL")
    hyper, params, opt = (cast(TensorDict, state[key]) for key in ("hyper", "params", "opt"))
    length = prod(rows["mask"].shape[1:]) if "mask" in rows else 1
    sizes, layout = sizes_of(sgd, len(rows), length), layout_of(params, sgd.groups)
    of = Objective(run, loss, tuple(whole.items()), distance, limit, layout, sgd.n_epochs)
    rates = learning_rates(state, sgd.groups, run.static.turns)
    key = cast(Tensor, state["key"])
    never = torch.zeros((), dtype=torch.bool, device=key.device)
    start = pack(params, layout), pack_opt(opt, layout), rates, never
    chunks = _chunking(rows, max(sizes), length, key.device)
    first = _counted_rows(rows) if sgd.drop_masked else None
    index, real = shuffled(pass_keys(state, sgd.n_epochs), sizes, prod(chunks), first)
    chosen = index.unflatten(1, chunks), real.unflatten(1, chunks)
    step, constants = _gradient_step, (fixed_params(state), rows, hyper)
    if first is not None:
        has_rows = (first[index] & real).any(-1)
        step, chosen = _gradient_step_if_due, (*chosen, all_sum(has_rows.to(torch.int64)) > 0)
    (packed, opts, rates, _), (counts, skipped, logs) = run.scan(partial(step, of), start, chosen, *constants)
    fields: dict[str, Any] = {"params": unpack(packed, layout).clone(), "opt": unpack_opt(opts, opt, layout)}
    left_out = logs.pop(SKIPPED_STEPS, None)
    logged = rate_logs(rates, sgd.groups, state)
    fields |= {name: rate for name, rate in logged.items() if name in state.keys()}  # noqa: SIM118
    logs = mean_logs(logs, counts)
    if left_out is not None:
        none_taken = (left_out != 0.0).all() & (left_out == 1.0).any()  # NaN means that a step was not due
        logs = {name: log.masked_fill(none_taken, torch.nan) for name, log in logs.items()}
        logs |= {SKIPPED_STEPS: left_out.nansum()}
    logs |= logged
    if limit is not None and limit in hyper:
        logs |= {"skipped_frac": skipped.mean() if first is None else skipped.nanmean().nan_to_num()}
    return replaced(state, fields), logs
