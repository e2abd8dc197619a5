"""The frame of the benchmarks: fair turns, clear failures, right arithmetic, complete results."""

import doctest
import json
import re
import subprocess
import sys
from importlib import import_module

import jsonschema
import pytest

import benchmarks.__main__ as command
from benchmarks import end_to_end, minatar, off_policy, pairs, recurrent, report, solved
from benchmarks.pairs import ROOT, Contestant, Failure, Result, available, race, ratios, summary
from ecrl.cli import commands
from ecrl.cli import main as cli
from ecrl.errors import UserError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pins processes to cores")


def stand_in(function, name=None, env=None, **args):
    return Contestant(name or function, f"tests.support.fake_contestants:{function}", args, env or {})


def result(name, *rates, error=None):
    return Result(name, list(rates), 1.0, {"python": "3"}, 10.0, error)


@pytest.fixture
def exact_sleep(monkeypatch):
    """Let a sleeper's unit of work take exactly the seconds that it sleeps, however loaded the machine is."""

    def answer(worker, times, real=pairs.run_units):
        answer_data, seconds = real(worker, times), times * SLEEP_S[worker.name]
        assert answer_data["seconds"] >= 0.99 * seconds
        return answer_data | {"seconds": seconds}

    monkeypatch.setattr(pairs, "run_units", answer)


SLEEP_S = {"fast": 0.01, "slow": 0.03, "a": 0.01, "b": 0.05}


def test_a_race_finds_the_ratio_of_two_speeds(exact_sleep):
    fast, slow = race(
        [stand_in("sleeper", "fast", seconds=0.01), stand_in("sleeper", "slow", seconds=0.03)], seconds=0.1
    )
    assert (fast.name, slow.name, fast.error, slow.error) == ("fast", "slow", None, None)
    assert len(fast.rates) == len(slow.rates) == 5
    assert summary(ratios(fast, slow))["median"] == pytest.approx(3.0)
    assert summary(slow.rates)["median"] == pytest.approx(10 / 0.03)  # things per second, not units
    assert fast.peak_rss_mb > 1 and fast.setup_s > 0


def counted_turns(monkeypatch, contestants, **how):
    """The race's results and how often each did its work, turn by turn."""
    turns = []

    def turn(worker, times, real=pairs.run_units):
        turns.append((worker.name, times))
        return real(worker, times)

    monkeypatch.setattr(pairs, "run_units", turn)
    return race(contestants, **how), turns


def test_turns_alternate_and_last_about_as_long_as_asked(exact_sleep, monkeypatch):
    both = [stand_in("sleeper", "a", seconds=0.01), stand_in("sleeper", "b", seconds=0.05)]
    _, turns = counted_turns(monkeypatch, both, rounds=3, seconds=0.2)
    assert [name for name, _ in turns] == ["a", "a", "b", "b", *"abab"]  # each calibrates once
    assert turns[0][1] == turns[2][1] == 1
    assert (turns[1][1], turns[3][1]) == (20, 4)
    assert [times for _, times in turns[4:]] == [turns[1][1], turns[3][1]] * 2


def test_a_unit_longer_than_a_turn_is_not_done_twice_to_calibrate(monkeypatch):
    (one,), turns = counted_turns(monkeypatch, [stand_in("sleeper", seconds=0.05)], rounds=2, seconds=0.05)
    assert turns == [("sleeper", 1)] * 2
    assert len(one.rates) == 2


def test_a_dying_worker_is_one_line_and_the_others_continue():
    racers = [stand_in("sleeper", seconds=0.01), stand_in("refuses"), stand_in("dies", after=2)]
    good, refuses, dies = race(racers, rounds=3, seconds=0.02)
    assert good.error is None and len(good.rates) == 3
    assert refuses.error == "refuses: died with status 1; last line: RuntimeError: no such game"
    assert dies.error == "dies: died with status 7; last line: out of luck"
    assert len(dies.rates) == 1 + 1  # the rounds before


