"""Define the strict and frozen config of a run. An error lists all faults of a config, each with its path and a remedy.

A config has four sections: `trainer`, `env`, `policy` and `algorithm`. The values of a config come from JSON, YAML, the
command line or `Config.replace`. ecrl always checks for duplicate keys, translates alternative keys and validates the
config with pydantic.

A registered component, such as an algorithm, defines a Config model for its settings. The registry stores the Config
model of each component.
"""

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

from pydantic import (
    BaseModel,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails

from ecrl.config.aliases import part_entry
from ecrl.config.embodichain_releases import lower_name
from ecrl.config.files import parse_overrides, read
from ecrl.config.model import (
    ConfigModel,
    Count,
    Loc,
    Natural,
    fault_at,
    faults_from_error,
    format_key,
    format_path,
    format_value,
    validate_section,
)
from ecrl.config.presets import find_config
from ecrl.config.translate import translate_config
from ecrl.errors import ConfigError
from ecrl.registry import advised, lookup, nearest, registered

__all__ = ["Config", "config_from_dict", "diff", "load_config", "parse_overrides", "total_steps"]


class Found(NamedTuple):
    """Config model of the component that a section names.

    Attributes:
        config: the Config model. For an unknown name, the model of the most similar name. None if the name is not a
            string, if no name is similar, or if the registry has advice on the unknown name.
        faults: the fault of the name, or an empty list.
        note: text for the end of the messages about other faults of the section. For an unknown name, the text names
            the component of `config`. For a known name, the text is empty.
    """

    config: type[BaseModel] | None
    faults: list[InitErrorDetails]
    note: str

    def faults_of(self, error: ValidationError, path: Loc = ()) -> list[InitErrorDetails]:
        """Return the faults that the Config model found in the settings at `path`."""
        faults = faults_from_error(cast(type[BaseModel], self.config), error)
        return [fault_at((*path, *place), message + self.note) for place, message in faults]


def config_of(kind: str, section: dict, key: str = "name") -> Found:
    """Return the Config model of the component that `section[key]` names, and the fault of an unknown name.

    >>> found = config_of("env", {"name": "cartpol"})
    >>> found.config is lookup("env", "cartpole").config, found.note
    (True, " (if the env is 'cartpole')")
    """
    name = section.get(key)
    if not isinstance(name, str):
        problem = f"expected a string, got {format_value(name)}" if key in section else "missing"
        return Found(None, [fault_at((key,), f"{problem}; known: {', '.join(registered(kind))}")], "")
    try:
        return Found(lookup(kind, name).config, [], "")
    except KeyError as error:
        fault = fault_at((key,), error.args[0])
    near = None if name in advised(kind) else nearest(name, registered(kind))
    if near is None:
        return Found(None, [fault], "")
    return Found(lookup(kind, near).config, [fault], f" (if the {kind} is {near!r})")


def validate_settings(kind: str, section: dict, key: str, settings: str, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate a section that names a component. The error lists the faults of the section and of its settings.

    The component that `section[key]` names has a Config model, which validates `section[settings]`. `handler` validates
    the other keys. If the name is unknown, the Config model of the most similar name validates the settings.
    """
    found = config_of(kind, section, key)
    faults, part = [*found.faults], ConfigModel.model_construct()  # stays empty if the settings have faults
    if found.config is not None:
        try:
            part = found.config.model_validate(section.get(settings, {}))
        except ValidationError as error:
            faults += found.faults_of(error, (settings,))
    try:
        validated = handler(section | {settings: part})
    except ValidationError as error:
        reported = {fault.get("loc") for fault in faults}
        other = [fault_at(fault["loc"], fault["msg"]) for fault in error.errors() if fault["loc"] not in reported]
        raise ValidationError.from_exception_data(kind, [*other, *faults]) from None
    if faults:
        raise ValidationError.from_exception_data(kind, faults)
    return validated


def validate_as_named(kind: str, section: dict, key: str, cls: type, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate a whole section with the Config model of the component that `section[key]` names.

    `handler` validates the section if this model is `cls`. If the name is unknown, the error also lists the faults that
    the Config model of the most similar name finds.
    """
    found = config_of(kind, section, key)
    if not found.faults:
        return handler(section) if found.config is cls else cast(Any, found.config).model_validate(section)
    faults = [*found.faults]
    if found.config is not None:
        near = nearest(section[key], registered(kind))
        try:
            found.config.model_validate(section | {key: near})
        except ValidationError as error:
            faults += found.faults_of(error)
    raise ValidationError.from_exception_data(kind, faults)


class EventConfig(ConfigModel):
    """Name, mode and settings of a registered event. An event changes the environments, or records videos of them."""

    part_kind: ClassVar = "event"

    func: str = Field(description="registered name of the event")
    mode: Literal["startup", "reset", "interval"] = Field(
        "interval",
        description="startup: once per environment; reset: at every episode start; interval: every interval_step steps",
    )
    interval_step: Count = Field(
        1,
        description="number of steps between two events in mode interval, or of chunks if env.action_chunk is above 1",
    )
    params: SerializeAsAny[BaseModel] = Field(description="settings of the event")

    @model_validator(mode="wrap")
    @classmethod
    def _registered(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return validate_settings("event", data, "func", "params", handler) if isinstance(data, dict) else handler(data)


class EventsConfig(ConfigModel):
    """Events of training and of evaluation. You can choose the key of each event freely."""

    train: dict[str, EventConfig] = Field(default_factory=dict, description="events of the training environments")
    eval: dict[str, EventConfig] = Field(default_factory=dict, description="events of the evaluation environments")


class TrainerConfig(ConfigModel):
    """Settings of the run: its length, device, number of environments, evaluations and checkpoints."""

    other_names: ClassVar = {"rollout_steps": "buffer_size", "update_horizon": "buffer_size"}

    exp_name: str = Field(
        "generic_exp",
        pattern=r"^[\w.+-]+$",
        max_length=100,
        description="name of the run and part of its folder's name; may contain letters, digits and _.+-",
    )
    seed: int = Field(1, ge=0, lt=2**62, description="seed of all randomness in the run")
    device: str = Field("cpu", description='"cpu", "cuda", "cuda:<index>" or "auto" (cuda if available)')
    compile: Literal["auto", "on", "off", "background"] = Field(
        "auto",
        description="compile the rollout and the update; auto: only if compiling shortens the whole run and this "
        "machine can compile; background: train eagerly until another process has compiled the run",
    )
    num_envs: Count = Field(64, description="number of environments in each process")
    iterations: Count = Field(250, description="training iterations; each collects a rollout and updates the policy")
    log_freq: Count = Field(
        1,
        description="number of iterations between two records of the logs; must divide iterations. Checkpoints, "
        "evaluations and progress use records, so they wait for the next record. On a CPU, a larger number speeds up "
        "compiled runs that have neither replay buffers nor frozen parameters, because one call runs all iterations of "
        "a record",
    )
    buffer_size: Count = Field(
        2048,
        description="number of steps that each environment takes in an iteration, or of chunks if env.action_chunk is "
        "above 1; also called rollout_steps",
    )
    distributed: bool = Field(
        False, description="train with several processes, one for each device; torchrun starts the processes"
    )
    enable_eval: bool = Field(False, description="evaluate during training")
    eval_freq: Natural = Field(
        10_000,
        description="evaluate whenever the count of environment steps passes a multiple of this number; 0: never",
    )
    num_eval_envs: Count = Field(
        4,
        description="maximum number of environments in an evaluation; ecrl uses the largest divisor of "
        "num_eval_episodes up to this number",
    )
    num_eval_episodes: Count = Field(5, description="total number of episodes per evaluation, over all environments")
    eval_seed: int | None = Field(
        None, ge=0, lt=2**62, description="seed of evaluations; trainer.seed + 10000 if absent"
    )
    best_eval_metric: str = Field(
        "eval/avg_reward", description="metric of the evaluations that decides which state is saved as checkpoints/best"
    )
    best_eval_mode: Literal["max", "min"] = Field(
        "max", description="max: a larger best_eval_metric is better; min: a smaller best_eval_metric is better"
    )
    save_freq: Natural = Field(
        50_000,
        description="save a checkpoint whenever the count of environment steps passes a multiple of this number; 0: "
        "only at the end of the run",
    )
    finite_guard: Literal["stop", "skip", "off"] = Field(
        "stop",
        description=(
            "reaction to NaN or infinity. stop: end the run with the state before the iteration, and report the first "
            "such value; skip: skip the update, and log the number of skipped updates; off: do not check"
        ),
    )
    keep_checkpoints: Count | None = Field(
        None, description="number of newest checkpoints that are kept, in addition to checkpoints/best; all if absent"
    )
    save_replay: bool = Field(
        True,
        description="save replay buffers in checkpoints; if false, a resumed run first fills an empty buffer",
    )
    use_wandb: bool = Field(False, description="also log to Weights & Biases; without a network, log to a local folder")
    wandb_project_name: str = Field(
        "embodichain-generic",
        pattern=r"^[^/\\#?%:]+$",
        max_length=128,
        description=r"name of the Weights & Biases project; must not contain /\#?%:",
    )
    tf32: bool = Field(
        False, description="multiply float32 matrices in TF32 on CUDA; this is faster but has only 10 bits of mantissa"
    )
    init_from: str | None = Field(
        None,
        min_length=1,
        description=(
            "run folder or checkpoint from which a new run takes the policy's initial parameters and observation "
            "statistics; random parameters if absent"
        ),
    )
    events: EventsConfig = Field(
        EventsConfig(), description="events that change the environments or record videos of them"
    )

    @field_validator("log_freq")
    @classmethod
    def _divides_iterations(cls, log_freq: int, info: ValidationInfo) -> int:
        iterations = info.data.get("iterations", log_freq)  # absent if it is invalid
        if iterations % log_freq:
            raise ValueError(f"{log_freq} does not divide trainer.iterations, which is {iterations}; use a divisor")
        return log_freq

    @field_validator("device")
    @classmethod
    def _is_device(cls, device: str) -> str:
        if not re.fullmatch(r"cpu|auto|cuda(:\d+)?", device):
            raise ValueError(f"not a device: {device!r}; expected cpu, cuda, cuda:<index> or auto")
        return device


class Choice(ConfigModel):
    """Registered component, written as `{"name": ..., "cfg": {...}}`. The component's Config model validates `cfg`."""

    name: str = Field(description="registered name")
    cfg: SerializeAsAny[BaseModel] = Field(description="settings of the component")


def env_label(name: object, settings: Any) -> str:
    """Return the name of an environment for messages. The name of a Gymnasium environment includes its id.

    Args:
        name: registered name of the environment.
        settings: settings of the environment, as a dict of JSON values.

    >>> env_label("gymnasium", {"id": "Pendulum-v1"}), env_label("cartpole", {})
    ('gymnasium:Pendulum-v1', 'cartpole')
    """
    gym_id = settings.get("id") if isinstance(settings, dict) else None
    return f"gymnasium:{gym_id}" if name == "gymnasium" and gym_id is not None else str(name)


def _gymnasium(section: dict, key: str) -> dict:
    """Split the name `"gymnasium:<id>"` in `section[key]` into the name "gymnasium" and the setting `cfg.id`.

    Return any other section unchanged. Raise ValidationError if the section also has `cfg.id`.
    """
    name, settings = section.get(key), section.get("cfg", {})
    if not isinstance(name, str) or not name.startswith("gymnasium:") or not isinstance(settings, dict):
        return section
    if "id" in settings:
        fault = fault_at(("cfg", "id"), f"also given in the name {name!r}; keep one")
        raise ValidationError.from_exception_data("env", [fault])
    return section | {key: "gymnasium", "cfg": {"id": name.removeprefix("gymnasium:")} | settings}


class EnvChoice(Choice):
    """Settings and registered name of the environment. The key of the name is `name` or `id`."""

    other_names: ClassVar = {"id": "name"}
    part_kind: ClassVar = "env"

    frame_stack: Count | None = Field(
        None,
        description=(
            "number of latest observations that the policy sees; 1 for no stacking; if absent, the environment sets "
            "the number"
        ),
    )
    action_chunk: Count = Field(
        1,
        description=(
            "env steps per action; above 1, an action is a chunk of actions, which the environment takes one after the "
            "other without new observations"
        ),
    )

    @model_validator(mode="wrap")
    @classmethod
    def _registered(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        data = {"name": data} if isinstance(data, str) else data
        if not isinstance(data, dict):
            return handler(data)
        key = "id" if "id" in data and "name" not in data else "name"
        return validate_settings("env", _gymnasium(data, key), key, "cfg", handler)

    @property
    def label(self) -> str:
        """Name for messages, such as `cartpole`. The name of a Gymnasium environment is `gymnasium:<id>`."""
        return env_label(self.name, self.cfg.model_dump(include={"id"}))


class AlgorithmChoice(Choice):
    """Registered name and hyperparameters of the algorithm."""

    part_kind: ClassVar = "algorithm"

    @model_validator(mode="wrap")
    @classmethod
    def _registered(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return validate_settings("algorithm", data, "name", "cfg", handler) if isinstance(data, dict) else handler(data)

    def _with_changes(self, changes: dict[str, Any]) -> dict[str, Any]:
        return super()._with_changes({key: lower_name(f"algorithm.{key}", value) for key, value in changes.items()})


class PolicyConfig(ConfigModel):
    """Settings that all policies share. The Config model of the named policy validates the whole section."""

    name: str = Field(description='registered name, such as "actor_critic"')
    action_dim: Count | None = Field(
        None, description="size of the policy's output; must match the environment's actions"
    )
    normalize_obs: bool = Field(False, description="standardise observations by their running mean and variance")
    clip_actions: bool = Field(True, description="clip Box actions to the bounds of the action space before each step")
    bf16: bool = Field(False, description="run the networks in bfloat16; the weights stay float32")

    @model_validator(mode="wrap")
    @classmethod
    def _registered(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if cls is not PolicyConfig or not isinstance(data, dict):
            return handler(data)
        return validate_as_named("policy", data, "name", cls, handler)

    def _with_changes(self, changes: dict[str, Any]) -> dict[str, Any]:
        return super()._with_changes({key: lower_name(f"policy.{key}", value) for key, value in changes.items()})

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with new values, as in `cfg.policy.replace(normalize_obs=True)`.

        A new `name` chooses the Config model of another policy.

        Raises: ConfigError with one line per fault.
        """
        return cast(Self, validate_section(PolicyConfig, self._with_changes(changes), "replace"))


class Config(ConfigModel):
    """Config of a whole run."""

    trainer: TrainerConfig = Field(
        TrainerConfig.model_construct(),
        description="settings of the run: its length, device, number of environments, evaluations and checkpoints",
    )
    env: EnvChoice = Field(description='the environment, such as {"name": "cartpole"}')
    policy: SerializeAsAny[PolicyConfig] = Field(
        description='the policy, such as {"name": "actor_critic", ...}; by default, the algorithm chooses the policy'
    )
    algorithm: AlgorithmChoice = Field(description='the algorithm, such as {"name": "ppo", "cfg": {...}}')

    @model_validator(mode="before")
    @classmethod
    def _default_policy(cls, data: Any) -> Any:
        """Give a config without a policy the default policy of its algorithm, with default networks.

        If the algorithm is missing, or its name resembles no known name, insert an empty policy. The missing default
        policy then causes no second fault.
        """
        if not isinstance(data, dict) or "policy" in data:
            return data
        entry = part_entry("algorithm", data.get("algorithm"))
        default = PolicyConfig.model_construct() if entry is None else getattr(entry.config, "default_policy", None)
        return data | {"policy": default} if default else data

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with new values by dotted key, as in `cfg.replace(**{"trainer.seed": 3})`.

        The keys of EmbodiChain and the flags of abcdRL are translated, as in a file.

        Raises: ConfigError with one line per fault.
        """
        return cast(Self, config_from_dict(self.to_dict(), "replace", changes))


_SIZES = {name: TrainerConfig.model_fields[name].default for name in ("buffer_size", "num_envs")}


def config_from_dict(
    data: Any, source: str = "config", overrides: Mapping[str, Any] | None = None, folder: Path = Path()
) -> Config:
    """Validate the four sections of a config. If the config has faults, raise a ConfigError with one line per fault.

    The function removes EmbodiChain's keys that ecrl ignores (see `ecrl.config.embodichain`), and abcdRL's flags that
    have no meaning in ecrl. A UserWarning names each removed key.

    Args:
        data: dict with the four sections.
        source: origin of the data, such as a filename. Each line of an error message starts with this origin.
        overrides: dict from dotted key to a value that replaces the value in `data`, such as `{"trainer.seed": 3}`.
        folder: folder in which ecrl looks for a relative `trainer.gym_config` that is not in the working directory.
    """
    if not isinstance(data, dict):
        return validate_section(Config, data, source)
    try:
        raw = translate_config(data, overrides or {}, folder, _SIZES)
        config = validate_section(Config, raw.data, source, raw.faults, raw.source_path)
    except RecursionError:
        raise ConfigError(f"{source}: not a config: nested too deeply") from None
    for path, reason in raw.inert:
        name = raw.source_path(tuple(key if isinstance(key, int) else format_key(key) for key in path))
        warnings.warn(f"{name} has no meaning here ({reason}); ignored", stacklevel=2)
    return config


def env_choice(name: str, overrides: Mapping[str, Any]) -> EnvChoice:
    """Return the config of a named environment, with overrides by dotted key such as `{"env.cfg.gravity": 5.0}`.

    Raises: ConfigError with one line per fault.

    >>> env_choice("gymnasium:CartPole-v1", {}).cfg.id
    'CartPole-v1'
    """
    for key in overrides:
        if not key.startswith("env."):
            raise ConfigError(f"{key}: expected a key of the environment, such as env.cfg.max_episode_steps")
    raw = translate_config({"env": {"name": name}}, overrides, Path(), {})
    return validate_section(EnvChoice, raw.data["env"], "", raw.faults, lambda path: format_path(("env", *path)))


def load_config(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Config:
    """Read and validate a config from a preset, a file or a dict.

    A file is read as YAML if its name ends in .yaml or .yml, else as JSON. ecrl translates these keys of EmbodiChain's
    configs:

    - `trainer.gym_config` is the path of a second file with the environment's name and settings. Values under `env`
      replace values from the second file.
    - `trainer.learning_env` becomes `env`.
    - `trainer.segment_length` and `trainer.deterministic_actions` become keys of `algorithm.cfg`.
    - `trainer.update_horizon` becomes `trainer.buffer_size`.
    - `trainer.total_timesteps` sets `trainer.iterations`. Only a run of one process may set `trainer.total_timesteps`.
    - `trainer.save_frequency_updates` sets `trainer.save_freq`. Only a run of one process may set
      `trainer.save_frequency_updates`.

    ecrl also translates abcdRL's flags, such as `trainer.train_frequency` (`ecrl.config.abcdrl.FLAGS`).

    Args:
        source: name of a shipped config such as `"cartpole_ppo"`, path of a file, or a dict with the four sections.
        overrides: dict from dotted key to a value that replaces the config's value, such as `{"trainer.seed": 3}`.
            `parse_overrides` reads overrides from a command line.

    >>> load_config("cartpole_ppo", {"trainer.seed": 3}).trainer.seed
    3

    Raises: ConfigError with one line per fault. Faults are unknown names, missing files, syntax errors, duplicate or
    unknown keys, wrong types, and numbers out of range. Keys of EmbodiChain and abcdRL that ecrl ignores are removed. A
    UserWarning names each removed key.
    """
    if isinstance(source, Mapping):
        return config_from_dict(dict(source), overrides=overrides)
    path = find_config(source)
    return config_from_dict(read(path), str(source), overrides, path.parent)


def _leaves(data: Any, path: str = "") -> dict[str, str]:
    """Map the dotted key of every value to the value's JSON text. A list counts as one value."""
    if not isinstance(data, dict):
        return {path: json.dumps(data)}
    nested = (_leaves(value, f"{path}.{key}" if path else key) for key, value in data.items())
    return {key: text for leaves in nested for key, text in leaves.items()}


def diff(a: Config, b: Config) -> list[str]:
    """List the differences between two configs, one line per key, such as `trainer.seed: 1 -> 3`.

    If only one config has a key, the value in the other config is shown as "absent".

    >>> cfg = load_config("cartpole_ppo")
    >>> diff(cfg, cfg.replace(**{"trainer.seed": 3, "env.name": "probe_delay"}))[:2]
    ['trainer.seed: 0 -> 3', 'env.name: "cartpole" -> "probe_delay"']
    """
    old, new = (_leaves(cfg.model_dump(mode="json")) for cfg in (a, b))
    keys = (key for key in old | new if old.get(key) != new.get(key))
    return [f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}" for key in keys]


def total_steps(cfg: Config, world_size: int) -> int:
    """Return the number of environment steps of the whole run, over all ranks. A chunk of actions is one step."""
    return cfg.trainer.iterations * cfg.trainer.buffer_size * cfg.trainer.num_envs * world_size
