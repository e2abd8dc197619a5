"""Counter-based random numbers: bits against a plain Philox, distributions, and independence of keys."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, close

from ecrl import rng
from ecrl.compile.jit import choose_form
from ecrl.compile.trace import traced
from ecrl.pytree import flatten
from ecrl.rng import philox4x32

F32, F64 = torch.float32, torch.float64
M = 0xFFFFFFFF
INT64 = st.integers(-(2**63), 2**63 - 1)
KEYS = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]
N = 100_000
SIGMAS = 5.0


def signed(word):
    return word - 2**64 if word >= 2**63 else word


# The oracle: Salmon et al. 2011 in Python integers of any size. The last counter word: 0 draws, 1 splits, 2 folds.


def philox(key, counter):
    k, c = [key & M, key >> 32 & M], list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & M, a >> 32 ^ c[3] ^ k[1], a & M]
        k = [(k[0] + 0x9E3779B9) & M, (k[1] + 0xBB67AE85) & M]
    return c


def new_key(key, low, high, domain, third=0):
    a, b, _, _ = philox(key, (low, high, third, domain))
    return signed(a | b << 32)


def folded(key, data):
    return new_key(key, data & M, data >> 32 & M, 2)


def streamed(key, name, index, step):
    return new_key(key, step & M, step >> 32 & M, 3 + name, third=index)


def words(key, n):
    return [philox(key, (i // 4, 0, 0, 0))[i % 4] for i in range(n)]


def uniforms(key, n):
    return [w // 2**8 / 2**24 for w in words(key, n)]


def doubles(key, n):
    w = words(key, 2 * n)
    return [(w[2 * i] // 2**5 * 2**26 + w[2 * i + 1] // 2**6) / 2**53 for i in range(n)]


def integers(key, n, low, high):
    return [low + w * (high - low) // 2**32 for w in words(key, n)]


def order(key, n):
    w = words(key, 2 * n)
    return sorted(range(n), key=lambda i: (w[2 * i] // 2 * 2**31 + w[2 * i + 1] // 2, i))


def normals(key, n, uniform):
    u, out = uniform(key, n + n % 2), []
    for a, b in zip(u[::2], u[1::2], strict=True):
        r = math.sqrt(-2.0 * math.log1p(-a))
        out += [r * math.cos(2.0 * math.pi * b), r * math.sin(2.0 * math.pi * b)]
    return out[:n]


def gumbels(key, n, uniform, half_step):
    return [-math.log(-math.log(max(u, half_step))) for u in uniform(key, n)]


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [  # the known-answer vectors of Random123, file kat_vectors, philox4x32 10
        (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (-1, (M, M, M, M), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            0x299F31D0_A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_published_vectors(variant, key, counter, expected):
    out = variant(philox4x32)(torch.tensor(key), tuple(map(torch.tensor, counter)))
    assert [f"{int(word):08x}" for word in out] == expected.split()
    assert [f"{word:08x}" for word in philox(key, counter)] == expected.split()  # the oracle too


EXACT = {
    "bits": (rng.bits, ((5,),), {}, lambda k: words(k, 5)),
    "bits_scalar": (rng.bits, (), {}, lambda k: words(k, 1)[0]),
    "uniform_f32": (rng.uniform, ((5,),), {}, lambda k: uniforms(k, 5)),
    "uniform_f64": (rng.uniform, ((5,), F64), {}, lambda k: doubles(k, 5)),
    "randint": (rng.randint, ((5,),), {"low": -3, "high": 4}, lambda k: integers(k, 5, -3, 4)),
    "randint_widest": (rng.randint, ((5,),), {"low": 0, "high": 2**31}, lambda k: integers(k, 5, 0, 2**31)),
    "permutation": (rng.permutation, (9,), {}, lambda k: order(k, 9)),
    "fold_in": (rng.fold_in, (-7,), {}, lambda k: folded(k, -7)),
    "stream": (rng.stream, (rng.ACTION, torch.tensor(3), 5), {}, lambda k: streamed(k, 2, 3, 5)),
}


@pytest.mark.parametrize("name", EXACT)
def test_bit_for_bit(variant, name):
    fn, args, kwargs, oracle = EXACT[name]
    assert variant(fn)(torch.tensor(KEYS), *args, **kwargs).tolist() == [oracle(key) for key in KEYS]


def test_split_bit_for_bit(variant):
    expected = [[new_key(key, i, 0, 1) for key in KEYS] for i in range(3)]
    assert variant(rng.split)(torch.tensor(KEYS), 3).tolist() == expected


@pytest.mark.parametrize("fn", [rng.bits, rng.permutation])
def test_many_keys_bit_for_bit(variant, fn):
    # compiled C++ may not overflow int64: products that did were wrong for a third of the keys, and only with many keys
    keys, size = rng.split(rng.key(0), 300), (9,) if fn is rng.bits else 9
    assert torch.equal(variant(fn)(keys, size), fn(keys, size))


def _everything(keys, many):
    exact = [fn(keys, *args, **kwargs) for fn, args, kwargs, _ in EXACT.values()]
    return (
        *exact,
        rng.split(keys, 3),
        rng.stream(keys, rng.ENV, keys, keys),
        rng.bits(many, (9,)),
        rng.normal(many, (5,)),
    )


@pytest.mark.slow
def test_a_compiled_run_draws_the_same_bits():
    """In inductor's graphs, Philox is one operation with its own C++ code."""
    keys, many = torch.tensor(KEYS), rng.split(rng.key(0), 300)
    out, expected = choose_form("on", "cpu").jit(_everything)(keys, many), _everything(keys, many)
    graph, _ = traced(_everything, *reversed(flatten((keys, many))))
    assert sum(node.target is torch.ops.ecrl.philox.default for node in graph.graph.nodes) > len(EXACT)
    assert all(map(torch.equal, out[:-1], expected[:-1]))
    close(out[-1], expected[-1], 1e-6)
    assert [x.tolist() for x in out[: len(EXACT)]] == [[oracle(key) for key in KEYS] for *_, oracle in EXACT.values()]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [1, 3, 8, 11, 64])
