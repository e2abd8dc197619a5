"""Register the components of runs, such as environments, policies, algorithms and networks, under names.

Each name maps to a config class and a function `make`. A decorator registers `make`, and reads the config class from
the annotation of the first parameter:

    @register_env("my_task")
    def my_task(cfg: MyTaskConfig) -> Env: ...

Runs with equal configs share compiled functions, because the components of these runs have equal functions:

- An algorithm consists of module-level functions and of settings that are compared by value. Each call of `make`
  builds a new algorithm.
- The functions of an environment, an event, an expert or a term (an action, an observation or a reward of a MuJoCo
  task) may read every field of their config. The registry calls `make` once for each config, and returns the same
  object for equal configs.
- The functions of a policy may read every config field except the fields marked with `InitOnly`. If two configs differ
  only in `InitOnly` fields, the two policies share all functions except `init` and `init_frozen`.

An installed package can register its components automatically. The package declares an entry point in the group
`ecrl.plugins`. The entry point names the module that registers the components. The group `ecrl.vla_backends` is for
packages that only register backends of the policy `vla`.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import entry_points
from inspect import signature
from typing import Any, NamedTuple, cast, get_type_hints
from warnings import warn

from ecrl.errors import UserError

BUILTIN = {
    "algorithm": {
        name: f"ecrl.algorithms.{name}"
        for name in ("apg", "bc", "ddpg", "dqn", "fast_sac", "fast_td3", "grpo", "ppo", "pqn", "sac", "td3")
    },
    "env": {
        "cartpole": "ecrl.envs.cartpole",
        "gymnasium": "ecrl.envs.gymnasium.env",
        "pendulum": "ecrl.envs.pendulum",
        "point_mass": "ecrl.envs.point_mass",
        "PointMassRL": "ecrl.envs.point_mass",
        "repeat_previous": "ecrl.envs.memory_tasks",
        "t_maze": "ecrl.envs.memory_tasks",
        **{
            f"minatar_{game}": f"ecrl.envs.minatar.{game}"
            for game in ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
        },
        **{f"probe_{name}": "ecrl.envs.probes" for name in ("action", "constant", "delay", "match", "observation")},
        **{
            f"{task}RL": "ecrl.envs.mujoco.tasks"
            for task in ("CartPole", "OpenDrawer", "PickCube", "PushCube", "Reach", "ReachColor", "StackCube")
        },
    },
    "expert": {
        "cartpole": "ecrl.envs.cartpole",
        **{
            f"{task}RL": "ecrl.envs.mujoco.tasks"
            for task in ("OpenDrawer", "PickCube", "PushCube", "Reach", "ReachColor", "StackCube")
        },
    },
    "network": {
        "cnn": "ecrl.policies.convolutions",
        "fused": "ecrl.policies.fused",
        "impala": "ecrl.policies.convolutions",
        "keypoints": "ecrl.policies.convolutions",
        "mlp": "ecrl.policies.mlp",
    },
    "policy": {
        "actor_critic": "ecrl.policies.actor_critic",
        "actor_only": "ecrl.policies.actor_critic",
        "categorical_actor_critic": "ecrl.policies.twin_critic",
        "deterministic_actor_critic": "ecrl.policies.twin_critic",
        "q_network": "ecrl.policies.q_network",
        "recurrent": "ecrl.policies.recurrent",
        "squashed_actor_critic": "ecrl.policies.twin_critic",
        "vla": "ecrl.policies.vla",
    },
    "robot": {},  # built-in robots need no registration
    "vla_backend": {
        "builtin": "ecrl.policies.vla_builtin",
        "openvla": "ecrl.policies.openvla",
        "pi0": "ecrl.policies.pi0",
    },
}
"""Maps each built-in component of these kinds to the module that registers the component.

The registry imports the module when the component is first looked up, or when a user registers a component of the same
name. A run therefore imports only what it needs. Before an error for an unknown name, the registry imports all modules.
"""

_EVENTS_AND_TERMS = ("ecrl.envs.events", "ecrl.envs.mujoco.tasks")
"""Modules that register the built-in events, actions, observations and rewards.

