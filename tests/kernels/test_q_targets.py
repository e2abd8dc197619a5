"""One-step targets of action values, against hand tables, plain float64 loops and properties."""

import inspect
import re
from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import close

from ecrl.kernels import (
    double_q_target,
    expected_q_target,
    min_q_target,
    munchausen_target,
    q_target,
    smoothed_action,
    soft_min_q_target,
    soft_q_target,
)

NAN, INF = float("nan"), float("inf")
# The fields of each kernel. Fields of critics have a first axis C, and fields of all actions a last axis A.
FIELDS = {
    q_target: ("reward", "next_q", "terminated"),
    double_q_target: ("reward", "next_q", "next_q_selector", "terminated"),
    expected_q_target: ("reward", "next_q", "next_probs", "terminated"),
    munchausen_target: ("reward", "q", "action", "next_q", "terminated"),
    min_q_target: ("reward", "next_q_of_critics", "terminated"),
    soft_min_q_target: ("reward", "next_q_of_critics", "next_log_prob", "terminated"),
    soft_q_target: ("reward", "all_next_q_of_critics", "next_logits", "terminated"),
}
UNREAD = {"next_q", "next_probs", "next_q_of_critics", "next_log_prob", "all_next_q_of_critics", "next_logits"}
HYPER = {kernel: {"gamma": 0.5} for kernel in FIELDS}
HYPER[soft_min_q_target] = HYPER[soft_q_target] = {"gamma": 0.5, "temperature": 0.5}
HYPER[munchausen_target] = {"gamma": 0.5, "temperature": 0.5, "munchausen_coef": 0.8, "clip_value_min": -1.0}
each_kernel = pytest.mark.parametrize("kernel", FIELDS, ids=lambda k: k.__name__)
seeds = st.integers(0, 2**31)


def run(kernel, batch, call=None, **hyper):
    return (call or kernel)(*(batch[name] for name in FIELDS[kernel]), **(HYPER[kernel] | hyper))


def random_batch(seed, *shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=dtype)

    batch = {name: normal(*shape) for name in ("reward", "next_log_prob")}
    batch |= {name: normal(*shape, 3) for name in ("q", "next_q", "next_q_selector", "next_logits")}
    batch |= {"next_probs": normal(*shape, 3).softmax(-1), "next_q_of_critics": normal(2, *shape)}
    batch["all_next_q_of_critics"] = normal(2, *shape, 3)
    batch["action"] = torch.randint(3, shape, generator=g)
    batch["terminated"] = torch.rand(shape, generator=g) < 0.3
    return batch


# gamma = temperature = 1/2. Row 1 is terminated, and its next state holds NaN. Row 2 has a probability of 0.
# double: a* = [0, -, 1]
# expected: [1/2 + 3, -, -2]
# smallest of two critics: [2, -, -4], and for all actions [2, 3], -, [-2, inf]
# munchausen: pi[action] = [3/4, tiny, 1/2], so tau * log(pi) = [log(3/4) / 2, below -1, log(1/2) / 2];
#             next value log(1 + 3) / 2, -, log(2) / 2
HAND = {
    "reward": torch.tensor([1.0, 2.0, 3.0]),
    "terminated": torch.tensor([False, True, False]),
    "next_q": torch.tensor([[2.0, 4.0], [NAN, NAN], [-2.0, -6.0]]),
    "next_q_selector": torch.tensor([[1.0, 0.0], [NAN, NAN], [0.0, 1.0]]),
    "next_probs": torch.tensor([[0.25, 0.75], [NAN, NAN], [1.0, 0.0]]),
    "next_q_of_critics": torch.tensor([[2.0, NAN, -4.0], [6.0, NAN, -2.0]]),
    "next_log_prob": torch.tensor([-2.0, NAN, 1.0]),
    "all_next_q_of_critics": torch.tensor(
        [[[2.0, 4.0], [NAN, NAN], [-2.0, INF]], [[3.0, 3.0], [NAN, NAN], [0.0, INF]]]
    ),
    "next_logits": torch.tensor([[log(1.0), log(3.0)], [NAN, NAN], [0.0, -INF]]),
}
MUNCHAUSEN = HAND | {
    "q": torch.tensor([[0.0, log(3.0) / 2], [0.0, -10.0], [5.0, 5.0]]),
    "action": torch.tensor([1, 1, 0]),
    "next_q": torch.tensor([[0.0, log(3.0) / 2], [NAN, NAN], [0.0, 0.0]]),
}
ENTROPY = -(0.25 * log(0.25) + 0.75 * log(0.75))
TABLE = [
    (q_target, HAND, [3.0, 2.0, 2.0]),
    (double_q_target, HAND, [2.0, 2.0, 0.0]),
    (expected_q_target, HAND, [2.75, 2.0, 2.0]),
    (min_q_target, HAND, [2.0, 2.0, 1.0]),
    (soft_min_q_target, HAND, [1 + (2 + 1) / 2, 2.0, 3 + (-4 - 0.5) / 2]),
    (soft_q_target, HAND, [1 + (2.75 + ENTROPY / 2) / 2, 2.0, 2.0]),
    (munchausen_target, MUNCHAUSEN, [1 + 0.4 * log(0.75) + log(4.0) / 4, 2 - 0.8, 3 + 0.4 * log(0.5) + log(2.0) / 4]),
]


