"""Consumers that a caller passes to `ecrl.train`."""

import json

import pytest
import torch
from support.small_runs import last_state, same, small

import ecrl
from ecrl.errors import UserError
from ecrl.run.checkpoint import latest, load


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_consumers_get_every_record_in_order_and_change_no_result():
    cfg, seen = small(**{"trainer.enable_eval": True, "trainer.eval_freq": 64, "trainer.num_eval_episodes": 4}), []

    def first(records):
        for record in records:
            seen.append(("first", record["log_type"], record["sample_step"]))
            yield record

    def second(records):
        for record in records:
            seen.append(("second", record["log_type"], record["sample_step"]))
            yield record

    state, history = ecrl.train(ecrl.init_state(cfg), cfg, progress=False, consumers=[first, second])
    expected = [
        (kind, step) for step in (32, 64, 96, 128) for kind in ("collect", "train", "evaluate")[: 2 + (step % 64 == 0)]
    ]
    assert seen == [(name, *record) for record in expected for name in ("first", "second")]
    assert same(state, last_state(cfg)) and len(history) == 4


def test_an_added_log_is_in_the_history_and_in_the_files(tmp_path):
    def with_size(records):
        for record in records:
            if record["log_type"] == "train":
                size = torch.tensor(float(record["sample_step"]) / 2.0)
                record = {**record, "logs": {**record["logs"], "half_step": size, "mine/half_step": size}}
            yield record

    cfg, run = small(), tmp_path / "run"
    _, history = ecrl.train(ecrl.init_state(cfg), cfg, run, progress=False, consumers=[with_size])
    assert [row["half_step"] for row in history] == [16.0, 32.0, 48.0, 64.0]
    logged = [row for row in rows_of(run) if "train/half_step" in row]
    assert [row["train/half_step"] for row in logged] == [row["mine/half_step"] for row in logged] == [16, 32, 48, 64]


def test_a_consumer_that_returns_ends_the_run_and_its_last_state_is_saved(tmp_path):
    closed = []

    def stop_at_64(records):
        try:
            for record in records:
                yield record
                if record["log_type"] == "train" and record["sample_step"] >= 64:
                    return
        finally:
            closed.append(True)

    cfg, run = small(), tmp_path / "run"
    state, history = ecrl.train(ecrl.init_state(cfg), cfg, run, progress=False, consumers=[stop_at_64])
    assert int(state["sample_step"]) == 64 == history[-1]["sample_step"] and closed == [True]
    assert latest(run).name == "step_64" and same(load(latest(run))[0], state)
    state, _ = ecrl.train(state, cfg, run, progress=False)
    assert same(state, last_state(cfg)), "the run can go on, as if it had not been stopped"


def stop_before_the_record_at_64(records):
    for record in records:
        if record["sample_step"] >= 64:
            return
        yield record


def test_a_consumer_that_keeps_its_last_record_does_not_lose_the_state(tmp_path):
    dqn = {"name": "dqn", "cfg": {"capacity": 64, "batch_size": 8, "learning_starts": 32}}
    cfg, run = small(algorithm=dqn, policy={"name": "q_network"}), tmp_path / "run"
    ends = stop_before_the_record_at_64
    state, _ = ecrl.train(ecrl.init_state(cfg), cfg, run, progress=False, consumers=[ends])
    assert int(state["sample_step"]) == 64 and same(load(latest(run))[0], state)
    state, _ = ecrl.train(state, cfg, run, progress=False)
    assert same(state, last_state(cfg)), "the replay buffer and the other fields are of one iteration"


def test_an_error_of_a_consumer_ends_the_run_and_the_last_state_is_saved(tmp_path):
    def failing(records):
        for record in records:
            yield record
            if record["log_type"] == "train" and record["sample_step"] == 64:
                raise RuntimeError("my own error")

    cfg, run = small(), tmp_path / "run"
    with pytest.raises(RuntimeError, match="my own error"):
        ecrl.train(ecrl.init_state(cfg), cfg, run, progress=False, consumers=[failing])
    assert latest(run).name == "step_64"


def only_train_records(records):
    return (record for record in records if record["log_type"] == "train")


def callback(record):
    """Return None, as a callback does."""


def with_a_float(records):
    for record in records:
        yield {**record, "logs": {"mine": 1.0}}


def with_a_vector(records):
    for record in records:
        yield {**record, "logs": {"mine": torch.ones(2)}}


def without_a_value(records):
    for _ in records:
        yield


def logs_only(records):
    for record in records:
        yield {"logs": record["logs"]}


def each_twice(records):
    for record in records:
        yield record
        yield record


def before_any_record(records):
    yield {"logs": {}}
    yield from records


@pytest.mark.parametrize(
    ("consumer", "message"),
    [
        (without_a_value, "without_a_value yielded NoneType, which is not a record; yield every record, or a copy"),
        (logs_only, "logs_only yielded dict, which is not a record; yield every record, or a copy with more logs"),
        (before_any_record, "before_any_record yielded before it took a record; yield every record that it takes"),
        (None, "None is not a function; write a generator function that takes records"),
        (each_twice, "each_twice yielded a record twice; yield every record once"),
        (only_train_records, "only_train_records asked for the next record, but did not yield the last record"),
        (callback, "callback returned NoneType, expected an iterator of records; write a generator function"),
        (with_a_float, r"with_a_float yielded the log 'mine', 1\.0, expected a 0-d tensor; use torch.tensor"),
        (with_a_vector, r"with_a_vector yielded the log 'mine', tensor\(\[1\., 1\.\]\), expected a 0-d tensor"),
    ],
)
def test_a_wrong_consumer_is_refused_in_one_line(consumer, message):
    cfg = small()
    with pytest.raises(UserError, match=f"^consumers: {message}") as error:
        ecrl.train(ecrl.init_state(cfg), cfg, progress=False, consumers=[consumer])
    assert "\n" not in str(error.value)


def test_a_function_in_place_of_the_list_is_refused():
    cfg = small()
    with pytest.raises(UserError, match="consumers: each_twice is a function, expected a list of functions"):
        ecrl.train(ecrl.init_state(cfg), cfg, progress=False, consumers=each_twice)


def test_no_consumer_may_end_a_run_of_several_processes(monkeypatch):
    def first_record(records):
        yield next(records)

    def all_records(records):
        yield from records

    monkeypatch.setattr("ecrl.run.own_consumers.world_size", lambda: 2)
    cfg = small()
    ecrl.train(ecrl.init_state(cfg), cfg, progress=False, consumers=[all_records])
    with pytest.raises(UserError, match="first_record ended the records early, but the other processes train on"):
        ecrl.train(ecrl.init_state(cfg), cfg, progress=False, consumers=[first_record])


def test_a_profiled_run_times_its_consumers(tmp_path, capsys):
    cfg, run = small(), tmp_path / "run"
    ecrl.train(ecrl.init_state(cfg), cfg, run, progress=False, profile=True, consumers=[iter, iter])
    (row,) = (
        row for row in json.loads((run / "profile" / "rank_0.json").read_text())["phases"] if "own" in row["phase"]
    )
    assert row["phase"] == "own consumers" and row["calls"] == 2 * (2 * 4 + 1)
