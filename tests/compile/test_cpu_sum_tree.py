"""Sum trees in C++ equal those of tensor operations bit for bit."""

import pytest
import torch
from support.graphs import needs_cpu_compiler

from ecrl.compile.cpu import compiled
from ecrl.compile.trace import traced
from ecrl.kernels import loop, tree_find, tree_init, tree_set
from ecrl.kernels.sum_tree import last_of_equal
from ecrl.pytree import flatten


def _inputs(leaves, batch, seed=0):
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(0, leaves, (batch,), generator=g)
    share = torch.rand(batch, generator=g, dtype=torch.float64)
    return tree_set(tree_init(leaves), torch.arange(leaves), torch.rand(leaves, generator=g) - 0.3), index, share


def _turn(tree, index, share):
    """Set priorities, of which some are 0, and search."""
    tree = tree_set(tree.clamp(min=0.0), index, (share - 0.2).clamp(min=0.0))
    return tree, tree_find(tree, share * tree[1]), tree_find(tree, (share * tree[1]).reshape(1, -1))


def _turns(tree, index, share):
    """The same in a loop that carries the tree."""

    def turn(tree, x):
        index, share = x
        tree, leaf, _ = _turn(tree, index, share)
        return tree, leaf

    return loop(turn, tree, (torch.stack((index, index.flip(0), index.sort().values)), torch.stack([share] * 3)))


@pytest.mark.slow
@needs_cpu_compiler
@pytest.mark.parametrize("fn", [_turn, _turns])
@pytest.mark.parametrize(("leaves", "batch"), [(2, 1), (64, 40), (1000, 33), (3000, 256)])
def test_a_compiled_tree_has_the_same_bits(fn, leaves, batch):
    args = _inputs(leaves, batch)
    tensors, structure = flatten(args)
    graph, _ = traced(_turn, structure, tensors)
    targets = {node.target for node in graph.graph.nodes}
    assert {torch.ops.ecrl.tree_find.default, torch.ops.ecrl.last_of_equal.default} <= targets
    out = compiled(fn, structure, tensors)[0](*tensors)
    assert all(map(torch.equal, out, fn(*args)))


def _packed(tree, index, share):
    """A loop that carries another number of float64, which shares a buffer with a small tree, and parts of tensors."""
    largest, masses = share.amax(), share * tree[1]

    def turn(carry, x):
        largest, tree = carry
        index, mass = x
        leaf = tree_find(tree, mass)
        return (largest + mass.sum(), tree_set(tree, index, mass)), (leaf, tree[-3:])

    rows = torch.stack((index, index.flip(0), index)), torch.stack((masses, 0.5 * masses, masses.flip(0)))
    trees = torch.stack((2.0 * tree, tree))
    parts = tree_find(tree, masses[1:]), tree_find(trees[1], masses), tree_set(tree, rows[0][1, 1:], masses[1:])
    return loop(turn, (largest, tree), rows), parts


@pytest.mark.slow
@needs_cpu_compiler
@pytest.mark.parametrize("leaves", [32, 5000])
def test_parts_of_tensors_are_read_where_they_start(leaves):
    args = _inputs(leaves, 9)
    args = args[0].clamp(min=0.0), *args[1:]
    tensors, structure = flatten(args)
    out = compiled(_packed, structure, tensors)[0](*tensors)
    assert all(map(torch.equal, out, flatten(_packed(*args))[0]))


@pytest.mark.slow
@needs_cpu_compiler
def test_a_tree_of_masses_is_searched():
    tree = _inputs(16, 4)[0].clamp(min=0.0)
    tensors, structure = flatten((tree,))
    assert torch.equal(compiled(lambda t: tree_find(t, t), structure, tensors)[0](tree)[0], tree_find(tree, tree))


@pytest.mark.slow
@needs_cpu_compiler
def test_a_batch_of_trees_is_searched_by_tensor_operations():
    """The operators have no rules for vmap."""
    args = [torch.stack(leaves) for leaves in zip(*(_inputs(64, 10, seed) for seed in range(3)), strict=True)]
    batch = torch.func.vmap(_turn)
    leaves, structure = flatten(tuple(args))
    out = compiled(batch, structure, leaves)[0](*leaves)
    for seed in range(3):
        assert all(map(torch.equal, (x[seed] for x in out), _turn(*_inputs(64, 10, seed))))


@pytest.mark.slow
@needs_cpu_compiler
@pytest.mark.parametrize("index", [[4, 4, 4], [0, 1, 1, 2, 9, 9], [9, 1, 9, 0, 1, 9, 3], [5]])
def test_the_last_of_equal_entries(index):
    expected = [max(j for j, other in enumerate(index) if other == value) for value in index]
    tensors, structure = flatten((torch.tensor(index),))
    priority = torch.arange(1.0, len(index) + 1)

    def set_all(index):
        return tree_set(tree_init(16), index, priority)

    assert last_of_equal(*tensors).tolist() == expected
    assert torch.equal(compiled(set_all, structure, tensors)[0](*tensors)[0], set_all(*tensors))
