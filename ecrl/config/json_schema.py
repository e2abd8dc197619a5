"""Generate a JSON schema of configs with the settings of every registered component.

Editors use the schema to complete the keys of a config.
"""

from typing import Any, cast

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ecrl.config import Config, EnvChoice, PolicyConfig, TrainerConfig
from ecrl.config.abcdrl import FLAGS, SECTIONS
from ecrl.config.aliases import COUNT_KEYS, GUARD_KEY, KEY_ALIASES, SKIP_KEY
from ecrl.config.model import ConfigModel, sections_in
from ecrl.registry import lookup, registered

KINDS = ("env", "policy", "algorithm", "network", "event", "action", "observation", "reward", "vla_backend")
_ANY_SETTINGS = "#/$defs/BaseModel"  # pydantic's reference for the settings of any component
_GYMNASIUM = {"type": "string", "pattern": "^gymnasium:."}


def _add_other_names(model: type[BaseModel], section: dict[str, Any]) -> None:
    """Add the alternative names of keys to the schema of a section."""
    names = model.other_names if issubclass(model, ConfigModel) else {}  # a user's model may have another base class
    for other, name in names.items():
        section["properties"][other] = section["properties"][name] | {"description": f"another name of {name}"}


def _part_models(models: list[type[BaseModel]]) -> dict[type[BaseModel], str]:
    """Map each config model that names a registered component, at any depth of `models`, to the component's kind."""
    kinds: dict[type[BaseModel], str] = {}
    pending = list(models)
    while pending:
        model = pending.pop(0)
        if isinstance(kind := getattr(model, "part_kind", None), str):
            kinds[model] = kind
        pending += [section for field in model.model_fields.values() for section in sections_in(field.annotation)]
    return kinds


def _whole_parts(models: list[type[BaseModel]]) -> dict[type[BaseModel], tuple[str, str]]:
    """Find the config models that the fields of `models` contain and that have the class attribute `whole_part`.

    A section of such a config model names a component, and the component's own config model validates the whole
    section. The result maps each such model to the component's kind and to the key whose value names the component.
    """
    annotations = [field.annotation for model in models for field in model.model_fields.values()]
    fields = (section for annotation in annotations for section in sections_in(annotation))
    return {model: cast(Any, model).whole_part for model in fields if "whole_part" in vars(model)}


def _split_by_component(defs: dict[str, Any], ref: str, key: str, default: Any, refs: dict[str, str]) -> None:
    """Split the schema of a section into one alternative per component. The section's `key` names the component.

    `ref` refers to the section in `defs`, and `refs` maps the name of each component to a reference to its schema.
    """
    place = ref.rpartition("/")[2]
    section, plain = defs[place], f"{place}-plain"
    if ref in refs.values():  # reached if the component's Config adds no keys
        defs[plain] = dict(section)
    alternatives = [
        {"$ref": f"{own}-plain" if own == ref else own, "properties": {key: {"const": name}}}
        | ({} if name == default else {"required": [key]})
        for name, own in refs.items()
    ]
    description = section["description"]
    section.clear()
    section.update({"description": description, "oneOf": alternatives})


def _branch(names: dict[str, Any], keys: list[str], settings: str, config: dict[str, Any], default: bool) -> dict:
    """Return a section's schema for one component.

    The component's name is under one of `keys`, and its settings are under the key `settings`.
    """
    required = [settings] if config.get("required") else []
    requirement = {"required": required} if default else {"oneOf": [{"required": [key, *required]} for key in keys]}
    return {"properties": {**dict.fromkeys(keys, names), settings: config["cfg"]}} | requirement


def _add_branches(section: dict[str, Any], kind: str, configs: dict[str, dict[str, Any]]) -> None:
    """Split the schema of a section that names a component into one alternative per registered component."""
    properties = section["properties"]
    settings = next(key for key, value in properties.items() if value.get("$ref") == _ANY_SETTINGS)
    keys = ["func"] if "func" in properties else [key for key in properties if key in ("name", "id", "type")]
    default = properties[keys[0]].get("default")
    properties[settings] = {"type": "object", "description": properties[settings]["description"]}
    section.pop("required")
    section["oneOf"] = [
        _branch({"const": name}, keys, settings, config, name == default) for name, config in configs.items()
    ]
    if kind == "env":
        pending = {"type": "object", "properties": {"id": False}}  # the name already contains the id
        section["oneOf"].append(_branch(_GYMNASIUM, keys, settings, {"cfg": pending}, False))


def _accept_plain_name(section: dict[str, Any], configs: dict[str, dict[str, Any]]) -> None:
    """Let a section's schema also accept the plain name of a component, if the component has no required settings."""
    names = [name for name, config in configs.items() if not config.get("required")]
    whole = dict(section)
    section.clear()
    section.update({"description": whole.pop("description"), "anyOf": [{"enum": names}, whole]})


