"""Errors that a user can mend: one line per fault, no traceback on the command line, exit status 2."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UserError(ValueError):
    """What was given, what was expected, what to do."""


class ConfigError(UserError):
    """Faults in a config, one line each: `source: path: what is wrong; what to do`."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another structure; the message names the file."""


class NotFiniteError(UserError):
    """NaN or infinity in an iteration: `report` says what was found where, `state` is the one before the iteration."""

    def __init__(self, message: str, report: dict[str, Any], state: Any = None):
        super().__init__(message)
        self.report, self.state = report, state


class MissingExtraError(UserError, ModuleNotFoundError):
    """A package of an optional extra is not installed."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Around imports of the extra `name`: what is missing becomes one line that says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{error}: install it with: pip install 'ecrl[{name}]'") from None
