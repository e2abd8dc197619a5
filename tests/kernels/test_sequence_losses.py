"""Losses per token: reference values, values and gradients against loops, masks, ratios that overflow, and errors."""

from math import exp, inf, log, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_pure, close

from ecrl.kernels import (
    cispo_loss,
    clipped_surrogate,
    clipped_surrogate_asymmetric,
    fixed_length_mean,
    gspo_loss,
    kl_k3,
    sapo_loss,
    sequence_log_ratio,
    sequence_mean,
    token_mean,
    vespo_loss,
)

F64 = torch.float64
T, F = True, False
seeds = st.integers(0, 2**31)
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
DUAL = CLIPS | {"dual_clip": 3.0}
TAUS = {"tau_positive": 1.0, "tau_negative": 1.05}
GATES = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}
LOSSES = {
    clipped_surrogate_asymmetric: CLIPS | {"dual_clip": 1.5},
    gspo_loss: {"clip_low": 0.15, "clip_high": 0.2},
    cispo_loss: CLIPS,
    sapo_loss: TAUS,
    vespo_loss: GATES,
}
each_loss = pytest.mark.parametrize("kernel", LOSSES, ids=lambda k: k.__name__)
each_clip = pytest.mark.parametrize("kernel", [clipped_surrogate_asymmetric, gspo_loss, cispo_loss])


def random_batch(seed, *shape, dtype=F64, per_token=False):
    """Return log_prob, old_log_prob, advantage and mask, with ratios on both sides of the clips."""
    g = torch.Generator().manual_seed(seed)
    log_prob, old = (0.4 * torch.randn(shape, generator=g, dtype=dtype) - 1.0 for _ in range(2))
    advantage = torch.randn(shape if per_token else shape[:-1], generator=g, dtype=dtype)
    return log_prob, old, advantage, torch.rand(shape, generator=g) < 0.7


def with_junk(batch, fill):
    """Put `fill` in the masked entries, and in the advantage of sequences without an unmasked token."""
    log_prob, old, advantage, mask = batch
    masked = ~mask if advantage.ndim == mask.ndim else ~mask.any(-1)
    return (*(x.masked_fill(~mask, fill) for x in (log_prob, old)), advantage.masked_fill(masked, fill), mask)


def token(kernel, log_prob, d, mean, total, advantage, hyper):
    """Return the loss of a token and its derivative by `log_prob`, in Python floats, from the equations of the papers.

    `d` is the token's log-ratio. `mean` and `total` are the mean and the sum of its sequence.
    """
    if kernel is sapo_loss:
        tau = hyper["tau_positive"] if advantage > 0 else hyper["tau_negative"]
        gate = 1 / (1 + exp(-tau * (exp(d) - 1)))
        return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * exp(d) * advantage
    if kernel is vespo_loss:
        sign = "positive" if advantage >= 0 else "negative"
        weight = exp(total) ** hyper["k_" + sign] * exp(hyper["lambda_" + sign] * (1 - exp(total)))
        return -weight * advantage * log_prob, -weight * advantage
    ratio = exp(mean if kernel is gspo_loss else d)
    clipped = min(max(ratio, 1 - hyper["clip_low"]), 1 + hyper["clip_high"])
    if kernel is cispo_loss:
        return -clipped * advantage * log_prob, -clipped * advantage
    unclipped = ratio * advantage <= clipped * advantage
    objective = min(ratio * advantage, clipped * advantage)
    if advantage < 0 and objective < hyper.get("dual_clip", inf) * advantage:
        return -hyper["dual_clip"] * advantage, 0.0
    return -objective, -ratio * advantage if unclipped else 0.0


