"""Group-relative policy optimisation, whose baseline is the mean return of environments with equal initial states.

The members of a group have the same initial state and environment noise, and differ only in their actions. GRPO needs
no critic.

Settings of the config give the variants DAPO, Dr. GRPO, GSPO and RLOO. All variants minimise this loss:

    loss = mean(objective + kl_coef * kl_k3 - ent_coef * entropy)

The objective is the negated clipped surrogate, with one probability ratio per action, token or episode (`ratio`).
`kl_k3` is an estimate of the KL divergence from the reference policy. `loss_mean` selects how the mean over tokens is
taken. A token is a whole action if `ratio` is "action".

Source: Shao et al. 2024, arXiv:2402.03300, applied to environment steps instead of tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import LEARNER_KINDS, Algorithm, Run, collect, from_reset, on_policy
from ecrl.algorithms.grpo_variants import BASELINES, WEIGHTS, Baseline, Weights, variant_advantages, weighted_loss
from ecrl.algorithms.minibatch_sgd import (
    SGD,
    check_batch_size,
    gradient_steps,
    minibatch_epochs,
    sgd_choices,
)
from ecrl.algorithms.optimizer import learning_state
from ecrl.algorithms.ratios import RATIOS, ClippedConfig, Ratio
from ecrl.algorithms.reference import reference_log_prob, refreshed_reference
from ecrl.algorithms.rows import check_log_prob
from ecrl.algorithms.state_kinds import Kind
from ecrl.config.model import Count, Fraction, NonNegative, Positive
from ecrl.errors import ConfigError
from ecrl.kernels import first_episode_mask, grpo_advantages, grpo_loss
from ecrl.policies import acting_params
from ecrl.registry import register_algorithm
from ecrl.types import Logs

_NUMBERS = ("gamma", "clip_coef", "ent_coef", "kl_coef", "eps", "target_kl")
_NEW_NUMBERS = ("clip_coef_high", "dual_clip", "min_group_score", "max_group_score")


class GRPOConfig(ClippedConfig):
    """Hyperparameters of GRPO. Float hyperparameters are stored in the state and may change during a run."""

    default_policy: ClassVar = {"name": "actor_only"}

    inert: ClassVar = {"gae_lambda": "GRPO compares the returns of a group, without a generalised advantage estimate"}

    target_kl: Positive | None = Field(
        default=None,
        description=(
            "KL between the new policy and the policy that acted, in nats, above which learning from a rollout stops; "
            "no limit if absent"
        ),
    )
    gamma: Fraction = Field(default=0.99, description="discount per step")
    ratio: Literal["action", "token", "sequence"] = Field(
        default="action",
        description="probability ratio of each action, of each token of an action, or of a whole episode (GSPO)",
    )
    loss_mean: Literal["token", "sequence", "fixed_length"] = Field(
        default="token",
        description=(
            "how the loss is averaged: token, over all tokens (DAPO); sequence, over the tokens of each episode, and "
            "then over the episodes (GRPO); fixed_length, like sequence, but the sum over an episode is divided by the "
            "largest possible length (Dr. GRPO); an action is one token if ratio is action"
        ),
    )
    advantage: Literal["return_to_go", "episode"] = Field(
        default="return_to_go",
        description=(
            "what a group compares: return_to_go, the returns from each step on; episode, the returns of whole episodes"
        ),
    )
    baseline: Literal["standardized", "centered", "leave_one_out"] = Field(
        default="standardized",
        description=(
            "standardized: subtract the group's mean and divide by its standard deviation; centered: only subtract the "
            "mean (Dr. GRPO); leave_one_out: subtract the mean of the other members (RLOO)"
        ),
    )
    min_group_score: float | None = Field(
        default=None,
        description="learn only from groups whose mean sum of rewards is above this score (DAPO); no limit if absent",
    )
    max_group_score: float | None = Field(
        default=None,
        description="learn only from groups whose mean sum of rewards is below this score (DAPO); no limit if absent",
    )
    drop_masked: bool = Field(
        default=False,
        description=(
            "draw minibatches only from unmasked steps, which takes fewer gradient steps if some steps are masked"
        ),
    )
    ent_coef: NonNegative = Field(default=0.0, description="weight of the entropy bonus")
    kl_coef: NonNegative = Field(
        default=0.02, description="weight of the KL divergence from the reference policy; 0 means no reference"
    )
    ref_update_freq: Count | None = Field(
        default=None,
        description="iterations between two refreshes, which make the reference a copy of the policy; no refreshes if "
        "absent",
    )
    group_size: int = Field(
        default=4,
        ge=2,
        lt=2**31,
        description="number of environments per group, which share an initial state; must divide trainer.num_envs",
    )
    eps: NonNegative = Field(
        default=1e-8, description="number added to the standard deviation of a group's returns, in reward units"
    )
    reset_every_rollout: bool = Field(default=True, description="reset every environment before each rollout")
    truncate_at_first_done: bool = Field(
        default=True, description="learn only from the first episode of each environment in a rollout"
    )

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Self:
        whole = {"ratio": "sequence", "advantage": "episode"}
        for key, value in whole.items():
            if getattr(self, key) == value and not (self.reset_every_rollout and self.truncate_at_first_done):
                raise ValueError(
                    f"{key} {value!r} needs one whole episode per environment; set reset_every_rollout and "
                    "truncate_at_first_done to true"
                )
        if self.ratio == "sequence" and self.dual_clip is not None:
            raise ValueError("dual_clip is for the ratios action and token; leave it out with ratio 'sequence'")
        low, high = self.min_group_score, self.max_group_score
        if low is not None and high is not None and low >= high:
            raise ValueError(f"min_group_score {low} is not below max_group_score {high}; change one of them")
        return self

    @property
    def needs_episodes(self) -> bool:
        """True if minibatches must contain whole episodes, to compute the probability ratio of an episode."""
        return self.ratio == "sequence"


class Choices(NamedTuple):
    """Settings of a config that determine the compiled graph.

    Attributes:
        has_reference: True if the loss penalises the KL divergence from a reference policy.
        truncate_at_first_done: True if the algorithm learns only from the first episode of each environment in a
            rollout.
        advantages: `step_advantages`, or `variant_advantages`.
        scores_episodes: True if a group compares the returns of whole episodes.
        baseline: function that subtracts the baseline of a group, or None with `step_advantages`.
        ratio: functions of the probability ratio.
        weights: function that weights the steps, or None if all steps have the same weight.
        loss: `loss`, or `weighted_loss`.
        sgd: settings of the minibatches and the optimiser.
    """

    has_reference: bool
    truncate_at_first_done: bool
    advantages: Callable[[Run, TensorDict, TensorDict], tuple[Tensor, Tensor]]
    scores_episodes: bool
    baseline: Baseline | None
    ratio: Ratio
    weights: Weights | None
    loss: Callable[..., tuple[Tensor, Logs]]
    sgd: SGD


def check_groups(run: Run, cfg: GRPOConfig) -> None:
    """Raise ConfigError if `group_size` does not divide `num_envs`, or if a group would not share initial states."""
    num_envs, keys = run.static.num_envs, ("reset_every_rollout", "truncate_at_first_done")
    if num_envs % cfg.group_size:
        raise ConfigError(
            f"algorithm.cfg.group_size: {cfg.group_size} does not divide trainer.num_envs {num_envs}; use a divisor"
        )
    off = [key for key in keys if not getattr(cfg, key)]
    if off and not run.env.lockstep:
        raise ConfigError(
            f"algorithm.cfg.{off[0]}: false, but episodes of this environment end at different times, so the "
            "members of a group would no longer share an initial state; use true"
        )


def init(cfg: GRPOConfig, run: Run, key: Tensor) -> dict[str, Any]:
    """Return parameters, optimiser state, hyperparameters and, if `kl_coef` is not 0, the reference parameters.

    The reference has its own observation statistics, so new statistics do not change the reference policy.

    Raises: ConfigError if `group_size`, `batch_size` or the policy does not suit the run.
    """
    check_groups(run, cfg)
    check_log_prob(run.policy, "grpo")
    check_batch_size(cfg, run.static.row_steps)
    params = run.policy.init(rng.fold_in(key, rng.INIT))
    numbers = {name: getattr(cfg, name) for name in (*_NUMBERS, *_NEW_NUMBERS)} | {"kl_coef": cfg.kl_coef or None}
    state = learning_state(cfg, params, numbers, key.device, run.algorithm.choices.sgd.groups)
    if cfg.kl_coef and cfg.ref_update_freq is not None:
        state["hyper"]["ref_update_freq"] = torch.tensor(cfg.ref_update_freq, device=key.device)
    norm_init = run.policy.norm_init
    norm = TensorDict({} if norm_init is None else {"obs": norm_init(key.device)}, [])
    return state | ({"ref_params": acting_params(params, norm).clone()} if cfg.kl_coef else {})


def collect_groups(run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """Collect a batch. If `truncate_at_first_done` is set, mask all but the first episode of each environment."""
    state, batch = collect(run, state)
    if run.algorithm.choices.truncate_at_first_done:
        steps = cast(TensorDict, batch["steps"])
        first = first_episode_mask(steps["done"])
        mask = first & steps["mask"] if "mask" in steps else first
        batch = batch.copy().set(("steps", "mask"), mask)
    return state, batch


def step_advantages(run: Run, hyper: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor]:
    """Return the advantages and the mask of steps to learn from, each `[N, T]`.

    Used with the defaults of `advantage`, `baseline`, `min_group_score` and `max_group_score`.
    """
    return grpo_advantages(steps, gamma=hyper["gamma"], group_size=run.algorithm.group_size, eps=hyper["eps"])


def advantages(run: Run, state: TensorDict, batch: TensorDict) -> dict[str, Tensor]:
    """Return the advantages, the mask of steps to learn from and any reference log-probabilities, each `[N, T]`.

    If the setting `ratio` is not "action", the reference log-probabilities have token axes, `[N, T, ...]`. If the loss
    weights its tokens, the result also has `weight`, the weight of the tokens of each step.
    """
    choices, steps = run.algorithm.choices, cast(TensorDict, batch["steps"])
    advantage, mask = choices.advantages(run, cast(TensorDict, state["hyper"]), steps)
    fields = {"advantage": advantage, "mask": mask}
    if choices.has_reference:
        fields["ref_log_prob"] = reference_log_prob(run, state, batch, choices.ratio.evaluate)
    if choices.weights is not None:
        fields["weight"] = choices.weights(run, steps, mask)
    return fields


def loss(run: Run, params: TensorDict, minibatch: TensorDict, mask: Tensor, hyper: TensorDict) -> tuple[Tensor, Logs]:
    """Return the loss and the logs of a minibatch, with one ratio per action and a mean over actions.

    The loss is the negated clipped surrogate plus the KL penalty minus the entropy bonus.
    """
    log_prob, entropy = run.policy.evaluate_rows(params, minibatch)
    ref_log_prob = minibatch["ref_log_prob"] if "ref_log_prob" in minibatch else log_prob.detach()
    return grpo_loss(
        log_prob=log_prob,
        old_log_prob=minibatch["sample_log_prob"],
        ref_log_prob=ref_log_prob,
        advantage=minibatch["advantage"],
        entropy=entropy,
        mask=mask,
        clip_coef=hyper["clip_coef"],
        kl_coef=hyper.get("kl_coef", 0.0),
        ent_coef=hyper["ent_coef"],
    )


def update(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """Learn from a batch in `n_epochs` passes. Refresh the reference policy every `ref_update_freq` iterations.

    If a group score limit is set, the log `kept_groups` is the share of groups with at least one unmasked step.
    """
    choices, batch = run.algorithm.choices, batch.exclude(("steps", "value"))
    fields = advantages(run, state, batch)
    state, logs = minibatch_epochs(
        run,
        state,
        batch,
        fields,
        choices.loss,
        choices.sgd,
        distance="approx_kl",
        limit="target_kl",
        to_rows=choices.ratio.rows_of,
    )
    hyper = cast(TensorDict, state["hyper"])
    if "min_group_score" in hyper or "max_group_score" in hyper:
        logs = logs | {
            "kept_groups": fields["mask"].any(-1).reshape(-1, run.algorithm.group_size).any(-1).float().mean()
        }
    freq = hyper.get("ref_update_freq", None)
    return state if freq is None else refreshed_reference(state, freq), logs


def is_weighted(cfg: GRPOConfig) -> bool:
    """Return True if a config needs `weighted_loss`."""
    return (cfg.ratio, cfg.loss_mean, cfg.clip_coef_high, cfg.dual_clip) != ("action", "token", None, None)


def has_variant_advantages(cfg: GRPOConfig) -> bool:
    """Return True if a config needs `variant_advantages`."""
    limits = cfg.min_group_score, cfg.max_group_score
    return (cfg.advantage, cfg.baseline, *limits) != ("return_to_go", "standardized", None, None)


@register_algorithm("grpo")
def grpo(cfg: GRPOConfig) -> Algorithm:
    """Build the GRPO algorithm. The policy needs no critic."""
    return Algorithm(
        choices=Choices(
            has_reference=bool(cfg.kl_coef),
            truncate_at_first_done=cfg.truncate_at_first_done,
            advantages=variant_advantages if has_variant_advantages(cfg) else step_advantages,
            scores_episodes=cfg.advantage == "episode",
            baseline=BASELINES[cfg.baseline] if has_variant_advantages(cfg) else None,
            ratio=RATIOS[cfg.ratio],
            weights=WEIGHTS[cfg.loss_mean] if is_weighted(cfg) else None,
            loss=weighted_loss if is_weighted(cfg) else loss,
            sgd=sgd_choices(cfg, drop_masked=cfg.drop_masked),
        ),
        init=partial(init, cfg),
        iterate=on_policy(from_reset(collect_groups) if cfg.reset_every_rollout else collect_groups, update),
        kinds={**LEARNER_KINDS, "ref_params": Kind.LEARNED, "learning_rate": Kind.COUNTER},
        group_size=cfg.group_size,
        gradient_steps=partial(gradient_steps, cfg),
        as_one=True,
    )
