"""Wrap an environment so that each action is a chunk of several actions of the original environment."""

from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.envs.core import NEVER, Env, where_fields
from ecrl.errors import ConfigError
from ecrl.kernels.scan_loop import loop
from ecrl.pytree import flatten, mapped, names
from ecrl.spaces import Box, Dict, Discrete, MultiDiscrete, Space, element_shape

_REWARD_SUM = ("info", "reward_sum")
_REFUSED = {
    "executed": "its actions are chunks already",
    "mask": "some of its steps do not count, and a chunk cannot leave them out",
}


def chunk_space(space: Space, k: int) -> Space:
    """Return the space of chunks of `k` actions.

    A Box gets a new first axis of size `k`. A Discrete or MultiDiscrete space becomes a MultiDiscrete space with `k`
    times as many entries. The entries of the first action come first.

    Raises: ConfigError for a Dict space.

    >>> from ecrl.spaces import box
    >>> chunk_space(box(-1.0, 1.0, 1), 2), chunk_space(Discrete(3), 2)
    (Box(low=(-1.0, -1.0), high=(1.0, 1.0), shape=(2, 1)), MultiDiscrete(nvec=(3, 3)))
    """
    match space:
        case Box():
            return Box(space.low * k, space.high * k, (k, *space.shape), space.dtype)
        case Discrete():
            return MultiDiscrete((space.n,) * k)
        case MultiDiscrete():
            return MultiDiscrete(space.nvec * k)
    raise ConfigError(
        f"the environment has actions of {space}, expected Box, Discrete or MultiDiscrete; leave out action_chunk"
    )


def undiscounted_reward(steps: TensorDict) -> Tensor:
    """Return the undiscounted sum of the rewards of each action's steps. If an action is one step, return its reward.

    `steps` are states or the steps of a rollout. Logs and evaluations use this sum. Algorithms learn from the field
    `reward`, which discounts the steps inside a chunk.
    """
    return steps[_REWARD_SUM] if _REWARD_SUM in steps.keys(True) else steps["reward"]


def _check(env: Env, k: int, gamma: float) -> None:
    """Raise ConfigError if the environment is not pure or has action masks.

    Raise ValueError if `k` or `gamma` is out of range.
    """
    if k < 1 or not 0.0 <= gamma <= 1.0:
        raise ValueError(f"chunked needs k >= 1 and gamma in [0, 1], got k = {k} and gamma = {gamma}")
    if not env.is_pure:
        fault = "the environment keeps part of its state outside tensors"
        advice = "leave out action_chunk, or use a tensor environment"
        raise ConfigError(f"{fault}, so single copies of it cannot stop inside a chunk; {advice}")
    if isinstance(env.observation_space, Dict) and "action_mask" in dict(env.observation_space.items):
        fault = "the environment has action masks, which are unknown for later actions of a chunk"
        raise ConfigError(f"{fault}; leave out action_chunk")


def _check_fields(before: TensorDict, after: TensorDict) -> None:
    """Raise ConfigError if a step adds or removes fields of the state."""
    found, expected = (set(names(flatten(state)[1])) for state in (after, before))
    for name in sorted(found ^ expected):
        one, other = ("step", "reset") if name in found else ("reset", "step")
        raise ConfigError(
            f"env.action_chunk: {one} returns the field {name!r}, but {other} does not; return it in both"
        )


def _advance(
    env: Env,
    carry: tuple[TensorDict, dict[str, Tensor]],
    x: tuple[Tensor, Any, Tensor],
    first: TensorDict,
) -> tuple[tuple[TensorDict, dict[str, Tensor]], None]:
    """Take one step in the environments whose episode has not ended in this chunk. The others do not change.

    `env.step` steps the whole batch. For the other environments, `env.step` gets the state `first` from before the
    chunk, and the result is discarded. A step after the end of an episode could produce NaN in the gradient, which
    `where` would not remove.
    """
    (state, sums), (action, noise, discount) = carry, x
    running = sums["running"]
    after = env.step(where_fields(running, state, first), action, noise)
    _check_fields(state, after)
    ended = after["terminated"] | after["truncated"]
    sums = {
        "running": running & ~ended,
        "executed": sums["executed"] + running,
        "reward": torch.where(running, sums["reward"] + discount * after["reward"], sums["reward"]),
        "reward_sum": torch.where(running, sums["reward_sum"] + after["reward"], sums["reward_sum"]),
    }
    return (where_fields(~running, state, after), sums), None  # `where_fields` keeps the field order of `state`


