"""Random events that move the robot, change its velocities, push it, or delay its controls."""

from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Count, Natural, Positive
from ecrl.envs.events import Apply
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation, start
from ecrl.envs.mujoco.robots import kinematics
from ecrl.envs.mujoco.robots.inverse_kinematics import inverse_kinematics
from ecrl.envs.mujoco.scene.models import id_of
from ecrl.envs.mujoco.terms.ranges import (
    Box,
    PoseRangeConfig,
    Rows,
    ScenePoseConfig,
    draw,
    draw_scene_pose,
    numbers,
    pose_of,
    quaternion_of_angles,
)
from ecrl.envs.mujoco.terms.term import EntityConfig, JointsConfig, joints_of, part_of, tcp_of
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean, register_event


class RobotJointsConfig(JointsConfig):
    """Settings that select joints of the robot. As in EmbodiChain, `entity_cfg` may name the robot."""

    entity_cfg: EntityConfig | None = Field(None, description="the robot; an alternative to robot_uid")


def _robot_joints(cfg: RobotJointsConfig, sim: Simulation) -> tuple[str, ...]:
    """Return the joints that an event selects.

    Raises: ConfigError if `entity_cfg` is given, but the scene has no robot of the name in `entity_cfg`.
    """
    joints = joints_of(cfg, sim)
    if cfg.entity_cfg is not None and not joints[0].startswith(f"{cfg.entity_cfg.uid}/"):
        raise ConfigError(f"params.entity_cfg.uid: no robot {cfg.entity_cfg.uid!r}; known joints: {', '.join(joints)}")
    return joints


def _check_counts(bounds: tuple[Any, Any], joints: tuple[str, ...], key: str) -> None:
    for bound in map(numbers, bounds):
        if len(bound) not in (1, len(joints)):
            fault = f"{len(bound)} values for {len(joints)} joints: {', '.join(joints)}"
            raise ConfigError(f"params.{key}: {fault}; give one value, or one value per joint")


class RandomizeRobotQposConfig(RobotJointsConfig):
    """Settings of `randomize_robot_qpos`: joints of the robot, and the range of the draw.

    The draw is added to the current positions of the joints, or replaces these positions.
    """

    qpos_range: Rows = Field(description="[lowest, highest], rad or m: one value for all joints, or one per joint")
    relative_qpos: bool = Field(True, description="add the draw to the current positions")


@register_event("randomize_robot_qpos")
def randomize_robot_qpos(cfg: RandomizeRobotQposConfig, sim: Simulation) -> Apply:
    """Move joints of the robot to random positions, and set the velocities of the joints to 0.

        q' = clamp(q + draw, limits),  or clamp(draw, limits) if relative_qpos is false;    rad or m

    The event does not change the targets of the drives. The next action sets new targets for all joints that the action
    drives. The position drives of all other joints move these joints back to their home positions. Joints without a
    position drive do not return.
    """
    joints = _robot_joints(cfg, sim)
    _check_counts(cfg.qpos_range, joints, "qpos_range")
    low, high = world.joint_limits(sim, joints)

    def apply(state: Any, keys: Tensor) -> Any:
        q = draw(keys, cfg.qpos_range, len(joints))
        q = q + world.joint_positions(sim, state["world"], joints) if cfg.relative_qpos else q
        q = q.clamp(q.new_tensor(low), q.new_tensor(high))
        worlds = world.with_joint_positions(sim, state["world"], joints, q)
        return state.copy().set("world", world.with_joint_velocities(sim, worlds, joints, torch.zeros_like(q)))

    return apply


class RandomizeRobotQvelConfig(RobotJointsConfig):
    """Settings of `randomize_robot_qvel`: joints of the robot, and the range of the draw.

    The draw is added to the current velocities of the joints, or replaces these velocities.
    """

    qvel_range: Rows = Field(description="[lowest, highest], rad/s or m/s: one value for all joints, or one per joint")
    relative_qvel: bool = Field(True, description="add the draw to the current velocities")


@register_event("randomize_robot_qvel")
def randomize_robot_qvel(cfg: RandomizeRobotQvelConfig, sim: Simulation) -> Apply:
    """Change the velocities of joints of the robot at random, as a collision does.

    dq/dt' = dq/dt + draw,  or draw if relative_qvel is false;    rad/s or m/s
    """
    joints = _robot_joints(cfg, sim)
    _check_counts(cfg.qvel_range, joints, "qvel_range")

    def apply(state: Any, keys: Tensor) -> Any:
        velocities = draw(keys, cfg.qvel_range, len(joints))
        if cfg.relative_qvel:
            velocities = velocities + world.joint_velocities(sim, state["world"], joints)
        return state.copy().set("world", world.with_joint_velocities(sim, state["world"], joints, velocities))

    return apply


