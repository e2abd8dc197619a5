"""Policy-gradient losses, value losses and estimates of the KL divergence.

A loss is a mean over the entries whose `mask` is True, or 0 if all entries are masked. Without a mask, every entry
counts. Masked entries may hold any value, including NaN. Losses detach their targets. A function with logs returns
`(loss, logs)`, where `loss` is 0-d and `logs` maps names to detached 0-d tensors. The log `count` is the number of
unmasked entries. An average over the processes of a distributed run weights the loss of each process by this number.
The log `clip_frac` is the share of unmasked entries whose probability ratio is outside the clipping range.

If an action consists of tokens, as in a language model, each token has its own log-probability. The log-probabilities
then have token axes after the axes `*B`.

Losses with more than four tensors take them by keyword. Where a docstring states through which arguments gradients
flow, it leaves out the hyperparameters. Gradients also flow through hyperparameters that are tensors.

A log-ratio is a difference of log-probabilities. Where a function computes the exponential of a log-ratio, it first
clamps the log-ratio to at most `bound`, so that losses and gradients stay finite. `bound` is half the logarithm of the
largest finite value in the dtype of the log-probabilities, 44.36 in float32 (`ecrl.kernels.dtypes.exponent_bound`). No
gradient flows through a log-ratio above `bound`.

Half-precision inputs are converted to float32. A loss has the common dtype of its float inputs, as given by
`torch.promote_types`. Logged values are float32 or wider.
"""

import torch
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, exponent_bound, scalars, widened
from ecrl.kernels.masked_stats import explained_variance, masked_mean
from ecrl.kernels.q_losses import huber
from ecrl.types import Logs, Scalar, check_tensors, checked_mask, same_shape


def expand_to_tokens(advantage: Tensor, like: Tensor, name: str = "log_prob") -> Tensor:
    """Expand `advantage` along the trailing token axes of `like`. `name` is what error messages call `like`.

    >>> expand_to_tokens(torch.tensor([1.0, 2.0]), torch.zeros(2, 2)).tolist()
    [[1.0, 1.0], [2.0, 2.0]]
    """
    if advantage.shape != like.shape[: advantage.ndim]:
        raise ValueError(
            f"advantage has shape {list(advantage.shape)}, expected the shape of {name}, {list(like.shape)}, or its "
            "leading axes"
        )
    return advantage.reshape(*advantage.shape, *[1] * (like.ndim - advantage.ndim)).expand_as(like)


def clipped_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor | None = None, *, clip_coef: Scalar
) -> tuple[Tensor, Logs]:
    """Return the negated clipped policy objective of PPO.

        ratio = exp(min(log_prob - old_log_prob, bound))        bound = exponent_bound(dtype), 44.36 in float32
        loss  = -mean(min(ratio * advantage, clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantage))

    Args:
        log_prob: `[*B]` float, log-probability in nats under the policy being trained; may have trailing token axes.
        old_log_prob: float, with the shape of `log_prob`; log-probability in nats under the policy that acted.
        advantage: float, with the shape of `log_prob` or of its leading axes.
        mask: bool, with the shape of `log_prob`, or None if every entry counts.
        clip_coef: largest distance of the clipped ratio from 1.

    Returns: the 0-d loss, and the logs policy_loss, approx_kl (the estimate `kl_k3` of KL(old | new)) and clip_frac.
    Gradient: flows through `log_prob` only.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.

    >>> loss, logs = clipped_surrogate(torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([2.0]), clip_coef=0.2)
    >>> float(loss), float(logs["clip_frac"])
    (-2.0, 0.0)
    """
    check_tensors(log_prob=log_prob, old_log_prob=old_log_prob, advantage=advantage)
    dtype = common_dtype(log_prob, old_log_prob, advantage)
    loss, logs = _surrogate(log_prob, old_log_prob, advantage, mask, clip_coef)
    return loss.to(dtype), logs


