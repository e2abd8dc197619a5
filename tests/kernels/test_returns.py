"""Estimators on `[*B, T]` tensors, against hand tables, plain float64 loops and properties."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, assert_pure, close
from support.kernel_calls import CALLS
from support.kernel_calls import kernel as kernel_named

from ecrl.compile.jit import choose_form
from ecrl.kernels import discounted_returns, gae, n_step_returns, td_lambda_returns, upgo_returns, vtrace

NAN = float("nan")
KERNELS = [discounted_returns, n_step_returns, td_lambda_returns, gae, upgo_returns, vtrace]
PLAIN = ("reward", "next_value", "terminated", "done")
ARGS = {discounted_returns: PLAIN, n_step_returns: PLAIN, td_lambda_returns: PLAIN}
ARGS[gae] = ARGS[upgo_returns] = ("reward", "value", "next_value", "terminated", "done")
ARGS[vtrace] = ("log_prob", "old_log_prob", *ARGS[gae])
HYPER = {discounted_returns: {"gamma": 0.9}, upgo_returns: {"gamma": 0.9}, n_step_returns: {"gamma": 0.9, "n": 3}}
HYPER[td_lambda_returns] = HYPER[gae] = {"gamma": 0.9, "gae_lambda": 0.7}
HYPER[vtrace] = {**HYPER[gae], "clip_rho": 1.2, "clip_c": 0.8, "clip_pg_rho": 1.5}
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
unit = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0))
seeds = st.integers(0, 2**31)


def random_steps(seed, *shape, dtype=torch.float32, p_end=0.15):
    """Float fields from a normal, ends of both kinds (a step may be both), all of `shape`."""
    g = torch.Generator().manual_seed(seed)
    names = ("reward", "value", "next_value", "log_prob", "old_log_prob")
    steps = {name: torch.randn(shape, generator=g, dtype=dtype) for name in names}
    steps |= {name: torch.rand(shape, generator=g) < p_end for name in ("terminated", "truncated")}
    return steps | {"done": steps["terminated"] | steps["truncated"]}


def consistent(steps):
    """The same steps where the state reached is the next one acted in, except at an end."""
    follows = torch.cat((steps["value"][..., 1:], steps["next_value"][..., -1:]), -1)
    return steps | {"next_value": torch.where(steps["done"], steps["next_value"], follows)}


def live(kernel, steps):
    """Names of the arguments that a gradient reaches: all floats, except the value that UPGO only compares."""
    compared = ("value",) if kernel is upgo_returns else ()
    return [name for name in ARGS[kernel] if steps[name].is_floating_point() and name not in compared]


def run(kernel, steps, call=None, **hyper):
    """The kernel's outputs, stacked: `[outputs, *B, T]`."""
    out = (call or kernel)(*(steps[name] for name in ARGS[kernel]), **(HYPER[kernel] | hyper))
    return torch.stack(out) if isinstance(out, tuple) else out[None]


# gamma = gae_lambda = 1/2. Step 1 hits a time limit, step 2 ends, the array stops after step 3.
# reached:    [2, 8, -, 4]     one-step target r + reached / 2:  [2, 6, 3, 6]
# discounted: [1 + 6/2, 6, 3, 6]    td_lambda: [1 + (2/2 + 6/2) / 2, 6, 3, 6]
# gae:        delta = one-step - value = [1, 4, 2, 4];  A0 = 1 + 4/4 = 2
# vtrace:     ratio = [2, 1/2, 4, 1]: rho = min(2, .) = [2, 1/2, 2, 1];  c = min(1, .)/2 = [1/2, 1/4, 1/2, 1/2]
#             rho * delta = [2, 2, 4, 4];  error0 = 2 + 2/2 * 1/2 = 2.5;  target = value + [2.5, 2, 4, 4]
#             target_next = [4, 8, 0, 4];  td_error = r + target_next / 2 - value = [2, 4, 2, 4]
#             pg_rho = min(3, ratio) = [2, 1/2, 3, 1];  advantage = pg_rho * td_error = [4, 2, 6, 4]
# upgo:       step 1 reaches 6 >= 2 = value: G0 = 1 + 6/2
HAND = {
    "reward": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "value": torch.tensor([1.0, 2.0, 1.0, 2.0]),
    "next_value": torch.tensor([2.0, 8.0, NAN, 4.0]),
    "terminated": torch.tensor([False, False, True, False]),
    "done": torch.tensor([False, True, True, False]),
    "log_prob": torch.tensor([2.0, 0.5, 4.0, 1.0]).log(),
    "old_log_prob": torch.zeros(4),
}
HALF = {"gamma": 0.5, "gae_lambda": 0.5}
TABLE = [
    (discounted_returns, {"gamma": 0.5}, [[4.0, 6.0, 3.0, 6.0]]),
    (n_step_returns, {"gamma": 0.5, "n": 1}, [[2.0, 6.0, 3.0, 6.0]]),
    (n_step_returns, {"gamma": 0.5, "n": 2}, [[4.0, 6.0, 3.0, 6.0]]),
    (td_lambda_returns, HALF, [[3.0, 6.0, 3.0, 6.0]]),
    (gae, HALF, [[2.0, 4.0, 2.0, 4.0], [3.0, 6.0, 3.0, 6.0]]),
    (upgo_returns, {"gamma": 0.5}, [[4.0, 6.0, 3.0, 6.0]]),
    (vtrace, HALF | {"clip_rho": 2.0, "clip_c": 1.0, "clip_pg_rho": 2.0}, [[4.0, 2.0, 4.0, 4.0], [3.5, 4.0, 5.0, 6.0]]),
    (vtrace, HALF | {"clip_rho": 2.0, "clip_c": 1.0, "clip_pg_rho": 3.0}, [[4.0, 2.0, 6.0, 4.0], [3.5, 4.0, 5.0, 6.0]]),
]


