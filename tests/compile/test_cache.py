"""Compiled code on disk: one folder for each CPU, a key over all sources, and a temporary folder as a last resort."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch._inductor import codecache, config

import ecrl.compile.cache as cache
from ecrl.errors import ConfigError
from ecrl.pytree import flatten

AVX512 = "processor : 0\nmodel name : A\nflags : avx2 avx512f\n\nprocessor : 1\nmodel name : A\nflags : avx2 avx512f\n"


def _identity(tmp_path, text):
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    return cache.cpu_identity(str(file))


def test_the_identity_of_a_cpu_depends_only_on_its_model_and_instructions(tmp_path):
    one = _identity(tmp_path, AVX512)
    assert one == _identity(tmp_path, AVX512.replace("processor : 1", "cpu MHz : 1234\nprocessor : 1"))
    assert one == _identity(tmp_path, "cpu MHz : 1234\n" + AVX512)
    others = {_identity(tmp_path, AVX512.replace(" avx512f", "")), _identity(tmp_path, AVX512.replace("A", "B"))}
    assert one not in others and len(others) == 2


def test_the_identity_depends_on_the_instructions_that_torch_uses(tmp_path, monkeypatch):
    one = _identity(tmp_path, AVX512)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    assert one != _identity(tmp_path, AVX512)


def test_a_cpu_without_cpuinfo_has_an_identity(tmp_path):
    assert len(cache.cpu_identity(str(tmp_path / "none"))) == 12


def test_every_source_of_the_compiler_is_in_the_key(tmp_path, monkeypatch):
    package = Path(cache.__file__).parent
    for file in package.glob("*.py"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "cache.py"))
    hashes = {cache.sources_hash()}
    for file in sorted(tmp_path.glob("*.py")):
        file.write_text(file.read_text() + "# changed\n")
        hashes.add(cache.sources_hash())
    assert len(hashes) == 1 + len([*package.glob("*.py")]) > 10


@pytest.mark.skipif(torch.__version__ < "2.13", reason="compiled runs need torch 2.13")
def test_the_key_of_compiled_code_depends_on_the_graph_versions_threads_settings_and_sources(monkeypatch):
    from ecrl.compile import cpu

    keys = []

    def record_key(graph, leaves):
        without_values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        keys.append(codecache.compiled_fx_graph_hash(graph, without_values, {}, [])[0])
        return graph

    monkeypatch.setattr(cpu, "compile_fx", record_key)

    def key_of(fn, x):
        leaves, structure = flatten((x,))
        cpu.compiled(fn, structure, leaves)
        return keys.pop()

    def add_one(x):
        return x + 1.0

    x = torch.ones(3)
    first = key_of(add_one, x)
    assert key_of(add_one, x + 1.0) == key_of(lambda x: x + 1.0, x) == first
    others = [key_of(lambda x: x + 2.0, x), key_of(add_one, torch.ones(4)), key_of(add_one, x.double())]
    with config.patch({"cpp.simdlen": 256}):
        others.append(key_of(add_one, x))
    with monkeypatch.context() as patch:
        patch.setattr(codecache, "torch_key", lambda: b"another version")
        others.append(key_of(add_one, x))
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "_threads", lambda graph: torch.get_num_threads() + 1)
        others.append(key_of(add_one, x))
    with monkeypatch.context() as patch:
        cacheable = cpu._OPTIONS["unsafe_marked_cacheable_functions"]
        changed = {name: text.replace(cache.sources_hash(), "other sources") for name, text in cacheable.items()}
        patch.setitem(cpu._OPTIONS, "unsafe_marked_cacheable_functions", changed)
        others.append(key_of(add_one, x))
    assert len({first, *others}) == 8


def test_two_cpus_have_two_folders_and_the_variable_comes_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    folders = []
    for name in ("a", "b"):
        monkeypatch.setattr(cache, "cpu_identity", lambda name=name: name)
        cache._folder.cache_clear()
        with cache.cache_folder():
            folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    cache._folder.cache_clear()
    assert folders == [str(tmp_path / "cpu_a"), str(tmp_path / "cpu_b")]


def test_a_cache_that_cannot_be_written_is_replaced_with_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with (
        pytest.warns(RuntimeWarning, match="cannot be stored in .*Not a directory.*set TORCHINDUCTOR_CACHE_DIR"),
        cache.cache_folder(),
    ):
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.is_dir() and tmp_path not in folder.parents


PRODUCT = """
import os, sys, torch
from ecrl.compile.cache import cpu_identity
if sys.argv[1] == "blocked":
    open(os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], f"cpu_{cpu_identity()}"), "w").close()
