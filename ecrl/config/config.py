"""The JSON config: strict, frozen, every fault at once with its JSON path and what to do.

Four sections, `trainer`, `env`, `policy` and `algorithm`. Every source (JSON, YAML, command line, `Config.replace`)
takes one path: duplicate-key check, dict, our own keys, pydantic. The Config models of named parts live beside the
parts; the registry finds them.
"""

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from ecrl.config.aliases import translated
from ecrl.config.files import parse_overrides, read
from ecrl.config.model import ConfigModel, Count, checked, dotted, explained, fault_at, key_text, shown
from ecrl.config.presets import find_config
from ecrl.errors import ConfigError
from ecrl.registry import Entry, lookup, registered

__all__ = ["Config", "config_from_dict", "diff", "load_config", "parse_overrides", "total_steps"]


def _entry(kind: str, section: dict, key: str = "name") -> Entry:
    """The registered part that a section names."""
    name = section.get(key)
    try:
        if isinstance(name, str):
            return lookup(kind, name)
        given = f"expected a string, got {shown(name)}" if key in section else "missing"
        message = f"{given}; known: {', '.join(registered(kind))}"
    except KeyError as error:
        message = error.args[0]
    raise ValidationError.from_exception_data(kind, [fault_at((key,), message)])


def resolved(kind: str, section: dict, key: str, settings: str) -> dict:
    """The section with its `settings` checked by the Config model registered with the name at `key`."""
    config = _entry(kind, section, key).config
    try:
        return section | {settings: config.model_validate(section.get(settings, {}))}
    except ValidationError as error:
        faults = [fault_at((settings, *path), message) for path, message in explained(config, error)]
        raise ValidationError.from_exception_data(kind, faults) from None


class EventConfig(ConfigModel):
    """Something that happens to the environments: a registered event and when."""

    part_kind: ClassVar = "event"

    func: str = Field(description="registered name of the event")
    mode: Literal["startup", "reset", "interval"] = Field(
        "interval", description="once per environment, at every start of an episode, or every interval_step steps"
    )
    interval_step: Count = Field(1, description="steps of an environment between two events of mode interval")
    params: SerializeAsAny[BaseModel] = Field(description="settings of the event")

    @model_validator(mode="before")
    @classmethod
    def _registered(cls, data: Any) -> Any:
        return resolved("event", data, "func", "params") if isinstance(data, dict) else data


class EventsConfig(ConfigModel):
    """Events by name, of training and of evaluation."""

    train: dict[str, EventConfig] = Field(default_factory=dict, description="events of the training environments")
    eval: dict[str, EventConfig] = Field(default_factory=dict, description="events of the evaluation environments")


class TrainerConfig(ConfigModel):
    """How long, where and with how many environments."""

    other_names: ClassVar = {"rollout_steps": "buffer_size", "update_horizon": "buffer_size"}

    exp_name: str = Field(
        "generic_exp",
        pattern=r"^[\w.+-]+$",
        max_length=100,
        description="letters, digits and _.+-; names the run folder",
    )
    seed: int = Field(1, ge=0, lt=2**62, description="all randomness of the run derives from it")
    device: str = Field("cpu", description='"cpu", "cuda", "cuda:<index>" or "auto" (cuda where there is one)')
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="compile rollout and update; auto: where the whole budget ends sooner so, and a C++ compiler works",
    )
    num_envs: Count = Field(64, description="environments per rank")
    iterations: Count = Field(250, description="rounds of collecting and learning")
    buffer_size: Count = Field(2048, description="steps per environment and iteration; also called rollout_steps")
    distributed: bool = Field(False, description="one process per device under torchrun")
    enable_eval: bool = Field(False, description="evaluate during training")
    eval_freq: Count = Field(10_000, description="environment steps between evaluations; fires when crossed")
    num_eval_envs: Count = Field(
        4, description="environments of an evaluation, at most: the largest divisor of the number of episodes"
    )
    num_eval_episodes: Count = Field(5, description="episodes of an evaluation, over all its environments")
    eval_seed: int | None = Field(None, ge=0, lt=2**62, description="seed of evaluations; seed + 10000 if absent")
    best_eval_metric: str = Field("eval/avg_reward", description="log of the evaluation that chooses checkpoints/best")
    best_eval_mode: Literal["max", "min"] = Field("max", description="whether more or less of it is better")
    save_freq: Count = Field(50_000, description="environment steps between checkpoints; fires when crossed")
    finite_guard: Literal["stop", "skip", "off"] = Field(
        "stop",
        description="where observation, reward, action, loss, gradient or parameters are not finite: stop before "
        "anything is changed by it, saying where; skip: leave that update out and count it; off: do not look",
    )
    keep_checkpoints: Count | None = Field(
        None, description="newest checkpoints to keep, older ones are removed; all if absent; checkpoints/best is apart"
    )
    use_wandb: bool = Field(False, description="track with Weights & Biases too; offline without a network")
    wandb_project_name: str = Field(
        "embodichain-generic",
        pattern=r"^[^/\\#?%:]+$",
        max_length=128,
        description=r"project of Weights & Biases, without /\#?%:",
    )
    tf32: bool = Field(False, description="let CUDA multiply float32 matrices in TF32: faster, 10 bits of mantissa")
    events: EventsConfig = Field(EventsConfig(), description="what happens to the environments")

    @field_validator("device")
    @classmethod
    def _is_device(cls, device: str) -> str:
        if not re.fullmatch(r"cpu|auto|cuda(:\d+)?", device):
            raise ValueError(f"not a device: {device!r}; expected cpu, cuda, cuda:<index> or auto")
        return device


