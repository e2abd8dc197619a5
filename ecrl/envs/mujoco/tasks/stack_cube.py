"""The task StackCubeRL: an arm with a gripper puts a cube on another cube."""

from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel, Positive
from ecrl.envs.core import Env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.make_task import task_env
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.scene.config import RigidObjectConfig, Triple
from ecrl.envs.mujoco.task_config import (
    ObservationConfig,
    RewardConfig,
    TaskEventConfig,
    parse_terms,
)
from ecrl.envs.mujoco.task_scale import FALLEN_HEIGHT, ScalableTaskConfig, scale_of, scaled
from ecrl.envs.mujoco.tasks.gripper_arm import ROBOT_OBSERVATIONS, GripperTaskConfig
from ecrl.envs.mujoco.terms.grasping import check_graspable, is_grasped, is_released
from ecrl.envs.scaling import LENGTH
from ecrl.registry import register_env

_CUBE, _BASE = {"object_cfg": {"uid": "cube"}}, {"target_cfg": {"uid": "base"}, "offset": [0.0, 0.0, 0.055]}
_ABOVE = {"target_cfg": {"uid": "base"}, "offset": [0.0, 0.0, 0.08]}
_PLACE = {"target_cfg": {"uid": "base"}, "offset": [0.0, 0.0, 0.05], "distance_scale": 40.0}
_OBSERVATIONS: Any = ROBOT_OBSERVATIONS | {
    "cube_pose": {
        "func": "get_rigid_object_pose",
        "name": "object/cube_pose",
        "params": {"entity_cfg": {"uid": "cube"}},
    },
    "base_pose": {
        "func": "get_rigid_object_pose",
        "name": "object/base_pose",
        "params": {"entity_cfg": {"uid": "base"}},
    },
    "to_cube": {"func": "get_eef_to_object", "name": "object/to_cube", "params": _CUBE},
    "to_base": {"func": "get_object_to_target", "name": "object/to_base", "params": _CUBE | _BASE},
    "grasped": {"func": "get_object_grasped", "name": "object/grasped", "params": _CUBE},
}
_REWARDS: Any = {
    "reaching_reward": {"func": "reaching_object", "weight": 0.1, "params": _CUBE},
    "grasp_reward": {"func": "grasp_reward", "weight": 0.1, "params": _CUBE},
    "lifting_reward": {"func": "grasped_object_to_target", "weight": 0.4, "params": _CUBE | _ABOVE},
    "placing_reward": {"func": "object_near_target", "weight": 0.6, "params": _CUBE | _PLACE},
    "action_penalty": {"func": "action_smoothness_penalty", "weight": 0.005},
    "success_bonus": {"func": "success_reward", "weight": 100.0},
}
_SQUARE = {"position_range": [[-0.8, -0.35, 0.025], [-0.5, -0.05, 0.025]], "min_distance": 0.1}
_EVENTS: Any = {
    "scatter_cubes": {
        "func": "scatter_rigid_objects",
        "mode": "reset",
        "params": {"entity_cfgs": [{"uid": "cube"}, {"uid": "base"}]} | _SQUARE,
    },
}


def _cube(uid: str, x: float, color: tuple[float, ...]) -> RigidObjectConfig:
    shape, attrs = {"shape_type": "Cube", "size": [0.05, 0.05, 0.05]}, {"mass": 0.2, "static_friction": 1.0}
    cube = {"uid": uid, "shape": shape, "init_pos": [x, -0.2, 0.025], "attrs": attrs, "color": list(color)}
    return RigidObjectConfig.model_validate(cube)


