"""Gradients of loops in a graph equal the gradients of `ecrl.kernels.scan`, which runs in Python.

Most tests run a traced graph operation by operation. Those marked slow build C++.
"""

from functools import partial

import pytest
import torch
from support.graphs import graph_of
from torch.func import grad, grad_and_value, jacrev, vjp, vmap
from torch.nn.functional import mse_loss

from ecrl import rng
from ecrl.compile.jit import choose_form
from ecrl.compile.scan import graph_scan, scan_op
from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.kernels.scan_loop import loop
from ecrl.pytree import flatten

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.float64: {"rtol": 1e-12, "atol": 1e-12}}


def agrees(fn, *args, dtype=torch.float32):
    """Compare `fn(graph_scan, *args)` in a graph with `fn(scan, *args)`. Return the graph."""
    graph = graph_of(partial(fn, graph_scan), *args)
    expected, _ = flatten(fn(scan, *args))
    assert any(leaf.is_floating_point() and leaf.any() for leaf in expected)
    for actual, expected_leaf in zip(graph(*flatten(args)[0]), expected, strict=True):
        torch.testing.assert_close(actual, expected_leaf, **TOLERANCE[dtype])
    return graph


def uniform(seed, *shape, dtype=torch.float32):
    return rng.uniform(rng.key(seed), shape, dtype) - 0.5


def weights_of(dtype=torch.float32):
    shapes = {"in": (2, 3), "back": (3, 3), "out": (3,)}
    return {name: uniform(seed, *shape, dtype=dtype) for seed, (name, shape) in enumerate(shapes.items(), 1)}


def rows_of(length, rows=4, dtype=torch.float32):
    """Observations, targets, and the ends of episodes."""
    done = rng.uniform(rng.key(6), (length, rows)) < 0.3
    return {
        "obs": uniform(4, length, rows, 2, dtype=dtype),
        "target": uniform(5, length, rows, dtype=dtype),
        "done": done,
    }


def recurrent_loss(loop, weights, memory, batch):
    """The loss of a recurrent value function, and its last memory: as a policy's `evaluate` runs inside of PPO."""

    def step(carry, row, weights):
        memory, age = carry
        memory = torch.tanh(row["obs"] @ weights["in"] + memory @ weights["back"])
        value = memory @ weights["out"]
        end = row["done"]
        return (torch.where(end.unsqueeze(-1), 0.0, memory), torch.where(end, 0, age + 1)), (value, end, age)

    start = memory, torch.zeros(len(memory), dtype=torch.int64)
    (memory, age), (value, end, ages) = loop(step, start, batch, weights)
    return mse_loss(value, batch["target"]), (memory, age, end, ages)


def all_gradients(loop, weights, memory, obs, target, done):
    def loss(weights, memory, obs, target):
        return recurrent_loss(loop, weights, memory, {"obs": obs, "target": target, "done": done})

    return grad_and_value(loss, argnums=(0, 1, 2, 3), has_aux=True)(weights, memory, obs, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 5, 64])
def test_a_recurrent_gradient_equals_the_one_of_python(length, dtype):
    inputs = weights_of(dtype), uniform(7, 4, 3, dtype=dtype), *rows_of(length, dtype=dtype).values()
    graph = agrees(all_gradients, *inputs, dtype=dtype)
    loops = [n for n in graph.graph.nodes if n.target is scan_op]
    assert len(loops) == (
        0 if length == 1 else 2
    )  # one step needs no loop; more steps need one forward and one backward


def with_loop(weights, memory, obs, target, done):
    return all_gradients(loop, weights, memory, obs, target, done)


