"""The core of environments: auto-reset, time limits and batches, on small environments with known numbers."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.checks import assert_no_retrace, assert_pure, close
from tensordict import TensorDict

from ecrl import rng
from ecrl.envs import NEVER, Env, auto_reset, clip_action, make_env, state_of, time_limit
from ecrl.envs.core import keys_as_noise
from ecrl.spaces import Discrete, box, dict_space

T, F = True, False
SPACES = (box(-10.0, 10.0, 1), Discrete(2))


def _count_reset(keys):
    return state_of(torch.zeros(*keys.shape, 1), keys.shape, goal=torch.full(keys.shape, 3.0))


def _count_step(state, action, noise):
    obs = state["obs"] + 1.0
    ended = obs[..., 0] >= state["goal"]
    after = {"obs": obs, "reward": 10.0 * obs[..., 0], "terminated": ended, "truncated": torch.zeros_like(ended)}
    return state.copy().update(after)


COUNT = Env(_count_reset, _count_step, *SPACES)
"""Counts its steps from 0 and terminates at `goal`; reward is ten times the count."""


def _walk_reset(keys):
    return state_of(rng.normal(keys, (1,)), keys.shape)


def _walk_step(state, action, noise):
    obs = state["obs"] + noise
    far = obs[..., 0].abs() > 2.0
    return state.copy().update({"obs": obs, "reward": obs[..., 0], "terminated": far, "truncated": ~far & far})


WALK = Env(_walk_reset, _walk_step, *SPACES, draw=lambda keys: rng.normal(keys, (1,)))
"""A random walk: start and every step are normal draws; terminates beyond 2."""


def _state(obs, goal, **more):
    batch = torch.Size([len(obs)])
    return state_of(torch.tensor(obs).unsqueeze(-1), batch, goal=torch.tensor(goal), **more)


def _rollout(env, num_envs, length, action=None, seed=0):
    index = torch.arange(num_envs)
    noise = env.draw(rng.stream(rng.key(seed), rng.ENV, index, torch.arange(length).unsqueeze(1)))
    states = [env.reset(rng.stream(rng.key(seed), rng.START, index, 0))]
    for t in range(length):
        states.append(env.step(states[-1], torch.zeros(num_envs) if action is None else action[t], noise[t]))
    return torch.stack(states, 1)


def test_auto_reset_by_hand(variant):
    # Counts 2, 0 and 1 with goal 3 and a limit of 2 steps, of which 1, 0 and 1 are gone: env 0 ends both ways at once,
    # env 1 goes on, env 2 is out of time. The next episodes would start at 7, 8, 9 with goals 5, 6, 7.
    env = auto_reset(time_limit(COUNT, 2))
    obs = torch.tensor([[2.0], [0.0], [1.0]])
    state = _state([2.0, 0.0, 1.0], [3.0] * 3, elapsed=torch.tensor([1, 0, 1]), final_obs=obs)
    start = _state([7.0, 8.0, 9.0], [5.0, 6.0, 7.0], elapsed=torch.tensor([0, 0, 0]))
    noise = TensorDict({"start": start, "step": torch.zeros(3)}, [3])
    after = variant(env.step)(state, torch.zeros(3), noise)
    close(after["obs"], [[7.0], [1.0], [9.0]])
    close(after["final_obs"], [[3.0], [1.0], [2.0]])
    close(after["reward"], [30.0, 10.0, 20.0])
    close(after["goal"], [5.0, 3.0, 7.0])
    assert after["terminated"].tolist() == [T, F, F]
    assert after["truncated"].tolist() == [T, F, T]
    assert after["elapsed"].tolist() == [0, 1, 0]


def test_auto_reset_first_final_obs_is_the_start(variant):
    state = variant(auto_reset(WALK).reset)(torch.arange(3))
    close(state["final_obs"], state["obs"], tol=0.0)
    assert not (state["terminated"] | state["truncated"]).any()


def test_auto_reset_draw(variant):
    # The start comes from the start stream of the key, the step's noise from the env stream, for any shape of keys.
    keys = torch.arange(6).reshape(3, 2)
    noise = variant(auto_reset(WALK).draw)(keys)
    close(noise["start", "obs"], rng.normal(rng.fold_in(keys, rng.START), (1,)), tol=1e-6)
    close(noise["step"], rng.normal(rng.fold_in(keys, rng.ENV), (1,)), tol=1e-6)
    assert noise.batch_size == torch.Size([3, 2])


@pytest.mark.parametrize("limit", [None, 3])
def test_few_and_many_envs_are_alike(limit):
    env = auto_reset(WALK if limit is None else time_limit(WALK, limit))
    few, many = (_rollout(env, n, 12) for n in (8, 16))
    assert few["terminated"].any() and not few["terminated"].all()
    for key, value in few.items():
        assert torch.equal(value, many[key][:8]), key
    assert len(many["obs"][:, 0].unique()) == 16  # they are not all the same


def test_next_start_does_not_depend_on_the_last_episode():
    # Two worlds end at different steps; where an episode of theirs ends at the same one, the next start is the same.
    env = auto_reset(Env(_walk_reset, lambda s, a, n: _walk_step(s, a, n + a.unsqueeze(-1)), *SPACES, draw=WALK.draw))
    calm, pushed = (_rollout(env, 32, 20, action=torch.full((20, 32), push)) for push in (0.0, 0.5))
    both = calm["terminated"] & pushed["terminated"]
    assert both.sum() > 20 and not torch.equal(calm["terminated"], pushed["terminated"])
    assert torch.equal(calm["obs"][both], pushed["obs"][both])


def test_flags_of_the_last_episode_do_not_stick():
    def step(state, action, noise):  # leaves the flags as they were, as an env that never ends by itself may
        return state.copy().update({"obs": state["obs"] + 1.0})

    env = auto_reset(time_limit(Env(_count_reset, step, *SPACES), 2))
    assert _rollout(env, 1, 6)["truncated"][0].tolist() == [F, F, T, F, T, F, T]


def test_info_is_the_steps_own(variant):
    def info(x):
        return TensorDict({"success": x}, x.shape)

    def step(state, action, noise):
        after = _count_step(state, action, noise)
        return after.update({"info": info(after["terminated"])})

    env = auto_reset(Env(lambda keys: _count_reset(keys), step, *SPACES))
    start = _state([0.0, 0.0], [3.0, 3.0]).set("info", info(torch.tensor([F, F])))
    state = _state([2.0, 1.0], [3.0, 3.0], final_obs=torch.zeros(2, 1)).set("info", info(torch.tensor([F, F])))
    after = variant(env.step)(state, torch.zeros(2), TensorDict({"start": start, "step": torch.zeros(2)}, [2]))
    assert after["info", "success"].tolist() == [T, F]
    assert after["obs"].tolist() == [[0.0], [2.0]]


def test_observations_may_be_tensordicts(variant):
    def obs(x):
        return TensorDict({"a": x, "b": torch.stack((x, -x), -1)}, x.shape)

    def reset(keys):
        return state_of(torch.zeros(keys.shape), keys.shape).set("obs", obs(torch.zeros(keys.shape)))

    def step(state, action, noise):
        x = state["obs", "a"] + 1.0
        return state.copy().update({"obs": obs(x), "terminated": x >= 2.0, "truncated": x < 0.0})

    space = dict_space({"a": box(0.0, 2.0), "b": box(-2.0, 2.0, 2)})
    env = auto_reset(Env(reset, step, space, Discrete(2)))
    keys = torch.arange(2)
    once = env.step(env.reset(keys), torch.zeros(2), env.draw(keys))
    after = variant(env.step)(once, torch.zeros(2), env.draw(keys))
    close(once["obs", "b"], [[1.0, -1.0]] * 2)
    close(after["final_obs", "b"], [[2.0, -2.0]] * 2)
    close(after["obs", "b"], torch.zeros(2, 2))


def test_time_limit_counts_and_keeps_inner_truncation(variant):
    def step(state, action, noise):
        return _count_step(state, action, noise).update({"truncated": action > 0})

    env = time_limit(Env(_count_reset, step, *SPACES), 3)
    elapsed = torch.tensor([0, 1, 2, 3, 0])
    after = variant(env.step)(_state([0.0] * 5, [9.0] * 5, elapsed=elapsed), torch.tensor([0, 0, 0, 0, 1]), None)
    assert after["elapsed"].tolist() == [1, 2, 3, 4, 1]
    assert after["truncated"].tolist() == [F, F, T, T, T]
    assert env.reset(torch.arange(2))["elapsed"].tolist() == [0, 0]


def test_time_limit_refuses_zero():
    with pytest.raises(ValueError, match="max_episode_steps >= 1, got 0"):
        time_limit(COUNT, 0)


@pytest.mark.parametrize("name", ["cartpole", "pendulum"])
def test_reset_and_step_with_auto_reset(variant, name):
    env = auto_reset(make_env({"name": name, "cfg": {"max_episode_steps": 2}}))
    keys = rng.split(rng.key(5), 4)
    action = torch.zeros(4, dtype=torch.int64) if name == "cartpole" else torch.zeros(4, 1)
    state, noise = variant(env.reset)(keys), variant(env.draw)(keys)
    once = variant(env.step)(state, action, noise)
    twice = variant(env.step)(once, action, noise)
    assert twice["truncated"].all() and not once["truncated"].any()
    close(twice["obs"], noise["start", "obs"])
    close(twice["final_obs"], assert_pure(make_env(name).step, once, action, keys)["obs"])


@pytest.mark.parametrize("name", ["cartpole", "pendulum"])
def test_new_values_do_not_retrace(name):
    env = auto_reset(make_env(name))
    first, second = (rng.split(rng.key(seed), 4) for seed in (1, 2))
    action = torch.zeros(4, 1) if name == "pendulum" else torch.zeros(4, dtype=torch.int64)
    assert_no_retrace(env.reset, (first,), (second,))
    assert_no_retrace(env.draw, (first,), (second,))
    args = [(env.reset(keys), action + i, env.draw(keys)) for i, keys in enumerate((first, second))]
    assert_no_retrace(env.step, *args)


def test_default_noise_is_the_key():
    assert COUNT.draw is keys_as_noise and torch.equal(keys_as_noise(torch.arange(3)), torch.arange(3))


def test_equal_settings_give_the_same_object():
    assert make_env("cartpole") is make_env({"name": "cartpole", "cfg": {"gravity": 9.8}})
    assert make_env("cartpole") is not make_env({"name": "cartpole", "cfg": {"gravity": 9.7}})
    assert make_env({"name": "cartpole", "frame_stack": 1}) is make_env("cartpole"), "one frame is no stack"
    assert make_env({"name": "cartpole", "frame_stack": 3}) is make_env({"name": "cartpole", "frame_stack": 3})
    assert make_env({"name": "cartpole", "frame_stack": 3}).frame_stack == 3
    assert auto_reset(make_env("pendulum")) is auto_reset(make_env("pendulum"))
    assert time_limit(COUNT, 3) is time_limit(COUNT, 3) and time_limit(COUNT, 3) is not time_limit(COUNT, 4)


@pytest.mark.parametrize(("own", "limit", "expected"), [(NEVER, 7, 7), (5, 7, 5), (9, 7, 7), (1, 7, 1)])
def test_the_shortest_truncation_gap_is_the_smaller_limit(own, limit, expected):
    env = replace(COUNT, min_truncation_gap=own)
    assert time_limit(env, limit).min_truncation_gap == expected
    assert auto_reset(clip_action(time_limit(env, limit))).min_truncation_gap == expected


def test_an_environment_that_declares_no_truncation_gap_may_truncate_at_any_step():
    assert COUNT.min_truncation_gap == 1
    with pytest.raises(ValueError, match="min_truncation_gap is 0, expected at least 1 step"):
        replace(COUNT, min_truncation_gap=0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cartpole", 6), ("pendulum", 6), ("point_mass", 6), ("probe_delay", NEVER), ("probe_action", NEVER)],
)
def test_no_episode_is_truncated_before_the_declared_gap(name, expected):
    cfg = {} if name.startswith("probe") else {"cfg": {"max_episode_steps": 6}}
    env = auto_reset(make_env({"name": name} | cfg))
    assert env.min_truncation_gap == expected
    action = torch.zeros(8, 20, *getattr(env.action_space, "shape", ()))
    truncated = _rollout(env, 8, 20, action.transpose(0, 1))["truncated"]
    steps = [row.nonzero().flatten().tolist() for row in truncated]
    gaps = [b - a for row in steps for a, b in pairwise([0, *row])]
    assert all(gap >= expected for gap in gaps) and bool(gaps) == (expected == 6)
