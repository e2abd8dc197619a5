"""Group-relative advantages: which members are compared, and groups without a difference."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, assert_pure, close
from tensordict import TensorDict

from ecrl.kernels import (
    compute_returns,
    first_episode_mask,
    group_advantages,
    group_centered,
    grpo_advantages,
    informative_groups,
    leave_one_out,
)

NAN, INF = float("nan"), float("inf")
T, F = True, False
seeds = st.integers(0, 2**31)


def random_scores(seed, *shape, p_masked=0.25, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    score = torch.randn(shape, generator=g, dtype=dtype)
    score = (score * 64).round() / 64  # members are equal or clearly apart: what float32 cancels stays below 1e-5
    return score, torch.rand(shape, generator=g) >= p_masked


def loop(score, mask, group_size, eps):
    """Compute the equation over the counted rows, per group and trailing index; 0 if there is nothing to compare."""
    score, mask = score.double().numpy(), mask.numpy()
    out = np.zeros(score.shape)
    for start in range(0, score.shape[0], group_size):
        for index in np.ndindex(score.shape[1:]):
            rows = [i for i in range(start, start + group_size) if mask[(i, *index)]]
            counted = [score[(i, *index)] for i in rows]
            if len(set(counted)) < 2:
                continue
            mean = sum(counted) / len(counted)
            std = (sum((x - mean) ** 2 for x in counted) / len(counted)) ** 0.5
            for i, x in zip(rows, counted, strict=True):
                out[(i, *index)] = (x - mean) / (std + eps)
    return torch.from_numpy(out)


# Groups of 3. Column 0: 1, 3, 5: mean 3, variance 8/3. Column 1: the 9 is masked, so 2, 4: mean 3, std 1.
# Second group: column 0 is equal throughout, in column 1 one member is left. eps = 1 halves a std of 1.
SCORE = [[1.0, 2.0], [3.0, NAN], [5.0, 4.0], [7.0, INF], [7.0, 6.0], [7.0, NAN]]
MASK = [[T, T], [T, F], [T, T], [T, F], [T, T], [T, F]]
ROOT = (8 / 3) ** 0.5


@pytest.mark.parametrize("eps", [0.0, 1.0])
def test_by_hand(variant, eps):
    out = variant(group_advantages)(torch.tensor(SCORE), torch.tensor(MASK), group_size=3, eps=eps)
    side, step = -2 / (ROOT + eps), -1 / (1 + eps)
    close(out, [[side, step], [0.0, 0.0], [-side, -step], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])


def test_against_loop(variant):
    score, mask = random_scores(0, 12, 3, 2)
    close(variant(group_advantages)(score, mask, group_size=4, eps=torch.tensor(1e-8)), loop(score, mask, 4, 1e-8))


@pytest.mark.parametrize("shape", [(2,), (12,), (12, 5), (24, 2, 3)], ids=str)
@pytest.mark.parametrize("groups", [1, 2, "pairs"])
@given(seed=seeds, eps=st.sampled_from([0.0, 1e-8, 0.5]))
def test_any_shape(shape, groups, seed, eps):
    size = 2 if groups == "pairs" or shape[0] == 2 else shape[0] // groups
    score, mask = random_scores(seed, *shape)
    close(group_advantages(score, mask, group_size=size, eps=eps), loop(score, mask, size, eps), tol=2e-5)


def centred_loop(kernel, score, mask, group_size):
    """Subtract from each counted score the mean of its group, or of the others of its group."""
    out = torch.zeros(score.shape, dtype=torch.float64)
    for i, index in ((i, index) for i in range(score.shape[0]) for index in np.ndindex(score.shape[1:])):
        first = i - i % group_size
        rows = [j for j in range(first, first + group_size) if mask[(j, *index)]]
        if kernel is leave_one_out:
            rows = [j for j in rows if j != i]
        if mask[(i, *index)] and rows:
            out[(i, *index)] = float(score[(i, *index)]) - sum(float(score[(j, *index)]) for j in rows) / len(rows)
    return out


CENTRED = [group_centered, leave_one_out]
each_centred = pytest.mark.parametrize("kernel", CENTRED, ids=lambda k: k.__name__)


@each_centred
def test_centred_scores_by_hand(variant, kernel):
    # Column 0: 1, 3, 5 less 3, or less the means 4, 3, 2 of the others. Column 1: 2, 4 less 3, or less the other one.
    factors = (1.5, 2.0) if kernel is leave_one_out else (1.0, 1.0)
    a, b = 2 * factors[0], 1 * factors[1]
    out = variant(kernel)(torch.tensor(SCORE), torch.tensor(MASK), group_size=3)
    close(out, [[-a, -b], [0.0, 0.0], [a, b], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])


def test_reference_values_of_leave_one_out(variant):
    score, yes = torch.tensor([1.0, 0.0, 0.0, 0.5]), torch.ones(4, dtype=torch.bool)
    close(variant(leave_one_out)(score, yes, group_size=2), [1.0, -1.0, -0.5, 0.5])
    close(variant(group_centered)(score, yes, group_size=2), [0.5, -0.5, -0.25, 0.25])


@each_centred
@pytest.mark.parametrize("shape", [(12,), (12, 5), (24, 2, 3)], ids=str)
@given(seed=seeds, size=st.sampled_from([2, 3, 4, 12]))
def test_centred_scores_against_loop(kernel, shape, seed, size):
    score, mask = random_scores(seed, *shape, dtype=torch.float64)
    out = assert_pure(kernel, score.masked_fill(~mask, NAN), mask, group_size=size)
    close(out, centred_loop(kernel, score, mask, size), tol=1e-12)


@each_centred
@given(seed=seeds)
def test_centred_scores_are_scaled_advantages(kernel, seed):
    """A group's advantages are its centred scores over its deviation, so signs and order are the same."""
    score, mask = random_scores(seed, 12, 2, dtype=torch.float64)
    out, scaled = kernel(score, mask, group_size=4), group_advantages(score, mask, group_size=4, eps=0.0)
    assert torch.equal(out.sign(), scaled.sign())
    close(out.reshape(3, 4, 2).sum(1), torch.zeros(3, 2), tol=1e-10)


