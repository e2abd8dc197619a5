"""Checkpoints: a folder of `state.safetensors`, `config.json` and `manifest.json` with checksums.

A folder is written aside, synced to disk and renamed, so a reader sees all of it or nothing. Nothing is ever unpickled.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from tensordict import TensorDict
from torch import Tensor

from ecrl.config import Config, config_from_dict
from ecrl.errors import CheckpointError
from ecrl.loop import expected_state, form_of, steps_per_iteration
from ecrl.types import LogData

FORMAT = 1


def _flat(state: TensorDict) -> dict[str, Tensor]:
    leaves = {name: cast(Tensor, state[path]) for name, path in _paths(state).items()}
    return {name: leaf.detach().cpu().contiguous().clone() for name, leaf in leaves.items()}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _json(data: Any) -> bytes:
    return (json.dumps(data, indent=2, sort_keys=True) + "\n").encode()


def _manifest(state: TensorDict, cfg: Config, files: dict[str, bytes], logs: dict[str, float]) -> dict[str, Any]:
    manifest: dict[str, Any] = {
        "logs": logs,
        "format": FORMAT,
        "sample_step": int(state["sample_step"]),
        "update_step": int(state["update_step"]),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "form": form_of(cfg).name,
        "sha256": {name: _sha256(data) for name, data in files.items()},
    }
    return manifest | {"manifest_sha256": _sha256(_json(manifest))}


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(path: str | Path, state: TensorDict, cfg: Config, logs: dict[str, float] | None = None) -> None:
    """Write `state` and `cfg` as the folder `path`, in place of an older one once the new one is complete.

    `logs` are numbers to keep in the manifest, such as those of the evaluation that chose this state.
    """
    path = Path(path)
    if path.exists() and not (path.is_dir() and ((path / "manifest.json").exists() or not any(path.iterdir()))):
        raise CheckpointError(f"{path}: exists and is no checkpoint; choose another name")
    files = {"state.safetensors": tensors_to_bytes(_flat(state)), "config.json": _json(cfg.model_dump(mode="json"))}
    files["manifest.json"] = _json(_manifest(state, cfg, files, logs or {}))
    try:
        _write(path, files)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror}; make room or choose another place"
        ) from None


def _write(path: Path, files: dict[str, bytes]) -> None:
    """All of `files` as the folder `path`, or an OSError and nothing."""
    aside, old = (path.with_name(f".{path.name}.{suffix}.{os.getpid()}") for suffix in ("new", "old"))
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        for name, data in files.items():
            _write_synced(aside / name, data)
        _sync_folder(aside)
        if path.exists():
            path.rename(old)
        aside.rename(path)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder, after its own checksum has been compared."""
    path = Path(path)
    if not (path / "manifest.json").is_file():
        raise CheckpointError(f"{path}: not a checkpoint: it has no manifest.json")
    try:
        manifest = dict(json.loads((path / "manifest.json").read_bytes()))
        own, _ = manifest.pop("manifest_sha256"), dict(manifest["sha256"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}/manifest.json: damaged ({error})") from None
    if own != _sha256(_json(manifest)):
        raise CheckpointError(f"{path}/manifest.json: damaged: its checksum differs")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {manifest['format']}, this version reads format {FORMAT}")
    return manifest


def _read_checked(path: Path) -> tuple[bytes, Any]:
    """The bytes of the state and the parsed config, after every checksum has been compared."""
    files = {}
    for name, checksum in read_manifest(path)["sha256"].items():
        if not (path / name).is_file():
            raise CheckpointError(f"{path}/{name}: missing")
        files[name] = (path / name).read_bytes()
        if _sha256(files[name]) != checksum:
            raise CheckpointError(f"{path}/{name}: damaged: its checksum differs from the manifest's")
    return files["state.safetensors"], json.loads(files["config.json"])


def _paths(structure: TensorDict) -> dict[str, tuple[str, ...]]:
    """Where each tensor of a file belongs; a name on the way may hold a "/" itself."""
    keys: Any = structure.keys(include_nested=True, leaves_only=True)
    return {"/".join(path): path for path in ((key,) if isinstance(key, str) else tuple(key) for key in keys)}


def _into(structure: TensorDict, tensors: dict[str, Tensor], path: Path) -> TensorDict:
    """`tensors` as `structure` has them, on its device; refuses missing, extra or misshapen ones by name."""
    places = _paths(structure)
    odd = sorted(places.keys() ^ tensors.keys())
    if odd:
        raise CheckpointError(f"{path}: state and config disagree on {', '.join(odd)}")
    filled = structure.clone()
    for name, place in places.items():
        given, leaf = tensors[name], cast(Tensor, structure[place])
        if given.shape != leaf.shape or given.dtype != leaf.dtype:
            raise CheckpointError(
                f"{path}: {name} is {given.dtype} {list(given.shape)}, expected {leaf.dtype} {list(leaf.shape)}"
            )
        filled[place] = given.to(leaf.device)
    return filled.lock_()


def load(path: str | Path, device: str | None = None) -> tuple[TensorDict, Config]:
    """The state and config of a checkpoint folder; `device` replaces the config's.

    Raises: CheckpointError naming the file that is missing or damaged, or the field that does not fit; ConfigError.
    """
    path = Path(path)
    data, raw = _read_checked(path)
    if device is not None:
        raw["trainer"]["device"] = device
    cfg = config_from_dict(raw, f"{path}/config.json")
    try:
        tensors = tensors_from_bytes(data)
    except SafetensorError as error:
        raise CheckpointError(f"{path}/state.safetensors: damaged ({error})") from None
    return _into(expected_state(cfg, _remembered(tensors)), tensors, path), cfg


def _remembered(tensors: dict[str, Tensor]) -> TensorDict:
    """The env state of a file. Where it lived outside the tensors, as in Gymnasium, token 0 says that it is gone."""
    if "env/token" in tensors:
        tensors["env/token"] = torch.zeros_like(tensors["env/token"])
    env = {tuple(name.split("/")[1:]): leaf for name, leaf in tensors.items() if name.startswith("env/")}
    batch, made = next((leaf.shape[:1] for leaf in env.values()), torch.Size()), TensorDict({}, [])
    made["env"] = TensorDict({}, batch)
    for path, leaf in env.items():
        made["env", *path] = leaf
    return made


def latest(run: str | Path) -> Path:
    """The newest checkpoint of a run folder by env steps, or the folder itself if it is a checkpoint."""
    run = Path(run)
    if (run / "manifest.json").is_file():
        return run
    found = [p for p in (run / "checkpoints").glob("step_*") if p.name.removeprefix("step_").isdecimal()]
    if not found:
        raise CheckpointError(f"{run}: no checkpoint: expected {run}/checkpoints/step_<N>, or a checkpoint folder")
    return max(found, key=lambda p: int(p.name.removeprefix("step_")))


def with_checkpoints(records: Iterator[LogData], cfg: Config, run_dir: str | Path) -> Iterator[LogData]:
    """Save the state under `run_dir` when `trainer.save_freq` env steps are crossed, and however the run ends."""
    last, saved, freq = None, None, cfg.trainer.save_freq

    def write(record: LogData) -> int:
        save(Path(run_dir) / "checkpoints" / f"step_{record['sample_step']}", record["state"], cfg)
        return record["sample_step"]

    try:
        for record in records:
            if record["log_type"] == "train":
                last, step = record, record["sample_step"]
                if step // freq > (step - steps_per_iteration(cfg)) // freq:
                    saved = write(record)
            yield record
    finally:
        if last is not None and saved != last["sample_step"]:
            write(last)


def with_best_checkpoint(records: Iterator[LogData], cfg: Config, run_dir: str | Path) -> Iterator[LogData]:
    """Save the state as `checkpoints/best` under `run_dir` when an evaluation's `trainer.best_eval_metric` is the best.

    The best so far is read from an earlier one's manifest, so a resumed run goes on with it. NaN is never the best, nor
    is an evaluation in which no episode told the metric.
    """
    name, sign = cfg.trainer.best_eval_metric, 1.0 if cfg.trainer.best_eval_mode == "max" else -1.0
    path = Path(run_dir) / "checkpoints" / "best"
    best = read_manifest(path)["logs"].get(name) if path.exists() else None
    for record in records:
        if record["log_type"] == "evaluate":
            logs = {key: float(value) for key, value in record["logs"].items()}
            value = logs.get(name, math.nan)
            if not math.isnan(value) and (best is None or sign * value > sign * best):
                best = value
                save(path, record["state"], cfg, logs)
        yield record
