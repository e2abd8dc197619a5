"""Check allocations, pause the garbage collector, and let the C library keep freed memory.

Linux grants an allocation that exceeds the free memory, and later kills the process when the process uses the memory.
`check_room` therefore checks the size of a large allocation in advance. This module imports torch only inside
functions, because the command line must start fast.
"""

import ctypes
import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from ecrl.errors import ConfigError, UserError

if TYPE_CHECKING:
    import torch

_MESSAGES = "allocate memory|out of memory|not enough memory|Storage size calculation overflowed|numel: integer"
"""A regular expression that matches the error messages of failed allocations."""


def total_memory(device: "torch.device") -> int:
    """Return the total memory of a device, in bytes."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_room(need: int, device: "torch.device", label: str, advice: str = "make it smaller") -> None:
    """Raise ConfigError if an allocation needs more memory than the device has in total.

    Args:
        need: the size of the allocation, in bytes.
        device: the device on which to allocate.
        label: the start of the error message, such as `trainer.num_envs: 8 environments`. The label first names
            the setting or the buffer that the user can make smaller, and then the objects that need the memory. This
            second name must be in the plural.
        advice: the end of the error message.

    >>> import torch
    >>> check_room(10**18, torch.device("cpu"), "trainer.num_envs: 10**15 environments")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ecrl.errors.ConfigError: trainer.num_envs: 10**15 environments take at least 1,000,000,000 GB, cpu has ...
    """
    if need > (available := total_memory(device)):
        raise ConfigError(
            f"{label} take at least {need / 1e9:,.0f} GB, {device} has {available / 1e9:,.0f} GB; {advice}"
        )


@contextmanager
def enough_memory(label: str, advice: str) -> Iterator[None]:
    """Convert a failed allocation inside this context to a UserError with a one-line message.

    Args:
        label: the start of the error message.
        advice: the end of the error message, which suggests a way to use less memory.

    >>> with enough_memory("policy.actor", "make it smaller"):
    ...     raise MemoryError
    Traceback (most recent call last):
    ecrl.errors.UserError: policy.actor: not enough memory; make it smaller
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search(_MESSAGES, str(error)):
            raise
        request = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
        raise UserError(f"{label}: not enough memory{f' for {request[1]}' if request else ''}; {advice}") from None


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector inside this context.

    >>> with without_garbage_collection():
    ...     gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of two settings of glibc's `mallopt`."""


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep up to 512 MiB of freed memory for later allocations. Return True if the setting has changed.

    An iteration allocates and frees tensors of the same sizes as the iteration before. By default, glibc returns this
    memory to the operating system, which must clear every page again in the next iteration. The setting is for the
    whole process. It does not change if an environment variable such as MALLOC_TRIM_THRESHOLD_ configures glibc, or if
    the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    configured = any(name.startswith("MALLOC_") for name in os.environ)
    if mallopt is None or configured or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    # If one threshold is set, glibc no longer adapts the other one, so set both. The limit of the mmap
    # threshold is 32 MiB, so larger allocations do not reuse memory.
    return bool(mallopt(_MMAP_THRESHOLD, 32 * 2**20) and mallopt(_TRIM_THRESHOLD, 512 * 2**20))
