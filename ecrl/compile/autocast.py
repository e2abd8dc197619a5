"""Include the autocast state in the keys of compiled functions, and disable autocast while a graph runs.

A traced graph contains the casts that autocast inserted during the trace. The graph is therefore valid only for the
autocast state of the trace, and needs no autocast when it runs.
"""

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_KINDS = "cpu", "cuda"
_UNCHANGED = nullcontext()


def _is_on() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def settings() -> tuple[Hashable, ...]:
    """Return the torch settings that affect a compiled graph: number of threads, default dtype and autocast state.

    >>> settings()[1:]
    (torch.float32,)
    """
    about = torch.get_num_threads(), torch.get_default_dtype()
    if not _is_on():
        return about
    return *about, *[(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]


@contextmanager
def _all_off() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def without_autocast() -> AbstractContextManager[None]:
    """Return a context that disables autocast if autocast is enabled.

    >>> with torch.autocast("cpu"), without_autocast():
    ...     torch.is_autocast_enabled("cpu")
    False
    """
    return _all_off() if _is_on() else _UNCHANGED
