"""The network `fused`, for a Dict of observations. Encoders read single observations, such as images.

Fully connected layers then read the features of all encoders, and the observations without an encoder.
"""

from collections import OrderedDict
from typing import Annotated, Any

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn

from ecrl.config.model import Count
from ecrl.errors import ConfigError
from ecrl.policies.core import flatten
from ecrl.policies.images import SpaceError, describe, has_images, image_parts, layer_name
from ecrl.policies.mlp import ACTIVATIONS, Activation, MLPConfig, Width, build_mlp
from ecrl.policies.networks import NetworkConfig, Pure, build_network, make_network
from ecrl.registry import did_you_mean, register_network
from ecrl.spaces import Dict, Space, flat_dim


class EncoderConfig(NetworkConfig):
    """Network that encodes an observation as features, which other networks read."""

    features: Count = Field(default=256, description="number of outputs")
    activation: Activation | None = Field(default="relu", description="activation after the outputs; null for none")


class FusedConfig(MLPConfig):
    """Settings of the encoders, and of the fully connected layers that read the features of all encoders."""

    encoders: dict[str, EncoderConfig] = Field(
        default_factory=dict,
        description=(
            'encoders by name of the observation, such as {"camera": "cnn"}; by default, images have the encoder "cnn" '
            "and other observations have none"
        ),
    )
    hidden_sizes: Annotated[tuple[Width, ...], Field(strict=False)] = Field(
        (256,), description="width of each hidden layer on top of the encoders"
    )


def _activated(network: nn.Module, cfg: EncoderConfig) -> nn.Module:
    """Return an encoder's network, followed by the activation of its config."""
    activation = {} if cfg.activation is None else {"activation": ACTIVATIONS[cfg.activation]()}
    return nn.Sequential(OrderedDict(network=network, **activation))


def make_encoder(cfg: EncoderConfig, space: Space, bf16: bool, key: str) -> Pure:
    """Build an encoder as pure functions (see `make_network`). `forward` returns features `[*B, features]`."""
    return make_network(cfg, space, cfg.features, bf16, key, lambda network: _activated(network, cfg))


class _Fused(nn.Module):
    """Encoders by name of the observation, and the layers that read the features of all encoders."""

    def __init__(self, encoders: dict[str, nn.Module], space: Dict, cfg: FusedConfig, inputs: int, outputs: int):
        super().__init__()
        self.space = space
        self.encoders = nn.ModuleDict({layer_name(name): encoder for name, encoder in encoders.items()})
        self.trunk = build_mlp(cfg, inputs, outputs)

    def _encoded(self, x: Any, name: str, part: Space) -> Tensor:
        layer = layer_name(name)
        return self.encoders[layer](x) if layer in self.encoders else flatten(x, part)

    def forward(self, obs: TensorDict) -> Tensor:
        return self.trunk(torch.cat([self._encoded(obs[name], name, part) for name, part in self.space.items], -1))


@register_network("fused")
def fused(cfg: FusedConfig, space: Space, outputs: int) -> nn.Module:
    """Build a network for a Dict of observations.

        features = concatenate(encoder[name](obs[name]) for each name)        in order of the names
        output   = mlp(features)

    An image for which the config names no encoder has the encoder `cnn`. Any other observation for which the config
    names no encoder is only flattened (see `ecrl.policies.flatten`).

    Raises: SpaceError for an observation that is not a Dict, and for an observation with three axes that is neither an
        image nor has an encoder. ConfigError for an encoder of an unknown observation, and for a nested Dict with
        images but without an encoder.
    """
    if not isinstance(space, Dict):
        raise SpaceError(f'expected a Dict of observations, got {describe(space)}; use "cnn" or "mlp"')
    parts = dict(space.items)
    for name in cfg.encoders:
        if name not in parts:
            raise ConfigError(f"encoders.{name}: the observations have no {name!r}; {did_you_mean(name, parts)}")
    for name, part in parts.items():
        if isinstance(part, Dict) and has_images(part) and name not in cfg.encoders:
            problem = f"encoders: the network reads an image inside {name!r}, which has no encoder"
            raise ConfigError(f'{problem}; set encoders.{name}, such as to "fused"')
    default = EncoderConfig(type="cnn")  # pyright: ignore[reportCallIssue]
    without_encoder = {name: part for name, part in parts.items() if name not in cfg.encoders}
    configs = dict.fromkeys(image_parts(without_encoder), default) | cfg.encoders
    encoders: dict[str, nn.Module] = {
        name: _activated(build_network(one, parts[name], one.features, f"encoders.{name}"), one)
        for name, one in configs.items()
    }
    inputs = sum(configs[name].features if name in configs else flat_dim(part) for name, part in space.items)
    return _Fused(encoders, space, cfg, inputs, outputs)
