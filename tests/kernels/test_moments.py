"""Running moments: updates, merges, normalisation and standardisation."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, close
from tensordict import TensorDict

from ecrl import rng
from ecrl.kernels import moments_init, moments_merge, moments_update, moments_variance, normalize, scale

T, F, NAN = True, False, float("nan")
F64 = torch.float64


def moments_of(count, mean, m2):
    values = {"count": count, "mean": mean, "m2": m2}
    return TensorDict({key: torch.as_tensor(value, dtype=F64) for key, value in values.items()}, [])


def everything(*mask_shape):
    return torch.ones(mask_shape, dtype=torch.bool)


def test_update_by_hand(variant):
    # so far 2 samples with mean 1 and m2 2 (0 and 2); the batch counts 3 and 7: mean 5, m2 8
    # d = 4: mean = 1 + 4 * 2 / 4 = 3, m2 = 2 + 8 + 16 * 2 * 2 / 4 = 26, variance 26 / 4
    out = variant(moments_update)(
        moments_of(2.0, [1.0], [2.0]), torch.tensor([[3.0], [NAN], [7.0]]), torch.tensor([T, F, T])
    )
    assert {key: value.tolist() for key, value in out.items()} == {"count": 4.0, "mean": [3.0], "m2": [26.0]}
    close(variant(moments_variance)(out), [6.5])
    assert all(value.dtype == F64 for value in out.values())


def test_merge_by_hand(variant):
    # 3 samples of mean 0, 1 of mean 4: d = 4, mean = 4 * 1 / 4 = 1, m2 = 6 + 0 + 16 * 3 * 1 / 4 = 18
    out = variant(moments_merge)(moments_of(3.0, 0.0, 6.0), moments_of(1.0, 4.0, 0.0))
    assert {key: float(value) for key, value in out.items()} == {"count": 4.0, "mean": 1.0, "m2": 18.0}


def test_normalize_by_hand(variant):
    # mean 1, variance 8 / 2 = 4, scale 1 / sqrt(4 + 5) = 1/3: 6 / 3 = 2; 99 / 3 and -14 / 3 are clipped; 0
    out = variant(normalize)(torch.tensor([7.0, 100.0, -13.0, 1.0]), moments_of(2.0, 1.0, 8.0), eps=5.0, clip=3.0)
    close(out, [2.0, 3.0, -3.0, 0.0], 1e-6)


def test_scale_by_hand(variant):
    # variance 8 / 2 = 4, divisor sqrt(4 + 5) = 3, the mean of 1 stays in: 7 / 3; 100 / 3 and -13 / 3 are clipped; 1 / 3
    out = variant(scale)(torch.tensor([7.0, 100.0, -13.0, 1.0]), moments_of(2.0, 1.0, 8.0), eps=5.0, clip=3.0)
    close(out, [7 / 3, 3.0, -3.0, 1 / 3], 1e-6)
    per_element = variant(scale)(torch.tensor([[6.0, 6.0]]), moments_of(4.0, [9.0, 9.0], [16.0, 36.0]), eps=0.0, clip=9)
    close(per_element, [[3.0, 2.0]], 1e-6)


def test_no_samples(variant):
    none, some = moments_init((2,)), moments_of(2.0, [1.0, 2.0], [3.0, 0.0])
    for a, b, expected in ((none, some, some), (some, none, some), (none, none, none)):
        out = variant(moments_merge)(a, b)
        assert all(torch.equal(out[key], value) for key, value in expected.items())
    empty_batch = variant(moments_update)(some, torch.full((3, 2), NAN), ~everything(3))
    assert all(torch.equal(empty_batch[key], value) for key, value in some.items())
    close(variant(moments_variance)(none), [1.0, 1.0])
    close(variant(moments_variance)(some), [1.5, 0.0])
    close(variant(normalize)(torch.tensor([[5.0, -0.5]]), none, eps=0.0, clip=3.0), [[3.0, -0.5]])


def one_pass(x, mask):
    """Mean and sum of squared deviations by two plain loops."""
    rows = [row for row, counts in zip(x, mask, strict=True) if counts]
    mean = sum(rows) / len(rows)
    return len(rows), mean, sum((row - mean) ** 2 for row in rows)


def test_oracle(variant):
    x, mask = 3.0 * rng.normal(rng.key(0), (4, 25, 3), F64) + 5.0, rng.uniform(rng.key(1), (4, 25)) < 0.7
    count, mean, m2 = one_pass(x.reshape(-1, 3).numpy(), mask.flatten().numpy())
    out = variant(moments_update)(moments_init((3,)), x.masked_fill(~mask[..., None], NAN), mask)
    assert float(out["count"]) == count
    close(out["mean"], torch.tensor(mean), 1e-13)
    close(out["m2"], torch.tensor(m2), 1e-12)
    close(variant(moments_variance)(out), torch.tensor(m2 / count), 1e-13)


def test_scale_oracle(variant):
    x, moments = 3.0 * rng.normal(rng.key(3), (5, 4, 2), F64), moments_of(7.0, [3.0, -5.0], [21.0, 0.7])
    expected = np.clip(x.numpy() / np.sqrt(np.array([3.0, 0.1]) + 1e-2), -4.0, 4.0)
    assert (abs(expected) == 4.0).any()
    close(variant(scale)(x, moments, eps=1e-2, clip=4.0), torch.tensor(expected), 1e-12)


@pytest.mark.ref
def test_scale_divides_as_gymnasium():
    """The division of its `NormalizeReward`, at statistics that are held; it knows no `clip`."""
    wrapper = pytest.importorskip("gymnasium").wrappers.vector.NormalizeReward
    fake_wrapper = SimpleNamespace(
        _update_running_mean=False, return_rms=SimpleNamespace(mean=2.0, var=5.5), epsilon=1e-3
    )
    x = rng.normal(rng.key(0), (50,), F64)
    expected = torch.tensor(wrapper.normalize(fake_wrapper, x.numpy()))
    close(scale(x, moments_of(8.0, 2.0, 44.0), eps=1e-3, clip=100.0), expected, 1e-12)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9), st.floats(0.1, 10.0))
def test_scale_is_odd_and_has_no_units(samples, unit):
    x = torch.tensor(samples, dtype=F64)
    moments, bigger = moments_of(5.0, 3.0, 20.0), moments_of(5.0, 3.0 * unit, 20.0 * unit**2)
    out = scale(x, moments, eps=0.0, clip=10.0)
    assert torch.equal(scale(-x, moments, eps=0.0, clip=10.0), -out)
    close(scale(unit * x, bigger, eps=0.0, clip=10.0), out, 1e-10)
    assert float(out.abs().max()) <= 10.0


SAMPLES = st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=40)


@given(SAMPLES, st.lists(st.integers(0, 40), max_size=5), st.booleans())
def test_any_split_gives_the_whole(samples, cuts, one_by_one):
    x = torch.tensor(samples, dtype=F64)
    parts = x.tensor_split(sorted(min(cut, len(x)) for cut in cuts))
    if one_by_one:
        out = moments_init(())
        for part in parts:
            out = moments_update(out, part, everything(len(part)))
    else:
        made = [moments_update(moments_init(()), part, everything(len(part))) for part in parts]
        while len(made) > 1:  # from the last to the first
            made.append(moments_merge(made.pop(), made.pop()))
        (out,) = made
    assert float(out["count"]) == len(samples)
    np.testing.assert_allclose(float(out["mean"]), np.mean(samples), rtol=1e-12, atol=1e-8)
    # the deviations are good to 1e-16 of the values, not of themselves
    np.testing.assert_allclose(float(moments_variance(out)), np.var(samples), rtol=1e-10, atol=1e-8)


@given(SAMPLES, st.floats(-100.0, 100.0), st.floats(0.1, 10.0))
def test_shift_and_scale(samples, shift, scale):
    x = torch.tensor(samples, dtype=F64)
    plain, moved = (moments_update(moments_init(()), y, everything(len(x))) for y in (x, scale * x + shift))
    close(moved["mean"], scale * plain["mean"] + shift, 1e-10)
    np.testing.assert_allclose(float(moved["m2"]), scale**2 * float(plain["m2"]), rtol=1e-9, atol=1e-5)


def test_a_billion_samples():
    # blocks of 1e6 at mean 1e4 and std 0.1, where E[x^2] - E[x]^2 in float64 is off by 1e-6 and float32 sees nothing
    block = 1e4 + 0.1 * rng.normal(rng.key(0), (10**6,), F64)
    one = moments_update(moments_init(()), block, everything(10**6))
    out = one
    for _ in range(1049):
        out = moments_merge(out, one)
    assert float(out["count"]) == 1.05e9
    exact = float((block - block.mean()).square().mean())
    assert abs(float(moments_variance(out)) / exact - 1.0) < 1e-9
    assert abs(float(out["mean"]) / float(block.mean()) - 1.0) < 1e-13


def test_a_small_batch_after_a_billion():
    n, batch = 1e9, torch.tensor([1e4 + 3.0, 1e4 - 1.0], dtype=F64)
    out = moments_update(moments_of(n, 1e4, 0.01 * n), batch, everything(2))
    assert float(out["count"]) == n + 2
    # d = 1: the mean moves by 2 / (n + 2), m2 grows by 8 + 1 * 2 n / (n + 2); each kept to the last digits of float64
    np.testing.assert_allclose(float(out["mean"]) - 1e4, 2.0 / (n + 2), atol=1e-12)
    np.testing.assert_allclose(float(out["m2"]) - 0.01 * n, 8.0 + 2.0 * n / (n + 2), atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_input(dtype):
    x = rng.normal(rng.key(0), (1000,)).to(dtype)
    out = moments_update(moments_init(()), x, everything(1000))
    np.testing.assert_allclose(float(moments_variance(out)), np.var(x.double().numpy()), rtol=1e-12)
    scaled = normalize(x, out, eps=1e-8, clip=5.0)
    assert scaled.dtype == dtype
    close(scaled.double().std(correction=0), 1.0, 1e-2)


def test_hyperparameters_keep_the_dtype_of_x():
    eps, clip, moments = torch.tensor(1e-8, dtype=F64), torch.tensor([3.0, 9.0], dtype=F64), moments_of(2.0, 0.0, 2.0)
    assert normalize(torch.tensor(1.0), moments, eps=eps, clip=clip[0]).dtype == torch.float32
    swept = torch.vmap(lambda c: normalize(torch.tensor([5.0, -50.0]), moments, eps=eps, clip=c))(clip)
    assert swept.dtype == torch.float32
    close(swept, [[3.0, -3.0], [5.0, -9.0]])


def test_gradients():
    x, moments = rng.normal(rng.key(0), (4, 2), F64).requires_grad_(), moments_of(3.0, [0.5, -1.0], [3.0, 6.0])
    assert torch.autograd.gradcheck(lambda y: normalize(y, moments, eps=0.1, clip=50.0), x)
    assert torch.autograd.gradcheck(lambda y: scale(y, moments, eps=0.1, clip=50.0), x)
    assert torch.autograd.gradcheck(lambda m2: moments_variance(moments.replace(m2=m2)), moments["m2"].requires_grad_())
    moments = moments.detach()
    for kernel in (normalize, scale):
        (clipped,) = torch.autograd.grad(kernel(x, moments, eps=0.1, clip=1e-9).sum(), x)
        assert float(clipped.abs().max()) == 0.0
    assert not any(v.requires_grad for v in moments_update(moments, x, everything(4)).values())


def test_new_values_do_not_retrace():
    a, b, x = moments_init((2,)), moments_of(5.0, [1.0, 2.0], [3.0, 4.0]), torch.zeros(3, 2)
    assert_no_retrace(moments_update, (a, x, everything(3)), (b, x + 1.0, ~everything(3)))
    assert_no_retrace(moments_merge, (a, b.clone()), (b, a.clone()))
    eps, clip = torch.tensor(1.0), torch.tensor(2.0)
    for kernel in (normalize, scale):
        call = lambda x, m, eps, clip: kernel(x, m, eps=eps, clip=clip)  # noqa: B023, E731
        assert_no_retrace(call, (x, a, eps, clip), (x + 1.0, b, eps * 2.0, clip * 2.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: moments_merge(moments_init((2,)), moments_init((3,))),
            r"other .* \[3\], expected \[2\], the shape in moments",
        ),
        (lambda: moments_update(moments_init((2,)), torch.zeros(4, 3), everything(4)), r"x has shape \[4, 3\]"),
        (
            lambda: moments_update(moments_init((2,)), torch.zeros(4, 2), everything(5)),
            r"\[5, 2\]: the shape of mask, then the shape of one sample",
        ),
        (
            lambda: moments_update(moments_init((2,)), torch.zeros(4, 3)),
            r"\[4, 2\]: the shape of the batch, then the shape of one sample",
        ),
        (lambda: normalize(torch.zeros(4), moments_init((2,)), eps=0.0, clip=1.0), r"x has shape \[4\]"),
        (lambda: normalize(torch.zeros(4, 1), moments_init((2,)), eps=0.0, clip=1.0), r"x has shape \[4, 1\]"),
        (lambda: normalize(torch.zeros(3), moments_init((2, 3)), eps=0.0, clip=1.0), r"x has shape \[3\]"),
        (lambda: scale(torch.zeros(4, 1), moments_init((2,)), eps=0.0, clip=1.0), r"x has shape \[4, 1\]"),
    ],
)
def test_wrong_shapes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
