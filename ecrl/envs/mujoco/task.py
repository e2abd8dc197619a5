"""An environment from a task's config and its functions: physics, terms, events, success and failure.

A state of a task has, beside what every environment's has:
    world       TensorDict, read and written by `ecrl.envs.mujoco.world`
    targets     TensorDict of vectors `[*B, n]` that events store, such as goals, m; only where there are any
    action      `[*B, A]` float32, of the last step, within its bounds; 0 at the start
    force       `[*B, nv]` float32, N or N m along the degrees of freedom, during the next step
    elapsed     `[*B]` int64, steps of the episode
    life        count and key `[*B]` int64, which outlast episodes, and start, the key of this one; only where events
                of mode startup or interval are
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.envs.core import Env
from ecrl.envs.events import Apply, check_event, made
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.models import Varied, rows_of
from ecrl.envs.mujoco.simulation import Simulation, advance, simulation, start
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.envs.mujoco.terms import ActionTerm, Observe, Reward, part_of
from ecrl.errors import ConfigError
from ecrl.kernels.loops import loop
from ecrl.registry import lookup
from ecrl.spaces import Box, box

_TRIES = 16  # starts that are drawn where some are refused
_simulation = cast(Callable[..., Simulation], simulation)  # pyright holds configs to be unhashable
_THEIRS = ("world", "targets", "action", "force")  # what events see and change

ComputeTaskState = Callable[[Simulation, TensorDict], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""(sim, state after a step) -> success and fail, bool `[*B]`, and metrics by name; either flag ends the episode."""

Check = Callable[[Simulation, TensorDict], Tensor]
"""(sim, state) -> bool `[*B]`."""


class _Event(NamedTuple):
    mode: str
    interval_step: int
    position: int
    apply: Apply