def test_a_silent_worker_times_out():
    message = r"hangs: no answer for 0.2 s; last line: \(nothing on stderr\)"
    with pairs.started([stand_in("hangs")], available()[:1]) as (worker,), pytest.raises(Failure, match=message):
        pairs.answer(worker, 0.2)
    assert worker.process.poll() is not None  # and it is gone


def test_all_threads_of_both_work_on_the_cores_of_the_race():
    core = available()[-1]
    for one in race([stand_in("places", "a"), stand_in("places", "b")], [core], rounds=1, seconds=0):
        assert one.error is None
    workers = [stand_in("places", "a"), stand_in("places", "b")]
    with pairs.started(workers, [core]) as started:
        ready = [pairs.await_ready(worker) for worker in started]
        pairs.run_rounds(started, ready, [core], 1, 0)
        assert [pairs.run_units(worker, 1)["count"] for worker in started] == [1 + 100 * core] * 2


def test_threads_are_as_many_as_cores():
    names = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
    with pairs.started([stand_in("environment", names=names)], available()[:1]) as (worker,):
        pairs.await_ready(worker)
        assert pairs.run_units(worker, 1)["count"] == 3
    assert "intra_op_parallelism_threads=1" in pairs.threads_env([0])["XLA_FLAGS"]
    assert pairs.threads_env([0, 1]) == {
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "OPENBLAS_NUM_THREADS": "2",
        "XLA_FLAGS": "",
        "JAX_PLATFORMS": "cpu",
    }


def test_ratios_are_of_rounds_not_of_medians():
    ecrl, other = result("ecrl", 1.0, 20.0, 6.0), result("peer", 1.0, 10.0, 1.0)
    assert ratios(ecrl, other) == [1.0, 2.0, 6.0]
    assert summary(ratios(ecrl, other)) == {"median": 2.0, "min": 1.0, "max": 6.0}


@pytest.mark.parametrize(
    ("library", "cores", "musts", "aims"),
    [
        ("rejax", 1, [1.0, 1.7, 2.0, 2.3], [1.3, 2.2, 2.5, 3.0]),
        ("rejax", 2, [1.0, 2.3, 2.5, 3.1], [1.3, 3.0, 3.2, 4.0]),
        ("SB3", 1, [8.0, 5.0, 5.0, 5.0], [None] * 4),
        ("TorchRL", 1, [8.0, 5.0, 5.0, 5.0], [None] * 4),
        ("LeanRL-style", 1, [8.0, 5.0, 5.0, 5.0], [None] * 4),
        ("CleanRL-style", 1, [8.0, 5.0, 5.0, 5.0], [None] * 4),
    ],
)
def test_what_must_be_reached_end_to_end(library, cores, musts, aims):
    for n, must, aim in zip((4, 64, 512, 2048), musts, aims, strict=True):
        just = end_to_end.row(result("ecrl", must), result(library, 1.0), cores, n)
        below = end_to_end.row(result("ecrl", 0.99 * must), result(library, 1.0), cores, n)
        assert (just["must"], just["aim"], just["met"], below["met"]) == (must, aim, True, False)


def test_a_failed_pair_is_a_row_with_its_error():
    row = end_to_end.row(result("ecrl", 1.0), result("SB3", error="SB3: died"), 1, 4)
    assert row == {"peer": "SB3", "cores": 1, "num_envs": 4, "error": "SB3: died"}


def runs(*seconds):
    return [{"solved_s": s, "budget_s": 2 * s, "steps": 4096, "form": "x"} if s else {"solved_s": s} for s in seconds]


def test_seconds_to_solved_are_compared_seed_by_seed():
    row = solved.row("solved", "ecrl cold", runs(10.0, 20.0, 40.0), "rejax cold", runs(10.0, 10.0, 10.0), 0.5)
    assert (row["ratio"], row["ratio_min"], row["ratio_max"], row["met"]) == (0.5, 0.25, 1.0, True)
    assert (row["ours_s"], row["peer_s"], row["seeds"]) == (20.0, 10.0, 3)