def test_a_compiled_run_draws_the_same_bits_for_any_number_of_keys(keys):
    """Vector instructions compute several draws at once; the last ones may be fewer."""
    many = rng.split(rng.key(-5), keys)

    def draw(many):
        number = torch.arange(keys) - 2
        bits = [rng.bits(many, (n,)) for n in (1, 2, 7)]
        normals = [rng.normal(many, (n,)) for n in (1, 2, 3)]
        return rng.fold_in(many, number), rng.stream(many[0], rng.ENV, number + 2, 2**40 + number), *bits, *normals

    out, expected = choose_form("on", "cpu").jit(draw)(many), draw(many)
    assert all(map(torch.equal, out[:5], expected[:5]))
    for mine, right in zip(out[5:], expected[5:], strict=True):
        close(mine, right, 1e-6)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_a_short_draw_is_the_start_of_a_long_one(dtype, n):
    keys = rng.split(rng.key(2), 5)
    for draw in (rng.uniform, rng.normal):
        assert torch.equal(draw(keys, (n,), dtype), draw(keys, (9,), dtype)[:, :n])
    assert torch.equal(rng.bits(keys, (n,)), rng.bits(keys, (9,))[:, :n])


# float32: the angle 2 pi u is rounded by up to 2.4e-7, times a radius of up to 5.8; a Gumbel of up to 16.6 by 2 ulp.
@pytest.mark.parametrize(
    ("fn", "dtype", "tol", "oracle"),
    [
        (rng.normal, F32, 2e-6, lambda k: normals(k, 5, uniforms)),
        (rng.normal, F64, 1e-14, lambda k: normals(k, 5, doubles)),
        (rng.gumbel, F32, 2e-6, lambda k: gumbels(k, 5, uniforms, 2.0**-25)),
        (rng.gumbel, F64, 1e-14, lambda k: gumbels(k, 5, doubles, 2.0**-54)),
    ],
)
def test_transformed_draws(variant, fn, dtype, tol, oracle):
    out = variant(fn)(torch.tensor(KEYS), (5,), dtype)
    assert out.dtype == dtype
    close(out, torch.tensor([oracle(key) for key in KEYS], dtype=F64), tol)


