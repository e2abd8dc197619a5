"""The task ReachRL: an arm moves its tool to a point in space."""

from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel, Positive
from ecrl.envs.core import Env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.make_task import task_env
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.scene.config import RobotConfig
from ecrl.envs.mujoco.task_config import (
    ActionConfig,
    ObservationConfig,
    RewardConfig,
    TaskEventConfig,
    parse_terms,
)
from ecrl.envs.mujoco.task_scale import ScalableTaskConfig, scale_of, scaled
from ecrl.envs.mujoco.terms.term import target, tcp_of
from ecrl.envs.scaling import LENGTH
from ecrl.registry import register_env

_TARGET = {"target_pose_key": "target_pose"}
_ACTIONS: Any = {"delta_qpos": {"func": "DeltaQposTerm", "params": {"scale": 0.1}}}
_OBSERVATIONS: Any = {
    "robot_qpos": {"func": "normalize_robot_joint_data", "mode": "modify", "name": "robot/qpos"},
    "robot_ee_pos": {"func": "get_robot_eef_pose", "name": "robot/ee_pos"},
    "target_pos": {"func": "target_position", "name": "object/target_pos", "params": _TARGET},
}
_REWARDS: Any = {
    "action_penalty": {"func": "action_smoothness_penalty", "weight": 0.01},
    "success_bonus": {"func": "success_reward", "weight": 10.0},
}
_EVENTS: Any = {
    "randomize_target": {
        "func": "randomize_target_pose",
        "mode": "reset",
        "params": {"position_range": [[-0.9, -0.4, 0.2], [-0.5, 0.1, 0.7]], "store_key": "target_pose"},
    }
}


class ReachExtensions(ConfigModel):
    """Settings of ReachRL: the target and the success condition."""

    success_threshold: Annotated[Positive, LENGTH] = Field(
        0.05, description="distance to the target, m, below which the episode is a success"
    )
    target_pose_key: str = Field("target_pose", description="store_key of the event that sets the target")
    part_name: str = Field("arm", description="part of the robot that has the end effector")


class ReachConfig(ScalableTaskConfig):
    """Config of ReachRL. By default, the robot is the built-in arm, and the target is in front of the arm."""

    robot: RobotConfig | None = Field(RobotConfig.model_construct(), description="the arm")
    max_episode_steps: int = Field(50, ge=1, lt=2**31, description="time limit, steps")
    actions: dict[str, ActionConfig] = Field(
        default_factory=partial(parse_terms, ActionConfig, _ACTIONS),
        description="action terms by name; by default 0.1 rad * action is added to joint positions",
    )
    observations: dict[str, ObservationConfig] = Field(
        default_factory=partial(parse_terms, ObservationConfig, _OBSERVATIONS),
        description="observation terms by name; by default end effector and target",
    )
    rewards: dict[str, RewardConfig] = Field(
        default_factory=partial(parse_terms, RewardConfig, _REWARDS),
        description="reward terms by name, added to the negative distance; by default smoothness and success",
    )
    events: dict[str, TaskEventConfig] = Field(
        default_factory=partial(parse_terms, TaskEventConfig, _EVENTS),
        description="events by name; by default a random position of the target",
    )
    extensions: ReachExtensions = Field(
        ReachExtensions.model_construct(), description="target and condition of success"
    )


@register_env("ReachRL")
def reach(cfg: ReachConfig) -> Env:
    """Move the end effector of an arm to a target.

        d = |end effector - target|
        reward = -d + the reward terms
        success: d < success_threshold

    Lengths are in m. Success ends the episode. The metric `distance_to_target` is d.
    """
    scale, cfg = scale_of(cfg), scaled(cfg)

    def distance(sim: Simulation, state: TensorDict) -> Tensor:
        site = tcp_of(sim, cfg.extensions.part_name, "extensions.part_name")
        position = world.site_pose(sim, state["world"], site)[..., :3, 3]
        goal = target(state, cfg.extensions.target_pose_key, "extensions.target_pose_key")
        return torch.linalg.vector_norm(position - goal, dim=-1)

    def compute_task_state(sim: Simulation, state: TensorDict) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        d = distance(sim, state)
        success = d < cfg.extensions.success_threshold
        return success, torch.zeros_like(success), {"distance_to_target": d}

    def get_reward(sim: Simulation, before: TensorDict, after: TensorDict) -> Tensor:
        return -distance(sim, after)

    return task_env(cfg, compute_task_state, get_reward=get_reward, scale=scale)
