"""Define observation and action spaces. Spaces are hashable, so that functions of a space can be memoised.

`to_gymnasium` and `from_gymnasium` convert between these spaces and Gymnasium's spaces.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

_DTYPES = (
    *(torch.float32, torch.float16, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


@dataclass(frozen=True, repr=False)
class Box:
    """Space of arrays with the shape `shape` and the dtype `dtype`.

    The bounds `low` and `high` have one entry per element of an array, in C order. States and rollouts store
    observations in the dtype of their space. Networks convert observations to float.

    Raises: ValueError unless the dtype is float16, float32, float64, uint8 or a signed integer, and `frames` matches
        the shape.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    frames: int = 1
    """Number of frames in a stack, which is the size of the first axis of the shape; 1 for a space without stacks."""
    is_image: bool = field(init=False, compare=False)
    """True if the dtype is uint8, a frame has three axes, all lower bounds are 0, and all upper bounds are 255.

    The field is False for float images, although convolutions can read them. The order of the three axes is not
    checked.

    The constructor computes this field once, because an image has thousands of bounds.
    """

    def __post_init__(self):
        if self.dtype not in _DTYPES:
            known = ", ".join(map(str, _DTYPES))
            raise ValueError(f"dtype of a Box is {self.dtype!r}, expected one of {known}")
        if self.frames < 1 or (self.frames > 1 and self.shape[:1] != (self.frames,)):
            raise ValueError(f"a Box with frames={self.frames} has the shape {list(self.shape)}; expected frames first")
        has_axes = self.dtype == torch.uint8 and len(self.frame_shape) == 3
        is_image = has_axes and {*self.low} == {0.0} and {*self.high} == {255.0}
        object.__setattr__(self, "is_image", is_image)

    def __repr__(self) -> str:
        """Return a Python expression that creates the space.

        Equal bounds are abbreviated, unless the dtype is float32 or the space has stacks of frames.
        """
        if self.frames > 1:
            bounds = f"low={self.low}, high={self.high}, shape={self.shape}"
            return f"Box({bounds}, dtype={self.dtype}, frames={self.frames})"
        if self.dtype == torch.float32:
            return f"Box(low={self.low}, high={self.high}, shape={self.shape})"
        if self.low and {*self.low} == {self.low[0]} and {*self.high} == {self.high[0]}:
            return f"box({', '.join(map(str, (self.low[0], self.high[0], *self.shape)))}, dtype={self.dtype})"
        return f"Box(low={self.low}, high={self.high}, shape={self.shape}, dtype={self.dtype})"

    def __str__(self) -> str:
        """Describe the space in a short line for messages.

        If the lower bounds differ between elements, show the smallest and the largest lower bound, such as -2.0 to
        -1.0. The same holds for the upper bounds.

        >>> str(box(-1.0, 1.0, 53)), str(Box((-2.0, -1.0), (1.0, 1.0), (2,)))
        ('Box(-1.0, 1.0, (53,), float32)', 'Box(low -2.0 to -1.0, high 1.0, (2,), float32)')
        """
        frames = f", {self.frames} frames" if self.frames > 1 else ""
        dtype = str(self.dtype).removeprefix("torch.")
        low, high = _range(self.low), _range(self.high)
        bounds = f"low {low}, high {high}" if " to " in low + high else f"{low}, {high}"
        return f"Box({bounds}, {self.shape}, {dtype}{frames})"

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of a single frame. For a space without stacks, this is the shape of the space."""
        return self.shape[1:] if self.frames > 1 else self.shape


@dataclass(frozen=True)
class Discrete:
    """Space of the integers from 0 to n - 1. Each element is a 0-d int64 tensor."""

    n: int


@dataclass(frozen=True)
class MultiDiscrete:
    """Space of integer vectors, as int64 tensors of shape `[len(nvec)]`. Entry i is between 0 and nvec[i] - 1."""

    nvec: tuple[int, ...]

    def __str__(self) -> str:
        """Describe the space in a short line for messages. If all sizes are equal, show the size only once.

        >>> str(MultiDiscrete((20,) * 8)), str(MultiDiscrete((2, 3)))
        ('MultiDiscrete((20,) * 8)', 'MultiDiscrete(nvec=(2, 3))')
        """
        if len(self.nvec) > 1 and len({*self.nvec}) == 1:
            return f"MultiDiscrete(({self.nvec[0]},) * {len(self.nvec)})"
        return repr(self)


@dataclass(frozen=True)
class Dict:
    """Space that combines several named spaces, sorted by name. Each element is a TensorDict."""

    items: tuple[tuple[str, "Space"], ...]

    def __str__(self) -> str:
        """Describe the space in a short line for messages.

        >>> str(dict_space({"camera": box(0, 255, 8, 8, 3, dtype=torch.uint8), "gear": Discrete(4)}))
        'Dict(camera: Box(0, 255, (8, 8, 3), uint8), gear: Discrete(n=4))'
        """
        return f"Dict({', '.join(f'{name}: {part}' for name, part in self.items)})"


Space = Box | Discrete | MultiDiscrete | Dict


def _range(numbers: tuple[float, ...]) -> str:
    """Return the smallest and the largest of some numbers as text, or the number if all of them are equal."""
    if not numbers:
        return "none"
    least, most = (float(f"{x:.5g}") if isinstance(x, float) else x for x in (min(numbers), max(numbers)))
    return str(least) if least == most else f"{least} to {most}"


def box(low: float, high: float, *shape: int, dtype: torch.dtype = torch.float32) -> Box:
    """Create a Box with the same bounds for every element.

    >>> box(-2.0, 2.0, 1)
    Box(low=(-2.0,), high=(2.0,), shape=(1,))
    >>> box(0, 255, 84, 84, 3, dtype=torch.uint8)
    box(0, 255, 84, 84, 3, dtype=torch.uint8)
    """
    return Box((low,) * prod(shape), (high,) * prod(shape), shape, dtype)


def dict_space(parts: Mapping[str, Space]) -> Dict:
    """Create a Dict space from a mapping of names to spaces."""
    return Dict(tuple(sorted(parts.items())))


def without_mask(space: Space) -> Space:
    """Remove all entries named `action_mask` from a Dict space and from the Dicts in it. Return other spaces unchanged.

    >>> without_mask(dict_space({"gear": Discrete(4), "action_mask": MultiDiscrete((2, 2))}))
    Dict(items=(('gear', Discrete(n=4)),))
    """
    if not isinstance(space, Dict):
        return space
    return Dict(tuple((name, without_mask(part)) for name, part in space.items if name != "action_mask"))


def element_shape(space: Space) -> tuple[int, ...]:
    """Return the shape, without batch axes, of one element of a space that is not a Dict.

    >>> element_shape(MultiDiscrete((2, 3))), element_shape(Discrete(4))
    ((2,), ())
    """
    return (len(space.nvec),) if isinstance(space, MultiDiscrete) else getattr(space, "shape", ())


def element_dtype(space: Space) -> torch.dtype:
    """Return the dtype of the elements of a space that is not a Dict.

    >>> element_dtype(box(0, 255, 8, 8, 1, dtype=torch.uint8)), element_dtype(Discrete(4))
    (torch.uint8, torch.int64)
    """
    return space.dtype if isinstance(space, Box) else torch.int64


def observation_dtype(name: str, space: Space) -> torch.dtype:
    """Return the dtype of the observation tensor `name`, a dotted name. An action mask is bool, whatever its space is.

    >>> observation_dtype("obs.action_mask", MultiDiscrete((2, 2))), observation_dtype("obs.gear", Discrete(4))
    (torch.bool, torch.int64)
    """
    return torch.bool if name.endswith(".action_mask") else element_dtype(space)


def element_bytes(space: Space) -> int:
    """Return the number of bytes that one element of a space takes in a state or rollout.

    >>> camera = box(0, 255, 8, 8, 3, dtype=torch.uint8)
    >>> element_bytes(dict_space({"joints": box(-1.0, 1.0, 3), "gear": Discrete(4), "camera": camera}))
    212
    """
    if isinstance(space, Dict):
        return sum(prod(element_shape(p)) if n == "action_mask" else element_bytes(p) for n, p in space.items)
    return prod(element_shape(space)) * element_dtype(space).itemsize


def is_image(space: Space) -> bool:
    """Return True if the elements of a space are images or stacks of images (see `Box.is_image`). A Dict gives False.

    >>> is_image(box(0, 255, 8, 8, 1, dtype=torch.uint8)), is_image(box(0, 1, 8, 8, 1, dtype=torch.uint8))
    (True, False)
    """
    return isinstance(space, Box) and space.is_image


def flat_dim(space: Space) -> int:
    """Return the number of float features that represent one element of a space.

    A Box has one feature per element of its arrays. A Discrete has one feature per value, because values are one-hot
    encoded. A MultiDiscrete and a Dict have the features of all their entries, except entries named `action_mask`.

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
            dtype = getattr(np, str(space.dtype).removeprefix("torch."))
            low, high = (np.array(b, dtype).reshape(space.shape) for b in (space.low, space.high))
            return gymnasium.spaces.Box(low, high, dtype=dtype)
        case Discrete():
            return gymnasium.spaces.Discrete(space.n)
        case MultiDiscrete():
            return gymnasium.spaces.MultiDiscrete(list(space.nvec))
        case Dict():
            return gymnasium.spaces.Dict({name: to_gymnasium(part) for name, part in space.items})


