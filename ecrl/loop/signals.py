"""Stop a run after SIGINT or SIGTERM: finish the iteration, save the state and close the files.

`listen` installs the handlers, and only the command `ecrl` calls it. In other programs, Ctrl-C raises Python's own
KeyboardInterrupt at once, and SIGTERM ends the process.

The first signal asks the run to end. If the current iteration or evaluation has not ended `GRACE` seconds later, the
run abandons the iteration or evaluation, and saves the last state. No result is lost: `ecrl.run.resume` repeats the
abandoned work. The run finishes other work, such as saving. With several ranks, the run also finishes the iteration,
because the ranks cannot abandon an iteration together. The second signal abandons any work at once, and the third
signal kills the process.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

GRACE = 3.0
"""The seconds from the first signal to the first interruption, and from each interruption to the next one.

An interruption has no effect outside of `interruptible`.
"""

_asked: list[int] = []
_loops: list[bool] = []  # for each running loop, True if the loop may abandon an iteration
_interruptible_parts: list[bool] = []


class Stopped(KeyboardInterrupt):
    """KeyboardInterrupt that the signal handlers of this module raise.

    Python may exit at a plain KeyboardInterrupt during an import, even if code catches the exception.
    """


def asked() -> int | None:
    """Return the number of the first signal that asked the run to end, or None if there was no signal."""
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
    """Install handlers for SIGINT and SIGTERM, and forget earlier signals.

    During a run, the handlers end the run cleanly. Outside a run, the handlers raise `Stopped`.
    """
    _asked.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    signal.signal(signal.SIGALRM, _grace_ended)


@contextmanager
def in_loop(may_abandon: bool = True) -> Iterator[None]:
    """Mark the code inside this context as a loop that calls `asked` after every iteration.

    Args:
        may_abandon: True if the run may abandon an iteration that has not ended `GRACE` seconds after the first signal.
            Pass False with several ranks, because the ranks cannot abandon an iteration at the same time.
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
    """Mark the code inside this context as interruptible.

    The caller must be able to repeat the interrupted code, starting from the last state of the run.

    If a signal interrupts Python code that a compiled graph calls, for example to step MuJoCo, the graph raises a
    RuntimeError. After a signal, this context therefore replaces a RuntimeError with Stopped.
    """
    _interruptible_parts.append(True)
    try:
        yield
    except RuntimeError as error:
        if not _asked:
            raise
        raise Stopped from error
    finally:
        _interruptible_parts.pop()
