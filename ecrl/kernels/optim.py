"""Optimisers and learning-rate schedules as pure functions.

An optimiser is a function `(params, grads, opt, *, learning_rate, ...) -> (params, opt)`. `params`, `grads` and the
moments in `opt` are TensorDicts with the same structure. The results agree with `torch.optim`. A schedule returns a
factor for the learning rate. Bias corrections and schedules are computed in float64, because `1 - 0.999 ** t` loses
five digits in float32. Half-precision leaves are converted to float32, and results are converted back to half
precision.
"""

from collections.abc import Callable
from math import pi
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, computed_in, scalars
from ecrl.types import Scalar


def _leaves(tree: TensorDict) -> list[Tensor]:
    leaves: Any = tree.values(include_nested=True, leaves_only=True)
    return list(leaves)


def _zeros(params: TensorDict) -> TensorDict:
    return params.apply(torch.zeros_like)


def _zero_steps(params: TensorDict) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=_leaves(params)[0].device)


def _map(fn: Callable[..., Tensor], first: TensorDict, *others: TensorDict) -> TensorDict:
    """Apply `fn` to the matching leaves of several TensorDicts. Raise ValueError if keys or shapes differ.

    Results have the dtypes of `first`, with float32 in place of half precision.
    """
    shapes = {key: leaf.shape for key, leaf in first.items(True, True)}
    for other in others:
        unmatched = sorted(map(str, set(shapes) ^ set(other.keys(True, True))))
        if unmatched:
            raise ValueError(
                f"params, grads and opt must have the same leaves; only one side has {', '.join(unmatched)}"
            )
        wrong = [
            f"{k} {list(shapes[k])} and {list(x.shape)}" for k, x in other.items(True, True) if x.shape != shapes[k]
        ]
        if wrong:
            raise ValueError(
                f"params, grads and opt must have leaves of the same shapes; these differ: {', '.join(wrong)}"
            )

    def apply(leaf: Tensor, *rest: Tensor) -> Tensor:
        return fn(*(x.to(computed_in(x.dtype)) for x in (leaf, *rest))).to(computed_in(leaf.dtype))

    return first.apply(apply, *others)


def _cast_as(like: TensorDict, new: TensorDict) -> TensorDict:
    """Convert each leaf of `new` to the dtype of the matching leaf of `like`."""
    if all(computed_in(leaf.dtype) == leaf.dtype for leaf in _leaves(like)):
        return new
    return like.apply(lambda old, leaf: leaf.to(old.dtype), new)


def adam_init(params: TensorDict) -> TensorDict:
    """Return the optimiser state for `adam` and `adamw`: the first and second moments, and the int64 step count.

    >>> sorted(adam_init(TensorDict({"w": torch.zeros(2)}, [])).keys())
    ['mu', 'nu', 'step']
    """
    return TensorDict({"mu": _zeros(params), "nu": _zeros(params), "step": _zero_steps(params)}, [])


