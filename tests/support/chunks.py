"""Environments for tests whose actions are chunks of several steps, and the single steps of one of them."""

from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config import Config, config_from_dict
from ecrl.config.model import ConfigModel, Count, Fraction
from ecrl.envs import Env, make_env, state_of
from ecrl.envs.cartpole import CartPoleConfig
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


@register_env("repeated_pole", override=True)
def repeated_pole(cfg: CartPoleConfig) -> Env:
    """CartPole that takes each action twice, unless the first step ends the episode. The reward is 1 per step."""
    pole = make_env({"name": "cartpole", "cfg": cfg.model_dump()})

    def counted(state: TensorDict, executed: Tensor) -> TensorDict:
        info = TensorDict({"angle": state["obs"][..., 2].clone()}, state.batch_size)
        return state.copy().update({"executed": executed, "info": info})

    def reset(keys: Tensor) -> TensorDict:
        return counted(pole.reset(keys), torch.zeros_like(keys))

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        one = pole.step(state.exclude("executed", "info"), action, noise)
        two, done = pole.step(one, action, noise), one["terminated"] | one["truncated"]
        after = one.where(done, two.update({"reward": one["reward"] + two["reward"]}))
        return counted(after, 2 - done.to(torch.int64))

    return replace(pole, reset=reset, step=step, min_truncation_gap=-(-pole.min_truncation_gap // 2))


def chunked(**changes: Any) -> Config:
    """PPO on chunks, eager, with dotted keys changed."""
    base = {
        "trainer": {"num_envs": 4, "buffer_size": 8, "iterations": 3, "compile": "off", "enable_eval": False},
        "env": {"name": "chunks"},
        "policy": {"name": "actor_critic", "actor": NET, "critic": NET},
        "algorithm": {"name": "ppo", "cfg": {"n_epochs": 2, "batch_size": 16, "gamma": 0.9}},
    }
    return config_from_dict(base).replace(**changes)