class RobotPartsConfig(ConfigModel):
    """Config that names a robot and parts of the robot."""

    uid: str = Field(min_length=1, description="name of the robot")
    control_parts: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = Field(
        ("arm",), description="parts of the robot, each with an end effector"
    )


class RandomizeEefPoseConfig(PoseRangeConfig):
    """Settings of `randomize_robot_eef_pose`: the robot, and the ranges of the random change of the pose."""

    entity_cfg: RobotPartsConfig = Field(description="the robot and its parts")
    iterations: Count = Field(15, le=1000, description="steps of the inverse kinematics")
    position_tolerance: Positive = Field(
        1e-3, description="largest position error, m; if the error is larger, the joints of the part do not move"
    )
    rotation_tolerance: Positive = Field(
        1e-2, description="largest rotation error, rad; if the error is larger, the joints of the part do not move"
    )


@register_event("randomize_robot_eef_pose")
def randomize_robot_eef_pose(cfg: RandomizeEefPoseConfig, sim: Simulation) -> Apply:
    """Change the poses of end effectors at random, with inverse kinematics.

        position' = position + draw, m        rotation' = rotation R(draw)

    `position` and `rotation` are the current pose in the world frame. `R(a) = Rx Ry Rz` is the rotation by the three
    angles a in degrees, about the axes of the end effector. Without `position_range`, the position does not change.
    Without `rotation_range`, the rotation does not change. If the remaining error is larger than `position_tolerance`
    or `rotation_tolerance`, the joints of the part do not move. In all cases, the velocities of the joints of the part
    become 0.

    The event does not change the targets of the drives; see `randomize_robot_qpos`.
    """
    uid, rows = cfg.entity_cfg.uid, []
    for part in cfg.entity_cfg.control_parts:
        joints = part_of(sim, part, "params.entity_cfg.control_parts")
        if not joints[0].startswith(f"{uid}/"):
            raise ConfigError(f"params.entity_cfg.uid: no robot {uid!r}; known joints: {', '.join(joints)}")
        rows.append((tcp_of(sim, part, "params.entity_cfg.control_parts"), joints))

    def moved(worlds: Any, keys: Tensor, site: str, joints: tuple[str, ...]) -> Any:
        pose = world.site_pose(sim, worlds, site)
        if cfg.rotation_range is not None:
            quaternion = quaternion_of_angles(draw(rng.fold_in(keys, 1), cfg.rotation_range, 3))
            rotation = kinematics.pose(None, quaternion)
        else:
            rotation = torch.eye(4, device=pose.device).expand(pose.shape)
        new = pose @ rotation
        if cfg.position_range is not None:
            offset = draw(keys, cfg.position_range, 3)
            last = torch.cat((offset, torch.zeros_like(offset[..., :1])), -1).unsqueeze(-1)
            new = new + torch.cat((torch.zeros_like(new[..., :3]), last), -1)
        found = inverse_kinematics(sim, worlds, site, joints, new, iterations=cfg.iterations)
        failed = (found.distance > cfg.position_tolerance) | (found.angle > cfg.rotation_tolerance)
        current = world.joint_positions(sim, worlds, joints)
        positions = torch.where(failed.unsqueeze(-1), current, found.positions)
        worlds = world.with_joint_positions(sim, worlds, joints, positions)
        return world.with_joint_velocities(sim, worlds, joints, torch.zeros_like(positions))

    def apply(state: Any, keys: Tensor) -> Any:
        worlds = state["world"]
        for i, (site, joints) in enumerate(rows):
            worlds = moved(worlds, rng.fold_in(keys, 2 + i), site, joints)
        return state.copy().set("world", worlds)

    return apply


class RandomizeRootPoseConfig(ScenePoseConfig):
    """Settings of `randomize_articulation_root_pose`: the robot, and the ranges of the random pose of its base."""

    entity_cfg: EntityConfig = Field(description="the robot")

    @property
    def moved_bases(self) -> tuple[str, ...]:
        """Names of the robots whose bases the event moves."""
        return (self.entity_cfg.uid,)


