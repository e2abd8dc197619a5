"""Losses of critics and actors that learn from replay: their numbers, their gradients, and masked entries."""

import inspect
from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import close

from ecrl.kernels import (
    categorical_td_loss,
    discrete_soft_actor_loss,
    dpg_loss,
    huber,
    importance_weights,
    soft_actor_loss,
    td_loss,
    temperature_loss,
)

NAN, INF = float("nan"), float("inf")
T, F = True, False
seeds = st.integers(0, 2**31)
# Every loss: its fields, the ones a gradient reaches, its hyperparameters.
LOSSES = {
    td_loss: (("q_of_critics", "target", "weight", "mask"), ("q_of_critics",), {"delta": 1.0}),
    categorical_td_loss: (("dist_of_critics", "target_dist", "weight", "mask"), ("dist_of_critics",), {}),
    dpg_loss: (("q", "mask"), ("q",), {}),
    soft_actor_loss: (("log_prob", "q_of_critics", "mask"), ("log_prob", "q_of_critics"), {"temperature": 0.5}),
    discrete_soft_actor_loss: (("logits", "all_q_of_critics", "mask"), ("logits",), {"temperature": 0.5}),
    temperature_loss: (("log_temperature", "log_prob", "mask"), ("log_temperature",), {"target_entropy": -1.0}),
}
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda k: k.__name__)


def random_batch(seed, *shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=dtype)

    batch = {name: normal(*shape) for name in ("q", "log_prob", "target")}
    batch |= {"weight": normal(*shape).exp(), "q_of_critics": 2 * normal(2, *shape), "log_temperature": normal()}
    batch |= {"logits": normal(*shape, 3), "all_q_of_critics": normal(2, *shape, 3)}
    batch |= {"dist_of_critics": normal(2, *shape, 4), "target_dist": normal(*shape, 4).softmax(-1)}
    batch["mask"] = torch.rand(shape, generator=g) < 0.7
    batch["mask"].view(-1)[:1] = True
    return batch


def run(loss, batch, call=None, **hyper):
    names, _, defaults = LOSSES[loss]
    return (call or loss)(*(batch[name] for name in names), **(defaults | hyper))


def with_junk(batch, fill):
    """The batch with `fill` in all masked entries."""
    mask = batch["mask"]
    filled = {"mask": mask, "log_temperature": batch["log_temperature"]}
    for name in batch.keys() - filled.keys():
        axes = 1 if name in ("logits", "all_q_of_critics", "dist_of_critics", "target_dist") else 0
        filled[name] = batch[name].masked_fill(~mask.reshape(*mask.shape, *[1] * axes), fill)
    return filled


# Entry 2 is masked and holds NaN.
# td: errors [[1/2, -3], [0, 2]], huber at delta 1: [[1/8, 5/2], [0, 3/2]]; weights [2, 1]: (2/8 + 5/2 + 0 + 3/2) / 2
# categorical: log_softmax = log[1/4, 3/4] and log[1/2, 1/2] for both entries; targets [0, 1] and [1/2, 1/2]
# soft actor: temperature * log_prob - min: [-1/2 - 1, 1 + 3], mean 5/4
# discrete: p = [1/4, 3/4], smallest q [1, 2]: -(1/4 + 6/4) - H/2;  p = [1, 0]: -3. The q of probability 0 is not read.
H = -(0.25 * log(0.25) + 0.75 * log(0.75))
HAND = {
    "mask": torch.tensor([T, T, F]),
    "q": torch.tensor([1.0, 4.0, NAN]),
    "weight": torch.tensor([2.0, 1.0, NAN]),
    "target": torch.tensor([1.0, 2.0, NAN]),
    "q_of_critics": torch.tensor([[1.5, -1.0, NAN], [1.0, 4.0, NAN]]),
    "log_prob": torch.tensor([-1.0, 2.0, NAN]),
    "dist_of_critics": torch.tensor([[[0.0, log(3.0)]] * 2 + [[NAN, NAN]], [[9.0, 9.0]] * 2 + [[NAN, NAN]]]),
    "target_dist": torch.tensor([[0.0, 1.0], [0.5, 0.5], [NAN, NAN]]),
    "logits": torch.tensor([[0.0, log(3.0)], [0.0, -INF], [NAN, NAN]]),
    "all_q_of_critics": torch.tensor([[[1.0, 5.0], [3.0, INF], [NAN, NAN]], [[2.0, 2.0], [4.0, INF], [NAN, NAN]]]),
    "log_temperature": torch.tensor(log(2.0)),
}
CROSS_ENTROPY = [2 * (-log(0.75) + log(2.0)), -log(3 / 16) / 2 + log(2.0)]
TABLE = [
    (td_loss, {}, 4.25 / 2, {"q_loss": 4.25 / 2, "q_value": 5.5 / 4, "td_error": 5.5 / 4, "count": 2.0}),
    (td_loss, {"delta": INF}, (2 / 8 + 9 / 2 + 2) / 2, None),
    (categorical_td_loss, {}, sum(CROSS_ENTROPY) / 2, {"q_loss": sum(CROSS_ENTROPY) / 2, "count": 2.0}),
    (dpg_loss, {}, -2.5, {"policy_loss": -2.5, "count": 2.0}),
    (soft_actor_loss, {}, 0.25, {"policy_loss": 0.25, "entropy": -0.5, "count": 2.0}),
    (
        discrete_soft_actor_loss,
        {},
        (-1.75 - H / 2 - 3.0) / 2,
        {"policy_loss": (-1.75 - H / 2 - 3.0) / 2, "entropy": H / 2, "count": 2.0},
    ),
    # -2 * ((-1 - 1) + (2 - 1)) / 2
    (temperature_loss, {}, 1.0, {"temperature_loss": 1.0, "temperature": 2.0, "count": 2.0}),
]


