"""Compiled functions return the numbers of eager functions, or refuse.

Most tests run a traced graph operation by operation. Those marked slow build C++.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from support.graphs import graph_of
from tensordict import TensorDict

import ecrl
from ecrl import rng
from ecrl.compile.jit import _compiled, choose_form
from ecrl.compile.scan import graph_scan
from ecrl.compile.trace import captured, traced
from ecrl.config import config_from_dict
from ecrl.envs.core import Env, state_of, time_limit
from ecrl.errors import ConfigError
from ecrl.kernels import kl_k3, scan
from ecrl.pytree import flatten, mapped
from ecrl.spaces import box


class Traced(NamedTuple):
    """A compiled `jit`, and the graphs that it traced."""

    jit: Any
    made: list


@pytest.fixture
def form(monkeypatch):
    """Compile to graphs that run operation by operation, without building C++."""
    made = []

    def trace(*args):
        graph, out = traced(*args)
        made.append(graph)
        return graph, out, captured(graph)

    monkeypatch.setattr("ecrl.compile.jit._compiler_for", lambda leaves: trace)
    _compiled.cache_clear()
    yield Traced(choose_form("on", "cpu").jit, made)
    _compiled.cache_clear()


def sum_and_difference(x, y):
    return x + 2.0 * y, x - y


def test_a_repeated_tensor_is_two_inputs(form):
    a, b = torch.tensor([10.0]), torch.tensor([-1.0])
    jitted = form.jit(sum_and_difference)
    assert [x.tolist() for x in jitted(a, a)] == [[30.0], [0.0]]
    assert [x.tolist() for x in jitted(a, b)] == [[8.0], [11.0]]
    assert [x.tolist() for x in jitted(b, a)] == [[19.0], [-11.0]]


class NoSettings(BaseModel):
    """Configuration of an environment without any."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def particle():
    """Environment of a particle with constant velocity, whose reset returns one tensor under two names."""

    def reset(keys):
        q = rng.normal(keys, (2,))
        return state_of(q, keys.shape, q=q, last=q)

    def step(state, action, noise):
        q = 2.0 * state["q"] - state["last"] + 0.01 * action
        no = torch.zeros_like(state["terminated"])
        reward = (q - state["q"]).square().sum(-1)
        after = {"q": q, "last": state["q"], "obs": q, "reward": reward, "terminated": no, "truncated": no.clone()}
        return state.copy().update(after)

    return time_limit(
        Env(reset, step, box(-9.0, 9.0, 2), box(-1.0, 1.0, 2)), 200
    )  # more steps than are evaluated in one call


def test_an_environment_that_resets_to_one_tensor_under_two_names(form):
    @ecrl.register_env("particle_of_one_place", override=True)
    def _(cfg: NoSettings) -> Env:
        return particle()

    network = {"network_cfg": {"hidden_sizes": [4]}}
    returns = []
    for mode in ("on", "off"):
        cfg = config_from_dict(
            {
                "trainer": {"buffer_size": 4, "iterations": 2, "num_envs": 2, "compile": mode},
                "env": {"name": "particle_of_one_place"},
                "policy": {"name": "actor_critic", "actor": network, "critic": network},
                "algorithm": {"name": "ppo", "cfg": {"n_epochs": 1, "batch_size": 8}},
            }
        )
        returns.append(ecrl.evaluate(ecrl.init_state(cfg), cfg, num_episodes=3))
    assert returns[0] == pytest.approx(returns[1], rel=1e-4)


ZEROS = torch.zeros(1000)
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


