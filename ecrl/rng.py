"""Draw random numbers without global state: every draw is a pure function of an int64 key.

A tensor of shape `[*B]` contains a batch of independent keys. A draw appends the requested shape to `[*B]`, so
`uniform(keys, (3,))` has shape `[*B, 3]`. Use each key only once, and derive new keys with `split` or `fold_in`. The
values of a short draw are the first values of a longer draw from the same key, except in `permutation`. Integers,
uniform samples and permutations have the same bits in eager and compiled code, under vmap and on every device. Normal
samples agree within 1e-6.

Philox4x32-10 computes the random bits from a key and a counter (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3"). Philox multiplies unsigned 32-bit words, and needs the high 32 bits of each product. PyTorch has no
operation for these bits, so one round of Philox takes about twenty operations on int64 tensors. On a CPU, C++ code is
faster. Eager code calls the C++ code of `ecrl.native.philox`, if it is available. A graph that `ecrl.compile` compiles
for a CPU has the operator `ecrl::philox`, which computes two words at once in C++ (`ecrl.compile.cpu_philox`).
"""

from collections.abc import Sequence
from math import pi, prod
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ecrl.native.library import is_available
from ecrl.native.philox import batched, philox_words
from ecrl.tracing_state import in_graph, only_vmap_is_active

START, ENV, ACTION, UPDATE, INIT, EVAL, EVENT, DEMO = range(8)
"""Integers that identify the purpose of random numbers in calls of `stream`.

The purposes are, in this order, episode starts, environment noise, actions, minibatches, initial weights, evaluation,
events and demonstrations.
"""

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
# Word 3 of the Philox counter. Each function has its own values, so two functions never return the same numbers.
_DRAW, _SPLIT, _FOLD, _STREAM = range(4)
_WORD = 0xFFFFFFFF


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of the product of a 32-bit word and an odd 32-bit factor.

    No intermediate value may overflow int64, because signed overflow is undefined behaviour in compiled C++.
    """
    # `product` is too small by factor * 2**31. Because the factor is odd, this error is 2**31 modulo 2**32.
    product = (word - 2**31) * factor
    return ((product >> 31) + factor) >> 1, (product + 2**31) & _WORD


def philox4x32(key: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run ten rounds of Philox4x32 on a 64-bit key and four 32-bit counter words.

    All tensors are int64, and every word is in [0, 2**32).

    >>> zero = torch.tensor(0)
    >>> [f"{int(word):08x}" for word in philox4x32(zero, (zero, zero, zero, zero))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    for _ in range(10):
        (high0, low0), (high1, low1) = _multiply(c0, 0xD2511F53), _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


@torch.library.custom_op("ecrl::philox", mutates_args=())
def _philox_pair(key: Tensor, low: Tensor, high: Tensor, last: bool) -> Tensor:
    return (philox_words(key, low, high) if is_available("philox") else _philox_pairs(key, low, high))[last]


@_philox_pair.register_fake
def _(key: Tensor, low: Tensor, high: Tensor, last: bool) -> Tensor:
    return key.new_empty(torch.broadcast_shapes(key.shape, low.shape, high.shape))


@_philox_pair.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    return _philox_pair(*batched(args[:3], in_dims), args[3]), 0


def _philox_pairs(key: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Pack the four words of `philox4x32` into two int64 tensors. The first word of a pair is in the low 32 bits."""
    a, b, c, d = philox4x32(key, (low & _WORD, (low >> 32) & _WORD, high & _WORD, (high >> 32) & _WORD))
    return a | (b << 32), c | (d << 32)


