"""Read, validate and translate the configs of runs, and generate their JSON schema."""

from ecrl.config.config import (
    AlgorithmChoice,
    Config,
    EnvChoice,
    EventConfig,
    PolicyConfig,
    TrainerConfig,
    config_from_dict,
    diff,
    env_choice,
    load_config,
    total_steps,
    validate_settings,
)

__all__ = [
    "AlgorithmChoice",
    "Config",
    "EnvChoice",
    "EventConfig",
    "PolicyConfig",
    "TrainerConfig",
    "config_from_dict",
    "diff",
    "env_choice",
    "load_config",
    "total_steps",
    "validate_settings",
]
