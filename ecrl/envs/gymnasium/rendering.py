"""Settings and frame rate of Gymnasium environments that draw images for a video."""

from typing import Any

from ecrl.envs.gymnasium import worker
from ecrl.envs.gymnasium.env import GymnasiumConfig, open_envs
from ecrl.envs.gymnasium.spaces import BadValue
from ecrl.envs.gymnasium.vector_api import Fault
from ecrl.errors import ConfigError

_MODE = "rgb_array"


def drawing_keys(cfg: GymnasiumConfig) -> dict[str, Any]:
    """Return the config keys, with their values, of environments that draw images in this process."""
    return {"env.cfg.kwargs": cfg.kwargs | {"render_mode": _MODE}, "env.cfg.asynchronous": False}


def render_fps(cfg: GymnasiumConfig) -> float:
    """Open one environment, draw one image and return the frame rate of the images, in frames per second.

    Args:
        cfg: config with the keys of `drawing_keys`.

    Raises: ConfigError if the environment cannot draw images, or if a package is missing that draws them.
    """
    try:
        worker.register_atari(cfg.id, cfg.atari is not None)
        modes = getattr(worker.find_creator(cfg.id), "metadata", {}).get("render_modes", [_MODE])
        if _MODE not in modes:
            raise Fault(None, f"cannot draw images: expected the render mode {_MODE!r}, but it has {list(modes)}")
        vector = open_envs(cfg, 1)
        try:
            vector.reset([0])
            vector.render()
            return vector.fps
        finally:
            vector.close()
    except (Fault, BadValue, ImportError) as error:
        raise ConfigError(f"env: gymnasium:{cfg.id}: {error}") from error.__cause__
