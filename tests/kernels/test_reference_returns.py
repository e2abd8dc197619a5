"""Returns and advantages against rlax, TorchRL and Stable-Baselines3, in float32.

Tolerance 1e-5 of the size: both sides round each of at most 40 float32 steps by 6e-8.
"""

import numpy as np
import pytest
import torch
from support.checks import close
from tensordict import TensorDict

from ecrl.kernels import (
    compute_gae,
    compute_returns,
    discounted_returns,
    gae,
    n_step_returns,
    td_lambda_returns,
    upgo_returns,
    vtrace,
)

pytestmark = pytest.mark.ref
T = 40
HYPER = [(0.0, 0.5), (0.9, 0.0), (0.9, 0.7), (0.99, 0.95), (0.99, 1.0), (1.0, 1.0)]
each_hyper = pytest.mark.parametrize(("gamma", "gae_lambda"), HYPER)
PLAIN = ("reward", "next_value", "terminated", "done")
WHOLE = ("reward", "value", "next_value", "terminated", "done")


def fields(s, *names):
    return [s[name] for name in names]


def steps(*shape, seed=0):
    """Random steps with ends of both kinds, whose values agree with the next step's inside an episode."""
    g = torch.Generator().manual_seed(seed)
    names = ("reward", "value", "next_value", "log_prob", "old_log_prob")
    s = {name: torch.randn(shape, generator=g) for name in names}
    s |= {name: torch.rand(shape, generator=g) < 0.1 for name in ("terminated", "truncated")}
    s["done"] = s["terminated"] | s["truncated"]
    follows = torch.cat((s["value"][..., 1:], s["next_value"][..., -1:]), -1)
    s["next_value"] = torch.where(s["done"], s["next_value"], follows)
    return s


@pytest.fixture(scope="module")
def rlax():
    return pytest.importorskip("rlax")


def in_rlax(s, gamma, gae_lambda):
    """Its per-step arrays: the discount is 0 at a true end, lambda is 0 at any end, which bootstraps from v_t there."""
    discount = gamma * (~s["terminated"]).float().numpy()
    trace = gae_lambda * (~s["done"]).float().numpy()
    return discount, trace, {k: s[k].numpy() for k in ("reward", "value", "next_value")}


def close_to(actual, expected):
    close(actual, torch.from_numpy(np.array(expected)))


@each_hyper
def test_rlax_lambda_returns(rlax, gamma, gae_lambda):
    s = steps(T)
    discount, trace, a = in_rlax(s, gamma, gae_lambda)
    actual = td_lambda_returns(*fields(s, *PLAIN), gamma=gamma, gae_lambda=gae_lambda)
    close_to(actual, rlax.lambda_returns(a["reward"], discount, a["next_value"], trace))


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_rlax_discounted_returns(rlax, gamma):
    # It has no time limits: one is written as a true end whose reward holds gamma * V of the state reached.
    s = steps(T)
    limit = s["truncated"] & ~s["terminated"]
    reward = (s["reward"] + gamma * s["next_value"] * limit).numpy()
    discount = gamma * (~s["done"]).float().numpy()
    actual = discounted_returns(*fields(s, *PLAIN), gamma=gamma)
    close_to(actual, rlax.discounted_returns(reward, discount, s["next_value"].numpy()))


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("n", [1, 2, 5, T, T + 3])
def test_rlax_n_step_returns(rlax, gamma, n):
    s = steps(T)
    discount, trace, a = in_rlax(s, gamma, 1.0)
    actual = n_step_returns(*fields(s, *PLAIN), gamma=gamma, n=n)
    close_to(actual, rlax.n_step_bootstrapped_returns(a["reward"], discount, a["next_value"], n, trace))


