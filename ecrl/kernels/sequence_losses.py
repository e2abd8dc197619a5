"""Policy losses per token, as used to fine-tune language and vision-language-action models.

The last axis of `log_prob`, `old_log_prob` and `mask`, `[*B, L]`, runs over the tokens of a sequence. An advantage
`[*B]` belongs to a whole sequence, and an advantage `[*B, L]` to each token.

A loss returns `(loss, logs)`, where `loss` has one value per token, `[*B, L]`. Pass `loss` to `token_mean`,
`sequence_mean` or `fixed_length_mean` to get the 0-d loss. These means differ in the weight of long sequences. Each
loss is usually used with the mean of its paper, and VESPO with the mean of the library TRL:

- `sequence_mean`: GRPO, GSPO and SAPO
- `token_mean`: DAPO, CISPO and VESPO
- `fixed_length_mean`: Dr. GRPO

`logs` maps names to detached 0-d tensors. The log approx_kl is the estimate `kl_k3` of KL(old | new), a mean over the
unmasked tokens.

Masked entries may hold any value, including NaN, and their loss is 0. You can add terms such as `kl_k3` to a loss per
token. These terms have no mask, so fill the masked entries of their arguments: `log_prob.masked_fill(~mask, 0.0)`.

Losses detach `old_log_prob` and `advantage`. In the equations, `stop(x)` is x without a gradient. Where a docstring
states through which arguments gradients flow, it leaves out the hyperparameters. Gradients also flow through
hyperparameters that are tensors, except inside `stop`. Log-ratios are clamped to at most `bound`, so that losses and
gradients stay finite. `bound` is `ecrl.kernels.dtypes.exponent_bound(dtype)`, 44.36 in float32. No gradient flows
through a log-ratio above `bound`.

Half-precision inputs are converted to float32, and the loss is converted back. Logged values are float32 or wider.
"""

import torch
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, exponent_bound, scalars, widened
from ecrl.kernels.losses import expand_to_tokens
from ecrl.kernels.masked_stats import masked_mean
from ecrl.kernels.sequences import sequence_mean
from ecrl.types import Logs, Scalar, check_tensors, checked_mask


