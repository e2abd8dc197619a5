"""What tasks read of a world and write to it, by the names of the scene, in float32.

Units are m, rad, s, N; a pose is a homogeneous 4x4 matrix, and quaternions are w x y z. All are pure functions of a
`Simulation` and a world `[*B]`; gradients flow through those that read.
"""

from collections.abc import Sequence
from functools import cache
from math import inf

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.robots import kinematics
from ecrl.envs.mujoco.robots.robot import Drive
from ecrl.envs.mujoco.scene.models import STATE, control_per_target, follows, id_of, mujoco, rows_of, size_of
from ecrl.errors import ConfigError


@cache
def _columns(sim: Simulation, part: str) -> slice:
    """Where a part of the state, such as "QPOS", lies in `physics`."""
    first = size_of(sim.model, *STATE[: STATE.index(part)])
    return slice(first, first + size_of(sim.model, part))


def _read(sim: Simulation, world: TensorDict, part: str) -> Tensor:
    return world["physics"][..., _columns(sim, part)].float()


def _replaced(row: Tensor, columns: Sequence[int], values: Tensor) -> Tensor:
    """Some of the last axis replaced, without an index that a compiler cannot see through."""
    place = {column: i for i, column in enumerate(columns)}
    pieces, at = [], 0
    while at < row.shape[-1]:
        end, inside = at + 1, at in place
        while end < row.shape[-1] and (end in place) == inside and (not inside or place[end] == place[end - 1] + 1):
            end += 1
        pieces.append(values[..., place[at] : place[at] + end - at] if inside else row[..., at:end])
        at = end
    return torch.cat(pieces, -1)


def _write(sim: Simulation, world: TensorDict, columns: Sequence[int], values: Tensor) -> TensorDict:
    """The world with some columns of `physics` replaced."""
    values = values.double().expand(*world.batch_size, len(columns))
    return world.copy().set("physics", _replaced(world["physics"], columns, values))


def time(sim: Simulation, world: TensorDict) -> Tensor:
    """Seconds since the start of the episode, `[*B]` float32."""
    return _read(sim, world, "TIME")[..., 0]


def qpos(sim: Simulation, world: TensorDict) -> Tensor:
    """All positions in MuJoCo's layout, `[*B, nq]` float32."""
    return _read(sim, world, "QPOS")


def qvel(sim: Simulation, world: TensorDict) -> Tensor:
    """All velocities in MuJoCo's layout, `[*B, nv]` float32."""
    return _read(sim, world, "QVEL")


