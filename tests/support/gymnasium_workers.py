"""Four Gymnasium environments in worker processes, and their processes."""

import os
import time
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch

from ecrl import rng
from ecrl.envs import make_env
from ecrl.envs.gymnasium import handles as live
from support import fake_gymnasium_envs

assert fake_gymnasium_envs  # registers Count-v0 and Bandit-v0
KEYS = rng.split(rng.key(1), 4)
SEEDS = (rng.bits(KEYS) & 0x7FFFFFFF).tolist()  # odd only for env 2, where faults happen
ZERO = torch.zeros(4, dtype=torch.int64)


def children(parent: int | None = None) -> set[int]:
    """Processes that this one started and that run."""
    pids = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.read_text().split(" (", 1)
        except OSError:
            continue
        state, its_parent = rest.rsplit(") ", 1)[1].split()[:2]
        if int(its_parent) == (parent or os.getpid()) and state != "Z":
            pids.add(int(pid))
    return pids


@pytest.fixture(autouse=True)
def no_orphan():
    resource_tracker.ensure_running()  # Python's own helper process, which the first worker would start
    before = children()
    yield
    for one in list(live._LIVE.values()):
        one.close()
    for _ in range(100):  # a process that ends may be visible for a moment
        if children() <= before:
            return
        time.sleep(0.05)
    left = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children() - before]
    assert not left, left


def expire_after(pipe, mark):
    """Make `pipe.poll` time out as soon as the file `mark` exists, and wait until then."""
    poll = pipe.poll

    def wait(timeout):
        while not poll(0.01):
            if mark.exists():
                return poll(0.0)
        return True

    pipe.poll = wait


def workers(gym_id="Count-v0", timeout=600.0, **kwargs):
    return make_env(
        {"name": f"gymnasium:{gym_id}", "cfg": {"asynchronous": True, "timeout": timeout, "kwargs": kwargs}}
    )
