"""Signals that end a run in order: after SIGINT or SIGTERM it finishes its iteration, saves, and closes its files.

The first signal asks the run to end. If an iteration or an evaluation takes longer than `GRACE` after it, it is
abandoned. That loses nothing: the state before it is saved, and a resumed run repeats it bit for bit (`ecrl.run.owed`).
Other parts, such as a save, always finish. So does an iteration of several ranks, because they could not all abandon it
at once. The second signal abandons any part, and the third ends the process at once.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

GRACE = 3.0
"""Seconds that the last iteration may still take; if it ignores the alarm, the alarm repeats after as many."""

_asked: list[int] = []
_in_loop: list[bool] = []  # True for a loop of a single rank
_in_part: list[bool] = []


class Stopped(KeyboardInterrupt):
    """Raised by a signal. If a plain KeyboardInterrupt ends an import, Python may exit though it is caught."""


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
    """Let SIGINT and SIGTERM end a run in order from now on. Outside of a run they raise a KeyboardInterrupt."""
    _asked.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    signal.signal(signal.SIGALRM, _late)


@contextmanager
def in_loop(alone: bool = True) -> Iterator[None]:
    """Enclose a loop that checks `asked` after every iteration. Only a rank that is `alone` may abandon one."""
    _in_loop.append(alone)
    try:
        yield
    finally:
        _in_loop.pop()
        if _asked:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextmanager
def interruptible() -> Iterator[None]:
    """Enclose a part of a loop that may be abandoned, because a resumed run can repeat it."""
    _in_part.append(True)
    try:
        yield
    finally:
        _in_part.pop()
