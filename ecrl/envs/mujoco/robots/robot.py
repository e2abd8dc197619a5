"""Build the robot of a scene from a built-in robot or a file, with drives, force sensors and end effectors."""

import os
import re
import warnings
from collections.abc import Callable, Mapping
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ecrl.config.input_files import check_input
from ecrl.config.model import format_key, format_value
from ecrl.envs.mujoco.robots import urdf
from ecrl.envs.mujoco.robots.arm import NO_OFFSET, ROBOTS, Builtin, Matrix
from ecrl.envs.mujoco.robots.components import (
    GRIPPER,
    GRIPPER_GRIP,
    HAND,
    KEY,
    Part,
    attach_hand,
    component,
    flange_of,
    found_file,
    quaternion_of,
)
from ecrl.envs.mujoco.robots.examples import EXAMPLES, PREFIX, example_file
from ecrl.envs.mujoco.robots.mjcf_inputs import check_mjcf_inputs
from ecrl.envs.mujoco.robots.model import RobotModel
from ecrl.envs.mujoco.scene.config import DriveConfig, PerJoint, RobotConfig
from ecrl.envs.mujoco.scene.models import mujoco
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean, lookup, registered

_NUMBERS = ("stiffness", "damping", "max_effort")
"""Fields of `DriveConfig` and `Builtin` that have one value per joint."""
Drive = Literal["position", "velocity", "force"]
"""Kind of drive. A control is a target position (m or rad), a target velocity (m/s or rad/s) or a force (N or N m)."""


class Robot(NamedTuple):
    """Names of a robot's joints and end effector sites in the model.

    `joints` names all joints except `followers`. Config lists with one value per joint have the order of `joints`.
    `parts` maps each part to the part's joints. `tcp` maps each part that has an end effector to the end effector's
    site. `followers` are joints that each follow one of `joints`. `grip` maps each joint of a gripper to its positions
    in the open and in the closed gripper. `fingers` are the bodies that grasp objects. `max_velocity` maps each joint
    with a speed limit to the joint's largest speed (rad/s or m/s).
    """

    joints: tuple[str, ...]
    parts: dict[str, tuple[str, ...]]
    tcp: dict[str, str]
    followers: tuple[urdf.Follower, ...] = ()
    grip: dict[str, tuple[float, float]] = {}  # noqa: RUF012  # never changed
    fingers: tuple[str, ...] = ()
    max_velocity: dict[str, float] = {}  # noqa: RUF012  # never changed

    def with_prefix(self, prefix: str) -> "Robot":
        """Return a copy with `prefix` before the names of joints, sites and bodies, as in the model of a scene."""
        parts = {part: tuple(prefix + name for name in names) for part, names in self.parts.items()}
        tcp = {part: prefix + site for part, site in self.tcp.items()}
        followers = (f._replace(name=prefix + f.name, leader=prefix + f.leader) for f in self.followers)
        grip = {prefix + name: positions for name, positions in self.grip.items()}
        joints, fingers = (tuple(prefix + name for name in names) for names in (self.joints, self.fingers))
        max_velocity = {prefix + name: speed for name, speed in self.max_velocity.items()}
        return Robot(joints, parts, tcp, tuple(followers), grip, fingers, max_velocity)


def spec_of(source: str, key: str, root: str = "", is_trusted: bool = False) -> Any:
    """Return the MjSpec of an MJCF file.

    `source` is the path or the text of the file. A relative path is also looked up below the folder `root`, if `root`
    is not empty. If `is_trusted` is True, the file and all files that it names may be outside $ECRL_INPUT_FOLDERS.

    Raises: ConfigError, which names `key`, if the file does not exist, is not an MJCF file, or names a file outside
        $ECRL_INPUT_FOLDERS.
    """
    is_text = _is_text(source)
    source = source if is_text else _existing(source, key, root)
    if not is_trusted:
        check_mjcf_inputs(source, key)
    try:
        return mujoco().MjSpec.from_string(source) if is_text else mujoco().MjSpec.from_file(source)
    except ValueError as error:
        raise ConfigError(f"{key}: {' '.join(str(error).split())}") from None


def _is_text(source: str) -> bool:
    """Return True if `source` is the text of a file, and False if it is a path."""
    return source.lstrip().startswith("<")


