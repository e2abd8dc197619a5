"""The JSON config: strict, frozen, every fault at once with its JSON path and what to do.

Four sections, `trainer`, `env`, `policy` and `algorithm`. Every source (file, dict, `Config.replace`) passes one path:
duplicate-key check, dict, pydantic. The Config models of named parts live beside the parts; the registry finds them.
"""

import json
import re
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

from ecrl.errors import ConfigError
from ecrl.registry import Entry, did_you_mean, lookup, registered
from ecrl.strict import ConfigModel, Count, ObjectPairs, checked, explained, fault_at, shown


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


def _resolved(kind: str, section: dict, key: str, settings: str) -> dict:
    """The section with its `settings` checked by the Config model registered with the name at `key`."""
    config = _entry(kind, section, key).config
    try:
        return section | {settings: config.model_validate(section.get(settings, {}))}
    except ValidationError as error:
        faults = [fault_at((settings, *path), message) for path, message in explained(config, error)]
        raise ValidationError.from_exception_data(kind, faults) from None


class EventConfig(ConfigModel):
    """Something that happens to the environments: a registered event and when."""

    func: str = Field(description="registered name of the event")
    mode: Literal["startup", "reset", "interval"] = Field(
        "interval", description="once per environment, at every start of an episode, or every interval_step steps"
    )
    interval_step: Count = Field(1, description="steps of an environment between two events of mode interval")
    params: SerializeAsAny[BaseModel] = Field(description="settings of the event")

    @model_validator(mode="before")
    @classmethod
    def _registered(cls, data: Any) -> Any:
        return _resolved("event", data, "func", "params") if isinstance(data, dict) else data


class EventsConfig(ConfigModel):
    """Events by name, of training and of evaluation."""

    train: dict[str, EventConfig] = Field(default_factory=dict, description="events of the training environments")
    eval: dict[str, EventConfig] = Field(default_factory=dict, description="events of the evaluation environments")

    def __hash__(self) -> int:
        return hash((*self.train.items(), "eval", *self.eval.items()))


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
    num_eval_envs: Count = Field(
        4, description="environments of an evaluation, at most: the largest divisor of the number of episodes"
    )
    num_eval_episodes: Count = Field(5, description="episodes of an evaluation, over all its environments")
    eval_seed: int | None = Field(None, ge=0, lt=2**62, description="seed of evaluations; seed + 10000 if absent")
    best_eval_metric: str = Field("eval/avg_reward", description="log of the evaluation that chooses checkpoints/best")
    best_eval_mode: Literal["max", "min"] = Field("max", description="whether more or less of it is better")
    save_freq: Count = Field(50_000, description="environment steps between checkpoints; fires when crossed")
    use_wandb: bool = Field(False, description="track with Weights & Biases too; offline without a network")
    wandb_project_name: str = Field("embodichain-generic", min_length=1, description="project of Weights & Biases")
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


class EnvChoice(Choice):
    """The environment: its registered name (also called id) and settings."""

    other_names: ClassVar = {"id": "name"}

    @model_validator(mode="before")
    @classmethod
    def _registered(cls, data: Any) -> Any:
        data = {"name": data} if isinstance(data, str) else data
        return _resolved("env", data, "name", "cfg") if isinstance(data, dict) else data


class AlgorithmChoice(Choice):
    """The algorithm: its registered name and hyperparameters."""

    @model_validator(mode="before")
    @classmethod
    def _registered(cls, data: Any) -> Any:
        return _resolved("algorithm", data, "name", "cfg") if isinstance(data, dict) else data


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
            if last == "name" and section.get(last) != value:
                section.pop("cfg", None)  # settings of another part
            section[last] = value
        return config_from_dict(data, "replace")


_OTHER_PATHS = {
    "env.cfg.num_envs": "trainer.num_envs",
    "env.id": "env.name",
    "trainer.rollout_steps": "trainer.buffer_size",
}


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
        data = json.loads(text, object_pairs_hook=ObjectPairs)
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
