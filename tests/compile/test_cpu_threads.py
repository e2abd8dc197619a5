"""The number of threads of a compiled graph: one if all of its tensors are small."""

import pytest
import torch
from support.graphs import needs_cpu_compiler

from ecrl.compile import cpu
from ecrl.compile.scan import graph_scan
from ecrl.compile.trace import traced
from ecrl.pytree import flatten


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads_of(fn, *args) -> int:
    leaves, structure = flatten(args)
    return cpu._threads(traced(fn, structure, leaves)[0])


def test_a_graph_of_small_tensors_runs_in_one_thread(two_threads):
    assert threads_of(lambda x: x * 2.0, torch.zeros(2**16)) == 1
    assert threads_of(lambda x: x * 2.0, torch.zeros(2**16 + 1)) == 2
    assert threads_of(lambda x: (x.unsqueeze(-1) * x).sum(-1), torch.zeros(2**9)) == 2, "a large value inside the graph"


def test_the_tensors_of_a_loop_count(two_threads):
    def wide(x):
        return graph_scan(lambda carry, y: (carry + (y.unsqueeze(-1) * y).sum(), y), x.sum(), x.expand(3, -1))[0]

    assert threads_of(wide, torch.zeros(2**8)) == 1
    assert threads_of(wide, torch.zeros(2**9)) == 2


@pytest.mark.slow
@needs_cpu_compiler
def test_the_generated_code_has_the_threads_of_its_graph(two_threads, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for size, has_threads in ((2**12, False), (2**17, True)):
        leaves, structure = flatten((torch.zeros(size),))
        run, *_ = cpu.compiled(lambda x: x.tanh() * 3.0, structure, leaves)
        run(*leaves)
        sources = [path.read_text() for path in tmp_path.rglob("*.cpp")]
        assert any("omp parallel" in source for source in sources) is has_threads
