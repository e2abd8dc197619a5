"""Losses: their numbers, what they differentiate, and that masked entries may hold anything."""

from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, close

from ecrl.kernels import (
    a2c_loss,
    adaptive_kl_coef,
    categorical_kl,
    categorical_log_prob,
    clipped_surrogate,
    clipped_value_loss,
    explained_variance,
    grpo_loss,
    huber_value_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_with_k2_gradient,
    masked_mean,
    policy_gradient_loss,
    ppo_loss,
    ppo_loss_clipped_value,
    ppo_loss_kl_penalty,
    standardize,
    value_loss,
)

NAN, INF = float("nan"), float("inf")
T, F = True, False
seeds = st.integers(0, 2**31)
# Every kernel: its tensors, the ones a gradient reaches, its hyperparameters.
PPO = ("log_prob", "old_log_prob", "advantage", "entropy", "value", "value_target", "mask")
PPO_CLIPPED = (*PPO[:5], "old_value", *PPO[5:])
PPO_KL = (*PPO[:3], "kl", *PPO[3:])
A2C = ("log_prob", *PPO[2:])
GRPO = ("log_prob", "old_log_prob", "ref_log_prob", "advantage", "entropy", "mask")
KERNELS = {
    masked_mean: (("x", "mask"), ("x",), {}),
    standardize: (("x", "mask"), ("x",), {"eps": 1e-8}),
    clipped_surrogate: (("log_prob", "old_log_prob", "advantage", "mask"), ("log_prob",), {"clip_coef": 0.2}),
    policy_gradient_loss: (("log_prob", "advantage", "mask"), ("log_prob",), {}),
    a2c_loss: (A2C, ("log_prob", "entropy", "value"), {"vf_coef": 0.5, "ent_coef": 0.1}),
    value_loss: (("value", "value_target", "mask"), ("value",), {}),
    huber_value_loss: (("value", "value_target", "mask"), ("value",), {"delta": 0.8}),
    clipped_value_loss: (("value", "old_value", "value_target", "mask"), ("value",), {"clip_coef": 0.2}),
    kl_k1: (("log_prob", "ref_log_prob"), ("log_prob", "ref_log_prob"), {}),
    kl_k2: (("log_prob", "ref_log_prob"), ("log_prob", "ref_log_prob"), {}),
    kl_k3: (("log_prob", "ref_log_prob"), ("log_prob", "ref_log_prob"), {}),
    kl_k3_with_k2_gradient: (("log_prob", "ref_log_prob"), ("log_prob", "ref_log_prob"), {}),
    explained_variance: (("value", "value_target", "mask"), (), {}),
    ppo_loss: (PPO, ("log_prob", "entropy", "value"), {"clip_coef": 0.2, "vf_coef": 0.5, "ent_coef": 0.1}),
    ppo_loss_clipped_value: (
        PPO_CLIPPED,
        ("log_prob", "entropy", "value"),
        {"clip_coef": 0.2, "vf_coef": 0.5, "ent_coef": 0.1},
    ),
    ppo_loss_kl_penalty: (
        PPO_KL,
        ("log_prob", "kl", "entropy", "value"),
        {"kl_coef": 0.6, "vf_coef": 0.5, "ent_coef": 0.1},
    ),
    grpo_loss: (GRPO, ("log_prob", "entropy"), {"clip_coef": 0.2, "kl_coef": 0.6, "ent_coef": 0.1}),
}
MASKED = [kernel for kernel, (names, _, _) in KERNELS.items() if "mask" in names]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
each_masked = pytest.mark.parametrize("kernel", MASKED, ids=lambda k: k.__name__)


