"""Griffe extension that rewrites this project's docstrings as Markdown for mkdocstrings.

Sections such as `Returns: text`, whose text begins on the same line, become entries of a definition list. Doctests have
no heading in the docstrings, and become fenced blocks. Equations are indented, so Markdown already shows them as code.
"""

import re
from typing import Any

import griffe

_TITLE = "(Returns|Gradient|Raises|Source): "
_ENTRY = re.compile(rf"^{_TITLE}(.*(?:\n(?!{_TITLE}|>>> ).+)*)", re.MULTILINE)
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def _entry(match: re.Match) -> str:
    text = " ".join(line.strip() for line in match[2].splitlines())
    return f"\n{match[1]}\n:   {text}\n"


def as_markdown(docstring: str) -> str:
    """Convert a docstring to Markdown with definition lists and fenced doctests."""
    return _DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", _ENTRY.sub(_entry, docstring))


class Docstrings(griffe.Extension):
    """Rewrite every docstring before Griffe parses it."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object after griffe has read it from the source."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