To look up a name, the registry imports the modules in this order until it finds the name.
"""

PLUGINS = ("ecrl.plugins", "ecrl.vla_backends")
"""Entry-point groups of the plugins. The registry imports the plugins before the first lookup."""


class Entry(NamedTuple):
    """Registry entry of a component: its config class, and the function that creates the component from a config."""

    config: type
    make: Callable[..., Any]


class InitOnly:
    """Marker for a config field that affects only the initial values of a policy's parameters.

    Changing a marked field causes no recompilation. The `make` that a policy passes to `ecrl.module_policy` or
    `ecrl.policies.networks.pure` may also read a marked field, if the `forward` of the module does not depend on the
    field.

    >>> from typing import Annotated
    >>> from pydantic import BaseModel
    >>> class MyPolicyConfig(BaseModel, frozen=True):
    ...     hidden: int = 64
    ...     initial_std: Annotated[float, InitOnly()] = 1.0
    >>> _shape_of(MyPolicyConfig(initial_std=0.5)) == _shape_of(MyPolicyConfig())
    True
    """


def is_init_only(field: Any) -> bool:
    """Return True if a field of a Config model is marked with `InitOnly`."""
    return any(isinstance(x, InitOnly) for x in field.metadata)


def _shape_of(value: Any) -> Hashable:
    """Return a hashable key that depends on all fields of a config except the fields marked with `InitOnly`."""
    if isinstance(value, list | tuple):
        return tuple(map(_shape_of, value))
    if isinstance(value, dict):
        return tuple(sorted((key, _shape_of(part)) for key, part in value.items()))
    if (known := getattr(type(value), "model_fields", None)) is None:
        return type(value), repr(value) if isinstance(value, float) else value  # distinguishes 0.0 from -0.0
    shaping = (name for name, field in known.items() if not is_init_only(field))
    return type(value), tuple((name, _shape_of(getattr(value, name))) for name in shaping)


_KINDS = ("env", "policy", "algorithm", "network", "event", "action", "observation", "reward")
_KINDS += ("expert", "vla_backend", "robot")
_KINDS_WITH_NAME = ("policy", "algorithm")
"""The kinds of components that have a field `name`."""
_IN_POLICIES = ("network", "vla_backend", "policy")
"""The kinds of components that policies may contain. A policy may wrap another policy."""
_IN_ENVS = ("event", "action", "observation", "reward", "robot", "env")
"""The kinds of components that environments may contain. An environment may wrap another environment."""
_ENTRIES: dict[str, dict[str, Entry]] = {kind: {} for kind in _KINDS}


_ADVICE: dict[str, dict[str, str]] = {kind: {} for kind in _KINDS}
"""For each kind, a dict from names that exist in other libraries, but not in ecrl, to advice."""
IMPORT_FIRST = "import its module first: import MODULE in Python, --import MODULE in a shell"
"""Advice for a user whose own component is not registered yet."""
_FIRST_NAMES = 3

_FAILED_PLUGINS: list[str] = []  # error messages of plugins that failed to import
_IMPORTED_GROUPS: list[str] = []  # filled before the import, so that a lookup by a plugin does not repeat it


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Suggest the known name that is most similar to `name`, or list all known names, as text for an error message.

    >>> did_you_mean("sede", ["seed", "device"]), did_you_mean("x", ["seed", "device"])
    ("did you mean 'seed'?", 'known: device, seed')
    """
    names = sorted(known)
    near = nearest(name, names)
    return f"known: {', '.join(names) or 'none'}" if near is None else f"did you mean {near!r}?"


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`, ignoring case, or None if no known name is similar.

    >>> nearest("PushCube", ["PushCubeRL", "pendulum"]), nearest("x", ["seed"])
    ('PushCubeRL', None)
    """
    names = {one.lower(): one for one in sorted(known, reverse=True)}
    near = get_close_matches(str(name).lower(), sorted(names), n=1, cutoff=0.6)
    return names[near[0]] if near else None


def _with_name(make: Callable, name: str) -> Callable:
    """Wrap `make` so that its result stores the registered name in the field `name`, for use in error messages."""

    @wraps(make)
    def named(*args: Any, **kwargs: Any) -> Any:
        part = make(*args, **kwargs)
        return replace(cast(Any, part), name=name) if is_dataclass(part) else part

    return named


def _sharing_functions(make: Callable) -> Callable:
    """Wrap a policy's `make` so that policies share functions if their configs differ only in `InitOnly` fields.

    The policies share every field that `==` compares. Each policy keeps its own fields with `compare=False`.
    """
    first: dict[Hashable, tuple[Any, Any]] = {}

    @wraps(make)
    def shared(cfg: Any, *spaces: Any) -> Any:
        key = _shape_of(cfg), spaces
        if key not in first:
            first[key] = cfg, make(cfg, *spaces)
        known, part = first[key]
        if known == cfg:
            return part
        own = make(cfg, *spaces)
        return replace(part, **{one.name: getattr(own, one.name) for one in fields(own) if not one.compare})

    cast(Any, shared).cache_clear = first.clear
    return shared


def _register(kind: str, name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    def decorate(make: Callable) -> Callable:
        own = f"{getattr(make, '__module__', None)}."
        if not own.startswith(f"{BUILTIN.get(kind, {}).get(name, 'ecrl')}."):
            _import_builtin(kind, name)  # prevents a user from taking the name of a built-in component
        if name in _ENTRIES[kind] and not override:
            raise ValueError(f"{kind} {name!r} is already registered; pass override=True to replace it")
        first = next(iter(signature(make).parameters), None)
        config = get_type_hints(make).get(first) if first else None
        if not isinstance(config, type) or not getattr(config, "model_config", {}).get("frozen"):
            raise TypeError(
                f"{kind} {name!r}: annotate the first parameter of {make.__name__} with its frozen Config model"
            )
        made = _with_name(make, name) if kind in _KINDS_WITH_NAME else make
        # Networks are not memoised, because two policies with one network object would share its weights. The policy
        # `vla` memoises the policies of its backends.
        memoised = {"network": made, "vla_backend": made, "algorithm": made, "policy": _sharing_functions(made)}
        _ENTRIES[kind][name] = Entry(config, memoised[kind] if kind in memoised else cache(made))
        if override:  # memoised policies and environments still contain the old component
            containers = {"policy": _IN_POLICIES, "env": _IN_ENVS}
            for container in (_ENTRIES[name] for name, kinds in containers.items() if kind in kinds):
                for part in container.values():
                    cast(Any, part.make).cache_clear()
        return make

    return decorate


def register_env(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that registers the function `make(cfg) -> Env` under `name`.

    The decorator raises ValueError if the name is already registered, unless `override` is True. It raises TypeError
    unless the annotation of `cfg` is a frozen Config model, such as a subclass of `ecrl.ConfigModel`.
    """
    return _register("env", name, override=override)


def register_policy(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that registers `make(cfg, observation_space, action_space) -> Policy` under `name`."""
    return _register("policy", name, override=override)


def register_algorithm(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that registers the function `make(cfg) -> Algorithm` under `name`."""
    return _register("algorithm", name, override=override)


def register_network(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that registers `make(cfg, space, outputs) -> nn.Module` for network configs of type `name`.

    `space` is the space of the observations that the network reads. The module's `forward` receives a batch of these
    observations in the same layout as a module of `ecrl.module_policy`. The result of `forward` has shape
    `[B, outputs]`. `ecrl.policies.flatten` converts observations to float features.
    """
    return _register("network", name, override=override)


def register_vla_backend(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that registers the function `make` as a backend of the policy `vla`.

    `make(cfg, observation_space, action_space, policy_cfg)` returns a Policy. `cfg` is the section `policy.vla`, whose
    Config model is a subclass of `ecrl.policies.VLAConfig`. `action_space` is a Box with finite bounds, of shape `[A]`
    or `[k, A]`. `policy_cfg` is the section `policy`, with settings such as `bf16`.
    """
    return _register("vla_backend", name, override=override)


def register_event(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that registers the function `make` as an event for `trainer.events`.

    The result of `make(cfg)` is a function `(env state, keys) -> env state`. If `make` has two parameters, `make` takes
    the config and the simulation of a MuJoCo task, so the event works only with MuJoCo tasks. The config of a MuJoCo
    task can also contain the event in its own `events`.
    """
    return _register("event", name, override=override)


def register_action(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that registers `make(cfg, sim) -> ActionTerm` for the `actions` of a MuJoCo task."""
    return _register("action", name, override=override)


def register_observation(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that registers the function `make` for the `observations` of a MuJoCo task.

    The result of `make(cfg, sim)` is a function `(state, entry) -> entry` that computes an entry of the observation. If
    the term's `mode` is "modify", the argument `entry` is the existing entry. If the `mode` is "add", `entry` is None.
    """
    return _register("observation", name, override=override)


def register_reward(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that registers the function `make` for the `rewards` of a MuJoCo task.

    The result of `make(cfg, sim)` is a function `(before, after) -> reward` of the states before and after a step.
    """
    return _register("reward", name, override=override)


def register_expert(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that registers the function `make` as the scripted expert of the environment `name`.

    The result of `make(cfg, env)` is a pure function `(state, keys) -> action`. `state` is a batch of states of `env`,
    `[*B]`, and `keys`, `[*B]`, has one random key for each state. `cfg` has the settings of the expert, such as the
    noise that it adds to its actions. If `make` has three parameters, the third parameter takes the section `env.cfg`.
    `ecrl.envs.make_expert` makes experts.
    """
    return _register("expert", name, override=override)


def register_robot(name: str, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that registers the function `make(cfg) -> RobotModel` as a robot of MuJoCo tasks.

    `cfg` is the section `env.cfg.robot`, whose key `robot_type` is `name`. Annotate `cfg` with
    `ecrl.envs.mujoco.scene.config.RobotConfig`. The result is an `ecrl.envs.mujoco.robots.model.RobotModel`.
    """
    return _register("robot", name, override=override)


def _import_builtin(kind: str, name: str) -> None:
    """Import the module that registers the built-in component `name`, if there is one.

    For an event or a term, import the modules of `_EVENTS_AND_TERMS` in order until one of them registers the name.
    """
    if kind in BUILTIN:
        if name in BUILTIN[kind]:
            import_module(BUILTIN[kind][name])
        return
    for module in _EVENTS_AND_TERMS:
        if name not in _ENTRIES.get(kind, ()):
            import_module(module)


def _import_all_builtin() -> None:
    for modules in (*(modules.values() for modules in BUILTIN.values()), _EVENTS_AND_TERMS):
        for module in modules:
            import_module(module)


def _import_plugins() -> None:
    """Import the installed plugins, only once. Warn if a plugin cannot be imported."""
    if _IMPORTED_GROUPS:
        return
    _IMPORTED_GROUPS.extend(PLUGINS)
    for point in (point for group in PLUGINS for point in entry_points(group=group)):
        try:
            point.load()
        except Exception as error:  # a plugin may raise any error, but must not break other plugins
            package = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            _FAILED_PLUGINS.append(
                f"plugin {point.name!r} ({point.value}, from {package}) cannot be imported: {reason}"
            )
            warn(f"{_FAILED_PLUGINS[-1]}; fix or uninstall it", RuntimeWarning, stacklevel=2)


def import_user_module(module: str) -> None:
    """Import the user's module that the option `--import` names. The module registers components.

    Raises: UserError if the name is empty or the module does not exist. Errors inside the module are raised unchanged.
    """
    if not module:
        raise UserError("--import (nothing): the name is empty; expected the name of a module to import")
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"--import {module}: {error}; expected the name of a module to import") from None


def user_modules(config: str) -> list[str]:
    """List the modules outside ecrl that registered components whose names occur in a config's JSON text.

    Another process must import the listed modules before it loads the config.

    >>> user_modules('{"env": {"name": "cartpole"}}')
    []
    """
    entries = [entry for part in _ENTRIES.values() for name, entry in part.items() if json.dumps(name) in config]
    modules = {str(entry.make.__module__) for entry in entries}
    return sorted(m for m in modules if m != "__main__" and m.partition(".")[0] != "ecrl")


def registered(kind: str) -> tuple[str, ...]:
    """List all registered names of a kind.

    The kinds are env, policy, algorithm, network, event, action, observation, reward, expert, vla_backend and robot.

    Raises: ValueError for any other kind.

    >>> "cartpole" in registered("env")
    True
    """
    if kind not in _ENTRIES:
        raise ValueError(f"unknown kind of component {kind!r}; {did_you_mean(kind, _ENTRIES)}")
    _import_plugins()
    if kind not in BUILTIN:
        for module in _EVENTS_AND_TERMS:
            import_module(module)
    return tuple(sorted({*_ENTRIES[kind], *BUILTIN.get(kind, ())}))


def first_names(names: Sequence[str]) -> str:
    """Return the first three names of a list and the number of further names, as text.

    >>> first_names(["apg", "bc", "ddpg", "dqn", "ppo"]), first_names(["apg", "bc"])
    ('apg, bc, ddpg and 2 more', 'apg, bc')
    """
    rest = len(names) - _FIRST_NAMES
    return ", ".join(names[:_FIRST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def add_advice(kind: str, advice: dict[str, str]) -> None:
    """Add advice to the errors for unknown names. `advice` maps each name to one line that suggests an alternative."""
    _ADVICE[kind].update(advice)


def advised(kind: str) -> dict[str, str]:
    """Return the advice for names that ecrl does not have, as a dict from name to advice."""
    _import_all_builtin()
    return dict(_ADVICE[kind])


def lookup(kind: str, name: str) -> Entry:
    """Return the registry entry of a component. For an unknown name, raise a KeyError that suggests known names.

    >>> lookup("env", "cartpol")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    KeyError: "unknown env 'cartpol'; did you mean 'cartpole'? If the env is your own, import its module first: ..."
    """
    _import_plugins()
    _import_builtin(kind, name)
    if name not in _ENTRIES.get(kind, ()):
        known = registered(kind)
        _import_all_builtin()  # these modules add advice for names that exist only in other libraries
        if name in _ADVICE[kind]:
            raise KeyError(f"ecrl has no {kind} {name!r}; {_ADVICE[kind][name]}")
        short_name = repr(name if len(name) <= 60 else f"{name[:60]}...")
        nearest = did_you_mean(name, known)
        nearest += f"{'' if nearest.endswith('?') else '.'} If the {kind} is your own, {IMPORT_FIRST}"
        raise KeyError("; ".join([f"unknown {kind} {short_name}", nearest, *_FAILED_PLUGINS]))
    return _ENTRIES[kind][name]
