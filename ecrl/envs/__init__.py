"""Environments as records of pure functions; importing this package registers the built-in ones."""

from ecrl.config import EnvChoice
from ecrl.envs.cartpole import CartPoleConfig, cartpole
from ecrl.envs.core import Env, auto_reset, state_of, time_limit
from ecrl.envs.pendulum import PendulumConfig, pendulum
from ecrl.envs.probes import ProbeConfig, probe_action, probe_constant, probe_delay, probe_match, probe_observation
from ecrl.registry import lookup
from ecrl.strict import checked

__all__ = [
    "CartPoleConfig",
    "Env",
    "PendulumConfig",
    "ProbeConfig",
    "auto_reset",
    "cartpole",
    "make_env",
    "pendulum",
    "probe_action",
    "probe_constant",
    "probe_delay",
    "probe_match",
    "probe_observation",
    "state_of",
    "time_limit",
]


def make_env(choice: EnvChoice | dict | str) -> Env:
    """The environment of a config's `env` section, or of a name; equal settings give the same object.

    >>> make_env("cartpole") is make_env({"id": "cartpole", "cfg": {"gravity": 9.8}})
    True
    """
    choice = checked(EnvChoice, choice, "env")
    return lookup("env", choice.name).make(choice.cfg)
