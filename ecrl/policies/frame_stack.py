"""Wrap a policy so that it sees a stack of the latest observations.

The rollout and the replay buffer store each observation once. While the policy acts, its memory has the previous
observations. A loss assembles the stacks of its minibatch, either from the sequences of a rollout or from the replay
buffer (`ecrl.kernels.replay_stack`).
"""

from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.errors import ConfigError
from ecrl.kernels import push_frame, stack_frames
from ecrl.policies.core import Policy, batch_shape
from ecrl.pytree import flatten, replaced
from ecrl.spaces import Box, Dict, Space, dict_space, without_mask

_MASK = "action_mask"


def stacked_space(space: Space, frames: int) -> Space:
    """Return the space of stacks of `frames` observations. An `action_mask` is not stacked.

    >>> from ecrl.spaces import box
    >>> stacked_space(box(0, 255, 84, 84, 1, dtype=torch.uint8), 4)
    box(0, 255, 4, 84, 84, 1, dtype=torch.uint8)

    Raises: ConfigError for an observation that is not a Box.
    """
    match space:
        case Box():
            return Box(space.low * frames, space.high * frames, (frames, *space.shape), space.dtype)
        case Dict():
            parts = {name: part if name == _MASK else stacked_space(part, frames) for name, part in space.items}
            return dict_space(parts)
    raise ConfigError(f"env.frame_stack: only observations of Box can be stacked, got {space}; leave it out")


def _frames_of(obs: Any) -> Any:
    """Return the part of an observation that is stacked."""
    return obs.exclude(_MASK) if isinstance(obs, TensorDict) else obs


def _with_mask(stack: Any, obs: Any) -> Any:
    """Return a stack with the action mask of the newest observation, if any."""
    return replaced(stack, {_MASK: obs[_MASK]}) if isinstance(obs, TensorDict) and _MASK in obs else stack


def newest_mask(obs: Any) -> Any:
    """Return stacked observations `[*B, k, ...]`, with only the newest `action_mask` of each stack, if any."""
    if isinstance(obs, TensorDict) and _MASK in obs:
        mask = cast(Tensor, obs[_MASK])
        return replaced(TensorDict(dict(obs.items()), obs.batch_size[:-1]), {_MASK: mask[..., -1, :]})
    return obs


def _check_shapes(obs: Any, space: Space) -> None:
    """Raise ConfigError for an observation of another shape than the space has."""
    if isinstance(space, Dict):
        for name, part in space.items:
            _check_shapes(obs[name], part)
    else:
        batch_shape(obs, space)


def _zeros(space: Space, batch: list[int], device: torch.device) -> Any:
    """Return zeros for observations of a space, without an action mask."""
    if isinstance(space, Dict):
        return TensorDict({name: _zeros(part, batch, device) for name, part in space.items}, batch)
    box = cast(Box, space)
    dtype = torch.get_default_dtype() if box.dtype == torch.float32 else box.dtype
    return torch.zeros(*batch, *box.shape, dtype=dtype, device=device)


@cache
def with_frame_stack(policy: Policy, observation_space: Space, frames: int) -> Policy:
    """Return a policy whose networks see the latest `frames` observations of the episode, oldest first.

    `policy` must be built for `stacked_space(observation_space, frames)`. The memory of the result has the previous
    observations (`frames`), a flag that an episode has started (`started`), and the memory of `policy`, if any
    (`memory`). The first observation of an episode fills the whole stack.

    An empty memory means that observations are stacks already. Algorithms that learn from replay call `act` so.
    """
    seen = without_mask(observation_space)

    def init_carry(params: TensorDict, num_envs: int) -> TensorDict:
        device = flatten(params)[0][0].device
        started = torch.zeros(num_envs, dtype=torch.bool, device=device)
        older = {"frames": _zeros(stacked_space(seen, frames - 1), [num_envs], device), "started": started}
        inner = {"memory": policy.init_carry(params, num_envs)} if policy.unit == "sequence" else {}
        return TensorDict(older | inner, [num_envs])

    def inner_carry(carry: TensorDict) -> Any:
        return carry["memory"] if policy.unit == "sequence" else TensorDict({}, [])

    def act(params: TensorDict, carry: TensorDict, obs: Any, noise: Any) -> tuple[TensorDict, TensorDict]:
        if carry.is_empty():
            return policy.act(params, carry, obs, noise)
        stack = pushed(carry, obs)
        memory, out = policy.act(params, inner_carry(carry), stack, noise)
        started = cast(Tensor, carry["started"])
        after: dict[str, Any] = {"frames": newer(_frames_of(stack), started.ndim), "started": torch.ones_like(started)}
        after |= {"memory": memory} if policy.unit == "sequence" else {}
        return TensorDict(after, carry.batch_size), out

    def pushed(carry: TensorDict, obs: Any) -> Any:
        check_carry(carry)
        _check_shapes(obs, seen)
        return _with_mask(push_frame(carry["frames"], cast(Tensor, carry["started"]), _frames_of(obs)), obs)

    def newer(stack: Any, axis: int) -> Any:
        if isinstance(stack, Tensor):
            return stack.narrow(axis, 1, frames - 1).clone()
        return TensorDict({name: newer(part, axis) for name, part in stack.items()}, stack.batch_size)

    def check_carry(carry: TensorDict) -> None:
        if not {"frames", "started"} <= {*carry.keys()}:
            raise ConfigError("policy: the carry has no stacked observations; pass init_carry(params, num_envs)")
        _check_shapes(carry["frames"], stacked_space(seen, frames - 1))

    def stacked(carry: TensorDict, steps: TensorDict) -> TensorDict:
        check_carry(carry)
        _check_shapes(steps["obs"], seen)
        obs, started, done = steps["obs"], cast(Tensor, carry["started"]), cast(Tensor, steps["done"])
        return steps.copy().set("obs", _with_mask(stack_frames(carry["frames"], started, _frames_of(obs), done), obs))

    def evaluate(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor]:
        return cast(Any, policy.evaluate)(params, inner_carry(carry), stacked(carry, steps))

    def value(
        params: TensorDict, carry: TensorDict, steps: TensorDict, final: TensorDict | None
    ) -> tuple[Tensor, Tensor | None]:
        critic, steps = cast(Any, policy.value), stacked(carry, steps)
        if final is not None:
            after = cast(TensorDict, final["carry"])
            inner = {"carry": inner_carry(after)} if policy.unit == "sequence" else {}
            final = TensorDict({"obs": pushed(after, final["obs"]), **inner}, final.batch_size)
        if policy.unit == "sequence":
            return critic(params, inner_carry(carry), steps, final)
        values = critic(params, TensorDict({}, []), steps["obs"])
        return values, None if final is None else critic(params, TensorDict({}, []), final["obs"])

    def evaluate_and_value(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
        return cast(Any, policy.evaluate_and_value)(params, inner_carry(carry), stacked(carry, steps))

    return replace(
        policy,
        act=act,
        evaluate=None if policy.evaluate is None else evaluate,
        value=None if policy.value is None else value,
        evaluate_and_value=None if policy.evaluate_and_value is None else evaluate_and_value,
        init_carry=init_carry,
        unit="sequence",
        time_loops=policy.time_loops if policy.unit == "sequence" else 0,
        frame_stack=frames,
    )
