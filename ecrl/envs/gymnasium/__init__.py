"""Make Gymnasium environments from a name, such as `"gymnasium:LunarLander-v3"`, or from a vector env."""

from ecrl.envs.gymnasium.atari import AtariConfig
from ecrl.envs.gymnasium.env import GymnasiumConfig, from_vector, gymnasium_env
from ecrl.envs.gymnasium.handles import draw
from ecrl.envs.gymnasium.rendering import drawing_keys, render_fps

__all__ = ["AtariConfig", "GymnasiumConfig", "draw", "drawing_keys", "from_vector", "gymnasium_env", "render_fps"]