def loop(kernel, log_prob, old, advantage, mask, **hyper):
    """Return losses, derivatives and the share of clipped tokens or sequences, of a batch `[B, L]`."""
    losses, derivatives = torch.zeros(mask.shape, dtype=F64), torch.zeros(mask.shape, dtype=F64)
    for b, row in enumerate(mask.tolist()):
        tokens = [t for t, counted in enumerate(row) if counted]
        d = {t: float(log_prob[b, t]) - float(old[b, t]) for t in tokens}
        total = sum(d.values())
        for t in tokens:
            a = float(advantage[b, t] if advantage.ndim == 2 else advantage[b])
            losses[b, t], derivatives[b, t] = token(
                kernel, float(log_prob[b, t]), d[t], total / len(tokens), total, a, hyper
            )
    return losses, derivatives


def logs_by_loop(kernel, log_prob, old, mask, hyper):
    rows = [
        [float(x) - float(y) for x, y, counted in zip(*row, strict=True) if counted]
        for row in zip(log_prob, old, mask, strict=True)
    ]
    every = [d for row in rows for d in row]
    logs = {"approx_kl": sum(exp(d) - 1 - d for d in every) / len(every)}
    if "clip_low" in hyper:
        compared = [sum(row) / len(row) for row in rows if row] if kernel is gspo_loss else every
        outside = [not 1 - hyper["clip_low"] <= exp(d) <= 1 + hyper["clip_high"] for d in compared]
        logs["clip_frac"] = sum(outside) / len(outside)
    return logs


# Two sequences. The mask hides the last token of the second one.
LOG_PROB, OLD = [[-0.8, -2.3, -0.5], [-1.2, -0.9, 5.0]], [[-1.0, -2.0, -0.5], [-1.5, -0.7, -9.0]]
MASK, ADVANTAGE = [[T, T, T], [T, T, F]], [1.0, -1.0]
TABLE = [
    # ratios 1.2214, 0.7408, 1 and 1.3499, 0.8187: objectives 1.2214, 0.7408, 1 and -1.3499, -0.8187
    (clipped_surrogate_asymmetric, DUAL, token_mean, -0.1587263),
    (clipped_surrogate_asymmetric, DUAL, sequence_mean, 0.0484439),
    (clipped_surrogate_asymmetric, DUAL, lambda x, mask: fixed_length_mean(x, mask, length=3), -0.1322719),
    (gspo_loss, CLIPS, sequence_mean, 0.0420275),  # ratios exp(-0.1 / 3), exp(0.1 / 2)
    (sapo_loss, TAUS, token_mean, -0.3975971),
    (sapo_loss, TAUS, sequence_mean, -0.0000995392),
    (cispo_loss, CLIPS, token_mean, 0.2088529),  # ratios 1.2214, 0.8, 1 and 1.28, 0.8187 times log-probabilities
    (cispo_loss, {"clip_low": 1.0, "clip_high": 4.0}, token_mean, 0.1648632),  # a cap of 5
    # ratios exp(-0.1) and exp(0.1) of the sequences; the log-probabilities sum to -3.6 and -2.1
    (vespo_loss, GATES, token_mean, (3.6 * exp(2.8 - 3 * exp(-0.1)) - 2.1 * exp(2.3 - 2 * exp(0.1))) / 5),
]


@pytest.mark.parametrize("junk", ["log-ratio 14", nan, inf, -inf])
@pytest.mark.parametrize(("kernel", "hyper", "mean", "expected"), TABLE)
def test_reference_values(variant, kernel, hyper, mean, expected, junk):
    log_prob, old, mask = torch.tensor(LOG_PROB, dtype=F64), torch.tensor(OLD, dtype=F64), torch.tensor(MASK)
    if junk != "log-ratio 14":
        log_prob, old = log_prob.masked_fill(~mask, junk), old.masked_fill(~mask, junk)

    def loss(*batch, **numbers):
        return mean(kernel(*batch, **numbers)[0], batch[-1])

    close(variant(loss)(log_prob, old, torch.tensor(ADVANTAGE, dtype=F64), mask, **hyper), expected, tol=1e-7)


