"""A config as written, in our own keys: keys with several names, EmbodiChain's ways to say things, overrides.

`translated` works on the plain dict before it is checked, and remembers where moved keys were written, for messages.
"""

from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from ecrl.config.gym_config import with_gym_config
from ecrl.config.inert import inert_keys, part_entry
from ecrl.config.model import known_keys, repeated
from ecrl.config.raw import GONE, Draft, at, loc_of, put, without

MOVES = {
    "trainer.learning_env": "env",
    "env.id": "env.name",
    "env.cfg.num_envs": "trainer.num_envs",
    "trainer.rollout_steps": "trainer.buffer_size",
    "trainer.update_horizon": "trainer.buffer_size",
    "trainer.segment_length": "algorithm.cfg.segment_length",
    "trainer.deterministic_actions": "algorithm.cfg.deterministic_actions",
}
"""Further places of a key, each with the one it means. Both given are refused; `trainer.num_envs` alone just wins."""

COUNTS = {"trainer.total_timesteps": "trainer.iterations", "trainer.save_frequency_updates": "trainer.save_freq"}
"""Keys of another unit than the one they stand for, which translate exactly for a run of one process."""

SKIP, GUARD = "algorithm.cfg.skip_nonfinite_updates", "trainer.finite_guard"
"""EmbodiChain's key of apg, and the one it stands for: true is "skip", false "stop"."""

SETTINGS = {"name": ("cfg", "kwargs"), "func": ("params",), "type": ("network_cfg",)}
"""What goes with the name of a part: its settings, which another part does not have."""


def _named(data: dict) -> dict:
    """An environment given by its name alone, as a section."""
    for path in (("env",), ("trainer", "learning_env")):
        if isinstance(name := at(data, path), str):
            data = put(data, path, {"name": name})
    return data


def _moved(draft: Draft) -> Draft:
    """Every key at its own place."""
    data, written, faults = _named(draft.data), dict(draft.written), list(draft.faults)
    for old, new in MOVES.items():
        source, target = loc_of(old), loc_of(new)
        if (value := at(data, source)) is GONE:
            continue
        data, place = without(data, source), draft._replace(written=written).where(source)
        if at(data, target) is GONE:
            with suppress(KeyError):  # a section that is no object is a fault of its own
                data, written[target] = put(data, target, value), place
        elif new != "trainer.num_envs":
            name = target[-1] if source[:-1] == target[:-1] else new
            faults.append((source, f"another name of {name!r}, which is given too; keep one"))
    return Draft(data, written, faults, draft.inert)


def _canonical(path: str) -> str:
    for old, new in MOVES.items():
        if f"{path}.".startswith(f"{old}."):
            path = new + path.removeprefix(old)
    return path


def _making_room(data: dict, path: str, value: Any) -> dict:
    """Without what a new value makes void: nulls on its way, the same thing in another unit, an old part's settings."""
    loc = loc_of(path)
    gone = [loc[:length] for length in range(1, len(loc)) if at(data, loc[:length]) is None]
    gone += [
        loc_of(one if path == other else other)
        for one, other in (*COUNTS.items(), (SKIP, GUARD))
        if path in (one, other)
    ]
    if loc[-1] in SETTINGS and at(data, loc) != value:
        gone += [(*loc[:-1], name) for name in SETTINGS[loc[-1]]]
    for other in gone:
        data = data if at(data, other) is GONE else without(data, other)
    return data


def _overridden(draft: Draft, overrides: Mapping[str, Any]) -> Draft:
    """Dotted keys set, sections and names of parts first; another name takes the settings of the old part away."""
    data, written, faults = draft.data, dict(draft.written), list(draft.faults)
    wanted: dict[str, tuple[str, Any]] = {}
    for given, value in overrides.items():
        path = _canonical(given)
        if path in wanted:
            faults.append((loc_of(given), f"another name of {path!r}, which is given too; keep one"))
        wanted[path] = given, value
    for path in sorted(wanted, key=lambda path: (path.count("."), path.rpartition(".")[2] not in SETTINGS)):
        (given, value), loc = wanted[path], loc_of(path)
        value = _named({path: value})[path]
        written = {prefix: text for prefix, text in written.items() if prefix[: len(loc)] != loc} | {loc: given}
        try:
            data = put(_making_room(data, path, value), loc, value)
        except KeyError as error:
            faults.append((loc, f"{error.args[0]!r} is not a section"))
    return Draft(data, written, faults, draft.inert)


