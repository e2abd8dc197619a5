"""Stacks of the latest observations, and random shifts of images."""

from typing import Any

import torch
from torch import Tensor

from ecrl.pytree import combined, flatten
from ecrl.types import check_bool


def push_frame(frames: Any, started: Tensor, obs: Any) -> Any:
    """Append an observation to the previous k - 1 observations, or fill the stack with it if an episode starts.

        stack[i] = frames[i]  if started else obs,  i = 0 .. k - 2
        stack[k - 1] = obs

    With its default settings, Gymnasium's `FrameStackObservation` fills the stack in the same way at the start of an
    episode. Pass the newest k - 1 observations of the stack as `frames` of the next call.

    Args:
        frames: tensor `[*B, k - 1, ...]` with the previous k - 1 observations, oldest first, or a tree of such tensors.
        started: `[*B]` bool, False if `obs` is the first observation of its episode.
        obs: tensor `[*B, ...]` with the newest observation, or a tree of such tensors.

    Returns: the stack `[*B, k, ...]`, in the dtypes of `obs`.
    Gradient: flows through `frames` and `obs`.
    Raises: ValueError if `started` is not bool, or if the shapes do not fit.
    Source: Mnih et al. 2015, "Human-level control through deep reinforcement learning", methods.

    >>> frames, obs = torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([3.0, 3.0])
    >>> push_frame(frames, torch.tensor([True, False]), obs).tolist()
    [[1.0, 2.0, 3.0], [3.0, 3.0, 3.0]]
    """
    check_bool(started=started)
    axis = started.ndim

    def push(new: Tensor, old: Tensor) -> Tensor:
        newest = new.unsqueeze(axis)
        flag = started.reshape((*started.shape, *[1] * (old.ndim - axis)))
        return torch.cat((torch.where(flag, old.to(new.dtype), newest), newest), axis)

    _check_shapes(frames, obs, started.shape, started.shape)
    return combined(push, obs, frames)


def stack_frames(frames: Any, started: Tensor, obs: Any, done: Tensor) -> Any:
    """Return the stack of the latest k observations at each step of several sequences.

        stack[t, i] = obs[max(t - k + 1 + i, start of the episode)],  i = 0 .. k - 1

    Observations before the sequence are in `frames`. Calling `push_frame` step by step gives the same result.

    Args:
        frames: tensor `[n, k - 1, ...]` with the k - 1 observations before the sequence, oldest first, or a tree of
            such tensors. k is at least 2.
        started: `[n]` bool, False if an episode starts with the first step of the sequence.
        obs: tensor `[n, S, ...]` with the observations of S steps, or a tree of such tensors.
        done: `[n, S]` bool, True for the last step of an episode.

    Returns: `[n, S, k, ...]`, in the dtypes of `obs`, with the oldest observation first.
    Gradient: flows through `frames` and `obs`.
    Raises: ValueError if `started` or `done` is not bool, or if the shapes do not fit.
    Source: Mnih et al. 2015, "Human-level control through deep reinforcement learning", methods.

    >>> obs, done = torch.arange(4.0).unsqueeze(0), torch.tensor([[False, True, False, False]])
    >>> stack_frames(torch.tensor([[-2.0, -1.0]]), torch.tensor([True]), obs, done)[0].tolist()
    [[-2.0, -1.0, 0.0], [-1.0, 0.0, 1.0], [2.0, 2.0, 2.0], [2.0, 2.0, 3.0]]
    """
    check_bool(started=started, done=done)
    if started.shape != done.shape[:1] or done.ndim != 2:
        shapes = f"started has shape {list(started.shape)}, and done has {list(done.shape)}"
        raise ValueError(f"{shapes}; expected [n] and [n, S]")
    _check_shapes(frames, obs, started.shape, done.shape)
    before, (num, steps) = flatten(frames)[0][0].shape[1], done.shape
    nothing = done.new_zeros(num, before)
    is_first = torch.cat((nothing, ~started.unsqueeze(1), done[:, :-1]), 1)
    inside = torch.ones_like(done)
    back = [torch.zeros_like(done, dtype=torch.int64)]
    for k in range(before):
        inside = inside & ~is_first[:, before - k : before - k + steps]
        back.insert(0, back[0] + inside)
    newest = before + torch.arange(steps, device=done.device)
    row = (before + steps) * torch.arange(num, device=done.device)
    index = (row.reshape(-1, 1, 1) + newest.unsqueeze(1) - torch.stack(back, -1)).flatten()

    def stack(new: Tensor, old: Tensor) -> Tensor:
        joined = torch.cat((old.to(new.dtype), new), 1).flatten(0, 1)
        return joined.index_select(0, index).reshape(num, steps, before + 1, *new.shape[2:])

    return combined(stack, obs, frames)


