"""Config models of a scene: the robot, the objects, a floor or an MJCF file, and the physics step.

Most config keys have the same names as in EmbodiChain. The attribute `inert` of a Config model maps each key of
EmbodiChain that ecrl does not use to the reason, or to a key to use instead. An inert key is ignored with a warning.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ecrl.config.model import LIST, NUMBER, OBJECT, ConfigModel, Fraction, NonNegative, Positive, by_kind
from ecrl.envs.scaling import LENGTH, MASS

Real = Annotated[float, Field(ge=-1e6, le=1e6)]
Triple = Annotated[tuple[Real, Real, Real], Field(strict=False)]
Shade = Annotated[tuple[Fraction, Fraction, Fraction], Field(strict=False)]
Color = Annotated[tuple[Fraction, Fraction, Fraction, Fraction], Field(strict=False)]

Steps = Annotated[int, Field(ge=1, le=10_000)]
"""Number of physics steps or solver iterations. The number is limited, because a running step cannot be interrupted."""
_Row = Annotated[tuple[Real, Real, Real, Real], Field(strict=False)]
_List = Annotated[tuple[NonNegative, ...], Field(strict=False, min_length=1), LIST]
PerJoint = Annotated[
    Annotated[NonNegative, NUMBER] | _List | Annotated[dict[str, NonNegative], OBJECT],
    by_kind("a number, a list of numbers, or an object with a number for each joint name"),
]
"""One value for all joints, a list with one value per joint, or a dictionary from joint names or patterns to values."""

_NAME = r"^[^\x00]+$"  # MuJoCo truncates a name at the first NUL character
_OWN_SOLVER = "the action term EefPoseTerm computes the inverse kinematics from the robot in the scene"
_ONE_FRICTION = "MuJoCo has one coefficient for friction at rest and in motion; see static_friction"


class ShapeConfig(ConfigModel):
    """Config of a primitive shape."""

    inert: ClassVar = {"visual_material": "see color of the object"}

    shape_type: Literal["Cube", "Sphere", "Cylinder"] = Field(description="Cube (a box), Sphere or Cylinder")
    size: Annotated[tuple[Positive, Positive, Positive] | None, Field(strict=False), LENGTH] = Field(
        None, description="edge lengths of a Cube along x, y and z, m"
    )
    radius: Annotated[Positive | None, LENGTH] = Field(None, description="radius of a Sphere or Cylinder, m")
    height: Annotated[Positive | None, LENGTH] = Field(None, description="height of a Cylinder, m")

    @model_validator(mode="after")
    def _complete(self) -> "ShapeConfig":
        needed = {"Cube": ("size",), "Sphere": ("radius",), "Cylinder": ("radius", "height")}[self.shape_type]
        present = tuple(name for name in ("size", "radius", "height") if getattr(self, name) is not None)
        if set(present) != set(needed):
            actual = ", ".join(present) or "none"
            raise ValueError(f"a {self.shape_type} needs exactly {' and '.join(needed)}, got {actual}")
        return self


class AttrsConfig(ConfigModel):
    """Config of the mass, the friction, the damping and the largest speeds of a rigid object."""

    inert: ClassVar = {
        "dynamic_friction": _ONE_FRICTION,
        "restitution": "MuJoCo's contacts are soft and have no coefficient of restitution",
        "contact_offset": "MuJoCo finds contacts at the surface",
        "rest_offset": "MuJoCo's contacts rest at the surface",
        "max_depenetration_velocity": "MuJoCo's contacts are soft",
        "sleep_threshold": "objects do not sleep",
        "enable_ccd": "MuJoCo has no continuous collision detection",
        "min_position_iters": "see physics.iterations",
        "min_velocity_iters": "see physics.iterations",
        "torsional_patch_radius": "MuJoCo's contacts have torsional friction",
        "density": "see mass",
        "recompute_inertia": "the inertia always follows from the shape and the mass",
    }

    mass: Annotated[Positive, MASS] = Field(1.0, description="mass, kg")
    static_friction: NonNegative = Field(0.5, description="coefficient of sliding friction, at rest and in motion")
    linear_damping: NonNegative = Field(0.7, description="damping rate of the velocity, 1/s")
    angular_damping: NonNegative = Field(0.7, description="damping rate of the angular velocity, 1/s")
    max_linear_velocity: Annotated[Positive | None, LENGTH] = Field(
        None, description="largest speed, m/s; if absent, no limit"
    )
    max_angular_velocity: Positive | None = Field(None, description="largest angular speed, rad/s; if absent, no limit")
    has_gravity: bool = Field(True, description="if false, gravity does not act on the object")


class RigidObjectConfig(ConfigModel):
    """Config of a rigid object with a primitive shape."""

    inert: ClassVar = {
        "max_convex_hull_num": "shapes are primitives",
        "sdf_resolution": "shapes are primitives",
        "body_scale": "see size, radius and height of the shape",
    }

    uid: str = Field(min_length=1, pattern=_NAME, description="name of the object, without NUL characters")
    shape: ShapeConfig = Field(description="shape of the object")
    body_type: Literal["dynamic", "kinematic", "static"] = Field(
        "dynamic", description="dynamic: moved by forces; kinematic: moved only by events; static: part of the world"
    )
    init_pos: Annotated[Triple, LENGTH] = Field(
        (0.0, 0.0, 0.0), description="position of the object's centre at the start, m"
    )
    init_rot: Triple = Field(
        (0.0, 0.0, 0.0), description="rotation at the start, degrees: about x, then the rotated y, then the rotated z"
    )
    attrs: AttrsConfig = Field(AttrsConfig.model_construct(), description="mass, friction, damping, largest speeds")
    color: Color = Field((0.85, 0.35, 0.2, 1.0), description="red, green, blue, opacity, 0 to 1")


class BackgroundConfig(RigidObjectConfig):
    """Config of a rigid object that is static by default."""

    body_type: Literal["dynamic", "kinematic", "static"] = Field(
        "static", description="static: part of the world; kinematic: moved only by events; dynamic: moved by forces"
    )


class DriveConfig(ConfigModel):
    """Config of the drives that move the robot's joints.

    By default, a joint has a position drive, which acts like a spring and a damper between the joint and its target:

        force = clamp(stiffness (target - position) - damping velocity, +-max_effort)

    MuJoCo computes this force at the start of a physics step. For a joint with the inertia I and a time step h, this is
    unstable if h^2 stiffness > 4 I and the force reaches `max_effort`. In this case, the drive applies the force for
    the position and the velocity at the end of the step, as PhysX does:

        gain = 1 + (h damping + h^2 stiffness) / I
        force = clamp((stiffness (target - position) - (damping + h stiffness) velocity) / gain, +-max_effort)

    I is the joint's entry on the diagonal of the mass matrix at the start of an episode. Only drives whose `stiffness`
    is in the config change in this way.

    `max_velocity` limits the speed of joints: a joint that is faster after a physics step gets the largest speed.

    The action terms `QvelTerm` and `QfTerm` need drives of other kinds; see their descriptions.
    """

    inert: ClassVar = {
        "drive_type": "MuJoCo's drives apply forces",
        "friction": "the robot defines its joint friction",
        "armature": "the robot defines its armature",
    }

    stiffness: PerJoint | None = Field(
        None, description="force per position error, N/m or N m/rad; by default, the robot's own value"
    )
    damping: PerJoint | None = Field(
        None, description="force per velocity, N s/m or N m s/rad; by default, the robot's own value"
    )
    max_effort: PerJoint | None = Field(None, description="largest force, N or N m; by default, the robot's own value")
    max_velocity: PerJoint | None = Field(
        None, description="largest speed of a joint, rad/s or m/s; if absent, no limit"
    )


class SolverConfig(ConfigModel):
    """Config of the end effector of one part of the robot."""

    inert: ClassVar = dict.fromkeys(
        ("class_type", "urdf_path", "joint_names", "root_link_name", "ik_nearest_weight"), _OWN_SOLVER
    )

    tcp: Annotated[tuple[_Row, _Row, _Row, _Row], Field(strict=False)] = Field(
        default=((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0)),
        description="pose of the end effector as a 4x4 matrix (position in m), in the frame of the link in "
        "end_link_name or, for a built-in arm, in the frame of the flange",
    )
    end_link_name: str | None = Field(
        None,
        min_length=1,
        description=(
            "link that holds the end effector, for a robot from a file; by default, the link that the robot defines, "
            "or else the flange of an arm with a hand, or else the link that the part's last joint moves"
        ),
    )


class ComponentConfig(ConfigModel):
    """Config of a component of the robot."""

    component_type: Literal["arm", "hand"] = Field(description="arm, or hand at the flange of the arm")
    urdf_path: str = Field(
        min_length=1,
        description="path of a URDF file, also looked up below $MENAGERIE_ROOT; or the text of the file; or, for a "
        "hand, builtin:two_finger_gripper or a hand of example-robot-data, such as example:allegro_right_hand",
    )
    transform: Annotated[tuple[_Row, _Row, _Row, _Row], Field(strict=False)] | None = Field(
        None,
        description="pose of a hand in the frame of the flange, as a 4x4 matrix (position in m); if absent, no offset",
    )


class ComponentsConfig(ConfigModel):
    """Config of the components of a robot."""

    inert: ClassVar = dict.fromkeys(
        ("fname", "fpath", "fpath_prefix", "use_signature_check", "base_link_name"),
        "components are assembled in memory",
    )

    components: Annotated[tuple[ComponentConfig, ...], Field(strict=False)] = Field(
        (), description="at most one arm and one hand; without an arm, the arm is robot.model or robot.robot_type"
    )


class RobotConfig(ConfigModel):
    """Config of the robot, which is built in, registered, or read from a URDF or MJCF file."""

    other_names: ClassVar = {"joint_drive_props": "drive_pros", "class_type": "robot_type", "fpath": "model"}

    uid: str = Field("robot", min_length=1, pattern=_NAME, description="name of the robot, without NUL characters")
    robot_type: str = Field(
        "URRobot",
        description="URRobot, CartPole or Finger, which are built in, or a registered robot; an arm in model or "
        "urdf_cfg replaces this robot",
    )
    model: str | None = Field(
        None,
        description=(
            "path of the robot's URDF or MJCF file, also looked up below $MENAGERIE_ROOT; or the text of the file; or "
            "a robot of example-robot-data, such as example:panda"
        ),
    )
    urdf_cfg: ComponentsConfig | None = Field(None, description="components of the robot, as in EmbodiChain")
    init_pos: Triple = Field((0.0, 0.0, 0.0), description="position of the robot's base, m")
    init_rot: Triple | None = Field(
        None,
        description=(
            "rotation of the base, degrees: about x, then the rotated y, then the rotated z; by default, the robot's "
            "own rotation, such as half a turn about z for example:panda, so that all arms face -x"
        ),
    )
    init_qpos: Annotated[tuple[Real, ...], Field(strict=False)] | None = Field(
        None, description="joint positions at the start, m or rad, one per joint; by default, as the robot defines"
    )
    drive_pros: DriveConfig = Field(DriveConfig.model_construct(), description="drives of the joints")
    control_parts: dict[str, Annotated[tuple[str, ...], Field(strict=False, min_length=1)]] = Field(
        {},
        description="for each part of the robot, a list of joint names or of patterns such as joint[1-6]; by default, "
        "the parts that the robot defines",
    )
    solver_cfg: dict[str, SolverConfig] = Field({}, description="the end effector of each part, by the part's name")


class LightConfig(ConfigModel):
    """Config of the directional light in rendered images."""

    inert: ClassVar = dict.fromkeys(("direct", "indirect"), "images have one light; set light.direction and color")

    direction: Triple = Field((0.3, 0.4, -1.0), description="direction in which the light shines")
    color: Shade = Field((0.7, 0.7, 0.7), description="red, green, blue, 0 to 1")
    ambient: Shade = Field((0.3, 0.3, 0.3), description="light from all sides: red, green, blue, 0 to 1")

    @model_validator(mode="after")
    def _shines_somewhere(self) -> "LightConfig":
        if not any(self.direction):
            raise ValueError("direction is 0; give the direction in which the light shines")
        return self


class PhysicsConfig(ConfigModel):
    """Config of the physics: time step, solver iterations, threads and backend."""

    dt: Positive | None = Field(
        None, description="time step, s; if absent, as in the MJCF scene file, or 0.01 without a file"
    )
    iterations: Steps | None = Field(
        None,
        description=(
            "maximum number of solver iterations per step; if absent, as in the MJCF scene file, or 20 without a file"
        ),
    )
    threads: Annotated[int, Field(ge=0, le=4096)] = Field(
        0, description="number of physics threads; 0: as many as torch uses"
    )
    backend: Literal["mujoco", "warp"] = Field(
        "mujoco", description="mujoco: CPU, float64; warp: MuJoCo Warp on trainer.device, float32"
    )

    @model_validator(mode="after")
    def _threads_of_mujoco(self) -> "PhysicsConfig":
        if self.threads and self.backend == "warp":
            raise ValueError("threads applies only to backend mujoco; remove threads, or change backend")
        return self


class SceneConfig(ConfigModel):
    """Config of a scene. The Config model of a task inherits all keys of `SceneConfig`."""

    inert: ClassVar = {
        "rigid_object_group": "list the objects in rigid_object",
        "articulation": "put articulated objects into an MJCF scene file; see mjcf",
        "physics_config": "see physics",
        "sensor": "put cameras into events and observations",
    }

    mjcf: str | None = Field(
        None,
        description=(
            "path of an MJCF file with the scene, or the text of the file; if absent, the scene is an empty floor"
        ),
    )
    keyframe: str | None = Field(None, description="keyframe of the MJCF file; episodes start from this keyframe")
    robot: RobotConfig | None = Field(None, description="the robot; if absent, no robot is added")
    rigid_object: Annotated[tuple[RigidObjectConfig, ...], Field(strict=False)] = Field((), description="objects")
    background: Annotated[tuple[BackgroundConfig, ...], Field(strict=False)] = Field(
        (), description="further objects, static by default"
    )
    light: LightConfig | None = Field(
        None, description="light in images; if absent, as in the MJCF scene file, or a default light without a file"
    )
    physics: PhysicsConfig = Field(PhysicsConfig.model_construct(), description="time step, solver and backend")
    sim_steps_per_control: Steps | None = Field(
        None, description="physics steps per environment step; by default 4, unless target_control_frequency is set"
    )
    target_control_frequency: Positive | None = Field(
        None, description="environment steps per second, Hz; an alternative to sim_steps_per_control"
    )

    @model_validator(mode="after")
    def _one_frequency(self) -> "SceneConfig":
        if self.target_control_frequency is not None and self.sim_steps_per_control is not None:
            raise ValueError("sim_steps_per_control and target_control_frequency set the same quantity; keep one")
        return self
