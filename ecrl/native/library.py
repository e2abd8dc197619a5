"""Compile each C++ file of this folder into a shared library, once per machine, and load it.

A library is compiled when one of its functions is first needed, and stored in `cache_folder()`, which other processes
share. The name of the stored file contains a hash of the source, the compiler, its flags and the CPU. The functions of
a library take only addresses, integers and bools, so a library does not depend on the version of Python or torch.
"""

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

_FOLDER = Path(__file__).parent
_FLAGS = (
    *("-O2", "-ftree-vectorize", "-std=c++17", "-fPIC", "-shared"),  # as fast as with -O3, compiles in half the time
    "-ffp-contract=off",  # round after each operation, so that all versions of a loop give equal bits
    "-fno-trapping-math",  # vectorise loops with conditions
)
_FOR_THIS_CPU = ("-march=native",)
_LIMIT_S = 300.0
_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part")


def cpu_identity(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Return a hash of this CPU's model and instruction set. Code compiled for one CPU may not run on another CPU."""
    try:
        first = Path(cpuinfo).read_text().split("\n\n")[0]
    except OSError:
        first = platform.processor()
    lines = [line for line in first.splitlines() if line.split(":")[0].strip() in _IDENTITY] or [first]
    text = "\n".join((platform.machine(), torch.backends.cpu.get_cpu_capability(), *lines))
    return sha256(text.encode()).hexdigest()[:12]


def cache_folder() -> Path:
    """Return the folder for the compiled libraries.

    The folder is `native` in `TORCHINDUCTOR_CACHE_DIR` if this variable is set, else `ecrl` in `XDG_CACHE_HOME`, else
    `~/.cache/ecrl`.
    """
    if given := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(given) / "native"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ecrl"


def find_compiler() -> tuple[str, ...] | None:
    """Return the command of the C++ compiler: `CXX` if this variable is set, else g++, clang++ or c++.

    `CXX` may contain arguments, as in `ccache g++`. The function returns None if no such program is found.
    """
    given = os.environ.get("CXX")
    commands = [[given], shlex.split(given)] if given else [["g++"], ["clang++"], ["c++"]]
    return next(((path, *args) for name, *args in commands if (path := shutil.which(name))), None)


def _file_name(source: str, compiler: Sequence[str]) -> str:
    """Return a name that changes with the text of the source, the compiler, the flags and the CPU."""
    path = Path(compiler[0]).resolve()
    about = f"{path} {path.stat().st_mtime_ns} {path.stat().st_size} {compiler[1:]} {_FLAGS} {cpu_identity()}"
    text = (_FOLDER / f"{source}.cpp").read_bytes()
    return f"{source}_{sha256(about.encode() + text).hexdigest()[:24]}.so"


def _compile(source: str, compiler: Sequence[str], target: Path) -> None:
    """Compile a library for this CPU. If the compiler reports an error, compile for a generic CPU.

    Raises: RuntimeError with the compiler's first error message, if the compiler reports an error for a generic CPU
        too. RuntimeError if the compiler exceeds the time limit.
    """
    for flags in ((*_FLAGS, *_FOR_THIS_CPU), _FLAGS):
        command = [*compiler, *flags, "-o", str(target), str(_FOLDER / f"{source}.cpp")]
        # Write the output to a file. If the compiler is killed, the processes that it started would keep a pipe open.
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            try:
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=_LIMIT_S, check=False
                )
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"the compiler did not finish within {_LIMIT_S:g} s") from None
            if done.returncode == 0:
                return
            output.seek(0)
            lines = [line for line in output.read().splitlines() if line.strip()] or ["no message"]
    raise RuntimeError(next((line for line in lines if "error" in line), lines[0]))


def _store(built: Path, target: Path) -> None:
    """Copy a compiled library to the folder that other processes share.

    Other processes see the whole file or no file, even if this process is killed or the power fails.

    Raises: OSError if the disk is full or the folder is not writable.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        try:
            file.write(built.read_bytes())
            file.flush()
            os.fsync(file.fileno())
            shutil.copymode(built, file.name)
            os.replace(file.name, target)
        except OSError:
            os.unlink(file.name)
            raise


def _load(source: str, compiler: Sequence[str]) -> ctypes.CDLL:
    """Load the stored library. If no library is stored, or if loading fails, compile and store the library.

    If the library cannot be stored, each process compiles it.
    """
    path = None
    with suppress(OSError, RuntimeError):  # `Path.home` raises RuntimeError without a home folder
        path = cache_folder() / _file_name(source, compiler)
        return ctypes.CDLL(str(path))
    with tempfile.TemporaryDirectory(prefix="ecrl_native_") as folder:
        built = Path(folder) / f"{source}.so"
        _compile(source, compiler, built)
        if path is not None:
            with suppress(OSError):
                _store(built, path)
                return ctypes.CDLL(str(path))
        return ctypes.CDLL(str(built))


@cache
def library(source: str) -> ctypes.CDLL | None:
    """Return the library of `source`, the name of a C++ file of this folder without its suffix.

    The first call may compile the library. If the library cannot be compiled and loaded, the function returns None. The
    function then also warns once, except if `CXX` is not set and no compiler is found.
    """
    compiler, given = find_compiler(), os.environ.get("CXX")
    if compiler is None and not given:
        return None
    try:
        if compiler is None:
            raise RuntimeError("there is no such program")
        return _load(source, compiler)
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"ecrl's {source}.cpp cannot be compiled with {given or compiler[0]} and loaded ({error}), so kernels that "  # pyright: ignore
            "use it run as torch operations, which is slower; set CXX to a working compiler",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


@torch.compiler.assume_constant_result
def is_available(source: str) -> bool:
    """Return True if the C++ functions of `source` can run here. The first call may compile them."""
    return library(source) is not None


def function(source: str, name: str, types: Sequence[Any]) -> Any:
    """Return the C++ function `name` of `source`. `types` are the `ctypes` types of its arguments. It returns nothing.

    Raises: RuntimeError if the library cannot be compiled and loaded.
    """
    loaded = library(source)
    if loaded is None:
        raise RuntimeError(
            f"the C++ function {name} is not available, because {source}.cpp cannot be compiled and loaded; "
            "set CXX to a working compiler"
        )
    found = loaded[name]
    found.argtypes, found.restype = [*types], None
    return found
