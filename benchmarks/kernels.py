"""Compare kernels with other libraries' kernels on one core or one GPU: time, ratio, and share of the machine's limit.

All implementations of a kernel take turns in one process, since a call is much shorter than a process start. Thread
counts and XLA's flags are as in `pairs`. Every row compares one of ecrl's implementations with one of another library.
If `ratio` is above 1, ecrl is faster.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.gpu_traces import ENV, has_gpu, kernel_verdict, not_measured, on_device
from benchmarks.gpu_traces import copy_rate as gpu_copy_rate
from benchmarks.pairs import Failure
from benchmarks.separate_process import run_in_process

MAX_COMPILE_S = 10.0
WAYS = ("ecrl compiled", "ecrl torch.compile", "ecrl eager")  # the ways to call a kernel
# Required ratios: ecrl takes at most 1.3 or 0.8 times as long as rlax, and at most 1.5 times as long as SB3.
MUSTS = {
    **{("gae", "4096x128", way, "rlax jitted"): 1 / 1.3 for way in WAYS},
    **{("gae", "64x1024", way, "rlax jitted"): 1 / 0.8 for way in WAYS},
    ("gae", "4096x128", "ecrl eager", "sb3 numpy"): 1 / 1.5,
    ("gae", "64x1024", "ecrl eager", "sb3 numpy"): 1 / 1.5,
}
SLOW = ("torchrl", "torchrl vec")  # a quick run leaves these out


class Case(NamedTuple):
    """Kernel at one size: its module in `implementations`, the arguments of `inputs` and `cost`, and the tables."""

    kernel: str
    size: str
    module: str
    args: tuple[int, ...]
    quick: bool
    ecrl: str = "ECRL"
    others: str = "OTHERS"


CASES = [
    Case("gae", "4096x128", "gae", (4096, 128), True),
    Case("gae", "64x1024", "gae", (64, 1024), True),
    Case("ppo_loss", "2048 rows", "loss", (2048,), True),
    Case("ppo_loss", "65536 rows", "loss", (65_536,), False),
    Case("adam", "two MLP-64", "adam", (64,), True),
    Case("adam", "two MLP-512", "adam", (512,), False),
    Case("rng uniform", "2^20", "draws", (2**20,), False, "UNIFORM"),
    Case("rng normal", "2^20", "draws", (2**20,), True, "NORMAL"),
]


def implementations(case: Case) -> tuple[Any, Any, Any]:
    """Return the module of a case, and its tables of ecrl's and of the other implementations."""
    from importlib import import_module

    module = import_module(f"benchmarks.implementations.{case.module}")
    table = getattr(module, case.ecrl)
    return module, *(table if isinstance(table, tuple) else (table, getattr(module, case.others)))


def prepare(make: Any, inputs: Any, device: str) -> tuple[Any, float, str | None]:
    """Build an implementation and call it once. Return the call, the seconds of both, and the error or None."""
    start = time.perf_counter()
    try:
        call = make(inputs, device)
        call()
    except Exception as error:  # the error becomes a row, and the other implementations continue
        lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
        return None, float("nan"), lines[0]
    return call, time.perf_counter() - start, None


def measure(number: int, quick: bool, device: str) -> list[dict[str, Any]]:
    """Measure the case with index `number`, and return a row per pair of ecrl's and another implementation."""
    from benchmarks.alternating_calls import time_alternating

    case = CASES[number]
    module, ecrl, others = implementations(case)
    others = {name: make for name, make in others.items() if not (quick and name in SLOW)}
    inputs = module.inputs(*case.args)
    prepared = {name: prepare(make, inputs, device) for name, make in (ecrl | others).items()}
    calls = {name: call for name, (call, _, error) in prepared.items() if error is None}
    seconds = time_alternating(calls, rounds=5, seconds=0.05 if quick else 0.5)
    roof = roofline_shares(case, module.cost(*case.args), seconds if device == "cpu" else on_device(calls), device)
    result_rows: list[dict[str, Any]] = [
        row(case, (a, b), prepared, seconds) | roof.get(a, {}) | {"device": device} for a in ecrl for b in others
    ]
    if device == "cpu":
        return result_rows
    return [r if "error" in r else r | kernel_verdict(r["kernel"], r["ours"], r.get("roof_share")) for r in result_rows]


