"""Estimators on `[N, T + 1]` rollouts: time limits, the padding slot, and the checks that name a bad field."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, assert_pure, close
from tensordict import TensorDict

from ecrl.kernels import (
    compute_gae,
    compute_n_step_returns,
    compute_returns,
    compute_td_lambda_returns,
    compute_upgo_returns,
    compute_vtrace,
    transitions,
)
from ecrl.types import check_rollout, same_shape

NAN, INF = float("nan"), float("inf")
T, F = True, False
unit = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0))
seeds = st.integers(0, 2**31)


def vtrace_of(rollout, gamma=0.9, gae_lambda=0.7):
    log_prob = 0.5 * rollout.get("sample_log_prob", torch.zeros(rollout.shape))[:, :-1]
    clips = {"clip_rho": 1.5, "clip_c": 1.0, "clip_pg_rho": 1.2}
    return compute_vtrace(rollout, log_prob, gamma=gamma, gae_lambda=gae_lambda, **clips)


ESTIMATORS = {
    "returns": lambda rollout: compute_returns(rollout, 0.9),
    "n_step": lambda rollout: compute_n_step_returns(rollout, 0.9, 3),
    "td_lambda": lambda rollout: compute_td_lambda_returns(rollout, 0.9, 0.7),
    "gae": lambda rollout: compute_gae(rollout, 0.9, 0.7),
    "upgo": lambda rollout: compute_upgo_returns(rollout, 0.9),
    "vtrace": vtrace_of,
}
each_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def apply(name, rollout):
    """The estimator's outputs, stacked: `[outputs, N, T]`."""
    out = assert_pure(ESTIMATORS[name], rollout)
    return torch.stack(out) if isinstance(out, tuple) else out[None]


