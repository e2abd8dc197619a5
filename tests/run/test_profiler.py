"""The profiler changes no number, and its phases add up to the time there was."""

import itertools
import json
import time
import warnings
from functools import partial

import pytest
import torch
from support.small_runs import NET, last_state, same, small

from ecrl.loop.iteration import init_state, train_iter
from ecrl.run import profiler
from ecrl.run.loggers import with_jsonl
from ecrl.run.profiler import Times, phase, report, table, timed_records, with_profile, with_timers

ACTOR = {"name": "actor_only", "actor": NET}
RUNS = {
    "ppo": {"policy.normalize_obs": True},
    "grpo": {"algorithm": {"name": "grpo", "cfg": {"group_size": 2, "batch_size": 10, "n_epochs": 2}}, "policy": ACTOR},
    "apg": {"env.name": "point_mass", "algorithm": {"name": "apg"}, "policy": ACTOR},
    "gymnasium": {"env": {"name": "gymnasium:CartPole-v1"}},
}
PHASES = {
    "ppo": {"collect/draw", "collect/policy", "collect/env", "collect/critic", "update/learn"},
    "grpo": {"collect/draw", "collect/policy", "collect/env", "update/learn"},
    "apg": {"iterate/iterate"},  # the steps and their gradient are one loop
    "gymnasium": {"collect/draw", "collect/policy", "collect/env", "collect/critic", "update/learn"},
}


def profiled(cfg, folder):
    times = Times()
    records = timed_records(times, "loop", train_iter(init_state(cfg), cfg, partial(with_timers, times)))
    *_, last = with_profile(records, times, folder)
    return times, last["state"]


@pytest.mark.parametrize("name", list(RUNS))
def test_phases_are_timed_and_numbers_are_those_of_an_unprofiled_run(name, tmp_path, capsys):
    cfg = small(**RUNS[name])
    times, state = profiled(cfg, tmp_path)
    plain = last_state(cfg)
    assert same(state.exclude("env"), plain.exclude("env"))
    assert torch.equal(state["env", "obs"], plain["env", "obs"])
    assert {"loop/" + p for p in PHASES[name]} <= {"/".join(path) for path in times.seconds}
    if name == "apg":
        assert len(times.seconds["loop", "iterate", "iterate"]) == cfg.trainer.iterations
        return
    steps = cfg.trainer.buffer_size * cfg.trainer.iterations
    assert len(times.seconds["loop", "collect", "policy"]) == steps
    assert len(times.seconds["loop", "collect", "env"]) == steps
    assert "loop" in capsys.readouterr().out


def test_a_phase_is_as_long_as_what_runs_in_it():
    times = Times()
    with phase(times, "out"):
        for _ in range(3):
            with phase(times, "in"):
                time.sleep(0.02)
        time.sleep(0.05)
    assert len(times.seconds["out", "in"]) == 3
    assert 0.06 <= sum(times.seconds["out", "in"]) < sum(times.seconds["out",]) - 0.05 + 1e-3
    assert times.inside == ()


def test_on_cuda_both_ends_of_a_phase_wait_for_the_device(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(time.perf_counter()))
    with phase(Times(), "update"):
        assert len(waited) == 1
    assert len(waited) == 2


def test_a_phase_that_raises_is_closed():
    times = Times()
    with pytest.raises(RuntimeError), phase(times, "out"), phase(times, "in"):
        raise RuntimeError
    assert times.inside == ()
    assert [len(calls) for calls in times.seconds.values()] == [1, 1]


