"""Stop a run at SIGINT or SIGTERM: finish the iteration, save the state, and close files.

The first signal asks the run to end. If the iteration or evaluation takes longer than `GRACE`, it is abandoned. This
loses nothing: the state before it is saved, and a resumed run repeats it with the same bits (`ecrl.run.resume`).
Other work, such as saving, always finishes. So does an iteration of several ranks, because the ranks cannot abandon it
together. The second signal abandons any work at once, and the third kills the process.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

GRACE = 3.0
"""Seconds that an iteration may continue after the first signal. The interruption is repeated at this interval."""

_asked: list[int] = []
_loops: list[bool] = []  # a value per running loop: True if its iterations can be abandoned
_interruptible_parts: list[bool] = []


class Stopped(KeyboardInterrupt):
    """KeyboardInterrupt of a signal.

    It is a subclass, because Python may exit at a plain KeyboardInterrupt during an import even if it is caught.
    """


def asked() -> int | None:
    """Return the number of the first signal that asked the run to end, or None."""
    return _asked[0] if _asked else None


def _stop(number: int, frame: object) -> None:
    _asked.append(number)
    if _loops and len(_asked) == 1:
        if _loops[-1]:
            signal.setitimer(signal.ITIMER_REAL, GRACE, GRACE)
        return
    if len(_asked) > 1:
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, signal.SIG_DFL)
    raise Stopped


def _grace_ended(number: int, frame: object) -> None:
    if _interruptible_parts:
        raise Stopped


def listen() -> None:
    """From now on, let SIGINT and SIGTERM stop a run in an orderly way. Outside a run, they raise KeyboardInterrupt."""
    _asked.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    signal.signal(signal.SIGALRM, _grace_ended)


@contextmanager
def in_loop(may_abandon: bool = True) -> Iterator[None]:
    """Enclose a loop that checks `asked` after every iteration.

    Args:
        may_abandon: True if an iteration of the loop can be abandoned, as in a single process.
    """
    _loops.append(may_abandon)
    try:
        yield
    finally:
        _loops.pop()
        if _asked:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextmanager
def interruptible() -> Iterator[None]:
    """Enclose a part of a loop that may be abandoned, because the loop can repeat it from its state."""
    _interruptible_parts.append(True)
    try:
        yield
    finally:
        _interruptible_parts.pop()
