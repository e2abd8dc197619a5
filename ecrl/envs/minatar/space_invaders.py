"""MinAtar's Space Invaders: shoot aliens that come down."""

from collections.abc import Mapping
from functools import partial, reduce

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.envs.core import Env
from ecrl.envs.minatar.game import (
    FIRE,
    FULL_ROW,
    LEFT,
    NOOP,
    RIGHT,
    SIZE,
    ActionSetConfig,
    MinAtarConfig,
    RampConfig,
    Rules,
    action_set,
    any_bit,
    constant,
    count_bits,
    countdown,
    image_of,
    indices,
    make_game,
    moved,
    no_draws,
    on_row,
)
from ecrl.registry import register_env

_BOTTOM = SIZE - 1
_WAVE_ROWS, _WAVE = 4, 0b0011111100  # columns 2 to 7 of the rows 0 to 3
_RELOAD, _BOMB_INTERVAL, _MOVE_INTERVAL, _LAST_LEVEL = 5, 10, 12, 6


class SpaceInvadersConfig(ActionSetConfig, RampConfig, MinAtarConfig):
    """Settings of Space Invaders."""


def _wave(like: Tensor) -> Tensor:
    """Return the rows `[10]` of a new wave of aliens."""
    return (indices(like) < _WAVE_ROWS).to(torch.int32) * _WAVE


def _start(keys: Tensor) -> dict[str, Tensor]:
    return {
        "cannon": constant(keys, 5),
        "aliens": constant(keys, 1, SIZE) * _wave(keys),
        "shots": constant(keys, 0, SIZE),
        "bombs": constant(keys, 0, SIZE),
        "right": torch.zeros(keys.shape, dtype=torch.bool, device=keys.device),
        "move_wait": constant(keys, _MOVE_INTERVAL),
        "bomb_wait": constant(keys, _BOMB_INTERVAL),
        "reload": constant(keys, 0),
        "level": constant(keys, 0),
    }


def _nearest_column(columns: Tensor, x: Tensor) -> Tensor:
    """Return the bit of `columns` that is nearest to bit x.

    If two bits have the same distance, return the lower bit, which is the column on the left.
    """
    at_x = torch.ones_like(x) << x
    right = columns & -at_x & ~at_x
    right = right & -right  # the lowest bit
    left = columns & ((at_x << 1) - 1)
    for shift in (1, 2, 4, 8):
        left = left | (left >> shift)
    left = left - (left >> 1)  # the highest bit
    # for columns i on the left and j on the right: x - i <= j - x if and only if 2**i * 2**j >= 2**(2 * x)
    left_is_nearer = (left != 0) & ((right == 0) | (left * right >= at_x * at_x))
    return torch.where(left_is_nearer, left, right)


