"""Kernels of distributional reinforcement learning: C51, quantile regression (QR-DQN) and HL-Gauss.

A categorical distribution assigns the probabilities `probs`, of shape `[*B, K]`, to the returns `support`, of shape
`[K]`. These returns are called atoms. A quantile distribution consists of K equally probable returns `quantiles`, of
shape `[*B, K]`. The mean of either distribution is the Q-value.

Where `terminated` is True or `gamma` is 0, the distributions of the next state are not read and may hold NaN. Functions
that compute targets do not detach their inputs. The losses detach their targets.

Half-precision inputs are converted to float32. Results have the common dtype of the float inputs, as given by
`torch.promote_types`. Hyperparameters, `next_q_selector` and `weight` do not affect this dtype.
"""

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, scalars, step_discounts, widened
from ecrl.kernels.masked_stats import masked_mean
from ecrl.kernels.q_losses import huber
from ecrl.kernels.reverse_scan import in_dtype
from ecrl.types import Logs, Scalar, check_axes, check_bool, check_tensors, checked_mask, same_shape


def categorical_project(probs: Tensor, atoms: Tensor, support: Tensor) -> Tensor:
    """Project a categorical distribution from the returns in `atoms` onto the returns in `support`.

        x       = clip(atoms[k], support[0], support[M - 1])
        w[j, k] = max(0, 1 - |x - support[j]| / gap)
        p[j]    = sum_k(w[j, k] * probs[k])

    `gap` is the distance from `support[j]` to the next support point in the direction of `x`. Each atom's probability
    is therefore split between the two neighbouring support points, and the nearer point gets more. The projection
    preserves the mean of the clipped atoms.

    The function uses no scatter operation, so its results are bitwise equal in every run. In eager mode, intermediate
    results of shape `[*B, M, K]` take memory and time. A compiled graph does not store these intermediate results.

    Args:
        probs: `[*B, K]` float, probabilities of the returns in `atoms`.
        atoms: `[*B, K]` float, returns in any order. An infinite return is clipped to the first or last point of
            `support`.
        support: `[M]` float, returns in ascending order, with equal or unequal spacing.

    Returns: `[*B, M]`, with the same sum as `probs`.
    Gradient: flows through all three arguments.
    Raises: ValueError naming the arguments whose shapes do not match.
    Source: Bellemare et al. 2017, arXiv:1707.06887, eq. 7; for an arbitrary support, Rowland et al. 2018,
        arXiv:1802.08163.

    >>> categorical_project(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 9.0]), torch.tensor([0.0, 1.0, 2.0]))
    tensor([0.3750, 0.1250, 0.5000])
    """
    same_shape(probs=probs, atoms=atoms)
    _check_vector("support", support)
    dtype = common_dtype(probs, atoms, support)
    return _project(*widened(probs, atoms, support)).to(dtype)


def _check_vector(name: str, x: Tensor) -> None:
    check_tensors(**{name: x})
    if x.ndim != 1:
        raise ValueError(f"{name} has shape {list(x.shape)}, expected one axis")


def _project(probs: Tensor, atoms: Tensor, support: Tensor) -> Tensor:
    """Compute `categorical_project`, but return float32 for half-precision inputs."""
    end = support.new_full((1,), torch.inf)
    gap = torch.cat((end, support.diff(), end)).unsqueeze(-1)  # gap before each point and after the last
    x = torch.minimum(torch.maximum(atoms, support[0]), support[-1]).unsqueeze(-2)
    offset = x - support.unsqueeze(-1)  # [*B, M, K]
    weight = torch.minimum(1.0 + offset / gap[:-1], 1.0 - offset / gap[1:]).clamp(min=0.0)
    return (weight * probs.unsqueeze(-2)).sum(-1)


def _select(x: Tensor, selector: Tensor) -> Tensor:
    """Return the entry of `x` for the action with the largest `selector`.

    `x` has the shape `[*B, A, K]`, `selector` has the shape `[*B, A]`, and the result has the shape `[*B, K]`.
    """
    action = selector.argmax(-1)[..., None, None]
    return x.gather(-2, action.expand(*action.shape[:-1], x.shape[-1])).squeeze(-2)


