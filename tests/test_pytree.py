"""Leaves and structures: the order of keys does not matter, batch sizes move with their tensors."""

from typing import NamedTuple

import pytest
import torch
from tensordict import TensorDict

from ecrl.pytree import flatten, mapped, unflatten


class Pair(NamedTuple):
    first: object
    second: object


def tree(*order):
    parts = {"a": torch.arange(2), "b": TensorDict({"x": torch.zeros(2, 3)}, [2]), "c": torch.ones(2)}
    inner = TensorDict({key: parts[key] for key in order}, [2])
    return {"td": inner, "others": [Pair(torch.tensor(7), None), (), {"n": 3}]}


def test_a_tree_comes_back_as_it_was():
    before = tree("a", "b", "c")
    leaves, structure = flatten(before)
    back = unflatten(structure, leaves)
    assert [leaf.numel() for leaf in leaves] == [1, 2, 6, 2]
    assert back["others"][1:] == [(), {"n": 3}]
    assert isinstance(back["others"][0], Pair) and back["others"][0].second is None
    assert (back["td"] == before["td"]).all() and back["td"]["b"].batch_size == torch.Size([2])


def test_the_order_of_keys_is_not_part_of_the_structure_and_everything_else_is():
    (one, same), (other, equal) = flatten(tree("a", "b", "c")), flatten(tree("c", "a", "b"))
    assert same == equal and hash(same) == hash(equal)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert flatten(tree("a", "b"))[1] != same
    assert flatten({"n": 3})[1] != flatten({"n": 4})[1]
    assert flatten(TensorDict({"x": torch.zeros(2)}, [2]))[1] != flatten(TensorDict({"x": torch.zeros(2)}, []))[1]


def test_batch_sizes_move_with_the_tensors():
    stacked = mapped(
        lambda *parts: torch.stack(parts),
        *[tree("a", "b", "c")["td"]] * 2,  # two rows of two: the batch size does not follow from the shapes
        batch=lambda size: (2, *size),
    )
    assert stacked.batch_size == stacked["b"].batch_size == torch.Size([2, 2])


def test_trees_of_other_structures_are_refused():
    with pytest.raises(ValueError, match="structures differ"):
        mapped(torch.add, {"a": torch.zeros(1)}, {"b": torch.zeros(1)})