@pytest.mark.parametrize(("kernel", "hyper", "expected"), TABLE)
def test_by_hand(variant, kernel, hyper, expected):
    close(run(kernel, HAND, variant(kernel), **hyper), expected)


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, [5.0, 5.0, 5.0, 5.0]),  # 1 + 8/2
        (2, [3.5, 3.5, 3.5, 5.0]),  # 1 + 5/2, and the last has one reward left
        (3, [2.75, 2.75, 3.5, 5.0]),  # 1 + 3.5/2
        (4, [2.375, 2.75, 3.5, 5.0]),
        (9, [2.375, 2.75, 3.5, 5.0]),  # longer than the array
    ],
)
def test_n_step_counts_rewards(n, expected):
    no = torch.zeros(4, dtype=torch.bool)
    close(n_step_returns(torch.ones(4), 8 * torch.ones(4), no, no, gamma=0.5, n=n), expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([9.0, 0.0, 0.0, 0.0], [2.375, 2.75, 3.5, 5.0]),  # every action does well; the value of step 0 is not read
        ([2.0, 3.0, 3.0, 5.0], [2.375, 2.75, 3.5, 5.0]),  # as well as expected
        ([0.0, 3.5, 0.0, 0.0], [2.0, 2.75, 3.5, 5.0]),  # step 1 does worse
        ([0.0, 0.0, 3.5, 0.0], [2.5, 3.0, 3.5, 5.0]),  # step 2 does worse: 1 + 3/2
        ([0.0, 0.0, 3.5, 5.5], [2.5, 3.0, 3.0, 5.0]),  # steps 2 and 3 do worse
    ],
)
def test_upgo_follows_actions_that_do_well(variant, value, expected):
    # one-step targets: 1 + [2, 4, 4, 8] / 2 = [2, 3, 3, 5]
    no, next_value = torch.zeros(4, dtype=torch.bool), torch.tensor([2.0, 4.0, 4.0, 8.0])
    close(variant(upgo_returns)(torch.ones(4), torch.tensor(value), next_value, no, no, gamma=0.5), expected)


def gae_loop(s, T, gamma, gae_lambda):
    advantage = np.zeros(T)
    for t in reversed(range(T)):
        delta = s["reward"][t] + gamma[t] * (0.0 if s["terminated"][t] else s["next_value"][t]) - s["value"][t]
        later = 0.0 if s["done"][t] or t == T - 1 else advantage[t + 1]
        advantage[t] = delta + gamma[t] * gae_lambda * later
    return [advantage, advantage + s["value"]]


def discounted_loop(s, T, gamma):
    returns = np.zeros(T)
    for t in reversed(range(T)):
        reached = 0.0 if s["terminated"][t] else s["next_value"][t]
        returns[t] = s["reward"][t] + gamma[t] * (reached if s["done"][t] or t == T - 1 else returns[t + 1])
    return [returns]


