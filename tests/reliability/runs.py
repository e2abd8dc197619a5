"""Runs of a tiny CartPole through the command line, in processes forked from one that has imported everything.

So a run begins in milliseconds. What forks them imports torch but computes nothing with it.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ecrl.run.train  # noqa: F401  (for the runs that are forked)
from ecrl.cli.main import main
from ecrl.run.checkpoint import read_files, step_checkpoints

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
TINY = {
    "trainer": {"num_envs": 4, "buffer_size": 8, "iterations": 30, "compile": "off", "save_freq": 64},
    "env": {"name": "cartpole"},
    "policy": {"name": "actor_critic", "actor": NET, "critic": NET, "normalize_obs": True},
    "algorithm": {"name": "ppo", "cfg": {"n_epochs": 1, "batch_size": 16, "lr_scheduler": {"name": "linear"}}},
}
TINY["trainer"]["keep_checkpoints"] = 3
DQN = {"capacity": 256, "batch_size": 16, "learning_starts": 64, "n_step": 2, "prioritized": {}}
RUNS = {
    "ppo": TINY,
    "dqn": TINY
    | {"policy": {"name": "q_network", "critic": NET}, "algorithm": {"name": "dqn", "cfg": DQN | {"train_freq": 4}}},
}
"""Runs by the name of their algorithm. The replay buffer of the run of DQN is overwritten several times."""


class Run(NamedTuple):
    """A process, and the file of what it prints."""

    pid: int
    out: Path

    def ended(self) -> int | None:
        """Return the exit status, negative after a signal; None while the process runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return None if pid == 0 else os.waitstatus_to_exitcode(status)

    def end(self, seconds: float = 1200.0) -> int:
        """Wait for it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status = self.ended()
            if status is not None:
                return status
            time.sleep(0.002)
        os.kill(self.pid, 9)
        raise AssertionError(f"{self.pid} did not end within {seconds} s: {self.out.read_text()}")


def forked(out: Path, job: Callable[[], Any], **environ: str) -> Run:
    """Run `job()` in a separate process, with the exit status that a shell would see."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return Run(pid, out)
    handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ |= environ
    status = 1
    try:
        job()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ecrl_train(folder: Path, *args: str, **environ: str) -> Run:
    """`ecrl train` with these arguments, in `folder`."""

    def job() -> None:
        os.chdir(folder)
        sys.argv = ["ecrl", "train", *args]
        main()

    return forked(folder / "out.txt", job, **environ)


def start_run(folder: Path, config: dict[str, Any] = TINY) -> Run:
    """Start a new run in `folder`/run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(config))
    return ecrl_train(folder, "run.json", "--run-dir", "run")


def resume_run(folder: Path) -> int:
    """Resume the run, or start it if nothing was written yet; return the exit status."""
    if not (folder / "run" / "config.json").exists():
        return ecrl_train(folder, "run.json", "--run-dir", "run").end()
    return ecrl_train(folder, "--resume", "run").end()


def steps_logged(run: Path) -> int:
    """Return the env steps of the last complete row of `metrics.jsonl`, or 0."""
    try:
        rows = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return json.loads(rows[-1])["sample_step"] if rows else 0


def ending(run: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """Check the last checkpoint's checksums; return the bits of its state, and all rows without times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: x for key, x in row.items() if key not in ("seconds", "charts/SPS")} for row in rows]
    last = step_checkpoints(run)[-1]
    return read_files(last)["state.safetensors"], [{"last": last.name}, *rows]


def reference(folder: Path, config: dict[str, Any] = TINY) -> tuple[tuple[bytes, list], float]:
    """Return the end of an uninterrupted run, and its duration in seconds."""
    before = time.monotonic()
    run = start_run(folder, config)
    assert run.end() == 0, run.out.read_text()
    return ending(folder / "run"), time.monotonic() - before


def write_results(name: str, figures: str) -> None:
    """Write figures under their heading into RESULTS.md, with the command, the date and the machine."""
    path, head = Path(__file__).with_name("RESULTS.md"), f"## {name}\n"
    text = path.read_text() if path.exists() else "# Reliability: what was measured\n"
    before, _, after = text.partition(head)
    rest = after[after.index("\n## ") + 1 :] if "\n## " in after else ""
    command = " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(path.parents[2])), *sys.argv[1:]])
    machine = f"{os.cpu_count()} cores of {platform.machine()}, torch {torch.__version__}"
    made = f"`{command}`, {time.strftime('%Y-%m-%d')}, {machine}"
    parts = [before.rstrip() + "\n", f"{head}\n{made}\n\n{figures.rstrip()}\n", rest]
    path.write_text("\n".join(part for part in parts if part))
