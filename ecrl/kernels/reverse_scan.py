"""Scan backwards over time, with the linear recursion that most estimators of returns share.

On a CPU, eager code and graphs of `torch.compile` call a C++ loop for the recursion (`ecrl.native.recurrences`), if a
C++ compiler is available. A graph of `ecrl.compile` calls the C++ loop only if the tensors are large and no derivative
is needed. In all other cases, such as in eager code on a GPU, torch operations run the recursion (`scan_time_major`).
Graphs of `ecrl.compile` use faster code in place of these operations if no derivative is needed
(`ecrl.compile.reverse_scan`).
"""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from ecrl.native import recurrences
from ecrl.types import Scalar

_STEPS = 8
"""Number of time steps per block in `scan_time_major`."""

TimeMajorScan = Callable[[Tensor, Scalar, Tensor, Tensor], Tensor]
"""Type of a function with the positional arguments and the result of `scan_time_major`."""


def reverse_scan(x: Tensor, decay: Scalar, cut: Tensor, last: Tensor | None = None) -> Tensor:
    """Run a linear recursion backwards over the last axis.

        y[t] = x[t] + decay[t] * y[t + 1] * not cut[t],    y[T] = last

    A `decay[t]` of 0 acts like a True `cut[t]`: even an infinite `y[t + 1]` does not reach `y[t]`. A `decay[t]` of 0
    gets no gradient.

    Args:
        x: `[*B, T]` float.
        decay: a number, a 0-d tensor or a `[*B, T]` tensor. Pass tensors as float64, because a float32 decay has the
            same rounding error at every step, and the errors add up over time.
        cut: `[*B, T]` bool.
        last: `[*B]`, the `y` after the last step, or None for zeros.

    Returns: `[*B, T]` in the dtype of `x`.
    Gradient: flows through `x`, `decay` and `last`.

    >>> no = torch.tensor([False, False])
    >>> reverse_scan(torch.tensor([1.0, 2.0]), 0.5, no, torch.tensor(4.0)).tolist()
    [3.0, 4.0]
    """
    if recurrences.can_run(x):
        last = x.new_zeros((*x.shape[:-1], 1)) if last is None else last.to(x.dtype).unsqueeze(-1)
        return recurrences.linear_recurrence(x, as_float64(decay, x), cut, last)
    decay = _time_major(decay) if varies(decay) else decay  # pyright: ignore
    last = torch.zeros_like(x[..., 0]) if last is None else last.to(x.dtype)
    return _SCAN[0](_time_major(x), decay, _time_major(cut), last).movedim(0, -1)


def _unchanged(x: Tensor) -> Tensor:
    return x


def scan_time_major(
    x: Tensor, decay: Scalar, cut: Tensor, last: Tensor, *, store: Callable[[Tensor], Tensor] = _unchanged
) -> Tensor:
    """Run the recursion of `reverse_scan` over the first axis.

    A long time axis is split into blocks of 8 steps, and the blocks are scanned in three passes:

    1. Scan all blocks in parallel, each with a `last` of 0.
    2. Scan the results of the blocks to get the `y` that follows each block. If there are many blocks, the second pass
       is split into blocks too.
    3. Scan all blocks in parallel again, each from the `y` that follows the block.

    The scan takes about 16 operations in sequence for each factor of 8 in T, instead of T operations in sequence. The
    values of `y` between blocks are float64, so float32 rounding errors add up only within a block.

    Args:
        x: `[T, *B]`.
        decay: a number, a 0-d tensor or a `[T, *B]` tensor.
        cut: `[T, *B]` bool.
        last: `[*B]`.
        store: a function that is applied to every intermediate result that is used more than once. A compiler can pass
            a function that marks such results to be stored instead of recomputed for each use.

    Returns: `[T, *B]` in the dtype of `x`.
    """
    return _in_blocks(x, decay, or_zero(cut, decay), last, store)


