"""The config reference: every key with its kind, default and meaning, made from the models that check configs."""

import inspect
import json
import re
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from ecrl.config import Config
from ecrl.config.inert import INERT, sections_in
from ecrl.config.json_schema import KINDS
from ecrl.registry import lookup, registered

PAGES = {"run": "Keys of a run", "environments": "Keys of environments", "mujoco": "Keys of MuJoCo tasks"}
_INTRO = {
    "run": "The sections `trainer`, `env`, `policy` and `algorithm`, and the settings of every registered policy, "
    "network and algorithm. `ecrl check FILE` tells every fault of a file at once; `ecrl schema` prints all this as a "
    "JSON schema, for editors.",
    "environments": "What stands under `env.cfg` for an `env.name`, and the settings (`params`) of events that suit "
    "any environment.",
    "mujoco": "What stands under `env.cfg` for MuJoCo tasks: scene, robot, and the settings (`params`) of terms and "
    "events.",
}
_PLURAL = {"integer": "integers", "number": "numbers", "text": "texts", "true or false": "flags"}
_HUGE = 2**31 - 1


def _bounds(schema: dict[str, Any]) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    told = [f"{word} {schema[key]:g}" for key, word in words.items() if abs(schema.get(key, _HUGE)) < _HUGE]
    return f" {' and '.join(told)}" if told else ""


def _list(schema: dict[str, Any]) -> str:
    parts = schema.get("prefixItems") or [schema.get("items") or {}]
    one = kind(parts[0])
    length = schema.get("maxItems") if schema.get("maxItems") == schema.get("minItems") else None
    return f"list of {f'{length} ' if length else ''}{_PLURAL.get(one, one)}"


def kind(schema: dict[str, Any]) -> str:
    """What a key's JSON schema asks for, in words.

    >>> kind({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}), kind({"enum": ["a", "b"]})
    ('integer at least 1 or null', '"a" or "b"')
    """
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(kind, choices)))
    if ref := schema.get("$ref"):
        return "object" if ref.endswith("/BaseModel") else f"@{ref.rpartition('/')[2]}"
    if "enum" in schema or "const" in schema:
        return " or ".join(map(json.dumps, schema.get("enum", [schema.get("const")])))
    match schema.get("type"):
        case "array":
            return _list(schema)
        case "object":
            each = schema.get("additionalProperties")
            return f"object of name: {kind(each)}" if isinstance(each, dict) else "object"
        case "integer" | "number" as number:
            return number + _bounds(schema)
    return {"string": "text", "boolean": "true or false", "null": "null"}.get(schema.get("type", ""), "any")


def nested(models: Iterable[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    """The models of sections in these, and in those in them, breadth first."""
    rest, seen = list(models), set(models)
    while rest:
        for field in rest.pop(0).model_fields.values():
            for model in sections_in(field.annotation):
                if model not in seen:
                    seen.add(model)
                    rest.append(model)
                    yield model


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "; required"
    if value is None or isinstance(value, BaseModel):
        return ""
    text = json.dumps(to_jsonable_python(value))
    return f"; {escape(text, quote=False)} if absent" if len(text) <= 60 else "; has a default"


def plain(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return re.sub(r"([\\*_{}\[\]|])", r"\\\1", escape(text, quote=False))


def _title(model: type[BaseModel]) -> str:
    return model.__name__.removesuffix("Config") or "Sections"


def _table(model: type[BaseModel], links: dict[str, str]) -> str:
    properties = model.model_json_schema()["properties"] if model.model_fields else {}
    if not properties:
        return "No keys."
    rows = ["| key | meaning |", "|---|---|"]
    for name, field in model.model_fields.items():
        told = re.sub(r"@(\w+)", lambda found: links.get(found[1], found[1]), kind(properties[name]))
        others = [f"`{other}`" for other, own in getattr(model, "other_names", {}).items() if own == name]
        about = plain(field.description or "") + (f"; also {', '.join(others)}" if others else "")
        rows.append(f"| `{name}` | {about} <small>{told}{_default(field)}</small> |")
    return "\n".join(rows)


def _parts(page: str) -> dict[str, dict[type[BaseModel], list[str]]]:
    """Names of registered parts by kind and Config model, those that are told of on this page."""
    found: dict[str, dict[type[BaseModel], list[str]]] = {}
    for sort in KINDS:
        for name in registered(sort):
            entry = lookup(sort, name)
            of_mujoco = entry.make.__module__.startswith("ecrl.envs.mujoco")
            home = "mujoco" if of_mujoco else "environments" if sort in ("env", "event") else "run"
            if home == page and entry.make.__module__.startswith("ecrl."):
                found.setdefault(sort, {}).setdefault(entry.config, []).append(name)
    return found


def _first(thing: Any) -> str:
    """The first paragraph of a docstring."""
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")


def _about(sort: str, names: list[str]) -> str:
    docs = {name: _first(lookup(sort, name).make) for name in names}
    return docs[names[0]] if len(names) == 1 else "\n".join(f"- `{name}`: {doc}" for name, doc in docs.items())


_ROOTS = {"run": [Config], "environments": [], "mujoco": []}


def _models(page: str) -> list[type[BaseModel]]:
    """The models of sections that are told of on a page, without those of registered parts."""
    own = {model for named in _parts(page).values() for model in named}
    return [*_ROOTS[page], *(model for model in nested([*_ROOTS[page], *own]) if model not in own)]


def _page(page: str, links: dict[str, str]) -> str:
    text = [f"# {PAGES[page]}", _INTRO[page]]
    roots = [*_ROOTS[page], *nested(_ROOTS[page])]
    for model in roots:
        text += [f"## {_title(model)}", _first(model), _table(model, links)]
    for sort, named in _parts(page).items():
        text += [f"## Registered for `{sort}`"]
        for model, names in named.items():
            text += [f"### {', '.join(names)}", _about(sort, names), _table(model, links)]
    rest = [model for model in _models(page) if model not in roots]
    text += ["## Sections of these"] if rest else []
    for model in rest:
        text += [f"### {_title(model)}", _first(model), _table(model, links)]
    if page == "run":
        text += ["## Keys without a meaning here", "EmbodiChain's files may hold these; each is said once and ignored."]
        text += ["\n".join(f"- `{key}`: {why}" for key, why in INERT.items())]
    return "\n\n".join(filter(None, text)) + "\n"


def config_pages() -> dict[str, str]:
    """Markdown by path."""
    links = {}
    for page in PAGES:
        own = {model: ", ".join(names) for named in _parts(page).values() for model, names in named.items()}
        for model in [*_models(page), *own]:
            slug = re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", own.get(model, _title(model)).lower()))
            links.setdefault(model.__name__, f"[{_title(model)}]({page}.md#{slug})")
    return {f"reference/config/{page}.md": _page(page, links) for page in PAGES}
