"""A `gymnasium.vector.VectorEnv` as a `Vector`, whichever of the three autoreset modes it has.

| mode | an episode that ended | so here |
|---|---|---|
| SAME_STEP | is followed by the next in the same step; its end is in `info["final_obs"]` | it is taken from there |
| NEXT_STEP | is followed by a step that ignores the action and resets | that row has `counts` False |
| DISABLED | waits for `reset(options={"reset_mask": ...})` | it is reset in the same step |
"""

import math
import multiprocessing
import time
from collections.abc import Callable, Iterable
from multiprocessing import connection
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from ecrl.envs.gymnasium.spaces import observation
from ecrl.envs.gymnasium.vector_api import Fault, Outcome, Vector, check_success, replaced
from ecrl.envs.gymnasium.worker import success, told


def _entries(info: dict, key: str, n: int) -> list[Any]:
    """What each environment reports under a key, None where it does not."""
    if key not in info:
        return [None] * n
    known = info.get(f"_{key}", np.ones(n, bool))
    values = list(info[key]) if isinstance(info[key], Iterable) else []
    if len(values) != n:
        given = " ".join(repr(info[key]).split())[:80]
        raise Fault(None, f"told info[{key!r}] = {given}, expected one of each of its {n} environments")
    return [value if there else None for value, there in zip(values, known, strict=True)]


def _success(info: dict, n: int) -> torch.Tensor:
    """Of the step, not of a reset in the same step: `final_info` overrides."""
    told_success: list[float | str] = [math.nan] * n
    for source in (info, info.get("final_info", {})):
        both = zip(_entries(source, "success", n), _entries(source, "is_success", n), strict=True)
        for i, (first, second) in enumerate(both):
            if first is not None or second is not None:
                told_success[i] = success({"success": first, "is_success": second})
    check_success(told_success)
    return torch.tensor(told_success)


def _rows(batch: Any, at: list[int]) -> Any:
    """Some rows of a batch of observations."""
    if isinstance(batch, dict):
        return {name: _rows(part, at) for name, part in batch.items()}
    return tuple(_rows(part, at) for part in batch) if isinstance(batch, tuple) else batch[at]


def _final(obs: Any, ended: list[int], space: gymnasium.Space, info: dict) -> Any:
    """The observations with those from before the reset where an episode ended."""
    if not ended:
        return obs.clone()
    if "final_obs" not in info:
        raise Fault(ended[0], "ended an episode without info['final_obs']")
    found = info["final_obs"]
    if isinstance(found, dict | tuple) or (isinstance(found, np.ndarray) and found.dtype != object):
        final = obs.clone()
        final[ended] = observation(space, _rows(found, ended))
        return final
    return replaced(obs, ended, space, [found[i] for i in ended])


