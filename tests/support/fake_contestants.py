"""Contestants and learners for the tests of `benchmarks`: known speeds, sizes and scores."""

import os
import time
from pathlib import Path

import numpy as np


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

    threads_started = [threading.Thread(target=time.sleep, args=(600,), daemon=True) for _ in range(threads)]
    for thread in threads_started:
        thread.start()

    def work():
        cores = set().union(*(os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")))
        return len(cores) + 100 * min(cores)

    return work


def environment(names):
    """Counts those variables that are set to 1."""
    return lambda: sum(os.environ.get(name) == "1" for name in names)


def learns(config, seed, started, train_s=1.0):
    """Return a curve that reaches seed + 490 in two evaluations; record every call in a file next to the config."""
    with Path(config).with_suffix(".calls").open("a") as file:
        file.write(f"{seed}\n")
    rows = [{"steps": s, "seconds": s / 20, "episodes": 20, "return": r} for s, r in ((10, 470), (20, 490 + seed))]
    wall = time.time() - started
    return {"curve": rows, "train_s": train_s, "wall_s": wall, "cpu_s": wall}


def learns_long(config, seed, started):
    return learns(config, seed, started, 600.0)


def learns_but_seed_1(config, seed, started):
    if seed == 1:
        raise RuntimeError("out of luck")
    return learns(config, seed, started)


def learns_but_seed_1_diverges(config, seed, started):
    if seed == 1:
        rows = [{"steps": 20, "seconds": 1.0, "episodes": 20, "return": float("nan")}]
        return {"curve": rows, "train_s": 1.0, "wall_s": 1.0, "cpu_s": 1.0}
    return learns(config, seed, started)


def learns_but_seed_1_hangs(config, seed, started):
    if seed == 1:
        Path(config).with_suffix(".hangs").write_text(str(os.getpid()))
        time.sleep(600)
    return learns(config, seed, started)


def spending(num_envs):
    """A contestant that takes 60 MB when it is made and a megabyte per environment in each unit, gone again."""
    np.ones(60 * 2**17)
    return lambda: np.ones(num_envs * 2**17).sum()
