"""The site builds without a warning, has an entry for every public name, and needs nothing from elsewhere."""

import re
import runpy
import zlib
from html import unescape
from itertools import chain
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from support.doc_pages import PAGES
from support.paths import ROOT

import ecrl.kernels

pytest.importorskip("mkdocs", reason="the site needs the extra 'docs'")


def names_of(site: Path) -> set[str]:
    """Return the names in objects.inv, the index for references from other sites."""
    data = (site / "objects.inv").read_bytes()
    lines = zlib.decompress(data.split(b"\n", 4)[4]).decode().splitlines()
    return {line.split()[0] for line in lines}


def test_every_public_name_has_an_entry(site):
    expected = {f"ecrl.{name}" for name in ecrl.__all__} | {f"ecrl.kernels.{name}" for name in ecrl.kernels.__all__}
    assert expected - names_of(site) == set()


def test_docstrings_read_as_they_are_meant(site):
    page = (site / "reference" / "kernels" / "returns.html").read_text()
    text = unescape(re.sub(r"<[^>]+>", "", page))
    assert "advantage[t] = delta[t] + gamma[t] * gae_lambda * advantage[t + 1] * not done[t]" in text
    assert re.search(r"<dt>Gradient</dt>\s*<dd>\s*(<p>)?flows through <code>reward</code>", page)
    assert ">>> gae(torch.tensor([0.0, 1.0])" in text
    for path in (site / "reference").rglob("*.html"):
        prose = re.sub(r"<(pre|code).*?</\1>", "", path.read_text(), flags=re.DOTALL)
        assert not re.search(r"(Returns|Gradient|Raises|Source): |&gt;&gt;&gt; ", prose), f"{path.name}: left as it was"


def test_the_fields_of_a_rollout_a_batch_and_a_state_are_documented(site):
    from ecrl.types import BATCH_FIELDS, ROLLOUT_FIELDS, STATE_FIELDS

    page = unescape((site / "reference" / "kernels" / "types.html").read_text())
    assert all(f"<code>{name}</code>" in page for name in (*ROLLOUT_FIELDS, *BATCH_FIELDS, *STATE_FIELDS))
    assert "[N, T+1] bool, terminated | truncated" in page


def test_no_name_in_angle_brackets_was_taken_for_html(site):
    for path in site.rglob("*.html"):
        tag = re.search(r"<(?!/|!)(?:env|exp_name|id|time|run|name|file|index|N)\b[^>]*>", path.read_text())
        assert not tag, f"{path}: {tag}"


def test_every_key_of_a_config_is_documented(site):
    from support.schema_keys import walked

    text = "".join(path.read_text() for path in (site / "reference" / "config").glob("*.html"))
    documented = set(re.findall(r"<code>([\w]+)</code>", text))
    keys = {key.rpartition(".")[2] for key, _, _ in walked()} - {"*"}
    assert len(keys) > 100 and keys - documented == set()


def test_every_command_is_documented(site):
    from ecrl.cli.main import _NO_OVERRIDES, _WITH_OVERRIDES

    page = (site / "reference" / "commands.html").read_text()
    assert all(f">ecrl {name}<" in page for name in (*_WITH_OVERRIDES, *_NO_OVERRIDES))
    assert "<code>--num-episodes</code> (100)" in page


def test_nothing_is_fetched_from_elsewhere(site):
    """Links of text may lead out; scripts, styles, fonts and pictures are the site's own."""
    for path in chain(site.rglob("*.html"), site.glob("site/*.css")):
        urls = re.findall(r"""(?:src=|<link[^>]*href=|url\(|@import )["']?(https?:)?//[^"')\s]+""", path.read_text())
        assert urls == [], path


def titles(site: Path) -> dict[Path, str]:
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    return {path: unescape(re.search(r"<title>(.*?)</title>", path.read_text())[1]) for path in pages}


def test_titles_are_plain_and_each_page_has_its_own(site):
    found = titles(site)
    assert found[site / "index.html"] == "Overview - ecrl"
    assert sorted(found.values()) == sorted(set(found.values()))
    assert [title for title in found.values() if not re.fullmatch(r"[\w ,/-]+ - ecrl", title) or ": " in title] == []


def test_every_page_links_the_repository_and_has_the_version_and_the_icon(site):
    for path in titles(site):
        page = path.read_text()
        link = re.search(r'<a href="https://code.example/owner/ecrl" [^>]*class="md-source">.*?</a>', page, re.DOTALL)
        assert link and "owner/ecrl" in link[0] and f">{ecrl.__version__}<" in link[0], path
        assert f"ecrl {ecrl.__version__}, Apache-2.0" in page, path
        icon = re.search(r'<link rel="icon" href="([^"]+)">', page)
        assert icon and (path.parent / icon[1]).resolve() == site / "site" / "favicon.svg", path


def test_the_first_picture_is_the_arm(site):
    article = (site / "index.html").read_text().partition("<article")[2]
    picture = re.search(r'<img [^>]*src="([^"]+)"', article)
    assert picture and picture[1] == "images/push_cube.gif"
    data = (site / picture[1]).read_bytes()
    assert data.startswith(b"GIF89a") and b"NETSCAPE2.0" in data and len(data) < 3_000_000  # it repeats


@pytest.fixture
def web_address():
    return runpy.run_path(str(ROOT / "docs" / "site" / "repository.py"))["web_address"]


@pytest.mark.parametrize("remote", ["/folder/ecrl", "../ecrl", "file:///folder/ecrl", "", r"C:\folder\ecrl"])
def test_a_folder_is_no_web_address(remote, web_address):
    assert web_address(remote) is None


@pytest.mark.parametrize(
    "remote",
    [
        "git@code.example:owner/ecrl.git",
        "ssh://git@code.example:2222/owner/ecrl.git",
        "https://code.example/owner/ecrl/",
        "https://user:secret@code.example/owner/ecrl.git",
    ],
)
def test_the_web_address_of_a_server_has_no_credentials(remote, web_address):
    assert web_address(remote) == "https://code.example/owner/ecrl"


def test_every_link_within_the_site_leads_somewhere(site):
    """Notebooks too, at whose links `mkdocs build --strict` does not look."""
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    ids = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in texts.items()}
    for path, text in texts.items():
        links = {urlsplit(unescape(href)) for href in re.findall(r'href="([^"]*)"', text)}
        for link in (one for one in links if not one.scheme and path.name != "404.html"):
            target = (path.parent / unquote(link.path)).resolve() if link.path not in ("", ".") else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.relative_to(site)}: {link.path}"
            known = ids.get(target, {link.fragment}) | {"", "__tabbed", "__skip"}
            assert unquote(link.fragment) in known, f"{path.relative_to(site)}: {link.path}#{link.fragment}"


def anchors(page: str) -> set[str]:
    """Return the anchors of a Markdown file's headings, which are equal on a code host and in the site."""
    heads = re.findall(r"^#+ (.*)", (ROOT / page).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def links(page: str) -> list[str]:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("page", PAGES)
def test_links_of_the_files_lead_somewhere(page):
    """Links between Markdown files work on a code host; `mkdocs build --strict` checks the links of the site."""
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https" and re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), link
            continue
        target = ((ROOT / page).parent / unquote(parts.path)).resolve() if parts.path else ROOT / page
        assert target.exists() and target.is_relative_to(ROOT), f"{page}: {link}"
        if parts.fragment:
            assert parts.fragment in anchors(str(target.relative_to(ROOT))), f"{page}: {link}"
