"""The benchmark of collapses: its settings, its counts, its files and its table."""

import json

import numpy as np
import pytest
from support.paths import ROOT

from benchmarks import stability
from benchmarks.stability import (
    ARMS,
    COMPARED,
    FEW_ENVS,
    TASKS,
    VARIANTS,
    config,
    falls_below_untrained,
    is_collapsed,
    is_far_below_best,
    path_of,
    records,
    settings_hash,
    steps_to,
    steps_to_stay,
    table,
)

pytest.importorskip("matplotlib")


def curve(*returns, std=1.0):
    return [{"steps": 10 * i, "return": float(x), "std": std} for i, x in enumerate(returns)]


def written(out, task, arm, seed, *returns, **row):
    path = path_of(task, arm, seed, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"hash": settings_hash(task, arm), "curve": curve(*returns), "wall_s": 1.0} | row))


@pytest.mark.parametrize(
    "returns, collapsed",
    [
        ((-100, -50, -20), False),  # improves to the end
        ((-100, -20, -90, -30), False),  # falls and recovers
        ((-100, -20, -60), False),  # keeps exactly half of its gain
        ((-100, -20, -61), True),
        ((-100, -20, -150), True),  # worse than untrained
        ((-100, -120, -101), True),  # never better than untrained
        ((-100, -120, -100), False),
        ((-100, -100, -100), False),
    ],
)
def test_a_run_collapses_if_it_keeps_less_than_half_of_its_gain(returns, collapsed):
    assert is_collapsed(curve(*returns)) is collapsed


def test_a_small_fall_is_not_far_below_the_best_return():
    small = (-100, -98, -103)
    assert is_collapsed(curve(*small))
    assert not is_far_below_best(curve(*small, std=5.0))
    assert is_far_below_best(curve(*small, std=4.9))
    assert not is_far_below_best(curve(-100, -20, -50, std=1.0))  # a large fall, but not a collapse


def test_a_fall_counts_even_if_the_run_recovers():
    assert not falls_below_untrained(curve(-100, -105, -20, std=5.0))
    assert falls_below_untrained(curve(-100, -106, -20, std=5.0))


def test_steps_to_a_return_count_until_the_first_evaluation_that_reaches_it():
    assert [steps_to(curve(-9, -5, -7, -1), threshold) for threshold in (-9.0, -6.0, -2.0, 0.0)] == [
        0, 10, 30, float("inf"),
    ]  # fmt: skip


def test_steps_until_a_run_stays_leave_out_a_return_that_is_lost_again():
    assert [steps_to_stay(curve(-9, -5, -7, -1), threshold) for threshold in (-9.0, -7.0, -6.0, 0.0)] == [
        0, 10, 30, float("inf"),
    ]  # fmt: skip


def test_both_libraries_have_the_same_settings():
    cfg = config("Pusher-v5", "ecrl", 3)
    assert config("Pusher-v5", "sb3", 3) == cfg
    assert (cfg.env.cfg.id, cfg.trainer.seed, cfg.trainer.num_envs, cfg.trainer.buffer_size) == (
        "Pusher-v5",
        3,
        32,
        128,
    )
    assert cfg.algorithm.cfg.learning_rate == 1e-3
    assert not cfg.algorithm.cfg.normalize_reward and not cfg.policy.normalize_obs
    assert len({settings_hash(task, arm) for task in TASKS for arm in ARMS}) == len(TASKS) * len(ARMS)


def test_sb3_gets_the_numbers_of_the_config():
    pytest.importorskip("stable_baselines3")
    from benchmarks.other_libraries.sb3_stability import make_model

    cfg = config("Pendulum-v1", "sb3", 0)
    model, numbers = make_model(cfg), cfg.algorithm.cfg
    same = "n_epochs", "batch_size", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm"
    assert {name: getattr(model, name) for name in same} == {name: getattr(numbers, name) for name in same}
    assert (model.n_envs, model.n_steps, model.clip_range(1.0)) == (32, 128, numbers.clip_coef)
    assert [model.lr_schedule(left) for left in (1.0, 0.5, 0.0)] == [1e-3, 5e-4, 0.0]
    shapes = sorted(tuple(x.shape) for x in model.policy.parameters() if x.ndim == 2)
    assert shapes == [(1, 64), (1, 64), (64, 3), (64, 3), (64, 64), (64, 64)]