def random_rollout(seed, envs, steps, p_end=0.15, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    shape = (envs, steps + 1)
    floats = ("reward", "value", "final_value", "sample_log_prob")
    rollout = {name: scale * torch.randn(shape, generator=g) for name in floats}
    rollout |= {name: torch.rand(shape, generator=g) < p_end for name in ("terminated", "truncated")}
    rollout["final_value"] = rollout["final_value"].masked_fill(~rollout["truncated"], 0.0)
    rollout |= {"done": rollout["terminated"] | rollout["truncated"], "mask": torch.ones(shape, dtype=torch.bool)}
    rollout |= {"obs": torch.randn(*shape, 2, generator=g), "action": torch.randn(*shape, 1, generator=g)}
    for name in set(rollout) - {"obs", "value"}:
        rollout[name][:, -1] = 0
    return TensorDict(rollout, shape)


# gamma = gae_lambda = 1/2, values 1 throughout (2 at the bootstrap observation), rewards 1, a time limit after step 1.
# With final_value 8:  one-step targets [1 + 1/2, 1 + 8/2, 1 + 2/2] = [1.5, 5, 2];  delta = [0.5, 4, 1]
#   advantage = [0.5 + 4/4, 4, 1];  discounted [1 + 5/2, 5, 2];  2-step the same
# Without it the limit is an end: one-step [1.5, 1, 2], delta = [0.5, 0, 1], discounted [1.5, 1, 2]
# vtrace, all ratios 1: the targets of gae; advantage = r + [5, 8, 2] / 2 - 1, or r + [1, 0, 2] / 2 - 1
LIMIT = {
    "reward": [[1.0, 1.0, 1.0, NAN]],
    "value": [[1.0, 1.0, 1.0, 2.0]],
    "final_value": [[0.0, 8.0, 0.0, NAN]],
    "sample_log_prob": [[0.0, 0.0, 0.0, NAN]],
    "terminated": [[F, F, F, T]],
    "truncated": [[F, T, F, T]],
    "done": [[F, T, F, T]],
}
HALF = {"gamma": 0.5, "gae_lambda": 0.5}
FREE = {"log_prob": torch.zeros(1, 3), "clip_rho": 1.0, "clip_c": 1.0, "clip_pg_rho": 1.0}
TABLE = [
    (compute_returns, {"gamma": 0.5}, [[[3.5, 5.0, 2.0]]], [[[1.5, 1.0, 2.0]]]),
    (compute_n_step_returns, {"gamma": 0.5, "n": 1}, [[[1.5, 5.0, 2.0]]], [[[1.5, 1.0, 2.0]]]),
    (compute_n_step_returns, {"gamma": 0.5, "n": 2}, [[[3.5, 5.0, 2.0]]], [[[1.5, 1.0, 2.0]]]),
    (compute_td_lambda_returns, HALF, [[[2.5, 5.0, 2.0]]], [[[1.5, 1.0, 2.0]]]),
    (compute_gae, HALF, [[[1.5, 4.0, 1.0]], [[2.5, 5.0, 2.0]]], [[[0.5, 0.0, 1.0]], [[1.5, 1.0, 2.0]]]),
    (compute_upgo_returns, {"gamma": 0.5}, [[[3.5, 5.0, 2.0]]], [[[1.5, 1.0, 2.0]]]),
    (compute_vtrace, HALF | FREE, [[[2.5, 4.0, 1.0]], [[2.5, 5.0, 2.0]]], [[[0.5, 0.0, 1.0]], [[1.5, 1.0, 2.0]]]),
]


@pytest.mark.parametrize(("compute", "hyper", "with_final", "without"), TABLE)
def test_time_limit_by_hand(variant, compute, hyper, with_final, without):
    rollout = TensorDict({k: torch.tensor(v) for k, v in LIMIT.items()}, [1, 4])
    for case, expected in ((rollout, with_final), (rollout.exclude("final_value"), without)):
        out = variant(compute)(case, **hyper)
        close(torch.stack(out if isinstance(out, tuple) else (out,)), expected)


def test_returns_without_a_critic(variant):
    # No value: nothing is bootstrapped at the limit nor at the end. [1 + 1/2, 1, 1]
    rollout = TensorDict({k: torch.tensor(v) for k, v in LIMIT.items()}, [1, 4]).exclude("value", "final_value")
    close(variant(compute_returns)(rollout, 0.5), [[1.5, 1.0, 1.0]])


def gae_loop(r, gamma, gae_lambda):
    """Advantages `[N, T]` of a rollout, in float64, one env at a time, straight from its field table."""
    r = {k: r[k].double().numpy() for k in ("reward", "value", "final_value", "terminated", "truncated")}
    envs, steps = r["reward"].shape[0], r["reward"].shape[1] - 1
    advantage = np.zeros((envs, steps + 1))
    for i in range(envs):
        for t in reversed(range(steps)):
            reached = r["final_value"][i, t] if r["truncated"][i, t] else r["value"][i, t + 1]
            if r["terminated"][i, t]:
                reached = 0.0
            ended = r["terminated"][i, t] or r["truncated"][i, t]
            delta = r["reward"][i, t] + gamma * reached - r["value"][i, t]
            advantage[i, t] = delta + (0.0 if ended else gamma * gae_lambda * advantage[i, t + 1])
    return torch.from_numpy(advantage[:, :-1])


def check_gae(rollout, gamma, gae_lambda):
    """Max error over max size below 1e-5: a float32 rounding is 6e-8, and 2048 steps must not add them up."""
    expected, (advantage, returns) = gae_loop(rollout, gamma, gae_lambda), compute_gae(rollout, gamma, gae_lambda)
    target = expected + rollout["value"][:, :-1]
    assert advantage.dtype == returns.dtype == torch.float32
    assert (advantage - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (returns - target).abs().max() < 1e-5 * max(expected.abs().max(), target.abs().max())


@given(
    seeds,
    st.sampled_from([1, 2, 3, 17, 64]),
    unit,
    unit,
    st.sampled_from([0.0, 0.1, 0.6]),
    st.sampled_from([1e-3, 1.0, 1e4]),
)
@example(0, 33, 0.0, 1.0, 0.1, 1.0)
@example(0, 33, 1.0, 0.0, 0.1, 1.0)
@example(0, 33, 1.0, 1.0, 0.1, 1.0)
@example(0, 33, 0.0, 0.0, 0.1, 1.0)
def test_gae_against_loop(seed, steps, gamma, gae_lambda, p_end, scale):
    check_gae(random_rollout(seed, 3, steps, p_end, scale), gamma, gae_lambda)


@pytest.mark.parametrize("steps", [1, 2, 257, 2048])
@pytest.mark.parametrize(
    ("gamma", "gae_lambda"), [(0.0, 0.0), (0.99, 0.95), (0.9995, 1.0), (0.9999, 0.99999), (1.0, 0.9995), (1.0, 1.0)]
)
@pytest.mark.parametrize("p_end", [0.0, 0.002, 0.2])
def test_gae_against_loop_over_long_rollouts(steps, gamma, gae_lambda, p_end):
    check_gae(random_rollout(steps, 4, steps, p_end), gamma, gae_lambda)


@each_estimator
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("seed", [0, 1])
def test_padding_is_never_read(name, junk, seed):
    clean = random_rollout(seed, 3, 6)
    dirty = clean.clone()
    for key in set(clean.keys()) - {"obs", "value"}:
        dirty[key][:, -1] = junk if clean[key].is_floating_point() else True
    assert torch.equal(apply(name, dirty), apply(name, clean))
    for last in (dirty, clean):
        last["value"].requires_grad_()
        apply(name, last).sum().backward()
    assert torch.equal(dirty["value"].grad, clean["value"].grad)


@each_estimator
@given(seed=seeds, junk=st.sampled_from([NAN, INF]))
def test_unreached_values_are_never_read(name, seed, junk):
    clean = random_rollout(seed, 4, 8, p_end=0.3)
    dirty = clean.clone()
    unread = clean["terminated"] | ~clean["truncated"]  # a true end hides final_value even at a time limit
    dirty["final_value"] = dirty["final_value"].masked_fill(unread, junk)
    assert torch.equal(apply(name, dirty), apply(name, clean))


@each_estimator
@given(seed=seeds)
def test_without_final_value_a_time_limit_is_an_end(name, seed):
    rollout = random_rollout(seed, 4, 8, p_end=0.3)
    ended = rollout.clone().set("terminated", rollout["done"])
    assert torch.equal(apply(name, rollout.exclude("final_value")), apply(name, ended))


@each_estimator
@given(seed=seeds, cut=st.integers(0, 6))
def test_cutting_at_done_equals_two_rollouts(name, seed, cut):
    rollout = random_rollout(seed, 3, 8)
    rollout["done"][:, cut] = rollout["truncated"][:, cut] = True
    early, late = rollout[:, : cut + 2].clone(), rollout[:, cut + 1 :]
    early["value"][:, -1] = NAN  # the next episode's first value, behind the cut
    assert torch.equal(apply(name, rollout), torch.cat((apply(name, early), apply(name, late)), -1))


@each_estimator
def test_environments_do_not_affect_each_other(name):
    rollout, order = random_rollout(5, 4, 6), torch.tensor([2, 0, 3, 1])
    assert torch.equal(apply(name, rollout[order]), apply(name, rollout)[:, order])


@each_estimator
def test_gradient_reaches_values_and_rewards(name):
    rollout = random_rollout(6, 4, 6, p_end=0.3)
    leaves = [rollout[k].requires_grad_() for k in ("reward", "value", "final_value")]
    for grad in torch.autograd.grad(apply(name, rollout)[-1].sum(), leaves):
        assert grad.abs().sum() > 0


@pytest.mark.parametrize("compute", [compute_gae, compute_td_lambda_returns, vtrace_of])
def test_no_retrace(compute):
    first, second = ((random_rollout(s, 2, 3), torch.tensor(0.9 - 0.1 * s), torch.tensor(0.1 * s)) for s in (1, 2))
    assert_no_retrace(compute, first, second)


def test_transitions_by_hand(variant):
    # Row 0: a limit at step 0 reaches 9, then value[:, 2] = 3. Row 1: no limit, so the values shift by one.
    rollout = TensorDict(
        {
            "obs": {"state": torch.zeros(2, 3, 4)},
            "value": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
            "final_value": torch.tensor([[9.0, NAN, NAN], [NAN, NAN, NAN]]),
            "terminated": torch.tensor([[F, F, F], [T, F, T]]),
            "truncated": torch.tensor([[T, F, F], [F, F, T]]),
            "done": torch.tensor([[T, F, F], [T, F, T]]),
        },
        [2, 3],
    )
    steps = variant(transitions)(rollout)
    close(steps["next_value"], [[9.0, 3.0], [5.0, 6.0]])
    assert steps.batch_size == (2, 2)
    assert steps["obs", "state"].shape == (2, 2, 4)
    assert rollout.get("next_value", None) is None
    without = variant(transitions)(rollout.exclude("final_value"))
    close(without["next_value"], [[0.0, 3.0], [5.0, 6.0]])
    assert variant(transitions)(rollout.exclude("value")).get("next_value", None) is None


def test_transitions_are_views():
    rollout = random_rollout(0, 2, 3)
    for key, field in transitions(rollout).exclude("next_value").items():
        assert field.data_ptr() == rollout[key].data_ptr()


READS = {
    "returns": ["reward", "terminated", "truncated", "done"],
    "gae": ["reward", "value", "terminated", "truncated", "done"],
    "vtrace": ["sample_log_prob", "reward", "value", "terminated", "truncated", "done"],
}
READS["n_step"] = READS["td_lambda"] = READS["upgo"] = READS["gae"]


@each_estimator
def test_missing_fields_and_wrong_shapes_are_named(name):
    rollout = random_rollout(0, 2, 3)
    for key in READS[name]:
        with pytest.raises(ValueError, match=f"lacks '{key}'"):
            apply(name, rollout.exclude(key))
    for key in {*READS[name], "value", "final_value"} - {"sample_log_prob"}:
        wide = rollout[key].unsqueeze(-1).expand(2, 4, 5)
        with pytest.raises(ValueError, match=rf"'{key}'.*\[2, 4, 5\]"):
            apply(name, rollout.copy().set(key, wide))


def test_vtrace_names_a_bad_log_prob():
    rollout = random_rollout(0, 2, 3)
    with pytest.raises(ValueError, match="the shape of log_prob"):
        compute_vtrace(rollout, torch.zeros(2, 4), **HALF, clip_rho=1.0, clip_c=1.0, clip_pg_rho=1.0)
    with pytest.raises(ValueError, match=r"reward has shape \[2, 3\].*expected \[2, 3, 5\], the shape of log_prob"):
        vtrace_of(rollout.set("sample_log_prob", torch.zeros(2, 4, 5)))


@pytest.mark.parametrize(
    ("fields", "batch", "keys", "message"),
    [
        ({}, [3], [], r"batch shape \[3\], expected \[num_envs, time \+ 1\]"),
        ({}, [2, 1], [], r"batch shape \[2, 1\].*time >= 1"),
        ({}, [2, 3, 4], [], r"batch shape \[2, 3, 4\]"),
        ({"steps": torch.zeros(2, 3)}, [2], [], "time >= 1; pass the field 'steps' of the batch$"),
        ({"reward": torch.zeros(2, 3)}, [2, 3], ["reward", "done"], "lacks 'done'.*it has reward"),
        ({"value": torch.zeros(2, 3, 1)}, [2, 3], ["value"], r"rollout\['value'\] has shape \[2, 3, 1\]"),
        ({"done": torch.zeros(2, 3)}, [2, 3], ["done"], r"rollout\['done'\] has dtype torch.float32"),
        ({"mask": torch.zeros(2, 3)}, [2, 3], ["mask"], r"rollout\['mask'\] has dtype torch.float32"),
    ],
)
def test_check_rollout_names_the_fault(fields, batch, keys, message):
    with pytest.raises(ValueError, match=message):
        check_rollout(TensorDict(fields, batch), *keys)


def test_check_rollout_accepts_only_what_is_asked_for():
    check_rollout(random_rollout(0, 2, 3), "obs", "action", "sample_log_prob", "value", "reward", "done", "mask")
    wrong = TensorDict({"done": torch.zeros(1, 2, 7)}, [1, 2])
    check_rollout(wrong)
    with pytest.raises(ValueError, match=r"rollout\['done'\] has shape \[1, 2, 7\]"):
        check_rollout(wrong, "done")


def test_same_shape_names_every_culprit():
    same_shape(a=torch.zeros(2), b=torch.ones(2))
    with pytest.raises(ValueError, match=r"^b has shape \[3\], d has shape \[\], expected \[2\], the shape of a$"):
        same_shape(a=torch.zeros(2), b=torch.zeros(3), c=torch.zeros(2), d=torch.zeros(()))
