"""Targets of action values over time, Q(lambda) and Retrace, against hand tables and plain float64 loops."""

import inspect
from math import exp

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.checks import close

from ecrl.kernels import discounted_returns, n_step_returns, q_lambda, retrace, td_lambda_returns

NAN, INF = float("nan"), float("inf")
FIELDS = {
    q_lambda: ("reward", "next_q", "terminated", "done"),
    retrace: ("reward", "next_q_taken", "next_v", "log_rho", "terminated", "done"),
}
each_kernel = pytest.mark.parametrize("kernel", FIELDS, ids=lambda k: k.__name__)
unit = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0))
seeds = st.integers(0, 2**31)


def random_steps(seed, *shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    names = ("reward", "next_q_taken", "next_v", "log_rho")
    steps = {name: torch.randn(shape, generator=g, dtype=dtype) for name in names}
    steps["next_q"] = torch.randn(*shape, 3, generator=g, dtype=dtype)
    steps |= {name: torch.rand(shape, generator=g) < 0.15 for name in ("terminated", "truncated")}
    return steps | {"done": steps["terminated"] | steps["truncated"]}


def run(kernel, steps, call=None, gamma=0.9, trace=0.7):
    return (call or kernel)(*(steps[name] for name in FIELDS[kernel]), gamma=gamma, trace=trace)


def loop(kernel, steps, gamma, trace):
    """Each row in Python floats, from the equations."""
    shape, targets = steps["reward"].shape, []
    gamma = torch.as_tensor(gamma).double().expand(shape)
    fields = {name: x.double() if x.is_floating_point() else x for name, x in steps.items()} | {"gamma": gamma}
    flat = {name: x.flatten(0, len(shape) - 2) if len(shape) > 1 else x[None] for name, x in fields.items()}
    for i in range(len(flat["reward"])):
        row, target = {name: x[i].tolist() for name, x in flat.items()}, [0.0] * shape[-1]
        for t in reversed(range(shape[-1])):
            value = max(row["next_q"][t]) if kernel is q_lambda else row["next_v"][t]
            if row["terminated"][t]:
                later = 0.0
            elif row["done"][t] or t == shape[-1] - 1:
                later = value
            elif kernel is q_lambda:
                later = (1 - trace) * value + trace * target[t + 1]
            else:
                c = trace * min(1.0, exp(row["log_rho"][t + 1]))
                later = value + c * (target[t + 1] - row["next_q_taken"][t])
            target[t] = row["reward"][t] + row["gamma"][t] * later
        targets.append(target)
    return torch.tensor(targets, dtype=torch.float64).reshape(shape)


# gamma = trace = 1/2. Step 1 hits a time limit, step 2 ends, the array stops after step 3. What is not read is NaN.
# Q(lambda): next values [2, 8, -, 4]: [1 + (2/2 + 6/2) / 2, 2 + 8/2, 3, 4 + 4/2]
# Retrace: c = [-, 1/4, -, -]: G[0] = 1 + (2 + 1/4 * (6 - 4)) / 2
HAND = {
    "reward": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "next_q": torch.tensor([[2.0, -9.0], [8.0, 8.0], [NAN, NAN], [-INF, 4.0]]),
    "next_q_taken": torch.tensor([4.0, NAN, NAN, NAN]),
    "next_v": torch.tensor([2.0, 8.0, NAN, 4.0]),
    "log_rho": torch.tensor([NAN, 0.5, NAN, NAN]).log(),
    "terminated": torch.tensor([False, False, True, False]),
    "done": torch.tensor([False, True, True, False]),
}
TABLE = [(q_lambda, [3.0, 6.0, 3.0, 6.0]), (retrace, [2.25, 6.0, 3.0, 6.0])]


@pytest.mark.parametrize(("kernel", "expected"), TABLE)
def test_by_hand(variant, kernel, expected):
    close(run(kernel, HAND, variant(kernel), 0.5, 0.5), expected)
    integers = HAND | {"reward": HAND["reward"].long()}
    close(run(kernel, integers, variant(kernel), torch.tensor(0.5), torch.tensor(0.5)), expected)


@each_kernel
def test_against_loop(variant, kernel):
    steps, gamma = random_steps(0, 2, 3, 6), 0.9 ** torch.arange(1.0, 7.0).expand(2, 3, 6)
    close(run(kernel, steps, variant(kernel), gamma), loop(kernel, steps, gamma, 0.7))


@each_kernel
@given(seed=seeds, shape=st.sampled_from([(1,), (5,), (2, 41), (2, 1, 3), (0, 4)]), gamma=unit, trace=unit)
@example(seed=0, shape=(2, 41), gamma=1.0, trace=1.0)
def test_any_shape_and_hyperparameters(kernel, seed, shape, gamma, trace):
    steps = random_steps(seed, *shape)
    expected = loop(kernel, steps, gamma, trace)
    close(run(kernel, steps, gamma=gamma, trace=trace), expected, tol=1e-4)
    close(run(kernel, steps, gamma=torch.tensor(gamma), trace=torch.tensor(trace)), expected, tol=1e-4)


@each_kernel
@pytest.mark.parametrize("junk", [NAN, INF])
def test_what_has_no_weight_is_not_read(kernel, junk):
    """The next state after an end, the ratio and the Q of the next episode, and all of it with gamma 0."""
    steps = random_steps(1, 4, 9)
    first = torch.zeros(4, 9, dtype=torch.bool)
    first[:, 0], first[:, 1:] = True, steps["done"][:, :-1]
    last = steps["done"].clone()
    last[:, -1] = True
    filled = steps | {
        "next_q": steps["next_q"].masked_fill(steps["terminated"][..., None], junk),
        "next_v": steps["next_v"].masked_fill(steps["terminated"], junk),
        "next_q_taken": steps["next_q_taken"].masked_fill(last, junk),
        "log_rho": steps["log_rho"].masked_fill(first, junk),
    }
    leaves = [filled[name].requires_grad_() for name in FIELDS[kernel] if filled[name].is_floating_point()]
    out = run(kernel, filled)
    assert torch.equal(out, run(kernel, steps))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))
    junk_everywhere = {name: torch.full_like(x, junk) if name.startswith("next") else x for name, x in steps.items()}
    for gamma in (0.0, torch.tensor(0.0)):
        assert torch.equal(run(kernel, junk_everywhere, gamma=gamma), steps["reward"])


