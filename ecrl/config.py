"""The JSON config: strict, frozen, every fault at once with its JSON path and what to do.

Four sections, `trainer`, `env`, `policy` and `algorithm`. Every source (file, dict, `Config.replace`) passes one path:
duplicate-key check, dict, pydantic. The Config models of named parts live beside the parts; the registry finds them.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from ecrl.registry import Entry, did_you_mean, lookup, registered


class ConfigError(ValueError):
    """Faults in a config, one line each: `source: path: what is wrong; what to do`."""


_SAYS = {  # pydantic's kinds of faults, in the words of someone who writes JSON
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
    "literal_error": "expected {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "too_long": "expected at most {max_length} entries",
    "too_short": "expected at least {min_length} entries",
}


def _shown(value: Any) -> str:
    """A value as its writer knows it, short, on one line.

    >>> [_shown(x) for x in (None, True, 1.5, "a", [[1]], {})]
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


def _key(key: Any) -> str:
    """A key as part of a path; quoted where it would not read as one."""
    return key if isinstance(key, str) and re.fullmatch(r"[\w-]+", key) else repr(key)


Loc = tuple[str | int, ...]  # of a key: names and list indices


def _fault(path: Loc, message: str) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError("fault", "{text}", {"text": message}), loc=path, input=None)


def _explained(model: type[BaseModel], error: ValidationError) -> list[tuple[Loc, str]]:
    """What pydantic found in a section: where, and what was expected, what was given and what the key means."""
    found = []
    for fault in error.errors(include_url=False):
        key, *deeper = fault["loc"] or ("",)
        own = isinstance(key, str) and key in model.model_fields and all(isinstance(index, int) for index in deeper)
        about = model.model_fields[str(key)].description if own else None
        message = re.sub("^(Value error|Assertion failed), ", "", fault["msg"])
        if fault["type"] in _SAYS:
            message = _SAYS[fault["type"]].format_map(fault.get("ctx", {}))
            message += f", got {_shown(fault['input'])}" if fault["type"] != "missing" else ""
            message += f"; {about}" if about else ""
        found.append((fault["loc"], message))
    return found


