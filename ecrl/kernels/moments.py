"""Running mean and variance of a stream of batches, in float64 to stay accurate over a billion samples.

Moments are a TensorDict with three fields: the 0-d `count`, the `mean`, and the sum of squared deviations `m2`. `mean`
and `m2` have the shape of one sample.
"""

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, scalars, widened
from ecrl.kernels.masked_stats import identity
from ecrl.types import Scalar, check_bool


def moments_init(shape: tuple[int, ...], device: torch.device | str | None = None) -> TensorDict:
    """Return the moments of a stream without samples.

    Args:
        shape: shape of one sample.
        device: device of the moments.

    Returns: TensorDict with the float64 fields count, mean and m2.

    >>> float(moments_init((2,))["count"])
    0.0
    """
    zeros = torch.zeros(shape, dtype=torch.float64, device=device)
    return TensorDict({"count": zeros.new_zeros(()), "mean": zeros, "m2": zeros.clone()}, [])


def moments_merge(moments: TensorDict, other: TensorDict) -> TensorDict:
    """Merge the moments of two streams of samples.

        count = count_a + count_b;  d = mean_b - mean_a
        mean  = mean_a + d * count_b / count
        m2    = m2_a + m2_b + d^2 * count_a * count_b / count

    The suffix `_a` marks the fields of `moments`, and the suffix `_b` marks the fields of `other`.

    Args:
        moments: moments of one stream, from `moments_init`, `moments_update` or `moments_merge`.
        other: moments of the other stream, with the same sample shape.

    Returns: new moments. The inputs do not change.
    Gradient: flows through all tensors of both arguments.
    Raises: ValueError if the sample shapes differ.
    Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1.

    >>> one, two = (moments_update(moments_init(()), torch.tensor([x]), torch.tensor([True])) for x in (1.0, 3.0))
    >>> float(moments_merge(one, two)["mean"])
    2.0
    """
    if moments["mean"].shape != other["mean"].shape:
        raise ValueError(
            f"other has samples of shape {list(other['mean'].shape)}, expected {list(moments['mean'].shape)}, "
            "the shape in moments"
        )
    count = moments["count"] + other["count"]
    share = other["count"] / count.clamp(min=1.0)
    shift = other["mean"] - moments["mean"]
    m2 = moments["m2"] + other["m2"] + shift.square() * moments["count"] * share
    return TensorDict({"count": count, "mean": moments["mean"] + shift * share, "m2": m2}, [])


def moments_update(
    moments: TensorDict, x: Tensor, mask: Tensor | None = None, *, total: Callable[[Tensor], Tensor] = identity
) -> TensorDict:
    """Return the moments after a further batch of samples.

    Args:
        moments: the moments before this batch.
        x: `[*B, *shape]` float. Masked entries may hold any value.
        mask: `[*B]` bool, True for samples that count, or None if every sample counts.
        total: a function that sums a tensor over all processes, such as `ecrl.distributed.all_sum`. Pass `total` if
            each process holds a share of the batch. Every process then gets the moments of the whole batch.

    Returns: new moments. The inputs do not change.
    Gradient: flows through `moments`, but not through `x`, which is detached.
    Raises: ValueError if the shape of `x` does not match `mask` and `moments`, or if `mask` is not bool.
    Source: see `moments_merge`.

    >>> m = moments_update(moments_init(()), torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
    >>> float(m["mean"]), float(moments_variance(m))
    (2.0, 1.0)
    """
    shape, batch = moments["mean"].shape, "the batch" if mask is None else "mask"
    if mask is None:
        mask = x.new_ones(x.shape[: x.ndim - len(shape)], dtype=torch.bool)
    check_bool(mask=mask)
    if x.shape != (*mask.shape, *shape):
        expected = f"{[*mask.shape, *shape]}: the shape of {batch}, then the shape of one sample"
        raise ValueError(f"x has shape {list(x.shape)}, expected {expected}")
    counted = mask.reshape(-1, *[1] * len(shape))
    samples = x.detach().to(torch.float64).reshape(-1, *shape).masked_fill(~counted, 0.0)
    count = total(mask.sum().to(torch.float64))
    mean = total(samples.sum(0)) / count.clamp(min=1.0)
    m2 = total((samples - mean).masked_fill(~counted, 0.0).square().sum(0))
    return moments_merge(moments, TensorDict({"count": count, "mean": mean, "m2": m2}, []))


def moments_variance(moments: TensorDict) -> Tensor:
    """Return the population variance as float64 with the shape of one sample, or ones before the first sample.

        m2 / count

    Gradient: flows through `m2`.

    >>> float(moments_variance(moments_init(())))
    1.0
    """
    variance = moments["m2"] / moments["count"].clamp(min=1.0)
    return torch.where(moments["count"] > 0, variance, torch.ones_like(variance))


def normalize(x: Tensor, moments: TensorDict, *, eps: Scalar, clip: Scalar) -> Tensor:
    """Subtract the running mean, divide by the running standard deviation, and clip the result.

        clip((x - mean) / sqrt(variance + eps), -clip, clip)

    Args:
        x: `[*B, *shape]` float or integer.
        moments: running moments of samples with the shape `shape`.
        eps: constant added to the variance, in squared units of `x`.
        clip: largest absolute value of the result.

    Returns: `[*B, *shape]` in the dtype of `x`, or in torch's default float dtype if `x` holds integers. Half-precision
        values are converted to float32 first.
    Gradient: flows through `x`.
    Raises: ValueError if the shape of `x` does not end in one sample's shape, or if `eps` or `clip` is not 0-d.

    >>> normalize(torch.tensor([5.0]), moments_init(()), eps=0.0, clip=3.0)
    tensor([3.])
    """
    eps, clip = scalars(eps=eps, clip=clip)
    shape = moments["mean"].shape
    if x.shape[x.ndim - len(shape) :] != shape:
        raise ValueError(f"x has shape {list(x.shape)}, expected it to end in one sample's shape {list(shape)}")
    dtype, (x,) = common_dtype(x), widened(x)
    mean, scale = moments["mean"].to(x.dtype), torch.rsqrt(moments_variance(moments) + eps).to(x.dtype)
    return ((x - mean) * scale).clamp(-clip, clip).to(dtype)  # pyright: ignore


def scale(x: Tensor, moments: TensorDict, *, eps: Scalar, clip: Scalar) -> Tensor:
    """Divide `x` by the running standard deviation and clip the result, without subtracting the running mean.

        clip(x / sqrt(variance + eps), -clip, clip)

    Args:
        x: `[*B, *shape]` float or integer.
        moments: running moments of samples with the shape `shape`.
        eps: constant added to the variance, in squared units of `x`.
        clip: largest absolute value of the result.

    Returns: `[*B, *shape]` in the dtype of `x`, or in torch's default float dtype if `x` holds integers. Half-precision
        values are converted to float32 first.
    Gradient: flows through `x`.
    Raises: ValueError if the shape of `x` does not end in one sample's shape, or if `eps` or `clip` is not 0-d.
    Source: Engstrom et al. 2020, arXiv:2005.12729, sec. 3 (reward scaling).

    >>> scale(torch.tensor([5.0, -0.5]), moments_init(()), eps=0.0, clip=3.0)
    tensor([ 3.0000, -0.5000])
    """
    return normalize(x, moments.copy().set("mean", torch.zeros_like(moments["mean"])), eps=eps, clip=clip)
