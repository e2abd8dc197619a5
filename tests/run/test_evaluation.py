"""Evaluation: exact counts, equal shares, deterministic, apart from training, on our envs and on Gymnasium's."""

import math
from itertools import islice

import pytest
import torch
from support import fake_gymnasium_envs  # noqa: F401  (registers its environments)
from support.checks import assert_pure
from support.fake_envs import EndlessConfig  # noqa: F401  (registers ladder and endless)
from support.small_runs import last_state, same, small

from ecrl.envs import make_env
from ecrl.envs.gymnasium import handles as live
from ecrl.errors import ConfigError, UserError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.run import rank_shards as ranks
from ecrl.run.evaluation import _summary, eval_envs, evaluate, with_evaluation
from ecrl.run.rank_shards import with_shards
from ecrl.run.train import train


def test_eval_envs_share_episodes_equally():
    assert [eval_envs(n, 4) for n in (1, 4, 5, 6, 100)] == [1, 4, 1, 3, 4]


def test_every_env_contributes_the_same_number_of_episodes():
    # Env i's first episode has i + 1 steps of reward 1, its second 10 more: (1+2+3+4 + 11+12+13+14) / 8 = 7.5. First
    # come, first counted would take env 0's third episode before env 3's second.
    cfg = small(**{"env": {"name": "ladder"}, "trainer.num_eval_envs": 4})
    logs = evaluate(init_state(cfg), cfg, num_episodes=8)
    assert logs["eval/avg_length"] == logs["eval/avg_reward"] == 7.5
    assert logs["eval/success_rate"] == 0.5  # second episodes succeed
    assert evaluate(init_state(cfg), cfg, num_episodes=4)["eval/avg_length"] == 2.5


def test_steps_that_do_not_count_add_neither_reward_nor_length():
    cfg = small(**{"env": {"name": "pausing"}, "trainer.iterations": 1})
    state, history = train(init_state(cfg), cfg, progress=False)
    logs = evaluate(state, cfg, num_episodes=4)
    assert (logs["eval/avg_reward"], logs["eval/avg_length"]) == (3.0, 3.0)
    assert history[-1]["episode_reward_avg_100"] == history[-1]["episode_length_avg_100"] == 3.0


def test_metrics_are_matched_by_name_in_any_order():
    cfg = small(env={"name": "telling"})
    logs = evaluate(init_state(cfg), cfg, num_episodes=4)
    assert (logs["eval/metrics/slow"], logs["eval/metrics/fast"]) == (1.0, 2.0)


def test_it_is_pure_deterministic_and_seeded():
    cfg = small()
    state = init_state(cfg)
    first = assert_pure(evaluate, state, cfg, num_episodes=8)
    torch.manual_seed(1)
    assert evaluate(state, cfg, num_episodes=8) == first
    other = cfg.replace(**{"trainer.eval_seed": 7})
    assert evaluate(state, other, num_episodes=8) != first
    assert evaluate(state, cfg.replace(**{"trainer.seed": 2}), num_episodes=8) != first  # seed + 10000 by default
    assert evaluate(state, other.replace(**{"trainer.seed": 2}), num_episodes=8) == evaluate(
        state, other, num_episodes=8
    )


def test_the_default_count_is_the_configs():
    cfg = small(**{"env": {"name": "ladder"}, "trainer.num_eval_episodes": 2, "trainer.num_eval_envs": 2})
    assert evaluate(init_state(cfg), cfg)["eval/avg_length"] == 1.5


def test_an_env_that_never_ends_is_named(monkeypatch):
    monkeypatch.setattr("ecrl.run.evaluation._MAX_STEPS", 200)
    cfg = small(**{"env": {"name": "endless"}})
    with pytest.raises(
        UserError,
        match=r"env 0 finished 0 of 1 episodes, but the next did not end in 200 steps; "
        "give the environment a time limit",
    ):
        evaluate(init_state(cfg), cfg, num_episodes=1)


def test_evaluating_often_or_never_does_not_change_training():
    plain, watched = small(), small(**{"trainer.enable_eval": True, "trainer.eval_freq": 32})
    records = list(with_evaluation(train_iter(init_state(watched), watched), watched))
    assert [r["log_type"] for r in records] == ["collect", "train", "evaluate"] * 4
    assert same(records[-1]["state"], last_state(plain))


def test_eval_freq_fires_on_crossing():
    cfg = small(**{"trainer.eval_freq": 70})
    records = list(with_evaluation(train_iter(init_state(cfg), cfg), cfg))
    assert [r["sample_step"] for r in records if r["log_type"] == "evaluate"] == [96]


@pytest.mark.parametrize(("env", "gym_id"), [("cartpole", "CartPole-v1"), ("pendulum", "Pendulum-v1")])
def test_gymnasium_gives_nearly_the_same_as_our_twin(env, gym_id):
    cfg = small(
        **{"env": {"name": env}, "trainer.num_eval_envs": 25, "trainer.iterations": 8, "trainer.buffer_size": 64}
    )
    state = last_state(cfg)
    actual, expected = (evaluate(state, cfg, num_episodes=50, env=e) for e in (None, f"gymnasium:{gym_id}"))
    spread = actual["eval/std_reward"] + 1.0
    assert (
        abs(actual["eval/avg_reward"] - expected["eval/avg_reward"]) < spread
    )  # 50 episodes: 5 standard errors are 0.7 spread
    assert expected == evaluate(state, cfg, num_episodes=50, env=f"gymnasium:{gym_id}")