@pytest.mark.parametrize("fn", [rng.normal, rng.gumbel])
def test_transformed_draws_agree_between_variants(variant, fn):
    close(variant(fn)(rng.key(0), (4096,)), fn(rng.key(0), (4096,)), 1e-6)  # the module's promise


DRAWS = {
    "bits": rng.bits,
    "uniform": rng.uniform,
    "uniform_f64": lambda key, shape: rng.uniform(key, shape, F64),
    "normal": rng.normal,
    "gumbel": rng.gumbel,
    "randint": lambda key, shape: rng.randint(key, shape, low=-5, high=1000),
}


@pytest.mark.parametrize("name", DRAWS)
def test_prefix(name):
    longest = DRAWS[name](rng.key(4), (11,))
    for n in range(11):
        assert torch.equal(DRAWS[name](rng.key(4), (n,)), longest[:n])


@pytest.mark.parametrize("name", DRAWS)
def test_batched_keys_are_single_keys(name):
    keys = rng.split(rng.key(1), 6).reshape(2, 3)
    batch = DRAWS[name](keys, (2, 5))
    assert batch.shape == (2, 3, 2, 5)
    assert torch.equal(batch, torch.stack([torch.stack([DRAWS[name](k, (2, 5)) for k in row]) for row in keys]))
    assert DRAWS[name](keys[:0], (2,)).shape == (0, 3, 2)


def test_batched_permutation_and_categorical_are_single():
    keys, logits = rng.split(rng.key(1), 6), torch.linspace(-1.0, 1.0, 24).reshape(6, 4)
    assert torch.equal(rng.permutation(keys, 7), torch.stack([rng.permutation(k, 7) for k in keys]))
    one_by_one = [rng.categorical(k, row) for k, row in zip(keys, logits, strict=True)]
    assert torch.equal(rng.categorical(keys, logits), torch.stack(one_by_one))


@pytest.mark.parametrize("name", DRAWS)
def test_number_of_threads_does_not_matter(name):
    one = DRAWS[name](rng.key(3), (N,))  # large enough to be cut between threads
    try:
        torch.set_num_threads(2)
        two = DRAWS[name](rng.key(3), (N,))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one, two)


@given(INT64, INT64)
def test_any_key_any_data(key, data):
    assert rng.bits(rng.key(key), (5,)).tolist() == words(key, 5)
    assert (
        int(rng.fold_in(rng.key(key), data)) == int(rng.fold_in(rng.key(key), torch.tensor(data))) == folded(key, data)
    )


@given(INT64, st.integers(1, 2**31), st.integers(-(2**40), 2**40))
def test_randint_stays_inside(key, width, low):
    out = rng.randint(rng.key(key), (64,), low=low, high=low + width)
    assert low <= int(out.min()) and int(out.max()) < low + width
    assert torch.equal(out, rng.randint(rng.key(key), (64,), low=torch.tensor(low), high=torch.tensor(low + width)))


@pytest.mark.parametrize(("low", "high"), [(0, 0), (1, 0), (0, 2**31 + 1)])
def test_randint_refuses(low, high):
    with pytest.raises(ValueError, match=f"low={low}, high={high}"):
        rng.randint(rng.key(0), low=low, high=high)


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (0, 2**63, "high within int64, got high=9223372036854775808"),
        (-(2**63) - 1, 0, "low within int64, got low=-9223372036854775809"),
        (False, True, "an integer low, got low=False"),
        (0, True, "an integer high, got high=True"),
        (0, 2.0, "an integer high, got high=2.0"),
        (0.5, 2, "an integer low, got low=0.5"),
        (None, 2, "an integer low, got low=None"),
        (0, torch.tensor(2.0), "an integer high, got a tensor of dtype torch.float32"),
        (torch.tensor(False), 2, "an integer low, got a tensor of dtype torch.bool"),
        (torch.tensor(0), 2**63, "high within int64"),
    ],
)
def test_randint_refuses_what_is_no_int64(low, high, message):
    with pytest.raises(ValueError, match=f"randint needs {message}"):
        rng.randint(rng.key(0), low=low, high=high)


