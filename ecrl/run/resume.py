"""Resume a run from its newest checkpoint. Under the same conditions, the run continues as if it had never stopped."""

import json
import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from ecrl.algorithms import Run
from ecrl.algorithms.core import decisions
from ecrl.config import Config, config_from_dict, diff, load_config
from ecrl.distributed import rank
from ecrl.errors import CheckpointError, ConfigError
from ecrl.loop.buffers import mark_written
from ecrl.loop.build import build, device_of
from ecrl.loop.iteration import (
    check_state,
    crossed,
    expected_state,
    first_state,
    steps_per_iteration,
    steps_per_record,
)
from ecrl.pytree import replaced
from ecrl.run.checkpoint import (
    buffers_left_out,
    changed_conditions,
    conditions,
    latest,
    load_run,
    read_manifest,
    same_weights,
    step_checkpoints,
    verify,
)
from ecrl.run.compiled_from import restore_switch
from ecrl.run.folder import replace_rows
from ecrl.run.rank_shards import load_own_shard
from ecrl.storage.atomic_files import complete_folder
from ecrl.types import LogData


def resume(
    run_dir: str | Path,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    force: bool = False,
) -> tuple[TensorDict, Config]:
    """Load the newest saved state and the config of a run, as arguments for `train(state, cfg, run_dir)`.

    A resumed run has exactly the same results as an uninterrupted run under the same conditions. The conditions
    are the device, the torch version, the number of threads, and compiled or eager execution. On the CPU, the use
    of ecrl's C++ functions is also a condition. A warning names each condition that has changed. In two cases, the
    results differ even under the same conditions, and ecrl warns: Gymnasium environments restart their episodes, and
    if `trainer.save_replay` is false, a run with a replay buffer first fills an empty buffer. Rows that were logged
    after the checkpoint are removed from `metrics.jsonl`. If the newest checkpoint is damaged, ecrl warns and uses the
    previous checkpoint. If the run was last resumed with a changed config, but stopped before it saved a checkpoint,
    the run continues without the change, and ecrl warns. A run without a checkpoint starts from the beginning.

    Args:
        run_dir: run folder.
        config: config file, or name of a shipped config, with which the run continues; if None, the run's own config is
            used.
        overrides: dict from dotted key to a value that replaces the config's value.
        force: if True, continue even if the config differs from the run's own config. If the configs differ, the
            hyperparameters of the new config replace the hyperparameters in the state.

    Raises: ConfigError if the config differs from the run's own config and `force` is False, with a line for each key
        that differs. ConfigError also if the folder is a checkpoint, or if a config is invalid. CheckpointError if the
        folder is not a run, or if all its checkpoints are damaged.
    """
    return resume_run(run_dir, config, overrides, force)[1:]


