"""Discretise actions into bins. A policy then chooses an action as a sequence of tokens, which are indices of bins."""

from typing import NamedTuple

import torch
from torch import Tensor

from ecrl.spaces import Box


class ActionBins(NamedTuple):
    """Bins of equal width between the bounds of each dimension of an action.

    An action is a chunk of k single actions, which the environment takes one after the other. Each single action has A
    dimensions. If the shape of `space` is `[A]`, k is 1.

    Attributes:
        space: Box with finite bounds, of shape `[A]` or `[k, A]`.
        counts: number of bins of each of the A dimensions.
    """

    space: Box
    counts: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Return (k, A), the shape of the tokens of an action."""
        return (self.space.shape[0] if len(self.space.shape) == 2 else 1), self.space.shape[-1]

    @property
    def width(self) -> int:
        """Return the largest number of bins, which is the number of logits of each token."""
        return max(self.counts)

    def fixed(self) -> tuple[bool, ...]:
        """Return k * A flags, one per entry of an action: True if the entry's lower and upper bound are equal."""
        return tuple(low == high for low, high in zip(self.space.low, self.space.high, strict=True))

    def legal(self, device: torch.device) -> Tensor:
        """Return a bool mask `[k * A, width]`, True for the bins that each token of an action may select.

        If the bounds of an entry of the action are equal, the token of this entry may select only bin 0.
        """
        counts = self.counts * self.shape[0]
        counts = tuple(1 if fixed else n for n, fixed in zip(counts, self.fixed(), strict=True))
        return torch.arange(self.width, device=device) < torch.tensor(counts, device=device).unsqueeze(-1)

    def _low_and_step(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower bounds of the space, and the widths of the bins, each `[k, A]`."""
        bounds = zip(self.space.low, self.space.high, self.counts * self.shape[0], strict=True)
        steps = [(high - low) / n for low, high, n in bounds]
        low, step = like.new_tensor(self.space.low), like.new_tensor(steps)
        return low.reshape(self.shape), step.reshape(self.shape)

    def centres(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Return the actions `[*B, *space.shape]` at the centres of the bins with the indices `tokens`, `[*B, k, A]`.

            low + (token + 1/2) * (high - low) / count

        The result has the dtype of `like`.

        >>> from ecrl.spaces import box
        >>> ActionBins(box(-1.0, 1.0, 2), (4, 2)).centres(torch.tensor([[[0, 1]]]), torch.zeros(()))
        tensor([[-0.7500,  0.5000]])
        """
        low, step = self._low_and_step(like)
        action = low + (tokens.to(like.dtype) + 0.5) * step
        return action.reshape(*tokens.shape[:-2], *self.space.shape)

    def tokens(self, action: Tensor) -> Tensor:
        """Return the bin indices `[*B, k, A]`, int64, of actions `[*B, *space.shape]`.

            clip(floor((action - low) / (high - low) * count), 0, count - 1)

        If the bounds of an entry of the action are equal, the index is 0.

        >>> from ecrl.spaces import box
        >>> ActionBins(box(-1.0, 1.0, 2), (4, 2)).tokens(torch.tensor([[-0.75, 3.0]]))
        tensor([[[0, 1]]])
        """
        low, step = self._low_and_step(action)
        rows = action.reshape(*action.shape[: action.ndim - len(self.space.shape)], *self.shape)
        last = torch.tensor(self.counts, device=action.device) - 1
        index = ((rows - low) / torch.where(step > 0.0, step, torch.inf)).floor()
        return torch.minimum(index.clamp(min=0.0).to(torch.int64), last)
