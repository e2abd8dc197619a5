"""Target networks and exponential moving averages, which follow the trained parameters.

Trained and target parameters are TensorDicts with the same structure. Target parameters follow the trained parameters
slowly or at fixed intervals. Compute value targets with the target parameters, so that the value targets change slowly.
The average of `ema` starts from zeros, and `ema_debiased` corrects the resulting bias.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.kernels.dtypes import computed_in, scalars
from ecrl.types import Scalar


def _combined(fn: Callable[[Tensor, Tensor], Tensor], **named: TensorDict) -> TensorDict:
    """Apply `fn(old, new)` to the matching leaves of two TensorDicts. Pass the new TensorDict first, then the old one.

    Raises: ValueError, with the names of both arguments, if keys or shapes differ.
    """
    new, old = named.values()
    shapes, old_shapes = ({k: list(x.shape) for k, x in tree.items(True, True)} for tree in (new, old))
    unmatched = sorted(map(str, shapes.keys() ^ old_shapes.keys()))
    if unmatched:
        raise ValueError(f"{' and '.join(named)} must have the same leaves; only one has {', '.join(unmatched)}")
    wrong = [f"{k} {shapes[k]} and {old_shapes[k]}" for k in shapes if shapes[k] != old_shapes[k]]
    if wrong:
        raise ValueError(f"{' and '.join(named)} must have leaves of the same shapes; these differ: {', '.join(wrong)}")
    return old.apply(fn, new)


def _moved_by(tau: Scalar) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function `(old, new) -> tau * new + (1 - tau) * old` of two leaves. Integer leaves become `new`."""

    def step(old: Tensor, new: Tensor) -> Tensor:
        if not old.is_floating_point():
            return new.to(old.dtype)
        dtype = computed_in(old.dtype)
        return (tau * new.to(dtype) + (1.0 - tau) * old.to(dtype)).to(old.dtype)

    return step


def soft_update(params: TensorDict, target_params: TensorDict, *, tau: Scalar) -> TensorDict:
    """Return target parameters after a small step towards the trained parameters, as an exponential moving average.

        tau * params + (1 - tau) * target_params

    Integer leaves, such as counters, are copied from `params`. Half-precision leaves are computed in float32, and the
    results are rounded to half precision. The rounding may remove a small step, so keep target parameters in float32.

    Args:
        params: TensorDict of the parameters being trained.
        target_params: TensorDict of the target parameters, with the same structure as `params`.
        tau: weight of `params` in the average, 0 to 1.

    Returns: the new target parameters, with the dtypes of `target_params`. The inputs do not change.
    Gradient: flows through `params`, `target_params` and `tau`.
    Raises: ValueError naming the leaves whose keys or shapes do not match, or `tau` if it is not 0-d.
    Source: Lillicrap et al. 2016, arXiv:1509.02971, algorithm 1.

    >>> params, target = TensorDict({"w": torch.tensor([4.0])}, []), TensorDict({"w": torch.tensor([0.0])}, [])
    >>> soft_update(params, target, tau=0.25)["w"]
    tensor([1.])
    """
    (tau,) = scalars(tau=tau)
    return _combined(_moved_by(tau), params=params, target_params=target_params)


