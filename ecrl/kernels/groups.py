"""Group-relative advantages: each environment is compared with the others of its group, without a critic.

A group is `group_size` consecutive rows. Scores are standardised per trailing index, so step-wise returns are compared
at equal time. The advantages of a group are 0 if only one member is unmasked or if the spread is rounding noise.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, rounding, scalars, widened
from ecrl.kernels.rollout_estimators import compute_returns
from ecrl.types import Scalar, check_rollout, same_shape


def group_advantages(score: Tensor, mask: Tensor, *, group_size: int, eps: Scalar) -> Tensor:
    """Standardise `score` within each group of `group_size` consecutive rows, per trailing index.

        advantage = (score - mean_g(score)) / (std_g(score) + eps)        mean and std over unmasked rows

    Args:
        score: `[N, *F]` float, reward units. Masked entries may hold anything, NaN included.
        mask: `[N, *F]` bool.
        group_size: members per group, at least 2; divides N.
        eps: added to the standard deviation, reward units.

    Returns: `[N, *F]` in the dtype of `score`. Masked entries are 0. Groups with fewer than two counted rows are 0.
        Groups whose spread is rounding noise are 0: a std of at most 8 eps times the mean magnitude, 9.5e-7 in float32.
        Half precision is computed in float32. Its rounding noise is the spacing of its numbers: 1e-3 in float16, 8e-3
        in bfloat16.
    Gradient: flows through `score`.
    Raises: ValueError if `N % group_size` or `group_size < 2`, or naming arguments of a
        wrong shape.
    Source: Shao et al. 2024, arXiv:2402.03300, sec. 4.1.2; std is the population one (TRL uses correction=1).

    >>> group_advantages(torch.tensor([1.0, 3.0]), torch.tensor([True, True]), group_size=2, eps=0.0).tolist()
    [-1.0, 1.0]
    """
    same_shape(score=score, mask=mask)
    (eps,) = scalars(eps=eps)
    if group_size < 2 or score.shape[0] % group_size:
        raise ValueError(f"group_size={group_size} must be at least 2 and divide the {score.shape[0]} rows of score")
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
    std = torch.sqrt(variance.masked_fill(flat, 1.0))  # filled before the root, whose gradient at 0 is infinite
    return (centred / (std + eps)).masked_fill(flat | ~counted, 0.0).reshape(score.shape).to(dtype)


def first_episode_mask(done: Tensor) -> Tensor:
    """Return True for the steps of each row up to and including its first `done`: bool `[*B, T]`.

        mask[t] = not (done[0] or ... or done[t - 1])

    Args:
        done: `[*B, T]` bool.

    Returns: bool `[*B, T]`.
    Gradient: none.

    >>> first_episode_mask(torch.tensor([False, True, False, True])).tolist()
    [True, True, False, False]
    """
    return (done.cumsum(-1) - done.to(torch.int64)) == 0


def grpo_advantages(rollout: TensorDict, *, gamma: Scalar, group_size: int, eps: Scalar) -> tuple[Tensor, Tensor]:
    """Return `group_advantages` of a `[N, T + 1]` rollout's step-wise returns: `(advantages, mask)`, each `[N, T]`.

    It reads reward, terminated, truncated, done and, if present, mask and executed. Without mask every step counts. The
    padding slot is never read. `value` is never read either, so the return after the last step is 0.

    Raises: ValueError naming a missing or misshapen field, or as `group_advantages`.
    Source: Shao et al. 2024, arXiv:2402.03300, sec. 4.1.

    >>> no = torch.zeros(2, 2, dtype=torch.bool)
    >>> rollout = TensorDict({"reward": torch.tensor([[1.0, 0.0], [3.0, 0.0]]), "terminated": no, "truncated": no,
    ...     "done": no}, [2, 2])
    >>> grpo_advantages(rollout, gamma=1.0, group_size=2, eps=0.0)[0].tolist()
    [[-1.0], [1.0]]
    """
    check_rollout(rollout, "reward")
    dtype, (reward,) = common_dtype(rollout["reward"]), widened(rollout["reward"])
    returns = compute_returns(rollout.exclude("value", "final_value").set("reward", reward), gamma)
    if "mask" in rollout:
        check_rollout(rollout, "mask")
        mask = rollout["mask"][:, :-1]
    else:
        mask = torch.ones_like(returns, dtype=torch.bool)
    return group_advantages(returns, mask, group_size=group_size, eps=eps).to(dtype), mask
