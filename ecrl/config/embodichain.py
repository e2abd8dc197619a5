"""Translate configs of EmbodiChain, a library for robot learning, into ecrl's keys.

- Some keys have a different name in ecrl (`ecrl.config.aliases`).
- `trainer.gym_config` is the path of a second file, which has the name and the settings of the environment.
- *Inert* keys are keys that ecrl ignores. Most inert keys describe EmbodiChain's simulator (window, renderer, scene) or
  its data sets. Inert keys are removed, and a warning names each removed key. A key of `env.cfg` or `algorithm.cfg` is
  inert only if the Config of the environment or algorithm does not have this key. An event in `INERT_EVENTS` is inert
  only if the environment has no scene and no user has registered an event of that name.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecrl.config.aliases import (
    MISSING,
    RawConfig,
    apply_aliases,
    apply_overrides,
    convert_counts,
    convert_skip_flag,
    convert_vla_section,
    get_path,
    part_entry,
    reject_unused_aliases,
    remove_path,
)
from ecrl.config.embodichain_releases import lower_name, lower_names, translate_releases
from ecrl.config.files import read
from ecrl.config.input_files import reason_to_refuse
from ecrl.config.model import ConfigModel, Fault, Loc, format_path, format_value, known_keys, repeated_keys, sections_in
from ecrl.config.other_libraries import UNBUILT
from ecrl.errors import ConfigError
from ecrl.registry import Entry, lookup, registered

_GYM_CONFIG: Loc = ("trainer", "gym_config")
_WINDOW, _RENDERER, _GPU = "no simulator window", "no choice of renderer", "trainer.device chooses the GPU"
_SCENE, _ENGINE = "this environment has its own scene", "this environment has its own physics"

INERT = {
    "trainer.headless": _WINDOW,
    "trainer.renderer": _RENDERER,
    "trainer.enable_rt": "no ray tracing",
    "trainer.gpu_id": _GPU,
    "trainer.buffer_type": "a rollout has every field that the policy returns",
    "algorithm.cfg.device": "trainer.device is also the device of the algorithm",
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
    "env.cfg.physics": _ENGINE,
    "env.cfg.physics_config": _ENGINE,
    "env.cfg.sim_steps_per_control": _ENGINE,
    "env.cfg.target_control_frequency": _ENGINE,
    "env.cfg.max_episodes": "it limits the episodes of a data set; training counts iterations",
    "env.cfg.dataset": "no data sets are recorded",
}
"""Map each inert key to the reason why ecrl ignores the key."""

INERT_EVENTS = dict.fromkeys(
    ("record_camera_data", "record_camera_data_async"), "this environment has no scene to film"
)
"""Map the name of an event to the reason why ecrl ignores the event in an environment without a scene."""


def _is_builtin_event(func: str) -> bool:
    """Return True unless a user has registered an event under this name."""
    return func not in registered("event") or lookup("event", func).config.__module__.startswith("ecrl.")


def _inert_events(events: Any, entry: Entry | None) -> list[Fault]:
    if entry and "rigid_object" in known_keys(entry.config):  # the environment has a scene
        return []
    faults = []
    for use, named in events.items() if isinstance(events, dict) else ():
        for name, event in named.items() if isinstance(named, dict) else ():
            func = event.get("func") if isinstance(event, dict) else None
            if isinstance(func, str) and func in INERT_EVENTS and _is_builtin_event(func):
                faults.append((("trainer", "events", use, name), f"{func}: {INERT_EVENTS[func]}"))
    return faults


def inert_keys_in(model: type, data: Any, path: Loc = ()) -> list[Fault]:
    """List the inert keys of a section and its subsections. Each Config model declares them in its attribute `inert`.

    A key in `UNBUILT` is inert only if its value is empty.

    >>> class Shape(ConfigModel):
    ...     inert = {"texture": "shapes have a color"}
    >>> inert_keys_in(Shape, {"texture": "wood"})
    [(('texture',), 'shapes have a color')]
    """
    if isinstance(data, list | tuple):
        return [fault for i, part in enumerate(data) for fault in inert_keys_in(model, part, (*path, i))]
    if not isinstance(data, dict) or not issubclass(model, ConfigModel):
        return []
    inert = [key for key in data if key in model.inert and not (key in UNBUILT and data[key])]
    faults = [((*path, key), model.inert[key]) for key in inert]
    name: str
    for name, parts in data.items():
        key: str = model.other_names.get(name, name)
        if (field := model.model_fields.get(key)) is None:
            continue
        for section in sections_in(field.annotation):
            if "dict" in str(field.annotation) and isinstance(parts, dict):  # the field is a dict of sections
                faults += [f for key, part in parts.items() for f in inert_keys_in(section, part, (*path, name, key))]
            else:
                faults += inert_keys_in(section, parts, (*path, name))
    return faults


def _inert_vla_keys(data: dict[str, Any]) -> list[Fault]:
    """List the inert keys in the settings of the backend of the policy `vla`."""
    section = get_path(data, ("policy", "vla"))
    if not isinstance(section, dict) or get_path(data, ("policy", "name")) != "vla":
        return []
    entry = part_entry("vla_backend", {"name": section.get("backend", "builtin")})
    return inert_keys_in(entry.config, section, ("policy", "vla")) if entry else []


def _inert_settings(kind: str, data: dict[str, Any]) -> list[Fault]:
    """List the inert keys in `env.cfg` or `algorithm.cfg`, depending on `kind`.

    The section's Config model and `INERT` determine which keys are inert.
    """
    entry, cfg = part_entry(kind, data.get(kind)), get_path(data, (kind, "cfg"))
    if entry is None or not isinstance(cfg, dict):
        return []
    faults = inert_keys_in(entry.config, cfg, (kind, "cfg"))
    known = known_keys(entry.config) | set(getattr(entry.config, "inert", ()))
    unknown = [key for key in cfg if key not in known and f"{kind}.cfg.{key}" in INERT]
    return [*faults, *(((kind, "cfg", key), INERT[f"{kind}.cfg.{key}"]) for key in unknown)]


def inert_keys(data: dict[str, Any]) -> list[Fault]:
    """List all inert keys of a config, each with the reason why ecrl ignores it.

    >>> inert_keys({"trainer": {"seed": 1, "enable_rt": False}, "env": {"name": "cartpole", "cfg": {"robot": {}}}})
    [(('trainer', 'enable_rt'), 'no ray tracing'), (('env', 'cfg', 'robot'), 'this environment has its own scene')]
    """
    trainer, env = data.get("trainer"), data.get("env")
    entry, faults = part_entry("env", env), []
    if isinstance(trainer, dict):
        faults += [(("trainer", key), INERT[f"trainer.{key}"]) for key in trainer if f"trainer.{key}" in INERT]
        faults += _inert_events(trainer.get("events"), entry)
    faults += _inert_vla_keys(data)
    return [*faults, *_inert_settings("env", data), *_inert_settings("algorithm", data)]


def _gym_faults(gym: Any) -> list[Fault]:
    """List the faults in the structure of a `gym_config` file."""
    if not isinstance(gym, dict):
        return [((), f"expected an object, got {format_value(gym)}")]
    env = gym.get("env", {})
    if not isinstance(env, dict):
        return [(("env",), f"expected an object, got {format_value(env)}")]
    faults = repeated_keys(gym)
    faults += [(("env", key), f"also given outside of 'env'; keep one {key!r}") for key in env if key in gym]
    return faults if isinstance(gym.get("id"), str) else [*faults, (("id",), "expected the name of an environment")]


def _add_file_fault(raw: RawConfig, text: str) -> RawConfig:
    """Add a fault of the file that `trainer.gym_config` names.

    Without the file, `env` may be missing, which validation finds later. This function makes the path of that later
    fault `trainer.gym_config` too. ecrl reports only the first fault of each path, so it reports only `text`.
    """
    absent = ("env", "name") if isinstance(raw.data.get("env"), dict) else ("env",)
    origins = dict(raw.origins)
    if get_path(raw.data, absent) is MISSING:
        origins[absent] = format_path(_GYM_CONFIG)
    return raw._replace(faults=[*raw.faults, (_GYM_CONFIG, text)], origins=origins)


def merge_gym_config(raw: RawConfig, folder: Path) -> RawConfig:
    """Merge the file at `trainer.gym_config` into the config. The config's values override the file's values.

    The file's `id` becomes `env.name`. The file's section `env` and its other top-level keys become `env.cfg`. If the
    config names another environment, the file is ignored with a warning.
    """
    if (name := get_path(raw.data, _GYM_CONFIG)) is MISSING:
        return raw
    raw = raw._replace(data=remove_path(raw.data, _GYM_CONFIG))
    if not isinstance(name, str):
        return _add_file_fault(raw, f"expected the path of a file, got {format_value(name)}")
    path = next(filter(os.path.exists, (name, str(folder / name))), None)
    if path is None:
        return _add_file_fault(
            raw, f"no such file {format_value(name)}, neither in the working directory nor in {folder}"
        )
    if not os.path.isfile(path):  # reading a device file may never end
        return _add_file_fault(raw, f"expected the path of a file, but {format_value(name)} is a folder or a device")
    if (reason := reason_to_refuse(path)) is not None:
        return _add_file_fault(raw, reason)
    try:
        gym = read(Path(path))
    except ConfigError as error:
        return _add_file_fault(raw, str(error))
    faults = [": ".join(filter(None, (path, format_path(loc), text))) for loc, text in _gym_faults(gym)]
    for text in faults:
        raw = _add_file_fault(raw, text)
    inline = raw.data.get("env", {})
    if faults or not isinstance(inline, dict) or not isinstance(inline.get("cfg", {}), dict):
        return raw
    if inline.get("name", gym["id"]) != gym["id"]:
        reason = f"{path} is for {gym['id']!r}, but env names {format_value(inline['name'])}"
        return raw._replace(inert=[*raw.inert, (_GYM_CONFIG, reason)])
    return _merge_settings(raw, gym, inline, path)


def _merge(file_value: Any, inline_value: Any, path: Loc, text: str, origins: dict[Loc, str]) -> Any:
    """Merge two values key by key: a value in the config itself (inline), and a value in the `gym_config` file.

    The inline value takes precedence. For each value from the file, record its origin in `origins`. `text` describes
    the position in the file.
    """
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


def _merge_settings(raw: RawConfig, gym: dict, inline: dict, path: str) -> RawConfig:
    """Merge the settings of a `gym_config` file into the settings in the config itself (inline).

    An inline value overrides the file's value.
    """
    origins, cfg, env = dict(raw.origins), inline.get("cfg", {}), gym.get("env", {})
    top_level = {key: value for key, value in gym.items() if key not in ("id", "env")}
    texts = {key: f"{path}: {key}" for key in top_level} | {key: f"{path}: env.{key}" for key in env}
    file = top_level | env
    merged = {
        key: _merge(file.get(key, MISSING), cfg.get(key, MISSING), ("env", "cfg", key), texts.get(key, ""), origins)
        for key in file | cfg
    }
    if "name" not in inline:
        origins["env", "name"] = f"{path}: id"
    return raw._replace(data=raw.data | {"env": inline | {"name": gym["id"], "cfg": merged}}, origins=origins)


def _drop_inert_keys(raw: RawConfig) -> RawConfig:
    """Remove the inert keys from the data, and add them to `raw.inert`."""
    inert, data = inert_keys(raw.data), raw.data
    for path, _ in inert:
        data = remove_path(data, path)
    return RawConfig(data, raw.origins, raw.faults, raw.inert + inert)


def translate_config(
    data: dict[str, Any], overrides: Mapping[str, Any], folder: Path, defaults: Mapping[str, Any]
) -> RawConfig:
    """Translate a config into ecrl's own keys.

    Args:
        data: config before translation, which the function does not change.
        overrides: dict from dotted key to a value that replaces the config's value.
        folder: folder in which ecrl looks for a relative `trainer.gym_config` that is not in the working directory.
        defaults: dict with the default values of `buffer_size` and `num_envs` in the trainer section.
    """
    raw = apply_aliases(RawConfig(lower_names(data), {}, repeated_keys(data), []))
    raw = apply_aliases(apply_overrides(raw, {key: lower_name(key, value) for key, value in overrides.items()}))
    raw = translate_releases(apply_aliases(merge_gym_config(raw, folder)))
    raw = convert_vla_section(convert_skip_flag(convert_counts(raw, defaults)))
    return _drop_inert_keys(reject_unused_aliases(raw))
