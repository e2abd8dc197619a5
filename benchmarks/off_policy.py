"""Compare ecrl with rejax and Stable-Baselines3 by the environment steps per second of off-policy algorithms.

DQN, TD3 and SAC have one environment, one gradient step per environment step, and minibatches of 256 transitions. DQN
and PQN learn CartPole, TD3 and SAC learn Pendulum. rejax is measured unchanged. For DQN, TD3 and SAC, rejax is also
measured with a sampler whose time does not depend on the capacity of the replay buffer. ecrl and rejax use Double DQN,
which Stable-Baselines3 does not have. With 256 units, DQN is compared only with Stable-Baselines3, so ecrl uses plain
DQN. FastTD3 and FastSAC, with the settings of the shipped configs but on Pendulum, are compared with
Stable-Baselines3's TD3 and SAC on Pendulum. The last rows compare ecrl with itself: a buffer of 1,000,000 steps with a
buffer of 10,000 steps, and prioritised replay with uniform replay. All rows are measured on one core. A quick run has
one round of SAC with 64 units.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.other_libraries import as_work
from benchmarks.pairs import ROOT, Contestant, Result, await_ready, compared, run_rounds, started

BATCH, GAMMA, LEARNING_RATE, LEARNING_STARTS, CAPACITY = 256, 0.99, 1e-3, 256, 131_072
TASK = {"dqn": "CartPole", "pqn": "CartPole", "td3": "Pendulum", "sac": "Pendulum"}
_CONFIG = {
    "dqn": "cartpole_dqn",
    "pqn": "cartpole_pqn",
    "td3": "pendulum_td3",
    "sac": "pendulum_sac",
    "fast_td3": "point_mass_fast_td3",
    "fast_sac": "point_mass_fast_sac",
}
_ITERATION = 512
"""Environment steps of an iteration of ecrl's DQN, TD3 and SAC."""


class PQNSizes(NamedTuple):
    """Settings of PQN that both libraries share."""

    num_envs: int = 32
    steps: int = 64
    epochs: int = 4
    batch_size: int = 128
    q_lambda: float = 0.95


PQN = PQNSizes()

MustAndAim = tuple[float | None, float | None]
"""Required and desired ratio."""


class Comparison(NamedTuple):
    """Contestants that take turns, ecrl first, with the required and desired ratio to each of the others."""

    algorithm: str
    units: int
    contestants: tuple[Contestant, ...]
    must_and_aim: tuple[MustAndAim, ...]


def ecrl(name: str, algorithm: str, units: int, capacity: int = CAPACITY, **keys: Any) -> Contestant:
    """Return ecrl as a contestant. `keys` are keys of `algorithm.cfg`."""
    args = {"algorithm": algorithm, "units": units, "capacity": capacity, "keys": keys}
    return Contestant(name, "benchmarks.off_policy:make", args)


def rejax(algorithm: str, units: int, constant_time: bool = False) -> Contestant:
    """Return rejax as a contestant, as it is or with a sampler of constant time."""
    args = {"name": algorithm, "units": units, "capacity": CAPACITY, "constant_time": constant_time}
    name = "rejax, constant-time sampler" if constant_time else "rejax"
    return Contestant(name, "benchmarks.other_libraries.rejax_replay:make", args)


def sb3(algorithm: str, units: int) -> Contestant:
    """Return Stable-Baselines3 as a contestant."""
    args = {"name": algorithm, "units": units, "capacity": CAPACITY}
    return Contestant("SB3", "benchmarks.other_libraries.sb3_replay:make", args)


def comparisons() -> list[Comparison]:
    """List the comparisons of a full run. A quick run has only the first comparison."""
    ten_thousand = ecrl("ecrl, 10,000 steps", "sac", 64, 10_000)
    return [
        _peers("sac", 64, (8.0, None), (2.5, 3.2), (1.0, 1.2)),
        _peers("sac", 256, (3.0, None), (1.2, 1.3), (1.05, 1.15)),
        _peers("td3", 64, (5.0, None), (None, None), (0.95, 1.1)),
        _peers("dqn", 64, (8.0, None), (None, None), (1.0, 1.15)),
        Comparison("dqn", 256, (ecrl("ecrl, plain DQN", "dqn", 256, double=False), sb3("dqn", 256)), ((2.2, None),)),
        Comparison("pqn", 64, (ecrl("ecrl", "pqn", 64), rejax("pqn", 64)), ((1.0, None),)),
        Comparison("fast_td3", 64, (ecrl("ecrl", "fast_td3", 64), sb3("td3", 64)), ((10.0, None),)),
        Comparison("fast_sac", 64, (ecrl("ecrl", "fast_sac", 64), sb3("sac", 64)), ((10.0, None),)),
        Comparison("sac", 64, (ecrl("ecrl, 1,000,000 steps", "sac", 64, 10**6), ten_thousand), ((1 / 1.1, None),)),
        Comparison(
            "dqn",
            64,
            (ecrl("ecrl, prioritised", "dqn", 64, prioritized={}), ecrl("ecrl, uniform", "dqn", 64)),
            ((1 / 1.3, 1 / 1.15),),
        ),
    ]


