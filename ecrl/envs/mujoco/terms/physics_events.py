"""Random events that change masses, centres of mass, sizes, friction, gravity and velocities, or push objects.

Masses, centres of mass, sizes, friction and gravity are fields of MuJoCo's model that differ between environments. Each
environment keeps its values until the event happens again or the episode ends. A new episode starts with the values of
the scene. The startup events and the reset events then change these values.
"""

import re
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from ecrl import rng
from ecrl.config.model import LIST, OBJECT, ConfigModel, by_kind
from ecrl.envs.events import Apply
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.scene.models import GRAVITY, Varied, field_of, id_of, mujoco, rows_of
from ecrl.envs.mujoco.terms.ranges import Box, Factors, NonNegativeSpan, Span, draw, look_up
from ecrl.envs.mujoco.terms.term import Entities, EntityConfig, object_of
from ecrl.envs.scaling import FORCE, LENGTH, MASS
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean, register_event

_MASS_FIELDS = ("body_mass", "body_inertia", "dof_damping")


def scene_values(sim: Simulation, field: str, uid: str) -> list[float]:
    """Return the values of a model field for one object, as in the scene config.

    Raises: ConfigError if the field or the object does not exist, or if the simulation has one copy of the field for
        all environments, so that no event can vary it.
    """
    rows = look_up("entity_cfg.uid", lambda: rows_of(sim.model, field, uid))
    if (field, uid) not in sim.varied:
        raise ConfigError(
            f"all environments share {field} of {uid!r}, so this event cannot vary it; "
            "put the event under env.cfg.events"
        )
    return field_of(sim.model, field).ravel()[rows].tolist()


def _dynamic(sim: Simulation, entity: EntityConfig) -> str:
    """Return the uid of a dynamic object. Raise ConfigError if the object does not exist or cannot move freely."""
    uid = object_of(sim, entity, "entity_cfg")
    look_up("entity_cfg.uid", lambda: world.push(sim, uid, torch.zeros(3)))
    return uid


def _with_inertia(sim: Simulation, worlds: Any, uid: str) -> Any:
    """Return worlds with the inertia and the damping that follow from an object's current mass and size.

        E'[i] = E[i] (m' / m) s[i]^2,   inertia'[i] = sum_{j != i} E'[j],   E[i] = sum_j inertia[j] / 2 - inertia[i]

    m (kg) and inertia (kg m^2) are the object's values in the scene config, and m' is the current mass. s[i] is the
    factor of the size along axis i. E[i] is the second moment of the mass along axis i, kg m^2.
    """
    model, body = sim.model, id_of(sim.model, "body", uid)
    scales = ("geom_size", uid) in sim.varied
    stretch = world.body_scale(sim, worlds, uid) if scales else worlds["parameters"].new_ones(*worlds.batch_size, 3)
    stretch = stretch.double()
    inertia, damping = (
        stretch.new_tensor(field_of(model, field).ravel()[rows_of(model, field, uid)].tolist())
        for field in ("body_inertia", "dof_damping")
    )
    ratio = torch.ones_like(stretch[..., :1])
    if ("body_mass", uid) in sim.varied:
        ratio = world.parameter(sim, worlds, "body_mass", uid).double() / float(model.body_mass[body])
    moments = (0.5 * inertia.sum() - inertia) * ratio * stretch.square()
    new = moments.sum(-1, keepdim=True) - moments
    worlds = world.with_parameter(sim, worlds, "body_inertia", uid, new)
    new_damping = torch.cat((damping[:3] * ratio, damping[3:] * new / inertia), -1)
    return world.with_parameter(sim, worlds, "dof_damping", uid, new_damping)


class RandomizeRigidObjectMassConfig(ConfigModel):
    """Settings of `randomize_rigid_object_mass`: an object, and the range of its random mass."""

    entity_cfg: EntityConfig = Field(description="the object, which must be dynamic")
    mass_range: Annotated[Span, MASS] = Field(description="[lowest, highest] mass, kg")
    relative: bool = Field(False, description="add the draw to the mass in the scene config")

    def varied(self, sim: Simulation) -> Varied:
        """Return pairs of a model field's name and the object's name, for all fields that the event changes."""
        uid = _dynamic(sim, self.entity_cfg)
        return tuple((field, uid) for field in _MASS_FIELDS)


