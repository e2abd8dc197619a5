"""Consumers that save a run while it goes on: every so often, and the best so far.

The state is copied to host memory, and written by a thread while training goes on. One write is under way at most: a
further save waits for it, so memory holds one copy. A write that fails is said once and the run goes on; the next save
tries again. The end of a run waits for the last write, whose failure is the run's.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ecrl.config import Config
from ecrl.errors import CheckpointError
from ecrl.loop.iteration import crossed, steps_per_iteration
from ecrl.run.atomic_files import remove_folder, sweep, whole
from ecrl.run.checkpoint import Snapshot, read_files, read_manifest, snapshot, steps_in, write
from ecrl.run.loggers import ending, never_fatal
from ecrl.run.rank_shards import is_whole
from ecrl.types import LogData

_NOT_WHOLE = "the state after {} env steps is not saved: the other ranks did not give theirs"


class Saver(NamedTuple):
    """`put(path, state, cfg, logs, files)` saves, `look()` tells of a write that failed, `again()` also repeats it."""

    put: Callable[..., None]
    look: Callable[[], None]
    again: Callable[[], None]


def _written(path: Path, saved: Snapshot, keep: int | None, removing: Callable[..., bool]) -> None:
    """Write a checkpoint, and only then remove the oldest beyond the `keep` newest up to it."""
    write(path, saved)
    upto = int(saved.tensors["sample_step"])
    older = [p for p in steps_in(path.parents[1]) if int(p.name.removeprefix("step_")) <= upto]
    for old in older[:-keep] if keep else []:
        removing(remove_folder, old)


@contextmanager
def _saving(keep: int | None = None) -> Iterator[Saver]:
    """A Saver; its last write has ended when this ends, which raises CheckpointError if that failed."""
    guarded, removing = never_fatal("checkpoints", CheckpointError), never_fatal("older checkpoints")
    last: list[tuple[Path, Snapshot]] = []  # what is not known to be safe
    flight: list[Future] = []

    def landed() -> None:
        if flight and guarded(flight.pop().result):
            last.clear()

    def start() -> None:
        flight.append(thread.submit(_written, *last[0], keep, removing))

    def put(path: Path, *state: Any) -> None:
        landed()
        last[:] = [(path, snapshot(*state))]
        start()

    def look() -> None:
        if flight and flight[0].done():
            landed()

    def again() -> None:
        look()
        if last and not flight:
            start()

    def end() -> None:
        if not flight and last:
            start()
        if flight:
            flight.pop().result()
            guarded(last.clear)  # which says that it works again

    with ThreadPoolExecutor(1, "ecrl-save") as thread:
        try:
            yield Saver(put, look, again)
        except Exception:  # of the run itself, which is to be told
            guarded(end)
            raise
        except BaseException:
            end()
            raise
        end()


def with_checkpoints(records: Iterator[LogData], cfg: Config, run_dir: str | Path) -> Iterator[LogData]:
    """Save the state under `run_dir` when `trainer.save_freq` env steps are crossed, and however the run ends.

    Of these, the `trainer.keep_checkpoints` newest are kept.

    Raises: CheckpointError at the end, when all is closed, if the last could not be written.
    """
    last, saved, freq = None, None, cfg.trainer.save_freq
    folder = Path(run_dir) / "checkpoints"
    sweep(folder)

    def put(record: LogData) -> int:
        step = record["sample_step"]
        save(folder / f"step_{step}", record["state"], cfg, None, record.get("files"))
        return step

    with _saving(cfg.trainer.keep_checkpoints) as (save, look, _), ending(records):
        try:
            for record in records:
                look()
                if record["log_type"] == "train":
                    last, step = record, record["sample_step"]
                    if crossed(step, steps_per_iteration(cfg), freq):
                        saved = put(record)
                yield record
        finally:
            if last is not None and saved != last["sample_step"]:
                if is_whole(last):
                    put(last)
                else:
                    warnings.warn(_NOT_WHOLE.format(last["sample_step"]), stacklevel=2)


def _best_so_far(path: Path, name: str) -> float | None:
    """What an earlier process found; None if there is nothing that can be read, which is told."""
    if not whole(path).exists():
        return None
    try:
        read_files(path)
        return read_manifest(path)["logs"].get(name)
    except CheckpointError as error:
        warnings.warn(f"{error}; the best is sought anew", stacklevel=2)
        return None


def with_best_checkpoint(records: Iterator[LogData], cfg: Config, run_dir: str | Path) -> Iterator[LogData]:
    """Save the state as `checkpoints/best` under `run_dir` when an evaluation's `trainer.best_eval_metric` is the best.

    The best so far is read from an earlier one's manifest, so a resumed run goes on with it. NaN and infinity are never
    the best, nor is an evaluation in which no episode told the metric.

    Raises: CheckpointError at the end, when all is closed, if the best could not be written.
    """
    name, sign = cfg.trainer.best_eval_metric, 1.0 if cfg.trainer.best_eval_mode == "max" else -1.0
    path = Path(run_dir) / "checkpoints" / "best"
    best = _best_so_far(path, name)
    with _saving() as (save, look, again), ending(records):
        for record in records:
            look()
            if record["log_type"] == "evaluate":
                again()
                logs = {key: float(value) for key, value in record["logs"].items()}
                value = logs.get(name, math.nan)
                if math.isfinite(value) and (best is None or sign * value > sign * best):
                    best = value
                    save(path, record["state"], cfg, logs, record.get("files"))
            yield record
