"""Write the leaderboard and its pictures from the result files (`records`).

A line without fresh files shows *not measured*, or *failed* if its seeds failed. A fresh file comes from the present
settings. A line also shows the number of its stale files, which come from other settings.
"""

from collections.abc import Sequence
from itertools import groupby
from math import inf
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.learning import reached
from benchmarks.records import LIBRARIES, Entry, Row, Standing, num_seeds, path_of, standing
from benchmarks.report import cell
from benchmarks.tasks import EPISODES, POINTS
from ecrl.report.curves import Curve, curve, read_sources
from ecrl.report.plots import MIN_BAND_SEEDS, figure
from ecrl.report.plots import write as write_picture
from ecrl.report.statistics import bootstrap_interval, interquartile_mean

_RESAMPLES = 10_000
(_WAY, _END), (_WAY_SUCCESS, _END_SUCCESS) = EPISODES["return"], EPISODES["success"]
HEAD = f"""# Leaderboard

How well every shipped config learns, compared with other libraries on the same budget. Stable-Baselines3 has the
settings of its zoo (`benchmarks/other_libraries/zoo.py`). `ecrl bench results` generates this page from the files in
`runs/`. Each seed has a file with its raw curve, the settings and their hash, the commit, the command, the machine and
the times. `ecrl plot` can also read the files.

- **Scores** are the mean of {_END} episodes ({_END_SUCCESS} for a success rate) with deterministic actions, after the
  whole budget.
- **The interquartile mean** leaves out the lowest and the highest quarter of the seeds, rounded down: two of ten seeds
  at each end. Of three seeds it leaves out none and equals the mean.
- **The interval** is the 95 % bootstrap interval of the interquartile mean over seeds. Of three seeds it is the range.
- **The threshold** is reached at the first evaluation that is not below it. A run has at most {POINTS} evaluations of
  {_WAY} episodes ({_WAY_SUCCESS} for a success rate). Env steps and minutes are the median over all seeds, if more than
  half of the seeds reach the threshold.
- **Minutes** are training time on one core from the start of the process. They include imports and compiling with an
  empty cache, but no evaluations. The seeds of a line may come from different commits and from virtual machines that
  differ in speed by up to a factor of three. Minutes are therefore a weak comparison of libraries. Each file has its
  own commit and seconds.
- **A failed seed** has no score and counts as a seed that did not reach the threshold.
- **ecrl, without memory** has separate networks in place of the recurrent ones: two layers of 64 units with tanh, and
  PyTorch's initial weights. All other settings are as in the config.
- **ecrl, example:...** has an arm of the package `example-robot-data` in place of the built-in one, `example:ur10` with
  the built-in gripper. All lengths of the task scale with the reach of the arm.
- **rejax** and **Stable-Baselines3, same settings** have the settings of the config.
  `benchmarks/other_libraries/rejax_learning.py` and `sb3_minatar.py` list the differences.

The zoo's settings were tuned for other budgets. For PPO, four of the zoo's six budgets are shorter than here. A run may
therefore reach the threshold and fall below it again.

"""
COLUMNS = (
    "config", "library", "env steps", "seeds", "score", "mean", "interquartile mean", "95 % interval", "threshold",
    "reached by", "env steps to it", "minutes to it",
)  # fmt: skip


def summary(entry: Entry, fresh: dict[int, Row], failed: int = 0) -> Row:
    """Return statistics over the seeds of an entry. Failed seeds have no score and did not reach the threshold.

    Returns: `mean` and `iqm`, the mean and the interquartile mean of the last scores. `low` and `high` are the interval
        of `iqm`, or None for fewer than three seeds. `reached` is the number of seeds that reached the threshold.
        `steps` and `minutes` are the medians over all seeds until the threshold. If half of the seeds or fewer reached
        the threshold, both are infinite. An entry without a threshold has only `mean`, `iqm`, `low` and `high`.
    """
    score, threshold = entry.task.score, entry.task.threshold
    curves = [record["curve"] for record in fresh.values()]
    last = np.array([rows[-1][score] for rows in curves])
    low, high = (None, None)
    if len(last) >= MIN_BAND_SEEDS:
        low, high = map(float, bootstrap_interval(last, np.random.default_rng(0), _RESAMPLES))
    results: Row = {"mean": float(last.mean()), "iqm": float(interquartile_mean(last)), "low": low, "high": high}
    if threshold is None:
        return results
    points = [*(reached(rows, score, threshold) for rows in curves), *[None] * failed]
    steps, minutes = (median(inf if point is None else point[i] for point in points) for i in (0, 1))
    return results | {"reached": len(points) - points.count(None), "steps": steps, "minutes": minutes}


