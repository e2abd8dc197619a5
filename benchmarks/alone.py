"""A function in a process of its own on its own cores, with thread counts set before any library is imported.

`python -m benchmarks.alone MODULE:FUNCTION JSON CORES` calls `FUNCTION(**json)` and prints its result as one JSON line;
whatever libraries print goes to stderr.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import IO, Any, NamedTuple

from benchmarks.pairs import PATIENCE, ROOT, Failure, threads_env
from benchmarks.worker import answers


class Running(NamedTuple):
    """A function on its way."""

    function: str
    process: subprocess.Popen[str]
    out: IO[str]
    errors: IO[str]


def command(function: str, args: Mapping[str, Any], cores: Sequence[int]) -> list[str]:
    """The command line, after the interpreter, that calls a function."""
    return ["-m", "benchmarks.alone", function, json.dumps(dict(args)), ",".join(map(str, cores))]


def caching_in(folder: str) -> dict[str, str]:
    """What to add to the environment of processes that keep what they compile, with torch or JAX, in a folder."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": folder, "JAX_COMPILATION_CACHE_DIR": folder}
    least = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    return cache | least


def _file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def begin(
    function: str, args: Mapping[str, Any], cores: Sequence[int], env: Mapping[str, str] | None = None
) -> Running:
    """Start "module:function", called with `args`, in a fresh process with `env` added to its environment."""
    out, errors = (_file() for _ in range(2))
    process = subprocess.Popen(
        [sys.executable, *command(function, args, cores)],
        cwd=ROOT,
        env={**os.environ, **threads_env(cores), **(env or {})},
        text=True,
        stdout=out,
        stderr=errors,
        start_new_session=True,  # ended together with the compilers it starts
    )
    return Running(function, process, out, errors)


def result(running: Running) -> Any:
    """What a function returned whose process has ended. Raises: Failure with its last line on stderr, if it died."""
    texts = []
    for file in (running.out, running.errors):
        file.seek(0)
        texts.append(file.read())
    if running.process.returncode or not texts[0].strip():
        last = next((line for line in reversed(texts[1].splitlines()) if line.strip()), "(nothing on stderr)")
        died = f"{running.function}: died with status {running.process.returncode}"
        raise Failure(f"{died}; last line: {last.strip()}")
    return json.loads(texts[0].splitlines()[-1])


def stop(running: Running) -> None:
    """End a function and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait()
    running.out.close()
    running.errors.close()


def alone(function: str, args: Mapping[str, Any], cores: Sequence[int], env: Mapping[str, str] | None = None) -> Any:
    """What "module:function" returns, called with `args` in a fresh process with `env` added to its environment.

    Raises: Failure with the last line on stderr, if the process dies or takes longer than `PATIENCE`.
    """
    running = begin(function, args, cores, env)
    try:
        running.process.wait(PATIENCE)
        return result(running)
    except subprocess.TimeoutExpired:
        raise Failure(f"{function}: no answer for {PATIENCE:g} s") from None
    finally:
        stop(running)


def main() -> None:
    """Pin, call, print."""
    function, args, cores = sys.argv[1:]
    os.sched_setaffinity(0, [int(core) for core in cores.split(",")])  # before the imports: threads inherit it
    out = answers()
    module, name = function.split(":")
    print(json.dumps(getattr(import_module(module), name)(**json.loads(args))), file=out)


if __name__ == "__main__":
    main()
