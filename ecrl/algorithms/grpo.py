"""Group-relative policy optimisation: the mean return of environments that started alike is the baseline.

The members of a group share their start and the world's noise and differ only in their actions; no critic is needed.
Source: Shao et al. 2024, arXiv:2402.03300, on the steps of an environment in place of tokens.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import Algorithm, Parts, collect, start_keys, steps_taken
from ecrl.algorithms.minibatch_sgd import Learner, MinibatchConfig, gradient_steps, learn, learner_of, passes
from ecrl.algorithms.optimizer_config import learning_state
from ecrl.config.model import Count, Fraction, NonNegative, Positive
from ecrl.envs import Env, restart
from ecrl.errors import ConfigError
from ecrl.kernels import first_episode_mask, grpo_advantages, grpo_loss, restarted, transitions
from ecrl.kernels.scan_loop import in_chunks
from ecrl.policies import Policy, acting_params
from ecrl.registry import register_algorithm
from ecrl.types import Logs

_NUMBERS = ("gamma", "clip_coef", "ent_coef", "kl_coef", "eps", "target_kl")


class GRPOConfig(MinibatchConfig):
    """Hyperparameters; the numbers live in the state and may change during a run."""

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


class Variant(NamedTuple):
    """The choices of a config that shape the update."""

    group_size: int


def check_groups(parts: Parts, cfg: GRPOConfig) -> None:
    """Refuse what would leave groups that do not share a start."""
    num_envs, keys = parts.cfg.trainer.num_envs, ("reset_every_rollout", "truncate_at_first_done")
    if num_envs % cfg.group_size:
        raise ConfigError(f"algorithm.cfg.group_size: {cfg.group_size} does not divide trainer.num_envs {num_envs}")
    apart = [key for key in keys if not getattr(cfg, key)]
    if apart and not parts.env.lockstep:
        raise ConfigError(
            f"algorithm.cfg.{apart[0]}: false, but episodes of {parts.cfg.env.name} end at different times, so the "
            "members of a group would no longer share a start; use true"
        )


def init(parts: Parts, key: Tensor) -> dict[str, Any]:
    """Parameters, optimiser state, hyperparameters and, where `kl_coef` is not 0, the reference's parameters.

    The reference keeps the observation statistics of its time: it is a function that stays the same.
    """
    cfg: Any = parts.cfg.algorithm.cfg
    check_groups(parts, cfg)
    params = parts.policy.init(rng.fold_in(key, rng.INIT))
    numbers = {name: getattr(cfg, name) for name in _NUMBERS} | {"kl_coef": cfg.kl_coef or None}
    state = learning_state(cfg, params, numbers, key.device)
    norm_init = parts.policy.norm_init
    norm = TensorDict({} if norm_init is None else {"obs": norm_init(key.device)}, [])
    return state | ({"ref_params": acting_params(params, norm).clone()} if cfg.kl_coef else {})


def _fresh(env: Env, num_envs: int, group_size: int, key: Tensor, taken: Tensor, world: TensorDict) -> TensorDict:
    return restart(env, world, start_keys(key, num_envs, taken, group_size))


def collect_groups(parts: Parts, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """A rollout in which the members of a group see the same world."""
    cfg: Any = parts.cfg.algorithm.cfg
    if cfg.reset_every_rollout:
        bind = parts.jit if parts.env.is_pure else partial
        fresh = bind(_fresh, parts.env, parts.cfg.trainer.num_envs, cfg.group_size)
        world = fresh(state["key"], steps_taken(parts, state), state["env"])
        state = state.copy().update({"env": world, "episode": restarted(state["episode"])})
    state, rollout = collect(parts, state, cfg.group_size)
    if cfg.truncate_at_first_done:
        first = first_episode_mask(rollout["done"])
        rollout = rollout.set("mask", first & rollout["mask"] if "mask" in rollout else first)
    return state, rollout


def _reference(policy: Policy, _: None, rows: TensorDict, params: TensorDict) -> tuple[None, Tensor]:
    with torch.no_grad():
        return None, policy.evaluate(params, TensorDict({}, []), rows["obs"], rows["action"], rows["done"])[0]


def _rows(learner: Learner, state: TensorDict, rollout: TensorDict) -> TensorDict:
    """The rollout as `[N * T]` rows with advantages and the reference's log-probabilities."""
    hyper, group_size = cast(TensorDict, state["hyper"]), learner.variant.group_size
    advantage, mask = grpo_advantages(rollout, gamma=hyper["gamma"], group_size=group_size, eps=hyper["eps"])
    rows = transitions(rollout).select("obs", "action", "sample_log_prob", "done")
    rows = rows.update({"advantage": advantage, "mask": mask}).reshape(-1)
    if "ref_params" not in state:
        return rows
    judged = rows.select("obs", "action", "done")
    _, chunks = learner.scan(partial(_reference, learner.policy), None, in_chunks(judged), state["ref_params"])
    return rows.set("ref_log_prob", chunks.flatten(0, 1)[: len(rows)])


def _loss(
    policy: Policy, variant: Variant, params: TensorDict, batch: TensorDict, mask: Tensor, hyper: TensorDict
) -> tuple[Tensor, Logs]:
    log_prob, entropy = policy.evaluate(params, TensorDict({}, []), batch["obs"], batch["action"], batch["done"])
    reference = batch["ref_log_prob"] if "ref_log_prob" in batch else log_prob.detach()
    numbers = {"clip_coef": hyper["clip_coef"], "kl_coef": hyper.get("kl_coef", 0.0), "ent_coef": hyper["ent_coef"]}
    return grpo_loss(log_prob, batch["sample_log_prob"], reference, batch["advantage"], entropy, mask, **numbers)


def _learn(learner: Learner, state: TensorDict, rate: Tensor, rollout: TensorDict) -> tuple[TensorDict, Tensor, Logs]:
    return passes(learner, state, rate, _rows(learner, state, rollout))


def update(parts: Parts, state: TensorDict, rollout: TensorDict) -> tuple[TensorDict, Logs]:
    """`n_epochs` passes of minibatch steps over the rollout; then maybe a new reference."""
    cfg: Any = parts.cfg.algorithm.cfg
    state, logs = learn(parts, state, _learn, learner_of(parts, _loss, Variant(cfg.group_size)), rollout)
    if "ref_params" in state and cfg.ref_update_freq is not None:
        due = (state["update_step"] + 1) % cfg.ref_update_freq == 0
        params, norm, ref = (cast(TensorDict, state[key]) for key in ("params", "norm", "ref_params"))
        refreshed = acting_params(params, norm).apply(lambda new, old: torch.where(due, new, old), ref)
        state = state.copy().set("ref_params", refreshed)
    return state, logs


@register_algorithm("grpo")
def grpo(cfg: GRPOConfig) -> Algorithm:
    """GRPO; the policy needs no critic."""
    return Algorithm(init, update, collect_groups, cfg.group_size, gradient_steps, as_one=True)
