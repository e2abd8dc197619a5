"""Settings and frame rate of Gymnasium environments that draw images for a video."""

import os
import sys
from typing import Any

from ecrl.envs.gymnasium import worker
from ecrl.envs.gymnasium.env import GymnasiumConfig, open_envs
from ecrl.envs.gymnasium.spaces import BadValue
from ecrl.envs.gymnasium.vector_api import Fault
from ecrl.errors import ConfigError

_MODE = "rgb_array"


def drawing_keys(cfg: GymnasiumConfig) -> dict[str, Any]:
    """Return config keys and values for environments that draw images in this process."""
    return {"env.cfg.kwargs": cfg.kwargs | {"render_mode": _MODE}, "env.cfg.asynchronous": False}


def _choose_opengl(creator: Any) -> None:
    """On Linux, choose EGL or OSMesa for Gymnasium's MuJoCo environments, which would otherwise need a display."""
    bases = [base.__module__ for base in getattr(creator, "__mro__", ())]
    if sys.platform == "linux" and any(name.startswith("gymnasium.envs.mujoco.") for name in bases):
        from ecrl.envs.mujoco.camera import backend

        os.environ["MUJOCO_GL"] = os.environ.get("MUJOCO_GL") or backend()


def render_fps(cfg: GymnasiumConfig) -> float:
    """Open one environment, draw one image and return the frame rate of the images, in frames per second.

    Args:
        cfg: config with the values that `drawing_keys` returns.

    Raises: ConfigError if the environment cannot draw images, or if a package for drawing is missing. UserError if
        OpenGL does not work for a MuJoCo environment.
    """
    try:
        worker.register_atari(cfg.id, cfg.atari is not None)
        creator = worker.find_creator(cfg.id)
        modes = getattr(creator, "metadata", {}).get("render_modes", [_MODE])
        if _MODE not in modes:
            raise Fault(None, f"cannot draw images: expected the render mode {_MODE!r}, but it has {list(modes)}")
        _choose_opengl(creator)
        vector = open_envs(cfg, 1)
        try:
            vector.reset([0])
            vector.render()
            return vector.fps
        finally:
            vector.close()
    except (Fault, BadValue, ImportError) as error:
        raise ConfigError(f"env: gymnasium:{cfg.id}: {error}") from error.__cause__
