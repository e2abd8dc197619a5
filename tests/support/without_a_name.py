"""Train a short run for each of some private names of torch, in a process where torch lacks that name.

`python tests/support/without_a_name.py import:NAME attribute:NAME ...` prints a line per name: the name, "eager" or
"compiled", the number of warnings about it, the environment steps of the run and the warning. An import of the name by
ecrl fails. An attribute is removed for torch too.
"""

import builtins
import importlib
import os
import sys
import warnings
from typing import Any

RUN = {
    "trainer.compile": "auto",
    "trainer.device": "cpu",
    "trainer.num_envs": 2,
    "trainer.buffer_size": 4,
    "trainer.iterations": 2,
    "trainer.enable_eval": False,
    "algorithm.cfg.batch_size": 4,
    "algorithm.cfg.n_epochs": 1,
    "policy.actor.network_cfg.hidden_sizes": [4, 4],
    "policy.critic.network_cfg.hidden_sizes": [4, 4],
}


class _Missing:
    """Hide an attribute of built-in classes, whose own attributes cannot be deleted."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, instance: Any, owner: Any) -> Any:
        raise AttributeError(self.name)

    def __set__(self, instance: Any, value: Any) -> None:
        pass


def owner_of(name: str) -> Any:
    """Return the module or class that has the last part of a dotted name.

    >>> owner_of("os.path.join").__name__
    'posixpath'
    """
    first, *rest = name.split(".")[:-1]
    owner, path = importlib.import_module(first), first
    for part in rest:
        path = f"{path}.{part}"
        try:
            owner = importlib.import_module(path)  # first: a function may have the name of its module
        except ImportError:
            owner = getattr(owner, part)
    return owner


def refuse_import(name: str) -> None:
    """Let `from ... import` raise ImportError for a name if a module of ecrl asks for it."""
    usual = builtins.__import__

    def without(module: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        importer = str((globals or {}).get("__name__", "")).split(".")[0]
        if importer == "ecrl" and name in [f"{module}.{one}" for one in fromlist or ()]:
            raise ImportError(f"cannot import name {name.split('.')[-1]!r} from {module!r}")
        return usual(module, globals, locals, fromlist, level)

    builtins.__import__ = without


def remove(owner: Any, name: str) -> None:
    """Remove an attribute from a module, or from a class and the classes that it inherits it from."""
    if not isinstance(owner, type) and name in vars(owner):
        delattr(owner, name)
        return
    for base in (owner if isinstance(owner, type) else type(owner)).__mro__:
        if name in vars(base):
            try:
                type.__delattr__(base, name)
            except TypeError:  # a built-in class
                setattr(owner, name, _Missing(name))
    getattr(owner, "_member_map_", {}).pop(name, None)  # of an enumeration
    assert not hasattr(owner, name)


def train(kind: str, name: str) -> str:
    """Train without a name and describe the run."""
    if kind == "import":
        refuse_import(name)
    else:
        remove(owner_of(name), name.split(".")[-1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import ecrl
        from ecrl.loop import build

        build._COMPILING_S = 0.0  # so that compiling is worth its time
        cfg = ecrl.load_config("cartpole_ppo", RUN)
        state, _ = ecrl.train(ecrl.init_state(cfg), cfg, progress=False)
    eager = [str(one.message) for one in caught if "running eager" in str(one.message)]
    return f"{name} {'eager' if eager else 'compiled'} {len(eager)} {int(state['sample_step'])} {eager[:1]}"


def main(names: list[str]) -> None:
    """Train each in a separate process, which imports torch first and then ecrl."""
    import gymnasium
    import pydantic
    import tensordict
    import torch
    import torch._inductor.compile_fx  # first: other modules of inductor import one another in circles

    assert gymnasium and pydantic and tensordict and torch
    pairs = [name.split(":") for name in names]
    for _, name in pairs:
        owner_of(name)
    for kind, name in pairs:
        if os.fork():
            status = os.wait()[1]
            if status:
                print(name, "crashed", status, flush=True)
            continue
        print(train(kind, name), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