@register_event("randomize_rigid_object_mass")
def randomize_rigid_object_mass(cfg: RandomizeRigidObjectMassConfig, sim: Simulation) -> Apply:
    """Set the mass of an object to a random value. The inertia changes by the same factor as the mass.

        m' = draw,  or m + draw if relative is true
        inertia' = inertia m' / m;  damping' = damping m' / m

    `m` is the object's mass in the scene config (kg). The damping changes with the mass, so that velocities still decay
    at the same rate.
    """
    uid = _dynamic(sim, cfg.entity_cfg)
    ((mass,), *_) = (scene_values(sim, field, uid) for field in _MASS_FIELDS)
    low, high = (bound + mass if cfg.relative else bound for bound in cfg.mass_range)
    if low <= 0.0:
        raise ConfigError(f"params.mass_range: the lowest mass is {low} kg, expected more than 0")

    def apply(state: Any, keys: Tensor) -> Any:
        worlds = world.with_parameter(sim, state["world"], "body_mass", uid, draw(keys, (low, high), 1))
        return state.copy().set("world", _with_inertia(sim, worlds, uid))

    return apply


class RandomizeCenterOfMassConfig(ConfigModel):
    """Settings of `randomize_rigid_object_center_of_mass`: an object, and the range of the random offset."""

    entity_cfg: EntityConfig = Field(description="the object, which must be dynamic")
    com_pos_offset_range: Annotated[Box, LENGTH] = Field(
        description="[lowest, highest] x y z of the offset in the frame of the object, m"
    )

    def varied(self, sim: Simulation) -> Varied:
        """Return pairs of a model field's name and the object's name, for all fields that the event changes."""
        return (("body_ipos", _dynamic(sim, self.entity_cfg)),)


@register_event("randomize_rigid_object_center_of_mass")
def randomize_rigid_object_center_of_mass(cfg: RandomizeCenterOfMassConfig, sim: Simulation) -> Apply:
    """Move the centre of mass of an object by a random offset. The inertia about the centre of mass does not change.

        com' = com + draw

    `com` is the centre of mass in the scene config. All vectors are in m and in the frame of the object. An object tips
    over if its centre of mass is not above its support. A force of `push_rigid_object` still acts at the object's
    origin, and then also turns the object. The damping of the linear velocity also turns the object, like the drag of
    air: a falling object starts to spin. Set `attrs.linear_damping` of the object to 0 to prevent this.
    """
    uid = _dynamic(sim, cfg.entity_cfg)
    home = scene_values(sim, "body_ipos", uid)

    def apply(state: Any, keys: Tensor) -> Any:
        offset = draw(keys, cfg.com_pos_offset_range, 3)
        com = offset + offset.new_tensor(home)
        return state.copy().set("world", world.with_parameter(sim, state["world"], "body_ipos", uid, com))

    return apply


_Masses = Annotated[
    Annotated[Span, LIST] | Annotated[dict[str, Span], Field(min_length=1), OBJECT],
    by_kind("a list [lowest, highest], or an object with such a list for each link name"),
]


def _listed(names: Any) -> Any:
    return [names] if isinstance(names, str) else names


