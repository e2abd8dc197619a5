"""Parts that show the effect of keys without effect on built-in parts, registered for the tests of every key."""

import time
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn

from ecrl import registry, rng
from ecrl.config.model import ConfigModel
from ecrl.envs import Env, time_limit
from ecrl.policies import flatten
from ecrl.registry import register_env, register_event, register_network
from ecrl.spaces import Discrete, Space, box, dict_space, flat_dim

KINDS = ("env", "network", "event")


class TwoPartsConfig(ConfigModel):
    """No settings."""


class OneLayerConfig(ConfigModel):
    """No settings."""


class NudgeConfig(ConfigModel):
    """The distance of the nudge."""

    by: float = Field(0.3, description="added to the angle, rad")


def two_parts(cfg: TwoPartsConfig) -> Env:
    """Environment that observes a place and another number; the reward is `-(place + action)^2`, also beyond +-1."""

    def state_of(keys, place, reward):
        no = torch.zeros(keys.shape, dtype=torch.bool)
        obs = TensorDict({"place": place, "other": torch.sin(3.0 * place)}, keys.shape)
        fields = {"obs": obs, "reward": reward, "terminated": no, "truncated": no.clone()}
        return TensorDict(fields, keys.shape)

    def reset(keys):
        return state_of(keys, rng.uniform(keys, (1,)), torch.zeros(keys.shape))

    def step(state, action, noise):
        place = state["obs", "place"] + 0.1 * action
        after = state_of(state["reward"], place, -(state["obs", "place"] + action).square().sum(-1))
        return state.copy().update(after)

    space = dict_space({"place": box(-10.0, 10.0, 1), "other": box(-1.0, 1.0, 1)})
    return time_limit(Env(reset, step, space, box(-1.0, 1.0, 1)), 5)


def two_choices(cfg: TwoPartsConfig) -> Env:
    """The environment `two_parts` with the actions -1, 0 and 1."""
    env = two_parts(cfg)

    def step(state, action, noise):
        return env.step(state, (action - 1.0).unsqueeze(-1), noise)

    return replace(env, step=step, action_space=Discrete(3))


class _OneLayer(nn.Linear):
    def __init__(self, space: Space, outputs: int):
        super().__init__(flat_dim(space), outputs)
        self.space = space

    def forward(self, obs: Any) -> Tensor:  # pyright: ignore
        return super().forward(flatten(obs, self.space))


def one_layer(cfg: OneLayerConfig, space: Space, outputs: int) -> nn.Module:
    """A linear layer on the flat observation."""
    return _OneLayer(space, outputs)


def nudge(cfg: NudgeConfig):
    """Add to the angle of a pendulum."""
    return lambda state, keys: state.copy().update({"angle": state["angle"] + cfg.by})


def register() -> None:
    """Register the parts, in copies of the registries."""
    for kind in KINDS:
        registry._ENTRIES[kind] = dict(registry._ENTRIES[kind])
    register_env("two_parts")(two_parts)
    register_env("two_choices")(two_choices)
    register_network("one_layer")(one_layer)
    register_event("nudge")(nudge)
    gymnasium.register("Napping-v0", napping())


def napping() -> type[gymnasium.Env]:
    """Takes a second for its third step. A class made here travels to workers by value: they need no tests."""

    class Napping(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Box(0, 9, (1,)), gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.taken = 0
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.taken += 1
            time.sleep(self.taken == 3)
            return np.full(1, self.taken, np.float32), 1.0, False, self.taken == 9, {}

    return Napping
