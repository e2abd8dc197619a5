"""Compile functions or run them eagerly. This module is the entry point of the package `ecrl.compile`.

A run executes its functions in one of two forms, compiled or eager. `choose_form` chooses the form from
`trainer.compile`, the device and the installed software. The result is a `Form` with two functions, `jit(fn, *static)`
and `scan`. The static arguments of `fn` are functions and settings that determine the graph. The function `jit` binds
the static arguments. In a compiled run, `jit` also compiles `fn` at the first call of the bound function. Calls of
`jit` with equal `fn` and `static` share one compiled function. A new seed, run name or learning rate therefore needs no
new compilation.

A function is compiled in four steps:

1. Compute the key of the call (`jit.py`). The key contains the structure of the arguments, and the shape, dtype and
   device of each tensor. The key also contains the number of threads, the default dtype and the autocast state
   (`autocast.py`). A call with a known key runs the compiled function for this key. A call with a new key continues
   with step 2. Under `torch.func.vmap`, one call of a compiled function handles the whole batch (`vmap.py`).
2. Trace the function (`trace.py`). The function runs once on tensors without data, and torch records the operations in
   a graph. A call of the form's `scan` becomes a loop of the graph (`scan.py`), and the gradient of a scan becomes a
   second loop (`scan_gradient.py`). If the function is impure, the trace raises a ConfigError (`user_code.py`) that
   names the line of the user's code (`user_line.py`).
3. Rewrite the graph. On a CPU, faster operations replace many matrix products (`cpu_matmul.py`). Duplicate operations
   are merged (`trace.py`). On a GPU, the graph is split at its loops (`partition.py`).
4. Generate code. On a CPU (`cpu.py`), inductor writes C++. This package makes the C++ code of random numbers
   (`cpu_philox.py`) and loops (`cpu_loops.py`) faster, and updates large carries of loops in place (`cpu_carries.py`).
   This package also makes functions such as tanh more accurate (`cpu_functions.py`), and shortens the compilation
   (`cpu_codegen.py`, `cpu_builds.py`). On a GPU (`cuda_graph.py`), inductor writes Triton kernels, and one CUDA graph
   captures the whole function. On both devices, this package has faster code for returns and advantages
   (`reverse_scan.py`, `reverse_triton.py`). Compiled code is stored on disk for the next process (`cache.py`).

A compiled function must be pure: its results may depend only on its arguments, the default dtype and the autocast
state.

- An in-place write to an argument, or to a tensor from outside the function, is a fault. With `trainer.compile` set to
  on, the compilation raises a ConfigError that names the line. With auto, the function runs eagerly, and a warning
  names the line.
- Tensors that the function captures from outside are constants of the graph. After an in-place write to a captured
  tensor, the next call compiles the function again, which takes seconds. If a tensor changes, pass it as an argument.
- A captured Python variable keeps its old value in a compiled function after the variable is assigned again.
- Torch's version counter does not record writes through `x.data`, or through a NumPy array of the same memory. After
  such a write to a captured tensor, the function is not compiled again. A loop of the graph still reads the old values,
  but operations outside of loops may read the new values. Avoid such writes.
"""

import os
import re
import shutil
import subprocess
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecrl.compile.autocast import settings, without_autocast
from ecrl.compile.user_line import user_frames, user_line
from ecrl.compile.vmap import outside_vmap, over_batch, records_gradients, vmapped
from ecrl.errors import ConfigError, UserError
from ecrl.kernels import scan
from ecrl.kernels.scan_loop import Scan
from ecrl.memory import without_garbage_collection
from ecrl.pytree import exact, flatten, names, unflatten
from ecrl.tracing_state import in_forward_mode, in_graph, knows_transforms, transforms, version_of


class Form(NamedTuple):
    """Form of a run (compiled or eager), with the functions `jit` and `scan` that algorithms call.

    The field `name` is "compiled" or "eager", and the field `reason` explains the choice in one line.
    """

    name: str
    reason: str
    jit: Callable[..., Callable[..., Any]]
    scan: Scan


