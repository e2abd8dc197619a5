"""MkDocs hooks, which generate pages from the code, add files from outside docs/ and link names to the reference."""

import re
from html import unescape
from itertools import cycle
from pathlib import Path
from typing import Any

from api_pages import api_pages
from api_pages import names as api_names
from command_page import command_page
from config_pages import config_pages
from kernel_pages import kernel_pages, names_by_file
from markdown.extensions.toc import nest_toc_tokens
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import TableOfContents, get_toc
from repository import origin, web_address

from ecrl import __version__

ROOT = Path(__file__).parents[2]
NAMES = {*api_names(), *(f"ecrl.kernels.{name}" for names in names_by_file().values() for name in names)}
LEADERBOARD = "benchmarks/results/leaderboard.md"  # as README.md, the page would be the first of its section
_FENCED_OR_NAME = re.compile(r"^```.*?^```|`(ecrl\.[\w.]+)`(?!\])", re.DOTALL | re.MULTILINE)


def _notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def on_config(config: MkDocsConfig) -> None:
    """Link the clone's remote `origin`, show the version, and insert the notebooks after the start pages."""
    config.repo_url = web_address(origin())
    config.repo_name = config.repo_url and config.repo_url.split("/", 3)[3]
    config.extra["release"] = __version__
    config.copyright = f"ecrl {__version__}, Apache-2.0"
    if config.nav and _notebooks():
        config.nav.insert(1, {"Notebooks": [f"notebooks/{notebook.name}" for notebook in _notebooks()]})


@event_priority(50)  # runs before mkdocs-jupyter, which searches the files for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and files from outside docs/, to the site."""
    contributing = {"contributing.md": (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "](")}
    results = ROOT / "benchmarks" / "results"
    outside = contributing | {LEADERBOARD: (results / "README.md").read_text()}
    for path, text in (kernel_pages() | api_pages() | config_pages() | command_page() | outside).items():
        files.append(File.generated(config, path, content=text))
    for path in (*_notebooks(), *sorted(results.glob("*.png"))):
        files.append(File(str(path.relative_to(ROOT)), str(ROOT), config.site_dir, config.use_directory_urls))
    return files


SITE_PATHS = {
    "../CONTRIBUTING.md": "contributing.md",
    "../ecrl/__init__.py": "reference/ecrl.md",
    "../ecrl/kernels": "reference/kernels/index.md",
    "../ecrl/config/config.py": "reference/config/run.md",
    "../ecrl/envs": "reference/config/environments.md",
    "../ecrl/envs/mujoco": "reference/config/mujoco.md",
    "../ecrl/cli/main.py": "reference/commands.md",
    "../ecrl/run": "reference/consumers.md",
    "../notebooks/": "notebooks/",
    "../benchmarks/results/README.md": LEADERBOARD,
    "../benchmarks/results/push_cube_ppo.png": "benchmarks/results/push_cube_ppo.png",
}
"""Map the links that pages in docs/ use for files outside docs/ to paths in the site."""
_OUTSIDE_LINK = re.compile(r"\]\((\.\./[^)#]*?)([\w.]+\.ipynb)?\)")


def _link_name(match: re.Match) -> str:
    return f"[{match[0]}][{match[1]}]" if match[1] in NAMES else match[0]


def _relink(link: re.Match, up: str) -> str:
    """Replace the link of a page to a file outside docs/. `up` is the path from the page to docs/."""
    target = link[1].removeprefix(up)
    if up and not target.startswith("../"):  # another page
        return link[0]
    return f"]({up}{SITE_PATHS[target]}{link[2] or ''})"


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Link Python names to their reference entries, and replace links to files outside docs/ by links to site pages."""
    if page.file.src_uri == LEADERBOARD:
        page.meta["hide"] = ["navigation", "toc"]  # the table needs the full width of the window
    if page.file.src_uri.startswith("notebooks/"):
        return markdown  # the Markdown is still the notebook's JSON
    if page.file.src_uri.startswith("reference/"):
        return _FENCED_OR_NAME.sub(_link_name, markdown)
    up = "../" * page.file.src_uri.count("/")  # from the page to docs/
    relinked = _OUTSIDE_LINK.sub(lambda match: _relink(match, up), markdown)
    return _FENCED_OR_NAME.sub(_link_name, relinked)


def _label_cells(table: re.Match) -> str:
    """Add the column name to each cell of a table. On narrow screens, a cell shows its column name."""
    names = [re.sub(r"<.*?>", "", name) for name in re.findall(r"<th[^>]*>(.*?)</th>", table[0], re.DOTALL)]
    columns = cycle(names if len(names) > 2 else ["", ""])
    return re.sub(r"<td\b", lambda _: f'<td data-label="{next(columns)}"', table[0])


def _contents(html: str) -> TableOfContents:
    """Return the table of contents of a notebook, because mkdocs-jupyter drops code in headings."""
    headings = re.findall(r'<h([1-6]) id="([^"]+)">(.*?)<a class="anchor-link"', html, re.DOTALL)
    tokens = [
        {"level": int(level), "id": anchor, "name": unescape(re.sub(r"<.*?>", "", text)).strip()}
        for level, anchor, text in headings
    ]
    return get_toc(nest_toc_tokens(tokens))


def on_page_content(html: str, page: Page, **kwargs: Any) -> str:
    """Label the cells of tables, and make the links in notebooks point to the site's pages."""
    if page.file.src_uri.startswith("notebooks/"):
        html = re.sub(r'href="\.\./docs/([\w/]+)\.md\b', r'href="../\1.html', html)
        html = re.sub(r'href="(\w+)\.ipynb\b', r'href="\1.html', html)
        page.toc = _contents(html)
    return re.sub(r"<table>.*?</table>", _label_cells, html, flags=re.DOTALL)
