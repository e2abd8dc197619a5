"""Add events, such as random starts and disturbances, to an environment.

An event is a change of the state that is not part of the dynamics. For example, an event may set a physical constant to
a random value. To define an event, register a function `make(cfg)` with `register_event`. `make` returns a function
`apply`. `apply(state, keys)` returns the state after the event has happened in every environment of the batch. `apply`
is a pure function of the state and of one int64 key per environment. This module decides when an event happens, and
selects the affected environments with `where`. Events can therefore run inside compiled and vmapped rollouts.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from inspect import signature
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from ecrl import rng
from ecrl.config import EventConfig
from ecrl.config.model import LIST, NUMBER, ConfigModel, by_kind, term_text
from ecrl.envs.core import Env, last_obs
from ecrl.envs.scaling import scale_lengths
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean, lookup, register_event

Apply = Callable[[TensorDict, Tensor], TensorDict]

_COUNTERS = ("elapsed", "elapsed_chunks")
_HIDDEN = ("reward", "terminated", "truncated", "info", "mask", "executed", "final_obs", *_COUNTERS)
"""State fields that events cannot read: the outcome of the last step, and the step counters of `time_limit`."""


class _Event(NamedTuple):
    """An event with its settings and its `apply` function.

    Error messages begin with `label`. `position` is the index of the event among all events of the environment.
    `rng.fold_in` mixes this index into the keys, so that each event draws different values.
    """

    label: str
    mode: str
    interval_step: int
    position: int
    apply: Apply


def _fields(state: TensorDictBase) -> dict[str, Tensor]:
    """Map the dotted name of each tensor in a state to the tensor."""
    return {".".join(k) if isinstance(k, tuple) else k: x for k, x in state.items(True, True)}


def _event_fields(env: Env, state: TensorDict) -> TensorDict:
    """Return a copy of the fields that an event may change. `obs` is included only if `env.observe` is the default."""
    derived = () if env.observe is last_obs else ("obs",)
    return state.exclude(*_HIDDEN, *derived).clone()


def _apply_event(env: Env, event: _Event, state: TensorDict, keys: Tensor, selected: Tensor) -> TensorDict:
    """Apply an event to the environments that `selected` (bool `[*B]`) marks, and recompute their observations."""
    event_keys = rng.fold_in(keys, event.position)
    after = state.copy().update(event.apply(_event_fields(env, state), event_keys))
    return env.observed_where(after, selected).where(selected, state)


def make_event(event: EventConfig, scene: Any, label: str) -> Apply:
    """Return the `apply` function of an event. If the event's `make` takes a second argument, `make` receives `scene`.

    Raises: ConfigError if the event needs a scene and `scene` is None, or if its settings do not fit the scene. The
        message begins with `label`.
    """
    make = lookup("event", event.func).make
    needs_scene = len(signature(make).parameters) > 1
    if needs_scene and scene is None:
        fault = "changes the scene of a MuJoCo task, but this environment has no scene"
        raise ConfigError(f"{label}: {fault}; remove the event")
    try:
        return make(event.params, scene) if needs_scene else make(event.params)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None


def check_event(label: str, apply: Apply, before: TensorDict, keys: Tensor) -> None:
    """Raise ConfigError unless an event returns a state with the same fields, dtypes and shapes as `before`.

    If `apply` raises ConfigError, `check_event` raises the error again. Every error message begins with `label`.
    """
    names = ", ".join(sorted(_fields(before)))
    try:
        after = apply(before.clone(), keys)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    if not isinstance(after, TensorDictBase):
        raise ConfigError(f"{label}: returns {type(after).__name__}, expected the state, a TensorDict with {names}")
    old, new = (
        {k: f"{x.dtype} {list(x.shape)}".removeprefix("torch.") for k, x in _fields(s).items()} for s in (before, after)
    )
    for name in sorted(old.keys() | new.keys()):
        actual, expected = new.get(name, "absent"), old.get(name, "absent")
        if actual != expected:
            fault = f"field {name!r} is {actual} after the event, expected {expected}"
            raise ConfigError(f"{label}: {fault}; return the same fields that the event receives: {names}")


def lowered_gap(gap: int, events: Mapping[str, EventConfig], steps_per_action: int = 1) -> int:
    """Return the minimum of `gap` and of every `min_truncation_gap` that an event declares (see `with_events`).

    `gap` and the result count actions. The gaps of the events count environment steps, and are divided by
    `steps_per_action` and rounded up.
    """
    declared = [getattr(event.params, "min_truncation_gap", None) for event in events.values()]
    return min((gap, *(-(-steps // steps_per_action) for steps in declared if steps is not None)))


def with_events(env: Env, events: Mapping[str, EventConfig], where: str = "trainer.events") -> Env:
    """Add events to an environment that is wrapped by `auto_reset`.

    The mode of an event determines when the event happens:

    startup: The event draws its values once, at `reset`. Each later episode starts from a new state, so the event is
        applied again with the same key.
    reset: The event happens at the start of every episode, after the startup events, with a new key each time.
    interval: The event happens before every `interval_step`-th step of an environment. Steps are counted from `reset`.
        The policy observes the effect of the event after this step.

    Events that happen at the same time are applied in the order of their names. Event keys are derived from the keys of
    the environments. Environments with equal keys, as in a GRPO group, therefore get equal events. The environment's
    own random draws are the same with and without events. `reset` draws the startup events again, and `restart` keeps
    the startup events.

    The state gains a TensorDict `events` with two int64 fields of shape `[*B]`. `count` is the number of steps since
    `reset`, and `key` is the key of the startup events. Events cannot change the fields reward, terminated, truncated,
    info, mask, executed, final_obs, elapsed and elapsed_chunks. After an event, `env.observe_where` or `env.observe`
    recomputes the observation. Events can change the field obs only if `env.observe` is the default, which returns this
    field.

    An event may change a field so that the environment truncates episodes earlier. The config class of such an event
    needs a property `min_truncation_gap`, the first environment step that may truncate an episode. The gap of the
    returned environment is the smallest gap among `env` and the events, in actions. Events cannot shorten the limit of
    `time_limit`, because its counters are hidden from events.

    The lengths in the settings of the events are multiplied by `env.scale`.

    If `events` is empty, `env` itself is returned. Error messages begin with the config section `where` and the name of
    the event.

    Raises: ConfigError if there are events and `env` is not pure, if an event needs a scene that `env` lacks, or if the
        settings of an event do not fit the scene. The returned `reset` raises ConfigError if an event adds or removes a
        field, changes a field's dtype or shape, or does not fit the state. `reset` raises ValueError if `auto_reset` is
        missing.

    >>> from ecrl.envs import auto_reset, make_env
    >>> push = EventConfig.model_validate({"func": "randomize_field", "mode": "reset", "params":
    ...     {"field": "obs", "low": [0, 0, 0.1, 0], "high": [0, 0, 0.1, 0]}})
    >>> env = with_events(auto_reset(make_env("cartpole")), {"tilt": push})
    >>> env.reset(torch.arange(2))["obs"]
    tensor([[0.0000, 0.0000, 0.1000, 0.0000],
            [0.0000, 0.0000, 0.1000, 0.0000]])
    """
    ready = []
    for position, (name, event) in enumerate(sorted(events.items())):
        label = term_text(where, name, event.func)
        if not env.is_pure:
            reason = "events change tensors, but part of the state of this environment is not in tensors"
            raise ConfigError(f"{label}: {reason}; remove the event or use a tensor environment")
        event = event.model_copy(update={"params": scale_lengths(event.params, env.scale)})
        ready.append(_Event(label, event.mode, event.interval_step, position, make_event(event, env.scene, label)))
    if not events:
        return env
    gap = lowered_gap(env.min_truncation_gap, events, env.steps_per_action)
    return _with_events(replace(env, min_truncation_gap=gap), tuple(ready))


def restart(env: Env, state: TensorDict, keys: Tensor) -> TensorDict:
    """Start a new episode in every environment, with the startup events and the event counters of `state`.

    An environment that is not pure is reset without being closed.
    """
    if not env.is_pure or "events" in state:
        # given the old state, `reset` keeps the startup events or the open environments of this state
        return cast(Any, env.reset)(keys, state)
    return env.carry_over(env.reset(keys), state)


@cache
def _with_events(env: Env, events: tuple[_Event, ...]) -> Env:
    startup, at_reset, interval = ([e for e in events if e.mode == mode] for mode in ("startup", "reset", "interval"))

    def start(state: TensorDict, startup_key: Tensor, keys: Tensor, selected: Tensor) -> TensorDict:
        for event in (*startup, *at_reset):
            state = _apply_event(env, event, state, startup_key if event.mode == "startup" else keys, selected)
        return state

    def reset(keys: Tensor, ended: TensorDict | None = None) -> TensorDict:
        state, key = env.reset(keys), rng.fold_in(keys, rng.EVENT)
        state = state if ended is None else env.carry_over(state, ended)
        if "final_obs" not in state:
            raise ValueError("with_events needs an environment that resets itself; use with_events(auto_reset(env))")
        for event in events:
            check_event(event.label, event.apply, _event_fields(env, state), key)
        everyone = torch.ones(keys.shape, dtype=torch.bool, device=keys.device)
        first = TensorDict({"count": torch.zeros_like(keys), "key": key}, keys.shape)
        record = first if ended is None else cast(TensorDict, ended["events"]).copy()
        return start(state, record["key"], key, everyone).copy().set("events", record)

    def draw(keys: Tensor) -> TensorDict:
        return TensorDict({"env": env.draw(keys), "event": rng.fold_in(keys, rng.EVENT)}, keys.shape)

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        record, state = cast(TensorDict, state["events"]), state.exclude("events")
        count = record["count"] + 1
        for event in interval:
            state = _apply_event(env, event, state, noise["event"], count % event.interval_step == 0)
        after = env.step(state, action, noise["env"])
        after = start(after, record["key"], noise["event"], after["terminated"] | after["truncated"])
        return after.copy().set("events", record.copy().set("count", count))

    return replace(env, reset=reset, step=step, draw=draw)


_Number = Annotated[float, Field(ge=-1e38, le=1e38)]
_List = Annotated[tuple[_Number, ...], Field(strict=False, min_length=1), LIST]
_Numbers = Annotated[Annotated[_Number, NUMBER] | _List, by_kind("a number or a list of numbers")]


class RandomizeFieldConfig(ConfigModel):
    """Settings of `randomize_field`: a state field, the range of a random draw, and what the draw does to the field.

    If `low` equals `high`, every draw has this value.
    """

    field: str = Field(description='dotted name of a float field of the env state, such as "obs" or "angle"')
    low: _Numbers = Field(description="lowest draw: one value, or one value per element of the field")
    high: _Numbers = Field(description="highest draw: one value, or one value per element of the field")
    operation: Literal["set", "add", "scale"] = Field(
        "set", description="set: replace the field by the draw; add: add the draw; scale: multiply by the draw"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "RandomizeFieldConfig":
        low, high = (x if isinstance(x, tuple) else (x,) for x in (self.low, self.high))
        if len(low) != len(high) and 1 not in (len(low), len(high)):
            raise ValueError(f"low has {len(low)} values, but high has {len(high)}; give one per element of the field")
        length = max(len(low), len(high))
        for a, b in zip(low * (length // len(low)), high * (length // len(high)), strict=True):
            if a > b:
                raise ValueError(f"low {a} is above high {b}; give the smaller value as low")
        return self


_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "set": lambda x, draw: draw,
    "add": lambda x, draw: x + draw,
    "scale": lambda x, draw: x * draw,
}


def _bound(name: str, value: float | tuple[float, ...], field: str, like: Tensor, shape: torch.Size) -> Tensor:
    """Return `low` or `high` as a tensor that broadcasts over a field of shape `shape`.

    Raises: ConfigError if `value` is a list that does not have one value per element of the field.
    """
    if not isinstance(value, tuple):
        return torch.tensor(value, dtype=like.dtype, device=like.device)
    if len(value) != shape.numel():
        raise ConfigError(
            f"{name} has {len(value)} values, but field {field!r} has {shape.numel()} elements; give one value for each"
        )
    return torch.tensor(value, dtype=like.dtype, device=like.device).reshape(shape)


@register_event("randomize_field")
def randomize_field(cfg: RandomizeFieldConfig) -> Apply:
    """Replace, shift or scale a field of the environment's state by an independent random draw per element.

        draw = low + (high - low) u,    u uniform over the multiples of 2**-24 in [0, 1)
        x'   = draw, x + draw or x draw, for the operations set, add and scale

    Raises: ConfigError if the field is unknown or is not a float tensor, or if a list of bounds does not have one value
        per element of the field.
    """

    def apply(state: TensorDict, keys: Tensor) -> TensorDict:
        known = _fields(state)
        if cfg.field not in known:
            raise ConfigError(f"params.field: unknown field {cfg.field!r}; {did_you_mean(cfg.field, known)}")
        x = known[cfg.field]
        if not x.is_floating_point():
            raise ConfigError(f"params.field: {cfg.field!r} is {x.dtype}, expected a float field")
        shape = x.shape[keys.ndim :]
        u = rng.uniform(keys, shape).to(torch.promote_types(x.dtype, torch.float32))
        low, high = (_bound(f"params.{n}", getattr(cfg, n), cfg.field, u, shape) for n in ("low", "high"))
        draw = (low + (high - low) * u).to(x.dtype)
        return state.copy().set(tuple(cfg.field.split(".")), _OPERATIONS[cfg.operation](x, draw))

    return apply
