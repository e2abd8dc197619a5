"""Random events of a scene, which move, push or change objects, move the robot or draw targets.

Each time an event happens, the event draws new values uniformly between two bounds:

    draw = low + (high - low) u,    u uniform over the multiples of 2**-24 in [0, 1)
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
from ecrl.envs.mujoco.scene.config import FORCE, LENGTH, MASS, Real, Triple
from ecrl.envs.mujoco.scene.models import id_of, mujoco, rows_of
from ecrl.envs.mujoco.terms.term import EntityConfig, JointsConfig, joints_of, object_of, tcp_of
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean, register_event


def _numbers(bound: Any) -> tuple[float, ...]:
    return bound if isinstance(bound, tuple) else (bound,)


def _ordered(bounds: Any) -> Any:
    low, high = (_numbers(bound) for bound in bounds)
    if len(low) != len(high) and 1 not in (len(low), len(high)):
        raise ValueError(f"{len(low)} lowest values, but {len(high)} highest values; give equally many of both")
    length = max(len(low), len(high))
    for a, b in zip(low * (length // len(low)), high * (length // len(high)), strict=True):
        if a > b:
            raise ValueError(f"lowest {a} is above highest {b}")
    return bounds


_List = Annotated[tuple[Real, ...], Field(strict=False, min_length=1), LIST]
_Row = Annotated[Annotated[Real, NUMBER] | _List, by_kind("a number or a list of numbers")]
_Span = Annotated[tuple[Real, Real], Field(strict=False), AfterValidator(_ordered)]
_Box = Annotated[tuple[Triple, Triple], Field(strict=False), AfterValidator(_ordered)]
_Rows = Annotated[tuple[_Row, _Row], Field(strict=False), AfterValidator(_ordered)]
_Frictions = Annotated[tuple[NonNegative, NonNegative], Field(strict=False), AfterValidator(_ordered)]


def _draw(keys: Tensor, bounds: tuple[Any, Any], count: int, *rows: int) -> Tensor:
    """Draw values uniformly between two bounds, float32 `[*B, *rows, count]`.

    Each bound has one value or `count` values.
    """
    u = rng.uniform(keys, (*rows, count))
    low, high = (u.new_tensor(_numbers(bound)) for bound in bounds)
    return low + (high - low) * u


def _look_up(parameter: str, find: Callable[[], Any]) -> Any:
    """Call `find` and return its result. Prefix the message of a ConfigError with the name of the parameter."""
    try:
        return find()
    except ConfigError as error:
        raise ConfigError(f"params.{parameter}: {error}") from None


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply quaternions (w, x, y, z), `[*B, 4]`. The product rotates by `b` first and then by `a`."""
    (aw, av), (bw, bv) = (q.split((1, 3), -1) for q in (a, b))
    real = aw * bw - (av * bv).sum(-1, keepdim=True)
    return torch.cat((real, aw * bv + bw * av + torch.linalg.cross(av, bv)), -1)


def _quaternion(degrees: Tensor) -> Tensor:
    """Convert rotation angles `[*B, 3]` (degrees) about x, the rotated y and the rotated z to quaternions `[*B, 4]`."""
    half = torch.deg2rad(degrees) / 2.0
    real, axes = half.cos().unsqueeze(-1), half.sin().unsqueeze(-1) * torch.eye(3, device=half.device)
    x, y, z = torch.cat((real, axes), -1).unbind(-2)
    return _multiply(x, _multiply(y, z))


class RandomizeRigidObjectPoseConfig(ConfigModel):
    """Settings of `randomize_rigid_object_pose`: an object, and the ranges of its random pose."""

    entity_cfg: EntityConfig = Field(description="the object, dynamic or kinematic")
    position_range: Annotated[_Box | None, LENGTH] = Field(
        None, description="[lowest, highest] x y z, m; position unchanged if absent"
    )
    rotation_range: _Box | None = Field(
        None,
        description="[lowest, highest] angles about x, rotated y, rotated z, degrees; rotation unchanged if absent",
    )
    relative_position: bool = Field(True, description="add positions to the position in the scene config")
    relative_rotation: bool = Field(False, description="apply rotations to the rotation in the scene config")

    @model_validator(mode="after")
    def _has_a_range(self) -> "RandomizeRigidObjectPoseConfig":
        if self.position_range is None and self.rotation_range is None:
            raise ValueError("give position_range, rotation_range or both")
        return self


