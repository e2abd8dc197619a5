"""Build the MuJoCo model of a scene from its config.

A scene consists of a robot, objects, and either a floor or the content of an MJCF file.
"""

from collections.abc import Mapping, Sequence
from math import inf, nan, radians
from typing import Any, NamedTuple

import numpy as np

from ecrl.envs.mujoco.robots.robot import (
    Drive,
    Robot,
    add_force_sensors,
    hinges_and_slides,
    robot_spec,
    spec_of,
    start_rotation,
)
from ecrl.envs.mujoco.scene.config import LightConfig, RigidObjectConfig, SceneConfig
from ecrl.envs.mujoco.scene.models import SpeedLimit, control_per_target, is_linear_in_control, mujoco
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean

_TOUCH = {"contype": 1, "conaffinity": 3, "condim": 4}  # objects collide with everything, including robots
_ASIDE = np.array([1e-3, 1e-3, 1e-3])  # in m; an arbitrary offset from the origin
_NET_FORCE = [2, 3, 1]  # settings of a contact sensor that reads the sum of all contact forces
_LARGEST_STIFFNESS = 4.0  # h^2 stiffness / inertia, above which explicit integration with the time step h is unstable
_SLACK = 1e-6  # tolerance (rad or m) for a start position that equals a joint limit except for rounding


class Scene(NamedTuple):
    """A scene: the `MjModel`, the `MjData` at the start of an episode, the robot, and the speed limits."""

    model: Any
    data: Any
    robot: Robot
    speed_limits: tuple[SpeedLimit, ...] = ()


def _quaternion(degrees: tuple[float, float, float]) -> np.ndarray:
    """Convert angles in degrees about x, the rotated y and the rotated z to the quaternion of the rotation Rx Ry Rz."""
    quaternion = np.zeros(4)
    mujoco().mju_euler2Quat(quaternion, np.array([radians(x) for x in degrees]), "xyz")
    return quaternion


def _add_object(spec: Any, cfg: RigidObjectConfig) -> None:
    shape, kinds = cfg.shape, mujoco().mjtGeom
    kind, size = {
        "Cube": (kinds.mjGEOM_BOX, [edge / 2 for edge in shape.size or ()]),
        "Sphere": (kinds.mjGEOM_SPHERE, [shape.radius, 0.0, 0.0]),
        "Cylinder": (kinds.mjGEOM_CYLINDER, [shape.radius, (shape.height or 0.0) / 2, 0.0]),
    }[shape.shape_type]
    body = spec.worldbody.add_body(name=cfg.uid, pos=list(cfg.init_pos), quat=_quaternion(cfg.init_rot))
    body.mocap = cfg.body_type == "kinematic"
    body.gravcomp = 0.0 if cfg.attrs.has_gravity else 1.0
    if cfg.body_type == "dynamic":
        body.add_joint(name=cfg.uid, type=mujoco().mjtJoint.mjJNT_FREE)
    friction = [cfg.attrs.static_friction, 0.005, 0.0001]
    # with priority 1, MuJoCo uses the object's friction in contacts with the floor and the robot
    attributes = {"mass": cfg.attrs.mass, "friction": friction, "priority": 1, "rgba": cfg.color}
    body.add_geom(name=cfg.uid, type=kind, size=size, **attributes, **_TOUCH)


def _add_contact_sensors(spec: Any, fingers: tuple[str, ...], objects: list[RigidObjectConfig]) -> None:
    """Add sensors for the forces of fingers on dynamic objects, in the world frame (N).

    The sensor of a finger counts the contacts of the finger's body and of all bodies attached to this body, such as the
    pads of the fingertip. If another finger is attached to the finger's body, the sensor counts only the contacts of
    the finger's body.
    """
    kinds, sensor = mujoco().mjtObj, mujoco().mjtSensor.mjSENS_CONTACT
    for finger in fingers:
        has_fingers = any(spec.body(other) in _bodies_below(spec.body(finger)) for other in fingers)
        part = {"objtype": kinds.mjOBJ_BODY if has_fingers else kinds.mjOBJ_XBODY, "objname": finger}
        for item in (item for item in objects if item.body_type == "dynamic"):
            name, end = contact_sensor(finger, item.uid), {"reftype": kinds.mjOBJ_BODY, "refname": item.uid}
            spec.add_sensor(name=name, type=sensor, intprm=_NET_FORCE, **part, **end)


