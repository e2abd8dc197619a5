"""Save and load checkpoints.

A checkpoint is a folder with `state.safetensors`, `config.json`, and a `manifest.json` that holds the files' checksums.
A checkpoint may have extra files, such as the rank shards of `ecrl.run.rank_shards`. ecrl writes a checkpoint folder
under a temporary name, syncs it to disk and then renames it, so the folder is never incomplete. A checkpoint contains
no pickled data.

The frozen parameters of a policy never change. They have their own file, whose name contains the first 16 hex digits of
its SHA-256. If another checkpoint of the run already has an undamaged copy of this file, a new checkpoint hard-links
the copy. If the file system does not support hard links, each checkpoint has its own copy. Each checkpoint folder can
be copied, moved or removed on its own. The file system frees the file's disk space when the last hard link is removed.
Damage to a hard-linked file affects every checkpoint that links to it. If the file of frozen parameters is missing or
damaged, `load` and `read_files` call the policy's `init_frozen`, and use the result if it has the saved SHA-256.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms import Run
from ecrl.algorithms.state_kinds import Kind, leaf_kinds
from ecrl.config import Config, config_from_dict
from ecrl.errors import CheckpointError, ConfigError
from ecrl.loop.buffers import buffer_names, check_current, kinds_of, mark_written
from ecrl.loop.build import build, device_of, form_in_use
from ecrl.loop.iteration import STATE_FIELDS, expected_state, with_empty_buffers
from ecrl.loop.state_argument import check_state_argument
from ecrl.loop.state_summary import as_state
from ecrl.native.library import is_available
from ecrl.storage.atomic_files import complete_folder, write_folder
from ecrl.storage.checkpoint_files import (
    FORMAT,
    is_file,
    json_bytes,
    read_bytes,
    read_manifest,
    sha256_of,
    sha256_of_file,
    step_checkpoints,
)
from ecrl.storage.tensor_files import TensorFile, read_tensors
from ecrl.tracing_state import version_of

_FROZEN = "frozen_"  # prefix of the names of files with frozen leaves
_RESERVED_FILES = ("state.safetensors", "config.json", "manifest.json")


@dataclass(frozen=True, eq=False)
class FrozenLeaves:
    """Frozen leaves of a state. Training never changes these tensors, so a snapshot contains no copy of them.

    Attributes:
        leaves: dict from the name of each tensor to the tensor.
        versions: version counter of each tensor, which counts in-place writes.
    """

    leaves: dict[str, Tensor]
    versions: list[int]

    @cached_property
    def sha256(self) -> str:
        """Return the SHA-256 of the frozen leaves' file in hexadecimal."""
        return sha256_of(TensorFile(self.leaves))

    @property
    def file(self) -> str:
        """Return the name of the frozen leaves' file in a checkpoint."""
        return f"{_FROZEN}{self.sha256[:16]}.safetensors"

    def on_disk(self, folder: Path) -> Path | None:
        """Return the path of an undamaged copy of the frozen leaves' file in a checkpoint under `folder`, or None."""
        for path in [*folder.glob(f"*/{self.file}"), *folder.glob(f"checkpoints/*/{self.file}")]:
            try:
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() == self.sha256:
                        return path
            except OSError:
                continue
        return None


def _frozen_leaves(leaves: dict[str, Tensor], previous: FrozenLeaves | None) -> FrozenLeaves | None:
    """Return `leaves` as FrozenLeaves, or None if `leaves` is empty.

    If the tensors have not changed since `previous` was made, return `previous`, which caches the checksum.
    """
    if not leaves:
        return None
    versions = [version_of(x) for x in leaves.values()]
    known = {} if previous is None or versions != previous.versions else previous.leaves
    if known.keys() == leaves.keys() and all(x is known[name] for name, x in leaves.items()):
        return previous
    return FrozenLeaves(leaves, versions)


class Snapshot(NamedTuple):
    """Contents of a checkpoint, which a thread can write to disk while training continues.

    The replay buffers and the frozen leaves are not copied. The next iteration may overwrite the buffers only after
    `read` is set.
    """

    tensors: dict[str, Tensor]
    cfg: Config
    conditions: dict[str, Any]  # conditions that affect the exact results, such as the torch version
    logs: dict[str, float]
    files: dict[str, bytes]
    left_out: list[str]  # names of the buffers that are missing in `tensors`
    frozen: FrozenLeaves | None
    # per buffer: the value of its count `written` (see `ecrl.loop.buffers`) at the snapshot, and the count's tensor
    buffers: dict[str, tuple[int, Tensor]]
    read: Event  # `write` sets this event when it has read all tensors; after a failed write, the caller must set it


