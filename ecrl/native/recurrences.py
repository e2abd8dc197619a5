"""Linear recurrences over time in C++, as operators of torch for float32 and float64 tensors on the CPU.

The operators run in eager code and in `torch.compile`. If no derivative is needed, a graph of `ecrl.compile` calls an
operator for large tensors, and has its own C++ code for small tensors, because calling an operator takes longer than a
short recurrence. If a derivative is needed, such a graph runs torch operations.

`linear_recurrence` has derivatives of any order in forward and reverse mode, and works under every transform of
`torch.func`, except a forward mode inside a forward mode. `gae` has no derivatives.
"""

from collections.abc import Sequence
from ctypes import c_bool, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ecrl.native.library import function, is_available
from ecrl.tracing_state import (
    in_forward_mode,
    in_graph,
    in_nested_forward_mode,
    is_transformed,
    only_vmap_is_active,
)

LARGE = 2**14
"""Minimum number of elements at which a graph of `ecrl.compile` calls an operator."""

_NAMES = {torch.float32: "float", torch.float64: "double"}


def can_run(*tensors: Tensor) -> bool:
    """Return True if the operators can run on the float tensors `tensors`.

    The tensors must be on the CPU and share one dtype, float32 or float64. The C++ functions must be available. While
    `ecrl.compile` traces a graph, the first tensor must have at least `LARGE` elements, and no derivative may be
    needed. While `torch.compile` traces, vmap is the only supported transform. In eager mode, forward mode inside
    forward mode is not supported. `torch.export` is never supported.

    >>> can_run(torch.ones(2, dtype=torch.bfloat16))
    False
    """
    dtype = tensors[0].dtype
    if dtype not in _NAMES or any(x.dtype != dtype or x.device.type != "cpu" for x in tensors):
        return False
    if torch.compiler.is_exporting():
        return False
    if in_graph() and (tensors[0].numel() < LARGE or is_differentiated(*tensors)):
        return False
    supported = only_vmap_is_active() if torch.compiler.is_compiling() else not in_nested_forward_mode()
    return supported and is_available("recurrences")


