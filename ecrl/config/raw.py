"""A config after reading and before checking: plain data, the origin of moved keys, and the faults found so far."""

from typing import Any, NamedTuple

from ecrl.config.model import Fault, Loc, dotted

MISSING = object()
"""Returned by `at` if a path has no value."""


class Draft(NamedTuple):
    """A config on its way to the checks.

    Attributes:
        data: the config in ecrl's own keys.
        origins: for each moved key, the name under which the user wrote it.
        faults: found so far.
        inert: keys without a meaning here that were removed so far, with the reason.
    """

    data: dict[str, Any]
    origins: dict[Loc, str]
    faults: list[Fault]
    inert: list[Fault]

    def source_path(self, path: Loc) -> str:
        """Return a path under the name that the user wrote."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                rest = dotted(path[length:])
                return self.origins[path[:length]] + ("" if rest[:1] in ("", "[") else ".") + rest
        return dotted(path)


def at(data: Any, path: Loc) -> Any:
    """Return the value at a path, or MISSING."""
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return MISSING
        data = data[key]
    return data


def put(data: dict, path: Loc, value: Any) -> dict:
    """Return a copy with one key set. Missing sections are created; KeyError names a key that is not a section."""
    key, *rest = path
    if not rest:
        return data | {key: value}
    section = data.get(key, {})
    if not isinstance(section, dict):
        raise KeyError(key)
    return data | {key: put(section, tuple(rest), value)}


def without(data: Any, path: Loc) -> Any:
    """Return a copy without the key at `path`, which must exist. The path may lead through sections and lists."""
    key, *rest = path
    if rest and isinstance(data, dict):
        return data | {key: without(data[key], tuple(rest))}
    if rest:
        return [without(part, tuple(rest)) if i == key else part for i, part in enumerate(data)]
    return {name: value for name, value in data.items() if name != key}


def split_path(path: str) -> Loc:
    """Return a dotted key as a path."""
    return tuple(path.split("."))