@each_centred
def test_centred_float_noise_is_no_signal(kernel):
    score, yes = torch.full((8,), 0.1), torch.ones(8, dtype=torch.bool)
    assert not kernel(score, yes, group_size=8).any()
    assert not kernel(score, torch.arange(8) == 3, group_size=8).any()


@each_centred
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_masked_scores_do_not_reach_the_gradient_of_centred_ones(kernel, junk):
    score, mask = random_scores(3, 8, 3, dtype=torch.float64)
    weight, results = torch.arange(24.0, dtype=torch.float64).reshape(8, 3), []
    for fill in (0.0, junk):
        x = score.masked_fill(~mask, fill).requires_grad_()
        results.append(torch.autograd.grad((kernel(x, mask, group_size=4) * weight).sum(), x)[0])
    assert torch.equal(*results) and results[0].isfinite().all() and not results[0][~mask].any()


@each_centred
def test_gradcheck_of_centred_scores(kernel):
    score, mask = random_scores(2, 6, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kernel(x, mask, group_size=3), [score.requires_grad_()])


# Pairs with the means 1, 1/2, 0; a group with one masked member, and one with both.
RESULTS = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.5, NAN, NAN, INF]
COUNTED = [T, T, T, T, T, T, T, F, F, F]


def test_informative_groups_by_hand(variant):
    call = variant(informative_groups)
    out = call(torch.tensor(RESULTS), torch.tensor(COUNTED), group_size=2, low=0.0, high=1.0)
    assert out.dtype == torch.bool
    assert out.tolist() == [F, F, T, T, F, F, T, F, F, F]
    out = call(torch.tensor(RESULTS), torch.tensor(COUNTED), group_size=2, low=-0.1, high=0.5)
    assert out.tolist() == [F, F, F, F, T, T, F, F, F, F]


@given(seed=seeds, size=st.sampled_from([2, 3, 6]))
def test_informative_groups_against_loop(seed, size):
    g = torch.Generator().manual_seed(seed)
    score, mask = (torch.rand(12, 2, generator=g) < 0.6).float(), torch.rand(12, 2, generator=g) < 0.8
    expected = torch.zeros(12, 2, dtype=torch.bool)
    for i in range(12):
        for f in range(2):
            first = i - i % size
            kept = [float(score[j, f]) for j in range(first, first + size) if mask[j, f]]
            expected[i, f] = bool(mask[i, f]) and 0.1 < sum(kept) / len(kept) < 0.9
    out = assert_pure(informative_groups, score.masked_fill(~mask, NAN), mask, group_size=size, low=0.1, high=0.9)
    assert torch.equal(out, expected)


