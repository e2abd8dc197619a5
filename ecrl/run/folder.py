"""Create run folders, claim a run folder for one run, and lock a run folder for one process."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ecrl.config import Config
from ecrl.distributed import has_flag, rank, set_flag
from ecrl.errors import ConfigError
from ecrl.storage.atomic_files import lock_folder, replace_file


def _create(folder: Path, exist_ok: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise ConfigError(f"run_dir: {folder}: cannot be created: {error.strerror}; choose another folder") from None


def claim(folder: Path, new: bool) -> None:
    """Create a run folder if it is missing, and claim the folder for a run.

    If torchrun restarts the job, `claimed_before` then returns True for the folder.

    Raises: ConfigError if the folder cannot be written or is a checkpoint, or if `new` is True and the folder already
        holds a run.
    """
    _create(folder, exist_ok=True)
    if (folder / "manifest.json").exists():
        raise ConfigError(f"run_dir: {folder} is a checkpoint; choose the folder of its run, or a new folder")
    taken = [name for name in ("config.json", "metrics.jsonl", "checkpoints") if (folder / name).exists()]
    if new and taken:
        problem = f"run_dir: {folder} already holds a run ({taken[0]})"
        started = " from its beginning, because it has no checkpoint yet" if taken == ["config.json"] else ""
        raise ConfigError(f"{problem}; choose another folder, or resume that run{started}")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"run_dir: {folder}: not writable; choose another folder")
    set_flag(_claim_flag(folder))


def replace_rows(metrics: Path, rows: Iterable[bytes]) -> None:
    """Replace all rows of the metrics file. Raise ConfigError if the file cannot be written."""
    try:
        replace_file(metrics, b"".join(rows))
    except OSError as error:
        raise ConfigError(f"{metrics}: cannot be written: {error.strerror}; make room first") from None


@contextmanager
def lock_run_folder(folder: Path | None) -> Iterator[None]:
    """Return a context that keeps other processes from training in a run folder.

    Of several ranks, only rank 0 takes the lock, because only rank 0 writes logs and checkpoints. If `folder` is None
    or does not exist, nothing is locked.

    Raises: ConfigError if another process holds the lock.
    """
    with ExitStack() as stack:
        try:
            if folder is not None and rank() == 0 and folder.is_dir():
                stack.enter_context(lock_folder(folder))
        except BlockingIOError:
            raise ConfigError(f"run_dir: {folder}: another process trains in this folder; wait until it ends") from None
        yield


def _claim_flag(folder: Path) -> str:
    return f"claimed {folder}"


def claimed_before(folder: Path | None) -> bool:
    """Return True if an earlier attempt of this torchrun job claimed the folder, before torchrun restarted the job."""
    return folder is not None and has_flag(_claim_flag(folder))


def new_run_dir(cfg: Config) -> Path:
    """Create the folder `outputs/<exp_name>_<YYYYmmdd_HHMMSS>`. If this folder exists, append a number to its name."""
    stem, number = f"outputs/{cfg.trainer.exp_name}_{time.strftime('%Y%m%d_%H%M%S')}", 1
    while True:
        folder = Path(stem if number == 1 else f"{stem}_{number}")
        try:
            _create(folder, exist_ok=False)
            return folder
        except FileExistsError:
            number += 1
