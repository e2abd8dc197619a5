"""An environment whose actions are chunks of several steps, and the steps of it one by one: both are for tests."""

from typing import Any, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config import Config, config_from_dict
from ecrl.config.model import ConfigModel, Count, Fraction
from ecrl.envs import Env, state_of
from ecrl.registry import register_env
from ecrl.spaces import box
from support.small_runs import NET


class ChunksConfig(ConfigModel):
    """Length of a chunk, and how an episode ends."""

    chunk: Count = Field(default=3, description="steps of an action")
    gamma: Fraction = Field(default=1.0, description="discount inside a chunk")
    end: Literal["terminated", "truncated"] = Field(default="terminated", description="flag of the last step")
    reports: bool = Field(default=True, description="set `executed`")


def step_reward(place: Tensor, action: Tensor) -> Tensor:
    """Reward of one step from `place` with one number of the action."""
    return torch.sin(place) + 0.1 * action


def next_place(place: Tensor, action: Tensor) -> Tensor:
    """Place after one step."""
    return place + 0.3 + 0.05 * action.clamp(-1.0, 1.0)


@register_env("chunks", override=True)
def chunks(cfg: ChunksConfig) -> Env:
    """Walk along a line. An episode ends after 4 to 9 steps, often inside a chunk."""

    def state_at(place: Tensor, left: Tensor, reward: Tensor, executed: Tensor) -> TensorDict:
        state = state_of(torch.stack((place, left.to(place.dtype)), -1), place.shape, place=place, left=left)
        state = state.update({"reward": reward})
        return state.set("executed", executed) if cfg.reports else state

    def reset(keys: Tensor) -> TensorDict:
        place, left = rng.uniform(keys), rng.randint(rng.fold_in(keys, 1), low=4, high=10)
        return state_at(place, left, torch.zeros_like(place), torch.zeros_like(left))

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        place, left, reward = state["place"], state["left"], torch.zeros_like(state["reward"])
        executed = torch.zeros_like(left)
        for i in range(cfg.chunk):
            runs = left > 0
            reward = reward + torch.where(runs, cfg.gamma**i * step_reward(place, action[..., i]), 0.0)
            place = torch.where(runs, next_place(place, action[..., i]), place)
            executed, left = executed + runs, left - runs.to(left.dtype)
        return state_at(place, left, reward, executed).update({cfg.end: left == 0})

    gap = -(-4 // cfg.chunk)
    return Env(reset, step, box(-10.0, 10.0, 2), box(-2.0, 2.0, cfg.chunk), min_truncation_gap=gap)


def chunked(**changes: Any) -> Config:
    """PPO on chunks, eager, with dotted keys changed."""
    base = {
        "trainer": {"num_envs": 4, "buffer_size": 8, "iterations": 3, "compile": "off", "enable_eval": False},
        "env": {"name": "chunks"},
        "policy": {"name": "actor_critic", "actor": NET, "critic": NET},
        "algorithm": {"name": "ppo", "cfg": {"n_epochs": 2, "batch_size": 16, "gamma": 0.9}},
    }
    return config_from_dict(base).replace(**changes)
