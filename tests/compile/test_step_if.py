"""A compiled graph runs a step of `step_if` only when it is due, with the results of eager code."""

from itertools import product
from typing import Any

import pytest
import torch
from support.graphs import needs_cpu_compiler
from support.long_cases import long_except
from torch import Tensor

from ecrl.compile import cpu
from ecrl.compile.jit import Jit
from ecrl.errors import ConfigError
from ecrl.kernels import loop
from ecrl.kernels.scan_loop import step_if

SIZE, ROWS, STEPS = 80, 96, 6
"""SIZE * SIZE is above the size up to which tensors share a buffer, and SIZE is below it."""


def descend(carry: Any, x: Tensor, weights: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """Change a large and a small tensor and a counter, and return two logs."""
    large, small, count = carry
    hidden = torch.tanh(x @ large) @ weights
    new = 0.5 * large + hidden.T @ hidden / 100.0, 2.0 * small + hidden.mean(0), count + 1
    return new, {"loss": hidden.square().sum(), "size": small.sum() + torch.tensor([1.0, 2.0])[1]}


def with_loop(carry: Any, x: Tensor, weights: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """Run a loop in the step."""
    large, small, count = carry
    small, sums = loop(lambda total, row: (0.9 * total + row.mean(), total.sum()), small, x[:3])
    return (large.T + weights.mean(), small, count + 1), {"sums": sums.sum()}


def swap(carry: Any, x: Tensor, weights: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """Return inputs and views of inputs."""
    return (weights, x[0], carry[2]), {"first": x[0, 0]}


def once(body: Any, carry: Any, xs: Tensor, weights: Tensor, start: Tensor) -> Any:
    """Run a step outside a loop."""
    return step_if(start == 0, body, carry, xs[1], weights)


def in_loop(body: Any, carry: Any, xs: Tensor, weights: Tensor, start: Tensor) -> Any:
    """Run every second step of a loop, whose rows and constants are large."""

    def turn(carry: Any, x: Any, weights: Tensor) -> Any:
        row, number = x
        after, logs = step_if(number % 2 == 1, body, carry, row, weights)
        return after, (logs, after[2], row.sum())

    return loop(turn, carry, (xs, start + torch.arange(STEPS)), weights)


def of_views(body: Any, carry: Any, xs: Tensor, weights: Tensor, start: Tensor) -> Any:
    """Pass parts of larger tensors, and use them again after the step."""
    stacked = torch.stack((weights, 2.0 * weights, weights.T))

    def turn(carry: Any, x: Any, stacked: Tensor, xs: Tensor) -> Any:
        both = torch.cat((xs[2] * x, xs[1]))
        (large, small, count), logs = step_if(x % 2 == 1, body, carry, both[ROWS:], stacked[1])
        large, more = large + both[ROWS:].mean(), 3.0 * stacked[1]
        (large, small, count), others = step_if(x % 2 == 1, body, (large, small, count), both[:ROWS], more.T)
        return (large, small, count), (logs, others)

    return loop(turn, carry, start + torch.arange(STEPS), stacked, xs)


def transposed(body: Any, carry: Any, xs: Tensor, weights: Tensor, start: Tensor) -> Any:
    """Pass results that the compiler may store transposed."""

    def turn(carry: Any, number: Tensor, row: Tensor, weights: Tensor) -> Any:
        first = torch.exp(carry[0].T).T, torch.exp(carry[1]), carry[2]
        rows, matrix = torch.sin(row.T + number).T, torch.cos(weights.T * number).T
        return step_if(number % 2 == 1, body, first, rows, matrix)

    return loop(turn, carry, start + torch.arange(STEPS), xs[0], weights)


def shared(body: Any, carry: Any, xs: Tensor, weights: Tensor, start: Tensor) -> Any:
    """Pass the same tensors twice, in the carry and as constants, and read the old ones afterwards."""

    def turn(carry: Any, number: Tensor, row: Tensor) -> Any:
        large, small, count = carry
        (new_large, new_small, count), logs = step_if(number % 2 == 1, body, carry, row * small, large)
        return (new_large - 0.1 * large, new_small + 0.1 * small, count), (logs, new_small.sum(), small.sum())

    return loop(turn, carry, start + torch.arange(STEPS), xs[0])


def of_parts(body: Any, carry: Any, xs: Tensor, weights: Tensor, start: Tensor) -> Any:
    """Carry one vector, of which the step gets a large and a small part."""
    large, small, count = carry

    def turn(vector: Tensor, number: Tensor, row: Tensor, weights: Tensor) -> Any:
        parts = vector.split([SIZE, large.numel(), SIZE, 1, large.numel()])
        given = parts[1].reshape(large.shape), parts[2], parts[3][0].long()
        (new_large, new_small, new_count), logs = step_if(number % 2 == 1, body, given, row, weights)
        new = [2.0 * parts[0], new_large.flatten(), new_small, new_count.reshape(1).double(), parts[4] + parts[1]]
        return torch.cat(new), (logs, new_small.sum() + parts[1].sum())

    vector = torch.cat((small, large.flatten(), -small, count.reshape(1).double(), large.T.flatten()))
    return loop(turn, vector, start + torch.arange(STEPS), xs[0], weights)


def arguments() -> tuple[Any, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = (SIZE, SIZE), (SIZE, SIZE), (SIZE,), (STEPS, ROWS, SIZE)
    large, weights, small, xs = (torch.randn(shape, generator=g, dtype=torch.float64) / 10.0 for shape in shapes)
    return (large, small, torch.tensor(0)), xs, weights, torch.tensor(0)


PAIRS = [*product((once, in_loop, of_views, transposed, shared, of_parts), (descend, with_loop, swap))]
QUICK = {(once, descend), (in_loop, with_loop), (of_views, descend), (of_parts, swap)}


@needs_cpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("form", "body"), long_except(QUICK, PAIRS))
def test_a_compiled_step_equals_eager(form, body, monkeypatch):
    monkeypatch.setitem(cpu._OPTIONS, "force_disable_caches", True)
    carry, xs, weights, start = arguments()
    copies = [leaf.clone() for leaf in (*carry, xs, weights)]
    compiled = Jit(strict=True)(form, body)
    for first in (start, start + 1, start + 1):
        expected, actual = form(body, carry, xs, weights, first), compiled(carry, xs, weights, first)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    assert all(map(torch.equal, copies, (*carry, xs, weights))), "the arguments keep their values"


@needs_cpu_compiler
def test_a_step_that_captures_a_tensor_from_outside_is_refused():
    def captured(due, x, start):
        y = 2.0 * x
        return step_if(due, lambda carry: (carry + y, y.sum()), start)

    advice = r"calls step_if whose body captures a float32 tensor \[3\] from outside; pass it to step_if after carry"
    with pytest.raises(ConfigError, match=advice):
        Jit(True)(captured)(torch.tensor(True), torch.ones(3), torch.zeros(3))
    passed = Jit(True)(lambda due, x, start: step_if(due, lambda carry, y: (carry + y, y.sum()), start, 2.0 * x))
    assert passed(torch.tensor(True), torch.ones(3), torch.zeros(3))[0].tolist() == [2.0] * 3
