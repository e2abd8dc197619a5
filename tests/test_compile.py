"""The choice of form, and what a machine without a working compiler does."""

import functools
import subprocess
import sys

import pytest
import torch

from ecrl import compile as ecrl_compile
from ecrl.compile import choose_form, compiler_fault
from ecrl.errors import ConfigError


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    compiler_fault.cache_clear()
    choose_form.cache_clear()
    yield
    compiler_fault.cache_clear()
    choose_form.cache_clear()


def test_off_is_eager():
    form = choose_form("off", "cpu")
    assert (form.name, form.jit) == ("eager", functools.partial)


def test_auto_without_a_compiler_is_eager_with_one_clear_warning(no_compiler):
    with pytest.warns(RuntimeWarning, match=r"running eager.*no C\+\+ compiler found.*install g\+\+") as caught:
        form = choose_form("auto", "cpu")
        choose_form("auto", "cpu")
    assert form.name == "eager"
    assert len(caught) == 1


def test_on_without_a_compiler_is_refused(no_compiler):
    with pytest.raises(ConfigError, match=r"trainer.compile: on, but no C\+\+ compiler found.*install g\+\+"):
        choose_form("on", "cpu")


BROKEN = """
import os, stat, sys, tempfile, warnings
folder = tempfile.mkdtemp()
for name in ("g++", "clang++"):
    path = os.path.join(folder, name)
    open(path, "w").write("#!/bin/sh\\nexit 1\\n")
    os.chmod(path, 0o755)
path = folder + os.pathsep + os.environ["PATH"]
os.environ.update(PATH=path, CXX=os.path.join(folder, "g++"), TORCHINDUCTOR_CACHE_DIR=folder)
from ecrl.compile import choose_form
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    form = choose_form("auto", "cpu")
print(form.name, [str(w.message) for w in caught if w.category is RuntimeWarning])
"""


@pytest.mark.slow
def test_a_compiler_that_fails_is_told_from_one_that_works():
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True)
    assert done.stdout.startswith("eager ["), done.stdout + done.stderr[-2000:]
    assert "compiling a first function failed" in done.stdout


def _scaled(factor, x):
    return factor * x


@pytest.mark.slow
def test_a_working_compiler_is_used_and_functions_are_shared():
    form = choose_form("on", "cpu")
    assert form.name == "compiled"
    assert form.jit(_scaled, 3) is form.jit(_scaled, 3)
    assert form.jit(_scaled, 3) is not form.jit(_scaled, 4)
    assert torch.equal(form.jit(_scaled, 3)(torch.ones(2)), torch.full((2,), 3.0))


@pytest.mark.slow
def test_one_function_takes_more_shapes_than_dynamos_usual_limit():
    scaled = choose_form("on", "cpu").jit(_scaled, 7)
    for size in range(1, 13):
        assert torch.equal(scaled(torch.ones(size)), torch.full((size,), 7.0))


def test_bounds_do_not_share_a_recompile_count():
    first, second = (ecrl_compile._compiled(_scaled, n) for n in (5, 6))
    assert first._torchdynamo_orig_callable.__code__ is not second._torchdynamo_orig_callable.__code__
