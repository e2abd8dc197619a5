"""Return and advantage estimators over time, on `[*B, T]` tensors, time last.

`terminated` stops the value, `done` stops the trace: a time limit bootstraps from `next_value`, the value of the state
that was reached, never from the next episode. `next_value` is not used where `terminated`; it may be NaN there. Nothing
is detached. `_reverse_scan` is the only recursion over time.
"""

from math import isqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ecrl.types import Scalar, same_shape

_MANY_ROWS = 512


class GAE(NamedTuple):
    """What `gae` returns, each `[*B, T]`."""

    advantage: Tensor
    value_target: Tensor


class VTrace(NamedTuple):
    """What `vtrace` returns, each `[*B, T]`."""

    advantage: Tensor
    value_target: Tensor


def _reverse_scan(x: Tensor, decay: Scalar, cut: Tensor, last: Tensor) -> Tensor:
    """`y[t] = x[t] + decay[t] * y[t + 1] * not cut[t]`, `y[T] = last`, over the last axis; time-major inside.

    Runs in float64: rounding `decay` to float32 errs the same way at every step, which adds up over long rollouts.
    Blocks of about sqrt(T) steps are summed side by side, as if nothing came after each; then what comes after is
    carried from block to block. So a graph of it has about 2 sqrt(T) steps, not T.
    """
    decay = torch.as_tensor(decay, dtype=torch.float64, device=x.device).expand_as(x)
    length = _block(x)
    missing = -x.shape[-1] % length
    reversed_blocks = (
        F.pad(a.flip(-1).movedim(-1, 0), [0] * 2 * (x.ndim - 1) + [0, missing]).unflatten(0, (-1, length)).unbind(1)
        for a in (x.double(), decay, cut)
    )
    sums, products, open_ = [], [], []
    for x_s, decay_s, cut_s in zip(*reversed_blocks, strict=True):  # each `[blocks, *B]`
        before = sums[-1].masked_fill(cut_s, 0.0) if sums else 0.0  # filled first: NaN behind a cut stays there
        sums.append(_kept(x_s + decay_s * before))
        products.append(_kept(decay_s * products[-1] if products else decay_s.clone()))
        open_.append(_kept(~cut_s & open_[-1] if open_ else ~cut_s))
    carries = [last.double()]
    for at_end, product, is_open in zip(sums[-1], products[-1], open_[-1], strict=True):
        carries.append(_kept(at_end + product * carries[-1].masked_fill(~is_open, 0.0)))
    carry = torch.stack(carries[:-1]).unsqueeze(1)
    sums, products, open_ = (torch.stack(a, 1) for a in (sums, products, open_))
    y = (sums + products * carry.masked_fill(~open_, 0.0)).to(x.dtype)
    return y.flatten(0, 1)[: x.shape[-1]].movedim(0, -1).flip(-1)


def _kept(y: Tensor) -> Tensor:
    """A step of a graph that is put in memory: inductor would compute it anew in each of the steps that follow."""
    return y.as_strided(y.shape, y.stride()) if _in_graph() else y


def _in_graph() -> bool:
    """Whether a graph is being made that is compiled as a whole (`ecrl.compile`)."""
    return not torch.compiler.is_compiling() and get_proxy_mode() is not None


def _block(x: Tensor) -> int:
    """Steps per block: few for a graph and for a few rows; in eager, many rows keep a core busy step by step."""
    length, rows = x.shape[-1], x[..., 0].numel()
    traced = torch.compiler.is_compiling() or _in_graph()
    return length if rows >= _MANY_ROWS and not traced else isqrt(length)