def _existing(source: str, key: str, root: str) -> str:
    """Return the path of a file. A relative path is also looked up below `root`, if `root` is not empty.

    Raises: ConfigError, which names `key`, if the file does not exist.
    """
    if path := found_file(source, root):
        return path
    below = f", nor below MENAGERIE_ROOT, {root}" if root else ""
    raise ConfigError(f"{key}: no such file {format_value(source)}{below}")


def hinges_and_slides(spec: Any) -> tuple[str, ...]:
    """Return the names of all hinge and slide joints of an MjSpec, in the order of the joints in the MjSpec."""
    kinds = (mujoco().mjtJoint.mjJNT_HINGE, mujoco().mjtJoint.mjJNT_SLIDE)
    return tuple(joint.name for joint in spec.joints if joint.type in kinds)


def add_force_sensors(spec: Any, joints: tuple[str, ...], key: str) -> None:
    """Add a sensor `<joint>_force` for the drive force of each joint, unless the file already has this sensor.

    Raises: ConfigError, which names `key`, if the file has a different sensor with that name.
    """
    kind, joint = mujoco().mjtSensor.mjSENS_JOINTACTFRC, mujoco().mjtObj.mjOBJ_JOINT
    for name in joints:
        sensor = spec.sensor(f"{name}_force")
        if sensor is None:
            spec.add_sensor(name=f"{name}_force", type=kind, objtype=joint, objname=name)
        elif (sensor.type, sensor.objname, sensor.cutoff) != (kind, name, 0.0):
            expected = f"a jointactuatorfrc sensor of joint {name!r} without cutoff"
            raise ConfigError(f"{key}: sensor {sensor.name!r} is not {expected}; rename the sensor")


def _per_joint(values: PerJoint | None, defaults: tuple[float, ...], built: Builtin, key: str) -> tuple[float, ...]:
    """Expand a config value to one value per joint. Missing values are replaced by the robot's defaults."""
    joints = built.joints
    if isinstance(values, dict):
        given = {joint: x for name, x in values.items() for joint in _matching((name,), built, key)}
        return tuple(given.get(name, default) for name, default in zip(joints, defaults, strict=True))
    if isinstance(values, tuple) and len(values) != len(joints):
        raise ConfigError(
            f"{key}: {len(values)} values for {len(joints)} joints: {', '.join(joints)}; give one value per joint"
        )
    if values is None:
        return defaults
    return values if isinstance(values, tuple) else (values,) * len(joints)


def _matching(names: tuple[str, ...], built: Builtin, key: str) -> tuple[str, ...]:
    """Return the joints that `names` select, in the order of `names`.

    Each of `names` is the name of a joint or a regular expression. An expression selects a joint if it matches the
    joint's whole name or the joint's whole alias. The aliases (`built.aliases`) are EmbodiChain's names of the joints.
    An expression that matches no joint is tried again, ignoring case.

    Raises: ConfigError, which names `key`, if a name fits no joint, or if a joint is selected twice.
    """
    found, joints = list[str](), built.joints
    others = built.aliases or joints
    for name in names:
        matches = [name] if name in joints else []
        try:
            for flags in (re.NOFLAG, re.IGNORECASE):
                pairs = () if matches else zip(joints, others, strict=True)
                matches += [one for one, other in pairs if any(re.fullmatch(name, x, flags) for x in (one, other))]
        except re.error as error:
            raise ConfigError(f"{key}: {name!r} is neither a joint nor a pattern: {error}") from None
        if not matches:
            raise ConfigError(f"{key}: unknown joint {name!r}; {did_you_mean(name, joints)}")
        if twice := [joint for joint in matches if joint in found]:
            raise ConfigError(f"{key}: names joint {twice[0]!r} twice; name the joint once")
        found += matches
    return tuple(found)


