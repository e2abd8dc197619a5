"""Where a run's time goes: env, policy, update and each phase by the clock, and a trace of a few iterations.

A phase is a path such as loop/collect/env; its seconds include those of the phases in it. Policy and env, which
compiled code fuses, are taken apart: a profiled run is slower there and equal to others only to rounding. In eager form
its numbers are those of any other run, bit for bit.
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

from ecrl.algorithms import Run
from ecrl.algorithms.core import OnPolicy, learn
from ecrl.compile.jit import compilations_of
from ecrl.distributed import rank, world_size
from ecrl.kernels import scan
from ecrl.run.loggers import ending, never_fatal
from ecrl.types import LogData

_WAIT, _WARM_UP, _TRACED = 1, 1, 2  # iterations: the first compiles, in the second the tracer starts
_OTHER = "other"


@dataclass
class Times:
    """The clock readings of a run: seconds of every call by phase, and where it is now."""

    seconds: dict[tuple[str, ...], list[float]] = field(default_factory=dict)
    inside: tuple[str, ...] = ()
    below: float = 0.0  # seconds within this record that consumers further down took


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # what was asked of the device counts where it was asked
    return time.perf_counter()


@contextmanager
def phase(times: Times, name: str) -> Iterator[None]:
    """Time what runs within, as a phase of the one that it is in; it is in the trace too.

    >>> times = Times()
    >>> with phase(times, "update"), phase(times, "minibatch"):
    ...     pass
    >>> sorted(times.seconds)
    [('update',), ('update', 'minibatch')]
    """
    outer = times.inside
    times.inside = (*outer, name)
    began = _now()
    try:
        with torch.profiler.record_function("/".join(times.inside)):
            yield
    finally:
        times.seconds.setdefault(times.inside, []).append(_now() - began)
        times.inside = outer


def timed(times: Times, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, each call of it a phase."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with phase(times, name):
            return fn(*args, **kwargs)

    return call


def timed_records(times: Times, name: str, records: Iterator[LogData]) -> Iterator[LogData]:
    """`records`, timed as `name`, without what is timed by this function further down the stack."""
    with ending(records):
        each = iter(records)
        while True:
            outer, times.inside, taken, times.below = times.inside, (name,), times.below, 0.0
            began = _now()
            try:
                record = next(each, None)
            finally:
                spent = _now() - began
                times.seconds.setdefault((name,), []).append(spent - times.below)
                times.inside, times.below = outer, taken + spent
            if record is None:
                return
            yield record


def watched(times: Times, run: Run) -> Run:
    """The same run, timed: collect, update, each function that they bind by `jit`, and the functions of env and policy.

    To collect, the functions of policy and env are compiled one by one and called from a plain loop.
    """

    def jit(fn: Callable[..., Any], *static: Any) -> Callable[..., Any]:
        return timed(times, fn.__name__.strip("_"), run.jit(fn, *static))

    cast(Any, jit).compilations = compilations_of(run.jit)

    def bound(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        return timed(times, name, run.jit(fn))

    policy, env, iterate = run.policy, run.env, run.algorithm.iterate
    value = None if policy.value is None else bound("critic", policy.value)
    policy = replace(policy, act=bound("policy", policy.act), draw=bound("draw", policy.draw), value=value)
    step = bound("env", env.step) if env.is_pure else timed(times, "env", env.step)
    env = replace(env, step=step, draw=bound("draw", env.draw) if env.is_pure else env.draw)
    taken_apart = run._replace(policy=policy, env=env, jit=partial, scan=scan)

    def collect(run: Run, state: Any) -> Any:
        return cast(OnPolicy, iterate).collect(taken_apart, state)

    def update(_: Run, state: Any, steps: Any) -> Any:
        return learn(cast(OnPolicy, iterate).update, run._replace(jit=jit), state, steps)

    if isinstance(iterate, OnPolicy):
        watched_iterate: Any = OnPolicy(timed(times, "collect", collect), timed(times, "update", update))
    else:
        watched_iterate = timed(times, "iterate", iterate)
    return run._replace(jit=jit, algorithm=replace(run.algorithm, iterate=watched_iterate, as_one=False))


def report(times: Times) -> list[dict[str, Any]]:
    """A row per phase, each followed by the phases in it and by `other`, which is what those leave.

    `first_seconds` is the first call, which may compile; `later_ms` the mean of the calls after it, None without any.
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
    """The rows of `report` for people."""

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    lines = [f"{'phase':<28}{'calls':>9}{'seconds':>11}{'share':>8}{'first s':>10}{'later ms':>11}"]
    for row in rows:
        *above, name = row["phase"].split("/")
        cells = (shown(row["calls"], ">9,"), f"{row['seconds']:>11.3f}", f"{row['seconds'] / total:>8.1%}")
        ends = f"{shown(row['first_seconds'], '.3f'):>10}{shown(row['later_ms'], '.3f'):>11}"
        lines.append(f"{'  ' * len(above) + name:<28}{cells[0]:>9}{cells[1]}{cells[2]}{ends}")
    return "\n".join([*lines, f"{'total':<28}{'':>9}{total:>11.3f}"])


def with_profile(records: Iterator[LogData], times: Times, run_dir: str | Path) -> Iterator[LogData]:
    """Trace iterations 3 and 4 of a run, and at its end write and, on rank 0, print what `times` has.

    Into `profile/` of the run folder go `rank_<r>.json`, the rows of `report`, and `trace_rank_<r>.json` for
    chrome://tracing or Perfetto, in which phases are named too.

        times = Times()
        records = timed_records(times, "loop", train_iter(state, cfg, partial(watched, times)))
        for record in with_profile(records, times, "outputs/mine"): ...

    Args:
        records: to pass on; the outermost are best.
        times: what the consumers below and the loop are timed by.
        run_dir: the run folder.
    """
    folder = Path(run_dir) / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    plan = torch.profiler.schedule(wait=_WAIT, warmup=_WARM_UP, active=_TRACED, repeat=1)
    trace, guarded = folder / f"trace_rank_{rank()}.json", never_fatal("profile", RuntimeError)

    def export(made: torch.profiler.profile) -> None:
        guarded(made.export_chrome_trace, str(trace))

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
            short = "" if trace.exists() else f"; a run of {_WAIT + _WARM_UP} iterations or fewer has no trace"
            print(f"profile  {folder}{short}")
