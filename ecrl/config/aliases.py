"""Replace alternative keys by ecrl's own keys, and apply overrides. Validation runs after these steps.

A `RawConfig` stores the original name of each moved key, so that messages use the name that the user wrote.
"""

from collections.abc import Mapping
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from ecrl.config.model import (
    SETTINGS,
    Fault,
    Loc,
    format_key,
    format_path,
    format_value,
    known_keys,
    without_old_settings,
)
from ecrl.registry import Entry, lookup, nearest, registered

KEY_ALIASES = {
    "trainer.learning_env": "env",
    "env.id": "env.name",
    "env.cfg.num_envs": "trainer.num_envs",
    "trainer.rollout_steps": "trainer.buffer_size",
    "trainer.update_horizon": "trainer.buffer_size",
    "trainer.segment_length": "algorithm.cfg.segment_length",
    "trainer.deterministic_actions": "algorithm.cfg.deterministic_actions",
}
"""Map each alternative key to ecrl's own key. A config with both keys is invalid.

However, if `trainer.num_envs` is set, `env.cfg.num_envs` is ignored without an error.
"""

COUNT_KEYS = {
    "trainer.total_timesteps": "trainer.iterations",
    "trainer.save_frequency_updates": "trainer.save_freq",
}
"""Map EmbodiChain's keys to ecrl's keys for the same quantities in other units.

`convert_counts` converts the values.
"""

SKIP_KEY, GUARD_KEY = "algorithm.cfg.skip_nonfinite_updates", "trainer.finite_guard"
"""EmbodiChain's key for skipping non-finite updates of apg, and ecrl's key.

`true` becomes "skip", and `false` becomes "stop".
"""

VLA_KEY = "policy.vla_config"
"""EmbodiChain's section for a pretrained vision-language-action model.

The key `model_path` of this section becomes `policy.vla.model_path`.
"""

MISSING = object()
"""Result of `get_path` if a path has no value."""


