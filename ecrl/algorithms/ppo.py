"""Proximal policy optimisation, with GAE, a clipped surrogate and minibatch epochs.

Source: Schulman et al. 2017, arXiv:1707.06347.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
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
    standardize_over_ranks,
    with_scaled_rewards,
)
from ecrl.algorithms.minibatch_sgd import (
    SGD,
    check_batch_size,
    gradient_steps,
    minibatch_epochs,
    sgd_choices,
)
from ecrl.algorithms.optimizer import Group, GroupSettings, groups_of, learning_state
from ecrl.algorithms.optimizer_config import check_rate
from ecrl.algorithms.ppo_tokens import token_loss, token_weights
from ecrl.algorithms.ratios import RATIOS, ClippedConfig, Ratio
from ecrl.algorithms.rows import check_log_prob
from ecrl.algorithms.state_kinds import Kind
from ecrl.config.model import Fraction, NonNegative, Positive
from ecrl.errors import ConfigError
from ecrl.kernels import compute_gae, ppo_loss, ppo_loss_clipped_value
from ecrl.registry import register_algorithm
from ecrl.types import Logs

_NUMBERS = ("gamma", "gae_lambda", "clip_coef", "clip_coef_high", "dual_clip", "ent_coef", "vf_coef", "target_kl")
_CRITIC_KEYS = ("critic_learning_rate", "critic_max_grad_norm")


class PPOConfig(ClippedConfig):
    """Hyperparameters of PPO. Float hyperparameters are stored in the state and may change during a run."""

    default_policy: ClassVar = {"name": "actor_critic"}

    target_kl: Positive | None = Field(
        default=None,
        description=(
            "KL between the new policy and the policy that acted, in nats, above which learning from a rollout stops; "
            "no limit if absent"
        ),
    )
    gamma: Fraction = Field(default=0.99, description="discount per step")
    gae_lambda: Fraction = Field(
        default=0.95,
        description="weight of later steps in advantages; 0 gives one-step estimates, 1 gives Monte-Carlo estimates",
    )
    ratio: Literal["action", "token"] = Field(
        default="action", description="probability ratio of each action, or of each token of an action"
    )
    clip_vloss: bool = Field(default=False, description="also clip the change of the critic's values to clip_coef")
    ent_coef: NonNegative = Field(default=0.01, description="weight of the entropy bonus")
    vf_coef: NonNegative = Field(default=0.5, description="weight of the value loss")
    critic_learning_rate: Positive | None = Field(
        default=None,
        description="step size of the critic, before the schedule; the actor's step size if absent; if given, the "
        "gradients of the actor and the critic are clipped separately",
    )
    critic_max_grad_norm: Positive | None = Field(
        default=None,
        description="largest norm of the critic's gradients; if given, max_grad_norm clips only the other gradients",
    )
    normalize_advantage: Literal["rollout", "minibatch", "none"] = Field(
        default="rollout", description="steps over which advantages are standardised: rollout, minibatch or none"
    )
    normalize_reward: bool = Field(default=False, description="divide rewards by the standard deviation of returns")

    @model_validator(mode="after")
    def _critic_rate_within_its_bounds(self) -> "PPOConfig":
        if self.critic_learning_rate is not None:
            check_rate("critic_learning_rate", self.critic_learning_rate, self.lr_scheduler)
        return self


class Choices(NamedTuple):
    """Settings of a config that determine the compiled graph.

    Attributes:
        normalize_advantage: steps over which advantages are standardised: rollout, minibatch or none.
        ppo_loss: the kernel `ppo_loss`, or `ppo_loss_clipped_value`.
        critic_fields: pairs of an argument of `ppo_loss` and the field of the minibatch for this argument. The
            arguments are the value target and, for `ppo_loss_clipped_value`, the value at collection.
        ratio: functions of the probability ratio.
        weights: function that weights the tokens of each step, or None if the loss needs no weights.
        loss: `loss`, or `token_loss`.
        sgd: settings of the minibatches and the optimiser groups.
    """

    normalize_advantage: str
    ppo_loss: Callable[..., tuple[Tensor, Logs]]
    critic_fields: tuple[tuple[str, str], ...]
    ratio: Ratio
    weights: Callable[[Run, TensorDict, Tensor], Tensor] | None
    loss: Callable[..., tuple[Tensor, Logs]]
    sgd: SGD


def init(cfg: PPOConfig, run: Run, key: Tensor) -> dict[str, Any]:
    """Return the parameters, optimiser state, hyperparameters and, if rewards are scaled, the reward statistics.

    Raises: ConfigError if the policy, `batch_size` or a setting of the critic's optimiser does not suit the run.
    """
    if run.policy.value is None:
        raise ConfigError(
            "policy.name: this policy has no critic, which ppo needs; use actor_critic, or recurrent with a critic"
        )
    check_log_prob(run.policy, "ppo")
    check_batch_size(cfg, run.static.row_steps)
    params = run.policy.init(rng.fold_in(key, rng.INIT))
    check_critic(params, cfg)
    numbers = {name: getattr(cfg, name) for name in _NUMBERS}
    groups = run.algorithm.choices.sgd.groups
    critic = GroupSettings(learning_rate=cfg.critic_learning_rate, max_grad_norm=cfg.critic_max_grad_norm)
    own = {"critic": critic} if len(groups) > 1 else {}
    state = learning_state(cfg, params, numbers, key.device, groups, own)
    return state | ({"norm": reward_norm_init(run.static.num_envs, key.device)} if cfg.normalize_reward else {})


def check_critic(params: TensorDict, cfg: PPOConfig) -> None:
    """Raise ConfigError if the critic's optimiser has settings, but the policy has no parameters `critic`."""
    for key in _CRITIC_KEYS:
        if getattr(cfg, key) is not None and "critic" not in params:
            have = ", ".join(sorted(map(str, params.keys())))
            raise ConfigError(f"algorithm.cfg.{key}: the policy has no parameters 'critic', only {have}; leave it out")