@given(seed=seeds)
def test_groups_of_equal_results_are_the_ones_without_an_advantage(seed):
    score = (torch.rand(24, generator=torch.Generator().manual_seed(seed)) < 0.5).float()
    yes = torch.ones(24, dtype=torch.bool)
    kept = informative_groups(score, yes, group_size=4, low=0.0, high=1.0)
    assert torch.equal(kept, group_centered(score, yes, group_size=4) != 0)


@pytest.mark.parametrize("kernel", [*CENTRED, informative_groups], ids=lambda k: k.__name__)
def test_bad_arguments_of_other_group_kernels_are_named(kernel):
    bounds = {"low": 0.0, "high": 1.0} if kernel is informative_groups else {}
    yes = torch.ones(4, dtype=torch.bool)
    for size in (1, 0, -2, 3, 8):
        with pytest.raises(ValueError, match=f"group_size={size} .*divide 4, the size of the first axis of score"):
            kernel(torch.zeros(4), yes, group_size=size, **bounds)
    with pytest.raises(ValueError, match=r"mask has shape \[4\], expected \[3\], the shape of score"):
        kernel(torch.zeros(3), yes, group_size=2, **bounds)


def jitter(offset, size, count=8):
    return offset + size * torch.linspace(-1.0, 1.0, count)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize(
    ("score", "flat"),
    [
        (torch.full((8,), 0.1), T),  # its float32 mean is not exactly 0.1
        (torch.full((8,), -1234.567), T),
        (torch.zeros(8), T),
        (jitter(100.0, 1e-6), T),  # below the 8e-6 that separate neighbouring floats there
        (jitter(100.0, 2e-5), T),
        (jitter(-1e6, 0.5), T),
        (jitter(1.0, 1e-7), T),
        (jitter(100.0, 1e-3), F),
        (jitter(1.0, 1e-4), F),
        (jitter(0.0, 1e-6), F),  # small, but all there is
        (jitter(0.0, 1e-12), F),
        (jitter(-1e6, 50.0), F),
    ],
)
def test_float_noise_is_no_signal(score, flat, eps):
    out = group_advantages(score, torch.ones(8, dtype=torch.bool), group_size=8, eps=eps)
    assert torch.equal(out, torch.zeros(8)) if flat else (out.abs() > 0).all()
    if not flat and eps == 0.0:
        close(out.square().mean(), 1.0, tol=1e-2)


def test_one_remaining_member_has_advantage_zero():
    score, mask = torch.tensor([5.0, 1.0, 2.0, 3.0]), torch.tensor([T, F, F, F])
    assert torch.equal(group_advantages(score, mask, group_size=4, eps=1e-8), torch.zeros(4))
    assert torch.equal(group_advantages(score, torch.zeros(4, dtype=torch.bool), group_size=4, eps=0.0), torch.zeros(4))


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
@given(seed=seeds)
def test_masked_entries_reach_neither_value_nor_gradient(junk, seed):
    score, mask = random_scores(seed, 8, 3)
    mask[:4, 0], score[:4, 1] = torch.tensor([T, F, F, F]), 2.0  # a sole survivor and an equal group among them
    clean, dirty = (score.masked_fill(~mask, fill).requires_grad_() for fill in (0.0, junk))
    weight = torch.arange(24.0).reshape(8, 3)
    outs = [group_advantages(x, mask, group_size=4, eps=1e-8) for x in (clean, dirty)]
    assert torch.equal(*outs)
    grads = [torch.autograd.grad((out * weight).sum(), x)[0] for out, x in zip(outs, (clean, dirty), strict=True)]
    assert torch.equal(*grads)
    assert torch.isfinite(grads[0]).all()
    assert not grads[0][~mask].any()


