"""The site as a person sees it: headless Chromium opens every page, as wide as a desk and as a phone.

`python -m pytest tests/docs/test_docs_in_browser.py -m long --basetemp FOLDER` leaves a picture of each in FOLDER.
"""

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

WIDTHS = {"desk": 1280, "phone": 390}
_BROKEN = "[...document.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.src)"
SCROLL_WIDTH = "document.documentElement.scrollWidth"
_HEADING = "document.querySelector('h1').getBoundingClientRect()"


class Quiet(SimpleHTTPRequestHandler):
    """A file server that does not log."""

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address(site):
    """Serve the site and return its address; its search does not work from files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("name", WIDTHS)
def test_every_page_fits_and_all_it_needs_is_there(name, site, address, browser, tmp_path):
    width, failed = WIDTHS[name], []
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(1_200_000)
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.on("response", lambda answer: failed.append(answer.url) if answer.status >= 400 else None)
    for path in sorted(one.relative_to(site) for one in site.rglob("*.html") if one.name != "404.html"):
        page.goto(f"{address}/{path}", wait_until="networkidle")
        page.screenshot(path=tmp_path / f"{path}.png".replace("/", "_"), full_page=True)
        assert page.evaluate(SCROLL_WIDTH) <= width, f"{path} is wider than {width}"
        assert page.evaluate(_BROKEN) == [], path
        heading = page.evaluate(_HEADING)
        assert heading["left"] >= 0 and heading["right"] <= width and heading["height"] > 0, path
        assert failed == [], path
    page.close()
