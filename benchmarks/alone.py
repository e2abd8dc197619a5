"""A function in a process of its own on its own cores, with thread counts set before any library is imported.

`python -m benchmarks.alone MODULE:FUNCTION JSON CORES` calls `FUNCTION(**json)` and prints its result as one JSON line;
whatever libraries print goes to stderr.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from benchmarks.pairs import PATIENCE, ROOT, Failure, threads_env
from benchmarks.worker import answers


def alone(function: str, args: Mapping[str, Any], cores: Sequence[int], env: Mapping[str, str] | None = None) -> Any:
    """What "module:function" returns, called with `args` in a fresh process with `env` added to its environment.

    Raises: Failure with the last line on stderr, if the process dies or takes longer than `PATIENCE`.
    """
    command = [sys.executable, "-m", "benchmarks.alone", function, json.dumps(dict(args)), ",".join(map(str, cores))]
    around = {**os.environ, **threads_env(cores), **(env or {})}
    try:
        done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise Failure(f"{function}: no answer for {PATIENCE:g} s") from None
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "(nothing on stderr)")
        raise Failure(f"{function}: died with status {done.returncode}; last line: {last.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Pin, call, print."""
    function, args, cores = sys.argv[1:]
    os.sched_setaffinity(0, [int(core) for core in cores.split(",")])  # before the imports: threads inherit it
    out = answers()
    module, name = function.split(":")
    print(json.dumps(getattr(import_module(module), name)(**json.loads(args))), file=out)


if __name__ == "__main__":
    main()
