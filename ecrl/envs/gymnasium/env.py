"""Adapt Gymnasium environments to `Env`. Python objects hold part of the state of a Gymnasium environment."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from gymnasium import registry
from gymnasium.vector import VectorEnv
from pydantic import Field, JsonValue, field_validator, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Count, Positive
from ecrl.envs.core import NEVER, Env
from ecrl.envs.gymnasium import worker
from ecrl.envs.gymnasium.atari import FRAME_STACK, AtariConfig, base_kwargs, check_kwargs, truncation_gap
from ecrl.envs.gymnasium.handles import Live, fault_text, find_live, require_live, steps_behind, to_list
from ecrl.envs.gymnasium.process_vector import parallel
from ecrl.envs.gymnasium.spaces import MASK, BadValue, action, allowed, check_allowed
from ecrl.envs.gymnasium.vector_adapter import as_vector
from ecrl.envs.gymnasium.vector_api import Fault, Outcome, Vector, serial
from ecrl.envs.gymnasium.worker import error_text
from ecrl.errors import ConfigError, UserError
from ecrl.registry import IMPORT_FIRST, add_advice, nearest, register_env
from ecrl.spaces import Box, Dict, Discrete, MultiDiscrete, Space, dict_space, from_gymnasium


class GymnasiumConfig(ConfigModel):
    """Settings of a Gymnasium environment. The environment name `"gymnasium:<id>"` sets the id."""

    id: str = Field(
        min_length=1,
        description='id for gymnasium.make: "LunarLander-v3", or "my_module:Mine-v0" for an env of an imported module',
    )
    kwargs: dict[str, JsonValue] = Field(default_factory=dict, description="further arguments of gymnasium.make")
    max_episode_steps: Count | None = Field(None, description="time limit, steps; if absent, the registered limit")
    asynchronous: bool = Field(False, description="run the environments in worker processes, at most one per core")
    timeout: Positive = Field(60.0, description="seconds that a worker may take to step or reset its envs once")
    atari: AtariConfig | None = Field(None, description="preprocessing of an Atari game; {} for the usual settings")

    @field_validator("id")
    @classmethod
    def _imports_nothing(cls, name: str) -> str:
        module, colon, _ = name.rpartition(":")
        if colon and module not in sys.modules:
            reason = f"belongs to module {module!r}, which is not imported"
            raise ValueError(f"{name!r} {reason}; import it first, or on the command line with --import {module}")
        return name

    @model_validator(mode="after")
    def _fits_atari(self) -> "GymnasiumConfig":
        if self.atari is not None:
            check_kwargs(self.atari, self.kwargs)
        return self


def open_envs(cfg: GymnasiumConfig, num_envs: int) -> Vector:
    """Open `num_envs` environments, in worker processes if `asynchronous` is set.

    Raise Fault if an environment cannot be opened.
    """
    kwargs, atari = _make_kwargs(cfg), None if cfg.atari is None else cfg.atari.model_dump()
    if cfg.asynchronous:
        return parallel(cfg.id, kwargs, num_envs, cfg.timeout, atari)
    return serial(cfg.id, kwargs, num_envs, atari)


def _make_kwargs(cfg: GymnasiumConfig) -> dict[str, Any]:
    """Return the keyword arguments of `gymnasium.make`, with the time limit and the arguments for `atari`."""
    limit = {} if cfg.max_episode_steps is None else {"max_episode_steps": cfg.max_episode_steps}
    return cast(dict[str, Any], cfg.kwargs) | limit | ({} if cfg.atari is None else base_kwargs(cfg.atari))


@register_env("gymnasium")
def gymnasium_env(cfg: GymnasiumConfig) -> Env:
    """Make a Gymnasium environment with `gymnasium.make`. Each key seeds all episodes of one environment.

    Observation spaces may be Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple. The elements of a Tuple are
    named "0", "1" and so on. All floats become float32, and uint8 images stay uint8. `ecrl.spaces.from_gymnasium` lists
    the dtypes of other integers.

    Action spaces may be Box, Discrete, MultiDiscrete and MultiBinary. The actions of an integer Box are floats, which
    are rounded before they are passed to Gymnasium.

    If actions are discrete, an action mask in `info["action_mask"]` becomes `obs["action_mask"]`. An observation that
    is neither a Dict nor a Tuple then becomes `obs["observation"]`. Gymnasium's `info["success"]` or
    `info["is_success"]` becomes `info.success`, which is NaN if the environment reports neither.

    With `atari`, the observation of an Atari game is the newest image, uint8 `[size, size, 1]`, or `[size, size, 3]` in
    color. `info.game_score` is the score of a game in the step that ends the game, and NaN in all other steps. The
    score is the sum of the unclipped rewards of all lives.

    Equal keys give equal episodes, both in this process and in worker processes. For the environments that Gymnasium
    provides, and for Atari games with `atari`, `min_truncation_gap` follows from the time limit. For all other
    environments, the gap is 1, because their own code may truncate at any step.

    Raises: ConfigError if the environment cannot be created or has an unsupported space. `reset` and `step` raise
        UserError if an environment raises, dies, hangs in its worker or returns a value that does not fit its space.
        The error names the environment and the step. Values outside the bounds of a Box raise no error. NaN and
        infinity in floats raise no error, because `trainer.finite_guard` handles non-finite values in a run.
    """
    label = f"gymnasium:{cfg.id}"
    try:
        env = _env(partial(open_envs, cfg), label)
    except ConfigError as error:
        if "ModuleNotFoundError" in str(error) or (problem := _unregistered(cfg.id)) is None:
            raise
        raise ConfigError(f"env: {label}: {problem}") from None
    stack = 1 if cfg.atari is None else FRAME_STACK
    return replace(env, min_truncation_gap=_truncation_gap(cfg), frame_stack=stack)


def _without_version(env_id: str) -> str:
    return re.sub(r"-v\d+$", "", env_id)


def _unregistered(env_id: str) -> str | None:
    """Return a message with similar ids for an id that is not registered, or None for a registered id."""
    name = env_id.rpartition(":")[2]
    versions = [one for one in sorted(registry) if _without_version(one) == _without_version(name)]
    if name in registry or (versions and name == _without_version(name)):  # Gymnasium chooses the newest version
        return None
    if versions:
        return f"not registered in Gymnasium, which has {', '.join(versions)}; use one of them"
    ids = {_without_version(one): one for one in sorted(registry)}  # the newest version of each environment
    near = nearest(_without_version(name), ids)
    hint = "no registered id is similar." if near is None else f"did you mean 'gymnasium:{ids[near]}'?"
    return f"not registered in Gymnasium; {hint} If the env is your own, {IMPORT_FIRST}"


add_advice("env", {name: f"Gymnasium has it: use 'gymnasium:{name}'" for name in registry})


def _truncation_gap(cfg: GymnasiumConfig) -> int:
    """Return the `min_truncation_gap` that follows from the time limits, or `NEVER` without a limit.

    If the environment's own code may truncate at any step, the result is 1.
    """
    worker.register_atari(cfg.id, cfg.atari is not None)
    spec, kwargs = registry.get(cfg.id.rpartition(":")[2]), _make_kwargs(cfg)
    if spec is None or spec.additional_wrappers:
        return 1
    if cfg.atari is not None and str(spec.entry_point).startswith("ale_py."):
        return truncation_gap(spec, kwargs, cfg.atari)
    if not str(spec.entry_point).startswith("gymnasium.envs."):
        return 1
    limit = kwargs.get("max_episode_steps", spec.max_episode_steps)
    return limit if limit and limit > 0 else NEVER


def from_vector(make_vector: Callable[[int], VectorEnv], *, timeout: float) -> Env:
    """Return an `Env` that steps the `gymnasium.vector.VectorEnv` returned by `make_vector(N)`.

    Call `from_vector` in a function decorated with `register_env`. The vector env must declare its autoreset mode in
    `metadata["autoreset_mode"]`. All three autoreset modes are supported. In mode NEXT_STEP, each reset takes a step,
    and the state has a field `mask`. `mask` is False after a step that only reset the environment. If an AsyncVectorEnv
    does not answer within `timeout` seconds, `reset` or `step` raises UserError. Other vector envs have no timeout. A
    vector env whose `reset` takes one integer instead of a list of seeds gets the seed of the first environment. Equal
    keys then raise UserError.

    Raises: ConfigError if the vector env cannot be created or has an unsupported space. `reset` and `step` raise
        UserError that names the step and, if the vector env reports an index, the environment.

    >>> import torch
    >>> from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
    >>> env = from_vector(lambda num_envs: CartPoleVectorEnv(num_envs), timeout=60.0)
    >>> env.step(env.reset(torch.arange(2)), torch.tensor([0, 1]), None)["mask"]
    tensor([True, True])
    """

    def make(num_envs: int) -> Vector:
        try:
            venv = make_vector(num_envs)
        except Exception as error:
            raise Fault(None, f"raised {error_text(error)}") from error
        return as_vector(venv, timeout)

    return _env(make, getattr(make_vector, "__qualname__", "the vector env"))


def _env(make: Callable[[int], Vector], label: str) -> Env:
    """Return an `Env` that opens N environments with `make(N)`. Error messages contain `label`."""
    owner, (spaces, gymnasium_spaces) = object(), _probe_spaces(make, label)

    def reset(keys: Tensor, state: TensorDict | None = None) -> TensorDict:
        """Open new environments, or reset the open environments of `state`."""
        seeds = to_list(rng.bits(keys) & 0x7FFFFFFF)
        live = None if state is None else find_live(state, owner)
        try:
            live = live or Live(_check_unchanged(make(len(seeds)), gymnasium_spaces, label), owner, label)
        except Fault as error:
            raise UserError(f"while making the environments: {fault_text(label, error)}") from error.__cause__
        return live.ask(lambda: _state(live.vector.reset(seeds), spaces, keys), "reset")

    def step(state: TensorDict, actions: Tensor, noise: Any) -> TensorDict:
        live = require_live(state, owner, label)

        def answer() -> TensorDict:
            array = action(live.vector.action_space, actions)
            return _state(live.vector.step(array), spaces, state["reward"])

        return live.ask(answer, f"step {live.steps + 1}", state)

    def close(state: TensorDict) -> None:
        live = find_live(state, owner)
        if live is not None:
            live.close()

    def is_current(state: TensorDict) -> bool:
        live = find_live(state, owner)
        return live is not None and steps_behind(live, state) == 0

    return Env(reset, step, *spaces, is_pure=False, close=close, is_current=is_current)


def _nvec(space: Space) -> tuple[int, ...]:
    """Return the number of choices of each discrete action, or () for a Box, which has no action masks."""
    match space:
        case Discrete():
            return (space.n,)
        case MultiDiscrete():
            return space.nvec
    return ()


def _check_unchanged(vector: Vector, first_spaces: tuple[Any, Any], label: str) -> Vector:
    """Return `vector`.

    Raise ConfigError if its spaces differ from `first_spaces`, for example because the id was registered again.
    """
    spaces = vector.observation_space, vector.action_space
    if spaces == first_spaces:
        return vector
    vector.close()
    now, before = (" ".join(f"{obs} and {act}".split()) for obs, act in (spaces, first_spaces))
    advice = "spaces must not depend on the number of environments; for a changed id, start a new process"
    raise ConfigError(f"env: {label}: has spaces {now}, but had {before} when this process first made it; {advice}")


def _probe_spaces(make: Callable[[int], Vector], label: str) -> tuple[tuple[Space, Space], tuple[Any, Any]]:
    """Open and close one environment. Return ecrl's spaces and Gymnasium's spaces of the environment."""
    try:
        vector = make(1)
        try:
            return _spaces(vector), (vector.observation_space, vector.action_space)
        finally:
            vector.close()
    except (Fault, BadValue, TypeError) as error:
        raise ConfigError(f"env: {label}: {error}") from error.__cause__


def _spaces(vector: Vector) -> tuple[Space, Space]:
    """Return ecrl's observation and action space.

    If the actions are discrete and `reset` returns an action mask, the observation space includes the mask.
    """
    obs_space, action_space = from_gymnasium(vector.observation_space), from_gymnasium(vector.action_space)
    if isinstance(action_space, Dict):
        raise TypeError(f"has actions {vector.action_space}, expected Box, Discrete, MultiDiscrete or MultiBinary")
    if isinstance(action_space, Box):
        action_space = replace(action_space, dtype=torch.float32)
    parts = dict(obs_space.items) if isinstance(obs_space, Dict) else {"observation": obs_space}
    if MASK in parts or not _nvec(action_space) or vector.reset([0]).masks[0] is None:
        return obs_space, action_space
    return dict_space(parts | {MASK: MultiDiscrete((2,) * sum(_nvec(action_space)))}), action_space


def _state(outcome: Outcome, spaces: tuple[Space, Space], like: Tensor) -> TensorDict:
    """Convert an outcome to a state on the device of `like`. Raise BadValue for a wrong action mask."""
    n, obs, final, nvec = len(like), outcome.obs, outcome.final, _nvec(spaces[1])
    if isinstance(spaces[0], Dict) and MASK in dict(spaces[0].items) and nvec:
        if not isinstance(obs, TensorDict) or MASK not in obs:
            masks, final_masks = (allowed(x, nvec) for x in (outcome.masks, outcome.final_masks))
            if outcome.counts is None:
                check_allowed(final_masks, nvec)
            obs, final = _parts(obs, n).update({MASK: masks}), _parts(final, n).update({MASK: final_masks})
        # If `counts` is set, the step after the end of an episode ignores the action and the mask.
        done = outcome.terminated | outcome.truncated
        check_allowed(obs[MASK] | done.unsqueeze(-1) if outcome.counts is not None else obs[MASK], nvec)
    fields = {
        "obs": obs,
        "final_obs": final,
        "reward": outcome.reward,
        "terminated": outcome.terminated,
        "truncated": outcome.truncated,
        "info": TensorDict({"success": outcome.success}, [n]),
    }
    if outcome.scores is not None:
        fields["info"]["game_score"] = outcome.scores
    if outcome.counts is not None:
        fields["mask"] = outcome.counts
    return _to_device_of(like, TensorDict(fields, [n]))


def _to_device_of(like: Tensor, state: TensorDict) -> TensorDict:
    """Copy a state to the device of `like`. Pinned memory lets the host continue during a copy to a GPU."""
    device = like.device
    if device.type == "cpu":
        return state  # a call of `to` takes as long as ten CartPole steps
    return state.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else state.to(device)


def _parts(obs: Any, n: int) -> TensorDict:
    return obs.copy() if isinstance(obs, TensorDict) else TensorDict({"observation": obs}, [n])
