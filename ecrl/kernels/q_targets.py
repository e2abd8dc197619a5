"""One-step targets for action values, as in Q-learning, DQN, TD3 and soft actor-critic.

All targets have the form below. The kernels differ in `next_value`, the value of the state that the action led to. In
addition, `munchausen_target` adds a bonus to the reward.

    reward + gamma * next_value * not terminated

`gamma` is a number, a 0-d tensor, or a `[*B]` tensor with the discount of each transition. For an n-step target, pass
the sum of n discounted rewards as `reward`, `gamma ** n` as `gamma`, and values of the state after n steps. If a time
limit ended the episode, pass False as `terminated`, and values of the state that was reached.

Where `terminated` is True or `gamma` is 0, the values of the next state are not read and may be infinite or NaN. The
functions do not detach their inputs. The losses in `ecrl.kernels.q_losses` detach their targets.

Results have the common dtype of the float arguments, as given by `torch.promote_types`. Hyperparameters,
`next_q_selector` and the bounds of `smoothed_action` do not affect this dtype. Half-precision inputs are converted to
float32 first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, scalars, step_discounts, widened
from ecrl.kernels.exploration import clip_to_bounds
from ecrl.kernels.reverse_scan import in_dtype, or_zero
from ecrl.types import Scalar, check_axes, check_bool, same_shape


def _target(reward: Tensor, next_value: Tensor, terminated: Tensor, gamma: Scalar) -> Tensor:
    """Return `reward + gamma * next_value * not terminated`."""
    gamma = step_discounts(gamma, reward)
    return reward + in_dtype(gamma, reward) * next_value.masked_fill(or_zero(terminated, gamma), 0.0)


def _fill_unread(x: Tensor, reward: Tensor, terminated: Tensor, gamma: Scalar) -> Tensor:
    """Return a copy of `x` with 0 in the entries that the target does not read.

    `x` has the shape `[*B]`, `[*B, A]` or `[C, *B, A]`. A NaN in an entry that is not read would make gradients NaN.
    """
    unread = or_zero(terminated, step_discounts(gamma, reward))
    return x.masked_fill(unread if x.ndim == reward.ndim else unread.unsqueeze(-1), 0.0)


def _expectation(probs: Tensor, x: Tensor) -> Tensor:
    """Return the sum of `probs * x` over the last axis. Entries of `x` with probability 0 may hold any value."""
    return (probs * x.masked_fill(probs == 0.0, 0.0)).sum(-1)


def q_target(reward: Tensor, next_q: Tensor, terminated: Tensor, *, gamma: Scalar) -> Tensor:
    """Return the target of Q-learning and DQN, which uses the largest Q-value of the next state.

        reward + gamma * max_a(next_q[a]) * not terminated

    Args:
        reward: `[*B]` float, in reward units.
        next_q: `[*B, A]` float, Q-values of all actions in the next state. In DQN, the target network computes
            `next_q`.
        terminated: `[*B]` bool.
        gamma: discount, or a `[*B]` tensor with the discount of each transition.

    Returns: `[*B]`.
    Gradient: flows through `reward` and `next_q`.
    Raises: ValueError naming the argument, if shapes do not match or `terminated` is not bool.
    Source: Watkins and Dayan 1992, "Q-learning"; Mnih et al. 2013, arXiv:1312.5602, algorithm 1.

    >>> q_target(torch.tensor([1.0]), torch.tensor([[2.0, 4.0]]), torch.tensor([False]), gamma=0.5)
    tensor([3.])
    """
    same_shape(reward=reward, terminated=terminated)
    check_bool(terminated=terminated)
    check_axes(reward, after="A", next_q=next_q)
    dtype, (reward, next_q) = common_dtype(reward, next_q), widened(reward, next_q)
    return _target(reward, next_q.max(-1).values, terminated, gamma).to(dtype)


def double_q_target(
    reward: Tensor, next_q: Tensor, next_q_selector: Tensor, terminated: Tensor, *, gamma: Scalar
) -> Tensor:
    """Return the target of Double DQN, where one network selects the next action and the other network evaluates it.

        a* = argmax_a(next_q_selector[a])
        reward + gamma * next_q[a*] * not terminated

    Args:
        reward: `[*B]` float, in reward units.
        next_q: `[*B, A]` float, Q-values of all actions in the next state, from the target network.
        next_q_selector: `[*B, A]` float, Q-values of all actions in the next state, from the online network.
        terminated: `[*B]` bool.
        gamma: discount, or a `[*B]` tensor with the discount of each transition.

    Returns: `[*B]`.
    Gradient: flows through `reward` and `next_q`.
    Raises: ValueError naming the argument, if shapes do not match or `terminated` is not bool.
    Source: van Hasselt et al. 2016, arXiv:1509.06461, eq. 4.

    >>> double_q_target(torch.tensor([1.0]), torch.tensor([[2.0, 4.0]]), torch.tensor([[1.0, 0.0]]),
    ...     torch.tensor([False]), gamma=0.5)
    tensor([2.])
    """
    same_shape(reward=reward, terminated=terminated)
    check_bool(terminated=terminated)
    check_axes(reward, after="A", next_q=next_q, next_q_selector=next_q_selector)
    dtype, (reward, next_q) = common_dtype(reward, next_q), widened(reward, next_q)
    next_action = next_q_selector.argmax(-1, keepdim=True)
    return _target(reward, next_q.gather(-1, next_action).squeeze(-1), terminated, gamma).to(dtype)


def expected_q_target(
    reward: Tensor, next_q: Tensor, next_probs: Tensor, terminated: Tensor, *, gamma: Scalar
) -> Tensor:
    """Return the target of Expected SARSA, which uses the mean Q-value of the next state under a policy.

        reward + gamma * sum_a(next_probs[a] * next_q[a]) * not terminated

    The Q-value of an action with probability 0 is not read.

    Args:
        reward: `[*B]` float, in reward units.
        next_q: `[*B, A]` float, Q-values of all actions in the next state.
        next_probs: `[*B, A]` float, probabilities of the actions in the next state.
        terminated: `[*B]` bool.
        gamma: discount, or a `[*B]` tensor with the discount of each transition.

    Returns: `[*B]`.
    Gradient: flows through `reward`, `next_q` and `next_probs`.
    Raises: ValueError naming the argument, if shapes do not match or `terminated` is not bool.
    Source: Sutton and Barto 2018, eq. 6.9.

    >>> half = torch.tensor([[0.5, 0.5]])
    >>> expected_q_target(torch.tensor([1.0]), torch.tensor([[2.0, 4.0]]), half, torch.tensor([False]), gamma=0.5)
    tensor([2.5000])
    """
    same_shape(reward=reward, terminated=terminated)
    check_bool(terminated=terminated)
    check_axes(reward, after="A", next_q=next_q, next_probs=next_probs)
    dtype = common_dtype(reward, next_q, next_probs)
    reward, next_q, next_probs = widened(reward, next_q, next_probs)
    next_q, next_probs = (_fill_unread(x, reward, terminated, gamma) for x in (next_q, next_probs))
    return _target(reward, _expectation(next_probs, next_q), terminated, gamma).to(dtype)


def munchausen_target(
    reward: Tensor,
    q: Tensor,
    action: Tensor,
    next_q: Tensor,
    terminated: Tensor,
    *,
    gamma: Scalar,
    temperature: Scalar,
    munchausen_coef: Scalar,
    clip_value_min: Scalar,
) -> Tensor:
    """Return the target of Munchausen DQN: a soft target plus the scaled and clipped log-probability of `action`.

        log_pi     = log_softmax(q / temperature)
        bonus      = munchausen_coef * clip(temperature * log_pi[action], clip_value_min, 0)
        next_value = temperature * logsumexp_a(next_q[a] / temperature)
        reward + bonus + gamma * next_value * not terminated

    With `pi = softmax(next_q / temperature)`, `next_value` equals the expression
    `sum_a(pi[a] * (next_q[a] - temperature * log(pi[a])))` of the paper.

    Args:
        reward: `[*B]` float, in reward units.
        q: `[*B, A]` float, Q-values of all actions in the state in which `action` was taken, from the target network.
        action: `[*B]` int64.
        next_q: `[*B, A]` float, Q-values of all actions in the next state, from the target network.
        terminated: `[*B]` bool.
        gamma: discount, or a `[*B]` tensor with the discount of each transition.
        temperature: temperature of the softmax, above 0, in reward units; `tau` in the paper.
        munchausen_coef: weight of the bonus; `alpha` in the paper.
        clip_value_min: lower bound of `temperature * log_pi[action]`, in reward units; `l_0` in the paper.

    Returns: `[*B]`.
    Gradient: flows through `reward`, `q`, `next_q` and `temperature`.
    Raises: ValueError naming the argument, if shapes do not match, `terminated` is not bool or a hyperparameter other
        than `gamma` is not 0-d.
    Source: Vieillard et al. 2020, arXiv:2007.14430, the target of M-DQN with the clipped log-policy.

    >>> zeros, action = torch.zeros(1, 2), torch.tensor([0])
    >>> munchausen_target(torch.tensor([1.0]), zeros, action, zeros, torch.tensor([True]),
    ...     gamma=0.5, temperature=1.0, munchausen_coef=0.5, clip_value_min=-1.0)
    tensor([0.6534])
    """
    same_shape(reward=reward, action=action, terminated=terminated)
    check_bool(terminated=terminated)
    check_axes(reward, after="A", q=q, next_q=next_q)
    temperature, munchausen_coef, clip_value_min = scalars(
        temperature=temperature, munchausen_coef=munchausen_coef, clip_value_min=clip_value_min
    )
    dtype, (reward, q, next_q) = common_dtype(reward, q, next_q), widened(reward, q, next_q)
    log_pi = F.log_softmax(q / temperature, -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)
    bonus = munchausen_coef * (temperature * log_pi).clamp(min=clip_value_min).clamp(max=0.0)
    next_q = _fill_unread(next_q, reward, terminated, gamma)
    next_value = temperature * torch.logsumexp(next_q / temperature, -1)
    return _target(reward + bonus, next_value, terminated, gamma).to(dtype)


def min_q_target(reward: Tensor, next_q: Tensor, terminated: Tensor, *, gamma: Scalar) -> Tensor:
    """Return the target of TD3, which uses the smallest Q-value of C critics. With C = 1, it is the target of DDPG.

        reward + gamma * min_c(next_q[c]) * not terminated

    Args:
        reward: `[*B]` float, in reward units.
        next_q: `[C, *B]` float, Q-values of the target policy's action in the next state, from C target critics.
        terminated: `[*B]` bool.
        gamma: discount, or a `[*B]` tensor with the discount of each transition.

    Returns: `[*B]`.
    Gradient: flows through `reward` and `next_q`.
    Raises: ValueError naming the argument, if shapes do not match or `terminated` is not bool.
    Source: Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1; Lillicrap et al. 2016, arXiv:1509.02971, algorithm 1.

    >>> min_q_target(torch.tensor([1.0]), torch.tensor([[2.0], [4.0]]), torch.tensor([False]), gamma=0.5)
    tensor([2.])
    """
    same_shape(reward=reward, terminated=terminated)
    check_bool(terminated=terminated)
    check_axes(reward, before="C", next_q=next_q)
    dtype, (reward, next_q) = common_dtype(reward, next_q), widened(reward, next_q)
    return _target(reward, next_q.min(0).values, terminated, gamma).to(dtype)


def soft_min_q_target(
    reward: Tensor, next_q: Tensor, next_log_prob: Tensor, terminated: Tensor, *, gamma: Scalar, temperature: Scalar
) -> Tensor:
    """Return the target of soft actor-critic: the smallest of the critics' values, plus an entropy bonus.

        reward + gamma * (min_c(next_q[c]) - temperature * next_log_prob) * not terminated

    Draw the action in the next state from the current policy, because soft actor-critic has no target policy.

    Args:
        reward: `[*B]` float, in reward units.
        next_q: `[C, *B]` float, Q-values of the action drawn in the next state, from C target critics.
        next_log_prob: `[*B]` float, log-probability of the action drawn in the next state, in nats.
        terminated: `[*B]` bool.
        gamma: discount, or a `[*B]` tensor with the discount of each transition.
        temperature: weight of the entropy, in reward units per nat; `alpha` in the paper.

    Returns: `[*B]`.
    Gradient: flows through `reward`, `next_q`, `next_log_prob` and `temperature`.
    Raises: ValueError naming the argument, if shapes do not match, `terminated` is not bool or a hyperparameter other
        than `gamma` is not 0-d.
    Source: Haarnoja et al. 2018, arXiv:1812.05905, eq. 2, 3 and 5.

    >>> soft_min_q_target(torch.tensor([1.0]), torch.tensor([[2.0], [4.0]]), torch.tensor([-2.0]),
    ...     torch.tensor([False]), gamma=0.5, temperature=1.0)
    tensor([3.])
    """
    same_shape(reward=reward, next_log_prob=next_log_prob, terminated=terminated)
    check_bool(terminated=terminated)
    check_axes(reward, before="C", next_q=next_q)
    (temperature,) = scalars(temperature=temperature)
    dtype = common_dtype(reward, next_q, next_log_prob)
    reward, next_q, next_log_prob = widened(reward, next_q, next_log_prob)
    next_log_prob = _fill_unread(next_log_prob, reward, terminated, gamma)
    next_value = next_q.min(0).values - temperature * next_log_prob
    return _target(reward, next_value, terminated, gamma).to(dtype)


def soft_q_target(
    reward: Tensor, next_q: Tensor, next_logits: Tensor, terminated: Tensor, *, gamma: Scalar, temperature: Scalar
) -> Tensor:
    """Return the target of soft actor-critic for discrete actions, as an expectation over the next action.

        p = softmax(next_logits)
        next_value = sum_a(p[a] * (min_c(next_q[c, a]) - temperature * log(p[a])))
        reward + gamma * next_value * not terminated

    Actions of probability 0 contribute 0 to the sum.

    Args:
        reward: `[*B]` float, in reward units.
        next_q: `[C, *B, A]` float, Q-values of all actions in the next state, from C target critics.
        next_logits: `[*B, A]` float, logits of the current policy in the next state.
        terminated: `[*B]` bool.
        gamma: discount, or a `[*B]` tensor with the discount of each transition.
        temperature: weight of the entropy, in reward units per nat; `alpha` in the paper.

    Returns: `[*B]`.
    Gradient: flows through `reward`, `next_q`, `next_logits` and `temperature`.
    Raises: ValueError naming the argument, if shapes do not match, `terminated` is not bool or a hyperparameter other
        than `gamma` is not 0-d.
    Source: Christodoulou 2019, arXiv:1910.07207, eq. 10.

    >>> next_q = torch.tensor([[[2.0, 4.0]], [[3.0, 3.0]]])
    >>> soft_q_target(torch.tensor([1.0]), next_q, torch.zeros(1, 2), torch.tensor([False]), gamma=0.5, temperature=0.0)
    tensor([2.2500])
    """
    same_shape(reward=reward, terminated=terminated)
    check_bool(terminated=terminated)
    check_axes(reward, after="A", next_logits=next_logits)
    check_axes(next_logits, before="C", next_q=next_q)
    (temperature,) = scalars(temperature=temperature)
    dtype = common_dtype(reward, next_q, next_logits)
    reward, next_q, next_logits = widened(reward, next_q, next_logits)
    next_q, next_logits = (_fill_unread(x, reward, terminated, gamma) for x in (next_q, next_logits))
    log_p = F.log_softmax(next_logits, -1)
    next_value = _expectation(log_p.exp(), next_q.min(0).values - temperature * log_p)
    return _target(reward, next_value, terminated, gamma).to(dtype)


def smoothed_action(
    action: Tensor, noise: Tensor, low: Scalar, high: Scalar, *, policy_noise: Scalar, noise_clip: Scalar
) -> Tensor:
    """Return the action at which TD3 evaluates the target critics: the target policy's action plus clipped noise.

        clip(action + clip(policy_noise * noise, -noise_clip, noise_clip), low, high)

    Args:
        action: `[*B, D]` float, the target policy's action in the next state.
        noise: `[*B, D]` float, standard normal noise.
        low: lower bound of the action, a number or a tensor that broadcasts to `action`.
        high: upper bound of the action, a number or a tensor that broadcasts to `action`.
        policy_noise: standard deviation of the noise, in the units of `action`.
        noise_clip: largest absolute value of the noise, in the units of `action`.

    Returns: `[*B, D]`.
    Gradient: flows through `action`, where the result is inside the bounds. The gradient also flows through `noise`
        there, unless the noise is clipped.
    Raises: ValueError naming the argument, if shapes do not match or a hyperparameter is not 0-d.
    Source: Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1 (target policy smoothing).

    >>> smoothed_action(torch.tensor([0.0, 0.9]), torch.tensor([4.0, 1.0]), -1.0, 1.0, policy_noise=0.2, noise_clip=0.5)
    tensor([0.5000, 1.0000])
    """
    same_shape(action=action, noise=noise)
    policy_noise, noise_clip = scalars(policy_noise=policy_noise, noise_clip=noise_clip)
    dtype, (action, noise) = common_dtype(action, noise), widened(action, noise)
    clipped = (policy_noise * noise).clamp(-noise_clip, noise_clip)  # pyright: ignore
    return clip_to_bounds(action + clipped, low, high).to(dtype)
