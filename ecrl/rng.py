"""Stateless random numbers: a key is one int64, every draw is a pure function of it.

Made of the words of Philox4x32-10 (`ecrl.philox`), one 32-bit word per element. A key of shape `[*B]` is a batch of
independent keys; draws append their own shape: `uniform(keys, (3,))` is `[*B, 3]`. Use each key once: derive the next
ones with `split` or `fold_in`. The first words of a longer draw are those of a shorter one. Integers, uniforms and
permutations are the same bits eager, compiled, vmapped and on every device; normals agree within 1e-6.
"""

from collections.abc import Sequence
from math import pi, prod

import torch
from torch import Tensor

from ecrl.philox import MASK, philox

START, ENV, ACTION, UPDATE, INIT, EVAL, EVENT = range(7)
"""Streams of a run: episode starts, world noise, sampled actions, minibatches, initial weights, evaluation, events."""

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_DRAW, _SPLIT, _FOLD, _STREAM = range(4)  # fourth counter word, so that draws, splits, folds and streams never meet


def _counter(n: int, device: torch.device) -> Tensor:
    """0 to n - 1. On a bare arange inductor computes in 32-bit indices (pytorch issue 175966); an `&` stops that."""
    return torch.arange(n, device=device) & MASK


def key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """The key of a seed, a 0-d int64 tensor.

    >>> key(3)
    tensor(3)
    """
    return torch.tensor(seed, dtype=torch.int64, device=device)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key from a key and an integer, broadcasting: `[*B]`. Different data give independent keys.

    >>> fold_in(key(0), torch.arange(2)).shape, bool(fold_in(key(0), 1) == fold_in(key(0), torch.arange(2))[1])
    (torch.Size([2]), True)
    """
    data = torch.as_tensor(data, dtype=torch.int64, device=key.device)
    return philox(key, data, torch.full_like(data, _FOLD << 32))[0]


def split(key: Tensor, num: int = 2) -> Tensor:
    """New keys from each key, `num` of them along a new first axis: `[num, *B]`.

    >>> split(key(0), 3).shape
    torch.Size([3])
    """
    index = _counter(num, key.device).reshape(-1, *[1] * key.ndim)
    return philox(key, index, torch.full_like(index, _SPLIT << 32))[0]


def stream(key: Tensor, name: int, index: Tensor, step: Tensor | int) -> Tensor:
    """The key of one stream at one environment and step: a function of (seed, stream, global env index, step) alone.

    `index`, below 2**32, and `step` broadcast, so `[N]` and `[T, 1]` give `[T, N]`.

    >>> few, many = (stream(key(1), ENV, torch.arange(n), 7) for n in (8, 16))
    >>> bool((few == many[:8]).all())
    True
    """
    counted = torch.as_tensor(step, dtype=torch.int64, device=key.device)
    index = index.to(torch.int64)
    return philox(key, counted, (index & MASK) | ((_STREAM + name) << 32))[0]


def _pairs(key: Tensor, n: int) -> Tensor:
    """Words 2i and 2i + 1 of a draw as one int64: `[*B, n]`."""
    block = _counter((n + 1) // 2, key.device)
    halves = philox(key.unsqueeze(-1), block, torch.full_like(block, _DRAW << 32))
    return torch.stack(halves, -1).flatten(-2)[..., :n]


def bits(key: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Independent 32-bit words as int64 in [0, 2**32): `[*B, *shape]`.

    >>> bits(key(0), (4,))[:1].tolist() == bits(key(0), (1,)).tolist()
    True
    """
    n = prod(shape)
    pairs = _pairs(key, (n + 1) // 2)
    words = torch.stack((pairs & MASK, (pairs >> 32) & MASK), -1)
    return words.flatten(-2)[..., :n].reshape((*key.shape, *shape))


def uniform(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform on [0, 1): `[*B, *shape]`, on the `2**-24` grid in float32 and the `2**-53` grid in float64.

    Raises: ValueError for any other dtype; half precision would round up to 1.

    >>> 0.0 <= float(uniform(key(0))) < 1.0
    True
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    if dtype == torch.float64:
        words = bits(key, (*shape, 2))
        return ((words[..., 0] >> 5) * 2**26 + (words[..., 1] >> 6)).to(dtype) * 2.0**-53
    return (bits(key, shape) >> 8).to(dtype) * 2.0**-24


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal `[*B, *shape]`, two per pair of uniforms (Box and Muller 1958).

        z[2i], z[2i+1] = sqrt(-2 log(1 - u[2i])) * (cos, sin)(2 pi u[2i+1])

    >>> normal(key(0), (2, 3)).shape
    torch.Size([2, 3])
    """
    n = prod(shape)
    pairs = uniform(key, ((n + 1) // 2, 2), dtype)
    radius, angle = torch.sqrt(-2.0 * torch.log1p(-pairs[..., 0])), 2.0 * pi * pairs[..., 1]
    both = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), -1)
    return both.flatten(-2)[..., :n].reshape((*key.shape, *shape))


def gumbel(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard Gumbel `[*B, *shape]`: `-log(-log(u))`, u in (0, 1); `argmax(logits + gumbel)` samples a categorical.

    >>> bool(gumbel(key(0), (1000,)).isfinite().all())
    True
    """
    half_step = 2.0**-25 if dtype != torch.float64 else 2.0**-54  # keeps u off 0; u is below 1 by construction
    return -torch.log(-torch.log(uniform(key, shape, dtype).clamp(min=half_step)))


def randint(key: Tensor, shape: Sequence[int] = (), *, low: int | Tensor, high: int | Tensor) -> Tensor:
    """Integers in [low, high): int64 `[*B, *shape]`, by multiply-shift; bias below (high - low) / 2**32.

    `low` and `high` are Python ints or integer tensors that broadcast to the draws. `high - low` is 1 to 2**31. Only
    the values of Python ints are checked.

    Raises: ValueError if a bound is no integer, a Python int is not an int64, or `high - low` of two Python ints is out
        of range.

    >>> sorted(set(randint(key(0), (100,), low=-1, high=2).tolist()))
    [-1, 0, 1]
    """
    for name, bound in (("low", low), ("high", high)):
        if isinstance(bound, Tensor):
            if bound.dtype not in _INTEGERS:
                raise ValueError(f"randint needs an integer {name}, got a tensor of dtype {bound.dtype}")
        elif isinstance(bound, bool) or not isinstance(bound, int | torch.SymInt):
            raise ValueError(f"randint needs an integer {name}, got {name}={bound!r}")
        elif not -(2**63) <= bound < 2**63:
            raise ValueError(f"randint needs {name} within int64, got {name}={bound}")
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and not 1 <= high - low <= 2**31:
        raise ValueError(f"randint needs 1 <= high - low <= 2**31, got low={low}, high={high}")
    return low + ((bits(key, shape) * (high - low)) >> 32)


def categorical(key: Tensor, logits: Tensor) -> Tensor:
    """One index per row, with probability softmax(logits): keys `[*B]` and logits `[*B, K]` give int64 `[*B]`.

    Gumbel-max on logits less their maximum, in float32 for half-precision logits.

    Raises: ValueError if `key` and the rows of `logits` differ in shape; one key for many rows would tie their draws.

    >>> int(categorical(key(0), torch.tensor([-100.0, 0.0])))
    1
    """
    if key.shape != logits.shape[:-1]:
        raise ValueError(f"key has shape {list(key.shape)}, expected {list(logits.shape[:-1])}: one per row of logits")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(dtype)
    return (logits - logits.amax(-1, keepdim=True) + gumbel(key, logits.shape[-1:], dtype)).argmax(-1)


def permutation(key: Tensor, n: int) -> Tensor:
    """A random order of 0 to n - 1: int64 `[*B, n]`, the stable order of n draws of 62 bits.

    The rows are sorted as one, their number in place of the last bits of a draw: whole numbers in one row are
    sorted by radix, which is several times faster.

    >>> sorted(permutation(key(0), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    words, rows = bits(key, (n, 2)), key.numel()
    draws = ((words[..., 0] >> 1) << 31) | (words[..., 1] >> 1)
    taken = (rows - 1).bit_length()
    row = _counter(rows, key.device).reshape(*key.shape, 1)
    order = torch.argsort(((row << (62 - taken)) | (draws >> taken)).flatten(), dim=-1, stable=True)
    return order.reshape(*key.shape, n) - row * n