@pytest.mark.parametrize(("loss", "hyper", "expected", "expected_logs"), TABLE)
def test_by_hand(variant, loss, hyper, expected, expected_logs):
    out, logs = run(loss, HAND, variant(loss), **hyper)
    close(out, expected)
    if expected_logs is not None:
        assert logs.keys() == expected_logs.keys()
        for name, value in expected_logs.items():
            close(logs[name], value)


def test_huber_by_hand(variant):
    x = torch.tensor([0.0, 1.0, -2.0, 3.0, -INF])
    close(variant(huber)(x, delta=2.0), [0.0, 0.5, 2.0, 4.0, INF])
    close(variant(huber)(x[:4], delta=torch.tensor(INF)), [0.0, 0.5, 2.0, 4.5])
    close(variant(huber)(x[:4], delta=0.0), [0.0, 0.0, 0.0, 0.0])


@given(seed=seeds, delta=st.sampled_from([0.1, 1.0, 3.0, INF]))
def test_the_gradient_of_huber_is_the_clipped_error(seed, delta):
    x = 4 * torch.randn(20, generator=torch.Generator().manual_seed(seed))
    x[0], x[1] = 0.0, min(delta, 1e9)
    leaf = x.clone().requires_grad_()
    close(torch.autograd.grad(huber(leaf, delta=delta).sum(), leaf)[0], x.clamp(-delta, delta))
    expected = [e * e / 2 if abs(e) <= delta else delta * (abs(e) - delta / 2) for e in x.double().tolist()]
    close(huber(x, delta=delta), expected)


def softmax(logits):
    powers = [exp(x) for x in logits]
    return [x / sum(powers) for x in powers]


def loop(loss, batch, delta=1.0, temperature=0.0, target_entropy=0.0):
    """The loss in Python floats over the unmasked entries, from the equations."""
    mask, terms = batch["mask"], []
    for at in mask.nonzero().tolist():
        row = {}
        for name in LOSSES[loss][0]:
            x = batch[name].double()
            if name != "log_temperature":
                index = ((slice(None),) if name.endswith("of_critics") else ()) + tuple(at)
                x = x[index]
            row[name] = x.tolist()
        match loss.__name__:
            case "td_loss":
                errors = [abs(q - row["target"]) for q in row["q_of_critics"]]
                terms.append(row["weight"] * sum(e * e / 2 if e <= delta else delta * (e - delta / 2) for e in errors))
            case "categorical_td_loss":
                predicted = [softmax(logits) for logits in row["dist_of_critics"]]
                entropies = [-sum(t * log(p) for t, p in zip(row["target_dist"], ps, strict=True)) for ps in predicted]
                terms.append(row["weight"] * sum(entropies))
            case "dpg_loss":
                terms.append(-row["q"])
            case "soft_actor_loss":
                terms.append(temperature * row["log_prob"] - min(row["q_of_critics"]))
            case "discrete_soft_actor_loss":
                smallest = [min(q) for q in zip(*row["all_q_of_critics"], strict=True)]
                pi = softmax(row["logits"])
                terms.append(sum(p * (temperature * log(p) - q) for p, q in zip(pi, smallest, strict=True)))
            case "temperature_loss":
                terms.append(-exp(row["log_temperature"]) * (row["log_prob"] + target_entropy))
    return sum(terms) / max(1, len(terms))


@each_loss
def test_against_loop(variant, loss):
    batch, hyper = random_batch(0, 3, 4), LOSSES[loss][2]
    tensors = {name: torch.tensor(value) for name, value in hyper.items()}
    close(run(loss, batch, variant(loss), **tensors)[0], loop(loss, batch, **hyper))


