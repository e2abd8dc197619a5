"""Define `Env`, a record of an environment's functions, and wrappers that change an `Env`.

An `Env` is a frozen dataclass of pure functions. The functions `reset(keys)` and `step(state, action, noise)` return a
state, a TensorDict of batch shape `[*B]`. Every state has the fields `obs`, `reward`, `terminated` and `truncated`, and
the fields of the dynamics. A state may also have `info`, a TensorDict with fields such as `success`.

One action may be a chunk of several environment steps (`ecrl.envs.chunked`). The state then has the field `executed`
(int64 `[*B]`), the number of environment steps that the action took. `executed` is at least 1, and smaller than the
chunk's length if the episode ended before the last step of the chunk. Algorithms multiply the return after the action
by `gamma ** executed`. `reward` is the sum of the rewards of the `executed` steps, and should discount step i of the
chunk by `gamma ** i`. If `reward` discounts steps, `info` has the field `reward_sum` (float `[*B]`), the sum without
discounts, for logs and evaluations. After `reset`, `executed` may have any value. All other step counts in this module,
such as `max_episode_steps` and `min_truncation_gap`, count calls of `step`.

Episodes may be parts of a longer game, such as the lives of an Atari game. `info` then has the field `game_score`
(float `[*B]`). This field is the score of a game in the step that ends the game, and NaN in all other steps.
Evaluations count games and their scores instead of episodes and their returns.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from ecrl import rng
from ecrl.errors import ConfigError
from ecrl.pytree import flatten
from ecrl.spaces import Box, Space

NEVER = sys.maxsize
"""Value of `min_truncation_gap` for an environment that never truncates an episode."""


def keys_as_noise(keys: Tensor) -> Tensor:
    """Return the keys unchanged. This is the default of `Env.draw`: the noise of a step is the step's key."""
    return keys


def last_obs(state: TensorDict) -> Any:
    """Return `state["obs"]`. This default of `Env.observe` does not recompute the observation."""
    return state["obs"]


def nothing_to_close(state: TensorDict) -> None:
    """Do nothing. This default of `Env.close` is for environments without resources."""


def nothing_lasts(start: TensorDict, ended: TensorDict) -> TensorDict:
    """Return `start` unchanged. With this default of `Env.carry_over`, episodes share no values."""
    return start


def always_current(state: TensorDict) -> bool:
    """Return True. This is the default of `Env.is_current`: `step` can continue from every state."""
    return True


