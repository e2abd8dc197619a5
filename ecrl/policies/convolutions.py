"""Networks with convolutions: `cnn`, `impala` and `keypoints`.

Each network scales integer images to [0, 1] (see `ecrl.policies.images`). The state, the rollout and the replay buffer
store the unscaled images. Fully connected layers follow the convolutions.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator
from torch import Tensor, nn

from ecrl.config.model import ConfigModel, Count, Positive
from ecrl.errors import ConfigError
from ecrl.policies.core import flatten
from ecrl.policies.images import (
    SpaceError,
    channel_shape,
    check_image,
    describe,
    has_images,
    image_parts,
    layer_name,
    to_channels,
)
from ecrl.policies.mlp import ACTIVATIONS, Activation, MLPConfig, Width, build_mlp, orthogonal
from ecrl.registry import InitOnly, register_network
from ecrl.spaces import Box, Dict, Space, dict_space, flat_dim

Sizes = Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]
"""Type of a config field with one number per convolution, or per stage of `impala`."""

Gains = Annotated[
    Positive | Annotated[tuple[Positive, Positive], Field(strict=False)] | None,
    InitOnly(),
]
"""Type of the config field `orthogonal_init`."""

_HIDDEN = "width of each hidden layer after the convolutions"
_ACTIVATION = "activation of the convolutions and of the hidden layers"
_LAST_ACTIVATION = "activation after the output layer; none if absent"
_LAYERNORM = "normalise before each activation, but not before last_activation"
_GAINS = (
    "gain of orthogonal initial weights, one number for all layers or a list of two numbers, the second for the output "
    "layer; biases are then 0"
)


class ConvolutionsConfig(ConfigModel):
    """Settings that the networks with convolutions share."""

    hidden_sizes: Annotated[tuple[Width, ...], Field(strict=False)] = Field((512,), description=_HIDDEN)
    activation: Activation = Field("relu", description=_ACTIVATION)
    last_activation: Activation | None = Field(None, description=_LAST_ACTIVATION)
    use_layernorm: bool = Field(False, description=_LAYERNORM)
    orthogonal_init: Gains = Field(None, description=_GAINS)

    @field_validator("orthogonal_init", mode="wrap")
    @classmethod
    def _one_gain_or_two(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(data)
        except ValidationError:
            expected = "a number above 0, or a list of two such numbers, the second for the output layer"
            raise ValueError(f"expected {expected}") from None


class CNNConfig(ConvolutionsConfig):
    """Settings of the convolutions. The defaults are from Mnih et al. 2015."""

    channels: Sizes = Field((32, 64, 64), description="output channels of each convolution")
    kernel_sizes: Sizes = Field((8, 4, 3), description="size of the kernel of each convolution, pixels")
    strides: Sizes = Field((4, 2, 1), description="stride of each convolution, pixels")

    @model_validator(mode="after")
    def _one_per_convolution(self) -> Self:
        _check_lengths(self.channels, self.kernel_sizes, self.strides)
        return self


def _check_lengths(channels: Sequence[int], kernel_sizes: Sequence[int], strides: Sequence[int]) -> None:
    if not len(channels) == len(kernel_sizes) == len(strides):
        raise ValueError(
            f"channels, kernel_sizes and strides have {len(channels)}, {len(kernel_sizes)} and {len(strides)} "
            "entries; give one entry per convolution in each"
        )


def _normalised(channels: int, cfg: ConvolutionsConfig) -> list[nn.Module]:
    """Return the layers between two convolutions: an optional normalisation, and the activation."""
    return [*([nn.GroupNorm(1, channels)] if cfg.use_layernorm else []), ACTIVATIONS[cfg.activation]()]


def _head(cfg: ConvolutionsConfig, inputs: int, outputs: int) -> nn.Sequential:
    """Build the fully connected layers."""
    names = ("hidden_sizes", "activation", "last_activation", "use_layernorm")
    return build_mlp(MLPConfig(**{name: getattr(cfg, name) for name in names}), inputs, outputs)


def _initialised(module: nn.Module, cfg: ConvolutionsConfig) -> nn.Module:
    """Return the module. If the config sets `orthogonal_init`, first give the layers of the module orthogonal weights.

    The last linear layer of the module must be the output layer.
    """
    if cfg.orthogonal_init is not None:
        gains = cfg.orthogonal_init if isinstance(cfg.orthogonal_init, tuple) else (cfg.orthogonal_init,) * 2
        layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        orthogonal(layers, [*[gains[0]] * (len(layers) - 1), gains[1]])
    return module


class _ImageNetwork(nn.Module):
    """Convolutions followed by fully connected layers, for an image or for a Dict whose only entry is an image."""

    def __init__(self, space: Space, convolutions: nn.Module, cfg: ConvolutionsConfig, outputs: int):
        super().__init__()
        self.name = space.items[0][0] if isinstance(space, Dict) else None
        self.space, self.convolutions = check_image(space), convolutions
        with torch.no_grad():
            features = convolutions(torch.zeros(1, *channel_shape(self.space)))
        self.head = _head(cfg, features.numel(), outputs)

    def forward(self, obs: Any) -> Tensor:
        image = obs if self.name is None else obs[self.name]
        return self.head(self.convolutions(to_channels(image, self.space)).flatten(1))


@register_network("cnn")
def cnn(cfg: CNNConfig, space: Space, outputs: int) -> nn.Module:
    """Build convolutions for images, followed by fully connected layers.

    The default settings give the network of Mnih et al. for 84x84 pixels. Images of 10x10 pixels need smaller kernels,
    such as `{"channels": [16], "kernel_sizes": [3], "strides": [1], "hidden_sizes": [128]}`.

    Raises: SpaceError for an observation that is not an image. ConfigError for an image too small for the kernels.
    Source: Mnih et al. 2015, "Human-level control through deep reinforcement learning".
    """
    image = check_image(space)
    (channels, *size), layers = channel_shape(image), []
    for i, (out, kernel, stride) in enumerate(zip(cfg.channels, cfg.kernel_sizes, cfg.strides, strict=True)):
        if min(size) < kernel:
            raise ConfigError(
                f"kernel_sizes[{i}]: {kernel} is above the {size[0]}x{size[1]} pixels that the convolution receives "
                f"from {describe(space)}; use smaller kernels or strides"
            )
        size = [(pixels - kernel) // stride + 1 for pixels in size]
        layers += [nn.Conv2d(channels, out, kernel, stride), *_normalised(out, cfg)]
        channels = out
    return _initialised(_ImageNetwork(space, nn.Sequential(*layers), cfg, outputs), cfg)


class ImpalaConfig(ConvolutionsConfig):
    """Settings of the residual network of IMPALA."""

    channels: Sizes = Field((16, 32, 32), description="output channels of each stage; a stage halves height and width")
    hidden_sizes: Annotated[tuple[Width, ...], Field(strict=False)] = Field((256,), description=_HIDDEN)


class _Residual(nn.Module):
    """Two convolutions whose output is added to their input."""

    def __init__(self, channels: int, cfg: ImpalaConfig):
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [*_normalised(channels, cfg), nn.Conv2d(channels, channels, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


@register_network("impala")
def impala(cfg: ImpalaConfig, space: Space, outputs: int) -> nn.Module:
    """Build the deep residual network of IMPALA for images.

    A stage has a convolution, a max-pooling that halves height and width, and two residual blocks of two convolutions.

    Raises: SpaceError for an observation that is not an image.
    Source: Espeholt et al. 2018, arXiv:1802.01561, figure 3.
    """
    channels, layers = channel_shape(check_image(space))[0], []
    for out in cfg.channels:
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.MaxPool2d(3, 2, 1)]
        layers += [_Residual(out, cfg), _Residual(out, cfg)]
        channels = out
    layers += _normalised(channels, cfg)
    return _initialised(_ImageNetwork(space, nn.Sequential(*layers), cfg, outputs), cfg)


class KeypointsConfig(ConvolutionsConfig):
    """Settings of the convolutions before the spatial softmax. The last convolution has one channel per keypoint."""

    channels: Sizes = Field(
        (32, 48, 48),
        description="output channels of each convolution; the last convolution has one channel per keypoint",
    )
    kernel_sizes: Sizes = Field((5, 3, 3), description="size of the kernel of each convolution, pixels; must be odd")
    strides: Sizes = Field((2, 2, 1), description="stride of each convolution, pixels")
    hidden_sizes: Annotated[tuple[Width, ...], Field(strict=False)] = Field((128,), description=_HIDDEN)

    @model_validator(mode="after")
    def _one_per_convolution(self) -> Self:
        _check_lengths(self.channels, self.kernel_sizes, self.strides)
        if even := [size for size in self.kernel_sizes if size % 2 == 0]:
            raise ValueError(f"kernel_sizes: {even[0]} is even; use odd kernel sizes for keypoints")
        return self


class ImageKeypoints(nn.Module):
    """Network that computes keypoint positions in one image. A condition vector scales and shifts the features.

    The output of the last convolution is standardised, so this convolution has no bias.
    """

    def __init__(self, space: Box, condition: int, cfg: KeypointsConfig):
        super().__init__()
        self.space, self.activation = space, ACTIVATIONS[cfg.activation]()
        channels, *size = channel_shape(space)
        inputs, last = (channels, *cfg.channels[:-1]), len(cfg.channels) - 1
        geometry = zip(inputs, cfg.channels, cfg.kernel_sizes, cfg.strides, strict=True)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, out, kernel, stride, kernel // 2, bias=i < last)
            for i, (before, out, kernel, stride) in enumerate(geometry)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(1, out) for out in cfg.channels[:-1] if cfg.use_layernorm)
        self.films = nn.ModuleList(nn.Linear(condition, 2 * out) for out in cfg.channels[:-1] if condition)
        self.sharpen = nn.Linear(condition, cfg.channels[-1]) if condition else None
        self.temperature = nn.Parameter(torch.ones(cfg.channels[-1]))
        for stride in cfg.strides:
            size = [-(-pixels // stride) for pixels in size]
        y, x = torch.meshgrid(*(torch.linspace(-1.0, 1.0, pixels) for pixels in size), indexing="ij")
        self.register_buffer("position", torch.stack((x.flatten(), y.flatten()), -1))
        self.outputs = 2 * cfg.channels[-1]

    def forward(self, image: Tensor, condition: Tensor) -> Tensor:
        """Return the x and y of each keypoint `[B, outputs]`, for conditions `[B, condition]` (see `keypoints`)."""
        x, position = to_channels(image, self.space), cast(Tensor, self.position)
        for i, convolution in enumerate(self.convolutions[:-1]):
            x = convolution(x)
            x = self.norms[i](x) if self.norms else x
            if self.films:
                scale, shift = self.films[i](condition).unsqueeze(-1).unsqueeze(-1).chunk(2, 1)
                x = x * (1.0 + scale) + shift
            x = self.activation(x)
        x = F.layer_norm(self.convolutions[-1](x).flatten(2), (position.shape[0],))  # over the pixels of a channel
        sharpness = self.temperature if self.sharpen is None else self.temperature * (1.0 + self.sharpen(condition))
        weight = (sharpness.unsqueeze(-1) * x).softmax(-1)
        return (weight @ position.to(x.dtype)).flatten(1)


class _KeypointsNetwork(nn.Module):
    """Network that finds keypoints in each image.

    Fully connected layers read the keypoints and the observations that are not images.
    """

    def __init__(self, parts: dict[str, Space], is_dict: bool, cfg: KeypointsConfig, outputs: int):
        super().__init__()
        self.is_dict = is_dict
        images = image_parts(parts) if is_dict else parts
        self.others = dict_space({name: part for name, part in parts.items() if name not in images})
        width = flat_dim(self.others)
        self.names = tuple(images)
        self.keypoints = nn.ModuleDict(
            {layer_name(name): ImageKeypoints(cast(Box, part), width, cfg) for name, part in images.items()}
        )
        inputs = sum(cast(int, one.outputs) for one in self.keypoints.values()) + width
        self.head = _head(cfg, inputs, outputs)

    def forward(self, obs: Any) -> Tensor:
        parts = obs if self.is_dict else {"image": obs}
        others = [flatten(obs, self.others)] if self.others.items else []
        condition = others[0] if others else torch.empty(0)
        points = [self.keypoints[layer_name(name)](parts[name], condition) for name in self.names]
        return self.head(torch.cat((*points, *others), -1))


@register_network("keypoints")
def keypoints(cfg: KeypointsConfig, space: Space, outputs: int) -> nn.Module:
    """Build a network that finds keypoints in an image, or in the images of a Dict, with convolutions.

        features        = activation((1 + scale(others)) * convolution(features) + shift(others))
        z[c]            = (last[c] - mean(last[c])) / std(last[c])                          over the pixels of channel c
        weight[c, y, x] = softmax(temperature[c] * (1 + sharpen(others)[c]) * z[c, y, x])   over the pixels of channel c
        keypoint[c]     = sum(weight[c, y, x] * (x, y))                                     positions between -1 and 1

    `others` are the observations of a Dict that are not images. `others` scale and shift the output of each convolution
    except the last (FiLM). `scale`, `shift` and `sharpen` are learnt linear layers. `last` is the output of the last
    convolution, without FiLM and activation. Fully connected layers read the keypoints and `others`, and return the
    outputs of the network. Every image has its own convolutions.

    `last` is standardised before the softmax. Otherwise, an untrained network would have almost the same keypoints for
    all images. `temperature` is learnt and begins at 1.

    Raises: SpaceError if no observation is an image, if an image is inside a nested Dict, or for an observation with
        three axes that is not an image.
    Source: Levine et al. 2016, arXiv:1504.00702, sec. 5.1 (keypoints); Perez et al. 2018, arXiv:1709.07871 (FiLM).
    """
    parts: dict[str, Space] = dict(space.items) if isinstance(space, Dict) else {"image": check_image(space)}
    for name, part in parts.items():
        if isinstance(part, Dict) and has_images(part):
            raise SpaceError(f'expected images at the top level of the Dict, got an image inside {name!r}; use "fused"')
    if isinstance(space, Dict) and not image_parts(parts):
        names = ", ".join(f"{name}: {describe(part)}" for name, part in parts.items())
        raise SpaceError(f'expected at least one image, got {names}; use "mlp"')
    return _initialised(_KeypointsNetwork(parts, isinstance(space, Dict), cfg, outputs), cfg)
