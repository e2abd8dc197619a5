"""Terms of the reward: each a function of the whole state before and after a step, which is all the memory it has.

A distance is a Euclidean one, m; where it is 0 its value and gradient are 0, and finite. Weights are the task's.
"""

from math import isinf

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel, Fraction, NonNegative, Positive
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.scene.config import Real
from ecrl.envs.mujoco.terms.term import EntityConfig, JointsConfig, Reward, joints_of, object_of, target, tcp_of
from ecrl.errors import ConfigError
from ecrl.registry import register_reward


class NothingConfig(ConfigModel):
    """No settings."""


class ObjectsConfig(ConfigModel):
    """Two objects."""

    source_entity_cfg: EntityConfig = Field(description="the object that is rewarded")
    target_entity_cfg: EntityConfig = Field(description="the object that it is compared with")


class DistanceBetweenObjectsConfig(ObjectsConfig):
    """Two objects and how their distance counts."""

    exponential: bool = Field(False, description="exp(-d^2 / (2 sigma^2)) instead of -d")
    sigma: float = Field(1.0, ge=1e-6, le=1e6, description="width of the exponential, m")


class TargetConfig(ConfigModel):
    """An object and its target."""

    source_entity_cfg: EntityConfig = Field(description="the object that is rewarded")
    target_pose_key: str = Field("target_pose", min_length=1, description="the store_key of the event that sets it")
    use_xy_only: bool = Field(False, description="the horizontal distance alone")


class DistanceToTargetConfig(TargetConfig):
    """An object, its target and how their distance counts."""

    exponential: bool = Field(False, description="exp(-d^2 / (2 sigma^2)) instead of -d")
    sigma: float = Field(1.0, ge=1e-6, le=1e6, description="width of the exponential, m")


class IncrementalDistanceConfig(TargetConfig):
    """An object, its target and how progress counts."""

    tanh_scale: Positive = Field(10.0, description="k, 1/m")
    positive_weight: Real = Field(1.0, description="what progress counts")
    negative_weight: Real = Field(1.0, description="what regress counts")


class JointLimitConfig(JointsConfig):
    """Which joints, and what is near."""

    margin: Fraction = Field(0.1, description="how near to a limit a penalty begins, as a share of the joint's range")


class ReachingBehindConfig(ConfigModel):
    """An object, where it is to go, and from where the end effector pushes."""

    object_cfg: EntityConfig = Field(description="the object to be pushed")
    target_pose_key: str = Field("goal_pose", min_length=1, description="the store_key of the event that sets it")
    behind_offset: NonNegative = Field(0.015, description="how far behind the centre of the object, m")
    height_offset: Real = Field(0.015, description="how far above the centre of the object, m")
    distance_scale: Positive = Field(5.0, description="k, 1/m")
    part_name: str = Field("arm", description="the part of the robot whose end effector it is")


def _closeness(offset: Tensor, exponential: bool, sigma: float) -> Tensor:
    """-d, or exp(-d^2 / (2 sigma^2)), of offsets `[*B, n]`.

    >>> _closeness(torch.tensor([3.0, 4.0]), False, 1.0), _closeness(torch.tensor([3.0, 4.0]), True, 5.0)
    (tensor(-5.), tensor(0.6065))
    """
    if exponential:
        return torch.exp(-0.5 * (offset / sigma).square().sum(-1))
    return -torch.linalg.vector_norm(offset, dim=-1)


def _position(sim: Simulation, state: TensorDict, body: str) -> Tensor:
    return world.body_position(sim, state["world"], body)


def _to_target(cfg: TargetConfig, sim: Simulation, state: TensorDict) -> Tensor:
    """From the object to its target, `[*B, 3]`, or `[*B, 2]` if only x and y count."""
    offset = target(state, cfg.target_pose_key) - _position(sim, state, cfg.source_entity_cfg.uid)
    return offset[..., :2] if cfg.use_xy_only else offset


@register_reward("distance_between_objects")
def distance_between_objects(cfg: DistanceBetweenObjectsConfig, sim: Simulation) -> Reward:
    """How near the centres of two objects are after the step, `[*B]`: -d in m, or a share of 1.

    -d  or  exp(-d^2 / (2 sigma^2)),  d = |source - target|
    """
    source = object_of(sim, cfg.source_entity_cfg, "source_entity_cfg")
    other = object_of(sim, cfg.target_entity_cfg, "target_entity_cfg")

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        offset = _position(sim, after, other) - _position(sim, after, source)
        return _closeness(offset, cfg.exponential, cfg.sigma)

    return reward


@register_reward("distance_to_target")
def distance_to_target(cfg: DistanceToTargetConfig, sim: Simulation) -> Reward:
    """How near the centre of an object is to a target after the step, `[*B]`: -d in m, or a share of 1.

    -d  or  exp(-d^2 / (2 sigma^2)),  d = |source - target|, of x and y alone if use_xy_only
    """
    object_of(sim, cfg.source_entity_cfg, "source_entity_cfg")
    return lambda before, after: _closeness(_to_target(cfg, sim, after), cfg.exponential, cfg.sigma)


