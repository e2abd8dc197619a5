"""Train reinforcement learning agents in PyTorch with pure functions and one short training loop.

One TensorDict holds every value that changes during a run. A frozen config holds every setting that is fixed during a
run. Pure functions compute the new values. Only Gymnasium environments keep a part of their state outside of the
TensorDict.

`import ecrl` imports neither torch nor any other installed package. ecrl imports the module of a public name when the
name is first used.
"""

import gc
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ecrl.algorithms import Algorithm, make_algorithm
    from ecrl.config import Config, PolicyConfig, load_config
    from ecrl.config.model import ConfigModel
    from ecrl.env_check.check import check_env
    from ecrl.envs import Env, make_env
    from ecrl.errors import ConfigError
    from ecrl.loop.iteration import close, init_state, make_iteration, train_iter
    from ecrl.loop.policy_check import check_policy
    from ecrl.loop.population import exploit_and_explore
    from ecrl.loop.state_summary import summary
    from ecrl.policies import Policy, make_policy, module_policy
    from ecrl.registry import (
        register_action,
        register_algorithm,
        register_env,
        register_event,
        register_expert,
        register_network,
        register_observation,
        register_policy,
        register_reward,
        register_robot,
        register_vla_backend,
        registered,
    )
    from ecrl.run.checkpoint import load, save
    from ecrl.run.demonstrations import record_demonstrations
    from ecrl.run.evaluation import evaluate
    from ecrl.run.train import train, train_from_config
    from ecrl.run.train_many import train_many

if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    # By default, idle OpenMP threads spin for milliseconds, which takes CPU cores away from MuJoCo.
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")

_HOME = {
    "Algorithm": "algorithms",
    "Config": "config",
    "ConfigError": "errors",
    "ConfigModel": "config.model",
    "Env": "envs",
    "Policy": "policies",
    "PolicyConfig": "config",
    "check_env": "env_check.check",
    "check_policy": "loop.policy_check",
    "close": "loop.iteration",
    "evaluate": "run.evaluation",
    "exploit_and_explore": "loop.population",
    "init_state": "loop.iteration",
    "load": "run.checkpoint",
    "load_config": "config",
    "make_algorithm": "algorithms",
    "make_env": "envs",
    "make_iteration": "loop.iteration",
    "make_policy": "policies",
    "module_policy": "policies",
    "record_demonstrations": "run.demonstrations",
    "register_action": "registry",
    "register_algorithm": "registry",
    "register_env": "registry",
    "register_event": "registry",
    "register_expert": "registry",
    "register_network": "registry",
    "register_observation": "registry",
    "register_policy": "registry",
    "register_reward": "registry",
    "register_robot": "registry",
    "register_vla_backend": "registry",
    "registered": "registry",
    "save": "run.checkpoint",
    "summary": "loop.state_summary",
    "train": "run.train",
    "train_from_config": "run.train",
    "train_iter": "loop.iteration",
    "train_many": "run.train_many",
}
"""Map each public name to the module that defines it, without the prefix `ecrl.`."""

__all__ = [
    "Algorithm",
    "Config",
    "ConfigError",
    "ConfigModel",
    "Env",
    "Policy",
    "PolicyConfig",
    "check_env",
    "check_policy",
    "close",
    "evaluate",
    "exploit_and_explore",
    "init_state",
    "load",
    "load_config",
    "make_algorithm",
    "make_env",
    "make_iteration",
    "make_policy",
    "module_policy",
    "record_demonstrations",
    "register_action",
    "register_algorithm",
    "register_env",
    "register_event",
    "register_expert",
    "register_network",
    "register_observation",
    "register_policy",
    "register_reward",
    "register_robot",
    "register_vla_backend",
    "registered",
    "save",
    "summary",
    "train",
    "train_from_config",
    "train_iter",
    "train_many",
]


def _import(module: str) -> Any:
    """Import a module of ecrl. Pause garbage collection, which would scan the objects of torch again and again.

    After the import, the new objects count as old, so that frequent collections of young objects skip them. If the user
    has called `gc.freeze`, the new objects stay young.
    """
    from ecrl.memory import without_garbage_collection

    known = len(sys.modules)
    with without_garbage_collection():
        try:
            return import_module(f"ecrl.{module}")
        finally:
            if len(sys.modules) > known and not gc.get_freeze_count():  # objects that the user has frozen stay frozen
                gc.freeze()
                gc.unfreeze()  # moves all objects to the oldest generation


def __getattr__(name: str) -> Any:
    """Import a public name, or a module such as `ecrl.kernels`, when it is first used."""
    if name in _HOME:
        return getattr(_import(_HOME[name]), name)
    if name.isidentifier() and not name.startswith("_") and find_spec(f"ecrl.{name}"):
        return _import(name)
    raise AttributeError(f"module 'ecrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List only the public names, without imported modules and other names of this file."""
    return sorted([*__all__, "__version__"])
