"""The game Catch, whose observations are images, for tests.

A ball falls from the top of a board of 10 rows and 5 columns. The paddle in the bottom row moves left, stays or moves
right. The last step has the reward 1 if the paddle is below the ball, else -1. A random policy gets about -0.6.
"""

from typing import Any, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config import Config, config_from_dict
from ecrl.config.model import ConfigModel, Count
from ecrl.envs import NEVER, Env, state_of
from ecrl.registry import register_env
from ecrl.spaces import Discrete, box, dict_space

ROWS, COLUMNS = 10, 5

NETWORK = {
    "type": "cnn",
    "network_cfg": {"channels": [8], "kernel_sizes": [3], "strides": [1], "hidden_sizes": [32]},
}


class CatchConfig(ConfigModel):
    """The form of the observation, and the end of an episode."""

    observe: Literal["image", "dict"] = Field(
        default="image", description="the board, or a Dict of the board and the position of the paddle"
    )
    steps: Count = Field(default=ROWS - 1, description="time limit, steps; by default an episode ends with the catch")


@register_env("catch", override=True)
def catch(cfg: CatchConfig) -> Env:
    """Catch the ball. The image `[10, 5, 1]` has 255 at the ball and at the paddle."""
    image = box(0, 255, ROWS, COLUMNS, 1, dtype=torch.uint8)
    space = image if cfg.observe == "image" else dict_space({"board": image, "paddle": box(-1.0, 1.0, 1)})

    def observe(row: Tensor, ball: Tensor, paddle: Tensor) -> Any:
        cell = torch.arange(ROWS * COLUMNS, device=row.device)
        lit = (cell == (row * COLUMNS + ball).unsqueeze(-1)) | (cell == ((ROWS - 1) * COLUMNS + paddle).unsqueeze(-1))
        board = (lit.to(torch.uint8) * 255).unflatten(-1, (ROWS, COLUMNS, 1))
        if cfg.observe == "image":
            return board
        return TensorDict({"board": board, "paddle": (paddle.unsqueeze(-1) - 2.0) / 2.0}, row.shape)

    def reset(keys: Tensor) -> TensorDict:
        ball, row, paddle = rng.randint(keys, low=0, high=COLUMNS), torch.zeros_like(keys), torch.full_like(keys, 2)
        return state_of(observe(row, ball, paddle), keys.shape, row=row, ball=ball, paddle=paddle)

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        row, paddle = state["row"] + 1, (state["paddle"] + action - 1).clamp(0, COLUMNS - 1)
        landed = row == ROWS - 1
        reward = torch.where(landed, torch.where(paddle == state["ball"], 1.0, -1.0), 0.0)
        fields = {
            "obs": observe(row, state["ball"], paddle),
            "reward": reward.to(state["reward"].dtype),
            "row": row,
            "paddle": paddle,
            "terminated": landed,
            "truncated": (row == cfg.steps) & ~landed,
        }
        return state.copy().update(fields)

    gap = cfg.steps if cfg.steps < ROWS - 1 else NEVER
    return Env(reset, step, space, Discrete(3), min_truncation_gap=gap)


def catching(algorithm: str = "ppo", /, **changes: Any) -> Config:
    """Return a short run of an algorithm on Catch, with changes by dotted key."""
    agents: dict[str, Any] = {
        "ppo": (
            {"name": "actor_critic", "actor": NETWORK, "critic": NETWORK},
            {"n_epochs": 2, "batch_size": 32, "learning_rate": 1e-3},
        ),
        "dqn": (
            {"name": "q_network", "critic": NETWORK},
            {"batch_size": 16, "capacity": 512, "learning_starts": 32},
        ),
    }
    policy, settings = agents[algorithm]
    data = {
        "trainer": {"num_envs": 4, "buffer_size": 16, "iterations": 3, "compile": "off"},
        "env": {"name": "catch"},
        "policy": policy,
        "algorithm": {"name": algorithm, "cfg": settings},
    }
    return config_from_dict(data, "catch", changes)