def random_batch(seed, *shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    names = (
        "x",
        "advantage",
        "entropy",
        "value",
        "old_value",
        "value_target",
        "log_prob",
        "old_log_prob",
        "ref_log_prob",
        "kl",
    )
    batch = {name: torch.randn(shape, generator=g, dtype=dtype) for name in names}
    batch |= {name: 0.3 * batch[name] for name in names if "log_prob" in name}  # ratios on both sides of the clip
    batch["mask"] = torch.rand(shape, generator=g) < 0.7
    batch["mask"].view(-1)[0] = True
    return batch


def run(kernel, batch, call=None, **hyper):
    """`(output, logs)`; logs are empty where the kernel has none."""
    names, _, defaults = KERNELS[kernel]
    out = (call or kernel)(**{name: batch[name] for name in names}, **(defaults | hyper))
    return out if isinstance(out, tuple) else (out, {})


def with_junk(batch, fill):
    return {k: v.masked_fill(~batch["mask"], fill) if v.is_floating_point() else v for k, v in batch.items()}


# Three counted entries and one that holds NaN. ratio = [1, 3/2, 1/2], clipped to [1, 5/4, 3/4], advantage [2, 1, -1]:
# min of both products [2, 5/4, -3/4], mean 5/6. k3 of old against new: ratio - 1 - log(ratio), sum log(4/3).
# value - target = [-1, 0, -2]: mean square 5/3. Targets 2, 2, 5: variance 2; residuals 1, 0, 2: variance 2/3.
# Held within 1/4 of the old values [2, 2, 2]: [7/4, 2, 9/4], errors [1/16, 0, 121/16]; the larger [1, 0, 121/16].
# ref / new = [1, 2, 1/2]: k3 = [0, 1 - log 2, log 2 - 1/2], mean 1/6.
# Policy gradient: log_prob * advantage = [0, log(3/2), log 2], sum log 3. Unclipped: [2, 3/2, -1/2], mean 1.
# Huber losses of [-1, 0, -2] with delta 3/2: [1/2, 0, 3/2 * (2 - 3/4)] = [1/2, 0, 15/8], mean 19/24.
HAND = {
    "log_prob": torch.tensor([1.0, 1.5, 0.5, NAN]).log(),
    "old_log_prob": torch.tensor([0.0, 0.0, 0.0, NAN]),
    "ref_log_prob": torch.tensor([1.0, 3.0, 0.25, NAN]).log(),
    "advantage": torch.tensor([2.0, 1.0, -1.0, NAN]),
    "kl": torch.tensor([0.5, 0.0, 1.0, NAN]),
    "entropy": torch.tensor([1.0, 2.0, 3.0, NAN]),
    "value": torch.tensor([1.0, 2.0, 3.0, NAN]),
    "old_value": torch.tensor([2.0, 2.0, 2.0, NAN]),
    "value_target": torch.tensor([2.0, 2.0, 5.0, NAN]),
    "mask": torch.tensor([T, T, T, F]),
}
POLICY = {"policy_loss": -5 / 6, "approx_kl": log(4 / 3) / 3, "clip_frac": 2 / 3}
TABLE = [
    (clipped_surrogate, {"clip_coef": 0.25}, -5 / 6, POLICY),
    (policy_gradient_loss, {}, -log(3) / 3, {"policy_loss": -log(3) / 3}),
    (
        a2c_loss,
        {"vf_coef": 0.5, "ent_coef": 0.1},
        -log(3) / 3 + 0.5 * 5 / 3 - 0.1 * 2,
        {"policy_loss": -log(3) / 3, "value_loss": 5 / 3, "entropy": 2.0, "explained_variance": 2 / 3, "count": 3.0},
    ),
    (value_loss, {}, 5 / 3, {}),
    (huber_value_loss, {"delta": 1.5}, 19 / 24, {}),
    (huber_value_loss, {"delta": INF}, 5 / 6, {}),
    (explained_variance, {}, 2 / 3, {}),
    (
        ppo_loss,
        {"clip_coef": 0.25, "vf_coef": 0.5, "ent_coef": 0.1},
        -5 / 6 + 0.5 * 5 / 3 - 0.1 * 2,
        POLICY | {"value_loss": 5 / 3, "entropy": 2.0, "explained_variance": 2 / 3, "count": 3.0},
    ),
    (
        ppo_loss_clipped_value,
        {"clip_coef": 0.25, "vf_coef": 0.5, "ent_coef": 0.1},
        -5 / 6 + 0.5 * 137 / 48 - 0.1 * 2,
        POLICY | {"value_loss": 137 / 48, "entropy": 2.0, "explained_variance": 2 / 3, "count": 3.0},
    ),
    (
        ppo_loss_kl_penalty,
        {"kl_coef": 0.6, "vf_coef": 0.5, "ent_coef": 0.1},
        -1.0 + 0.6 * 0.5 + 0.5 * 5 / 3 - 0.1 * 2,
        {
            "policy_loss": -1.0,
            "kl": 0.5,
            "value_loss": 5 / 3,
            "entropy": 2.0,
            "explained_variance": 2 / 3,
            "count": 3.0,
        },
    ),
    (
        grpo_loss,
        {"clip_coef": 0.25, "kl_coef": 0.6, "ent_coef": 0.1},
        -5 / 6 + 0.6 / 6 - 0.1 * 2,
        POLICY | {"entropy": 2.0, "kl_ref": 1 / 6, "count": 3.0},
    ),
]


@pytest.mark.parametrize(("kernel", "hyper", "expected", "expected_logs"), TABLE)
def test_by_hand(variant, kernel, hyper, expected, expected_logs):
    loss, logs = run(kernel, HAND, variant(kernel), **hyper)
    close(loss, expected)
    assert set(logs) == set(expected_logs)
    for name, value in expected_logs.items():
        close(logs[name], value)


def test_clipped_value_loss_by_hand(variant):
    # held = [0.5, 0.25, -0.5]; plain squares [0, 0.5625, 1], held ones [2.25, 0.5625, 0.25], larger [2.25, 0.5625, 1]
    value, target = torch.tensor([2.0, 0.25, -1.0, NAN]), torch.tensor([2.0, 1.0, 0.0, NAN])
    loss = variant(clipped_value_loss)(value, torch.tensor([0.0, 0.0, 0.0, NAN]), target, HAND["mask"], clip_coef=0.5)
    close(loss, 3.8125 / 3)


def test_means_by_hand(variant):
    x, mask = torch.tensor([[1.0, 3.0], [NAN, 5.0]]), torch.tensor([[T, T], [F, T]])
    close(variant(masked_mean)(x, mask), 3.0)
    close(variant(masked_mean)(x, torch.zeros_like(mask)), 0.0)
    close(variant(standardize)(x, mask, eps=1e-8), [[-1.0, 0.0], [0.0, 1.0]])  # variance (4 + 0 + 4) / 2
    close(variant(standardize)(x, mask, eps=4.0), [[-0.5, 0.0], [0.0, 0.5]])  # 4 is the larger divisor
    close(variant(standardize)(x, mask & (x > 4), eps=1e-8), [[0.0, 0.0], [0.0, 0.0]])  # one entry has no spread


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.0, 1.5),  # 3 / 2
        (0.9, 1.5),  # below 2 / 2
        (1.0, 3.0),  # within [1, 4], ends included
        (4.0, 3.0),
        (4.1, 6.0),
        (INF, 6.0),
        (NAN, 3.0),
    ],
)
def test_adaptive_kl_coef_by_hand(variant, kl, expected):
    numbers = {"target_kl": 2.0, "tolerance": 2.0, "factor": 2.0}
    for given_as in (float, torch.tensor):
        hyper = {name: given_as(number) for name, number in numbers.items()}
        close(variant(adaptive_kl_coef)(torch.tensor(3.0), torch.tensor(kl), **hyper), expected)