@register_reward("incremental_distance_to_target")
def incremental_distance_to_target(cfg: IncrementalDistanceConfig, sim: Simulation) -> Reward:
    """How much nearer to a target the step brought an object, `[*B]`.

        w tanh(k (d_before - d_after)),  w = positive_weight if it came nearer, else negative_weight;  k in 1/m, d in m

    Both distances are of one step, so nothing is left of an episode in the next.
    """
    object_of(sim, cfg.source_entity_cfg, "source_entity_cfg")

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        old, new = (torch.linalg.vector_norm(_to_target(cfg, sim, state), dim=-1) for state in (before, after))
        progress = torch.tanh(cfg.tanh_scale * (old - new))
        return torch.where(progress >= 0.0, cfg.positive_weight * progress, cfg.negative_weight * progress)

    return reward


@register_reward("joint_velocity_penalty")
def joint_velocity_penalty(cfg: JointsConfig, sim: Simulation) -> Reward:
    """How fast joints move after the step, `[*B]`, rad/s or m/s: -|dq/dt|."""
    joints = joints_of(cfg, sim)

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        return -torch.linalg.vector_norm(world.joint_velocities(sim, after["world"], joints), dim=-1)

    return reward


@register_reward("joint_limit_penalty")
def joint_limit_penalty(cfg: JointLimitConfig, sim: Simulation) -> Reward:
    """How near joints are to their limits after the step, `[*B]`, in shares of their ranges.

        -sum_j max(0, margin - min(t[j], 1 - t[j])),  t[j] = (q[j] - low[j]) / (high[j] - low[j])

    A joint without limits counts nothing. Raises: ConfigError where none has any.
    """
    chosen = joints_of(cfg, sim)
    limited = [row for row in zip(chosen, *world.joint_limits(sim, chosen), strict=True) if not isinf(row[2])]
    if not limited:
        raise ConfigError(f"params: none of these joints has limits: {', '.join(chosen)}")
    joints, low, high = zip(*limited, strict=True)

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        q = world.joint_positions(sim, after["world"], joints)
        share = (q - q.new_tensor(low)) / (q.new_tensor(high) - q.new_tensor(low))
        return -(cfg.margin - torch.minimum(share, 1.0 - share)).clamp(min=0.0).sum(-1)

    return reward


@register_reward("action_smoothness_penalty")
def action_smoothness_penalty(cfg: NothingConfig, sim: Simulation) -> Reward:
    """How much the policy's action changed, `[*B]`, in its own units.

    -|action[t] - action[t - 1]|, 0 in the first step of an episode
    """

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        change = -torch.linalg.vector_norm(after["action"] - before["action"], dim=-1)
        return change.masked_fill(before["elapsed"] == 0, 0.0)

    return reward


@register_reward("orientation_alignment")
def orientation_alignment(cfg: ObjectsConfig, sim: Simulation) -> Reward:
    """How alike two objects are turned after the step, `[*B]`, from -1 to 1.

    (tr(R_source R_target^T) - 1) / 2 = cos(angle between them)
    """
    source = object_of(sim, cfg.source_entity_cfg, "source_entity_cfg")
    other = object_of(sim, cfg.target_entity_cfg, "target_entity_cfg")

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        one, two = (world.body_pose(sim, after["world"], body)[..., :3, :3] for body in (source, other))
        return 0.5 * ((one * two).sum((-2, -1)) - 1.0)

    return reward


def _behind(thing: Tensor, goal: Tensor, offset: float, height: float) -> Tensor:
    """Where to push a thing from: `offset` behind it, seen from the goal, and `height` above it, all `[*B, 3]`.

    >>> _behind(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 7.0, 9.0]), 0.5, 0.25)
    tensor([1.0000, 1.5000, 3.2500])
    """
    way = (goal - thing)[..., :2]
    length = torch.linalg.vector_norm(way, dim=-1, keepdim=True)
    back = -offset * way / torch.where(length > 0.0, length, 1.0)  # at the goal itself: no direction
    return thing + torch.cat((back, torch.full_like(length, height)), -1)


@register_reward("reaching_behind_object")
def reaching_behind_object(cfg: ReachingBehindConfig, sim: Simulation) -> Reward:
    """How near the end effector is after the step to where it can push an object towards its target, `[*B]`, 0 to 1.

        1 - tanh(k |eef - (object - behind_offset u + height_offset z)|),  u = the horizontal direction to the target

    k in 1/m, lengths in m; u = 0 where the object is right above or below its target.
    """
    body, site = object_of(sim, cfg.object_cfg, "object_cfg"), tcp_of(sim, cfg.part_name)

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        thing, goal = _position(sim, after, body), target(after, cfg.target_pose_key)
        place = _behind(thing, goal, cfg.behind_offset, cfg.height_offset)
        away = world.site_pose(sim, after["world"], site)[..., :3, 3] - place
        return 1.0 - torch.tanh(cfg.distance_scale * torch.linalg.vector_norm(away, dim=-1))

    return reward


@register_reward("success_reward")
def success_reward(cfg: NothingConfig, sim: Simulation) -> Reward:
    """1 in the step that succeeds, else 0, `[*B]`."""
    return lambda before, after: after["success"].to(torch.float32)
