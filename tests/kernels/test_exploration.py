"""Exploration: values by hand, distributions, and independence of environments."""

from math import pi, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, close

from ecrl import rng
from ecrl.kernels import epsilon_greedy, gaussian_action, held_noise, noise_scales, noisy_linear, ou_noise

NAN, INF = float("nan"), float("inf")


def test_epsilon_greedy_by_hand(variant):
    # log p = [log 0.05, log 0.95] in rows 0 and 1, whose difference is 2.94; the noise of row 1 exceeds it
    q = torch.tensor([[0.0, 1.0], [0.0, 1.0], [2.0, 2.0], [-INF, -INF]])
    noise = torch.tensor([[2.9, 0.0], [3.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    explore = variant(epsilon_greedy)
    close(explore(q, noise, epsilon=0.1), [1, 0, 0, 0])  # the first of equal ones
    close(explore(q, noise, epsilon=torch.tensor(0.0)), [1, 1, 0, 0])  # greedy
    close(explore(q, noise, epsilon=1.0), [0, 0, 0, 0])  # the largest noise
    close(explore(q, noise, epsilon=torch.tensor([1.0, 0.0, 0.0, 1.0])), [0, 1, 0, 0])  # one for each row
    close(explore(q.long().clamp(min=-9), noise, epsilon=0.0), [1, 1, 0, 0])


def test_an_action_with_the_value_minus_infinity_is_not_taken():
    q = torch.tensor([-torch.inf, 1.0, 0.0, -torch.inf]).expand(10_000, 4)
    noise = rng.gumbel(rng.split(rng.key(5), 10_000), (4,))
    seen = torch.bincount(epsilon_greedy(q, noise, epsilon=0.5), minlength=4)
    assert seen[[0, 3]].tolist() == [0, 0] and abs(int(seen[2]) - 2500) < 200  # four standard deviations


@pytest.mark.parametrize("epsilon", [0.02, 0.3, 1.0])
def test_frequencies_of_epsilon_greedy(epsilon):
    """Greedy actions have the probability 1 - epsilon + epsilon / A, the others epsilon / A (chi-square)."""
    count, actions = 60_000, 4
    q = torch.tensor([0.0, 3.0, 1.0, 2.0]).expand(count, actions)
    noise = rng.gumbel(rng.split(rng.key(5), count), (actions,))
    seen = torch.bincount(epsilon_greedy(q, noise, epsilon=epsilon), minlength=actions).double()
    expected = count * torch.tensor([epsilon / 4, 1 - 0.75 * epsilon, epsilon / 4, epsilon / 4]).double()
    assert ((seen - expected).square() / expected).sum() < 16.3  # 0.999 quantile of 3 degrees of freedom


def test_environments_do_not_explore_together():
    """The number of environments with a random action varies as with independent coins. It is never all or none."""
    steps, envs, epsilon = 2000, 64, 0.5
    q = torch.tensor([1.0, 0.0]).expand(steps, envs, 2)
    noise = rng.gumbel(rng.split(rng.key(6), steps * envs).reshape(steps, envs), (2,))
    explored = epsilon_greedy(q, noise, epsilon=epsilon).double().sum(1)
    assert abs(explored.mean() - envs * 0.25) < 0.3  # half of the random actions are the greedy one
    assert 0.85 < explored.var() / (envs * 0.25 * 0.75) < 1.15
    assert explored.min() > 0 and explored.max() < envs


def test_gaussian_action_by_hand(variant):
    action, noise = torch.tensor([[0.0, 0.5], [0.0, 0.5]]), torch.tensor([[1.0, 2.0], [-4.0, 1.0]])
    explore, high = variant(gaussian_action), torch.tensor([1.0, 0.8])
    close(explore(action, noise, -1.0, 1.0, std=0.3), [[0.3, 1.0], [-1.0, 0.8]])
    close(explore(action, noise, -INF, INF, std=torch.tensor(0.3)), [[0.3, 1.1], [-1.2, 0.8]])
    close(explore(action, noise, -high, high, std=torch.tensor([0.1, 0.2])), [[0.1, 0.7], [-0.8, 0.7]])


def test_ou_noise_by_hand(variant):
    # 2 - 0.5 * 2 * 0.25 + 3 * 0.5 * 1, and the same with its own numbers
    state, noise = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, -2.0]])
    close(variant(ou_noise)(state, noise, theta=0.5, sigma=3.0, dt=0.25), [[3.25, -3.0]])
    hyper = {name: torch.tensor(value) for name, value in {"theta": 0.5, "sigma": 3.0, "dt": 0.25}.items()}
    close(variant(ou_noise)(state, noise, **hyper), [[3.25, -3.0]])