@given(seed=seeds, tolerance=st.floats(1.0, 4.0), factor=st.floats(1.125, 4.0))
def test_adaptive_kl_coef_moves_against_the_divergence(seed, tolerance, factor):
    kl_coef, kl, target_kl = torch.rand(3, generator=torch.Generator().manual_seed(seed)).add(0.01).unbind()
    hyper = {"target_kl": target_kl, "tolerance": tolerance, "factor": factor}
    after = adaptive_kl_coef(kl_coef.requires_grad_(), kl, **hyper)
    assert not after.requires_grad and min(after, kl_coef) >= max(after, kl_coef) / (1.001 * factor)
    assert (after > kl_coef) == (kl > target_kl * tolerance) and (after < kl_coef) == (kl < target_kl / tolerance)


@pytest.mark.parametrize("name", ["kl_coef", "kl"])
def test_adaptive_kl_coef_names_a_tensor_of_several_numbers(name):
    tensors = {"kl_coef": torch.tensor(1.0), "kl": torch.tensor(1.0)} | {name: torch.ones(2)}
    with pytest.raises(ValueError, match=rf"^{name} has shape \[2\], expected a number or a 0-d tensor$"):
        adaptive_kl_coef(**tensors, target_kl=0.01, tolerance=1.5, factor=2.0)


@pytest.mark.parametrize("name", ["kl_coef", "kl"])
def test_adaptive_kl_coef_names_a_float(name):
    tensors = {"kl_coef": torch.tensor(1.0), "kl": torch.tensor(1.0)} | {name: 1.0}
    with pytest.raises(TypeError, match=rf"^{name} is a float, expected a tensor"):
        adaptive_kl_coef(**tensors, target_kl=0.01, tolerance=1.5, factor=2.0)


CONSTANTS = [1e-3, 0.1, -1e6, 1e17]


@pytest.mark.parametrize("constant", CONSTANTS)
def test_standardize_of_a_constant_is_zero(variant, constant):
    for count, eps in ((3, 0.0), (4097, 1e-8)):
        mask = torch.arange(count) % 7 != 3
        x = torch.full((count,), constant).masked_fill(~mask, NAN)
        close(variant(standardize)(x, mask, eps=eps), torch.zeros(count), tol=0.0)


