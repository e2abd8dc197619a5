"""Define `Vector`, an interface to N open Gymnasium environments. `serial` opens environments in this process.

A `Vector` resets an environment in the step that ends its episode. In the outcome of such a step, `obs` is the first
observation of the next episode, and `final` is the observation before the reset. If the outcomes have `counts`, the
`Vector` instead resets in the following step.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor

from ecrl.envs.gymnasium import worker
from ecrl.envs.gymnasium.spaces import BadValue, collate, observation

_FPS = 30.0  # frame rate of an environment that declares none, as in Gymnasium's RecordVideo


class Fault(Exception):
    """Error in an environment. `env` is the index of the environment, or None if it is unknown."""

    def __init__(self, env: int | None, text: str):
        super().__init__(text)
        self.env = env


class Outcome(NamedTuple):
    """Result of a step or reset of N environments.

    `counts` is False for an environment that the step only reset. `counts` is None if a reset never takes a step of its
    own. `success` is NaN for an environment whose `info` has no value for success. `masks` holds the action mask of
    each environment, or None for an environment without a mask. `final_masks` holds the action masks that belong to
    `final`, or the masks of `obs` for environments whose episode terminated. `scores` holds the score of the Atari game
    that ended in the step, or NaN if no game ended. `scores` is None for environments without the setting `atari`.
    """

    obs: Any
    final: Any
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    success: Tensor
    masks: Sequence[Any]
    final_masks: Sequence[Any]
    counts: Tensor | None = None
    scores: Tensor | None = None


def _cannot_draw() -> list[np.ndarray]:
    """Raise Fault, because only the environments of `serial` can draw images."""
    raise Fault(None, "cannot draw images, because the environments run in other processes or as a vector env")


class Vector(NamedTuple):
    """Functions that reset, step, close and draw N open environments.

    `render` returns one image uint8 `[h, w, 3]` per environment. `fps` is the frame rate of the images, in frames per
    second. `reset`, `step` and `render` raise Fault or BadValue.
    """

    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    reset: Callable[[list[int]], Outcome]
    step: Callable[[np.ndarray], Outcome]
    close: Callable[[], None]
    render: Callable[[], list[np.ndarray]] = _cannot_draw
    fps: float = _FPS


def replace_rows(obs: Any, envs: Sequence[int], space: gymnasium.Space, rows: Sequence[Any]) -> Any:
    """Return a copy of `obs` with `rows` as the observations of the environments `envs`."""
    out = obs.clone()
    if envs:
        try:
            out[list(envs)] = observation(space, collate(space, rows))
        except BadValue as error:
            env = None if error.env is None else envs[error.env]
            raise BadValue(f"{error}, at the end of its episode", env) from None
    return out


def check_success(values: Sequence[float | str]) -> None:
    """Raise BadValue for the first value that is an error message of `worker.success_of`."""
    for i, value in enumerate(values):
        if isinstance(value, str):
            raise BadValue(value, i)


def one_per_env(values: Sequence[Any], dtype: Any, name: str) -> Tensor:
    """Convert rewards or flags to a tensor `[N]`. Each value is a number, or an array with one element.

    Raises: BadValue for the first environment with any other value. `name` describes the values.

    >>> one_per_env([1, np.array([2.0])], np.float32, "reward")
    tensor([1., 2.])
    """
    if not any(value is None for value in values):  # NumPy converts None to NaN or False
        with contextlib.suppress(TypeError, ValueError):  # ten times as fast as the loop below
            return torch.from_numpy(np.array(values, dtype).reshape(len(values)))
    numbers = []
    for i, value in enumerate(values):
        try:
            if value is None:
                raise TypeError
            numbers.append(np.asarray(value, dtype).reshape(()))
        except (TypeError, ValueError):
            text = " ".join(repr(value).split())[:80]
            raise BadValue(f"returned {name} = {text}, expected one number", i) from None
    return torch.from_numpy(np.array(numbers, dtype))


def masks_of_final(
    masks: Sequence[Any], last_masks: Sequence[Any], terminated: Tensor, truncated: Tensor
) -> Sequence[Any]:
    """Return `masks`, with the entries of `last_masks` for environments whose episode was truncated, not terminated.

    >>> masks_of_final([1, 2, 3], [4, 5, 6], torch.tensor([True, False, False]), torch.tensor([True, True, False]))
    [1, 5, 3]
    """
    cut = (truncated & ~terminated).tolist()
    return [last if is_cut else mask for mask, last, is_cut in zip(masks, last_masks, cut, strict=True)]


def _outcome(space: gymnasium.Space, rows: Sequence[tuple]) -> Outcome:
    obs, masks, reward, terminated, truncated, success, finals, scores, last_masks = zip(*rows, strict=True)
    tensor = observation(space, collate(space, obs))
    check_success(success)
    ended = [i for i, final in enumerate(finals) if final is not None]
    final = replace_rows(tensor, ended, space, [finals[i] for i in ended])
    rewards, flags = one_per_env(reward, np.float32, "reward"), {"terminated": terminated, "truncated": truncated}
    terminations, truncations = (one_per_env(values, bool, name) for name, values in flags.items())
    final_masks = masks_of_final(masks, last_masks, terminations, truncations)
    outcome = Outcome(tensor, final, rewards, terminations, truncations, torch.tensor(success), masks, final_masks)
    return outcome if scores[0] is None else outcome._replace(scores=torch.tensor(scores))


def vector_of(spaces: tuple, ask: Callable[[str, Any], Sequence[tuple]], close: Callable[[], None]) -> Vector:
    """Return a `Vector` that calls `ask("reset", seeds)` and `ask("step", actions)`.

    For each environment, `ask` returns a `worker.Row` or a tuple with the same values.
    """

    def answer(command: str) -> Callable[[Any], Outcome]:
        return lambda values: _outcome(spaces[0], ask(command, values))

    return Vector(spaces[0], spaces[1], answer("reset"), answer("step"), close)


def _image(env: gymnasium.Env, index: int) -> np.ndarray:
    """Draw one environment. Raise Fault or BadValue if `render` fails or does not return an image."""
    try:
        image = worker.render(env)
    except Exception as error:
        raise Fault(index, f"raised {worker.error_text(error)}") from error
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
        return image
    actual = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
    raise BadValue(f"drew {actual}, expected an image uint8 [h, w, 3]", index)


def serial(env_id: str, kwargs: dict[str, Any], num_envs: int, atari: dict[str, Any] | None = None) -> Vector:
    """Open environments in this process. The returned `Vector` resets and steps one environment after the other."""
    envs: list[gymnasium.Env] = []

    def ask(command: str, values: Sequence[Any]) -> list[tuple]:
        rows, call = [], worker.reset if command == "reset" else worker.step
        try:
            for env, value in zip(envs, values, strict=True):
                rows.append(call(env, value))
        except Exception as error:
            raise Fault(len(rows), f"raised {worker.error_text(error)}") from error
        return rows

    def close() -> None:
        for env in envs:
            with contextlib.suppress(Exception):  # an environment that cannot close must not keep the others open
                env.close()

    try:
        for _ in range(num_envs):
            envs.append(worker.make(env_id, kwargs, atari))
    except Exception as error:
        close()
        raise Fault(len(envs), worker.error_text(error)) from error
    vector = vector_of((envs[0].observation_space, envs[0].action_space), ask, close)
    fps = envs[0].metadata.get("render_fps") or _FPS
    return vector._replace(render=lambda: [_image(env, i) for i, env in enumerate(envs)], fps=fps)
