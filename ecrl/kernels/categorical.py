"""Functions for categorical and multi-discrete distributions with given logits: sample, mode, log_prob, entropy and kl.

Samplers take standard Gumbel noise as an argument (see `ecrl.rng`). The logits of a categorical distribution have the
shape `[*B, K]`. A multi-discrete distribution has several independent categorical components. `nvec` lists the number
of choices per component, and the logits of all components are on one axis, `[*B, sum(nvec)]`. `mask_logits` applies an
action mask to logits, so the other functions take no mask. Half-precision inputs are converted to float32, and results
are converted back to half precision.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, widened
from ecrl.types import check_bool, same_shape


def mask_logits(logits: Tensor, action_mask: Tensor) -> Tensor:
    """Set the logits of forbidden actions to the dtype's lowest finite value, so that their probability is exactly 0.

        logits[k] if action_mask[k] else -max_float

    If no action is allowed, the distribution is uniform over all actions.

    Args:
        logits: `[*B, K]` float.
        action_mask: `[*B, K]` bool, True = allowed.

    Returns: `[*B, K]`.
    Gradient: flows through the logits of allowed actions.
    Raises: ValueError naming the argument, if shapes differ or `action_mask` is not bool.
    Source: Huang and Ontanon 2022, arXiv:2006.14171.

    >>> categorical_mode(mask_logits(torch.tensor([3.0, 1.0]), torch.tensor([False, True])))
    tensor(1)
    """
    same_shape(logits=logits, action_mask=action_mask)
    check_bool(action_mask=action_mask)
    return logits.masked_fill(~action_mask, torch.finfo(logits.dtype).min)


def categorical_sample(logits: Tensor, noise: Tensor) -> Tensor:
    """Sample an index from softmax(logits) by adding standard Gumbel noise and taking the argmax.

        argmax_k(logits[k] - max(logits) + noise[k])

    The largest logit is subtracted first, because a large logit plus noise would be rounded to the logit itself.

    Args:
        logits: `[*B, K]` float.
        noise: `[*B, K]` float, standard Gumbel noise.

    Returns: int64 `[*B]`.
    Gradient: none.
    Raises: ValueError naming the arguments whose shapes differ.
    Source: Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030.

    >>> categorical_sample(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 0.0]))
    tensor(0)
    """
    same_shape(logits=logits, noise=noise)
    logits, noise = widened(logits, noise)
    return (logits - logits.amax(-1, keepdim=True) + noise).argmax(-1)


def categorical_mode(logits: Tensor) -> Tensor:
    """Return the index with the highest probability. If several indices tie, return the first of them.

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
    """Return the log-probability of the index `action`, in nats.

        log_softmax(logits)[action]

    Args:
        logits: `[*B, K]` float.
        action: `[*B]` int64.

    Returns: `[*B]`.
    Gradient: flows through `logits`.
    Raises: ValueError naming the arguments whose shapes do not match.

    >>> categorical_log_prob(torch.tensor([0.0, 0.0]), torch.tensor(1))
    tensor(-0.6931)
    """
    if action.shape != logits.shape[:-1]:
        raise ValueError(
            f"action has shape {list(action.shape)}, expected {list(logits.shape[:-1])} for logits {list(logits.shape)}"
        )
    return _log_prob(logits, action).to(common_dtype(logits))


