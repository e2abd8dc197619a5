"""Refuse allocations that cannot fit, before they are made. Linux overcommits memory and kills the process later."""

import os

import torch

from ecrl.errors import ConfigError
from ecrl.spaces import Box, Dict, Space, element_shape


def total_memory(device: torch.device) -> int:
    """Return the total memory of a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_room(need: int, device: torch.device, label: str) -> None:
    """Raise ConfigError if an allocation needs more bytes than the device has.

    Args:
        need: bytes of the allocation.
        device: the device that would hold it.
        label: start of the message: the config key and the objects, in the plural.

    >>> check_room(10**18, torch.device("cpu"), "trainer.num_envs: 10**15 environments")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ecrl.errors.ConfigError: trainer.num_envs: 10**15 environments take at least 1,000,000,000 GB, cpu has ...
    """
    if need > (available := total_memory(device)):
        raise ConfigError(
            f"{label} take at least {need / 1e9:,.0f} GB, {device} has {available / 1e9:,.0f}; make it smaller"
        )


def element_bytes(space: Space) -> int:
    """Return the bytes of one element as a run stores it: float32 or int64.

    >>> from ecrl.spaces import Discrete, box, dict_space
    >>> element_bytes(dict_space({"joints": box(-1.0, 1.0, 3), "gear": Discrete(4)}))
    20
    """
    if isinstance(space, Dict):
        return sum(element_bytes(part) for _, part in space.items)
    return torch.Size(element_shape(space)).numel() * (4 if isinstance(space, Box) else 8)
