"""An arm pushes a cube to a goal on the floor: EmbodiChain's PushCubeRL, with its numbers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel, NonNegative, Positive
from ecrl.envs.core import Env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.holding import holding
from ecrl.envs.mujoco.make_task import task_env
from ecrl.envs.mujoco.physics.simulation import Simulation, advance
from ecrl.envs.mujoco.scene.config import RigidObjectConfig, RobotConfig
from ecrl.envs.mujoco.task_config import (
    ActionConfig,
    ObservationConfig,
    RewardConfig,
    TaskConfig,
    TaskEventConfig,
    parsed,
)
from ecrl.envs.mujoco.terms.term import target
from ecrl.registry import register_env

_CUBE, _GOAL = {"uid": "cube"}, {"target_pose_key": "goal_pose"}
_ACTIONS: Any = {"delta_qpos": {"func": "DeltaQposTerm", "params": {"scale": 0.1}}}
_OBSERVATIONS: Any = {
    "robot_qpos": {"func": "normalize_robot_joint_data", "mode": "modify", "name": "robot/qpos"},
    "robot_ee_pos": {"func": "get_robot_eef_pose", "name": "robot/ee_pos"},
    "cube_pos": {"func": "get_rigid_object_pose", "name": "object/cube_pos", "params": {"entity_cfg": _CUBE}},
    "goal_pos": {"func": "target_position", "name": "object/goal_pos", "params": _GOAL},
}
_BEHIND = {"object_cfg": _CUBE, "behind_offset": 0.03, "height_offset": 0.015, "distance_scale": 8.0}
_NEAR = {"source_entity_cfg": _CUBE, "exponential": True, "sigma": 0.12, "use_xy_only": True}
_REWARDS: Any = {
    "reaching_reward": {"func": "reaching_behind_object", "weight": 0.03, "params": _BEHIND | _GOAL},
    "goal_distance_reward": {"func": "distance_to_target", "weight": 0.8, "params": _NEAR | _GOAL},
    "action_penalty": {"func": "action_smoothness_penalty", "weight": 0.01},
    "success_bonus": {"func": "success_reward", "weight": 10.0},
}
_EVENTS: Any = {
    "randomize_cube": {
        "func": "randomize_rigid_object_pose",
        "mode": "reset",
        "params": {"entity_cfg": _CUBE, "position_range": [[-0.2, -0.2, 0.0], [0.2, 0.2, 0.0]]},
    },
    "randomize_goal": {
        "func": "randomize_target_pose",
        "mode": "reset",
        "params": {"position_range": [[-0.3, -0.3, 0.05], [0.3, 0.3, 0.05]], "store_key": "goal_pose"},
    },
}


_OBJECT: Any = {
    "uid": "cube",
    "shape": {"shape_type": "Cube", "size": [0.1, 0.1, 0.1]},
    "init_pos": [-0.6, -0.4, 0.05],
    "attrs": {"mass": 2.0, "static_friction": 1.0, "linear_damping": 2.0, "angular_damping": 2.0},
}


class PushCubeExtensions(ConfigModel):
    """What the task is."""

    success_threshold: Positive = Field(0.1, description="in the plane, from cube to goal: success below this, m")
    start_distance: NonNegative = Field(0.15, description="an episode starts at least this far, m")
    hold_time: NonNegative = Field(
        0.0,
        description="s; above 0 the metric still_inside says of a success whether the cube is inside so much later, "
        "the arm held; this takes as much more physics in every step",
    )
    object_uid: str = Field("cube", description="the object that is pushed")
    target_pose_key: str = Field("goal_pose", description="where it is pushed to, as an event stores it")


class PushCubeConfig(TaskConfig):
    """Scene and terms of EmbodiChain's config; each may be changed."""

    robot: RobotConfig | None = Field(
        RobotConfig.model_construct(uid="Manipulator"), description="the arm, its base at the origin"
    )
    rigid_object: tuple[RigidObjectConfig, ...] = Field(
        default_factory=lambda: (RigidObjectConfig.model_validate(_OBJECT),),
        strict=False,
        description="a cube of 0.1 m and 2 kg",
    )
    max_episode_steps: int = Field(100, ge=1, lt=2**31, description="time limit, steps")
    actions: dict[str, ActionConfig] = Field(
        default_factory=partial(parsed, ActionConfig, _ACTIONS), description="joint positions, changed by 0.1 a"
    )
    observations: dict[str, ObservationConfig] = Field(
        default_factory=partial(parsed, ObservationConfig, _OBSERVATIONS), description="end effector, cube and goal"
    )
    rewards: dict[str, RewardConfig] = Field(
        default_factory=partial(parsed, RewardConfig, _REWARDS), description="reaching, distance, smoothness, success"
    )
    events: dict[str, TaskEventConfig] = Field(
        default_factory=partial(parsed, TaskEventConfig, _EVENTS), description="where cube and goal are"
    )
    extensions: PushCubeExtensions = Field(PushCubeExtensions.model_construct(), description="what the task is")


