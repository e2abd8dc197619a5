"""Checkpoints: equal bits back, damage and mismatch named, old ones kept until the new one is whole."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load as tensors_from_bytes
from tensordict import TensorDict
from test_loop import last_state, same, small

from ecrl import checkpoint
from ecrl.checkpoint import latest, load, read_manifest, save, with_best_checkpoint, with_checkpoints
from ecrl.errors import CheckpointError
from ecrl.loop import init_state, train_iter


@pytest.fixture
def saved(tmp_path):
    cfg = small()
    state = last_state(cfg)
    save(tmp_path / "step_128", state, cfg)
    return tmp_path / "step_128", state, cfg


def test_what_is_saved_comes_back_bit_for_bit(saved):
    path, state, cfg = saved
    loaded, loaded_cfg = load(path)
    assert same(loaded, state)
    assert loaded_cfg == cfg
    assert loaded.is_locked
    assert [p.name for p in path.parent.iterdir()] == ["step_128"]


def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path):
    cfg = small()
    states = [r["state"] for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    save(tmp_path / "half", states[1], cfg)
    assert same(last_state(*reversed(load(tmp_path / "half"))), states[-1])


def test_the_manifest_says_what_made_it(saved):
    manifest = json.loads((saved[0] / "manifest.json").read_text())
    assert manifest["sample_step"] == 128
    assert manifest["update_step"] == 4
    assert manifest["torch"] == str(torch.__version__)
    assert manifest["threads"] == torch.get_num_threads()
    assert manifest["form"] == "eager"
    assert set(manifest["sha256"]) == {"state.safetensors", "config.json"}


@pytest.mark.parametrize("name", ["state.safetensors", "config.json", "manifest.json"])
def test_one_flipped_bit_anywhere_is_told(saved, name):
    path = saved[0] / name
    clean = path.read_bytes()
    for at in range(0, len(clean), max(1, len(clean) // 40)):
        damaged = bytearray(clean)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"step_128"):
            load(saved[0])
    path.write_bytes(clean)
    load(saved[0])


@pytest.mark.parametrize("name", ["state.safetensors", "config.json", "manifest.json"])
def test_a_missing_file_is_named(saved, name):
    (saved[0] / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load(saved[0])


def rewritten(path, change):
    """Change the manifest and seal it again, as another version of the library would have written it."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["manifest_sha256"]
    manifest |= change
    sealed = manifest | {"manifest_sha256": checkpoint._sha256(checkpoint._json(manifest))}
    (path / "manifest.json").write_bytes(checkpoint._json(sealed))


def test_another_format_is_refused(saved):
    rewritten(saved[0], {"format": 2})
    with pytest.raises(CheckpointError, match="format 2, this version reads format 1"):
        load(saved[0])


def test_a_state_of_another_structure_is_refused_by_name(tmp_path):
    cfg = small()
    state = init_state(cfg)
    wider = init_state(cfg.replace(**{"policy.actor.network_cfg.hidden_sizes": [9]}))
    deeper = init_state(cfg.replace(**{"policy.actor.network_cfg.hidden_sizes": [8, 8]}))
    save(tmp_path / "wide", state.copy().update({"params": wider["params"]}), cfg)
    with pytest.raises(CheckpointError, match=r"params/actor/0.weight is torch.float32 \[9, 4\], expected .* \[8, 4\]"):
        load(tmp_path / "wide")
    save(tmp_path / "deep", state.copy().update({"params": deeper["params"]}), cfg)
    with pytest.raises(CheckpointError, match=r"disagree on params/actor/4.bias, params/actor/4.weight"):
        load(tmp_path / "deep")


def test_saving_again_replaces_and_a_crash_in_between_keeps_the_old(saved, monkeypatch):
    path, state, cfg = saved
    first = init_state(cfg)
    monkeypatch.setattr(checkpoint, "_write_synced", lambda path, data: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(CheckpointError, match=r"cannot be written: disk full; make room"):
        save(path, first, cfg)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert same(load(path)[0], state)
    monkeypatch.undo()
    save(path, first, cfg)
    assert same(load(path)[0], first)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_folder_that_is_no_checkpoint_is_never_replaced(saved, tmp_path):
    _, state, cfg = saved
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    for path in (mine, mine / "thesis.txt"):
        with pytest.raises(CheckpointError, match="exists and is no checkpoint"):
            save(path, state, cfg)
    assert (mine / "thesis.txt").read_text() == "x"
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", state, cfg)
    assert same(load(tmp_path / "empty")[0], state)


def test_nothing_is_unpickled(saved, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert same(load(saved[0])[0], saved[1])


def test_latest_finds_the_newest_and_says_what_it_expected(saved, tmp_path):
    run = tmp_path / "run"
    for step in (96, 128, 1000):
        (run / "checkpoints" / f"step_{step}").mkdir(parents=True)
    (run / "checkpoints" / ".step_2000.new.1").mkdir()
    assert latest(run).name == "step_1000"
    assert latest(saved[0]) == saved[0]
    with pytest.raises(CheckpointError, match="no checkpoint: expected"):
        latest(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load(tmp_path / "nowhere")


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


def test_no_folder_is_left_aside_by_a_dead_process(saved):
    path, state, cfg = saved
    (path.parent / f".{path.name}.new.{os.getpid()}").mkdir()
    save(path, state, cfg)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def _evaluated(values, name="eval/avg_reward"):
    """Records as evaluation gives them, one iteration each."""
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


def test_an_evaluation_that_does_not_tell_the_metric_is_not_the_best(tmp_path):
    cfg = small(**{"trainer.best_eval_metric": "eval/success_rate"})
    assert len(list(with_best_checkpoint(_evaluated([1.0]), cfg, tmp_path))) == 1
    assert not (tmp_path / "checkpoints").exists()


def test_a_slash_in_a_name_comes_back(tmp_path):
    cfg = small()
    state = init_state(cfg).copy()
    state["norm"] = TensorDict({"obs": {"cam/rgb": torch.ones(2), "cam": {"depth": torch.zeros(1)}}}, [])
    save(tmp_path / "saved", state.lock_(), cfg)
    tensors = tensors_from_bytes((tmp_path / "saved" / "state.safetensors").read_bytes())
    structure = state.clone().apply(torch.zeros_like)
    assert torch.equal(checkpoint._into(structure, tensors, tmp_path)["norm", "obs", "cam/rgb"], torch.ones(2))
