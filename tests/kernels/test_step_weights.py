"""Weights of steps: by hand, and against the means over whole sequences."""

from functools import partial

import pytest
import torch
from support.checks import assert_pure, close

from ecrl.kernels import fixed_length_mean, sequence_mean, token_mean
from ecrl.kernels.step_weights import (
    fixed_length_mean_weights,
    sequence_mean_weights,
    token_mean_weights,
    weighted_step_mean,
)

F64, NAN = torch.float64, torch.nan
PAIRS = [
    (token_mean_weights, token_mean),
    (sequence_mean_weights, sequence_mean),
    (partial(fixed_length_mean_weights, length=12), partial(fixed_length_mean, length=12)),
]
NAMES = ["token", "sequence", "fixed_length"]


def test_weights_by_hand():
    """Two sequences with 3 + 1 and 2 tokens; the last step is masked."""
    count, mask = torch.tensor([[3.0, 1.0], [2.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    close(token_mean_weights(count, mask), [[3 / 6] * 2] * 2)
    close(sequence_mean_weights(count, mask), [[3 / (2 * 4)] * 2, [3 / (2 * 2)] * 2])
    close(fixed_length_mean_weights(count, mask, length=5), [[3 / (2 * 5)] * 2] * 2)


def test_the_mean_by_hand():
    x = torch.tensor([[1.0, 2.0], [3.0, NAN], [NAN, NAN]])
    token_mask = torch.tensor([[True, True], [True, False], [True, True]])
    mask, weight = torch.tensor([True, True, False]), torch.tensor([1.0, 10.0, NAN])
    close(assert_pure(weighted_step_mean, x, token_mask, mask, weight), (3.0 + 30.0) / 2)
    leaf = x.clone().requires_grad_()
    weighted_step_mean(leaf, token_mask, mask, weight).backward()
    close(leaf.grad, [[0.5, 0.5], [5.0, 0.0], [0.0, 0.0]])


@pytest.mark.parametrize(("weights", "mean"), PAIRS, ids=NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_over_all_steps_the_mean_is_that_of_whole_sequences(weights, mean, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 4, 3, generator=draw, dtype=F64)
    token_mask = torch.rand(6, 4, 3, generator=draw) < 0.6
    mask = torch.rand(6, 4, generator=draw) < 0.7
    mask[2] = False
    counts = token_mask & mask.unsqueeze(-1)
    weight = assert_pure(weights, token_mask.sum(-1).to(F64), mask)
    out = weighted_step_mean(x.masked_fill(~counts, NAN), token_mask, mask, weight)
    close(out, mean(x.flatten(1), counts.flatten(1)), tol=1e-12)
    minibatches = torch.randperm(24, generator=draw).reshape(4, 6)
    flat = x.flatten(0, 1), token_mask.flatten(0, 1), mask.flatten(), weight.flatten()
    parts = [[y[i] for y in flat] for i in minibatches]
    shares = torch.stack([part[2].sum().to(F64) / mask.sum() for part in parts])
    close((torch.stack([weighted_step_mean(*part) for part in parts]) * shares).sum(), out, tol=1e-12)


@pytest.mark.parametrize("weights", [pair[0] for pair in PAIRS], ids=NAMES)
def test_without_steps_the_mean_is_0(weights):
    no = torch.zeros(2, 3).bool()
    weight = weights(torch.ones(2, 3), no)
    assert weight.isfinite().all()
    assert weighted_step_mean(torch.full((2, 3, 2), NAN), no.unsqueeze(-1).expand(2, 3, 2), no, weight) == 0.0


@pytest.mark.parametrize("weights", [pair[0] for pair in PAIRS], ids=NAMES)
def test_two_processes_have_the_weights_of_one(weights):
    count, mask = torch.tensor([[3.0, 1.0], [2.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    seen = []
    weights(count, mask, total=lambda x: seen.append(x) or x)
    halves = [[], []]
    for i, half in enumerate(halves):
        weights(count[i : i + 1], mask[i : i + 1], total=lambda x, half=half: half.append(x) or x)
    sums = [a + b for a, b in zip(*halves, strict=True)]
    assert [float(x) for x in sums] == [float(x) for x in seen]
    for i in range(2):
        answers, own = iter(sums), slice(i, i + 1)
        mine = weights(count[own], mask[own], total=lambda x, answers=answers: next(answers))
        close(mine, weights(count, mask)[own])


@pytest.mark.parametrize("weights", [pair[0] for pair in PAIRS], ids=NAMES)
def test_shapes_and_dtypes_are_checked(weights):
    with pytest.raises(ValueError, match="mask"):
        weights(torch.ones(2, 3), torch.ones(2, 2).bool())
    with pytest.raises(ValueError, match="mask"):
        weights(torch.ones(2, 3), torch.ones(2, 3))
    yes, x = torch.ones(2, 3).bool(), torch.ones(2, 3)
    wide, narrow = torch.ones(2, 3, 4), torch.ones(3)  # they would broadcast
    for args in (
        (x, yes[:1], yes[:, 0], x[:, 0]),
        (x, yes, yes[:, 0], x),
        (x, yes, x[:, 0], x[:, 0]),
        (wide, wide.bool(), narrow.bool(), narrow),
        (x, yes, narrow.bool(), narrow),
    ):
        with pytest.raises(ValueError, match="mask"):
            weighted_step_mean(*args)
