"""The task CartPoleRL of EmbodiChain: hold a pole upright on a cart. The cart and the pole each have a drive."""

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
from ecrl.envs.mujoco.task_config import ActionConfig, ObservationConfig, RewardConfig, TaskConfig, parse_terms
from ecrl.envs.mujoco.terms.term import part_of
from ecrl.registry import register_env

_ACTIONS: Any = {"delta_qpos": {"func": "DeltaQposTerm", "params": {"scale": 0.1}}}
_OBSERVATIONS: Any = {"robot_qpos": {"func": "normalize_robot_joint_data", "mode": "modify", "name": "robot/qpos"}}
_REWARDS: Any = {
    "velocity_penalty": {"func": "joint_velocity_penalty", "weight": 0.005, "params": {"part_name": "hand"}}
}


class CartRobotConfig(RobotConfig):
    """Config of the robot, which is the built-in cart-pole by default."""

    uid: str = Field("Cart", min_length=1, description="name of the robot")
    robot_type: str = Field("CartPole", description="built-in or registered robot; not used if model is set")
    init_pos: Triple = Field((0.0, 0.0, 0.5), description="position of the robot's base, m")
    init_qpos: tuple[Real, ...] | None = Field(
        (-0.2, 0.07), strict=False, description="joint positions at the start: cart (m) and pole (rad)"
    )


class CartPoleExtensions(ConfigModel):
    """Settings of the success condition: the largest angle and velocity of the pole."""

    angle_threshold: Positive = Field(0.02, description="pole angle, rad, below which an episode can end in success")
    velocity_threshold: Positive = Field(
        0.05, description="angular velocity of the pole, rad/s, below which an episode can end in success"
    )


class CartPoleRLConfig(TaskConfig):
    """Config of CartPoleRL. The default settings of the robot and the terms are the same as in EmbodiChain's config."""

    robot: CartRobotConfig | None = Field(CartRobotConfig.model_construct(), description="the cart-pole")
    max_episode_steps: int = Field(500, ge=1, lt=2**31, description="time limit, steps")
    actions: dict[str, ActionConfig] = Field(
        default_factory=partial(parse_terms, ActionConfig, _ACTIONS),
        description="action terms by name; by default 0.1 * action is added to joint positions, in m for the cart and "
        "in rad for the pole",
    )
    observations: dict[str, ObservationConfig] = Field(
        default_factory=partial(parse_terms, ObservationConfig, _OBSERVATIONS),
        description="observation terms by name; by default joint positions are scaled to [0, 1]",
    )
    rewards: dict[str, RewardConfig] = Field(
        default_factory=partial(parse_terms, RewardConfig, _REWARDS),
        description="reward terms by name, added to the task's own reward; by default a velocity penalty",
    )
    extensions: CartPoleExtensions = Field(CartPoleExtensions.model_construct(), description="conditions of success")


@register_env("CartPoleRL")
def cart_pole(cfg: CartPoleRLConfig) -> Env:
    """Hold a pole upright on a cart. The joint between the cart and the pole has a weak drive.

        reward = 1 - |angle| / pi + the reward terms;    failure: |angle| > pi / 2
        success: at the time limit, |angle| < angle_threshold and |angular velocity| < velocity_threshold

    The metric `pole_angle` is |angle| in rad. All episodes start in the same state, unless events change the initial
    state. Success does not terminate the episode. The time limit truncates the episode, so the return is bootstrapped
    from the value of the last state.
    """

    def pole(sim: Simulation, state: TensorDict) -> tuple[Tensor, Tensor]:
        joint = part_of(sim, "hand", "robot.control_parts")
        angle = world.joint_positions(sim, state["world"], joint)[..., 0].abs()
        velocity = world.joint_velocities(sim, state["world"], joint)[..., 0].abs()
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
