"""An algorithm is a frozen record of pure functions: what it keeps in the state, how it collects, how it learns."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import distributed, rng
from ecrl.config import Config
from ecrl.envs import Env
from ecrl.kernels import (
    collect_rollout,
    episode_update,
    moments_init,
    moments_update,
    running_returns,
    scale,
    scan,
    transitions,
)
from ecrl.kernels.scan_loop import Scan
from ecrl.policies import Policy, acting_params
from ecrl.pytree import replaced
from ecrl.types import Logs

Jit = Callable[..., Callable[..., Any]]
_EPS, _CLIP = 1e-8, 10.0


class Parts(NamedTuple):
    """What a run is made of.

    Attributes:
        env: with auto-reset and events.
        policy: for its spaces.
        cfg: of the run.
        jit: `jit(fn, *static)` binds static arguments to `fn` and may compile it.
        scan: the loop over time inside of it.
    """

    env: Env
    policy: Policy
    cfg: Config
    jit: Jit
    scan: Scan


def env_index(num_envs: int, device: torch.device | None) -> Tensor:
    """Global indices of this rank's environments, int64 `[N]`."""
    return torch.arange(num_envs, device=device) + distributed.rank() * num_envs


def start_keys(key: Tensor, num_envs: int, step: Tensor | int, group_size: int = 1) -> Tensor:
    """Keys of where the environments start when they have taken `step` steps, `[N]`; those of a group are equal."""
    return rng.stream(key, rng.START, env_index(num_envs, key.device) // group_size, step)


def steps_taken(parts: Parts, state: TensorDict) -> Tensor:
    """Steps that each environment has taken, 0-d int64."""
    return state["sample_step"] // (parts.cfg.trainer.num_envs * distributed.world_size())


def step_keys(
    key: Tensor, sample_step: Tensor, num_envs: int, buffer_size: int, group_size: int = 1
) -> tuple[Tensor, Tensor]:
    """Keys `[T, N]` of the world and of the actions in the next `buffer_size` steps.

    A key is a function of (key of the run, stream, global env index, steps the env has taken), of nothing else. The
    world of a group of `group_size` consecutive environments is one; their actions are their own.
    """
    index = env_index(num_envs, key.device)
    taken = sample_step // (num_envs * distributed.world_size())
    steps = (taken + torch.arange(buffer_size, device=key.device)).unsqueeze(1)
    return rng.stream(key, rng.ENV, index // group_size, steps), rng.stream(key, rng.ACTION, index, steps)


def _collect(
    policy: Policy, env: Env, loop: Scan, num_envs: int, buffer_size: int, group_size: int, state: TensorDict
) -> tuple[TensorDict, TensorDict]:
    """What moves in the state, and the rollout."""
    env_keys, action_keys = step_keys(state["key"], state["sample_step"], num_envs, buffer_size, group_size)
    empty, params = TensorDict({}, []), acting_params(state["params"], state["norm"])
    _, env_state, rollout = collect_rollout(policy, env, params, empty, state["env"], env_keys, action_keys, scan=loop)
    mask = rollout["mask"][:, :-1] if "mask" in rollout else None
    episode = episode_update(state["episode"], rollout["reward"][:, :-1], rollout["done"][:, :-1], mask)
    return TensorDict({"env": env_state, "episode": episode}, []), rollout


def _on_host(parts: Parts) -> Callable[..., Any]:
    """`jit` for a world that runs on the host: the policy's functions are bound one by one, the loop is a plain one."""
    policy, jit = parts.policy, parts.jit
    value = None if policy.value is None else jit(policy.value)
    policy = replace(policy, act=jit(policy.act), draw=jit(policy.draw), value=value)
    return partial(partial, _collect, policy, parts.env, scan)


def collect(parts: Parts, state: TensorDict, group_size: int = 1) -> tuple[TensorDict, TensorDict]:
    """`buffer_size` steps of every environment: the state with env and episode moved on, the rollout `[N, T + 1]`."""
    sizes = parts.cfg.trainer.num_envs, parts.cfg.trainer.buffer_size, group_size
    if parts.env.is_pure:
        fn = parts.jit(_collect, parts.policy, parts.env, parts.scan, *sizes)
    else:
        fn = _on_host(parts)(*sizes)
    moved, rollout = fn(state.select("key", "sample_step", "params", "norm", "env", "episode"))
    return replaced(state, moved), rollout


def scaled_rewards(state: TensorDict, rollout: TensorDict) -> tuple[TensorDict, TensorDict]:
    """The rollout with rewards divided by the spread of discounted returns so far, and the statistics moved on.

    reward / sqrt(variance(return) + eps), held within +-10;    return' = reward + gamma * return * not done
    """
    norm, gamma = cast(TensorDict, state["norm"]), state["hyper", "gamma"]
    moments, before = cast(TensorDict, norm["reward", "moments"]), norm["reward", "running"]
    steps = transitions(rollout.exclude("value"))
    mask = steps["mask"] if "mask" in steps else torch.ones_like(steps["done"])
    paid = steps["reward"].masked_fill(~mask, 0.0)
    returns = running_returns(paid, steps["done"], before, gamma=gamma)
    last = returns[:, -1].masked_fill(steps["done"][:, -1], 0.0)
    moved = {"moments": moments_update(moments, returns, mask, total=distributed.all_sum), "running": last}
    scaled = scale(rollout["reward"], moments, eps=_EPS, clip=_CLIP)
    return rollout.copy().set("reward", scaled), norm.copy().set("reward", TensorDict(moved, []))


def reward_norm_init(num_envs: int, device: torch.device) -> TensorDict:
    """What `scaled_rewards` keeps in `state["norm"]`: moments of discounted returns, and the running ones `[N]`."""
    running = torch.zeros(num_envs, device=device)
    return TensorDict({"reward": {"moments": moments_init((), device), "running": running}}, [])


@dataclass(frozen=True)
class Algorithm:
    """Functions of one algorithm.

    Attributes:
        init: (parts, key) -> {name: TensorDict or Tensor}, its part of the state, with `params`, `opt`, `hyper`, and
            maybe `norm`.
        update: (parts, state, batch) -> (state, logs).
        collect: (parts, state) -> (state, batch). The loop reads `obs`, `info` and `mask` of the batch where it has
            them.
        group_size: consecutive environments that start alike.
        gradient_steps: Config -> how many an iteration takes, by which `trainer.compile: auto` judges a budget.
        as_one: collect and update work on tensors alone, so a whole iteration may be compiled as one graph. They then
            read no float of the config (`ecrl.loop.build.shaping`), but the numbers in `state["hyper"]`.
    """

    init: Callable[[Parts, Tensor], dict[str, Any]]
    update: Callable[[Parts, TensorDict, TensorDict], tuple[TensorDict, Logs]]
    collect: Callable[[Parts, TensorDict], tuple[TensorDict, TensorDict]] = collect
    group_size: int = 1
    gradient_steps: Callable[[Config], int] | None = None
    as_one: bool = False