def is_differentiated(*values: Any) -> bool:
    """Return True if a derivative with respect to any tensor in `values` may be needed.

    Under vmap, `requires_grad` of a tensor does not show whether the whole batch requires a gradient. The function
    therefore returns True under vmap, except with `torch.no_grad`.

    >>> is_differentiated(torch.ones(1), 0.5), is_differentiated(torch.ones(1, requires_grad=True))
    (False, True)
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if torch.is_grad_enabled() and (is_transformed() or any(x.requires_grad for x in tensors)):
        return True
    return not torch.compiler.is_compiling() and (not only_vmap_is_active() or in_forward_mode(tensors))


@cache
def _function(name: str, dtype: torch.dtype, num_tensors: int, *others: type) -> tuple[Any, Any]:
    """Return a C++ function, and the ctypes type of its argument `strides`."""
    strides = c_int64 * (2 * num_tensors)
    types = [*[c_void_p] * num_tensors, *[c_int64] * 2, strides, *[c_bool] * 2, *others]
    return function("recurrences", f"{name}_{_NAMES[dtype]}", types), strides


def _call(name: str, tensors: Sequence[Tensor], numbers: Sequence[int], *others: Any) -> None:
    """Call a C++ function.

    Args:
        name: name of the function, without its dtype.
        tensors: the inputs and the results. Each has the shape of the first tensor, `[*B, T]`, or broadcasts to this
            shape. A result is a new tensor from `_new`.
        numbers: the indices in `tensors` of the discounts, such as `gamma` and `decay`, which may be 0-d.
        others: further arguments of the function, all bool.
    """
    shape = tensors[0].shape
    rows = [x if (x.shape == shape and x.ndim == 2) or not x.ndim else _rows(x, shape) for x in tensors]
    strides = [x.stride() or (0, 0) for x in rows]
    varies = any(strides[i] != (0, 0) for i in numbers)
    adjacent = all(strides[i][0] == 1 for i in range(len(rows)) if varies or i not in numbers)
    run, pairs = _function(name, tensors[0].dtype, len(tensors), *[c_bool] * len(others))
    flat = pairs(*(number for pair in strides for number in pair))
    run(*[x.data_ptr() for x in rows], rows[0].shape[0], shape[-1], flat, adjacent, varies, *others)


def _rows(x: Tensor, shape: torch.Size) -> Tensor:
    """Return `x`, broadcast to `shape` (`[*B, T]`) and reshaped to `[rows, T]`, with one row per batch entry."""
    return x.expand(shape).reshape(-1, shape[-1])


def _new(x: Tensor) -> Tensor:
    """Return an uninitialised tensor in the shape of `x`, `[*B, T]`. The result can be viewed as `[rows, T]`.

    If `x` can be viewed as `[rows, T]` too, the result has the memory order of `x`.
    """
    return torch.empty_like(x) if x.ndim <= 2 else torch.empty_like(x.flatten(0, -2)).view(x.shape)


def _batched(info: Any, in_dims: Sequence[int | None], args: Sequence[Any]) -> list[Any]:
    """Move the batch axis of vmap to the front of each tensor, and give all tensors as many axes as the first one."""
    rank = args[0].ndim - (in_dims[0] is not None)

    def batched(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.reshape(len(x), *[1] * (rank + 1 - x.ndim), *x.shape[1:])

    return [batched(x, dim) for x, dim in zip(args, in_dims, strict=True)]


# `torch.library.custom_op` is not used, because its wrapper takes as long as the rest of a call.
torch.library.define(
    "ecrl::linear_recurrence", "(Tensor x, Tensor decay, Tensor cut, Tensor last, bool reverse) -> Tensor"
)
_recurrence = torch.ops.ecrl.linear_recurrence.default


@torch.library.impl("ecrl::linear_recurrence", "cpu")
def _(x: Tensor, decay: Tensor, cut: Tensor, last: Tensor, reverse: bool) -> Tensor:
    y = _new(x)
    if x.numel():
        _call("linear_recurrence", (x, decay, cut, last, y), [1], reverse)
    return y


@torch.library.register_fake(_recurrence)
def _(x: Tensor, *others: Any) -> Tensor:
    return _new(x)


def _recurrence_batched(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    return _recurrence(*_batched(info, in_dims, args)), 0


torch.library.register_vmap(_recurrence, _recurrence_batched)


def _zero_where(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, x.new_zeros(()), x)


def _before(y: Tensor, last: Tensor, reverse: bool) -> Tensor:
    """Return the values that the steps multiply by their decays: `y[t + 1]` if `reverse` is True, else `y[t - 1]`."""
    return torch.cat((y[..., 1:], last) if reverse else (last, y[..., :-1]), -1)


def _transposed(grad: Tensor, decay: Tensor, cut: Tensor, reverse: bool) -> Tensor:
    """Return the gradient of `x` from the gradient of `y`: the recurrence in the opposite direction of time.

    In the recurrence, `decay[t]` and `cut[t]` apply to the value that step t receives. In the opposite direction, they
    apply to the value that step t passes on. Decays and cuts are therefore shifted by one step.
    """
    first = torch.ones_like(cut[..., :1])
    if reverse:
        cut = torch.cat((first, cut[..., :-1]), -1)
        decay = torch.cat((decay[..., :1], decay[..., :-1]), -1) if decay.ndim else decay
    else:
        cut = torch.cat((cut[..., 1:], first), -1)
        decay = torch.cat((decay[..., 1:], decay[..., -1:]), -1) if decay.ndim else decay
    return linear_recurrence(grad, decay, cut, grad.new_zeros(first.shape), not reverse)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, decay, cut, last, ctx.reverse = inputs
    ctx.save_for_backward(decay, cut, last, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    decay, cut, last, y = ctx.saved_tensors
    left_out, grad_x = cut | (decay == 0.0), _transposed(grad, decay, cut, ctx.reverse)
    grad_decay = (grad_x * _zero_where(left_out, _before(y, last, ctx.reverse))).double().sum_to_size(decay.shape)
    edge = slice(-1, None) if ctx.reverse else slice(0, 1)
    grad_last = (grad_x * _zero_where(left_out, decay.expand(cut.shape)).to(grad_x.dtype))[..., edge]
    return grad_x, grad_decay, None, grad_last, None


torch.library.register_autograd(
    _recurrence, _backward, setup_context=_save
)  # for `torch.compile`, which cannot trace `_Recurrence`


class _Recurrence(torch.autograd.Function):
    """The operator with its derivatives, for autograd and every transform of `torch.func`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Tensor:  # pyright: ignore
        return _recurrence(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1:4], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return _backward(ctx, grad)

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, decay: Tensor | None, cut: None, last: Tensor | None, reverse: None) -> Tensor:
        old_decay, cut_, old_last, y = ctx.saved_tensors
        change = torch.zeros_like(y) if x is None else x
        if decay is not None:
            before = _zero_where(cut_ | (old_decay == 0.0), _before(y, old_last, ctx.reverse))
            change = change + (before * decay).to(y.dtype)
        change_last = torch.zeros_like(old_last) if last is None else last
        return linear_recurrence(change, old_decay, cut_, change_last, ctx.reverse)


