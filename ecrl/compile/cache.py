"""Store compiled code on disk, in one cache directory per type of CPU, and limit the size of the stored code.

Inductor's cache key is a hash of the graph, the layouts of its inputs, the torch version and inductor's settings. But
code for a CPU also depends on the type of the CPU and on the source files of this package. The name of the cache
directory therefore contains the result of `cpu_identity`. When a graph for a CPU is compiled, inductor's settings
contain the result of `sources_hash`.

Once a day, a process that compiles removes files that have not been used for the longest time, until the directories of
all CPUs have at most `ECRL_CACHE_GB` gigabytes. Files always remain if their last recorded use (see `_last_use`) is
less than two days old. A process that compiles or loads code holds a shared lock, so no other process removes files
during this time.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from ecrl.errors import ConfigError
from ecrl.native.library import cpu_identity

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_SIZE_VARIABLE, _DEFAULT_GB = "ECRL_CACHE_GB", 10.0
_DAY = 24 * 3600.0


def sources_hash() -> str:
    """Return a hash of the source files of `ecrl.compile`. A change in these files may change compiled code."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _folder(base: str) -> str:
    """Return this CPU's cache directory inside `base`.

    If the cache directory is not writable, warn and return one inside a temporary directory, which the process removes
    at its end.
    """
    name = f"cpu_{cpu_identity()}"
    folder = os.path.join(base, name)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        temporary = tempfile.mkdtemp(prefix="ecrl_compiled_")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        warnings.warn(
            f"compiled code cannot be stored in {folder} ({error.strerror}), so the next process compiles again; "
            f"set {_VARIABLE} to a writable folder",
            RuntimeWarning,
            stacklevel=2,
        )
        os.mkdir(folder := os.path.join(temporary, name))
        return folder


def cache_path() -> str:
    """Return the cache directory of this CPU, inside `TORCHINDUCTOR_CACHE_DIR` or inductor's default directory."""
    return _folder(os.path.abspath(os.environ.get(_VARIABLE) or default_cache_dir()))


def max_bytes() -> float:
    """Return the allowed size of all cache directories together, in bytes, or zero if any size is allowed.

    Raises: ConfigError if `ECRL_CACHE_GB` is not a finite number of at least 0.
    """
    text = os.environ.get(_SIZE_VARIABLE) or str(_DEFAULT_GB)
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0.0 <= size < float("inf"):
        raise ConfigError(f"{_SIZE_VARIABLE}: {text!r}, expected a number of gigabytes, or 0 for no limit")
    return size * 1e9


def _last_use(status: os.stat_result) -> float:
    """Return the time of a file's last recorded use.

    By default, Linux records a read only if the previous recorded read is more than a day old, or if the file has
    changed since then.
    """
    return max(status.st_atime, status.st_mtime)


def remove_unused(folders: Iterable[Path], most: float, now: float) -> None:
    """Remove the files that have not been used for the longest time, until the folders have at most `most` bytes.

    Files whose last recorded use is less than two days before the time `now` remain. Files that the user of this
    process may not remove also remain.
    """
    files = []
    for path in (path for folder in folders for path in folder.rglob("*")):
        with suppress(OSError):  # another process has removed the file, or the file belongs to another user
            if S_ISREG((status := path.lstat()).st_mode):
                files.append((_last_use(status), status.st_size, path))
    total = sum(size for _, size, _ in files)
    for used, size, path in sorted(files):
        if total <= most or used > now - 2 * _DAY:
            break
        with suppress(OSError):
            path.unlink()
            total -= size


def _remove_once_a_day(base: Path, most: float, lock: int) -> None:
    """Call `remove_unused` for all cache directories inside `base`, unless a process did so in the last day.

    If another process uses the cache now, do nothing.

    Args:
        base: folder of the cache directories.
        most: allowed size of all directories together, in bytes, or 0 for no limit.
        lock: descriptor of the lock file, whose modification time is the time of the last removal.
    """
    now = time.time()
    is_new = os.fstat(lock).st_size == 0
    if most == 0 or (not is_new and now - os.fstat(lock).st_mtime < _DAY):
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_unused(base.glob("cpu_*"), most, now)
        os.pwrite(lock, b"The cache was checked for its size.\n", 0)
    except OSError:  # another process holds the lock, or may remove files
        return


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Hold a shared lock on the cache directories inside `base`, and afterwards limit their size.

    If the file system has no locks, or if `base` is not writable, do nothing.
    """
    most = max_bytes()
    try:
        lock = os.open(base / ".ecrl_lock", os.O_RDWR | os.O_CREAT, 0o666)  # the umask limits the mode
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield
        _remove_once_a_day(base, most, lock)
    finally:
        with suppress(OSError):  # a process that was forked meanwhile also has the descriptor, and would keep the lock
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


@contextmanager
def cache_folder() -> Iterator[None]:
    """Set `TORCHINDUCTOR_CACHE_DIR` to the cache directory of this CPU inside this context."""
    before, path = os.environ.get(_VARIABLE), cache_path()
    os.environ[_VARIABLE] = path
    try:
        with _locked(Path(path).parent):
            yield
    finally:
        if before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = before
