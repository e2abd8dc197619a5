"""Read configs from JSON files, YAML files and the command line. This module checks the syntax, not the keys."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ecrl.config.abcdrl import FLAGS, switch
from ecrl.config.model import ObjectPairs, format_path, repeated_keys
from ecrl.config.presets import preset_names
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean

_YAML_SUFFIXES = (".yaml", ".yml")
_MAX_BYTES, _MAX_VALUES, _MAX_MERGED = 2**24, 10**6, 10**5
"""Maximum numbers of bytes, of values and of values merged by `<<` in a file, for protection from malicious files."""


class _YamlLoader(yaml.SafeLoader):
    """YAML loader with JSON's types: the unquoted word `1e-8` is a number, but `off`, `yes` and dates are text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's own name and type)
    merged = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge the mappings that `<<` refers to. Raise ConstructorError if the file merges too many values."""
        merge_values = [value for key, value in node.value if key.tag.endswith(":merge")]
        parts = [
            p for value in merge_values for p in (value.value if isinstance(value, yaml.SequenceNode) else [value])
        ]
        for part in parts:
            if isinstance(part, yaml.MappingNode):
                self.flatten_mapping(part)
        self.merged += sum(len(part.value) for part in parts)
        if self.merged > _MAX_MERGED:
            problem = f"'<<' expands to more than {_MAX_MERGED:,} values"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        super().flatten_mapping(node)


for _kind, _pattern, _start_chars in (
    ("null", "~|null|Null|NULL|", ["", *"~nN"]),
    ("bool", "true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", "[-+]?(0|[1-9][0-9_]*)", [*"-+0123456789"]),
    ("float", r"[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
    ("float", r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", [*"-+.0123456789"]),
    ("merge", "<<", ["<"]),
):
    _YamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"({_pattern})\Z"), _start_chars)


def _build_mapping(loader: _YamlLoader, node: yaml.MappingNode) -> ObjectPairs:
    """Build a mapping and record its duplicate keys. A key may override a key that `<<` merges.

    Raises: ConstructorError if a key is a list or an object.
    """
    try:
        own = [(loader.construct_object(k, deep=True), None) for k, _ in node.value if not k.tag.endswith(":merge")]
        duplicates = ObjectPairs(own).repeated
        loader.flatten_mapping(node)
        mapping = ObjectPairs(loader.construct_pairs(node, deep=True))
    except TypeError:
        raise yaml.constructor.ConstructorError(
            None, None, "a key must be a name, not a list or an object", node.start_mark
        ) from None
    mapping.repeated = duplicates
    return mapping


_YamlLoader.add_constructor("tag:yaml.org,2002:map", _build_mapping)


def _yaml_error(path: Path, error: yaml.YAMLError, text: str) -> ConfigError:
    if isinstance(error, yaml.reader.ReaderError):
        preceding = text[: error.position]
        place = f"{path}:{preceding.count(chr(10)) + 1}:{len(preceding) - preceding.rfind(chr(10))}"
        return ConfigError(f"{place}: not YAML: {error.reason}, got {text[error.position]!r}")
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
    return ConfigError(f"{place}: not YAML: {' '.join(problem.split())}")


def _missing_file_error(path: Path) -> ConfigError:
    others = [other.name for end in (".json", *_YAML_SUFFIXES) for other in path.parent.glob(f"*{end}")]
    near = did_you_mean(path.name, others) if others else f"no .json or .yaml files in {path.parent}"
    hint = f"; or use the preset: {path.stem}" if path.stem in preset_names() else ""
    return ConfigError(f"{path}: no such file; {near}{hint}")


def _count_values(data: Any, counted: dict[int, int]) -> int:
    """Count the values in `data`.

    A value is counted again for each YAML alias that repeats the value. `counted` caches the counts by object id.
    """
    if not isinstance(data, dict | list):
        return 1
    if id(data) not in counted:
        counted[id(data)] = 1 + sum(
            _count_values(part, counted) for part in (data.values() if isinstance(data, dict) else data)
        )
    return counted[id(data)]


def read(path: Path) -> Any:
    """Read a file as YAML if its name ends in .yaml or .yml, else as JSON. Objects become `ObjectPairs`.

    Raises: ConfigError with a one-line message. For a syntax error, the message has the line and the column.
    """
    text = ""
    try:
        with path.open("rb") as file:  # limit the bytes, because reading a device file may never end
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"{path}: not a config: longer than {_MAX_BYTES:,} bytes")
        text = content.decode("utf-8-sig")
        if path.suffix.lower() not in _YAML_SUFFIXES:
            return json.loads(text, object_pairs_hook=ObjectPairs)
        data = yaml.load(text, _YamlLoader)
        if _count_values(data, {}) > _MAX_VALUES:
            raise ConfigError(
                f"{path}: not a config: more than {_MAX_VALUES:,} values, with each alias counted as a copy"
            )
        return data
    except FileNotFoundError:
        raise _missing_file_error(path) from None
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


def _parse_value(key: str, text: str) -> Any:
    """Parse `text` as JSON, or return `text` itself if it is not valid JSON. Raise ConfigError for a duplicate key."""
    try:
        value = json.loads(text, object_pairs_hook=ObjectPairs)
    except (RecursionError, ValueError):
        return text
    for path, message in repeated_keys(value):
        raise ConfigError(f"{key}: {format_path(path)}: {message}")
    return value


_PYTHON_WORDS = {"True": True, "False": False, "None": None}
"""Map the words for true, false and null in abcdRL's commands to their values."""


