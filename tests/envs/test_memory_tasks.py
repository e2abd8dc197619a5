"""Tasks that need memory, by hand-computed tables, and classic tasks whose velocities are hidden."""

import pytest
import torch
from support.checks import close
from support.small_runs import small

from ecrl import rng
from ecrl.env_check.check import check_env
from ecrl.envs import auto_reset, make_env
from ecrl.errors import ConfigError
from ecrl.loop.iteration import init_state
from ecrl.spaces import Discrete

NORTH, EAST, SOUTH, WEST = range(4)
SIGN = {True: [0.0, 1.0, 1.0], False: [1.0, 1.0, 0.0]}
CORRIDOR, JUNCTION = [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]
NAMES = ["t_maze", "repeat_previous"]


def played(env, state, actions, noise=None):
    """Return the states after each action, all environments taking the same."""
    states = []
    for t, action in enumerate(actions):
        keys = rng.split(rng.fold_in(rng.key(7), t), len(state["reward"]))
        state = env.step(
            state, torch.full_like(state["elapsed"], action), env.draw(keys) if noise is None else noise[t]
        )
        states.append(state)
    return states


WALKS = [  # the sign says north, actions, rewards, observations, whether the last step is a success
    (True, [EAST, EAST, NORTH], [0.0, 0.0, 4.0], [CORRIDOR, JUNCTION, JUNCTION], True),
    (False, [EAST, EAST, SOUTH], [0.0, 0.0, 4.0], [CORRIDOR, JUNCTION, JUNCTION], True),
    (True, [EAST, EAST, SOUTH], [0.0, 0.0, -0.1], [CORRIDOR, JUNCTION, JUNCTION], False),
    (False, [EAST, EAST, NORTH], [0.0, 0.0, -0.1], [CORRIDOR, JUNCTION, JUNCTION], False),
    (True, [WEST, NORTH, SOUTH], [-0.1, -0.1, -0.1], [SIGN[True]] * 3, None),
    (False, [EAST, NORTH, WEST, WEST], [0.0, -0.1, 0.0, -0.1], [CORRIDOR, CORRIDOR, SIGN[False], SIGN[False]], None),
    (True, [EAST, EAST, EAST, WEST], [0.0, 0.0, -0.1, 0.0], [CORRIDOR, JUNCTION, JUNCTION, CORRIDOR], None),
]


@pytest.mark.parametrize(("is_north", "actions", "rewards", "observations", "success"), WALKS)
def test_t_maze_by_table(variant, is_north, actions, rewards, observations, success):
    env = make_env({"name": "t_maze", "cfg": {"length": 2}})
    state = env.reset(rng.split(rng.key(0), 3)).set("is_north", torch.tensor([is_north] * 3))
    for action, reward, obs in zip(actions, rewards, observations, strict=True):
        assert not state["terminated"].any()
        state = variant(env.step)(state, torch.full((3,), action), None)
        close(state["reward"], [reward] * 3)
        close(state["obs"], [obs] * 3)
    assert state["terminated"].tolist() == [success is not None] * 3
    assert state["info", "success"].tolist() == [success is True] * 3 and not state["truncated"].any()


def test_the_sign_of_a_t_maze_is_a_fair_coin_and_stands_at_the_start():
    state = make_env("t_maze").reset(rng.split(rng.key(1), 1000))
    for is_north in (True, False):
        at = state["is_north"] == is_north
        assert 420 < at.sum() < 580 and torch.equal(
            state["obs"][at], torch.tensor(SIGN[is_north]).expand(int(at.sum()), 3)
        )


def test_a_t_maze_ends_at_its_time_limit():
    env = make_env({"name": "t_maze", "cfg": {"length": 2, "max_episode_steps": 3}})
    states = played(env, env.reset(rng.split(rng.key(0), 4)), [EAST] * 3)
    assert [bool(state["truncated"].all()) for state in states] == [False, False, True]
    assert env.min_truncation_gap == 3


def repeat(**cfg):
    return make_env({"name": "repeat_previous", "cfg": cfg})


