"""Consumers of training records: decorators over the generator. Each takes an iterator of records and passes all on.

Only consumers read tensors to the host; `with_host_logs` does it once per record for those stacked above it. Each is
usable alone, `for record in with_jsonl(train_iter(state, cfg), "metrics.jsonl"): ...`, and closes what it opened when
the records end, when its caller stops early, and when anything raises; `ending` does so for those below it. None of
them ends a run: a full disk is said, and tried again.
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
from ecrl.run.atomic_files import append
from ecrl.types import LogData

SPS = "charts/SPS"
_GROUP = {"collect": "charts", "train": "train", "evaluate": "eval"}


@contextmanager
def ending(records: Iterable[Any]) -> Iterator[None]:
    """At its end, end the consumers below, whose caller may have stopped early; what they raise then is not lost.

    Python only prints what a generator raises that ends because nobody holds it any more.

    >>> def saving():
    ...     try:
    ...         yield {}
    ...     finally:
    ...         raise OSError("disk full")
    >>> below = saving()
    >>> with ending(below):
    ...     first = next(below)
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
    """The logs of a record as Python numbers, in one read."""
    names, tensors = list(record["logs"]), list(record["logs"].values())
    if not tensors:
        return {}
    return dict(zip(names, torch.stack([t.detach().double() for t in tensors]).tolist(), strict=True))


def scalar_name(log_type: str, name: str) -> str:
    """The name of a log in metrics.jsonl, TensorBoard and W&B; one that has its group in it stays as it is.

    >>> scalar_name("collect", "episode_reward_avg_100"), scalar_name("train", "entropy")
    ('charts/episode_reward_avg_100', 'train/entropy')
    >>> scalar_name("collect", "rewards/reach"), scalar_name("evaluate", "eval/avg_reward")
    ('rewards/reach', 'eval/avg_reward')
    """
    return name if "/" in name else f"{_GROUP[log_type]}/{name}"


def with_scalars(records: Iterator[LogData], start: int = 0) -> Iterator[tuple[LogData, dict[str, float]]]:
    """Each record beside its numbers by `scalar_name`; those of a train record include `charts/SPS`.

    Args:
        records: to pass on.
        start: env steps before the first record, so that the steps per second of a resumed run are its own.
    """
    began = time.perf_counter()
    with ending(records):
        for record in records:
            numbers = {scalar_name(record["log_type"], name): value for name, value in scalars(record).items()}
            if record["log_type"] == "train":
                numbers[SPS] = (record["sample_step"] - start) / (time.perf_counter() - began)
            yield record, numbers


def with_host_logs(records: Iterator[LogData]) -> Iterator[LogData]:
    """Move the logs of each record to the host in one read, so that reading them again costs nothing."""
    with ending(records):
        for record in records:
            logs = {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars(record).items()}
            yield {**record, "logs": logs}


_KEPT = 1000
"""Rows that wait for a disk that is full or away; older ones are given up."""