def categorical_target(
    reward: Tensor, next_probs: Tensor, terminated: Tensor, support: Tensor, *, gamma: Scalar
) -> Tensor:
    """Return the categorical target distribution for a next action that the caller has chosen.

    The return distribution of the next state is discounted, shifted by the reward, and projected onto `support`.

        atoms[k] = reward + gamma * support[k] * not terminated
        categorical_project(next_probs, atoms, support)

    Args:
        reward: `[*B]` float, in reward units.
        next_probs: `[*B, K]` float, return distribution of the next state and the next action.
        terminated: `[*B]` bool.
        support: `[K]` float, returns in ascending order.
        gamma: discount, or a `[*B]` tensor with the discount of each transition.

    Returns: probabilities `[*B, K]`.
    Gradient: flows through `reward`, `next_probs` and `support`.
    Raises: ValueError naming the argument, if shapes do not match or `terminated` is not bool.
    Source: Bellemare et al. 2017, arXiv:1707.06887, eq. 7.

    >>> support = torch.tensor([0.0, 1.0, 2.0])
    >>> categorical_target(torch.tensor([1.0]), torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([False]), support,
    ...     gamma=0.25)
    tensor([[0.0000, 0.5000, 0.5000]])
    """
    same_shape(reward=reward, terminated=terminated)
    check_bool(terminated=terminated)
    check_axes(reward, after="K", next_probs=next_probs)
    _check_support(support, next_probs)
    dtype = common_dtype(reward, next_probs, support)
    reward, next_probs, support = widened(reward, next_probs, support)
    return _categorical_target(reward, next_probs, terminated, support, gamma).to(dtype)


def _check_support(support: Tensor, dist: Tensor) -> None:
    check_tensors(support=support)
    if support.shape != dist.shape[-1:]:
        raise ValueError(f"support has shape {list(support.shape)}, expected {list(dist.shape[-1:])}, one per atom")


def _categorical_target(
    reward: Tensor, next_probs: Tensor, terminated: Tensor, support: Tensor, gamma: Scalar
) -> Tensor:
    """Compute `categorical_target`, but return float32 for half-precision inputs."""
    discount = _discount(reward, terminated, gamma).unsqueeze(-1)
    next_probs = next_probs.masked_fill(discount == 0.0, 1.0 / len(support))  # every atom then equals `reward`
    return _project(next_probs, reward.unsqueeze(-1) + discount * support, support)


def _discount(reward: Tensor, terminated: Tensor, gamma: Scalar) -> Tensor:
    """Return `gamma * not terminated`, of shape `[*B]`, in the dtype of `reward`."""
    gamma = in_dtype(step_discounts(gamma, reward), reward)
    return torch.where(terminated, 0.0, gamma).to(reward.dtype)  # pyright: ignore


def categorical_q_target(
    reward: Tensor,
    next_logits: Tensor,
    next_q_selector: Tensor,
    terminated: Tensor,
    support: Tensor,
    *,
    gamma: Scalar,
) -> Tensor:
    """Return the target distribution of C51 for the next action with the largest `next_q_selector`.

        a* = argmax_a(next_q_selector[a])
        categorical_target(reward, softmax(next_logits[a*]), terminated, support, gamma=gamma)

    Args:
        reward: `[*B]` float, in reward units.
        next_logits: `[*B, A, K]` float, logits of each action's return distribution in the next state, from the target
            network.
        next_q_selector: `[*B, A]` float, means of the return distributions that the target network predicts. For the
            target of Double DQN, pass the means from the online network instead.
        terminated: `[*B]` bool.
        support: `[K]` float, returns in ascending order.
        gamma: discount, or a `[*B]` tensor with the discount of each transition.

    Returns: probabilities `[*B, K]`.
    Gradient: flows through `reward`, `next_logits` and `support`.
    Raises: ValueError naming the argument, if shapes do not match or `terminated` is not bool.
    Source: Bellemare et al. 2017, arXiv:1707.06887, algorithm 1; with Double DQN, Hessel et al. 2018,
        arXiv:1710.02298.

    >>> support, logits = torch.tensor([0.0, 1.0]), torch.tensor([[[0.0, 0.0], [-99.0, 99.0]]])
    >>> categorical_q_target(torch.tensor([0.0]), logits, torch.tensor([[0.5, 1.0]]), torch.tensor([False]), support,
    ...     gamma=0.5)
    tensor([[0.5000, 0.5000]])
    """
    same_shape(reward=reward, terminated=terminated)
    check_bool(terminated=terminated)
    check_axes(reward, after="A", next_q_selector=next_q_selector)
    check_axes(next_q_selector, after="K", next_logits=next_logits)
    _check_support(support, next_logits)
    dtype = common_dtype(reward, next_logits, support)
    reward, next_logits, support = widened(reward, next_logits, support)
    unread = _discount(reward, terminated, gamma) == 0.0  # a softmax of NaN has a NaN gradient
    logits = _select(next_logits, next_q_selector).masked_fill(unread.unsqueeze(-1), 0.0)
    return _categorical_target(reward, F.softmax(logits, -1), terminated, support, gamma).to(dtype)


