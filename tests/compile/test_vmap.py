"""Compiled functions and loops under `torch.func.vmap`: one call for the batch, equal to single calls."""

from typing import Any

import pytest
import torch
from support.checks import close
from support.graphs import graph_of
from support.long_cases import long_except
from support.small_runs import small
from tensordict import TensorDict

from ecrl import rng
from ecrl.compile.cpu_matmul import bmm
from ecrl.compile.jit import choose_form
from ecrl.compile.scan import graph_scan, scan_op
from ecrl.compile.vmap import outside_vmap
from ecrl.kernels import scan
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.pytree import flatten

vmap = torch.func.vmap


def _calls(graph, target):
    return [node for node in graph.graph.nodes if node.target is target]


def _totals(loop, start, xs, rate):
    """Two nested loops; only some of their carries and outputs depend on all inputs."""

    def step(carry, x, rate):
        inner, _ = loop(lambda c, row, k: (c + k * row, ()), x["a"].sum(), x["a"], rate)
        after = {"sum": carry["sum"] + inner, "steps": carry["steps"] + 1}
        return after, TensorDict({"seen": carry["sum"], "b": x["b"] * 2.0}, [])

    return loop(step, {"sum": start, "steps": torch.zeros((), dtype=torch.int64)}, xs, rate)


def _inputs():
    start, rate = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -0.5])
    xs = TensorDict({"a": torch.arange(24.0).reshape(2, 4, 3).sin(), "b": torch.arange(8.0).reshape(2, 4)}, [2, 4])
    return start, xs, rate


@pytest.mark.parametrize("batched", [(0, 0, 0), (None, 0, None), (None, None, 0), (0, None, None)])
def test_a_loop_under_vmap_is_one_loop(batched):
    inputs = [x if dim == 0 else x[0] for x, dim in zip(_inputs(), batched, strict=True)]
    many = vmap(lambda *args: flatten(_totals(graph_scan, *args))[0], batched)
    graph = graph_of(many, *inputs)
    assert len(_calls(graph, scan_op)) == 1
    result = graph(*flatten(inputs)[0])
    for i in range(2):
        single, _ = flatten(_totals(scan, *[x[i] if dim == 0 else x for x, dim in zip(inputs, batched, strict=True)]))
        torch.testing.assert_close([leaf[i] for leaf in result], single)


def test_a_loop_under_two_vmaps():
    start, xs, rate = _inputs()
    many = vmap(
        vmap(lambda *args: flatten(_totals(graph_scan, *args))[0][0], (0, None, None)), (None, 0, 0), out_dims=1
    )
    (actual,) = graph_of(many, start, xs, rate)(*flatten((start, xs, rate))[0])
    expected = [[_totals(scan, s, x, r)[0]["steps"] for x, r in zip(xs, rate, strict=True)] for s in start]
    assert actual.tolist() == [[int(n) for n in row] for row in expected]


def test_a_carry_that_changes_its_structure_under_vmap_is_refused():
    with pytest.raises(ValueError, match="the carry changed its structure"):
        graph_of(vmap(lambda x: graph_scan(lambda c, x: (c | {"new": x}, x), {"a": x[0]}, x)[1]), torch.ones(2, 3))


def test_no_loop_is_given_a_view_that_changes_nothing():
    """Inductor would free it after the first turn."""

    def fn(x, k):
        return graph_scan(lambda c, x, k: (c + x * k.sum(), c), x[0].permute(0), x, k.permute(0, 1))

    (loop,) = _calls(graph_of(fn, torch.ones(3, 2), torch.ones(70, 70)), scan_op)
    assert [node.op for node in loop.args[-1]] == ["placeholder"]


def test_a_loop_reads_rows_without_gaps():
    """Inductor copies a whole tensor with gaps in each iteration of a loop, if the body reads it in another order."""

    def fn(x):
        return graph_scan(lambda c, x: (c + x, c), torch.zeros_like(x[0]), x)[1]

    memory = torch.arange(5 * 3 * 7.0).reshape(3, 7, 5)
    for x in (memory[:, :6].permute(1, 0, 2), memory[:, :, ::2].permute(1, 0, 2), memory.permute(1, 0, 2)):
        graph = graph_of(fn, x)
        (loop,) = _calls(graph, scan_op)
        (rows,) = (node.meta["val"] for node in loop.args[2])
        assert rows.stride() == torch.empty_like(rows, device="meta").stride()
        assert torch.equal(graph(x)[0], scan(lambda c, x: (c + x, c), torch.zeros(3, x.shape[2]), x)[1])
    assert rows.stride() == x.stride(), "a permuted tensor without gaps is read in its own order"


