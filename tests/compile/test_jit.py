"""The choice between compiled and eager, and machines without a working compiler."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.small_runs import small
from tensordict import TensorDict
from torch.autograd import forward_ad

from ecrl import rng
from ecrl.algorithms.core import collect, learn, on_policy
from ecrl.algorithms.minibatch_sgd import Objective, _gradients, pass_keys, shuffled, sizes_of
from ecrl.algorithms.optimizer import layout_of, pack
from ecrl.algorithms.ppo import advantages, loss
from ecrl.algorithms.rows import rows_of
from ecrl.compile import cpu as inductor
from ecrl.compile.jit import _form_for, choose_form, compiler_fault
from ecrl.compile.scan import graph_scan
from ecrl.compile.trace import traced
from ecrl.errors import ConfigError
from ecrl.kernels import global_norm, scan
from ecrl.kernels.scan_loop import loop
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.pytree import flatten, mapped


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    compiler_fault.cache_clear()
    _form_for.cache_clear()
    yield
    compiler_fault.cache_clear()
    _form_for.cache_clear()


def test_off_is_eager():
    form = choose_form("off", "cpu")
    assert (form.name, form.jit) == ("eager", partial)


def test_auto_without_a_compiler_is_eager_with_one_clear_warning(no_compiler):
    with pytest.warns(RuntimeWarning, match=r"running eager.*no C\+\+ compiler found.*install g\+\+") as caught:
        form = choose_form("auto", "cpu")
        choose_form("auto", "cpu")
    assert form.name == "eager"
    assert len(caught) == 1


@pytest.mark.parametrize("name", ["no-such-compiler", "ccache g++"])
def test_the_compiler_is_the_one_that_inductor_would_take(monkeypatch, no_compiler, name):
    monkeypatch.undo()
    monkeypatch.setenv("CXX", name)
    with pytest.warns(RuntimeWarning, match=rf"running eager.*no C\+\+ compiler found \({re.escape(name)}\)"):
        assert choose_form("auto", "cpu").name == "eager"


def test_a_torch_that_cannot_compile_loops_is_reported(monkeypatch, no_compiler):
    monkeypatch.undo()
    monkeypatch.setattr("ecrl.compile.jit._LOOPS_FAIL", True)
    with pytest.raises(ConfigError, match=r"on, but torch .* cannot compile loops for the CPU; install torch 2.13"):
        choose_form("on", "cpu")
    with pytest.warns(RuntimeWarning, match=r"running eager.*install torch 2.13 or newer, or set"):
        assert choose_form("auto", "cpu").name == "eager"


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
from ecrl.compile.jit import choose_form
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    form = choose_form("auto", "cpu")
print(form.name, [str(w.message) for w in caught if w.category is RuntimeWarning])
"""


@pytest.mark.slow
def test_a_failing_compiler_is_distinguished_from_a_working_one():
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True)
    assert done.stdout.startswith("eager ["), done.stdout + done.stderr[-2000:]
    assert "-fsyntax-only" in done.stdout and "ended with status 1" in done.stdout


def _scaled(factor, x):
    return factor * x


@pytest.mark.slow
def test_a_working_compiler_is_used_and_functions_are_shared():
    form = choose_form("on", "cpu")
    assert form.name == "compiled"
    assert form.jit(_scaled, 3).func is form.jit(_scaled, 3).func
    assert form.jit(_scaled, 3).func is not form.jit(_scaled, 4).func
    assert torch.equal(form.jit(_scaled, 3)(torch.ones(2)), torch.full((2,), 3.0))


def _drift(carry, x, rate):
    after = carry.copy().update({"x": carry["x"] + rate * x["dx"]})
    return after, {"seen": carry["x"], "half": x["dx"] / 2.0}


def _walk(loop, start, steps, rate):
    return loop(_drift, start, steps, rate)


def _walked(form, length=5):
    start = TensorDict({"x": torch.zeros(3, 2), "kept": torch.arange(3)}, [3])
    steps = TensorDict({"dx": torch.arange(float(6 * length)).reshape(length, 3, 2)}, [length, 3])
    return form.jit(_walk, form.scan)(start, steps, torch.tensor(0.5))


@pytest.mark.slow
def test_a_loop_of_a_graph_is_the_plain_loop():
    (end, ys), (plain_end, plain_ys) = (_walked(choose_form(mode, "cpu")) for mode in ("on", "off"))
    assert (end == plain_end).all()
    assert end.batch_size == plain_end.batch_size == torch.Size([3])
    assert {name: y.tolist() for name, y in ys.items()} == {name: y.tolist() for name, y in plain_ys.items()}


