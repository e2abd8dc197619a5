"""The recursion of `ecrl.kernels.reverse_scan` as one operation of a graph, written in Triton for a GPU."""

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.utils._triton import has_triton_package

from ecrl.types import Scalar


@torch.library.custom_op("ecrl::reverse_scan", mutates_args=())
def _scanned(x: Tensor, decay: Tensor, cut: Tensor, last: Tensor) -> Tensor:
    from ecrl.kernels.reverse_triton import reverse_scan

    return reverse_scan(x, decay, cut, last)


@_scanned.register_fake
def _(x: Tensor, decay: Tensor, cut: Tensor, last: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def is_for_gpu(x: Tensor, *own: Any) -> bool:
    """Whether tensors like these are of a GPU that has Triton, and nobody wants their gradient or a batch of them.

    >>> is_for_gpu(torch.ones(2))
    False
    """
    if not x.is_cuda or not has_triton_package() or torch.compiler.is_compiling() or peek_interpreter_stack():
        return False
    return not torch.is_grad_enabled() or not any(isinstance(t, Tensor) and t.requires_grad for t in (x, *own))


def on_gpu(x: Tensor, decay: Scalar, cut: Tensor, last: Tensor) -> Tensor:
    """`reverse_scan` over the first axis; it writes on none of these."""
    wide = decay if isinstance(decay, Tensor) else x.new_full((), decay, dtype=torch.float64)
    flat = [t.reshape(len(x), -1) for t in (x, cut)]
    y = torch.ops.ecrl.reverse_scan(
        flat[0], wide.reshape(flat[0].shape) if wide.ndim else wide, flat[1], last.reshape(-1)
    )
    return y.reshape(x.shape)
