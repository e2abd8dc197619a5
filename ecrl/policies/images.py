"""Convert images to the float channels that convolutions read.

An image is a Box of shape `[h, w]`, `[h, w, c]` or `[c, h, w]`. The channel axis is the smaller one of the first and
the last axis, as in Stable-Baselines3. A stack of frames has one more axis in front. A stack of frames `[h, w]` has the
shape of an image with channels first, and is treated as one.
"""

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

    Integers must have the lower bound 0 and one upper bound. Floats must be between 0 and 1.

    >>> from ecrl.spaces import box
    >>> is_image_like(box(0, 255, 8, 8, 3, dtype=torch.uint8)), is_image_like(box(-1.0, 1.0, 8, 8, 3))
    (True, False)
    """
    if not isinstance(space, Box) or not 2 <= len(space.shape) <= 4 or 0 in space.shape:
        return False
    low, high = {*space.low}, {*space.high}
    if space.dtype.is_floating_point:
        return min(low) >= 0.0 and max(high) <= 1.0
    return low == {0.0} and len(high) == 1 and max(high) > 0.0


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
    """Return the space of an image, or of the only observation in a Dict if it is an image.

    Raises: SpaceError if convolutions cannot read it.
    """
    image = space.items[0][1] if isinstance(space, Dict) and len(space.items) == 1 else space
    if is_image_like(image):
        return cast(Box, image)
    expected = "an image [h, w], [h, w, c] or [c, h, w], of integers from 0 or of floats from 0 to 1"
    advice = 'use "fused" for several observations' if isinstance(space, Dict) else 'use "mlp"'
    if isinstance(space, Box) and len(space.shape) in (2, 3, 4):
        advice = "scale the image, and give its space these bounds"
    raise SpaceError(f"expected {expected}, got {describe(space)}; {advice}")


def _has_channels_last(space: Box) -> bool:
    return len(space.shape) > 2 and space.shape[-1] <= space.shape[-3]


def channel_shape(space: Box) -> tuple[int, int, int]:
    """Return the number of channels in all frames of an image, the height and the width.

    >>> from ecrl.spaces import box
    >>> channel_shape(box(0, 255, 4, 64, 48, 3, dtype=torch.uint8)), channel_shape(box(0.0, 1.0, 64, 48))
    ((12, 64, 48), (1, 64, 48))
    """
    shape = space.shape
    channels_first = (*shape[:-3], shape[-1], *shape[-3:-1]) if _has_channels_last(space) else shape
    *channels, height, width = channels_first
    return prod(channels), height, width


def to_channels(image: Tensor, space: Box) -> Tensor:
    """Convert images `[B, ...]` of a space to floats `[B, channels, h, w]` from 0 to 1.

        x / upper bound        of integers

    Floats stay unchanged. The channels of a stack of frames begin with those of the oldest frame.

    >>> from ecrl.spaces import box
    >>> to_channels(torch.full((1, 2, 2, 1), 51, dtype=torch.uint8), box(0, 255, 2, 2, 1, dtype=torch.uint8)).unique()
    tensor([0.2000])
    """
    x = image.movedim(-1, -3) if _has_channels_last(space) else image
    x = x.reshape(image.shape[0], *channel_shape(space))
    return x if space.dtype.is_floating_point else x.to(torch.get_default_dtype()) / space.high[0]


def layer_name(name: str) -> str:
    """Return the name of the layer in a module that reads the observation `name`. The name of a layer has no dot.

    >>> layer_name("camera"), layer_name("arm.camera")
    ('of_camera', 'of_arm%2Ecamera')
    """
    return f"of_{name.replace('%', '%25').replace('.', '%2E')}"
