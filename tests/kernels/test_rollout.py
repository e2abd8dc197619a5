"""Collection on a counting environment whose numbers are known in advance."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import SHORT_VARIANTS, assert_no_retrace, assert_pure, close
from tensordict import TensorDict

from ecrl import rng
from ecrl.envs import Env, auto_reset, state_of, time_limit
from ecrl.kernels import (
    act_and_step,
    collect_rollout,
    episode_init,
    episode_update,
    place_at_truncations,
    restarted,
    running_returns,
)
from ecrl.spaces import box

EMPTY = TensorDict({}, [])


def counter(limit: int) -> Env:
    """Return an environment that counts from 10 by the action, truncates after `limit` steps and terminates at 13."""

    def reset(keys):
        return state_of(torch.full((*keys.shape, 1), 10.0, device=keys.device), keys.shape)

    def step(state, action, noise):
        obs = state["obs"] + action
        return state.copy().update({"obs": obs, "reward": obs[..., 0], "terminated": obs[..., 0] == 13.0})

    return auto_reset(time_limit(Env(reset, step, box(0.0, 99.0, 1), box(0.0, 1.0, 1)), limit))


def act(params, carry, obs, noise):
    action = params["step"].expand_as(obs)
    return carry, TensorDict({"action": action, "sample_log_prob": -obs[..., 0]}, obs.shape[:-1])


POLICY = SimpleNamespace(act=act, draw=lambda keys: keys, value=lambda params, carry, obs: 100.0 + obs[..., 0])
PARAMS = TensorDict({"step": torch.tensor(1.0)}, [])


def collected(limit, length, policy=POLICY):
    env, keys = counter(limit), torch.zeros(length, 2, dtype=torch.int64)
    start = env.reset(torch.zeros(2, dtype=torch.int64))
    return assert_pure(collect_rollout, policy, env, PARAMS, EMPTY, start, keys, keys)


def test_rollout_by_hand():
    # 10 -> 11 -> 12 (time limit 2) | 10 -> 11 -> 12 (limit) | 10
    _, env_state, batch = collected(limit=2, length=4)
    rollout = batch["steps"]
    close(rollout["obs"][0, :, 0], [10.0, 11.0, 10.0, 11.0, 10.0])
    close(rollout["reward"][0], [11.0, 12.0, 11.0, 12.0, 0.0])
    assert rollout["truncated"][0].tolist() == [False, True, False, True, False]
    assert not rollout["terminated"].any()
    assert rollout["done"][1].tolist() == [False, True, False, True, False]
    close(rollout["value"][0], [110.0, 111.0, 110.0, 111.0, 110.0])
    close(
        rollout["final_value"][0], [0.0, 112.0, 0.0, 112.0, 0.0]
    )  # V(12), the state reached, not V(10) after the reset
    close(rollout["sample_log_prob"][0], [-10.0, -11.0, -10.0, -11.0, 0.0])
    close(env_state["obs"][:, 0], [10.0, 10.0])


BOUNDS = [
    *(("eager", *sizes) for sizes in [(1, 3), (2, 7), (3, 3), (9, 4)]),
    *(
        pytest.param(name, 3, 7, marks=pytest.mark.long) if name == "compiled" else (name, 3, 7)
        for name in SHORT_VARIANTS
    ),
]


@pytest.mark.parametrize(("variant", "limit", "length"), BOUNDS, indirect=["variant"])
def test_a_bound_on_truncations_keeps_the_values_and_saves_passes(variant, limit, length):
    env, keys, passes = counter(limit), torch.zeros(length, 2, dtype=torch.int64), []

    def value(params, carry, obs):
        passes.append(len(obs))
        return 100.0 + obs[..., 0]

    policy = SimpleNamespace(act=act, draw=POLICY.draw, value=value)

    def run(params, start, keys, bound):
        return collect_rollout(policy, env, params, EMPTY, start, keys, keys, max_truncations=bound)

    start = env.reset(keys[0])
    start = start.set("elapsed", torch.tensor([0, limit - 1]))  # of two environments, one is about to end
    call = variant(run)
    expected, rows = call(PARAMS, start, keys, None), passes[-1]
    bound = -(-length // limit)
    actual = call(PARAMS, start, keys, bound)
    assert rows == 2 * (2 * length + 1) and passes[-1] == 2 * (length + 1 + bound)
    assert expected[2]["steps", "truncated"].sum(1).max() == bound, "the bound is reached"
    for key, x in expected[2]["steps"].items():
        assert torch.equal(actual[2]["steps", key], x), key
    call(PARAMS, start, keys, 0)
    assert passes[-1] == 2 * (length + 1)


def collected_at_limits(call, limit, length, bound):
    """Return a batch of two environments with random actions, and the observations reached at time limits, by step."""
    env, keys = counter(limit), torch.arange(2 * length).reshape(length, 2)
    policy = SimpleNamespace(
        act=lambda params, carry, obs, noise: (carry, TensorDict({"action": noise.unsqueeze(-1)}, noise.shape)),
        draw=lambda keys: keys / 64,
        value=POLICY.value,
    )
    start = env.reset(keys[0])
    start = start.set("elapsed", torch.tensor([0, limit - 1]))  # of two environments, one is about to end

    def run(params, start, keys):
        return collect_rollout(policy, env, params, EMPTY, start, keys, keys, max_truncations=bound)[2]

    reached, state = [{}, {}], start
    for t in range(length):
        _, state, row = act_and_step(policy.act, env.step, PARAMS, EMPTY, state, keys[t] / 64, env.draw(keys[t]))
        for n in row["truncated"].nonzero().flatten().tolist():
            reached[n][t] = row["final_obs"][n]
    return call(run)(PARAMS, start, keys), reached


@pytest.mark.parametrize(("variant", "limit", "length"), BOUNDS, indirect=["variant"])
def test_final_states_are_in_the_slots_of_their_truncations(variant, limit, length):
    """Slot i holds the state that a loop of single steps reaches at truncation i. Its value is 100 + obs."""
    bound = -(-length // limit)
    batch, reached = collected_at_limits(variant, limit, length, bound)
    final = batch["final"]
    slots = length if bound >= length else bound
    assert final.shape == (2, slots) and {*final.keys()} == {"obs", "value"}
    assert max(map(len, reached)) == bound
    for n, states in enumerate(reached):
        for i, (t, obs) in enumerate(states.items()):
            slot = t if slots == length else i
            close(final["obs"][n, slot], obs)
            close(final["value"][n, slot], 100.0 + obs[0])
            close(batch["steps", "final_value"][n, t], 100.0 + obs[0])
    placed = place_at_truncations(final["value"], batch["steps", "truncated"])
    assert torch.equal(placed, batch["steps", "final_value"])


@pytest.mark.parametrize("bound", [None, 5, 9])
def test_without_a_useful_bound_each_step_has_a_slot(variant, bound):
    batch, reached = collected_at_limits(variant, 2, 5, bound)
    assert batch["final"].shape == (2, 5)
    for n, states in enumerate(reached):
        for t, obs in states.items():
            close(batch["final", "obs"][n, t], obs)
            close(batch["final", "value"][n, t], 100.0 + obs[0])
    placed = place_at_truncations(batch["final", "value"], batch["steps", "truncated"])
    assert torch.equal(placed, batch["steps", "final_value"]) and placed.any()


def test_an_environment_without_time_limits_has_no_final_states():
    env, keys = counter(99), torch.zeros(5, 2, dtype=torch.int64)
    start = env.reset(keys[0])
    _, _, batch = collect_rollout(POLICY, env, PARAMS, EMPTY, start, keys, keys, max_truncations=0)
    assert {*batch.keys()} == {"steps"} and batch.shape == (2,)
    assert batch["steps", "value"].all() and not batch["steps", "final_value"].any()


def test_place_at_truncations_by_hand(variant):
    truncated = torch.tensor([[True, False, True, False, False], [False, False, False, True, False]])
    value = torch.tensor([[7.0, 9.0], [5.0, torch.nan]])  # the second environment has one truncation
    close(variant(place_at_truncations)(value, truncated), [[7.0, 0.0, 9.0, 0.0, 0.0], [0.0, 0.0, 0.0, 5.0, 0.0]])
    by_step = torch.tensor([[7.0, torch.inf, 9.0, 1.0], [1.0, torch.nan, 1.0, 5.0]])
    close(variant(place_at_truncations)(by_step, truncated), [[7.0, 0.0, 9.0, 0.0, 0.0], [0.0, 0.0, 0.0, 5.0, 0.0]])


@given(st.integers(0, 2**31), st.integers(1, 9))
def test_placed_values_equal_a_plain_loop(seed, length):
    draw = np.random.default_rng(seed)
    truncated = np.zeros((2, 3, length + 1), dtype=bool)
    truncated[..., :-1] = draw.random((2, 3, length)) < 0.4
    for slots in range(max(1, truncated.sum(-1).max()), length):
        value, expected = draw.normal(size=(2, 3, slots)), np.zeros(truncated.shape)
        for index in np.ndindex(2, 3):
            at = truncated[index].nonzero()[0]
            expected[index][at] = value[index][: len(at)]
        actual = assert_pure(place_at_truncations, torch.tensor(value), torch.tensor(truncated))
        assert torch.equal(actual, torch.tensor(expected))


def test_gradients_flow_through_placed_values():
    truncated = torch.tensor([[True, False, True, False]])
    for value in (torch.randn(1, 2, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64)):
        assert torch.autograd.gradcheck(lambda v: place_at_truncations(v, truncated), value.requires_grad_())


@pytest.mark.parametrize("shape", [[2, 4], [2, 0], [3, 2], [2]])
def test_placing_names_a_wrong_shape(shape):
    message = (
        r"value has shape \[.*\], and truncated has \[2, 4\]; expected equal leading axes, and between 1 and 3 slots"
    )
    with pytest.raises(ValueError, match=message):
        place_at_truncations(torch.zeros(shape), torch.zeros(2, 4, dtype=torch.bool))


def test_true_ends_have_no_final_value():
    # 10 -> 11 -> 12 -> 13 terminates before the limit of 4
    rollout = collected(limit=4, length=3)[2]["steps"]
    assert rollout["terminated"][0].tolist() == [False, False, True, False]
    close(rollout["final_value"][0], [0.0, 0.0, 0.0, 0.0])


def test_termination_and_truncation_in_one_step_are_both_stored():
    rollout = collected(limit=3, length=3)[2]["steps"]
    assert rollout["terminated"][0, 2]
    assert rollout["truncated"][0, 2]
    close(rollout["final_value"][0, 2], 113.0)


def test_memory_is_time_major_and_the_critic_optional():
    _, _, batch = collected(limit=2, length=3, policy=SimpleNamespace(act=act, draw=POLICY.draw, value=None))
    rollout = batch["steps"]
    assert {*batch.keys()} == {"steps"} and batch.shape == (2,)
    assert rollout["reward"].stride() == (1, 2)
    assert {"value", "final_value", "final_obs"}.isdisjoint(rollout.keys())


def test_collecting_in_two_parts_is_collecting_once():
    env, keys = counter(3), torch.zeros(5, 2, dtype=torch.int64)
    start = env.reset(keys[0])
    _, end, whole = collect_rollout(POLICY, env, PARAMS, EMPTY, start, keys, keys)
    _, middle, first = collect_rollout(POLICY, env, PARAMS, EMPTY, start, keys[:2], keys[:2])
    _, end_too, second = collect_rollout(POLICY, env, PARAMS, EMPTY, middle, keys[2:], keys[2:])
    assert (end == end_too).all()
    for key in ("obs", "reward", "truncated", "final_value"):
        parts = [part["steps", key][:, :-1] for part in (first, second)]
        assert torch.equal(whole["steps", key][:, :-1], torch.cat(parts, 1))


def test_keys_of_the_wrong_shape_are_refused():
    env, keys = counter(2), torch.zeros(3, 2, dtype=torch.int64)
    start = env.reset(keys[0])
    with pytest.raises(ValueError, match=r"env_keys has shape \[3, 2\], and action_keys has \[2, 2\]"):
        collect_rollout(POLICY, env, PARAMS, EMPTY, start, keys, keys[:2])
    with pytest.raises(ValueError, match="T >= 1"):
        collect_rollout(POLICY, env, PARAMS, EMPTY, start, keys[:0], keys[:0])


def test_act_and_step_by_hand(variant):
    env = counter(9)
    keys = torch.arange(3)
    start, noise = env.reset(keys), env.draw(keys)

    def one(params, state, noise):
        return act_and_step(act, env.step, params, EMPTY, state, keys, noise)[1:]

    state, row = variant(one)(PARAMS, start, noise)
    close(row["reward"], [11.0, 11.0, 11.0])
    close(row["final_obs"], [[11.0], [11.0], [11.0]])
    close(state["obs"], [[11.0], [11.0], [11.0]])
    assert sorted(row.keys()) == [
        "action", "done", "final_obs", "reward", "sample_log_prob", "terminated", "truncated",
    ]  # fmt: skip


def test_episode_statistics_by_hand(variant):
    # env 0: 1 + 2 ends, 4 runs on; env 1: 8 ends, then 16 + 32 ends. Finished, by time: 8, 3, 48
    reward = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    done = torch.tensor([[False, True, False], [True, False, True]])
    episode = variant(episode_update)(episode_init(2, 4), reward, done)
    assert episode["finished"].tolist() == [False, True, True, True]
    close(episode["finished_return"][1:], [8.0, 3.0, 48.0])
    close(episode["finished_length"][1:], [1.0, 2.0, 2.0])
    close(episode["running_return"], [4.0, 0.0])
    close(episode["running_length"], [1.0, 0.0])


def test_slots_without_an_episode_hold_the_last_steps_before_any_end():
    # A step that ended no episode has no tie with another one, so each device and the compiler take the same steps.
    reward, done = torch.arange(6.0).reshape(2, 3), torch.tensor([[False, True, False], [False, False, False]])
    episode = episode_update(episode_init(2, 3), reward, done)
    assert episode["finished"].tolist() == [False, False, True]
    close(episode["finished_return"], [2.0, 12.0, 1.0])  # of both environments at the last step, then the episode


@given(st.integers(0, 2**31), st.integers(1, 3), st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_episode_statistics_equal_a_plain_loop(seed, num_envs, lengths):
    draw, window = np.random.default_rng(seed), 5
    episode, running, finished = episode_init(num_envs, window), [[0.0, 0] for _ in range(num_envs)], []
    for length in lengths:
        reward, done = draw.normal(size=(num_envs, length)), draw.random((num_envs, length)) < 0.3
        for t in range(length):
            for n in range(num_envs):
                running[n] = [running[n][0] + reward[n, t], running[n][1] + 1]
                if done[n, t]:
                    finished.append(running[n])
                    running[n] = [0.0, 0]
        episode = assert_pure(episode_update, episode, torch.tensor(reward, dtype=torch.float32), torch.tensor(done))
    expected = finished[-window:]
    assert episode["finished"].sum() == len(expected)
    close(episode["finished_return"][episode["finished"]], torch.tensor([r for r, _ in expected]))
    close(episode["finished_length"][episode["finished"]], torch.tensor([float(k) for _, k in expected]))
    close(episode["running_return"], torch.tensor([r for r, _ in running]))


def test_streams_of_an_env_do_not_depend_on_how_many_there_are():
    noisy = SimpleNamespace(
        act=lambda p, c, obs, noise: (c, TensorDict({"action": noise.unsqueeze(-1)}, noise.shape)),
        draw=lambda keys: rng.uniform(keys),
        value=None,
    )
    env, actions = counter(3), []
    for num_envs in (8, 16):
        index, steps = torch.arange(num_envs), torch.arange(6).unsqueeze(1)
        world, choice = (rng.stream(rng.key(5), name, index, steps) for name in (rng.ENV, rng.ACTION))
        start = env.reset(rng.stream(rng.key(5), rng.START, index, 0))
        actions.append(collect_rollout(noisy, env, PARAMS, EMPTY, start, world, choice)[2]["steps", "action"][:8])
    assert torch.equal(*actions)


def test_episode_statistics_leave_out_what_is_masked(variant):
    # The second step of env 0 belongs to no episode, its NaN to nobody: 1 and 4 make 5 in 2 steps. Env 1 counts all.
    reward = torch.tensor([[1.0, torch.nan, 4.0], [8.0, 16.0, 32.0]])
    done = torch.tensor([[False, False, True], [True, False, False]])
    mask = torch.tensor([[True, False, True], [True, True, True]])
    episode = variant(episode_update)(episode_init(2, 2), reward, done, mask)
    close(episode["finished_return"], [8.0, 5.0])
    close(episode["finished_length"], [1.0, 2.0])
    close(episode["running_return"], [0.0, 48.0])
    close(episode["running_length"], [0.0, 2.0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_reward_that_is_not_finite_stays_in_its_episode(variant, bad):
    # Env 0: an episode that begins badly, then 2 + 4 = 6, and 8 goes on. Env 1: 1 + 2 = 3, and a bad one goes on.
    reward = torch.tensor([[bad, 1.0, 2.0, 4.0, 8.0], [1.0, 2.0, bad, 8.0, 16.0]])
    done = torch.tensor([[False, True, False, True, False], [False, True, False, False, False]])
    episode = variant(episode_update)(episode_init(2, 3), reward, done)
    close(episode["finished_return"], [torch.nan, 3.0, 6.0])
    close(episode["finished_length"], [2.0, 2.0, 2.0])
    close(episode["running_return"], [8.0, torch.nan])
    after = variant(episode_update)(episode, torch.ones(2, 2), torch.tensor([[False, True], [True, False]]))
    close(after["finished_return"], [6.0, torch.nan, 10.0])
    close(after["running_return"], [0.0, 1.0])


@pytest.mark.parametrize("length", [4, 40, 300])
def test_a_huge_reward_does_not_damage_the_next_episodes(variant, length):
    """1e17 swallows what is added to it, in its own episode only; the next ones return 3/4 and 1/2."""
    reward, done = torch.zeros(2, length), torch.zeros(2, length, dtype=torch.bool)
    reward[0, :4], done[0, :4] = torch.tensor([1e17, 0.25, 0.5, 0.5]), torch.tensor([True, False, True, True])
    episode = episode_init(2, 3).set("running_return", torch.tensor([1.0, -1e17]))
    reward[1, 2:4], done[1, 2] = torch.tensor([1e17, 0.125]), True
    episode = variant(episode_update)(episode, reward, done)
    returns = episode["finished_return"].tolist()
    assert returns == [0.75, 0.0, 0.5]
    assert episode["running_return"].tolist() == [0.0, 0.125]
    assert episode["finished_length"].tolist() == [2.0, 3.0, 1.0]


def test_returns_of_whole_rewards_are_exact(variant):
    """Sums up to 2**24 have no rounding, in blocks of any size."""
    draw = np.random.default_rng(1)
    reward, done = draw.integers(-1000, 1000, size=(3, 200)), draw.random((3, 200)) < 0.05
    expected, sums = [], np.zeros(3)
    for t in range(200):
        sums += reward[:, t]
        expected += [float(sums[n]) for n in range(3) if done[n, t]]
        sums[done[:, t]] = 0.0
    episode = variant(episode_update)(episode_init(3, len(expected)), torch.tensor(reward).float(), torch.tensor(done))
    assert episode["finished"].all() and episode["finished_return"].tolist() == expected
    assert episode["running_return"].tolist() == sums.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64], ids=str)
def test_episode_statistics_keep_their_dtype(dtype):
    reward, done = torch.ones(1, 601).to(dtype), torch.zeros(1, 601, dtype=torch.bool)
    done[0, 599] = True
    episode = episode_update(episode_init(1, 1), reward, done)
    assert episode["finished_return"].item() == episode["finished_length"].item() == 600.0
    assert {x.dtype for key, x in episode.items() if key != "finished"} == {torch.float32}


def test_restarted_by_hand(variant):
    reward, done = torch.tensor([[1.0, 2.0], [8.0, 16.0]]), torch.tensor([[True, False], [False, False]])
    before = episode_update(episode_init(2, 2), reward, done)
    after = variant(restarted)(before)
    assert after["running_return"].tolist() == after["running_length"].tolist() == [0.0, 0.0]
    for name in ("finished", "finished_return", "finished_length"):
        close(after[name], before[name])
    assert before["running_return"].tolist() == [2.0, 24.0]


F64 = torch.float64


def test_running_returns_by_hand(variant):
    # gamma 1/2. Row 0, on from 4: 1 + 2 = 3, 2 + 1.5 = 3.5 and the end, 4, 0 + 2 = 2.
    # Row 1, from a start: -1 and the end, 6 and the end, 2 + 0 = 2, 8 + 1 = 9.
    reward = torch.tensor([[1.0, 2.0, 4.0, 0.0], [-1.0, 6.0, 2.0, 8.0]])
    done = torch.tensor([[False, True, False, False], [True, True, False, True]])
    out = variant(running_returns)(reward, done, torch.tensor([4.0, 0.0]), gamma=0.5)
    close(out, [[3.0, 3.5, 4.0, 2.0], [-1.0, 6.0, 2.0, 9.0]])


def test_running_returns_with_a_discount_for_each_step(variant):
    # 1 + 4/2 = 3;  2 + 3/4 = 2.75 and the end;  4;  0 + 4/4 = 1
    reward, done = torch.tensor([[1.0, 2.0, 4.0, 0.0]]), torch.tensor([[False, True, False, False]])
    gamma = torch.tensor([[0.5, 0.25, 0.5, 0.25]])
    close(variant(running_returns)(reward, done, torch.tensor([4.0]), gamma=gamma), [[3.0, 2.75, 4.0, 1.0]])


def test_lengths_count_the_steps_of_an_action():
    done, executed = torch.tensor([[False, True, False, True, False]]), torch.tensor([[3, 2, 3, 1, 2]])
    mask = torch.tensor([[True, True, False, True, True]])
    episode = episode_update(episode_init(1, 3), torch.ones(1, 5), done, mask, executed)
    assert episode["finished_length"][episode["finished"]].tolist() == [5.0, 1.0]
    assert episode["running_length"].tolist() == [2.0] and episode["running_return"].tolist() == [1.0]


def running_loop(reward, done, before, gamma):
    out = np.empty_like(reward)
    for n, sums in enumerate(before):
        for t in range(reward.shape[1]):
            sums = reward[n, t] + gamma * sums
            out[n, t] = sums
            sums = 0.0 if done[n, t] else sums
    return out


def test_running_returns_oracle(variant):
    draw = np.random.default_rng(0)
    reward, done, before = draw.normal(size=(4, 30)), draw.random((4, 30)) < 0.2, draw.normal(size=4)
    inputs = (torch.tensor(reward).float(), torch.tensor(done), torch.tensor(before).float())
    close(variant(running_returns)(*inputs, gamma=0.97), torch.tensor(running_loop(reward, done, before, 0.97)))


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(0, 9))
def test_running_returns_in_two_parts_are_the_whole(seed, length, cut):
    draw, cut = np.random.default_rng(seed), min(cut, length)
    reward, before = torch.tensor(draw.normal(size=(2, 3, length))), torch.tensor(draw.normal(size=(2, 3)))
    done = torch.tensor(draw.random((2, 3, length)) < 0.3)
    whole, y = running_returns(reward, done, before, gamma=0.9), before
    for part in (slice(0, cut), slice(cut, length)):
        if part.start == part.stop:
            continue
        sums = running_returns(reward[..., part], done[..., part], y, gamma=0.9)
        close(sums, whole[..., part], tol=1e-12)  # sums in float64, in blocks that begin elsewhere
        y = sums[..., -1].masked_fill(done[..., part.stop - 1], 0.0)
    close(running_returns(2.0 * reward, done, 2.0 * before, gamma=0.9), 2.0 * whole, tol=1e-12)


def test_running_returns_gradients():
    reward, before = rng.normal(rng.key(0), (2, 4), F64), rng.normal(rng.key(1), (2,), F64)
    done = torch.tensor([[False, True, False, False], [False, False, False, True]])
    leaves = (reward.requires_grad_(), before.requires_grad_())
    assert torch.autograd.gradcheck(lambda r, b: running_returns(r, done, b, gamma=0.9), leaves)
    (grad,) = torch.autograd.grad(running_returns(reward, done, before, gamma=0.5)[0, 3], reward)
    assert grad.tolist() == [[0.0, 0.0, 0.5, 1.0], [0.0, 0.0, 0.0, 0.0]]  # nothing from before the end


def test_running_returns_do_not_retrace_on_new_values():
    def call(reward, done, before, gamma):
        return running_returns(reward, done, before, gamma=gamma)

    first = (torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2), torch.tensor(0.5))
    assert_no_retrace(call, first, (first[0] * 2, ~first[1], first[2] + 1, first[3] / 2))


@pytest.mark.parametrize(
    ("reward", "done", "before", "message"),
    [
        ([2, 3], [2, 4], [2], r"done has shape \[2, 4\], expected \[2, 3\], the shape of reward"),
        ([2, 3], [2, 3], [3], r"before has shape \[3\], expected \[2\], the shape of reward without its"),
        ([2, 3], [2, 3], [], r"before has shape \[\], expected \[2\]"),
        ([3], [3], [1], r"before has shape \[1\], expected \[\]"),
    ],
)
def test_running_returns_name_wrong_shapes(reward, done, before, message):
    with pytest.raises(ValueError, match=message):
        running_returns(torch.zeros(reward), torch.zeros(done, dtype=torch.bool), torch.zeros(before), gamma=0.9)


@pytest.mark.ref
def test_running_returns_are_those_of_gymnasiums_normalize_reward():
    """The wrapper sums over episodes that reach a time limit; if one terminates, it keeps only the last reward."""
    gym = pytest.importorskip("gymnasium")
    same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    vector = gym.make_vec("Pendulum-v1", 3, max_episode_steps=7, vector_kwargs=same_step)
    vector.reset(seed=1)
    wrapper, rewards, dones, sums = gym.wrappers.vector.NormalizeReward(vector, gamma=0.9), [], [], []
    wrapper.accumulated_reward = wrapper.accumulated_reward.astype(np.float64)
    wrapper.update_running_mean = False
    wrapper.return_rms.var, wrapper.epsilon = 1.0, 1e-16  # its rewards are then the raw ones
    for _ in range(20):
        _, reward, _, truncated, _ = wrapper.step(vector.action_space.sample() * 0)
        rewards.append(reward)
        dones.append(truncated)
        sums.append(
            np.where(truncated, np.nan, wrapper.accumulated_reward)
        )  # the wrapper restarts the sum when an episode ends
    reward, done = torch.tensor(np.array(rewards)).t(), torch.tensor(np.array(dones)).t()
    assert done.sum() == 6
    actual = running_returns(reward, done, torch.zeros(3, dtype=F64), gamma=0.9)
    close(actual.masked_fill(done, torch.nan), torch.tensor(np.array(sums)).t(), tol=1e-12)
    vector.close()


@pytest.mark.ref
def test_running_returns_are_those_of_stable_baselines3():
    """Compare with `VecNormalize._update_reward`, with terminations and truncations."""
    normalize = pytest.importorskip("stable_baselines3.common.vec_env.vec_normalize")
    draw, sums = np.random.default_rng(3), []
    reward, done = draw.normal(size=(3, 25)), draw.random((3, 25)) < 0.2
    moments = SimpleNamespace(update=lambda x: sums.append(x.copy()))
    wrapper = SimpleNamespace(returns=np.zeros(3), gamma=0.9, ret_rms=moments)
    for t in range(25):
        normalize.VecNormalize._update_reward(wrapper, reward[:, t])
        wrapper.returns[done[:, t]] = 0  # the last line of its step_wait
    actual = running_returns(torch.tensor(reward), torch.tensor(done), torch.zeros(3, dtype=F64), gamma=0.9)
    close(actual, torch.tensor(np.array(sums)).t(), tol=1e-12)
