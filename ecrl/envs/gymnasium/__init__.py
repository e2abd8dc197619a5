"""Gymnasium environments by id, such as `"gymnasium:LunarLander-v3"`, or from vector envs by `from_vector`."""

from ecrl.envs.gymnasium.env import GymnasiumConfig, from_vector, gymnasium_env

__all__ = ["GymnasiumConfig", "from_vector", "gymnasium_env"]
