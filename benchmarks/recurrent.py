"""Compare ecrl with PureJaxRL by the environment steps per second of recurrent PPO on CartPole without velocities.

Both have one linear encoder with relu, a GRU, and an actor and a critic with one hidden layer, all of 64 units. An
iteration has 128 steps and 4 epochs of 4 minibatches of whole environments. Both clip the critic's values and
standardise advantages over each minibatch. At a time limit, ecrl bootstraps from the critic's value, but gymnax, the
library with PureJaxRL's environment, reports a termination. All rows are measured on one core.
"""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.other_libraries import STEPS, as_work
from benchmarks.pairs import ROOT, Contestant, Result, compared, race

SIZES = (64, 512)
UNITS, EPOCHS, MINIBATCHES = 64, 4, 4
OBSERVED = (0, 2)
"""The entries of CartPole's observation that are not velocities."""
MUST, AIM = 0.8, 1.2


def config(num_envs: int) -> Any:
    """Return ecrl's config: the policy of `repeat_previous_ppo` on CartPole without velocities."""
    from ecrl import load_config

    return load_config(ROOT / "configs" / "repeat_previous_ppo.json").replace(
        **{
            "env": {"name": "cartpole", "cfg": {"observe_velocity": False}},
            "trainer.num_envs": num_envs,
            "trainer.buffer_size": STEPS,
            "trainer.iterations": 10**6,
            "trainer.compile": "on",
            "policy.cell.hidden_size": UNITS,
            "algorithm.cfg.lr_scheduler": None,
            "algorithm.cfg.clip_vloss": True,
            "algorithm.cfg.normalize_advantage": "minibatch",
            "algorithm.cfg.n_epochs": EPOCHS,
            "algorithm.cfg.batch_size": num_envs * STEPS // MINIBATCHES,
        }
    )


def make(num_envs: int) -> Callable[[], int]:
    """Return a function that runs one iteration of ecrl, and returns its number of environment steps."""
    from benchmarks.ecrl_runs import averages

    return as_work(averages(config(num_envs)), num_envs * STEPS)


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each number of environments."""
    return [
        row(num_envs, *race(contestants(num_envs), cores[:1], 1 if quick else 5, 0.4 if quick else 2.0))
        for num_envs in SIZES[: 1 if quick else None]
    ]


def contestants(num_envs: int) -> tuple[Contestant, Contestant]:
    """Return ecrl and PureJaxRL's PPO as contestants."""
    return (
        Contestant("ecrl", "benchmarks.recurrent:make", {"num_envs": num_envs}),
        Contestant("PureJaxRL's", "benchmarks.other_libraries.purejaxrl_recurrent:make", {"num_envs": num_envs}),
    )


def row(num_envs: int, ecrl: Result, peer: Result) -> dict[str, Any]:
    """Return the row that compares ecrl with PureJaxRL for one number of environments.

    >>> row(64, Result("ecrl", [3.0], 1.0, {}, 0.0), Result("peer", [2.0], 1.0, {}, 0.0))["met"]
    True
    """
    about = {"peer": peer.name, "num_envs": num_envs}
    return compared(about, ecrl, peer, MUST, AIM)


def figure(rows: list[dict[str, Any]]) -> Any:
    """Plot the ratio and its range for each number of environments, and a line for the required ratio."""
    from matplotlib.figure import Figure

    measured = [r for r in rows if "ratio" in r]
    picture = Figure(figsize=(6, 4), layout="constrained")
    axes = picture.subplots()
    places = range(len(measured))
    spread = [[r["ratio"] - r["ratio_min"] for r in measured], [r["ratio_max"] - r["ratio"] for r in measured]]
    axes.bar(places, [r["ratio"] for r in measured], yerr=spread, color="tab:blue", width=0.5)
    axes.axhline(MUST, color="black", linewidth=0.8)
    axes.set_xticks(places, [str(r["num_envs"]) for r in measured])
    axes.set(xlabel="environments", ylabel="env steps/s, ecrl / PureJaxRL's (line: must)")
    return picture
