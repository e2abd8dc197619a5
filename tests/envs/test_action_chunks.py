"""Chunks of actions: hand tables, and loops in Python and NumPy that take every step of the environment inside."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checks import assert_pure, close
from support.long_cases import long_except
from support.small_runs import same
from tensordict import TensorDict

from ecrl import ConfigModel, register_event, rng
from ecrl.config import EventConfig
from ecrl.env_check.check import check_env
from ecrl.envs import NEVER, Env, auto_reset, chunked, clip_action, make_env, state_of, time_limit, with_events
from ecrl.envs.action_chunks import chunk_space, undiscounted_reward
from ecrl.envs.mujoco.task_step import observe_entries
from ecrl.errors import ConfigError
from ecrl.spaces import Discrete, MultiDiscrete, box, dict_space

T, F = True, False
ENVS = ("cartpole", "pendulum", "point_mass", "minatar_breakout", "t_maze", "ReachRL")


def _reset(keys):
    place = torch.zeros(*keys.shape)
    return state_of(place.unsqueeze(-1), keys.shape, place=place, goal=3.0 + keys.float(), limit=9.0 + place)


def _step(state, action, noise):
    """Add the action to the place. The reward is the new place. A step from the goal or from the limit is NaN."""
    over = (state["place"] >= state["goal"]) | (state["place"] >= state["limit"])
    place = torch.where(over, torch.nan, state["place"] + action[..., 0])
    after = {"obs": place.unsqueeze(-1), "place": place, "reward": place}
    return state.copy().update(after | {"terminated": place >= state["goal"], "truncated": place >= state["limit"]})


WALK = Env(_reset, _step, box(-10.0, 99.0, 1), box(0.0, 5.0, 1))


def _walking(goal, limit):
    zero = torch.zeros(len(goal))
    fields = {"place": zero, "goal": torch.tensor(goal), "limit": torch.tensor(limit)}
    state = state_of(zero.unsqueeze(-1), torch.Size([len(goal)]), **fields)
    info = TensorDict({"reward_sum": zero.clone()}, [len(goal)])
    return state.update({"executed": torch.zeros(len(goal), dtype=torch.int64), "info": info})


def test_a_chunk_by_hand(variant):
    # The actions are 1, 2 and 4, so the places are 1, 3 and 7. Env 0 terminates at 1, env 1 is truncated at 3, env 2
    # terminates at 7, env 3 goes on, and env 4 both terminates and is truncated at 3.
    env = chunked(WALK, 3, gamma=0.5)
    state = _walking([1.0, 99.0, 7.0, 99.0, 3.0], [99.0, 3.0, 99.0, 99.0, 3.0])
    action = torch.tensor([1.0, 2.0, 4.0]).reshape(1, 3, 1).expand(5, 3, 1)
    after = variant(env.step)(state, action, torch.zeros(5, 3))
    assert after["executed"].tolist() == [1, 2, 3, 3, 2]
    close(after["reward"], [1.0, 2.5, 4.25, 4.25, 2.5])
    close(after["info", "reward_sum"], [1.0, 4.0, 11.0, 11.0, 4.0])
    close(after["place"], [1.0, 3.0, 7.0, 7.0, 3.0])
    close(after["obs"], [[1.0], [3.0], [7.0], [7.0], [3.0]])
    assert after["terminated"].tolist() == [T, F, T, F, T] and after["truncated"].tolist() == [F, T, F, F, T]


def test_plain_sums_need_no_second_field():
    env = chunked(WALK, 3, gamma=1.0)
    state = _walking([1.0, 99.0], [99.0, 99.0]).exclude("info")
    after = env.step(state, torch.tensor([1.0, 2.0, 4.0]).reshape(1, 3, 1).expand(2, 3, 1), torch.zeros(2, 3))
    assert after["reward"].tolist() == undiscounted_reward(after).tolist() == [1.0, 11.0] and "info" not in after
    assert undiscounted_reward(_walking([1.0], [1.0]).update({"reward": torch.ones(1)})).tolist() == [0.0]


def test_auto_reset_starts_new_episodes_after_the_chunk():
    """Episodes of 3 steps plus the key end in other chunks, and each new episode begins at the start of a chunk."""
    env = auto_reset(chunked(WALK, 2, gamma=0.5))
    keys = torch.tensor([0, 2])
    state, noise = env.reset(keys), env.draw(keys.expand(4, 2))
    noise["start", "goal"] = torch.tensor([3.0, 5.0]).expand(4, 2)
    seen = []
    for t in range(4):
        state = env.step(state, torch.ones(2, 2, 1), noise[t])
        done = state["terminated"] | state["truncated"]
        seen.append([*state["final_obs"][:, 0].tolist(), *state["obs"][:, 0].tolist(), *state["executed"].tolist()])
        seen[-1] += done.tolist()
    assert seen == [
        [2.0, 2.0, 2.0, 2.0, 2, 2, F, F],
        [3.0, 4.0, 0.0, 4.0, 1, 2, T, F],
        [2.0, 5.0, 2.0, 0.0, 2, 1, F, T],
        [3.0, 2.0, 0.0, 2.0, 1, 2, T, F],
    ]


def _actions(space, keys, count=()):
    """Random actions `[*B, *count, ...]` of a space."""
    if isinstance(space, Discrete):
        return rng.randint(keys, count, low=0, high=space.n)
    size = (*count, *space.shape)
    return 2.0 * rng.uniform(keys, size) - 1.0


def _oracle(env, state, actions, noise, gamma):
    """Take the steps of a chunk `[N, k, ...]` in every environment, and read each environment at its own end.

    Returns: for each environment, its row of the state at the end, the number of steps, and the sums with and without
        discounts.
    """
    count, k = actions.shape[:2]
    rows: list[Any] = [None] * count
    executed, sums = np.zeros(count, int), np.zeros((count, 2))
    for i in range(k):
        state = env.step(state, actions[:, i], noise[:, i])
        for n in range(count):
            if rows[n] is None or not (rows[n]["terminated"] or rows[n]["truncated"]):
                rows[n] = state[n].clone()
                executed[n] += 1
                sums[n] += np.array([gamma**i, 1.0]) * np.float64(state["reward"][n])
    return rows, executed, sums


@pytest.mark.parametrize("name", ENVS)
def test_every_environment_equals_its_own_steps(name):
    limit = {"max_episode_steps": 7} if name != "t_maze" else {"max_episode_steps": 7, "length": 5}
    base = make_env({"name": name, "cfg": limit})
    env, keys, ends = chunked(base, 3, gamma=0.9), rng.split(rng.key(3), 5), set()
    state = env.reset(keys)
    for t in range(3):
        step_keys = rng.fold_in(keys, t)
        noise, actions = env.draw(step_keys), _actions(base.action_space, rng.fold_in(step_keys, 9), (3,))
        bare = state.exclude("executed", ("info", "reward_sum"))
        bare = bare.exclude("info") if "info" not in base.reset(keys) else bare
        rows, executed, sums = _oracle(base, bare, actions, noise, 0.9)
        state = assert_pure(env.step, state, actions, noise)
        assert state["executed"].tolist() == executed.tolist()
        np.testing.assert_allclose(state["reward"], sums[:, 0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(undiscounted_reward(state), sums[:, 1], rtol=1e-5, atol=1e-5)
        for n, row in enumerate(rows):
            own = state[n].exclude("executed", ("info", "reward_sum"), "reward")
            own = own if "info" in row else own.exclude("info")
            assert same(own, row.exclude("reward"))
        ends |= {(t, count) for count in executed.tolist()}
    assert (2, 1) in ends  # the time limit of 7 steps is inside the third chunk


@settings(max_examples=40, deadline=None)
@given(
    k=st.integers(1, 6),
    gamma=st.floats(0.0, 1.0),
    limits=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    seed=st.integers(0, 999),
)
def test_any_chunk_equals_its_steps(k, gamma, limits, seed):
    env, count = chunked(WALK, k, gamma=gamma), len(limits)
    actions = rng.uniform(rng.split(rng.key(seed), count), (k, 1)) + 0.25
    state = _walking([99.0] * count, [float(n) / 2.0 for n in limits])
    rows, executed, sums = _oracle(WALK, state.exclude("executed", "info"), actions, torch.zeros(count, k), gamma)
    state = state if gamma < 1.0 else state.exclude("info")
    after = env.step(state, actions, torch.zeros(count, k))
    assert after["executed"].tolist() == executed.tolist()
    np.testing.assert_allclose(after["reward"], sums[:, 0], rtol=1e-5)
    np.testing.assert_allclose(undiscounted_reward(after), sums[:, 1], rtol=1e-5)
    assert torch.equal(after["place"], torch.stack([row["place"] for row in rows]))


def test_the_gradient_is_finite_if_a_step_after_the_end_would_have_none():
    """The reward is a root of the distance to the end, and the root of a negative number has a gradient of NaN."""

    def step(state, action, noise):
        place = state["place"] + action.squeeze(-1)
        fields = {"place": place, "reward": torch.sqrt(1.0 - place), "terminated": place >= 0.5}
        return state.copy().update(fields)

    env = chunked(replace(WALK, step=step), 3, gamma=1.0)
    state = _walking([9.0], [9.0]).exclude("info")
    actions = torch.tensor([[[0.2], [0.4], [0.9]]], requires_grad=True)
    (grad,) = torch.autograd.grad(env.step(state, actions, torch.zeros(1, 3))["reward"].sum(), actions)
    places = [0.2, 0.6]
    first = -sum(0.5 / (1.0 - place) ** 0.5 for place in places)
    np.testing.assert_allclose(grad.flatten(), [first, -0.5 / 0.4**0.5, 0.0], rtol=1e-5)


def test_a_field_that_only_one_of_reset_and_step_returns_is_named():
    def step(state, action, noise):
        return WALK.step(state, action, noise).set("extra", state["place"])

    env = chunked(replace(WALK, step=step), 2, gamma=1.0)
    with pytest.raises(ConfigError, match=r"^env.action_chunk: step returns the field 'extra', but reset does not"):
        env.step(_walking([9.0], [9.0]).exclude("info"), torch.ones(1, 2, 1), torch.zeros(1, 2))


@pytest.mark.parametrize(("chunk", "expected"), [(1, 6), (3, 2), (4, 2)])
@pytest.mark.usefixtures("restored_registry")
def test_the_gap_of_an_event_counts_steps_of_the_environment(chunk, expected):
    class Shorter(ConfigModel):
        min_truncation_gap: int = 6

    @register_event("shorter_episodes")
    def shorter_episodes(cfg: Shorter):
        return lambda state, keys: state

    event = EventConfig.model_validate({"func": "shorter_episodes", "mode": "reset"})
    env = make_env({"name": "cartpole", "action_chunk": chunk})
    assert with_events(auto_reset(env), {"shorter": event}).min_truncation_gap == expected


@pytest.mark.parametrize("name", ["cartpole", "pendulum", "point_mass", "minatar_breakout", "ReachRL"])
def test_chunks_of_one_action_change_no_bit(name):
    base, keys = make_env({"name": name, "cfg": {"max_episode_steps": 4}}), rng.split(rng.key(0), 3)
    env = chunked(base, 1, gamma=0.9)
    one, other = auto_reset(base), auto_reset(env)
    before, after = one.reset(keys), other.reset(keys)
    for t in range(9):
        step_keys = rng.fold_in(keys, t)
        action = _actions(base.action_space, rng.fold_in(step_keys, 9))
        before = one.step(before, action, one.draw(step_keys))
        after = other.step(after, action.unsqueeze(1), other.draw(step_keys))
        assert after["executed"].tolist() == [1, 1, 1]
        assert torch.equal(after["info", "reward_sum"], before["reward"])
        bare = after.exclude("executed", ("info", "reward_sum"))
        assert same(bare if "info" in before else bare.exclude("info"), before)
        assert torch.equal(after["reward"].view(torch.int32), before["reward"].view(torch.int32))  # also the sign of 0


def test_gradients_flow_through_the_steps_that_were_taken():
    base = make_env({"name": "point_mass", "cfg": {"max_episode_steps": 4}})
    env, keys = chunked(base, 3, gamma=0.9), rng.split(rng.key(0), 2)
    start = _actions(base.action_space, keys, (2, 3)).requires_grad_()

    def by_steps(actions):
        state, total = base.reset(keys), 0.0
        for t in range(4):  # the second chunk ends after one step
            state = base.step(state, actions[:, t // 3, t % 3], base.draw(keys))
            total = total + 0.9 ** (t % 3) * state["reward"]
        return total.sum()

    def by_chunks(actions):
        state, total = env.reset(keys), 0.0
        for t in range(2):
            state = env.step(state, actions[:, t], env.draw(keys))
            total = total + state["reward"]
        return total.sum()

    (one,), (other,) = (torch.autograd.grad(total(start), start) for total in (by_steps, by_chunks))
    close(other, one)
    assert not other[:, 1, 1:].any() and other[:, 1, 0].any()


@pytest.mark.parametrize("steps_observe", [T, F])
def test_one_observation_per_chunk(steps_observe):
    seen = []

    def observe(state):
        seen.append(len(state))
        return state["place"].unsqueeze(-1)

    def step(state, action, noise):
        after = _step(state, action, noise).exclude("obs")
        return after.set("obs", observe(after)) if "obs" in state else after

    env = replace(WALK, step=step, observe=observe, step_without_obs=not steps_observe)
    many = chunked(env, 3, gamma=0.5)
    state = _walking([1.0, 99.0], [99.0, 99.0])
    after = many.step(state, torch.ones(2, 3, 1), torch.zeros(2, 3))
    assert seen == [2] * (3 if steps_observe else 1) and after["obs"].tolist() == [[1.0], [3.0]]
    assert [*after.keys()] == [*state.keys()] and not many.step_without_obs
    seen.clear()
    limited = chunked(clip_action(time_limit(env, 2)), 3, gamma=0.5)  # wrappers keep the flag, and are inside
    state = _walking([99.0, 99.0], [99.0, 99.0]).set("elapsed", torch.zeros(2, dtype=torch.int64))
    after = limited.step(state, torch.full((2, 3, 1), 9.0), torch.zeros(2, 3))
    assert after["place"].tolist() == [10.0, 10.0] and after["truncated"].all()
    assert after["executed"].tolist() == [2, 2] and seen == [2] * (3 if steps_observe else 1)


def test_the_flag_needs_a_function_that_observes():
    with pytest.raises(ValueError, match="an environment with step_without_obs needs observe"):
        replace(WALK, step_without_obs=True)


def test_a_task_observes_once_per_chunk():
    base = make_env({"name": "ReachRL", "cfg": {"max_episode_steps": 4}})
    env, keys = chunked(base, 3, gamma=0.9), rng.split(rng.key(0), 2)
    state, action = env.reset(keys), torch.zeros(2, 3, *base.action_space.shape)
    with patch("ecrl.envs.mujoco.task_step.observe_entries", wraps=observe_entries) as entries:
        state = env.step(state, action, env.draw(keys))
    assert entries.call_count == 1 and torch.equal(state["obs"], base.observe(state))


def test_noise_differs_between_the_steps_of_a_chunk():
    env = chunked(make_env("minatar_breakout"), 4, gamma=0.9)
    keys = rng.split(rng.key(0), 6).reshape(3, 2)
    noise = env.draw(keys)
    assert noise.batch_size == (3, 2, 4) and torch.equal(env.draw(keys[1])["repeats"], noise["repeats"][1])
    drawn = chunked(WALK, 4, gamma=0.9).draw(keys)
    assert drawn.shape == (3, 2, 4) and len(drawn.unique()) == 24


def test_spaces_of_chunks():
    assert chunk_space(box(-1.0, 2.0, 2), 3) == box(-1.0, 2.0, 3, 2)
    low_high = replace(box(0.0, 0.0, 2), low=(-1.0, -2.0), high=(1.0, 2.0))
    assert chunk_space(low_high, 2).low == (-1.0, -2.0, -1.0, -2.0)
    assert chunk_space(MultiDiscrete((2, 3)), 2) == MultiDiscrete((2, 3, 2, 3))
    message = r"^the environment has actions of Dict.*, expected Box, Discrete or MultiDiscrete; leave"
    with pytest.raises(ConfigError, match=message):
        chunk_space(dict_space({"a": Discrete(2)}), 2)


def test_the_parts_of_multi_discrete_actions_belong_to_steps():
    def step(state, action, noise):
        after = _step(state, action[..., 1:].float() - action[..., :1], noise)
        return after

    env = chunked(replace(WALK, step=step, action_space=MultiDiscrete((2, 5))), 2, gamma=1.0)
    state = _walking([99.0, 99.0], [99.0, 99.0]).exclude("info")
    after = env.step(state, torch.tensor([[1, 3, 0, 4], [0, 1, 0, 0]]), torch.zeros(2, 2))
    assert after["place"].tolist() == [6.0, 1.0] and after["reward"].tolist() == [8.0, 2.0]


@pytest.mark.parametrize(("gap", "k", "expected"), [(NEVER, 3, NEVER), (7, 3, 3), (6, 3, 2), (1, 3, 1), (5, 1, 5)])
def test_the_shortest_gap_of_truncations_counts_chunks(gap, k, expected):
    assert chunked(replace(WALK, min_truncation_gap=gap), k, gamma=0.9).min_truncation_gap == expected


def test_environments_without_chunks_are_refused():
    masks = dict_space({"action_mask": MultiDiscrete((2, 2)), "x": box(0.0, 1.0, 1)})
    for changes, message in (
        ({"is_pure": False}, "keeps part of its state outside tensors, so single copies of it cannot stop inside"),
        ({"observation_space": masks}, "has action masks, which are unknown for later actions of a chunk; leave out"),
    ):
        with pytest.raises(ConfigError, match=message):
            chunked(replace(WALK, **changes), 2, gamma=0.9)
    for k, gamma in ((0, 0.9), (2, 1.5), (2, -0.1)):
        with pytest.raises(ValueError, match=f"needs k >= 1 and gamma in .0, 1., got k = {k} and gamma = {gamma}"):
            chunked(WALK, k, gamma=gamma)
    with pytest.raises(ConfigError, match="has the field 'executed', so its actions are chunks already; leave out"):
        chunked(chunked(WALK, 2, gamma=0.9), 2, gamma=0.9).reset(torch.arange(2))
    masked = replace(WALK, reset=lambda keys: _reset(keys).set("mask", keys >= 0))
    with pytest.raises(ConfigError, match="has the field 'mask', so some of its steps do not count, and a chunk"):
        chunked(masked, 2, gamma=0.9).reset(torch.arange(2))


@pytest.mark.parametrize(
    "name", long_except(["pendulum", "minatar_breakout"], ["pendulum", "minatar_breakout", "ReachRL"])
)
def test_check_env_finds_no_faults(name):
    assert check_env({"name": name, "action_chunk": 3}, num_steps=40).findings == []
    assert check_env(chunked(make_env(name), 2, gamma=0.9), num_steps=40).findings == []


@pytest.mark.parametrize(("limit", "executed"), [(5, [4, 4, 2, 4, 4, 2]), (2, [4, 4, 4, 4, 4, 4])])
def test_a_limit_of_chunks_keeps_the_limit_of_steps(limit, executed):
    one = make_env({"name": "pendulum", "cfg": {"max_episode_steps": 10}})
    env = auto_reset(time_limit(chunked(one, 4, gamma=1.0), limit))
    keys = rng.split(rng.key(0), 2)
    state, found, ends = env.reset(keys), [], []
    for i in range(6):
        state = env.step(state, torch.zeros(2, 4, 1), env.draw(rng.fold_in(keys, i)))
        found.append(int(state["executed"][0]))
        ends.append(bool(state["truncated"][0]))
    assert found == executed
    assert ends == ([F, F, T] * 2 if limit == 5 else [F, T] * 3)
