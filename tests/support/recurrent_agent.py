"""A recurrent policy and an environment that needs memory, for tests.

The environment shows a cue at the first step of three and pays 1 at the last one if the action equals the cue. The cue
is not seen then, so a policy without memory gets 0.5 on average. With actions that are numbers, the environment pays
minus the squared distance to the cue, which is -1 or 1. A policy without memory then gets -1 at best.
"""

from typing import Any, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config import Config, PolicyConfig, config_from_dict
from ecrl.config.model import ConfigModel, Count
from ecrl.envs import NEVER, Env, state_of
from ecrl.kernels import loop
from ecrl.policies import Policy
from ecrl.policies.heads import make_head
from ecrl.registry import register_env, register_policy
from ecrl.spaces import Box, Discrete, Space, box, element_shape, flat_dim

LENGTH = 3


class CueConfig(ConfigModel):
    """The rules of the probe: the end of an episode, and the actions."""

    action: Literal["class", "number"] = Field(default="class", description="0 or 1, or a number near -1 or 1")
    end: Literal["terminated", "truncated"] = Field(default="terminated", description="flag of the last step")


@register_env("remember_cue", override=True)
def remember_cue(cfg: CueConfig) -> Env:
    """Observe -1 or 1 at the first step, then 0. The second number of the observation is the time."""

    def reset(keys: Tensor) -> TensorDict:
        cue = rng.randint(keys, low=0, high=2)
        obs = torch.stack((2.0 * cue - 1.0, torch.zeros_like(cue, dtype=torch.float32)), -1)
        return state_of(obs, keys.shape, cue=cue, elapsed=torch.zeros_like(cue))

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        elapsed = state["elapsed"] + 1
        ended, no = elapsed >= LENGTH, torch.zeros_like(state["terminated"])
        time = elapsed.to(torch.float32) / LENGTH
        if cfg.action == "class":
            reward = (ended & (action == state["cue"])).to(torch.float32)
        else:
            reward = torch.where(ended, -(action[..., 0] - (2.0 * state["cue"] - 1.0)).square(), 0.0)
        fields = {
            "obs": torch.stack((torch.zeros_like(time), time), -1),
            "reward": reward,
            "elapsed": elapsed,
            "terminated": no,
            "truncated": no.clone(),
        }
        return state.copy().update(fields | {cfg.end: ended})

    actions = Discrete(2) if cfg.action == "class" else box(-2.0, 2.0, 1)
    return Env(reset, step, box(-1.0, 1.0, 2), actions, min_truncation_gap=NEVER if cfg.end == "terminated" else 3)


class TanhCellConfig(PolicyConfig):
    """Size of the memory."""

    hidden: Count = Field(default=8, description="numbers in the memory")


@register_policy("tanh_cell", override=True)
def tanh_cell(cfg: TanhCellConfig, observation_space: Space, action_space: Space) -> Policy:
    """Actor and critic on one recurrent cell, h' = tanh(W obs + U h + b), whose first memory is learnt."""
    (inputs,), head = element_shape(observation_space), make_head(action_space, squash=False)
    shapes = {"W": (inputs, cfg.hidden), "U": (cfg.hidden, cfg.hidden), "b": (cfg.hidden,), "h0": (cfg.hidden,)}
    shapes |= {"actor": (cfg.hidden, flat_dim(action_space)), "critic": (cfg.hidden, 1)}
    shapes |= {"log_std": (flat_dim(action_space),)} if isinstance(action_space, Box) else {}

    def init(key: Tensor) -> TensorDict:
        draw = {name: 0.5 * rng.normal(rng.fold_in(key, i), shape) for i, (name, shape) in enumerate(shapes.items())}
        return TensorDict(draw, [])

    def init_carry(params: TensorDict, num_envs: int) -> TensorDict:
        return TensorDict({"h": params["h0"].expand(num_envs, cfg.hidden).clone()}, [num_envs])

    def advance(params: TensorDict, h: Tensor, obs: Tensor) -> Tensor:
        return torch.tanh(obs @ params["W"] + h @ params["U"] + params["b"])

    def log_std(params: TensorDict) -> Tensor | None:
        return params.get("log_std", None)

    def act(params: TensorDict, carry: TensorDict, obs: Tensor, noise: Tensor | None) -> tuple[TensorDict, TensorDict]:
        h = advance(params, carry["h"], obs)
        logits = h @ params["actor"]
        action = head.mode(log_std(params), logits) if noise is None else head.sample(log_std(params), logits, noise)
        out = {"action": action, "sample_log_prob": head.log_prob(log_std(params), logits, action)}
        return TensorDict({"h": h}, obs.shape[:1]), TensorDict(out, obs.shape[:1])

    def body(h: Tensor, row: tuple[Tensor, Tensor], params: TensorDict) -> tuple[Tensor, Tensor]:
        obs, is_first = row
        h = advance(params, torch.where(is_first.unsqueeze(-1), params["h0"], h), obs)
        return h, h.clone()

    def memories(params: TensorDict, carry: TensorDict, steps: TensorDict) -> Tensor:
        """Memory after each step, `[n, S, hidden]`."""
        is_first = torch.cat((torch.zeros_like(steps["done"][:, :1]), steps["done"][:, :-1]), 1)
        rows = steps["obs"].transpose(0, 1), is_first.t()
        return loop(body, carry["h"], rows, params)[1].transpose(0, 1)

    def evaluate(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor]:
        logits = memories(params, carry, steps) @ params["actor"]
        return head.log_prob(log_std(params), logits, steps["action"]), head.entropy(log_std(params), logits)

    def critic(params: TensorDict, h: Tensor) -> Tensor:
        return (h @ params["critic"]).squeeze(-1)

    def value(params: TensorDict, carry: TensorDict, steps: TensorDict, final: TensorDict | None) -> Any:
        values = critic(params, memories(params, carry, steps))
        if final is None:
            return values, None
        return values, critic(params, advance(params, final["carry", "h"], final["obs"]))

    return Policy(init, head.noise, act, evaluate, value, init_carry=init_carry, unit="sequence")


def remembering(**changes: Any) -> Config:
    """PPO with the recurrent policy, eager, with dotted keys changed. Episodes cross iterations: 8 steps each."""
    base = {
        "trainer": {"num_envs": 16, "buffer_size": 8, "iterations": 25, "compile": "off", "num_eval_episodes": 64},
        "env": {"name": "remember_cue"},
        "policy": {"name": "tanh_cell"},
        "algorithm": {"name": "ppo", "cfg": {"n_epochs": 4, "batch_size": 64, "learning_rate": 0.02, "gamma": 0.9}},
    }
    return config_from_dict(base).replace(**changes)
