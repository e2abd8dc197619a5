"""Dtype conversions, numerical limits and checks of hyperparameters, for kernels.

Most kernels convert half-precision inputs to float32, and convert the results back to half precision.
"""

from functools import reduce
from math import log

import torch
from torch import Tensor

from ecrl.types import Scalar

_HALF = (torch.float16, torch.bfloat16)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for computations: float32 if `dtype` is half precision, or else `dtype` itself.

    >>> computed_in(torch.bfloat16), computed_in(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in _HALF else dtype


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the common float dtype of `tensors`, or torch's default float dtype if no tensor holds floats.

    >>> common_dtype(torch.ones(1), torch.ones(1, dtype=torch.bfloat16)), common_dtype(torch.tensor([1]))
    (torch.float32, torch.float32)
    """
    dtype = reduce(torch.promote_types, [x.dtype for x in tensors])
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def widened(*tensors: Tensor) -> list[Tensor]:
    """Convert the tensors to their common dtype, or to float32 if the common dtype is half precision.

    >>> [x.dtype for x in widened(torch.ones(1, dtype=torch.float16), torch.ones(1, dtype=torch.float16))]
    [torch.float32, torch.float32]
    """
    dtype = computed_in(common_dtype(*tensors))
    return [x.to(dtype) for x in tensors]


def rounding(dtype: torch.dtype) -> float:
    """Return the largest relative difference between two values that is treated as rounding error.

    The result is 8 times the eps of `computed_in(dtype)`, but at least the eps of `dtype`.

    >>> rounding(torch.float64) < rounding(torch.float32) < rounding(torch.bfloat16)
    True
    """
    return max(torch.finfo(dtype).eps, 8.0 * torch.finfo(computed_in(dtype)).eps)


def scalars(**named: Scalar) -> tuple[Scalar, ...]:
    """Return hyperparameters after checking that each is a scalar and converting half-precision tensors to float32.

    Raises: ValueError naming a hyperparameter that is neither a number nor a 0-d tensor.

    >>> scalars(gamma=0.9, eps=torch.tensor(1.0))
    (0.9, tensor(1.))
    >>> scalars(gamma=torch.zeros(3))
    Traceback (most recent call last):
    ValueError: gamma has shape [3], expected a number or a 0-d tensor
    >>> scalars(gamma="0.9")
    Traceback (most recent call last):
    ValueError: gamma is '0.9', expected a number or a 0-d tensor
    """
    for name, number in named.items():
        # torch 2.11 cannot compile `getattr(number, "ndim", 0)` of a float.
        if isinstance(number, int | float):
            continue
        if getattr(number, "ndim", 0):
            raise ValueError(f"{name} has shape {list(number.shape)}, expected a number or a 0-d tensor")  # pyright: ignore
        if not isinstance(number, Tensor) and not hasattr(number, "__float__"):  # NumPy numbers have `__float__`
            raise ValueError(f"{name} is {number!r}, expected a number or a 0-d tensor")
    return tuple(x.float() if isinstance(x, Tensor) and x.dtype in _HALF else x for x in named.values())


def discounts(**named: Scalar) -> tuple[Scalar, ...]:
    """Return discount factors after checking that each is a scalar and converting tensors to float64.

    Products of discounts, such as `gamma * gae_lambda`, are then computed in float64. A float32 product would have the
    same rounding error at every step, so the effect of this error would grow with the number of steps.

    Raises: ValueError naming a hyperparameter that is neither a number nor a 0-d tensor.

    >>> discounts(gamma=torch.tensor(0.5), gae_lambda=0.95)
    (tensor(0.5000, dtype=torch.float64), 0.95)
    """
    return tuple(x.double() if isinstance(x, Tensor) else x for x in scalars(**named))


def step_discounts(gamma: Scalar, reward: Tensor) -> Scalar:
    """Convert a tensor `gamma` to float64, after checking that it is 0-d or has the shape of `reward`.

    A number is returned unchanged.

    Raises: ValueError if `gamma` is neither a number nor a tensor, or if it is a tensor of another shape.

    >>> step_discounts(0.9, torch.zeros(2))
    0.9
    >>> step_discounts(torch.zeros(3), torch.zeros(2))
    Traceback (most recent call last):
    ValueError: gamma has shape [3], expected a number, a 0-d tensor or [2], the shape of reward
    """
    if not isinstance(gamma, Tensor):
        return scalars(gamma=gamma)[0]
    if gamma.ndim and gamma.shape != reward.shape:
        expected = f"a number, a 0-d tensor or {list(reward.shape)}, the shape of reward"
        raise ValueError(f"gamma has shape {list(gamma.shape)}, expected {expected}")
    return gamma.double()


def exponent_bound(dtype: torch.dtype) -> float:
    """Return the upper bound for log-ratios in `dtype`: half the logarithm of the dtype's largest finite value.

    Kernels clamp log-ratios to this bound, so that a ratio is at most the square root of the largest finite value.
    Products of ratios and advantages, and sums of such products, then stay finite. The bound is 44.36 for float32 and
    bfloat16, 354.89 for float64, and 5.55 for float16.

    >>> round(exponent_bound(torch.float32), 2)
    44.36
    """
    return log(torch.finfo(dtype).max) / 2.0
