"""Algorithms as records of pure functions; importing this package registers the built-in ones."""

from ecrl.algorithms.apg import APGConfig, apg
from ecrl.algorithms.core import Algorithm, Run, Static, collect, on_policy
from ecrl.algorithms.grpo import GRPOConfig, grpo
from ecrl.algorithms.interleaved import Interleaved, interleaved
from ecrl.algorithms.ppo import PPOConfig, ppo
from ecrl.config import AlgorithmChoice
from ecrl.config.model import validate_section
from ecrl.registry import lookup

__all__ = [
    "APGConfig",
    "Algorithm",
    "GRPOConfig",
    "Interleaved",
    "PPOConfig",
    "Run",
    "Static",
    "apg",
    "collect",
    "grpo",
    "interleaved",
    "make_algorithm",
    "on_policy",
    "ppo",
]


def make_algorithm(choice: AlgorithmChoice | dict) -> Algorithm:
    """Return the algorithm of a config's `algorithm` section; equal settings give equal algorithms.

    >>> make_algorithm({"name": "ppo"}) == make_algorithm({"name": "ppo", "cfg": {"gamma": 0.5}})
    True
    """
    choice = validate_section(AlgorithmChoice, choice, "algorithm")
    return lookup("algorithm", choice.name).make(choice.cfg)