def adam(
    params: TensorDict,
    grads: TensorDict,
    opt: TensorDict,
    *,
    learning_rate: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    eps: Scalar,
) -> tuple[TensorDict, TensorDict]:
    """Run one step of Adam.

        mu = beta1 mu + (1 - beta1) g;  nu = beta2 nu + (1 - beta2) g^2
        p  = p - learning_rate * (mu / (1 - beta1^t)) / (sqrt(nu / (1 - beta2^t)) + eps)

    Args:
        params: TensorDict of parameters.
        grads: TensorDict of gradients, with the same structure as `params`.
        opt: optimiser state from `adam_init` or from the previous step.
        learning_rate: step size.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: constant added to the square root in the denominator, in the units of the gradients.

    Returns: the new params and opt. The inputs do not change.
    Gradient: flows through every input. The gradient is not finite where the new `nu` is 0.
    Raises: ValueError naming the leaves whose keys or shapes do not match, or a hyperparameter that is not 0-d.
    Source: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1.

    >>> p, g = TensorDict({"w": torch.tensor([1.0])}, []), TensorDict({"w": torch.tensor([5.0])}, [])
    >>> adam(p, g, adam_init(p), learning_rate=0.1, beta1=0.9, beta2=0.999, eps=1e-8)[0]["w"]
    tensor([0.9000])
    """
    learning_rate, beta1, beta2, eps = scalars(learning_rate=learning_rate, beta1=beta1, beta2=beta2, eps=eps)
    mu = _map(lambda m, g: beta1 * m + (1.0 - beta1) * g, opt["mu"], grads)
    nu = _map(lambda v, g: beta2 * v + (1.0 - beta2) * g * g, opt["nu"], grads)
    step = opt["step"] + 1
    t = step.to(torch.float64)
    # Numerator and denominator are multiplied by `root`, so that only scalars need a bias correction.
    root = torch.sqrt(1.0 - torch.pow(beta2, t))
    rate, scaled_eps = learning_rate * root / (1.0 - torch.pow(beta1, t)), eps * root

    def move(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return p - rate.to(p.dtype) * m / (torch.sqrt(v) + scaled_eps.to(p.dtype))

    moved = _cast_as(params, _map(move, params, mu, nu))
    return moved, TensorDict({"mu": _cast_as(opt["mu"], mu), "nu": _cast_as(opt["nu"], nu), "step": step}, [])


def adamw(
    params: TensorDict,
    grads: TensorDict,
    opt: TensorDict,
    *,
    learning_rate: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    eps: Scalar,
    weight_decay: Scalar,
) -> tuple[TensorDict, TensorDict]:
    """Run one step of Adam with decoupled weight decay. The weight decay does not affect the moments.

        p = p * (1 - learning_rate * weight_decay), then one step of `adam`

    Args:
        params: TensorDict of parameters.
        grads: TensorDict of gradients, with the same structure as `params`.
        opt: optimiser state from `adam_init` or from the previous step.
        learning_rate: step size.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: constant added to the square root in the denominator, in the units of the gradients.
        weight_decay: decay rate of the parameters, per unit of learning rate.

    Returns: the new params and opt. The inputs do not change.
    Gradient: flows through every input. The gradient is not finite where the new `nu` is 0.
    Raises: ValueError naming the leaves whose keys or shapes do not match, or a hyperparameter that is not 0-d.
    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.

    >>> p, g = TensorDict({"w": torch.tensor([1.0])}, []), TensorDict({"w": torch.tensor([0.0])}, [])
    >>> adamw(p, g, adam_init(p), learning_rate=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.5)[0]["w"]
    tensor([0.9500])
    """
    learning_rate, weight_decay = scalars(learning_rate=learning_rate, weight_decay=weight_decay)
    decayed = _map(lambda p: p * (1.0 - learning_rate * weight_decay), params)
    moved, opt = adam(decayed, grads, opt, learning_rate=learning_rate, beta1=beta1, beta2=beta2, eps=eps)
    return _cast_as(params, moved), opt


def sgd_init(params: TensorDict) -> TensorDict:
    """Return the optimiser state for `sgd`: the momentum buffer and the int64 step count.

    >>> sorted(sgd_init(TensorDict({"w": torch.zeros(2)}, [])).keys())
    ['momentum', 'step']
    """
    return TensorDict({"momentum": _zeros(params), "step": _zero_steps(params)}, [])


def sgd(
    params: TensorDict, grads: TensorDict, opt: TensorDict, *, learning_rate: Scalar, momentum: Scalar
) -> tuple[TensorDict, TensorDict]:
    """Run one step of gradient descent with heavy-ball momentum.

        buffer = momentum * buffer + g;  p = p - learning_rate * buffer

    Args:
        params: TensorDict of parameters.
        grads: TensorDict of gradients, with the same structure as `params`.
        opt: optimiser state from `sgd_init` or from the previous step.
        learning_rate: step size.
        momentum: decay rate of the momentum buffer. Use 0 for plain gradient descent.

    Returns: the new params and opt. The inputs do not change.
    Gradient: flows through every input.
    Raises: ValueError naming the leaves whose keys or shapes do not match, or a hyperparameter that is not 0-d.
    Source: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning", eq. 1 and 2.

    >>> p, g = TensorDict({"w": torch.tensor([1.0])}, []), TensorDict({"w": torch.tensor([5.0])}, [])
    >>> sgd(p, g, sgd_init(p), learning_rate=0.1, momentum=0.0)[0]["w"]
    tensor([0.5000])
    """
    learning_rate, momentum = scalars(learning_rate=learning_rate, momentum=momentum)
    buffer = _map(lambda b, g: momentum * b + g, opt["momentum"], grads)
    moved = _map(lambda p, b: p - learning_rate * b, params, buffer)
    return _cast_as(params, moved), TensorDict(
        {"momentum": _cast_as(opt["momentum"], buffer), "step": opt["step"] + 1}, []
    )


def rmsprop_init(params: TensorDict) -> TensorDict:
    """Return the optimiser state for `rmsprop`: the second moment and the int64 step count.

    >>> sorted(rmsprop_init(TensorDict({"w": torch.zeros(2)}, [])).keys())
    ['nu', 'step']
    """
    return TensorDict({"nu": _zeros(params), "step": _zero_steps(params)}, [])


def rmsprop(
    params: TensorDict, grads: TensorDict, opt: TensorDict, *, learning_rate: Scalar, alpha: Scalar, eps: Scalar
) -> tuple[TensorDict, TensorDict]:
    """Run one step of RMSProp.

        nu = alpha nu + (1 - alpha) g^2;  p = p - learning_rate * g / (sqrt(nu) + eps)

    Args:
        params: TensorDict of parameters.
        grads: TensorDict of gradients, with the same structure as `params`.
        opt: optimiser state from `rmsprop_init` or from the previous step.
        learning_rate: step size.
        alpha: decay rate of the second moment.
        eps: constant added to the square root in the denominator, in the units of the gradients.

    Returns: the new params and opt. The inputs do not change.
    Gradient: flows through every input. The gradient is not finite where the new `nu` is 0.
    Raises: ValueError naming the leaves whose keys or shapes do not match, or a hyperparameter that is not 0-d.
    Source: Tieleman and Hinton 2012, "Neural networks for machine learning", lecture 6e.

    >>> p, g = TensorDict({"w": torch.tensor([1.0])}, []), TensorDict({"w": torch.tensor([4.0])}, [])
    >>> rmsprop(p, g, rmsprop_init(p), learning_rate=0.5, alpha=0.75, eps=1e-8)[0]["w"]
    tensor([0.])
    """
    learning_rate, alpha, eps = scalars(learning_rate=learning_rate, alpha=alpha, eps=eps)
    nu = _map(lambda v, g: alpha * v + (1.0 - alpha) * g * g, opt["nu"], grads)
    moved = _map(lambda p, g, v: p - learning_rate * g / (torch.sqrt(v) + eps), params, grads, nu)
    return _cast_as(params, moved), TensorDict({"nu": _cast_as(opt["nu"], nu), "step": opt["step"] + 1}, [])


def global_norm(grads: TensorDict) -> Tensor:
    """Return the Euclidean norm of all gradients together, as a 0-d tensor.

        sqrt(sum_leaves(sum(g^2)))

    Gradient: flows through `grads`. The gradient is 0 if all leaves are 0.

    >>> global_norm(TensorDict({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, []))
    tensor(5.)
    """
    return _norm(grads).to(common_dtype(*_leaves(grads)))


def _norm(grads: TensorDict) -> Tensor:
    """Compute `global_norm`, but return float32 for half-precision inputs."""
    leaves = [torch.linalg.vector_norm(g.to(computed_in(g.dtype))) for g in _leaves(grads)]
    return torch.linalg.vector_norm(torch.stack(leaves))


def clip_by_global_norm(grads: TensorDict, *, max_norm: Scalar) -> tuple[TensorDict, Tensor]:
    """Scale all gradients by a common factor, so that their global norm is at most `max_norm`.

        g * min(1, max_norm / (norm + 1e-6))

    Args:
        grads: TensorDict of gradients.
        max_norm: upper bound of the global norm.

    Returns: the clipped gradients and the 0-d global norm before clipping.
    Gradient: flows through `grads`.
    Source: Pascanu et al. 2013, arXiv:1211.5063, algorithm 1. The 1e-6 is from `torch.nn.utils.clip_grad_norm_`.

    >>> clipped, norm = clip_by_global_norm(TensorDict({"a": torch.tensor([3.0, 4.0])}, []), max_norm=1.0)
    >>> clipped["a"], norm
    (tensor([0.6000, 0.8000]), tensor(5.))
    """
    (max_norm,) = scalars(max_norm=max_norm)
    norm = _norm(grads)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return _cast_as(grads, _map(lambda g: g * factor, grads)), norm.to(common_dtype(*_leaves(grads)))


def linear_schedule(step: Tensor, *, start: Scalar, end: Scalar, horizon: int | Tensor) -> Tensor:
    """Return a float64 factor that moves linearly from `start` to `end` over `horizon` steps and then stays at `end`.

        start + (end - start) * min(step / horizon, 1)

    Gradient: flows through `start` and `end` if they are tensors, but not through an integer `step`.
    Source: `torch.optim.lr_scheduler.LinearLR`.

    >>> linear_schedule(torch.tensor(5), start=1.0, end=0.0, horizon=10)
    tensor(0.5000, dtype=torch.float64)
    """
    start, end = scalars(start=start, end=end)
    progress = (step.to(torch.float64) / horizon).clamp(max=1.0)
    return start + (end - start) * progress


def cosine_schedule(step: Tensor, *, end: Scalar, horizon: int | Tensor) -> Tensor:
    """Return a float64 factor that falls from 1 to `end` along half a cosine over `horizon` steps, then stays at `end`.

        end + (1 - end) * (1 + cos(pi * min(step / horizon, 1))) / 2

    Gradient: flows through `end` if it is a tensor, but not through an integer `step`.
    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5.

    >>> cosine_schedule(torch.tensor(5), end=0.0, horizon=10)
    tensor(0.5000, dtype=torch.float64)
    """
    (end,) = scalars(end=end)
    progress = (step.to(torch.float64) / horizon).clamp(max=1.0)
    return end + (1.0 - end) * 0.5 * (1.0 + torch.cos(pi * progress))


def step_schedule(step: Tensor, *, every: int | Tensor, gamma: Scalar) -> Tensor:
    """Return a float64 factor that starts at 1 and is multiplied by `gamma` once per `every` steps.

        gamma ^ floor(step / every)

    Gradient: flows through `gamma` if it is a tensor, but not through an integer `step`.
    Source: `torch.optim.lr_scheduler.StepLR`.

    >>> step_schedule(torch.tensor(5), every=2, gamma=0.5)
    tensor(0.2500, dtype=torch.float64)
    """
    (gamma,) = scalars(gamma=gamma)
    return gamma ** torch.div(step, every, rounding_mode="floor").to(torch.float64)


def exponential_schedule(step: Tensor, *, gamma: Scalar) -> Tensor:
    """Return a float64 factor that starts at 1 and is multiplied by `gamma` at every step.

        gamma ^ step

    Gradient: flows through `gamma` if it is a tensor, but not through an integer `step`.
    Source: `torch.optim.lr_scheduler.ExponentialLR`.

    >>> exponential_schedule(torch.tensor(2), gamma=0.5)
    tensor(0.2500, dtype=torch.float64)
    """
    (gamma,) = scalars(gamma=gamma)
    return gamma ** step.to(torch.float64)
