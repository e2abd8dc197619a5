"""Analytic policy gradient: the return of a differentiable environment, differentiated through policy and dynamics.

The rollout is kept as the states it passed through; the gradient comes from one sweep back over them, which takes each
step again, so memory holds states and no graph. Sampled actions are reparametrised.

Source: Freeman et al. 2021, arXiv:2106.13281 (APG); the sweep back is that of optimal control, Bryson and Ho 1969.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import Algorithm, Parts, step_keys
from ecrl.algorithms.optimizer import OPTIMIZERS, LearningConfig, learning_state, optimizer_of, scheduled
from ecrl.distributed import all_mean
from ecrl.errors import ConfigError, UserError
from ecrl.kernels import clip_by_global_norm, episode_discounts, episode_update
from ecrl.policies import acting_params
from ecrl.registry import register_algorithm
from ecrl.spaces import Box
from ecrl.strict import Count, Fraction, NonNegative
from ecrl.types import Logs

_NUMBERS = ("gamma", "ent_coef")


class APGConfig(LearningConfig):
    """Hyperparameters; the numbers live in the state and may change during a run."""

    gamma: Fraction = Field(default=0.99, description="discount per step; starts again with every episode")
    ent_coef: NonNegative = Field(default=0.0, description="weight of the entropy bonus")
    segment_length: Count | None = Field(
        default=None, description="steps that gradients run back at most, divides trainer.buffer_size; all if absent"
    )
    deterministic_actions: bool = Field(default=False, description="act by the policy's mode instead of a sample")
    skip_nonfinite_updates: bool = Field(
        default=True, description="leave out and count updates whose loss or gradient is not finite, else stop there"
    )

    @model_validator(mode="after")
    def _no_kl(self) -> "APGConfig":
        if self.lr_scheduler is not None and self.lr_scheduler.name == "adaptive":
            raise ValueError("lr_scheduler adaptive needs the KL of a minibatch step, which apg has not; use another")
        return self


def init(parts: Parts, key: Tensor) -> dict[str, Any]:
    """Parameters, optimiser state, hyperparameters, and how many updates were left out, 0-d int64."""
    cfg: Any = parts.cfg.algorithm.cfg
    env, horizon = parts.cfg.env.name, parts.cfg.trainer.buffer_size
    if not parts.env.is_pure:
        raise ConfigError(f"env: apg differentiates through the environment, which {env} does not allow; use another")
    if not isinstance(parts.env.action_space, Box):
        raise ConfigError(f"env: apg needs Box actions, {env} has {parts.env.action_space}; use another")
    if cfg.segment_length is not None and horizon % cfg.segment_length:
        given = f"algorithm.cfg.segment_length: {cfg.segment_length}"
        raise ConfigError(f"{given} does not divide trainer.buffer_size {horizon}; use a divisor")
    params = parts.policy.init(rng.fold_in(key, rng.INIT))
    state = learning_state(cfg, params, {name: getattr(cfg, name) for name in _NUMBERS}, key.device)
    return state | {"skipped_updates": torch.zeros_like(key)}


def _draw(env_draw: Callable, policy_draw: Callable, env_keys: Tensor, action_keys: Tensor) -> tuple[Any, Any]:
    return env_draw(env_keys), policy_draw(action_keys)


@torch.no_grad()
def _noise(parts: Parts, state: TensorDict) -> list[tuple[Any, Any]]:
    """Of the world and of the action in each of the next steps; the latter None for deterministic actions."""
    cfg: Any = parts.cfg.algorithm.cfg
    env_noise, action_noise = parts.jit(_draw, parts.env.draw, parts.policy.draw)(*step_keys(parts, state))
    actions = [None] * len(env_noise) if cfg.deterministic_actions else action_noise.unbind(0)
    return list(zip(env_noise.unbind(0), actions, strict=True))


def _advance(act: Callable, step: Callable, params: TensorDict, env: TensorDict, world: Any, noise: Any) -> TensorDict:
    _, out = act(params, TensorDict({}, []), env["obs"], noise)
    return step(env, out["action"], world)


def collect(parts: Parts, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """`buffer_size` steps of every environment: the state with env and episode moved on, and what was passed through.

    The batch `[N, T + 1]` has the states `env`, of which row t is the one that step t starts from, and of each step
    `obs`, `reward`, `done` and maybe `info`, with a last row of padding as in a rollout.
    """
    with torch.no_grad():
        params, env = acting_params(state["params"], state["norm"]), cast(TensorDict, state["env"])
        advance, envs = parts.jit(_advance, parts.policy.act, parts.env.step), [env]
        for world, noise in _noise(parts, state):
            env = advance(params, env, world, noise)
            envs.append(env)
        path: Any = torch.stack(cast(Any, envs))
        after: Any = TensorDict({"reward": path["reward"], "done": path["terminated"] | path["truncated"]}, path.shape)
        after.update(path.select("info", strict=False))
        after = torch.cat((after[1:], after[:1].apply(torch.zeros_like)))
        batch = after.update({"env": path, "obs": path["obs"]}).transpose(0, 1)
        episode = episode_update(state["episode"], batch["reward"][:, :-1], batch["done"][:, :-1])
    return state.copy().update({"env": env, "episode": episode}), batch


class Functions(NamedTuple):
    """What the sweep differentiates."""

    act: Callable[..., Any]
    evaluate: Callable[..., Any]
    step: Callable[..., TensorDict]


def _paid(
    params: TensorDict,
    floats: TensorDict,
    functions: Functions,
    env: TensorDict,
    norm: TensorDict,
    world: Any,
    noise: Any,
    weight: Tensor,
    ent_coef: Tensor,
    costate: TensorDict,
) -> tuple[Tensor, Tensor]:
    """The step's part of the objective plus what the state it leads to is worth, 0-d; and the entropy `[N]`."""
    env, acting, empty = env.copy().update(floats), acting_params(params, norm), TensorDict({}, [])
    _, out = functions.act(acting, empty, env["obs"], noise)
    done = env["terminated"] | env["truncated"]
    _, entropy = functions.evaluate(acting, empty, env["obs"], out["action"], done)
    after = functions.step(env, out["action"], world)
    value = (weight * (after["reward"] + ent_coef * entropy)).sum()
    return value + sum((c * after[key]).sum() for key, c in costate.items(True, True)), entropy


