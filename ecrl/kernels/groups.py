"""Group-relative advantages, which compare each environment with the other environments of its group.

Group-relative advantages need no critic. Scores have the shape `[N, *F]`, with N environments, and with axes `*F` such
as time. A group consists of `group_size` consecutive environments. The entries at each index of the axes `*F` form
their own groups, so a return is compared only with returns of the same time step. The advantages of a group are 0 if
fewer than two members are unmasked, or if the scores of the unmasked members differ only by rounding.
"""

from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, rounding, scalars, widened
from ecrl.kernels.rollout_estimators import compute_returns
from ecrl.types import Scalar, check_bool, check_rollout, checked_mask


def group_advantages(score: Tensor, mask: Tensor | None = None, *, group_size: int, eps: Scalar) -> Tensor:
    """Standardise `score` in each group of `group_size` consecutive entries, for each index of the trailing axes `*F`.

        advantage = (score - mean_g(score)) / (std_g(score) + eps)        mean and std over unmasked members

    Args:
        score: `[N, *F]` float, in reward units. Masked entries may hold any value, including NaN.
        mask: `[N, *F]` bool, or None if every entry counts.
        group_size: number of members per group, at least 2 and a divisor of N.
        eps: constant added to the standard deviation, in reward units.

    Returns: `[N, *F]` in the dtype of `score`. Half-precision scores are converted to float32 first. Masked entries are
        0. The advantages of a group are 0 if fewer than two members are unmasked, or if the scores differ only by
        rounding. Scores differ only by rounding if their standard deviation is at most `rounding` times the mean of
        |score|. Here `rounding` is 9.5e-7 in float32, 1e-3 in float16 and 8e-3 in bfloat16
        (`ecrl.kernels.dtypes.rounding`).
    Gradient: flows through `score`.
    Raises: ValueError if `group_size` is below 2 or does not divide N. ValueError naming the argument, if shapes
        differ, `mask` is not bool or `eps` is not 0-d.
    Source: Shao et al. 2024, arXiv:2402.03300, sec. 4.1.2. The variance is the sum of squared deviations divided by the
        count, as in numpy. TRL divides by the count minus 1.

    >>> group_advantages(torch.tensor([1.0, 3.0]), torch.tensor([True, True]), group_size=2, eps=0.0).tolist()
    [-1.0, 1.0]
    """
    (eps,) = scalars(eps=eps)
    group = _group_stats(score, mask, group_size)
    std = torch.sqrt(group.variance.masked_fill(group.flat, 1.0))  # filled first: the gradient of sqrt at 0 is infinite
    return _ungrouped(group.centred / (std + eps), group, score)


def group_centered(score: Tensor, mask: Tensor | None = None, *, group_size: int) -> Tensor:
    """Subtract the mean of each group of `group_size` consecutive entries, for each index of the trailing axes `*F`.

        advantage = score - mean_g(score)        mean over unmasked members

    Args:
        score: `[N, *F]` float, in reward units. Masked entries may hold any value, including NaN.
        mask: `[N, *F]` bool, or None if every entry counts.
        group_size: number of members per group, at least 2 and a divisor of N.

    Returns: `[N, *F]` in the dtype of `score`, in reward units. Masked entries are 0. The advantages of a group are 0
        in the same cases as in `group_advantages`.
    Gradient: flows through `score`.
    Raises: ValueError if `group_size` is below 2 or does not divide N. ValueError naming the argument, if shapes differ
        or `mask` is not bool.
    Source: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, sec. 3.2.

    >>> group_centered(torch.tensor([1.0, 3.0]), torch.tensor([True, True]), group_size=2).tolist()
    [-1.0, 1.0]
    """
    group = _group_stats(score, mask, group_size)
    return _ungrouped(group.centred, group, score)


def leave_one_out(score: Tensor, mask: Tensor | None = None, *, group_size: int) -> Tensor:
    """Subtract from each entry the mean of the other members of its group, for each index of the trailing axes `*F`.

        advantage = score - mean of the other unmasked members
                  = (score - mean_g(score)) * n / (n - 1),    n = number of unmasked members

    Args:
        score: `[N, *F]` float, in reward units. Masked entries may hold any value, including NaN.
        mask: `[N, *F]` bool, or None if every entry counts.
        group_size: number of members per group, at least 2 and a divisor of N.

    Returns: `[N, *F]` in the dtype of `score`, in reward units. Masked entries are 0. The advantages of a group are 0
        in the same cases as in `group_advantages`.
    Gradient: flows through `score`.
    Raises: ValueError if `group_size` is below 2 or does not divide N. ValueError naming the argument, if shapes differ
        or `mask` is not bool.
    Source: Ahmadian et al. 2024 (RLOO), arXiv:2402.14740, sec. 2.3.

    >>> leave_one_out(torch.tensor([1.0, 3.0]), torch.tensor([True, True]), group_size=2).tolist()
    [-2.0, 2.0]
    """
    group = _group_stats(score, mask, group_size)
    return _ungrouped(group.centred * group.count / (group.count - 1).clamp(min=1), group, score)