def clipped_surrogate_asymmetric(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: Scalar,
    clip_high: Scalar,
    dual_clip: Scalar,
) -> tuple[Tensor, Logs]:
    """Return the negated clipped policy objective per token, with separate lower and upper clips and a dual clip.

        ratio     = exp(min(log_prob - old_log_prob, bound))
        objective = min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)
        loss      = -objective                                         if advantage >= 0
        loss      = -max(objective, dual_clip * advantage)             if advantage < 0

    Args:
        log_prob: `[*B, L]` float, log-probability in nats under the policy being trained.
        old_log_prob: `[*B, L]` float, log-probability in nats under the policy that acted.
        advantage: float, `[*B]` or `[*B, L]`.
        mask: `[*B, L]` bool, or None if every token counts.
        clip_low: largest distance of the clipped ratio below 1.
        clip_high: largest distance of the clipped ratio above 1.
        dual_clip: largest ratio for negative advantages, above 1 + clip_high. Pass `math.inf` for no dual clip.

    Returns: the loss `[*B, L]`, and the logs approx_kl and clip_frac. clip_frac is the share of unmasked tokens whose
        ratio is outside [1 - clip_low, 1 + clip_high].
    Gradient: flows through `log_prob` only.
    Raises: ValueError naming the argument, if shapes do not match, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 10. The dual clip is from Ye et al. 2020, arXiv:1912.09729.

    >>> zeros, yes = torch.zeros(1, 2), torch.tensor([[True, True]])
    >>> clips = {"clip_low": 0.2, "clip_high": 0.25, "dual_clip": 3.0}
    >>> clipped_surrogate_asymmetric(torch.tensor([[0.0, 1.0]]), zeros, torch.tensor([1.0]), yes, **clips)[0].tolist()
    [[-1.0, -1.25]]
    """
    check_tensors(advantage=advantage)
    mask = checked_mask(mask, log_prob=log_prob, old_log_prob=old_log_prob)
    dtype = common_dtype(log_prob, old_log_prob, advantage)
    _, log_ratio, advantage = _bounded_log_ratio(log_prob, old_log_prob, advantage, mask)
    clip_low, clip_high, dual_clip = scalars(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    ratio = torch.exp(log_ratio)
    objective = _clipped_objective(ratio, advantage, clip_low, clip_high)
    objective = torch.where(advantage < 0.0, torch.maximum(objective, dual_clip * advantage), objective)
    logs = {
        "approx_kl": _approx_kl(log_ratio, mask),
        "clip_frac": masked_mean(_is_outside(ratio, clip_low, clip_high), mask).detach(),
    }
    return -objective.to(dtype), logs


def gspo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: Scalar,
    clip_high: Scalar,
) -> tuple[Tensor, Logs]:
    """Return the negated clipped policy objective per token, with one ratio for all tokens of a sequence.

        ratio = exp(min(sequence_log_ratio(log_prob, old_log_prob, mask), bound))
        loss  = -min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)

    The ratio is the geometric mean of the tokens' probability ratios. With an advantage per sequence, the loss is that
    of GSPO. With an advantage per token, the loss is that of GSPO-token.

    Args:
        log_prob: `[*B, L]` float, log-probability in nats under the policy being trained.
        old_log_prob: `[*B, L]` float, log-probability in nats under the policy that acted.
        advantage: float, `[*B]` or `[*B, L]`.
        mask: `[*B, L]` bool, or None if every token counts.
        clip_low: largest distance of the clipped ratio below 1. The paper uses 3e-4.
        clip_high: largest distance of the clipped ratio above 1. The paper uses 4e-4.

    Returns: the loss `[*B, L]`, and the logs approx_kl and clip_frac. clip_frac is the share of sequences whose ratio
        is outside [1 - clip_low, 1 + clip_high].
    Gradient: flows through `log_prob` only. The loss of a token has a gradient only with respect to the `log_prob` of
        the same token, as in `sequence_log_ratio`.
    Raises: ValueError naming the argument, if shapes do not match, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 5, 7 and 14.

    >>> zeros, yes = torch.zeros(1, 2), torch.tensor([[True, True]])
    >>> log_prob = torch.tensor([[-1.0, 1.0]])
    >>> gspo_loss(log_prob, zeros, torch.tensor([2.0]), yes, clip_low=0.1, clip_high=0.1)[0].tolist()
    [[-2.0, -2.0]]
    """
    check_tensors(advantage=advantage)
    mask = checked_mask(mask, log_prob=log_prob, old_log_prob=old_log_prob)
    dtype = common_dtype(log_prob, old_log_prob, advantage)
    _, token_log_ratio, advantage = _bounded_log_ratio(log_prob, old_log_prob, advantage, mask)
    clip_low, clip_high = scalars(clip_low=clip_low, clip_high=clip_high)
    bound = exponent_bound(common_dtype(log_prob, old_log_prob))
    log_ratio = sequence_log_ratio(*widened(log_prob, old_log_prob), mask=mask)
    ratio = torch.exp(log_ratio.clamp(max=bound))
    logs = {
        "approx_kl": _approx_kl(token_log_ratio, mask),
        "clip_frac": sequence_mean(_is_outside(ratio, clip_low, clip_high), mask).detach(),
    }
    return -_clipped_objective(ratio, advantage, clip_low, clip_high).to(dtype), logs


