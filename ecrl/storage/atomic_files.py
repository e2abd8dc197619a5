"""Write files and folders atomically.

After a crash, a kill or a full disk, each file or folder that `replace_file` or `write_folder` writes has either its
complete old content or its complete new content. If a kill interrupts `write_folder`, the folder may have another name,
which `complete_folder` returns. `replace_file` and `write_folder` sync each new file and its folder to disk, so the
file survives a power failure. `append` does not sync.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

Content = bytes | Path | Iterable[bytes | memoryview]
"""Content of a new file: its bytes, its bytes in parts, or the path of an existing file, which is then hard-linked."""


def _write(path: Path, data: Content) -> None:
    """Write the bytes or the parts `data` to `path`, or hard-link `path` to the file at the path `data`.

    If the hard link fails, copy the file.
    """
    if isinstance(data, Path):
        with suppress(OSError):
            os.link(data, path)
            return
        data = data.read_bytes()
    with path.open("wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)


def _sync(path: Path) -> None:
    """Flush a file or a folder from the cache of the operating system to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append(path: Path, data: bytes) -> None:
    """Append all of `data` to a file, or raise OSError and append nothing.

    Each call opens the file again. Appending therefore works again as soon as a full disk has room or a missing disk is
    mounted.
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


def replace_file(path: Path, data: Content) -> None:
    """Replace a file atomically, or raise OSError and keep the old file.

    If only the sync of the folder fails, OSError is raised, but the new file is in place.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        _write(temporary, data)
        _sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def write_folder(path: Path, files: Mapping[str, Content], on_read: Callable[[], None] = lambda: None) -> None:
    """Replace the folder `path` by a new folder that contains `files`, or raise OSError and keep the old folder.

    The old folder is renamed, the new folder is renamed to `path`, and then the old folder is removed. If the process
    is killed between the two renames, `complete_folder` still finds the old folder. If only the final sync of the
    parent folder fails, OSError is raised, but the new folder is in place.

    Args:
        path: the folder.
        files: dict from each filename to its content.
        on_read: function that is called as soon as the content of all files has been read. The operating system then
            has the content, but may not have written it to disk.
    """
    _finish_replacement(path)
    temporary, old = _temporary_path(path), _old_path(path)
    parent_existed = path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        for name, data in files.items():
            _write(temporary / name, data)
        on_read()
        for name in files:
            _sync(temporary / name)
        _sync(temporary)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        _finish_replacement(path)
        raise
    _sync(path.parent)
    if not parent_existed:
        _sync(path.parent.parent)
    shutil.rmtree(old, ignore_errors=True)


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.new.{os.getpid()}")


def _old_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def complete_folder(path: Path) -> Path:
    """Return `path`, or the path of the old folder if a kill interrupted `write_folder` between its renames."""
    old = _old_path(path)
    return old if old.exists() and not path.exists() else path


def _finish_replacement(path: Path) -> None:
    """Remove the old folder of an interrupted write if `path` exists, else rename the old folder to `path`."""
    old = _old_path(path)
    if not old.exists():
        return
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.rename(path)


_LOCKED: set[tuple[int, int, int]] = set()
"""Process, device and inode of each folder that is locked. A forked process inherits the entries, but not the locks."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for this process. Raise BlockingIOError if another process holds the lock.

    The lock is released at the end of the block, or when the process ends, even if the process is killed. If this
    process has already locked the folder, the end of the outer block releases the lock.
    If the file system does not support locks, the folder is not locked.
    """
    about = folder.stat()
    identity = os.getpid(), about.st_dev, about.st_ino
    if identity in _LOCKED:  # closing any handle of the lock file would release the lock of this process
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BlockingIOError(error.errno, error.strerror) from None
        _LOCKED.add(identity)
        try:
            yield
        finally:
            _LOCKED.discard(identity)


def remove_folder(path: Path) -> None:
    """Rename a folder and then remove it, so that a kill leaves no incomplete folder at `path`."""
    removed = path.with_name(f".{path.name}.gone")
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary folders that killed processes left in `folder`.

    No other process may write to `folder` during the removal.
    """
    for leftover in [*folder.glob(".*.new.*"), *folder.glob(".*.gone")]:
        shutil.rmtree(leftover, ignore_errors=True)
