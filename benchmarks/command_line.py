"""Run a benchmark from the command line."""

import sys
from collections.abc import Callable
from typing import NoReturn

import tyro

from ecrl.errors import UserError


def run_command(run: Callable[..., bool], prog: str) -> NoReturn:
    """Call `run` with the arguments of the command line, and exit.

    The exit status is 0 if `run` returns True, 1 if it returns False, 2 for an error that the user can fix, and 130
    after Ctrl-C. `prog` is the command in the help.
    """
    try:
        succeeded = tyro.cli(run, prog=prog, config=(tyro.conf.FlagCreatePairsOff,))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0 if succeeded else 1)
