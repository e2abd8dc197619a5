"""Large carries of compiled loops are written in place, with the results of copies."""

from typing import Any

import pytest
import torch
from support.graphs import needs_cpu_compiler
from torch import Tensor

from ecrl.compile import cpu, cpu_carries
from ecrl.compile.jit import Jit
from ecrl.kernels import loop, tree_find, tree_set

SIZE = 4096
"""Leaves of the tree, which has twice as many elements."""


def draw_and_set(tree: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Set priorities, draw leaves, and set their priorities."""
    index, share = x
    tree = tree_set(tree, index, 1.0 + share)
    drawn = tree_find(tree, share * tree[1])
    probability = tree[SIZE + drawn] / tree[1]
    return tree_set(tree, drawn, share * probability), probability


def read_after_write(tree: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a part of the old carry, which a write in place would change."""
    index, share = x
    return tree.index_put((index,), share), tree[:64] + 1.0


def view_after_write(tree: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Read the old carry through a view, after a write."""
    view, (index, share) = tree.unflatten(0, (2, -1))[0], x
    new = tree.index_put((index,), share)
    return new, view.index_select(0, index % SIZE) + new.index_select(0, index)


def old_and_new(tree: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Compare the old carry with the new one in one operation, so a write in place is impossible."""
    new = tree.index_put(x[:1], x[1])
    return new, (new - tree).sum()


def return_old(tree: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the whole old carry, which the loop stacks as a copy."""
    return tree.index_put(x[:1], x[1]), tree


def another_write(tree: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Write in place to another tensor too. The compiler makes this write a plain operation before the pass."""
    (index, share), other = x, x[1].clone()
    new, view = tree.index_put((index,), share), other[:8]
    other.mul_(2.0)
    return new, tree[:8] + view


def add(tree: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Accumulate, so the order of equal indices does not matter."""
    return tree.index_put((x[0],), x[1], accumulate=True), tree.index_select(0, x[0])


def two_trees(carry: tuple[Tensor, Tensor], x: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Write one of two large carries with values of the other."""
    first, second = carry
    index, share = x
    old = share + first.index_select(0, index)
    return (first.index_put((index,), second.index_select(0, index)), second + 1.0), old


CASES = {
    "a tree": (draw_and_set, 1),
    "read": (read_after_write, 1),
    "view": (view_after_write, 1),
    "both": (old_and_new, 0),
    "old": (return_old, 1),
    "another write": (another_write, 1),
    "add": (add, 0),
    "two": (two_trees, 1),
}


@needs_cpu_compiler
@pytest.mark.parametrize("case", CASES)
def test_a_loop_in_place_equals_copies(case, monkeypatch):
    body, expected_count = CASES[case]
    changed: list[int] = []
    write = cpu_carries._write_in_place

    def counted(*args: Any) -> list[int]:
        out = write(*args)
        changed.extend(out)
        return out

    def run(carry: Any, index: Tensor, share: Tensor) -> Any:
        after, ys = loop(body, carry, (index, share))
        return after, ys, loop(body, after, (index, share))[1]  # the first carry is read again, after the loop

    monkeypatch.setattr(cpu_carries, "_write_in_place", counted)
    monkeypatch.setitem(cpu._OPTIONS, "force_disable_caches", True)
    g = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randperm(SIZE, generator=g)[:16] for _ in range(5)])
    share, carry = (torch.rand(size, generator=g, dtype=torch.float64) for size in ((5, 16), (2 * SIZE,)))
    start: Any = (carry, carry.flip(0)) if case == "two" else carry
    expected, before = run(start, index, share), carry.clone()
    compiled = Jit(strict=True)(run)
    for _ in range(2):
        after, ys, again = compiled(start, index, share)
        torch.testing.assert_close((after, ys, again), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(carry, before), "the argument keeps its values"
    assert len(changed) == 2 * expected_count