def _add_translated_keys(trainer: dict[str, Any], env: dict[str, Any]) -> None:
    """Add the trainer keys that `ecrl.config.aliases` translates."""
    properties = trainer["properties"]
    for old, new in (KEY_ALIASES | COUNT_KEYS).items():
        key = old.removeprefix("trainer.")
        if old.startswith("trainer.") and key not in properties:
            least = 0 if new == "trainer.save_freq" else 1
            kind = {"type": "boolean"} if key == "deterministic_actions" else {"type": "integer", "minimum": least}
            properties[key] = kind | {"description": f"sets {new}{', in another unit' * (old in COUNT_KEYS)}"}
    properties["learning_env"] = env | {"description": "another name of env"}
    description = "path of a file with the environment's id and settings; values under env override the file's values"
    properties["gym_config"] = {"type": "string", "description": description}


def _with_no_limit(limit: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a time limit that may also be -1, which `ecrl.config.embodichain_releases` translates."""
    about = {key: limit[key] for key in ("description", "default", "title") if key in limit}
    return about | {"anyOf": [{key: value for key, value in limit.items() if key not in about}, {"const": -1}]}


def _add_flags(config_schema: dict[str, Any], trainer: dict[str, Any]) -> None:
    """Add the flags of abcdRL, which `ecrl.config.abcdrl` translates."""
    sections = {"trainer": trainer["properties"]} | {name: {} for name in SECTIONS}
    for flag, (kind, _) in FLAGS.items():
        section, _, key = flag.partition(".")
        sections[section][key] = {"type": kind, "description": "flag of abcdRL, which ecrl translates"}
    for name in SECTIONS:
        description = f"flags of abcdRL's {name}, which ecrl translates"
        section = {"type": "object", "properties": sections[name], "additionalProperties": False}
        config_schema["properties"][name] = section | {"description": description}


def _make_sections_optional(config_schema: dict[str, Any]) -> None:
    """Let the schema accept a config without `policy`, and without `env` if a trainer key sets the environment."""
    config_schema["required"].remove("policy")
    alternatives = {"anyOf": [{"required": [key]} for key in ("gym_config", "learning_env", "env_id")]}
    config_schema["required"].remove("env")
    config_schema["anyOf"] = [
        {"required": ["env"]},
        {"properties": {"trainer": alternatives}, "required": ["trainer"]},
    ]


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a config, without the keys of EmbodiChain that ecrl ignores.

    >>> schema = json_schema()
    >>> schema["$defs"]["TrainerConfig"]["properties"]["seed"]["default"]
    1
    """
    parts = {kind: {name: lookup(kind, name).config for name in registered(kind)} for kind in KINDS}
    models = [Config, TrainerConfig, PolicyConfig, *(m for by_name in parts.values() for m in by_name.values())]
    choices, whole = _part_models(models), _whole_parts(models)
    models += [*choices, *whole]
    refs, schema = models_json_schema([(model, "validation") for model in dict.fromkeys(models)])
    refs = {model: ref for (model, _), ref in refs.items()}
    sections = {model: schema["$defs"][ref["$ref"].rpartition("/")[2]] for model, ref in refs.items()}
    for model, section in sections.items():
        _add_other_names(model, section)
    num_envs = sections[TrainerConfig]["properties"]["num_envs"] | {"description": "another name of trainer.num_envs"}
    for model in parts["env"].values():
        properties = sections[model].setdefault("properties", {})
        properties["num_envs"] = num_envs
        if limit := properties.get("max_episode_steps"):
            properties["max_episode_steps"] = _with_no_limit(limit)
    configs = {k: {n: sections[m] | {"cfg": refs[m]} for n, m in by_name.items()} for k, by_name in parts.items()}
    for model, kind in choices.items():
        _add_branches(sections[model], kind, configs[kind])
    for model, kind in choices.items():
        if kind == "network":
            _accept_plain_name(sections[model], configs["network"])
    for model, (kind, key) in {PolicyConfig: ("policy", "name"), **whole}.items():
        own_refs = {name: config["cfg"]["$ref"] for name, config in configs[kind].items()}
        _split_by_component(schema["$defs"], refs[model]["$ref"], key, model.model_fields[key].default, own_refs)
    env = {"anyOf": [{"enum": list(configs["env"])}, _GYMNASIUM, refs[EnvChoice]]}
    _add_translated_keys(sections[TrainerConfig], env)
    config_schema = schema["$defs"].pop(refs[Config]["$ref"].rpartition("/")[2])
    config_schema["properties"]["env"] = env | {"description": config_schema["properties"]["env"]["description"]}
    skip = {"type": "boolean", "description": f"true sets {GUARD_KEY} to skip, and false sets it to stop"}
    sections[parts["algorithm"]["apg"]]["properties"][SKIP_KEY.rpartition(".")[2]] = skip
    _add_flags(config_schema, sections[TrainerConfig])
    _make_sections_optional(config_schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **config_schema, "$defs": schema["$defs"]}
