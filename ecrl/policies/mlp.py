"""Multilayer perceptron, configured as `"mlp"` or `{"type": "mlp", "network_cfg": {"hidden_sizes": [64, 64], ...}}`."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from torch import Tensor, nn

from ecrl.config.model import ConfigModel, Positive, lower_case
from ecrl.memory import check_room
from ecrl.policies.core import flatten
from ecrl.registry import InitOnly, register_network
from ecrl.spaces import Space, flat_dim

_OTHER_NAMES = {"swish": "silu"}


def _activation(name: Any) -> Any:
    """Return the key of an activation in `ACTIVATIONS`. The given name may have any case, and may be an alias."""
    name = lower_case(name)
    return _OTHER_NAMES.get(name, name) if isinstance(name, str) else name


Activation = Annotated[
    Literal["relu", "elu", "tanh", "gelu", "silu"],
    BeforeValidator(_activation, json_schema_input_type=Literal["relu", "elu", "tanh", "gelu", "silu", "swish"]),
]
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


Width = Annotated[int, Field(ge=1, le=65536)]


class MLPConfig(ConfigModel):
    """Settings of a multilayer perceptron."""

    hidden_sizes: Annotated[tuple[Width, ...], Field(strict=False)] = Field(
        (64, 64), description="width of each hidden layer"
    )
    activation: Activation = Field("elu", description="activation after each hidden layer")
    last_activation: Activation | None = Field(None, description="activation after the output layer; none if absent")
    use_layernorm: bool = Field(False, description="apply LayerNorm before the activation of each hidden layer")
    dropout_p: float = Field(0.0, description="must be 0, because dropout would make probability ratios random")
    orthogonal_init: Annotated[Positive | Annotated[tuple[Positive, ...], Field(strict=False)] | None, InitOnly()] = (
        Field(
            None,
            description=(
                "gain of orthogonal initial weights, one number for all layers or a list with one number per layer; "
                "biases are then 0"
            ),
        )
    )

    @field_validator("dropout_p")
    @classmethod
    def _no_dropout(cls, p: float) -> float:
        if p != 0.0:
            raise ValueError(
                f"dropout_p={p}, expected 0: with dropout, the probability ratio is random even if the weights have "
                "not changed; leave dropout_p out"
            )
        return p

    @field_validator("orthogonal_init", mode="wrap")
    @classmethod
    def _one_gain_per_layer(cls, data: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            gains = handler(data)
        except ValidationError:
            raise ValueError("expected a number above 0, or a list of such numbers, one per layer") from None
        layers = len(info.data.get("hidden_sizes", ())) + 1
        if isinstance(gains, tuple) and "hidden_sizes" in info.data and len(gains) != layers:
            raise ValueError(f"has {len(gains)} gains for {layers} layers; give one number or {layers}")
        return gains


class _MLP(nn.Sequential):
    """A multilayer perceptron on the float features of an observation."""

    def __init__(self, space: Space, layers: Iterable[nn.Module]):
        super().__init__(*layers)
        self.space = space

    def forward(self, obs: Any) -> Tensor:
        return super().forward(flatten(obs, self.space))


@register_network("mlp")
def mlp(cfg: MLPConfig, space: Space, outputs: int) -> nn.Module:
    """Build a multilayer perceptron for any space. The inputs are the features of `ecrl.policies.flatten`."""
    return _MLP(space, build_mlp(cfg, flat_dim(space), outputs))


def build_mlp(cfg: MLPConfig, inputs: int, outputs: int) -> nn.Sequential:
    """Build linear layers with new weights. An optional LayerNorm and an activation follow each hidden layer.

    >>> build_mlp(MLPConfig(hidden_sizes=[8], activation="tanh"), 3, 2)
    Sequential(
      (0): Linear(in_features=3, out_features=8, bias=True)
      (1): Tanh()
      (2): Linear(in_features=8, out_features=2, bias=True)
    )
    """
    sizes = (inputs, *cfg.hidden_sizes, outputs)
    weights = sum((before + 1) * after for before, after in pairwise(sizes))
    check_room(8 * weights, torch.device("cpu"), f"hidden_sizes: {weights:,} weights and their gradients")
    layers: list[nn.Module] = []
    for size in cfg.hidden_sizes:
        layers.append(nn.Linear(inputs, size))
        layers += [nn.LayerNorm(size)] if cfg.use_layernorm else []
        layers.append(ACTIVATIONS[cfg.activation]())
        inputs = size
    layers.append(nn.Linear(inputs, outputs))
    layers += [ACTIVATIONS[cfg.last_activation]()] if cfg.last_activation else []
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    gains = cfg.orthogonal_init
    if gains is not None:
        orthogonal(linear, gains if isinstance(gains, tuple) else [gains] * len(linear))
    return nn.Sequential(*layers)


def orthogonal(layers: Sequence[nn.Linear | nn.Conv2d], gains: Sequence[float]) -> None:
    """Give layers orthogonal weights with these gains, and set all biases to 0, in place."""
    for layer, gain in zip(layers, gains, strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