class Choice(ConfigModel):
    """A named part, `{"name": ..., "cfg": {...}}`; `cfg` is checked by the Config model registered with the name."""

    name: str = Field(description="registered name")
    cfg: SerializeAsAny[BaseModel] = Field(description="settings of the part")


def _gymnasium(section: dict) -> dict:
    """`"gymnasium:<id>"` as a name is short for the name "gymnasium" and `cfg.id`."""
    name, settings = section.get("name"), section.get("cfg", {})
    if not isinstance(name, str) or not name.startswith("gymnasium:") or not isinstance(settings, dict):
        return section
    if "id" in settings:
        fault = fault_at(("cfg", "id"), f"given in the name {name!r} too; keep one")
        raise ValidationError.from_exception_data("env", [fault])
    return section | {"name": "gymnasium", "cfg": {"id": name.removeprefix("gymnasium:")} | settings}


class EnvChoice(Choice):
    """The environment: its registered name (also called id) and settings."""

    other_names: ClassVar = {"id": "name"}
    part_kind: ClassVar = "env"

    @model_validator(mode="before")
    @classmethod
    def _registered(cls, data: Any) -> Any:
        data = {"name": data} if isinstance(data, str) else data
        return resolved("env", _gymnasium(data), "name", "cfg") if isinstance(data, dict) else data


class AlgorithmChoice(Choice):
    """The algorithm: its registered name and hyperparameters."""

    part_kind: ClassVar = "algorithm"

    @model_validator(mode="before")
    @classmethod
    def _registered(cls, data: Any) -> Any:
        return resolved("algorithm", data, "name", "cfg") if isinstance(data, dict) else data


class PolicyConfig(ConfigModel):
    """What every policy's config has; a section is checked by the Config model registered with its name."""

    name: str = Field(description='registered name, such as "actor_critic"')
    action_dim: Count | None = Field(None, description="width of the policy head; must match the environment's")
    normalize_obs: bool = Field(False, description="standardise observations by running moments kept in the state")
    clip_actions: bool = Field(True, description="hold Box actions within their space before the environment sees them")
    bf16: bool = Field(False, description="run the networks in bfloat16; weights and everything else stay float32")

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

    def replace(self, **changes: Any) -> "Config":
        """A copy with dotted keys changed, checked again: `cfg.replace(**{"trainer.seed": 3})`."""
        return config_from_dict(self.model_dump(mode="json"), "replace", changes)


_SIZES = {name: TrainerConfig.model_fields[name].default for name in ("buffer_size", "num_envs")}


