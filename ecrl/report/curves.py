"""Read learning curves from run folders and from result files of other libraries.

A result file is a CSV file or a JSON file. Each row of a result file has the fields `steps`, `seconds`, and `return` or
`success` (a success rate). A JSON file contains a list of rows, or an object with the list of rows as `curve`, and
optionally with a `name` and a `seed`. A CSV file with a column `seed` has one curve for each seed.
"""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ecrl.config import TrainerConfig
from ecrl.config.config import env_label
from ecrl.errors import UserError
from ecrl.registry import did_you_mean

DEFAULT_METRICS = ("eval/success_rate", "eval/avg_reward", "charts/episode_reward_avg_100")
"""By default, ecrl plots the first of these metrics that all runs and result files have."""
_METRICS_BY_COLUMN = {"return": ("eval/avg_reward", "charts/episode_reward_avg_100"), "success": ("eval/success_rate",)}
# settings that may differ between the runs of a group
_IGNORED_KEYS = {"trainer": ("seed", "eval_seed", "exp_name", "wandb_project_name")}
_DEFAULT_NAME = TrainerConfig.model_fields["exp_name"].default
_EXPECTED_FILES = "expected a run folder, or a .json or .csv file with results of another library"
_EXPECTED_ROWS = "expected steps, seconds and return or success"

Row = dict[str, Any]


class Source(NamedTuple):
    """Rows of one run, or of one seed in a result file.

    Seeds share a `group` if their runs have the same config, if they are in the same CSV file, or if their JSON files
    have the same `name` and the same `hash`.
    """

    path: Path
    label: str
    group: str
    seed: int | None
    rows: list[Row]  # each row has steps, seconds and each metric by name


class Curve(NamedTuple):
    """Curve of one metric of a source, in arrays of shape `[n]`.

    `name` is the name of the source's folder or file.
    """

    name: str
    label: str
    group: str
    steps: np.ndarray
    minutes: np.ndarray
    values: np.ndarray


