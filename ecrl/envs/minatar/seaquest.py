"""MinAtar's Seaquest: rescue divers with a submarine, and shoot enemies."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.envs.core import Env
from ecrl.envs.minatar.game import (
    ALL_ACTIONS,
    DOWN,
    FIRE,
    LEFT,
    RIGHT,
    SIZE,
    UP,
    MinAtarConfig,
    RampConfig,
    Rules,
    any_bit,
    constant,
    countdown,
    framed,
    image_of,
    indices,
    make_game,
    moved,
    on_row,
)
from ecrl.registry import register_env

_ROWS = 8  # enemies and divers are in the rows 1 to 8
_EVERYWHERE = sum(4**x for x in range(SIZE))
_LAST_COLUMN = 4 ** (SIZE - 1)
_MAX_OXYGEN, _OXYGEN_PER_CELL, _MAX_DIVERS = 200, 20, 6
_RELOAD, _ENEMY_RELOAD = 5, 10
_DIVER_INTERVAL, _DIVER_WAIT = 30, 5
_LAST_LEVEL = 19
_ENEMIES, _SHOTS, _DIVERS = 30, 2, 2  # numbers of slots, see `minatar_seaquest`


class SeaquestConfig(RampConfig, MinAtarConfig):
    """Settings of Seaquest."""


def _spawn_interval(level: Tensor) -> Tensor:
    return 20 - level


def _move_wait(level: Tensor) -> Tensor:
    return (5 - (level >> 1)).clamp(min=2)


def _column(x: Tensor) -> Tensor:
    return torch.ones_like(x) << (2 * x)


def _shift(place: Tensor, right: Tensor) -> Tensor:
    """Move places by one column, to the right where `right` is 1, else to the left.

    The place of column x is 4**x. A place beyond the board becomes 0.
    """
    return torch.where(right == 1, (place << 2) & _EVERYWHERE, place >> 2)


def _start_place(right: Tensor) -> Tensor:
    return torch.where(right == 1, 1, _LAST_COLUMN).to(torch.int32)


def _append(slots: Tensor, new: Tensor, where: Tensor) -> Tensor:
    """Append an object to slots `[*B, n]` where `where` is True, and drop the oldest object (slot 0) there."""
    return torch.where(where.unsqueeze(-1), torch.cat((slots[..., 1:], new.unsqueeze(-1)), -1), slots)


def _board(row: Tensor, place: Tensor) -> Tensor:
    """Sum the places of objects in slots `[*B, n]` by row. The result is int32 `[*B, 8]`, for the rows 1 to 8.

    A cell may hold up to three objects, so each column has two bits: the place of column x is 4**x.
    """
    empty = row.new_zeros((*row.shape[:-1], 1 + _ROWS))
    return empty.scatter_add(-1, row.to(torch.int64), place)[..., 1:]


def _occupied(board: Tensor) -> Tensor:
    """Return the places of a board that have at least one object."""
    return (board | (board >> 1)) & _EVERYWHERE


class _Enemies(NamedTuple):
    """Fields of the enemies, each int32 `[*B, 30]` with one slot per enemy, the oldest first.

    A place 0 marks an empty slot.
    """

    row: Tensor
    place: Tensor
    right: Tensor
    is_sub: Tensor
    wait: Tensor
    reload: Tensor


def _enemies(state: Mapping[str, Tensor] | TensorDict) -> _Enemies:
    return _Enemies(*(state[f"enemy_{name}"] for name in _Enemies._fields))


class _Shots(NamedTuple):
    """Fields of the shots, each int32 `[*B, 2]` with one slot per shot, the oldest first.

    A place 0 marks an empty slot.
    """

    row: Tensor
    place: Tensor
    right: Tensor


def _shots(state: Mapping[str, Tensor] | TensorDict) -> _Shots:
    return _Shots(*(state[f"shot_{name}"] for name in _Shots._fields))


def _start(keys: Tensor) -> dict[str, Tensor]:
    level = constant(keys, 0)
    return {
        "x": constant(keys, 5),
        "y": constant(keys, 0),
        "right": constant(keys, 0),
        "oxygen": constant(keys, _MAX_OXYGEN),
        "divers": constant(keys, 0),
        "surfaced": torch.ones(keys.shape, dtype=torch.bool, device=keys.device),
        "level": level,
        "reload": constant(keys, 0),
        "enemy_spawn_wait": _spawn_interval(level),
        "diver_spawn_wait": constant(keys, _DIVER_INTERVAL),
        **{f"enemy_{name}": constant(keys, 0, _ENEMIES) for name in _Enemies._fields},
        **{f"shot_{name}": constant(keys, 0, _SHOTS) for name in _Shots._fields},
        **{f"diver_{name}": constant(keys, 0, _DIVERS) for name in ("row", "place", "right", "wait")},
        "torpedoes_right": constant(keys, 0, _ROWS),
        "torpedoes_left": constant(keys, 0, _ROWS),
    }


def _draw(uniforms: Tensor) -> dict[str, Tensor]:
    right, is_sub, row, diver_right, diver_row = uniforms.unbind(-1)
    return {
        "enemy_right": (right < 1 / 2).to(torch.int32),
        "enemy_is_sub": (is_sub < 1 / 3).to(torch.int32),
        "enemy_row": (row * _ROWS).to(torch.int32) + 1,
        "diver_right": (diver_right < 1 / 2).to(torch.int32),
        "diver_row": (diver_row * _ROWS).to(torch.int32) + 1,
    }


def _spawn_enemy(enemies: _Enemies, is_time: Tensor, noise: TensorDict, wait: Tensor) -> _Enemies:
    """If `is_time` is True, append an enemy, unless an enemy in the same row moves in the opposite direction."""
    right, row = noise["enemy_right"], noise["enemy_row"]
    opposite = (enemies.row == row.unsqueeze(-1)) & (enemies.right != right.unsqueeze(-1))
    spawns = is_time & ~any_bit(torch.where(opposite, enemies.place, 0))
    reload = torch.full_like(row, _ENEMY_RELOAD)
    new = _Enemies(row, _start_place(right), right, noise["enemy_is_sub"], wait, reload)
    return _Enemies(*(_append(slots, value, spawns) for slots, value in zip(enemies, new, strict=True)))


def _shoot(enemies: _Enemies, shots: _Shots) -> tuple[_Enemies, _Shots, Tensor]:
    """Move the player's shots, the newest first. Return the remaining enemies and shots, and the number of hits.

    A shot hits one enemy: the oldest fish in its cell, or the oldest submarine if there is no fish.
    """
    places = _shift(shots.place, shots.right)
    slot = indices(places, _ENEMIES)
    order = torch.where(enemies.is_sub == 1, slot + _ENEMIES, slot)
    nothing = 2 * _ENEMIES
    place, kept, hits = enemies.place, [], torch.zeros_like(shots.row[..., 0])
    for i in reversed(range(_SHOTS)):
        in_cell = (enemies.row == shots.row[..., i : i + 1]) & ((place & places[..., i : i + 1]) != 0)
        first = torch.where(in_cell, order, nothing).amin(-1)
        place = torch.where(order == first.unsqueeze(-1), 0, place)
        hit = first < nothing
        kept.insert(0, torch.where(hit, 0, places[..., i]))
        hits = hits + hit.to(torch.int32)
    return enemies._replace(place=place), shots._replace(place=torch.stack(kept, -1)), hits


def _collide(enemies: _Enemies, place: Tensor, arrived: Tensor, shots: _Shots) -> tuple[Tensor, _Shots, Tensor]:
    """Remove enemies that moved (`arrived`) into the cell of a shot, and remove these shots.

    Return the places of all enemies, the remaining shots and the number of hits.

    No two enemies arrive in one cell in the same step. If there are two shots in a cell, the older shot is removed.
    """
    kept, hits = [], torch.zeros_like(shots.row[..., 0])
    for i in range(_SHOTS):
        shot = shots.place[..., i : i + 1]
        is_hit = arrived & (enemies.row == shots.row[..., i : i + 1]) & ((place & shot) != 0)
        hit = any_bit(is_hit.to(torch.int32))
        place = torch.where(is_hit, 0, place)
        kept.append(torch.where(hit, 0, shots.place[..., i]))
        hits = hits + hit.to(torch.int32)
    return place, shots._replace(place=torch.stack(kept, -1)), hits


def _rescue(state: Mapping[str, Tensor], row: Tensor, place: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Move the divers, the newest first, and pick up divers in the player's cell while there is room for them.

    `row` and `place` are the player's cell. Return the fields of the divers, and the number of divers on board.
    """
    divers, places, waits = state["divers"], [], []
    for i in reversed(range(_DIVERS)):
        diver, wait, right = (state[f"diver_{name}"][..., i] for name in ("place", "wait", "right"))
        moves = wait == 0
        after = torch.where(moves, _shift(diver, right), diver)
        touches = (state["diver_row"][..., i] == row) & (((diver | after) & place) != 0)
        taken = touches & (divers < _MAX_DIVERS)
        divers = divers + taken.to(torch.int32)
        places.insert(0, torch.where(taken, 0, after))
        waits.insert(0, torch.where(moves, _DIVER_WAIT, wait - 1))
    return {"diver_place": torch.stack(places, -1), "diver_wait": torch.stack(waits, -1)}, divers


