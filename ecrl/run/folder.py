"""The folder of a run: made, claimed by one run, and held by one process while that goes on."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ecrl.config import Config
from ecrl.distributed import rank, said_before, say
from ecrl.errors import ConfigError
from ecrl.run.atomic_files import held, replace_file


def _make(folder: Path, exist_ok: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise ConfigError(f"run_dir: {folder}: cannot be made: {error.strerror}; choose another folder") from None


def claim(folder: Path, new: bool) -> None:
    """Make the run folder; a new run does not go where another one wrote."""
    _make(folder, exist_ok=True)
    if (folder / "manifest.json").exists():
        raise ConfigError(f"run_dir: {folder} is a checkpoint; choose the folder of its run, or a new one")
    taken = [name for name in ("config.json", "metrics.jsonl", "checkpoints") if (folder / name).exists()]
    if new and taken:
        told = f"run_dir: {folder} already holds a run ({taken[0]})"
        raise ConfigError(f"{told}; choose another folder, or resume that run")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"run_dir: {folder}: not writable; choose another folder")
    say(_word(folder))


def rewrite(metrics: Path, rows: Iterable[bytes]) -> None:
    """Replace the rows of `metrics.jsonl`. Raises: ConfigError if it cannot be written."""
    try:
        replace_file(metrics, b"".join(rows))
    except OSError as error:
        raise ConfigError(f"{metrics}: cannot be written: {error.strerror}; make room first") from None


@contextmanager
def holding(folder: Path | None) -> Iterator[None]:
    """Keep other processes from going on with the run in a folder meanwhile; rank 0 alone writes there."""
    with ExitStack() as stack:
        try:
            if folder is not None and rank() == 0 and folder.is_dir():
                stack.enter_context(held(folder))
        except BlockingIOError:
            raise ConfigError(f"run_dir: {folder}: another process trains in it; wait for its end") from None
        yield


def _word(folder: Path) -> str:
    return f"claimed {folder}"


def claimed_before(folder: Path | None) -> bool:
    """Whether the run in a folder is that of processes which torchrun started these anew in place of."""
    return folder is not None and said_before(_word(folder))


def new_run_dir(cfg: Config) -> Path:
    """A fresh `outputs/<exp_name>_<YYYYmmdd_HHMMSS>`, numbered if another run took that name."""
    stem, number = f"outputs/{cfg.trainer.exp_name}_{time.strftime('%Y%m%d_%H%M%S')}", 1
    while True:
        folder = Path(stem if number == 1 else f"{stem}_{number}")
        try:
            _make(folder, exist_ok=False)
            return folder
        except FileExistsError:
            number += 1
