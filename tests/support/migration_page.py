"""Tables and config files of the page on migration, and the names of abcdRL that the page must have."""

import json
import re
from typing import Any

from ecrl.config.files import parse_overrides
from support.paths import ROOT

PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
SECTIONS = {part.splitlines()[0]: part for part in PAGE.split("\n## ")[1:]}
CONFIGS = dict(re.findall(r'^```json title="(abcdrl_\w+\.json)"\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE))
ABCDRL = json.loads((ROOT / "tests" / "config" / "abcdrl_names" / "names.json").read_text(encoding="utf-8"))
SCRIPTS = ABCDRL["scripts"]


def _rows_of(part: str) -> list[list[str]]:
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


ROWS = {title: _rows_of(part) for title, part in SECTIONS.items()}


def spans(cell: str) -> list[str]:
    """Return the texts in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def rows_with(title: str, name: str) -> list[list[str]]:
    """Return the rows of a section whose first column has the name."""
    return [row for row in ROWS[title] if name in spans(row[0])]


def config_of(script: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config file for a script of abcdRL, and the keys that the page's row of the script adds."""
    ((_, file, notes),) = rows_with("abcdRL: scripts", script)
    tokens = [token for text in spans(notes) if text.startswith("--") for token in text.split()]
    return json.loads(CONFIGS[file.strip("`")]), parse_overrides(tokens)
