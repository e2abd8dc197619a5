"""Analytic policy gradient: the return of a differentiable environment, differentiated through policy and dynamics.

The rollout is kept as the states it passed through; the gradient comes from one sweep back over them, which takes each
step again, so memory holds states and no graph. Sampled actions are reparametrised.

Source: Freeman et al. 2021, arXiv:2106.13281 (APG); the sweep back is that of optimal control, Bryson and Ho 1969.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import Algorithm, Parts, step_keys
from ecrl.algorithms.optimizer_config import OPTIMIZERS, LearningConfig, learning_state, optimizer_of, scheduled
from ecrl.config.model import Count, Fraction, NonNegative
from ecrl.distributed import all_mean
from ecrl.envs import Env
from ecrl.errors import ConfigError
from ecrl.kernels import clip_by_global_norm, episode_discounts, episode_update
from ecrl.kernels.scan_loop import Scan
from ecrl.policies import Policy, acting_params
from ecrl.pytree import mapped
from ecrl.registry import register_algorithm
from ecrl.spaces import Box
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

    @model_validator(mode="after")
    def _no_kl(self) -> "APGConfig":
        if self.lr_scheduler is not None and self.lr_scheduler.name == "adaptive":
            raise ValueError("lr_scheduler adaptive needs the KL of a minibatch step, which apg has not; use another")
        return self


def init(parts: Parts, key: Tensor) -> dict[str, Any]:
    """Parameters, optimiser state and hyperparameters."""
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
    return learning_state(cfg, params, {name: getattr(cfg, name) for name in _NUMBERS}, key.device)


class Run(NamedTuple):
    """What stays the same over the iterations of a run."""

    policy: Policy
    env: Env
    num_envs: int
    buffer_size: int
    deterministic: bool
    segment: int
    step: Callable[..., tuple[TensorDict, TensorDict]]
    scan: Scan


def _run(parts: Parts) -> Run:
    cfg, trainer = cast(Any, parts.cfg.algorithm.cfg), parts.cfg.trainer
    segment = cfg.segment_length or trainer.buffer_size
    step, sizes = OPTIMIZERS[optimizer_of(cfg).name].step, (trainer.num_envs, trainer.buffer_size)
    return Run(parts.policy, parts.env, *sizes, cfg.deterministic_actions, segment, step, parts.scan)


def _noise(run: Run, state: TensorDict) -> tuple[Any, Any]:
    """Of the world and of the action in each of the next steps; the latter None for deterministic actions."""
    env_keys, action_keys = step_keys(state["key"], state["sample_step"], run.num_envs, run.buffer_size)
    return run.env.draw(env_keys), None if run.deterministic else run.policy.draw(action_keys)


def _advance(
    run: Run, env: TensorDict, noise: tuple[Any, Any], params: TensorDict
) -> tuple[TensorDict, tuple[TensorDict, Tensor]]:
    """One step, as the body of a scan that keeps the states it leaves and the actions."""
    world, action = noise
    _, out = run.policy.act(params, TensorDict({}, []), env["obs"], action)
    return run.env.step(env, out["action"], world), (env, out["action"].clone())


def _collect(run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """What moves in the state, and the batch."""
    params, start = acting_params(state["params"], state["norm"]), cast(TensorDict, state["env"])
    env, (left, action) = run.scan(partial(_advance, run), start, _noise(run, state), params)
    path: Any = torch.cat((left, env.unsqueeze(0)))
    after: Any = TensorDict({"reward": path["reward"], "done": path["terminated"] | path["truncated"]}, path.shape)
    after.update(path.select("info", strict=False))
    after = torch.cat((after[1:], after[:1].apply(torch.zeros_like)))
    action = torch.cat((action, torch.zeros_like(action[:1])))
    batch = after.update({"env": path, "obs": path["obs"], "action": action}).transpose(0, 1)
    episode = episode_update(state["episode"], batch["reward"][:, :-1], batch["done"][:, :-1])
    return TensorDict({"env": env, "episode": episode}, []), batch


_READ = ("key", "sample_step", "params", "norm", "env", "episode", "hyper", "opt")


@torch.no_grad()
def collect(parts: Parts, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """`buffer_size` steps of every environment: the state with env and episode moved on, and what was passed through.

    The batch `[N, T + 1]` has the states `env`, of which row t is the one that step t starts from, and of each step
    `obs`, `action`, `reward`, `done` and maybe `info`, with a last row of padding as in a rollout.
    """
    moved, batch = parts.jit(_collect, _run(parts))(state.select(*_READ))
    return state.copy().update(moved), batch


def _paid(
    params: TensorDict,
    floats: TensorDict,
    run: Run,
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
    _, out = run.policy.act(acting, empty, env["obs"], noise)
    done = env["terminated"] | env["truncated"]
    _, entropy = run.policy.evaluate(acting, empty, env["obs"], out["action"], done)
    after = run.env.step(env, out["action"], world)
    value = (weight * (after["reward"] + ent_coef * entropy)).sum()
    return value + sum((c * after[key]).sum() for key, c in costate.items(True, True)), entropy


def _back(
    run: Run,
    so_far: tuple[TensorDict, TensorDict],
    at: tuple[TensorDict, tuple[Any, Any], Tensor, Tensor],
    params: TensorDict,
    norm: TensorDict,
    ent_coef: Tensor,
) -> tuple[tuple[TensorDict, TensorDict], Tensor]:
    """One step of the sweep: gradients so far and the costate of the state that the step starts from; the entropy.

        value[t] = weight[t] * (reward[t] + ent_coef * entropy[t]) + <costate[t + 1], state[t + 1](params, state[t])>
        costate[t] = d value[t] / d state[t];    grads = sum_t(d value[t] / d params)

    Only the floats of a state have a costate; it is 0 behind the last step of a segment.
    """
    (grads, costate), (env, noise, weight, is_last) = so_far, at
    costate = mapped(lambda c: torch.where(is_last, 0.0, c), costate)
    floats = env.select(*costate.keys(True, True))
    gradient = torch.func.grad(_paid, argnums=(0, 1), has_aux=True)
    (of_params, before), entropy = gradient(params, floats, run, env, norm, *noise, weight, ent_coef, costate)
    return (mapped(torch.add, grads, of_params), before), entropy


def _flipped(tree: Any) -> Any:
    return mapped(lambda x: x.flip(0), tree)


def _sweep(run: Run, state: TensorDict, batch: TensorDict, weight: Tensor) -> tuple[TensorDict, Tensor]:
    """Gradient of `sum(weight * (reward + ent_coef * entropy))`, cut between segments; and the entropy `[N, T]`."""
    params, norm, ent_coef = cast(TensorDict, state["params"]), state["norm"], state["hyper", "ent_coef"]
    path: Any = batch["env"].transpose(0, 1)[:-1]
    keys = [key for key, x in path.items(True, True) if x.is_floating_point()]
    start = params.apply(torch.zeros_like), path[0].select(*keys).apply(torch.zeros_like)
    is_last = torch.arange(1, len(path) + 1, device=weight.device) % run.segment == 0
    steps = _flipped((path, _noise(run, state), weight.t(), is_last))
    (grads, _), entropy = run.scan(partial(_back, run), start, steps, params, norm, ent_coef)
    return grads, entropy.flip(0).t()


def _move(run: Run, state: TensorDict, grads: TensorDict, rate: Tensor) -> tuple[TensorDict, Logs]:
    """One optimiser step: params and opt, and the gradient's norm."""
    params, opt, hyper = (cast(TensorDict, state[key]) for key in ("params", "opt", "hyper"))
    clipped, norm = clip_by_global_norm(grads, max_norm=hyper["max_grad_norm"])
    numbers = cast(TensorDict, hyper["optimizer"])
    params, opt = run.step(params, clipped, opt, learning_rate=rate, **dict(numbers.items()))
    return TensorDict({"params": params, "opt": opt}, []), {"grad_norm": norm}