@each_kernel
def test_gradients(kernel):
    steps = random_steps(2, 2, 5, dtype=torch.float64)
    names = [name for name in FIELDS[kernel] if steps[name].is_floating_point()]
    leaves = [steps[name].requires_grad_() for name in names]

    def target(*values):
        return run(kernel, steps | dict(zip(names, values, strict=True)))

    assert torch.autograd.gradcheck(target, leaves)
    for name, grad in zip(names, torch.autograd.grad(target(*leaves).sum(), leaves), strict=True):
        assert grad.any(), f"nothing reaches {name}: targets detach nothing"


@given(seed=seeds)
def test_they_meet_other_estimators_at_their_limits(seed):
    steps = random_steps(seed, 3, 7)
    plain = (steps["reward"], steps["next_v"], steps["terminated"], steps["done"])
    one_step = n_step_returns(*plain, gamma=0.9, n=1)
    close(run(retrace, steps, trace=0.0), one_step)
    close(run(retrace, steps | {"log_rho": torch.full((3, 7), -INF)}), one_step)
    on_policy = steps | {"log_rho": torch.ones(3, 7), "next_q_taken": steps["next_v"]}
    close(run(retrace, on_policy), td_lambda_returns(*plain, gamma=0.9, gae_lambda=0.7))
    close(run(retrace, on_policy, trace=1.0), discounted_returns(*plain, gamma=0.9))
    one_action = steps | {"next_q": steps["next_v"][..., None]}
    close(run(q_lambda, one_action), td_lambda_returns(*plain, gamma=0.9, gae_lambda=0.7))


def test_large_ratios_count_as_one():
    steps = random_steps(3, 2, 6)
    above, beyond = (steps | {"log_rho": steps["log_rho"].abs() + more} for more in (0.0, 1e4))
    assert torch.equal(run(retrace, above), run(retrace, beyond))


@each_kernel
def test_bad_shapes_are_named(kernel):
    steps = random_steps(4, 3, 4)
    for name in FIELDS[kernel]:
        bad = torch.cat((steps[name],) * 2, 1)
        named = rf"\b{name} has shape \[3, 8|expected \[3, 8.*"
        with pytest.raises(ValueError, match=named):
            run(kernel, steps | {name: bad})
    assert tuple(inspect.signature(kernel).parameters) == (*FIELDS[kernel], "gamma", "trace")
    with pytest.raises(ValueError, match=r"^trace has shape \[3, 4\], expected a number or a 0-d tensor"):
        run(kernel, steps, trace=torch.zeros(3, 4))