@given(seed=seeds)
def test_equals_the_masked_formula(seed):
    # The usual masked form: n = max(1, sum m), mu = sum m G / n, var = sum m (G - mu)^2 / n, m (G - mu) / (std + eps)
    score, mask = random_scores(seed, 8, 5)
    G, m = score.reshape(2, 4, 5), mask.reshape(2, 4, 5).float()
    n = m.sum(1, keepdim=True).clamp(min=1)
    mu = (m * G).sum(1, keepdim=True) / n
    std = ((m * (G - mu) ** 2).sum(1, keepdim=True) / n).sqrt()
    noise = std < 1e-6  # float noise over eps there, exactly 0 here
    expected = (m * (G - mu) / (std + 1e-8)).masked_fill(noise, 0.0).reshape(8, 5)
    close(group_advantages(score, mask, group_size=4, eps=1e-8), expected, tol=2e-5)


@pytest.mark.ref
@pytest.mark.parametrize("size", [2, 4, 8])
def test_equals_the_unbiased_formula_after_its_factor(size):
    # TRL divides by the unbiased std: (r - mean) / (std + eps), ecrl's is larger by sqrt(G / (G - 1)). Its eps is 1e-4.
    reward = random_scores(1, 16)[0]
    grouped = reward.view(-1, size)
    unbiased = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True, correction=1) + 1e-4)
    factor = (size / (size - 1)) ** 0.5
    yes = torch.ones(16, dtype=torch.bool)
    actual = group_advantages(
        reward, yes, group_size=size, eps=1e-4 / factor
    )  # eps shrinks with the std it is added to
    close(actual, factor * unbiased.reshape(16))


@given(seed=seeds)
def test_symmetries(seed):
    score, mask = random_scores(seed, 12, 2)
    out = group_advantages(score, mask, group_size=4, eps=0.0)
    within = torch.cat([4 * i + torch.tensor([2, 0, 3, 1]) for i in range(3)])
    across = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7])
    for order in (within, across):
        close(group_advantages(score[order], mask[order], group_size=4, eps=0.0), out[order])
    close(group_advantages(3.0 * score + 1.0, mask, group_size=4, eps=0.0), out, tol=2e-4)  # the shift costs digits
    close(out.reshape(3, 4, 2).sum(1), torch.zeros(3, 2))


def test_gradcheck():
    score, mask = random_scores(2, 6, 2, dtype=torch.float64)
    mask[:3] = True
    run = lambda x: group_advantages(x, mask, group_size=3, eps=0.1)  # noqa: E731
    assert torch.autograd.gradcheck(run, [score.requires_grad_()])


def test_no_retrace():
    call = lambda score, mask, eps: group_advantages(score, mask, group_size=2, eps=eps)  # noqa: E731
    first, second = ((*random_scores(s, 4, 3), torch.tensor(0.1 * s)) for s in (1, 2))
    assert_no_retrace(call, first, second)


@pytest.mark.parametrize("size", [1, 0, -2, 3, 8])
def test_bad_group_size(size):
    with pytest.raises(ValueError, match=f"group_size={size} .*divide 4, the size of the first axis of score"):
        group_advantages(torch.zeros(4), torch.ones(4, dtype=torch.bool), group_size=size, eps=0.0)


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match=r"mask has shape \[3\], expected \[4\], the shape of score"):
        group_advantages(torch.zeros(4), torch.ones(3, dtype=torch.bool), group_size=2, eps=0.0)


def test_first_episode_mask_by_hand(variant):
    done = torch.tensor([[F, T, F, T], [F, F, F, F], [T, T, F, F], [F, F, F, T]])
    expected = torch.tensor([[T, T, F, F], [T, T, T, T], [T, F, F, F], [T, T, T, T]])
    out = variant(first_episode_mask)(done)
    assert out.dtype == torch.bool
    assert torch.equal(out, expected)
    assert torch.equal(first_episode_mask(done[0]), expected[0])


@given(seed=seeds)
def test_first_episode_mask_against_loop(seed):
    done = torch.rand(2, 3, 9, generator=torch.Generator().manual_seed(seed)) < 0.2
    expected = [[[not any(row[:t]) for t in range(9)] for row in block] for block in done.tolist()]
    assert first_episode_mask(done).tolist() == expected


def rollout_of(**fields):
    fields = {k: torch.tensor(v) for k, v in fields.items()}
    return TensorDict(fields, fields["reward"].shape)


