"""Measure the machine's limits: bytes per second of a copy, and float32 operations per second of a matrix product."""

import statistics

import torch

from benchmarks.alternating_calls import time_alternating

_SIDE = {"cpu": 512, "cuda": 8192}


def synchronize(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def copy_rate(size: int, device: str, seconds: float = 0.05) -> float:
    """Return the bytes per second, read plus written, of copies that move `size` bytes, which may fit in a cache."""
    source = torch.ones(max(1, size // 8), device=device)  # half is read, half is written, 4 bytes an element
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        synchronize(device)

    return 2 * source.nbytes / statistics.median(time_alternating({"copy": copy}, 3, seconds)["copy"])


def matmul_rate(device: str, seconds: float = 0.05) -> float:
    """Return the operations per second of a large square matrix product. A multiply-add counts as two operations."""
    side = _SIDE[device]
    a, out = torch.ones(side, side, device=device), torch.empty(side, side, device=device)

    def product() -> None:
        torch.mm(a, a, out=out)
        synchronize(device)

    return 2 * side**3 / statistics.median(time_alternating({"product": product}, 3, seconds)["product"])


def share_of_roof(size: float, operations: float, seconds: float, copy: float, matmul: float) -> float:
    """Return the shortest possible time for the bytes and operations on this machine, divided by the measured time.

    >>> share_of_roof(size=100.0, operations=10.0, seconds=2.0, copy=100.0, matmul=100.0)
    0.5
    """
    return max(size / copy, operations / matmul) / seconds
