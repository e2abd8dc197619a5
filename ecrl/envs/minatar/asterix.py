"""MinAtar's Asterix: collect gold and avoid enemies."""

from collections.abc import Mapping
from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.envs.core import Env
from ecrl.envs.minatar.game import (
    DOWN,
    FULL_ROW,
    LEFT,
    NOOP,
    RIGHT,
    SIZE,
    UP,
    ActionSetConfig,
    MinAtarConfig,
    RampConfig,
    Rules,
    action_set,
    any_bit,
    constant,
    framed,
    image_of,
    indices,
    make_game,
    moved,
    on_row,
)
from ecrl.registry import register_env

_ROWS = 8  # enemies and gold are in the rows 1 to 8, at most one object per row
_RAMP_WAIT, _LAST_LEVEL = 100, 9


class AsterixConfig(ActionSetConfig, RampConfig, MinAtarConfig):
    """Settings of Asterix."""


def _spawn_interval(level: Tensor) -> Tensor:
    return 10 - level


def _move_interval(level: Tensor) -> Tensor:
    return 5 - (level >> 1)


def _start(keys: Tensor) -> dict[str, Tensor]:
    level = constant(keys, 0)
    return {
        "x": constant(keys, 5),
        "y": constant(keys, 5),
        "enemy": constant(keys, 0, _ROWS),
        "gold": constant(keys, 0, _ROWS),
        "right": constant(keys, 0, _ROWS),
        "spawn_wait": _spawn_interval(level),
        "move_wait": _move_interval(level),
        "ramp_wait": constant(keys, _RAMP_WAIT),
        "level": level,
    }


def _draw(uniforms: Tensor) -> dict[str, Tensor]:
    right, gold, free_row = uniforms.unbind(-1)
    return {"right": right < 1 / 2, "gold": gold < 1 / 3, "free_row": free_row.contiguous()}


def _choose_row(is_free: Tensor, uniform: Tensor) -> Tensor:
    """Choose one of the rows that are 1 in `is_free` `[*B, 8]`. Return 1 for the chosen row and 0 for all others.

    If n rows are free, the function chooses the free row with the index floor(n uniform). The product n uniform is
    always below n, because uniform is a float32 below 1 and n is at most 8.
    """
    number = (uniform * is_free.sum(-1, dtype=torch.int32)).to(torch.int32)
    rows = indices(is_free, _ROWS)
    is_before = (rows < rows.unsqueeze(-1)).to(torch.int32)
    num_before = (is_free.unsqueeze(-2) * is_before).sum(-1, dtype=torch.int32)  # faster than cumsum in compiled code
    return is_free * (num_before == number.unsqueeze(-1)).to(torch.int32)


def _play(
    state: TensorDict, action: Tensor, noise: TensorDict, *, ramping: bool
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    level, right, enemy, gold = (state[name] for name in ("level", "right", "enemy", "gold"))

    spawns, comes_from_left, is_gold = state["spawn_wait"] == 0, noise["right"], noise["gold"]
    is_free = ((enemy | gold) == 0).to(torch.int32)
    chosen = _choose_row(is_free, noise["free_row"]) * spawns.to(torch.int32).unsqueeze(-1)
    right = torch.where(chosen == 1, comes_from_left.to(torch.int32).unsqueeze(-1), right)
    column = torch.where(comes_from_left, 1, 2 ** (SIZE - 1)).to(torch.int32)
    enemy = enemy + chosen * torch.where(is_gold, 0, column).unsqueeze(-1)
    gold = gold + chosen * torch.where(is_gold, column, 0).unsqueeze(-1)

    x = moved(state["x"], action == LEFT, action == RIGHT)
    y = moved(state["y"], action == UP, action == DOWN, 1, _ROWS)
    player = on_row(y, torch.ones_like(x) << x, _ROWS, 1)

    hit, taken = enemy & player, gold & player
    moves = state["move_wait"] == 0
    moves_right, moves_left = moves.unsqueeze(-1) & (right == 1), moves.unsqueeze(-1) & (right == 0)
    enemy, gold = (
        torch.where(moves_right, (bits << 1) & FULL_ROW, torch.where(moves_left, bits >> 1, bits))
        for bits in (enemy, gold & ~taken)
    )
    hit, taken = hit | (enemy & player), taken | (gold & player)

    fields = {
        "x": x,
        "y": y,
        "enemy": enemy,
        "gold": gold & ~player,
        "right": right,
        "spawn_wait": torch.where(spawns, _spawn_interval(level), state["spawn_wait"]) - 1,
        "move_wait": torch.where(moves, _move_interval(level), state["move_wait"]) - 1,
        "ramp_wait": state["ramp_wait"].clone(),
        "level": level.clone(),
    }
    if ramping:
        can_rise, waits = level < _LAST_LEVEL, state["ramp_wait"] >= 0
        ramp_wait = torch.where(waits, state["ramp_wait"] - 1, _RAMP_WAIT)
        fields["ramp_wait"] = torch.where(can_rise, ramp_wait, state["ramp_wait"])
        fields["level"] = level + (can_rise & ~waits).to(torch.int32)
    return fields, any_bit(taken), any_bit(hit)


def _image(state: Mapping[str, Tensor] | TensorDict) -> Tensor:
    objects = state["enemy"] | state["gold"]
    trail = torch.where(state["right"] == 1, objects >> 1, (objects << 1) & FULL_ROW)
    player = on_row(state["y"], torch.ones_like(state["x"]) << state["x"])
    return image_of((player, *(framed(rows) for rows in (state["enemy"], trail, state["gold"]))))


@register_env("minatar_asterix")
def minatar_asterix(cfg: AsterixConfig) -> Env:
    """Collect gold and avoid enemies, which cross the board from either side.

    The player moves by one cell per step in the inner rows 1 to 8. Every `10 - level` steps, an enemy or, with
    probability 1/3, gold appears at the left or right end of a random row that is empty. Every `5 - level // 2` steps,
    all enemies and gold move by one cell, and disappear at the other side. The reward is 1 for a step in which the
    player touches gold, and 0 for any other step. The episode ends when the player touches an enemy. With
    difficulty_ramping, the level rises from 0 to 9, by one every 102 steps.

    The channels of the observation are 0 player, 1 enemies, 2 the cells behind enemies and gold, and 3 gold. The
    minimal actions are 0 no-op, 1 left, 2 up, 3 right and 4 down.

    The state fields `enemy` and `gold`, int32 `[*B, 8]`, have one element for each of the rows 1 to 8. Bit x of an
    element is 1 if the enemy or the gold is in column x. `right` is 1 for a row whose object moves to the right.

    Source: Young and Tian 2019, "MinAtar: An Atari-inspired testbed for thorough and reproducible reinforcement
        learning experiments", arXiv:1903.03176; the package MinAtar 1.0.15.
    """
    play = partial(_play, ramping=cfg.difficulty_ramping)
    return make_game(cfg, Rules(4, action_set(cfg, NOOP, LEFT, UP, RIGHT, DOWN), 3, _start, _draw, play, _image))
