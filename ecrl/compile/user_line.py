"""Find the line of the user's code in a traceback.

This module uses only public names of torch, so its functions also work if a private name of torch is missing.
"""

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from operator import is_not
from pathlib import Path
from typing import Any

import sympy
import tensordict
import torch

from ecrl.errors import ConfigError
from ecrl.kernels import scan_loop
from ecrl.pytree import flatten
from ecrl.tracing_state import in_graph, transforms

_INSIDE = {Path(str(module.__file__)).parent for module in (torch, tensordict, sympy)}
_INSIDE |= {Path(scan_loop.__file__), Path(__file__).parent}

_INDUCTOR = Path(str(torch.__file__)).parent / "_inductor"
_PYTHON = Path(traceback.__file__).parent


def is_outside(frame: traceback.FrameSummary) -> bool:
    """Return True if a stack frame is outside torch, tensordict, sympy, Python's standard library and `ecrl.compile`.

    Frames of `ecrl.kernels.scan_loop` do not count as outside either.
    """
    path = Path(frame.filename)
    in_python = _PYTHON in path.parents and not {"site-packages", "dist-packages"} & {*path.parts}
    return not in_python and not _INSIDE & {path, *path.parents}


def user_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the stack frames of the user's code that precede the first frame of inductor.

    Frames of ecrl outside of `ecrl.compile`, such as frames of an algorithm, also count as the user's code.
    """
    return [f for f in takewhile(lambda f: _INDUCTOR not in Path(f.filename).parents, frames) if is_outside(f)]


def user_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """Describe the last line of the user's code in a traceback. If no line is the user's, describe the last line."""
    last = (user_frames(frames) or frames)[-1]
    return f"{last.filename}:{last.lineno}, in {last.name},"


def call_pure(fn: Callable[..., Any], build_args: Callable[[], Sequence[Any]]) -> Any:
    """Call `fn` with the arguments that `build_args` returns.

    Raises: ConfigError during a trace, if `fn` sets or removes an entry of a container among the arguments, or replaces
        the data of a tensor. Compiled code would not make these changes to the caller's arguments.
    """
    args = build_args()
    if not in_graph():
        return fn(*args)
    leaves, structure = flatten(args)
    memory = [] if transforms() else [leaf.untyped_storage() for leaf in leaves]  # transforms hide the storage
    out = fn(*args)
    after, structure_after = flatten(args)
    if structure_after != structure or any(map(is_not, after, leaves)):
        change = f"{_line_of_new_key(fn, build_args())} sets or removes an entry of a TensorDict, dictionary or list"
        advice = "change a copy, such as x = x.copy(), and return it"
    elif any(leaf.untyped_storage() is not old for leaf, old in zip(leaves, memory, strict=False)):
        change, advice = f"{_line_of(fn)} replaces the data of a tensor", "return a new tensor"
    else:
        return out
    raise ConfigError(
        f"trainer.compile: {change} that is an argument; compiled functions must be pure: {advice}, or set "
        "trainer.compile to off"
    )


def _line_of_new_key(fn: Callable[..., Any], args: Sequence[Any]) -> str:
    """Find the line of `fn` that sets or removes a key, by calling `fn` again with locked TensorDicts.

    If this call raises no error about a lock, describe where `fn` is defined.
    """
    _lock(args)
    try:
        fn(*args)
    except RuntimeError as error:
        if "lock" in str(error):
            return user_line(traceback.extract_tb(error.__traceback__))
    return _line_of(fn)


def _lock(tree: Any) -> None:
    if isinstance(tree, tensordict.TensorDictBase):
        tree.lock_()
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            _lock(part)


def _line_of(fn: Any) -> str:
    """Describe where a function is defined, with the file, the first line number and the function's name."""
    while isinstance(fn, partial):
        fn = fn.func
    code = getattr(fn, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}," if code else repr(fn)
