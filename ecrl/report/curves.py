"""Learning curves from disk: run folders, and files of peers (other libraries) with rows of steps, seconds, return.

A peer's file is CSV with these columns, or JSON: a list of such rows, or an object with `curve` (that list), `name` and
`seed`. A column `success` is a success rate; `seed` parts a CSV into curves.
"""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ecrl.errors import UserError
from ecrl.registry import did_you_mean

DEFAULTS = ("eval/success_rate", "eval/avg_reward", "charts/episode_reward_avg_100")
"""Metrics that are plotted if none is named: the first that all runs and peers have."""
_NAMES = {"return": ("eval/avg_reward", "charts/episode_reward_avg_100"), "success": ("eval/success_rate",)}
_OWN = {"trainer": ("seed", "eval_seed", "exp_name", "wandb_project_name")}  # what runs of one config may differ in
_PEERS_ROWS = "expected steps, seconds and return or success"

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
    found = readers[path.suffix](path)
    if not any(source.rows for source in found):
        raise UserError(f"{path}: no rows; {_PEERS_ROWS}")
    return found


def _run(folder: Path) -> Source:
    if not (folder / "metrics.jsonl").exists():
        raise UserError(f"{folder}: holds no metrics.jsonl; expected a run folder, such as outputs/<exp_name>_<time>")
    rows = list(_json_lines(folder / "metrics.jsonl"))
    if not rows:
        raise UserError(f"{folder}: nothing was logged yet; train for longer, or leave it out")
    if not (folder / "config.json").exists():
        return Source(folder, folder.name, str(folder), None, rows)
    config = _json(folder / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'}: expected the config of a run")
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
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON: {error}; remove that line") from None
        if not isinstance(row, dict) or not all(_is_number(row.get(name)) for name in ("sample_step", "seconds")):
            raise UserError(f"{path}:{number}: no sample_step or no seconds; remove that line")
        yield row | {"steps": row["sample_step"]}


def _json_peer(path: Path) -> list[Source]:
    data = _json(path)
    data = data if isinstance(data, dict) else {"curve": data}
    rows = data.get("curve")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f'{path}: expected a list of rows, or an object with one as "curve"')
    name, settings = str(data.get("name", path.stem)), data.get("hash")  # which results of `ecrl bench` have
    numbers = [_peer_row(row, f"{path}: row {i}") for i, row in enumerate(rows, 1)]
    return [Source(path, name, canonical([name, settings]), data.get("seed"), numbers)]


def _csv_peer(path: Path) -> list[Source]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets begin theirs with a mark
            found = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not CSV: {error}") from None
    parts: dict[int | None, list[Row]] = {}
    for number, row in enumerate(found, 2):
        place = f"{path}:{number}"
        parts.setdefault(_seed(row.get("seed"), place), []).append(_peer_row(row, place))
    return [Source(path, path.stem, str(path.absolute()), seed, rows) for seed, rows in parts.items()]


def _seed(text: str | None, place: str) -> int | None:
    try:
        return None if text in (None, "") else int(text)
    except ValueError:
        raise UserError(f"{place}: seed {text!r}; expected a whole number") from None


def _peer_row(row: Row, place: str) -> Row:
    """A row with numbers, under the names that runs have for them too."""
    try:
        numbers = {name: float(value) for name, value in row.items() if name and value not in (None, "")}
    except (TypeError, ValueError) as error:
        raise UserError(f"{place}: {error}; expected numbers") from None
    for name in ("steps", "seconds"):
        if not _is_number(numbers.get(name)):
            raise UserError(f"{place}: no {name}; {_PEERS_ROWS}")
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
    """The rows that have the metric, from its first number on: before, no episode had ended.

    What is no number after that is NaN. Raises: UserError where there is none, or rows are not in order.
    """
    found = [row for row in source.rows if metric in row]
    rows = list(dropwhile(lambda row: not _is_number(row[metric]), found))
    if not rows:
        raise UserError(f"{source.path}: no metric {metric!r}; {did_you_mean(metric, metrics(source))}")
    steps, seconds, values = (np.array([row[name] for row in rows], float) for name in ("steps", "seconds", metric))
    for name, x in (("steps", steps), ("seconds", seconds)):
        if (np.diff(x) < 0).any():
            raise UserError(f"{source.path}: {name} fall after {x[np.diff(x).argmin()]:g}; expected rows in order")
    return Curve(source.path.name, source.label, source.group, steps, seconds / 60.0, values)