Distance = Callable[[Simulation, TensorDict], Tensor]
"""(sim, state) -> `[*B]`, m, from cube to goal."""


def _inside_later(sim: Simulation, state: TensorDict, distance: Distance, ext: PushCubeExtensions) -> Tensor:
    """Whether the cube is inside after `hold_time` with the arm held where it is, `[*B]`; not so where MuJoCo fails."""
    steps = max(1, round(ext.hold_time / sim.model.opt.timestep))
    later, lost = advance(replace(sim, substeps=steps), state["world"], holding(sim, state["world"]))
    return (distance(sim, state.copy().set("world", later)) < ext.success_threshold) & ~lost


def _looking_again(env: Env, distance: Distance, ext: PushCubeExtensions) -> Env:
    """The environment with the metric `still_inside`; of a start, which is no success, without any physics."""

    def told(state: TensorDict, inside: Tensor) -> TensorDict:
        info = cast(TensorDict, state["info"]).copy()
        metric = torch.where(info["success"], inside.float(), torch.nan)
        metrics = cast(TensorDict, info["metrics"]).copy().set("still_inside", metric)
        return state.copy().set("info", info.set("metrics", metrics))

    def reset(keys: Tensor) -> TensorDict:
        state = env.reset(keys)
        return told(state, torch.zeros_like(state["terminated"]))

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        after = env.step(state, action, noise)
        return told(after, _inside_later(env.scene, after, distance, ext))

    return replace(env, reset=reset, step=step)


@register_env("PushCubeRL")
def push_cube(cfg: PushCubeConfig) -> Env:
    """Push a cube to a goal.

        d = |cube_xy - goal_xy|, m;    success, which ends the episode: d < success_threshold

    An episode starts with d >= start_distance: at the first such of 12 starts that are drawn, or else at one that was
    found beforehand. A cube below -0.1 m is a failure. The metric `distance_to_goal` is d; `still_inside`, with
    `hold_time`, is NaN where there is no success.
    """
    ext, uid, key = cfg.extensions, cfg.extensions.object_uid, cfg.extensions.target_pose_key

    def distance(sim: Simulation, state: TensorDict) -> Tensor:
        place = world.body_position(sim, state["world"], uid)[..., :2]
        return torch.linalg.vector_norm(place - target(state, key)[..., :2], dim=-1)

    def compute_task_state(sim: Simulation, state: TensorDict) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        d = distance(sim, state)
        fallen, metrics = world.body_position(sim, state["world"], uid)[..., 2] < -0.1, {"distance_to_goal": d}
        return d < ext.success_threshold, fallen, metrics

    def acceptable(sim: Simulation, state: TensorDict) -> Tensor:
        return distance(sim, state) >= ext.start_distance

    env = task_env(cfg, compute_task_state, acceptable=acceptable)
    return _looking_again(env, distance, ext) if ext.hold_time else env
