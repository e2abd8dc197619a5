"""Many runs in one call: each equals the run alone, has its own folder, resumes, and may stop without the others."""

import csv
import gc
import json
import threading
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
from support import custom_modules
from support.small_runs import last_state, same, small
from tensordict import TensorDict

import ecrl
from ecrl.errors import UserError
from ecrl.loop import iteration
from ecrl.loop.build import build
from ecrl.run import train_many as module
from ecrl.run.checkpoint import latest
from ecrl.run.train_many import Members, _label, train_many

RATES = {"algorithm.cfg.learning_rate": [0.01, 0.001]}


def many(cfg, seeds=(0, 1), **options):
    return train_many(cfg, seeds=seeds, progress=False, **options)


def assert_close(one, other):
    for name, expected in other.flatten_keys("/").items():
        torch.testing.assert_close(one.flatten_keys("/")[name], expected, rtol=1e-4, atol=1e-5, msg=name)


COMPILED = {"trainer.compile": "on", "trainer.iterations": 2}


@pytest.fixture
def calls(monkeypatch):
    """The names of the runs of each group that trains together."""
    seen, before = [], module.iterations_of_members

    def counted(run, states, cfg, names, **options):
        seen.append(list(names))
        return before(run, states, cfg, names, **options)

    monkeypatch.setattr(module, "iterations_of_members", counted)
    return seen


@pytest.mark.parametrize(
    "cfg",
    [
        small(),
        small(**{"trainer.finite_guard": "skip"}),
        small(**{"trainer.finite_guard": "off", "policy.normalize_obs": True}),
        small(**{"algorithm": {"name": "grpo", "cfg": {"group_size": 2}}, "trainer.buffer_size": 64}),
        pytest.param(small(**COMPILED), marks=pytest.mark.traced),
        pytest.param(small(**COMPILED), marks=pytest.mark.long),
    ],
    ids=["ppo", "skip", "off, normalised", "grpo", "traced", "compiled"],
)
def test_each_run_equals_the_run_alone(cfg, calls):
    runs = many(cfg, sweep=RATES, runs_per_call=4)
    assert calls == [[run.name for run in runs]], "all in one call"
    assert [run.values for run in runs] == [
        {"algorithm.cfg.learning_rate": rate, "trainer.seed": seed} for rate in (0.01, 0.001) for seed in (0, 1)
    ]
    for run in runs:
        expected = last_state(cfg.replace(**run.values))
        assert_close(run.state, expected)
        assert len(run.history) == cfg.trainer.iterations and run.state.is_locked
        assert run.cfg == cfg.replace(**run.values)
    assert not same(runs[0].state["params"], runs[1].state["params"]), "seeds differ"
    assert not same(runs[0].state["params"], runs[2].state["params"]), "learning rates differ"


def test_settings_that_a_run_contains_train_one_group_after_the_other(calls):
    runs = many(small(), sweep={"trainer.num_envs": [4, 8], "env.cfg.gravity": [9.8]})
    assert [len(names) for names in calls] == [2, 2]
    assert [run.state["env"].shape[0] for run in runs] == [4, 4, 8, 8]
    assert runs[2].name == "gravity_9.8_num_envs_8_seed_0"
    assert_close(runs[3].state, last_state(runs[3].cfg))


@pytest.mark.parametrize(
    "sweep, sizes",
    [
        ({"algorithm.cfg.target_kl": [None, 0.01]}, [2, 2]),
        ({"trainer.finite_guard": ["off", "stop"]}, [2, 2]),
        ({"trainer.use_wandb": [False, True]}, [2]),
    ],
    ids=["other fields of the state", "other reactions to NaN", "one run of W&B at a time"],
)
def test_runs_that_differ_in_more_than_the_values_of_the_state_do_not_train_together(sweep, sizes, calls):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "trainer.use_wandb: nothing is written without a run folder")
        runs = many(small(), sweep=sweep)
    assert [len(names) for names in calls] == sizes
    for run in runs:
        assert_close(run.state, last_state(run.cfg))


