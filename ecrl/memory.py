"""What memory there is. What cannot fit is refused before any is taken: Linux lends more than it has, then kills."""

import os

import torch

from ecrl.errors import ConfigError
from ecrl.spaces import Box, Dict, Space, element_shape


def room(device: torch.device) -> int:
    """Bytes of memory of a device, free or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_room(need: int, device: torch.device, told: str) -> None:
    """Refuse what needs more bytes than there are; `told` says where it stands in the config and what it is.

    >>> check_room(10**18, torch.device("cpu"), "trainer.num_envs: 10**15 environments")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ecrl.errors.ConfigError: trainer.num_envs: 10**15 environments take 1,000,000,000 GB at least, cpu has ...
    """
    if need > (have := room(device)):
        raise ConfigError(f"{told} take {need / 1e9:,.0f} GB at least, {device} has {have / 1e9:,.0f}; make it smaller")


def element_bytes(space: Space) -> int:
    """Bytes of one element as a run keeps it: float32 or int64.

    >>> from ecrl.spaces import Discrete, box, dict_space
    >>> element_bytes(dict_space({"joints": box(-1.0, 1.0, 3), "gear": Discrete(4)}))
    20
    """
    if isinstance(space, Dict):
        return sum(element_bytes(part) for _, part in space.items)
    return torch.Size(element_shape(space)).numel() * (4 if isinstance(space, Box) else 8)
