"""The second file of EmbodiChain's configs, at `trainer.gym_config`: an environment's name and settings."""

import os
from pathlib import Path
from typing import Any

from ecrl.config.files import read
from ecrl.config.model import Fault, Loc, dotted, repeated, shown
from ecrl.config.raw import GONE, Draft, at, without
from ecrl.errors import ConfigError

_KEY: Loc = ("trainer", "gym_config")


def _gym_faults(gym: Any) -> list[Fault]:
    """What is wrong with the structure of a `gym_config` file."""
    if not isinstance(gym, dict):
        return [((), f"expected an object, got {shown(gym)}")]
    block = gym.get("env", {})
    if not isinstance(block, dict):
        return [(("env",), f"expected an object, got {shown(block)}")]
    faults = repeated(gym)
    faults += [(("env", key), f"given beside 'env' too; keep one of {key!r}") for key in block if key in gym]
    return faults if isinstance(gym.get("id"), str) else [*faults, (("id",), "expected the name of an environment")]


def _failed(draft: Draft, text: str) -> Draft:
    """The file cannot be used; what it would have given is not missed too."""
    missed = ("env", "name") if isinstance(draft.data.get("env"), dict) else ("env",)
    written = draft.written if at(draft.data, missed) is not GONE else draft.written | {missed: dotted(_KEY)}
    return draft._replace(faults=[*draft.faults, (_KEY, text)], written=written)


def with_gym_config(draft: Draft, folder: Path) -> Draft:
    """The file at `trainer.gym_config` below what `env` says, key by key.

    Its `id` is `env.name`; what stands in its `env` or beside it is `env.cfg`. A file for another environment than the
    one `env` names is left aside, and said to be.
    """
    if (given := at(draft.data, _KEY)) is GONE:
        return draft
    draft = draft._replace(data=without(draft.data, _KEY))
    if not isinstance(given, str):
        return _failed(draft, f"expected the path of a file, got {shown(given)}")
    path = next(filter(os.path.exists, (given, str(folder / given))), None)
    if path is None:
        return _failed(draft, f"no such file {shown(given)}, neither from the working directory nor from {folder}")
    if not os.path.isfile(path):  # reading a device may never end
        return _failed(draft, f"expected the path of a file, {shown(given)} is a folder or a device")
    try:
        gym = read(Path(path))
    except ConfigError as error:
        return _failed(draft, str(error))
    faults = [": ".join(filter(None, (path, dotted(loc), text))) for loc, text in _gym_faults(gym)]
    for text in faults:
        draft = _failed(draft, text)
    inline = draft.data.get("env", {})
    if faults or not isinstance(inline, dict) or not isinstance(inline.get("cfg", {}), dict):
        return draft
    if inline.get("name", gym["id"]) != gym["id"]:
        told = f"{path} is for {gym['id']!r}, and env for {shown(inline['name'])}"
        return draft._replace(inert=[*draft.inert, (_KEY, told)])
    return _merged(draft, gym, inline, path)


def _below(under: Any, over: Any, path: Loc, text: str, written: dict[Loc, str]) -> Any:
    """`over`, key by key, above `under`; `written` learns the `text` of what comes from `under`."""
    if over is GONE:
        written[path] = text
        return under
    if not isinstance(under, dict) or not isinstance(over, dict):
        return over
    return {
        key: _below(under.get(key, GONE), over.get(key, GONE), (*path, key), f"{text}.{key}", written)
        for key in under | over
    }


def _merged(draft: Draft, gym: dict, inline: dict, path: str) -> Draft:
    """The settings of a `gym_config` file below the inline ones."""
    written, cfg, block = dict(draft.written), inline.get("cfg", {}), gym.get("env", {})
    beside = {key: value for key, value in gym.items() if key not in ("id", "env")}
    texts = {key: f"{path}: {key}" for key in beside} | {key: f"{path}: env.{key}" for key in block}
    file = beside | block
    made = {
        key: _below(file.get(key, GONE), cfg.get(key, GONE), ("env", "cfg", key), texts.get(key, ""), written)
        for key in file | cfg
    }
    if "name" not in inline:
        written["env", "name"] = f"{path}: id"
    return draft._replace(data=draft.data | {"env": inline | {"name": gym["id"], "cfg": made}}, written=written)
