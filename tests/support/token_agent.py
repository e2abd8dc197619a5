"""A policy whose action is two tokens; the second may be masked. It tests declared fields.

The environment shows -1 or 1. The first token must be 1 if the observation is positive. Token 1 means that a second
token follows, which must be 2. An action is the number `3 * first + second`, with second 0 if it is masked.
"""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import kernels as k
from ecrl import rng
from ecrl.config import Config, PolicyConfig, config_from_dict
from ecrl.config.model import ConfigModel
from ecrl.envs import NEVER, Env, state_of
from ecrl.policies import Policy
from ecrl.registry import register_env, register_policy
from ecrl.spaces import Discrete, Space, box

CHOICES = 3


class WordsConfig(ConfigModel):
    """No settings."""


@register_env("two_words", override=True)
def two_words(cfg: WordsConfig) -> Env:
    """One step: reward 1 for the action 5 at an observation of 1, and for the action 0 at -1."""

    def reset(keys: Tensor) -> TensorDict:
        sign = 2.0 * rng.randint(keys, low=0, high=2) - 1.0
        return state_of(sign.unsqueeze(-1), keys.shape)

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        right = torch.where(state["obs"][..., 0] > 0, action == 5, action == 0)
        ended = torch.ones_like(state["terminated"])
        return state.copy().update({"reward": right.to(torch.float32), "terminated": ended, "truncated": ~ended})

    return Env(reset, step, box(-1.0, 1.0, 1), Discrete(6), min_truncation_gap=NEVER, lockstep=True)


@register_env("spelling", override=True)
def spelling(cfg: WordsConfig) -> Env:
    """Three questions as in `two_words`, alternating; a wrong answer ends the episode, and three right ones give 1."""

    def reset(keys: Tensor) -> TensorDict:
        sign = 2.0 * rng.randint(keys, low=0, high=2) - 1.0
        return state_of(sign.unsqueeze(-1), keys.shape).set("asked", torch.zeros_like(sign))

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        right = torch.where(state["obs"][..., 0] > 0, action == 5, action == 0)
        asked = state["asked"] + 1.0
        done = ~right | (asked == 3.0)
        reward = (right & (asked == 3.0)).to(torch.float32)
        after = {"obs": -state["obs"], "asked": asked, "reward": reward, "terminated": done}
        return state.copy().update(after | {"truncated": torch.zeros_like(done)})

    return Env(reset, step, box(-1.0, 1.0, 1), Discrete(6), min_truncation_gap=NEVER)


@register_policy("two_tokens", override=True)
def two_tokens(cfg: PolicyConfig, observation_space: Space, action_space: Space) -> Policy:
    """Linear logits of both tokens; the first has two choices and the second three, chosen after the first."""

    def init(key: Tensor) -> TensorDict:
        shapes = {"first": (2, 2), "second": (2, 2, CHOICES), "critic": (2, 1)}
        return TensorDict(
            {name: 0.1 * rng.normal(rng.fold_in(key, i), s) for i, (name, s) in enumerate(shapes.items())}
        )

    def features(obs: Tensor) -> Tensor:
        return torch.cat((obs, torch.ones_like(obs)), -1)

    def logits_of(params: TensorDict, obs: Tensor, first: Tensor) -> Tensor:
        x = features(obs)
        weights = torch.where((first > 0)[..., None, None], params["second"][:, 1], params["second"][:, 0])
        return (x.unsqueeze(-2) @ weights).squeeze(-2)

    def draw(keys: Tensor) -> Tensor:
        return rng.gumbel(keys, (2 + CHOICES,))

    def act(params: TensorDict, carry: TensorDict, obs: Tensor, noise: Tensor | None) -> tuple[TensorDict, TensorDict]:
        noise = torch.zeros(*obs.shape[:-1], 2 + CHOICES) if noise is None else noise
        first = k.categorical_sample(features(obs) @ params["first"], noise[..., :2])
        second = k.categorical_sample(logits_of(params, obs, first), noise[..., 2:])
        tokens, follows = torch.stack((first, second), -1), first == 1
        out = {
            "action": 3 * first + second * follows,
            "tokens": tokens,
            "token_mask": torch.stack((torch.ones_like(follows), follows), -1),
        }
        log_prob, _ = evaluate(params, carry, TensorDict({"obs": obs, "tokens": tokens}, obs.shape[:-1]))
        return carry, TensorDict(out | {"sample_log_prob": log_prob}, obs.shape[:-1])

    def evaluate(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor]:
        obs, (first, second) = steps["obs"], steps["tokens"].unbind(-1)
        both = features(obs) @ params["first"], logits_of(params, obs, first)
        log_prob = [k.categorical_log_prob(x, token) for x, token in zip(both, (first, second), strict=True)]
        return torch.stack(log_prob, -1), torch.stack([k.categorical_entropy(x) for x in both], -1)

    def value(params: TensorDict, carry: TensorDict, obs: Tensor) -> Tensor:
        return (features(obs) @ params["critic"]).squeeze(-1)

    return Policy(init, draw, act, evaluate, value)


def speaking(**changes: Any) -> Config:
    """PPO with the two tokens, eager, with dotted keys changed."""
    base = {
        "trainer": {"num_envs": 32, "buffer_size": 4, "iterations": 20, "compile": "off", "num_eval_episodes": 64},
        "env": {"name": "two_words"},
        "policy": {"name": "two_tokens"},
        "algorithm": {"name": "ppo", "cfg": {"n_epochs": 4, "batch_size": 64, "learning_rate": 0.1}},
    }
    return config_from_dict(base).replace(**changes)