@pytest.mark.parametrize("constant", CONSTANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_standardize_of_a_large_constant_batch_is_zero(constant, dtype):
    """A million entries, with and without a mask, whole and as parts of several processes."""
    x = torch.full((1000, 1000), constant, dtype=dtype).requires_grad_()
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    for counted in (torch.ones_like(mask), mask, mask.t()):
        out = standardize(x, counted, eps=1e-8, total=lambda part: part + part + part)
        assert not out.any() and not standardize(x, counted, eps=1e-8).any()
        assert not torch.autograd.grad(out.sum(), x)[0].any()


@pytest.mark.slow
@pytest.mark.parametrize("constant", CONSTANTS)
def test_standardize_of_a_large_constant_batch_is_zero_when_compiled(constant):
    """Inductor adds a million equal floats with an error of 500 eps."""
    x = torch.full((1000, 1000), constant)
    some = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    for mask in (torch.ones_like(some), some):
        assert not torch.compile(standardize, fullgraph=True)(x, mask, eps=1e-8).any()


@pytest.mark.parametrize(
    ("offset", "step"),
    [(1.0, 1e-6), (-100.0, 1e-4), (1e6, 0.5), (1e17, 1e11), (1e-6, 1e-12), (0.0, 1e-12), (0.0, 1e10)],
)
def test_standardize_keeps_a_small_spread_on_a_large_offset(variant, offset, step):
    x = torch.tensor([offset - step, offset, offset + step])
    expected = (x.double() - x.double().mean()) / x.double().std()
    close(variant(standardize)(x, torch.tensor([T, T, T]), eps=0.0), expected, tol=0.1)  # the mean is a float


def test_kl_by_hand(variant):
    log_prob, ref = torch.tensor([0.0, 2.0, -1.0]), torch.tensor([0.0, 1.0, 1.0])
    close(variant(kl_k1)(log_prob, ref), [0.0, 1.0, -2.0])
    close(variant(kl_k2)(log_prob, ref), [0.0, 0.5, 2.0])
    close(variant(kl_k3)(log_prob, ref), [0.0, exp(-1.0), exp(2.0) - 3.0])
    close(variant(kl_k3_with_k2_gradient)(log_prob, ref), [0.0, exp(-1.0), exp(2.0) - 3.0])
    close(variant(kl_k3)(torch.tensor([1e-4]), torch.tensor([0.0])) / 5e-9, [1.0], tol=1e-2)  # no cancellation near 0


@pytest.mark.parametrize(
    ("value", "target", "mask", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [T, T, T], 1.0),
        ([6.0, 7.0, 8.0], [1.0, 2.0, 3.0], [T, T, T], 1.0),  # a constant error is not variance
        ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0], [T, T, T], 0.0),  # no better than the mean
        ([-1.0, -2.0, -3.0], [1.0, 2.0, 3.0], [T, T, T], -3.0),  # residual 2 * target: 1 - 4
        ([0.0, 1.0, 4.0], [0.0, 2.0, 4.0], [T, T, T], 1 - (2 / 9) / (8 / 3)),
        ([1.0, 5.0, NAN], [1.0, 5.0, INF], [T, T, F], 1.0),
        ([1.0, 5.0, 7.0], [2.0, 9.0, 9.0], [T, F, F], 0.0),
        ([1.0, 5.0, 7.0], [2.0, 9.0, 9.0], [F, F, F], 0.0),
        ([1.0, 5.0, 7.0], [2.0, 2.0, 2.0], [T, T, T], 0.0),
        ([1.0, 5.0, 7.0] * 3, [0.1] * 9, [T] * 9, 0.0),  # the float32 mean of these is not 0.1
        ([1.0, 5.0] * 5, [-1234.567] * 10, [T] * 10, 0.0),
        ([0.0, 0.0, 0.0], [100.0, 100.01, 99.99], [T, T, T], 0.0),
        ([100.0, 100.01, 99.99], [100.0, 100.01, 99.99], [T, T, T], 1.0),
        ([1e-9, 2e-9, 3e-9], [1e-9, 2e-9, 3e-9], [T, T, T], 1.0),
    ],
)
def test_explained_variance(variant, value, target, mask, expected):
    close(variant(explained_variance)(torch.tensor(value), torch.tensor(target), torch.tensor(mask)), expected)


# Log-ratios beyond the bound, half the logarithm of the largest float. Advantages: positive, negative and none at all.
# The clip holds the first at 1.2 * 2 and the third at 0; the second is exp(bound) * -1, with no gradient beyond it.
FAR = {"log_prob": torch.tensor([500.0, 600.0, 1000.0, 0.0]), "old_log_prob": torch.zeros(4)}
FAR |= {"advantage": torch.tensor([2.0, -1.0, 0.0, 1.0]), "mask": torch.tensor([T, T, T, T])}


