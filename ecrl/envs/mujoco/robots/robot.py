"""The robot of a scene: built in or from an MJCF file, with drives, force sensors and end effectors by the config."""

import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from ecrl.config.model import key_text, shown
from ecrl.envs.mujoco.robots.arm import ROBOTS, Builtin, Matrix
from ecrl.envs.mujoco.scene.config import DriveConfig, PerJoint, RobotConfig
from ecrl.envs.mujoco.scene.models import mujoco
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean

Drive = Literal["position", "velocity", "force"]
"""What the control of a joint is: a target position, m or rad; a target velocity, m/s or rad/s; a force, N or N m."""


class Robot(NamedTuple):
    """Names in the model: joints in the order of the config's lists, joints by part, sites of the end effectors."""

    joints: tuple[str, ...]
    parts: dict[str, tuple[str, ...]]
    tcp: dict[str, str]

    def within(self, prefix: str) -> "Robot":
        """The same in a scene where all names of the robot begin so."""
        parts = {part: tuple(prefix + name for name in names) for part, names in self.parts.items()}
        tcp = {part: prefix + site for part, site in self.tcp.items()}
        return Robot(tuple(prefix + name for name in self.joints), parts, tcp)


def spec_of(given: str, told: str, root: str = "") -> Any:
    """A MjSpec of an MJCF file, or of its text; `root` is a second folder to look in."""
    spec, paths = mujoco().MjSpec, [given, *([os.path.join(root, given)] if root else [])]
    try:
        if given.lstrip().startswith("<"):
            return spec.from_string(given)
        if path := next(filter(os.path.isfile, paths), None):
            return spec.from_file(path)
    except ValueError as error:
        raise ConfigError(f"{told}: {' '.join(str(error).split())}") from None
    raise ConfigError(f"{told}: no such file {shown(given)}{f', nor below MENAGERIE_ROOT, {root}' if root else ''}")


def moving(spec: Any) -> tuple[str, ...]:
    """The hinges and slides of a MjSpec, in its order."""
    kinds = (mujoco().mjtJoint.mjJNT_HINGE, mujoco().mjtJoint.mjJNT_SLIDE)
    return tuple(joint.name for joint in spec.joints if joint.type in kinds)


def add_force_sensors(spec: Any, joints: tuple[str, ...], told: str) -> None:
    """Sensors of what the drives exert on joints, by the names `<joint>_force`; a file may have them already."""
    kind, joint = mujoco().mjtSensor.mjSENS_JOINTACTFRC, mujoco().mjtObj.mjOBJ_JOINT
    for name in joints:
        own = spec.sensor(f"{name}_force")
        if own is None:
            spec.add_sensor(name=f"{name}_force", type=kind, objtype=joint, objname=name)
        elif (own.type, own.objname, own.cutoff) != (kind, name, 0.0):
            expected = f"what the drive of joint {name!r} exerts, a jointactuatorfrc without cutoff"
            raise ConfigError(f"{told}: sensor {own.name!r} is not {expected}; rename it")


def _per_joint(given: PerJoint | None, own: tuple[float, ...], joints: tuple[str, ...], told: str) -> tuple[float, ...]:
    """A number for each joint."""
    if isinstance(given, dict):
        for name in given:
            if name not in joints:
                raise ConfigError(f"{told}: unknown joint {name!r}; {did_you_mean(name, joints)}")
        return tuple(given.get(name, number) for name, number in zip(joints, own, strict=True))
    if isinstance(given, tuple) and len(given) < len(joints):
        raise ConfigError(f"{told}: {len(given)} numbers for {len(joints)} joints: {', '.join(joints)}")
    return own if given is None else given[: len(joints)] if isinstance(given, tuple) else (given,) * len(joints)


def _add_drives(spec: Any, cfg: DriveConfig, built: Builtin, drives: Mapping[str, Drive]) -> None:
    told, joints = "robot.drive_pros", built.joints
    numbers = [
        _per_joint(getattr(cfg, name), getattr(built, name), joints, f"{told}.{name}")
        for name in ("stiffness", "damping", "max_effort")
    ]
    for name, stiffness, damping, effort in zip(joints, *numbers, strict=True):
        if effort <= 0.0:
            raise ConfigError(f"{told}.max_effort: {effort} of joint {name!r}, expected more than 0")
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
    """A site at the end effector of a part, on the body of a joint."""
    quaternion, rotation = np.zeros(4), np.array([row[:3] for row in tcp[:3]])
    if not np.allclose(rotation @ rotation.T, np.eye(3), atol=1e-3) or np.linalg.det(rotation) < 0.0:
        raise ConfigError(f"robot.solver_cfg.{part}.tcp: its first three columns are no rotation")
    if tcp[3] != (0.0, 0.0, 0.0, 1.0):
        raise ConfigError(f"robot.solver_cfg.{part}.tcp: its last row is {list(tcp[3])}, expected [0, 0, 0, 1]")
    mujoco().mju_mat2Quat(quaternion, rotation.flatten())
    place, name = [a + row[3] for a, row in zip(flange, tcp[:3], strict=True)], f"{part}_tcp"
    if spec.site(name) is not None:
        raise ConfigError(f"robot.mjcf: a site of the file is called {name!r}, as the end effector is to be; rename it")
    spec.joint(joint).parent.add_site(name=name, pos=place, quat=quaternion, size=[0.01, 0.01, 0.01])
    return name


