"""What the finite guard costs: whole iterations that stop or skip, in turns with iterations that do not look."""

import statistics
from collections.abc import Sequence
from math import sqrt
from typing import Any

from benchmarks.alone import alone
from benchmarks.pairs import ROOT, Failure
from benchmarks.turns import Call, take_turns

MOST = 1.02
"""Times of an iteration without it."""
SIZES, QUICK = {"CartPole": (64, 2048), "PushCube": (64,), "HalfCheetah": (16,)}, {"CartPole": (64,)}
SHIPPED = {"PushCube": "push_cube_ppo.json", "HalfCheetah": "half_cheetah_ppo.json"}
_ROUNDS, _ROUNDS_QUICK, _TURN_S = 101, 5, 0.3


def config(env: str, num_envs: int, **keys: Any) -> Any:
    """PPO on CartPole as `scaling` runs it, else a shipped config with so many environments; for ever."""
    from benchmarks import scaling
    from ecrl import load_config

    if env == "CartPole":
        return scaling.config(scaling.Size(num_envs), "cpu").replace(**keys)
    keys = {"trainer.iterations": 10**6, "trainer.num_envs": num_envs, **keys}
    return load_config(ROOT / "configs" / SHIPPED[env]).replace(**keys)


def iterations(cfg: Any) -> Call:
    """The next iteration of a run with every call."""
    from ecrl import init_state, train_iter

    records = train_iter(init_state(cfg), cfg)

    def one() -> None:
        next(records)  # what it collected
        next(records)  # what it learned

    return one


def turns(env: str, num_envs: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of an iteration under each guard, one number per round."""
    runs = {guard: iterations(config(env, num_envs, **{"trainer.finite_guard": guard})) for guard in ("stop", "skip")}
    off = iterations(config(env, num_envs, **{"trainer.finite_guard": "off"}))
    return take_turns({"off": off, **runs}, rounds, _TURN_S)


def cost(guarded: list[float], off: list[float]) -> dict[str, Any]:
    """Times of an iteration without the guard: the median over rounds, its 95 % interval, and the quartiles.

    >>> row = cost([1.01] * 101, [1.0] * 101)
    >>> row["times"], row["low"], row["high"], row["met"]
    (1.01, 1.01, 1.01, True)
    """
    by_round = sorted(a / b for a, b in zip(guarded, off, strict=True))
    n = len(by_round)
    half = 0.98 * sqrt(n)  # ranks within which the median is, by the binomial distribution
    low, high = by_round[max(0, round(n / 2 - half) - 1)], by_round[min(n - 1, round(n / 2 + half))]
    quartiles = statistics.quantiles(by_round, n=4, method="inclusive")
    row = {"times": quartiles[1], "low": low, "high": high, "quartile_1": quartiles[0], "quartile_3": quartiles[2]}
    return row | {"rounds": n, "most": MOST, "met": quartiles[1] <= MOST}


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """A row for every environment, number of them and guard, on the first core."""
    out: list[dict[str, Any]] = []
    for env, sizes in (QUICK if quick else SIZES).items():
        for num_envs in sizes:
            args = {"env": env, "num_envs": num_envs, "rounds": _ROUNDS_QUICK if quick else _ROUNDS}
            row: dict[str, Any] = {"env": env, "num_envs": num_envs}
            try:
                taken = alone("benchmarks.guard:turns", args, cores[:1])
            except Failure as failure:
                out.append(row | {"error": str(failure)})
                continue
            out += [row | {"guard": guard, **cost(taken[guard], taken["off"])} for guard in ("stop", "skip")]
    return out


def figure(rows: list[dict[str, Any]]) -> Any:
    """The median cost of each, with the middle half of the rounds."""
    from matplotlib.figure import Figure

    seen = [row for row in rows if "times" in row]
    made = Figure(figsize=(6, 1 + 0.4 * len(seen)), layout="constrained")
    axes = made.subplots()
    times = [row["times"] for row in seen]
    spread = [[row["times"] - row["quartile_1"] for row in seen], [row["quartile_3"] - row["times"] for row in seen]]
    names = [f"{row['env']}, {row['num_envs']} envs, {row['guard']}" for row in seen]
    axes.errorbar(times, names, xerr=spread, fmt="o")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.axvline(MOST, color="black", linewidth=1, linestyle=":")
    axes.set(xlabel='times an iteration with the guard "off"; middle half of the rounds')
    return made