def test_a_policy_that_draws_its_own_random_numbers_trains_one_run_after_the_other(calls):
    runs = many(small(**{"policy": {"name": custom_modules.acts.__name__}}))
    assert calls == []
    assert same(runs[1].state, last_state(runs[1].cfg))


def test_runs_with_and_without_evaluations_stay_in_step(monkeypatch):
    furthest, before = [], module.iterations_of_members

    def watched(run, states, cfg, names, **options):
        for batch in before(run, states, cfg, names, **options):
            furthest.append(batch[0][0]["sample_step"])
            yield batch

    lags, rounds = [], module._rounds

    def watched_rounds(group, streams):
        for record in rounds(group, streams):
            lags.append(furthest[-1] - min(int(member.state["sample_step"]) for member in group))
            yield record

    monkeypatch.setattr(module, "iterations_of_members", watched)
    monkeypatch.setattr(module, "_rounds", watched_rounds)
    cfg = small(**{"trainer.eval_freq": 32, "trainer.num_eval_episodes": 1, "trainer.iterations": 12})
    runs = many(cfg, seeds=[0], sweep={"trainer.enable_eval": [False, True]})
    assert max(lags) == 32, "no run is more than one iteration behind"
    assert ["eval/avg_reward" in row for row in runs[1].history] == [True] * 12
    assert not any("eval/avg_reward" in row for row in runs[0].history)
    assert_close(runs[0].state, runs[1].state)


def test_the_states_of_earlier_iterations_are_released(monkeypatch):
    states, live, before = [], [], module.iterations_of_members

    def watched(run, first, cfg, names, **options):
        for batch in before(run, first, cfg, names, **options):
            states.append(weakref.ref(batch[0][0]["state"]))
            yield batch
            del batch
            gc.collect()
            live.append(sum(state() is not None for state in states))

    monkeypatch.setattr(module, "iterations_of_members", watched)
    many(small(**{"trainer.iterations": 8}))
    assert max(live) <= 2, live


@pytest.mark.parametrize("frozen_before", [False, True])
def test_the_garbage_collector_skips_old_objects_only_during_the_training(frozen_before, monkeypatch):
    counts, before = [], module.iterations_of_members

    def watched(*args, **options):
        for batch in before(*args, **options):
            counts.append(gc.get_freeze_count())
            yield batch

    monkeypatch.setattr(module, "iterations_of_members", watched)
    try:
        if frozen_before:
            gc.freeze()
        many(small(**{"trainer.iterations": 3}))
        assert [count > 0 for count in counts] == [frozen_before, True, True]
        assert (gc.get_freeze_count() > 0) == frozen_before
    finally:
        gc.unfreeze()


def test_parts_of_at_most_runs_per_call(calls):
    runs = many(small(), seeds=range(5), runs_per_call=2)
    assert calls == [["seed_1", "seed_2"], ["seed_3", "seed_4"]], "seed_0 trains alone"
    assert_close(runs["seed_4"].state, last_state(runs[4].cfg))


