"""Truncated normal variables: log-probabilities, entropies and samples, also far from the mean."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, close

from ecrl import rng
from ecrl.kernels import (
    normal_entropy,
    normal_kl,
    normal_log_prob,
    truncated_normal_entropy,
    truncated_normal_kl,
    truncated_normal_log_prob,
    truncated_normal_mode,
    truncated_normal_sample,
)

F32, F64 = torch.float32, torch.float64
INF = math.inf
HALF = 0.5 * math.log(2.0 * math.pi)
LOG2 = math.log(2.0)


def random(*shape, seed=0, dtype=F64):
    return rng.normal(rng.key(seed), shape, dtype)


def test_truncated_normal_by_hand(variant):
    # one half of the standard normal distribution: twice its density, and E[z^2] = 1
    mean, log_std, low, high = torch.zeros(1, 1), torch.zeros(1), torch.zeros(1), torch.full((1,), INF)
    close(variant(truncated_normal_log_prob)(mean, log_std, low, high, torch.ones(1, 1)), [LOG2 - 0.5 - HALF], 1e-6)
    close(variant(truncated_normal_entropy)(mean, log_std, low, high), [0.5 + HALF - LOG2], 1e-6)
    # the quantile of (1 - u) / 2 + u is that of 3/4 at u = 1/2
    close(variant(truncated_normal_sample)(mean, log_std, low, high, torch.full((1, 1), 0.5)), [[0.6744898]], 1e-6)
    # to twice the standard deviation: log(2) + (1/4 - 1) / 2
    kl = variant(truncated_normal_kl)(mean, log_std, mean + 0.0, torch.tensor([LOG2]), low, high)
    close(kl, [LOG2 - 0.375], 1e-6)
    close(variant(truncated_normal_mode)(torch.tensor([-3.0, 0.5, 9.0]), -1.0, 2.0), [-1.0, 0.5, 2.0], 0.0)


def integrals(mean, log_std, other_mean, other_log_std, low, high):
    """The mass, entropy and KL divergence by the trapezium rule."""
    x = torch.linspace(low, high, 200_001, dtype=F64)
    own, other = (-0.5 * ((x - m) / math.exp(s)) ** 2 for m, s in ((mean, log_std), (other_mean, other_log_std)))
    log_p, log_q = (e - e.max() - torch.log(torch.trapezoid((e - e.max()).exp(), x)) for e in (own, other))
    p = log_p.exp()
    return -float(torch.trapezoid(p * log_p, x)), float(torch.trapezoid(p * (log_p - log_q), x)), (x, log_p)


def test_oracle(variant):
    mean, log_std, other, other_log_std = random(4, 2), random(2, seed=1), random(4, 2, seed=2), random(2, seed=3)
    low, high = torch.tensor([-1.0, 0.5], dtype=F64), torch.tensor([2.0, 1.5], dtype=F64)
    action = torch.tensor([0.3, 1.1], dtype=F64).expand(4, 2)
    expected = {"log_prob": [], "entropy": [], "kl": []}
    for i in range(4):
        sums = [0.0, 0.0, 0.0]
        for j in range(2):
            numbers = (mean[i, j], log_std[j], other[i, j], other_log_std[j], low[j], high[j])
            entropy, kl, (x, log_p) = integrals(*map(float, numbers))
            log_prob = float(np.interp(float(action[i, j]), x.numpy(), log_p.numpy()))
            sums = [a + b for a, b in zip(sums, (log_prob, entropy, kl), strict=True)]
        for results, total in zip(expected.values(), sums, strict=True):
            results.append(total)
    expected = {name: torch.tensor(values, dtype=F64) for name, values in expected.items()}
    close(variant(truncated_normal_log_prob)(mean, log_std, low, high, action), expected["log_prob"], 1e-8)
    close(variant(truncated_normal_entropy)(mean, log_std, low, high), expected["entropy"], 1e-8)
    close(variant(truncated_normal_kl)(mean, log_std, other, other_log_std, low, high), expected["kl"], 1e-8)


@pytest.mark.ref
@pytest.mark.parametrize(("dtype", "tol"), [(F64, 1e-9), (F32, 2e-5)])
def test_against_scipy(dtype, tol):
    mean, log_std = random(20, 3, dtype=dtype), 0.5 * random(20, 3, seed=1, dtype=dtype)
    low, high = torch.tensor([-1.0, -0.5, -2.0], dtype=dtype), 1.0
    noise = rng.uniform(rng.key(2), (20, 3), dtype)
    m, s, b = mean.double().numpy(), log_std.double().exp().numpy(), low.double().numpy()
    theirs = scipy.stats.truncnorm((b - m) / s, (high - m) / s, m, s)
    sample = truncated_normal_sample(mean, log_std, low, high, noise)
    close(sample, torch.from_numpy(theirs.ppf(noise.double().numpy())), tol)
    log_prob = torch.from_numpy(theirs.logpdf(sample.double().numpy()))
    close(truncated_normal_log_prob(mean, log_std, low, high, sample), log_prob.sum(-1), tol)
    close(truncated_normal_entropy(mean, log_std, low, high), torch.from_numpy(theirs.entropy()).sum(-1), tol)


@pytest.mark.parametrize("distance", [20.0, 100.0, 1e4, 1e6])
@pytest.mark.parametrize("side", [1.0, -1.0])
def test_far_from_the_mean_the_density_is_exponential(side, distance):
    """Between the bounds -1 and 1, with the mean at a distance: density exp(-rate t) at the distance t from the bound.

    The next term of the exponent is t^2 / 2, which is 1 / rate^2 at t = 1 / rate.
    """
    rate = distance - 1.0
    mean, log_std = torch.full((1, 1), side * distance, dtype=F64), torch.zeros(1, dtype=F64)
    t = 1.0 / rate
    tol = 2.0 / rate**2 + 1e-15 * rate**2  # terms of the size rate^2 cancel
    action = torch.full((1, 1), side * (1.0 - t), dtype=F64)
    log_prob = truncated_normal_log_prob(mean, log_std, -1.0, 1.0, action)
    close(log_prob, [math.log(rate) - rate * t], tol)
    close(truncated_normal_entropy(mean, log_std, -1.0, 1.0), [1.0 - math.log(rate)], tol)
    sample = truncated_normal_sample(mean, log_std, -1.0, 1.0, torch.full((1, 1), 0.3, dtype=F64))
    beyond = 0.7 if side < 0.0 else 0.3  # the probability of a greater distance from the bound
    assert abs((1.0 - float(side * sample)) * rate + math.log(beyond)) < 10.0 * tol
    assert -1.0 <= float(sample) <= 1.0
    # to the same with twice the rate: log(1/2) + (2 rate - rate) E[t]
    kl = truncated_normal_kl(mean, log_std, mean + side * rate, log_std, -1.0, 1.0)
    close(kl, [1.0 - LOG2], 10.0 * tol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
def test_samples_are_within_the_bounds_and_have_a_finite_log_prob(dtype):
    noise = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0 - 2.0**-8], dtype=dtype)
    for mean in (-300.0, -5.0, 0.1, 5.0, 300.0):
        for log_std in (-4.0, 0.0, 8.0):
            m = torch.full((5,), mean, dtype=dtype, requires_grad=True)
            s = torch.full((5,), log_std, dtype=dtype, requires_grad=True)
            sample = truncated_normal_sample(m, s, -0.5, 1.0, noise)
            assert sample.dtype == dtype and bool(((sample >= -0.5) & (sample <= 1.0)).all())
            assert bool((sample.diff() >= 0.0).all()), "the sample rises with the noise"
            out = truncated_normal_log_prob(m, s, -0.5, 1.0, sample.detach())
            results = (out, truncated_normal_entropy(m, s, -0.5, 1.0))
            for result in results:
                if dtype != torch.float16:  # float16 ends at 65504
                    assert bool(result.isfinite())
                    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(result, (m, s)))


def test_bounds_at_infinity_give_the_normal_distribution():
    mean, log_std, x = (random(4, 3, seed=s).requires_grad_() for s in range(3))
    other, other_log_std = random(4, 3, seed=3), random(4, 3, seed=4)
    pairs = [
        (truncated_normal_log_prob(mean, log_std, -INF, INF, x), normal_log_prob(mean, log_std, x)),
        (truncated_normal_entropy(mean, log_std, -INF, INF), normal_entropy(mean, log_std)),
        (
            truncated_normal_kl(mean, log_std, other, other_log_std, -INF, INF),
            normal_kl(mean, log_std, other, other_log_std),
        ),
    ]
    for actual, expected in pairs:
        close(actual, expected, 1e-10)
        grads = [torch.autograd.grad(y.sum(), (mean, log_std), allow_unused=True) for y in (actual, expected)]
        for a, e in zip(*grads, strict=True):
            close(a, torch.zeros(4, 3) if e is None else e, 1e-9)


def test_a_wide_normal_is_uniform_between_the_bounds():
    mean, log_std, x = torch.zeros(1), torch.tensor([20.0]), torch.tensor([0.7])
    close(truncated_normal_log_prob(mean, log_std, -1.0, 3.0, x), -2.0 * LOG2, 1e-6)
    close(truncated_normal_entropy(mean, log_std, -1.0, 3.0), 2.0 * LOG2, 1e-6)
    close(truncated_normal_sample(mean, log_std, -1.0, 3.0, torch.tensor([0.25])), [0.0], 1e-5)


NUMBER = st.floats(-3.0, 3.0)


@given(NUMBER, NUMBER, NUMBER, NUMBER, st.floats(-2.0, 1.0), st.floats(0.1, 3.0), st.floats(0.01, 0.99))
def test_properties(mean, log_std, other, other_log_std, low, width, u):
    high = low + width
    mean, log_std, other, other_log_std, u = (
        torch.tensor([x], dtype=F64) for x in (mean, log_std, other, other_log_std, u)
    )
    kl = truncated_normal_kl(mean, log_std, other, other_log_std, low, high)
    assert float(kl) >= -1e-7 * math.exp(2.0 * float((log_std - other_log_std).clamp(min=0.0)))
    assert float(truncated_normal_kl(mean, log_std, mean, log_std, low, high)) == 0.0
    assert float(truncated_normal_entropy(mean, log_std, low, high)) <= math.log(width) + 1e-9
    mirrored = truncated_normal_entropy(-mean, log_std, -high, -low)
    close(mirrored, truncated_normal_entropy(mean, log_std, low, high), 1e-8)
    sample = truncated_normal_sample(mean, log_std, low, high, u)
    close(truncated_normal_sample(-mean, log_std, -high, -low, 1.0 - u), -sample, 1e-7)
    best = truncated_normal_log_prob(mean, log_std, low, high, truncated_normal_mode(mean, low, high))
    assert float(best) >= float(truncated_normal_log_prob(mean, log_std, low, high, sample)) - 1e-9


def test_gradients():
    mean, log_std, x, other = (random(2, 3, seed=s).requires_grad_() for s in range(4))
    one_log_std = random(3, seed=4).requires_grad_()  # broadcasts
    noise = rng.uniform(rng.key(5), (2, 3), F64).clamp(0.05, 0.95).requires_grad_()
    x = (0.9 * torch.tanh(x.detach())).requires_grad_()
    check = torch.autograd.gradcheck
    for s in (log_std, one_log_std):
        assert check(lambda m, s, u: truncated_normal_sample(m, s, -1.0, 1.0, u), (mean, s, noise))
        assert check(lambda m, s, x: truncated_normal_log_prob(m, s, -1.0, 1.0, x), (mean, s, x))
        assert check(lambda m, s: truncated_normal_entropy(m, s, -1.0, INF), (mean, s))
        assert check(lambda m, s, o: truncated_normal_kl(m, s, o, 0.5 * s, -1.0, 1.0), (mean, s, other))
    far = (40.0 + mean.detach()).requires_grad_()
    assert check(lambda m, u: truncated_normal_sample(m, torch.zeros(3, dtype=F64), -1.0, 1.0, u), (far, noise))
    assert check(lambda m: truncated_normal_mode(m, -2.0, 0.3), mean)


ROWS, LOG_STD, LOW = torch.zeros(4, 3), torch.zeros(3), torch.full((3,), -1.0)
CALLS = {
    truncated_normal_sample: ("mean log_std low high noise", (ROWS, LOG_STD, LOW, LOW + 2.0, ROWS + 0.5)),
    truncated_normal_mode: ("mean low high", (ROWS, LOW, LOW + 2.0)),
    truncated_normal_log_prob: ("mean log_std low high action", (ROWS, LOG_STD, LOW, LOW + 2.0, ROWS + 0.1)),
    truncated_normal_entropy: ("mean log_std low high", (ROWS, LOG_STD, LOW, LOW + 2.0)),
    truncated_normal_kl: (
        "mean log_std other_mean other_log_std low high",
        (ROWS, LOG_STD, ROWS + 0.1, LOG_STD + 0.1, LOW, LOW + 2.0),
    ),
}


@pytest.mark.parametrize("fn", CALLS, ids=lambda fn: fn.__name__)
def test_new_values_do_not_retrace(fn):
    args = CALLS[fn][1]
    assert_no_retrace(fn, args, tuple(x + 0.125 for x in args))


@pytest.mark.parametrize(
    ("fn", "i", "name"),
    [(fn, i, name) for fn, (names, _) in CALLS.items() for i, name in enumerate(names.split()) if i],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_wrong_shapes_are_named(fn, i, name):
    for shape in ((4, 2), (2, 4, 3)):
        args = list(CALLS[fn][1])
        args[i] = torch.zeros(shape)
        with pytest.raises(ValueError, match=rf"^{name} has shape \[{shape[0]}, "):
            fn(*args)


def test_bounds_may_be_numbers_of_numpy():
    close(truncated_normal_mode(ROWS, np.float32(-0.5), np.float64(0.5)), truncated_normal_mode(ROWS, -0.5, 0.5))
    with pytest.raises(ValueError, match=r"^low is 1.0, expected a number below high 1.0$"):
        truncated_normal_mode(ROWS, np.float32(1.0), np.float32(1.0))


def test_bounds_in_the_wrong_order_or_of_a_wrong_type_are_named():
    with pytest.raises(ValueError, match=r"^low is 1.0, expected a number below high 1.0$"):
        truncated_normal_entropy(ROWS, LOG_STD, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"^high is '1', expected a number or a tensor$"):
        truncated_normal_mode(ROWS, 0.0, "1")
