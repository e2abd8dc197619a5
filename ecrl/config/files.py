"""Where configs come from: JSON files, YAML files and the command line. Syntax is checked here, meaning elsewhere."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ecrl.config.model import ObjectPairs, dotted, repeated
from ecrl.config.presets import preset_names
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean

_YAML_SUFFIXES = (".yaml", ".yml")
_BYTES, _VALUES, _MERGED = 2**24, 10**6, 10**5
"""Of a file, in it, and merged within it by `<<`; far more than anyone writes."""


class _Yaml(yaml.SafeLoader):
    """YAML whose plain words mean what they mean in JSON: `1e-8` is a number; `off`, `yes` and dates are strings."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's own name and type)
    merged = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put what `<<` names into a mapping, unless a few lines of it stand for more than a file may hold."""
        named = [value for key, value in node.value if key.tag.endswith(":merge")]
        parts = [p for value in named for p in (value.value if isinstance(value, yaml.SequenceNode) else [value])]
        for part in parts:
            if isinstance(part, yaml.MappingNode):
                self.flatten_mapping(part)
        self.merged += sum(len(part.value) for part in parts)
        if self.merged > _MERGED:
            problem = f"'<<' stands for more than {_MERGED:,} values"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        super().flatten_mapping(node)


for _kind, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["", *"~nN"]),
    ("bool", "true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", "[-+]?(0|[1-9][0-9_]*)", [*"-+0123456789"]),
    ("float", r"[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
    ("float", r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", [*"-+.0123456789"]),
    ("merge", "<<", ["<"]),
):
    _Yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"({_pattern})\Z"), _first)


def _object(loader: _Yaml, node: yaml.MappingNode) -> ObjectPairs:
    """A mapping; what `<<` merges into it may be given again, its own keys may not."""
    try:
        own = [(loader.construct_object(k, deep=True), None) for k, _ in node.value if not k.tag.endswith(":merge")]
        twice = ObjectPairs(own).repeated
        loader.flatten_mapping(node)
        made = ObjectPairs(loader.construct_pairs(node, deep=True))
    except TypeError:
        raise yaml.constructor.ConstructorError(None, None, "a key must be a name", node.start_mark) from None
    made.repeated = twice
    return made


_Yaml.add_constructor("tag:yaml.org,2002:map", _object)


def _yaml_error(path: Path, error: yaml.YAMLError, text: str) -> ConfigError:
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        at = f"{path}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        return ConfigError(f"{at}: not YAML: {error.reason}, got {text[error.position]!r}")
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    at = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
    return ConfigError(f"{at}: not YAML: {' '.join(problem.split())}")


def _no_such_file(path: Path) -> ConfigError:
    others = [other.name for end in (".json", *_YAML_SUFFIXES) for other in path.parent.glob(f"*{end}")]
    near = did_you_mean(path.name, others) if others else f"no .json or .yaml files in {path.parent}"
    hint = f"; or use the preset: {path.stem}" if path.stem in preset_names() else ""
    return ConfigError(f"{path}: no such file; {near}{hint}")


def _size(data: Any, known: dict[int, int]) -> int:
    """How many values there are, each as often as YAML's aliases repeat it."""
    if not isinstance(data, dict | list):
        return 1
    if id(data) not in known:
        known[id(data)] = 1 + sum(_size(part, known) for part in (data.values() if isinstance(data, dict) else data))
    return known[id(data)]


def read(path: Path) -> Any:
    """What a file holds: YAML where its name ends in .yaml or .yml, else JSON. Objects know their keys given twice.

    Raises: ConfigError, one line, with line and column where the syntax is wrong.
    """
    text = ""
    try:
        with path.open("rb") as file:  # which may be a device without an end
            text = file.read(_BYTES + 1).decode("utf-8-sig")
        if len(text) > _BYTES:
            raise ConfigError(f"{path}: not a config: longer than {_BYTES:,} bytes")
        if path.suffix.lower() not in _YAML_SUFFIXES:
            return json.loads(text, object_pairs_hook=ObjectPairs)
        data = yaml.load(text, _Yaml)
        if _size(data, {}) > _VALUES:
            raise ConfigError(f"{path}: not a config: its aliases stand for more than {_VALUES:,} values")
        return data
    except FileNotFoundError:
        raise _no_such_file(path) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise _yaml_error(path, error, text) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not a config: nested too deeply") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: not a config: {error}") from None


def _value(key: str, text: str) -> Any:
    """JSON where it is JSON, else the text itself."""
    try:
        value = json.loads(text, object_pairs_hook=ObjectPairs)
    except (RecursionError, ValueError):
        return text
    for path, message in repeated(value):
        raise ConfigError(f"{key}: {dotted(path)}: {message}")
    return value


def parse_overrides(tokens: Sequence[str]) -> dict[str, Any]:
    """Command-line tokens as dotted keys and values, for `load_config(path, overrides)`.

    Values are read as JSON, and where they are none, as strings; `-` in a key is `_`.

    >>> parse_overrides(["--trainer.seed", "3", "--algorithm.cfg.gamma=0.9", "--trainer.exp-name", "long run"])
    {'trainer.seed': 3, 'algorithm.cfg.gamma': 0.9, 'trainer.exp_name': 'long run'}

    Raises: ConfigError, one line: something that is no key, a key given twice or one without a value.
    """
    found, rest = {}, list(tokens)
    while rest:
        key, equals, text = rest.pop(0).partition("=")
        path = key.removeprefix("--").replace("-", "_")
        if not key.startswith("--"):
            raise ConfigError(f"{key}: not a key; keys start with --, such as --trainer.seed 3")
        if not re.fullmatch(r"\w+(\.\w+)+", path):
            raise ConfigError(f"{key}: unknown option; a key of the config has its section, such as --trainer.seed 3")
        if path in found:
            raise ConfigError(f"{key}: given twice; keep one")
        if not equals and (not rest or rest[0].startswith("--")):
            raise ConfigError(f"{key}: has no value; write {key} VALUE or {key}=VALUE")
        found[path] = _value(key, text if equals else rest.pop(0))
    return found
