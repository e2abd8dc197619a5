"""Estimators of returns and advantages on `[*B, T]` tensors. Time is the last axis, and T is at least 1.

If your tensors have time first, `[T, *B]`, as in CleanRL and Stable-Baselines3, pass `x.movedim(0, -1)`, and move the
axis of each result back with `movedim(-1, 0)`. Moving an axis copies nothing.

The `next_value` of a `terminated` step is not read and may be NaN, because no state follows. Steps after a `done` step
belong to another episode, so they do not contribute to the returns of earlier steps. If a time limit truncates an
episode, the estimators bootstrap from `next_value`, the value of the last state before the reset. The functions do not
detach their inputs, so gradients also flow through hyperparameters that are tensors. In most estimators,
`ecrl.kernels.reverse_scan` runs the recursion over time.

`gamma` is a number, a 0-d tensor, or a `[*B, T]` tensor with the discount `gamma[t]` of each step. If a step executes a
chunk of k actions, pass `gamma ** k` as its discount.

A term with weight 0 is left out, so the term may be infinite or NaN:

- With a `gae_lambda` or `trace` of 0, the returns of later steps are not read.
- With a `gae_lambda` or `trace` of 1, `td_lambda_returns` and `q_lambda` do not read values inside an episode.
- With a `gamma` of 0, the values and returns of later steps are not read.

The `advantage` of `vtrace` is an exception: inside an episode, it reads the value target of the next step even if
`gae_lambda` is 0.

A term that is left out contributes no gradient to `gamma`, `gae_lambda` and `trace`.

Results have the dtype of `reward`. If `reward` is not float, results have the common dtype of the inputs, as given by
`torch.promote_types`. Half-precision inputs are converted to float32 first.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, discounts, exponent_bound, scalars, step_discounts, widened
from ecrl.kernels.reverse_scan import as_float64, in_dtype, or_zero, reverse_scan, varies
from ecrl.native import recurrences
from ecrl.types import Scalar, check_axes, check_bool, check_steps, check_tensors, same_shape


class GAE(NamedTuple):
    """Result of `gae`: `advantage` and `value_target`, each of shape `[*B, T]`."""

    advantage: Tensor
    value_target: Tensor


class VTrace(NamedTuple):
    """Result of `vtrace`: `advantage` and `value_target`, each of shape `[*B, T]`."""

    advantage: Tensor
    value_target: Tensor


def _widen(first: Tensor, *others: Tensor) -> tuple[torch.dtype, list[Tensor]]:
    """Return the dtype of the results, and the tensors converted to a common dtype of float32 or wider."""
    dtype = first.dtype if first.is_floating_point() else common_dtype(first, *others)
    return dtype, widened(first, *others)


def _zero_where(mask: Tensor, x: Tensor) -> Tensor:
    """Set `x` to 0 where `mask` is True, using `torch.where` because it is faster than `masked_fill`."""
    return torch.where(mask, x.new_zeros(()), x)


def discounted_returns(
    reward: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, *, gamma: Scalar
) -> Tensor:
    """Return Monte-Carlo returns that bootstrap from `next_value` at time limits and at the last step.

        G[t] = reward[t] + gamma[t] * (next_value[t] * not terminated[t] if done[t] or t = T - 1 else G[t + 1])

    For tensors with time first, `[T, *B]`, pass `x.movedim(0, -1)`, and apply `movedim(-1, 0)` to the result.

    Args:
        reward: `[*B, T]` float, in reward units.
        next_value: `[*B, T]` float, value of the state that the action led to, before auto-reset. Pass zeros for
            returns without bootstrapping.
        terminated: `[*B, T]` bool.
        done: `[*B, T]` bool, `terminated | truncated`.
        gamma: discount, or a `[*B, T]` tensor with the discount of each step.

    Returns: `[*B, T]` in the dtype of `reward`.
    Gradient: flows through `reward` and `next_value`.
    Raises: ValueError naming the argument, if shapes differ, `terminated` or `done` is not bool or `gamma` has a wrong
        shape.
    Source: Sutton and Barto 2018, eq. 3.8; time limits as in Pardo et al. 2018, arXiv:1712.00378.

    >>> f = torch.tensor([False, False])
    >>> discounted_returns(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 4.0]), f, f, gamma=0.5).tolist()
    [2.5, 3.0]
    """
    same_shape(reward=reward, next_value=next_value, terminated=terminated, done=done)
    check_bool(terminated=terminated, done=done)
    check_steps(reward=reward)
    gamma = step_discounts(gamma, reward)
    dtype, (reward, next_value) = _widen(reward, next_value)
    reached = _zero_where(or_zero(terminated, gamma), next_value)
    ending = reward + in_dtype(gamma, reward) * _zero_where(~done, reached)
    return reverse_scan(ending, gamma, done, reached[..., -1]).to(dtype)


def n_step_returns(
    reward: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, *, gamma: Scalar, n: int
) -> Tensor:
    """Return the n-step returns `Gn`: discounted sums of up to `n` rewards plus a bootstrap value.

    A sum ends at a `done` step and at the last step, even if it has fewer than `n` rewards there.

        G1[t] = reward[t] + gamma[t] * next_value[t] * not terminated[t]
        Gk[t] = G1[t] if done[t] or t = T - 1 else reward[t] + gamma[t] * G(k-1)[t + 1],    k = 2 .. n

    For tensors with time first, `[T, *B]`, pass `x.movedim(0, -1)`, and apply `movedim(-1, 0)` to the result.

    Args:
        reward: `[*B, T]` float, in reward units.
        next_value: `[*B, T]` float, value of the state that the action led to, before auto-reset.
        terminated: `[*B, T]` bool.
        done: `[*B, T]` bool, `terminated | truncated`.
        gamma: discount, or a `[*B, T]` tensor with the discount of each step.
        n: largest number of rewards in a sum, at least 1.

    Returns: `[*B, T]` in the dtype of `reward`.
    Gradient: flows through `reward` and `next_value`.
    Raises: ValueError naming the argument, if a shape is wrong, `terminated` or `done` is not bool or `n < 1`.
    Source: Sutton and Barto 2018, eq. 7.1.

    >>> f, ones = torch.tensor([False] * 3), torch.ones(3)
    >>> n_step_returns(ones, 8 * ones, f, f, gamma=0.5, n=2).tolist()
    [3.5, 3.5, 5.0]
    """
    same_shape(reward=reward, next_value=next_value, terminated=terminated, done=done)
    check_bool(terminated=terminated, done=done)
    check_steps(reward=reward)
    gamma = step_discounts(gamma, reward)
    if n < 1:
        raise ValueError(f"n_step_returns needs n >= 1, got n={n}")
    dtype, (reward, next_value) = _widen(reward, next_value)
    gamma = in_dtype(gamma, reward)
    one_step = reward + gamma * _zero_where(or_zero(terminated, gamma), next_value)
    gamma = gamma[..., :-1] if varies(gamma) else gamma  # pyright: ignore
    returns, cut = one_step, or_zero(done[..., :-1], gamma)
    for _ in range(min(n, reward.shape[-1]) - 1):
        longer = torch.where(cut, one_step[..., :-1], reward[..., :-1] + gamma * returns[..., 1:])
        returns = torch.cat((longer, one_step[..., -1:]), -1)
    return returns.to(dtype)


def td_lambda_returns(
    reward: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, *, gamma: Scalar, gae_lambda: Scalar
) -> Tensor:
    """Return the lambda-weighted mean of all n-step returns.

        G[t] = reward[t] + gamma[t] * ((1 - gae_lambda) * next_value[t] + gae_lambda * G[t + 1])
        G[t] = reward[t] + gamma[t] * next_value[t] * not terminated[t]      where done[t] or t = T - 1

    For tensors with time first, `[T, *B]`, pass `x.movedim(0, -1)`, and apply `movedim(-1, 0)` to the result.

    Args:
        reward: `[*B, T]` float, in reward units.
        next_value: `[*B, T]` float, value of the state that the action led to, before auto-reset.
        terminated: `[*B, T]` bool.
        done: `[*B, T]` bool, `terminated | truncated`.
        gamma: discount, or a `[*B, T]` tensor with the discount of each step.
        gae_lambda: the parameter lambda; 0 gives one-step targets and 1 gives Monte-Carlo returns.

    Returns: `[*B, T]` in the dtype of `reward`. The result equals `gae(...).value_target` if `next_value[t]` is
        `value[t + 1]` inside each episode.
    Gradient: flows through `reward` and `next_value`.
    Raises: ValueError naming the argument, if shapes differ, `terminated` or `done` is not bool or a hyperparameter
        other than `gamma` is not 0-d.
    Source: Sutton and Barto 2018, eq. 12.2 and 12.3.

    >>> f = torch.tensor([False, False])
    >>> td_lambda_returns(torch.ones(2), torch.tensor([2.0, 4.0]), f, f, gamma=0.5, gae_lambda=0.5).tolist()
    [2.25, 3.0]
    """
    same_shape(reward=reward, next_value=next_value, terminated=terminated, done=done)
    check_bool(terminated=terminated, done=done)
    check_steps(reward=reward)
    gamma, (gae_lambda,) = step_discounts(gamma, reward), discounts(gae_lambda=gae_lambda)
    dtype, (reward, next_value) = _widen(reward, next_value)
    reached = _zero_where(or_zero(terminated, gamma), next_value)
    inside = (1.0 - gae_lambda) * _zero_where(or_zero(done, 1.0 - gae_lambda), reached)
    mixed = reward + in_dtype(gamma, reward) * torch.where(done, reached, inside)
    return reverse_scan(mixed, gamma * gae_lambda, done, reached[..., -1]).to(dtype)


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
    """Compute the generalised advantage estimates and their value targets, from the last step to the first.

        delta[t]     = reward[t] + gamma[t] * next_value[t] * not terminated[t] - value[t]
        advantage[t] = delta[t] + gamma[t] * gae_lambda * advantage[t + 1] * not done[t]

    For tensors with time first, `[T, *B]`, as in CleanRL and Stable-Baselines3, pass `x.movedim(0, -1)`, and apply
    `movedim(-1, 0)` to each result. The flag `dones[t]` of CleanRL, and `episode_starts[t]` of Stable-Baselines3, marks
    an end before step t, so shift the flags by one step: `done[t] = dones[t + 1]`.

    Args:
        reward: `[*B, T]` float, in reward units.
        value: `[*B, T]` float, value of the state in which the action was taken.
        next_value: `[*B, T]` float, value of the state that the action led to, before auto-reset.
        terminated: `[*B, T]` bool.
        done: `[*B, T]` bool, `terminated | truncated`.
        gamma: discount, or a `[*B, T]` tensor with the discount of each step.
        gae_lambda: the parameter lambda; 0 gives the one-step TD error and 1 gives the Monte-Carlo advantage.

    Returns: `advantage` and `value_target = advantage + value`, each `[*B, T]` in the dtype of `reward`.
    Gradient: flows through `reward`, `value` and `next_value`.
    Raises: ValueError naming the argument, if shapes differ, `terminated` or `done` is not bool or a hyperparameter
        other than `gamma` is not 0-d.
    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; time limits as in Pardo et al. 2018, arXiv:1712.00378.

    >>> t, f = True, False
    >>> gae(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 9.0]),
    ...     torch.tensor([f, t]), torch.tensor([f, t]), gamma=0.5, gae_lambda=1.0).advantage.tolist()
    [-0.5, 0.0]

    With time first, `[T, N]`:

    >>> steps = [torch.ones(2, 1), torch.zeros(2, 1), torch.zeros(2, 1), *2 * [torch.zeros(2, 1, dtype=torch.bool)]]
    >>> gae(*(x.movedim(0, -1) for x in steps), gamma=0.5, gae_lambda=1.0).advantage.movedim(-1, 0).tolist()
    [[1.5], [1.0]]
    """
    same_shape(reward=reward, value=value, next_value=next_value, terminated=terminated, done=done)
    check_bool(terminated=terminated, done=done)
    check_steps(reward=reward)
    gamma, (gae_lambda,) = step_discounts(gamma, reward), discounts(gae_lambda=gae_lambda)
    dtype, (reward, value, next_value) = _widen(reward, value, next_value)
    if recurrences.can_run(reward, value, next_value) and not recurrences.is_differentiated(
        reward, value, next_value, gamma, gae_lambda
    ):  # one pass in C++
        discount, decay = as_float64(gamma, reward), as_float64(gamma * gae_lambda, reward)
        advantage, value_target = recurrences.gae(reward, value, next_value, terminated, done, discount, decay)
        return GAE(advantage.to(dtype), value_target.to(dtype))
    reached = _zero_where(or_zero(terminated, gamma), next_value)
    delta = reward - value + in_dtype(gamma, reward) * reached
    advantage = reverse_scan(delta, gamma * gae_lambda, done)
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
    clip_pg_rho: Scalar,
) -> VTrace:
    """Return the value targets and the policy-gradient advantages of V-trace, which corrects for off-policy data.

        ratio[t]        = exp(min(log_prob[t] - old_log_prob[t], bound))
        rho[t]          = min(clip_rho, ratio[t])
        c[t]            = gae_lambda * min(clip_c, ratio[t])
        delta[t]        = rho[t] * (reward[t] + gamma[t] * next_value[t] * not terminated[t] - value[t])
        error[t]        = delta[t] + gamma[t] * c[t] * error[t + 1] * not done[t]
        value_target[t] = value[t] + error[t]
        pg_rho[t]       = min(clip_pg_rho, ratio[t])
        advantage[t]    = pg_rho[t] * (reward[t] + gamma[t] * target_next[t] - value[t])
        target_next[t]  = next_value[t] * not terminated[t] if done[t] or t = T - 1 else value_target[t + 1]

    `bound` keeps gradients finite and is half the logarithm of the dtype's largest finite value, 44.36 in float32. No
    gradient flows through a log-ratio above `bound`.

    For tensors with time first, `[T, *B]`, pass `x.movedim(0, -1)`, and apply `movedim(-1, 0)` to each result.

    Args:
        log_prob: `[*B, T]` float, log-probability in nats under the policy being trained.
        old_log_prob: `[*B, T]` float, log-probability in nats under the policy that acted.
        reward: `[*B, T]` float, in reward units.
        value: `[*B, T]` float, value of the state in which the action was taken.
        next_value: `[*B, T]` float, value of the state that the action led to, before auto-reset.
        terminated: `[*B, T]` bool.
        done: `[*B, T]` bool, `terminated | truncated`.
        gamma: discount, or a `[*B, T]` tensor with the discount of each step.
        gae_lambda: the parameter lambda, a factor of `c`. The paper uses 1.
        clip_rho: upper bound of the ratio in `rho`.
        clip_c: upper bound of the ratio in `c`.
        clip_pg_rho: upper bound of the ratio in the advantage. The paper uses `clip_rho`.

    Returns: `advantage` and `value_target`, each `[*B, T]` in the dtype of `reward`.
    Gradient: flows through every float argument.
    Raises: ValueError naming the argument, if shapes differ, `terminated` or `done` is not bool or a hyperparameter
        other than `gamma` is not 0-d.
    Source: Espeholt et al. 2018, arXiv:1802.01561, eq. 1 and sec. 4.2.

    >>> f, zero = torch.tensor([False, False]), torch.zeros(2)
    >>> vtrace(zero, zero, torch.ones(2), zero, torch.tensor([0.0, 4.0]), f, f,
    ...     gamma=0.5, gae_lambda=1.0, clip_rho=1.0, clip_c=1.0, clip_pg_rho=1.0).value_target.tolist()
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
    check_bool(terminated=terminated, done=done)
    check_steps(reward=reward)
    gamma, (gae_lambda,) = step_discounts(gamma, reward), discounts(gae_lambda=gae_lambda)
    clip_rho, clip_c, clip_pg_rho = scalars(clip_rho=clip_rho, clip_c=clip_c, clip_pg_rho=clip_pg_rho)
    bound = exponent_bound(common_dtype(log_prob, old_log_prob))
    dtype, floats = _widen(reward, value, next_value, log_prob, old_log_prob)
    reward, value, next_value, log_prob, old_log_prob = floats
    ratio = torch.exp((log_prob - old_log_prob).clamp(max=bound))
    rho, c = ratio.clamp(max=clip_rho), gae_lambda * ratio.clamp(max=clip_c)
    reached, discount = _zero_where(or_zero(terminated, gamma), next_value), in_dtype(gamma, reward)
    delta = rho * (reward + discount * reached - value)
    value_target = value + reverse_scan(delta, gamma * c.double(), done)
    target_next = torch.cat((value_target[..., 1:], reached[..., -1:]), -1)
    target_next = _zero_where(or_zero(done, gamma), target_next)
    td_error = reward + discount * torch.where(done, reached, target_next) - value
    advantage = ratio.clamp(max=clip_pg_rho) * td_error
    return VTrace(advantage.to(dtype), value_target.to(dtype))


