"""Consumers: every record is passed on, numbers land where they belong, NaN is not written as a number."""

import itertools
import json
import resource
import signal
import threading
import time

import pytest
import torch
from support.log_records import NAMES, RECORDS, record
from support.small_runs import small

from ecrl.compile.jit import Compilation
from ecrl.run.evaluation import with_evaluation
from ecrl.run.loggers import _Speed, scalars, with_host_logs, with_jsonl, with_progress, with_scalars
from ecrl.run.profiler import Times, timed_records
from ecrl.run.trackers import with_tensorboard

LOGGERS = [
    with_host_logs,
    lambda r: with_progress(r, 0, 20),
    lambda r: with_jsonl(r, "metrics.jsonl"),
    lambda r: with_tensorboard(r, small(), "logs"),
]


@pytest.mark.parametrize(
    "consumer",
    [*LOGGERS, with_scalars, lambda r: timed_records(Times(), "all", r), lambda r: with_evaluation(r, small())],
)
def test_what_one_below_raises_when_the_caller_stops_early_is_not_lost(consumer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def saving():
        try:
            yield from RECORDS
        finally:
            raise OSError("disk full")

    stacked = consumer(saving())
    next(stacked)
    with pytest.raises(OSError, match="disk full"):
        stacked.close()


@pytest.mark.parametrize("consumer", LOGGERS)
def test_every_record_is_passed_on_in_order(consumer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = list(consumer(iter(RECORDS)))
    assert [(r["log_type"], r["sample_step"]) for r in out] == [(r["log_type"], r["sample_step"]) for r in RECORDS]
    assert [list(r["logs"]) for r in out] == [list(r["logs"]) for r in RECORDS]


def test_consumers_are_lazy_one_record_at_a_time(tmp_path):
    taken = []

    def source():
        for item in RECORDS:
            taken.append(item)
            yield item

    stacked = with_jsonl(with_host_logs(with_progress(source(), 0, 20)), tmp_path / "m.jsonl")
    next(stacked)
    assert len(taken) == 1
    stacked.close()


def test_names_are_those_of_upstream_and_say_where_a_number_is_from():
    assert {name for _, numbers in with_scalars(iter(RECORDS)) for name in numbers} == NAMES


def test_sps_counts_from_where_the_run_started():
    def resumed():
        yield record("train", 1_000_010)
        time.sleep(0.05)
        yield record("train", 1_000_020)

    *_, (_, numbers) = with_scalars(resumed(), start=1_000_000)
    assert 0 < numbers["charts/SPS"] <= 20 / 0.05


def test_jsonl_has_a_line_per_record_and_null_for_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    list(with_jsonl(iter(RECORDS[:2]), path))
    list(with_jsonl(iter(RECORDS[3:]), path))  # appends
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.pop("seconds") >= 0 for row in rows] == [True] * 4
    assert rows[0] == {"log_type": "collect", "sample_step": 10, "charts/episode_reward_avg_100": None}
    assert rows[1].pop("charts/SPS") > 0
    assert rows[1] == {"log_type": "train", "sample_step": 10, "train/policy_loss": 0.5, "train/entropy": 2.0}
    assert {name for row in rows for name in row if "/" in name} == NAMES - {"eval/avg_reward"}


@pytest.mark.parametrize(
    ("text", "before"),
    [("", 0.0), ('{"seconds": 4.0}\n{"seconds": 100.0}\n', 100.0), ('{"seconds": 100.0}\n{"sec', 100.0), ("5\n", 0.0)],
)
def test_seconds_go_on_from_the_last_whole_row(text, before, tmp_path, monkeypatch):
    ticks = itertools.count(1000.0)  # each reading of this clock is a second later
    monkeypatch.setattr("ecrl.run.loggers.time.perf_counter", lambda: next(ticks))
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    list(with_jsonl(iter(RECORDS), path))
    seconds = json.loads(path.read_text().splitlines()[-1])["seconds"]
    assert before < seconds < before + next(ticks) - 1000.0


@pytest.mark.parametrize("ending", ["end", "break", "raise"])
def test_jsonl_is_complete_and_closed_however_the_records_end(ending, tmp_path, monkeypatch):
    opened, path = [], tmp_path / "m.jsonl"
    open_ = type(path).open
    monkeypatch.setattr(type(path), "open", lambda *a, **k: opened.append(open_(*a, **k)) or opened[-1])

    def source():
        yield from RECORDS[:2]
        if ending == "raise":
            raise RuntimeError("from below")

    stacked = with_jsonl(source(), path)
    for _ in range(2):
        next(stacked)
    if ending == "break":
        stacked.close()
    else:
        with pytest.raises(RuntimeError if ending == "raise" else StopIteration):
            next(stacked)
    assert [file.closed for file in opened] == [True, True]
    assert len(path.read_text().splitlines()) == 2


def test_a_full_disk_warns_once_and_the_records_continue():
    with pytest.warns(UserWarning) as caught:
        out = list(with_jsonl(iter(RECORDS), "/dev/full"))
    assert len(out) == len(RECORDS)
    assert [str(w.message) for w in caught] == [
        "/dev/full: [Errno 28] No space left on device; the run goes on and tries again"
    ]


def test_rows_wait_for_a_disk_that_returns_with_a_warning(tmp_path):
    path = tmp_path / "away" / "metrics.jsonl"

    def source():
        for i, item in enumerate(RECORDS):
            if i == 2:
                path.parent.mkdir()
            yield item
            if i == 3:
                path.parent.rename(tmp_path / "again")

    with pytest.warns(UserWarning) as caught:
        list(with_jsonl(source(), path))
    messages = [str(w.message) for w in caught]
    assert [f"{path}: works again, after 2 failures" in t for t in messages] == [False, True, False]
    assert [t.endswith("; the run goes on and tries again") for t in messages] == [True, False, False]
    assert messages[2].endswith("tries again (outage 2)"), "else Python would not say it a second time"
    rows = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    assert [(r["log_type"], r["sample_step"]) for r in rows] == [(r["log_type"], r["sample_step"]) for r in RECORDS[:4]]


def test_no_part_of_a_row_is_left_by_a_full_disk(tmp_path):
    path, limit = tmp_path / "m.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.warns(UserWarning) as caught:
            for i, _ in enumerate(with_jsonl(iter(RECORDS), path)):
                if i == 0:
                    size = path.stat().st_size
                    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limit[1]))  # of the next row
                if i == 3:
                    assert path.stat().st_size == size
                    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert ["No space left" in str(w.message) or "works again" in str(w.message) for w in caught] == [True, True]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == len(RECORDS)


