"""Loop and consumers composed from a config: `train` for notebooks, `train_from_config` for scripts and the shell."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tensordict import TensorDict

from ecrl.checkpoint import with_checkpoints
from ecrl.config import Config, load_config, total_steps
from ecrl.distributed import start, world_size
from ecrl.errors import ConfigError
from ecrl.evaluation import with_evaluation
from ecrl.loggers import History, with_host_logs, with_jsonl, with_progress, with_tensorboard
from ecrl.loop import device_of, form_of, init_state, train_iter
from ecrl.types import LogData


def consumers(
    records: Iterator[LogData], cfg: Config, run_dir: Path | None, first: int, progress: bool
) -> Iterator[LogData]:
    """Everything a run's config asks for, stacked on its records."""
    records = with_evaluation(records, cfg) if cfg.trainer.enable_eval else records
    records = with_host_logs(records)
    if run_dir is not None:
        (run_dir / "logs").mkdir(exist_ok=True)
        (run_dir / "config.json").write_text(json.dumps(cfg.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
        records = with_jsonl(records, run_dir / "metrics.jsonl")
        records = with_tensorboard(records, run_dir / "logs", first)
        records = with_checkpoints(records, cfg, run_dir)
    return with_progress(records, first, total_steps(cfg, world_size())) if progress else records


def train(
    state: TensorDict, cfg: Config, run_dir: str | Path | None = None, progress: bool = True
) -> tuple[TensorDict, History]:
    """Train to the end of the budget.

    Args:
        state: from `init_state`, `load`, or a record of an earlier run.
        cfg: of the run.
        run_dir: a folder to write config, logs, metrics and checkpoints into; None writes nothing.
        progress: show a live line.

    Returns: the last state and the history of logs. Ctrl-C ends the run early and returns what there is.
    """
    folder, history, first = None if run_dir is None else Path(run_dir), History(), int(state["sample_step"])
    if folder is not None:
        _claim(folder, new=first == 0)
    try:
        for record in consumers(train_iter(state, cfg), cfg, folder, first, progress):
            history.add(record)
            state = record["state"]
    except KeyboardInterrupt:
        where = "returning what there is" if folder is None else f"its checkpoint is in {folder}"
        print(f"interrupted at {int(state['sample_step']):,} env steps; {where}")
    return state, history


def _make(folder: Path, exist_ok: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise ConfigError(f"run_dir: {folder}: cannot be made: {error.strerror}; choose another folder") from None


def _claim(folder: Path, new: bool) -> None:
    """Make the run folder; a new run does not go where another one wrote."""
    _make(folder, exist_ok=True)
    taken = [name for name in ("config.json", "metrics.jsonl", "checkpoints") if (folder / name).exists()]
    if new and taken:
        raise ConfigError(f"run_dir: {folder} already holds a run ({taken[0]}); choose another folder or remove it")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"run_dir: {folder}: not writable; choose another folder")


def _new_run_dir(cfg: Config) -> Path:
    """A fresh `outputs/<exp_name>_<YYYYmmdd_HHMMSS>`, numbered if another run took that name."""
    stem, number = f"outputs/{cfg.trainer.exp_name}_{time.strftime('%Y%m%d_%H%M%S')}", 1
    while True:
        folder = Path(stem if number == 1 else f"{stem}_{number}")
        try:
            _make(folder, exist_ok=False)
            return folder
        except FileExistsError:
            number += 1


def train_from_config(
    path: str | Path, distributed: bool | None = None, run_dir: str | Path | None = None
) -> tuple[TensorDict, History]:
    """Train what a JSON file describes, into a run folder.

    Args:
        path: config file.
        distributed: replaces `trainer.distributed` unless None.
        run_dir: the run folder; `outputs/<exp_name>_<time>` if None. A folder that holds a run is refused.

    Returns: the last state and the history of logs.
    Raises: ConfigError, one line per fault; also for a folder that cannot be written or holds a run.
    """
    cfg = load_config(path)
    if distributed is not None:
        cfg = cfg.replace(**{"trainer.distributed": distributed})
    start(cfg.trainer.distributed)
    try:
        state, form = init_state(cfg), form_of(cfg)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    folder = _new_run_dir(cfg) if run_dir is None else Path(run_dir)
    _claim(folder, new=True)
    print(f"run      {folder}")
    print(f"task     {cfg.env.name}, {cfg.policy.name}, {cfg.algorithm.name}, seed {cfg.trainer.seed}")
    print(f"device   {device_of(cfg)}, {form.name} ({form.reason}), world size {world_size()}")
    print(f"budget   {total_steps(cfg, world_size()):,} env steps, {cfg.trainer.iterations} iterations")
    return train(state, cfg, folder)
