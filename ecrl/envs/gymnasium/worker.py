"""Reset and step single Gymnasium environments, and serve as the worker process of `process_vector.parallel`.

A worker runs this file as a script. A worker does not import ecrl, so it starts fast and needs little memory.
"""

import contextlib
import importlib.util
import math
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from copy import deepcopy
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import gymnasium
from gymnasium.envs.registration import load_env_creator
from gymnasium.error import DependencyNotInstalled

_EXTRAS = {"mujoco": "mujoco", "imageio": "mujoco", "Box2D": "box2d", "pygame": "video"}
_EXTRAS |= {"ale_py": "atari", "cv2": "atari"}
"""Map each package that Gymnasium's environments import to the extra of ecrl that installs the package."""


_SCORE = "ecrl.game_score"
"""Key of `info` for the score of an Atari game that ended.

The key must differ from every key that an environment uses.
"""


class Row(NamedTuple):
    """Result of one environment's step or reset.

    `final` is the observation before the reset if the step ended an episode, otherwise None. `success` is NaN if `info`
    has no value for success, and an error message if this value is not a number.

    `final_mask` is the action mask before the reset if the step ended an episode, otherwise None.

    `score` is the score of the Atari game that ended in the step, or NaN if no game ended. `score` is None for an
    environment without the setting `atari`.

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
    score: float | None = None
    final_mask: Any = None


def _no_log_file() -> None:
    """Stop MuJoCo from writing its warnings to a file in the working directory. Warnings still go to stderr."""
    if config := getattr(sys.modules.get("mujoco"), "MjLogConfig", None):
        log = config.get()
        log.logto_file = False
        log.set()


@contextlib.contextmanager
def _explain_missing_package() -> Iterator[None]:
    """If a package in `_EXTRAS` is missing inside the block, raise an error that shows how to install the package."""
    try:
        yield
    except (ImportError, DependencyNotInstalled) as error:
        missing = getattr(error if isinstance(error, ImportError) else error.__cause__, "name", None)
        if missing not in _EXTRAS:
            raise
        advice = f"install it with: pip install 'ecrl[{_EXTRAS[missing]}]'"
        raise ModuleNotFoundError(f"No module named {missing!r}: {advice}") from error


def _atari_wrappers() -> ModuleType:
    """Import `atari_wrappers`. A worker loads the module from its file, because importing the package is slow."""
    if __package__:
        from ecrl.envs.gymnasium import atari_wrappers

        return atari_wrappers
    path = Path(__file__).with_name("atari_wrappers.py")
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _is_from_ale(spec: Any) -> bool:
    return isinstance(spec.entry_point, str) and spec.entry_point.startswith("ale_py.")


def _import_ale() -> None:
    """Import ale_py and register the Atari games. If ale_py is missing, the error names the extra to install."""
    with _explain_missing_package():
        import ale_py  # pyright: ignore[reportMissingImports]
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # otherwise each process prints a banner
    gymnasium.register_envs(ale_py)


def register_atari(env_id: str, is_atari: bool) -> None:
    """Register the Atari games if the id names one of them, or if `is_atari` is True and the id is not registered."""
    name = env_id.rpartition(":")[2]
    known = gymnasium.registry.get(name)
    if _is_from_ale(known) if known else is_atari or name.startswith("ALE/"):
        _import_ale()


def find_creator(env_id: str) -> Any:
    """Return the class or function that creates an environment, or None if the id is not registered.

    The call imports MuJoCo if the environment needs it.
    """
    known = gymnasium.registry.get(env_id.rpartition(":")[2])
    with _explain_missing_package():
        creator = known.entry_point if known else None
        return load_env_creator(creator) if isinstance(creator, str) else creator


def make(env_id: str, kwargs: dict[str, Any], atari: dict[str, Any] | None = None) -> gymnasium.Env:
    """Call `gymnasium.make` without Gymnasium's checker, which checks only the first steps. ecrl checks every step.

    `atari` holds the settings of `atari_wrappers.preprocess`. If `atari` is None, the environment is not preprocessed.
    """
    register_atari(env_id, atari is not None)
    creator = find_creator(env_id)
    with _explain_missing_package():
        _no_log_file()
        if atari is None:
            env = gymnasium.make(env_id, disable_env_checker=True, **kwargs)
        else:
            wrappers = _atari_wrappers()
            if creator is not None:
                wrappers.check_is_atari(creator)
            limit = kwargs.get(
                "max_episode_steps"
            )  # the limit counts steps of `frame_skip` frames, but gymnasium.make would count frames
            kwargs = {name: value for name, value in kwargs.items() if name != "max_episode_steps"}
            env = gymnasium.make(env_id, disable_env_checker=True, **kwargs)
            env = wrappers.preprocess(env, limit, _SCORE, **atari)
    _no_log_file()
    return env


def reset(env: gymnasium.Env, seed: int) -> Row:
    """Start an episode. The seed also determines all later episodes."""
    obs, info = env.reset(seed=seed)
    return Row(obs, info.get("action_mask"), score=info.get(_SCORE))


def step(env: gymnasium.Env, action: Any) -> Row:
    """Take one step. If the step ends the episode, start the next episode."""
    obs, reward, terminated, truncated, info = env.step(action)
    success, final, final_mask = success_of(info), None, None
    if terminated or truncated:
        # copy, because the environment may write the next observation and mask into the same memory
        final, final_mask = deepcopy(obs), deepcopy(info.get("action_mask"))
        obs, info = env.reset()
    mask, score = info.get("action_mask"), info.get(_SCORE)
    return Row(obs, mask, reward, terminated, truncated, success, final, score, final_mask)


def render(env: gymnasium.Env) -> Any:
    """Return the image of an environment that was made with a render mode."""
    with _explain_missing_package():
        return env.render()


def success_of(info: dict[str, Any]) -> float | str:
    """Return the success that `info` reports, NaN if absent, or an error message if the value is not a number.

    >>> success_of({"success": None, "is_success": True}), success_of({"success": "yes"})
    (1.0, "reported info['success'] = 'yes', expected a bool, a number or None")
    """
    for key in ("success", "is_success"):
        value = info.get(key)
        if value is None:
            continue
        with contextlib.suppress(Exception):  # if the conversion fails, the object is not a number
            if not isinstance(value, str | bytes) and getattr(value, "shape", ()) == ():
                return float(value)
        return f"reported info[{key!r}] = {' '.join(repr(value).split())[:80]}, expected a bool, a number or None"
    return math.nan


def error_text(error: BaseException) -> str:
    """Return the type and message of an exception in one line, with the line of the environment's code.

    >>> error_text(KeyError("b"))
    "KeyError: 'b'"
    """
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    frame = _user_frame(error)
    return text if frame is None else f"{text} ({Path(frame.filename).name}:{frame.lineno})"


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost stack frame of an environment's code, or None if no frame belongs to an environment.

    A frame of an installed package counts only if no other frame is outside of Gymnasium, ecrl and Python's library.
    """
    inside, python = {Path(str(gymnasium.__file__)).parent, Path(__file__).parents[2]}, Path(os.__file__).parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    frames = [frame for frame in frames if not inside & {*Path(frame.filename).parents}]
    own = [frame for frame in frames if python not in Path(frame.filename).parents]
    installed = [frame for frame in frames if "site-packages" in Path(frame.filename).parts]
    return (own or installed or [None])[-1]


def _open(env_id: str, kwargs: dict[str, Any], atari: dict[str, Any] | None, spec: bytes | None) -> gymnasium.Env:
    if spec is not None:  # the parent may have registered an environment that this process has not registered
        import cloudpickle

        # `loads` runs code from the bytes, so the bytes must come from a trusted source. The bytes are an EnvSpec that
        # `process_vector.parallel` pickled in the parent process and sent through the private pipe of this worker. The
        # bytes never come from a file or a network. The module `pickle` itself cannot load a class that a notebook
        # defines.
        registered = cloudpickle.loads(spec)
        if _is_from_ale(registered):
            _import_ale()  # import before the spec is added, because the import warns if an id exists already
        gymnasium.registry.setdefault(env_id.rpartition(":")[2], registered)
    return make(env_id, kwargs, atari)


def _answers(envs: list[gymnasium.Env], command: str, values: list) -> Iterator[Any]:
    """Run the command "open", "reset" or "step" with each of `values`, and yield each result."""
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
