"""The states of a task: how an episode starts, what a step does to it, what is observed and rewarded.

A state of a task has, beside what every environment's has:
    world       TensorDict, read and written by `ecrl.envs.mujoco.world`
    targets     TensorDict of vectors `[*B, n]` that events store, such as goals, m; only where there are any
    action      `[*B, A]` float32, of the last step, within its bounds; 0 at the start
    force       `[*B, nv]` float32, N or N m along the degrees of freedom, during the next step
    elapsed     `[*B]` int64, steps of the episode
    life        count and key `[*B]` int64, which outlast episodes, and start, the key that this one began with; only
                where events of mode startup or interval are
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.envs.events import Apply
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation, advance, start
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.envs.mujoco.terms.term import ActionTerm, Observe, Reward
from ecrl.errors import ConfigError
from ecrl.kernels.scan_loop import loop

_TRIES = 12  # starts that are drawn where some are refused
_TRIED = 256  # episodes whose starts are looked at when a task is made
THEIRS = ("world", "targets", "action", "force")  # what events see and change

ComputeTaskState = Callable[[Simulation, TensorDict], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""(sim, state after a step) -> success and fail, bool `[*B]`, and metrics by name; either flag ends the episode."""

Check = Callable[[Simulation, TensorDict], Tensor]
"""(sim, state) -> bool `[*B]`."""


class Event(NamedTuple):
    """When it happens, its place among the others, which makes its keys its own, and what it does."""

    mode: str
    interval_step: int
    position: int
    apply: Apply


@dataclass(frozen=True, eq=False)
class Task:
    """A task with its terms made.

    What `with_starts` finds: spare, a key whose start is taken, for an episode that finds none of its own; steady,
    whether startup events have no say in which starts are taken.
    """

    cfg: TaskConfig
    sim: Simulation
    home: Tensor
    actions: tuple[ActionTerm, ...]
    observations: tuple[tuple[str, str, str, Observe], ...]
    rewards: tuple[tuple[str, str, float, str, Reward], ...]
    events: tuple[Event, ...]
    targets: tuple[tuple[str, tuple[float, ...]], ...]
    compute_task_state: ComputeTaskState
    check_truncated: Check
    get_reward: Callable[[Simulation, TensorDict, TensorDict], Tensor] | None
    acceptable: Check | None
    spare: int | None = None
    steady: bool = False

    def of(self, *modes: str) -> list[Event]:
        """Events of these modes."""
        return [event for event in self.events if event.mode in modes]


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Errors of a config begin with where it is."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def begin(task: Task, keys: Tensor) -> TensorDict:
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


def _happen(events: list[Event], state: TensorDict, keys: Tensor) -> TensorDict:
    for event in events:
        own = state.select(*THEIRS, strict=False).clone()
        state = state.copy().update(event.apply(own, rng.fold_in(keys, event.position)))
    return state


def _born(task: Task, state: TensorDict) -> TensorDict:
    """The state after events of mode startup, with the keys of its lives."""
    startup = task.of("startup")
    return _happen(startup, state, state["life", "key"]) if startup else state


def _chosen(task: Task, born: TensorDict, keys: Tensor) -> Tensor:
    """Keys of the events of mode reset: those of the first starts that a task takes, of `_TRIES`, or the spare one."""
    accept, keys = task.acceptable, rng.fold_in(keys, rng.START)
    if not accept:
        return rng.fold_in(keys, 0)

    def again(now: tuple[Tensor, Tensor], number: Tensor, born: TensorDict, keys: Tensor) -> tuple[Any, None]:
        chosen, taken = now
        chosen = torch.where(taken, chosen, rng.fold_in(keys, number))
        return (chosen, taken | accept(task.sim, _happen(task.of("reset"), born, chosen))), None

    none = torch.zeros_like(keys, dtype=torch.bool)
    (chosen, taken), _ = loop(again, (keys, none), torch.arange(_TRIES, device=keys.device), born, keys)
    return chosen if task.spare is None else torch.where(taken, chosen, task.spare)


def _started(task: Task, state: TensorDict, keys: Tensor) -> TensorDict:
    """A start of an episode: events of mode startup, then those of mode reset, with the keys that are chosen."""
    born = _born(task, state)
    chosen = _chosen(task, born, keys)
    begun = _happen(task.of("reset"), born, chosen)
    if task.steady:
        begun = begun.copy().set("life", cast(TensorDict, begun["life"]).copy().set("start", chosen))
    return begun


def _steady(task: Task, keys: Tensor) -> bool:
    """Whether starts are the same, but for parameters of the model, in one life as in another."""
    one, begun = begin(task, keys), task.of("reset")
    life = cast(TensorDict, one["life"]).copy()
    other = one.copy().set("life", life.set("key", life["key"].flip(0)))
    starts = [_happen(begun, _born(task, state), keys) for state in (one, other)]
    taken = [cast(Check, task.acceptable)(task.sim, state) for state in starts]
    seen = [state.select(*THEIRS, strict=False).exclude(("world", "parameters")) for state in starts]
    return torch.equal(*taken) and bool((seen[0] == seen[1]).all())


