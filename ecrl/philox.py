"""Philox4x32-10, a random function of a key and a counter, in tensors: Salmon et al. 2011, "Parallel random numbers".

Plain tensors have no unsigned words and no high half of a product, so each round takes some twenty operations on
int64. In a graph that is compiled as a whole a pair of words is one operation, `ecrl::philox`, which a compiler may
write in its own way (`ecrl.compile.cpu_philox`).
"""

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack

from ecrl.tracing_state import in_graph

MASK = 0xFFFFFFFF


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 by 32 bit product with an odd factor, inside int64: compiled C++ may not overflow."""
    product = (word - 2**31) * factor  # too small by factor * 2**31, which is 2**31 modulo 2**32
    return ((product >> 31) + factor) >> 1, (product + 2**31) & MASK


def philox4x32(key: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 on a 64-bit key and four 32-bit counter words; all int64, words in [0, 2**32).

    >>> zero = torch.tensor(0)
    >>> [f"{int(word):08x}" for word in philox4x32(zero, (zero, zero, zero, zero))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & MASK, (key >> 32) & MASK
    for _ in range(10):
        (high0, low0), (high1, low1) = _multiply(c0, 0xD2511F53), _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


@torch.library.custom_op("ecrl::philox", mutates_args=())
def _half(key: Tensor, low: Tensor, high: Tensor, last: bool) -> Tensor:
    return _halves(key, low, high)[last]


@_half.register_fake
def _(key: Tensor, low: Tensor, high: Tensor, last: bool) -> Tensor:
    return key.new_empty(torch.broadcast_shapes(key.shape, low.shape, high.shape))


@_half.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[Tensor, int]:
    *words, last = given
    rank = max(word.ndim - (dim is not None) for word, dim in zip(words, in_dims[:3], strict=True))

    def aligned(word: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return word
        word = word.movedim(dim, 0)
        return word.reshape(len(word), *[1] * (rank + 1 - word.ndim), *word.shape[1:])

    return _half(*map(aligned, words, in_dims[:3]), last), 0


def _halves(key: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    a, b, c, d = philox4x32(key, (low & MASK, (low >> 32) & MASK, high & MASK, (high >> 32) & MASK))
    return a | (b << 32), c | (d << 32)


def _only_vmapped() -> bool:
    return all(transform.key() == TransformType.Vmap for transform in get_interpreter_stack() or ())


def philox(key: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The four words of a key and the two halves of a counter, two in each int64, the lower first; broadcasting.

    >>> zero = torch.tensor(0)
    >>> [f"{int(half) % 2**64:016x}" for half in philox(zero, zero, zero)]
    ['e169c58d6627e8d5', '9b00dbd8bc57ac4c']
    """
    if in_graph() and key.device.type == "cpu" and _only_vmapped():
        return torch.ops.ecrl.philox(key, low, high, False), torch.ops.ecrl.philox(key, low, high, True)
    return _halves(key, low, high)