def n_step_loop(s, T, gamma, n):
    returns = np.zeros(T)
    for t in range(T):  # forwards, as a sum: another form of the same definition
        for k in range(n):
            returns[t] += gamma[t : t + k].prod() * s["reward"][t + k]
            if k == n - 1 or s["done"][t + k] or t + k == T - 1:
                returns[t] += gamma[t : t + k + 1].prod() * (0.0 if s["terminated"][t + k] else s["next_value"][t + k])
                break
    return [returns]


def td_lambda_loop(s, T, gamma, gae_lambda):
    returns = np.zeros(T)
    for t in reversed(range(T)):
        reached = 0.0 if s["terminated"][t] else s["next_value"][t]
        if s["done"][t] or t == T - 1:
            returns[t] = s["reward"][t] + gamma[t] * reached
        else:
            returns[t] = s["reward"][t] + gamma[t] * ((1.0 - gae_lambda) * reached + gae_lambda * returns[t + 1])
    return [returns]


def upgo_loop(s, T, gamma):
    one_step = s["reward"] + gamma * np.where(s["terminated"], 0.0, s["next_value"])
    returns = np.zeros(T)
    for t in range(T):  # forwards, as a sum over the steps that are followed
        k = t
        while k < T - 1 and not s["done"][k] and one_step[k + 1] >= s["value"][k + 1]:
            k += 1
        returns[t] = sum(gamma[t:i].prod() * s["reward"][i] for i in range(t, k))
        returns[t] += gamma[t:k].prod() * one_step[k]
    return [returns]


def vtrace_loop(s, T, gamma, gae_lambda, clip_rho, clip_c, clip_pg_rho):
    error, target, advantage = np.zeros(T), np.zeros(T), np.zeros(T)
    for t in reversed(range(T)):
        last = s["done"][t] or t == T - 1
        ratio = np.exp(s["log_prob"][t] - s["old_log_prob"][t])
        rho, c = min(clip_rho, ratio), gae_lambda * min(clip_c, ratio)
        reached = 0.0 if s["terminated"][t] else s["next_value"][t]
        delta = rho * (s["reward"][t] + gamma[t] * reached - s["value"][t])
        error[t] = delta + gamma[t] * c * (0.0 if last else error[t + 1])
        target[t] = s["value"][t] + error[t]
        td_error = s["reward"][t] + gamma[t] * (reached if last else target[t + 1]) - s["value"][t]
        advantage[t] = min(clip_pg_rho, ratio) * td_error
    return [advantage, target]


LOOPS = {gae: gae_loop, discounted_returns: discounted_loop, n_step_returns: n_step_loop}
LOOPS |= {td_lambda_returns: td_lambda_loop, upgo_returns: upgo_loop, vtrace: vtrace_loop}


def oracle(kernel, steps, gamma, **hyper):
    """The loop over each row in float64: `[outputs, *B, T]`. `gamma` is a number, or one for each step."""
    shape = steps["reward"].shape
    steps = steps | {"gamma": torch.as_tensor(gamma, dtype=torch.float64).expand(shape)}
    flat = {k: v.double().numpy().reshape(-1, shape[-1]) for k, v in steps.items()}
    of_rows = [{k: v[i] for k, v in flat.items()} for i in range(shape[:-1].numel())]
    rows = [LOOPS[kernel](row, shape[-1], gamma=row["gamma"], **hyper) for row in of_rows]
    return torch.from_numpy(np.stack(rows, 1).reshape(-1, *shape))


@each_kernel
def test_against_loop(variant, kernel):
    steps = random_steps(0, 2, 3, 6)
    close(run(kernel, steps, variant(kernel)), oracle(kernel, steps, **HYPER[kernel]))


@each_kernel
@pytest.mark.parametrize("shape", [(1,), (2,), (5,), (4, 7), (2, 3, 9)], ids=str)
@given(seed=seeds, gamma=unit, gae_lambda=unit, n=st.integers(1, 12))
@example(seed=0, gamma=0.0, gae_lambda=1.0, n=1)
@example(seed=0, gamma=1.0, gae_lambda=0.0, n=2)
@example(seed=0, gamma=1.0, gae_lambda=1.0, n=3)
def test_any_shape_and_hyperparameters(kernel, shape, seed, gamma, gae_lambda, n):
    steps = random_steps(seed, *shape)
    hyper = HYPER[kernel] | {
        k: v for k, v in dict(gamma=gamma, gae_lambda=gae_lambda, n=n).items() if k in HYPER[kernel]
    }
    close(run(kernel, steps, **hyper), oracle(kernel, steps, **hyper))


