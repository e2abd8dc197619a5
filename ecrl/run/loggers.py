"""Define consumers: generators that take an iterator of training records and yield every record again.

The training loop leaves the logs on the device of the run, and consumers copy them to the host. `with_host_logs` copies
the logs of each record once, for all later consumers. You can also use a single consumer:

    for record in with_jsonl(train_iter(state, cfg), "metrics.jsonl"): ...

A consumer closes its files when the records end, when its caller stops early, and after an error. `ending` closes the
iterator that the consumer reads from. If the disk is full, the run continues: the consumer warns and tries again.
"""

import json
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

from ecrl.compile.jit import Compilation
from ecrl.loop.iteration import decisions_of
from ecrl.storage.atomic_files import append
from ecrl.types import LogData

SPS = "charts/SPS"
_GROUP = {"collect": "charts", "train": "train", "evaluate": "eval"}


@contextmanager
def ending(records: Iterable[Any]) -> Iterator[None]:
    """Close the generator `records` at the end of the block, so that its errors are raised even after an early stop.

    If garbage collection closed the generator, Python would only print the generator's errors.

    >>> def saving():
    ...     try:
    ...         yield {}
    ...     finally:
    ...         raise OSError("disk full")
    >>> records = saving()
    >>> with ending(records):
    ...     first = next(records)
    Traceback (most recent call last):
    OSError: disk full
    """
    try:
        yield
    finally:
        close = getattr(records, "close", None)
        if close is not None:
            close()


def scalars(record: LogData) -> dict[str, float]:
    """Return the logs of a record as Python floats. One transfer copies all logs to the host."""
    names, tensors = list(record["logs"]), list(record["logs"].values())
    if not tensors:
        return {}
    return dict(zip(names, torch.stack([t.detach().double() for t in tensors]).tolist(), strict=True))


def scalar_name(log_type: str, name: str) -> str:
    """Return the name of a log in metrics.jsonl, TensorBoard and W&B. A name with a slash is returned unchanged.

    >>> scalar_name("collect", "episode_reward_avg_100"), scalar_name("train", "entropy")
    ('charts/episode_reward_avg_100', 'train/entropy')
    >>> scalar_name("collect", "rewards/reach"), scalar_name("evaluate", "eval/avg_reward")
    ('rewards/reach', 'eval/avg_reward')
    """
    return name if "/" in name else f"{_GROUP[log_type]}/{name}"


def with_scalars(records: Iterator[LogData], start: int = 0) -> Iterator[tuple[LogData, dict[str, float]]]:
    """Yield each record together with a dict that maps the `scalar_name` of each log to its value as a float.

    Train records also get `charts/SPS`, the mean number of env steps per second since the first call of `next`.

    Args:
        records: records of the run; the function yields each record again.
        start: number of env steps before the first record; `charts/SPS` does not count these steps.
    """
    start_time = time.perf_counter()
    with ending(records):
        for record in records:
            numbers = {scalar_name(record["log_type"], name): value for name, value in scalars(record).items()}
            if record["log_type"] == "train":
                numbers[SPS] = (record["sample_step"] - start) / (time.perf_counter() - start_time)
            yield record, numbers


def with_host_logs(records: Iterator[LogData]) -> Iterator[LogData]:
    """Copy all logs of each record to the host at once, so that consumers can read the logs without another copy."""
    with ending(records):
        for record in records:
            logs = {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars(record).items()}
            yield {**record, "logs": logs}


_MAX_PENDING_ROWS = 1000
"""Maximum number of rows to keep in memory while a disk is full or unavailable. Older rows are dropped."""


def tolerate_errors(
    label: str, *kinds: type[Exception], then: str = "the run goes on and tries again"
) -> Callable[..., bool]:
    """Return a function `guarded(fn, *args)` that calls `fn(*args)` and returns True, or False if `fn` raises OSError.

    For example, a full disk does not end the run, because the run is more important than its logs. `guarded` warns at
    the first failure, and again when a call succeeds after failures.

    Args:
        label: beginning of each warning message, such as the name of the file.
        kinds: further exception types to handle like OSError.
        then: what happens after a failure, the end of its warning.

    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     guarded = tolerate_errors("the log")
    ...     worked = [guarded(Path(name).stat) for name in ("/no/such/file", "/no/such/file", "/dev/null")]
    >>> worked
    [False, False, True]
    >>> for warning in caught:
    ...     print(warning.message)
    the log: [Errno 2] No such file or directory: '/no/such/file'; the run goes on and tries again
    the log: works again, after 2 failures
    """
    failures, outages = 0, 0

    def guarded(fn: Callable[..., Any], *args: Any) -> bool:
        nonlocal failures, outages
        try:
            fn(*args)
        except (OSError, *kinds) as error:
            failures += 1
            if failures == 1:
                outages += 1
                outage_note = (
                    f" (outage {outages})" if outages > 1 else ""
                )  # Python shows equal warnings only once, so number the outages
                warnings.warn(f"{label}: {error}; {then}{outage_note}", stacklevel=2)
            return False
        if failures:
            warnings.warn(f"{label}: works again, after {failures} failure{'s' * (failures > 1)}", stacklevel=2)
            failures = 0
        return True

    return guarded


def make_appender(path: Path) -> Callable[[bytes], None]:
    """Return a function that appends one row to a file, completely or not at all.

    If a write fails, the run continues, and the next call tries again. Up to 1,000 unwritten rows are kept in memory
    until a write succeeds, and older rows are dropped.
    """
    guarded, pending = tolerate_errors(str(path)), deque(maxlen=_MAX_PENDING_ROWS)

    def add(row: bytes) -> None:
        pending.append(row)
        if guarded(append, path, b"".join(pending)):
            pending.clear()

    return add


