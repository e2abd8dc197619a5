"""The task OpenDrawerRL: an arm with a gripper pulls a drawer open by its handle."""

from functools import partial
from typing import Any

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel, Fraction
from ecrl.envs.core import Env
from ecrl.envs.mujoco.make_task import task_env
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.robots.robot import described
from ecrl.envs.mujoco.task_config import (
    ObservationConfig,
    RewardConfig,
    TaskEventConfig,
    parse_terms,
)
from ecrl.envs.mujoco.task_step import error_prefix
from ecrl.envs.mujoco.tasks.gripper_arm import ROBOT_OBSERVATIONS, GripperTaskConfig
from ecrl.envs.mujoco.terms.joints import opening_of
from ecrl.errors import ConfigError
from ecrl.registry import register_env

_WALLS = {  # half size and position of each wall, m
    "bottom": ("0.17 0.2 0.01", "0 0 0.01"),
    "top": ("0.17 0.2 0.01", "0 0 0.29"),
    "back": ("0.01 0.2 0.15", "-0.16 0 0.15"),
    "left": ("0.17 0.01 0.15", "0 0.19 0.15"),
    "right": ("0.17 0.01 0.15", "0 -0.19 0.15"),
}
_WOOD, _FRONT, _METAL = "0.72 0.53 0.35 1", "0.85 0.68 0.48 1", "0.35 0.36 0.38 1"


def _box(size: str, position: str, color: str) -> str:
    return f'<geom class="cabinet" type="box" size="{size}" pos="{position}" rgba="{color}"/>'


def _rod(ends: str) -> str:
    return f'<geom class="cabinet" type="capsule" size="0.008" fromto="{ends}" rgba="{_METAL}"/>'


CABINET = f"""
<mujoco model="cabinet">
  <option timestep="0.01" iterations="20" integrator="implicitfast"/>
  <default>
    <!-- the parts of the cabinet do not collide with each other -->
    <default class="cabinet"><geom contype="1" conaffinity="2" condim="4" mass="0.3"/></default>
  </default>
  <worldbody>
    <geom name="floor" type="plane" size="3 3 0.1" rgba="0.9 0.9 0.88 1" contype="1" conaffinity="3" condim="4"/>
    <body name="cabinet" pos="-0.95 -0.2 0" mocap="true">
      {"".join(_box(size, position, _WOOD) for size, position in _WALLS.values())}
      <body name="drawer" pos="0 0 0.15">
        <joint name="drawer_slide" type="slide" axis="1 0 0" range="0 0.25" damping="10" frictionloss="2"/>
        {_box("0.01 0.175 0.12", "0.16 0 0", _FRONT)}
        {_box("0.15 0.17 0.01", "0 0 -0.1", _FRONT)}
        <body name="handle" pos="0.22 0 0.09">
          {_rod("0 -0.06 0 0 0.06 0")}
          {_rod("-0.05 -0.06 0 0 -0.06 0")}
          {_rod("-0.05 0.06 0 0 0.06 0")}
        </body>
      </body>
    </body>
  </worldbody>
</mujoco>
"""
"""MJCF text of a floor and a cabinet. The drawer slides 0.25 m. Its handle is a bar 0.05 m in front of the drawer."""

_FARTHEST = 1.0
"""Largest distance of the handle from the origin at the start, m, rounded up."""

_HANDLE, _SLIDE = {"object_cfg": {"uid": "handle"}}, {"joint": "drawer_slide"}
_OBSERVATIONS: Any = ROBOT_OBSERVATIONS | {
    "handle_pose": {
        "func": "get_rigid_object_pose",
        "name": "object/handle_pose",
        "params": {"entity_cfg": {"uid": "handle"}},
    },
    "to_handle": {"func": "get_eef_to_object", "name": "object/to_handle", "params": _HANDLE},
    "opening": {"func": "get_joint_opening", "name": "object/opening", "params": _SLIDE},
}
_REWARDS: Any = {
    "reaching_reward": {"func": "reaching_object", "weight": 0.1, "params": _HANDLE},
    "opening_reward": {"func": "joint_opening_progress", "weight": 20.0, "params": _SLIDE},
    "action_penalty": {"func": "action_smoothness_penalty", "weight": 0.005},
    "success_bonus": {"func": "success_reward", "weight": 10.0},
}
_EVENTS: Any = {
    "randomize_cabinet": {
        "func": "randomize_rigid_object_pose",
        "mode": "reset",
        "params": {
            "entity_cfg": {"uid": "cabinet"},
            "position_range": [[-0.05, -0.15, 0.0], [0.05, 0.15, 0.0]],
            "rotation_range": [[0.0, 0.0, -20.0], [0.0, 0.0, 20.0]],
        },
    },
}


class OpenDrawerExtensions(ConfigModel):
    """Settings of OpenDrawerRL: the joint of the drawer and the condition of success."""

    joint: str = Field(
        "drawer_slide", min_length=1, description="joint of the drawer; the drawer is open at the upper limit"
    )
    success_opening: Fraction = Field(
        0.8, description="opening, as a fraction of the joint's range, above which the episode is a success"
    )


class OpenDrawerConfig(GripperTaskConfig):
    """Config of OpenDrawerRL. By default, the built-in arm with the built-in gripper opens the drawer of a cabinet."""

    mjcf: str | None = Field(CABINET, description="path or text of an MJCF file with a drawer, by default a cabinet")
    observations: dict[str, ObservationConfig] = Field(
        default_factory=partial(parse_terms, ObservationConfig, _OBSERVATIONS),
        description="observation terms by name; by default end effector, handle and opening",
    )
    rewards: dict[str, RewardConfig] = Field(
        default_factory=partial(parse_terms, RewardConfig, _REWARDS),
        description="reward terms by name; by default reaching, opening, smoothness and success",
    )
    events: dict[str, TaskEventConfig] = Field(
        default_factory=partial(parse_terms, TaskEventConfig, _EVENTS),
        description="events by name; by default random poses of the cabinet",
    )
    extensions: OpenDrawerExtensions = Field(
        OpenDrawerExtensions.model_construct(), description="joint of the drawer and condition of success"
    )


@register_env("OpenDrawerRL")
def open_drawer(cfg: OpenDrawerConfig) -> Env:
    """Pull a drawer open.

        opening = (q - low) / (high - low), for the position q and the limits of the drawer's joint
        success: opening > success_opening

    Success ends the episode. The metric `opening` is 0 if the drawer is closed, and 1 if it is fully open.

    Raises: ConfigError if the scene is the default cabinet, the arm is at the origin, and the `RobotModel` of the arm
        gives a reach below 1 m.
    """
    with error_prefix("env.cfg"):
        model = None if cfg.robot is None else described(cfg.robot)
        at_origin = cfg.robot is not None and cfg.robot.init_pos == (0.0, 0.0, 0.0)
        if model is not None and model.reach < _FARTHEST and cfg.mjcf == CABINET and at_origin:
            fault = f"reaches {model.reach:g} m, but the drawer is up to {_FARTHEST:g} m away"
            raise ConfigError(f"robot: {fault}; move the arm with robot.init_pos, or give another scene as mjcf")

    def compute_task_state(sim: Simulation, state: TensorDict) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        opening = opening_of(sim, state["world"], cfg.extensions.joint)
        return (
            opening > cfg.extensions.success_opening,
            torch.zeros_like(opening, dtype=torch.bool),
            {"opening": opening},
        )

    return task_env(cfg, compute_task_state)
