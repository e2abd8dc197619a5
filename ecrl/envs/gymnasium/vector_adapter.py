"""Convert a `gymnasium.vector.VectorEnv` with any of the three autoreset modes to a `Vector`.

SAME_STEP: the vector env resets in the step that ends an episode. `info["final_obs"]` becomes `final`.
NEXT_STEP: the vector env resets in the step after the end of an episode. `counts` is False for a step that resets, and
    the action of this step is ignored.
DISABLED: the vector env does not reset by itself. If episodes end in a step, the adapter calls
    `reset(options={"reset_mask": ...})`.
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
from ecrl.envs.gymnasium.vector_api import Fault, Outcome, Vector, check_success, masks_of_final, replace_rows
from ecrl.envs.gymnasium.worker import error_text, success_of


def _entries(info: dict, key: str, n: int) -> list[Any]:
    """Return each environment's `info[key]`, or None for an environment that does not report the key."""
    if key not in info:
        return [None] * n
    reported = info.get(f"_{key}", np.ones(n, bool))
    values = list(info[key]) if isinstance(info[key], Iterable) else []
    if len(values) != n:
        actual = " ".join(repr(info[key]).split())[:80]
        raise Fault(None, f"reported info[{key!r}] = {actual}, expected one value for each of its {n} environments")
    return [value if valid else None for value, valid in zip(values, reported, strict=True)]


def _success(info: dict, n: int) -> torch.Tensor:
    """Return the success of each environment in this step, in shape `[N]`.

    The success is NaN for an environment without a value for success. If the vector env resets in the same step, `info`
    describes the reset, and `final_info` overrides `info`.
    """
    values: list[float | str] = [math.nan] * n
    for source in (info, info.get("final_info", {})):
        both = zip(_entries(source, "success", n), _entries(source, "is_success", n), strict=True)
        for i, (first, second) in enumerate(both):
            if first is not None or second is not None:
                values[i] = success_of({"success": first, "is_success": second})
    check_success(values)
    return torch.tensor(values)


def _rows(batch: Any, envs: list[int]) -> Any:
    """Select the observations of the environments `envs` from a batch."""
    if isinstance(batch, dict):
        return {name: _rows(part, envs) for name, part in batch.items()}
    return tuple(_rows(part, envs) for part in batch) if isinstance(batch, tuple) else batch[envs]


def _final(obs: Any, ended: list[int], space: gymnasium.Space, info: dict) -> Any:
    """Return a copy of `obs` with the last observation of the ended episode for each environment in `ended`.

    Only the mode SAME_STEP uses this function. `ended` lists the environments whose episodes ended in this step.
    """
    if not ended:
        return obs.clone()
    if "final_obs" not in info:
        raise Fault(ended[0], "ended an episode without info['final_obs'], which the autoreset mode SAME_STEP needs")
    last = info["final_obs"]
    if isinstance(last, dict | tuple) or (isinstance(last, np.ndarray) and last.dtype != object):
        final = obs.clone()
        final[ended] = observation(space, _rows(last, ended))
        return final
    return replace_rows(obs, ended, space, [last[i] for i in ended])


