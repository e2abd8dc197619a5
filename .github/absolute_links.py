"""Make the relative links of a Markdown file absolute, because PyPI shows the file without the repository.

Usage: python .github/absolute_links.py FILE REPOSITORY REVISION
"""

import re
import sys
from pathlib import Path

_RELATIVE_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#)([^)\s]+)\)")


def absolute_links(text: str, repository: str, revision: str) -> str:
    """Return the text with links to files of the repository at a revision.

    >>> absolute_links("![arm](arm.gif) [docs](docs/a.md#b)", "https://code.example/o/n", "v1")
    '![arm](https://code.example/o/n/raw/v1/arm.gif) [docs](https://code.example/o/n/blob/v1/docs/a.md#b)'
    """
    return _RELATIVE_LINK.sub(
        lambda link: f"{link[1]}{link[2]}({repository}/{'raw' if link[1] else 'blob'}/{revision}/{link[3]})", text
    )


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(absolute_links(path.read_text(encoding="utf-8"), *sys.argv[2:]), encoding="utf-8")
