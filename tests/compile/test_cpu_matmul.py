"""Products that are rewritten are the products."""

from collections import Counter
from math import prod

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.checks import close
from support.graphs import needs_cpu_compiler

from ecrl.compile.cpu import compiled
from ecrl.compile.cpu_matmul import addmm, mm
from ecrl.compile.scan import graph_scan
from ecrl.compile.trace import traced
from ecrl.pytree import flatten

SHAPES = [(5, 4, 64), (40, 2, 16), (40, 64, 1), (40, 64, 8), (2, 50, 64), (1, 50, 9), (64, 50, 4), (9, 16, 1)]


def _matrix(rows, columns, by_columns=False):
    values = torch.linspace(-1.0, 1.0, rows * columns, dtype=torch.float64).sin()
    return values.reshape(columns, rows).t() if by_columns else values.reshape(rows, columns)


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_rewritten_is_the_product(shape, turned):
    """Every product of float32 is rewritten; the expectation is NumPy's, in float64."""
    m, k, n = shape
    a, b = _matrix(m, k, turned[0]).float(), _matrix(k, n, turned[1]).float()
    expected = a.double().numpy() @ b.double().numpy()
    product = mm(a, b)
    assert product is not NotImplemented
    close(product, expected, tol=1e-5)
    close(addmm(torch.arange(n), a, b), expected + np.arange(n), tol=1e-5)


@pytest.mark.parametrize("shape", [(40, 64, 8), (64, 50, 4)])
def test_sums_of_a_product_that_is_left_to_the_library_are_right(shape):
    m, k, n = shape
    a, b = _matrix(m, k), _matrix(k, n)
    assert mm(a, b) is NotImplemented
    close(addmm(torch.arange(n), a, b), a.numpy() @ b.numpy() + np.arange(n), tol=1e-12)


def test_each_side_is_rewritten_where_memory_runs_its_way():
    """Products of a perceptron's layers: fan-in and fan-out of 2, forward, and the gradients of both."""
    rewritten = {
        "head": mm(_matrix(50, 64), _matrix(64, 2, True)),
        "into the head": mm(_matrix(50, 2), _matrix(2, 64)),
        "weights of the head": mm(_matrix(2, 50, True), _matrix(50, 64)),
        "weights of the first layer": mm(_matrix(64, 50, True), _matrix(50, 4)),
    }
    assert [name for name, product in rewritten.items() if product is NotImplemented] == []


@pytest.mark.parametrize("shape", [(64, 64, 64), (0, 4, 64), (4, 4, 4)])
def test_doubles_and_nothing_are_left_to_the_library(shape):
    m, k, n = shape
    assert mm(torch.ones(m, k).double(), torch.ones(k, n).double()) is NotImplemented


MATRICES = [  # rows, sum, columns, which are turned, and who multiplies them
    (128, 64, 64, (False, True), "bmm"),
    pytest.param(64, 2048, 64, (True, False), "bmm", marks=pytest.mark.long),
    pytest.param(9, 64, 64, (False, False), "bmm", marks=pytest.mark.long),
    (13, 300, 17, (False, True), "bmm"),
    (100, 9, 31, (True, True), "bmm"),
    (300, 700, 150, (True, True), "bmm"),  # several blocks of the sum and of the rows, and copies of both factors
    pytest.param(65, 257, 129, (True, False), "bmm", marks=pytest.mark.long),
    (8, 1024, 1024, (False, True), "linear"),
]


@pytest.mark.slow
@needs_cpu_compiler
@pytest.mark.parametrize(("m", "k", "n", "turned", "by"), MATRICES)
def test_matrices_of_any_size_are_multiplied_in_single_precision_alike_by_any_threads(m, k, n, turned, by):
    a, b = (x.float() for x in (_matrix(m, k, turned[0]), _matrix(k, n, turned[1])))
    leaves, structure = flatten((a, b))
    graph, _ = traced(torch.mm, structure, leaves)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(getattr(torch.ops.ecrl, by).default) == 1
    exact, threads, products = a.double() @ b.double(), torch.get_num_threads(), [mm(a, b)]
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        products += compiled(torch.mm, structure, leaves)[0](a, b)
    torch.set_num_threads(threads)
    bound = {"bmm": 1e-6, "linear": 2e-6}[by] * k  # the library behind linear errs by 1.3e-3; half precision by 1.1
    assert all(float((product - exact).abs().max()) < bound for product in products)
    assert by == "linear" or all(torch.equal(product, products[1]) for product in products[2:])