@each_kernel
def test_hyperparameters_as_tensors(variant, kernel):
    steps = random_steps(1, 2, 5)
    hyper = {k: v if k == "n" else torch.tensor(v) for k, v in HYPER[kernel].items()}
    close(run(kernel, steps, variant(kernel), **hyper), oracle(kernel, steps, **HYPER[kernel]))


# gamma = [1/2, 1/4, 1/2, 1/4], the rest as above.
# one-step target: [1 + 2/2, 2 + 8/4, 3, 4 + 4/4] = [2, 4, 3, 5];   gae: delta = [1, 2, 2, 3];  A0 = 1 + 2/4 = 1.5
# discounted: [1 + 4/2, 4, 3, 5]    td_lambda: [1 + (2/2 + 4/2) / 2, 4, 3, 5]
# vtrace:     rho * delta = [2, 1, 4, 3];  error0 = 2 + 1/2 * 1/2 * 1;  target = value + [2.25, 1, 4, 3]
#             target_next = [3, 8, 0, 4];  td_error = r + gamma * target_next - value = [1.5, 2, 2, 3]
#             pg_rho = min(1, ratio) = [1, 1/2, 1, 1];  advantage = [1.5, 1, 2, 3]
# upgo:       step 1 reaches 4 >= 2 = value: G0 = 1 + 4/2
PER_STEP = {"gamma": torch.tensor([0.5, 0.25, 0.5, 0.25])}
PER_STEP_TABLE = [
    (discounted_returns, {}, [[3.0, 4.0, 3.0, 5.0]]),
    (n_step_returns, {"n": 2}, [[3.0, 4.0, 3.0, 5.0]]),
    (td_lambda_returns, {"gae_lambda": 0.5}, [[2.5, 4.0, 3.0, 5.0]]),
    (gae, {"gae_lambda": 0.5}, [[1.5, 2.0, 2.0, 3.0], [2.5, 4.0, 3.0, 5.0]]),
    (upgo_returns, {}, [[3.0, 4.0, 3.0, 5.0]]),
    (
        vtrace,
        {"gae_lambda": 0.5, "clip_rho": 2.0, "clip_c": 1.0, "clip_pg_rho": 1.0},
        [[1.5, 1.0, 2.0, 3.0], [3.25, 3.0, 5.0, 5.0]],
    ),
]


@pytest.mark.parametrize(("kernel", "hyper", "expected"), PER_STEP_TABLE)
def test_a_discount_for_each_step_by_hand(variant, kernel, hyper, expected):
    close(run(kernel, HAND, variant(kernel), **PER_STEP, **hyper), expected)


def discounts(seed, *shape):
    """Powers 1 to 4 of 0.9, and a few zeros, which cut."""
    g = torch.Generator().manual_seed(seed)
    gamma = 0.9 ** torch.randint(1, 5, shape, generator=g).double()
    return gamma.masked_fill(torch.rand(shape, generator=g) < 0.1, 0.0)


@each_kernel
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3, 9), (2, 41)], ids=str)
@given(seed=seeds, gae_lambda=unit)
def test_a_discount_for_each_step_against_loop(kernel, shape, seed, gae_lambda):
    steps, gamma = random_steps(seed, *shape), discounts(seed, *shape)
    hyper = HYPER[kernel] | ({"gae_lambda": gae_lambda} if "gae_lambda" in HYPER[kernel] else {}) | {"gamma": gamma}
    close(run(kernel, steps, **hyper), oracle(kernel, steps, **hyper), tol=1e-4)


@each_kernel
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 16)], ids=str)
@given(seed=seeds, gamma=unit, dtype=st.sampled_from([torch.float32, torch.float16]))
def test_equal_discounts_for_all_steps_have_the_bits_of_one_number(kernel, shape, seed, gamma, dtype):
    steps, one = random_steps(seed, *shape), torch.tensor(gamma)
    steps = {name: x.to(dtype) if x.is_floating_point() else x for name, x in steps.items()}
    assert torch.equal(run(kernel, steps, gamma=one.expand(shape)), run(kernel, steps, gamma=one))