def _back(
    functions: Functions, grads: TensorDict, costate: TensorDict, params: TensorDict, env: TensorDict, *rest: Any
) -> tuple[TensorDict, TensorDict, Tensor]:
    """One step of the sweep: gradients so far, the costate of the state that the step starts from, the entropy.

        value[t] = weight[t] * (reward[t] + ent_coef * entropy[t]) + <costate[t + 1], state[t + 1](params, state[t])>
        costate[t] = d value[t] / d state[t];    grads = sum_t(d value[t] / d params)

    Only the floats of a state have a costate; `rest` is what `_paid` takes after `env`.
    """
    floats = env.select(*costate.keys(True, True))
    gradient = torch.func.grad(_paid, argnums=(0, 1), has_aux=True)
    fixed: Any = (functions, env, *rest, costate)
    (of_params, before), entropy = gradient(params, floats, *fixed)
    return cast(TensorDict, grads.apply(torch.add, of_params)), before, entropy


def _sweep(parts: Parts, state: TensorDict, batch: TensorDict, weight: Tensor) -> tuple[TensorDict, Tensor]:
    """Gradient of `sum(weight * (reward + ent_coef * entropy))`, cut between segments; and the entropy `[N, T]`."""
    cfg: Any = parts.cfg.algorithm.cfg
    segment = cfg.segment_length or parts.cfg.trainer.buffer_size
    params, norm, ent_coef = cast(TensorDict, state["params"]), state["norm"], state["hyper", "ent_coef"]
    back = parts.jit(_back, Functions(parts.policy.act, parts.policy.evaluate, parts.env.step))
    envs: Any = batch["env"].unbind(1)[:-1]
    weights, noises = weight.unbind(1), _noise(parts, state)
    keys = [key for key, x in envs[0].items(True, True) if x.is_floating_point()]
    grads, zero = params.apply(torch.zeros_like), envs[0].select(*keys).apply(torch.zeros_like)
    costate, entropies = zero, []
    for t in reversed(range(len(envs))):
        costate = zero if (t + 1) % segment == 0 else costate
        grads, costate, entropy = back(grads, costate, params, envs[t], norm, *noises[t], weights[t], ent_coef)
        entropies.append(entropy)
    return grads, torch.stack(entropies[::-1], 1)


