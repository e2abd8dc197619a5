"""What evaluations said during runs, by env steps and by minutes: `python -m benchmarks.curves PNG RUN...`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path


def evaluations(run: Path, name: str) -> list[tuple[float, float, float]]:
    """(env steps, minutes since the start of the run, value) of every evaluation."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [record for record in map(json.loads, lines) if name in record]
    return [(record["sample_step"], record["seconds"] / 60.0, record[name]) for record in found]


def first_at(points: Sequence[tuple[float, float, float]], least: float) -> tuple[float, float] | None:
    """Env steps and minutes of the first evaluation from which on none was below `least`.

    >>> first_at([(10, 1.0, 0.5), (20, 2.0, 0.96), (30, 3.0, 0.9), (40, 4.0, 0.97)], 0.95)
    (40, 4.0)
    """
    found = None
    for steps, minutes, value in points:
        found = (found or (steps, minutes)) if value >= least else None
    return found


def plot(runs: Sequence[Path], path: Path, name: str = "eval/success_rate") -> None:
    """A line for each run, against steps and against minutes."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, sides = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for run in runs:
        points = evaluations(run, name)
        for axes, at in zip(sides, (0, 1), strict=True):
            axes.plot([point[at] for point in points], [point[2] for point in points], label=run.name)
    sides[0].set(xlabel="env steps", ylabel=name.removeprefix("eval/").replace("_", " "))
    sides[1].set(xlabel="minutes, compiling included")
    sides[1].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    folders = [Path(run) for run in sys.argv[2:]]
    plot(folders, Path(sys.argv[1]))
    for folder in folders:
        print(folder.name, "0.95 from (env steps, minutes):", first_at(evaluations(folder, "eval/success_rate"), 0.95))