@each_kernel
def test_the_gradient_with_a_discount_for_each_step(kernel):
    steps, gamma = random_steps(3, 2, 5, dtype=torch.float64), discounts(4, 2, 5).clamp(min=0.3)
    hyper = {k: v for k, v in HYPER[kernel].items() if k != "gamma"}
    floats = live(kernel, steps)
    inputs = [x.clone().requires_grad_() for x in (*(steps[name] for name in floats), gamma)]

    def fn(*inputs):
        return run(kernel, steps | dict(zip(floats, inputs, strict=False)), gamma=inputs[-1], **hyper)

    assert torch.autograd.gradcheck(fn, inputs)


@each_kernel
def test_discounts_of_another_shape_are_refused(kernel):
    message = r"gamma has shape \[3\], expected a number, a 0-d tensor or \[2, 3\], the shape of reward"
    with pytest.raises(ValueError, match=message):
        run(kernel, random_steps(0, 2, 3), gamma=torch.ones(3))
    with pytest.raises(ValueError, match=r"gamma is '0\.9', expected a number or a 0-d tensor"):
        run(kernel, random_steps(0, 2, 3), gamma="0.9")


@each_kernel
@given(seed=seeds)
def test_envs_are_independent(kernel, seed):
    steps, order = random_steps(seed, 5, 6), torch.tensor([3, 0, 4, 2, 1])
    assert torch.equal(run(kernel, {k: v[order] for k, v in steps.items()}), run(kernel, steps)[:, order])


@each_kernel
@given(seed=seeds, scale=st.sampled_from([-4.0, 0.5, 2.0, 1024.0]))
def test_scaling_reward_and_value_scales_the_output(kernel, seed, scale):
    steps, scale = random_steps(seed, 3, 6), abs(scale) if kernel is upgo_returns else scale
    scaled = steps | {k: scale * steps[k] for k in ("reward", "value", "next_value")}
    assert torch.equal(run(kernel, scaled), scale * run(kernel, steps))  # powers of two: no rounding


@each_kernel
@given(seed=seeds, cut=st.integers(0, 6), hidden=st.sampled_from([0.0, NAN, float("inf")]))
def test_cutting_at_done_equals_two_calls(kernel, seed, cut, hidden):
    steps = random_steps(seed, 3, 8)
    steps["done"][:, cut] = True
    early, late = ({k: v[:, part] for k, v in steps.items()} for part in (slice(cut + 1), slice(cut + 1, None)))
    assert torch.equal(run(kernel, steps), torch.cat((run(kernel, early), run(kernel, late)), -1))
    steps["reward"][:, cut + 1 :] = hidden  # the next episode changes nothing before it, gradients included
    floats = [steps[name].requires_grad_() for name in live(kernel, steps)]
    before = run(kernel, steps)[..., : cut + 1]
    assert torch.equal(before, run(kernel, early))
    for grad in torch.autograd.grad(before.sum(), floats):
        assert torch.isfinite(grad[:, : cut + 1]).all()


@each_kernel
@pytest.mark.parametrize("junk", [NAN, float("inf"), -float("inf")])
def test_next_value_is_unused_where_terminated(kernel, junk):
    steps = random_steps(2, 4, 9)
    filled = steps | {"next_value": steps["next_value"].masked_fill(steps["terminated"], junk).requires_grad_()}
    out = run(kernel, filled)
    assert torch.equal(out, run(kernel, steps))
    out.sum().backward()
    assert torch.isfinite(filled["next_value"].grad).all()


@pytest.mark.parametrize("junk", [NAN, float("inf")])
def test_discounted_returns_read_next_value_only_where_the_trace_ends(junk):
    steps = random_steps(3, 4, 9)
    inside = ~steps["done"]
    inside[:, -1] = False
    filled = steps | {"next_value": steps["next_value"].masked_fill(inside, junk)}
    assert torch.equal(run(discounted_returns, filled), run(discounted_returns, steps))


@given(seed=seeds)
def test_estimators_meet_at_their_limits(seed):
    steps = consistent(random_steps(seed, 3, 7))
    on_policy, free = steps | {"log_prob": steps["old_log_prob"]}, {"clip_rho": 1.0, "clip_c": 1.0, "clip_pg_rho": 1.0}
    td_error = steps["reward"] + 0.9 * steps["next_value"] * ~steps["terminated"] - steps["value"]
    monte_carlo = run(discounted_returns, steps)
    close(run(gae, steps, gae_lambda=0.0)[0], td_error)
    close(run(gae, steps, gae_lambda=1.0)[1], monte_carlo[0])
    close(run(gae, steps)[1:], run(td_lambda_returns, steps))
    close(run(n_step_returns, steps, n=7), monte_carlo)
    close(run(n_step_returns, steps, n=1), run(td_lambda_returns, steps, gae_lambda=0.0))
    close(run(upgo_returns, steps | {"value": steps["value"] - INF}), monte_carlo)
    close(run(upgo_returns, steps | {"value": steps["value"] + INF}), run(n_step_returns, steps, n=1))
    assert (run(upgo_returns, steps) >= run(n_step_returns, steps, n=1) - 1e-5).all()
    close(run(vtrace, on_policy, **free)[1], run(gae, steps)[1])
    close(run(vtrace, on_policy, gae_lambda=1.0, **free)[0], run(gae, steps, gae_lambda=1.0)[0])