def _add_drives(spec: Any, cfg: DriveConfig, built: Builtin, drives: Mapping[str, Drive]) -> None:
    key, joints = "robot.drive_pros", built.joints
    numbers = [
        _per_joint(getattr(cfg, name), getattr(built, name), built, f"{key}.{name}")
        for name in ("stiffness", "damping", "max_effort")
    ]
    for name, stiffness, damping, effort in zip(joints, *numbers, strict=True):
        if effort <= 0.0:
            raise ConfigError(f"{key}.max_effort: {effort} of joint {name!r}, expected more than 0")
        actuator = spec.add_actuator(name=name, trntype=mujoco().mjtTrn.mjTRN_JOINT, target=name)
        actuator.forcelimited, actuator.forcerange = True, [-effort, effort]
        match drives.get(name, "position"):
            case "position":
                actuator.set_to_position(kp=stiffness, kv=damping)
            case "velocity":
                actuator.set_to_velocity(kv=damping)
            case "force":
                actuator.set_to_motor()


def _speed_limits(cfg: DriveConfig, built: Builtin) -> dict[str, float]:
    """Return a dictionary that maps each joint with a speed limit to the limit, rad/s or m/s."""
    key, joints = "robot.drive_pros.max_velocity", built.joints
    limits = dict(zip(joints, _per_joint(cfg.max_velocity, (inf,) * len(joints), built, key), strict=True))
    for name, speed in limits.items():
        if speed <= 0.0:
            raise ConfigError(f"{key}: {speed} of joint {name!r}, expected more than 0")
    return {name: speed for name, speed in limits.items() if speed < inf}


def _arm_key(cfg: RobotConfig) -> str | None:
    """Return the config key of an arm in `robot.urdf_cfg`, which replaces the arm of `robot_type`, or None."""
    listed = () if cfg.urdf_cfg is None else cfg.urdf_cfg.components
    arms = (i for i, part in enumerate(listed) if part.component_type == "arm")
    return next((f"{KEY}[{i}].urdf_path" for i in arms), None)


def described(cfg: RobotConfig) -> RobotModel | None:
    """Return the `RobotModel` of a registered robot or of a robot in `EXAMPLES`, or None for any other robot.

    The result is also None if `robot.urdf_cfg` replaces the arm of the registered robot.

    Raises: ConfigError if `robot_type` is neither a built-in nor a registered robot, or if a `RobotModel` is invalid.
    """
    if cfg.model is not None:
        return EXAMPLES.get(cfg.model.removeprefix(PREFIX)) if cfg.model.startswith(PREFIX) else None
    own = registered("robot")
    if twice := [name for name in own if name in ROBOTS]:
        raise ConfigError(f"robot.robot_type: {twice[0]!r} is built in; register your robot under another name")
    if cfg.robot_type in ROBOTS:
        return None
    known = (*ROBOTS, *own)
    if cfg.robot_type not in known:
        raise ConfigError(f"robot.robot_type: unknown {cfg.robot_type!r}; {did_you_mean(cfg.robot_type, known)}")
    return None if _arm_key(cfg) is not None else _checked(lookup("robot", cfg.robot_type).make(cfg), cfg.robot_type)


def robot_function(cfg: RobotConfig) -> Callable | None:
    """Return the registered function that describes the robot, or None if the robot is not registered."""
    if cfg.model is not None or cfg.robot_type in ROBOTS or cfg.robot_type not in registered("robot"):
        return None
    if _arm_key(cfg) is not None:
        return None
    return lookup("robot", cfg.robot_type).make


def _are_finite(numbers: Any, count: int | None = None) -> bool:
    """Return True for a tuple or list of finite numbers. If `count` is not None, it must be their number."""
    is_sequence = isinstance(numbers, tuple | list) and count in (None, len(numbers))
    return is_sequence and all(isinstance(number, int | float) and isfinite(number) for number in numbers)


