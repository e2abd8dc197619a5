"""An environment is a frozen record of pure functions over a TensorDict state; wrappers are functions `Env -> Env`.

`reset(keys)` and `step(state, action, noise)` give a state with batch shape `[*B]` that carries `obs`, `reward`,
`terminated` and `truncated`, whatever the dynamics need, and optionally `info` (a TensorDict, such as `success`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.spaces import Box, Space


def keys_as_noise(keys: Tensor) -> Tensor:
    """The default `draw`: the noise of a step is its key."""
    return keys


def last_obs(state: TensorDict) -> Any:
    """The default `observe`: the observation is a field of the dynamics."""
    return state["obs"]


def nothing_to_close(state: TensorDict) -> None:
    """The default `close`: tensors need none."""


def nothing_lasts(start: TensorDict, ended: TensorDict) -> TensorDict:
    """The default `carry_over`: an episode knows nothing of the one before."""
    return start


def always_current(state: TensorDict) -> bool:
    """The default `is_current`: a state that is all there can always go on."""
    return True


@dataclass(frozen=True)
class Env:
    """Functions of one kind of environment, for any number of them.

    Attributes:
        reset: int64 keys `[*B]` -> state.
        step: (state, action, noise) -> state.
        observation_space: of one environment.
        action_space: of one environment.
        draw: keys -> noise of a step; called on `[T, N]` keys, outside the loop, so it must not depend on the state.
        observe: state -> its observation, needed where events change what is observed.
        lockstep: every episode has the same length.
        is_pure: False where the state lives outside the tensors, as in Gymnasium; such an env resets itself, keeps
            `final_obs`, and is released by `close`.
        close: state -> None; releases what it holds outside its tensors.
        is_current: state -> whether `step` can go on from it: False where its environments are gone or have gone on.
        carry_over: (start, ended) -> the start of an episode with what lasts from the one before it, such as a mass
            that was drawn once for all.
        scene: what events of scenes are made with, a MuJoCo task's simulation.
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


def state_of(obs: Tensor, batch: torch.Size, **fields: Tensor) -> TensorDict:
    """A state as it is before the first step: reward 0, not ended; `fields` are the dynamics' own."""
    no = torch.zeros(batch, dtype=torch.bool, device=obs.device)
    reward = torch.zeros(batch, dtype=obs.dtype, device=obs.device)
    return TensorDict(fields | {"obs": obs, "reward": reward, "terminated": no, "truncated": no.clone()}, batch)


@cache
def time_limit(env: Env, max_episode_steps: int) -> Env:
    """Truncate an episode at its `max_episode_steps`-th step.

        elapsed' = elapsed + 1;  truncated' = truncated or elapsed' >= max_episode_steps

    The state gains `elapsed` (int64), the steps of the episode so far.
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

    return replace(env, reset=reset, step=step)


_OF_THE_STEP = ("reward", "terminated", "truncated", "info", "mask")


@cache
def auto_reset(env: Env) -> Env:
    """Start the next episode in the step that ended one; `final_obs` keeps the observation from before the reset.

    `reward`, `terminated`, `truncated`, `info` and `mask` stay those of the step; the next step of `env` sees both
    flags down. Where an episode would start is drawn with the noise, from the start stream of the same key, so it does
    not depend on how the last one went. An environment that is not pure resets itself and is returned as it is.
    """
    if not env.is_pure:
        return env

    def reset(keys: Tensor) -> TensorDict:
        start = env.reset(keys)
        outcome = start.select(*_OF_THE_STEP, strict=False)
        # in the order in which `step` gives the fields: compiled code guards on it, and would be made twice
        return start.exclude(*_OF_THE_STEP).update(outcome).set("final_obs", start["obs"].clone())

    def draw(keys: Tensor) -> TensorDict:
        start = env.reset(rng.fold_in(keys, rng.START))
        return TensorDict({"start": start, "step": env.draw(rng.fold_in(keys, rng.ENV))}, keys.shape)

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        flags = {key: torch.zeros_like(state[key]) for key in ("terminated", "truncated")}
        after = env.step(state.exclude("final_obs").update(flags), action, noise["step"])
        done = after["terminated"] | after["truncated"]
        kept = after.select(*_OF_THE_STEP, strict=False)
        start, going_on = env.carry_over(noise["start"], after).exclude(*_OF_THE_STEP), after.exclude(*_OF_THE_STEP)
        return start.where(done, going_on).update(kept).set("final_obs", after["obs"])

    return replace(env, reset=reset, step=step, draw=draw)


@cache
def clip_action(env: Env) -> Env:
    """Hold Box actions within the bounds of their space before the environment sees them.

    `max(low, min(high, action))`. The rollout keeps the action as it was drawn, which is what its probability is of.
    """
    space = env.action_space
    if not isinstance(space, Box):
        return env

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        low, high = (action.new_tensor(bound).reshape(space.shape) for bound in (space.low, space.high))
        return env.step(state, action.clamp(low, high), noise)

    return replace(env, step=step)
