"""The task PickCubeRL: an arm with a gripper grasps a cube and lifts it to a goal."""

from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel, NonNegative, Positive
from ecrl.envs.core import Env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.make_task import task_env
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.scene.config import RigidObjectConfig
from ecrl.envs.mujoco.task_config import (
    ObservationConfig,
    RewardConfig,
    TaskEventConfig,
    parse_terms,
)
from ecrl.envs.mujoco.task_scale import FALLEN_HEIGHT, ScalableTaskConfig, scale_of, scaled
from ecrl.envs.mujoco.tasks.gripper_arm import ROBOT_OBSERVATIONS, GripperTaskConfig
from ecrl.envs.mujoco.terms.grasping import check_graspable, is_grasped
from ecrl.envs.mujoco.terms.term import target
from ecrl.envs.scaling import LENGTH
from ecrl.registry import register_env

_CUBE, _GOAL = {"object_cfg": {"uid": "cube"}}, {"target_pose_key": "goal_pose"}
_OBSERVATIONS: Any = ROBOT_OBSERVATIONS | {
    "cube_pose": {
        "func": "get_rigid_object_pose",
        "name": "object/cube_pose",
        "params": {"entity_cfg": {"uid": "cube"}},
    },
    "goal_pos": {"func": "target_position", "name": "object/goal_pos", "params": _GOAL},
    "to_cube": {"func": "get_eef_to_object", "name": "object/to_cube", "params": _CUBE},
    "to_goal": {"func": "get_object_to_target", "name": "object/to_goal", "params": _CUBE | _GOAL},
    "grasped": {"func": "get_object_grasped", "name": "object/grasped", "params": _CUBE},
}
_REWARDS: Any = {
    "reaching_reward": {"func": "reaching_object", "weight": 0.1, "params": _CUBE},
    "grasp_reward": {"func": "grasp_reward", "weight": 0.1, "params": _CUBE},
    "lifting_reward": {"func": "grasped_object_to_target", "weight": 0.2, "params": _CUBE | _GOAL},
    "action_penalty": {"func": "action_smoothness_penalty", "weight": 0.005},
    "success_bonus": {"func": "success_reward", "weight": 20.0},
}
_EVENTS: Any = {
    "randomize_cube": {
        "func": "randomize_rigid_object_pose",
        "mode": "reset",
        "params": {
            "entity_cfg": {"uid": "cube"},
            "position_range": [[-0.15, -0.15, 0.0], [0.15, 0.15, 0.0]],
            "rotation_range": [[0.0, 0.0, -180.0], [0.0, 0.0, 180.0]],
        },
    },
    "randomize_goal": {
        "func": "randomize_target_pose",
        "mode": "reset",
        "params": {"position_range": [[-0.8, -0.4, 0.1], [-0.5, 0.0, 0.4]], "store_key": "goal_pose"},
    },
}
_OBJECT: Any = {
    "uid": "cube",
    "shape": {"shape_type": "Cube", "size": [0.05, 0.05, 0.05]},
    "init_pos": [-0.65, -0.2, 0.025],
    "attrs": {"mass": 0.2, "static_friction": 1.0},
}


class PickCubeExtensions(ConfigModel):
    """Settings of PickCubeRL: the object, the goal and the condition of success."""

    success_threshold: Annotated[Positive, LENGTH] = Field(
        0.04, description="distance to the goal, m, below which a grasped object at rest is a success"
    )
    rest_speed: Annotated[Positive, LENGTH] = Field(0.2, description="speed, m/s, below which the object is at rest")
    start_distance: Annotated[NonNegative, LENGTH] = Field(
        0.1, description="smallest distance from object to goal at the start, m"
    )
    object_uid: str = Field("cube", description="uid of the object to pick up")
    target_pose_key: str = Field("goal_pose", description="store_key of the event that sets the goal")


class PickCubeConfig(GripperTaskConfig, ScalableTaskConfig):
    """Config of PickCubeRL. By default, the built-in arm with the built-in gripper picks up a cube."""

    rigid_object: tuple[RigidObjectConfig, ...] = Field(
        default_factory=lambda: (RigidObjectConfig.model_validate(_OBJECT),),
        strict=False,
        description="objects; by default a cube of 0.05 m and 0.2 kg",
    )
    observations: dict[str, ObservationConfig] = Field(
        default_factory=partial(parse_terms, ObservationConfig, _OBSERVATIONS),
        description="observation terms by name; by default end effector, cube, goal and grasp",
    )
    rewards: dict[str, RewardConfig] = Field(
        default_factory=partial(parse_terms, RewardConfig, _REWARDS),
        description="reward terms by name; by default reaching, grasping, lifting, smoothness and success",
    )
    events: dict[str, TaskEventConfig] = Field(
        default_factory=partial(parse_terms, TaskEventConfig, _EVENTS),
        description="events by name; by default random poses of the cube and a random goal",
    )
    extensions: PickCubeExtensions = Field(
        PickCubeExtensions.model_construct(), description="object, goal and condition of success"
    )


@register_env("PickCubeRL")
def pick_cube(cfg: PickCubeConfig) -> Env:
    """Grasp a cube and lift it to a goal.

        d = |cube - goal|
        success: d < success_threshold, and the cube is grasped, and its speed is below rest_speed
        failure: cube_z < -0.1 * scale

    All lengths are in m, and `scale` is the factor for the lengths of the task. Success or failure ends the episode.
    Each episode starts in a state with d >= start_distance, which is drawn as in PushCubeRL. The metrics are
    `distance_to_goal`, which is d, and `grasped`, which is 1 while two fingers press on the cube from opposite sides,
    each with a force of at least the cube's weight, and 0 otherwise.
    """
    scale, cfg = scale_of(cfg), scaled(cfg)
    ext, uid, key = cfg.extensions, cfg.extensions.object_uid, cfg.extensions.target_pose_key

    def distance(sim: Simulation, state: TensorDict) -> Tensor:
        goal = target(state, key, "extensions.target_pose_key")
        return torch.linalg.vector_norm(world.body_position(sim, state["world"], uid) - goal, dim=-1)

    def compute_task_state(sim: Simulation, state: TensorDict) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        check_graspable(sim, uid, "extensions.object_uid")
        d, grasped = distance(sim, state), is_grasped(sim, state["world"], uid)
        speed = torch.linalg.vector_norm(world.body_velocity(sim, state["world"], uid)[0], dim=-1)
        success = (d < ext.success_threshold) & grasped & (speed < ext.rest_speed)
        fallen = world.body_position(sim, state["world"], uid)[..., 2] < FALLEN_HEIGHT * scale
        return success, fallen, {"distance_to_goal": d, "grasped": grasped.float()}

    def acceptable(sim: Simulation, state: TensorDict) -> Tensor:
        return distance(sim, state) >= ext.start_distance

    return task_env(cfg, compute_task_state, acceptable=acceptable, scale=scale)
