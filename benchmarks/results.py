"""Measure how well every shipped config learns, and how well other libraries learn the same tasks.

The command is `ecrl bench results`. Each seed runs in a separate process on one core with an empty compile cache, so
that seeds do not influence each other. All cores run seeds at the same time. A finished seed has a file (`records`),
and is measured again only if its settings have changed. The tables and pictures are made only from these files
(`leaderboard`).
"""

import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from math import inf
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from benchmarks import separate_process
from benchmarks.leaderboard import publish
from benchmarks.pairs import ROOT, Failure, available
from benchmarks.records import LIBRARIES, Entry, Row, entries, num_seeds, standing, write, write_failure
from benchmarks.report import machine, versions
from benchmarks.tasks import CONFIGS, TASKS
from ecrl.errors import MissingExtraError, UserError
from ecrl.registry import did_you_mean
from ecrl.storage.atomic_files import lock_folder

NEEDED = ("stable_baselines3", "matplotlib", "mujoco", "imageio", "Box2D")
_PAUSE_S, _SHARE = 0.2, 0.9


class Job(NamedTuple):
    """Job that measures one seed of an entry."""

    entry: Entry
    seed: int


class RunningJob(NamedTuple):
    """Job with a running process, the metadata of its record and the folder of its compile cache."""

    job: Job
    running: separate_process.Running
    about: Row
    cache: str


def check(only: Sequence[str], seeds: int | None, minutes: float | None) -> None:
    """Raise a one-line UserError if an argument is invalid, a package is missing or the system is not Linux."""
    if not sys.platform.startswith("linux"):
        raise UserError(f"results pin each process to one core, which {sys.platform} does not support; use Linux")
    for name in only:
        if name not in TASKS:
            raise UserError(f"--only {name}: no such config; {did_you_mean(name, TASKS)}")
    for name, value in (("seeds", seeds), ("minutes", minutes)):
        if value is not None and not value >= 0:
            raise UserError(f"--{name} {value:g}: expected 0 or more")
    chosen = [library for library in LIBRARIES.values() if {*library.tasks} & ({*only} or {*TASKS})]
    needed = dict.fromkeys((*NEEDED, *(name for library in chosen for name in library.packages)))
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"results need {', '.join(missing)}: install with: pip install -e '.[bench]'")


def run(only: Sequence[str], seeds: int | None, minutes: float | None, out: Path, configs: Path = CONFIGS) -> bool:
    """Measure missing and stale seeds, then make the tables and pictures from all files.

    Args:
        only: names of the configs to measure, or an empty sequence for all configs.
        seeds: number of seeds per config, or None for the result of `records.num_seeds`.
        minutes: start no run after this number of minutes, or None for no limit.
        out: folder for the results.
        configs: folder of the config files.

    Returns: True if no run failed. An interrupt keeps all finished seeds.
    """
    check(only, seeds, minutes)
    all_entries = entries(configs)
    deadline = inf if minutes is None else time.monotonic() + 60.0 * minutes
    with _locked(out):
        try:
            with _signals_as_interrupt():
                return measure(
                    [entry for entry in all_entries if not only or entry.task.config in only], seeds, out, deadline
                )
        finally:
            for path in publish(all_entries, out):
                print(path)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Lock the results folder: two measurements on the same cores would disturb each other's times."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        with lock_folder(out):
            yield
    except BlockingIOError:
        raise UserError(
            f"{out}: another ecrl bench results is writing to it; wait for it to end, or set --out"
        ) from None


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C, so that running jobs are stopped too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # nohup ignores SIGHUP: keep it ignored
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    old_handlers = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def missing(measured_entries: Sequence[Entry], seeds: int | None, out: Path) -> list[Job]:
    """List the seeds without a fresh record, sorted by seed: seed 0 of every entry, then seed 1, and so on."""
    fresh_by_entry = [(entry, standing(entry, out).fresh) for entry in measured_entries]
    jobs = [
        Job(entry, seed)
        for entry, fresh in fresh_by_entry
        for seed in range(num_seeds(fresh) if seeds is None else seeds)
        if seed not in fresh
    ]
    return sorted(jobs, key=lambda job: job.seed)


def measure(measured_entries: Sequence[Entry], seeds: int | None, out: Path, deadline: float) -> bool:
    """Run missing seeds, one per core, until none is missing or the deadline passes. Return False if a run failed."""
    by_core: dict[int, RunningJob] = {}
    failed: set[tuple[str, int]] = set()
    todo = missing(measured_entries, seeds, out)
    try:
        while True:
            todo = [job for job in todo if job not in [running_job.job for running_job in by_core.values()]]
            for core in available():
                if core not in by_core and todo and time.monotonic() < deadline:
                    by_core[core] = begin(todo.pop(0), core)
            if not by_core:
                return not failed
            time.sleep(_PAUSE_S)
            for core, running_job in list(by_core.items()):
                if running_job.running.process.poll() is not None:
                    if not finish(by_core.pop(core), out):
                        failed.add((running_job.job.entry.name, running_job.job.seed))
                    jobs = missing(measured_entries, seeds, out)  # the required number of seeds may have changed
                    todo = [job for job in jobs if (job.entry.name, job.seed) not in failed]
    finally:
        for running_job in by_core.values():
            if running_job.running.process.poll() is None:
                end(running_job)
            else:
                finish(running_job, out)


def begin(job: Job, core: int) -> RunningJob:
    """Start a job on a core."""
    cache, started = tempfile.mkdtemp(prefix="ecrl_results_"), datetime.now(UTC)
    function = LIBRARIES[job.entry.library].learn
    path = job.entry.config
    args: Row = {"config": str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path), "seed": job.seed}
    current_versions = versions()
    about = {
        "date": started.isoformat(timespec="seconds"),
        "command": shlex.join(["python", *separate_process.command(function, args, [core])]),
        "commit": current_versions.pop("ecrl"),
        "machine": machine([core]),
        "versions": current_versions,
    }
    args["started"] = time.time()
    return RunningJob(
        job, separate_process.begin(function, args, [core], {"TORCHINDUCTOR_CACHE_DIR": cache}), about, cache
    )


def finish(running_job: RunningJob, out: Path) -> bool:
    """Write the record, or the failure, of a job whose process has ended. Return False if the job failed."""
    job = running_job.job
    try:
        result = separate_process.result(running_job.running)
        write(job.entry, job.seed, out, result, running_job.about)
        print(f"{job.entry.name}, seed {job.seed}: {record_line(job.entry, result)}", flush=True)
    except (Failure, OSError, ValueError) as failure:  # such as a full disk or a NaN score
        print(f"{job.entry.name}, seed {job.seed}: {failure}", flush=True)
        if not isinstance(failure, OSError):
            write_failure(job.entry, job.seed, out, str(failure), running_job.about)
        return False
    finally:
        end(running_job)
    return True


def record_line(entry: Entry, result: Row) -> str:
    """Summarise a record in a line, with a note if the process did not have its core to itself."""
    score, last = entry.task.score, result["curve"][-1]
    line, share = f"{score} {last[score]:.4g} in {result['train_s']:.0f} s", result["cpu_s"] / result["wall_s"]
    if share > _SHARE:
        return line
    return f"{line}; had its core for {share:.0%} of the time; remove its file to measure it again"


def end(running_job: RunningJob) -> None:
    """Kill a job's processes and remove its cache."""
    separate_process.stop(running_job.running)
    with suppress(OSError):
        shutil.rmtree(running_job.cache)