class _Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))
        self.register_buffer("scale", torch.tensor(3.0))


def _unusual_loops(loop, module, x, large):
    def step(carry, row, k):
        return carry * module.weight + row.sum() * module.scale + k[0, 0], ()

    end, nothing = loop(step, x[0], x, large)
    same, _ = loop(lambda carry, row, k: (carry + k, row), large, x, large)  # one tensor begins and stays
    return end + module.weight + module.scale, nothing, same


@pytest.mark.slow
def test_loops_without_output_of_one_tensor_twice_and_with_parameters_of_a_module():
    module, x, large = _Module(), torch.arange(12.0).reshape(3, 4), torch.arange(4900.0).reshape(70, 70)
    form = choose_form("on", "cpu")
    with torch.no_grad():
        torch.testing.assert_close(
            form.jit(_unusual_loops, form.scan, module)(x, large), _unusual_loops(scan, module, x, large)
        )


CACHED = """
import sys
sys.path.insert(0, "tests")
import torch
from support.powers import powers
from torch._dynamo.utils import counters
from ecrl.compile.jit import choose_form
form = choose_form("on", "cpu")
for factor in map(float, sys.argv[1:]):
    print(form.jit(powers, form.scan, factor)(torch.ones(3), torch.zeros(4, 3))[0][0].item())
print(counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_the_next_process_finds_a_loop_in_the_cache_but_never_another_loop(tmp_path):
    def printed(*factors):
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", CACHED, *factors], capture_output=True, text=True, env=env)
        return [float(line) for line in done.stdout.split()] if done.returncode == 0 else done.stderr

    assert printed("2") == [16.0, 0.0]
    assert printed("2", "3") == [16.0, 81.0, 1.0]  # a different loop is compiled again


@pytest.mark.slow
def test_keys_set_in_another_order_and_other_strides_are_the_same_graph(monkeypatch):
    form, made = choose_form("on", "cpu"), []
    compile_fx = inductor.compile_fx
    monkeypatch.setattr(inductor, "compile_fx", lambda *a: made.append(1) or compile_fx(*a))
    both = form.jit(_first_and_sum, "test")
    one = TensorDict({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}, [2])
    other = TensorDict({"b": torch.ones(2), "a": torch.arange(6.0).reshape(3, 2).t()}, [2])
    assert both(one)["sum"].tolist() == [3.0, 12.0]
    assert both(other)["sum"].tolist() == [6.0, 9.0]
    assert made == [1]


def _first_and_sum(name, td):
    return {"sum": td["a"].sum(-1), "first": td["b"]}


@pytest.mark.slow
def test_what_is_vmapped_or_differentiated_runs_as_it_is():
    form = choose_form("on", "cpu")
    tripled = form.jit(_scaled, 3)
    assert torch.equal(torch.vmap(tripled)(torch.ones(2, 4)), torch.full((2, 4), 3.0))
    x = torch.ones(2, requires_grad=True)
    tripled(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))


TABLE = torch.tensor([1.0, 2.0, 3.0])
READING = [
    (lambda x: x if x.sum() > 0.0 else -x, "aten._local_scalar_dense.default"),
    (lambda x: x * float(x[0]), "aten._local_scalar_dense.default"),
    (lambda x: x[x > 0.0].sum(), "aten.nonzero.default"),
    (lambda x: x + torch.from_numpy(x.numpy()), ".numpy()"),
    (lambda x: x * float(TABLE.numpy().sum()), "Cannot access data pointer"),
    (lambda x: x * float(f"{x.sum():.2f}"), "unsupported format string passed to FakeTensor.__format__"),
    (lambda x: x * float(f"{x.sum()}"), "could not convert string to float: 'FakeTensor(..., size=())'"),
    (lambda x: x * int(f"{x.sum()}"), "invalid literal for int() with base 10: 'FakeTensor(..., size=())'"),
]


@pytest.mark.parametrize(("fn", "operation"), READING)
def test_what_reads_the_values_of_a_tensor_is_refused_with_its_line(fn, operation):
    leaves, structure = flatten((torch.ones(3),))
    line = fn.__code__.co_firstlineno
    message = (
        rf"trainer.compile: .*test_jit.py:{line}, in <lambda>, reads values of a tensor \({re.escape(operation)}\)"
    )
    with pytest.raises(ConfigError, match=message):
        traced(fn, structure, leaves)


def _closed_over(loop, start, xs, weight):
    return loop(lambda carry, x: (carry @ weight + x, carry.sum()), start, xs)


def _forwards(loop, start, xs, weight):
    def last(weight):
        return loop(lambda carry, x, weight: (carry @ weight + x, None), start, xs, weight)[0].sum()

    return torch.func.jvp(last, (weight,), (weight,))


def _closed_over_in_a_parameter(loop, start, xs, weight):
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    return loop(lambda carry, x: (carry @ parameter + x, None), start, xs)


def _twice(loop, start, xs, weight):
    def last(start, weight):
        return loop(lambda carry, x, weight: (carry @ weight + x, None), start, xs, weight)[0].square().sum()

    return torch.func.jacrev(torch.func.grad(last))(start, weight)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, for tangents
@pytest.mark.parametrize(
    ("fn", "line", "message"),
    [
        (_closed_over, 1, r"in _closed_over, calls a scan .* captures a float32 tensor \[3, 3\] from outside; pass it"),
        (_closed_over_in_a_parameter, 2, r".* captures a float32 tensor \[3, 3\] from outside; pass it"),
        (
            _forwards,
            2,
            "in last, calls a scan whose forward-mode derivatives are taken, .* call ecrl.kernels.scan instead",
        ),
        (_twice, 2, "in last, calls a scan whose second derivatives are taken, .* call ecrl.kernels.scan instead"),
    ],
)
def test_what_a_compiled_loop_cannot_do_is_reported_with_its_line(fn, line, message):
    leaves, structure = flatten((torch.ones(2, 3), torch.ones(4, 2, 3), torch.ones(3, 3)))
    at = fn.__code__.co_firstlineno + line
    with pytest.raises(ConfigError, match=f"trainer.compile: .*test_jit.py:{at}, {message}"):
        traced(partial(fn, graph_scan), structure, leaves)
    traced(partial(fn, scan), structure, leaves)  # the plain scan leaves no loop in the graph


def test_the_line_of_a_loop_of_a_kernel_is_that_which_calls_it():
    def solved(x, rate):
        return loop(lambda x, _: (x * rate, None), x, torch.zeros(4))[0]

    leaves, structure = flatten((torch.ones(2), torch.ones(2)))
    with pytest.raises(ConfigError, match=rf"test_jit.py:{solved.__code__.co_firstlineno + 1}, in solved, calls"):
        traced(solved, structure, leaves)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        lambda carry, x, weight: carry + torch.zeros_like(weight)[0] + x,
        lambda carry, x, weight: carry + weight.new_ones(3) + weight[0].new_zeros(()) + x,
        lambda carry, x, weight: (weight.sum(), carry + x)[1],
    ],
)
def test_a_loop_may_ask_for_the_shape_of_what_was_made_outside(body):
    def run(loop, start, xs, weight):
        return loop(lambda carry, x: (body(carry, x, weight), None), start, xs)[0]

    form, inputs = choose_form("on", "cpu"), (torch.ones(2, 3), torch.ones(4, 2, 3), torch.ones(3, 3))
    torch.testing.assert_close(form.jit(run, form.scan)(*inputs), run(scan, *inputs))


@pytest.mark.slow
def test_a_loop_can_be_functionalized():
    def run(start, xs):
        return torch.func.functionalize(lambda start, xs: graph_scan(lambda c, x: (c + x, None), start, xs)[0])(
            start, xs
        )

    inputs = torch.ones(2, 3), torch.ones(4, 2, 3)
    torch.testing.assert_close(choose_form("on", "cpu").jit(run)(*inputs), torch.full((2, 3), 5.0))


def _divided(by, x):
    return x / by if isinstance(by, float) else x // by


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, for tangents
def test_a_compiled_function_is_right_for_whatever_it_is_called_with():
    jit = choose_form("on", "cpu").jit
    whole, x = torch.arange(3), torch.arange(3.0)
    assert jit(_divided, 2)(whole).tolist() == [0, 0, 1]
    assert jit(_divided, 2.0)(whole).tolist() == [0.0, 0.5, 1.0]
    assert jit(_divided)(2, whole).tolist() == [0, 0, 1]
    assert jit(_divided)(2.0, whole).tolist() == [0.0, 0.5, 1.0]
    half = jit(_divided, 4.0)
    assert half(torch.ones(()).expand(3)).tolist() == [0.25] * 3  # first one number for all
    assert half(x).tolist() == [0.0, 0.25, 0.5]
    assert half(torch._neg_view(x)).tolist() == [0.0, -0.25, -0.5]
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(half(forward_ad.make_dual(x, torch.ones(3)))).tangent.tolist() == [0.25] * 3


def test_a_carry_that_changes_its_structure_is_refused():
    def more(carry, x):
        return carry | {"new": x}, x

    with pytest.raises(ValueError, match="the carry changed its structure"):
        traced(lambda x: graph_scan(more, {"a": x[0]}, x), *_flat(torch.ones(3)))


def _flat(*args):
    leaves, structure = flatten(args)
    return structure, leaves


def _clipped_slope(x, y):
    """Traced, it writes in place on two tensors that are made alike."""
    return torch.func.grad(lambda x: torch.minimum(x.exp() * y, x.exp().clamp(0.8, 1.2) * y).sum())(x)


def test_what_is_written_to_is_not_calculated_once_for_two():
    x, y = torch.linspace(-1.0, 1.0, 40).repeat(14), torch.linspace(-1.0, 1.0, 14).repeat_interleave(40)
    graph, _ = traced(_clipped_slope, *_flat(x, y))
    assert torch.equal(graph(x, y)[0], _clipped_slope(x, y))


def test_what_is_calculated_alike_is_calculated_once():
    graph, _ = traced(lambda x: (x.sin() + 1.0) * (x.sin() + 1.0), *_flat(torch.ones(3)))
    assert [str(n.target) for n in graph.graph.nodes if n.op == "call_function"].count("aten.sin.default") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_gradients_of_a_minibatch_equal_the_eager_gradients(dtype, tol):
    """The policy has changed since the rollout, so some ratios are clipped. `tol` is relative to the norm."""
    made = small(**{"trainer.buffer_size": 64, "algorithm.cfg.batch_size": 128})
    run, state = build(made), init_state(made)
    _, batch = collect(run, state)
    sgd = run.algorithm.choices.sgd
    keys = torch.arange(100)
    params = state["params"].apply(lambda p: p + 0.3 * rng.normal(keys[p.numel() % 100], p.shape))
    trees = mapped(
        lambda x: x.to(dtype) if x.is_floating_point() else x,
        (params, batch, state["hyper"]),
    )
    fields, layout = advantages(run, trees[2], trees[1]["steps"]), layout_of(trees[0], sgd.groups)
    rows = rows_of(run, trees[1], **fields)
    sizes = sizes_of(sgd, len(rows))
    chosen = tuple(x[0].unsqueeze(0) for x in shuffled(pass_keys(state, 1), sizes, max(sizes)))
    inputs = pack(trees[0], layout), chosen, TensorDict({}, []), rows, trees[2]
    objective = Objective(run, loss, (), "approx_kl", "target_kl", layout)
    (actual, (_, logs)), (expected, (_, eager_logs)) = (
        choose_form(mode, "cpu").jit(_gradients, objective)(*inputs) for mode in ("on", "off")
    )
    actual, expected = actual["all"], expected["all"]
    assert 0.1 < float(eager_logs["clip_frac"]) < 0.9
    norm = global_norm(expected)
    assert float(global_norm(mapped(torch.sub, actual, expected)) / norm) < tol
    assert all(float((logs[name] - eager_logs[name]).abs()) < tol for name in logs)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_a_recompilation_during_a_run_is_reported_with_its_reason():
    """Here because a number of the algorithm changes its type in the third iteration."""
    made = small(**{"trainer.compile": "on"})

    def unstable(run):
        iterate = run.algorithm.iterate

        def collect(run, state):
            if int(state["update_step"]) == 2:
                state = state.copy()
                state["hyper", "clip_coef"] = state["hyper", "clip_coef"].double()
            return iterate.collect(run, state)

        def update(_, state, batch):
            return learn(iterate.update, run, state, batch)

        return run._replace(algorithm=replace(run.algorithm, iterate=on_policy(collect, update), as_one=False))

    records = train_iter(init_state(made), made, unstable)
    assert [next(records)["sample_step"] for _ in range(4)] == [32, 32, 64, 64]
    message = r"compiled again at step 96: _learn: 0.hyper.clip_coef was float32 \[\] on cpu, is float64 \[\] on cpu"
    with pytest.warns(RuntimeWarning, match=message):
        next(records)


ONES = [torch.tensor([float(i), 2.0 * i]) for i in (1, 2, 3, 4)]


def _inside(x, _):
    return 0.5 * x + ONES[0] * ONES[2], x * ONES[3]


def _outside(x, row):
    y, ys = graph_scan(_inside, x - ONES[1], torch.zeros(3))
    return y * ONES[2] + row * ONES[0], ys.sum(0) * ONES[1] + ONES[3]


def test_constants_of_a_loop_in_a_loop_keep_their_places():
    inputs = torch.tensor([0.3, -0.2]), torch.arange(8.0).reshape(4, 2)
    leaves, structure = flatten(inputs)
    graph, _ = traced(partial(graph_scan, _outside), structure, leaves)
    for actual, expected in zip(graph(*leaves), graph_scan(_outside, *inputs), strict=True):
        assert torch.equal(actual, expected)