def snapshot(
    run: Run,
    state: TensorDict,
    cfg: Config,
    logs: dict[str, float] | None = None,
    files: Mapping[str, bytes] | None = None,
    frozen: FrozenLeaves | None = None,
) -> Snapshot:
    """Copy a state, except its buffers and frozen leaves, to host memory. Any thread can then `write` the snapshot.

    Args:
        run: run built from `cfg`.
        state: state of the run, with or without its replay buffers. After this call, the caller may overwrite
            everything except the buffers and the frozen leaves. `write` refuses a snapshot whose buffers were
            overwritten.
        cfg: config of the run.
        logs: scalar logs to store in the manifest, such as the results of the evaluation that selected this state.
        files: dict from the filename of each extra file to its content; the manifest records the checksums.
        frozen: frozen leaves of an earlier snapshot; if `state` has the same frozen leaves, their checksum is not
            computed again.

    Raises: ValueError if a name in `files` is a path, is hidden or is reserved for a file of the checkpoint. UserError
        if a later iteration has overwritten a buffer in `state`.
    """
    for name in files or {}:
        if name in _RESERVED_FILES or name.startswith((".", _FROZEN)) or "/" in name:
            raise ValueError(f"files: {name!r} is a path, a hidden name or a reserved name; choose another name")
    kinds = kinds_of(run)
    check_current(run, state)
    left_out = [name for name in buffer_names(kinds) if name not in state]
    tensors = {name: cast(Tensor, state[path]) for name, path in _paths(state).items()}
    kind = {"/".join(path): kind for path, kind in leaf_kinds(state, kinds).items()}
    shared = _frozen_leaves({name: x for name, x in tensors.items() if kind[name] is Kind.FROZEN}, frozen)
    tensors = {
        name: leaf.detach() if kind[name] is Kind.BUFFER else leaf.detach().to("cpu", copy=True).contiguous()
        for name, leaf in tensors.items()
        if kind[name] is not Kind.FROZEN
    }
    buffers = {
        name: (int(written := tensors[f"{name}/written"]), written)
        for name in buffer_names(kinds)
        if name not in left_out
    }
    made = tensors, cfg, conditions(run, cfg), dict(logs or {}), dict(files or {}), left_out, shared, buffers
    return Snapshot(*made, Event())


def conditions(run: Run, cfg: Config) -> dict[str, Any]:
    """Return the conditions that affect the exact results of a run.

    They are the torch version, the number of threads, the form (compiled, eager or partly eager) and the type of the
    device. If the device is the CPU, the result also reports whether ecrl's C++ functions for recurrences are
    available.
    """
    device = device_of(cfg).type
    # Random bits are the same without C++. Only the recurrences round differently.
    native = {"C++ functions": "used" if is_available("recurrences") else "missing"} if device == "cpu" else {}
    about = {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
    return about | {"form": form_in_use(run), "device": device} | native


def changed_conditions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describe each condition that differs between `old` and `new`. Skip conditions that are missing in `old`.

    >>> changed_conditions({"torch": "2.12", "threads": 2}, {"torch": "2.13", "threads": 2, "device": "cpu"})
    ['torch changed from 2.12 to 2.13']
    """
    names = {"form": "execution"}
    return [
        f"{names.get(name, name)} changed from {old[name]} to {value}"
        for name, value in new.items()
        if old.get(name, value) != value
    ]


def _manifest(saved: Snapshot, files: Mapping[str, bytes | TensorFile]) -> dict[str, Any]:
    manifest: dict[str, Any] = {
        **saved.conditions,
        "logs": saved.logs,
        "format": FORMAT,
        "sample_step": int(saved.tensors["sample_step"]),
        "update_step": int(saved.tensors["update_step"]),
        "sha256": {name: sha256_of(data) for name, data in files.items()},
    }
    manifest |= {"left_out": saved.left_out} if saved.left_out else {}
    if saved.frozen is not None:
        manifest["frozen"] = saved.frozen.file
        manifest["sha256"][saved.frozen.file] = saved.frozen.sha256
    return manifest | {"manifest_sha256": sha256_of(json_bytes(manifest))}


def save(
    path: str | Path,
    state: TensorDict,
    cfg: Config,
    logs: dict[str, float] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Save `state` and `cfg` as a checkpoint in the folder `path`.

    An older checkpoint at `path` is replaced only after the new checkpoint has been written to disk.

    A checkpoint folder is self-contained and may be copied. The file of frozen parameters in the folder may be a hard
    link to a file of another checkpoint.

    Args:
        path: checkpoint folder.
        state: state of a run.
        cfg: config of the run.
        logs: scalar logs to store in the manifest, such as the results of the evaluation that selected this state.
        files: dict from the filename of each extra file to its content; the manifest records the checksums.

    Raises: CheckpointError if the checkpoint cannot be written, or if `path` exists and is neither a checkpoint nor an
        empty folder; UserError if `state` is not the state of a run, or if a later iteration has overwritten a buffer
        in `state`; ValueError as in `snapshot`.
    """
    check_state_argument(state, *STATE_FIELDS)
    write(path, snapshot(build(cfg), state, cfg, logs, files))


def write(path: str | Path, saved: Snapshot) -> None:
    """Write a snapshot to the folder `path`, as `save` does.

    Raises: CheckpointError as in `save`, or if a later iteration has overwritten a buffer of the snapshot.
    """
    path = Path(path)
    if path.exists() and not (path.is_dir() and _may_be_replaced(path)):
        raise CheckpointError(f"{path}: exists and is not a checkpoint; choose another name")
    for name, (expected, written) in saved.buffers.items():
        if expected != int(written):
            raise CheckpointError(
                f"{path}: cannot be written: a later iteration has overwritten the buffer {name}; "
                "save the newest state, or resume from an older checkpoint"
            )
    files: dict[str, bytes | TensorFile] = {
        "state.safetensors": TensorFile(saved.tensors),
        "config.json": json_bytes(saved.cfg.model_dump(mode="json")),
        **saved.files,
    }
    files["manifest.json"] = json_bytes(_manifest(saved, files))
    try:
        if saved.frozen is None:
            write_folder(path, files, saved.read.set)
        else:
            _write_with_frozen(path, files, saved.frozen, saved.read)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror}; make room or choose another place"
        ) from None