@register_event("randomize_rigid_object_pose")
def randomize_rigid_object_pose(cfg: RandomizeRigidObjectPoseConfig, sim: Simulation) -> Apply:
    """Move an object to a random pose, and set the velocities of the object to 0.

        position' = draw, or home + draw        rotation' = R(draw), or home R(draw)

    `home` is the object's pose in the scene config, with the position in m. `R(a) = Rx Ry Rz` is the rotation by the
    three angles a in degrees.
    """
    uid, initial = cfg.entity_cfg.uid, start(sim, ())
    _look_up("entity_cfg.uid", lambda: world.with_body_pose(sim, initial, uid))
    home, home_quaternion = world.body_pose(sim, initial, uid), np.zeros(4)
    mujoco().mju_mat2Quat(home_quaternion, home[:3, :3].double().numpy().flatten())
    home_position = home[:3, 3].tolist()
    has_velocity = int(sim.model.body_mocapid[id_of(sim.model, "body", uid)]) < 0

    def apply(state: Any, keys: Tensor) -> Any:
        position, quaternion = None, None
        if cfg.position_range is not None:
            position = _draw(keys, cfg.position_range, 3)
            position = position + position.new_tensor(home_position) if cfg.relative_position else position
        if cfg.rotation_range is not None:
            quaternion = _quaternion(_draw(rng.fold_in(keys, 1), cfg.rotation_range, 3))
            if cfg.relative_rotation:
                quaternion = _multiply(quaternion.new_tensor(home_quaternion).expand_as(quaternion), quaternion)
        worlds = world.with_body_pose(sim, state["world"], uid, position, quaternion)
        if has_velocity:
            worlds = world.with_body_at_rest(sim, worlds, uid)
        return state.copy().set("world", worlds)

    return apply


_PLACES = 32  # number of random positions that are tried for each object
_CHECKED_DRAWS = 256


class ScatterConfig(ConfigModel):
    """Settings of `scatter_rigid_objects`: the objects, the range of their positions, and the smallest distances."""

    entity_cfgs: Annotated[tuple[EntityConfig, ...], Field(strict=False, min_length=1)] = Field(
        description="the objects, dynamic or kinematic"
    )
    position_range: Annotated[_Box, LENGTH] = Field(description="[lowest, highest] x y z, m")
    min_distance: Annotated[NonNegative, LENGTH] = Field(
        0.0, description="smallest horizontal distance between two objects, m"
    )
    min_tool_distance: Annotated[NonNegative, LENGTH] = Field(
        0.0, description="smallest horizontal distance from an object to the end effector, m; 0: any distance"
    )
    part_name: str = Field("arm", description="part of the robot that has the end effector")


@register_event("scatter_rigid_objects")
def scatter_rigid_objects(cfg: ScatterConfig, sim: Simulation) -> Apply:
    """Move objects to random positions that are apart from each other and from the end effector.

    The objects are placed one after the other. Each object gets the first acceptable of 32 random positions. If none is
    acceptable, the object gets the position that misses the distances by the least. The velocities of dynamic objects
    become 0.

    Raises: ConfigError if one of 256 tests finds no acceptable position for an object.
    """
    uids = [object_of(sim, entity, "entity_cfgs") for entity in cfg.entity_cfgs]
    site = tcp_of(sim, cfg.part_name) if cfg.min_tool_distance else None
    for uid in uids:
        _look_up("entity_cfgs", lambda uid=uid: world.with_body_pose(sim, start(sim, ()), uid))
    has_velocity = {uid: int(sim.model.body_mocapid[id_of(sim.model, "body", uid)]) < 0 for uid in uids}

    def place(worlds: Any, keys: Tensor) -> tuple[Any, Tensor]:
        """Return the worlds with the objects placed, and the smallest slack over the objects, m `[*B]`."""
        tool = [] if site is None else [(world.site_pose(sim, worlds, site)[..., :2, 3], cfg.min_tool_distance)]
        obstacles, slacks = tool, []  # an obstacle is a position [*B, 2] and the smallest distance to it
        for i, uid in enumerate(uids):
            draws = _draw(rng.fold_in(keys, i), cfg.position_range, 3, _PLACES)
            slack = torch.zeros_like(draws[..., 0])
            for position, distance in obstacles:
                apart = torch.linalg.vector_norm(draws[..., :2] - position.unsqueeze(-2), dim=-1)
                slack = torch.minimum(slack, apart - distance)
            order = torch.arange(_PLACES, 0, -1, device=draws.device).to(slack)
            chosen = torch.where(slack >= 0.0, order, slack).argmax(-1, keepdim=True)
            position = draws.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, 3)).squeeze(-2)
            slacks.append(slack.gather(-1, chosen).squeeze(-1))
            worlds = world.with_body_pose(sim, worlds, uid, position)
            worlds = world.with_body_at_rest(sim, worlds, uid) if has_velocity[uid] else worlds
            obstacles.append((position[..., :2], cfg.min_distance))
        return worlds, torch.stack(slacks).amin(0)

    def apply(state: Any, keys: Tensor) -> Any:
        return state.copy().set("world", place(state["world"], keys)[0])

    keys = rng.split(rng.key(0), _CHECKED_DRAWS)
    with torch.no_grad():
        failed = int((place(start(sim, keys.shape), keys)[1] < 0.0).sum())
    if failed:
        fault = f"in {failed} of {_CHECKED_DRAWS} tests, an object found no place in {_PLACES} draws"
        raise ConfigError(f"params: {fault}; widen position_range, or reduce min_distance or min_tool_distance")
    return apply


