"""An environment from a task's config and its functions: its scene built, its terms made, its faults said."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import term_text
from ecrl.envs.core import Env
from ecrl.envs.events import check_event, made
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.camera import lit
from ecrl.envs.mujoco.physics.simulation import Simulation, simulation
from ecrl.envs.mujoco.scene.models import Varied, rows_of
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.envs.mujoco.task_step import (
    THEIRS,
    Check,
    ComputeTaskState,
    Event,
    Task,
    begin,
    carry_over,
    check_one_each,
    observe,
    placed,
    reset,
    reward_names,
    rewarded,
    step,
    with_starts,
)
from ecrl.envs.mujoco.terms.term import ActionTerm, part_of
from ecrl.errors import ConfigError
from ecrl.registry import lookup
from ecrl.spaces import Box, box

_simulation = cast(Callable[..., Simulation], simulation)  # pyright holds configs to be unhashable


def _make(kind: str, sim: Simulation, terms: dict[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """Name, place in the config, settings and function of each term, by name."""
    for name, term in sorted(terms.items()):
        told = term_text(f"env.cfg.{kind}s", name, term.func)
        with placed(told):
            yield name, told, term, lookup(kind, term.func).make(term.params, sim)


def _controlled(cfg: TaskConfig, sim: Simulation) -> Simulation:
    """The simulation with the joints of `control_parts` alone as those of the robot."""
    if cfg.control_parts is None:
        return sim
    with placed("env.cfg.control_parts"):
        chosen = {joint for part in cfg.control_parts for joint in part_of(sim, part)}
    joints = tuple(joint for joint in sim.robot.joints if joint in chosen)
    return replace(sim, robot=sim.robot._replace(joints=joints))


def _acting(cfg: TaskConfig, sim: Simulation) -> tuple[ActionTerm, ...]:
    terms, driven = [], {}
    for name, told, _, term in _make("action", sim, cfg.actions):
        for joint in term.joints:
            if joint in driven:
                raise ConfigError(f"{told}: drives joint {joint!r}, as {driven[joint]!r} does; a joint has one drive")
            if cfg.control_parts is not None and joint not in sim.robot.joints:
                parts = ", ".join(cfg.control_parts)
                raise ConfigError(f"{told}: drives joint {joint!r}, which env.cfg.control_parts, {parts}, leaves out")
            driven[joint] = name
        terms.append(term)
    if not terms:
        raise ConfigError('env.cfg.actions: empty; such as {"delta_qpos": {"func": "DeltaQposTerm"}}')
    return tuple(terms)


def _varied(cfg: TaskConfig) -> Varied:
    """What of the model the events make differ between environments."""
    found: dict[tuple[str, str], None] = {}
    for name, event in sorted(cfg.events.items()):
        for field, uid in getattr(event.params, "varied", ()):
            with placed(term_text("env.cfg.events", name, event.func)):
                rows_of(_simulation(cfg).model, field, uid)
            found[field, uid] = None
    return tuple(found)


def _scene(cfg: TaskConfig) -> tuple[Simulation, tuple[ActionTerm, ...]]:
    """The simulation, with the drives that the actions ask for, and the actions."""
    with placed("env.cfg"):
        _simulation(cfg)
    varied = _varied(cfg)
    sim = _controlled(cfg, _simulation(cfg, varied=varied))
    actions = _acting(cfg, sim)
    asked = ((joint, term.drive) for term in actions for joint in term.joints if term.drive != "position")
    drives = tuple((joint, drive) for joint, drive in asked if world.drive_of(sim, joint) != drive)
    if drives:
        prefix = f"{cfg.robot.uid}/" if cfg.robot else ""
        sim = _controlled(cfg, _simulation(cfg, tuple((j.removeprefix(prefix), d) for j, d in drives), varied))
        actions = _acting(cfg, sim)
    _check_drives(cfg, sim, actions)
    return sim, actions


def _check_drives(cfg: TaskConfig, sim: Simulation, actions: tuple[ActionTerm, ...]) -> None:
    """Refuse an action whose joints are driven otherwise than it says, as actuators of a file may."""
    for (name, action), term in zip(sorted(cfg.actions.items()), actions, strict=True):
        with placed(term_text("env.cfg.actions", name, action.func)):
            for joint in term.joints:
                if (found := world.drive_of(sim, joint)) != term.drive:
                    told = f"joint {joint!r} has an actuator of {found or 'another kind'}, not of {term.drive}"
                    raise ConfigError(f"{told}; choose another term, or give robot.drive_pros")


def _events(cfg: TaskConfig, sim: Simulation) -> tuple[Event, ...]:
    found = []
    for position, (name, event) in enumerate(sorted(cfg.events.items())):
        apply = made(event, sim, term_text("env.cfg.events", name, event.func))
        found.append(Event(event.mode, event.interval_step, position, apply))
    return tuple(found)


def _check_names(where: str, names: list[str]) -> None:
    """Refuse names that logs, or checkpoints, whose keys are joined by /, could not tell apart."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: the logs would have {name!r} twice, of another term or the task; rename it")
        if inside := next((other for other in names if other.startswith(f"{name}/")), None):
            raise ConfigError(f"{where}: {inside!r} reads as a part of {name!r}; rename one")


