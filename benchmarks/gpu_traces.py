"""Support benchmarks on a GPU: environment variables, traces, targets, and rows marked "not measured" without a GPU.

The functions read the work of a GPU from a trace of torch's profiler. In a trace, all work of one launch of a CUDA
graph has the same correlation number.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from benchmarks.pairs import available
from benchmarks.separate_process import run_in_process

ENV: dict[str, dict[str, str]] = {
    "cpu": {},
    "cuda": {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": ""},
}
"""Environment variables by torch device. JAX must not preallocate, because jax and torch share the GPU's memory."""
MUST_STEPS_S, MUST_GRAPH_SHARE, MUST_COPY_SHARE = 20e6, 0.95, 0.7
"""Targets on an H200: env steps/s at `MANY_ENVS`, share of time in CUDA graphs, GAE's share of a copy's bandwidth."""
MANY_ENVS = 65_536

Events = list[dict[str, Any]]


def visible() -> bool:
    """Return True if torch sees a GPU in this process."""
    import torch

    return torch.cuda.is_available()


@cache
def has_gpu() -> bool:
    """Return True if torch sees a GPU. The function checks only once, in a separate process."""
    return run_in_process("benchmarks.gpu_traces:visible", {}, available())


def not_measured(**about: Any) -> dict[str, Any]:
    """Return a row with the status "not measured", for a machine without a GPU.

    >>> not_measured(num_envs=4)
    {'num_envs': 4, 'status': 'not measured'}
    """
    return {**about, "status": "not measured"}


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the total length of the union of spans `(start, stop)`.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def work_spans(events: Events) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the spans of all kernels and copies, and of all CUDA graphs from first to last kernel, in microseconds."""
    single, graphs = [], {}
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        start, stop = span = event["ts"], event["ts"] + event["dur"]
        single.append(span)
        about = event.get("args", {})
        if about.get("graph id", 0):
            launch = about["graph id"], about.get("correlation")
            span_so_far = graphs.get(launch, span)
            graphs[launch] = min(span_so_far[0], start), max(span_so_far[1], stop)
    return single, list(graphs.values())


def kernel_share(events: Events, wall_us: float) -> dict[str, float]:
    """Return the share of `wall_us` that a GPU was busy, and the share inside CUDA graphs, from the events of a trace.

    >>> busy = [{"ph": "X", "cat": "kernel", "ts": t, "dur": 2.0, "args": {"graph id": g}} for t, g in ((0, 1), (5, 0))]
    >>> kernel_share(busy, 10.0)
    {'busy_share': 0.4, 'graph_share': 0.2}
    """
    single, graphs = work_spans(events)
    return {"busy_share": covered(single) / wall_us, "graph_share": covered(graphs) / wall_us}


def seconds_on_device(events: Events, times: int) -> float:
    """Return the GPU seconds per call over `times` calls.

    If the trace has CUDA graphs, only their time counts. Otherwise, the time of kernels and copies counts.

    >>> seconds_on_device([{"ph": "X", "cat": "kernel", "ts": 0.0, "dur": 3e6}], 2)
    1.5
    """
    single, graphs = work_spans(events)
    return covered(graphs or single) / times / 1e6


def traced(work: Callable[[], Any], times: int) -> tuple[Events, float]:
    """Trace `times` calls of `work`. Return the events of the trace, and the microseconds that the calls took."""
    import json
    import tempfile
    import time
    from pathlib import Path

    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        start = time.perf_counter()
        for _ in range(times):
            work()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"], wall * 1e6


def profiled_share(make: str, args: dict[str, Any], times: int = 5) -> dict[str, float]:
    """Return the `kernel_share` of a contestant's work, after two units of work that capture the graphs."""
    from importlib import import_module

    module, function = make.split(":")
    work = getattr(import_module(module), function)(**args)
    work()
    work()
    return kernel_share(*traced(work, times))


def on_device(calls: Mapping[str, Callable[[], Any]], times: int = 20) -> dict[str, list[float]]:
    """Return the GPU seconds per call of each function. Leave out functions that do not use the GPU."""
    device_seconds = {name: seconds_on_device(traced(call, times)[0], times) for name, call in calls.items()}
    return {name: [seconds] for name, seconds in device_seconds.items() if seconds}


def copy_rate(size: int) -> float:
    """Return the bytes per second, read plus written, of GPU copies that move `size` bytes, without launch time."""
    import torch

    source = torch.ones(max(1, size // 8), device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / on_device({"copy": lambda: target.copy_(source)})["copy"][0]


def run_verdict(row: dict[str, Any]) -> dict[str, Any]:
    """Return the targets of a run, and True in `met` if the run meets them. If the run failed, return an empty dict.

    >>> run_verdict({"num_envs": 512, "ecrl_steps_per_s": 4e6, "graph_share": 0.96})["met"]
    True
    >>> run_verdict({"num_envs": 65_536, "ecrl_steps_per_s": 4e6, "graph_share": 0.96})["met"]
    False
    """
    if "error" in row:
        return {}
    steps = MUST_STEPS_S if row["num_envs"] >= MANY_ENVS else 0.0
    met = row["ecrl_steps_per_s"] >= steps and row["graph_share"] >= MUST_GRAPH_SHARE
    return {"must_steps_per_s": steps or None, "must_graph_share": MUST_GRAPH_SHARE, "met": met}


def kernel_verdict(kernel: str, implementation: str, roof_share: float | None) -> dict[str, Any]:
    """Return the target of a kernel on a GPU. Only compiled GAE has a target, a share of the bandwidth of a copy.

    >>> kernel_verdict("gae", "ecrl compiled", 0.8)
    {'must': None, 'must_roof_share': 0.7, 'met': True}
    """
    if kernel != "gae" or implementation != "ecrl compiled" or roof_share is None:
        return {"must": None, "met": None}
    return {"must": None, "must_roof_share": MUST_COPY_SHARE, "met": roof_share >= MUST_COPY_SHARE}
