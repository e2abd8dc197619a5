"""Compile the C++ files of this folder into one shared library, once per machine, and load it.

The library is stored in the folder of `cache_folder`, which other processes share. The name of the file contains a
hash of the sources, the compiler and the CPU. The functions of the library take only addresses and sizes, so the
library does not depend on the version of Python or torch.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared"),
    "-ffp-contract=off",  # round after each operation, so that all versions of a loop give equal bits
    "-fno-trapping-math",  # vectorise loops with conditions
)
_FOR_THIS_CPU = ("-march=native",)
_LIMIT_S = 300.0
_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part")


def cpu_identity(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Return a hash of this CPU's model and instruction set, because code for one CPU may not run on another."""
    try:
        first = Path(cpuinfo).read_text().split("\n\n")[0]
    except OSError:
        first = platform.processor()
    lines = [line for line in first.splitlines() if line.split(":")[0].strip() in _IDENTITY] or [first]
    text = "\n".join((platform.machine(), torch.backends.cpu.get_cpu_capability(), *lines))
    return sha256(text.encode()).hexdigest()[:12]


def cache_folder() -> Path:
    """Return the folder for the compiled library.

    The folder is `native` in `TORCHINDUCTOR_CACHE_DIR` if this variable is set, else `ecrl` in `XDG_CACHE_HOME`, else
    `~/.cache/ecrl`.
    """
    if given := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(given) / "native"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ecrl"


def find_compiler() -> str | None:
    """Return the path of the C++ compiler: `CXX` if this variable is set, else g++, clang++ or c++."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("g++", "clang++", "c++")
    return next((path for name in names if (path := shutil.which(name))), None)


def _file_name(compiler: str) -> str:
    """Return a name that changes with the sources, the compiler, the flags and the CPU."""
    path = Path(compiler).resolve()
    about = f"{path} {path.stat().st_mtime_ns} {path.stat().st_size} {_FLAGS} {cpu_identity()}"
    return f"native_{sha256(about.encode() + b''.join(file.read_bytes() for file in SOURCES)).hexdigest()[:24]}.so"


def _compile(compiler: str, target: Path) -> None:
    """Compile the library for this CPU. If the compiler does not know this CPU, compile for a generic CPU.

    Raises: RuntimeError with the compiler's first error. OSError if the folder is not writable.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        for flags in ((*_FLAGS, *_FOR_THIS_CPU), _FLAGS):
            command = [compiler, *flags, "-o", str(built), *map(str, SOURCES)]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S)
            if done.returncode == 0:
                os.replace(built, target)  # atomic, because several processes may compile at the same time
                return
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
    raise RuntimeError(next((line for line in lines if "error" in line), lines[0]))


def _load(compiler: str) -> ctypes.CDLL:
    """Load the library, which is compiled first if no stored file exists. Without a writable folder, store nothing."""
    path = cache_folder() / _file_name(compiler)
    if not path.exists():
        try:
            _compile(compiler, path)
        except OSError:
            with tempfile.TemporaryDirectory(prefix="ecrl_native_") as folder:
                path = Path(folder) / path.name
                _compile(compiler, path)
                return ctypes.CDLL(str(path))
    return ctypes.CDLL(str(path))


@cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None if it cannot be compiled. The first call may compile the library.

    If a compiler exists but fails, the function warns once.
    """
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        return _load(compiler)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"the C++ functions of ecrl cannot be compiled with {compiler} ({error}), so kernels run as torch "
            "operations, which is slower; set CXX to a working compiler",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


@torch.compiler.assume_constant_result
def is_available() -> bool:
    """Return True if the C++ functions can run here."""
    return library() is not None


def function(name: str, types: Sequence[Any]) -> Any:
    """Return a C++ function that returns nothing. Its arguments have the given types of `ctypes`."""
    loaded = library()
    if loaded is None:
        raise RuntimeError(f"the C++ function {name} is not available, because there is no C++ compiler; set CXX")
    found = loaded[name]
    found.argtypes, found.restype = [*types], None
    return found
