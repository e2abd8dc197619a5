"""Adapt a policy that chooses chunks of actions to an environment that takes single actions."""

from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.policies.core import Policy
from ecrl.pytree import flatten, mapped
from ecrl.spaces import Space, element_dtype, element_shape


@cache
def in_single_actions(policy: Policy, k: int, action_space: Space) -> Policy:
    """Return a policy that chooses a chunk of `k` actions, and then takes them one at a time.

    The new policy can only act, for videos and evaluations in environments without chunks. The memory of the new policy
    has three fields. `chunk` is the current chunk, `taken` is the number of actions taken from it, and `memory` is the
    memory of `policy`. All three fields restart with each episode, so an episode begins with a new chunk. The memory of
    `policy` advances once per chunk.

    Args:
        policy: a policy whose actions are chunks (see `ecrl.envs.chunked`).
        k: number of actions in a chunk.
        action_space: the space of a single action.
    """
    shape, dtype = element_shape(action_space), element_dtype(action_space)

    def init_carry(params: TensorDict, num_envs: int) -> TensorDict:
        device = flatten(params)[0][0].device
        chunk = torch.zeros(num_envs, k, *shape, dtype=dtype, device=device)
        taken = torch.zeros(num_envs, dtype=torch.int64, device=device)
        fields = {"chunk": chunk, "taken": taken, "memory": policy.init_carry(params, num_envs)}
        return TensorDict(cast(Any, fields), [num_envs])

    def act(params: TensorDict, carry: TensorDict, obs: Any, noise: Any) -> tuple[TensorDict, TensorDict]:
        taken, memory = cast(Tensor, carry["taken"]), cast(TensorDict, carry["memory"])
        after, out = policy.act(params, memory, obs, noise)
        chooses = taken == 0

        def where_chosen(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(chooses.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        chunk = where_chosen(out["action"].reshape(-1, k, *shape), cast(Tensor, carry["chunk"]))
        index = taken.reshape(-1, 1, *[1] * len(shape)).expand(-1, 1, *shape)
        action = chunk.gather(1, index).squeeze(1)
        memory = memory if memory.is_empty() else mapped(where_chosen, after, memory)
        fields = {"chunk": chunk, "taken": (taken + 1) % k, "memory": memory}
        return TensorDict(cast(Any, fields), carry.batch_size), TensorDict({"action": action}, carry.batch_size)

    unused = ("evaluate", "value", "evaluate_and_value", "imitation_loss", "draw_imitation", "explore", "q")
    none: dict[str, Any] = dict.fromkeys(unused)
    return replace(policy, act=act, init_carry=init_carry, unit="sequence", frame_stack=1, **none)