def _log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """Compute `categorical_log_prob`, but return float32 for half-precision inputs."""
    return F.log_softmax(widened(logits)[0], -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of softmax(logits), in nats. Actions of probability 0 contribute 0 to the sum.

        -sum_k(p[k] * log(p[k])),    p = softmax(logits)

    Args:
        logits: `[*B, K]` float.

    Returns: `[*B]`.
    Gradient: flows through `logits`.

    >>> categorical_entropy(torch.tensor([0.0, 0.0]))
    tensor(0.6931)
    """
    return _entropy(logits).to(common_dtype(logits))


def _entropy(logits: Tensor) -> Tensor:
    """Compute `categorical_entropy`, but return float32 for half-precision inputs."""
    log_p = F.log_softmax(widened(logits)[0], -1)
    p = log_p.exp()
    return -(p * log_p.masked_fill(p == 0.0, 0.0)).sum(-1)


def categorical_kl(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Return KL(softmax(logits) | softmax(other_logits)), in nats.

    Actions of probability 0 under `logits` contribute 0 to the sum.

        sum_k(p[k] * (log(p[k]) - log(q[k]))),    p = softmax(logits), q = softmax(other_logits)

    Args:
        logits: `[*B, K]` float.
        other_logits: `[*B, K]` float.

    Returns: `[*B]`.
    Gradient: flows through both arguments.
    Raises: ValueError naming the arguments whose shapes differ.

    >>> categorical_kl(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0]))
    tensor(0.)
    """
    same_shape(logits=logits, other_logits=other_logits)
    return _kl(logits, other_logits).to(common_dtype(logits, other_logits))


def _kl(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Compute `categorical_kl`, but return float32 for half-precision inputs."""
    log_p, log_q = (F.log_softmax(x, -1) for x in widened(logits, other_logits))
    p = log_p.exp()
    return (p * (log_p - log_q).masked_fill(p == 0.0, 0.0)).sum(-1)


def _parts(nvec: tuple[int, ...], **tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split the last axis of each tensor into components of sizes `nvec`. Return one tuple of tensors per component."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] != sum(nvec):
            raise ValueError(
                f"{name} has {tensor.shape[-1]} entries on its last axis, expected {sum(nvec)}, the sum of nvec={nvec}"
            )
    return list(zip(*(tensor.split(nvec, -1) for tensor in tensors.values()), strict=True))


def multi_discrete_sample(logits: Tensor, noise: Tensor, *, nvec: tuple[int, ...]) -> Tensor:
    """Sample one index per component with `categorical_sample`.

    Args:
        logits: `[*B, sum(nvec)]` float.
        noise: `[*B, sum(nvec)]` float, standard Gumbel noise.
        nvec: number of choices per component.

    Returns: int64 `[*B, len(nvec)]`.
    Gradient: none.
    Raises: ValueError naming the arguments whose shapes do not match.

    >>> multi_discrete_sample(torch.zeros(3), torch.tensor([1.0, 0.0, 0.0]), nvec=(2, 1))
    tensor([0, 0])
    """
    return torch.stack([categorical_sample(*part) for part in _parts(nvec, logits=logits, noise=noise)], -1)


def multi_discrete_mode(logits: Tensor, *, nvec: tuple[int, ...]) -> Tensor:
    """Return the most probable index of each component.

    Args:
        logits: `[*B, sum(nvec)]` float.
        nvec: number of choices per component.

    Returns: int64 `[*B, len(nvec)]`.
    Gradient: none.
    Raises: ValueError if the last axis does not have sum(nvec) entries.

    >>> multi_discrete_mode(torch.tensor([0.0, 1.0, 0.0]), nvec=(2, 1))
    tensor([1, 0])
    """
    return torch.stack([categorical_mode(*part) for part in _parts(nvec, logits=logits)], -1)


def multi_discrete_log_prob(logits: Tensor, action: Tensor, *, nvec: tuple[int, ...]) -> Tensor:
    """Return the joint log-probability of one index per component, in nats. The components are independent.

        sum_i(log_softmax(logits_i)[action[i]]),    logits_i = the logits of component i

    Args:
        logits: `[*B, sum(nvec)]` float.
        action: `[*B, len(nvec)]` int64.
        nvec: number of choices per component.

    Returns: `[*B]`.
    Gradient: flows through `logits`.
    Raises: ValueError naming the arguments whose shapes do not match.

    >>> multi_discrete_log_prob(torch.zeros(3), torch.tensor([1, 0]), nvec=(2, 1))
    tensor(-0.6931)
    """
    if action.shape != (*logits.shape[:-1], len(nvec)):
        raise ValueError(
            f"action has shape {list(action.shape)}, expected {[*logits.shape[:-1], len(nvec)]}: "
            "one index for each component of nvec"
        )
    parts = zip(_parts(nvec, logits=logits), action.unbind(-1), strict=True)
    return torch.stack([_log_prob(part, a) for (part,), a in parts]).sum(0).to(common_dtype(logits))


def multi_discrete_entropy(logits: Tensor, *, nvec: tuple[int, ...]) -> Tensor:
    """Return the sum of the components' entropies, in nats.

    Args:
        logits: `[*B, sum(nvec)]` float.
        nvec: number of choices per component.

    Returns: `[*B]`.
    Gradient: flows through `logits`.
    Raises: ValueError if the last axis does not have sum(nvec) entries.

    >>> multi_discrete_entropy(torch.zeros(3), nvec=(2, 1))
    tensor(0.6931)
    """
    return torch.stack([_entropy(*part) for part in _parts(nvec, logits=logits)]).sum(0).to(common_dtype(logits))


def multi_discrete_kl(logits: Tensor, other_logits: Tensor, *, nvec: tuple[int, ...]) -> Tensor:
    """Return the sum of the components' KL divergences, in nats.

    Args:
        logits: `[*B, sum(nvec)]` float.
        other_logits: `[*B, sum(nvec)]` float.
        nvec: number of choices per component.

    Returns: `[*B]`.
    Gradient: flows through both arguments.
    Raises: ValueError naming the arguments whose shapes do not match.

    >>> multi_discrete_kl(torch.zeros(3), torch.zeros(3), nvec=(2, 1))
    tensor(0.)
    """
    parts = _parts(nvec, logits=logits, other_logits=other_logits)
    return torch.stack([_kl(*part) for part in parts]).sum(0).to(common_dtype(logits, other_logits))
