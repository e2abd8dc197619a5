"""Consumers: every record is passed on, numbers land where they belong, NaN is not written as a number."""

import json
import math
import sys
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ecrl.loggers import History, scalars, with_host_logs, with_jsonl, with_progress, with_tensorboard
from ecrl.types import LogData


def record(kind="train", step=10, **logs) -> LogData:
    return LogData(log_type=kind, sample_step=step, logs={k: torch.tensor(v) for k, v in logs.items()}, state=None)


RECORDS = [
    record("collect", 10, episode_reward_avg_100=float("nan")),
    record("train", 10, policy_loss=0.5, entropy=2.0),
    record("evaluate", 10, **{"eval/avg_reward": 3.0}),
    record("collect", 20, episode_reward_avg_100=7.0),
    record("train", 20, policy_loss=0.25, entropy=1.0),
]


@pytest.mark.parametrize(
    "consumer",
    [
        with_host_logs,
        lambda r: with_progress(r, 0, 20),
        lambda r: with_jsonl(r, "metrics.jsonl"),
        lambda r: with_tensorboard(r, "logs"),
    ],
)
def test_every_record_is_passed_on_in_order(consumer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = list(consumer(iter(RECORDS)))
    assert [(r["log_type"], r["sample_step"]) for r in out] == [(r["log_type"], r["sample_step"]) for r in RECORDS]
    assert [list(r["logs"]) for r in out] == [list(r["logs"]) for r in RECORDS]


def test_consumers_are_lazy_one_record_at_a_time(tmp_path):
    asked = []

    def source():
        for item in RECORDS:
            asked.append(item)
            yield item

    stacked = with_jsonl(with_host_logs(with_progress(source(), 0, 20)), tmp_path / "m.jsonl")
    next(stacked)
    assert len(asked) == 1
    stacked.close()


def test_jsonl_has_a_line_per_record_and_null_for_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    list(with_jsonl(iter(RECORDS[:2]), path))
    list(with_jsonl(iter(RECORDS[3:]), path))  # appends
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.pop("seconds") >= 0 for row in rows] == [True] * 4
    assert rows[0] == {"log_type": "collect", "sample_step": 10, "episode_reward_avg_100": None}
    assert rows[1] == {"log_type": "train", "sample_step": 10, "policy_loss": 0.5, "entropy": 2.0}


def test_tensorboard_names_and_steps(tmp_path):
    list(with_tensorboard(iter(RECORDS), tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {
        "charts/episode_reward_avg_100", "charts/SPS", "train/policy_loss", "train/entropy", "eval/avg_reward",
    }  # fmt: skip
    assert [(e.step, e.value) for e in events.Scalars("train/policy_loss")] == [(10, 0.5), (20, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("charts/episode_reward_avg_100")] == [(20, 7.0)]


def test_sps_counts_from_where_the_run_started(tmp_path):
    def resumed():
        yield record("train", 1_000_010)
        time.sleep(0.05)
        yield record("train", 1_000_020)

    list(with_tensorboard(resumed(), tmp_path, start=1_000_000))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("charts/SPS")[-1].value <= 20 / 0.05


def test_progress_outside_a_terminal_prints_a_line_per_tenth(capsys):
    steps = [record("train", step, policy_loss=1.0) for step in range(5, 105, 5)]
    list(with_progress(iter(steps), 0, 100))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("10/100 ")
    assert "policy loss 1" in lines[0]


def test_progress_in_a_terminal_shows_rate_and_losses(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    list(with_progress(iter(RECORDS), 0, 20))
    out = capsys.readouterr().out
    assert "20/20" in out
    assert "steps/s" in out
    assert "return 7" in out


def test_scalars_is_one_read(monkeypatch):
    reads = []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(1) or read(t))
    assert scalars(RECORDS[1]) == {"policy_loss": 0.5, "entropy": 2.0}
    assert len(reads) == 1
    assert scalars(record()) == {}


def test_history_has_a_row_per_iteration():
    history = History()
    for item in RECORDS:
        history.add(item)
    assert len(history) == 2
    assert history[-1] == {"sample_step": 20, "episode_reward_avg_100": 7.0, "policy_loss": 0.25, "entropy": 1.0}
    assert history[0]["eval/avg_reward"] == 3.0
    assert math.isnan(history[0]["episode_reward_avg_100"])
    assert [row["sample_step"] for row in history] == [10, 20]


def test_an_empty_history_is_an_empty_frame():
    pytest.importorskip("pandas")
    assert len(History().to_pandas()) == 0


def test_history_to_pandas_and_plot(monkeypatch):
    pytest.importorskip("pandas")
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    history = History()
    for item in RECORDS:
        history.add(item)
    frame = history.to_pandas()
    assert frame.index.name == "sample_step"
    assert frame.loc[20, "policy_loss"] == 0.25
    axes = history.plot("policy_loss")
    assert axes.get_ylabel() == "policy_loss"
    assert axes.lines[0].get_ydata().tolist() == [0.5, 0.25]
    with pytest.raises(KeyError, match="no log 'policy_los'; did you mean 'policy_loss'"):
        history.plot("policy_los")


def test_a_missing_extra_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ecrl\[plot\]'"):
        History().to_pandas()
