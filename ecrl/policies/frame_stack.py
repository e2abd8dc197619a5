"""Wrap a policy so that it sees a stack of the latest observations.

The rollout and the replay buffer store each observation once. While the policy acts in an environment, its memory holds
the previous observations. A loss assembles the stacks of its minibatch from the sequences of a rollout or from the
replay buffer (`ecrl.kernels.replay_stack`).
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
from ecrl.pytree import flatten
from ecrl.spaces import Box, Dict, Space, dict_space, element_shape, without_mask

_MASK = "action_mask"


def stacked_space(space: Space, frames: int) -> Space:
    """Return the space of stacks of `frames` observations. `frames` is at least 2. An `action_mask` is not stacked.

    >>> from ecrl.spaces import box
    >>> stacked = stacked_space(box(0, 255, 84, 84, 1, dtype=torch.uint8), 4)
    >>> stacked.shape, stacked.frame_shape, stacked.is_image
    ((4, 84, 84, 1), (84, 84, 1), True)

    Raises: ConfigError for a Discrete or MultiDiscrete observation other than `action_mask`. ValueError if `frames` is
        below 2.
    """
    if frames < 2:
        raise ValueError(f"frame_stack is {frames}, expected at least 2 frames")
    match space:
        case Box():
            return Box(space.low * frames, space.high * frames, (frames, *space.shape), space.dtype, frames)
        case Dict():
            parts = {name: part if name == _MASK else stacked_space(part, frames) for name, part in space.items}
            return dict_space(parts)
    raise ConfigError(f"env.frame_stack: only Box observations can be stacked, got {space}; leave frame_stack out")


def _frames_of(obs: Any, space: Space) -> Any:
    """Return the parts of an observation that are in `space`, a space without action masks."""
    if isinstance(space, Dict):
        return TensorDict({name: _frames_of(obs[name], part) for name, part in space.items}, obs.batch_size)
    return obs


def _with_masks(stack: Any, obs: Any, space: Space) -> Any:
    """Return a stack with the action masks of the newest observation."""
    if not isinstance(space, Dict):
        return stack
    parts = {
        name: obs[name] if name == _MASK else _with_masks(stack[name], obs[name], part) for name, part in space.items
    }
    return TensorDict(parts, obs.batch_size)


def newest_mask(obs: Any) -> Any:
    """Return stacked observations `[B, k, ...]`, with only the newest `action_mask` of each stack, if any."""
    if not isinstance(obs, TensorDict):
        return obs
    parts = {name: part[:, -1] if name == _MASK else newest_mask(part) for name, part in obs.items()}
    return TensorDict(parts, obs.batch_size[:1])


def _check_shapes(obs: Any, space: Space, stack: tuple[int, ...] = ()) -> None:
    """Raise ConfigError if the shape of the observations is not `[*B, *stack, *shape]`."""
    if isinstance(space, Dict):
        for name, part in space.items:
            _check_shapes(obs[name], part, stack)
    else:
        batch_shape(obs, (*stack, *element_shape(space)))


def _older(space: Space, num_envs: int, stack: int, device: torch.device) -> Any:
    """Return zeros `[num_envs, stack, ...]` for the previous observations. `space` has no action mask."""
    if isinstance(space, Dict):
        parts = {name: _older(part, num_envs, stack, device) for name, part in space.items}
        return TensorDict(parts, [num_envs])
    box = cast(Box, space)
    dtype = torch.get_default_dtype() if box.dtype == torch.float32 else box.dtype
    return torch.zeros(num_envs, stack, *box.shape, dtype=dtype, device=device)


def with_frame_stack(policy: Policy, observation_space: Space, frames: int) -> Policy:
    """Return a policy whose networks see the latest `frames` observations of the episode, oldest first.

    `policy` must be built for `stacked_space(observation_space, frames)`. The memory of the result has up to three
    fields. `frames` holds the previous observations. `started` is True after the first step of an episode. `memory` is
    the memory of `policy`, if any. The first observation of an episode fills the whole stack.

    If the memory is empty, `act` expects stacks instead of single observations. The losses and targets of algorithms
    that learn from replay call `act` with an empty memory.
    """
    stacked = _with_frame_stack(policy, observation_space, frames)
    # `_with_frame_stack` is memoised, and the equality of policies ignores `init` and `init_frozen`. Thus these two
    # functions of `stacked` may come from another policy.
    return replace(stacked, init=policy.init, init_frozen=policy.init_frozen)


@cache
def _with_frame_stack(policy: Policy, observation_space: Space, frames: int) -> Policy:
    seen = without_mask(observation_space)

    def init_carry(params: TensorDict, num_envs: int) -> TensorDict:
        device = flatten(params)[0][0].device
        started = torch.zeros(num_envs, dtype=torch.bool, device=device)
        older = {"frames": _older(seen, num_envs, frames - 1, device), "started": started}
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
        newest = newer(_frames_of(stack, seen), started.ndim)
        after: dict[str, Any] = {"frames": newest, "started": torch.ones_like(started)}
        after |= {"memory": memory} if policy.unit == "sequence" else {}
        return TensorDict(after, carry.batch_size), out

    def pushed(carry: TensorDict, obs: Any) -> Any:
        check_carry(carry)
        _check_shapes(obs, seen)
        stack = push_frame(carry["frames"], cast(Tensor, carry["started"]), _frames_of(obs, seen))
        return _with_masks(stack, obs, observation_space)

    def newer(stack: Any, axis: int) -> Any:
        if isinstance(stack, Tensor):
            return stack.narrow(axis, 1, frames - 1).clone()
        return TensorDict({name: newer(part, axis) for name, part in stack.items()}, stack.batch_size)

    def check_carry(carry: TensorDict) -> None:
        if not {"frames", "started"} <= {*carry.keys()}:
            raise ConfigError("policy: the carry has no stacked observations; pass init_carry(params, num_envs)")
        _check_shapes(carry["frames"], seen, (frames - 1,))

    def stacked(carry: TensorDict, steps: TensorDict) -> TensorDict:
        check_carry(carry)
        _check_shapes(steps["obs"], seen)
        obs, started, done = steps["obs"], cast(Tensor, carry["started"]), cast(Tensor, steps["done"])
        stack = stack_frames(carry["frames"], started, _frames_of(obs, seen), done)
        return steps.copy().set("obs", _with_masks(stack, obs, observation_space))

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

    def imitation_loss(params: TensorDict, carry: TensorDict, steps: TensorDict) -> Tensor:
        return cast(Any, policy.imitation_loss)(params, inner_carry(carry), stacked(carry, steps))

    return replace(
        policy,
        act=act,
        evaluate=None if policy.evaluate is None else evaluate,
        value=None if policy.value is None else value,
        evaluate_and_value=None if policy.evaluate_and_value is None else evaluate_and_value,
        imitation_loss=None if policy.imitation_loss is None else imitation_loss,
        init_carry=init_carry,
        unit="sequence",
        time_loops=policy.time_loops if policy.unit == "sequence" else 0,
        frame_stack=frames,
    )
