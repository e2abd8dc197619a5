"""A policy is a frozen record of pure functions over a TensorDict of parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.spaces import Box, Dict, Discrete, MultiDiscrete, Space, element_dtype, element_shape, flat_dim, is_image


@dataclass(frozen=True)
class Policy:
    """Pure functions that make up a policy.

    `carry` is the policy's memory, an empty TensorDict for feed-forward policies.

    Attributes:
        init: 0-d key -> params.
        draw: keys `[*B]` -> noise `[*B, ...]` of an action.
        act: (params, carry, obs, noise) -> (carry, out); `out` has `action` and `sample_log_prob`. With noise None,
            the action is deterministic.
        evaluate: (params, carry, obs, action, done) -> (log_prob, entropy), nats.
        value: (params, carry, obs) -> V `[*B]`; None without a critic.
        norm_init: device -> the statistics of `normalized` before the first step.
        norm_update: (statistics, obs, mask) -> the statistics updated with a batch.
        compiles: False if a module draws its own random numbers.
    """

    init: Callable[[Tensor], TensorDict]
    draw: Callable[[Tensor], Tensor]
    act: Callable[[TensorDict, TensorDict, Any, Tensor | None], tuple[TensorDict, TensorDict]]
    evaluate: Callable[[TensorDict, TensorDict, Any, Tensor, Tensor], tuple[Tensor, Tensor]]
    value: Callable[[TensorDict, TensorDict, Any], Tensor] | None
    norm_init: Callable[[torch.device], TensorDict] | None = None
    norm_update: Callable[[TensorDict, Any, Tensor], TensorDict] | None = None
    compiles: bool = True


def acting_params(params: TensorDict, norm: TensorDict) -> TensorDict:
    """Return the `params` of a policy's functions: its parameters and, under `norm`, its observation statistics."""
    return params.copy().set("norm", norm["obs"]) if "obs" in norm else params.copy()


def flatten(obs: Any, space: Space) -> Tensor:
    """Flatten an observation to float features `[*B, flat_dim(space)]`.

    A Box gives its elements as floats, an image (`ecrl.spaces.is_image`) divided by 255, as Stable-Baselines3 does it.
    A Discrete gives a one-hot vector. A Dict gives its parts in order of name, without `action_mask`.

    >>> from ecrl.spaces import box, dict_space
    >>> space = dict_space({"b": box(0.0, 1.0, 2), "a": box(0.0, 1.0)})
    >>> flatten(TensorDict({"b": torch.ones(3, 2), "a": torch.zeros(3)}, [3]), space)[0].tolist()
    [0.0, 1.0, 1.0]
    >>> flatten(torch.full((1, 1, 2, 1), 51, dtype=torch.uint8), box(0, 255, 1, 2, 1, dtype=torch.uint8))
    tensor([[0.2000, 0.2000]])
    """
    match space:
        case Dict():
            return torch.cat([flatten(obs[name], part) for name, part in space.items if name != "action_mask"], -1)
        case Box():
            rows = obs.reshape(*obs.shape[: obs.ndim - len(space.shape)], flat_dim(space))
            rows = rows if space.dtype == torch.float32 else rows.to(torch.get_default_dtype())
            return rows / 255.0 if is_image(space) else rows
        case Discrete():
            return (obs.unsqueeze(-1) == torch.arange(space.n, device=obs.device)).to(torch.get_default_dtype())
        case MultiDiscrete():
            return torch.cat(
                [flatten(part, Discrete(n)) for part, n in zip(obs.unbind(-1), space.nvec, strict=True)], -1
            )


def one_batch(obs: Any, space: Space) -> tuple[Any, torch.Size]:
    """Reshape an observation `[*B, ...]` to one batch axis, as modules expect; return it with `B`.

    >>> from ecrl.spaces import box
    >>> rows, batch = one_batch(torch.zeros(5, 6, 3, 8, 8), box(0.0, 1.0, 3, 8, 8))
    >>> rows.shape, batch
    (torch.Size([30, 3, 8, 8]), torch.Size([5, 6]))
    """
    if isinstance(space, Dict):
        parts = {name: one_batch(obs[name], part) for name, part in space.items}
        first, batch = next(iter(parts.values()))
        return TensorDict({name: rows for name, (rows, _) in parts.items()}, [first.shape[0]]), batch
    shape = element_shape(space)
    batch = obs.shape[: obs.ndim - len(shape)]
    return obs if len(batch) == 1 else obs.reshape((batch.numel(), *shape)), batch


def example(space: Space) -> Any:
    """Return two all-zero observations of a space, with every choice allowed, to try a module with."""
    if isinstance(space, Dict):
        parts = {name: example(part) for name, part in space.items}
        mask = (
            {"action_mask": torch.ones_like(parts["action_mask"], dtype=torch.bool)} if "action_mask" in parts else {}
        )
        return TensorDict(parts | mask, [2])
    dtype = element_dtype(space)
    return torch.zeros(2, *element_shape(space), dtype=None if dtype == torch.float32 else dtype)
