"""The notebooks as a person sees them: JupyterLab in headless Chromium runs all cells; progress, pictures, video.

`python -m pytest tests/docs/test_notebooks_in_browser.py -m long --basetemp FOLDER` leaves a picture of each in FOLDER.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest
from support.notebook_files import NEEDED, NOTEBOOKS, PICTURES, VIDEOS, cells
from support.paths import ROOT

PATIENCE_S = 7200.0
PROGRESS = {"00_quickstart": 1, "02_add_an_algorithm": 1, "05_push_cube": 1, "08_vla": 2}  # calls of `ecrl.train`
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # all cells are there, seen or not
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
_SHOW_ALL = "document.querySelectorAll('.jp-NotebookPanel *').forEach(e => e.scrollTop = 0)"
_HEIGHT = "Math.max(...[...document.querySelectorAll('.jp-NotebookPanel *')].map(e => e.scrollHeight))"
PLAY_VIDEO = "async v => { v.muted = true; await v.play(); return [v.duration, v.videoWidth] }"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Start a JupyterLab with the configs and the notebooks without outputs; yield its address."""
    pytest.importorskip("jupyterlab")
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "notebooks").mkdir()
    for path in NOTEBOOKS.values():
        notebook = json.loads(path.read_text())
        for cell in cells(notebook):
            cell.update(outputs=[], execution_count=None)
        (folder / "notebooks" / path.name).write_text(json.dumps(notebook))
    for name, content in SETTINGS.items():
        path = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = [f"--port={port}", f"--ServerApp.root_dir={folder}", "--IdentityProvider.token=", "--allow-root"]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", *args]
    env = os.environ | {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings")}
    with (folder / "log").open("w") as log, subprocess.Popen(command, env=env, stdout=log, stderr=log) as server:
        yield f"http://127.0.0.1:{port}"
        server.terminate()


def opened(browser, address, name):
    """Open the notebook's page and run all cells."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE_S * 1000)
    for left in reversed(range(600)):
        try:
            page.goto(f"{address}/lab/tree/notebooks/{name}.ipynb?reset")
            break
        except Exception:  # it does not listen yet
            if not left:
                raise
            time.sleep(1.0)
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=PATIENCE_S * 1000)
    page.wait_for_timeout(3000)
    for kind, label in (("MenuBar", "Run"), ("Menu", "Run All Cells")):
        page.locator(f".lm-{kind}-itemLabel", has_text=re.compile(f"^{label}$")).click()
    return page


def followed(page):
    """Return the texts of progress lines until all cells had run, and the largest number of progress lines."""
    texts, most = [], 0
    prompts, place = page.locator(".jp-InputPrompt"), page.locator(".jp-OutputArea-output pre", has_text="steps/s")
    until = time.monotonic() + PATIENCE_S
    while not all(re.fullmatch(r"\[\d+\]:", text) for text in prompts.all_inner_texts() if text.strip()):
        most = max(most, place.count())
        texts += [place.first.inner_text()] if place.count() else []
        page.wait_for_timeout(100)  # a run with a warm compile cache takes two seconds
        assert time.monotonic() < until, f"cells have not run, or one failed: {prompts.all_inner_texts()}"
    return list(dict.fromkeys(texts)), most


@pytest.mark.long
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_person_sees_progress_pictures_and_video(name, lab, browser, tmp_path):
    for package in NEEDED[name]:
        pytest.importorskip(package)
    page = opened(browser, lab, name)
    texts, places = followed(page)
    assert (len(texts) >= 5 and places == PROGRESS.get(name, 0)) == (name in PROGRESS), "it moves, one line per run"
    assert page.locator(".jp-OutputArea-output img").count() == PICTURES[name[:2]]
    for kind in ("stderr", "error"):
        assert page.locator(f'[data-mime-type="application/vnd.jupyter.{kind}"]').count() == 0
    videos = page.locator(".jp-OutputArea-output video").all()
    assert len(videos) == VIDEOS.get(name, 0)
    for video in videos:
        seconds, width = video.evaluate(PLAY_VIDEO)
        assert seconds > 1.0 and width > 100
    page.set_viewport_size({"width": 1280, "height": min(int(page.evaluate(_HEIGHT)) + 250, 16_000)})
    page.evaluate(_SHOW_ALL)
    page.wait_for_timeout(1500)
    page.screenshot(path=tmp_path / f"{name}.png")
    page.close()
