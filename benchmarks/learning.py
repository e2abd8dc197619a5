"""How well something learns: scores on the way, against env steps and against the seconds that training took.

The clock runs from the start of the process, imports and compiling included, and stands still during evaluations.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.tasks import EPISODES, POINTS, Task

Row = dict[str, Any]
Evaluate = Callable[[int], Row]
"""From a number of episodes to "return", and "success" where there is such a thing."""
Report = Callable[[int, Evaluate], None]
"""To be called after every update, with the env steps so far and a way to evaluate."""


def followed(learn: Callable[[Report], None], task: Task, budget: int, started: float | None) -> Row:
    """What a run learns: `learn(report)` trains for `budget` env steps.

    Args:
        learn: calls `report` after every update, the last one included.
        task: tells how many episodes an evaluation has.
        budget: env steps.
        started: when the process did, of `time.time`; now if None.

    Returns: `curve`, a row for each evaluation with steps, seconds, episodes and scores; `train_s`, its last seconds;
        `wall_s` and `cpu_s`, evaluations included, and of the latter that of compilers.
    """
    started, paused, due = started or time.time(), 0.0, 1
    curve: list[Row] = []
    on_the_way, at_the_end = EPISODES[task.score]

    def report(steps: int, evaluate: Evaluate) -> None:
        nonlocal paused, due
        if steps < due * budget / POINTS:
            return
        now, episodes = time.time(), at_the_end if steps >= budget else on_the_way
        due = int(steps * POINTS / budget) + 1
        at = {"steps": steps, "seconds": round(now - started - paused, 3), "episodes": episodes}
        curve.append(at | evaluate(episodes))
        paused += time.time() - now

    learn(report)
    spent = {"train_s": curve[-1]["seconds"], "wall_s": round(time.time() - started, 3)}
    return {"curve": curve, **spent, "cpu_s": round(sum(os.times()[:4]), 3)}


def reached(curve: list[Row], score: str, threshold: float) -> tuple[float, float] | None:
    """Env steps and minutes of the first evaluation that came to the threshold.

    >>> curve = [{"steps": s, "seconds": 6.0 * s, "return": r} for s, r in ((10, 400.0), (20, 480.0), (30, 470.0))]
    >>> reached(curve, "return", 475.0), reached(curve, "return", 490.0)
    ((20, 2.0), None)
    """
    for row in curve:
        if row[score] >= threshold:
            return row["steps"], row["seconds"] / 60.0
    return None
