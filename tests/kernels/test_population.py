"""Truncation selection and perturbation: hand tables, a plain loop, ties, NaN and bad arguments."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from ecrl.kernels import perturbed, truncation_parents

NUMBERS = st.one_of(st.sampled_from([0.0, -1.0, 1.0, math.inf, -math.inf, math.nan]), st.floats(-5.0, 5.0, width=32))


def parents(fitness, uniform, count):
    """Choose the parents in plain Python."""
    order = sorted(range(len(fitness)), key=lambda i: -math.inf if math.isnan(fitness[i]) else fitness[i])
    chosen = list(range(len(fitness)))
    for i in order[:count]:
        chosen[i] = order[len(order) - 1 - int(count * uniform[i])]
    return chosen


def test_the_worst_get_a_parent_among_the_best():
    fitness = torch.tensor([5.0, 1.0, 4.0, 0.0, 3.0, 2.0])
    uniform = torch.tensor([0.0, 0.0, 0.0, 0.99, 0.0, 0.0])
    assert truncation_parents(fitness, uniform, count=2).tolist() == [0, 0, 2, 2, 4, 5]
    assert truncation_parents(fitness, uniform, count=0).tolist() == [0, 1, 2, 3, 4, 5]
    assert truncation_parents(fitness[:1], uniform[:1], count=0).tolist() == [0]


@given(st.lists(st.tuples(NUMBERS, st.floats(0.0, 0.875, width=32)), min_size=1, max_size=9), st.data())
def test_the_parents_are_those_of_a_plain_loop(rows, data):
    count = data.draw(st.integers(0, len(rows) // 2))
    fitness, uniform = (list(column) for column in zip(*rows, strict=True))
    actual = truncation_parents(torch.tensor(fitness), torch.tensor(uniform), count=count)
    assert actual.tolist() == parents(fitness, uniform, count)
    assert actual.dtype == torch.int64


def test_leading_axes_are_separate_populations():
    fitness, uniform = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(1)), torch.full((3, 2, 6), 0.6)
    actual = truncation_parents(fitness, uniform, count=3)
    for i in range(3):
        for j in range(2):
            assert actual[i, j].tolist() == parents(fitness[i, j].tolist(), uniform[i, j].tolist(), 3)


def test_a_uniform_number_that_rounds_to_the_count_stays_among_the_best():
    nearly_one = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0)).half().float().repeat(4)  # rounds to 1
    assert truncation_parents(torch.arange(4.0), nearly_one, count=2).tolist() == [2, 2, 2, 3]


@pytest.mark.parametrize("count", [-1, 3])
def test_a_count_above_half_of_the_members_is_refused(count):
    with pytest.raises(ValueError, match=f"count is {count}, expected 0 to 2, half of the 5 members"):
        truncation_parents(torch.zeros(5), torch.zeros(5), count=count)


def test_a_perturbed_value_is_multiplied_or_divided_and_stays_in_its_range():
    x, is_new = torch.tensor([1.0, 1.0, 1.0, 4.0, 0.3, 9.0]), torch.tensor([True, True, False, True, True, False])
    uniform = torch.tensor([0.0, 0.5, 0.0, 0.4999, 0.9, 0.9])
    y = perturbed(x, is_new, uniform, factor=2.0, low=0.25, high=5.0)
    assert y.tolist() == [2.0, 0.5, 1.0, 5.0, 0.25, 9.0]
    assert perturbed(x.half(), is_new, uniform, factor=2.0, low=0.25, high=5.0).dtype == torch.float16


def test_the_gradient_of_a_perturbed_value():
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    is_new, uniform = torch.tensor([True, True, False]), torch.tensor([0.1, 0.9, 0.1])
    assert gradcheck(lambda x: perturbed(x, is_new, uniform, factor=1.2, low=0.0, high=9.0), (x,))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="uniform"):
        truncation_parents(torch.zeros(4), torch.zeros(3), count=1)
    with pytest.raises(ValueError, match="is_new"):
        perturbed(torch.zeros(2), torch.zeros(2), torch.zeros(2), factor=2.0, low=0.0, high=1.0)
