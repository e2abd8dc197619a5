"""Choose the form of a run, compiled or eager, from config, device and versions alone.

A form has a function `jit(fn, *static)`. It binds the static arguments of `fn`, which are functions and numbers that
shape the graph, and may compile the result. A form also has a `scan`. Inside a compiled function it is one loop of the
graph. Equal `fn` and `static` share one compiled function, so a new seed, name or learning rate compiles nothing.

A compiled function must be pure. Its values are its arguments, the default dtype and the state of autocast: each
combination of their layouts and settings is compiled once.
- A write in place on an argument, or on a tensor from outside of the function, raises ConfigError with its line.
- Tensors captured from outside of the function are frozen at compile time. If one is written on in place, the function
  is compiled again. Pass tensors that change as arguments: compiling takes seconds.
- Nothing notices a new value of a captured Python number or name, nor writes that torch does not count, through
  `x.data` or a NumPy array of the same memory. The compiled function keeps the old value.

Inductor makes C++ of a graph (`ecrl.compile.cpu`), and keeps that on disk for the next process.
"""

import gc
import os
import re
import shutil
import subprocess
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecrl.compile.autocast import settings, without_autocast
from ecrl.compile.user_line import user_frames, user_line
from ecrl.compile.vmap import outside, over_batch, recorded, vmapped
from ecrl.errors import ConfigError, UserError
from ecrl.kernels import scan
from ecrl.kernels.scan_loop import Scan
from ecrl.pytree import exact, flatten, names, unflatten
from ecrl.tracing_state import in_forward_mode, in_graph, knows_transforms, transforms, version_of


class Form(NamedTuple):
    """`name` is "compiled" or "eager", `reason` one line for people; `jit` and `scan` are what the algorithms call."""

    name: str
    reason: str
    jit: Callable[..., Callable[..., Any]]
    scan: Scan


class _Made(NamedTuple):
    """A compiled function, the tensors it is for, and the structures around those and around what it gives."""

    run: Callable[..., list[Tensor]]
    setting: Hashable
    captured: list[tuple[Tensor, int]]  # with their versions, that count the writes on them
    structure: Hashable
    strides: list[tuple[int, ...]]
    alike: Any  # like a comparison of every shape, stride, dtype and device, in a tenth of its time
    flags: list[int]  # which of the tensors are of bools
    out: Hashable