class RandomizeTargetPoseConfig(ConfigModel):
    """Settings of `randomize_target_pose`: the range of the target position, and the name of the target."""

    position_range: Annotated[_Box, LENGTH] = Field(description="[lowest, highest] x y z, m")
    relative_position: bool = Field(False, description="add positions to the position of reference_entity_cfg")
    reference_entity_cfg: EntityConfig | None = Field(None, description="reference object of relative_position")
    store_key: str = Field("goal_pose", pattern=r"^[\w-]+$", description="name of the target; terms refer to it")

    @model_validator(mode="after")
    def _both(self) -> "RandomizeTargetPoseConfig":
        if self.relative_position != (self.reference_entity_cfg is not None):
            raise ValueError("relative_position and reference_entity_cfg go together; give both or neither")
        return self

    @property
    def stores(self) -> dict[str, tuple[float, ...]]:
        """Dictionary that maps the name of the target to the target's initial value."""
        return {self.store_key: (0.0, 0.0, 0.0)}


@register_event("randomize_target_pose")
def randomize_target_pose(cfg: RandomizeTargetPoseConfig, sim: Simulation) -> Apply:
    """Draw a random target position and store it in the state, `[*B, 3]` (m).

    target' = draw, or draw + the current position of the reference object
    """
    entity = cfg.reference_entity_cfg
    if entity is not None:
        _look_up("reference_entity_cfg.uid", lambda: world.body_pose(sim, start(sim, ()), entity.uid))

    def apply(state: Any, keys: Tensor) -> Any:
        known = state["targets"].keys() if "targets" in state else ()
        if cfg.store_key not in known:
            fault = f"params.store_key: no target {cfg.store_key!r} in the task; {did_you_mean(cfg.store_key, known)}"
            raise ConfigError(f"{fault}; an event under env.cfg.events adds one")
        position = _draw(keys, cfg.position_range, 3)
        if entity is not None:
            position = position + world.body_pose(sim, state["world"], entity.uid)[..., :3, 3]
        return state.copy().set("targets", state["targets"].copy().set(cfg.store_key, position))

    return apply


class RandomizeRobotQposConfig(JointsConfig):
    """Settings of `randomize_robot_qpos`: joints of the robot, and the range of their random positions."""

    entity_cfg: EntityConfig | None = Field(None, description="the robot; an alternative to robot_uid")
    qpos_range: _Rows = Field(description="[lowest, highest], rad or m: one value for all joints, or one per joint")
    relative_qpos: bool = Field(True, description="add positions to the current positions")


@register_event("randomize_robot_qpos")
def randomize_robot_qpos(cfg: RandomizeRobotQposConfig, sim: Simulation) -> Apply:
    """Move joints of the robot to random positions, and set the velocities of the joints to 0.

        q' = clamp(q + draw, or draw, limits),  rad or m;  velocities become 0

    The event does not change the targets of the drives. The next action sets new targets for all joints that the action
    drives. All other joints return to their home positions.
    """
    joints = joints_of(cfg, sim)
    if not joints:
        raise ConfigError("params: there is no robot in the scene")
    if cfg.entity_cfg is not None and not joints[0].startswith(f"{cfg.entity_cfg.uid}/"):
        raise ConfigError(f"params.entity_cfg.uid: no robot {cfg.entity_cfg.uid!r}; known joints: {', '.join(joints)}")
    for bound in map(_numbers, cfg.qpos_range):
        if len(bound) not in (1, len(joints)):
            fault = f"{len(bound)} values for {len(joints)} joints: {', '.join(joints)}"
            raise ConfigError(f"params.qpos_range: {fault}; give one value, or one value per joint")
    low, high = world.joint_limits(sim, joints)

    def apply(state: Any, keys: Tensor) -> Any:
        q = _draw(keys, cfg.qpos_range, len(joints))
        q = q + world.joint_positions(sim, state["world"], joints) if cfg.relative_qpos else q
        q = q.clamp(q.new_tensor(low), q.new_tensor(high))
        worlds = world.with_joint_positions(sim, state["world"], joints, q)
        return state.copy().set("world", world.with_joint_velocities(sim, worlds, joints, torch.zeros_like(q)))

    return apply


