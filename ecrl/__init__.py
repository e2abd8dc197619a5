"""Pure reinforcement-learning kernels in PyTorch, and one thin loop that composes them.

What changes is a tensor in a TensorDict; what does not is a frozen config; what happens is a module-level function.
Names are resolved when first used, so that importing one kernel, or asking for help, stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecrl.algorithms import make_algorithm
    from ecrl.checkpoint import load, save
    from ecrl.config import Config, load_config
    from ecrl.envs import make_env
    from ecrl.errors import ConfigError
    from ecrl.evaluation import evaluate
    from ecrl.loop import init_state, make_iteration, train_iter
    from ecrl.policies import make_policy
    from ecrl.registry import register_algorithm, register_env, register_policy, registered
    from ecrl.training import train, train_from_config

_HOME = {
    "ecrl.algorithms": ("make_algorithm",),
    "ecrl.checkpoint": ("load", "save"),
    "ecrl.config": ("Config", "load_config"),
    "ecrl.envs": ("make_env",),
    "ecrl.errors": ("ConfigError",),
    "ecrl.evaluation": ("evaluate",),
    "ecrl.loop": ("init_state", "make_iteration", "train_iter"),
    "ecrl.policies": ("make_policy",),
    "ecrl.registry": ("register_algorithm", "register_env", "register_policy", "registered"),
    "ecrl.training": ("train", "train_from_config"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = [
    "Config",
    "ConfigError",
    "evaluate",
    "init_state",
    "load",
    "load_config",
    "make_algorithm",
    "make_env",
    "make_iteration",
    "make_policy",
    "register_algorithm",
    "register_env",
    "register_policy",
    "registered",
    "save",
    "train",
    "train_from_config",
    "train_iter",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ecrl' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
