"""Store the logs of a run in memory. A notebook can show the logs as a list, as a DataFrame or as a plot."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from ecrl.errors import UserError, extra
from ecrl.registry import did_you_mean
from ecrl.run.loggers import scalar_name, scalars
from ecrl.types import LogData


class History(Sequence):
    """Sequence of rows. A row is a dict of logs, and its entry `sample_step` is the number of env steps.

    There is one row for every `trainer.log_freq` iterations. By default, this is one row per iteration.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []

    def add(self, record: LogData) -> None:
        """Add the logs of a record to the row with the same `sample_step`."""
        self._add(record["sample_step"], scalars(record))

    def add_file(self, metrics: Path) -> None:
        """Add the logs in the file `metrics.jsonl` of a run folder, except `seconds` and `charts/SPS`.

        If the file is missing, add nothing. A null in the file becomes NaN.
        """
        for line in metrics.read_bytes().splitlines() if metrics.is_file() else []:
            row = json.loads(line)
            kind, step = row.pop("log_type"), row.pop("sample_step")
            prefix = scalar_name(kind, "") if kind != "evaluate" else ""
            left_out = ("seconds", "charts/SPS")
            numbers = {name: math.nan if number is None else number for name, number in row.items()}
            self._add(step, {name.removeprefix(prefix): x for name, x in numbers.items() if name not in left_out})

    def _add(self, step: int, logs: dict[str, float]) -> None:
        if not self._rows or self._rows[-1]["sample_step"] != step:
            self._rows.append({"sample_step": step})
        self._rows[-1].update(logs)

    @overload
    def __getitem__(self, index: int) -> dict[str, float]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, float]]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        if not self._rows:
            return "History of no rows"
        return f"History of {len(self):,} rows, the last {self._rows[-1]}"

    def to_pandas(self) -> Any:
        """Return the history as a DataFrame with the index `sample_step`. The extra `plot` is required."""
        with extra("plot"):
            import pandas
        return pandas.DataFrame(self._rows, columns=None if self._rows else ["sample_step"]).set_index("sample_step")

    def plot(self, name: str = "episode_reward_avg_100") -> Any:
        """Plot the log `name` against env steps, and return the matplotlib axes. The extra `plot` is required.

        Raises: UserError if there are no rows, if no row has the log `name`, or if `name` has no finite value yet.
        """
        if not self._rows:
            raise UserError("the history has no rows to plot; train first")
        rows = [row for row in self._rows if name in row]
        if not rows:
            raise UserError(f"no log {name!r}; {did_you_mean(name, {key for row in self._rows for key in row})}")
        if not any(math.isfinite(row[name]) for row in rows):
            raise UserError(f"{name!r} has no finite value in {len(rows)} rows; train for longer")
        with extra("plot"):
            import matplotlib.pyplot as plt
        _, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
        axes.plot([row["sample_step"] for row in rows], [row[name] for row in rows])
        axes.set(xlabel="environment steps", ylabel=name)
        axes.grid(alpha=0.3)
        return axes