def test_the_table_has_medians_and_counts_of_the_files(tmp_path):
    for seed, last in enumerate((-10, -20, -30)):
        written(tmp_path, "Reacher-v5", "sb3", seed, -100, last)
    written(tmp_path, "Reacher-v5", "ecrl", 0, -100, -20, -10)
    written(tmp_path, "Reacher-v5", "ecrl", 1, -100, -25, -99)
    written(tmp_path, "Reacher-v5", "ecrl", 2, -100, -20, -10, hash="of other settings")
    assert list(records("Reacher-v5", "ecrl", tmp_path)) == [0, 1]
    assert table(out=tmp_path).splitlines()[2:] == [
        "| `Reacher-v5` | ecrl | 2 | 1 | 1 | 0 | -100.0 | -54.5 |  |  |",
        "| `Reacher-v5` | SB3 | 3 | 0 | 0 | 0 | -100.0 | -20.0 | 10 | 10 |",
    ]
    # the threshold is the median over all seeds of SB3
    assert table(arms=("sb3",), seeds=(0,), out=tmp_path).splitlines()[2:] == [
        "| `Reacher-v5` | SB3 | 1 | 0 | 0 | 0 | -100.0 | -10.0 | 10 | 10 |"
    ]


def test_missing_runs_are_measured_and_a_failure_is_reported(tmp_path, monkeypatch, capsys):
    called = []

    def measure(task, arm, seed, core, out):
        called.append((task, arm, seed))
        if (arm, seed) == ("sb3", 1):
            raise stability.Failure("died")
        written(out, task, arm, seed, -2, -1)

    monkeypatch.setattr(stability, "measure", measure)
    monkeypatch.setattr(stability, "available", lambda: (0,))
    assert stability.run(("Pusher-v5",), seeds=(0,), out=tmp_path)
    assert called == [("Pusher-v5", arm, 0) for arm in COMPARED]
    called.clear()
    assert not stability.run(("Pusher-v5",), seeds=(0, 1), out=tmp_path)
    assert called == [("Pusher-v5", arm, 1) for arm in COMPARED]
    assert "Pusher-v5, sb3, seed 1: died" in capsys.readouterr().out


@pytest.mark.parametrize("given", [{"tasks": ("Ant-v5",)}, {"arms": ("rejax",)}])
def test_an_unknown_name_is_one_line(given):
    ((key, (name,)),) = given.items()
    with pytest.raises(stability.UserError, match=rf"^--{key} {name}: unknown; known: [^\n]*$"):
        stability.run(**given)


def test_sb3_has_its_own_eps_unless_the_config_sets_it():
    pytest.importorskip("stable_baselines3")
    from benchmarks.other_libraries.sb3_stability import make_model

    eps = {
        arm: make_model(config("Pendulum-v1", arm, 0)).policy.optimizer.defaults["eps"] for arm in ("sb3", "sb3_eps")
    }
    assert eps == {"sb3": 1e-5, "sb3_eps": 1e-8}


def test_the_episodes_of_an_evaluation_depend_only_on_the_task_and_the_seed():
    def act(obs):
        return np.zeros((len(obs), 1), np.float32)

    first, again, other = (stability.evaluations("Pendulum-v1", seed) for seed in (3, 3, 4))
    assert first(act) == first(act) == again(act) != other(act)
    assert -1600.0 < first(act)["return"] < -900.0  # the mean of many episodes is -1220


@pytest.mark.parametrize("arm", COMPARED)
def test_a_run_has_an_evaluation_before_the_training_and_one_after_it(arm, monkeypatch):
    pytest.importorskip("stable_baselines3")
    changes = {"trainer.iterations": 2, "trainer.num_envs": 2}
    monkeypatch.setitem(ARMS, arm, ARMS[arm]._replace(changes=changes))
    monkeypatch.setattr(stability, "POINTS", 1)
    monkeypatch.setattr(stability, "EPISODES", 2)
    row = stability.learn("Pendulum-v1", arm, 0)
    assert [point["steps"] for point in row["curve"]] == [0, 512]
    assert all(-2000.0 < point["return"] < 0.0 < point["std"] for point in row["curve"])


@pytest.mark.parametrize("shown", [{}, {"tasks": ("Reacher-v5",), "arms": VARIANTS}, {"arms": FEW_ENVS}])
def test_the_page_has_the_tables_of_the_files(shown):
    page = (ROOT / "docs" / "results.md").read_text()
    assert f"\n\n{table(**shown)}\n\n" in page, f"paste the table of {shown}"