class RandomizeArticulationMassConfig(ConfigModel):
    """Settings of `randomize_articulation_mass`: links of the robot, and the ranges of their random masses."""

    entity_cfg: EntityConfig = Field(description="the robot")
    mass_range: _Masses = Field(
        description="[lowest, highest] for all chosen links, or an object that maps link names to [lowest, highest], kg"
    )
    link_names: Annotated[tuple[str, ...], BeforeValidator(_listed), Field(strict=False, min_length=1)] | None = Field(
        None,
        description="regular expressions that choose the links by name; by default, the links that mass_range names, "
        "or all links that have a mass if mass_range names none",
    )
    relative: bool = Field(False, description="add the draw to the mass of each link in the scene")

    @model_validator(mode="after")
    def _one_choice(self) -> "RandomizeArticulationMassConfig":
        if self.link_names is not None and isinstance(self.mass_range, dict):
            raise ValueError("link_names and the names in mass_range both choose links; keep one")
        return self

    def spans(self, sim: Simulation) -> dict[str, tuple[float, float]]:
        """Return a dictionary that maps the name of each chosen body to the lowest and the highest draw for the body.

        Raises: ConfigError if there is no such robot or link, or if a link has no mass.
        """
        uid, model = self.entity_cfg.uid, sim.model
        prefix = f"{uid}/"
        masses = {model.body(i).name: float(model.body_mass[i]) for i in range(1, model.nbody)}
        links = {name.removeprefix(prefix): mass for name, mass in masses.items() if name.startswith(prefix)}
        if not links:
            robots = {name.split("/")[0] for name in masses if "/" in name}
            raise ConfigError(f"params.entity_cfg.uid: no robot {uid!r}; {did_you_mean(uid, robots)}")
        if isinstance(self.mass_range, dict):
            chosen = dict(self.mass_range)
        elif self.link_names is None:
            chosen = {name: self.mass_range for name, mass in links.items() if mass > 0.0}
        else:
            chosen = {name: self.mass_range for pattern in self.link_names for name in _fitting(pattern, links)}
        for name in chosen:
            if name not in links:
                raise ConfigError(f"params.mass_range: unknown link {name!r}; {did_you_mean(name, links)}")
            if links[name] <= 0.0:
                raise ConfigError(f"params: link {name!r} has no mass that could vary; choose other links")
        return {prefix + name: span for name, span in chosen.items()}

    def varied(self, sim: Simulation) -> Varied:
        """Return pairs of a model field's name and a link's name, for all fields that the event changes."""
        return tuple((field, name) for name in self.spans(sim) for field in ("body_mass", "body_inertia"))


def _fitting(pattern: str, links: dict[str, float]) -> list[str]:
    """Return the links whose whole name fits a regular expression. Raise ConfigError if no link fits."""
    try:
        found = [name for name in links if re.fullmatch(pattern, name)]
    except re.error as error:
        raise ConfigError(f"params.link_names: {pattern!r} is not a regular expression: {error}") from None
    if not found:
        raise ConfigError(f"params.link_names: no link fits {pattern!r}; {did_you_mean(pattern, links)}")
    return found


@register_event("randomize_articulation_mass")
def randomize_articulation_mass(cfg: RandomizeArticulationMassConfig, sim: Simulation) -> Apply:
    """Set the masses of links of the robot to random values. The inertia changes by the same factor as the mass.

        m' = draw,  or m + draw if relative is true
        inertia' = inertia m' / m

    `m` is the link's mass in the scene (kg). The mass of each link is drawn independently. If the gravity of a link is
    compensated, as in the built-in arm, the compensation follows the new mass.
    """
    spans, rows = cfg.spans(sim), []
    for name, span in spans.items():
        (mass,), inertia = (scene_values(sim, field, name) for field in ("body_mass", "body_inertia"))
        low, high = (bound + mass if cfg.relative else bound for bound in span)
        if low <= 0.0:
            raise ConfigError(f"params.mass_range: the lowest mass of {name!r} is {low} kg, expected more than 0")
        rows.append((name, low, high, mass, inertia))
    names, low, high, _, _ = zip(*rows, strict=True)

    def apply(state: Any, keys: Tensor) -> Any:
        masses, worlds = draw(keys, (low, high), len(names)), state["world"]
        for i, (name, _, _, mass, inertia) in enumerate(rows):
            new = masses[..., i : i + 1]
            worlds = world.with_parameter(sim, worlds, "body_mass", name, new)
            worlds = world.with_parameter(sim, worlds, "body_inertia", name, new / mass * new.new_tensor(inertia))
        return state.copy().set("world", worlds)

    return apply


