"""Measure the cost of the finite guard: iterations with "stop" or "skip" take turns with iterations without a guard."""

import statistics
from collections.abc import Sequence
from math import sqrt
from typing import Any

from benchmarks.alternating_calls import Call, time_alternating
from benchmarks.pairs import ROOT, Failure
from benchmarks.separate_process import run_in_process

MOST = 1.02
"""Target: the longest time of an iteration with the guard, as a multiple of the time without the guard."""
SIZES, QUICK = {"CartPole": (64, 2048), "PushCube": (64,), "HalfCheetah": (16,)}, {"CartPole": (64,)}
SHIPPED = {"PushCube": "push_cube_ppo.json", "HalfCheetah": "half_cheetah_ppo.json"}
_ROUNDS, _ROUNDS_QUICK, _TURN_S = 101, 5, 0.3


def config(env: str, num_envs: int, **keys: Any) -> Any:
    """Return the config of an endless run: PPO on CartPole as in `scaling`, or a shipped config with `num_envs`."""
    from benchmarks import scaling
    from ecrl import load_config

    if env == "CartPole":
        return scaling.config(scaling.Size(num_envs), "cpu").replace(**keys)
    keys = {"trainer.iterations": 10**6, "trainer.num_envs": num_envs, **keys}
    return load_config(ROOT / "configs" / SHIPPED[env]).replace(**keys)


def iterations(cfg: Any) -> Call:
    """Return a function that runs the next iteration of a run with every call."""
    from ecrl import init_state, train_iter

    records = train_iter(init_state(cfg), cfg)

    def next_iteration() -> None:
        next(records)  # the record of collecting
        next(records)  # the record of learning

    return next_iteration


def seconds_by_guard(env: str, num_envs: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of an iteration with each setting of `trainer.finite_guard`, one number per round."""
    runs = {guard: iterations(config(env, num_envs, **{"trainer.finite_guard": guard})) for guard in ("stop", "skip")}
    off = iterations(config(env, num_envs, **{"trainer.finite_guard": "off"}))
    return time_alternating({"off": off, **runs}, rounds, _TURN_S)


def cost(guarded: list[float], off: list[float]) -> dict[str, Any]:
    """Return the time with the guard as a multiple of the time without it: median, 95 % interval and quartiles.

    >>> row = cost([1.01] * 101, [1.0] * 101)
    >>> row["times"], row["low"], row["high"], row["met"]
    (1.01, 1.01, 1.01, True)
    """
    by_round = sorted(a / b for a, b in zip(guarded, off, strict=True))
    n = len(by_round)
    half = 0.98 * sqrt(n)  # half width of the median's rank interval, from the binomial distribution
    low, high = by_round[max(0, round(n / 2 - half) - 1)], by_round[min(n - 1, round(n / 2 + half))]
    quartiles = statistics.quantiles(by_round, n=4, method="inclusive")
    row = {"times": quartiles[1], "low": low, "high": high, "quartile_1": quartiles[0], "quartile_3": quartiles[2]}
    return row | {"rounds": n, "most": MOST, "met": quartiles[1] <= MOST}


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row per environment, number of environments and guard, on the first core."""
    out: list[dict[str, Any]] = []
    for env, sizes in (QUICK if quick else SIZES).items():
        for num_envs in sizes:
            args = {"env": env, "num_envs": num_envs, "rounds": _ROUNDS_QUICK if quick else _ROUNDS}
            row: dict[str, Any] = {"env": env, "num_envs": num_envs}
            try:
                seconds = run_in_process("benchmarks.guard:seconds_by_guard", args, cores[:1])
            except Failure as failure:
                out.append(row | {"error": str(failure)})
                continue
            out += [row | {"guard": guard, **cost(seconds[guard], seconds["off"])} for guard in ("stop", "skip")]
    return out


def figure(rows: list[dict[str, Any]]) -> Any:
    """Plot the median cost of each row with the interquartile range of its rounds."""
    from matplotlib.figure import Figure

    measured = [row for row in rows if "times" in row]
    picture = Figure(figsize=(6, 1 + 0.4 * len(measured)), layout="constrained")
    axes = picture.subplots()
    times = [row["times"] for row in measured]
    spread = [
        [row["times"] - row["quartile_1"] for row in measured],
        [row["quartile_3"] - row["times"] for row in measured],
    ]
    names = [f"{row['env']}, {row['num_envs']} envs, {row['guard']}" for row in measured]
    axes.errorbar(times, names, xerr=spread, fmt="o")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.axvline(MOST, color="black", linewidth=1, linestyle=":")
    axes.set(xlabel='times an iteration with the guard "off"; middle half of the rounds')
    return picture
