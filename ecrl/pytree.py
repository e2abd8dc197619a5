"""Flatten nested TensorDicts, dicts, lists and tuples of tensors into a list of leaves and a hashable structure.

Keys are sorted. Unlike the structures of torch's pytrees, a structure therefore does not depend on the insertion order
of its keys. If an operation adds or removes an axis of the tensors, `unflatten` can adapt the batch sizes of the
TensorDicts.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass
from math import copysign
from typing import Any, NamedTuple

from tensordict import TensorDict, TensorDictBase
from torch import Size, Tensor

# These markers are strings, because `torch.compile` of torch 2.11 cannot compare classes.
_LEAF, _TENSORDICT = "tensor", "TensorDict"


def _sorted_items(tree: TensorDictBase) -> list[tuple[Any, Any]]:
    return sorted(tree.items(), key=lambda pair: pair[0])  # `torch.compile` cannot sort the pairs without `key`


def _flatten(tree: Any, leaves: list[Tensor]) -> Hashable:
    if isinstance(tree, Tensor):
        leaves.append(tree)
        return _LEAF
    if isinstance(tree, TensorDictBase):
        return _TENSORDICT, tree.batch_size, tuple([(key, _flatten(part, leaves)) for key, part in _sorted_items(tree)])
    if isinstance(tree, dict):
        return dict, None, tuple([(key, _flatten(tree[key], leaves)) for key in sorted(tree)])
    if isinstance(tree, list | tuple):
        return type(tree), None, tuple([_flatten(part, leaves) for part in tree])
    # The structure contains each value other than a tensor with its type and sign, because 2 == 2.0 and 0.0 == -0.0.
    sign = copysign(1.0, tree) if isinstance(tree, float) and tree == 0.0 else None
    if tree is None:  # torch 2.11 cannot trace `is_dataclass(None)`
        return None, (type(tree), tree, None), ()
    return None, (type(tree), tree, exact(tree) if is_dataclass(tree) else sign), ()


def exact(value: Any) -> Hashable:
    """Return a hashable key of a value. Equal values of different types, and 0.0 and -0.0, have different keys.

    The keys of tuples and dataclasses also distinguish such values inside them.

    >>> exact((1, 0.0)) == exact((1, 0.0)), exact((1, 0.0)) == exact((True, 0.0)), exact((1, 0.0)) == exact((1, -0.0))
    (True, False, False)
    """
    if isinstance(value, tuple):
        return type(value), tuple(map(exact, value))
    if isinstance(value, float | complex):
        return type(value), repr(value)
    if is_dataclass(value) and not isinstance(value, type) and value.__dataclass_params__.eq:  # pyright: ignore
        compared = [one.name for one in fields(value) if one.compare and one.hash is not False]
        return type(value), value, tuple(exact(getattr(value, name)) for name in compared)
    return type(value), value


class Borrowed(NamedTuple):
    """Wrapper for read-only tensors, such as a large replay buffer, that compiled code never copies."""

    fields: Any


def is_borrowed(structure: Any, inside: bool = False) -> list[bool]:
    """Return a list with one bool per leaf of a structure: True if the leaf is inside a `Borrowed`.

    >>> from torch import zeros
    >>> is_borrowed(flatten((zeros(1), Borrowed([zeros(1)])))[1])
    [False, True]
    """
    if structure == _LEAF:
        return [inside]
    kind, _, parts = structure
    keyed = [part for _, part in parts] if kind in (_TENSORDICT, dict) else parts
    return [leaf for part in keyed for leaf in is_borrowed(part, inside or kind is Borrowed)]


def flatten(tree: Any) -> tuple[list[Tensor], Hashable]:
    """Return the leaves and the structure of a tree. The structure contains every value that is not a tensor.

    >>> from torch import zeros
    >>> flatten({"b": None, "a": (zeros(2), 3)})[1] == flatten({"a": (zeros(2), 3), "b": None})[1]
    True
    """
    leaves: list[Tensor] = []
    structure = _flatten(tree, leaves)
    return leaves, structure


def names(structure: Any, name: str = "") -> list[str]:
    """Return a name for each leaf of a structure: the keys and indices on the path to the leaf, joined by dots.

    >>> names(flatten(({"a": TensorDict({"x": 1.0}, [])}, None))[1])
    ['0.a.x']
    """
    if structure == _LEAF:
        return [name.removeprefix(".")]
    kind, _, parts = structure
    if kind is None:
        return []
    named_parts = parts if kind in (_TENSORDICT, dict) else enumerate(parts)
    return [leaf for key, part in named_parts for leaf in names(part, f"{name}.{key}")]


def paths(structure: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the path of each leaf of nested TensorDicts and dicts. A path is the tuple of keys that leads to a leaf.

    >>> paths(flatten(TensorDict({"a": {"x": 1.0}, "b": 2.0}))[1])
    [('a', 'x'), ('b',)]
    """
    if structure == _LEAF:
        return [path]
    return [leaf for key, part in structure[2] for leaf in paths(part, (*path, key))]