def _alike(leaves: list[Tensor]) -> Any:
    from torch._C._dynamo.guards import TensorGuards  # private: only compiled functions need it

    sizes: Any = [list(leaf.shape) for leaf in leaves]
    strides: Any = [list(leaf.stride()) for leaf in leaves]
    return TensorGuards(*leaves, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def _apart(leaf: Tensor) -> Tensor:
    """The leaf where every element has memory of its own. An expanded leaf, or a sliding window, is copied."""
    reach = 0  # the largest distance between two elements along the axes of smaller strides
    for stride, size in sorted(zip(leaf.stride(), leaf.shape, strict=True)):
        if size > 1 and stride <= reach:
            return leaf.contiguous()
        reach += stride * max(size - 1, 0)
    return leaf


def _unshared(leaves: list[Tensor]) -> list[Tensor]:
    """The leaves, each in a storage of its own: a graph reads tensors that are one object as one input, for ever."""
    seen: set[int] = set()
    for i, leaf in enumerate(leaves):
        if (memory := leaf.untyped_storage().data_ptr()) in seen:
            leaves[i] = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(leaf)
        seen.add(memory)
    return leaves


def _flags(leaves: list[Tensor]) -> list[int]:
    return [i for i, leaf in enumerate(leaves) if leaf.dtype is torch.bool]


def _evened(leaves: list[Tensor], flags: list[int]) -> list[Tensor]:
    """Copy the bool leaves that begin at an odd byte, because graphs read two bools at a time. Return all leaves."""
    for i in flags:
        if leaves[i].storage_offset() % 2:
            leaves[i] = leaves[i].clone()
    return leaves


def _dense(leaf: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The leaf in the memory layout that was compiled for."""
    if leaf.stride() == stride:
        return leaf
    return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device).copy_(leaf)


def _current(made: _Made) -> bool:
    """Return True if nobody has written on the captured tensors since the compilation."""
    return all(version_of(tensor) == version for tensor, version in made.captured)


class Compilation(NamedTuple):
    """One compilation: the function and the reason (first call, or the difference from the last call); its duration.

    `seconds` is None until it ends. `fault` is the reason why the function runs eagerly instead, if it does.
    """

    text: str
    seconds: float | None
    fault: str | None = None


@dataclass(frozen=True)
class Jit:
    """`jit(fn, *static)` binds the static arguments of `fn` and compiles it when it is first called.

    A `strict` one raises ConfigError if compiling fails. The others warn and run the function eagerly. All strict ones
    are equal and share compiled functions, and so do the others. Each has its own record of the compilations that its
    calls made.
    """

    strict: bool = False
    compilations: list[Compilation] = field(default_factory=list, compare=False)

    def __call__(self, fn: Callable, *static: Any) -> Callable[..., Any]:
        """Bind the static arguments of `fn`; equal ones give the same compiled function."""
        compiled = _compiled if self.strict else _compiled_or_eager
        return partial(compiled(fn, *map(_static, static)), self.compilations)


@dataclass(frozen=True)
class _Static:
    """A static argument. Two are equal if their keys are."""

    key: Hashable
    value: Any = field(compare=False)


def _static(value: Any) -> _Static:
    return _Static(exact(value), value)


def compilations_of(jit: Callable) -> list[Compilation]:
    """The record of a `jit`; empty if it compiles nothing."""
    return getattr(jit, "compilations", [])


def _difference(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    old, new = (dict(zip(names(structure), leaves, strict=True)) for _, structure, *leaves in (before, now))
    told = [f"{name} is gone" for name in old.keys() - new.keys()] + [
        f"{name} is new" for name in new.keys() - old.keys()
    ]
    told += [f"{n} was {_told(old[n])}, is {_told(new[n])}" for n in old if n in new and old[n] != new[n]]
    told += ["the default dtype or autocast differs"] if before[0] != now[0] else []
    return "; ".join(sorted(told)) or "another structure around the same tensors"


def _told(layout: tuple[Any, ...]) -> str:
    shape, dtype, device = layout
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def _compiler_for(leaves: list[Tensor]) -> Callable[..., tuple[Callable[..., Any], Hashable, list[Tensor]]]:
    if any(leaf.is_cuda for leaf in leaves):
        from ecrl.compile.cuda_graph import compiled
    else:
        from ecrl.compile.cpu import compiled
    return compiled


@lru_cache(None)
def _compiled(fn: Callable, *static: "_Static") -> Callable[..., Any]:
    """Bind the static arguments of `fn` and compile it. ConfigError if that fails."""
    return _function(_compiled, fn, tuple(one.value for one in static))


@lru_cache(None)
def _compiled_or_eager(fn: Callable, *static: "_Static") -> Callable[..., Any]:
    """Bind the static arguments of `fn` and compile it. If that fails, warn and run it eagerly from then on."""
    return _function(_compiled_or_eager, fn, tuple(one.value for one in static))


@dataclass(frozen=True)
class _Fault:
    """The reason why a function could not be compiled. All reasons outside of the user's code are equal."""

    text: str = field(compare=False)
    users_line: str | None = None


@cache
def _warn_eager(fault: _Fault) -> None:
    """Warn once that functions run eagerly for this reason."""
    warnings.warn(f"running eager, slower per step: {fault.text}", RuntimeWarning, stacklevel=4)


_RUNS_EAGER = ContextVar("_RUNS_EAGER", default=False)
"""True inside a function that could not be compiled: the functions that it calls are not compiled either."""


def _eagerly(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call `fn` with the functions that it calls uncompiled."""
    token = _RUNS_EAGER.set(True)
    try:
        return fn(*args)
    finally:
        _RUNS_EAGER.reset(token)


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message that is not blank, shortened."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def _fault(name: str, error: Exception) -> _Fault:
    """Describe in one line why the function `name` could not be compiled."""
    if isinstance(error, ConfigError):
        return _Fault(text := str(error).removeprefix("trainer.compile: ").split("\n")[0], text)
    advice = "set trainer.compile to off"
    if (said := _compiler_error(str(error))) is not None:
        return _Fault(f"the C++ compiler failed: {said}; {advice}")
    frames = traceback.extract_tb(error.__traceback__)
    line = user_line(frames) if user_frames(frames) else None
    cause = f"cannot be compiled: {type(error).__name__}: {_first_line(error)}; {advice}"
    return _Fault(f"{line or name} {cause}", line)


def _compiler_error(message: str) -> str | None:
    """Return the first line with an error in the output of a C++ compiler; None if the message is not from one."""
    if "C++ compile error" not in message:
        return None
    lines = [line.strip() for line in message.partition("Output:")[2].splitlines() if line.strip()]
    errors = [line for line in lines if re.search("error|cannot", line)]
    return ([*errors, *lines] or ["it printed nothing"])[0][:300]


def _is_users(error: Exception) -> bool:
    """Return True if the user's own code raised the error: its last line is in neither torch nor the compiler."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, UserError) or user_frames(frames)[-1:] == frames[-1:]


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause Python's garbage collector. Importing inductor and compiling make many objects that stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _function(jit: Callable[..., Callable[..., Any]], fn: Callable, static: tuple) -> Callable[..., Any]:
    """Compile `fn` as a whole for each structure and set of shapes it is called with. `jit` is for its batches."""
    bound, made, last = partial(fn, *static), {}, []
    eager_because: str | None = None
    name = fn.__name__ if fn is not over_batch else f"{static[0].__name__} of a batch"

    def new(
        record: list[Compilation], key: tuple[Any, ...], structure: Hashable, leaves: list[Tensor], why: str
    ) -> _Made:
        text = f"{name}: {why}"
        place, began = len(record), time.perf_counter()
        record.append(Compilation(text, None))
        leaves = _unshared([_apart(leaf) for leaf in leaves])
        try:
            alike = _alike(leaves)
            with _without_garbage_collection():
                run, out, captured = _compiler_for(leaves)(bound, structure, leaves)
        finally:
            record[place] = Compilation(text, time.perf_counter() - began)
        versions = [(tensor, version_of(tensor)) for tensor in captured]
        strides = [leaf.stride() for leaf in leaves]
        return _Made(run, key[0], versions, structure, strides, alike, _flags(leaves), out)

    def call(record: list[Compilation], *args: Any) -> Any:
        nonlocal eager_because
        if in_graph():  # it becomes a part of that graph
            return bound(*args)
        if eager_because is not None and not any(one.fault for one in record):
            record.append(Compilation(f"{name}: runs eager", 0.0, eager_because))
        if eager_because is not None or _RUNS_EAGER.get():
            return _eagerly(bound, args)
        leaves, structure = flatten(args)
        setting = settings()
        known, transformed = last[0] if last else None, transforms() or in_forward_mode(leaves)
        if (
            known
            and not transformed
            and known.structure == structure
            and known.setting == setting
            and known.alike.check(*leaves)
            and _current(known)
        ):
            with torch.no_grad(), without_autocast():
                return unflatten(known.out, known.run(*_evened(leaves, known.flags)))
        leaves = [leaf.resolve_neg().resolve_conj() for leaf in leaves]
        differentiated = recorded(*leaves)
        if vmapped() and not differentiated:
            return _compiled_batch(jit, record, fn, static, structure, leaves)
        if transformed or differentiated:
            return bound(*args)
        leaves = _evened(leaves, _flags(leaves))
        key = setting, structure, *[(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        why = None
        if key not in made:
            why = _difference([*made][-1], key) if made else "first call"
        elif not _current(made[key]):
            why = "a captured tensor was written on"
        if why is not None:
            try:
                made[key] = new(record, key, structure, leaves, why)
            except Exception as error:
                if jit is _compiled and _is_users(error):
                    raise
                fault = _fault(name, error)
                if jit is _compiled:
                    raise ConfigError(f"trainer.compile: on, but {fault.text}") from error
            else:
                fault = None
            if fault is not None:
                eager_because, record[-1] = fault.text, record[-1]._replace(fault=fault.text)
                out = _eagerly(bound, args)  # before the warning: an error of the function is raised without one
                _warn_eager(fault)
                return out
        last[:] = [known := made[key]]
        with torch.no_grad(), without_autocast():
            return unflatten(known.out, known.run(*map(_dense, leaves, known.strides)))

    return call


def _compiled_batch(
    jit: Callable, record: list[Compilation], fn: Callable, static: tuple, structure: Hashable, leaves: list[Tensor]
) -> Any:
    """Call `fn` under vmap: the whole batch is one call of one compiled function."""
    found: list[Hashable] = []

    def whole(batched: tuple[bool, ...], *leaves: Tensor) -> list[Tensor]:
        out, made = flatten(jit(over_batch, *map(_static, (fn, static, structure, batched)))(record, *leaves))
        found[:] = [made]
        return out

    out = outside(whole, leaves)
    return unflatten(found[0], out)


_LOOPS_FAIL = torch.__version__ < "2.13"
"""Inductor fails to write the C++ of a loop before torch 2.13."""


@cache
def compiler_fault() -> str | None:
    """Return the reason why this machine cannot compile for the CPU, or None if no reason is known."""
    if _LOOPS_FAIL:
        return f"torch {torch.__version__} cannot compile loops for the CPU"
    compiler, headers = os.environ.get("CXX", "g++"), sysconfig.get_path("include")
    if shutil.which(compiler) is None:  # inductor takes $CXX for a program, without arguments
        return f"no C++ compiler found ({compiler})"
    if not os.path.exists(os.path.join(headers, "Python.h")):
        return f"no Python.h found in {headers}"
    tried = [compiler, "-std=c++20", "-fopenmp", "-fsyntax-only", "-xc++", "-"]
    status = subprocess.run(tried, input=b"#include <cstddef>\n#include <omp.h>\n", capture_output=True).returncode
    return f"{' '.join(tried)} ended with status {status}" if status else None


@cache
def has_triton() -> bool:
    """Return True if Triton is installed."""
    return find_spec("triton") is not None


@cache
def gpu_fault() -> str | None:
    """Return the reason why this machine cannot compile for a GPU, or None if no reason is known."""
    if not has_triton():
        return "Triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):  # it builds what starts a kernel
        return "no C compiler found (gcc, clang or $CC)"
    headers = sysconfig.get_path("include")
    return None if os.path.exists(os.path.join(headers, "Python.h")) else f"no Python.h found in {headers}"


def choose_form(mode: str, device: str) -> Form:
    """The form for `trainer.compile` on a device, with a new record of compilations.

    "off" is eager. "on" compiles, and raises ConfigError if that fails. "auto" compiles, and warns and runs eager if
    that fails, now or later.
    """
    form = _chosen(mode, device)
    return form if form.name == "eager" else form._replace(jit=Jit(mode == "on"))


@cache
def _chosen(mode: str, device: str) -> Form:
    if mode == "off":
        return Form("eager", "trainer.compile is off", partial, scan)
    fault = compiler_fault() if device == "cpu" else gpu_fault()
    tools = "g++" if device == "cpu" else "triton, gcc"
    needed = f"{tools} and the headers of Python (Debian: apt install g++ python3-dev)"
    needed = "torch 2.13 or newer" if device == "cpu" and _LOOPS_FAIL else needed
    if fault is None:
        try:
            if not knows_transforms():
                raise ImportError("it does not report the transforms of torch.func")
            from ecrl.compile.scan import graph_scan
        except Exception as error:  # a private part of torch is gone, or works in another way
            fault = f"torch {torch.__version__} cannot compile: {_first_line(error)}"
            needed = "a version of torch that ecrl supports"
        else:
            made = "" if device == "cpu" else " and captured in CUDA graphs"
            return Form(
                "compiled", f"rollout and update compiled by inductor for {device}{made}", Jit(mode == "on"), graph_scan
            )
    advice = f"install {needed}, or set trainer.compile to off"
    if mode == "on":
        raise ConfigError(f"trainer.compile: on, but {fault}; {advice}")
    warnings.warn(f"running eager, slower per step: {fault}; {advice}", RuntimeWarning, stacklevel=3)
    return Form("eager", fault, partial, scan)
