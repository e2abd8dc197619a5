"""Save checkpoints during a run.

One consumer (see `ecrl.run.loggers`) saves the state at regular intervals, and another consumer saves the best state.

A consumer copies the state to host memory, and a thread writes the copy while training continues. Before a consumer
copies the next state, it waits until this write has finished. Each consumer therefore holds only one copy of a state.
Replay buffers and frozen parameters are not copied. Training waits until the thread has passed the buffers to the
operating system, and continues while the operating system writes them to disk. If a write fails, the consumer warns.
The consumer of the best state repeats the failed write after the next evaluation. The other consumer writes again when
the next checkpoint is due. A run waits for the last write before it ends. If the last write fails, the run raises an
error.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tensordict import TensorDict

from ecrl.algorithms import Run
from ecrl.config import Config
from ecrl.errors import CheckpointError
from ecrl.loop.buffers import kinds_of, overwritten_buffers, without_buffers
from ecrl.loop.build import build
from ecrl.loop.iteration import is_due
from ecrl.run.checkpoint import Snapshot, read_manifest, snapshot, step_checkpoints, verify, write
from ecrl.run.loggers import ending, tolerate_errors
from ecrl.run.rank_shards import has_all_shards, shards_without_buffers
from ecrl.storage.atomic_files import complete_folder, remove_folder, remove_leftovers
from ecrl.types import LogData

_INCOMPLETE = "the state after {} env steps is not saved: the other ranks did not send their environments"
_OVERWRITTEN = "the state after {} env steps is not saved: a write to its buffer {} was interrupted"


class Saver(NamedTuple):
    """Functions that a consumer calls to save checkpoints.

    `save(path, run, state, cfg, logs, files)` starts writing a checkpoint. `report()` warns if the last write has
    failed. `retry()` calls `report()`, and then repeats a failed write.
    """

    save: Callable[..., None]
    report: Callable[[], None]
    retry: Callable[[], None]


def _write_and_prune(path: Path, saved: Snapshot, keep: int | None, remove_guarded: Callable[..., bool]) -> None:
    """Write a checkpoint. If `keep` is not None, remove older checkpoints until `keep` remain, including this one.

    Checkpoints with more env steps than this one are neither counted nor removed.
    """
    write(path, saved)
    step = int(saved.tensors["sample_step"])
    up_to_step = [p for p in step_checkpoints(path.parents[1]) if int(p.name.removeprefix("step_")) <= step]
    for old in up_to_step[:-keep] if keep else []:
        remove_guarded(remove_folder, old)


@contextmanager
def _open_saver(keep: int | None = None) -> Iterator[Saver]:
    """Yield a Saver. When the block ends, wait for the last write, and raise CheckpointError if the write failed.

    If the block itself raises an Exception, a failed write only causes a warning.
    """
    guarded, remove_guarded = tolerate_errors("checkpoints", CheckpointError), tolerate_errors("older checkpoints")
    last: list[tuple[Path, Snapshot]] = []  # the last checkpoint while it is not yet on disk
    in_progress: list[Future] = []
    frozen: list[Any] = [None]  # frozen leaves of the last snapshot

    def wait() -> None:
        if in_progress and guarded(in_progress.pop().result):
            last.clear()

    def start() -> None:
        in_progress.append(thread.submit(_write_and_prune, *last[0], keep, remove_guarded))

    def save(path: Path, *state: Any) -> None:
        wait()
        last[:] = [(path, snapshot(*state, frozen=frozen[0]))]
        saved = last[0][1]
        frozen[0] = saved.frozen
        start()
        if saved.buffers:
            in_progress[0].add_done_callback(lambda _: saved.read.set())
            saved.read.wait()

    def report() -> None:
        if in_progress and in_progress[0].done():
            wait()

    def retry() -> None:
        report()
        if last and not in_progress:
            start()

    def end() -> None:
        if not in_progress and last:
            start()
        if in_progress:
            in_progress.pop().result()
            guarded(last.clear)  # after a failure, this call warns that saving works again

    with ThreadPoolExecutor(1, "ecrl-save") as thread:
        try:
            yield Saver(save, report, retry)
        except Exception:  # raise the run's own error, not an error from saving
            guarded(end)
            raise
        except BaseException:
            end()
            raise
        end()


def with_checkpoints(
    records: Iterator[LogData], cfg: Config, run_dir: str | Path, run: Run | None = None
) -> Iterator[LogData]:
    """Save the state under `run_dir` every `trainer.save_freq` env steps, and at the end of the run.

    If `trainer.keep_checkpoints` is set, the function removes older checkpoints, except `checkpoints/best`, until this
    number remains. If a signal or an error ends the run, the state of the last train record is also saved. If an
    iteration has already overwritten a buffer of this state, the newest state is saved instead. If the newest state
    cannot be saved either, the function warns.

    Args:
        records: records of the run; the function yields each record again.
        cfg: config of the run.
        run_dir: run folder.
        run: run built from `cfg`; if None, the function builds the run.

    Raises: CheckpointError if the last checkpoint could not be written. The error is raised when the records end, after
        all files are closed.
    """
    last, newest, saved, freq = None, None, None, cfg.trainer.save_freq
    run = build(cfg) if run is None else run
    kinds = kinds_of(run)
    folder = Path(run_dir) / "checkpoints"
    remove_leftovers(folder)

    def saved_state(record: LogData) -> TensorDict:
        return record["state"] if cfg.trainer.save_replay else without_buffers(record["state"], kinds)

    def save_record(record: LogData) -> int:
        step = record["sample_step"]
        save(folder / f"step_{step}", run, saved_state(record), cfg, None, record.get("files"))
        return step

    with _open_saver(cfg.trainer.keep_checkpoints) as (save, report, _), ending(records):
        try:
            for record in records:
                report()
                newest = record
                if record["log_type"] == "train":
                    last = record
                    if is_due(record, cfg, freq):
                        saved = save_record(record)
                yield record
        finally:
            if last is not None and overwritten_buffers(run, saved_state(last)):
                last = newest
            if last is not None and saved != (step := last["sample_step"]):
                if overwritten := overwritten_buffers(run, saved_state(last)):
                    warnings.warn(_OVERWRITTEN.format(step, ", ".join(overwritten)), stacklevel=2)
                elif has_all_shards(last):
                    save_record(last)
                else:
                    warnings.warn(_INCOMPLETE.format(step), stacklevel=2)


def _best_value(path: Path, name: str) -> float | None:
    """Return the metric `name` of the best checkpoint, or None if the checkpoint or the metric is missing.

    If the checkpoint is damaged, warn and return None.
    """
    if not complete_folder(path).exists():
        return None
    try:
        verify(path)
        return read_manifest(path)["logs"].get(name)
    except CheckpointError as error:
        warnings.warn(f"{error}; the search for the best checkpoint restarts", stacklevel=2)
        return None


def with_best_checkpoint(
    records: Iterator[LogData], cfg: Config, run_dir: str | Path, run: Run | None = None
) -> Iterator[LogData]:
    """Save the state to `checkpoints/best` under `run_dir` whenever `trainer.best_eval_metric` improves.

    `checkpoints/best` contains no replay buffer. A resumed run reads the best value so far from the manifest of the
    existing checkpoint. A missing, NaN or infinite metric is never the best value.

    Args:
        records: records of the run; the function yields each record again.
        cfg: config of the run.
        run_dir: run folder.
        run: run built from `cfg`; if None, the function builds the run.

    Raises: CheckpointError if the best checkpoint could not be written. The error is raised when the records end, after
        all files are closed.
    """
    name, sign = cfg.trainer.best_eval_metric, 1.0 if cfg.trainer.best_eval_mode == "max" else -1.0
    path, run = Path(run_dir) / "checkpoints" / "best", build(cfg) if run is None else run
    kinds = kinds_of(run)
    best = _best_value(path, name)
    with _open_saver() as (save, report, retry), ending(records):
        for record in records:
            report()
            if record["log_type"] == "evaluate":
                retry()
                logs = {key: float(value) for key, value in record["logs"].items()}
                value = logs.get(name, math.nan)
                if math.isfinite(value) and (best is None or sign * value > sign * best):
                    best = value
                    shards = shards_without_buffers(record.get("files", {}), kinds)
                    save(path, run, without_buffers(record["state"], kinds), cfg, logs, shards)
            yield record
