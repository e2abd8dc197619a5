"""Bernoulli variables: log-probabilities, entropies and samples."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, close
from torch.distributions import Bernoulli, Independent, kl_divergence

from ecrl import rng
from ecrl.kernels import bernoulli_entropy, bernoulli_kl, bernoulli_log_prob, bernoulli_mode, bernoulli_sample

F32, F64 = torch.float32, torch.float64
LOG2, LOG3 = math.log(2.0), math.log(3.0)
LOGITS = torch.tensor([[LOG3, 0.0], [-LOG3, -200.0]])  # p = 3/4, 1/2; 1/4, 0


def random(*shape, seed=0, dtype=F64):
    return 3.0 * rng.normal(rng.key(seed), shape, dtype)


def test_bernoulli_by_hand(variant):
    action = torch.tensor([[1, 0], [1, 0]])
    close(variant(bernoulli_log_prob)(LOGITS, action), [LOG3 - 3.0 * LOG2, -2.0 * LOG2], 1e-6)
    # H(1/4) = 2 log(2) - 3/4 log(3), H(1/2) = log(2), H(0) = 0
    quarter = 2.0 * LOG2 - 0.75 * LOG3
    close(variant(bernoulli_entropy)(LOGITS), [quarter + LOG2, quarter], 1e-6)
    # KL to 1/2 is log(2) - H
    close(variant(bernoulli_kl)(LOGITS, torch.zeros(2, 2)), [LOG2 - quarter, 2.0 * LOG2 - quarter], 1e-6)
    assert variant(bernoulli_mode)(LOGITS).tolist() == [[1, 0], [0, 0]]
    noise = torch.tensor([[0.26, 0.5], [0.74, 0.999]])
    assert variant(bernoulli_sample)(LOGITS, noise).tolist() == [[1, 1], [0, 0]]


def test_oracle(variant):
    logits, other = random(7, 3), random(7, 3, seed=1)
    action = (random(7, 3, seed=2) > 0.0).to(torch.int64)
    log_prob, entropy, kl = [], [], []
    for xs, ys, ks in zip(logits.tolist(), other.tolist(), action.tolist(), strict=True):
        ps, qs = ([1.0 / (1.0 + math.exp(-x)) for x in row] for row in (xs, ys))
        log_prob.append(sum(math.log(p if k else 1.0 - p) for p, k in zip(ps, ks, strict=True)))
        entropy.append(-sum(p * math.log(p) + (1 - p) * math.log(1 - p) for p in ps))
        pairs = zip(ps, qs, strict=True)
        kl.append(sum(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) for p, q in pairs))
    close(variant(bernoulli_log_prob)(logits, action), torch.tensor(log_prob, dtype=F64), 1e-10)
    close(variant(bernoulli_entropy)(logits), torch.tensor(entropy, dtype=F64), 1e-10)
    close(variant(bernoulli_kl)(logits, other), torch.tensor(kl, dtype=F64), 1e-10)


@pytest.mark.ref
@pytest.mark.parametrize(("dtype", "tol"), [(F64, 1e-12), (F32, 1e-5)])
def test_against_torch(dtype, tol):
    logits, other = random(50, 4, dtype=dtype), random(50, 4, seed=1, dtype=dtype)
    action = (random(50, 4, seed=2) > 0.0).to(torch.int64)
    p, q = (Independent(Bernoulli(logits=x), 1) for x in (logits, other))
    close(bernoulli_log_prob(logits, action), p.log_prob(action.to(dtype)), tol)
    close(bernoulli_entropy(logits), p.entropy(), tol)
    close(bernoulli_kl(logits, other), kl_divergence(p, q), tol)
    assert torch.equal(bernoulli_mode(logits), p.mode.to(torch.int64))


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("x", [30.0, 90.0, 700.0])
def test_extreme_logits_keep_their_digits(dtype, x):
    """At probabilities near 0 and 1, the entropy is (1 + x) exp(-x), and the log-probabilities are -x and -exp(-x)."""
    x = x if dtype == F64 else min(x, 80.0)  # exp(-90) is below the normal floats
    for sign in (1.0, -1.0):
        logits = torch.tensor([sign * x], dtype=dtype)
        one, zero = (bernoulli_log_prob(logits, torch.tensor([k])) for k in (1, 0))
        likely, unlikely = (one, zero) if sign > 0.0 else (zero, one)
        torch.testing.assert_close(likely.item(), -math.exp(-x), rtol=1e-5, atol=0.0)
        torch.testing.assert_close(unlikely.item(), -x, rtol=1e-6, atol=0.0)
        entropy = bernoulli_entropy(logits).item()
        torch.testing.assert_close(entropy, (1.0 + x) * math.exp(-x), rtol=1e-5, atol=0.0)


def test_the_lowest_float_is_a_probability_of_zero(variant):
    """`mask_logits` sets this logit for an action that is not allowed."""
    lowest = torch.full((1, 1), torch.finfo(F32).min)
    close(variant(bernoulli_entropy)(lowest), [0.0], 0.0)
    close(variant(bernoulli_kl)(lowest, torch.zeros(1, 1)), [LOG2], 1e-6)
    assert variant(bernoulli_sample)(lowest, torch.full((1, 1), 1.0 - 2.0**-24)).tolist() == [[0]]
    assert variant(bernoulli_sample)(-lowest, torch.zeros(1, 1)).tolist() == [[1]]


def test_samples_have_their_probabilities():
    p = torch.tensor([0.01, 0.3, 0.9]).expand(100_000, 3)
    sample = bernoulli_sample(torch.logit(p), rng.uniform(rng.key(0), p.shape)).double()
    error = (p[0] * (1.0 - p[0]) / len(p)).sqrt()
    assert bool(((sample.mean(0) - p[0]).abs() < 5.0 * error).all())  # 5 standard errors


@given(st.lists(st.floats(-50.0, 50.0), min_size=1, max_size=4), st.floats(-50.0, 50.0))
def test_properties(logits, other):
    x = torch.tensor(logits, dtype=F64)
    y = torch.full_like(x, other)
    assert 0.0 <= float(bernoulli_entropy(x)) <= len(logits) * LOG2 + 1e-12
    close(bernoulli_entropy(-x), bernoulli_entropy(x), 1e-12)
    assert float(bernoulli_kl(x, x)) == 0.0 and float(bernoulli_kl(x, y)) >= -1e-12
    close(bernoulli_kl(-x, -y), bernoulli_kl(x, y), 1e-12)
    assert float(bernoulli_log_prob(x, bernoulli_mode(x))) >= -len(logits) * LOG2 - 1e-12


def test_gradients():
    logits, other = random(2, 3).requires_grad_(), random(2, 3, seed=1).requires_grad_()
    action = torch.tensor([[0, 1, 1], [1, 0, 0]])
    check = torch.autograd.gradcheck
    assert check(lambda x: bernoulli_log_prob(x, action), logits) and check(bernoulli_entropy, logits)
    assert check(bernoulli_kl, (logits, other))
    assert not bernoulli_sample(logits, other.sigmoid()).requires_grad and not bernoulli_mode(logits).requires_grad


ROWS = torch.zeros(4, 3)
CALLS = {
    bernoulli_sample: (ROWS, ROWS + 0.5),
    bernoulli_mode: (ROWS,),
    bernoulli_log_prob: (ROWS, torch.ones(4, 3, dtype=torch.int64)),
    bernoulli_entropy: (ROWS,),
    bernoulli_kl: (ROWS, ROWS + 1.0),
}


@pytest.mark.parametrize("fn", CALLS, ids=lambda fn: fn.__name__)
def test_new_values_do_not_retrace(fn):
    changed = [x + 0.25 if x.is_floating_point() else torch.zeros_like(x) for x in CALLS[fn]]
    assert_no_retrace(fn, CALLS[fn], tuple(changed))


@pytest.mark.parametrize(
    ("fn", "name"), [(bernoulli_sample, "noise"), (bernoulli_log_prob, "action"), (bernoulli_kl, "other_logits")]
)
def test_wrong_shapes_are_named(fn, name):
    first, second = CALLS[fn]
    with pytest.raises(ValueError, match=rf"^{name} has shape \[4, 2\], expected \[4, 3\], the shape of logits$"):
        fn(first, second[:, :2])
    with pytest.raises(ValueError, match=rf"^{name} has shape \[4, 3\], expected \[2, 3\], the shape of logits$"):
        fn(first[:2], second)


def test_float_actions_are_refused():
    with pytest.raises(ValueError, match=r"^action has dtype float32, expected an integer dtype or bool$"):
        bernoulli_log_prob(ROWS, ROWS)
    close(bernoulli_log_prob(LOGITS, torch.tensor([[True, False], [True, False]])), [LOG3 - 3.0 * LOG2, -2.0 * LOG2])
