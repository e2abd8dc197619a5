"""Settings and fixtures of all tests."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes and what they start share two cores
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "1")  # saves time: the tests compile many graphs

import pytest
import torch
from hypothesis import settings
from support.browser import start_browser
from support.checks import VARIANTS, Variant
from support.docs_site import build_site
from support.graphs import traced_only

from ecrl import registry

settings.register_profile("ecrl", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("ecrl")
torch.set_num_threads(1)
registry._import_all_builtin()  # a test that restores the registry must not undo the registration of a component


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Skip a test whose fixtures compile a loop."""
    return (yield from _skipping_without_loops())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that compiles a loop."""
    return (yield from _skipping_without_loops())


def _skipping_without_loops() -> Iterator[None]:
    """Skip if ecrl refuses to compile because of the version of torch, which `docs/design.md` allows before 2.13."""
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        if torch.__version__ < "2.13" and "cannot compile loops for the CPU" in str(error):
            pytest.skip(f"torch {torch.__version__} cannot compile loops")
        raise


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[Variant]:
    """Yield a way to call a kernel; a test that requests the fixture and never calls it fails."""
    caller = Variant(request.param)
    yield caller
    assert caller.calls, "the test never called its variant"


@pytest.fixture(autouse=True)
def _without_code_generation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the traced graph in place of compiled C++ in tests with the mark `traced`."""
    with nullcontext() if request.node.get_closest_marker("traced") is None else traced_only():
        yield


@pytest.fixture(params=[pytest.param("traced", marks=pytest.mark.traced), pytest.param("C++", marks=pytest.mark.long)])
def traced_or_compiled(request: pytest.FixtureRequest) -> str:
    """Run a test on traced graphs, which takes seconds, and in the `long` tests on C++."""
    return request.param


@pytest.fixture
def restored_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget after the test what the test registered."""
    entries = {kind: dict(parts) for kind, parts in registry._ENTRIES.items()}
    monkeypatch.setattr(registry, "_ENTRIES", entries)


@pytest.fixture(scope="module")
def mujoco_test_terms() -> Iterator[None]:
    """Register the terms of `support.fake_mujoco_task` for a module of tests."""
    from support.fake_mujoco_task import known_terms  # imported here, because it needs MuJoCo

    with known_terms():
        yield


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the documentation site and return its folder."""
    build_site(folder := tmp_path_factory.mktemp("site"))
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a headless Chromium."""
    yield from start_browser()
