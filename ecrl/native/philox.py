"""The random number generator Philox4x32-10 in C++, as an operator of torch for int64 tensors on the CPU."""

from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ecrl.native.library import function

_STRIDES = c_int64 * 6

torch.library.define("ecrl::philox_words", "(Tensor key, Tensor low, Tensor high) -> (Tensor, Tensor)")


def philox_words(key: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 128-bit Philox result for a key and a counter, as the low 64 bits and the high 64 bits.

    Args:
        key, low, high: int64 tensors that broadcast: the key, and the low and the high 64 bits of the counter.

    Returns: two contiguous int64 tensors of the common shape. The operator supports vmap, but no derivatives and no
        other transform.

    >>> zero = torch.tensor(0)
    >>> [f"{int(half) % 2**64:016x}" for half in philox_words(zero, zero, zero)]
    ['e169c58d6627e8d5', '9b00dbd8bc57ac4c']
    """
    return torch.ops.ecrl.philox_words.default(key, low, high)


@cache
def _philox() -> Any:
    return function("philox", "philox", [*[c_void_p] * 5, *[c_int64] * 2, _STRIDES])


def _new(key: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(key.shape, low.shape, high.shape)
    return key.new_empty(shape), key.new_empty(shape)


@torch.library.impl("ecrl::philox_words", "cpu")
def _(key: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    first, last = _new(key, low, high)
    shape = first.shape
    rows, columns = prod(shape[:-1]), prod(shape[-1:])
    inputs = [x.expand(shape).reshape(rows, columns) for x in (key, low, high)]
    strides = _STRIDES(*(stride for x in inputs for stride in x.stride()))
    _philox()(*(x.data_ptr() for x in (*inputs, first, last)), rows, columns, strides)
    return first, last


@torch.library.register_fake("ecrl::philox_words")
def _(key: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    return _new(key, low, high)


def _philox_batched(
    info: Any, in_dims: tuple[int | None, ...], *words: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    return philox_words(*batched(words, in_dims)), (0, 0)


torch.library.register_vmap("ecrl::philox_words", _philox_batched)


def batched(words: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    """Move the axis of vmap to the front of each tensor that has this axis. The other axes still broadcast."""
    rank = max(word.ndim - (dim is not None) for word, dim in zip(words, dims, strict=False))

    def aligned(word: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return word
        word = word.movedim(dim, 0)
        return word.reshape(len(word), *[1] * (rank + 1 - word.ndim), *word.shape[1:])

    return [aligned(word, dim) for word, dim in zip(words, dims, strict=False)]
