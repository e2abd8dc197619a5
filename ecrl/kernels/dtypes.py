"""Dtypes of kernels: kernels convert half-precision inputs to float32, and convert results back.

This module also returns the rounding error and the largest exponent of a dtype, and checks hyperparameters.
"""

from functools import reduce
from math import log

import torch
from torch import Tensor

from ecrl.types import Scalar

_HALF = (torch.float16, torch.bfloat16)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float32 for half precision, else `dtype`.

    >>> computed_in(torch.bfloat16), computed_in(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in _HALF else dtype


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the float dtype that torch promotes `tensors` to. If all are integers, it is torch's default float dtype.

    >>> common_dtype(torch.ones(1), torch.ones(1, dtype=torch.bfloat16)), common_dtype(torch.tensor([1]))
    (torch.float32, torch.float32)
    """
    dtype = reduce(torch.promote_types, [x.dtype for x in tensors])
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def widened(*tensors: Tensor) -> list[Tensor]:
    """Convert the tensors to their common dtype, or to float32 if that dtype is half precision.

    >>> [x.dtype for x in widened(torch.ones(1, dtype=torch.float16), torch.ones(1, dtype=torch.float16))]
    [torch.float32, torch.float32]
    """
    dtype = computed_in(common_dtype(*tensors))
    return [x.to(dtype) for x in tensors]


def rounding(dtype: torch.dtype) -> float:
    """Return the largest relative difference between numbers that counts as rounding error.

    It is 8 times the eps of `computed_in(dtype)`, and at least the eps of `dtype`.

    >>> rounding(torch.float64) < rounding(torch.float32) < rounding(torch.bfloat16)
    True
    """
    return max(torch.finfo(dtype).eps, 8.0 * torch.finfo(computed_in(dtype)).eps)


def scalars(**named: Scalar) -> tuple[Scalar, ...]:
    """Return the hyperparameters in the order of the arguments. Half-precision tensors become float32.

    Raises: ValueError naming a hyperparameter that is neither a number nor a 0-d tensor.

    >>> scalars(gamma=0.9, eps=torch.tensor(1.0))
    (0.9, tensor(1.))
    >>> scalars(gamma=torch.zeros(3))
    Traceback (most recent call last):
    ValueError: gamma has shape [3], expected a number or a 0-d tensor
    """
    for name, number in named.items():
        if getattr(number, "ndim", 0):
            raise ValueError(f"{name} has shape {list(number.shape)}, expected a number or a 0-d tensor")  # pyright: ignore
    return tuple(x.float() if isinstance(x, Tensor) and x.dtype in _HALF else x for x in named.values())


def discounts(**named: Scalar) -> tuple[Scalar, ...]:
    """Return the hyperparameters in the order of the arguments. Tensors become float64.

    A product of float32 discounts is rounded in the same direction at every step, so its error would grow with time.

    Raises: ValueError naming a hyperparameter that is neither a number nor a 0-d tensor.

    >>> discounts(gamma=torch.tensor(0.5), gae_lambda=0.95)
    (tensor(0.5000, dtype=torch.float64), 0.95)
    """
    return tuple(x.double() if isinstance(x, Tensor) else x for x in scalars(**named))


def step_discounts(gamma: Scalar, reward: Tensor) -> Scalar:
    """Return `gamma` for steps with these rewards; tensors in float64, as `discounts` does.

    Raises: ValueError unless `gamma` is a number, a 0-d tensor or of the shape of `reward`.

    >>> step_discounts(0.9, torch.zeros(2))
    0.9
    >>> step_discounts(torch.zeros(3), torch.zeros(2))
    Traceback (most recent call last):
    ValueError: gamma has shape [3], expected a number, a 0-d tensor or [2], the shape of reward
    """
    if not isinstance(gamma, Tensor):
        return gamma
    if gamma.ndim and gamma.shape != reward.shape:
        expected = f"a number, a 0-d tensor or {list(reward.shape)}, the shape of reward"
        raise ValueError(f"gamma has shape {list(gamma.shape)}, expected {expected}")
    return gamma.double()


def exponent_bound(dtype: torch.dtype) -> float:
    """Return half the logarithm of the largest number of `dtype`.

    Kernels limit a log-ratio to this bound. Its exponential is then at most the square root of the largest number. So
    products of ratios and advantages, and their sums, stay finite. The bound is 44.36 for float32 and bfloat16, 354.89
    for float64, and 5.55 for float16.

    >>> round(exponent_bound(torch.float32), 2)
    44.36
    """
    return log(torch.finfo(dtype).max) / 2.0