def _checked(model: Any, name: str) -> RobotModel:
    """Return `model`, the `RobotModel` of a registered robot. Raise ConfigError if `model` is invalid."""
    where = f"robot.robot_type: the registered robot {name!r}"
    if not isinstance(model, RobotModel):
        raise ConfigError(f"{where} is a {type(model).__name__}, expected a RobotModel; return one in its function")
    if not isinstance(model.source, str):
        raise ConfigError(f"{where} has a source of type {type(model.source).__name__}, expected a str")
    if not isinstance(model.reach, int | float) or not 0.0 < model.reach < inf:
        raise ConfigError(f"{where} has the reach {model.reach!r}, expected a number above 0, in m")
    if not _are_finite(model.init_rot, 3):
        raise ConfigError(f"{where} has the init_rot {model.init_rot!r}, expected 3 angles in degrees")
    if not _are_finite(model.home):
        raise ConfigError(f"{where} has the home {model.home!r}, expected a tuple of finite numbers")
    if wrong := [joint for joint, positions in model.grip.items() if not _are_finite(positions, 2)]:
        found = f"the grip {model.grip[wrong[0]]!r} of joint {wrong[0]!r}"
        raise ConfigError(f"{where} has {found}, expected its positions in the open and in the closed gripper")
    if texts := [part for part, joints in model.parts.items() if isinstance(joints, str)]:
        raise ConfigError(f"{where} has a str as joints of the part {texts[0]!r}, expected a tuple of names")
    if unknown := [part for part in model.end_links if part not in (model.parts or ("arm",))]:
        raise ConfigError(f"{where} has an end_link of {unknown[0]!r}, but no such part; name one of its parts")
    return model


def _end_link(cfg: RobotConfig, part: str) -> tuple[str | None, str]:
    """Return the link that holds a part's end effector, and the config key that names the link, for error messages.

    The link is `end_link_name`, or the link in the `RobotModel`, or None.
    """
    link, model = cfg.solver_cfg[part].end_link_name if part in cfg.solver_cfg else None, described(cfg)
    if link is None and model is not None and part in model.end_links:
        return model.end_links[part], f"{_file_key(cfg)}, end_links"
    return link, f"robot.solver_cfg.{format_key(part)}.end_link_name"


def _file_key(cfg: RobotConfig) -> str:
    """Return the config key that names the robot, for error messages about its file."""
    own = "robot.model" if cfg.model is not None else f"robot.robot_type {cfg.robot_type!r}"
    return _arm_key(cfg) or own


def _is_fixed_to(link: Any, body: Any) -> bool:
    """Return True if a link is `body`, or if only fixed joints are between the link and `body`."""
    while link.name != body.name and not list(link.joints) and link.name != "world":
        link = link.parent
    return link.name == body.name


def _end_body(spec: Any, cfg: RobotConfig, part: str, joint: str, assembly: "_Assembly") -> Any:
    """Return the body that holds the end effector of a part: the link of `_end_link`, the flange, or `joint`'s body.

    For a robot from a file, the end effector of the part `arm` is at the flange if the arm has a hand. The same holds
    for a part with another name, if its last joint is also the last joint before the flange.
    """
    link, key = _end_link(cfg, part)
    is_of_hand, body, flange = joint in assembly.hand_joints, spec.joint(joint).parent, assembly.flange
    if link is None:
        ends_at_flange = flange is not None and not is_of_hand and (part == "arm" or _is_fixed_to(flange, body))
        return flange if ends_at_flange else body
    if assembly.kind == "built-in" and not is_of_hand:
        warnings.warn(
            f"{key}: has no meaning for a built-in robot, whose end effector is at its flange; remove it", stacklevel=2
        )
        return body
    links = {one.name: one for one in spec.bodies[1:] if is_of_hand == one.name.startswith(HAND)}
    if (name := HAND + link if is_of_hand else link) not in links:
        known = [one.removeprefix(HAND) for one in links]
        raise ConfigError(f"{key}: unknown {link!r}; {did_you_mean(link, known)}")
    return links[name]


def _add_tcp(spec: Any, part: str, body: Any, flange: tuple[float, float, float], tcp: Matrix, key: str) -> str:
    """Add a site to a body, at the end effector of a part of the robot, and return the name of the site."""
    quaternion = quaternion_of(tcp, f"robot.solver_cfg.{format_key(part)}.tcp")
    position, name = [a + row[3] for a, row in zip(flange, tcp[:3], strict=True)], f"{part}_tcp"
    if spec.site(name) is not None:
        raise ConfigError(f"{key}: the file has a site {name!r}, the name of the end effector; rename the site")
    body.add_site(name=name, pos=position, quat=quaternion, size=[0.01, 0.01, 0.01])
    return name


