"""Five small environments with known value functions.

Each environment reveals an error in one component of an algorithm.

    name               observation  reward                      steps  value          fails if
    probe_constant     0            1                           1      1              the critic or its target is wrong
    probe_observation  -1 or 1      the observation             1      observation    the critic ignores observations
    probe_delay        0, then 1    0, then 1                   2      gamma, then 1  discounting is wrong
    probe_action       0            1 for action 1, else -1     1      1 once learnt  the policy's gradient is wrong
    probe_match        0 or 1       1 if action = obs, else -1  1      1 once learnt  envs of the batch are mixed up

The column "steps" gives the length of an episode, and the column "value" gives the value of each observation. An
algorithm also fails in `probe_delay` if its bootstrapping is wrong, and in `probe_action` if its advantages are wrong.

Source: Andy Jones 2021, "Debugging RL, without the agonizing pain".
"""

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel
from ecrl.envs.core import NEVER, Env, state_of
from ecrl.registry import register_env
from ecrl.spaces import Discrete, box


class ProbeConfig(ConfigModel):
    """The config of a probe environment, which has no settings."""


def _one_step(first_obs: Callable[[Tensor], Tensor], reward: Callable[[Tensor, Tensor], Tensor]) -> Env:
    """Return an environment whose episodes have one step.

    `first_obs(keys)` returns the observations `[*B]`, and `reward(obs, action)` returns the rewards `[*B]`.
    """

    def reset(keys: Tensor) -> TensorDict:
        return state_of(first_obs(keys).unsqueeze(-1), keys.shape)

    def step(state: TensorDict, action: Tensor, noise: object) -> TensorDict:
        step_reward = reward(state["obs"][..., 0], action)
        terminated = torch.ones_like(state["terminated"])
        return state.copy().update({"reward": step_reward, "terminated": terminated, "truncated": ~terminated})

    return Env(reset, step, box(-1.0, 1.0, 1), Discrete(2), min_truncation_gap=NEVER)


def _zero(keys: Tensor) -> Tensor:
    return torch.zeros(keys.shape, device=keys.device)


def _zero_or_one(keys: Tensor) -> Tensor:
    return rng.randint(keys, low=0, high=2).to(torch.float32)


def _plus_or_minus_one(correct: Tensor) -> Tensor:
    return 2.0 * correct.to(torch.float32) - 1.0


@register_env("probe_constant")
def probe_constant(cfg: ProbeConfig) -> Env:
    """Return a one-step environment with reward 1, so the value is V = 1."""
    return _one_step(_zero, lambda obs, action: torch.ones_like(obs))


@register_env("probe_observation")
def probe_observation(cfg: ProbeConfig) -> Env:
    """Return a one-step environment with observation -1 or 1, and with reward and value V equal to the observation."""
    return _one_step(lambda keys: 2.0 * _zero_or_one(keys) - 1.0, lambda obs, action: obs.clone())


@register_env("probe_delay")
def probe_delay(cfg: ProbeConfig) -> Env:
    """Return a two-step environment with observations 0, 1 and rewards 0, 1.

    The values of the observations are V(0) = gamma and V(1) = 1.
    """

    def reset(keys: Tensor) -> TensorDict:
        return state_of(_zero(keys).unsqueeze(-1), keys.shape)

    def step(state: TensorDict, action: Tensor, noise: object) -> TensorDict:
        second = state["obs"][..., 0] == 1.0
        after = {"obs": torch.ones_like(state["obs"]), "reward": second.to(torch.float32), "terminated": second}
        return state.copy().update(after | {"truncated": torch.zeros_like(second)})

    return Env(reset, step, box(0.0, 1.0, 1), Discrete(2), min_truncation_gap=NEVER)


@register_env("probe_action")
def probe_action(cfg: ProbeConfig) -> Env:
    """Return a one-step environment with reward 1 for action 1 and -1 for action 0.

    The value of the best policy is V = 1.
    """
    return _one_step(_zero, lambda obs, action: _plus_or_minus_one(action == 1))


@register_env("probe_match")
def probe_match(cfg: ProbeConfig) -> Env:
    """Return a one-step environment with reward 1 if the action equals the observation, else -1.

    The value of the best policy is V = 1.
    """
    return _one_step(_zero_or_one, lambda obs, action: _plus_or_minus_one(action == obs.to(torch.int64)))
