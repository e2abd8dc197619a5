"""The C++ libraries: compiled once and stored, and left out where they cannot be compiled."""

import os
import shutil
import subprocess
import sys
import time

import pytest
import torch

from ecrl import rng
from ecrl.kernels import gae
from ecrl.native import library, philox, recurrences

needs_compiler = pytest.mark.skipif(library.find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def _fresh_library(tmp_path, monkeypatch):
    """Use an empty cache, and load the library again in and after the test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    caches = (library.library, philox._philox, recurrences._function)
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


def stored(tmp_path):
    return sorted((tmp_path / "cache" / "native").glob("*"))


def steps(n=4, t=20):
    key = rng.key(0)
    reward, value, next_value = rng.normal(key, (3, n, t))
    terminated, done = rng.uniform(rng.fold_in(key, 1), (n, t)) < 0.1, rng.uniform(rng.fold_in(key, 1), (n, t)) < 0.2
    return reward, value, next_value, terminated, done


@needs_compiler
def test_the_library_is_compiled_once_and_then_loaded(tmp_path, monkeypatch):
    assert library.is_available("philox")
    (file,) = stored(tmp_path)
    assert file.suffix == ".so" and file.stat().st_mode & 0o044  # other users may share the folder
    library.library.cache_clear()
    monkeypatch.setattr(library, "_compile", lambda *own: pytest.fail("the library was compiled again"))
    assert library.is_available("philox") and stored(tmp_path) == [file]


@needs_compiler
@pytest.mark.parametrize("changed", ["cpu", "source", "compiler", "flags"])
def test_another_cpu_source_or_compiler_has_a_library_of_its_own(tmp_path, monkeypatch, changed):
    compiler = library.find_compiler()
    name = library._file_name("philox", compiler)
    if changed == "cpu":
        monkeypatch.setattr(library, "cpu_identity", lambda: "another")
    elif changed == "source":
        (tmp_path / "philox.cpp").write_text(f"{(library._FOLDER / 'philox.cpp').read_text()}// changed\n")
        monkeypatch.setattr(library, "_FOLDER", tmp_path)
    elif changed == "flags":
        monkeypatch.setattr(library, "_FLAGS", ("-O1", *library._FLAGS))
    else:
        compiler = (shutil.copy(os.path.realpath(compiler[0]), tmp_path / "compiler"),)
    assert library._file_name("philox", compiler) != name


@needs_compiler
def test_each_source_is_compiled_when_one_of_its_functions_is_first_needed(tmp_path):
    rng.bits(rng.key(5), (3, 7))
    assert [file.name.split("_")[0] for file in stored(tmp_path)] == ["philox"]
    gae(*steps(), gamma=0.9, gae_lambda=0.8)
    assert [file.name.split("_")[0] for file in stored(tmp_path)] == ["philox", "recurrences"]


def without_compiler(monkeypatch):
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    library.library.cache_clear()


def test_without_a_compiler_kernels_return_the_same_and_random_bits_are_equal(monkeypatch):
    args, hyper = steps(), {"gamma": 0.9, "gae_lambda": 0.8}
    fast, bits = gae(*args, **hyper), rng.bits(rng.key(5), (3, 7))
    without_compiler(monkeypatch)
    assert not library.is_available("philox")
    slow = gae(*args, **hyper)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert torch.equal(rng.bits(rng.key(5), (3, 7)), bits)


def test_a_function_without_a_compiler_is_an_error_of_one_line(monkeypatch):
    without_compiler(monkeypatch)
    with pytest.raises(RuntimeError, match=r"the C\+\+ function philox is not available.*a working compiler$"):
        philox.philox_words(*[torch.tensor(0)] * 3)


def test_a_compiler_that_fails_warns_once_and_kernels_run(tmp_path, monkeypatch):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'file.cpp:1: fatal error: no header' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.warns(RuntimeWarning, match=r"with .*broken and loaded \(file.cpp:1: fatal error: no header\)"):
        assert not library.is_available("philox")
    assert not library.is_available("philox") and stored(tmp_path) == []
    with pytest.warns(RuntimeWarning, match=r"cannot be compiled with .*broken"):  # recurrences
        assert gae(*steps(), gamma=0.9, gae_lambda=0.8).advantage.isfinite().all()
    gae(*steps(), gamma=0.9, gae_lambda=0.8)  # pytest turns a warning into an error


def test_a_compiler_that_does_not_exist_warns(monkeypatch):
    monkeypatch.setenv("CXX", "no_such_compiler")
    with pytest.warns(RuntimeWarning, match=r"compiled with no_such_compiler and loaded \(there is no such program\)"):
        assert not library.is_available("philox")


def test_a_compiler_that_hangs_is_stopped_with_a_warning(tmp_path, monkeypatch):
    """The process that the compiler starts goes on and keeps the outputs of the compiler open."""
    compiler = tmp_path / "slow"
    compiler.write_text("#!/bin/sh\nsleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(library, "_LIMIT_S", 0.5)
    with pytest.warns(RuntimeWarning, match=r"with .*slow and loaded \(the compiler did not finish within 0.5 s\)"):
        start = time.monotonic()
        assert not library.is_available("philox")
    assert time.monotonic() - start < 50.0


@needs_compiler
def test_the_command_of_the_compiler_may_have_arguments(tmp_path, monkeypatch):
    path, *rest = library.find_compiler()
    assert rest == []
    monkeypatch.setenv("CXX", f"{path} -pipe")
    assert library.find_compiler() == (path, "-pipe") and library.is_available("philox")
    assert library._file_name("philox", (path, "-pipe")) != library._file_name("philox", (path,))


@needs_compiler
def test_the_path_of_the_compiler_may_have_spaces(tmp_path, monkeypatch):
    compiler = tmp_path / "a compiler"
    compiler.symlink_to(library.find_compiler()[0])
    monkeypatch.setenv("CXX", str(compiler))
    assert library.find_compiler() == (str(compiler),)


@needs_compiler
def test_a_stored_library_that_cannot_be_loaded_is_compiled_again(tmp_path):
    file = library.cache_folder() / library._file_name("philox", library.find_compiler())
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    assert library.is_available("philox") and stored(tmp_path) == [file] and file.stat().st_size > 0


@needs_compiler
def test_a_library_that_cannot_be_stored_is_loaded_and_leaves_no_file(tmp_path, monkeypatch):
    def full(*paths):
        raise OSError("No space left on device")

    monkeypatch.setattr(library.os, "replace", full)
    assert library.is_available("philox") and stored(tmp_path) == []


@needs_compiler
def test_without_a_home_folder_nothing_is_stored(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(library.Path, "home", no_home)
    assert library.is_available("philox")


@needs_compiler
def test_a_compiler_that_does_not_know_the_cpu_compiles_for_every_cpu(tmp_path, monkeypatch):
    compiler = tmp_path / "careful"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *march=native*) exit 1;; esac\nexec {library.find_compiler()[0]} "$@"\n'
    )
    compiler.chmod(0o755)
    expected = gae(*steps(), gamma=0.9, gae_lambda=0.8)
    monkeypatch.setenv("CXX", str(compiler))
    for one in (library.library, recurrences._function):
        one.cache_clear()
    actual = gae(*steps(), gamma=0.9, gae_lambda=0.8)
    assert len([file for file in stored(tmp_path) if file.name.startswith("recurrences")]) == 2
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@needs_compiler
def test_a_folder_that_cannot_be_written_only_means_that_nothing_is_stored(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    library.library.cache_clear()
    assert library.is_available("philox") and gae(*steps(), gamma=0.9, gae_lambda=0.8).advantage.isfinite().all()


def test_the_folder_follows_the_environment(monkeypatch):
    assert library.cache_folder().name == "native"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(library.cache_folder()) == "/somewhere/ecrl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert library.cache_folder() == library.Path.home() / ".cache" / "ecrl"


@needs_compiler
@pytest.mark.slow
def test_processes_that_compile_at_the_same_time_do_not_disturb_each_other(tmp_path):
    code = "from ecrl.native.library import is_available; assert is_available('philox')"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(stored(tmp_path)) == 1