def linear_recurrence(x: Tensor, decay: Tensor, cut: Tensor, last: Tensor, reverse: bool = True) -> Tensor:
    """Run a linear recurrence over the last axis.

        y[t] = x[t] + decay[t] * y[t + 1] * not cut[t],    y[T] = last         if reverse
        y[t] = x[t] + decay[t] * y[t - 1] * not cut[t],    y[-1] = last        otherwise

    A `decay[t]` of 0 acts like a `cut[t]` of True, and its gradient is 0. Sums are computed in float64.

    Args:
        x: `[*B, T]` float32 or float64.
        decay: float64, 0-d or `[*B, T]`.
        cut: `[*B, T]` bool.
        last: `[*B, 1]` in the dtype of `x`.
        reverse: True to run backwards in time.

    Returns: `[*B, T]` in the dtype of `x`.
    Gradient: flows through `x`, `decay` and `last`.

    >>> no = torch.tensor([False, False])
    >>> linear_recurrence(torch.tensor([1.0, 2.0]), torch.tensor(0.5).double(), no, torch.tensor([4.0])).tolist()
    [3.0, 4.0]
    """
    if torch.compiler.is_compiling() or not is_differentiated(x, decay, last):
        return _recurrence(x, decay, cut, last, reverse)
    return _Recurrence.apply(x, decay, cut, last, reverse)  # pyright: ignore


_GAE = "reward", "value", "next_value", "terminated", "done", "gamma", "decay"
torch.library.define("ecrl::gae", f"({', '.join(f'Tensor {name}' for name in _GAE)}) -> (Tensor, Tensor)")


@torch.library.impl("ecrl::gae", "cpu")
def _(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, gamma: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    advantage, target = _new(reward), _new(reward)
    if reward.numel():
        _call("gae", (reward, value, next_value, terminated, done, gamma, decay, advantage, target), [5, 6])
    return advantage, target


@torch.library.register_fake("ecrl::gae")
def _(reward: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    return _new(reward), _new(reward)


def _gae_batched(
    info: Any, in_dims: tuple[int | None, ...], *args: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    return torch.ops.ecrl.gae.default(*_batched(info, in_dims, args)), (0, 0)


torch.library.register_vmap("ecrl::gae", _gae_batched)


def gae(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, gamma: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the advantages and value targets of `ecrl.kernels.gae`, in one pass and without derivatives.

    Args:
        reward, value, next_value: `[*B, T]` float32 or float64, all of one dtype.
        terminated, done: `[*B, T]` bool.
        gamma: float64, 0-d or `[*B, T]`.
        decay: float64, 0-d or `[*B, T]`: gamma * gae_lambda.

    Returns: two tensors `[*B, T]` in the dtype of `reward`.
    """
    return torch.ops.ecrl.gae.default(reward, value, next_value, terminated, done, gamma, decay)