def min_categorical_target(
    reward: Tensor, next_logits: Tensor, terminated: Tensor, support: Tensor, *, gamma: Scalar
) -> Tensor:
    """Return the target distribution of FastTD3, from the critic that predicts the smallest mean return.

        c* = argmin_c(sum_k(softmax(next_logits[c])[k] * support[k]))
        categorical_target(reward, softmax(next_logits[c*]), terminated, support, gamma=gamma)

    With a single critic (C = 1), the result is the target of D4PG.

    Args:
        reward: `[*B]` float, in reward units.
        next_logits: `[C, *B, K]` float, logits of the return distributions that C target critics predict for the next
            action.
        terminated: `[*B]` bool.
        support: `[K]` float, returns in ascending order.
        gamma: discount, or a `[*B]` tensor with the discount of each transition.

    Returns: probabilities `[*B, K]`, the target that all critics share.
    Gradient: flows through `reward`, `next_logits` and `support`.
    Raises: ValueError naming the argument, if shapes do not match or `terminated` is not bool.
    Source: Seo et al. 2025, arXiv:2505.22642; clipped double Q-learning as in Fujimoto et al. 2018, arXiv:1802.09477.

    >>> logits = torch.tensor([[[-99.0, 0.0, -99.0]], [[-99.0, -99.0, 0.0]]])  # the returns 1 and 2
    >>> min_categorical_target(torch.tensor([0.0]), logits, torch.tensor([False]), torch.tensor([0.0, 1.0, 2.0]),
    ...     gamma=0.5)
    tensor([[0.5000, 0.5000, 0.0000]])
    """
    _check_critics(reward, next_logits, terminated, support)
    dtype = common_dtype(reward, next_logits, support)
    reward, next_logits, support = widened(reward, next_logits, support)
    probs = _read_probs(next_logits, _discount(reward, terminated, gamma))
    smallest = (probs * support).sum(-1).argmin(0)[None, ..., None]
    probs = probs.gather(0, smallest.expand(1, *probs.shape[1:])).squeeze(0)
    return _categorical_target(reward, probs, terminated, support, gamma).to(dtype)


