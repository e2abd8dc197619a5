"""Statistics over unmasked entries. Masked entries may hold any value, including NaN.

The statistics are over all axes, or over the axes in `axis`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, computed_in, rounding, scalars, widened
from ecrl.types import Scalar, checked_mask

Axis = int | tuple[int, ...] | None
"""One axis, several axes, or None for all axes. Negative numbers count from the last axis."""


def _sum(x: Tensor, axis: Axis, keepdim: bool = False) -> Tensor:
    """Sum over the axes. If `axis` is None, the sum is 0-d and `keepdim` has no effect."""
    return x.sum() if axis is None else x.sum(axis, keepdim=keepdim)


def _check_axis(x: Tensor, axis: Axis) -> None:
    """Raise ValueError if an axis does not exist, or if an axis is given twice."""
    axes = () if axis is None else (axis,) if isinstance(axis, int) else axis
    if any(not -x.ndim <= one < x.ndim for one in axes) or len({one % x.ndim for one in axes}) < len(axes):
        raise ValueError(f"axis is {axis}, expected distinct axes of a tensor with shape {list(x.shape)}")
    if axis == ():
        raise ValueError("axis is (), expected at least one axis, or None for all axes")


def masked_mean(x: Tensor, mask: Tensor | None = None, *, axis: Axis = None) -> Tensor:
    """Return the mean over the entries whose `mask` is True, or 0 if all entries are masked.

        sum(x where mask) / max(1, count(mask))

    Args:
        x: `[*B]` float. Masked entries may hold any value.
        mask: `[*B]` bool, or None if every entry counts.
        axis: the axes over which the mean is taken, an integer or a tuple of integers. None takes all axes.

    Returns: `[*B]` without the axes in `axis`, or a 0-d tensor if `axis` is None. The dtype is the dtype of `x`.
        Half-precision entries are summed in float32.
    Gradient: flows through the unmasked entries of `x`.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or `x` lacks an axis in `axis`.

    >>> masked_mean(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    tensor(1.)
    >>> masked_mean(torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[True, True], [True, False]]), axis=-1)
    tensor([2., 5.])
    """
    mask = checked_mask(mask, x=x)
    _check_axis(x, axis)
    total = _sum(x.to(computed_in(x.dtype)).masked_fill(~mask, 0.0), axis)
    mean = total / _sum(mask, axis).clamp(min=1)
    return mean.to(x.dtype) if x.is_floating_point() else mean


def masked_variance(x: Tensor, mask: Tensor | None = None, *, axis: Axis = None) -> Tensor:
    """Return the population variance over the entries whose `mask` is True, or 0 if all entries are masked.

        sum((x - mean)^2 where mask) / max(1, count(mask))

    Args:
        x: `[*B]` float. Masked entries may hold any value.
        mask: `[*B]` bool, or None if every entry counts.
        axis: the axes over which the variance is taken, an integer or a tuple of integers. None takes all axes.

    Returns: `[*B]` without the axes in `axis`, or a 0-d tensor if `axis` is None. The dtype is the dtype of `x`.
        Half-precision entries are converted to float32 first.
    Gradient: flows through the unmasked entries of `x`.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or `x` lacks an axis in `axis`.

    >>> masked_variance(torch.tensor([1.0, 5.0, float("nan")]), torch.tensor([True, True, False]))
    tensor(4.)
    """
    mask = checked_mask(mask, x=x)
    _check_axis(x, axis)
    dtype, (x,) = common_dtype(x), widened(x)
    x, count = x.masked_fill(~mask, 0.0), _sum(mask, axis, keepdim=True).clamp(min=1)
    centred = (x - _sum(x, axis, keepdim=True) / count).masked_fill(~mask, 0.0)
    return (_sum(centred.square(), axis) / _sum(mask, axis).clamp(min=1)).to(dtype)


def identity(x: Tensor) -> Tensor:
    """Return `x`. `identity` is the default of `total` arguments, because the sum over one process is `x` itself."""
    return x


def standardize(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    eps: Scalar,
    total: Callable[[Tensor], Tensor] = identity,
    axis: Axis = None,
) -> Tensor:
    """Shift and scale `x` to mean 0 and standard deviation 1 over the unmasked entries. Masked entries become 0.

        std = sqrt(sum((x - mean)^2 where mask) / max(1, count(mask) - 1))
        (x - mean) / max(std, eps)

    If the unmasked entries differ only by rounding, all entries become 0. The entries differ only by rounding if their
    standard deviation is at most |mean| times the dtype's eps. All entries also become 0 if the standard deviation is
    at most an eighth of the mean's rounding error.

    Args:
        x: `[*B]` float.
        mask: `[*B]` bool, or None if every entry counts.
        eps: lower bound of the divisor, in the units of `x`.
        total: a function that sums a tensor over all processes, such as `ecrl.distributed.all_sum`. Pass `total` if
            each process holds a share of the batch. `standardize` then uses the mean and the standard deviation of the
            whole batch. The axes in `axis` must include the axis along which the processes divide the batch.
        axis: the axes over which the mean and the standard deviation are taken, an integer or a tuple of integers. None
            takes all axes.

    Returns: `[*B]`, in the dtype of `x`. Half-precision entries are converted to float32 first.
    Gradient: flows through `x`.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool, `x` lacks an axis in `axis` or a
        hyperparameter is not 0-d.

    >>> standardize(torch.tensor([0.0, 2.0, 9.0]), torch.tensor([True, True, False]), eps=1e-8).tolist()
    [-0.7071067690849304, 0.7071067690849304, 0.0]
    """
    mask = checked_mask(mask, x=x)
    _check_axis(x, axis)
    (eps,) = scalars(eps=eps)
    dtype, (x,) = common_dtype(x), widened(x)
    count = total(_sum(mask, axis, keepdim=True))
    mean = total(_sum(x.masked_fill(~mask, 0.0), axis, keepdim=True)) / count.clamp(min=1)
    centred = (x - mean).masked_fill(~mask, 0.0)
    sums = _sum(centred.square(), axis, keepdim=True), _sum(centred, axis, keepdim=True)
    squares, rest = total(torch.stack(sums))
    variance = squares / (count - 1).clamp(min=1)
    # `error` is the rounding error of the mean, up to 500 eps in a compiled sum of many equal entries.
    error = rest / count.clamp(min=1)
    spacing = torch.finfo(dtype).eps * mean
    flat = variance - error.square() <= torch.maximum(spacing.square(), error.square() / 64.0)
    # Fill the variance before the square root, whose gradient at 0 is infinite.
    std = torch.sqrt(variance.masked_fill(flat, 1.0).clamp(min=eps**2))
    return (centred / std.masked_fill(flat, torch.inf)).to(dtype)


def explained_variance(value: Tensor, value_target: Tensor, mask: Tensor | None = None, *, axis: Axis = None) -> Tensor:
    """Return the share of the targets' variance that the critic explains.

    With a result of 1, the errors of the critic do not vary. With a result of 0, they vary as much as the targets do.

        1 - var(value_target - value) / var(value_target)        0 if the targets vary only by rounding

    Args:
        value: `[*B]` float.
        value_target: `[*B]` float.
        mask: `[*B]` bool, or None if every entry counts.
        axis: the axes over which the variances are taken, an integer or a tuple of integers. None takes all axes.

    Returns: `[*B]` without the axes in `axis`, or a 0-d tensor if `axis` is None. Half-precision inputs are converted
        to float32 first.
    Gradient: none, because the result is detached.
    Raises: ValueError naming the argument, if shapes differ, `mask` is not bool or `value` lacks an axis in `axis`.

    >>> explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([True, True]))
    tensor(1.)
    """
    mask = checked_mask(mask, value=value, value_target=value_target)
    _check_axis(value, axis)
    dtype, (value, value_target) = common_dtype(value, value_target), widened(value.detach(), value_target.detach())
    total = masked_variance(value_target, mask, axis=axis)
    noise = rounding(dtype) * masked_mean(value_target.abs(), mask, axis=axis)
    flat = total <= noise.square()
    explained = 1.0 - masked_variance(value_target - value, mask, axis=axis) / total.masked_fill(flat, 1.0)
    return explained.masked_fill(flat, 0.0).to(dtype)
