"""The one recursion over time that the estimators share, from the last step to the first."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from ecrl.kernels.reverse_cuda import is_for_gpu, on_gpu
from ecrl.tracing_state import in_graph, kept
from ecrl.types import Scalar

_MANY_ROWS, _MANY_STEPS = 512, 128
_FEW_STEPS, _STEPS = 16, 8


def reverse_scan(x: Tensor, decay: Scalar, cut: Tensor, last: Tensor) -> Tensor:
    """`y[t] = x[t] + decay[t] * y[t + 1] * not cut[t]`, `y[T] = last`, over the last axis; time-major inside.

    A `decay` of 0 cuts too: nothing passes it, not even infinity, and no gradient reaches it there.

    `decay` is best given in float64: rounded to float32 it errs the same way at every step, which adds up over long
    rollouts. So float32 steps through one block only, and what comes after a block is carried to it in float64. `x`
    has to be the caller's own: it may be written over.

    >>> no = torch.tensor([False, False])
    >>> reverse_scan(torch.tensor([1.0, 2.0]), 0.5, no, torch.tensor(4.0)).tolist()
    [3.0, 4.0]
    """
    cut = with_zero(cut, decay)
    decay = _time_major(decay) if _varies(decay) else decay  # pyright: ignore
    scanned = on_gpu if is_for_gpu(x, decay, last) else _rows
    return scanned(_time_major(x), decay, _time_major(cut), last.to(x.dtype)).movedim(0, -1)


def _rows(x: Tensor, decay: Scalar, cut: Tensor, last: Tensor) -> Tensor:
    """`reverse_scan` over the first axis, maybe in the memory of `x`.

    Many steps are cut into short blocks. The blocks are summed side by side, as if nothing came after each; a scan of
    these sums, again in blocks, gives what comes after each; from there every block is stepped through. So a graph has
    some 16 steps for each factor of 8 in time, not T.
    """
    size = _block(x)
    if len(x) <= size:
        over = unseen(x, decay, last)
        steps = _steps(x, _near(decay, x), cut, last, over)
        return x if over else torch.stack(steps)
    rest = len(x) % size
    if rest:
        late = torch.stack(_steps(x[-rest:], _near(_part(decay, slice(-rest, None)), x), cut[-rest:], last))
        return torch.cat((_rows(x[:-rest], _part(decay, slice(-rest)), cut[:-rest], late[0]), late))
    x, cut = (a.unflatten(0, (-1, size)).movedim(1, 0) for a in (x, cut))  # [size, blocks, *B]
    if _varies(decay):
        decay = decay.unflatten(0, (-1, size)).movedim(1, 0)  # pyright: ignore
        product = kept(decay.double().prod(0))[1:]
    else:
        product = decay**size
    near, closed = _near(decay, x), kept(reduce(torch.logical_or, cut.unbind(0)).float()) != 0
    ends = kept(_steps(x, near, cut, torch.zeros_like(x[0]))[0].double())
    after = _rows(ends[1:], product, closed[1:], last.double())
    after = torch.cat((after, last.double().unsqueeze(0))).to(x.dtype)
    return torch.stack(_steps(x, near, cut, after), 1).flatten(0, 1)


def _steps(x: Tensor, decay: Scalar, cut: Tensor, last: Tensor, over: bool = False) -> list[Tensor]:
    """One by one, from the last to the first; `over` writes them over `x`."""
    y, ys, zero = last, [], x.new_zeros(())
    decays = decay.unbind(0) if _varies(decay) else [decay] * len(x)  # pyright: ignore
    for x_t, decay_t, cut_t in list(zip(x.unbind(0), decays, cut.unbind(0), strict=True))[::-1]:
        y = torch.where(cut_t, zero, y)  # first: NaN behind a cut stays there
        if over:
            y = x_t.addcmul_(y, decay_t) if isinstance(decay_t, Tensor) else x_t.add_(y, alpha=decay_t)
        else:
            y = kept(torch.addcmul(x_t, y, decay_t) if isinstance(decay_t, Tensor) else x_t.add(y, alpha=decay_t))
        ys.append(y)
    return ys[::-1]


def unseen(*own: Any) -> bool:
    """Whether tensors made here may be written over: nothing records what becomes of them. Fresh memory costs more.

    >>> unseen(torch.ones(2)), unseen(torch.ones(2, requires_grad=True))
    (True, False)
    """
    recorded = torch.compiler.is_compiling() or in_graph() or peek_interpreter_stack()
    return not recorded and not any(isinstance(x, Tensor) and x.requires_grad for x in own)


def _varies(decay: Scalar) -> bool:
    return isinstance(decay, Tensor) and decay.ndim > 0


def _near(decay: Scalar, x: Tensor) -> Scalar:
    return decay.to(x.dtype) if isinstance(decay, Tensor) else decay


def _part(decay: Scalar, steps: slice) -> Scalar:
    return decay[steps] if _varies(decay) else decay  # pyright: ignore


def _time_major(x: Tensor) -> Tensor:
    """`[T, *B]`, contiguous."""
    rows = x.movedim(-1, 0)
    return rows if rows.is_contiguous() else kept(rows.contiguous())


def _block(x: Tensor) -> int:
    """Steps per block: few for a graph and for a few rows; in eager, many rows keep a core busy step by step."""
    if len(x) <= _FEW_STEPS:
        return _FEW_STEPS
    traced = torch.compiler.is_compiling() or in_graph()
    return _MANY_STEPS if x[0].numel() >= _MANY_ROWS and not traced else _STEPS


def with_zero(mask: Tensor, weight: Scalar) -> Tensor:
    """`mask`, True also where `weight` is 0: `0 * inf` is NaN, so a term of weight 0 has to be left out.

    >>> with_zero(torch.tensor([True, False]), 0.5), with_zero(torch.tensor([True, False]), 0.0)
    (tensor([ True, False]), tensor([True, True]))
    """
    if isinstance(weight, Tensor):
        return mask | (weight == 0.0)
    return torch.ones_like(mask) if weight == 0.0 else mask


def wide(scalar: Scalar) -> Scalar:
    """A tensor in float64; a number as it is.

    >>> wide(torch.tensor(0.5)).dtype, wide(0.5)
    (torch.float64, 0.5)
    """
    return scalar.double() if isinstance(scalar, Tensor) else scalar