@dataclass(frozen=True)
class Env:
    """An environment as a record of pure functions. Each function operates on a batch of copies of the environment.

    Attributes:
        reset: maps int64 keys `[*B]` to a state at the start of an episode.
        step: maps (state, action, noise) to the next state.
        observation_space: the space of one copy's observations.
        action_space: the space of one copy's actions.
        draw: maps keys to the noise of a step. A rollout calls `draw` with keys `[T, N]` before the loop over its
            steps, so the noise cannot depend on the state.
        observe: maps a state to its observation. `observe` recomputes the observation after an event has changed the
            state.
        lockstep: True if every episode has the same length.
        is_pure: False if part of the state is outside the tensors, as in Gymnasium environments. An environment that is
            not pure resets itself, sets `final_obs`, and is released by `close`.
        close: releases the resources of a state that are not tensors, such as processes.
        is_current: returns True if `step` can continue from a state. The result is False if the environments are
            closed, or have been stepped or reset since they returned the state.
        carry_over: maps (start of the next episode, last state of the ended episode) to the start state that is used.
            The result includes values that last longer than an episode, such as a mass that a startup event drew.
        reset_unobserved: like `reset`, but the state has no field `obs`. Set this function if observations, such as
            images, are slow to compute. `auto_reset` then draws the starts of later episodes with `reset_unobserved`,
            and computes observations only for the starts that are used. If None, `auto_reset` uses `reset`.
        observe_where: maps (state, bool `[*B]`) to the observations of the copies where the mask is True. The rows of
            the other copies may have any values. Required if `reset_unobserved` is set. If None, `observe` is used.
        step_without_obs: True if `step` also accepts a state without the field `obs`, and then returns a state without
            `obs`. Set this flag if observations are slow to compute. `chunked` then computes one observation per chunk.
            A wrapper whose `step` reads `obs` must set the flag to False.
        steps_per_action: number of environment steps in a chunk if actions are chunks, otherwise 1.
        scene: the `Simulation` of a MuJoCo task, or None for other environments. `with_events` passes the simulation to
            the events that need it.
        min_truncation_gap: the earliest step of an episode that may truncate the episode, counted from 1. Two
            truncations of one copy are therefore at least this many steps apart. If the episodes are parts of a game,
            the steps are counted from the start of the game. Use 1 if the gap is unknown, and `NEVER` if `step` never
            truncates. `time_limit` lowers the gap to `max_episode_steps`. The gap must also hold after an event
            has changed the state, unless the event declares a gap of its own; see `with_events`.
        scale: factor by which a MuJoCo task has multiplied the lengths of its config. `with_events` multiplies the
            lengths of events by the same factor.
        frame_stack: number of latest observations that the networks of the policy see. The environment itself returns
            single observations.
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
    reset_unobserved: Callable[[Tensor], TensorDict] | None = None
    observe_where: Callable[[TensorDict, Tensor], Any] | None = None
    step_without_obs: bool = False
    steps_per_action: int = 1
    scene: Any = None
    min_truncation_gap: int = 1
    scale: float = 1.0
    frame_stack: int = 1

    def __post_init__(self):
        if self.min_truncation_gap < 1:
            raise ValueError(f"min_truncation_gap is {self.min_truncation_gap}, expected at least 1 step")
        if self.reset_unobserved and not self.observe_where:
            raise ValueError("an environment with reset_unobserved needs observe_where, got None; pass both functions")
        if self.step_without_obs and self.observe is last_obs:
            raise ValueError(
                "an environment with step_without_obs needs observe, got the default; pass a function observe"
            )

    def observed_where(self, state: TensorDict, mask: Tensor) -> TensorDict:
        """Return a state whose `obs` is recomputed where the mask (bool `[*B]`) is True.

        Elsewhere, `obs` may have any values.
        """
        obs = self.observe_where(state, mask) if self.observe_where else self.observe(state)
        return state.copy().set("obs", obs)


def change_reset(env: Env, change: Callable[[Callable[[Tensor], TensorDict]], Callable[[Tensor], TensorDict]]) -> Env:
    """Return an environment with `change(env.reset)` as `reset`, and likewise for `reset_unobserved` if it is set."""
    unobserved = env.reset_unobserved and change(env.reset_unobserved)
    return replace(env, reset=change(env.reset), reset_unobserved=unobserved)


def state_of(obs: Tensor | TensorDict, batch: torch.Size, **fields: Tensor) -> TensorDict:
    """Return the state before the first step of an episode, with reward 0 and without termination or truncation.

    `fields` are the state fields of the dynamics. `obs` may be a TensorDict. The reward has the dtype of the first
    float tensor in `obs`, or float32 if `obs` has no float tensor.

    >>> state_of(torch.zeros(2, 8, 8, 1, dtype=torch.uint8), torch.Size([2]))["reward"]
    tensor([0., 0.])
    """
    leaves = flatten(obs)[0]
    floats = [leaf.dtype for leaf in leaves if leaf.is_floating_point()]
    false = torch.zeros(batch, dtype=torch.bool, device=leaves[0].device)
    reward = torch.zeros(batch, dtype=[*floats, torch.float32][0], device=leaves[0].device)
    return TensorDict(fields | {"obs": obs, "reward": reward, "terminated": false, "truncated": false.clone()}, batch)


def constant_fields(cfg: Any, names: tuple[str, ...], like: Tensor) -> dict[str, Tensor]:
    """Return config settings as state fields with one value per environment, so that events can change the values.

    Args:
        cfg: the config that has the settings.
        names: the settings to copy. Each state field has the same name as its setting.
        like: a float tensor `[*B]` with the shape, dtype and device of the fields.
    """
    return {name: torch.full_like(like, getattr(cfg, name)) for name in names}


def checked_state(state: Any, call: str) -> TensorDict:
    """Return `state`, the result of a call of `reset` or `step`, if it is a TensorDict.

    Raises: ConfigError if `state` has another type, such as the tuple of five values that `step` returns in Gymnasium.
        The message begins with `call`.
    """
    if not isinstance(state, TensorDictBase):
        fields = "a TensorDict with obs, reward, terminated and truncated"
        raise ConfigError(f"{call} returns {type(state).__name__}, expected {fields}")
    return cast(TensorDict, state)


@cache
def time_limit(env: Env, max_episode_steps: int) -> Env:
    """Truncate an episode at its `max_episode_steps`-th step.

        elapsed' = elapsed + 1;  truncated' = truncated or elapsed' >= max_episode_steps

    The wrapper adds the field `elapsed` (int64) to the state, the number of steps since the start of the episode. If
    the actions of `env` are chunks, the field is named `elapsed_chunks` instead, because `elapsed` may count the steps
    inside the chunks. The wrapper also lowers `min_truncation_gap` to `max_episode_steps` if the gap is larger.

    >>> from ecrl.envs import make_env
    >>> time_limit(make_env("cartpole"), 20).min_truncation_gap  # CartPole's own limit is 500
    20
    """
    if max_episode_steps < 1:
        raise ValueError(f"time_limit needs max_episode_steps >= 1, got {max_episode_steps}")

    name = "elapsed" if env.steps_per_action == 1 else "elapsed_chunks"

    def counted(reset: Callable[[Tensor], TensorDict]) -> Callable[[Tensor], TensorDict]:
        return lambda keys: checked_state(reset(keys), "reset").set(name, torch.zeros_like(keys))

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        elapsed = state[name] + 1
        after = checked_state(env.step(state, action, noise), "step")
        truncated = after["truncated"] | (elapsed >= max_episode_steps)
        return after.copy().update({name: elapsed, "truncated": truncated})

    gap = min(env.min_truncation_gap, max_episode_steps)
    return replace(change_reset(env, counted), step=step, min_truncation_gap=gap)


def where_fields(condition: Tensor, one: TensorDict, other: TensorDict) -> TensorDict:
    """Select the fields of `one` where `condition` `[*B]` is True, and of `other` elsewhere.

    Bit operations select uint8 fields, because inductor's vector code for `torch.where` on bytes is slow.
    """

    def select(a: Tensor, b: Tensor) -> Tensor:
        mask = condition.reshape((*condition.shape, *[1] * (a.ndim - condition.ndim)))
        if a.dtype != torch.uint8 or b.dtype != torch.uint8:
            return torch.where(mask, a, b)
        return b ^ ((a ^ b) & (255 * mask.to(torch.uint8)))

    return one.apply(select, other)


_OUTCOME = ("reward", "terminated", "truncated", "info", "mask", "executed")


@cache
def auto_reset(env: Env) -> Env:
    """Reset each copy of an environment in the step that ends its episode.

    In the state after such a step, `obs` and the fields of the dynamics belong to the first state of the next episode.
    `reward`, `terminated`, `truncated`, `info`, `mask` and `executed` still describe the step itself. `final_obs` is
    the last observation of the ended episode. In all other states, `final_obs` equals `obs`. The next call of
    `env.step` gets a state in which `terminated` and `truncated` are False.

    The argument `noise` of `step` also contains a first state for the next episode. This first state is drawn from the
    key of the step and the stream `rng.START`, so it does not depend on the ended episode. If the environment has
    `reset_unobserved`, the first state has no observation, and `step` computes the observations of the first states
    that are used. An environment that is not pure resets itself, so `auto_reset` returns the environment unchanged.
    """
    if not env.is_pure:
        return env

    def reset(keys: Tensor) -> TensorDict:
        start = env.reset(keys)
        outcome = start.select(*_OUTCOME, strict=False)
        # keep the field order of `step`, because compiled code recompiles if the order changes
        return start.exclude(*_OUTCOME).update(outcome).set("final_obs", start["obs"].clone())

    def draw(keys: Tensor) -> TensorDict:
        start = (env.reset_unobserved or env.reset)(rng.fold_in(keys, rng.START))
        return TensorDict({"start": start, "step": env.draw(rng.fold_in(keys, rng.ENV))}, keys.shape)

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        flags = {key: torch.zeros_like(state[key]) for key in ("terminated", "truncated")}
        after = env.step(state.exclude("final_obs").update(flags), action, noise["step"])
        done = after["terminated"] | after["truncated"]
        outcome = after.select(*_OUTCOME, strict=False)
        start, running = env.carry_over(noise["start"], after).exclude(*_OUTCOME), after.exclude(*_OUTCOME)
        if env.reset_unobserved:
            start = env.observed_where(running.copy().update(start), done)  # keep the field order of `running`
        return where_fields(done, start, running).update(outcome).set("final_obs", after["obs"])

    return replace(env, reset=reset, step=step, draw=draw, reset_unobserved=None)


@cache
def clip_action(env: Env) -> Env:
    """Clip Box actions to the bounds of the action space before each step.

        clipped = max(low, min(high, action))

    Environments with other action spaces are returned unchanged. A rollout stores the unclipped action, to which the
    stored log-probability belongs.
    """
    space = env.action_space
    if not isinstance(space, Box):
        return env

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        low, high = (action.new_tensor(bound).reshape(space.shape) for bound in (space.low, space.high))
        return env.step(state, action.clamp(low, high), noise)

    return replace(env, step=step)
