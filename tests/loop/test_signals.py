"""Signals: the first waits for the iteration to end, the second does not; the final save always completes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from ecrl.loop import signals as stopping
from ecrl.loop.signals import asked, in_loop, interruptible, listen

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


@pytest.fixture(autouse=True)
def listening(monkeypatch):
    before = [signal.getsignal(number) for number in NUMBERS]
    monkeypatch.setattr(stopping, "GRACE", 0.2)
    listen()
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    stopping._asked.clear()
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_only_asks(number):
    assert asked() is None
    with in_loop():
        send(number)
        assert asked() == number
    time.sleep(0.3)  # nothing comes afterwards


def test_an_iteration_that_takes_too_long_is_given_up():
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt), in_loop(), interruptible():
        send()
        time.sleep(600.0)
    assert time.monotonic() - before > 0.15


def test_an_interruption_that_compiled_code_reports_as_another_error_is_an_interruption():
    def call_compiled_code():
        try:
            time.sleep(600.0)
        except KeyboardInterrupt:
            raise RuntimeError("aoti_torch_call_dispatcher API call failed") from None

    with pytest.raises(KeyboardInterrupt), in_loop(), interruptible():
        send()
        call_compiled_code()


def test_an_error_without_a_signal_stays_an_error():
    with pytest.raises(RuntimeError, match="API call failed"), in_loop(), interruptible():
        raise RuntimeError("API call failed")


def test_an_iteration_of_several_ranks_is_let_end():
    with in_loop(may_abandon=False), interruptible():
        send()
        time.sleep(0.6)
    assert asked() == signal.SIGTERM


def test_code_that_ignores_the_exception_is_interrupted_again():
    with pytest.raises(KeyboardInterrupt), in_loop(), interruptible():
        send()
        with suppress(BaseException):  # as callbacks from C do
            time.sleep(5.0)
        time.sleep(5.0)


def test_what_cleans_up_after_it_is_let_end():
    with pytest.raises(KeyboardInterrupt), in_loop():
        try:
            with interruptible():
                send()
                time.sleep(5.0)
        finally:
            before = time.monotonic()
            time.sleep(0.5)
            assert time.monotonic() - before > 0.45


def test_only_a_second_signal_interrupts_a_save():
    with in_loop():
        send()
        time.sleep(0.4)
    listen()
    with pytest.raises(KeyboardInterrupt), in_loop():
        send()
        send(signal.SIGINT)
        time.sleep(5.0)
    assert asked() == signal.SIGTERM


def test_outside_of_a_loop_it_is_an_interrupt_at_once():
    with pytest.raises(KeyboardInterrupt):
        send()
    assert asked() == signal.SIGTERM


THIRD = """
import os, signal, time
from ecrl.loop.signals import in_loop, listen
listen()
with in_loop():
    for number in (2, 15, 15):
        try:
            os.kill(os.getpid(), number)
            time.sleep(0.1)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
print("not reached")
"""


def test_the_third_ends_the_process():
    done = subprocess.run([sys.executable, "-c", THIRD], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "interrupted\n")


def test_what_is_raised_is_no_keyboard_interrupt_that_python_ends_for_by_itself():
    with pytest.raises(KeyboardInterrupt) as error:
        send()
    assert error.type is not KeyboardInterrupt
