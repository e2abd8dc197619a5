"""The command line `ecrl`, run in this process."""

import sys

from ecrl.cli.main import main


def called(monkeypatch, *args) -> int:
    """The exit status of the command line, run in this process; what it prints is for capsys."""
    monkeypatch.setattr(sys, "argv", ["ecrl", *map(str, args)])
    try:
        main()
    except SystemExit as stop:
        return stop.code
    return 0
