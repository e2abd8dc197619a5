"""Where configs come from: JSON files, YAML files and the command line. Syntax is checked here, meaning elsewhere."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean
from ecrl.strict import ObjectPairs, dotted, repeated

_YAML_SUFFIXES = (".yaml", ".yml")


class _Yaml(yaml.SafeLoader):
    """YAML whose plain words mean what they mean in JSON: `1e-8` is a number; `off`, `yes` and dates are strings."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's own name and type)


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


def _yaml_error(path: Path, error: yaml.YAMLError) -> ConfigError:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    at = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
    return ConfigError(f"{at}: not YAML: {' '.join(problem.split())}")


def _no_such_file(path: Path) -> ConfigError:
    others = [other.name for end in (".json", *_YAML_SUFFIXES) for other in path.parent.glob(f"*{end}")]
    near = did_you_mean(path.name, others) if others else f"no .json or .yaml files in {path.parent}"
    return ConfigError(f"{path}: no such file; {near}")


def read(path: Path) -> Any:
    """What a file holds: YAML where its name ends in .yaml or .yml, else JSON. Objects know their keys given twice.

    Raises: ConfigError, one line, with line and column where the syntax is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() in _YAML_SUFFIXES:
            return yaml.load(text, _Yaml)
        return json.loads(text, object_pairs_hook=ObjectPairs)
    except FileNotFoundError:
        raise _no_such_file(path) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise _yaml_error(path, error) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (RecursionError, ValueError) as error:
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
