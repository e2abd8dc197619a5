"""Names to parts: `name -> (Config, make)` for environments, policies, algorithms, networks and events.

A `make` function is registered by decorating it; the annotation of its first parameter is its Config:

    @register_env("my_task")
    def my_task(cfg: MyTaskConfig) -> Env: ...

Making is memoised by config, so equal configs give the same object and compile once.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple, get_type_hints

BUILTIN = ("ecrl.envs", "ecrl.policies", "ecrl.algorithms")
"""Packages that register the built-in parts; imported at the first look-up, never from below."""


class Entry(NamedTuple):
    """A registered part: the class of its config, and the function that makes it from one."""

    config: type
    make: Callable[..., Any]


_ENTRIES: dict[str, dict[str, Entry]] = {kind: {} for kind in ("env", "policy", "algorithm", "network", "event")}


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known name if there is one, else all of them.

    >>> did_you_mean("sede", ["seed", "device"]), did_you_mean("x", ["seed", "device"])
    ("did you mean 'seed'?", 'known: device, seed')
    """
    names = sorted(known)
    near = get_close_matches(str(name).lower(), names, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}"


def _register(kind: str, name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    def decorate(make: Callable) -> Callable:
        if name in _ENTRIES[kind] and not override:
            raise ValueError(f"{kind} {name!r} is already registered; pass override=True to replace it")
        first = next(iter(signature(make).parameters), None)
        config = get_type_hints(make).get(first) if first else None
        if not isinstance(config, type) or not getattr(config, "model_config", {}).get("frozen"):
            raise TypeError(
                f"{kind} {name!r}: annotate the first parameter of {make.__name__} with its frozen Config model"
            )
        _ENTRIES[kind][name] = Entry(config, cache(make))
        return make

    return decorate


def register_env(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Decorator: register `make(cfg) -> Env` under `name`. A taken name raises ValueError unless `override`."""
    return _register("env", name, override=override)


def register_policy(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Decorator: register `make(cfg, observation_space, action_space) -> Policy` under `name`."""
    return _register("policy", name, override=override)


def register_algorithm(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Decorator: register `make(cfg) -> Algorithm` under `name`."""
    return _register("algorithm", name, override=override)


def register_network(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Decorator: register `make(cfg, inputs, outputs) -> nn.Module` under `name`, for `{"type": name}` networks."""
    return _register("network", name, override=override)


def register_event(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Decorator: register `make(cfg) -> (env state, keys) -> env state` under `name`, for `trainer.events`."""
    return _register("event", name, override=override)


@cache
def _import_builtin() -> None:
    for module in BUILTIN:
        import_module(module)


def registered(kind: str) -> tuple[str, ...]:
    """The known names of a kind: "env", "policy", "algorithm", "network" or "event".

    >>> "cartpole" in registered("env")
    True
    """
    if kind not in _ENTRIES:
        raise ValueError(f"no registry {kind!r}; {did_you_mean(kind, _ENTRIES)}")
    _import_builtin()
    return tuple(sorted(_ENTRIES[kind]))


def lookup(kind: str, name: str) -> Entry:
    """The entry of a name; an unknown one raises KeyError with the known names and the nearest.

    >>> lookup("env", "cartpol")
    Traceback (most recent call last):
    KeyError: "unknown env 'cartpol'; did you mean 'cartpole'?"
    """
    known = registered(kind)
    if name not in known:
        raise KeyError(f"unknown {kind} {name!r}; {did_you_mean(name, known)}")
    return _ENTRIES[kind][name]