def soft_categorical_target(
    reward: Tensor,
    next_logits: Tensor,
    next_log_prob: Tensor,
    terminated: Tensor,
    support: Tensor,
    *,
    gamma: Scalar,
    temperature: Scalar,
) -> Tensor:
    """Return the target distributions of FastSAC: one distribution for each critic, shifted by an entropy bonus.

        atoms[k] = reward + gamma * (support[k] - temperature * next_log_prob) * not terminated
        categorical_project(softmax(next_logits[c]), atoms, support)

    Draw the action in the next state from the current policy, because soft actor-critic has no target policy.

    Args:
        reward: `[*B]` float, in reward units.
        next_logits: `[C, *B, K]` float, logits of the return distributions that C target critics predict for the action
            drawn in the next state.
        next_log_prob: `[*B]` float, log-probability of the action drawn in the next state, in nats.
        terminated: `[*B]` bool.
        support: `[K]` float, returns in ascending order.
        gamma: discount, or a `[*B]` tensor with the discount of each transition.
        temperature: weight of the entropy, in reward units per nat.

    Returns: probabilities `[C, *B, K]`.
    Gradient: flows through `reward`, `next_logits`, `next_log_prob`, `support` and `temperature`.
    Raises: ValueError naming the argument, if shapes do not match, `terminated` is not bool or a hyperparameter other
        than `gamma` is not 0-d.
    Source: Seo et al. 2025, arXiv:2512.01996 (FastSAC); entropy bonus as in Haarnoja et al. 2018, arXiv:1812.05905.

    >>> logits = torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]]).log()  # the returns 0 and 1
    >>> soft_categorical_target(torch.tensor([0.0]), logits, torch.tensor([-1.0]), torch.tensor([False]),
    ...     torch.tensor([0.0, 1.0, 2.0]), gamma=0.5, temperature=1.0).tolist()
    [[[0.5, 0.5, 0.0]], [[0.0, 1.0, 0.0]]]
    """
    same_shape(reward=reward, next_log_prob=next_log_prob)
    (temperature,) = scalars(temperature=temperature)
    _check_critics(reward, next_logits, terminated, support)
    dtype = common_dtype(reward, next_logits, next_log_prob, support)
    reward, next_logits, next_log_prob, support = widened(reward, next_logits, next_log_prob, support)
    discount = _discount(reward, terminated, gamma)
    bonus = -temperature * next_log_prob.masked_fill(discount == 0.0, 0.0)
    atoms = (reward + discount * bonus).unsqueeze(-1) + discount.unsqueeze(-1) * support
    probs = _read_probs(next_logits, discount)
    return _project(probs, atoms.expand(probs.shape), support).to(dtype)


def _check_critics(reward: Tensor, next_logits: Tensor, terminated: Tensor, support: Tensor) -> None:
    """Check the arguments of a function that computes a target from the logits `[C, *B, K]` of C critics."""
    same_shape(reward=reward, terminated=terminated)
    check_bool(terminated=terminated)
    _check_vector("support", support)
    check_axes(reward.unsqueeze(-1).expand(*reward.shape, len(support)), before="C", next_logits=next_logits)


def _read_probs(next_logits: Tensor, discount: Tensor) -> Tensor:
    """Return the softmax of `next_logits`, but uniform probabilities where `discount` is 0.

    `next_logits` and the result have the shape `[C, *B, K]`, and `discount` has the shape `[*B]`.

    Logits whose `discount` is 0 may be NaN, because the target does not read them. A softmax of NaN would make
    gradients NaN.
    """
    return F.softmax(next_logits.masked_fill((discount == 0.0).unsqueeze(-1), 0.0), -1)


def categorical_td_loss(
    logits: Tensor, target: Tensor, weight: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Logs]:
    """Return the C51 loss: the batch mean of the weighted cross-entropy of each critic, summed over the critics.

        sum_c(mean(weight * -sum_k(target[k] * log_softmax(logits[c])[k])))

    For prioritised replay, `categorical_kl(target.log(), logits[c])` gives the priority of each transition, as computed
    from the predictions of critic c.

    Args:
        logits: `[C, *B, K]` float, logits of the return distributions that C critics predict for the actions taken.
        target: `[*B, K]` float, probabilities that all critics share, for example from `categorical_q_target`,
            `min_categorical_target` or `hl_gauss`. If each critic has its own target, as in `soft_categorical_target`,
            call the function for each critic.
        weight: `[*B]` float, importance weights of prioritised replay, or ones for uniform replay.
        mask: `[*B]` bool, or None if every entry counts.

    Returns: the 0-d loss, and the logs q_loss (the loss) and count (the number of unmasked entries). The dtype of the
        loss is the common dtype of `logits` and `target`, whatever the dtype of `weight`.
    Gradient: flows through `logits` only.
    Raises: ValueError naming the argument, if shapes do not match or `mask` is not bool.
    Source: Bellemare et al. 2017, arXiv:1707.06887, algorithm 1.

    >>> one = torch.ones(1)
    >>> loss, logs = categorical_td_loss(torch.zeros(1, 1, 2), torch.tensor([[0.25, 0.75]]), one, one > 0)
    >>> round(float(loss), 4)
    0.6931
    """
    mask = checked_mask(mask, weight=weight)
    check_axes(mask, after="K", target=target)
    check_axes(target, before="C", logits=logits)
    dtype, (logits, target) = common_dtype(logits, target), widened(logits, target.detach())
    weight = weight.detach().to(logits.dtype)
    logits, target = (x.masked_fill(~mask.unsqueeze(-1), 0.0) for x in (logits, target))
    cross_entropy = -(target * F.log_softmax(logits, -1).masked_fill(target == 0.0, 0.0)).sum(-1)
    loss = masked_mean((weight.masked_fill(~mask, 0.0) * cross_entropy).sum(0), mask)
    return loss.to(dtype), {"q_loss": loss.detach(), "count": mask.sum().to(loss.dtype)}


