"""Noisy networks: linear layers add noise with a learnt scale to their weights.

Source: Fortunato et al. 2018, arXiv:1706.10295, with factorised Gaussian noise.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from ecrl import rng
from ecrl.errors import ConfigError
from ecrl.kernels import noisy_linear
from ecrl.policies.core import example
from ecrl.policies.networks import NetworkConfig, Pure, make_network, seeded
from ecrl.spaces import Space


class NoisyNetwork(NamedTuple):
    """Pure functions of a noisy network.

    Attributes:
        mean: the network without noise.
        draw: keys `[*B]` -> noise `[*B, K]`. K is the total number of inputs and outputs of all noisy layers.
        forward: (weights, obs, noise) -> `[*B, outputs]`. The shape of the noise is `[*B, K]`, or `[K]` if all
            observations share the noise.
    """

    mean: Pure
    draw: Callable[[Tensor], Tensor]
    forward: Callable[[TensorDict, Any, Tensor], Tensor]


class _NoisyLinear(nn.Module):
    """A linear layer with noise in its weights. The weights of the replaced layer are the means of the noisy weights.

    `noise_in` and `noise_out` are not arguments of `forward`. The caller passes them to `functional_call` together with
    the weights. In a call without noise, both are None.
    """

    noise_in: Tensor | None
    noise_out: Tensor | None

    def __init__(self, linear: nn.Linear, std: float):
        super().__init__()
        outputs, inputs = linear.weight.shape
        scale = std / sqrt(inputs)
        self.weight = linear.weight
        self.bias = nn.Parameter(torch.zeros(outputs)) if linear.bias is None else linear.bias
        self.weight_std = nn.Parameter(torch.full((outputs, inputs), scale))
        self.bias_std = nn.Parameter(torch.full((outputs,), scale))
        self.register_buffer("noise_in", None)
        self.register_buffer("noise_out", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.noise_in is None or self.noise_out is None:
            return F.linear(x, self.weight, self.bias)
        noise_in, noise_out = (_of_rows(noise, x) for noise in (self.noise_in, self.noise_out))
        return noisy_linear(x, self.weight, self.bias, self.weight_std, self.bias_std, noise_in, noise_out)


def _of_rows(noise: Tensor, x: Tensor) -> Tensor:
    """Expand the noise `[B, K]` of B observations to `[B, ..., K]`, for a layer with inputs `x` of shape `[B, ..., I]`.

    Noise `[K]`, which all observations share, stays unchanged.
    """
    if noise.ndim == 1:
        return noise
    return noise.reshape(len(noise), *[1] * (x.ndim - 2), -1).expand(*x.shape[:-1], -1)


def _with_noise(module: nn.Module, std: float) -> nn.Module:
    """Replace the trained linear layers of a module by noisy layers.

    If the module uses a layer in several places, one noisy layer replaces it in all of them.
    """
    noisy: dict[nn.Module, nn.Module] = {}

    def replaced(layer: nn.Module) -> nn.Module:
        if type(layer) is nn.Linear and layer.weight.requires_grad:  # a subclass of Linear may compute something else
            return noisy.setdefault(layer, _NoisyLinear(layer, std))
        return layer

    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if path:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, replaced(layer))
    return replaced(module)


def noisy_network(
    cfg: NetworkConfig, space: Space, outputs: int, bf16: bool, std: float, key: str = "network"
) -> NoisyNetwork:
    """Build a configured network whose linear layers have noise. Other layers, such as convolutions, have no noise.

    A noisy layer has four weights. `weight` and `bias` are the means, and `weight_std` and `bias_std` are the scales of
    the noise. The means have the same initial values as in a network without noise. The scales start at
    `std / sqrt(inputs)`.

    Raises: ConfigError if the module has no trained layer of type `nn.Linear`, or if the inputs of these layers do not
        have one row per observation.

    >>> from ecrl.spaces import box
    >>> cfg = NetworkConfig(network_cfg={"hidden_sizes": [8]})
    >>> net = noisy_network(cfg, box(-1.0, 1.0, 3), 2, False, std=0.5)
    >>> noise = net.draw(rng.split(rng.key(0), 4))
    >>> noise.shape, net.forward(net.mean.init(), torch.zeros(4, 3), noise).shape
    (torch.Size([4, 21]), torch.Size([4, 2]))
    """
    mean = make_network(cfg, space, outputs, bf16, key, change=lambda module: _with_noise(module, std))
    layers = {name: layer for name, layer in mean.module.named_modules() if isinstance(layer, _NoisyLinear)}
    label = f"{key} ({cfg.type})"
    if not layers:
        problem = "a noisy network needs layers of type nn.Linear, but this network has none with trained weights"
        raise ConfigError(f"{label}: {problem}; leave noisy out")
    names = [f"{name}.{end}".removeprefix(".") for name in layers for end in ("noise_in", "noise_out")]
    sizes = [size for layer in layers.values() for size in reversed(layer.weight.shape)]
    width = sum(sizes)

    def draw(keys: Tensor) -> Tensor:
        return rng.normal(keys, (width,))

    def forward(weights: TensorDict, obs: Any, noise: Tensor) -> Tensor:
        rows = noise if noise.ndim == 1 else noise.reshape(-1, width)
        given = dict(zip(names, rows.split(sizes, -1), strict=True))
        return mean.forward(TensorDict({**dict(weights.items()), **given}, []), obs)

    with torch.no_grad(), seeded(torch.zeros((), dtype=torch.int64)):
        try:
            forward(mean.init(), example(space), torch.zeros(2, width))
        except (RuntimeError, ValueError) as error:
            cause = "the inputs of its linear layers do not have one row per observation"
            raise ConfigError(f"{label}: {cause}, so no observation has its own noise; leave noisy out") from error
    return NoisyNetwork(mean, draw, forward)
