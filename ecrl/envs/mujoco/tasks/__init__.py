"""Tasks; importing this package registers them and the terms they are made of."""

from ecrl.envs.mujoco import actions, camera_terms, observations, rewards, scene_events  # noqa: F401  # registers terms
from ecrl.envs.mujoco.tasks.cart_pole import CartPoleRLConfig, cart_pole
from ecrl.envs.mujoco.tasks.push_cube import PushCubeConfig, push_cube
from ecrl.envs.mujoco.tasks.reach import ReachConfig, reach

__all__ = ["CartPoleRLConfig", "PushCubeConfig", "ReachConfig", "cart_pole", "push_cube", "reach"]