def advantages(run: Run, hyper: TensorDict, steps: TensorDict) -> dict[str, Tensor]:
    """Return the advantages, the value targets and the mask of the steps to learn from, each `[N, T]`.

    If the loss weights its tokens, the result also has `weight`, the weight of the tokens of each step.
    """
    advantage, value_target = compute_gae(steps, hyper["gamma"], hyper["gae_lambda"])
    mask = steps["mask"][:, :-1] if "mask" in steps else torch.ones_like(steps["done"][:, :-1])
    choices = run.algorithm.choices
    if choices.normalize_advantage == "rollout":
        advantage = standardize_over_ranks(advantage, mask)
    fields = {"advantage": advantage, "value_target": value_target, "mask": mask}
    if choices.weights is not None:
        fields["weight"] = choices.weights(run, steps, mask)
    return fields


def loss(run: Run, params: TensorDict, minibatch: TensorDict, mask: Tensor, hyper: TensorDict) -> tuple[Tensor, Logs]:
    """Return the loss and the logs of a minibatch.

    The loss is the negated clipped surrogate plus the value loss minus the entropy bonus.
    """
    choices = run.algorithm.choices
    log_prob, entropy, value = run.policy.evaluate_and_value_rows(params, minibatch)
    return choices.ppo_loss(
        log_prob=log_prob,
        old_log_prob=minibatch["sample_log_prob"],
        advantage=minibatch["advantage"],
        entropy=entropy,
        value=value,
        **{name: minibatch[field] for name, field in choices.critic_fields},
        mask=mask,
        clip_coef=hyper["clip_coef"],
        vf_coef=hyper["vf_coef"],
        ent_coef=hyper["ent_coef"],
    )


def update(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """Learn from a batch in `n_epochs` passes over its minibatches, with one gradient step per minibatch."""
    choices = run.algorithm.choices
    fields = advantages(run, state["hyper"], batch["steps"])
    whole = {"advantage": standardize_over_ranks} if choices.normalize_advantage == "minibatch" else {}
    return minibatch_epochs(
        run,
        state,
        batch,
        fields,
        choices.loss,
        choices.sgd,
        whole=whole,
        distance="approx_kl",
        limit="target_kl",
        to_rows=choices.ratio.rows_of,
    )


def groups(cfg: PPOConfig) -> tuple[Group, ...]:
    """Return one optimiser group for all parameters, or two if the critic has its own settings."""
    apart = any(getattr(cfg, key) is not None for key in _CRITIC_KEYS)
    return groups_of(cfg, {"actor": None, "critic": (("critic",),)} if apart else None)


@register_algorithm("ppo")
def ppo(cfg: PPOConfig) -> Algorithm:
    """Build the PPO algorithm. The policy needs a critic."""
    kernel = ppo_loss_clipped_value if cfg.clip_vloss else ppo_loss
    clipped_fields = (("old_value", "value"),) if cfg.clip_vloss else ()
    is_default = (cfg.ratio, cfg.clip_coef_high, cfg.dual_clip) == ("action", None, None)
    rates = {"learning_rate": Kind.COUNTER, "critic_learning_rate": Kind.COUNTER}
    return Algorithm(
        choices=Choices(
            normalize_advantage=cfg.normalize_advantage,
            ppo_loss=kernel,
            critic_fields=(("value_target", "value_target"), *clipped_fields),
            ratio=RATIOS[cfg.ratio],
            weights=None if is_default else token_weights,
            loss=loss if is_default else token_loss,
            sgd=sgd_choices(cfg, groups(cfg)),
        ),
        init=partial(init, cfg),
        iterate=on_policy(collect, with_scaled_rewards(update) if cfg.normalize_reward else update),
        kinds={**LEARNER_KINDS, **REWARD_NORM_KINDS, **rates},
        gradient_steps=partial(gradient_steps, cfg),
        as_one=True,
    )
