"""Going on with a run from its newest checkpoint, as if it had never stopped."""

import json
import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from ecrl.config import Config, config_from_dict, diff, load_config
from ecrl.distributed import rank
from ecrl.errors import CheckpointError, ConfigError
from ecrl.loop.build import build, device_of
from ecrl.loop.iteration import check_state, expected_state, init_state
from ecrl.run.atomic_files import whole
from ecrl.run.checkpoint import conditions, differing, latest, load, read_manifest, same_weights, steps_in
from ecrl.run.folder import rewrite
from ecrl.run.rank_shards import with_own


def resume(
    run_dir: str | Path,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    force: bool = False,
) -> tuple[TensorDict, Config]:
    """The newest checkpoint of a run and the config to go on with, for `train(state, cfg, run_dir)`.

    Bit for bit what an uninterrupted run would have been, on the same device, torch version, number of threads and
    form; where one of those differs, that is warned of. What was logged after the checkpoint is taken out of
    `metrics.jsonl`. A damaged checkpoint is warned of, and the one before it used; a run that was stopped before its
    first one begins again.

    Args:
        run_dir: run folder.
        config: file of a changed config; the run's own if None.
        overrides: values by dotted key.
        force: go on with a config that differs; its hyperparameters then replace those in the state.

    Raises: ConfigError listing every key that differs, unless `force`; CheckpointError.
    """
    if (Path(run_dir) / "manifest.json").exists():
        raise ConfigError(f"{run_dir}: is a checkpoint; give the folder of its run, to go on in it")
    path = latest(run_dir) if steps_in(run_dir) or not (Path(run_dir) / "config.json").exists() else None
    own = load_config((Path(run_dir) if path is None else whole(path)) / "config.json")
    given = own.model_dump(mode="json") if config is None else None
    cfg = config_from_dict(given, str(run_dir), overrides) if config is None else load_config(config, overrides)
    changes = diff(own, cfg)
    if changes and not force:
        lines = "\n".join(f"  {line}" for line in changes)
        raise ConfigError(f"{run_dir}: the config differs from the run's; go on with it by --force:\n{lines}")
    if path is None:
        if rank() == 0:
            forget_after(Path(run_dir), 0)
        return init_state(cfg), cfg
    state, own = load(path, None if _is_here(own) else cfg.trainer.device)
    if changes:
        state = _changed(state.to(device_of(cfg)), own, cfg)
    state = with_own(state, cfg, path)
    check_state(build(cfg), state, cfg)
    if rank() == 0:
        _warn_of_other_bits(path, cfg)
        forget_after(Path(run_dir), int(state["sample_step"]))
    return state, cfg


def _is_here(cfg: Config) -> bool:
    """Whether the device of a config is one of this machine's."""
    with suppress(ConfigError):
        return device_of(cfg) is not None
    return False


def goes_on(run_dir: str | Path, state: TensorDict, cfg: Config) -> bool:
    """Whether a state belongs to the run in a folder, which may have its weights; else an equal config says so.

    The state before the first step belongs to a run that was stopped before it had logged or saved anything.
    """
    folder, step, metrics = Path(run_dir), int(state["sample_step"]), Path(run_dir) / "metrics.jsonl"
    if step == 0 and (steps_in(folder) or (metrics.is_file() and metrics.stat().st_size)):
        return False
    for path in (folder / "checkpoints" / f"step_{step}", folder / "checkpoints" / "best"):
        with suppress(CheckpointError):
            if read_manifest(path)["sample_step"] == step:
                return same_weights(path, state, cfg)
    with suppress(ConfigError):
        return not diff(load_config(folder / "config.json"), cfg)
    return False


def _changed(state: TensorDict, own: Config, cfg: Config) -> TensorDict:
    """The state with what the changed config sets in it: hyperparameters, the adaptive rate's start, the seed's key."""
    before, after = (expected_state(build(config), config, state) for config in (own, cfg))
    names = ["hyper"]
    if "learning_rate" in state and float(before["learning_rate"]) != float(after["learning_rate"]):
        names.append("learning_rate")
    if own.trainer.seed != cfg.trainer.seed:
        names.append("key")
    return state.copy().update({name: after[name] for name in names}).lock_()


def _warn_of_other_bits(path: Path, cfg: Config) -> None:
    if other := differing(read_manifest(path), conditions(cfg)):
        warnings.warn(f"{path}: the rest will not be bit for bit the same run: {'; '.join(other)}", stacklevel=3)


def _step_of(row: bytes) -> float:
    """Of a line of `metrics.jsonl`; infinite for one that a kill cut off."""
    try:
        return json.loads(row)["sample_step"] if row.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def forget_after(run_dir: Path, step: int) -> None:
    """Drop the rows of iterations that will be run again from `metrics.jsonl`."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists():
        return
    rows = metrics.read_bytes().splitlines(keepends=True)
    kept = [row for row in rows if _step_of(row) <= step]
    if len(kept) == len(rows):
        return
    rewrite(metrics, kept)
