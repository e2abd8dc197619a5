"""Consumers of training records that show or store numbers. Each takes an iterator of records and passes every one on.

Only consumers read tensors to the host; `with_host_logs` does it once per record for those stacked above it.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import torch

from ecrl.registry import did_you_mean
from ecrl.types import LogData

_PREFIX = {"collect": "charts/", "train": "train/", "evaluate": ""}


def scalars(record: LogData) -> dict[str, float]:
    """The logs of a record as Python numbers, in one read."""
    names, tensors = list(record["logs"]), list(record["logs"].values())
    if not tensors:
        return {}
    return dict(zip(names, torch.stack([t.detach().double() for t in tensors]).tolist(), strict=True))


def with_host_logs(records: Iterator[LogData]) -> Iterator[LogData]:
    """Move the logs of each record to the host in one read, so that reading them again costs nothing."""
    for record in records:
        logs = {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars(record).items()}
        yield LogData(log_type=record["log_type"], sample_step=record["sample_step"], logs=logs, state=record["state"])


def with_jsonl(records: Iterator[LogData], path: str | Path) -> Iterator[LogData]:
    """Append one JSON object per record: log_type, sample_step, seconds since the start, every log (null for NaN)."""
    start = time.perf_counter()
    with Path(path).open("a", encoding="utf-8") as file:
        for record in records:
            logs = {name: value if math.isfinite(value) else None for name, value in scalars(record).items()}
            head = {"log_type": record["log_type"], "sample_step": record["sample_step"]}
            seconds = {"seconds": round(time.perf_counter() - start, 3)}
            file.write(json.dumps(head | seconds | logs) + "\n")
            file.flush()
            yield record


def with_tensorboard(records: Iterator[LogData], log_dir: str | Path, start: int = 0) -> Iterator[LogData]:
    """Write every log against env steps: `charts/*` from collecting, `train/*` from learning, `eval/*`; `charts/SPS`.

    Args:
        records: to pass on.
        log_dir: folder of the event files.
        start: env steps before the first record, so that a resumed run's speed is its own.
    """
    from torch.utils.tensorboard import SummaryWriter

    began = time.perf_counter()
    with SummaryWriter(str(log_dir)) as writer:
        for record in records:
            step = record["sample_step"]
            for name, value in scalars(record).items():
                if math.isfinite(value):
                    writer.add_scalar(_PREFIX[record["log_type"]] + name, value, step)
            if record["log_type"] == "train":
                writer.add_scalar("charts/SPS", (step - start) / (time.perf_counter() - began), step)
            yield record


def _shown(logs: dict[str, float]) -> str:
    short = {
        "episode_reward_avg_100": "return",
        "episode_length_avg_100": "length",
        "eval/avg_reward": "eval",
        "policy_loss": "policy loss",
        "value_loss": "value loss",
        "entropy": "entropy",
        "approx_kl": "kl",
    }
    return "  ".join(f"{label} {logs[name]:.4g}" for name, label in short.items() if name in logs)


def with_progress(records: Iterator[LogData], start: int, end: int) -> Iterator[LogData]:
    """A live line with steps/s, time left, return and losses, in a terminal and in Jupyter; elsewhere a line per tenth.

    Args:
        records: to pass on.
        start: env steps before the first record.
        end: env steps of the whole run.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    console, logs, began, tenth = Console(), {}, time.perf_counter(), 10 * start // end
    live = console.is_terminal or console.is_jupyter
    columns = (
        SpinnerColumn(),
        MofNCompleteColumn(),
        BarColumn(20),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[logs]}"),
    )
    with Progress(*columns, console=console, disable=not live) as progress:
        task = progress.add_task("train", total=end, completed=start, rate="compiling", logs="")
        for record in records:
            step = record["sample_step"]
            logs |= scalars(record)
            rate = f"{(step - start) / (time.perf_counter() - began):,.0f} steps/s"
            progress.update(task, completed=step, rate=rate, logs=_shown(logs))
            if not live and record["log_type"] == "train" and 10 * step // end > tenth:
                tenth = 10 * step // end
                console.print(
                    f"{step:,}/{end:,}  {rate}  {_shown(logs)}", markup=False, highlight=False, soft_wrap=True
                )
            yield record


@contextmanager
def _extra() -> Iterator[None]:
    """Around an import of the extra `plot`: says how to get what is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: install it with: pip install 'ecrl[plot]'") from None


class History(Sequence):
    """What a run logged: one row (a dict of numbers) per iteration, with `sample_step`."""

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []

    def add(self, record: LogData) -> None:
        """Merge a record into the row of its step."""
        if not self._rows or self._rows[-1]["sample_step"] != record["sample_step"]:
            self._rows.append({"sample_step": record["sample_step"]})
        self._rows[-1].update(scalars(record))

    @overload
    def __getitem__(self, index: int) -> dict[str, float]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, float]]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def to_pandas(self) -> Any:
        """A DataFrame indexed by `sample_step`; needs the extra `plot`."""
        with _extra():
            import pandas
        return pandas.DataFrame(self._rows, columns=None if self._rows else ["sample_step"]).set_index("sample_step")

    def plot(self, name: str = "episode_reward_avg_100") -> Any:
        """The curve of one log against env steps, as matplotlib axes; needs the extra `plot`."""
        rows = [row for row in self._rows if name in row]
        if not rows:
            raise KeyError(f"no log {name!r}; {did_you_mean(name, {key for row in self._rows for key in row})}")
        with _extra():
            import matplotlib.pyplot as plt
        _, axes = plt.subplots()
        axes.plot([row["sample_step"] for row in rows], [row[name] for row in rows])
        axes.set(xlabel="environment steps", ylabel=name)
        return axes
