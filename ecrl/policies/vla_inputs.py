"""Sort the observations of the policy `vla` into images, an instruction and all other parts."""

from typing import Any, NamedTuple

from torch import Tensor

from ecrl.errors import ConfigError
from ecrl.policies.images import SpaceError, describe, has_images, image_parts
from ecrl.registry import did_you_mean
from ecrl.spaces import Box, Dict, MultiDiscrete, Space, dict_space, flat_dim, without_mask


class VLAInputs(NamedTuple):
    """The parts of an observation.

    Attributes:
        space: space of the observations, without action masks.
        images: names and spaces of the images.
        words: name of the instruction, and the number of possible values of each word; None without an instruction.
        others: space of the other observations.
    """

    space: Space
    images: dict[str, Box]
    words: tuple[str, tuple[int, ...]] | None
    others: Space

    def part(self, obs: Any, name: str) -> Tensor:
        """Return an observation by name. If the observations are not a Dict, the only name is "obs"."""
        return obs[name] if isinstance(self.space, Dict) else obs


def vla_inputs(observation_space: Space, instruction: str | None) -> VLAInputs:
    """Sort the observations into images, an instruction and all other parts.

    Raises: ConfigError if there is neither an image nor a vector, or if an image is inside a nested Dict. Also raised
        if the argument `instruction` names an observation that is missing or not a MultiDiscrete of word ids. If the
        argument is None, also raised if an observation named "instruction" is a Box of integers.
    """
    space = without_mask(observation_space)
    parts: dict[str, Space] = dict(space.items) if isinstance(space, Dict) else {"obs": space}
    if instruction is not None:
        key = "policy.vla.instruction"
        if not isinstance(space, Dict) or instruction not in parts:
            known = did_you_mean(instruction, parts) if isinstance(space, Dict) else "they are not a Dict"
            raise ConfigError(f"{key}: the observations have no {instruction!r}; {known}")
        if not isinstance(parts[instruction], MultiDiscrete):
            found = describe(parts[instruction])
            raise ConfigError(f"{key}: expected {instruction!r} as MultiDiscrete, the ids of words, got {found}")
    for name, part in parts.items():
        if isinstance(part, Dict) and has_images(part):
            raise ConfigError(
                f"policy vla: the image inside {name!r} is not at the top level of the Dict; move it there"
            )
    found = parts.get(name := instruction or "instruction")
    if isinstance(space, Dict) and isinstance(found, Box) and not found.dtype.is_floating_point:
        raise ConfigError(
            f"policy vla: expected {name!r} as MultiDiscrete, the ids of words, got {describe(found)}; rename it if it "
            "is not text"
        )
    words = (name, found.nvec) if isinstance(space, Dict) and isinstance(found, MultiDiscrete) else None
    try:
        images = image_parts(parts)
    except SpaceError as error:
        raise ConfigError(f"policy vla: {error}") from None
    left = {name: part for name, part in parts.items() if name not in images and (words is None or name != words[0])}
    others = dict_space(left) if isinstance(space, Dict) else space if left else Dict(())
    if not images and flat_dim(others) == 0:
        raise ConfigError("policy vla: the observations have neither an image nor a vector; add one of them")
    return VLAInputs(space, images, words, others)


def check_unscaled_images(inputs: VLAInputs, normalize_obs: bool) -> None:
    """Raise ConfigError if `normalize_obs` would standardise an image that a pretrained model reads.

    A pretrained model expects images with values from 0 to 1, which standardised images do not have.
    """
    for name, space in inputs.images.items():
        if normalize_obs and space.dtype.is_floating_point:
            problem = f"true, which would standardise the float image {name!r}, but the checkpoint reads numbers"
            raise ConfigError(f"policy.normalize_obs: {problem} from 0 to 1; set it to false, or use uint8")
