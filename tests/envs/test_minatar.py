"""The games of MinAtar by hand-made situations, and the bounds that the state of Seaquest relies on."""

import pytest
import torch
from support.long_cases import long_except
from support.small_runs import small

from ecrl import rng
from ecrl.env_check.check import check_env
from ecrl.envs import auto_reset, make_env
from ecrl.envs.minatar.game import ALL_ACTIONS, DOWN, FIRE, LEFT, NOOP, RIGHT, UP
from ecrl.errors import ConfigError
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.spaces import Discrete, box

CHANNELS = {"breakout": 4, "asterix": 4, "freeway": 7, "space_invaders": 6, "seaquest": 10}
MINIMAL = {
    "breakout": (NOOP, LEFT, RIGHT),
    "asterix": (NOOP, LEFT, UP, RIGHT, DOWN),
    "freeway": (NOOP, UP, DOWN),
    "space_invaders": (NOOP, LEFT, RIGHT, FIRE),
    "seaquest": ALL_ACTIONS,
}
RAMP = ("asterix", "space_invaders", "seaquest")
ALL_BRICKS = 2**30 - 1
WAVE = 0b0011111100


def game(name, **cfg):
    six = {} if name == "seaquest" else {"use_minimal_action_set": False}
    return make_env({"name": f"minatar_{name}", "cfg": six | cfg})


def rows(n=8, **bits):
    """Rows of a board, all empty but those given, such as r4=1."""
    return [bits.get(f"r{row}", 0) for row in range(n)]


def slots(n, *values):
    """Slots of which the last ones are filled."""
    return [*[0] * (n - len(values)), *values]


def enemies(*rows_of_enemies):
    """Seaquest's enemies, each as (row, column, right, is_sub, wait, reload), the oldest first."""
    columns = [*zip(*((y, 4**x, *rest) for y, x, *rest in rows_of_enemies), strict=True)]
    return {
        f"enemy_{name}": slots(30, *column)
        for name, column in zip(("row", "place", "right", "is_sub", "wait", "reload"), columns, strict=True)
    }


def shot(y, x, right):
    return {"shot_row": [0, y], "shot_place": [0, 4**x], "shot_right": [0, right]}


def diver(y, x, right, wait):
    return {"diver_row": [0, y], "diver_place": [0, 4**x], "diver_right": [0, right], "diver_wait": [0, wait]}


FISH, SUB = 0, 1
BALL = {"x": 3, "y": 8, "dx": 1, "dy": 1}
DEEP = {"x": 5, "y": 4, "surfaced": False, "right": 1}
BACK = {"x": 5, "y": 1, "surfaced": False, "oxygen": 119}

