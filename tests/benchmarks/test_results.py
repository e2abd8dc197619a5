"""`ecrl bench results`: one file per seed that is measured once, faults and interrupts that lose nothing."""

import doctest
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import jsonschema
import pytest
from support.command_line import called

from benchmarks import leaderboard, learning, records, results, separate_process, tasks
from benchmarks.other_libraries.zoo import ZOO
from benchmarks.pairs import ROOT, available
from benchmarks.records import LIBRARIES, entries, standing
from benchmarks.tasks import CONFIGS, TASKS
from ecrl.errors import UserError
from ecrl.registry import did_you_mean

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pins processes to cores")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Replace the learner of CartPole; return a function that runs it and one that lists the called seeds."""
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / "cartpole_ppo.json").write_text((CONFIGS / "cartpole_ppo.json").read_text())
    own = LIBRARIES["ecrl"]
    for key in LIBRARIES.keys() - {"ecrl"}:
        monkeypatch.setitem(LIBRARIES, key, LIBRARIES[key]._replace(tasks=()))
    monkeypatch.setattr(results, "_PAUSE_S", 0.02)

    def run(learner="learns", seeds=None, minutes=None):
        learn = f"tests.support.fake_contestants:{learner}"
        monkeypatch.setitem(LIBRARIES, "ecrl", own._replace(learn=learn, tasks=("cartpole_ppo",)))
        return results.run((), seeds, minutes, tmp_path / "out", configs)

    def calls():
        path = configs / "cartpole_ppo.calls"
        return sorted(map(int, path.read_text().split())) if path.exists() else []

    return run, calls


def line_of(tmp_path):
    (line,) = [line for line in (tmp_path / "out/README.md").read_text().splitlines() if "`cartpole_ppo`" in line]
    return line.split(" | ")[2:4]


SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"const": "cartpole_ppo, ecrl"},
        "seed": {"const": 2},
        "hash": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
        "settings": {"type": "object", "required": ["library", "scores", "settings"]},
        "date": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$"},
        "command": {
            "type": "string",
            "pattern": "^python -m benchmarks.separate_process tests.support.fake_contestants:learns ",
        },
        "commit": {"type": ["string", "null"]},
        "machine": {"type": "object", "required": ["cpu", "cores", "ram_gb", "os"]},
        "versions": {"type": "object", "required": ["python", "torch", "numpy"]},
        "curve": {"type": "array", "minItems": 2, "items": {"required": ["steps", "seconds", "episodes", "return"]}},
        **{name: {"type": "number"} for name in ("train_s", "wall_s", "cpu_s")},
    },
}
SCHEMA["required"] = list(SCHEMA["properties"])


def test_a_seed_is_a_file_with_all_that_is_needed_to_repeat_it(small, tmp_path, capsys):
    run, _ = small
    assert run(seeds=3)
    assert sorted(p.name for p in (tmp_path / "out/runs/cartpole_ppo/ecrl").iterdir()) == ["0.json", "1.json", "2.json"]
    record = json.loads((tmp_path / "out/runs/cartpole_ppo/ecrl/2.json").read_text())
    jsonschema.validate(record, SCHEMA)
    assert record["settings"]["settings"]["trainer"] == {"num_envs": 16, "iterations": 960, "buffer_size": 32}
    assert record["settings"]["scores"] == {"env": "gymnasium:CartPole-v1", "episodes": [20, 100], "points": 40}
    assert record["machine"]["cores"][0] in available() and record["wall_s"] > 0
    stdout = capsys.readouterr().out.splitlines()
    assert "cartpole_ppo, ecrl, seed 2: return 492 in 1 s" in stdout
    assert stdout[-3:] == [
        str(tmp_path / "out" / name) for name in ("README.md", "cartpole_ppo.png", "cartpole_ppo.svg")
    ]


def test_what_is_finished_is_not_measured_again(small, tmp_path):
    run, calls = small
    assert run(seeds=2) and calls() == [0, 1]
    assert run(seeds=3) and calls() == [0, 1, 2]
    assert run(seeds=3) and calls() == [0, 1, 2]
    assert line_of(tmp_path) == ["20", "3 of 10"]


@pytest.mark.parametrize(("learner", "seeds"), [("learns", 10), ("learns_long", 3)])
def test_ten_seeds_where_one_takes_under_ten_minutes_else_three(small, learner, seeds):
    run, calls = small
    assert run(learner) and calls() == list(range(seeds))


def test_files_of_another_config_are_stale_and_measured_again(small, tmp_path):
    run, calls = small
    run(seeds=1)
    path = tmp_path / "configs/cartpole_ppo.json"
    data = json.loads(path.read_text())
    data["trainer"] |= {"exp_name": "renamed", "seed": 7}
    path.write_text(json.dumps(data))
    assert run(minutes=0) and line_of(tmp_path) == ["20", "1 of 10"]  # neither makes it another config
    data["algorithm"]["cfg"]["gamma"] = 0.97
    path.write_text(json.dumps(data))
    assert run(minutes=0) and line_of(tmp_path) == ["*not measured*, 1 stale", ""] and calls() == [0]
    assert not (tmp_path / "out/cartpole_ppo.png").exists()
    assert run(seeds=1) and line_of(tmp_path) == ["20", "1 of 10"] and calls() == [0, 0]


