"""Beta variables: log-probabilities, entropies and samples."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, close
from torch.distributions import Beta, Independent, kl_divergence

from ecrl import rng
from ecrl.kernels import beta_entropy, beta_kl, beta_log_prob, beta_mode, beta_sample

F32, F64 = torch.float32, torch.float64


def concentrations(*shape, seed=0, dtype=F64):
    return tuple(rng.normal(key, shape, dtype).exp() for key in rng.split(rng.key(seed), 2))


def test_beta_by_hand(variant):
    # Beta(2, 1) has the density 2 x, and Beta(1, 1) the density 1
    alpha, beta = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 1.0]])
    close(variant(beta_log_prob)(alpha, beta, torch.tensor([[0.25, 0.9]])), [-math.log(2.0)], 1e-6)
    close(variant(beta_entropy)(alpha, beta), [0.5 - math.log(2.0)], 1e-6)  # -E[log(2 x)] = -log(2) + 1/2
    # KL(Beta(2, 1) | uniform) is minus the entropy; KL(uniform | Beta(2, 1)) = -E[log(2 x)] = 1 - log(2)
    close(variant(beta_kl)(alpha, beta, beta, beta), [math.log(2.0) - 0.5], 1e-6)
    close(variant(beta_kl)(beta, beta, alpha, beta), [1.0 - math.log(2.0)], 1e-6)
    rows = torch.tensor([[4.0, 2.0, 0.5, 2.0, 0.5, 0.5, 1.0]]), torch.tensor([[2.0, 2.0, 2.0, 0.5, 0.5, 0.25, 1.0]])
    close(variant(beta_mode)(*rows), [[0.75, 0.5, 0.0, 1.0, 0.5, 1.0, 0.5]], 1e-6)


def test_oracle(variant):
    (a, b), (c, d) = ([0.5 + x for x in concentrations(6, 2, seed=s)] for s in (0, 1))
    x = rng.uniform(rng.key(2), (6, 2), F64)
    log_prob, entropy, kl = [], [], []
    edges = np.linspace(-60.0, 60.0, 400_001)  # integrals over logit(x), whose tails fall exponentially
    z = 0.5 * (edges[1:] + edges[:-1])
    log_x, log_y = -np.logaddexp(0.0, -z), -np.logaddexp(0.0, z)

    def log_beta(p, q):
        return math.lgamma(p) + math.lgamma(q) - math.lgamma(p + q)

    for i in range(6):
        sums = [0.0, 0.0, 0.0]
        for j in range(2):
            p, q, r, s, v = (float(t[i, j]) for t in (a, b, c, d, x))
            sums[0] += (p - 1) * math.log(v) + (q - 1) * math.log(1 - v) - log_beta(p, q)
            own, other = ((m - 1) * log_x + (n - 1) * log_y - log_beta(m, n) for m, n in ((p, q), (r, s)))
            weight = np.exp(own + log_x + log_y) * (edges[1] - edges[0])
            sums[1] -= float((weight * own).sum())
            sums[2] += float((weight * (own - other)).sum())
        for results, total in zip((log_prob, entropy, kl), sums, strict=True):
            results.append(total)
    close(variant(beta_log_prob)(a, b, x), torch.tensor(log_prob, dtype=F64), 1e-10)
    close(variant(beta_entropy)(a, b), torch.tensor(entropy, dtype=F64), 1e-5)
    close(variant(beta_kl)(a, b, c, d), torch.tensor(kl, dtype=F64), 1e-5)


@pytest.mark.ref
@pytest.mark.parametrize(("dtype", "tol"), [(F64, 1e-10), (F32, 2e-5)])
def test_against_torch(dtype, tol):
    (a, b), (c, d) = concentrations(50, 4, dtype=dtype), concentrations(50, 4, seed=1, dtype=dtype)
    x = rng.uniform(rng.key(2), (50, 4), F64).clamp(0.01, 0.99).to(dtype)
    p, q = Independent(Beta(a, b), 1), Independent(Beta(c, d), 1)
    close(beta_log_prob(a, b, x), p.log_prob(x), tol)
    close(beta_entropy(a, b), p.entropy(), tol)
    close(beta_kl(a, b, c, d), kl_divergence(p, q), tol)
    close(beta_mode(a + 1.0, b + 1.0), Independent(Beta(a + 1.0, b + 1.0), 1).mode, tol)


@pytest.mark.ref
@pytest.mark.parametrize("alpha", [1e-3, 0.5, 3.0, 1e4])
@pytest.mark.parametrize("beta", [0.1, 1.0, 1e4])
def test_extreme_concentrations_against_scipy(alpha, beta):
    """In float32, log-gamma functions of 1e4 cancel to two digits. The kernels compute in float64."""
    theirs = scipy.stats.beta(alpha, beta)
    x = float(np.clip(theirs.mean(), 1e-6, 1.0 - 1e-6))
    for dtype, tol in ((F64, 1e-9), (F32, 2e-5)):
        a, b, v = (torch.tensor([t], dtype=dtype) for t in (alpha, beta, x))
        exact = scipy.stats.beta(float(a), float(b))
        close(beta_log_prob(a, b, v), torch.tensor(exact.logpdf(float(v)), dtype=F64), tol)
        close(beta_entropy(a, b), torch.tensor(float(exact.entropy()), dtype=F64), tol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
def test_edge_actions_are_finite(dtype):
    edges = torch.tensor([0.0, 1.0], dtype=dtype, requires_grad=True)
    for alpha, beta in ((0.5, 0.5), (2.0, 3.0), (1.0, 1.0)):
        a, b = (torch.full((2,), c, dtype=dtype, requires_grad=True) for c in (alpha, beta))
        out = beta_log_prob(a, b, edges)
        grads = torch.autograd.grad(out, (a, b, edges))
        assert bool(out.isfinite()) and all(bool(g.isfinite().all()) for g in grads)
        assert grads[2].tolist() == [0.0, 0.0]  # outside the open interval nothing flows


@pytest.mark.ref
@pytest.mark.parametrize(("alpha", "beta"), [(0.05, 4.0), (0.3, 0.7), (1.0, 1.0), (2.0, 5.0), (50.0, 3.0)])
def test_samples_have_their_distribution(alpha, beta):
    n = 20_000
    keys = rng.fold_in(rng.key(7), torch.arange(n))
    sample = beta_sample(torch.full((n, 1), alpha, dtype=F64), torch.full((n, 1), beta, dtype=F64), keys)
    test = scipy.stats.kstest(sample.flatten().numpy(), scipy.stats.beta(alpha, beta).cdf)
    assert test.pvalue > 1e-3
    assert bool(((sample >= 0.0) & (sample <= 1.0)).all())


def test_samples_of_tiny_and_huge_concentrations_are_in_the_interval():
    for alpha, beta in ((1e-4, 1e-4), (1e-4, 1e6), (1e8, 1e8), (1e-30, 1.0)):
        rows = torch.full((1000, 1), alpha), torch.full((1000, 1), beta)
        sample = beta_sample(*rows, torch.arange(1000))
        assert sample.dtype == F32 and bool(((sample >= 0.0) & (sample <= 1.0)).all())
    assert float((beta_sample(torch.tensor([1e8]), torch.tensor([1e8]), rng.key(0)) - 0.5).abs()) < 1e-3


def test_a_sample_depends_on_its_own_key_only(variant):
    a, b = (x.float() for x in concentrations(5, 3))
    keys = rng.fold_in(rng.key(0), torch.arange(5))
    together = variant(beta_sample)(a, b, keys)
    for i in range(5):
        close(beta_sample(a[i], b[i], keys[i]), together[i], 1e-6)
    assert len(set(together.flatten().tolist())) == 15
    assert not beta_sample(a.requires_grad_(), b, keys).requires_grad


POSITIVE = st.floats(0.05, 50.0)


@given(POSITIVE, POSITIVE, POSITIVE, POSITIVE, st.floats(0.001, 0.999))
def test_properties(alpha, beta, other_alpha, other_beta, x):
    a, b, c, d, x = (torch.tensor([v], dtype=F64) for v in (alpha, beta, other_alpha, other_beta, x))
    assert float(beta_kl(a, b, c, d)) >= -1e-9
    close(beta_kl(a, b, a, b), 0.0, 1e-12)
    close(beta_kl(b, a, d, c), beta_kl(a, b, c, d), 1e-9)
    close(beta_log_prob(b, a, 1.0 - x), beta_log_prob(a, b, x), 1e-9)
    close(beta_mode(b, a), 1.0 - beta_mode(a, b), 1e-9)
    assert float(beta_entropy(a, b)) <= 1e-9  # the uniform distribution has the most


@given(st.floats(1.01, 20.0), st.floats(1.01, 20.0), st.floats(0.001, 0.999))
def test_no_action_is_more_probable_than_the_mode(alpha, beta, x):
    a, b, x = (torch.tensor([v], dtype=F64) for v in (alpha, beta, x))
    assert float(beta_log_prob(a, b, beta_mode(a, b))) >= float(beta_log_prob(a, b, x)) - 1e-9


def test_gradients():
    (a, b), (c, d) = (tuple(x.requires_grad_() for x in concentrations(2, 3, seed=s)) for s in (0, 1))
    x = rng.uniform(rng.key(2), (2, 3), F64).clamp(0.05, 0.95).requires_grad_()
    check = torch.autograd.gradcheck
    assert check(beta_log_prob, (a, b, x)) and check(beta_entropy, (a, b)) and check(beta_kl, (a, b, c, d))
    assert check(lambda a, b: beta_mode(a + 1.0, b + 1.0), (a, b))


ROWS = torch.ones(4, 3)
CALLS = {
    beta_sample: ("alpha beta key", (ROWS, ROWS + 1.0, torch.arange(4))),
    beta_mode: ("alpha beta", (ROWS, ROWS + 1.0)),
    beta_log_prob: ("alpha beta action", (ROWS, ROWS + 1.0, 0.5 * ROWS)),
    beta_entropy: ("alpha beta", (ROWS, ROWS + 1.0)),
    beta_kl: ("alpha beta other_alpha other_beta", (ROWS, ROWS + 1.0, ROWS + 2.0, ROWS + 3.0)),
}


@pytest.mark.parametrize("fn", CALLS, ids=lambda fn: fn.__name__)
def test_new_values_do_not_retrace(fn):
    args = CALLS[fn][1]
    assert_no_retrace(fn, args, tuple(x * 2 for x in args))


@pytest.mark.parametrize(
    ("fn", "i", "name"),
    [(fn, i, name) for fn, (names, _) in CALLS.items() for i, name in enumerate(names.split()) if i],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_wrong_shapes_are_named(fn, i, name):
    args = list(CALLS[fn][1])
    args[i] = args[i][:2]
    with pytest.raises(ValueError, match=rf"^{name} has shape \[2.*, expected \[4"):
        fn(*args)
