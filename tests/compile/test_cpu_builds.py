"""The two C++ files of a graph build in parallel, and no file is left half written."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch._inductor import codecache, exc

from ecrl.compile import cpu_builds as cpp_builds
from ecrl.compile.cpu_builds import build, parallel_builds, run_builders
from ecrl.compile.jit import choose_form

MADE = "open(out, 'w').write('made')"
HALF = "open(out, 'w').write('half')"


class Builder:
    """Stand-in of inductor's builder: a command that makes a file, run here or by the caller."""

    def __init__(self, file, script=MADE, built=None):
        self.file, self.built, self.script = file, [] if built is None else built, file.with_suffix(".py")
        self.script.write_text(f"import os, sys, time\nout = sys.argv[1]\n{script}\n")

    def get_target_file_path(self):
        return str(self.file)

    def get_command_line(self):
        return f"{sys.executable} {self.script} {self.file}"

    def build(self):
        self.built.append(self.file.name)
        if subprocess.run(self.get_command_line().split()).returncode:
            raise exc.CppCompileError(["g++"], "what is wrong")


def _builders(folder, **scripts):
    built = []
    named = [Builder(folder / name, scripts.get(name, MADE), built) for name in ("calls", "kernels", "linked")]
    return built, named


def test_kernels_are_compiled_while_calls_are(tmp_path):
    meet = f"""open(out + '.begun', 'w').close()
for _ in range(60_000):
    if os.path.exists({{!r}}): {MADE}; break
    time.sleep(0.01)"""
    scripts = {
        "calls": meet.format(str(tmp_path / "kernels.begun")),
        "kernels": meet.format(str(tmp_path / "calls.begun")),
    }
    built, builders = _builders(tmp_path, **scripts)
    build(str(tmp_path / "lock"), builders)
    assert built == [] and [b.file.read_text() for b in builders] == ["made"] * 3


def test_what_is_linked_is_there_before(tmp_path):
    link = "open(out, 'w').write(open(out[:-6] + 'calls').read() + open(out[:-6] + 'kernels').read())"
    built, builders = _builders(tmp_path, kernels=f"time.sleep(0.3); {MADE}", linked=link)
    build(str(tmp_path / "lock"), builders)
    assert built == [] and (tmp_path / "linked").read_text() == "mademade"


@pytest.mark.parametrize("there", [["calls"], ["kernels"], ["calls", "kernels"], ["calls", "kernels", "linked"]])
def test_what_is_there_is_not_built_again(tmp_path, there):
    for name in there:
        (tmp_path / name).write_text("before")
    _, builders = _builders(tmp_path)
    build(str(tmp_path / "lock"), builders)
    assert [b.file.read_text() for b in builders] == ["before" if b.file.name in there else "made" for b in builders]


def test_a_single_file_is_built(tmp_path):
    builder = Builder(tmp_path / "one")
    build(str(tmp_path / "lock"), [builder])
    assert builder.file.read_text() == "made"


def test_a_failed_parallel_build_is_repeated_and_reports_the_reason(tmp_path):
    built, builders = _builders(tmp_path, kernels=f"{HALF}; sys.exit(1)")
    with pytest.raises(exc.CppCompileError, match="what is wrong"):
        build(str(tmp_path / "lock"), builders)
    assert built == ["kernels"]


def _await(*files):
    for _ in range(60_000):
        if all(file.exists() and file.read_text() for file in files):
            return
        time.sleep(0.01)
    raise TimeoutError(files)


def _endless(file):
    """A compiler whose own child writes half a file and never ends, and the file that the child's number is in."""
    number = file.with_suffix(".pid")
    child = (
        f"import os, time; open({str(file)!r}, 'w').write('half'); open({str(number)!r}, 'w').write(str(os.getpid()))"
    )
    script = f"import subprocess; subprocess.run([sys.executable, '-c', {child + '; time.sleep(3600)'!r}])"
    return Builder(file, script), number


def _is_alive(number):
    state = Path(f"/proc/{number}/stat")
    return state.exists() and state.read_text().split()[2] != "Z"


def _ends(number):
    for _ in range(60_000):
        if not _is_alive(number):
            return True
        time.sleep(0.01)
    return False


def test_nothing_half_written_is_left_by_what_is_ended(tmp_path, monkeypatch):
    fails, (lasts, number) = Builder(tmp_path / "fails", f"{HALF}; sys.exit(1)"), _endless(tmp_path / "lasts")

    def interrupted(compiler):
        _await(fails.file, number)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(cpp_builds.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_builders([lasts, fails])
    assert not fails.file.exists() and not lasts.file.exists()
    assert _ends(int(number.read_text()))


def test_what_was_begun_is_ended_where_another_cannot_be(tmp_path):
    lasts, number = _endless(tmp_path / "lasts")
    absent = Builder(tmp_path / "absent")
    absent.get_command_line = lambda: _await(number) or str(tmp_path / "no_such_compiler")
    with pytest.raises(FileNotFoundError, match="no_such_compiler"):
        run_builders([lasts, absent])
    assert not lasts.file.exists() and _ends(int(number.read_text()))


@pytest.mark.slow
def test_inductor_builds_so_while_it_lasts(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    commands = []
    monkeypatch.setattr(
        cpp_builds, "build", lambda lock, builders: commands.append(len(builders)) or build(lock, builders)
    )
    usual = codecache._worker_compile_cpp
    x = torch.rand(7, 11, generator=torch.Generator().manual_seed(0))
    result = choose_form("on", "cpu").jit(lambda x: (3.25 * x).sin().sum(0) - 0.125)(x)
    torch.testing.assert_close(result, (3.25 * x).sin().sum(0) - 0.125)
    assert commands[-1] == 3 and codecache._worker_compile_cpp is usual


def test_what_was_usual_is_put_back_after_an_exception():
    usual = codecache._worker_compile_cpp
    with pytest.raises(ZeroDivisionError), parallel_builds():
        assert codecache._worker_compile_cpp is build
        raise ZeroDivisionError
    assert codecache._worker_compile_cpp is usual
