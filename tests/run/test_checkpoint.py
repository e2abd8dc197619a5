"""Checkpoints: equal bits, named damage and mismatches, old checkpoints stay until the new one is complete."""

import gc
import json
import os
import pickle
import weakref
from threading import Thread

import pytest
import torch
from safetensors.torch import load as tensors_from_bytes
from support.replay_agent import CAPACITY, replaying
from support.small_runs import NET, last_state, same, small
from tensordict import TensorDict

from ecrl.errors import CheckpointError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.run import checkpoint
from ecrl.run.checkpoint import latest, load, read_files, read_manifest, save, snapshot, write
from ecrl.storage import atomic_files as durable
from ecrl.storage.checkpoint_files import json_bytes, sha256_of


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


def test_the_manifest_names_the_versions_that_wrote_it(saved):
    manifest = json.loads((saved[0] / "manifest.json").read_text())
    assert manifest["sample_step"] == 128
    assert manifest["update_step"] == 4
    assert manifest["torch"] == str(torch.__version__)
    assert manifest["threads"] == torch.get_num_threads()
    assert manifest["form"] == "eager"
    assert manifest["device"] == "cpu"
    assert set(manifest["sha256"]) == {"state.safetensors", "config.json"}


@pytest.mark.parametrize("name", ["state.safetensors", "config.json", "manifest.json"])
def test_one_flipped_bit_anywhere_is_detected(saved, name):
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


def test_a_flipped_bit_or_a_cut_in_each_tensor_of_a_buffer_is_detected(tmp_path):
    cfg = replaying(**{"trainer.iterations": 1})
    dqn = {"capacity": CAPACITY, "batch_size": 16, "learning_starts": 0, "prioritized": {}}
    cfg = cfg.replace(algorithm={"name": "dqn", "cfg": dqn}, policy={"name": "q_network", "critic": NET})
    save(tmp_path / "step_9", last_state(cfg), cfg)
    path = tmp_path / "step_9" / "state.safetensors"
    clean = path.read_bytes()
    length = int.from_bytes(clean[:8], "little")
    places = {name: tensor["data_offsets"] for name, tensor in json.loads(clean[8 : 8 + length]).items()}
    buffer = {name: place for name, place in places.items() if name.startswith("replay/")}
    assert {"replay/steps/obs", "replay/steps/mask", "replay/final/obs", "replay/tree", "replay/written"} <= {*buffer}
    for start, end in buffer.values():
        for at in (8 + length + start, 8 + length + (start + end) // 2, 7 + length + end):
            flipped = bytes([clean[at] ^ 1 << at % 8])
            for damaged in (clean[:at] + flipped + clean[at + 1 :], clean[:at]):
                path.write_bytes(damaged)
                with pytest.raises(CheckpointError) as error:
                    load(tmp_path / "step_9")
                assert str(error.value) == f"{path}: damaged: its checksum differs from the checksum in the manifest"
    path.write_bytes(clean)
    load(tmp_path / "step_9")


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
    sealed = manifest | {"manifest_sha256": sha256_of(json_bytes(manifest))}
    (path / "manifest.json").write_bytes(json_bytes(sealed))


def test_another_format_is_refused(saved):
    rewritten(saved[0], {"format": 2})
    with pytest.raises(CheckpointError, match="has format 2, but this version of ecrl reads format 1"):
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
    monkeypatch.setattr(durable, "_write", lambda path, data: (_ for _ in ()).throw(OSError(28, "disk full")))
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
        with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
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


@pytest.fixture
def run(tmp_path):
    """Return a run folder with checkpoints of different states at steps 9, 32 and 128."""
    cfg = small()
    state = last_state(cfg)
    for step in (9, 32, 128):
        changed = state.copy().update({"sample_step": torch.tensor(step)})
        save(tmp_path / "run" / "checkpoints" / f"step_{step}", changed, cfg)
    return tmp_path / "run"


def test_latest_returns_the_newest_or_names_what_it_expected(run, saved, tmp_path):
    (run / "checkpoints" / ".step_2000.new.1").mkdir()
    (run / "checkpoints" / "step_more").mkdir()
    assert latest(run).name == "step_128"
    assert latest(saved[0]) == saved[0]
    with pytest.raises(CheckpointError, match="no checkpoint: the folder does not exist, expected"):
        latest(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load(tmp_path / "nowhere")
    message = "not a checkpoint: it is a run folder; load a folder in its checkpoints/$"
    with pytest.raises(CheckpointError, match=message):
        load(run)


def test_an_older_checkpoint_is_loaded(tmp_path):
    """It has no numbers of schedules or iterations, and one optimiser state for the groups of actor and critic."""
    changes = {"algorithm.cfg.lr_scheduler": {"name": "step", "kwargs": {"gamma": 0.25}}}
    cfg = small(**changes, **{"algorithm.cfg.critic_max_grad_norm": 0.5})
    for record in train_iter(init_state(cfg), cfg):
        state = record["state"]
    flat = dict(state.flatten_keys("/").items())
    older = {}
    for name, leaf in flat.items():
        parts = name.split("/")
        if not name.startswith(("hyper/schedule/", "iterations")):
            older["/".join((parts[0], *parts[2:])) if parts[0] == "opt" else name] = leaf
    assert {"opt/mu/critic/0.bias", "opt/nu/actor/0.bias", "opt/step"} <= older.keys() and len(older) == len(flat) - 4
    write(tmp_path / "old", snapshot(build(cfg), state, cfg)._replace(tensors=older))
    loaded, again = load(tmp_path / "old")
    assert same(loaded, state) and again == cfg
    (missing,) = [name for name in older if name.startswith("params/actor") and name.endswith("0.bias")]
    write(
        tmp_path / "less",
        snapshot(build(cfg), state, cfg)._replace(tensors={n: x for n, x in older.items() if n != missing}),
    )
    with pytest.raises(CheckpointError, match=f"state and config disagree on {missing}"):
        load(tmp_path / "less")


@pytest.mark.parametrize("name", ["state.safetensors", "config.json", "manifest.json"])
def test_a_damaged_one_is_named_and_the_one_before_is_used(run, name):
    for step, before in ((128, 32), (32, 9)):
        with (run / "checkpoints" / f"step_{step}" / name).open("r+b") as file:
            file.truncate(file.seek(0, 2) - 1)
        with pytest.warns(UserWarning) as caught:
            assert latest(run).name == f"step_{before}"
        messages = [str(warning.message) for warning in caught]
        assert len(messages) == {32: 1, 9: 2}[before]
        assert f"step_{step}/{name}: damaged" in messages[-1] and f"; using step_{before} instead" in messages[-1]
    (run / "checkpoints" / "step_9" / name).unlink()
    with pytest.raises(CheckpointError, match="every checkpoint is damaged") as error:
        latest(run)
    assert len(str(error.value).splitlines()) == 4


def test_a_manifest_in_other_words_is_damaged(saved):
    path = saved[0] / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))  # of the same meaning and checksum
    with pytest.raises(CheckpointError, match=r"manifest.json: damaged"):
        load(saved[0])


