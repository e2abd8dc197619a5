"""Means and weights for sequences of tokens, as used to fine-tune language and vision-language-action models.

The last axis of `[*B, L]` runs over the tokens of a sequence. `ecrl.kernels.sequence_losses` has the losses. Masked
entries may hold any value, including NaN. Half-precision inputs are converted to float32, and results are converted
back.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, computed_in, scalars, widened
from ecrl.kernels.losses import expand_to_tokens
from ecrl.kernels.masked_stats import identity, masked_mean, standardize
from ecrl.types import Scalar, check_tensors, checked_mask


def token_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean over all unmasked tokens of the batch. Each token has the same weight.

        sum(x where mask) / max(1, count(mask))

    Args:
        x: `[*B, L]` float. Masked entries may hold any value.
        mask: `[*B, L]` bool, or None if every token counts.

    Returns: 0-d, in the dtype of `x`. Half-precision entries are summed in float32.
    Gradient: flows through the unmasked entries of `x`.
    Raises: ValueError naming the argument, if shapes differ or `mask` is not bool.
    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 8.

    >>> token_mean(torch.tensor([[1.0, 2.0], [6.0, 9.0]]), torch.tensor([[True, True], [True, False]]))
    tensor(3.)
    """
    return masked_mean(x, mask)


def sequence_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean over sequences of each sequence's mean. A token of a long sequence has less weight.

        mean(b) = sum(x[b] where mask[b]) / max(1, count(mask[b]))
        sum of mean(b) / max(1, number of sequences with an unmasked token)

    Args:
        x: `[*B, L]` float. Masked entries may hold any value.
        mask: `[*B, L]` bool, or None if every token counts. A sequence without an unmasked token does not count. TRL
            counts such a sequence.

    Returns: 0-d, in the dtype of `x`. Half-precision entries are summed in float32.
    Gradient: flows through the unmasked entries of `x`.
    Raises: ValueError naming the argument, if shapes differ or `mask` is not bool.
    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300, eq. 3.

    >>> sequence_mean(torch.tensor([[1.0, 2.0], [6.0, 9.0]]), torch.tensor([[True, True], [True, False]]))
    tensor(3.7500)
    """
    mask = checked_mask(mask, x=x)
    total = _sequence_sum(x, mask)
    count = mask.sum(-1)
    return ((total / count.clamp(min=1)).sum() / (count > 0).sum().clamp(min=1)).to(common_dtype(x))


def fixed_length_mean(x: Tensor, mask: Tensor | None = None, *, length: Scalar) -> Tensor:
    """Return the mean over sequences of each sequence's sum, divided by a constant length.

        sum(x where mask) / (length * max(1, number of sequences with an unmasked token))

    The weight of a token does not depend on the lengths of the sequences. With a `length` of 1, the result is the
    mean of the sums.

    Args:
        x: `[*B, L]` float. Masked entries may hold any value.
        mask: `[*B, L]` bool, or None if every token counts. A sequence without an unmasked token does not count. TRL
            counts such a sequence.
        length: number of tokens, usually the largest length of a sequence.

    Returns: 0-d, in the dtype of `x`. Half-precision entries are summed in float32.
    Gradient: flows through the unmasked entries of `x`.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or `length` is not 0-d.
    Source: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, sec. 3.2.

    >>> x, mask = torch.tensor([[1.0, 2.0], [6.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    >>> fixed_length_mean(x, mask, length=2)
    tensor(2.2500)
    """
    (length,) = scalars(length=length)
    mask = checked_mask(mask, x=x)
    total = _sequence_sum(x, mask)
    return (total.sum() / mask.any(-1).sum().clamp(min=1) / length).to(common_dtype(x))


def _sequence_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum the unmasked entries over the last axis."""
    return x.to(computed_in(common_dtype(x))).masked_fill(~mask, 0.0).sum(-1)


def whiten(
    advantage: Tensor, mask: Tensor | None = None, *, eps: Scalar, total: Callable[[Tensor], Tensor] = identity
) -> Tensor:
    """Shift and scale advantages to mean 0 and standard deviation 1 over the unmasked tokens of the batch.

        std = sqrt(sum((advantage - mean)^2 where mask) / max(1, count(mask) - 1))
        (advantage - mean) / max(std, eps)

    An advantage per sequence counts once for each unmasked token. To whiten as in REINFORCE++, pass the score of each
    sequence as `advantage`. For the variant of REINFORCE++ with a baseline, pass `group_centered(score)`.

    Args:
        advantage: float, `[*B]` or `[*B, L]`, in reward units.
        mask: `[*B, L]` bool, or None if every token counts and `advantage` is `[*B, L]`.
        eps: lower bound of the divisor, in reward units.
        total: a function that sums a tensor over all processes, as in `standardize`.

    Returns: `[*B, L]`, in the dtype of `advantage`. Masked entries are 0. All entries are 0 if the advantages differ
        only by rounding, as in `standardize`.
    Gradient: flows through `advantage`.
    Raises: ValueError naming the argument, if shapes do not match, `mask` is not bool or `eps` is not 0-d.
    Source: Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, sec. 3.

    >>> whiten(torch.tensor([0.0, 2.0]), torch.tensor([[True, False], [True, False]]), eps=1e-8).tolist()
    [[-0.7071067690849304, 0.0], [0.7071067690849304, 0.0]]
    """
    check_tensors(advantage=advantage, **{} if mask is None else {"mask": mask})
    advantage = advantage if mask is None else expand_to_tokens(advantage, mask, "mask")
    return standardize(advantage, mask, eps=eps, total=total)


def overlong_penalty(length: Tensor, *, max_length: Scalar, buffer_length: Scalar) -> Tensor:
    """Return a penalty for sequences that almost reach or exceed `max_length` tokens.

        clip((max_length - buffer_length - length) / buffer_length, -1, 0)

    The penalty falls from 0 to -1 over the last `buffer_length` tokens before `max_length`. Add the penalty to the
    reward.

    Args:
        length: `[*B]` int or float, number of tokens of each sequence.
        max_length: largest number of tokens.
        buffer_length: number of tokens over which the penalty falls, above 0.

    Returns: `[*B]` from -1 to 0, in the dtype of `length` or torch's default float dtype if `length` holds integers.
    Gradient: flows through a float `length`.
    Raises: ValueError naming a hyperparameter that is not 0-d.
    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.

    >>> overlong_penalty(torch.tensor([5, 8, 10, 11]), max_length=10, buffer_length=4).tolist()
    [0.0, -0.5, -1.0, -1.0]
    """
    check_tensors(length=length)
    max_length, buffer_length = scalars(max_length=max_length, buffer_length=buffer_length)
    dtype, (length,) = common_dtype(length), widened(length)
    return ((max_length - buffer_length - length) / buffer_length).clamp(-1.0, 0.0).to(dtype)


def truncated_importance(
    log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor | None = None, *, cap: Scalar
) -> Tensor:
    """Return a truncated importance weight per token, to correct for a sampler that differs from the trained policy.

        weight = min(exp(log_prob - sampler_log_prob), cap)

    Multiply the loss per token by the weight. The sampler may be another program, such as a fast decoder in half
    precision.

    Args:
        log_prob: `[*B, L]` float, log-probability in nats, computed by the trainer before the update.
        sampler_log_prob: `[*B, L]` float, log-probability in nats, as the sampler reported it.
        mask: `[*B, L]` bool, or None if every token counts.
        cap: largest weight.

    Returns: `[*B, L]`. Masked entries are 0.
    Gradient: none, because the result is detached.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or `cap` is not 0-d.
    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training",
        fengyao.notion.site/off-policy-rl. The truncation is that of Espeholt et al. 2018, arXiv:1802.01561, sec. 4.1.

    >>> yes = torch.tensor([[True, True]])
    >>> truncated_importance(torch.tensor([[0.0, 9.0]]), torch.tensor([[0.0, 0.0]]), yes, cap=2.0)
    tensor([[1., 2.]])
    """
    (cap,) = scalars(cap=cap)
    mask = checked_mask(mask, log_prob=log_prob, sampler_log_prob=sampler_log_prob)
    dtype = common_dtype(log_prob, sampler_log_prob)
    weight = torch.exp(_sampler_log_ratio(log_prob, sampler_log_prob, mask)).clamp(max=cap)  # pyright: ignore
    return weight.masked_fill(~mask, 0.0).to(dtype)


def truncated_sequence_importance(
    log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor | None = None, *, cap: Scalar
) -> Tensor:
    """Return a truncated importance weight per sequence, as `truncated_importance` does per token.

        weight = min(exp(sum(log_prob - sampler_log_prob where mask)), cap)

    Args:
        log_prob: `[*B, L]` float, log-probability in nats, computed by the trainer before the update.
        sampler_log_prob: `[*B, L]` float, log-probability in nats, as the sampler reported it.
        mask: `[*B, L]` bool, or None if every token counts.
        cap: largest weight.

    Returns: `[*B, L]`, the same weight for all unmasked tokens of a sequence. Masked entries are 0.
    Gradient: none, because the result is detached.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or `cap` is not 0-d.
    Source: Yao et al. 2025, as in `truncated_importance`, with the ratio of whole sequences.

    >>> yes = torch.tensor([[True, True]])
    >>> truncated_sequence_importance(torch.tensor([[0.0, 9.0]]), torch.tensor([[0.0, 0.0]]), yes, cap=2.0)
    tensor([[2., 2.]])
    """
    (cap,) = scalars(cap=cap)
    mask = checked_mask(mask, log_prob=log_prob, sampler_log_prob=sampler_log_prob)
    dtype = common_dtype(log_prob, sampler_log_prob)
    log_weight = _sampler_log_ratio(log_prob, sampler_log_prob, mask).sum(-1, keepdim=True)
    weight = torch.exp(log_weight).clamp(max=cap)  # pyright: ignore
    return weight.expand_as(mask).masked_fill(~mask, 0.0).to(dtype)


def masked_sequence_importance(
    log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor | None = None, *, cap: Scalar
) -> Tensor:
    """Return the importance weight of each sequence, or 0 if the weight exceeds `cap`.

        weight = exp(sum(log_prob - sampler_log_prob where mask))        0 if this is above cap

    With a `cap` of 3, the weight is TRL's default correction.

    Args:
        log_prob: `[*B, L]` float, log-probability in nats, computed by the trainer before the update.
        sampler_log_prob: `[*B, L]` float, log-probability in nats, as the sampler reported it.
        mask: `[*B, L]` bool, or None if every token counts.
        cap: largest weight that is kept.

    Returns: `[*B, L]`, the same weight for all unmasked tokens of a sequence. Masked entries are 0.
    Gradient: none, because the result is detached.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or `cap` is not 0-d.
    Source: the setting `vllm_importance_sampling_mode="sequence_mask"` of TRL.

    >>> yes = torch.tensor([[True, True], [True, True]])
    >>> masked_sequence_importance(torch.tensor([[0.0, 9.0], [0.0, 0.0]]), torch.zeros(2, 2), yes, cap=3.0).tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """
    (cap,) = scalars(cap=cap)
    mask = checked_mask(mask, log_prob=log_prob, sampler_log_prob=sampler_log_prob)
    dtype = common_dtype(log_prob, sampler_log_prob)
    weight = torch.exp(_sampler_log_ratio(log_prob, sampler_log_prob, mask).sum(-1, keepdim=True))
    return weight.expand_as(mask).masked_fill(~mask | (weight > cap), 0.0).to(dtype)


def _sampler_log_ratio(log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return the detached log-ratio with 0 in place of masked entries."""
    log_prob, sampler_log_prob = widened(log_prob.detach(), sampler_log_prob.detach())
    return (log_prob - sampler_log_prob).masked_fill(~mask, 0.0)
