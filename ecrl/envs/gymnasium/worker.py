"""One step of one Gymnasium environment, and the process that runs some of them for `parallel`.

This file is also a script of its own: it imports nothing of ecrl, so that a worker starts fast and small.
"""

import contextlib
import math
import os
import sys
import threading
from collections.abc import Iterator
from copy import deepcopy
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gymnasium
from gymnasium.envs.registration import load_env_creator
from gymnasium.error import DependencyNotInstalled

_EXTRAS = {"mujoco": "mujoco", "imageio": "mujoco", "Box2D": "box2d"}
"""Packages that Gymnasium's environments import, and the extra of ecrl that brings each."""


class Row(NamedTuple):
    """What one environment answers; `final` is the observation from before the reset, where the step ended an episode.

    It is sent as a plain tuple: in the worker this class is one of `__main__`.
    """

    obs: Any
    mask: Any = None
    reward: Any = 0.0
    terminated: bool = False
    truncated: bool = False
    success: float | str = math.nan
    final: Any = None


def _no_log_file() -> None:
    """MuJoCo would write its warnings to the working directory too; they are on stderr."""
    if config := getattr(sys.modules.get("mujoco"), "MjLogConfig", None):
        own = config.get()
        own.logto_file = False
        own.set()


@contextlib.contextmanager
def _extra() -> Iterator[None]:
    """Around what may import a package that an extra of ecrl brings: where it is missing, say which."""
    try:
        yield
    except (ImportError, DependencyNotInstalled) as error:
        missing = getattr(error if isinstance(error, ImportError) else error.__cause__, "name", None)
        if missing not in _EXTRAS:
            raise
        advice = f"install it with: pip install 'ecrl[{_EXTRAS[missing]}]'"
        raise ModuleNotFoundError(f"No module named {missing!r}: {advice}") from error


def make(env_id: str, kwargs: dict[str, Any]) -> gymnasium.Env:
    """`gymnasium.make`; what its checker looks for in the first steps, ecrl checks in all of them."""
    known = gymnasium.registry.get(env_id)  # not one that "module:" stands before
    with _extra():
        if known and isinstance(known.entry_point, str):
            load_env_creator(known.entry_point)  # which imports MuJoCo, where it needs that
        _no_log_file()
        env = gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    _no_log_file()
    return env


def reset(env: gymnasium.Env, seed: int) -> Row:
    """Start an episode; all later episodes follow from the seed, too."""
    obs, info = env.reset(seed=seed)
    return Row(obs, info.get("action_mask"))


def step(env: gymnasium.Env, action: Any) -> Row:
    """One step, and the start of the next episode in the step that ended one."""
    obs, reward, terminated, truncated, info = env.step(action)
    told_success, final = success(info), None
    if terminated or truncated:
        final = deepcopy(obs)  # the environment may write the next observation into the same memory
        obs, info = env.reset()
    return Row(obs, info.get("action_mask"), reward, terminated, truncated, told_success, final)


def success(info: dict[str, Any]) -> float | str:
    """Of one step, NaN where it is not told; what is wrong, in words, where it is told by something else than a number.

    >>> success({"success": None, "is_success": True}), success({"success": "yes"})
    (1.0, "told info['success'] = 'yes', expected a bool, a number or None")
    """
    for key in ("success", "is_success"):
        value = info.get(key)
        if value is None:
            continue
        with contextlib.suppress(Exception):  # whatever an object's own conversion raises, it is no number
            if not isinstance(value, str | bytes) and getattr(value, "shape", ()) == ():
                return float(value)
        return f"told info[{key!r}] = {' '.join(repr(value).split())[:80]}, expected a bool, a number or None"
    return math.nan


def told(error: BaseException) -> str:
    """An exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def _open(env_id: str, kwargs: dict[str, Any], spec: bytes | None) -> gymnasium.Env:
    if spec is not None:  # what the parent has registered, the worker may not have
        import cloudpickle

        # from the parent's own pipe, never from disk: a class made in a notebook has no other way here
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


def _reply(pipe: Connection, envs: list[gymnasium.Env], command: str, given: list) -> None:
    try:
        for answer in _answers(envs, command, given):
            pipe.send((True, tuple(answer)))
    except BaseException as error:  # whatever an environment raises is for the parent to tell
        pipe.send((False, told(error)))


def _serve(pipe: Connection) -> None:
    envs: list[gymnasium.Env] = []
    with contextlib.suppress(EOFError, OSError):  # the parent has closed the pipe, maybe before it had all answers
        while True:
            _reply(pipe, envs, *pipe.recv())
    for env in envs:
        with contextlib.suppress(Exception):  # nobody is left to tell, and the others must close
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