@pytest.mark.parametrize(("kernel", "batch", "expected"), TABLE, ids=lambda x: getattr(x, "__name__", ""))
def test_by_hand(variant, kernel, batch, expected):
    close(run(kernel, batch, variant(kernel)), expected)
    integers = batch | {"reward": batch["reward"].long()}
    hyper = {name: torch.tensor(value) for name, value in HYPER[kernel].items()}
    close(run(kernel, integers, variant(kernel), **hyper), expected)


def softmax(logits):
    largest = max(logits)
    powers = [exp(x - largest) for x in logits]
    return [x / sum(powers) for x in powers]


def next_value(kernel, row, temperature):
    """The value of the next state, from lists of floats."""
    match kernel.__name__:
        case "q_target":
            return max(row["next_q"])
        case "double_q_target":
            return row["next_q"][row["next_q_selector"].index(max(row["next_q_selector"]))]
        case "expected_q_target":
            return sum(p * q for p, q in zip(row["next_probs"], row["next_q"], strict=True))
        case "munchausen_target":
            pi = softmax([q / temperature for q in row["next_q"]])
            return sum(p * (q - temperature * log(p)) for p, q in zip(pi, row["next_q"], strict=True))
        case "min_q_target":
            return min(row["next_q_of_critics"])
        case "soft_min_q_target":
            return min(row["next_q_of_critics"]) - temperature * row["next_log_prob"]
        case "soft_q_target":
            smallest = [min(q) for q in zip(*row["all_next_q_of_critics"], strict=True)]
            pi = softmax(row["next_logits"])
            return sum(p * (q - temperature * log(p)) for p, q in zip(pi, smallest, strict=True))


def loop(kernel, batch, gamma, temperature=0.0, munchausen_coef=0.0, clip_value_min=0.0):
    """Each transition in Python floats, from the equations."""
    shape = batch["reward"].shape
    gammas = torch.as_tensor(gamma).double().expand(shape).flatten().tolist()
    targets = []
    for i, gamma in enumerate(gammas):
        row = {}
        for name in FIELDS[kernel]:
            flat = batch[name].double() if batch[name].is_floating_point() else batch[name]
            at = 1 if name.endswith("of_critics") else 0
            row[name] = flat.flatten(at, at + len(shape) - 1).select(at, i).tolist()
        target = row["reward"]
        if "action" in row:
            log_pi = log(softmax([q / temperature for q in row["q"]])[row["action"]])
            target += munchausen_coef * min(max(temperature * log_pi, clip_value_min), 0.0)
        targets.append(target if row["terminated"] else target + gamma * next_value(kernel, row, temperature))
    return torch.tensor(targets, dtype=torch.float64).reshape(shape)