def test_no_gradient_reaches_the_value_that_upgo_compares():
    steps = random_steps(4, 2, 4)
    value, reward = steps["value"].requires_grad_(), steps["reward"].requires_grad_()
    grads = torch.autograd.grad(run(upgo_returns, steps).sum(), (value, reward), allow_unused=True)
    assert grads[0] is None and grads[1].any()


def test_the_clip_of_the_advantage_leaves_the_targets(variant):
    steps = random_steps(10, 3, 6)
    loose, tight = (run(vtrace, steps, variant(vtrace), clip_pg_rho=clip) for clip in (9.0, 0.25))
    ratio = torch.exp(steps["log_prob"] - steps["old_log_prob"])
    close(tight[1], loose[1])
    close(tight[0] * ratio.clamp(max=9.0), loose[0] * ratio.clamp(max=0.25))


@each_kernel
def test_gradients(kernel):
    steps = random_steps(4, 2, 4, dtype=torch.float64, p_end=0.3)
    floats = live(kernel, steps)
    inputs = [steps[k].requires_grad_() for k in floats]

    def outputs(*values):
        return run(kernel, steps | dict(zip(floats, values, strict=True)))

    assert torch.autograd.gradcheck(outputs, inputs)
    for name, grad in zip(floats, torch.autograd.grad(outputs(*inputs)[0].sum(), inputs), strict=True):
        assert grad.abs().sum() > 0, f"nothing reaches {name}: estimators never detach"


def test_vtrace_has_finite_gradients_where_the_ratio_overflows(variant):
    """The clipped ratio gives the same numbers as any ratio above the clip, and no gradient flows."""
    steps = random_steps(9, 3, 6)
    far = torch.zeros(3, 6, dtype=torch.bool)
    far[:, 2:4] = True
    above, beyond = (steps | {"log_prob": steps["log_prob"].masked_fill(far, x)} for x in (20.0, 500.0))
    close(run(vtrace, beyond, variant(vtrace)), oracle(vtrace, above, **HYPER[vtrace]))
    leaf = beyond["log_prob"].requires_grad_()
    grad = torch.autograd.grad(run(vtrace, beyond).sum(), leaf)[0]
    assert grad.isfinite().all() and not grad[far].any() and grad[~far].any()


# Infinite terms of weight 0. Step 1 ends by a time limit; rewards are 1, the values reached [2, 8, 6, 4].
INFINITE = {
    "reward": torch.ones(4),
    "value": torch.zeros(4),
    "next_value": torch.tensor([2.0, 8.0, 6.0, 4.0]),
    "terminated": torch.tensor([False, False, False, False]),
    "done": torch.tensor([False, True, False, False]),
    "log_prob": torch.zeros(4),
    "old_log_prob": torch.zeros(4),
}
INF = float("inf")
ABSENT = [
    # lambda 1: 1 + (1 + 8/2)/2 = 3.5, 5, 1 + (1 + 4/2)/2 = 2.5, 3; the values reached at steps 0 and 2 have weight 0
    (td_lambda_returns, {"gae_lambda": 1.0}, {"next_value": [INF, 8.0, NAN, 4.0]}, [3.5, 5.0, 2.5, 3.0]),
    # lambda 0: 1 + [2, 8, 6, 4]/2, and an infinite return only where its own reward or value is
    (td_lambda_returns, {"gae_lambda": 0.0}, {"next_value": [2.0, 8.0, 6.0, INF]}, [2.0, 5.0, 4.0, INF]),
    (td_lambda_returns, {"gae_lambda": 0.0}, {"reward": [1.0, -INF, 1.0, NAN]}, [2.0, -INF, 4.0, NAN]),
    (gae, {"gae_lambda": 0.0}, {"reward": [1.0, INF, 1.0, NAN]}, [2.0, INF, 4.0, NAN]),
    (gae, {"gae_lambda": 0.0}, {"next_value": [2.0, 8.0, 6.0, -INF]}, [2.0, 5.0, 4.0, -INF]),
    (vtrace, {"gae_lambda": 0.0}, {"reward": [1.0, 1.0, 1.0, INF]}, [2.0, 5.0, 4.0, INF]),
    # gamma 0: only the rewards
    *(
        (
            kernel,
            {"gamma": 0.0},
            {"next_value": [INF, NAN, -INF, INF], "reward": [1.0, 2.0, 3.0, INF]},
            [1.0, 2.0, 3.0, INF],
        )
        for kernel in KERNELS
    ),
]


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize(("kernel", "hyper", "fields", "expected"), ABSENT)
def test_a_term_of_weight_zero_is_absent(variant, kernel, hyper, fields, expected, tensors):
    steps = INFINITE | {name: torch.tensor(values) for name, values in fields.items()}
    hyper = {"gamma": 0.5} | hyper
    hyper = {name: torch.tensor(value) for name, value in hyper.items()} if tensors else hyper
    out = run(kernel, steps, variant(kernel), **hyper)
    close(out[1 if kernel is vtrace else 0], expected)