def _write_with_frozen(path: Path, files: dict[str, bytes | TensorFile], frozen: FrozenLeaves, read: Event) -> None:
    """Write a checkpoint folder. If another checkpoint has an undamaged file of the frozen leaves, hard-link it."""
    known = frozen.on_disk(path.parent)
    if known is not None:
        try:
            write_folder(path, {**files, frozen.file: known}, read.set)
            return
        except FileNotFoundError:
            if read.is_set():  # the buffers may have changed after the snapshot
                raise
            # the other checkpoint has just been removed, so write the file instead of linking it
    write_folder(path, {**files, frozen.file: TensorFile(frozen.leaves)}, read.set)


def _may_be_replaced(path: Path) -> bool:
    """Return True if a folder is empty or holds a checkpoint, even a damaged checkpoint."""
    return any((path / name).exists() for name in ("manifest.json", "state.safetensors")) or not any(path.iterdir())


def read_files(path: str | Path) -> dict[str, bytes]:
    """Return the content of each file of a checkpoint except `manifest.json`, by filename.

    If the file of frozen parameters is missing or damaged, the policy's `init_frozen` recreates its content.
    `init_frozen` must return the same parameters that the checkpoint saved.

    Raises: CheckpointError if any other file is missing or damaged, or if `init_frozen` fails or returns different
        parameters.
    """
    path, remade = complete_folder(Path(path)), verify(path)
    return {
        name: b"".join(TensorFile(remade[name][0].leaves)) if name in remade else read_bytes(path / name)
        for name in read_manifest(path)["sha256"]
    }


def verify(path: str | Path) -> dict[str, tuple[FrozenLeaves, str]]:
    """Verify the checksum of each file of a checkpoint. A large file need not fit in memory.

    Returns: for each file that the policy's `init_frozen` recreated, the frozen leaves and a warning, by filename.
    Raises: CheckpointError as in `read_files`.
    """
    path, remade = complete_folder(Path(path)), {}
    checksums = read_manifest(path)["sha256"]
    # verify the frozen leaves last, because recreating them requires the config
    for name in sorted(checksums, key=lambda name: name.startswith(_FROZEN)):
        if not is_file(path / name):
            problem = f"{path}/{name}: missing"
        elif sha256_of_file(path / name) != checksums[name]:
            problem = f"{path}/{name}: damaged: its checksum differs from the checksum in the manifest"
        else:
            continue
        if not name.startswith(_FROZEN):
            raise CheckpointError(problem)
        leaves = _remade_frozen(read_bytes(path / "config.json"), checksums[name], problem)
        line = f"{problem}; the policy's init_frozen returns the same parameters, and these are used"
        remade[name] = leaves, line
    return remade


