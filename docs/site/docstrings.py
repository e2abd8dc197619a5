"""Griffe extension: the sections and doctests of this project's docstrings, in Markdown that mkdocstrings renders.

`Returns: text` and its like stand on the line of their text, and doctests stand without a heading: they become entries
of a definition list and fenced blocks. Equations are indented, which is Markdown for code already.
"""

import re
from typing import Any

import griffe

_TITLE = "(Returns|Gradient|Raises|Source): "
_ENTRY = re.compile(rf"^{_TITLE}(.*(?:\n(?!{_TITLE}|>>> ).+)*)", re.MULTILINE)
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def _entry(found: re.Match) -> str:
    text = " ".join(line.strip() for line in found[2].splitlines())
    return f"\n{found[1]}\n:   {text}\n"


def as_markdown(docstring: str) -> str:
    """The docstring with entries and fences."""
    return _DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", _ENTRY.sub(_entry, docstring))


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called with each object once it is read from the source."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
