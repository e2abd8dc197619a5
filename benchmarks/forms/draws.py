"""A million random numbers, others in every call. Their bits differ between libraries; their moments do not."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.forms.common import Cost, Inputs, Make, awaited, compiled
from benchmarks.turns import Call


def inputs(draws: int) -> Inputs:
    """How many, as an array's length."""
    return {"like": np.zeros(draws, np.float32)}


def cost(draws: int) -> Cost:
    """Written once; Philox's ten rounds are about 120 operations for four words."""
    return Cost(draws * 4, draws * 30)


def _ours(kind: str, given: Inputs, device: str) -> Any:
    from ecrl import rng

    many, draw = len(given["like"]), getattr(rng, kind)

    def fn(key: Tensor) -> tuple[Tensor, Tensor]:
        now, after = rng.split(key).unbind(0)
        return draw(now, (many,)), after

    return fn


def _walking(fn: Any, device: str) -> Call:
    from ecrl import rng

    key = [rng.key(0, device)]

    def call() -> list[Tensor]:
        drawn, key[0] = fn(key[0])
        return [drawn]

    return call


def _torch(draw: Any, given: Inputs, device: str) -> Call:
    many, generator = len(given["like"]), torch.Generator(device).manual_seed(0)
    return awaited(lambda: [draw(many, generator=generator, device=device)], device)


def _jax(kind: str, given: Inputs) -> Call:
    import jax

    many, draw = len(given["like"]), getattr(jax.random, kind)

    @jax.jit
    def fn(key: Any) -> Any:
        now, after = jax.random.split(key)
        return draw(now, (many,)), after

    key = [jax.random.key(0)]

    def call() -> list[Any]:
        drawn, key[0] = jax.block_until_ready(fn(key[0]))
        return [drawn]

    return call


def _forms(kind: str, draw: Any) -> tuple[dict[str, Make], dict[str, Make]]:
    ours: dict[str, Make] = {
        "ecrl compiled": lambda given, device: _walking(compiled(_ours(kind, given, device), device), device),
        "ecrl eager": lambda given, device: _walking(awaited(_ours(kind, given, device), device), device),
    }
    peers: dict[str, Make] = {
        "torch generator": lambda given, device: _torch(draw, given, device),
        "jax jitted": lambda given, device: _jax(kind, given),
    }
    return ours, peers


UNIFORM, NORMAL = _forms("uniform", torch.rand), _forms("normal", torch.randn)