@pytest.mark.parametrize(
    "kernel",
    [k for k in MASKED if "clip_coef" in KERNELS[k][2] and "advantage" in KERNELS[k][0]],
    ids=lambda k: k.__name__,
)
def test_ratios_that_overflow_leave_loss_and_gradient_finite(variant, kernel):
    zeros = {name: torch.zeros(4) for name in KERNELS[kernel][0]}
    loss, logs = run(kernel, zeros | FAR, variant(kernel), clip_coef=0.2)
    bound = log(torch.finfo(loss.dtype).max) / 2
    policy_loss = (-2.4 + exp(bound) - 1.0) / 4
    close(logs["policy_loss"] / policy_loss, 1.0)
    close(logs["approx_kl"] / (3 * (exp(bound) - 1 - bound) / 4), 1.0)
    assert torch.isfinite(loss) and all(value.isfinite() for value in logs.values())


@pytest.mark.parametrize(
    "kernel",
    [k for k in MASKED if "clip_coef" in KERNELS[k][2] and "advantage" in KERNELS[k][0]],
    ids=lambda k: k.__name__,
)
def test_gradients_of_ratios_that_overflow(kernel):
    zeros = {name: torch.zeros(4) for name in KERNELS[kernel][0]}
    log_prob = FAR["log_prob"].clone().requires_grad_()
    if kernel is grpo_loss:
        zeros["ref_log_prob"] = log_prob.detach()  # no penalty
    loss, _ = run(kernel, zeros | FAR | {"log_prob": log_prob}, clip_coef=0.2)
    assert torch.autograd.grad(loss, log_prob)[0].tolist() == [0.0, 0.0, 0.0, -0.25]
    only = FAR["mask"] & (FAR["advantage"] >= 0)  # without the negative one the loss is an ordinary number
    close(run(kernel, zeros | FAR | {"log_prob": log_prob, "mask": only}, clip_coef=0.2)[0], -3.4 / 3)


def test_a_ratio_without_a_clip_is_finite(variant):
    """The ratios of the first three are exp(bound): the mean of [2 e, -e, 0, 1]."""
    zeros = {name: torch.zeros(4) for name in PPO_KL}
    loss, logs = run(ppo_loss_kl_penalty, zeros | FAR, variant(ppo_loss_kl_penalty))
    close(loss / ((1.0 + exp(log(torch.finfo(loss.dtype).max) / 2)) / 4), -1.0)
    assert all(value.isfinite() for value in logs.values())
    log_prob = FAR["log_prob"].clone().requires_grad_()
    (grad,) = torch.autograd.grad(run(ppo_loss_kl_penalty, zeros | FAR | {"log_prob": log_prob})[0], log_prob)
    assert grad.tolist() == [0.0, 0.0, 0.0, -0.25]


def test_a_bounded_k3_is_finite(variant):
    q = torch.tensor([1.0, 40.0, 1000.0, INF])
    actual = variant(kl_k3)(torch.zeros(4), q)
    bound = log(torch.finfo(actual.dtype).max) / 2
    expected = [exp(x) - 1 - x for x in (1.0, 40.0, bound, bound)]
    close(actual / torch.tensor(expected, dtype=torch.float64), torch.ones(4))
    leaf = torch.zeros(4).requires_grad_()
    grad = torch.autograd.grad(kl_k3(leaf, q).sum(), leaf)[0]
    close(grad / torch.tensor([1 - exp(1.0), 1 - exp(40.0), 1.0, 1.0]), [1.0, 1.0, 0.0, 0.0])


def mean(terms):
    return sum(terms) / max(1, len(terms))


