"""Store in the run folder after how many iterations a run became compiled (`trainer.compile: background`).

A resumed run switches after the same number of iterations, so it has the same results as an uninterrupted run.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from ecrl.algorithms import Run
from ecrl.compile.background import switch_of
from ecrl.errors import CheckpointError
from ecrl.storage.atomic_files import replace_file
from ecrl.types import LogData

FILE = "compiled_from.json"


def restore_switch(run: Run, folder: Path, iteration: int) -> None:
    """Set the switch of a run that is compiled in the background to its value after `iteration` iterations.

    Raises: CheckpointError if the file in the run folder is damaged.
    """
    if (switch := switch_of(run.jit)) is None:
        return
    path = folder / FILE
    if path.is_file():
        try:
            switch.compiled_from = int(json.loads(path.read_bytes())["compiled_from"])
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(
                f"{path}: damaged; delete the file, and the run will be compiled in the background again"
            ) from None
    # an evaluation of the state has the form of the iteration before
    switch.eager = switch.compiled_from is None or iteration <= switch.compiled_from


def with_switch(records: Iterator[LogData], run: Run, folder: Path) -> Iterator[LogData]:
    """Write the file when the run becomes compiled, before the record of its first compiled iteration is yielded.

    Raises: CheckpointError if the file cannot be written.
    """
    switch, path = switch_of(run.jit), folder / FILE
    if switch is None:
        yield from records
        return
    written = path.is_file()
    for record in records:
        if not written and not switch.eager and switch.compiled_from is not None:
            try:
                replace_file(path, (json.dumps({"compiled_from": switch.compiled_from}) + "\n").encode())
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be written: {error.strerror}; make room, then resume") from None
            written = True
        yield record
