"""An arm brings its tool to a point in space."""

from functools import partial
from typing import Any

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
    TaskConfig,
    TaskEventConfig,
    parsed,
)
from ecrl.envs.mujoco.terms.term import target, tcp_of
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
    """What the task is."""

    success_threshold: Positive = Field(0.05, description="from end effector to target: success below this, m")
    target_pose_key: str = Field("target_pose", description="where it is to go, as an event stores it")
    part_name: str = Field("arm", description="the part of the robot whose end effector it is")


class ReachConfig(TaskConfig):
    """The built-in arm and a target in front of it."""

    robot: RobotConfig | None = Field(RobotConfig.model_construct(), description="the arm")
    max_episode_steps: int = Field(50, ge=1, lt=2**31, description="time limit, steps")
    actions: dict[str, ActionConfig] = Field(
        default_factory=partial(parsed, ActionConfig, _ACTIONS), description="joint positions, changed by 0.1 a"
    )
    observations: dict[str, ObservationConfig] = Field(
        default_factory=partial(parsed, ObservationConfig, _OBSERVATIONS), description="end effector and target"
    )
    rewards: dict[str, RewardConfig] = Field(
        default_factory=partial(parsed, RewardConfig, _REWARDS), description="beside the distance: smoothness, success"
    )
    events: dict[str, TaskEventConfig] = Field(
        default_factory=partial(parsed, TaskEventConfig, _EVENTS), description="where the target is"
    )
    extensions: ReachExtensions = Field(ReachExtensions.model_construct(), description="what the task is")


@register_env("ReachRL")
def reach(cfg: ReachConfig) -> Env:
    """Bring the end effector to a target.

        d = |end effector - target|, m;    reward = -d + the terms;    success, which ends the episode: d < threshold

    The metric `distance_to_target` is d.
    """

    def distance(sim: Simulation, state: TensorDict) -> Tensor:
        place = world.site_pose(sim, state["world"], tcp_of(sim, cfg.extensions.part_name))[..., :3, 3]
        return torch.linalg.vector_norm(place - target(state, cfg.extensions.target_pose_key), dim=-1)

    def compute_task_state(sim: Simulation, state: TensorDict) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        d = distance(sim, state)
        success = d < cfg.extensions.success_threshold
        return success, torch.zeros_like(success), {"distance_to_target": d}

    def get_reward(sim: Simulation, before: TensorDict, after: TensorDict) -> Tensor:
        return -distance(sim, after)

    return task_env(cfg, compute_task_state, get_reward=get_reward)