def _in_our_unit(count: Any, unit: str, sizes: list[Any]) -> Any:
    """A count of updates or steps as `save_freq` or `iterations`; as it is where it or the sizes are no counts."""
    if not all(isinstance(x, int) and not isinstance(x, bool) and x > 0 for x in (count, *sizes)):
        return count  # the check of the config says what is wrong
    return -(-count // prod(sizes)) if unit == "iterations" else count * prod(sizes)


def _counted(draft: Draft, defaults: Mapping[str, Any]) -> Draft:
    """Counts of other units in ours, for a run of one process.

        iterations = ceil(total_timesteps / (buffer_size * num_envs))
        save_freq  = save_frequency_updates * buffer_size * num_envs

    A `trainer.segment_length` without a number of steps per update is that number too, as in EmbodiChain.
    """
    trainer = at(draft.data, ("trainer",))
    if not isinstance(trainer, dict):
        return draft
    trainer, written, faults = dict(trainer), dict(draft.written), list(draft.faults)
    if written.get(("algorithm", "cfg", "segment_length")) == "trainer.segment_length":
        trainer.setdefault("buffer_size", at(draft.data, ("algorithm", "cfg", "segment_length")))
    sizes = [trainer.get(name, defaults[name]) for name in ("buffer_size", "num_envs")]
    for old, new in COUNTS.items():
        name, ours = (path.removeprefix("trainer.") for path in (old, new))
        if name not in trainer:
            continue
        count = trainer.pop(name)
        if ours in trainer:
            faults.append((loc_of(old), f"says {ours!r} in another unit, which is given too; keep one"))
        elif trainer.get("distributed") is True:
            faults.append((loc_of(old), f"counts what one process does; a distributed run needs {ours!r}"))
        else:
            written["trainer", ours] = old
            trainer[ours] = _in_our_unit(count, ours, sizes)
    return Draft(draft.data | {"trainer": trainer}, written, faults, draft.inert)


def _guarded(draft: Draft) -> Draft:
    """Of apg whether updates that are not finite are left out, as the trainer's key of every algorithm."""
    skip, guard = loc_of(SKIP), loc_of(GUARD)
    value = at(draft.data, skip)
    if value is GONE or at(draft.data, ("algorithm", "name")) != "apg":
        return draft
    data, written, faults = without(draft.data, skip), dict(draft.written), list(draft.faults)
    if at(data, guard) is not GONE:
        faults.append((skip, f"says {GUARD!r} in another way, which is given too; keep one"))
    elif not isinstance(value, bool):
        faults.append((skip, f"expected true or false; {GUARD!r} has more choices"))
    else:
        with suppress(KeyError):
            data, written[guard] = put(data, guard, "skip" if value else "stop"), SKIP
    return Draft(data, written, faults, draft.inert)


def _used(draft: Draft) -> Draft:
    """Refuse keys of the trainer that belong to an algorithm which does not have them."""
    entry, data, faults = part_entry("algorithm", draft.data.get("algorithm")), draft.data, list(draft.faults)
    for old, new in MOVES.items():
        *_, key = loc = loc_of(new)
        moved = loc[0] == "algorithm" and draft.written.get(loc) == old
        if moved and entry and key not in known_keys(entry.config):
            faults.append((loc, f"algorithm {data['algorithm']['name']!r} has no {key}; take it out"))
            data = without(data, loc)
    return Draft(data, draft.written, faults, draft.inert)


def _without_inert(draft: Draft) -> Draft:
    """Keys without a meaning taken out and listed."""
    found, data = inert_keys(draft.data), draft.data
    for path, _ in found:
        data = without(data, path)
    return Draft(data, draft.written, draft.faults, draft.inert + found)


def translated(data: dict[str, Any], overrides: Mapping[str, Any], folder: Path, defaults: Mapping[str, Any]) -> Draft:
    """A config as read, in our own keys.

    Args:
        data: as read; it is not changed.
        overrides: values by dotted key, which win.
        folder: where a relative `trainer.gym_config` is looked for after the working directory.
        defaults: of `trainer.buffer_size` and `trainer.num_envs`.
    """
    draft = _moved(Draft(data, {}, repeated(data), []))
    draft = _moved(_overridden(draft, overrides))
    draft = _moved(with_gym_config(draft, folder))
    return _without_inert(_used(_guarded(_counted(draft, defaults))))
