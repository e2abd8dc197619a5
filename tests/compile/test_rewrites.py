"""Rewrites of a traced graph keep its results, also where the graph writes in place."""

import pytest
import torch
import torch.nn.functional as F
from support.checks import close
from support.graphs import graph_of, needs_cpu_compiler

from ecrl.compile.cpu import compiled
from ecrl.compile.jit import choose_form
from ecrl.kernels.scan_loop import step_if
from ecrl.pytree import flatten

X, SQUARE = torch.linspace(0.1, 1.0, 4), torch.linspace(-1.0, 1.0, 256).reshape(16, 16)
ROWS, BIAS = torch.linspace(-2.0, 2.0, 640).sin().reshape(40, 16), torch.linspace(-1.0, 1.0, 16)


def stacked(x):
    """Return a stack of three tensors."""
    return torch.stack([x.sin(), x.cos(), x.exp()])


def sizes_of_stacks(graph):
    """Return the number of tensors of each stack that is read."""
    graph.graph.eliminate_dead_code()
    stacks = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.stack.default)
    return sorted(len(stack.args[0]) for stack in stacks)


def test_only_the_tensors_of_a_slice_are_stacked():
    def slices(x):
        y = stacked(x)
        return y[1:2], y.t()[:, :2], y[-2:]

    graph = graph_of(slices, X)
    assert sizes_of_stacks(graph) == [1, 2, 2]
    assert all(map(torch.equal, graph(X), slices(X)))


def write_to_slice(x):
    y = stacked(x)
    y[1:] = 0.0
    return y


def write_to_row(x):
    y = stacked(x)
    y[0] = 7.0
    return y[:2]


def write_to_part(x):
    part = x.sin()
    y = torch.stack([part, x.cos()])
    part.add_(1.0)
    return y[:1]


STACKS = {
    "slice written": write_to_slice,
    "row written": write_to_row,
    "part written": write_to_part,
    "read whole": lambda x: (stacked(x)[:2] + stacked(x).sum(), stacked(x)),
    "along another axis": lambda x: torch.stack([x, x.sin(), x.cos()], 1)[:, :2].as_strided((2, 2), (3, 1)),
    "across": lambda x: stacked(x)[:, 1:3],
    "step": lambda x: stacked(x)[::2],
    "empty": lambda x: stacked(x)[3:],
    "empty, along another axis": lambda x: torch.stack([x, x.sin()], 1)[:, :0],
    "two dtypes": lambda x: torch.stack([x, x.double()])[:1],
    "slices without an end": lambda x: torch.trapezoid(stacked(x), x),
    "strided": lambda x: stacked(x)[:2].as_strided((2, 2), (4, 1), 4),
}


@pytest.mark.parametrize("fn", STACKS.values(), ids=STACKS)
def test_other_reads_of_a_stack_are_left_alone(fn):
    out, expected = graph_of(fn, X)(X.clone()), flatten(fn(X.clone()))[0]
    assert [x.dtype for x in out] == [x.dtype for x in expected]
    assert all(map(torch.equal, out, expected))


def write_to_factor(a, w, bias):
    weights = w.sin()
    product = a @ weights
    weights.mul_(0.0)
    return torch.relu(product + bias), weights


def write_to_bias(a, w, bias):
    own = bias.sin()
    total = a @ w + own
    own.zero_()
    return torch.relu(total), own


def bias_of_other_axis(a, w, bias):
    batch = torch.stack([a[:32], a[8:]]) @ w.expand(2, 16, 16)
    return torch.relu(batch.view(2, 2, 16, 16) + torch.stack([bias, 2.0 * bias]).unsqueeze(1))


PRODUCTS = {
    "factor written": write_to_factor,
    "bias written": write_to_bias,
    "bias in float64": lambda a, w, bias: torch.relu(a @ w + bias.double()),
    "bias in half precision": lambda a, w, bias: torch.relu(a @ w + bias.bfloat16()),
    "bias of integers": lambda a, w, bias: torch.relu(a @ w + (4 * bias).long()),
    "bias of another axis": bias_of_other_axis,
}


@pytest.mark.parametrize("fn", PRODUCTS.values(), ids=PRODUCTS)
def test_other_sums_are_not_fused(fn):
    graph, expected = graph_of(fn, ROWS, SQUARE, BIAS), flatten(fn(ROWS, SQUARE, BIAS))[0]
    assert torch.ops.ecrl.bmm_relu.default not in [node.target for node in graph.graph.nodes]
    for mine, right in zip(graph(ROWS, SQUARE, BIAS), expected, strict=True):
        assert mine.dtype == right.dtype
        close(mine, right, tol=1e-5)


@pytest.mark.slow
@needs_cpu_compiler
@pytest.mark.parametrize("n", [1, 2, 8])
def test_the_outputs_of_a_head_are_contiguous(n):
    """Code may view them, and a step of `step_if` returns them as it found them."""
    head = torch.linspace(-1.0, 1.0, 16 * n).reshape(n, 16)

    def outputs(carry, x, head):
        out = F.linear(x, head)
        return out + carry, out.view(-1)

    def step(due, carry, x, head):
        return step_if(due, outputs, carry, x, head)

    for due in (True, False):
        args = torch.tensor(due), torch.zeros(40, n), ROWS, head
        out, expected = choose_form("on", "cpu").jit(step)(*args), step(*args)
        assert out[0].is_contiguous()
        close(out[0], expected[0], tol=1e-6)


@pytest.mark.slow
@needs_cpu_compiler
def test_rewritten_graphs_are_right_in_cpp():
    def run(a, w, bias):
        y = stacked(a)
        return y[1:2], y.transpose(0, 1)[:2], *write_to_factor(a, w, bias), *write_to_bias(a, w, bias)

    leaves, structure = flatten((ROWS, SQUARE, BIAS))
    for mine, right in zip(compiled(run, structure, leaves)[0](*leaves), run(*leaves), strict=True):
        close(mine, right, tol=1e-5)
