"""Contestants for the tests of `benchmarks`: no libraries, known speeds."""

import os
import time


def sleeper(seconds, count=10):
    print("to stdout, as libraries do")

    def work():
        time.sleep(seconds)
        return count

    return work


def refuses():
    raise RuntimeError("no such game")


def dies(after):
    def work():
        nonlocal after
        after -= 1
        if after < 0:
            os.write(2, b"out of luck\n")
            os._exit(7)
        time.sleep(0.02)
        return 1

    return work


def hangs():
    time.sleep(600)


def places(threads=3):
    """Counts the cores that any of its threads may use, 100 times the first one's number added."""
    import threading

    held = [threading.Thread(target=time.sleep, args=(600,), daemon=True) for _ in range(threads)]
    for thread in held:
        thread.start()

    def work():
        cores = set().union(*(os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")))
        return len(cores) + 100 * min(cores)

    return work


def environment(names):
    """Counts those variables that are set to 1."""
    return lambda: sum(os.environ.get(name) == "1" for name in names)