class ScaleConfig(ConfigModel):
    """Range of the random factors of an object's size."""

    scale_factor_range: Factors = Field(
        description=(
            "[lowest, highest] factors of the size in the scene config; each is a list of one factor, or of three for "
            "x, y and z"
        )
    )
    same_scale_all_axes: bool = Field(
        True, description="use the first factor for all axes; false is possible only for a Cube"
    )

    @model_validator(mode="after")
    def _three(self) -> "ScaleConfig":
        if not self.same_scale_all_axes and {len(bound) for bound in self.scale_factor_range} != {3}:
            raise ValueError("same_scale_all_axes is false; give three lowest and three highest factors")
        return self


class RandomizeScaleConfig(ScaleConfig):
    """Settings of `randomize_rigid_object_scale`: an object, and the range of the random factors of its size."""

    entity_cfg: EntityConfig = Field(description="the object")

    def varied(self, sim: Simulation) -> Varied:
        """Return pairs of a model field's name and the object's name, for all fields that the event changes."""
        return _scaled_fields(sim, self.entity_cfg, "entity_cfg")


class RandomizeScalesConfig(ScaleConfig):
    """Settings of `randomize_rigid_objects_scale`: objects, and the range of the random factors of their sizes."""

    entity_cfgs: Entities = Field(description="the objects")
    shared_sample: bool = Field(False, description="use the same factors for all objects of an environment")

    def varied(self, sim: Simulation) -> Varied:
        """Return pairs of a model field's name and an object's name, for all fields that the event changes."""
        return tuple(pair for entity in self.entity_cfgs for pair in _scaled_fields(sim, entity, "entity_cfgs"))


def _check_shape(sim: Simulation, uid: str) -> None:
    """Raise ConfigError unless a body is a separate object with one primitive geom that determines its inertia."""
    model, kinds = sim.model, mujoco().mjtGeom
    shapes = {kinds.mjGEOM_BOX: "box", kinds.mjGEOM_SPHERE: "sphere", kinds.mjGEOM_CYLINDER: "cylinder"}
    shapes |= {kinds.mjGEOM_CAPSULE: "capsule"}
    body = id_of(model, "body", uid)
    geom, count = int(model.body_geomadr[body]), int(model.body_geomnum[body])
    expected = f"expected one geom: a {', '.join(list(shapes.values())[:-1])} or capsule"
    if count != 1:
        raise ConfigError(f"body {uid!r} has {count} geoms, {expected}")
    kind = kinds(int(model.geom_type[geom]))
    if kind not in shapes:
        actual = kind.name.removeprefix("mjGEOM_").lower()
        raise ConfigError(f"the geom of body {uid!r} has the type {actual}, {expected}")
    if (name := model.geom(geom).name) != uid:
        raise ConfigError(f"the geom of body {uid!r} has the name {name!r}; give it the name of its body")
    if model.body_weldid[body] and uid not in world.movable_bodies(sim):
        raise ConfigError(f"body {uid!r} moves with joints or with another body; choose a separate object")
    is_centred = np.allclose(model.body_ipos[body], model.geom_pos[geom], rtol=0.0, atol=1e-6)
    is_aligned = abs(model.body_iquat[body] @ model.geom_quat[geom]) > 1.0 - 1e-9  # the quaternions q and -q are equal
    if model.body_dofnum[body] and not (is_centred and is_aligned):
        fault = f"the inertial frame of body {uid!r} is not the frame of its geom"
        raise ConfigError(f"{fault}; remove the inertial element from the MJCF file")


def _scaled_fields(sim: Simulation, entity: EntityConfig, parameter: str) -> Varied:
    """Return pairs of a model field's name and the object's name, for all fields that depend on the object's size.

    Raises: ConfigError that names the setting `parameter` if the object cannot be scaled.
    """
    uid = object_of(sim, entity, parameter)
    look_up(f"{parameter}.uid", lambda: _check_shape(sim, uid))
    is_dynamic = int(sim.model.body_dofnum[id_of(sim.model, "body", uid)]) == 6
    return tuple((field, uid) for field in ("geom_size", *(_MASS_FIELDS[1:] if is_dynamic else ())))