@each_hyper
def test_rlax_gae(rlax, gamma, gae_lambda):
    # It takes values [T + 1] and no time limits: a limit is written into the reward, as above.
    s = steps(T)
    limit = s["truncated"] & ~s["terminated"]
    reward = (s["reward"] + gamma * s["next_value"] * limit).numpy()
    discount = gamma * (~s["done"]).float().numpy()
    values = torch.cat((s["value"], s["next_value"][-1:])).numpy()
    actual = gae(*fields(s, *WHOLE), gamma=gamma, gae_lambda=gae_lambda)
    close_to(actual.advantage, rlax.truncated_generalized_advantage_estimation(reward, discount, gae_lambda, values))


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_upgo_is_the_lambda_returns_of_rlax_with_one_lambda_per_step(rlax, gamma):
    # rlax has no UPGO. Its lambda is 1 where the next action does at least as well as expected, and 0 elsewhere.
    s = steps(T)
    discount, _, a = in_rlax(s, gamma, 1.0)
    one_step = a["reward"] + discount * a["next_value"]
    follows = np.append(one_step[1:] >= a["value"][1:], False) & ~s["done"].numpy()
    assert 0.2 < follows.mean() < 0.8
    actual = upgo_returns(*fields(s, *WHOLE), gamma=gamma)
    close_to(actual, rlax.lambda_returns(a["reward"], discount, a["next_value"], follows.astype(np.float32)))


def our_vtrace(s, gamma, gae_lambda, clip_rho, clip_c=1.0, clip_pg_rho=1.0):
    inputs, clips = fields(s, "log_prob", "old_log_prob", *WHOLE), {"clip_c": clip_c, "clip_pg_rho": clip_pg_rho}
    return vtrace(*inputs, gamma=gamma, gae_lambda=gae_lambda, clip_rho=clip_rho, **clips)


@each_hyper
@pytest.mark.parametrize("clip_rho", [0.7, 1.0, 3.0])
def test_rlax_vtrace(rlax, gamma, gae_lambda, clip_rho):
    # Its error is value_target - value; it fixes clip_c = 1.
    s = steps(T)
    discount, trace, a = in_rlax(s, gamma, gae_lambda)
    rho = torch.exp(s["log_prob"] - s["old_log_prob"]).numpy()
    error = rlax.vtrace(a["value"], a["next_value"], a["reward"], discount, rho, trace, clip_rho)
    close_to(our_vtrace(s, gamma, gae_lambda, clip_rho).value_target - s["value"], error)


@pytest.mark.parametrize(("clip_rho", "clip_pg_rho"), [(0.7, 0.7), (1.0, 1.0), (1.0, 2.5), (3.0, 0.5)])
def test_rlax_vtrace_advantage(rlax, clip_rho, clip_pg_rho):
    # Its policy advantage mixes target and value by lambda, the paper and ecrl do not: they meet at lambda = 1. At a
    # time limit it bootstraps from the next row's value, not from the state reached, so there are only true ends here.
    s = steps(T)
    s["done"] = s["terminated"]
    follows = torch.cat((s["value"][1:], s["next_value"][-1:]))
    s["next_value"] = torch.where(s["done"], s["next_value"], follows)
    discount, _, a = in_rlax(s, 0.9, 1.0)
    rho = torch.exp(s["log_prob"] - s["old_log_prob"]).numpy()
    out = rlax.vtrace_td_error_and_advantage(
        a["value"], a["next_value"], a["reward"], discount, rho, 1.0, clip_rho, clip_pg_rho_threshold=clip_pg_rho
    )
    actual = our_vtrace(s, 0.9, 1.0, clip_rho, clip_pg_rho=clip_pg_rho)
    close_to(actual.advantage, out.pg_advantage)
    close_to(actual.value_target - s["value"], out.errors)


@pytest.fixture(scope="module")
def torchrl():
    return pytest.importorskip("torchrl.objectives.value.functional")


def columns(s, *names):
    """TorchRL's layout `[N, T, 1]`."""
    return [x.unsqueeze(-1) for x in fields(s, *names)]


@each_hyper
def test_torchrl_gae(torchrl, gamma, gae_lambda):
    s = steps(3, T, seed=1)
    expected = columns(s, "value", "next_value", "reward", "done", "terminated")
    advantage, target = torchrl.generalized_advantage_estimate(gamma, gae_lambda, *expected)
    actual = gae(*fields(s, *WHOLE), gamma=gamma, gae_lambda=gae_lambda)
    close(actual.advantage, advantage.squeeze(-1))
    close(actual.value_target, target.squeeze(-1))


