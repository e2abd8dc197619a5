"""Profile a run: measure the time of each phase, such as the environment or the update, and trace a few iterations.

Each phase has a path, such as loop/collect/env. The time of a phase includes the time of its inner phases. For an
on-policy algorithm, a compiled run usually compiles the policy and the environment together, but a profiled run
compiles them separately. Separate compilation makes the policy and the environment slower, and changes the results by
rounding. Profiling does not change the results of an eager run.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ecrl.algorithms import Interleaved, Run
from ecrl.algorithms.core import OnPolicy, learn
from ecrl.compile.background import switch_of
from ecrl.compile.jit import compilations_of
from ecrl.distributed import rank, world_size
from ecrl.kernels import scan
from ecrl.run.loggers import ending, tolerate_errors
from ecrl.types import LogData

_WAIT, _WARM_UP, _TRACED = 1, 1, 2  # numbers of train records for compiling, for warming up the tracer, for tracing
_OTHER = "other"


@dataclass
class Times:
    """Measured times of the phases of a run.

    Attributes:
        seconds: dict from the path of each phase to the durations of its calls, in seconds.
        inside: path of the current phase.
        nested: time that inner consumers have taken for the current record, in seconds.
    """

    seconds: dict[tuple[str, ...], list[float]] = field(default_factory=dict)
    inside: tuple[str, ...] = ()
    nested: float = 0.0


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # wait, so that each phase includes the GPU work that it started
    return time.perf_counter()


@contextmanager
def phase(times: Times, name: str) -> Iterator[None]:
    """Time the block as an inner phase of the current phase, and mark the block in the trace.

    >>> times = Times()
    >>> with phase(times, "update"), phase(times, "minibatch"):
    ...     pass
    >>> sorted(times.seconds)
    [('update',), ('update', 'minibatch')]
    """
    outer = times.inside
    times.inside = (*outer, name)
    start_time = _now()
    try:
        with torch.profiler.record_function("/".join(times.inside)):
            yield
    finally:
        times.seconds.setdefault(times.inside, []).append(_now() - start_time)
        times.inside = outer


def timed(times: Times, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fn` so that each call is timed as the phase `name`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with phase(times, name):
            return fn(*args, **kwargs)

    return call


def timed_records(times: Times, name: str, records: Iterator[LogData]) -> Iterator[LogData]:
    """Yield the records, and time the wait for each record as the phase `name`.

    The time does not include the waits of inner `timed_records`.
    """
    with ending(records):
        iterator = iter(records)
        while True:
            outer, times.inside, outer_sum, times.nested = times.inside, (name,), times.nested, 0.0
            start_time = _now()
            try:
                record = next(iterator, None)
            finally:
                elapsed = _now() - start_time
                times.seconds.setdefault((name,), []).append(elapsed - times.nested)
                times.inside, times.nested = outer, outer_sum + elapsed
            if record is None:
                return
            yield record


def with_timers(times: Times, run: Run) -> Run:
    """Return a copy of the run with timers around the algorithm's `iterate` and all functions that `run.jit` returns.

    In an on-policy algorithm, `collect` and `update` are timed instead of `iterate`. Inside `collect`, the functions of
    the policy and the environment are timed, too. The rollout calls these functions in a plain Python loop, and a
    compiled run compiles each of them separately. In an interleaved algorithm, `turn` is timed instead of `iterate`,
    and the policy and the environment have no timers of their own.
    """
    if (switch := switch_of(run.jit)) is not None:
        switch.eager = False  # these functions are compiled separately, so no other process can compile them

    def jit(fn: Callable[..., Any], *static: Any) -> Callable[..., Any]:
        return timed(times, fn.__name__.strip("_"), run.jit(fn, *static))

    cast(Any, jit).compilations = compilations_of(run.jit)

    def jit_timed(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        return timed(times, name, run.jit(fn))

    policy, env, iterate = run.policy, run.env, run.algorithm.iterate
    value = None if policy.value is None else jit_timed("critic", policy.value)
    policy = replace(policy, act=jit_timed("policy", policy.act), draw=jit_timed("draw", policy.draw), value=value)
    step = jit_timed("env", env.step) if env.is_pure else timed(times, "env", env.step)
    env = replace(env, step=step, draw=jit_timed("draw", env.draw) if env.is_pure else env.draw)
    timed_run = run._replace(policy=policy, env=env, jit=partial, scan=scan)

    def collect(run: Run, state: Any) -> Any:
        return cast(OnPolicy, iterate).collect(timed_run, state)

    def update(_: Run, state: Any, batch: Any) -> Any:
        return learn(cast(OnPolicy, iterate).update, run._replace(jit=jit), state, batch)

    def turn(turn_run: Run, *rest: Any) -> Any:
        return cast(Interleaved, iterate).turn(turn_run._replace(algorithm=run.algorithm), *rest)

    if isinstance(iterate, OnPolicy):
        timed_iterate: Any = OnPolicy(timed(times, "collect", collect), timed(times, "update", update))
    elif isinstance(iterate, Interleaved):
        timed_iterate = replace(iterate, turn=timed(times, "turn", turn))
    else:
        timed_iterate = timed(times, "iterate", iterate)
    return run._replace(jit=jit, algorithm=replace(run.algorithm, iterate=timed_iterate, as_one=False))


def report(times: Times) -> list[dict[str, Any]]:
    """Return one row per phase.

    If a phase has inner phases, their rows follow, and then a row `other` for the remaining time.

    `first_seconds` is the time of the first call, which may include compilation. `later_ms` is the mean time of all
    calls after the first, in milliseconds, or None if there is only one call.
    """

    def rows(path: tuple[str, ...]) -> list[dict[str, Any]]:
        calls = times.seconds[path]
        later_ms = 1e3 * sum(calls[1:]) / len(calls[1:]) if calls[1:] else None
        row = {"phase": "/".join(path), "calls": len(calls), "seconds": sum(calls), "first_seconds": calls[0]}
        inner = [p for p in times.seconds if p[:-1] == path]
        if not inner:
            return [row | {"later_ms": later_ms}]
        rest = sum(calls) - sum(sum(times.seconds[p]) for p in inner)
        other = {"phase": "/".join((*path, _OTHER)), "calls": None, "seconds": rest, "first_seconds": None}
        deeper = [r for p in inner for r in rows(p)]
        return [row | {"later_ms": later_ms}, *deeper, other | {"later_ms": None}]

    return [row for path in times.seconds if len(path) == 1 for row in rows(path)]


def table(rows: list[dict[str, Any]], total: float) -> str:
    """Format the rows of `report` as a text table."""

    def format_cell(value: float | None, spec: str) -> str:
        return "" if value is None else format(value, spec)

    lines = [f"{'phase':<28}{'calls':>9}{'seconds':>11}{'share':>8}{'first s':>10}{'later ms':>11}"]
    for row in rows:
        *above, name = row["phase"].split("/")
        cells = (format_cell(row["calls"], ">9,"), f"{row['seconds']:>11.3f}", f"{row['seconds'] / total:>8.1%}")
        right_cells = f"{format_cell(row['first_seconds'], '.3f'):>10}{format_cell(row['later_ms'], '.3f'):>11}"
        lines.append(f"{'  ' * len(above) + name:<28}{cells[0]:>9}{cells[1]}{cells[2]}{right_cells}")
    return "\n".join([*lines, f"{'total':<28}{'':>9}{total:>11.3f}"])


def with_profile(records: Iterator[LogData], times: Times, run_dir: str | Path) -> Iterator[LogData]:
    """Trace iterations 3 and 4 of a run. When the run ends, write the time of each phase. Rank 0 also prints the times.

    If `trainer.log_freq` is above 1, the trace has the iterations of the third and fourth train record.

    Each rank writes two files to `profile/` in the run folder: `rank_<r>.json`, with the rows of `report`, and
    `trace_rank_<r>.json`. You can open the trace in chrome://tracing or Perfetto. The trace contains the names of the
    phases.

        times = Times()
        records = timed_records(times, "loop", train_iter(state, cfg, partial(with_timers, times)))
        for record in with_profile(records, times, "outputs/mine"): ...

    Args:
        records: records of the run; the function yields each record again. The records should come from the outermost
            consumer, so that all consumers are timed.
        times: `Times` to which the timers of the loop and of the other consumers write.
        run_dir: run folder.
    """
    folder = Path(run_dir) / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    plan = torch.profiler.schedule(wait=_WAIT, warmup=_WARM_UP, active=_TRACED, repeat=1)
    trace, times_file = folder / f"trace_rank_{rank()}.json", folder / f"rank_{rank()}.json"
    steps, then = 0, "the run goes on without this file"

    def export(profile: torch.profiler.profile) -> None:
        if steps > _WAIT + _WARM_UP:  # otherwise, the trace contains no iteration
            tolerate_errors(str(trace), RuntimeError, then=then)(profile.export_chrome_trace, str(trace))

    try:
        with torch.profiler.profile(schedule=plan, on_trace_ready=export) as tracer, ending(records):
            for record in records:
                yield record
                if record["log_type"] == "train":
                    steps += 1
                    tracer.step()
    finally:
        total = sum(sum(calls) for path, calls in times.seconds.items() if len(path) == 1)
        rows = report(times)
        about = {"rank": rank(), "world_size": world_size(), "total_seconds": total, "phases": rows}
        tolerate_errors(str(times_file), then=then)(times_file.write_text, json.dumps(about, indent=2) + "\n", "utf-8")
        if rank() == 0:
            print(table(rows, total))
            reason = f"tracing starts after {_WAIT + _WARM_UP} train records"
            missing_trace = "" if trace.exists() else f"; there is no trace ({reason})"
            print(f"profile  {folder}{missing_trace}")