def _move(
    step: Callable[..., tuple[TensorDict, TensorDict]],
    params: TensorDict,
    grads: TensorDict,
    opt: TensorDict,
    hyper: TensorDict,
    rate: Tensor,
    loss: Tensor,
) -> tuple[TensorDict, TensorDict, Tensor, Tensor]:
    """One optimiser step where loss and gradient are finite: params, opt, the gradient's norm, and whether so."""
    numbers = cast(TensorDict, hyper["optimizer"])
    clipped, norm = clip_by_global_norm(grads, max_norm=hyper["max_grad_norm"])
    moved = step(params, clipped, opt, learning_rate=rate, **dict(numbers.items()))
    finite = loss.isfinite() & norm.isfinite()
    new, opt = (a.apply(lambda x, y: torch.where(finite, x, y), b) for a, b in zip(moved, (params, opt), strict=True))
    return new, opt, norm, finite


def _refuse(loss: Tensor, norm: Tensor, iteration: Tensor) -> None:
    wrong = " and ".join(name for name, x in (("loss", loss), ("gradient", norm)) if not bool(x.isfinite()))
    if wrong:
        advice = "lower the learning rate, shorten segment_length, or set skip_nonfinite_updates"
        raise UserError(f"apg: iteration {int(iteration)}: {wrong} not finite; {advice}")


def update(parts: Parts, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """One gradient step on the mean over environments of their discounted rewards and entropies.

        loss = -mean_n(sum_t(disc[t] * (reward[t] + ent_coef * entropy[t])))
        disc[0] = 1;    disc[t + 1] = 1 if done[t] else gamma * disc[t]

    The logs `objective` and `entropy` are the two discounted sums, so `loss = -objective - ent_coef * entropy`.
    """
    cfg: Any = parts.cfg.algorithm.cfg
    hyper, skipped = cast(TensorDict, state["hyper"]), state["skipped_updates"]
    disc = episode_discounts(batch["done"][:, :-1], gamma=hyper["gamma"])
    grads, entropy = _sweep(parts, state, batch, -disc / len(disc))
    objective, entropy = ((disc * x).sum(1).mean() for x in (batch["reward"][:, :-1], entropy))
    count = torch.full_like(objective, disc.numel())
    grads = all_mean(grads, weight=count)
    loss = all_mean(-objective - hyper["ent_coef"] * entropy, weight=count)
    learnt = state.copy().set("update_step", state["update_step"] - skipped)  # the schedule waits too
    rate = scheduled(cfg.lr_scheduler, learnt, parts.cfg.trainer.iterations)
    move = parts.jit(_move, OPTIMIZERS[optimizer_of(cfg).name].step)
    params, opt, norm, finite = move(state["params"], grads, state["opt"], hyper, rate, loss)
    if not cfg.skip_nonfinite_updates:
        _refuse(loss, norm, state["update_step"])
    skipped = skipped + (~finite).to(skipped.dtype)
    logs = {"loss": loss, "objective": objective, "entropy": entropy, "grad_norm": norm, "learning_rate": rate}
    state = state.copy().update({"params": params, "opt": opt, "skipped_updates": skipped})
    return state, logs | {"skipped_updates": skipped.to(loss.dtype)}


@register_algorithm("apg")
def apg(cfg: APGConfig) -> Algorithm:
    """APG, for environments whose step is differentiable."""
    return Algorithm(init, update, collect)
