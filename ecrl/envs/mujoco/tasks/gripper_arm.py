"""The built-in arm with the built-in gripper, as the default robot of tasks that grasp objects."""

from functools import partial
from typing import Any

from pydantic import Field

from ecrl.envs.mujoco.robots.components import BUILTIN_HAND
from ecrl.envs.mujoco.scene.config import RobotConfig
from ecrl.envs.mujoco.task_config import ActionConfig, TaskConfig, parse_terms

GRIPPER_ARM: Any = {
    "uid": "Manipulator",
    "urdf_cfg": {"components": [{"component_type": "hand", "urdf_path": BUILTIN_HAND}]},
    # the end effector is between the fingers, 0.02 m above their tips
    "solver_cfg": {"arm": {"tcp": [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.14], [0, 0, 0, 1.0]]}},
    # soft drives, so that both fingers press on a grasped object
    "drive_pros": {"stiffness": {"gripper.*": 1000.0}, "damping": {"gripper.*": 50.0}},
}
"""Settings of the robot: the built-in arm with the built-in gripper."""

_ACTIONS: Any = {
    "arm": {"func": "DeltaEefPoseTerm", "params": {"scale": 0.03}},
    "gripper": {"func": "GripperTerm"},
}
"""Action terms: three actions move the end effector by up to 0.03 m per step along each axis, and one action moves the
gripper.
"""

ROBOT_OBSERVATIONS: Any = {
    "robot_qpos": {"func": "normalize_robot_joint_data", "mode": "modify", "name": "robot/qpos"},
    "robot_ee_pose": {"func": "get_robot_eef_pose", "name": "robot/ee_pose"},
}
"""Observation terms for the robot: joint positions scaled to [0, 1], and the pose of the end effector."""


class GripperTaskConfig(TaskConfig):
    """Config of a task with an arm and a gripper. By default, the arm and the gripper are built in."""

    robot: RobotConfig | None = Field(
        default_factory=lambda: RobotConfig.model_validate(GRIPPER_ARM), description="the arm with a gripper"
    )
    max_episode_steps: int = Field(100, ge=1, lt=2**31, description="time limit, steps")
    actions: dict[str, ActionConfig] = Field(
        default_factory=partial(parse_terms, ActionConfig, _ACTIONS),
        description="action terms by name; by default three actions move the end effector by up to 0.03 m per step "
        "along each axis, and one action opens and closes the gripper",
    )
