"""A scene as MuJoCo's model, built from its config: robot, objects, a floor or a whole MJCF file."""

from collections.abc import Mapping
from math import inf, radians
from typing import Any, NamedTuple

import numpy as np

from ecrl.envs.mujoco.robots.robot import Drive, Robot, add_force_sensors, moving, robot_spec, spec_of
from ecrl.envs.mujoco.scene.config import LightConfig, RigidObjectConfig, SceneConfig
from ecrl.envs.mujoco.scene.models import control_per_target, follows, mujoco
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean

_TOUCH = {"contype": 1, "conaffinity": 3, "condim": 4}  # everything, robots too
_SLACK = 1e-6  # rad or m, of limits that a config repeats from a file


class Scene(NamedTuple):
    """A model, MuJoCo's data at the start, and the robot."""

    model: Any
    data: Any
    robot: Robot


def _quaternion(degrees: tuple[float, float, float]) -> np.ndarray:
    """Rotations about x, then the y and then the z that are turned with it: Rx Ry Rz."""
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
    if cfg.body_type == "dynamic":
        body.add_joint(name=cfg.uid, type=mujoco().mjtJoint.mjJNT_FREE)
    friction = [cfg.attrs.static_friction, 0.005, 0.0001]
    # of two surfaces that touch, the friction of an object counts, not that of the floor or the robot
    given = {"mass": cfg.attrs.mass, "friction": friction, "priority": 1, "rgba": cfg.color}
    body.add_geom(name=cfg.uid, type=kind, size=size, **given, **_TOUCH)


def _damp(model: Any, cfg: RigidObjectConfig) -> None:
    """Damping of a free body: forces that take a given share of each velocity per second."""
    body, attrs = model.body(cfg.uid), cfg.attrs
    first = int(body.dofadr[0])
    model.dof_damping[first : first + 3] = attrs.linear_damping * body.mass
    model.dof_damping[first + 3 : first + 6] = attrs.angular_damping * body.inertia


def _set_light(spec: Any, cfg: LightConfig) -> None:
    """One light, instead of those of a scene's file."""
    for light in list(spec.lights):
        spec.delete(light)
    far = mujoco().mjtLightType.mjLIGHT_DIRECTIONAL
    given = {"dir": list(cfg.direction), "diffuse": list(cfg.color), "castshadow": False}
    spec.worldbody.add_light(pos=[0.0, 0.0, 4.0], type=far, **given)
    spec.visual.headlight.ambient, spec.visual.headlight.diffuse = list(cfg.ambient), [0.0, 0.0, 0.0]


def _empty() -> Any:
    """A floor, and physics that suit stiff drives."""
    spec, plane = mujoco().MjSpec(), mujoco().mjtGeom.mjGEOM_PLANE
    spec.option.timestep, spec.option.iterations = 0.01, 20
    spec.option.integrator = mujoco().mjtIntegrator.mjINT_IMPLICITFAST
    spec.worldbody.add_geom(name="floor", type=plane, size=[3.0, 3.0, 0.1], rgba=[0.9, 0.9, 0.88, 1.0], **_TOUCH)
    return spec


def _set_options(spec: Any, cfg: SceneConfig) -> None:
    option, reset = spec.option, mujoco().mjtDisableBit.mjDSBL_AUTORESET
    option.timestep = cfg.physics.dt or option.timestep
    option.iterations = cfg.physics.iterations or option.iterations
    # a simulation that left its bounds shows as such, and does not start over by itself
    option.disableflags = int(option.disableflags) | int(reset)


