"""The documentation site, built from the sources."""

import logging
import sys
from pathlib import Path

import pytest

from support.paths import ROOT


def build_site(folder: Path) -> None:
    """Build the site in `folder` as strictly as `make docs` does; a warning is a failure.

    The clone's remote `origin` is `git@code.example:owner/ecrl.git`.
    """
    pytest.importorskip("mkdocs", reason="the site needs the extra 'docs'")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.utils import CountHandler

    counted = CountHandler()
    counted.setLevel(logging.WARNING)
    logging.getLogger("mkdocs").addHandler(counted)
    modules = set(sys.modules)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NO_MKDOCS_2_WARNING", "1")
            origin = {"COUNT": "1", "KEY_0": "remote.origin.url", "VALUE_0": "git@code.example:owner/ecrl.git"}
            for name, value in origin.items():
                patch.setenv(f"GIT_CONFIG_{name}", value)
            patch.chdir(ROOT)
            cfg = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
            cfg.plugins.on_startup(command="build", dirty=False)
            build(cfg)
    finally:
        logging.getLogger("mkdocs").removeHandler(counted)
        for name in set(sys.modules) - modules:
            if name.endswith(("_pages", "_page")) or name == "repository":
                del sys.modules[name]
    assert counted.get_counts() == [], "`mkdocs build --strict` prints the warnings"
