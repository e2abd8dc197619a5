"""Prioritised replay, which draws transitions by their latest temporal-difference errors.

    state = add_priorities(run, state, replay, sampling)           # after `store`
    batch = sample_by_priority(run, state, replay, sampling)
    ...                                                            # a gradient step, with the weights of the batch
    state = set_priorities(state, batch, td_error)

In the state, `replay` has two more fields: `tree`, a sum tree with the priority of each step of the buffer, and
`largest`, the largest priority so far.

Source: Schaul et al. 2016, arXiv:1511.05952, algorithm 1.
"""

from typing import cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms.core import Run
from ecrl.algorithms.interleaved import sample_keys
from ecrl.algorithms.replay_learning import ReplayConfig, Sampling, read
from ecrl.algorithms.state_kinds import Kind, Kinds
from ecrl.config.model import ConfigModel, Fraction, NonNegative, Positive
from ecrl.distributed import all_max
from ecrl.errors import ConfigError
from ecrl.kernels import (
    Replay,
    importance_weights,
    replay_add_priority,
    replay_prioritized_index,
    replay_set_priority,
    tree_init,
)
from ecrl.memory import check_room
from ecrl.pytree import replaced

PRIORITY_KINDS: Kinds = {("replay", "largest"): Kind.STATISTICS}
"""Kind of the largest priority, for the `kinds` of an algorithm."""


class PriorityConfig(ConfigModel):
    """Hyperparameters of prioritised replay, which are stored in the state and may change during a run."""

    alpha: NonNegative = Field(default=0.6, description="exponent of the priority; 0 makes all priorities equal")
    beta: Fraction = Field(default=0.4, description="exponent of the importance weights at the start of the run")
    final_beta: Fraction = Field(default=1.0, description="exponent of the importance weights at the end of the run")
    eps: Positive = Field(
        default=1e-6, description="number added to the absolute value of each error, in the unit of the error"
    )


def priority_numbers(cfg: PriorityConfig) -> dict[str, float]:
    """Return the hyperparameters of the config, for the field `hyper` of the state."""
    return {f"priority_{name}": getattr(cfg, name) for name in PriorityConfig.model_fields}


def with_tree(run: Run, replay: TensorDict, cfg: ReplayConfig) -> TensorDict:
    """Add an empty sum tree to an empty replay buffer, and set the largest priority to 1.

    Raises: ConfigError if the buffer is too short, or if the tree does not fit in memory.
    """
    (steps, num_envs), device = replay["steps"].shape, cast(Tensor, replay["cursor"]).device
    if steps < (least := cfg.train_freq + cfg.n_step + run.policy.frame_stack):
        raise ConfigError(
            f"algorithm.cfg.capacity: {cfg.capacity:,} has room for {steps:,} steps of each environment, but "
            f"prioritized replay with train_freq {cfg.train_freq} and n_step {cfg.n_step} "
            f"needs {least:,}; make it larger"
        )
    check_room(32 * steps * num_envs, device, f"the sum tree of the replay buffer: {steps * num_envs:,} steps")
    tree = tree_init(steps * num_envs, device)
    return replaced(replay, {"tree": tree, "largest": torch.ones((), dtype=tree.dtype, device=tree.device)})


def add_priorities(run: Run, state: TensorDict, replay: Replay, sampling: Sampling) -> TensorDict:
    """Give the largest priority so far to the steps that can now be drawn for the first time.

    Call this function in each turn, after `store`.
    """
    own, steps = cast(TensorDict, state["replay"]), run.static.buffer_size
    tree = replay_add_priority(
        replay, own["tree"], own["largest"], steps=steps, n=sampling.n_step, stack=run.policy.frame_stack
    )
    return replaced(state, {"replay": replaced(own, {"tree": tree})})


def beta_of(state: TensorDict) -> Tensor:
    """Return the exponent of the importance weights, which changes linearly during the run.

    beta + (final_beta - beta) * min(1, update_step / iterations)
    """
    hyper = cast(TensorDict, state["hyper"])
    share = (state["update_step"] / state["iterations"]).clamp(max=1.0)
    return hyper["priority_beta"] + (hyper["priority_final_beta"] - hyper["priority_beta"]) * share


def sample_by_priority(run: Run, state: TensorDict, replay: Replay, sampling: Sampling) -> TensorDict:
    """Draw the transitions of an update with probabilities proportional to their priorities.

    Returns: the transitions of `read`, `[gradient_steps * batch_size]`, with the fields `index`, for
        `set_priorities`, and `weight`, the importance weights. The largest weight of a minibatch, over all ranks, is 1.
    """
    keys, beta = sample_keys(run, state, sampling.gradient_steps * sampling.batch_size), beta_of(state)
    index, probability = replay_prioritized_index(
        state["replay", "tree"], keys.unflatten(0, (sampling.gradient_steps, sampling.batch_size))
    )
    weights = []
    for minibatch in probability.unbind():
        smallest = minibatch.amin()
        share = -all_max(-smallest) / smallest  # smallest probability on all ranks, divided by that on this rank
        weights.append(importance_weights(minibatch, beta=beta) * torch.pow(share, beta))
    batch = read(run, state, replay, index.flatten(), sampling)
    return replaced(batch, {"index": index.flatten(), "weight": torch.cat(weights)})


def set_priorities(state: TensorDict, batch: TensorDict, td_error: Tensor) -> TensorDict:
    """Set the priorities of the drawn transitions to `(|td_error| + eps)^alpha`, with the errors `[B]` of the batch."""
    own, hyper = cast(TensorDict, state["replay"]), cast(TensorDict, state["hyper"])
    numbers = {"alpha": hyper["priority_alpha"], "eps": hyper["priority_eps"]}
    tree, largest = replay_set_priority(own["tree"], own["largest"], batch["index"], td_error, batch["mask"], **numbers)
    return replaced(state, {"replay": replaced(own, {"tree": tree, "largest": all_max(largest)})})