def test_consumers_are_timed_without_those_below_them(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(profiler, "_now", lambda: now[0])

    def slow(records, seconds):
        for record in records:
            now[0] += seconds
            yield record

    times = Times()
    records = timed_records(times, "loop", slow(iter([{"n": 1}] * 3), 0.03))
    records = timed_records(times, "evaluation", slow(records, 0.06))
    for _ in timed_records(times, "logging", slow(records, 0.01)):
        now[0] += 0.02  # the caller's own time, which is nobody's
    took = {path[0]: sum(calls) for path, calls in times.seconds.items()}
    assert took == pytest.approx({"logging": 3 * 0.01, "loop": 3 * 0.03, "evaluation": 3 * 0.06})


def test_the_rows_of_a_phase_add_up_to_it():
    times = Times({("loop",): [5.0, 3.0], ("loop", "collect"): [2.0, 1.0], ("loop", "collect", "env"): [0.5, 0.25]})
    rows = {row["phase"]: row for row in report(times)}
    assert {name: row["seconds"] for name, row in rows.items()} == {
        "loop": 8.0,
        "loop/collect": 3.0,
        "loop/collect/env": 0.75,
        "loop/collect/other": 2.25,
        "loop/other": 5.0,
    }
    assert (rows["loop"]["first_seconds"], rows["loop"]["later_ms"], rows["loop"]["calls"]) == (5.0, 3000.0, 2)
    lines = table(report(times), 8.0).splitlines()
    assert [line.split()[:4] for line in lines[1:4]] == [
        ["loop", "2", "8.000", "100.0%"],
        ["collect", "2", "3.000", "37.5%"],
        ["env", "2", "0.750", "9.4%"],
    ]


def test_the_files_of_a_run_add_up_to_its_time_and_the_trace_names_the_phases(tmp_path, capsys, monkeypatch):
    ticks = itertools.count()  # each reading of this clock is a second later
    monkeypatch.setattr(profiler, "_now", lambda: float(next(ticks)))
    cfg, times = small(**{"trainer.iterations": 5}), Times()
    records = timed_records(times, "loop", train_iter(init_state(cfg), cfg, partial(with_timers, times)))
    records = timed_records(times, "logging", with_jsonl(records, tmp_path / "metrics.jsonl"))
    for _ in with_profile(records, times, tmp_path):
        pass
    report = json.loads((tmp_path / "profile" / "rank_0.json").read_text())
    seconds = {row["phase"]: row["seconds"] for row in report["phases"]}
    assert report["total_seconds"] == pytest.approx(seconds["loop"] + seconds["logging"])
    assert report["total_seconds"] < next(ticks)
    assert seconds["loop/collect"] + seconds["loop/update"] < seconds["loop"]
    collecting = ("draw", "policy", "env", "critic")
    assert sum(seconds[f"loop/collect/{name}"] for name in collecting) < seconds["loop/collect"]
    steps = cfg.trainer.iterations * cfg.trainer.buffer_size
    assert seconds["loop/collect/policy"] == seconds["loop/collect/env"] == steps
    assert min(row["seconds"] for row in report["phases"]) >= 0.0
    names = {
        event.get("name") for event in json.loads((tmp_path / "profile/trace_rank_0.json").read_text())["traceEvents"]
    }
    assert {"loop/collect/env", "loop/collect/policy", "loop/update/learn"} <= names
    assert "learn" in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["break", "raise"])
def test_a_run_that_is_stopped_or_fails_is_reported_too(ending, tmp_path, capsys):
    def failing(records):
        yield next(records)
        raise RuntimeError("from below")

    cfg, times = small(), Times()
    records = timed_records(times, "loop", train_iter(init_state(cfg), cfg, partial(with_timers, times)))
    made = with_profile(failing(records) if ending == "raise" else records, times, tmp_path)
    next(made)
    if ending == "break":
        made.close()
    else:
        with pytest.raises(RuntimeError, match="from below"):
            next(made)
    assert json.loads((tmp_path / "profile" / "rank_0.json").read_text())["total_seconds"] > 0
    assert not (tmp_path / "profile" / "trace_rank_0.json").exists()
    assert "; there is no trace (tracing starts after 2 train records)" in capsys.readouterr().out


@pytest.mark.parametrize("iterations", [2, 3])
def test_a_trace_has_at_least_one_iteration(iterations, tmp_path, capsys):
    cfg, times = small(**{"trainer.iterations": iterations}), Times()
    records = timed_records(times, "loop", train_iter(init_state(cfg), cfg, partial(with_timers, times)))
    for _ in with_profile(records, times, tmp_path):
        pass
    assert (tmp_path / "profile" / "trace_rank_0.json").exists() == (iterations == 3)
    assert ("there is no trace" in capsys.readouterr().out) == (iterations == 2)


def test_a_trace_that_cannot_be_written_is_reported_once(tmp_path, monkeypatch):
    def fail(self, path):
        raise RuntimeError("no room for the trace")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fail)
    cfg, times = small(**{"trainer.iterations": 4}), Times()
    records = timed_records(times, "loop", train_iter(init_state(cfg), cfg, partial(with_timers, times)))
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in with_profile(records, times, tmp_path):
            pass
    texts = [str(w.message) for w in caught if "trace" in str(w.message)]
    assert texts == [f"{tmp_path}/profile/trace_rank_0.json: no room for the trace; the run goes on without this file"]
    assert json.loads((tmp_path / "profile" / "rank_0.json").read_text())["total_seconds"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_compiled_runs_are_timed_apart_too(tmp_path):
    cfg = small(**{"trainer.compile": "on", "trainer.iterations": 2, "policy.normalize_obs": True})
    times, state = profiled(cfg, tmp_path)
    plain = last_state(cfg)
    assert (state["params", "actor", "0.weight"] - plain["params", "actor", "0.weight"]).abs().max() < 1e-4
    assert {"loop/" + p for p in PHASES["ppo"]} <= {"/".join(path) for path in times.seconds}
    policy = times.seconds["loop", "collect", "policy"]
    assert policy[0] > 10 * sorted(policy)[len(policy) // 2]  # the first call compiles