def cispo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: Scalar,
    clip_high: Scalar,
) -> tuple[Tensor, Logs]:
    """Return the policy-gradient loss per token, weighted with a clipped and detached ratio.

        ratio = exp(min(log_prob - old_log_prob, bound))
        loss  = -stop(clip(ratio, 1 - clip_low, 1 + clip_high)) * advantage * log_prob

    A token with a clipped ratio still has a gradient. The library verl clips the ratio from below and from above. TRL
    clips the ratio only from above. To clip as in TRL, at a largest ratio of c, pass `clip_low=1` and
    `clip_high=c - 1`.

    Args:
        log_prob: `[*B, L]` float, log-probability in nats under the policy being trained.
        old_log_prob: `[*B, L]` float, log-probability in nats under the policy that acted.
        advantage: float, `[*B]` or `[*B, L]`.
        mask: `[*B, L]` bool, or None if every token counts.
        clip_low: largest distance of the clipped ratio below 1.
        clip_high: largest distance of the clipped ratio above 1.

    Returns: the loss `[*B, L]`, and the logs approx_kl and clip_frac. clip_frac is the share of unmasked tokens whose
        ratio is outside [1 - clip_low, 1 + clip_high].
    Gradient: flows through `log_prob` only, and not through the ratio. A token of probability 0 has loss 0 and no
        gradient.
    Raises: ValueError naming the argument, if shapes do not match, `mask` is not bool or a hyperparameter is not 0-d.
    Source: MiniMax 2025, arXiv:2506.13585, eq. 4 and 5. Khatri et al. 2025, arXiv:2510.13786, clip only from above.

    >>> log_prob, yes = torch.tensor([[-1.0, -2.0]]), torch.tensor([[True, True]])
    >>> cispo_loss(log_prob, log_prob - 9, torch.tensor([1.0]), yes, clip_low=1.0, clip_high=4.0)[0].tolist()
    [[5.0, 10.0]]
    """
    check_tensors(advantage=advantage)
    mask = checked_mask(mask, log_prob=log_prob, old_log_prob=old_log_prob)
    dtype = common_dtype(log_prob, old_log_prob, advantage)
    log_prob, log_ratio, advantage = _bounded_log_ratio(log_prob, old_log_prob, advantage, mask)
    clip_low, clip_high = scalars(clip_low=clip_low, clip_high=clip_high)
    ratio = torch.exp(log_ratio.detach())
    clipped = ratio.clamp(min=1.0 - clip_low).clamp(max=1.0 + clip_high).detach()
    logs = {
        "approx_kl": _approx_kl(log_ratio, mask),
        "clip_frac": masked_mean(_is_outside(ratio, clip_low, clip_high), mask),
    }
    return (-clipped * advantage * _finite(log_prob)).to(dtype), logs


def sapo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    tau_positive: Scalar,
    tau_negative: Scalar,
) -> tuple[Tensor, Logs]:
    """Return the policy loss per token, with a smooth gate in place of the clipped ratio.

        ratio = exp(min(log_prob - old_log_prob, bound))
        tau   = tau_positive if advantage > 0, or else tau_negative
        loss  = -4 / tau * sigmoid(tau * (ratio - 1)) * advantage

    At ratio 1, the gradient with respect to `log_prob` equals that of the unclipped loss `-ratio * advantage`. Far from
    ratio 1, the gradient vanishes.

    Args:
        log_prob: `[*B, L]` float, log-probability in nats under the policy being trained.
        old_log_prob: `[*B, L]` float, log-probability in nats under the policy that acted.
        advantage: float, `[*B]` or `[*B, L]`.
        mask: `[*B, L]` bool, or None if every token counts.
        tau_positive: inverse width of the gate for positive advantages. The paper uses 1.
        tau_negative: inverse width of the gate for other advantages. The paper uses 1.05.

    Returns: the loss `[*B, L]`, and the log approx_kl.
    Gradient: flows through `log_prob` only.
    Raises: ValueError naming the argument, if shapes do not match, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Gao et al. 2025, arXiv:2511.20347.

    >>> zeros, yes, taus = torch.zeros(1, 1), torch.tensor([[True]]), {"tau_positive": 1.0, "tau_negative": 1.05}
    >>> sapo_loss(zeros, zeros, torch.tensor([3.0]), yes, **taus)[0].tolist()
    [[-6.0]]
    """
    check_tensors(advantage=advantage)
    mask = checked_mask(mask, log_prob=log_prob, old_log_prob=old_log_prob)
    dtype = common_dtype(log_prob, old_log_prob, advantage)
    _, log_ratio, advantage = _bounded_log_ratio(log_prob, old_log_prob, advantage, mask)
    tau_positive, tau_negative = scalars(tau_positive=tau_positive, tau_negative=tau_negative)
    tau = _choose(advantage > 0.0, tau_positive, tau_negative, advantage)
    gate = 4.0 / tau * torch.sigmoid(tau * (torch.exp(log_ratio) - 1.0))
    return (-gate * advantage).to(dtype), {"approx_kl": _approx_kl(log_ratio, mask)}


