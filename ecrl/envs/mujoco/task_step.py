"""Pure functions that reset and step a task, observe its state and compute its reward.

In addition to the fields that the state of every environment has, the state of a task has these fields:
    world       TensorDict that the functions of `ecrl.envs.mujoco.world` read and write
    targets     TensorDict of vectors `[*B, n]` that events store, such as goals (m); absent if no event stores a target
    action      `[*B, A]` float32, the last action that was finite and whose physics step did not fail; 0 at the start
                of an episode
    force       `[*B, nv]` float32, forces (N or N m) along the degrees of freedom during the next step
    elapsed     `[*B]` int64, number of steps since the episode started
    delay       TensorDict; absent if no event delays actions
    delay.steps `[*B]` int64, number of steps until an action acts
    delay.controls  `[*B, d, nu]` float32, controls of the last d steps, the newest first; d is the longest delay
    life        TensorDict of int64 tensors `[*B]`; absent if no event has mode startup or interval
    life.count  number of steps since the start of the first episode
    life.key    random key of the startup events, whose effects outlast episodes
    life.start  random key of the start of the current episode
"""

from collections.abc import Callable, Iterator, Mapping
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
from ecrl.envs.mujoco.render_op import NEEDED
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.envs.mujoco.terms.term import ActionTerm, Observe, Reward
from ecrl.errors import ConfigError
from ecrl.kernels.scan_loop import loop

_OUTCOME = ("reward", "terminated", "truncated", "info")
_TRIES = 12  # largest number of random starts per episode, if a task accepts only some starts
_CHECKED_EPISODES = 256  # number of episodes whose starts are tested when a task is created
EVENT_FIELDS = ("world", "targets", "action", "force", "delay")  # fields of the state that events can read and change