def _play(
    state: TensorDict, action: Tensor, noise: TensorDict, *, ramping: bool
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    aliens, right, level = state["aliens"], state["right"], state["level"]
    rows = indices(aliens)
    empty = torch.zeros_like(aliens[..., :1])

    fires = (action == FIRE) & (state["reload"] == 0)
    cannon = moved(state["cannon"], action == LEFT, action == RIGHT)
    at_cannon = torch.ones_like(cannon) << cannon
    shot = torch.where(fires, at_cannon, 0).unsqueeze(-1)
    shots = torch.cat((state["shots"][..., 1:-1], shot, empty), -1)  # a new shot leaves the cannon's row at once
    bombs = torch.cat((empty, state["bombs"][..., :-1]), -1)

    moves = state["move_wait"] == 0
    columns = reduce(torch.bitwise_or, aliens.unbind(-1))
    number = count_bits(aliens)
    at_side = (columns & torch.where(right, 1 << (SIZE - 1), 1)) != 0
    descends, shifts_right, shifts_left = moves & at_side, moves & ~at_side & right, moves & ~at_side & ~right

    def shifted(bits: Tensor, to_right: Tensor, to_left: Tensor) -> Tensor:
        return torch.where(to_right, (bits << 1) & FULL_ROW, torch.where(to_left, bits >> 1, bits))

    descended = torch.cat((aliens[..., -1:], aliens[..., :-1]), -1)
    moved_aliens = torch.where(
        descends.unsqueeze(-1), descended, shifted(aliens, shifts_right.unsqueeze(-1), shifts_left.unsqueeze(-1))
    )
    landed = descends & (aliens[..., _BOTTOM] != 0)
    on_cannon_row = bombs[..., _BOTTOM] | aliens[..., _BOTTOM] | moved_aliens[..., _BOTTOM]
    terminated = ((on_cannon_row & at_cannon) != 0) | landed

    drops = state["bomb_wait"] == 0
    column = _nearest_column(shifted(columns, shifts_right, shifts_left), cannon)
    lowest = torch.where((moved_aliens & column.unsqueeze(-1)) != 0, rows, -1).amax(-1)
    bombs = bombs | on_row(lowest, torch.where(drops, column, 0))

    killed = moved_aliens & shots
    aliens = moved_aliens ^ killed
    cleared = ~any_bit(aliens)
    level_after = level + (cleared & (level < _LAST_LEVEL)).to(torch.int32) if ramping else level.clone()
    fields = {
        "cannon": cannon,
        "aliens": torch.where(cleared.unsqueeze(-1), _wave(aliens), aliens),
        "shots": shots ^ killed,
        "bombs": bombs,
        "right": right ^ descends,
        "move_wait": torch.where(moves, torch.minimum(number, level.neg() + _MOVE_INTERVAL), state["move_wait"]) - 1,
        "bomb_wait": torch.where(drops, _BOMB_INTERVAL, state["bomb_wait"]) - 1,
        "reload": countdown(torch.where(fires, _RELOAD, state["reload"])),
        "level": level_after,
    }
    return fields, count_bits(killed), terminated


def _image(state: Mapping[str, Tensor] | TensorDict) -> Tensor:
    aliens, right = state["aliens"], state["right"].unsqueeze(-1)
    bottom = torch.full_like(state["cannon"], _BOTTOM)
    cannon = on_row(bottom, torch.ones_like(bottom) << state["cannon"])
    left_aliens, right_aliens = torch.where(right, 0, aliens), torch.where(right, aliens, 0)
    return image_of((cannon, aliens, left_aliens, right_aliens, state["shots"], state["bombs"]))


@register_env("minatar_space_invaders")
def minatar_space_invaders(cfg: SpaceInvadersConfig) -> Env:
    """Shoot aliens with a cannon at the bottom, before they come down or hit the cannon.

    The cannon moves by one cell per step, and fires at most once in five steps. The aliens start in the rows 0 to 3 and
    the columns 2 to 7. They move sideways together. At the side of the board, the aliens move down by one row and turn.
    They move every n steps, where n is the smaller of 12 - level and the number of aliens. Every ten steps, the lowest
    alien of the column nearest to the cannon drops a bomb. Shots move up and bombs move down by one cell per step. The
    reward of a step is the number of aliens that are shot in this step. If all aliens are shot, a new wave appears.
    With difficulty_ramping, each new wave raises the level by one, up to 6. The episode ends when a bomb or an alien
    hits the cannon, or when the aliens move down from the bottom row.

    The channels of the observation are 0 cannon, 1 aliens, 2 aliens that move to the left, 3 aliens that move to the
    right, 4 shots and 5 bombs. The minimal actions are 0 no-op, 1 left, 2 right and 3 fire.

    The state stores the rows of `aliens`, `shots` and `bombs`, each int32 `[*B, 10]`. Bit x of a row is column x.

    Source: Young and Tian 2019, "MinAtar: An Atari-inspired testbed for thorough and reproducible reinforcement
        learning experiments", arXiv:1903.03176; the package MinAtar 1.0.15.
    """
    play = partial(_play, ramping=cfg.difficulty_ramping)
    return make_game(cfg, Rules(6, action_set(cfg, NOOP, LEFT, RIGHT, FIRE), 0, _start, no_draws, play, _image))
