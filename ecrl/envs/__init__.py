"""Environments as records of pure functions. `make_env` makes an environment from its name and its settings.

Each built-in environment is defined in a module such as `ecrl.envs.cartpole` or `ecrl.envs.mujoco.tasks`. The registry
imports the module when the environment is first looked up.
"""

from dataclasses import replace
from functools import cache

from ecrl.config import EnvChoice
from ecrl.config.model import validate_section
from ecrl.envs.action_chunks import chunked
from ecrl.envs.core import NEVER, Env, auto_reset, clip_action, state_of, time_limit
from ecrl.envs.events import RandomizeFieldConfig, randomize_field, restart, with_events
from ecrl.envs.experts import make_expert
from ecrl.errors import ConfigError
from ecrl.registry import lookup

__all__ = [
    "NEVER",
    "Env",
    "RandomizeFieldConfig",
    "auto_reset",
    "chunked",
    "clip_action",
    "make_env",
    "make_expert",
    "randomize_field",
    "restart",
    "state_of",
    "time_limit",
    "with_events",
]


def make_env(choice: EnvChoice | dict | str, *, chunk_gamma: float = 1.0) -> Env:
    """Make an environment from its name or from the `env` section of a config.

    Calls with equal settings return the same object. If `action_chunk` is above 1, each action is a chunk of
    `action_chunk` actions, one per step (see `chunked`). `chunk_gamma` is the discount per step of the rewards inside a
    chunk.

    >>> make_env("cartpole") is make_env({"id": "cartpole", "cfg": {"gravity": 9.8}})
    True
    """
    choice = validate_section(EnvChoice, choice, "env")
    env = lookup("env", choice.name).make(choice.cfg)
    if choice.frame_stack is not None and choice.frame_stack != env.frame_stack:
        env = _with_frame_stack(env, choice.frame_stack)
    if choice.action_chunk == 1:
        return env
    try:
        return chunked(env, choice.action_chunk, gamma=chunk_gamma)
    except ConfigError as error:
        raise ConfigError(f"env.action_chunk: {choice.action_chunk} for {choice.name}, but {error}") from None


@cache
def _with_frame_stack(env: Env, frames: int) -> Env:
    return replace(env, frame_stack=frames)
