"""Flow matching: the loss, and denoising steps without noise (ODE) and with noise (Flow-SDE).

A flow turns noise at time 1 into data at time 0. A sample at time t is a mixture of data x0 and noise x1:

    x[t] = (1 - t) x0 + t x1,    velocity = x1 - x0

A step goes from time t to time t - delta. Times have a shape that broadcasts to the sample. If a sample is a chunk of k
actions, `[*B, k, A]`, times may have the shape `[*B, 1, 1]`. Half-precision inputs are converted to float32, and
results are converted back to half precision.
"""

from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, scalars, widened
from ecrl.types import Scalar, same_shape


class FlowStep(NamedTuple):
    """Normal distribution of the next sample: the `mean`, `[*B, ...]`, and the `std`, which broadcasts to the mean."""

    mean: Tensor
    std: Tensor


def _check(sample: Tensor, **named: Tensor) -> None:
    """Raise ValueError unless each of the named tensors broadcasts to the sample."""
    for name, x in named.items():
        pairs = zip(reversed(x.shape), reversed(sample.shape), strict=False)
        if x.ndim > sample.ndim or any(ours not in (1, theirs) for ours, theirs in pairs):
            expected = f"a shape that broadcasts to {list(sample.shape)}"
            raise ValueError(f"{name} has shape {list(x.shape)}, expected {expected}")


