"""Statistics over unmasked entries. Masked entries may hold any value, including NaN."""

from collections.abc import Callable

import torch
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, computed_in, rounding, scalars, widened
from ecrl.types import Scalar, checked_mask


def masked_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean over the entries whose `mask` is True, or 0 if all entries are masked.

        sum(x where mask) / max(1, count(mask))

    Args:
        x: `[*B]` float. Masked entries may hold any value.
        mask: `[*B]` bool, or None if every entry counts.

    Returns: 0-d, in the dtype of `x`. Half-precision entries are summed in float32.
    Gradient: flows through the unmasked entries of `x`.
    Raises: ValueError naming the argument, if shapes differ or `mask` is not bool.

    >>> masked_mean(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    tensor(1.)
    """
    mask = checked_mask(mask, x=x)
    total = x.to(computed_in(x.dtype)).masked_fill(~mask, 0.0).sum()
    mean = total / mask.sum().clamp(min=1)
    return mean.to(x.dtype) if x.is_floating_point() else mean


def identity(x: Tensor) -> Tensor:
    """Return `x`. `identity` is the default of `total` arguments, because the sum over one process is `x` itself."""
    return x


def standardize(
    x: Tensor, mask: Tensor | None = None, *, eps: Scalar, total: Callable[[Tensor], Tensor] = identity
) -> Tensor:
    """Shift and scale `x` to mean 0 and standard deviation 1 over the unmasked entries. Masked entries become 0.

        (x - mean) / max(std, eps)        std divides by max(count - 1, 1)

    If the unmasked entries differ only by rounding, all entries become 0. Entries count as equal up to rounding if
    their standard deviation is at most |mean| times the dtype's eps. The entries also count as equal if the standard
    deviation is at most an eighth of the mean's rounding error.

    Args:
        x: `[*B]` float.
        mask: `[*B]` bool, or None if every entry counts.
        eps: lower bound of the divisor, in the units of `x`.
        total: a function that sums a tensor over all processes, such as `ecrl.distributed.all_sum`. Pass `total` if
            each process holds a share of the batch. The function then uses the mean and the standard deviation of the
            whole batch.

    Returns: `[*B]`, in the dtype of `x`. Half-precision entries are converted to float32 first.
    Gradient: flows through `x`.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or a hyperparameter is not 0-d.

    >>> standardize(torch.tensor([0.0, 2.0, 9.0]), torch.tensor([True, True, False]), eps=1e-8).tolist()
    [-0.7071067690849304, 0.7071067690849304, 0.0]
    """
    mask = checked_mask(mask, x=x)
    (eps,) = scalars(eps=eps)
    dtype, (x,) = common_dtype(x), widened(x)
    count = total(mask.sum())
    mean = total(x.masked_fill(~mask, 0.0).sum()) / count.clamp(min=1)
    centred = (x - mean).masked_fill(~mask, 0.0)
    squares, rest = total(torch.stack((centred.square().sum(), centred.sum())))
    variance = squares / (count - 1).clamp(min=1)
    # `error` is the rounding error of the mean, up to 500 eps in a compiled sum of many equal entries.
    error = rest / count.clamp(min=1)
    spacing = torch.finfo(dtype).eps * mean
    flat = variance - error.square() <= torch.maximum(spacing.square(), error.square() / 64.0)
    # Fill the variance before the square root, whose gradient at 0 is infinite.
    std = torch.sqrt(variance.masked_fill(flat, 1.0).clamp(min=eps**2))
    return (centred / std.masked_fill(flat, torch.inf)).to(dtype)


def explained_variance(value: Tensor, value_target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the share of the targets' variance that the critic explains.

    A result of 1 means that the critic fits perfectly. With a result of 0, the critic is as good as the mean of the
    targets.

        1 - var(value_target - value) / var(value_target)        0 if the targets vary only by rounding

    Args:
        value: `[*B]` float.
        value_target: `[*B]` float.
        mask: `[*B]` bool, or None if every entry counts.

    Returns: 0-d. Half-precision inputs are converted to float32 first.
    Gradient: none, because the result is detached.
    Raises: ValueError naming the argument, if shapes differ or `mask` is not bool.

    >>> explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([True, True]))
    tensor(1.)
    """
    mask = checked_mask(mask, value=value, value_target=value_target)
    dtype, (value, value_target) = common_dtype(value, value_target), widened(value.detach(), value_target.detach())

    def variance(x: Tensor) -> Tensor:
        return masked_mean((x - masked_mean(x, mask)).square(), mask)

    total = variance(value_target)
    noise = rounding(dtype) * masked_mean(value_target.abs(), mask)
    flat = total <= noise.square()
    explained = 1.0 - variance(value_target - value) / total.masked_fill(flat, 1.0)
    return explained.masked_fill(flat, 0.0).to(dtype)
