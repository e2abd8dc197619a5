"""Functions for normal variables that are truncated to an interval: sample, mode, log_prob, entropy and kl.

The density is proportional to a normal density between `low` and `high`, and 0 outside. Means have the shape `[*B, A]`,
and log_prob, entropy and kl are sums over the last axis. The sampler takes uniform noise as an argument (see
`ecrl.rng`). All functions except `truncated_normal_mode` compute in float64 with logarithms of probabilities, because
an interval many standard deviations from the mean has a tiny probability. The results have the common dtype of the
inputs. The dtypes of `low` and `high` do not affect this dtype.

In the equations, phi is the standard normal density, and Phi is the standard normal distribution function.
"""

from math import log, pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, computed_in
from ecrl.types import Scalar, same_shape

_FAR = 1e10
"""Largest distance of a bound from the mean, in standard deviations. Clamping infinite bounds prevents NaN."""


class _Interval(NamedTuple):
    """The standard deviation, the bounds in standard deviations from the mean, and the interval's log-probability."""

    std: Tensor
    low: Tensor
    high: Tensor
    log_mass: Tensor


def _check(mean: Tensor, **tensors: Scalar) -> None:
    """Raise ValueError if an argument is neither a number nor a tensor that broadcasts to `mean`.

    If `low` and `high` are numbers, also raise ValueError unless `low` is below `high`.
    """
    for name, x in tensors.items():
        if isinstance(x, Tensor):
            pairs = zip(reversed(x.shape), reversed(mean.shape), strict=False)
            if x.ndim > mean.ndim or any(size not in (1, expected) for size, expected in pairs):
                expected = f"a shape that broadcasts to mean {list(mean.shape)}"
                raise ValueError(f"{name} has shape {list(x.shape)}, expected {expected}")
        elif not isinstance(x, int | float) and not hasattr(x, "__float__"):  # NumPy numbers have `__float__`
            raise ValueError(f"{name} is {x!r}, expected a number or a tensor")
    given = (tensors[name] for name in ("low", "high") if name in tensors)
    bounds = [float(x) for x in given if not isinstance(x, Tensor)]
    if len(bounds) == 2 and not bounds[0] < bounds[1]:
        raise ValueError(f"low is {tensors['low']}, expected a number below high {tensors['high']}")


def _bound(mean: Tensor, bound: Scalar) -> Tensor:
    """Return a bound as float64 in the shape of `mean`, with a large number in place of infinity."""
    bound = bound.to(torch.float64) if isinstance(bound, Tensor) else torch.full_like(mean, float(bound))
    return bound.clamp(-1e100, 1e100).expand_as(mean)


def _interval(mean: Tensor, log_std: Tensor, low: Scalar, high: Scalar) -> _Interval:
    std = torch.exp(log_std)
    a, b = (((_bound(mean, x) - mean) / std).clamp(-_FAR, _FAR) for x in (low, high))
    return _Interval(std, a, b, _log_mass(a, b))


