"""Contestants take turns, A B A B, on the same pinned cores; what counts is the ratio of each round.

Every contestant is a process, because thread counts and XLA's flags are read at start. While they get ready (imports,
compiling) they are spread over the machine, each on as many cores as it will have, so that its thread pools have the
size they will need; then all move to the same cores and only one works at a time.
"""

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 900.0
"""Seconds without an answer after which a worker counts as hung."""
PAUSE = 0.03
"""Seconds between turns, in which threads that still spin after the other's turn fall asleep."""


class Contestant(NamedTuple):
    """`make` is "module:function", called with `args` in a process with `env` added to its environment."""

    name: str
    make: str
    args: Mapping[str, Any] = {}
    env: Mapping[str, str] = {}


class Result(NamedTuple):
    """`rates` are things per second, one of each round; after an `error`, those of the rounds before it."""

    name: str
    rates: list[float]
    setup_s: float
    versions: dict[str, str]
    peak_rss_mb: float
    error: str | None = None


class Failure(Exception):
    """A worker that died or hung: its name and the last line it wrote to stderr."""


class Worker(NamedTuple):
    """A process that runs a contestant."""

    name: str
    process: subprocess.Popen[str]
    errors: IO[str]


def available() -> tuple[int, ...]:
    """The cores this process may use, as `taskset` left them."""
    return tuple(sorted(os.sched_getaffinity(0)))


def threads_env(cores: Sequence[int]) -> dict[str, str]:
    """Thread counts of all libraries for so many cores."""
    count = str(len(cores))
    one = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    flags = {"XLA_FLAGS": one if len(cores) == 1 else "", "JAX_PLATFORMS": "cpu"}
    return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count, **flags}


def start(contestant: Contestant, cores: Sequence[int], first: Sequence[int]) -> Worker:
    """A worker with threads for `cores` that gets ready on the cores `first`, equally many."""
    command = [sys.executable, "-m", "benchmarks.worker", contestant.make, json.dumps(dict(contestant.args))]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **threads_env(cores), **contestant.env}
    errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by stop)
    with _pinned(first):  # a child inherits it, before it imports anything
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # ended together with the compilers it starts
        )
    return Worker(contestant.name, process, errors)


@contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin(pid: int, cores: Sequence[int]) -> None:
    """Move a process with all its threads to `cores`."""
    for task in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):  # a thread may end meanwhile
            os.sched_setaffinity(int(task), cores)


def answer(worker: Worker, patience: float = PATIENCE) -> dict[str, Any]:
    """The worker's next line. Raises Failure if it died or keeps silent."""
    assert worker.process.stdout is not None
    if not select.select([worker.process.stdout], [], [], patience)[0]:
        raise Failure(f"{worker.name}: no answer for {patience:g} s; last line: {_last_line(worker)}")
    line = worker.process.stdout.readline()
    if not line:
        raise Failure(f"{worker.name}: died with status {worker.process.wait()}; last line: {_last_line(worker)}")
    return json.loads(line)


def _last_line(worker: Worker) -> str:
    worker.errors.seek(0)
    return next((line.strip() for line in reversed(worker.errors.readlines()) if line.strip()), "(nothing on stderr)")


def turn(worker: Worker, times: int) -> dict[str, Any]:
    """Let a worker do its work so many times."""
    assert worker.process.stdin is not None
    try:
        worker.process.stdin.write(f"{times}\n")
        worker.process.stdin.flush()
    except BrokenPipeError:
        pass  # `answer` says why
    return answer(worker)


def stop(worker: Worker) -> None:
    """End a worker and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.communicate()
    worker.errors.close()


@contextmanager
def started(contestants: Sequence[Contestant], cores: Sequence[int]) -> Iterator[list[Worker]]:
    """Workers of all contestants, getting ready at the same time, spread over the machine."""
    places, n = available(), len(cores)
    workers: list[Worker] = []
    try:
        for i, contestant in enumerate(contestants):
            workers.append(start(contestant, cores, [places[(i * n + j) % len(places)] for j in range(n)]))
        yield workers
    finally:
        for worker in workers:
            stop(worker)


def await_ready(worker: Worker) -> Result:
    """A result without rates, once the worker is ready or has failed."""
    try:
        ready = answer(worker)
        return Result(worker.name, [], ready["setup_s"], ready["versions"], ready["peak_rss_mb"])
    except Failure as failure:
        return Result(worker.name, [], float("nan"), {}, float("nan"), str(failure))


def take_turns(
    workers: Sequence[Worker], results: Sequence[Result], cores: Sequence[int], rounds: int, seconds: float
) -> list[Result]:
    """Results with the rates of `rounds` turns of about `seconds` each, and at least one unit of work."""
    for worker, result in zip(workers, results, strict=True):
        if result.error is None:
            pin(worker.process.pid, cores)
    results, times = list(results), [0] * len(results)
    for _ in range(rounds):
        for i, worker in enumerate(workers):
            if results[i].error is not None:
                continue
            time.sleep(PAUSE)
            try:
                said = turn(worker, max(1, times[i]))
                if times[i] == 0:  # the first turn tells how often to work; long enough by itself, it counts
                    times[i] = max(1, round(seconds / max(said["seconds"], 1e-9)))
                    said = said if times[i] == 1 else turn(worker, times[i])
            except Failure as failure:
                results[i] = results[i]._replace(error=str(failure))
                continue
            rates = [*results[i].rates, said["count"] / said["seconds"]]
            results[i] = results[i]._replace(rates=rates, peak_rss_mb=said["peak_rss_mb"])
    return results


def race(
    contestants: Sequence[Contestant], cores: Sequence[int] | None = None, rounds: int = 5, seconds: float = 1.0
) -> list[Result]:
    """Start all, wait until all are ready, then let them take turns.

    Args:
        contestants: what to compare, ecrl first.
        cores: where; the first available one if None.
        rounds: turns of each.
        seconds: length of a turn; at least one unit of work is done.

    Returns: one result each, in order; a contestant that failed has its `error` set, the others go on.
    """
    cores = available()[:1] if cores is None else cores
    with started(contestants, cores) as workers:
        results = [await_ready(worker) for worker in workers]
        return take_turns(workers, results, cores, rounds, seconds)


def ratios(ours: Result, peer: Result) -> list[float]:
    """Of each round, our rate by the peer's: above 1 is faster.

    >>> ratios(Result("a", [2.0, 9.0], 0, {}, 0), Result("b", [1.0, 3.0], 0, {}, 0))
    [2.0, 3.0]
    """
    return [a / b for a, b in zip(ours.rates, peer.rates, strict=False)]


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """Median and spread; None where there is nothing.

    >>> summary([3.0, 1.0, 2.0])
    {'median': 2.0, 'min': 1.0, 'max': 3.0}
    """
    if not values:
        return {"median": None, "min": None, "max": None}
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
