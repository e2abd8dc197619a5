"""Masked statistics over chosen axes. `test_losses.py` tests the statistics over all axes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, close

from ecrl.kernels import explained_variance, masked_mean, masked_variance, standardize

T, F, NAN = True, False, math.nan
F64 = torch.float64
X = torch.tensor([[1.0, 3.0, NAN], [2.0, 8.0, 5.0]])
MASK = torch.tensor([[T, T, F], [T, T, T]])
AXES = [0, 1, 2, -1, -3, (0, 1), (0, 2), (-1, 0), (0, 1, 2)]
STATISTICS = {
    "masked_mean": lambda x, y, mask, axis: masked_mean(x, mask, axis=axis),
    "masked_variance": lambda x, y, mask, axis: masked_variance(x, mask, axis=axis),
    "standardize": lambda x, y, mask, axis: standardize(x, mask, eps=1e-8, axis=axis),
    "explained_variance": lambda x, y, mask, axis: explained_variance(x, y, mask, axis=axis),
}


def batch(seed, *shape, dtype=F64):
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(shape, generator=g, dtype=dtype) for _ in range(2))
    return x, y, torch.rand(shape, generator=g) < 0.7


def test_by_hand(variant):
    close(variant(masked_mean)(X, MASK, axis=0), [1.5, 5.5, 5.0])
    close(variant(masked_mean)(X, MASK, axis=-1), [2.0, 5.0])
    close(variant(masked_mean)(X, torch.zeros_like(MASK), axis=-1), [0.0, 0.0])
    close(variant(masked_variance)(X, MASK, axis=1), [1.0, 6.0])
    close(variant(masked_variance)(X, MASK, axis=0), [0.25, 6.25, 0.0])
    close(variant(masked_variance)(X, MASK), 30.8 / 5.0)  # mean 3.8: 7.84 + 0.64 + 3.24 + 17.64 + 1.44
    root = math.sqrt(0.5)
    close(variant(standardize)(X, MASK, eps=1e-8, axis=0), [[-root, -root, 0.0], [root, root, 0.0]])
    close(variant(standardize)(X, MASK, eps=1e-8, axis=-1), [[-root, root, 0.0], [-1.0, 1.0, 0.0]])
    # errors 0, 0 and 0, 4, 0 of targets 1, 3 and 2, 4, 5
    target = torch.tensor([[1.0, 3.0, NAN], [2.0, 4.0, 5.0]])
    explained = 1.0 - (32.0 / 9.0) / (14.0 / 9.0)
    close(variant(explained_variance)(X, target, MASK, axis=1), [1.0, explained])


def selected(axis, ndim):
    return {one % ndim for one in ((axis,) if isinstance(axis, int) else axis)}


def loop(name, x, y, mask, axis):
    """Each slice on its own, in NumPy. A slice has all entries of the axes in `axis`."""
    rest = [i for i in range(x.ndim) if i not in selected(axis, x.ndim)]
    out = np.zeros(x.shape if name == "standardize" else [x.shape[i] for i in rest])
    for index in np.ndindex(*[x.shape[i] for i in rest]):
        place = [slice(None)] * x.ndim
        for i, one in zip(rest, index, strict=True):
            place[i] = one
        v, w, m = (t[tuple(place)].numpy() for t in (x, y, mask))
        match name:
            case "masked_mean":
                out[index] = v[m].mean() if m.any() else 0.0
            case "masked_variance":
                out[index] = v[m].var() if m.any() else 0.0
            case "standardize":
                if m.sum() > 1:
                    out[tuple(place)] = (v - v[m].mean()) / v[m].std(ddof=1) * m
            case "explained_variance":
                out[index] = 1.0 - (w - v)[m].var() / w[m].var() if m.sum() > 1 else 0.0
    return torch.from_numpy(out)


@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("name", STATISTICS)
def test_against_slices(variant, name, axis):
    x, y, mask = batch(0, 4, 3, 5)
    expected = loop(name, x, y, mask, axis)
    close(variant(STATISTICS[name])(x, y, mask, axis), expected, 1e-11)
    junk = x.masked_fill(~mask, NAN)
    close(STATISTICS[name](junk, y.masked_fill(~mask, math.inf), mask, axis), expected, 1e-11)


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_all_axes_are_the_default(name, dtype):
    x, y, mask = batch(1, 4, 3, 5)
    x, y = x.to(dtype), y.to(dtype)
    default, every = (STATISTICS[name](x, y, mask, axis) for axis in (None, (0, 1, 2)))
    assert default.dtype == every.dtype == dtype
    close(default, every, 4.0 * torch.finfo(dtype).eps)


@given(st.integers(0, 1000), st.sampled_from(AXES))
def test_properties(seed, axis):
    x, _, mask = batch(seed, 4, 3, 5)
    close(masked_variance(3.0 * x + 7.0, mask, axis=axis), 9.0 * masked_variance(x, mask, axis=axis), 1e-9)
    close(masked_mean(3.0 * x + 7.0, mask | True, axis=axis), 3.0 * masked_mean(x, mask | True, axis=axis) + 7.0, 1e-9)
    out = standardize(x, mask, eps=1e-8, axis=axis)
    close(masked_mean(out, mask, axis=axis), torch.zeros_like(masked_mean(x, mask, axis=axis)), 1e-9)
    close(standardize(5.0 - 2.0 * x, mask, eps=1e-8, axis=axis), -out, 1e-9)
    assert not out[~mask].any()


def test_slices_of_equal_entries_become_zero_and_others_do_not():
    x = torch.tensor([[0.1, 0.1, 0.1], [1.0, 2.0, 3.0]])
    close(standardize(x, torch.ones_like(x) > 0.0, eps=0.0, axis=1), [[0.0, 0.0, 0.0], [-1.0, 0.0, 1.0]])


def test_processes_share_an_axis():
    """Two processes with the same half of a batch have the statistics of the batch of both halves."""
    x, _, mask = batch(3, 4, 5)
    both = standardize(torch.cat((x, x)), torch.cat((mask, mask)), eps=1e-8, axis=0)
    close(standardize(x, mask, eps=1e-8, axis=0, total=lambda part: part + part), both[:4], 1e-12)


@pytest.mark.parametrize("axis", [0, -1, (0, 2)], ids=str)
def test_gradients(axis):
    x, _, mask = batch(2, 3, 2, 4)
    x = x.masked_fill(~mask, NAN).requires_grad_()
    for fn in (masked_mean, masked_variance, lambda x, mask, axis: standardize(x, mask, eps=1e-8, axis=axis)):
        (grad,) = torch.autograd.grad(fn(x, mask, axis=axis).square().sum(), x)
        assert bool(grad.isfinite().all()) and not grad[~mask].any()
        entries = x.detach()[mask].requires_grad_()
        filled = lambda entries: torch.zeros_like(x).masked_scatter(mask, entries)  # noqa: E731
        assert torch.autograd.gradcheck(lambda entries: fn(filled(entries), mask, axis=axis), entries)  # noqa: B023


@pytest.mark.parametrize("name", STATISTICS)
def test_new_values_do_not_retrace(name):
    first, second = batch(0, 4, 3), batch(1, 4, 3)
    assert_no_retrace(lambda x, y, mask: STATISTICS[name](x, y, mask, -1), first, second)


@pytest.mark.parametrize("axis", [3, -4, (0, 3), (0, 0), (2, -1)], ids=str)
@pytest.mark.parametrize("name", STATISTICS)
def test_wrong_axes_are_named(name, axis):
    with pytest.raises(ValueError, match=r"^axis is .*, expected distinct axes of a tensor with shape \[4, 3, 5\]$"):
        STATISTICS[name](*batch(0, 4, 3, 5), axis)
    with pytest.raises(ValueError, match=r"^axis is \(\), expected at least one axis, or None for all axes$"):
        STATISTICS[name](*batch(0, 4, 3, 5), ())
