"""Return and advantage estimators over time, on `[*B, T]` tensors, time last.

`terminated` stops the value, `done` stops the trace: a time limit bootstraps from `next_value`, the value of the state
that was reached, never from the next episode. `next_value` is not used where `terminated`; it may be NaN there. Nothing
is detached. `ecrl.kernels.reverse_scan` has the only recursion over time.

A term of weight 0 is absent: it may be infinite or NaN. So `gae_lambda` 0 does not read later returns, `gae_lambda` 1
does not read values inside an episode in `td_lambda_returns`, and `gamma` 0 reads rewards and `value` only. No gradient
reaches a hyperparameter through an absent term.

Results have the dtype of `reward`, or the dtype that the inputs promote to if `reward` is not float. Half precision is
computed in float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, exponent_bound, scalars, widened
from ecrl.kernels.reverse_scan import reverse_scan, unseen, wide, with_zero
from ecrl.tracing_state import in_graph
from ecrl.types import Scalar, same_shape


class GAE(NamedTuple):
    """What `gae` returns: `advantage` and `value_target`, each `[*B, T]`."""

    advantage: Tensor
    value_target: Tensor


class VTrace(NamedTuple):
    """What `vtrace` returns: `advantage` and `value_target`, each `[*B, T]`."""

    advantage: Tensor
    value_target: Tensor


_VIEWS_BOOLS = torch.__version__ >= "2.13"
"""Whether inductor is known to view bools as other types; that of torch 2.11 refuses to."""


def _read(mask: Tensor) -> Tensor:
    """The mask, which a graph reads as bytes: inductor fetches bools one at a time, 15 times slower.

    The views go through 16 bits because inductor takes one of 8 as a conversion of what it fetched.
    """
    dense = mask if mask.is_contiguous() else mask.movedim(-1, 0)
    if not _VIEWS_BOOLS or not in_graph() or not dense.is_contiguous():
        return mask
    if mask.numel() % 2 or dense.storage_offset() % 2:
        return mask
    read = dense.reshape(-1).view(torch.int16).view(torch.uint8).view(dense.shape).float() != 0
    return read if dense is mask else read.movedim(0, -1)


def _unless(mask: Tensor, x: Tensor) -> Tensor:
    """`x`, and 0 where `mask`: faster than to copy and to fill."""
    return torch.where(mask, x.new_zeros(()), x)


def _float_dtype(first: Tensor, *others: Tensor) -> torch.dtype:
    """The dtype of results: that of `first` if it is float."""
    return first.dtype if first.is_floating_point() else common_dtype(first, *others)


def discounted_returns(
    reward: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, *, gamma: Scalar
) -> Tensor:
    """Monte-Carlo returns that bootstrap where the trace ends without a true end.

        G[t] = reward[t] + gamma * (next_value[t] * not terminated[t] if done[t] or t = T - 1 else G[t + 1])

    Args:
        reward: `[*B, T]` float, reward units.
        next_value: `[*B, T]` float, V of the state reached, before auto-reset; zeros for no bootstrap.
        terminated: `[*B, T]` bool.
        done: `[*B, T]` bool, `terminated | truncated`.
        gamma: discount per step.

    Returns: `[*B, T]` in the dtype of `reward`.
    Gradient: flows through `reward` and `next_value`.
    Raises: ValueError naming the arguments of a wrong shape; hyperparameters are 0-d.
    Source: Sutton and Barto 2018, eq. 3.8; time limits as in Pardo et al. 2018, arXiv:1712.00378.

    >>> f = torch.tensor([False, False])
    >>> discounted_returns(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 4.0]), f, f, gamma=0.5).tolist()
    [2.5, 3.0]
    """
    same_shape(reward=reward, next_value=next_value, terminated=terminated, done=done)
    (gamma,) = scalars(gamma=gamma)
    dtype, (reward, next_value) = _float_dtype(reward, next_value), widened(reward, next_value)
    terminated, done = _read(terminated), _read(done)
    reached = _unless(with_zero(terminated, gamma), next_value)
    ending = reward + gamma * torch.where(done, reached, reached.new_zeros(()))
    return reverse_scan(ending, wide(gamma), done, reached[..., -1]).to(dtype)


def n_step_returns(
    reward: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, *, gamma: Scalar, n: int
) -> Tensor:
    """Returns over at most `n` rewards, then a bootstrap; cut at `done` and at the end of the array.

        G1[t] = reward[t] + gamma * next_value[t] * not terminated[t]
        Gk[t] = G1[t] if done[t] or t = T - 1 else reward[t] + gamma * G(k-1)[t + 1]

    Args:
        reward: `[*B, T]` float, reward units.
        next_value: `[*B, T]` float, V of the state reached, before auto-reset.
        terminated: `[*B, T]` bool.
        done: `[*B, T]` bool, `terminated | truncated`.
        gamma: discount per step.
        n: number of rewards, at least 1.

    Returns: `[*B, T]` in the dtype of `reward`.
    Gradient: flows through `reward` and `next_value`.
    Raises: ValueError naming the arguments of a wrong shape, or if `n < 1`.
    Source: Sutton and Barto 2018, eq. 7.1.

    >>> f, ones = torch.tensor([False] * 3), torch.ones(3)
    >>> n_step_returns(ones, 8 * ones, f, f, gamma=0.5, n=2).tolist()
    [3.5, 3.5, 5.0]
    """
    same_shape(reward=reward, next_value=next_value, terminated=terminated, done=done)
    (gamma,) = scalars(gamma=gamma)
    if n < 1:
        raise ValueError(f"n_step_returns needs n >= 1, got n={n}")
    dtype, (reward, next_value) = _float_dtype(reward, next_value), widened(reward, next_value)
    one_step = reward + gamma * _unless(with_zero(terminated, gamma), next_value)
    returns, cut = one_step, with_zero(done[..., :-1], gamma)
    for _ in range(min(n, reward.shape[-1]) - 1):
        longer = torch.where(cut, one_step[..., :-1], reward[..., :-1] + gamma * returns[..., 1:])
        returns = torch.cat((longer, one_step[..., -1:]), -1)
    return returns.to(dtype)


def td_lambda_returns(
    reward: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, *, gamma: Scalar, gae_lambda: Scalar
) -> Tensor:
    """The lambda-weighted mean of all n-step returns.

        G[t] = reward[t] + gamma * ((1 - gae_lambda) * next_value[t] + gae_lambda * G[t + 1])
        G[t] = reward[t] + gamma * next_value[t] * not terminated[t]      where done[t] or t = T - 1

    Args:
        reward: `[*B, T]` float, reward units.
        next_value: `[*B, T]` float, V of the state reached, before auto-reset.
        terminated: `[*B, T]` bool.
        done: `[*B, T]` bool, `terminated | truncated`.
        gamma: discount per step.
        gae_lambda: 0 gives one-step targets, 1 Monte-Carlo returns.

    Returns: `[*B, T]` in the dtype of `reward`; equals `gae(...).value_target` where `next_value[t]` is `value[t + 1]`.
    Gradient: flows through `reward` and `next_value`.
    Raises: ValueError naming the arguments of a wrong shape; hyperparameters are 0-d.
    Source: Sutton and Barto 2018, eq. 12.2 and 12.3.

    >>> f = torch.tensor([False, False])
    >>> td_lambda_returns(torch.ones(2), torch.tensor([2.0, 4.0]), f, f, gamma=0.5, gae_lambda=0.5).tolist()
    [2.25, 3.0]
    """
    same_shape(reward=reward, next_value=next_value, terminated=terminated, done=done)
    gamma, gae_lambda = scalars(gamma=gamma, gae_lambda=gae_lambda)
    dtype, (reward, next_value) = _float_dtype(reward, next_value), widened(reward, next_value)
    terminated, done = _read(terminated), _read(done)
    reached = _unless(with_zero(terminated, gamma), next_value)
    weight = 1.0 - gae_lambda
    inside = weight * _unless(with_zero(done, weight), reached)
    mixed = reward + gamma * torch.where(done, reached, inside)
    return reverse_scan(mixed, wide(gamma) * gae_lambda, done, reached[..., -1]).to(dtype)


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    *,
    gamma: Scalar,
    gae_lambda: Scalar,
) -> GAE:
    """Generalised advantage estimate, one backward pass over the last axis.

        delta[t]     = reward[t] + gamma * next_value[t] * not terminated[t] - value[t]
        advantage[t] = delta[t] + gamma * gae_lambda * advantage[t + 1] * not done[t]

    Args:
        reward: `[*B, T]` float, reward units.
        value: `[*B, T]` float, V of the state acted in.
        next_value: `[*B, T]` float, V of the state reached, before auto-reset.
        terminated: `[*B, T]` bool.
        done: `[*B, T]` bool, `terminated | truncated`.
        gamma: discount per step.
        gae_lambda: 0 gives the one-step TD error, 1 the Monte-Carlo advantage.

    Returns: `advantage` and `value_target = advantage + value`, each `[*B, T]` in the dtype of `reward`.
    Gradient: flows through `reward`, `value` and `next_value`; nothing is detached here.
    Raises: ValueError naming the arguments of a wrong shape; hyperparameters are 0-d.
    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; time limits as in Pardo et al. 2018, arXiv:1712.00378.

    >>> t, f = True, False
    >>> gae(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 9.0]),
    ...     torch.tensor([f, t]), torch.tensor([f, t]), gamma=0.5, gae_lambda=1.0).advantage.tolist()
    [-0.5, 0.0]
    """
    same_shape(reward=reward, value=value, next_value=next_value, terminated=terminated, done=done)
    gamma, gae_lambda = scalars(gamma=gamma, gae_lambda=gae_lambda)
    dtype = _float_dtype(reward, value, next_value)
    reward, value, next_value = widened(reward, value, next_value)
    terminated, done = _read(terminated), _read(done)
    reached = _unless(with_zero(terminated, gamma), next_value)
    paid = reward - value
    delta = paid.add_(reached.mul_(gamma)) if unseen(paid, reached, gamma) else paid + gamma * reached
    advantage = reverse_scan(delta, wide(gamma) * gae_lambda, done, torch.zeros_like(delta[..., 0]))
    return GAE(advantage.to(dtype), (advantage + value).to(dtype))


def vtrace(
    log_prob: Tensor,
    old_log_prob: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    *,
    gamma: Scalar,
    gae_lambda: Scalar,
    clip_rho: Scalar,
    clip_c: Scalar,
) -> VTrace:
    """Off-policy corrected value targets and policy-gradient advantages.

        ratio[t]        = exp(min(log_prob[t] - old_log_prob[t], bound))
        rho[t]          = min(clip_rho, ratio[t])
        c[t]            = gae_lambda * min(clip_c, ratio[t])
        delta[t]        = rho[t] * (reward[t] + gamma * next_value[t] * not terminated[t] - value[t])
        error[t]        = delta[t] + gamma * c[t] * error[t + 1] * not done[t]
        value_target[t] = value[t] + error[t]
        advantage[t]    = rho[t] * (reward[t] + gamma * target_next[t] - value[t])
        target_next[t]  = next_value[t] * not terminated[t] if done[t] or t = T - 1 else value_target[t + 1]

    `bound` keeps gradients finite. It is half the logarithm of the dtype's largest number, 44.36 in float32. A
    log-ratio above it counts as `bound`, and no gradient flows through it.

    Args:
        log_prob: `[*B, T]` float, nats, under the policy being learnt.
        old_log_prob: `[*B, T]` float, nats, under the policy that acted.
        reward: `[*B, T]` float, reward units.
        value: `[*B, T]` float, V of the state acted in.
        next_value: `[*B, T]` float, V of the state reached, before auto-reset.
        terminated: `[*B, T]` bool.
        done: `[*B, T]` bool, `terminated | truncated`.
        gamma: discount per step.
        gae_lambda: extra decay of the trace, 1 in the paper.
        clip_rho: bound of the ratio that weights a step.
        clip_c: bound of the ratio that weights the trace.

    Returns: `advantage` and `value_target`, each `[*B, T]` in the dtype of `reward`.
    Gradient: flows through every float argument; nothing is detached here.
    Raises: ValueError naming the arguments of a wrong shape; hyperparameters are 0-d.
    Source: Espeholt et al. 2018, arXiv:1802.01561, eq. 1 and sec. 4.2.

    >>> f, zero = torch.tensor([False, False]), torch.zeros(2)
    >>> vtrace(zero, zero, torch.ones(2), zero, torch.tensor([0.0, 4.0]), f, f,
    ...     gamma=0.5, gae_lambda=1.0, clip_rho=1.0, clip_c=1.0).value_target.tolist()
    [2.5, 3.0]
    """
    same_shape(
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        reward=reward,
        value=value,
        next_value=next_value,
        terminated=terminated,
        done=done,
    )
    gamma, gae_lambda = scalars(gamma=gamma, gae_lambda=gae_lambda)
    clip_rho, clip_c = scalars(clip_rho=clip_rho, clip_c=clip_c)
    dtype = _float_dtype(reward, value, next_value, log_prob, old_log_prob)
    bound = exponent_bound(common_dtype(log_prob, old_log_prob))
    floats = widened(log_prob, old_log_prob, reward, value, next_value)
    log_prob, old_log_prob, reward, value, next_value = floats
    terminated, done = _read(terminated), _read(done)
    ratio = torch.exp((log_prob - old_log_prob).clamp(max=bound))
    rho, c = ratio.clamp(max=clip_rho), gae_lambda * ratio.clamp(max=clip_c)
    reached = _unless(with_zero(terminated, gamma), next_value)
    delta = rho * (reward + gamma * reached - value)
    value_target = value + reverse_scan(delta, gamma * c.double(), done, torch.zeros_like(delta[..., 0]))
    target_next = torch.cat((value_target[..., 1:], reached[..., -1:]), -1)
    advantage = rho * (reward + gamma * torch.where(done, reached, target_next) - value)
    return VTrace(advantage.to(dtype), value_target.to(dtype))


def episode_discounts(done: Tensor, *, gamma: Scalar) -> Tensor:
    """Return the discount of every step, counted from the first step here and again from each episode's start.

        disc[0] = 1;    disc[t + 1] = 1 if done[t] else gamma * disc[t]

    Args:
        done: `[*B, T]` bool.
        gamma: discount per step.

    Returns: `[*B, T]` float, in the dtype of `gamma` (torch's default for a Python number).
    Gradient: flows through `gamma`.
    Raises: ValueError if `gamma` is not a number or a 0-d tensor.

    >>> episode_discounts(torch.tensor([False, False, True, False, False]), gamma=0.5).tolist()
    [1.0, 0.5, 0.25, 1.0, 0.5]
    """
    dtype = gamma.dtype if isinstance(gamma, Tensor) else torch.get_default_dtype()
    (gamma,) = scalars(gamma=gamma)
    steps = torch.arange(done.shape[-1], device=done.device).expand(done.shape)
    begins = torch.where(done, steps + 1, 0)[..., :-1].cummax(-1).values
    begins = torch.cat((torch.zeros_like(steps[..., :1]), begins), -1)
    return torch.pow(gamma, steps - begins).to(dtype)
