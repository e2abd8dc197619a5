"""Leaves of kind frozen in checkpoints: one file on disk, named by its hash, which every checkpoint of a run links."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as tensors_from_bytes
from support.frozen_agent import body_for, freezing
from support.small_runs import last_state, same
from tensordict import TensorDict

import ecrl
from ecrl.errors import CheckpointError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.run import checkpoint
from ecrl.run.checkpoint import load, read_manifest, save, snapshot, write
from ecrl.run.checkpointing import with_best_checkpoint, with_checkpoints
from ecrl.run.resume import resume
from ecrl.storage import atomic_files
from ecrl.types import LogData

SAVING = {"trainer.save_freq": 32, "trainer.keep_checkpoints": 2, "trainer.best_eval_metric": "score"}


def frozen_file(path: Path) -> Path:
    """The only file of frozen leaves in a checkpoint."""
    (file,) = path.glob("frozen_*.safetensors")
    return file


def places(folder: Path) -> set[int]:
    """The files of frozen leaves in all checkpoints of a folder, as inodes; links to one file share an inode."""
    return {file.stat().st_ino for file in folder.glob("*/frozen_*")}


def saved_run(folder: Path, scores: list[float] | None = None, **changes: Any) -> tuple[list[TensorDict], Any]:
    """Train and save under `folder`; after each iteration, an evaluation of the next score. Return the states."""
    cfg, states, left = freezing(**{**SAVING, **changes}), [], list(scores or [])

    def records():
        for record in train_iter(init_state(cfg), cfg):
            yield record
            if record["log_type"] == "train":
                states.append(record["state"])
                if left:
                    logs = {"score": torch.tensor(left.pop(0))}
                    yield LogData(log_type="evaluate", sample_step=record["sample_step"], logs=logs, state=states[-1])

    for _ in with_best_checkpoint(with_checkpoints(records(), cfg, folder), cfg, folder):
        pass
    return states, cfg


def test_the_checkpoints_of_a_run_share_one_file_and_the_states_come_back(tmp_path):
    states, _ = saved_run(tmp_path)
    folder = tmp_path / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["step_128", "step_96"]
    assert len(places(folder)) == 1 and frozen_file(folder / "step_96").stat().st_nlink == 2
    for name, state in (("step_96", states[2]), ("step_128", states[3])):
        assert same(load(folder / name)[0], state)
        tensors = tensors_from_bytes((folder / name / "state.safetensors").read_bytes())
        assert not [x for x in tensors if x.startswith("frozen_params")]
        manifest, file = read_manifest(folder / name), frozen_file(folder / name)
        assert manifest["frozen"] == file.name and manifest["sha256"][file.name].startswith(file.stem[7:])


def test_each_folder_can_be_copied_moved_and_removed_by_itself(tmp_path):
    states, _ = saved_run(tmp_path)
    shutil.copytree(tmp_path / "checkpoints" / "step_128", tmp_path / "copy")
    shutil.rmtree(tmp_path / "checkpoints" / "step_96")
    assert same(load(tmp_path / "checkpoints" / "step_128")[0], states[-1])
    shutil.rmtree(tmp_path / "checkpoints")
    assert same(load(tmp_path / "copy")[0], states[-1])


def test_pruning_keeps_the_file_for_the_best_checkpoint_and_frees_it_with_the_last(tmp_path):
    states, _ = saved_run(tmp_path, [2.0, 1.0, 1.0, 1.0], **{"trainer.keep_checkpoints": 1})
    folder = tmp_path / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["best", "step_128"]
    assert same(load(folder / "best")[0], states[0]) and same(load(folder / "step_128")[0], states[-1])
    kept = tmp_path / "link"
    os.link(frozen_file(folder / "best"), kept)
    for name in ("best", "step_128"):
        atomic_files.remove_folder(folder / name)
    assert kept.stat().st_nlink == 1, "nothing else holds the file"


def test_a_resumed_run_links_the_file_and_has_the_same_bits(tmp_path):
    states, cfg = saved_run(tmp_path, **{"trainer.keep_checkpoints": 9})
    (tmp_path / "config.json").write_text(json.dumps(cfg.model_dump(mode="json")))
    for step in (96, 128):
        shutil.rmtree(tmp_path / "checkpoints" / f"step_{step}")
    state, cfg = resume(tmp_path)
    assert same(state, states[1])
    for _ in with_checkpoints(train_iter(state, cfg), cfg, tmp_path):
        pass
    assert same(load(tmp_path / "checkpoints" / "step_128")[0], states[-1])
    assert len(places(tmp_path / "checkpoints")) == 1


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_missing_or_damaged_file_is_replaced_by_what_init_frozen_returns(tmp_path, fault):
    states, cfg = saved_run(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(cfg.model_dump(mode="json")))
    files = [frozen_file(tmp_path / "checkpoints" / f"step_{step}") for step in (96, 128)]
    assert files[0].samefile(files[1])
    if fault == "damaged":
        damage(files[1])
    else:
        for file in files:
            file.unlink()
    with pytest.warns(UserWarning) as caught:
        state, cfg = resume(tmp_path)
    assert same(state, states[-1])
    message = f"{files[1]}: {fault}.*; the policy's init_frozen returns the same parameters, and these are used"
    assert len(caught) == 1 and re.match(message, str(caught[0].message))
    save(tmp_path / "checkpoints" / "next", state, cfg)
    assert same(load(tmp_path / "checkpoints" / "next")[0], state), "it does not link the damaged file"


def test_an_error_of_init_frozen_is_part_of_the_line(tmp_path, monkeypatch):
    cfg = freezing()
    save(tmp_path / "one", init_state(cfg), cfg)
    frozen_file(tmp_path / "one").unlink()

    def fail(*args):
        raise FileNotFoundError("no weights.bin")

    monkeypatch.setattr("support.frozen_agent.body_for", fail)
    line = (
        r": missing, and the policy's init_frozen cannot replace it \(FileNotFoundError: no weights.bin\); copy a file"
    )
    with pytest.raises(CheckpointError, match=line):
        load(tmp_path / "one")


def test_leaves_that_share_memory_are_saved(tmp_path, monkeypatch):
    def tied(inputs, device):
        weight = body_for(inputs, device)["body", "weight"]
        return TensorDict({"body": {"weight": weight, "same": weight, "row": weight[1]}}, [])

    monkeypatch.setattr("support.frozen_agent.body_for", tied)
    states, _ = saved_run(tmp_path)
    assert same(load(tmp_path / "checkpoints" / "step_128")[0], states[-1])


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_file_that_nothing_can_replace_is_one_clear_line(tmp_path, fault):
    cfg = freezing()
    state = init_state(cfg).clone()
    state["frozen_params", "body", "weight"] += 1.0
    save(tmp_path / "one", state, cfg)
    file = frozen_file(tmp_path / "one")
    checksum = read_manifest(tmp_path / "one")["sha256"][file.name]
    file.unlink() if fault == "missing" else damage(file)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "one")
    text = str(error.value)
    assert text.startswith(f"{file}: {fault}") and "\n" not in text
    reason = "and the policy's init_frozen returns other parameters"
    advice = f"copy a file with the SHA-256 {checksum} here, from a backup or from an undamaged checkpoint"
    assert text.endswith(f", {reason}; {advice}")


def test_a_damaged_file_is_never_linked(tmp_path):
    cfg = freezing()
    state = init_state(cfg)
    save(tmp_path / "one", state, cfg)
    damage(frozen_file(tmp_path / "one"))
    save(tmp_path / "two", state, cfg)
    assert same(load(tmp_path / "two")[0], state) and len(places(tmp_path)) == 2
    save(tmp_path / "one", state, cfg)
    assert same(load(tmp_path / "one")[0], state) and len(places(tmp_path)) == 1


def test_other_frozen_leaves_get_another_file(tmp_path):
    cfg = freezing()
    state = init_state(cfg)
    other = state.clone()
    other["frozen_params", "body", "weight"] += 1.0
    save(tmp_path / "one", state, cfg)
    save(tmp_path / "two", other, cfg)
    assert frozen_file(tmp_path / "one").name != frozen_file(tmp_path / "two").name
    assert same(load(tmp_path / "one")[0], state) and same(load(tmp_path / "two")[0], other)
    save(tmp_path / "one", other, cfg)
    assert len(list((tmp_path / "one").glob("frozen_*"))) == 1 and same(load(tmp_path / "one")[0], other)


def test_a_checkpoint_of_an_older_version_has_them_inside_and_still_loads(tmp_path):
    cfg = freezing()
    state = last_state(cfg)
    made = snapshot(build(cfg), state, cfg)
    assert made.frozen is not None
    write(tmp_path / "old", made._replace(tensors=made.tensors | made.frozen.leaves, frozen=None))
    assert not list((tmp_path / "old").glob("frozen_*"))
    assert same(load(tmp_path / "old")[0], state)


def test_a_file_system_without_links_gets_copies(tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    states, _ = saved_run(tmp_path)
    assert len(places(tmp_path / "checkpoints")) == 2
    assert same(load(tmp_path / "checkpoints" / "step_128")[0], states[-1])


def test_a_file_that_is_removed_while_it_is_linked_is_written_again(tmp_path, monkeypatch):
    cfg = freezing()
    state = init_state(cfg)
    save(tmp_path / "one", state, cfg)
    monkeypatch.setattr(checkpoint.FrozenLeaves, "on_disk", lambda self, folder: tmp_path / "gone" / self.file)
    save(tmp_path / "two", state, cfg)
    assert same(load(tmp_path / "two")[0], state)


def test_an_interrupted_write_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    cfg = freezing()
    first, last = init_state(cfg), last_state(cfg)
    save(tmp_path / "one", first, cfg)

    def full(path, data, write=atomic_files._write):
        if path.name.startswith("frozen_"):
            raise OSError(28, "disk full")
        write(path, data)

    monkeypatch.setattr(atomic_files, "_write", full)
    with pytest.raises(CheckpointError, match="cannot be written: disk full"):
        save(tmp_path / "one", last, cfg)
    assert [p.name for p in tmp_path.iterdir()] == ["one"] and same(load(tmp_path / "one")[0], first)


def test_the_checksum_is_calculated_once_and_again_after_a_write_on_the_leaves(tmp_path):
    cfg = freezing()
    run, state = build(cfg), init_state(cfg)
    first = snapshot(run, state, cfg)
    assert snapshot(run, state, cfg, frozen=first.frozen).frozen is first.frozen
    after = ecrl.make_iteration(cfg)(state)[0]
    assert snapshot(run, after, cfg, frozen=first.frozen).frozen is first.frozen, "the same tensors"
    state["frozen_params", "body", "weight"].add_(1.0)
    changed = snapshot(run, state, cfg, frozen=first.frozen)
    assert changed.frozen is not first.frozen
    write(tmp_path / "one", changed)
    assert same(load(tmp_path / "one")[0], state)


def test_the_name_of_the_file_is_reserved(tmp_path):
    cfg = freezing()
    with pytest.raises(ValueError, match="'frozen_1' is a path, a hidden name or a reserved name"):
        save(tmp_path / "one", init_state(cfg), cfg, files={"frozen_1": b""})