def _with_timeout(venv: AsyncVectorEnv, wait: Callable[[], Any], timeout: float) -> Callable[..., Any]:
    """Wrap `wait` so that a Fault is raised if a worker does not answer within `timeout` seconds."""

    def wait_or_fail(close_timeout: float | None = None) -> Any:
        if close_timeout is not None:  # this call came from `AsyncVectorEnv.close`, which then ends the workers
            raise multiprocessing.TimeoutError
        deadline = time.monotonic() + timeout
        for i, pipe in enumerate(venv.parent_pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise Fault(i, f"did not answer within {timeout:g} s (timeout)")
        return wait()

    return wait_or_fail


def _failed_env(venv: VectorEnv) -> int | None:
    """Return the index of the environment that raised or lost its worker, or None if it is unknown.

    Only an AsyncVectorEnv reports the index.
    """
    if not isinstance(venv, AsyncVectorEnv):
        return None
    lost = connection.wait([process.sentinel for process in venv.processes], timeout=1.0)
    pairs = zip(venv.parent_pipes, venv.processes, strict=True)
    return next((i for i, (pipe, process) in enumerate(pairs) if pipe is None or process.sentinel in lost), None)


def _kill(venv: VectorEnv) -> None:
    """Kill the workers of an AsyncVectorEnv. After a failure, `close` would wait for the workers' answers."""
    if isinstance(venv, AsyncVectorEnv):
        for process in venv.processes:
            process.kill()
            process.join()
        venv.closed = True


def _close(venv: VectorEnv) -> None:
    """Close a vector env. If Gymnasium's `close` raises, for example because a worker died, kill all workers."""
    try:
        venv.close()
    except Exception:
        _kill(cast(VectorEnv, venv.unwrapped))


def _reset_with_seeds(venv: VectorEnv, seeds: list[int]) -> tuple[Any, dict]:
    """Reset a vector env with one seed per environment, or with the first seed if `reset` takes only one integer.

    Raises: Fault if `reset` takes only one integer, but some seeds are equal.
    """
    try:
        return venv.reset(seed=seeds)  # pyright: ignore[reportArgumentType]  (most vector envs take a list)
    except (gymnasium.error.Error, TypeError):
        if isinstance(venv.unwrapped, SyncVectorEnv | AsyncVectorEnv):
            raise
    if len(set(seeds)) < len(seeds):
        raise Fault(None, "takes one seed for all its environments, so equal keys cannot give equal episodes")
    return venv.reset(seed=seeds[0])


def _call(base: VectorEnv, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function of a vector env. If the function raises, kill the workers and raise a Fault."""
    try:
        return function(*args, **kwargs)
    except Fault:
        _kill(base)
        raise
    except Exception as error:
        env = _failed_env(base)
        lost = isinstance(error, EOFError | OSError) and env is not None
        _kill(base)
        raise Fault(env, "lost its worker" if lost else f"raised {error_text(error)}") from error


def as_vector(venv: VectorEnv, timeout: float) -> Vector:
    """Convert an open vector env to a `Vector`. An AsyncVectorEnv must answer within `timeout` seconds.

    Raises: Fault if the vector env does not declare its autoreset mode.
    """
    base, n, space = venv.unwrapped, venv.num_envs, venv.single_observation_space
    try:
        mode = AutoresetMode(venv.metadata.get("autoreset_mode"))
    except ValueError:
        venv.close()
        raise Fault(None, "has no autoreset mode; set metadata['autoreset_mode'] to an AutoresetMode") from None
    if isinstance(base, AsyncVectorEnv):
        for name in ("reset_wait", "step_wait"):
            setattr(base, name, _with_timeout(base, getattr(base, name), timeout))
    resetting = np.zeros(n, bool)  # in mode NEXT_STEP, True for environments that the next step resets

    def outcome(
        obs: Any, final: Any, reward: Any, flags: tuple, success: torch.Tensor, masks: list[Any], last_masks: list[Any]
    ) -> Outcome:
        counts = torch.from_numpy(~resetting) if mode is AutoresetMode.NEXT_STEP else None
        terminated, truncated = (torch.from_numpy(np.array(flag, bool)) for flag in flags)
        resetting[:] = (terminated | truncated).numpy()
        rewards = torch.from_numpy(np.array(reward, np.float32).reshape(n))
        final_masks = masks_of_final(masks, last_masks, terminated, truncated)
        return Outcome(obs, final, rewards, terminated, truncated, success, masks, final_masks, counts)

    def reset(seeds: list[int]) -> Outcome:
        raw, info = _call(base, _reset_with_seeds, venv, seeds)
        resetting[:] = False
        first, flags = observation(space, raw), (np.zeros(n, bool), np.zeros(n, bool))
        success, masks = torch.full((n,), math.nan), _entries(info, "action_mask", n)
        return outcome(first, first.clone(), np.zeros(n), flags, success, masks, masks)

    def step(actions: np.ndarray) -> Outcome:
        raw, reward, terminated, truncated, info = _call(base, venv.step, actions)
        done = np.asarray(terminated, bool) | np.asarray(truncated, bool)
        ended, obs, masks = done.nonzero()[0].tolist(), observation(space, raw), _entries(info, "action_mask", n)
        last_masks = masks
        if mode is AutoresetMode.SAME_STEP:
            final, last_masks = _final(obs, ended, space, info), _entries(info.get("final_info", {}), "action_mask", n)
        else:
            final = obs.clone()
        if mode is AutoresetMode.DISABLED and ended:
            raw, reset_info = _call(base, venv.reset, options={"reset_mask": done})
            obs[ended] = observation(space, raw)[ended]
            new = _entries(reset_info, "action_mask", n)
            masks = [new[i] if done[i] else mask for i, mask in enumerate(masks)]
        return outcome(obs, final, reward, (terminated, truncated), _success(info, n), masks, last_masks)

    return Vector(space, venv.single_action_space, reset, step, lambda: _close(venv))