def test_outside_is_called_once_with_the_batch_in_front():
    shapes = []

    def rule(batched, x, y):
        shapes.append((batched, list(x.shape), list(y.shape)))
        return [x * y]

    x = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(vmap(lambda x, y: outside_vmap(rule, (x, y))[0], (1, None))(x, torch.tensor(2.0)), 2.0 * x.t())
    assert torch.equal(vmap(lambda x: x + outside_vmap(rule, (x[0], torch.tensor(2.0)))[0])(x), x + 2.0 * x[:, :1])
    assert shapes == [((True, False), [2, 3], []), ((True, False), [3], [])]


def _draws(key):
    one, two = rng.split(key)
    named = rng.stream(two, rng.ENV, torch.arange(3), torch.arange(2).unsqueeze(1))
    return {
        "bits": rng.bits(named, (3,)),
        "uniform": rng.uniform(rng.fold_in(one, key), (5,)),
        "permutation": rng.permutation(rng.split(one, 3), 7),
        "choice": rng.categorical(named, torch.zeros(2, 3, 4)),
    }


def test_philox_under_vmap_stays_one_operation_for_the_batch():
    graph = graph_of(vmap(lambda key: rng.bits(key, (4,))), torch.arange(5))
    assert len(_calls(graph, torch.ops.ecrl.philox.default)) == 2  # the halves of its words
    assert torch.equal(graph(torch.arange(5))[0], rng.bits(torch.arange(5), (4,)))


def test_draws_in_a_vmapped_graph_are_those_of_each_key():
    keys = torch.tensor([3, -1, 2**40])
    result = graph_of(vmap(_draws), keys)(keys)
    for i, key in enumerate(keys):
        assert all(torch.equal(a[i], b) for a, b in zip(result, flatten(_draws(key))[0], strict=True))


SHAPES = [(128, 64, 64), (33, 4, 64), (33, 64, 2), (64, 50, 4), (2, 50, 64), (7, 13, 37), (4, 64, 16), (1, 1, 1)]
TURNED = [(False, False), (True, False), (False, True), (True, True)]


def _matrices(rows, columns, turned):
    values = torch.linspace(-1.0, 1.0, 3 * rows * columns).mul(7.0).sin()
    return values.reshape(3, columns, rows).mT if turned else values.reshape(3, rows, columns)


def _pairs():
    for m, k, n in SHAPES:
        for turned in TURNED:
            yield _matrices(m, k, turned[0]), _matrices(k, n, turned[1])


def test_products_of_a_batch_are_the_products():
    chosen = [bmm(a, b) for a, b in _pairs()]
    assert sum(product is not NotImplemented for product in chosen) > len(chosen) / 2
    for product, (a, b) in zip(chosen, _pairs(), strict=True):
        close(a @ b if product is NotImplemented else product, a.double() @ b.double(), tol=1e-5)
    assert bmm(torch.ones(2, 40, 3, dtype=torch.float64), torch.ones(2, 3, 40, dtype=torch.float64)) is NotImplemented
    assert bmm(torch.ones(2, 0, 3), torch.ones(2, 3, 40)) is NotImplemented


def _all_products(pairs, square, whole):
    products = [torch.ops.ecrl.bmm(a, b) for a, b in pairs]
    return [*products, torch.ops.ecrl.bmm(square, square.mT), torch.ops.ecrl.bmm(whole[1:, 2:, 1:5], whole[1:, 3:7])]


@pytest.mark.slow
def test_what_inductor_writes_for_them_is_right_for_every_shape_and_layout():
    """Also for both factors in the same memory, and for parts of a larger tensor."""
    inputs = [*_pairs()], _matrices(20, 20, False), _matrices(9, 40, False)
    for result, product in zip(
        choose_form("on", "cpu").jit(_all_products)(*inputs), _all_products(*inputs), strict=True
    ):
        close(result, product, tol=1e-5)


def _scaled_sum(factor, x, y):
    return {"sum": factor * x + y, "same": y}


@pytest.mark.slow
def test_a_vmapped_function_is_compiled_once_for_a_batch_of_one_size():
    jit: Any = choose_form("on", "cpu").jit
    fn = jit(_scaled_sum, 3.0)
    x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([1.0, 2.0])
    for scale in (1.0, 2.0):
        result = vmap(fn, (0, None))(scale * x, y)
        assert torch.equal(result["sum"], 3.0 * scale * x + y)
        assert torch.equal(result["same"], y.expand(3, 2))
    assert torch.equal(vmap(fn, (1, None))(x.t(), y)["sum"], 3.0 * x + y)
    assert [one.text for one in jit.compilations] == ["_scaled_sum of a batch: first call"]
    assert torch.equal(vmap(vmap(fn))(x, x)["sum"], 4.0 * x)
    vmap(fn, (0, None))(torch.ones(4, 2), y)
    message = "_scaled_sum of a batch: 0 was float32 [3, 2] on cpu, is float32 [4, 2] on cpu"
    assert jit.compilations[-1].text == message


