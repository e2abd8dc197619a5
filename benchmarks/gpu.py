"""Check a GPU in about eight minutes: the agreement of compiled and eager runs, then the speed of runs and kernels.

Each part has a time limit, and each row is printed as soon as it is measured, because GPU time is often limited.
Without a GPU, all rows are "not measured".
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import end_to_end
from benchmarks.gpu_traces import ENV, MUST_GRAPH_SHARE, has_gpu, not_measured, run_verdict
from benchmarks.pairs import Failure, await_ready, run_rounds, started
from benchmarks.separate_process import begin, result, run_in_process, stop

CONFIGS = ("cartpole_ppo", "cartpole_grpo", "point_mass_apg", "repeat_previous_ppo", "minatar_breakout_ppo")
CONFIGS += ("cartpole_dqn", "pendulum_sac", "push_cube_ppo")
SIZES = (2048, 65_536)
"""Numbers of environments of CartPole PPO."""
MUST_DIFFER_LESS = 1e-4
LIMITS = {"agreement": 170.0, "speed": 140.0, "time in graphs": 50.0, "kernels": 70.0}
"""Time limit of each part, in seconds. The part "time in graphs" runs once for each of `SIZES`."""
_SMALL = {"trainer.num_envs": 8, "trainer.buffer_size": 32, "trainer.iterations": 2, "trainer.enable_eval": False}
_SMALL_ALGORITHM = {"n_epochs": 2, "batch_size": 64, "group_size": 4, "learning_starts": 0}

Row = dict[str, Any]


def agreement(config: str, device: str) -> Row:
    """Return the largest relative difference between the states of an eager and a compiled run after two iterations.

    The row also has the seconds that each of the two runs took.
    """
    from ecrl import init_state, load_config, train_iter

    own = load_config(config)
    keys = _SMALL | {f"algorithm.cfg.{k}": v for k, v in _SMALL_ALGORITHM.items() if hasattr(own.algorithm.cfg, k)}
    if hasattr(own.env.cfg, "physics"):
        keys["env.cfg.physics"] = {"backend": "warp"}
    states, seconds = [], []
    for compiled in ("off", "on"):
        start = time.perf_counter()
        cfg = load_config(config, keys | {"trainer.device": device, "trainer.compile": compiled})
        *_, last = train_iter(init_state(cfg), cfg)
        states.append({name: leaf.detach().cpu() for name, leaf in last["state"].items(True, True)})
        seconds.append(time.perf_counter() - start)
    return {**largest_difference(*states), "eager_s": seconds[0], "compiled_s": seconds[1]}


def largest_difference(expected: Mapping[Any, Any], actual: Mapping[Any, Any]) -> Row:
    """Return the largest `|a - b| / (1 + |a|)` over all tensors, and the name of its tensor. NaN equals NaN.

    >>> import torch
    >>> largest_difference({"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([1.0, 5.0])})
    {'difference': 1.0, 'where': 'x', 'must_below': 0.0001, 'met': False}
    """
    worst, where = 0.0, ""
    for name, a in expected.items():
        x, y = a.double(), actual[name].double()
        apart = ((x - y).abs() / (1.0 + x.abs())).masked_fill((x == y) | (x.isnan() & y.isnan()), 0.0)
        difference = float(apart.nan_to_num(nan=float("inf")).max()) if apart.numel() else 0.0
        if difference > worst:
            worst, where = difference, name if isinstance(name, str) else "/".join(name)
    return {"difference": worst, "where": where, "must_below": MUST_DIFFER_LESS, "met": worst < MUST_DIFFER_LESS}


def agreements(device: str, cores: Sequence[int]) -> Iterator[Row]:
    """Yield a row per config. All configs run at the same time, so that compiling uses the whole machine."""
    limit = LIMITS["agreement"]
    end, env = time.monotonic() + limit, ENV[device]
    spread = [[cores[i % len(cores)]] for i in range(len(CONFIGS))]
    running = [
        begin("benchmarks.gpu:agreement", {"config": name, "device": device}, core, env)
        for name, core in zip(CONFIGS, spread, strict=True)
    ]
    try:
        for name, one in zip(CONFIGS, running, strict=True):
            yield _agreement_row(name, one, end, limit)
    finally:
        for one in running:
            stop(one)


def _agreement_row(config: str, running: Any, end: float, limit: float) -> Row:
    about = {"part": "agreement", "what": config}
    try:
        running.process.wait(max(0.0, end - time.monotonic()))
        return about | result(running)
    except subprocess.TimeoutExpired:
        return about | {"error": f"took longer than {limit:g} s"}
    except Failure as failure:
        return about | {"error": str(failure)}


def speed(device: str, cores: Sequence[int]) -> Iterator[Row]:
    """Yield a row per number of environments: CartPole PPO against rejax, and the share of time inside CUDA graphs.

    All sizes are set up at the same time. If a size is not ready within the time limit, its row has an error.
    """
    end = time.monotonic() + LIMITS["speed"]
    pairs = [[end_to_end.contestant(name, size, device) for name in ("ecrl", "rejax")] for size in SIZES]
    with started([one for pair in pairs for one in pair], cores) as workers:
        ready = [await_ready(worker, max(0.0, end - time.monotonic())) for worker in workers]
        for i, size in enumerate(SIZES):
            both = slice(2 * i, 2 * i + 2)
            ecrl, rejax = run_rounds(workers[both], ready[both], cores, 5, 0.4)
            about = {"part": "speed", "what": f"CartPole PPO, {size:,} envs"}
            yield with_time_in_graphs(about | end_to_end.row(ecrl, rejax, "GPU", size), device, cores)


def with_time_in_graphs(row: Row, device: str, cores: Sequence[int]) -> Row:
    """Add the share of time inside CUDA graphs to the row of a run, and set `met` to True if all targets are met."""
    if "error" in row:
        return row
    work = {"make": "benchmarks.ecrl_runs:make", "args": {"num_envs": row["num_envs"], "trainer__device": device}}
    function, limit = "benchmarks.gpu_traces:profiled_share", LIMITS["time in graphs"]
    try:
        share = run_in_process(function, work, cores, ENV[device], limit)
    except Failure as failure:
        return row | {"error": str(failure)}
    measured = row | share | {"ecrl_steps_per_s": row["ecrl_steps_s"], "must_graph_share": MUST_GRAPH_SHARE}
    verdict = run_verdict(measured)
    return measured | verdict | {"met": verdict["met"] and row["met"] is not False}


def kernel_rows(device: str, cores: Sequence[int]) -> Iterator[Row]:
    """Yield the rows of a quick run of `benchmarks.kernels` on a GPU."""
    args = {"quick": True, "device": device}
    found = run_in_process("benchmarks.kernels:measure_all", args, cores[:1], ENV[device], LIMITS["kernels"])
    yield from ({"part": "kernels", "what": f"{row['kernel']} {row['size']}", **row} for row in found)


PARTS: dict[str, Callable[[str, Sequence[int]], Iterator[Row]]] = {
    "agreement": agreements,
    "speed": speed,
    "kernels": kernel_rows,
}


def rows(quick: bool, cores: Sequence[int]) -> list[Row]:
    """Return the rows of all parts, or of the first part in a quick run. Without a GPU, the rows are "not measured"."""
    parts = list(PARTS)[:1] if quick else list(PARTS)
    if not has_gpu():
        return [not_measured(part=part, device="cuda") for part in parts]
    out: list[Row] = []
    for part in parts:
        for row in _rows_of(part, cores):
            print(row, file=sys.stderr, flush=True)
            out.append(row | {"device": "cuda"})
    return out


def _rows_of(part: str, cores: Sequence[int]) -> Iterator[Row]:
    """Yield the rows of a part. If the part fails, the last row has the error."""
    try:
        yield from PARTS[part]("cuda", cores)
    except Failure as failure:
        yield {"part": part, "error": str(failure)}


def figure(rows: list[Row]) -> Any:
    """Plot the speed of runs and of compiled kernels as ratios to the speed of other libraries."""
    from matplotlib.figure import Figure

    measured = [row for row in rows if row.get("ratio") and row.get("ours") != "ecrl eager"]
    picture = Figure(figsize=(8, 1 + 0.35 * max(1, len(measured))), layout="constrained")
    axes = picture.subplots()
    for row in measured:
        label = f"{row['what']} / {row['peer']}"
        spread = [[row["ratio"] - row["ratio_min"]], [row["ratio_max"] - row["ratio"]]]
        axes.errorbar([row["ratio"]], [label], xerr=spread, marker="o", capsize=3, color="tab:blue")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="speed on the GPU, ecrl / peer")
    axes.invert_yaxis()
    return picture