def uniform(*shape):
    """The same numbers between 0 and 1 in every run of the tests."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def test_random_numbers_drawn_twice_differ():
    def differences(x):  # the draws from the global generator are what is tested
        return torch.randn_like(x) - torch.randn_like(x), torch.rand(1000) - torch.rand(1000)

    for difference in graph_of(differences, ZEROS)(ZEROS):
        assert int((difference != 0.0).sum()) > 900


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    ("m", "k", "n"), [(4, 50, 64), (64, 50, 4), (50, 4, 64)], ids=["few rows", "few columns", "few terms"]
)
def test_products_of_integers_keep_their_dtype(dtype, m, k, n):
    a, b = torch.arange(m * k).reshape(m, k) % 7, torch.arange(k * n).reshape(n, k).t() % 5
    expected = (a.double() @ b.double()).long().to(dtype)  # it wraps around
    for first, second in ((a, b), (a, b.contiguous()), (a.t().contiguous().t(), b.contiguous())):
        inputs = first.to(dtype), second.to(dtype)
        (actual,) = graph_of(torch.mm, *inputs)(*inputs)
        assert actual.dtype == dtype
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(4, 3), torch.ones(5, 64)),
        (torch.ones(4, 3), torch.ones(3, 64, dtype=torch.float64)),
        (torch.ones(2, 40, 30), torch.ones(2, 31, 40)),
        (torch.ones(2, 40, 30), torch.ones(3, 30, 40)),
    ],
)
def test_products_that_do_not_fit_are_refused(a, b):
    product = torch.mm if a.ndim == 2 else torch.bmm
    with pytest.raises(RuntimeError):
        product(a, b)
    with pytest.raises(RuntimeError):
        graph_of(product, a, b)


FUNCTIONS = {
    "tanh": torch.tanh,
    "erf": torch.erf,
    "expm1": torch.expm1,
    "atanh": torch.atanh,
    "elu": torch.nn.functional.elu,
}


@pytest.mark.slow
def test_functions_are_right_for_every_magnitude():
    size = torch.logspace(-37.9, 38, 4099, dtype=torch.float64)  # the normal numbers of float32
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-42, 1e-9] * 8)
    x = torch.cat((size.float(), -size.float(), special))
    values, ratios, divergence = choose_form("on", "cpu").jit(_functions)(x)
    for name, fn in FUNCTIONS.items():
        expected, actual = fn(x.double()).float(), values[name]
        torch.testing.assert_close(
            actual, expected, rtol=5e-7, atol=0.0, equal_nan=True, msg=lambda m, n=name: f"{n} {m}"
        )
        assert actual[-4:-2].signbit().tolist() == [False, True], name  # of 0.0 and -0.0
        torch.testing.assert_close(ratios[name][-1], x[-1] / expected[-1])
    assert float(values["tanh"].nan_to_num(0.0).abs().max()) == float(values["erf"].nan_to_num(0.0).abs().max()) == 1.0
    assert (divergence[x.isfinite()] >= 0.0).all()


def _functions(x):
    values = {name: fn(x) for name, fn in FUNCTIONS.items()}
    return values, {name: x / value for name, value in values.items()}, kl_k3(x, torch.zeros_like(x))


def _add_to(x):
    x.add_(1.0)
    return x * 2.0


def _assign(x):
    x[0] = 1.0
    return x * 2.0


def _add_to_a_view(x):
    x.view(-1)[1:].mul_(2.0)
    return x * 2.0


def _add_to_two(x):
    torch._foreach_add_([x.clone(), x], 1.0)
    return x


def _update(x):
    TensorDict({"x": x}).update_({"x": x + 1.0})
    return x


def _add_to_table(x):
    TABLE.add_(1.0)
    return x + TABLE


def _carry(c, x):
    c.add_(x)
    return c, c * 2.0


def _row(c, x):
    x.mul_(2.0)
    return c + x, x


def _constant(c, x, k):
    k.mul_(2.0)
    return c + x * k, x


TABLE = torch.zeros(3)
WRITES = [_add_to, _assign, _add_to_a_view, _add_to_two, _update]


@pytest.mark.parametrize("fn", [*WRITES, _add_to_table])
def test_a_write_in_place_on_an_argument_is_refused_with_its_line(fn):
    x, owner = torch.zeros(3), "captured from outside of the function" if fn is _add_to_table else "that is an argument"
    at = rf"test_compiled_equals_eager.py:{fn.__code__.co_firstlineno + 1}, in {fn.__name__}, writes in place"
    with pytest.raises(ConfigError, match=rf"trainer.compile: .*{at} .* float32 tensor \[\d?\] {owner}"):
        graph_of(fn, x)
    if fn not in (_add_to_two, _update):  # torch has no rule for these under vmap
        with pytest.raises(ConfigError, match=at):
            graph_of(torch.func.vmap(fn), torch.zeros(2, 3))
    assert x.tolist() == TABLE.tolist() == [0.0, 0.0, 0.0]


def _set_key(c):
    c["x"] = c["x"] + 1.0
    return c


def _delete_key(c):
    del c["x"]
    return c


def _update_nested(c):
    c["inner"].update({"new": c["x"]})
    return c


def _set_and_forget(c):
    c["x"] = c["x"] + 1.0
    return c["x"].clone()


def _set_data(c):
    c["x"].data = c["x"] + 1.0
    return c


def _set_on_a_copy(c):
    c, inner = c.copy(), c["inner"].copy()
    inner["new"], c["inner"] = c["x"], inner
    c["x"] = c["x"] + 1.0
    return c


NEW_KEYS = [_set_key, _delete_key, _update_nested, _set_and_forget]
KEYED = TensorDict({"x": torch.zeros(2, 3), "inner": {"y": torch.ones(2)}}, [2])


@pytest.mark.parametrize("fn", [*NEW_KEYS, _set_data])
@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("of", ["TensorDict", "dict"])
def test_a_new_key_of_an_argument_is_refused_with_its_line(fn, in_loop, of):
    line = fn.__code__.co_firstlineno + (of == "TensorDict" and fn is not _set_data)  # otherwise the function's
    change = "sets or removes an entry of a TensorDict, dictionary or list"
    what = "replaces the data of a tensor" if fn is _set_data else change
    inputs = KEYED.clone() if of == "TensorDict" else KEYED.to_dict()

    def body(n, row):
        return n + 1.0, fn(row)

    def loop(rows):
        return graph_scan(body, torch.zeros(()), rows)

    name = fn.__name__
    if in_loop and line == fn.__code__.co_firstlineno:
        line, name = body.__code__.co_firstlineno, "body"
    at = rf"trainer.compile: .*test_compiled_equals_eager.py:{line}, in {name}, {what} that is an argument"
    with pytest.raises(ConfigError, match=at):
        graph_of(loop if in_loop else fn, inputs)


def test_keys_of_copies_may_be_set():
    graph = graph_of(_set_on_a_copy, KEYED)
    leaves, _ = flatten(KEYED)
    expected, _ = flatten(_set_on_a_copy(KEYED.copy()))
    assert [torch.equal(a, b) for a, b in zip(graph(*leaves), expected, strict=True)] == [True] * 3


@pytest.mark.parametrize("body", [_carry, _row, _constant])
@pytest.mark.parametrize("batched", [False, True])
def test_a_write_in_place_in_a_loop_is_refused_with_its_line(body, batched):
    def run(x, xs, k):
        return graph_scan(body, x + 0.0, xs + 0.0, *([k + 0.0] if body is _constant else []))

    at = rf"test_compiled_equals_eager.py:{body.__code__.co_firstlineno + 1}, in {body.__name__}, writes in place"
    inputs = torch.zeros(3), torch.ones(4, 3), torch.ones(3)
    if batched:
        run, inputs = torch.func.vmap(run), tuple(torch.stack((x, x)) for x in inputs)
    with pytest.raises(ConfigError, match=at):
        graph_of(run, *inputs)


def test_a_function_may_write_on_what_it_made():
    def run(x, xs):
        y = x.clone().add_(1.0)
        y[0] = 5.0

        def body(c, x):
            made = c + x
            made[1] = 7.0
            return made.mul_(2.0), made.clone()

        return graph_scan(body, y, xs)[0]

    x, xs = torch.zeros(3), torch.ones(2, 3)
    assert graph_of(run, x, xs)(x, xs)[0].tolist() == [26.0, 14.0, 10.0]  # ((5 + 1) * 2 + 1) * 2, and so on
    assert x.tolist() == [0.0, 0.0, 0.0]


def _windows(x, size, step=1):
    return x.unfold(0, size, step)


OVERLAPPING = [
    _windows(torch.arange(6.0), 3),
    _windows(torch.arange(9.0), 3, 2),
    torch.arange(4.0).expand(3, 4),
    torch.arange(8.0).as_strided((2, 3, 2), (1, 2, 1)),
    torch.zeros(0).as_strided((4, 0), (1, 1)),
]


@pytest.mark.parametrize("first", OVERLAPPING, ids=lambda x: f"strides {list(x.stride())}")
def test_elements_that_share_memory_are_copied(form, first):
    jitted = form.jit(_twice)
    other = torch.arange(float(first.numel())).reshape(first.shape)
    for x in (first, other, other.mT.contiguous().mT, first):
        before = x.clone()
        assert torch.equal(jitted(x), 2.0 * x) and torch.equal(x, before)
    assert len(form.made) == 1


def _twice(x):
    return x * 2.0


def _filled(static, x):
    (value,) = static
    return torch.full((2,), value), torch.copysign(x, torch.tensor(value, dtype=torch.float32))


class Size(NamedTuple):
    value: float


@dataclass(frozen=True)
class Scale:
    value: float

    def __iter__(self):
        return iter((self.value,))


@pytest.mark.parametrize("kind", [lambda x: (x,), Size, Scale], ids=["tuple", "named tuple", "dataclass"])
@pytest.mark.parametrize("static", [True, False])
def test_equal_numbers_of_other_types_or_signs_are_other_graphs(form, kind, static):
    x = torch.ones(3)
    for value in (2, 2.0, 1, True, 0.0, -0.0, 0):
        inputs = kind(value)
        jitted = form.jit(_filled, inputs) if static else form.jit(_filled)
        filled, signed = jitted(x) if static else jitted(inputs, x)
        expected = torch.full((2,), value)
        assert filled.dtype == expected.dtype and torch.equal(filled, expected)
        assert signed.signbit().all() == expected.signbit().all(), value
    assert len(form.made) == 7


def test_a_static_nan_is_one_graph(form):
    for _ in range(2):
        assert form.jit(_filled, (float("nan"),))(torch.ones(3))[0].isnan().all()
    assert len(form.made) == 1


def _with_constants(x):
    return x + torch.zeros(3), torch.full((2,), 0.1), torch.tensor([0.1] * 3)


def test_the_default_dtype_is_part_of_the_key(form):
    jitted, x = form.jit(_with_constants), torch.ones(3)
    assert [y.dtype for y in jitted(x)] == [torch.float32] * 3
    torch.set_default_dtype(torch.float64)
    try:
        assert [y.dtype for y in jitted(x)] == [torch.float64] * 3
    finally:
        torch.set_default_dtype(torch.float32)
    assert [y.dtype for y in jitted(x)] == [torch.float32] * 3
    assert (
        form.jit.compilations[-1].text
        == "_with_constants: the number of threads, the default dtype or autocast differs"
    )
    assert len(form.made) == 2


def _products(loop, x, xs):
    square = x @ x
    total, rows = loop(lambda c, row, x: (c + (row @ x).float(), row @ x), torch.zeros(40, 40), xs, x)
    return square, total, rows, x.exp()


def autocast_agrees(jitted, inputs):
    """Compare with the eager function before, inside and after autocast."""
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for actual, expected in zip(jitted(*inputs), _products(scan, *inputs), strict=True):
                assert actual.dtype == expected.dtype
                torch.testing.assert_close(actual, expected, rtol=2e-2 if enabled else 1e-5, atol=1e-2)


def test_autocast_is_part_of_the_key(form):
    inputs = uniform(40, 40), uniform(3, 40, 40)
    autocast_agrees(form.jit(_products, graph_scan), inputs)
    assert len(form.made) == 2


@pytest.mark.slow
def test_autocast_is_the_same_in_cpp():
    form, inputs = choose_form("on", "cpu"), (uniform(40, 40), uniform(3, 40, 40))
    autocast_agrees(form.jit(_products, form.scan), inputs)


LEVEL, WIDE = torch.tensor(1.0), torch.ones(20)


def _levels(loop, x, xs):
    inside, _ = loop(lambda c, row: (c + row * LEVEL * WIDE, None), x, xs)
    return x * LEVEL, x * WIDE, inside


def captured_agree(jitted):
    """Compare with the eager function before and after a write on each captured tensor."""
    x, xs = torch.full((20,), 2.0), torch.ones(3, 20)
    try:
        for level, width in ((1.0, 1.0), (5.0, 1.0), (5.0, 3.0)):
            LEVEL.fill_(level), WIDE.fill_(width)
            expected = [2.0 * level, 2.0 * width, 2.0 + 3.0 * level * width]
            assert [float(y[7]) for y in jitted(x, xs)] == expected
            assert [float(y[7]) for y in jitted(x, xs)] == expected
    finally:
        LEVEL.fill_(1.0), WIDE.fill_(1.0)


def test_a_captured_tensor_that_changes_in_place_is_compiled_again(form):
    captured_agree(form.jit(_levels, graph_scan))
    texts = [compilation.text for compilation in form.jit.compilations]
    assert texts[-2:] == ["_levels: a captured tensor was changed in place"] * 2
    assert len(form.made) == 3


@pytest.mark.slow
def test_a_captured_tensor_has_its_last_value_in_cpp():
    form = choose_form("on", "cpu")
    captured_agree(form.jit(_levels, form.scan))


def _grows(c, x):
    return {"x": c["x"] + x, "env": {"n": (c["env"]["n"] * 2).long()}}, None


def _widens(c, x):
    return c.unsqueeze(0), None


def _more(c, x):
    return {"x": c["x"] + x, "env": {}}, None


CARRY = {"x": torch.zeros(4), "env": {"n": torch.full((4,), 0.75)}}


@pytest.mark.parametrize(
    ("body", "carry", "message"),
    [
        (_grows, CARRY, r"carry field 'env.n' was float32 \[4\], but body returned int64 \[4\]"),
        (_widens, torch.zeros(4), r"the carry was float32 \[4\], but body returned float32 \[1, 4\]"),
        (_more, CARRY, "the carry changed its structure"),
    ],
)
def test_a_carry_that_changes_is_refused_compiled_and_eager(body, carry, message):
    xs = torch.ones(6, 4)
    with pytest.raises(ValueError, match=message):
        scan(body, carry, xs)
    with pytest.raises(ValueError, match=message):
        graph_of(lambda xs: graph_scan(body, carry, xs), xs)
    many = mapped(lambda x: x.expand(3, *x.shape), carry)
    for loop in (scan, graph_scan):
        with pytest.raises(ValueError, match=message):
            graph_of(torch.func.vmap(lambda carry, xs, loop=loop: loop(body, carry, xs), (0, None)), many, xs)


def test_a_loop_takes_captured_tensors_as_carry_rows_and_constants():
    def run(x):
        return graph_scan(lambda c, row, k: (c + row * k, None), WIDE, torch.ones(3, 20), WIDE)[0] * x

    assert graph_of(run, torch.ones(20))(torch.ones(20))[0].tolist() == [4.0] * 20


def _transposed(loop, x, y, xs):
    """The first is transposed by each step, the second from the beginning, the third twice."""

    def body(c, row):
        x, y, z = c
        return ((x + row).t(), y * 2.0 + row, (z.t() * row[0, 0]).t()), (x.sum(0), y.t(), z)

    return loop(body, (x, y.t(), y), xs)


def transposed_inputs(size):
    x, xs = torch.arange(size * size).reshape(size, size).float(), torch.arange(1.0, 4.0).reshape(3, 1, 1)
    return x, x.flip(0) / 7.0, xs.expand(3, size, size).contiguous()


@pytest.mark.parametrize("size", [1, 3, 70])  # 70: each has a separate buffer
def test_a_transposed_carry_is_right(size):
    inputs = transposed_inputs(size)
    actual, expected = graph_of(partial(_transposed, graph_scan), *inputs)(*inputs), _transposed(scan, *inputs)
    torch.testing.assert_close(actual, flatten(expected)[0])


def test_a_carry_with_gaps_or_of_one_number_is_right():
    def run(loop, x, one, xs):
        start = (one.expand(70, 70), x[:, :70], x[:1, :70].t())
        return loop(lambda c, row: (tuple((y * 2.0 + row).mT.clone().mT for y in c), None), start, xs)[0]

    inputs = uniform(70, 80), torch.tensor(1.5), uniform(3, 1, 1)
    result = graph_of(partial(run, graph_scan), *inputs)(*inputs)
    torch.testing.assert_close(result, list(run(scan, *inputs)))


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 70])
def test_a_transposed_carry_is_right_in_cpp(size):
    form, inputs = choose_form("on", "cpu"), transposed_inputs(size)
    torch.testing.assert_close(form.jit(_transposed, form.scan)(*inputs), _transposed(scan, *inputs))


def _parts_of_a_vector(loop, small, big, xs):
    """The carry is two parts of one vector, like the weights of a network. Code after the loop reads all results."""

    def body(c, x):
        small, big = c
        after = torch.cat([small, big.flatten()]) * 0.5 + x
        small, big = after.split([len(small), big.numel()])
        return (small, big.reshape(c[1].shape).clone()), (after[1:].clone(), x)

    (small, big), (rows, _) = loop(body, (small, big), xs)
    return small.clone(), big.clone(), big.sum(0), big * 2.0, rows + 1.0


@pytest.mark.slow
def test_code_after_a_loop_reads_its_results_in_cpp():
    form, inputs = choose_form("on", "cpu"), (uniform(600), uniform(96, 96), uniform(3))
    actual = form.jit(_parts_of_a_vector, form.scan)(*inputs)
    torch.testing.assert_close(actual, _parts_of_a_vector(scan, *inputs))


def test_a_number_that_many_elements_read_is_stored_and_a_view_is_not():
    def scaled(rate, count, pair, x):
        return x * (2.0 * rate).exp() + pair[:, 1:2] * x - count.float() * x

    numbers = torch.tensor(0.5), torch.tensor(3)
    leaves, structure = flatten((*numbers, torch.ones(4, 2), torch.ones(4, 64)))
    graph = traced(scaled, structure, leaves)[0].graph
    stored = graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    assert [node.args[0].target for node in stored] == [torch.ops.aten.exp.default, torch.ops.aten._to_copy.default]


@pytest.mark.slow
def test_views_that_many_elements_read_are_right():
    """Columns of a small tensor, as in the gradient of a narrow last layer."""

    def outer(a, b):
        a = a * 2.0
        return a[:, :1] * b[0] + a[:, 1:2] * b[1]

    a, b = torch.linspace(-1.0, 1.0, 8).reshape(4, 2), torch.linspace(0.0, 3.0, 128).reshape(2, 64)
    torch.testing.assert_close(choose_form("on", "cpu").jit(outer)(a, b), outer(a, b))
