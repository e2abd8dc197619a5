"""The leaderboard and its pictures, made from the files of results alone (`records`).

A line without files says *not measured*, as does, with how many there are, one with none but stale files: their numbers
are of other settings.
"""

from collections.abc import Sequence
from itertools import groupby
from math import inf
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.learning import reached
from benchmarks.records import LIBRARIES, Entry, Row, Standing, path_of, standing, wanted
from benchmarks.report import cell
from benchmarks.tasks import EPISODES, POINTS
from ecrl.report.curves import Curve, curve, read
from ecrl.report.plots import MIN_BAND_SEEDS, figure
from ecrl.report.plots import write as write_picture
from ecrl.report.statistics import bootstrap_interval, interquartile_mean

_RESAMPLES = 10_000
(_WAY, _END), (_WAY_SUCCESS, _END_SUCCESS) = EPISODES["return"], EPISODES["success"]
HEAD = f"""# Results

What every shipped config learns, beside Stable-Baselines3's PPO with its zoo's settings (`benchmarks/peers/zoo.py`) on
the same budget. Made by `ecrl bench results` from the files in `runs/`: one for each seed, with its raw curve, settings
and their hash, commit, command, machine and times; `ecrl plot` reads them too.

Scores are of {_END} episodes with deterministic actions after the whole budget ({_END_SUCCESS} for a success rate).
The interquartile mean leaves out the least and the greatest quarter of the seeds, in whole seeds: two of ten at either
end, none of three, whose mean it is. The interval is its 95 % bootstrap interval over seeds; of three seeds that is
their range. A seed has reached the threshold at the first of at most {POINTS} evaluations ({_WAY} episodes,
{_WAY_SUCCESS} for a success rate) that is not below it; env steps and minutes are the median over all seeds, if more
than half of them came there. Minutes are of training on one core, from the start of the process, imports and compiling
with an empty cache included, evaluations left out. Seeds of a line may be of different commits, and of virtual machines
of which some took three times the time of others, so minutes tell little of which library is faster; each file has its
own commit and seconds. A seed that failed has no score, and is one that did not come to the threshold.

The zoo made its settings for budgets of its own, four of the six shorter than here: a run may come to the threshold and
fall below it again.

"""
COLUMNS = (
    "config", "library", "env steps", "seeds", "score", "mean", "interquartile mean", "95 % interval", "threshold",
    "reached by", "env steps to it", "minutes to it",
)  # fmt: skip


def summary(entry: Entry, fresh: dict[int, Row], failed: int = 0) -> Row:
    """Statistics over the seeds of an entry; those that `failed` have no score, and did not come to the threshold.

    Returns: `mean`, `iqm`, `low` and `high` of its interval (None below three seeds) of the last scores; `reached`, how
        many seeds came to the threshold; `steps` and `minutes`, the median of all seeds until then, infinite if no
        more than half did.
    """
    score, threshold = entry.task.score, entry.task.threshold
    curves = [record["curve"] for record in fresh.values()]
    last = np.array([rows[-1][score] for rows in curves])
    low, high = (None, None)
    if len(last) >= MIN_BAND_SEEDS:
        low, high = map(float, bootstrap_interval(last, np.random.default_rng(0), _RESAMPLES))
    found: Row = {"mean": float(last.mean()), "iqm": float(interquartile_mean(last)), "low": low, "high": high}
    if threshold is None:
        return found
    points = [*(reached(rows, score, threshold) for rows in curves), *[None] * failed]
    steps, minutes = (median(inf if point is None else point[i] for point in points) for i in (0, 1))
    return found | {"reached": len(points) - points.count(None), "steps": steps, "minutes": minutes}


