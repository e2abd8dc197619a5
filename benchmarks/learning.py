"""Record learning curves: scores against env steps and against seconds of training.

The clock starts with the process, so it includes imports and compiling. It stops during evaluations.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.tasks import EPISODES, POINTS, Task

Row = dict[str, Any]
Evaluate = Callable[[int], Row]
"""Map a number of episodes to "return", and to "success" if the task has a success rate."""
Report = Callable[[int, Evaluate], None]
"""Function to call after every update, with the env steps so far and an `Evaluate` function."""


def followed(learn: Callable[[Report], None], task: Task, budget: int, started: float | None) -> Row:
    """Train with `learn(report)` for `budget` env steps and record the learning curve.

    Args:
        learn: calls `report` after every update, including the last one.
        task: the task; its score sets the number of episodes per evaluation.
        budget: env steps of training.
        started: start of the process, as from `time.time`; now if None.

    Returns: `curve`, a row per evaluation with steps, seconds, episodes and scores; `train_s`, the last row's seconds;
        `wall_s` and `cpu_s`, which include evaluations; `cpu_s` also includes compiler processes.
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
