"""Policy heads, which define the action distribution of each action space as functions of the actor's output.

Box actions have a diagonal Gaussian distribution, either unbounded or squashed into the space by tanh. Discrete and
MultiDiscrete actions have categorical distributions.
"""

from collections.abc import Callable
from math import isfinite
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import kernels as k
from ecrl import rng
from ecrl.errors import ConfigError
from ecrl.policies.core import Policy
from ecrl.spaces import Box, Dict, Discrete, MultiDiscrete, Space, flat_dim

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


class Head(NamedTuple):
    """Functions of an action distribution. All functions except `noise` take `log_std` and `output` as first arguments.

    For Box actions, `output`, of shape `[*B, A]`, is the mean of the Gaussian, before tanh if the actions are squashed.
    For discrete actions, `output` holds the logits, and `log_std` is None.
    """

    noise: Callable[[Tensor], Tensor]
    sample: Callable[..., Tensor]
    mode: Callable[..., Tensor]
    log_prob: Callable[..., Tensor]
    entropy: Callable[..., Tensor]


def bounded(log_std: Tensor) -> Tensor:
    """Clamp `log_std` to [-5, 2]. The gradient passes unchanged, so training can move a value back into this range."""
    return log_std + (log_std.clamp(LOG_STD_MIN, LOG_STD_MAX) - log_std).detach()


def _to_space_shape(action: Tensor, space: Box) -> Tensor:
    return action.reshape((*action.shape[:-1], *space.shape))


def _to_flat(action: Tensor, space: Box) -> Tensor:
    return action.reshape(*action.shape[: action.ndim - len(space.shape)], flat_dim(space))


def normal_head(space: Box) -> Head:
    """Return a head for a diagonal Gaussian that ignores the bounds of the space."""
    return Head(
        noise=lambda keys: rng.normal(keys, (flat_dim(space),)),
        sample=lambda log_std, mean, noise: _to_space_shape(k.normal_sample(mean, bounded(log_std), noise), space),
        mode=lambda log_std, mean: _to_space_shape(k.normal_mode(mean), space),
        log_prob=lambda log_std, mean, action: k.normal_log_prob(mean, bounded(log_std), _to_flat(action, space)),
        entropy=lambda log_std, mean: k.normal_entropy(mean, bounded(log_std)),
    )


def has_finite_bounds(space: Box) -> bool:
    """Return True if all bounds of a Box are finite."""
    return all(isfinite(bound) for bound in (*space.low, *space.high))


def to_unit(action: Tensor, space: Box) -> Tensor:
    """Scale actions `[*B, *shape]` of a bounded Box to [-1, 1], and flatten each action. The result is `[*B, A]`.

        (action - centre) / half_width

    An entry whose bounds are equal becomes 0.

    >>> from ecrl.spaces import box
    >>> to_unit(torch.tensor([[0.0], [4.0]]), box(0.0, 4.0, 1)).tolist()
    [[-1.0], [1.0]]
    """
    low, high = action.new_tensor(space.low), action.new_tensor(space.high)
    half_width = (high - low) / 2.0
    return (_to_flat(action, space) - (high + low) / 2.0) / half_width.where(half_width > 0.0, 1.0)


def from_unit(unit: Tensor, space: Box) -> Tensor:
    """Scale flat actions `[*B, A]` in [-1, 1] to a bounded Box. The result is `[*B, *shape]`.

        centre + half_width * unit

    >>> from ecrl.spaces import box
    >>> from_unit(torch.tensor([[-1.0], [1.0]]), box(0.0, 4.0, 1)).tolist()
    [[0.0], [4.0]]
    """
    low, high = unit.new_tensor(space.low), unit.new_tensor(space.high)
    action = (high + low) / 2.0 + (high - low) / 2.0 * unit
    return _to_space_shape(action.clamp(low, high), space)  # rounding can move an action outside the space


def squashed_head(space: Box) -> Head:
    """Return a head for a Gaussian squashed into the space: `action = centre + half_width * tanh(latent)`.

    The log-probability is the log-density of `tanh(latent)`. The constant `sum(log(half_width))` is left out, because
    the constant changes neither ratios nor gradients. `act` and `evaluate` both compute the log-probability from the
    action, so their results agree even if tanh saturates.
    """
    if not has_finite_bounds(space):
        raise ConfigError("policy.squash: not all bounds of the action space are finite; leave squash out")

    def log_prob(log_std: Tensor, mean: Tensor, action: Tensor) -> Tensor:
        return k.tanh_normal_log_prob(mean, bounded(log_std), k.tanh_normal_latent(to_unit(action, space)))

    return Head(
        noise=lambda keys: rng.normal(keys, (flat_dim(space),)),
        sample=lambda log_std, mean, noise: from_unit(
            k.tanh_normal_sample(mean, bounded(log_std), noise).action, space
        ),
        mode=lambda log_std, mean: from_unit(k.tanh_normal_mode(mean), space),
        log_prob=log_prob,
        entropy=lambda log_std, mean: k.tanh_normal_entropy(mean, bounded(log_std)),
    )


