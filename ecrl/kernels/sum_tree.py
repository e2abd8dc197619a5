"""Sum tree, which draws an index with a probability proportional to the index's priority, in logarithmic time.

A tree with P leaves is a float64 tensor of shape `[2 * P]`, where P is a power of two. Node 1 is the root, and node 0
is not used. The children of node i are the nodes 2 i and 2 i + 1. Leaf k is node P + k. Each inner node is the sum of
its children:

    tree[i] = tree[2 * i] + tree[2 * i + 1]

A new priority changes its leaf and all nodes from the leaf to the root. Each changed inner node is recomputed as the
sum of its children. If an update has at least as many priorities as a level has nodes, the whole level is recomputed.
If an update added a difference to the nodes instead, rounding errors would grow with every update. The tree is float64,
because float32 sums of a million priorities would move one percent of the draws to wrong leaves.

Source: Schaul et al. 2016, arXiv:1511.05952, appendix B.2.1.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ecrl.types import same_shape


def tree_init(size: int, device: torch.device | str | None = None) -> Tensor:
    """Return a sum tree whose priorities are all 0.

    Args:
        size: number of priorities, at least 1.
        device: device of the tree.

    Returns: float64 `[2 * P]`, where P is the smallest power of two that is at least 2 and at least `size`.
    Gradient: none.
    Raises: ValueError if `size < 1`.

    >>> len(tree_init(5))
    16
    """
    if size < 1:
        raise ValueError(f"tree_init needs size >= 1, got {size}")
    return torch.zeros(2 << max(size - 1, 1).bit_length(), dtype=torch.float64, device=device)


def _depth(tree: Tensor) -> int:
    """Return the number of levels below the root. Raise ValueError if the tensor is not a sum tree."""
    size = len(tree) if tree.ndim == 1 else 0
    if size < 4 or size & (size - 1):
        raise ValueError(f"tree has shape {list(tree.shape)}, expected [2 * P], where P is a power of two, at least 2")
    return size.bit_length() - 2


def tree_find(tree: Tensor, mass: Tensor) -> Tensor:
    """Return the first leaf at which the cumulative sum of the priorities exceeds `mass`.

        leaf = min k with priority[0] + ... + priority[k] > mass

    The search begins at the root. If the mass is smaller than the value of the left child, the search continues at the
    left child. Otherwise, the value of the left child is subtracted from the mass, and the search continues at the
    right child. The search never continues at a child whose value is 0, unless all priorities are 0.

    Args:
        tree: a sum tree.
        mass: `[*B]` float64, at least 0 and below `tree[1]`, the sum of all priorities.

    Returns: int64 `[*B]`.
    Gradient: none.
    Raises: ValueError if `tree` is not `[2 * P]`.
    Source: Schaul et al. 2016, arXiv:1511.05952, appendix B.2.1.

    >>> tree = tree_set(tree_init(4), torch.arange(4), torch.tensor([1.0, 0.0, 2.0, 4.0]))
    >>> tree_find(tree, torch.tensor([0.0, 0.9, 1.0, 2.9, 3.0, 6.9])).tolist()
    [0, 0, 2, 2, 3, 3]
    """
    _depth(tree)
    return _FIND[0](tree, mass.flatten()).reshape(mass.shape)


def find_by_level(tree: Tensor, mass: Tensor) -> Tensor:
    """Run the search of `tree_find`, for masses of shape `[B]`, with a few tensor operations per level of the tree."""
    rest, node = mass, torch.ones_like(mass, dtype=torch.int64)
    for _ in range(_depth(tree)):
        left, right = tree.index_select(0, 2 * node), tree.index_select(0, 2 * node + 1)
        goes_right = (rest >= left) & (right > 0)
        rest = torch.where(goes_right, rest - left, rest)
        node = 2 * node + goes_right
    return node - len(tree) // 2


def last_of_equal(index: Tensor) -> Tensor:
    """Return, for each entry of an int64 tensor `[B]`, the position of the last entry with the same value.

    >>> last_of_equal(torch.tensor([5, 3, 5, 8])).tolist()
    [2, 1, 2, 3]
    """
    value, order = torch.sort(index, stable=True)
    last = order.index_select(0, torch.searchsorted(value, value, right=True) - 1)
    return torch.empty_like(order).index_put((order,), last)


def tree_set(tree: Tensor, index: Tensor, priority: Tensor) -> Tensor:
    """Return a copy of the tree with new priorities.

        tree[P + index] = priority
        tree[i]         = tree[2 * i] + tree[2 * i + 1]      for all i above a changed leaf

    If a loop of a compiled graph carries the tree, the loop updates the tree in place.

    Args:
        tree: a sum tree.
        index: `[*B]` int64, indices of leaves, 0 to P - 1. If an index occurs twice, the last priority for this index
            is stored.
        priority: `[*B]` float, new priorities of the leaves, at least 0.

    Returns: float64 `[2 * P]`.
    Gradient: none, because `tree` and `priority` are detached.
    Raises: ValueError if `tree` is not `[2 * P]`, or if the shapes of `index` and `priority` differ.

    >>> tree_set(tree_init(4), torch.tensor([0, 3]), torch.tensor([1.0, 2.0])).tolist()
    [0.0, 3.0, 1.0, 2.0, 1.0, 0.0, 0.0, 2.0]
    """
    depth, tree = _depth(tree), tree.detach()
    same_shape(index=index, priority=priority)
    node, priority = index.flatten() + len(tree) // 2, priority.detach().flatten().to(tree.dtype)
    tree = tree.index_put((node,), priority.index_select(0, _LAST_OF_EQUAL[0](node)))
    for count in (1 << level for level in reversed(range(depth))):
        node = node >> 1 if len(node) < count else torch.arange(count, 2 * count, device=tree.device)  # a whole level
        # The tree is a copy by now, so this function may write to it. Duplicate nodes get equal values.
        tree.index_put_((node,), tree.index_select(0, 2 * node) + tree.index_select(0, 2 * node + 1))
    return tree


_FIND: list[Callable[[Tensor, Tensor], Tensor]] = [find_by_level]
_LAST_OF_EQUAL: list[Callable[[Tensor], Tensor]] = [last_of_equal]


def use_functions(find: Callable[[Tensor, Tensor], Tensor], last: Callable[[Tensor], Tensor]) -> None:
    """Make `tree_find` call `find` instead of `find_by_level`, and `tree_set` call `last` instead of `last_of_equal`.

    `ecrl.compile` calls `use_functions` with faster functions for compiled graphs.
    """
    _FIND[:], _LAST_OF_EQUAL[:] = [find], [last]
