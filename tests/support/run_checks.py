"""Checks of whole runs: the same bits or nearly equal weights, in whatever way a run is executed."""

from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict

import ecrl
from ecrl.config import Config
from ecrl.loop.iteration import init_state, train_iter
from ecrl.run.checkpoint import load, save
from support.checks import close
from support.graphs import traced_only
from support.small_runs import last_state, same


def states_of(cfg: Config) -> list[TensorDict]:
    """Copies of the states after each iteration."""
    return [r["state"].clone() for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]


def learnt(state: TensorDict) -> TensorDict:
    """The state without counts of iterations, and without the statistics of episodes.

    The last bits of a return depend on the length of an iteration, because rewards are summed in another order.
    """
    return cast(TensorDict, state.exclude("update_step", "iterations", "episode"))


def assert_same_for_lengths(cfg: Config, sizes: tuple[int, ...], steps: int = 24) -> None:
    """Check that a run of `steps` steps learns, and that the length of an iteration changes no bit."""
    lengths = [{"trainer.buffer_size": size, "trainer.iterations": steps // size} for size in sizes]
    first, *others = (last_state(cfg.replace(**length)).clone() for length in lengths)
    assert others and not same(first["params"], init_state(cfg)["params"])
    for other in others:
        assert same(learnt(first), learnt(other))


def assert_close_states(state: TensorDict, expected: TensorDict, tol: float) -> None:
    """Check that the parameters and the statistics of two states are nearly equal."""
    for name in ("params", "norm"):
        for path, leaf in cast(TensorDict, expected[name]).items(True, True):
            close(state[name][path], leaf, tol=tol)


def assert_traced_equals_eager(cfg: Config, tol: float = 1e-4) -> tuple[TensorDict, TensorDict]:
    """Check that the two graphs of a run with a replay buffer learn as an eager run. Return both last states."""
    eager = last_state(cfg).clone()
    with traced_only() as graphs:
        traced = last_state(cfg.replace(**{"trainer.compile": "on"}))
    assert graphs == ["_iteration_of_leaves"] * 2, "one for collecting, one for learning"
    assert_close_states(traced, eager, tol=tol)
    close(traced["replay", "steps", "action"], eager["replay", "steps", "action"], tol=1e-4)
    return traced, eager


def assert_compiled_equals_eager(cfg: Config) -> None:
    """Check that a compiled run learns as an eager run."""
    eager, compiled = (last_state(cfg.replace(**{"trainer.compile": form})).clone() for form in ("off", "on"))
    assert_close_states(compiled, eager, tol=1e-4)


def assert_resumes(cfg: Config, saved: int, folder: Path) -> None:
    """Check that equal runs have the same bits, also if one was saved and loaded after `saved` iterations."""
    states = states_of(cfg)
    assert same(last_state(cfg), states[-1])
    save(folder / "now", states[saved - 1], cfg)
    *_, last = train_iter(*load(folder / "now"))
    assert same(last["state"], states[-1])


def assert_seeds_batch(cfg: Config, tol: float = 1e-5) -> None:
    """Check that three iterations of each of three seeds have the same states alone and in one batch."""
    iteration = ecrl.make_iteration(cfg)
    states = [init_state(cfg.replace(**{"trainer.seed": seed})) for seed in range(3)]
    many: Any = torch.stack([state.clone() for state in states])
    for _ in range(3):
        many, _ = torch.func.vmap(iteration, randomness="error")(many)
        states = [iteration(state)[0] for state in states]
    for one, single in zip(many.unbind(0), states, strict=True):
        for path, leaf in single.items(True, True):
            close(one[path], leaf, tol=tol)