def _peers(algorithm: str, units: int, stable_baselines: MustAndAim, *of_rejax: MustAndAim) -> Comparison:
    peers = [rejax(algorithm, units), rejax(algorithm, units, constant_time=True)][: len(of_rejax)]
    contestants = (ecrl("ecrl", algorithm, units), *peers, sb3(algorithm, units))
    return Comparison(algorithm, units, contestants, (*of_rejax, stable_baselines))


def config(algorithm: str, units: int, capacity: int, keys: dict[str, Any]) -> Any:
    """Return the config of one of ecrl's contestants."""
    from ecrl import load_config

    keys = {f"algorithm.cfg.{name}": value for name, value in keys.items()}
    keys |= {"trainer.iterations": 10**6, "trainer.compile": "on"}
    if algorithm.startswith("fast_"):
        keys |= {"env": {"name": "pendulum"}}
    elif algorithm == "pqn":
        keys |= {"trainer.num_envs": PQN.num_envs, "trainer.buffer_size": PQN.steps}
        learning = {"n_epochs": PQN.epochs, "batch_size": PQN.batch_size, "q_lambda": PQN.q_lambda}
        keys |= {f"algorithm.cfg.{name}": value for name, value in learning.items()}
    else:
        keys |= {"trainer.num_envs": 1, "trainer.buffer_size": _ITERATION}
        learning = {"capacity": capacity, "batch_size": BATCH, "learning_starts": LEARNING_STARTS, "gamma": GAMMA}
        learning |= {"learning_rate": LEARNING_RATE, "n_step": 1}
        keys |= {f"algorithm.cfg.{name}": value for name, value in learning.items()}
        networks = ("critic",) if algorithm == "dqn" else ("actor", "critic")
        keys |= {f"policy.{network}.network_cfg.hidden_sizes": [units, units] for network in networks}
    return load_config(ROOT / "configs" / f"{_CONFIG[algorithm]}.json").replace(**keys)


def make(algorithm: str, units: int, capacity: int, keys: dict[str, Any]) -> Callable[[], int]:
    """Return a function that runs one iteration of ecrl. The iteration before the first update is not measured."""
    from ecrl.loop.build import build
    from ecrl.loop.iteration import first_state, iterations

    cfg = config(algorithm, units, capacity, keys)
    run = build(cfg)
    records = (record for record in iterations(run, first_state(run, cfg), cfg) if record["log_type"] == "train")
    next(records)  # the iteration before the first update
    return as_work(records, cfg.trainer.num_envs * cfg.trainer.buffer_size)


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each pair of ecrl and another contestant."""
    out = []
    for comparison in comparisons()[: 1 if quick else None]:
        with started(comparison.contestants, cores[:1]) as workers:
            ready = [await_ready(worker) for worker in workers]
            first, *others = run_rounds(workers, ready, cores[:1], 1 if quick else 5, 0.4 if quick else 2.0)
        out += [
            row(comparison, first, other, *numbers)
            for other, numbers in zip(others, comparison.must_and_aim, strict=True)
        ]
    return out


def row(comparison: Comparison, first: Result, other: Result, must: float | None, aim: float | None) -> dict[str, Any]:
    """Return the row that compares `first`, a contestant of ecrl, with another contestant.

    >>> pair = Comparison("sac", 64, (ecrl("ecrl", "sac", 64), sb3("sac", 64)), ((8.0, None),))
    >>> row(pair, Result("ecrl", [9.0], 1.0, {}, 0.0), Result("SB3", [1.0], 1.0, {}, 0.0), 8.0, None)["met"]
    True
    """
    about = {"algorithm": comparison.algorithm, "units": comparison.units, "ours": first.name, "peer": other.name}
    return compared(about, first, other, must, aim)


def figure(rows: list[dict[str, Any]]) -> Any:
    """Plot a bar for the ratio of each row, and a line for the required ratio."""
    from matplotlib.figure import Figure

    measured = [r for r in rows if "ratio" in r]
    picture = Figure(figsize=(8, 0.6 + 0.35 * len(measured)), layout="constrained")
    axes = picture.subplots()
    places = range(len(measured))
    axes.barh(places, [r["ratio"] for r in measured], color="tab:blue")
    for place, r in zip(places, measured, strict=True):
        if r["must"] is not None:
            axes.plot([r["must"]] * 2, [place - 0.4, place + 0.4], color="black")
    axes.set_yticks(places, [f"{r['algorithm']} {r['units']}, {r['ours']} / {r['peer']}" for r in measured])
    axes.set(xscale="log", xlabel="env steps/s, ratio (line: must)")
    axes.invert_yaxis()
    return picture
