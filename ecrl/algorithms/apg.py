"""Analytic policy gradient: the return of a differentiable environment, differentiated through policy and dynamics.

The rollout keeps every state on its way. The gradient comes from one backward sweep over these states, which takes each
step again, so memory holds states and no graph. Sampled actions are reparametrised.

Source: Freeman et al. 2021, arXiv:2106.13281 (APG); the backward sweep is from optimal control, Bryson and Ho 1969.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import Algorithm, Run, Static, on_policy, step_keys
from ecrl.algorithms.optimizer import OPTIMIZERS, Group, groups_of, learning_rates, learning_state
from ecrl.algorithms.optimizer_config import LearningConfig
from ecrl.algorithms.rows import check_log_prob, evaluate
from ecrl.config.model import Count, Fraction, NonNegative
from ecrl.distributed import all_mean
from ecrl.errors import ConfigError
from ecrl.kernels import clip_by_global_norm, episode_discounts, episode_update
from ecrl.policies import acting_params, fixed_params, policy_params
from ecrl.pytree import mapped, replaced
from ecrl.registry import register_algorithm
from ecrl.spaces import Box
from ecrl.types import Logs

_NUMBERS = ("gamma", "ent_coef")


class APGConfig(LearningConfig):
    """Hyperparameters. Numbers live in the state and may change during a run."""

    gamma: Fraction = Field(default=0.99, description="discount per step; starts again with every episode")
    ent_coef: NonNegative = Field(default=0.0, description="weight of the entropy bonus")
    segment_length: Count | None = Field(
        default=None, description="steps that gradients run back at most, divides trainer.buffer_size; all if absent"
    )
    deterministic_actions: bool = Field(default=False, description="act by the policy's mode instead of a sample")

    @model_validator(mode="after")
    def _no_kl(self) -> "APGConfig":
        if self.lr_scheduler is not None and self.lr_scheduler.name == "adaptive":
            raise ValueError(
                "lr_scheduler adaptive needs the KL of a minibatch step, which apg does not have; use another"
            )
        return self


class Choices(NamedTuple):
    """The choices of a config that shape the graph."""

    deterministic_actions: bool
    segment_length: int | None
    group: Group


def init(cfg: APGConfig, run: Run, key: Tensor) -> dict[str, Any]:
    """Parameters, optimiser state and hyperparameters."""
    horizon, length = run.static.buffer_size, cfg.segment_length
    if not run.env.is_pure:
        raise ConfigError(
            "env: apg differentiates through the environment, which this environment does not allow; use another"
        )
    if not isinstance(run.env.action_space, Box):
        raise ConfigError(f"env: apg needs Box actions, this environment has {run.env.action_space}; use another")
    if run.policy.unit == "sequence":
        raise ConfigError("policy.name: apg differentiates one step at a time, this policy has memory; use another")
    if length is not None and horizon % length:
        text = f"algorithm.cfg.segment_length: {length} does not divide trainer.buffer_size {horizon}; use a divisor"
        raise ConfigError(text)
    check_log_prob(run.policy, "apg")
    params = run.policy.init(rng.fold_in(key, rng.INIT))
    return learning_state(cfg, params, {name: getattr(cfg, name) for name in _NUMBERS}, key.device)


def _noise(run: Run, state: TensorDict) -> tuple[Any, Any]:
    """Noise of the environments and of the actions in each of the next steps; None for deterministic actions."""
    env_keys, action_keys = step_keys(run, state)
    deterministic = run.algorithm.choices.deterministic_actions
    return run.env.draw(env_keys), None if deterministic else run.policy.draw(action_keys)


def _step(
    run: Run, env: TensorDict, noise: tuple[Any, Any], params: TensorDict
) -> tuple[TensorDict, tuple[TensorDict, Tensor]]:
    """One step of every environment: the state after it; the state before it and the action."""
    env_noise, action_noise = noise
    _, out = run.policy.act(params, TensorDict({}, []), env["obs"], action_noise)
    return run.env.step(env, out["action"], env_noise), (env, out["action"].clone())


def _collect(run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """The fields `env` and `episode` after the steps, and the batch."""
    params, start = policy_params(state), cast(TensorDict, state["env"])
    env, (before, action) = run.scan(partial(_step, run), start, _noise(run, state), params)
    path: Any = torch.cat((before, env.unsqueeze(0)))
    after: Any = TensorDict({"reward": path["reward"], "done": path["terminated"] | path["truncated"]}, path.shape)
    after.update(path.select("info", strict=False))
    after = torch.cat((after[1:], after[:1].apply(torch.zeros_like)))
    action = torch.cat((action, torch.zeros_like(action[:1])))
    batch = after.update({"env": path, "obs": path["obs"], "action": action}).transpose(0, 1)
    episode = episode_update(state["episode"], batch["reward"][:, :-1], batch["done"][:, :-1])
    return TensorDict({"env": env, "episode": episode}, []), batch


_FIELDS = ("key", "sample_step", "update_step", "params", "norm", "env", "episode", "hyper", "opt", "frozen_params")


@torch.no_grad()
def collect(run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """Take `buffer_size` steps in every environment and keep every state on the way.

    Returns: the state with new `env` and `episode`, and the batch `[N, T + 1]`. It has the states `env`: step t starts
        from row t. It has `obs`, `action`, `reward`, `done` and maybe `info` of each step, with a last row of padding
        as in a rollout.
    """
    changed, batch = run.jit(_collect, run)(state.select(*_FIELDS, strict=False))
    return replaced(state, changed), batch


def _value(
    params: TensorDict,
    floats: TensorDict,
    run: Run,
    env: TensorDict,
    fixed: TensorDict,
    env_noise: Any,
    action_noise: Any,
    weight: Tensor,
    ent_coef: Tensor,
    costate: TensorDict,
) -> tuple[Tensor, Tensor]:
    """The step's part of the objective plus the value of the state after it, 0-d; and the entropy `[N]`."""
    env, acting, no_carry = env.copy().update(floats), acting_params(params, fixed), TensorDict({}, [])
    _, out = run.policy.act(acting, no_carry, env["obs"], action_noise)
    done = env["terminated"] | env["truncated"]
    _, entropy = evaluate(run.policy, acting, out.copy().update({"obs": env["obs"], "done": done}))
    after = run.env.step(env, out["action"], env_noise)
    value = (weight * (after["reward"] + ent_coef * entropy)).sum()
    return value + sum((c * after[key]).sum() for key, c in costate.items(True, True)), entropy


