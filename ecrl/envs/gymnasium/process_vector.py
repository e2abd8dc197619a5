"""Run environments in worker processes.

Each worker steps its environments one after the other, and sends each result immediately. If a worker raises, dies or
hangs, a Fault names the environment whose result is missing.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gymnasium

from ecrl.envs.gymnasium import worker
from ecrl.envs.gymnasium.vector_api import Fault, Vector, vector_of

_START = 60.0  # additional time that a worker may take to start Python, in seconds
_GRACE = 2.0  # time that workers may take to close their environments, in seconds


class _Worker(NamedTuple):
    process: subprocess.Popen
    pipe: Connection
    envs: range


def _start_worker(envs: range) -> _Worker:
    """Start a worker as a new Python process. A forked worker could copy locks that threads of this process hold."""
    parent_end, child_end = Pipe()
    with child_end:
        process = subprocess.Popen(
            [sys.executable, "-P", worker.__file__, str(child_end.fileno()), *sys.path],
            stdin=subprocess.PIPE,
            pass_fds=(child_end.fileno(),),
            env={"OMP_NUM_THREADS": "1"} | os.environ,
            start_new_session=True,  # Ctrl-C does not reach the worker, and `_kill` also ends its children
        )
    return _Worker(process, parent_end, envs)


def _kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _exit_text(process: subprocess.Popen) -> str:
    try:
        code = process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _receive(source: _Worker, env: int, deadline: float, timeout: float) -> Any:
    """Return the result of one environment.

    Raises: Fault if the environment raised, if its worker died, or if the deadline passed. A late worker is killed.
    """
    if not source.pipe.poll(max(0.0, deadline - time.monotonic())):
        _kill(source.process)
        raise Fault(env, f"did not answer within {timeout:g} s (timeout); its worker was killed")
    try:
        succeeded, answer = source.pipe.recv()
    except Exception:  # the pipe closed, perhaps within a message
        first, last = source.envs[0], source.envs[-1]
        name = f"process {source.process.pid} of envs {first} to {last}"
        raise Fault(env, f"lost its worker ({name}), which {_exit_text(source.process)}") from None
    if not succeeded:
        raise Fault(env, f"raised {answer}")
    return answer


def _stop(workers: list[_Worker]) -> None:
    """Close the pipes, so that the workers exit. Kill workers that still run after `_GRACE` seconds."""
    deadline = time.monotonic() + _GRACE
    for one in workers:
        one.pipe.close()
    for one in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.0, deadline - time.monotonic()))
        _kill(one.process)
        one.process.wait()
        if one.process.stdin is not None:
            one.process.stdin.close()


def parallel(
    env_id: str, kwargs: dict[str, Any], num_envs: int, timeout: float, atari: dict[str, Any] | None = None
) -> Vector:
    """Open environments in at most one worker process per core. `serial` gives the same results without workers."""
    import cloudpickle

    spec = gymnasium.registry.get(env_id.rpartition(":")[2])
    open_args = (env_id, kwargs, atari, None if spec is None else cloudpickle.dumps(spec))
    count = min(num_envs, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    edges = [num_envs * i // count for i in range(count + 1)]
    workers: list[_Worker] = []

    def ask(command: str, values: Sequence[Any], extra: float = 0.0) -> list[Any]:
        deadline = time.monotonic() + timeout + extra
        for one in workers:
            with contextlib.suppress(OSError):  # `_receive` reports a dead worker
                one.pipe.send((command, [values[i] for i in one.envs]))
        return [_receive(one, i, deadline, timeout + extra) for one in workers for i in one.envs]

    try:
        for first, last in pairwise(edges):
            workers.append(_start_worker(range(first, last)))
        spaces = ask("open", [open_args] * num_envs, _START)[0]
    except BaseException:
        _stop(workers)
        raise
    return vector_of(spaces, ask, lambda: _stop(workers))
