"""Python's collector of garbage, held back where much is made and nothing thrown away."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Importing and compiling make modules and graphs, which the collector would go through for a third of the time.

    What was made is old at the end, so that the next collections, which are of what is young, leave it alone.

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
        if not gc.get_freeze_count():  # else it is someone's who wants it to stay frozen
            gc.freeze()
            gc.unfreeze()  # to the oldest generation
        if was:
            gc.enable()