@pytest.mark.parametrize(
    ("compiles", "threads", "num_envs", "by_default", "in_pairs"),
    [
        ("off", 1, 128, [20], [2] * 10),
        ("off", 2, 128, [20], [2] * 10),
        ("on", 1, 4, [10, 10], [2] * 10),
        ("on", 1, 5, [1] * 20, [2] * 10),
        ("on", 2, 4, [20], [4] * 5),
        ("on", 2, 5, [2] * 10, [4] * 5),
    ],
)
def test_the_form_the_threads_and_the_environments_determine_the_groups(
    compiles, threads, num_envs, by_default, in_pairs, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    cfg = small(**{"trainer.num_envs": num_envs, "trainer.compile": compiles})
    members = [module._Unfinished(f"seed_{seed}", {}, cfg, None) for seed in range(20)]
    run, state = build(cfg), ecrl.init_state(cfg)
    for member in members:
        member.run, member.state = run, state
    assert [len(group.members) for group in module._groups(members, None)] == by_default
    assert [len(group.members) for group in module._groups(members, 2)] == in_pairs


@pytest.mark.parametrize(
    ("most", "threads", "sizes"), [(16, 1, [5]), (2, 1, [2] * 3), (16, 2, [3] * 2), (1, 2, [1] * 5), (2, 3, [2] * 3)]
)
def test_batches_have_one_size_and_no_thread_is_idle(most, threads, sizes):
    states = [TensorDict({"x": torch.tensor(float(i))}, []) for i in range(5)]
    batches = iteration._batches(states, most, threads)
    assert [len(batch) for batch in batches] == sizes
    numbers = [float(state["x"]) for batch in batches for state in batch]
    assert numbers == [0.0, 1.0, 2.0, 3.0, 4.0] + [4.0] * (sum(sizes) - 5)


def _with_two_threads(monkeypatch):
    monkeypatch.setattr(module, "fastest_calls", lambda run, cfg: (1, 2))


def _compiled(**changes):
    return small(**{"trainer.compile": "on", "trainer.num_envs": 8, "trainer.iterations": 3} | changes)


@pytest.mark.parametrize(
    ("runs_per_call", "seeds"),
    [pytest.param(1, 2, marks=pytest.mark.traced), pytest.param(2, 3, marks=pytest.mark.long)],
)
def test_calls_at_the_same_time_give_the_results_of_one_thread(runs_per_call, seeds, monkeypatch):
    """A barrier in each call shows that two calls run at the same time."""
    barrier, inside, before = threading.Barrier(2), [], iteration._batch_iteration

    def watched(*args):
        iterate = before(*args)

        def at_the_same_time(batch):
            thread = threading.current_thread()
            inside.append((thread.name, torch.get_num_threads()))
            if thread is not threading.main_thread():
                barrier.wait(60.0)
            return iterate(batch)

        return at_the_same_time

    monkeypatch.setattr(iteration, "_batch_iteration", watched)
    _with_two_threads(monkeypatch)
    threads = torch.get_num_threads()
    runs = many(_compiled(), seeds=range(seeds), runs_per_call=runs_per_call)
    assert [name for name, _ in inside[:2]] == ["MainThread"] * 2, "the first iteration compiles"
    assert {threads for _, threads in inside} == {1} and {name for name, _ in inside[2:]} == {"member_0", "member_1"}
    assert torch.get_num_threads() == threads and len(runs) == seeds
    for run in runs:
        assert_close(run.state, last_state(run.cfg))


def test_checkpoints_of_calls_at_the_same_time_have_the_number_of_threads_of_a_call(tmp_path, monkeypatch):
    _with_two_threads(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = many(_compiled(), run_dir=tmp_path)
        saved = [json.loads((latest(tmp_path / run.name) / "manifest.json").read_text()) for run in runs]
    finally:
        torch.set_num_threads(threads)
    assert [about["threads"] for about in saved] == [1, 1]


class _Broken(Exception):
    pass


def test_a_fault_in_a_consumer_ends_the_threads_at_once(monkeypatch):
    _with_two_threads(monkeypatch)
    threads = torch.get_num_threads()

    def broken(*args):
        raise _Broken
        yield

    monkeypatch.setattr(module, "_rounds", broken)
    with pytest.raises(_Broken) as kept:
        many(_compiled())
    assert torch.get_num_threads() == threads and gc.get_freeze_count() == 0
    assert kept.value.__traceback__ is not None, "the traceback still refers to the iterator"


def test_physics_and_autocast_use_one_call_at_a_time():
    threads = torch.get_num_threads()
    cfg = _compiled()
    torch.set_num_threads(2)
    try:
        assert module.fastest_calls(build(cfg), cfg) == (1, 2)
        with torch.autocast("cpu"):
            assert module.fastest_calls(build(cfg), cfg) == (1, 1)
        run = build(cfg)
        run = run._replace(env=replace(run.env, scene=object()))
        assert module.fastest_calls(run, cfg) == (1, 1)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "cfg",
    [
        small(**{"env": {"id": "gymnasium:CartPole-v1"}, "trainer.num_envs": 2}),
        small(
            **{
                "algorithm": {"name": "dqn", "cfg": {"capacity": 64, "batch_size": 8, "learning_starts": 32}},
                "policy": {"name": "q_network"},
            }
        ),
    ],
    ids=["environments in Python", "replay buffer"],
)
def test_other_runs_train_one_after_the_other(cfg, calls, tmp_path):
    runs = many(cfg, run_dir=tmp_path)
    assert calls == []
    for run in runs:
        assert int(run.state["sample_step"]) > 0 and len(run.history) == cfg.trainer.iterations
        assert (tmp_path / run.name / "metrics.jsonl").exists()
    assert not same(runs[0].state["params"], runs[1].state["params"])
    if cfg.algorithm.name == "dqn":
        assert same(runs[1].state, last_state(runs[1].cfg))


def test_each_run_has_a_run_folder_and_a_row_of_the_summary(tmp_path):
    cfg = small(**{"trainer.eval_freq": 64, "trainer.enable_eval": True, "trainer.num_eval_episodes": 2})
    runs = many(cfg, run_dir=tmp_path, sweep=RATES)
    for run in runs:
        rows = [json.loads(line) for line in (tmp_path / run.name / "metrics.jsonl").read_text().splitlines()]
        assert [row["log_type"] for row in rows].count("evaluate") == 2
        state, own = ecrl.load(latest(tmp_path / run.name))
        assert same(state, run.state) and own == run.cfg
        assert ecrl.evaluate(state, own, num_episodes=1)["eval/avg_reward"] > 0
    with (tmp_path / "summary.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [row["name"] for row in rows] == [run.name for run in runs]
    assert rows[2]["algorithm.cfg.learning_rate"] == "0.001" and rows[2]["trainer.seed"] == "0"
    assert float(rows[0]["eval/avg_reward"]) == runs[0].history[-1]["eval/avg_reward"]
    assert repr(runs).splitlines()[0].split() == ["name", "sample_step", "episode_reward_avg_100", "eval/avg_reward"]
    assert len(repr(runs).splitlines()) == 5
    pandas = pytest.importorskip("pandas")
    table = runs.to_pandas()
    assert isinstance(table, pandas.DataFrame) and table.loc["learning_rate_0.01_seed_1", "sample_step"] == 128


def interrupt_after(monkeypatch, rounds):
    left = [rounds]

    def asked():
        left[0] -= 1
        return 2 if left[0] < 0 else None

    monkeypatch.setattr(module, "asked", asked)


def test_an_interrupted_call_resumes_with_equal_bits(tmp_path, monkeypatch, capsys, calls):
    whole = many(small(), run_dir=tmp_path / "whole", sweep=RATES)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 1)
        part = many(small(), run_dir=tmp_path / "part", sweep=RATES)
    assert "interrupted at 64 env steps of 4 runs" in capsys.readouterr().out
    assert [int(run.state["sample_step"]) for run in part] == [64] * 4
    with (tmp_path / "part" / "summary.csv").open() as file:
        assert [row["sample_step"] for row in csv.DictReader(file)] == ["64"] * 4
    again = many(small(), run_dir=tmp_path / "part", sweep=RATES)
    for one, other in zip(again, whole, strict=True):
        assert same(one.state, other.state)
        assert [row["sample_step"] for row in one.history] == [32, 64, 96, 128]
        assert str([*one.history]) == str([*other.history])
    calls.clear()
    finished = many(small(), run_dir=tmp_path / "part", sweep=RATES)
    assert calls == [] and all(same(one.state, other.state) for one, other in zip(finished, whole, strict=True))
    assert repr(finished) == repr(whole)


@pytest.mark.parametrize("runs_per_call", [1, None], ids=["alone", "together"])
def test_an_interrupted_last_evaluation_ends_the_call_and_runs_in_the_next_call(tmp_path, monkeypatch, runs_per_call):
    cfg = small(**{"trainer.eval_freq": 128, "trainer.enable_eval": True, "trainer.num_eval_episodes": 2})
    options = {"seeds": [0] if runs_per_call else [0, 1], "sweep": {"algorithm.cfg.n_epochs": [1, 2]}}
    whole = many(cfg, **options)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ecrl.run.evaluation._evaluate_run", interrupted)
        part = many(cfg, **options, run_dir=tmp_path)
    assert [int(run.state["sample_step"]) for run in part][:: len(options["seeds"])] == [128, 0]
    for _ in range(2):
        again = many(cfg, **options, run_dir=tmp_path)
        assert repr(again) == repr(whole)
        rows = (tmp_path / again[0].name / "metrics.jsonl").read_text()
        assert rows.count('"evaluate"') == 1, "once, although each call looks for it"
        assert (tmp_path / again[0].name / "checkpoints" / "best").exists()


def test_more_seeds_join_runs_that_have_finished(tmp_path, calls):
    many(small(), seeds=[0], run_dir=tmp_path)
    runs = many(small(), seeds=[0, 1], run_dir=tmp_path)
    assert calls == [] and [int(run.state["sample_step"]) for run in runs] == [128, 128]
    assert same(runs[1].state, last_state(runs[1].cfg))


def test_a_run_with_infinity_stops_and_the_others_continue(tmp_path):
    sweep = {"algorithm.cfg.learning_rate": [0.01, 1e38]}
    with pytest.warns(UserWarning, match=r"learning_rate_1e\+38_seed_0: NaN or infinity in .* this run stops with the"):
        runs = many(small(), seeds=[0], sweep=sweep, run_dir=tmp_path)
    first, second = (int(run.state["sample_step"]) for run in runs)
    assert first == 128 and second < 128
    assert all(leaf.isfinite().all() for leaf in runs[1].state["params"].values(True, True))
    if second:
        assert same(ecrl.load(latest(tmp_path / runs[1].name))[0], runs[1].state)
    assert_close(runs[0].state, last_state(runs[0].cfg))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"seeds": []}, r"seeds: \[\]; expected one or more different integers"),
        ({"seeds": [1, 1]}, r"seeds: \[1, 1\]; expected one or more different"),
        ({"seeds": ["a"]}, r"seeds: \['a'\]; expected one or more different integers"),
        ({"seeds": [[1]]}, r"seeds: \[\[1\]\]; expected one or more different integers"),
        ({"seeds": 3}, "seeds: 3; expected one or more different integers"),
        ({"seeds": "12"}, "seeds: '12'; expected one or more different integers"),
        ({"seeds": torch.arange(2)}, r"seeds: \[tensor\(0\), tensor\(1\)\]; expected one or more different integers"),
        ({"seeds": [-1]}, "trainer.seed: must be at least 0"),
        ({"sweep": ["algorithm.cfg.gamma"]}, "sweep: .* expected a dict from dotted keys to lists of values"),
        ({"sweep": {"trainer.seed": [1]}}, "sweep: trainer.seed cannot be swept; pass the seeds as the argument seeds"),
        ({"sweep": {"algorithm.cfg.learning_rate": 0.1}}, "learning_rate is 0.1; expected a list of values"),
        ({"sweep": {"algorithm.cfg.learning_rate": "0.1"}}, "learning_rate is '0.1'; expected a list of values"),
        ({"sweep": {"algorithm.cfg.learning_rate": []}}, "expected a list of values"),
        ({"sweep": {"algorithm.cfg.learning_rate": [0.1, 0.1]}}, "two runs would have the name learning_rate_0.1_seed"),
        ({"sweep": {"algorithm.cfg.learning_rat": [0.1]}}, "learning_rat: unknown key; did you mean 'learning_rate'"),
        ({"runs_per_call": 0}, "runs_per_call: 0; expected at least 1"),
    ],
)
def test_bad_arguments_have_one_clear_line(options, message):
    with pytest.raises(ecrl.ConfigError, match=message):
        many(small(), **({"seeds": [0]} | options))