def _surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor | None, clip_coef: Scalar
) -> tuple[Tensor, Logs]:
    """Compute `clipped_surrogate`, but return a float32 loss for half-precision inputs."""
    mask = checked_mask(mask, log_prob=log_prob, old_log_prob=old_log_prob)
    (clip_coef,) = scalars(clip_coef=clip_coef)
    bound = exponent_bound(common_dtype(log_prob, old_log_prob))
    advantage = expand_to_tokens(advantage.detach(), log_prob)
    log_prob, old_log_prob, advantage = widened(log_prob, old_log_prob.detach(), advantage)
    log_ratio = (log_prob - old_log_prob).masked_fill(~mask, 0.0).clamp(max=bound)
    ratio = torch.exp(log_ratio)
    clipped = torch.clamp(ratio, 1.0 - clip_coef, 1.0 + clip_coef)  # pyright: ignore
    loss = -masked_mean(torch.minimum(ratio * advantage, clipped * advantage), mask)
    outside = ((ratio - 1.0).abs() > clip_coef).to(ratio.dtype)
    return loss, {
        "policy_loss": loss.detach(),
        "approx_kl": masked_mean(torch.expm1(log_ratio) - log_ratio, mask).detach(),
        "clip_frac": masked_mean(outside, mask).detach(),
    }


def policy_gradient_loss(log_prob: Tensor, advantage: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Logs]:
    """Return the negated policy-gradient objective of REINFORCE and of actor-critics such as A2C.

        loss = -mean(log_prob * advantage)

    For REINFORCE, pass returns as `advantage`, or returns minus a baseline.

    Args:
        log_prob: `[*B]` float, log-probability in nats under the policy being trained; may have trailing token axes.
        advantage: float, with the shape of `log_prob` or of its leading axes.
        mask: bool, with the shape of `log_prob`, or None if every entry counts.

    Returns: the 0-d loss, and the log policy_loss.
    Gradient: flows through `log_prob` only.
    Raises: ValueError naming the argument, if shapes differ or `mask` is not bool.
    Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning";
        Mnih et al. 2016, arXiv:1602.01783, sec. 4.

    >>> loss, logs = policy_gradient_loss(torch.tensor([-1.0, -2.0]), torch.tensor([3.0, 1.0]))
    >>> float(loss)
    2.5
    """
    check_tensors(log_prob=log_prob, advantage=advantage)
    dtype = common_dtype(log_prob, advantage)
    loss, logs = _policy_gradient(log_prob, advantage, mask)
    return loss.to(dtype), logs


def _policy_gradient(log_prob: Tensor, advantage: Tensor, mask: Tensor | None) -> tuple[Tensor, Logs]:
    """Compute `policy_gradient_loss`, but return a float32 loss for half-precision inputs."""
    mask = checked_mask(mask, log_prob=log_prob)
    log_prob, advantage = widened(log_prob, expand_to_tokens(advantage.detach(), log_prob))
    # Fill masked entries before the product, because a masked NaN would make the gradient NaN.
    log_prob, advantage = log_prob.masked_fill(~mask, 0.0), advantage.masked_fill(~mask, 0.0)
    loss = -masked_mean(log_prob * advantage, mask)
    return loss, {"policy_loss": loss.detach()}


