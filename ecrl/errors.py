"""Define errors that a user can fix.

For such an error, the command line prints one line per fault and exits with status 2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UserError(ValueError):
    """Base class of errors that a user can fix.

    Each line of an error message says what is wrong and, in most cases, what to do.
    """


class ConfigError(UserError):
    """Error for faults in a config or in the user's code, one line per fault: `place: what is wrong; what to do`.

    The place of a fault in a config file is the file and the key, such as `my_run.json: trainer.seed`.
    """


class CheckpointError(UserError):
    """Error for a checkpoint, or another file of a run, that cannot be read, used or written.

    For example, a checkpoint may be damaged or may not match its config. The error is also raised for files of
    demonstrations. The message names the file, the folder or the tensor.
    """


class NotSavedError(CheckpointError):
    """Error that `ecrl.train` raises if it cannot save a checkpoint, such as the final state of a run.

    The attributes `state` and `history` hold the newest state and the history, which `ecrl.train` otherwise returns.
    """

    def __init__(self, message: str, state: Any, history: Any):
        super().__init__(f"{message}; nothing is lost: this error has the attributes state and history")
        self.state, self.history = state, history


class NotFiniteError(UserError):
    """Error for an iteration that produced NaN or infinity.

    Attributes:
        report: a dict with the kinds of values that are not finite (`met`), the first such value (`found`) and the step
            counts. `found` is None if the search for this value finds none.
        state: the state before the iteration.
        files: the contents of the other ranks' checkpoint files for this state, by file name.
    """

    def __init__(self, message: str, report: dict[str, Any], state: Any = None, files: dict[str, bytes] | None = None):
        super().__init__(message)
        self.report, self.state, self.files = report, state, files or {}


class MissingExtraError(UserError, ModuleNotFoundError):
    """Error for a missing package of an optional extra of ecrl. The message names the command to install the extra."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Convert a ModuleNotFoundError to a MissingExtraError with the command that installs the extra `name`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{error}: install it with: pip install 'ecrl[{name}]'") from None