def informative_groups(
    score: Tensor, mask: Tensor | None = None, *, group_size: int, low: Scalar, high: Scalar
) -> Tensor:
    """Return a mask of the entries whose group has a mean score strictly between `low` and `high`.

        low < mean_g(score) < high        mean over unmasked members

    If each score is 0 for a failure or 1 for a success, the bounds 0 and 1 keep the groups that have both failures and
    successes. In all other groups, all advantages are 0.

    Args:
        score: `[N, *F]` float, in reward units. Masked entries may hold any value, including NaN.
        mask: `[N, *F]` bool, or None if every entry counts.
        group_size: number of members per group, at least 2 and a divisor of N.
        low: lower bound of the mean score, in reward units.
        high: upper bound of the mean score, in reward units.

    Returns: bool `[N, *F]`. Masked entries are False.
    Gradient: none.
    Raises: ValueError if `group_size` is below 2 or does not divide N. ValueError naming the argument, if shapes
        differ, `mask` is not bool or a bound is not 0-d.
    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 11.

    >>> score, yes = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.ones(4, dtype=torch.bool)
    >>> informative_groups(score, yes, group_size=2, low=0.0, high=1.0).tolist()
    [True, True, False, False]
    """
    low, high = scalars(low=low, high=high)
    group = _group_stats(score, mask, group_size)
    return (group.counted & (group.mean > low) & (group.mean < high)).reshape(score.shape)


class _Groups(NamedTuple):
    """Statistics of groups.

    A statistic with one value per member has the shape `[N / group_size, group_size, *F]`. A statistic with one value
    per group has the shape `[N / group_size, 1, *F]`.
    """

    counted: Tensor
    """True for unmasked members."""
    count: Tensor
    mean: Tensor
    centred: Tensor
    """Score minus mean, 0 for masked members."""
    variance: Tensor
    flat: Tensor
    """True if the group has fewer than two unmasked members, or scores that differ only by rounding."""


def _group_stats(score: Tensor, mask: Tensor | None, group_size: int) -> _Groups:
    mask = checked_mask(mask, score=score)
    if group_size < 2 or score.shape[0] % group_size:
        size = f"{score.shape[0]}, the size of the first axis of score"
        raise ValueError(f"group_size={group_size} must be at least 2 and divide {size}")
    dtype, (score,) = common_dtype(score), widened(score)
    grouped = (-1, group_size, *score.shape[1:])
    counted = mask.reshape(grouped)
    scores = score.reshape(grouped).masked_fill(~counted, 0.0)
    count = counted.sum(1, keepdim=True)
    mean = scores.sum(1, keepdim=True) / count.clamp(min=1)
    centred = (scores - mean).masked_fill(~counted, 0.0)
    variance = centred.square().sum(1, keepdim=True) / count.clamp(min=1)
    size = scores.abs().sum(1, keepdim=True) / count.clamp(min=1)
    flat = (count < 2) | (variance <= (rounding(dtype) * size).square())
    return _Groups(counted, count, mean, centred, variance, flat)


def _ungrouped(advantage: Tensor, group: _Groups, score: Tensor) -> Tensor:
    """Give grouped advantages the shape and the dtype of `score`, with 0 for masked members and flat groups."""
    return advantage.masked_fill(group.flat | ~group.counted, 0.0).reshape(score.shape).to(common_dtype(score))


def first_episode_mask(done: Tensor) -> Tensor:
    """Return a mask that is True up to and including the first `done` step on the last axis.

        mask[t] = not (done[0] or ... or done[t - 1])

    Args:
        done: `[*B, T]` bool.

    Returns: bool `[*B, T]`.
    Gradient: none.
    Raises: ValueError if `done` is not bool.

    >>> first_episode_mask(torch.tensor([False, True, False, True])).tolist()
    [True, True, False, False]
    """
    check_bool(done=done)
    return (done.cumsum(-1) - done.to(torch.int64)) == 0


def grpo_advantages(rollout: TensorDict, *, gamma: Scalar, group_size: int, eps: Scalar) -> tuple[Tensor, Tensor]:
    """Apply `group_advantages` to the returns of a rollout. Return the advantages and the mask, each `[N, T]`.

    The rollout has the shape `[N, T + 1]` and the fields `reward`, `terminated`, `truncated` and `done`. The fields
    `mask` and `executed` are optional. Without `mask`, every step counts. `executed` is the number of environment steps
    that each action took. If the rollout has this field, the discount of a step is `gamma ** executed`. The padding in
    the last time slot is ignored. The fields `value` and `final_value` are ignored too, so returns never bootstrap.

    Raises: ValueError naming a field that is missing or has a wrong shape, and ValueError in the same cases as
        `group_advantages`.
    Source: Shao et al. 2024, arXiv:2402.03300, sec. 4.1.

    >>> no = torch.zeros(2, 2, dtype=torch.bool)
    >>> rollout = TensorDict({"reward": torch.tensor([[1.0, 0.0], [3.0, 0.0]]), "terminated": no, "truncated": no,
    ...     "done": no}, [2, 2])
    >>> grpo_advantages(rollout, gamma=1.0, group_size=2, eps=0.0)[0].tolist()
    [[-1.0], [1.0]]
    """
    returns, mask = returns_to_go(rollout, gamma=gamma)
    return group_advantages(returns, mask, group_size=group_size, eps=eps).to(common_dtype(rollout["reward"])), mask


def returns_to_go(rollout: TensorDict, *, gamma: Scalar) -> tuple[Tensor, Tensor]:
    """Return the returns of a rollout, computed without bootstrapping, and the mask, each `[N, T]`.

    See `grpo_advantages` for the fields of the rollout. Half-precision rewards are converted to float32.
    """
    check_rollout(rollout, "reward")
    (reward,) = widened(rollout["reward"])
    returns = compute_returns(rollout.exclude("value", "final_value").set("reward", reward), gamma)
    if "mask" not in rollout:
        return returns, torch.ones_like(returns, dtype=torch.bool)
    check_rollout(rollout, "mask")
    return returns, rollout["mask"][:, :-1]