def upgo_returns(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, *, gamma: Scalar
) -> Tensor:
    """Return the targets of upgoing policy updates (UPGO), which bootstrap before the first action that does badly.

        one_step[t] = reward[t] + gamma[t] * next_value[t] * not terminated[t]
        G[t] = reward[t] + gamma[t] * G[t + 1]      if one_step[t + 1] >= value[t + 1]
        G[t] = one_step[t]                          otherwise, and where done[t] or t = T - 1

    The action of step t + 1 does badly if `one_step[t + 1]` is below `value[t + 1]`. The advantage of the paper is
    `upgo_returns(...) - value`. If the data are off-policy, the paper weights the advantage as in `vtrace`.

    For tensors with time first, `[T, *B]`, pass `x.movedim(0, -1)`, and apply `movedim(-1, 0)` to the result.

    Args:
        reward: `[*B, T]` float, in reward units.
        value: `[*B, T]` float, value of the state in which the action was taken, used only in the condition.
        next_value: `[*B, T]` float, value of the state that the action led to, before auto-reset.
        terminated: `[*B, T]` bool.
        done: `[*B, T]` bool, `terminated | truncated`.
        gamma: discount, or a `[*B, T]` tensor with the discount of each step.

    Returns: `[*B, T]` in the dtype of `reward`.
    Gradient: flows through `reward` and `next_value`.
    Raises: ValueError naming the argument, if shapes differ, `terminated` or `done` is not bool or `gamma` has a wrong
        shape.
    Source: Vinyals et al. 2019, "Grandmaster level in StarCraft II using multi-agent reinforcement learning", methods.

    >>> f, value = torch.tensor([False, False]), torch.tensor([0.0, 2.0])
    >>> upgo_returns(torch.ones(2), value, torch.tensor([2.0, 4.0]), f, f, gamma=0.5).tolist()
    [2.5, 3.0]
    >>> upgo_returns(torch.ones(2), value, torch.tensor([2.0, 0.0]), f, f, gamma=0.5).tolist()
    [2.0, 1.0]
    """
    same_shape(reward=reward, value=value, next_value=next_value, terminated=terminated, done=done)
    check_bool(terminated=terminated, done=done)
    check_steps(reward=reward)
    gamma = step_discounts(gamma, reward)
    dtype, (reward, value, next_value) = _widen(reward, value, next_value)
    reached = _zero_where(or_zero(terminated, gamma), next_value)
    one_step = reward + in_dtype(gamma, reward) * reached
    follows = torch.cat((one_step[..., 1:] >= value[..., 1:], torch.zeros_like(done[..., :1])), -1)
    cut = done | ~follows
    return reverse_scan(torch.where(cut, one_step, reward), gamma, cut).to(dtype)