# name: game, fields before, action, draws of the step, fields after, reward, terminated
CASES = {
    "a ball breaks a brick and turns": (
        *("breakout", {"x": 3, "y": 4, "dx": 1, "dy": -1}, NOOP, {}),
        *({"x": 4, "y": 4, "dx": 1, "dy": 1, "bricks": ALL_BRICKS ^ (1 << 24), "in_brick": True}, 1, False),
    ),
    "a ball passes through the brick after the one it broke": (
        *("breakout", {"x": 3, "y": 4, "dx": 1, "dy": -1, "in_brick": True}, NOOP, {}),
        *({"x": 4, "y": 3, "dy": -1, "bricks": ALL_BRICKS, "in_brick": True}, 0, False),
    ),
    "a ball turns at the side": (
        *("breakout", {"x": 9, "y": 5, "dx": 1, "dy": 1}, LEFT, {}),
        *({"x": 9, "y": 6, "dx": -1, "dy": 1, "trail_x": 9, "trail_y": 5, "paddle": 3}, 0, False),
    ),
    "a ball turns at the top": (
        *("breakout", {"x": 5, "y": 0, "dx": 1, "dy": -1, "bricks": 0}, NOOP, {}),
        *({"x": 6, "y": 0, "dx": 1, "dy": 1, "bricks": 0}, 0, False),
    ),
    "a ball turns up above the paddle": (
        *("breakout", BALL | {"paddle": 2}, RIGHT, {}),
        *({"x": 4, "y": 8, "dx": 1, "dy": -1}, 0, False),
    ),
    "a ball flies back beside the paddle": (
        *("breakout", BALL | {"paddle": 4}, NOOP, {}),
        *({"x": 4, "y": 8, "dx": -1, "dy": -1}, 0, False),
    ),
    "a ball is lost, and the wall is new": (
        *("breakout", BALL | {"paddle": 5, "bricks": 0}, NOOP, {}),
        *({"x": 4, "y": 9, "bricks": ALL_BRICKS}, 0, True),
    ),
    "gold is taken": (
        *("asterix", {"gold": rows(r4=1 << 6)}, RIGHT, {}),
        *({"x": 6, "gold": rows(), "spawn_wait": 9, "move_wait": 4}, 1, False),
    ),
    "gold comes to the player": (
        *("asterix", {"gold": rows(r4=1 << 6), "move_wait": 0}, NOOP, {}),
        *({"gold": rows(), "move_wait": 4}, 1, False),
    ),
    "an enemy comes to the player": (
        *("asterix", {"enemy": rows(r4=1 << 4), "right": rows(r4=1), "move_wait": 0, "level": 8}, NOOP, {}),
        *({"enemy": rows(r4=1 << 5), "move_wait": 0}, 0, True),
    ),
    "the player walks into an enemy that moves away": (
        *("asterix", {"enemy": rows(r3=1 << 5), "move_wait": 0}, UP, {}),
        *({"y": 4, "enemy": rows(r3=1 << 4)}, 0, True),
    ),
    "enemies leave the board": (
        *("asterix", {"enemy": rows(r0=512, r7=1), "right": rows(r0=1), "move_wait": 0}, DOWN, {}),
        *({"y": 6, "enemy": rows()}, 0, False),
    ),
    "gold appears on the third of the free rows": (
        *("asterix", {"enemy": rows(r0=2, r2=2, r3=2, r5=2), "spawn_wait": 0, "level": 3}, NOOP),
        *({"right": True, "gold": True, "free_row": 0.5}, {"gold": rows(r6=1), "spawn_wait": 6}, 0, False),
    ),
    "an enemy appears on the right": (
        *("asterix", {"spawn_wait": 0}, NOOP, {"free_row": 0.99999994}),
        *({"enemy": rows(r7=512), "gold": rows(), "spawn_wait": 9}, 0, False),
    ),
    "nothing appears on a full board": (
        *("asterix", {"enemy": [2] * 8, "spawn_wait": 0, "x": 8}, NOOP, {"free_row": 0.5}),
        *({"enemy": [2] * 8, "spawn_wait": 9}, 0, False),
    ),
    "the level rises": ("asterix", {"ramp_wait": -1}, NOOP, {}, {"ramp_wait": 100, "level": 1}, 0, False),
    "the level waits": ("asterix", {"ramp_wait": 0}, NOOP, {}, {"ramp_wait": -1, "level": 0}, 0, False),
    "the last level stays": (
        *("asterix", {"ramp_wait": -1, "level": 9}, NOOP, {}, {"ramp_wait": -1, "level": 9}, 0, False),
    ),
    "a chicken crosses": (
        *("freeway", {"y": 1, "move_wait": 0, "cars": [2] * 8}, UP, {"velocity": [-3] * 8}),
        *({"y": 9, "velocity": [-3] * 8, "car_wait": [2] * 8, "cars": [2] * 8, "move_wait": 2}, 1, False),
    ),
    "a chicken waits": ("freeway", {"y": 4, "move_wait": 2}, UP, {}, {"y": 4, "move_wait": 1}, 0, False),
    "a car hits the chicken": (
        *("freeway", {"y": 5, "cars": [8] * 8, "velocity": [1] * 8, "car_wait": [0] * 8}, NOOP, {}),
        *({"y": 9, "cars": [16] * 8, "car_wait": [1] * 8}, 0, False),
    ),
    "a chicken walks into a car that drives away": (
        *("freeway", {"y": 6, "move_wait": 0, "cars": [16] * 8, "velocity": [1] * 8, "car_wait": [0] * 8}, UP, {}),
        *({"y": 9, "cars": [32] * 8}, 0, False),
    ),
    "cars drive in circles": (
        *("freeway", {"cars": [1, 512] * 4, "velocity": [-2, 2] * 4, "car_wait": [0] * 8}, DOWN, {}),
        *({"cars": [512, 1] * 4, "car_wait": [2] * 8, "y": 9, "steps_left": 2499}, 0, False),
    ),
    "a day ends": ("freeway", {"steps_left": 0}, NOOP, {}, {"steps_left": -1}, 0, True),
    "a cannon fires": (
        *("space_invaders", {}, FIRE, {}, {"shots": rows(10, r8=32), "reload": 4, "cannon": 5, "move_wait": 11}),
        *(0, False),
    ),
    "a cannon that reloads does not fire": (
        *("space_invaders", {"reload": 1}, FIRE, {}, {"shots": rows(10), "reload": 0}, 0, False),
    ),
    "a shot hits an alien": (
        *("space_invaders", {"aliens": rows(10, r0=1, r5=16), "shots": rows(10, r6=16, r3=2)}, NOOP, {}),
        *({"aliens": rows(10, r0=1), "shots": rows(10, r2=2)}, 1, False),
    ),
    "a new wave comes": (
        *("space_invaders", {"aliens": rows(10, r5=16), "shots": rows(10, r6=16)}, NOOP, {}),
        *({"aliens": [WAVE] * 4 + [0] * 6, "level": 1, "shots": rows(10)}, 1, False),
    ),
    "aliens move to the right": (
        *("space_invaders", {"aliens": rows(10, r1=9), "right": True, "move_wait": 0}, NOOP, {}),
        *({"aliens": rows(10, r1=18), "right": True, "move_wait": 1}, 0, False),
    ),
    "aliens move down at the side": (
        *("space_invaders", {"aliens": rows(10, r1=9), "move_wait": 0}, NOOP, {}),
        *({"aliens": rows(10, r2=9), "right": True, "move_wait": 1}, 0, False),
    ),
    "aliens land": (
        *("space_invaders", {"aliens": rows(10, r9=1), "move_wait": 0}, NOOP, {}),
        *({"aliens": rows(10, r0=1), "right": True, "move_wait": 0}, 0, True),
    ),
    "an alien reaches the cannon": (
        *("space_invaders", {"aliens": rows(10, r8=513), "cannon": 0, "move_wait": 0}, NOOP, {}),
        *({"aliens": rows(10, r9=513)}, 0, True),
    ),
    "a bomb hits the cannon": (
        *("space_invaders", {"bombs": rows(10, r8=16, r9=2)}, LEFT, {}),
        *({"bombs": rows(10, r9=16), "cannon": 4}, 0, True),
    ),
    "the left one of two columns drops a bomb": (
        *("space_invaders", {"aliens": rows(10, r1=8 + 128, r2=8), "bomb_wait": 0}, NOOP, {}),
        *({"bombs": rows(10, r2=8), "bomb_wait": 9}, 0, False),
    ),
    "the nearest column drops a bomb": (
        *("space_invaders", {"aliens": rows(10, r1=4 + 128 + 512), "bomb_wait": 0}, NOOP, {}),
        *({"bombs": rows(10, r1=128)}, 0, False),
    ),
    "a submarine fires": (
        *("seaquest", DEEP, FIRE, {}, shot(4, 6, 1) | {"reload": 4, "oxygen": 199, "x": 5}, 0, False),
    ),
    "a shot hits the oldest fish of its cell": (
        *("seaquest", DEEP | shot(4, 6, 1) | enemies((4, 7, 0, FISH, 1, 3), (4, 7, 0, FISH, 2, 4))),
        *(NOOP, {}, {"enemy_place": slots(30, 0, 4**7), "shot_place": [0, 0]}, 1, False),
    ),
    "a shot hits a fish before an older submarine": (
        *("seaquest", DEEP | shot(4, 6, 1) | enemies((4, 7, 0, SUB, 1, 3), (4, 7, 0, FISH, 2, 4))),
        *(NOOP, {}, {"enemy_place": slots(30, 4**7, 0), "shot_place": [0, 0]}, 1, False),
    ),
    "a fish swims into a shot": (
        *("seaquest", DEEP | shot(4, 6, 1) | enemies((4, 8, 0, FISH, 0, 3))),
        *(NOOP, {}, {"enemy_place": [0] * 30, "shot_place": [0, 0]}, 1, False),
    ),
    "a submarine that is hit as it moves still launches": (
        *("seaquest", DEEP | {"y": 1} | shot(4, 6, 1) | enemies((4, 8, 0, SUB, 0, 0))),
        *(NOOP, {}, {"enemy_place": [0] * 30, "torpedoes_left": rows(r3=4**6)}, 1, False),
    ),
    "a torpedo hits the player": (
        *("seaquest", DEEP | {"torpedoes_left": rows(r3=4**6)}, NOOP, {}, {"torpedoes_left": rows(r3=4**5)}, 0, True),
    ),
    "the player swims into a torpedo that moves on": (
        *("seaquest", DEEP | {"torpedoes_right": rows(r3=4**6)}, RIGHT, {}),
        *({"torpedoes_right": rows(r3=4**7)}, 0, True),
    ),
    "a fish hits the player": (
        *("seaquest", DEEP | enemies((4, 4, 1, FISH, 0, 3)), NOOP, {}),
        *({"enemy_place": slots(30, 4**5)}, 0, True),
    ),
    "an enemy appears": (
        *("seaquest", DEEP | {"enemy_spawn_wait": 0, "level": 7}, NOOP),
        {"enemy_row": 3, "enemy_right": 1, "enemy_is_sub": 1},
        {"enemy_place": slots(30, 1), "enemy_row": slots(30, 3), "enemy_is_sub": slots(30, 1)},
        *(0, False),
    ),
    "no enemy appears against another": (
        *("seaquest", DEEP | {"enemy_spawn_wait": 0} | enemies((3, 7, 0, FISH, 3, 3)), NOOP),
        *({"enemy_row": 3, "enemy_right": 1}, {"enemy_place": slots(30, 4**7), "enemy_spawn_wait": 19}, 0, False),
    ),
    "a diver is picked up": (
        *("seaquest", DEEP | diver(4, 6, 0, 0), NOOP, {}, {"diver_place": [0, 0], "divers": 1}, 0, False),
    ),
    "there is no room for a seventh diver": (
        *("seaquest", DEEP | {"divers": 6} | diver(4, 6, 0, 0), NOOP, {}),
        *({"diver_place": [0, 4**5], "divers": 6}, 0, False),
    ),
    "the player surfaces with two divers": (
        *("seaquest", BACK | {"divers": 2}, UP, {}),
        *({"divers": 1, "oxygen": 200, "level": 1, "surfaced": True}, 0, False),
    ),
    "the player surfaces with six divers": (
        *("seaquest", BACK | {"divers": 6}, UP, {}),
        *({"divers": -1, "oxygen": 200, "level": 1, "surfaced": True}, 5, False),
    ),
    "the player surfaces without divers": (
        *("seaquest", BACK, UP, {}, {"divers": 0, "oxygen": 119, "level": 0, "surfaced": False}, 0, True),
    ),
    "the player stays at the surface": (
        *("seaquest", {"divers": 2, "oxygen": 50}, LEFT, {}, {"divers": 2, "oxygen": 50, "x": 4, "level": 0}, 0, False),
    ),
    "the oxygen is used up": ("seaquest", DEEP | {"oxygen": 0}, NOOP, {}, {"oxygen": -1}, 0, True),
}  # fmt: skip


