"""Optimisers and learning-rate schedules as pure functions.

An optimiser is a function `(params, grads, opt, *, learning_rate, ...) -> (params, opt)`. `params`, `grads` and the
moments in `opt` are TensorDicts with the same structure. The results agree with `torch.optim`. Only
`adamw` includes weight decay. With another optimiser, call `l2_weight_decay` or `decoupled_weight_decay` before the
step. A schedule returns a factor for the learning rate. Bias corrections and schedules are computed in float64, because
`1 - 0.999 ** t` has only five correct digits in float32 if t is small. Half-precision leaves are converted to float32,
and results are converted back to half precision.

In the equations, p is a parameter, g is its gradient, and t is the number of steps so far, including the current step.
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


def _map(
    fn: Callable[..., Tensor], first: TensorDict, *others: TensorDict, arguments: str = "params, grads and opt"
) -> TensorDict:
    """Apply `fn` to the matching leaves of several TensorDicts. Raise ValueError if keys or shapes differ.

    Results have the dtypes of `first`, with float32 in place of half precision. `arguments` names the TensorDicts in
    error messages.
    """
    shapes = {key: leaf.shape for key, leaf in first.items(True, True)}
    for other in others:
        unmatched = sorted(map(str, set(shapes) ^ set(other.keys(True, True))))
        if unmatched:
            raise ValueError(f"{arguments} must have the same leaves; some of them lack {', '.join(unmatched)}")
        wrong = [
            f"{k} {list(shapes[k])} and {list(x.shape)}" for k, x in other.items(True, True) if x.shape != shapes[k]
        ]
        if wrong:
            raise ValueError(f"{arguments} must have leaves of the same shapes; these differ: {', '.join(wrong)}")

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
    mu, nu = _adam_moments(grads, opt, beta1, beta2)
    step = opt["step"] + 1
    moved = _adam_move(params, mu, nu, step, learning_rate, beta1, beta2, eps)
    return moved, TensorDict({"mu": _cast_as(opt["mu"], mu), "nu": _cast_as(opt["nu"], nu), "step": step}, [])


def _adam_moments(grads: TensorDict, opt: TensorDict, beta1: Scalar, beta2: Scalar) -> tuple[TensorDict, TensorDict]:
    """Return the new first and second moments. Half-precision moments become float32."""
    mu = _map(lambda m, g: beta1 * m + (1.0 - beta1) * g, opt["mu"], grads)
    return mu, _map(lambda v, g: beta2 * v + (1.0 - beta2) * g * g, opt["nu"], grads)


def _adam_move(
    params: TensorDict,
    mu: TensorDict,
    nu: TensorDict,
    step: Tensor,
    learning_rate: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    eps: Scalar,
) -> TensorDict:
    """Return the parameters after step number `step`, in the dtypes of `params`."""
    t = step.to(torch.float64)
    # Numerator and denominator are multiplied by `root`, so that only scalars need a bias correction.
    root = torch.sqrt(1.0 - torch.pow(beta2, t))
    rate, scaled_eps = learning_rate * root / (1.0 - torch.pow(beta1, t)), eps * root

    def move(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return p - rate.to(p.dtype) * m / (torch.sqrt(v) + scaled_eps.to(p.dtype))

    return _cast_as(params, _map(move, params, mu, nu))


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
    decayed = _decayed(params, learning_rate, weight_decay)
    moved, opt = adam(decayed, grads, opt, learning_rate=learning_rate, beta1=beta1, beta2=beta2, eps=eps)
    return _cast_as(params, moved), opt


def amsgrad_init(params: TensorDict) -> TensorDict:
    """Return the optimiser state for `amsgrad`: the state of `adam_init`, and the largest second moment so far.

    >>> sorted(amsgrad_init(TensorDict({"w": torch.zeros(2)}, [])).keys())
    ['max_nu', 'mu', 'nu', 'step']
    """
    return adam_init(params).set("max_nu", _zeros(params))


def amsgrad(
    params: TensorDict,
    grads: TensorDict,
    opt: TensorDict,
    *,
    learning_rate: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    eps: Scalar,
) -> tuple[TensorDict, TensorDict]:
    """Run one step of AMSGrad: Adam with the largest second moment so far in place of the second moment.

        mu = beta1 mu + (1 - beta1) g;  nu = beta2 nu + (1 - beta2) g^2;  max_nu = max(max_nu, nu)
        p  = p - learning_rate * (mu / (1 - beta1^t)) / (sqrt(max_nu / (1 - beta2^t)) + eps)

    If `learning_rate` is constant, the effective learning rate of a parameter never grows, apart from the effect of the
    bias corrections.

    Args:
        params: TensorDict of parameters.
        grads: TensorDict of gradients, with the same structure as `params`.
        opt: optimiser state from `amsgrad_init` or from the previous step.
        learning_rate: step size.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: constant added to the square root in the denominator, in the units of the gradients.

    Returns: the new params and opt. The inputs do not change.
    Gradient: flows through every input. The gradient is not finite where the new `max_nu` is 0.
    Raises: ValueError naming the leaves whose keys or shapes do not match, or a hyperparameter that is not 0-d.
    Source: Reddi et al. 2018, arXiv:1904.09237, algorithm 2. The bias corrections are from `torch.optim.Adam`.

    >>> p, g = TensorDict({"w": torch.tensor([1.0])}, []), TensorDict({"w": torch.tensor([5.0])}, [])
    >>> amsgrad(p, g, amsgrad_init(p), learning_rate=0.1, beta1=0.9, beta2=0.999, eps=1e-8)[0]["w"]
    tensor([0.9000])
    """
    learning_rate, beta1, beta2, eps = scalars(learning_rate=learning_rate, beta1=beta1, beta2=beta2, eps=eps)
    mu, nu = _adam_moments(grads, opt, beta1, beta2)
    max_nu = _map(torch.maximum, opt["max_nu"], nu)
    step = opt["step"] + 1
    moved = _adam_move(params, mu, max_nu, step, learning_rate, beta1, beta2, eps)
    slots = {name: _cast_as(opt[name], new) for name, new in (("mu", mu), ("nu", nu), ("max_nu", max_nu))}
    return moved, TensorDict({**slots, "step": step}, [])


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
    Source: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning", eq. 1 and 2, in
        the form of `torch.optim.SGD`.

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


def nesterov_sgd(
    params: TensorDict, grads: TensorDict, opt: TensorDict, *, learning_rate: Scalar, momentum: Scalar
) -> tuple[TensorDict, TensorDict]:
    """Run one step of gradient descent with Nesterov momentum.

        buffer = momentum * buffer + g;  p = p - learning_rate * (g + momentum * buffer)

    Args:
        params: TensorDict of parameters.
        grads: TensorDict of gradients, with the same structure as `params`.
        opt: optimiser state from `sgd_init` or from the previous step.
        learning_rate: step size.
        momentum: decay rate of the momentum buffer.

    Returns: the new params and opt. The inputs do not change.
    Gradient: flows through every input.
    Raises: ValueError naming the leaves whose keys or shapes do not match, or a hyperparameter that is not 0-d.
    Source: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning", eq. 3 and 4, in
        the form of `torch.optim.SGD`.

    >>> p, g = TensorDict({"w": torch.tensor([1.0])}, []), TensorDict({"w": torch.tensor([4.0])}, [])
    >>> nesterov_sgd(p, g, sgd_init(p), learning_rate=0.125, momentum=0.5)[0]["w"]
    tensor([0.2500])
    """
    learning_rate, momentum = scalars(learning_rate=learning_rate, momentum=momentum)
    buffer = _map(lambda b, g: momentum * b + g, opt["momentum"], grads)
    moved = _map(lambda p, g, b: p - learning_rate * (g + momentum * b), params, grads, buffer)
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


def centered_rmsprop_init(params: TensorDict) -> TensorDict:
    """Return the optimiser state for `centered_rmsprop`: the first and second moments, and the int64 step count.

    >>> sorted(centered_rmsprop_init(TensorDict({"w": torch.zeros(2)}, [])).keys())
    ['mu', 'nu', 'step']
    """
    return TensorDict({"mu": _zeros(params), "nu": _zeros(params), "step": _zero_steps(params)}, [])


def centered_rmsprop(
    params: TensorDict, grads: TensorDict, opt: TensorDict, *, learning_rate: Scalar, alpha: Scalar, eps: Scalar
) -> tuple[TensorDict, TensorDict]:
    """Run one step of RMSProp with the variance of the gradients in place of their second moment.

        mu = alpha mu + (1 - alpha) g;  nu = alpha nu + (1 - alpha) g^2
        p  = p - learning_rate * g / (sqrt(max(nu - mu^2, 0)) + eps)

    Rounding may make `nu - mu^2` negative, so the difference is clipped at 0.

    Args:
        params: TensorDict of parameters.
        grads: TensorDict of gradients, with the same structure as `params`.
        opt: optimiser state from `centered_rmsprop_init` or from the previous step.
        learning_rate: step size.
        alpha: decay rate of both moments.
        eps: constant added to the square root in the denominator, in the units of the gradients.

    Returns: the new params and opt. The inputs do not change.
    Gradient: flows through every input. The gradient is not finite where the new `nu - mu^2` is 0.
    Raises: ValueError naming the leaves whose keys or shapes do not match, or a hyperparameter that is not 0-d.
    Source: Graves 2013, arXiv:1308.0850, eq. 38 to 41. `eps` is outside the root, as in `torch.optim.RMSprop`.

    >>> p, g = TensorDict({"w": torch.tensor([1.0])}, []), TensorDict({"w": torch.tensor([4.0])}, [])
    >>> centered_rmsprop(p, g, centered_rmsprop_init(p), learning_rate=0.5, alpha=0.5, eps=1e-8)[0]["w"]
    tensor([0.])
    """
    learning_rate, alpha, eps = scalars(learning_rate=learning_rate, alpha=alpha, eps=eps)
    mu = _map(lambda m, g: alpha * m + (1.0 - alpha) * g, opt["mu"], grads)
    nu = _map(lambda v, g: alpha * v + (1.0 - alpha) * g * g, opt["nu"], grads)

    def move(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return p - learning_rate * g / (torch.sqrt((v - m * m).clamp(min=0.0)) + eps)

    moved = _cast_as(params, _map(move, params, grads, mu, nu))
    slots = {"mu": _cast_as(opt["mu"], mu), "nu": _cast_as(opt["nu"], nu)}
    return moved, TensorDict({**slots, "step": opt["step"] + 1}, [])


def l2_weight_decay(grads: TensorDict, params: TensorDict, *, weight_decay: Scalar) -> TensorDict:
    """Add the gradients of an L2 penalty on `params` to `grads`. Pass the result to an optimiser.

        g + weight_decay * p

    Args:
        grads: TensorDict of gradients. If you clip the gradients, clip them before this call, because optimisers of
            `torch.optim` also add the gradients of the penalty to clipped gradients.
        params: TensorDict of parameters, with the same structure as `grads`.
        weight_decay: factor in the penalty `weight_decay / 2 * sum(p^2)`.

    Returns: the new gradients, with the dtypes of `grads`. The inputs do not change.
    Gradient: flows through every input.
    Raises: ValueError naming the leaves whose keys or shapes do not match, or `weight_decay` if it is not 0-d.
    Source: `weight_decay` of `torch.optim.SGD`, `torch.optim.Adam` and `torch.optim.RMSprop`.

    >>> p, g = TensorDict({"w": torch.tensor([2.0])}, []), TensorDict({"w": torch.tensor([5.0])}, [])
    >>> l2_weight_decay(g, p, weight_decay=0.5)["w"]
    tensor([6.])
    """
    (weight_decay,) = scalars(weight_decay=weight_decay)
    decayed = _map(lambda g, p: g + weight_decay * p, grads, params, arguments="grads and params")
    return _cast_as(grads, decayed)


def decoupled_weight_decay(params: TensorDict, *, learning_rate: Scalar, weight_decay: Scalar) -> TensorDict:
    """Shrink the parameters before a step of any optimiser. The weight decay does not affect the moments.

        p * (1 - learning_rate * weight_decay)

    Args:
        params: TensorDict of parameters.
        learning_rate: step size of the optimiser.
        weight_decay: decay rate of the parameters, per unit of learning rate.

    Returns: the new parameters, with the dtypes of `params`. The input does not change.
    Gradient: flows through every input.
    Raises: ValueError naming a hyperparameter that is not 0-d.
    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithms 1 and 2.

    >>> decoupled_weight_decay(TensorDict({"w": torch.tensor([2.0])}, []), learning_rate=0.5, weight_decay=0.5)["w"]
    tensor([1.5000])
    """
    return _cast_as(params, _decayed(params, learning_rate, weight_decay))


def _decayed(params: TensorDict, learning_rate: Scalar, weight_decay: Scalar) -> TensorDict:
    """Compute `decoupled_weight_decay`, but return float32 for half-precision parameters."""
    learning_rate, weight_decay = scalars(learning_rate=learning_rate, weight_decay=weight_decay)
    return _map(lambda p: p * (1.0 - learning_rate * weight_decay), params)


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
    Raises: ValueError if `max_norm` is not 0-d.
    Source: Pascanu et al. 2013, arXiv:1211.5063, algorithm 1. The 1e-6 is from `torch.nn.utils.clip_grad_norm_`.

    >>> clipped, norm = clip_by_global_norm(TensorDict({"a": torch.tensor([3.0, 4.0])}, []), max_norm=1.0)
    >>> clipped["a"], norm
    (tensor([0.6000, 0.8000]), tensor(5.))
    """
    (max_norm,) = scalars(max_norm=max_norm)
    norm = _norm(grads)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return _cast_as(grads, _map(lambda g: g * factor, grads)), norm.to(common_dtype(*_leaves(grads)))