_NewSize = Callable[[Size], Any]


def _build(structure: Any, leaves: Iterator[Any], batch: _NewSize | None) -> Any:
    if structure == _LEAF:
        return next(leaves)
    kind, value, parts = structure
    if kind is None:
        return value[1]
    if kind == _TENSORDICT:
        # Avoid a recursive call per leaf. With few environments, this function takes most of a run's time in Python.
        tensors = {key: next(leaves) if part == _LEAF else _build(part, leaves, batch) for key, part in parts}
        # Skip tensordict's checks. The tree was valid, and the checks take longer than a step of a small network.
        return TensorDict._new_unsafe(tensors, value if batch is None else Size(batch(value)))
    if kind is dict:
        return {key: _build(part, leaves, batch) for key, part in parts}
    built = [next(leaves) if part == _LEAF else _build(part, leaves, batch) for part in parts]
    return kind(*built) if hasattr(kind, "_fields") else kind(built)


def unflatten(structure: Hashable, leaves: Any, batch: _NewSize | None = None) -> Any:
    """Rebuild a tree from its structure and new leaves. The optional `batch` maps each old batch size to the new size.

    >>> leaves, structure = flatten({"a": TensorDict({"x": 1.0}, [])})
    >>> unflatten(structure, [leaf.expand(3) for leaf in leaves], lambda size: (3, *size))["a"].batch_size
    torch.Size([3])
    """
    return _build(structure, iter(leaves), batch)


def mapped(fn: Callable[..., Tensor], tree: Any, *others: Any, batch: _NewSize | None = None) -> Any:
    """Apply `fn` to the corresponding tensors of trees with the same structure, and return the tree of results.

    Raises: ValueError if the structures differ.

    >>> mapped(lambda x, y: x + y, {"a": TensorDict({"x": 1.0}, [])}, {"a": TensorDict({"x": 2.0}, [])})["a"]["x"]
    tensor(3.)
    """
    leaves, structure = flatten(tree)
    flat = [flatten(other) for other in others]
    for _, other in flat:
        if other != structure:
            raise ValueError(f"structures differ: {structure} and {other}; pass trees with equal keys and batch sizes")
    return unflatten(structure, map(fn, leaves, *(other for other, _ in flat)), batch)


def combined(fn: Callable[..., Tensor], first: Any, *others: Any) -> Any:
    """Apply `fn` to the corresponding tensors of trees with the same keys. The batch sizes of the trees may differ.

    The result has the batch sizes of `first`. The function does not compare the keys of the trees.

    >>> one, two = TensorDict({"x": [1.0, 2.0]}, [2]), TensorDict({"x": [3.0, 4.0]}, [])
    >>> combined(lambda x, y: x + y, one, two).batch_size
    torch.Size([2])
    """
    leaves, structure = flatten(first)
    return unflatten(structure, map(fn, leaves, *(flatten(other)[0] for other in others)))


def replaced(tree: TensorDict, fields: Any) -> TensorDict:
    """Return a copy of `tree` with `fields` replaced or added. The copy shares all other fields with `tree`.

    >>> replaced(TensorDict({"a": 1.0, "b": 2.0}), {"b": TensorDict({"x": 3.0})})["b", "x"]
    tensor(3.)
    """
    return TensorDict({**dict(tree.items()), **dict(fields.items())}, tree.batch_size)
