"""Report on a subject: a table, and a JSON file with everything needed to judge and repeat the measurement."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.pairs import ROOT
from benchmarks.worker import PACKAGES

Row = dict[str, Any]


def machine(cores: Sequence[int]) -> Row:
    """Describe the machine: processor, used cores, memory and system."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": list(cores),
        "ram_gb": round(memory / 2**30, 1),
        "os": platform.platform(),
    }


def versions() -> Row:
    """Return the versions of Python and the packages, and the commit, with "+" if files other than results changed."""
    packages = {"python": platform.python_version()}
    for name in PACKAGES.values():
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**packages, "ecrl": _commit()}


def _commit() -> str | None:
    try:
        status = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
        return _git("rev-parse", "HEAD").strip() + ("+" if status.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None  # not a git checkout


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def report(subject: str, rows: list[Row], cores: Sequence[int], quick: bool, seconds: float) -> Row:
    """Return the content of `results/<subject>.json`."""
    about = {"subject": subject, "date": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": round(seconds, 1)}
    command = " ".join(["python -m benchmarks", *(["--quick"] if quick else []), "--only", subject])
    full_command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {
        **about,
        "command": command,
        "given": full_command,
        "machine": machine(cores),
        "versions": versions(),
        "rows": rows,
    }


def write(report: Row, out: Path) -> Path:
    """Write a report to `<subject>.json` in the folder `out`, and return the path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{report['subject']}.json"
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path


def columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns of the table: the keys of the rows without lists and dicts, with status and error last."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, (list, dict)))
    trailing = [name for name in ("status", "error") if name in names]
    return [name for name in names if name not in trailing] + trailing


def cell(value: Any) -> str:
    """Format a value for the table.

    >>> cell(None), cell(True), cell(1234567.8), cell(0.61234), cell("x")
    ('', 'yes', '1,234,568', '0.612', 'x')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def show(report: Row) -> None:
    """Print a report as a table. Rows with an error or a missed target are red."""
    from rich.console import Console
    from rich.table import Table

    rows = report["rows"]
    table = Table(title=f"{report['subject']} ({report['machine']['cpu']}, {report['seconds']:.0f} s)")
    for name in columns(rows):
        table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        style = "red" if "error" in row or row.get("met") is False else None
        table.add_row(*(cell(row.get(name)) for name in columns(rows)), style=style)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
