"""Where an iteration's time goes: the profile that says what is left.

Twice for every number of environments. "as run": each compiled call timed, nothing else changed. "taken apart":
`ecrl.run.profiler`, which takes policy and environment out of the fused rollout; its shares say which part of
collecting
costs what, its times are longer than those of a run.
"""

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.alone import alone
from benchmarks.gpu import ENV, has_gpu, not_measured
from benchmarks.pairs import Failure
from benchmarks.scaling import Size, config

SIZES, QUICK, GPU_SIZES = (4, 64, 512, 2048), (512,), (2048, 65_536)
_OTHER = "other"


def as_run(times: Any, run: Any) -> Any:
    """The same run with every function that it binds by `jit` timed; policy and env stay fused."""
    from ecrl.run.profiler import timed

    def jit(fn: Any, *static: Any) -> Any:
        return timed(times, fn.__name__.strip("_"), run.jit(fn, *static))

    return run._replace(jit=jit)


def profile(num_envs: int, device: str, seconds: float) -> list[dict[str, Any]]:
    """Rows of both forms, each over about `seconds` of iterations."""
    from ecrl.run.profiler import watched

    return [
        {"num_envs": num_envs, "device": device, "form": name, **row}
        for name, watch in (("as run", as_run), ("taken apart", watched))
        for row in watched_shares(num_envs, device, seconds, watch)
    ]


def watched_shares(num_envs: int, device: str, seconds: float, watch: Any) -> list[dict[str, Any]]:
    """The `shares` of the median one of the iterations that come after two, which compile; of five at least."""
    from functools import partial

    from ecrl import init_state, make_iteration
    from ecrl.run.profiler import Times

    cfg = config(Size(num_envs), device)
    times, state = Times(), init_state(cfg)
    iteration = make_iteration(cfg, partial(watch, times))
    for _ in range(2):
        state, _ = iteration(state)
    taken: list[tuple[float, dict]] = []
    while len(taken) < 5 or sum(total for total, _ in taken) < seconds:
        times.seconds.clear()
        start = time.perf_counter()
        state, _ = iteration(state)
        taken.append((time.perf_counter() - start, dict(times.seconds)))
    total, spent = sorted(taken, key=lambda one: one[0])[len(taken) // 2]
    return shares(spent, total)


def shares(seconds: dict[tuple[str, ...], list[float]], total: float) -> list[dict[str, Any]]:
    """Of every phase without phases in it, and of what they leave, the milliseconds of an iteration and their share.

    >>> shares({("update",): [0.3], ("update", "learn"): [0.2]}, 0.4)[0]
    {'phase': 'update/learn', 'ms': 200.0, 'share': 0.5}
    """
    leaves = {p: sum(calls) for p, calls in seconds.items() if not any(q[:-1] == p for q in seconds)}
    spent = {"/".join(path): inside for path, inside in leaves.items()}
    spent[_OTHER] = total - sum(spent.values())
    return [{"phase": name, "ms": 1e3 * s, "share": s / total} for name, s in spent.items()]


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """A row per number of environments, form and phase, on the first core; then a GPU, or that it is not measured."""
    out = []
    for device, sizes in (("cpu", QUICK if quick else SIZES), ("cuda", GPU_SIZES)):
        for size in sizes:
            if device == "cuda" and not has_gpu():
                out.append(not_measured(num_envs=size, device=device))
                continue
            args = {"num_envs": size, "device": device, "seconds": 1.0 if quick else 3.0}
            try:
                out += alone("benchmarks.phases:profile", args, cores[:1], ENV[device])
            except Failure as failure:
                out.append({"num_envs": size, "device": device, "error": str(failure)})
    return out


def figure(rows: list[dict[str, Any]]) -> Any:
    """A bar for every size and form, cut by the shares of the phases."""
    from matplotlib.figure import Figure

    seen = [r for r in rows if "share" in r]
    bars = list(dict.fromkeys((r["num_envs"], r["device"], r["form"]) for r in seen))
    made = Figure(figsize=(8, 1 + 0.5 * len(bars)), layout="constrained")
    axes = made.subplots()
    left = dict.fromkeys(bars, 0.0)
    for phase in dict.fromkeys(r["phase"] for r in seen):
        part = {(r["num_envs"], r["device"], r["form"]): r["share"] for r in seen if r["phase"] == phase}
        widths = [part.get(bar, 0.0) for bar in bars]
        axes.barh([f"{n} envs ({d}), {f}" for n, d, f in bars], widths, left=[left[b] for b in bars], label=phase)
        left = {bar: left[bar] + width for bar, width in zip(bars, widths, strict=True)}
    axes.set(xlabel="share of an iteration", xlim=(0, 1))
    axes.legend(bbox_to_anchor=(1.0, 1.0), loc="upper left")
    return made