def situation(env, fields):
    """A state of one environment with the given fields."""
    state = env.reset(rng.split(rng.key(0), 1))
    return state.update({name: torch.tensor([value], dtype=state[name].dtype) for name, value in fields.items()})


def no_luck(env, draws):
    """Draws of one environment, all 0 or False but those given."""
    noise = env.draw(rng.split(rng.key(0), 1)).apply(torch.zeros_like)
    return noise.update({name: torch.tensor([value], dtype=noise[name].dtype) for name, value in draws.items()})


@pytest.mark.parametrize("case", CASES)
def test_by_hand_made_situations(variant, case):
    name, before, action, draws, expected, reward, terminated = CASES[case]
    env = game(name)
    after = variant(env.step)(situation(env, before), torch.tensor([action]), no_luck(env, draws))
    assert {key: after[key][0].tolist() for key in expected} == expected
    assert (after["reward"].tolist(), after["terminated"].tolist()) == ([reward], [terminated])
    assert torch.equal(after["obs"], env.observe(after))


IMAGES = {  # game, fields, and the cells (row, column) of each channel that is not empty
    "breakout": (
        {"x": 2, "y": 5, "trail_x": 1, "trail_y": 4, "bricks": 1 | 1 << 29},
        {0: [[9, 4]], 1: [[5, 2]], 2: [[4, 1]], 3: [[1, 0], [3, 9]]},
    ),
    "asterix": (
        {"enemy": rows(r0=1, r3=8), "gold": rows(r7=512), "right": rows(r0=1, r3=1)},
        {0: [[5, 5]], 1: [[1, 0], [4, 3]], 2: [[4, 2]], 3: [[8, 9]]},
    ),
    "freeway": (
        {"y": 7, "cars": [1] * 8, "velocity": [1, -1, 2, 3, -4, 5, -5, 5]},
        {
            **{0: [[7, 4]], 1: [[row, 0] for row in range(1, 9)], 2: [[1, 9], [2, 1]], 3: [[3, 9]], 4: [[4, 9]]},
            **{5: [[5, 1]], 6: [[6, 9], [7, 1], [8, 9]]},
        },
    ),
    "space_invaders": (
        {"aliens": rows(10, r2=3), "shots": rows(10, r4=4), "bombs": rows(10, r0=8), "right": True},
        {0: [[9, 5]], 1: [[2, 0], [2, 1]], 3: [[2, 0], [2, 1]], 4: [[4, 2]], 5: [[0, 3]]},
    ),
    "seaquest": (
        DEEP
        | {"oxygen": 59, "divers": 2, "torpedoes_left": rows(r0=4), "torpedoes_right": rows(r0=4, r1=1)}
        | enemies((2, 3, 1, FISH, 0, 0), (2, 3, 1, FISH, 1, 0), (2, 3, 1, FISH, 2, 0), (6, 9, 0, SUB, 0, 0))
        | shot(4, 7, 1)
        | diver(8, 5, 0, 3),
        {
            **{0: [[4, 5]], 1: [[4, 4]], 2: [[4, 7]], 3: [[2, 2], [8, 6]], 4: [[1, 1], [2, 0]], 5: [[2, 3]]},
            **{6: [[6, 9]], 7: [[9, 0], [9, 1]], 8: [[9, 7], [9, 8]], 9: [[8, 5]]},
        },
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images(variant, name):
    fields, expected = IMAGES[name]
    env = game(name)
    image = variant(env.observe)(situation(env, fields))[0]
    assert {c: cells for c in range(CHANNELS[name]) if (cells := image[:, :, c].nonzero().tolist())} == expected
    assert env.observation_space == box(0, 1, 10, 10, CHANNELS[name], dtype=torch.uint8)


@pytest.mark.parametrize("name", CHANNELS)
def test_minimal_actions_are_some_of_the_six(name):
    full, minimal = game(name), make_env(f"minatar_{name}")
    assert (full.action_space, minimal.action_space) == (Discrete(6), Discrete(len(MINIMAL[name])))
    state, noise = full.reset(rng.split(rng.key(0), 1)), no_luck(full, {})
    for action, executed in enumerate(MINIMAL[name]):
        one, other = (
            minimal.step(state, torch.tensor([action]), noise),
            full.step(state, torch.tensor([executed]), noise),
        )
        assert (one == other).all() and one["last_action"].tolist() == [executed]


def test_sticky_actions_repeat_the_executed_action():
    env = game("breakout", sticky_action_prob=0.25)
    state = env.reset(rng.split(rng.key(0), 4000))
    assert (state["last_action"] == NOOP).all()
    for t, action in enumerate((LEFT, RIGHT, RIGHT)):
        state = env.step(state, torch.full((4000,), action), env.draw(rng.split(rng.fold_in(rng.key(1), t), 4000)))
        expected = (0.75, 0.75, 1 - 0.25**2)[t]
        assert abs(float((state["last_action"] == action).float().mean()) - expected) < 0.03
    stuck = game("breakout", sticky_action_prob=1.0)
    after = stuck.step(
        stuck.reset(rng.split(rng.key(0), 5)), torch.full((5,), LEFT), stuck.draw(rng.split(rng.key(1), 5))
    )
    assert (after["paddle"] == 4).all()


@pytest.mark.parametrize("name", RAMP)
def test_without_a_ramp_the_level_stays(name):
    rising = next(
        fields for game, fields, *_, after, _, _ in CASES.values() if game == name and after.get("level") == 1
    )
    action = UP if name == "seaquest" else NOOP
    for ramping in (True, False):
        env = game(name, difficulty_ramping=ramping)
        after = env.step(situation(env, rising), torch.tensor([action]), no_luck(env, {}))
        assert after["level"].tolist() == [int(ramping)]


@pytest.mark.parametrize("name", ["breakout", "freeway"])
def test_games_without_a_ramp_refuse_the_setting(name):
    with pytest.raises(ConfigError, match="difficulty_ramping: unknown key"):
        game(name, difficulty_ramping=True)


def test_only_a_time_limit_truncates():
    env = game("asterix", max_episode_steps=3)
    state = env.reset(rng.split(rng.key(0), 2))
    for t in range(3):
        state = env.step(state, torch.zeros(2, dtype=torch.int64), env.draw(rng.split(rng.key(t), 2)))
        assert state["truncated"].tolist() == [t == 2] * 2
    assert env.min_truncation_gap == 3


@pytest.mark.parametrize("name", CHANNELS)
def test_starts(name):
    """Breakout's ball starts on either side, and the velocities of Freeway's cars are uniform."""
    state = game(name).reset(rng.split(rng.key(0), 2000))
    if name == "breakout":
        assert 900 < (state["x"] == 0).sum() < 1100 and ((state["x"] == 0) == (state["dx"] == 1)).all()
    elif name == "freeway":
        counts = torch.bincount(state["velocity"].flatten() + 5, minlength=11)
        assert counts[5] == 0 and (counts[[*range(5), *range(6, 11)]] - 1600).abs().max() < 160
    else:
        assert (state["obs"] == state["obs"][0]).all()


def test_draws_have_their_probabilities():
    keys = rng.split(rng.key(0), 6000)
    asterix, seaquest = game("asterix").draw(keys), game("seaquest").draw(keys)
    for draw, probability in (
        *((asterix["right"], 1 / 2), (asterix["gold"], 1 / 3), (asterix["repeats"], 0.1)),
        *((seaquest["enemy_right"], 1 / 2), (seaquest["enemy_is_sub"], 1 / 3), (seaquest["diver_right"], 1 / 2)),
    ):
        assert abs(float(draw.float().mean()) - probability) < 0.03
    for name in ("enemy_row", "diver_row"):
        counts = torch.bincount(seaquest[name], minlength=9)
        assert counts[0] == 0 and len(counts) == 9 and (counts[1:] - 750).abs().max() < 110


@pytest.mark.parametrize("name", CHANNELS)
def test_nothing_is_found_in_them(name):
    short = {"max_episode_steps": 100}  # an episode of Freeway has 2501 steps, and every check plays to an end
    assert check_env({"name": f"minatar_{name}", "cfg": short}).findings == []


REWARDS = {
    "breakout": {0, 1},
    "asterix": {0, 1},
    "freeway": {0, 1},
    "space_invaders": {0, 1, 2},
    "seaquest": {*range(12)},
}


@pytest.mark.parametrize("name", CHANNELS)
def test_random_play_ends_and_has_known_rewards(name):
    env = auto_reset(game(name))
    state, rewards, ended = env.reset(rng.split(rng.key(0), 32)), set(), torch.zeros(32, dtype=torch.bool)
    for t in range(400 if name != "freeway" else 100):
        keys = rng.split(rng.fold_in(rng.key(1), t), 32)
        state = env.step(state, rng.randint(rng.fold_in(keys, 1), low=0, high=6), env.draw(keys))
        rewards |= {*state["reward"].tolist()}
        ended |= state["terminated"]
        assert not state["truncated"].any()
    assert rewards <= REWARDS[name] and bool(ended.all()) == (name != "freeway")


@pytest.mark.slow
@pytest.mark.parametrize("name", long_except(["breakout"], CHANNELS))
def test_a_run_trains_on_them(name, traced_or_compiled):
    changes = {"env": {"name": f"minatar_{name}"}, "trainer.compile": "on", "trainer.iterations": 1}
    cfg = small(**changes)
    compiled, eager = (make_iteration(c)(init_state(c))[0] for c in (cfg, cfg.replace(**{"trainer.compile": "off"})))
    assert torch.equal(compiled["env", "obs"], eager["env", "obs"])


# The bounds of Seaquest's state: `wait` is the number of steps until an enemy moves, (x, wait) a state of an enemy


def wait_at(level):
    return max(2, 5 - level // 2)


def moved(enemy, level):
    x, wait = enemy
    return (x + 1, wait_at(level)) if wait == 0 else (x, wait - 1)


def next_levels(level, is_under_water):
    """The possible levels after a step; between two rises, the player has to be under water for a step."""
    return {(level, True)} | ({(level + 1, False)} if is_under_water and level < 19 else set())


STARTS = [((0, wait_at(level)), level, 20 - level, flag) for level in range(20) for flag in (True, False)]


def test_thirty_enemies_appear_at_most_while_the_oldest_is_there():
    seen, rest, most = {}, [(*start, 1) for start in STARTS], 0
    while rest:
        enemy, level, spawn_wait, flag, number = rest.pop()
        most = max(most, number)
        enemy = moved(enemy, level)
        for after, is_under_water in next_levels(level, flag) if enemy[0] < 10 else ():
            spawns = spawn_wait <= 1
            state = enemy, after, 20 - after if spawns else spawn_wait - 1, is_under_water
            if seen.get(state, 0) < number + spawns:
                seen[state] = number + spawns
                rest.append((*state, number + spawns))
    assert most == 30


def test_an_older_enemy_of_a_row_stays_ahead():
    """So no two enemies of a row are equal or arrive in a cell in one step, and a cell has at most three enemies."""
    starts = [(enemy, None, *rest) for enemy, *rest in STARTS]
    seen, rest, shared = {*starts}, [*starts], 0
    while rest:
        old, new, level, spawn_wait, flag = rest.pop()
        if new is not None:
            assert (old[0], -old[1]) > (new[0], -new[1])
            assert old[0] > new[0] or max(old[1], new[1]) <= 2
            shared += old[0] == new[0]
        old, new = moved(old, level), new and moved(new, level)
        for after, is_under_water in next_levels(level, flag) if old[0] < 10 else ():
            spawns = new is None and spawn_wait <= 1
            next_wait = 20 - after if spawns else max(spawn_wait - 1, 0) if new is None else 0
            for other in (new, (0, wait_at(after))) if spawns else (new,):
                state = (old, other, after, next_wait, is_under_water)
                if state not in seen:
                    seen.add(state)
                    rest.append(state)
    assert shared > 0


def test_slots_that_are_reused_are_free():
    """On the highest level, with a player that shoots all the time. The game goes on after its end."""
    env = game("seaquest", sticky_action_prob=0.0)
    state = env.reset(rng.split(rng.key(0), 64))
    state = state.update({"level": torch.full_like(state["level"], 19), "enemy_spawn_wait": 0 * state["level"]})
    used = dict.fromkeys(("shot", "enemy", "diver"), 0)
    for t in range(130):
        for kind, wait in (("shot", "reload"), ("enemy", "enemy_spawn_wait"), ("diver", "diver_spawn_wait")):
            place = state[f"{kind}_place"]
            assert not place[state[wait] == 0, 0].any()
            used[kind] = max(used[kind], int((place != 0).sum(-1).max()))
        keys = rng.split(rng.fold_in(rng.key(1), t), 64)
        move = rng.randint(rng.fold_in(keys, 1), low=0, high=6)
        state = env.step(state, torch.where(state["reload"] == 0, FIRE, move), env.draw(keys))
    assert used["shot"] == used["diver"] == 2 and used["enemy"] > 20