def vespo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    k_positive: Scalar,
    lambda_positive: Scalar,
    k_negative: Scalar,
    lambda_negative: Scalar,
) -> tuple[Tensor, Logs]:
    """Return the policy-gradient loss per token, weighted with a smooth function of the ratio of whole sequences.

        ratio  = exp(min(sum(log_prob - old_log_prob where mask), bound))
        weight = ratio^k * exp(lambda * (1 - ratio))
        loss   = -stop(weight) * advantage * log_prob

    The weight is 1 at ratio 1, and approaches 0 for small and for large ratios.

    Args:
        log_prob: `[*B, L]` float, log-probability in nats under the policy being trained.
        old_log_prob: `[*B, L]` float, log-probability in nats under the policy that acted.
        advantage: float, `[*B]` or `[*B, L]`.
        mask: `[*B, L]` bool, or None if every token counts.
        k_positive: exponent k, above 0, for advantages >= 0. TRL's default is 2.
        lambda_positive: decay lambda, above 0, for advantages >= 0. TRL's default is 3.
        k_negative: exponent k, above 0, for negative advantages. TRL's default is 3.
        lambda_negative: decay lambda, above 0, for negative advantages. TRL's default is 2.

    Returns: the loss `[*B, L]`, and the log approx_kl.
    Gradient: flows through `log_prob` only, and not through the ratio. A token of probability 0 has loss 0 and no
        gradient.
    Raises: ValueError naming the argument, if shapes do not match, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Shen et al. 2026, arXiv:2602.10693.

    >>> log_prob, yes = torch.tensor([[-1.0, -2.0]]), torch.tensor([[True, True]])
    >>> shapes = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}
    >>> vespo_loss(log_prob, log_prob, torch.tensor([1.0]), yes, **shapes)[0].tolist()
    [[1.0, 2.0]]
    """
    check_tensors(advantage=advantage)
    mask = checked_mask(mask, log_prob=log_prob, old_log_prob=old_log_prob)
    dtype, bound = common_dtype(log_prob, old_log_prob, advantage), exponent_bound(common_dtype(log_prob, old_log_prob))
    log_prob, log_ratio, advantage = _log_ratio(log_prob, old_log_prob, advantage, mask)
    k_positive, lambda_positive = scalars(k_positive=k_positive, lambda_positive=lambda_positive)
    k_negative, lambda_negative = scalars(k_negative=k_negative, lambda_negative=lambda_negative)
    k = _choose(advantage < 0.0, k_negative, k_positive, advantage)
    decay = _choose(advantage < 0.0, lambda_negative, lambda_positive, advantage)
    total = log_ratio.detach().sum(-1, keepdim=True).clamp(max=bound)
    weight = torch.exp(k * total - decay * torch.expm1(total)).detach()
    return (-weight * advantage * _finite(log_prob)).to(dtype), {
        "approx_kl": _approx_kl(log_ratio.clamp(max=bound), mask)
    }


