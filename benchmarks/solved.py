"""Seconds from process start to CartPole solved, and to the end of the budget, with empty and with full compile caches.

Solved means for both: the mean return of the last 100 episodes of training is 475 at the end of an iteration. Both run
the numbers of `configs/cartpole_ppo.json`, whole processes on one core each. A run with an empty cache fills it for the
run after it. The quick form has one seed, no eager run and, on two cores, a lane for each library, side by side; the
full form takes turns on one core, five seeds.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.alone import alone, caching_in
from benchmarks.pairs import Failure, summary

OURS, REJAX = "benchmarks.ours:solve", "benchmarks.peers.rejax_solved:solve"
REJAX_NUMBERS = {"num_envs": 32, "batch_size": 256, "n_epochs": 4, "iterations": 120}
"""Those of the config: rejax's process reads no configs."""
RUNS = {  # in the order in which they run; a lane each
    "ecrl": ("ecrl cold", "ecrl warm"),
    "rejax": ("rejax cold", "rejax warm", "ecrl off"),
}
EAGER = "ecrl off"
ROWS = [  # what, ours, peer, least ratio: the peer's seconds by ours
    ("solved", "ecrl cold", "rejax cold", 0.5),
    ("solved", "ecrl warm", "rejax warm", 1.0),
    ("solved", "ecrl off", "rejax cold", None),
    ("budget", "ecrl cold", "ecrl off", 1.0),  # `auto` takes what finishes sooner
    ("budget", "ecrl warm", "ecrl off", 1.0),
]
Found = dict[str, Any]


def run(name: str, seed: int, caches: Path, core: int) -> Found:
    """One whole process, on one core."""
    library, cache = name.split()
    env = caching_in(str(caches / f"{library}{seed}"))
    more = {"compile": "off" if cache == "off" else "auto"} if library == "ecrl" else REJAX_NUMBERS
    args = {"seed": seed, "started": time.time(), **more}
    try:
        return alone(OURS if library == "ecrl" else REJAX, args, [core], env)
    except Failure as failure:
        return {"error": str(failure)}


def lane(names: Sequence[str], seeds: Sequence[int], caches: Path, core: int) -> dict[str, list[Found]]:
    """Runs one after another: every name, then the next seed."""
    found: dict[str, list[Found]] = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            found[name].append(run(name, seed, caches, core))
    return found


def turns() -> list[str]:
    """All runs in one lane, the libraries in turns."""
    return [
        name for cache in ("cold", "warm", "off") for lane in RUNS.values() for name in lane if name.endswith(cache)
    ]


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """The pairs of `ROWS`."""
    with tempfile.TemporaryDirectory() as folder:
        caches = Path(folder)
        if not quick or len(cores) == 1:
            names = [name for name in turns() if not (quick and name == EAGER)]
            found = lane(names, range(1 if quick else 5), caches, cores[0])
        else:
            with ThreadPoolExecutor(len(RUNS)) as pool:
                lanes = zip(RUNS.values(), cores[: len(RUNS)], strict=True)
                works = [
                    pool.submit(lane, [x for x in names if x != EAGER], [0], caches, core) for names, core in lanes
                ]
                found = {name: runs for work in works for name, runs in work.result().items()}
    return [
        row(what, ours, found[ours], peer, found[peer], must)
        for what, ours, peer, must in ROWS
        if ours in found and peer in found
    ]


def row(
    what: str, ours: str, our_runs: Sequence[Found], peer: str, peer_runs: Sequence[Found], must: float | None
) -> dict[str, Any]:
    """Two runs side by side; above 1, ours takes fewer seconds. A run that was never solved is a failure.

    >>> runs = [{"solved_s": s, "steps": 9, "form": "f"} for s in (1.0, 2.0)]
    >>> row("solved", "ecrl cold", runs[:1], "rejax cold", runs[1:], 1.0)["ratio"]
    2.0
    """
    about = {"what": what, "ours": ours, "peer": peer, "form": our_runs[0].get("form")}
    key = f"{what}_s"
    errors = [
        run.get("error") or f"{name}: not solved in its budget, seed {seed}"
        for name, runs in ((ours, our_runs), (peer, peer_runs))
        for seed, run in enumerate(runs)
        if run.get(key) is None
    ]
    if errors:
        return about | {"error": "; ".join(errors)}
    ours_s, peer_s = [run[key] for run in our_runs], [run[key] for run in peer_runs]
    seen = summary([theirs / mine for mine, theirs in zip(ours_s, peer_s, strict=True)])
    return about | {
        "ours_s": statistics.median(ours_s),
        "peer_s": statistics.median(peer_s),
        "ours_steps": statistics.median(run["steps"] for run in our_runs),
        "peer_steps": statistics.median(run["steps"] for run in peer_runs),
        "ratio": seen["median"],
        "ratio_min": seen["min"],
        "ratio_max": seen["max"],
        "must": must,
        "met": None if must is None else (seen["median"] or 0.0) >= must,
        "seeds": len(our_runs),
        "ours_seconds": ours_s,
        "peer_seconds": peer_s,
    }


def figure(rows: list[dict[str, Any]]) -> Any:
    """Bars of seconds, ours and the peer's side by side."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(8, 4), layout="constrained")
    axes = made.subplots()
    seen = [r for r in rows if "ratio" in r]
    for side, color, shift in (("ours", "tab:blue", -0.2), ("peer", "tab:gray", 0.2)):
        places = [i + shift for i in range(len(seen))]
        axes.barh(places, [r[f"{side}_s"] for r in seen], height=0.38, color=color, label=side)
    axes.set_yticks(range(len(seen)), [f"{r['what']}: {r['ours']} / {r['peer']}" for r in seen])
    axes.set(xlabel="seconds from process start")
    axes.invert_yaxis()
    axes.legend()
    return made
