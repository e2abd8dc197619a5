"""The task PushCubeRL: an arm pushes a cube to a goal on the floor. The default cube and terms are EmbodiChain's."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel, NonNegative, Positive
from ecrl.envs.core import Env, change_reset
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.make_task import task_env
from ecrl.envs.mujoco.physics.simulation import Simulation, advance
from ecrl.envs.mujoco.scene.config import RigidObjectConfig, RobotConfig
from ecrl.envs.mujoco.task_config import (
    ActionConfig,
    ObservationConfig,
    RewardConfig,
    TaskEventConfig,
    parse_terms,
)
from ecrl.envs.mujoco.task_scale import FALLEN_HEIGHT, ScalableTaskConfig, scale_of, scaled
from ecrl.envs.mujoco.terms.term import target
from ecrl.envs.scaling import LENGTH
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
    """Settings of PushCubeRL: the object, the goal and the success condition."""

    success_threshold: Annotated[Positive, LENGTH] = Field(
        0.1, description="horizontal distance to the goal, m, below which the episode is a success"
    )
    start_distance: Annotated[NonNegative, LENGTH] = Field(
        0.15, description="smallest horizontal distance from the cube to the goal at the start, m"
    )
    hold_time: NonNegative = Field(
        0.0,
        description=(
            "simulated time of a check after a success, s; 0: no check. The check simulates how the scene continues "
            "for this time while the arm is held still. The metric still_inside reports if the cube is then still at "
            "the goal. The simulation runs after every step, even without a success, which is slow"
        ),
    )
    object_uid: str = Field("cube", description="uid of the object to push")
    target_pose_key: str = Field("goal_pose", description="store_key of the event that sets the goal")


class PushCubeConfig(ScalableTaskConfig):
    """Config of PushCubeRL. The default cube and the default terms are the same as in EmbodiChain's config.

    Unlike in EmbodiChain, the default arm has no gripper, and its drives have the settings of the built-in arm.
    """

    robot: RobotConfig | None = Field(
        RobotConfig.model_construct(uid="Manipulator"), description="the arm; by default, its base is at the origin"
    )
    rigid_object: tuple[RigidObjectConfig, ...] = Field(
        default_factory=lambda: (RigidObjectConfig.model_validate(_OBJECT),),
        strict=False,
        description="objects; by default a cube of 0.1 m and 2 kg",
    )
    max_episode_steps: int = Field(100, ge=1, lt=2**31, description="time limit, steps")
    actions: dict[str, ActionConfig] = Field(
        default_factory=partial(parse_terms, ActionConfig, _ACTIONS),
        description="action terms by name; by default 0.1 rad * action is added to joint positions",
    )
    observations: dict[str, ObservationConfig] = Field(
        default_factory=partial(parse_terms, ObservationConfig, _OBSERVATIONS),
        description="observation terms by name; by default end effector, cube and goal",
    )
    rewards: dict[str, RewardConfig] = Field(
        default_factory=partial(parse_terms, RewardConfig, _REWARDS),
        description="reward terms by name; by default reaching, distance, smoothness and success",
    )
    events: dict[str, TaskEventConfig] = Field(
        default_factory=partial(parse_terms, TaskEventConfig, _EVENTS),
        description="events by name; by default random positions of cube and goal",
    )
    extensions: PushCubeExtensions = Field(
        PushCubeExtensions.model_construct(), description="object, goal and conditions of success"
    )


Distance = Callable[[Simulation, TensorDict], Tensor]
"""Function that maps (sim, state) to the distance in m from the cube to the goal, `[*B]`."""


def _inside_later(sim: Simulation, state: TensorDict, distance: Distance, ext: PushCubeExtensions) -> Tensor:
    """Return True, bool `[*B]`, if the cube is at the goal after the arm is held still for `hold_time` seconds.

    This time is simulated from `state`, which does not change. The result is False for an environment whose simulation
    fails.
    """
    steps = max(1, round(ext.hold_time / sim.model.opt.timestep))
    later, failed = advance(replace(sim, substeps=steps), state["world"], world.hold_controls(sim, state["world"]))
    return (distance(sim, state.copy().set("world", later)) < ext.success_threshold) & ~failed


def _with_hold_check(env: Env, distance: Distance, ext: PushCubeExtensions) -> Env:
    """Add the metric `still_inside` to the environment.

    `reset` sets this metric to NaN, because the start of an episode is not a success.
    """

    def add_metric(state: TensorDict, inside: Tensor) -> TensorDict:
        info = cast(TensorDict, state["info"]).copy()
        metric = torch.where(info["success"], inside.float(), torch.nan)
        metrics = cast(TensorDict, info["metrics"]).copy().set("still_inside", metric)
        return state.copy().set("info", info.set("metrics", metrics))

    def with_metric(reset: Callable[[Tensor], TensorDict]) -> Callable[[Tensor], TensorDict]:
        def reset_with_metric(keys: Tensor) -> TensorDict:
            state = reset(keys)
            return add_metric(state, torch.zeros_like(state["terminated"]))

        return reset_with_metric

    def step(state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        after = env.step(state, action, noise)
        return add_metric(after, _inside_later(env.scene, after, distance, ext))

    return replace(change_reset(env, with_metric), step=step)


@register_env("PushCubeRL")
def push_cube(cfg: PushCubeConfig) -> Env:
    """Push a cube to a goal with a robot arm.

        d = |cube_xy - goal_xy|
        success: d < success_threshold
        failure: cube_z < -0.1 * scale

    All lengths are in m, and `scale` is the factor for the lengths of the task. Success or failure ends the episode. A
    state is an acceptable start if d >= start_distance. Up to 12 random states are drawn, and the episode starts in the
    first acceptable state. If none of the 12 states is acceptable, the episode starts in an acceptable state that was
    found when the task was created.

    The metric `distance_to_goal` is d. If `hold_time` is above 0, the task has the metric `still_inside`. In each step,
    the task simulates how the scene continues for `hold_time` seconds while the arm is held still. In a step with a
    success, `still_inside` is 1 if the cube is at the goal after this time, and 0 otherwise. In a step without a
    success, `still_inside` is NaN.
    """
    scale, cfg = scale_of(cfg), scaled(cfg)
    ext, uid, key = cfg.extensions, cfg.extensions.object_uid, cfg.extensions.target_pose_key

    def distance(sim: Simulation, state: TensorDict) -> Tensor:
        position = world.body_position(sim, state["world"], uid)[..., :2]
        return torch.linalg.vector_norm(position - target(state, key, "extensions.target_pose_key")[..., :2], dim=-1)

    def compute_task_state(sim: Simulation, state: TensorDict) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        d = distance(sim, state)
        fallen = world.body_position(sim, state["world"], uid)[..., 2] < FALLEN_HEIGHT * scale
        return d < ext.success_threshold, fallen, {"distance_to_goal": d}

    def acceptable(sim: Simulation, state: TensorDict) -> Tensor:
        return distance(sim, state) >= ext.start_distance

    env = task_env(cfg, compute_task_state, acceptable=acceptable, scale=scale)
    return _with_hold_check(env, distance, ext) if ext.hold_time else env
