"""Several iterations per record (`trainer.log_freq`): equal bits, fewer records, and one call for all of them."""

import json
from contextlib import suppress
from math import isfinite
from types import SimpleNamespace

import pytest
import torch
from support.continuous_agents import continuous
from support.long_cases import long_except
from support.replay_agent import replaying
from support.small_runs import last_state, same, small
from tensordict import TensorDict

import ecrl
from ecrl.compile.jit import compilations_of
from ecrl.config import load_config
from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.loop import iteration, signals
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, iterations, train_iter
from ecrl.pytree import flatten
from ecrl.run import compile_ahead as compile_ahead_module
from ecrl.run.checkpoint import latest
from ecrl.run.compile_ahead import compile_ahead
from ecrl.run.resume import pending_evaluation, resume
from ecrl.run.train import train
from ecrl.run.train_many import train_many

SIX = {"trainer.iterations": 6}


def records(cfg, state=None) -> list:
    """The records, with clones of the states, because a later iteration writes to buffers."""
    every = train_iter(init_state(cfg) if state is None else state, cfg)
    return [{**record, "state": record["state"].clone()} for record in every]


def assert_same_records(few: list, every: list, log_freq: int) -> None:
    """Records of several iterations have the logs and the states of the last iteration."""
    kept = [record for i, record in enumerate(every) if (i // 2 + 1) % log_freq == 0]
    assert [r["log_type"] for r in few] == [r["log_type"] for r in kept]
    assert [r["sample_step"] for r in few] == [r["sample_step"] for r in kept]
    for one, other in zip(few, kept, strict=True):
        assert same(one["state"], other["state"]) and one["taken"] == log_freq * other["taken"]
        assert one["logs"].keys() == other["logs"].keys()
        for name, log in one["logs"].items():
            assert torch.equal(log.nan_to_num(-7.0), other["logs"][name].nan_to_num(-7.0)), name


@pytest.mark.parametrize("log_freq", [2, 3, 6])
@pytest.mark.parametrize(
    "cfg",
    [small(**SIX), small(**SIX, **{"trainer.finite_guard": "off"}), replaying(**SIX)],
    ids=["ppo", "no guard", "replay buffer"],
)
def test_records_of_several_iterations_are_those_of_the_last_iteration(cfg, log_freq):
    few = records(cfg.replace(**{"trainer.log_freq": log_freq}))
    assert len(few) == 2 * 6 // log_freq
    assert_same_records(few, records(cfg), log_freq)


@pytest.mark.usefixtures("traced_or_compiled")
@pytest.mark.parametrize("guard", long_except(["skip"], ["stop", "skip", "off"]))
def test_a_compiled_run_has_one_call_for_all_iterations_of_a_record(guard):
    cfg = small(**SIX, **{"trainer.compile": "on", "trainer.finite_guard": guard, "policy.normalize_obs": True})
    grouped = cfg.replace(**{"trainer.log_freq": 3})
    run = build(grouped)
    few = [*iterations(run, init_state(grouped), grouped)]
    assert [one.text for one in compilations_of(run.jit)] == ["_iterations_of_leaves: first call"]
    assert_same_records(few, records(cfg), 3)


@pytest.mark.usefixtures("traced_or_compiled")
def test_the_calls_of_a_record_are_counted(monkeypatch):
    counts, bound = [], iteration._bound

    def counted(fn, run, tf32, guard, structure, count=1):
        call = bound(fn, run, tf32, guard, structure, *[count] * (count > 1))
        return lambda *args: (counts.append(count), call(*args))[1]

    monkeypatch.setattr(iteration, "_bound", counted)
    last_state(small(**SIX, **{"trainer.compile": "on", "trainer.log_freq": 3}))
    assert counts == [3, 3]
    counts.clear()
    last_state(small(**SIX, **{"trainer.compile": "off", "trainer.log_freq": 3}))
    last_state(replaying(**SIX, **{"trainer.compile": "on", "trainer.log_freq": 3}))
    assert counts == [1] * 12, "eager runs, and runs with buffers, have one call for each iteration"


@pytest.mark.parametrize("make", [small, replaying])
def test_a_state_between_two_records_first_trains_to_the_next_record(make):
    cfg = make(**SIX)
    middle = records(cfg)[1]["state"]  # after one iteration
    few = records(cfg.replace(**{"trainer.log_freq": 3}), middle)
    assert [r["taken"] * 6 // few[-1]["sample_step"] for r in few] == [2, 2, 3, 3]
    assert same(few[-1]["state"], last_state(cfg))


def test_skipped_steps_are_counted_over_all_iterations_of_a_record():
    cfg = small(**SIX, **{"trainer.finite_guard": "skip", "algorithm.cfg.learning_rate": 3e38})
    with pytest.warns(UserWarning, match="gradient steps are left out"):
        every = [r["logs"]["skipped_steps"] for r in records(cfg) if r["log_type"] == "train"]
    with pytest.warns(UserWarning, match="gradient steps are left out"):
        few = records(cfg.replace(**{"trainer.log_freq": 3}))
    assert [r["logs"]["skipped_steps"] for r in few if r["log_type"] == "train"] == [sum(every[:3]), sum(every[3:])]
    assert sum(every[:3]) > max(every[:3])


def test_logs_of_a_delayed_actor_have_its_last_update():
    cfg = continuous("td3", **{"algorithm.cfg.policy_delay": 2, "trainer.buffer_size": 1, "trainer.iterations": 24})

    def learning(cfg, name):
        logs = [r["logs"] for r in records(cfg) if r["log_type"] == "train"]
        return [float(one[name]) for one in logs if name in one]

    every, few = (learning(cfg.replace(**{"trainer.log_freq": n}), "policy_loss") for n in (1, 2))
    assert sum(map(isfinite, every)) == len(every) / 2 == len(few), "every second iteration updates the actor"
    assert few == [loss for loss in every if isfinite(loss)]
    assert learning(cfg.replace(**{"trainer.log_freq": 2}), "q_loss") == learning(cfg, "q_loss")[1::2]


def test_one_loop_combines_the_logs_of_its_iterations(monkeypatch):
    nan = torch.nan
    values = {"loss": [1.0, 2.0, 3.0], "late": [4.0, 5.0, nan], "never": [nan, nan, nan], "skipped_steps": [1, 0, 2]}
    values = {name: torch.tensor(x) for name, x in values.items()}

    def one(run, guard, structure, leaves, borrowed):
        index = leaves[0]
        logs = {"train": {name: x[index] for name, x in values.items()}, "collect": {"return": index.float()}}
        return [index + 1], None, None, logs, torch.stack([index == 1, index > 5])

    monkeypatch.setattr(iteration, "_iteration_of_leaves", one)
    run = SimpleNamespace(scan=scan, algorithm=SimpleNamespace(delayed=("late", "never")))
    leaves, structure = flatten(TensorDict({"index": torch.tensor(0)}, []))
    _, state, _, logs, nonfinite = iteration._iterations_of_leaves(run, "stop", structure, 3, leaves, None)
    assert state["index"] == 3 and nonfinite.tolist() == [True, False] and logs["collect"] == {"return": 2.0}
    train = {name: float(log) for name, log in logs["train"].items()}
    assert not isfinite(train.pop("never")) and train == {"loss": 3.0, "late": 5.0, "skipped_steps": 3.0}
    steps = [{name: x[i] for name, x in values.items()} for i in range(3)]
    combined = {}
    for step in steps:
        combined = iteration._over_iterations(combined, step, ("late", "never"))
    assert (combined["late"], combined["skipped_steps"]) == (5.0, 3) and combined["never"].isnan()


def test_evaluations_and_checkpoints_wait_for_the_next_record(tmp_path):
    changes = {"trainer.enable_eval": True, "trainer.eval_freq": 64, "trainer.save_freq": 32, "trainer.log_freq": 3}
    cfg = small(**SIX, **changes)
    _, history = train(init_state(cfg), cfg, tmp_path / "run", progress=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seen = [(row["log_type"], row["sample_step"]) for row in rows]
    assert seen == [(kind, step) for step in (96, 192) for kind in ("collect", "train", "evaluate")]
    assert [row["sample_step"] for row in history] == [96, 192]
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").glob("step_*")) == ["step_192", "step_96"]


def test_an_interrupted_evaluation_is_due_once(tmp_path, monkeypatch):
    changes = {"trainer.enable_eval": True, "trainer.eval_freq": 32, "trainer.log_freq": 2}
    cfg = small(**{"trainer.iterations": 4}, **changes)
    whole = train(init_state(cfg), cfg, tmp_path / "whole", progress=False)[0]
    few = cfg.replace(**{"trainer.iterations": 2})
    train(init_state(few), few, tmp_path / "run", progress=False)
    state, _ = ecrl.train_from_config(resume_from=tmp_path / "run", overrides={"trainer.iterations": 4}, force=True)
    assert same(state, whole)
    first, second = (
        [(row["log_type"], row["sample_step"]) for row in map(json.loads, path.read_text().splitlines())]
        for path in (tmp_path / name / "metrics.jsonl" for name in ("whole", "run"))
    )
    assert first == second and latest(tmp_path / "run").name == "step_128"


def test_the_first_record_of_a_run_that_begins_at_a_trained_state_has_no_pending_evaluation(tmp_path):
    cfg = small(**SIX, **{"trainer.enable_eval": True, "trainer.eval_freq": 64})
    begun = last_state(cfg.replace(**{"trainer.iterations": 2}))
    few = cfg.replace(**{"trainer.iterations": 3})
    state, _ = train(begun, few, tmp_path / "run", progress=False)  # 96 steps; the evaluation was due at 64
    assert pending_evaluation(state, few, tmp_path / "run") is None


def interrupt_call(monkeypatch, number, error):
    """Raise `error` in call `number` of an iteration, counted from 1."""
    bound, calls = iteration._bound, []

    def counted(*args):
        call = bound(*args)

        def interrupted(*leaves):
            calls.append(1)
            if len(calls) == number:
                raise error
            return call(*leaves)

        return interrupted

    monkeypatch.setattr(iteration, "_bound", counted)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("the environment failed")])
@pytest.mark.parametrize("make", [small, replaying])
def test_an_error_between_two_records_loses_no_iteration(make, error, tmp_path, monkeypatch):
    cfg = make(**SIX, **{"trainer.log_freq": 3})
    with monkeypatch.context() as patch, suppress(RuntimeError):
        interrupt_call(patch, 6, error)
        train(init_state(cfg), cfg, tmp_path / "run", progress=False)
    state, _ = resume(tmp_path / "run")
    assert int(state["sample_step"]) == 5 * cfg.trainer.buffer_size * cfg.trainer.num_envs
    assert same(train(state, cfg, tmp_path / "run", progress=False)[0], last_state(cfg))


@pytest.mark.parametrize("many", [False, True])
def test_a_run_that_is_asked_to_stop_does_not_wait_for_the_next_record(many, monkeypatch):
    cfg = small(**SIX, **{"trainer.log_freq": 3})
    with monkeypatch.context() as patch:
        patch.setattr(signals, "_asked", [])
        patch.setattr(signals.signal, "setitimer", lambda *args: None)
        bound = iteration._bound

        def signalled(*args):
            call, calls = bound(*args), []

            def counted(*leaves):
                calls.append(1)
                if len(calls) == 4:
                    signals._asked.append(signals.signal.SIGTERM)
                return call(*leaves)

            return counted

        patch.setattr(iteration, "_bound", signalled)
        if many:
            histories = [run.history for run in train_many(cfg, seeds=[0, 1], progress=False)]
        else:
            histories = [train(init_state(cfg), cfg, progress=False)[1]]
    for history in histories:
        assert [row["sample_step"] for row in history] == [96, 128]


def test_an_interruption_of_train_many_loses_no_iteration(monkeypatch):
    cfg = small(**SIX, **{"trainer.log_freq": 3})
    with monkeypatch.context() as patch:
        interrupt_call(patch, 6, KeyboardInterrupt)
        runs = train_many(cfg, seeds=[0, 1], progress=False)
    assert [[row["sample_step"] for row in run.history] for run in runs] == [[96, 160]] * 2


def test_runs_of_train_many_may_differ_in_the_number_of_iterations_per_record():
    runs = train_many(small(**SIX), seeds=[0], sweep={"trainer.log_freq": [6, 3]}, progress=False)
    assert [[row["sample_step"] for row in run.history] for run in runs] == [[192], [96, 192]]


@pytest.mark.parametrize("cfg", [small(**SIX), small(**SIX, **{"trainer.finite_guard": "skip"})])
def test_train_many_yields_the_records_of_train(cfg):
    grouped = cfg.replace(**{"trainer.log_freq": 3})
    few, every = (train_many(one, seeds=[0, 1], progress=False) for one in (grouped, cfg))
    for one, other in zip(few, every, strict=True):
        assert same(one.state, other.state)
        assert [row["sample_step"] for row in one.history] == [96, 192]
        assert [row["loss"] for row in one.history] == [row["loss"] for row in other.history][2::3]


def test_a_run_of_train_many_that_stops_keeps_its_last_iterations():
    sweep, rates = {"algorithm.cfg.learning_rate": [0.01, 1e38]}, {}
    for log_freq in (1, 6):
        cfg = small(**SIX, **{"trainer.log_freq": log_freq})
        with pytest.warns(UserWarning, match="NaN or infinity in"):
            rates[log_freq] = train_many(cfg, seeds=[0], sweep=sweep, progress=False)
    for one, other in zip(rates[6], rates[1], strict=True):
        assert same(one.state, other.state)


@pytest.mark.usefixtures("traced_or_compiled")
def test_the_graph_of_a_record_is_compiled_ahead():
    cfg = small(**SIX, **{"trainer.compile": "on", "trainer.log_freq": 2})
    assert [one.text for one in compile_ahead(cfg)] == ["_iterations_of_leaves: first call"]


@pytest.mark.usefixtures("traced_or_compiled")
def test_the_evaluation_after_the_last_phase_is_compiled_ahead(monkeypatch):
    evaluated, before = [], compile_ahead_module.with_evaluation

    def counted(records, cfg, videos, first, run):
        evaluated.append(first["sample_step"])
        return before(records, cfg, videos, first, run)

    monkeypatch.setattr(compile_ahead_module, "with_evaluation", counted)
    changes = {"trainer.compile": "on", "trainer.enable_eval": True, "algorithm.cfg.learning_starts": 24}
    compile_ahead(replaying(**SIX, **changes, **{"trainer.log_freq": 6}))
    assert evaluated == [36], "after the first iteration that learns"


def test_the_number_of_iterations_must_be_a_multiple():
    message = r"trainer\.log_freq: 4 does not divide trainer\.iterations, which is 6; use a divisor"
    with pytest.raises(ConfigError, match=message):
        small(**SIX, **{"trainer.log_freq": 4})
    with pytest.raises(ConfigError, match="250; use a divisor"):
        load_config({"env": {"id": "cartpole"}, "algorithm": {"name": "ppo"}, "trainer": {"log_freq": 7}})
