"""Matrix products with a thin side as sums, which a compiler fuses with what is around them.

Libraries for matrix products are made for large ones: the first and the last layer of a perceptron and their gradients
run at a tenth of their speed there. Rewrites for CPU graphs while they are traced; the sums are the same to rounding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_THIN = 8
_MIN_OUTER = 16  # a sum over fewer rows has nothing to gain from a vector per column


def _unrolled(a: Tensor, b: Tensor) -> Tensor:
    """`[M, K] @ [K, N]` as a sum of K outer products."""
    total = a[:, :1] * b[0]
    for k in range(1, a.shape[1]):
        total = total + a[:, k : k + 1] * b[k]
    return total


def _rows(a: Tensor, b: Tensor) -> Tensor:
    """`[M, K] @ [K, N]` as M sums over the rows of `b`."""
    return torch.stack([(a[m].unsqueeze(1) * b).sum(0) for m in range(a.shape[0])])


def mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, or NotImplemented where no side is thin or memory runs the wrong way for it."""
    (m, k), n = a.shape, b.shape[1]
    if min(m, k, n) == 0:
        return NotImplemented
    if k <= _THIN and b.stride(1) == 1 and n > _THIN:
        return _unrolled(a, b)
    if m <= _THIN and k >= _MIN_OUTER and n > _THIN and b.stride(1) == 1:
        return _rows(a, b)
    if n <= _THIN and k >= _MIN_OUTER and m > _THIN and a.stride(0) == 1:
        return _rows(b.t(), a.t()).t()
    if n <= _THIN and k > _THIN and a.stride(1) == 1 and b.stride(0) == 1:
        return (a.unsqueeze(1) * b.t()).sum(-1)
    return NotImplemented


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`bias + a @ b`, or NotImplemented as `mm`."""
    if beta != 1 or alpha != 1:
        return NotImplemented
    product = mm(a, b)
    # As a difference: inductor makes one call of a product and a sum, which copies the bias to every row first.
    return torch.mm(a, b) - (-bias) if product is NotImplemented else product + bias


THIN: dict[Any, Callable[..., Tensor]] = {torch.ops.aten.mm.default: mm, torch.ops.aten.addmm.default: addmm}
"""Decompositions for `torch.fx.experimental.proxy_tensor.make_fx`."""
