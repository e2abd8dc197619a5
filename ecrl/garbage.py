"""Python's collector of garbage, held back where much is made and nothing thrown away."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Compiling makes graphs, which the collector would go through for a third of the time.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """`uncollected`, for modules: those stay, so that no later collection of what is young has to go through them."""
    known = len(sys.modules)
    with uncollected():
        yield
        if len(sys.modules) > known and not gc.get_freeze_count():  # what someone froze is to stay frozen
            gc.freeze()
            gc.unfreeze()  # to the oldest generation