def with_starts(task: Task) -> Task:
    """The task with what is to be known of its starts before it is played.

    Raises: ConfigError where the task refuses starts time and again.
    """
    if not task.acceptable:
        return task
    keys = rng.split(rng.key(0), _TRIED)
    born = _born(task, begin(task, keys))
    chosen = _chosen(task, born, keys)
    taken = task.acceptable(task.sim, _happen(task.of("reset"), born, chosen))
    if refused := int((~taken).sum()):
        told = f"of {_TRIED} episodes {refused} found no start that the task takes, in {_TRIES} draws each"
        raise ConfigError(f"{told}; let events of mode reset spread them further, or ask less of them in extensions")
    return replace(task, spare=int(chosen[0]), steady=bool(task.of("startup")) and _steady(task, keys))


def reset(task: Task, keys: Tensor) -> TensorDict:
    """States at the start of an episode, `[*B]`."""
    state = _started(task, begin(task, keys), keys)
    no = torch.zeros(keys.shape, dtype=torch.bool, device=keys.device)
    zero = torch.zeros(keys.shape, device=keys.device)
    _, _, metrics = task.compute_task_state(task.sim, state)
    rewards = dict.fromkeys(reward_names(task), zero)
    info = _info(no, no, metrics, rewards)
    outcome = {"reward": zero, "terminated": no.clone(), "truncated": no.clone(), "info": info}
    return state.update({"obs": observe(task, state)} | outcome)


def _info(success: Tensor, fail: Tensor, metrics: dict[str, Tensor], rewards: dict[str, Tensor]) -> TensorDict:
    info = TensorDict({"success": success, "fail": fail, "metrics": metrics, "rewards": rewards}, success.shape)
    return info.clone()  # no two fields may be one tensor


def carry_over(task: Task, begun: TensorDict, ended: TensorDict) -> TensorDict:
    """The start of a further episode of a life: its startup events again, its count of steps.

    The start was chosen in another life; where startup events have a say in which are taken, it is chosen once more.
    """
    life = cast(TensorDict, begun["life"])
    life = life.copy().update(cast(TensorDict, ended["life"]).select("count", "key"))
    if not task.of("startup"):
        return begun.copy().set("life", life)
    fresh = begin(task, life["start"]).set("life", life)
    if task.steady:
        again = _happen(task.of("reset"), _born(task, fresh), life["start"])
    else:
        again = _started(task, fresh, life["start"])
    return begun.copy().update(again).set("obs", observe(task, again))


def _control(task: Task, state: TensorDict, action: Tensor) -> Tensor:
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


def reward_names(task: Task) -> list[str]:
    """Under which the logs have the parts of the reward."""
    own = ["task"] if task.get_reward else []
    return own + [name + suffix for name, *_ in task.rewards for suffix in ("", "_weighted")]


def check_one_each(name: str, given: Any, like: Tensor) -> None:
    """Refuse what is not one number, or one flag, for each environment."""
    said, expected = (
        f"{x.dtype} {list(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        for x in (given, like)
    )
    if said != expected:
        raise ConfigError(f"{name} gives {said}, expected {expected}, one for each environment")


def rewarded(task: Task, before: TensorDict, after: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """The reward of a step, and each term with and without its weight."""
    total, told = torch.zeros_like(before["force"][..., 0]), {}
    if task.get_reward:
        total = told["task"] = task.get_reward(task.sim, before, after)
    for mode in ("add", "replace"):
        for name, _, weight, where, term in (found for found in task.rewards if found[1] == mode):
            with placed(where):
                raw = term(before, after)
                check_one_each("it", raw, total)
            told |= {name: raw, f"{name}_weighted": weight * raw}
            total = weight * raw if mode == "replace" else total + weight * raw
    return total, {name: told[name] for name in reward_names(task)}


def step(task: Task, state: TensorDict, action: Tensor, noise: Tensor) -> TensorDict:
    """States after a step: events of mode interval, physics, success and failure, reward, observation."""
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
    reward, rewards = rewarded(task, state, after.copy().update(ended))
    truncated = task.check_truncated(task.sim, after) | (after["elapsed"] >= task.cfg.max_episode_steps)
    outcome = {"reward": reward, "terminated": success | fail, "truncated": truncated}
    return after.update({"obs": observe(task, after)} | outcome | {"info": _info(success, fail, metrics, rewards)})


def observe(task: Task, state: TensorDict) -> Tensor:
    """The entries of the observation in the order of their names, flat, `[*B, D]` float32."""
    sim, joints, moving = task.sim, task.sim.robot.joints, cast(TensorDict, state["world"])
    entries: dict[str, Tensor] = {}
    if joints:
        entries["robot/qpos"] = world.joint_positions(sim, moving, joints)
        entries["robot/qvel"] = world.joint_velocities(sim, moving, joints)
        entries["robot/qf"] = world.joint_forces(sim, moving, joints)
    for mode in ("add", "modify"):
        for name, _, where, term in (found for found in task.observations if found[1] == mode):
            with placed(where):
                if (name in entries) == (mode == "add"):
                    said = "is there already; use mode modify" if mode == "add" else "is not there; use mode add"
                    raise ConfigError(f"name: {name!r} {said}; there are: {', '.join(entries)}")
                entries[name] = term(state, entries.get(name))
    batch = len(state.batch_size)
    return torch.cat([value.flatten(batch) for _, value in sorted(entries.items())], -1)