def canonical_json(data: Any) -> str:
    """Return the JSON text of `data`, without spaces and with sorted keys. Equal data gives equal text.

    >>> canonical_json({"b": 1, "a": [1.0, None]})
    '{"a":[1.0,null],"b":1}'
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def without_seeds_and_names(config: Row) -> Row:
    """Return a run's config without the seeds and names in its section `trainer`.

    >>> without_seeds_and_names({"trainer": {"seed": 3, "exp_name": "a", "num_envs": 4}, "env": {"name": "cartpole"}})
    {'trainer': {'num_envs': 4}, 'env': {'name': 'cartpole'}}
    """
    sections = {
        part: {k: v for k, v in config.get(part, {}).items() if k not in names} for part, names in _IGNORED_KEYS.items()
    }
    return config | sections


def read_sources(path: Path) -> list[Source]:
    """Read the curve of a run folder, the curves of a folder of run folders, or the curves of a result file.

    Raise UserError for any other path.
    """
    if path.is_dir():
        runs = sorted(file.parent for file in path.glob("*/metrics.jsonl"))
        return [_read_run(run) for run in ([] if (path / "metrics.jsonl").exists() else runs) or [path]]
    if not path.exists():
        raise UserError(f"{path}: does not exist; {_EXPECTED_FILES}")
    readers = {".json": _read_json_results, ".csv": _read_csv_results}
    if path.suffix not in readers:
        raise UserError(f"{path}: {_EXPECTED_FILES}")
    sources = readers[path.suffix](path)
    if not any(source.rows for source in sources):
        raise UserError(f"{path}: no rows; {_EXPECTED_ROWS}")
    return sources


def _read_run(folder: Path) -> Source:
    if not (folder / "metrics.jsonl").exists():
        raise UserError(f"{folder}: has no metrics.jsonl; expected a run folder, such as outputs/<exp_name>_<time>")
    rows = list(_read_metrics(folder / "metrics.jsonl"))
    if not rows:
        raise UserError(f"{folder}: has no logs yet; train for longer, or leave out this folder")
    if not (folder / "config.json").exists():
        return Source(folder, folder.name, str(folder), None, rows)
    config = _read_json(folder / "config.json")
    if not isinstance(config, dict) or not all(isinstance(config.get(part, {}), dict) for part in _IGNORED_KEYS):
        raise UserError(f"{folder / 'config.json'}: expected the config of a run")
    trainer = config.get("trainer", {})
    group = canonical_json(without_seeds_and_names(config))
    return Source(folder, _run_label(folder, config), group, trainer.get("seed"), rows)


def _run_label(folder: Path, config: Row) -> str:
    """Return the run's `trainer.exp_name`. If the run has only the default name, return its environment and algorithm.

    If the config of a run with the default name lacks the environment or the algorithm, return the folder's name.

    >>> _run_label(Path("a"), {"env": {"name": "gymnasium", "cfg": {"id": "Acrobot-v1"}}, "algorithm": {"name": "ppo"}})
    'gymnasium:Acrobot-v1 ppo'
    """
    name = config.get("trainer", {}).get("exp_name", _DEFAULT_NAME)
    env, algorithm = config.get("env"), config.get("algorithm")
    if name != _DEFAULT_NAME or not isinstance(env, dict) or not isinstance(algorithm, dict):
        return folder.name if name == _DEFAULT_NAME else name
    return f"{env_label(env.get('name'), env.get('cfg'))} {algorithm.get('name')}"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None


def _read_metrics(path: Path) -> Iterator[Row]:
    """Yield the rows of a metrics file. Skip an incomplete last row, because a run may still be writing it.

    Raises: UserError if any other row is not valid.
    """
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON: {error}; remove that line") from None
        if not isinstance(row, dict) or not all(_is_number(row.get(name)) for name in ("sample_step", "seconds")):
            raise UserError(f"{path}:{number}: expected numbers for sample_step and seconds; remove that line")
        yield row | {"steps": row["sample_step"]}


def _read_json_results(path: Path) -> list[Source]:
    data = _read_json(path)
    data = data if isinstance(data, dict) else {"curve": data}
    rows = data.get("curve")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f'{path}: expected a list of rows, or an object with a list of rows under the key "curve"')
    name, settings = str(data.get("name", path.stem)), data.get("hash")  # results of `ecrl bench` have a hash
    numbers = [_parse_row(row, f"{path}: row {i}") for i, row in enumerate(rows, 1)]
    return [Source(path, name, canonical_json([name, settings]), data.get("seed"), numbers)]


def _read_csv_results(path: Path) -> list[Source]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # some spreadsheets write a byte-order mark
            csv_rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not CSV: {error}") from None
    rows_by_seed: dict[int | None, list[Row]] = {}
    for number, row in enumerate(csv_rows, 2):
        location = f"{path}:{number}"
        rows_by_seed.setdefault(_seed(row.get("seed"), location), []).append(_parse_row(row, location))
    return [Source(path, path.stem, str(path.absolute()), seed, rows) for seed, rows in rows_by_seed.items()]


def _seed(text: str | None, location: str) -> int | None:
    try:
        return None if text in (None, "") else int(text)
    except ValueError:
        raise UserError(f"{location}: seed {text!r}; expected a whole number") from None


def _parse_row(row: Row, location: str) -> Row:
    """Convert a row of a result file to floats. Copy `return` and `success` to the metric names that runs use."""
    try:
        numbers = {name: float(value) for name, value in row.items() if name and value not in (None, "")}
    except (TypeError, ValueError) as error:
        raise UserError(f"{location}: {error}; expected numbers") from None
    for name in ("steps", "seconds"):
        if not _is_number(numbers.get(name)):
            raise UserError(f"{location}: no {name}; {_EXPECTED_ROWS}")
    return numbers | {
        metric: numbers[name] for name, names in _METRICS_BY_COLUMN.items() if name in numbers for metric in names
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def metrics(source: Source) -> set[str]:
    """Return the names of the metrics that have finite values in a source."""
    names = {name for row in source.rows for name, value in row.items() if _is_number(value)}
    return names - {"steps", "seconds", "sample_step", "seed"}


def choose_metric(sources: Sequence[Source]) -> str:
    """Return the first of `DEFAULT_METRICS` that all sources have. Raise UserError if the sources share none."""
    shared = set.intersection(*map(metrics, sources))
    for name in DEFAULT_METRICS:
        if name in shared:
            return name
    raise UserError(f"none of {', '.join(DEFAULT_METRICS)} is in all runs and files; choose a metric with --metric")


def curve(source: Source, metric: str) -> Curve:
    """Return the curve of a metric from its first finite value on. Null values after the first finite value become NaN.

    Raises: UserError if the source has no finite value of the metric, or if steps or seconds decrease from row to row.
    """
    logged = [row for row in source.rows if metric in row]
    rows = list(dropwhile(lambda row: not _is_number(row[metric]), logged))
    if not rows:
        raise UserError(f"{source.path}: no finite value of {metric!r}; {did_you_mean(metric, metrics(source))}")
    steps, seconds, values = (np.array([row[name] for row in rows], float) for name in ("steps", "seconds", metric))
    for name, x in (("steps", steps), ("seconds", seconds)):
        if (np.diff(x) < 0).any():
            raise UserError(f"{source.path}: {name} decrease after {x[np.diff(x).argmin()]:g}; expected rows in order")
    return Curve(source.path.name, source.label, source.group, steps, seconds / 60.0, values)
