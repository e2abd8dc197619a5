"""Events of a scene: where objects, targets and the robot are, what objects weigh and how they slide, what pushes them.

Each is drawn anew whenever it happens, uniformly between two bounds:

    draw = low + (high - low) u,  u uniform in [0, 1) on the 2**-24 grid
"""

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from ecrl import rng
from ecrl.config.model import LIST, NUMBER, ConfigModel, NonNegative, by_kind
from ecrl.envs.events import Apply
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation, start
from ecrl.envs.mujoco.scene.config import Real, Triple
from ecrl.envs.mujoco.scene.models import id_of, mujoco, rows_of
from ecrl.envs.mujoco.terms.term import EntityConfig, JointsConfig, joints_of
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean, register_event


def _numbers(bound: Any) -> tuple[float, ...]:
    return bound if isinstance(bound, tuple) else (bound,)


def _ordered(bounds: Any) -> Any:
    low, high = (_numbers(bound) for bound in bounds)
    if len(low) != len(high) and 1 not in (len(low), len(high)):
        raise ValueError(f"{len(low)} lowest numbers, {len(high)} highest; give as many")
    many = max(len(low), len(high))
    for a, b in zip(low * (many // len(low)), high * (many // len(high)), strict=True):
        if a > b:
            raise ValueError(f"lowest {a} is above highest {b}")
    return bounds


_List = Annotated[tuple[Real, ...], Field(strict=False, min_length=1), LIST]
_Row = Annotated[Annotated[Real, NUMBER] | _List, by_kind("a number or a list of numbers")]
_Span = Annotated[tuple[Real, Real], Field(strict=False), AfterValidator(_ordered)]
_Box = Annotated[tuple[Triple, Triple], Field(strict=False), AfterValidator(_ordered)]
_Rows = Annotated[tuple[_Row, _Row], Field(strict=False), AfterValidator(_ordered)]
_Frictions = Annotated[tuple[NonNegative, NonNegative], Field(strict=False), AfterValidator(_ordered)]


def _drawn(keys: Tensor, bounds: tuple[Any, Any], many: int) -> Tensor:
    """Uniform between two bounds, each one number or `many`: `[*B, many]` float32."""
    u = rng.uniform(keys, (many,))
    low, high = (u.new_tensor(_numbers(bound)) for bound in bounds)
    return low + (high - low) * u


def _found(told: str, look: Callable[[], Any]) -> Any:
    """What `look` finds in the scene; a ConfigError of it begins with the parameter that named what is not there."""
    try:
        return look()
    except ConfigError as error:
        raise ConfigError(f"params.{told}: {error}") from None


def _times(a: Tensor, b: Tensor) -> Tensor:
    """Product of quaternions w x y z, the turn `b` and then the turn `a`: `[*B, 4]`."""
    (aw, av), (bw, bv) = (q.split((1, 3), -1) for q in (a, b))
    real = aw * bw - (av * bv).sum(-1, keepdim=True)
    return torch.cat((real, aw * bv + bw * av + torch.linalg.cross(av, bv)), -1)


def _turn(degrees: Tensor) -> Tensor:
    """The quaternion `[*B, 4]` of turns about x, then the y and z that turn with it, `[*B, 3]` degrees: Rx Ry Rz."""
    half = torch.deg2rad(degrees) / 2.0
    one, axes = half.cos().unsqueeze(-1), half.sin().unsqueeze(-1) * torch.eye(3, device=half.device)
    x, y, z = torch.cat((one, axes), -1).unbind(-2)
    return _times(x, _times(y, z))


class RandomizeRigidObjectPoseConfig(ConfigModel):
    """Where an object is put."""

    entity_cfg: EntityConfig = Field(description="the object, dynamic or kinematic")
    position_range: _Box | None = Field(None, description="[lowest, highest] x y z, m; it stays where it is if absent")
    rotation_range: _Box | None = Field(
        None, description="[lowest, highest] turn about x, its own y, its own z, degrees; not turned if absent"
    )
    relative_position: bool = Field(True, description="counted from where the scene has it, not from the origin")
    relative_rotation: bool = Field(False, description="counted from how the scene has it turned, about its own axes")

    @model_validator(mode="after")
    def _something(self) -> "RandomizeRigidObjectPoseConfig":
        if self.position_range is None and self.rotation_range is None:
            raise ValueError("give position_range, rotation_range or both")
        return self


@register_event("randomize_rigid_object_pose")
def randomize_rigid_object_pose(cfg: RandomizeRigidObjectPoseConfig, sim: Simulation) -> Apply:
    """Put an object somewhere, at rest.

        position' = draw, or home + draw        rotation' = turn(draw), or home turn(draw)

    `home` is its pose in the scene, m; `turn(a) = Rx Ry Rz` of three angles, degrees. Velocities become 0.
    """
    uid, begin = cfg.entity_cfg.uid, start(sim, ())
    _found("entity_cfg.uid", lambda: world.with_body_pose(sim, begin, uid))
    home, own = world.body_pose(sim, begin, uid), np.zeros(4)
    mujoco().mju_mat2Quat(own, home[:3, :3].double().numpy().flatten())
    place = home[:3, 3].tolist()
    moves = int(sim.model.body_mocapid[id_of(sim.model, "body", uid)]) < 0

    def apply(state: Any, keys: Tensor) -> Any:
        position, quaternion = None, None
        if cfg.position_range is not None:
            position = _drawn(keys, cfg.position_range, 3)
            position = position + position.new_tensor(place) if cfg.relative_position else position
        if cfg.rotation_range is not None:
            quaternion = _turn(_drawn(rng.fold_in(keys, 1), cfg.rotation_range, 3))
            if cfg.relative_rotation:
                quaternion = _times(quaternion.new_tensor(own).expand_as(quaternion), quaternion)
        moved = world.with_body_pose(sim, state["world"], uid, position, quaternion)
        if moves:
            moved = world.at_rest(sim, moved, uid)
        return state.copy().set("world", moved)

    return apply


class RandomizeTargetPoseConfig(ConfigModel):
    """Where a target is, which is nothing but a position."""

    position_range: _Box = Field(description="[lowest, highest] x y z, m")
    relative_position: bool = Field(False, description="counted from where reference_entity_cfg is, not the origin")
    reference_entity_cfg: EntityConfig | None = Field(None, description="an object, for relative_position")
    store_key: str = Field("goal_pose", pattern=r"^[\w-]+$", description="name of the target, which terms are told")

    @model_validator(mode="after")
    def _both(self) -> "RandomizeTargetPoseConfig":
        if self.relative_position != (self.reference_entity_cfg is not None):
            raise ValueError("relative_position and reference_entity_cfg go together: give both or neither")
        return self

    @property
    def stores(self) -> dict[str, tuple[float, ...]]:
        """The target that it sets, and what it is before that."""
        return {self.store_key: (0.0, 0.0, 0.0)}


@register_event("randomize_target_pose")
def randomize_target_pose(cfg: RandomizeTargetPoseConfig, sim: Simulation) -> Apply:
    """Choose a target, `[*B, 3]`, m.

    target' = draw, or draw + the position of the reference object at that moment
    """
    entity = cfg.reference_entity_cfg
    if entity is not None:
        _found("reference_entity_cfg.uid", lambda: world.body_pose(sim, start(sim, ()), entity.uid))

    def apply(state: Any, keys: Tensor) -> Any:
        known = state["targets"].keys() if "targets" in state else ()
        if cfg.store_key not in known:
            told = f"params.store_key: no target {cfg.store_key!r} in the task; {did_you_mean(cfg.store_key, known)}"
            raise ConfigError(f"{told}; an event under env.cfg.events makes one")
        place = _drawn(keys, cfg.position_range, 3)
        if entity is not None:
            place = place + world.body_pose(sim, state["world"], entity.uid)[..., :3, 3]
        return state.copy().set("targets", state["targets"].copy().set(cfg.store_key, place))

    return apply


class RandomizeRobotQposConfig(JointsConfig):
    """Where the joints of the robot are."""

    entity_cfg: EntityConfig | None = Field(None, description="the robot, another way to name it")
    qpos_range: _Rows = Field(description="[lowest, highest], rad or m: one number for all joints, or a list of theirs")
    relative_qpos: bool = Field(True, description="counted from where the joints are, not from 0")


@register_event("randomize_robot_qpos")
def randomize_robot_qpos(cfg: RandomizeRobotQposConfig, sim: Simulation) -> Apply:
    """Put joints of the robot somewhere, at rest.

        q' = clamp(q + draw, or draw, limits),  rad or m;  velocities become 0

    The targets of their drives are those of the next action; joints that no action drives go back home.
    """
    joints = joints_of(cfg, sim)
    if not joints:
        raise ConfigError("params: there is no robot in the scene")
    if cfg.entity_cfg is not None and not joints[0].startswith(f"{cfg.entity_cfg.uid}/"):
        raise ConfigError(f"params.entity_cfg.uid: no robot {cfg.entity_cfg.uid!r}; its joints: {', '.join(joints)}")
    for bound in map(_numbers, cfg.qpos_range):
        if len(bound) not in (1, len(joints)):
            told = f"{len(bound)} numbers for {len(joints)} joints: {', '.join(joints)}"
            raise ConfigError(f"params.qpos_range: {told}; give one number or a list of theirs")
    low, high = world.joint_limits(sim, joints)

    def apply(state: Any, keys: Tensor) -> Any:
        q = _drawn(keys, cfg.qpos_range, len(joints))
        q = q + world.joint_positions(sim, state["world"], joints) if cfg.relative_qpos else q
        q = q.clamp(q.new_tensor(low), q.new_tensor(high))
        moved = world.with_joint_positions(sim, state["world"], joints, q)
        return state.copy().set("world", world.with_joint_velocities(sim, moved, joints, torch.zeros_like(q)))

    return apply


def _own(sim: Simulation, field: str, uid: str) -> list[float]:
    """Numbers of an object in the scene; ConfigError where they are the same in all environments."""
    rows = _found("entity_cfg.uid", lambda: rows_of(sim.model, field, uid))
    if (field, uid) not in sim.varied:
        raise ConfigError(f"{field} of {uid!r} is the same in all environments; put the event under env.cfg.events")
    return getattr(sim.model, field).ravel()[rows].tolist()


class RandomizeRigidObjectMassConfig(ConfigModel):
    """What an object weighs."""

    entity_cfg: EntityConfig = Field(description="the object, dynamic")
    mass_range: _Span = Field(description="[lowest, highest], kg")
    relative: bool = Field(False, description="counted from the mass that it has in the scene, not from 0")

    @property
    def varied(self) -> tuple[tuple[str, str], ...]:
        """What differs between environments."""
        return tuple((field, self.entity_cfg.uid) for field in ("body_mass", "body_inertia", "dof_damping"))


@register_event("randomize_rigid_object_mass")
def randomize_rigid_object_mass(cfg: RandomizeRigidObjectMassConfig, sim: Simulation) -> Apply:
    """Give an object another mass, of the same shape and density everywhere in it.

        m' = draw, or m + draw, kg;  inertia' = inertia m' / m;  damping' = damping m' / m

    `m` is its mass in the scene. So the shares of its velocities that are lost per second stay what they are.
    """
    uid = cfg.entity_cfg.uid
    _found("entity_cfg.uid", lambda: world.push(sim, uid, torch.zeros(3)))
    own = {field: _own(sim, field, uid) for field, _ in cfg.varied}
    (mass,) = own["body_mass"]
    low, high = (bound + mass if cfg.relative else bound for bound in cfg.mass_range)
    if low <= 0.0:
        raise ConfigError(f"params.mass_range: the lowest mass is {low} kg, expected one above 0")

    def apply(state: Any, keys: Tensor) -> Any:
        drawn, moved = _drawn(keys, (low, high), 1), state["world"]
        for field, numbers in own.items():
            changed = drawn if field == "body_mass" else drawn / mass * drawn.new_tensor(numbers)
            moved = world.with_parameter(sim, moved, field, uid, changed)
        return state.copy().set("world", moved)

    return apply


class RandomizeRigidObjectFrictionConfig(ConfigModel):
    """How an object slides."""

    entity_cfg: EntityConfig = Field(description="the object")
    friction_range: _Frictions = Field(description="[lowest, highest] sliding friction, force along per force across")

    @property
    def varied(self) -> tuple[tuple[str, str], ...]:
        """What differs between environments."""
        return (("geom_friction", self.entity_cfg.uid),)


@register_event("randomize_rigid_object_friction")
def randomize_rigid_object_friction(cfg: RandomizeRigidObjectFrictionConfig, sim: Simulation) -> Apply:
    """Give an object another sliding friction, at rest and in motion.

        friction' = draw, force along per force across

    It counts against the floor, the robot and what is fixed; of two objects that touch, the larger one counts.
    """
    uid = cfg.entity_cfg.uid
    _own(sim, "geom_friction", uid)

    def apply(state: Any, keys: Tensor) -> Any:
        rest = world.parameter(sim, state["world"], "geom_friction", uid)[..., 1:]
        changed = torch.cat((_drawn(keys, cfg.friction_range, 1), rest), -1)
        return state.copy().set("world", world.with_parameter(sim, state["world"], "geom_friction", uid, changed))

    return apply


class PushRigidObjectConfig(ConfigModel):
    """What pushes an object."""

    entity_cfg: EntityConfig = Field(description="the object, dynamic")
    force_range: _Box = Field(description="[lowest, highest] force along x y z of the world, N")


@register_event("push_rigid_object")
def push_rigid_object(cfg: PushRigidObjectConfig, sim: Simulation) -> Apply:
    """Push an object at its centre during the next step, beside what pushes it already: force' = force + draw, N.

    A step of `dt` seconds changes the velocity of a free object of mass m by draw dt / m, m/s.
    """
    uid = cfg.entity_cfg.uid
    _found("entity_cfg.uid", lambda: world.push(sim, uid, torch.zeros(3)))

    def apply(state: Any, keys: Tensor) -> Any:
        return state.copy().set("force", state["force"] + world.push(sim, uid, _drawn(keys, cfg.force_range, 3)))

    return apply
