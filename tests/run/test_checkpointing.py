"""Saving during a run: its times, the checkpoints that stay, background writing, and failures."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from support import chunks  # noqa: F401  # registers repeated_pole
from support.off_policy_agents import agent
from support.replay_agent import N, T, replaying
from support.small_runs import NET, same, small

from ecrl.errors import CheckpointError, UserError
from ecrl.loop.buffers import check_current
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, phase_of, train_iter
from ecrl.pytree import flatten
from ecrl.run import checkpointing as saving
from ecrl.run.checkpoint import latest, load, read_manifest, snapshot, write
from ecrl.run.checkpointing import with_best_checkpoint, with_checkpoints
from ecrl.run.resume import resume
from ecrl.run.train import train
from ecrl.storage import atomic_files


def steps_of(run_dir):
    return sorted(int(p.name.removeprefix("step_")) for p in (run_dir / "checkpoints").iterdir())


def test_save_freq_fires_on_crossing_and_a_final_one_is_always_written(tmp_path):
    # 32 steps per iteration, 128 in all; 70 is crossed at 96, and 128 is the end
    for freq, expected in ((70, [96, 128]), (32, [32, 64, 96, 128]), (10**6, [128])):
        cfg = small(**{"trainer.save_freq": freq})
        list(with_checkpoints(train_iter(init_state(cfg), cfg), cfg, tmp_path / str(freq)))
        assert steps_of(tmp_path / str(freq)) == expected


def test_stopping_early_or_failing_saves_what_there_is(tmp_path):
    cfg = small()
    for record in with_checkpoints(train_iter(init_state(cfg), cfg), cfg, tmp_path / "stopped"):
        if record["sample_step"] == 64 and record["log_type"] == "train":
            break
    assert steps_of(tmp_path / "stopped") == [64]

    def failing():
        for i, record in enumerate(train_iter(init_state(cfg), cfg)):
            if i == 4:
                raise KeyboardInterrupt
            yield record

    with pytest.raises(KeyboardInterrupt):
        list(with_checkpoints(failing(), cfg, tmp_path / "failed"))
    assert steps_of(tmp_path / "failed") == [64]


def _evaluated(values, name="eval/avg_reward"):
    """Yield records of evaluations, one per iteration."""
    cfg = small()
    states = [r["state"] for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    for state, value in zip(states, values, strict=False):
        logs = {name: torch.tensor(value)}
        yield {"log_type": "evaluate", "sample_step": int(state["sample_step"]), "logs": logs, "state": state}


@pytest.mark.parametrize(("mode", "values", "step"), [("max", [1.0, 3.0, 2.0], 64), ("min", [3.0, 1.0, 2.0], 64)])
def test_best_keeps_the_best_evaluation(tmp_path, mode, values, step):
    cfg = small(**{"trainer.best_eval_mode": mode})
    assert len(list(with_best_checkpoint(_evaluated(values), cfg, tmp_path))) == 3
    best = tmp_path / "checkpoints" / "best"
    assert int(load(best)[0]["sample_step"]) == step
    assert read_manifest(best)["logs"] == {"eval/avg_reward": values[1]}
    assert latest_is_absent(tmp_path), "best is not taken for the newest"


def latest_is_absent(run) -> bool:
    with pytest.raises(CheckpointError):
        latest(run)
    return True


def test_best_goes_on_from_what_an_earlier_process_found(tmp_path):
    cfg = small()
    for values in ([5.0], [4.0, float("nan")], [6.0]):
        list(with_best_checkpoint(_evaluated(values), cfg, tmp_path))
        best = read_manifest(tmp_path / "checkpoints" / "best")["logs"]["eval/avg_reward"]
        assert best == max(5.0, values[0])


def test_infinity_is_not_the_best(tmp_path):
    list(with_best_checkpoint(_evaluated([1.0, float("inf"), 5.0]), small(), tmp_path))
    assert read_manifest(tmp_path / "checkpoints" / "best")["logs"]["eval/avg_reward"] == 5.0


def test_an_evaluation_without_the_metric_is_not_the_best(tmp_path):
    cfg = small(**{"trainer.best_eval_metric": "eval/success_rate"})
    assert len(list(with_best_checkpoint(_evaluated([1.0]), cfg, tmp_path))) == 1
    assert not (tmp_path / "checkpoints").exists()


def trained(cfg, run_dir):
    return with_checkpoints(train_iter(init_state(cfg), cfg), cfg, run_dir)


@pytest.mark.parametrize(("keep", "expected"), [(1, [128]), (3, [64, 96, 128]), (9, [32, 64, 96, 128])])
def test_the_newest_are_kept(tmp_path, keep, expected):
    cfg = small(**{"trainer.save_freq": 32, "trainer.keep_checkpoints": keep})
    list(trained(cfg, tmp_path))
    assert steps_of(tmp_path) == expected


def test_older_ones_are_removed_only_after_the_new_one_is_safe(tmp_path, monkeypatch):
    cfg = small(**{"trainer.save_freq": 32, "trainer.keep_checkpoints": 1})
    write, steps_before = saving.write, []

    def written(path, saved):
        steps_before.append(steps_of(tmp_path) if steps_before else [])
        if len(steps_before) == 3:
            raise CheckpointError(f"{path}: full")
        write(path, saved)

    monkeypatch.setattr(saving, "write", written)
    with pytest.warns(UserWarning) as caught:
        list(trained(cfg, tmp_path))
    assert "step_96: full; the run goes on and tries again" in str(caught[0].message)
    assert steps_before == [[], [32], [64], [64]]
    assert steps_of(tmp_path) == [128]


@pytest.fixture
def gate(monkeypatch):
    """Writes wait for `gate.set()`; `gate.begun` are their paths."""
    gate, write = threading.Event(), saving.write
    gate.begun = []

    def slow(path, saved):
        gate.begun.append(path.name)
        assert gate.wait(600.0)
        write(path, saved)

    monkeypatch.setattr(saving, "write", slow)
    yield gate
    gate.set()


def test_training_does_not_wait_for_a_write_but_for_the_one_before(tmp_path, gate):
    cfg = small(**{"trainer.save_freq": 64, "trainer.iterations": 6})
    records = trained(cfg, tmp_path)
    while True:
        record = next(records)
        if record["sample_step"] == 96 and record["log_type"] == "train":
            break
    while not gate.begun:  # its thread may come late
        time.sleep(0.01)
    assert gate.begun == ["step_64"] and not (tmp_path / "checkpoints").exists()  # training reached 96 meanwhile
    before = time.monotonic()
    threading.Timer(0.3, gate.set).start()
    rest = [record["sample_step"] for record in records]  # 128 waits for 64
    assert rest == [128, 128, 160, 160, 192, 192] and time.monotonic() - before > 0.25
    assert gate.begun == ["step_64", "step_128", "step_192"]


def test_what_is_written_later_is_the_state_of_its_step(tmp_path, gate):
    cfg = small(**{"trainer.save_freq": 96})
    states = {}
    for record in trained(cfg, tmp_path):
        states[record["sample_step"]] = record["state"].clone()
        if record["sample_step"] == 128:
            gate.set()
    assert steps_of(tmp_path) == [96, 128]
    assert all(same(load(tmp_path / "checkpoints" / f"step_{s}")[0], states[s]) for s in (96, 128))


def failing(monkeypatch, *which):
    """The writes of these numbers, from 1, find a full disk."""
    write, count = saving.write, []

    def full(path, saved):
        count.append(path.name)
        if len(count) in which:
            raise CheckpointError(f"{path}: cannot be written: disk full")
        write(path, saved)

    monkeypatch.setattr(saving, "write", full)


def test_a_failed_save_warns_once_and_is_tried_again(tmp_path, monkeypatch):
    cfg = small(**{"trainer.save_freq": 32})
    failing(monkeypatch, 2, 3)
    with pytest.warns(UserWarning) as caught:
        list(trained(cfg, tmp_path))
    messages = [str(w.message) for w in caught]
    assert "step_64: cannot be written: disk full; the run goes on" in messages[0]
    assert messages[1:] == ["checkpoints: works again, after 2 failures"]
    assert steps_of(tmp_path) == [32, 128]


def test_an_old_checkpoint_that_cannot_be_removed_only_warns(tmp_path, monkeypatch):
    def busy(path):
        raise OSError(f"{path.name} is busy")

    monkeypatch.setattr(saving, "remove_folder", busy)
    cfg = small(**{"trainer.save_freq": 32, "trainer.keep_checkpoints": 1})
    with pytest.warns(UserWarning) as caught:
        assert len(list(trained(cfg, tmp_path))) == 8
    assert [str(w.message) for w in caught] == ["older checkpoints: step_32 is busy; the run goes on and tries again"]
    assert steps_of(tmp_path) == [32, 64, 96, 128]


def closing(monkeypatch, *which):
    """Return records whose checkpoints fail with a full disk at these writes, and a list that records their closing."""
    failing(monkeypatch, *which)
    closed = []

    def source(cfg):
        try:
            yield from train_iter(init_state(cfg), cfg)
        finally:
            closed.append(True)

    return source(small()), closed


def test_the_last_failure_is_the_runs_when_all_is_closed(tmp_path, monkeypatch):
    source, closed = closing(monkeypatch, 1)
    failures = []
    with pytest.raises(CheckpointError, match="step_128: cannot be written: disk full"):
        for record in with_checkpoints(source, small(), tmp_path):
            failures.append(record)
    assert closed and len(failures) == 8


def test_stopping_early_is_an_error_too_if_it_cannot_be_saved(tmp_path, monkeypatch):
    source, closed = closing(monkeypatch, 1)
    records = with_checkpoints(source, small(), tmp_path)
    for _ in range(2):
        next(records)
    with pytest.raises(CheckpointError, match="step_32: cannot be written"):
        records.close()
    assert closed


def test_an_error_of_the_run_is_not_hidden_by_one_of_the_disk(tmp_path, monkeypatch):
    cfg = small()
    failing(monkeypatch, 1)

    def source():
        for i, record in enumerate(train_iter(init_state(cfg), cfg)):
            if i == 4:
                raise UserError("the environment broke")
            yield record

    with pytest.raises(UserError, match="the environment broke"), pytest.warns(UserWarning, match="step_64: cannot"):
        list(with_checkpoints(source(), cfg, tmp_path))


def test_a_best_that_could_not_be_written_is_tried_again_though_it_stays_the_best(tmp_path, monkeypatch):
    failing(monkeypatch, 1)
    writes = []

    class Recorded(ThreadPoolExecutor):
        def submit(self, *job):
            writes.append(super().submit(*job))
            return writes[-1]

    monkeypatch.setattr(saving, "ThreadPoolExecutor", Recorded)
    with pytest.warns(UserWarning) as caught:
        for _ in with_best_checkpoint(_evaluated([3.0, 1.0, 2.0]), small(), tmp_path):
            wait(writes, 600.0)
    messages = [str(warning.message) for warning in caught]
    assert (
        len(messages) == 2
        and "best: cannot be written" in messages[0]
        and "works again, after 1 failure" in messages[1]
    )
    assert read_manifest(tmp_path / "checkpoints" / "best")["logs"] == {"eval/avg_reward": 3.0}
    assert int(load(tmp_path / "checkpoints" / "best")[0]["sample_step"]) == 32


def test_a_damaged_best_checkpoint_warns_and_is_chosen_again(tmp_path):
    list(with_best_checkpoint(_evaluated([5.0]), small(), tmp_path))
    state = tmp_path / "checkpoints" / "best" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.warns(
        UserWarning, match=r"best/state.safetensors: damaged.*; the search for the best checkpoint restarts"
    ):
        list(with_best_checkpoint(_evaluated([4.0]), small(), tmp_path))
    assert read_manifest(tmp_path / "checkpoints" / "best")["logs"] == {"eval/avg_reward": 4.0}


def test_files_of_other_ranks_are_saved_too(tmp_path):
    cfg = small()
    files = {"rank_1.safetensors": b"more"}
    list(with_checkpoints(({**r, "files": files} for r in train_iter(init_state(cfg), cfg)), cfg, tmp_path))
    assert (latest(tmp_path) / "rank_1.safetensors").read_bytes() == b"more"


def test_what_a_killed_writer_left_is_removed(tmp_path):
    folder = tmp_path / "checkpoints"
    for name in (".step_32.new.77", ".step_16.gone"):
        (folder / name).mkdir(parents=True)
    list(trained(small(), tmp_path))
    assert [p.name for p in folder.iterdir()] == ["step_128"]


def test_an_error_at_a_collect_record_surfaces_and_the_newest_state_with_its_buffer_is_saved(tmp_path):
    cfg = replaying(**{"trainer.save_freq": 10**6})
    expected = [r["state"].clone() for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]

    def source():
        for record in train_iter(init_state(cfg), cfg):
            yield record
            if record["log_type"] == "collect" and record["sample_step"] == 3 * N * T:
                raise UserError("the disk of the logger broke")

    with pytest.raises(UserError, match="the disk of the logger broke"):
        list(with_checkpoints(source(), cfg, tmp_path))
    assert steps_of(tmp_path) == [3 * N * T]
    assert same(load(latest(tmp_path))[0], expected[2])


def test_an_interrupt_while_rows_are_written_leaves_no_state_that_counts_as_current(tmp_path, monkeypatch):
    """The first field of the third iteration is written, the second is not."""
    cfg, calls, write = replaying(**{"trainer.save_freq": 2 * N * T}), [], torch.Tensor.index_copy_
    fields = len(flatten(init_state(cfg)["replay"])[0]) - 2  # without the two counts

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3 * fields + 2:
            raise KeyboardInterrupt
        return write(*args)

    monkeypatch.setattr(torch.Tensor, "index_copy_", interrupted)
    states = []
    message = f"^the state after {3 * N * T} env steps is not saved: a write to its buffer replay was interrupted$"
    with pytest.warns(UserWarning, match=message), pytest.raises(KeyboardInterrupt):
        for record in with_checkpoints(train_iter(init_state(cfg), cfg), cfg, tmp_path):
            states.append(record["state"])
    with pytest.raises(UserError, match=r"^state: the buffer replay was overwritten by a later iteration"):
        check_current(build(cfg), states[-1])
    assert steps_of(tmp_path) == [2 * N * T]


def test_training_waits_until_the_buffer_has_been_read(tmp_path, monkeypatch):
    """Buffers are not copied. If training went on, the late write would find newer rows or refuse the snapshot."""
    cfg, write, states = replaying(**{"trainer.save_freq": N * T}), saving.write, {}

    def late(path, saved):
        time.sleep(0.2)
        assert saved.tensors["replay/steps/obs"].data_ptr() == states[path.name]["replay", "steps", "obs"].data_ptr()
        states[path.name] = states[path.name].clone()
        write(path, saved)

    def records():
        for record in train_iter(init_state(cfg), cfg):
            states[f"step_{record['sample_step']}"] = record["state"]
            yield record

    monkeypatch.setattr(saving, "write", late)
    list(with_checkpoints(records(), cfg, tmp_path))
    assert len(states) == 5
    for name, state in states.items():
        assert same(load(tmp_path / "checkpoints" / name)[0], state)


def test_training_goes_on_while_the_disk_gets_the_buffer(tmp_path, monkeypatch):
    cfg, sync, gate, begun = replaying(**{"trainer.save_freq": 2 * N * T}), atomic_files._sync, threading.Event(), []

    def slow(path):
        begun.append(path)
        assert gate.wait(600.0)
        sync(path)

    monkeypatch.setattr(atomic_files, "_sync", slow)
    for record in trained(cfg, tmp_path):
        if record["sample_step"] == 2 * N * T:
            at_save = record["state"].clone()
        if record["sample_step"] == 3 * N * T and not gate.is_set():
            assert begun and not (tmp_path / "checkpoints" / f"step_{2 * N * T}").exists()
            gate.set()
    assert same(load(tmp_path / "checkpoints" / f"step_{2 * N * T}")[0], at_save)


def test_a_snapshot_with_an_overwritten_buffer_is_not_written(tmp_path):
    cfg = replaying()
    records = train_iter(init_state(cfg), cfg)
    made = snapshot(build(cfg), next(records)["state"], cfg)
    write(tmp_path / "now", made)
    next(records)
    next(records)
    message = (
        "late: cannot be written: a later iteration has overwritten the buffer replay; save the newest state, or "
        "resume from an older checkpoint$"
    )
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path / "late", made)
    assert [p.name for p in tmp_path.iterdir()] == ["now"]


def evaluated(cfg, run_dir):
    """Train with a best checkpoint of the first iteration."""
    for record in train_iter(init_state(cfg), cfg):
        yield record
        if record["log_type"] == "train" and record["sample_step"] == N * T:
            yield {**record, "log_type": "evaluate", "logs": {"eval/avg_reward": torch.tensor(1.0)}}


def names_in(path):
    return {name.split("/")[0] for name in tensors_from_bytes((path / "state.safetensors").read_bytes())}


def test_the_best_checkpoint_has_no_buffer_and_loads_with_an_empty_one(tmp_path):
    cfg = replaying(**{"trainer.save_freq": N * T})
    list(with_best_checkpoint(evaluated(cfg, tmp_path), cfg, tmp_path))
    best = tmp_path / "checkpoints" / "best"
    assert "replay" not in names_in(best) and "params" in names_in(best)
    assert read_manifest(best)["left_out"] == ["replay"]
    state, _ = load(best)
    empty = init_state(cfg)["replay"].clone().set("written", torch.tensor(T))
    assert same(state["replay"], empty) and int(state["sample_step"]) == N * T
    assert len(list(train_iter(state, cfg))) == 8


def test_the_best_checkpoint_has_no_buffers_of_other_ranks(tmp_path):
    cfg = replaying()
    shard = tensors_to_bytes({"replay/obs": torch.ones(2), "env/obs": torch.ones(3)})
    records = ({**r, "files": {"rank_1.safetensors": shard}} for r in evaluated(cfg, tmp_path))
    list(with_best_checkpoint(records, cfg, tmp_path))
    saved = tensors_from_bytes((tmp_path / "checkpoints" / "best" / "rank_1.safetensors").read_bytes())
    assert [*saved] == ["env/obs"]


@pytest.mark.parametrize("saves", [True, False])
def test_save_replay_decides_if_checkpoints_have_the_buffer_and_resuming_warns(tmp_path, saves):
    cfg = replaying(**{"trainer.save_replay": saves, "trainer.iterations": 3})
    end, _ = train(init_state(cfg), cfg, tmp_path, progress=False)
    path = latest(tmp_path)
    assert ("replay" in names_in(path)) == saves
    message = (
        "^.*step_36: has no replay, because trainer.save_replay is false; the run fills an empty buffer before it "
        "learns again, as a new run does$"
    )
    with nullcontext() if saves else pytest.warns(UserWarning, match=message):
        state, _ = resume(tmp_path, overrides={"trainer.iterations": 5}, force=True)
    empty = init_state(cfg)["replay"].clone().set("written", torch.tensor(3 * T))
    assert same(state["replay"], end["replay"] if saves else empty)
    assert same(state["params"], end["params"])
    longer = cfg.replace(**{"trainer.iterations": 5})
    *_, record = train_iter(state, longer)
    assert int(record["state"]["replay", "cursor"]) == (5 if saves else 2) * T


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_run_without_its_buffer_fills_the_buffer_before_it_learns(tmp_path, prioritized):
    """The run learns from the third iteration on, and so does the resumed run, which ended after the fourth."""
    starts = 2 * N * T
    cfg = replaying(**{"trainer.save_replay": False, "trainer.iterations": 4, "algorithm.cfg.learning_starts": starts})
    if prioritized:
        dqn = {"capacity": 64, "batch_size": 16, "learning_starts": starts, "prioritized": {}}
        cfg = cfg.replace(algorithm={"name": "dqn", "cfg": dqn}, policy={"name": "q_network", "critic": NET})
    train(init_state(cfg), cfg, tmp_path, progress=False)
    with pytest.warns(UserWarning, match="step_48: has no replay, because trainer.save_replay is false; "):
        start, cfg = resume(tmp_path, overrides={"trainer.iterations": 8}, force=True)
    states = [start, *(r["state"].clone() for r in train_iter(start, cfg) if r["log_type"] == "train")]
    learns = [not same(before["params"], after["params"]) for before, after in pairwise(states)]
    assert learns == [False, False, True, True]
    for number in (1, 2, 3):  # also a run that continues from a state in between
        *_, last = train_iter(states[number], cfg)
        assert same(last["state"], states[-1])
    pure, state = make_iteration(cfg), start
    for expected in states[1:]:
        state, _ = pure(state)
        assert same(state, expected)


def test_a_run_without_its_buffer_counts_the_steps_of_its_actions(tmp_path):
    """An action of repeated_pole takes 1 or 2 steps. The run learns once its buffer has `learning_starts` steps."""
    settings = {"algorithm.cfg.learning_starts": 60, "algorithm.cfg.capacity": 300, "trainer.save_replay": False}
    cfg = agent("dqn", **settings, **{"env.name": "repeated_pole", "trainer.iterations": 12})
    end, _ = train(init_state(cfg), cfg, tmp_path, progress=False)
    assert int(end["sample_step"]) > 1.5 * int(end["decision_step"]) > 60
    with pytest.warns(UserWarning, match="has no replay, because trainer.save_replay is false; "):
        state, cfg = resume(tmp_path, overrides={"trainer.iterations": 24}, force=True)
    run, before = build(cfg), int(state["sample_step"])
    phases = [(phase_of(run, state), 0)]
    for record in train_iter(state, cfg):
        if record["log_type"] == "train":
            phases.append((phase_of(run, record["state"]), record["sample_step"] - before))
    assert [phase for phase, steps in phases if steps < 50] == ["collect"] * sum(steps < 50 for _, steps in phases)
    assert {phase for phase, steps in phases if steps > 70} == {"learn"}


def test_a_checkpoint_without_its_buffer_is_damaged_unless_its_manifest_names_the_buffer(tmp_path):
    cfg = replaying()
    made = snapshot(build(cfg), init_state(cfg), cfg)
    fewer = {name: x for name, x in made.tensors.items() if not name.startswith("replay/")}
    write(tmp_path / "less", made._replace(tensors=fewer))
    with pytest.raises(CheckpointError, match="state and config disagree on replay/cursor, replay/final/obs, "):
        load(tmp_path / "less")
