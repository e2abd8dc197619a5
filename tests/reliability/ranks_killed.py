"""Kill one of two ranks at a random moment, in many runs: `python tests/reliability/ranks_killed.py RUNS`.

torchrun restarts the ranks, which resume from the last checkpoint. The run ends with the same weights as an
uninterrupted run.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ranks import PATIENCE_S, ROOT, free_port

import ecrl

ITERATIONS = 40


def config(folder: Path) -> Path:
    """A run of some seconds with a checkpoint in every other iteration."""
    sizes = {"trainer.num_envs": 4, "trainer.buffer_size": 64, "trainer.iterations": ITERATIONS}
    sizes |= {"trainer.save_freq": 1024, "trainer.compile": "off", "trainer.distributed": True}
    sizes |= {"algorithm.cfg.batch_size": 64, "trainer.enable_eval": False}
    cfg = ecrl.load_config(ROOT / "configs" / "cartpole_ppo.json", sizes)
    path = folder / "small.json"
    path.write_text(json.dumps(cfg.model_dump(mode="json")))
    return path


def begun(path: Path, run_dir: Path) -> subprocess.Popen[str]:
    """Torchrun with two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    command += ["--master-port", str(free_port()), "-m", "ecrl", "train", str(path), "--run-dir", str(run_dir)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def workers(torchrun: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of its living ranks."""
    tasks = Path(f"/proc/{torchrun.pid}/task").glob("*/children")
    return sorted(int(pid) for task in tasks for pid in task.read_text().split())


def seconds(path: Path, run_dir: Path) -> tuple[float, float]:
    """When the first logs came, and the end, of a run that nobody disturbs."""
    start, torchrun, first = time.monotonic(), begun(path, run_dir), 0.0
    while torchrun.poll() is None:
        first = first or (time.monotonic() - start if (run_dir / "metrics.jsonl").exists() else 0.0)
        time.sleep(0.05)
    if torchrun.returncode:
        raise AssertionError(torchrun.communicate()[0][-3000:])
    return first, time.monotonic() - start


def killed(path: Path, run_dir: Path, after: float, victim: int) -> bool:
    """Kill a rank so many seconds after the start; return True if torchrun restarted the ranks."""
    torchrun = begun(path, run_dir)
    time.sleep(after)
    alive = workers(torchrun)
    if len(alive) > victim:
        os.kill(alive[victim], signal.SIGKILL)
    output = torchrun.communicate(timeout=PATIENCE_S)[0]
    if torchrun.returncode:
        raise AssertionError(output[-3000:])
    return "exitcode: -9" in output


def end(run_dir: Path) -> bytes:
    """Return the last state of rank 0."""
    last = max((run_dir / "checkpoints").glob("step_*"), key=lambda p: int(p.name.removeprefix("step_")))
    assert last.name == f"step_{ITERATIONS * 64 * 4 * 2}", last
    return (last / "state.safetensors").read_bytes() + (last / "rank_1.safetensors").read_bytes()


def main(runs: int) -> tuple[int, int]:
    """Count the runs that ended with the bits of an undisturbed run, and the runs in which a rank was really killed."""
    good, hit = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        path = config(Path(folder))
        first, last = seconds(path, Path(folder) / "whole")
        expected, draw = end(Path(folder) / "whole"), random.Random(0)
        for i in range(runs):
            after, victim = draw.uniform(0.5 * first, last), draw.randrange(2)
            hit += killed(path, Path(folder) / f"run_{i}", after, victim)
            good += end(Path(folder) / f"run_{i}") == expected
            print(f"run {i}: rank {victim} killed after {after:.1f} s; {good} of {i + 1} good, {hit} hit", flush=True)
    return good, hit


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]))[0] != int(sys.argv[1]))
