"""Compile the two C++ files of a graph in parallel: the file with the kernels and the file that calls them.

Without this module, inductor compiles the two files one after the other.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM
from subprocess import DEVNULL, Popen
from typing import Any

from torch._inductor import codecache
from torch._inductor.cpp_builder import CppBuilder
from torch.utils._filelock import FileLock


def missing(builders: Sequence[CppBuilder]) -> list[CppBuilder]:
    """Return each builder whose target file does not exist yet."""
    return [builder for builder in builders if not Path(builder.get_target_file_path()).exists()]


def run_builders(builders: Sequence[CppBuilder]) -> None:
    """Run all builders in parallel, without output. Remove the file of a builder that fails or is interrupted."""
    silent: dict[str, Any] = {"stdin": DEVNULL, "stdout": DEVNULL, "stderr": DEVNULL, "start_new_session": True}
    compilers: list[Popen[Any]] = []
    try:
        for builder in builders:
            compilers.append(Popen(shlex.split(builder.get_command_line()), **silent))
        for compiler in compilers:
            compiler.wait()
    finally:
        for compiler in compilers:
            if compiler.poll() is None:
                os.killpg(compiler.pid, SIGTERM)  # also end the compiler's child processes
        for compiler, builder in zip(compilers, builders, strict=False):  # after an error, some did not start
            if compiler.wait():
                Path(builder.get_target_file_path()).unlink(missing_ok=True)


def build(lock_path: str, builders: Sequence[CppBuilder]) -> None:
    """Build the object files in parallel, then link them.

    If building a file fails, inductor's own function builds the file again and reports the error.
    """
    with FileLock(lock_path, timeout=codecache.LOCK_TIMEOUT):
        for stage in (builders[:-1], builders[-1:]):
            run_builders(missing(stage))
        for builder in missing(builders):
            builder.build()


@contextmanager
def parallel_builds() -> Iterator[None]:
    """Make inductor build its C++ files with the function `build`."""
    usual = codecache._worker_compile_cpp
    codecache._worker_compile_cpp = build
    try:
        yield
    finally:
        codecache._worker_compile_cpp = usual
