"""Shared parts of the MinAtar games: settings, sticky actions, and images from rows of bits.

A board has 10 x 10 cells. Row 0 is at the top and column 0 is on the left. Most games store the objects on a row of the
board as one int32. Bit x is set if an object is in column x. A bit shift then moves all objects of a row by one cell.
The shift `<<` moves the objects to the right, towards higher columns. After this shift, the mask `FULL_ROW` removes the
objects beyond the last column. Compiled code handles such rows several times faster than images of bool, because
inductor's vector code for bool is slow.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Count, Fraction
from ecrl.envs.core import NEVER, Env, state_of, time_limit
from ecrl.spaces import Discrete, box

SIZE = 10
"""Number of rows and of columns of the board."""

FULL_ROW = 2**SIZE - 1
"""Bits of a row with an object in every column."""

NOOP, LEFT, UP, RIGHT, DOWN, FIRE = range(6)
ALL_ACTIONS = (NOOP, LEFT, UP, RIGHT, DOWN, FIRE)


class MinAtarConfig(ConfigModel):
    """Settings that all MinAtar games have."""

    sticky_action_prob: Fraction = Field(
        0.1, description="probability that a step repeats the previous action instead of the chosen action"
    )
    max_episode_steps: Count | None = Field(
        None, description="time limit, steps; if absent, episodes end only by the rules of the game"
    )


class ActionSetConfig(ConfigModel):
    """Settings of the games that do not use all actions."""

    use_minimal_action_set: bool = Field(
        True, description="offer only the actions that the game uses; if false, no-op, left, up, right, down and fire"
    )


class RampConfig(ConfigModel):
    """Settings of the games that become harder during an episode."""

    difficulty_ramping: bool = Field(True, description="make the game faster during an episode")


def action_set(cfg: ActionSetConfig, *minimal: int) -> tuple[int, ...]:
    """Return the actions that the player can choose: the minimal set, or all six actions."""
    return minimal if cfg.use_minimal_action_set else ALL_ACTIONS


class Rules(NamedTuple):
    """Rules of one game, as pure functions of the game's fields.

    Attributes:
        channels: number of channels of the observation.
        actions: the actions that the player can choose, some of `ALL_ACTIONS` in ascending order.
        num_uniforms: number of uniform samples per step that `draw` needs.
        start: maps keys `[*B]` to the fields at the start of an episode.
        draw: maps uniform samples `[*B, num_uniforms]` to the random draws of a step.
        play: maps (fields, action, draws) to the next fields, the reward and the flag `terminated`, each `[*B, ...]`.
            The action is one of `ALL_ACTIONS`.
        image: maps the fields to the observation, uint8 `[*B, 10, 10, channels]`.
    """

    channels: int
    actions: tuple[int, ...]
    num_uniforms: int
    start: Callable[[Tensor], dict[str, Tensor]]
    draw: Callable[[Tensor], dict[str, Tensor]]
    play: Callable[[TensorDict, Tensor, TensorDict], tuple[dict[str, Tensor], Tensor, Tensor]]
    image: Callable[[Mapping[str, Tensor] | TensorDict], Tensor]


def make_game(cfg: MinAtarConfig, rules: Rules, lockstep: bool = False) -> Env:
    """Make an environment from the rules of a game.

        executed = last_action with probability sticky_action_prob, else action

    The state has the fields of the game and `last_action`, the executed action of the last step. At the start of an
    episode, `last_action` is the no-op.
    """

    def reset(keys: Tensor) -> TensorDict:
        fields = rules.start(keys) | {"last_action": torch.full_like(keys, NOOP)}
        return state_of(rules.image(fields), keys.shape, **fields)

    def draw(keys: Tensor) -> TensorDict:
        uniforms = rng.uniform(keys, (1 + rules.num_uniforms,))
        repeats = uniforms[..., 0] < cfg.sticky_action_prob
        return TensorDict({"repeats": repeats} | rules.draw(uniforms[..., 1:]), keys.shape)

    def step(state: TensorDict, action: Tensor, noise: TensorDict) -> TensorDict:
        chosen = torch.tensor(rules.actions, device=action.device)[action]
        executed = torch.where(noise["repeats"], state["last_action"], chosen)
        fields, reward, terminated = rules.play(state, executed, noise)
        after = fields | {
            "last_action": executed,
            "obs": rules.image(fields),
            "reward": reward.to(state["reward"].dtype),
            "terminated": terminated,
            "truncated": torch.zeros_like(terminated),
        }
        return state.copy().update(after)

    space = box(0, 1, SIZE, SIZE, rules.channels, dtype=torch.uint8)
    env = Env(
        *(reset, step, space, Discrete(len(rules.actions))),
        draw=draw,
        observe=rules.image,
        lockstep=lockstep,
        min_truncation_gap=NEVER,
    )
    return env if cfg.max_episode_steps is None else time_limit(env, cfg.max_episode_steps)


def no_draws(uniforms: Tensor) -> dict[str, Tensor]:
    """Return an empty dictionary, for games in which a step draws only whether the previous action is repeated."""
    return {}


def constant(keys: Tensor, value: int, *shape: int) -> Tensor:
    """Return an int32 tensor `[*B, *shape]` with the same value everywhere, for keys `[*B]`."""
    return torch.full((*keys.shape, *shape), value, dtype=torch.int32, device=keys.device)


def indices(like: Tensor, n: int = SIZE) -> Tensor:
    """Return the integers 0 to n - 1 as int32, on the device of `like`."""
    return torch.arange(n, dtype=torch.int32, device=like.device)


def moved(position: Tensor, back: Tensor, forth: Tensor, low: int = 0, high: int = SIZE - 1) -> Tensor:
    """Move a coordinate by -1 where `back` is True and by 1 where `forth` is True, and clamp it to [low, high]."""
    return (position + forth.to(torch.int32) - back.to(torch.int32)).clamp(low, high)


def countdown(wait: Tensor) -> Tensor:
    """Lower a number of steps by one, but not below 0."""
    return (wait - 1).clamp(min=0)


def on_row(row: Tensor, bits: Tensor, num_rows: int = SIZE, first_row: int = 0) -> Tensor:
    """Return the rows of a board that is empty except for `bits` on the row `row`.

    The result has `num_rows` rows, and its first row is row `first_row` of the board.

    >>> on_row(torch.tensor(1), torch.tensor(4), 3)
    tensor([0, 4, 0])
    """
    rows = indices(row, num_rows) + first_row
    return torch.where(row.unsqueeze(-1) == rows, bits.unsqueeze(-1), 0)


def any_bit(rows: Tensor) -> Tensor:
    """Return True for each board that has an object on any of its rows, for rows of shape `[*B, rows]`."""
    return rows.amax(-1) != 0


def count_bits(rows: Tensor) -> Tensor:
    """Count the objects on the rows `[*B, rows]` of boards. The counts are int32 `[*B]`.

    >>> count_bits(torch.tensor([[0b1000000001, 0b1111111111]], dtype=torch.int32))
    tensor([12], dtype=torch.int32)
    """
    pairs = (rows & 0b0101010101) + ((rows >> 1) & 0b0101010101)
    fours = (pairs & 0b1100110011) + ((pairs >> 2) & 0b1100110011)
    return ((fours & 15) + ((fours >> 4) & 15) + (fours >> 8)).sum(-1, dtype=torch.int32)


def framed(rows: Tensor) -> Tensor:
    """Add an empty row above and below the eight inner rows of a board."""
    return torch.nn.functional.pad(rows, (1, 1))


def image_of(channels: Sequence[Tensor], bits_per_column: int = 1) -> Tensor:
    """Return the uint8 image `[*B, 10, 10, C]` of C boards, each with rows int32 `[*B, 10]`.

    Bit `bits_per_column * x` of a row is the value in column x.

    >>> boards = torch.tensor([[1] + [0] * 9]), torch.tensor([[0] * 9 + [512]])
    >>> image_of([rows.to(torch.int32) for rows in boards]).nonzero().tolist()
    [[0, 0, 0, 0], [0, 9, 9, 1]]
    """
    columns = bits_per_column * indices(channels[0])
    planes = (((rows.unsqueeze(-1) >> columns) & 1) << c for c, rows in enumerate(channels))
    cells = reduce(torch.bitwise_or, planes)  # bit c of a cell is channel c
    bits = (cells.unsqueeze(-1) >> indices(cells, len(channels))) & 1
    return bits.to(torch.float32).to(torch.uint8)  # inductor has no vector code to convert int32 to uint8
