"""Run a function in a separate process, pinned to cores, with thread counts set before any library is imported.

`python -m benchmarks.separate_process MODULE:FUNCTION JSON CORES` calls `FUNCTION(**json)` and prints its result as one
JSON line. Output of libraries goes to stderr.
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
    """A function that runs in a separate process."""

    function: str
    process: subprocess.Popen[str]
    out: IO[str]
    errors: IO[str]


def command(function: str, args: Mapping[str, Any], cores: Sequence[int]) -> list[str]:
    """Return the arguments of the Python interpreter for a call of "module:function" on `cores`."""
    return ["-m", "benchmarks.separate_process", function, json.dumps(dict(args)), ",".join(map(str, cores))]


def caching_in(folder: str) -> dict[str, str]:
    """Return the environment variables that make torch and JAX cache compiled code in a folder."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": folder, "JAX_COMPILATION_CACHE_DIR": folder}
    minimums = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    return cache | minimums


def _file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def begin(
    function: str, args: Mapping[str, Any], cores: Sequence[int], env: Mapping[str, str] | None = None
) -> Running:
    """Start "module:function" with `args` in a new process, with `env` added to its environment."""
    out, errors = (_file() for _ in range(2))
    process = subprocess.Popen(
        [sys.executable, *command(function, args, cores)],
        cwd=ROOT,
        env={**os.environ, **threads_env(cores), **(env or {})},
        text=True,
        stdout=out,
        stderr=errors,
        start_new_session=True,  # so that `stop` also kills the compilers that the process starts
    )
    return Running(function, process, out, errors)


def result(running: Running) -> Any:
    """Return the result of a function whose process has ended. If the process failed, raise Failure with the reason."""
    texts = []
    for file in (running.out, running.errors):
        file.seek(0)
        texts.append(file.read())
    if running.process.returncode or not texts[0].strip():
        last = next((line for line in reversed(texts[1].splitlines()) if line.strip()), "(nothing on stderr)")
        problem = f"{running.function}: died with status {running.process.returncode}"
        raise Failure(f"{problem}; last line: {last.strip()}")
    return json.loads(texts[0].splitlines()[-1])


def stop(running: Running) -> None:
    """Kill a function's process and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait()
    running.out.close()
    running.errors.close()


def run_in_process(
    function: str,
    args: Mapping[str, Any],
    cores: Sequence[int],
    env: Mapping[str, str] | None = None,
    patience: float = PATIENCE,
) -> Any:
    """Call "module:function" with `args` in a new process whose environment also has `env`, and return the result.

    Raises: Failure, with the last line on stderr, if the process dies or takes longer than `patience` seconds.
    """
    running = begin(function, args, cores, env)
    try:
        running.process.wait(patience)
        return result(running)
    except subprocess.TimeoutExpired:
        raise Failure(f"{function}: no answer for {patience:g} s") from None
    finally:
        stop(running)


def main() -> None:
    """Pin this process, call the function and print its result."""
    function, args, cores = sys.argv[1:]
    os.sched_setaffinity(0, [int(core) for core in cores.split(",")])  # before the imports, whose threads inherit it
    out = answers()
    module, name = function.split(":")
    print(json.dumps(getattr(import_module(module), name)(**json.loads(args))), file=out)


if __name__ == "__main__":
    main()
