"""Speed up `ecrl.kernels.reverse_scan` in compiled graphs, with a C++ loop on a CPU and Triton on a GPU.

After an import of this module, `reverse_scan` calls `scan_for_device`.
"""

from typing import Any

import torch
from torch import Tensor

from ecrl.compile.cpu_reverse_scan import cpu_scan
from ecrl.compile.jit import has_triton
from ecrl.kernels.reverse_scan import as_float64, scan_time_major, use_scan
from ecrl.native.recurrences import is_differentiated
from ecrl.tracing_state import in_graph, transforms
from ecrl.types import Scalar

_INDUCTOR_VIEWS_BOOLS = torch.__version__ >= "2.13"
"""True if inductor can view a bool tensor as another dtype. In torch 2.11, such a view is an error."""


@torch.library.custom_op("ecrl::reverse_scan", mutates_args=())
def _triton_scan(x: Tensor, decay: Tensor, cut: Tensor, last: Tensor) -> Tensor:
    from ecrl.compile.reverse_triton import reverse_scan

    return reverse_scan(x, decay, cut, last)


@_triton_scan.register_fake
def _(x: Tensor, decay: Tensor, cut: Tensor, last: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def can_use_triton(x: Tensor, *others: Any) -> bool:
    """Return True if `x` is on a GPU, Triton is installed, no gradient is recorded and no transform is active.

    While `torch.compile` traces, return False. The operator `ecrl::reverse_scan` supports neither derivatives nor vmap.

    >>> can_use_triton(torch.ones(2))
    False
    """
    if not x.is_cuda or not has_triton() or torch.compiler.is_compiling() or transforms():
        return False
    return not torch.is_grad_enabled() or not any(isinstance(t, Tensor) and t.requires_grad for t in (x, *others))


def can_use_cpu_scan(x: Tensor, *others: Any) -> bool:
    """Return True if `x` is a non-empty float32 or float64 tensor on a CPU, and no derivative is needed.

    >>> can_use_cpu_scan(torch.ones(2)), can_use_cpu_scan(torch.ones(2, requires_grad=True))
    (True, False)
    """
    is_on_cpu = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return is_on_cpu and x.numel() > 0 and not is_differentiated(x, *others)


def materialize(x: Tensor) -> Tensor:
    """Make the compiler store `x` in memory instead of computing `x` again for each use."""
    return x.as_strided(x.shape, x.stride())


def as_bytes(mask: Tensor) -> Tensor:
    """Return a bool mask that a compiled graph loads as bytes. Loading bytes is 15 times as fast as loading bools.

    The mask is viewed as int16 and then as uint8, because inductor would convert the dtype in a direct view as uint8.
    If the mask has no such view, or if inductor does not support the view, return the mask unchanged.
    """
    if not _INDUCTOR_VIEWS_BOOLS or not mask.is_contiguous() or mask.numel() % 2 or mask.storage_offset() % 2:
        return mask
    return mask.reshape(-1).view(torch.int16).view(torch.uint8).view(mask.shape).float() != 0


@use_scan
def scan_for_device(x: Tensor, decay: Scalar, cut: Tensor, last: Tensor) -> Tensor:
    """Run `scan_time_major`. In a graph that is being traced, use the fastest operations for the device of `x`."""
    if not in_graph():
        return scan_time_major(x, decay, cut, last)
    if can_use_triton(x, decay, last):
        return triton_scan(x, decay, cut, last)
    if can_use_cpu_scan(x, decay, last):
        return cpu_scan(x, decay, cut, last)
    return scan_time_major(materialize(x), decay, as_bytes(cut), last, store=materialize)


def triton_scan(x: Tensor, decay: Scalar, cut: Tensor, last: Tensor) -> Tensor:
    """Run the recursion of `scan_time_major` as the operator `ecrl::reverse_scan`, which calls Triton kernels."""
    decay = as_float64(decay, x)
    x_rows, cut_rows = (t.reshape(len(x), -1) for t in (x, cut))
    decay_rows = decay.reshape(x_rows.shape) if decay.ndim else decay
    return torch.ops.ecrl.reverse_scan(x_rows, decay_rows, cut_rows, last.reshape(-1)).reshape(x.shape)