def q_lambda(
    reward: Tensor, next_q: Tensor, terminated: Tensor, done: Tensor, *, gamma: Scalar, trace: Scalar
) -> Tensor:
    """Return the targets of Peng's Q(lambda): lambda-returns that bootstrap from the largest next Q-values.

        next_value[t] = max_a(next_q[t, a])
        G[t] = reward[t] + gamma[t] * ((1 - trace) * next_value[t] + trace * G[t + 1])
        G[t] = reward[t] + gamma[t] * next_value[t] * not terminated[t]      where done[t] or t = T - 1

    As in PQN, actions that are not greedy do not cut the trace.

    For tensors with time first, `[T, *B]` and `[T, *B, A]`, pass `x.movedim(0, reward.ndim - 1)`, and apply
    `movedim(-1, 0)` to the result.

    Args:
        reward: `[*B, T]` float, in reward units.
        next_q: `[*B, T, A]` float, Q-values of all actions in the state that the action led to, before auto-reset.
        terminated: `[*B, T]` bool.
        done: `[*B, T]` bool, `terminated | truncated`.
        gamma: discount, or a `[*B, T]` tensor with the discount of each step.
        trace: the parameter lambda; 0 gives one-step targets and 1 gives Monte-Carlo returns.

    Returns: `[*B, T]` in the dtype of `reward`.
    Gradient: flows through `reward` and `next_q`.
    Raises: ValueError naming the argument, if shapes do not match, `terminated` or `done` is not bool or a
        hyperparameter other than `gamma` is not 0-d.
    Source: Peng and Williams 1996, "Incremental multi-step Q-learning"; Gallici et al. 2024, arXiv:2407.04811.

    >>> f, next_q = torch.tensor([False, False]), torch.tensor([[2.0, 0.0], [1.0, 4.0]])
    >>> q_lambda(torch.ones(2), next_q, f, f, gamma=0.5, trace=0.5).tolist()
    [2.25, 3.0]
    """
    check_tensors(reward=reward)
    check_axes(reward, after="A", next_q=next_q)
    (trace,) = discounts(trace=trace)
    return td_lambda_returns(reward, next_q.max(-1).values, terminated, done, gamma=gamma, gae_lambda=trace)


