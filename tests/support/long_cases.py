"""Tests whose other cases are long."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long_except(short: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases, with the mark `long` on those that are not in `short`."""
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marked.append(case if case in short else pytest.param(*values, marks=pytest.mark.long))
    return marked
