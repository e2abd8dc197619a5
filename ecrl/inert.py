"""Keys of EmbodiChain's config files that have no meaning here: each is said once by name and taken out.

They describe its simulator (window, renderer, scene) or its data sets. A key of `env.cfg` counts only for environments
whose Config does not know it, an event only while no event of its name is registered.
"""

from typing import Any

from ecrl.registry import Entry, lookup, registered
from ecrl.strict import Fault, known_keys

_WINDOW, _RENDERER, _GPU = "no simulator window", "no choice of renderer", "trainer.device chooses the GPU"
_SCENE, _ENGINE = "this environment has a scene of its own", "this environment has physics of its own"

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
    "env.cfg.device": "trainer.device is the device of environments too",
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
    "env.cfg.max_episodes": "a number of episodes of data sets; training counts iterations",
    "env.cfg.dataset": "no data sets are recorded",
}
"""Key: why it has no meaning."""

INERT_EVENTS = {
    "record_camera_data": "no cameras",
    "record_camera_data_async": "no cameras",
}
"""`func` of events under trainer.events: why it has no meaning."""


def part_entry(kind: str, section: Any) -> Entry | None:
    """The registered part that a section names, if it does; `gymnasium:<id>` is the part `gymnasium`."""
    name = section.get("name") if isinstance(section, dict) else None
    try:
        return lookup(kind, name.partition(":")[0]) if isinstance(name, str) else None
    except KeyError:
        return None


def _inert_events(events: Any) -> list[Fault]:
    found = []
    for use, named in events.items() if isinstance(events, dict) else ():
        for name, event in named.items() if isinstance(named, dict) else ():
            func = event.get("func") if isinstance(event, dict) else None
            if isinstance(func, str) and func in INERT_EVENTS and func not in registered("event"):
                found.append((("trainer", "events", use, name), f"{func}: {INERT_EVENTS[func]}"))
    return found


def inert_keys(data: dict[str, Any]) -> list[Fault]:
    """Where a config has keys without a meaning, and why each has none.

    >>> inert_keys({"trainer": {"seed": 1, "enable_rt": False}, "env": {"name": "cartpole", "cfg": {"robot": {}}}})
    [(('trainer', 'enable_rt'), 'no ray tracing'), (('env', 'cfg', 'robot'), 'this environment has a scene of its own')]
    """
    trainer, env = data.get("trainer"), data.get("env")
    found: list[Fault] = []
    if isinstance(trainer, dict):
        found += [(("trainer", key), INERT[f"trainer.{key}"]) for key in trainer if f"trainer.{key}" in INERT]
        found += _inert_events(trainer.get("events"))
    entry, cfg = part_entry("env", env), env.get("cfg") if isinstance(env, dict) else None
    if entry and isinstance(cfg, dict):
        unknown = [key for key in cfg if key not in known_keys(entry.config)]
        found += [(("env", "cfg", key), INERT[f"env.cfg.{key}"]) for key in unknown if f"env.cfg.{key}" in INERT]
    return found
