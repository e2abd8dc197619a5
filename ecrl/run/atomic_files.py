"""Files on disk that are whole or absent: after a crash, a kill or a full disk there is the old one or the new one.

What is written is synced, and so is the folder that names it, so that it outlives the machine's power too.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


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


def append(path: Path, data: bytes) -> None:
    """Add `data` to the end of a file: all of it, or with an OSError nothing.

    The file is opened for this call alone, so that a disk that was full or away is used again as soon as it is back.
    """
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def replace_file(path: Path, data: bytes) -> None:
    """Write a file in place of an older one, or raise OSError and leave that."""
    aside = path.with_name(f".{path.name}.new")
    try:
        _write_synced(aside, data)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Write `files` by name as the folder `path`, in place of an older one, or raise OSError and leave that.

    The older one is removed once the new one is safe. A kill between the two renames leaves it under another name,
    where `whole` finds it.
    """
    path, aside, old = whole(path, restore=True), _aside(path), _old(path)
    known = path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        for name, data in files.items():
            _write_synced(aside / name, data)
        _sync_folder(aside)
        if path.exists():
            path.rename(old)
        aside.rename(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        whole(path, restore=True)
        raise
    _sync_folder(path.parent)
    if not known:
        _sync_folder(path.parent.parent)
    shutil.rmtree(old, ignore_errors=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new.{os.getpid()}")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def whole(path: Path, restore: bool = False) -> Path:
    """Where the folder `path` is to be read: elsewhere if its writer was killed between two renames.

    With `restore` it is put back, and what a writer left that was killed after them is removed.
    """
    old = _old(path)
    if not old.exists():
        return path
    if not restore:
        return path if path.exists() else old
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.rename(path)
    return path


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Be the only process that writes into a folder, or raise BlockingIOError; ends with the process, however it ends.

    Twice in one process is once. Where the file system has no locks, nobody is kept out.
    """
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BlockingIOError(error.errno, error.strerror) from None
        yield


def remove_folder(path: Path) -> None:
    """Remove a folder, so that a kill on the way leaves nothing of it under its name."""
    gone = path.with_name(f".{path.name}.gone")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what writers left aside in `folder` that were killed; to be called by its only writer."""
    for left in [*folder.glob(".*.new.*"), *folder.glob(".*.gone")]:
        shutil.rmtree(left, ignore_errors=True)
