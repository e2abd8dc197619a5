"""The form a run takes, compiled or eager, chosen from config, device and versions alone.

A form has a function `jit(fn, *static)` that binds the static arguments of `fn` (functions and numbers that shape the
graph) and makes it as fast as the form allows, and a `scan`, which inside such a function is one loop of its graph.
Equal `fn` and `static` share one compiled function, so a new seed, name or learning rate compiles nothing.

Inductor makes C++ of a graph (`ecrl.inductor`), and keeps that on disk for the next process; it is imported when used.
"""

import os
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from ecrl.errors import ConfigError
from ecrl.garbage import uncollected
from ecrl.kernels import scan
from ecrl.kernels.loops import Scan
from ecrl.trees import flatten, names, unflatten


class Form(NamedTuple):
    """`name` is "compiled" or "eager", `reason` one line for people; `jit` and `scan` are what the algorithms call."""

    name: str
    reason: str
    jit: Callable[..., Callable[..., Any]]
    scan: Scan


def _dense(leaf: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The leaf in the memory layout that was compiled for."""
    if leaf.stride() == stride:
        return leaf
    return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device).copy_(leaf)


COMPILED: list[str] = []
"""What was compiled in this process, and why: "first call", or what differs from the last call that was."""


def _difference(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    old, new = (dict(zip(names(structure), leaves, strict=True)) for structure, *leaves in (before, now))
    told = [f"{name} is gone" for name in old.keys() - new.keys()] + [
        f"{name} is new" for name in new.keys() - old.keys()
    ]
    told += [f"{n} was {_told(old[n])}, is {_told(new[n])}" for n in old if n in new and old[n] != new[n]]
    return "; ".join(sorted(told)) or "another structure around the same tensors"


def _told(layout: tuple[Any, ...]) -> str:
    shape, dtype, device = layout
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


@cache
def _compiled(fn: Callable, *static: Any) -> Callable[..., Any]:
    """`fn` with its static arguments, compiled as a whole for each structure and set of shapes it is called with."""
    bound, made = partial(fn, *static), {}

    def call(*args: Any) -> Any:
        leaves, structure = flatten(args)
        if peek_interpreter_stack() or (torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)):
            return bound(*args)
        key = structure, *[(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        if key not in made:
            COMPILED.append(f"{fn.__name__}: {_difference([*made][-1], key) if made else 'first call'}")
            with uncollected():
                from ecrl.inductor import compiled

                run, out = compiled(bound, structure, leaves)
            made[key] = run, [leaf.stride() for leaf in leaves], out
        run, strides, out = made[key]
        with torch.no_grad():
            return unflatten(out, run(*map(_dense, leaves, strides)))

    return call


@cache
def compiler_fault() -> str | None:
    """Why there is no compiling for the CPU here, or None if nothing is known against it."""
    compiler, headers = os.environ.get("CXX", "g++"), sysconfig.get_path("include")
    if shutil.which(compiler) is None:  # inductor takes $CXX for a program, without arguments
        return f"no C++ compiler found ({compiler})"
    if not os.path.exists(os.path.join(headers, "Python.h")):
        return f"no Python.h found in {headers}"
    tried = [compiler, "-std=c++20", "-fopenmp", "-fsyntax-only", "-xc++", "-"]
    status = subprocess.run(tried, input=b"#include <cmath>\n#include <omp.h>\n", capture_output=True).returncode
    return f"{' '.join(tried)} ended with status {status}" if status else None


@cache
def choose_form(mode: str, device: str) -> Form:
    """The form for `trainer.compile` on a device.

    "off" is eager. "on" compiles, or raises ConfigError where that is not possible. "auto" compiles where it is
    possible and warns once where it is not.
    """
    if mode == "off":
        return Form("eager", "trainer.compile is off", partial, scan)
    fault = compiler_fault() if device == "cpu" else None
    if fault is None:
        with uncollected():
            from ecrl.tracing import graph_scan

        return Form("compiled", f"rollout and update compiled by inductor for {device}", _compiled, graph_scan)
    advice = (
        "install g++ and the headers of Python (Debian: apt install g++ python3-dev), or set trainer.compile to off"
    )
    if mode == "on":
        raise ConfigError(f"trainer.compile: on, but {fault}; {advice}")
    warnings.warn(f"running eager, slower per step: {fault}; {advice}", RuntimeWarning, stacklevel=2)
    return Form("eager", fault, partial, scan)
