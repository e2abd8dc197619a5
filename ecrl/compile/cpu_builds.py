"""Compile the two C++ files of a graph, calls and kernels, at the same time. Inductor compiles one after the other."""

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
    """Return the builders whose target file does not exist yet."""
    return [builder for builder in builders if not Path(builder.get_target_file_path()).exists()]


def attempt(builders: Sequence[CppBuilder]) -> None:
    """Run all builders at once, without output. A builder that fails or is interrupted leaves no file."""
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
                os.killpg(compiler.pid, SIGTERM)  # and what it calls
        for compiler, builder in zip(compilers, builders, strict=False):  # not all were begun
            if compiler.wait():
                Path(builder.get_target_file_path()).unlink(missing_ok=True)


def build(lock_path: str, builders: Sequence[CppBuilder]) -> None:
    """Build the objects at once, then link them. Build a failed one again by inductor, which reports the error."""
    with FileLock(lock_path, timeout=codecache.LOCK_TIMEOUT):
        for stage in (builders[:-1], builders[-1:]):
            attempt(missing(stage))
        for builder in missing(builders):
            builder.build()


@contextmanager
def side_by_side() -> Iterator[None]:
    """While this lasts, inductor's files are built so."""
    usual = codecache._worker_compile_cpp
    codecache._worker_compile_cpp = build
    try:
        yield
    finally:
        codecache._worker_compile_cpp = usual
