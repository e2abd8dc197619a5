"""Let functions in one process take turns, A B A B, to time calls that are much shorter than a process start."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[], Any]
"""Type of a function without arguments that returns only after its work has ended, even on a GPU."""


def seconds_per_call(call: Call, times: int) -> float:
    """Return the mean seconds per call over `times` calls."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def time_alternating(calls: Mapping[str, Call], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return the seconds per call of each function, one number per round.

    A turn takes about `seconds`, and has at least one call.

    >>> {name: len(values) for name, values in time_alternating({"a": list, "b": dict}, 3, 1e-5).items()}
    {'a': 3, 'b': 3}
    """
    times = {name: max(1, round(seconds / seconds_per_call(call, 3))) for name, call in calls.items()}
    seconds_by_name: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds_by_name[name].append(seconds_per_call(call, times[name]))
    return seconds_by_name


def ratio(ecrl: list[float], other: list[float]) -> dict[str, float]:
    """Return the seconds `other` divided by the seconds `ecrl`, as median and range over the rounds.

    If the ratio is above 1, ecrl is faster.

    >>> ratio([1.0, 2.0, 1.0], [2.0, 2.0, 3.0])
    {'ratio': 2.0, 'ratio_min': 1.0, 'ratio_max': 3.0}
    """
    by_round = [b / a for a, b in zip(ecrl, other, strict=True)]
    return {"ratio": statistics.median(by_round), "ratio_min": min(by_round), "ratio_max": max(by_round)}
