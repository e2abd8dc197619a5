"""A cart and a pole with a drive each: EmbodiChain's CartPoleRL."""

from dataclasses import replace
from functools import partial
from math import pi
from typing import Any

from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel, Positive
from ecrl.envs.core import Env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.make_task import task_env
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.scene.config import Real, RobotConfig, Triple
from ecrl.envs.mujoco.task_config import ActionConfig, ObservationConfig, RewardConfig, TaskConfig, parsed
from ecrl.envs.mujoco.terms.term import part_of
from ecrl.registry import register_env

_ACTIONS: Any = {"delta_qpos": {"func": "DeltaQposTerm", "params": {"scale": 0.1}}}
_OBSERVATIONS: Any = {"robot_qpos": {"func": "normalize_robot_joint_data", "mode": "modify", "name": "robot/qpos"}}
_REWARDS: Any = {
    "velocity_penalty": {"func": "joint_velocity_penalty", "weight": 0.005, "params": {"part_name": "hand"}}
}


class CartRobotConfig(RobotConfig):
    """The robot: the built-in cart-pole unless something else is said."""

    uid: str = Field("Cart", min_length=1, description="its name")
    robot_type: str = Field("CartPole", description="a built-in robot; not used with mjcf")
    init_pos: Triple = Field((0.0, 0.0, 0.5), description="where its base stands, m")
    init_qpos: tuple[Real, ...] | None = Field((-0.2, 0.07), strict=False, description="joint positions at the start")


class CartPoleExtensions(ConfigModel):
    """What the task is."""

    angle_threshold: Positive = Field(0.02, description="of the pole at the end: success below this, rad")
    velocity_threshold: Positive = Field(0.05, description="of the pole at the end: success below this, rad/s")


class CartPoleRLConfig(TaskConfig):
    """Scene and terms of EmbodiChain's config; each may be changed."""

    robot: CartRobotConfig | None = Field(CartRobotConfig.model_construct(), description="the cart-pole")
    max_episode_steps: int = Field(500, ge=1, lt=2**31, description="time limit, steps")
    actions: dict[str, ActionConfig] = Field(
        default_factory=partial(parsed, ActionConfig, _ACTIONS), description="joint positions, changed by 0.1 a"
    )
    observations: dict[str, ObservationConfig] = Field(
        default_factory=partial(parsed, ObservationConfig, _OBSERVATIONS), description="joint positions in [0, 1]"
    )
    rewards: dict[str, RewardConfig] = Field(
        default_factory=partial(parsed, RewardConfig, _REWARDS), description="beside the task's own: velocity"
    )
    extensions: CartPoleExtensions = Field(CartPoleExtensions.model_construct(), description="what the task is")


@register_env("CartPoleRL")
def cart_pole(cfg: CartPoleRLConfig) -> Env:
    """Hold a pole upright whose joint has a weak drive of its own.

        reward = 1 - |angle| / pi + the terms;    failure: |angle| > pi / 2
        success: at the time limit, |angle| < angle_threshold and |angular velocity| < velocity_threshold

    The metric `pole_angle` is |angle|, rad. All episodes start alike, unless events say otherwise. It is the time limit
    that ends an episode, not the success: what would follow is worth as much as for a pole that is not at rest.
    """

    def pole(sim: Simulation, state: TensorDict) -> tuple[Tensor, Tensor]:
        joint = part_of(sim, "hand")
        read = world.joint_positions, world.joint_velocities
        angle, velocity = (of(sim, state["world"], joint)[..., 0].abs() for of in read)
        return angle, velocity

    def compute_task_state(sim: Simulation, state: TensorDict) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        angle, velocity = pole(sim, state)
        at_rest = (angle < cfg.extensions.angle_threshold) & (velocity < cfg.extensions.velocity_threshold)
        last = state["elapsed"] >= cfg.max_episode_steps
        return at_rest & last, angle > pi / 2, {"pole_angle": angle}

    def get_reward(sim: Simulation, before: TensorDict, after: TensorDict) -> Tensor:
        return 1.0 - pole(sim, after)[0] / pi

    env = task_env(cfg, compute_task_state, get_reward=get_reward)

    def step(state: TensorDict, action: Tensor, noise: Tensor) -> TensorDict:
        after = env.step(state, action, noise)
        return after.copy().set("terminated", after["info", "fail"].clone())

    return replace(env, step=step)