def test_progress_outside_a_terminal_prints_a_line_per_tenth(capsys):
    steps = [record("train", step, policy_loss=1.0) for step in range(5, 105, 5)]
    list(with_progress(iter(steps), 0, 100))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("10/100 ")
    assert "policy loss 1" in lines[0]


def test_progress_shows_no_nan_before_the_first_episode_has_ended(capsys):
    nan = float("nan")
    steps = [
        record("collect", 10, episode_reward_avg_100=nan, episode_length_avg_100=nan),
        record("train", 10, policy_loss=1.0),
        record("collect", 20, episode_reward_avg_100=3.0, episode_length_avg_100=7.0),
        record("train", 20, policy_loss=1.0),
        record("collect", 30, episode_reward_avg_100=nan, episode_length_avg_100=7.0),  # an episode with a NaN reward
        record("train", 30, policy_loss=nan),
    ]
    list(with_progress(iter(steps), 0, 30))
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("steps/s  no episode ended yet  policy loss 1")
    assert second.endswith("steps/s  return 3  length 7  policy loss 1")
    assert third.endswith("steps/s  return nan  length 7  policy loss nan")


def test_progress_in_a_terminal_shows_rate_and_losses(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    list(with_progress(iter(RECORDS), 0, 20))
    out = capsys.readouterr().out
    assert "20/20" in out
    assert "steps/s" in out
    assert "return 7" in out


def test_progress_in_jupyter_is_one_output_in_one_place_which_the_saved_notebook_keeps(monkeypatch):
    ipython = pytest.importorskip("IPython.display")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    displayed, drawn = [], []

    class Place:
        def update(self, shown):
            drawn.append(shown._repr_mimebundle_([], []))

    def display(shown, display_id):
        displayed.append(display_id)
        return Place()

    def slow():
        yield RECORDS[0]
        until = time.monotonic() + 600.0  # as during compiling: the line is drawn again without a record
        while not drawn or "starting" in drawn[-1]["text/plain"]:
            assert time.monotonic() < until, drawn
            time.sleep(0.01)
        yield from RECORDS[1:]

    monkeypatch.setattr(ipython, "display", display)
    list(with_progress(slow(), 0, 20))
    assert displayed == [True]
    first, second = drawn[-1]["text/plain"].rstrip().splitlines()
    assert "20/20" in first and "steps/s" in first and second.startswith("return 7  eval 3  policy loss 0.25")
    assert "20/20" in drawn[-1]["text/html"]
    assert [thread for thread in threading.enumerate() if thread.name == "ecrl-progress"] == []
    stopped = with_progress(iter(RECORDS), 0, 20)
    next(stopped)
    stopped.close()
    assert [thread for thread in threading.enumerate() if thread.name == "ecrl-progress"] == []


def test_progress_fits_a_narrow_terminal(capsys, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": "80", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ecrl.run.loggers._Speed.__str__", lambda speed: "321,152 steps/s, compiled in 30 s")
    list(with_progress(iter([record("train", 491_520, policy_loss=0.5)]), 0, 491_520))
    assert any("491520/491520" in line and "30 s" in line for line in capsys.readouterr().out.splitlines())


def test_progress_prints_when_it_compiles_and_leaves_that_time_out_of_the_rate(capsys, monkeypatch):
    made = [Compilation("before", 7.0)]
    now = iter([100.0, 131.0, 132.0])  # 30 s of compiling, then 100 steps a second
    monkeypatch.setattr("ecrl.run.loggers.time.perf_counter", lambda: next(now))
    speed = _Speed(0, made)
    assert str(speed) == "starting"
    made.append(Compilation("iteration: first call", None))
    assert str(speed) == "compiling"
    made[1] = made[1]._replace(seconds=30.0)
    speed.advance(100)
    assert str(speed) == "100 steps/s, compiled in 30 s"
    speed.advance(200)
    assert str(speed) == "100 steps/s, compiled in 30 s"


def test_scalars_is_one_read(monkeypatch):
    reads = []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(1) or read(t))
    assert scalars(RECORDS[1]) == {"policy_loss": 0.5, "entropy": 2.0}
    assert len(reads) == 1
    assert scalars(record()) == {}