def _weight_gradients(x: torch.Tensor, weights: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of two batches of layers, and a transposed product that is flattened after another operation."""
    layers = torch.func.grad(lambda w: torch.bmm(x, w.mT).square().sum())(weights)
    thin = torch.func.grad(lambda w: torch.bmm(x, w.mT).square().sum())(head)
    product = torch.bmm(x.mT, x) + 1.0
    return 0.5 * layers, 0.5 * thin, product.mT.flatten(1) * 2.0


@pytest.mark.slow
@needs_cpu_compiler
def test_the_gradient_of_a_batch_of_weights_is_computed_in_the_layout_of_the_weights():
    x, weights, head = (_matrix(3 * n, 16).float().reshape(3, n, 16) for n in (40, 24, 4))
    leaves, structure = flatten((x, weights, head))
    graph, _ = traced(_weight_gradients, structure, leaves)
    shapes = [tuple(node.meta["val"].shape) for node in graph.graph.nodes if node.target == torch.ops.ecrl.bmm.default]
    assert (3, 24, 16) in shapes and (3, 16, 24) not in shapes
    expected = _weight_gradients(*(leaf.double() for leaf in leaves))
    for mine, right in zip(compiled(_weight_gradients, structure, leaves)[0](*leaves), expected, strict=True):
        close(mine, right.float(), tol=1e-4)


def _critics(weights, x):
    """Outputs of perceptrons with two hidden layers, one for each entry of the first axis of the weights."""

    def of_one(first, bias, second, other_bias, head):
        hidden = torch.relu(F.linear(x, first, bias))
        return F.linear(torch.relu(F.linear(hidden, second, other_bias)), head)

    return torch.func.vmap(of_one)(*weights)


def _learn(weights, x):
    """Gradients of a loss, for all weights and for the inputs."""
    return torch.func.grad(lambda weights, x: _critics(weights, x).square().mean(), (0, 1))(weights, x)


def _perceptrons(batch, width, inputs):
    sizes = ((width, inputs), (width,), (width, width), (width,), (2, width))
    return [torch.linspace(-2.0, 2.0, batch * prod(s), dtype=torch.float64).sin().reshape(batch, *s) for s in sizes]


@pytest.mark.slow
@needs_cpu_compiler
@pytest.mark.parametrize(("batch", "rows", "width", "inputs"), [(2, 64, 64, 4), (1, 40, 33, 20), (3, 50, 300, 9)])
def test_relu_is_fused_into_products_with_the_same_results(batch, rows, width, inputs):
    """The last case has several blocks of the sum, of which only the last may add the bias.

    The first layer of all critics is one product with a transposed result, which relu is not fused into.
    """
    weights, x = _perceptrons(batch, width, inputs), _matrix(rows, inputs)
    leaves, structure = flatten(([w.float() for w in weights], x.float()))
    graph, _ = traced(_learn, structure, leaves)
    counts = Counter(node.target for node in graph.graph.nodes if node.users)
    assert counts[torch.ops.ecrl.bmm_relu.default] == counts[torch.ops.aten.relu.default] == 1
    assert counts[torch.ops.ecrl.bmm_relu_gradient.default] == 2
    assert not counts[torch.ops.aten.threshold_backward.default]
    expected = flatten(_learn(weights, x))[0]
    for mine, right in zip(compiled(_learn, structure, leaves)[0](*leaves), expected, strict=True):
        close(mine, right.float(), tol=3e-5 * float(right.abs().max()))


def _not_fused(a, b, bias):
    """A sum that is read twice, a product that is read twice, a column as bias, and no bias."""
    product, other = a @ b, a @ (2.0 * b)
    total, column = product + bias, a @ b.abs() + a[:, :1]
    return torch.relu(total), total, torch.relu(other + bias), other, torch.relu(column), (a @ -b).relu()


def test_relu_of_other_sums_is_not_fused():
    a, b, bias = (_matrix(*shape).float() for shape in ((40, 16), (16, 16), (1, 16)))
    graph, _ = traced(_not_fused, *reversed(flatten((a, b, bias[0]))))
    assert torch.ops.ecrl.bmm_relu.default not in [node.target for node in graph.graph.nodes]
    for mine, right in zip(graph(a, b, bias[0]), _not_fused(a, b, bias[0]), strict=True):
        close(mine, right, tol=1e-5)


@pytest.mark.slow
@needs_cpu_compiler
def test_a_fused_relu_keeps_nan_and_parts_of_a_vector():
    """As in a run, the weights and the bias are parts of one vector."""
    x, vector = _matrix(40, 16).float(), torch.linspace(-1.0, 1.0, 16 * 16 + 16)
    x[3, 2], x[7, 0] = torch.nan, -torch.inf

    def layer(vector, x):
        return torch.relu(F.linear(x, vector[16:].view(16, 16), vector[:16]))

    leaves, structure = flatten((vector, x))
    assert torch.allclose(compiled(layer, structure, leaves)[0](*leaves)[0], layer(vector, x), equal_nan=True)


def _two_products(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return graph_scan(lambda total, x, b: (total + x @ b, (x @ b, x @ x.t())), torch.zeros(20, 16), a, b)[1]


@pytest.mark.slow
@needs_cpu_compiler
def test_what_a_loop_takes_in_a_turn_is_multiplied_where_it_lies():
    a, b = torch.linspace(-1.0, 1.0, 5 * 20 * 16).reshape(5, 20, 16), torch.linspace(0.0, 1.0, 256).reshape(16, 16)
    leaves, structure = flatten((a, b))
    product, squared = compiled(_two_products, structure, leaves)[0](a, b)
    close(product, a @ b, tol=1e-5)
    close(squared, a @ a.mT, tol=1e-5)


def test_a_scaled_sum_is_left_to_the_library():
    assert addmm(torch.ones(64), torch.ones(5, 2), torch.ones(2, 64), beta=2) is NotImplemented
