"""What a scene is made of, as it stands in a config: a robot, objects, a floor or any MJCF file, and the physics step.

The keys are EmbodiChain's. Those of its simulator that MuJoCo has nothing for stand in `inert` of their section.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from ecrl.strict import ConfigModel, Count, Fault, Loc, NonNegative, Positive

Real = Annotated[float, Field(ge=-1e6, le=1e6)]
Triple = Annotated[tuple[Real, Real, Real], Field(strict=False)]
Color = Annotated[tuple[Real, Real, Real, Real], Field(strict=False)]
_Row = Annotated[tuple[Real, Real, Real, Real], Field(strict=False)]
PerJoint = NonNegative | Annotated[tuple[NonNegative, ...], Field(strict=False, min_length=1)] | dict[str, NonNegative]
"""One number for every joint, a list with one each, or numbers by name of joint."""

_OWN_SOLVER = "inverse kinematics is of the action term EefPoseTerm, on the robot's own joints"
_ONE_FRICTION = "MuJoCo has one sliding friction, static_friction"


class SceneModel(ConfigModel):
    """A section of a scene; `inert` has its keys without a meaning here, and why each has none."""

    inert: ClassVar[dict[str, str]] = {}


class ShapeConfig(SceneModel):
    """A primitive shape."""

    inert: ClassVar = {"visual_material": "objects have a color"}

    shape_type: Literal["Cube", "Sphere", "Cylinder"] = Field(description="Cube (a box), Sphere or Cylinder")
    size: Annotated[tuple[Positive, Positive, Positive], Field(strict=False)] | None = Field(
        None, description="edges of a Cube, m"
    )
    radius: Positive | None = Field(None, description="of a Sphere or Cylinder, m")
    height: Positive | None = Field(None, description="of a Cylinder, m")

    @model_validator(mode="after")
    def _complete(self) -> "ShapeConfig":
        needed = {"Cube": ("size",), "Sphere": ("radius",), "Cylinder": ("radius", "height")}[self.shape_type]
        given = tuple(name for name in ("size", "radius", "height") if getattr(self, name) is not None)
        if set(given) != set(needed):
            raise ValueError(f"a {self.shape_type} has {' and '.join(needed)}, given: {', '.join(given) or 'none'}")
        return self


class AttrsConfig(SceneModel):
    """How a rigid object moves and touches."""

    inert: ClassVar = {
        "dynamic_friction": _ONE_FRICTION,
        "restitution": "MuJoCo's contacts are soft and have no coefficient of restitution",
        "contact_offset": "MuJoCo finds contacts at the surface",
        "rest_offset": "MuJoCo's contacts rest at the surface",
        "max_depenetration_velocity": "MuJoCo's contacts are soft",
        "max_linear_velocity": "MuJoCo does not cap velocities",
        "max_angular_velocity": "MuJoCo does not cap velocities",
        "sleep_threshold": "objects do not sleep",
        "enable_ccd": "MuJoCo has no continuous collision detection",
    }

    mass: Positive = Field(1.0, description="kg")
    static_friction: NonNegative = Field(0.5, description="sliding friction, at rest and in motion")
    linear_damping: NonNegative = Field(0.7, description="share of the velocity lost, 1/s")
    angular_damping: NonNegative = Field(0.7, description="share of the angular velocity lost, 1/s")


class RigidObjectConfig(SceneModel):
    """An object of one shape."""

    inert: ClassVar = {
        "max_convex_hull_num": "shapes are primitives",
        "sdf_resolution": "shapes are primitives",
        "body_scale": "shapes have sizes",
    }

    uid: str = Field(min_length=1, description="its name")
    shape: ShapeConfig = Field(description="its form")
    body_type: Literal["dynamic", "kinematic", "static"] = Field(
        "dynamic", description="dynamic: moved by forces; kinematic: moved by events alone; static: part of the world"
    )
    init_pos: Triple = Field((0.0, 0.0, 0.0), description="where its centre starts, m")
    init_rot: Triple = Field((0.0, 0.0, 0.0), description="how it starts turned: about x, then y, then z, degrees")
    attrs: AttrsConfig = Field(AttrsConfig.model_construct(), description="mass, friction, damping")
    color: Color = Field((0.85, 0.35, 0.2, 1.0), description="red, green, blue, opacity, 0 to 1")


class DriveConfig(SceneModel):
    """Actuators of the robot's joints: a spring and a damper towards the target, of limited force.

    force = clamp(stiffness (target - position) - damping velocity, +-max_effort)
    """

    inert: ClassVar = {
        "drive_type": "MuJoCo's drives are forces",
        "max_velocity": "MuJoCo does not cap velocities; limit the action",
        "friction": "the robot says its own joint friction",
        "armature": "the robot says its own armature",
    }

    stiffness: PerJoint | None = Field(None, description="N/m or N m/rad; the robot's own if absent")
    damping: PerJoint | None = Field(None, description="N s/m or N m s/rad; the robot's own if absent")
    max_effort: PerJoint | None = Field(None, description="N or N m; the robot's own if absent")


class SolverConfig(SceneModel):
    """What is held at the end of a part of the robot."""

    inert: ClassVar = dict.fromkeys(
        ("class_type", "urdf_path", "joint_names", "end_link_name", "root_link_name", "ik_nearest_weight"), _OWN_SOLVER
    )

    tcp: Annotated[tuple[_Row, _Row, _Row, _Row], Field(strict=False)] = Field(
        description="pose of the end effector in the frame of the flange, a 4x4 matrix, m"
    )


class RobotConfig(SceneModel):
    """The robot: a built-in one by its type, or any MJCF file."""

    inert: ClassVar = {
        "urdf_cfg": "robots are built in or MJCF files; see robot.robot_type and robot.mjcf",
        "class_type": "see robot.robot_type",
        "fpath": "see robot.mjcf",
    }

    uid: str = Field("robot", min_length=1, description="its name")
    robot_type: str = Field("URRobot", description="a built-in robot: URRobot or CartPole; not used with mjcf")
    mjcf: str | None = Field(
        None, description="path of an MJCF file instead, looked for below $MENAGERIE_ROOT too; or its text"
    )
    init_pos: Triple = Field((0.0, 0.0, 0.0), description="where its base stands, m")
    init_rot: Triple = Field((0.0, 0.0, 0.0), description="how its base is turned: about x, then y, then z, degrees")
    init_qpos: Annotated[tuple[Real, ...], Field(strict=False)] | None = Field(
        None, description="joint positions at the start, m or rad; further ones, of a gripper's fingers, are not used"
    )
    drive_pros: DriveConfig = Field(DriveConfig.model_construct(), description="actuators")
    control_parts: dict[str, Annotated[tuple[str, ...], Field(strict=False, min_length=1)]] = Field(
        {}, description="joints by name of part; the robot's own parts if absent"
    )
    solver_cfg: dict[str, SolverConfig] = Field({}, description="end effectors by name of part")


class LightConfig(SceneModel):
    """The light of the images, from far away."""

    inert: ClassVar = dict.fromkeys(("direct", "indirect"), "images have one light; see light.direction, color")

    direction: Triple = Field((0.3, 0.4, -1.0), description="which way it shines")
    color: Triple = Field((0.7, 0.7, 0.7), description="red, green, blue, 0 to 1")
    ambient: Triple = Field((0.3, 0.3, 0.3), description="light from everywhere: red, green, blue, 0 to 1")


class PhysicsConfig(SceneModel):
    """How MuJoCo steps."""

    dt: Positive | None = Field(None, description="time step, s; 0.01, or that of the scene's file, if absent")
    iterations: Count | None = Field(None, description="Newton iterations at most; 20, or the file's, if absent")
    threads: Annotated[int, Field(ge=0, le=4096)] = Field(0, description="threads; 0: as many as torch uses")


class SceneConfig(SceneModel):
    """A scene. Tasks have these keys beside their own."""

    inert: ClassVar = {
        "rigid_object_group": "list the objects in rigid_object",
        "articulation": "other articulated things come in with mjcf, a scene's file",
    }

    mjcf: str | None = Field(None, description="path of an MJCF file as the scene, or its text; a floor if absent")
    keyframe: str | None = Field(None, description="of that file: the state to start from")
    robot: RobotConfig | None = Field(None, description="the robot; none if absent")
    rigid_object: Annotated[tuple[RigidObjectConfig, ...], Field(strict=False)] = Field((), description="objects")
    background: Annotated[tuple[RigidObjectConfig, ...], Field(strict=False)] = Field((), description="more objects")
    light: LightConfig | None = Field(None, description="light of the images; that of the scene's file if absent")
    physics: PhysicsConfig = Field(PhysicsConfig.model_construct(), description="step and threads")
    sim_steps_per_control: Count = Field(4, description="physics steps per step of the environment")


def _sections(annotation: Any) -> Iterator[type[SceneModel]]:
    """The kinds of sections in a field's annotation."""
    if isinstance(annotation, type) and issubclass(annotation, SceneModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def inert_keys(model: type[SceneModel], data: Any, path: Loc = ()) -> list[Fault]:
    """Where a section has keys without a meaning, and why each has none.

    >>> inert_keys(SceneConfig, {"rigid_object": [{"uid": "cube", "attrs": {"restitution": 0.1}}]})[0][0]
    ('rigid_object', 0, 'attrs', 'restitution')
    """
    if isinstance(data, list | tuple):
        return [fault for i, part in enumerate(data) for fault in inert_keys(model, part, (*path, i))]
    if not isinstance(data, dict):
        return []
    found = [((*path, key), model.inert[key]) for key in data if key in model.inert]
    for name, field in model.model_fields.items():
        for section in _sections(field.annotation):
            parts = data.get(name)
            if "dict" in str(field.annotation) and isinstance(parts, dict):  # sections by name
                found += [f for key, part in parts.items() for f in inert_keys(section, part, (*path, name, key))]
            else:
                found += inert_keys(section, parts, (*path, name))
    return found