def _scaling(cfg: ScaleConfig, sim: Simulation, uid: str, parameter: str) -> Any:
    """Return a function that scales an object in worlds by factors `[*B, 3]`.

    Raises: ConfigError if the object cannot be scaled, or if `same_scale_all_axes` is false but the object is not a
        box.
    """
    _scaled_fields(sim, EntityConfig(uid=uid), parameter)
    home, kinds = scene_values(sim, "geom_size", uid), mujoco().mjtGeom
    kind = int(sim.model.geom_type[id_of(sim.model, "geom", uid)])
    if not cfg.same_scale_all_axes and kind != int(kinds.mjGEOM_BOX):
        fault = f"{uid!r} is not a Cube, so its axes have one factor"
        raise ConfigError(f"params.same_scale_all_axes: {fault}; set same_scale_all_axes to true")

    def scaled(worlds: Any, factors: Tensor) -> Any:
        worlds = world.with_parameter(sim, worlds, "geom_size", uid, factors * factors.new_tensor(home))
        return _with_inertia(sim, worlds, uid) if ("body_inertia", uid) in sim.varied else worlds

    return scaled


def _draw_factors(cfg: ScaleConfig, keys: Tensor) -> Tensor:
    if cfg.same_scale_all_axes:
        low, high = (bound[:1] for bound in cfg.scale_factor_range)
        return draw(keys, (low, high), 1).expand(*keys.shape, 3)
    return draw(keys, cfg.scale_factor_range, 3)


@register_event("randomize_rigid_object_scale")
def randomize_rigid_object_scale(cfg: RandomizeScaleConfig, sim: Simulation) -> Apply:
    """Scale the size of an object by random factors. The mass and the position of the centre do not change.

        size' = size draw;  inertia' is the inertia of the new shape with the same mass

    `size` is the size in the scene config. If an object on the floor grows, the floor pushes it up. To place the object
    above the floor, use `randomize_rigid_object_pose`.
    """
    scaled = _scaling(cfg, sim, cfg.entity_cfg.uid, "entity_cfg")

    def apply(state: Any, keys: Tensor) -> Any:
        return state.copy().set("world", scaled(state["world"], _draw_factors(cfg, keys)))

    return apply


@register_event("randomize_rigid_objects_scale")
def randomize_rigid_objects_scale(cfg: RandomizeScalesConfig, sim: Simulation) -> Apply:
    """Scale the sizes of several objects by random factors, as `randomize_rigid_object_scale` scales one object.

    If `shared_sample` is set, all objects of an environment get the same factors.
    """
    each = [_scaling(cfg, sim, entity.uid, "entity_cfgs") for entity in cfg.entity_cfgs]

    def apply(state: Any, keys: Tensor) -> Any:
        worlds = state["world"]
        for i, scaled in enumerate(each):
            worlds = scaled(worlds, _draw_factors(cfg, keys if cfg.shared_sample else rng.fold_in(keys, i)))
        return state.copy().set("world", worlds)

    return apply


class RandomizeRigidObjectFrictionConfig(ConfigModel):
    """Settings of `randomize_rigid_object_friction`: an object, and the range of its random friction."""

    entity_cfg: EntityConfig = Field(description="the object")
    friction_range: NonNegativeSpan = Field(
        description="[lowest, highest] coefficient of sliding friction, tangential force per normal force"
    )

    def varied(self, sim: Simulation) -> Varied:
        """Return pairs of a model field's name and the object's name, for all fields that the event changes."""
        look_up("entity_cfg.uid", lambda: rows_of(sim.model, "geom_friction", self.entity_cfg.uid))
        return (("geom_friction", self.entity_cfg.uid),)


@register_event("randomize_rigid_object_friction")
def randomize_rigid_object_friction(cfg: RandomizeRigidObjectFrictionConfig, sim: Simulation) -> Apply:
    """Set an object's coefficient of sliding friction, at rest and in motion, to a random value.

        friction' = draw, tangential force per normal force

    The coefficient of an object in `rigid_object` or `background` applies to its contacts with the floor, with the
    robot, and with geoms of an MJCF file whose `priority` is 0, the default. If two objects in `rigid_object` or
    `background` touch, the larger coefficient applies.
    """
    uid = cfg.entity_cfg.uid
    scene_values(sim, "geom_friction", uid)

    def apply(state: Any, keys: Tensor) -> Any:
        rest = world.parameter(sim, state["world"], "geom_friction", uid)[..., 1:]
        friction = torch.cat((draw(keys, cfg.friction_range, 1), rest), -1)
        return state.copy().set("world", world.with_parameter(sim, state["world"], "geom_friction", uid, friction))

    return apply


