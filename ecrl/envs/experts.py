"""Scripted experts: functions that solve an environment from its full state, for example to record demonstrations."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config import EnvChoice
from ecrl.config.model import validate_section
from ecrl.envs.core import Env
from ecrl.errors import ConfigError
from ecrl.registry import lookup, registered

Expert = Callable[[TensorDict, Tensor], Tensor]
"""Pure function that maps (state `[*B]`, int64 keys `[*B]`) to actions, such as `[*B]` or `[*B, A]`.

The keys are for the expert's own noise.
"""


def make_expert(choice: EnvChoice | dict | str, settings: Mapping[str, Any] | None = None) -> Expert:
    """Make the scripted expert of an environment.

    Args:
        choice: name or `env` section of the environment, as for `make_env`.
        settings: settings of the expert, such as `{"noise": 0.1}`.
    Raises: ConfigError if the environment has no expert, or if a setting is invalid.

    >>> make_expert("pendulum")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ecrl.errors.ConfigError: env.name: 'pendulum' has no scripted expert; known: ...
    """
    choice = validate_section(EnvChoice, choice, "env")
    if choice.name not in (known := registered("expert")):
        raise ConfigError(f"env.name: {choice.label!r} has no scripted expert; known: {', '.join(known)}")
    entry, env = lookup("expert", choice.name), lookup("env", choice.name).make(choice.cfg)
    cfg = validate_section(entry.config, dict(settings or {}), "expert")
    needs_settings = len(signature(entry.make).parameters) > 2
    return entry.make(cfg, env, choice.cfg) if needs_settings else entry.make(cfg, env)


def open_loop(env: Env, expert: Expert, k: int) -> Expert:
    """Return an expert that plans `k` actions, such as `[*B, k, A]`, by simulating steps from the given state.

    The noise of the simulated steps differs from the noise of the steps that later execute the plan. If neither the
    environment nor `expert` draws noise, the plan equals the actions that `expert` would take step by step. Actions
    after the end of an episode have no meaning. If `env.step_without_obs` is set, planning computes no observations,
    and `expert` must not read any.

    Args:
        env: the environment of single steps, even if the states belong to `chunked(env, k)`.
        expert: an expert of single steps.
        k: number of actions in a plan.
    """
    return partial(_plan, env, expert, k)


def _plan(env: Env, expert: Expert, k: int, state: TensorDict, keys: Tensor) -> Tensor:
    actions, state = [], state.exclude("obs") if env.step_without_obs else state
    for i in range(k):
        step_keys = rng.fold_in(keys, i)
        actions.append(expert(state, rng.fold_in(step_keys, 0)))
        if i + 1 < k:
            state = env.step(state, actions[-1], env.draw(rng.fold_in(step_keys, 1)))
    return torch.stack(actions, state.batch_dims)
