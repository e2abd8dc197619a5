"""Restrict the files that a config may name. Use this restriction for configs from people you do not trust.

The environment variable ECRL_INPUT_FOLDERS lists folders, separated as in PATH. If the variable is set, a config may
name only files inside these folders. Otherwise, a config may name any file.
"""

import os
from pathlib import Path

from ecrl.errors import ConfigError

VARIABLE = "ECRL_INPUT_FOLDERS"


def is_restricted() -> bool:
    """Return True if $ECRL_INPUT_FOLDERS is set."""
    return VARIABLE in os.environ


def reason_to_refuse(path: str | Path) -> str | None:
    """Return the reason why a config may not name this file or folder, or None. Symbolic links are followed.

    >>> reason_to_refuse("robots/arm.urdf") is None or is_restricted()
    True
    """
    if not is_restricted():
        return None
    listed = os.environ[VARIABLE]
    folders = [os.path.realpath(folder) for folder in listed.split(os.pathsep) if folder]
    try:
        real = Path(os.path.realpath(path))
    except ValueError as error:  # for example, if the path contains a NUL
        return f"{str(path)!r} is not a path: {error}"
    if any(real.is_relative_to(folder) for folder in folders):
        return None
    advice = "copy it into one of these folders, or add its folder to the variable"
    return f"{str(path)!r} is outside the folders of ${VARIABLE} ({listed or 'none'}); {advice}"


def check_inputs_in(folder: str | Path, key: str) -> None:
    """Check a folder and all its content as `check_input` does, because links may lead outside."""
    check_input(folder, key)
    if is_restricted():
        for path in Path(folder).rglob("*"):
            check_input(path, key)


def check_input(path: str | Path, key: str) -> None:
    """Raise ConfigError if the config key `key` may not name this file or folder. The message starts with `key`."""
    if (reason := reason_to_refuse(path)) is not None:
        raise ConfigError(f"{key}: {reason}")
