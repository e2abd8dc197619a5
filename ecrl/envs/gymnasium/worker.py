"""One step of one Gymnasium environment, and the process that runs some of them for `parallel`.

This file is also a script of its own: it imports nothing of ecrl, so that a worker starts fast and small.
"""

import math
import os
import sys
import threading
from collections.abc import Iterator
from copy import deepcopy
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gymnasium


class Row(NamedTuple):
    """What one environment answers; `final` is the observation from before the reset, where the step ended an episode.

    It is sent as a plain tuple: in the worker this class is one of `__main__`.
    """

    obs: Any
    mask: Any = None
    reward: Any = 0.0
    terminated: bool = False
    truncated: bool = False
    success: float = math.nan
    final: Any = None


def make(env_id: str, kwargs: dict[str, Any]) -> gymnasium.Env:
    """`gymnasium.make`; what its checker looks for in the first steps, ecrl checks in all of them."""
    return gymnasium.make(env_id, disable_env_checker=True, **kwargs)


def reset(env: gymnasium.Env, seed: int) -> Row:
    """Start an episode; all later episodes follow from the seed, too."""
    obs, info = env.reset(seed=seed)
    return Row(obs, info.get("action_mask"))


def step(env: gymnasium.Env, action: Any) -> Row:
    """One step, and the start of the next episode in the step that ended one."""
    obs, reward, terminated, truncated, info = env.step(action)
    success, final = float(info.get("success", info.get("is_success", math.nan))), None
    if terminated or truncated:
        final = deepcopy(obs)  # the environment may write the next observation into the same memory
        obs, info = env.reset()
    return Row(obs, info.get("action_mask"), reward, terminated, truncated, success, final)


def told(error: BaseException) -> str:
    """An exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def _open(env_id: str, kwargs: dict[str, Any], spec: bytes | None) -> gymnasium.Env:
    if spec is not None:  # what the parent has registered, the worker may not have
        import cloudpickle

        gymnasium.registry.setdefault(env_id.rpartition(":")[2], cloudpickle.loads(spec))
    return make(env_id, kwargs)


def _answers(envs: list[gymnasium.Env], command: str, given: list) -> Iterator[Any]:
    """The answer of one environment after the other to a command."""
    for i, value in enumerate(given):
        if command == "open":
            envs.append(_open(*value))
            yield envs[i].observation_space, envs[i].action_space
        else:
            yield reset(envs[i], value) if command == "reset" else step(envs[i], value)


def _serve(pipe: Connection) -> None:
    envs: list[gymnasium.Env] = []
    while True:
        try:
            command, given = pipe.recv()
        except (EOFError, ConnectionResetError):  # the parent has closed the pipe
            break
        try:
            for answer in _answers(envs, command, given):
                pipe.send((True, tuple(answer)))
        except BaseException as error:  # whatever an environment raises is for the parent to tell
            pipe.send((False, told(error)))
    for env in envs:
        env.close()


def _die_with_parent() -> None:
    """Nothing is ever written to stdin; it ends when the parent does, however that dies."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _, number, *path = sys.argv
    sys.path[:] = path
    _serve(Connection(int(number)))