def retrace(
    reward: Tensor,
    next_q_taken: Tensor,
    next_v: Tensor,
    log_rho: Tensor,
    terminated: Tensor,
    done: Tensor,
    *,
    gamma: Scalar,
    trace: Scalar,
) -> Tensor:
    """Return the targets of Retrace(lambda), which are off-policy corrected returns for action values.

        c[t] = trace * min(1, exp(log_rho[t]))
        G[t] = reward[t] + gamma[t] * (next_v[t] + c[t + 1] * (G[t + 1] - next_q_taken[t]))
        G[t] = reward[t] + gamma[t] * next_v[t] * not terminated[t]          where done[t] or t = T - 1

    For tensors with time first, `[T, *B]`, pass `x.movedim(0, -1)`, and apply `movedim(-1, 0)` to the result.

    Args:
        reward: `[*B, T]` float, in reward units.
        next_q_taken: `[*B, T]` float, Q-value of the next state and the action of step t + 1. Entries where `done[t]`
            is True or `t = T - 1` are not read.
        next_v: `[*B, T]` float, value of the state that the action led to, before auto-reset. The value is the mean
            Q-value under the policy being trained.
        log_rho: `[*B, T]` float, log-ratio of the action of step t, in nats. The log-ratio is the log-probability under
            the policy being trained minus the log-probability under the policy that acted. `log_rho[0]` is not read.
        terminated: `[*B, T]` bool.
        done: `[*B, T]` bool, `terminated | truncated`.
        gamma: discount, or a `[*B, T]` tensor with the discount of each step.
        trace: the parameter lambda; 0 gives one-step targets.

    Returns: `[*B, T]` in the dtype of `reward`.
    Gradient: flows through `reward`, `next_q_taken`, `next_v` and `log_rho`.
    Raises: ValueError naming the argument, if shapes differ, `terminated` or `done` is not bool or a hyperparameter
        other than `gamma` is not 0-d.
    Source: Munos et al. 2016, arXiv:1606.02647, eq. 3, with the trace coefficients of Retrace(lambda).

    >>> f, zero = torch.tensor([False, False]), torch.zeros(2)
    >>> retrace(torch.ones(2), zero, torch.tensor([2.0, 4.0]), zero, f, f, gamma=0.5, trace=1.0).tolist()
    [3.5, 3.0]
    """
    same_shape(
        reward=reward, next_q_taken=next_q_taken, next_v=next_v, log_rho=log_rho, terminated=terminated, done=done
    )
    check_bool(terminated=terminated, done=done)
    check_steps(reward=reward)
    gamma, (trace,) = step_discounts(gamma, reward), discounts(trace=trace)
    dtype, (reward, next_q_taken, next_v, log_rho) = _widen(reward, next_q_taken, next_v, log_rho)
    next_log_rho = torch.cat((log_rho[..., 1:], log_rho.new_full(log_rho[..., :1].shape, -torch.inf)), -1)
    next_c = trace * torch.exp(next_log_rho.masked_fill(done, -torch.inf).clamp(max=0.0))
    next_v = _zero_where(or_zero(terminated, gamma), next_v)
    next_q_taken = _zero_where(or_zero(next_c == 0.0, gamma), next_q_taken)
    corrected = reward + in_dtype(gamma, reward) * (next_v - next_c * next_q_taken)
    return reverse_scan(corrected, gamma * next_c.double(), done).to(dtype)


