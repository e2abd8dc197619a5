"""Measure peak memory per environment step: the peak of one iteration, minus the memory of the process after imports.

Each measurement has a separate process. The first iteration compiles. After the first iteration, the process resets
Linux's high-water mark, so the peak is the peak of the second iteration. `bytes_per_step` is the increase of the peak
from one size to the next, per additional step. Memory that does not depend on the size therefore cancels out. A quick
run has one size per library.
"""

import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu_traces import ENV, has_gpu, not_measured
from benchmarks.other_libraries import STEPS
from benchmarks.pairs import Failure
from benchmarks.separate_process import caching_in, run_in_process
from benchmarks.worker import peak_rss_mb

MAKERS = {"ecrl": "benchmarks.ecrl_runs:make", "rejax": "benchmarks.other_libraries.rejax_ppo:make"}
MAKERS["sb3"] = "benchmarks.other_libraries.sb3_ppo:make"
COMPILED = ("ecrl", "rejax")
SIZES = {"ecrl": (64, 512, 2048, 8192), "rejax": (64, 512, 2048, 8192), "sb3": (64, 512, 2048)}
QUICK = {"ecrl": (512,), "rejax": (512,), "sb3": (64,)}
GPU_SIZES = (2048, 8192, 65_536)


def resident_mb() -> float:
    """Return the present resident memory of this process, in MiB."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024


def forget_peak() -> None:
    """Reset the high-water mark that `peak_rss_mb` reads to the present memory."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak(make: str, args: dict[str, Any]) -> dict[str, float]:
    """Return the memory after a contestant's imports, and the additional peak of its second iteration, both in MiB."""
    module, function = make.split(":")
    make_work = getattr(import_module(module), function)
    imports_mb = resident_mb()
    work = make_work(**args)
    forget_peak()
    start = time.perf_counter()
    work()
    return {"imports_mb": imports_mb, "peak_mb": peak_rss_mb() - imports_mb, "seconds": time.perf_counter() - start}


def peak_of_gpu(args: dict[str, Any]) -> dict[str, float]:
    """Return the GPU memory in MiB that torch has reserved after two iterations of ecrl, with the CUDA graphs' pool."""
    import torch

    from benchmarks.ecrl_runs import make

    work = make(**args)
    work()
    return {"imports_mb": 0.0, "peak_mb": torch.cuda.memory_reserved() / 2**20}


def _measured(
    name: str, device: str, function: str, args: dict[str, Any], cores: Sequence[int], warm: bool
) -> dict[str, Any]:
    """Measure one contestant at one size, and return its row.

    If `warm` is True, another process first fills the compile cache, because compiling would increase the measured
    memory.
    """
    inner = args.get("args", args)
    row = {"contestant": name, "device": device, "num_envs": inner["num_envs"]}
    try:
        with tempfile.TemporaryDirectory() as folder:
            env = ENV[device] | (caching_in(folder) if warm else {})
            if warm:
                run_in_process(f"benchmarks.memory:{function}", args, cores, env)
            return row | run_in_process(f"benchmarks.memory:{function}", args, cores, env)
    except Failure as failure:
        return row | {"error": str(failure)}


def with_slopes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `bytes_per_step` to the rows of one contestant, sorted by size. Rows without a smaller size have None.

    >>> with_slopes([{"num_envs": 1, "peak_mb": 1.0}, {"num_envs": 9, "peak_mb": 2.0}])[1]["bytes_per_step"]
    1024.0
    """
    out: list[dict[str, Any]] = [row | {"bytes_per_step": None} for row in rows]
    for small, large in pairwise(row for row in out if "peak_mb" in row):
        steps = (large["num_envs"] - small["num_envs"]) * STEPS
        large["bytes_per_step"] = (large["peak_mb"] - small["peak_mb"]) * 2**20 / steps
    return out


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row per contestant and size on the first core, then the rows of ecrl on a GPU.

    Without a GPU, the rows of the GPU are marked as not measured.
    """
    out = []
    for name, sizes in (QUICK if quick else SIZES).items():
        each = [{"make": MAKERS[name], "args": {"num_envs": size}} for size in sizes]
        out += with_slopes(
            [_measured(name, "cpu", "peak", args, cores[:1], name in COMPILED and not quick) for args in each]
        )
    if not has_gpu():
        return [*out, *(not_measured(contestant="ecrl", device="cuda", num_envs=size) for size in GPU_SIZES)]
    each = [{"args": {"num_envs": size, "trainer__device": "cuda"}} for size in GPU_SIZES]
    return out + with_slopes([_measured("ecrl", "cuda", "peak_of_gpu", args, cores, warm=False) for args in each])


def figure(rows: list[dict[str, Any]]) -> Any:
    """Plot the peak memory without imports against the env steps per iteration, by contestant and device."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(6, 4), layout="constrained")
    axes = picture.subplots()
    for name, device in sorted({(r["contestant"], r["device"]) for r in rows if "peak_mb" in r}):
        points = [r for r in rows if (r["contestant"], r["device"]) == (name, device) and "peak_mb" in r]
        label = f"{name} ({device})"
        axes.plot([r["num_envs"] * STEPS for r in points], [r["peak_mb"] for r in points], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="env steps per iteration", ylabel="peak over imports, MB")
    axes.legend()
    return picture