def _foreign(cfg: RobotConfig, drives: Mapping[str, Drive]) -> tuple[Any, Builtin]:
    """A robot from an MJCF file; without drives in the config its own actuators stay."""
    spec, own = spec_of(cfg.mjcf or "", "robot.mjcf", os.environ.get("MENAGERIE_ROOT", "")), cfg.drive_pros
    given = [value for value in (own.stiffness, own.damping, own.max_effort) if value is not None]
    if 0 < len(given) < 3 or (drives and not given):
        raise ConfigError("robot.drive_pros: give stiffness, damping and max_effort for the robot of robot.mjcf")
    if not given and not spec.actuators:
        raise ConfigError("robot.mjcf: the file has no actuators; give robot.drive_pros")
    for part in (*spec.lights, *(spec.actuators if given else ())):  # light is the scene's
        spec.delete(part)
    joints = moving(spec)
    if "" in joints:
        raise ConfigError("robot.mjcf: a hinge or slide of the file has no name; give each one")
    if any(joint.type == mujoco().mjtJoint.mjJNT_FREE for joint in spec.joints):
        told = "a body of the file has a free joint, but a robot stands where robot.init_pos says"
        raise ConfigError(f"robot.mjcf: {told}; take the joint out, or give the file as the scene, mjcf")
    for name in ("stiffness", "damping", "max_effort"):
        numbers = getattr(own, name)
        if isinstance(numbers, dict) and (rest := [joint for joint in joints if joint not in numbers]):
            raise ConfigError(f"robot.drive_pros.{name}: no number for {', '.join(rest)}; give one for each joint")
    none = (0.0,) * len(joints)
    return spec, Builtin(lambda body, tcp: None, joints, {"arm": joints}, {}, {}, (), none, none, none)


def _builtin(cfg: RobotConfig) -> tuple[Any, Builtin]:
    if cfg.robot_type not in ROBOTS:
        raise ConfigError(f"robot.robot_type: unknown {cfg.robot_type!r}; {did_you_mean(cfg.robot_type, ROBOTS)}")
    spec = mujoco().MjSpec()
    spec.compiler.degree = False
    return spec, ROBOTS[cfg.robot_type]


def _parts(cfg: RobotConfig, built: Builtin) -> dict[str, tuple[str, ...]]:
    parts = dict(cfg.control_parts) or built.parts
    for part, names in parts.items():
        told = f"robot.control_parts.{key_text(part)}"
        for i, name in enumerate(names):
            if name not in built.joints:
                raise ConfigError(f"{told}: unknown {name!r}; {did_you_mean(name, built.joints)}")
            if name in names[:i]:
                raise ConfigError(f"{told}: names joint {name!r} twice; name it once")
    for part in cfg.solver_cfg:
        if part not in parts:
            raise ConfigError(f"robot.solver_cfg: unknown part {part!r}; {did_you_mean(part, parts)}")
    return parts


def _mount(built: Builtin, part: str, joints: tuple[str, ...]) -> tuple[str, tuple[float, float, float]]:
    """The joint on whose body the end effector of a part is, and where its flange is in the frame of that body.

    The built-in tool stays at the end of the arm, whichever of its joints a config leaves to its part; a part of
    another name ends at its last joint.
    """
    joint = built.parts[part][-1] if part in built.flange else joints[-1]
    places = (place for own, place in built.flange.items() if built.parts[own][-1] == joint)
    return joint, next(places, (0.0, 0.0, 0.0))


def _tools(built: Builtin, poses: dict[str, Matrix], mounts: Mapping[str, tuple[str, Any]]) -> dict[str, Matrix]:
    """Poses of the built-in tools by built-in part: of a part that ends where the tool is, called so or otherwise."""
    ends = {built.parts[own][-1]: own for own in built.flange}
    named = {ends[joint]: poses[part] for part, (joint, _) in mounts.items() if joint in ends}
    return named | {own: poses[own] for own in built.flange if own in poses}


def robot_spec(cfg: RobotConfig, drives: Mapping[str, Drive]) -> tuple[Any, Robot, tuple[float, ...]]:
    """A MjSpec of the robot, its names, and its joint positions at the start, empty where the file says them."""
    spec, built = _foreign(cfg, drives) if cfg.mjcf is not None else _builtin(cfg)
    parts = _parts(cfg, built)
    for name in drives:
        if name not in built.joints:
            raise ConfigError(f"actions: the robot has no joint {name!r}; {did_you_mean(name, built.joints)}")
    poses = {part: own for part, own in built.tcp.items() if part in parts}
    poses |= {part: solver.tcp for part, solver in cfg.solver_cfg.items()}
    mounts = {part: _mount(built, part, parts[part]) for part in poses}
    built.build(spec.worldbody, _tools(built, poses, mounts))
    if not spec.actuators:
        _add_drives(spec, cfg.drive_pros, built, drives)
    add_force_sensors(spec, built.joints, "robot.mjcf")
    tcp = {part: _add_tcp(spec, part, *mounts[part], poses[part]) for part in poses}
    home = built.home if cfg.init_qpos is None else cfg.init_qpos
    if 0 < len(home) < len(built.joints) or (cfg.init_qpos is not None and not home):
        raise ConfigError(f"robot.init_qpos: {len(home)} numbers for {len(built.joints)} joints")
    return spec, Robot(built.joints, parts, tcp), home[: len(built.joints)]