def _progress(step: int | Tensor, horizon: int | Tensor) -> Tensor:
    """Return `step / horizon`, clamped to at most 1, as a float64 tensor."""
    return (_steps(step) / _length("horizon", horizon)).clamp(max=1.0)


def _steps(step: int | Tensor) -> Tensor:
    """Convert a number of steps to a float64 tensor. Raise ValueError if it is neither a number nor a tensor."""
    if isinstance(step, Tensor):
        return step.to(torch.float64)
    (step,) = scalars(step=step)  # pyright: ignore
    return torch.tensor(step, dtype=torch.float64)


def _length(name: str, length: int | Tensor) -> Any:
    """Return `length`, a number of steps. Raise ValueError if `length` is not 0-d, or if it is a number below 1."""
    (length,) = scalars(**{name: length})  # pyright: ignore
    if not isinstance(length, Tensor) and length < 1:
        raise ValueError(f"{name} is {length}, expected at least 1")
    return length


def linear_schedule(step: int | Tensor, *, start: Scalar, end: Scalar, horizon: int | Tensor) -> Tensor:
    """Return a float64 factor that moves linearly from `start` to `end` over `horizon` steps and then stays at `end`.

        start + (end - start) * min(step / horizon, 1)

    `step` is an integer or a tensor of any shape, and the result has the shape of `step`. With an `end` of 1, the
    schedule is a warm-up followed by a constant factor.

    Gradient: flows through `start` and `end` if they are tensors, but not through an integer `step`.
    Raises: ValueError if `step` is neither a number nor a tensor, if another argument is not 0-d, or if `horizon` is a
        number below 1.
    Source: `torch.optim.lr_scheduler.LinearLR`.

    >>> linear_schedule(5, start=1.0, end=0.0, horizon=10)
    tensor(0.5000, dtype=torch.float64)
    """
    start, end = scalars(start=start, end=end)
    return start + (end - start) * _progress(step, horizon)