def test_no_minutes_measure_nothing(small, tmp_path):
    run, calls = small
    assert run(minutes=0) and calls() == []
    assert line_of(tmp_path) == ["*not measured*", ""]


def test_a_failing_seed_is_reported_and_the_others_are_saved(small, tmp_path, capsys):
    run, calls = small
    assert not run("learns_but_seed_1", seeds=3)
    assert calls() == [0, 2]
    died = "cartpole_ppo, ecrl, seed 1: tests.support.fake_contestants:learns_but_seed_1: died with status 1"
    assert f"{died}; last line: RuntimeError: out of luck" in capsys.readouterr().out
    assert line_of(tmp_path) == ["20", "2 of 10, 1 failed"]


def test_an_interrupt_keeps_what_is_finished_and_ends_the_rest(small, tmp_path, monkeypatch):
    run, calls = small
    monkeypatch.setattr(results, "available", lambda: available()[:1])
    before = signal.getsignal(signal.SIGTERM)
    hangs, sleep = tmp_path / "configs/cartpole_ppo.hangs", time.sleep

    def interrupt(seconds):
        sleep(seconds)
        if hangs.exists() and hangs.read_text():
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(results.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run("learns_but_seed_1_hangs", seeds=2)
    assert calls() == [0] and line_of(tmp_path) == ["20", "1 of 10"]
    assert not os.path.exists(f"/proc/{hangs.read_text()}")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_damaged_file_is_named(small, tmp_path):
    run, _ = small
    run(seeds=1)
    path = tmp_path / "out/runs/cartpole_ppo/ecrl/0.json"
    path.write_text("{")
    with pytest.raises(UserError, match=r"ecrl/0.json: not JSON: .*; remove it to measure it again"):
        run(seeds=1)


def test_every_entrys_first_seed_comes_before_anyones_second(tmp_path):
    first = entries(CONFIGS)[:3]
    jobs = results.missing(first, 2, tmp_path)
    assert [job.seed for job in jobs] == [0, 0, 0, 1, 1, 1] and [job.entry for job in jobs] == [*first, *first]


def test_the_hash_of_another_library_covers_its_settings_and_the_budget(small, tmp_path):
    path = tmp_path / "configs" / "cartpole_ppo.json"
    zoo, before = records.LIBRARIES["sb3"].settings, json.loads(path.read_text())
    assert zoo(path) == {"zoo": ZOO["cartpole_ppo"]._asdict(), "steps": 491_520}
    before["trainer"]["iterations"] = 60
    path.write_text(json.dumps(before))
    assert zoo(path)["steps"] == 30_720


@pytest.mark.slow
def test_a_real_config_end_to_end(tmp_path, monkeypatch):
    """Run two seeds of CartPole in separate processes, eager; afterwards nothing is left to run."""
    data = json.loads((CONFIGS / "cartpole_ppo.json").read_text())
    data["trainer"] |= {"num_envs": 4, "iterations": 2, "compile": "off"}
    data["algorithm"]["cfg"]["batch_size"] = 128
    (tmp_path / "cartpole_ppo.json").write_text(json.dumps(data))
    for key in LIBRARIES:
        tasks_of = ("cartpole_ppo",) if key == "ecrl" else ()
        monkeypatch.setitem(LIBRARIES, key, LIBRARIES[key]._replace(tasks=tasks_of))
    assert results.run((), 2, None, tmp_path / "out", tmp_path)
    (known,) = [standing(one, tmp_path / "out") for one in entries(tmp_path)]
    assert sorted(known.fresh) == [0, 1] and known.stale == 0
    assert [row["steps"] for row in known.fresh[0]["curve"]] == [128, 256]
    assert known.fresh[0]["curve"] != known.fresh[1]["curve"]
    assert known.fresh[0]["command"].startswith("python -m benchmarks.separate_process benchmarks.ecrl_runs:learn ")


def test_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    calls = []
    monkeypatch.setattr(results, "run", lambda *arguments: calls.append(arguments) or arguments[1] != 1)
    out = str(tmp_path)
    only = ("--only", "cartpole_ppo", "pendulum_ppo")
    assert called(monkeypatch, "bench", "results", *only, "--seeds", "2", "--minutes", "0.5", "--out", out) == 0
    assert called(monkeypatch, "bench", "results", "--seeds", "1") == 1
    assert calls == [
        (("cartpole_ppo", "pendulum_ppo"), 2, 0.5, tmp_path),
        ((), 1, None, ROOT / "benchmarks" / "results"),
    ]
    capsys.readouterr()
    for args, message in (
        (("results", "--quick"), "--quick works only with: ecrl bench speed; remove it"),
        (("--seeds", "1"), "--seeds and --minutes work only with: ecrl bench results; remove them"),
    ):
        assert called(monkeypatch, "bench", *args) == 2
        assert capsys.readouterr().err == message + "\n"


def test_wrong_calls_are_one_line(monkeypatch):
    with pytest.raises(UserError, match=r"^--only cartpole: no such config; did you mean 'cartpole_"):
        results.check(("cartpole",), None, None)
    assert did_you_mean("x", TASKS).startswith("known: ")
    with pytest.raises(UserError, match=r"^--seeds -1: expected 0 or more$"):
        results.check((), -1, None)
    with pytest.raises(UserError, match=r"^--minutes nan: expected 0 or more$"):
        results.check((), None, float("nan"))
    other = LIBRARIES["sb3"]._replace(tasks=("cartpole_ppo",), packages=("no_other_package",))
    monkeypatch.setitem(LIBRARIES, "other", other)
    with pytest.raises(UserError, match=r"^results need no_other_package: install with: pip install -e '.\[bench\]'$"):
        results.check(("cartpole_ppo",), None, None)
    results.check(("pendulum_ppo",), None, None)
    monkeypatch.setitem(LIBRARIES, "other", other._replace(packages=()))
    for key in LIBRARIES.keys() - {"ecrl"}:
        monkeypatch.setitem(LIBRARIES, key, LIBRARIES[key]._replace(packages=()))
    monkeypatch.setattr(results, "NEEDED", ("no_such_package", "json"))
    with pytest.raises(UserError, match=r"^results need no_such_package: install with: pip install -e '.\[bench\]'$"):
        results.check((), None, None)


@pytest.mark.parametrize("module", [tasks, learning, records, leaderboard])
def test_the_examples_in_docstrings_hold(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0 and outcome.failed == 0


def test_results_are_curves_for_ecrl_plot(small, tmp_path, monkeypatch, capsys):
    run, _ = small
    run(seeds=3)
    monkeypatch.chdir(tmp_path)
    paths = sorted((tmp_path / "out/runs/cartpole_ppo/ecrl").iterdir())
    assert called(monkeypatch, "plot", *paths, "--out", "p.svg") == 0
    assert "0.json: 490 after 20 env steps" in capsys.readouterr().out
    assert "cartpole_ppo, ecrl (3 seeds" in (tmp_path / "p.svg").read_text()


def test_a_stopped_function_is_gone():
    running = separate_process.begin("tests.support.fake_contestants:hangs", {}, available()[:1])
    separate_process.stop(running)
    assert running.process.poll() == -signal.SIGKILL and running.out.closed


def test_two_that_measure_into_one_folder_are_not_let(small, tmp_path):
    run, calls = small
    (tmp_path / "out").mkdir()
    code = f"""
import pathlib, time, ecrl.storage.atomic_files
with ecrl.storage.atomic_files.lock_folder(pathlib.Path({str(tmp_path / "out")!r})):
    print("held", flush=True)
    time.sleep(3600)
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline()
        with pytest.raises(
            UserError, match="out: another ecrl bench results is writing to it; wait for it to end, or set"
        ):
            run(seeds=1)
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    assert calls() == []


def test_the_end_of_the_terminal_is_an_interrupt_unless_it_is_ignored():
    for handler in (signal.SIG_IGN, signal.SIG_DFL):
        before = signal.signal(signal.SIGHUP, handler)
        try:
            ending = pytest.raises(KeyboardInterrupt) if handler is signal.SIG_DFL else nullcontext()
            with ending, results._signals_as_interrupt():
                os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is handler
        finally:
            signal.signal(signal.SIGHUP, before)


def test_a_seed_with_a_score_of_nan_fails_and_the_others_continue(small, tmp_path, capsys):
    run, calls = small
    assert not run("learns_but_seed_1_diverges", seeds=3)
    assert calls() == [0, 2] and line_of(tmp_path) == ["20", "2 of 10, 1 failed"]
    assert "cartpole_ppo, ecrl, seed 1: Out of range float values are not JSON compliant" in capsys.readouterr().out
    failure = json.loads((tmp_path / "out/runs/cartpole_ppo/ecrl/1.failed").read_text())
    assert failure["seed"] == 1 and failure["failure"].startswith("Out of range float values") and failure["command"]
    assert run(seeds=3) and line_of(tmp_path) == ["20", "3 of 10"], "it is tried again"
    assert not (tmp_path / "out/runs/cartpole_ppo/ecrl/1.failed").exists()


def test_a_seed_that_shared_its_core_is_reported():
    record = {"curve": [{"return": 5.0}], "train_s": 60.0, "wall_s": 100.0, "cpu_s": 95.0}
    (entry,) = [one for one in entries(CONFIGS) if one.name == "cartpole_ppo, ecrl"]
    assert results.record_line(entry, record) == "return 5 in 60 s"
    message = "return 5 in 60 s; had its core for 62% of the time; remove its file to measure it again"
    assert results.record_line(entry, record | {"cpu_s": 62.0}) == message