class RawConfig(NamedTuple):
    """Config during its translation, before validation.

    Attributes:
        data: the config. Keys that are already translated have ecrl's names.
        origins: dict from the path of each moved key to the name that the user wrote.
        faults: faults that have been found so far.
        inert: keys that ecrl ignores and has removed, each with the reason.
    """

    data: dict[str, Any]
    origins: dict[Loc, str]
    faults: list[Fault]
    inert: list[Fault]

    def source_path(self, path: Loc) -> str:
        """Format the path of a key with the names that the user wrote."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                rest = format_path(path[length:])
                return self.origins[path[:length]] + ("" if rest[:1] in ("", "[") else ".") + rest
        return format_path(path)


def get_path(data: Any, path: Loc) -> Any:
    """Return the value at a path, or MISSING if the path has no value."""
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return MISSING
        data = data[key]
    return data


def set_path(data: dict, path: Loc, value: Any) -> dict:
    """Return a copy of `data` with a new value at `path`. Create missing sections.

    Raises: KeyError if a key along the path has a value that is not a section.
    """
    key, *rest = path
    if not rest:
        return data | {key: value}
    section = data.get(key, {})
    if not isinstance(section, dict):
        raise KeyError(key)
    return data | {key: set_path(section, tuple(rest), value)}


def remove_path(data: Any, path: Loc) -> Any:
    """Return a copy of `data` without the key at `path`. The key must exist.

    The path may lead through sections and lists.
    """
    key, *rest = path
    if rest and isinstance(data, dict):
        return data | {key: remove_path(data[key], tuple(rest))}
    if rest:
        return [remove_path(part, tuple(rest)) if i == key else part for i, part in enumerate(data)]
    return {name: value for name, value in data.items() if name != key}


def split_path(path: str) -> Loc:
    """Split a dotted key into a path."""
    return tuple(path.split("."))


def _expand_env_name(data: dict) -> dict:
    """Replace an environment that is given as a string by a section whose `name` is the string."""
    for path in (("env",), ("trainer", "learning_env")):
        if isinstance(name := get_path(data, path), str):
            data = set_path(data, path, {"name": name})
    return data


def apply_aliases(raw: RawConfig) -> RawConfig:
    """Move the value of every alternative key in `KEY_ALIASES` to ecrl's own key.

    Add a fault if both keys are given, except if ecrl's own key is `trainer.num_envs`.
    """
    data, origins, faults = _expand_env_name(raw.data), dict(raw.origins), list(raw.faults)
    for old, new in KEY_ALIASES.items():
        source, target = split_path(old), split_path(new)
        if (value := get_path(data, source)) is MISSING:
            continue
        data, place = remove_path(data, source), raw._replace(origins=origins).source_path(source)
        if get_path(data, target) is MISSING:
            with suppress(KeyError):  # validation reports a section that is not an object
                data, origins[target] = set_path(data, target, value), place
        elif new != "trainer.num_envs":
            name = target[-1] if source[:-1] == target[:-1] else new
            faults.append((source, f"another name of {name!r}, which is also given; keep one"))
    return RawConfig(data, origins, faults, raw.inert)


def _canonical_path(path: str) -> str:
    for old, new in KEY_ALIASES.items():
        if f"{path}.".startswith(f"{old}."):
            path = new + path.removeprefix(old)
    return path


def _drop_invalidated(data: dict, path: str, value: Any) -> dict:
    """Remove values that contradict a new value at `path`.

    The removed values are nulls along the path, alternative keys for `path`, and the settings of a replaced component.
    """
    loc = split_path(path)
    stale = [loc[:length] for length in range(1, len(loc)) if get_path(data, loc[:length]) is None]
    stale += [
        split_path(alternative if path == own_name else own_name)
        for alternative, own_name in (*COUNT_KEYS.items(), (SKIP_KEY, GUARD_KEY))
        if path in (alternative, own_name)
    ]
    section = get_path(data, loc[:-1])
    if loc[-1] in SETTINGS and loc[:-1] and isinstance(section, dict):
        data = set_path(data, loc[:-1], without_old_settings(section, loc[-1], value))
    for stale_path in stale:
        data = data if get_path(data, stale_path) is MISSING else remove_path(data, stale_path)
    return data


def _in_two_units(name: str) -> str:
    return f"sets {name!r} in another unit, and {name!r} is also given; keep one"


def apply_overrides(raw: RawConfig, overrides: Mapping[str, Any]) -> RawConfig:
    """Apply overrides to the config.

    Sections and component names are set before single settings, because a new name removes the old component's
    settings.
    """
    data, origins, faults = raw.data, dict(raw.origins), list(raw.faults)
    values: dict[str, tuple[str, Any]] = {}
    for key, value in overrides.items():
        path = _canonical_path(key)
        if path in values:
            faults.append((split_path(key), f"another name of {path!r}, which is also given; keep one"))
        values[path] = key, value
    for old, new in COUNT_KEYS.items():
        if old in values and new in values:
            faults.append((split_path(values[old][0]), _in_two_units(new.removeprefix("trainer."))))
    for path in sorted(values, key=lambda path: (path.count("."), path.rpartition(".")[2] not in SETTINGS)):
        (key, value), loc = values[path], split_path(path)
        value = _expand_env_name({path: value})[path]
        origins = {prefix: text for prefix, text in origins.items() if prefix[: len(loc)] != loc} | {loc: key}
        try:
            data = set_path(_drop_invalidated(data, path, value), loc, value)
        except KeyError as error:
            faults.append((loc, f"{error.args[0]!r} is not a section; remove the keys after it"))
    return RawConfig(data, origins, faults, raw.inert)


def _convert_count(count: Any, unit: str, sizes: list[Any]) -> Any:
    """Convert a count to the unit of the trainer's key `unit`, which is `iterations` or `save_freq`.

    For `iterations`, convert env steps to iterations. For `save_freq`, convert updates to env steps. `sizes` contains
    the buffer size and the number of environments.

    If the count or a size is not a positive integer, return the count unchanged. Validation reports such a value,
    except a `save_freq` of 0, which is valid.
    """
    if not all(isinstance(x, int) and not isinstance(x, bool) and x > 0 for x in (count, *sizes)):
        return count
    return -(-count // prod(sizes)) if unit == "iterations" else count * prod(sizes)


def convert_counts(raw: RawConfig, defaults: Mapping[str, Any]) -> RawConfig:
    """Convert EmbodiChain's counts to ecrl's units, for a run of one process.

        iterations = ceil(total_timesteps / (buffer_size * num_envs))
        save_freq  = save_frequency_updates * buffer_size * num_envs

    If `trainer.segment_length` is set but `trainer.buffer_size` is not, the buffer size is the segment length, as in
    EmbodiChain.
    """
    trainer = get_path(raw.data, ("trainer",))
    if not isinstance(trainer, dict):
        return raw
    trainer, origins, faults = dict(trainer), dict(raw.origins), list(raw.faults)
    if origins.get(("algorithm", "cfg", "segment_length")) == "trainer.segment_length":
        trainer.setdefault("buffer_size", get_path(raw.data, ("algorithm", "cfg", "segment_length")))
    sizes = [trainer.get(name, defaults[name]) for name in ("buffer_size", "num_envs")]
    for old, new in COUNT_KEYS.items():
        name, own_name = (path.removeprefix("trainer.") for path in (old, new))
        if name not in trainer:
            continue
        count = trainer.pop(name)
        if own_name in trainer:
            faults.append((split_path(old), _in_two_units(own_name)))
        elif trainer.get("distributed") is True:
            faults.append((split_path(old), f"is only for runs of one process; in a distributed run, set {own_name!r}"))
        else:
            origins["trainer", own_name] = old
            trainer[own_name] = _convert_count(count, own_name, sizes)
    return RawConfig(raw.data | {"trainer": trainer}, origins, faults, raw.inert)


def convert_skip_flag(raw: RawConfig) -> RawConfig:
    """Translate EmbodiChain's key `skip_nonfinite_updates` of `apg` into `trainer.finite_guard`."""
    skip, guard = split_path(SKIP_KEY), split_path(GUARD_KEY)
    value = get_path(raw.data, skip)
    if value is MISSING or get_path(raw.data, ("algorithm", "name")) != "apg":
        return raw
    data, origins, faults = remove_path(raw.data, skip), dict(raw.origins), list(raw.faults)
    if get_path(data, guard) is not MISSING:
        faults.append((skip, f"sets {GUARD_KEY!r}, which is also given; keep one"))
    elif not isinstance(value, bool):
        faults.append((skip, f"expected true or false, got {format_value(value)}; {GUARD_KEY!r} has more choices"))
    else:
        with suppress(KeyError):
            data, origins[guard] = set_path(data, guard, "skip" if value else "stop"), SKIP_KEY
    return RawConfig(data, origins, faults, raw.inert)


