"""The built-in arm with the built-in gripper, as the default robot of tasks that grasp objects."""

from typing import Any

from ecrl.envs.mujoco.robots.components import BUILTIN_HAND

GRIPPER_ARM: Any = {
    "uid": "Manipulator",
    "urdf_cfg": {"components": [{"component_type": "hand", "urdf_path": BUILTIN_HAND}]},
    # the end effector is between the fingers, 0.02 m above their tips
    "solver_cfg": {"arm": {"tcp": [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.14], [0, 0, 0, 1.0]]}},
    # soft enough that the drives of both fingers share the force on an object between them
    "drive_pros": {"stiffness": {"gripper.*": 1000.0}, "damping": {"gripper.*": 50.0}},
}
"""Settings of the robot."""

ACTIONS: Any = {
    "arm": {"func": "DeltaEefPoseTerm", "params": {"scale": 0.03}},
    "gripper": {"func": "GripperTerm"},
}
"""Action terms: three actions move the end effector by up to 0.03 m per step, and one moves the gripper."""

ROBOT_OBSERVATIONS: Any = {
    "robot_qpos": {"func": "normalize_robot_joint_data", "mode": "modify", "name": "robot/qpos"},
    "robot_ee_pose": {"func": "get_robot_eef_pose", "name": "robot/ee_pose"},
}
"""Observation terms of the robot."""
