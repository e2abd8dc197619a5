"""Rewrite matrix products for a CPU while a graph is traced. The results are equal to rounding.

Libraries for matrix products are made for large matrices. The first and the last layer of a perceptron, and their
gradients, run at a tenth of the possible speed there. So products with a thin side become sums, and the compiler fuses
these with their neighbours. Other small products become tiles (`ecrl.compile.cpu_tiles`). Only large ones go to a
library, oneDNN. It generates code for the processor at hand; MKL has only a generic path for AMD processors.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import register_lowering
from torch._inductor.mkldnn_ir import LinearUnary

from ecrl.compile import cpu_tiles

_LARGE = 2**18  # elements of the second matrix; from there on it does not stay in a cache, which libraries care for
_THIN = 8
_MIN_OUTER = 16  # a sum over fewer rows has nothing to gain from a vector per column
_MANY = 32  # rows that are worth turning the other matrix round for


def _unrolled(a: Tensor, b: Tensor) -> Tensor:
    """`[M, K] @ [K, N]` as a sum of K outer products."""
    total = a[:, :1] * b[0]
    for k in range(1, a.shape[1]):
        total = total + a[:, k : k + 1] * b[k]
    return total


def _rows(a: Tensor, b: Tensor) -> Tensor:
    """`[M, K] @ [K, N]` as M sums over the rows of `b`."""
    return torch.stack([(a[m].unsqueeze(1) * b).sum(0, dtype=a.dtype) for m in range(a.shape[0])])


@torch.library.custom_op("ecrl::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`, in a compiled graph by oneDNN."""
    return x @ weight.t()


@_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@register_lowering(torch.ops.ecrl.linear.default, type_promotion_kind=None)
def _lowered(x: Any, weight: Any) -> Any:
    return TensorBox.create(cast(Any, LinearUnary).create(x, weight, None, "none", [], ""))


def _check_dtypes(a: Tensor, b: Tensor) -> None:
    """Raise RuntimeError if the dtypes differ, which torch finds only when it multiplies numbers."""
    if a.dtype != b.dtype:
        raise RuntimeError(f"cannot multiply matrices of {a.dtype} and {b.dtype}; convert one of them")


def mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, or NotImplemented for what is left to MKL, which also raises the error of wrong shapes."""
    (m, k), n = a.shape, b.shape[1]
    _check_dtypes(a, b)
    if min(m, k, n) == 0 or k != b.shape[0]:
        return NotImplemented
    if k <= _THIN and b.stride(1) == 1 and n > _THIN:
        return _unrolled(a, b)
    if m <= _THIN and k >= _MIN_OUTER and n > _THIN and b.stride(1) == 1:
        return _rows(a, b)
    if n <= _THIN and k >= _MIN_OUTER and m > _THIN and a.stride(0) == 1:
        return _rows(b.t(), a.t()).t()
    if n <= _THIN and k > _THIN and a.stride(1) == 1 and b.stride(0) == 1:
        return (a.unsqueeze(1) * b.t()).sum(-1, dtype=a.dtype)
    if a.dtype == torch.float32 and k * n <= _LARGE and cpu_tiles.compile_here():
        return torch.ops.ecrl.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)
    if a.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.ecrl.linear(a, b.t())
    return NotImplemented


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`bias + a @ b`, or NotImplemented as `mm`."""
    if beta != 1 or alpha != 1:
        return NotImplemented
    product = mm(a, b)
    # As a difference: inductor makes one call of a product and a sum, which copies the bias to every row first.
    return torch.mm(a, b) - (-bias) if product is NotImplemented else product + bias


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` for a batch of each, or NotImplemented where the library is as good."""
    m, n = a.shape[1], b.shape[2]
    _check_dtypes(a, b)
    if a.dtype != torch.float32 or b.shape[:2] != (a.shape[0], a.shape[2]):
        return NotImplemented
    if min(*a.shape, n) == 0 or not cpu_tiles.compile_here():
        return NotImplemented
    if n <= _THIN and m > _THIN and a.stride(1) == 1:
        return torch.ops.ecrl.bmm(b.mT, a.mT).mT
    if b.stride(2) == 1 or m >= _MANY:
        return torch.ops.ecrl.bmm(a, b)
    return NotImplemented


PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.mm.default: mm,
    torch.ops.aten.addmm.default: addmm,
    torch.ops.aten.bmm.default: bmm,
}
"""Decompositions for `torch.fx.experimental.proxy_tensor.make_fx`."""