def _bodies_below(body: Any) -> list[Any]:
    """Return all descendants of a body, without the body itself."""
    return [below for child in body.bodies for below in (child, *_bodies_below(child))]


def contact_sensor(finger: str, uid: str) -> str:
    """Return the name of the sensor for the force of a finger on an object."""
    return f"{finger}/{uid}_contact"


def _set_damping(model: Any, cfg: RigidObjectConfig) -> None:
    """Set the damping coefficients of a free body so that the body's velocities decay at the rates in the config."""
    body, attrs = model.body(cfg.uid), cfg.attrs
    first = int(body.dofadr[0])
    model.dof_damping[first : first + 3] = attrs.linear_damping * body.mass
    model.dof_damping[first + 3 : first + 6] = attrs.angular_damping * body.inertia


def _speed_limits(model: Any, cfg: SceneConfig, robot: Robot) -> tuple[SpeedLimit, ...]:
    """Return the speed limits of the robot's joints and of the dynamic objects."""
    joints = ((model.joint(name), largest) for name, largest in robot.max_velocity.items())
    limits = [SpeedLimit(int(joint.dofadr[0]), int(joint.qposadr[0]), 1, largest) for joint, largest in joints]
    for item in (item for item in (*cfg.rigid_object, *cfg.background) if item.body_type == "dynamic"):
        joint = model.joint(item.uid)
        dof, position = int(joint.dofadr[0]), int(joint.qposadr[0])
        if item.attrs.max_linear_velocity is not None:
            limits.append(SpeedLimit(dof, position, 3, item.attrs.max_linear_velocity))
        if item.attrs.max_angular_velocity is not None:
            limits.append(SpeedLimit(dof + 3, None, 3, item.attrs.max_angular_velocity))
    return tuple(limits)


def _set_light(spec: Any, cfg: LightConfig) -> None:
    """Replace all lights of the scene with one directional light, and set the ambient light."""
    for light in list(spec.lights):
        spec.delete(light)
    directional = mujoco().mjtLightType.mjLIGHT_DIRECTIONAL
    attributes = {"dir": list(cfg.direction), "diffuse": list(cfg.color), "castshadow": False}
    spec.worldbody.add_light(pos=[0.0, 0.0, 4.0], type=directional, **attributes)
    spec.visual.headlight.ambient, spec.visual.headlight.diffuse = list(cfg.ambient), [0.0, 0.0, 0.0]


def _floor() -> Any:
    """Return an MjSpec that contains a floor and has physics options for stiff drives."""
    spec, plane = mujoco().MjSpec(), mujoco().mjtGeom.mjGEOM_PLANE
    spec.option.timestep, spec.option.iterations = 0.01, 20
    spec.option.integrator = mujoco().mjtIntegrator.mjINT_IMPLICITFAST
    spec.worldbody.add_geom(name="floor", type=plane, size=[3.0, 3.0, 0.1], rgba=[0.9, 0.9, 0.88, 1.0], **_TOUCH)
    return spec


def _set_options(spec: Any, cfg: SceneConfig) -> None:
    option, reset = spec.option, mujoco().mjtDisableBit.mjDSBL_AUTORESET
    option.timestep = cfg.physics.dt or option.timestep
    option.iterations = cfg.physics.iterations or option.iterations
    # disable MuJoCo's automatic reset, so that callers can detect from the state that a simulation diverged
    option.disableflags = int(option.disableflags) | int(reset)


def _add_robot(
    spec: Any, cfg: SceneConfig, drives: Mapping[str, Drive], has_movable_base: bool
) -> tuple[Robot, tuple[float, ...]]:
    """Add the robot that the config describes to an MjSpec.

    If the config has no robot, the robot consists of the joints that the actuators of the MJCF file drive.

    Returns: the robot, and a tuple of the robot's joint positions at the start. The tuple is empty if an MJCF file
        defines the positions.
    """
    if cfg.robot is None:
        on_joint = mujoco().mjtTrn.mjTRN_JOINT
        known, targets = hinges_and_slides(spec), (a.target for a in spec.actuators if a.trntype == on_joint)
        joints = tuple(dict.fromkeys(name for name in targets if name in known))
        add_force_sensors(spec, joints, "mjcf")
        return Robot(joints, {"arm": joints} if joints else {}, {}), ()
    child_spec, robot, home = robot_spec(cfg.robot, drives)
    base = spec.worldbody.add_body(name=cfg.robot.uid, pos=list(cfg.robot.init_pos))
    rotation = cfg.robot.init_rot or start_rotation(cfg.robot)
    base.quat, base.mocap = _quaternion(rotation), has_movable_base
    prefix = f"{cfg.robot.uid}/"
    spec.attach(child_spec, frame=base.add_frame(), prefix=prefix)
    return robot.with_prefix(prefix), home