def episode_discounts(done: Tensor, *, gamma: Scalar) -> Tensor:
    """Return the cumulative discount of every step, starting from 1 in each episode.

        disc[0] = 1;    disc[t + 1] = 1 if done[t] else gamma[t] * disc[t]

    For tensors with time first, `[T, *B]`, pass `x.movedim(0, -1)`, and apply `movedim(-1, 0)` to the result.

    Args:
        done: `[*B, T]` bool.
        gamma: discount, or a `[*B, T]` tensor with the discount of each step.

    Returns: `[*B, T]` float, in the dtype of `gamma` (torch's default float dtype for a Python number).
    Gradient: flows through `gamma`.
    Raises: ValueError if `done` is not bool, or if `gamma` is not a number, a 0-d tensor or a tensor with the shape of
        `done`.

    >>> episode_discounts(torch.tensor([False, False, True, False, False]), gamma=0.5).tolist()
    [1.0, 0.5, 0.25, 1.0, 0.5]
    """
    check_bool(done=done)
    dtype = gamma.dtype if isinstance(gamma, Tensor) else torch.get_default_dtype()
    if varies(gamma) and gamma.shape == done.shape:  # pyright: ignore
        return _products(done, gamma.double()).to(dtype)  # pyright: ignore
    (gamma,) = scalars(gamma=gamma)
    steps = torch.arange(done.shape[-1], device=done.device).expand(done.shape)
    starts = torch.where(done, steps + 1, 0)[..., :-1].cummax(-1).values
    starts = torch.cat((torch.zeros_like(steps[..., :1]), starts), -1)
    return torch.pow(gamma, steps - starts).to(dtype)


def _products(done: Tensor, gamma: Tensor) -> Tensor:
    """Compute `episode_discounts` for a tensor `gamma` with one value per step, by a recursion forwards in time."""
    is_first = torch.cat((torch.ones_like(done[..., :1]), done[..., :-1]), -1)
    decay = torch.cat((torch.ones_like(gamma[..., :1]), gamma[..., :-1]), -1)
    first = is_first.to(gamma.dtype)
    return reverse_scan(first.flip(-1), decay.flip(-1), is_first.flip(-1)).flip(-1)