def minibatches(weights, memory, obs, target, done):
    """Gradient steps as in PPO: the recurrent gradient is a step of an outer loop."""

    def step(weights, row, memory):
        grads, (loss, _) = grad_and_value(partial(recurrent_loss, loop), has_aux=True)(weights, memory, row)
        return {name: w - 0.5 * grads[name] for name, w in weights.items()}, loss

    many = {
        "obs": torch.stack((obs, -obs)),
        "target": torch.stack((target, target)),
        "done": torch.stack((done, ~done)),
    }
    return loop(step, weights, many, memory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "dtype"),
    [(64, torch.float32)]
    + [
        pytest.param(*case, marks=pytest.mark.long)
        for case in [(1, torch.float32), (5, torch.float32), (64, torch.float64)]
    ],
)
def test_the_loop_of_kernels_has_this_gradient_in_cpp(length, dtype):
    inputs = weights_of(dtype), uniform(7, 4, 3, dtype=dtype), *rows_of(length, dtype=dtype).values()
    jit = choose_form("on", "cpu").jit
    for fn in (with_loop, minibatches):
        for actual, expected in zip(flatten(jit(fn)(*inputs))[0], flatten(fn(*inputs))[0], strict=True):
            torch.testing.assert_close(actual, expected, **TOLERANCE[dtype])


def total(loop, weight, start, xs):
    """A number that depends on the last carry and on every step."""
    last, y = loop(lambda c, x, w: (torch.tanh(c @ w + x), c * w.sum()), start, xs, weight)
    return last.sum() + y.square().sum()


def gradients(loop, weight, start, xs):
    return grad(partial(total, loop), (0, 1, 2))(weight, start, xs)


def nested(loop, weight, start, xs):
    def outer(c, x, weight):
        rows = torch.stack([x, x + 1.0, x * x])
        return loop(lambda c, z, w, x: (torch.tanh(c @ w + z * x), c.sum()), c, rows, weight, x)

    last, y = loop(outer, start, xs, weight)
    return last.sum() + y.square().sum()


def summed(loop, weight, start, xs):
    return vmap(partial(total, loop), (0, None, None))(weight, start, xs).square().sum()


WEIGHT, START, XS = uniform(1, 3, 3), uniform(2, 2, 3), uniform(3, 5, 2, 3)
WEIGHTS, STARTS, MANY_XS = uniform(1, 4, 3, 3), uniform(2, 4, 2, 3), uniform(3, 4, 5, 2, 3)


@pytest.mark.parametrize(
    ("dims", "inputs"),
    [
        ((0, 0, 0), (WEIGHTS, STARTS, MANY_XS)),
        ((0, None, None), (WEIGHTS, START, XS)),
        ((None, 0, None), (WEIGHT, STARTS, XS)),
        ((None, None, 0), (WEIGHT, START, MANY_XS)),
    ],
)
def test_gradients_under_vmap(dims, inputs):
    graph = agrees(lambda loop, *args: vmap(partial(gradients, loop), dims)(*args), *inputs)
    assert len([n for n in graph.graph.nodes if n.target is scan_op]) == 2


def test_gradients_through_vmap_and_both():
    agrees(lambda loop, *args: grad(partial(summed, loop), (0, 1, 2))(*args), WEIGHTS, START, XS)
    both = lambda loop, *args: vmap(grad(partial(summed, loop), (0, 1, 2)), (None, 0, None))(*args)  # noqa: E731
    agrees(both, WEIGHTS, STARTS, XS)


def test_gradients_through_a_loop_in_a_loop():
    agrees(lambda loop, *args: grad(partial(nested, loop), (0, 1, 2))(*args), WEIGHT, START, XS)


def test_other_ways_to_ask_for_a_gradient():
    def recorded(loop, weight, start, xs):
        with torch.enable_grad():
            weight = weight.detach().requires_grad_()
            return torch.autograd.grad(total(loop, weight, start, xs), weight)

    agrees(recorded, WEIGHT, START, XS)
    agrees(lambda loop, *args: vjp(partial(total, loop), *args)[1](torch.tensor(2.0)), WEIGHT, START, XS)
    states = lambda loop, start, xs: loop(lambda c, x: (torch.tanh(c + x), None), start, xs)[0]  # noqa: E731
    agrees(lambda loop, start, xs: jacrev(partial(states, loop))(start, xs), START, XS)


def counted(c, x, w, table):
    """A carry of every kind: floats that are differentiated or not, integers, bools and bytes."""
    after = {
        "h": c["h"] * w + x["o"],
        "stop": (c["stop"] + x["o"]).detach(),
        "n": c["n"] + x["n"],
        "seen": c["seen"] | (x["o"] > 0.0),
        "byte": c["byte"] + x["byte"],
        "same": c["same"],
    }
    return after, (
        c["h"] * table.index_select(0, c["n"].reshape(1) % len(table)),
        after["n"],
        after["seen"],
        c["byte"],
        x["o"],
        c["same"],
    )


