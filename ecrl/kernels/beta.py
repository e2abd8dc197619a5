"""Functions for independent beta variables: sample, mode, log_prob, entropy and kl.

A beta variable lies in [0, 1] and has two concentrations `alpha` and `beta` above 0, of shape `[*B, A]`. log_prob,
entropy and kl are sums over the last axis. All functions compute in float64, because the log-gamma terms of large
concentrations nearly cancel. The results have the common dtype of the inputs.
"""

import torch
from torch import Tensor

from ecrl import rng
from ecrl.kernels.dtypes import common_dtype, computed_in
from ecrl.types import same_shape

_PROPOSALS = 16
"""Number of proposals of the rejection sampler for each gamma sample.

The probability that all proposals are rejected is below 1e-20.
"""


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a float64 result to `dtype`. If `dtype` is half precision, round the result to float32 first."""
    return x.to(computed_in(dtype)).to(dtype)


def _inside(action: Tensor) -> Tensor:
    """Convert actions to float64 and clip them to the open interval (0, 1), because a rounded action may be 0 or 1."""
    info = torch.finfo(computed_in(action.dtype) if action.is_floating_point() else torch.float32)
    return action.to(torch.float64).clamp(info.tiny, 1.0 - info.eps / 2.0)


def _log_gamma_sample(shape: Tensor, key: Tensor) -> Tensor:
    """Return the logarithm of one gamma sample for each shape parameter in `shape`, `[*B, A]`. `key` is `[*B]`.

    The method of Marsaglia and Tsang needs a shape parameter of at least 1. For a smaller parameter, a sample for
    `shape + 1` is multiplied by `u^(1 / shape)`, where u is uniform on (0, 1].
    """
    normal_key, uniform_key, boost_key = rng.split(key, 3)
    size = shape.shape[-1:]
    x = rng.normal(normal_key, (*size, _PROPOSALS), torch.float64)
    log_u = torch.log1p(-rng.uniform(uniform_key, (*size, _PROPOSALS), torch.float64))
    log_boost = torch.log1p(-rng.uniform(boost_key, size, torch.float64))
    d = torch.where(shape < 1.0, shape + 1.0, shape).unsqueeze(-1) - 1.0 / 3.0
    root = 1.0 + x / torch.sqrt(9.0 * d)
    is_positive = root > 0.0
    log_v = 3.0 * torch.log(root.masked_fill(~is_positive, 1.0))
    accepted = is_positive & (log_u < 0.5 * x.square() + d * (1.0 - log_v.exp() + log_v))
    first = accepted.to(torch.int64).argmax(-1, keepdim=True)
    sample = (torch.log(d) + log_v).gather(-1, first).squeeze(-1)
    return torch.where(shape < 1.0, sample + log_boost / shape, sample)


def beta_sample(alpha: Tensor, beta: Tensor, key: Tensor) -> Tensor:
    """Sample beta variables as ratios of gamma samples.

        x / (x + y) = sigmoid(log(x) - log(y)),    x ~ Gamma(alpha), y ~ Gamma(beta)

    Args:
        alpha: `[*B, A]` float, above 0. A larger value moves the density towards 1.
        beta: `[*B, A]` float, above 0. A larger value moves the density towards 0.
        key: `[*B]` int64, one key of `ecrl.rng` for each row.

    Returns: `[*B, A]` in [0, 1]. A sample near 0 or 1 may be rounded to exactly 0 or 1.
    Gradient: none, because the result is detached.
    Raises: ValueError naming the arguments whose shapes do not match.
    Source: Marsaglia and Tsang 2000, "A simple method for generating gamma variables".

    >>> bool(beta_sample(torch.tensor([5000.0]), torch.tensor([5000.0]), rng.key(0)).sub(0.5).abs() < 0.05)
    True
    """
    same_shape(alpha=alpha, beta=beta)
    if key.shape != alpha.shape[:-1]:
        raise ValueError(f"key has shape {list(key.shape)}, expected {list(alpha.shape[:-1])}, one key per row")
    dtype = common_dtype(alpha, beta)
    first, second = rng.split(key)
    log_x = _log_gamma_sample(alpha.detach().to(torch.float64), first)
    log_y = _log_gamma_sample(beta.detach().to(torch.float64), second)
    return _round(torch.sigmoid(log_x - log_y), dtype)


def beta_mode(alpha: Tensor, beta: Tensor) -> Tensor:
    """Return the point of highest density of each variable.

        (alpha - 1) / (alpha + beta - 2)    if both concentrations are above 1

    Otherwise, the density is highest at an end of the interval: at 1 if alpha > beta, and at 0 if alpha < beta. If both
    concentrations are below 1, the density is infinite at both ends. The same rule then gives the end towards which the
    density grows faster. If both concentrations are equal and at most 1, both ends tie, or the density is constant. The
    result is then 1 / 2.

    Args:
        alpha: `[*B, A]` float, above 0. A larger value moves the density towards 1.
        beta: `[*B, A]` float, above 0. A larger value moves the density towards 0.

    Returns: `[*B, A]` in [0, 1].
    Gradient: flows through both arguments where both concentrations are above 1.
    Raises: ValueError naming the arguments whose shapes differ.

    >>> beta_mode(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 5.0]))
    tensor([0.6667, 0.0000])
    """
    same_shape(alpha=alpha, beta=beta)
    dtype, a, b = common_dtype(alpha, beta), alpha.to(torch.float64), beta.to(torch.float64)
    is_inner = (a > 1.0) & (b > 1.0)
    total = (a + b - 2.0).masked_fill(~is_inner, 1.0)
    end = 0.5 + 0.5 * torch.sign(a.detach() - b.detach())
    return _round(torch.where(is_inner, (a - 1.0) / total, end), dtype)


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    """Return the logarithm of the beta function, which normalises the density."""
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


def beta_log_prob(alpha: Tensor, beta: Tensor, action: Tensor) -> Tensor:
    """Return the log-density of `action` in nats, summed over the last axis.

        sum_a((alpha - 1) log(x) + (beta - 1) log(1 - x) - log(B(alpha, beta))),    x = action

    Here B is the beta function. The action is first clipped to the open interval (0, 1), because a rounded action may
    equal 0 or 1, where the density may be 0 or infinite.

    Args:
        alpha: `[*B, A]` float, above 0. A larger value moves the density towards 1.
        beta: `[*B, A]` float, above 0. A larger value moves the density towards 0.
        action: `[*B, A]` float in [0, 1].

    Returns: `[*B]`.
    Gradient: flows through `alpha`, `beta`, and entries of `action` that are not clipped.
    Raises: ValueError naming the arguments whose shapes differ.

    >>> beta_log_prob(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([0.5]))
    tensor(0.)
    """
    same_shape(alpha=alpha, beta=beta, action=action)
    dtype, a, b, x = common_dtype(alpha, beta, action), alpha.double(), beta.double(), _inside(action)
    log_prob = (a - 1.0) * torch.log(x) + (b - 1.0) * torch.log1p(-x) - _log_beta(a, b)
    return _round(log_prob.sum(-1), dtype)


def beta_entropy(alpha: Tensor, beta: Tensor) -> Tensor:
    """Return the differential entropy of the beta variables in nats, summed over the last axis.

        sum_a(log(B(a, b)) - (a - 1) digamma(a) - (b - 1) digamma(b) + (a + b - 2) digamma(a + b))

    Here a is `alpha`, b is `beta` and B is the beta function.

    Args:
        alpha: `[*B, A]` float, above 0. A larger value moves the density towards 1.
        beta: `[*B, A]` float, above 0. A larger value moves the density towards 0.

    Returns: `[*B]`.
    Gradient: flows through both arguments.
    Raises: ValueError naming the arguments whose shapes differ.

    >>> beta_entropy(torch.tensor([1.0]), torch.tensor([1.0]))
    tensor(0.)
    """
    same_shape(alpha=alpha, beta=beta)
    dtype, a, b = common_dtype(alpha, beta), alpha.double(), beta.double()
    inner = (a - 1.0) * torch.digamma(a) + (b - 1.0) * torch.digamma(b) - (a + b - 2.0) * torch.digamma(a + b)
    return _round((_log_beta(a, b) - inner).sum(-1), dtype)


def beta_kl(alpha: Tensor, beta: Tensor, other_alpha: Tensor, other_beta: Tensor) -> Tensor:
    """Return the KL divergence KL(Beta(a, b) | Beta(a', b')) in nats, summed over the last axis.

        sum_a(log(B(a', b')) - log(B(a, b)) + (a - a') digamma(a) + (b - b') digamma(b)
              - (a + b - a' - b') digamma(a + b))

    Here a is `alpha`, b is `beta`, a' is `other_alpha`, b' is `other_beta` and B is the beta function.

    Args:
        alpha: `[*B, A]` float, above 0. A larger value moves the density towards 1.
        beta: `[*B, A]` float, above 0. A larger value moves the density towards 0.
        other_alpha: `[*B, A]` float, above 0. A larger value moves the density towards 1.
        other_beta: `[*B, A]` float, above 0. A larger value moves the density towards 0.

    Returns: `[*B]`.
    Gradient: flows through all four arguments.
    Raises: ValueError naming the arguments whose shapes differ.

    >>> beta_kl(torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([2.0]), torch.tensor([3.0]))
    tensor(0.)
    """
    same_shape(alpha=alpha, beta=beta, other_alpha=other_alpha, other_beta=other_beta)
    dtype = common_dtype(alpha, beta, other_alpha, other_beta)
    a, b, c, d = (x.double() for x in (alpha, beta, other_alpha, other_beta))
    means = (a - c) * torch.digamma(a) + (b - d) * torch.digamma(b) - (a + b - c - d) * torch.digamma(a + b)
    return _round((_log_beta(c, d) - _log_beta(a, b) + means).sum(-1), dtype)
