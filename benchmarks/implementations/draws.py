"""A million random numbers, new in every call. Their bits differ between libraries; their moments do not."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.alternating_calls import Call
from benchmarks.implementations.common import Cost, Inputs, Make, awaited, compiled


def inputs(draws: int) -> Inputs:
    """Return an array whose length is the number of draws."""
    return {"like": np.zeros(draws, np.float32)}


def cost(draws: int) -> Cost:
    """Return the cost: one write per number, and a quarter of the 120 operations that Philox takes for four words."""
    return Cost(draws * 4, draws * 30)


def _ecrl(kind: str, arrays: Inputs, device: str) -> Any:
    from ecrl import rng

    many, draw = len(arrays["like"]), getattr(rng, kind)

    def fn(key: Tensor) -> tuple[Tensor, Tensor]:
        now, after = rng.split(key).unbind(0)
        return draw(now, (many,)), after

    return fn


def _with_new_keys(fn: Any, device: str) -> Call:
    from ecrl import rng

    key = [rng.key(0, device)]

    def call() -> list[Tensor]:
        drawn, key[0] = fn(key[0])
        return [drawn]

    return call


def _torch(draw: Any, arrays: Inputs, device: str) -> Call:
    many, generator = len(arrays["like"]), torch.Generator(device).manual_seed(0)
    return awaited(lambda: [draw(many, generator=generator, device=device)], device)


def _jax(kind: str, arrays: Inputs) -> Call:
    import jax

    many, draw = len(arrays["like"]), getattr(jax.random, kind)

    @jax.jit
    def fn(key: Any) -> Any:
        now, after = jax.random.split(key)
        return draw(now, (many,)), after

    key = [jax.random.key(0)]

    def call() -> list[Any]:
        drawn, key[0] = jax.block_until_ready(fn(key[0]))
        return [drawn]

    return call


def _implementations(kind: str, draw: Any) -> tuple[dict[str, Make], dict[str, Make]]:
    ecrl: dict[str, Make] = {
        "ecrl compiled": lambda arrays, device: _with_new_keys(compiled(_ecrl(kind, arrays, device), device), device),
        "ecrl eager": lambda arrays, device: _with_new_keys(awaited(_ecrl(kind, arrays, device), device), device),
    }
    others: dict[str, Make] = {
        "torch generator": lambda arrays, device: _torch(draw, arrays, device),
        "jax jitted": lambda arrays, device: _jax(kind, arrays),
    }
    return ecrl, others


UNIFORM, NORMAL = _implementations("uniform", torch.rand), _implementations("normal", torch.randn)
