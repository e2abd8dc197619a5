"""The form a run takes, compiled or eager, chosen from config, device and versions alone; the only file that compiles.

A form has a function `jit(fn, *static)` that binds the static arguments of `fn` (functions and numbers that shape the
graph) and makes it as fast as the form allows. Equal `fn` and `static` share one compiled function, so a new seed, name
or learning rate compiles nothing.
"""

import os
import shutil
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch.utils import _pytree as pytree

from ecrl.errors import ConfigError


class Form(NamedTuple):
    """`name` is "compiled" or "eager", `reason` one line for people, `jit` what the algorithms call."""

    name: str
    reason: str
    jit: Callable[..., Callable[..., Any]]


@cache
def _prepare() -> None:
    """What makes compiling calm, once per process.

    tensordict fills tables of types at first use, and compiled code guards on their sizes: fill them before. Dynamo
    gives up after 8 shapes of one function, which a notebook that tries sizes reaches.
    """
    from torch._dynamo import config

    nested = TensorDict({"a": TensorDict({"b": torch.zeros(1)}, [])}, [])
    pytree.tree_map(torch.clone, nested.update({"a": {"b": torch.ones(1)}}))
    config.recompile_limit = max(64, config.recompile_limit)


@cache
def _compiled(fn: Callable, *static: Any) -> Callable[..., Any]:
    _prepare()

    def bound(*args: Any) -> Any:
        return fn(*static, *args)

    # A code object of its own: dynamo counts recompiles per code object, and all bounds would share one.
    bound.__code__ = bound.__code__.replace(co_name=fn.__name__)
    return torch.compile(bound, fullgraph=True, dynamic=False)


@cache
def compiler_fault() -> str | None:
    """Why inductor cannot compile for the CPU here, or None if it can; tried once."""
    compiler = os.environ.get("CXX", "g++")
    if not any(shutil.which(name) for name in (compiler, "g++", "clang++", "cl")):
        return f"no C++ compiler found ({compiler})"
    try:
        torch.compile(lambda x: x + 1, fullgraph=True)(torch.zeros(8))
    except Exception as error:  # inductor raises many kinds; each means that compiling does not work here
        return f"compiling a first function failed ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
    return None


@cache
def choose_form(mode: str, device: str) -> Form:
    """The form for `trainer.compile` on a device.

    "off" is eager. "on" compiles, or raises ConfigError where that is not possible. "auto" compiles where it is
    possible and warns once where it is not.
    """
    if mode == "off":
        return Form("eager", "trainer.compile is off", partial)
    fault = compiler_fault() if device == "cpu" else None
    if fault is None:
        return Form("compiled", f"step and minibatch compiled by inductor for {device}", _compiled)
    advice = "install g++ (Debian: apt install g++), or set trainer.compile to off"
    if mode == "on":
        raise ConfigError(f"trainer.compile: on, but {fault}; {advice}")
    warnings.warn(f"running eager, slower per step: {fault}; {advice}", RuntimeWarning, stacklevel=2)
    return Form("eager", fault, partial)