def _scene_values(sim: Simulation, field: str, uid: str) -> list[float]:
    """Return the values of a model field for one object, as in the scene config.

    Raises: ConfigError if the field cannot differ between environments.
    """
    rows = _look_up("entity_cfg.uid", lambda: rows_of(sim.model, field, uid))
    if (field, uid) not in sim.varied:
        raise ConfigError(
            f"all environments share {field} of {uid!r}, so this event cannot vary it; "
            "put the event under env.cfg.events"
        )
    return getattr(sim.model, field).ravel()[rows].tolist()


class RandomizeRigidObjectMassConfig(ConfigModel):
    """Settings of `randomize_rigid_object_mass`: an object, and the range of its random mass."""

    entity_cfg: EntityConfig = Field(description="the object, dynamic")
    mass_range: Annotated[_Span, MASS] = Field(description="[lowest, highest], kg")
    relative: bool = Field(False, description="add masses to the mass in the scene config")

    @property
    def varied(self) -> tuple[tuple[str, str], ...]:
        """Pairs of the name of a model field and the name of the object, for all fields that the event changes."""
        return tuple((field, self.entity_cfg.uid) for field in ("body_mass", "body_inertia", "dof_damping"))


@register_event("randomize_rigid_object_mass")
def randomize_rigid_object_mass(cfg: RandomizeRigidObjectMassConfig, sim: Simulation) -> Apply:
    """Set the mass of an object to a random value. The object keeps its shape and a uniform density.

        m' = draw, or m + draw, kg;  inertia' = inertia m' / m;  damping' = damping m' / m

    `m` is the object's mass in the scene config. The damping changes with the mass, so that velocities still decay at
    the same rate.
    """
    uid = cfg.entity_cfg.uid
    _look_up("entity_cfg.uid", lambda: world.push(sim, uid, torch.zeros(3)))
    scene_values = {field: _scene_values(sim, field, uid) for field, _ in cfg.varied}
    (mass,) = scene_values["body_mass"]
    low, high = (bound + mass if cfg.relative else bound for bound in cfg.mass_range)
    if low <= 0.0:
        raise ConfigError(f"params.mass_range: the lowest mass is {low} kg, expected more than 0")

    def apply(state: Any, keys: Tensor) -> Any:
        new_mass, worlds = _draw(keys, (low, high), 1), state["world"]
        for field, values in scene_values.items():
            new_values = new_mass if field == "body_mass" else new_mass / mass * new_mass.new_tensor(values)
            worlds = world.with_parameter(sim, worlds, field, uid, new_values)
        return state.copy().set("world", worlds)

    return apply


class RandomizeRigidObjectFrictionConfig(ConfigModel):
    """Settings of `randomize_rigid_object_friction`: an object, and the range of its random friction."""

    entity_cfg: EntityConfig = Field(description="the object")
    friction_range: _Frictions = Field(
        description="[lowest, highest] coefficient of sliding friction, tangential force per normal force"
    )

    @property
    def varied(self) -> tuple[tuple[str, str], ...]:
        """Pairs of the name of a model field and the name of the object, for all fields that the event changes."""
        return (("geom_friction", self.entity_cfg.uid),)


@register_event("randomize_rigid_object_friction")
def randomize_rigid_object_friction(cfg: RandomizeRigidObjectFrictionConfig, sim: Simulation) -> Apply:
    """Set an object's coefficient of sliding friction, at rest and in motion, to a random value.

        friction' = draw, tangential force per normal force

    The coefficient applies to contacts with the floor, with the robot, and with fixed geoms of an MJCF file. If two
    objects touch, the larger coefficient of the two objects applies.
    """
    uid = cfg.entity_cfg.uid
    _scene_values(sim, "geom_friction", uid)

    def apply(state: Any, keys: Tensor) -> Any:
        rest = world.parameter(sim, state["world"], "geom_friction", uid)[..., 1:]
        friction = torch.cat((_draw(keys, cfg.friction_range, 1), rest), -1)
        return state.copy().set("world", world.with_parameter(sim, state["world"], "geom_friction", uid, friction))

    return apply


class PushRigidObjectConfig(ConfigModel):
    """Settings of `push_rigid_object`: an object, and the range of the random force."""

    entity_cfg: EntityConfig = Field(description="the object, dynamic")
    force_range: Annotated[_Box, FORCE] = Field(description="[lowest, highest] force along x y z of the world, N")


@register_event("push_rigid_object")
def push_rigid_object(cfg: PushRigidObjectConfig, sim: Simulation) -> Apply:
    """Apply a random force to the centre of an object during the next step.

        force' = force + draw, N

    A step of `dt` seconds changes the velocity of a free object of mass m by draw dt / m (m/s).
    """
    uid = cfg.entity_cfg.uid
    _look_up("entity_cfg.uid", lambda: world.push(sim, uid, torch.zeros(3)))

    def apply(state: Any, keys: Tensor) -> Any:
        return state.copy().set("force", state["force"] + world.push(sim, uid, _draw(keys, cfg.force_range, 3)))

    return apply