def _bounded(venv: AsyncVectorEnv, wait: Callable[[], Any], timeout: float) -> Callable[..., Any]:
    """`wait` once every environment has answered; Gymnasium's own waits for ever, and names nobody."""

    def bounded(at_close: float | None = None) -> Any:
        if at_close is not None:
            raise multiprocessing.TimeoutError
        deadline = time.monotonic() + timeout
        for i, pipe in enumerate(venv.parent_pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise Fault(i, f"did not answer within {timeout:g} s (timeout)")
        return wait()

    return bounded


def _culprit(venv: VectorEnv) -> int | None:
    """Which environment of an AsyncVectorEnv raised, or lost its worker; others do not tell."""
    if not isinstance(venv, AsyncVectorEnv):
        return None
    lost = connection.wait([process.sentinel for process in venv.processes], timeout=1.0)
    ended = (pipe is None or one.sentinel in lost for pipe, one in zip(venv.parent_pipes, venv.processes, strict=True))
    return next((i for i, over in enumerate(ended) if over), None)


def _kill(venv: VectorEnv) -> None:
    """End an AsyncVectorEnv of which an environment failed: its own `close` would wait for the answer."""
    if isinstance(venv, AsyncVectorEnv):
        for process in venv.processes:
            process.kill()
            process.join()
        venv.closed = True


def _close(venv: VectorEnv) -> None:
    """Close it whatever has become of it: Gymnasium's own `close` raises where a worker is gone, and keeps the rest."""
    try:
        venv.close()
    except Exception:
        _kill(cast(VectorEnv, venv.unwrapped))


def _seeded(venv: VectorEnv, seeds: list[int]) -> tuple[Any, dict]:
    """Reset with one seed per environment; with the first where a vector env takes one integer, as the base class."""
    try:
        return venv.reset(seed=seeds)  # pyright: ignore[reportArgumentType]  (that of most)
    except (gymnasium.error.Error, TypeError):
        if isinstance(venv.unwrapped, SyncVectorEnv | AsyncVectorEnv):
            raise
    if len(set(seeds)) < len(seeds):
        raise Fault(None, "takes one seed for all its environments, so that those of a group cannot start alike")
    return venv.reset(seed=seeds[0])


def _asked(base: VectorEnv, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """The answer of the vector env, or a Fault and its workers gone."""
    try:
        return function(*args, **kwargs)
    except Fault:
        _kill(base)
        raise
    except Exception as error:
        env = _culprit(base)
        lost = isinstance(error, EOFError | OSError) and env is not None
        _kill(base)
        raise Fault(env, "lost its worker" if lost else f"raised {told(error)}") from error


def driven(venv: VectorEnv, timeout: float) -> Vector:
    """The functions of an open vector env; `timeout` seconds are for an AsyncVectorEnv to answer."""
    base, n, space = venv.unwrapped, venv.num_envs, venv.single_observation_space
    try:
        mode = AutoresetMode(venv.metadata.get("autoreset_mode"))
    except ValueError:
        venv.close()
        raise Fault(None, "does not say how it resets: set metadata['autoreset_mode'] to an AutoresetMode") from None
    if isinstance(base, AsyncVectorEnv):
        for name in ("reset_wait", "step_wait"):
            setattr(base, name, _bounded(base, getattr(base, name), timeout))
    resetting = np.zeros(n, bool)

    def outcome(obs: Any, final: Any, reward: Any, flags: tuple, success: torch.Tensor, masks: list[Any]) -> Outcome:
        counts = torch.from_numpy(~resetting) if mode is AutoresetMode.NEXT_STEP else None
        terminated, truncated = (torch.from_numpy(np.array(flag, bool)) for flag in flags)
        resetting[:] = (terminated | truncated).numpy()
        paid = torch.from_numpy(np.array(reward, np.float32).reshape(n))
        return Outcome(obs, final, paid, terminated, truncated, success, masks, counts)

    def reset(seeds: list[int]) -> Outcome:
        raw, info = _asked(base, _seeded, venv, seeds)
        resetting[:] = False
        first, no = observation(space, raw), np.zeros(n, bool)
        unknown = torch.full((n,), math.nan)
        return outcome(first, first.clone(), np.zeros(n), (no, no), unknown, _entries(info, "action_mask", n))

    def step(actions: np.ndarray) -> Outcome:
        raw, reward, terminated, truncated, info = _asked(base, venv.step, actions)
        over = np.asarray(terminated, bool) | np.asarray(truncated, bool)
        ended, obs, masks = over.nonzero()[0].tolist(), observation(space, raw), _entries(info, "action_mask", n)
        final = _final(obs, ended, space, info) if mode is AutoresetMode.SAME_STEP else obs.clone()
        if mode is AutoresetMode.DISABLED and ended:
            raw, fresh = _asked(base, venv.reset, options={"reset_mask": over})
            obs[ended] = observation(space, raw)[ended]
            new = _entries(fresh, "action_mask", n)
            masks = [new[i] if over[i] else mask for i, mask in enumerate(masks)]
        return outcome(obs, final, reward, (terminated, truncated), _success(info, n), masks)

    return Vector(space, venv.single_action_space, reset, step, lambda: _close(venv))
