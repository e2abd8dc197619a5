"""Means and weights of sequences of tokens: numbers by hand, loops, masks, and what the gradient reaches."""

from math import exp, inf, nan

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.checks import assert_pure, close

from ecrl.kernels import (
    fixed_length_mean,
    group_centered,
    masked_sequence_importance,
    overlong_penalty,
    sequence_mean,
    token_mean,
    truncated_importance,
    truncated_sequence_importance,
    whiten,
)

F64 = torch.float64
T, F = True, False
seeds = st.integers(0, 2**31)
MEANS = {token_mean: {}, sequence_mean: {}, fixed_length_mean: {"length": 4}}
WEIGHTS = [truncated_importance, truncated_sequence_importance, masked_sequence_importance]
each_mean = pytest.mark.parametrize("kernel", MEANS, ids=lambda k: k.__name__)
each_weight = pytest.mark.parametrize("kernel", WEIGHTS, ids=lambda k: k.__name__)


def random_batch(seed, *shape, share=0.7):
    """Return two float tensors and a mask with at least one unmasked token."""
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(shape, generator=g, dtype=F64) for _ in range(2))
    mask = torch.rand(shape, generator=g) < share
    mask.view(-1)[0] = True
    return x, y, mask


def rows(x, mask):
    """Return the unmasked entries of each sequence that has any, as Python floats."""
    kept = [[float(v) for v, counted in zip(*row, strict=True) if counted] for row in zip(x, mask, strict=True)]
    return [row for row in kept if row]


# The unmasked tokens are (1, 3), (5), (2, 4, 9) and none. Their sums are 4, 5, 15 and their means 2, 5, 5.
X = [[1.0, 3.0, nan], [inf, 5.0, nan], [2.0, 4.0, 9.0], [nan, nan, -inf]]
MASK = [[T, T, F], [F, T, F], [T, T, T], [F, F, F]]


@pytest.mark.parametrize(("kernel", "expected"), [(token_mean, 24 / 6), (sequence_mean, 12 / 3)])
def test_means_by_hand(variant, kernel, expected):
    close(variant(kernel)(torch.tensor(X), torch.tensor(MASK)), expected)


def test_fixed_length_mean_by_hand(variant):
    close(variant(fixed_length_mean)(torch.tensor(X), torch.tensor(MASK), length=4), 24 / (4 * 3))
    close(fixed_length_mean(torch.tensor(X), torch.tensor(MASK), length=torch.tensor(1.0)), 24 / 3)


@each_mean
@given(seed=seeds)
def test_means_against_loop(kernel, seed):
    x, _, mask = random_batch(seed, 5, 6, share=0.4)
    kept = rows(x, mask)
    total, count = sum(map(sum, kept)), sum(map(len, kept))
    expected = {
        token_mean: total / count,
        sequence_mean: sum(sum(row) / len(row) for row in kept) / len(kept),
        fixed_length_mean: total / (4 * len(kept)),
    }
    actual = assert_pure(kernel, x.masked_fill(~mask, nan), mask, **MEANS[kernel])
    close(actual, torch.tensor(expected[kernel], dtype=F64), tol=1e-12)


@each_mean
@pytest.mark.parametrize("junk", [nan, inf, -inf])
def test_gradients_of_means_are_weights(kernel, junk):
    """The gradient is the weight of a token: the same for all, 1 / its sequence's count, or 1 / length."""
    _, _, mask = random_batch(0, 5, 6, share=0.4)
    x = torch.zeros(5, 6, dtype=F64).masked_fill(~mask, junk).requires_grad_()
    (grad,) = torch.autograd.grad(kernel(x, mask, **MEANS[kernel]), x)
    count, sequences = mask.sum(-1, keepdim=True).expand(5, 6), int(mask.any(-1).sum())
    expected = {
        token_mean: torch.full((5, 6), 1 / int(mask.sum()), dtype=F64),
        sequence_mean: 1 / (count.clamp(min=1).to(F64) * sequences),
        fixed_length_mean: torch.full((5, 6), 1 / (4 * sequences), dtype=F64),
    }
    close(grad, expected[kernel].masked_fill(~mask, 0.0), tol=1e-12)


@each_mean
def test_gradcheck_of_means(kernel):
    x, _, mask = random_batch(1, 4, 5)
    assert torch.autograd.gradcheck(lambda x: kernel(x, mask, **MEANS[kernel]), [x.requires_grad_()])