def cosine_schedule(step: int | Tensor, *, end: Scalar, horizon: int | Tensor) -> Tensor:
    """Return a float64 factor that falls from 1 to `end` along half a cosine over `horizon` steps, then stays at `end`.

        end + (1 - end) * (1 + cos(pi * min(step / horizon, 1))) / 2

    `step` is an integer or a tensor of any shape, and the result has the shape of `step`.

    Gradient: flows through `end` if it is a tensor, but not through an integer `step`.
    Raises: ValueError if `step` is neither a number nor a tensor, if another argument is not 0-d, or if `horizon` is a
        number below 1.
    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5.

    >>> cosine_schedule(5, end=0.0, horizon=10)
    tensor(0.5000, dtype=torch.float64)
    """
    (end,) = scalars(end=end)
    return end + (1.0 - end) * 0.5 * (1.0 + torch.cos(pi * _progress(step, horizon)))


def warmup_linear_schedule(
    step: int | Tensor, *, start: Scalar, end: Scalar, warmup: int | Tensor, horizon: int | Tensor
) -> Tensor:
    """Return a float64 factor that rises from `start` to 1 over `warmup` steps, and then moves linearly to `end`.

        start + (1 - start) * step / warmup                                if step < warmup
        1 + (end - 1) * min((step - warmup) / (horizon - warmup), 1)       otherwise

    `step` is an integer or a tensor of any shape, and the result has the shape of `step`. For a constant factor after
    the warm-up, call `linear_schedule` with an `end` of 1.

    Args:
        step: number of steps so far.
        start: factor at step 0.
        end: factor from step `horizon` on.
        warmup: number of steps of the warm-up.
        horizon: number of steps of the whole schedule. If `horizon` is not above `warmup`, the factor reaches `end` one
            step after the warm-up.

    Returns: float64, in the shape of `step`.
    Gradient: flows through `start` and `end` if they are tensors, but not through an integer `step`.
    Raises: ValueError if `step` is neither a number nor a tensor, if another argument is not 0-d, or if `warmup` or
        `horizon` is a number below 1.
    Source: Goyal et al. 2017, arXiv:1706.02677, sec. 2.2 (warm-up).

    >>> warmup_linear_schedule(torch.tensor([0, 2, 5, 8]), start=0.5, end=0.0, warmup=2, horizon=8)
    tensor([0.5000, 1.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    rest = _after_warmup(horizon, warmup)
    after = linear_schedule(_steps(step) - warmup, start=1.0, end=end, horizon=rest)
    return torch.where(_steps(step) < warmup, linear_schedule(step, start=start, end=1.0, horizon=warmup), after)


def warmup_cosine_schedule(
    step: int | Tensor, *, start: Scalar, end: Scalar, warmup: int | Tensor, horizon: int | Tensor
) -> Tensor:
    """Return a float64 factor that rises from `start` to 1 over `warmup` steps, and then falls to `end` along a cosine.

        start + (1 - start) * step / warmup                                             if step < warmup
        end + (1 - end) * (1 + cos(pi * min((step - warmup) / (horizon - warmup), 1))) / 2     otherwise

    `step` is an integer or a tensor of any shape, and the result has the shape of `step`.

    Args:
        step: number of steps so far.
        start: factor at step 0.
        end: factor from step `horizon` on.
        warmup: number of steps of the warm-up.
        horizon: number of steps of the whole schedule. If `horizon` is not above `warmup`, the factor reaches `end` one
            step after the warm-up.

    Returns: float64, in the shape of `step`.
    Gradient: flows through `start` and `end` if they are tensors, but not through an integer `step`.
    Raises: ValueError if `step` is neither a number nor a tensor, if another argument is not 0-d, or if `warmup` or
        `horizon` is a number below 1.
    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5; Goyal et al. 2017, arXiv:1706.02677, sec. 2.2
        (warm-up).

    >>> warmup_cosine_schedule(torch.tensor([0, 2, 5, 8]), start=0.5, end=0.0, warmup=2, horizon=8)
    tensor([0.5000, 1.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    rest = _after_warmup(horizon, warmup)
    after = cosine_schedule(_steps(step) - warmup, end=end, horizon=rest)
    return torch.where(_steps(step) < warmup, linear_schedule(step, start=start, end=1.0, horizon=warmup), after)


def _after_warmup(horizon: int | Tensor, warmup: int | Tensor) -> Any:
    """Return the number of steps between the warm-up and the horizon, at least 1."""
    rest = _length("horizon", horizon) - _length("warmup", warmup)
    return rest.clamp(min=1) if isinstance(rest, Tensor) else max(rest, 1)


def step_schedule(step: int | Tensor, *, every: int | Tensor, gamma: Scalar) -> Tensor:
    """Return a float64 factor that starts at 1 and is multiplied by `gamma` once per `every` steps.

        gamma ^ floor(step / every)

    `step` is an integer or a tensor of any shape, and the result has the shape of `step`.

    Gradient: flows through `gamma` if it is a tensor, but not through an integer `step`.
    Raises: ValueError if `step` is neither a number nor a tensor, if another argument is not 0-d, or if `every` is a
        number below 1.
    Source: `torch.optim.lr_scheduler.StepLR`.

    >>> step_schedule(5, every=2, gamma=0.5)
    tensor(0.2500, dtype=torch.float64)
    """
    (gamma,) = scalars(gamma=gamma)
    return gamma ** torch.div(_steps(step), _length("every", every), rounding_mode="floor")


def exponential_schedule(step: int | Tensor, *, gamma: Scalar) -> Tensor:
    """Return a float64 factor that starts at 1 and is multiplied by `gamma` at every step.

        gamma ^ step

    `step` is an integer or a tensor of any shape, and the result has the shape of `step`.

    Gradient: flows through `gamma` if it is a tensor, but not through an integer `step`.
    Raises: ValueError if `step` is neither a number nor a tensor, or if `gamma` is not 0-d.
    Source: `torch.optim.lr_scheduler.ExponentialLR`.

    >>> exponential_schedule(2, gamma=0.5)
    tensor(0.2500, dtype=torch.float64)
    """
    (gamma,) = scalars(gamma=gamma)
    return gamma ** _steps(step)
