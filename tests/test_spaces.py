"""Spaces, and their conversion from and to Gymnasium."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces as gym
from hypothesis import given
from hypothesis import strategies as st

from ecrl.spaces import (
    Box,
    Dict,
    Discrete,
    MultiDiscrete,
    box,
    dict_space,
    element_bytes,
    flat_dim,
    from_gymnasium,
    is_image,
    to_gymnasium,
)

PAIRS = [  # ecrl's space, Gymnasium's space, features
    (box(-1.0, 1.0, 2, 3), gym.Box(-1.0, 1.0, (2, 3)), 6),
    (box(0.0, 1.0), gym.Box(0.0, 1.0, ()), 1),
    (Box((-1.0, -np.inf), (2.0, np.inf), (2,)), gym.Box(np.float32([-1, -np.inf]), np.float32([2, np.inf])), 2),
    (box(0, 255, 3, 2, 1, dtype=torch.uint8), gym.Box(0, 255, (3, 2, 1), np.uint8), 6),
    (box(-(2**63), 2**63 - 1, 2, dtype=torch.int64), gym.Box(-(2**63), 2**63 - 1, (2,), np.int64), 2),
    (Box((-3, 0), (1, 7), (2,), torch.int16), gym.Box(np.int16([-3, 0]), np.int16([1, 7]), dtype=np.int16), 2),
    (Discrete(4), gym.Discrete(4), 4),
    (MultiDiscrete((2, 5)), gym.MultiDiscrete([2, 5]), 7),
    (
        dict_space({"b": Discrete(2), "a": dict_space({"x": box(0.0, 1.0, 3)})}),
        gym.Dict({"b": gym.Discrete(2), "a": gym.Dict({"x": gym.Box(0.0, 1.0, (3,))})}),
        5,
    ),
]
FLOATS = st.floats(width=32, allow_nan=False)
BOXES = st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=4).map(
    lambda ends: Box(tuple(min(e) for e in ends), tuple(max(e) for e in ends), (len(ends),))
)
LEAVES = st.one_of(
    BOXES, st.integers(1, 9).map(Discrete), st.lists(st.integers(1, 9), min_size=1).map(tuple).map(MultiDiscrete)
)
SPACES = st.recursive(
    LEAVES,
    lambda parts: st.dictionaries(st.text("abcxyz", min_size=1), parts, min_size=1, max_size=3).map(dict_space),
    max_leaves=6,
)


@pytest.mark.parametrize(("space", "gym_space", "features"), PAIRS)
def test_both_ways_by_hand(space, gym_space, features):
    assert to_gymnasium(space) == gym_space
    assert from_gymnasium(gym_space) == space
    assert flat_dim(space) == features == gym.utils.flatdim(gym_space)


@given(SPACES)
def test_there_and_back(space):
    gym_space = to_gymnasium(space)
    assert from_gymnasium(gym_space) == space and hash(from_gymnasium(gym_space)) == hash(space)
    assert flat_dim(space) == gym.utils.flatdim(gym_space)
    assert gym_space.contains(gym_space.sample())


@given(st.dictionaries(st.text(min_size=1), LEAVES, min_size=2, max_size=4))
def test_dict_order_does_not_matter(parts):
    backwards = dict(reversed(parts.items()))
    assert dict_space(parts) == dict_space(backwards) and hash(dict_space(parts)) == hash(dict_space(backwards))
    assert [name for name, _ in dict_space(backwards).items] == sorted(parts)


def test_action_mask_is_no_feature():
    parts = {"x": box(0.0, 1.0, 3), "action_mask": MultiDiscrete((2, 2))}
    assert flat_dim(dict_space(parts)) == 3
    assert flat_dim(dict_space({"inner": dict_space(parts)})) == 3


def test_bounds_are_in_c_order():
    low = np.arange(6, dtype=np.float32).reshape(2, 3)
    space = from_gymnasium(gym.Box(low, low + 1))
    assert space.low == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert np.array_equal(to_gymnasium(space).high, low + 1)


@pytest.mark.parametrize(
    ("gym_space", "space"),
    [
        (gym.Discrete(3, start=-1), Discrete(3)),
        (gym.MultiDiscrete([2, 5], start=[1, 0]), MultiDiscrete((2, 5))),
        (gym.MultiDiscrete([[2, 3], [4, 5]]), MultiDiscrete((2, 3, 4, 5))),
        (gym.MultiBinary(3), MultiDiscrete((2, 2, 2))),
        (gym.MultiBinary((1, 2)), MultiDiscrete((2, 2))),
        (gym.Box(-2, 2, (2,), np.float64), box(-2.0, 2.0, 2)),
        (gym.Box(0, 1, (2,), np.bool_), box(0, 1, 2, dtype=torch.uint8)),
        (gym.Box(0, 2**16 - 1, (1,), np.uint16), box(0, 2**16 - 1, 1, dtype=torch.int32)),
        (gym.Box(0, 2**32 - 1, (1,), np.uint32), box(0, 2**32 - 1, 1, dtype=torch.int64)),
        (gym.Box(0, 2**64 - 1, (1,), np.uint64), box(0, 2**63 - 1, 1, dtype=torch.int64)),
        (
            gym.Tuple((gym.Discrete(2), gym.Dict({"b": gym.MultiBinary(1)}))),
            dict_space({"0": Discrete(2), "1": dict_space({"b": MultiDiscrete((2,))})}),
        ),
    ],
)
def test_kinds_that_only_gymnasium_has(gym_space, space):
    assert from_gymnasium(gym_space) == space
    if not isinstance(gym_space, gym.MultiBinary | gym.Tuple):
        assert flat_dim(space) == gym.utils.flatdim(gym_space)


@pytest.mark.parametrize("space", [gym.Dict({}), gym.Tuple(()), gym.Dict({"a": gym.Tuple(())})])
def test_a_space_without_parts_is_refused(space):
    with pytest.raises(TypeError, match="has no parts, expected at least one"):
        from_gymnasium(space)


@pytest.mark.parametrize("space", [gym.Text(3), gym.Sequence(gym.Discrete(2)), gym.Dict({"a": gym.Text(3)})])
def test_other_kinds_are_refused_by_name(space):
    kind = type(space["a"] if isinstance(space, gym.Dict) else space).__name__
    with pytest.raises(TypeError, match=rf"{kind}\(.*known: Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple"):
        from_gymnasium(space)


def test_boxes_of_different_dtypes_differ():
    image, floats = box(0, 255, 2, 1, dtype=torch.uint8), box(0.0, 255.0, 2, 1)
    assert image != floats and image == box(0.0, 255.0, 2, 1, dtype=torch.uint8)
    assert hash(image) == hash(box(0.0, 255.0, 2, 1, dtype=torch.uint8))
    assert floats == Box((0.0, 0.0), (255.0, 255.0), (2, 1)) == box(0.0, 255.0, 2, 1, dtype=torch.float32)
    assert element_bytes(dict_space({"action_mask": MultiDiscrete((2, 2)), "x": box(0.0, 1.0, 1)})) == 6
    assert element_bytes(image) == 2 and element_bytes(floats) == 8 and element_bytes(Discrete(3)) == 8
    assert [is_image(space) for space in (image, box(0, 255, 2, 1, 1, dtype=torch.uint8))] == [False, True]
    assert not is_image(box(0, 1, 2, 1, 1, dtype=torch.uint8))  # flags, which are not divided by 255


@pytest.mark.parametrize(
    "space",
    [
        box(0.0, 1.0, 2),
        box(0, 255, 8, 8, 3, dtype=torch.uint8),
        Box((0, 1), (2, 2), (2,), torch.int8),
        box(0.0, 1.0, dtype=torch.float64),
        Box((), (), (0,), torch.uint8),
    ],
)
def test_a_printed_box_makes_the_box_again(space):
    assert eval(repr(space), {"Box": Box, "box": box, "torch": torch}) == space
    assert len(repr(space)) < 80


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.complex64, np.uint8, "uint8"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"^dtype of a Box is .*, expected one of torch\.float32, .*torch\.int64$"):
        box(0, 1, 2, dtype=dtype)


def test_records_are_frozen():
    for space, name in (
        (box(0.0, 1.0), "shape"),
        (Discrete(2), "n"),
        (MultiDiscrete((2,)), "nvec"),
        (Dict(()), "items"),
    ):
        with pytest.raises(AttributeError):
            setattr(space, name, 3)


def test_a_space_in_one_short_line():
    """Messages and the summary of a run show spaces by `str`, and `repr` is the expression that makes the space."""
    many = Box((-1.0,) * 100, tuple(map(float, range(100))), (100,))
    assert str(many) == "Box(low -1.0, high 0.0 to 99.0, (100,), float32)"
    assert str(Box((), (), (0,))) == "Box(none, none, (0,), float32)"
    stack = box(0, 255, 4, 84, 84, 1, dtype=torch.uint8)
    assert str(replace(stack, frames=4)) == "Box(0, 255, (4, 84, 84, 1), uint8, 4 frames)"
    whole = dict_space({"obs": many, "action_mask": MultiDiscrete((2,) * 50)})
    assert str(whole) == f"Dict(action_mask: MultiDiscrete((2,) * 50), obs: {many})"
    for space in (many, stack, whole):
        assert eval(repr(space)) == space