def _dotted_key(token: str) -> str:
    return token.removeprefix("--").replace("-", "_")


def split_values(token: str, following: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the tokens after a key on the command line into the values of the key and the rest.

    A key has one value, which follows the key or an equals sign. There are two exceptions, as in abcdRL: A boolean flag
    needs no value. A flag for a list takes all tokens before the next token that starts with `--`.

    >>> split_values("--trainer.tau", ["0.1", "run.json"]), split_values("--trainer.no-cuda", ["run.json"])
    ((['0.1'], ['run.json']), ([], ['run.json']))
    """
    key, equals, _ = token.partition("=")
    key = _dotted_key(key)
    number = next((i for i, text in enumerate(following) if text.startswith("--")), len(following))
    if equals:
        number = 0
    elif found := switch(key):
        words = ("true", "false", *_PYTHON_WORDS) if found[0] == key else ()
        number = int(number > 0 and following[0] in words)
    elif key not in FLAGS or FLAGS[key].kind != "array":
        number = min(number, 1)
    return list(following[:number]), list(following[number:])


def parse_overrides(tokens: Sequence[str]) -> dict[str, Any]:
    """Parse command-line tokens into dotted keys and values, for `load_config(path, overrides)`.

    Values are parsed as JSON. A value that is not valid JSON is a string. In a key, each `-` is replaced by `_`. For a
    flag of abcdRL, the words True, False and None mean true, false and null. A boolean flag of abcdRL needs no value,
    and `no-` before its name means false.

    >>> parse_overrides(["--trainer.seed", "3", "--algorithm.cfg.gamma=0.9", "--trainer.exp-name", "long run"])
    {'trainer.seed': 3, 'algorithm.cfg.gamma': 0.9, 'trainer.exp_name': 'long run'}
    >>> parse_overrides(["--trainer.no-cuda", "--trainer.target-kl", "None"])
    {'trainer.cuda': False, 'trainer.target_kl': None}

    Raises: ConfigError with a one-line message for a duplicate key, a key without a value, or a token that is not a
        key.
    """
    values, remaining = {}, list(tokens)
    while remaining:
        token = remaining.pop(0)
        key, equals, text = token.partition("=")
        path = _dotted_key(key)
        if not key.startswith("--"):
            raise ConfigError(f"{key}: not a key; keys start with --, such as --trainer.seed 3")
        if not re.fullmatch(r"\w+(\.\w+)+", path):
            raise ConfigError(f"{key}: unknown option; write a config key with its section, such as --trainer.seed 3")
        texts, remaining = split_values(token, remaining)
        texts = [text] if equals else texts
        found = switch(path)
        if found and not texts:
            path, value = found
        elif found and found[0] != path:
            raise ConfigError(f"{key}: takes no value; write {key}, or --{found[0]} false")
        elif path in FLAGS and FLAGS[path].kind == "array" and len(texts) != 1:
            value = texts
        elif not texts:
            raise ConfigError(f"{key}: has no value; write {key} VALUE or {key}=VALUE")
        elif path in FLAGS and texts[0] in _PYTHON_WORDS:
            value = _PYTHON_WORDS[texts[0]]
        else:
            value = _parse_value(key, texts[0])
        if path in values:
            raise ConfigError(f"{key}: given twice; keep one")
        values[path] = value
    return values
