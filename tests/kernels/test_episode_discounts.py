"""Discounts that restart with every episode."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import close

from ecrl.kernels import episode_discounts

T, F = True, False


def test_by_hand(variant):
    # gamma 1/2. Row 0 ends at steps 1 and 2, so 2 and 3 begin episodes; row 1 never ends; row 2 ends at once, and its
    # last flag is beyond what counts here.
    done = torch.tensor([[F, T, T, F], [F, F, F, F], [T, F, F, T]])
    discounts = variant(episode_discounts)(done, gamma=torch.tensor(0.5))
    close(discounts, [[1.0, 0.5, 1.0, 1.0], [1.0, 0.5, 0.25, 0.125], [1.0, 1.0, 0.5, 0.25]])


@given(done=st.lists(st.booleans(), min_size=1, max_size=30), gamma=st.sampled_from([0.0, 0.3, 0.99, 1.0]))
def test_equals_the_recursion(done, gamma):
    expected = [1.0]
    for ended in done[:-1]:
        expected.append(1.0 if ended else gamma * expected[-1])
    close(episode_discounts(torch.tensor(done), gamma=gamma), expected, tol=1e-6)


def test_gradient_with_respect_to_gamma():
    gamma, done = torch.tensor(0.9, dtype=torch.float64, requires_grad=True), torch.tensor([F, F, T, F, F])
    assert torch.autograd.gradcheck(lambda g: episode_discounts(done, gamma=g), gamma)


@pytest.mark.parametrize(("gamma", "dtype"), [(0.5, torch.float32), (torch.tensor(0.5).double(), torch.float64)])
def test_the_dtype_is_gammas(gamma, dtype):
    assert episode_discounts(torch.tensor([[F, T]]), gamma=gamma).dtype == dtype


@given(done=st.lists(st.booleans(), min_size=1, max_size=30), seed=st.integers(0, 2**31))
def test_a_discount_for_each_step_equals_the_recursion(done, seed):
    gamma, expected = torch.rand(len(done), generator=torch.Generator().manual_seed(seed)).double(), [1.0]
    for ended, now in zip(done[:-1], gamma.tolist(), strict=False):
        expected.append(1.0 if ended else now * expected[-1])
    close(episode_discounts(torch.tensor(done), gamma=gamma), torch.tensor(expected).double(), tol=1e-6)


def test_a_discount_for_each_step_by_hand(variant):
    done, gamma = torch.tensor([[F, T, F, F]]), torch.tensor([[0.5, 0.25, 0.25, 0.5]])
    close(variant(episode_discounts)(done, gamma=gamma), [[1.0, 0.5, 1.0, 0.25]])


def test_discounts_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"gamma has shape \[3\], expected a number or a 0-d tensor"):
        episode_discounts(torch.tensor([F, T]), gamma=torch.ones(3))
