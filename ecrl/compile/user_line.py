"""The line of the user's code in a traceback. Only public parts of torch are used, so it can report any failure."""

import traceback
from pathlib import Path

import sympy
import tensordict
import torch

from ecrl.kernels import scan_loop

_INSIDE = {Path(str(module.__file__)).parent for module in (torch, tensordict, sympy)}
_INSIDE |= {Path(scan_loop.__file__), Path(__file__).parent}
_PYTHON = Path(traceback.__file__).parent


def is_outside(frame: traceback.FrameSummary) -> bool:
    """Return True if the line is not in torch, the compiler or Python's standard library."""
    path = Path(frame.filename)
    in_python = _PYTHON in path.parents and not {"site-packages", "dist-packages"} & {*path.parts}
    return not in_python and not _INSIDE & {path, *path.parents}


def user_line(frames: traceback.StackSummary) -> str:
    """Return the last line of code that `is_outside`, or the last line of all if there is none."""
    outer = [f for f in frames if is_outside(f)]
    last = (outer or frames)[-1]
    return f"{last.filename}:{last.lineno}, in {last.name},"