def _wide(scalar: Scalar) -> Scalar:
    return scalar.double() if isinstance(scalar, Tensor) else scalar


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
    Raises: ValueError naming the arguments whose shapes differ.
    Source: Sutton and Barto 2018, eq. 3.8; time limits as in Pardo et al. 2018, arXiv:1712.00378.

    >>> f = torch.tensor([False, False])
    >>> discounted_returns(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 4.0]), f, f, gamma=0.5).tolist()
    [2.5, 3.0]
    """
    same_shape(reward=reward, next_value=next_value, terminated=terminated, done=done)
    reached = next_value.masked_fill(terminated, 0.0)
    return _reverse_scan(reward + gamma * reached.masked_fill(~done, 0.0), gamma, done, reached[..., -1])


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
    Raises: ValueError naming the arguments whose shapes differ, or if `n < 1`.
    Source: Sutton and Barto 2018, eq. 7.1.

    >>> f, ones = torch.tensor([False] * 3), torch.ones(3)
    >>> n_step_returns(ones, 8 * ones, f, f, gamma=0.5, n=2).tolist()
    [3.5, 3.5, 5.0]
    """
    same_shape(reward=reward, next_value=next_value, terminated=terminated, done=done)
    if n < 1:
        raise ValueError(f"n_step_returns needs n >= 1, got n={n}")
    one_step = reward + gamma * next_value.masked_fill(terminated, 0.0)
    returns = one_step
    for _ in range(min(n, reward.shape[-1]) - 1):
        longer = torch.where(done[..., :-1], one_step[..., :-1], reward[..., :-1] + gamma * returns[..., 1:])
        returns = torch.cat((longer, one_step[..., -1:]), -1)
    return returns


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
    Raises: ValueError naming the arguments whose shapes differ.
    Source: Sutton and Barto 2018, eq. 12.2 and 12.3.

    >>> f = torch.tensor([False, False])
    >>> td_lambda_returns(torch.ones(2), torch.tensor([2.0, 4.0]), f, f, gamma=0.5, gae_lambda=0.5).tolist()
    [2.25, 3.0]
    """
    same_shape(reward=reward, next_value=next_value, terminated=terminated, done=done)
    reached = next_value.masked_fill(terminated, 0.0)
    mixed = reward + gamma * torch.where(done, reached, (1.0 - gae_lambda) * reached)
    return _reverse_scan(mixed, _wide(gamma) * gae_lambda, done, reached[..., -1])


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
    Raises: ValueError naming the arguments whose shapes differ.
    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; time limits as in Pardo et al. 2018, arXiv:1712.00378.

    >>> t, f = True, False
    >>> gae(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 9.0]),
    ...     torch.tensor([f, t]), torch.tensor([f, t]), gamma=0.5, gae_lambda=1.0).advantage.tolist()
    [-0.5, 0.0]
    """
    same_shape(reward=reward, value=value, next_value=next_value, terminated=terminated, done=done)
    delta = reward + gamma * next_value.masked_fill(terminated, 0.0) - value
    advantage = _reverse_scan(delta, _wide(gamma) * gae_lambda, done, torch.zeros_like(delta[..., 0]))
    return GAE(advantage, advantage + value)


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

        ratio[t]        = exp(log_prob[t] - old_log_prob[t])
        rho[t]          = min(clip_rho, ratio[t])
        c[t]            = gae_lambda * min(clip_c, ratio[t])
        delta[t]        = rho[t] * (reward[t] + gamma * next_value[t] * not terminated[t] - value[t])
        error[t]        = delta[t] + gamma * c[t] * error[t + 1] * not done[t]
        value_target[t] = value[t] + error[t]
        advantage[t]    = rho[t] * (reward[t] + gamma * target_next[t] - value[t])
        target_next[t]  = next_value[t] * not terminated[t] if done[t] or t = T - 1 else value_target[t + 1]

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
    Raises: ValueError naming the arguments whose shapes differ.
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
    ratio = torch.exp(log_prob - old_log_prob)
    rho, c = ratio.clamp(max=clip_rho), gae_lambda * ratio.clamp(max=clip_c)
    reached = next_value.masked_fill(terminated, 0.0)
    delta = rho * (reward + gamma * reached - value)
    value_target = value + _reverse_scan(delta, gamma * c.double(), done, torch.zeros_like(delta[..., 0]))
    target_next = torch.cat((value_target[..., 1:], reached[..., -1:]), -1)
    advantage = rho * (reward + gamma * torch.where(done, reached, target_next) - value)
    return VTrace(advantage, value_target)