def quantile_midpoints(
    num_quantiles: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """Return the quantile levels of QR-DQN: the midpoints of `num_quantiles` equal intervals of [0, 1].

        (2 i + 1) / (2 num_quantiles),    i = 0 .. num_quantiles - 1

    Args:
        num_quantiles: the number K of quantiles.
        dtype: dtype of the result.
        device: device of the result.

    Returns: `[K]`.
    Gradient: none.
    Source: Dabney et al. 2018, arXiv:1710.10044, lemma 2.

    >>> quantile_midpoints(4)
    tensor([0.1250, 0.3750, 0.6250, 0.8750])
    """
    odd = 2.0 * torch.arange(num_quantiles, dtype=torch.float64, device=device) + 1.0
    return (odd / (2.0 * num_quantiles)).to(dtype)


def quantile_q_target(
    reward: Tensor, next_quantiles: Tensor, next_q_selector: Tensor, terminated: Tensor, *, gamma: Scalar
) -> Tensor:
    """Return the target quantiles of QR-DQN for the next action with the largest `next_q_selector`.

        a* = argmax_a(next_q_selector[a])
        reward + gamma * next_quantiles[a*] * not terminated

    Args:
        reward: `[*B]` float, in reward units.
        next_quantiles: `[*B, A, K]` float, quantiles of all actions in the next state, from the target network.
        next_q_selector: `[*B, A]` float, means of the quantiles that the target network predicts. For the target of
            Double DQN, pass the means from the online network instead.
        terminated: `[*B]` bool.
        gamma: discount, or a `[*B]` tensor with the discount of each transition.

    Returns: `[*B, K]`.
    Gradient: flows through `reward` and `next_quantiles`.
    Raises: ValueError naming the argument, if shapes do not match or `terminated` is not bool.
    Source: Dabney et al. 2018, arXiv:1710.10044, algorithm 1.

    >>> next_quantiles, q = torch.tensor([[[1.0, 3.0], [2.0, 4.0]]]), torch.tensor([[2.0, 3.0]])
    >>> quantile_q_target(torch.tensor([1.0]), next_quantiles, q, torch.tensor([False]), gamma=0.5)
    tensor([[2., 3.]])
    """
    same_shape(reward=reward, terminated=terminated)
    check_bool(terminated=terminated)
    check_axes(reward, after="A", next_q_selector=next_q_selector)
    check_axes(next_q_selector, after="K", next_quantiles=next_quantiles)
    dtype, (reward, next_quantiles) = common_dtype(reward, next_quantiles), widened(reward, next_quantiles)
    discount = _discount(reward, terminated, gamma).unsqueeze(-1)
    selected = _select(next_quantiles, next_q_selector).masked_fill(discount == 0.0, 0.0)
    return (reward.unsqueeze(-1) + discount * selected).to(dtype)


def quantile_huber_loss(quantiles: Tensor, taus: Tensor, target: Tensor, *, delta: Scalar) -> Tensor:
    """Return the quantile regression loss of each batch entry, with the Huber loss in place of the absolute error.

        u[i, j] = target[j] - quantiles[i]
        sum_i(mean_j(|taus[i] - (u[i, j] < 0)| * huber(u[i, j], delta)))

    The loss of a batch is `masked_mean(weight * quantile_huber_loss(...), mask)`, with `weight` in the dtype of the
    result. If masked entries of `weight` or `target` may hold NaN, fill these entries first, because the gradient would
    be NaN. The result of `quantile_huber_loss` also serves as the priority of each transition.

    Args:
        quantiles: `[*B, K]` float, predicted quantiles.
        taus: quantile levels in [0, 1], of shape `[K]` or `[*B, K]`.
        target: `[*B, M]` float, equally probable target returns.
        delta: size of the error above which the loss is linear, in reward units; `kappa` in the paper.

    Returns: `[*B]`.
    Gradient: flows through `quantiles` only.
    Raises: ValueError naming the argument, if shapes do not match or a hyperparameter is not 0-d.
    Source: Dabney et al. 2018, arXiv:1710.10044, eq. 10 and algorithm 1.

    >>> quantile_huber_loss(torch.tensor([0.0, 2.0]), torch.tensor([0.25, 0.75]), torch.tensor([1.0]), delta=1.0)
    tensor(0.2500)
    """
    check_tensors(quantiles=quantiles, taus=taus)
    if not quantiles.ndim:
        raise ValueError("quantiles has shape [], expected [*B, K]")
    check_axes(quantiles[..., 0], after="M", target=target)
    if taus.shape not in (quantiles.shape, quantiles.shape[-1:]):
        expected = f"{list(quantiles.shape)}, the shape of quantiles, or {list(quantiles.shape[-1:])}"
        raise ValueError(f"taus has shape {list(taus.shape)}, expected {expected}")
    dtype = common_dtype(quantiles, taus, target)
    quantiles, taus, target = widened(quantiles, taus.detach(), target.detach())
    u = target.unsqueeze(-2) - quantiles.unsqueeze(-1)  # [*B, K, M]
    weight = (taus.unsqueeze(-1) - (u < 0.0).to(u.dtype)).abs()
    return (weight * huber(u, delta=delta)).mean(-1).sum(-1).to(dtype)


def hl_gauss(value: Tensor, edges: Tensor, *, sigma: Scalar) -> Tensor:
    """Return the HL-Gauss target: the probability of each bin under a truncated normal distribution around `value`.

        y      = clip(value, edges[0], edges[K])
        cdf[k] = erf((edges[k] - y) / (sqrt(2) * sigma))
        p[k]   = (cdf[k + 1] - cdf[k]) / (cdf[K] - cdf[0])

    Pass the result to `categorical_td_loss` as `target`. The predicted value is the mean of the bin centres under the
    predicted probabilities.

    Args:
        value: `[*B]` float, scalar targets.
        edges: `[K + 1]` float, edges of the K bins in ascending order, in the units of `value`.
        sigma: standard deviation, above 0, in the units of `value`. The paper uses 0.75 times the width of a bin.

    Returns: probabilities `[*B, K]`.
    Gradient: flows through `value` and `edges`.
    Raises: ValueError naming the argument, if `edges` does not have exactly one axis or a hyperparameter is not 0-d.
    Source: Farebrother et al. 2024, arXiv:2403.03950; Imani and White 2018, arXiv:1806.04613.

    >>> hl_gauss(torch.tensor([0.0, 9.0]), torch.tensor([-1.0, 0.0, 1.0]), sigma=0.1)
    tensor([[0.5000, 0.5000],
            [0.0000, 1.0000]])
    """
    check_tensors(value=value)
    _check_vector("edges", edges)
    (sigma,) = scalars(sigma=sigma)
    dtype, (value, edges) = common_dtype(value, edges), widened(value, edges)
    y = torch.minimum(torch.maximum(value, edges[0]), edges[-1]).unsqueeze(-1)
    cdf = torch.erf((edges - y) / (sqrt(2.0) * sigma))
    return (cdf.diff(dim=-1) / (cdf[..., -1:] - cdf[..., :1])).to(dtype)
