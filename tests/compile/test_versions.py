"""The range of torch versions is the same in every file that names it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def supported():
    """The oldest version of torch, and the newest minor version below the bound."""
    (needed,) = [one for one in tomllib.loads(read("pyproject.toml"))["project"]["dependencies"] if "torch>" in one]
    oldest, bound = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", needed).groups()
    return f"2.{oldest}", f"2.{int(bound) - 1}"


def test_the_pages_and_the_commands_name_the_supported_versions():
    oldest, newest = supported()
    assert f"ecrl supports torch {oldest} to {newest}." in read("docs/design.md")
    assert f"test-torch-oldest: TORCH := torch=={oldest}.*" in read("Makefile")
    workflow = read(".github/workflows/ci.yml")
    assert f'"torch=={oldest}.*"' in workflow and f'"torch>={newest},<' in workflow
    for page in ("README.md", "docs/getting_started.md"):
        assert f" or {newest}," in re.search("For compiled runs[^:]*: torch [^)]*", read(page))[0]


def test_the_compile_tests_of_the_command_exist():
    listed = re.search(r"COMPILE_TESTS := (.*?)\n\n", read("Makefile"), re.S)[1]
    assert "tests/compile" in listed.split() and len(listed.split()) > 3
    assert [path for path in listed.split() if not (ROOT / path).exists()] == []