def sequence_log_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean log-ratio of each sequence, once per token.

        stop(sum(log_prob - old_log_prob where mask) / max(1, count(mask))) + log_prob - stop(log_prob)

    For any function f, the mean of f(result) over the unmasked tokens of a sequence has the same value and gradient as
    f(mean log-ratio). To use the ratio of sequences in `clipped_surrogate_asymmetric` or `sapo_loss`, pass the result
    as `log_prob`, and zeros as `old_log_prob`.

    Args:
        log_prob: `[*B, L]` float, log-probability in nats under the policy being trained.
        old_log_prob: `[*B, L]` float, log-probability in nats under the policy that acted.
        mask: `[*B, L]` bool, or None if every token counts.

    Returns: `[*B, L]`, equal for all unmasked tokens of a sequence. Masked entries are 0.
    Gradient: flows through `log_prob` only. The derivative of an unmasked entry is 1 with respect to the `log_prob`
        of the same token, and 0 with respect to the `log_prob` of any other token.
    Raises: ValueError naming the argument, if shapes differ or `mask` is not bool.
    Source: Zheng et al. 2025 (GSPO), arXiv:2507.18071, eq. 14.

    >>> sequence_log_ratio(torch.tensor([[1.0, 4.0]]), torch.zeros(1, 2), torch.tensor([[True, True]]))
    tensor([[2.5000, 2.5000]])
    """
    mask = checked_mask(mask, log_prob=log_prob, old_log_prob=old_log_prob)
    dtype = common_dtype(log_prob, old_log_prob)
    log_prob, log_ratio, _ = _log_ratio(log_prob, old_log_prob, old_log_prob, mask)
    mean = log_ratio.detach().sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    own = (log_prob - log_prob.detach()).masked_fill(log_prob.isinf(), 0.0)  # inf - inf is NaN
    return (mean + own).masked_fill(~mask, 0.0).to(dtype)


def _log_ratio(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `log_prob`, the log-ratio and the advantage, each `[*B, L]`, with 0 in place of masked entries."""
    advantage = expand_to_tokens(advantage.detach(), log_prob)
    tensors = widened(log_prob, old_log_prob.detach(), advantage)
    log_prob, old_log_prob, advantage = (x.masked_fill(~mask, 0.0) for x in tensors)
    return log_prob, log_prob - old_log_prob, advantage


def _bounded_log_ratio(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `_log_ratio`, with the log-ratio clamped to at most `exponent_bound`."""
    bound = exponent_bound(common_dtype(log_prob, old_log_prob))
    log_prob, log_ratio, advantage = _log_ratio(log_prob, old_log_prob, advantage, mask)
    return log_prob, log_ratio.clamp(max=bound), advantage


def _finite(log_prob: Tensor) -> Tensor:
    """Replace infinite entries with 0. A token of probability 0 then has loss 0 and no gradient."""
    return log_prob.masked_fill(log_prob.isinf(), 0.0)


def _choose(condition: Tensor, x: Scalar, other: Scalar, like: Tensor) -> Tensor:
    """Return `torch.where(condition, x, other)` in the dtype of `like`. Two Python numbers would give float32."""
    zero = torch.zeros_like(like)
    return torch.where(condition, x + zero, other + zero)


def _clipped_objective(ratio: Tensor, advantage: Tensor, clip_low: Scalar, clip_high: Scalar) -> Tensor:
    clipped = ratio.clamp(min=1.0 - clip_low).clamp(max=1.0 + clip_high)
    return torch.minimum(ratio * advantage, clipped * advantage)


def _is_outside(ratio: Tensor, clip_low: Scalar, clip_high: Scalar) -> Tensor:
    """Return 1 for ratios outside [1 - clip_low, 1 + clip_high], and 0 for others."""
    return ((ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high)).to(ratio.dtype)


def _approx_kl(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return the estimate `kl_k3` of KL(old | new), detached, as a mean over the unmasked tokens."""
    log_ratio = log_ratio.detach()
    return masked_mean(torch.expm1(log_ratio) - log_ratio, mask)