def test_a_seed_that_is_never_solved_is_reported():
    row = solved.row("solved", "ecrl cold", runs(10.0, None), "rejax cold", runs(10.0, 10.0), 0.5)
    assert row["error"] == "ecrl cold: not solved in its budget, seed 1"


def test_every_run_of_solved_is_in_one_lane_with_cold_before_warm():
    names = [name for lane in solved.RUNS.values() for name in lane]
    assert solved.runs_in_order() == ["ecrl cold", "rejax cold", "ecrl warm", "rejax warm", "ecrl off"]
    assert sorted(names) == sorted(solved.runs_in_order())
    assert {name for _, *pair, _ in solved.ROWS for name in pair} == {*names, *solved.ON_BOTH_CORES}


def test_rejax_solves_the_same_task_as_the_config():
    config = json.loads((ROOT / "benchmarks/cartpole_speed.json").read_text())
    trainer, numbers = config["trainer"], config["algorithm"]["cfg"]
    assert {
        "num_envs": trainer["num_envs"],
        "iterations": trainer["iterations"],
        "batch_size": numbers["batch_size"],
        "n_epochs": numbers["n_epochs"],
    } == solved.REJAX_NUMBERS
    assert (trainer["buffer_size"], numbers["learning_rate"], numbers["lr_scheduler"]) == (
        128,
        1e-3,
        {"name": "linear"},
    )


SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["subject", "date", "seconds", "command", "given", "machine", "versions", "rows"],
    "properties": {
        "subject": {"type": "string"},
        "date": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$"},
        "seconds": {"type": "number"},
        "command": {"type": "string", "pattern": "^python -m benchmarks"},
        "given": {"type": "string"},
        "machine": {
            "type": "object",
            "required": ["cpu", "cores", "ram_gb", "os"],
            "properties": {"cores": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
        },
        "versions": {"type": "object", "required": ["python", "torch", "numpy", "ecrl"]},
        "rows": {"type": "array", "minItems": 1, "items": {"type": "object"}},
    },
}


class Subject:
    """A subject with one row."""

    def __init__(self, **row):
        self.row = row

    def rows(self, quick, cores):
        return [{"quick": quick, "cores": len(cores), **self.row}]

    def figure(self, rows):
        return pytest.importorskip("matplotlib.figure").Figure()


def with_subjects(monkeypatch, **subjects):
    monkeypatch.setattr(command, "SUBJECTS", dict.fromkeys(subjects, "a test"))
    monkeypatch.setattr(command, "import_module", lambda name: subjects[name.removeprefix("benchmarks.")])
    monkeypatch.setattr(command, "NEEDED", ())


def test_results_hold_all_that_is_needed_to_repeat_them(monkeypatch, tmp_path, capsys):
    with_subjects(monkeypatch, one=Subject(ratio=1.5, ratios=[1.5], met=False), two=Subject(ratio=None))
    assert command.run(quick=True, only=("one",), out=tmp_path / "deep" / "er")
    saved = json.loads((tmp_path / "deep/er/one.json").read_text())
    jsonschema.validate(saved, SCHEMA)
    assert saved["rows"] == [{"quick": True, "cores": len(available()), "ratio": 1.5, "ratios": [1.5], "met": False}]
    assert saved["command"] == "python -m benchmarks --quick --only one"
    assert {path.name for path in (tmp_path / "deep/er").iterdir()} == {"one.json", "one.png", "one.svg"}
    table = capsys.readouterr().out
    assert "NO" in table and "1.5" in table and "[1.5]" not in table


def test_the_commit_is_marked_where_the_source_differs_from_it_not_the_results(monkeypatch, tmp_path):
    source, result = tmp_path / "source.py", tmp_path / "benchmarks" / "results" / "row.json"
    result.parent.mkdir(parents=True)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert report.versions()["ecrl"] is None
    for path in (source, result):
        path.write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for args in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *args], cwd=tmp_path, check=True)
    result.write_text("2")
    clean = report.versions()["ecrl"]
    source.write_text("2")
    assert len(clean) == 40 and report.versions()["ecrl"] == f"{clean}+"