def _learn(run: Run, state: TensorDict, rate: Tensor, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """What moves in the state, and logs."""
    hyper = cast(TensorDict, state["hyper"])
    disc = episode_discounts(batch["done"][:, :-1], gamma=hyper["gamma"])
    grads, entropy = _sweep(run, state, batch, -disc / len(disc))
    objective, entropy = ((disc * x).sum(1).mean() for x in (batch["reward"][:, :-1], entropy))
    count = torch.full_like(objective, disc.numel())
    grads, loss = all_mean((grads, -objective - hyper["ent_coef"] * entropy), weight=count)
    moved, logs = _move(run, state, grads, rate)
    return moved, {"loss": loss, "objective": objective, "entropy": entropy, "learning_rate": rate} | logs


def update(parts: Parts, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """One gradient step on the mean over environments of their discounted rewards and entropies.

        loss = -mean_n(sum_t(disc[t] * (reward[t] + ent_coef * entropy[t])))
        disc[0] = 1;    disc[t + 1] = 1 if done[t] else gamma * disc[t]

    The logs `objective` and `entropy` are the two discounted sums, so `loss = -objective - ent_coef * entropy`.
    """
    cfg: Any = parts.cfg.algorithm.cfg
    rate = scheduled(cfg.lr_scheduler, state, parts.cfg.trainer.iterations)
    moved, logs = parts.jit(_learn, _run(parts))(state.select(*_READ), rate, batch)
    return state.copy().update(moved), logs


@register_algorithm("apg")
def apg(cfg: APGConfig) -> Algorithm:
    """APG, for environments whose step is differentiable."""
    return Algorithm(init, update, collect, gradient_steps=lambda cfg: cfg.trainer.buffer_size)