def test_gymnasium_environments_are_closed_whatever_happens(monkeypatch):
    cfg = small(**{"env": "gymnasium:CartPole-v1", "trainer.num_eval_envs": 2})
    state = init_state(cfg)
    training = set(live._LIVE)
    first = evaluate(state, cfg, num_episodes=20)
    assert evaluate(state, cfg, num_episodes=20, env="gymnasium:CartPole-v1") == first
    assert first != evaluate(state, cfg.replace(**{"trainer.eval_seed": 7}), num_episodes=20)
    assert first["eval/avg_length"] == first["eval/avg_reward"] > 5.0 and "eval/success_rate" not in first
    monkeypatch.setattr("ecrl.run.evaluation._MAX_STEPS", 2)
    with pytest.raises(UserError, match="give the environment a time limit"):
        evaluate(state, cfg, num_episodes=20)
    assert set(live._LIVE) == training
    next(train_iter(state, cfg))  # the environments of training did not move
    make_env(cfg.env).close(state["env"])


def test_ranks_that_stop_do_not_evaluate_before_that(monkeypatch):
    cfg = small(**{"trainer.eval_freq": 32, "trainer.num_eval_episodes": 2})
    kinds = []
    for stopping in (False, True):
        monkeypatch.setattr(ranks, "any_rank", lambda mine, stopping=stopping: stopping)
        monkeypatch.setattr(ranks, "_gather_shards", lambda *_: {})
        records = with_shards(islice(train_iter(init_state(cfg), cfg), 4), build(cfg), cfg)
        kinds.append([record["log_type"] for record in with_evaluation(records, cfg)])
    assert kinds == [2 * ["collect", "train", "evaluate"], ["collect", "train"]]


def test_gymnasium_actions_are_clipped_where_those_of_training_are():
    # It pays -0.1 action^2 and holds its actions in +-1 itself, but not in the reward; the policy's mean action is -5.
    cfg = small(**{"env": {"name": "gymnasium:MountainCarContinuous-v0", "cfg": {"max_episode_steps": 3}}})
    state = init_state(cfg)
    params = state["params"].clone().unlock_()
    params["actor", "2.weight"].zero_()
    params["actor", "2.bias"].fill_(-5.0)
    state = state.copy().update({"params": params})
    assert evaluate(state, cfg, num_episodes=1)["eval/avg_reward"] == pytest.approx(3 * -0.1)
    free = cfg.replace(**{"policy.clip_actions": False})
    assert evaluate(state, free, num_episodes=1)["eval/avg_reward"] == pytest.approx(3 * -0.1 * 25.0)
    make_env(cfg.env).close(state["env"])


def test_success_of_a_gymnasium_environment_is_logged():
    cfg = small(**{"env": "gymnasium:support.fake_gymnasium_envs:Bandit-v0", "trainer.num_eval_envs": 4})
    state = init_state(cfg)
    logs = evaluate(state, cfg, num_episodes=40)
    assert logs["eval/success_rate"] == pytest.approx(logs["eval/avg_reward"]) and logs["eval/avg_length"] == 1.0
    make_env(cfg.env).close(state["env"])


@pytest.mark.parametrize(
    ("env", "count", "message"),
    [
        ("gymnasium:Acrobot-v1", 1, "gymnasium:Acrobot-v1 has observation_space"),
        ("gymnasium:NoSuchEnv-v0", 1, "NoSuchEnv"),
        ("gymnasium:Blackjack-v1", 1, "gymnasium:Blackjack-v1 has observation_space"),
        (
            "gymnasium:no_module:Env-v0",
            1,
            "'no_module:Env-v0' belongs to module 'no_module', which is not imported; import it first",
        ),
        ("CartPole-v1", 1, 'expected "gymnasium:<id>"'),
        (None, 0, "num_episodes: 0, expected at least 1"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(env, count, message):
    cfg = small()
    with pytest.raises(ConfigError, match=message) as error:
        evaluate(init_state(cfg), cfg, num_episodes=count, env=env)
    assert "\n" not in str(error.value)


WRONG = {"func": "randomize_field", "mode": "reset", "params": {"field": "nope", "low": 0.0, "high": 1.0}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer.events.eval": {"wrong": WRONG}}, "unknown field 'nope'"),
        ({"trainer.events.eval": {"wrong": WRONG}, "env": "gymnasium:CartPole-v1"}, "not in tensors"),
        (
            {"trainer.best_eval_metric": "eval/success_rate"},
            "evaluations do not log 'eval/success_rate'; known: eval/avg_length",
        ),
        ({"trainer.best_eval_metric": "avg_reward"}, "did you mean 'eval/avg_reward'"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_a_run(changes, message, tmp_path):
    cfg = small(**{"trainer.enable_eval": True, **changes})
    state = init_state(small())
    with pytest.raises(ConfigError, match=message):
        train(state, cfg, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=message):
        next(with_evaluation(iter([]), cfg))


def test_outcomes_are_means_over_the_episodes_that_report_them():
    nan = math.nan
    logs = _summary([(1.0, 2, 1.0, nan), (3.0, 4, nan, nan), (5.0, 6, 0.0, nan)], ["eval/a", "eval/b"])
    assert logs["eval/a"] == 0.5 and "eval/b" not in logs and logs["eval/avg_reward"] == 3.0