def test_a_failure_is_in_the_table_and_the_rest_runs(monkeypatch, tmp_path, capsys):
    with_subjects(monkeypatch, one=Subject(error="SB3: died"), two=Subject(ratio=1.0))
    assert not command.run(out=tmp_path)
    assert "SB3: died" in capsys.readouterr().out
    assert (tmp_path / "two.json").exists()


def test_the_columns_are_what_fits_in_a_table():
    rows = [{"a": 1, "rates": [1.0]}, {"a": 2, "error": "x", "b": 3}]
    assert report.columns(rows) == ["a", "b", "error"]


@pytest.mark.parametrize("module", [pairs, report, end_to_end, off_policy, recurrent, minatar, solved])
def test_the_examples_in_docstrings_hold(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0 and outcome.failed == 0


@pytest.mark.parametrize(
    ("page", "subject", "cells"),
    [("memory", "recurrent", ("num_envs",)), ("images", "minatar", ("game", "network"))],
)
def test_a_page_has_the_ratios(page, subject, cells):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{subject}.json").read_text())["rows"]
    assert rows
    for row in rows:
        names = " | ".join(str(row[cell]).replace("_", " ") for cell in cells)
        line = f"| {names} | {row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f}) |"
        assert f"\n{line}\n" in text, f"docs/{page}.md has no line {line}"


@pytest.mark.parametrize("name", command.SUBJECTS)
def test_a_picture_is_that_of_the_figures_beside_it(name, tmp_path):
    """Every word, mark and place is the same. Another matplotlib draws other pictures."""
    version, published = pytest.importorskip("matplotlib").__version__, ROOT / "benchmarks" / "results" / name
    if f"Matplotlib v{version}," not in (drawn := published.with_suffix(".svg").read_text()):
        pytest.skip(f"drawn by another matplotlib than {version}")
    rows = json.loads(published.with_suffix(".json").read_text())["rows"]
    command.write_picture(import_module(f"benchmarks.{name}").figure(rows), tmp_path / name)
    own_words, own_places = svg_parts((tmp_path / name).with_suffix(".svg").read_text())
    words, places = svg_parts(drawn)
    assert own_words == words, "draw it anew"
    assert own_places == pytest.approx(places, abs=1e-2), "draw it anew"


def svg_parts(text):
    """Return the text of a picture without its numbers, and the numbers. Names made of hashes are left out.

    The rounding of numbers, and so the hashes, depend on the processor.
    """
    text = re.sub(r"\b[a-z][0-9a-f]{10}\b", "hash", text)
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    return re.sub(number, "number", text), [float(x) for x in re.findall(number, text)]


def test_quick_runs_the_quick_subjects(monkeypatch, tmp_path):
    names = list(command.SUBJECTS)
    with_subjects(monkeypatch, **{name: Subject(ratio=1.0) for name in names})
    assert command.run(quick=True, out=tmp_path / "quick") and command.run(out=tmp_path / "full")
    assert {path.stem for path in (tmp_path / "quick").glob("*.json")} == set(command.QUICK)
    assert {path.stem for path in (tmp_path / "full").glob("*.json")} == set(names)


def test_a_quick_run_leaves_out_the_eager_run_and_the_runs_on_both_cores(monkeypatch):
    monkeypatch.setattr(solved, "run", lambda name, seed, caches, cores: {**runs(1.0)[0], "form": f"{name} {cores}"})
    for cores in ([0], [0, 1]):
        rows = solved.rows(True, cores)
        assert rows and all("ecrl off" not in (row["ours"], row["peer"]) for row in rows)
        assert all(row["ours"] not in solved.ON_BOTH_CORES for row in rows)
    assert len(solved.rows(False, [0])) == len(solved.ROWS) - 1, "no row of both cores"
    both = solved.rows(False, [0, 1])
    assert len(both) == len(solved.ROWS) and both[-1]["form"] == "ecrl background [0, 1]"


def test_each_run_of_solved_has_its_form_and_an_empty_cache_unless_it_is_warm(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(solved, "run_in_process", lambda *call: calls.append(call) or {})
    for name in (*solved.runs_in_order(), *solved.ON_BOTH_CORES):
        solved.run(name, 3, tmp_path, [0])
    forms = [args.get("compile") for _, args, _, _ in calls]
    assert forms == ["auto", None, "auto", None, "off", "background", None]
    caches = ["".join(sorted(env.values())) for *_, env in calls]
    assert [caches.index(cache) for cache in caches] == [0, 1, 0, 1, 0, 5, 6]


@pytest.mark.parametrize("name", command.SUBJECTS)
def test_every_subject_is_a_file_with_a_description(name):
    source = (ROOT / "benchmarks" / f"{name}.py").read_text()
    assert "\ndef rows(quick: bool, cores: Sequence[int])" in source and "\ndef figure(rows: " in source


def test_wrong_calls_are_one_line(monkeypatch):
    with pytest.raises(UserError, match=r"^--only speed: no such subject; known: end_to_end, "):
        command.run(only=("speed",))
    monkeypatch.setattr(command, "NEEDED", ("rejax_is_not_here", "json"))
    with pytest.raises(
        UserError, match=r"^benchmarks need rejax_is_not_here: install with: pip install -e '.\[bench\]'$"
    ):
        command.run()


def exit_status(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["ecrl", *args])
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        cli.main()
    except SystemExit as stop:
        return stop.code
    return 0


def test_ecrl_bench_runs_them(monkeypatch, tmp_path):
    with_subjects(monkeypatch, one=Subject(ratio=1.0), two=Subject(error="died"))
    assert exit_status(monkeypatch, "bench", "--quick", "--only", "one", "--out", str(tmp_path)) == 0
    assert json.loads((tmp_path / "one.json").read_text())["rows"][0]["quick"] is True
    assert exit_status(monkeypatch, "bench", "--only", "two", "--out", str(tmp_path)) == 1


def test_ecrl_bench_without_the_source_tree_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(commands, "__file__", str(tmp_path / "ecrl" / "cli" / "commands.py"))
    assert exit_status(monkeypatch, "bench") == 2
    stderr = capsys.readouterr().err
    assert (
        stderr
        == f"ecrl bench: no benchmarks folder next to {tmp_path / 'ecrl'}; run it from a checkout of the source\n"
    )


def test_ecrl_bench_names_its_faults_from_any_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ecrl", "bench", "--only", "speed"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no such subject" in done.stderr or "pip install -e '.[bench]'" in done.stderr


@pytest.mark.long
@pytest.mark.ref
def test_a_real_pair_end_to_end(tmp_path):
    pytest.importorskip("rejax")
    (row,) = end_to_end.on_cores(available()[:1], ("rejax",), (4,), quick=True)
    assert "error" not in row, row
    assert 0.05 < row["ratio"] < 50
    assert len(row["ecrl_rates"]) == len(row["peer_rates"]) == 5
    (axes,) = end_to_end.figure([row]).axes
    assert axes.lines[0].get_label() == "rejax, 1 core"


@pytest.mark.long
@pytest.mark.ref
@pytest.mark.parametrize(
    ("module", "name"), [("stable_baselines3", "sb3"), ("torchrl", "torchrl"), ("torch", "cleanrl")]
)
def test_slow_libraries_learn(module, name):
    """Returns rise from the 20 steps of a random policy. A separate process hides the warnings of the libraries."""
    pytest.importorskip(module)
    code = f"from benchmarks.other_libraries.{name}_ppo import iterations\n"
    code += "for i, r in zip(range(12), iterations(32)): print(r)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    numbers = [float(line) for line in done.stdout.splitlines() if "[" not in line]
    assert len(numbers) == 12 and numbers[0] < 40 and max(numbers[-3:]) > 80
