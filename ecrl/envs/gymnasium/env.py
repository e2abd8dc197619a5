"""Any Gymnasium environment as an `Env` whose state lives outside the tensors."""

import sys
from collections.abc import Callable
from typing import Any, cast

from gymnasium.vector import VectorEnv
from pydantic import Field, JsonValue, field_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Count, Positive
from ecrl.envs.core import Env
from ecrl.envs.gymnasium.handles import Live, behind, current, explained, numbers, opened
from ecrl.envs.gymnasium.process_vector import parallel
from ecrl.envs.gymnasium.spaces import MASK, BadValue, action, allowed, check_allowed
from ecrl.envs.gymnasium.vector_adapter import driven
from ecrl.envs.gymnasium.vector_api import Fault, Outcome, Vector, serial
from ecrl.envs.gymnasium.worker import told
from ecrl.errors import ConfigError, UserError
from ecrl.registry import register_env
from ecrl.spaces import Dict, Discrete, MultiDiscrete, Space, dict_space, from_gymnasium


class GymnasiumConfig(ConfigModel):
    """Which environment, how it is made and where it runs; `"gymnasium:<id>"` is short for one with an id alone."""

    id: str = Field(
        min_length=1,
        description='as for gymnasium.make, such as "LunarLander-v3"; "my_module:Mine-v0" if that module is imported',
    )
    kwargs: dict[str, JsonValue] = Field(default_factory=dict, description="further arguments of gymnasium.make")
    max_episode_steps: Count | None = Field(None, description="time limit, steps; the registered one if absent")
    asynchronous: bool = Field(False, description="run the environments in worker processes, at most one per core")
    timeout: Positive = Field(60.0, description="seconds that workers may take for a step or reset of theirs")

    @field_validator("id")
    @classmethod
    def _imports_nothing(cls, name: str) -> str:
        module, colon, _ = name.rpartition(":")
        if colon and module not in sys.modules:
            why = f"is of module {module!r}, which a config does not import"
            raise ValueError(f"{name!r} {why}; import it before, or on the command line with --import {module}")
        return name


@register_env("gymnasium")
def gymnasium_env(cfg: GymnasiumConfig) -> Env:
    """Any environment that `gymnasium.make` knows; each is seeded once, by its key, and draws its later starts itself.

    Observations Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple (whose parts are named "0", "1", ...), as
    float32 and int64; actions Box, Discrete, MultiDiscrete and MultiBinary. `info["action_mask"]` becomes
    `obs["action_mask"]`, beside the parts of a Dict or `obs["observation"]`. `info["success"]` or `"is_success"` is
    `info.success`, NaN where it is not told. Equal keys give equal episodes, in this process and in workers.

    Raises: ConfigError for an environment that cannot be made, or has a space of another kind; later UserError, naming
        env and step, where one raises, dies, hangs (workers only), or gives what its space does not hold. NaN and
        infinity pass; `trainer.finite_guard` judges them in a run.
    """
    limit = {} if cfg.max_episode_steps is None else {"max_episode_steps": cfg.max_episode_steps}
    kwargs = cast(dict[str, Any], cfg.kwargs) | limit

    def make(num_envs: int) -> Vector:
        if cfg.asynchronous:
            return parallel(cfg.id, kwargs, num_envs, cfg.timeout)
        return serial(cfg.id, kwargs, num_envs)

    return _env(make, f"gymnasium:{cfg.id}")


def from_vector(make_vector: Callable[[int], VectorEnv], *, timeout: float) -> Env:
    """An `Env` of the N environments of a `gymnasium.vector.VectorEnv` that `make_vector(N)` makes; for `register_env`.

    Any of the three autoreset modes, told by `metadata["autoreset_mode"]`. NEXT_STEP spends a step on each reset; the
    state has `mask` then, False where that happened. An AsyncVectorEnv that does not answer within `timeout` seconds
    ends in an error; other vector envs are not watched. A vector env whose reset takes one integer, not a list, gets
    the seed of its first environment.

    Raises: ConfigError if it cannot be made or has a space of another kind; later UserError, naming the step and, where
        the vector env tells, the env.

    >>> import torch
    >>> from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
    >>> env = from_vector(lambda num_envs: CartPoleVectorEnv(num_envs), timeout=60.0)
    >>> env.step(env.reset(torch.arange(2)), torch.tensor([0, 1]), None)["mask"]
    tensor([True, True])
    """

    def make(num_envs: int) -> Vector:
        try:
            made = make_vector(num_envs)
        except Exception as error:
            raise Fault(None, f"raised {told(error)}") from error
        return driven(made, timeout)

    return _env(make, getattr(make_vector, "__qualname__", "the vector env"))


