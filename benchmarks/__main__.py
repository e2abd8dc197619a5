"""`python -m benchmarks`: run the subjects; each gives a table on the terminal, a JSON file, a PNG and an SVG."""

import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import tyro

from benchmarks.pairs import ROOT, available
from benchmarks.report import report, show, write
from ecrl.errors import MissingExtraError, UserError
from ecrl.report.plots import write as write_picture

SUBJECTS = {  # name: what it shows; the file of that name has `rows(quick, cores)` and `figure(rows)`
    "end_to_end": "env steps per second of PPO on CartPole against rejax, SB3, TorchRL and a CleanRL-style loop",
    "solved": "seconds from process start to CartPole solved, with cold and warm caches",
    "kernels": "kernels against rlax, TorchRL, SB3 and others: time, ratio, share of what the machine allows",
    "memory": "peak memory per environment step",
    "scaling": "env steps per second by number of environments, length of a rollout and width of the networks",
    "seeds": "64 runs as one vmapped call against one after the other, and against rejax vmapped",
    "physics": "PPO on PushCube against the bare physics in it",
    "guard": "what the finite guard costs an iteration",
    "phases": "where the time of an iteration goes",
}
QUICK = ("end_to_end", "solved", "kernels")
NEEDED = ("rlax", "rejax", "gymnax", "torchrl", "stable_baselines3", "mujoco", "matplotlib")


def check(only: tuple[str, ...]) -> None:
    """Refuse what cannot run here, in one line."""
    unknown = [name for name in only if name not in SUBJECTS]
    if unknown:
        raise UserError(f"--only {unknown[0]}: no such subject; there are: {', '.join(SUBJECTS)}")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"benchmarks need {', '.join(missing)}: install with: pip install -e '.[bench]'")
    if not sys.platform.startswith("linux"):
        raise UserError(f"benchmarks pin processes to cores, which {sys.platform} has no call for; run them on Linux")


def run(quick: bool = False, only: tuple[str, ...] = (), out: Path = ROOT / "benchmarks" / "results") -> bool:
    """Measure ecrl side by side with other libraries, on this machine.

    Args:
        quick: fewer and shorter rounds, and of the subjects the first three only.
        only: subjects; all if none is given.
        out: folder for the JSON files and pictures.

    Returns: whether everything ran.
    """
    check(only)
    cores, good = available(), True
    for name in only or (QUICK if quick else SUBJECTS):
        print(f"{name}: {SUBJECTS[name]}", flush=True)
        subject, start = import_module(f"benchmarks.{name}"), time.perf_counter()
        rows = subject.rows(quick, cores)
        found = report(name, rows, cores, quick, time.perf_counter() - start)
        show(found)
        print(write(found, out), flush=True)
        write_picture(subject.figure(rows), out / name)
        good &= not any("error" in row for row in rows)
    return good


def main() -> None:
    """The command line; exit status 1 if something failed, 2 for a fault the user can mend."""
    try:
        good = tyro.cli(run, prog="python -m benchmarks", config=(tyro.conf.FlagCreatePairsOff,))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
