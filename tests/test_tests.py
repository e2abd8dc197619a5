"""Tests do not import each other: shared code lives in `tests/support`."""

import ast
import re
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

FILES = {str(p.relative_to(ROOT / "tests")): p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("*.py")}
SUPPORT = {file: text for file, text in FILES.items() if file.startswith("support/")}
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+(?:\.|[\w.]*\.)?(test_\w+)", re.MULTILINE)
_FROM_FOLDER = re.compile(r"^[ \t]*from[ \t]+[\w.]+[ \t]+import[ \t]+\(?\s*(?:[\w, ]*,\s*)?(test_\w+)", re.MULTILINE)


def imported_tests(text):
    """Return the test modules that a file imports, in its own code or in code for another process."""
    return sorted({*_IMPORT.findall(text), *_FROM_FOLDER.findall(text)})


def packages(text):
    """Return the top-level packages that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "support").split(".")[0])
    return names


@pytest.mark.parametrize("file", sorted(FILES))
def test_no_file_imports_a_test(file):
    assert imported_tests(FILES[file]) == [], f"{file}: move what it needs to tests/support"


def test_support_has_no_tests_and_plain_names():
    assert SUPPORT and not [file for file in SUPPORT if Path(file).name.startswith("test_")]
    assert not [file for file, text in SUPPORT.items() if re.search(r"^(async )?def test_", text, re.MULTILINE)]
    assert not {"utils", "util", "helpers", "common", "misc", "base"} & {Path(file).stem for file in SUPPORT}


def test_expectations_in_numpy_import_nothing_else():
    files = {file: text for file, text in SUPPORT.items() if Path(file).name.startswith("numpy_")}
    assert files
    for file, text in files.items():
        assert packages(text) - sys.stdlib_module_names == {"numpy"}, file


@pytest.mark.parametrize(
    "text",
    [
        "from test_loop import small",
        "import test_loop",
        "import tests.test_loop",
        "from tests.test_loop import small",
        "from tests import test_loop",
        "from tests.envs import (\n    test_env_core,\n)",
        "from .test_loop import small",
        "from . import test_loop",
        "def f():\n    from test_loop import small",
        'CODE = """\nimport sys\nfrom test_loop import small\n"""',
    ],
)
def test_the_check_finds_imports_of_tests(text):
    assert len(imported_tests(text)) == 1


@pytest.mark.parametrize(
    "text",
    ["from support.small_runs import small", "import torch.testing", "def test_a():\n    pass", "x = 'test_loop'"],
)
def test_the_check_lets_other_code_pass(text):
    assert imported_tests(text) == []
