"""A function that cannot be compiled: "auto" runs it eagerly with one warning, "on" raises one line."""

import re
import sys
import warnings

import pytest
import torch
from support.small_runs import same, small

from ecrl.compile import jit as jit_module
from ecrl.compile.jit import (
    Compilation,
    _compiled,
    _compiled_or_eager,
    _form_for,
    _warn_eager,
    choose_form,
    compilations_of,
)
from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.loop.build import build, form_in_use
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.run.checkpoint import latest, read_manifest
from ecrl.run.train import train

LOOPS = pytest.mark.skipif(torch.__version__ < "2.13", reason="compiled loops need torch 2.13")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Forget compiled functions and warnings before and after a test."""
    caches = _compiled, _compiled_or_eager, _warn_eager
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


def breaks(error):
    """A compiler that always raises `error`, from a line of torch."""
    names = {"error": error}
    # `exec` of a constant: only code with this file name has torch's path in its traceback
    exec(compile("def compiler_for(leaves): raise error", torch.__file__, "exec"), names)
    return names["compiler_for"]


def doubled(x):
    return 2.0 * x


FAULTS = [
    ImportError("cannot import name 'TensorGuards'"),
    AttributeError("module 'torch._inductor' has no attribute 'x'"),
    RuntimeError("an operator\n\nhas no lowering"),
    OSError(30, "Read-only file system"),
]


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_auto_runs_eager_with_one_warning_after_any_failure(monkeypatch, error):
    monkeypatch.setattr(jit_module, "_compiler_for", breaks(error))
    jitted = choose_form("auto", "cpu").jit(doubled)
    with pytest.warns(RuntimeWarning, match=rf"^running eager.*{type(error).__name__}.*set trainer.compile") as caught:
        assert jitted(torch.ones(2)).tolist() == [2.0, 2.0]
        assert jitted(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_on_raises_one_line_after_any_failure(monkeypatch, error):
    monkeypatch.setattr(jit_module, "_compiler_for", breaks(error))
    message = rf"^trainer.compile: on, but .*{type(error).__name__}: .*set trainer.compile to off$"
    with pytest.raises(ConfigError, match=message) as raised:
        choose_form("on", "cpu").jit(doubled)(torch.ones(2))
    assert "\n" not in str(raised.value)


class _Unimportable:
    """A finder that raises an error where the parts of the compiler are imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "ecrl.compile.scan":
            raise RuntimeError("\noperator torchvision::nms does not exist\nsome more")


def test_any_error_of_an_import_of_the_compiler_is_one_line(monkeypatch):
    monkeypatch.delitem(sys.modules, "ecrl.compile.scan", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Unimportable(), *sys.meta_path])
    _form_for.cache_clear()
    message = rf"torch {re.escape(torch.__version__)} cannot compile: operator torchvision::nms does not exist; install"
    try:
        with pytest.warns(RuntimeWarning, match=f"^running eager.*{message}") as caught:
            assert {choose_form("auto", "cpu").name for _ in range(2)} == {"eager"}
        assert len(caught) == 1
        with pytest.raises(ConfigError, match=f"^trainer.compile: on, but {message}.*set trainer.compile to off$"):
            choose_form("on", "cpu")
    finally:
        _form_for.cache_clear()


CPP_ERROR = RuntimeError(
    "CppCompileError: C++ compile error\n\nCommand:\ng++ a.cpp -o a.o\n\nOutput:\n"
    "In file included from a.cpp:1:\na.cpp:7:3: error: no space left\n    7 | x\ncompilation terminated."
)


def tripled(x):
    return 3.0 * x


def in_generated_code(error):
    """A compiler whose error is raised by a module that inductor wrote."""
    names = {"error": error, "generated": compile("raise error", "/tmp/cache/cpu_0/ab/cabc.py", "exec")}
    # `exec` of constants: the traceback then has the path of a module that inductor wrote, below one of inductor
    source = "def compiler_for(leaves): exec(generated, {'error': error})"
    exec(compile(source, torch._inductor.__file__, "exec"), names)
    return names["compiler_for"]


def test_a_failing_cpp_compiler_is_one_warning_for_all_functions(monkeypatch):
    monkeypatch.setattr(jit_module, "_compiler_for", in_generated_code(CPP_ERROR))
    message = "the C++ compiler failed: a.cpp:7:3: error: no space left; set trainer.compile to off"
    jit = choose_form("auto", "cpu").jit
    with pytest.warns(RuntimeWarning) as caught:
        assert jit(doubled)(torch.ones(2)).tolist() == [2.0, 2.0]
        assert jit(tripled)(torch.ones(2)).tolist() == [3.0, 3.0]
    assert [str(one.message) for one in caught] == [f"running eager, slower per step: {message}"]
    with pytest.raises(ConfigError) as error:
        choose_form("on", "cpu").jit(doubled)(torch.ones(2))
    assert str(error.value) == f"trainer.compile: on, but {message}"


def test_an_error_in_generated_code_is_not_the_users(monkeypatch):
    monkeypatch.setattr(jit_module, "_compiler_for", in_generated_code(RuntimeError("undefined symbol: f")))
    with pytest.raises(ConfigError, match="on, but doubled cannot be compiled: RuntimeError: undefined symbol: f; set"):
        choose_form("on", "cpu").jit(doubled)(torch.ones(2))


def total(x):
    return x * float(f"{x.sum():.2f}")


def test_auto_runs_eager_if_the_function_reads_values():
    jitted = choose_form("auto", "cpu").jit(total)
    with pytest.warns(RuntimeWarning, match=r"running eager.*test_failures.py:\d+, in total, reads values of a tensor"):
        assert jitted(torch.ones(2)).tolist() == [2.0, 2.0]


