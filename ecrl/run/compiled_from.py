"""Store the number of iterations after which a run with `trainer.compile` set to "background" became compiled.

The number of iterations is in the file `compiled_from.json` of the run folder. A resumed run becomes compiled after the
same number of iterations, so it has the same results as an uninterrupted run.
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
    """Set a run that is compiled in the background to the form of its last completed iteration: eager or compiled.

    If no iteration is completed, the form is eager. For any other run, do nothing.

    Args:
        run: run, whose `jit` has the `Switch` to set.
        folder: run folder.
        iteration: number of iterations that the run has completed.

    Raises: CheckpointError if the file `compiled_from.json` in the run folder is damaged.
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
    # an evaluation of the state runs in the form of the iteration that returned the state
    switch.eager = switch.compiled_from is None or iteration <= switch.compiled_from


def with_switch(records: Iterator[LogData], run: Run, folder: Path) -> Iterator[LogData]:
    """Write `compiled_from.json` when the run becomes compiled, before the first record of a compiled iteration.

    For a run that is not compiled in the background, yield the records unchanged.

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
