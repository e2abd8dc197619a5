"""Compare ecrl with other libraries by the environment steps per second of PPO on CartPole, collecting and learning.

rejax is measured on one core, and on two cores and a GPU if available. SB3, TorchRL, and loops in the style of LeanRL
and CleanRL are measured on one core. Each library has five rounds. A quick run measures SB3, TorchRL and the
CleanRL-style loop for one round with 64 environments, and leaves out the LeanRL-style loop, which compiles for a
minute. On two cores, a quick run measures only 2048 environments.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu_traces import ENV, has_gpu, not_measured
from benchmarks.pairs import (
    Contestant,
    Result,
    Worker,
    await_ready,
    ratio_summary,
    ratios,
    run_rounds,
    started,
    summary,
)

SIZES = (4, 64, 512, 2048)
QUICK_SLOW, QUICK_BOTH = (64,), (2048,)
GPU_SIZES = (4096, 65536)
SLOW = ("SB3", "TorchRL", "LeanRL-style", "CleanRL-style")
MAKE = {
    "ecrl": "benchmarks.ecrl_runs:make",
    "rejax": "benchmarks.other_libraries.rejax_ppo:make",
    "SB3": "benchmarks.other_libraries.sb3_ppo:make",
    "TorchRL": "benchmarks.other_libraries.torchrl_ppo:make",
    "LeanRL-style": "benchmarks.other_libraries.leanrl_ppo:make",
    "CleanRL-style": "benchmarks.other_libraries.cleanrl_ppo:make",
}
MUST_AND_AIM = {  # required and desired ratio, by (library, cores) and number of environments
    ("rejax", 1): dict(zip(SIZES, ((1.0, 1.3), (1.7, 2.2), (2.0, 2.5), (2.3, 3.0)), strict=True)),
    ("rejax", 2): dict(zip(SIZES, ((1.0, 1.3), (2.3, 3.0), (2.5, 3.2), (3.1, 4.0)), strict=True)),
    **{(name, 1): dict(zip(SIZES, ((8.0, None), (5.0, None), (5.0, None), (5.0, None)), strict=True)) for name in SLOW},
}


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row per other library, number of cores and number of environments, then the rows of a GPU."""
    both = QUICK_BOTH if quick else SIZES
    return [
        *on_cores(cores[:1], ("rejax", *SLOW), SIZES, quick),
        *(on_cores(cores[:2], ("rejax",), both, quick) if len(cores) > 1 else _unmeasured(2, both, "only one core")),
        *on_gpu(cores, quick),
    ]


def on_gpu(cores: Sequence[int], quick: bool) -> list[dict[str, Any]]:
    """Return the rows of ecrl and rejax on a GPU. Without a GPU, the rows are marked as not measured."""
    if not has_gpu():
        return [not_measured(peer="rejax", cores="GPU", num_envs=n) for n in GPU_SIZES]
    return on_cores(cores, ("rejax",), GPU_SIZES, quick, "cuda")


def _unmeasured(cores: int, sizes: Sequence[int], reason: str) -> list[dict[str, Any]]:
    return [{"peer": "rejax", "cores": cores, "num_envs": n, "status": f"not measured: {reason}"} for n in sizes]


def contestant(name: str, num_envs: int, device: str = "cpu") -> Contestant:
    """Return the contestant for a library with `num_envs` environments on `device`."""
    args = {"num_envs": num_envs} | ({"trainer__device": device} if name == "ecrl" and device != "cpu" else {})
    return Contestant(name, MAKE[name], args, ENV[device])


def list_entrants(libraries: Sequence[str], sizes: Sequence[int], quick: bool) -> list[tuple[str, int]]:
    """List the pairs of a library, ecrl first, and a number of environments that a run measures.

    >>> list_entrants(("rejax", "SB3", "LeanRL-style"), (4, 64), True)
    [('ecrl', 4), ('ecrl', 64), ('rejax', 4), ('rejax', 64), ('SB3', 64)]
    """
    names = [name for name in ("ecrl", *libraries) if not (quick and name == "LeanRL-style")]
    return [(name, n) for name in names for n in sizes if not (quick and name in SLOW) or n in QUICK_SLOW]