def _in_blocks(x: Tensor, decay: Scalar, cut: Tensor, last: Tensor, store: Callable[[Tensor], Tensor]) -> Tensor:
    if len(x) <= 2 * _STEPS:
        return torch.stack(_steps(x, in_dtype(decay, x), cut, last, store))
    rest = len(x) % _STEPS
    if rest:
        rest_decay = in_dtype(_slice_time(decay, slice(-rest, None)), x)
        tail = torch.stack(_steps(x[-rest:], rest_decay, cut[-rest:], last, store))
        head = _in_blocks(x[:-rest], _slice_time(decay, slice(-rest)), cut[:-rest], tail[0], store)
        return torch.cat((head, tail))
    x, cut = (a.unflatten(0, (-1, _STEPS)).movedim(1, 0) for a in (x, cut))  # [_STEPS, blocks, *B]
    if varies(decay):
        decay = decay.unflatten(0, (-1, _STEPS)).movedim(1, 0)  # pyright: ignore
        product = store(decay.double().prod(0))[1:]
    else:
        product = decay**_STEPS
    step_decay = in_dtype(decay, x)
    block_cut = store(reduce(torch.logical_or, cut.unbind(0)).float()) != 0
    block_y = store(_steps(x, step_decay, cut, torch.zeros_like(x[0]), store)[0].double())
    after = _in_blocks(block_y[1:], product, block_cut[1:], last.double(), store)
    after = torch.cat((after, last.double().unsqueeze(0))).to(x.dtype)
    return torch.stack(_steps(x, step_decay, cut, after, store), 1).flatten(0, 1)


_SCAN: list[TimeMajorScan] = [scan_time_major]


def use_scan(scan: TimeMajorScan) -> TimeMajorScan:
    """Make `reverse_scan` call the decorated function instead of `scan_time_major`.

    `ecrl.compile` uses this decorator.
    """
    _SCAN[:] = [scan]
    return scan


def _steps(x: Tensor, decay: Scalar, cut: Tensor, last: Tensor, store: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Compute every `y[t]`, one step at a time, from the last step to the first."""
    y, ys, zero = last, [], x.new_zeros(())
    decays = decay.unbind(0) if varies(decay) else [decay] * len(x)  # pyright: ignore
    for x_t, decay_t, cut_t in list(zip(x.unbind(0), decays, cut.unbind(0), strict=True))[::-1]:
        y = torch.where(cut_t, zero, y)  # not multiplied by 0, because 0 * nan is nan
        y = store(torch.addcmul(x_t, y, decay_t) if isinstance(decay_t, Tensor) else x_t.add(y, alpha=decay_t))
        ys.append(y)
    return ys[::-1]


def varies(decay: Scalar) -> bool:
    """Return True if `decay` is a tensor with one value per step.

    >>> varies(0.5), varies(torch.tensor(0.5)), varies(torch.tensor([0.5, 0.25]))
    (False, False, True)
    """
    return isinstance(decay, Tensor) and decay.ndim > 0


def in_dtype(decay: Scalar, x: Tensor) -> Scalar:
    """Convert `decay` to the dtype of `x` if `decay` is a tensor.

    >>> in_dtype(torch.tensor(0.5, dtype=torch.float64), torch.ones(2)), in_dtype(0.5, torch.ones(2))
    (tensor(0.5000), 0.5)
    """
    return decay.to(x.dtype) if isinstance(decay, Tensor) else decay


def as_float64(decay: Scalar, x: Tensor) -> Tensor:
    """Return `decay` as a float64 tensor on the device of `x`.

    >>> as_float64(0.5, torch.ones(2))
    tensor(0.5000, dtype=torch.float64)
    """
    return decay.double() if isinstance(decay, Tensor) else x.new_full((), decay, dtype=torch.float64)


def _slice_time(decay: Scalar, steps: slice) -> Scalar:
    return decay[steps] if varies(decay) else decay  # pyright: ignore


def _time_major(x: Tensor) -> Tensor:
    """Move time from the last axis to the first and return a contiguous tensor."""
    return x.movedim(-1, 0).contiguous()


def or_zero(mask: Tensor, weight: Scalar) -> Tensor:
    """Return `mask | (weight == 0)`, which also masks terms of weight 0, because `0 * inf` is NaN.

    >>> or_zero(torch.tensor([True, False]), 0.5), or_zero(torch.tensor([True, False]), 0.0)
    (tensor([ True, False]), tensor([True, True]))
    """
    if isinstance(weight, Tensor):
        return mask | (weight == 0.0)
    return torch.ones_like(mask) if weight == 0.0 else mask
