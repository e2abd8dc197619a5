"""Queries about torch's state: graphs being traced, their random draws, active transforms, writes in place.

Some queries need private names of torch. This module looks them up once, at import. If a name is missing, runs give the
same results but are slower. The table in `docs/design.md` lists the private names.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

try:
    from torch._C._functorch import get_interpreter_stack
except ImportError:
    get_interpreter_stack = None

_ACTIVE_TRANSFORMS: Callable[[], Any] | None = get_interpreter_stack
_HAS_LEVEL, _COUNTS_WRITES = hasattr(forward_ad, "_current_level"), hasattr(Tensor, "_version")

_IN_GRAPH = ContextVar("_IN_GRAPH", default=False)
_DRAWS: ContextVar[list[str] | None] = ContextVar("_DRAWS", default=None)


@contextmanager
def tracing_graph() -> Iterator[None]:
    """Make `in_graph` return True inside the block. `ecrl.compile.trace` traces functions in such a block.

    >>> with tracing_graph():
    ...     in_graph()
    True
    """
    token = _IN_GRAPH.set(True)
    try:
        yield
    finally:
        _IN_GRAPH.reset(token)


def in_graph() -> bool:
    """Return True while `ecrl.compile.jit` traces a graph. `torch.compile` does not count.

    >>> in_graph()
    False
    """
    return not torch.compiler.is_compiling() and _IN_GRAPH.get()


@contextmanager
def noting_draws() -> Iterator[list[str]]:
    """Return a list. Inside the block, `note_draw` appends to it, and to no outer list.

    >>> with noting_draws() as noted:
    ...     note_draw("aten.rand")
    >>> noted
    ['aten.rand']
    """
    noted: list[str] = []
    token = _DRAWS.set(noted)
    try:
        yield noted
    finally:
        _DRAWS.reset(token)


def note_draw(operation: str) -> None:
    """Note that a graph which is traced draws from torch's global generator."""
    if (noted := _DRAWS.get()) is not None:
        noted.append(operation)


def knows_transforms() -> bool:
    """Return True if this version of torch reports the active transforms. Otherwise no function is compiled."""
    return _ACTIVE_TRANSFORMS is not None


def transforms() -> tuple[str, ...]:
    """Return the kinds of the active `torch.func` transforms, the innermost last.

    The result is `("unknown",)` if this version of torch does not report them.

    >>> kinds = []
    >>> _ = torch.func.vmap(torch.func.grad(lambda x: kinds.append(transforms()) or x))(torch.ones(2))
    >>> transforms(), kinds
    ((), [('Vmap', 'Grad')])
    """
    if _ACTIVE_TRANSFORMS is None:
        return ("unknown",)
    active = _ACTIVE_TRANSFORMS()
    return tuple(one.key().name for one in active) if active else ()


def in_forward_mode(leaves: Iterable[Tensor]) -> bool:
    """Return True if forward-mode derivatives of `leaves`, the arguments of a function, are being computed.

    >>> in_forward_mode([torch.ones(1)])
    False
    """
    if _HAS_LEVEL:
        return forward_ad._current_level >= 0
    return any(forward_ad.unpack_dual(leaf).tangent is not None for leaf in leaves)


def version_of(tensor: Tensor) -> int:
    """Return a number that changes when the tensor is changed in place. For inference tensors it is always 0.

    >>> x = torch.ones(2)
    >>> before = version_of(x)
    >>> version_of(x) == before, version_of(x.add_(1)) == before
    (True, False)
    """
    if tensor.is_inference():
        return 0
    return (
        tensor._version
        if _COUNTS_WRITES
        else hash(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    )
