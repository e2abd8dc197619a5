"""Proximal policy optimisation: GAE, clipped surrogate, minibatch epochs.

Source: Schulman et al. 2017, arXiv:1707.06347.
"""

from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import Algorithm, Parts, reward_norm_init, scaled_rewards
from ecrl.algorithms.minibatch_sgd import (
    Learner,
    MinibatchConfig,
    check_groups,
    gradient_steps,
    learn,
    learner_of,
    passes,
)
from ecrl.algorithms.optimizer_config import learning_state
from ecrl.config.model import Fraction, NonNegative, Positive
from ecrl.distributed import all_sum
from ecrl.errors import ConfigError
from ecrl.kernels import compute_gae, ppo_loss, ppo_loss_clipped_value, standardize, transitions
from ecrl.policies import Policy
from ecrl.registry import register_algorithm
from ecrl.types import Logs

_ADVANTAGE_EPS = 1e-8
_NUMBERS = ("gamma", "gae_lambda", "clip_coef", "ent_coef", "vf_coef", "critic_max_grad_norm", "target_kl")


class PPOConfig(MinibatchConfig):
    """Hyperparameters; the numbers live in the state and may change during a run."""

    gamma: Fraction = Field(default=0.99, description="discount per step")
    gae_lambda: Fraction = Field(default=0.95, description="0: one-step advantages, 1: Monte-Carlo")
    clip_coef: Positive = Field(default=0.2, description="half-width of the ratio's trust interval")
    clip_vloss: bool = Field(default=False, description="hold the critic within clip_coef of what it said before too")
    ent_coef: NonNegative = Field(default=0.01, description="weight of the entropy bonus")
    vf_coef: NonNegative = Field(default=0.5, description="weight of the critic's error")
    critic_max_grad_norm: Positive | None = Field(
        default=None, description="largest norm of the critic's gradients apart; max_grad_norm is then the others'"
    )
    normalize_advantage: Literal["rollout", "minibatch", "none"] = Field(
        default="rollout", description="over what advantages are standardised: rollout, minibatch or none"
    )
    normalize_reward: bool = Field(default=False, description="divide rewards by the spread of discounted returns")


class Variant(NamedTuple):
    """The choices of a config that shape the loss."""

    normalize_advantage: str
    clip_vloss: bool


def init(parts: Parts, key: Tensor) -> dict[str, Any]:
    """Parameters, optimiser state and hyperparameters."""
    if parts.policy.value is None:
        raise ConfigError(f"policy.name: {parts.cfg.policy.name} has no critic, which ppo needs; use actor_critic")
    cfg: Any = parts.cfg.algorithm.cfg
    params = parts.policy.init(rng.fold_in(key, rng.INIT))
    check_groups(params, cfg)
    state = learning_state(cfg, params, {name: getattr(cfg, name) for name in _NUMBERS}, key.device)
    norm = {"norm": reward_norm_init(parts.cfg.trainer.num_envs, key.device)} if cfg.normalize_reward else {}
    return state | norm


def _rows(rollout: TensorDict, hyper: TensorDict, variant: Variant) -> TensorDict:
    """The rollout as `[N * T]` rows with advantages and value targets."""
    advantage, value_target = compute_gae(rollout, hyper["gamma"], hyper["gae_lambda"])
    steps = transitions(rollout)
    mask = steps["mask"] if "mask" in steps else torch.ones_like(steps["done"])
    if variant.normalize_advantage == "rollout":
        advantage = standardize(advantage, mask, eps=_ADVANTAGE_EPS, total=all_sum)
    rows = steps.select("obs", "action", "sample_log_prob", "value", "done")
    return rows.update({"advantage": advantage, "value_target": value_target, "mask": mask}).reshape(-1)


def _prepare(variant: Variant, rows: TensorDict, index: Tensor, real: Tensor) -> dict[str, Tensor]:
    if variant.normalize_advantage != "minibatch":
        return {}
    chosen = rows["advantage"][index], rows["mask"][index] & real
    return {"advantage": standardize(*chosen, eps=_ADVANTAGE_EPS, total=all_sum)}


def _loss(
    policy: Policy, variant: Variant, params: TensorDict, batch: TensorDict, mask: Tensor, hyper: TensorDict
) -> tuple[Tensor, Logs]:
    empty = TensorDict({}, [])
    log_prob, entropy = policy.evaluate(params, empty, batch["obs"], batch["action"], batch["done"])
    value = policy.value(params, empty, batch["obs"])  # pyright: ignore
    judged = (log_prob, batch["sample_log_prob"], batch["advantage"], entropy, value)
    numbers = {name: hyper[name] for name in ("clip_coef", "vf_coef", "ent_coef")}
    if variant.clip_vloss:
        return ppo_loss_clipped_value(*judged, batch["value"], batch["value_target"], mask, **numbers)
    return ppo_loss(*judged, batch["value_target"], mask, **numbers)


def _learn(learner: Learner, state: TensorDict, rate: Tensor, rollout: TensorDict) -> tuple[TensorDict, Tensor, Logs]:
    return passes(learner, state, rate, _rows(rollout, state["hyper"], learner.variant))


def update(parts: Parts, state: TensorDict, rollout: TensorDict) -> tuple[TensorDict, Logs]:
    """`n_epochs` passes of minibatch steps over the rollout."""
    cfg: Any = parts.cfg.algorithm.cfg
    if cfg.normalize_reward:
        rollout, norm = parts.jit(scaled_rewards)(state.select("norm", "hyper"), rollout)
        state = state.copy().set("norm", norm)
    learner = learner_of(parts, _loss, Variant(cfg.normalize_advantage, cfg.clip_vloss), _prepare)
    return learn(parts, state, _learn, learner, rollout)


@register_algorithm("ppo")
def ppo(cfg: PPOConfig) -> Algorithm:
    """PPO; the policy needs a critic."""
    return Algorithm(init, update, gradient_steps=gradient_steps, as_one=True)
