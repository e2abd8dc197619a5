"""Hashable observation and action spaces, so that functions of a space can be memoised.

`to_gymnasium` and `from_gymnasium` convert to and from Gymnasium's spaces.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True)
class Box:
    """Real vectors `[*shape]`, float32; `low` and `high` have one entry per element, in C order."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Discrete:
    """Integers 0 to n - 1, int64, shape `[]`."""

    n: int


@dataclass(frozen=True)
class MultiDiscrete:
    """Vectors of integers `[len(nvec)]`, int64; entry i runs from 0 to nvec[i] - 1."""

    nvec: tuple[int, ...]


@dataclass(frozen=True)
class Dict:
    """Named parts, sorted by name; observations of this space are TensorDicts."""

    items: tuple[tuple[str, "Space"], ...]


Space = Box | Discrete | MultiDiscrete | Dict


def box(low: float, high: float, *shape: int) -> Box:
    """Return a Box with the same bounds for every element.

    >>> box(-2.0, 2.0, 1)
    Box(low=(-2.0,), high=(2.0,), shape=(1,))
    """
    return Box((low,) * prod(shape), (high,) * prod(shape), shape)


def dict_space(parts: Mapping[str, Space]) -> Dict:
    """Return a Dict space from a mapping, sorted by name."""
    return Dict(tuple(sorted(parts.items())))


def element_shape(space: Space) -> tuple[int, ...]:
    """Return the shape of one element, without batch axes.

    >>> element_shape(MultiDiscrete((2, 3))), element_shape(Discrete(4))
    ((2,), ())
    """
    return (len(space.nvec),) if isinstance(space, MultiDiscrete) else getattr(space, "shape", ())


def flat_dim(space: Space) -> int:
    """Count the float features: a Box's elements, a one-hot per Discrete, all parts of a Dict except `action_mask`.

    >>> flat_dim(dict_space({"joints": box(-1.0, 1.0, 2, 3), "gear": Discrete(4), "action_mask": Discrete(2)}))
    10
    """
    match space:
        case Box():
            return prod(space.shape)
        case Discrete():
            return space.n
        case MultiDiscrete():
            return sum(space.nvec)
        case Dict():
            return sum(flat_dim(part) for name, part in space.items if name != "action_mask")


def to_gymnasium(space: Space) -> Any:
    """Convert a space to a `gymnasium.spaces` object."""
    import gymnasium
    import numpy as np

    match space:
        case Box():
            low, high = (np.array(b, np.float32).reshape(space.shape) for b in (space.low, space.high))
            return gymnasium.spaces.Box(low, high, dtype=np.float32)
        case Discrete():
            return gymnasium.spaces.Discrete(space.n)
        case MultiDiscrete():
            return gymnasium.spaces.MultiDiscrete(list(space.nvec))
        case Dict():
            return gymnasium.spaces.Dict({name: to_gymnasium(part) for name, part in space.items})


def from_gymnasium(space: Any) -> Space:
    """Convert a `gymnasium.spaces` object to a space. TypeError names a kind of space that is not supported.

    Box numbers become float32. Integers count from 0; arrays of integers are flattened in C order. MultiBinary becomes
    a MultiDiscrete of twos. The parts of a Tuple are named "0", "1" and so on. `ecrl.envs.gymnasium.spaces` converts
    the values.
    """
    from gymnasium import spaces

    match space:
        case spaces.Box():
            return Box(tuple(map(float, space.low.ravel())), tuple(map(float, space.high.ravel())), space.shape)
        case spaces.Discrete():
            return Discrete(int(space.n))
        case spaces.MultiDiscrete():
            return MultiDiscrete(tuple(map(int, space.nvec.ravel())))
        case spaces.MultiBinary():
            return MultiDiscrete((2,) * prod(space.shape))
        case spaces.Dict():
            return dict_space({str(name): from_gymnasium(part) for name, part in space.items()})
        case spaces.Tuple():
            return dict_space({str(i): from_gymnasium(part) for i, part in enumerate(space)})
    known = "Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple"
    raise TypeError(f"space {space} is not supported; known: {known}")
