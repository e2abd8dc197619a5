"""Functions that write a computation in another way while `ecrl.compile.jit` traces a graph. Results are the same."""

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_INDUCTOR_VIEWS_BOOLS = torch.__version__ >= "2.13"
"""True if inductor is known to view bools as other dtypes. Inductor of torch 2.11 refuses."""


def in_graph() -> bool:
    """Return True while `ecrl.compile.jit` traces a graph. `torch.compile` does not count.

    >>> in_graph()
    False
    """
    return not torch.compiler.is_compiling() and get_proxy_mode() is not None


def materialize(x: Tensor) -> Tensor:
    """Return `x`, and in a graph make the compiler store it. Otherwise it is recomputed for each use.

    >>> materialize(torch.ones(2))
    tensor([1., 1.])
    """
    return x.as_strided(x.shape, x.stride()) if in_graph() else x


def fast_mask(mask: Tensor) -> Tensor:
    """Return `mask`, and in a graph read it as bytes. Inductor loads bools one at a time, which is 15 times slower.

    The mask is viewed as 16 bits and then as 8 bits: inductor takes a direct view as 8 bits for a conversion.

    >>> fast_mask(torch.tensor([True, False]))
    tensor([ True, False])
    """
    dense = mask if mask.is_contiguous() else mask.movedim(-1, 0)
    if not _INDUCTOR_VIEWS_BOOLS or not in_graph() or not dense.is_contiguous():
        return mask
    if mask.numel() % 2 or dense.storage_offset() % 2:
        return mask
    as_bytes = dense.reshape(-1).view(torch.int16).view(torch.uint8)
    bools = as_bytes.view(dense.shape).float() != 0
    return bools if dense is mask else bools.movedim(0, -1)
