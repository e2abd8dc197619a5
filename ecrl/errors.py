"""Errors that a user can mend: one line per fault, no traceback on the command line, exit status 2."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UserError(ValueError):
    """What was given, what was expected, what to do."""


class ConfigError(UserError):
    """Faults in a config, one line each: `source: path: what is wrong; what to do`."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another structure; the message names the file."""


class NotSavedError(CheckpointError):
    """`ecrl.train` could not save its last state: `state` and `history` are what it would have returned."""

    def __init__(self, message: str, state: Any, history: Any):
        super().__init__(f"{message}; nothing is lost: state and history of this error are what train would return")
        self.state, self.history = state, history


class NotFiniteError(UserError):
    """NaN or infinity in an iteration: `report` says what was found where, `state` is the one before the iteration.

    `files` are what a checkpoint of it has from other ranks.
    """

    def __init__(self, message: str, report: dict[str, Any], state: Any = None, files: dict[str, bytes] | None = None):
        super().__init__(message)
        self.report, self.state, self.files = report, state, files or {}


class MissingExtraError(UserError, ModuleNotFoundError):
    """A package of an optional extra is not installed."""


_NO_MEMORY = "allocate memory|out of memory|not enough memory|Storage size calculation overflowed|numel: integer"


@contextmanager
def enough_memory(told: str, advice: str) -> Iterator[None]:
    """Around what may ask for more memory than there is: one line in place of what the allocator raises.

    >>> with enough_memory("policy.actor", "make it smaller"):
    ...     raise MemoryError
    Traceback (most recent call last):
    ecrl.errors.UserError: policy.actor: not enough memory; make it smaller
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search(_NO_MEMORY, str(error)):
            raise
        tried = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
        raise UserError(f"{told}: not enough memory{f' for {tried[1]}' if tried else ''}; {advice}") from None


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Around imports of the extra `name`: what is missing becomes one line that says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{error}: install it with: pip install 'ecrl[{name}]'") from None
