"""Tensors in TensorDicts, dicts, lists and tuples as a list of leaves and a hashable structure, in order of key.

Unlike a pytree of torch's, a structure does not depend on the order in which keys were set, and a TensorDict's batch
size moves with its tensors where an axis is added or taken.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

from tensordict import TensorDict, TensorDictBase
from torch import Size, Tensor

_LEAF = "tensor"


def _ordered(tree: TensorDictBase) -> list[tuple[Any, Any]]:
    return sorted(tree.items(), key=lambda pair: pair[0])  # torch.compile cannot sort by whole pairs


def _take(tree: Any, leaves: list[Tensor]) -> Hashable:
    if isinstance(tree, Tensor):
        leaves.append(tree)
        return _LEAF
    if isinstance(tree, TensorDictBase):
        return TensorDict, tree.batch_size, tuple([(key, _take(part, leaves)) for key, part in _ordered(tree)])
    if isinstance(tree, dict):
        return dict, None, tuple([(key, _take(tree[key], leaves)) for key in sorted(tree)])
    if isinstance(tree, list | tuple):
        return type(tree), None, tuple([_take(part, leaves) for part in tree])
    return None, (type(tree), tree), ()  # not a tensor: the same wherever the structure is; 2 is not 2.0


class Borrowed(NamedTuple):
    """Tensors that a function reads where they are. Compiled code never copies them, so they may be large."""

    fields: Any


def is_borrowed(structure: Any, inside: bool = False) -> list[bool]:
    """True for each leaf that is inside a `Borrowed`, in the order of the leaves.

    >>> from torch import zeros
    >>> is_borrowed(flatten((zeros(1), Borrowed([zeros(1)])))[1])
    [False, True]
    """
    if structure == _LEAF:
        return [inside]
    kind, _, parts = structure
    keyed = [part for _, part in parts] if kind in (TensorDict, dict) else parts
    return [leaf for part in keyed for leaf in is_borrowed(part, inside or kind is Borrowed)]


def flatten(tree: Any) -> tuple[list[Tensor], Hashable]:
    """Leaves and structure; what is not a tensor, such as None or a number, is part of the structure.

    >>> from torch import zeros
    >>> flatten({"b": None, "a": (zeros(2), 3)})[1] == flatten({"a": (zeros(2), 3), "b": None})[1]
    True
    """
    leaves: list[Tensor] = []
    structure = _take(tree, leaves)
    return leaves, structure


def names(structure: Any, name: str = "") -> list[str]:
    """A name for each leaf, its keys and places joined by dots.

    >>> names(flatten(({"a": TensorDict({"x": 1.0}, [])}, None))[1])
    ['0.a.x']
    """
    if structure == _LEAF:
        return [name.removeprefix(".")]
    kind, _, parts = structure
    if kind is None:
        return []
    keyed = parts if kind in (TensorDict, dict) else enumerate(parts)
    return [leaf for key, part in keyed for leaf in names(part, f"{name}.{key}")]


def paths(structure: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The keys that lead to each leaf of nested TensorDicts and dicts.

    >>> paths(flatten(TensorDict({"a": {"x": 1.0}, "b": 2.0}))[1])
    [('a', 'x'), ('b',)]
    """
    if structure == _LEAF:
        return [path]
    return [leaf for key, part in structure[2] for leaf in paths(part, (*path, key))]


def _same(size: Size) -> Size:
    return size


def _build(structure: Any, leaves: Iterator[Any], batch: Callable[[Size], Any]) -> Any:
    if structure == _LEAF:
        return next(leaves)
    kind, value, parts = structure
    if kind is None:
        return value[1]
    if kind is TensorDict:
        # Unchecked: what was taken apart fits together, and the checks cost more than a step of a small network.
        return TensorDict._new_unsafe({key: _build(part, leaves, batch) for key, part in parts}, Size(batch(value)))
    if kind is dict:
        return {key: _build(part, leaves, batch) for key, part in parts}
    made = [_build(part, leaves, batch) for part in parts]
    return kind(*made) if hasattr(kind, "_fields") else kind(made)


def unflatten(structure: Hashable, leaves: Any, batch: Callable[[Size], Any] = _same) -> Any:
    """The tree again, with other leaves; `batch` gives the batch size of its TensorDicts from the one they had.

    >>> leaves, structure = flatten({"a": TensorDict({"x": 1.0}, [])})
    >>> unflatten(structure, [leaf.expand(3) for leaf in leaves], lambda size: (3, *size))["a"].batch_size
    torch.Size([3])
    """
    return _build(structure, iter(leaves), batch)


def mapped(fn: Callable[..., Tensor], tree: Any, *others: Any, batch: Callable[[Size], Any] = _same) -> Any:
    """`fn` over matching tensors of trees of one structure.

    Raises: ValueError if the structures differ.

    >>> mapped(lambda x, y: x + y, {"a": TensorDict({"x": 1.0}, [])}, {"a": TensorDict({"x": 2.0}, [])})["a"]["x"]
    tensor(3.)
    """
    leaves, structure = flatten(tree)
    flat = [flatten(other) for other in others]
    for _, other in flat:
        if other != structure:
            raise ValueError(f"structures differ: {structure} and {other}")
    return unflatten(structure, map(fn, leaves, *(other for other, _ in flat)), batch)


def replaced(tree: TensorDict, fields: Any) -> TensorDict:
    """A TensorDict with some fields replaced or added; the others are shared.

    >>> replaced(TensorDict({"a": 1.0, "b": 2.0}), {"b": TensorDict({"x": 3.0})})["b", "x"]
    tensor(3.)
    """
    return TensorDict({**dict(tree.items()), **dict(fields.items())}, tree.batch_size)
