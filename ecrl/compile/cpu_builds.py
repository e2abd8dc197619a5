"""Compile the two C++ files of a graph in parallel: the file with the kernels and the file that calls the kernels.

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
    """Return the builders whose target files do not exist yet."""
    return [builder for builder in builders if not Path(builder.get_target_file_path()).exists()]


def run_builders(builders: Sequence[CppBuilder]) -> None:
    """Run all builders in parallel, and discard their output.

    If a builder fails or is interrupted, remove its target file.
    """
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
                os.killpg(compiler.pid, SIGTERM)  # end the compiler and its child processes
        for compiler, builder in zip(compilers, builders, strict=False):  # some compilers may not have started
            if compiler.wait():
                Path(builder.get_target_file_path()).unlink(missing_ok=True)


def build(lock_path: str, builders: Sequence[CppBuilder]) -> None:
    """Compile the object files in parallel, then link the object files.

    If a builder fails, inductor's own build function builds the file again and reports the error.
    """
    with FileLock(lock_path, timeout=codecache.LOCK_TIMEOUT):
        for stage in (builders[:-1], builders[-1:]):
            run_builders(missing(stage))
        for builder in missing(builders):
            builder.build()


@contextmanager
def parallel_builds() -> Iterator[None]:
    """Make inductor build its C++ files with the function `build` inside this context."""
    usual = codecache._worker_compile_cpp
    codecache._worker_compile_cpp = build
    try:
        yield
    finally:
        codecache._worker_compile_cpp = usual