def _last_seconds(path: Path) -> float:
    """Return the value of `seconds` in the last complete row of a metrics file, or 0 without such a row."""
    if not path.is_file():
        return 0.0
    try:
        return float(json.loads(path.read_bytes().split(b"\n")[-2])["seconds"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0.0


def with_jsonl(records: Iterator[LogData], path: str | Path, start: int = 0) -> Iterator[LogData]:
    """Append each record to a file as one JSON row.

    A row has the keys log_type, sample_step and seconds, and one key for each log. `seconds` is the time since the
    start of the run. If the file already has rows, as in a resumed run, `seconds` continues from the last row. NaN and
    infinite values are written as null.

    Args:
        records: records of the run; the function yields each record again.
        path: path of the file.
        start: number of env steps before the first record.
    """
    start_time, add = time.perf_counter() - _last_seconds(Path(path)), make_appender(Path(path))
    numbered = with_scalars(records, start)
    with ending(numbered):
        for record, numbers in numbered:
            logs = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
            head = {"log_type": record["log_type"], "sample_step": record["sample_step"]}
            seconds = {"seconds": round(time.perf_counter() - start_time, 3)}
            add((json.dumps(head | seconds | logs) + "\n").encode())
            yield record


def _format_logs(logs: dict[str, float]) -> str:
    """Format logs for the progress line.

    Omit the return and the length until the first episode has ended, because both are NaN until then.
    """
    labels = {
        "episode_reward_avg_100": "return",
        "episode_length_avg_100": "length",
        "eval/avg_reward": "eval",
        "policy_loss": "policy loss",
        "value_loss": "value loss",
        "entropy": "entropy",
        "approx_kl": "kl",
    }
    episode_return, length = logs.get("episode_reward_avg_100", 0.0), logs.get("episode_length_avg_100", math.nan)
    texts = []
    if math.isnan(episode_return) and math.isnan(length):
        texts.append("no episode ended yet")
        labels = {name: label for name, label in labels.items() if label not in ("return", "length")}
    texts += [f"{label} {logs[name]:.4g}" for name, label in labels.items() if name in logs]
    return "  ".join(texts)


@dataclass
class _Speed:
    """Training speed as text: "starting" or "compiling" before the first record, then steps per second.

    The steps per second do not include the compile time.
    """

    step: int
    compilations: Sequence[Compilation] = ()
    seconds: float = 0.0
    start_time: float = field(default_factory=lambda: time.perf_counter())
    steps: int = 0
    earlier_compilations: int = 0

    def __post_init__(self) -> None:
        self.earlier_compilations = len(self.compilations)

    def advance(self, step: int) -> None:
        self.steps, self.step = self.steps + step - self.step, step
        self.seconds = time.perf_counter() - self.start_time

    def __str__(self) -> str:
        if not self.steps:
            return "compiling" if any(c.seconds is None for c in self.compilations) else "starting"
        compile_seconds = sum(c.seconds or 0.0 for c in self.compilations[self.earlier_compilations :])
        rate = f"{self.steps / max(self.seconds - compile_seconds, 1e-9):,.0f} steps/s"
        return f"{rate}, compiled in {compile_seconds:.0f} s" if compile_seconds >= 0.5 else rate


_CELL_WIDTH = 90
"""Number of characters in a line that fits below a Jupyter cell while the file browser is open."""


@contextmanager
def _in_cell(layout: Any) -> Iterator[None]:
    """Show a rich renderable below a Jupyter cell, and refresh it in place four times a second.

    rich's own live display is a Jupyter widget, which is not saved with the notebook.
    """
    from IPython.display import display

    handle, stopped = display(layout, display_id=True), Event()

    def refresh() -> None:
        while not stopped.wait(0.25):
            handle.update(layout)  # pyright: ignore

    thread = Thread(target=refresh, name="ecrl-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        handle.update(layout)  # pyright: ignore


def with_progress(
    records: Iterator[LogData], start: int, end: int, compilations: Sequence[Compilation] = ()
) -> Iterator[LogData]:
    """Show the live speed, time, return and losses in a terminal or Jupyter. Elsewhere, print at most ten lines.

    While the run compiles before its first record, the progress line shows "compiling". Later, the progress line shows
    the compile time, if it is at least half a second. The steps per second do not include the compile time.

    Args:
        records: records of the run; the function yields each record again.
        start: number of env steps before the first record; if an action may take several env steps, the number of
            actions before the first record.
        end: number of env steps in the whole run; if an action may take several env steps, the number of actions in the
            whole run.
        compilations: compilations of the run's `jit`; the list grows during the run.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column, Table
    from rich.text import Text

    console, logs, speed, tenth = Console(), {}, _Speed(start, compilations), 10 * start // end
    guarded, is_live = tolerate_errors("progress"), console.is_terminal or console.is_jupyter
    columns = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.fields[rate]}"))
    progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
    task = progress.add_task("train", total=end, completed=start, rate=speed)
    layout, numbers = Table.grid(Column(max_width=_CELL_WIDTH if console.is_jupyter else None)), Text()
    layout.add_row(progress)
    layout.add_row(numbers)
    live_view = _in_cell(layout) if console.is_jupyter else Live(layout, console=console) if is_live else nullcontext()
    with live_view, ending(records):
        for record in records:
            step = decisions_of(record)
            logs |= scalars(record)
            speed.advance(step)
            progress.update(task, completed=step)
            numbers.plain = _format_logs(logs)
            if not is_live and record["log_type"] == "train" and 10 * step // end > tenth:
                tenth = 10 * step // end
                line = f"{step:,}/{end:,}  {speed}  {_format_logs(logs)}"
                guarded(partial(console.print, line, markup=False, highlight=False, soft_wrap=True))
            yield record
