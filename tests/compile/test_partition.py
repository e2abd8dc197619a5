"""Graphs cut at their loops: equal to the plain function, in few pieces, without host reads, with early frees."""

import weakref

import pytest
import torch
from support.checks import assert_pure
from torch._subclasses.fake_tensor import FakeTensorMode

from ecrl.compile.cuda_graph import compile_segment
from ecrl.compile.partition import segmented
from ecrl.compile.scan import graph_scan
from ecrl.compile.trace import traced
from ecrl.kernels import scan
from ecrl.pytree import flatten, unflatten

TABLE = torch.arange(4.0)


class Pieces:
    """A compiler that changes nothing and records its arguments."""

    def __init__(self):
        self.graphs, self.inputs = [], []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        self.inputs.append(inputs)
        return graph


def cut(fn, *args, compile=None):
    """Return `fn` cut into pieces, and the pieces."""
    leaves, structure = flatten(args)
    pieces = Pieces() if compile is None else compile
    graph, out = traced(fn, structure, leaves)
    run = segmented(graph, pieces)

    def call(*args):
        leaves, _ = flatten(args)
        with torch.no_grad():
            return unflatten(out, run(*leaves))

    return call, pieces


def _inner(loop, total, x, k):
    turned, sines = loop(lambda c, row, k: (c * 0.5 + row * k, c.sin()), total, x, k)
    return turned + sines.sum(0), {"t": sines.t(), "first": x[0]}


def walked(loop, start, x, k):
    """Two loops, the second with a nested loop, and operations before, between and after them."""
    first, ys = loop(lambda c, row: (c + row.cos(), c.unsqueeze(0)), start.exp(), x + TABLE)
    again = torch.stack((x, ys.squeeze(1))).sort(-1).values
    last, more = loop(lambda c, rows, k: _inner(loop, c, rows, k), first, again, k.tanh())
    return {"last": last * 2.0, "more": more, "ys": ys, "same": x, "k": k}


def loop_inputs(length=5):
    x = torch.linspace(-1.0, 1.0, 4 * length).reshape(length, 4)
    return torch.tensor([0.1, 0.2, 0.3, 0.4]), x, torch.tensor(0.7)


def test_in_pieces_it_is_the_plain_function_again_and_again():
    call, pieces = cut(lambda *args: walked(graph_scan, *args), *loop_inputs())
    for shift in (0.0, 0.5):
        args = [arg + shift for arg in loop_inputs()]
        torch.testing.assert_close(assert_pure(call, *args), walked(scan, *args))
    # before, the first body, between, the second one before, in and after its loop, after
    assert len(pieces.graphs) == 7


@pytest.mark.slow
def test_pieces_of_inductor_are_the_plain_function():
    call, _ = cut(lambda *args: walked(graph_scan, *args), *loop_inputs(), compile=compile_segment)
    torch.testing.assert_close(assert_pure(call, *loop_inputs()), walked(scan, *loop_inputs()))


def test_a_loop_is_compiled_for_rows_that_may_lie_anywhere():
    x = torch.ones(4, 4999)  # a large row is a separate buffer; it does not begin at a multiple of 16 bytes
    _, pieces = call, pieces = cut(lambda x: graph_scan(lambda c, row: (c + row, c * row), x[0], x), x)
    call(x)
    body = next(inputs for inputs in pieces.inputs if len(inputs) > 1)
    rows = [leaf.storage_offset() for leaf in body if leaf.storage_offset()]
    assert sorted(rows) == [4999, 4999]  # of what is read and of what is written


def test_rows_of_a_loop_are_written_where_they_belong():
    x = torch.ones(3, 5000)
    call, pieces = cut(lambda x: graph_scan(lambda c, row: (c + row, c * row), x[0], x), x)
    call(x)
    body = next(graph for graph, inputs in zip(pieces.graphs, pieces.inputs, strict=True) if len(inputs) > 1)
    assert [str(node.target) for node in body.graph.nodes].count("aten.copy_.default") == 1
    assert len(body.graph.output_node().args[0]) == 1  # only the carry is returned


def test_a_carry_keeps_its_layout():
    start, x = torch.arange(6.0).reshape(2, 3).t(), torch.ones(4, 2, 3).mT
    body = lambda c, row: (c + row, c * row)  # noqa: E731
    call, _ = cut(lambda start, x: graph_scan(body, start, x), start, x)
    end, ys = call(start, x)
    torch.testing.assert_close((end, ys), scan(body, start, x))
    assert end.stride() == start.stride()


def test_what_no_piece_takes_any_more_is_let_go():
    outputs, alive = [], []

    def watching(graph, inputs):
        def run(*tensors):
            alive.append(sum(ref() is not None for ref in outputs))
            out = graph(*tensors)
            outputs.extend(weakref.ref(leaf) for leaf in out)
            return out

        return run

    def three(x):
        large = x.exp()
        c, _ = graph_scan(lambda c, row: (c + row, c), large[0] * 1.0, large)
        c, _ = graph_scan(lambda c, row: (c + row, c), c * 2.0, x)
        return c * 3.0

    call, _ = cut(three, torch.ones(4, 5000), compile=watching)
    call(torch.ones(4, 5000))
    assert alive[0] == 0
    assert alive[-1] <= 2  # inputs of the last piece, without `large` and results of the loops in between


def test_what_is_done_depends_on_no_number_that_a_tensor_holds():
    """The pieces run on tensors without data, so a device never waits for the host."""
    call, _ = cut(lambda *args: walked(graph_scan, *args), *loop_inputs())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = call(*map(mode.from_tensor, loop_inputs()))
    assert out["more"]["t"].shape == (2, 4, 5)


def test_a_constant_is_where_the_inputs_are_before_a_call():
    """Otherwise every call would copy it from the host; `meta` represents a device other than the host."""
    x = torch.ones(4, device="meta")
    call, pieces = cut(lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]).to(x.device), x)
    assert call(x).device.type == "meta"
    assert [leaf.device.type for leaf in pieces.inputs[0]] == ["meta", "meta"]
