"""What a GPU changes: the device, the environment of the processes, and rows that say so where there is none."""

from functools import cache
from typing import Any

from benchmarks.alone import alone
from benchmarks.pairs import available

ENV: dict[str, dict[str, str]] = {
    "cpu": {},
    "cuda": {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": ""},
}
"""Added to the environment of a process by device of torch; jax and torch share the memory of a GPU."""


def visible() -> bool:
    """Whether torch sees a GPU, in this process."""
    import torch

    return torch.cuda.is_available()


@cache
def has_gpu() -> bool:
    """Whether torch sees a GPU; asked in a process of its own, once."""
    return alone("benchmarks.gpu:visible", {}, available())


def not_measured(**about: Any) -> dict[str, Any]:
    """A row that was not measured, for want of a GPU.

    >>> not_measured(num_envs=4)
    {'num_envs': 4, 'status': 'not measured'}
    """
    return {**about, "status": "not measured"}


def kernel_share(events: list[dict[str, Any]], wall_us: float) -> dict[str, float]:
    """Shares of the time in which a GPU worked at all, and in which it worked on a CUDA graph, from a trace's events.

    >>> busy = [{"ph": "X", "cat": "kernel", "ts": t, "dur": 2.0, "args": {"graph id": g}} for t, g in ((0, 1), (1, 0))]
    >>> kernel_share(busy, 10.0)
    {'busy_share': 0.3, 'graph_share': 0.2}
    """
    spans = {True: [], False: []}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            graph = bool(event.get("args", {}).get("graph id", 0))
            spans[graph].append((event["ts"], event["ts"] + event["dur"]))
    shares = {"busy_share": spans[True] + spans[False], "graph_share": spans[True]}
    return {name: covered(parts) / wall_us for name, parts in shares.items()}


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def profiled_share(make: str, args: dict[str, Any], times: int = 5) -> dict[str, float]:
    """`kernel_share` of a contestant's work, from torch's profiler, after two units for capturing."""
    import json
    import tempfile
    import time
    from importlib import import_module
    from pathlib import Path

    import torch

    module, function = make.split(":")
    work = getattr(import_module(module), function)(**args)
    work()
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        start = time.perf_counter()
        for _ in range(times):
            work()
        wall = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return kernel_share(events, wall * 1e6)