def cells(entry: Entry, known: Standing) -> list[str]:
    """A line of the table."""
    task, fresh = entry.task, known.fresh
    head = [f"`{task.config}`", LIBRARIES[entry.library].name]
    if not fresh:
        stale = f", {known.stale} stale" if known.stale else ""
        none = "*failed*" if known.failed else f"*not measured*{stale}"
        return [*head, none, *[""] * (len(COLUMNS) - 3)]
    found, of = summary(entry, fresh, len(known.failed)), max(len(fresh), wanted(fresh))
    others = {"failed": len(known.failed), "stale": known.stale}
    others = "".join(f", {count} {what}" for what, count in others.items() if count)
    interval = "" if found["low"] is None else f"{cell(found['low'])} to {cell(found['high'])}"
    line = [
        *head,
        f"{max(record['curve'][-1]['steps'] for record in fresh.values()):,}",
        (str(len(fresh)) if len(fresh) == of else f"{len(fresh)} of {of}") + others,
        task.score,
        cell(found["mean"]),
        cell(found["iqm"]),
        interval,
        cell(task.threshold),
    ]
    if task.threshold is None:
        return [*line, "", "", ""]
    to_it = [f"{found['steps']:,.0f}", f"{found['minutes']:.1f}"] if found["steps"] < inf else ["", ""]
    return [*line, f"{found['reached']} of {len(fresh) + len(known.failed)}", *to_it]


def table(lines: Sequence[Sequence[str]]) -> str:
    """A markdown table.

    >>> print(table([["a", "b"]]).splitlines()[-1])
    | a | b |
    """
    rows = [COLUMNS, ["---"] * len(COLUMNS), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def measured_on(records: Sequence[Row]) -> str:
    """The machines, versions and commits that the records are of.

    >>> record = {"machine": {"cpu": "a CPU"}, "versions": {"torch": "2.13.0"}, "commit": "0123456789"}
    >>> measured_on([record, record | {"commit": "abcdef0123"}])
    'Measured on: a CPU, torch 2.13.0, of commits 01234567, abcdef01.'
    """
    seen: dict[str, set[str]] = {}
    for record in records:
        where = f"{record['machine']['cpu']}, torch {record['versions']['torch']}"
        seen.setdefault(where, set()).add(_short(record["commit"]))
    each = (f"{where}, of commits {', '.join(sorted(commits))}" for where, commits in sorted(seen.items()))
    return f"Measured on: {'; '.join(each)}."


def _short(commit: str | None) -> str:
    """Of a commit; "+" where files differed from it."""
    return "unknown" if commit is None else commit[:8] + "+" * commit.endswith("+")


def text(found: Sequence[tuple[Entry, Standing]]) -> str:
    """The page."""
    records = [record for _, known in found for record in known.fresh.values()]
    pictured = dict.fromkeys(entry.task.config for entry, known in found if known.fresh)
    pictures = "".join(f"\n![{config}]({config}.png)\n" for config in pictured)
    foot = f"\n{measured_on(records)}\n" if records else ""
    return HEAD + table([cells(entry, known) for entry, known in found]) + foot + pictures


def _curves(entry: Entry, known: Standing, out: Path) -> list[Curve]:
    """The raw curves of an entry."""
    return [curve(source, entry.task.score) for seed in known.fresh for source in read(path_of(entry, seed, out))]


def publish(found: Sequence[Entry], out: Path) -> list[Path]:
    """Write the page and a picture of each config, all libraries in one; one of a config without files is removed."""
    known = [(entry, standing(entry, out)) for entry in found]
    out.mkdir(parents=True, exist_ok=True)
    page, written = out / "README.md", []
    for task, both in groupby(known, key=lambda item: item[0].task):
        groups = [_curves(entry, state, out) for entry, state in both if state.fresh]
        if groups:
            made = figure(groups, task.score, task.threshold)
            written += write_picture(made, out / task.config)
        else:
            for suffix in (".png", ".svg"):
                (out / f"{task.config}{suffix}").unlink(missing_ok=True)
    page.write_text(text(known), encoding="utf-8")
    return [page, *written]