def _play(
    state: TensorDict, action: Tensor, noise: TensorDict, *, ramping: bool
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    level = state["level"]

    spawns = state["enemy_spawn_wait"] == 0
    enemies = _spawn_enemy(_enemies(state), spawns, noise, _move_wait(level))
    enemy_spawn_wait = torch.where(spawns, _spawn_interval(level), state["enemy_spawn_wait"])
    new_diver = state["diver_spawn_wait"] == 0
    diver = {
        "diver_row": noise["diver_row"],
        "diver_place": _start_place(noise["diver_right"]),
        "diver_right": noise["diver_right"],
        "diver_wait": torch.full_like(level, _DIVER_WAIT),
    }
    diver_slots = {name: _append(state[name], value, new_diver) for name, value in diver.items()}
    diver_spawn_wait = torch.where(new_diver, _DIVER_INTERVAL, state["diver_spawn_wait"])

    fires = (action == FIRE) & (state["reload"] == 0)
    x = moved(state["x"], action == LEFT, action == RIGHT)
    y = moved(state["y"], action == UP, action == DOWN, 0, _ROWS)
    right = torch.where(action == RIGHT, 1, torch.where(action == LEFT, 0, state["right"]))
    place = _column(x)
    shot = _Shots(y, place, right)
    shots = _Shots(*(_append(slots, value, fires) for slots, value in zip(_shots(state), shot, strict=True)))

    enemies, shots, hits = _shoot(enemies, shots)
    moved_divers, divers = _rescue(diver_slots | {"divers": state["divers"]}, y, place)

    in_row, here = enemies.row == y.unsqueeze(-1), place.unsqueeze(-1)
    moves, is_sub = enemies.wait == 0, enemies.is_sub == 1
    places = torch.where(moves, _shift(enemies.place, enemies.right), enemies.place)
    caught = any_bit(torch.where(in_row, (enemies.place | places) & here, 0))
    arrived = moves & ~(in_row & ((places & here) != 0))

    # a submarine that is hit as it moves still launches its torpedo
    launches = is_sub & (enemies.reload == 0)
    launched = [_board(enemies.row, torch.where(launches & (enemies.right == side), places, 0)) for side in (1, 0)]
    after_subs, shots, sub_hits = _collide(enemies, places, arrived & is_sub, shots)
    after_fish, shots, fish_hits = _collide(enemies, after_subs, arrived & ~is_sub, shots)
    player = on_row(y, place, _ROWS, 1)
    old_right, old_left = state["torpedoes_right"] | launched[0], state["torpedoes_left"] | launched[1]
    torpedoes_right, torpedoes_left = (old_right << 2) & _EVERYWHERE, old_left >> 2
    caught = caught | any_bit((old_right | old_left | torpedoes_right | torpedoes_left) & player)

    oxygen, under_water = state["oxygen"], y > 0
    surfaces = ~under_water & ~state["surfaced"]
    succeeds = surfaces & (divers != 0)
    terminated = caught | (oxygen <= 0) | (surfaces & ~succeeds)
    is_full = divers == _MAX_DIVERS
    bonus = torch.where(succeeds & is_full, oxygen // _OXYGEN_PER_CELL, 0)
    left_on_board = torch.where(is_full, 0, divers) - 1  # -1 after a rescue of six, as in the package MinAtar
    rises = succeeds & (level < _LAST_LEVEL) if ramping else torch.zeros_like(succeeds)
    fields = {
        "x": x,
        "y": y,
        "right": right,
        "oxygen": torch.where(succeeds, _MAX_OXYGEN, torch.where(under_water, oxygen - 1, oxygen)),
        "divers": torch.where(succeeds, left_on_board, divers),
        "surfaced": ~under_water & (state["surfaced"] | succeeds),
        "level": level + rises.to(torch.int32),
        "reload": countdown(torch.where(fires, _RELOAD, state["reload"])),
        "enemy_spawn_wait": countdown(enemy_spawn_wait),
        "diver_spawn_wait": countdown(diver_spawn_wait),
        "enemy_row": enemies.row,
        "enemy_place": after_fish,
        "enemy_right": enemies.right,
        "enemy_is_sub": enemies.is_sub,
        "enemy_wait": torch.where(moves, _move_wait(level).unsqueeze(-1), enemies.wait - 1),
        "enemy_reload": torch.where(enemies.reload == 0, _ENEMY_RELOAD, enemies.reload - 1),
        "shot_row": shots.row,
        "shot_place": shots.place,
        "shot_right": shots.right,
        **(diver_slots | moved_divers),
        "torpedoes_right": torpedoes_right,
        "torpedoes_left": torpedoes_left,
    }
    return fields, hits + sub_hits + fish_hits + bonus, terminated


def _image(state: Mapping[str, Tensor] | TensorDict) -> Tensor:
    enemies, shots, one = _enemies(state), _shots(state), torch.ones_like(state["x"])
    place = _column(state["x"])
    back = torch.where(state["right"] == 1, place >> 2, (place << 2) & _EVERYWHERE)
    bottom = (SIZE - 1) * one
    oxygen_cells = state["oxygen"].clamp(min=0) // _OXYGEN_PER_CELL
    oxygen = ((one << (2 * oxygen_cells)) - 1) & _EVERYWHERE
    num_divers = state["divers"].clamp(min=0)
    divers_on_board = (_LAST_COLUMN - (one << (2 * (SIZE - 1 - num_divers)))) & _EVERYWHERE
    board_rows = indices(place)
    in_rows = board_rows == shots.row.unsqueeze(-1)
    shot_rows = torch.where(in_rows, shots.place.unsqueeze(-1), 0)

    fish = _board(enemies.row, torch.where(enemies.is_sub == 1, 0, enemies.place))
    subs = _board(enemies.row, torch.where(enemies.is_sub == 1, enemies.place, 0))
    divers = _board(state["diver_row"], state["diver_place"])
    enemy_trail = _board(enemies.row, _shift(enemies.place, enemies.right ^ 1))
    diver_trail = _board(state["diver_row"], _shift(state["diver_place"], state["diver_right"] ^ 1))
    trail = _occupied(enemy_trail) | _occupied(diver_trail)
    channels = (
        on_row(state["y"], place),
        on_row(state["y"], back),
        shot_rows[..., 0, :] | shot_rows[..., 1, :],
        framed(trail),
        framed(state["torpedoes_right"] | state["torpedoes_left"]),
        framed(_occupied(fish)),
        framed(_occupied(subs)),
        on_row(bottom, oxygen),
        on_row(bottom, divers_on_board),
        framed(_occupied(divers)),
    )
    return image_of(channels, bits_per_column=2)


@register_env("minatar_seaquest")
def minatar_seaquest(cfg: SeaquestConfig) -> Env:
    """Rescue divers with a submarine, shoot enemies, and surface before the oxygen runs out.

    The player moves by one cell per step, and fires at most once in five steps. The reward is 1 for each enemy that is
    shot. Every `20 - level` steps, a fish or, with probability 1/3, a submarine appears at the left or right end of a
    random row. No enemy appears in a row in which another enemy moves in the opposite direction. Enemies move every
    `max(2, 5 - level // 2) + 1` steps. A submarine launches a torpedo every 11 steps. Torpedoes move by one cell per
    step. Every 30 steps, a diver appears. Divers move every 6 steps. The player picks up divers that it touches, up to
    six.

    Under water, the oxygen falls by 1 per step, from 200. When the player surfaces, it gives up one diver, and the
    oxygen is 200 again. With six divers, the player gives up all divers for a reward of `oxygen // 20`. The number of
    divers is then -1, as in the package MinAtar. Afterwards, the player can surface without a diver, and each surfacing
    lowers the number by one. With difficulty_ramping, each surfacing raises the level by one, up to 19. The episode
    ends when an enemy or a torpedo hits the player, when no oxygen is left, or when the player surfaces with 0 divers.

    The channels of the observation are 0 front and 1 back of the player, 2 shots, 3 the cells behind enemies and
    divers, 4 torpedoes, 5 fish, 6 submarines, 7 oxygen, 8 divers on board and 9 divers. The actions are 0 no-op, 1
    left, 2 up, 3 right, 4 down and 5 fire. The game uses all actions, so it has no setting use_minimal_action_set.

    The state stores column x as the place 4**x. Two bits per column suffice, because a cell holds at most three
    enemies. An object that has left the board has the place 0. `enemy_*`, `shot_*` and `diver_*` are slots of objects,
    the oldest first. A new object replaces the oldest object. There are enough slots for every game:

    - 30 enemies: on the highest level, at most one enemy appears in each step, and each enemy leaves the board after 30
      steps. On lower levels, at most 30 enemies appear while the oldest enemy is on the board.
    - 2 shots, because a shot is gone after 9 steps, and 2 divers, because a diver is gone after 60 steps.

    The order of the slots decides which enemy a shot hits: the oldest fish in its cell, or the oldest submarine if
    there is no fish. All enemies in a row move in the same direction, and a younger enemy never passes an older enemy.
    Enemies in the same cell move at different steps. Two enemies therefore never move into one cell in the same step.
    Torpedoes with the same cell and direction stay together, so torpedoes need no slots. They are stored by row, in
    `torpedoes_right` and `torpedoes_left`, int32 `[*B, 8]`.

    Source: Young and Tian 2019, "MinAtar: An Atari-inspired testbed for thorough and reproducible reinforcement
        learning experiments", arXiv:1903.03176; the package MinAtar 1.0.15.
    """
    play = partial(_play, ramping=cfg.difficulty_ramping)
    return make_game(cfg, Rules(10, ALL_ACTIONS, 5, _start, _draw, play, _image))
