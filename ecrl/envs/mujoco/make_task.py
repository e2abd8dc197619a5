"""Build and check the environment of a MuJoCo task, from a config and from functions that define the task."""

from collections.abc import Callable, Iterator, Mapping
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
from ecrl.envs.events import check_event, lowered_gap, make_event
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.camera import scene_colors, scene_light
from ecrl.envs.mujoco.physics.simulation import Simulation, simulation
from ecrl.envs.mujoco.scene.models import Varied, rows_of
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.envs.mujoco.task_step import (
    EVENT_FIELDS,
    Check,
    ComputeTaskState,
    Event,
    Task,
    carry_over,
    check_per_env,
    compute_reward,
    error_prefix,
    initial_state,
    is_image,
    observe,
    observe_entries,
    observe_where,
    part_name,
    prepare_starts,
    reset,
    reset_unobserved,
    reward_names,
    step,
)
from ecrl.envs.mujoco.terms.term import ActionTerm, IntegerTerm, Observe, part_of
from ecrl.errors import ConfigError
from ecrl.registry import lookup
from ecrl.spaces import Box, Dict, MultiDiscrete, Space, box, dict_space

_simulation = cast(Callable[..., Simulation], simulation)  # pyright does not know that configs are hashable


def _make(kind: str, sim: Simulation, terms: dict[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """Make the terms of one kind. Yield the name, config path, config and function of each term, sorted by name."""
    for name, term in sorted(terms.items()):
        where = term_text(f"env.cfg.{kind}s", name, term.func)
        with error_prefix(where):
            yield name, where, term, lookup(kind, term.func).make(term.params, sim)


def _limit_to_control_parts(cfg: TaskConfig, sim: Simulation) -> Simulation:
    """Return the simulation with its robot restricted to the joints of `control_parts`, if this key is set."""
    if cfg.control_parts is None:
        return sim
    chosen = {joint for part in cfg.control_parts for joint in part_of(sim, part, "env.cfg.control_parts")}
    joints = tuple(joint for joint in sim.robot.joints if joint in chosen)
    return replace(sim, robot=sim.robot._replace(joints=joints))


def _action_terms(cfg: TaskConfig, sim: Simulation) -> tuple[ActionTerm, ...]:
    """Make the action terms of a task.

    Raises: ConfigError if there is no term, if two terms drive the same joint, or if a driven joint is not in
        `control_parts`.
    """
    terms, driven = [], {}
    for name, where, _, term in _make("action", sim, cfg.actions):
        for joint in term.joints:
            if joint in driven:
                raise ConfigError(f"{where}: drives joint {joint!r}, which {driven[joint]!r} also drives; remove one")
            if cfg.control_parts is not None and joint not in sim.robot.joints:
                parts = ", ".join(cfg.control_parts)
                raise ConfigError(
                    f"{where}: drives joint {joint!r}, which is not in env.cfg.control_parts: {parts}; add its part"
                )
            driven[joint] = name
        terms.append(term)
    if not terms:
        raise ConfigError('env.cfg.actions: empty; add a term such as {"delta_qpos": {"func": "DeltaQposTerm"}}')
    return tuple(terms)


def _varied(cfg: TaskConfig) -> Varied:
    """Return pairs of a model field's name and an object's name, for all fields that events vary."""
    fields: dict[tuple[str, str], None] = {}
    for name, event in sorted(cfg.events.items()):
        if (find := getattr(event.params, "varied", None)) is None:
            continue
        with error_prefix(term_text("env.cfg.events", name, event.func)):
            for field, uid in find(_simulation(cfg)):
                rows_of(_simulation(cfg).model, field, uid)
                fields[field, uid] = None
    return tuple(fields)


def _build_scene(cfg: TaskConfig) -> tuple[Simulation, tuple[ActionTerm, ...]]:
    """Build the simulation with the drives that the action terms need. Return the simulation and these terms."""
    with error_prefix("env.cfg"):
        _simulation(cfg)
    varied = _varied(cfg)
    has_movable_base = any(getattr(event.params, "moved_bases", ()) for event in cfg.events.values())
    sim = _limit_to_control_parts(cfg, _simulation(cfg, (), varied, has_movable_base))
    actions = _action_terms(cfg, sim)
    needed = ((joint, term.drive) for term in actions for joint in term.joints if term.drive != "position")
    drives = tuple((joint, drive) for joint, drive in needed if world.drive_of(sim, joint) != drive)
    if drives:
        prefix = f"{cfg.robot.uid}/" if cfg.robot else ""
        drives = tuple((joint.removeprefix(prefix), drive) for joint, drive in drives)
        sim = _limit_to_control_parts(cfg, _simulation(cfg, drives, varied, has_movable_base))
        actions = _action_terms(cfg, sim)
    _check_drives(cfg, sim, actions)
    return sim, actions


def _check_drives(cfg: TaskConfig, sim: Simulation, actions: tuple[ActionTerm, ...]) -> None:
    """Raise ConfigError if a joint does not have the kind of drive that its action term needs.

    A joint can have another kind of drive if an MJCF file defines the joint's actuator.
    """
    for (name, action), term in zip(sorted(cfg.actions.items()), actions, strict=True):
        with error_prefix(term_text("env.cfg.actions", name, action.func)):
            for joint in term.joints:
                if (drive := world.drive_of(sim, joint)) != term.drive:
                    fault = f"joint {joint!r} has an actuator of kind {drive or 'other'}, expected {term.drive}"
                    raise ConfigError(f"{fault}; choose another term, or give robot.drive_pros")


def _make_events(cfg: TaskConfig, sim: Simulation) -> tuple[Event, ...]:
    events = []
    for position, (name, event) in enumerate(sorted(cfg.events.items())):
        apply = make_event(event, sim, term_text("env.cfg.events", name, event.func))
        events.append(Event(event.mode, event.interval_step, position, apply))
    return tuple(events)


def _check_names(where: str, names: list[str]) -> None:
    """Raise ConfigError if two names are equal, or collide as paths in logs or checkpoints, such as `a` and `a/b`."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: two terms, or a term and the task, have the log name {name!r}; rename one")
        if inside := next((other for other in names if other.startswith(f"{name}/")), None):
            raise ConfigError(f"{where}: the log name {inside!r} is a path below the log name {name!r}; rename one")


def _check_functions(task: Task, state: TensorDict) -> None:
    """Call the functions and the reward terms of a task to check their results.

    Raises: ConfigError if a result has a wrong dtype or does not have one value per environment, or if the names of
        two metrics collide.
    """
    sim, flags = task.sim, state["elapsed"] > 0
    with error_prefix("env.cfg (compute_task_state)"):
        success, fail, metrics = task.compute_task_state(sim, state)
        for name, flag in (("success", success), ("fail", fail)):
            check_per_env(name, flag, flags)
        _check_names("metrics", list(metrics))
    with error_prefix("env.cfg (check_truncated)"):
        check_per_env("the result", task.check_truncated(sim, state), flags)
    after = state.copy().update({"success": success, "fail": fail})
    if task.get_reward:
        with error_prefix("env.cfg (get_reward)"):
            check_per_env("the reward", task.get_reward(sim, state, after), flags.float())
    compute_reward(task, state, after)


def _observation_space(task: Task, state: TensorDict, sizes: Mapping[str, tuple[int, ...]]) -> tuple[Space, bool]:
    """Return the space of the observations, and True if an entry of the observation is an image.

    `sizes` maps the name of each entry of integers to the number of possible values of each element.

    Raises: ConfigError if there is no entry, if an entry has a wrong dtype, or if an image or integers would be part of
        a vector. If the observation is a Dict, ConfigError is also raised if two entries get the same name in the Dict,
        such as `a/b` and `a_b`.
    """
    entries, batch, form = observe_entries(task, state), len(state.batch_size), task.cfg.observation_form
    images = [name for name, entry in entries.items() if is_image(entry, batch)]
    integers = [name for name in sizes if entries[name].dtype == torch.int64]
    if not entries:
        raise ConfigError("env.cfg.observations: nothing is observed; add a term, or set observe_joints to true")
    for name, entry in entries.items():
        if name not in [*images, *integers] and entry.dtype != torch.float32:
            kind = f"{entry.dtype} {list(entry.shape[batch:])}".removeprefix("torch.")
            raise ConfigError(
                f"env.cfg.observations: {name!r} is {kind}, expected float32, or an image uint8 [h, w, c]"
            )
    if form == "vector" and images:
        fault = f"'vector', but {images[0]!r} is an image, which cannot be part of a vector"
        raise ConfigError(f'env.cfg.observation_form: {fault}; use "parts", or remove the image')
    if form == "vector" and integers:
        fault = f"'vector', but {integers[0]!r} has integers, which cannot be part of a float vector"
        raise ConfigError(f'env.cfg.observation_form: {fault}; use "parts", or remove the entry')
    if form == "vector" or not (images or integers or form == "parts"):
        return box(-inf, inf, sum(entry.shape[batch:].numel() for entry in entries.values())), False
    spaces: dict[str, Space] = {}
    for name, entry in entries.items():
        shape = entry.shape[batch:]
        if (part := part_name(name)) in spaces:
            raise ConfigError(
                f"env.cfg.observations: two entries have the name {part!r} in the observation; rename one"
            )
        if name in images:
            spaces[part] = box(0, 255, *shape, dtype=torch.uint8)
        else:
            spaces[part] = MultiDiscrete(sizes[name]) if name in integers else box(-inf, inf, shape.numel())
    return dict_space(spaces), bool(images)


def never(sim: Simulation, state: TensorDict) -> Tensor:
    """Return False for every environment: only the time limit truncates episodes.

    `task_env` uses this function if the argument `check_truncated` is not given.
    """
    return torch.zeros_like(state["elapsed"], dtype=torch.bool)


def task_env(
    cfg: TaskConfig,
    compute_task_state: ComputeTaskState,
    check_truncated: Check = never,
    get_reward: Callable[[Simulation, TensorDict, TensorDict], Tensor] | None = None,
    acceptable: Check | None = None,
    own_observations: Mapping[str, Observe | IntegerTerm] | None = None,
    scale: float = 1.0,
) -> Env:
    """Make the environment of a task from its config and from functions that define the task.

    Args:
        cfg: config of the scene and of the terms.
        compute_task_state: a function that maps (sim, state) to success, fail and metrics. An episode terminates if
            success or fail is True.
        check_truncated: a function that maps (sim, state) to bool `[*B]`. The value True truncates an episode before
            the time limit. If `check_truncated` is given, the environment's `min_truncation_gap` is 1.
        get_reward: a function that maps (sim, state before a step, state after the step) to a reward `[*B]`, which is
            logged as `rewards/task`. The reward terms of mode `add` are added to this reward.
        acceptable: a function that maps (sim, state) to bool `[*B]`, True if an episode may start in the state. Each
            episode draws up to 12 random starts and uses the first acceptable start. If all 12 starts are unacceptable,
            the episode uses a start that was acceptable when the task was created. If startup events affect which
            starts are acceptable, this start may be unacceptable in an environment whose startup events drew other
            values. `task_env` tests the starts of 256 episodes, and raises ConfigError if one of these episodes finds
            no acceptable start.
        own_observations: observation terms that the task itself defines, by the name of their entry. The terms of the
            config are applied after `own_observations`.
        scale: factor by which the lengths of `cfg` have been multiplied. The lengths of events under `trainer.events`
            are multiplied by the same factor.

    The state contains `success`, `fail`, `metrics` and `rewards` under `info`. For each reward term, `rewards` contains
    the unweighted value as `<name>` and the weighted value as `<name>_weighted`.

    The Config model of an event may define these attributes:

    - The property `stores` is a dictionary. Its keys are the names of the targets that the event sets, and its values
      are the initial values of these targets. For the color of an object and for the light, the value in the scene
      replaces this initial value.
    - The method `varied(sim)` lists the model fields that the event changes per environment. The list has the same
      format as the argument `varied` of `simulation`.
    - The property `moved_bases` lists the robots whose bases the event moves.
    - The property `longest_delay` is the number of steps whose controls the state keeps for the event.

    Raises: ConfigError if the config or a function is invalid. The error message begins with a config path.
    """
    sim, actions = _build_scene(cfg)
    own: list[tuple[str, str, str, Any]] = [
        (name, "add", "env.cfg.observations", term) for name, term in (own_observations or {}).items()
    ]
    terms = own + [
        (term.name, term.mode, where, function)
        for _, where, term, function in _make("observation", sim, cfg.observations)
    ]
    sizes = {name: term.sizes for name, _, _, term in terms if isinstance(term, IntegerTerm)}
    observations = tuple(
        (name, mode, where, term.observe if isinstance(term, IntegerTerm) else term)
        for name, mode, where, term in terms
    )
    rewards = tuple(
        (name, term.mode, term.weight, where, function)
        for name, where, term, function in _make("reward", sim, cfg.rewards)
    )
    stored = (getattr(event.params, "stores", {}) for _, event in sorted(cfg.events.items()))
    initial = {name: row for rows in stored for name, row in rows.items()}
    of_scene = scene_light(sim) | scene_colors(sim)
    initial |= {name: row for name, row in of_scene.items() if name in initial}
    targets = tuple((name, tuple(map(float, row))) for name, row in sorted(initial.items()))
    home = torch.from_numpy(sim.home.ctrl).float()
    functions = compute_task_state, check_truncated, get_reward, acceptable
    task = Task(cfg, sim, home, actions, observations, rewards, _make_events(cfg, sim), targets, *functions)
    for (name, event), ready in zip(sorted(cfg.events.items()), task.events, strict=True):
        keys = rng.split(rng.key(0), 2)
        before = initial_state(task, keys).select(*EVENT_FIELDS, strict=False)
        check_event(term_text("env.cfg.events", name, event.func), ready.apply, before, keys)
    _check_names("env.cfg.rewards", reward_names(task))
    with torch.no_grad():
        _check_functions(task, initial_state(task, rng.split(rng.key(0), 2)))
    with torch.no_grad(), error_prefix("env.cfg.events"):
        task = prepare_starts(task)
    with torch.no_grad():
        space, has_images = _observation_space(task, initial_state(task, rng.split(rng.key(0), 1)), sizes)
    task = replace(task, parts=isinstance(space, Dict))
    low, high = (tuple(x for term in actions for x in getattr(term, side)) for side in ("low", "high"))
    env = Env(
        partial(reset, task),
        partial(step, task),
        space,
        Box(low, high, (len(low),)),
        observe=partial(observe, task),
        step_without_obs=True,
        scene=sim,
        scale=scale,
        min_truncation_gap=lowered_gap(cfg.max_episode_steps if check_truncated is never else 1, cfg.events),
    )
    if has_images:
        late = {"reset_unobserved": partial(reset_unobserved, task), "observe_where": partial(observe_where, task)}
        env = replace(env, **late)
    return replace(env, carry_over=partial(carry_over, task)) if task.events_of("startup", "interval") else env