def _urdf_of(source: str, key: str, root: str = "", is_trusted: bool = False) -> Any:
    """Return the MjSpec of a URDF file. `source` is its path or its text. `spec_of` describes the other arguments."""
    if _is_text(source):
        return urdf.urdf_spec(source, Path.cwd(), key, is_trusted)
    path = Path(_existing(source, key, root))
    if not is_trusted:
        check_input(path, key)
    try:
        return urdf.urdf_spec(path.read_text(encoding="utf-8"), path.parent, key, is_trusted)
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {format_value(str(path))} is not in UTF-8; save it in UTF-8") from None


def _no_shapes(base: Any, tcp: dict[str, Matrix], has_hand: bool) -> None:
    """Do nothing, because the file already has the shapes of the robot."""


def _from_file(cfg: RobotConfig, drives: Mapping[str, Drive], is_trusted: bool, key: str) -> tuple[Any, Builtin]:
    """Read a robot from a URDF or MJCF file. `is_trusted` is True for the file of a registered robot.

    `key` is the config key that names the file, for error messages.

    If the config has no drive settings, a robot from an MJCF file has the actuators of the file. By default, the drives
    of a robot from a URDF file follow from the efforts of its joints.
    """
    source, root = cfg.model or "", os.environ.get("MENAGERIE_ROOT", "")
    if source.startswith(PREFIX):
        path = example_file(source.removeprefix(PREFIX), "robot.model")
        return _from_urdf(urdf.urdf_spec(path.read_text(), path.parent, "robot.model", is_trusted=True))
    if urdf.is_urdf(source):
        return _from_urdf(_urdf_of(source, key, root, is_trusted))
    return _from_mjcf(spec_of(source, key, root, is_trusted), cfg, drives, key)


def _as_described(built: Builtin, model: RobotModel) -> Builtin:
    """Return the robot of a file with the parts, end effectors, home position and gripper of its `RobotModel`."""
    if model.home and len(model.home) != len(built.joints):
        names = ", ".join(built.joints)
        raise ConfigError(
            f"robot: home has {len(model.home)} values for {len(built.joints)} joints: {names}; give one per joint"
        )
    if unknown := [name for name in model.grip if name not in built.joints]:
        raise ConfigError(f"robot: grip has the unknown joint {unknown[0]!r}; {did_you_mean(unknown[0], built.joints)}")
    parts = {name: _matching(patterns, built, "robot") for name, patterns in model.parts.items()}
    tcp, home = dict.fromkeys(model.end_links, NO_OFFSET), model.home or built.home
    return built._replace(parts=parts or built.parts, tcp=tcp, home=home, grip=model.grip)


def _from_urdf(spec: Any, part: str = "arm") -> tuple[Any, Builtin]:
    """Return the MjSpec of a URDF file and its `Builtin`, whose `joints` exclude joints that follow another joint."""
    following = {follower.name for follower in urdf.followers(spec)}
    joints = tuple(name for name in hinges_and_slides(spec) if name not in following)
    if not joints:
        raise ConfigError(f"robot: the URDF file of the {part} has no joint that moves; use another file")
    efforts, home = urdf.efforts_of(spec, joints), urdf.start_of(spec, joints)
    return spec, Builtin(_no_shapes, joints, {part: joints}, {}, {}, home, *urdf.default_gains(efforts), efforts)


def _with_rotors(spec: Any, cfg: RobotConfig, built: Builtin, joints: tuple[str, ...]) -> Builtin:
    """Add the inertia of rotors to joints of URDF files, and return the robot with new stiffness and damping.

    The inertia, the stiffness and the damping of `joints` follow from the efforts. All other joints do not change.
    """
    key = "robot.drive_pros.max_effort"
    efforts = dict(zip(built.joints, _per_joint(cfg.drive_pros.max_effort, built.max_effort, built, key), strict=True))
    if weak := [name for name in joints if efforts[name] <= 0.0]:
        raise ConfigError(f"{key}: joint {weak[0]!r} has no effort above 0; give one in robot.drive_pros.max_effort")
    urdf.add_rotors(spec, joints, tuple(efforts[name] for name in joints))
    stiffness, damping = urdf.default_gains(tuple(efforts.values()))
    gains = dict(zip(built.joints, zip(stiffness, damping, strict=True), strict=True))
    old = zip(built.joints, built.stiffness, built.damping, strict=True)
    rows = [gains[name] if name in joints else (k, d) for name, k, d in old]
    return built._replace(stiffness=tuple(k for k, _ in rows), damping=tuple(d for _, d in rows))


