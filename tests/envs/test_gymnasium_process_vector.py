"""Environments in workers: equal to environments in this process; every fault is one error and leaves no orphan."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import fake_gymnasium_envs  # noqa: F401  (registers Count-v0 and Bandit-v0)
from support.gymnasium_workers import (
    KEYS,
    ZERO,
    children,
    expire_after,
    no_orphan,  # noqa: F401  (a fixture for every test here)
    workers,
)
from support.long_cases import long_except
from support.small_runs import small

from ecrl.envs import make_env
from ecrl.envs.gymnasium import handles as live
from ecrl.envs.gymnasium import process_vector
from ecrl.errors import ConfigError, UserError
from ecrl.loop.iteration import init_state, train_iter

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="children are counted in /proc")


def test_workers_give_what_this_process_gives():
    kwargs, before = {"info": True, "masks": True}, children()
    env, here = workers(**kwargs), make_env({"name": "gymnasium:Count-v0", "cfg": {"kwargs": kwargs}})
    assert (env.observation_space, env.action_space) == (here.observation_space, here.action_space)
    state, expected = env.reset(KEYS), here.reset(KEYS)
    mine = children() - before
    assert 1 <= len(mine) <= len(os.sched_getaffinity(0))
    for _ in range(12):
        state, expected = env.step(state, ZERO, None), here.step(expected, ZERO, None)
        for name, leaf in expected.exclude("token").flatten_keys("/").items():
            torch.testing.assert_close(state.flatten_keys("/")[name], leaf, rtol=0, atol=0, equal_nan=True)
    env.close(state)
    assert not children() & mine


def test_training_in_workers_is_training_here():
    params = []
    for asynchronous in (True, False):
        cfg = small(**{"env": {"name": "gymnasium:CartPole-v1", "cfg": {"asynchronous": asynchronous}}})
        *_, record = train_iter(init_state(cfg), cfg)
        params.append(record["state"]["params"])
    assert (params[0] == params[1]).all()


def fails(env, message):
    with pytest.raises(UserError, match=message) as error:
        state = env.reset(KEYS)
        for _ in range(4):
            state = env.step(state, ZERO, None)
    assert "\n" not in str(error.value)
    assert not live._LIVE


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "raise in step",
            r"env 2 \(gymnasium:Count-v0\) raised KeyError: 'step.nfailed' \(fake_gymnasium_envs.py:\d+\), in step 3",
        ),
        (
            "raise in reset",
            r"env 2 \(gymnasium:Count-v0\) raised KeyError: 'reset.nfailed' \(fake_gymnasium_envs.py:\d+\), in step 1",
        ),
        (
            "die in step",
            r"env 2 .* lost its worker \(process \d+ of envs \d to \d\), which ended with status 3, in",
        ),
        ("die in reset", r"env 2 .* lost its worker .* ended with status 3, in step 1"),
    ],
)
def test_a_worker_that_raises_or_dies_ends_in_one_error(fault, message):
    fails(workers(fault=fault), message)


@pytest.mark.parametrize(("when", "step"), [("step", 3), ("reset", 1)])
def test_a_worker_that_hangs_ends_in_one_error_after_the_timeout(when, step, tmp_path, monkeypatch):
    start = process_vector._start_worker

    def start_and_expire(envs):
        worker = start(envs)
        if 2 in envs:
            expire_after(worker.pipe, tmp_path / "hangs")
        return worker

    monkeypatch.setattr(process_vector, "_start_worker", start_and_expire)
    env = workers(fault=f"hang in {when}", mark=str(tmp_path / "hangs"), timeout=500.0)
    fails(env, rf"env 2 \(gymnasium:Count-v0\) did not answer within 500 s .*in step {step}")


def test_a_worker_killed_from_outside_ends_in_one_error():
    env, before = workers(), children()
    state = env.step(env.reset(KEYS), ZERO, None)
    victim = max(children() - before)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(
        UserError, match=rf"env \d .* lost its worker \(process {victim} .* killed by SIGKILL, in step 2"
    ):
        env.step(state, ZERO, None)
    assert not children() - before


def test_an_environment_that_a_worker_cannot_make_is_reported():
    with pytest.raises(ConfigError, match="env: gymnasium:Count-v0: raised RuntimeError: cannot be made"):
        workers(fault="make")
    with pytest.raises(ConfigError, match="not registered in Gymnasium"):
        workers(gym_id="NoSuchEnv-v0")


QUIET = """
import os, signal, sys
sys.path.insert(0, "tests")
os.sched_getaffinity = lambda pid: {0, 1}
from support.gymnasium_workers import KEYS, ZERO, children, workers
from ecrl.errors import UserError
env, before = workers(fault="slow in step"), children()
state = env.step(env.step(env.reset(KEYS), ZERO, None), ZERO, None)
first, second = sorted(children() - before)
os.kill(first, signal.SIGKILL)
try:
    env.step(state, ZERO, None)
except UserError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_other_workers_end_quietly_when_one_is_killed():
    # of the four, env 2 is slow: its worker answers when the pipe is closed already
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, check=True)
    assert "env 0 (gymnasium:Count-v0) lost its worker" in done.stdout
    assert done.stderr == ""


def test_closing_is_quiet_and_may_be_repeated_whatever_became_of_the_workers(capfd):
    for kill in (False, True):
        env, before = workers(), children()
        state = env.step(env.reset(KEYS), ZERO, None)
        mine = children() - before
        if kill:
            os.kill(max(mine), signal.SIGKILL)
        for _ in range(3):
            env.close(state)
            assert mine and not children() & mine
    assert capfd.readouterr() == ("", "")


PARENT = """
import sys, torch
sys.path.insert(0, "tests")
from support import fake_gymnasium_envs
from ecrl.envs import make_env
from support.gymnasium_workers import KEYS
kwargs = {"fault": "hang in step", "mark": sys.argv[2]}
env = make_env({"name": "gymnasium:Count-v0", "cfg": {"asynchronous": True, "timeout": 900.0, "kwargs": kwargs}})
state = env.reset(KEYS)
print("open", flush=True)
if sys.argv[1] == "killed":
    for _ in range(3):
        state = env.step(state, torch.zeros(4, dtype=torch.int64), None)
sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", long_except(["killed"], ["killed", "exit"]))
def test_workers_end_with_their_parent_however_it_ends(end, tmp_path):
    """A hanging worker also ends: the parent is killed while it waits for the third step."""
    pipe, mark = subprocess.PIPE, tmp_path / "hangs"
    with subprocess.Popen([sys.executable, "-c", PARENT, end, str(mark)], stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.readline() == "open\n"
        while end == "killed" and not mark.exists():
            time.sleep(0.01)
        orphans = children(parent.pid)
        assert orphans
        if end == "killed":
            parent.kill()
    assert parent.returncode == (-signal.SIGKILL if end == "killed" else 0)
    deadline = time.monotonic() + 600.0
    while any(Path(f"/proc/{pid}").exists() for pid in orphans) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in orphans)
