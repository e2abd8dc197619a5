"""What all forms need: arrays on a device, ours compiled, a call of jax."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.roofline import synchronize
from benchmarks.turns import Call

Inputs = dict[str, np.ndarray]
Make = Callable[[Inputs, str], Call]
"""What makes a form from inputs, for a device of torch: "cpu" or "cuda"."""


class Cost(NamedTuple):
    """The bytes a kernel must move, and the operations it must do."""

    bytes: float
    operations: float


def tensors(inputs: Inputs, device: str) -> dict[str, torch.Tensor]:
    """Copies as tensors."""
    return {name: torch.tensor(array, device=device) for name, array in inputs.items()}


def compiled(fn: Callable[..., Any], device: str) -> Callable[..., Any]:
    """`fn` through the project's own compiler, done when it returns."""
    from ecrl.compile.jit import choose_form

    return awaited(choose_form("on", device).jit(fn), device)


def awaited(fn: Callable[..., Any], device: str) -> Callable[..., Any]:
    """`fn`, done when it returns."""
    if device == "cpu":
        return fn

    def call(*args: Any) -> Any:
        out = fn(*args)
        synchronize(device)
        return out

    return call


def jitted(fn: Callable[..., Any], *args: Any) -> Call:
    """A call of `fn`, jitted by jax, on arrays that lie on its default device."""
    import jax

    fast, given = jax.jit(fn), jax.device_put(args)
    return lambda: jax.block_until_ready(fast(*given))