def _check_shapes(frames: Any, obs: Any, num: torch.Size, batch: torch.Size) -> None:
    """Raise ValueError unless frames `[*num, k - 1, *shape]` fit observations `[*batch, *shape]`."""
    old, new = flatten(frames)[0], flatten(obs)[0]
    if len(old) != len(new):
        raise ValueError(f"frames has {len(old)} tensors, and obs has {len(new)}; expected the same fields")
    for before, now in zip(old, new, strict=True):
        shape = now.shape[len(batch) :]
        fits = before.shape[: len(num)] == num and before.shape[len(num) + 1 :] == shape
        if now.shape[: len(batch)] != batch or not fits or before.ndim != len(num) + 1 + len(shape):
            shapes = f"frames has shape {list(before.shape)}, and obs has {list(now.shape)}"
            expected = f"{[*num, 'k - 1', *shape]} and {[*batch, *shape]}".replace("'", "")
            raise ValueError(f"{shapes}; expected {expected}")


def random_shift(image: Tensor, shift: Tensor) -> Tensor:
    """Shift images, and repeat their border pixels where a shift leaves no pixels.

        out[y, x] = image[clip(y + dy, 0, h - 1), clip(x + dx, 0, w - 1)]

    With shifts drawn uniformly from -4 to 4 pixels, the function is the augmentation of DrQ. Draw such shifts with
    `ecrl.rng.randint(keys, (2,), low=-4, high=5)` and one key for each image.

    Args:
        image: `[*B, h, w, c]` of any dtype. If the channels are on another axis, move them to the last axis first.
        shift: int64 `[*B, 2]`, pairs (dy, dx) in pixels. If an axis of `shift` has size 1, all images along this axis
            get the same shift. For example, all frames of a stack can get the same shift.

    Returns: `[*B, h, w, c]` in the dtype of `image`.
    Gradient: flows through `image`.
    Raises: ValueError if `shift` is not int64, or if the shapes do not fit.
    Source: Kostrikov et al. 2021, arXiv:2004.13649 (random shifts).

    >>> image = torch.tensor([[1, 2, 3], [4, 5, 6]]).unsqueeze(-1)
    >>> random_shift(image, torch.tensor([1, -1])).squeeze(-1).tolist()
    [[4, 4, 5], [4, 4, 5]]
    """
    if shift.dtype != torch.int64:
        raise ValueError(f"shift has dtype {shift.dtype}, expected torch.int64")
    fits = shift.ndim == image.ndim - 2 and all(
        size in (1, images) for size, images in zip(shift.shape[:-1], image.shape[:-3], strict=True)
    )
    if image.ndim < 3 or not fits or shift.shape[-1] != 2:
        shapes = f"image has shape {list(image.shape)}, and shift has {list(shift.shape)}"
        raise ValueError(f"{shapes}; expected [*B, h, w, c] and [*B, 2]")
    height, width, channels = image.shape[-3:]
    y, x = (torch.arange(size, device=image.device) for size in (height, width))
    y = (y + shift[..., :1]).clamp(0, height - 1)
    x = (x + shift[..., 1:]).clamp(0, width - 1)
    index = (y.unsqueeze(-1) * width + x.unsqueeze(-2)).flatten(-2)
    index = index.expand(*image.shape[:-3], height * width).unsqueeze(-1)
    flat = image.flatten(-3, -2).gather(-2, index.expand(*index.shape[:-1], channels))
    return flat.unflatten(-2, (height, width))