def value_loss(value: Tensor, value_target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean squared error of the critic, without a factor of one half.

        mean((value - value_target)^2)

    Args:
        value: `[*B]` float.
        value_target: `[*B]` float.
        mask: `[*B]` bool, or None if every entry counts.

    Returns: 0-d.
    Gradient: flows through `value` only.
    Raises: ValueError naming the argument, if shapes differ or `mask` is not bool.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 9.

    >>> value_loss(torch.tensor([1.0]), torch.tensor([3.0]))
    tensor(4.)
    """
    mask = checked_mask(mask, value=value, value_target=value_target)
    dtype, (value, value_target) = common_dtype(value, value_target), widened(value, value_target.detach())
    # Fill masked entries before the square. The square's gradient is proportional to the error, so a masked NaN would
    # give 0 * nan = nan.
    return masked_mean((value - value_target).masked_fill(~mask, 0.0).square(), mask).to(dtype)


def huber_value_loss(value: Tensor, value_target: Tensor, mask: Tensor | None = None, *, delta: Scalar) -> Tensor:
    """Return the mean Huber loss of the critic's errors, which is less sensitive to outliers than `value_loss`.

        mean(huber(value - value_target, delta))

    If no |error| exceeds `delta`, the result is half the result of `value_loss`.

    Args:
        value: `[*B]` float.
        value_target: `[*B]` float.
        mask: `[*B]` bool, or None if every entry counts.
        delta: size of the error above which the loss is linear, in reward units.

    Returns: 0-d.
    Gradient: flows through `value` only.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Huber 1964, "Robust estimation of a location parameter"; Andrychowicz et al. 2020, arXiv:2006.05990,
        compares both value losses.

    >>> huber_value_loss(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 2.0]), delta=2.0)
    tensor(2.2500)
    """
    mask = checked_mask(mask, value=value, value_target=value_target)
    dtype, (value, value_target) = common_dtype(value, value_target), widened(value, value_target.detach())
    # Fill masked entries before the Huber loss, as in `value_loss`.
    return masked_mean(huber((value - value_target).masked_fill(~mask, 0.0), delta=delta), mask).to(dtype)


def clipped_value_loss(
    value: Tensor, old_value: Tensor, value_target: Tensor, mask: Tensor | None = None, *, clip_coef: Scalar
) -> Tensor:
    """Return the clipped value loss of PPO: the mean of the larger of two squared errors.

    One error is that of `value`. The other error is that of `value` clipped to a range around `old_value`.

        clipped = old_value + clip(value - old_value, -clip_coef, clip_coef)
        mean(max((value - value_target)^2, (clipped - value_target)^2))

    Args:
        value: `[*B]` float.
        old_value: `[*B]` float, the critic's output when the rollout was collected.
        value_target: `[*B]` float.
        mask: `[*B]` bool, or None if every entry counts.
        clip_coef: largest distance of the clipped value from `old_value`, in reward units.

    Returns: 0-d.
    Gradient: flows through `value` only.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Engstrom et al. 2020, arXiv:2005.12729, sec. 3.

    >>> two = torch.tensor([2.0])
    >>> clipped_value_loss(two, torch.tensor([0.0]), two, clip_coef=0.5)
    tensor(2.2500)
    """
    mask = checked_mask(mask, value=value, old_value=old_value, value_target=value_target)
    (clip_coef,) = scalars(clip_coef=clip_coef)
    dtype = common_dtype(value, old_value, value_target)
    value, old_value, value_target = widened(value, old_value.detach(), value_target.detach())
    clipped = old_value + torch.clamp(value - old_value, -clip_coef, clip_coef)  # pyright: ignore
    plain_error, clipped_error = ((v - value_target).masked_fill(~mask, 0.0) for v in (value, clipped))
    return masked_mean(torch.maximum(plain_error.square(), clipped_error.square()), mask).to(dtype)


def kl_k1(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Estimate KL(policy | ref) from samples of the policy. The estimate is unbiased but has a high variance.

        log_prob - ref_log_prob        may be negative

    Args:
        log_prob: `[*B]` float, log-probability in nats under the policy that drew the samples.
        ref_log_prob: `[*B]` float, log-probability in nats under the reference policy.

    Returns: `[*B]`, in nats.
    Gradient: flows through both arguments. The expected gradient through `log_prob` is 0, so the estimate does not work
        as a penalty in a loss. Subtract the estimate from the reward instead.
    Raises: ValueError naming the arguments whose shapes differ.
    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.

    >>> kl_k1(torch.tensor([1.0]), torch.tensor([0.0]))
    tensor([1.])
    """
    same_shape(log_prob=log_prob, ref_log_prob=ref_log_prob)
    return log_prob - ref_log_prob  # a single subtraction is rounded only once, so float32 is not needed