@pytest.mark.parametrize("gamma", [0.0, torch.tensor(0.0), torch.zeros(4)], ids=["number", "tensor", "per step"])
def test_with_a_gamma_of_zero_the_advantage_of_vtrace_does_not_read_the_next_value_target(variant, gamma):
    steps = INFINITE | {"reward": torch.tensor([1.0, 2.0, NAN, INF])}
    close(run(vtrace, steps, variant(vtrace), gamma=gamma, gae_lambda=1.0)[0], [1.0, 2.0, NAN, INF])


@pytest.mark.parametrize("length", [40, 600])
def test_a_term_of_weight_zero_is_absent_in_blocks(length):
    steps = random_steps(11, 3, length)
    finite = oracle(td_lambda_returns, steps, gamma=0.9, gae_lambda=1.0)
    inside = ~steps["done"]
    inside[:, -1] = False
    steps["next_value"] = steps["next_value"].masked_fill(inside, INF)
    close(run(td_lambda_returns, steps, gae_lambda=torch.tensor(1.0)), finite)
    steps["reward"][:, ::7] = INF
    for kernel in (td_lambda_returns, gae):
        hyper = {"gamma": 0.9, "gae_lambda": 0.0}
        one_step = oracle(n_step_returns, steps, gamma=0.9, n=1)[0]
        close(run(kernel, steps, **hyper)[-1], torch.where(one_step.isnan(), NAN, one_step))


@each_kernel
def test_no_retrace(kernel):
    names = [k for k in HYPER[kernel] if k != "n"]

    def call(tensors, *hyper):
        return run(kernel, tensors, **dict(zip(names, hyper, strict=True)))

    first, second = (
        (random_steps(s, 2, 4), *torch.rand(len(names), generator=torch.Generator().manual_seed(s))) for s in (5, 6)
    )
    assert_no_retrace(call, first, second)


@each_kernel
def test_bad_shapes_are_named(kernel):
    steps = random_steps(7, 3, 4)
    for name in ARGS[kernel]:
        with pytest.raises(ValueError, match=rf"\b{name} has shape \[3, 5\]|expected \[3, 5\], the shape of {name}$"):
            run(kernel, steps | {name: torch.zeros(3, 5, dtype=steps[name].dtype)})


def test_n_step_needs_a_reward():
    with pytest.raises(ValueError, match="n=0"):
        assert_pure(run, n_step_returns, random_steps(8, 3), n=0)