@dataclass(frozen=True, eq=False)
class _Task:
    """A task with its terms made."""

    cfg: TaskConfig
    sim: Simulation
    home: Tensor
    actions: tuple[ActionTerm, ...]
    observations: tuple[tuple[str, str, str, Observe], ...]
    rewards: tuple[tuple[str, str, float, str, Reward], ...]
    events: tuple[_Event, ...]
    targets: tuple[tuple[str, tuple[float, ...]], ...]
    compute_task_state: ComputeTaskState
    check_truncated: Check
    get_reward: Callable[[Simulation, TensorDict, TensorDict], Tensor] | None
    acceptable: Check | None

    def of(self, *modes: str) -> list[_Event]:
        """Events of these modes."""
        return [event for event in self.events if event.mode in modes]


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Errors of a config begin with where it is."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _make(kind: str, sim: Simulation, terms: dict[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """Name, place in the config, settings and function of each term, by name."""
    for name, term in sorted(terms.items()):
        told = f"env.cfg.{kind}s.{name} ({term.func})"
        with _told(told):
            yield name, told, term, lookup(kind, term.func).make(term.params, sim)


def _controlled(cfg: TaskConfig, sim: Simulation) -> Simulation:
    """The simulation with the joints of `control_parts` alone as those of the robot."""
    if cfg.control_parts is None:
        return sim
    with _told("env.cfg.control_parts"):
        chosen = {joint for part in cfg.control_parts for joint in part_of(sim, part)}
    joints = tuple(joint for joint in sim.robot.joints if joint in chosen)
    return replace(sim, robot=sim.robot._replace(joints=joints))


def _acting(cfg: TaskConfig, sim: Simulation) -> tuple[ActionTerm, ...]:
    terms, driven = [], {}
    for name, told, _, term in _make("action", sim, cfg.actions):
        for joint in term.joints:
            if joint in driven:
                raise ConfigError(f"{told}: drives joint {joint!r}, as {driven[joint]!r} does; a joint has one drive")
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
            with _told(f"env.cfg.events.{name} ({event.func})"):
                rows_of(_simulation(cfg).model, field, uid)
            found[field, uid] = None
    return tuple(found)


def _scene(cfg: TaskConfig) -> tuple[Simulation, tuple[ActionTerm, ...]]:
    """The simulation, with the drives that the actions ask for, and the actions."""
    with _told("env.cfg"):
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
        with _told(f"env.cfg.actions.{name} ({action.func})"):
            for joint in term.joints:
                if (found := world.drive_of(sim, joint)) != term.drive:
                    told = f"joint {joint!r} has an actuator of {found or 'another kind'}, not of {term.drive}"
                    raise ConfigError(f"{told}; choose another term, or give robot.drive_pros")


def _events(cfg: TaskConfig, sim: Simulation) -> tuple[_Event, ...]:
    found = []
    for position, (name, event) in enumerate(sorted(cfg.events.items())):
        apply = made(event, sim, f"env.cfg.events.{name} ({event.func})")
        found.append(_Event(event.mode, event.interval_step, position, apply))
    return tuple(found)


def _begin(task: _Task, keys: Tensor) -> TensorDict:
    """The state before any event: the scene as the config has it."""
    none = partial(torch.zeros, device=keys.device)
    width = sum(len(term.low) for term in task.actions)
    fields: dict[str, Any] = {"world": start(task.sim, keys.shape, keys.device)}
    fields |= {"action": none(*keys.shape, width), "force": none(*keys.shape, task.sim.nv)}
    fields["elapsed"] = torch.zeros_like(keys)
    if task.targets:
        targets = {name: torch.tensor(row, device=keys.device) for name, row in task.targets}
        fields["targets"] = TensorDict(
            {n: row.expand(*keys.shape, -1).clone() for n, row in targets.items()}, keys.shape
        )
    if task.of("startup", "interval"):
        # not of the stream of events, which those of the trainer take from the same keys
        born = {"count": torch.zeros_like(keys), "key": rng.fold_in(keys, rng.ENV), "start": keys.clone()}
        fields["life"] = TensorDict(born, keys.shape)
    return TensorDict(fields, keys.shape)


def _happen(events: list[_Event], state: TensorDict, keys: Tensor) -> TensorDict:
    for event in events:
        own = state.select(*_THEIRS, strict=False).clone()
        state = state.copy().update(event.apply(own, rng.fold_in(keys, event.position)))
    return state


def _accepted(task: _Task, accept: Check, state: TensorDict, keys: Tensor) -> Tensor:
    """The keys of the first starts that a task takes, of `_TRIES`; where it takes none, of the last."""

    def again(now: tuple[Tensor, Tensor], number: Tensor, state: TensorDict, keys: Tensor) -> tuple[Any, None]:
        chosen, taken = now
        chosen = torch.where(taken, chosen, rng.fold_in(keys, number))
        return (chosen, taken | accept(task.sim, _happen(task.of("reset"), state, chosen))), None

    none = torch.zeros_like(keys, dtype=torch.bool)
    (chosen, _), _ = loop(again, (keys, none), torch.arange(_TRIES, device=keys.device), state, keys)
    return chosen


def _started(task: _Task, state: TensorDict, keys: Tensor) -> TensorDict:
    """A start of an episode: events of mode startup, with the key of a life, then those of mode reset.

    Where a task refuses a start, further ones are drawn; the last is taken as it is.
    """
    if startup := task.of("startup"):
        state = _happen(startup, state, state["life", "key"])
    keys = rng.fold_in(keys, rng.START)
    chosen = _accepted(task, task.acceptable, state, keys) if task.acceptable else rng.fold_in(keys, 0)
    return _happen(task.of("reset"), state, chosen)


def _reset(task: _Task, keys: Tensor) -> TensorDict:
    state = _started(task, _begin(task, keys), keys)
    no = torch.zeros(keys.shape, dtype=torch.bool, device=keys.device)
    zero = torch.zeros(keys.shape, device=keys.device)
    _, _, metrics = task.compute_task_state(task.sim, state)
    rewards = dict.fromkeys(_reward_names(task), zero)
    info = _info(no, no, metrics, rewards)
    outcome = {"reward": zero, "terminated": no.clone(), "truncated": no.clone(), "info": info}
    return state.update({"obs": observe(task, state)} | outcome)


def _info(success: Tensor, fail: Tensor, metrics: dict[str, Tensor], rewards: dict[str, Tensor]) -> TensorDict:
    info = TensorDict({"success": success, "fail": fail, "metrics": metrics, "rewards": rewards}, success.shape)
    return info.clone()  # no two fields may be one tensor


def _carry_over(task: _Task, begun: TensorDict, ended: TensorDict) -> TensorDict:
    """The start of a further episode of a life: its startup events again, its count of steps."""
    life = cast(TensorDict, begun["life"])
    life = life.copy().update(cast(TensorDict, ended["life"]).select("count", "key"))
    if not task.of("startup"):
        return begun.copy().set("life", life)
    again = _started(task, _begin(task, life["start"]).set("life", life), life["start"])
    return begun.copy().update(again).set("obs", observe(task, again))


def _control(task: _Task, state: TensorDict, action: Tensor) -> Tensor:
    """Controls of all actuators `[*B, nu]`: of those that no term drives what held the robot at the start."""
    columns, first = list(task.home.to(action.device).expand(*action.shape[:-1], -1).unbind(-1)), 0
    for term in task.actions:
        wanted = term.control(state, action[..., first : first + len(term.low)])
        if term.drive == "position":
            low, high = world.joint_limits(task.sim, term.joints)
            wanted = wanted.clamp(wanted.new_tensor(low), wanted.new_tensor(high))
        factors = world.controls_per_target(task.sim, term.joints)
        wanted = wanted if set(factors) == {1.0} else wanted * wanted.new_tensor(factors)
        for at, column in zip(world.actuators_of(task.sim, term.joints), wanted.unbind(-1), strict=True):
            columns[at] = column
        first += len(term.low)
    return torch.stack(columns, -1)


def _reward_names(task: _Task) -> list[str]:
    own = ["task"] if task.get_reward else []
    return own + [name + suffix for name, *_ in task.rewards for suffix in ("", "_weighted")]


def _check_names(where: str, names: list[str]) -> None:
    """Refuse names that logs, or checkpoints, whose keys are joined by /, could not tell apart."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: the logs would have {name!r} twice, of another term or the task; rename it")
        if inside := next((other for other in names if other.startswith(f"{name}/")), None):
            raise ConfigError(f"{where}: {inside!r} reads as a part of {name!r}; rename one")


