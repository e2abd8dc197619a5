"""Analytic policy gradient, which differentiates the return through the policy and a differentiable environment.

One loop takes the steps of an iteration, and the gradient flows back through this loop. For the backward pass, a
compiled graph stores only the state of every step. An eager run also stores all intermediate results. Sampled actions
are reparametrised.

Source: Freeman et al. 2021, arXiv:2106.13281.
"""

from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import COUNTERS, Algorithm, Collect, Run, Static, batch_of, step_keys, with_episodes
from ecrl.algorithms.optimizer import OPTIMIZERS, Group, groups_of, learning_rates, learning_state
from ecrl.algorithms.optimizer_config import LearningConfig
from ecrl.algorithms.rows import check_log_prob
from ecrl.config.model import Count, Fraction, NonNegative
from ecrl.distributed import all_mean
from ecrl.errors import ConfigError
from ecrl.kernels import act_and_step, clip_by_global_norm, episode_discounts
from ecrl.kernels.rollout import env_major, restarted_carry
from ecrl.kernels.rollout_estimators import decision_discounts
from ecrl.policies import acting_params, fixed_params
from ecrl.pytree import mapped, replaced
from ecrl.registry import register_algorithm
from ecrl.spaces import Box
from ecrl.types import Logs

_NUMBERS = ("gamma", "ent_coef")


class APGConfig(LearningConfig):
    """Hyperparameters of APG. Float hyperparameters are stored in the state and may change during a run."""

    default_policy: ClassVar = {"name": "actor_only"}

    inert: ClassVar = {"gae_lambda": "APG differentiates the returns, without a generalised advantage estimate"}

    gamma: Fraction = Field(
        default=0.99, description="discount per step; the cumulative discount restarts at 1 in every episode"
    )
    ent_coef: NonNegative = Field(default=0.0, description="weight of the entropy bonus")
    segment_length: Count | None = Field(
        default=None,
        description=(
            "steps per segment; gradients flow back only to the first step of a segment; must divide "
            "trainer.buffer_size, which is the default"
        ),
    )
    deterministic_actions: bool = Field(
        default=False, description="take the most likely action instead of a random action"
    )

    @model_validator(mode="after")
    def _no_kl(self) -> "APGConfig":
        if self.lr_scheduler is not None and self.lr_scheduler.name == "adaptive":
            raise ValueError(
                "lr_scheduler adaptive needs the KL of a minibatch step, which apg does not have; use another schedule"
            )
        return self


_READ = ("key", *COUNTERS, "update_step", "iterations", "norm", "hyper", "frozen_params")
_FIELDS = (*_READ, "params", "opt", "env", "episode", "carry")  # `_iterate` may change the fields after _READ
_STORED = ("obs", "action", "reward", "done", "info", "mask", "executed")
_World = tuple[TensorDict, TensorDict]
"""Pair of the policy's memory before a step and the state of the environments, each of shape `[N]`."""


class Choices(NamedTuple):
    """Settings of a config that determine the compiled graph."""

    deterministic_actions: bool
    group: Group


def init(cfg: APGConfig, run: Run, key: Tensor) -> dict[str, Any]:
    """Check environment, segment length and policy, and return parameters, optimiser state and hyperparameters."""
    horizon, length = run.static.buffer_size, cfg.segment_length
    if not run.env.is_pure or run.env.scene is not None:  # MuJoCo's physics has no gradient
        raise ConfigError(
            "env: apg differentiates through the environment, which this environment does not allow; use another "
            "environment"
        )
    if not isinstance(run.env.action_space, Box):
        raise ConfigError(
            f"env: apg needs Box actions, but this environment has {run.env.action_space}; use another environment"
        )
    if length is not None and horizon % length:
        text = f"algorithm.cfg.segment_length: {length} does not divide trainer.buffer_size {horizon}; use a divisor"
        raise ConfigError(text)
    check_log_prob(run.policy, "apg")
    params = run.policy.init(rng.fold_in(key, rng.INIT))
    state = learning_state(cfg, params, {name: getattr(cfg, name) for name in _NUMBERS}, key.device)
    if length is not None:
        state["hyper"]["segment_length"] = torch.tensor(length, device=key.device)
    return state


