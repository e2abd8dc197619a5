"""The recursion over time in graphs: as a C++ loop on a CPU, and as Triton's kernels.

The kernels run in Triton's interpreter, which needs no GPU, and are compiled for a GPU. Both need Triton, which comes
with torch for CUDA. They run in separate processes, because Triton reads its mode at import.
"""

import os
import subprocess
import sys

import pytest
import torch
from support.graphs import needs_cpu_compiler

from ecrl import rng
from ecrl.compile import reverse_scan as graph_form
from ecrl.compile.jit import Jit
from ecrl.compile.trace import traced
from ecrl.kernels.reverse_scan import reverse_scan
from ecrl.pytree import flatten

triton = pytest.mark.skipif(not graph_form.has_triton(), reason="needs Triton")

INTERPRETED = """
import torch
from ecrl import rng
from ecrl.kernels.reverse_scan import reverse_scan
from ecrl.compile.reverse_scan import triton_scan

def check(time, rows, varies, cuts, dtype=torch.float32, tol=2e-6):
    keys = rng.split(rng.key(time * 100 + rows), 4)
    x, last = rng.normal(keys[0], (time, rows)).to(dtype), rng.normal(keys[1], (rows,)).to(dtype)
    cut = rng.uniform(keys[2], (time, rows)) < cuts
    decay = 0.8 + 0.2 * rng.uniform(keys[3], (time, rows), torch.float64) if varies else 0.99 * 0.95
    found = triton_scan(x, decay, cut, last)
    expected = reverse_scan(x.double().t(), decay.t() if varies else decay, cut.t(), last.double()).t()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tol, atol=tol)

%s
"""
CASES = """
check(1, 1, False, 0.0)
check(5, 3, True, 0.3)
check(16, 33, False, 0.1)
check(16, 33, True, 1.0)
check(50, 40, True, 0.05)
check(130, 3, False, 0.0, torch.float64, 1e-14)

x = torch.tensor([1.0, 2.0, 4.0, 8.0]).unsqueeze(1)
cut = torch.tensor([False, True, False, False]).unsqueeze(1)
assert triton_scan(x, 0.5, cut, torch.tensor([16.0])).flatten().tolist() == [2.0, 2.0, 12.0, 16.0]
found = triton_scan(x, 0.5, cut, torch.tensor([torch.nan])).flatten()
assert found[:2].tolist() == [2.0, 2.0] and found[2:].isnan().all()  # what is behind a cut stays there
lost = torch.full((4, 1), torch.nan, dtype=torch.float64)
assert triton_scan(x, lost, torch.ones(4, 1, dtype=torch.bool), torch.tensor([torch.nan])).tolist() == x.tolist()
"""
LONG = "check(2048, 2, False, 0.0, tol=1e-6)\ncheck(2048, 2, True, 0.001, tol=1e-6)"

FOR_A_GPU = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from ecrl.compile import reverse_triton as kernels
TYPES = {"x": "*fp32", "y_out": "*fp32", "last": "*fp32", "cut": "*u8", "time": "i32", "rows": "i32", "tiles": "i32"}
for kernel in (kernels._compose_chunks, kernels._step_through):
    for sizes in ({"VARIES": False}, {"VARIES": True}, {"VARIES": True, "time": 1, "rows": 1, "tiles": 1}):
        sizes |= {"STEPS": kernels._STEPS, "ROWS": kernels._ROWS}  # a size of 1 is compiled in
        types = {name: TYPES.get(name, "*fp64") for name in kernel.arg_names} | dict.fromkeys(sizes, "constexpr")
        made = compile(ASTSource(kernel, types, sizes), GPUTarget("cuda", 90, 32), {"num_warps": 1})
        text = made.asm["ptx"]
        assert ".f64" in text and ".local" not in text, "float64 in registers"
        assert not any(word in text for word in ("shfl", "bar.sync")), "a thread has a row to itself"