def test_fields_without_gradients():
    start = {
        "h": uniform(1, 3),
        "stop": uniform(2, 3),
        "n": torch.zeros((), dtype=torch.int64),
        "seen": torch.zeros(3, dtype=torch.bool),
        "byte": torch.full((2,), 250, dtype=torch.uint8),
        "same": uniform(5, 0, 2),
    }
    xs = {"o": uniform(3, 6, 3), "n": torch.arange(6), "byte": torch.arange(12, dtype=torch.uint8).reshape(6, 2)}

    def run(loop, start, xs, w, table):
        def loss(w, h, o):
            after, ys = loop(counted, start | {"h": h}, xs | {"o": o}, w, table)
            return ys[0].square().sum() + after["stop"].sum() + ys[4].sum() + after["same"].sum(), (after, ys)

        return grad(loss, (0, 1, 2), has_aux=True)(w, start["h"], xs["o"])

    agrees(run, start, xs, uniform(4, 3), torch.tensor([1, 2, 3]))


def test_only_some_outputs_count():
    """The gradients of what does not count are left out of the backward loop, and come out as zeros."""
    body = lambda c, x, w: (c * 1.5, (x * w, c.sum()))  # noqa: E731
    last = lambda loop, w, c, x: loop(body, c, x, w)[0].sum()  # noqa: E731
    row = lambda loop, w, c, x: loop(body, c, x, w)[1][0].sum()  # noqa: E731
    for fn in (last, row):
        agrees(lambda loop, *args, fn=fn: grad(partial(fn, loop), (0, 1, 2))(*args), uniform(1, 2, 3), START, XS)


def test_a_loop_beside_the_gradient():
    def run(loop, weight, start, xs):
        counts = lambda c, x: (c + 1, c * 2)  # noqa: E731
        beside = lambda w: total(loop, w.detach(), start, xs) * w.sum()  # noqa: E731
        integers = lambda w: loop(counts, torch.zeros((), dtype=torch.int64), xs)[1].sum() * w.sum()  # noqa: E731
        no_carry = lambda w: loop(lambda c, x, w: (c, x @ w), None, xs, w)[1].square().sum()  # noqa: E731
        return [grad(fn)(weight) for fn in (beside, integers, no_carry)]

    agrees(run, WEIGHT, START, XS)


def test_noise_comes_as_rows_and_keys_as_rows_too():
    def run(loop, key, weight, start):
        def body(c, row, w):
            key, noise = row
            return torch.tanh(c @ w + noise + 0.1 * rng.normal(key, (2, 3))), None

        keys = rng.split(key, 5)
        rows = keys, rng.normal(keys, (2, 3))
        return grad(lambda w, c: loop(body, c, rows, w)[0].sum(), (0, 1))(weight, start)

    agrees(run, rng.key(3), WEIGHT, START)


def test_a_captured_constant_has_no_gradient_and_a_captured_weight_is_refused():
    def constant(loop, start, xs):
        return grad(lambda start: loop(lambda c, x: (torch.tanh(c @ WEIGHT + x), None), start, xs)[0].sum())(start)

    def captured(loop, weight, start, xs):
        def loss(weight):
            return loop(lambda c, x: (torch.tanh(c @ weight + x), None), start, xs)[0].sum()

        return grad(loss)(weight)

    agrees(constant, START, XS)
    line = captured.__code__.co_firstlineno + 2
    with pytest.raises(ConfigError, match=rf"test_scan_gradient.py:{line}, in loss, .* pass it to scan after xs"):
        graph_of(partial(captured, graph_scan), WEIGHT, START, XS)


def test_second_derivatives_are_refused_with_one_line():
    def second(loop, weight, start, xs):
        return grad(lambda weight: gradients(loop, weight, start, xs)[0].sum())(weight)

    line = total.__code__.co_firstlineno + 2
    message = rf"^trainer.compile: .*test_scan_gradient.py:{line}, in total, .* second derivatives are taken,.*$"
    with pytest.raises(ConfigError, match=message):
        graph_of(partial(second, graph_scan), WEIGHT, START, XS)
    graph_of(partial(second, scan), WEIGHT, START, XS)
