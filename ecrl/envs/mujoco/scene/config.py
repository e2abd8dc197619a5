"""What a scene is made of, as it stands in a config: a robot, objects, a floor or any MJCF file, and the physics step.

The keys are EmbodiChain's. Those of its simulator that MuJoCo has nothing for stand in `inert` of their section.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ecrl.config.model import LIST, NUMBER, OBJECT, ConfigModel, Fraction, NonNegative, Positive, by_kind

Real = Annotated[float, Field(ge=-1e6, le=1e6)]
Triple = Annotated[tuple[Real, Real, Real], Field(strict=False)]
Shade = Annotated[tuple[Fraction, Fraction, Fraction], Field(strict=False)]
Color = Annotated[tuple[Fraction, Fraction, Fraction, Fraction], Field(strict=False)]
Steps = Annotated[int, Field(ge=1, le=10_000)]
"""Of physics within a step of the environment, which nothing can interrupt."""
_Row = Annotated[tuple[Real, Real, Real, Real], Field(strict=False)]
_List = Annotated[tuple[NonNegative, ...], Field(strict=False, min_length=1), LIST]
PerJoint = Annotated[
    Annotated[NonNegative, NUMBER] | _List | Annotated[dict[str, NonNegative], OBJECT],
    by_kind("a number, a list of numbers, or an object with numbers by name of joint"),
]
"""One number for every joint, a list with one each, or numbers by name of joint."""

_NAME = r"^[^\x00]+$"  # MuJoCo ends a name there
_OWN_SOLVER = "inverse kinematics is of the action term EefPoseTerm, on the robot's own joints"
_ONE_FRICTION = "MuJoCo has one sliding friction, static_friction"


class ShapeConfig(ConfigModel):
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


class AttrsConfig(ConfigModel):
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


class RigidObjectConfig(ConfigModel):
    """An object of one shape."""

    inert: ClassVar = {
        "max_convex_hull_num": "shapes are primitives",
        "sdf_resolution": "shapes are primitives",
        "body_scale": "shapes have sizes",
    }

    uid: str = Field(min_length=1, pattern=_NAME, description="its name, without a NUL")
    shape: ShapeConfig = Field(description="its form")
    body_type: Literal["dynamic", "kinematic", "static"] = Field(
        "dynamic", description="dynamic: moved by forces; kinematic: moved by events alone; static: part of the world"
    )
    init_pos: Triple = Field((0.0, 0.0, 0.0), description="where its centre starts, m")
    init_rot: Triple = Field((0.0, 0.0, 0.0), description="its first turn: about x, its own y, its own z, degrees")
    attrs: AttrsConfig = Field(AttrsConfig.model_construct(), description="mass, friction, damping")
    color: Color = Field((0.85, 0.35, 0.2, 1.0), description="red, green, blue, opacity, 0 to 1")


class BackgroundConfig(RigidObjectConfig):
    """An object that stays where it is."""

    body_type: Literal["dynamic", "kinematic", "static"] = Field(
        "static", description="static: part of the world; kinematic: moved by events alone; dynamic: moved by forces"
    )


class DriveConfig(ConfigModel):
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


class SolverConfig(ConfigModel):
    """What is held at the end of a part of the robot."""

    inert: ClassVar = dict.fromkeys(
        ("class_type", "urdf_path", "joint_names", "end_link_name", "root_link_name", "ik_nearest_weight"), _OWN_SOLVER
    )

    tcp: Annotated[tuple[_Row, _Row, _Row, _Row], Field(strict=False)] = Field(
        description="pose of the end effector in the frame of the flange, a 4x4 matrix, m"
    )


class RobotConfig(ConfigModel):
    """The robot: a built-in one by its type, or any MJCF file."""

    inert: ClassVar = {
        "urdf_cfg": "robots are built in or MJCF files; see robot.robot_type and robot.mjcf",
        "class_type": "see robot.robot_type",
        "fpath": "see robot.mjcf",
    }

    uid: str = Field("robot", min_length=1, pattern=_NAME, description="its name, without a NUL")
    robot_type: str = Field("URRobot", description="a built-in robot: URRobot or CartPole; not used with mjcf")
    mjcf: str | None = Field(
        None, description="path of an MJCF file instead, looked for below $MENAGERIE_ROOT too; or its text"
    )
    init_pos: Triple = Field((0.0, 0.0, 0.0), description="where its base stands, m")
    init_rot: Triple = Field((0.0, 0.0, 0.0), description="its base's turn: about x, its own y, its own z, degrees")
    init_qpos: Annotated[tuple[Real, ...], Field(strict=False)] | None = Field(
        None, description="joint positions at the start, m or rad; further ones, of a gripper's fingers, are not used"
    )
    drive_pros: DriveConfig = Field(DriveConfig.model_construct(), description="actuators")
    control_parts: dict[str, Annotated[tuple[str, ...], Field(strict=False, min_length=1)]] = Field(
        {}, description="joints by name of part; the robot's own parts if absent"
    )
    solver_cfg: dict[str, SolverConfig] = Field({}, description="end effectors by name of part")


class LightConfig(ConfigModel):
    """The light of the images, from far away."""

    inert: ClassVar = dict.fromkeys(("direct", "indirect"), "images have one light; see light.direction, color")

    direction: Triple = Field((0.3, 0.4, -1.0), description="which way it shines")
    color: Shade = Field((0.7, 0.7, 0.7), description="red, green, blue, 0 to 1")
    ambient: Shade = Field((0.3, 0.3, 0.3), description="light from everywhere: red, green, blue, 0 to 1")

    @model_validator(mode="after")
    def _shines_somewhere(self) -> "LightConfig":
        if not any(self.direction):
            raise ValueError("direction is 0; say which way it shines")
        return self


class PhysicsConfig(ConfigModel):
    """How MuJoCo steps."""

    dt: Positive | None = Field(None, description="time step, s; 0.01, or that of the scene's file, if absent")
    iterations: Steps | None = Field(None, description="Newton iterations at most; 20, or the file's, if absent")
    threads: Annotated[int, Field(ge=0, le=4096)] = Field(0, description="threads; 0: as many as torch uses")
    backend: Literal["mujoco", "warp"] = Field(
        "mujoco", description="mujoco: on the CPU, float64; warp: MuJoCo Warp, on trainer.device, float32"
    )

    @model_validator(mode="after")
    def _threads_of_mujoco(self) -> "PhysicsConfig":
        if self.threads and self.backend == "warp":
            raise ValueError("threads are of backend mujoco; leave them out, or change backend")
        return self


class SceneConfig(ConfigModel):
    """A scene. Tasks have these keys beside their own."""

    inert: ClassVar = {
        "rigid_object_group": "list the objects in rigid_object",
        "articulation": "other articulated things come in with mjcf, a scene's file",
        "physics_config": "see physics",
        "sensor": "cameras are of events and observations",
    }

    mjcf: str | None = Field(None, description="path of an MJCF file as the scene, or its text; a floor if absent")
    keyframe: str | None = Field(None, description="of that file: the state to start from")
    robot: RobotConfig | None = Field(None, description="the robot; none if absent")
    rigid_object: Annotated[tuple[RigidObjectConfig, ...], Field(strict=False)] = Field((), description="objects")
    background: Annotated[tuple[BackgroundConfig, ...], Field(strict=False)] = Field(
        (), description="more objects, static if nothing else is said"
    )
    light: LightConfig | None = Field(None, description="light of the images; that of the scene's file if absent")
    physics: PhysicsConfig = Field(PhysicsConfig.model_construct(), description="step and threads")
    sim_steps_per_control: Steps | None = Field(
        None, description="physics steps per step of the environment; 4 if no frequency is given either"
    )
    target_control_frequency: Positive | None = Field(
        None, description="steps of the environment per second, Hz, in place of sim_steps_per_control"
    )

    @model_validator(mode="after")
    def _one_frequency(self) -> "SceneConfig":
        if self.target_control_frequency is not None and self.sim_steps_per_control is not None:
            raise ValueError("sim_steps_per_control and target_control_frequency say the same; keep one")
        return self
