"""Configs of runs: keys, files, validation, JSON schema, and translation of EmbodiChain's configs."""

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
