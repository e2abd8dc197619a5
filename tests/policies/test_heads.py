"""Squashed actions: their density by integration and by autograd, their bounds, their gradients."""

from math import inf, log, pi

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.checks import close
from tensordict import TensorDict

from ecrl import rng
from ecrl.errors import ConfigError
from ecrl.policies import make_policy
from ecrl.policies.heads import make_head, to_unit
from ecrl.spaces import Box, Discrete, MultiDiscrete, box

EMPTY = TensorDict({}, [])
NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
UNEVEN = Box((-2.0, 0.5), (3.0, 1.0), (2,))  # centre (0.5, 0.75), half-width (2.5, 0.25)
HALF, CENTRE = torch.tensor([2.5, 0.25], dtype=torch.float64), torch.tensor([0.5, 0.75], dtype=torch.float64)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.5)])
def test_density_integrates_to_one(mean, log_std):
    # The density of u = tanh(x), times du/dx = 1 - u^2, is the density of x, which falls off like a Gaussian.
    head, n = make_head(box(-2.0, 3.0, 1), True), 20_001
    latent = torch.linspace(-12.0, 12.0, n, dtype=torch.float64)
    action = (0.5 + 2.5 * latent.tanh()).unsqueeze(-1)
    inputs = (torch.tensor([log_std]).double(), torch.full((n, 1), mean).double())
    density = head.log_prob(*inputs, action).exp() * (1.0 - latent.tanh().square())
    close(torch.trapezoid(density, latent), 1.0, tol=1e-6)


def test_log_prob_is_that_of_the_change_of_variables():
    head = make_head(UNEVEN, True)
    mean = torch.tensor([[0.3, -0.8], [1.2, 0.0]], dtype=torch.float64)
    log_std = torch.tensor([-0.4, 0.2], dtype=torch.float64)
    noise = torch.tensor([[0.5, -1.0], [-0.2, 1.5]], dtype=torch.float64)
    latent = mean + log_std.exp() * noise
    by_hand = -0.5 * noise.square() - log_std - 0.5 * log(2.0 * pi)
    slope = torch.func.vmap(torch.func.jacrev(torch.tanh))(latent.reshape(-1)).reshape(2, 2)
    action = head.sample(log_std, mean, noise)
    close(action, CENTRE + HALF * latent.tanh(), tol=1e-12)
    close(head.log_prob(log_std, mean, action), (by_hand - slope.abs().log()).sum(-1), tol=1e-9)


def test_entropy_is_the_mean_of_minus_log_prob():
    head, log_std = make_head(UNEVEN, True), torch.tensor([-0.5, 0.3])
    mean = torch.tensor([0.4, -1.0]).expand(200_000, 2)
    action = head.sample(log_std, mean, head.noise(rng.split(rng.key(3), 200_000)))
    close(-head.log_prob(log_std, mean, action).mean(), head.entropy(log_std, mean[0]), tol=0.01)


def test_the_mode_is_the_squashed_mean(variant):
    mean = torch.tensor([[0.0, 0.0], [0.5, -0.5]])
    expected = CENTRE + HALF * mean.double().tanh()
    close(variant(make_head(UNEVEN, True).mode)(torch.zeros(2), mean), expected)


def test_gradients_pass_through_the_sample():
    # da/dmean = half (1 - u^2), da/dlog_std = half (1 - u^2) std noise: what an analytic policy gradient follows.
    head = make_head(UNEVEN, True)
    mean, log_std, noise = (torch.tensor(x, dtype=torch.float64) for x in ([[0.3, -0.8]], [-0.4, 0.2], [[0.5, -1.0]]))
    d_std, d_mean = torch.func.grad(lambda s, m: head.sample(s, m, noise).sum(), argnums=(0, 1))(log_std, mean)
    slope = HALF * (1.0 - (mean + log_std.exp() * noise).tanh().square())
    close(d_mean, slope, tol=1e-10)
    close(d_std, (slope * log_std.exp() * noise).sum(0), tol=1e-10)


@pytest.mark.parametrize("mean", [-40.0, -9.0, 9.0, 40.0])
def test_saturated_actions_stay_inside_and_are_judged_alike(mean):
    head, log_std, means = make_head(UNEVEN, True), torch.zeros(2), torch.full((50, 2), mean)
    action = head.sample(log_std, means, head.noise(rng.split(rng.key(0), 50)))
    low, high = torch.tensor(UNEVEN.low), torch.tensor(UNEVEN.high)
    assert (action >= low).all() and (action <= high).all()
    grads = torch.func.grad(lambda s, m: head.log_prob(s, m, action).sum(), argnums=(0, 1))(log_std, means)
    assert head.log_prob(log_std, means, action).isfinite().all() and all(g.isfinite().all() for g in grads)


@given(
    low=st.floats(-1e3, 1e3, width=32),
    width=st.floats(2.0**-10, 1e3, width=32),
    mean=st.floats(-30.0, 30.0, width=32),
)
@example(low=1.8043030500411987, width=1.8043030500411987, mean=-3.0)  # by rounding
def test_actions_never_leave_their_space(low, width, mean):
    space = box(low, low + width, 1)
    head, means = make_head(space, True), torch.full((64, 1), mean)
    action = head.sample(torch.ones(1), means, head.noise(rng.split(rng.key(1), 64)))
    assert (action >= torch.tensor(space.low)).all() and (action <= torch.tensor(space.high)).all()


def _policy(squash):
    block = {"name": "actor_critic", "actor": NET, "critic": NET, "squash": squash}
    return make_policy(block, box(-1.0, 1.0, 3), UNEVEN)


def test_squashing_holds_what_the_plain_policy_does_not():
    obs = torch.linspace(-1.0, 1.0, 3000).reshape(1000, 3)
    plain, squashed = (_policy(squash) for squash in (False, True))
    params, noise = plain.init(rng.key(0)), plain.draw(rng.split(rng.key(1), 1000))
    low, high = torch.tensor(UNEVEN.low), torch.tensor(UNEVEN.high)
    inside = [
        ((a := policy.act(params, EMPTY, obs, noise)[1]["action"]) >= low) & (a <= high) for policy in (plain, squashed)
    ]
    assert not inside[0].all() and inside[1].all()


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (box(-inf, inf, 2), "policy.squash: not all bounds of the action space are finite; leave squash out"),
        (Box((-1.0, 0.0), (1.0, inf), (2,)), "policy.squash: not all bounds of the action space are finite"),
        (Discrete(3), "policy.squash: expected Box actions, got Discrete"),
        (MultiDiscrete((2, 2)), "policy.squash: expected Box actions, got MultiDiscrete"),
    ],
)
def test_what_cannot_be_squashed_is_refused(space, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        make_head(space, True)


def test_an_entry_with_equal_bounds_is_zero_in_units_of_half_the_range():
    space = Box((0.0, -1.0), (0.0, 1.0), (2,))
    assert to_unit(torch.tensor([[0.0, 0.5]]), space).tolist() == [[0.0, 0.5]]