def config_from_dict(
    data: Any, source: str = "config", overrides: Mapping[str, Any] | None = None, folder: Path = Path()
) -> Config:
    """A checked Config, or a ConfigError with one line per fault.

    Keys that have no meaning here (`ecrl.config.inert.INERT`) are taken out, each with a UserWarning that names it.

    Args:
        data: the four sections.
        source: where the data are from; starts each line of the error.
        overrides: values by dotted key, such as `{"trainer.seed": 3}`; they win.
        folder: where a relative `trainer.gym_config` is looked for after the working directory.
    """
    if not isinstance(data, dict):
        return checked(Config, data, source)
    try:
        draft = translated(data, overrides or {}, folder, _SIZES)
        made = checked(Config, draft.data, source, draft.faults, draft.where)
    except RecursionError:
        raise ConfigError(f"{source}: not a config: nested too deeply") from None
    for path, reason in draft.inert:
        name = draft.where(tuple(key if isinstance(key, int) else key_text(key) for key in path))
        warnings.warn(f"{name} has no meaning here ({reason}); ignored", stacklevel=2)
    return made


def env_choice(name: str, overrides: Mapping[str, Any]) -> EnvChoice:
    """An environment by name, with values by dotted key such as `{"env.cfg.gravity": 5.0}`.

    Raises: ConfigError, one line per fault.

    >>> env_choice("gymnasium:CartPole-v1", {}).cfg.id
    'CartPole-v1'
    """
    for key in overrides:
        if not key.startswith("env."):
            raise ConfigError(f"{key}: only keys of env, such as env.cfg.max_episode_steps, belong to an environment")
    draft = translated({"env": {"name": name}}, overrides, Path(), {})
    return checked(EnvChoice, draft.data["env"], "", draft.faults, lambda path: dotted(("env", *path)))


def load_config(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Config:
    """Read and check a config: a preset by name, a file or a dict.

    A file is YAML if its name ends in .yaml or .yml, else JSON. These keys of EmbodiChain's configs are understood:

    - `trainer.gym_config`: a second file with the environment's name and settings; `env` wins over it key by key;
    - `trainer.learning_env`, for `env`;
    - `trainer.segment_length` and `trainer.deterministic_actions`, for the algorithm's keys of these names;
    - `trainer.update_horizon`, for `buffer_size`;
    - `trainer.total_timesteps`, for `iterations`, and `trainer.save_frequency_updates`, for `save_freq`, in a run of
      one process.

    Args:
        source: name of a shipped config such as `"cartpole_ppo"`, path of a file, or a dict with the four sections.
        overrides: values by dotted key, such as `{"trainer.seed": 3}`; they win. `parse_overrides` reads them from a
            command line.

    >>> load_config("cartpole_ppo", {"trainer.seed": 3}).trainer.seed
    3

    Raises: ConfigError, one line per fault: unknown name, missing file, bad syntax, a key given twice or unknown, a
    wrong type, a number out of range. Keys that have no meaning here are removed, each with a UserWarning that names
    it.
    """
    if isinstance(source, Mapping):
        return config_from_dict(dict(source), overrides=overrides)
    path = find_config(source)
    return config_from_dict(read(path), str(source), overrides, path.parent)


def _leaves(data: Any, path: str = "") -> dict[str, str]:
    """Values by dotted key, as JSON; lists are values."""
    if not isinstance(data, dict):
        return {path: json.dumps(data)}
    deeper = (_leaves(value, f"{path}.{key}" if path else key) for key, value in data.items())
    return {key: text for leaves in deeper for key, text in leaves.items()}


def diff(a: Config, b: Config) -> list[str]:
    """Where two configs differ, a line per key: `trainer.seed: 1 -> 3`; "absent" where one has no such key.

    >>> cfg = load_config("cartpole_ppo")
    >>> diff(cfg, cfg.replace(**{"trainer.seed": 3, "env.name": "probe_delay"}))[:2]
    ['trainer.seed: 0 -> 3', 'env.name: "cartpole" -> "probe_delay"']
    """
    old, new = (_leaves(cfg.model_dump(mode="json")) for cfg in (a, b))
    keys = (key for key in old | new if old.get(key) != new.get(key))
    return [f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}" for key in keys]


def total_steps(cfg: Config, world_size: int) -> int:
    """Environment steps of the whole run, over all ranks."""
    return cfg.trainer.iterations * cfg.trainer.buffer_size * cfg.trainer.num_envs * world_size
