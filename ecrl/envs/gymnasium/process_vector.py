"""Environments in worker processes: each worker steps its share, one after the other, and answers one by one.

A worker that raises, dies or hangs ends in a Fault that names the environment whose answer is missing.
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

_START = 60.0  # seconds that a worker may take to start Python, beside its timeout
_GRACE = 2.0  # seconds that workers may take to close their environments


class _Worker(NamedTuple):
    process: subprocess.Popen
    pipe: Connection
    envs: range


def _started(envs: range) -> _Worker:
    """A Python of its own, not a fork: this process runs threads, which a fork may leave locked."""
    here, there = Pipe()
    with there:
        process = subprocess.Popen(
            [sys.executable, "-P", worker.__file__, str(there.fileno()), *sys.path],
            stdin=subprocess.PIPE,
            pass_fds=(there.fileno(),),
            env={"OMP_NUM_THREADS": "1"} | os.environ,
            start_new_session=True,  # Ctrl-C is for this process alone, and what a worker started dies with it
        )
    return _Worker(process, here, envs)


def _kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _death(process: subprocess.Popen) -> str:
    try:
        code = process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _receive(source: _Worker, env: int, deadline: float, timeout: float) -> Any:
    """The answer of one environment, within the time that is left."""
    if not source.pipe.poll(max(0.0, deadline - time.monotonic())):
        _kill(source.process)
        raise Fault(env, f"did not answer within {timeout:g} s (timeout); its worker was killed")
    try:
        fine, answer = source.pipe.recv()
    except Exception:  # the end of the file, or of a message
        first, last = source.envs[0], source.envs[-1]
        name = f"process {source.process.pid} of envs {first} to {last}"
        raise Fault(env, f"lost its worker ({name}), which {_death(source.process)}") from None
    if not fine:
        raise Fault(env, f"raised {answer}")
    return answer


def _end(workers: list[_Worker]) -> None:
    """Close the pipes, which is the sign to end; kill what has not after the grace."""
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


def parallel(env_id: str, kwargs: dict[str, Any], num_envs: int, timeout: float) -> Vector:
    """Environments in worker processes, at most one per core; what an environment does is as with `serial`."""
    import cloudpickle

    spec = gymnasium.registry.get(env_id.rpartition(":")[2])
    given = (env_id, kwargs, None if spec is None else cloudpickle.dumps(spec))
    count = min(num_envs, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    edges = [num_envs * i // count for i in range(count + 1)]
    workers: list[_Worker] = []

    def ask(command: str, given: Sequence[Any], extra: float = 0.0) -> list[Any]:
        deadline = time.monotonic() + timeout + extra
        for one in workers:
            with contextlib.suppress(OSError):  # a dead one is told of where its answer is missed
                one.pipe.send((command, [given[i] for i in one.envs]))
        return [_receive(one, i, deadline, timeout + extra) for one in workers for i in one.envs]

    try:
        for first, last in pairwise(edges):
            workers.append(_started(range(first, last)))
        spaces = ask("open", [given] * num_envs, _START)[0]
    except BaseException:
        _end(workers)
        raise
    return vector_of(spaces, ask, lambda: _end(workers))
