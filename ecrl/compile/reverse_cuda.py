"""The recursion of `ecrl.kernels.reverse_scan` in a graph for CUDA: one operation, written in Triton.

An import of this module makes `reverse_scan` use the operation wherever a graph is traced.
"""

from typing import Any

import torch
from torch import Tensor

from ecrl.compile.jit import has_triton
from ecrl.kernels.reverse_scan import scan_time_major, use_in_graphs
from ecrl.tracing_state import transforms
from ecrl.types import Scalar


@torch.library.custom_op("ecrl::reverse_scan", mutates_args=())
def _triton_scan(x: Tensor, decay: Tensor, cut: Tensor, last: Tensor) -> Tensor:
    from ecrl.compile.reverse_triton import reverse_scan

    return reverse_scan(x, decay, cut, last)


@_triton_scan.register_fake
def _(x: Tensor, decay: Tensor, cut: Tensor, last: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def can_use_triton(x: Tensor, *others: Any) -> bool:
    """Return True if `x` is on a GPU, Triton is installed, and the operation needs no derivative and no vmap rule.

    >>> can_use_triton(torch.ones(2))
    False
    """
    if not x.is_cuda or not has_triton() or torch.compiler.is_compiling() or transforms():
        return False
    return not torch.is_grad_enabled() or not any(isinstance(t, Tensor) and t.requires_grad for t in (x, *others))


@use_in_graphs
def scan_in_graph(x: Tensor, decay: Scalar, cut: Tensor, last: Tensor) -> Tensor:
    """Return `scan_time_major` of the arguments, from Triton's kernels if they can be used."""
    scan = triton_scan if can_use_triton(x, decay, last) else scan_time_major
    return scan(x, decay, cut, last)


def triton_scan(x: Tensor, decay: Scalar, cut: Tensor, last: Tensor) -> Tensor:
    """Return `scan_time_major` of the arguments as the operation `ecrl::reverse_scan`; it writes on no argument."""
    as_float64 = decay if isinstance(decay, Tensor) else x.new_full((), decay, dtype=torch.float64)
    x_rows, cut_rows = (t.reshape(len(x), -1) for t in (x, cut))
    decay_rows = as_float64.reshape(x_rows.shape) if as_float64.ndim else as_float64
    return torch.ops.ecrl.reverse_scan(x_rows, decay_rows, cut_rows, last.reshape(-1)).reshape(x.shape)
