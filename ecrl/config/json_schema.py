"""The JSON schema of a whole config, with the settings of every registered part filled in: for editors, for reading."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ecrl.config import Config, EnvChoice, PolicyConfig, TrainerConfig
from ecrl.config.aliases import COUNTS, GUARD, MOVES, SKIP
from ecrl.config.inert import sections_in
from ecrl.config.model import ConfigModel
from ecrl.registry import lookup, registered

KINDS = ("env", "policy", "algorithm", "network", "event", "action", "observation", "reward")
_ANY = "#/$defs/BaseModel"  # how pydantic writes settings that the registry finds
_GYMNASIUM = {"type": "string", "pattern": "^gymnasium:."}


def _add_other_names(model: type[BaseModel], section: dict[str, Any]) -> None:
    """Add the further names of keys."""
    for other, name in model.other_names.items() if issubclass(model, ConfigModel) else ():  # users' may be others
        section["properties"][other] = section["properties"][name] | {"description": f"another name of {name}"}


def _choices(models: list[type[BaseModel]]) -> dict[type[BaseModel], str]:
    """Sections in these, or in those in them, that name a registered part; and of which kind."""
    found: dict[type[BaseModel], str] = {}
    rest = list(models)
    while rest:
        model = rest.pop(0)
        if isinstance(kind := getattr(model, "part_kind", None), str):
            found[model] = kind
        rest += [one for field in model.model_fields.values() for one in sections_in(field.annotation)]
    return found


def _branch(names: dict[str, Any], keys: list[str], settings: str, config: dict[str, Any], default: bool) -> dict:
    """A section that says its name, one of `names`, by any one of `keys`, and has its part's settings."""
    needed = [settings] if config.get("required") else []
    named = {"required": needed} if default else {"oneOf": [{"required": [key, *needed]} for key in keys]}
    return {"properties": {**dict.fromkeys(keys, names), settings: config["cfg"]}} | named


def _choose(section: dict[str, Any], kind: str, configs: dict[str, dict[str, Any]]) -> None:
    """Turn a named part's section into one branch per registered name."""
    properties = section["properties"]
    settings = next(key for key, value in properties.items() if value.get("$ref") == _ANY)
    keys = ["func"] if "func" in properties else [key for key in properties if key in ("name", "id", "type")]
    default = properties[keys[0]].get("default")
    properties[settings] = {"type": "object", "description": properties[settings]["description"]}
    section.pop("required")
    section["oneOf"] = [
        _branch({"const": name}, keys, settings, config, name == default) for name, config in configs.items()
    ]
    if kind == "env":
        rest = {"type": "object", "properties": {"id": False}}  # the name has it
        section["oneOf"].append(_branch(_GYMNASIUM, keys, settings, {"cfg": rest}, False))


def _add_translated_keys(trainer: dict[str, Any], env: dict[str, Any]) -> None:
    """Add the keys of the trainer that `ecrl.config.aliases` understands."""
    properties = trainer["properties"]
    for old, new in (MOVES | COUNTS).items():
        key = old.removeprefix("trainer.")
        if old.startswith("trainer.") and key not in properties:
            kind = {"type": "boolean"} if key == "deterministic_actions" else {"type": "integer", "minimum": 1}
            properties[key] = kind | {"description": f"another {'unit' if old in COUNTS else 'place'} of {new}"}
    properties["learning_env"] = env | {"description": "another place of env"}
    about = "path of a file with the environment's id and settings, which env wins over key by key"
    properties["gym_config"] = {"type": "string", "description": about}


def _env_may_stand_elsewhere(whole: dict[str, Any]) -> None:
    elsewhere = {"anyOf": [{"required": [key]} for key in ("gym_config", "learning_env")]}
    whole["required"].remove("env")
    whole["anyOf"] = [{"required": ["env"]}, {"properties": {"trainer": elsewhere}, "required": ["trainer"]}]


def json_schema() -> dict[str, Any]:
    """The schema, JSON Schema draft 2020-12; keys without a meaning here (`ecrl.config.inert`) are left out.

    >>> schema = json_schema()
    >>> schema["$defs"]["TrainerConfig"]["properties"]["seed"]["default"]
    1
    """
    parts = {kind: {name: lookup(kind, name).config for name in registered(kind)} for kind in KINDS}
    models = [Config, TrainerConfig, PolicyConfig, *(m for named in parts.values() for m in named.values())]
    choices = _choices(models)
    models += choices
    refs, schema = models_json_schema([(model, "validation") for model in dict.fromkeys(models)])
    refs = {model: ref for (model, _), ref in refs.items()}
    sections = {model: schema["$defs"][ref["$ref"].rpartition("/")[2]] for model, ref in refs.items()}
    for model, section in sections.items():
        _add_other_names(model, section)
    num_envs = sections[TrainerConfig]["properties"]["num_envs"] | {"description": "another place of trainer.num_envs"}
    for model in parts["env"].values():
        sections[model].setdefault("properties", {})["num_envs"] = num_envs
    configs = {k: {n: sections[m] | {"cfg": refs[m]} for n, m in named.items()} for k, named in parts.items()}
    for model, kind in choices.items():
        _choose(sections[model], kind, configs[kind])
    _choose(schema["$defs"]["NetworkConfig"], "network", configs["network"])  # beside the policies, which are above
    plain = {"$ref": refs[PolicyConfig]["$ref"] + "-plain"}  # of policies that have no keys of their own
    if PolicyConfig in parts["policy"].values():
        schema["$defs"][plain["$ref"].rpartition("/")[2]] = dict(sections[PolicyConfig])
    policies = [
        (plain if parts["policy"][name] is PolicyConfig else config["cfg"])
        | {"properties": {"name": {"const": name}}, "required": ["name"]}
        for name, config in configs["policy"].items()
    ]
    about = sections[PolicyConfig]["description"]
    sections[PolicyConfig].clear()
    sections[PolicyConfig].update({"description": about, "oneOf": policies})
    env = {"anyOf": [{"enum": list(configs["env"])}, _GYMNASIUM, refs[EnvChoice]]}
    _add_translated_keys(sections[TrainerConfig], env)
    whole = schema["$defs"].pop(refs[Config]["$ref"].rpartition("/")[2])
    whole["properties"]["env"] = env | {"description": whole["properties"]["env"]["description"]}
    skip = {"type": "boolean", "description": f"true: {GUARD} is skip, false: stop"}
    sections[parts["algorithm"]["apg"]]["properties"][SKIP.rpartition(".")[2]] = skip
    _env_may_stand_elsewhere(whole)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole, "$defs": schema["$defs"]}