def test_further_files_are_under_the_checksums(saved, tmp_path):
    _, state, cfg = saved
    files = {"rank_1.safetensors": b"\0\1", "note.txt": b""}
    save(tmp_path / "more", state, cfg, files=files)
    assert {n: x for n, x in read_files(tmp_path / "more").items() if n in files} == files
    assert same(load(tmp_path / "more")[0], state)
    (tmp_path / "more" / "rank_1.safetensors").write_bytes(b"\0\3")
    with pytest.raises(CheckpointError, match=r"rank_1.safetensors: damaged"):
        load(tmp_path / "more")
    for name in ("state.safetensors", "../up", ".hidden"):
        with pytest.raises(ValueError, match="choose another name"):
            save(tmp_path / "other", state, cfg, files={name: b""})


def test_a_snapshot_is_apart_from_what_follows_and_knows_who_made_it(tmp_path):
    cfg = small()
    state = init_state(cfg).clone()
    before, copy = state.clone(), snapshot(build(cfg), state, cfg)
    state.apply_(lambda leaf: leaf.zero_())
    thread = Thread(target=write, args=(tmp_path / "later", copy))  # whose number of threads is another
    thread.start()
    thread.join()
    assert same(load(tmp_path / "later")[0], before)
    assert read_manifest(tmp_path / "later")["threads"] == torch.get_num_threads()


def test_one_whose_replacement_was_killed_between_two_renames_is_found(saved):
    path, state, cfg = saved
    path.rename(path.with_name(f".{path.name}.old"))
    assert same(load(path)[0], state)
    save(path, state, cfg)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_damaged_one_may_be_replaced(saved):
    path, state, cfg = saved
    (path / "manifest.json").unlink()
    save(path, state, cfg)
    assert same(load(path)[0], state)


def test_no_folder_is_left_aside_by_a_dead_process(saved):
    path, state, cfg = saved
    (path.parent / f".{path.name}.new.{os.getpid()}").mkdir()
    save(path, state, cfg)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_slash_in_a_name_comes_back(tmp_path):
    cfg = small()
    state = init_state(cfg).copy()
    state["norm"] = TensorDict({"obs": {"cam/rgb": torch.ones(2), "cam": {"depth": torch.zeros(1)}}}, [])
    save(tmp_path / "saved", state.lock_(), cfg)
    tensors = tensors_from_bytes((tmp_path / "saved" / "state.safetensors").read_bytes())
    structure = state.clone().apply(torch.zeros_like)
    assert torch.equal(
        checkpoint._fill_structure(structure, tensors, tmp_path)["norm", "obs", "cam/rgb"], torch.ones(2)
    )


def test_a_saved_state_is_not_kept_in_memory():
    cfg = small()
    state = init_state(cfg)
    alive = weakref.ref(state)
    gc.disable()  # a state that only the collector frees would pile up between its rare full rounds
    try:
        snapshot(build(cfg), state, cfg)
        del state
        assert alive() is None
    finally:
        gc.enable()
