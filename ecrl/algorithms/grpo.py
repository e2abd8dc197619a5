"""Group-relative policy optimisation: the mean return of environments with the same start is the baseline.

The members of a group share their start and the noise of the environment and differ only in their actions. No critic is
needed. Source: Shao et al. 2024, arXiv:2402.03300, on the steps of an environment in place of tokens.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import (
    LEARNER_KINDS,
    Algorithm,
    Run,
    collect,
    initial_carry,
    on_policy,
    start_keys,
    steps_taken,
)
from ecrl.algorithms.minibatch_sgd import SGD, MinibatchConfig, gradient_steps, minibatch_sgd, sgd_choices
from ecrl.algorithms.optimizer import learning_state
from ecrl.algorithms.rows import check_log_prob, evaluate, joint, rows_of
from ecrl.algorithms.state_kinds import Kind
from ecrl.config.model import Count, Fraction, NonNegative, Positive
from ecrl.envs import restart
from ecrl.errors import ConfigError
from ecrl.kernels import first_episode_mask, grpo_advantages, grpo_loss, restarted
from ecrl.kernels.scan_loop import in_chunks
from ecrl.policies import acting_params
from ecrl.pytree import replaced
from ecrl.registry import register_algorithm
from ecrl.types import Logs

_NUMBERS = ("gamma", "clip_coef", "ent_coef", "kl_coef", "eps", "target_kl")


class GRPOConfig(MinibatchConfig):
    """Hyperparameters. Numbers live in the state and may change during a run."""

    target_kl: Positive | None = Field(
        default=None, description="stop learning from a rollout once the policy has moved this far, nats"
    )
    gamma: Fraction = Field(default=0.99, description="discount per step")
    clip_coef: Positive = Field(default=0.2, description="half-width of the ratio's trust interval")
    ent_coef: NonNegative = Field(default=0.0, description="weight of the entropy bonus")
    kl_coef: NonNegative = Field(default=0.02, description="weight of the distance from the reference policy; 0: none")
    ref_update_freq: Count | None = Field(
        default=None, description="iterations between two refreshes of the reference; it stays the first if absent"
    )
    group_size: int = Field(default=4, ge=2, lt=2**31, description="environments that start alike; divides num_envs")
    eps: NonNegative = Field(default=1e-8, description="added to the spread of a group's returns, reward units")
    reset_every_rollout: bool = Field(default=True, description="start every environment anew for each rollout")
    truncate_at_first_done: bool = Field(default=True, description="learn only from the first episode of each rollout")


class Choices(NamedTuple):
    """The choices of a config that shape the graph."""

    has_reference: bool
    ref_update_freq: int | None
    reset_every_rollout: bool
    truncate_at_first_done: bool
    sgd: SGD


def check_groups(run: Run, cfg: GRPOConfig) -> None:
    """Refuse groups whose members would not share their starts."""
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
    """Parameters, optimiser state, hyperparameters and, unless `kl_coef` is 0, the parameters of the reference.

    The reference keeps the observation statistics of its time, so that it stays the same function.
    """
    check_groups(run, cfg)
    check_log_prob(run.policy, "grpo")
    params = run.policy.init(rng.fold_in(key, rng.INIT))
    numbers = {name: getattr(cfg, name) for name in _NUMBERS} | {"kl_coef": cfg.kl_coef or None}
    state = learning_state(cfg, params, numbers, key.device, run.algorithm.choices.sgd.groups)
    norm_init = run.policy.norm_init
    norm = TensorDict({} if norm_init is None else {"obs": norm_init(key.device)}, [])
    return state | ({"ref_params": acting_params(params, norm).clone()} if cfg.kl_coef else {})


def _restart(run: Run, key: Tensor, step: Tensor, env_state: TensorDict) -> TensorDict:
    return restart(run.env, env_state, start_keys(key, run.static.num_envs, step, run.algorithm.group_size))


def collect_groups(run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """Collect a rollout. The members of a group share their start and their noise."""
    choices = run.algorithm.choices
    if choices.reset_every_rollout:
        start = run.jit(_restart, run) if run.env.is_pure else partial(_restart, run)
        env_state = start(state["key"], steps_taken(run, state), state["env"])
        fields = {"env": env_state, "episode": restarted(cast(TensorDict, state["episode"]))}
        state = replaced(state, fields | initial_carry(run, state))
    state, rollout = collect(run, state)
    if choices.truncate_at_first_done:
        first = first_episode_mask(rollout["done"])
        rollout = rollout.set("mask", first & rollout["mask"] if "mask" in rollout else first)
    return state, rollout


def _reference_log_prob(run: Run, _: None, rows: TensorDict, params: TensorDict) -> tuple[None, Tensor]:
    with torch.no_grad():
        return None, evaluate(run.policy, params, rows)[0]


def advantages(run: Run, state: TensorDict, rollout: TensorDict) -> TensorDict:
    """The steps of a rollout as rows with advantages and the log-probabilities of the reference.

    The reference has no memory of its own. It starts from that of the policy that acted.
    """
    hyper, group_size = cast(TensorDict, state["hyper"]), run.algorithm.group_size
    advantage, mask = grpo_advantages(rollout, gamma=hyper["gamma"], group_size=group_size, eps=hyper["eps"])
    rows = rows_of(run.policy, rollout.exclude("value"), advantage=advantage, mask=mask)
    if not run.algorithm.choices.has_reference:
        return rows
    chunks = in_chunks(rows.exclude("advantage", "mask", "sample_log_prob"))
    frozen = state.select("frozen_params", strict=False)
    reference = acting_params(cast(TensorDict, state["ref_params"]), cast(TensorDict, frozen))
    _, log_prob = run.scan(partial(_reference_log_prob, run), None, chunks, reference)
    return rows.set("ref_log_prob", log_prob.flatten(0, 1)[: len(rows)])


def loss(run: Run, params: TensorDict, batch: TensorDict, mask: Tensor, hyper: TensorDict) -> tuple[Tensor, Logs]:
    """Clipped surrogate, distance from the reference and entropy bonus of a minibatch."""
    log_prob, entropy = evaluate(run.policy, params, batch)
    old_log_prob = joint(batch["sample_log_prob"], batch)
    reference = batch["ref_log_prob"] if "ref_log_prob" in batch else log_prob.detach()
    numbers = {"clip_coef": hyper["clip_coef"], "kl_coef": hyper.get("kl_coef", 0.0), "ent_coef": hyper["ent_coef"]}
    return grpo_loss(log_prob, old_log_prob, reference, batch["advantage"], entropy, mask, **numbers)


def refresh_reference(freq: int, state: TensorDict) -> TensorDict:
    """The reference after this iteration: the policy as it acts now, once every `freq` iterations."""
    due = (state["update_step"] + 1) % freq == 0
    params, norm, reference = (cast(TensorDict, state[key]) for key in ("params", "norm", "ref_params"))
    return acting_params(params, norm).apply(lambda new, old: torch.where(due, new, old), reference)


def update(run: Run, state: TensorDict, rollout: TensorDict) -> tuple[TensorDict, Logs]:
    """Learn from a rollout: `n_epochs` passes of gradient steps on minibatches; then maybe a new reference."""
    choices, rows = run.algorithm.choices, advantages(run, state, rollout)
    state, logs = minibatch_sgd(run, state, rows, loss, choices.sgd, distance="approx_kl", limit="target_kl")
    if choices.has_reference and choices.ref_update_freq is not None:
        state = replaced(state, {"ref_params": refresh_reference(choices.ref_update_freq, state)})
    return state, logs


@register_algorithm("grpo")
def grpo(cfg: GRPOConfig) -> Algorithm:
    """GRPO; the policy needs no critic."""
    return Algorithm(
        choices=Choices(
            bool(cfg.kl_coef),
            cfg.ref_update_freq,
            cfg.reset_every_rollout,
            cfg.truncate_at_first_done,
            sgd_choices(cfg),
        ),
        init=partial(init, cfg),
        iterate=on_policy(collect_groups, update),
        kinds={**LEARNER_KINDS, "ref_params": Kind.LEARNED, "learning_rate": Kind.COUNTER},
        group_size=cfg.group_size,
        gradient_steps=partial(gradient_steps, cfg),
        as_one=True,
    )
