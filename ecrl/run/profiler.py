"""Profile a run: the seconds of env, policy, update and all other phases, and a trace of a few iterations.

A phase is a path such as loop/collect/env; its seconds include its inner phases. Compiled code fuses policy and env,
but a profiled run compiles them separately. It is therefore slower in these phases, and its numbers differ from other
runs by rounding. In eager form, its numbers are bit-identical to other runs.
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
from ecrl.compile.jit import compilations_of
from ecrl.distributed import rank, world_size
from ecrl.kernels import scan
from ecrl.run.loggers import ending, tolerate_errors
from ecrl.types import LogData

_WAIT, _WARM_UP, _TRACED = 1, 1, 2  # iterations: the first compiles; the second warms up the tracer
_OTHER = "other"


@dataclass
class Times:
    """Times of a run: the seconds of every call by phase, and the current phase."""

    seconds: dict[tuple[str, ...], list[float]] = field(default_factory=dict)
    inside: tuple[str, ...] = ()
    nested: float = 0.0  # seconds of this record that consumers further down the stack used


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # device work counts in the phase that started it
    return time.perf_counter()


@contextmanager
def phase(times: Times, name: str) -> Iterator[None]:
    """Time the block as an inner phase of the current phase, and mark it in the trace.

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
    """Wrap `fn` so that each call is timed as a phase."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with phase(times, name):
            return fn(*args, **kwargs)

    return call


def timed_records(times: Times, name: str, records: Iterator[LogData]) -> Iterator[LogData]:
    """Time the records as phase `name`, without the time of other `timed_records` further down the stack."""
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
    """Return the run with timers on collect, update, env, policy and every function bound by `jit`.

    Collecting uses a plain loop. It calls the functions of policy and env, each bound by `jit` separately.
    """

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

    def update(_: Run, state: Any, steps: Any) -> Any:
        return learn(cast(OnPolicy, iterate).update, run._replace(jit=jit), state, steps)

    def turn(of_turn: Run, *rest: Any) -> Any:
        return cast(Interleaved, iterate).turn(of_turn._replace(algorithm=run.algorithm), *rest)

    if isinstance(iterate, OnPolicy):
        timed_iterate: Any = OnPolicy(timed(times, "collect", collect), timed(times, "update", update))
    elif isinstance(iterate, Interleaved):
        timed_iterate = replace(iterate, turn=timed(times, "turn", turn))
    else:
        timed_iterate = timed(times, "iterate", iterate)
    return run._replace(jit=jit, algorithm=replace(run.algorithm, iterate=timed_iterate, as_one=False))


def report(times: Times) -> list[dict[str, Any]]:
    """Return a row per phase, followed by its inner phases and by `other`, the rest of its time.

    `first_seconds` is the time of the first call, which may compile. `later_ms` is the mean of the later calls, or
    None if there are none.
    """

    def rows(path: tuple[str, ...]) -> list[dict[str, Any]]:
        calls = times.seconds[path]
        later = 1e3 * sum(calls[1:]) / len(calls[1:]) if calls[1:] else None
        row = {"phase": "/".join(path), "calls": len(calls), "seconds": sum(calls), "first_seconds": calls[0]}
        inner = [p for p in times.seconds if p[:-1] == path]
        if not inner:
            return [row | {"later_ms": later}]
        rest = sum(calls) - sum(sum(times.seconds[p]) for p in inner)
        other = {"phase": "/".join((*path, _OTHER)), "calls": None, "seconds": rest, "first_seconds": None}
        deeper = [r for p in inner for r in rows(p)]
        return [row | {"later_ms": later}, *deeper, other | {"later_ms": None}]

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
    """Trace iterations 3 and 4 of a run. At its end, write the times, and print them on rank 0.

    The run folder's `profile/` gets `rank_<r>.json` (the rows of `report`) and `trace_rank_<r>.json` (a trace for
    chrome://tracing or Perfetto, with the phases' names).

        times = Times()
        records = timed_records(times, "loop", train_iter(state, cfg, partial(with_timers, times)))
        for record in with_profile(records, times, "outputs/mine"): ...

    Args:
        records: records to pass on, preferably from the outermost consumer.
        times: times that the loop and the other consumers fill.
        run_dir: run folder.
    """
    folder = Path(run_dir) / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    plan = torch.profiler.schedule(wait=_WAIT, warmup=_WARM_UP, active=_TRACED, repeat=1)
    trace, guarded = folder / f"trace_rank_{rank()}.json", tolerate_errors("profile", RuntimeError)

    def export(profile: torch.profiler.profile) -> None:
        guarded(profile.export_chrome_trace, str(trace))

    try:
        with torch.profiler.profile(schedule=plan, on_trace_ready=export) as tracer, ending(records):
            for record in records:
                yield record
                if record["log_type"] == "train":
                    tracer.step()
    finally:
        total = sum(sum(calls) for path, calls in times.seconds.items() if len(path) == 1)
        rows = report(times)
        about = {"rank": rank(), "world_size": world_size(), "total_seconds": total, "phases": rows}
        guarded((folder / f"rank_{rank()}.json").write_text, json.dumps(about, indent=2) + "\n", "utf-8")
        if rank() == 0:
            print(table(rows, total))
            missing_trace = "" if trace.exists() else f"; a run of {_WAIT + _WARM_UP} iterations or fewer has no trace"
            print(f"profile  {folder}{missing_trace}")
