"""Small tensors in few buffers."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_SMALL = 4096  # elements


class Packing(NamedTuple):
    """Places of small tensors in shared buffers: `(buffer, first element, shape)` of each. A large one has its own."""

    places: list[tuple[int, int, torch.Size]]
    buffers: list[list[int]]

    def pack(self, leaves: Sequence[Tensor], lead: int = 0) -> list[Tensor]:
        """The buffers, with the first `lead` axes kept."""
        flat = [leaf.reshape(*leaf.shape[:lead], -1) for leaf in leaves]
        return [
            torch.cat([flat[i] for i in inside], -1) if len(inside) > 1 else leaves[inside[0]]
            for inside in self.buffers
        ]

    def unpack(self, buffers: Sequence[Tensor], lead: tuple[int, ...] = ()) -> list[Tensor]:
        """The tensors, as views."""
        return [
            buffers[which]
            if len(self.buffers[which]) == 1
            else buffers[which].narrow(-1, first, shape.numel()).reshape((*lead, *shape))
            for which, first, shape in self.places
        ]


def packing(leaves: Sequence[Tensor], lead: int = 0) -> Packing:
    """Every variable of a loop costs more than a step of a small network, so small ones of one dtype share a buffer."""
    places, buffers, groups = [], [], {}
    for i, leaf in enumerate(leaves):
        shape = leaf.shape[lead:]
        which = groups.setdefault(leaf.dtype if shape.numel() <= _SMALL else i, len(groups))
        if which == len(buffers):
            buffers.append([])
        places.append((which, sum(leaves[j].shape[lead:].numel() for j in buffers[which]), shape))
        buffers[which].append(i)
    return Packing(places, buffers)
