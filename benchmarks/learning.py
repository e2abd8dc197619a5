"""Record learning curves: scores against env steps and against seconds of training.

The seconds count from the start of the process, so they include imports and compiling. They exclude evaluations.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.tasks import EPISODES, POINTS, Task

Row = dict[str, Any]
Evaluate = Callable[[int], Row]
"""Type of a function that maps a number of episodes to the scores: "return", and "success" for some tasks."""
Report = Callable[[int, Evaluate], None]
"""Type of a function to call after every update, with the env steps so far and an `Evaluate` function."""


def followed(learn: Callable[[Report], None], task: Task, budget: int, started: float | None) -> Row:
    """Train with `learn(report)` for `budget` env steps and record the learning curve.

    Args:
        learn: function that trains, and calls `report` after every update, including the last update.
        task: the task, whose score determines the number of episodes per evaluation.
        budget: env steps of training.
        started: start time of the process, as from `time.time`, or None for the present time.

    Returns: `curve` has a row per evaluation with steps, seconds, episodes and scores. `train_s` equals the seconds in
        the last row. `wall_s` and `cpu_s` include evaluations, and `cpu_s` also includes compiler processes.
    """
    started, paused, next_point = started or time.time(), 0.0, 1
    curve: list[Row] = []
    episodes_during, episodes_at_end = EPISODES[task.score]

    def report(steps: int, evaluate: Evaluate) -> None:
        nonlocal paused, next_point
        if steps < next_point * budget / POINTS:
            return
        now, episodes = time.time(), episodes_at_end if steps >= budget else episodes_during
        next_point = int(steps * POINTS / budget) + 1
        position = {"steps": steps, "seconds": round(now - started - paused, 3), "episodes": episodes}
        curve.append(position | evaluate(episodes))
        paused += time.time() - now

    learn(report)
    times = {"train_s": curve[-1]["seconds"], "wall_s": round(time.time() - started, 3)}
    return {"curve": curve, **times, "cpu_s": round(sum(os.times()[:4]), 3)}


def reached(curve: list[Row], score: str, threshold: float) -> tuple[float, float] | None:
    """Return the env steps and minutes of the first evaluation at or above the threshold, or None.

    >>> curve = [{"steps": s, "seconds": 6.0 * s, "return": r} for s, r in ((10, 400.0), (20, 480.0), (30, 470.0))]
    >>> reached(curve, "return", 475.0), reached(curve, "return", 490.0)
    ((20, 2.0), None)
    """
    for row in curve:
        if row[score] >= threshold:
            return row["steps"], row["seconds"] / 60.0
    return None