@pytest.mark.parametrize("per_token", [F, T])
@each_loss
def test_losses_and_logs_against_loop(variant, kernel, per_token):
    batch, hyper = random_batch(0, 6, 7, per_token=per_token), LOSSES[kernel]
    batch[-1][2] = False
    loss, logs = variant(kernel)(*with_junk(batch, nan), **hyper)
    close(loss, loop(kernel, *batch, **hyper)[0], tol=1e-10)
    expected = logs_by_loop(kernel, batch[0], batch[1], batch[3], hyper)
    assert logs.keys() == expected.keys()
    for name in logs:
        close(logs[name], torch.tensor(expected[name], dtype=F64), tol=1e-10)
    assert 0.2 < logs.get("clip_frac", 0.5) < 0.9


@pytest.mark.parametrize("per_token", [F, T])
@each_loss
@given(seed=seeds)
def test_values_and_gradients_against_loop(kernel, per_token, seed):
    batch, hyper = random_batch(seed, 4, 5, per_token=per_token), LOSSES[kernel]
    weight = torch.arange(1.0, 21.0, dtype=F64).reshape(4, 5)
    live = with_junk(batch, nan)
    leaf = live[0].requires_grad_()
    loss, _ = assert_pure(kernel, *live, **hyper)
    expected, derivative = loop(kernel, *batch, **hyper)
    close(loss.detach(), expected, tol=1e-9)
    close(torch.autograd.grad((loss * weight).sum(), leaf)[0], derivative * weight, tol=1e-9)