def _add_robot(spec: Any, cfg: SceneConfig, drives: Mapping[str, Drive]) -> tuple[Robot, tuple[float, ...]]:
    """The robot of the config, or what the actuators of the scene's file move."""
    if cfg.robot is None:
        on_joint = mujoco().mjtTrn.mjTRN_JOINT
        known, on = moving(spec), (a.target for a in spec.actuators if a.trntype == on_joint)
        joints = tuple(dict.fromkeys(name for name in on if name in known))
        add_force_sensors(spec, joints, "mjcf")
        return Robot(joints, {"arm": joints} if joints else {}, {}), ()
    made, robot, home = robot_spec(cfg.robot, drives)
    base = spec.worldbody.add_body(name=cfg.robot.uid, pos=list(cfg.robot.init_pos))
    base.quat = _quaternion(cfg.robot.init_rot)
    prefix = f"{cfg.robot.uid}/"
    spec.attach(made, frame=base.add_frame(), prefix=prefix)
    return robot.within(prefix), home


def build(cfg: SceneConfig, drives: Mapping[str, Drive] | None = None) -> Scene:
    """The model of a scene.

    Args:
        cfg: the scene.
        drives: what the controls of the robot's joints are, by name; positions if absent.

    Raises: ConfigError naming the key: a file that is missing or no MJCF, an unknown robot, joint, part or keyframe, a
        list of the wrong length, two things of one name.
    """
    spec = spec_of(cfg.mjcf, "mjcf") if cfg.mjcf is not None else _empty()
    _set_options(spec, cfg)
    if cfg.light or cfg.mjcf is None:
        _set_light(spec, cfg.light or LightConfig.model_construct())
    objects = [*cfg.rigid_object, *cfg.background]
    try:
        robot, home = _add_robot(spec, cfg, drives or {})
        for one in objects:
            _add_object(spec, one)
        model = spec.compile()
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"scene: {' '.join(str(error).split())}") from None
    for one in objects:
        if one.body_type == "dynamic":
            _damp(model, one)
    return Scene(model, _start(model, cfg, robot, home), robot)


def _start(model: Any, cfg: SceneConfig, robot: Robot, home: tuple[float, ...]) -> Any:
    """The data at the start: the robot at home, and held there."""
    data = mujoco().MjData(model)
    if cfg.keyframe is not None:
        names = [model.key(i).name for i in range(model.nkey)]
        if cfg.keyframe not in names:
            raise ConfigError(f"keyframe: unknown {cfg.keyframe!r}; {did_you_mean(cfg.keyframe, names)}")
        mujoco().mj_resetDataKeyframe(model, data, names.index(cfg.keyframe))
    for name, position in zip(robot.joints, home, strict=False):
        low, high = model.joint(name).range if model.joint(name).limited else (-inf, inf)
        if not low - _SLACK <= position <= high + _SLACK:
            told = f"{position} of joint {name!r} is beyond its limits, {low:.6g} to {high:.6g}"
            raise ConfigError(f"robot.init_qpos: {told}; start within them")
        data.joint(name).qpos[0] = position
    own = cfg.robot is not None
    _hold(model, data, [i for i in range(model.nu) if cfg.keyframe is None or (own and _drives(model, i, robot))])
    return data


def _drives(model: Any, i: int, robot: Robot) -> bool:
    """Whether actuator `i` is the robot's; a keyframe says what the controls of the others are."""
    on_joint = model.actuator_trntype[i] == int(mujoco().mjtTrn.mjTRN_JOINT)
    return on_joint and model.joint(int(model.actuator_trnid[i, 0])).name in robot.joints


def _hold(model: Any, data: Any, actuators: list[int]) -> None:
    """Targets of position drives where their joints are."""
    for i in actuators:
        drives = model.actuator_trntype[i] == int(mujoco().mjtTrn.mjTRN_JOINT) and model.actuator_biasprm[i, 1] < 0.0
        if drives and follows(model, i):
            joint = int(model.actuator_trnid[i, 0])
            data.ctrl[i] = control_per_target(model, i) * data.qpos[model.jnt_qposadr[joint]]
            if model.actuator_actadr[i] >= 0:  # a filter begins where it is to stay
                data.act[model.actuator_actadr[i]] = data.ctrl[i]