def _philox(key: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the four Philox words of a key and a counter, packed into two int64 tensors.

    The low 32 bits of each tensor contain the first word of a pair. The arguments `low` and `high` are the low and the
    high 64 bits of the counter. All arguments broadcast.

    Raises: ValueError if the key is not int64.

    >>> zero = torch.tensor(0)
    >>> [f"{int(pair) % 2**64:016x}" for pair in _philox(zero, zero, zero)]
    ['e169c58d6627e8d5', '9b00dbd8bc57ac4c']
    """
    if key.dtype != torch.int64:
        raise ValueError(f"a key has dtype {key.dtype}, expected torch.int64: create keys with ecrl.rng.key")
    if key.device.type == "cpu" and only_vmap_is_active() and not torch.compiler.is_exporting():
        if in_graph():
            return torch.ops.ecrl.philox(key, low, high, False), torch.ops.ecrl.philox(key, low, high, True)
        if is_available("philox"):
            return philox_words(key, low, high)
    return _philox_pairs(key, low, high)


def _counter(n: int, device: torch.device) -> Tensor:
    """Return the integers 0 to n - 1. The `&` prevents 32-bit indices in inductor's code (pytorch issue 175966)."""
    return torch.arange(n, device=device) & _WORD


def key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """Create a key from a seed. The key is a 0-d int64 tensor.

    >>> key(3)
    tensor(3)
    """
    return torch.tensor(seed, dtype=torch.int64, device=device)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Derive a new key from a key and the integer `data`.

    The two arguments broadcast to the shape `[*B]` of the result. Different values of `data` give independent keys.

    >>> fold_in(key(0), torch.arange(2)).shape, bool(fold_in(key(0), 1) == fold_in(key(0), torch.arange(2))[1])
    (torch.Size([2]), True)
    """
    data = torch.as_tensor(data, dtype=torch.int64, device=key.device)
    return _philox(key, data, torch.full_like(data, _FOLD << 32))[0]


def split(key: Tensor, num: int = 2) -> Tensor:
    """Derive `num` new keys from each key, stacked along a new first axis. The result has shape `[num, *B]`.

    >>> split(key(0), 3).shape
    torch.Size([3])
    """
    index = _counter(num, key.device).reshape(-1, *[1] * key.ndim)
    return _philox(key, index, torch.full_like(index, _SPLIT << 32))[0]


def stream(key: Tensor, name: int, index: Tensor, step: Tensor | int) -> Tensor:
    """Derive a key for one environment, one step and one purpose of random numbers, such as `ENV`.

    The result depends only on `key`, the purpose `name`, the environment's `index` (below 2**32) and `step`. The
    arguments `index` and `step` broadcast. For example, shapes `[N]` and `[T, 1]` give a result of shape `[T, N]`.

    >>> few, many = (stream(key(1), ENV, torch.arange(n), 7) for n in (8, 16))
    >>> bool((few == many[:8]).all())
    True
    """
    step = torch.as_tensor(step, dtype=torch.int64, device=key.device)
    index = index.to(torch.int64)
    return _philox(key, step, (index & _WORD) | ((_STREAM + name) << 32))[0]


def _interleaved(even: Tensor, odd: Tensor, n: int) -> Tensor:
    """Return the first n of the values `even[..., 0], odd[..., 0], even[..., 1], ...`, of shape `[*B, n]`."""
    # For n = 1, compiled code does not compute the odd values.
    return even if n == 1 else torch.stack((even, odd), -1).flatten(-2)[..., :n]


def _pairs(key: Tensor, n: int) -> Tensor:
    """Draw int64 values of shape `[*B, n]` that pack two random words each. Value i has words 2i and 2i + 1."""
    block = _counter((n + 1) // 2, key.device)
    pairs = _philox(key.unsqueeze(-1), block, torch.full_like(block, _DRAW << 32))
    return _interleaved(*pairs, n)


def bits(key: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Draw independent random 32-bit words of shape `[*B, *shape]`, stored as int64 in [0, 2**32).

    >>> bits(key(0), (4,))[:1].tolist() == bits(key(0), (1,)).tolist()
    True
    """
    n = prod(shape)
    pairs = _pairs(key, (n + 1) // 2)
    return _interleaved(pairs & _WORD, (pairs >> 32) & _WORD, n).reshape((*key.shape, *shape))


def uniform(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw samples of shape `[*B, *shape]` from the uniform distribution on [0, 1).

    The samples are multiples of `2**-24` in float32 and of `2**-53` in float64.

    Raises: ValueError for any other dtype, because half precision would round samples near 1 up to 1.

    >>> 0.0 <= float(uniform(key(0))) < 1.0
    True
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    if dtype == torch.float64:
        words = bits(key, (*shape, 2))
        return ((words[..., 0] >> 5) * 2**26 + (words[..., 1] >> 6)).to(dtype) * 2.0**-53
    return _as_float32(bits(key, shape))


def _as_float32(word: Tensor) -> Tensor:
    return (word >> 8).to(torch.float32) * 2.0**-24


def _even_and_odd_uniform(key: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the values with even and with odd indices of `uniform(key, (2 * n,), dtype)`, each of shape `[*B, n]`."""
    if dtype != torch.float32:
        both = uniform(key, (n, 2), dtype)
        return both[..., 0], both[..., 1]
    # Keep two tensors, because a compiler does not vectorise loops over interleaved values.
    pairs = _pairs(key, n)
    return _as_float32(pairs & _WORD), _as_float32((pairs >> 32) & _WORD)


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw standard normal samples of shape `[*B, *shape]`.

    The Box-Muller transform converts each pair of uniform samples to two normal samples:

        z[2i], z[2i+1] = sqrt(-2 log(1 - u[2i])) * (cos, sin)(2 pi u[2i+1])

    Source: Box and Muller 1958, "A note on the generation of random normal deviates".

    >>> normal(key(0), (2, 3)).shape
    torch.Size([2, 3])
    """
    n = prod(shape)
    even, odd = _even_and_odd_uniform(key, (n + 1) // 2, dtype)
    radius, angle = torch.sqrt(-2.0 * torch.log1p(-even)), 2.0 * pi * odd
    samples = _interleaved(radius * torch.cos(angle), radius * torch.sin(angle), n)
    return samples.reshape((*key.shape, *shape))


def gumbel(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw standard Gumbel samples `-log(-log(u))` of shape `[*B, *shape]`, where u is uniform in (0, 1).

    The index `argmax(logits + gumbel)` is a sample from the categorical distribution with these logits.

    >>> bool(gumbel(key(0), (1000,)).isfinite().all())
    True
    """
    # The minimum of u. No maximum is needed, because u is always below 1.
    half_step = 2.0**-25 if dtype != torch.float64 else 2.0**-54
    return -torch.log(-torch.log(uniform(key, shape, dtype).clamp(min=half_step)))


def randint(key: Tensor, shape: Sequence[int] = (), *, low: int | Tensor, high: int | Tensor) -> Tensor:
    """Draw uniform int64 samples of shape `[*B, *shape]` from [low, high).

    The bounds `low` and `high` are Python or NumPy integers, or integer tensors that broadcast to `[*B, *shape]`. The
    difference `high - low` must be between 1 and 2**31. A sample is `low + (word * (high - low) >> 32)` for a random
    32-bit word. The relative error of the probability of each value is therefore below (high - low) / 2**32.

    Raises: ValueError if a bound is not an integer, if a Python or NumPy bound does not fit in int64, or if
        `high - low` is out of range. This range is checked only if both bounds are Python or NumPy integers.

    >>> sorted(set(randint(key(0), (100,), low=-1, high=2).tolist()))
    [-1, 0, 1]
    """
    low, high = _bound("low", low), _bound("high", high)
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and not 1 <= high - low <= 2**31:
        raise ValueError(f"randint needs 1 <= high - low <= 2**31, got low={low}, high={high}")
    return low + ((bits(key, shape) * (high - low)) >> 32)


def _bound(name: str, bound: Any) -> Any:
    """Convert a bound of `randint` to an int64 tensor or a Python int, because a narrower dtype could overflow."""
    if isinstance(bound, Tensor):
        if bound.dtype not in _INTEGERS:
            raise ValueError(f"randint needs an integer {name}, got a tensor of dtype {bound.dtype}")
        return bound.to(torch.int64)
    if isinstance(bound, torch.SymInt):
        return bound
    if isinstance(bound, bool) or not isinstance(bound, int | Integral):
        raise ValueError(f"randint needs an integer {name}, got {name}={bound!r}")
    if not -(2**63) <= int(bound) < 2**63:
        raise ValueError(f"randint needs {name} within int64, got {name}={bound}")
    return int(bound)


def categorical(key: Tensor, logits: Tensor) -> Tensor:
    """Draw one category index for each key, with probabilities softmax(logits).

    The keys have shape `[*B]`, the logits have shape `[*B, K]`, and the int64 indices have shape `[*B]`. The function
    subtracts the maximum from the logits, adds Gumbel noise, and returns the index of the largest sum. Logits in half
    precision are converted to float32.

    Raises: ValueError if the shape of `key` is not `[*B]`, because distributions with a shared key have equal noise.

    >>> int(categorical(key(0), torch.tensor([-100.0, 0.0])))
    1
    """
    if key.shape != logits.shape[:-1]:
        raise ValueError(f"key has shape {list(key.shape)}, expected {list(logits.shape[:-1])}: one per row of logits")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(dtype)
    return (logits - logits.amax(-1, keepdim=True) + gumbel(key, logits.shape[-1:], dtype)).argmax(-1)


def permutation(key: Tensor, n: int) -> Tensor:
    """Draw a random permutation of 0 to n - 1 for each key, as int64 `[*B, n]`.

    For each key, the function sorts n random 62-bit integers, and returns their order. One sort handles the integers of
    all keys, because torch sorts one long row of integers by radix sort, which is several times faster than its sort of
    many rows. To separate the keys, each integer starts with the bits of its key's index, and drops the same number of
    its last bits.

    >>> sorted(permutation(key(0), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    words, rows = bits(key, (n, 2)), key.numel()
    draws = ((words[..., 0] >> 1) << 31) | (words[..., 1] >> 1)
    row_bits = (rows - 1).bit_length()
    row = _counter(rows, key.device).reshape(*key.shape, 1)
    order = torch.argsort(((row << (62 - row_bits)) | (draws >> row_bits)).flatten(), dim=-1, stable=True)
    return order.reshape(*key.shape, n) - row * n
