"""Profile the phases of an iteration in two modes, for several numbers of environments.

The mode "as run" times each compiled call and changes nothing else. The mode "taken apart" uses `ecrl.run.profiler`,
which separates policy and environment from the fused rollout. The shares of this mode show the cost of each part of
collecting, but the times are longer than in a run without timers.
"""

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_traces import ENV, has_gpu, not_measured
from benchmarks.pairs import Failure
from benchmarks.scaling import Size, config
from benchmarks.separate_process import run_in_process

SIZES, QUICK, GPU_SIZES = (4, 64, 512, 2048), (512,), (2048, 65_536)
_OTHER = "other"


def as_run(times: Any, run: Any) -> Any:
    """Return the run with a timer on every function that `run.jit` returns. Policy and environment stay fused."""
    from ecrl.run.profiler import timed

    def jit(fn: Any, *static: Any) -> Any:
        return timed(times, fn.__name__.strip("_"), run.jit(fn, *static))

    return run._replace(jit=jit)


def profile(num_envs: int, device: str, seconds: float) -> list[dict[str, Any]]:
    """Return the rows of both modes, each measured over iterations that take at least `seconds` together."""
    from ecrl.run.profiler import with_timers

    return [
        {"num_envs": num_envs, "device": device, "form": name, **row}
        for name, watch in (("as run", as_run), ("taken apart", with_timers))
        for row in watched_shares(num_envs, device, seconds, watch)
    ]


def watched_shares(num_envs: int, device: str, seconds: float, watch: Any) -> list[dict[str, Any]]:
    """Return the `shares` of the median of at least five iterations, after two iterations that compile."""
    from functools import partial

    from ecrl import init_state, make_iteration
    from ecrl.run.profiler import Times

    cfg = config(Size(num_envs), device)
    times, state = Times(), init_state(cfg)
    iteration = make_iteration(cfg, partial(watch, times))
    for _ in range(2):
        state, _ = iteration(state)
    iterations: list[tuple[float, dict]] = []
    while len(iterations) < 5 or sum(total for total, _ in iterations) < seconds:
        times.seconds.clear()
        start = time.perf_counter()
        state, _ = iteration(state)
        iterations.append((time.perf_counter() - start, dict(times.seconds)))
    total, spent = sorted(iterations, key=lambda one: one[0])[len(iterations) // 2]
    return shares(spent, total)


def shares(seconds: dict[tuple[str, ...], list[float]], total: float) -> list[dict[str, Any]]:
    """Return the milliseconds and the share of an iteration for every innermost phase, and for the remaining time.

    >>> shares({("update",): [0.3], ("update", "learn"): [0.2]}, 0.4)[0]
    {'phase': 'update/learn', 'ms': 200.0, 'share': 0.5}
    """
    leaves = {p: sum(calls) for p, calls in seconds.items() if not any(q[:-1] == p for q in seconds)}
    spent = {"/".join(path): inside for path, inside in leaves.items()}
    spent[_OTHER] = total - sum(spent.values())
    return [{"phase": name, "ms": 1e3 * s, "share": s / total} for name, s in spent.items()]


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row per size, mode and phase on the first core, then on a GPU.

    Without a GPU, the rows of the GPU are marked as not measured.
    """
    out = []
    for device, sizes in (("cpu", QUICK if quick else SIZES), ("cuda", GPU_SIZES)):
        for size in sizes:
            if device == "cuda" and not has_gpu():
                out.append(not_measured(num_envs=size, device=device))
                continue
            args = {"num_envs": size, "device": device, "seconds": 1.0 if quick else 3.0}
            try:
                out += run_in_process("benchmarks.phases:profile", args, cores[:1], ENV[device])
            except Failure as failure:
                out.append({"num_envs": size, "device": device, "error": str(failure)})
    return out


def figure(rows: list[dict[str, Any]]) -> Any:
    """Plot a bar for every size and mode, divided by the shares of the phases."""
    from matplotlib.figure import Figure

    measured = [r for r in rows if "share" in r]
    bars = list(dict.fromkeys((r["num_envs"], r["device"], r["form"]) for r in measured))
    picture = Figure(figsize=(8, 1 + 0.5 * len(bars)), layout="constrained")
    axes = picture.subplots()
    left = dict.fromkeys(bars, 0.0)
    for phase in dict.fromkeys(r["phase"] for r in measured):
        part = {(r["num_envs"], r["device"], r["form"]): r["share"] for r in measured if r["phase"] == phase}
        widths = [part.get(bar, 0.0) for bar in bars]
        axes.barh([f"{n} envs ({d}), {f}" for n, d, f in bars], widths, left=[left[b] for b in bars], label=phase)
        left = {bar: left[bar] + width for bar, width in zip(bars, widths, strict=True)}
    axes.set(xlabel="share of an iteration", xlim=(0, 1))
    axes.legend(bbox_to_anchor=(1.0, 1.0), loc="upper left")
    return picture