def test_the_stationary_moments_of_ou_noise():
    """The variance of x' = (1 - theta dt) x + sigma sqrt(dt) z is sigma^2 dt / (1 - (1 - theta dt)^2)."""
    theta, sigma, dt, state = 0.5, 0.4, 0.1, torch.zeros(10_000, 1)
    previous = state
    for step in range(100):
        noise = rng.normal(rng.split(rng.fold_in(rng.key(7), step), 10_000), (1,))
        previous, state = state, ou_noise(state, noise, theta=theta, sigma=sigma, dt=dt)
    decay = 1.0 - theta * dt
    std = sigma * sqrt(dt / (1.0 - decay**2))
    assert abs(state.mean()) < 4 * std / sqrt(10_000)
    assert abs(state.std() / std - 1.0) < 0.02
    assert abs(np.corrcoef(previous[:, 0], state[:, 0])[0, 1] - decay) < 0.005


def test_held_noise_by_hand(variant):
    # Row 0 starts an episode, row 1 has one step left, row 2 none.
    held, new = torch.tensor([[NAN], [1.0], [1.0]]), torch.tensor([[5.0], [NAN], [7.0]])
    left = torch.tensor([0, 1, 0])
    for duration in (3, torch.tensor(3)):
        out = variant(held_noise)(held, left, new, duration)
        close(out.noise, [[5.0], [1.0], [7.0]])
        close(out.steps_left, [2, 0, 2])
    out = variant(held_noise)(held, left, new, torch.tensor([1, 9, 4]))
    close(out.steps_left, [0, 0, 3])


