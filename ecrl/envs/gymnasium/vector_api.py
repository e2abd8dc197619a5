"""N Gymnasium environments side by side.

A `Vector` ends each step with every environment inside an episode: where one ended, `obs` is the first of the next and
`final` what was observed before the reset.
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


class Fault(Exception):
    """What went wrong, and in which environment where that can be known."""

    def __init__(self, env: int | None, text: str):
        super().__init__(text)
        self.env = env


class Outcome(NamedTuple):
    """What N environments answer. counts: False where a step only reset; None where that never happens."""

    obs: Any
    final: Any
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    success: Tensor
    masks: Sequence[Any]
    counts: Tensor | None = None


class Vector(NamedTuple):
    """Functions of open environments; `reset(seeds)` and `step(actions)` raise Fault or BadValue."""

    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    reset: Callable[[list[int]], Outcome]
    step: Callable[[np.ndarray], Outcome]
    close: Callable[[], None]


def replaced(obs: Any, where: Sequence[int], space: gymnasium.Space, rows: Sequence[Any]) -> Any:
    """A copy of the observations with those of the environments `where` replaced by `rows`."""
    out = obs.clone()
    if where:
        try:
            out[list(where)] = observation(space, collate(space, rows))
        except BadValue as error:
            env = None if error.env is None else where[error.env]
            raise BadValue(f"{error}, at the end of its episode", env) from None
    return out


def check_success(told: Sequence[float | str]) -> None:
    """Raise BadValue naming the first environment whose `worker.success` is words."""
    for i, value in enumerate(told):
        if isinstance(value, str):
            raise BadValue(value, i)


def _outcome(space: gymnasium.Space, rows: Sequence[tuple]) -> Outcome:
    obs, masks, reward, terminated, truncated, success, finals = zip(*rows, strict=True)
    tensor = observation(space, collate(space, obs))
    check_success(success)
    ended = [i for i, final in enumerate(finals) if final is not None]
    final = replaced(tensor, ended, space, [finals[i] for i in ended])
    paid = torch.from_numpy(np.array(reward, np.float32).reshape(len(rows)))
    ends, limits = (torch.from_numpy(np.array(flag, bool)) for flag in (terminated, truncated))
    return Outcome(tensor, final, paid, ends, limits, torch.tensor(success), masks)


def vector_of(spaces: tuple, ask: Callable[[str, Any], Sequence[tuple]], close: Callable[[], None]) -> Vector:
    """The functions over `ask("reset", seeds)` and `ask("step", actions)`, which give a `worker.Row` per env."""

    def answer(command: str) -> Callable[[Any], Outcome]:
        return lambda given: _outcome(spaces[0], ask(command, given))

    return Vector(spaces[0], spaces[1], answer("reset"), answer("step"), close)


def serial(env_id: str, kwargs: dict[str, Any], num_envs: int) -> Vector:
    """Environments in this process, one after the other."""
    envs: list[gymnasium.Env] = []

    def ask(command: str, given: Sequence[Any]) -> list[tuple]:
        rows, call = [], worker.reset if command == "reset" else worker.step
        try:
            for env, value in zip(envs, given, strict=True):
                rows.append(call(env, value))
        except Exception as error:
            raise Fault(len(rows), f"raised {worker.told(error)}") from error
        return rows

    def close() -> None:
        for env in envs:
            with contextlib.suppress(Exception):  # one that cannot close must not keep the others open
                env.close()

    try:
        for _ in range(num_envs):
            envs.append(worker.make(env_id, kwargs))
    except Exception as error:
        close()
        raise Fault(len(envs), worker.told(error)) from error
    return vector_of((envs[0].observation_space, envs[0].action_space), ask, close)
