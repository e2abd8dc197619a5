"""Environments as records of pure functions. Import this package to register the built-in environments without MuJoCo.

The registry imports `ecrl.envs.mujoco.tasks`, which registers the MuJoCo tasks, when it looks up one of their names.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ecrl.config import EnvChoice
from ecrl.config.model import validate_section
from ecrl.envs.action_chunks import chunked
from ecrl.envs.cartpole import CartPoleConfig, cartpole
from ecrl.envs.core import NEVER, Env, auto_reset, clip_action, state_of, time_limit
from ecrl.envs.events import RandomizeFieldConfig, randomize_field, restart, with_events
from ecrl.envs.experts import make_expert
from ecrl.envs.gymnasium import GymnasiumConfig, from_vector, gymnasium_env
from ecrl.envs.memory_tasks import RepeatPreviousConfig, TMazeConfig, repeat_previous, t_maze
from ecrl.envs.minatar import (
    AsterixConfig,
    BreakoutConfig,
    FreewayConfig,
    SeaquestConfig,
    SpaceInvadersConfig,
    minatar_asterix,
    minatar_breakout,
    minatar_freeway,
    minatar_seaquest,
    minatar_space_invaders,
)
from ecrl.envs.pendulum import PendulumConfig, pendulum
from ecrl.envs.point_mass import PointMassConfig, point_mass
from ecrl.envs.probes import ProbeConfig, probe_action, probe_constant, probe_delay, probe_match, probe_observation
from ecrl.errors import ConfigError
from ecrl.registry import lookup

if TYPE_CHECKING:
    from ecrl.envs.mujoco.tasks import (
        CartPoleRLConfig,
        OpenDrawerConfig,
        PickCubeConfig,
        PushCubeConfig,
        ReachColorConfig,
        ReachConfig,
        StackCubeConfig,
        cart_pole,
        open_drawer,
        pick_cube,
        push_cube,
        reach,
        reach_color,
        stack_cube,
    )

__all__ = [
    "NEVER",
    "AsterixConfig",
    "BreakoutConfig",
    "CartPoleConfig",
    "CartPoleRLConfig",
    "Env",
    "FreewayConfig",
    "GymnasiumConfig",
    "OpenDrawerConfig",
    "PendulumConfig",
    "PickCubeConfig",
    "PointMassConfig",
    "ProbeConfig",
    "PushCubeConfig",
    "RandomizeFieldConfig",
    "ReachColorConfig",
    "ReachConfig",
    "RepeatPreviousConfig",
    "SeaquestConfig",
    "SpaceInvadersConfig",
    "StackCubeConfig",
    "TMazeConfig",
    "auto_reset",
    "cart_pole",
    "cartpole",
    "chunked",
    "clip_action",
    "from_vector",
    "gymnasium_env",
    "make_env",
    "make_expert",
    "minatar_asterix",
    "minatar_breakout",
    "minatar_freeway",
    "minatar_seaquest",
    "minatar_space_invaders",
    "open_drawer",
    "pendulum",
    "pick_cube",
    "point_mass",
    "probe_action",
    "probe_constant",
    "probe_delay",
    "probe_match",
    "probe_observation",
    "push_cube",
    "randomize_field",
    "reach",
    "reach_color",
    "repeat_previous",
    "restart",
    "stack_cube",
    "state_of",
    "t_maze",
    "time_limit",
    "with_events",
]


def __getattr__(name: str) -> Any:
    """Import the MuJoCo tasks when one of their names is first used, because the import takes long."""
    if name not in __all__:
        raise AttributeError(f"module 'ecrl.envs' has no attribute {name!r}")
    from ecrl.envs.mujoco import tasks

    return getattr(tasks, name)


def make_env(choice: EnvChoice | dict | str, *, chunk_gamma: float = 1.0) -> Env:
    """Make an environment from its name or from the `env` section of a config.

    If `frame_stack` is not set, calls with equal settings return the same object. If `action_chunk` is above 1, each
    action is a chunk of `action_chunk` actions, one per step (see `chunked`). `chunk_gamma` is the discount per step of
    the rewards inside a chunk.

    >>> make_env("cartpole") is make_env({"id": "cartpole", "cfg": {"gravity": 9.8}})
    True
    """
    choice = validate_section(EnvChoice, choice, "env")
    env = lookup("env", choice.name).make(choice.cfg)
    env = env if choice.frame_stack is None else replace(env, frame_stack=choice.frame_stack)
    if choice.action_chunk == 1:
        return env
    try:
        return chunked(env, choice.action_chunk, gamma=chunk_gamma)
    except ConfigError as error:
        raise ConfigError(f"env.action_chunk: {choice.action_chunk}, but {choice.name} {error}") from None