class RandomizeGravityConfig(ConfigModel):
    """Settings of `randomize_gravity`: the range of the random gravity."""

    gravity_range: Box = Field(description="[lowest, highest] x y z of the gravitational acceleration, m/s^2")

    def varied(self, sim: Simulation) -> Varied:
        """Return one pair: the name of the gravity field, and "world" in place of an object's name."""
        return ((GRAVITY, "world"),)


@register_event("randomize_gravity")
def randomize_gravity(cfg: RandomizeGravityConfig, sim: Simulation) -> Apply:
    """Set the gravitational acceleration to a random vector.

        gravity' = draw, m/s^2;  a free fall from rest covers gravity' t^2 / 2 in the time t

    Links whose gravity is compensated, as in the built-in arm, are not affected.
    """
    scene_values(sim, GRAVITY, "world")

    def apply(state: Any, keys: Tensor) -> Any:
        gravity = draw(keys, cfg.gravity_range, 3)
        return state.copy().set("world", world.with_parameter(sim, state["world"], GRAVITY, "world", gravity))

    return apply


class PushRigidObjectConfig(ConfigModel):
    """Settings of `push_rigid_object`: an object, and the range of the random force."""

    entity_cfg: EntityConfig = Field(description="the object, which must be dynamic")
    force_range: Annotated[Box, FORCE] = Field(description="[lowest, highest] force along x y z of the world, N")


@register_event("push_rigid_object")
def push_rigid_object(cfg: PushRigidObjectConfig, sim: Simulation) -> Apply:
    """Apply a random force to the origin of an object during the next step.

        force' = force + draw

    `force` is the sum of the forces (N) that earlier events apply to the object during the same step. Without damping
    and contacts, the draw changes the velocity of an object of mass m by draw dt / m (m/s) during the step, which takes
    `dt` seconds.
    """
    uid = _dynamic(sim, cfg.entity_cfg)

    def apply(state: Any, keys: Tensor) -> Any:
        return state.copy().set("force", state["force"] + world.push(sim, uid, draw(keys, cfg.force_range, 3)))

    return apply


class RandomizeVelocityConfig(ConfigModel):
    """Settings of `randomize_rigid_object_velocity`: an object, and the ranges of its random velocities."""

    entity_cfg: EntityConfig = Field(description="the object, which must be dynamic")
    linear_range: Annotated[Box, LENGTH] = Field(
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)), description="[lowest, highest] velocity along x y z of the world, m/s"
    )
    angular_range: Box = Field(
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
        description="[lowest, highest] angular velocity about x y z of the world, rad/s",
    )
    relative: bool = Field(False, description="add the draw to the current velocities")


@register_event("randomize_rigid_object_velocity")
def randomize_rigid_object_velocity(cfg: RandomizeVelocityConfig, sim: Simulation) -> Apply:
    """Set the linear and the angular velocity of an object to random values in the world frame.

        v' = draw,  or v + draw if relative is true
        omega' = draw,  or omega + draw if relative is true

    `v` (m/s) and `omega` (rad/s) are the current velocities.
    """
    uid = _dynamic(sim, cfg.entity_cfg)

    def apply(state: Any, keys: Tensor) -> Any:
        linear, angular = draw(keys, cfg.linear_range, 3), draw(rng.fold_in(keys, 1), cfg.angular_range, 3)
        if cfg.relative:
            old_linear, old_angular = world.body_velocity(sim, state["world"], uid)
            linear, angular = linear + old_linear, angular + old_angular
        return state.copy().set("world", world.with_body_velocity(sim, state["world"], uid, linear, angular))

    return apply
