"""Define strict pydantic models for configs. Error messages have one line per fault, and use JSON's names of types."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from ecrl.config.other_libraries import suggestion
from ecrl.errors import ConfigError

_MESSAGES = {  # messages by error type, which replace pydantic's messages
    "missing": "missing",
    "model_type": "expected an object",
    "dict_type": "expected an object",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "int_type": "expected an integer",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "string_type": "expected a string",
    "string_unicode": "expected a string of valid Unicode",
    "string_pattern_mismatch": "not allowed",
    "string_too_long": "expected at most {max_length} characters",
    "literal_error": "expected {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "too_long": "expected at most {max_length} entries",
    "too_short": "expected at least {min_length} entries",
    "recursion_depth_exceeded": "nested too deeply",
}
_KIND = "kind"  # error type for values that match no alternative of `by_kind`

NUMBER, LIST, OBJECT = Tag("<number>"), Tag("<list>"), Tag("<object>")
"""Tags for a key that accepts several JSON types, such as a number or a list; see `by_kind`."""


def format_value(value: Any) -> str:
    """Format a value for an error message: short, on one line, and with JSON's words for null, true and false.

    >>> [format_value(x) for x in (None, True, 1.5, "a", [[1]], {})]
    ['null', 'true', '1.5', "'a'", 'a list', 'an object']
    """
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case int():
            return str(value) if abs(value) < 2**64 else "a huge integer"
        case float():
            return str(value)
        case str():
            return repr(value if len(value) <= 60 else f"{value[:60]}...")
        case dict():
            return "an object"
        case list() | tuple():
            return "a list"
    return type(value).__name__


def _kind_of(value: Any) -> str | None:
    match value:
        case bool():
            return None
        case int() | float():
            return NUMBER.tag
        case list() | tuple():
            return LIST.tag
    return OBJECT.tag if isinstance(value, dict) else None


def by_kind(expected: str) -> Discriminator:
    """Return a discriminator that chooses the type of a key by the JSON type of its value: number, list or object.

    Error messages then describe only the chosen type. Without the discriminator, pydantic would report an error for
    each type.

    >>> Numbers = Annotated[Annotated[float, NUMBER] | Annotated[list[float], LIST], by_kind("a number or a list")]
    >>> class Bounds(ConfigModel):
    ...     low: Numbers = Field(description="smallest draws")
    >>> validate_section(Bounds, {"low": [1.0, "x"]}, "run.json")
    Traceback (most recent call last):
    ecrl.errors.ConfigError: run.json: low[1]: expected a number, got 'x'; smallest draws
    """
    return Discriminator(_kind_of, custom_error_type=_KIND, custom_error_message=f"expected {expected}")


def format_key(key: Any) -> str:
    """Format one key of a path. Quote the key unless it is a plain word."""
    if isinstance(key, str):
        return key if re.fullmatch(r"[\w-]{1,60}", key) else format_value(key)
    return repr(key)


def term_text(section: str, name: str, func: str) -> str:
    """Format the path and the function of a term or event for the start of an error message.

    >>> term_text("env.cfg.events", "of my own", "push")
    "env.cfg.events.'of my own' (push)"
    """
    return f"{section}.{format_key(name)} ({func})"


Loc = tuple[str | int, ...]  # path of a key in a config: names and list indices
Fault = tuple[Loc, str]  # a fault in a config: the path of the key, and a message


def fault_at(path: Loc, message: str) -> InitErrorDetails:
    """Return a fault in the format of `ValidationError.from_exception_data`."""
    return InitErrorDetails(type=PydanticCustomError("fault", "{text}", {"text": message}), loc=path, input=None)


def faults_from_error(model: type[BaseModel], error: ValidationError) -> list[Fault]:
    """Convert pydantic's errors to faults.

    For the error types in `_MESSAGES` and for `_KIND`, a message says what is wrong, and contains the actual value
    unless the key is missing. If the key is a field of `model`, the message also contains the field's description. The
    messages of validators stay unchanged. pydantic does not count invalid entries of a list, so if a list has invalid
    entries, the error that the list is too short is left out.
    """
    faults, errors = [], error.errors(include_url=False)
    with_invalid_entries = {fault["loc"][:i] for fault in errors for i in range(len(fault["loc"]))}
    for fault in errors:
        if fault["type"] == "too_short" and fault["loc"] in with_invalid_entries:
            continue
        place = tuple(part for part in fault["loc"] if part not in (NUMBER.tag, LIST.tag, OBJECT.tag))
        place = place[:1] if fault["type"] == "recursion_depth_exceeded" else place  # the full path would be very long
        key, *indices = place or ("",)
        is_own = isinstance(key, str) and key in model.model_fields and all(isinstance(index, int) for index in indices)
        about = model.model_fields[str(key)].description if is_own else None
        message = re.sub("^(Value error|Assertion failed), ", "", fault["msg"])
        if fault["type"] in _MESSAGES:
            message = _MESSAGES[fault["type"]].format_map(fault.get("ctx", {}))
        if fault["type"] == "tuple_type" and isinstance(fault["input"], list):
            message = "a strict tuple accepts no list; declare the field as Annotated[tuple[...], Field(strict=False)]"
        elif fault["type"] in (*_MESSAGES, _KIND):
            message += f", got {format_value(fault['input'])}" if fault["type"] != "missing" else ""
            message += f"; {about}" if about else ""
        faults.append((place, message))
    return faults


def _hashable(value: Any) -> Any:
    """Convert a value to a hashable value. Equal values give equal results."""
    match value:
        case BaseModel():
            return type(value), tuple(_hashable(value.__dict__.get(name)) for name in type(value).model_fields)
        case dict():
            return frozenset((key, _hashable(part)) for key, part in value.items())
        case list() | tuple():
            return tuple(_hashable(part) for part in value)
        case set():
            return frozenset(value)
    return value


SETTINGS = {"name": ("cfg", "kwargs"), "func": ("params",), "type": ("network_cfg",)}
"""Map a key that names a component to the keys that hold its settings. A new name removes the old settings."""

_OF_ONE_ID = ("id", "kwargs", "max_episode_steps")
"""Settings of `gymnasium` that belong to a single id. The other settings stay if only the id changes."""


def without_old_settings(section: dict[str, Any], key: str, name: Any) -> dict[str, Any]:
    """Return a section without the settings that a new name of its component invalidates.

    >>> without_old_settings({"name": "ppo", "cfg": {"gamma": 0.9}}, "name", "sac")
    {'name': 'ppo'}
    >>> section = {"name": "gymnasium:ALE/Pong-v5", "cfg": {"atari": {}, "kwargs": {"mode": 1}}}
    >>> without_old_settings(section, "name", "gymnasium:ALE/Breakout-v5")["cfg"]
    {'atari': {}}
    """
    old, cfg = section.get(key), section.get("cfg")
    if old == name:
        return section
    if isinstance(cfg, dict) and all(str(text).partition(":")[0] == "gymnasium" for text in (old, name)):
        return section | {"cfg": {setting: value for setting, value in cfg.items() if setting not in _OF_ONE_ID}}
    return {other: value for other, value in section.items() if other not in SETTINGS[key]}


def _changed(data: Any, path: Loc, value: Any) -> dict:
    """Return a copy of a section with a new value at `path`. Create missing subsections."""
    key, *rest = path
    section = data if isinstance(data, dict) else {}
    if rest:
        return section | {key: _changed(section.get(key), tuple(rest), value)}
    if key in SETTINGS:
        section = without_old_settings(section, key, value)
    return section | {key: value}


class ConfigModel(BaseModel):
    """A section of the config: frozen, hashable and strict. The error for an unknown key suggests or lists keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    other_names: ClassVar[dict[str, str]] = {}
    """Map each alternative name of a key to the name of the field."""
    inert: ClassVar[dict[str, str]] = {}
    """Map each EmbodiChain key that ecrl ignores in this section to the reason why."""

    @model_validator(mode="wrap")
    @classmethod
    def _all_faults(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        faults, known = [], {}
        for key, value in data.items():
            name = cls.other_names.get(key, key)
            if name not in cls.model_fields:
                near = suggestion(str(key), [*cls.model_fields, *cls.other_names], hasattr(cls, "default_policy"))
                faults.append(fault_at((format_key(key),), f"unknown key; {near}"))
            elif name in known or (name != key and name in data):
                faults.append(fault_at((format_key(key),), f"another name of {name!r}, which is also given; keep one"))
            else:
                known[name] = value
        try:
            section = handler(known)
        except ValidationError as error:
            written: dict[Any, Any] = {cls.other_names.get(key, key): key for key in data}
            for path, message in faults_from_error(cls, error):
                faults.append(fault_at((*(written.get(key, key) for key in path[:1]), *path[1:]), message))
            raise ValidationError.from_exception_data(cls.__name__, faults) from None
        if faults:
            raise ValidationError.from_exception_data(cls.__name__, faults)
        return section

    def __hash__(self) -> int:
        return hash(_hashable(self))

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with new values. A dotted key sets a value of a subsection.

        If a change names another component, such as `name="sgd"`, the settings of the old component are removed.

        Raises: ConfigError with one line per fault, such as an unknown key or a value out of range.

        >>> class Size(ConfigModel):
        ...     width: int = Field(1, ge=1, description="width, m")
        >>> Size().replace(width=3)
        Size(width=3)
        """
        return validate_section(type(self), self._with_changes(changes), "replace")

    def _with_changes(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the config as a dict with the changes, before validation.

        Raises: ConfigError if two changes set the same key under two names.
        """
        keys: dict[Loc, str] = {}
        for key in changes:
            first, *rest = key.split(".")
            path = (self.other_names.get(first, first), *rest)
            if other := keys.get(path):
                alias, name = (other, key) if key == format_path(path) else (key, other)
                raise ConfigError(f"replace: {alias}: another name of {name!r}, which is also given; keep one")
            keys[path] = key
        data = self.to_dict()
        for path in sorted(keys, key=lambda path: (len(path), path[-1] not in SETTINGS)):
            data = _changed(data, path, changes[keys[path]])
        return data

    def copy(self, **changes: Any) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a validated copy with new values, as `replace` does. This name is for code written for EmbodiChain."""
        return self.replace(**changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dict of JSON values, which the Config model accepts again.

        >>> class Size(ConfigModel):
        ...     widths: tuple[int, ...] = Field((1, 2), strict=False, description="widths, m")
        >>> Size().to_dict()
        {'widths': [1, 2]}
        """
        return self.model_dump(mode="json", warnings=False)

    def validate(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Validate all values again, because `model_construct` and `model_copy` can make a config with wrong values.

        Raises: ConfigError with one line per fault.
        """
        validate_section(type(self), self.to_dict(), type(self).__name__)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name}: a config cannot be changed; make a changed copy with cfg.replace(...)")


def known_keys(model: type[BaseModel]) -> set[str]:
    """Return the keys that a section may have, including the alternative names of keys."""
    return {*model.model_fields, *(model.other_names if issubclass(model, ConfigModel) else ())}


def _check_float32(value: float) -> float:
    """Return the number, or raise ValueError if it is above 0 and outside the range of positive float32 numbers."""
    if value > 3.4e38 or 0.0 < value < 1.4e-45:
        raise ValueError(f"is {value}, but positive float32 numbers are between 1.4e-45 and 3.4e38; use one of these")
    return value


def lower_case(value: Any) -> Any:
    """Return a string in lower case, and any other value unchanged. EmbodiChain's names may have any case."""
    return value.lower() if isinstance(value, str) else value


Positive = Annotated[float, Field(gt=0.0), AfterValidator(_check_float32)]
NonNegative = Annotated[float, Field(ge=0.0), AfterValidator(_check_float32)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]


class ObjectPairs(dict):
    """Dict made from a JSON object or a YAML mapping. `repeated` lists the keys that occur more than once in it."""

    def __init__(self, pairs: Iterable[tuple[Any, Any]]):
        pairs = list(pairs)
        super().__init__(pairs)
        self.repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]


def repeated_keys(data: Any) -> list[Fault]:
    """List the duplicate keys of all objects in a config.

    The function uses a loop instead of recursion, because a file may be nested deeper than Python's recursion limit.
    """
    faults, rest, seen = [], [((), data)], set()
    while rest:
        path, part = rest.pop()
        if not isinstance(part, dict | list) or id(part) in seen:  # a YAML alias may refer to the same object again
            continue
        seen.add(id(part))
        if isinstance(part, list):
            rest += [((*path, index), child) for index, child in enumerate(part)]
            continue
        rest += [((*path, format_key(key)), child) for key, child in part.items()]
        if isinstance(part, ObjectPairs):
            faults += [((*path, format_key(name)), "given twice; keep one") for name in part.repeated]
    return faults


_QUOTED = re.compile(r"'.*'|\".*\"")


def format_path(path: Loc) -> str:
    """Format the path of a key for an error message.

    >>> format_path(("policy", "hidden_sizes", 0)), format_path(("events", "of my own"))
    ('policy.hidden_sizes[0]', "events.'of my own'")
    """
    words = (key if _QUOTED.fullmatch(str(key)) else format_key(key) for key in path)
    parts = zip(path, words, strict=True)
    return "".join(f"[{key}]" if isinstance(key, int) else f".{word}" for key, word in parts).removeprefix(".")


Section = TypeVar("Section", bound=BaseModel)


def validate_section(
    model: type[Section],
    data: Any,
    source: str,
    earlier_faults: Iterable[Fault] = (),
    path_text: Callable[[Loc], str] = format_path,
) -> Section:
    """Validate `data` with `model`. If the data has faults, raise a ConfigError with one line per fault.

    Args:
        model: Config model that validates the section.
        data: data of the section, before validation.
        source: start of each line, such as the file's name.
        earlier_faults: faults of earlier steps, which are also reported. Validation adds no second fault for the same
            path.
        path_text: function that formats a path for a message.
    """
    faults = list(earlier_faults)
    reported_paths = {path_text(path) for path, _ in faults}
    try:
        section = model.model_validate(data)
        if not faults:
            return section
    except ValidationError as error:
        faults += [fault for fault in faults_from_error(model, error) if path_text(fault[0]) not in reported_paths]
    raise ConfigError("\n".join(": ".join(filter(None, (source, path_text(path), text))) for path, text in faults))


def sections_in(annotation: Any) -> Iterator[type[ConfigModel]]:
    """Yield the config models that the type annotation of a field contains."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)
