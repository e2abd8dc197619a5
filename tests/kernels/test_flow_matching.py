"""Loss and denoising steps of flows: numbers by hand, oracles from the papers, log-probabilities and marginals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_pure, close

from ecrl import rng
from ecrl.kernels import (
    flow_entropy,
    flow_interpolate,
    flow_log_prob,
    flow_matching_loss,
    flow_ode_step,
    flow_sde_step,
)

F64 = torch.float64


def random(*shape, seed=0, dtype=F64):
    return rng.normal(rng.key(seed), shape, dtype)


def test_by_hand(variant):
    sample, velocity = torch.tensor([[3.0], [1.0]]), torch.tensor([[2.0], [-4.0]])
    close(variant(flow_ode_step)(sample, velocity, torch.tensor(0.25)), [[2.5], [2.0]], 1e-6)
    # t = 1/2: x0 = 3 - 1 = 2, x1 = 3 + 1 = 4, sigma = 2, mean = 3/4 x0 + (1/4 - 4 / 4) x1 = 3/2 - 3
    # t = 1: x0 = 1 + 4 = 5, x1 = 1, sigma = 2 sqrt(1 / (1/4)) = 4, mean = 1/4 x0 + (3/4 - 16 / 8) x1 = 5/4 - 5/4
    times = torch.tensor([[0.5], [1.0]])
    step = variant(flow_sde_step)(sample, velocity, times, torch.tensor(0.25), noise_level=2.0)
    close(step.mean, [[-1.5], [0.0]], 1e-6)
    close(step.std, [[1.0], [2.0]], 1e-6)
    # z = 1 and -1/2
    log_prob = variant(flow_log_prob)(step.mean, step.std, torch.tensor([[-0.5], [-1.0]]))
    half_log_2pi = 0.5 * math.log(2.0 * math.pi)
    close(log_prob, [[-0.5 - half_log_2pi], [-0.125 - math.log(2.0) - half_log_2pi]], 1e-6)
    close(variant(flow_entropy)(step.std), [[0.5 + half_log_2pi], [0.5 + half_log_2pi + math.log(2.0)]], 1e-6)


def test_interpolation_and_loss_by_hand(variant):
    data, noise = torch.tensor([[4.0], [1.0], [2.0]]), torch.tensor([[0.0], [3.0], [-2.0]])
    times = torch.tensor([[0.25], [0.0], [1.0]])
    close(variant(flow_interpolate)(data, noise, times), [[3.0], [1.0], [-2.0]], 1e-6)
    # the velocities of the lines are -4, 2 and -4
    velocity = torch.tensor([[-4.0], [5.0], [-4.5]])
    close(variant(flow_matching_loss)(velocity, data, noise), [[0.0], [9.0], [0.25]], 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_interpolation_and_loss_against_python_floats(dtype):
    velocity, data, noise = (random(5, 3, 2, seed=s).to(dtype) for s in range(3))
    times = rng.uniform(rng.key(3), (5, 1, 1), dtype)
    mixed, loss = (
        assert_pure(flow_interpolate, data, noise, times),
        assert_pure(flow_matching_loss, velocity, data, noise),
    )
    assert mixed.dtype == loss.dtype == dtype
    tol = 1e-6 if dtype == torch.float32 else 1e-12
    for i, rows in enumerate(zip(velocity.tolist(), data.tolist(), noise.tolist(), strict=True)):
        for j in range(3):
            for a in range(2):
                v, x0, x1, t = (*(row[j][a] for row in rows), float(times[i]))
                close(mixed[i, j, a], torch.tensor(x0 + t * (x1 - x0), dtype=F64), tol)
                close(loss[i, j, a], torch.tensor((v + x0 - x1) ** 2, dtype=F64), 10.0 * tol)


@given(t=st.floats(0.0, 1.0), x0=st.floats(-3, 3), x1=st.floats(-3, 3))
def test_a_step_along_the_line_of_the_interpolation_reaches_the_data_and_has_no_loss(t, x0, x1):
    data, noise, time = (torch.tensor([x], dtype=F64) for x in (x0, x1, t))
    velocity = noise - data
    close(flow_ode_step(flow_interpolate(data, noise, time), velocity, time), data, 1e-9)
    close(flow_matching_loss(velocity, data, noise), [0.0])


def test_the_mean_velocity_has_the_least_loss():
    """The velocity that predicts the mean of noise - data given the sample has the least loss of linear functions."""
    n, t = 40_000, torch.tensor(0.6, dtype=F64)
    data, noise = 0.5 * random(n, 1), random(n, 1, seed=1)
    x = flow_interpolate(data, noise, t)
    slope = (t - (1.0 - t) * 0.25) / ((1.0 - t) ** 2 * 0.25 + t**2)
    losses = [float(flow_matching_loss(a * slope * x, data, noise).mean()) for a in (0.8, 1.0, 1.2)]
    assert losses[1] < losses[0] and losses[1] < losses[2]


def euler_maruyama(x, v, t, delta, a):
    """The step as Flow-GRPO writes it (eq. 9), in Python floats: drift times -delta, and noise sigma sqrt(delta)."""
    sigma = a * math.sqrt(t / (delta if t == 1.0 else 1.0 - t))
    drift = v + sigma**2 / (2.0 * t) * (x + (1.0 - t) * v)
    return x - delta * drift, sigma * math.sqrt(delta)


def normal_log_density(x, mean, std):
    return -((x - mean) ** 2) / (2.0 * std**2) - math.log(std * math.sqrt(2.0 * math.pi))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("steps", [1, 4, 10])
def test_the_closed_form(steps, dtype):
    """The oracle rounds nothing to float32. The log-probability is within 1e-6, or 1e-12 in float64."""
    tol = 1e-6 if dtype == torch.float32 else 1e-12
    sample, velocity, noise = (random(steps, 3, 2, seed=s).to(dtype) for s in range(3))
    times = torch.tensor([1.0 - i / steps for i in range(steps)], dtype=dtype).reshape(-1, 1, 1)
    delta = torch.tensor(1.0 / steps, dtype=dtype)
    step = assert_pure(flow_sde_step, sample, velocity, times, delta, noise_level=0.7)
    assert step.mean.dtype == step.std.dtype == dtype and step.std.shape == (steps, 1, 1)
    after = step.mean + step.std * noise
    log_prob = assert_pure(flow_log_prob, step.mean, step.std, after)
    for i in range(steps):
        for j in range(3):
            for a in range(2):
                x, v = float(sample[i, j, a]), float(velocity[i, j, a])
                mean, std = euler_maruyama(x, v, float(times[i]), float(delta), 0.7)
                close(step.mean[i, j, a], torch.tensor(mean, dtype=F64), tol)
                close(step.std[i, 0, 0], torch.tensor(std, dtype=F64), tol)
                expected = normal_log_density(float(after[i, j, a]), float(step.mean[i, j, a]), std)
                close(log_prob[i, j, a], torch.tensor(expected, dtype=F64), tol)


@given(
    t=st.floats(0.05, 1.0), share=st.floats(0.01, 1.0), a=st.floats(0.0, 2.0), x=st.floats(-3, 3), v=st.floats(-3, 3)
)
def test_without_noise_it_is_the_ode_and_noise_only_adds_a_pull_towards_the_score(t, share, a, x, v):
    delta, one = share * t, lambda number: torch.tensor([number], dtype=F64)
    arguments = one(x), one(v), one(t), one(delta)
    ode, silent = flow_ode_step(one(x), one(v), one(delta)), flow_sde_step(*arguments, noise_level=0.0)
    close(silent.mean, ode, 1e-9)
    close(silent.std, [0.0])
    step = flow_sde_step(*arguments, noise_level=a)
    x1 = x + (1.0 - t) * v
    close(step.mean - ode, -step.std.square() * x1 / (2.0 * t), 1e-9)


@pytest.mark.parametrize("elements", [1, 2])
def test_the_marginals_are_those_of_the_ode(elements):
    """The data have their covariance, also if only one of two elements gets noise. Each velocity depends on both."""
    n, steps = 60_000, 40
    mixed = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=F64)
    data = 0.25 * mixed @ mixed.t()
    x, noisy = random(n, 2), torch.arange(2) < elements
    for i in range(steps):
        t, delta = torch.tensor(1.0 - i / steps, dtype=F64), torch.tensor(1.0 / steps, dtype=F64)
        joint = (1.0 - t) ** 2 * data + t**2 * torch.eye(2, dtype=F64)
        # E[x1 - x0 | x] of jointly normal variables
        velocity = x @ torch.linalg.solve(joint, t * torch.eye(2, dtype=F64) - (1.0 - t) * data)
        step = flow_sde_step(x, velocity, t, delta, noise_level=0.5)
        drawn = step.mean + step.std * random(n, 2, seed=i + 1)
        x = torch.where(noisy, drawn, flow_ode_step(x, velocity, delta))
    close(x.t().cov(), data, 0.05)


def test_gradients():
    sample, velocity, after = (random(3, 2, seed=s).requires_grad_() for s in range(3))
    t = torch.tensor([[1.0], [0.6], [0.3]], dtype=F64)
    delta, a = torch.tensor(0.2, dtype=F64), torch.tensor(0.7, dtype=F64, requires_grad=True)

    def log_prob(sample, velocity, after, a):
        step = flow_sde_step(sample, velocity, t, delta, noise_level=a)
        return flow_log_prob(step.mean, step.std, after), flow_entropy(step.std)

    assert torch.autograd.gradcheck(log_prob, (sample, velocity, after, a))
    times = t[1:].clone().requires_grad_(), delta.clone().requires_grad_()
    whole = lambda t, delta: flow_sde_step(sample[1:], velocity[1:], t, delta, noise_level=0.7)  # noqa: E731
    assert torch.autograd.gradcheck(whole, times)
    assert torch.autograd.gradcheck(flow_ode_step, (sample, velocity, times[1]))
    assert torch.autograd.gradcheck(flow_interpolate, (sample, velocity, t.clone().requires_grad_()))
    assert torch.autograd.gradcheck(flow_matching_loss, (sample, velocity, after))


X = torch.zeros(2, 3)
WRONG = {
    "noise": (flow_interpolate, (X, X[0], X), {}, r"^noise has shape \[3\], expected \[2, 3\], the shape of data$"),
    "t of an interpolation": (flow_interpolate, (X, X, X[:, :2]), {}, r"^t has shape \[2, 2\], expected a shape that"),
    "data": (flow_matching_loss, (X, X[0], X), {}, r"^data has shape \[3\], expected \[2, 3\], the shape of velocity$"),
    "velocity": (
        flow_ode_step,
        (X, X[0], X),
        {},
        r"^velocity has shape \[3\], expected \[2, 3\], the shape of sample$",
    ),
    "delta": (flow_ode_step, (X, X, X[:, :2]), {}, r"^delta has shape \[2, 2\], expected a shape that broadcasts to"),
    "velocity of noise": (flow_sde_step, (X, X[0], X, X), {"noise_level": 1.0}, r"^velocity has shape \[3\]"),
    "t": (flow_sde_step, (X, X, X[:, :2], X), {"noise_level": 1.0}, r"^t has shape \[2, 2\], expected a shape"),
    "delta of noise": (flow_sde_step, (X, X, X, X[None]), {"noise_level": 1.0}, r"^delta has shape \[1, 2, 3\]"),
    "noise_level": (
        flow_sde_step,
        (X, X, X, X),
        {"noise_level": X},
        r"^noise_level has shape \[2, 3\], expected a",
    ),
    "std": (
        flow_log_prob,
        (X, X[:, :2], X),
        {},
        r"^std has shape \[2, 2\], expected a shape that broadcasts",
    ),
    "next_sample": (flow_log_prob, (X, X, X[0]), {}, r"^next_sample has shape \[3\], expected \[2, 3\], the shape of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_shape_is_named(name):
    fn, args, numbers, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        fn(*args, **numbers)