@each_hyper
def test_torchrl_td_lambda(torchrl, gamma, gae_lambda):
    s = steps(3, T, seed=2)
    expected = torchrl.td_lambda_return_estimate(
        gamma, gae_lambda, *columns(s, "next_value", "reward", "done", "terminated")
    )
    actual = td_lambda_returns(*fields(s, *PLAIN), gamma=gamma, gae_lambda=gae_lambda)
    close(actual, expected.squeeze(-1))


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize(("clip_rho", "clip_c"), [(1.0, 1.0), (0.7, 0.5), (3.0, 2.0)])
def test_torchrl_vtrace(torchrl, gamma, clip_rho, clip_c):
    # It has no lambda. Ratios above 1 make errors grow along the trace, so they are compared relative to the largest.
    s = steps(3, T, seed=3)
    inputs = columns(s, "log_prob", "old_log_prob", "value", "next_value", "reward", "done", "terminated")
    advantage, target = torchrl.vtrace_advantage_estimate(gamma, *inputs, clip_rho, clip_c)
    actual = our_vtrace(s, gamma, 1.0, clip_rho, clip_c, clip_pg_rho=clip_rho)
    size = target.abs().max()
    close(actual.value_target / size, target.squeeze(-1) / size)
    close(actual.advantage / size, advantage.squeeze(-1) / size)


def as_rollout(s):
    """The same steps as a `[N, T + 1]` rollout, with values of reached states in final_value at time limits."""
    last = s["next_value"][:, -1:]
    rollout = {
        k: torch.cat((s[k], torch.zeros_like(s[k][:, :1])), 1) for k in ("reward", "terminated", "truncated", "done")
    }
    rollout["value"] = torch.cat((s["value"], last), 1)
    rollout["final_value"] = torch.cat((s["next_value"] * s["truncated"], torch.zeros_like(last)), 1)
    return TensorDict(rollout, rollout["reward"].shape)


@each_hyper
def test_torchrl_gae_on_a_rollout(torchrl, gamma, gae_lambda):
    s = steps(3, T, seed=4)
    expected = columns(s, "value", "next_value", "reward", "done", "terminated")
    advantage, target = torchrl.generalized_advantage_estimate(gamma, gae_lambda, *expected)
    actual = compute_gae(as_rollout(s), gamma, gae_lambda)
    close(actual.advantage, advantage.squeeze(-1))
    close(actual.value_target, target.squeeze(-1))


@each_hyper
def test_stable_baselines3_buffer(gamma, gae_lambda):
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    spaces = pytest.importorskip("gymnasium.spaces")
    s = steps(3, T, seed=5)
    s["truncated"], s["done"] = torch.zeros_like(s["done"]), s["terminated"]  # it has no time limits
    box = spaces.Box(-1.0, 1.0, (1,))
    buffer = buffers.RolloutBuffer(T, box, box, "cpu", gae_lambda=gae_lambda, gamma=gamma, n_envs=3)
    began = np.ones(3)
    for t in range(T):
        column = {k: s[k][:, t] for k in ("reward", "value", "terminated")}
        buffer.add(np.zeros((3, 1)), np.zeros((3, 1)), column["reward"].numpy(), began, column["value"], torch.zeros(3))
        began = column["terminated"].numpy()
    last = torch.randn(3, generator=torch.Generator().manual_seed(6))
    buffer.compute_returns_and_advantage(last, began)
    rollout = as_rollout(s)
    rollout["value"][:, -1] = last
    actual = compute_gae(rollout, gamma, gae_lambda)
    close_to(actual.advantage, buffer.advantages.T)
    close_to(actual.value_target, buffer.returns.T)
    if gae_lambda == 1.0:
        close_to(compute_returns(rollout, gamma), buffer.returns.T)