def loop(kernel, batch, **hyper):
    """The loss, in Python floats over the counted entries, from the equations."""
    names = KERNELS[kernel][0]
    rows = [
        dict(zip(names, row, strict=True)) for row in zip(*(batch[n].flatten().tolist() for n in names), strict=True)
    ]
    rows = [row for row in rows if row["mask"]]

    def surrogate(r):
        ratio, eps = exp(r["log_prob"] - r["old_log_prob"]), hyper["clip_coef"]
        return min(ratio * r["advantage"], min(max(ratio, 1 - eps), 1 + eps) * r["advantage"])

    def huber(r):
        size, delta = abs(r["value"] - r["value_target"]), hyper["delta"]
        return size**2 / 2 if size <= delta else delta * (size - delta / 2)

    def actor_critic(policy):
        return (
            policy
            + hyper["vf_coef"] * mean([critic(r) for r in rows])
            - hyper["ent_coef"] * mean([r["entropy"] for r in rows])
        )

    def k3(r):
        q = r["ref_log_prob"] - r["log_prob"]
        return exp(q) - 1 - q

    def held(r):
        return r["old_value"] + min(max(r["value"] - r["old_value"], -hyper["clip_coef"]), hyper["clip_coef"])

    def critic(r):
        return (r["value"] - r["value_target"]) ** 2

    def held_critic(r):
        return max(critic(r), (held(r) - r["value_target"]) ** 2)

    match kernel.__name__:
        case "masked_mean":
            return mean([r["x"] for r in rows])
        case "value_loss":
            return mean([critic(r) for r in rows])
        case "clipped_value_loss":
            return mean([held_critic(r) for r in rows])
        case "explained_variance":
            targets = [r["value_target"] for r in rows]
            errors = [r["value_target"] - r["value"] for r in rows]
            spread = [mean([(x - mean(xs)) ** 2 for x in xs]) for xs in (errors, targets)]
            return 1 - spread[0] / spread[1]
        case "huber_value_loss":
            return mean([huber(r) for r in rows])
        case "policy_gradient_loss":
            return -mean([r["log_prob"] * r["advantage"] for r in rows])
        case "a2c_loss":
            return actor_critic(-mean([r["log_prob"] * r["advantage"] for r in rows]))
        case "ppo_loss_kl_penalty":
            ratio = [exp(r["log_prob"] - r["old_log_prob"]) * r["advantage"] for r in rows]
            return actor_critic(hyper["kl_coef"] * mean([r["kl"] for r in rows]) - mean(ratio))
        case "clipped_surrogate":
            return -mean([surrogate(r) for r in rows])
        case "ppo_loss" | "ppo_loss_clipped_value":
            error = held_critic if "old_value" in names else critic
            bonus = hyper["ent_coef"] * mean([r["entropy"] for r in rows])
            return -mean([surrogate(r) for r in rows]) + hyper["vf_coef"] * mean([error(r) for r in rows]) - bonus
        case "grpo_loss":
            bonus = hyper["ent_coef"] * mean([r["entropy"] for r in rows])
            return -mean([surrogate(r) for r in rows]) + hyper["kl_coef"] * mean([k3(r) for r in rows]) - bonus


@pytest.mark.parametrize("kernel", [k for k in MASKED if k is not standardize], ids=lambda k: k.__name__)
def test_against_loop(variant, kernel):
    for shape in ((9,), (4, 5)):
        batch = random_batch(0, *shape)
        close(run(kernel, batch, variant(kernel))[0], loop(kernel, batch, **KERNELS[kernel][2]))


@given(seed=seeds)
def test_standardize_against_numpy(seed):
    batch = random_batch(seed, 5, 6)
    x, mask = batch["x"].double().numpy(), batch["mask"].numpy()
    expected = (x - x[mask].mean()) / x[mask].std(ddof=1) * mask
    close(standardize(batch["x"], batch["mask"], eps=1e-8), torch.from_numpy(expected))


@each_masked
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@given(seed=seeds)
def test_masked_entries_change_neither_loss_nor_gradient(kernel, junk, seed):
    batch, live = random_batch(seed, 4, 3), KERNELS[kernel][1]
    results = []
    for filled in (with_junk(batch, 0.0), with_junk(batch, junk)):
        leaves = [filled[k].requires_grad_() for k in live]
        out, logs = run(kernel, filled)
        weighted = (out * torch.arange(1.0, out.numel() + 1).reshape(out.shape)).sum()
        results.append([out, *logs.values(), *(torch.autograd.grad(weighted, leaves) if live else [])])
    for clean, dirty in zip(*results, strict=True):
        assert torch.isfinite(clean).all()
        assert torch.equal(clean, dirty)


@each_masked
@pytest.mark.parametrize("junk", [0.5, NAN, INF])
def test_all_masked_gives_zero_and_no_gradient(kernel, junk):
    batch = random_batch(0, 3, 2) | {"mask": torch.zeros(3, 2, dtype=torch.bool)}
    batch, live = with_junk(batch, junk), KERNELS[kernel][1]
    leaves = [batch[k].requires_grad_() for k in live]
    out, logs = run(kernel, batch)
    for value in (out, *logs.values(), *(torch.autograd.grad(out.sum(), leaves) if live else [])):
        assert torch.equal(value, torch.zeros_like(value))


