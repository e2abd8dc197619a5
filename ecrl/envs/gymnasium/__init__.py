"""Gymnasium environments by id, such as `"gymnasium:LunarLander-v3"`, and `from_vector` for vector envs."""

from ecrl.envs.gymnasium.env import GymnasiumConfig, from_vector, gymnasium_env

__all__ = ["GymnasiumConfig", "from_vector", "gymnasium_env"]
