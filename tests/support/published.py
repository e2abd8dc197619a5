"""Published figures, and the tables of pages that show them."""

import json
from typing import Any

from support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def rows_of(subject: str) -> list[dict[str, Any]]:
    """Return the measured rows of a speed benchmark."""
    rows = json.loads((RESULTS / f"{subject}.json").read_text())["rows"]
    return [row for row in rows if row.get("status") != "not measured"]


def table(page: str, *columns: str) -> list[list[str]]:
    """Return the rows of the one table of a page that has these columns."""
    head, lines = f"| {' | '.join(columns)} |", (ROOT / page).read_text().splitlines()
    assert lines.count(head) == 1, f"{page}: {lines.count(head)} tables with the columns {head}"
    rows = []
    for line in lines[lines.index(head) + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line[1:-1].split("|")])
    return rows


def lines_by_entry() -> dict[tuple[str, str], dict[str, str]]:
    """Return the leaderboard's lines of this checkout, as dicts, by config and library."""
    from benchmarks.leaderboard import COLUMNS, cells
    from benchmarks.records import entries, standing
    from benchmarks.tasks import CONFIGS

    known = [(one, standing(one, RESULTS)) for one in entries(CONFIGS)]
    return {(one.task.config, one.library): dict(zip(COLUMNS, cells(one, it), strict=False)) for one, it in known}
