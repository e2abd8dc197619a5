"""`ecrl bench results`: how well every shipped config learns, seed by seed, beside what other libraries make of it.

A seed is a process of its own on one core, with an empty compile cache, so that its figures depend on no other's; as
many run at a time as there are cores. What is finished is a file (`records`) and is not measured again; the tables and
pictures are made from these files alone (`leaderboard`).
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

from benchmarks import alone
from benchmarks.leaderboard import publish
from benchmarks.pairs import ROOT, Failure, available
from benchmarks.records import LIBRARIES, Entry, Row, entries, standing, wanted, write, write_failure
from benchmarks.report import machine, versions
from benchmarks.tasks import CONFIGS, TASKS
from ecrl.errors import MissingExtraError, UserError
from ecrl.registry import did_you_mean
from ecrl.run.atomic_files import held

NEEDED = ("stable_baselines3", "matplotlib", "mujoco", "imageio", "Box2D")
_PAUSE_S, _SHARE = 0.2, 0.9


class Job(NamedTuple):
    """A seed of an entry."""

    entry: Entry
    seed: int


class Going(NamedTuple):
    """A job on its way, with what its record will say of it and the folder of its compile cache."""

    job: Job
    running: alone.Running
    about: Row
    cache: str


def check(only: Sequence[str], seeds: int | None, minutes: float | None) -> None:
    """Refuse what cannot run here, in one line."""
    if not sys.platform.startswith("linux"):
        raise UserError(f"results are of processes on one core each, which {sys.platform} has no call for; use Linux")
    for name in only:
        if name not in TASKS:
            raise UserError(f"--only {name}: no such config; {did_you_mean(name, TASKS)}")
    for name, value in (("seeds", seeds), ("minutes", minutes)):
        if value is not None and not value >= 0:
            raise UserError(f"--{name} {value:g}: expected 0 or more")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"results need {', '.join(missing)}: install with: pip install -e '.[bench]'")


def run(only: Sequence[str], seeds: int | None, minutes: float | None, out: Path, configs: Path = CONFIGS) -> bool:
    """Measure what is missing or stale, then make tables and pictures of all that is there.

    Args:
        only: configs; all if none is given.
        seeds: of each; `records.wanted` if None.
        minutes: begin no run after so many; None is without end.
        out: folder for the results.
        configs: folder of the config files.

    Returns: whether all that was begun came to its end. An interrupt loses nothing that was finished.
    """
    check(only, seeds, minutes)
    every = entries(configs)
    deadline = inf if minutes is None else time.monotonic() + 60.0 * minutes
    with _alone_with(out):
        try:
            with _ended_by_signals():
                return measure([one for one in every if not only or one.task.config in only], seeds, out, deadline)
        finally:
            for path in publish(every, out):
                print(path)


@contextmanager
def _alone_with(out: Path) -> Iterator[None]:
    """Two that measured the same seeds, on the same cores, would spoil each other's times."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        with held(out):
            yield
    except BlockingIOError:
        raise UserError(f"{out}: another ecrl bench results is measuring into it; wait for it, or give --out") from None


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and the end of the terminal are as Ctrl-C, so that what is on its way is ended too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]  # as by nohup
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def missing(found: Sequence[Entry], seeds: int | None, out: Path) -> list[Job]:
    """The seeds that have no fresh record: every entry's first, then every entry's second, and so on."""
    known = [(entry, standing(entry, out).fresh) for entry in found]
    jobs = [
        Job(entry, seed)
        for entry, fresh in known
        for seed in range(wanted(fresh) if seeds is None else seeds)
        if seed not in fresh
    ]
    return sorted(jobs, key=lambda job: job.seed)


def measure(found: Sequence[Entry], seeds: int | None, out: Path, deadline: float) -> bool:
    """Run what is missing, one on each core, until nothing is or the deadline; False if a run failed."""
    on: dict[int, Going] = {}
    failed: set[tuple[str, int]] = set()
    todo = missing(found, seeds, out)
    try:
        while True:
            todo = [job for job in todo if job not in [going.job for going in on.values()]]
            for core in available():
                if core not in on and todo and time.monotonic() < deadline:
                    on[core] = begin(todo.pop(0), core)
            if not on:
                return not failed
            time.sleep(_PAUSE_S)
            for core, going in list(on.items()):
                if going.running.process.poll() is not None:
                    if not finish(on.pop(core), out):
                        failed.add((going.job.entry.name, going.job.seed))
                    jobs = missing(found, seeds, out)  # how many seeds there must be may be known only now
                    todo = [job for job in jobs if (job.entry.name, job.seed) not in failed]
    finally:
        for going in on.values():
            if going.running.process.poll() is None:
                end(going)
            else:
                finish(going, out)


def begin(job: Job, core: int) -> Going:
    """Start a job on a core."""
    cache, started = tempfile.mkdtemp(prefix="ecrl_results_"), datetime.now(UTC)
    function = LIBRARIES[job.entry.library].learn
    path = job.entry.config
    args: Row = {"config": str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path), "seed": job.seed}
    known = versions()
    about = {
        "date": started.isoformat(timespec="seconds"),
        "command": shlex.join(["python", *alone.command(function, args, [core])]),
        "commit": known.pop("ecrl"),
        "machine": machine([core]),
        "versions": known,
    }
    args["started"] = time.time()
    return Going(job, alone.begin(function, args, [core], {"TORCHINDUCTOR_CACHE_DIR": cache}), about, cache)


def finish(going: Going, out: Path) -> bool:
    """Write the record of a job whose process has ended; False if it failed."""
    job = going.job
    try:
        found = alone.result(going.running)
        write(job.entry, job.seed, out, found, going.about)
        print(f"{job.entry.name}, seed {job.seed}: {told(job.entry, found)}", flush=True)
    except (Failure, OSError, ValueError) as failure:  # such as a full disk, or a score that is NaN
        print(f"{job.entry.name}, seed {job.seed}: {failure}", flush=True)
        if not isinstance(failure, OSError):
            write_failure(job.entry, job.seed, out, str(failure), going.about)
        return False
    finally:
        end(going)
    return True


def told(entry: Entry, found: Row) -> str:
    """What a record says, in a line; of one whose minutes are not its own, that too."""
    score, last = entry.task.score, found["curve"][-1]
    line, share = f"{score} {last[score]:.4g} in {found['train_s']:.0f} s", found["cpu_s"] / found["wall_s"]
    if share > _SHARE:
        return line
    return f"{line}; had its core for {share:.0%} of the time: remove its file, and it is measured again"


def end(going: Going) -> None:
    """End a job's processes and remove its cache."""
    alone.stop(going.running)
    with suppress(OSError):
        shutil.rmtree(going.cache)