def _env(make: Callable[[int], Vector], label: str) -> Env:
    """The environment of which `make(N)` opens N."""
    owner, (spaces, probed) = object(), _probed(make, label)

    def reset(keys: Tensor, state: TensorDict | None = None) -> TensorDict:
        """Opens new environments, or starts those of `state` anew."""
        seeds = numbers(rng.bits(keys) & 0x7FFFFFFF)
        live = None if state is None else opened(state, owner)
        try:
            live = live or Live(_unchanged(make(len(seeds)), probed, label), owner, label)
        except Fault as error:
            raise UserError(f"{explained(label, error)}, when it was made") from error.__cause__
        return live.ask(lambda: _state(live.vector.reset(seeds), spaces, keys), "reset")

    def step(state: TensorDict, chosen: Tensor, noise: Any) -> TensorDict:
        live = current(state, owner, label)

        def answer() -> TensorDict:
            taken = action(live.vector.action_space, chosen)
            return _state(live.vector.step(taken), spaces, state["reward"])

        return live.ask(answer, f"step {live.steps + 1}", state)

    def close(state: TensorDict) -> None:
        live = opened(state, owner)
        if live is not None:
            live.close()

    def is_current(state: TensorDict) -> bool:
        live = opened(state, owner)
        return live is not None and behind(live, state) == 0

    return Env(reset, step, *spaces, is_pure=False, close=close, is_current=is_current)


def _nvec(space: Space) -> tuple[int, ...]:
    """Choices per action that a mask may hide."""
    match space:
        case Discrete():
            return (space.n,)
        case MultiDiscrete():
            return space.nvec
    return ()


def _unchanged(vector: Vector, probed: tuple[Any, Any], label: str) -> Vector:
    """The vector; raises ConfigError if its spaces are not the `probed` ones: an id may be registered anew."""
    found = vector.observation_space, vector.action_space
    if found == probed:
        return vector
    vector.close()
    now, was = (" ".join(f"{seen} and {acted}".split()) for seen, acted in (found, probed))
    do = "start a new process, or register it under another id"
    raise ConfigError(f"env: {label}: has spaces {now}, but had {was} when it was first made here; {do}")


def _probed(make: Callable[[int], Vector], label: str) -> tuple[tuple[Space, Space], tuple[Any, Any]]:
    """Spaces as a policy sees them, and Gymnasium's, of one environment that is opened for that alone."""
    try:
        vector = make(1)
        try:
            return _spaces(vector), (vector.observation_space, vector.action_space)
        finally:
            vector.close()
    except (Fault, BadValue, TypeError) as error:
        raise ConfigError(f"env: {label}: {error}") from error.__cause__


def _spaces(vector: Vector) -> tuple[Space, Space]:
    """As a policy sees them: the action mask that the info of a first reset has belongs to the observation."""
    seen, acted = from_gymnasium(vector.observation_space), from_gymnasium(vector.action_space)
    if isinstance(acted, Dict):
        raise TypeError(f"actions {vector.action_space}, expected Box, Discrete, MultiDiscrete or MultiBinary")
    parts = dict(seen.items) if isinstance(seen, Dict) else {"observation": seen}
    if MASK in parts or not _nvec(acted) or vector.reset([0]).masks[0] is None:
        return seen, acted
    return dict_space(parts | {MASK: MultiDiscrete((2,) * sum(_nvec(acted)))}), acted


def _state(outcome: Outcome, spaces: tuple[Space, Space], like: Tensor) -> TensorDict:
    """The outcome as a state, on the device of `like`."""
    n, obs, final, nvec = len(like), outcome.obs, outcome.final, _nvec(spaces[1])
    if isinstance(spaces[0], Dict) and MASK in dict(spaces[0].items) and nvec:
        if not isinstance(obs, TensorDict) or MASK not in obs:
            mask = {MASK: allowed(outcome.masks, nvec)}
            obs, final = (_parts(x, n).update(mask) for x in (obs, final))
        over = outcome.terminated | outcome.truncated  # a step spent on a reset follows: nothing is chosen there
        check_allowed(obs[MASK] | over.unsqueeze(-1) if outcome.counts is not None else obs[MASK], nvec)
    fields = {
        "obs": obs,
        "final_obs": final,
        "reward": outcome.reward,
        "terminated": outcome.terminated,
        "truncated": outcome.truncated,
        "info": TensorDict({"success": outcome.success}, [n]),
    }
    if outcome.counts is not None:
        fields["mask"] = outcome.counts
    return _onto(like, TensorDict(fields, [n]))


def _onto(like: Tensor, state: TensorDict) -> TensorDict:
    """The state on the device of `like`; onto a GPU from pinned memory, so that the host does not wait for copies."""
    device = like.device
    if device.type == "cpu":
        return state  # a `to` takes as long as ten CartPole steps
    return state.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else state.to(device)


def _parts(obs: Any, n: int) -> TensorDict:
    return obs.copy() if isinstance(obs, TensorDict) else TensorDict({"observation": obs}, [n])
