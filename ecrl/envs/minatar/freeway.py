"""MinAtar's Freeway: cross a road with eight lanes of cars."""

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.envs.core import Env
from ecrl.envs.minatar.game import (
    DOWN,
    FULL_ROW,
    NOOP,
    SIZE,
    UP,
    ActionSetConfig,
    MinAtarConfig,
    Rules,
    action_set,
    any_bit,
    constant,
    countdown,
    framed,
    image_of,
    make_game,
    moved,
    on_row,
)
from ecrl.registry import register_env

_LANES, _SLOWEST = 8, 5
_COLUMN = 4  # column of the chicken
_BOTTOM = SIZE - 1
_MOVE_WAIT, _LAST_STEP = 3, 2500


class FreewayConfig(ActionSetConfig, MinAtarConfig):
    """Settings of Freeway, which has no difficulty ramp."""


def _velocities(uniforms: Tensor) -> Tensor:
    """Map uniform samples to the velocities -5 to -1 and 1 to 5, which are equally likely."""
    number = (uniforms * (2 * _SLOWEST)).to(torch.int32) - _SLOWEST
    return torch.where(number < 0, number, number + 1)


def _start(keys: Tensor) -> dict[str, Tensor]:
    velocity = _velocities(rng.uniform(keys, (_LANES,)))
    return {
        "y": constant(keys, _BOTTOM),
        "move_wait": constant(keys, _MOVE_WAIT),
        "cars": constant(keys, 1, _LANES),
        "velocity": velocity,
        "car_wait": velocity.abs(),
        "steps_left": constant(keys, _LAST_STEP),
    }


def _draw(uniforms: Tensor) -> dict[str, Tensor]:
    return {"velocity": _velocities(uniforms)}


def _around(cars: Tensor, right: Tensor) -> Tensor:
    """Move cars by one cell, to the right where `right` is True and to the left elsewhere.

    A car that leaves its lane enters at the other end.
    """
    to_right = ((cars << 1) & FULL_ROW) | (cars >> (SIZE - 1))
    to_left = (cars >> 1) | ((cars << (SIZE - 1)) & FULL_ROW)
    return torch.where(right, to_right, to_left)


def _play(state: TensorDict, action: Tensor, noise: TensorDict) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    may_move = state["move_wait"] == 0
    up, down = may_move & (action == UP), may_move & (action == DOWN)
    y = moved(state["y"], up, down)
    move_wait = torch.where(up | down, _MOVE_WAIT, state["move_wait"])

    crossed = y == 0
    y = torch.where(crossed, _BOTTOM, y)
    velocity = torch.where(crossed.unsqueeze(-1), noise["velocity"], state["velocity"])
    car_wait = torch.where(crossed.unsqueeze(-1), velocity.abs(), state["car_wait"])

    drives = car_wait == 0
    cars = torch.where(drives, _around(state["cars"], velocity > 0), state["cars"])
    chicken = on_row(y, torch.full_like(y, 1 << _COLUMN), _LANES, 1)
    hit = any_bit((state["cars"] | cars) & chicken)
    steps_left = state["steps_left"] - 1
    fields = {
        "y": torch.where(hit, _BOTTOM, y),
        "move_wait": countdown(move_wait),
        "cars": cars,
        "velocity": velocity,
        "car_wait": torch.where(drives, velocity.abs(), car_wait - 1),
        "steps_left": steps_left,
    }
    return fields, crossed, steps_left < 0


def _image(state: Mapping[str, Tensor] | TensorDict) -> Tensor:
    cars, velocity = state["cars"], state["velocity"]
    trail, speed = _around(cars, velocity < 0), velocity.abs()
    trails = (framed(torch.where(speed == k, trail, 0)) for k in range(1, _SLOWEST + 1))
    chicken = on_row(state["y"], torch.full_like(state["y"], 1 << _COLUMN))
    return image_of((chicken, framed(cars), *trails))


@register_env("minatar_freeway")
def minatar_freeway(cfg: FreewayConfig) -> Env:
    """Cross a road from the bottom row to the top row, between cars on eight lanes.

    The chicken moves up or down by one cell, at most once in three steps. The reward is 1 for a step that completes a
    crossing, and 0 for any other step. After a crossing, or if a car hits the chicken, the chicken returns to the
    bottom row. A car of speed k moves by one cell every k + 1 steps, so speed 1 is the fastest. A car that leaves its
    lane enters at the other end. The direction and the speed (1 to 5) of each car are random, and are drawn again after
    each crossing. Every episode terminates at step 2501, unless max_episode_steps truncates the episode earlier. The
    package MinAtar also ends an episode at step 2501, when its counter exceeds 2500.

    The channels of the observation are 0 chicken, 1 cars, and 2 to 6 the cells behind cars of speed 1 to 5. The minimal
    actions are 0 no-op, 1 up and 2 down.

    The state stores the cars of the rows 1 to 8 in `cars`, int32 `[*B, 8]`. Bit x of a row is column x. `velocity` is
    the speed, negative for cars that drive to the left.

    Source: Young and Tian 2019, "MinAtar: An Atari-inspired testbed for thorough and reproducible reinforcement
        learning experiments", arXiv:1903.03176; the package MinAtar 1.0.15.
    """
    rules = Rules(7, action_set(cfg, NOOP, UP, DOWN), _LANES, _start, _draw, _play, _image)
    return make_game(cfg, rules, lockstep=True)
