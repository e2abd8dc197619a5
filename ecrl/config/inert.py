"""Keys of EmbodiChain's config files that have no meaning here: each is removed with a warning that names it.

The keys describe EmbodiChain's simulator (window, renderer, scene) or its data sets. A key of `env.cfg` is inert only
if the environment's Config does not have it. An event is inert only if the environment has no scene and no user has
registered an event of that name.
"""

from collections.abc import Iterator
from typing import Any, get_args

from ecrl.config.model import ConfigModel, Fault, Loc, known_keys
from ecrl.registry import Entry, lookup, registered

_WINDOW, _RENDERER, _GPU = "no simulator window", "no choice of renderer", "trainer.device chooses the GPU"
_SCENE, _ENGINE = "this environment has its own scene", "this environment has its own physics"

INERT = {
    "trainer.headless": _WINDOW,
    "trainer.renderer": _RENDERER,
    "trainer.enable_rt": "no ray tracing",
    "trainer.gpu_id": _GPU,
    "env.cfg.headless": _WINDOW,
    "env.cfg.visualization": _WINDOW,
    "env.cfg.renderer": _RENDERER,
    "env.cfg.render_cfg": _RENDERER,
    "env.cfg.enable_rt": "no ray tracing",
    "env.cfg.device": "trainer.device is also the device of the environments",
    "env.cfg.gpu_id": _GPU,
    "env.cfg.robot": _SCENE,
    "env.cfg.control_parts": _SCENE,
    "env.cfg.sensor": _SCENE,
    "env.cfg.light": _SCENE,
    "env.cfg.background": _SCENE,
    "env.cfg.rigid_object": _SCENE,
    "env.cfg.rigid_object_group": _SCENE,
    "env.cfg.articulation": _SCENE,
    "env.cfg.arena_space": _SCENE,
    "env.cfg.physics_config": _ENGINE,
    "env.cfg.sim_steps_per_control": _ENGINE,
    "env.cfg.target_control_frequency": _ENGINE,
    "env.cfg.max_episodes": "it limits the episodes of a data set; training counts iterations",
    "env.cfg.dataset": "no data sets are recorded",
}
"""Key -> the reason why it has no meaning here."""

INERT_EVENTS = dict.fromkeys(
    ("record_camera_data", "record_camera_data_async"), "this environment has no scene to film"
)
"""`func` of an event under trainer.events -> the reason why it has no meaning without a scene."""


def part_entry(kind: str, section: Any) -> Entry | None:
    """Return the registered part that a section names, or None. `gymnasium:<id>` is the part `gymnasium`."""
    name = section.get("name") if isinstance(section, dict) else None
    try:
        return lookup(kind, name.partition(":")[0]) if isinstance(name, str) else None
    except KeyError:
        return None


def _is_own_event(func: str) -> bool:
    """Return True unless a user registered an event under this name."""
    return func not in registered("event") or lookup("event", func).config.__module__.startswith("ecrl.")


def _inert_events(events: Any, entry: Entry | None) -> list[Fault]:
    if entry and "rigid_object" in known_keys(entry.config):  # it has a scene
        return []
    faults = []
    for use, named in events.items() if isinstance(events, dict) else ():
        for name, event in named.items() if isinstance(named, dict) else ():
            func = event.get("func") if isinstance(event, dict) else None
            if isinstance(func, str) and func in INERT_EVENTS and _is_own_event(func):
                faults.append((("trainer", "events", use, name), f"{func}: {INERT_EVENTS[func]}"))
    return faults


def sections_in(annotation: Any) -> Iterator[type[ConfigModel]]:
    """Yield the config models in a field's annotation."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


def inert_in(model: type, data: Any, path: Loc = ()) -> list[Fault]:
    """List the keys of a section and its subsections that their models declare as inert.

    >>> class Shape(ConfigModel):
    ...     inert = {"texture": "shapes have a color"}
    >>> inert_in(Shape, {"texture": "wood"})
    [(('texture',), 'shapes have a color')]
    """
    if isinstance(data, list | tuple):
        return [fault for i, part in enumerate(data) for fault in inert_in(model, part, (*path, i))]
    if not isinstance(data, dict) or not issubclass(model, ConfigModel):
        return []
    faults = [((*path, key), model.inert[key]) for key in data if key in model.inert]
    for name, field in model.model_fields.items():
        for section in sections_in(field.annotation):
            parts = data.get(name)
            if "dict" in str(field.annotation) and isinstance(parts, dict):  # sections by name
                faults += [f for key, part in parts.items() for f in inert_in(section, part, (*path, name, key))]
            else:
                faults += inert_in(section, parts, (*path, name))
    return faults


def inert_keys(data: dict[str, Any]) -> list[Fault]:
    """List the keys of a config that have no meaning here, each with the reason.

    >>> inert_keys({"trainer": {"seed": 1, "enable_rt": False}, "env": {"name": "cartpole", "cfg": {"robot": {}}}})
    [(('trainer', 'enable_rt'), 'no ray tracing'), (('env', 'cfg', 'robot'), 'this environment has its own scene')]
    """
    trainer, env = data.get("trainer"), data.get("env")
    entry, faults = part_entry("env", env), []
    if isinstance(trainer, dict):
        faults += [(("trainer", key), INERT[f"trainer.{key}"]) for key in trainer if f"trainer.{key}" in INERT]
        faults += _inert_events(trainer.get("events"), entry)
    cfg = env.get("cfg") if isinstance(env, dict) else None
    if entry and isinstance(cfg, dict):
        part_faults = inert_in(entry.config, cfg, ("env", "cfg"))
        unknown = [key for key in cfg if key not in known_keys(entry.config) | {path[2] for path, _ in part_faults}]
        faults += part_faults
        faults += [(("env", "cfg", key), INERT[f"env.cfg.{key}"]) for key in unknown if f"env.cfg.{key}" in INERT]
    return faults