class StackCubeExtensions(ConfigModel):
    """Settings of StackCubeRL: the objects and the condition of success."""

    object_uid: str = Field("cube", description="uid of the object to put on the other object")
    base_uid: str = Field("base", description="uid of the object on which the other object is put")
    offset: Annotated[Triple, LENGTH] = Field(
        (0.0, 0.0, 0.05), description="x, y, z of the vector from the lower object's centre to the upper object's, m"
    )
    horizontal_threshold: Annotated[Positive, LENGTH] = Field(
        0.025,
        description="largest horizontal distance of the object from its place on the other object at a success, m",
    )
    vertical_threshold: Annotated[Positive, LENGTH] = Field(
        0.01,
        description="largest vertical distance of the object from its place on the other object at a success, m",
    )
    rest_speed: Annotated[Positive, LENGTH] = Field(0.1, description="speed, m/s, below which the object is at rest")

    @model_validator(mode="after")
    def _two_objects(self) -> "StackCubeExtensions":
        if self.object_uid == self.base_uid:
            raise ValueError(f"object_uid and base_uid are both {self.base_uid!r}; name two objects")
        return self


class StackCubeConfig(GripperTaskConfig, ScalableTaskConfig):
    """Config of StackCubeRL. By default, the built-in arm with the built-in gripper stacks two equal cubes."""

    rigid_object: tuple[RigidObjectConfig, ...] = Field(
        default_factory=lambda: (
            _cube("cube", -0.6, (0.85, 0.35, 0.2, 1.0)),
            _cube("base", -0.75, (0.2, 0.7, 0.3, 1.0)),
        ),
        strict=False,
        description="objects; by default two cubes of 0.05 m and 0.2 kg",
    )
    observations: dict[str, ObservationConfig] = Field(
        default_factory=partial(parse_terms, ObservationConfig, _OBSERVATIONS),
        description="observation terms by name; by default end effector, cubes and grasp",
    )
    rewards: dict[str, RewardConfig] = Field(
        default_factory=partial(parse_terms, RewardConfig, _REWARDS),
        description="reward terms by name; by default reaching, grasping, lifting, placing, smoothness and success",
    )
    events: dict[str, TaskEventConfig] = Field(
        default_factory=partial(parse_terms, TaskEventConfig, _EVENTS),
        description="events by name; by default random positions of both cubes",
    )
    extensions: StackCubeExtensions = Field(
        StackCubeExtensions.model_construct(), description="objects and condition of success"
    )


@register_env("StackCubeRL")
def stack_cube(cfg: StackCubeConfig) -> Env:
    """Put a cube on another cube and let go of it.

        place = base + offset;    e = place - cube
        success: |e_xy| < horizontal_threshold, |e_z| < vertical_threshold, no finger touches the cube, and its speed
                 is below rest_speed
        failure: cube_z < -0.1 * scale or base_z < -0.1 * scale

    All lengths are in m, and `scale` is the factor for the lengths of the task. Success or failure ends the episode.
    The metrics are `distance_to_place`, which is |e|, and `grasped`, which is 1 while two fingers press on the cube
    from opposite sides, each with a force of at least the cube's weight, and 0 otherwise.
    """
    scale, cfg = scale_of(cfg), scaled(cfg)
    ext, uid, base = cfg.extensions, cfg.extensions.object_uid, cfg.extensions.base_uid

    def to_place(sim: Simulation, state: TensorDict) -> Tensor:
        cube, below = (world.body_position(sim, state["world"], name) for name in (uid, base))
        return below + below.new_tensor(ext.offset) - cube

    def compute_task_state(sim: Simulation, state: TensorDict) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        check_graspable(sim, uid, "extensions.object_uid")
        error, grasped = to_place(sim, state), is_grasped(sim, state["world"], uid)
        level = torch.linalg.vector_norm(error[..., :2], dim=-1) < ext.horizontal_threshold
        above = error[..., 2].abs() < ext.vertical_threshold
        speed = torch.linalg.vector_norm(world.body_velocity(sim, state["world"], uid)[0], dim=-1)
        released = is_released(sim, state["world"], uid)
        success = level & above & released & (speed < ext.rest_speed)
        heights = [world.body_position(sim, state["world"], name)[..., 2] for name in (uid, base)]
        fallen = torch.minimum(*heights) < FALLEN_HEIGHT * scale
        metrics = {"distance_to_place": torch.linalg.vector_norm(error, dim=-1), "grasped": grasped.float()}
        return success, fallen, metrics

    return task_env(cfg, compute_task_state, scale=scale)
