"""Population-based training: replace the worst members of a population by copies of the best members.

The hyperparameters of the copies are perturbed.

The trailing axis of `fitness` is the population, with M members.
"""

import torch
from torch import Tensor

from ecrl.kernels.dtypes import scalars, widened
from ecrl.types import Scalar, check_bool, same_shape


def truncation_parents(fitness: Tensor, uniform: Tensor, *, count: int) -> Tensor:
    """Choose a parent among the best members for each of the worst members. Other members are their own parents.

        rank[i]   = position of fitness[i] in ascending order, 0 for the worst
        parent[i] = member of rank M - 1 - floor(count * uniform[i]) if rank[i] < count, or else i

    Args:
        fitness: `[*B, M]` float. Larger is better, and NaN counts as -infinity. Among equal values, the smaller index
            is worse.
        uniform: `[*B, M]` float, random numbers in [0, 1).
        count: number of worst members that get a new parent, and number of best members among which the parents are
            chosen; at most M / 2.

    Returns: `[*B, M]` int64, the index of each member's parent.
    Gradient: none.
    Raises: ValueError if shapes differ, or if `count` is below 0 or above M / 2.
    Source: Jaderberg et al. 2017, arXiv:1711.09846, section 4.1.1, truncation selection.

    >>> truncation_parents(torch.tensor([3.0, 1.0, 2.0, 4.0]), torch.tensor([0.0, 0.0, 0.0, 0.0]), count=1).tolist()
    [0, 3, 2, 3]
    """
    same_shape(fitness=fitness, uniform=uniform)
    size = fitness.shape[-1]
    if not 0 <= 2 * count <= size:
        raise ValueError(f"count is {count}, expected 0 to {size // 2}, half of the {size} members")
    order = torch.where(fitness.isnan(), -torch.inf, fitness).argsort(stable=True)
    rank = order.argsort(-1)
    best = (size - 1 - (count * uniform).floor().to(torch.int64)).clamp(size - max(count, 1), size - 1)
    own = torch.arange(size, device=fitness.device).expand(fitness.shape)
    return torch.where(rank < count, order.gather(-1, best), own)


def perturbed(x: Tensor, is_new: Tensor, uniform: Tensor, *, factor: Scalar, low: Scalar, high: Scalar) -> Tensor:
    """Multiply or divide a hyperparameter of each new member by `factor`, and clip the result.

    Multiplication and division each have the probability 1/2. A new member is a copy of its parent, and has replaced
    one of the worst members.

        y[i] = clip(x[i] * factor if uniform[i] < 0.5 else x[i] / factor, low, high)        if is_new[i], or else x[i]

    Args:
        x: `[*B]` float, a hyperparameter of each member.
        is_new: `[*B]` bool, True for new members.
        uniform: `[*B]` float, random numbers in [0, 1).
        factor: multiplier and divisor, above 0. The paper multiplies by 1.2 or by 0.8 instead.
        low: lower bound of the new values.
        high: upper bound of the new values.

    Returns: `[*B]` in the dtype of `x`.
    Gradient: flows through `x`.
    Raises: ValueError naming the argument, if shapes differ, `is_new` is not bool, or `factor` or a bound is not 0-d.
    Source: Jaderberg et al. 2017, arXiv:1711.09846, section 4.1.1, perturb.

    >>> x, is_new = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([True, True, False])
    >>> perturbed(x, is_new, torch.tensor([0.1, 0.9, 0.9]), factor=2.0, low=0.0, high=9.0).tolist()
    [2.0, 0.5, 1.0]
    """
    same_shape(x=x, is_new=is_new, uniform=uniform)
    check_bool(is_new=is_new)
    factor, low, high = scalars(factor=factor, low=low, high=high)
    (wide,) = widened(x)
    changed = torch.where(uniform < 0.5, wide * factor, wide / factor).clamp(min=low).clamp(max=high)  # pyright: ignore
    return torch.where(is_new, changed.to(x.dtype), x)
