"""The environment record `Env`, and its wrappers, which are functions `Env -> Env`.

An `Env` is a frozen dataclass of pure functions. `reset(keys)` and `step(state, action, noise)` return a state, which
is a TensorDict of batch shape `[*B]`. A state has `obs`, `reward`, `terminated`, `truncated` and the fields of the
dynamics. It may also have `info`, a TensorDict with fields such as `success`.

An action may be a chunk of several steps of the environment. The state then has `executed` (int64 `[*B]`), the number
of steps that the action took. It is at least 1, and less than the length of the chunk if the episode ended before.
Returns discount by `gamma ** executed`. `reward` is the sum over these steps. After `reset`, `executed` may have any
value. All other numbers of steps here, such as `time_limit` and `min_truncation_gap`, count calls of `step`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.pytree import flatten
from ecrl.spaces import Box, Space

NEVER = sys.maxsize
"""Value of `min_truncation_gap` for an environment that never truncates an episode."""


def keys_as_noise(keys: Tensor) -> Tensor:
    """Return the keys unchanged. This is the default `Env.draw`: the noise of a step is the key of the step."""
    return keys


def last_obs(state: TensorDict) -> Any:
    """Return `state["obs"]`. This is the default `Env.observe`: nothing is recomputed."""
    return state["obs"]


def nothing_to_close(state: TensorDict) -> None:
    """Do nothing. This is the default `Env.close`: tensors need no closing."""


def nothing_lasts(start: TensorDict, ended: TensorDict) -> TensorDict:
    """Return the start unchanged. This is the default `Env.carry_over`: no value outlasts an episode."""
    return start


def always_current(state: TensorDict) -> bool:
    """Return True. This is the default `Env.is_current`: `step` can continue from every state."""
    return True


@dataclass(frozen=True)
class Env:
    """An environment as a record of pure functions. Each function handles any number of copies at once.

    Attributes:
        reset: (int64 keys `[*B]`) -> state at the start of an episode.
        step: (state, action, noise) -> next state.
        observation_space: the space of the observations of one copy.
        action_space: the space of the actions of one copy.
        draw: (keys) -> noise of a step. It is called on keys `[T, N]` before the loop over the steps, so the noise
            cannot depend on the state.
        observe: (state) -> observation. It recomputes the observation after an event changed the state.
        lockstep: True if every episode has the same length.
        is_pure: False if part of the state is outside the tensors, as in Gymnasium environments. An environment that is
            not pure resets itself, sets `final_obs`, and is released by `close`.
        close: (state) -> None. It releases resources outside the tensors, such as processes.
        is_current: (state) -> bool. False if `step` cannot continue from the state, because its environments are closed
            or have taken further steps.
        carry_over: (start of the next episode, last state of the ended episode) -> start. The result keeps the values
            that outlast an episode, such as a mass that a startup event drew.
        scene: the simulation of a MuJoCo task, which events may change. None for other environments.
        min_truncation_gap: the earliest step of an episode that may truncate it. Truncations of one copy are therefore
            at least this many steps apart. Give 1 if it is unknown, and `NEVER` if `step` never truncates. `time_limit`
            lowers it to its limit. It must hold for every state that events may produce. An event that can truncate
            earlier declares its own gap.
    """

    reset: Callable[[Tensor], TensorDict]
    step: Callable[[TensorDict, Tensor, Any], TensorDict]
    observation_space: Space
    action_space: Space
    draw: Callable[[Tensor], Any] = keys_as_noise
    observe: Callable[[TensorDict], Any] = last_obs
    lockstep: bool = False
    is_pure: bool = True
    close: Callable[[TensorDict], None] = nothing_to_close
    is_current: Callable[[TensorDict], bool] = always_current
    carry_over: Callable[[TensorDict, TensorDict], TensorDict] = nothing_lasts
    scene: Any = None
    min_truncation_gap: int = 1

    def __post_init__(self):
        if self.min_truncation_gap < 1:
            raise ValueError(f"min_truncation_gap is {self.min_truncation_gap}, expected at least 1 step")


def state_of(obs: Tensor | TensorDict, batch: torch.Size, **fields: Tensor) -> TensorDict:
    """Return the state before the first step of an episode, with reward 0 and both flags False.

    `fields` are the fields of the dynamics. `obs` may be a TensorDict. The reward has the dtype of the first float
    tensor in `obs`, or float32 if `obs` has only integers.

    >>> state_of(torch.zeros(2, 8, 8, 1, dtype=torch.uint8), torch.Size([2]))["reward"]
    tensor([0., 0.])
    """
    leaves = flatten(obs)[0]
    floats = [leaf.dtype for leaf in leaves if leaf.is_floating_point()]
    false = torch.zeros(batch, dtype=torch.bool, device=leaves[0].device)
    reward = torch.zeros(batch, dtype=[*floats, torch.float32][0], device=leaves[0].device)
    return TensorDict(fields | {"obs": obs, "reward": reward, "terminated": false, "truncated": false.clone()}, batch)


def constant_fields(cfg: Any, names: tuple[str, ...], like: Tensor) -> dict[str, Tensor]:
    """Return settings of a config as state fields, one number per environment, so that events can change them.

    Args:
        cfg: the config that has the settings.
        names: names of the settings. The fields get the same names.
        like: a float tensor `[*B]`. The fields get its shape, dtype and device.
    """
    return {name: torch.full_like(like, getattr(cfg, name)) for name in names}


@cache
def time_limit(env: Env, max_episode_steps: int) -> Env:
    """Truncate an episode at its `max_episode_steps`-th step.

        elapsed' = elapsed + 1;  truncated' = truncated or elapsed' >= max_episode_steps

    The state gains `elapsed` (int64), the number of steps since the episode started. `min_truncation_gap` is lowered to
    `max_episode_steps` if it is larger.

    >>> from ecrl.envs import make_env
    >>> time_limit(make_env("cartpole"), 20).min_truncation_gap  # CartPole's own limit is 500
    20
    """
    if max_episode_steps < 1:
        raise ValueError(f"time_limit needs max_episode_steps >= 1, got {max_episode_steps}")

    def reset(keys: Tensor) -> TensorDict:
        return env.reset(keys).set("elapsed", torch.zeros_like(keys))

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        elapsed = state["elapsed"] + 1
        after = env.step(state, action, noise)
        truncated = after["truncated"] | (elapsed >= max_episode_steps)
        return after.copy().update({"elapsed": elapsed, "truncated": truncated})

    gap = min(env.min_truncation_gap, max_episode_steps)
    return replace(env, reset=reset, step=step, min_truncation_gap=gap)


_OUTCOME = ("reward", "terminated", "truncated", "info", "mask", "executed")


@cache
def auto_reset(env: Env) -> Env:
    """Reset each copy of an environment in the step that ends its episode.

    After that step, `obs` and the fields of the dynamics are the start of the next episode. `reward`, `terminated`,
    `truncated`, `info`, `mask` and `executed` still describe the step itself. In every state, `final_obs` is the
    observation before any reset. The next call of `env.step` gets a state with both flags False.

    The noise of a step includes a start for the next episode. This start is drawn from the key of the step and the
    stream `rng.START`, so it does not depend on the ended episode. An environment that is not pure resets itself, so it
    is returned unchanged.
    """
    if not env.is_pure:
        return env

    def reset(keys: Tensor) -> TensorDict:
        start = env.reset(keys)
        outcome = start.select(*_OUTCOME, strict=False)
        # keep the field order of `step`: compiled code depends on the order, and another order would compile again
        return start.exclude(*_OUTCOME).update(outcome).set("final_obs", start["obs"].clone())

    def draw(keys: Tensor) -> TensorDict:
        start = env.reset(rng.fold_in(keys, rng.START))
        return TensorDict({"start": start, "step": env.draw(rng.fold_in(keys, rng.ENV))}, keys.shape)

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        flags = {key: torch.zeros_like(state[key]) for key in ("terminated", "truncated")}
        after = env.step(state.exclude("final_obs").update(flags), action, noise["step"])
        done = after["terminated"] | after["truncated"]
        outcome = after.select(*_OUTCOME, strict=False)
        start, running = env.carry_over(noise["start"], after).exclude(*_OUTCOME), after.exclude(*_OUTCOME)
        return start.where(done, running).update(outcome).set("final_obs", after["obs"])

    return replace(env, reset=reset, step=step, draw=draw)


@cache
def clip_action(env: Env) -> Env:
    """Clip Box actions to the bounds of their space before the environment sees them.

        clipped = max(low, min(high, action))

    The rollout stores the action before clipping, because the stored log-probability belongs to that action.
    """
    space = env.action_space
    if not isinstance(space, Box):
        return env

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        low, high = (action.new_tensor(bound).reshape(space.shape) for bound in (space.low, space.high))
        return env.step(state, action.clamp(low, high), noise)

    return replace(env, step=step)
