"""Products that are rewritten are the products."""

import pytest
import torch
from conftest import close

from ecrl.compile import choose_form
from ecrl.products import addmm, mm
from ecrl.tracing import traced
from ecrl.trees import flatten

SHAPES = [(5, 4, 64), (40, 2, 16), (40, 64, 1), (40, 64, 8), (2, 50, 64), (1, 50, 9), (64, 50, 4), (9, 16, 1)]


def _matrix(rows, columns, by_columns=False):
    values = torch.linspace(-1.0, 1.0, rows * columns, dtype=torch.float64).sin()
    return values.reshape(columns, rows).t() if by_columns else values.reshape(rows, columns)


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_is_rewritten_is_the_product(shape, turned):
    m, k, n = shape
    a, b = _matrix(m, k, turned[0]), _matrix(k, n, turned[1])
    product = mm(a, b)
    if product is not NotImplemented:
        close(product, a @ b, tol=1e-12)
    close(addmm(torch.arange(n), a, b), a @ b + torch.arange(n), tol=1e-12)


def test_each_side_is_rewritten_where_memory_runs_its_way():
    """What a perceptron's layers are made of: fan-in and fan-out of 2, forward, and the gradients of both."""
    rewritten = {
        "head": mm(_matrix(50, 64), _matrix(64, 2, True)),
        "into the head": mm(_matrix(50, 2), _matrix(2, 64)),
        "weights of the head": mm(_matrix(2, 50, True), _matrix(50, 64)),
        "weights of the first layer": mm(_matrix(64, 50, True), _matrix(50, 4)),
    }
    assert [name for name, product in rewritten.items() if product is NotImplemented] == []


@pytest.mark.parametrize("shape", [(64, 64, 64), (0, 4, 64), (4, 4, 4)])
def test_others_are_left_to_the_library(shape):
    m, k, n = shape
    assert mm(torch.ones(m, k), torch.ones(k, n)) is NotImplemented


LARGE = [(2048, 64, 64, (False, True)), (2048, 64, 64, (False, False)), (64, 2048, 64, (True, False))]


@pytest.mark.slow
@pytest.mark.parametrize(("m", "k", "n", "turned"), LARGE, ids=["forward", "of the input", "of the weights"])
def test_large_ones_go_to_another_library_and_are_the_product(m, k, n, turned):
    a, b = (x.float() for x in (_matrix(m, k, turned[0]), _matrix(k, n, turned[1])))
    graph, _ = traced(torch.mm, *flatten((a, b))[::-1])
    assert [node.target for node in graph.graph.nodes].count(torch.ops.ecrl.linear.default) == 1
    exact = a.double() @ b.double()
    for product in (mm(a, b), choose_form("on", "cpu").jit(torch.mm)(a, b)):
        assert float((product - exact).abs().max()) < 1e-6 * k
    assert mm(a.double(), b.double()) is NotImplemented


def test_a_scaled_sum_is_left_to_the_library():
    assert addmm(torch.ones(64), torch.ones(5, 2), torch.ones(2, 64), beta=2) is NotImplemented
