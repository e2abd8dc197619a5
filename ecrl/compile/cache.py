"""Store compiled code on disk, in a separate cache directory for each CPU.

Inductor's cache key is a hash of the graph, the layouts of its inputs, the torch version and inductor's settings. But
compiled code also depends on the CPU and on the source files of this package. The name of the cache directory therefore
contains the result of `cpu_identity`, and inductor's settings contain the result of `sources_hash`.
"""

import atexit
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from ecrl.native.library import cpu_identity

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def sources_hash() -> str:
    """Return a hash of the source files of `ecrl.compile`. A change in these files may change compiled code."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _folder(base: str) -> str:
    """Return this CPU's cache directory inside `base`.

    If the cache directory is not writable, warn and return a temporary directory, which the process removes at its end.
    """
    folder = os.path.join(base, f"cpu_{cpu_identity()}")
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
        return temporary


def cache_path() -> str:
    """Return the cache directory of this CPU, inside `TORCHINDUCTOR_CACHE_DIR` or inductor's default directory."""
    return _folder(os.path.abspath(os.environ.get(_VARIABLE) or default_cache_dir()))


@contextmanager
def cache_folder() -> Iterator[None]:
    """Set `TORCHINDUCTOR_CACHE_DIR` to the cache directory of this CPU inside this context."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = cache_path()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = before
