"""A policy is a frozen record of pure functions over a TensorDict of parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.spaces import Box, Dict, Discrete, MultiDiscrete, Space, flat_dim


@dataclass(frozen=True)
class Policy:
    """Functions of one policy.

    init: 0-d key -> params. draw: keys `[*B]` -> noise `[*B, ...]` of an action. act: (params, carry, obs, noise) ->
    (carry, out), `out` with `action` and `sample_log_prob`; noise None gives the deterministic action. evaluate:
    (params, carry, obs, action, done) -> (log_prob, entropy), nats. value: (params, carry, obs) -> V `[*B]`, or None
    without a critic. `carry` is the policy's memory, an empty TensorDict for feed-forward ones.
    """

    init: Callable[[Tensor], TensorDict]
    draw: Callable[[Tensor], Tensor]
    act: Callable[[TensorDict, TensorDict, Any, Tensor | None], tuple[TensorDict, TensorDict]]
    evaluate: Callable[[TensorDict, TensorDict, Any, Tensor, Tensor], tuple[Tensor, Tensor]]
    value: Callable[[TensorDict, TensorDict, Any], Tensor] | None


def flatten(obs: Any, space: Space) -> Tensor:
    """An observation as float features `[*B, flat_dim(space)]`.

    Elements of a Box, a one-hot per Discrete, a Dict's parts in order of name without `action_mask`.

    >>> from ecrl.spaces import box, dict_space
    >>> space = dict_space({"b": box(0.0, 1.0, 2), "a": box(0.0, 1.0)})
    >>> flatten(TensorDict({"b": torch.ones(3, 2), "a": torch.zeros(3)}, [3]), space)[0].tolist()
    [0.0, 1.0, 1.0]
    """
    match space:
        case Dict():
            return torch.cat([flatten(obs[name], part) for name, part in space.items if name != "action_mask"], -1)
        case Box():
            return obs.reshape(*obs.shape[: obs.ndim - len(space.shape)], flat_dim(space))
        case Discrete():
            return (obs.unsqueeze(-1) == torch.arange(space.n, device=obs.device)).to(torch.get_default_dtype())
        case MultiDiscrete():
            return torch.cat(
                [flatten(part, Discrete(n)) for part, n in zip(obs.unbind(-1), space.nvec, strict=True)], -1
            )
