"""Whether a graph is being made, for what is written differently there."""

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def in_graph() -> bool:
    """Whether a graph is being made that is compiled as a whole (`ecrl.compile.jit`).

    >>> in_graph()
    False
    """
    return not torch.compiler.is_compiling() and get_proxy_mode() is not None


def kept(x: Tensor) -> Tensor:
    """`x`, put in memory where a graph is made: a compiler would work it out anew wherever it is read.

    >>> kept(torch.ones(2))
    tensor([1., 1.])
    """
    return x.as_strided(x.shape, x.stride()) if in_graph() else x
