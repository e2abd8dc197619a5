"""MinAtar's Breakout: bounce a ball off a paddle to break bricks."""

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.envs.core import Env
from ecrl.envs.minatar.game import (
    LEFT,
    NOOP,
    RIGHT,
    SIZE,
    ActionSetConfig,
    MinAtarConfig,
    Rules,
    action_set,
    constant,
    image_of,
    make_game,
    moved,
    no_draws,
    on_row,
)
from ecrl.registry import register_env

_BOTTOM = SIZE - 1
_TOP_ROW, _BOTTOM_ROW = 1, 3  # rows of bricks
_ALL_BRICKS = 2 ** (SIZE * (_BOTTOM_ROW - _TOP_ROW + 1)) - 1


class BreakoutConfig(ActionSetConfig, MinAtarConfig):
    """Settings of Breakout, which has no difficulty ramp."""


def _start(keys: Tensor) -> dict[str, Tensor]:
    right_side = rng.randint(keys, low=0, high=2).to(torch.int32)
    x, y = (SIZE - 1) * right_side, constant(keys, _BOTTOM_ROW)
    return {
        "paddle": constant(keys, 4),
        "x": x,
        "y": y,
        "dx": 1 - 2 * right_side,
        "dy": constant(keys, 1),
        "trail_x": x.clone(),
        "trail_y": y.clone(),
        "bricks": constant(keys, _ALL_BRICKS),
        "in_brick": torch.zeros(keys.shape, dtype=torch.bool, device=keys.device),
    }


def _play(state: TensorDict, action: Tensor, noise: TensorDict) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    x, y, bricks = state["x"], state["y"], state["bricks"]
    paddle = moved(state["paddle"], action == LEFT, action == RIGHT)

    next_x, next_y = x + state["dx"], y + state["dy"]
    at_side, at_top, at_bottom = (next_x < 0) | (next_x >= SIZE), next_y < 0, next_y == _BOTTOM
    next_x = next_x.clamp(0, SIZE - 1)

    in_rows = (next_y >= _TOP_ROW) & (next_y <= _BOTTOM_ROW)
    place = SIZE * (next_y.clamp(_TOP_ROW, _BOTTOM_ROW) - _TOP_ROW) + next_x
    brick = torch.where(in_rows, torch.ones_like(place) << place, 0) & bricks
    in_brick = brick != 0
    # after breaking a brick, the ball passes through bricks until it enters a cell without a brick
    breaks = in_brick & ~state["in_brick"]
    bricks = torch.where(breaks, bricks ^ brick, bricks)
    bricks = torch.where(at_bottom & (bricks == 0), _ALL_BRICKS, bricks)

    above_paddle = at_bottom & (x == paddle)
    at_edge_of_paddle = at_bottom & ~above_paddle & (next_x == paddle)
    bounces = breaks | above_paddle | at_edge_of_paddle
    fields = {
        "paddle": paddle,
        "x": next_x,
        "y": torch.where(bounces, y, next_y.clamp(min=0)),
        "dx": torch.where(at_side ^ at_edge_of_paddle, -state["dx"], state["dx"]),
        "dy": torch.where(at_top | bounces, -state["dy"], state["dy"]),
        "trail_x": x.clone(),
        "trail_y": y.clone(),
        "bricks": bricks,
        "in_brick": in_brick,
    }
    return fields, breaks, at_bottom & ~bounces


def _image(state: Mapping[str, Tensor] | TensorDict) -> Tensor:
    one = torch.ones_like(state["x"])
    bottom = torch.full_like(state["paddle"], _BOTTOM)
    bricks = [(state["bricks"] >> (SIZE * row)) & (2**SIZE - 1) for row in range(_BOTTOM_ROW - _TOP_ROW + 1)]
    wall = torch.nn.functional.pad(torch.stack(bricks, -1), (_TOP_ROW, _BOTTOM - _BOTTOM_ROW))
    ball = on_row(state["y"], one << state["x"])
    trail = on_row(state["trail_y"], one << state["trail_x"])
    return image_of((on_row(bottom, one << state["paddle"]), ball, trail, wall))


@register_env("minatar_breakout")
def minatar_breakout(cfg: BreakoutConfig) -> Env:
    """Bounce a ball off a paddle at the bottom to break the bricks at the top.

    The ball moves by one cell per step along a diagonal. It bounces off the sides, the top, the bricks and the paddle.
    If the ball comes from the cell directly above the paddle, its vertical direction reverses. If the ball comes from a
    neighbouring column, it flies back in the direction from which it came. The reward is 1 for a step that breaks a
    brick, and 0 for any other step. Once all 30 bricks are broken, a new wall appears when the ball next
    reaches the bottom row. The episode ends when the ball misses the paddle and reaches the bottom row.

    The channels of the observation are 0 paddle, 1 ball, 2 the ball's previous cell and 3 bricks. The minimal actions
    are 0 no-op, 1 left and 2 right.

    The state stores the bricks in the field `bricks`, int32 `[*B]`. The bit with the number `10 * (y - 1) + x` is 1 if
    the cell in row y and column x has a brick.

    Source: Young and Tian 2019, "MinAtar: An Atari-inspired testbed for thorough and reproducible reinforcement
        learning experiments", arXiv:1903.03176; the package MinAtar 1.0.15.
    """
    return make_game(cfg, Rules(4, action_set(cfg, NOOP, LEFT, RIGHT), 0, _start, no_draws, _play, _image))