def never_fatal(what: str, *kinds: type[Exception]) -> Callable[..., bool]:
    """A function that makes a call, `(fn, *args)`, whose OSError (a full disk) does not end the run; did it work.

    Said once when calls begin to fail, with `what` for where they write, and once when they work again: logs are worth
    less than the run.

    Args:
        what: where the calls write.
        kinds: further errors that do not end the run.

    >>> with warnings.catch_warnings(record=True, action="always") as said:
    ...     guarded = never_fatal("the log")
    ...     worked = [guarded(Path(name).stat) for name in ("/no/such/file", "/no/such/file", "/dev/null")]
    >>> worked
    [False, False, True]
    >>> for warning in said:
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
                nth = f" (outage {outages})" if outages > 1 else ""  # else Python would not say it again
                warnings.warn(f"{what}: {error}; the run goes on and tries again{nth}", stacklevel=2)
            return False
        if failures:
            warnings.warn(f"{what}: works again, after {failures} failure{'s' * (failures > 1)}", stacklevel=2)
            failures = 0
        return True

    return guarded


def appending(path: Path) -> Callable[[bytes], None]:
    """A function that adds to the end of a file, whole pieces only.

    What a full disk refuses waits for the next call, as far as the newest 1,000 pieces; the run goes on.
    """
    guarded, waiting = never_fatal(str(path)), deque(maxlen=_KEPT)

    def add(data: bytes) -> None:
        waiting.append(data)
        if guarded(append, path, b"".join(waiting)):
            waiting.clear()

    return add


def _seconds(path: Path) -> float:
    """Those of the last whole row, 0 if there is none."""
    if not path.is_file():
        return 0.0
    try:
        return float(json.loads(path.read_bytes().split(b"\n")[-2])["seconds"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0.0


def with_jsonl(records: Iterator[LogData], path: str | Path, start: int = 0) -> Iterator[LogData]:
    """Append one JSON object per record: log_type, sample_step, seconds since the start, every log (null for NaN).

    Seconds go on from those of the file's last row, as they do when a run is resumed.

    Args:
        records: to pass on.
        path: of the file.
        start: env steps before the first record.
    """
    began, add = time.perf_counter() - _seconds(Path(path)), appending(Path(path))
    numbered = with_scalars(records, start)
    with ending(numbered):
        for record, numbers in numbered:
            logs = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
            head = {"log_type": record["log_type"], "sample_step": record["sample_step"]}
            seconds = {"seconds": round(time.perf_counter() - began, 3)}
            add((json.dumps(head | seconds | logs) + "\n").encode())
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


@dataclass
class _Pace:
    """Steps per second, without the time of compiling; before the first step, the phase of the run."""

    step: int
    compilations: Sequence[Compilation] = ()
    seconds: float = 0.0
    since: float = field(default_factory=lambda: time.perf_counter())
    steps: int = 0
    earlier: int = 0

    def __post_init__(self) -> None:
        self.earlier = len(self.compilations)

    def move(self, step: int) -> None:
        self.steps, self.step = self.steps + step - self.step, step
        self.seconds = time.perf_counter() - self.since

    def __str__(self) -> str:
        if not self.steps:
            return "compiling" if any(c.seconds is None for c in self.compilations) else "starting"
        took = sum(c.seconds or 0.0 for c in self.compilations[self.earlier :])
        rate = f"{self.steps / max(self.seconds - took, 1e-9):,.0f} steps/s"
        return f"{rate}, compiled in {took:.0f} s" if took >= 0.5 else rate


_CELL = 90
"""Characters in a line below a Jupyter cell that are seen beside the list of files."""


@contextmanager
def _in_cell(shown: Any) -> Iterator[None]:
    """Show what rich can render below a Jupyter cell, and again in the same place four times a second.

    Unlike the widget that rich itself would use, this output is part of a saved notebook.
    """
    from IPython.display import display

    place, over = display(shown, display_id=True), Event()

    def again() -> None:
        while not over.wait(0.25):
            place.update(shown)  # pyright: ignore

    thread = Thread(target=again, name="ecrl-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        place.update(shown)  # pyright: ignore


def with_progress(
    records: Iterator[LogData], start: int, end: int, compilations: Sequence[Compilation] = ()
) -> Iterator[LogData]:
    """Live steps/s, time, return and losses, in a terminal and in Jupyter; elsewhere a line per tenth.

    Compiling is shown while it goes on, and what it took afterwards, which steps/s leave out.

    Args:
        records: to pass on.
        start: env steps before the first record.
        end: env steps of the whole run.
        compilations: the record of the run's `jit`, which grows.
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

    console, logs, pace, tenth = Console(), {}, _Pace(start, compilations), 10 * start // end
    guarded, live = never_fatal("progress"), console.is_terminal or console.is_jupyter
    columns = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.fields[rate]}"))
    progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
    task = progress.add_task("train", total=end, completed=start, rate=pace)
    both, numbers = Table.grid(Column(max_width=_CELL if console.is_jupyter else None)), Text()
    both.add_row(progress)
    both.add_row(numbers)
    shown = _in_cell(both) if console.is_jupyter else Live(both, console=console) if live else nullcontext()
    with shown, ending(records):
        for record in records:
            step = record["sample_step"]
            logs |= scalars(record)
            pace.move(step)
            progress.update(task, completed=step)
            numbers.plain = _shown(logs)
            if not live and record["log_type"] == "train" and 10 * step // end > tenth:
                tenth = 10 * step // end
                line = f"{step:,}/{end:,}  {pace}  {_shown(logs)}"
                guarded(partial(console.print, line, markup=False, highlight=False, soft_wrap=True))
            yield record
