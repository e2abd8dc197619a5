"""MuJoCo tasks. Import this package to register the tasks, their terms and their experts."""

from ecrl.envs.mujoco.tasks import experts  # noqa: F401  # registers the experts
from ecrl.envs.mujoco.tasks.cart_pole import CartPoleRLConfig, cart_pole
from ecrl.envs.mujoco.tasks.open_drawer import OpenDrawerConfig, open_drawer
from ecrl.envs.mujoco.tasks.pick_cube import PickCubeConfig, pick_cube
from ecrl.envs.mujoco.tasks.push_cube import PushCubeConfig, push_cube
from ecrl.envs.mujoco.tasks.reach import ReachConfig, reach
from ecrl.envs.mujoco.tasks.reach_color import ReachColorConfig, reach_color
from ecrl.envs.mujoco.tasks.stack_cube import StackCubeConfig, stack_cube
from ecrl.envs.mujoco.terms import (  # noqa: F401  # registers the terms
    actions,
    cameras,
    eef_motion,
    embodichain_names,
    events,
    grasping,
    instructions,
    joints,
    observations,
    physics_events,
    relative_joint_position,
    rewards,
    robot_events,
)

__all__ = [
    "CartPoleRLConfig",
    "OpenDrawerConfig",
    "PickCubeConfig",
    "PushCubeConfig",
    "ReachColorConfig",
    "ReachConfig",
    "StackCubeConfig",
    "cart_pole",
    "open_drawer",
    "pick_cube",
    "push_cube",
    "reach",
    "reach_color",
    "stack_cube",
]