def _check_one_each(name: str, given: Any, like: Tensor) -> None:
    """Refuse what is not one number, or one flag, for each environment."""
    said, expected = (
        f"{x.dtype} {list(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        for x in (given, like)
    )
    if said != expected:
        raise ConfigError(f"{name} gives {said}, expected {expected}, one for each environment")


def _rewards(task: _Task, before: TensorDict, after: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """The reward of a step, and each term with and without its weight."""
    total, told = torch.zeros_like(before["force"][..., 0]), {}
    if task.get_reward:
        total = told["task"] = task.get_reward(task.sim, before, after)
    for mode in ("add", "replace"):
        for name, _, weight, where, term in (found for found in task.rewards if found[1] == mode):
            with _told(where):
                raw = term(before, after)
                _check_one_each("it", raw, total)
            told |= {name: raw, f"{name}_weighted": weight * raw}
            total = weight * raw if mode == "replace" else total + weight * raw
    return total, {name: told[name] for name in _reward_names(task)}


def _step(task: _Task, state: TensorDict, action: Tensor, noise: Tensor) -> TensorDict:
    if "life" in state:
        count = state["life", "count"] + 1
        for event in task.of("interval"):
            happened = _happen([event], state, noise)
            state = happened.where(count % event.interval_step == 0, state)
        state = state.copy().set("life", cast(TensorDict, state["life"]).copy().set("count", count))
    moved, lost = advance(task.sim, cast(TensorDict, state["world"]), _control(task, state, action), state["force"])
    unusable = lost | ~action.isfinite().all(-1)  # an infinite one is held at limits, and would spoil rewards too
    taken = torch.where(unusable.unsqueeze(-1), state["action"], action)
    fields = {"world": moved, "action": taken, "force": torch.zeros_like(state["force"])}
    after = state.copy().update(fields | {"elapsed": state["elapsed"] + 1})
    success, fail, metrics = task.compute_task_state(task.sim, after)
    success, fail = success & ~lost, fail | lost
    ended = {"success": success, "fail": fail}
    reward, rewards = _rewards(task, state, after.copy().update(ended))
    truncated = task.check_truncated(task.sim, after) | (after["elapsed"] >= task.cfg.max_episode_steps)
    outcome = {"reward": reward, "terminated": success | fail, "truncated": truncated}
    return after.update({"obs": observe(task, after)} | outcome | {"info": _info(success, fail, metrics, rewards)})


def observe(task: _Task, state: TensorDict) -> Tensor:
    """The entries of the observation in the order of their names, flat, `[*B, D]` float32."""
    sim, joints, moving = task.sim, task.sim.robot.joints, cast(TensorDict, state["world"])
    entries: dict[str, Tensor] = {}
    if joints:
        entries["robot/qpos"] = world.joint_positions(sim, moving, joints)
        entries["robot/qvel"] = world.joint_velocities(sim, moving, joints)
        entries["robot/qf"] = world.joint_forces(sim, moving, joints)
    for mode in ("add", "modify"):
        for name, _, where, term in (found for found in task.observations if found[1] == mode):
            with _told(where):
                if (name in entries) == (mode == "add"):
                    said = "is there already; use mode modify" if mode == "add" else "is not there; use mode add"
                    raise ConfigError(f"name: {name!r} {said}; there are: {', '.join(entries)}")
                entries[name] = term(state, entries.get(name))
    batch = len(state.batch_size)
    return torch.cat([value.flatten(batch) for _, value in sorted(entries.items())], -1)


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
        acceptable: (sim, state) -> bool `[*B]`: which starts are taken; of up to 16 that are drawn the first.

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
    targets = tuple(sorted({name: row for rows in stored for name, row in rows.items()}.items()))
    home = torch.from_numpy(sim.home.ctrl).float()
    hooks = compute_task_state, check_truncated, get_reward, acceptable
    task = _Task(cfg, sim, home, actions, observations, rewards, _events(cfg, sim), targets, *hooks)
    for (name, event), happening in zip(sorted(cfg.events.items()), task.events, strict=True):
        keys = rng.split(rng.key(0), 2)
        before = _begin(task, keys).select(*_THEIRS, strict=False)
        check_event(f"env.cfg.events.{name} ({event.func})", happening.apply, before, keys)
    _check_names("env.cfg.rewards", _reward_names(task))
    with torch.no_grad(), _told("env.cfg (compute_task_state)"):
        begun = _begin(task, rng.split(rng.key(0), 2))
        success, fail, metrics = compute_task_state(sim, begun)
        for flag, given in (("success", success), ("fail", fail)):
            _check_one_each(flag, given, begun["elapsed"] > 0)
        _check_names("metrics", list(metrics))
    with torch.no_grad():
        size = observe(task, _begin(task, rng.split(rng.key(0), 1))).shape[-1]
    low, high = (tuple(x for term in actions for x in getattr(term, side)) for side in ("low", "high"))
    env = Env(
        partial(_reset, task),
        partial(_step, task),
        box(-inf, inf, size),
        Box(low, high, (len(low),)),
        observe=partial(observe, task),
        scene=sim,
    )
    return replace(env, carry_over=partial(_carry_over, task)) if task.of("startup", "interval") else env
