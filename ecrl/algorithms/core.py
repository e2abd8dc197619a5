"""An algorithm is a frozen record of pure functions: what it keeps in the state, how it collects, how it learns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import distributed, rng
from ecrl.config import Config
from ecrl.envs import Env
from ecrl.kernels import collect_rollout, episode_update
from ecrl.policies import Policy
from ecrl.types import Logs

Jit = Callable[..., Callable[..., Any]]


class Parts(NamedTuple):
    """What a run is made of. `jit(fn, *static)` binds static arguments to `fn` and may compile it."""

    env: Env
    policy: Policy
    cfg: Config
    jit: Jit


def env_index(num_envs: int, device: torch.device | None) -> Tensor:
    """Global indices of this rank's environments, int64 `[N]`."""
    return torch.arange(num_envs, device=device) + distributed.rank() * num_envs


def collect(parts: Parts, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """`buffer_size` steps of every environment: the state with env and episode moved on, and the rollout `[N, T + 1]`.

    The noise of a step is a function of (key, stream, global env index, steps the env has taken), of nothing else.
    """
    trainer, key = parts.cfg.trainer, state["key"]
    index = env_index(trainer.num_envs, key.device)
    taken = state["sample_step"] // (trainer.num_envs * distributed.world_size())
    steps = taken + torch.arange(trainer.buffer_size, device=key.device)
    env_keys, action_keys = (rng.stream(key, name, index, steps.unsqueeze(1)) for name in (rng.ENV, rng.ACTION))
    empty = TensorDict({}, [])
    _, env, rollout = collect_rollout(
        parts.policy, parts.env, state["params"], empty, state["env"], env_keys, action_keys, jit=parts.jit
    )
    episode = episode_update(state["episode"], rollout["reward"][:, :-1], rollout["done"][:, :-1])
    return state.copy().update({"env": env, "episode": episode}), rollout


@dataclass(frozen=True)
class Algorithm:
    """Functions of one algorithm.

    init: (parts, key) -> {name: TensorDict}, its part of the state. collect: (parts, state) -> (state, batch). update:
    (parts, state, batch) -> (state, logs).
    """

    init: Callable[[Parts, Tensor], dict[str, TensorDict]]
    update: Callable[[Parts, TensorDict, TensorDict], tuple[TensorDict, Logs]]
    collect: Callable[[Parts, TensorDict], tuple[TensorDict, TensorDict]] = collect