@each_kernel
def test_gradient_reaches_exactly_the_documented_arguments(kernel):
    names, live, _ = KERNELS[kernel]
    batch = random_batch(1, 4, 5)
    leaves = {k: batch[k].requires_grad_() for k in names if k != "mask"}
    out, logs = run(kernel, batch)
    assert not any(v.requires_grad or v.shape for v in logs.values())
    assert out.requires_grad == bool(live)
    if live:
        grads = torch.autograd.grad(out.square().sum(), list(leaves.values()), allow_unused=True)
        reached = {k for k, grad in zip(leaves, grads, strict=True) if grad is not None and grad.any()}
        assert reached == set(live)


@given(seed=seeds)
def test_mean_gradients_of_kl_estimates(seed):
    """The exact mean over a policy's five actions, against the gradients of both divergences."""
    g = torch.Generator().manual_seed(seed)
    logits, ref = (torch.randn(5, generator=g, dtype=torch.float64) for _ in range(2))
    log_prob, ref = logits.requires_grad_().log_softmax(0), ref.log_softmax(0)
    chance = log_prob.detach().exp()
    forward = torch.autograd.grad((log_prob.exp() * (log_prob - ref)).sum(), logits, retain_graph=True)[0]
    reverse = torch.autograd.grad((ref.exp() * (ref - log_prob)).sum(), logits, retain_graph=True)[0]
    expected = {kl_k1: 0 * forward, kl_k2: forward, kl_k3: reverse, kl_k3_with_k2_gradient: forward}
    for kernel, gradient in expected.items():
        estimate = (chance * kernel(log_prob, ref)).sum()
        close(torch.autograd.grad(estimate, logits, retain_graph=True)[0], gradient, tol=1e-10)
        if kernel is not kl_k2:
            close(estimate.detach(), (chance * (log_prob - ref)).sum().detach(), tol=1e-10)


def test_k3_with_the_gradient_of_k2_by_hand(variant):
    log_prob, ref = torch.tensor([1.0, -2.0, -INF]).requires_grad_(), torch.tensor([0.0, 0.0, 0.0])
    (grad,) = torch.autograd.grad(kl_k3_with_k2_gradient(log_prob, ref).sum(), log_prob)
    assert grad.tolist() == [1.0, -2.0, 0.0]
    assert variant(kl_k3_with_k2_gradient)(log_prob.detach(), ref).isfinite().all()


NO_STOP = [k for k, (_, live, _) in KERNELS.items() if live and k is not kl_k3_with_k2_gradient]


@pytest.mark.parametrize("kernel", NO_STOP, ids=lambda k: k.__name__)
def test_gradcheck(kernel):
    batch, live = random_batch(2, 2, 4, dtype=torch.float64), KERNELS[kernel][1]
    leaves = [batch[k].requires_grad_() for k in live]
    assert torch.autograd.gradcheck(lambda *xs: run(kernel, batch | dict(zip(live, xs, strict=True)))[0], leaves)


@given(seed=seeds)
def test_ppo_at_ratio_one_is_reinforce(seed):
    batch = random_batch(seed, 4, 5)
    log_prob = batch["log_prob"].requires_grad_()
    same = batch | {"old_log_prob": log_prob.detach().clone()}
    weight = batch["mask"] / batch["mask"].sum()
    reinforce = torch.autograd.grad(-(log_prob * batch["advantage"] * weight).sum(), log_prob)[0]
    for kernel in (ppo_loss, ppo_loss_clipped_value, clipped_surrogate):
        loss, logs = run(kernel, same)
        close(torch.autograd.grad(loss, log_prob)[0], reinforce, tol=1e-6)
        assert logs["approx_kl"] == logs["clip_frac"] == 0.0
    for kernel in (ppo_loss_kl_penalty, policy_gradient_loss, a2c_loss):
        close(torch.autograd.grad(run(kernel, same)[0], log_prob)[0], reinforce, tol=1e-6)


@given(seed=seeds)
def test_the_order_of_entries_does_not_matter(seed):
    batch, order = random_batch(seed, 12), torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    for kernel in [kernel for kernel in MASKED if kernel is not standardize]:
        shuffled, plain = run(kernel, {k: v[order] for k, v in batch.items()})[0], run(kernel, batch)[0]
        close(shuffled, plain, tol=1e-4)


@given(seed=seeds)
def test_a_value_that_stayed_near_is_not_held(seed):
    """Within clip_coef of the old value both PPO losses are one; far from it the clipped one is never smaller."""
    batch = random_batch(seed, 12)
    near = batch | {"old_value": batch["value"] + 0.19 * torch.tanh(batch["old_value"])}
    close(run(ppo_loss_clipped_value, near)[0], run(ppo_loss, near)[0])
    assert run(ppo_loss_clipped_value, batch)[0] >= run(ppo_loss, batch)[0] - 1e-6