from ecrl.compile.jit import choose_form
a, b = torch.arange(20.0 * 17).reshape(20, 17) / 100, torch.arange(17.0 * 19).reshape(17, 19) / 100
found = choose_form("on", "cpu").jit(torch.matmul)(a, b)
torch.testing.assert_close(found, a @ b)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize("cache_is", [pytest.param("free", marks=pytest.mark.long), "blocked"])
def test_products_compile_without_vector_instructions_and_without_a_cache(tmp_path, cache_is):
    env = os.environ | {"ATEN_CPU_CAPABILITY": "default", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PRODUCT, cache_is], capture_output=True, text=True, env=env)
    assert done.stdout == "equal\n", done.stderr[-3000:]
    assert ("cannot be stored in" in done.stderr) == (cache_is == "blocked")


def _file(path, size, days):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    used = time.time() - days * 24 * 3600
    os.utime(path, (used, used))
    return path


@pytest.fixture
def filled(tmp_path, monkeypatch):
    """A cache with files of several ages and CPUs, and files of the user's own compiled functions."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "cpu_identity", lambda: "a")
    cache._folder.cache_clear()
    names = {"cpu_a/x/1.so": 9, "cpu_b/y/2.so": 8, "cpu_a/x/3.so": 7, "cpu_a/x/4.so": 1, "aa/own.so": 99}
    yield {name: _file(tmp_path / name, 1000, days) for name, days in names.items()}
    cache._folder.cache_clear()


def remaining(filled):
    return [name for name, path in filled.items() if path.exists()]


def test_the_files_with_the_oldest_use_are_removed_once_a_day(filled, tmp_path, monkeypatch):
    monkeypatch.setenv("ECRL_CACHE_GB", "2e-6")
    with cache.cache_folder():
        assert len(remaining(filled)) == 5
    assert remaining(filled) == ["cpu_a/x/3.so", "cpu_a/x/4.so", "aa/own.so"]
    monkeypatch.setenv("ECRL_CACHE_GB", "1e-9")
    with cache.cache_folder():
        pass
    assert len(remaining(filled)) == 3, "not again on the same day"
    day = time.time() - 25 * 3600
    os.utime(tmp_path / ".ecrl_lock", (day, day))
    with cache.cache_folder():
        pass
    assert remaining(filled) == ["cpu_a/x/4.so", "aa/own.so"], "files of the last two days remain"


@pytest.mark.parametrize("size", ["0", "1"])
def test_files_within_the_limit_remain(size, filled, monkeypatch):
    monkeypatch.setenv("ECRL_CACHE_GB", size)
    with cache.cache_folder():
        pass
    assert len(remaining(filled)) == 5


def test_no_file_is_removed_while_another_process_uses_the_cache(filled, tmp_path, monkeypatch):
    monkeypatch.setenv("ECRL_CACHE_GB", "1e-9")
    code = "from ecrl.compile.cache import cache_folder\nwith cache_folder(): print(1, flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"1\n"
    with cache.cache_folder():
        pass
    assert len(remaining(filled)) == 5
    other.communicate(b"\n")
    assert remaining(filled) == ["cpu_a/x/4.so", "aa/own.so"], "the other process removes them at its end"


FORK = """
import os, time
from ecrl.compile.cache import cache_folder
with cache_folder():
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
print(child, flush=True)
"""


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(filled, tmp_path):
    command = [sys.executable, "-c", FORK]  # in a process without other threads
    with subprocess.Popen(command, stdout=subprocess.PIPE) as forking:
        assert forking.stdout is not None
        child = int(forking.stdout.readline())
        try:
            with open(tmp_path / ".ecrl_lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.kill(child, signal.SIGKILL)


def test_files_that_the_user_may_not_remove_are_passed_over(filled, tmp_path, monkeypatch):
    unlink = Path.unlink

    def refuse(path):
        if path.name == "1.so":
            raise PermissionError(1, "Operation not permitted")
        unlink(path)

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setenv("ECRL_CACHE_GB", "1e-9")
    with cache.cache_folder():
        pass
    assert remaining(filled) == ["cpu_a/x/1.so", "cpu_a/x/4.so", "aa/own.so"]
    assert (tmp_path / ".ecrl_lock").stat().st_size, "the cache is not checked again on the same day"


def test_a_group_of_users_may_share_the_lock(filled, tmp_path):
    before = os.umask(0o002)
    try:
        with cache.cache_folder():
            pass
    finally:
        os.umask(before)
    assert (tmp_path / ".ecrl_lock").stat().st_mode & 0o777 == 0o664


def test_a_cache_without_a_lock_file_still_works(filled, tmp_path, monkeypatch):
    (tmp_path / ".ecrl_lock").mkdir()
    monkeypatch.setenv("ECRL_CACHE_GB", "1e-9")
    with cache.cache_folder():
        pass
    assert len(remaining(filled)) == 5


@pytest.mark.parametrize("size", ["many", "-1", "nan", "inf"])
def test_a_wrong_limit_is_refused(size, filled, monkeypatch):
    monkeypatch.setenv("ECRL_CACHE_GB", size)
    expected = f"ECRL_CACHE_GB: '{size}', expected a number of gigabytes, or 0"
    with pytest.raises(ConfigError, match=expected), cache.cache_folder():
        pass
