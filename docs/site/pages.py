"""MkDocs hooks: pages made from the code, files outside of docs/ that are pages too, and links to the reference."""

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

ROOT = Path(__file__).parents[2]
NAMES = {*api_names(), *(f"ecrl.kernels.{name}" for names in names_by_file().values() for name in names)}
_FENCED_OR_NAME = re.compile(r"^```.*?^```|`(ecrl\.[\w.]+)`(?!\])", re.DOTALL | re.MULTILINE)


def _notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def on_config(config: MkDocsConfig) -> None:
    """The notebooks come after the start."""
    if config.nav and _notebooks():
        config.nav.insert(1, {"Notebooks": [f"notebooks/{notebook.name}" for notebook in _notebooks()]})


@event_priority(50)  # before mkdocs-jupyter, which looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what docs/ does not hold."""
    contributing = {"contributing.md": (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "](")}
    for path, text in (kernel_pages() | api_pages() | config_pages() | command_page() | contributing).items():
        files.append(File.generated(config, path, content=text))
    results = ROOT / "benchmarks" / "results"
    for path in (*_notebooks(), results / "README.md", *sorted(results.glob("*.png"))):
        files.append(File(str(path.relative_to(ROOT)), str(ROOT), config.site_dir, config.use_directory_urls))
    return files


HERE = {
    "../CONTRIBUTING.md": "contributing.md",
    "../ecrl/kernels": "reference/kernels/index.md",
    "../ecrl/config/config.py": "reference/config/run.md",
    "../ecrl/envs": "reference/config/environments.md",
    "../ecrl/envs/mujoco": "reference/config/mujoco.md",
    "../ecrl/cli/main.py": "reference/commands.md",
    "../notebooks/": "notebooks/",
    "../benchmarks/results/README.md": "benchmarks/results/README.md",
    "../benchmarks/results/push_cube_ppo.png": "benchmarks/results/push_cube_ppo.png",
}
"""What links of pages to files beside docs/ lead to in the site; on their own they lead to the files."""
_ELSEWHERE = re.compile(r"\]\((\.\./[^)#]*?)([\w.]+\.ipynb)?\)")


def _linked(found: re.Match) -> str:
    return f"[{found[0]}][{found[1]}]" if found[1] in NAMES else found[0]


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Link the names that have an entry in the reference; on the pages themselves they are plain code."""
    if page.file.src_uri == "benchmarks/results/README.md":
        page.meta["hide"] = ["navigation", "toc"]  # its table is as wide as the window
    if page.file.src_uri.startswith("notebooks/"):
        return markdown  # it is JSON still
    if page.file.src_uri.startswith("reference/"):
        return _FENCED_OR_NAME.sub(_linked, markdown)
    moved = _ELSEWHERE.sub(lambda found: f"]({HERE[found[1]]}{found[2] or ''})", markdown)
    return _FENCED_OR_NAME.sub(_linked, moved)


def _labelled(table: re.Match) -> str:
    """A table whose cells know their column, for narrow screens, where they stand below each other."""
    names = [re.sub(r"<.*?>", "", name) for name in re.findall(r"<th[^>]*>(.*?)</th>", table[0], re.DOTALL)]
    columns = cycle(names if len(names) > 2 else ["", ""])
    return re.sub(r"<td\b", lambda found: f'<td data-label="{next(columns)}"', table[0])


def _contents(html: str) -> TableOfContents:
    """The headings of a notebook; mkdocs-jupyter's own list leaves out the code in them, and links to what is left."""
    found = re.findall(r'<h([1-6]) id="([^"]+)">(.*?)<a class="anchor-link"', html, re.DOTALL)
    names = [(int(level), place, unescape(re.sub(r"<.*?>", "", text)).strip()) for level, place, text in found]
    return get_toc(nest_toc_tokens([{"level": level, "id": place, "name": name} for level, place, name in names]))


def on_page_content(html: str, page: Page, **kwargs: Any) -> str:
    """Label the cells of the tables; links of notebooks to docs/ and to each other lead to the pages."""
    if page.file.src_uri.startswith("notebooks/"):
        html = re.sub(r'href="\.\./docs/(\w+)\.md\b', r'href="../\1.html', html)
        html = re.sub(r'href="(\w+)\.ipynb\b', r'href="\1.html', html)
        page.toc = _contents(html)
    return re.sub(r"<table>.*?</table>", _labelled, html, flags=re.DOTALL)
