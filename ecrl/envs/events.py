"""Events: what happens to environments besides their own dynamics, such as randomised worlds, starts and disturbances.

An event is registered as `make(cfg) -> apply`; `apply(state, keys)` gives the state after it happened to every
environment of the batch, a pure function of the state and of one int64 key per environment. When it happens, and to
which environments, is decided here by `where`, so events run inside compiled and vmapped rollouts.
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
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean, lookup, register_event

Apply = Callable[[TensorDict, Tensor], TensorDict]

_NOT_THEIRS = ("reward", "terminated", "truncated", "info", "mask", "final_obs", "elapsed")
"""The outcome of the last step and the clock of the time limit, which events neither see nor change."""


class _Event(NamedTuple):
    """An event of an environment; `position` is its place among the others, which makes its keys its own."""

    told: str
    mode: str
    interval_step: int
    position: int
    apply: Apply


def _fields(state: TensorDictBase) -> dict[str, Tensor]:
    """The leaves of a state under dotted names."""
    return {".".join(k) if isinstance(k, tuple) else k: x for k, x in state.items(True, True)}


def _own(env: Env, state: TensorDict) -> TensorDict:
    """A copy of what the dynamics own, all that an event is given; `obs` is in it unless computed from the rest."""
    derived = () if env.observe is last_obs else ("obs",)
    return state.exclude(*_NOT_THEIRS, *derived).clone()


def _happen(env: Env, event: _Event, state: TensorDict, keys: Tensor, who: Tensor) -> TensorDict:
    """The state after `event` at the environments `who`, observation included."""
    own_keys = rng.fold_in(keys, event.position)
    after = state.copy().update(event.apply(_own(env, state), own_keys))
    return after.set("obs", env.observe(after)).where(who, state)


def made(event: EventConfig, scene: Any, told: str) -> Apply:
    """What a registered event does, made with the scene of a MuJoCo task if it takes one; `told` says which."""
    make = lookup("event", event.func).make
    needs_scene = len(signature(make).parameters) > 1
    if needs_scene and scene is None:
        raise ConfigError(f"{told}: happens to the scene of a MuJoCo task, and this environment has none")
    try:
        return make(event.params, scene) if needs_scene else make(event.params)
    except ConfigError as error:
        raise ConfigError(f"{told}: {error}") from None


def check_event(told: str, apply: Apply, before: TensorDict, keys: Tensor) -> None:
    """Refuse an event that does not fit the state: let it happen, and compare the fields. `told` says which."""
    names = ", ".join(sorted(_fields(before)))
    try:
        after = apply(before.clone(), keys)
    except ConfigError as error:
        raise ConfigError(f"{told}: {error}") from None
    if not isinstance(after, TensorDictBase):
        raise ConfigError(f"{told}: gives {type(after).__name__}, expected the state, a TensorDict with {names}")
    old, new = (
        {k: f"{x.dtype} {list(x.shape)}".removeprefix("torch.") for k, x in _fields(s).items()} for s in (before, after)
    )
    for name in sorted(old.keys() | new.keys()):
        given, expected = new.get(name, "absent"), old.get(name, "absent")
        if given != expected:
            told = f"{told}: gives field {name!r} as {given}, expected {expected}"
            raise ConfigError(f"{told}; an event returns the fields it was given: {names}")


def with_events(env: Env, events: Mapping[str, EventConfig], where: str = "trainer.events") -> Env:
    """Let events happen to an environment that is wrapped by `auto_reset`; without events it is `env` itself.

    Those that happen at one moment do so in the order of their names. Errors name them by their place, `where`.

    startup: once in the life of an environment, at its first reset; where the next episode starts from a fresh state,
        the event is applied to it again with the same key, so that its effect lasts.
    reset: at every start of an episode, the first included, after the startup events, with a new key each time.
    interval: before the n-th step of an environment for n = interval_step, 2 interval_step, ..., counted over its
        life; what the step makes of it is what the policy sees next.

    The state gains `events`: `count`, the steps taken, and `key`, of the startup events, each int64 `[*B]`. The
    observation of a start is recomputed by `env.observe`; reward, terminated, truncated, info, final_obs and elapsed
    stay those of the step. Keys are folded from the environment's own, so equal keys, as in a GRPO group, give equal
    events, and starts and world noise are the same with and without events. `reset` begins a new life, `restart` an
    episode.

    Raises: ConfigError for an environment that is not pure; from `reset`, for an event that adds, drops or reshapes a
        field, and ValueError where `auto_reset` is missing.

    >>> from ecrl.envs import auto_reset, make_env
    >>> push = EventConfig.model_validate({"func": "randomize_field", "mode": "reset", "params":
    ...     {"field": "obs", "low": [0, 0, 0.1, 0], "high": [0, 0, 0.1, 0]}})
    >>> env = with_events(auto_reset(make_env("cartpole")), {"tilt": push})
    >>> env.reset(torch.arange(2))["obs"]
    tensor([[0.0000, 0.0000, 0.1000, 0.0000],
            [0.0000, 0.0000, 0.1000, 0.0000]])
    """
    all_made = []
    for position, (name, event) in enumerate(sorted(events.items())):
        told = term_text(where, name, event.func)
        if not env.is_pure:
            why = "the state of this environment is not in tensors, where events happen"
            raise ConfigError(f"{told}: {why}; remove the event or use a tensor environment")
        all_made.append(_Event(told, event.mode, event.interval_step, position, made(event, env.scene, told)))
    return _with_events(env, tuple(all_made)) if events else env


def restart(env: Env, state: TensorDict, keys: Tensor) -> TensorDict:
    """Start an episode everywhere at once, as `env.reset(keys)`; the startup events and counters of `state` go on."""
    if not env.is_pure or "events" in state:
        return cast(Any, env.reset)(keys, state)  # environments that are open start anew
    return env.carry_over(env.reset(keys), state)


@cache
def _with_events(env: Env, events: tuple[_Event, ...]) -> Env:
    startup, at_reset, interval = ([e for e in events if e.mode == mode] for mode in ("startup", "reset", "interval"))

    def start(state: TensorDict, life_key: Tensor, keys: Tensor, who: Tensor) -> TensorDict:
        for event in (*startup, *at_reset):
            state = _happen(env, event, state, life_key if event.mode == "startup" else keys, who)
        return state

    def reset(keys: Tensor, ended: TensorDict | None = None) -> TensorDict:
        state, key = env.reset(keys), rng.fold_in(keys, rng.EVENT)
        state = state if ended is None else env.carry_over(state, ended)
        if "final_obs" not in state:
            raise ValueError("with_events needs an environment that starts its episodes: with_events(auto_reset(env))")
        for event in events:
            check_event(event.told, event.apply, _own(env, state), key)
        everyone = torch.ones(keys.shape, dtype=torch.bool, device=keys.device)
        born = TensorDict({"count": torch.zeros_like(keys), "key": key}, keys.shape)
        life = born if ended is None else cast(TensorDict, ended["events"]).copy()
        return start(state, life["key"], key, everyone).copy().set("events", life)

    def draw(keys: Tensor) -> TensorDict:
        return TensorDict({"env": env.draw(keys), "event": rng.fold_in(keys, rng.EVENT)}, keys.shape)

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        life, state = cast(TensorDict, state["events"]), state.exclude("events")
        count = life["count"] + 1
        for event in interval:
            state = _happen(env, event, state, noise["event"], count % event.interval_step == 0)
        after = env.step(state, action, noise["env"])
        after = start(after, life["key"], noise["event"], after["terminated"] | after["truncated"])
        return after.copy().set("events", life.copy().set("count", count))

    return replace(env, reset=reset, step=step, draw=draw)


_Number = Annotated[float, Field(ge=-1e38, le=1e38)]
_List = Annotated[tuple[_Number, ...], Field(strict=False, min_length=1), LIST]
_Numbers = Annotated[Annotated[_Number, NUMBER] | _List, by_kind("a number or a list of numbers")]


class RandomizeFieldConfig(ConfigModel):
    """Which field of the env state, drawn how; equal bounds make it certain."""

    field: str = Field(description='dotted name of a float field of the env state, such as "obs" or "angle"')
    low: _Numbers = Field(description="smallest draw; one number, or one per element of the field")
    high: _Numbers = Field(description="largest draw; one number, or one per element of the field")
    operation: Literal["set", "add", "scale"] = Field(
        "set", description="whether the draw replaces the field, is added to it or multiplies it"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "RandomizeFieldConfig":
        low, high = (x if isinstance(x, tuple) else (x,) for x in (self.low, self.high))
        if len(low) != len(high) and 1 not in (len(low), len(high)):
            raise ValueError(f"low has {len(low)} numbers, high {len(high)}; give one per element of the field")
        length = max(len(low), len(high))
        for a, b in zip(low * (length // len(low)), high * (length // len(high)), strict=True):
            if a > b:
                raise ValueError(f"low {a} is above high {b}")
        return self


_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "set": lambda x, draw: draw,
    "add": lambda x, draw: x + draw,
    "scale": lambda x, draw: x * draw,
}


def _bound(name: str, value: float | tuple[float, ...], field: str, like: Tensor, shape: torch.Size) -> Tensor:
    """`low` or `high` as a tensor that broadcasts over the elements, `shape`, of a field."""
    if not isinstance(value, tuple):
        return torch.tensor(value, dtype=like.dtype, device=like.device)
    if len(value) != shape.numel():
        raise ConfigError(f"{name} has {len(value)} numbers, field {field!r} has {shape.numel()} elements")
    return torch.tensor(value, dtype=like.dtype, device=like.device).reshape(shape)


@register_event("randomize_field")
def randomize_field(cfg: RandomizeFieldConfig) -> Apply:
    """Draw a field of the env state anew, or disturb it, each element on its own.

        draw = low + (high - low) u,  u uniform in [0, 1) on the 2**-24 grid;  x' = draw, x + draw or x draw

    Raises: ConfigError naming a field that is unknown or not of floats, or bounds of another length.
    """

    def apply(state: TensorDict, keys: Tensor) -> TensorDict:
        known = _fields(state)
        if cfg.field not in known:
            raise ConfigError(f"params.field: unknown field {cfg.field!r}; {did_you_mean(cfg.field, known)}")
        x = known[cfg.field]
        if not x.is_floating_point():
            raise ConfigError(f"params.field: {cfg.field!r} is {x.dtype}, expected a field of floats")
        shape = x.shape[keys.ndim :]
        u = rng.uniform(keys, shape).to(torch.promote_types(x.dtype, torch.float32))
        low, high = (_bound(f"params.{n}", getattr(cfg, n), cfg.field, u, shape) for n in ("low", "high"))
        draw = (low + (high - low) * u).to(x.dtype)
        return state.copy().set(tuple(cfg.field.split(".")), _OPERATIONS[cfg.operation](x, draw))

    return apply