@each_mean
@given(seed=seeds)
def test_padding_order_and_leading_axes_do_not_change_a_mean(kernel, seed):
    x, _, mask = random_batch(seed, 4, 6)
    expected = kernel(x, mask, **MEANS[kernel])
    tokens, sequences = (torch.randperm(n, generator=torch.Generator().manual_seed(seed)) for n in (6, 4))
    close(kernel(x[sequences][:, tokens], mask[sequences][:, tokens], **MEANS[kernel]), expected, tol=1e-12)
    more_x, more_mask = torch.full((6, 8), nan, dtype=F64), torch.zeros(6, 8, dtype=torch.bool)
    more_x[:4, :6], more_mask[:4, :6] = x, mask
    close(kernel(more_x, more_mask, **MEANS[kernel]), expected, tol=1e-12)
    close(kernel(x.view(2, 2, 6), mask.view(2, 2, 6), **MEANS[kernel]), expected, tol=1e-12)


@each_mean
def test_all_masked_gives_zero_and_no_gradient(kernel):
    x = torch.full((3, 2), nan, requires_grad=True)
    out = kernel(x, torch.zeros(3, 2, dtype=torch.bool), **MEANS[kernel])
    assert out == 0.0 and not torch.autograd.grad(out, x)[0].any()


@given(seed=seeds)
def test_means_agree_on_sequences_of_equal_length(seed):
    x, _, mask = random_batch(seed, 4, 6)
    mask = torch.ones_like(mask)
    close(sequence_mean(x, mask), token_mean(x, mask), tol=1e-12)
    close(fixed_length_mean(x, mask, length=6), token_mean(x, mask), tol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@each_mean
def test_many_tokens_in_half_precision(kernel, dtype):
    x, mask = torch.ones(90, 1000, dtype=dtype), torch.ones(90, 1000, dtype=torch.bool)
    out = kernel(x, mask, **({"length": 1000} if kernel is fixed_length_mean else {}))
    assert out.dtype == dtype and out == 1.0


def test_integers_have_a_float_mean():
    x, mask = torch.tensor([[1, 2]]), torch.tensor([[T, T]])
    assert token_mean(x, mask) == sequence_mean(x, mask) == fixed_length_mean(x, mask, length=2) == 1.5


# Four scores, each with three tokens: twelve entries with the variances 0.1875 and, less the mean of pairs, 0.17045.
SCORE, THREE = [1.0, 0.0, 0.0, 0.5], torch.ones(4, 3, dtype=torch.bool)


def test_reference_values_of_whiten(variant):
    score = torch.tensor(SCORE, dtype=F64)
    expected = torch.tensor([1.443376, -0.866025, -0.866025, 0.288675], dtype=F64)
    close(variant(whiten)(score, THREE, eps=1e-8), expected.unsqueeze(1).expand(4, 3), tol=1e-6)
    centred = group_centered(score, torch.ones(4, dtype=torch.bool), group_size=2)
    expected = torch.tensor([1.21106, -1.21106, -0.60553, 0.60553], dtype=F64)
    close(variant(whiten)(centred, THREE, eps=1e-8), expected.unsqueeze(1).expand(4, 3), tol=5e-6)


@pytest.mark.parametrize("per_token", [F, T])
@given(seed=seeds)
def test_whiten_against_loop(per_token, seed):
    x, _, mask = random_batch(seed, 4, 5)
    mask[1, :2] = True
    advantage = x if per_token else x[:, 0].clone()
    every = [v for row in rows(advantage if per_token else advantage.unsqueeze(1).expand(4, 5), mask) for v in row]
    mean = sum(every) / len(every)
    std = (sum((v - mean) ** 2 for v in every) / (len(every) - 1)) ** 0.5
    assume(std > 1e-9)
    dirty = advantage.masked_fill(~mask if per_token else ~mask.any(-1), nan)
    expected = (advantage if per_token else advantage.unsqueeze(1)) - mean
    close(assert_pure(whiten, dirty, mask, eps=1e-8), (expected / std).masked_fill(~mask, 0.0), tol=1e-8)


def test_gradcheck_of_whiten():
    x, _, mask = random_batch(2, 4, 5)
    assert torch.autograd.gradcheck(lambda x: whiten(x, mask, eps=1e-3), [x[:, 0].clone().requires_grad_()])


def test_whiten_over_processes():
    """Each of three processes holds the same share: the variance divides by 3 n - 1."""
    score = torch.tensor(SCORE, dtype=F64)
    whole = whiten(score.repeat(3), THREE.repeat(3, 1), eps=1e-8)
    close(whiten(score, THREE, eps=1e-8, total=lambda part: 3 * part), whole[:4], tol=1e-12)


def test_whiten_names_bad_arguments():
    with pytest.raises(
        ValueError, match=r"advantage has shape \[3\], expected the shape of mask, \[4, 3\], or its lea"
    ):
        whiten(torch.zeros(3), THREE, eps=0.0)
    with pytest.raises(ValueError, match=r"eps has shape \[1\]"):
        whiten(torch.zeros(4), THREE, eps=torch.zeros(1))


def test_overlong_penalty_by_hand(variant):
    length = torch.tensor([0.0, 16.0, 17.0, 18.0, 20.0, 21.0, 99.0])
    expected = [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]
    close(variant(overlong_penalty)(length, max_length=20, buffer_length=4), expected)
    out = overlong_penalty(length.to(torch.int64), max_length=torch.tensor(20), buffer_length=torch.tensor(4))
    assert out.dtype == torch.float32 and out.tolist() == expected


@given(st.integers(1, 40), st.integers(1, 40), st.lists(st.integers(0, 100), min_size=1))
def test_overlong_penalty_against_loop(buffer_length, rest, lengths):
    longest = buffer_length + rest
    expected = [
        0.0 if n <= rest else -1.0 if n > longest else (rest - n) / buffer_length for n in lengths
    ]  # as the paper writes it
    actual = overlong_penalty(torch.tensor(lengths), max_length=longest, buffer_length=buffer_length)
    close(actual, expected, tol=1e-6)


def test_gradcheck_of_the_overlong_penalty():
    length = torch.tensor([3.0, 7.0, 8.5, 12.0], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda n: overlong_penalty(n, max_length=10.0, buffer_length=4.0), [length])


# The unmasked ratios are (2, 4), (1/2) and (1, 3). Their products are 8, 1/2 and 3.
RATIO, SHOWN = [[2.0, 4.0, nan], [nan, 0.5, inf], [1.0, 3.0, 0.0]], [[T, T, F], [F, T, F], [T, T, F]]
CAPPED = {
    truncated_importance: [[2.0, 3.0, 0.0], [0.0, 0.5, 0.0], [1.0, 3.0, 0.0]],
    truncated_sequence_importance: [[3.0, 3.0, 0.0], [0.0, 0.5, 0.0], [3.0, 3.0, 0.0]],
    masked_sequence_importance: [[0.0, 0.0, 0.0], [0.0, 0.5, 0.0], [3.0, 3.0, 0.0]],
}


@each_weight
def test_importance_weights_by_hand(variant, kernel):
    log_prob, cap = torch.tensor(RATIO).log(), 3.0 + 1e-5 * (kernel is masked_sequence_importance)
    close(variant(kernel)(log_prob, torch.zeros(3, 3), torch.tensor(SHOWN), cap=cap), CAPPED[kernel])


@each_weight
@given(seed=seeds, cap=st.floats(0.5, 3.0))
def test_importance_weights_against_loop(kernel, seed, cap):
    x, y, mask = random_batch(seed, 4, 5)
    expected = torch.zeros(4, 5, dtype=F64)
    for b in range(4):
        tokens = [t for t in range(5) if mask[b, t]]
        product = exp(sum(float(x[b, t] - y[b, t]) for t in tokens))
        for t in tokens:
            if kernel is truncated_importance:
                expected[b, t] = min(exp(float(x[b, t] - y[b, t])), cap)
            elif kernel is truncated_sequence_importance:
                expected[b, t] = min(product, cap)
            else:
                expected[b, t] = product if product <= cap else 0.0
    x, y = (v.masked_fill(~mask, nan).requires_grad_() for v in (x, y))
    actual = assert_pure(kernel, x, y, mask, cap=cap)
    close(actual, expected, tol=1e-10)
    assert not actual.requires_grad


@each_weight
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_importance_weights_that_overflow(kernel, dtype):
    log_prob = torch.tensor([[600.0, 0.0], [inf, 0.0], [-inf, 0.0]], dtype=dtype)
    out = kernel(log_prob, torch.zeros(3, 2, dtype=dtype), torch.ones(3, 2, dtype=torch.bool), cap=3.0)
    per_token = [[3.0, 1.0], [3.0, 1.0], [0.0, 1.0]]
    capped = 3.0 if kernel is truncated_sequence_importance else 0.0
    assert out.tolist() == (per_token if kernel is truncated_importance else [[capped] * 2] * 2 + [[0.0] * 2])


@pytest.mark.parametrize("kernel", [*MEANS, *WEIGHTS], ids=lambda k: k.__name__)
def test_bad_shapes_are_named(kernel):
    x, y, mask = random_batch(0, 3, 4)
    batch = {"x": x, "mask": mask} if kernel in MEANS else {"log_prob": x, "sampler_log_prob": y, "mask": mask}
    for name in batch:
        bad = batch | {name: torch.zeros(3, 5, dtype=batch[name].dtype)}
        with pytest.raises(ValueError, match=rf"\b{name} has shape \[3, 5\]|expected \[3, 5\], the shape of {name}$"):
            kernel(*bad.values(), **MEANS.get(kernel, {"cap": 2.0}))
