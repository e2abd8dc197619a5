"""Proximal policy optimisation: GAE, clipped surrogate, minibatch epochs.

Source: Schulman et al. 2017, arXiv:1707.06347.
"""

from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import (
    LEARNER_KINDS,
    REWARD_NORM_KINDS,
    Algorithm,
    Run,
    collect,
    on_policy,
    reward_norm_init,
    scaled_rewards,
)
from ecrl.algorithms.minibatch_sgd import SGD, MinibatchConfig, gradient_steps, minibatch_sgd, sgd_choices
from ecrl.algorithms.optimizer import groups_of, learning_state
from ecrl.algorithms.rows import check_log_prob, counted, evaluate, joint, rows_of, value
from ecrl.algorithms.state_kinds import Kind
from ecrl.config.model import Fraction, NonNegative, Positive
from ecrl.distributed import all_sum
from ecrl.errors import ConfigError
from ecrl.kernels import compute_gae, ppo_loss, ppo_loss_clipped_value, standardize
from ecrl.registry import register_algorithm
from ecrl.types import Logs

_ADVANTAGE_EPS = 1e-8
_NUMBERS = ("gamma", "gae_lambda", "clip_coef", "ent_coef", "vf_coef", "critic_max_grad_norm", "target_kl")


class PPOConfig(MinibatchConfig):
    """Hyperparameters. Numbers live in the state and may change during a run."""

    target_kl: Positive | None = Field(
        default=None, description="stop learning from a rollout once the policy has moved this far, nats"
    )
    gamma: Fraction = Field(default=0.99, description="discount per step")
    gae_lambda: Fraction = Field(default=0.95, description="0: one-step advantages, 1: Monte-Carlo")
    clip_coef: Positive = Field(default=0.2, description="half-width of the ratio's trust interval")
    clip_vloss: bool = Field(default=False, description="keep the value within clip_coef of the one at collection too")
    ent_coef: NonNegative = Field(default=0.01, description="weight of the entropy bonus")
    vf_coef: NonNegative = Field(default=0.5, description="weight of the critic's error")
    critic_max_grad_norm: Positive | None = Field(
        default=None, description="largest norm of the critic's gradients alone; max_grad_norm is then for the others"
    )
    normalize_advantage: Literal["rollout", "minibatch", "none"] = Field(
        default="rollout", description="over what advantages are standardised: rollout, minibatch or none"
    )
    normalize_reward: bool = Field(default=False, description="divide rewards by the spread of discounted returns")


class Choices(NamedTuple):
    """The choices of a config that shape the graph."""

    normalize_advantage: str
    clip_vloss: bool
    normalize_reward: bool
    sgd: SGD


def init(cfg: PPOConfig, run: Run, key: Tensor) -> dict[str, Any]:
    """Parameters, optimiser state and hyperparameters."""
    if run.policy.value is None:
        raise ConfigError("policy.name: this policy has no critic, which ppo needs; use actor_critic")
    check_log_prob(run.policy, "ppo")
    params = run.policy.init(rng.fold_in(key, rng.INIT))
    check_critic(params, cfg)
    numbers = {name: getattr(cfg, name) for name in _NUMBERS}
    state = learning_state(cfg, params, numbers, key.device, run.algorithm.choices.sgd.groups)
    return state | ({"norm": reward_norm_init(run.static.num_envs, key.device)} if cfg.normalize_reward else {})


def check_critic(params: TensorDict, cfg: PPOConfig) -> None:
    """Refuse `critic_max_grad_norm` if no parameters are the critic's alone."""
    if cfg.critic_max_grad_norm is not None and "critic" not in params:
        have = ", ".join(sorted(map(str, params.keys())))
        raise ConfigError(f"algorithm.cfg.critic_max_grad_norm: the policy has no parameters 'critic', only {have}")


def advantages(run: Run, hyper: TensorDict, rollout: TensorDict) -> TensorDict:
    """The steps of a rollout as rows (`ecrl.algorithms.rows`) with advantages and value targets."""
    advantage, value_target = compute_gae(rollout, hyper["gamma"], hyper["gae_lambda"])
    mask = rollout["mask"][:, :-1] if "mask" in rollout else torch.ones_like(rollout["done"][:, :-1])
    if run.algorithm.choices.normalize_advantage == "rollout":
        advantage = standardize(advantage, mask, eps=_ADVANTAGE_EPS, total=all_sum)
    return rows_of(run.policy, rollout, advantage=advantage, value_target=value_target, mask=mask)


def standardized_minibatch(run: Run, rows: TensorDict, index: Tensor, real: Tensor) -> dict[str, Tensor]:
    """Advantages standardised over the rows of one minibatch, for `normalize_advantage: minibatch`."""
    advantage, mask = rows["advantage"][index], counted(rows["mask"][index], real)
    return {"advantage": standardize(advantage, mask, eps=_ADVANTAGE_EPS, total=all_sum)}


def loss(run: Run, params: TensorDict, batch: TensorDict, mask: Tensor, hyper: TensorDict) -> tuple[Tensor, Logs]:
    """Clipped surrogate, value error and entropy bonus of a minibatch."""
    log_prob, entropy = evaluate(run.policy, params, batch)
    old_log_prob = joint(batch["sample_log_prob"], batch)
    terms = log_prob, old_log_prob, batch["advantage"], entropy, value(run.policy, params, batch)
    numbers = {name: hyper[name] for name in ("clip_coef", "vf_coef", "ent_coef")}
    if run.algorithm.choices.clip_vloss:
        return ppo_loss_clipped_value(*terms, batch["value"], batch["value_target"], mask, **numbers)
    return ppo_loss(*terms, batch["value_target"], mask, **numbers)


def update(run: Run, state: TensorDict, rollout: TensorDict) -> tuple[TensorDict, Logs]:
    """Learn from a rollout: `n_epochs` passes of gradient steps on minibatches of its steps."""
    choices = run.algorithm.choices
    if choices.normalize_reward:
        state, rollout = scaled_rewards(state, rollout)
    rows = advantages(run, cast(TensorDict, state["hyper"]), rollout)
    whole = standardized_minibatch if choices.normalize_advantage == "minibatch" else None
    return minibatch_sgd(run, state, rows, loss, choices.sgd, whole=whole, distance="approx_kl", limit="target_kl")


@register_algorithm("ppo")
def ppo(cfg: PPOConfig) -> Algorithm:
    """PPO; the policy needs a critic."""
    apart = None if cfg.critic_max_grad_norm is None else {"actor": None, "critic": (("critic",),)}
    sgd = sgd_choices(cfg, groups_of(cfg, apart))
    return Algorithm(
        choices=Choices(cfg.normalize_advantage, cfg.clip_vloss, cfg.normalize_reward, sgd),
        init=partial(init, cfg),
        iterate=on_policy(collect, update),
        kinds={**LEARNER_KINDS, **REWARD_NORM_KINDS, "learning_rate": Kind.COUNTER},
        gradient_steps=partial(gradient_steps, cfg),
        as_one=True,
    )
