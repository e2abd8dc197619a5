"""The games of the package MinAtar with scripted random numbers, and their states in the fields of ecrl's games."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

GAMES = ("breakout", "asterix", "freeway", "space_invaders", "seaquest")


class Script:
    """Stands in for a RandomState: returns the given numbers in order, and fails if another kind is asked for."""

    def __init__(self):
        self.numbers: list[tuple[str, Any]] = []

    def _next(self, kind: str) -> Any:
        expected, number = self.numbers.pop(0)
        assert expected == kind
        return number

    def rand(self, *shape: int) -> Any:
        return self._next("rand")

    def randint(self, *bounds: int, **named: int) -> Any:
        number = self._next("randint")
        return number(*bounds) if callable(number) else number


def _coin(is_true: Any) -> tuple[str, float]:
    """A sample for a comparison with 1/2 or 1/3."""
    return "rand", 0.1 if bool(is_true) else 0.9


def _lanes(velocity: Tensor) -> list[tuple[str, Any]]:
    """Numbers of Freeway's cars."""
    return [("randint", velocity.abs().numpy().astype(int)), ("rand", (velocity > 0).numpy() * 0.8 + 0.1)]


def _asterix_numbers(game: Any, noise: TensorDict) -> list[tuple[str, Any]]:
    if game.spawn_timer != 0:
        return []
    row = [("randint", lambda n: int(noise["free_row"] * n))] if None in game.entities else []
    return [_coin(noise["right"]), _coin(noise["gold"]), *row]


def _freeway_numbers(game: Any, noise: TensorDict) -> list[tuple[str, Any]]:
    return _lanes(noise["velocity"])


def _seaquest_numbers(game: Any, noise: TensorDict) -> list[tuple[str, Any]]:
    numbers = []
    if game.e_spawn_timer == 0:
        numbers = [_coin(noise["enemy_right"]), _coin(noise["enemy_is_sub"]), ("randint", int(noise["enemy_row"]))]
    if game.d_spawn_timer == 0:
        numbers += [_coin(noise["diver_right"]), ("randint", int(noise["diver_row"]))]
    return numbers


STEP_NUMBERS: dict[str, Callable] = {
    "asterix": _asterix_numbers,
    "freeway": _freeway_numbers,
    "seaquest": _seaquest_numbers,
}
START_NUMBERS: dict[str, Callable] = {
    "breakout": lambda start: [("randint", int(start["x"] == 9))],
    "freeway": lambda start: _lanes(start["velocity"]),
}


class Reference:
    """One game of the package, with the random numbers of ecrl's noise."""

    def __init__(self, name: str, start: TensorDict, ramping: bool = True):
        from minatar import environment

        self.name, self.script = name, Script()
        self.env = environment.Environment(name, sticky_action_prob=0.5, difficulty_ramping=ramping)
        self.env.random = self.env.env.random = self.script
        self.reset(start)

    @property
    def game(self) -> Any:
        """The game's own state."""
        return self.env.env

    def reset(self, start: TensorDict) -> None:
        """Start an episode as `start` does, with the no-op as last action, which the package would keep."""
        self.script.numbers = START_NUMBERS.get(self.name, lambda start: [])(start)
        self.env.reset()
        self.env.last_action = 0
        assert not self.script.numbers

    def step(self, action: int, noise: TensorDict) -> tuple[float, bool]:
        """Take an action of the six and return the reward and the flag `terminal`."""
        numbers = STEP_NUMBERS.get(self.name, lambda game, noise: [])(self.game, noise)
        self.script.numbers = [_coin(noise["repeats"]), *numbers]
        reward, terminal = self.env.act(action)
        may_be_left = self.name == "freeway" and not reward  # Freeway draws only at a crossing
        assert may_be_left or not self.script.numbers
        return float(reward), bool(terminal)

    def fields(self) -> dict[str, Any]:
        """The state as plain numbers and lists, with the names of ecrl's fields."""
        return FIELDS[self.name](self.game) | {"last_action": int(self.env.last_action)}


def _bits(rows: Any) -> list[int]:
    return [sum(int(value) << x for x, value in enumerate(row)) for row in rows]


def _breakout(game: Any) -> dict[str, Any]:
    dx, dy = [(-1, -1), (1, -1), (1, 1), (-1, 1)][game.ball_dir]
    bricks = sum(bits << (10 * i) for i, bits in enumerate(_bits(game.brick_map[1:4])))
    assert not game.brick_map[[0, *range(4, 10)]].any()
    return {
        **{"paddle": game.pos, "x": game.ball_x, "y": game.ball_y, "dx": dx, "dy": dy, "bricks": bricks},
        **{"trail_x": game.last_x, "trail_y": game.last_y, "in_brick": game.strike},
    }


