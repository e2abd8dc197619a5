"""Select the entries of a Dict of observations for a network."""

from typing import Annotated

from pydantic import Field

from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean
from ecrl.spaces import Dict, Space, dict_space, without_mask

Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
"""Type of a config field with names of observations."""


def visible_space(space: Space, names: tuple[str, ...] | None, key: str) -> Space:
    """Return the space of the observations that a network reads: those in `names`, or all if `names` is None.

    `key` is the config key of `names`, for error messages. A network never receives the `action_mask`.
    """
    if names is None:
        return without_mask(space)
    if not isinstance(space, Dict):
        found = type(space).__name__
        raise ConfigError(f"policy.{key}: expected a Dict observation space, got {found}; leave {key} out")
    parts = {name: part for name, part in space.items if name != "action_mask"}
    for name in names:
        if name not in parts:
            raise ConfigError(f"policy.{key}: the observations have no {name!r}; {did_you_mean(name, parts)}")
    return dict_space({name: without_mask(parts[name]) for name in names})