def _step(
    run: Run, world: _World, at: tuple[Any, Any, Tensor | None], params: TensorDict, initial: TensorDict
) -> tuple[_World, tuple[TensorDict, Tensor]]:
    """Take a step in every environment. Return the next memory and environment state, the transition, and the entropy.

    Before a step whose `is_first` is True, detach the memory and the environment state. Without segments, `is_first` is
    None.
    """
    env_noise, action_noise, is_first = at
    memory, env = world if is_first is None else _cut(world, is_first)
    acted, after, row = act_and_step(run.policy.act, run.env.step, params, memory, env, action_noise, env_noise)
    entropy = _entropy(run, params, memory, row.set("obs", env["obs"]))
    return (restarted_carry(acted, initial, row), after), (row.select(*_STORED, strict=False), entropy)


def _cut(world: _World, is_first: Tensor) -> _World:
    """Detach the memory and the environment state at the first step of a segment."""
    return mapped(lambda x: torch.where(is_first, x.detach(), x) if x.is_floating_point() else x, world)


def _entropy(run: Run, params: TensorDict, memory: TensorDict, row: TensorDict) -> Tensor:
    """Return the policy's entropy `[N]` at one step, in nats."""
    rows = row.exclude("reward", "terminated", "truncated", "info", "mask", "executed", "final_obs")
    if run.policy.unit == "sequence":  # a sequence of one step
        rows = cast(TensorDict, mapped(lambda x: x.unsqueeze(1), rows, batch=lambda size: (*size, 1)))
        rows = TensorDict(dict(rows.items()) | ({} if memory.is_empty() else {"carry": memory}), rows.batch_size[:1])
    return run.policy.evaluate_rows(params, rows)[1].reshape(-1)


def _loss(params: TensorDict, run: Run, state: TensorDict) -> tuple[Tensor, tuple[_World, TensorDict, Logs]]:
    """Take `buffer_size` steps in every environment, and return the loss and auxiliary results.

    The auxiliary results are the last memory and environment state, the steps `[T, N]` and the terms of the loss.
    """
    acting, hyper = acting_params(params, fixed_params(state)), cast(TensorDict, state["hyper"])
    choices, (env_keys, action_keys) = run.algorithm.choices, step_keys(run, state)
    action_noise = None if choices.deterministic_actions else run.policy.draw(action_keys)
    number, length = torch.arange(len(env_keys), device=env_keys.device), hyper.get("segment_length", None)
    is_first = None if length is None else number % length == 0
    start = cast(TensorDict, state.get("carry", TensorDict({}, []))), cast(TensorDict, state["env"])
    initial = run.policy.init_carry(acting, run.static.num_envs)
    noise = run.env.draw(env_keys), action_noise, is_first
    world, (rows, entropy) = run.scan(partial(_step, run), start, noise, acting, initial)
    flags = cast(TensorDict, rows.select("done", "executed", strict=False).transpose(0, 1))
    disc = episode_discounts(flags["done"], gamma=decision_discounts(flags, hyper["gamma"]))
    mask = rows["mask"] if "mask" in rows else torch.ones_like(rows["done"])
    counted = (x.masked_fill(~mask, 0.0) for x in (rows["reward"], entropy))
    objective, entropy = ((disc * x.t()).sum(1).mean() for x in counted)
    return -objective - hyper["ent_coef"] * entropy, (world, rows, {"objective": objective, "entropy": entropy})