@each_kernel
@pytest.mark.parametrize("length", [16, 17, 100, 129, 300])
def test_long_rollouts_are_those_of_a_plain_loop_in_blocks_of_any_size(kernel, length):
    """Blocks end elsewhere for each length; cutting where an episode ends changes nothing but rounding."""
    steps = random_steps(length, 3, length, p_end=0.05)
    steps["done"][:, length // 2] = True
    whole = run(kernel, steps)
    parts = [run(kernel, {k: v[:, part] for k, v in steps.items()}) for part in _halves(length // 2 + 1)]
    close(whole, torch.cat(parts, -1), tol=1e-5)
    close(whole, run(kernel, {k: v.double() if v.is_floating_point() else v for k, v in steps.items()}), tol=1e-5)


def _halves(at):
    return slice(at), slice(at, None)


@pytest.mark.slow
@pytest.mark.parametrize("time_major", [True, False], ids=["time-major", "env-major"])
@pytest.mark.parametrize("shape", [(64, 100), (7, 33), (600, 130)], ids=str)
def test_gae_in_a_graph_is_the_eager_one(shape, time_major):
    """GAE is right for any memory layout, and for masks of an odd number of bytes."""
    steps = random_steps(3, *shape)
    if time_major:
        steps = {name: field.t().contiguous().t() for name, field in steps.items()}
    hyper = {"gamma": torch.tensor(0.99), "gae_lambda": torch.tensor(0.95)}
    compiled = choose_form("on", "cpu").jit(_gae)(*(steps[name] for name in ARGS[gae]), hyper)
    for actual, expected in zip(compiled, _gae(*(steps[name] for name in ARGS[gae]), hyper), strict=True):
        close(actual, expected, tol=1e-5)


@pytest.mark.slow
def test_gae_in_a_graph_takes_masks_that_begin_at_an_odd_byte():
    steps = random_steps(3, 129)  # without the first there are 128, which could be read two at a time
    hyper = {"gamma": torch.tensor(0.99), "gae_lambda": torch.tensor(0.95)}
    inputs, jit = [steps[name] for name in ARGS[gae]], choose_form("on", "cpu").jit
    late = [field[1:] for field in inputs]
    jit(_gae)(*(field[:128] for field in inputs), hyper)  # compiled for masks that begin at an even one
    for out in (jit(_late_gae)(*inputs, hyper), jit(_gae)(*late, hyper), jit(_gae)(*late, hyper)):
        for actual, expected in zip(out, _gae(*late, hyper), strict=True):
            close(actual, expected, tol=1e-5)


def _late_gae(*fields_and_hyper):
    *fields, hyper = fields_and_hyper
    return gae(*(field[1:] for field in fields), **hyper)


def _gae(*fields_and_hyper):
    *fields, hyper = fields_and_hyper
    return gae(*fields, **hyper)


def cleanrl_gae(rewards, dones, values, next_done, next_value, gamma, gae_lambda):
    """The lines of CleanRL's ppo.py. `dones[t]` is the flag before step t, and time is the first axis."""
    advantages, lastgaelam = torch.zeros_like(rewards), 0
    for t in reversed(range(len(rewards))):
        if t == len(rewards) - 1:
            nextnonterminal, nextvalues = 1.0 - next_done, next_value
        else:
            nextnonterminal, nextvalues = 1.0 - dones[t + 1], values[t + 1]
        delta = rewards[t] + gamma * nextvalues * nextnonterminal - values[t]
        advantages[t] = lastgaelam = delta + gamma * gae_lambda * nextnonterminal * lastgaelam
    return advantages, advantages + values


def test_gae_of_tensors_with_time_first(variant):
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 9, 3, generator=g).unbind()  # [T, N]
    dones, next_value = (torch.rand(10, 3, generator=g) < 0.3).float(), torch.randn(3, generator=g)
    expected = cleanrl_gae(rewards, dones[:-1], values, dones[-1], next_value, 0.9, 0.7)
    done, follows = dones[1:].bool(), torch.cat((values[1:], next_value.unsqueeze(0)))
    steps = [x.movedim(0, -1) for x in (rewards, values, follows, done, done)]
    for actual, other in zip(variant(gae)(*steps, gamma=0.9, gae_lambda=0.7), expected, strict=True):
        close(actual.movedim(-1, 0), other)


ESTIMATORS = [
    "gae",
    "upgo_returns",
    "vtrace",
    "discounted_returns",
    "n_step_returns",
    "td_lambda_returns",
    "retrace",
    "q_lambda",
]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_time_first_in_memory_changes_nothing(name):
    args, kwargs = CALLS[name](3)
    time_first = [x.movedim(1, 0).contiguous() for x in args]
    results = kernel_named(name)(*args, **kwargs), kernel_named(name)(*(x.movedim(0, 1) for x in time_first), **kwargs)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in results), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_trajectory_without_steps_is_named(name):
    args, kwargs = CALLS[name](3)
    empty = [x[:, :0] for x in args]
    message = r"^reward has shape \[.*0\], expected at least one time step on the last axis$"
    with pytest.raises(ValueError, match=message):
        kernel_named(name)(*empty, **kwargs)