def flow_interpolate(data: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Return the sample at time t on the straight line between data and noise.

        (1 - t) * data + t * noise

    Args:
        data: `[*B, ...]` float, the sample at time 0.
        noise: float of the shape of `data`, the sample at time 1.
        t: time, from 0 to 1, in a shape that broadcasts to `data`.

    Returns: a tensor of the shape of `data`.
    Gradient: flows through all three arguments.
    Raises: ValueError naming the arguments whose shapes do not match.
    Source: Lipman et al. 2023, arXiv:2210.02747. In the paper, noise is at time 0 and data at time 1. Here, time runs
        in the other direction, as in openpi, the code of pi0.

    >>> flow_interpolate(torch.tensor([4.0]), torch.tensor([0.0]), torch.tensor(0.25))
    tensor([3.])
    """
    same_shape(data=data, noise=noise)
    _check(data, t=t)
    dtype, (data, noise, t) = common_dtype(data, noise, t), widened(data, noise, t)
    return ((1.0 - t) * data + t * noise).to(dtype)


def flow_matching_loss(velocity: Tensor, data: Tensor, noise: Tensor) -> Tensor:
    """Return the squared error of each element of a predicted velocity.

        (velocity - (noise - data))^2

    Predict the velocity from `flow_interpolate(data, noise, t)` and t. Average the loss over random times and noise.

    Args:
        velocity: `[*B, ...]` float, the predicted velocity.
        data: float of the shape of `velocity`, the sample at time 0.
        noise: float of the shape of `velocity`, the sample at time 1.

    Returns: a tensor of the shape of `velocity`.
    Gradient: flows through all three arguments.
    Raises: ValueError naming the arguments whose shapes do not match.
    Source: Lipman et al. 2023, arXiv:2210.02747, eq. 23. In the paper, noise is at time 0 and data at time 1. Here,
        time runs in the other direction, as in openpi, the code of pi0.

    >>> flow_matching_loss(torch.tensor([1.0]), torch.tensor([4.0]), torch.tensor([2.0]))
    tensor([9.])
    """
    same_shape(velocity=velocity, data=data, noise=noise)
    dtype, (velocity, data, noise) = common_dtype(velocity, data, noise), widened(velocity, data, noise)
    return (velocity - (noise - data)).square().to(dtype)


def flow_ode_step(sample: Tensor, velocity: Tensor, delta: Tensor) -> Tensor:
    """Return the sample after one denoising step without noise.

        sample - delta * velocity

    Args:
        sample: `[*B, ...]` float, the sample at time t.
        velocity: float of the shape of `sample`, the velocity at time t.
        delta: length of the step in time, in a shape that broadcasts to `sample`.

    Returns: the sample at time t - delta, in the shape of `sample`.
    Gradient: flows through all three arguments.
    Raises: ValueError naming the arguments whose shapes do not match.
    Source: Lipman et al. 2023, arXiv:2210.02747. In the paper, noise is at time 0 and data at time 1. Here, time runs
        in the other direction, as in openpi, the code of pi0.

    >>> flow_ode_step(torch.tensor([3.0]), torch.tensor([2.0]), torch.tensor(0.5))
    tensor([2.])
    """
    same_shape(sample=sample, velocity=velocity)
    _check(sample, delta=delta)
    dtype, (sample, velocity, delta) = common_dtype(sample, velocity, delta), widened(sample, velocity, delta)
    return (sample - delta * velocity).to(dtype)


def flow_sde_step(sample: Tensor, velocity: Tensor, t: Tensor, delta: Tensor, *, noise_level: Scalar) -> FlowStep:
    """Return the distribution of the sample after one denoising step with noise.

        x0    = sample - t * velocity,    x1 = sample + (1 - t) * velocity
        sigma = noise_level * sqrt(t / (1 - t))
        mean  = (1 - t + delta) * x0 + (t - delta - sigma^2 * delta / (2 t)) * x1
        std   = sigma * sqrt(delta)

    If t is 1, the divisor `1 - t` in sigma is replaced by delta.

    With the exact velocity of the flow and in the limit of short steps, samples have the same distribution at each time
    as samples of `flow_ode_step`. The distributions also agree if only some elements get noise, and the others take the
    step of `flow_ode_step`.

    Args:
        sample: `[*B, ...]` float, the sample at time t.
        velocity: float of the shape of `sample`, the velocity at time t.
        t: time, above 0 and at most 1, in a shape that broadcasts to `sample`.
        delta: length of the step in time, at most t, in a shape that broadcasts to `sample`.
        noise_level: scale of the noise, above 0, as a number or a 0-d tensor.

    Returns: the `mean`, in the shape of `sample`, and the `std`, in the shape to which `t` and `delta` broadcast.
    Gradient: flows through all arguments.
    Raises: ValueError naming the argument, if shapes do not match or `noise_level` is not 0-d.
    Source: Liu et al. 2025 (Flow-GRPO), arXiv:2505.05470, eq. 9. Chen et al. 2025 (pi_RL), arXiv:2510.25889.

    >>> half = torch.tensor(0.5)
    >>> step = flow_sde_step(torch.tensor([1.0]), torch.tensor([0.0]), half, half, noise_level=1.0)
    >>> step.mean, round(float(step.std), 4)
    (tensor([0.5000]), 0.7071)
    """
    same_shape(sample=sample, velocity=velocity)
    _check(sample, t=t, delta=delta)
    (noise_level,) = scalars(noise_level=noise_level)
    dtype, (x, v, t, delta) = common_dtype(sample, velocity, t, delta), widened(sample, velocity, t, delta)
    sigma = noise_level * (t / torch.where(t == 1.0, delta, 1.0 - t)).sqrt()
    x0, x1 = x - t * v, x + (1.0 - t) * v
    mean = (1.0 - t + delta) * x0 + (t - delta - sigma.square() * delta / (2.0 * t)) * x1
    return FlowStep(mean.to(dtype), (sigma * delta.sqrt()).to(dtype))


def flow_log_prob(mean: Tensor, std: Tensor, next_sample: Tensor) -> Tensor:
    """Return the log-density of each element of `next_sample` under a normal distribution, in nats.

        -z^2 / 2 - log(std) - log(2 pi) / 2,    z = (next_sample - mean) / std

    Args:
        mean: `[*B, ...]` float.
        std: standard deviation, above 0, in a shape that broadcasts to `mean`.
        next_sample: float of the shape of `mean`.

    Returns: a tensor of the shape of `mean`. The elements of a sample are independent, so their log-densities add up to
        the log-density of the sample.
    Gradient: flows through all three arguments.
    Raises: ValueError naming the arguments whose shapes do not match.

    >>> flow_log_prob(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.0]))
    tensor([-0.9189])
    """
    same_shape(mean=mean, next_sample=next_sample)
    _check(mean, std=std)
    dtype, (mean, std, x) = common_dtype(mean, std, next_sample), widened(mean, std, next_sample)
    return (-0.5 * ((x - mean) / std).square() - std.log() - 0.5 * log(2.0 * pi)).to(dtype)


def flow_entropy(std: Tensor) -> Tensor:
    """Return the differential entropy of a normal distribution for each standard deviation in `std`, in nats.

        log(std) + log(2 pi e) / 2

    Args:
        std: `[*B, ...]` float, standard deviation, above 0.

    Returns: a tensor of the shape of `std`.
    Gradient: flows through `std`.

    >>> flow_entropy(torch.tensor([1.0]))
    tensor([1.4189])
    """
    return (widened(std)[0].log() + 0.5 * log(2.0 * pi) + 0.5).to(std.dtype)