def optimize(run: Run, state: TensorDict, grads: TensorDict) -> tuple[TensorDict, Logs]:
    """Clip the gradients to the norm `max_grad_norm`, and take one optimiser step.

    Returns: the new `params` and `opt`, and the logs `learning_rate` and `grad_norm`. `grad_norm` is the norm before
        clipping.
    """
    params, opt, hyper = (cast(TensorDict, state[key]) for key in ("params", "opt", "hyper"))
    group = run.algorithm.choices.group
    rate = learning_rates(state, (group,))[group.name]
    clipped, norm = clip_by_global_norm(grads, max_norm=hyper["max_grad_norm"])
    numbers = dict(cast(TensorDict, hyper["optimizer"]).items())
    params, opt = OPTIMIZERS[group.optimizer].step(params, clipped, opt, learning_rate=rate, **numbers)
    return TensorDict({"params": params, "opt": opt}, []), {"grad_norm": norm, "learning_rate": rate}


def _steps(rows: TensorDict, env: TensorDict) -> TensorDict:
    """Convert transitions `[T, N]` to a rollout `[N, T + 1]` that ends with the observations of `env`."""
    return env_major(rows.exclude("obs")).set("obs", env_major(rows["obs"], env["obs"]))


def _iterate(run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict, Logs]:
    """Run one iteration. Return the state fields that change, the steps `[N, T + 1]`, and the logs."""
    gradient = torch.func.grad_and_value(_loss, has_aux=True)
    grads, (loss, aux) = gradient(cast(TensorDict, state["params"]), run, state)
    loss, ((memory, env), rows, parts) = mapped(torch.Tensor.detach, (loss, aux))
    steps = _steps(rows, env)
    episode = with_episodes(state, steps)
    grads, loss = all_mean((grads, loss), weight=torch.full_like(loss, rows.numel()))
    learnt, logs = optimize(run, state, grads)
    fields = {"env": env, "episode": episode} | ({"carry": memory} if "carry" in state else {})
    return replaced(learnt, fields), steps, {"loss": loss} | parts | logs


@torch.no_grad()
def collect(run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """Take the steps of an iteration without computing gradients, for example for a video.

    Returns: the state with new `env`, and a batch `[N]` whose `steps` have shape `[N, T + 1]`.
    """
    _, ((_, env), rows, _) = _loss(cast(TensorDict, state["params"]), run, state)
    return replaced(state, {"env": env}), batch_of(_steps(rows, env))


class Iterate(NamedTuple):
    """Callable `iterate` of APG. The attribute `collect` takes the steps of an iteration without learning."""

    collect: Collect = collect

    def __call__(self, run: Run, state: TensorDict, borrowed: TensorDict) -> tuple[TensorDict, TensorDict, Logs]:
        """Take `buffer_size` steps in every environment, and one gradient step on the mean return.

            loss = -mean_n(sum_t(disc[t] * (reward[t] + ent_coef * entropy[t])))
            disc[0] = 1;    disc[t + 1] = 1 if done[t] else gamma * disc[t]

        If the environment reports `executed`, `gamma ** executed[t]` replaces `gamma`. The gradient flows back through
        the loop over time, to the first step of each segment. The logs `objective` and `entropy` are the mean
        discounted sums of rewards and entropies. Therefore, `loss = -objective - ent_coef * entropy`.

        Returns: the state after learning, the writes with the field `batch`, and the logs. The batch's `steps` have
            shape `[N, T + 1]`, and contain no values of a critic.
        """
        whole = replaced(state, borrowed.select("frozen_params", strict=False))
        changed, steps, logs = run.jit(_iterate, run)(whole.select(*_FIELDS, strict=False))
        return replaced(state, changed), TensorDict({"batch": batch_of(steps)}, []), logs


def gradient_steps(static: Static) -> int:
    """Return the cost of an iteration in gradient steps. A time step costs about one gradient step."""
    return static.buffer_size


@register_algorithm("apg")
def apg(cfg: APGConfig) -> Algorithm:
    """Build the APG algorithm. The environment's `step` must be differentiable."""
    (group,) = groups_of(cfg)
    return Algorithm(
        choices=Choices(cfg.deterministic_actions, group),
        init=partial(init, cfg),
        iterate=Iterate(),
        gradient_steps=gradient_steps,
    )
