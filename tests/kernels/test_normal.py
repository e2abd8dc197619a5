"""The normal and the tanh-normal distribution: log-probabilities, entropies and samples."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, close
from torch.distributions import Independent, Normal, TransformedDistribution, kl_divergence
from torch.distributions.transforms import TanhTransform

from ecrl import rng
from ecrl.kernels import (
    normal_entropy,
    normal_kl,
    normal_log_prob,
    normal_mode,
    normal_sample,
    tanh_normal_entropy,
    tanh_normal_kl,
    tanh_normal_latent,
    tanh_normal_log_prob,
    tanh_normal_mode,
    tanh_normal_sample,
)
from ecrl.kernels.normal import _QUADRATURE

F32, F64 = torch.float32, torch.float64
LOG2 = math.log(2.0)
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def random(*shape, seed=0, dtype=F64):
    return rng.normal(rng.key(seed), shape, dtype)


def test_normal_by_hand(variant):
    # std 1 and 2: z = 1 and 1/2; log p = -1/2 - log sqrt(2 pi) and -1/8 - log 2 - log sqrt(2 pi)
    mean, log_std, action = torch.tensor([[0.0, 1.0]]), torch.tensor([0.0, LOG2]), torch.tensor([[1.0, 2.0]])
    close(variant(normal_log_prob)(mean, log_std, action), [-0.625 - LOG2 - 2.0 * HALF_LOG_2PI], 1e-6)
    close(variant(normal_entropy)(mean, log_std), [1.0 + LOG2 + 2.0 * HALF_LOG_2PI], 1e-6)
    close(variant(normal_sample)(mean, log_std, torch.tensor([[-1.0, 2.0]])), [[-1.0, 5.0]], 1e-6)
    close(variant(normal_mode)(mean), [[0.0, 1.0]])
    # to N(1, 1) and N(1, 1): (0 + (1 + 1) / 2 - 1/2) + (-log 2 + 4 / 2 - 1/2)
    close(variant(normal_kl)(mean, log_std, torch.ones(1, 2), torch.zeros(2)), [2.0 - LOG2], 1e-6)


def test_tanh_normal_by_hand(variant):
    # at latent log 2: tanh = (4 - 1) / (4 + 1) = 3/5, slope 1 - 9/25 = 16/25
    mean, log_std = torch.tensor([LOG2, 0.0]), torch.tensor([0.0])
    out = variant(tanh_normal_sample)(mean, log_std, torch.tensor([0.0, LOG2]))
    close(out.latent, [LOG2, LOG2], 1e-6)
    close(out.action, [0.6, 0.6], 1e-6)
    close(variant(tanh_normal_mode)(mean), [0.6, 0.0], 1e-6)
    close(variant(tanh_normal_latent)(torch.tensor([0.6, 0.0])), [LOG2, 0.0], 1e-6)
    expected = -2.0 * HALF_LOG_2PI - 0.5 * LOG2**2 - 2.0 * math.log(16.0 / 25.0)
    close(variant(tanh_normal_log_prob)(mean, log_std, torch.tensor([LOG2, LOG2])), expected, 1e-6)
    close(variant(tanh_normal_kl)(mean, log_std, torch.zeros(2), log_std), 0.5 * LOG2**2, 1e-6)
    # a narrow one: the entropy of the Gaussian and the log slope at its mean
    narrow = variant(tanh_normal_entropy)(mean, torch.tensor([-9.0]))
    close(narrow, 2.0 * (0.5 + HALF_LOG_2PI - 9.0) + math.log(16.0 / 25.0), 1e-5)


def test_oracles(variant):
    mean, log_std, x = random(9, 3), random(3, seed=1), random(9, 3, seed=2)
    other, other_log_std = random(9, 3, seed=3), random(9, 3, seed=4)
    log_prob, squashed, kl = [], [], []
    for i in range(9):
        p = s = d = 0.0
        for a in range(3):
            m, ls, v, om, ols = (float(t) for t in (mean[i, a], log_std[a], x[i, a], other[i, a], other_log_std[i, a]))
            p += -(((v - m) / math.exp(ls)) ** 2) / 2 - ls - math.log(2 * math.pi) / 2
            s += math.log(1.0 - math.tanh(v) ** 2)
            d += ols - ls + (math.exp(2 * ls) + (m - om) ** 2) / (2 * math.exp(2 * ols)) - 0.5
        log_prob, squashed, kl = [*log_prob, p], [*squashed, p - s], [*kl, d]
    close(variant(normal_log_prob)(mean, log_std, x), torch.tensor(log_prob, dtype=F64), 1e-12)
    close(variant(tanh_normal_log_prob)(mean, log_std, x), torch.tensor(squashed, dtype=F64), 1e-11)
    close(variant(normal_kl)(mean, log_std, other, other_log_std), torch.tensor(kl, dtype=F64), 1e-12)
    close(variant(tanh_normal_kl)(mean, log_std, other, other_log_std), torch.tensor(kl, dtype=F64), 1e-12)


# float32: sums of four terms of size up to 100; torch's own log_prob differs by as much from float64
@pytest.mark.ref
@pytest.mark.parametrize(("dtype", "tol"), [(F64, 1e-10), (F32, 2e-5)])
def test_against_torch(dtype, tol):
    mean, log_std, noise, other, other_log_std = (random(50, 4, seed=s).to(dtype) for s in range(5))
    p = Independent(Normal(mean, log_std.exp()), 1)
    q = Independent(Normal(other, other_log_std.exp()), 1)
    x = normal_sample(mean, log_std, noise)
    close(normal_log_prob(mean, log_std, x), p.log_prob(x), tol)
    close(normal_log_prob(other, other_log_std, x), q.log_prob(x), tol)
    close(normal_entropy(mean, log_std), p.entropy(), tol)
    close(normal_kl(mean, log_std, other, other_log_std), kl_divergence(p, q), tol)
    close(normal_mode(mean), p.mode, tol)
    squashed = TransformedDistribution(p, TanhTransform(cache_size=1))
    action = squashed.transforms[0](x)  # caches the latent, so that torch is exact too
    close(tanh_normal_log_prob(mean, log_std, x), squashed.log_prob(action), tol)
    assert tanh_normal_entropy(mean, log_std).dtype == dtype


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("latent", [-50.0, -20.0, 0.0, 20.0, 50.0])
def test_saturated_latents(dtype, latent):
    mean, log_std = torch.zeros(1, dtype=dtype, requires_grad=True), torch.zeros(1, dtype=dtype, requires_grad=True)
    x = torch.tensor([latent], dtype=dtype, requires_grad=True)
    out = tanh_normal_log_prob(mean, log_std, x)
    # for large |x|, log(1 - tanh^2) is log(4) - 2 |x| up to exp(-2 |x|)
    slope = 2.0 * LOG2 - 2.0 * abs(latent) if latent else 0.0
    close(out, -0.5 * latent**2 - HALF_LOG_2PI - slope, 1e-6)
    grads = torch.autograd.grad(out, (mean, log_std, x))
    # d/dx = -(x - mean) + 2 tanh(x)
    close(torch.cat(grads), [latent, latent**2 - 1.0, -latent + 2.0 * math.tanh(latent)], 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
def test_latent_of_edge_actions(dtype):
    action = torch.tensor([-1.0, 1.0], dtype=dtype, requires_grad=True)
    latent = tanh_normal_latent(action)
    assert bool(latent.isfinite().all()) and latent.dtype == dtype
    assert float(latent.detach().abs().min()) > 0.9 * math.atanh(
        1.0 - torch.finfo(dtype).eps
    )  # as far out as the dtype sees
    mean = torch.zeros(2, dtype=dtype, requires_grad=True)
    out = tanh_normal_log_prob(mean, torch.zeros(2, dtype=dtype), latent)
    grads = torch.autograd.grad(out, (mean, action))
    assert bool(out.isfinite()) and all(bool(g.isfinite().all()) for g in grads)
    assert grads[1].tolist() == [0.0, 0.0]  # outside the interval nothing flows


@given(st.floats(-8.0, 8.0))
def test_latent_inverts_tanh(x):
    x = torch.tensor([x], dtype=F64)
    close(tanh_normal_latent(torch.tanh(x)), x, 1e-8)  # at 8 the slope is 4e-7, which makes 1e-16 into 1e-9


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1.5, 0.3), (-2.0, 2.0), (0.5, 0.05)])
def test_density_integrates_to_one(mean, std):
    # a Riemann sum over cells of (-1, 1) that narrow towards the edges, where the density may be steep
    edges = torch.tanh(torch.linspace(-15.0, 15.0, 200_001, dtype=F64))
    action = 0.5 * (edges[1:] + edges[:-1])
    m, log_std = torch.full((200_000, 1), mean, dtype=F64), torch.full((1,), math.log(std), dtype=F64)
    log_prob = tanh_normal_log_prob(m, log_std, tanh_normal_latent(action)[:, None])
    close((log_prob.exp() * edges.diff()).sum(), 1.0, 1e-6)


def entropy_by_integration(mean, std):
    """The equation by the trapezium rule over 12 standard deviations, where the Gaussian is 1e-32."""
    z = torch.linspace(-12.0, 12.0, 20_001, dtype=F64)
    x = (mean + std * z).abs()  # log(1 - tanh^2) is even
    log_slope = 2.0 * (LOG2 - x - torch.log1p(torch.exp(-2.0 * x)))
    expected = torch.trapezoid(torch.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi) * log_slope, z)
    return 0.5 + HALF_LOG_2PI + math.log(std) + float(expected)


def test_the_quadrature_is_that_of_numpy():
    nodes, weights = map(np.array, _QUADRATURE)
    expected_nodes, expected_weights = np.polynomial.hermite_e.hermegauss(48)
    np.testing.assert_allclose(nodes, expected_nodes, rtol=1e-14)
    large = expected_weights > 1e-15  # numpy's smaller weights have rounding errors above 1e-14
    np.testing.assert_allclose(weights[large], expected_weights[large], rtol=1e-14)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "std", "tol"),
    [
        (F64, 0.01, 1e-10),
        (F64, 0.1, 1e-10),
        (F64, 0.5, 1e-9),
        (F64, 1.0, 1e-7),
        (F64, 2.0, 1e-4),
        (F64, 3.0, 1e-3),  # what the docstring promises
        (F64, 5.0, 2e-2),
        (F32, 0.01, 2e-6),
        (F32, 3.0, 1e-3),
    ],
)
def test_tanh_normal_entropy_error(dtype, std, tol):
    means = torch.linspace(-2.0, 2.0, 41, dtype=dtype)[:, None]
    out = tanh_normal_entropy(means, torch.tensor([math.log(std)], dtype=dtype))
    expected = [entropy_by_integration(float(m), std) for m in means]
    assert float((out.double() - torch.tensor(expected, dtype=F64)).abs().max()) < tol


def test_sample_matches_its_log_prob():
    # the mean of -log p over samples is the entropy; 5 standard errors
    n, mean, log_std = 100_000, torch.tensor([0.4, -1.0]), torch.tensor([0.2, -0.5])
    latent = tanh_normal_sample(mean.expand(n, 2), log_std, random(n, 2, dtype=F32)).latent
    surprise = -tanh_normal_log_prob(mean.expand(n, 2), log_std, latent)
    error = float(surprise.std(correction=0)) / math.sqrt(n)
    assert abs(float(surprise.mean()) - float(tanh_normal_entropy(mean, log_std))) < 5.0 * error


ROW = st.lists(st.floats(-3.0, 3.0), min_size=3, max_size=3)


@given(ROW, ROW, ROW, ROW)
def test_properties(mean, log_std, other, other_log_std):
    mean, log_std, other, other_log_std = (torch.tensor(x, dtype=F64) for x in (mean, log_std, other, other_log_std))
    assert float(normal_kl(mean, log_std, other, other_log_std)) >= -1e-9
    assert float(normal_kl(mean, log_std, mean, log_std)) == 0.0
    close(normal_entropy(other, log_std), normal_entropy(mean, log_std), 1e-12)  # free of the mean
    assert float(tanh_normal_entropy(mean, log_std)) <= 3.0 * LOG2 + 0.2  # uniform on (-1, 1)^3 has the most
    close(tanh_normal_entropy(-mean, log_std), tanh_normal_entropy(mean, log_std), 1e-9)
    order = torch.tensor([2, 0, 1])
    close(normal_log_prob(mean[order], log_std[order], other[order]), normal_log_prob(mean, log_std, other), 1e-9)


def test_gradients():
    mean, log_std, x = (random(2, 3, seed=s).requires_grad_() for s in range(3))
    one_log_std = random(3, seed=3).requires_grad_()  # broadcasts
    action = (0.9 * torch.tanh(x.detach())).requires_grad_()
    for fn in (normal_sample, normal_log_prob, tanh_normal_sample, tanh_normal_log_prob):
        assert torch.autograd.gradcheck(fn, (mean, log_std, x)) and torch.autograd.gradcheck(fn, (mean, one_log_std, x))
    assert torch.autograd.gradcheck(normal_kl, (mean, log_std, x, one_log_std))
    assert torch.autograd.gradcheck(tanh_normal_entropy, (mean, log_std))
    assert torch.autograd.gradcheck(lambda s: normal_entropy(mean, s), one_log_std)
    assert torch.autograd.gradcheck(tanh_normal_latent, action)
    assert torch.autograd.gradcheck(normal_mode, mean) and torch.autograd.gradcheck(tanh_normal_mode, mean)


ROWS, LOG_STD = torch.zeros(4, 3), torch.zeros(3)
CALLS = {
    normal_sample: ("mean log_std noise", (ROWS, LOG_STD, ROWS)),
    normal_log_prob: ("mean log_std action", (ROWS, LOG_STD, ROWS)),
    normal_entropy: ("mean log_std", (ROWS, LOG_STD)),
    normal_kl: ("mean log_std other_mean other_log_std", (ROWS, LOG_STD, ROWS, LOG_STD)),
    tanh_normal_sample: ("mean log_std noise", (ROWS, LOG_STD, ROWS)),
    tanh_normal_log_prob: ("mean log_std latent", (ROWS, LOG_STD, ROWS)),
    tanh_normal_entropy: ("mean log_std", (ROWS, LOG_STD)),
    tanh_normal_kl: ("mean log_std other_mean other_log_std", (ROWS, LOG_STD, ROWS, LOG_STD)),
}


@pytest.mark.parametrize("fn", CALLS, ids=lambda fn: fn.__name__)
def test_new_values_do_not_retrace(fn):
    args = CALLS[fn][1]
    assert_no_retrace(fn, tuple(x + 0.0 for x in args), tuple(x + 0.5 for x in args))  # + 0: no two are one tensor


@pytest.mark.parametrize(
    ("fn", "name", "shape"),
    [
        (fn, name, shape)
        for fn, (names, _) in CALLS.items()
        for name in names.split()
        for shape in [(4, 2), (2, 4, 3)]  # too narrow; it would broadcast silently
        if not (fn in (normal_entropy, tanh_normal_entropy) and (name, shape) == ("mean", (2, 4, 3)))
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_wrong_shapes_are_named(fn, name, shape):
    names, args = CALLS[fn]
    args = [torch.zeros(shape) if n == name else x for n, x in zip(names.split(), args, strict=True)]
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        fn(*args)


@pytest.mark.parametrize("fn", [normal_entropy, tanh_normal_entropy], ids=lambda fn: fn.__name__)
def test_the_shape_of_an_entropy_is_the_shape_of_the_mean(fn):
    assert fn(torch.zeros(2, 4, 3), LOG_STD).shape == (2, 4)