def _categorical_head(space: Discrete) -> Head:
    return Head(
        noise=lambda keys: rng.gumbel(keys, (space.n,)),
        sample=lambda _, logits, noise: k.categorical_sample(logits, noise),
        mode=lambda _, logits: k.categorical_mode(logits),
        log_prob=lambda _, logits, action: k.categorical_log_prob(logits, action),
        entropy=lambda _, logits: k.categorical_entropy(logits),
    )


def _multi_discrete_head(space: MultiDiscrete) -> Head:
    nvec = space.nvec
    return Head(
        noise=lambda keys: rng.gumbel(keys, (sum(nvec),)),
        sample=lambda _, logits, noise: k.multi_discrete_sample(logits, noise, nvec=nvec),
        mode=lambda _, logits: k.multi_discrete_mode(logits, nvec=nvec),
        log_prob=lambda _, logits, action: k.multi_discrete_log_prob(logits, action, nvec=nvec),
        entropy=lambda _, logits: k.multi_discrete_entropy(logits, nvec=nvec),
    )


def make_head(space: Space, squash: bool) -> Head:
    """Return the head of an action space.

    Raises: ConfigError for an unsupported space, or if `squash` is True and the space is not a Box with finite bounds.
    """
    match space:
        case Box() if space.dtype != torch.float32:
            raise ConfigError(f"policy: actions of {space} are not supported; use float32, or Discrete for choices")
        case Box():
            return squashed_head(space) if squash else normal_head(space)
        case Discrete() | MultiDiscrete() if squash:
            raise ConfigError(f"policy.squash: expected Box actions, got {space}; leave squash out")
        case Discrete():
            return _categorical_head(space)
        case MultiDiscrete():
            return _multi_discrete_head(space)
    raise ConfigError(f"policy: actions of {space} are not supported; use Box, Discrete or MultiDiscrete")


def is_masked(observation_space: Space, action_space: Space) -> bool:
    """Return True if observations have an `action_mask`. Raise ConfigError for a mask of Box actions."""
    masked = isinstance(observation_space, Dict) and "action_mask" in dict(observation_space.items)
    if masked and isinstance(action_space, Box):
        raise ConfigError("policy: obs['action_mask'] needs Discrete or MultiDiscrete actions, got Box; leave it out")
    return masked


def head_width(space: Space, action_dim: int | None) -> int:
    """Check `action_dim`, and return the number of outputs that the head of an action space needs."""
    width = flat_dim(space)
    if action_dim not in (None, width):
        raise ConfigError(
            f"policy.action_dim: {action_dim} does not match the environment's {width} ({space}); "
            f"use {width} or leave it out"
        )
    return width


def initial_log_std(space: Space, value: float) -> dict[str, Tensor]:
    """For Box actions, return a dict with `log_std`, a tensor `[A]` filled with `value`. Else return an empty dict."""
    return {"log_std": torch.full((flat_dim(space),), value)} if isinstance(space, Box) else {}


def headed(
    head: Head,
    init: Callable[[Tensor], TensorDict],
    output: Callable[[TensorDict, Any], tuple[Tensor | None, Tensor]],
    value: Callable[[TensorDict, TensorDict, Any], Tensor] | None = None,
) -> Policy:
    """Build a policy from a head and `output(params, obs) -> (log_std, mean or logits)`.

    For logits, log_std is None.
    """

    def act(params: TensorDict, carry: TensorDict, obs: Any, noise: Tensor | None) -> tuple[TensorDict, TensorDict]:
        log_std, out = output(params, obs)
        action = head.mode(log_std, out) if noise is None else head.sample(log_std, out, noise)
        log_prob = head.log_prob(log_std, out, action)
        return carry, TensorDict({"action": action, "sample_log_prob": log_prob}, out.shape[:-1])

    def evaluate(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor]:
        log_std, out = output(params, steps["obs"])
        return head.log_prob(log_std, out, steps["action"]), head.entropy(log_std, out)

    return Policy(init, head.noise, act, evaluate, value)
