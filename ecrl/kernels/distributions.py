"""Action distributions as functions of their parameters: sample, mode, log_prob, entropy, kl.

Noise is an argument: standard Gumbel for categoricals, standard normal for Gaussians (see `ecrl.rng`). Categoricals
take logits `[*B, K]`; `mask_logits` applies an action mask to them and everything else follows. Gaussians are diagonal,
`[*B, A]`, and sum over the last axis. The squashed Gaussian keeps its `latent`, the sample before tanh:
log-probabilities computed from it are exact and finite at saturation, where `1 - tanh(latent)^2` underflows.
"""

from math import log, pi
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ecrl.types import same_shape

_QUADRATURE = tuple(map(tuple, np.polynomial.hermite_e.hermegauss(48)))


class Squashed(NamedTuple):
    """A tanh-normal sample: the `action` in (-1, 1) and the `latent` before tanh, each `[*B, A]`."""

    action: Tensor
    latent: Tensor


def mask_logits(logits: Tensor, action_mask: Tensor) -> Tensor:
    """Logits with forbidden actions at the dtype's lowest finite value, so that their probability is exactly 0.

        logits[k] if action_mask[k] else -max_float

    A row without any allowed action becomes uniform over all of them, though a sample is then always the first: noise
    is lost beside -max_float.

    Args:
        logits: `[*B, K]` float.
        action_mask: `[*B, K]` bool, True = allowed.

    Returns: `[*B, K]`.
    Gradient: flows through allowed logits.
    Raises: ValueError naming the arguments whose shapes differ.
    Source: Huang and Ontanon 2022, arXiv:2006.14171.

    >>> categorical_mode(mask_logits(torch.tensor([3.0, 1.0]), torch.tensor([False, True])))
    tensor(1)
    """
    same_shape(logits=logits, action_mask=action_mask)
    return logits.masked_fill(~action_mask, torch.finfo(logits.dtype).min)


def categorical_sample(logits: Tensor, noise: Tensor) -> Tensor:
    """One index per row, distributed as softmax(logits) if `noise` is standard Gumbel.

        argmax_k(logits[k] + noise[k])

    Args:
        logits: `[*B, K]` float.
        noise: `[*B, K]` float.

    Returns: int64 `[*B]`.
    Gradient: none.
    Raises: ValueError naming the arguments whose shapes differ.
    Source: Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030.

    >>> categorical_sample(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 0.0]))
    tensor(0)
    """
    same_shape(logits=logits, noise=noise)
    return (logits + noise).argmax(-1)


def categorical_mode(logits: Tensor) -> Tensor:
    """The most probable index; the first of equals.

        argmax_k(logits[k])

    Args:
        logits: `[*B, K]` float.

    Returns: int64 `[*B]`.
    Gradient: none.

    >>> categorical_mode(torch.tensor([0.0, 1.0]))
    tensor(1)
    """
    return logits.argmax(-1)


