"""Headless Chromium, for tests that look at pages as a person does."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def start_browser() -> Iterator[Any]:
    """Yield a headless Chromium, and close it afterwards; skip the test if Chromium is missing."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium")
    with playwright.sync_playwright() as made:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = made.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()