@pytest.mark.parametrize(("low", "high"), [(-(2**63), 2 - 2**63), (2**63 - 3, 2**63 - 1)])
def test_randint_reaches_the_ends_of_int64(low, high):
    assert sorted(set(rng.randint(rng.key(0), (64,), low=low, high=high).tolist())) == [low, low + 1]


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (torch.int8, -100, 100),
        (torch.uint8, 0, 255),
        (torch.int16, -30000, 30000),
        (torch.int32, -(2**30), 2**30),
        (torch.int64, -5, 5),
    ],
)
def test_randint_of_narrow_bounds_does_not_overflow(dtype, low, high):
    expected = rng.randint(rng.key(0), (64,), low=low, high=high)
    bounds = torch.tensor(low, dtype=dtype), torch.tensor(high, dtype=dtype)
    numpy_type = getattr(np, str(dtype).removeprefix("torch."))
    for first, last in (bounds, (low, bounds[1]), (bounds[0], high), (numpy_type(low), numpy_type(high))):
        actual = rng.randint(rng.key(0), (64,), low=first, high=last)
        assert actual.dtype == torch.int64 and torch.equal(actual, expected)


def test_randint_refuses_numbers_of_numpy_out_of_range():
    with pytest.raises(ValueError, match="high - low <= 2\\*\\*31, got low=5, high=5"):
        rng.randint(rng.key(0), low=np.int8(5), high=np.int8(5))
    with pytest.raises(ValueError, match="an integer high, got high="):
        rng.randint(rng.key(0), low=0, high=np.float32(5.0))


@pytest.mark.parametrize("offset", [1e8, -1e8, 1e30, 3e38])
def test_categorical_of_large_logits(offset):
    """Float32 cannot add noise to such large logits: equal ones are equally likely, a smaller one is never drawn."""
    logits = torch.tensor([offset, offset, offset - abs(offset) / 16, offset])
    index = rng.categorical(rng.split(rng.key(0), N), logits.expand(N, 4))
    assert not (index == 2).any()
    assert_frequencies(index.clamp(max=2), torch.full((3,), 1 / 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    with pytest.raises(ValueError, match="dtype"):
        rng.uniform(rng.key(0), (), dtype)
    # categorical compares in float32: were the noise rounded to 8 bits, ties would favour the first index
    logits = torch.zeros(N, 4, dtype=dtype)
    assert_frequencies(rng.categorical(rng.split(rng.key(0), N), logits), torch.full((4,), 0.25))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32])
@pytest.mark.parametrize("name", ["bits", "split", "fold_in", "stream"])
def test_keys_of_another_dtype_are_refused(name, dtype):
    args = {"fold_in": (1,), "stream": (rng.ENV, torch.arange(1), 0)}.get(name, ())
    with pytest.raises(ValueError, match=f"^a key has dtype {dtype}, expected torch.int64: create keys with ecrl"):
        getattr(rng, name)(torch.zeros(1, dtype=dtype), *args)


def test_categorical_needs_a_key_per_row():
    with pytest.raises(ValueError, match=r"key has shape \[\], expected \[5\]"):
        rng.categorical(rng.key(0), torch.zeros(5, 3))