def _asterix(game: Any) -> dict[str, Any]:
    objects = [(0, 0, None) if e is None else (0 if e[3] else 1 << e[0], e[3] << e[0], e[2]) for e in game.entities]
    enemy, gold, right = zip(*objects, strict=True)
    assert game.spawn_speed == 10 - game.ramp_index and game.move_speed == 5 - game.ramp_index // 2
    return {
        **{"x": game.player_x, "y": game.player_y, "enemy": list(enemy), "gold": list(gold), "right": list(right)},
        **{"spawn_wait": game.spawn_timer, "move_wait": game.move_timer},
        **{"ramp_wait": game.ramp_timer, "level": game.ramp_index},
    }


def _freeway(game: Any) -> dict[str, Any]:
    assert [car[1] for car in game.cars] == [*range(1, 9)]
    return {
        **{"y": game.pos, "move_wait": int(game.move_timer), "steps_left": game.terminate_timer},
        **{"cars": [1 << car[0] for car in game.cars], "car_wait": [int(car[2]) for car in game.cars]},
        "velocity": [int(car[3]) for car in game.cars],
    }


def _space_invaders(game: Any) -> dict[str, Any]:
    assert game.enemy_move_interval == 12 - game.ramp_index
    return {
        **{"cannon": game.pos, "aliens": _bits(game.alien_map), "shots": _bits(game.f_bullet_map)},
        **{"bombs": _bits(game.e_bullet_map), "right": game.alien_dir > 0, "move_wait": int(game.alien_move_timer)},
        **{"bomb_wait": game.alien_shot_timer, "reload": int(game.shot_timer), "level": game.ramp_index},
    }


def _seaquest(game: Any) -> dict[str, Any]:
    assert game.e_spawn_speed == 20 - game.ramp_index and game.move_speed == max(2, 5 - game.ramp_index // 2)
    torpedoes = {(x, y, bool(right)) for x, y, right in game.e_bullets}
    return {
        **{"x": game.sub_x, "y": game.sub_y, "right": int(game.sub_or), "oxygen": game.oxygen},
        **{"divers": game.diver_count, "surfaced": game.surface, "level": game.ramp_index},
        **{"reload": int(game.shot_timer), "enemy_spawn_wait": int(game.e_spawn_timer)},
        "diver_spawn_wait": int(game.d_spawn_timer),
        "fish": [[int(v) for v in fish] for fish in game.e_fish],
        "submarines": [[int(v) for v in sub] for sub in game.e_subs],
        "shots": [[int(v) for v in shot] for shot in game.f_bullets],
        "free_divers": [[int(v) for v in diver] for diver in game.divers],
        "torpedoes": sorted(torpedoes),
    }


FIELDS: dict[str, Callable] = {
    "breakout": _breakout,
    "asterix": _asterix,
    "freeway": _freeway,
    "space_invaders": _space_invaders,
    "seaquest": _seaquest,
}


def _x(place: int) -> int:
    return (place.bit_length() - 1) // 2


def fields_of(name: str, state: TensorDict) -> list[dict[str, Any]]:
    """The fields of a batch of ecrl's states, one dict per environment, as `Reference.fields` returns them."""
    flags = ("obs", "final_obs", "reward", "terminated", "truncated", "elapsed")
    columns = {key: value.tolist() for key, value in state.items() if key not in flags}
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return [_comparable(name, fields) for fields in rows]


def _comparable(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    if name == "asterix":
        pairs = zip(fields["right"], fields["enemy"], fields["gold"], strict=True)
        fields["right"] = [bool(right) if enemy or gold else None for right, enemy, gold in pairs]
    if name != "seaquest":
        return fields
    slots = {
        kind: [*zip(*(fields.pop(f"{kind}_{part}") for part in parts), strict=True)]
        for kind, parts in (
            ("enemy", ("place", "row", "right", "wait", "reload", "is_sub")),
            ("shot", ("place", "row", "right")),
            ("diver", ("place", "row", "right", "wait")),
        )
    }
    alive = {kind: [[_x(place), *rest] for place, *rest in rows if place] for kind, rows in slots.items()}
    boards = {side: fields.pop(f"torpedoes_{side}") for side in ("right", "left")}
    torpedoes = [
        (x, y, side == "right")
        for side, rows in boards.items()
        for y, row in enumerate(rows, 1)
        for x in range(10)
        if row >> (2 * x) & 1
    ]
    return fields | {
        "fish": [enemy[:4] for enemy in alive["enemy"] if not enemy[5]],
        "submarines": [enemy[:5] for enemy in alive["enemy"] if enemy[5]],
        "shots": alive["shot"],
        "free_divers": alive["diver"],
        "torpedoes": sorted(torpedoes),
    }


def image(reference: Reference) -> Tensor:
    """The reference's observation."""
    return torch.from_numpy(reference.env.state()).to(torch.uint8)
