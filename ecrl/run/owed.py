"""What a run that was stopped still owes: the evaluation of the state from which it goes on."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from ecrl.config import Config
from ecrl.errors import CheckpointError
from ecrl.loop.iteration import crossed, steps_per_iteration
from ecrl.run.checkpoint import read_manifest
from ecrl.run.folder import rewrite
from ecrl.types import LogData


def owed(state: TensorDict, cfg: Config, run_dir: str | Path) -> LogData | None:
    """The train record whose evaluation was begun, and not logged or not saved as the best; None if there is none.

    A row of such an evaluation is taken out of `metrics.jsonl`: it will be written again. Where several ranks train,
    the record has the files of the others, from the checkpoint.
    """
    step, size, freq = int(state["sample_step"]), steps_per_iteration(cfg), cfg.trainer.eval_freq
    metrics = Path(run_dir) / "metrics.jsonl"
    if not crossed(step, size, freq) or not metrics.is_file():
        return None
    lines = metrics.read_bytes().splitlines(keepends=True)
    rows = {row["log_type"]: line for line in lines if (row := _row(line)).get("sample_step") == step}
    if "train" not in rows:
        return None
    if "evaluate" in rows:
        if _is_kept(_row(rows["evaluate"]), cfg, Path(run_dir)):
            return None
        rewrite(metrics, [line for line in lines if line != rows["evaluate"]])
    others = {p.name: p.read_bytes() for p in (Path(run_dir) / "checkpoints" / f"step_{step}").glob("rank_*")}
    record = LogData(log_type="train", sample_step=step, logs={}, state=state)
    return {**record, "files": others} if others else record


def _row(line: bytes) -> dict[str, Any]:
    """A row of `metrics.jsonl`; nothing where a kill cut it off."""
    with suppress(ValueError):
        return json.loads(line)
    return {}


def _is_kept(row: dict[str, Any], cfg: Config, run_dir: Path) -> bool:
    """Whether the best checkpoint is at least as good as the evaluation of a row."""
    name, sign = cfg.trainer.best_eval_metric, 1.0 if cfg.trainer.best_eval_mode == "max" else -1.0
    value, best = row.get(name), None
    with suppress(CheckpointError):
        best = read_manifest(run_dir / "checkpoints" / "best")["logs"].get(name)
    return value is None or (best is not None and sign * best >= sign * value)
