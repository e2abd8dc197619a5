"""Make Gymnasium environments from an id, such as `"gymnasium:LunarLander-v3"`, or by `from_vector`."""

from ecrl.envs.gymnasium.env import GymnasiumConfig, from_vector, gymnasium_env

__all__ = ["GymnasiumConfig", "from_vector", "gymnasium_env"]
