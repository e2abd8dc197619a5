"""Plot learning curves over env steps and over minutes. Three or more seeds are drawn as a band, fewer seeds as lines.

Seeds of the same config, or of the same result file of another library, are a group (see `ecrl.report.curves.Source`).
If the seeds of a group have no range of env steps in common, they are also drawn as lines. All lines of a group have
the same colour and dashes, and no other group has this pair of colour and dashes.

A band shows the interquartile mean and its 95 % bootstrap interval. A band ends at the last step that all seeds have
reached. With three seeds, the interval is the range of their values. In the plot over minutes, each point of a band is
placed at the median of the seeds' times. This module needs the extra `plot`.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ecrl.errors import UserError, extra
from ecrl.report.curves import Curve, Source, choose_metric, curve, read_sources
from ecrl.report.statistics import bootstrap_interval, interquartile_mean

MIN_BAND_SEEDS = 3
"""Minimum number of seeds for a band. Fewer seeds are drawn as lines."""
_SUFFIXES = (".png", ".svg")
_RESAMPLES, _POINTS = 2000, 200
_LONG_LABEL = 45  # characters; with longer labels, the legend has one column instead of two
_BAND = "three or more seeds: interquartile mean, 95 % bootstrap interval"
_COLORS, _DASHES = 10, ("-", "--", "-.", ":")
"""Number of colours in matplotlib's default cycle, and the dashes of the lines."""
MAX_GROUPS = _COLORS * len(_DASHES)
"""Maximum number of groups in a picture. Each group has its own pair of colour and dashes."""
_AXES = {"steps": "environment steps", "minutes": "minutes, including compilation"}


class Band(NamedTuple):
    """Interquartile mean over seeds and its bootstrap interval at the positions `x`, in arrays of shape `[n]`."""

    x: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band_positions(lines: Sequence[np.ndarray]) -> np.ndarray:
    """Return the x positions of a band, in the range that all lines cover.

    The positions are the distinct x values of all lines in this range, or 200 evenly spaced positions if there are more
    than 200 such values.

    >>> band_positions([np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0])]).tolist()
    [1.0, 2.0]
    """
    first, last = max(x[0] for x in lines), min(x[-1] for x in lines)
    points = np.unique(np.concatenate(lines))
    points = points[(points >= first) & (points <= last)]
    return points if len(points) <= _POINTS else np.linspace(first, last, _POINTS)