def test_a_fault_of_any_run_is_reported_before_a_folder_is_made(tmp_path):
    with pytest.raises(ecrl.ConfigError, match="gamma: must be at most 1"):
        many(small(), run_dir=tmp_path, sweep={"algorithm.cfg.gamma": [0.9, 2.0]})
    hidden = [[8] * size for size in (1, 200)]
    with pytest.raises(ecrl.ConfigError, match="folder has at most 255; sweep fewer keys or shorter values"):
        many(small(), seeds=[0], run_dir=tmp_path, sweep={"policy.actor.network_cfg.hidden_sizes": hidden[1:]})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("runs_per_call", [1, None])
def test_a_fault_of_a_later_run_is_reported_before_the_first_run_trains(tmp_path, runs_per_call):
    sweep = {"trainer.best_eval_metric": ["eval/avg_reward", "eval/success_rate"]}
    cfg = small(**{"trainer.enable_eval": True, "trainer.num_eval_episodes": 1})
    with pytest.raises(ecrl.ConfigError, match="best_eval_metric: evaluations do not log 'eval/success_rate'"):
        many(cfg, run_dir=tmp_path, sweep=sweep, runs_per_call=runs_per_call)
    assert not [*tmp_path.rglob("config.json")]


def test_a_folder_of_another_config_is_refused(tmp_path):
    many(small(), seeds=[0], run_dir=tmp_path)
    with pytest.raises(ecrl.ConfigError, match="holds a run with another config; choose another run_dir"):
        many(small(**{"algorithm.cfg.gamma": 0.5}), seeds=[0], run_dir=tmp_path)


