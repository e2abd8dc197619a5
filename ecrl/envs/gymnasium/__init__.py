"""Gymnasium environments, created by id as in `"gymnasium:LunarLander-v3"`, or from a vector env by `from_vector`."""

from ecrl.envs.gymnasium.env import GymnasiumConfig, from_vector, gymnasium_env

__all__ = ["GymnasiumConfig", "from_vector", "gymnasium_env"]
