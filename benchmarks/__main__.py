"""Run the subjects: `python -m benchmarks`. For each subject, print a table and write a JSON file, a PNG and an SVG."""

import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks.command_line import run_command
from benchmarks.pairs import ROOT, available
from benchmarks.report import report, show, write
from ecrl.errors import MissingExtraError, UserError
from ecrl.report.plots import write as write_picture

SUBJECTS = {  # name: description; the file of that name has `rows(quick, cores)` and `figure(rows)`
    "end_to_end": "env steps per second of PPO on CartPole against rejax, SB3, TorchRL, LeanRL and CleanRL",
    "off_policy": "env steps per second of DQN, TD3, SAC, PQN, FastTD3 and FastSAC against rejax and SB3",
    "recurrent": "env steps per second of recurrent PPO against PureJaxRL's in JAX",
    "minatar": "env steps per second of PPO on games of MinAtar against rejax",
    "solved": "seconds from process start to CartPole solved, with cold and warm caches",
    "kernels": "kernels against rlax, TorchRL, SB3 and others: time, ratio, share of the machine's limit",
    "memory": "peak memory per environment step",
    "scaling": "env steps per second by number of environments, length of a rollout and width of the networks",
    "seeds": "64 runs together against 64 runs in sequence, and against rejax vmapped",
    "physics": "PPO on PushCube against its bare physics",
    "cameras": "frames per second of the cameras of MuJoCo tasks, fast images against full quality",
    "guard": "cost of the finite guard per iteration",
    "phases": "time of each phase of an iteration",
    "gpu": "on a GPU, in eight minutes: compiled runs against eager ones, PPO against rejax, kernels",
}
QUICK = ("end_to_end", "solved", "kernels")
NEEDED = ("rlax", "rejax", "gymnax", "torchrl", "stable_baselines3", "mujoco", "matplotlib")


def check(only: tuple[str, ...]) -> None:
    """Raise a one-line UserError if a subject is unknown, a package is missing or the system is not Linux."""
    unknown = [name for name in only if name not in SUBJECTS]
    if unknown:
        raise UserError(f"--only {unknown[0]}: no such subject; known: {', '.join(SUBJECTS)}")
    needed = ("matplotlib",) if only == ("gpu",) else NEEDED  # a machine with a GPU may lack other libraries
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"benchmarks need {', '.join(missing)}: install with: pip install -e '.[bench]'")
    if not sys.platform.startswith("linux"):
        raise UserError(f"benchmarks pin processes to cores, which {sys.platform} does not support; run them on Linux")


def run(quick: bool = False, only: tuple[str, ...] = (), out: Path = ROOT / "benchmarks" / "results") -> bool:
    """Measure ecrl side by side with other libraries, on this machine.

    Args:
        quick: fewer and shorter rounds. Without `only`, run only end_to_end, solved and kernels.
        only: subjects to run. If absent, run all subjects, or the three quick subjects.
        out: folder for the JSON files and pictures.

    Returns: True if no row has an error.
    """
    check(only)
    cores, succeeded = available(), True
    for name in only or (QUICK if quick else SUBJECTS):
        print(f"{name}: {SUBJECTS[name]}", flush=True)
        subject, start = import_module(f"benchmarks.{name}"), time.perf_counter()
        rows = subject.rows(quick, cores)
        subject_report = report(name, rows, cores, quick, time.perf_counter() - start)
        show(subject_report)
        print(write(subject_report, out), flush=True)
        write_picture(subject.figure(rows), out / name)
        succeeded &= not any("error" in row for row in rows)
    return succeeded


def main() -> None:
    """Run the command line (see `run_command`)."""
    run_command(run, "python -m benchmarks")


if __name__ == "__main__":
    main()