def on_cores(
    cores: Sequence[int], libraries: Sequence[str], sizes: Sequence[int], quick: bool, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Return the rows on these cores. All contestants are set up at the same time, so that compiling uses all cores."""
    out, cores_label = [], "GPU" if device == "cuda" else len(cores)
    entrants = list_entrants(libraries, sizes, quick)
    with started([contestant(name, n, device) for name, n in entrants], cores) as workers:
        ready = [(worker, await_ready(worker)) for worker in workers]
        for size in sizes:
            lanes = {name: lane for (name, n), lane in zip(entrants, ready, strict=True) if n == size}
            out += [row(ecrl, other, cores_label, size) for ecrl, other in pairings(lanes, cores, quick)]
    return out


def pairings(
    lanes: dict[str, tuple[Worker, Result]], cores: Sequence[int], quick: bool
) -> Iterator[tuple[Result, Result]]:
    """Yield a pair for each other library: the result of ecrl and the result of the library, from the same rounds.

    Each library has five rounds. In a quick run, the libraries in `SLOW` have one round.
    """
    for libraries, rounds in ((["rejax"], 5), ([name for name in SLOW if name in lanes], 1 if quick else 5)):
        workers, ready = zip(*(lanes[name] for name in ("ecrl", *libraries)), strict=True)
        if libraries:
            ecrl, *others = run_rounds(workers, ready, cores, rounds, 0.4 if quick else 2.0)
            yield from ((ecrl, other) for other in others)


def row(ecrl: Result, other: Result, cores: int | str, num_envs: int) -> dict[str, Any]:
    """Return the row that compares ecrl with another library."""
    about = {"peer": other.name, "cores": cores, "num_envs": num_envs}
    errors = [result.error for result in (ecrl, other) if result.error is not None]
    if errors:
        return about | {"error": "; ".join(errors)}
    return (
        about
        | verdict(ratios(ecrl, other), other.name, cores, num_envs)
        | {
            "ecrl_steps_s": summary(ecrl.rates)["median"],
            "peer_steps_s": summary(other.rates)["median"],
            "ecrl_setup_s": ecrl.setup_s,
            "peer_setup_s": other.setup_s,
            "ecrl_rates": ecrl.rates,
            "peer_rates": other.rates,
        }
    )


def verdict(by_round: Sequence[float], library: str, cores: int | str, num_envs: int) -> dict[str, Any]:
    """Return the median and the range of the ratios, the targets, and `met`. `cores` is a number or "GPU".

    If the median is at least the required ratio, `met` is True. If there is no required ratio, `met` is None.

    >>> verdict([0.5, 0.7, 0.9], "rejax", 1, 4)
    {'ratio': 0.7, 'ratio_min': 0.5, 'ratio_max': 0.9, 'must': 1.0, 'aim': 1.3, 'met': False}
    """
    measured = ratio_summary(by_round)
    must, aim = (2.0, None) if cores == "GPU" else MUST_AND_AIM[library, int(cores)].get(num_envs, (None, None))
    met = None if must is None else (measured["ratio"] or -math.inf) >= must
    return {**measured, "must": must, "aim": aim, "met": met}


def figure(rows: list[dict[str, Any]]) -> Any:
    """Plot the ratio and its range against the number of environments, by library. Required ratios are dotted."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 5), layout="constrained")
    axes = picture.subplots()
    measured = [r for r in rows if "ratio" in r]
    for number, (library, cores) in enumerate(dict.fromkeys((r["peer"], r["cores"]) for r in measured)):
        points = [r for r in measured if (r["peer"], r["cores"]) == (library, cores)]
        sizes, color = [r["num_envs"] for r in points], f"C{number}"
        axes.plot(sizes, [r["ratio"] for r in points], "o-", color=color, label=f"{library}, {_cores(cores)}")
        axes.fill_between(
            sizes, [r["ratio_min"] for r in points], [r["ratio_max"] for r in points], color=color, alpha=0.2
        )
        axes.plot(sizes, [r["must"] for r in points], ":", color=color)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="environments", ylabel="env steps/s, ecrl / peer (dotted: must)")
    axes.legend()
    return picture


def _cores(cores: int | str) -> str:
    return "GPU" if cores == "GPU" else f"{cores} core{'s' if cores != 1 else ''}"