ComputeTaskState = Callable[[Simulation, TensorDict], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""Function that maps (sim, state) to success and fail (bool `[*B]`) and a dictionary of metrics.

The state is the state after a step, or the state at the start of an episode. An episode terminates if success or fail
is True after a step. At the start of an episode, only the metrics are used.
"""

Check = Callable[[Simulation, TensorDict], Tensor]
"""Function that maps (sim, state) to a bool tensor `[*B]`."""


class Event(NamedTuple):
    """An event of a task.

    `position` is the index of the event among all events of the task. `rng.fold_in` mixes this index into the keys, so
    that each event draws different values.
    """

    mode: str
    interval_step: int
    position: int
    apply: Apply


@dataclass(frozen=True, eq=False)
class Task:
    """A task, with its simulation, its terms and the functions that define the task.

    `prepare_starts` sets these two attributes:
        spare_key: the key of an acceptable start. An episode uses this key if all its random starts are unacceptable.
        startup_neutral: True if startup events change only parameters of the MuJoCo model, such as masses, and do not
            affect which starts `acceptable` accepts.

    `task_env` sets the attribute `parts`: True if the observation is a Dict, and False if it is one vector.
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
    spare_key: int | None = None
    startup_neutral: bool = False
    parts: bool = False

    def events_of(self, *modes: str) -> list[Event]:
        """Return the events whose mode is among `modes`."""
        return [event for event in self.events if event.mode in modes]

    @property
    def longest_delay(self) -> int:
        """The longest delay of actions in steps, or 0 if no event delays actions."""
        return max((getattr(event.params, "longest_delay", 0) for event in self.cfg.events.values()), default=0)


@contextmanager
def error_prefix(where: str) -> Iterator[None]:
    """If the `with` block raises a ConfigError, prefix the error's message with the config path `where`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def initial_state(task: Task, keys: Tensor) -> TensorDict:
    """Return the state before any event happens, with the scene as the config describes it."""
    zeros = partial(torch.zeros, device=keys.device)
    width = sum(len(term.low) for term in task.actions)
    fields: dict[str, Any] = {"world": start(task.sim, keys.shape, keys.device)}
    fields |= {"action": zeros(*keys.shape, width), "force": zeros(*keys.shape, task.sim.nv)}
    fields["elapsed"] = torch.zeros_like(keys)
    if task.longest_delay:
        controls = zeros(*keys.shape, task.longest_delay, task.sim.nu)
        fields["delay"] = TensorDict({"steps": torch.zeros_like(keys), "controls": controls}, keys.shape)
    if task.targets:
        targets = {name: torch.tensor(row, device=keys.device) for name, row in task.targets}
        fields["targets"] = TensorDict(
            {n: row.expand(*keys.shape, -1).clone() for n, row in targets.items()}, keys.shape
        )
    if task.events_of("startup", "interval"):
        # use the stream ENV, because events under trainer.events use the stream EVENT of the same keys
        life = {"count": torch.zeros_like(keys), "key": rng.fold_in(keys, rng.ENV), "start": keys.clone()}
        fields["life"] = TensorDict(life, keys.shape)
    return TensorDict(fields, keys.shape)


def _apply(events: list[Event], state: TensorDict, keys: Tensor) -> TensorDict:
    """Apply the given events to a state, one after the other."""
    for event in events:
        fields = state.select(*EVENT_FIELDS, strict=False).clone()
        state = state.copy().update(event.apply(fields, rng.fold_in(keys, event.position)))
    return state


def _apply_startup(task: Task, state: TensorDict) -> TensorDict:
    """Apply the startup events with the random keys that are stored in the state."""
    startup = task.events_of("startup")
    return _apply(startup, state, state["life", "key"]) if startup else state


def _start_keys(task: Task, state: TensorDict, keys: Tensor) -> Tensor:
    """Choose the random keys for the reset events.

    The startup events are already applied to `state`. For each environment, up to `_TRIES` keys are tried, and the
    first key that gives an acceptable start is chosen. If all starts are unacceptable, the task's `spare_key` is
    chosen.
    """
    accept, keys = task.acceptable, rng.fold_in(keys, rng.START)
    if not accept:
        return rng.fold_in(keys, 0)

    def attempt(carry: tuple[Tensor, Tensor], number: Tensor, state: TensorDict, keys: Tensor) -> tuple[Any, None]:
        chosen, accepted = carry
        chosen = torch.where(accepted, chosen, rng.fold_in(keys, number))
        return (chosen, accepted | accept(task.sim, _apply(task.events_of("reset"), state, chosen))), None

    none = torch.zeros_like(keys, dtype=torch.bool)
    (chosen, accepted), _ = loop(attempt, (keys, none), torch.arange(_TRIES, device=keys.device), state, keys)
    return chosen if task.spare_key is None else torch.where(accepted, chosen, task.spare_key)


def _start_episode(task: Task, state: TensorDict, keys: Tensor) -> TensorDict:
    """Apply the startup events, and then the reset events with keys that give an acceptable start."""
    state = _apply_startup(task, state)
    chosen = _start_keys(task, state, keys)
    state = _apply(task.events_of("reset"), state, chosen)
    if task.startup_neutral:
        state = state.copy().set("life", cast(TensorDict, state["life"]).copy().set("start", chosen))
    return state


def _is_startup_neutral(task: Task, keys: Tensor) -> bool:
    """Return True if startup events change only model parameters and do not affect which starts are acceptable.

    Model parameters are fields of the MuJoCo model, such as masses. Only the episodes of `keys` are tested.
    """
    one, reset_events = initial_state(task, keys), task.events_of("reset")
    life = cast(TensorDict, one["life"]).copy()
    other = one.copy().set("life", life.set("key", life["key"].flip(0)))
    starts = [_apply(reset_events, _apply_startup(task, state), keys) for state in (one, other)]
    accepted = [cast(Check, task.acceptable)(task.sim, state) for state in starts]
    compared = [state.select(*EVENT_FIELDS, strict=False).exclude(("world", "parameters")) for state in starts]
    return torch.equal(*accepted) and bool((compared[0] == compared[1]).all())


def prepare_starts(task: Task) -> Task:
    """Return the task, with `spare_key` and `startup_neutral` set if the task accepts only some starts.

    Raises: ConfigError if any of the `_CHECKED_EPISODES` tested episodes finds no acceptable start.
    """
    if not task.acceptable:
        return task
    keys = rng.split(rng.key(0), _CHECKED_EPISODES)
    state = _apply_startup(task, initial_state(task, keys))
    chosen = _start_keys(task, state, keys)
    accepted = task.acceptable(task.sim, _apply(task.events_of("reset"), state, chosen))
    if failed := int((~accepted).sum()):
        fault = f"{failed} of {_CHECKED_EPISODES} episodes found no acceptable start in {_TRIES} draws each"
        advice = "relax the condition for an acceptable start, such as extensions.start_distance"
        raise ConfigError(f"{fault}; widen the ranges of events of mode reset, or {advice}")
    neutral = bool(task.events_of("startup")) and _is_startup_neutral(task, keys)
    return replace(task, spare_key=int(chosen[0]), startup_neutral=neutral)


def reset_unobserved(task: Task, keys: Tensor) -> TensorDict:
    """Return the state `[*B]` of all environments at the start of an episode, without the field `obs`."""
    state = _start_episode(task, initial_state(task, keys), keys)
    false = torch.zeros(keys.shape, dtype=torch.bool, device=keys.device)
    zero = torch.zeros(keys.shape, device=keys.device)
    _, _, metrics = task.compute_task_state(task.sim, state)
    rewards = dict.fromkeys(reward_names(task), zero)
    info = _info(false, false, metrics, rewards)
    outcome = {"reward": zero, "terminated": false.clone(), "truncated": false.clone(), "info": info}
    return state.update(outcome)


def reset(task: Task, keys: Tensor) -> TensorDict:
    """Return the state `[*B]` of all environments at the start of an episode."""
    state = reset_unobserved(task, keys)
    outcome = state.select(*_OUTCOME)
    # keep the field order of `step`, because compiled code recompiles if the order changes
    return state.exclude(*_OUTCOME).set("obs", observe(task, state)).update(outcome)


def _info(success: Tensor, fail: Tensor, metrics: dict[str, Tensor], rewards: dict[str, Tensor]) -> TensorDict:
    info = TensorDict({"success": success, "fail": fail, "metrics": metrics, "rewards": rewards}, success.shape)
    return info.clone()  # no two fields may share a tensor, because compiled code would depend on the sharing


def carry_over(task: Task, new_start: TensorDict, ended: TensorDict) -> TensorDict:
    """Return the initial state of the next episode, which continues the step count and the startup events of `ended`.

    The step count `life.count` and the random key of the startup events, `life.key`, are taken from `ended`.

    If the task has startup events, `new_start` was drawn with another key of the startup events. `carry_over` therefore
    applies the startup events and the reset events again. Unless `task.startup_neutral` is True, the startup events may
    affect which starts are acceptable, so `carry_over` also chooses the start again.
    """
    life = cast(TensorDict, new_start["life"])
    life = life.copy().update(cast(TensorDict, ended["life"]).select("count", "key"))
    if not task.events_of("startup"):
        return new_start.copy().set("life", life)
    state = initial_state(task, life["start"]).set("life", life)
    if task.startup_neutral:
        state = _apply(task.events_of("reset"), _apply_startup(task, state), life["start"])
    else:
        state = _start_episode(task, state, life["start"])
    carried = new_start.copy().update(state)
    return carried.set("obs", observe(task, state)) if "obs" in new_start else carried


def _control(task: Task, state: TensorDict, action: Tensor) -> Tensor:
    """Convert an action to the controls of all actuators, `[*B, nu]`.

    Actuators that no action term drives keep their initial controls.
    """
    columns, first = list(task.home.to(action.device).expand(*action.shape[:-1], -1).unbind(-1)), 0
    for term in task.actions:
        control = term.control(state, action[..., first : first + len(term.low)])
        if term.drive == "position":
            low, high = world.joint_limits(task.sim, term.joints)
            control = control.clamp(control.new_tensor(low), control.new_tensor(high))
        factors = world.controls_per_target(task.sim, term.joints)
        control = control if set(factors) == {1.0} else control * control.new_tensor(factors)
        for actuator, column in zip(world.actuators_of(task.sim, term.joints), control.unbind(-1), strict=True):
            columns[actuator] = column
        first += len(term.low)
    return torch.stack(columns, -1)


def _delayed(task: Task, state: TensorDict, control: Tensor) -> tuple[TensorDict, Tensor]:
    """Return the field `delay` after a step, and the control `[*B, nu]` that acts in the step.

        acting[t] = control[t - steps]

    For times t before the first step of the episode, `control[t]` is `hold_controls` of the initial state.
    """
    held = world.hold_controls(task.sim, cast(TensorDict, state["world"])).unsqueeze(-2)
    is_first = (state["elapsed"] == 0)[..., None, None]
    earlier = torch.where(is_first, held, state["delay", "controls"])
    known = torch.cat((control.unsqueeze(-2), earlier), -2)
    steps = state["delay", "steps"][..., None, None].expand(*control.shape[:-1], 1, control.shape[-1])
    fields = {"steps": state["delay", "steps"].clone(), "controls": known[..., :-1, :].clone()}
    return TensorDict(cast(Any, fields), state.batch_size), known.gather(-2, steps).squeeze(-2)


def reward_names(task: Task) -> list[str]:
    """Return the names that the components of the reward have in the logs."""
    task_reward = ["task"] if task.get_reward else []
    return task_reward + [name + suffix for name, *_ in task.rewards for suffix in ("", "_weighted")]


def check_per_env(name: str, result: Any, like: Tensor) -> None:
    """Raise ConfigError if `result` does not have the dtype of `like` and one value per environment."""
    actual, expected = (
        f"{x.dtype} {list(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        for x in (result, like)
    )
    if actual != expected:
        raise ConfigError(f"{name} is {actual}, expected {expected}, one for each environment")


def compute_reward(task: Task, before: TensorDict, after: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the total reward of a step, and a dictionary of its components.

    The components are the task's own reward, if it has one, and the unweighted and the weighted value of each term.
    """
    total, parts = torch.zeros_like(before["force"][..., 0]), {}
    if task.get_reward:
        total = parts["task"] = task.get_reward(task.sim, before, after)
    for mode in ("add", "replace"):
        for name, _, weight, where, term in (entry for entry in task.rewards if entry[1] == mode):
            with error_prefix(where):
                raw = term(before, after)
                check_per_env("the reward", raw, total)
            parts |= {name: raw, f"{name}_weighted": weight * raw}
            total = weight * raw if mode == "replace" else total + weight * raw
    return total, {name: parts[name] for name in reward_names(task)}


def step(task: Task, state: TensorDict, action: Tensor, noise: Tensor) -> TensorDict:
    """Advance every environment of the batch by one step.

    The function applies the interval events and steps the physics. The function then computes, in this order, success
    and failure, the reward, and the observation. If the state has no field `obs`, the observation is left out. If
    the physics step of an environment fails (see `advance`), its episode terminates as a failure.
    """
    if "life" in state:
        count = state["life", "count"] + 1
        for event in task.events_of("interval"):
            changed = _apply([event], state, noise)
            state = changed.where(count % event.interval_step == 0, state)
        state = state.copy().set("life", cast(TensorDict, state["life"]).copy().set("count", count))
    control = _control(task, state, action)
    if task.longest_delay:
        delay, control = _delayed(task, state, control)
        state = state.copy().set("delay", delay)
    worlds, failed = advance(task.sim, cast(TensorDict, state["world"]), control, state["force"])
    # joint limits clamp the target of an infinite action, but rewards computed from the action would be infinite
    invalid = failed | ~action.isfinite().all(-1)
    last_action = torch.where(invalid.unsqueeze(-1), state["action"], action)
    fields = {"world": worlds, "action": last_action, "force": torch.zeros_like(state["force"])}
    after = state.copy().update(fields | {"elapsed": state["elapsed"] + 1})
    success, fail, metrics = task.compute_task_state(task.sim, after)
    success, fail = success & ~failed, fail | failed
    reward, rewards = compute_reward(task, state, after.copy().update({"success": success, "fail": fail}))
    truncated = task.check_truncated(task.sim, after) | (after["elapsed"] >= task.cfg.max_episode_steps)
    outcome = {"reward": reward, "terminated": success | fail, "truncated": truncated}
    obs = {"obs": observe(task, after)} if "obs" in state else {}
    return after.update(obs | outcome | {"info": _info(success, fail, metrics, rewards)})


def observe_entries(task: Task, state: TensorDict) -> dict[str, Tensor]:
    """Return the entries of the observation by name, sorted by name, before they are flattened."""
    sim, joints, worlds = task.sim, task.sim.robot.joints, cast(TensorDict, state["world"])
    entries: dict[str, Tensor] = {}
    if joints and task.cfg.observe_joints:
        entries["robot/qpos"] = world.joint_positions(sim, worlds, joints)
        entries["robot/qvel"] = world.joint_velocities(sim, worlds, joints)
        entries["robot/qf"] = world.joint_forces(sim, worlds, joints)
    for mode in ("add", "modify"):
        for name, _, where, term in (entry for entry in task.observations if entry[1] == mode):
            with error_prefix(where):
                if (name in entries) == (mode == "add"):
                    fault = "exists already; use mode modify" if mode == "add" else "does not exist; use mode add"
                    raise ConfigError(f"name: {name!r} {fault}; entries: {', '.join(entries) or 'none'}")
                entries[name] = term(state, entries.get(name))
    return dict(sorted(entries.items()))


def is_image(entry: Tensor, batch: int) -> bool:
    """Return True if an entry of the observation with `batch` batch axes is an image, uint8 `[*B, h, w, c]`."""
    return entry.dtype == torch.uint8 and entry.ndim == batch + 3


def part_name(entry: str) -> str:
    """Return the name that an entry of the observation has in a Dict.

    >>> part_name("robot/qpos")
    'robot_qpos'
    """
    return entry.replace("/", "_")


def observe(task: Task, state: TensorDict) -> Tensor | TensorDict:
    """Compute the observation of every environment.

    If `task.parts` is False, the observation is float32 `[*B, D]`, the concatenation of all flattened entries in the
    order of their names. Otherwise, the observation is a TensorDict with one field per entry: a vector `[*B, D]`, an
    image `[*B, h, w, c]` or integers `[*B, n]`.
    """
    entries, batch = observe_entries(task, state), len(state.batch_size)
    if not task.parts:
        return torch.cat([value.flatten(batch) for value in entries.values()], -1)
    parts = {part_name(name): x if is_image(x, batch) else x.flatten(batch) for name, x in entries.items()}
    return TensorDict(cast(Mapping[str, Any], parts), state.batch_size)


def observe_where(task: Task, state: TensorDict, mask: Tensor) -> Tensor | TensorDict:
    """Compute the observations of the environments where the mask (bool `[*B]`) is True.

    The images of all other environments are black.
    """
    return observe(task, state.copy().set(NEEDED, mask))
