"""Settings and functions that DDPG, TD3, soft actor-critic, FastTD3 and FastSAC share.

These algorithms learn an actor and critics for continuous actions, and soft actor-critic also for Discrete actions. The
critics learn from temporal-difference targets, and the actor maximises the values that the critics predict.
"""

import json
from functools import partial
from typing import Any, cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms.core import SKIPPED_STEPS, Run
from ecrl.algorithms.optimizer import GroupSettings
from ecrl.algorithms.replay_learning import ReplayConfig
from ecrl.config.model import Fraction, Positive
from ecrl.errors import ConfigError
from ecrl.kernels import soft_update, td_loss
from ecrl.policies.heads import has_finite_bounds
from ecrl.pytree import mapped, replaced
from ecrl.spaces import Box
from ecrl.types import Logs

NO_CARRY = TensorDict({}, [])
"""The empty memory of a feed-forward policy."""

SHARED_NUMBERS = ("gamma", "tau")
"""Names of the settings that all algorithms with an `ActorCriticConfig` store in `hyper`."""


class ActorCriticConfig(ReplayConfig):
    """Settings of the replay buffer, of the optimisers of actor and critics, and of the target networks."""

    critic_learning_rate: Positive | None = Field(
        default=None, description="step size of the critics, before the schedule; the actor's step size if absent"
    )
    tau: Fraction = Field(
        default=0.005, description="weight of the trained networks in an update of the target networks"
    )


def critic_settings(cfg: ActorCriticConfig) -> dict[str, GroupSettings]:
    """Return the critics' own optimiser settings, if any, for `groups_of` and `learning_state`."""
    rate = cfg.critic_learning_rate
    return {} if rate is None else {"critic": GroupSettings(learning_rate=rate)}


def check_policy(run: Run, name: str, needs_log_prob: bool, needs_distribution: bool = False) -> None:
    """Raise ConfigError if the policy or the action space does not suit the algorithm `name`.

    The policy needs a Q-function, and the action space must be a Box with finite bounds. `needs_log_prob` is True for
    an algorithm that needs a stochastic policy, and False for an algorithm that needs a deterministic policy.
    `needs_distribution` is True for an algorithm whose critics predict categorical distributions of the return, and
    False for an algorithm whose critics predict values.
    """
    policy, space = run.policy, run.env.action_space
    is_bounded = isinstance(space, Box) and has_finite_bounds(space)
    if policy.q is None or not is_bounded or (policy.evaluate is None) == needs_log_prob:
        kind, example = ("stochastic", "squashed") if needs_log_prob else ("deterministic", "deterministic")
        raise ConfigError(
            f"policy.name: {name} needs a {kind} policy with a Q-function for bounded Box actions, such as "
            f"{example}_actor_critic; the actions of this environment are {space}"
        )
    kind = policy.distribution and policy.distribution.name
    if needs_distribution and kind != "categorical":
        raise ConfigError(f'policy.distribution: {name} needs the distribution "categorical", got {json.dumps(kind)}')
    if not needs_distribution and kind is not None:
        fast = "fast_sac" if needs_log_prob else "fast_td3"
        raise ConfigError(f"policy.distribution: {name} needs critics that predict values; leave it out, or use {fast}")


def with_random_start(run: Run, state: TensorDict) -> TensorDict:
    """Let the policy take uniformly random actions until learning starts."""
    exploration = cast(TensorDict, state["exploration"])
    is_random = torch.full_like(exploration["random"], run.static.phase == "collect")
    return replaced(state, {"exploration": replaced(exploration, {"random": is_random})})


def critic_loss(run: Run, params: TensorDict, batch: TensorDict, target: Tensor) -> tuple[Tensor, Logs]:
    """Return half the mean squared TD error of each critic, summed over the critics.

    sum_c(mean((Q_c(obs, action) - target)^2 / 2))
    """
    q = cast(Any, run.policy.q)(params, batch["obs"], batch["action"], None)
    return td_loss(q, target, torch.ones_like(target), batch["mask"], delta=float("inf"))


DELAYED = ("policy_loss", "grad_norm")
"""Logs of the actor, for `Algorithm.delayed` of an algorithm that does not update the actor in every gradient step."""


def is_due(count: Tensor, period: int) -> Tensor | None:
    """Return True at every `period`-th gradient step, and False at other steps. Return None if the period is 1.

    `count`, an int64 tensor, numbers the gradient steps from 0 (see `each_minibatch`). Turns before learning starts
    also count, as if they took gradient steps.

    >>> is_due(torch.arange(4), 2)
    tensor([False,  True, False,  True])
    """
    return None if period == 1 else (count + 1) % period == 0


def with_targets(state: TensorDict, moves: Tensor | None = None) -> TensorDict:
    """Move the target parameters towards the trained parameters, unless `moves`, a 0-d bool, is False.

    target_params = tau * params + (1 - tau) * target_params
    """
    old = cast(TensorDict, state["target_params"])
    trained = cast(TensorDict, cast(TensorDict, state["params"]).select(*old.keys()))
    new = soft_update(trained, old, tau=state["hyper", "tau"])
    return replaced(state, {"target_params": new if moves is None else mapped(partial(torch.where, moves), new, old)})


def merged_logs(*parts: Logs) -> Logs:
    """Merge the logs of several gradient steps. For each name, keep the last log, but sum `skipped_steps`."""
    logs = {name: log for part in parts for name, log in part.items()}
    if SKIPPED_STEPS in logs:
        logs[SKIPPED_STEPS] = torch.stack([part[SKIPPED_STEPS] for part in parts]).sum()
    return logs