@given(seed=st.integers(0, 2**31), duration=st.integers(1, 5))
def test_noise_is_held_for_its_duration(seed, duration):
    g = torch.Generator().manual_seed(seed)
    draws, used = torch.randn(17, 1, 2, generator=g), []
    held, left = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
    for noise in draws:
        held, left = held_noise(held, left, noise, duration)
        used.append(held)
    assert torch.equal(torch.stack(used), draws[torch.arange(17) // duration * duration])


def test_noise_scales_by_hand(variant):
    scale, uniform = torch.tensor([0.3, NAN, 0.3]), torch.tensor([NAN, 0.5, 0.0])
    renewed = torch.tensor([False, True, True])
    close(variant(noise_scales)(scale, uniform, renewed, low=0.1, high=0.5), [0.3, 0.3, 0.1])
    hyper = {"low": torch.tensor(0.1), "high": torch.tensor(0.5)}
    close(variant(noise_scales)(scale, uniform, renewed, **hyper), [0.3, 0.3, 0.1])


def test_noisy_linear_by_hand(variant):
    # f(4) = 2 and f(-9) = -3, so the noise of weight [o, i] is f(out[o]) * f(in[i])
    x, noise_in, noise_out = torch.tensor([[1.0, 2.0]]), torch.tensor([4.0, -9.0]), torch.tensor([1.0, -4.0, 0.0])
    weight, bias = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([0.5, 0.0, -0.5])
    weight_std, bias_std = torch.tensor([[0.1, 0.2], [0.3, 0.0], [9.0, 9.0]]), torch.tensor([1.0, 0.5, 9.0])
    # mean 1.5, noise 1 * (0.1 * 2 * 1 + 0.2 * -3 * 2 + 1); mean 2, noise -2 * (0.3 * 2 * 1 + 0.5); mean 2.5, no noise
    expected = [[1.5, -0.2, 2.5]]
    given = weight, bias, weight_std, bias_std
    close(variant(noisy_linear)(x, *given, noise_in, noise_out), expected)
    close(variant(noisy_linear)(x, *given, noise_in.expand(1, 2), noise_out), expected)
    close(variant(noisy_linear)(x, *given, 0.0 * noise_in, 0.0 * noise_out), [[1.5, 2.0, 2.5]])


@given(seed=st.integers(0, 2**31), rows=st.integers(0, 4), inputs=st.integers(1, 4), outputs=st.integers(1, 4))
def test_noisy_linear_equals_a_linear_layer_with_noisy_weights(seed, rows, inputs, outputs):
    g = np.random.default_rng(seed)
    shapes = (2, rows, inputs), (outputs, inputs), outputs, (outputs, inputs), outputs
    x, w, b, w_std, b_std = (g.normal(size=shape) for shape in shapes)
    e_in, e_out = g.normal(size=(2, rows, inputs)), g.normal(size=(2, rows, outputs))
    out = noisy_linear(*(torch.from_numpy(np.asarray(a)) for a in (x, w, b, w_std, b_std, e_in, e_out)))
    shared = noisy_linear(*map(torch.from_numpy, (x, w, b, w_std, b_std)), *map(torch.ones, (inputs, outputs)))
    assert out.shape == shared.shape == (2, rows, outputs) and out.dtype == torch.float64
    for i in range(2):
        for j in range(rows):
            f_in, f_out = (np.sign(e[i, j]) * np.sqrt(np.abs(e[i, j])) for e in (e_in, e_out))
            close(out[i, j], (w + w_std * np.outer(f_out, f_in)) @ x[i, j] + b + b_std * f_out)
            close(shared[i, j], (w + w_std) @ x[i, j] + b + b_std)


def test_the_moments_of_noisy_linear():
    """An output has the mean of the layer, and the variance v (v sum_i(w_std[i]^2 x[i]^2) + b_std^2), v = E|e|."""
    x, weight, std, v = torch.tensor([1.0, -2.0]), torch.tensor([[0.5, 1.0]]), torch.tensor([[0.3, 0.2]]), sqrt(2 / pi)
    keys, count = rng.split(rng.key(8), 40_000), 40_000
    noise = rng.normal(keys, (3,))
    out = noisy_linear(x.expand(count, 2), weight, torch.ones(1), std, torch.ones(1), noise[:, :2], noise[:, 2:])
    variance = v * (v * (0.3**2 + 0.4**2) + 1.0)
    assert abs(out.mean() - -0.5) < 5 * sqrt(variance / count)
    assert abs(out.var() / variance - 1.0) < 0.05


def test_gradients():
    g = torch.Generator().manual_seed(0)
    x, y = (torch.rand(3, 2, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2))
    left, renewed = torch.tensor([0, 1, 2]), torch.tensor([[True, False]] * 3)
    for fn in (
        lambda a, b: gaussian_action(a, b, -0.8, 0.8, std=0.5),
        lambda a, b: gaussian_action(a, b, -0.8, 0.8, std=b[:, 0]),
        lambda a, b: ou_noise(a, b, theta=0.15, sigma=0.2, dt=0.01),
        lambda a, b: held_noise(a, left, b, 2).noise,
        lambda a, b: noise_scales(a, b, renewed, low=0.1, high=0.5),
        lambda a, b: noisy_linear(a, b, b[:, 0], b * b, b[:, 1], a.new_ones(2), a.new_full((3,), -2.0)),
    ):
        assert torch.autograd.gradcheck(fn, (x, y))


def test_the_noise_of_a_noisy_layer_has_no_gradient_even_at_0():
    w, b = torch.ones(3, 2), torch.ones(3)
    noise_in, noise_out = torch.zeros(2, requires_grad=True), torch.ones(3, requires_grad=True)
    x = torch.ones(4, 2, requires_grad=True)
    noisy_linear(x, w, b, w, b, noise_in, noise_out).sum().backward()
    close(x.grad, [[3.0, 3.0]] * 4)
    assert noise_in.grad is None and noise_out.grad is None


def test_bad_shapes_are_named():
    x, y, rows, ints = torch.zeros(3, 2), torch.zeros(3, 1), torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    calls = [
        ("noise", lambda: epsilon_greedy(x, y, epsilon=0.1)),
        ("epsilon", lambda: epsilon_greedy(x, x, epsilon=torch.zeros(2))),
        ("noise", lambda: gaussian_action(x, y, -1.0, 1.0, std=0.1)),
        ("low", lambda: gaussian_action(x, x, rows, 1.0, std=0.1)),
        ("high", lambda: gaussian_action(x, x, -1.0, rows, std=0.1)),
        ("std", lambda: gaussian_action(x, x, -1.0, 1.0, std=y)),
        ("noise", lambda: ou_noise(x, y, theta=0.1, sigma=0.1, dt=0.1)),
        ("noise", lambda: held_noise(x, ints, y, 2)),
        ("noise", lambda: held_noise(x, ints[:2], x, 2)),
        ("duration", lambda: held_noise(x, ints, x, ints[:2])),
        ("uniform", lambda: noise_scales(rows, rows[:2], rows > 0, low=0.0, high=1.0)),
        ("renewed", lambda: noise_scales(rows, rows, rows[:2] > 0, low=0.0, high=1.0)),
        ("x", lambda: noisy_linear(y, x, rows, x, rows, rows[:2], rows)),
        ("weight", lambda: noisy_linear(x, rows, rows, x, rows, rows[:2], rows)),
        ("bias", lambda: noisy_linear(x, x, y, x, y, rows[:2], rows)),
        ("weight_std", lambda: noisy_linear(x, x, rows, y, rows, rows[:2], rows)),
        ("bias_std", lambda: noisy_linear(x, x, rows, x, rows[:2], rows[:2], rows)),
        ("noise_in", lambda: noisy_linear(x, x, rows, x, rows, rows, rows)),
        ("noise_in", lambda: noisy_linear(x, x, rows, x, rows, x[:2], rows)),
        ("noise_out", lambda: noisy_linear(x, x, rows, x, rows, x, x)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=rf"^{name} has shape"):
            call()


def test_no_rows_and_half_precision():
    none = torch.zeros(0, 3)
    assert epsilon_greedy(none, none, epsilon=0.1).shape == (0,)
    assert gaussian_action(none, none, -1.0, 1.0, std=0.1).shape == (0, 3)
    action = torch.zeros(2, 3, dtype=torch.bfloat16)
    out = gaussian_action(action, action + 1, torch.full((3,), -0.1), torch.full((3,), 0.1), std=torch.ones(2))
    assert out.dtype == torch.bfloat16 and (out == torch.tensor(0.1, dtype=torch.bfloat16)).all()
    ones = torch.ones(2, dtype=torch.bfloat16)
    out = noisy_linear(action[:, :2], action[:, :2], ones, action[:, :2], ones / 256, ones, ones)
    assert out.dtype == torch.bfloat16 and (out == torch.tensor(257 / 256).bfloat16()).all()


def test_another_rate_for_each_row_does_not_retrace():
    q, noise = torch.zeros(3, 2), torch.zeros(3, 2)

    def act(epsilon, std):
        return epsilon_greedy(q, noise, epsilon=epsilon), gaussian_action(q, noise, -1.0, 1.0, std=std)

    assert_no_retrace(act, (torch.rand(3), torch.rand(3)), (torch.rand(3), torch.rand(3)))
