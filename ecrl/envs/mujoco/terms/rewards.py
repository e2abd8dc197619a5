"""Reward terms, which are functions of the states before and after a step.

A reward term has no memory of earlier steps. Distances are Euclidean and in m. The gradient of a distance is 0 where
the distance is 0. The task multiplies the value of each reward term by the term's weight.
"""

from math import isinf
from typing import Annotated

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel, Fraction, NonNegative, Positive
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.scene.config import Real
from ecrl.envs.mujoco.terms.term import EntityConfig, JointsConfig, Reward, joints_of, object_of, target, tcp_of
from ecrl.envs.scaling import LENGTH, PER_LENGTH
from ecrl.errors import ConfigError
from ecrl.registry import register_reward


class NothingConfig(ConfigModel):
    """Config of a term that has no settings."""


class ObjectsConfig(ConfigModel):
    """Settings of a term that compares two objects."""

    source_entity_cfg: EntityConfig = Field(description="the first object")
    target_entity_cfg: EntityConfig = Field(description="the second object")


class DistanceBetweenObjectsConfig(ObjectsConfig):
    """Settings of `distance_between_objects`: two objects, and the shape of the reward."""

    exponential: bool = Field(
        False, description="reward exp(-d^2 / (2 sigma^2)) instead of -d, where d is the distance in m"
    )
    sigma: Annotated[float, LENGTH] = Field(1.0, ge=1e-6, le=1e6, description="width of the exponential, m")


class TargetConfig(ConfigModel):
    """Settings of a term that compares an object with its target."""

    source_entity_cfg: EntityConfig = Field(description="the object")
    target_pose_key: str = Field("target_pose", min_length=1, description="store_key of the event that sets the target")
    use_xy_only: bool = Field(False, description="use only the horizontal distance")


class DistanceToTargetConfig(TargetConfig):
    """Settings of `distance_to_target`: an object, its target, and the shape of the reward."""

    exponential: bool = Field(
        False, description="reward exp(-d^2 / (2 sigma^2)) instead of -d, where d is the distance in m"
    )
    sigma: Annotated[float, LENGTH] = Field(1.0, ge=1e-6, le=1e6, description="width of the exponential, m")


class IncrementalDistanceConfig(TargetConfig):
    """Settings of `incremental_distance_to_target`: an object, its target, and weights for changes in distance."""

    tanh_scale: Annotated[Positive, PER_LENGTH] = Field(10.0, description="factor k of the change in distance, 1/m")
    positive_weight: Real = Field(1.0, description="weight of steps that reduce the distance")
    negative_weight: Real = Field(1.0, description="weight of steps that increase the distance")


class JointLimitConfig(JointsConfig):
    """Settings of `joint_limit_penalty`: the joints, and the margin to the joint limits."""

    margin: Fraction = Field(
        0.1, description="the penalty begins at this distance to a limit, as a fraction of the range"
    )


class ReachingBehindConfig(ConfigModel):
    """Settings of `reaching_behind_object`: an object, its target, and the point where the end effector pushes."""

    object_cfg: EntityConfig = Field(description="the object to push")
    target_pose_key: str = Field("goal_pose", min_length=1, description="store_key of the event that sets the target")
    behind_offset: Annotated[NonNegative, LENGTH] = Field(
        0.015, description="horizontal distance from the object's centre to the point behind the object, m"
    )
    height_offset: Annotated[Real, LENGTH] = Field(
        0.015, description="height of the point above the object's centre, m"
    )
    distance_scale: Annotated[Positive, PER_LENGTH] = Field(
        5.0, description="factor k of the distance to the point, 1/m"
    )
    part_name: str = Field("arm", description="part of the robot that has the end effector")


