"""Losses of off-policy critics and actors: DQN, DDPG, TD3 and soft actor-critic.

A loss is a mean over the entries whose `mask` is True, or 0 if all entries are masked. Without a mask, every entry
counts. Masked entries may hold any value, including NaN. Losses detach their targets. A function with logs returns
`(loss, logs)`, where `loss` is 0-d and `logs` maps names to detached 0-d tensors. The log `count` is the number of
unmasked entries. An average over the processes of a distributed run weights the loss of each process by this number.

The values of C critics have the shape `[C, *B]`.

Half-precision inputs are converted to float32. A loss has the common dtype of its float inputs, as given by
`torch.promote_types`. The dtype of `weight` does not affect the dtype of a loss. Otherwise, prioritised replay would
give float64 losses, because its weights (`importance_weights`) are float64. Logged values are float32 or wider.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, scalars, widened
from ecrl.kernels.masked_stats import masked_mean
from ecrl.types import Logs, Scalar, check_axes, check_bool, check_tensors, checked_mask


def _detached(x: Scalar) -> Scalar:
    return x.detach() if isinstance(x, Tensor) else x


def huber(x: Tensor, *, delta: Scalar) -> Tensor:
    """Return the Huber loss of each error, which is quadratic near 0 and linear beyond `delta`.

        clipped = min(|x|, delta)
        clipped * (|x| - clipped / 2)

    The loss is `x^2 / 2` if `|x| <= delta`, and `delta * (|x| - delta / 2)` otherwise. With an infinite `delta`, the
    loss is half the squared error, but NaN for an infinite error.

    Args:
        x: `[*B]` float, errors.
        delta: size of the error above which the loss is linear, in the units of `x`.

    Returns: `[*B]`.
    Gradient: flows through `x` and `delta`. The gradient with respect to `x` is `clip(x, -delta, delta)`.
    Raises: ValueError if `delta` is not 0-d.
    Source: Huber 1964, "Robust estimation of a location parameter".

    >>> huber(torch.tensor([1.0, -3.0]), delta=2.0), huber(torch.tensor([-3.0]), delta=float("inf"))
    (tensor([0.5000, 4.0000]), tensor([4.5000]))
    """
    check_tensors(x=x)
    (delta,) = scalars(delta=delta)
    size = widened(x)[0].abs()
    clipped = size.clamp(max=delta)
    return (clipped * (size - clipped / 2.0)).to(common_dtype(x))


def td_loss(
    q: Tensor, target: Tensor, weight: Tensor, mask: Tensor | None = None, *, delta: Scalar
) -> tuple[Tensor, Logs]:
    """Return the loss of one or more critics: the batch mean of the weighted Huber loss, summed over the critics.

        sum_c(mean(weight * huber(q[c] - target, delta)))

    An infinite `delta` gives half the squared error, the loss of soft actor-critic. The papers on DDPG and TD3 omit the
    factor of one half.

    Args:
        q: `[C, *B]` float, Q-values of the actions taken, from C critics.
        target: `[*B]` float, the target that all critics share.
        weight: `[*B]` float, importance weights of prioritised replay, or ones for uniform replay.
        mask: `[*B]` bool, or None if every entry counts.
        delta: size of the error above which the loss is linear, in reward units.

    Returns: the 0-d loss, and the logs q_loss (the loss), q_value (mean of `q`), td_error (mean of `|q - target|`) and
        count.
    Gradient: flows through `q` and `delta`, but not through `target` and `weight`.
    Raises: ValueError naming the argument, if shapes do not match, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Mnih et al. 2013, arXiv:1312.5602, eq. 2; clipped errors as in Mnih et al. 2015, "Human-level control
        through deep reinforcement learning"; weights as in Schaul et al. 2016, arXiv:1511.05952, algorithm 1.

    >>> q, target, ones = torch.tensor([[1.0, 2.0]]), torch.tensor([0.0, 2.0]), torch.ones(2)
    >>> loss, logs = td_loss(q, target, ones, ones > 0, delta=1.0)
    >>> float(loss), float(logs["q_value"]), float(logs["td_error"])
    (0.25, 1.5, 0.5)
    """
    mask = checked_mask(mask, target=target, weight=weight)
    check_axes(target, before="C", q=q)
    dtype, (q, target) = common_dtype(q, target), widened(q, target.detach())
    weight = weight.detach().to(q.dtype)
    # Fill masked entries before the square. The square's gradient is proportional to the error, so a masked NaN would
    # give 0 * nan = nan.
    error = (q - target).masked_fill(~mask, 0.0)
    loss = masked_mean((weight.masked_fill(~mask, 0.0) * huber(error, delta=delta)).sum(0), mask)
    return loss.to(dtype), {
        "q_loss": loss.detach(),
        "q_value": masked_mean(q.detach().mean(0), mask),
        "td_error": masked_mean(error.detach().abs().mean(0), mask),
        "count": mask.sum().to(loss.dtype),
    }


def dpg_loss(q: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Logs]:
    """Return the actor loss of DDPG and TD3: the negated mean Q-value of the policy's actions.

        -mean(q)

    Compute `q` at `action = policy(obs)`, and differentiate with respect to the policy's parameters only. The gradient
    of the loss is then the negated deterministic policy gradient. For TD3, pass the Q-values of the first critic.

    Args:
        q: `[*B]` float, Q-values of the policy's actions.
        mask: `[*B]` bool, or None if every entry counts.

    Returns: the 0-d loss, and the logs policy_loss and count.
    Gradient: flows through `q`.
    Raises: ValueError naming the argument, if shapes differ or `mask` is not bool.
    Source: Silver et al. 2014, "Deterministic policy gradient algorithms", eq. 9; Lillicrap et al. 2016,
        arXiv:1509.02971, eq. 6.

    >>> float(dpg_loss(torch.tensor([1.0, 3.0]), torch.tensor([True, True]))[0])
    -2.0
    """
    mask = checked_mask(mask, q=q)
    dtype, (q,) = common_dtype(q), widened(q)
    loss = -masked_mean(q, mask)
    return loss.to(dtype), {"policy_loss": loss.detach(), "count": mask.sum().to(loss.dtype)}


def soft_actor_loss(
    log_prob: Tensor, q: Tensor, mask: Tensor | None = None, *, temperature: Scalar
) -> tuple[Tensor, Logs]:
    """Return the actor loss of soft actor-critic for reparametrised actions.

        mean(temperature * log_prob - min_c(q[c]))

    Compute `q` at the action drawn from the policy, and differentiate with respect to the policy's parameters only.

    Args:
        log_prob: `[*B]` float, log-probability of the drawn action, in nats.
        q: `[C, *B]` float, Q-values of the drawn action, from C critics.
        mask: `[*B]` bool, or None if every entry counts.
        temperature: weight of the entropy, in reward units per nat; `alpha` in the paper.

    Returns: the 0-d loss, and the logs policy_loss, entropy (mean of `-log_prob`, in nats) and count.
    Gradient: flows through `log_prob` and `q` only.
    Raises: ValueError naming the argument, if shapes do not match, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Haarnoja et al. 2018, arXiv:1812.05905, eq. 9.

    >>> q = torch.tensor([[1.0, 5.0], [2.0, 3.0]])
    >>> loss, logs = soft_actor_loss(torch.tensor([-2.0, -4.0]), q, torch.tensor([True, True]), temperature=0.5)
    >>> float(loss), float(logs["entropy"])
    (-3.5, 3.0)
    """
    mask = checked_mask(mask, log_prob=log_prob)
    check_axes(log_prob, before="C", q=q)
    (temperature,) = scalars(temperature=_detached(temperature))
    dtype, (log_prob, q) = common_dtype(log_prob, q), widened(log_prob, q)
    q = q.masked_fill(~mask, 0.0)  # a masked NaN would make the gradient of the minimum NaN
    loss = masked_mean(temperature * log_prob - q.amin(0), mask)
    return loss.to(dtype), {
        "policy_loss": loss.detach(),
        "entropy": -masked_mean(log_prob.detach(), mask),
        "count": mask.sum().to(loss.dtype),
    }


def discrete_soft_actor_loss(
    logits: Tensor, q: Tensor, mask: Tensor | None = None, *, temperature: Scalar
) -> tuple[Tensor, Logs]:
    """Return the actor loss of soft actor-critic for discrete actions, as an expectation over all actions.

        p = softmax(logits)
        mean(sum_a(p[a] * (temperature * log(p[a]) - min_c(q[c, a]))))

    Actions of probability 0 contribute 0 to the sum.

    Args:
        logits: `[*B, A]` float, logits of the policy.
        q: `[C, *B, A]` float, Q-values of all actions, from C critics.
        mask: `[*B]` bool, or None if every entry counts.
        temperature: weight of the entropy, in reward units per nat; `alpha` in the paper.

    Returns: the 0-d loss, and the logs policy_loss, entropy (mean entropy of the policy, in nats) and count.
    Gradient: flows through `logits` only.
    Raises: ValueError naming the argument, if shapes do not match, `mask` is not bool or a hyperparameter is not 0-d.
    Source: Christodoulou 2019, arXiv:1910.07207, eq. 12.

    >>> q = torch.tensor([[[1.0, 3.0]], [[2.0, 2.0]]])
    >>> loss, logs = discrete_soft_actor_loss(torch.zeros(1, 2), q, torch.tensor([True]), temperature=0.0)
    >>> float(loss), round(float(logs["entropy"]), 4)
    (-1.5, 0.6931)
    """
    check_tensors(logits=logits, **{} if mask is None else {"mask": mask})
    mask = logits.new_ones(logits.shape[:-1], dtype=torch.bool) if mask is None else mask
    check_axes(mask, after="A", logits=logits)
    check_bool(mask=mask)
    check_axes(logits, before="C", q=q)
    (temperature,) = scalars(temperature=_detached(temperature))
    dtype, (logits, q) = common_dtype(logits, q), widened(logits, q.detach())
    log_p = F.log_softmax(logits.masked_fill(~mask.unsqueeze(-1), 0.0), -1)
    p = log_p.exp()
    log_p = log_p.masked_fill(p == 0.0, 0.0)
    cost = (temperature * log_p - q.amin(0)).masked_fill((p == 0.0) | ~mask.unsqueeze(-1), 0.0)
    loss = masked_mean((p * cost).sum(-1), mask)
    return loss.to(dtype), {
        "policy_loss": loss.detach(),
        "entropy": -masked_mean((p * log_p).detach().sum(-1), mask),
        "count": mask.sum().to(loss.dtype),
    }


def temperature_loss(
    log_temperature: Tensor, log_prob: Tensor, mask: Tensor | None = None, *, target_entropy: Scalar
) -> tuple[Tensor, Logs]:
    """Return the loss that moves the temperature so that the policy's entropy approaches `target_entropy`.

        temperature = exp(log_temperature)
        -temperature * mean(log_prob + target_entropy)

    The temperature falls while the entropy is above `target_entropy`, and rises while the entropy is below.

    Args:
        log_temperature: 0-d float, the logarithm of the temperature. This logarithm is the learnt parameter.
        log_prob: `[*B]` float, log-probability of actions drawn from the current policy, in nats. For discrete actions,
            pass the policy's entropy times -1, which is the mean log-probability.
        mask: `[*B]` bool, or None if every entry counts.
        target_entropy: the desired entropy of the policy, in nats.

    Returns: the 0-d loss, and the logs temperature_loss, temperature and count.
    Gradient: flows through `log_temperature` only.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool, or `log_temperature` or a
        hyperparameter is not 0-d.
    Source: Haarnoja et al. 2018, arXiv:1812.05905, eq. 18.

    >>> loss, logs = temperature_loss(torch.tensor(0.0), torch.tensor([-1.0, -4.0]), torch.tensor([True, True]),
    ...     target_entropy=2.0)
    >>> float(loss), float(logs["temperature"])
    (0.5, 1.0)
    """
    mask = checked_mask(mask, log_prob=log_prob)
    scalars(log_temperature=log_temperature)
    (target_entropy,) = scalars(target_entropy=_detached(target_entropy))
    dtype = common_dtype(log_temperature, log_prob)
    log_temperature, log_prob = widened(log_temperature, log_prob.detach())
    temperature = torch.exp(log_temperature)
    loss = -temperature * masked_mean(log_prob + target_entropy, mask)
    return loss.to(dtype), {
        "temperature_loss": loss.detach(),
        "temperature": temperature.detach(),
        "count": mask.sum().to(loss.dtype),
    }
