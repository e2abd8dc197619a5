"""Gymnasium environments: any registered id, as `"gymnasium:LunarLander-v3"`, and any vector env, by `from_vector`."""

from ecrl.envs.gymnasium.env import GymnasiumConfig, from_vector, gymnasium_env

__all__ = ["GymnasiumConfig", "from_vector", "gymnasium_env"]
