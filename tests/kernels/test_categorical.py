"""The categorical distribution: log-probabilities, entropies and samples, with and without masks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, close
from torch.distributions import Categorical, kl_divergence

from ecrl import rng
from ecrl.kernels import (
    categorical_entropy,
    categorical_kl,
    categorical_log_prob,
    categorical_mode,
    categorical_sample,
    mask_logits,
    multi_discrete_entropy,
    multi_discrete_kl,
    multi_discrete_log_prob,
    multi_discrete_mode,
    multi_discrete_sample,
)

T, F = True, False
F64 = torch.float64
NVEC = (2, 3, 1)
# p = 1/4, 3/4; 1/2, 1/2; all on the second
LOGITS = torch.tensor([[0.0, math.log(3.0)], [2.0, 2.0], [-200.0, 0.0]])
LOG2, LOG3 = math.log(2.0), math.log(3.0)


def random_logits(*shape, seed=0, dtype=F64):
    return 3.0 * rng.normal(rng.key(seed), shape, dtype)


def test_categorical_by_hand(variant):
    # H(1/4, 3/4) = log(4) / 4 + 3/4 (log(4) - log(3)) = 2 log(2) - 3/4 log(3); exp(-200) is 0 in float32
    close(variant(categorical_entropy)(LOGITS), [2.0 * LOG2 - 0.75 * LOG3, LOG2, 0.0], 1e-6)
    close(variant(categorical_log_prob)(LOGITS, torch.tensor([0, 1, 1])), [-2.0 * LOG2, -LOG2, 0.0], 1e-6)
    # KL to the uniform is log(2) - H
    kl = variant(categorical_kl)(LOGITS, torch.zeros(3, 2))
    close(kl, [0.75 * LOG3 - LOG2, 0.0, LOG2], 1e-6)
    assert variant(categorical_mode)(LOGITS).tolist() == [1, 0, 1]  # the first of equals
    noise = torch.tensor([[LOG3 + 0.1, 0.0], [0.0, 0.1], [199.0, 0.0]])
    assert variant(categorical_sample)(LOGITS, noise).tolist() == [0, 1, 1]


def test_mask_by_hand(variant):
    # without its second entry (1, 2, 3) is (0, 2 - log(...)): p = 1 / (1 + e^2), 0, e^2 / (1 + e^2)
    masked = variant(mask_logits)(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([T, F, T]))
    close(masked.softmax(-1), [1.0 / (1.0 + math.e**2), 0.0, math.e**2 / (1.0 + math.e**2)], 1e-6)
    assert float(masked.softmax(-1)[1]) == 0.0
    low = variant(mask_logits)(torch.tensor([0.0, -1e30]), torch.tensor([F, T]))
    assert low.softmax(-1).tolist() == [0.0, 1.0]  # however low the allowed ones are
    nothing = variant(mask_logits)(torch.tensor([1.0, 2.0]), torch.tensor([F, F]))
    close(nothing.softmax(-1), [0.5, 0.5])  # as documented: uniform


def log_softmax(row):
    return row - row.max() - math.log(sum(math.exp(x - row.max()) for x in row))


def test_categorical_oracle(variant):
    logits, other, action = random_logits(20, 5), random_logits(20, 5, seed=1), torch.arange(20) % 5
    rows = [(log_softmax(a), log_softmax(b)) for a, b in zip(logits.numpy(), other.numpy(), strict=True)]
    entropy = [-sum(math.exp(lp) * lp for lp in a) for a, _ in rows]
    kl = [sum(math.exp(lp) * (lp - lq) for lp, lq in zip(a, b, strict=True)) for a, b in rows]
    close(variant(categorical_entropy)(logits), torch.tensor(entropy, dtype=F64), 1e-12)
    close(variant(categorical_kl)(logits, other), torch.tensor(kl, dtype=F64), 1e-12)
    expected = [a[k] for (a, _), k in zip(rows, action, strict=True)]
    close(variant(categorical_log_prob)(logits, action), torch.tensor(np.array(expected)), 1e-12)


# float32: log-probabilities of size 20 carry about 1e-6
@pytest.mark.ref
@pytest.mark.parametrize(("dtype", "tol"), [(F64, 1e-10), (torch.float32, 1e-5)])
def test_categorical_against_torch(dtype, tol):
    logits, other = random_logits(4, 50, 6).to(dtype)[0], random_logits(50, 6, seed=2).to(dtype)
    p, q = Categorical(logits=logits), Categorical(logits=other)
    action = torch.arange(50) % 6
    close(categorical_log_prob(logits, action), p.log_prob(action), tol)
    close(categorical_entropy(logits), p.entropy(), tol)
    close(categorical_kl(logits, other), kl_divergence(p, q), tol)
    assert torch.equal(categorical_mode(logits), p.mode)
    assert categorical_entropy(logits).dtype == categorical_kl(logits, other).dtype == dtype


def test_sample_frequencies_follow_softmax():
    n, logits = 100_000, torch.tensor([0.0, 1.0, -2.0, 0.5])
    index = categorical_sample(logits.expand(n, 4), rng.gumbel(rng.key(0), (n, 4)))
    p = logits.softmax(-1)
    gap = (torch.bincount(index, minlength=4) / n - p).abs()
    assert bool((gap < 5.0 * torch.sqrt(p * (1.0 - p) / n)).all())  # five standard errors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_masks_stay_finite(dtype):
    logits = (4.0 * random_logits(64, 6)).to(dtype).requires_grad_()
    other = (4.0 * random_logits(64, 6, seed=1)).to(dtype).requires_grad_()
    mask = torch.arange(64)[:, None] // 2 ** torch.arange(6) % 2 == 1  # every subset of six actions
    mask, allowed = mask[1:], mask[1:].float().argmax(-1)
    a, b = mask_logits(logits[1:], mask), mask_logits(other[1:], mask)
    assert bool((a.softmax(-1)[~mask] == 0.0).all())
    for out in (categorical_entropy(a), categorical_kl(a, b), categorical_log_prob(a, allowed)):
        assert out.dtype == dtype and bool(out.isfinite().all())
        for grad in torch.autograd.grad(out.sum(), (logits, other), retain_graph=True, allow_unused=True):
            assert grad is None or bool(grad.isfinite().all() and (grad[1:][~mask] == 0.0).all())
    one_allowed = mask.sum(-1) == 1
    assert categorical_entropy(a)[one_allowed].tolist() == categorical_kl(a, b)[one_allowed].tolist() == [0.0] * 6
    close(
        categorical_entropy(a),
        categorical_entropy(mask_logits(logits[1:].double(), mask)),
        8.0 * torch.finfo(dtype).eps,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_forbidden_actions_are_never_taken(dtype):
    n, mask = 20_000, torch.tensor([F, T, F, T])
    logits = mask_logits(torch.tensor([60.0, -60.0, 0.0, -61.0], dtype=dtype), mask).expand(n, 4)
    taken = categorical_sample(logits, rng.gumbel(rng.key(0), (n, 4)).to(dtype))
    assert set(taken.tolist()) == set(rng.categorical(rng.split(rng.key(0), n), logits).tolist()) == {1, 3}
    assert categorical_mode(logits[0]) == 1


ROWS = st.lists(st.lists(st.floats(-50.0, 50.0), min_size=4, max_size=4), min_size=2, max_size=2)


@given(ROWS, st.floats(-100.0, 100.0))
def test_categorical_properties(rows, shift):
    p, q = torch.tensor(rows, dtype=F64)
    assert -1e-12 <= float(categorical_entropy(p)) <= math.log(4.0) + 1e-12
    assert float(categorical_kl(p, q)) >= -1e-12
    assert float(categorical_kl(p, p)) == 0.0
    close(categorical_entropy(p + shift), categorical_entropy(p), 1e-10)
    close(categorical_kl(p + shift, q), categorical_kl(p, q), 1e-10)
    total = sum(categorical_log_prob(p, torch.tensor(k)).exp() for k in range(4))
    close(total, 1.0, 1e-12)
    order = torch.tensor([2, 0, 3, 1])
    close(categorical_entropy(p[order]), categorical_entropy(p), 1e-12)


def test_gradients():
    logits, other = (random_logits(3, 4, seed=s).requires_grad_() for s in (0, 1))
    mask, action = torch.tensor([T, F, T, T]).expand(3, 4), torch.tensor([0, 2, 3])
    check = torch.autograd.gradcheck
    assert check(lambda x: categorical_log_prob(mask_logits(x, mask), action), logits)
    assert check(lambda x: categorical_entropy(mask_logits(x, mask)), logits)
    assert check(lambda x, y: categorical_kl(mask_logits(x, mask), mask_logits(y, mask)), (logits, other))
    assert not categorical_sample(logits, other).requires_grad and not categorical_mode(logits).requires_grad


@pytest.mark.parametrize("offset", [0.0, 1e8, -1e8, 1e30, -3e38])
def test_large_logits_keep_the_noise(variant, offset):
    """Near 1e8 a float32 has steps of 8: the noise decides between equal logits, and differences remain."""
    step = max(abs(offset) / 16, 64.0)
    logits = torch.tensor([offset, offset, offset - step, offset]).expand(3, 4)
    noise = torch.tensor([[0.1, 0.3, 9.0, 0.2], [0.3, 0.1, 0.2, 0.2], [-1.0, -2.0, 3.0, -0.5]])
    assert variant(categorical_sample)(logits, noise).tolist() == [1, 0, 3]


def test_a_row_without_allowed_actions_is_sampled_uniformly(variant):
    sample = lambda logits, mask, noise: categorical_sample(mask_logits(logits, mask), noise)  # noqa: E731
    noise = torch.tensor([[0.1, 0.3, 0.2], [0.1, 0.3, 0.4]])
    none = torch.zeros(2, 3, dtype=torch.bool)
    assert variant(sample)(torch.tensor([[9.0, 0.0, 1.0]]).expand(2, 3), none, noise).tolist() == [1, 2]


# multi-discrete: everything is the sum, or the stack, of its parts


def test_multi_discrete_by_hand(variant):
    # parts (1/4, 3/4), (1/2, 1/2, 0), (1): log p = -log 4, -log 2, 0
    logits = torch.tensor([0.0, LOG3, 1.0, 1.0, -200.0, 7.0])
    action = torch.tensor([0, 1, 0])
    close(variant(multi_discrete_log_prob)(logits, action, nvec=NVEC), -3.0 * LOG2, 1e-6)
    close(variant(multi_discrete_entropy)(logits, nvec=NVEC), 3.0 * LOG2 - 0.75 * LOG3, 1e-6)
    # KL to uniform: (log 2 - H1) + (log 3 - H2) + 0 = (3/4 log 3 - log 2) + (log 3 - log 2)
    close(variant(multi_discrete_kl)(logits, torch.zeros(6), nvec=NVEC), 1.75 * LOG3 - 2.0 * LOG2, 1e-6)
    assert variant(multi_discrete_mode)(logits, nvec=NVEC).tolist() == [1, 0, 0]
    noise = torch.tensor([2.0, 0.0, 0.0, 0.1, 0.0, -9.0])
    assert variant(multi_discrete_sample)(logits, noise, nvec=NVEC).tolist() == [0, 1, 0]


def test_multi_discrete_is_its_parts(variant):
    logits, other, noise = (random_logits(2, 7, 6, seed=s) for s in (0, 1, 2))
    cut = [torch.tensor_split(x, (2, 5), -1) for x in (logits, other, noise)]
    action = torch.stack([torch.arange(14).reshape(2, 7) % n for n in NVEC], -1)
    a, b, c = cut
    log_prob = sum(categorical_log_prob(x, k) for x, k in zip(a, action.unbind(-1), strict=True))
    close(variant(multi_discrete_log_prob)(logits, action, nvec=NVEC), log_prob, 1e-12)
    close(variant(multi_discrete_entropy)(logits, nvec=NVEC), sum(map(categorical_entropy, a)), 1e-12)
    close(variant(multi_discrete_kl)(logits, other, nvec=NVEC), sum(map(categorical_kl, a, b)), 1e-12)
    sample = torch.stack(list(map(categorical_sample, a, c)), -1)
    assert torch.equal(variant(multi_discrete_sample)(logits, noise, nvec=NVEC), sample)
    mode = torch.stack(list(map(categorical_mode, a)), -1)
    assert torch.equal(variant(multi_discrete_mode)(logits, nvec=NVEC), mode)


def test_multi_discrete_gradients():
    logits, other = (random_logits(2, 6, seed=s).requires_grad_() for s in (0, 1))
    action = torch.zeros(2, 3, dtype=torch.int64)
    check = torch.autograd.gradcheck
    assert check(lambda x: multi_discrete_log_prob(x, action, nvec=NVEC), logits)
    assert check(lambda x: multi_discrete_entropy(x, nvec=NVEC), logits)
    assert check(lambda x, y: multi_discrete_kl(x, y, nvec=NVEC), (logits, other))


CALLS = {
    mask_logits: (torch.zeros(3, 6), torch.ones(3, 6, dtype=torch.bool)),
    categorical_sample: (torch.zeros(3, 6), torch.zeros(3, 6)),
    categorical_mode: (torch.zeros(3, 6),),
    categorical_log_prob: (torch.zeros(3, 6), torch.zeros(3, dtype=torch.int64)),
    categorical_entropy: (torch.zeros(3, 6),),
    categorical_kl: (torch.zeros(3, 6), torch.ones(3, 6)),
    multi_discrete_sample: (torch.zeros(3, 6), torch.zeros(3, 6)),
    multi_discrete_mode: (torch.zeros(3, 6),),
    multi_discrete_log_prob: (torch.zeros(3, 6), torch.zeros(3, 3, dtype=torch.int64)),
    multi_discrete_entropy: (torch.zeros(3, 6),),
    multi_discrete_kl: (torch.zeros(3, 6), torch.ones(3, 6)),
}


def named(fn):
    return {"nvec": NVEC} if fn.__name__.startswith("multi") else {}


@pytest.mark.parametrize("fn", CALLS, ids=lambda fn: fn.__name__)
def test_new_values_do_not_retrace(fn):
    changed = [x + 1.5 if x.is_floating_point() else torch.zeros_like(x) for x in CALLS[fn]]
    assert_no_retrace(fn, CALLS[fn], tuple(changed), **named(fn))


@pytest.mark.parametrize(
    ("fn", "wrong", "message"),
    [
        (mask_logits, 0, "action_mask has shape .* the shape of logits"),
        (mask_logits, 1, "action_mask has shape"),
        (categorical_sample, 0, "noise has shape .* the shape of logits"),
        (categorical_sample, 1, "noise has shape"),
        (categorical_log_prob, 0, "for logits"),
        (categorical_log_prob, 1, "action has shape"),
        (categorical_kl, 0, "other_logits has shape .* the shape of logits"),
        (categorical_kl, 1, "other_logits has shape"),
        (multi_discrete_sample, 0, "logits has 5 entries"),
        (multi_discrete_sample, 1, "noise has 5 entries"),
        (multi_discrete_mode, 0, "logits has 5 entries"),
        (multi_discrete_log_prob, 0, "logits has 5 entries"),
        (multi_discrete_log_prob, 1, "action has shape"),
        (multi_discrete_entropy, 0, "logits has 5 entries"),
        (multi_discrete_kl, 0, "logits has 5 entries"),
        (multi_discrete_kl, 1, "other_logits has 5 entries"),
    ],
)
def test_wrong_shapes_are_named(fn, wrong, message):
    args = list(CALLS[fn])
    args[wrong] = args[wrong][..., :-1]
    if fn is categorical_log_prob and wrong == 0:
        args[0] = torch.zeros(2, 6)
    with pytest.raises(ValueError, match=message):
        fn(*args, **named(fn))
