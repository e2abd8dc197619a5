"""Target networks and moving averages: their values, bits, gradients and errors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, close
from tensordict import TensorDict

from ecrl.kernels import ema, ema_debiased, ema_init, periodic_update, soft_update


def tree(weight, steps=0, dtype=torch.float32):
    w = torch.tensor(weight, dtype=dtype)
    return TensorDict({"net": {"w": w, "b": -w[:1]}, "steps": torch.tensor(steps)}, [])


def test_soft_update_by_hand(variant):
    for tau in (0.25, torch.tensor(0.25)):
        out = variant(soft_update)(tree([4.0, 8.0], 7), tree([0.0, 4.0], 3), tau=tau)
        close(out["net", "w"], [1.0, 5.0])
        close(out["net", "b"], [-1.0])
        assert out["steps"] == 7  # integers are copied


def test_periodic_update_by_hand(variant):
    new, old = tree([4.0, 8.0], 7), tree([0.0, 4.0], 3)
    for step, period, expected in ((3, 3, new), (4, torch.tensor(3), old)):
        out = variant(periodic_update)(new, old, torch.tensor(step), period=period)
        for key in (("net", "w"), ("net", "b"), "steps"):
            close(out[key], expected[key], tol=0.0)


def test_copies_are_a_period_apart():
    copied = [
        bool(periodic_update(tree([1.0]), tree([0.0]), torch.tensor(step), period=3)["net", "w"]) for step in range(7)
    ]
    assert copied == [True, False, False, True, False, False, True]


@given(tau=st.floats(0.0, 1.0), steps=st.integers(1, 20))
def test_soft_updates_are_an_exponential_moving_average(tau, steps):
    new, target = tree([4.0, -8.0], dtype=torch.float64), tree([0.0, 4.0], dtype=torch.float64)
    for _ in range(steps):
        target = soft_update(new, target, tau=tau)
    left = (1.0 - tau) ** steps
    close(target["net", "w"], [4.0 - left * 4.0, -8.0 + left * 12.0])


def test_a_share_of_none_or_all_copies_the_bits():
    g = torch.Generator().manual_seed(0)
    new, old = (TensorDict({"w": torch.randn(1000, generator=g)}, []) for _ in range(2))
    assert torch.equal(soft_update(new, old, tau=1.0)["w"], new["w"])
    assert torch.equal(soft_update(new, old, tau=0.0)["w"], old["w"])


@pytest.mark.parametrize("update", [soft_update, periodic_update])
def test_the_dtype_is_that_of_the_target(update):
    """A target in float32 follows parameters in bfloat16, in small steps that bfloat16 could not hold."""
    args = ({"tau": 0.001},) if update is soft_update else ({"period": 1},)
    more = () if update is soft_update else (torch.tensor(0),)
    new, old = tree([2.0, 2.0], dtype=torch.bfloat16), tree([1.0, 1.0])
    out = update(new, old, *more, **args[0])
    assert out["net", "w"].dtype == torch.float32
    close(out["net", "w"], [1.001, 1.001] if update is soft_update else [2.0, 2.0], tol=1e-6)
    assert update(old, new, *more, **args[0])["net", "w"].dtype == torch.bfloat16


def test_gradients_flow_through_both_arguments():
    new, old = (torch.randn(3, dtype=torch.float64).requires_grad_() for _ in range(2))

    def soft(new, old):
        return soft_update(TensorDict({"w": new}, []), TensorDict({"w": old}, []), tau=0.3)["w"]

    def copied(new, old):
        params, target = TensorDict({"w": new}, []), TensorDict({"w": old}, [])
        steps = (torch.tensor(2), torch.tensor(3))
        return torch.stack([periodic_update(params, target, step, period=2)["w"] for step in steps])

    assert torch.autograd.gradcheck(soft, (new, old)) and torch.autograd.gradcheck(copied, (new, old))


def test_leaves_that_do_not_match_are_named():
    new, old = tree([1.0, 2.0]), tree([1.0, 2.0])
    one_step = {"step": torch.tensor(0), "period": 1}
    for update, numbers in ((soft_update, {"tau": 0.1}), (periodic_update, one_step)):
        with pytest.raises(ValueError, match=r"only one has \('net', 'w'\)"):
            update(new.exclude(("net", "w")), old, **numbers)
        with pytest.raises(ValueError, match=r"these differ: \('net', 'w'\) \[2\] and \[3\]$"):
            update(new, old.clone().set(("net", "w"), torch.zeros(3)), **numbers)
    for name in one_step:
        with pytest.raises(ValueError, match=rf"^{name} has shape \[1\]"):
            periodic_update(new, old, **one_step | {name: torch.tensor([1])})
    with pytest.raises(ValueError, match=r"^period is 0, expected at least 1$"):
        periodic_update(new, old, torch.tensor(0), period=0)


def one(x, dtype=torch.float64):
    return TensorDict({"w": torch.tensor([x], dtype=dtype)}, [])


def test_ema_by_hand(variant):
    # decay 1/2, values 8 then 4: means 4 and 4; weights 1/2 and 3/4
    average = variant(ema)(tree([8.0, 0.0], 7), ema_init(tree([8.0, 0.0])), decay=0.5)
    close(average["mean", "net", "w"], [4.0, 0.0])
    close(average["mean", "net", "b"], [-4.0])
    assert average["step"] == 1 and average["mean", "steps"] == 7  # integers are copied
    average = variant(ema)(tree([4.0, 2.0], 9), average, decay=torch.tensor(0.5))
    close(average["mean", "net", "w"], [4.0, 1.0])
    assert average["step"] == 2 and average["step"].dtype == torch.int64
    debiased = variant(ema_debiased)(average, decay=0.5)
    close(debiased["net", "w"], [16.0 / 3.0, 4.0 / 3.0])
    assert debiased["steps"] == 9
    close(variant(ema_debiased)(ema_init(tree([8.0, 1.0])), decay=0.5)["net", "w"], [0.0, 0.0])


@pytest.mark.ref
@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
def test_ema_against_optax(decay):
    """optax computes in float32."""
    optax = pytest.importorskip("optax")
    average, plain, debiasing = ema_init(one(0.0)), *(optax.ema(decay, debias=debias) for debias in (False, True))
    states = [transform.init({"w": np.zeros(1, np.float32)}) for transform in (plain, debiasing)]
    for value in torch.linspace(-3.0, 5.0, 20).tolist():
        average = ema(one(value), average, decay=decay)
        results = average["mean"], ema_debiased(average, decay=decay)
        for i, transform in enumerate((plain, debiasing)):
            expected, states[i] = transform.update({"w": np.full(1, value, np.float32)}, states[i])
            close(results[i]["w"], torch.from_numpy(np.array(expected["w"])), tol=1e-3 if decay == 0.999 else 1e-5)


@given(decay=st.floats(0.0, 0.9999), values=st.lists(st.floats(-100.0, 100.0), min_size=1, max_size=10))
def test_a_debiased_average_is_a_weighted_mean(decay, values):
    average = ema_init(one(0.0))
    for value in values:
        average = ema(one(value), average, decay=decay)
    weights = [decay ** (len(values) - 1 - i) for i in range(len(values))]
    expected = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
    close(ema_debiased(average, decay=decay)["w"], torch.tensor([expected], dtype=torch.float64), tol=1e-6)
    assert min(values) - 1e-6 <= float(ema_debiased(average, decay=decay)["w"]) <= max(values) + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_averages_keep_the_dtype_of_their_mean(dtype):
    average = ema(one(2.0, dtype), ema_init(one(0.0, dtype)), decay=torch.tensor(0.5, dtype=torch.float64))
    assert average["mean", "w"].dtype == ema_debiased(average, decay=0.5)["w"].dtype == dtype
    close(ema_debiased(average, decay=0.5)["w"], [2.0], tol=1e-6)


def test_gradients_flow_through_averages():
    new, mean = (torch.tensor(x, dtype=torch.float64).requires_grad_() for x in ([1.0, -2.0], [0.5, 3.0]))
    decay = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)

    def step(new, mean, decay):
        average = TensorDict({"mean": {"w": mean}, "step": torch.tensor(3)}, [])
        average = ema(TensorDict({"w": new}, []), average, decay=decay)
        return average["mean", "w"], ema_debiased(average, decay=decay)["w"]

    assert torch.autograd.gradcheck(step, (new, mean, decay))
    args = new.detach(), mean.detach(), decay.detach()
    assert_no_retrace(step, args, tuple(0.5 * x for x in args))


def test_leaves_and_numbers_of_averages_are_named():
    average = ema_init(tree([1.0, 2.0]))
    with pytest.raises(ValueError, match=r"^params and average must .* leaves; only one has \('net', 'w'\)$"):
        ema(tree([1.0, 2.0]).exclude(("net", "w")), average, decay=0.5)
    with pytest.raises(ValueError, match=r"^params and average must .* these differ: .*'w'\) \[3\] and \[2\]$"):
        ema(tree([1.0, 2.0, 3.0]), average, decay=0.5)
    for call in (
        lambda decay: ema(tree([1.0, 2.0]), average, decay=decay),
        lambda decay: ema_debiased(average, decay=decay),
    ):
        with pytest.raises(ValueError, match=r"^decay has shape \[1\], expected a number or a 0-d tensor$"):
            call(torch.ones(1))
        with pytest.raises(ValueError, match=r"^decay is '1', expected a number or a 0-d tensor$"):
            call("1")