@register_event("randomize_articulation_root_pose")
def randomize_articulation_root_pose(cfg: RandomizeRootPoseConfig, sim: Simulation) -> Apply:
    """Move the base of the robot to a random pose, and set the velocities of all joints of the robot to 0.

        position' = home + draw,  or draw if relative_position is false
        rotation' = R(draw),  or home R(draw) if relative_rotation is true

    `home` is the pose of the base in the scene config, with the position in m. `R(a) = Rx Ry Rz` is the rotation by the
    three angles a in degrees. Without `position_range`, the position does not change. Without `rotation_range`, the
    rotation does not change. Between two events, the base is fixed.
    """
    uid = cfg.entity_cfg.uid
    robots = {name.split("/")[0] for name in sim.robot.joints if "/" in name}
    if uid not in robots:
        raise ConfigError(f"params.entity_cfg.uid: no robot {uid!r}; {did_you_mean(uid, robots)}")
    if int(sim.model.body_mocapid[id_of(sim.model, "body", uid)]) < 0:
        raise ConfigError(f"the base of {uid!r} is fixed in this task; put the event under env.cfg.events")
    home = pose_of(world.body_pose(sim, start(sim, ()), uid))

    def apply(state: Any, keys: Tensor) -> Any:
        worlds = world.with_body_pose(sim, state["world"], uid, *draw_scene_pose(cfg, keys, home))
        return state.copy().set("world", world.with_robot_at_rest(sim, worlds, uid))

    return apply


class PushRobotConfig(ConfigModel):
    """Settings of `push_robot`: a part of the robot, and the range of the random force."""

    part_name: str = Field("arm", description="part of the robot that has the end effector")
    force_range: Box = Field(description="[lowest, highest] force along x y z of the world, N")


@register_event("push_robot")
def push_robot(cfg: PushRobotConfig, sim: Simulation) -> Apply:
    """Apply a random force to an end effector of the robot during the next step.

        force' = force + J^T draw

    `force` contains the forces along the degrees of freedom (N or N m), which are constant during the step. `draw` is
    the random force (N), and J is the Jacobian of the end effector's position.
    """
    site = tcp_of(sim, cfg.part_name)

    def apply(state: Any, keys: Tensor) -> Any:
        force = world.push_site(sim, state["world"], site, draw(keys, cfg.force_range, 3))
        return state.copy().set("force", state["force"] + force)

    return apply


def _increasing(span: tuple[int, int]) -> tuple[int, int]:
    if span[0] > span[1]:
        raise ValueError(f"lowest {span[0]} is above highest {span[1]}; give the lowest value first")
    return span


class RandomizeDelayConfig(ConfigModel):
    """Settings of `randomize_action_delay`: the range of the random delay."""

    delay_range: Annotated[
        tuple[Annotated[Natural, Field(le=1000)], Annotated[Natural, Field(le=1000)]],
        Field(strict=False),
        AfterValidator(_increasing),
    ] = Field(description="[lowest, highest] delay of the actions, steps of the environment")

    @model_validator(mode="after")
    def _delays(self) -> "RandomizeDelayConfig":
        if self.delay_range[1] == 0:
            raise ValueError("delay_range: the longest delay is 0, which delays nothing; give at least 1 step")
        return self

    @property
    def longest_delay(self) -> int:
        """The longest delay, in steps of the environment."""
        return self.delay_range[1]


@register_event("randomize_action_delay")
def randomize_action_delay(cfg: RandomizeDelayConfig, sim: Simulation) -> Apply:
    """Delay the effect of actions by a random number of steps of the environment.

        applied[t] = control[t - d],    d = low + floor((high - low + 1) u) steps,    u uniform in [0, 1)

    `control[t]` follows from the action and the state of step t. `applied[t]` is the control that the drives receive in
    step t. In the first d steps of an episode, the position drives hold the joints at their initial positions. Rewards
    and observations still use the policy's undelayed action.
    """
    low, high = cfg.delay_range

    def apply(state: Any, keys: Tensor) -> Any:
        if "delay" not in state or (longest := state["delay", "controls"].shape[-2]) < high:
            room = 0 if "delay" not in state else longest
            fault = f"the task keeps the controls of {room} steps, but the longest delay is {high} steps"
            raise ConfigError(f"params.delay_range: {fault}; put the event under env.cfg.events")
        steps = low + ((high - low + 1) * rng.uniform(keys)).long()
        return state.copy().set("delay", state["delay"].copy().set("steps", steps))

    return apply