def _step_back(
    run: Run,
    carry: tuple[TensorDict, TensorDict],
    at: tuple[TensorDict, tuple[Any, Any], Tensor, Tensor],
    params: TensorDict,
    fixed: TensorDict,
    ent_coef: Tensor,
) -> tuple[tuple[TensorDict, TensorDict], Tensor]:
    """Take one step of the backward sweep. Return gradient sum, costate of the state before the step, and entropy.

        value[t] = weight[t] * (reward[t] + ent_coef * entropy[t]) + <costate[t + 1], state[t + 1](params, state[t])>
        costate[t] = d value[t] / d state[t];    grads = sum_t(d value[t] / d params)

    Only the floats of a state have a costate. It is 0 after the last step of a segment.
    """
    (grads, costate), (env, noise, weight, is_last) = carry, at
    costate = mapped(lambda c: torch.where(is_last, 0.0, c), costate)
    floats = env.select(*costate.keys(True, True))
    gradient = torch.func.grad(_value, argnums=(0, 1), has_aux=True)
    (by_params, costate), entropy = gradient(params, floats, run, env, fixed, *noise, weight, ent_coef, costate)
    return (mapped(torch.add, grads, by_params), costate), entropy


def gradient(run: Run, state: TensorDict, batch: TensorDict, weight: Tensor) -> tuple[TensorDict, Tensor]:
    """Gradient of `sum(weight * (reward + ent_coef * entropy))`, cut between segments; and the entropy `[N, T]`."""
    params, fixed, ent_coef = cast(TensorDict, state["params"]), fixed_params(state), state["hyper", "ent_coef"]
    path: Any = batch["env"].transpose(0, 1)[:-1]
    keys = [key for key, x in path.items(True, True) if x.is_floating_point()]
    start = params.apply(torch.zeros_like), path[0].select(*keys).apply(torch.zeros_like)
    segment = run.algorithm.choices.segment_length or len(path)
    is_last = torch.arange(1, len(path) + 1, device=weight.device) % segment == 0
    backwards = mapped(lambda x: x.flip(0), (path, _noise(run, state), weight.t(), is_last))
    (grads, _), entropy = run.scan(partial(_step_back, run), start, backwards, params, fixed, ent_coef)
    return grads, entropy.flip(0).t()


def optimize(run: Run, state: TensorDict, grads: TensorDict) -> tuple[TensorDict, Logs]:
    """One optimiser step: new params and opt; the gradient's norm and the learning rate."""
    params, opt, hyper = (cast(TensorDict, state[key]) for key in ("params", "opt", "hyper"))
    group = run.algorithm.choices.group
    rate = learning_rates(state, (group,), run.static.iterations)[group.name]
    clipped, norm = clip_by_global_norm(grads, max_norm=hyper["max_grad_norm"])
    numbers = dict(cast(TensorDict, hyper["optimizer"]).items())
    params, opt = OPTIMIZERS[group.optimizer].step(params, clipped, opt, learning_rate=rate, **numbers)
    return TensorDict({"params": params, "opt": opt}, []), {"grad_norm": norm, "learning_rate": rate}


def _learn(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """New params and opt, and logs."""
    hyper = cast(TensorDict, state["hyper"])
    disc = episode_discounts(batch["done"][:, :-1], gamma=hyper["gamma"])
    grads, entropy = gradient(run, state, batch, -disc / len(disc))
    objective, entropy = ((disc * x).sum(1).mean() for x in (batch["reward"][:, :-1], entropy))
    count = torch.full_like(objective, disc.numel())
    grads, loss = all_mean((grads, -objective - hyper["ent_coef"] * entropy), weight=count)
    changed, logs = optimize(run, state, grads)
    return changed, {"loss": loss, "objective": objective, "entropy": entropy} | logs


def update(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """One gradient step on the mean over environments of their discounted rewards and entropies.

        loss = -mean_n(sum_t(disc[t] * (reward[t] + ent_coef * entropy[t])))
        disc[0] = 1;    disc[t + 1] = 1 if done[t] else gamma * disc[t]

    The logs `objective` and `entropy` are the two discounted sums, so `loss = -objective - ent_coef * entropy`.
    """
    changed, logs = run.jit(_learn, run)(state.select(*_FIELDS, strict=False), batch)
    return replaced(state, changed), logs


def gradient_steps(static: Static) -> int:
    """The backward sweep costs about one gradient step for each step of the environments."""
    return static.buffer_size


@register_algorithm("apg")
def apg(cfg: APGConfig) -> Algorithm:
    """APG, for environments whose step is differentiable."""
    (group,) = groups_of(cfg)
    return Algorithm(
        choices=Choices(cfg.deterministic_actions, cfg.segment_length, group),
        init=partial(init, cfg),
        iterate=on_policy(collect, update),
        gradient_steps=gradient_steps,
    )