def _check_functions(task: Task, state: TensorDict) -> None:
    """Ask the functions of a task and its rewards about a state, and refuse what is not one answer for each."""
    sim, flags = task.sim, state["elapsed"] > 0
    with placed("env.cfg (compute_task_state)"):
        success, fail, metrics = task.compute_task_state(sim, state)
        for flag, given in (("success", success), ("fail", fail)):
            check_one_each(flag, given, flags)
        _check_names("metrics", list(metrics))
    with placed("env.cfg (check_truncated)"):
        check_one_each("it", task.check_truncated(sim, state), flags)
    after = state.copy().update({"success": success, "fail": fail})
    if task.get_reward:
        with placed("env.cfg (get_reward)"):
            check_one_each("it", task.get_reward(sim, state, after), flags.float())
    rewarded(task, state, after)


def never(sim: Simulation, state: TensorDict) -> Tensor:
    """The default `check_truncated`: only the time limit truncates."""
    return torch.zeros_like(state["elapsed"], dtype=torch.bool)


def task_env(
    cfg: TaskConfig,
    compute_task_state: ComputeTaskState,
    check_truncated: Check = never,
    get_reward: Callable[[Simulation, TensorDict, TensorDict], Tensor] | None = None,
    acceptable: Check | None = None,
) -> Env:
    """The environment of a task: its config's terms, and functions that say what it is about.

    Args:
        cfg: scene and terms.
        compute_task_state: (sim, state) -> success, fail, metrics; success and fail are terminations.
        check_truncated: (sim, state) -> bool `[*B]`: an episode that is broken off, beside the time limit.
        get_reward: (sim, before, after) -> `[*B]`, a reward beside the terms; it is `rewards/task` in the logs.
        acceptable: (sim, state) -> bool `[*B]`: which starts are taken; of up to 12 that are drawn the first, and where
            it takes none of them, one that was found beforehand. A config of which 256 episodes do not all find one is
            refused.

    `info` has `success`, `fail`, `metrics` and `rewards`: each term as `<name>`, and times its weight as
    `<name>_weighted`.

    The Config of an event may say by its properties `stores` which targets it sets, `{name: numbers before that}`, and
    by `varied` what of the model it makes differ between environments, as `simulation` takes it.

    Raises: ConfigError naming the term by its place in the config.
    """
    sim, actions = _scene(cfg)
    observations = tuple(
        (t.name, t.mode, told, made) for _, told, t, made in _make("observation", sim, cfg.observations)
    )
    rewards = tuple((n, t.mode, t.weight, told, made) for n, told, t, made in _make("reward", sim, cfg.rewards))
    stored = (getattr(event.params, "stores", {}) for _, event in sorted(cfg.events.items()))
    begun = {name: row for rows in stored for name, row in rows.items()}
    begun |= {name: row for name, row in lit(sim).items() if name in begun}
    targets = tuple((name, tuple(map(float, row))) for name, row in sorted(begun.items()))
    home = torch.from_numpy(sim.home.ctrl).float()
    hooks = compute_task_state, check_truncated, get_reward, acceptable
    task = Task(cfg, sim, home, actions, observations, rewards, _events(cfg, sim), targets, *hooks)
    for (name, event), happening in zip(sorted(cfg.events.items()), task.events, strict=True):
        keys = rng.split(rng.key(0), 2)
        before = begin(task, keys).select(*THEIRS, strict=False)
        check_event(term_text("env.cfg.events", name, event.func), happening.apply, before, keys)
    _check_names("env.cfg.rewards", reward_names(task))
    with torch.no_grad():
        _check_functions(task, begin(task, rng.split(rng.key(0), 2)))
    with torch.no_grad(), placed("env.cfg.events"):
        task = with_starts(task)
    with torch.no_grad():
        size = observe(task, begin(task, rng.split(rng.key(0), 1))).shape[-1]
    low, high = (tuple(x for term in actions for x in getattr(term, side)) for side in ("low", "high"))
    env = Env(
        partial(reset, task),
        partial(step, task),
        box(-inf, inf, size),
        Box(low, high, (len(low),)),
        observe=partial(observe, task),
        scene=sim,
    )
    return replace(env, carry_over=partial(carry_over, task)) if task.of("startup", "interval") else env
