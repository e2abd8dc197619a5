"""Wrap a policy so that it receives standardised observations.

The statistics are part of the state. Algorithms that learn in turns, such as DQN and SAC, update the statistics after
each turn (see `ecrl.algorithms.interleaved`). All other algorithms update the statistics once per iteration. Training,
evaluation and export all use these statistics.
"""

from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.distributed import all_sum
from ecrl.errors import ConfigError
from ecrl.kernels import moments_init, moments_update, normalize
from ecrl.policies.core import Policy
from ecrl.spaces import Box, Dict, Space

_EPS, _CLIP = 1e-8, 10.0


def _init(space: Space, device: torch.device) -> TensorDict | None:
    """Return initial moments for each float Box, nested like the space. Return None if the space has no float Box."""
    if isinstance(space, Box) and space.dtype.is_floating_point:
        return moments_init(space.shape, device)
    if not isinstance(space, Dict):
        return None
    parts = {name: _init(part, device) for name, part in space.items if name != "action_mask"}
    known = {name: moments for name, moments in parts.items() if moments is not None}
    return TensorDict(known, []) if known else None


def _update(norm: TensorDict, obs: Any, mask: Tensor) -> TensorDict:
    if isinstance(obs, Tensor):
        return moments_update(norm, obs, mask, total=all_sum)
    return TensorDict({name: _update(cast(TensorDict, part), obs[name], mask) for name, part in norm.items()}, [])


def _normalize(norm: TensorDict, obs: Any) -> Any:
    if isinstance(obs, Tensor):
        return normalize(obs, norm, eps=_EPS, clip=_CLIP)
    return obs.copy().update({name: _normalize(cast(TensorDict, part), obs[name]) for name, part in norm.items()})


def _without_norm(params: TensorDict) -> TensorDict:
    return cast(TensorDict, params.exclude("norm"))


def normalized(policy: Policy, observation_space: Space) -> Policy:
    """Return a policy that calls `policy` with standardised observations.

        clip((obs - mean) / sqrt(variance + 1e-8), -10, 10)

    The functions of the result read the moments from `params["norm"]`. Every float Box in a Dict has its own moments.
    Integer observations, such as images, and `action_mask` stay unchanged.

    Raises: ConfigError for observations without a float Box.
    """
    wrapped = _normalized(policy, observation_space)
    # `_normalized` is memoised, and the equality of policies ignores `init` and `init_frozen`. Thus these two functions
    # of `wrapped` may come from another policy.
    return replace(wrapped, init=policy.init, init_frozen=policy.init_frozen)


@cache
def _normalized(policy: Policy, observation_space: Space) -> Policy:
    critic, evaluator, explorer, q_critic = policy.value, policy.evaluate, policy.explore, policy.q
    both, imitation = policy.evaluate_and_value, policy.imitation_loss
    norm = _init(observation_space, torch.device("cpu"))
    if norm is None:
        problem = f"{observation_space} has no float Box to standardise"
        raise ConfigError(f"policy.normalize_obs: {problem}; remove normalize_obs")

    def norm_init(device: torch.device) -> TensorDict:
        # `norm.to` would set the device of the TensorDict, and then compiled code would check the device in each call
        return norm.apply(lambda moment: moment.to(device, copy=True))

    def inner(params: TensorDict, obs: Any) -> tuple[TensorDict, Any]:
        return _without_norm(params), _normalize(params["norm"], obs)

    def act(params: TensorDict, carry: TensorDict, obs: Any, noise: Tensor | None) -> tuple[TensorDict, TensorDict]:
        params, obs = inner(params, obs)
        return policy.act(params, carry, obs, noise)

    def with_obs(norm: TensorDict, steps: TensorDict) -> TensorDict:
        return steps.copy().set("obs", _normalize(norm, steps["obs"]))

    def evaluate(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple:
        return evaluator(_without_norm(params), carry, with_obs(params["norm"], steps))  # pyright: ignore

    def value(params: TensorDict, carry: TensorDict, obs: Any) -> Tensor:
        params, obs = inner(params, obs)
        return critic(params, carry, obs)  # pyright: ignore

    def sequence_value(params: TensorDict, carry: TensorDict, steps: TensorDict, final: TensorDict | None) -> Any:
        norm = params["norm"]
        final = None if final is None else with_obs(norm, final)
        return critic(_without_norm(params), carry, with_obs(norm, steps), final)  # pyright: ignore

    def evaluate_and_value(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple:
        return both(_without_norm(params), carry, with_obs(params["norm"], steps))  # pyright: ignore

    def imitation_loss(params: TensorDict, carry: TensorDict, steps: TensorDict) -> Tensor:
        return imitation(_without_norm(params), carry, with_obs(params["norm"], steps))  # pyright: ignore

    def explore(params: TensorDict, exploration: TensorDict, out: TensorDict, noise: Any) -> Any:
        return explorer(_without_norm(params), exploration, out, noise)  # pyright: ignore

    def q(params: TensorDict, obs: Any, action: Tensor | None, noise: Any) -> Tensor:
        params, obs = inner(params, obs)
        return q_critic(params, obs, action, noise)  # pyright: ignore

    def init_carry(params: TensorDict, num_envs: int) -> TensorDict:
        return policy.init_carry(_without_norm(params), num_envs)

    def init_exploration(params: TensorDict, num_envs: int) -> TensorDict:
        return policy.init_exploration(_without_norm(params), num_envs)

    wrapped = replace(policy, act=act, norm_init=norm_init, norm_update=_update)
    wrapped = wrapped if evaluator is None else replace(wrapped, evaluate=evaluate)
    wrapped = wrapped if both is None else replace(wrapped, evaluate_and_value=evaluate_and_value)
    wrapped = wrapped if imitation is None else replace(wrapped, imitation_loss=imitation_loss)
    wrapped = wrapped if explorer is None else replace(wrapped, explore=explore, init_exploration=init_exploration)
    wrapped = wrapped if q_critic is None else replace(wrapped, q=q)
    if policy.unit == "sequence":
        wrapped = replace(wrapped, init_carry=init_carry)
    return wrapped if critic is None else replace(wrapped, value=value if policy.unit == "step" else sequence_value)
