"""Rewards that are scaled when they are drawn equal plain loops over the stored steps, in every algorithm."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import support.chunks
import support.fake_envs  # noqa: F401  # registers pausing
import torch
from support.checks import close
from support.continuous_agents import N, continuous
from support.graphs import traced_only
from support.replay_agent import replaying
from support.run_checks import states_of
from support.small_runs import NET, last_state, same
from tensordict import TensorDict

from ecrl.algorithms.core import reward_norm_init
from ecrl.config import Config, config_from_dict
from ecrl.kernels import moments_variance
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, iterations
from ecrl.pytree import replaced

GAMMA, STEPS = 0.9, 20


def scaling(name: str, **changes) -> Config:
    """A small run with scaled rewards, whose buffer has room for all 20 steps of each environment."""
    sizes = {"capacity": 40 * N, "batch_size": 16, "learning_starts": 2 * N, "learning_rate": 0.02, "gamma": GAMMA}
    if name == "dqn":
        base = {
            "trainer": {"num_envs": N, "buffer_size": 4, "iterations": 5, "compile": "off", "enable_eval": False},
            "env": {"name": "cartpole", "cfg": {"max_episode_steps": 9}},
            "policy": {"name": "q_network", "critic": NET},
            "algorithm": {"name": "dqn"},
        }
        cfg = config_from_dict(base)
    else:
        cfg = continuous(name)
    keys = {f"algorithm.cfg.{key}": value for key, value in {**sizes, "normalize_reward": True}.items()}
    return cfg.replace(**{**keys, **changes})


def stored(state: TensorDict) -> TensorDict:
    """The steps of the buffer, `[T, N]`. The buffer was never full."""
    return state["replay", "steps"][: int(state["replay", "cursor"])]


def returns_of(steps: TensorDict) -> tuple[list[list[float]], list[float]]:
    """Return the discounted returns of each time, and the running returns after the last step, by a plain loop.

    A step that does not count has the reward 0 and no return. After the end of an episode, the running return is 0.
    """
    rows = {name: steps[name].tolist() for name in steps.keys() if name not in ("obs", "action", "padding")}  # noqa: SIM118
    returns, running = [], [0.0] * steps.shape[1]
    for t in range(len(steps)):
        returns.append([])
        for e in range(steps.shape[1]):
            counts, executed = rows["mask"][t][e], rows["executed"][t][e] if "executed" in rows else 1
            running[e] = (rows["reward"][t][e] if counts else 0.0) + GAMMA**executed * running[e]
            returns[-1] += [running[e]] if counts else []
            if rows["terminated"][t][e] or rows["truncated"][t][e]:
                running[e] = 0.0
    return returns, running


def assert_statistics(state: TensorDict, steps: TensorDict) -> None:
    """Check the reward statistics of a state after these steps."""
    returns, running = returns_of(steps)
    samples, moments = np.concatenate(returns), state["norm", "reward", "moments"]
    assert int(moments["count"]) == len(samples)
    close(moments["mean"], samples.mean())
    close(moments_variance(moments), samples.var())
    close(state["norm", "reward", "running"], running)


def reward_of(steps: TensorDict, t: int, e: int, n: int) -> float:
    """The sum of up to `n` discounted rewards from step `t` of environment `e` on."""
    total = 0.0
    for k, step in enumerate(steps[t : t + n, e]):
        total += GAMMA**k * float(step["reward"])
        if step["terminated"] or step["truncated"]:
            break
    return total


RUNS = {
    "dqn": {"algorithm.cfg.learning_starts": 0},
    "dqn, prioritized": {"algorithm.cfg.prioritized": {}, "algorithm.cfg.n_step": 3, "trainer.finite_guard": "skip"},
    "ddpg": {},
    "td3": {"algorithm.cfg.n_step": 3, "algorithm.cfg.train_freq": 2},
    "sac": {"algorithm.cfg.n_step": 2},
    "fast_td3": {"algorithm.cfg.gradient_steps": 1},
    "fast_sac": {"algorithm.cfg.train_freq": 4},
}


@pytest.mark.parametrize("case", RUNS)
def test_drawn_rewards_are_in_standard_deviations_of_the_returns_before_the_turn(case, monkeypatch):
    """Episodes are terminated and truncated in between. The observation of a drawn transition identifies its step."""
    cfg = scaling(case.split(",")[0], **RUNS[case])
    own, module = cfg.algorithm.cfg, import_module(f"ecrl.algorithms.{cfg.algorithm.name}")
    update, batches = module.update, []

    def watched(run, state, batch):
        batches.append(batch)
        return update(run, state, batch)

    monkeypatch.setattr(module, "update", watched)
    states = states_of(cfg)
    steps = stored(states[-1])
    assert steps["truncated"].any() and (steps["terminated"].any() or cfg.env.name == "pendulum")
    for state in states:
        assert_statistics(state, stored(state))
    returns, place = returns_of(steps)[0], {}
    for t in range(STEPS):
        place |= {tuple(steps["obs"][t, e].tolist()): (t, e) for e in range(N)}
    first, clipped, checked = STEPS // own.train_freq - len(batches), 0, 0
    assert first * own.train_freq * N >= own.learning_starts
    for turn, batch in enumerate(batches, start=first):
        before = turn * own.train_freq
        variance = np.concatenate(returns[:before]).var() if before else 1.0
        for row in batch[batch["mask"]]:
            scaled = reward_of(steps, *place[tuple(row["obs"].tolist())], own.n_step) / np.sqrt(variance + 1e-8)
            close(row["reward"], np.clip(scaled, -10.0, 10.0), tol=1e-4)
            clipped, checked = clipped + (abs(scaled) > 10.0), checked + 1
    assert checked > 100 and (clipped > 0) == (case == "dqn"), "after one step of CartPole, all returns are 1"


def test_steps_that_do_not_count_are_in_no_statistic():
    state = last_state(scaling("dqn", **{"env": {"name": "pausing"}}))
    steps = stored(state)
    assert (~steps["mask"]).any() and float(steps["reward"].max()) == 1000.0
    assert_statistics(state, steps)


@pytest.mark.parametrize("train_freq", [1, 4])
def test_returns_discount_the_steps_that_an_action_takes(train_freq):
    """The statistics work for every algorithm whose `init` returns them, such as the one of these tests."""
    changes = {"env.name": "repeated_pole", "env.cfg": {"max_episode_steps": 14}, "trainer.enable_eval": False}
    own = {"chunks": True, "capacity": 40 * N, "gamma": GAMMA, "train_freq": train_freq}
    cfg = replaying(**changes, **{f"algorithm.cfg.{key}": value for key, value in own.items()})
    run, state = build(cfg), init_state(cfg)
    state = replaced(state, {"norm": reward_norm_init(N, state["key"].device)})
    *_, record = iterations(run, state, cfg)
    steps = stored(record["state"])
    assert sorted(set(steps["executed"].flatten().tolist())) == [1, 2]
    assert_statistics(record["state"], steps)


def test_scaled_rewards_change_what_is_learnt_and_not_what_is_logged():
    cfg = scaling("dqn")
    scaled, plain = (last_state(cfg.replace(**{"algorithm.cfg.normalize_reward": on})) for on in (True, False))
    assert not same(scaled["params"], plain["params"]) and "reward" not in plain["norm"]
    assert set(stored(scaled)["reward"].flatten().tolist()) == {1.0}
    episode = scaled["episode"]
    finished = episode["finished"]
    assert torch.equal(episode["finished_return"][finished], episode["finished_length"][finished].float())


def test_running_returns_move_on_with_the_environments_of_a_skipped_iteration():
    """The reward of environment 2 is NaN in its sixth step, in the second of three iterations of 4 steps."""
    changes = {"env.cfg": {"max_episode_steps": 1000}, "trainer.iterations": 3, "trainer.finite_guard": "skip"}
    cfg = scaling("td3", **changes)
    run, state = build(cfg), init_state(cfg)
    step, rewards = run.env.step, []

    def spoilt(state, action, noise):
        after = step(state, action, noise)
        bad = (after["elapsed"] == 6) & (torch.arange(N) == 2)
        rewards.append(after["reward"].masked_fill(bad, torch.nan))
        return replaced(after, {"reward": rewards[-1]})

    run = run._replace(env=replace(run.env, step=spoilt))
    with pytest.warns(UserWarning, match="NaN or infinity in reward"):
        states = [r["state"].clone() for r in iterations(run, state, cfg) if r["log_type"] == "train"]
    running, expected = torch.zeros(N), []
    for t, reward in enumerate(rewards):
        running = reward + GAMMA * running
        if t % 4 == 3:
            running = running.nan_to_num(0.0)
            expected.append(running)
    assert float(expected[1][2]) == 0.0 and len(expected) == 3
    for one, other in zip(states, expected, strict=True):
        close(one["norm", "reward", "running"], other)
    moments = [one["norm", "reward", "moments"] for one in states]
    assert same(moments[0], moments[1]) and [int(one["count"]) for one in moments] == [12, 12, 24]


def test_a_host_environment_has_the_statistics_of_its_steps_in_compiled_turns():
    pytest.importorskip("gymnasium")
    cfg = scaling("dqn", **{"env": {"name": "gymnasium:CartPole-v1"}, "trainer.iterations": 3})
    with traced_only() as graphs:
        state = last_state(cfg.replace(**{"trainer.compile": "on"}))
    assert "_rest_of_turn" in graphs
    assert_statistics(state, stored(state))