def _with_inertia_of_geoms(spec: Any) -> None:
    """Replace inertiafromgeom="true" in an MJCF file with "auto", so that bodies can get their own inertia later.

    With "true", MuJoCo ignores all inertial elements, so the function removes all inertial elements.
    """
    kinds = mujoco().mjtInertiaFromGeom
    if spec.compiler.inertiafromgeom == kinds.mjINERTIAFROMGEOM_TRUE:
        spec.compiler.inertiafromgeom = kinds.mjINERTIAFROMGEOM_AUTO
        for body in spec.bodies:
            body.explicitinertial, body.ipos = False, [nan] * 3  # NaN: no inertial element
            body.fullinertia = [nan] * 6


def _compiled(spec: Any, offset: Sequence[str]) -> Any:
    """Compile an MjSpec so that the centres of mass of the bodies in `offset` may move later.

    MuJoCo skips terms of the equations of motion if a body's centre of mass is at the body's origin. Each body in
    `offset` is therefore compiled with a shifted centre of mass. Then the centre of mass is moved back.
    """
    if not offset:
        return spec.compile()
    total, spec.compiler.settotalmass = spec.compiler.settotalmass, -1.0  # -1: do not rescale masses to a total
    model = spec.compile()
    spec.compiler.settotalmass = total
    for name in offset:
        body, mass = spec.body(name), model.body(name)
        body.explicitinertial, body.mass, body.inertia = True, float(mass.mass[0]), list(mass.inertia)
        body.ipos, body.iquat = [*(mass.ipos + _ASIDE)], list(mass.iquat)
    general = spec.compile()
    for name in offset:
        general.body(name).ipos[:] = model.body(name).ipos
    mujoco().mj_setConst(general, mujoco().MjData(general))
    return general


def build(
    cfg: SceneConfig,
    drives: Mapping[str, Drive] | None = None,
    offset: Sequence[str] = (),
    has_movable_base: bool = False,
) -> Scene:
    """Build the MuJoCo model of a scene.

    Args:
        cfg: config of the scene.
        drives: a dictionary that maps joint names to kinds of drive. A joint that is not in the dictionary has a
            position drive.
        offset: names of the bodies whose centres of mass may move later.
        has_movable_base: True if the base of the robot may move later. The base is then a mocap body.

    Raises: ConfigError if the scene cannot be built. Possible causes are a missing or invalid file, a list of the wrong
        length, a duplicate name, a start position beyond a joint limit, or an unknown robot, joint, part or keyframe.
        The message begins with the invalid config key, or with `scene` if MuJoCo finds the fault.
    """
    spec = spec_of(cfg.mjcf, "mjcf") if cfg.mjcf is not None else _floor()
    _set_options(spec, cfg)
    _with_inertia_of_geoms(spec)
    if cfg.light or cfg.mjcf is None:
        _set_light(spec, cfg.light or LightConfig.model_construct())
    objects = [*cfg.rigid_object, *cfg.background]
    try:
        robot, home = _add_robot(spec, cfg, drives or {}, has_movable_base)
        for item in objects:
            _add_object(spec, item)
        _add_contact_sensors(spec, robot.fingers, objects)
        model = _compiled(spec, offset)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"scene: {' '.join(str(error).split())}") from None
    for item in objects:
        if item.body_type == "dynamic":
            _set_damping(model, item)
    data = _start(model, cfg, robot, home)
    if cfg.robot is not None and cfg.robot.drive_pros.stiffness is not None:
        _set_gains_of_stiff_drives(model, data, robot)
    return Scene(model, data, robot, _speed_limits(model, cfg, robot))