@given(seed=seeds)
def test_the_huber_loss_lies_between_its_limits(seed):
    batch = random_batch(seed, 12)
    squared, absolute = run(value_loss, batch)[0], loop(huber_value_loss, batch, delta=1e-6) / 1e-6
    close(run(huber_value_loss, batch, delta=50.0)[0], squared / 2)
    close(run(huber_value_loss, batch, delta=1e-6)[0] / 1e-6, absolute)
    assert run(huber_value_loss, batch)[0] <= min(squared / 2, 0.8 * absolute) + 1e-5


@given(seed=seeds)
def test_the_penalty_pulls_the_policy_back(seed):
    """With the exact divergence and no advantage, the gradient vanishes at the old policy only."""
    g = torch.Generator().manual_seed(seed)
    old, new = torch.randn(2, 6, 3, generator=g, dtype=torch.float64).unbind()
    action, batch = torch.arange(6) % 3, random_batch(seed, 6, dtype=torch.float64)
    for logits, moves in ((old, False), (new, True)):
        logits = logits.clone().requires_grad_()
        probs = {"log_prob": categorical_log_prob(logits, action), "old_log_prob": categorical_log_prob(old, action)}
        fields = batch | probs | {"advantage": torch.zeros(6), "kl": categorical_kl(old, logits)}
        (grad,) = torch.autograd.grad(run(ppo_loss_kl_penalty, fields)[0], logits)
        assert (grad.abs() > 1e-9)[batch["mask"]].any(-1).all() == moves and not grad[~batch["mask"]].any()


@pytest.mark.parametrize("kernel", [clipped_surrogate, grpo_loss, policy_gradient_loss], ids=lambda k: k.__name__)
def test_advantage_per_step_serves_every_token(variant, kernel):
    # [N, T, L] log-probabilities with [N, T] or [N] advantages: the same as an advantage repeated per token by hand.
    batch = random_batch(3, 2, 3, 4)
    for ndim in (1, 2, 3):
        advantage = batch["advantage"].reshape(-1)[: 24 // 4 ** (ndim < 3) // 3 ** (ndim < 2)].reshape((2, 3, 4)[:ndim])
        repeated = advantage.reshape(*advantage.shape, *[1] * (3 - ndim)).expand(2, 3, 4).clone()
        out, logs = run(kernel, batch | {"advantage": advantage}, variant(kernel))
        expected, expected_logs = run(kernel, batch | {"advantage": repeated})
        close(out, expected)
        for name in logs:
            close(logs[name], expected_logs[name])


def test_a_masked_step_may_have_any_advantage():
    batch = random_batch(4, 2, 3, 4)
    batch["mask"][1, 2] = False
    advantage, log_prob = batch["advantage"][..., 0].clone(), batch["log_prob"].requires_grad_()
    grads = []
    for junk in (0.0, NAN):
        advantage[1, 2] = junk
        grads.append(torch.autograd.grad(run(grpo_loss, batch | {"advantage": advantage})[0], log_prob)[0])
    assert torch.equal(*grads)


@each_kernel
def test_no_retrace(kernel):
    names, _, hyper = KERNELS[kernel]

    def call(batch, *values):
        return run(kernel, batch, **dict(zip(hyper, values, strict=True)))

    def inputs(seed):
        batch = random_batch(seed, 2, 3)
        return ({k: batch[k] for k in names}, *(torch.tensor(v * seed) for v in hyper.values()))

    assert_no_retrace(call, inputs(1), inputs(2))


@each_kernel
def test_hyperparameters_as_tensors(kernel):
    batch, hyper = random_batch(5, 3, 4), KERNELS[kernel][2]
    close(run(kernel, batch, **{k: torch.tensor(v) for k, v in hyper.items()})[0], run(kernel, batch, **hyper)[0])


@each_kernel
def test_bad_shapes_are_named(kernel):
    batch, names = random_batch(6, 3, 4), KERNELS[kernel][0]
    for name in names:
        bad = batch | {name: torch.zeros(3, 5, dtype=batch[name].dtype)}
        with pytest.raises(ValueError, match=rf"\b{name} has shape \[3, 5\]|expected \[3, 5\], the shape of {name}$"):
            run(kernel, bad)


def test_the_loss_has_the_common_dtype_of_all_float_tensors():
    batch = random_batch(0, 4)
    for name in PPO_CLIPPED[:-1]:
        loss, _ = ppo_loss_clipped_value(
            **{n: batch[n].double() if n == name else batch[n] for n in PPO_CLIPPED},
            clip_coef=0.2,
            vf_coef=1.0,
            ent_coef=0.0,
        )
        assert loss.dtype == torch.float64, name
