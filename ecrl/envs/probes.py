"""Five environments whose value function is known, each able to fail for one reason only.

| name | observation | reward | ends | value | fails if |
|---|---|---|---|---|---|
| probe_constant | 0 | 1 | after 1 step | 1 | the critic or its target is wrong |
| probe_observation | -1 or 1 | the observation | after 1 step | the observation | the critic is blind |
| probe_delay | 0, then 1 | 0, then 1 | after 2 steps | gamma, then 1 | discounting or bootstrapping is wrong |
| probe_action | 0 | 1 if action 1 else -1 | after 1 step | 1 when learnt | advantages or the policy loss are wrong |
| probe_match | 0 or 1 | 1 if action equals it else -1 | after 1 step | 1 when learnt | rows are mixed up |

Source: the idea is Andy Jones 2021, "Debugging RL, without the agonizing pain".
"""

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel
from ecrl.envs.core import Env, state_of
from ecrl.registry import register_env
from ecrl.spaces import Discrete, box


class ProbeConfig(ConfigModel):
    """A probe has no settings."""


def _one_step(first_obs: Callable[[Tensor], Tensor], reward: Callable[[Tensor, Tensor], Tensor]) -> Env:
    """Episodes of one step that start at `first_obs(keys)` `[*B]` and pay `reward(obs, action)`."""

    def reset(keys: Tensor) -> TensorDict:
        return state_of(first_obs(keys).unsqueeze(-1), keys.shape)

    def step(state: TensorDict, action: Tensor, noise: object) -> TensorDict:
        paid = reward(state["obs"][..., 0], action)
        ended = torch.ones_like(state["terminated"])
        return state.copy().update({"reward": paid, "terminated": ended, "truncated": ~ended})

    return Env(reset, step, box(-1.0, 1.0, 1), Discrete(2))


def _zero(keys: Tensor) -> Tensor:
    return torch.zeros(keys.shape, device=keys.device)


def _coin(keys: Tensor) -> Tensor:
    return rng.randint(keys, low=0, high=2).to(torch.float32)


def _sign(hit: Tensor) -> Tensor:
    return 2.0 * hit.to(torch.float32) - 1.0


@register_env("probe_constant")
def probe_constant(cfg: ProbeConfig) -> Env:
    """Reward 1, one step: V = 1."""
    return _one_step(_zero, lambda obs, action: torch.ones_like(obs))


@register_env("probe_observation")
def probe_observation(cfg: ProbeConfig) -> Env:
    """Reward is the observation, -1 or 1: V = obs."""
    return _one_step(lambda keys: 2.0 * _coin(keys) - 1.0, lambda obs, action: obs.clone())


@register_env("probe_delay")
def probe_delay(cfg: ProbeConfig) -> Env:
    """Observations 0, 1; reward 1 at the second and last step: V(0) = gamma, V(1) = 1."""

    def reset(keys: Tensor) -> TensorDict:
        return state_of(_zero(keys).unsqueeze(-1), keys.shape)

    def step(state: TensorDict, action: Tensor, noise: object) -> TensorDict:
        second = state["obs"][..., 0] == 1.0
        after = {"obs": torch.ones_like(state["obs"]), "reward": second.to(torch.float32), "terminated": second}
        return state.copy().update(after | {"truncated": torch.zeros_like(second)})

    return Env(reset, step, box(0.0, 1.0, 1), Discrete(2))


@register_env("probe_action")
def probe_action(cfg: ProbeConfig) -> Env:
    """Action 1 pays 1, action 0 pays -1: the policy learns 1, then V = 1."""
    return _one_step(_zero, lambda obs, action: _sign(action == 1))


@register_env("probe_match")
def probe_match(cfg: ProbeConfig) -> Env:
    """The action equal to the observation pays 1, the other -1: the policy learns it, then V = 1."""
    return _one_step(_coin, lambda obs, action: _sign(action == obs.to(torch.int64)))