def periodic_update(params: TensorDict, target_params: TensorDict, step: Tensor, *, period: int | Tensor) -> TensorDict:
    """Return the trained parameters at every `period`-th step, and the target parameters at all other steps.

        params if step % period == 0 else target_params

    Args:
        params: TensorDict of the parameters being trained.
        target_params: TensorDict of the target parameters, with the same structure as `params`.
        step: 0-d int64, number of updates so far.
        period: number of updates between two copies, an integer or a 0-d int64 tensor, at least 1. The value of a
            tensor is not checked.

    Returns: the new target parameters, with the dtypes of `target_params`. The inputs do not change.
    Gradient: flows through `params` and `target_params`.
    Raises: ValueError naming the leaves whose keys or shapes do not match, or an argument that is not 0-d, or if
        `period` is an integer below 1.
    Source: Mnih et al. 2015, "Human-level control through deep reinforcement learning", algorithm 1.

    >>> params, target = TensorDict({"w": torch.tensor([4.0])}, []), TensorDict({"w": torch.tensor([0.0])}, [])
    >>> [float(periodic_update(params, target, torch.tensor(step), period=2)["w"]) for step in (3, 4)]
    [0.0, 4.0]
    """
    step, period = scalars(step=step, period=period)  # pyright: ignore
    if not isinstance(period, Tensor) and period < 1:
        raise ValueError(f"period is {period}, expected at least 1")
    copied = step % period == 0

    def choose(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(copied, new.to(old.dtype), old)

    return _combined(choose, params=params, target_params=target_params)


def ema_init(params: TensorDict) -> TensorDict:
    """Return the state for `ema` before the first value: a mean of zeros, and the int64 step count.

    >>> sorted(ema_init(TensorDict({"w": torch.zeros(2)}, [])).keys())
    ['mean', 'step']
    """
    first, *_ = cast(Any, params.values(include_nested=True, leaves_only=True))
    step = torch.zeros((), dtype=torch.int64, device=first.device)
    return TensorDict({"mean": params.apply(torch.zeros_like), "step": step}, [])


def ema(params: TensorDict, average: TensorDict, *, decay: Scalar) -> TensorDict:
    """Return the exponential moving average after one more value. The average starts from zeros.

        mean = decay * mean + (1 - decay) * params;  step = step + 1

    Integer leaves are copied from `params`. Half-precision leaves are computed in float32, and the results are rounded
    to half precision.

    Args:
        params: TensorDict, the new value.
        average: state from `ema_init` or from the previous call of `ema`.
        decay: weight of the old mean, 0 to 1.

    Returns: the new state. The inputs do not change. `mean` keeps its dtypes.
    Gradient: flows through `params`, `average` and `decay`.
    Raises: ValueError naming the leaves whose keys or shapes do not match, or `decay` if it is not 0-d.
    Source: `optax.ema`, without `debias`.

    >>> params = TensorDict({"w": torch.tensor([4.0])}, [])
    >>> average = ema(params, ema_init(params), decay=0.75)
    >>> average["mean", "w"], int(average["step"])
    (tensor([1.]), 1)
    """
    (decay,) = scalars(decay=decay)
    mean = _combined(_moved_by(1.0 - decay), params=params, average=average["mean"])
    return TensorDict({"mean": mean, "step": average["step"] + 1}, [])


def ema_debiased(average: TensorDict, *, decay: Scalar) -> TensorDict:
    """Return the mean of an exponential moving average, corrected for the bias from its start at zero.

        mean / (1 - decay^step)

    The result is a weighted mean of the values so far, with weights that sum to 1. Before the first value, the result
    is zero. Integer leaves do not change.

    Args:
        average: state from `ema`. All calls of `ema` must have used the `decay` that is passed here.
        decay: weight of the old mean, 0 up to but not including 1.

    Returns: TensorDict with the structure and the dtypes of `average["mean"]`.
    Gradient: flows through `average` and `decay`.
    Raises: ValueError naming `decay` if it is not 0-d.
    Source: Kingma and Ba 2015, arXiv:1412.6980, sec. 3; `optax.ema` with `debias`.

    >>> params = TensorDict({"w": torch.tensor([4.0])}, [])
    >>> ema_debiased(ema(params, ema_init(params), decay=0.75), decay=0.75)["w"]
    tensor([4.])
    """
    (decay,) = scalars(decay=decay)
    # float64, because `1 - 0.999 ** step` loses digits in float32
    weight = 1.0 - torch.pow(decay, average["step"].to(torch.float64))
    weight = torch.where(average["step"] > 0, weight, 1.0)

    def debias(mean: Tensor) -> Tensor:
        if not mean.is_floating_point():
            return mean
        dtype = computed_in(mean.dtype)
        return (mean.to(dtype) / weight.to(dtype)).to(mean.dtype)

    return cast(Any, average["mean"]).apply(debias)
