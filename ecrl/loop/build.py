"""What a run is made of: device, compiled or eager form, environment and policy, from its config."""

import warnings
from functools import partial
from math import inf
from typing import Any, Literal

import torch

from ecrl.algorithms import Parts, make_algorithm
from ecrl.compile.jit import Form, choose_form
from ecrl.config import Config
from ecrl.distributed import local_device
from ecrl.envs import Env, auto_reset, clip_action, make_env, with_events
from ecrl.envs.mujoco.terms.cameras import RecordCameraConfig
from ecrl.envs.validate import check_fields
from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.memory import check_room, element_bytes
from ecrl.policies import Policy, make_policy

_COMPILING_S, _VECTOR_STEP_S, _GRADIENT_STEP_S = 30.0, 0.35e-3, 4.5e-3
"""What compiling a run takes with an empty cache, and what it saves per step of all environments and of the weights."""


def device_of(cfg: Config) -> torch.device:
    """The device of a run; "auto" is cuda where there is one. Raises ConfigError naming the devices there are."""
    name, count = local_device(cfg.trainer.device), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    have = ["cpu", *(f"cuda:{i}" for i in range(count))]
    if name not in have and not (name == "cuda" and count):
        raise ConfigError(f"trainer.device: {name} is not available; available: {', '.join(have)} (or auto)")
    return torch.device(name)


def _env_and_policy(cfg: Config) -> tuple[Env, Policy]:
    env = make_env(cfg.env)
    on_host = env.scene is not None and env.scene.backend == "mujoco"
    if on_host and (device := device_of(cfg)).type == "cuda":
        told = f"trainer.device: {device}, but {cfg.env.name} steps in MuJoCo on the CPU"
        raise ConfigError(f'{told}; set it to cpu, or env.cfg.physics.backend to "warp"')
    check_fields(env, cfg.env.name)
    return env, make_policy(cfg.policy, env.observation_space, env.action_space)


def check_envs(cfg: Config, env: Env, num_envs: int, key: str) -> None:
    """Refuse environments, as many as `key` says, whose observations alone do not fit in memory."""
    check_room(num_envs * element_bytes(env.observation_space), device_of(cfg), f"{key}: {num_envs:,} environments")


def check_rollout(cfg: Config) -> None:
    """Refuse a rollout that does not fit in memory."""
    env, _ = _env_and_policy(cfg)
    row = element_bytes(env.observation_space) + element_bytes(env.action_space)
    row += 19  # log-probability, reward and two values, and three flags
    steps = cfg.trainer.num_envs * (cfg.trainer.buffer_size + 1)
    check_room(steps * row, device_of(cfg), f"trainer.num_envs: times (buffer_size + 1) {steps:,} steps")


def _saved_s(cfg: Config) -> float:
    """Seconds by which a compiled run is shorter, compiling left out; infinite where an algorithm does not tell."""
    gradient_steps = make_algorithm(cfg.algorithm).gradient_steps
    if gradient_steps is None:
        return inf
    per_iteration = cfg.trainer.buffer_size * _VECTOR_STEP_S + gradient_steps(cfg) * _GRADIENT_STEP_S
    return cfg.trainer.iterations * per_iteration


def form_of(cfg: Config) -> Form:
    """Compiled or eager, and why."""
    device, mode = device_of(cfg).type, cfg.trainer.compile
    if not _env_and_policy(cfg)[1].compiles:
        reason = f"policy {cfg.policy.name} draws numbers of its own, which cannot be compiled"
        if mode == "on":
            raise ConfigError(f"trainer.compile: on, but {reason}; use auto")
        return Form("eager", reason, partial, scan)
    if mode == "auto" and (saved := _saved_s(cfg)) < _COMPILING_S:
        reason = f"compiling would save about {saved:.0f} s of the whole budget and take {_COMPILING_S:.0f} s itself"
        form = Form("eager", reason, partial, scan)
    else:
        form = choose_form(mode, device)
    if not cfg.trainer.tf32:
        return form
    if device != "cuda":
        warnings.warn(f"trainer.tf32 is for cuda; on {device} matrices stay float32", stacklevel=2)
        return form
    return form._replace(reason=f"{form.reason}, TF32 matrices")


class _NotHere:
    """Stands in a config for what an iteration compiled as one graph may not read; asking or counting with it fails."""

    def __repr__(self) -> str:
        return "<a number of state['hyper'], or nothing that shapes a graph>"

    def __bool__(self) -> bool:
        raise TypeError(f"{self} has no truth here: an algorithm of one graph reads no numbers of its config")


_NOT_HERE = _NotHere()
_SHAPING = ("num_envs", "buffer_size", "iterations")
_NUMBERS = ("learning_rate", "betas")  # in the state, whether given or not


def _without_floats(cfg: Any, *blocks: str) -> Any:
    """A model with its floats out of reach, and those of some of the models in it."""
    fields = {name: getattr(cfg, name) for name in type(cfg).model_fields}
    floats = {name: _NOT_HERE for name, value in fields.items() if isinstance(value, float) or name in _NUMBERS}
    inner = {name: _without_floats(fields[name], "kwargs") for name in blocks if fields.get(name) is not None}
    return cfg.model_copy(update=floats | inner)


def shaping(cfg: Config) -> Config:
    """The config as far as it shapes the graph of an iteration, equal for all that share one.

    Seed, name and files are out of reach, and the floats of the algorithm and its optimiser, which are read from
    `state["hyper"]`: using one fails.

    >>> from ecrl import load_config
    >>> cfg = load_config("configs/cartpole_ppo.json")
    >>> shaping(cfg) == shaping(cfg.replace(**{"trainer.seed": 7, "algorithm.cfg.gamma": 0.5}))
    True
    """
    trainer = {name: _NOT_HERE for name in type(cfg.trainer).model_fields if name not in _SHAPING}
    update = {
        "trainer": cfg.trainer.model_copy(update=trainer),
        "env": _NOT_HERE,
        "policy": _NOT_HERE,
        "algorithm": cfg.algorithm.model_copy(update={"cfg": _without_floats(cfg.algorithm.cfg, "optimizer")}),
    }
    return cfg.model_copy(update=update)


def make_parts(cfg: Config, events: Literal["train", "eval"] = "train") -> Parts:
    """Environment (with auto-reset and the events of training or evaluation), policy, config and form of a run.

    Cameras are no events of the environment: `ecrl.run.recording` watches it from outside.
    """
    env, policy = _env_and_policy(cfg)
    env = auto_reset(clip_action(env) if cfg.policy.clip_actions else env)
    form = form_of(cfg)
    named = getattr(cfg.trainer.events, events).items()
    happening = {name: event for name, event in named if not isinstance(event.params, RecordCameraConfig)}
    env = with_events(env, happening, f"trainer.events.{events}")
    return Parts(env, policy, cfg, form.jit, form.scan)
