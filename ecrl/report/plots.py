"""Learning curves over env steps and minutes: a line for each of few seeds, a band for three or more.

Seeds of one config, or of one peer, share a colour. A band is the interquartile mean with its 95 % bootstrap interval
after equally many env steps, as far as all of its seeds have come; of three seeds that is their range. Over minutes it
stands where the median of its seeds had come so far. Needs the extra `plot`.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ecrl.errors import UserError, extra
from ecrl.report.curves import Curve, Source, choose, curve, read
from ecrl.report.statistics import bootstrap_interval, interquartile_mean

LEAST = 3
"""Seeds from which on a band stands for the lines."""
_SUFFIXES = (".png", ".svg")
_RESAMPLES, _POINTS = 2000, 200
_WIDE = 45  # letters of a name: two such stand beside each other
_BAND = "three or more seeds: interquartile mean, 95 % bootstrap interval"
_AXES = {"steps": "environment steps", "minutes": "minutes, compiling included"}


class Band(NamedTuple):
    """The interquartile mean of seeds and its bootstrap interval, `[n]` each, against `at`."""

    at: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def grid(lines: Sequence[np.ndarray]) -> np.ndarray:
    """Places that all lines reach: their own if they share them or there are few, else evenly spaced.

    >>> grid([np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0])]).tolist()
    [1.0, 2.0]
    """
    first, last = max(x[0] for x in lines), min(x[-1] for x in lines)
    own = np.unique(np.concatenate(lines))
    own = own[(own >= first) & (own <= last)]
    return own if len(own) <= _POINTS else np.linspace(first, last, _POINTS)


def band(lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> Band:
    """The band over lines `(x, y)` of seeds, read off between their points; the same lines give the same band."""
    at = grid([x for x, _ in lines])
    values = np.stack([np.interp(at, x, y) for x, y in lines])
    low, high = bootstrap_interval(values, np.random.default_rng(0), _RESAMPLES)
    return Band(at, interquartile_mean(values), low, high)


def grouped(curves: Iterable[Curve]) -> list[list[Curve]]:
    """Seeds of the same thing together, in the order in which they were given."""
    groups: dict[str, list[Curve]] = {}
    for one in curves:
        groups.setdefault(one.group, []).append(one)
    return list(groups.values())


def legend(group: Sequence[Curve]) -> str:
    """What a group is called in the picture, with how many seeds it has.

    >>> one = Curve("", "ppo", "", np.array([]), np.array([]), np.array([]))
    >>> legend([one]), legend([one] * 2)
    ('ppo', 'ppo (2 seeds)')
    """
    return group[0].label + (f" ({len(group)} seeds)" if len(group) > 1 else "")


def draw(axes: Any, group: Sequence[Curve], by: str, color: str) -> None:
    """Draw a group on matplotlib's axes against `by`, "steps" or "minutes"."""
    steps = [one.steps for one in group]
    if len(group) < LEAST or not len(grid(steps)):  # or seeds that share no stretch
        for number, one in enumerate(group):
            marker = "." if len(one.steps) == 1 else None  # a line from a single point cannot be seen
            label = None if number else legend(group)
            axes.plot(getattr(one, by), one.values, color=color, marker=marker, label=label)
        return
    drawn = band([(one.steps, one.values) for one in group])
    at = np.median([np.interp(drawn.at, one.steps, getattr(one, by)) for one in group], axis=0)
    marker = "." if len(at) == 1 else None
    axes.plot(at, drawn.middle, color=color, marker=marker, label=legend(group))
    axes.fill_between(at, drawn.low, drawn.high, color=color, alpha=0.2, linewidth=0)


def figure(groups: Sequence[Sequence[Curve]], metric: str, threshold: float | None = None) -> Any:
    """A matplotlib figure with a panel over steps and one over minutes; a threshold is a dotted line."""
    with extra("plot"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    made = Figure(figsize=(10, 3.8), layout="constrained")
    panels = made.subplots(1, 2, sharey=True)
    for axes, (by, label) in zip(panels, _AXES.items(), strict=True):
        for number, group in enumerate(groups):
            draw(axes, group, by, f"C{number}")
        if threshold is not None:
            axes.axhline(threshold, color="black", linestyle=":", linewidth=1)
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel=metric)
    panels[0].xaxis.set_major_formatter(EngFormatter(sep=""))  # 2M
    handles, labels = panels[0].get_legend_handles_labels()
    columns = 1 if max(map(len, labels), default=0) > _WIDE else min(2, len(groups))
    title = _BAND if panels[0].collections else None
    made.legend(handles, labels, loc="outside lower center", ncols=columns, title=title)
    return made