def test_repeat_previous_by_table(variant):
    """k = 3 and T = 5, so three steps are graded with 1/3. The cards are 2, then 0, 1, 3, 1 and 0."""
    env = repeat(k=3, max_episode_steps=5)
    state = env.reset(rng.split(rng.key(0), 2))
    state["cards"], state["obs"] = torch.tensor([[0, 0, 2]] * 2), torch.tensor([2, 2])
    cards, actions, rewards = [0, 1, 3, 1, 0], [2, 2, 2, 3, 1], [0.0, 0.0, 1 / 3, -1 / 3, 1 / 3]
    for t, (card, action, reward) in enumerate(zip(cards, actions, rewards, strict=True)):
        state = variant(env.step)(state, torch.tensor([action] * 2), torch.tensor([card] * 2))
        assert state["obs"].tolist() == [card] * 2
        close(state["reward"], [reward] * 2)
        assert not state["terminated"].any() and state["truncated"].tolist() == [t == 4] * 2


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_repeating_the_right_card_pays_one_in_total(k):
    env = auto_reset(repeat(k=k, max_episode_steps=7))
    state = env.reset(rng.split(rng.key(3), 50))
    seen, total = [state["obs"]], torch.zeros(50)
    for t in range(7):
        action = seen[t - k + 1] if t >= k - 1 else torch.zeros(50, dtype=torch.int64)
        state = env.step(state, action, env.draw(rng.split(rng.fold_in(rng.key(4), t), 50)))
        seen.append(state["final_obs"])
        total += state["reward"]
    close(total, torch.ones(50))
    assert state["truncated"].all()


def test_the_suits_are_uniform_and_guessing_pays_minus_one_half():
    env = repeat()
    state = env.reset(rng.split(rng.key(1), 400))
    states = played(env, state, [1] * 51)
    suits = torch.stack([state["obs"], *(s["obs"] for s in states)]).flatten()
    share = torch.bincount(suits, minlength=4) / len(suits)
    assert env.observation_space == env.action_space == Discrete(4) and (share - 0.25).abs().max() < 0.02
    assert abs(float(sum(s["reward"] for s in states).mean()) + 0.5) < 0.03
    assert env.lockstep and env.min_truncation_gap == 51


def test_a_card_older_than_the_episode_is_refused():
    with pytest.raises(ConfigError, match="k=9 is above max_episode_steps=5, so no step would have a reward; use a"):
        repeat(k=9, max_episode_steps=5)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_found_in_them(name):
    assert check_env({"name": name}).findings == []


HIDDEN = {"cartpole": ("motion", [0, 2], 1), "pendulum": (None, [0, 1], torch.tensor([0.7]))}


@pytest.mark.parametrize("name", HIDDEN)
def test_nothing_is_found_without_velocities(name):
    assert check_env({"name": name, "cfg": {"observe_velocity": False}}).findings == []


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_velocities_change_only_the_observation(variant, name):
    field, kept, action = HIDDEN[name]
    full, hidden = make_env(name), make_env({"name": name, "cfg": {"observe_velocity": False}})
    keys = rng.split(rng.key(2), 5)
    action = (
        torch.as_tensor(action).expand(5, *full.action_space.shape) if name == "pendulum" else torch.full((5,), action)
    )
    one, other = full.reset(keys), hidden.reset(keys)
    for _ in range(4):
        close(other["obs"], one["obs"][:, kept])
        close(hidden.observe(other), one["obs"][:, kept])
        if field is not None:
            close(other[field], one["obs"])
        one, other = full.step(one, action, None), variant(hidden.step)(other, action, None)
        for flag in ("reward", "terminated", "truncated", "elapsed"):
            close(other[flag], one[flag])
    assert hidden.observation_space.shape == (2,)


def test_an_event_changes_hidden_motion():
    push = {"func": "randomize_field", "mode": "reset", "params": {"field": "motion", "low": 0.1, "high": 0.2}}
    cfg = small(**{"env": {"name": "cartpole", "cfg": {"observe_velocity": False}}, "trainer.events.train.push": push})
    state = init_state(cfg)["env"]
    assert ((state["motion"] >= 0.1) & (state["motion"] <= 0.2)).all()
    close(state["obs"], state["motion"][:, [0, 2]])


def test_a_maze_longer_than_an_episode_is_refused():
    make_env({"name": "t_maze", "cfg": {"length": 5, "max_episode_steps": 6}})
    with pytest.raises(ConfigError, match="length=5 needs max_episode_steps of at least 6, got 5, so no episode could"):
        make_env({"name": "t_maze", "cfg": {"length": 5, "max_episode_steps": 5}})