_STORED = {"bool": torch.uint8, "uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64}


def box_dtype(dtype: Any) -> torch.dtype:
    """Return the tensor dtype that stores the values of a Gymnasium Box with this NumPy dtype (see `from_gymnasium`).

    >>> import numpy as np
    >>> box_dtype(np.dtype(np.float64)), box_dtype(np.dtype(np.uint8)), box_dtype(np.dtype(np.uint16))
    (torch.float32, torch.uint8, torch.int32)
    """
    if dtype.kind == "f":
        return torch.float32
    return _STORED.get(dtype.name) or getattr(torch, dtype.name)


def from_gymnasium(space: Any) -> Space:
    """Convert a `gymnasium.spaces` object to a space of ecrl.

    - Box: floating-point dtypes become float32, and most integer dtypes stay the same. PyTorch has few operations for
      the other dtypes, so bool becomes uint8, uint16 becomes int32, and wider unsigned integers become int64.
    - Discrete and MultiDiscrete: the smallest value becomes 0. An array of sizes is flattened in C order.
    - MultiBinary: the space becomes a MultiDiscrete with two values per entry.
    - Dict: each part is converted.
    - Tuple: the space becomes a Dict with the names "0", "1" and so on, and each part is converted.

    The module `ecrl.envs.gymnasium.spaces` converts the elements of the spaces.

    Raises: TypeError for any other kind of space, and for a Dict or Tuple without parts.
    """
    from gymnasium import spaces

    match space:
        case spaces.Dict() | spaces.Tuple() if not len(space):
            raise TypeError(f"space {space} has no parts, expected at least one; add one, or leave the space out")
        case spaces.Box():
            dtype = box_dtype(space.dtype)
            if dtype.is_floating_point:
                return Box(tuple(map(float, space.low.ravel())), tuple(map(float, space.high.ravel())), space.shape)
            largest = torch.iinfo(dtype).max
            low, high = (tuple(min(int(x), largest) for x in bound.ravel()) for bound in (space.low, space.high))
            return Box(low, high, space.shape, dtype)
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
