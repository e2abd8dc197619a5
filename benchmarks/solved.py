"""Measure the seconds until CartPole is solved and until the budget ends, with cold and with warm compile caches.

CartPole is solved when the mean return of the last 100 training episodes is at least 475 at the end of an iteration.
Both libraries use the settings of `benchmarks/cartpole_speed.json`. Each run is a whole process on one core, and the
seconds count from the start of the process. A run with a cold cache fills the cache for the next run.

In a full run, the libraries take turns on one core, with five seeds. If there are two cores, the libraries then take
turns on both cores, with cold caches, and ecrl trains while another process compiles the run. A quick run has one seed,
no eager run and no runs on both cores. In a quick run with two cores, each library has its own core.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.pairs import Failure, ratio_summary
from benchmarks.separate_process import caching_in, run_in_process

ECRL, REJAX = "benchmarks.ecrl_runs:solve", "benchmarks.other_libraries.rejax_solved:solve"
REJAX_NUMBERS = {"num_envs": 32, "batch_size": 256, "n_epochs": 4, "iterations": 120}
"""The settings of the config, for rejax's process, which does not read configs."""
RUNS = {  # two lanes of runs, each in the order of the runs
    "ecrl": ("ecrl cold", "ecrl warm"),
    "rejax": ("rejax cold", "rejax warm", "ecrl off"),
}
EAGER = "ecrl off"
ON_BOTH_CORES = ("ecrl background", "rejax both-cores")  # each with a cold cache
ROWS = [  # end of the time span, run of ecrl, other run, required ratio (seconds of the other run / seconds of ecrl)
    ("solved", "ecrl cold", "rejax cold", 1.0),
    ("solved", "ecrl warm", "rejax warm", 1.43),
    ("solved", "ecrl off", "rejax cold", None),
    ("budget", "ecrl cold", "ecrl off", 1.0),  # `auto` chooses the form that finishes sooner
    ("budget", "ecrl warm", "ecrl off", 1.0),
    ("solved", *ON_BOTH_CORES, None),
]
RunResult = dict[str, Any]


def run(name: str, seed: int, caches: Path, cores: Sequence[int]) -> RunResult:
    """Run one training, such as "ecrl cold", in a process on these cores."""
    library, form = name.split()
    folder = f"{name}{seed}" if name in ON_BOTH_CORES else f"{library}{seed}"
    more = {"compile": form if form in ("off", "background") else "auto"} if library == "ecrl" else REJAX_NUMBERS
    args = {"seed": seed, "started": time.time(), **more}
    try:
        return run_in_process(ECRL if library == "ecrl" else REJAX, args, cores, caching_in(str(caches / folder)))
    except Failure as failure:
        return {"error": str(failure)}


def lane(names: Sequence[str], seeds: Sequence[int], caches: Path, cores: Sequence[int]) -> dict[str, list[RunResult]]:
    """Run the trainings `names` in sequence on these cores with the first seed, then with the next seed, and so on."""
    runs_by_name: dict[str, list[RunResult]] = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            runs_by_name[name].append(run(name, seed, caches, cores))
    return runs_by_name


def runs_in_order() -> list[str]:
    """List the names of all runs on one core, for one lane. The libraries take turns: first cold runs, then warm."""
    return [
        name for cache in ("cold", "warm", "off") for lane in RUNS.values() for name in lane if name.endswith(cache)
    ]


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row per entry of `ROWS`. A quick run leaves out the entries with an eager run or with both cores."""
    with tempfile.TemporaryDirectory() as folder:
        caches = Path(folder)
        if not quick or len(cores) == 1:
            names = [name for name in runs_in_order() if not (quick and name == EAGER)]
            runs_by_name = lane(names, range(1 if quick else 5), caches, cores[:1])
            if not quick and len(cores) > 1:
                runs_by_name |= lane(ON_BOTH_CORES, range(5), caches, cores[:2])
        else:
            with ThreadPoolExecutor(len(RUNS)) as pool:
                lanes = zip(RUNS.values(), cores[: len(RUNS)], strict=True)
                works = [
                    pool.submit(lane, [x for x in names if x != EAGER], [0], caches, [core]) for names, core in lanes
                ]
                runs_by_name = {name: runs for work in works for name, runs in work.result().items()}
    return [
        row(what, ecrl, runs_by_name[ecrl], other, runs_by_name[other], must)
        for what, ecrl, other, must in ROWS
        if ecrl in runs_by_name and other in runs_by_name
    ]


def row(
    what: str,
    ecrl: str,
    ecrl_runs: Sequence[RunResult],
    other: str,
    other_runs: Sequence[RunResult],
    must: float | None,
) -> dict[str, Any]:
    """Compare the seconds of ecrl's runs and of other runs with the same seeds. Above a ratio of 1, ecrl is faster.

    If the value `what` is "solved" and a run never solves the task, the row has an error.

    >>> runs = [{"solved_s": s, "steps": 9, "form": "f"} for s in (1.0, 2.0)]
    >>> row("solved", "ecrl cold", runs[:1], "rejax cold", runs[1:], 1.0)["ratio"]
    2.0
    """
    about = {"what": what, "ours": ecrl, "peer": other, "form": ecrl_runs[0].get("form")}
    key = f"{what}_s"
    errors = [
        run.get("error") or f"{name}: not solved in its budget, seed {seed}"
        for name, runs in ((ecrl, ecrl_runs), (other, other_runs))
        for seed, run in enumerate(runs)
        if run.get(key) is None
    ]
    if errors:
        return about | {"error": "; ".join(errors)}
    ecrl_s, other_s = [run[key] for run in ecrl_runs], [run[key] for run in other_runs]
    measured = ratio_summary([theirs / mine for mine, theirs in zip(ecrl_s, other_s, strict=True)])
    return about | {
        "ours_s": statistics.median(ecrl_s),
        "peer_s": statistics.median(other_s),
        "ours_steps": statistics.median(run["steps"] for run in ecrl_runs),
        "peer_steps": statistics.median(run["steps"] for run in other_runs),
        **measured,
        "must": must,
        "met": None if must is None else (measured["ratio"] or 0.0) >= must,
        "seeds": len(ecrl_runs),
        "ours_seconds": ecrl_s,
        "peer_seconds": other_s,
    }


def figure(rows: list[dict[str, Any]]) -> Any:
    """Plot the seconds of each row as bars, with ecrl and the other run side by side."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 4), layout="constrained")
    axes = picture.subplots()
    measured = [r for r in rows if "ratio" in r]
    for side, color, shift in (("ours", "tab:blue", -0.2), ("peer", "tab:gray", 0.2)):
        places = [i + shift for i in range(len(measured))]
        axes.barh(places, [r[f"{side}_s"] for r in measured], height=0.38, color=color, label=side)
    axes.set_yticks(range(len(measured)), [f"{r['what']}: {r['ours']} / {r['peer']}" for r in measured])
    axes.set(xlabel="seconds from process start")
    axes.invert_yaxis()
    axes.legend()
    return picture