def categorical_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """Log-probability of an index, nats.

        log_softmax(logits)[action]

    Args:
        logits: `[*B, K]` float.
        action: `[*B]` int64.

    Returns: `[*B]`.
    Gradient: flows through `logits`.
    Raises: ValueError naming the arguments whose shapes do not fit.

    >>> categorical_log_prob(torch.tensor([0.0, 0.0]), torch.tensor(1))
    tensor(-0.6931)
    """
    if action.shape != logits.shape[:-1]:
        raise ValueError(
            f"action has shape {list(action.shape)}, expected {list(logits.shape[:-1])} for logits {list(logits.shape)}"
        )
    return F.log_softmax(logits, -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(logits: Tensor) -> Tensor:
    """Entropy, nats; actions of probability 0 add nothing.

        -sum_k(p[k] * log(p[k])),    p = softmax(logits)

    Args:
        logits: `[*B, K]` float.

    Returns: `[*B]`.
    Gradient: flows through `logits`.

    >>> categorical_entropy(torch.tensor([0.0, 0.0]))
    tensor(0.6931)
    """
    log_p = F.log_softmax(logits, -1)
    p = log_p.exp()
    return -(p * log_p.masked_fill(p == 0.0, 0.0)).sum(-1)


def categorical_kl(logits: Tensor, other_logits: Tensor) -> Tensor:
    """KL(softmax(logits) | softmax(other_logits)), nats; actions of probability 0 under the first add nothing.

        sum_k(p[k] * (log(p[k]) - log(q[k])))

    Args:
        logits: `[*B, K]` float.
        other_logits: `[*B, K]` float.

    Returns: `[*B]`.
    Gradient: flows through both.
    Raises: ValueError naming the arguments whose shapes differ.

    >>> categorical_kl(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0]))
    tensor(0.)
    """
    same_shape(logits=logits, other_logits=other_logits)
    log_p, log_q = F.log_softmax(logits, -1), F.log_softmax(other_logits, -1)
    p = log_p.exp()
    return (p * (log_p - log_q).masked_fill(p == 0.0, 0.0)).sum(-1)


def _parts(nvec: tuple[int, ...], **tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Cut the last axis of every tensor by `nvec`; one tuple per part."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] != sum(nvec):
            raise ValueError(f"{name} has {tensor.shape[-1]} entries, expected sum(nvec) = {sum(nvec)} for nvec={nvec}")
    return list(zip(*(tensor.split(nvec, -1) for tensor in tensors.values()), strict=True))


def multi_discrete_sample(logits: Tensor, noise: Tensor, *, nvec: tuple[int, ...]) -> Tensor:
    """`categorical_sample` of each part of the logits.

    Args:
        logits: `[*B, sum(nvec)]` float.
        noise: `[*B, sum(nvec)]` float, standard Gumbel.
        nvec: number of choices per part.

    Returns: int64 `[*B, len(nvec)]`.
    Gradient: none.
    Raises: ValueError naming the arguments whose shapes do not fit.

    >>> multi_discrete_sample(torch.zeros(3), torch.tensor([1.0, 0.0, 0.0]), nvec=(2, 1))
    tensor([0, 0])
    """
    return torch.stack([categorical_sample(*part) for part in _parts(nvec, logits=logits, noise=noise)], -1)


def multi_discrete_mode(logits: Tensor, *, nvec: tuple[int, ...]) -> Tensor:
    """`categorical_mode` of each part of the logits: `[*B, sum(nvec)]` to int64 `[*B, len(nvec)]`.

    Gradient: none.
    Raises: ValueError if the last axis is not sum(nvec).

    >>> multi_discrete_mode(torch.tensor([0.0, 1.0, 0.0]), nvec=(2, 1))
    tensor([1, 0])
    """
    return torch.stack([categorical_mode(*part) for part in _parts(nvec, logits=logits)], -1)


def multi_discrete_log_prob(logits: Tensor, action: Tensor, *, nvec: tuple[int, ...]) -> Tensor:
    """Log-probability of independent parts, nats.

        sum_i(log_softmax(logits_i)[action[i]])

    Args:
        logits: `[*B, sum(nvec)]` float.
        action: `[*B, len(nvec)]` int64.
        nvec: number of choices per part.

    Returns: `[*B]`.
    Gradient: flows through `logits`.
    Raises: ValueError naming the arguments whose shapes do not fit.

    >>> multi_discrete_log_prob(torch.zeros(3), torch.tensor([1, 0]), nvec=(2, 1))
    tensor(-0.6931)
    """
    if action.shape != (*logits.shape[:-1], len(nvec)):
        raise ValueError(f"action has shape {list(action.shape)}, expected {[*logits.shape[:-1], len(nvec)]}")
    parts = zip(_parts(nvec, logits=logits), action.unbind(-1), strict=True)
    return torch.stack([categorical_log_prob(part, a) for (part,), a in parts]).sum(0)


def multi_discrete_entropy(logits: Tensor, *, nvec: tuple[int, ...]) -> Tensor:
    """Sum of the parts' entropies, nats: `[*B, sum(nvec)]` to `[*B]`.

    Gradient: flows through `logits`.
    Raises: ValueError if the last axis is not sum(nvec).

    >>> multi_discrete_entropy(torch.zeros(3), nvec=(2, 1))
    tensor(0.6931)
    """
    return torch.stack([categorical_entropy(*part) for part in _parts(nvec, logits=logits)]).sum(0)


def multi_discrete_kl(logits: Tensor, other_logits: Tensor, *, nvec: tuple[int, ...]) -> Tensor:
    """Sum of the parts' KL divergences, nats: two `[*B, sum(nvec)]` to `[*B]`.

    Gradient: flows through both.
    Raises: ValueError naming the arguments whose shapes do not fit.

    >>> multi_discrete_kl(torch.zeros(3), torch.zeros(3), nvec=(2, 1))
    tensor(0.)
    """
    parts = _parts(nvec, logits=logits, other_logits=other_logits)
    return torch.stack([categorical_kl(*part) for part in parts]).sum(0)


def _check(mean: Tensor, log_std: Tensor, name: str = "log_std") -> None:
    """Raise ValueError unless `log_std` broadcasts to `mean`."""
    pairs = zip(reversed(log_std.shape), reversed(mean.shape), strict=False)
    if log_std.ndim > mean.ndim or any(ours not in (1, theirs) for ours, theirs in pairs):
        raise ValueError(
            f"{name} has shape {list(log_std.shape)}, expected one that broadcasts to mean {list(mean.shape)}"
        )


def normal_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
    """A reparametrised sample.

        mean + exp(log_std) * noise

    Args:
        mean: `[*B, A]` float.
        log_std: broadcasts to `mean`.
        noise: `[*B, A]` float, standard normal.

    Returns: `[*B, A]`.
    Gradient: flows through `mean` and `log_std` (and `noise`).
    Raises: ValueError naming the arguments whose shapes do not fit.
    Source: Kingma and Welling 2014, arXiv:1312.6114.

    >>> normal_sample(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0]))
    tensor([3.])
    """
    same_shape(mean=mean, noise=noise)
    _check(mean, log_std)
    return mean + torch.exp(log_std) * noise


def normal_mode(mean: Tensor) -> Tensor:
    """The mean itself: `[*B, A]`. Gradient: flows through.

    >>> normal_mode(torch.tensor([1.0]))
    tensor([1.])
    """
    return mean


def normal_log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """Log-density of a diagonal Gaussian, nats, summed over the last axis.

        sum_a(-z^2 / 2 - log_std - log(2 pi) / 2),    z = (action - mean) / exp(log_std)

    Args:
        mean: `[*B, A]` float.
        log_std: broadcasts to `mean`.
        action: `[*B, A]` float.

    Returns: `[*B]`.
    Gradient: flows through all three.
    Raises: ValueError naming the arguments whose shapes do not fit.

    >>> normal_log_prob(torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([0.0]))
    tensor(-0.9189)
    """
    same_shape(mean=mean, action=action)
    _check(mean, log_std)
    z = (action - mean) * torch.exp(-log_std)
    return (-0.5 * z.square() - log_std - 0.5 * log(2.0 * pi)).sum(-1)


def normal_entropy(mean: Tensor, log_std: Tensor) -> Tensor:
    """Differential entropy of a diagonal Gaussian, nats, summed over the last axis; independent of the mean.

        sum_a(log_std + log(2 pi e) / 2)

    Args:
        mean: `[*B, A]` float, gives the shape.
        log_std: broadcasts to `mean`.

    Returns: `[*B]`.
    Gradient: flows through `log_std`.
    Raises: ValueError if `log_std` does not broadcast to `mean`.

    >>> normal_entropy(torch.zeros(3, 1), torch.tensor([0.0])).shape
    torch.Size([3])
    """
    _check(mean, log_std)
    return (log_std + 0.5 * log(2.0 * pi) + 0.5).expand_as(mean).sum(-1)


def normal_kl(mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor) -> Tensor:
    """KL(first | other) of diagonal Gaussians, nats, summed over the last axis.

        sum_a(other_log_std - log_std + (std^2 + (mean - other_mean)^2) / (2 other_std^2) - 1 / 2)

    Args:
        mean: `[*B, A]` float.
        log_std: broadcasts to `mean`.
        other_mean: `[*B, A]` float.
        other_log_std: broadcasts to `mean`.

    Returns: `[*B]`.
    Gradient: flows through all four.
    Raises: ValueError naming the arguments whose shapes do not fit.

    >>> normal_kl(torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.0]))
    tensor(0.5000)
    """
    same_shape(mean=mean, other_mean=other_mean)
    _check(mean, log_std)
    _check(mean, other_log_std, "other_log_std")
    shift = (mean - other_mean) * torch.exp(-other_log_std)
    spread = torch.exp(2.0 * (log_std - other_log_std))
    return (other_log_std - log_std + 0.5 * (spread + shift.square() - 1.0)).sum(-1)


def _log_slope(latent: Tensor) -> Tensor:
    """`log(1 - tanh(latent)^2)` without cancellation."""
    return 2.0 * (log(2.0) - latent - F.softplus(-2.0 * latent))


def tanh_normal_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> Squashed:
    """A reparametrised sample of a tanh-squashed Gaussian.

        latent = mean + exp(log_std) * noise;  action = tanh(latent)

    Args:
        mean: `[*B, A]` float, before tanh.
        log_std: broadcasts to `mean`.
        noise: `[*B, A]` float, standard normal.

    Returns: `action` and `latent`, each `[*B, A]`.
    Gradient: flows through `mean` and `log_std` (and `noise`).
    Raises: ValueError naming the arguments whose shapes do not fit.
    Source: Haarnoja et al. 2018, arXiv:1801.01290, app. C.

    >>> tanh_normal_sample(torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([0.0])).action
    tensor([0.])
    """
    latent = normal_sample(mean, log_std, noise)
    return Squashed(torch.tanh(latent), latent)


def tanh_normal_mode(mean: Tensor) -> Tensor:
    """The squashed mean, `tanh(mean)`: `[*B, A]` (the median; the deterministic action). Gradient: flows through.

    >>> tanh_normal_mode(torch.tensor([0.0]))
    tensor([0.])
    """
    return torch.tanh(mean)


def tanh_normal_latent(action: Tensor) -> Tensor:
    """The latent of an action whose latent was not kept, `atanh` held inside the dtype's open interval.

        atanh(clip(action, -1 + eps, 1 - eps)),    eps the spacing of floats below 1

    Args:
        action: `[*B, A]` float in [-1, 1].

    Returns: `[*B, A]`, finite.
    Gradient: flows through `action` inside the interval.

    >>> tanh_normal_latent(torch.tensor([0.0, 1.0])).isfinite().all()
    tensor(True)
    """
    edge = 1.0 - torch.finfo(action.dtype).eps / 2.0
    return torch.atanh(action.clamp(-edge, edge))


def tanh_normal_log_prob(mean: Tensor, log_std: Tensor, latent: Tensor) -> Tensor:
    """Log-density of the action `tanh(latent)`, nats, summed over the last axis; finite at saturation.

        normal_log_prob(latent) - sum_a(log(1 - tanh(latent)^2))
        log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2 x))

    Args:
        mean: `[*B, A]` float, before tanh.
        log_std: broadcasts to `mean`.
        latent: `[*B, A]` float, the sample before tanh (`tanh_normal_latent` recovers it from an action).

    Returns: `[*B]`.
    Gradient: flows through all three.
    Raises: ValueError naming the arguments whose shapes do not fit.
    Source: Haarnoja et al. 2018, arXiv:1801.01290, eq. 21.

    >>> tanh_normal_log_prob(torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([0.0]))
    tensor(-0.9189)
    """
    same_shape(mean=mean, latent=latent)
    return normal_log_prob(mean, log_std, latent) - _log_slope(latent).sum(-1)


def tanh_normal_entropy(mean: Tensor, log_std: Tensor) -> Tensor:
    """Differential entropy of the squashed Gaussian, nats, summed over the last axis.

        normal_entropy + sum_a(E[log(1 - tanh(latent)^2)])

    There is no closed form; the expectation is a 48-point Gauss-Hermite sum, with an error per axis below 1e-3 for std
    up to 3 (2e-2 at 5).

    Args:
        mean: `[*B, A]` float, before tanh.
        log_std: broadcasts to `mean`.

    Returns: `[*B]`.
    Gradient: flows through both.
    Raises: ValueError if `log_std` does not broadcast to `mean`.

    >>> round(float(tanh_normal_entropy(torch.tensor([0.0]), torch.tensor([-9.0]))), 3)
    -7.581
    """
    nodes, weights = (torch.tensor(q, dtype=mean.dtype, device=mean.device) for q in _QUADRATURE)
    _check(mean, log_std)
    std = torch.exp(log_std).expand_as(mean)
    slope = _log_slope(mean.unsqueeze(-1) + std.unsqueeze(-1) * nodes)
    return normal_entropy(mean, log_std) + (slope * (weights / weights.sum())).sum(-1).sum(-1)


def tanh_normal_kl(mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor) -> Tensor:
    """KL(first | other), nats: that of the Gaussians before tanh, since a bijection leaves it unchanged.

    Args, returns, gradient and errors as `normal_kl`.

    >>> tanh_normal_kl(torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.0]))
    tensor(0.5000)
    """
    return normal_kl(mean, log_std, other_mean, other_log_std)