def band(lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> Band:
    """Interpolate the line `(x, y)` of each seed linearly, and return the band. Equal lines give equal bands."""
    positions = band_positions([x for x, _ in lines])
    values = np.stack([np.interp(positions, x, y) for x, y in lines])
    low, high = bootstrap_interval(values, np.random.default_rng(0), _RESAMPLES)
    return Band(positions, interquartile_mean(values), low, high)


def group_curves(curves: Iterable[Curve]) -> list[list[Curve]]:
    """Group the curves by config or result file, and keep their order."""
    groups: dict[str, list[Curve]] = {}
    for one in curves:
        groups.setdefault(one.group, []).append(one)
    return list(groups.values())


def legend_label(group: Sequence[Curve]) -> str:
    """Return the legend label of a group. If the group has several seeds, the label includes the number of seeds.

    >>> one = Curve("", "ppo", "", np.array([]), np.array([]), np.array([]))
    >>> legend_label([one]), legend_label([one] * 2)
    ('ppo', 'ppo (2 seeds)')
    """
    return group[0].label + (f" ({len(group)} seeds)" if len(group) > 1 else "")


def line_style(number: int) -> dict[str, str]:
    """Return the colour and the dashes of a group, as keyword arguments for `plot` of matplotlib.

    `number` is the index of the group.

    >>> line_style(0), line_style(11)
    ({'color': 'C0', 'linestyle': '-'}, {'color': 'C1', 'linestyle': '--'})
    """
    return {"color": f"C{number % _COLORS}", "linestyle": _DASHES[number // _COLORS]}


def draw_group(axes: Any, group: Sequence[Curve], by: str, style: dict[str, str]) -> None:
    """Draw a group of curves on matplotlib axes.

    The x-axis is `by`, which is "steps" or "minutes". The group is drawn as a band if it has at least `MIN_BAND_SEEDS`
    seeds and all of its seeds share a range of steps, and otherwise as lines.
    """
    steps = [one.steps for one in group]
    if len(group) < MIN_BAND_SEEDS or not len(band_positions(steps)):  # the seeds are too few or share no range
        for number, one in enumerate(group):
            marker = "." if len(one.steps) == 1 else None  # a line of a single point would be invisible
            label = None if number else legend_label(group)
            axes.plot(getattr(one, by), one.values, marker=marker, label=label, **style)
        return
    seed_band = band([(one.steps, one.values) for one in group])
    positions = np.median([np.interp(seed_band.x, one.steps, getattr(one, by)) for one in group], axis=0)
    marker = "." if len(positions) == 1 else None
    axes.plot(positions, seed_band.middle, marker=marker, label=legend_label(group), **style)
    axes.fill_between(positions, seed_band.low, seed_band.high, color=style["color"], alpha=0.2, linewidth=0)


def figure(groups: Sequence[Sequence[Curve]], metric: str, threshold: float | None = None) -> Any:
    """Return a matplotlib figure with a panel over steps and a panel over minutes. A dotted line marks `threshold`.

    Raises: UserError if there are more than `MAX_GROUPS` groups.
    """
    if len(groups) > MAX_GROUPS:
        limit = f"a picture has colours and dashes for at most {MAX_GROUPS}"
        raise UserError(f"{len(groups)} groups of runs with equal configs, but {limit}; plot fewer runs")
    with extra("plot"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    picture = Figure(figsize=(10, 3.8), layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    for axes, (by, label) in zip(panels, _AXES.items(), strict=True):
        for number, group in enumerate(groups):
            draw_group(axes, group, by, line_style(number))
        if threshold is not None:
            axes.axhline(threshold, color="black", linestyle=":", linewidth=1)
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel=metric)
    panels[0].xaxis.set_major_formatter(EngFormatter(sep=""))  # write 2M instead of 2000000
    handles, labels = panels[0].get_legend_handles_labels()
    columns = 1 if max(map(len, labels), default=0) > _LONG_LABEL else min(2, len(groups))
    title = _BAND if panels[0].collections else None
    picture.legend(handles, labels, loc="outside lower center", ncols=columns, title=title)
    return picture


def output_files(out: Path) -> list[Path]:
    """Return the paths of a picture: `out`, or a .png and a .svg file if `out` has no suffix.

    Raises: UserError for any other suffix.

    >>> [str(path) for path in output_files(Path("a/curves"))], [str(path) for path in output_files(Path("curves.svg"))]
    (['a/curves.png', 'a/curves.svg'], ['curves.svg'])
    """
    if out.suffix in _SUFFIXES:
        return [out]
    if out.suffix or not out.name:
        raise UserError(f"--out {out}: expected the suffix .png or .svg, or no suffix for both")
    return [out.with_suffix(suffix) for suffix in _SUFFIXES]


def write(picture: Any, out: Path) -> list[Path]:
    """Write a figure to each path in `output_files(out)`. Equal figures give byte-identical files.

    Raises: UserError if a file cannot be written.
    """
    import matplotlib

    written = output_files(out)
    with matplotlib.rc_context({"svg.hashsalt": "ecrl"}):
        for path in written:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                picture.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else {})
            except OSError as error:
                raise UserError(f"--out {path}: {error.strerror}; choose another path") from None
    return written


def threshold_point(one: Curve, threshold: float) -> tuple[float, float] | None:
    """Return the env steps and minutes of the first point from which on no value of a curve is below `threshold`.

    If the last value is below `threshold`, return None.

    >>> x = np.array([1.0, 2.0, 3.0, 4.0])
    >>> threshold_point(Curve("", "", "", 10 * x, x, np.array([0.5, 0.96, 0.9, 0.97])), 0.95)
    (40.0, 4.0)
    """
    below = np.flatnonzero(~(one.values >= threshold))  # NaN counts as below the threshold
    first = below[-1] + 1 if len(below) else 0
    return (float(one.steps[first]), float(one.minutes[first])) if first < len(one.values) else None


def summary(groups: Iterable[Sequence[Curve]], threshold: float | None) -> list[str]:
    """Describe each curve in a line: its last point, its first NaN, and the point from which it reaches `threshold`.

    A curve reaches the threshold at the first point from which on no value is below the threshold (see
    `threshold_point`). If `threshold` is None, the line does not mention a threshold.
    """
    lines = []
    for one in (one for group in groups for one in group):
        line = f"{one.name}: {one.values[-1]:.4g} after {one.steps[-1]:,.0f} env steps, {one.minutes[-1]:.1f} minutes"
        if np.isnan(one.values).any():
            line += f"; not a number at {one.steps[np.isnan(one.values)][0]:,.0f} env steps"
        if threshold is not None:
            reached = threshold_point(one, threshold)
            line += f"; stays at or above {threshold:g} " if reached else f"; does not stay at or above {threshold:g}"
            line += f"from {reached[0]:,.0f} env steps, {reached[1]:.1f} minutes on" if reached else ""
        lines.append(line)
    return lines


def _warn_of_duplicates(sources: Sequence[Source]) -> None:
    for a, b in combinations(sources, 2):
        same_file = a.path == b.path and a.seed == b.seed
        if same_file or (a.seed is not None and (a.group, a.seed) == (b.group, b.seed)):
            warnings.warn(f"{a.path} and {b.path} have the same config and seed; both are counted", stacklevel=3)


def _without_seed(path: Path) -> str:
    """Return the name of a run folder without the seed, which `train_many` appends.

    >>> _without_seed(Path("outputs/learning_rate_0.001_seed_0")), _without_seed(Path("seed_0"))
    ('learning_rate_0.001', 'seed_0')
    """
    return path.name.partition("_seed_")[0]


def _with_unique_labels(sources: Sequence[Source]) -> list[Source]:
    """Make the labels of groups unique by appending the file or folder name, or the whole path if names are equal."""
    labelled = []
    for source in sources:
        first = {s.group: s.path for s in reversed(sources) if s.label == source.label}
        path, names = first[source.group], [_without_seed(path) for path in first.values()]
        suffix = str(path) if len(set(names)) < len(names) else _without_seed(path)
        labelled.append(source._replace(label=f"{source.label}, {suffix}") if len(first) > 1 else source)
    return labelled


def plot(
    paths: Sequence[Path], out: Path, metric: str | None = None, threshold: float | None = None
) -> tuple[list[Path], list[list[Curve]], str]:
    """Plot the learning curves of runs and of result files of other libraries.

    Args:
        paths: run folders and result files (`ecrl.report.curves`).
        out: path of the picture, as in `output_files`.
        metric: name of the metric in metrics.jsonl; if None, `ecrl.report.curves.choose_metric` chooses the metric.
        threshold: value at which to draw a horizontal line; if None, no line is drawn.

    Returns: the paths of the pictures, the groups of curves, and the name of the metric.
    Raises: UserError if an argument or a file is invalid, if a metric or the extra `plot` is missing, if there are too
        many groups, or if a picture cannot be written.
    """
    output_files(out)
    if threshold is not None and not math.isfinite(threshold):
        raise UserError(f"--threshold {threshold:g}: expected a finite number")
    sources = _with_unique_labels([source for path in paths for source in read_sources(path)])
    _warn_of_duplicates(sources)
    metric = metric or choose_metric(sources)
    groups = group_curves(curve(source, metric) for source in sources)
    return write(figure(groups, metric, threshold), out), groups, metric