class _Assembly(NamedTuple):
    """Source of the arm, joints of the hand, and body that holds the hand.

    Attributes:
        kind: source of the arm.
        hand_joints: joints of the hand.
        flange: the body that holds the hand, for an arm from a file; None without a hand, or for a built-in arm.
    """

    kind: Literal["built-in", "URDF", "MJCF"]
    hand_joints: tuple[str, ...] = ()
    flange: Any = None


def _arm(cfg: RobotConfig, drives: Mapping[str, Drive], arm: Part | None) -> tuple[Any, Builtin, _Assembly]:
    """Return the MjSpec of an arm, its `Builtin` and its `_Assembly`. `arm` is the arm in `urdf_cfg`, or None."""
    if arm is not None and arm.source is not None:
        return *_from_urdf(_urdf_of(arm.source, f"{arm.key}.urdf_path")), _Assembly("URDF")
    model = described(cfg)
    if cfg.model is None and model is None:
        return *_builtin(cfg), _Assembly("built-in")
    is_registered, key = cfg.model is None, _file_key(cfg)
    if is_registered and model is not None:
        cfg = cfg.model_copy(update={"model": model.source})
    source = cfg.model or ""
    spec, built = _from_file(cfg, drives, is_registered, key)
    kind = "URDF" if source.startswith(PREFIX) or urdf.is_urdf(source) else "MJCF"
    return spec, built if model is None else _as_described(built, model), _Assembly(kind)


def _read_hand(cfg: RobotConfig, built: Builtin, hand: Part, assembly: _Assembly) -> tuple[Any, Builtin]:
    """Return the MjSpec of a hand and its `Builtin`. Raise ConfigError if the arm `built` does not support hands."""
    if assembly.kind == "MJCF":
        raise ConfigError(f"{hand.key}: an MJCF file cannot get a hand; add the hand to the file of the arm")
    if assembly.kind == "built-in" and "arm" not in built.flange:
        raise ConfigError(f"{hand.key}: the built-in {cfg.robot_type} has no flange for a hand; leave the hand out")
    if "hand" in built.parts:
        own = ", ".join(built.parts["hand"])
        raise ConfigError(f"{hand.key}: the arm has a hand of its own, with the joints {own}; remove this component")
    key = f"{hand.key}.urdf_path"
    spec, gripper = _from_urdf(_urdf_of(hand.source or "", key, is_trusted=hand.is_trusted), "hand")
    return spec, gripper._replace(grip=GRIPPER_GRIP) if hand.source == GRIPPER else gripper


def _attach(spec: Any, cfg: RobotConfig, built: Builtin, hand: Part, hand_spec: Any, assembly: _Assembly) -> _Assembly:
    """Attach a hand to the arm, and return the assembly. If the arm is from a file, the assembly gets its `flange`."""
    if assembly.kind == "built-in":
        joint, position = _mount(built, "arm", built.parts["arm"])
        attach_hand(spec, hand_spec, spec.joint(joint).parent, position, hand.transform, hand.key)
        return assembly
    flange = flange_of(spec, *_end_link(cfg, "arm"), hand.key)
    attach_hand(spec, hand_spec, flange, (0.0, 0.0, 0.0), hand.transform, hand.key)
    return assembly._replace(flange=flange)


def _with_hand(built: Builtin, hand: Builtin) -> Builtin:
    """Return the `Builtin` of an arm together with a hand. The joints of the hand come last."""
    joined = {name: getattr(built, name) + getattr(hand, name) for name in ("joints", "home", *_NUMBERS)}
    aliases = (*(built.aliases or built.joints), *(hand.aliases or hand.joints))
    return built._replace(parts=built.parts | hand.parts, aliases=aliases, grip=built.grip | hand.grip, **joined)


