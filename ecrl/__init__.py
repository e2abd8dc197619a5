"""Pure reinforcement-learning kernels in PyTorch, and one thin loop that composes them.

What changes is a tensor in a TensorDict; what does not is a frozen config; what happens is a module-level function.
Names are resolved when first used, so that importing one kernel, or asking for help, stays light.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ecrl.garbage import importing

if TYPE_CHECKING:
    from ecrl.algorithms import Algorithm, make_algorithm
    from ecrl.config import Config, PolicyConfig, load_config
    from ecrl.config.model import ConfigModel
    from ecrl.env_check.check import check_env
    from ecrl.envs import Env, make_env
    from ecrl.errors import ConfigError
    from ecrl.loop.iteration import close, init_state, make_iteration, train_iter
    from ecrl.policies import Policy, make_policy, module_policy
    from ecrl.registry import (
        register_action,
        register_algorithm,
        register_env,
        register_event,
        register_network,
        register_observation,
        register_policy,
        register_reward,
        registered,
    )
    from ecrl.run.checkpoint import load, save
    from ecrl.run.evaluation import evaluate
    from ecrl.run.train import train, train_from_config

if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    # OpenMP's threads wait for work by spinning, for milliseconds if not told otherwise, on cores that MuJoCo's need
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")

_HOME = {
    "ecrl.algorithms": ("Algorithm", "make_algorithm"),
    "ecrl.env_check.check": ("check_env",),
    "ecrl.run.checkpoint": ("load", "save"),
    "ecrl.config": ("Config", "PolicyConfig", "load_config"),
    "ecrl.envs": ("Env", "make_env"),
    "ecrl.errors": ("ConfigError",),
    "ecrl.run.evaluation": ("evaluate",),
    "ecrl.loop.iteration": ("close", "init_state", "make_iteration", "train_iter"),
    "ecrl.policies": ("Policy", "make_policy", "module_policy"),
    "ecrl.registry": (
        "register_action",
        "register_algorithm",
        "register_env",
        "register_event",
        "register_network",
        "register_observation",
        "register_policy",
        "register_reward",
        "registered",
    ),
    "ecrl.config.model": ("ConfigModel",),
    "ecrl.run.train": ("train", "train_from_config"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = [
    "Algorithm",
    "Config",
    "ConfigError",
    "ConfigModel",
    "Env",
    "Policy",
    "PolicyConfig",
    "check_env",
    "close",
    "evaluate",
    "init_state",
    "load",
    "load_config",
    "make_algorithm",
    "make_env",
    "make_iteration",
    "make_policy",
    "module_policy",
    "register_action",
    "register_algorithm",
    "register_env",
    "register_event",
    "register_network",
    "register_observation",
    "register_policy",
    "register_reward",
    "registered",
    "save",
    "train",
    "train_from_config",
    "train_iter",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        with importing():
            module = import_module(_MODULE_OF[name])
        return getattr(module, name)
    if name.isidentifier() and not name.startswith("_") and find_spec(f"ecrl.{name}"):
        return import_module(f"ecrl.{name}")  # so that `ecrl.kernels.gae` needs no import of its own
    raise AttributeError(f"module 'ecrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