@cache
def chunked(env: Env, k: int, *, gamma: float) -> Env:
    """Make each action a chunk of `k` actions, which the environment takes one after the other.

        state[i + 1], r[i] = step(state[i], action[i])             for i < executed
        executed = the smaller of k and the number of steps to the end of the episode
        reward   = sum of gamma^i * r[i] over i < executed

    The policy sees no observation inside a chunk. The copies of a batch are independent. If the episode of a copy ends
    inside a chunk, only this copy stops until the end of the chunk. `obs`, `info`, `terminated` and `truncated` are
    from the last executed step. If a time limit truncates an episode inside a chunk, algorithms therefore bootstrap
    from the last state that was reached. If `gamma` is below 1, `info.reward_sum` is the sum of the rewards without
    discounts.

    If `env.step_without_obs` is set, one observation is computed per chunk. Apply `chunked` before `auto_reset`. Step
    counts of wrappers outside of `chunked`, such as `time_limit` and `with_events`, count chunks.

    Args:
        env: a pure environment whose actions are single steps.
        k: number of actions in a chunk. The new action space is `chunk_space(env.action_space, k)`. For example, a Box
            of shape `[A]` becomes a Box of shape `[k, A]`.
        gamma: discount per step inside a chunk. Use the discount of the algorithm, or 1 for plain sums.

    Gradient: flows through the executed steps.
    Raises: ConfigError if the environment is not pure, has action masks or has a Dict action space. ValueError if `k`
        or `gamma` is out of range. `reset` raises ConfigError if the state has a field `executed` or `mask`. `step`
        raises ConfigError if a step adds or removes fields.

    >>> from ecrl.envs import make_env
    >>> env = chunked(make_env("cartpole"), 3, gamma=0.5)
    >>> state = env.reset(torch.arange(2))
    >>> state = env.step(state, torch.tensor([[0, 1, 0], [1, 0, 1]]), env.draw(torch.arange(2)))
    >>> state["reward"], state["executed"]
    (tensor([1.7500, 1.7500]), tensor([3, 3]))
    """
    _check(env, k, gamma)
    single = element_shape(env.action_space)

    def with_sums(state: TensorDict, executed: Tensor, reward: Tensor, reward_sum: Tensor) -> TensorDict:
        state = state.copy().update({"reward": reward, "executed": executed})
        if gamma == 1.0:
            return state
        info = cast(TensorDict, state.get("info", TensorDict({}, state.batch_size)))
        return state.set("info", info.copy().set("reward_sum", reward_sum))

    def started(state: TensorDict) -> TensorDict:
        for field, fault in _REFUSED.items():
            if field in state:
                raise ConfigError(
                    f"env.action_chunk: the env has the field {field!r}, so {fault}; leave out action_chunk"
                )
        reward = state["reward"]
        return with_sums(state, torch.zeros_like(reward, dtype=torch.int64), reward, torch.zeros_like(reward))

    def reset(keys: Tensor) -> TensorDict:
        return started(env.reset(keys))

    def reset_unobserved(keys: Tensor) -> TensorDict:
        return started(cast(Any, env.reset_unobserved)(keys))

    def draw(keys: Tensor) -> Any:
        return env.draw(keys.unsqueeze(-1) if k == 1 else rng.split(keys, k).movedim(0, -1))

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        batch, axis, reward = state.batch_size, len(state.batch_size), state["reward"]
        state = state.exclude("executed", _REWARD_SUM)
        state = state.exclude("info") if gamma < 1.0 and cast(TensorDict, state["info"]).is_empty() else state
        moving = state.exclude("obs") if env.step_without_obs else state
        true = torch.ones_like(reward, dtype=torch.bool)
        zero = torch.full_like(reward, -0.0)  # adding -0.0 preserves every bit, even the sign of 0
        sums = {"running": true, "executed": torch.zeros_like(true, dtype=torch.int64), "reward": zero}
        actions = action.reshape(*batch, k, *single).movedim(axis, 0)
        noises = mapped(lambda x: x.movedim(axis, 0), noise, batch=lambda size: (*size[axis:], *size[:axis]))
        discounts = reward.new_tensor([gamma**i for i in range(k)])
        carry, first = (moving, sums | {"reward_sum": zero.clone()}), moving.detach().clone()
        (after, sums), _ = loop(partial(_advance, env), carry, (actions, noises, discounts), first)
        if env.step_without_obs:
            after = state.copy().update(after)  # keep the field order of `state`
            after = after.set("obs", env.observe(after))
        return with_sums(after, sums["executed"], sums["reward"], sums["reward_sum"])

    gap = env.min_truncation_gap
    return replace(
        env,
        reset=reset,
        step=step,
        draw=draw,
        action_space=chunk_space(env.action_space, k),
        reset_unobserved=env.reset_unobserved and reset_unobserved,
        step_without_obs=False,
        steps_per_action=k * env.steps_per_action,
        min_truncation_gap=NEVER if gap == NEVER else -(-gap // k),
    )