@each_kernel
def test_against_loop(variant, kernel):
    batch = random_batch(0, 3, 4)
    close(run(kernel, batch, variant(kernel)), loop(kernel, batch, **HYPER[kernel]))
    gamma = 0.9 ** torch.arange(12.0).reshape(3, 4)  # a discount for each transition, as of n-step targets
    close(run(kernel, batch, variant(kernel), gamma=gamma), loop(kernel, batch, **HYPER[kernel] | {"gamma": gamma}))


@each_kernel
@given(seed=seeds, shape=st.sampled_from([(1,), (5,), (2, 1, 3)]), gamma=st.floats(0.0, 1.0))
def test_any_shape_and_discount(kernel, seed, shape, gamma):
    batch, hyper = random_batch(seed, *shape), HYPER[kernel] | {"gamma": gamma}
    close(run(kernel, batch, **hyper), loop(kernel, batch, **hyper))


@each_kernel
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_the_next_state_is_not_read_where_its_weight_is_zero(kernel, junk):
    """Neither the target nor a gradient depends on it, after an end and with a discount of 0."""
    batch, gamma = random_batch(1, 6), torch.tensor([0.5, 0.0] * 3)
    hyper = {name: torch.tensor(value) for name, value in HYPER[kernel].items()} | {"gamma": gamma}
    unread, axes = batch["terminated"] | (gamma == 0.0), {"next_log_prob", "next_q_of_critics"}
    filled = {
        name: x.masked_fill(unread if name in axes else unread.unsqueeze(-1), junk) if name in UNREAD else x
        for name, x in batch.items()
    }
    leaves = [filled[name].requires_grad_() for name in FIELDS[kernel] if filled[name].is_floating_point()]
    leaves += [value.requires_grad_() for value in hyper.values()]
    out = run(kernel, filled, **hyper)
    assert torch.equal(out, run(kernel, batch, **hyper))
    for grad in torch.autograd.grad(out.sum(), leaves, allow_unused=True, materialize_grads=True):
        assert grad.isfinite().all()
    zero = run(kernel, filled | {"terminated": torch.ones_like(unread)}, gamma=torch.tensor(0.9))
    assert torch.equal(zero, run(kernel, batch, gamma=0.0))


@each_kernel
def test_gradients(kernel):
    batch = random_batch(2, 2, 3, dtype=torch.float64)
    batch["terminated"] = torch.tensor([[False, True, False], [False, False, False]])
    names = [name for name in FIELDS[kernel] if batch[name].is_floating_point() and name != "next_q_selector"]
    leaves = [batch[name].requires_grad_() for name in names]

    def target(*values):
        return run(kernel, batch | dict(zip(names, values, strict=True)))

    assert torch.autograd.gradcheck(target, leaves)
    for name, grad in zip(names, torch.autograd.grad(target(*leaves).sum(), leaves), strict=True):
        assert grad.any(), f"nothing reaches {name}: targets detach nothing"


@each_kernel
def test_bad_shapes_are_named(kernel):
    batch = random_batch(3, 3, 4)
    for parameter, name in zip(inspect.signature(kernel).parameters, FIELDS[kernel], strict=False):
        axis = 2 if name.endswith("of_critics") else 1
        for bad in (torch.cat((batch[name],) * 2, axis), batch[name].select(axis, 0)):
            wrong = f"{parameter} has shape {list(bad.shape)}, expected ["
            if name == "reward":  # the others are compared with it
                wrong = f"has shape [3, 4], expected {list(bad.shape)}, the shape of reward"
            with pytest.raises(ValueError, match=re.escape(wrong)):
                run(kernel, batch | {name: bad})


def test_another_number_of_actions_is_named():
    batch = random_batch(3, 4)
    for kernel, name, parameter in [
        (double_q_target, "next_q_selector", "next_q_selector"),
        (expected_q_target, "next_probs", "next_probs"),
        (munchausen_target, "next_q", "next_q"),
        (soft_q_target, "all_next_q_of_critics", "next_q"),
    ]:
        with pytest.raises(ValueError, match=rf"^{parameter} has shape \[.*4, 2\], expected \[.*4, 3\]$"):
            run(kernel, batch | {name: batch[name][..., :2]})


@each_kernel
def test_no_transitions_give_no_targets(kernel):
    assert run(kernel, random_batch(4, 0)).shape == (0,)


