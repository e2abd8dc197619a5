"""EmbodiChain's second config file, at `trainer.gym_config`: the name and settings of an environment."""

import os
from pathlib import Path
from typing import Any

from ecrl.config.files import read
from ecrl.config.model import Fault, Loc, dotted, repeated, shown
from ecrl.config.raw import MISSING, Draft, at, without
from ecrl.errors import ConfigError

_KEY: Loc = ("trainer", "gym_config")


def _gym_faults(gym: Any) -> list[Fault]:
    """List the structural faults of a `gym_config` file."""
    if not isinstance(gym, dict):
        return [((), f"expected an object, got {shown(gym)}")]
    block = gym.get("env", {})
    if not isinstance(block, dict):
        return [(("env",), f"expected an object, got {shown(block)}")]
    faults = repeated(gym)
    faults += [(("env", key), f"also given outside of 'env'; keep one {key!r}") for key in block if key in gym]
    return faults if isinstance(gym.get("id"), str) else [*faults, (("id",), "expected the name of an environment")]


def _with_fault(draft: Draft, text: str) -> Draft:
    """Add the fault of a file that cannot be used. Faults about `env` missing from the config then name the file."""
    absent = ("env", "name") if isinstance(draft.data.get("env"), dict) else ("env",)
    origins = draft.origins if at(draft.data, absent) is not MISSING else draft.origins | {absent: dotted(_KEY)}
    return draft._replace(faults=[*draft.faults, (_KEY, text)], origins=origins)


def with_gym_config(draft: Draft, folder: Path) -> Draft:
    """Merge the file at `trainer.gym_config` into the config; the config's own `env` wins key by key.

    The file's `id` becomes `env.name`. Its `env` section and its other top-level keys become `env.cfg`. If the config
    names another environment, the file is ignored with a warning.
    """
    if (given := at(draft.data, _KEY)) is MISSING:
        return draft
    draft = draft._replace(data=without(draft.data, _KEY))
    if not isinstance(given, str):
        return _with_fault(draft, f"expected the path of a file, got {shown(given)}")
    path = next(filter(os.path.exists, (given, str(folder / given))), None)
    if path is None:
        return _with_fault(draft, f"no such file {shown(given)}, neither in the working directory nor in {folder}")
    if not os.path.isfile(path):  # reading a device may never end
        return _with_fault(draft, f"expected the path of a file, {shown(given)} is a folder or a device")
    try:
        gym = read(Path(path))
    except ConfigError as error:
        return _with_fault(draft, str(error))
    faults = [": ".join(filter(None, (path, dotted(loc), text))) for loc, text in _gym_faults(gym)]
    for text in faults:
        draft = _with_fault(draft, text)
    inline = draft.data.get("env", {})
    if faults or not isinstance(inline, dict) or not isinstance(inline.get("cfg", {}), dict):
        return draft
    if inline.get("name", gym["id"]) != gym["id"]:
        reason = f"{path} is for {gym['id']!r}, but env names {shown(inline['name'])}"
        return draft._replace(inert=[*draft.inert, (_KEY, reason)])
    return _with_settings(draft, gym, inline, path)


def _merge(file_value: Any, inline_value: Any, path: Loc, text: str, origins: dict[Loc, str]) -> Any:
    """Merge two values key by key; the inline value wins. Keys taken from the file get `text` as their origin."""
    if inline_value is MISSING:
        origins[path] = text
        return file_value
    if not isinstance(file_value, dict) or not isinstance(inline_value, dict):
        return inline_value
    return {
        key: _merge(
            file_value.get(key, MISSING), inline_value.get(key, MISSING), (*path, key), f"{text}.{key}", origins
        )
        for key in file_value | inline_value
    }


def _with_settings(draft: Draft, gym: dict, inline: dict, path: str) -> Draft:
    """Merge the settings of a `gym_config` file with the inline settings, which win."""
    origins, cfg, block = dict(draft.origins), inline.get("cfg", {}), gym.get("env", {})
    outer = {key: value for key, value in gym.items() if key not in ("id", "env")}
    texts = {key: f"{path}: {key}" for key in outer} | {key: f"{path}: env.{key}" for key in block}
    file = outer | block
    merged = {
        key: _merge(file.get(key, MISSING), cfg.get(key, MISSING), ("env", "cfg", key), texts.get(key, ""), origins)
        for key in file | cfg
    }
    if "name" not in inline:
        origins["env", "name"] = f"{path}: id"
    return draft._replace(data=draft.data | {"env": inline | {"name": gym["id"], "cfg": merged}}, origins=origins)