def _start(model: Any, cfg: SceneConfig, robot: Robot, home: tuple[float, ...]) -> Any:
    """Return the `MjData` at the start of an episode. The position drives of the robot hold its joints in place."""
    data = mujoco().MjData(model)
    if cfg.keyframe is not None:
        names = [model.key(i).name for i in range(model.nkey)]
        if cfg.keyframe not in names:
            raise ConfigError(f"keyframe: unknown {cfg.keyframe!r}; {did_you_mean(cfg.keyframe, names)}")
        mujoco().mj_resetDataKeyframe(model, data, names.index(cfg.keyframe))
    for name, position in zip(robot.joints, home, strict=False):
        low, high = model.joint(name).range if model.joint(name).limited else (-inf, inf)
        if not low - _SLACK <= position <= high + _SLACK:
            fault = f"{position} of joint {name!r} is beyond its limits, {low:.6g} to {high:.6g}"
            raise ConfigError(f"robot.init_qpos: {fault}; start within the limits")
        data.joint(name).qpos[0] = position
    _set_followers(model, data, robot)
    has_robot = cfg.robot is not None
    # with a keyframe, hold only the joints of a robot from the config; the keyframe sets all other controls
    actuators = [i for i in range(model.nu) if cfg.keyframe is None or (has_robot and _drives_robot(model, i, robot))]
    _hold_positions(model, data, actuators)
    return data


def _set_followers(model: Any, data: Any, robot: Robot) -> None:
    """Set the position of each follower joint (`mimic` in a URDF file) from the position of its leader.

    Raises: ConfigError if this position is beyond the limits of the follower joint.
    """
    for follower in robot.followers:
        position = follower.offset + follower.multiplier * float(data.joint(follower.leader).qpos[0])
        low, high = model.joint(follower.name).range if model.joint(follower.name).limited else (-inf, inf)
        if not low - _SLACK <= position <= high + _SLACK:
            fault = f"joint {follower.name!r} follows {follower.leader!r} to {position:.6g}"
            raise ConfigError(
                f"robot.init_qpos: {fault}, beyond its limits, {low:.6g} to {high:.6g}; move the leading joint"
            )
        data.joint(follower.name).qpos[0] = position


def _drives_robot(model: Any, i: int, robot: Robot) -> bool:
    """Return True if actuator `i` drives a joint of the robot."""
    on_joint = model.actuator_trntype[i] == int(mujoco().mjtTrn.mjTRN_JOINT)
    return on_joint and model.joint(int(model.actuator_trnid[i, 0])).name in robot.joints


def _set_gains_of_stiff_drives(model: Any, data: Any, robot: Robot) -> None:
    """Replace the gains of position drives that are too stiff for the time step, see `DriveConfig`."""
    h, at_start = model.opt.timestep, mujoco().MjData(model)
    at_start.qpos[:] = data.qpos
    mujoco().mj_forward(model, at_start)
    for i in range(model.nu):
        if not _drives_robot(model, i, robot):
            continue
        stiffness, damping = -model.actuator_biasprm[i, 1:3]
        unit, column = np.zeros(model.nv), np.zeros(model.nv)
        dof = int(model.jnt_dofadr[int(model.actuator_trnid[i, 0])])
        unit[dof] = 1.0
        mujoco().mj_mulM(model, at_start, column, unit)  # a column of the mass matrix
        inertia = column[dof]
        if h**2 * stiffness / inertia > _LARGEST_STIFFNESS:
            scale = 1.0 + (h * damping + h**2 * stiffness) / inertia
            model.actuator_gainprm[i, 0] = stiffness / scale
            model.actuator_biasprm[i, 1:3] = -stiffness / scale, -(damping + h * stiffness) / scale


def _hold_positions(model: Any, data: Any, actuators: list[int]) -> None:
    """Set the target of each position drive to the current position of the joint that it drives."""
    for i in actuators:
        on_joint = model.actuator_trntype[i] == int(mujoco().mjtTrn.mjTRN_JOINT)
        if on_joint and model.actuator_biasprm[i, 1] < 0.0 and is_linear_in_control(model, i):
            joint = int(model.actuator_trnid[i, 0])
            data.ctrl[i] = control_per_target(model, i) * data.qpos[model.jnt_qposadr[joint]]
            if model.actuator_actadr[i] >= 0:  # start the actuator's filter in its steady state
                data.act[model.actuator_actadr[i]] = data.ctrl[i]
