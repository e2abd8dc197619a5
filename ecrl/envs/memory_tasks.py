"""Two tasks that need memory: `t_maze` and `repeat_previous`.

`cartpole` and `pendulum` also need memory if their setting `observe_velocity` is false.
"""

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Count
from ecrl.envs.core import NEVER, Env, state_of, time_limit
from ecrl.registry import register_env
from ecrl.spaces import Discrete, box

NORTH, EAST, SOUTH, WEST = range(4)
_SIGN_NORTH, _SIGN_SOUTH, _CORRIDOR, _JUNCTION = (0.0, 1.0, 1.0), (1.0, 1.0, 0.0), (1.0, 0.0, 1.0), (0.0, 1.0, 0.0)
_RIGHT, _WRONG = 4.0, -0.1


class TMazeConfig(ConfigModel):
    """Settings of `t_maze`: the length of the corridor and the time limit."""

    length: Count = Field(20, description="steps from the start to the junction")
    max_episode_steps: Count = Field(200, description="time limit, steps; must exceed length")

    @model_validator(mode="after")
    def _can_be_solved(self) -> "TMazeConfig":
        if self.length >= self.max_episode_steps:
            raise ValueError(
                f"length={self.length} needs max_episode_steps of at least {self.length + 1}, got "
                f"{self.max_episode_steps}, so no episode could end at the junction; "
                "lower length or raise max_episode_steps"
            )
        return self


def _t_maze_obs(position: Tensor, is_north: Tensor, length: int) -> Tensor:
    codes = torch.tensor((_CORRIDOR, _JUNCTION, _SIGN_SOUTH, _SIGN_NORTH), device=position.device)
    at_start = torch.where(is_north, 3, 2)
    return codes[torch.where(position == 0, at_start, (position == length).to(torch.int64))]


@register_env("t_maze")
def t_maze(cfg: TMazeConfig) -> Env:
    """Walk along a corridor to a junction, and turn in the direction that a sign showed at the start.

    The observation `[*B, 3]` depends on the place:

        start, the sign says north    0 1 1
        start, the sign says south    1 1 0
        corridor                      1 0 1
        junction                      0 1 0

    The action `[*B]` is 0 for north, 1 for east, 2 for south and 3 for west. The corridor leads from the start in the
    west to the junction in the east. The episode ends with a step to the north or south at the junction. The reward of
    this step is 4 if the direction agrees with the sign, and -0.1 otherwise. Any other action that does not move the
    agent has the reward -0.1, and all other steps have the reward 0. The best return is 4. The field `success` of
    `info` is True for a correct last step. An agent without memory turns correctly in half of the episodes.

    Source: Bakker 2002, "Reinforcement learning with long short-term memory".
    """

    def reset(keys: Tensor) -> TensorDict:
        is_north = rng.randint(keys, low=0, high=2) == 1
        position = torch.zeros_like(keys)
        state = state_of(_t_maze_obs(position, is_north, cfg.length), keys.shape, position=position, is_north=is_north)
        return state.set("info", TensorDict({"success": torch.zeros_like(is_north)}, keys.shape))

    def step(state: TensorDict, action: Tensor, noise: object) -> TensorDict:
        position, is_north = state["position"], state["is_north"]
        at_junction = position == cfg.length
        turns = (action == NORTH) | (action == SOUTH)
        terminated = at_junction & turns
        success = terminated & ((action == NORTH) == is_north)
        move = (action == EAST).to(position.dtype) - (action == WEST).to(position.dtype)
        next_position = (position + move).clamp(0, cfg.length)
        stays = next_position == position
        reward = torch.where(success, _RIGHT, torch.where(stays, _WRONG, 0.0))
        after = {
            "position": next_position,
            "obs": _t_maze_obs(next_position, is_north, cfg.length),
            "reward": reward.to(state["reward"].dtype),
            "terminated": terminated,
            "truncated": torch.zeros_like(terminated),
            "info": TensorDict({"success": success}, success.shape),
        }
        return state.copy().update(after)

    def observe(state: TensorDict) -> Tensor:
        return _t_maze_obs(state["position"], state["is_north"], cfg.length)

    core = Env(reset, step, box(0.0, 1.0, 3), Discrete(4), observe=observe, min_truncation_gap=NEVER)
    return time_limit(core, cfg.max_episode_steps)


class RepeatPreviousConfig(ConfigModel):
    """Settings of `repeat_previous`: the card to repeat, the number of suits, and the length of an episode."""

    k: Count = Field(4, description="card to repeat: 1 is the current card, 2 is the card before it, and so on")
    suits: int = Field(4, ge=2, description="number of suits")
    max_episode_steps: Count = Field(51, description="length of an episode, steps; at least k")

    @model_validator(mode="after")
    def _long_enough(self) -> "RepeatPreviousConfig":
        if self.k > self.max_episode_steps:
            raise ValueError(
                f"k={self.k} is above max_episode_steps={self.max_episode_steps}, so no step would have a reward; "
                "use a smaller k or longer episodes"
            )
        return self


@register_env("repeat_previous")
def repeat_previous(cfg: RepeatPreviousConfig) -> Env:
    """Name the suit of the card that was shown k - 1 steps ago.

        T      = max_episode_steps
        reward = 0                     at the first k - 1 steps
                 1 / (T - k + 1)       for the right suit
                 -1 / (T - k + 1)      for a wrong suit

    The observation `[*B]` is the suit of a card, 0 to suits - 1, drawn with replacement. The action `[*B]` is a suit.
    Every episode has `max_episode_steps` steps. The best return is 1. If k is at least 2, an agent without memory
    can only guess, and its expected return is 2 / suits - 1.

    The state field `cards`, `[*B, k]`, has the suits of the last k cards, the newest last, and 0 for cards that are not
    yet drawn. The field `shown` is the number of cards shown so far.

    Source: Morad et al. 2023, "POPGym: Benchmarking partially observable reinforcement learning", arXiv:2303.01859.
        POPGym draws cards without replacement from a deck of 52.
    """
    scale = 1.0 / (cfg.max_episode_steps - cfg.k + 1)

    def reset(keys: Tensor) -> TensorDict:
        card = rng.randint(keys, low=0, high=cfg.suits)
        cards = torch.cat((card.new_zeros(*card.shape, cfg.k - 1), card.unsqueeze(-1)), -1)
        return state_of(card, keys.shape, cards=cards, shown=torch.ones_like(card))

    def draw(keys: Tensor) -> Tensor:
        return rng.randint(keys, low=0, high=cfg.suits)

    def step(state: TensorDict, action: Tensor, noise: Tensor) -> TensorDict:
        cards, shown = state["cards"], state["shown"]
        graded = torch.where(action == cards[..., 0], scale, -scale)
        terminated = torch.zeros_like(state["terminated"])
        after = {
            "cards": torch.cat((cards[..., 1:], noise.unsqueeze(-1)), -1),
            "shown": shown + 1,
            "obs": noise.clone(),
            "reward": torch.where(shown >= cfg.k, graded, 0.0).to(state["reward"].dtype),
            "terminated": terminated,
            "truncated": terminated.clone(),
        }
        return state.copy().update(after)

    def observe(state: TensorDict) -> Tensor:
        return state["cards"][..., -1]

    suits = Discrete(cfg.suits)
    core = Env(reset, step, suits, suits, draw=draw, observe=observe, lockstep=True, min_truncation_gap=NEVER)
    return time_limit(core, cfg.max_episode_steps)
