"""Values of Gymnasium's spaces to tensors and back; `ecrl.spaces.from_gymnasium` converts the spaces themselves.

A batch of observations is an array `[N, *shape]`, or a dict or tuple of batches. Integers count from 0 here and from
the `start` of their space there.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

MASK = "action_mask"
"""Name of the part of an observation that tells the allowed choices, bool; it is no feature."""


class BadValue(ValueError):
    """A value that is not of its space; `env` is the index of the first environment that gave one, where known."""

    def __init__(self, text: str, env: int | None = None):
        super().__init__(text)
        self.env = env


def _part(rows: Sequence[Any], name: Any, space: spaces.Space) -> list[Any]:
    """One part of the observation of every environment; raises BadValue naming the first that lacks it."""
    found = []
    for row in rows:
        try:
            found.append(row[name])
        except (LookupError, TypeError):
            raise BadValue(f"observed nothing for {name!r} of its space {space}", len(found)) from None
    return found


def collate(space: spaces.Space, rows: Sequence[Any]) -> Any:
    """One observation per environment as a batch; raises BadValue naming one of another shape.

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
        wrong = next(i for i, row in enumerate(rows) if np.shape(row) != space.shape)
        raise BadValue(f"observed shape {list(np.shape(rows[wrong]))}, its space is {space}", wrong) from None


def observation(space: spaces.Space, batch: Any) -> Any:
    """A batch as a tensor of its own memory, `[N, *shape]` float32 or int64; Dict and Tuple as a TensorDict.

    NaN and infinity are as they are. Raises: BadValue for another shape, or an integer outside its space.

    >>> observation(spaces.Discrete(2, start=5), np.array([5, 6]))
    tensor([0, 1])
    """
    match space:
        case spaces.Dict():
            return _named({str(name): observation(part, batch[name]) for name, part in space.items()})
        case spaces.Tuple():
            return _named({str(i): observation(part, batch[i]) for i, part in enumerate(space)})
    if np.shape(batch)[1:] != space.shape:
        raise BadValue(f"observed shape {list(np.shape(batch)[1:])}, its space is {space}", 0)
    if isinstance(space, spaces.Box):
        return torch.from_numpy(np.array(batch, np.float32))
    low, size = _range(space)
    whole = np.array(batch, np.int64) - low
    refuse((whole < 0) | (whole >= size), f"observed an integer outside {space}")
    return torch.from_numpy(whole if isinstance(space, spaces.Discrete) else whole.reshape(len(whole), -1))


def action(space: spaces.Space, x: Tensor) -> np.ndarray:
    """Actions `[N, ...]` as the environments want them, `[N, *shape]` in the dtype of `space`; the memory is its own.

    Raises: BadValue for NaN or infinity where they want integers.

    >>> action(spaces.MultiBinary((1, 2)), torch.tensor([[0, 1]]))
    array([[[0, 1]]], dtype=int8)
    """
    shape: tuple[int, ...] = space.shape or ()
    array = x.detach().cpu().numpy().reshape(len(x), *shape)
    if isinstance(space, spaces.Box):
        if np.issubdtype(space.dtype, np.integer):
            refuse(~np.isfinite(array), "was given NaN or infinity as an action, where it takes integers")
            array = np.rint(array)
        return np.array(array, space.dtype)
    return np.asarray(array + _range(space)[0], space.dtype)


def allowed(masks: Any, nvec: tuple[int, ...]) -> Tensor:
    """Action masks of N environments, arrays or tuples of arrays, as bool `[N, sum(nvec)]`.

    Raises: BadValue naming an environment that gave no mask, or one of another length.

    >>> allowed([(np.array([1, 0]), np.array([0, 1, 1]))], (2, 3))
    tensor([[ True, False, False,  True,  True]])
    """
    flat = [
        np.concatenate([np.ravel(m) for m in mask]) if isinstance(mask, tuple) else np.ravel(mask) for mask in masks
    ]
    for i, (mask, row) in enumerate(zip(masks, flat, strict=True)):
        if mask is None or len(row) != sum(nvec):
            given = "no action_mask in its info" if mask is None else f"an action_mask of {len(row)} entries"
            raise BadValue(f"gave {given}, expected {sum(nvec)} entries", i)
    return torch.from_numpy(np.stack(flat).astype(bool))


def check_allowed(mask: Tensor, nvec: tuple[int, ...]) -> None:
    """Raise BadValue naming an environment whose mask leaves no choice."""
    for part in mask.split(list(nvec), -1):
        refuse(~part.any(-1).numpy(), "allows no action: its action_mask is all zero")


def _named(parts: dict[str, Any]) -> TensorDict:
    if MASK in parts:
        parts[MASK] = parts[MASK].flatten(1) != 0
    return TensorDict(parts, [len(next(iter(parts.values())))])


def _range(space: Any) -> tuple[Any, Any]:
    """First integer and how many, per element."""
    if isinstance(space, spaces.MultiBinary):
        return 0, 2
    return space.start, space.n if isinstance(space, spaces.Discrete) else space.nvec


def refuse(wrong: np.ndarray, text: str) -> None:
    """Raise BadValue naming the first environment in which anything is `wrong`, bool `[N, ...]`."""
    if wrong.any():
        raise BadValue(text, int(wrong.reshape(len(wrong), -1).any(1).argmax()))