def test_names_of_keys_with_one_last_part_are_long():
    names = [name for name, _ in module._combinations([3], {"policy.actor.x": [1], "policy.critic.x": [[2, 3]]})]
    assert names == ["policy.actor.x_1_policy.critic.x_2-3_seed_3"]
    assert _label(None) == "null" and _label("gymnasium:A/B") == "gymnasium-A-B"


def test_names_keep_signs_and_do_not_depend_on_the_order_of_the_keys():
    labels = [_label(value) for value in (-0.5, 0.5, [-1, 1], [1, 1], [1, -1], {"name": "linear"}, "", "/")]
    assert labels == ["-0.5", "0.5", "-1-1", "1-1", "1--1", "name-linear", "", ""]
    sweep = {"trainer.num_envs": [4], "env.cfg.gravity": [1.0, 2.0]}
    one, other = (module._combinations([0], dict(items)) for items in (sweep.items(), reversed(sweep.items())))
    assert one == other and [name for name, _ in one] == [f"gravity_{g}_num_envs_4_seed_0" for g in ("1.0", "2.0")]


def test_an_unknown_name_suggests_a_known_one():
    runs = many(small(**{"trainer.iterations": 1}), seeds=[5])
    assert runs["seed_5"] is runs[0] and isinstance(runs, Members) and len(runs[:1]) == 1
    with pytest.raises(UserError, match="no run 'seed_6'; did you mean 'seed_5'"):
        runs["seed_6"]


def test_a_failed_save_warns_and_loses_nothing(tmp_path, monkeypatch):
    def failing(*args, **options):
        raise ecrl.errors.CheckpointError("the disk is full")

    monkeypatch.setattr("ecrl.run.checkpointing.write", failing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = many(small(), run_dir=tmp_path)
    texts = [str(warning.message) for warning in caught]
    assert all(any(f"seed_{seed}: the disk is full" in text for text in texts) for seed in (0, 1)), texts
    assert [int(run.state["sample_step"]) for run in runs] == [128, 128]


def test_progress_of_runs_that_train_one_by_one_names_them(capsys):
    train_many(small(**{"env": "gymnasium:CartPole-v1", "trainer.iterations": 1}), seeds=[3, 5])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("seed_")] == ["seed_3", "seed_5"] and len(lines) == 4


def test_progress_shows_means(capsys):
    train_many(small(), seeds=[0, 1])
    out = capsys.readouterr().out
    assert "128/128" in out and "return" in out