class _CompiledFunction(NamedTuple):
    """Compiled function of one or more tensors, and the properties that these tensors must have."""

    run: Callable[..., list[Tensor]]
    settings: Hashable
    # each captured tensor, with its version counter (the number of in-place writes to the tensor)
    captured: list[tuple[Tensor, int]]
    structure: Hashable
    strides: list[tuple[int, ...]]
    layout_guard: Any
    bool_positions: list[int]
    output_structure: Hashable


def _layout_guard(leaves: list[Tensor]) -> Any:
    """Return a guard whose `check` compares tensors with `leaves`, ten times as fast as Python code.

    The guard compares the shapes, strides, dtypes and devices.
    """
    from torch._C._dynamo.guards import TensorGuards  # eager runs must work without private names of torch

    sizes: Any = [list(leaf.shape) for leaf in leaves]
    strides: Any = [list(leaf.stride()) for leaf in leaves]
    return TensorGuards(*leaves, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def _without_overlap(leaf: Tensor) -> Tensor:
    """Copy a tensor whose elements share memory, such as a sliding window. Return other tensors unchanged."""
    reach = 0  # the distance in memory between the first and last elements along the visited axes
    for stride, size in sorted(zip(leaf.stride(), leaf.shape, strict=True)):
        if size > 1 and stride <= reach:
            return leaf.contiguous()
        reach += stride * max(size - 1, 0)
    return leaf


def _with_own_storage(leaves: list[Tensor]) -> list[Tensor]:
    """Replace each leaf that shares its storage with an earlier leaf by a copy. Return all leaves.

    If two arguments are the same tensor, the tracer merges the arguments into one input of the graph. But a later call
    may pass two different tensors.
    """
    seen: set[int] = set()
    for i, leaf in enumerate(leaves):
        if (memory := leaf.untyped_storage().data_ptr()) in seen:
            leaves[i] = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(leaf)
        seen.add(memory)
    return leaves


def _bool_positions(leaves: list[Tensor]) -> list[int]:
    return [i for i, leaf in enumerate(leaves) if leaf.dtype is torch.bool]


def _with_aligned_bools(leaves: list[Tensor], positions: list[int]) -> list[Tensor]:
    """Replace each bool leaf that starts at an odd byte by a copy, and return all leaves.

    The copies are needed because a compiled graph reads two bools at a time.
    """
    for i in positions:
        if leaves[i].storage_offset() % 2:
            leaves[i] = leaves[i].clone()
    return leaves


def _with_stride(leaf: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Copy a leaf to the strides that the compiled function expects, unless the leaf already has these strides."""
    if leaf.stride() == stride:
        return leaf
    return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device).copy_(leaf)


def _is_current(compiled: _CompiledFunction) -> bool:
    """Return True if no captured tensor was written to in place after the compilation."""
    return all(version_of(tensor) == version for tensor, version in compiled.captured)


class Compilation(NamedTuple):
    """Record of one compilation of a function.

    Attributes:
        text: the function's name, and the reason for the compilation, such as the first call or a new shape.
        seconds: the duration of the compilation in seconds, or None until the compilation ends.
        fault: the reason why the compilation failed and the function runs eagerly, or None.
    """

    text: str
    seconds: float | None
    fault: str | None = None


@dataclass(frozen=True)
class Jit:
    """Callable `jit(fn, *static)` that binds the static arguments of `fn`, and compiles `fn` at the first call.

    If a compilation fails, an instance with `strict=True` raises ConfigError, or the error of the user's own code.
    Other instances warn and run the function eagerly. Instances with equal `strict` are equal, and share compiled
    functions. Each instance records the compilations that its own calls cause.
    """

    strict: bool = False
    compilations: list[Compilation] = field(default_factory=list, compare=False)

    def __call__(self, fn: Callable, *static: Any) -> Callable[..., Any]:
        """Bind the static arguments of `fn`. For equal `fn` and `static`, two calls share one compiled function."""
        compiled = _compiled if self.strict else _compiled_or_eager
        return partial(compiled(fn, *map(_static, static)), self.compilations)


@dataclass(frozen=True)
class _Static:
    """Static argument of a function. Two static arguments are equal if their keys are equal."""

    key: Hashable
    value: Any = field(compare=False)


def _static(value: Any) -> _Static:
    return _Static(exact(value), value)


def compilations_of(jit: Callable) -> list[Compilation]:
    """Return the compilations that `jit` recorded, or an empty list if `jit` never compiles."""
    return getattr(jit, "compilations", [])


def _difference(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """Describe how the key of a call differs from the key of the previous compilation."""
    old, new = (dict(zip(names(structure), leaves, strict=True)) for _, structure, *leaves in (before, now))
    differences = [f"{name} is gone" for name in old.keys() - new.keys()]
    differences += [f"{name} is new" for name in new.keys() - old.keys()]
    differences += [
        f"{name} was {_describe_layout(old[name])}, is {_describe_layout(new[name])}"
        for name in old
        if name in new and old[name] != new[name]
    ]
    differences += ["the number of threads, the default dtype or autocast differs"] if before[0] != now[0] else []
    return "; ".join(sorted(differences)) or "the same tensors are in other containers"


def _describe_layout(layout: tuple[Any, ...]) -> str:
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
    """Bind the static arguments of `fn`, and compile `fn` at the first call.

    If compiling fails, raise ConfigError, or the error of the user's own code.
    """
    return _compile_at_call(_compiled, fn, tuple(one.value for one in static))


@lru_cache(None)
def _compiled_or_eager(fn: Callable, *static: "_Static") -> Callable[..., Any]:
    """Bind the static arguments of `fn`, and compile `fn` at the first call. If compiling fails, run eagerly."""
    return _compile_at_call(_compiled_or_eager, fn, tuple(one.value for one in static))


@dataclass(frozen=True)
class _Fault:
    """Reason why a function could not be compiled.

    The field `users_line` is the line of the user's code, or None if no such line is known. For a ConfigError, which
    names the line itself, the field is the text of the error. Two faults with equal `users_line` are equal. For equal
    faults, `_warn_eager` warns only once.
    """

    text: str = field(compare=False)
    users_line: str | None = None


@cache
def _warn_eager(fault: _Fault) -> None:
    """Warn that functions run eagerly. For equal values of `fault`, warn only once."""
    warnings.warn(f"running eager, slower per step: {fault.text}", RuntimeWarning, stacklevel=4)


_RUNS_EAGER = ContextVar("_RUNS_EAGER", default=False)
"""True during a call of a function that could not be compiled. All functions that the call runs are then also eager."""


def _call_eagerly(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call `fn` eagerly, and do not compile the functions that `fn` calls."""
    token = _RUNS_EAGER.set(True)
    try:
        return fn(*args)
    finally:
        _RUNS_EAGER.reset(token)


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message that is not blank, shortened to 300 characters.

    If all lines are blank, return the name of the error's type.
    """
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def _fault(name: str, error: Exception) -> _Fault:
    """Describe in one line the error that prevented the compilation of the function `name`."""
    if isinstance(error, ConfigError):
        return _Fault(text := str(error).removeprefix("trainer.compile: ").split("\n")[0], text)
    advice = "set trainer.compile to off"
    if (compiler_error := _compiler_error(str(error))) is not None:
        return _Fault(f"the C++ compiler failed: {compiler_error}; {advice}")
    frames = traceback.extract_tb(error.__traceback__)
    line = user_line(frames) if user_frames(frames) else None
    cause = f"cannot be compiled: {type(error).__name__}: {_first_line(error)}; {advice}"
    return _Fault(f"{line or name} {cause}", line)


def _compiler_error(message: str) -> str | None:
    """Return the first error that the C++ compiler printed, or None if `message` contains no compiler output."""
    if "C++ compile error" not in message:
        return None
    lines = [line.strip() for line in message.partition("Output:")[2].splitlines() if line.strip()]
    errors = [line for line in lines if re.search("error|cannot", line)]
    return ([*errors, *lines] or ["it printed nothing"])[0][:300]


def _is_user_error(error: Exception) -> bool:
    """Return True if an error is a UserError, or if the error's traceback ends in the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, UserError) or user_frames(frames)[-1:] == frames[-1:]


def _compile_at_call(jit: Callable[..., Callable[..., Any]], fn: Callable, static: tuple) -> Callable[..., Any]:
    """Return a function that compiles `fn` once for each key of its calls, and runs the compiled code.

    The argument `jit` is `_compiled` or `_compiled_or_eager`. Under vmap, the returned function uses `jit` to compile a
    function of the whole batch.
    """
    bound, by_key, last = partial(fn, *static), {}, []
    eager_because: str | None = None
    name = fn.__name__ if fn is not over_batch else f"{static[0].__name__} of a batch"

    def compile_now(
        record: list[Compilation], key: tuple[Any, ...], structure: Hashable, leaves: list[Tensor], reason: str
    ) -> _CompiledFunction:
        text = f"{name}: {reason}"
        position, began = len(record), time.perf_counter()
        record.append(Compilation(text, None))
        leaves = _with_own_storage([_without_overlap(leaf) for leaf in leaves])
        try:
            guard = _layout_guard(leaves)
            with without_garbage_collection():  # the collector would scan inductor's objects again and again
                run, out, captured = _compiler_for(leaves)(bound, structure, leaves)
        finally:
            record[position] = Compilation(text, time.perf_counter() - began)
        versions = [(tensor, version_of(tensor)) for tensor in captured]
        strides = [leaf.stride() for leaf in leaves]
        return _CompiledFunction(run, key[0], versions, structure, strides, guard, _bool_positions(leaves), out)

    def call(record: list[Compilation], *args: Any) -> Any:
        nonlocal eager_because
        if in_graph():  # trace this call as a part of the outer graph
            return bound(*args)
        if eager_because is not None and not any(one.fault for one in record):
            record.append(Compilation(f"{name}: runs eager", 0.0, eager_because))
        if eager_because is not None or _RUNS_EAGER.get():
            return _call_eagerly(bound, args)
        leaves, structure = flatten(args)
        setting = settings()
        known, transformed = last[0] if last else None, transforms() or in_forward_mode(leaves)
        if (
            known
            and not transformed
            and known.structure == structure
            and known.settings == setting
            and known.layout_guard.check(*leaves)
            and _is_current(known)
        ):
            with torch.no_grad(), without_autocast():
                return unflatten(known.output_structure, known.run(*_with_aligned_bools(leaves, known.bool_positions)))
        leaves = [leaf.resolve_neg().resolve_conj() for leaf in leaves]
        differentiated = records_gradients(*leaves)
        if vmapped() and not differentiated:
            return _compiled_batch(jit, record, fn, static, structure, leaves)
        if transformed or differentiated:
            return bound(*args)
        leaves = _with_aligned_bools(leaves, _bool_positions(leaves))
        key = setting, structure, *[(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        reason = None
        if key not in by_key:
            reason = _difference([*by_key][-1], key) if by_key else "first call"
        elif not _is_current(by_key[key]):
            reason = "a captured tensor was changed in place"
        if reason is not None:
            try:
                by_key[key] = compile_now(record, key, structure, leaves, reason)
            except Exception as error:
                if jit is _compiled and _is_user_error(error):
                    raise
                fault = _fault(name, error)
                if jit is _compiled:
                    raise ConfigError(f"trainer.compile: on, but {fault.text}") from error
            else:
                fault = None
            if fault is not None:
                eager_because, record[-1] = fault.text, record[-1]._replace(fault=fault.text)
                # Call the function before warning. If the call raises an error, the warning would be wrong.
                out = _call_eagerly(bound, args)
                _warn_eager(fault)
                return out
        last[:] = [known := by_key[key]]
        with torch.no_grad(), without_autocast():
            return unflatten(known.output_structure, known.run(*map(_with_stride, leaves, known.strides)))

    return call


def _compiled_batch(
    jit: Callable, record: list[Compilation], fn: Callable, static: tuple, structure: Hashable, leaves: list[Tensor]
) -> Any:
    """Evaluate `fn` under vmap with one call of a compiled function that handles the whole batch."""
    output_structure: list[Hashable] = []

    def call_batch(batched: tuple[bool, ...], *leaves: Tensor) -> list[Tensor]:
        out, structure_of_out = flatten(
            jit(over_batch, *map(_static, (fn, static, structure, batched)))(record, *leaves)
        )
        output_structure[:] = [structure_of_out]
        return out

    out = outside_vmap(call_batch, leaves)
    return unflatten(output_structure[0], out)


_LOOPS_FAIL = torch.__version__ < "2.13"
"""True if torch is older than 2.13, because inductor then cannot generate C++ for a loop."""


@cache
def compiler_fault() -> str | None:
    """Return the reason why this machine cannot compile for the CPU, or None if no reason is known."""
    if _LOOPS_FAIL:
        return f"torch {torch.__version__} cannot compile loops for the CPU"
    compiler, headers = os.environ.get("CXX", "g++"), sysconfig.get_path("include")
    if shutil.which(compiler) is None:  # inductor expects a program without arguments in $CXX
        return f"no C++ compiler found ({compiler})"
    if not os.path.exists(os.path.join(headers, "Python.h")):
        return f"no Python.h found in {headers}"
    command = [compiler, "-std=c++20", "-fopenmp", "-fsyntax-only", "-xc++", "-"]
    status = subprocess.run(command, input=b"#include <cstddef>\n#include <omp.h>\n", capture_output=True).returncode
    return f"{' '.join(command)} ended with status {status}" if status else None


@cache
def has_triton() -> bool:
    """Return True if Triton is installed."""
    return find_spec("triton") is not None


@cache
def gpu_fault() -> str | None:
    """Return the reason why this machine cannot compile for a GPU, or None if no reason is known."""
    if not has_triton():
        return "Triton is not installed"
    # Triton needs a C compiler, because it compiles the functions that launch its kernels.
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "no C compiler found (gcc, clang or $CC)"
    headers = sysconfig.get_path("include")
    return None if os.path.exists(os.path.join(headers, "Python.h")) else f"no Python.h found in {headers}"


def choose_form(mode: str, device: str) -> Form:
    """Choose the form (compiled or eager) of a run on `device` with `trainer.compile` set to `mode`.

    With "off", a run is eager. With "on", a run is compiled, and raises ConfigError if this machine cannot compile or
    if a compilation fails. With "auto", a run is compiled. If this machine cannot compile, the run warns and is eager.
    If a compilation fails, the run warns, and only the affected function runs eagerly. The mode "background" is not
    handled here: the caller passes "auto" instead. The `jit` of a compiled form starts without recorded compilations.
    """
    form = _form_for(mode, device)
    return form if form.name == "eager" else form._replace(jit=Jit(mode == "on"))


@cache
def _form_for(mode: str, device: str) -> Form:
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
        except Exception as error:  # a private part of torch is missing or has changed
            fault = f"torch {torch.__version__} cannot compile: {_first_line(error)}"
            needed = "a version of torch that ecrl supports"
        else:
            captured = "" if device == "cpu" else " and captured in CUDA graphs"
            reason = f"rollout and update compiled by inductor for {device}{captured}"
            return Form("compiled", reason, Jit(mode == "on"), graph_scan)
    advice = f"install {needed}, or set trainer.compile to off"
    if mode == "on":
        raise ConfigError(f"trainer.compile: on, but {fault}; {advice}")
    warnings.warn(f"running eager, slower per step: {fault}; {advice}", RuntimeWarning, stacklevel=3)
    return Form("eager", fault, partial, scan)
