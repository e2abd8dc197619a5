"""Recurrences in C++ against plain loops: shapes, memory orders, derivatives, transforms and `torch.compile`."""

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_pure

import ecrl.compile.reverse_scan  # noqa: F401  # registers the implementation of `reverse_scan` for graphs
from ecrl.compile.jit import choose_form
from ecrl.compile.scan import graph_scan
from ecrl.compile.trace import traced
from ecrl.kernels.returns import gae as gae_kernel
from ecrl.kernels.reverse_scan import scan_time_major
from ecrl.native.library import is_available
from ecrl.native.recurrences import LARGE, can_run, gae, is_differentiated, linear_recurrence
from ecrl.pytree import flatten
from ecrl.tracing_state import tracing_graph

pytestmark = pytest.mark.skipif(not is_available("recurrences"), reason="needs a C++ compiler")

F32, F64 = torch.float32, torch.float64
ORDERS = {
    "batch-major": lambda x: x.contiguous(),
    "time-major": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "every second": lambda x: torch.stack((x, x), -1)[..., 0],
    "repeated rows": lambda x: x[:1].expand(x.shape),
}


def draw(seed, *shape, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def flags(seed, *shape, p=0.2):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < p


def loop(x, decay, cut, last, reverse=True):
    """The recurrence in Python's floats, one row after the other."""
    steps = x.shape[-1]
    rows = [t.expand(x.shape).reshape(-1, steps).tolist() for t in (x.double(), decay.double(), cut)]
    ys = []
    for x_row, decay_row, cut_row, y in zip(*rows, last.double().reshape(-1).tolist(), strict=True):
        row = [0.0] * steps
        for t in range(steps)[:: -1 if reverse else 1]:
            y = x_row[t] + (0.0 if cut_row[t] or decay_row[t] == 0.0 else decay_row[t] * y)
            row[t] = y
        ys.append(row)
    return torch.tensor(ys, dtype=F64).reshape(x.shape)


@pytest.mark.parametrize("reverse", [True, False], ids=["backwards", "forwards"])
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("varies", [False, True], ids=["one decay", "a decay per step"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (7, 100), (1030, 5), (2, 3, 20)])
def test_the_recurrence_equals_a_loop_in_every_memory_order(shape, order, varies, dtype, reverse):
    x, cut, last = draw(1, *shape, dtype=dtype), flags(2, *shape), draw(3, *shape[:-1], 1, dtype=dtype)
    decay = draw(4, *shape) if varies else torch.tensor(0.9, dtype=F64)
    x, cut = (ORDERS[order](t) for t in (x, cut))
    decay = ORDERS[order](decay) if varies else decay
    y = assert_pure(linear_recurrence, x, decay, cut, last, reverse)
    expected = loop(x, decay, cut, last, reverse)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=1e-6 if dtype == F32 else 1e-13, atol=1e-6)


@given(st.integers(1, 20), st.integers(1, 30), st.booleans(), st.integers(0, 2**32))
def test_the_recurrence_equals_a_loop_for_drawn_sizes(n, t, reverse, seed):
    x, decay, cut, last = draw(seed, n, t), draw(seed + 1, n, t), flags(seed + 2, n, t), draw(seed + 3, n, 1)
    torch.testing.assert_close(linear_recurrence(x, decay, cut, last, reverse), loop(x, decay, cut, last, reverse))


def test_float32_rows_do_not_collect_rounding_errors():
    x = torch.full((1, 1_000_000), 0.1)
    y = linear_recurrence(x, torch.tensor(1.0, dtype=F64), torch.zeros(1, 1_000_000, dtype=torch.bool), x[:, :1] * 0)
    assert abs(float(y[0, 0]) / (1_000_000 * float(x[0, 0])) - 1.0) < 1e-7


def test_the_memory_order_of_the_result_is_that_of_the_input():
    for shape in ((4, 6), (2, 3, 6)):
        x, cut = draw(1, *shape), flags(2, *shape)
        for order in ("batch-major", "time-major"):
            given = ORDERS[order](x)
            y = linear_recurrence(given, torch.tensor(0.5, dtype=F64), cut, x[..., :1])
            assert y.stride() == given.stride(), order


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0,)])
def test_empty_tensors(shape):
    x = torch.zeros(shape)
    no = torch.zeros(shape, dtype=torch.bool)
    assert linear_recurrence(x, torch.tensor(0.5).double(), no, torch.zeros(*shape[:-1], 1)).shape == shape
    assert gae(x, x, x, no, no, *[torch.tensor(0.5).double()] * 2)[0].shape == shape


def test_what_is_left_out_may_be_infinite():
    x, last = torch.tensor([[1.0, inf, 2.0, nan]]), torch.tensor([[5.0]])
    cut = torch.tensor([[True, False, True, False]])
    zero, half = torch.tensor(0.0).double(), torch.tensor(0.5).double()
    assert linear_recurrence(x, half, cut, last)[0].tolist()[:3] == [1.0, inf, 2.0]
    assert linear_recurrence(x[:, :3], zero, ~cut[:, :3], last)[0].tolist() == [1.0, inf, 2.0]
    decay = torch.tensor([[0.0, 0.5, 0.0]]).double()
    assert linear_recurrence(x[:, :3], decay, ~cut[:, :3], last)[0].tolist() == [1.0, inf, 2.0]