class ConfigModel(BaseModel):
    """A section of the config: frozen, hashable, strict; refuses unknown keys with the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    other_names: ClassVar[dict[str, str]] = {}
    """Further names of keys, each with the key it means."""

    @model_validator(mode="wrap")
    @classmethod
    def _all_faults(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        faults, known = [], {}
        for key, value in data.items():
            name = cls.other_names.get(key, key)
            if name not in cls.model_fields:
                near = did_you_mean(key, [*cls.model_fields, *cls.other_names])
                faults.append(_fault((_key(key),), f"unknown key; {near}"))
            elif name != key and name in data:
                faults.append(_fault((_key(key),), f"another name of {name!r}, which is given too; keep one"))
            else:
                known[name] = value
        try:
            made = handler(known)
        except ValidationError as error:
            written: dict[Any, Any] = {cls.other_names.get(key, key): key for key in data}
            for path, message in _explained(cls, error):
                faults.append(_fault((*(written.get(key, key) for key in path[:1]), *path[1:]), message))
            raise ValidationError.from_exception_data(cls.__name__, faults) from None
        if faults:
            raise ValidationError.from_exception_data(cls.__name__, faults)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name}: a config never changes; make a changed copy with cfg.replace(...)")


Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1, lt=2**31)]


class TrainerConfig(ConfigModel):
    """How long, where and with how many environments."""

    other_names: ClassVar = {"rollout_steps": "buffer_size"}

    exp_name: str = Field(
        "generic_exp", pattern=r"^[\w.+-]+$", description="letters, digits and _.+-; names the run folder"
    )
    seed: int = Field(1, ge=0, lt=2**62, description="all randomness of the run derives from it")
    device: str = Field("cpu", description='"cpu", "cuda", "cuda:<index>" or "auto" (cuda where there is one)')
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="compile step and minibatch; auto: where a C++ compiler works"
    )
    num_envs: Count = Field(64, description="environments per rank")
    iterations: Count = Field(250, description="rounds of collecting and learning")
    buffer_size: Count = Field(2048, description="steps per environment and iteration; also called rollout_steps")
    distributed: bool = Field(False, description="one process per device under torchrun")
    enable_eval: bool = Field(False, description="evaluate during training")
    eval_freq: Count = Field(10_000, description="environment steps between evaluations; fires when crossed")
    num_eval_envs: Count = Field(4, description="environments of an evaluation, at most")
    num_eval_episodes: Count = Field(5, description="episodes of an evaluation, over all its environments")
    eval_seed: int | None = Field(None, ge=0, lt=2**62, description="seed of evaluations; seed + 10000 if absent")
    save_freq: Count = Field(50_000, description="environment steps between checkpoints; fires when crossed")

    @field_validator("device")
    @classmethod
    def _available(cls, device: str) -> str:
        import torch

        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
        if device not in ("cpu", "auto", *cuda, *["cuda"][: len(cuda)]):
            raise ValueError(f"device {device!r} is not available; available: {', '.join(['cpu', *cuda])} (or auto)")
        return device


def _entry(kind: str, section: dict) -> Entry:
    """The registered part that a section names."""
    name = section.get("name")
    try:
        if isinstance(name, str):
            return lookup(kind, name)
        given = f"expected a string, got {_shown(name)}" if "name" in section else "missing"
        message = f"{given}; known: {', '.join(registered(kind))}"
    except KeyError as error:
        message = error.args[0]
    raise ValidationError.from_exception_data(kind, [_fault(("name",), message)])


class Choice(ConfigModel):
    """A named part, `{"name": ..., "cfg": {...}}`; `cfg` is checked by the Config model registered with the name."""

    name: str = Field(description="registered name")
    cfg: SerializeAsAny[BaseModel] = Field(description="settings of the part")

    @classmethod
    def _resolve(cls, kind: str, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        config = _entry(kind, data).config
        try:
            return data | {"cfg": config.model_validate(data.get("cfg", {}))}
        except ValidationError as error:
            faults = [_fault(("cfg", *path), message) for path, message in _explained(config, error)]
            raise ValidationError.from_exception_data(kind, faults) from None


class EnvChoice(Choice):
    """The environment: its registered name (also called id) and settings."""

    other_names: ClassVar = {"id": "name"}

    @model_validator(mode="before")
    @classmethod
    def _registered(cls, data: Any) -> Any:
        return cls._resolve("env", {"name": data} if isinstance(data, str) else data)


class AlgorithmChoice(Choice):
    """The algorithm: its registered name and hyperparameters."""

    @model_validator(mode="before")
    @classmethod
    def _registered(cls, data: Any) -> Any:
        return cls._resolve("algorithm", data)


class PolicyConfig(ConfigModel):
    """What every policy's config has; a section is checked by the Config model registered with its name."""

    name: str = Field(description='registered name, such as "actor_critic"')
    action_dim: Count | None = Field(None, description="width of the policy head; must match the environment's")

    @model_validator(mode="wrap")
    @classmethod
    def _registered(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        config = _entry("policy", data).config if cls is PolicyConfig and isinstance(data, dict) else cls
        return handler(data) if config is cls else config.model_validate(data)


class Config(ConfigModel):
    """A whole run."""

    trainer: TrainerConfig = Field(TrainerConfig.model_construct(), description="how long, where, how many")
    env: EnvChoice = Field(description='the environment, such as {"name": "cartpole"}')
    policy: SerializeAsAny[PolicyConfig] = Field(description='the policy, such as {"name": "actor_critic", ...}')
    algorithm: AlgorithmChoice = Field(description='the algorithm, such as {"name": "ppo", "cfg": {...}}')

    @model_validator(mode="before")
    @classmethod
    def _num_envs(cls, data: Any) -> Any:
        """`env.cfg.num_envs` is another place for `trainer.num_envs`, which wins."""
        env = data.get("env") if isinstance(data, dict) else None
        cfg = env.get("cfg") if isinstance(env, dict) else None
        if not isinstance(env, dict) or not isinstance(cfg, dict) or "num_envs" not in cfg:
            return data
        rest = {key: value for key, value in cfg.items() if key != "num_envs"}
        trainer = data.get("trainer", {})
        if isinstance(trainer, dict):
            trainer = {"num_envs": cfg["num_envs"]} | trainer
        return data | {"trainer": trainer, "env": env | {"cfg": rest}}

    def replace(self, **changes: Any) -> "Config":
        """A copy with dotted keys changed, checked again: `cfg.replace(**{"trainer.seed": 3})`."""
        data = self.model_dump(mode="json")
        for path, value in changes.items():
            *parents, last = _OTHER_PATHS.get(path, path).split(".")
            section = data
            for key in parents:
                section = section.setdefault(key, {})
                if not isinstance(section, dict):
                    raise ConfigError(f"replace: {path}: {key!r} is not a section")
            section[last] = value
        return config_from_dict(data, "replace")


_OTHER_PATHS = {
    "env.cfg.num_envs": "trainer.num_envs",
    "env.id": "env.name",
    "trainer.rollout_steps": "trainer.buffer_size",
}


class _Duplicates(dict):
    """A JSON object that remembers the keys it was given twice."""

    def __init__(self, pairs: list[tuple[str, Any]]):
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.repeated = sorted({name for name in names if names.count(name) > 1})


def _repeated(data: Any) -> list[Loc]:
    """Paths of the keys given twice; a loop, since JSON may be nested deeper than Python calls."""
    found, rest = [], [((), data)]
    while rest:
        path, part = rest.pop()
        if isinstance(part, _Duplicates):
            found += [(*path, _key(name)) for name in part.repeated]
            rest += [((*path, _key(key)), child) for key, child in part.items()]
        elif isinstance(part, list):
            rest += [((*path, index), child) for index, child in enumerate(part)]
    return found


def _dotted(path: Loc) -> str:
    """A path as it is written in messages.

    >>> _dotted(("policy", "hidden_sizes", 0))
    'policy.hidden_sizes[0]'
    """
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


Section = TypeVar("Section", bound=BaseModel)


def checked(model: type[Section], data: Any, source: str) -> Section:
    """`data` as `model`, or a ConfigError with one line per fault."""
    lines = [f"{source}: {_dotted(path)}: given twice; keep one" for path in _repeated(data)]
    try:
        made = model.model_validate(data)
        if not lines:
            return made
    except ValidationError as error:
        lines += [": ".join(filter(None, (source, _dotted(path), text))) for path, text in _explained(model, error)]
    raise ConfigError("\n".join(lines))


def config_from_dict(data: Any, source: str = "config") -> Config:
    """A checked Config, or a ConfigError with one line per fault."""
    return checked(Config, data, source)


def load_config(path: str | Path) -> Config:
    """Read and check a JSON file.

    Raises: ConfigError, one line per fault: missing file, bad JSON, duplicate or unknown key, wrong type, out of range.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = json.loads(text, object_pairs_hook=_Duplicates)
    except FileNotFoundError:
        others = [other.name for other in path.parent.glob("*.json")]
        near = did_you_mean(path.name, others) if others else f"no .json files in {path.parent}"
        raise ConfigError(f"{path}: no such file; {near}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not a config: {error}") from None
    return config_from_dict(data, str(path))


def total_steps(cfg: Config, world_size: int) -> int:
    """Environment steps of the whole run, over all ranks."""
    return cfg.trainer.iterations * cfg.trainer.buffer_size * cfg.trainer.num_envs * world_size