@each_loss
@pytest.mark.parametrize("junk", [nan, inf, -inf])
@given(seed=seeds)
def test_masked_entries_change_neither_loss_nor_gradient(kernel, junk, seed):
    batch, results = random_batch(seed, 4, 3, dtype=torch.float32), []
    batch[-1][0] = False
    for fill in (0.0, junk):
        filled = with_junk(batch, fill)
        leaf = filled[0].requires_grad_()
        loss, logs = kernel(*filled, **LOSSES[kernel])
        results.append((loss, *logs.values(), *torch.autograd.grad(loss.sum(), leaf)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.isfinite(clean).all()
        assert torch.equal(clean, dirty)


@each_loss
def test_all_masked_gives_zero_and_no_gradient(kernel):
    log_prob, old, advantage, mask = random_batch(0, 3, 2)
    batch = with_junk((log_prob, old, advantage, mask & False), nan)
    leaf = batch[0].requires_grad_()
    loss, logs = kernel(*batch, **LOSSES[kernel])
    for value in (loss, *logs.values(), *torch.autograd.grad(loss.sum(), leaf)):
        assert torch.equal(value, torch.zeros_like(value))


@each_loss
def test_gradient_reaches_log_prob_only(kernel):
    *tensors, mask = random_batch(1, 4, 5)
    leaves = [x.requires_grad_() for x in tensors]
    loss, logs = kernel(*leaves, mask, **LOSSES[kernel])
    assert not any(value.requires_grad or value.shape for value in logs.values())
    grads = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    assert [grad is not None and bool(grad.any()) for grad in grads] == [T, F, F]


@each_clip
def test_one_bound_may_be_a_number_and_the_other_a_tensor_with_a_gradient(kernel):
    log_prob, old, advantage, mask = random_batch(1, 40, 5)
    batch, high = (log_prob, old, advantage.abs(), mask), torch.tensor(0.28, dtype=F64, requires_grad=True)
    numbers = LOSSES[kernel] | {"clip_low": 0.2, "clip_high": 0.28}
    mixed = kernel(*batch, **numbers | {"clip_high": high})[0]
    assert torch.equal(mixed.detach(), kernel(*batch, **numbers)[0])
    if kernel is not cispo_loss:  # its equation has stop(clip(ratio))
        assert torch.autograd.grad(mixed.sum(), high)[0].abs() > 0.0


@pytest.mark.parametrize("kernel", [clipped_surrogate_asymmetric, sapo_loss], ids=lambda k: k.__name__)
def test_gradcheck(kernel):
    log_prob, *rest = random_batch(2, 3, 4, per_token=True)
    assert torch.autograd.gradcheck(lambda x: kernel(x, *rest, **LOSSES[kernel])[0], [log_prob.requires_grad_()])


@pytest.mark.parametrize("mean", [token_mean, sequence_mean])
def test_gradcheck_of_a_sequence_ratio(mean):
    """A mean with an advantage per sequence has the gradient of the ratio of the sequence."""
    log_prob, *rest = random_batch(3, 5, 4)
    run = lambda x: mean(gspo_loss(x, *rest, **LOSSES[gspo_loss])[0], rest[-1])  # noqa: E731
    assert torch.autograd.gradcheck(run, [log_prob.requires_grad_()])


@pytest.mark.parametrize("kernel", [cispo_loss, vespo_loss], ids=lambda k: k.__name__)
def test_gradcheck_with_the_ratio_held(kernel):
    """If old_log_prob moves with log_prob, the ratio is constant, as it is for the gradient."""
    log_prob, old, *rest = random_batch(2, 3, 4)
    difference = log_prob - old
    run = lambda x: kernel(x, x - difference, *rest, **LOSSES[kernel])[0]  # noqa: E731
    assert torch.autograd.gradcheck(run, [log_prob.requires_grad_()])


@each_loss
@given(seed=seeds)
def test_at_ratio_one_the_gradient_is_that_of_reinforce(kernel, seed):
    log_prob, _, advantage, mask = random_batch(seed, 4, 5, per_token=True)
    loss, logs = kernel(log_prob.requires_grad_(), log_prob.detach().clone(), advantage, mask, **LOSSES[kernel])
    close(torch.autograd.grad(loss.sum(), log_prob)[0], (-advantage).masked_fill(~mask, 0.0), tol=1e-12)
    assert not any(logs.values())


@given(seed=seeds)
def test_symmetric_clips_give_the_loss_of_ppo(seed):
    batch = random_batch(seed, 4, 5)
    leaf = batch[0].requires_grad_()
    expected, expected_logs = clipped_surrogate(*batch, clip_coef=0.2)
    loss, logs = clipped_surrogate_asymmetric(*batch, clip_low=0.2, clip_high=0.2, dual_clip=inf)
    loss = token_mean(loss, batch[-1])
    close(loss, expected, tol=1e-12)
    close(torch.autograd.grad(loss, leaf)[0], torch.autograd.grad(expected, leaf)[0], tol=1e-12)
    for name in logs:
        close(logs[name], expected_logs[name], tol=1e-12)


@given(seed=seeds)
def test_the_dual_clip_bounds_the_loss_of_negative_advantages(seed):
    batch = random_batch(seed, 4, 5)
    advantage = batch[2].unsqueeze(-1).expand(4, 5)
    plain = clipped_surrogate_asymmetric(*batch, **CLIPS, dual_clip=inf)[0]
    dual = clipped_surrogate_asymmetric(*batch, **CLIPS, dual_clip=1.4)[0]
    close(dual, torch.where(advantage < 0, torch.minimum(plain, -1.4 * advantage), plain), tol=1e-12)


@pytest.mark.parametrize("number", [inf, torch.tensor(inf)])
def test_no_dual_clip_with_an_advantage_of_zero(number):
    log_prob, old, _, mask = random_batch(0, 2, 3)
    zero = torch.zeros(2, dtype=F64)
    loss, _ = clipped_surrogate_asymmetric(log_prob.requires_grad_(), old, zero, mask, **CLIPS, dual_clip=number)
    assert not loss.any() and not torch.autograd.grad(loss.sum(), log_prob)[0].any()


@given(seed=seeds)
def test_sequences_of_one_token_have_the_ratio_of_the_token(seed):
    batch = random_batch(seed, 9, 1)
    close(gspo_loss(*batch, **CLIPS)[0], clipped_surrogate_asymmetric(*batch, **CLIPS, dual_clip=inf)[0], tol=1e-12)


@each_loss
@given(seed=seeds)
def test_order_padding_and_leading_axes(kernel, seed):
    batch, hyper = random_batch(seed, 2, 3, 5, per_token=True), LOSSES[kernel]
    loss, _ = kernel(*batch, **hyper)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    close(kernel(*(x[..., order] for x in batch), **hyper)[0], loss[..., order], tol=1e-12)
    padded = [
        torch.cat((x, x.new_full((2, 3, 2), fill)), -1) for x, fill in zip(batch, (nan, inf, nan, F), strict=True)
    ]
    close(kernel(*padded, **hyper)[0][..., :5], loss, tol=1e-12)
    close(kernel(*(x.flatten(0, 1) for x in batch), **hyper)[0].reshape(2, 3, 5), loss, tol=1e-12)


# Log-ratios beyond the bound, and a token that the new policy never chooses.
FAR, NEAR = [[6000.0, 0.0], [inf, 0.0], [-inf, -1.0]], [[0.0, 0.0], [0.0, 0.0], [0.0, -1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("kernel", [clipped_surrogate_asymmetric, gspo_loss, sapo_loss], ids=lambda k: k.__name__)
def test_ratios_that_overflow_leave_loss_and_gradient_finite(kernel, sign, dtype):
    log_prob = torch.tensor(FAR, dtype=dtype).requires_grad_()
    old, mask = torch.tensor(NEAR, dtype=dtype), torch.ones(3, 2, dtype=torch.bool)
    hyper = LOSSES[kernel] | ({"dual_clip": inf} if kernel is clipped_surrogate_asymmetric else {})
    loss, _ = kernel(log_prob, old, sign * torch.ones(3, dtype=dtype), mask, **hyper)
    (grad,) = torch.autograd.grad(loss.sum(), log_prob)
    assert loss.dtype == grad.dtype == dtype
    assert loss.isfinite().all() and grad.isfinite().all()
    assert not grad[:, 0].any(), "no gradient flows beyond the bound, or to a ratio of 0"
    if sign < 0 and kernel is not sapo_loss:
        bound = log(torch.finfo(dtype).max) / 2
        close(loss[:2, 0].double().log() / bound, [1.0, 1.0], tol=0.01)


@pytest.mark.parametrize("kernel", [cispo_loss, vespo_loss], ids=lambda k: k.__name__)
def test_weights_of_ratios_that_overflow_are_finite(kernel):
    log_prob = torch.tensor([[600.0, 0.0], [-600.0, -1.0], [-2.0, 0.0]]).requires_grad_()
    old = torch.tensor([[0.0, 0.0], [0.0, 0.0], [-inf, 0.0]])
    batch = log_prob, old, torch.tensor([1.0, -1.0, 1.0]), torch.ones(3, 2, dtype=torch.bool)
    loss, _ = kernel(*batch, **LOSSES[kernel])
    expected = [[-1.28, -1.0], [0.8, 0.8], [-1.28, -1.0]] if kernel is cispo_loss else [[0.0, 0.0]] * 3
    close(torch.autograd.grad(loss.sum(), log_prob)[0], expected)
    assert loss.isfinite().all()


@pytest.mark.parametrize("kernel", [cispo_loss, vespo_loss], ids=lambda k: k.__name__)
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_token_of_probability_0_has_loss_0_and_no_gradient(kernel, advantage):
    log_prob = torch.tensor([[-inf, -1.0]]).requires_grad_()
    batch = torch.tensor([[-1.0, -1.0]]), torch.tensor([advantage]), torch.ones(1, 2, dtype=torch.bool)
    for hyper in (LOSSES[kernel], {"clip_low": 1.0, "clip_high": 4.0} if kernel is cispo_loss else LOSSES[kernel]):
        loss, _ = kernel(log_prob, *batch, **hyper)
        (grad,) = torch.autograd.grad(loss.sum(), log_prob)
        assert loss.isfinite().all() and grad.isfinite().all()
        assert loss[0, 0] == 0.0 and grad[0, 0] == 0.0


def test_a_penalty_with_masked_entries_filled(variant):
    """The sum of a loss and a penalty, as the module's docstring describes."""

    def penalised(log_prob, old, ref, advantage, mask):
        penalty = kl_k3(log_prob.masked_fill(~mask, 0.0), ref.masked_fill(~mask, 0.0))
        return token_mean(clipped_surrogate_asymmetric(log_prob, old, advantage, mask, **DUAL)[0] + 0.1 * penalty, mask)

    log_prob, old, advantage, mask = with_junk(random_batch(5, 4, 5), nan)
    value = variant(penalised)(log_prob, old, old, advantage, mask)
    kl = [exp(float(o - x)) - 1 - float(o - x) for x, o in zip(log_prob[mask], old[mask], strict=True)]
    losses = loop(clipped_surrogate_asymmetric, log_prob, old, advantage, mask, **DUAL)[0]
    close(value, (losses.sum() + 0.1 * sum(kl)) / len(kl), tol=1e-10)
    (grad,) = torch.autograd.grad(penalised(log_prob.requires_grad_(), old, old, advantage, mask), log_prob)
    assert grad.isfinite().all() and not grad[~mask].any()


def test_sequence_log_ratio_by_hand(variant):
    # (1 + 4) / 2 for both tokens; then -3 alone
    log_prob, old = torch.tensor([[1.0, 4.0], [nan, -1.0]]), torch.tensor([[0.0, 0.0], [0.0, 2.0]])
    mask = torch.tensor([[T, T], [F, T]])
    close(variant(sequence_log_ratio)(log_prob, old, mask), [[2.5, 2.5], [0.0, -3.0]])
    leaf = log_prob.clone().requires_grad_()
    out = sequence_log_ratio(leaf, old, mask)
    (grad,) = torch.autograd.grad((out * torch.tensor([[1.0, 10.0], [5.0, 7.0]])).sum(), leaf)
    assert grad.tolist() == [[1.0, 10.0], [0.0, 7.0]]


@given(seed=seeds)
def test_a_function_of_the_sequence_log_ratio_has_the_gradient_of_the_mean(seed):
    log_prob, old, _, mask = random_batch(seed, 4, 5)
    leaf = log_prob.requires_grad_()
    per_token = sequence_mean(sequence_log_ratio(leaf, old, mask).exp(), mask)
    counted = mask.sum(-1)
    mean = (leaf - old).masked_fill(~mask, 0.0).sum(-1) / counted.clamp(min=1)
    direct = mean.exp()[counted > 0].mean()
    close(per_token.detach(), direct.detach(), tol=1e-12)
    close(torch.autograd.grad(per_token, leaf)[0], torch.autograd.grad(direct, leaf)[0], tol=1e-12)


def test_a_sequence_that_the_new_policy_never_chooses_has_ratio_zero():
    log_prob = torch.tensor([[-inf, -1.0]]).requires_grad_()
    out = sequence_log_ratio(log_prob, torch.tensor([[-1.0, -1.0]]), torch.tensor([[T, T]]))
    assert out.tolist() == [[-inf, -inf]]
    assert torch.autograd.grad(out.exp().sum(), log_prob)[0].tolist() == [[0.0, 0.0]]


def test_an_unmasked_nan_is_not_hidden():
    log_prob, old, advantage, _ = random_batch(0, 2, 3)
    log_prob[1, 2] = nan
    for kernel, hyper in LOSSES.items():
        loss, _ = kernel(log_prob, old, advantage, torch.ones(2, 3, dtype=torch.bool), **hyper)
        assert loss[1, 2].isnan()


@pytest.mark.parametrize("kernel", [*LOSSES, sequence_log_ratio], ids=lambda k: k.__name__)
def test_bad_shapes_are_named(kernel):
    names = ["log_prob", "old_log_prob", "advantage", "mask"]
    batch = dict(zip(names, random_batch(6, 3, 4), strict=True))
    if kernel is sequence_log_ratio:
        del batch["advantage"]
    for name in batch:
        for shape in ((3, 5), (5,)):
            bad = batch | {name: torch.zeros(shape, dtype=batch[name].dtype)}
            message = rf"\b{name} has shape \[{str(shape)[1:-1].rstrip(',')}\]|the shape of {name}(,|$)"
            with pytest.raises(ValueError, match=message):
                kernel(*bad.values(), **LOSSES.get(kernel, {}))