def _remade_frozen(config: bytes, checksum: str, problem: str) -> FrozenLeaves:
    """Recreate the content of a file of frozen leaves by calling the policy's `init_frozen`.

    Raises: CheckpointError with a message that starts with `problem` if the content cannot be recreated or has the
        wrong checksum.
    """
    try:
        cfg = config_from_dict(json.loads(config), "config.json")
        try:
            device = device_of(cfg)
        except ConfigError:  # this machine does not have the run's device
            device = torch.device("cpu")
        init_frozen = build(cfg.replace(**{"trainer.device": str(device)})).policy.init_frozen
        leaves = TensorDict({} if init_frozen is None else {"frozen_params": init_frozen(device)}, [])
        made = FrozenLeaves({name: cast(Tensor, leaves[place]) for name, place in _paths(leaves).items()}, [])
        reason = "returns other parameters"
        if made.leaves and made.sha256 == checksum:
            return made
    except Exception as error:  # the policy's code may raise any error
        reason = f"cannot replace it ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    raise CheckpointError(
        f"{problem}, and the policy's init_frozen {reason}; copy a file with the SHA-256 {checksum} here, "
        "from a backup or from an undamaged checkpoint"
    )


def _paths(structure: TensorDict) -> dict[str, tuple[str, ...]]:
    """Map each tensor's name in a checkpoint to its path in the state. A name is the path's keys joined by "/".

    A path cannot be computed from a name alone, because a key may itself contain "/".
    """
    pairs: Any = structure.items(True, True)  # a locked TensorDict caches the result of `keys` in a reference cycle
    return {"/".join(path): path for path in ((key,) if isinstance(key, str) else tuple(key) for key, _ in pairs)}


def _upgrade(tensors: dict[str, Tensor], expected: TensorDict) -> dict[str, Tensor]:
    """Convert the tensors of a checkpoint from an older version of ecrl to the names of this version.

    Checkpoints of older versions may lack hyperparameters of schedules and the number of iterations. The function
    copies missing values of these fields from `expected`. Checkpoints of older versions may also have one optimiser
    state for all parameter groups, which the function divides among the groups. For example, `opt/mu/critic/w` becomes
    `opt/critic/mu/critic/w`.
    """
    upgraded = dict(tensors)
    for name, place in _paths(expected).items():
        if name in tensors:
            continue
        ungrouped = "/".join((place[0], *place[2:]))
        if place[0] in ("hyper", "iterations"):
            upgraded[name] = cast(Tensor, expected[place])
        elif place[0] == "opt" and ungrouped in tensors:
            upgraded[name] = tensors[ungrouped]
            if ungrouped not in _paths(expected):
                upgraded.pop(ungrouped, None)
    return upgraded


def _fill_structure(structure: TensorDict, tensors: dict[str, Tensor], path: Path) -> TensorDict:
    """Return a copy of the state `structure` with its values replaced by `tensors`.

    Raises: CheckpointError if a tensor is missing, is unknown, or has the wrong shape or dtype.
    """
    places, tensors = _paths(structure), _upgrade(tensors, structure)
    unmatched = sorted(places.keys() ^ tensors.keys())
    if unmatched:
        raise CheckpointError(
            f"{path}: state and config disagree on {', '.join(unmatched)}; load it with the code that saved it"
        )
    filled = structure.copy()
    for name, place in places.items():
        saved, leaf = tensors[name], cast(Tensor, structure[place])
        if saved.shape != leaf.shape or saved.dtype != leaf.dtype:
            raise CheckpointError(
                f"{path}: {name} is {saved.dtype} {list(saved.shape)}, expected {leaf.dtype} {list(leaf.shape)}; load "
                "it with the code that saved it"
            )
        filled[place] = saved.to(leaf.device)
    return filled.lock_()


def load(path: str | Path, device: str | None = None) -> tuple[TensorDict, Config]:
    """Load the state and the config of a checkpoint folder. If `device` is not None, it replaces `trainer.device`.

    If the algorithm has a replay buffer that the checkpoint does not contain, as in `checkpoints/best`, the buffer of
    the returned state is empty. If the file of frozen parameters is missing or damaged, `load` calls the policy's
    `init_frozen`. If `init_frozen` returns the saved parameters, `load` uses them and warns.

    Raises: CheckpointError if a file is missing or damaged, or if a tensor does not fit the config; ConfigError if the
        config is invalid, or if its device is not available.
    """
    return load_run(path, device)[1:]