def test_munchausen_without_its_bonus_is_the_target_of_the_soft_policy():
    """With the coefficient 0, it is Expected SARSA for softmax(q / temperature), plus the entropy."""
    batch = random_batch(5, 20)
    fields = batch["next_q"][None], batch["next_q"] / 0.5, batch["terminated"]
    soft = soft_q_target(batch["reward"], *fields, gamma=0.9, temperature=0.5)
    close(run(munchausen_target, batch, gamma=0.9, munchausen_coef=0.0), soft)
    cold = run(munchausen_target, batch, gamma=0.9, munchausen_coef=0.0, temperature=1e-4)
    close(cold, run(q_target, batch, gamma=0.9), tol=1e-3)


def test_a_sample_of_soft_min_has_the_mean_of_soft_q():
    """The discrete target is the probability-weighted mean of the targets of all sampled actions."""
    batch = random_batch(6, 4)
    log_p = batch["next_logits"].log_softmax(-1)
    q = batch["all_next_q_of_critics"]
    targets = [
        soft_min_q_target(batch["reward"], q[..., a], log_p[:, a], batch["terminated"], gamma=0.9, temperature=0.3)
        for a in range(3)
    ]
    mean = (torch.stack(targets, -1) * log_p.exp()).sum(-1)
    close(run(soft_q_target, batch, gamma=0.9, temperature=0.3), mean)


def test_smoothed_action_by_hand(variant):
    # noise [0.2 * 1, 0.2 * -4 clipped to -0.5, 0.2 * 2], and the last sum is clipped to the bound
    action, noise = torch.tensor([[0.0, 0.0, 0.7]]), torch.tensor([[1.0, -4.0, 2.0]])
    low, high = torch.tensor([-1.0, -0.3, -2.0]), torch.tensor([1.0, 0.3, 0.9])
    smooth, hyper = variant(smoothed_action), {"policy_noise": 0.2, "noise_clip": 0.5}
    close(smooth(action, noise, -1.0, 1.0, **hyper), [[0.2, -0.5, 1.0]])
    close(smooth(action, noise, low, high, **hyper), [[0.2, -0.3, 0.9]])
    hyper = {"policy_noise": torch.tensor(0.2), "noise_clip": torch.tensor(0.1)}
    close(smooth(action, noise, low[:1], high[:1], **hyper), [[0.1, -0.1, 0.8]])


@given(seed=seeds, policy_noise=st.floats(0.0, 2.0), noise_clip=st.floats(0.0, 1.0))
def test_smoothed_action_against_loop(seed, policy_noise, noise_clip):
    g = torch.Generator().manual_seed(seed)
    action, noise = (torch.randn(2, 3, 2, generator=g) for _ in range(2))
    expected = [
        min(max(a + min(max(policy_noise * n, -noise_clip), noise_clip), -1.0), 1.0)
        for a, n in zip(action.flatten().tolist(), noise.flatten().tolist(), strict=True)
    ]
    actual = smoothed_action(action, noise, -1.0, 1.0, policy_noise=policy_noise, noise_clip=noise_clip)
    close(actual.flatten(), expected)


def test_smoothed_action_names_bad_shapes_and_has_the_gradient_of_a_clip():
    action, noise, hyper = torch.zeros(2, 3), torch.zeros(2, 3), {"policy_noise": 0.2, "noise_clip": 0.5}
    for name, args in {
        "noise": (action, noise[:1], -1.0, 1.0),
        "low": (action, noise, torch.zeros(2), 1.0),
        "high": (action, noise, -1.0, torch.zeros(4, 2, 3)),
    }.items():
        with pytest.raises(ValueError, match=rf"^{name} has shape"):
            smoothed_action(*args, **hyper)
    leaf = torch.tensor([0.0, 0.99, -0.5], dtype=torch.float64).requires_grad_()
    out = smoothed_action(leaf, torch.tensor([1.0, 1.0, 9.0], dtype=torch.float64), -1.0, 1.0, **hyper)
    assert torch.autograd.grad(out.sum(), leaf)[0].tolist() == [1.0, 0.0, 1.0]
