"""Low-rank adapters: linear layers of a pretrained module learn a small change of their weights.

    y = x W^T + b + scale * (x D^T) U^T,    D: [rank, inputs],  U: [outputs, rank]

U starts at 0, so a new adapter does not change the outputs of the pretrained module. By default, D and U are trained,
and W and b stay frozen (see `ecrl.policies.pretrained`).

Source: Hu et al. 2021 (LoRA), arXiv:2106.09685.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ecrl.config.model import ConfigModel, Positive
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean

DOWN, UP = "adapter_down", "adapter_up"
"""Names of an adapter's two weights."""

Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class AdaptersConfig(ConfigModel):
    """Settings of low-rank adapters."""

    rank: Annotated[int, Field(ge=1, le=4096)] = Field(
        16, description="rank of the learned change of a layer's weights"
    )
    layers: Names = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description=(
            "names of linear layers that get adapters, or of parts of the model whose linear layers all get adapters"
        ),
    )
    scale: Positive = Field(1.0, description="factor of the learned change")


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter. Its `weight` and `bias` are the tensors of the linear layer that it replaces."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = layer.in_features, layer.out_features, scale
        self.weight, self.bias = layer.weight, layer.bias
        self.adapter_down = nn.Linear(self.in_features, rank, bias=False).weight
        self.adapter_up = nn.Parameter(layer.weight.new_zeros(self.out_features, rank))

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer and add the learned change."""
        change = F.linear(F.linear(input, self.adapter_down), self.adapter_up)
        return F.linear(input, self.weight, self.bias) + self.scale * change


def is_in(name: str, parts: Iterable[str]) -> bool:
    """Return True if a dotted name contains one of the parts. A part matches only whole names between dots.

    >>> is_in("dit.layers.0.q_proj.weight", ["q_proj"]), is_in("dit.layers.0.weight", ["dit.layers"])
    (True, True)
    >>> is_in("dit.layers.0.weight", ["layer"])
    False
    """
    return any(f".{part}." in f".{name}." for part in parts)


def check_names(key: str, parts: Iterable[str], names: Iterable[str], kind: str) -> None:
    """Raise ConfigError for a part that no name in `names` contains.

    Args:
        key: config key of `parts`, for the error.
        parts: names, or parts of dotted names.
        names: dotted names of weights or layers of the model.
        kind: what a name in `parts` stands for, such as "linear layer", for the error.
    """
    known = list(names)
    for part in parts:
        if not any(is_in(name, [part]) for name in known):
            words = {word for name in known for word in name.split(".") if not word.isdigit()}
            raise ConfigError(f"{key}: the model has no {kind} {part!r}; {did_you_mean(part, words)}")


def add_adapters(module: nn.Module, cfg: AdaptersConfig, key: str) -> None:
    """Give an adapter to each linear layer of `module` that `cfg.layers` selects. `module` is changed in place.

    `key` is the path of `cfg` in the config. The initial weights of the adapters are drawn from torch's global
    generator.

    Raises: ConfigError for an entry of `cfg.layers` that is not part of the name of any linear layer.
    """
    linears = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    check_names(f"{key}.layers", cfg.layers, linears, "linear layer")
    for name, layer in linears.items():
        if is_in(name, cfg.layers):
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, AdaptedLinear(layer, cfg.rank, cfg.scale))


def is_adapter(name: str) -> bool:
    """Return True if the dotted name of a weight belongs to an adapter."""
    return name.endswith((DOWN, UP))


def merged(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Merge each adapter into the weight of its layer: W becomes W + scale * U D. The result has no adapter weights.

    >>> import torch
    >>> layer = {"q.weight": torch.zeros(2, 1), "q.adapter_down": torch.ones(1, 1), "q.adapter_up": torch.ones(2, 1)}
    >>> merged(layer, 0.5)
    {'q.weight': tensor([[0.5000],
            [0.5000]])}
    """
    result = {name: weight for name, weight in weights.items() if not is_adapter(name)}
    for name in (name for name in weights if name.endswith(DOWN)):
        layer = name.removesuffix(DOWN)
        result[f"{layer}weight"] = result[f"{layer}weight"] + scale * weights[f"{layer}{UP}"] @ weights[name]
    return result
