"""MuJoCo tasks. Importing this package registers the tasks, their terms and their experts."""

from ecrl.envs.mujoco.tasks import experts  # noqa: F401  # registers the experts
from ecrl.envs.mujoco.tasks.cart_pole import CartPoleRLConfig, cart_pole
from ecrl.envs.mujoco.tasks.push_cube import PushCubeConfig, push_cube
from ecrl.envs.mujoco.tasks.reach import ReachConfig, reach
from ecrl.envs.mujoco.tasks.reach_color import ReachColorConfig, reach_color
from ecrl.envs.mujoco.terms import (  # noqa: F401  # registers the terms
    actions,
    cameras,
    events,
    instructions,
    observations,
    relative_joint_position,
    rewards,
)

__all__ = [
    "CartPoleRLConfig",
    "PushCubeConfig",
    "ReachColorConfig",
    "ReachConfig",
    "cart_pole",
    "push_cube",
    "reach",
    "reach_color",
]