def _closeness(offset: Tensor, exponential: bool, sigma: float) -> Tensor:
    """Return -d, or exp(-d^2 / (2 sigma^2)) if `exponential` is True, where d is the length of `offset`.

    The offset is `[*B, n]`.

    >>> _closeness(torch.tensor([3.0, 4.0]), False, 1.0), _closeness(torch.tensor([3.0, 4.0]), True, 5.0)
    (tensor(-5.), tensor(0.6065))
    """
    if exponential:
        return torch.exp(-0.5 * (offset / sigma).square().sum(-1))
    return -torch.linalg.vector_norm(offset, dim=-1)


def _position(sim: Simulation, state: TensorDict, body: str) -> Tensor:
    return world.body_position(sim, state["world"], body)


def _to_target(cfg: TargetConfig, sim: Simulation, state: TensorDict) -> Tensor:
    """Return the vector from the object to its target, `[*B, 3]`, or `[*B, 2]` if `use_xy_only` is set."""
    offset = target(state, cfg.target_pose_key) - _position(sim, state, cfg.source_entity_cfg.uid)
    return offset[..., :2] if cfg.use_xy_only else offset


@register_reward("distance_between_objects")
def distance_between_objects(cfg: DistanceBetweenObjectsConfig, sim: Simulation) -> Reward:
    """Return a reward `[*B]` that grows as the centres of two objects get closer, measured after the step.

    reward = -d,  or exp(-d^2 / (2 sigma^2)) if exponential is true;  d = |source - target|, m
    """
    source = object_of(sim, cfg.source_entity_cfg, "source_entity_cfg")
    other = object_of(sim, cfg.target_entity_cfg, "target_entity_cfg")

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        offset = _position(sim, after, other) - _position(sim, after, source)
        return _closeness(offset, cfg.exponential, cfg.sigma)

    return reward


@register_reward("distance_to_target")
def distance_to_target(cfg: DistanceToTargetConfig, sim: Simulation) -> Reward:
    """Return a reward `[*B]` that grows as the centre of an object nears its target, measured after the step.

        reward = -d,  or exp(-d^2 / (2 sigma^2)) if exponential is true;  d = |source - target|, m

    If `use_xy_only` is set, d is the horizontal distance.
    """
    object_of(sim, cfg.source_entity_cfg, "source_entity_cfg")
    return lambda before, after: _closeness(_to_target(cfg, sim, after), cfg.exponential, cfg.sigma)


@register_reward("incremental_distance_to_target")
def incremental_distance_to_target(cfg: IncrementalDistanceConfig, sim: Simulation) -> Reward:
    """Return a reward `[*B]` for a step that moves an object closer to its target.

        reward = w tanh(k (d_before - d_after)),  w = positive_weight if d decreased, else negative_weight

    The distance d is in m, and k is tanh_scale in 1/m. The distances d_before and d_after belong to the same step, so
    no distance carries over to the next episode.
    """
    object_of(sim, cfg.source_entity_cfg, "source_entity_cfg")

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        old, new = (torch.linalg.vector_norm(_to_target(cfg, sim, state), dim=-1) for state in (before, after))
        progress = torch.tanh(cfg.tanh_scale * (old - new))
        return torch.where(progress >= 0.0, cfg.positive_weight * progress, cfg.negative_weight * progress)

    return reward


@register_reward("joint_velocity_penalty")
def joint_velocity_penalty(cfg: JointsConfig, sim: Simulation) -> Reward:
    """Return the reward -|dq/dt| `[*B]`, which penalises the speed of joints (rad/s or m/s) after the step."""
    joints = joints_of(cfg, sim)

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        return -torch.linalg.vector_norm(world.joint_velocities(sim, after["world"], joints), dim=-1)

    return reward