def kl_k2(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Estimate KL(policy | ref) from samples of the policy. The estimate is biased, has a low variance and is >= 0.

        (log_prob - ref_log_prob)^2 / 2

    Args:
        log_prob: `[*B]` float, log-probability in nats under the policy that drew the samples.
        ref_log_prob: `[*B]` float, log-probability in nats under the reference policy.

    Returns: `[*B]`, in nats.
    Gradient: flows through both arguments. The expected gradient through `log_prob` is the gradient of
        KL(policy | ref).
    Raises: ValueError naming the arguments whose shapes differ.
    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.

    >>> kl_k2(torch.tensor([2.0]), torch.tensor([0.0]))
    tensor([2.])
    """
    same_shape(log_prob=log_prob, ref_log_prob=ref_log_prob)
    dtype, (log_prob, ref_log_prob) = common_dtype(log_prob, ref_log_prob), widened(log_prob, ref_log_prob)
    return ((log_prob - ref_log_prob).square() / 2.0).to(dtype)


def kl_k3(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Estimate KL(policy | ref) from samples of the policy. The estimate is unbiased, has a low variance and is >= 0.

        exp(q) - 1 - q,    q = min(ref_log_prob - log_prob, bound)
        bound = exponent_bound(dtype), 44.36 in float32

    Args:
        log_prob: `[*B]` float, log-probability in nats under the policy that drew the samples.
        ref_log_prob: `[*B]` float, log-probability in nats under the reference policy.

    Returns: `[*B]`, in nats.
    Gradient: flows through both arguments. The expected gradient through `log_prob` is the gradient of
        KL(ref | policy), the reverse of the estimated divergence. `kl_k3_with_k2_gradient` has the gradient of
        KL(policy | ref).
    Raises: ValueError naming the arguments whose shapes differ.
    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.

    >>> kl_k3(torch.tensor([0.0]), torch.tensor([0.0]))
    tensor([0.])
    """
    same_shape(log_prob=log_prob, ref_log_prob=ref_log_prob)
    return _k3(log_prob, ref_log_prob).to(common_dtype(log_prob, ref_log_prob))


def kl_k3_with_k2_gradient(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Estimate KL(policy | ref) with the value of `kl_k3` and the gradient of `kl_k2`.

        k2 - stop(k2) + stop(k3)

    Here `stop(x)` is x without a gradient. The estimate and its gradient are both unbiased.

    Args:
        log_prob: `[*B]` float, log-probability in nats under the policy that drew the samples.
        ref_log_prob: `[*B]` float, log-probability in nats under the reference policy.

    Returns: `[*B]`, in nats.
    Gradient: flows through both arguments. The expected gradient through `log_prob` is the gradient of
        KL(policy | ref). No gradient flows if `log_prob - ref_log_prob` is infinite.
    Raises: ValueError naming the arguments whose shapes differ.
    Source: Liu et al. 2025, arXiv:2510.01555. verl calls this penalty k3+.

    >>> log_prob = torch.tensor([2.0], requires_grad=True)
    >>> kl_k3_with_k2_gradient(log_prob, torch.tensor([2.0])).item()
    0.0
    """
    same_shape(log_prob=log_prob, ref_log_prob=ref_log_prob)
    k3 = _k3(log_prob.detach(), ref_log_prob.detach())
    dtype, (log_prob, ref_log_prob) = common_dtype(log_prob, ref_log_prob), widened(log_prob, ref_log_prob)
    difference = log_prob - ref_log_prob
    k2 = difference.masked_fill(difference.isinf(), 0.0).square() / 2.0
    return (k2 - k2.detach() + k3).to(dtype)


def _k3(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Compute `kl_k3`, but return float32 for half-precision inputs."""
    bound = exponent_bound(common_dtype(log_prob, ref_log_prob))
    log_prob, ref_log_prob = widened(log_prob, ref_log_prob)
    q = (ref_log_prob - log_prob).clamp(max=bound)
    return torch.expm1(q) - q


def ppo_loss(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    entropy: Tensor,
    value: Tensor,
    value_target: Tensor,
    mask: Tensor | None = None,
    clip_coef: Scalar,
    vf_coef: Scalar,
    ent_coef: Scalar,
) -> tuple[Tensor, Logs]:
    """Return the PPO loss: the clipped surrogate, plus the value loss, minus the entropy bonus.

        loss       = clipped_surrogate + vf_coef * value_loss - ent_coef * mean(entropy)
        value_loss = mean((value - value_target)^2)

    Args:
        log_prob: `[*B]` float, log-probability in nats under the policy being trained.
        old_log_prob: `[*B]` float, log-probability in nats under the policy that acted.
        advantage: `[*B]` float.
        entropy: `[*B]` float, in nats.
        value: `[*B]` float, the current output of the critic.
        value_target: `[*B]` float.
        mask: `[*B]` bool, or None if every entry counts.
        clip_coef: largest distance of the clipped ratio from 1.
        vf_coef: weight of the value loss. The value loss of CleanRL has a factor of one half, so pass half of CleanRL's
            `vf_coef`.
        ent_coef: weight of the entropy bonus.

    Returns: the 0-d loss, and the logs policy_loss, value_loss, entropy, approx_kl (the estimate `kl_k3` of
        KL(old | new)), clip_frac, explained_variance and count.
    Gradient: flows through `log_prob`, `entropy` and `value` only.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 9.

    >>> x = torch.zeros(2)
    >>> loss, logs = ppo_loss(log_prob=x, old_log_prob=x, advantage=x + 1, entropy=x, value=x, value_target=x + 2,
    ...     clip_coef=0.2, vf_coef=0.5, ent_coef=0.0)
    >>> float(loss), float(logs["value_loss"]), float(logs["count"])
    (1.0, 4.0, 2.0)
    """
    check_tensors(old_log_prob=old_log_prob, advantage=advantage)
    mask = checked_mask(mask, log_prob=log_prob, entropy=entropy, value=value, value_target=value_target)
    dtype = common_dtype(log_prob, old_log_prob, advantage, entropy, value, value_target)
    policy, logs = _surrogate(log_prob, old_log_prob, advantage, mask, clip_coef)
    critic = value_loss(*widened(value, value_target), mask=mask)
    loss, logs = _add_terms(policy, logs, critic, entropy, value, value_target, mask, vf_coef, ent_coef)
    return loss.to(dtype), logs


def ppo_loss_clipped_value(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    entropy: Tensor,
    value: Tensor,
    old_value: Tensor,
    value_target: Tensor,
    mask: Tensor | None = None,
    clip_coef: Scalar,
    vf_coef: Scalar,
    ent_coef: Scalar,
) -> tuple[Tensor, Logs]:
    """Return the PPO loss with `clipped_value_loss` in place of `value_loss`.

        loss = clipped_surrogate + vf_coef * clipped_value_loss - ent_coef * mean(entropy)

    Args:
        log_prob: `[*B]` float, log-probability in nats under the policy being trained.
        old_log_prob: `[*B]` float, log-probability in nats under the policy that acted.
        advantage: `[*B]` float.
        entropy: `[*B]` float, in nats.
        value: `[*B]` float, the current output of the critic.
        old_value: `[*B]` float, the critic's output when the rollout was collected.
        value_target: `[*B]` float.
        mask: `[*B]` bool, or None if every entry counts.
        clip_coef: largest distance of the clipped ratio from 1, and of the clipped value from `old_value` in reward
            units.
        vf_coef: weight of the value loss. The value loss of CleanRL has a factor of one half, so pass half of CleanRL's
            `vf_coef`.
        ent_coef: weight of the entropy bonus.

    Returns: the 0-d loss, and logs with the same names as in `ppo_loss`.
    Gradient: flows through `log_prob`, `entropy` and `value` only.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Engstrom et al. 2020, arXiv:2005.12729, sec. 3.

    >>> x = torch.zeros(2)
    >>> loss, logs = ppo_loss_clipped_value(log_prob=x, old_log_prob=x, advantage=x, entropy=x, value=x + 2,
    ...     old_value=x, value_target=x + 2, clip_coef=0.5, vf_coef=1.0, ent_coef=0.0)
    >>> float(logs["value_loss"])
    2.25
    """
    check_tensors(old_log_prob=old_log_prob, advantage=advantage, old_value=old_value)
    mask = checked_mask(mask, log_prob=log_prob, entropy=entropy, value=value, value_target=value_target)
    dtype = common_dtype(log_prob, old_log_prob, advantage, entropy, value, old_value, value_target)
    policy, logs = _surrogate(log_prob, old_log_prob, advantage, mask, clip_coef)
    critic = clipped_value_loss(*widened(value, old_value, value_target), mask=mask, clip_coef=clip_coef)
    loss, logs = _add_terms(policy, logs, critic, entropy, value, value_target, mask, vf_coef, ent_coef)
    return loss.to(dtype), logs


def ppo_loss_kl_penalty(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    kl: Tensor,
    entropy: Tensor,
    value: Tensor,
    value_target: Tensor,
    mask: Tensor | None = None,
    kl_coef: Scalar,
    vf_coef: Scalar,
    ent_coef: Scalar,
) -> tuple[Tensor, Logs]:
    """Return the PPO loss with a KL penalty in place of the clip.

        ratio       = exp(min(log_prob - old_log_prob, bound))        bound = exponent_bound(dtype), 44.36 in float32
        policy_loss = -mean(ratio * advantage)
        loss        = policy_loss + kl_coef * mean(kl) + vf_coef * value_loss - ent_coef * mean(entropy)

    Call `adaptive_kl_coef` after each update to adapt `kl_coef`.

    Args:
        log_prob: `[*B]` float, log-probability in nats under the policy being trained.
        old_log_prob: `[*B]` float, log-probability in nats under the policy that acted.
        advantage: `[*B]` float.
        kl: `[*B]` float, KL(old | new) in nats, for example `categorical_kl(old_logits, logits)`. If only the
            log-probabilities are known, pass the estimate `kl_k3(old_log_prob, log_prob)`.
        entropy: `[*B]` float, in nats.
        value: `[*B]` float, the current output of the critic.
        value_target: `[*B]` float.
        mask: `[*B]` bool, or None if every entry counts.
        kl_coef: weight of the KL penalty; `beta` in the paper.
        vf_coef: weight of the value loss.
        ent_coef: weight of the entropy bonus.

    Returns: the 0-d loss, and the logs policy_loss, kl (the mean of `kl`), value_loss, entropy, explained_variance and
        count.
    Gradient: flows through `log_prob`, `kl`, `entropy` and `value` only.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 8 and 9.

    >>> x = torch.zeros(2)
    >>> loss, logs = ppo_loss_kl_penalty(log_prob=x, old_log_prob=x, advantage=x + 1, kl=x + 0.5, entropy=x, value=x,
    ...     value_target=x + 2, kl_coef=2.0, vf_coef=0.5, ent_coef=0.0)
    >>> float(loss), float(logs["policy_loss"]), float(logs["kl"])
    (2.0, -1.0, 0.5)
    """
    fields = {"entropy": entropy, "value": value, "value_target": value_target}
    mask = checked_mask(mask, log_prob=log_prob, old_log_prob=old_log_prob, advantage=advantage, kl=kl, **fields)
    (kl_coef,) = scalars(kl_coef=kl_coef)
    bound = exponent_bound(common_dtype(log_prob, old_log_prob))
    dtype = common_dtype(log_prob, old_log_prob, advantage, kl, entropy, value, value_target)
    log_prob, old_log_prob, advantage = widened(log_prob, old_log_prob.detach(), advantage.detach())
    ratio = torch.exp((log_prob - old_log_prob).masked_fill(~mask, 0.0).clamp(max=bound))
    policy = -masked_mean(ratio * advantage.masked_fill(~mask, 0.0), mask)
    penalty = masked_mean(widened(kl)[0], mask)
    logs = {"policy_loss": policy.detach(), "kl": penalty.detach()}
    critic = value_loss(*widened(value, value_target), mask=mask)
    loss = policy + kl_coef * penalty
    loss, logs = _add_terms(loss, logs, critic, entropy, value, value_target, mask, vf_coef, ent_coef)
    return loss.to(dtype), logs


def adaptive_kl_coef(kl_coef: Tensor, kl: Tensor, *, target_kl: Scalar, tolerance: Scalar, factor: Scalar) -> Tensor:
    """Return the weight of the KL penalty for the next update, so that the KL divergence approaches `target_kl`.

        kl_coef / factor        if kl < target_kl / tolerance
        kl_coef * factor        if kl > target_kl * tolerance
        kl_coef                 otherwise

    Args:
        kl_coef: 0-d float, the weight during the last update; `beta` in the paper.
        kl: 0-d float, mean of KL(old | new) after the update, in nats. If `kl` is NaN, the weight does not change.
        target_kl: desired KL(old | new), in nats.
        tolerance: at least 1. The weight changes only if `kl` is above `target_kl * tolerance` or below
            `target_kl / tolerance`. The paper uses 1.5.
        factor: factor by which the weight grows or shrinks, above 1. The paper uses 2.

    Returns: 0-d, in the dtype of `kl_coef`.
    Gradient: none, because `kl_coef` and `kl` are detached.
    Raises: TypeError if `kl_coef` or `kl` is not a tensor, ValueError naming an argument that is not 0-d.
    Source: Schulman et al. 2017, arXiv:1707.06347, sec. 4.

    >>> paper = {"target_kl": 0.01, "tolerance": 1.5, "factor": 2.0}
    >>> [float(adaptive_kl_coef(torch.tensor(1.0), torch.tensor(kl), **paper)) for kl in (0.001, 0.01, 0.1)]
    [0.5, 1.0, 2.0]
    """
    check_tensors(kl_coef=kl_coef, kl=kl)
    scalars(kl_coef=kl_coef, kl=kl)
    target_kl, tolerance, factor = scalars(target_kl=target_kl, tolerance=tolerance, factor=factor)
    dtype, (kl_coef, kl) = common_dtype(kl_coef), widened(kl_coef.detach(), kl.detach())
    lower = torch.where(kl < target_kl / tolerance, kl_coef / factor, kl_coef)
    return torch.where(kl > target_kl * tolerance, kl_coef * factor, lower).to(dtype)


def a2c_loss(
    *,
    log_prob: Tensor,
    advantage: Tensor,
    entropy: Tensor,
    value: Tensor,
    value_target: Tensor,
    mask: Tensor | None = None,
    vf_coef: Scalar,
    ent_coef: Scalar,
) -> tuple[Tensor, Logs]:
    """Return the A2C loss: the policy-gradient loss, plus the value loss, minus the entropy bonus.

        loss = policy_gradient_loss + vf_coef * value_loss - ent_coef * mean(entropy)

    Args:
        log_prob: `[*B]` float, log-probability in nats under the policy being trained.
        advantage: `[*B]` float.
        entropy: `[*B]` float, in nats.
        value: `[*B]` float, the current output of the critic.
        value_target: `[*B]` float.
        mask: `[*B]` bool, or None if every entry counts.
        vf_coef: weight of the value loss.
        ent_coef: weight of the entropy bonus.

    Returns: the 0-d loss, and the logs policy_loss, value_loss, entropy, explained_variance and count.
    Gradient: flows through `log_prob`, `entropy` and `value` only.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Mnih et al. 2016, arXiv:1602.01783, algorithm S3, with one batch in place of asynchronous updates.

    >>> x = torch.zeros(2)
    >>> loss, logs = a2c_loss(log_prob=x - 1, advantage=x + 3, entropy=x, value=x, value_target=x + 2, vf_coef=0.5,
    ...     ent_coef=0.0)
    >>> float(loss), float(logs["policy_loss"]), float(logs["value_loss"])
    (5.0, 3.0, 4.0)
    """
    fields = {"entropy": entropy, "value": value, "value_target": value_target}
    mask = checked_mask(mask, log_prob=log_prob, advantage=advantage, **fields)
    dtype = common_dtype(log_prob, advantage, entropy, value, value_target)
    policy, logs = _policy_gradient(log_prob, advantage, mask)
    critic = value_loss(*widened(value, value_target), mask=mask)
    loss, logs = _add_terms(policy, logs, critic, entropy, value, value_target, mask, vf_coef, ent_coef)
    return loss.to(dtype), logs


def _add_terms(
    policy: Tensor,
    logs: Logs,
    critic: Tensor,
    entropy: Tensor,
    value: Tensor,
    value_target: Tensor,
    mask: Tensor,
    vf_coef: Scalar,
    ent_coef: Scalar,
) -> tuple[Tensor, Logs]:
    """Add the weighted value loss to a policy loss, subtract the entropy bonus, and add four entries to the logs."""
    vf_coef, ent_coef = scalars(vf_coef=vf_coef, ent_coef=ent_coef)
    bonus = masked_mean(widened(entropy)[0], mask)
    return policy + vf_coef * critic - ent_coef * bonus, logs | {
        "value_loss": critic.detach(),
        "entropy": bonus.detach(),
        "explained_variance": explained_variance(value, value_target, mask).to(critic.dtype),
        "count": mask.sum().to(policy.dtype),
    }


def grpo_loss(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    ref_log_prob: Tensor,
    advantage: Tensor,
    entropy: Tensor,
    mask: Tensor | None = None,
    clip_coef: Scalar,
    kl_coef: Scalar,
    ent_coef: Scalar,
) -> tuple[Tensor, Logs]:
    """Return the GRPO loss: the clipped surrogate, plus a KL penalty to a reference policy, minus the entropy bonus.

        loss = clipped_surrogate + kl_coef * mean(kl_k3(log_prob, ref_log_prob)) - ent_coef * mean(entropy)

    Each mean is over all unmasked entries of the batch, as in `token_mean`. The paper's eq. 3 first takes the mean of
    each sequence. To follow eq. 3, add `kl_coef * kl_k3(log_prob, ref_log_prob)` to the loss per token of
    `clipped_surrogate_asymmetric`, and pass the sum to `sequence_mean`.

    Args:
        log_prob: `[*B]` float, log-probability in nats under the policy being trained; may have trailing token axes.
        old_log_prob: float, with the shape of `log_prob`; log-probability in nats under the policy that acted.
        ref_log_prob: float, with the shape of `log_prob`; log-probability in nats under the frozen reference policy.
        advantage: float, with the shape of `log_prob` or of its leading axes.
        entropy: float, with the shape of `log_prob`, in nats.
        mask: bool, with the shape of `log_prob`, or None if every entry counts.
        clip_coef: largest distance of the clipped ratio from 1.
        kl_coef: weight of the KL penalty.
        ent_coef: weight of the entropy bonus.

    Returns: the 0-d loss, and the logs policy_loss, entropy, approx_kl (the estimate `kl_k3` of KL(old | new)),
        clip_frac, kl_ref (the mean of `kl_k3(log_prob, ref_log_prob)`) and count.
    Gradient: flows through `log_prob` and `entropy` only.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4.

    >>> x = torch.zeros(2)
    >>> loss, logs = grpo_loss(log_prob=x, old_log_prob=x, ref_log_prob=x, advantage=x + 1, entropy=x, clip_coef=0.2,
    ...     kl_coef=0.1, ent_coef=0.0)
    >>> float(loss), float(logs["kl_ref"])
    (-1.0, 0.0)
    """
    kl_coef, ent_coef = scalars(kl_coef=kl_coef, ent_coef=ent_coef)
    check_tensors(old_log_prob=old_log_prob, advantage=advantage)
    mask = checked_mask(mask, log_prob=log_prob, ref_log_prob=ref_log_prob, entropy=entropy)
    policy, logs = _surrogate(log_prob, old_log_prob, advantage, mask, clip_coef)
    # Fill masked entries before the exponential, because a masked NaN would make the gradient NaN.
    penalty = masked_mean(_k3(log_prob.masked_fill(~mask, 0.0), ref_log_prob.detach().masked_fill(~mask, 0.0)), mask)
    bonus = masked_mean(widened(entropy)[0], mask)
    logs |= {"entropy": bonus.detach(), "kl_ref": penalty.detach(), "count": mask.sum().to(policy.dtype)}
    dtype = common_dtype(log_prob, old_log_prob, ref_log_prob, advantage, entropy)
    return (policy + kl_coef * penalty - ent_coef * bonus).to(dtype), logs
