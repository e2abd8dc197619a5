"""Group-relative policy optimisation, whose baseline is the mean return of environments with the same start.

The members of a group share their start and the noise of the environment, and differ only in their actions. GRPO needs
no critic.

Source: Shao et al. 2024, arXiv:2402.03300, applied to environment steps instead of tokens.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import LEARNER_KINDS, Algorithm, Run, collect, from_reset, on_policy
from ecrl.algorithms.logprob_gap import logprob_gap
from ecrl.algorithms.minibatch_sgd import (
    SGD,
    MinibatchConfig,
    check_batch_size,
    gradient_steps,
    minibatch_epochs,
    sgd_choices,
)
from ecrl.algorithms.optimizer import learning_state
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


class GRPOConfig(MinibatchConfig):
    """Hyperparameters of GRPO. Numeric hyperparameters are stored in the state and may change during a run."""

    target_kl: Positive | None = Field(
        default=None,
        description="KL of the update, in nats, above which learning from a rollout stops; no limit if absent",
    )
    gamma: Fraction = Field(default=0.99, description="discount per step")
    clip_coef: Positive = Field(default=0.2, description="distance from 1 at which the probability ratio is clipped")
    ent_coef: NonNegative = Field(default=0.0, description="weight of the entropy bonus")
    kl_coef: NonNegative = Field(
        default=0.02, description="weight of the KL to the reference policy; 0 means no reference"
    )
    ref_update_freq: Count | None = Field(
        default=None, description="iterations after which the reference becomes a copy of the policy; never if absent"
    )
    group_size: int = Field(
        default=4, ge=2, lt=2**31, description="environments per group, which share a start; divides num_envs"
    )
    eps: NonNegative = Field(
        default=1e-8, description="added to the standard deviation of a group's returns, in reward units"
    )
    reset_every_rollout: bool = Field(default=True, description="reset every environment before each rollout")
    truncate_at_first_done: bool = Field(default=True, description="learn only from the first episode of each rollout")


class Choices(NamedTuple):
    """Settings of a config that determine the compiled graph."""

    has_reference: bool
    truncate_at_first_done: bool
    sgd: SGD


def check_groups(run: Run, cfg: GRPOConfig) -> None:
    """Raise ConfigError if the members of a group would not share their starts."""
    num_envs, keys = run.static.num_envs, ("reset_every_rollout", "truncate_at_first_done")
    if num_envs % cfg.group_size:
        raise ConfigError(f"algorithm.cfg.group_size: {cfg.group_size} does not divide trainer.num_envs {num_envs}")
    off = [key for key in keys if not getattr(cfg, key)]
    if off and not run.env.lockstep:
        raise ConfigError(
            f"algorithm.cfg.{off[0]}: false, but episodes of this environment end at different times, so the "
            "members of a group would no longer share a start; use true"
        )


def init(cfg: GRPOConfig, run: Run, key: Tensor) -> dict[str, Any]:
    """Return parameters, optimiser state, hyperparameters and, if `kl_coef` is not 0, the reference parameters.

    The reference keeps its own observation statistics, so that new statistics do not change the reference policy.
    """
    check_groups(run, cfg)
    check_log_prob(run.policy, "grpo")
    check_batch_size(cfg, run.static.row_steps)
    params = run.policy.init(rng.fold_in(key, rng.INIT))
    numbers = {name: getattr(cfg, name) for name in _NUMBERS} | {"kl_coef": cfg.kl_coef or None}
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


def advantages(run: Run, state: TensorDict, batch: TensorDict) -> dict[str, Tensor]:
    """Return the advantages, the mask of steps to learn from and any reference log-probabilities, each `[N, T]`."""
    hyper, group_size = cast(TensorDict, state["hyper"]), run.algorithm.group_size
    advantage, mask = grpo_advantages(batch["steps"], gamma=hyper["gamma"], group_size=group_size, eps=hyper["eps"])
    if not run.algorithm.choices.has_reference:
        return {"advantage": advantage, "mask": mask}
    return {"advantage": advantage, "mask": mask, "ref_log_prob": reference_log_prob(run, state, batch)}


def loss(run: Run, params: TensorDict, minibatch: TensorDict, mask: Tensor, hyper: TensorDict) -> tuple[Tensor, Logs]:
    """Return the loss and the logs of a minibatch.

    The loss is the clipped surrogate plus the KL penalty minus the entropy bonus.
    """
    log_prob, entropy = run.policy.evaluate_rows(params, minibatch)
    ref_log_prob = minibatch["ref_log_prob"] if "ref_log_prob" in minibatch else log_prob.detach()
    return grpo_loss(
        log_prob,
        minibatch["sample_log_prob"],
        ref_log_prob,
        minibatch["advantage"],
        entropy,
        mask,
        clip_coef=hyper["clip_coef"],
        kl_coef=hyper.get("kl_coef", 0.0),
        ent_coef=hyper["ent_coef"],
    )


def update(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """Learn from a batch in `n_epochs` passes. Refresh the reference policy every `ref_update_freq` iterations."""
    choices, batch = run.algorithm.choices, batch.exclude(("steps", "value"))
    fields, gap = advantages(run, state, batch), logprob_gap(run, state, batch)
    state, logs = minibatch_epochs(
        run, state, batch, fields, loss, choices.sgd, distance="approx_kl", limit="target_kl"
    )
    freq = cast(TensorDict, state["hyper"]).get("ref_update_freq", None)
    return state if freq is None else refreshed_reference(state, freq), logs | gap


@register_algorithm("grpo")
def grpo(cfg: GRPOConfig) -> Algorithm:
    """Build the GRPO algorithm. The policy needs no critic."""
    return Algorithm(
        choices=Choices(bool(cfg.kl_coef), cfg.truncate_at_first_done, sgd_choices(cfg)),
        init=partial(init, cfg),
        iterate=on_policy(from_reset(collect_groups) if cfg.reset_every_rollout else collect_groups, update),
        kinds={**LEARNER_KINDS, "ref_params": Kind.LEARNED, "learning_rate": Kind.COUNTER},
        group_size=cfg.group_size,
        gradient_steps=partial(gradient_steps, cfg),
        as_one=True,
    )