@register_reward("joint_limit_penalty")
def joint_limit_penalty(cfg: JointLimitConfig, sim: Simulation) -> Reward:
    """Return a reward `[*B]` that penalises joints that are close to their limits after the step.

        reward = -sum_j max(0, margin - min(t[j], 1 - t[j])),  t[j] = (q[j] - low[j]) / (high[j] - low[j])

    The penalty is measured in fractions of the joint ranges. Joints without limits are not penalised.

    Raises: ConfigError if none of the joints has limits.
    """
    chosen = joints_of(cfg, sim)
    limited = [row for row in zip(chosen, *world.joint_limits(sim, chosen), strict=True) if not isinf(row[2])]
    if not limited:
        raise ConfigError(f"params: none of these joints has limits: {', '.join(chosen)}; choose others")
    joints, low, high = zip(*limited, strict=True)

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        q = world.joint_positions(sim, after["world"], joints)
        fraction = (q - q.new_tensor(low)) / (q.new_tensor(high) - q.new_tensor(low))
        return -(cfg.margin - torch.minimum(fraction, 1.0 - fraction)).clamp(min=0.0).sum(-1)

    return reward


@register_reward("action_smoothness_penalty")
def action_smoothness_penalty(cfg: NothingConfig, sim: Simulation) -> Reward:
    """Penalise the change of the action between consecutive steps, `[*B]`, in the unit of the action.

    reward = -|action[t] - action[t - 1]|, 0 in the first step of an episode
    """

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        change = -torch.linalg.vector_norm(after["action"] - before["action"], dim=-1)
        return change.masked_fill(before["elapsed"] == 0, 0.0)

    return reward


@register_reward("orientation_alignment")
def orientation_alignment(cfg: ObjectsConfig, sim: Simulation) -> Reward:
    """Reward equal orientations of two objects after the step, `[*B]`, from -1 to 1.

    reward = (tr(R_source R_target^T) - 1) / 2 = cos(angle between them)
    """
    source = object_of(sim, cfg.source_entity_cfg, "source_entity_cfg")
    other = object_of(sim, cfg.target_entity_cfg, "target_entity_cfg")

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        r_source, r_target = (world.body_pose(sim, after["world"], body)[..., :3, :3] for body in (source, other))
        return 0.5 * ((r_source * r_target).sum((-2, -1)) - 1.0)

    return reward


def _push_point(position: Tensor, goal: Tensor, offset: float, height: float) -> Tensor:
    """Return the point where the end effector should push an object, `[*B, 3]`.

    As seen from the goal, the point is `offset` metres behind the object and `height` metres above the object's centre.

    >>> _push_point(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 7.0, 9.0]), 0.5, 0.25)
    tensor([1.0000, 1.5000, 3.2500])
    """
    to_goal = (goal - position)[..., :2]
    length = torch.linalg.vector_norm(to_goal, dim=-1, keepdim=True)
    # at the goal, the direction is undefined, so the offset is 0
    back = -offset * to_goal / torch.where(length > 0.0, length, 1.0)
    return position + torch.cat((back, torch.full_like(length, height)), -1)


@register_reward("reaching_behind_object")
def reaching_behind_object(cfg: ReachingBehindConfig, sim: Simulation) -> Reward:
    """Return a reward `[*B]`, 0 to 1, that grows as the end effector nears a point behind an object.

        reward = 1 - tanh(k |eef - (object - behind_offset u + height_offset z)|)

    The horizontal unit vector u points from the object to its target. The vector u is 0 if the object is exactly above
    or below the target. The unit vector z points up. Lengths are in m, and k is distance_scale in 1/m. All positions
    are the positions after the step.
    """
    body, site = object_of(sim, cfg.object_cfg, "object_cfg"), tcp_of(sim, cfg.part_name)

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        position, goal = _position(sim, after, body), target(after, cfg.target_pose_key)
        push_point = _push_point(position, goal, cfg.behind_offset, cfg.height_offset)
        offset = world.site_pose(sim, after["world"], site)[..., :3, 3] - push_point
        return 1.0 - torch.tanh(cfg.distance_scale * torch.linalg.vector_norm(offset, dim=-1))

    return reward


@register_reward("success_reward")
def success_reward(cfg: NothingConfig, sim: Simulation) -> Reward:
    """Return 1 for each environment whose step succeeds, and 0 for all others, `[*B]`."""
    return lambda before, after: after["success"].to(torch.float32)
