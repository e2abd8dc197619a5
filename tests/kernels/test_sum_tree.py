"""The sum tree: equal to a list of nodes bit for bit, no drift, and leaves found in proportion to their priorities."""

import re
from itertools import accumulate
from math import inf, nextafter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from support.plain_tree import PlainTree

from ecrl.kernels import tree_find, tree_init, tree_set

#            root 10
#       4             6
#    1     3       6     0
HAND = [0.0, 10.0, 4.0, 6.0, 1.0, 3.0, 6.0, 0.0]


def test_by_hand(variant):
    tree = variant(tree_set)(tree_init(4), torch.tensor([2, 0, 1]), torch.tensor([6.0, 1.0, 3.0]))
    assert tree.tolist() == HAND and tree.dtype == torch.float64
    mass = torch.tensor([[0.0, 0.75, 1.0], [3.5, 4.0, 9.5]])
    assert variant(tree_find)(tree, mass).tolist() == [[0, 0, 1], [1, 2, 2]]
    # Leaf 1 becomes 2 at last. Its sibling, leaf 0, becomes 5 in the same call. 7 + 6 = 13.
    tree = variant(tree_set)(tree, torch.tensor([1, 0, 1]), torch.tensor([9.0, 5.0, 2.0]))
    assert tree.tolist() == [0.0, 13.0, 7.0, 6.0, 5.0, 2.0, 6.0, 0.0]


@given(depth=st.integers(1, 7), batch=st.integers(1, 40), seed=st.integers(0, 2**20))
def test_every_node_equals_that_of_a_list(depth, batch, seed):
    """Rounding included, with leaves that occur several times."""
    g, size = torch.Generator().manual_seed(seed), 2**depth
    tree, plain = tree_init(size), PlainTree(size)
    for _ in range(4):
        index = torch.randint(0, size, (batch,), generator=g)
        priority = torch.rand(batch, generator=g) * (torch.rand(batch, generator=g) < 0.8)
        tree = tree_set(tree, index, priority)
        for leaf, number in zip(index.tolist(), priority.tolist(), strict=True):
            plain.set(leaf, number)
        assert tree.tolist() == plain.nodes
        if plain.nodes[1] > 0.0:
            mass = torch.rand(30, generator=g, dtype=torch.float64) * tree[1]
            assert tree_find(tree, mass).tolist() == [plain.find(x) for x in mass.tolist()]


@given(priorities=st.lists(st.integers(0, 1000), min_size=1, max_size=33).filter(any), seed=st.integers(0, 2**20))
def test_a_mass_is_found_in_its_interval(priorities, seed):
    """Whole numbers have exact sums, so a leaf is the first one whose cumulative sum is above the mass."""
    tree = tree_set(tree_init(len(priorities)), torch.arange(len(priorities)), torch.tensor(priorities).float())
    sums = [*accumulate(priorities)]
    bounds = [float(x) for total in {0, *sums[:-1]} for x in (total, nextafter(total, inf))]
    mass = torch.tensor([x for x in bounds if x < sums[-1]], dtype=torch.float64)
    expected = [next(k for k, total in enumerate(sums) if total > x) for x in mass.tolist()]
    assert tree_find(tree, mass).tolist() == expected


def test_rounding_never_leads_to_a_priority_of_zero():
    """The largest masses would pass all leaves, because the sums are rounded."""
    g, size = torch.Generator().manual_seed(0), 256
    for share in (0.02, 0.3, 0.9):
        priority = torch.rand(size, generator=g) * (torch.rand(size, generator=g) < share)
        priority[[3, 200]] = torch.tensor([1e-30, 1e12])
        tree = tree_set(tree_init(size), torch.arange(size), priority)
        total = float(tree[1])
        mass = torch.tensor([nextafter(total, 0.0), total, 2.0 * total, 0.0], dtype=torch.float64)
        assert (priority[tree_find(tree, mass)] > 0).all()
        near = (tree[256:].cumsum(0).unsqueeze(1) * (1.0 + torch.linspace(-1, 1, 9) * 1e-15)).clamp(0, total)
        assert (priority[tree_find(tree, near)] > 0).all()


@pytest.mark.parametrize("size", [64, pytest.param(2**20, marks=pytest.mark.long)])
def test_frequencies_match_priorities(size):
    g = torch.Generator().manual_seed(1)
    priority = 0.5 + torch.rand(size, generator=g)
    tree = tree_set(tree_init(size), torch.arange(size), priority)
    draws = 20 * size
    index = torch.cat(
        [tree_find(tree, torch.rand(draws // 20, generator=g, dtype=torch.float64) * tree[1]) for _ in range(20)]
    )
    expected = priority.double() / priority.double().sum() * draws
    assert chisquare(torch.bincount(index, minlength=size), expected).pvalue > 0.001


def test_sums_do_not_drift():
    g, size = torch.Generator().manual_seed(2), 32
    tree = tree_init(size)
    for _ in range(300):
        big = 10.0 ** torch.randint(-8, 9, (8,), generator=g)
        tree = tree_set(tree, torch.randint(0, size, (8,), generator=g), torch.rand(8, generator=g) * big)
    assert torch.equal(tree[1:size], tree[2:].reshape(-1, 2).sum(1))
    assert not tree_set(tree, torch.arange(size), torch.zeros(size)).any()


def test_a_tree_has_no_gradient():
    tree, priority = torch.ones(8, dtype=torch.float64, requires_grad=True), torch.ones(2, requires_grad=True)
    assert not tree_set(tree, torch.tensor([3, 0]), priority).requires_grad


def test_bad_arguments_are_named():
    index, priority = torch.tensor([0, 1]), torch.ones(2)
    for shape in ([2], [6], [4, 4]):
        for call in (lambda tree: tree_find(tree, priority), lambda tree: tree_set(tree, index, priority)):
            with pytest.raises(ValueError, match=re.escape(f"tree has shape {shape}, expected [2 * P]")):
                call(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"priority has shape \[1\], expected \[2\], the shape of index"):
        tree_set(tree_init(4), index, priority[:1])
    with pytest.raises(ValueError, match="tree_init needs size >= 1, got 0"):
        tree_init(0)
