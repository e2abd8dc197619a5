"""Algorithms as records of pure functions. `make_algorithm` makes an algorithm from its name and its settings.

Each built-in algorithm has a module of its own, such as `ecrl.algorithms.ppo`. The registry imports the module when the
algorithm is first looked up.
"""

from typing import Any

from ecrl.algorithms.core import (
    LEARNER_KINDS,
    REWARD_NORM_KINDS,
    Algorithm,
    OnPolicy,
    Run,
    Static,
    collect,
    from_reset,
    learn,
    on_policy,
    reward_norm_init,
    standardize_over_ranks,
    with_scaled_rewards,
)
from ecrl.algorithms.interleaved import (
    REPLAY_KINDS,
    Interleaved,
    collect_exploring,
    interleaved,
    new_replay,
    sample_keys,
    store,
    take_steps,
)
from ecrl.algorithms.minibatch_sgd import (
    SGD,
    MinibatchConfig,
    gradient_steps,
    minibatch_epochs,
    minibatch_sgd,
    sgd_choices,
)
from ecrl.algorithms.optimizer import Group, GroupSettings, groups_of, learning_state
from ecrl.algorithms.optimizer_config import LearningConfig
from ecrl.algorithms.rows import check_log_prob, rows_of
from ecrl.algorithms.state_kinds import Kind
from ecrl.config import AlgorithmChoice
from ecrl.config.model import validate_section
from ecrl.policies.contract import check_arguments
from ecrl.registry import lookup

__all__ = [
    "LEARNER_KINDS",
    "REPLAY_KINDS",
    "REWARD_NORM_KINDS",
    "SGD",
    "Algorithm",
    "Group",
    "GroupSettings",
    "Interleaved",
    "Kind",
    "LearningConfig",
    "MinibatchConfig",
    "Run",
    "Static",
    "check_log_prob",
    "collect",
    "collect_exploring",
    "from_reset",
    "gradient_steps",
    "groups_of",
    "interleaved",
    "learn",
    "learning_state",
    "make_algorithm",
    "minibatch_epochs",
    "minibatch_sgd",
    "new_replay",
    "on_policy",
    "reward_norm_init",
    "rows_of",
    "sample_keys",
    "sgd_choices",
    "standardize_over_ranks",
    "store",
    "take_steps",
    "with_scaled_rewards",
]


def make_algorithm(choice: AlgorithmChoice | dict) -> Algorithm:
    """Build the algorithm that a config's `algorithm` section describes.

    Algorithms whose settings differ only in numbers that the state stores, such as `gamma`, are equal.

    >>> make_algorithm({"name": "ppo"}) == make_algorithm({"name": "ppo", "cfg": {"gamma": 0.5}})
    True
    """
    choice = validate_section(AlgorithmChoice, choice, "algorithm")
    algorithm = lookup("algorithm", choice.name).make(choice.cfg)
    _check_functions(algorithm)
    return algorithm


def _check_functions(algorithm: Algorithm) -> None:
    """Raise ConfigError if a function of an algorithm takes the wrong arguments."""
    iterate = algorithm.iterate
    arguments: dict[str, tuple[Any, tuple[str, ...]]] = {"init": (algorithm.init, ("run", "key"))}
    if isinstance(iterate, OnPolicy):
        arguments["collect"] = iterate.collect, ("run", "state")
        arguments["update"] = iterate.update, ("run", "state", "batch")
    elif isinstance(iterate, Interleaved):
        arguments["turn"] = iterate.turn, ("run", "state", "noise", "replay")
    else:
        arguments["iterate"] = iterate, ("run", "state", "borrowed")
    if algorithm.gradient_steps is not None:
        arguments["gradient_steps"] = algorithm.gradient_steps, ("static",)
    if algorithm.phase is not None:
        arguments["phase"] = algorithm.phase, ("sample_step",)
    for name, (fn, names) in arguments.items():
        check_arguments(f"algorithm {algorithm.name}: {name}", fn, *names)