def _left(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mirror intervals that lie mostly above 0. Return the new bounds and a mask of the mirrored intervals."""
    mirrored = a + b > 0.0
    return torch.where(mirrored, -b, a), torch.where(mirrored, -a, b), mirrored


def _log_cdf(x: Tensor) -> Tensor:
    """Return the logarithm of the standard normal distribution function.

    This function replaces `torch.special.log_ndtr`, which has no batching rule for vmap in torch 2.13.
    """
    is_tail = x < -1.0
    tail, body = x.masked_fill(~is_tail, -1.0), x.masked_fill(is_tail, 0.0)
    log_tail = torch.log(0.5 * torch.special.erfcx(-tail / sqrt(2.0))) - 0.5 * tail.square()
    return torch.where(is_tail, log_tail, torch.log1p(-0.5 * torch.erfc(body / sqrt(2.0))))


def _is_near(a: Tensor, b: Tensor) -> Tensor:
    """Return True for intervals that contain 0 or lie inside (-1, 1). For these, a difference of `erf` is accurate."""
    return ((a <= 0.0) & (b >= 0.0)) | ((a.abs() < 1.0) & (b.abs() < 1.0))


def _tail(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return c, `mass / phi(c)` and `phi(d) / phi(c)` of an interval in a tail, with bounds at distances c < d from 0.

    `mass` is the probability of the interval.

    mass / phi(c) = sqrt(pi / 2) (erfcx(c / sqrt(2)) - exp((c^2 - d^2) / 2) erfcx(d / sqrt(2)))
    """
    c, d = torch.where(a > 0.0, a, -b), torch.where(a > 0.0, b, -a)
    decay = torch.exp(-0.5 * (d - c) * (d + c))
    mass = sqrt(0.5 * pi) * (torch.special.erfcx(c / sqrt(2.0)) - decay * torch.special.erfcx(d / sqrt(2.0)))
    return c, mass, decay


def _log_mass(a: Tensor, b: Tensor) -> Tensor:
    """Return the logarithm of the probability that a standard normal variable lies between `a` and `b`."""
    is_near = _is_near(a, b)
    near_a, near_b = a.masked_fill(~is_near, -1.0), b.masked_fill(~is_near, 1.0)
    near = torch.log(0.5 * (torch.erf(near_b / sqrt(2.0)) - torch.erf(near_a / sqrt(2.0))))
    c, mass, _ = _tail(a.masked_fill(is_near, 1.0), b.masked_fill(is_near, 2.0))
    return torch.where(is_near, near, _log_density(c) + torch.log(mass))


def _log_density(z: Tensor) -> Tensor:
    return -0.5 * z.square() - 0.5 * log(2.0 * pi)


def _moments(x: _Interval) -> tuple[Tensor, Tensor]:
    """Return the expectations of z and z^2, where z is the signed distance from the mean in standard deviations.

    a and b are the bounds of z, and mass is the probability of the interval from a to b before the truncation.

    E[z] = (phi(a) - phi(b)) / mass;  E[z^2] = 1 + (a phi(a) - b phi(b)) / mass
    """
    is_near = _is_near(x.low, x.high)
    log_mass = x.log_mass.masked_fill(~is_near, 0.0)
    near_low, near_high = (torch.exp(_log_density(z.masked_fill(~is_near, 0.0)) - log_mass) for z in (x.low, x.high))
    # In a tail, differences of large logarithms would lose digits.
    _, mass, decay = _tail(x.low.masked_fill(is_near, 1.0), x.high.masked_fill(is_near, 2.0))
    nearer, farther, is_right = 1.0 / mass, decay / mass, x.low > 0.0
    low = torch.where(is_near, near_low, torch.where(is_right, nearer, farther))
    high = torch.where(is_near, near_high, torch.where(is_right, farther, nearer))
    return low - high, 1.0 + x.low * low - x.high * high


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a float64 result to `dtype`. If `dtype` is half precision, round the result to float32 first."""
    return x.to(computed_in(dtype)).to(dtype)


def _quantile(log_p: Tensor) -> Tensor:
    """Return the standard normal quantile of the probability `exp(log_p)`.

    Three steps of Newton's method compute the quantile of a tiny probability, for which `exp(log_p)` may be 0.
    """
    is_tiny = log_p < -300.0
    tiny = log_p.masked_fill(~is_tiny, -300.0)
    x = -torch.sqrt(-2.0 * tiny - torch.log(-4.0 * pi * tiny))
    for _ in range(3):  # d log(Phi(x)) / dx = phi(x) / Phi(x)
        log_cdf = _log_cdf(x)
        x = x - (log_cdf - tiny) * torch.exp(log_cdf - _log_density(x))
    return torch.where(is_tiny, x, torch.special.ndtri(log_p.masked_fill(is_tiny, -1.0).exp()))


def truncated_normal_sample(mean: Tensor, log_std: Tensor, low: Scalar, high: Scalar, noise: Tensor) -> Tensor:
    """Return a reparametrised sample: the point whose cumulative probability after the truncation is `noise`.

        mean + std * quantile((1 - noise) Phi(a) + noise Phi(b))
        std = exp(log_std);  a = (low - mean) / std;  b = (high - mean) / std

    Phi is the standard normal distribution function, and quantile is the inverse of Phi. The result is clipped to the
    bounds, because rounding may move it beyond a bound.

    Args:
        mean: `[*B, A]` float, mean before the truncation.
        log_std: log standard deviation before the truncation, in a shape that broadcasts to `mean`.
        low: lower bound, a number or a tensor that broadcasts to `mean`. May be -infinity.
        high: upper bound above `low`, a number or a tensor that broadcasts to `mean`. May be infinity.
        noise: `[*B, A]` float, uniform on [0, 1).

    Returns: `[*B, A]`.
    Gradient: flows through `mean`, `log_std` and `noise` where the result is not clipped.
    Raises: ValueError naming the arguments whose shapes do not match, or `low` if both bounds are numbers and `low` is
        not below `high`.
    Source: Chopin 2011, arXiv:1201.6140, sec. 2.1 (inverse transform).

    >>> truncated_normal_sample(torch.tensor([0.0]), torch.tensor([0.0]), -1.0, 1.0, torch.tensor([0.5]))
    tensor([0.])
    """
    same_shape(mean=mean, noise=noise)
    _check(mean, log_std=log_std, low=low, high=high)
    dtype = common_dtype(mean, log_std, noise)
    mean, log_std, u = (x.to(torch.float64) for x in (mean, log_std, noise))
    std, a, b, _ = _interval(mean, log_std, low, high)
    left, right, mirrored = _left(a, b)
    share = torch.where(mirrored, 1.0 - u, u)
    log_p = torch.logaddexp(_log_cdf(left) + torch.log1p(-share), _log_cdf(right) + torch.log(share))
    z = _quantile(log_p)
    sample = mean + std * torch.where(mirrored, -z, z)
    return _round(sample.clamp(min=_bound(mean, low)).clamp(max=_bound(mean, high)), dtype)


def truncated_normal_mode(mean: Tensor, low: Scalar, high: Scalar) -> Tensor:
    """Return the point of highest density, which is the mean, clipped to the bounds.

        clip(mean, low, high)

    Args:
        mean: `[*B, A]` float, mean before the truncation.
        low: lower bound, a number or a tensor that broadcasts to `mean`.
        high: upper bound above `low`, a number or a tensor that broadcasts to `mean`.

    Returns: `[*B, A]`.
    Gradient: flows through entries of `mean` that are not clipped.
    Raises: ValueError naming a bound whose shape does not match, or `low` if both bounds are numbers and `low` is not
        below `high`.

    >>> truncated_normal_mode(torch.tensor([-3.0, 0.5]), -1.0, 1.0)
    tensor([-1.0000,  0.5000])
    """
    _check(mean, low=low, high=high)
    low, high = (x.to(mean.dtype) if isinstance(x, Tensor) else x for x in (low, high))
    return mean.clamp(min=low).clamp(max=high)


def truncated_normal_log_prob(mean: Tensor, log_std: Tensor, low: Scalar, high: Scalar, action: Tensor) -> Tensor:
    """Return the log-density of `action` in nats, summed over the last axis.

        sum(-z^2 / 2 - log_std - log(2 pi) / 2 - log(Phi(b) - Phi(a)))
        std = exp(log_std);  z = (action - mean) / std;  a = (low - mean) / std;  b = (high - mean) / std

    The action is clipped to the bounds first, because rounding may move an action beyond a bound.

    Args:
        mean: `[*B, A]` float, mean before the truncation.
        log_std: log standard deviation before the truncation, in a shape that broadcasts to `mean`.
        low: lower bound, a number or a tensor that broadcasts to `mean`. May be -infinity.
        high: upper bound above `low`, a number or a tensor that broadcasts to `mean`. May be infinity.
        action: `[*B, A]` float between the bounds.

    Returns: `[*B]`.
    Gradient: flows through `mean`, `log_std` and entries of `action` that are not clipped.
    Raises: ValueError naming the arguments whose shapes do not match, or `low` if both bounds are numbers and `low` is
        not below `high`.
    Source: Johnson, Kotz and Balakrishnan 1994, "Continuous univariate distributions", vol. 1, sec. 13.10.1.

    >>> truncated_normal_log_prob(torch.zeros(1), torch.tensor([9.0]), -1.0, 1.0, torch.zeros(1))
    tensor(-0.6931)
    """
    same_shape(mean=mean, action=action)
    _check(mean, log_std=log_std, low=low, high=high)
    dtype = common_dtype(mean, log_std, action)
    mean, log_std, action = (x.to(torch.float64) for x in (mean, log_std, action))
    std, _, _, log_mass = _interval(mean, log_std, low, high)
    inside = action.clamp(min=_bound(mean, low)).clamp(max=_bound(mean, high))
    return _round((_log_density((inside - mean) / std) - log_std - log_mass).sum(-1), dtype)


def truncated_normal_entropy(mean: Tensor, log_std: Tensor, low: Scalar, high: Scalar) -> Tensor:
    """Return the differential entropy of the truncated variables in nats, summed over the last axis.

        sum(log_std + log(2 pi) / 2 + log(Phi(b) - Phi(a)) + E[z^2] / 2)
        E[z^2] = 1 + (a phi(a) - b phi(b)) / (Phi(b) - Phi(a))
        std = exp(log_std);  a = (low - mean) / std;  b = (high - mean) / std

    Args:
        mean: `[*B, A]` float, mean before the truncation.
        log_std: log standard deviation before the truncation, in a shape that broadcasts to `mean`.
        low: lower bound, a number or a tensor that broadcasts to `mean`. May be -infinity.
        high: upper bound above `low`, a number or a tensor that broadcasts to `mean`. May be infinity.

    Returns: `[*B]`.
    Gradient: flows through `mean` and `log_std`.
    Raises: ValueError naming the arguments whose shapes do not match, or `low` if both bounds are numbers and `low` is
        not below `high`.
    Source: Johnson, Kotz and Balakrishnan 1994, "Continuous univariate distributions", vol. 1, sec. 13.10.1.

    >>> truncated_normal_entropy(torch.zeros(1), torch.tensor([9.0]), -1.0, 1.0)
    tensor(0.6931)
    """
    _check(mean, log_std=log_std, low=low, high=high)
    dtype = common_dtype(mean, log_std)
    mean, log_std = mean.to(torch.float64), log_std.to(torch.float64)
    x = _interval(mean, log_std, low, high)
    return _round((log_std + 0.5 * log(2.0 * pi) + x.log_mass + 0.5 * _moments(x)[1]).sum(-1), dtype)


def truncated_normal_kl(
    mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor, low: Scalar, high: Scalar
) -> Tensor:
    """Return the KL divergence KL(p | q) of two variables with the same bounds, in nats, summed over the last axis.

        sum(other_log_std - log_std + log_mass' - log_mass + (E[z'^2] - E[z^2]) / 2)

    p has the parameters `mean` and `log_std`, and q has the parameters `other_mean` and `other_log_std`. The
    expectations are over samples of p. z is the distance of a sample from `mean` in units of `exp(log_std)`, and z' is
    the distance of the sample from `other_mean` in units of `exp(other_log_std)`. log_mass and log_mass' are the
    logarithms of the probabilities that p and q give to the interval from `low` to `high` before the truncation.

    Args:
        mean: `[*B, A]` float, mean before the truncation.
        log_std: log standard deviation before the truncation, in a shape that broadcasts to `mean`.
        other_mean: `[*B, A]` float, mean before the truncation.
        other_log_std: log standard deviation before the truncation, in a shape that broadcasts to `mean`.
        low: lower bound, a number or a tensor that broadcasts to `mean`. May be -infinity.
        high: upper bound above `low`, a number or a tensor that broadcasts to `mean`. May be infinity.

    Returns: `[*B]`.
    Gradient: flows through the means and the log standard deviations.
    Raises: ValueError naming the arguments whose shapes do not match, or `low` if both bounds are numbers and `low` is
        not below `high`.

    >>> truncated_normal_kl(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1), -1.0, 1.0)
    tensor(0.)
    """
    same_shape(mean=mean, other_mean=other_mean)
    _check(mean, log_std=log_std, other_log_std=other_log_std, low=low, high=high)
    dtype = common_dtype(mean, log_std, other_mean, other_log_std)
    mean, log_std, other_mean, other_log_std = (x.double() for x in (mean, log_std, other_mean, other_log_std))
    x, y = _interval(mean, log_std, low, high), _interval(other_mean, other_log_std, low, high)
    first, second = _moments(x)
    scale, shift = x.std / y.std, (mean - other_mean) / y.std
    other_second = scale.square() * second + 2.0 * scale * shift * first + shift.square()
    logs = other_log_std - log_std + y.log_mass - x.log_mass
    return _round((logs + 0.5 * (other_second - second)).sum(-1), dtype)