def case(shape, varies):
    x, last = draw(1, *shape).requires_grad_(), draw(2, *shape[:-1], 1).requires_grad_()
    decay = (draw(3, *shape) if varies else torch.tensor(0.9, dtype=F64)).requires_grad_()
    return (x, decay, last), flags(4, *shape)


@pytest.mark.parametrize("reverse", [True, False], ids=["backwards", "forwards"])
@pytest.mark.parametrize("varies", [False, True], ids=["one decay", "a decay per step"])
@pytest.mark.parametrize("shape", [(5,), (2, 4), (2, 2, 3)])
def test_derivatives_of_both_modes_and_orders(shape, varies, reverse):
    inputs, cut = case(shape, varies)

    def fn(x, decay, last):
        return linear_recurrence(x, decay, cut, last, reverse)

    assert torch.autograd.gradcheck(fn, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(fn, inputs, check_fwd_over_rev=True)


def test_a_decay_of_zero_and_a_cut_get_no_gradient():
    x, last = draw(1, 1, 3).requires_grad_(), draw(2, 1, 1)
    decay = torch.tensor([[0.0, 0.5, 0.5]], dtype=F64).requires_grad_()
    linear_recurrence(x, decay, torch.tensor([[False, True, False]]), last).sum().backward()
    assert decay.grad is not None and decay.grad[0, :2].tolist() == [0.0, 0.0] and decay.grad[0, 2] == last[0, 0]


def definition(x, decay, cut, last):
    decay = decay.movedim(-1, 0) if decay.ndim else decay
    return scan_time_major(x.movedim(-1, 0), decay, cut.movedim(-1, 0), last[..., 0]).movedim(0, -1)


@pytest.mark.parametrize("varies", [False, True], ids=["one decay", "a decay per step"])
def test_every_transform_of_torch_func(varies):
    (x, decay, last), cut = case((2, 4), varies)
    x, decay, last = x.detach(), decay.detach(), last.detach()

    def results(recurrence):
        def loss(x, decay):
            return recurrence(x, decay, cut, last).square().sum()

        many, decays = torch.stack((x, 2.0 * x)), torch.stack((decay, 0.5 * decay))
        yield torch.func.vmap(torch.func.grad(loss), (0, None))(many, decay)
        yield torch.func.vmap(torch.func.grad(loss), (None, 0))(x, decays)
        yield torch.func.vmap(torch.func.vmap(lambda x, d: recurrence(x, d, cut[0], last[0]), (0, None)), (0, None))(
            many, decay[0] if varies else decay
        )
        yield torch.func.hessian(loss)(x, decay)
        yield torch.func.hessian(loss, argnums=1)(x, decay)
        yield torch.func.jvp(lambda x: loss(x, decay), (x,), (x,))[1]
        yield torch.func.jacfwd(lambda d: recurrence(x, d, cut, last))(decay)

    for actual, expected in zip(results(linear_recurrence), results(definition), strict=True):
        torch.testing.assert_close(actual, expected)


def test_forward_mode_within_forward_mode_runs_the_definition():
    """torch differentiates an `autograd.Function` wrongly there."""
    reward, value = draw(1, 3, 4), draw(2, 3, 4)
    terminated, done = flags(3, 3, 4), flags(3, 3, 4)

    def loss(gamma):
        result = gae_kernel(reward, value, value, terminated, done, gamma=gamma, gae_lambda=0.8)
        return result.advantage.square().sum()

    gamma = torch.tensor(0.9, dtype=F64)
    twice = torch.func.jacfwd(torch.func.jacfwd(loss))(gamma)
    torch.testing.assert_close(twice, torch.func.jacrev(torch.func.jacrev(loss))(gamma))
    torch.testing.assert_close(twice, torch.func.jacfwd(torch.func.jacrev(loss))(gamma))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_flow_out_of_vmap(backend):
    """Inside vmap, a tensor does not show that it requires a gradient."""
    value, next_value = draw(1, 2, 6), draw(2, 2, 6)
    terminated, done = flags(3, 2, 6), flags(3, 2, 6)

    def advantage(reward):
        return gae_kernel(reward, value, next_value, terminated, done, gamma=0.9, gae_lambda=0.8).advantage

    torch._dynamo.reset()
    many = torch.func.vmap(advantage, in_dims=1)
    many = many if backend is None else torch.compile(many, fullgraph=True, backend=backend)
    reward = draw(4, 2, 3, 6).requires_grad_()
    (actual,) = torch.autograd.grad(many(reward).square().sum(), reward)
    for i in range(3):
        one = reward.detach()[:, i].requires_grad_()
        (expected,) = torch.autograd.grad(advantage(one).square().sum(), one)
        torch.testing.assert_close(actual[:, i], expected)


@pytest.mark.parametrize("varies", [False, True], ids=["one decay", "a decay per step"])
def test_gae_under_vmap_has_a_discount_per_seed(varies):
    reward, value, next_value = draw(1, 3, 2, 6)
    terminated, done = flags(2, 2, 6), flags(3, 2, 6)
    gamma = draw(4, 5, 2, 6).abs() if varies else draw(4, 5).abs()
    both = torch.func.vmap(lambda g: gae(reward, value, next_value, terminated, done, g, 0.5 * g))(gamma)
    for seed in range(5):
        one = gae(reward, value, next_value, terminated, done, gamma[seed], 0.5 * gamma[seed])
        assert all(torch.equal(a[seed], b) for a, b in zip(both, one, strict=True))


def test_torch_compile_calls_the_operators_once(monkeypatch):
    """The operators run forwards, backwards and under vmap. Under other transforms, the definition runs."""
    (x, decay, last), cut = case((3, 5), False)
    terminated, graphs = flags(5, 3, 5), []

    def backend(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph

    def compiled(fn, *args):
        torch._dynamo.reset()
        graphs.clear()
        result = torch.compile(fn, fullgraph=True, backend=backend)(*args)
        torch.testing.assert_close(result, fn(*args))
        return any("ecrl" in target for graph in graphs for target in graph)

    values = [draw(i, 3, 5) for i in range(3)]

    def advantage(reward, value, next_value):
        return gae_kernel(reward, value, next_value, terminated, cut, gamma=0.9, gae_lambda=0.8).advantage

    assert compiled(advantage, *values)
    assert compiled(torch.func.vmap(advantage), *(value.unsqueeze(0) for value in values))
    assert not compiled(torch.func.grad(lambda r, v, n: advantage(r, v, n).sum()), *values)
    assert not compiled(lambda r, v, n: torch.func.jvp(lambda r: advantage(r, v, n), (r,), (r,))[1], *values)
    torch._dynamo.reset()
    expected = torch.autograd.grad(linear_recurrence(x, decay, cut, last).square().sum(), (x, decay, last))
    loss = torch.compile(
        lambda x, decay, last: linear_recurrence(x, decay, cut, last).square().sum(),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(torch.autograd.grad(loss(x, decay, last), (x, decay, last)), expected)


def test_the_operators_take_float32_and_float64_on_the_cpu_and_in_a_graph_only_large_tensors():
    one, large = torch.ones(2), torch.ones(LARGE)
    assert can_run(one, one) and can_run(one.double())
    assert not can_run(one.half()) and not can_run(one, one.double()) and not can_run(one.to("meta"))
    with tracing_graph():
        assert not can_run(one) and can_run(large) and not can_run(large.requires_grad_())


def _operators(fn, *args):
    """Return the names of ecrl's operators in the graph of a function."""
    leaves, structure = flatten(args)
    return {str(node.target) for node in traced(fn, structure, leaves)[0].graph.nodes if "ecrl." in str(node.target)}


def test_a_graph_of_ecrl_computes_gae_of_large_tensors_in_one_pass():
    values = [draw(i, LARGE // 128, 128, dtype=F32) for i in range(3)]

    def advantage(reward, value, next_value):
        cut = value < -1.0
        return gae_kernel(reward, value, next_value, cut, cut, gamma=0.9, gae_lambda=0.8).advantage

    def gradient(*values):
        return torch.func.grad(lambda reward: advantage(reward, *values[1:]).square().sum())(values[0])

    def add_advantage(total, _, *others):
        return total + advantage(total, *others), total

    def in_a_loop(reward, *others):
        return graph_scan(add_advantage, reward, torch.zeros(2), *others)

    assert _operators(advantage, *values) == {"ecrl.gae.default"}
    assert _operators(advantage, *(x[:, :127] for x in values)) == {"ecrl.cpu_reverse_scan.default"}
    assert not _operators(gradient, *values)
    batched = torch.func.vmap(advantage)
    for fn in advantage, in_a_loop, lambda *values: batched(*(torch.stack((x, 2 * x)) for x in values)):
        torch.testing.assert_close(choose_form("on", "cpu").jit(fn)(*values), fn(*values), rtol=2e-5, atol=2e-5)


def test_derivatives_are_noticed():
    x = torch.ones(2)
    assert not is_differentiated(x, 0.5) and is_differentiated(x, torch.ones(2, requires_grad=True))
    with torch.no_grad():
        assert not is_differentiated(torch.ones(2, requires_grad=True))
    seen = []
    torch.func.grad(lambda x: seen.append(is_differentiated(0.5)) or x)(torch.tensor(1.0))
    torch.func.vmap(lambda x: seen.append(is_differentiated(x)) or x)(x)
    with torch.no_grad():
        torch.func.vmap(lambda x: seen.append(is_differentiated(x)) or x)(x)
    torch.func.jvp(lambda x: seen.append(is_differentiated(x)) or x, (x,), (x,))
    assert seen == [True, True, False, True]
