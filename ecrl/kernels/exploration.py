"""Exploration by random actions, and by noise that is added to actions or to weights.

The kernels take random numbers as an argument. Draw the random numbers with `ecrl.rng` and one key per environment, so
that environments explore independently. If noise depends on earlier steps, the kernel takes the state of the noise as
an argument and returns the new state. Half-precision inputs are converted to float32, and results are converted back to
half precision.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ecrl.kernels.categorical import categorical_sample
from ecrl.kernels.dtypes import common_dtype, scalars, widened
from ecrl.types import Scalar, check_axes, check_bool, same_shape


class HeldNoise(NamedTuple):
    """Result of `held_noise`.

    `noise`, of shape `[*B, D]`, is the noise of this step. `steps_left`, int64 `[*B]`, is the number of further steps
    for which this noise is kept.
    """

    noise: Tensor
    steps_left: Tensor


def clip_to_bounds(action: Tensor, low: Scalar, high: Scalar) -> Tensor:
    """Clip actions to bounds. Each bound is a number, or a tensor that broadcasts to `action`.

    Raises: ValueError naming a bound that does not broadcast to `action`.

    >>> clip_to_bounds(torch.tensor([-3.0, 3.0]), -1.0, torch.tensor([1.0, 2.0]))
    tensor([-1.,  2.])
    """
    for name, bound in (("low", low), ("high", high)):
        if isinstance(bound, Tensor):
            pairs = zip(reversed(bound.shape), reversed(action.shape), strict=False)
            if bound.ndim > action.ndim or any(size not in (1, expected) for size, expected in pairs):
                expected = f"one that broadcasts to action {list(action.shape)}"
                raise ValueError(f"{name} has shape {list(bound.shape)}, expected {expected}")
    low, high = (x.to(action.dtype) if isinstance(x, Tensor) else x for x in (low, high))
    return action.clamp(min=low).clamp(max=high)


def _for_rows(name: str, number: Scalar, rows: Tensor) -> Scalar:
    """Return a hyperparameter in a shape that broadcasts to `rows`, of shape `[*B, K]`.

    A number or a 0-d tensor keeps its shape. A `[*B]` tensor with one value per row becomes `[*B, 1]`.

    Raises: ValueError naming the hyperparameter if it has any other shape.
    """
    if not isinstance(number, Tensor) or not number.ndim:
        return scalars(**{name: number})[0]
    if number.shape != rows.shape[:-1]:
        expected = f"a number, a 0-d tensor or {list(rows.shape[:-1])}, one for each row"
        raise ValueError(f"{name} has shape {list(number.shape)}, expected {expected}")
    return widened(number)[0].unsqueeze(-1)


def epsilon_greedy(q: Tensor, noise: Tensor, *, epsilon: Scalar) -> Tensor:
    """Sample a uniformly random action with probability `epsilon`, or else take the greedy action, in each row.

        p[a] = epsilon / count(q > -inf) * (q[a] > -inf) + (1 - epsilon) * (a == argmax(q))
        argmax_a(log(p[a]) + noise[a])

    The noise decides for each row whether the action is random, so environments explore at different steps. The greedy
    action is the action with the largest Q-value, or the first such action if several tie.

    Args:
        q: `[*B, A]` float, Q-values. An action whose Q-value is -inf is not taken. If all Q-values of a row are -inf,
            the first action is taken.
        noise: `[*B, A]` float, standard Gumbel noise.
        epsilon: probability of a random action, or a `[*B]` tensor with the probability for each row.

    Returns: int64 `[*B]`.
    Gradient: none.
    Raises: ValueError naming the arguments whose shapes do not match.
    Source: Mnih et al. 2013, arXiv:1312.5602, algorithm 1. The actions are sampled as in `categorical_sample`.

    >>> q, noise = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[0.0, 0.0], [9.0, 0.0]])
    >>> epsilon_greedy(q, noise, epsilon=0.1), epsilon_greedy(q, noise, epsilon=0.0)
    (tensor([1, 0]), tensor([1, 1]))
    """
    same_shape(q=q, noise=noise)
    epsilon = _for_rows("epsilon", epsilon, q)
    dtype, allowed = widened(noise)[0].dtype, q > -torch.inf
    greedy = torch.arange(q.shape[-1], device=q.device) == q.argmax(-1, keepdim=True)
    random = allowed.to(dtype) / allowed.sum(-1, keepdim=True).clamp(min=1)
    p = epsilon * random + (1.0 - epsilon) * greedy.to(dtype)
    return categorical_sample(torch.log(p), noise)


def gaussian_action(action: Tensor, noise: Tensor, low: Scalar, high: Scalar, *, std: Scalar) -> Tensor:
    """Add Gaussian noise to actions and clip the sums to the bounds of the action space.

        clip(action + std * noise, low, high)

    Args:
        action: `[*B, D]` float, actions of a deterministic policy.
        noise: `[*B, D]` float, standard normal noise. To add correlated noise, pass the result of `ou_noise` or
            the `noise` of `held_noise`.
        low: lower bound of the action, a number or a tensor that broadcasts to `action`.
        high: upper bound of the action, a number or a tensor that broadcasts to `action`.
        std: standard deviation of the noise in the units of `action`, or a `[*B]` tensor with one value per row.

    Returns: `[*B, D]`.
    Gradient: flows through `action`, `noise` and `std`, where the result is inside the bounds.
    Raises: ValueError naming the arguments whose shapes do not match.
    Source: Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1.

    >>> gaussian_action(torch.tensor([0.0, 0.9]), torch.tensor([1.0, 1.0]), -1.0, 1.0, std=0.5)
    tensor([0.5000, 1.0000])
    """
    same_shape(action=action, noise=noise)
    std = _for_rows("std", std, action)
    dtype, (action, noise) = common_dtype(action, noise), widened(action, noise)
    std = std.to(action.dtype) if isinstance(std, Tensor) else std
    return clip_to_bounds(action + std * noise, low, high).to(dtype)


def ou_noise(state: Tensor, noise: Tensor, *, theta: Scalar, sigma: Scalar, dt: Scalar) -> Tensor:
    """Run one step of an Ornstein-Uhlenbeck process: noise that changes slowly and drifts back to 0.

        state - theta * state * dt + sigma * sqrt(dt) * noise

    Use the result as the noise of this step and as the `state` of the next call. Start each episode with a `state` of
    zeros.

    Args:
        state: `[*B, D]` float, the result of the previous call.
        noise: `[*B, D]` float, standard normal noise.
        theta: rate at which the process drifts back to 0, per unit of time.
        sigma: volatility, in the units of `state` per square root of the unit of time.
        dt: duration of one step, in the unit of time.

    Returns: `[*B, D]`.
    Gradient: flows through `state` and `noise`.
    Raises: ValueError naming the argument, if shapes differ or a hyperparameter is not 0-d.
    Source: Uhlenbeck and Ornstein 1930; Lillicrap et al. 2016, arXiv:1509.02971, supplement.

    >>> ou_noise(torch.tensor([2.0]), torch.tensor([1.0]), theta=0.5, sigma=2.0, dt=0.25)
    tensor([2.7500])
    """
    same_shape(state=state, noise=noise)
    theta, sigma, dt = scalars(theta=theta, sigma=sigma, dt=dt)
    dtype, (state, noise) = common_dtype(state, noise), widened(state, noise)
    return (state - theta * state * dt + sigma * dt**0.5 * noise).to(dtype)


def held_noise(held: Tensor, steps_left: Tensor, noise: Tensor, duration: int | Tensor) -> HeldNoise:
    """Keep the noise of each environment while `steps_left` is above 0, or else replace it with new noise.

        renewed    = steps_left <= 0
        noise      = noise if renewed else held
        steps_left = (duration if renewed else steps_left) - 1

    Pass the two results to the next call as `held` and `steps_left`. Start each episode with a `steps_left` of 0.

    Args:
        held: `[*B, D]` float, the noise of the previous step.
        steps_left: `[*B]` int64, the number of further steps for which `held` is kept.
        noise: `[*B, D]` float, new noise.
        duration: the number of steps for which new noise is kept. Pass an integer, or an int64 `[*B]` tensor with
            one duration per environment.

    Returns: `noise` of shape `[*B, D]` in the common dtype of `held` and `noise`, and `steps_left` of shape `[*B]`.
    Gradient: flows through `held` and `noise`.
    Raises: ValueError naming the arguments whose shapes do not match.
    Source: Dabney et al. 2020, arXiv:2006.01782 (random durations); Raffin et al. 2020, arXiv:2005.05719 (fixed
        duration).

    >>> held_noise(torch.tensor([[1.0], [1.0]]), torch.tensor([0, 2]), torch.tensor([[5.0], [5.0]]), 3)
    HeldNoise(noise=tensor([[5.],
            [1.]]), steps_left=tensor([2, 1]))
    """
    same_shape(held=held, noise=noise)
    check_axes(steps_left, after="D", noise=noise)
    if isinstance(duration, Tensor) and duration.ndim:
        same_shape(steps_left=steps_left, duration=duration)
    renewed = steps_left <= 0
    return HeldNoise(torch.where(renewed.unsqueeze(-1), noise, held), torch.where(renewed, duration, steps_left) - 1)


def noise_scales(scale: Tensor, uniform: Tensor, renewed: Tensor, *, low: Scalar, high: Scalar) -> Tensor:
    """Redraw the standard deviation of the exploration noise for each environment whose `renewed` is True.

        low + (high - low) * uniform if renewed else scale

    With many environments, some environments then explore with large noise and others with small noise. Renew the scale
    of an environment at the start of each episode.

    Args:
        scale: `[*B]` float, the result of the previous call. Entries whose `renewed` is True are not read.
        uniform: `[*B]` float, random numbers from the uniform distribution on [0, 1).
        renewed: `[*B]` bool, True for environments that draw a new scale.
        low: smallest scale, in the units of actions.
        high: largest scale, in the units of actions.

    Returns: `[*B]`.
    Gradient: flows through `scale` and `uniform`.
    Raises: ValueError naming the argument, if shapes differ, `renewed` is not bool or a hyperparameter is not 0-d.
    Source: Seo et al. 2025, arXiv:2505.22642 (mixed noise).

    >>> noise_scales(torch.tensor([0.3, 0.3]), torch.tensor([0.5, 0.5]), torch.tensor([True, False]), low=0.0, high=0.4)
    tensor([0.2000, 0.3000])
    """
    same_shape(scale=scale, uniform=uniform, renewed=renewed)
    check_bool(renewed=renewed)
    low, high = scalars(low=low, high=high)
    dtype, (scale, uniform) = common_dtype(scale, uniform), widened(scale, uniform)
    return torch.where(renewed, low + (high - low) * uniform, scale).to(dtype)


def _signed_root(x: Tensor) -> Tensor:
    """Return `sign(x) * sqrt(|x|)`, without a gradient, because the gradient of the root is infinite at 0."""
    return x.detach().sign() * x.detach().abs().sqrt()


def noisy_linear(
    x: Tensor, weight: Tensor, bias: Tensor, weight_std: Tensor, bias_std: Tensor, noise_in: Tensor, noise_out: Tensor
) -> Tensor:
    """Apply a linear layer whose weights and biases have factorised Gaussian noise, as in noisy networks.

        f(e)   = sign(e) * sqrt(|e|)
        w[o,i] = weight[o,i] + weight_std[o,i] * f(noise_out[o]) * f(noise_in[i])
        b[o]   = bias[o] + bias_std[o] * f(noise_out[o])
        y[o]   = sum_i(w[o,i] * x[i]) + b[o]

    A layer needs only I + O noise values for its I * O weights. The noisy weights are not stored. The function
    computes the same result with two matrix products, so each row may have its own noise:

        y = weight x + bias + f(noise_out) * (weight_std (f(noise_in) * x) + bias_std)

    Args:
        x: `[*B, I]` float, inputs of the layer.
        weight: `[O, I]` float, means of the weights.
        bias: `[O]` float, means of the biases.
        weight_std: `[O, I]` float, noise scales of the weights, learnt like the means; `sigma` in the paper.
        bias_std: `[O]` float, noise scales of the biases, learnt like the means.
        noise_in: standard normal noise, float `[I]` for all rows, or `[*B, I]` with the noise of each row.
        noise_out: standard normal noise, float `[O]` for all rows, or `[*B, O]` with the noise of each row.

    Returns: `[*B, O]`.
    Gradient: flows through all arguments except the noise.
    Raises: ValueError naming the argument whose shape does not match.
    Source: Fortunato et al. 2018, arXiv:1706.10295, eq. 9 to 11.

    >>> one = torch.ones(1, 1)
    >>> noisy_linear(3.0 * one, one, one[0], 0.5 * one, 0.1 * one[0], torch.tensor([4.0]), torch.tensor([-1.0]))
    tensor([[0.9000]])
    """
    if weight.ndim != 2:
        raise ValueError(f"weight has shape {list(weight.shape)}, expected [O, I]")
    if bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {list(bias.shape)}, expected [{len(weight)}]")
    same_shape(bias=bias, bias_std=bias_std)
    same_shape(weight=weight, weight_std=weight_std)
    outputs, inputs = weight.shape
    if x.shape[-1:] != (inputs,):
        raise ValueError(f"x has shape {list(x.shape)}, expected [*B, {inputs}]")
    for name, noise, size in (("noise_in", noise_in, inputs), ("noise_out", noise_out, outputs)):
        if noise.shape not in ((size,), (*x.shape[:-1], size)):
            expected = f"[{size}] or {[*x.shape[:-1], size]}"
            raise ValueError(f"{name} has shape {list(noise.shape)}, expected {expected}")
    tensors = x, weight, bias, weight_std, bias_std, noise_in, noise_out
    dtype, (x, weight, bias, weight_std, bias_std, noise_in, noise_out) = common_dtype(*tensors), widened(*tensors)
    noise = F.linear(x * _signed_root(noise_in), weight_std, bias_std)
    return (F.linear(x, weight, bias) + _signed_root(noise_out) * noise).to(dtype)