def resume_run(
    run_dir: str | Path,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    force: bool = False,
) -> tuple[Run, TensorDict, Config]:
    """Resume a run as `resume` does, and return the run, the state and the config."""
    check_run_folder(run_dir)
    path = latest(run_dir) if step_checkpoints(run_dir) else None
    own = load_config((Path(run_dir) if path is None else complete_folder(path)) / "config.json")
    if config is None:
        cfg = config_from_dict(own.model_dump(mode="json"), str(run_dir), overrides)
    else:
        cfg = load_config(config, overrides)
    changes = diff(own, cfg)
    if changes and not force:
        lines = "\n".join(f"  {line}" for line in changes)
        raise ConfigError(
            f"{run_dir}: the config differs from the run's own config; to accept the changes, add --force (in "
            f"Python, force=True):\n{lines}"
        )
    if path is None:
        if rank() == 0:
            drop_rows_after(Path(run_dir), 0)
        run = build(cfg)
        return run, first_state(run, cfg), cfg
    run, state, own = load_run(path, None if _has_device(own) else cfg.trainer.device)
    if changes:
        own_run, run = run, build(cfg)
        state = _apply_changes(state.to(device_of(cfg)), (own_run, own), (run, cfg))
        if run.algorithm.data is not None and run.algorithm.data != own_run.algorithm.data:
            run.algorithm.data.check(run, cfg)
            state = replaced(state, {"data_sha256": run.algorithm.data.sha256().to(device_of(cfg))}).lock_()
    state = load_own_shard(run, state, path)
    mark_written(run, state, state)
    check_state(run, state, cfg)
    restore_switch(run, Path(run_dir), int(decisions(state)) // steps_per_iteration(cfg))
    if rank() == 0:
        _warn_of_other_conditions(path, run, cfg)
        if not changes:
            _warn_of_unsaved_config(path, Path(run_dir) / "config.json", cfg)
        if left_out := buffers_left_out(path):
            warnings.warn(
                f"{path}: has no {', '.join(left_out)}, because trainer.save_replay is false; the run fills an empty "
                "buffer before it learns again, as a new run does",
                stacklevel=3,
            )
        drop_rows_after(Path(run_dir), int(state["sample_step"]))
    return run, state, cfg


def check_run_folder(run_dir: str | Path) -> None:
    """Check that a folder holds a run, without writing to the folder.

    A run has a checkpoint with an undamaged manifest, or no checkpoints and a valid `config.json`. Other files are not
    checked.

    Raises: ConfigError if the folder is a checkpoint, or if its config is not valid. CheckpointError if the folder has
        neither a checkpoint nor a config, or if the manifests of all checkpoints are damaged.
    """
    folder = Path(run_dir)
    if any((folder / name).exists() for name in ("manifest.json", "state.safetensors")):
        raise ConfigError(f"{run_dir}: is a checkpoint; to resume, pass the folder of its run")
    checkpoints = step_checkpoints(folder)
    for path in reversed(checkpoints):
        with suppress(CheckpointError):
            read_manifest(path)
            return
    if checkpoints or not (folder / "config.json").exists():
        latest(run_dir)  # raises the error
    else:
        load_config(folder / "config.json")


def _has_device(cfg: Config) -> bool:
    """Return True if this machine has the device that the config names."""
    with suppress(ConfigError):
        return device_of(cfg) is not None
    return False


def continues_run(run_dir: str | Path, state: TensorDict, cfg: Config) -> bool:
    """Return True if `state` belongs to the run in the folder `run_dir`.

    If the folder has a checkpoint with the same number of env steps as `state`, the checkpoint and `state` must have
    equal weights. Otherwise, `cfg` must equal the config in the folder. An initial state belongs only to a run that has
    not logged or saved anything. If the folder has a newer undamaged checkpoint than `state`, return False, because a
    later `resume` would continue from this checkpoint instead.
    """
    folder, step, metrics = Path(run_dir), int(state["sample_step"]), Path(run_dir) / "metrics.jsonl"
    if step == 0 and (step_checkpoints(folder) or (metrics.is_file() and metrics.stat().st_size)):
        return False
    if any(_is_newer(path, step) for path in step_checkpoints(folder)):
        return False
    for path in (folder / "checkpoints" / f"step_{step}", folder / "checkpoints" / "best"):
        with suppress(CheckpointError):
            if read_manifest(path)["sample_step"] == step:
                return same_weights(path, state)
    with suppress(ConfigError):
        return not diff(load_config(folder / "config.json"), cfg)
    return False


def _is_newer(path: Path, step: int) -> bool:
    """Return True if an undamaged checkpoint has more than `step` env steps."""
    with suppress(CheckpointError):
        if read_manifest(path)["sample_step"] > step:
            verify(path)
            return True
    return False


def _apply_changes(state: TensorDict, own: tuple[Run, Config], changed: tuple[Run, Config]) -> TensorDict:
    """Replace the hyperparameters, learning rates and random key in a state by the values of a changed config.

    A learning rate is replaced only if the config changes it. The random key is replaced only if the config changes the
    seed. If an adaptive schedule changes a learning rate, the state stores the rate in a field whose name ends in
    `learning_rate`.

    Args:
        state: state of the run.
        own: the `Run` and the config to which the state belongs.
        changed: the `Run` and the config with which training continues.
    """
    before, after = (expected_state(run, cfg, state) for run, cfg in (own, changed))
    rates = [str(name) for name in state.keys() if str(name).endswith("learning_rate")]  # noqa: SIM118
    rates = [name for name in rates if name in before and name in after]  # `check_state` rejects other differences
    names = ["hyper", *(name for name in rates if not torch.equal(before[name], after[name]))]
    if own[1].trainer.seed != changed[1].trainer.seed:
        names.append("key")
    return replaced(state, after.select(*names)).lock_()  # replace whole fields, because schedules have different keys


def _warn_of_other_conditions(path: Path, run: Run, cfg: Config) -> None:
    if other := changed_conditions(read_manifest(path), conditions(run, cfg)):
        warnings.warn(
            f"{path}: the resumed run may differ by rounding from an uninterrupted run: {'; '.join(other)}",
            stacklevel=3,
        )


def _warn_of_unsaved_config(path: Path, last: Path, cfg: Config) -> None:
    """Warn if the run last trained with another config than `cfg`, but saved no checkpoint with that config.

    Args:
        path: checkpoint from which the run resumes.
        last: file with the config with which the run last trained.
        cfg: config of the checkpoint, with which the run continues.
    """
    with suppress(ConfigError):
        if lost := diff(cfg, load_config(last)):
            problem = f"{path} was saved before the last change of the config, and the run continues without the change"
            warnings.warn(
                f"{problem}: {', '.join(lost)}; to train with the change, also pass the keys and --force (in Python, "
                "overrides and force=True)",
                stacklevel=3,
            )


def _step_of(row: bytes) -> float:
    """Return the number of env steps in a row of `metrics.jsonl`, or infinity if the row is truncated or invalid."""
    try:
        return json.loads(row)["sample_step"] if row.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def drop_rows_after(run_dir: Path, step: int) -> None:
    """Remove truncated rows, and rows with more than `step` env steps, from `metrics.jsonl`.

    The iterations after `step` env steps will run again and log new rows.
    """
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists():
        return
    rows = metrics.read_bytes().splitlines(keepends=True)
    rows_until = [row for row in rows if _step_of(row) <= step]
    if len(rows_until) < len(rows):
        replace_rows(metrics, rows_until)


def pending_evaluation(state: TensorDict, cfg: Config, run_dir: str | Path) -> LogData | None:
    """Return the train record of `state` if the run stopped before the evaluation of `state`, else None.

    A complete evaluation has a row in `metrics.jsonl`. If a complete evaluation is the best so far, its state is also
    saved in `checkpoints/best`. If the evaluation has a row and is the best so far, but its state is not saved there,
    the function removes the row, because the evaluation will run again and log a new row. In a run of several ranks,
    the record also contains the other ranks' shards from the checkpoint of `state`.

    Args:
        state: state with which the run continues.
        cfg: config of the run.
        run_dir: run folder.
    """
    step, metrics = int(state["sample_step"]), Path(run_dir) / "metrics.jsonl"
    if not metrics.is_file():
        return None
    lines = metrics.read_bytes().splitlines(keepends=True)
    # the first record of a folder has no row before it, and the run in the folder may have begun at a trained state
    start = 0 if "decision_step" in state else max(0, step - steps_per_record(cfg))
    taken = step - max((n for line in lines if (n := _row(line).get("sample_step", step)) < step), default=start)
    if not crossed(step, taken, cfg.trainer.eval_freq):
        return None
    rows = {row["log_type"]: line for line in lines if (row := _row(line)).get("sample_step") == step}
    if "train" not in rows:
        return None
    if "evaluate" in rows:
        if _best_is_saved(_row(rows["evaluate"]), cfg, Path(run_dir)):
            return None
        replace_rows(metrics, [line for line in lines if line != rows["evaluate"]])
    shards = {p.name: p.read_bytes() for p in (Path(run_dir) / "checkpoints" / f"step_{step}").glob("rank_*")}
    record = LogData(log_type="train", sample_step=step, logs={}, state=state, taken=taken)
    return {**record, "files": shards} if shards else record


def _row(line: bytes) -> dict[str, Any]:
    """Parse a row of `metrics.jsonl`. Return an empty dict if the row is truncated, as after a kill."""
    with suppress(ValueError):
        return json.loads(line)
    return {}


def _best_is_saved(row: dict[str, Any], cfg: Config, run_dir: Path) -> bool:
    """Return True if `checkpoints/best` is at least as good as the evaluation `row`, or if `row` lacks the metric."""
    name, sign = cfg.trainer.best_eval_metric, 1.0 if cfg.trainer.best_eval_mode == "max" else -1.0
    value, best = row.get(name), None
    with suppress(CheckpointError):
        best = read_manifest(run_dir / "checkpoints" / "best")["logs"].get(name)
    return value is None or (best is not None and sign * best >= sign * value)
