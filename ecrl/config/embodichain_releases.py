"""Translate keys that only some releases of EmbodiChain have. ecrl reads the files of v0.1.2 and of later releases.

- v0.1.0 and v0.1.1 have different keys for the actions and the time limit. ecrl refuses their files.
- Since v0.3.0, the physical properties of an object are in groups such as `attrs.mass_props`, and `physics` is the name
  of a simulator.
- All releases accept names in upper and lower case. A time limit of -1 means no limit.
"""

from typing import Any

from ecrl.config.aliases import MISSING, RawConfig, get_path, part_entry, set_path
from ecrl.config.model import Loc, format_value, known_keys, sections_in
from ecrl.registry import Entry, registered

_CFG: Loc = ("env", "cfg")
_OLD_KEYS = ("episode_length", "obs_mode", "action_type", "action_scale", "joint_limits")
_TOO_OLD = (
    "a key of EmbodiChain before v0.1.2, but ecrl reads only files of v0.1.2 and later; set the keys actions and "
    "max_episode_steps instead"
)
_NAMES: dict[Loc, str] = {
    ("policy", "name"): "policy",
    ("policy", "actor", "type"): "network",
    ("policy", "critic", "type"): "network",
    ("policy", "encoder", "type"): "network",
    ("algorithm", "name"): "algorithm",
}
"""Map the path of a name to the kind of component that it names."""

_LIMIT: Loc = (*_CFG, "max_episode_steps")
NO_LIMIT = 2**31 - 1
"""A time limit in steps that no episode reaches."""

PROPERTY_GROUPS = ("mass_props", "rigid_props", "collision_props", "material_props")
"""Groups of an object's `attrs` in EmbodiChain's files from v0.3.0 on."""


def _env_entry(raw: RawConfig) -> Entry | None:
    return part_entry("env", raw.data.get("env"))


def _known_extensions(entry: Entry) -> set[str]:
    field = entry.config.model_fields.get("extensions")
    return {key for model in sections_in(field.annotation) for key in known_keys(model)} if field else set()


def refuse_old_release(raw: RawConfig) -> RawConfig:
    """Report a file of a release before v0.1.2 as one fault, at the first key that only such releases have.

    The function then removes the environment's settings, because this fault explains all other unknown keys.
    """
    entry, cfg = _env_entry(raw), get_path(raw.data, _CFG)
    if entry is None or not isinstance(cfg, dict) or "actions" in cfg or "actions" not in known_keys(entry.config):
        return raw
    extensions = get_path(cfg, ("extensions",))
    places: list[tuple[Loc, Any, set[str]]] = [
        ((*_CFG, "extensions"), extensions, _known_extensions(entry)),
        (_CFG, cfg, known_keys(entry.config)),
    ]
    old = [
        (*place, key)
        for place, section, known in places
        for key in _OLD_KEYS
        if isinstance(section, dict) and key in section and key not in known
    ]
    if not old:
        return raw
    return raw._replace(data=set_path(raw.data, _CFG, {}), faults=[*raw.faults, (old[0], _TOO_OLD)])


def drop_simulator_name(raw: RawConfig) -> RawConfig:
    """Remove `physics` if it is the name of a simulator, "default" or "newton", and add it to `raw.inert`."""
    path, entry = (*_CFG, "physics"), _env_entry(raw)
    field = None if entry is None else entry.config.model_fields.get("physics")
    if field is not None and not list(sections_in(field.annotation)):  # `physics` is a setting of a user's environment
        return raw
    if get_path(raw.data, path) not in ("default", "newton"):
        return raw
    cfg = {key: value for key, value in get_path(raw.data, _CFG).items() if key != "physics"}
    reason = "this names EmbodiChain's simulator, but MuJoCo simulates the physics"
    return raw._replace(data=set_path(raw.data, _CFG, cfg), inert=[*raw.inert, (path, reason)])


def _flat_attrs(raw: RawConfig, path: Loc, attrs: Any) -> tuple[Any, RawConfig]:
    """Move values from the groups of an object's `attrs` into `attrs` itself. Record the origin of each moved value.

    In EmbodiChain, null in place of a group or of a value in a group means the default, so nulls are removed.
    """
    if not isinstance(attrs, dict):
        return attrs, raw
    groups = [name for name in PROPERTY_GROUPS if name in attrs]
    flat = {key: value for key, value in attrs.items() if key not in groups}
    origins, faults = dict(raw.origins), list(raw.faults)
    for group in groups:
        if not isinstance(attrs[group], dict | None):
            faults.append(((*path, group), f"expected an object, got {format_value(attrs[group])}"))
            continue
        for key, value in (attrs[group] or {}).items():
            if value is None:
                continue
            if key in flat:
                faults.append(((*path, group, key), f"another name of {key!r}, which is also given; keep one"))
                continue
            flat[key], origins[(*path, key)] = value, raw.source_path((*path, group, key))
    return flat, raw._replace(origins=origins, faults=faults)


def flatten_attrs(raw: RawConfig) -> RawConfig:
    """Translate the groups of the `attrs` of every object, such as `attrs.mass_props.mass` to `attrs.mass`."""
    entry = _env_entry(raw)
    for section in ("rigid_object", "background"):
        objects = get_path(raw.data, (*_CFG, section))
        if entry is None or section not in known_keys(entry.config) or not isinstance(objects, list | tuple):
            continue
        changed = []
        for i, thing in enumerate(objects):
            attrs = get_path(thing, ("attrs",))
            if attrs is not MISSING:
                flat, raw = _flat_attrs(raw, (*_CFG, section, i, "attrs"), attrs)
                thing = thing | {"attrs": flat}
            changed.append(thing)
        raw = raw._replace(data=set_path(raw.data, (*_CFG, section), changed))
    return raw


def lower_names(data: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a config in which component names have the same case as the registered names.

    EmbodiChain accepts names of policies, algorithms and networks in upper and lower case. The function changes an
    unregistered name to lower case if the result is registered.

    >>> lower_names({"algorithm": {"name": "PPO"}})
    {'algorithm': {'name': 'ppo'}}
    """
    for path, kind in _NAMES.items():
        name = get_path(data, path)
        if isinstance(name, str) and name not in (names := registered(kind)) and name.lower() in names:
            data = set_path(data, path, name.lower())
    return data


def lower_name(key: str, value: Any) -> Any:
    """Return the value of a key after `lower_names` has changed the names in it. The value may be a whole section."""
    nested = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return get_path(lower_names(nested), tuple(key.split(".")))


def unlimited_episodes(raw: RawConfig) -> RawConfig:
    """Replace an environment's time limit of -1, which means no limit, by `NO_LIMIT` steps."""
    entry = _env_entry(raw)
    field = None if entry is None else entry.config.model_fields.get("max_episode_steps")
    if get_path(raw.data, _LIMIT) != -1 or field is None or not any(getattr(x, "ge", 0) >= 1 for x in field.metadata):
        return raw
    return raw._replace(data=set_path(raw.data, _LIMIT, NO_LIMIT))


def translate_releases(raw: RawConfig) -> RawConfig:
    """Translate the keys of all supported releases. Refuse files of releases before v0.1.2."""
    return unlimited_episodes(flatten_attrs(drop_simulator_name(refuse_old_release(raw))))