def roofline_shares(case: Case, cost: Any, seconds: dict[str, list[float]], device: str) -> dict[str, dict[str, Any]]:
    """Return each implementation's bandwidth and `share_of_roof`, and the rates of a copy and a matrix product."""
    from benchmarks.roofline import copy_rate, matmul_rate, share_of_roof

    copy, product = copy_rate(cost.bytes, device) if device == "cpu" else gpu_copy_rate(cost.bytes), matmul_rate(device)
    out = {}
    for name, rounds in seconds.items():
        time_ = statistics.median(rounds)
        share = share_of_roof(cost.bytes, cost.operations, time_, copy, product)
        roof = {"copy_gb_s": copy / 1e9, "matmul_gflop_s": product / 1e9, "gflop_s": cost.operations / time_ / 1e9}
        out[name] = {"gb_s": cost.bytes / time_ / 1e9, "roof_share": share, "roof": roof}
        if case.module == "draws":
            out[name]["bits_per_s"] = 32 * case.args[0] / time_
    return out


def row(
    case: Case, names: tuple[str, str], prepared: dict[str, Any], seconds: dict[str, list[float]]
) -> dict[str, Any]:
    """Return the row that compares one of ecrl's implementations with the implementation of another library."""
    from benchmarks.alternating_calls import ratio

    ecrl, other = names
    about: dict[str, Any] = {"kernel": case.kernel, "size": case.size, "ours": ecrl, "peer": other}
    errors = [f"{name}: {prepared[name][2]}" for name in names if prepared[name][2] is not None]
    if errors:
        return about | {"error": "; ".join(errors)}
    about |= {
        "ours_us": statistics.median(seconds[ecrl]) * 1e6,
        "peer_us": statistics.median(seconds[other]) * 1e6,
    }
    about |= ratio(seconds[ecrl], seconds[other])
    compiled = ecrl in WAYS[:2]
    about |= {
        "compile_s": prepared[ecrl][1] if compiled else None,
        "must": MUSTS.get((case.kernel, case.size, *names)),
    }
    if about["must"] is not None:
        about["met"] = about["ratio"] >= about["must"] and not (compiled and about["compile_s"] > MAX_COMPILE_S)
    return about


def measure_all(quick: bool, device: str) -> list[dict[str, Any]]:
    """Measure all cases in this process, and return their rows.

    The function first compiles a small function, so that the compile time of no case includes loading the compiler.
    """
    import torch

    from benchmarks.implementations.common import compiled

    compiled(torch.neg, device)(torch.zeros(8, device=device))
    numbers = [i for i, case in enumerate(CASES) if case.quick or not quick]
    return [row for i in numbers for row in measure(i, quick, device)]


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows of the first core, then the rows of a GPU. Without a GPU, the latter are marked as not measured.

    Compile caches start empty.
    """
    out = []
    for device in ("cpu", "cuda"):
        if device == "cuda" and not has_gpu():
            out += [not_measured(kernel=c.kernel, size=c.size, device=device) for c in CASES if c.quick or not quick]
            continue
        with tempfile.TemporaryDirectory() as cache:
            env = {"TORCHINDUCTOR_CACHE_DIR": cache, **ENV[device]}
            try:
                out += run_in_process(
                    "benchmarks.kernels:measure_all", {"quick": quick, "device": device}, cores[:1], env
                )
            except Failure as failure:
                out.append({"kernel": "all", "device": device, "error": str(failure)})
    return out


def figure(rows: list[dict[str, Any]]) -> Any:
    """Plot the ratio of every pair with its spread, and a line at equal speed."""
    from matplotlib.figure import Figure

    measured = [r for r in rows if "ratio" in r]
    picture = Figure(figsize=(9, 1 + 0.28 * len(measured)), layout="constrained")
    axes = picture.subplots()
    labels = [f"{r['kernel']} {r['size']} ({r['device']}): {r['ours']} / {r['peer']}" for r in measured]
    for label, r in zip(labels, measured, strict=True):
        spread = [[r["ratio"] - r["ratio_min"]], [r["ratio_max"] - r["ratio"]]]
        color = "tab:blue" if r["ours"] == "ecrl compiled" else "tab:gray"
        axes.errorbar([r["ratio"]], [label], xerr=spread, marker="o", capsize=3, color=color)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="speed, ecrl / peer")
    axes.invert_yaxis()
    return picture
