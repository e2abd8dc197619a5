"""Learning curves from disk: run folders, and files of peers (other libraries) with rows of steps, seconds, return.

A peer's file is CSV with these columns, or JSON: a list of such rows, or an object with `curve` (that list), `name` and
`seed`. A column `success` is a success rate; `seed` parts a CSV into curves.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ecrl.errors import UserError
from ecrl.registry import did_you_mean

DEFAULTS = ("eval/success_rate", "eval/avg_reward", "charts/episode_reward_avg_100")
"""Metrics that are plotted if none is named: the first that all runs and peers have."""
_NAMES = {"return": ("eval/avg_reward", "charts/episode_reward_avg_100"), "success": ("eval/success_rate",)}
_OWN = {"trainer": ("seed", "eval_seed", "exp_name", "wandb_project_name")}  # what runs of one config may differ in

Row = dict[str, Any]


class Source(NamedTuple):
    """What one run or peer logged; those of equal `group` are seeds of the same thing."""

    path: Path
    label: str
    group: str
    seed: int | None
    rows: list[Row]  # each with steps, seconds and metrics by name


class Curve(NamedTuple):
    """One metric of a source, `[n]` each; `name` is that of its folder or file."""

    name: str
    label: str
    group: str
    steps: np.ndarray
    minutes: np.ndarray
    values: np.ndarray


def canonical(data: Any) -> str:
    """JSON that is equal for equal data.

    >>> canonical({"b": 1, "a": [1.0, None]})
    '{"a":[1.0,null],"b":1}'
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def without_names(config: Row) -> Row:
    """A run's config but for seeds and names.

    >>> without_names({"trainer": {"seed": 3, "exp_name": "a", "num_envs": 4}, "env": {"name": "cartpole"}})
    {'trainer': {'num_envs': 4}, 'env': {'name': 'cartpole'}}
    """
    own = {part: {k: v for k, v in config.get(part, {}).items() if k not in names} for part, names in _OWN.items()}
    return config | own


def read(path: Path) -> list[Source]:
    """The run in a folder, or the curves of a peer's file; UserError for anything else."""
    if path.is_dir():
        return [_run(path)]
    if not path.exists():
        raise UserError(f"{path}: does not exist; expected a run folder or a peer's .json or .csv")
    readers = {".json": _json_peer, ".csv": _csv_peer}
    if path.suffix not in readers:
        raise UserError(f"{path}: expected a run folder or a peer's .json or .csv")
    return readers[path.suffix](path)


def _run(folder: Path) -> Source:
    if not (folder / "metrics.jsonl").exists():
        raise UserError(f"{folder}: holds no metrics.jsonl; expected a run folder, such as outputs/<exp_name>_<time>")
    rows = list(_continued(_json_lines(folder / "metrics.jsonl")))
    if not (folder / "config.json").exists():
        return Source(folder, folder.name, str(folder), None, rows)
    config = _json(folder / "config.json")
    trainer = config.get("trainer", {})
    group = canonical(without_names(config))
    return Source(folder, trainer.get("exp_name", folder.name), group, trainer.get("seed"), rows)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None


def _json_lines(path: Path) -> Iterator[Row]:
    """The rows of a file to which a run may be adding; the end of one that a kill cut off is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON: {error}; remove that line") from None


def _continued(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows with `steps`, and with seconds that go on where a resumed run began to count again.

    >>> rows = [{"sample_step": i, "seconds": s} for i, s in ((1, 5.0), (2, 9.0), (3, 4.0), (4, 5.0))]
    >>> [row["seconds"] for row in _continued(rows)]
    [5.0, 9.0, 13.0, 14.0]
    """
    before = last = 0.0
    for row in rows:
        if row["seconds"] < last:
            before += last
        last = row["seconds"]
        yield row | {"steps": row["sample_step"], "seconds": before + last}


def _json_peer(path: Path) -> list[Source]:
    data = _json(path)
    data = data if isinstance(data, dict) else {"curve": data}
    rows = data.get("curve")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f'{path}: expected a list of rows, or an object with one as "curve"')
    name = str(data.get("name", path.stem))
    numbers = [_peer_row(row, f"{path}: row {i}") for i, row in enumerate(rows, 1)]
    return [Source(path, name, name, data.get("seed"), numbers)]


def _csv_peer(path: Path) -> list[Source]:
    with path.open(encoding="utf-8", newline="") as file:
        found = [(row, _peer_row(row, f"{path}:{number}")) for number, row in enumerate(csv.DictReader(file), 2)]
    seeds = dict.fromkeys(row.get("seed") for row, _ in found)
    parts = {seed: [made for row, made in found if row.get("seed") == seed] for seed in seeds}
    return [Source(path, path.stem, path.stem, None if s is None else int(s), rows) for s, rows in parts.items()]


def _peer_row(row: Row, place: str) -> Row:
    """A row with numbers, under the names that runs have for them too."""
    for name in ("steps", "seconds"):
        if row.get(name) in (None, ""):
            raise UserError(f"{place}: no {name}; expected steps, seconds and return or success")
    try:
        numbers = {name: float(value) for name, value in row.items() if name and value not in (None, "")}
    except (TypeError, ValueError) as error:
        raise UserError(f"{place}: {error}; expected numbers") from None
    return numbers | {known: numbers[name] for name, names in _NAMES.items() if name in numbers for known in names}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def metrics(source: Source) -> set[str]:
    """Names of what it has numbers of."""
    names = {name for row in source.rows for name, value in row.items() if _is_number(value)}
    return names - {"steps", "seconds", "sample_step", "seed"}


def choose(sources: Sequence[Source]) -> str:
    """The first of `DEFAULTS` that all have; UserError if there is none."""
    shared = set.intersection(*map(metrics, sources))
    for name in DEFAULTS:
        if name in shared:
            return name
    raise UserError(f"none of {', '.join(DEFAULTS)} is in all of them; choose one with --metric")


def curve(source: Source, metric: str) -> Curve:
    """The rows that have a number of the metric; NaN and null, as before the first episode ended, are left out."""
    rows = [row for row in source.rows if _is_number(row.get(metric))]
    if not rows:
        raise UserError(f"{source.path}: no metric {metric!r}; {did_you_mean(metric, metrics(source))}")
    steps, seconds, values = (np.array([row[name] for row in rows], float) for name in ("steps", "seconds", metric))
    return Curve(source.path.name, source.label, source.group, steps, seconds / 60.0, values)