@cache
def _joints(sim: Simulation, names: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Addresses of hinges and slides in positions and in velocities."""
    model, free, ball = sim.model, mujoco().mjtJoint.mjJNT_FREE, mujoco().mjtJoint.mjJNT_BALL
    ids = [id_of(model, "jnt", name) for name in names]
    for name, i in zip(names, ids, strict=True):
        if model.jnt_type[i] in (int(free), int(ball)):
            raise ConfigError(f"joint {name!r} is no hinge or slide; use the pose of its body")
    return [int(model.jnt_qposadr[i]) for i in ids], [int(model.jnt_dofadr[i]) for i in ids]


def joint_positions(sim: Simulation, world: TensorDict, joints: Sequence[str]) -> Tensor:
    """Positions of hinges and slides, `[*B, len(joints)]`, rad or m."""
    return kinematics.columns(qpos(sim, world), _joints(sim, tuple(joints))[0])


def joint_velocities(sim: Simulation, world: TensorDict, joints: Sequence[str]) -> Tensor:
    """Velocities of hinges and slides, `[*B, len(joints)]`, rad/s or m/s."""
    return kinematics.columns(qvel(sim, world), _joints(sim, tuple(joints))[1])


def joint_forces(sim: Simulation, world: TensorDict, joints: Sequence[str]) -> Tensor:
    """What the drives of robot joints exerted in the last substep, `[*B, len(joints)]`, N m or N."""
    return torch.cat([sensor(sim, world, f"{name}_force") for name in joints], -1)


@cache
def actuators_of(sim: Simulation, joints: tuple[str, ...]) -> list[int]:
    """The actuators that drive hinges and slides, one each. ConfigError for a joint that has none or several."""
    model, kind = sim.model, int(mujoco().mjtTrn.mjTRN_JOINT)
    on_joints = [i for i in range(model.nu) if model.actuator_trntype[i] == kind]
    found = []
    for name in joints:
        joint = id_of(model, "jnt", name)
        driving = [i for i in on_joints if model.actuator_trnid[i, 0] == joint]
        if len(driving) != 1:
            told = f"has {len(driving)} actuators, one would do" if driving else "has no actuator"
            raise ConfigError(f"joint {name!r} {told}; choose others by joint_ids or part_name, or change its file")
        found += driving
    return found


def drive_of(sim: Simulation, joint: str) -> Drive | None:
    """What the control of a joint's actuator is; None for one that is none of these."""
    model, (i,) = sim.model, actuators_of(sim, (joint,))
    if not follows(model, i):
        return None
    if model.actuator_biastype[i] == int(mujoco().mjtBias.mjBIAS_NONE):
        return "force"
    _, position, velocity = model.actuator_biasprm[i, :3]
    return "position" if position < 0.0 else "velocity" if velocity < 0.0 else None


@cache
def controls_per_target(sim: Simulation, joints: tuple[str, ...]) -> tuple[float, ...]:
    """What the controls of joints' actuators are per target or force: 1 but for gears and gains of a file."""
    return tuple(control_per_target(sim.model, i) for i in actuators_of(sim, joints))


def joint_limits(sim: Simulation, joints: Sequence[str]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Lowest and highest positions, rad or m; infinite without a limit."""
    _joints(sim, tuple(joints))
    ids = [id_of(sim.model, "jnt", name) for name in joints]
    ranges = [sim.model.jnt_range[i] if sim.model.jnt_limited[i] else (-inf, inf) for i in ids]
    return tuple(float(low) for low, _ in ranges), tuple(float(high) for _, high in ranges)


def with_joint_positions(sim: Simulation, world: TensorDict, joints: Sequence[str], values: Tensor) -> TensorDict:
    """Worlds with joints put elsewhere: `values` `[*B, len(joints)]`, rad or m."""
    first = _columns(sim, "QPOS").start
    return _write(sim, world, [first + at for at in _joints(sim, tuple(joints))[0]], values)


def with_joint_velocities(sim: Simulation, world: TensorDict, joints: Sequence[str], values: Tensor) -> TensorDict:
    """Worlds with other joint velocities: `values` `[*B, len(joints)]`, rad/s or m/s."""
    first = _columns(sim, "QVEL").start
    return _write(sim, world, [first + at for at in _joints(sim, tuple(joints))[1]], values)


def sensor(sim: Simulation, world: TensorDict, name: str) -> Tensor:
    """Numbers of a sensor of the scene, `[*B, dim]`, of the last substep; at the start those of the scene's start."""
    i = id_of(sim.model, "sensor", name)
    first = int(sim.model.sensor_adr[i])
    return world["sensors"][..., first : first + int(sim.model.sensor_dim[i])]


def _positions(sim: Simulation, world: TensorDict) -> Tensor:
    """What poses follow from: positions of joints, then those and the quaternions of bodies moved from outside."""
    parts = ("QPOS", "MOCAP_POS", "MOCAP_QUAT") if sim.model.nmocap else ("QPOS",)
    return torch.cat([_read(sim, world, part) for part in parts], -1) if len(parts) > 1 else qpos(sim, world)


@cache
def _to_body(sim: Simulation, name: str) -> kinematics.Chain:
    return kinematics.chain(sim.model, id_of(sim.model, "body", name))


@cache
def _to_site(sim: Simulation, name: str) -> kinematics.Chain:
    model, i = sim.model, id_of(sim.model, "site", name)
    return kinematics.chain(model, int(model.site_bodyid[i]), kinematics.fixed(model.site_pos[i], model.site_quat[i]))


def body_pose(sim: Simulation, world: TensorDict, name: str) -> Tensor:
    """Where a body is, such as an object by its uid, `[*B, 4, 4]`; exact at any time, the start included."""
    return kinematics.follow(_to_body(sim, name), _positions(sim, world))[0]


def body_position(sim: Simulation, world: TensorDict, name: str) -> Tensor:
    """The position in `body_pose`, `[*B, 3]` m; of a free body it is read, not worked out."""
    joint = _free(sim, name)
    if joint is None:
        return body_pose(sim, world, name)[..., :3, 3]
    first = int(sim.model.jnt_qposadr[joint])
    return qpos(sim, world)[..., first : first + 3]


def site_pose(sim: Simulation, world: TensorDict, name: str) -> Tensor:
    """Where a site is, such as `sim.robot.tcp["arm"]`, `[*B, 4, 4]`; exact at any time, the start included."""
    return kinematics.follow(_to_site(sim, name), _positions(sim, world))[0]


def site_jacobian(sim: Simulation, world: TensorDict, name: str, joints: Sequence[str]) -> Tensor:
    """How a site moves, m, and turns, rad, per unit of each joint, `[*B, 6, len(joints)]`; 0 of joints elsewhere."""
    return kinematics.jacobian(_to_site(sim, name), _positions(sim, world), _joints(sim, tuple(joints))[1])


def site_motion(
    sim: Simulation, world: TensorDict, name: str, joints: Sequence[str], values: Tensor
) -> tuple[Tensor, Tensor]:
    """Where a site would be, `[*B, 4, 4]`, and how it would move, `[*B, 6, len(joints)]`, with joints put elsewhere.

    `values` are their positions, `[*B, len(joints)]`, rad or m; all others are where they are in the world.
    """
    at, dofs = _joints(sim, tuple(joints))
    return kinematics.motion(_to_site(sim, name), _replaced(_positions(sim, world), at, values), dofs)


def _free(sim: Simulation, name: str) -> int | None:
    """The free joint of a body, if it has one."""
    body = id_of(sim.model, "body", name)
    first = int(sim.model.body_jntadr[body])
    free = first >= 0 and sim.model.jnt_type[first] == int(mujoco().mjtJoint.mjJNT_FREE)
    return first if free else None


def with_body_pose(
    sim: Simulation, world: TensorDict, name: str, position: Tensor | None = None, quaternion: Tensor | None = None
) -> TensorDict:
    """Worlds with a dynamic or kinematic object put elsewhere: `[*B, 3]` m, and `[*B, 4]`; None leaves either as it is.

    Raises: ConfigError for a body that is part of another or of the world.
    """
    model, joint, body = sim.model, _free(sim, name), id_of(sim.model, "body", name)
    which = int(model.body_mocapid[body])
    if joint is None and which < 0:
        raise ConfigError(f"body {name!r} cannot be put elsewhere: it is not free; make it dynamic or kinematic")
    if joint is not None:
        first = _columns(sim, "QPOS").start + int(model.jnt_qposadr[joint])
        places = range(first, first + 3), range(first + 3, first + 7)
    else:
        firsts = _columns(sim, "MOCAP_POS").start + 3 * which, _columns(sim, "MOCAP_QUAT").start + 4 * which
        places = range(firsts[0], firsts[0] + 3), range(firsts[1], firsts[1] + 4)
    for columns, values in zip(places, (position, quaternion), strict=True):
        world = world if values is None else _write(sim, world, columns, values)
    return world


def _dofs(sim: Simulation, name: str) -> int:
    joint = _free(sim, name)
    if joint is None:
        raise ConfigError(f"body {name!r} is not free; it moves with its joints or not at all")
    return int(sim.model.jnt_dofadr[joint])


def body_velocity(sim: Simulation, world: TensorDict, name: str) -> tuple[Tensor, Tensor]:
    """Linear and angular velocity of a dynamic object in the world, each `[*B, 3]`, m/s and rad/s."""
    first, velocity = _dofs(sim, name), qvel(sim, world)
    turning = body_pose(sim, world, name)[..., :3, :3] @ velocity[..., first + 3 : first + 6, None]
    return velocity[..., first : first + 3], turning.squeeze(-1)


def with_body_velocity(sim: Simulation, world: TensorDict, name: str, linear: Tensor, angular: Tensor) -> TensorDict:
    """Worlds with a dynamic object moving otherwise: velocities in the world, each `[*B, 3]`, m/s and rad/s."""
    first = _columns(sim, "QVEL").start + _dofs(sim, name)
    turning = body_pose(sim, world, name)[..., :3, :3].mT @ angular.unsqueeze(-1)
    turning = turning.squeeze(-1)
    return _write(sim, world, range(first, first + 6), torch.cat((linear.expand_as(turning), turning), -1))


def at_rest(sim: Simulation, world: TensorDict, name: str) -> TensorDict:
    """Worlds in which a dynamic object does not move."""
    first = _columns(sim, "QVEL").start + _dofs(sim, name)
    return _write(sim, world, range(first, first + 6), world["physics"].new_zeros(torch.Size((6,))))


def push(sim: Simulation, name: str, force: Tensor) -> Tensor:
    """A force on a dynamic object at its centre, `[*B, 3]` N in the world, as `advance` takes it, `[*B, nv]`."""
    first, batch = _dofs(sim, name), force.shape[:-1]
    rest = sim.model.nv - first - 3
    return torch.cat((force.new_zeros(*batch, first), force, force.new_zeros(*batch, rest)), -1)


@cache
def _parameter(sim: Simulation, field: str, name: str) -> slice:
    at = 0
    for what in sim.varied:
        size = len(rows_of(sim.model, *what))
        if what == (field, name):
            return slice(at, at + size)
        at += size
    raise ConfigError(f"{field} of {name!r} is the same in all environments; name it in varied")


def parameter(sim: Simulation, world: TensorDict, field: str, name: str) -> Tensor:
    """Numbers of the model that differ between environments, `[*B, size]` float32, in MuJoCo's units."""
    return world["parameters"][..., _parameter(sim, field, name)].float()


def with_parameter(sim: Simulation, world: TensorDict, field: str, name: str, values: Tensor) -> TensorDict:
    """Worlds with other numbers of the model; the inertia of a body does not follow its mass by itself."""
    part, row = _parameter(sim, field, name), world["parameters"]
    values = values.double().expand(*world.batch_size, part.stop - part.start)
    changed = torch.cat((row[..., : part.start], values, row[..., part.stop :]), -1)
    return world.copy().set("parameters", changed)