@each_loss
@given(seed=seeds, junk=st.sampled_from([NAN, INF, -INF]), shape=st.sampled_from([(1,), (7,), (2, 3)]))
def test_masked_entries_change_neither_loss_nor_gradient(loss, seed, junk, shape):
    batch, results = random_batch(seed, *shape), []
    close(run(loss, batch)[0], loop(loss, batch, **LOSSES[loss][2]))
    for filled in (with_junk(batch, 0.0), with_junk(batch, junk)):
        leaves = [filled[name].detach().requires_grad_() for name in LOSSES[loss][1]]
        out, logs = run(loss, filled | dict(zip(LOSSES[loss][1], leaves, strict=True)))
        results.append([out, *logs.values(), *torch.autograd.grad(out, leaves)])
    for clean, dirty in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, dirty)


@each_loss
@pytest.mark.parametrize("shape", [(0,), (3, 2)], ids=["empty", "all masked"])
def test_no_entries_give_zero_and_no_gradient(loss, shape):
    batch = random_batch(1, *shape)
    batch = with_junk(batch | {"mask": torch.zeros_like(batch["mask"])}, NAN)
    leaves = [batch[name].detach().requires_grad_() for name in LOSSES[loss][1]]
    out, logs = run(loss, batch | dict(zip(LOSSES[loss][1], leaves, strict=True)))
    logs.pop("temperature", None)
    for value in (out, *logs.values(), *torch.autograd.grad(out, leaves)):
        assert torch.equal(value, torch.zeros_like(value))


@each_loss
def test_gradients_reach_exactly_the_documented_arguments(loss):
    names, live, defaults = LOSSES[loss]
    batch = random_batch(2, 2, 4, dtype=torch.float64)
    leaves = {name: batch[name].requires_grad_() for name in names if name != "mask"}
    hyper = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in defaults.items()}
    hyper.pop("delta", None)
    out, logs = run(loss, batch, **hyper)
    assert not any(v.requires_grad or v.shape for v in logs.values())
    inputs = leaves | hyper
    grads = torch.autograd.grad(out, list(inputs.values()), allow_unused=True)
    assert {name for name, grad in zip(inputs, grads, strict=True) if grad is not None and grad.any()} == set(live)

    def value(*xs):
        return run(loss, batch | dict(zip(live, xs, strict=True)))[0]

    assert torch.autograd.gradcheck(value, [leaves[name] for name in live])


@each_loss
def test_bad_shapes_are_named(loss):
    batch = random_batch(3, 3, 4)
    for parameter, name in zip(inspect.signature(loss).parameters, LOSSES[loss][0], strict=False):
        axis = 2 if name.endswith("of_critics") else 1
        bad = torch.cat((batch[name],) * 2, axis) if batch[name].ndim else torch.ones(3)
        # A field that the others are compared with is named after them, or only its shape is.
        named = rf"^{parameter} has shape|the shape of {parameter}$|expected \[(C, )?3, 8"
        with pytest.raises(ValueError, match=named):
            run(loss, batch | {name: bad})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("loss", [td_loss, categorical_td_loss], ids=lambda k: k.__name__)
def test_float64_importance_weights_do_not_widen(loss, dtype):
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in random_batch(6, 5).items()}
    batch["weight"] = importance_weights(torch.linspace(0.1, 1.0, 5, dtype=torch.float64), beta=0.5)
    out, logs = run(loss, batch)
    assert batch["weight"].dtype == torch.float64
    assert out.dtype == dtype
    assert {log.dtype for log in logs.values()} == {torch.float32}
    close(out, loop(loss, batch), tol=4.0 * torch.finfo(dtype).eps)


def test_a_loss_of_several_critics_is_the_sum_of_their_losses():
    batch = random_batch(4, 9)
    for loss, name in ((td_loss, "q_of_critics"), (categorical_td_loss, "dist_of_critics")):
        single = [run(loss, batch | {name: batch[name][c : c + 1]})[0] for c in range(2)]
        close(run(loss, batch)[0], single[0] + single[1])


def test_the_policy_of_the_discrete_loss_goes_to_the_softmax_of_q():
    """Soft policy improvement: the gradient is 0 at softmax(q / temperature), and the loss is larger elsewhere."""
    batch = random_batch(5, 8)
    best = (batch["all_q_of_critics"].amin(0) / 0.5).requires_grad_()
    loss, logs = run(discrete_soft_actor_loss, batch | {"logits": best})
    close(torch.autograd.grad(loss, best)[0], torch.zeros(8, 3), tol=1e-6)
    assert run(discrete_soft_actor_loss, batch)[0] > loss
    close(logs["entropy"], torch.distributions.Categorical(logits=best.detach()).entropy()[batch["mask"]].mean())


@pytest.mark.parametrize(("entropy", "sign"), [(3.0, 1.0), (1.0, -1.0), (2.0, 0.0)])
def test_the_temperature_falls_while_the_entropy_is_above_its_target(entropy, sign):
    leaf, mask = torch.tensor(0.3, requires_grad=True), torch.ones(4, dtype=torch.bool)
    loss, _ = temperature_loss(leaf, torch.full((4,), -entropy), mask, target_entropy=2.0)
    close(torch.autograd.grad(loss, leaf)[0], sign * exp(0.3))