def _solved(carry, x, matrix):
    return torch.linalg.solve(matrix, carry + x), carry.sum()


def _inverted(carry, x, matrix):
    return torch.linalg.inv(matrix) @ (carry + x), carry.sum()


def _factored(carry, x, matrix):
    return torch.linalg.cholesky(matrix @ matrix.mT) @ (carry + x), carry.sum()


def _factored_to_lu(carry, x, matrix):
    return torch.linalg.lu_factor(matrix)[0] @ (carry + x), carry.sum()


def _permuted(carry, x, matrix):
    return carry + x[torch.randperm(3)], carry.sum()


def _looped(scan, body, start, xs, matrix):
    return scan(body, start, xs, matrix)


@LOOPS
@pytest.mark.parametrize("body", [_solved, _inverted, _factored, _factored_to_lu, _permuted])
def test_an_operator_that_no_compiled_loop_can_have_is_named_with_its_line(body):
    form = choose_form("on", "cpu")
    args = torch.ones(3), torch.ones(5, 3), 2.0 * torch.eye(3)
    at = rf"test_failures.py:{body.__code__.co_firstlineno + 1}, in {body.__name__}, calls aten\.\w+\.default in a loop"
    with pytest.raises(ConfigError, match=at):
        form.jit(_looped, form.scan, body)(*args)
    auto = choose_form("auto", "cpu")
    with pytest.warns(RuntimeWarning, match="running eager.*" + at):
        after, sums = auto.jit(_looped, auto.scan, body)(*args)
    if body is not _permuted:
        expected = _looped(scan, body, *args)
        assert torch.equal(after, expected[0]) and torch.equal(sums, expected[1])


def broken(x):
    raise KeyError("velocity")


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_an_error_of_the_users_code_keeps_its_type(mode):
    with warnings.catch_warnings(), pytest.raises(KeyError, match="velocity"):
        warnings.simplefilter("error")
        choose_form(mode, "cpu").jit(broken)(torch.ones(2))


def outer(jit, x):
    return jit(doubled)(x) + 1.0


def test_functions_inside_a_function_that_failed_run_eager_too(monkeypatch):
    calls = []

    def compiler_for(leaves):
        calls.append(1)
        raise RuntimeError("no")

    monkeypatch.setattr(jit_module, "_compiler_for", compiler_for)
    form = choose_form("auto", "cpu")
    with pytest.warns(RuntimeWarning, match="running eager"):
        assert form.jit(outer, form.jit)(torch.ones(2)).tolist() == [3.0, 3.0]
    assert calls == [1]


def test_a_vmapped_function_that_fails_runs_eager(monkeypatch):
    monkeypatch.setattr(jit_module, "_compiler_for", breaks(RuntimeError("no")))
    jitted = choose_form("auto", "cpu").jit(doubled)
    with pytest.warns(RuntimeWarning, match="running eager"):
        assert torch.vmap(jitted)(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2


def test_a_run_whose_compilation_fails_equals_an_eager_run(monkeypatch):
    monkeypatch.setattr(jit_module, "_compiler_for", breaks(ImportError("cannot import name 'scan_op'")))
    monkeypatch.setattr("ecrl.loop.build._COMPILING_S", 0.0)
    ends = []
    for mode in ("auto", "off"):
        cfg = small(**{"trainer.compile": mode})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ends.append(make_iteration(cfg)(init_state(cfg))[0])
        assert sum("running eager" in str(w.message) for w in caught) == (mode == "auto")
    assert same(*ends)


@LOOPS
def test_the_run_folder_names_the_form_that_trained(monkeypatch, tmp_path):
    monkeypatch.setattr(jit_module, "_compiler_for", breaks(ImportError("cannot import name 'scan_op'")))
    monkeypatch.setattr("ecrl.loop.build._COMPILING_S", 0.0)
    cfg = small(**{"trainer.compile": "auto"})
    assert form_in_use(build(cfg)) == "compiled"
    for folder in (tmp_path / "first", tmp_path / "next"):  # the next run finds its functions eager
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "running eager")
            train(init_state(cfg), cfg, folder, progress=False)
        assert read_manifest(latest(folder))["form"] == "eager"


@LOOPS
def test_a_run_with_compiled_and_eager_iterations_is_partly_eager(monkeypatch):
    monkeypatch.setattr("ecrl.loop.build._COMPILING_S", 0.0)
    cfg = small(**{"trainer.compile": "auto"})
    run = build(cfg)
    compilations_of(run.jit).append(Compilation("collect: first call", 1.0))
    assert form_in_use(run) == "compiled"
    compilations_of(run.jit).append(Compilation("learn: first call", 1.0, "learn cannot be compiled"))
    assert form_in_use(run) == "partly eager"
    compilations_of(run.jit).pop(0)
    assert form_in_use(run) == "eager"
    assert form_in_use(build(small())) == "eager"


@LOOPS
def test_each_record_has_the_fault_of_a_function_once(monkeypatch):
    monkeypatch.setattr(jit_module, "_compiler_for", breaks(RuntimeError("no")))
    first, second = choose_form("auto", "cpu").jit, choose_form("auto", "cpu").jit
    with pytest.warns(RuntimeWarning, match="running eager"):
        for jit in (first, second, second):
            jit(doubled)(torch.ones(2))
    assert [(one.text, one.fault is None) for one in first.compilations] == [("doubled: first call", False)]
    assert [(one.text, one.fault is None) for one in second.compilations] == [("doubled: runs eager", False)]
