"""Target networks, whose parameters follow the trained parameters slowly or at fixed intervals.

Parameters are TensorDicts with the same structure. Compute value targets with the target parameters, so that the value
targets change slowly.
"""

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.kernels.dtypes import computed_in, scalars
from ecrl.types import Scalar


def _combined(fn: Callable[[Tensor, Tensor], Tensor], params: TensorDict, target_params: TensorDict) -> TensorDict:
    """Apply `fn` to the matching leaves of both TensorDicts. Raise ValueError if keys or shapes differ."""
    shapes, target_shapes = ({k: list(x.shape) for k, x in tree.items(True, True)} for tree in (params, target_params))
    unmatched = sorted(map(str, shapes.keys() ^ target_shapes.keys()))
    if unmatched:
        raise ValueError(f"params and target_params must have the same leaves; only one has {', '.join(unmatched)}")
    wrong = [f"{k} {shapes[k]} and {target_shapes[k]}" for k in shapes if shapes[k] != target_shapes[k]]
    if wrong:
        raise ValueError(
            f"params and target_params must have leaves of the same shapes; these differ: {', '.join(wrong)}"
        )
    return target_params.apply(fn, params)


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
    Gradient: flows through both arguments.
    Raises: ValueError naming the leaves whose keys or shapes do not match, or `tau` if it is not 0-d.
    Source: Lillicrap et al. 2016, arXiv:1509.02971, algorithm 1.

    >>> params, target = TensorDict({"w": torch.tensor([4.0])}, []), TensorDict({"w": torch.tensor([0.0])}, [])
    >>> soft_update(params, target, tau=0.25)["w"]
    tensor([1.])
    """
    (tau,) = scalars(tau=tau)

    def step(old: Tensor, new: Tensor) -> Tensor:
        if not old.is_floating_point():
            return new.to(old.dtype)
        dtype = computed_in(old.dtype)
        return (tau * new.to(dtype) + (1.0 - tau) * old.to(dtype)).to(old.dtype)

    return _combined(step, params, target_params)


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
    Gradient: flows through both arguments.
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
    return _combined(lambda old, new: torch.where(copied, new.to(old.dtype), old), params, target_params)