# Two envs, gamma = 1/2. Env 0: 1, then 2 with a time limit, then 4. Env 1: 2, 4, 0, never ending.
# Values would bootstrap, but are not used. Returns, from 0 behind every end:
# [1 + 2/2, 2, 4] = [2, 2, 4]  and  [2 + (4 + 0) / 2, 4, 0] = [4, 4, 0]: a pair is always -1, +1.
PAIR = {
    "reward": [[1.0, 2.0, 4.0, NAN], [2.0, 4.0, 0.0, NAN]],
    "value": [[NAN] * 4, [5.0] * 4],
    "final_value": [[0.0, 99.0, 0.0, NAN], [0.0, 0.0, 0.0, NAN]],
    "terminated": [[F, F, F, T], [F, F, F, T]],
    "truncated": [[F, T, F, T], [F, F, F, T]],
    "done": [[F, T, F, T], [F, F, F, T]],
}
FIRST_EPISODE = [[T, T, F, F], [T, T, T, F]]


def test_grpo_advantages_by_hand(variant):
    advantage, mask = variant(grpo_advantages)(rollout_of(**PAIR), gamma=0.5, group_size=2, eps=1.0)
    close(advantage, [[-0.5, -0.5, 2 / 3], [0.5, 0.5, -2 / 3]])  # 1 / (1 + eps), 2 / (2 + eps)
    assert mask.dtype == torch.bool
    assert mask.all()
    assert mask.shape == (2, 3)


def test_grpo_advantages_with_a_mask(variant):
    advantage, mask = variant(grpo_advantages)(rollout_of(**PAIR, mask=FIRST_EPISODE), gamma=0.5, group_size=2, eps=1.0)
    close(advantage, [[-0.5, -0.5, 0.0], [0.5, 0.5, 0.0]])  # only env 1 is left at the last step
    assert mask.tolist() == [row[:3] for row in FIRST_EPISODE]


@given(seed=seeds)
def test_grpo_advantages_compare_returns_at_equal_time(seed):
    g = torch.Generator().manual_seed(seed)
    done = torch.rand(8, 6, generator=g) < 0.2
    ends = {"terminated": done, "truncated": torch.zeros_like(done), "done": done}
    rollout = TensorDict({"reward": torch.randn(8, 6, generator=g), "mask": first_episode_mask(done), **ends}, [8, 6])
    advantage, mask = assert_pure(grpo_advantages, rollout, gamma=0.9, group_size=4, eps=1e-8)
    close(advantage, group_advantages(compute_returns(rollout, 0.9), mask, group_size=4, eps=1e-8), tol=0)
    close(
        advantage,
        loop(compute_returns(rollout.clone().set("reward", rollout["reward"].double()), 0.9), mask, 4, 1e-8),
        tol=1e-4,
    )


def test_grpo_padding_is_never_read():
    clean, dirty = rollout_of(**PAIR, mask=FIRST_EPISODE), rollout_of(**PAIR, mask=FIRST_EPISODE)
    for key, field in clean.items():
        field[:, -1] = 0
        dirty[key][:, -1] = NAN if field.is_floating_point() else True
    outs = [grpo_advantages(r, gamma=0.5, group_size=2, eps=1e-8) for r in (clean, dirty)]
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


@pytest.mark.parametrize("key", ["reward", "terminated", "truncated", "done"])
def test_grpo_names_bad_fields(key):
    with pytest.raises(ValueError, match=f"lacks '{key}'"):
        grpo_advantages(rollout_of(**PAIR).exclude(key), gamma=0.5, group_size=2, eps=0.0)
    wide = rollout_of(**PAIR).set(key, rollout_of(**PAIR)[key].unsqueeze(-1))
    with pytest.raises(ValueError, match=rf"'{key}'.*\[2, 4, 1\]"):
        grpo_advantages(wide, gamma=0.5, group_size=2, eps=0.0)


def test_grpo_names_a_bad_mask():
    with pytest.raises(ValueError, match=r"'mask'.*dtype torch.float32"):
        grpo_advantages(rollout_of(**PAIR, mask=[[1.0] * 4] * 2), gamma=0.5, group_size=2, eps=0.0)
