"""Errors that a user can fix. The command line prints them without a traceback, one line per fault, with status 2."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UserError(ValueError):
    """An error that the user can fix. Each line has the given value, the expected value and a remedy."""


class ConfigError(UserError):
    """Faults in a config, one line each: `source: path: what is wrong; what to do`."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or has another structure; the message names the file."""


class NotSavedError(CheckpointError):
    """`ecrl.train` could not save its last state. `state` and `history` are the values it would have returned."""

    def __init__(self, message: str, state: Any, history: Any):
        super().__init__(f"{message}; nothing is lost: this error has the state and history that train would return")
        self.state, self.history = state, history


class NotFiniteError(UserError):
    """An iteration produced NaN or infinity.

    Attributes:
        report: the affected tensors and the places in them.
        state: the state before the iteration.
        files: the other ranks' files of a checkpoint of that state.
    """

    def __init__(self, message: str, report: dict[str, Any], state: Any = None, files: dict[str, bytes] | None = None):
        super().__init__(message)
        self.report, self.state, self.files = report, state, files or {}


class MissingExtraError(UserError, ModuleNotFoundError):
    """A package of an optional extra is not installed."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Turn a failing import in the block into one line with the command that installs the extra `name`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{error}: install it with: pip install 'ecrl[{name}]'") from None