def _check_drive_settings(spec: Any, cfg: RobotConfig, drives: Mapping[str, Drive], key: str) -> bool:
    """Return True if `drive_pros` defines the drives of a robot from an MJCF file, and False if the file does.

    Raises: ConfigError if only some of the three settings are given, or if nothing defines the drives. ConfigError is
        also raised if action terms need the `drives`, but no setting is given.
    """
    given = [name for name in _NUMBERS if getattr(cfg.drive_pros, name) is not None]
    missing = [name for name in _NUMBERS if name not in given]
    file = "the file" if _is_text(cfg.model or "") else f"the file {format_value(cfg.model)}"
    if given and missing:
        fault = f"has {' and '.join(given)}, but no {' and no '.join(missing)}"
        raise ConfigError(f"robot.drive_pros: {fault}; give all three, or none to use the actuators of {key}")
    if drives and not given:
        joint, drive = next(iter(drives.items()))
        fault = f"is not set, but env.cfg.actions needs a {drive} drive at joint {joint!r}, which {file} lacks"
        raise ConfigError(f"robot.drive_pros: {fault}; give {', '.join(_NUMBERS)}")
    if not given and not spec.actuators:
        raise ConfigError(
            f"{key}: {file} has no actuators, and robot.drive_pros is not set; "
            f"give {', '.join(_NUMBERS)} in robot.drive_pros"
        )
    return bool(given)


def _from_mjcf(spec: Any, cfg: RobotConfig, drives: Mapping[str, Drive], key: str) -> tuple[Any, Builtin]:
    """Return the MjSpec of an MJCF file, with the drives of the config or of the file, and its `Builtin`.

    `key` is the config key that names the file, for error messages.
    """
    has_settings = _check_drive_settings(spec, cfg, drives, key)
    # The scene has its own light. If drive_pros is set, it replaces the actuators of the file.
    for element in (*spec.lights, *(spec.actuators if has_settings else ())):
        spec.delete(element)
    joints = hinges_and_slides(spec)
    if "" in joints:
        others = (mujoco().mjtJoint.mjJNT_FREE, mujoco().mjtJoint.mjJNT_BALL)
        body = next(joint.parent.name for joint in spec.joints if not joint.name and joint.type not in others)
        raise ConfigError(f"{key}: a hinge or slide of body {body!r} has no name; name each joint of the file")
    if free := [joint for joint in spec.joints if joint.type == mujoco().mjtJoint.mjJNT_FREE]:
        fault = f"body {free[0].parent.name!r} has a free joint, but the robot's base is fixed at robot.init_pos"
        remedy = "remove the joint, or use the file as the whole scene by giving its path as mjcf"
        raise ConfigError(f"{key}: {fault}; {remedy}")
    zeros = (0.0,) * len(joints)
    built = Builtin(_no_shapes, joints, {"arm": joints}, {}, {}, (), zeros, zeros, zeros)
    for name in _NUMBERS:
        numbers, where = getattr(cfg.drive_pros, name), f"robot.drive_pros.{name}"
        if not isinstance(numbers, dict):
            continue
        given = {joint for pattern in numbers for joint in _matching((pattern,), built, where)}
        if missing := [joint for joint in joints if joint not in given]:
            fault = f"has values for {', '.join(numbers) or 'no joint'}, but not for {', '.join(missing)}"
            raise ConfigError(f"{where}: {fault}; give one for each joint")
    return spec, built


def _builtin(cfg: RobotConfig) -> tuple[Any, Builtin]:
    spec = mujoco().MjSpec()
    spec.compiler.degree = False
    return spec, ROBOTS[cfg.robot_type]


def _parts(cfg: RobotConfig, built: Builtin) -> dict[str, tuple[str, ...]]:
    keys = {part: f"robot.control_parts.{format_key(part)}" for part in cfg.control_parts}
    parts = {part: _matching(names, built, keys[part]) for part, names in cfg.control_parts.items()} or built.parts
    for part in cfg.solver_cfg:
        if part not in parts:
            raise ConfigError(f"robot.solver_cfg: unknown part {part!r}; {did_you_mean(part, parts)}")
    return parts


def _fingers(spec: Any, joints: tuple[str, ...], followers: tuple[urdf.Follower, ...]) -> tuple[str, ...]:
    """Return the bodies that a hand's joints move. If there is only one such body, also return its parent."""
    moving = (*joints, *(follower.name for follower in followers if follower.leader in joints))
    bodies = list({body.name: body for body in (spec.joint(name).parent for name in moving)}.values())
    if len(bodies) == 1:
        bodies.append(bodies[0].parent)
    return tuple(body.name for body in bodies if body.name)


