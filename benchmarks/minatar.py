"""Compare ecrl with rejax by the environment steps per second of PPO on four games of MinAtar.

Both libraries have separate networks for actor and critic: two layers of 64 units, or one convolution with 16 channels
and a layer of 128 units. An iteration has 64 environments, 128 steps, and 4 epochs of 8 minibatches. Both clip the
critic's values and standardise advantages over each minibatch. rejax runs the games of gymnax, which are similar to the
games of MinAtar, but not equal. For example, gymnax never repeats actions at random. An episode has at most 1,000
steps, except for Freeway, whose episodes always have 2,500 steps in gymnax and 2,501 in ecrl. At a time limit, ecrl
bootstraps from the critic's value, but gymnax reports a termination. gymnax 0.0.9 cannot run Seaquest. All rows are
measured on one core.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.other_libraries import STEPS, as_work
from benchmarks.pairs import ROOT, Contestant, Result, await_ready, compared, run_rounds, started

GAMES = {  # ecrl: gymnax
    "breakout": "Breakout-MinAtar",
    "asterix": "Asterix-MinAtar",
    "freeway": "Freeway-MinAtar",
    "space_invaders": "SpaceInvaders-MinAtar",
}
NETWORKS = ("cnn", "mlp")
MUST, AIM = 1.0, 1.5


class Sizes(NamedTuple):
    """Settings of PPO that both libraries share."""

    num_envs: int = 64
    epochs: int = 4
    minibatches: int = 8
    time_limit: int = 1000
    channels: int = 16
    kernel: int = 3
    features: int = 128
    units: tuple[int, int] = (64, 64)


SIZES = Sizes()


def network(kind: str) -> dict[str, Any]:
    """Return the section of ecrl's config for a network of the kind "cnn" or "mlp"."""
    layers: dict[str, Any] = {"hidden_sizes": [*SIZES.units]}
    if kind == "cnn":
        convolution = {"channels": [SIZES.channels], "kernel_sizes": [SIZES.kernel], "strides": [1]}
        layers = {**convolution, "hidden_sizes": [SIZES.features]}
    return {"type": kind, "network_cfg": layers | {"activation": "relu"}}


def config(game: str, kind: str) -> Any:
    """Return ecrl's config for a game, with one kind of network."""
    from ecrl import load_config

    return load_config(ROOT / "configs" / f"minatar_{game}_ppo.json").replace(
        **{
            "policy": {"name": "actor_critic", "actor": network(kind), "critic": network(kind)},
            "env.cfg.max_episode_steps": None if game == "freeway" else SIZES.time_limit,
            "trainer.num_envs": SIZES.num_envs,
            "trainer.buffer_size": STEPS,
            "trainer.iterations": 10**6,
            "trainer.compile": "on",
            "algorithm.cfg.lr_scheduler": None,
            "algorithm.cfg.clip_vloss": True,
            "algorithm.cfg.normalize_advantage": "minibatch",
            "algorithm.cfg.n_epochs": SIZES.epochs,
            "algorithm.cfg.batch_size": SIZES.num_envs * STEPS // SIZES.minibatches,
        }
    )


def make(game: str, kind: str) -> Callable[[], int]:
    """Return a function that runs one iteration of ecrl, and returns its number of environment steps."""
    from benchmarks.ecrl_runs import averages

    return as_work(averages(config(game, kind)), SIZES.num_envs * STEPS)


def contestants(game: str, kind: str) -> tuple[Contestant, Contestant]:
    """Return ecrl and rejax as contestants on a game, with one kind of network."""
    args = {"game": game, "kind": kind}
    return (
        Contestant("ecrl", "benchmarks.minatar:make", args),
        Contestant("rejax", "benchmarks.other_libraries.rejax_minatar:make", args),
    )


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row per game and network. A quick run has one game."""
    out = []
    for game in list(GAMES)[: 1 if quick else None]:
        entrants = [one for kind in NETWORKS for one in contestants(game, kind)]
        with started(entrants, cores[:1]) as workers:
            ready = [await_ready(worker) for worker in workers]
            for i, kind in enumerate(NETWORKS):
                pair = slice(2 * i, 2 * i + 2)
                rounds, seconds = (1, 0.4) if quick else (5, 2.0)
                ecrl, peer = run_rounds(workers[pair], ready[pair], cores[:1], rounds, seconds)
                out.append(row(game, kind, ecrl, peer))
    return out


def row(game: str, kind: str, ecrl: Result, peer: Result) -> dict[str, Any]:
    """Return the row that compares ecrl with rejax on a game, with one kind of network.

    >>> row("breakout", "cnn", Result("ecrl", [3.0], 1.0, {}, 0.0), Result("rejax", [2.0], 1.0, {}, 0.0))["ratio"]
    1.5
    """
    about = {"game": game, "network": kind, "peer": peer.name}
    return compared(about, ecrl, peer, MUST, AIM)


def figure(rows: list[dict[str, Any]]) -> Any:
    """Plot a bar for the ratio of each row, and a line for the required ratio."""
    from matplotlib.figure import Figure

    measured = [r for r in rows if "ratio" in r]
    picture = Figure(figsize=(7, 0.8 + 0.35 * len(measured)), layout="constrained")
    axes = picture.subplots()
    places = range(len(measured))
    spread = [[r["ratio"] - r["ratio_min"] for r in measured], [r["ratio_max"] - r["ratio"] for r in measured]]
    axes.barh(places, [r["ratio"] for r in measured], xerr=spread, color="tab:blue")
    axes.axvline(MUST, color="black", linewidth=0.8)
    axes.set_yticks(places, [f"{r['game']}, {r['network']}" for r in measured])
    axes.set(xlabel="env steps/s, ecrl / rejax (line: must)")
    axes.invert_yaxis()
    return picture
