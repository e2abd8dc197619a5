"""Let contestants take turns, A B A B, on the same pinned cores, and compute the ratio of their rates in each round.

Every contestant is a process, because a process reads thread counts and XLA's flags only at its start. During setup
(imports, compiling), the contestants are spread over the machine. Each contestant already has its final number of
cores, so that its thread pools get the right size. Then all contestants move to the same cores, and only one contestant
works at a time.
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
"""Seconds between turns, so that spinning threads of the other contestant can go to sleep."""


class Contestant(NamedTuple):
    """A contestant: `make` is "module:function", called with `args` in a process with `env` in its environment."""

    name: str
    make: str
    args: Mapping[str, Any] = {}
    env: Mapping[str, str] = {}


class Result(NamedTuple):
    """Result of a contestant: `rates`, such as env steps per second, of each round, or of the rounds before `error`."""

    name: str
    rates: list[float]
    setup_s: float
    versions: dict[str, str]
    peak_rss_mb: float
    error: str | None = None


class Failure(Exception):
    """Error for a worker that died or hung. The message has the worker's name and its last line on stderr."""


class Worker(NamedTuple):
    """A process that runs a contestant."""

    name: str
    process: subprocess.Popen[str]
    errors: IO[str]


def available() -> tuple[int, ...]:
    """Return the cores that this process may use, as set by `taskset`."""
    return tuple(sorted(os.sched_getaffinity(0)))


def threads_env(cores: Sequence[int]) -> dict[str, str]:
    """Return the environment variables that set the thread counts of all libraries to the number of cores."""
    count = str(len(cores))
    one = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    flags = {"XLA_FLAGS": one if len(cores) == 1 else "", "JAX_PLATFORMS": "cpu"}
    return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count, **flags}


def start(contestant: Contestant, cores: Sequence[int], first: Sequence[int]) -> Worker:
    """Start a worker with one thread per core in `cores`. During setup, the worker runs on the cores `first`.

    Both arguments must have the same number of cores.
    """
    command = [sys.executable, "-m", "benchmarks.worker", contestant.make, json.dumps(dict(contestant.args))]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **threads_env(cores), **contestant.env}
    errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by stop)
    with _pinned(first):  # the child inherits the pinning before it imports anything
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # so that `stop` also kills the compilers that the worker starts
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
    """Read a worker's next answer. Raise Failure if the worker died or does not answer within `patience` seconds."""
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


def run_units(worker: Worker, times: int) -> dict[str, Any]:
    """Let a worker do its work `times` times, and return its answer."""
    assert worker.process.stdin is not None
    try:
        worker.process.stdin.write(f"{times}\n")
        worker.process.stdin.flush()
    except BrokenPipeError:
        pass  # `answer` raises the reason
    return answer(worker)


