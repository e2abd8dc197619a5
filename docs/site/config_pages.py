"""Generate the config reference, with the type, default and meaning of each key, from the models that check configs."""

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
from ecrl.config.embodichain import INERT
from ecrl.config.json_schema import KINDS
from ecrl.config.model import sections_in
from ecrl.registry import lookup, registered

PAGES = {"run": "Keys of a run", "environments": "Keys of environments", "mujoco": "Keys of MuJoCo tasks"}
_INTRO = {
    "run": "This page lists the keys of `trainer`, `env`, `policy` and `algorithm`, and of every registered policy, "
    "network and algorithm. `ecrl check FILE` reports all errors of a file at once. `ecrl schema` prints these keys as "
    "a JSON schema for editors.",
    "environments": "This page lists the keys of `env.cfg` for each `env.name`, and the `params` of events that work "
    "with any environment.",
    "mujoco": "This page lists the keys of `env.cfg` for MuJoCo tasks: the scene, the robot, and the `params` of terms "
    "and events.",
}
_PLURAL = {"integer": "integers", "number": "numbers", "text": "texts", "true or false": "flags"}
_HUGE = 2**31 - 1


def _bounds(schema: dict[str, Any]) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    bounds = [f"{word} {schema[key]:g}" for key, word in words.items() if abs(schema.get(key, _HUGE)) < _HUGE]
    return f" {' and '.join(bounds)}" if bounds else ""


def _list(schema: dict[str, Any]) -> str:
    parts = schema.get("prefixItems") or [schema.get("items") or {}]
    item = kind(parts[0])
    length = schema.get("maxItems") if schema.get("maxItems") == schema.get("minItems") else None
    return f"list of {f'{length} ' if length else ''}{_PLURAL.get(item, item)}"


def kind(schema: dict[str, Any]) -> str:
    """Describe in words which values the JSON schema of a key allows.

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
            values = schema.get("additionalProperties")
            return f"object of name: {kind(values)}" if isinstance(values, dict) else "object"
        case "integer" | "number" as number:
            return number + _bounds(schema)
    return {"string": "text", "boolean": "true or false", "null": "null"}.get(schema.get("type", ""), "any")


def nested(models: Iterable[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    """Yield the models of all sections that are nested in `models`, breadth first."""
    queue, visited = list(models), set(models)
    while queue:
        for field in queue.pop(0).model_fields.values():
            for model in sections_in(field.annotation):
                if model not in visited:
                    visited.add(model)
                    queue.append(model)
                    yield model


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "; required"
    if value is None or isinstance(value, BaseModel):
        return ""
    text = json.dumps(to_jsonable_python(value))
    return f"; default {escape(text, quote=False)}" if len(text) <= 60 else "; has a default"


def plain(text: str) -> str:
    """Escape special characters so that Markdown and HTML show the text unchanged."""
    return re.sub(r"([\\*_{}\[\]|])", r"\\\1", escape(text, quote=False))


def _title(model: type[BaseModel]) -> str:
    return model.__name__.removesuffix("Config") or "Sections"


def _table(model: type[BaseModel], links: dict[str, str]) -> str:
    properties = model.model_json_schema()["properties"] if model.model_fields else {}
    if not properties:
        return "No keys."
    rows = ["| key | meaning |", "|---|---|"]
    for name, field in model.model_fields.items():
        type_text = re.sub(r"@(\w+)", lambda match: links.get(match[1], match[1]), kind(properties[name]))
        aliases = [f"`{alias}`" for alias, key in getattr(model, "other_names", {}).items() if key == name]
        meaning = plain(field.description or "") + (f"; also {', '.join(aliases)}" if aliases else "")
        rows.append(f"| `{name}` | {meaning} <small>{type_text}{_default(field)}</small> |")
    return "\n".join(rows)


def _parts(page: str) -> dict[str, dict[type[BaseModel], list[str]]]:
    """Return the names of the registered components on this page, grouped by kind of component and Config model."""
    parts: dict[str, dict[type[BaseModel], list[str]]] = {}
    for part in KINDS:
        for name in registered(part):
            entry = lookup(part, name)
            of_mujoco = entry.make.__module__.startswith("ecrl.envs.mujoco")
            entry_page = "mujoco" if of_mujoco else "environments" if part in ("env", "event") else "run"
            if entry_page == page and entry.make.__module__.startswith("ecrl."):
                parts.setdefault(part, {}).setdefault(entry.config, []).append(name)
    return parts


def _summary(documented: Any) -> str:
    """Return the first paragraph of a docstring."""
    return (inspect.getdoc(documented) or "").split("\n\n")[0].replace("\n", " ")


def _part_summaries(part: str, names: list[str]) -> str:
    docs = {name: _summary(lookup(part, name).make) for name in names}
    return docs[names[0]] if len(names) == 1 else "\n".join(f"- `{name}`: {doc}" for name, doc in docs.items())


_ROOTS = {"run": [Config], "environments": [], "mujoco": []}


def _models(page: str) -> list[type[BaseModel]]:
    """Return the models of the sections on a page, except the Config models of registered components."""
    part_models = {model for models in _parts(page).values() for model in models}
    sections = nested([*_ROOTS[page], *part_models])
    return [*_ROOTS[page], *(model for model in sections if model not in part_models)]


def _page(page: str, links: dict[str, str]) -> str:
    text = [f"# {PAGES[page]}", _INTRO[page]]
    roots = [*_ROOTS[page], *nested(_ROOTS[page])]
    for model in roots:
        text += [f"## {_title(model)}", _summary(model), _table(model, links)]
    for part, models in _parts(page).items():
        text += [f"## Registered for `{part}`"]
        for model, names in models.items():
            text += [f"### {', '.join(names)}", _part_summaries(part, names), _table(model, links)]
    subsections = [model for model in _models(page) if model not in roots]
    text += ["## Nested sections"] if subsections else []
    for model in subsections:
        text += [f"### {_title(model)}", _summary(model), _table(model, links)]
    if page == "run":
        text += [
            "## Ignored keys",
            "EmbodiChain's files may contain these keys. ecrl ignores each of these keys with a warning.",
        ]
        text += ["\n".join(f"- `{key}`: {reason}" for key, reason in INERT.items())]
    return "\n\n".join(filter(None, text)) + "\n"


def config_pages() -> dict[str, str]:
    """Return a dict from the path of each page to its Markdown."""
    links = {}
    for page in PAGES:
        headings = {model: ", ".join(names) for models in _parts(page).values() for model, names in models.items()}
        for model in [*_models(page), *headings]:
            slug = re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", headings.get(model, _title(model)).lower()))
            links.setdefault(model.__name__, f"[{_title(model)}]({page}.md#{slug})")
    return {f"reference/config/{page}.md": _page(page, links) for page in PAGES}
