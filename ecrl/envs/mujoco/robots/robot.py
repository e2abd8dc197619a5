"""Build the robot of a scene from a built-in robot or an MJCF file, with drives, force sensors and end effectors."""

import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from ecrl.config.model import format_key, format_value
from ecrl.envs.mujoco.robots.arm import ROBOTS, Builtin, Matrix
from ecrl.envs.mujoco.scene.config import DriveConfig, PerJoint, RobotConfig
from ecrl.envs.mujoco.scene.models import mujoco
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean

Drive = Literal["position", "velocity", "force"]
"""Kind of drive. A control is a target position (m or rad), a target velocity (m/s or rad/s) or a force (N or N m)."""


class Robot(NamedTuple):
    """Names of a robot's joints and end effector sites in the model.

    `joints` names all joints. A list in the config that has one value per joint has the same order. `parts` maps each
    part to the part's joints. `tcp` maps each part that has an end effector to the end effector's site.
    """

    joints: tuple[str, ...]
    parts: dict[str, tuple[str, ...]]
    tcp: dict[str, str]

    def with_prefix(self, prefix: str) -> "Robot":
        """Return a copy of the robot with `prefix` before all its names, as in the model of a scene."""
        parts = {part: tuple(prefix + name for name in names) for part, names in self.parts.items()}
        tcp = {part: prefix + site for part, site in self.tcp.items()}
        return Robot(tuple(prefix + name for name in self.joints), parts, tcp)


def spec_of(source: str, key: str, root: str = "") -> Any:
    """Return the MjSpec of an MJCF file.

    `source` is the path or the text of the file. A relative path is also searched below the folder `root`, if `root` is
    not empty.

    Raises: ConfigError that begins with `key`, if the file does not exist or is not an MJCF file.
    """
    spec, paths = mujoco().MjSpec, [source, *([os.path.join(root, source)] if root else [])]
    try:
        if source.lstrip().startswith("<"):
            return spec.from_string(source)
        if path := next(filter(os.path.isfile, paths), None):
            return spec.from_file(path)
    except ValueError as error:
        raise ConfigError(f"{key}: {' '.join(str(error).split())}") from None
    raise ConfigError(
        f"{key}: no such file {format_value(source)}{f', nor below MENAGERIE_ROOT, {root}' if root else ''}"
    )


def hinges_and_slides(spec: Any) -> tuple[str, ...]:
    """Return the names of all hinge and slide joints of an MjSpec, in the order of the joints in the MjSpec."""
    kinds = (mujoco().mjtJoint.mjJNT_HINGE, mujoco().mjtJoint.mjJNT_SLIDE)
    return tuple(joint.name for joint in spec.joints if joint.type in kinds)


def add_force_sensors(spec: Any, joints: tuple[str, ...], key: str) -> None:
    """Add a sensor `<joint>_force` for the drive force of each joint, unless the file already has this sensor.

    Raises: ConfigError that begins with `key`, if the file has a different sensor with that name.
    """
    kind, joint = mujoco().mjtSensor.mjSENS_JOINTACTFRC, mujoco().mjtObj.mjOBJ_JOINT
    for name in joints:
        sensor = spec.sensor(f"{name}_force")
        if sensor is None:
            spec.add_sensor(name=f"{name}_force", type=kind, objtype=joint, objname=name)
        elif (sensor.type, sensor.objname, sensor.cutoff) != (kind, name, 0.0):
            expected = f"a jointactuatorfrc of joint {name!r} without cutoff, the force of its drive"
            raise ConfigError(f"{key}: sensor {sensor.name!r} is not {expected}; rename it")


def _per_joint(
    values: PerJoint | None, defaults: tuple[float, ...], joints: tuple[str, ...], key: str
) -> tuple[float, ...]:
    """Expand a config value to one value per joint. Missing values are replaced by the robot's defaults."""
    if isinstance(values, dict):
        for name in values:
            if name not in joints:
                raise ConfigError(f"{key}: unknown joint {name!r}; {did_you_mean(name, joints)}")
        return tuple(values.get(name, default) for name, default in zip(joints, defaults, strict=True))
    if isinstance(values, tuple) and len(values) < len(joints):
        raise ConfigError(f"{key}: {len(values)} values for {len(joints)} joints: {', '.join(joints)}")
    if values is None:
        return defaults
    return values[: len(joints)] if isinstance(values, tuple) else (values,) * len(joints)