def stop(worker: Worker) -> None:
    """Kill a worker and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.communicate()
    worker.errors.close()


@contextmanager
def started(contestants: Sequence[Contestant], cores: Sequence[int]) -> Iterator[list[Worker]]:
    """Start a worker for each contestant, spread over the cores of the machine. On exit, stop all workers."""
    places, n = available(), len(cores)
    workers: list[Worker] = []
    try:
        for i, contestant in enumerate(contestants):
            workers.append(start(contestant, cores, [places[(i * n + j) % len(places)] for j in range(n)]))
        yield workers
    finally:
        for worker in workers:
            stop(worker)


def await_ready(worker: Worker, patience: float = PATIENCE) -> Result:
    """Wait until a worker is ready or has failed, at most `patience` seconds. Return its result without rates."""
    try:
        ready = answer(worker, patience)
        return Result(worker.name, [], ready["setup_s"], ready["versions"], ready["peak_rss_mb"])
    except Failure as failure:
        return Result(worker.name, [], float("nan"), {}, float("nan"), str(failure))


def run_rounds(
    workers: Sequence[Worker], results: Sequence[Result], cores: Sequence[int], rounds: int, seconds: float
) -> list[Result]:
    """Let each worker take `rounds` turns, and return the results with the rates of the turns.

    A turn takes about `seconds`, and has at least one unit of work.
    """
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
                answer_data = run_units(worker, max(1, times[i]))
                if times[i] == 0:  # the first turn sets the number of units; it counts if one unit is long enough
                    times[i] = max(1, round(seconds / max(answer_data["seconds"], 1e-9)))
                    answer_data = answer_data if times[i] == 1 else run_units(worker, times[i])
            except Failure as failure:
                results[i] = results[i]._replace(error=str(failure))
                continue
            rates = [*results[i].rates, answer_data["count"] / answer_data["seconds"]]
            results[i] = results[i]._replace(rates=rates, peak_rss_mb=answer_data["peak_rss_mb"])
    return results


def race(
    contestants: Sequence[Contestant], cores: Sequence[int] | None = None, rounds: int = 5, seconds: float = 1.0
) -> list[Result]:
    """Start all contestants, wait until all are ready, then let them take turns.

    Args:
        contestants: the contestants, ecrl first.
        cores: cores to run on, or None for the first available core.
        rounds: number of turns of each contestant.
        seconds: length of a turn, in seconds. A turn has at least one unit of work.

    Returns: one result per contestant, in order. If a contestant fails, its result has an `error`, and the other
        contestants continue.
    """
    cores = available()[:1] if cores is None else cores
    with started(contestants, cores) as workers:
        results = [await_ready(worker) for worker in workers]
        return run_rounds(workers, results, cores, rounds, seconds)


def ratios(ecrl: Result, other: Result) -> list[float]:
    """Return the rate of ecrl divided by the rate of the other contestant for each round.

    >>> ratios(Result("a", [2.0, 9.0], 0, {}, 0), Result("b", [1.0, 3.0], 0, {}, 0))
    [2.0, 3.0]
    """
    return [a / b for a, b in zip(ecrl.rates, other.rates, strict=False)]


def ratio_summary(by_round: Sequence[float]) -> dict[str, float | None]:
    """Return the median, minimum and maximum of ratios, as the fields of a row.

    >>> ratio_summary([3.0, 1.0, 2.0])
    {'ratio': 2.0, 'ratio_min': 1.0, 'ratio_max': 3.0}
    """
    values = summary(by_round)
    return {"ratio": values["median"], "ratio_min": values["min"], "ratio_max": values["max"]}


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """Return the median, minimum and maximum of values, or None for all three if there are no values.

    >>> summary([3.0, 1.0, 2.0])
    {'median': 2.0, 'min': 1.0, 'max': 3.0}
    """
    if not values:
        return {"median": None, "min": None, "max": None}
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compared(
    about: Mapping[str, Any], ours: Result, peer: Result, must: float | None, aim: float | None
) -> dict[str, Any]:
    """Return a row with the ratio of two results, or with their errors.

    Args:
        about: first fields of the row.
        ours: result of ecrl.
        peer: result of the other contestant.
        must: required ratio, if any.
        aim: desired ratio, if any.

    >>> compared({}, Result("a", [9.0], 1.0, {}, 0.0), Result("b", [1.0], 1.0, {}, 0.0), 8.0, None)["met"]
    True
    """
    errors = [f"{result.name}: {result.error}" for result in (ours, peer) if result.error is not None]
    if errors:
        return {**about, "error": "; ".join(errors)}
    by_round = ratio_summary(ratios(ours, peer))
    return {
        **about,
        **by_round,
        "must": must,
        "aim": aim,
        "met": None if must is None else (by_round["ratio"] or 0.0) >= must,
        "ours_steps_s": summary(ours.rates)["median"],
        "peer_steps_s": summary(peer.rates)["median"],
        "ours_setup_s": ours.setup_s,
        "peer_setup_s": peer.setup_s,
    }
