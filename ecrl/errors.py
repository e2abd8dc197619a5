"""Errors that a user can fix. The command line prints one line per fault, without a traceback, and exits with 2."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UserError(ValueError):
    """An error that the user can fix. Each line names the given value, the expected value and a remedy."""


class ConfigError(UserError):
    """Faults in a config, one line each: `source: path: what is wrong; what to do`."""


class CheckpointError(UserError):
    """A checkpoint is missing, is damaged or does not fit its config. The message names the file."""


class NotSavedError(CheckpointError):
    """`ecrl.train` could not save its last state. The attributes `state` and `history` hold its return values."""

    def __init__(self, message: str, state: Any, history: Any):
        super().__init__(f"{message}; nothing is lost: this error has the attributes state and history")
        self.state, self.history = state, history


class NotFiniteError(UserError):
    """An iteration produced NaN or infinity.

    Attributes:
        report: places of NaN or infinity, by tensor.
        state: state before the iteration.
        files: checkpoint files of the other ranks for this state.
    """

    def __init__(self, message: str, report: dict[str, Any], state: Any = None, files: dict[str, bytes] | None = None):
        super().__init__(message)
        self.report, self.state, self.files = report, state, files or {}


class MissingExtraError(UserError, ModuleNotFoundError):
    """A package of an optional extra is not installed."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Turn a failed import in the block into an error of one line with the command that installs the extra `name`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{error}: install it with: pip install 'ecrl[{name}]'") from None
