"""Functions that the implementations share: copy arrays to a device, compile with ecrl, and jit with JAX."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.alternating_calls import Call
from benchmarks.roofline import synchronize

Inputs = dict[str, np.ndarray]
Make = Callable[[Inputs, str], Call]
"""A function that builds a call from inputs, for a device of torch: "cpu" or "cuda"."""


class Cost(NamedTuple):
    """The bytes a kernel must move, and the operations it must do."""

    bytes: float
    operations: float


def tensors(inputs: Inputs, device: str) -> dict[str, torch.Tensor]:
    """Copy arrays to tensors on a device."""
    return {name: torch.tensor(array, device=device) for name, array in inputs.items()}


def compiled(fn: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Compile `fn` with ecrl's compiler; the work is finished when a call returns."""
    from ecrl.compile.jit import choose_form

    return awaited(choose_form("on", device).jit(fn), device)


def awaited(fn: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return `fn` as a function whose work is finished when a call returns."""
    if device == "cpu":
        return fn

    def call(*args: Any) -> Any:
        out = fn(*args)
        synchronize(device)
        return out

    return call


def jitted(fn: Callable[..., Any], *args: Any) -> Call:
    """Return a call of `fn`, jitted by jax, with arrays on its default device."""
    import jax

    fast, arrays = jax.jit(fn), jax.device_put(args)
    return lambda: jax.block_until_ready(fast(*arrays))
