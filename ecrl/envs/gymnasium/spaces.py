"""Convert observations, actions and action masks between Gymnasium and tensors.

`ecrl.spaces.from_gymnasium` converts the spaces. A batch of observations is an array `[N, *shape]`, or a dict or tuple
of batches. The integers of a discrete space begin at 0 in ecrl, and at the space's `start` in Gymnasium.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from ecrl.spaces import box_dtype

MASK = "action_mask"
"""Name of the action mask, a bool observation that marks the allowed choices. Networks do not receive the mask."""


class BadValue(ValueError):
    """Error for a value that does not fit its space. `env` is the index of the environment, or None if unknown."""

    def __init__(self, text: str, env: int | None = None):
        super().__init__(text)
        self.env = env


def _part(rows: Sequence[Any], name: Any, space: spaces.Space) -> list[Any]:
    """Return the entry `name` of each observation. Raise BadValue for the first observation without this entry."""
    parts = []
    for row in rows:
        try:
            parts.append(row[name])
        except (LookupError, TypeError):
            raise BadValue(
                f"returned an observation without {name!r}, an entry of its space {space}", len(parts)
            ) from None
    return parts


def collate(space: spaces.Space, rows: Sequence[Any]) -> Any:
    """Stack one observation per environment.

    Raises: BadValue for the first observation that lacks an entry of its Dict or Tuple space. If the observations
        cannot be stacked, BadValue is raised for the first observation that is a list with parts of unequal shapes, or
        whose shape differs from the shape of the space.

    >>> collate(spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,)))), [(1, [0.0, 1.0]), (2, [1.0, 0.0])])[0]
    array([1, 2])
    """
    match space:
        case spaces.Dict():
            return {name: collate(part, _part(rows, name, space)) for name, part in space.items()}
        case spaces.Tuple():
            return tuple(collate(part, _part(rows, i, space)) for i, part in enumerate(space))
    try:
        return np.array(rows)
    except ValueError:
        for i, row in enumerate(rows):
            try:
                shape = np.shape(row)
            except ValueError:
                raise BadValue(
                    f"returned a list with parts of unequal shapes, expected a value of {space}", i
                ) from None
            if shape != space.shape:
                raise BadValue(_shape_text(shape, space), i) from None
        raise


def _shape_text(shape: tuple[int, ...], space: spaces.Space) -> str:
    return f"returned an observation of shape {list(shape)}, expected a value of {space}"


def observation(space: spaces.Space, batch: Any) -> Any:
    """Copy a batch of observations to a tensor `[N, *shape]`. A Dict or Tuple becomes a TensorDict.

    The dtypes follow `ecrl.spaces.from_gymnasium`. NaN and infinity are copied unchanged.

    Raises: BadValue for a wrong shape, for a value that the dtype of an integer Box cannot represent, or for an integer
        outside its Discrete, MultiDiscrete or MultiBinary space. The bounds of a Box are not checked.

    >>> observation(spaces.Discrete(2, start=5), np.array([5, 6]))
    tensor([0, 1])
    """
    match space:
        case spaces.Dict():
            return _named({str(name): observation(part, batch[name]) for name, part in space.items()})
        case spaces.Tuple():
            return _named({str(i): observation(part, batch[i]) for i, part in enumerate(space)})
    if np.shape(batch)[1:] != space.shape:
        raise BadValue(_shape_text(np.shape(batch)[1:], space), 0)
    if isinstance(space, spaces.Box):
        return _numbers(space, np.asarray(batch))
    low, size = _range(space)
    integers = np.array(batch, np.int64) - low
    refuse((integers < 0) | (integers >= size), f"returned an observation with an integer outside {space}")
    return torch.from_numpy(integers if isinstance(space, spaces.Discrete) else integers.reshape(len(integers), -1))


def _converts(array: np.ndarray, dtype: str) -> bool:
    """Return True if the elements of an array can be converted to numbers."""
    try:
        array.astype(dtype)
    except (TypeError, ValueError):
        return False
    return True


def _numbers(space: spaces.Box, batch: np.ndarray) -> Tensor:
    """Copy a batch `[N, *shape]` of Box observations to a tensor."""
    dtype = box_dtype(space.dtype)
    name = str(dtype).removeprefix("torch.")
    if batch.dtype.kind not in "biuf":
        refuse(np.array([not _converts(row, name) for row in batch]), f"returned no numbers, expected {space}")
    with np.errstate(invalid="ignore"):  # `refuse` below raises if NaN is cast to an integer
        numbers = batch.astype(name)
    if not dtype.is_floating_point and batch.dtype != numbers.dtype:
        refuse(numbers != batch, f"returned a {batch.dtype} that the dtype of its Box, {space.dtype}, cannot represent")
    return torch.from_numpy(numbers)


def action(space: spaces.Space, x: Tensor) -> np.ndarray:
    """Copy actions `[N, ...]` to an array `[N, *shape]` in the dtype of `space`. Actions of an integer Box are rounded.

    Raises: BadValue for NaN or infinity if the elements of the space are integers.

    >>> action(spaces.MultiBinary((1, 2)), torch.tensor([[0, 1]]))
    array([[[0, 1]]], dtype=int8)
    """
    shape: tuple[int, ...] = space.shape or ()
    array = x.detach().cpu().numpy().reshape(len(x), *shape)
    if np.issubdtype(space.dtype, np.integer):
        refuse(~np.isfinite(array), "got NaN or infinity as an action, expected integers")
    if isinstance(space, spaces.Box):
        return np.array(np.rint(array) if np.issubdtype(space.dtype, np.integer) else array, space.dtype)
    return np.asarray(array + _range(space)[0], space.dtype)


def allowed(masks: Any, nvec: tuple[int, ...]) -> Tensor:
    """Stack the action masks of N environments to a bool tensor `[N, sum(nvec)]`.

    A mask is an array or a tuple of arrays.

    Raises: BadValue for an environment without a mask, or with a mask of a wrong length.

    >>> allowed([(np.array([1, 0]), np.array([0, 1, 1]))], (2, 3))
    tensor([[ True, False, False,  True,  True]])
    """
    flat = [
        np.concatenate([np.ravel(m) for m in mask]) if isinstance(mask, tuple) else np.ravel(mask) for mask in masks
    ]
    for i, (mask, row) in enumerate(zip(masks, flat, strict=True)):
        if mask is None or len(row) != sum(nvec):
            actual = "no action_mask in its info" if mask is None else f"an action_mask of {len(row)} entries"
            raise BadValue(f"returned {actual}, expected {sum(nvec)} entries", i)
    return torch.from_numpy(np.stack(flat).astype(bool))


def check_allowed(mask: Tensor, nvec: tuple[int, ...]) -> None:
    """Raise BadValue if the mask of an environment allows no choice for one of the discrete actions."""
    for part in mask.split(list(nvec), -1):
        refuse(~part.any(-1).numpy(), "returned an action_mask that allows no choice for a discrete action")


def _named(parts: dict[str, Any]) -> TensorDict:
    if MASK in parts:
        parts[MASK] = parts[MASK].flatten(1) != 0
    return TensorDict(parts, [len(next(iter(parts.values())))])


def _range(space: Any) -> tuple[Any, Any]:
    """Return the smallest integer of each element, and the number of values that the element can have."""
    if isinstance(space, spaces.MultiBinary):
        return 0, 2
    return space.start, space.n if isinstance(space, spaces.Discrete) else space.nvec


def refuse(wrong: np.ndarray, text: str) -> None:
    """Raise BadValue for the first environment with a True in `wrong`, which is bool `[N, ...]`."""
    if wrong.any():
        raise BadValue(text, int(wrong.reshape(len(wrong), -1).any(1).argmax()))
