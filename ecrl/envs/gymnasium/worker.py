"""Reset and step single Gymnasium environments, and serve as the worker process of `process_vector.parallel`.

A worker runs this file as a script. The file does not import ecrl, so a worker starts fast and needs little memory.
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
"""Map each package that Gymnasium's environments import to the extra of ecrl that installs the package."""


class Row(NamedTuple):
    """Result of one environment's step or reset. At the end of an episode, `final` is the observation before the reset.

    A worker sends a plain tuple instead of a `Row`. In the worker, this class belongs to the module `__main__`, so the
    parent process could not unpickle a `Row`.
    """

    obs: Any
    mask: Any = None
    reward: Any = 0.0
    terminated: bool = False
    truncated: bool = False
    success: float | str = math.nan
    final: Any = None


def _no_log_file() -> None:
    """Stop MuJoCo from writing its warnings to a file in the working directory. Warnings still go to stderr."""
    if config := getattr(sys.modules.get("mujoco"), "MjLogConfig", None):
        log = config.get()
        log.logto_file = False
        log.set()


@contextlib.contextmanager
def _explain_missing_package() -> Iterator[None]:
    """Convert an import error inside the block to an error that shows how to install the missing package."""
    try:
        yield
    except (ImportError, DependencyNotInstalled) as error:
        missing = getattr(error if isinstance(error, ImportError) else error.__cause__, "name", None)
        if missing not in _EXTRAS:
            raise
        advice = f"install it with: pip install 'ecrl[{_EXTRAS[missing]}]'"
        raise ModuleNotFoundError(f"No module named {missing!r}: {advice}") from error


def make(env_id: str, kwargs: dict[str, Any]) -> gymnasium.Env:
    """Call `gymnasium.make` without Gymnasium's checker, which checks only the first steps. ecrl checks every step."""
    known = gymnasium.registry.get(env_id)  # None for an id that begins with "module:"
    with _explain_missing_package():
        if known and isinstance(known.entry_point, str):
            load_env_creator(known.entry_point)  # this call imports MuJoCo if the environment needs it
        _no_log_file()
        env = gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    _no_log_file()
    return env


def reset(env: gymnasium.Env, seed: int) -> Row:
    """Start an episode. The seed also determines all later episodes."""
    obs, info = env.reset(seed=seed)
    return Row(obs, info.get("action_mask"))


def step(env: gymnasium.Env, action: Any) -> Row:
    """Take one step. If the step ends the episode, start the next episode."""
    obs, reward, terminated, truncated, info = env.step(action)
    success, final = success_of(info), None
    if terminated or truncated:
        final = deepcopy(obs)  # the environment may write the next observation into the same memory
        obs, info = env.reset()
    return Row(obs, info.get("action_mask"), reward, terminated, truncated, success, final)


def success_of(info: dict[str, Any]) -> float | str:
    """Return the success that `info` reports, NaN if absent, or an error message if the value is not a number.

    >>> success_of({"success": None, "is_success": True}), success_of({"success": "yes"})
    (1.0, "reported info['success'] = 'yes', expected a bool, a number or None")
    """
    for key in ("success", "is_success"):
        value = info.get(key)
        if value is None:
            continue
        with contextlib.suppress(Exception):  # an object that cannot be converted is not a number
            if not isinstance(value, str | bytes) and getattr(value, "shape", ()) == ():
                return float(value)
        return f"reported info[{key!r}] = {' '.join(repr(value).split())[:80]}, expected a bool, a number or None"
    return math.nan


def error_text(error: BaseException) -> str:
    """Return the type and message of an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def _open(env_id: str, kwargs: dict[str, Any], spec: bytes | None) -> gymnasium.Env:
    if spec is not None:  # the parent may have registered an environment that this process has not registered
        import cloudpickle

        # `loads` runs code from the bytes, so the bytes must come from a trusted source. The bytes are an EnvSpec that
        # `process_vector.parallel` pickled in the parent process and sent through the private pipe of this worker. The
        # bytes never come from a file or a network. The module `pickle` itself cannot load a class that a notebook
        # defines.
        gymnasium.registry.setdefault(env_id.rpartition(":")[2], cloudpickle.loads(spec))
    return make(env_id, kwargs)


def _answers(envs: list[gymnasium.Env], command: str, values: list) -> Iterator[Any]:
    """Run a command in one environment after the other, and yield the results."""
    for i, value in enumerate(values):
        if command == "open":
            envs.append(_open(*value))
            yield envs[i].observation_space, envs[i].action_space
        else:
            yield reset(envs[i], value) if command == "reset" else step(envs[i], value)


def _reply(pipe: Connection, envs: list[gymnasium.Env], command: str, values: list) -> None:
    try:
        for answer in _answers(envs, command, values):
            pipe.send((True, tuple(answer)))
    except BaseException as error:  # the parent process reports the error
        pipe.send((False, error_text(error)))


def _serve(pipe: Connection) -> None:
    envs: list[gymnasium.Env] = []
    with contextlib.suppress(EOFError, OSError):  # the parent closed the pipe, perhaps before it read all results
        while True:
            _reply(pipe, envs, *pipe.recv())
    for env in envs:
        with contextlib.suppress(Exception):  # this error cannot be reported, and the other environments must close
            env.close()


def _die_with_parent() -> None:
    """Exit when the parent process dies.

    The parent never writes to stdin, so the read returns only if the parent dies.
    """
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _, number, *path = sys.argv
    sys.path[:] = path
    _serve(Connection(int(number)))
