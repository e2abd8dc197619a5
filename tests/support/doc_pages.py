"""Code blocks of the README and of the pages in docs/, and what it takes to run them."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from ecrl.cli.main import main
from ecrl.config.model import known_keys
from ecrl.registry import lookup
from support.paths import ROOT

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


NAMED = ("apg", "bc", "ppo", "grpo", "dqn", "pqn", "ddpg", "td3", "sac")
"""Algorithms whose files in configs/ are named in pages."""


class Block(NamedTuple):
    """A code block of a page; a block with a title is a file of that name."""

    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    """Return all blocks of a page, in order."""
    return [Block(*match) for match in _BLOCK.findall((ROOT / page).read_text())]


def table_of(text: str) -> list[dict[str, str]]:
    """Return the rows of the tables in a text, as dicts from the column's name to the cell."""
    rows, names = [], []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            names = []
        elif not names:
            names = cells
        elif not re.fullmatch(r"[-: ]+", cells[0]):
            rows.append(dict(zip(names, cells, strict=True)))
    return rows


def commands(block: Block) -> list[str]:
    """Return the commands of a shell block, without comments; background commands run in sequence."""
    lines = (shlex.join(shlex.split(line, comments=True)).replace("'>'", ">") for line in block.text.splitlines())
    return [re.sub(r"^OMP_NUM_THREADS=1 | '&'$|\.venv/bin/", "", line) for line in lines if line]


def small(data: dict[str, Any]) -> dict[str, Any]:
    """Return a config with two iterations of a few steps, eager."""
    trainer = data["trainer"] | {
        "iterations": 2,
        "compile": "off",
        "buffer_size": 16,
        "eval_freq": 100,
        "num_eval_episodes": 4,
    }
    known = known_keys(lookup("algorithm", data["algorithm"]["name"]).config)
    few = {"n_epochs": 1, "batch_size": 32, "learning_starts": 32, "group_size": 4}
    cfg = data["algorithm"].get("cfg", {}) | {key: value for key, value in few.items() if key in known}
    return data | {"trainer": trainer | {"num_envs": 4}, "algorithm": data["algorithm"] | {"cfg": cfg}}


def small_configs(folder: Path) -> None:
    """Write small versions of the files in configs/ that pages name; robots have episodes of five steps."""
    (folder / "configs").mkdir()
    for path in (path for name in NAMED for path in (ROOT / "configs").glob(f"*_{name}.json")):
        data = small(json.loads(path.read_text()))
        if path.stem.startswith("push_cube"):
            data["env"]["cfg"]["max_episode_steps"] = 5
        (folder / "configs" / path.name).write_text(json.dumps(data))


def write(block: Block) -> None:
    """Write a titled block to its file; make a config small."""
    path = Path(block.title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(small(json.loads(block.text))) if block.language == "json" else block.text)


def ecrl(line: str) -> None:
    """Run `ecrl ...` in this process with few episodes and iterations, and check that it succeeds."""
    words, _, target = line.partition(" > ")
    words = re.sub(r"--trainer.iterations \d+", "--trainer.iterations 4", words)
    words = re.sub(r"--num-episodes \d+", "--num-episodes 8" if " demo " in words else "--num-episodes 4", words)
    if words.startswith("ecrl eval ") and "--num-episodes" not in words:
        words += " --num-episodes 4"
    sys.argv, before = shlex.split(words), sys.argv
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out) if target else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # one line each on a command line
            main()
    except SystemExit as end:
        assert not end.code, f"{line}: exit status {end.code}"
    finally:
        sys.argv = before
    if target:
        Path(target).write_text(out.getvalue())


def script_run(words: list[str]) -> None:
    """Run a script that a page defines, in a process of its own."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def pytest_run(line: str) -> None:
    """Run the tests that a page defines. Of tests of this repository, only check that the files exist."""
    named = [word for word in shlex.split(line) if word.startswith(("tests", "notebooks"))]
    if all((ROOT / path).exists() for path in named):
        return
    shutil.copy(ROOT / "tests" / "conftest.py", "tests/conftest.py")
    shutil.copytree(ROOT / "tests" / "support", "tests/support")
    words = [sys.executable, *shlex.split(line)[1:], "-p", "no:cacheprovider"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
