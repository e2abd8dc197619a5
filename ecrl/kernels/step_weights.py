"""Weights of steps, so that a weighted mean over a minibatch of steps estimates a mean over whole sequences.

A sequence, such as an episode, has T steps, and a step has K tokens. A minibatch holds steps of many sequences, but
not all steps of each sequence. `sequence_mean` cannot be computed from such a minibatch, so use this mean instead:

    weighted_step_mean = sum(weight[b] * x[b, k] where token_mask[b, k] and mask[b]) / max(1, sum(mask))

Compute the weights once per batch, for example with `token_mean_weights`. Over all steps of the batch,
`weighted_step_mean` then equals `token_mean` of `ecrl.kernels.sequences`. With `sequence_mean_weights` it equals
`sequence_mean`, and with `fixed_length_mean_weights` it equals `fixed_length_mean`. Over a random minibatch,
`weighted_step_mean` is an unbiased estimate if all minibatches have the same number of unmasked steps. If a minibatch
is processed in parts, weight the gradient of each part with the part's share of the minibatch's unmasked steps. The sum
of the weighted gradients is the gradient of the minibatch.

The weight functions take `count`, float `[N, T]`, the number of unmasked tokens of each step. `mask`, bool `[N, T]`, is
True for the steps that count. The function `total` sums a tensor over all processes, if each process holds a share of
the batch. No gradient flows through the weights.
"""

from collections.abc import Callable

from torch import Tensor

from ecrl.kernels.masked_stats import identity
from ecrl.types import Scalar, check_axes, check_bool, same_shape

Total = Callable[[Tensor], Tensor]


def weighted_step_mean(x: Tensor, token_mask: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    """Return the mean over the unmasked steps of the weighted sum over each step's tokens.

        sum(weight[b] * x[b, k] where token_mask[b, k] and mask[b]) / max(1, sum(mask))

    Args:
        x: `[*B, K]` float. Masked entries may hold any value.
        token_mask: `[*B, K]` bool.
        mask: `[*B]` bool.
        weight: `[*B]` float.

    Returns: 0-d, in the common dtype of `x` and `weight`.
    Gradient: flows through the unmasked entries of `x`.
    Raises: ValueError naming the argument, if shapes differ or a mask is not bool.

    >>> import torch
    >>> x, yes = torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    >>> weighted_step_mean(x, yes, yes[:, 0], torch.tensor([1.0, 2.0]))
    tensor(4.5000)
    """
    same_shape(x=x, token_mask=token_mask)
    same_shape(mask=mask, weight=weight)
    check_bool(token_mask=token_mask, mask=mask)
    check_axes(mask, after="K", token_mask=token_mask)
    total = x.masked_fill(~(token_mask & mask.unsqueeze(-1)), 0.0).sum(-1) * weight.detach().masked_fill(~mask, 0.0)
    return total.sum() / mask.sum().clamp(min=1)


def token_mean_weights(count: Tensor, mask: Tensor, *, total: Total = identity) -> Tensor:
    """Return weights `[N, T]` that make `weighted_step_mean` over all steps equal to `token_mean`.

        weight = sum(mask) / sum(count where mask)

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 8.

    >>> import torch
    >>> token_mean_weights(torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]])).tolist()
    [[0.5, 0.5]]
    """
    tokens = total(_counts(count, mask).sum())
    return (_steps(count, mask, total) / tokens.clamp(min=1.0)).expand_as(count)


def sequence_mean_weights(count: Tensor, mask: Tensor, *, total: Total = identity) -> Tensor:
    """Return weights `[N, T]` that make `weighted_step_mean` over all steps equal to `sequence_mean`.

        weight[n] = sum(mask) / (sequences * sum(count[n] where mask[n]))

    Here and in `fixed_length_mean_weights`, `sequences` is the number of sequences with an unmasked token.

    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300, eq. 3.

    >>> import torch
    >>> sequence_mean_weights(torch.ones(2, 2), torch.tensor([[True, True], [True, False]])).tolist()
    [[0.75, 0.75], [1.5, 1.5]]
    """
    tokens = _counts(count, mask).sum(-1, keepdim=True)
    steps, sequences = _steps(count, mask, total), _sequences(count, mask, total)
    return (steps / sequences / tokens.clamp(min=1.0)).expand_as(count)


def fixed_length_mean_weights(count: Tensor, mask: Tensor, *, length: Scalar, total: Total = identity) -> Tensor:
    """Return weights `[N, T]` that make `weighted_step_mean` over all steps equal to `fixed_length_mean`.

        weight = sum(mask) / (sequences * length)

    `length` is the constant by which `fixed_length_mean` divides the sum of each sequence.

    Source: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, sec. 3.2.

    >>> import torch
    >>> fixed_length_mean_weights(torch.ones(2, 2), torch.tensor([[True, True], [True, False]]), length=3).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    return (_steps(count, mask, total) / _sequences(count, mask, total) / length).expand_as(count)


def _counts(count: Tensor, mask: Tensor) -> Tensor:
    same_shape(count=count, mask=mask)
    check_bool(mask=mask)
    return count.detach().masked_fill(~mask, 0.0)


def _steps(count: Tensor, mask: Tensor, total: Total) -> Tensor:
    return total(mask.sum()).to(count.dtype)


def _sequences(count: Tensor, mask: Tensor, total: Total) -> Tensor:
    return total((_counts(count, mask) > 0.0).any(-1).sum()).clamp(min=1).to(count.dtype)
