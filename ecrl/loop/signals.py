"""Signals that end a run in order: SIGINT and SIGTERM let it finish its iteration, save, and close what it opened.

The first signal asks. An iteration, or an evaluation, that takes longer than `GRACE` after it is given up, which loses
nothing: the state before it is saved, and repeats it bit for bit when the run is resumed (`ecrl.run.owed`). What is not
in such a part, as a save, is let end, and so is the iteration of several ranks, which could not be given up by all at
once. The second signal gives up anything at once, and the third ends the process where it stands.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

GRACE = 3.0
"""Seconds that an iteration may still take after it was asked to be the last; as many again, should that be ignored."""

_asked: list[int] = []
_in_loop: list[bool] = []  # whether its process is alone
_in_part: list[bool] = []


class Stopped(KeyboardInterrupt):
    """What a signal raises. Where a KeyboardInterrupt itself ends an import, Python may exit as if nobody caught it."""


def asked() -> int | None:
    """The number of the signal that asked the run to end, the first one; None if none did."""
    return _asked[0] if _asked else None


def _stop(number: int, frame: object) -> None:
    _asked.append(number)
    if _in_loop and len(_asked) == 1:
        if _in_loop[-1]:
            signal.setitimer(signal.ITIMER_REAL, GRACE, GRACE)
        return
    if len(_asked) > 1:
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, signal.SIG_DFL)
    raise Stopped


def _late(number: int, frame: object) -> None:
    if _in_part:
        raise Stopped


def listen() -> None:
    """From now on SIGINT and SIGTERM end a run in order; outside of one they are a KeyboardInterrupt."""
    _asked.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    signal.signal(signal.SIGALRM, _late)


@contextmanager
def in_loop(alone: bool = True) -> Iterator[None]:
    """Around a loop that looks at `asked` after every iteration; only where it is `alone` may that be given up."""
    _in_loop.append(alone)
    try:
        yield
    finally:
        _in_loop.pop()
        if _asked:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextmanager
def interruptible() -> Iterator[None]:
    """Around a part of a loop that may be given up, because the loop can repeat it from what it has."""
    _in_part.append(True)
    try:
        yield
    finally:
        _in_part.pop()
