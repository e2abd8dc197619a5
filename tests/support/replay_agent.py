"""A small value-based algorithm with a replay buffer: it learns the critic by one-step TD on rows of a ring.

The policy stays as it was initialised, so the critic has to learn the value of that policy. A padding field
makes the rows, and so the buffer, as large as a test wants.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from pydantic import Field
from tensordict import TensorDict

from ecrl import rng
from ecrl.algorithms import Algorithm, collect
from ecrl.algorithms.core import LEARNER_KINDS, Run
from ecrl.algorithms.minibatch_sgd import SGD, MinibatchConfig, minibatch_sgd, sgd_choices
from ecrl.algorithms.optimizer import learning_state
from ecrl.algorithms.state_kinds import Kind
from ecrl.config import Config, config_from_dict
from ecrl.config.model import Count, Fraction
from ecrl.pytree import replaced
from ecrl.registry import register_algorithm
from ecrl.spaces import element_shape
from ecrl.types import transitions
from support.small_runs import NET

REPLAY_KINDS = {**LEARNER_KINDS, "replay": Kind.BUFFER, ("replay", "cursor"): Kind.COUNTER}


class ReplayTDConfig(MinibatchConfig):
    """Hyperparameters."""

    gamma: Fraction = Field(default=0.9, description="discount per step")
    capacity: Count = Field(default=256, description="rows of the buffer")
    padding: Count = Field(default=1, description="bytes that a row has for nothing")
    sampled: Count = Field(default=64, description="rows that an iteration learns from")


class Choices(NamedTuple):
    """Sizes that shape the graph."""

    capacity: int
    padding: int
    sampled: int
    sgd: SGD


def init(cfg: ReplayTDConfig, run: Run, key: torch.Tensor) -> dict[str, Any]:
    """Parameters, optimiser state, numbers, and an empty buffer."""
    params = run.policy.init(rng.fold_in(key, rng.INIT))
    shape = cfg.capacity, *element_shape(run.env.observation_space)
    zero = torch.zeros((), dtype=torch.int64, device=key.device)
    rings = {
        "obs": torch.zeros(shape, device=key.device),
        "next_obs": torch.zeros(shape, device=key.device),
        "reward": torch.zeros(cfg.capacity, device=key.device),
        "terminated": torch.zeros(cfg.capacity, dtype=torch.bool, device=key.device),
        "padding": torch.zeros(cfg.capacity, cfg.padding, dtype=torch.uint8, device=key.device),
    }
    replay = TensorDict({**rings, "cursor": zero, "written": zero.clone()}, [])
    return learning_state(cfg, params, {"gamma": cfg.gamma}, key.device) | {"replay": replay}


def new_rows(rollout: TensorDict, padding: int) -> TensorDict:
    """Rows `[N * T]` for the buffer."""
    steps = transitions(rollout)
    rows = steps.select("obs", "reward", "terminated")
    rows = rows.update({"next_obs": rollout["obs"][:, 1:]}).reshape(-1)
    blank = torch.zeros(len(rows), padding, dtype=torch.uint8, device=rollout.device)
    return rows.update({"padding": blank})


def td_loss(run: Run, params: TensorDict, batch: TensorDict, mask: torch.Tensor, hyper: TensorDict) -> Any:
    """Squared one-step TD error, with a constant target."""
    empty = TensorDict({}, [])
    value, after = (run.policy.value(params, empty, batch[name]) for name in ("obs", "next_obs"))  # pyright: ignore
    target = (batch["reward"] + hyper["gamma"] * after * ~batch["terminated"]).detach()
    return (value - target).square().masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1), {}


def iterate(run: Run, state: TensorDict, borrowed: TensorDict) -> tuple[TensorDict, TensorDict, dict]:
    """Collect, then learn from rows that were written before this iteration."""
    choices, cursor = run.algorithm.choices, state["replay", "cursor"]
    state, rollout = collect(run, state)
    rows = new_rows(rollout, choices.padding)
    index = (cursor + torch.arange(len(rows), device=cursor.device)) % choices.capacity
    keys = rng.stream(state["key"], rng.UPDATE, torch.arange(choices.sampled, device=cursor.device), -1 - cursor)
    filled = cursor.clamp(max=choices.capacity)
    drawn = (rng.uniform(keys) * filled).to(torch.int64).clamp(max=choices.capacity - 1)
    replay = cast(TensorDict, borrowed["replay"])
    sample = replay.select("obs", "next_obs", "reward", "terminated")
    sample = TensorDict({name: ring[drawn] for name, ring in sample.items()}, [choices.sampled])
    sample = sample.update({"mask": (filled > 0).expand(choices.sampled)})
    state, logs = minibatch_sgd(run, state, sample, td_loss, choices.sgd)
    state = replaced(state, {"replay": TensorDict({"cursor": cursor + len(rows)}, [])})
    return state, TensorDict({"steps": rollout, "replay": {"rows": rows, "index": index}}, []), logs


@register_algorithm("replay_td", override=True)
def replay_td(cfg: ReplayTDConfig) -> Algorithm:
    """TD(0) from a replay buffer."""
    choices = Choices(cfg.capacity, cfg.padding, cfg.sampled, sgd_choices(cfg))
    return Algorithm(choices, partial(init, cfg), iterate, REPLAY_KINDS, as_one=True)


N, T, CAPACITY = 3, 4, 20


def replaying(**changes) -> Config:
    """A small run of the agent on CartPole, eager, with dotted keys changed."""
    algorithm = {"capacity": CAPACITY, "sampled": 32, "batch_size": 16, "n_epochs": 2, "learning_rate": 0.02}
    base = {
        "trainer": {"num_envs": N, "buffer_size": T, "iterations": 5, "compile": "off"},
        "env": {"name": "cartpole"},
        "policy": {"name": "actor_critic", "actor": NET, "critic": NET},
        "algorithm": {"name": "replay_td", "cfg": algorithm},
    }
    return config_from_dict(base).replace(**changes)