def _add_drives(spec: Any, cfg: DriveConfig, built: Builtin, drives: Mapping[str, Drive]) -> None:
    key, joints = "robot.drive_pros", built.joints
    numbers = [
        _per_joint(getattr(cfg, name), getattr(built, name), joints, f"{key}.{name}")
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


def _add_tcp(spec: Any, part: str, joint: str, flange: tuple[float, float, float], tcp: Matrix) -> str:
    """Add a site at the end effector of a part to the body of `joint`, and return the name of the site."""
    quaternion, rotation = np.zeros(4), np.array([row[:3] for row in tcp[:3]])
    if not np.allclose(rotation @ rotation.T, np.eye(3), atol=1e-3) or np.linalg.det(rotation) < 0.0:
        raise ConfigError(f"robot.solver_cfg.{part}.tcp: the first three columns are not a rotation")
    if tcp[3] != (0.0, 0.0, 0.0, 1.0):
        raise ConfigError(f"robot.solver_cfg.{part}.tcp: the last row is {list(tcp[3])}, expected [0, 0, 0, 1]")
    mujoco().mju_mat2Quat(quaternion, rotation.flatten())
    position, name = [a + row[3] for a, row in zip(flange, tcp[:3], strict=True)], f"{part}_tcp"
    if spec.site(name) is not None:
        raise ConfigError(f"robot.mjcf: the file has a site {name!r}, the name of the end effector; rename the site")
    spec.joint(joint).parent.add_site(name=name, pos=position, quat=quaternion, size=[0.01, 0.01, 0.01])
    return name


def _from_file(cfg: RobotConfig, drives: Mapping[str, Drive]) -> tuple[Any, Builtin]:
    """Read a robot from an MJCF file. If the config has no drive settings, the actuators of the file are kept."""
    spec = spec_of(cfg.mjcf or "", "robot.mjcf", os.environ.get("MENAGERIE_ROOT", ""))
    drive_cfg = cfg.drive_pros
    settings = (drive_cfg.stiffness, drive_cfg.damping, drive_cfg.max_effort)
    set_count = sum(value is not None for value in settings)
    if 0 < set_count < 3 or (drives and not set_count):
        raise ConfigError("robot.drive_pros: give stiffness, damping and max_effort for the robot of robot.mjcf")
    if not set_count and not spec.actuators:
        raise ConfigError("robot.mjcf: the file has no actuators; give robot.drive_pros")
    for element in (*spec.lights, *(spec.actuators if set_count else ())):  # the scene has its own light
        spec.delete(element)
    joints = hinges_and_slides(spec)
    if "" in joints:
        raise ConfigError("robot.mjcf: a hinge or slide of the file has no name; name each joint")
    if any(joint.type == mujoco().mjtJoint.mjJNT_FREE for joint in spec.joints):
        fault = "a body of the file has a free joint, but the robot's base is fixed at robot.init_pos"
        remedy = "remove the joint, or use the file as the whole scene by giving its path as mjcf"
        raise ConfigError(f"robot.mjcf: {fault}; {remedy}")
    for name in ("stiffness", "damping", "max_effort"):
        numbers = getattr(drive_cfg, name)
        if isinstance(numbers, dict) and (missing := [joint for joint in joints if joint not in numbers]):
            raise ConfigError(f"robot.drive_pros.{name}: no value for {', '.join(missing)}; give one for each joint")
    zeros = (0.0,) * len(joints)
    return spec, Builtin(lambda body, tcp: None, joints, {"arm": joints}, {}, {}, (), zeros, zeros, zeros)


def _builtin(cfg: RobotConfig) -> tuple[Any, Builtin]:
    if cfg.robot_type not in ROBOTS:
        raise ConfigError(f"robot.robot_type: unknown {cfg.robot_type!r}; {did_you_mean(cfg.robot_type, ROBOTS)}")
    spec = mujoco().MjSpec()
    spec.compiler.degree = False
    return spec, ROBOTS[cfg.robot_type]


def _parts(cfg: RobotConfig, built: Builtin) -> dict[str, tuple[str, ...]]:
    parts = dict(cfg.control_parts) or built.parts
    for part, names in parts.items():
        key = f"robot.control_parts.{format_key(part)}"
        for i, name in enumerate(names):
            if name not in built.joints:
                raise ConfigError(f"{key}: unknown {name!r}; {did_you_mean(name, built.joints)}")
            if name in names[:i]:
                raise ConfigError(f"{key}: names joint {name!r} twice; name the joint once")
    for part in cfg.solver_cfg:
        if part not in parts:
            raise ConfigError(f"robot.solver_cfg: unknown part {part!r}; {did_you_mean(part, parts)}")
    return parts


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

    A tool gets the pose of the configured part that ends at the tool's joint. If several parts end at the tool's joint,
    the part with the name of the built-in part is used.
    """
    ends = {built.parts[name][-1]: name for name in built.flange}
    by_joint = {ends[joint]: poses[part] for part, (joint, _) in mounts.items() if joint in ends}
    return by_joint | {name: poses[name] for name in built.flange if name in poses}


def robot_spec(cfg: RobotConfig, drives: Mapping[str, Drive]) -> tuple[Any, Robot, tuple[float, ...]]:
    """Return the MjSpec of a robot, the `Robot` with its names, and the joint positions at the start of an episode.

    The tuple of joint positions is empty if the MJCF file defines the positions.
    """
    spec, built = _from_file(cfg, drives) if cfg.mjcf is not None else _builtin(cfg)
    parts = _parts(cfg, built)
    for name in drives:
        if name not in built.joints:
            raise ConfigError(f"actions: the robot has no joint {name!r}; {did_you_mean(name, built.joints)}")
    poses = {part: pose for part, pose in built.tcp.items() if part in parts}
    poses |= {part: solver.tcp for part, solver in cfg.solver_cfg.items()}
    mounts = {part: _mount(built, part, parts[part]) for part in poses}
    built.build(spec.worldbody, _tool_poses(built, poses, mounts))
    if not spec.actuators:
        _add_drives(spec, cfg.drive_pros, built, drives)
    add_force_sensors(spec, built.joints, "robot.mjcf")
    tcp = {part: _add_tcp(spec, part, *mounts[part], poses[part]) for part in poses}
    home = built.home if cfg.init_qpos is None else cfg.init_qpos
    if 0 < len(home) < len(built.joints) or (cfg.init_qpos is not None and not home):
        raise ConfigError(f"robot.init_qpos: {len(home)} values for {len(built.joints)} joints")
    return spec, Robot(built.joints, parts, tcp), home[: len(built.joints)]