def load_run(path: str | Path, device: str | None = None) -> tuple[Run, TensorDict, Config]:
    """Load a checkpoint as `load` does. Return the run that its config describes, the state and the config."""
    path = complete_folder(Path(path))
    remade = verify(path)
    for _, line in remade.values():
        warnings.warn(line, stacklevel=3)
    raw = json.loads(read_bytes(path / "config.json"))
    if device is not None:
        raw["trainer"]["device"] = device
    cfg = config_from_dict(raw, f"{path}/config.json")
    tensors, run, left_out = read_tensors(path / "state.safetensors"), build(cfg), buffers_left_out(path)
    for name in read_manifest(path)["sha256"]:
        if name.startswith(_FROZEN):  # older versions of ecrl saved frozen leaves in `state.safetensors`
            tensors |= remade[name][0].leaves if name in remade else read_tensors(path / name)
    expected = expected_state(run, cfg, _environment_state(tensors)).exclude(*left_out)
    state = _fill_structure(cast(TensorDict, expected), tensors, path)
    if left_out:
        state = with_empty_buffers(run, cfg, state, left_out)
    state = as_state(state).lock_()
    mark_written(run, state, state)  # `written` had a different meaning in older versions of ecrl
    return run, state, cfg


def buffers_left_out(path: str | Path) -> list[str]:
    """Return the names of the replay buffers that a checkpoint does not contain."""
    return read_manifest(path).get("left_out", [])


def same_weights(path: str | Path, state: TensorDict) -> bool:
    """Return True if the policy parameters in a checkpoint are exactly equal to the parameters in `state`."""
    verify(path)
    old = read_tensors(complete_folder(Path(path)) / "state.safetensors", ["params"])
    params = cast(TensorDict, state.select("params"))
    new = {name: cast(Tensor, params[place]).detach().cpu() for name, place in _paths(params).items()}
    old_shapes, new_shapes = ({n: (x.dtype, x.shape) for n, x in weights.items()} for weights in (old, new))
    return old_shapes == new_shapes and all(torch.equal(old[name], new[name]) for name in new)


def _environment_state(tensors: dict[str, Tensor]) -> TensorDict:
    """Extract the environment state from the tensors of a checkpoint.

    Gymnasium environments keep their state outside of tensors, so a checkpoint does not contain their state. The field
    `env/token` identifies the environments in the process that opened them. The function sets `env/token` to 0, which
    means that these environments are lost.
    """
    if "env/token" in tensors:
        tensors["env/token"] = torch.zeros_like(tensors["env/token"])
    env = {tuple(name.split("/")[1:]): leaf for name, leaf in tensors.items() if name.startswith("env/")}
    batch, state = next((leaf.shape[:1] for leaf in env.values()), torch.Size()), TensorDict({}, [])
    state["env"] = TensorDict({}, batch)
    for path, leaf in env.items():
        state["env", *path] = leaf
    return state


def latest(run: str | Path) -> Path:
    """Return the newest undamaged checkpoint of a run folder. If `run` is a checkpoint folder, return it.

    The newest checkpoint is the folder `checkpoints/step_<N>` with the most env steps N. `latest` does not return
    `checkpoints/best`. `latest` verifies all checksums of each checkpoint that it tries in a run folder. If a
    checkpoint is damaged, `latest` tries the next older checkpoint, and warns with the name of the damaged file. If
    `run` is a checkpoint folder, `latest` does not verify it, because `load` does.

    Raises: CheckpointError if there is no checkpoint, or if all checkpoints are damaged.
    """
    run = Path(run)
    if is_file(run / "manifest.json") or is_file(complete_folder(run) / "manifest.json"):
        return run
    folders, faults = step_checkpoints(run), []
    if not folders:
        reason = "" if run.is_dir() else "this is a file, " if run.exists() else "the folder does not exist, "
        expected = f"expected {run}/checkpoints/step_<N>, or a checkpoint folder"
        raise CheckpointError(f"{run}: no checkpoint: {reason}{expected}")
    for path in reversed(folders):
        try:
            verify(path)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        for fault in faults:
            warnings.warn(f"{fault}; using {path.name} instead", stacklevel=2)
        return path
    raise CheckpointError("\n".join(faults) + f"\n{run}: every checkpoint is damaged; start a new run")
