"""Networks and buffers that do not fit in memory are refused in one line, before anything is allocated.

A run, its checkpoints and its resumption take one copy of the replay buffer.
"""

import gc
import json
import os
import platform
import subprocess
import sys

import pytest
import torch

import ecrl.memory
from ecrl import load_config
from ecrl.errors import ConfigError, UserError
from ecrl.loop.build import build, with_eval_events
from ecrl.loop.iteration import init_state, run_summary
from ecrl.memory import enough_memory, without_garbage_collection
from ecrl.run.evaluation import check_evaluation
from ecrl.run.train import train, train_from_config

CONFIG = "configs/cartpole_ppo.json"


@pytest.fixture
def gigabyte(monkeypatch):
    """A machine with one."""
    monkeypatch.setattr(ecrl.memory, "total_memory", lambda device: 10**9)


def _cfg(**changes):
    return load_config(CONFIG, {"trainer.compile": "off"} | {f"trainer.{key}": value for key, value in changes.items()})


@pytest.mark.parametrize("look", ["summary", train, "run"])
def test_rollouts(gigabyte, tmp_path, look):
    # a step: 4 floats of observation, an action of 8 bytes, 4 floats and 3 flags, which are 43 bytes
    fits, large = _cfg(num_envs=1000, buffer_size=23_000), _cfg(num_envs=1000, buffer_size=23_300)
    run_summary(build(fits), fits, 1)
    with pytest.raises(
        ConfigError, match=r"trainer.num_envs: num_envs \* \(buffer_size \+ 1\) = 23,301,000 steps take at least 1 GB"
    ):
        if look == "run":
            changes = {"trainer.num_envs": 1000, "trainer.buffer_size": 23_300}
            train_from_config(CONFIG, run_dir=tmp_path / "run", overrides=changes)
        elif look == "summary":
            run_summary(build(large), large, 1)
        else:
            look(init_state(large), large)
    assert not (tmp_path / "run").exists()


def test_observations_at_time_limits_count(gigabyte):
    # 43 bytes a step, and 16 bytes for the observation at each time limit
    long, short = ({"env.cfg.max_episode_steps": steps, "trainer.compile": "off"} for steps in (500, 1))
    size = {"trainer.num_envs": 1000, "trainer.buffer_size": 17_000}
    cfg = load_config(CONFIG, long | size)
    run_summary(build(cfg), cfg, 1)
    cfg = load_config(CONFIG, short | size)
    with pytest.raises(ConfigError, match="= 17,001,000 steps take at least 1 GB"):
        run_summary(build(cfg), cfg, 1)


def test_environments(gigabyte):
    with pytest.raises(ConfigError, match=r"^trainer.num_envs: 70,000,000 environments take at least 1 GB, .* 1 GB;"):
        init_state(_cfg(num_envs=70_000_000))
    many = _cfg(enable_eval=True, num_eval_envs=10**9, num_eval_episodes=70_000_000)
    with pytest.raises(ConfigError, match=r"^trainer.num_eval_envs: 70,000,000 environments take at least 1 GB"):
        check_evaluation(with_eval_events(build(many), many), many)


def test_networks(gigabyte):
    wide = {f"policy.{net}.network_cfg.hidden_sizes": [12_000, 12_000] for net in ("actor", "critic")}
    wide |= {f"policy.{net}.network_cfg.orthogonal_init": None for net in ("actor", "critic")}
    message = r"^policy.actor.network_cfg.hidden_sizes: 144,096,002 weights and their gradients take at least 1 GB"
    cfg = load_config(CONFIG, wide)
    with pytest.raises(ConfigError, match=message):
        run_summary(build(cfg), cfg, 1)


@pytest.mark.parametrize("error", [MemoryError(), None, RuntimeError("Storage size calculation overflowed")])
def test_what_the_allocator_raises_is_one_line(error):
    with (
        pytest.raises(UserError, match=r"^ecrl: not enough memory.*; use less$") as raised,
        enough_memory("ecrl", "use less"),
    ):
        if error:
            raise error
        torch.empty(2**60)
    assert ("for 4611686018427387904 bytes" in str(raised.value)) == (error is None)


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="of a kernel"), enough_memory("ecrl", "use less"):
        raise RuntimeError("of a kernel")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pause_leaves_the_garbage_collector_as_it_was(monkeypatch, enabled):
    calls = []
    monkeypatch.setattr(gc, "isenabled", lambda: enabled)
    monkeypatch.setattr(gc, "disable", lambda: calls.append("disable"))
    monkeypatch.setattr(gc, "enable", lambda: calls.append("enable"))
    with pytest.raises(RuntimeError, match="of a kernel"), without_garbage_collection():
        raise RuntimeError("of a kernel")
    assert calls == ["disable", "enable"][: 1 + enabled]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "rows"),
    [
        ("off", 500_000),
        pytest.param("off", 1_000_000, marks=pytest.mark.long),
        pytest.param("on", 1_000_000, marks=pytest.mark.long),
    ],
)
def test_a_run_and_its_checkpoints_take_one_copy_of_the_buffer(tmp_path, form, rows):
    command = [sys.executable, "tests/support/buffer_memory.py", form, str(rows), tmp_path]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    steps, final, run, resumed, saved, copied = json.loads(done.stdout.splitlines()[-1])
    assert steps > 2**30 * rows // 1_000_000 and final < 2**20
    assert copied > 0.99 * steps, "a copy of the buffer is seen by this measurement"
    assert 0.99 * steps < run < 1.05 * steps and 0.99 * steps < resumed < 1.05 * steps
    assert saved < 2**20


FAULTS = """
import resource, sys
import torch
from ecrl.memory import keep_freed_memory
changed = keep_freed_memory()
def allocate():
    tensors = [torch.ones(2**18) for _ in range(64)]
    tensors.append(torch.ones(2**22))
for _ in range(5):
    allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    allocate()
print(changed, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment) -> tuple[str, int]:
    """Return the result of `keep_freed_memory`, and the number of pages that the system gave to later allocations."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=True)
    changed, count = done.stdout.split()
    return changed, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_freed_memory_is_used_again_unless_the_user_configures_the_allocator():
    changed, pages = faults()
    assert changed == "True" and pages < 10_000, "10 times 80 MiB are 205,000 pages"
    changed, pages = faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert changed == "False" and pages > 100_000
    assert faults(GLIBC_TUNABLES="glibc.malloc.trim_threshold=131072")[0] == "False"


def test_another_c_library_keeps_its_settings(monkeypatch):
    monkeypatch.setattr(ecrl.memory.ctypes, "CDLL", lambda name: object())
    assert ecrl.memory.keep_freed_memory.__wrapped__() is False