def convert_vla_section(raw: RawConfig) -> RawConfig:
    """Translate EmbodiChain's section `policy.vla_config` into `policy.vla`.

    A config cannot name a Python class to import, so the keys `model_class` and `model_config` are faults.
    """
    path, target = split_path(VLA_KEY), ("policy", "vla", "model_path")
    section = get_path(raw.data, path)
    if section is MISSING or get_path(raw.data, ("policy", "name")) != "vla":
        return raw
    data, origins, faults = remove_path(raw.data, path), dict(raw.origins), list(raw.faults)
    if not isinstance(section, dict):
        return RawConfig(
            data, origins, [*faults, (path, f"expected an object, got {format_value(section)}")], raw.inert
        )
    for key, value in section.items():
        if key in ("model_class", "model_config"):
            text = "a config cannot import a class; register a backend, and give its name and settings in policy.vla"
            faults.append(((*path, key), text))
        elif key != "model_path":
            faults.append(((*path, format_key(key)), "unknown key; known: model_path"))
        elif get_path(data, target) is not MISSING:
            faults.append(((*path, key), "another name of 'policy.vla.model_path', which is also given; keep one"))
        else:
            with suppress(KeyError):
                data, origins[target] = set_path(data, target, value), f"{VLA_KEY}.{key}"
    return RawConfig(data, origins, faults, raw.inert)


def part_entry(kind: str, section: Any) -> Entry | None:
    """Return the registry entry that a section names, or None. For `gymnasium:<id>`, return the entry `gymnasium`.

    For an unknown name, return the entry of the most similar name. Validation reports the unknown name, and checks the
    other keys of the section with this entry.
    """
    name = section.get("name") if isinstance(section, dict) else None
    if not isinstance(name, str):
        return None
    name = name.partition(":")[0]
    with suppress(KeyError):
        return lookup(kind, name)
    near = nearest(name, registered(kind))
    return None if near is None else lookup(kind, near)


def reject_unused_aliases(raw: RawConfig) -> RawConfig:
    """Report and remove each trainer key that was moved to the algorithm's settings but is unknown to the algorithm."""
    entry, data, faults = part_entry("algorithm", raw.data.get("algorithm")), raw.data, list(raw.faults)
    for old, new in KEY_ALIASES.items():
        *_, key = loc = split_path(new)
        was_moved = loc[0] == "algorithm" and raw.origins.get(loc) == old
        if was_moved and entry and key not in known_keys(entry.config):
            faults.append((loc, f"algorithm {data['algorithm']['name']!r} has no {key}; remove it"))
            data = remove_path(data, loc)
    return RawConfig(data, raw.origins, faults, raw.inert)
