"""The task `dots`: reach the dot whose colour the instruction names. Images are computed with tensors.

An image shows a red, a green and a blue dot. The proprioception is the position of a point, which is not in the image.
The instruction is three ids of words: `go`, the colour, and padding.
"""

from typing import Any

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config import Config, config_from_dict
from ecrl.config.model import ConfigModel, Count
from ecrl.envs import Env, state_of
from ecrl.registry import register_env
from ecrl.spaces import Dict, MultiDiscrete, box, dict_space

GO, RED, WORDS, LENGTH = 1, 2, 6, 3
COLOURS = ((230.0, 30.0, 30.0), (30.0, 200.0, 30.0), (30.0, 50.0, 230.0))
RADIUS, GREY = 0.15, 120.0

SMALL = {"width": 16, "layers": 1, "heads": 2, "channels": [4], "keypoints": 6, "image_tokens": 2, "bins": 5}
"""Settings of a small network."""


def space_of(size: int) -> Dict:
    """Return the space of observations with images of `size` pixels."""
    camera = box(0, 255, size, size, 3, dtype=torch.uint8)
    words = MultiDiscrete((WORDS,) * LENGTH)
    return dict_space({"camera": camera, "proprio": box(-1.0, 1.0, 2), "instruction": words})


def picture(xy: Tensor, size: int) -> Tensor:
    """Return images `[*B, size, size, 3]` of dots at `[*B, 3, 2]`, between -1 and 1. Later dots hide earlier ones."""
    line = torch.linspace(-1.0, 1.0, size, device=xy.device)
    y, x = line.unsqueeze(-1), line
    image = xy.new_full((*xy.shape[:-2], size, size, 3), GREY)
    for i, colour in enumerate(COLOURS):
        dx, dy = (x - xy[..., i, 0, None, None]), (y - xy[..., i, 1, None, None])
        inside = (dx**2 + dy**2 < RADIUS**2).unsqueeze(-1)
        image = torch.where(inside, image.new_tensor(colour), image)
    return image.to(torch.uint8)


def observation(xy: Tensor, goal: Tensor, point: Tensor, size: int) -> TensorDict:
    """Return observations of dots `[*B, 3, 2]`, the index of the goal `[*B]` and the point `[*B, 2]`."""
    words = torch.stack((torch.full_like(goal, GO), RED + goal, torch.zeros_like(goal)), -1)
    parts = {"camera": picture(xy, size), "instruction": words, "proprio": point}
    return TensorDict(parts, list(goal.shape))


def scenes(key: Tensor, n: int, size: int) -> tuple[TensorDict, Tensor, Tensor]:
    """Draw `n` scenes from a 0-d key. Return observations, the positions of the dots, and the index of the goal."""
    xy = 1.6 * rng.uniform(rng.fold_in(key, 0), (n, 3, 2)) - 0.8
    goal = rng.randint(rng.fold_in(key, 1), (n,), low=0, high=3)
    point = 2.0 * rng.uniform(rng.fold_in(key, 2), (n, 2)) - 1.0
    return observation(xy, goal, point, size), xy, goal


class DotsConfig(ConfigModel):
    """Size of the image, and the time limit."""

    size: Count = Field(16, description="pixels per side")
    max_steps: Count = Field(6, description="time limit, steps")


@register_env("dots", override=True)
def dots(cfg: DotsConfig) -> Env:
    """Move the point by up to 0.4 per step. An episode ends at a dot, with reward 1 for the dot of the instruction."""

    def reset(keys: Tensor) -> TensorDict:
        xy = 1.6 * rng.uniform(rng.fold_in(keys, 0), (3, 2)) - 0.8
        goal = rng.randint(rng.fold_in(keys, 1), low=0, high=3)
        point = torch.zeros_like(xy[..., 0, :])
        state = state_of(observation(xy, goal, point, cfg.size), keys.shape, xy=xy, goal=goal, point=point)
        return state.set("time", torch.zeros_like(goal))

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        xy, goal, time = state["xy"], state["goal"], state["time"] + 1
        point = (state["point"] + 0.4 * action).clamp(-1.0, 1.0)
        near = (xy - point.unsqueeze(-2)).norm(dim=-1) < 2.0 * RADIUS
        reached = near.gather(-1, goal.unsqueeze(-1)).squeeze(-1)
        ended = near.any(-1)
        fields = {
            "obs": state["obs"].copy().set("proprio", point),
            "reward": reached.to(state["reward"].dtype),
            "point": point,
            "time": time,
            "terminated": ended,
            "truncated": (time == cfg.max_steps) & ~ended,
        }
        return state.copy().update(fields)

    return Env(reset, step, space_of(cfg.size), box(-1.0, 1.0, 2), min_truncation_gap=cfg.max_steps)


def reaching(algorithm: str, /, **changes: Any) -> Config:
    """Return a short run of the policy `vla` on `dots` with chunks of 3 actions, with changes by dotted key."""
    settings: dict[str, Any] = {"n_epochs": 2, "batch_size": 16, "learning_rate": 1e-3}
    settings |= {"grpo": {"group_size": 4, "kl_coef": 0.02}}.get(algorithm, {})
    data = {
        "trainer": {"num_envs": 8, "buffer_size": 4, "iterations": 2, "compile": "off"},
        "env": {"name": "dots", "action_chunk": 3},
        "policy": {"name": "vla", "vla": SMALL | ({} if algorithm == "grpo" else {"critic": "mlp"})},
        "algorithm": {"name": algorithm, "cfg": settings},
    }
    return config_from_dict(data, "dots", changes)
