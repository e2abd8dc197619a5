"""The state of torch around a call, also on a torch that lacks the private names."""

from threading import Thread

import pytest
import torch
from support.graphs import graph_of
from torch.autograd import forward_ad

from ecrl import rng, tracing_state
from ecrl.compile.autocast import settings, without_autocast
from ecrl.compile.jit import _form_for, choose_form
from ecrl.compile.vmap import records_gradients, vmapped
from ecrl.errors import ConfigError
from ecrl.tracing_state import (
    ignoring_draws,
    in_forward_mode,
    in_graph,
    noting_draws,
    tracing_graph,
    transforms,
    version_of,
)

PRESENT = [True, False]
FORWARD = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own


@pytest.fixture
def no_transforms(monkeypatch):
    monkeypatch.setattr(tracing_state, "_ACTIVE_TRANSFORMS", None)
    _form_for.cache_clear()
    yield
    _form_for.cache_clear()


def test_a_graph_is_traced_inside_the_context_and_in_this_thread_only():
    with tracing_graph():
        assert in_graph()
        with pytest.raises(ValueError), tracing_graph():
            raise ValueError
        assert in_graph()
    assert not in_graph()


X = torch.ones(1, 2, 4, 8)
MULTI_HEAD = torch.nn.MultiheadAttention(8, 2, batch_first=True)
EVALUATED = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True).eval()
UNDROPPED = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
DRAWS = {
    "rand": lambda: torch.rand(2),
    "randint": lambda: torch.randint(3, (2,)),
    "randperm": lambda: torch.randperm(3),
    "in place": lambda: X.clone().normal_(),
    "uniform": lambda: X.clone().uniform_(),
    "bernoulli": lambda: torch.bernoulli(X / 2.0),
    "multinomial": lambda: torch.multinomial(torch.ones(3), 1),
    "dropout": lambda: torch.nn.functional.dropout(X, 0.5, True),
    "dropout of attention": lambda: torch.nn.functional.scaled_dot_product_attention(X, X, X, dropout_p=0.5),
    "distribution": lambda: torch.distributions.Normal(0.0, 1.0).sample(),
    "a layer": lambda: torch.nn.Linear(2, 2),
    "inside vmap": lambda: torch.func.vmap(lambda x: x + torch.rand(2, 4, 8), randomness="different")(X),
}
NO_DRAWS = {
    "own generator": lambda: X.clone().normal_(generator=torch.Generator()),
    "dropout in evaluation": lambda: torch.nn.functional.dropout(X, 0.5, False),
    "dropout with probability 0": lambda: torch.nn.functional.dropout(X, 0.0, True),
    "attention": lambda: torch.nn.functional.scaled_dot_product_attention(X, X, X),
    "a gradient of attention": lambda: torch.func.grad(
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x).sum()
    )(X),
    "multi-head attention": lambda: MULTI_HEAD(X[0], X[0], X[0], need_weights=False),
    "a transformer layer in evaluation": lambda: EVALUATED(X[0]),
    "a transformer layer without dropout": lambda: UNDROPPED(X[0]),
    "rrelu in evaluation": lambda: torch.nn.functional.rrelu(X, training=False),
    "keys": lambda: rng.normal(rng.key(3), (4,)),
}


@pytest.mark.parametrize("case", DRAWS)
def test_a_draw_from_the_global_generator_is_noted(case):
    with noting_draws() as noted, noting_draws() as inner:
        DRAWS[case]()
    assert inner.run and not inner.traced and noted == ([], [])
    with noting_draws() as noted, ignoring_draws():
        DRAWS[case]()
    assert noted == ([], [])


@pytest.mark.parametrize("case", DRAWS)
def test_a_draw_in_a_graph_is_noted(case):
    if case == "dropout of attention" and torch.__version__ < "2.13":
        pytest.skip("torch before 2.13 cannot trace it")
    with noting_draws() as noted:
        graph_of(lambda: [DRAWS[case]()][:0])
    assert noted.traced and not noted.run


@pytest.mark.parametrize("case", NO_DRAWS)
def test_operations_that_draw_nothing_from_it_are_not_noted(case):
    with noting_draws() as noted:
        NO_DRAWS[case]()
    assert noted == ([], [])


@pytest.mark.parametrize("case", NO_DRAWS)
def test_operations_that_draw_nothing_from_it_are_not_noted_in_a_graph(case):
    if case == "own generator" and torch.__version__ < "2.13":
        pytest.skip("torch before 2.13 cannot trace it")
    with noting_draws() as noted:
        graph_of(lambda: [NO_DRAWS[case]()][:0])
    drawn = ["aten.normal_.default"] if case == "own generator" else []  # a graph cannot contain a generator
    assert noted == (drawn, [])


def test_draws_of_other_threads_are_not_noted():
    with noting_draws() as noted:
        thread = Thread(target=lambda: torch.rand(2))
        thread.start()
        thread.join()
    assert noted == ([], [])


def values_in(transform, *args):
    kinds = []
    transform(lambda x: kinds.append((transforms(), vmapped(), records_gradients(x))) or x.sum())(*args)
    return kinds[0]


@FORWARD
def test_transforms_are_listed_with_the_innermost_last():
    x = torch.ones(2, 3)
    assert values_in(torch.func.vmap, x) == (("Vmap",), True, False)
    assert values_in(torch.func.grad, x) == (("Grad",), False, True)
    assert values_in(lambda f: torch.func.grad(lambda x: torch.func.vmap(f)(x).sum()), x) == (
        ("Grad", "Vmap"),
        True,
        False,
    )
    assert values_in(lambda f: lambda x: torch.func.jvp(f, (x,), (x,)), x) == (("Jvp",), False, True)
    assert (transforms(), vmapped(), records_gradients(x)) == ((), False, False)


def test_without_a_report_of_transforms_runs_are_eager_with_equal_numbers(no_transforms):
    assert vmapped()
    keys = torch.arange(3)
    with tracing_graph():
        assert torch.equal(rng.bits(keys), torch.stack([rng.bits(key) for key in keys]))
    with pytest.warns(
        RuntimeWarning, match=r"running eager.*does not report the transforms.*install a version of torch"
    ):
        assert choose_form("auto", "cpu").name == "eager"
    with pytest.raises(ConfigError, match=r"on, but torch .* cannot compile: it does not report the transforms"):
        choose_form("on", "cpu")


@FORWARD
@pytest.mark.parametrize("present", PRESENT)
def test_forward_mode_is_seen(monkeypatch, present):
    monkeypatch.setattr(tracing_state, "_HAS_LEVEL", present)
    x = torch.ones(2)
    with forward_ad.dual_level():
        assert in_forward_mode([x, forward_ad.make_dual(x, x)])
    assert not in_forward_mode([x])


@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize("x", [torch.ones(2, 3).t(), torch.tensor(1), torch.ones(3, dtype=torch.bfloat16)])
def test_a_write_changes_the_version(monkeypatch, present, x):
    monkeypatch.setattr(tracing_state, "_COUNTS_WRITES", present)
    before = version_of(x)
    assert version_of(x) == before
    assert version_of(x.add_(1)) != before
    with torch.inference_mode():
        assert version_of(torch.ones(2)) == 0


def test_autocast_is_off_inside_and_in_the_settings_outside():
    plain = settings()
    with torch.autocast("cpu", torch.bfloat16):
        assert settings() != plain
        with without_autocast():
            assert settings() == plain
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
