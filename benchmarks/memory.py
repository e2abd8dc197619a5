"""Peak memory per environment step: what one iteration holds at most, over what the process held after its imports.

A process each. Its first iteration, which compiles, is not counted: the kernel's high-water mark is set back after it.
What libraries keep whatever the size drops out of `bytes_per_step`, the rise of the peak from one size to the next; the
quick form has one size of each.
"""

import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.alone import alone, caching_in
from benchmarks.gpu import ENV, has_gpu, not_measured
from benchmarks.pairs import Failure
from benchmarks.peers import STEPS
from benchmarks.worker import peak_rss_mb

MAKERS = {"ecrl": "benchmarks.ours:make", "rejax": "benchmarks.peers.rejax_ppo:make"}
MAKERS["sb3"] = "benchmarks.peers.sb3_ppo:make"
COMPILED = ("ecrl", "rejax")
SIZES = {"ecrl": (64, 512, 2048, 8192), "rejax": (64, 512, 2048, 8192), "sb3": (64, 512, 2048)}
QUICK = {"ecrl": (512,), "rejax": (512,), "sb3": (64,)}
GPU_SIZES = (2048, 8192, 65_536)


def resident_mb() -> float:
    """The memory this process holds now, MB."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024


def forget_peak() -> None:
    """Set the high-water mark that `peak_rss_mb` reads back to what is held now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak(make: str, args: dict[str, Any]) -> dict[str, float]:
    """The peak of a contestant's second iteration and what its imports hold, MB."""
    module, function = make.split(":")
    made = getattr(import_module(module), function)
    before = resident_mb()
    work = made(**args)
    forget_peak()
    start = time.perf_counter()
    work()
    return {"imports_mb": before, "peak_mb": peak_rss_mb() - before, "seconds": time.perf_counter() - start}


def peak_of_gpu(args: dict[str, Any]) -> dict[str, float]:
    """What torch's allocator holds of the GPU in the second iteration of ours, MB; the pool of CUDA graphs with it."""
    import torch

    from benchmarks.ours import make

    work = make(**args)
    work()
    return {"imports_mb": 0.0, "peak_mb": torch.cuda.memory_reserved() / 2**20}


def _measured(
    name: str, device: str, function: str, args: dict[str, Any], cores: Sequence[int], warm: bool
) -> dict[str, Any]:
    """A row; `warm` compiles in another process first, since a compiler leaves more behind than a cache."""
    inner = args.get("args", args)
    about = {"contestant": name, "device": device, "num_envs": inner["num_envs"]}
    try:
        with tempfile.TemporaryDirectory() as folder:
            env = ENV[device] | (caching_in(folder) if warm else {})
            if warm:
                alone(f"benchmarks.memory:{function}", args, cores, env)
            return about | alone(f"benchmarks.memory:{function}", args, cores, env)
    except Failure as failure:
        return about | {"error": str(failure)}


def with_slopes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one contestant in order of size, with `bytes_per_step` from each one before; None for the first.

    >>> with_slopes([{"num_envs": 1, "peak_mb": 1.0}, {"num_envs": 9, "peak_mb": 2.0}])[1]["bytes_per_step"]
    1024.0
    """
    out: list[dict[str, Any]] = [row | {"bytes_per_step": None} for row in rows]
    for small, large in pairwise(row for row in out if "peak_mb" in row):
        steps = (large["num_envs"] - small["num_envs"]) * STEPS
        large["bytes_per_step"] = (large["peak_mb"] - small["peak_mb"]) * 2**20 / steps
    return out


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """A row per contestant and size, on the first core; then ours on a GPU, or that it is not measured."""
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
    """Peak over imports by env steps of an iteration, a line per contestant."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(6, 4), layout="constrained")
    axes = made.subplots()
    for name, device in sorted({(r["contestant"], r["device"]) for r in rows if "peak_mb" in r}):
        seen = [r for r in rows if (r["contestant"], r["device"]) == (name, device) and "peak_mb" in r]
        label = f"{name} ({device})"
        axes.plot([r["num_envs"] * STEPS for r in seen], [r["peak_mb"] for r in seen], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="env steps per iteration", ylabel="peak over imports, MB")
    axes.legend()
    return made