def files(out: Path) -> list[Path]:
    """Where a picture goes: to `out`, or to both formats of it if it names none.

    >>> [str(path) for path in files(Path("a/curves"))], [str(path) for path in files(Path("curves.svg"))]
    (['a/curves.png', 'a/curves.svg'], ['curves.svg'])
    """
    if out.suffix in _SUFFIXES:
        return [out]
    if out.suffix or not out.name:
        raise UserError(f"--out {out}: expected a name that ends in .png or .svg, or in neither for both")
    return [out.with_suffix(suffix) for suffix in _SUFFIXES]


def write(made: Any, out: Path) -> list[Path]:
    """Write a figure into `files(out)`; equal figures give equal files."""
    import matplotlib

    written = files(out)
    with matplotlib.rc_context({"svg.hashsalt": "ecrl"}):
        for path in written:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                made.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else {})
            except OSError as error:
                raise UserError(f"--out {path}: {error.strerror}; give another place") from None
    return written


def first_at(one: Curve, threshold: float) -> tuple[float, float] | None:
    """Env steps and minutes from which on a curve was never below the threshold.

    >>> x = np.array([1.0, 2.0, 3.0, 4.0])
    >>> first_at(Curve("", "", "", 10 * x, x, np.array([0.5, 0.96, 0.9, 0.97])), 0.95)
    (40.0, 4.0)
    """
    below = np.flatnonzero(~(one.values >= threshold))  # NaN too
    place = below[-1] + 1 if len(below) else 0
    return (float(one.steps[place]), float(one.minutes[place])) if place < len(one.values) else None


def told(groups: Iterable[Sequence[Curve]], threshold: float | None) -> list[str]:
    """A line for each curve: where it ended, where it is no number, and from where on it stayed above a threshold."""
    lines = []
    for one in (one for group in groups for one in group):
        line = f"{one.name}: {one.values[-1]:.4g} after {one.steps[-1]:,.0f} env steps, {one.minutes[-1]:.1f} minutes"
        if np.isnan(one.values).any():
            line += f"; not a number at {one.steps[np.isnan(one.values)][0]:,.0f} env steps"
        if threshold is not None:
            found = first_at(one, threshold)
            line += f"; stays above {threshold:g} " if found else f"; does not stay above {threshold:g}"
            line += f"from {found[0]:,.0f} env steps, {found[1]:.1f} minutes on" if found else ""
        lines.append(line)
    return lines


def _warn_of_twins(sources: Sequence[Source]) -> None:
    for a, b in combinations(sources, 2):
        same_file = a.path == b.path and a.seed == b.seed
        if same_file or (a.seed is not None and (a.group, a.seed) == (b.group, b.seed)):
            warnings.warn(f"{a.path} and {b.path} are one config and seed, counted twice", stacklevel=3)


def _told_apart(sources: Sequence[Source]) -> list[Source]:
    """With the path beside the label where groups share one: its name, or all of it where they share that too."""
    made = []
    for source in sources:
        first = {s.group: s.path for s in reversed(sources) if s.label == source.label}
        path, names = first[source.group], [path.name for path in first.values()]
        apart = str(path) if len(set(names)) < len(names) else path.name
        made.append(source._replace(label=f"{source.label}, {apart}") if len(first) > 1 else source)
    return made


def plot(
    paths: Sequence[Path], out: Path, metric: str | None = None, threshold: float | None = None
) -> tuple[list[Path], list[list[Curve]]]:
    """Plot runs and peers into a picture.

    Args:
        paths: run folders, and files of peers (`ecrl.report.curves`).
        out: see `files`.
        metric: as in metrics.jsonl; `ecrl.report.curves.choose` tells the default.
        threshold: a line to draw.

    Returns: the files and the groups of curves.
    Raises: UserError for what is no run, has no such metric, or without the extra `plot`.
    """
    files(out)
    if threshold is not None and not math.isfinite(threshold):
        raise UserError(f"--threshold {threshold:g}: expected a number")
    sources = _told_apart([source for path in paths for source in read(path)])
    _warn_of_twins(sources)
    metric = metric or choose(sources)
    groups = grouped(curve(source, metric) for source in sources)
    return write(figure(groups, metric, threshold), out), groups
