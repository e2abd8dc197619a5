"""A config between reading and checking: plain data, where moved parts of it were written, what is wrong so far."""

from typing import Any, NamedTuple

from ecrl.config.model import Fault, Loc, dotted

GONE = object()


class Draft(NamedTuple):
    """A config on its way: the data in our own keys, where moved parts were written, faults and inert keys so far."""

    data: dict[str, Any]
    written: dict[Loc, str]
    faults: list[Fault]
    inert: list[Fault]

    def where(self, path: Loc) -> str:
        """A path as its writer wrote it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.written:
                rest = dotted(path[length:])
                return self.written[path[:length]] + ("" if rest[:1] in ("", "[") else ".") + rest
        return dotted(path)


def at(data: Any, path: Loc) -> Any:
    """What is at a path, or GONE."""
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return GONE
        data = data[key]
    return data


def put(data: dict, path: Loc, value: Any) -> dict:
    """A copy with one key set; sections on the way are made if absent. KeyError names one that is no section."""
    key, *rest = path
    if not rest:
        return data | {key: value}
    section = data.get(key, {})
    if not isinstance(section, dict):
        raise KeyError(key)
    return data | {key: put(section, tuple(rest), value)}


def without(data: Any, path: Loc) -> Any:
    """A copy without a key that is there; on the way to it are sections and lists."""
    key, *rest = path
    if rest and isinstance(data, dict):
        return data | {key: without(data[key], tuple(rest))}
    if rest:
        return [without(part, tuple(rest)) if i == key else part for i, part in enumerate(data)]
    return {name: value for name, value in data.items() if name != key}


def loc_of(path: str) -> Loc:
    """A dotted key as a path."""
    return tuple(path.split("."))