def start_rotation(cfg: RobotConfig) -> tuple[float, float, float]:
    """Return the default rotation of a robot's base (degrees)."""
    model = described(cfg)
    return (0.0, 0.0, 0.0) if model is None else model.init_rot


def _mount(built: Builtin, part: str, joints: tuple[str, ...]) -> tuple[str, tuple[float, float, float]]:
    """Return the joint whose body holds the end effector of a part, and the flange position in that body's frame.

    A part with the name of a built-in part ends at the same joint as the built-in part, even if it has fewer joints. A
    part with any other name ends at its last joint.
    """
    joint = built.parts[part][-1] if part in built.flange else joints[-1]
    flanges = (position for name, position in built.flange.items() if built.parts[name][-1] == joint)
    return joint, next(flanges, (0.0, 0.0, 0.0))


def _tool_poses(built: Builtin, poses: dict[str, Matrix], mounts: Mapping[str, tuple[str, Any]]) -> dict[str, Matrix]:
    """Return a dictionary that maps the name of each built-in part with a tool to the pose of the tool.

    `poses` maps parts to the poses of their end effectors, and `mounts` maps the same parts to results of `_mount`. A
    tool gets the pose of the end effector of the part that ends at the tool's joint. If several parts end at this
    joint, the part with the name of the built-in part is used, or else the last of these parts.
    """
    ends = {built.parts[name][-1]: name for name in built.flange}
    by_joint = {ends[joint]: poses[part] for part, (joint, _) in mounts.items() if joint in ends}
    return by_joint | {name: poses[name] for name in built.flange if name in poses}


def robot_spec(cfg: RobotConfig, drives: Mapping[str, Drive]) -> tuple[Any, Robot, tuple[float, ...]]:
    """Return the MjSpec of a robot, the `Robot` with its names, and the joint positions at the start of an episode.

    The tuple of joint positions is empty if an MJCF file defines the positions.
    """
    arm, hand = component(cfg, "arm"), component(cfg, "hand")
    if arm is not None and arm.builtin is not None:
        cfg = cfg.model_copy(update={"robot_type": arm.builtin})
    spec, built, assembly = _arm(cfg, drives, arm)
    of_files, hand_spec = (built.joints if assembly.kind == "URDF" else ()), None
    if hand is not None:
        hand_spec, gripper = _read_hand(cfg, built, hand, assembly)
        built, of_files = _with_hand(built, gripper), (*of_files, *gripper.joints)
        assembly = assembly._replace(hand_joints=gripper.joints)
    parts = _parts(cfg, built)
    for name in drives:
        if name not in built.joints:
            raise ConfigError(f"actions: the robot has no joint {name!r}; {did_you_mean(name, built.joints)}")
    poses = {part: pose for part, pose in built.tcp.items() if part in parts}
    poses |= {part: solver.tcp for part, solver in cfg.solver_cfg.items()}
    mounts = {part: _mount(built, part, parts[part]) for part in poses}
    built.build(spec.worldbody, _tool_poses(built, poses, mounts), hand is not None)
    if hand is not None:
        assembly = _attach(spec, cfg, built, hand, hand_spec, assembly)
    if of_files:
        built = _with_rotors(spec, cfg, built, of_files)
    if not spec.actuators:
        _add_drives(spec, cfg.drive_pros, built, drives)
    add_force_sensors(spec, built.joints, _file_key(cfg))
    ends = {part: _end_body(spec, cfg, part, joint, assembly) for part, (joint, _) in mounts.items()}
    flanges = {part: position for part, (_, position) in mounts.items()}
    tcp = {part: _add_tcp(spec, part, ends[part], flanges[part], poses[part], _file_key(cfg)) for part in poses}
    home = built.home if cfg.init_qpos is None else cfg.init_qpos
    if cfg.init_qpos is not None and len(home) != len(built.joints):
        names = ", ".join(built.joints)
        raise ConfigError(
            f"robot.init_qpos: {len(home)} values for {len(built.joints)} joints: {names}; give one value per joint"
        )
    followers = urdf.followers(spec) if of_files else ()
    fingers = _fingers(spec, parts.get("hand", ()), followers)
    max_velocity = _speed_limits(cfg.drive_pros, built)
    return spec, Robot(built.joints, parts, tcp, followers, built.grip, fingers, max_velocity), home