def cells(entry: Entry, known: Standing) -> list[str]:
    """Return the cells of an entry's line in the table."""
    task, fresh = entry.task, known.fresh
    head = [f"`{task.config}`", LIBRARIES[entry.library].name]
    if not fresh:
        stale = f", {known.stale} stale" if known.stale else ""
        none = "*failed*" if known.failed else f"*not measured*{stale}"
        return [*head, none, *[""] * (len(COLUMNS) - 3)]
    results, required = summary(entry, fresh, len(known.failed)), max(len(fresh), num_seeds(fresh))
    notes = {"failed": len(known.failed), "stale": known.stale}
    notes = "".join(f", {count} {what}" for what, count in notes.items() if count)
    interval = "" if results["low"] is None else f"{cell(results['low'])} to {cell(results['high'])}"
    line = [
        *head,
        f"{max(record['curve'][-1]['steps'] for record in fresh.values()):,}",
        (str(len(fresh)) if len(fresh) == required else f"{len(fresh)} of {required}") + notes,
        task.score,
        cell(results["mean"]),
        cell(results["iqm"]),
        interval,
        cell(task.threshold),
    ]
    if task.threshold is None:
        return [*line, "", "", ""]
    to_it = [f"{results['steps']:,.0f}", f"{results['minutes']:.1f}"] if results["steps"] < inf else ["", ""]
    return [*line, f"{results['reached']} of {len(fresh) + len(known.failed)}", *to_it]


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with the header `COLUMNS`.

    >>> print(table([["a", "b"]]).splitlines()[-1])
    | a | b |
    """
    rows = [COLUMNS, ["---"] * len(COLUMNS), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def measured_on(records: Sequence[Row]) -> str:
    """Return a line with the machines, versions and commits of the records.

    >>> record = {"machine": {"cpu": "a CPU"}, "versions": {"torch": "2.13.0"}, "commit": "0123456789"}
    >>> measured_on([record, record | {"commit": "abcdef0123"}])
    'Measured on: a CPU, torch 2.13.0, of commits 01234567, abcdef01.'
    """
    commits_by_machine: dict[str, set[str]] = {}
    for record in records:
        where = f"{record['machine']['cpu']}, torch {record['versions']['torch']}"
        commits_by_machine.setdefault(where, set()).add(_short_commit(record["commit"]))
    each = (
        f"{where}, of commits {', '.join(sorted(commits))}" for where, commits in sorted(commits_by_machine.items())
    )
    return f"Measured on: {'; '.join(each)}."


def _short_commit(commit: str | None) -> str:
    """Shorten a commit hash to eight characters. Keep a final "+", which marks changed files."""
    return "unknown" if commit is None else commit[:8] + "+" * commit.endswith("+")


def text(standings: Sequence[tuple[Entry, Standing]]) -> str:
    """Return the leaderboard page as Markdown."""
    records = [record for _, known in standings for record in known.fresh.values()]
    configs = dict.fromkeys(entry.task.config for entry, known in standings if known.fresh)
    pictures = "".join(f"\n![{config}]({config}.png)\n" for config in configs)
    footer = f"\n{measured_on(records)}\n" if records else ""
    return HEAD + table([cells(entry, known) for entry, known in standings]) + footer + pictures


def _curves(entry: Entry, known: Standing, out: Path) -> list[Curve]:
    """Read the learning curves of an entry's fresh records."""
    return [
        curve(source, entry.task.score) for seed in known.fresh for source in read_sources(path_of(entry, seed, out))
    ]


def publish(listed: Sequence[Entry], out: Path) -> list[Path]:
    """Write the page and a picture per config with all its libraries. Return the paths.

    The function removes the pictures of configs without fresh records.
    """
    known = [(entry, standing(entry, out)) for entry in listed]
    out.mkdir(parents=True, exist_ok=True)
    page, written = out / "README.md", []
    for task, group in groupby(known, key=lambda item: item[0].task):
        groups = [_curves(entry, state, out) for entry, state in group if state.fresh]
        if groups:
            picture = figure(groups, task.score, task.threshold)
            written += write_picture(picture, out / task.config)
        else:
            for suffix in (".png", ".svg"):
                (out / f"{task.config}{suffix}").unlink(missing_ok=True)
    page.write_text(text(known), encoding="utf-8")
    return [page, *written]