@pytest.mark.parametrize("dtype", [F32, F64])
def test_extreme_words(monkeypatch, dtype):
    monkeypatch.setattr(rng, "_pairs", lambda key, n: torch.full((n,), -1))
    assert rng.uniform(rng.key(0), (2,), dtype).tolist() == [1.0 - (2.0**-24 if dtype == F32 else 2.0**-53)] * 2
    assert rng.normal(rng.key(0), (2,), dtype).isfinite().all() and rng.gumbel(rng.key(0), (2,), dtype).isfinite().all()
    assert rng.randint(rng.key(0), (1,), low=0, high=2**31).tolist() == [2**31 - 1]
    monkeypatch.setattr(rng, "_pairs", lambda key, n: torch.zeros(n, dtype=torch.int64))
    assert rng.uniform(rng.key(0), (2,), dtype).tolist() == rng.normal(rng.key(0), (2,), dtype).tolist() == [0.0, 0.0]
    assert rng.gumbel(rng.key(0), (2,), dtype).isfinite().all()


# Statistics, with bounds of five standard errors. The sources show that no way of getting keys spoils the draws.

SOURCES = {
    "one_key": lambda fn: fn(rng.key(0), (N,)),
    "neighbouring_keys": lambda fn: fn(torch.arange(N)),
    "split": lambda fn: fn(rng.split(rng.key(0), N)),
    "fold_in": lambda fn: fn(rng.fold_in(rng.key(0), torch.arange(N))),
    "steps": lambda fn: fn(rng.stream(rng.key(0), rng.ENV, torch.arange(100), torch.arange(N // 100)[:, None])),
}
LAWS = {  # mean, variance, kurtosis, distribution function
    "uniform": (rng.uniform, 0.5, 1 / 12, 1.8, lambda x: x),
    "normal": (rng.normal, 0.0, 1.0, 3.0, torch.special.ndtr),
    "gumbel": (rng.gumbel, 0.5772156649, math.pi**2 / 6, 5.4, lambda x: torch.exp(-torch.exp(-x))),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("source", SOURCES)
def test_distribution(source, law):
    fn, mean, variance, kurtosis, cdf = LAWS[law]
    x = SOURCES[source](fn).double().flatten().sort().values
    assert abs(float(x.mean()) - mean) < SIGMAS * math.sqrt(variance / N)
    assert abs(float(((x - mean) ** 2).mean()) - variance) < SIGMAS * variance * math.sqrt((kurtosis - 1) / N)
    gap = (cdf(x) - (torch.arange(N) + 0.5) / N).abs().max()
    # Kolmogorov: P(sqrt(n) D > 2.74) = 2 exp(-2 * 2.74^2) = 6e-7, five sigma
    assert math.sqrt(N) * float(gap) < 2.74


def assert_frequencies(index, p):
    """Pearson's chi-square below its five-sigma bound (Wilson and Hilferty 1931)."""
    counts, expected = torch.bincount(index.flatten(), minlength=len(p)).double(), p.double() * index.numel()
    dof = len(p) - 1
    bound = dof * (1 - 2 / (9 * dof) + SIGMAS * math.sqrt(2 / (9 * dof))) ** 3
    assert len(counts) == len(p) and float(((counts - expected) ** 2 / expected).sum()) < bound


@pytest.mark.parametrize("source", SOURCES)
def test_frequencies(source):
    draw = lambda key, shape=(): rng.randint(key, shape, low=0, high=7)  # noqa: E731
    assert_frequencies(SOURCES[source](draw), torch.full((7,), 1 / 7))
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -3.0])
    keys = rng.split(SOURCES[source](rng.bits).flatten(), 1)[0]
    assert_frequencies(rng.categorical(keys, logits.expand(N, 5)), logits.softmax(-1))


def test_permutations_are_uniform():
    orders = rng.permutation(rng.split(rng.key(2), 24_000), 4)
    assert torch.equal(orders.sort(-1).values, torch.arange(4).expand(24_000, 4))
    _, index = torch.unique(orders @ torch.tensor([64, 16, 4, 1]), return_inverse=True)
    assert_frequencies(index, torch.full((24,), 1 / 24))


def correlation(a, b):
    return float(torch.corrcoef(torch.stack((a.double().flatten(), b.double().flatten())))[0, 1])


def test_neighbours_are_uncorrelated():
    index = torch.arange(N)
    key_of = lambda name=rng.ENV, i=0, t=0: rng.stream(rng.key(0), name, index + i, t)  # noqa: E731
    for other in (key_of(name=rng.ACTION), key_of(i=1), key_of(t=1), rng.split(key_of())[0], rng.fold_in(key_of(), 0)):
        assert abs(correlation(rng.uniform(key_of()), rng.uniform(other))) < SIGMAS / math.sqrt(N)
        assert abs(correlation(rng.normal(key_of()) ** 2, rng.normal(other) ** 2)) < SIGMAS / math.sqrt(N)
    assert abs(correlation(rng.uniform(index), rng.uniform(index + 1))) < SIGMAS / math.sqrt(N)
    x = rng.normal(rng.key(0), (N + 1,))  # both halves of a Box-Muller pair, and neighbouring pairs
    for y in (x, x**2, x.abs()):
        assert abs(correlation(y[1:], y[:-1])) < SIGMAS / math.sqrt(N)


def test_keys_do_not_collide():
    base = torch.tensor([0, 1, 2**32, -1])
    blocks = rng.bits(base, (1000, 2))  # a draw read as keys
    made = [
        base,
        rng.split(base, 1000),
        rng.fold_in(base, torch.arange(-500, 500)[:, None]),
        rng.fold_in(rng.split(base)[0], torch.arange(1000)[:, None]),
        rng.split(rng.split(base)[0], 1000),
        blocks[..., 0] | blocks[..., 1] << 32,
    ]
    keys = torch.cat([m.flatten() for m in made])
    assert keys.unique().numel() == keys.numel() == 4 + 5 * 4000


def test_fold_in_distinguishes_large_and_negative_data():
    data = torch.tensor([0, 1, -1, 2**32 - 1, 2**32, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63)])
    keys = rng.fold_in(rng.key(0), data)
    assert keys.unique().numel() == len(data)
    assert keys.tolist() == [folded(0, int(d)) for d in data]


def test_an_index_of_32_bits_gives_the_same_stream():
    index = torch.arange(5)
    assert torch.equal(rng.stream(rng.key(1), rng.ENV, index.int(), 7), rng.stream(rng.key(1), rng.ENV, index, 7))


def test_streams_do_not_depend_on_the_number_of_envs():
    steps, key = torch.arange(50)[:, None], rng.key(7)
    few, many = (torch.stack([rng.stream(key, s, torch.arange(n), steps) for s in range(6)]) for n in (8, 16))
    assert torch.equal(few, many[..., :8])
    assert many.unique().numel() == 6 * 50 * 16  # stream, step and env all change the key
    assert not torch.isin(rng.stream(rng.key(8), rng.ENV, torch.arange(16), steps), many).any()


def test_global_generator_is_untouched():
    before = torch.get_rng_state()
    key = rng.key(5)
    for draw in DRAWS.values():
        draw(key, (8,))
    rng.permutation(rng.split(key), 4), rng.categorical(key, torch.zeros(3)), rng.stream(key, 0, torch.arange(2), 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("fn", "first", "second", "kwargs"),
    [
        (rng.bits, (0, (3,)), (-1, (3,)), {}),
        (rng.normal, (0, (3,)), (-1, (3,)), {}),
        (rng.permutation, (0, 3), (9, 3), {}),
        (rng.fold_in, (0, torch.tensor(0)), (1, torch.tensor(-5)), {}),
        (rng.categorical, (0, torch.zeros(3)), (1, torch.ones(3)), {}),
        (rng.randint, (0, (3,)), (9, (3,)), {"low": torch.tensor(0), "high": torch.tensor(4)}),
    ],
)
def test_new_keys_do_not_retrace(fn, first, second, kwargs):
    assert_no_retrace(fn, (rng.key(first[0]), *first[1:]), (rng.key(second[0]), *second[1:]), **kwargs)
