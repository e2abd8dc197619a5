"""Convert images to the float channels that convolutions read.

An image is a Box of shape `[h, w]`, `[h, w, c]` or `[c, h, w]`. The channel axis is the smaller of the first and the
last axis, as in Stable-Baselines3. A stack of images (`Box.frames`) has one additional axis in front.
"""

from collections.abc import Mapping
from math import prod
from typing import cast

import torch
from torch import Tensor

from ecrl.errors import ConfigError
from ecrl.spaces import Box, Dict, Space


class SpaceError(ConfigError):
    """Error for an observation space that a network cannot read."""


def is_image_like(space: Space) -> bool:
    """Return True if convolutions can read a space: an image, or a stack of images.

    Integer images must have the lower bound 0 and the same upper bound for all pixels. Float images must be between 0
    and 1.

    >>> from ecrl.spaces import box
    >>> is_image_like(box(0, 255, 8, 8, 3, dtype=torch.uint8)), is_image_like(box(-1.0, 1.0, 8, 8, 3))
    (True, False)
    """
    if not isinstance(space, Box) or not 2 <= len(space.frame_shape) <= 3 or 0 in space.shape:
        return False
    low, high = {*space.low}, {*space.high}
    if space.dtype.is_floating_point:
        return min(low) >= 0.0 and max(high) <= 1.0
    return low == {0.0} and len(high) == 1 and max(high) > 0.0


def is_image_part(space: Space) -> bool:
    """Return True if a network for a Dict reads an observation of this space with convolutions by default.

    A matrix whose dtype is not uint8 is often not an image, so the network reads such a matrix as a vector.

    >>> from ecrl.spaces import box
    >>> is_image_part(box(0, 255, 8, 8, dtype=torch.uint8)), is_image_part(box(0.0, 1.0, 3, 3))
    (True, False)
    """
    if not isinstance(space, Box) or not is_image_like(space):
        return False
    return len(space.frame_shape) == 3 or space.dtype == torch.uint8


def image_parts(parts: Mapping[str, Space]) -> dict[str, Box]:
    """Return the observations of a Dict that a network reads with convolutions by default (see `is_image_part`).

    Raises: SpaceError for any other observation with three axes, because a network would read its pixels as a vector.

    >>> from ecrl.spaces import box
    >>> [*image_parts({"joints": box(-1.0, 1.0, 6), "camera": box(0, 255, 8, 8, 3, dtype=torch.uint8)})]
    ['camera']
    """
    for name, part in parts.items():
        if isinstance(part, Box) and len(part.frame_shape) == 3 and 0 not in part.shape and not is_image_like(part):
            problem = f"expected integers from 0 or floats from 0 to 1 for the image {name!r}, got {describe(part)}"
            raise SpaceError(f"{problem}; scale it and give its space these bounds, or flatten it if it is no image")
    return {name: cast(Box, part) for name, part in parts.items() if is_image_part(part)}


def has_images(space: Space) -> bool:
    """Return True if `is_image_part` is True for a space, or for any part of a Dict at any depth."""
    return any(has_images(part) for _, part in space.items) if isinstance(space, Dict) else is_image_part(space)


def describe(space: Space) -> str:
    """Return a short description of a space, without the bounds of each element.

    >>> from ecrl.spaces import box
    >>> describe(box(-1.0, 1.0, 64, 64, 3))
    'a Box [64, 64, 3] of float32 from -1 to 1'
    """
    if not isinstance(space, Box):
        return f"a {type(space).__name__}"
    bounds = f"from {min(space.low, default=0.0):g} to {max(space.high, default=0.0):g}"
    return f"a Box {list(space.shape)} of {str(space.dtype).removeprefix('torch.')} {bounds}"


def check_image(space: Space) -> Box:
    """Return the space of an image: the argument `space` or, if `space` is a Dict with one entry, the entry's space.

    Raises: SpaceError if convolutions cannot read the space of the image.
    """
    image = space.items[0][1] if isinstance(space, Dict) and len(space.items) == 1 else space
    if is_image_like(image):
        return cast(Box, image)
    expected = "an image [h, w], [h, w, c] or [c, h, w], of integers from 0 or of floats from 0 to 1"
    advice = 'use "fused" for several observations' if isinstance(image, Dict) else 'use "mlp"'
    if isinstance(image, Box) and len(image.frame_shape) in (2, 3):
        advice = "scale the image, and give its space these bounds"
    raise SpaceError(f"expected {expected}, got {describe(image)}; {advice}")


def _has_channels_last(space: Box) -> bool:
    shape = space.frame_shape
    return len(shape) > 2 and shape[-1] <= shape[0]


def channel_shape(space: Box) -> tuple[int, int, int]:
    """Return `(channels, height, width)` of an image. For a stack, `channels` counts the channels of all frames.

    >>> from ecrl.spaces import box
    >>> channel_shape(box(0, 255, 64, 48, 3, dtype=torch.uint8)), channel_shape(box(0.0, 1.0, 64, 48))
    ((3, 64, 48), (1, 64, 48))
    """
    shape = space.frame_shape
    *channels, height, width = (shape[-1], *shape[:-1]) if _has_channels_last(space) else shape
    return space.frames * prod(channels), height, width


def to_channels(image: Tensor, space: Box) -> Tensor:
    """Convert images `[B, ...]` of a space to floats `[B, channels, h, w]` from 0 to 1.

        x / upper bound        for integers

    Floats keep their values. The channels of a stack begin with the oldest frame.

    >>> from ecrl.spaces import box
    >>> to_channels(torch.full((1, 2, 2, 1), 51, dtype=torch.uint8), box(0, 255, 2, 2, 1, dtype=torch.uint8)).unique()
    tensor([0.2000])
    """
    x = image.movedim(-1, -3) if _has_channels_last(space) else image
    x = x.reshape(image.shape[0], *channel_shape(space))
    if space.dtype == torch.float32:
        return x
    x = x.to(torch.get_default_dtype())
    return x if space.dtype.is_floating_point else x / space.high[0]


def layer_name(name: str) -> str:
    """Return the name of the module's layer that reads the observation `name`. Dots and percent signs are escaped.

    >>> layer_name("camera"), layer_name("arm.camera")
    ('of_camera', 'of_arm%2Ecamera')
    """
    return f"of_{name.replace('%', '%25').replace('.', '%2E')}"