@pytest.mark.slow
def test_gradients_go_through_a_compiled_function_under_vmap():
    fn = choose_form("on", "cpu").jit(_scaled_sum, 5.0)
    x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([1.0, 2.0])

    def total(x):
        return vmap(fn, (0, None))(x, y)["sum"].square().sum()

    expected = 10.0 * (5.0 * x + y)
    assert torch.equal(torch.func.grad(total)(x), expected)
    assert torch.equal(vmap(torch.func.grad(lambda x: fn(x, y)["sum"].square().sum()))(x), expected)
    weight = x.clone().requires_grad_()
    total(weight).backward()
    assert torch.equal(weight.grad, expected)


def _grid(cfg, seeds):
    """States of different seeds, each with other numbers of the algorithm."""
    states = [init_state(cfg, key=rng.key(seed)).clone() for seed in seeds]
    for i, state in enumerate(states):
        for name, value in {"learning_rate": 0.003 * i, "ent_coef": 0.1 * i, "clip_coef": 0.05 + 0.1 * i}.items():
            state["hyper", name] = torch.tensor(value)
    return states


def _close_states(many, states):
    for i, state in enumerate(states):
        for name, leaf in state.flatten_keys("/").items():
            torch.testing.assert_close(many.flatten_keys("/")[name][i], leaf, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", long_except(["ppo"], ["ppo", "grpo"]))
@pytest.mark.usefixtures("traced_or_compiled")
def test_a_batch_of_runs_equals_single_runs_with_the_same_numbers(algorithm):
    """Seeds, learning rates, entropy and clip coefficients; nothing is compiled for other ones."""
    changes = (
        {}
        if algorithm == "ppo"
        else {"algorithm": {"name": "grpo", "cfg": {"n_epochs": 2, "batch_size": 16, "group_size": 2}}}
    )
    cfg = small(**changes, **{"trainer.compile": "on"})
    runs, known = [], None
    iteration = make_iteration(cfg, lambda run: runs.append(run) or run)
    for seeds in ((1, 2, 3), (4, 5, 6)):
        states = _grid(cfg, seeds)
        many = torch.stack(states)
        for _ in range(2):
            many, logs = vmap(iteration)(many)
            if known is None:
                known = len(runs[0].jit.compilations)
            _close_states(many, states := [iteration(state)[0] for state in states])
        assert logs["train"]["entropy"].shape == logs["collect"]["episode_reward_avg_100"].shape == (3,)
        assert [torch.equal(*pair) for pair in zip(many["key"], torch.tensor(seeds), strict=True)] == [True] * 3
        moved = many["params"].flatten_keys("/")
        for i, seed in enumerate(seeds):
            before = init_state(cfg, key=rng.key(seed))["params"].flatten_keys("/")
            still = [torch.equal(moved[name][i], leaf) for name, leaf in before.items()]
            assert all(still) if i == 0 else algorithm == "grpo" or not any(still)  # the first at a rate of 0
    assert not [one for one in runs[0].jit.compilations[known:] if "of a batch" in one.text]


@pytest.mark.long
def test_64_seeds_in_one_call_equal_single_runs():
    net = {"type": "mlp", "network_cfg": {"hidden_sizes": [32], "activation": "tanh"}}
    cfg = small(
        **{"trainer.compile": "on", "trainer.buffer_size": 64, "trainer.iterations": 20, "algorithm.cfg.n_epochs": 4},
        **{"policy.actor": net, "policy.critic": net, "algorithm.cfg.learning_rate": 0.003},
        **{"algorithm.cfg.batch_size": 64},
    )
    many = torch.stack([init_state(cfg, key=key).clone() for key in torch.arange(64)])
    runs: list = []
    iteration = make_iteration(cfg, lambda run: runs.append(run) or run)
    single, known = {i: many[i].clone() for i in (0, 63)}, 0
    for i in range(20):
        many, logs = vmap(iteration)(many)
        known = known or len(runs[0].jit.compilations)
        if i < 3:
            single = {seed: iteration(state)[0] for seed, state in single.items()}
            for seed, state in single.items():
                for name, leaf in state["params"].flatten_keys("/").items():
                    close(many["params"].flatten_keys("/")[name][seed], leaf, tol=1e-4)
    assert [one for one in runs[0].jit.compilations[known:] if "of a batch" in one.text] == []
    length = logs["collect"]["episode_length_avg_100"]
    assert length.shape == (64,)
    assert float(length.median()) > 45.0  # a random policy lasts 22 steps