"""


def run(code, **env):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=os.environ | env
    )
    if "only 0-dimensional arrays can be converted to Python scalars" in done.stderr:
        pytest.skip("the interpreter of this Triton does not work with this NumPy")
    assert done.returncode == 0, done.stderr[-3000:]


@triton
def test_interpreted_it_is_the_plain_recursion():
    run(INTERPRETED % CASES, TRITON_INTERPRET="1")


@triton
@pytest.mark.long
def test_interpreted_over_a_long_time_it_keeps_float64s_quality():
    run(INTERPRETED % LONG, TRITON_INTERPRET="1")


@triton
@pytest.mark.slow
def test_it_compiles_for_a_gpu_that_is_not_here(tmp_path):
    run(FOR_A_GPU, TRITON_CACHE_DIR=str(tmp_path))


@triton
@pytest.mark.parametrize(
    ("time", "rows", "expected"),
    [
        (1, 1, (1, 1)),
        (128, 4096, (8, 1)),
        (1024, 64, (32, 2)),
        (2048, 1, (32, 4)),
        (128, 65_536, (1, 8)),
        (2000, 40, (32, 4)),
    ],
)
def test_few_rows_are_cut_into_more_chunks_and_none_is_empty(time, rows, expected):
    from ecrl.compile.reverse_triton import _STEPS, chunks_of

    chunks, tiles = chunks_of(time, rows)
    assert (chunks, tiles) == expected
    assert (chunks - 1) * tiles * _STEPS < time <= chunks * tiles * _STEPS


def test_in_a_graph_it_is_one_operation_of_the_same_shape(monkeypatch):
    """Trace the graph that a GPU would run; here the plain recursion replaces the kernel."""
    monkeypatch.setattr("ecrl.compile.reverse_scan.can_use_triton", lambda *own: True)
    x, cut, last = torch.ones(2, 3, 20), torch.zeros(2, 3, 20, dtype=torch.bool), torch.ones(2, 3)
    for decay in (0.5, torch.tensor(0.5, dtype=torch.float64), torch.full((2, 3, 20), 0.5, dtype=torch.float64)):
        leaves, structure = flatten((x, decay, cut, last))
        graph, _ = traced(reverse_scan, structure, leaves)
        ops = [node for node in graph.graph.nodes if node.target is torch.ops.ecrl.reverse_scan.default]
        assert len(ops) == 1
        assert [list(node.meta["val"].shape) for node in ops[0].args] == [
            [20, 6],
            [20, 6] if isinstance(decay, torch.Tensor) and decay.ndim else [],
            [20, 6],
            [6],
        ]
        (out,) = graph.graph.output_node().args[0]
        assert out.meta["val"].shape == x.shape


@needs_cpu_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decays", ["number", "0-d", "per step"])
@pytest.mark.parametrize("shape", [(1,), (5,), (32, 128), (2, 3, 20), (1030, 3)])
def test_on_a_cpu_it_is_one_loop_that_equals_eager_code(shape, decays, dtype):
    x, last = rng.normal(rng.key(1), shape, dtype), rng.normal(rng.key(2), shape[:-1], dtype)
    cut = rng.uniform(rng.key(3), shape) < 0.2
    per_step = rng.uniform(rng.key(4), shape, torch.float64) * (rng.uniform(rng.key(5), shape) > 0.1)
    decay = {"number": 0.9, "0-d": torch.tensor(0.9).double(), "per step": per_step}[decays]
    args = (x, decay, cut, last) if isinstance(decay, torch.Tensor) else (x, cut, last)
    fn = reverse_scan if len(args) == 4 else lambda x, cut, last: reverse_scan(x, 0.9, cut, last)
    leaves, structure = flatten(args)
    targets = {node.target for node in traced(fn, structure, leaves)[0].graph.nodes}
    assert torch.ops.ecrl.cpu_reverse_scan.default in targets and torch.ops.aten.addcmul.default not in targets
    tol = 1e-6 if dtype == torch.float32 else 1e-13
    actual = Jit(True)(fn)(*args)
    torch.testing.assert_close(actual, reverse_scan(x, decay, cut, last), rtol=tol, atol=tol)
    transposed = x.movedim(-1, 0).contiguous().movedim(0, -1)  # other strides compile another function
    torch.testing.assert_close(Jit(True)(fn)(transposed, *args[1:]), actual, rtol=0.0, atol=0.0)


@needs_cpu_compiler
@pytest.mark.parametrize("batched", [(0, 0, 0, 0), (0, None, None, None), (None, 0, None, 0), (1, None, 2, None)])
def test_on_a_cpu_members_of_vmap_are_further_rows(batched):
    values = [rng.normal(rng.key(1), (3, 20)), torch.tensor(0.9).double(), rng.uniform(rng.key(3), (3, 20)) < 0.2]
    values += [torch.ones(3)]

    def stacked(value, dim):
        more = [value, ~value if value.dtype == torch.bool else 0.5 * value]
        return value if dim is None else torch.stack(more, dim)

    args = [stacked(value, dim) for value, dim in zip(values, batched, strict=True)]
    many = torch.func.vmap(reverse_scan, batched)
    leaves, structure = flatten(tuple(args))
    targets = [node.target for node in traced(many, structure, leaves)[0].graph.nodes]
    assert targets.count(torch.ops.ecrl.cpu_reverse_scan.default) == 1
    torch.testing.assert_close(Jit(True)(many)(*args), many(*args), rtol=1e-6, atol=1e-6)


@needs_cpu_compiler
def test_on_a_cpu_what_is_behind_a_cut_or_a_decay_of_0_stays_there():
    x, last = torch.tensor([1.0, 2.0, 4.0]), torch.tensor(torch.inf)
    cut, decay = torch.tensor([False, False, True]), torch.tensor([0.5, 0.0, 1.0]).double()
    assert Jit(True)(reverse_scan)(x, decay, cut, last).tolist() == [2.0, 2.0, 4.0]
    no_cut, no_decay = ~cut & cut, decay + 1.0
    assert Jit(True)(reverse_scan)(x, no_decay, no_cut, torch.tensor(torch.nan)).isnan().all()
    assert Jit(True)(reverse_scan)(x, no_decay, no_cut, last).tolist() == [torch.inf] * 3


@needs_cpu_compiler
def test_on_a_cpu_gradients_use_operations_with_derivatives():
    def gradient(x, decay, cut, last):
        return torch.func.grad(lambda *args: reverse_scan(*args, cut, last).square().sum(), (0, 1))(x, decay)

    args = (rng.normal(rng.key(1), (3, 20)), torch.tensor(0.9).double(), torch.zeros(3, 20).bool(), torch.ones(3))
    leaves, structure = flatten(args)
    targets = {node.target for node in traced(gradient, structure, leaves)[0].graph.nodes}
    assert torch.ops.ecrl.cpu_reverse_scan.default not in targets
    torch.testing.assert_close(Jit(True)(gradient)(*args), gradient(*args), rtol=1e-5, atol=1e-5)


def test_only_plain_tensors_of_a_gpu_are_for_the_kernel(monkeypatch):
    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(graph_form, "has_triton", lambda: True)
    own = torch.ones(2)
    assert graph_form.can_use_triton(OnGpu(), own)
    assert not graph_form.can_use_triton(own)
    assert not graph_form.can_use_triton(OnGpu(), own.requires_grad_())
    with torch.no_grad():
        assert graph_form.can_use_triton(OnGpu(), own)
    launched = []
    torch.vmap(lambda x: launched.append(graph_form.can_use_triton(OnGpu(), x)) or x)(torch.ones(2))
    assert launched == [False]
    monkeypatch.setattr(graph_form, "has_triton", lambda: False)
    assert not graph_form.can_use_triton(OnGpu(), torch.ones(2))
