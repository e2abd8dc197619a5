"""Tasks; importing this package registers them and their terms."""

from ecrl.envs.mujoco.tasks.cart_pole import CartPoleRLConfig, cart_pole
from ecrl.envs.mujoco.tasks.push_cube import PushCubeConfig, push_cube
from ecrl.envs.mujoco.tasks.reach import ReachConfig, reach
from ecrl.envs.mujoco.terms import actions, observations, rewards
from ecrl.envs.mujoco.terms import cameras as camera_terms
from ecrl.envs.mujoco.terms import events as scene_events

__all__ = ["CartPoleRLConfig", "PushCubeConfig", "ReachConfig", "cart_pole", "push_cube", "reach"]
