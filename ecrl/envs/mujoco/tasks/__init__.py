"""MuJoCo tasks. Importing this package registers the tasks and their terms."""

from ecrl.envs.mujoco.tasks.cart_pole import CartPoleRLConfig, cart_pole
from ecrl.envs.mujoco.tasks.push_cube import PushCubeConfig, push_cube
from ecrl.envs.mujoco.tasks.reach import ReachConfig, reach
from ecrl.envs.mujoco.terms import actions, cameras, events, observations, rewards  # noqa: F401  # registers the terms

__all__ = ["CartPoleRLConfig", "PushCubeConfig", "ReachConfig", "cart_pole", "push_cube", "reach"]
