"""Read and write the state of a simulation by the names of bodies, joints, sites and sensors.

All functions in this module are pure. Most functions take a `Simulation` and a world `[*B]`, which
`ecrl.envs.mujoco.physics.simulation` defines. Values are float32 tensors in SI units, with angles in rad. A pose is a
homogeneous 4x4 matrix. The components of a quaternion are in the order w, x, y, z. Gradients flow through all functions
that read a world.
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
from ecrl.envs.mujoco.scene.models import (
    columns_of,
    control_per_target,
    field_of,
    id_of,
    is_linear_in_control,
    mujoco,
    rows_of,
)
from ecrl.errors import ConfigError


@cache
def _columns(sim: Simulation, part: str) -> slice:
    """Return the slice of `physics` that holds one component of the state, such as "QPOS"."""
    return columns_of(sim.model, part)


def _read(sim: Simulation, world: TensorDict, part: str) -> Tensor:
    return world["physics"][..., _columns(sim, part)].float()


def _replaced(row: Tensor, columns: Sequence[int], values: Tensor) -> Tensor:
    """Return a copy of `row` with the entries at the indices `columns` set to `values`.

    The copy is concatenated from slices, because slices compile better than indices.
    """
    source = {column: i for i, column in enumerate(columns)}
    pieces, at = [], 0
    while at < row.shape[-1]:
        end, new = at + 1, at in source
        while end < row.shape[-1] and (end in source) == new and (not new or source[end] == source[end - 1] + 1):
            end += 1
        pieces.append(values[..., source[at] : source[at] + end - at] if new else row[..., at:end])
        at = end
    return torch.cat(pieces, -1)


def _write(sim: Simulation, world: TensorDict, columns: Sequence[int], values: Tensor) -> TensorDict:
    """Return worlds with the given columns of `physics` set to `values`."""
    values = values.double().expand(*world.batch_size, len(columns))
    return world.copy().set("physics", _replaced(world["physics"], columns, values))


def time(sim: Simulation, world: TensorDict) -> Tensor:
    """Return the simulated time in seconds, `[*B]` float32.

    The time is 0 at the start of an episode, unless the keyframe in the scene config sets another time.
    """
    return _read(sim, world, "TIME")[..., 0]


def qpos(sim: Simulation, world: TensorDict) -> Tensor:
    """Return the positions of all joints in the layout of MuJoCo's `qpos`, `[*B, nq]` float32."""
    return _read(sim, world, "QPOS")


def qvel(sim: Simulation, world: TensorDict) -> Tensor:
    """Return the velocities of all joints in the layout of MuJoCo's `qvel`, `[*B, nv]` float32."""
    return _read(sim, world, "QVEL")


@cache
def _joints(sim: Simulation, names: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Return two lists: the indices of hinge and slide joints in MuJoCo's `qpos`, and their indices in `qvel`.

    Raises: ConfigError for a free or ball joint.
    """
    model, free, ball = sim.model, mujoco().mjtJoint.mjJNT_FREE, mujoco().mjtJoint.mjJNT_BALL
    ids = [id_of(model, "jnt", name) for name in names]
    for name, i in zip(names, ids, strict=True):
        if model.jnt_type[i] in (int(free), int(ball)):
            raise ConfigError(f"joint {name!r} is not a hinge or slide; use the pose of its body")
    return [int(model.jnt_qposadr[i]) for i in ids], [int(model.jnt_dofadr[i]) for i in ids]


def joint_positions(sim: Simulation, world: TensorDict, joints: Sequence[str]) -> Tensor:
    """Return the positions of hinge and slide joints, `[*B, len(joints)]` (rad or m)."""
    return kinematics.columns(qpos(sim, world), _joints(sim, tuple(joints))[0])


def joint_velocities(sim: Simulation, world: TensorDict, joints: Sequence[str]) -> Tensor:
    """Return the velocities of hinge and slide joints, `[*B, len(joints)]` (rad/s or m/s)."""
    return kinematics.columns(qvel(sim, world), _joints(sim, tuple(joints))[1])


def joint_forces(sim: Simulation, world: TensorDict, joints: Sequence[str]) -> Tensor:
    """Return the forces (N m or N) that the drives applied to joints in the last substep, `[*B, len(joints)]`."""
    return torch.cat([sensor(sim, world, f"{name}_force") for name in joints], -1)


@cache
def actuators_of(sim: Simulation, joints: tuple[str, ...]) -> list[int]:
    """Return the index of each joint's actuator.

    Raises: ConfigError if a joint does not have exactly one actuator.
    """
    model, kind = sim.model, int(mujoco().mjtTrn.mjTRN_JOINT)
    on_joints = [i for i in range(model.nu) if model.actuator_trntype[i] == kind]
    actuators = []
    for name in joints:
        joint = id_of(model, "jnt", name)
        driving = [i for i in on_joints if model.actuator_trnid[i, 0] == joint]
        if len(driving) != 1:
            fault = f"has {len(driving)} actuators, expected one" if driving else "has no actuator"
            raise ConfigError(
                f"joint {name!r} {fault}; choose other joints by joint_ids or part_name, or change the file"
            )
        actuators += driving
    return actuators


def drive_of(sim: Simulation, joint: str) -> Drive | None:
    """Return the kind of a joint's drive, or None if no kind in `Drive` describes the joint's actuator."""
    model, (i,) = sim.model, actuators_of(sim, (joint,))
    if not is_linear_in_control(model, i):
        return None
    if model.actuator_biastype[i] == int(mujoco().mjtBias.mjBIAS_NONE):
        return "force"
    _, position, velocity = model.actuator_biasprm[i, :3]
    return "position" if position < 0.0 else "velocity" if velocity < 0.0 else None


@cache
def controls_per_target(sim: Simulation, joints: tuple[str, ...]) -> tuple[float, ...]:
    """Return, for each joint, the factor that converts a target or a force to a control of the joint's actuator.

    The factor is 1 unless an MJCF file defines gears or gains.
    """
    return tuple(control_per_target(sim.model, i) for i in actuators_of(sim, joints))


@cache
def _position_joints(sim: Simulation) -> tuple[str, ...]:
    """Return the names of the robot's joints whose only actuator is a position drive."""
    kind, targets = int(mujoco().mjtTrn.mjTRN_JOINT), sim.model.actuator_trnid[:, 0]
    driven = targets[sim.model.actuator_trntype == kind].tolist()
    single = (joint for joint in sim.robot.joints if driven.count(id_of(sim.model, "jnt", joint)) == 1)
    return tuple(joint for joint in single if drive_of(sim, joint) == "position")


def hold_controls(sim: Simulation, world: TensorDict) -> Tensor:
    """Return controls `[*B, nu]` that make the robot's position drives hold their joints at the current positions.

    All other controls have the values that they have at the start of an episode.
    """
    home = torch.from_numpy(sim.home.ctrl).to(world["physics"])
    columns = list(home.float().expand(*world.batch_size, -1).unbind(-1))
    joints = _position_joints(sim)
    if not joints:
        return home.float().expand(*world.batch_size, -1).clone()
    targets = joint_positions(sim, world, joints).unbind(-1)
    drives = zip(actuators_of(sim, joints), controls_per_target(sim, joints), targets, strict=True)
    for actuator, factor, target in drives:
        columns[actuator] = factor * target
    return torch.stack(columns, -1)


def joint_limits(sim: Simulation, joints: Sequence[str]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the lowest and the highest position of each joint (rad or m).

    A joint without limits has infinite bounds.
    """
    _joints(sim, tuple(joints))
    ids = [id_of(sim.model, "jnt", name) for name in joints]
    ranges = [sim.model.jnt_range[i] if sim.model.jnt_limited[i] else (-inf, inf) for i in ids]
    return tuple(float(low) for low, _ in ranges), tuple(float(high) for _, high in ranges)


@cache
def _followers(sim: Simulation, joints: tuple[str, ...]) -> tuple[tuple[str, int, float, float], ...]:
    """Return the name, the leader's index, the offset and the multiplier of each joint that follows one of `joints`."""
    chosen = (f for f in sim.robot.followers if f.leader in joints)
    return tuple((f.name, joints.index(f.leader), f.offset, f.multiplier) for f in chosen)


def _with_followers(sim: Simulation, joints: tuple[str, ...], values: Tensor, rate: bool) -> tuple[tuple, Tensor]:
    """Append the joints that follow one of `joints`, with their positions, or their velocities if `rate` is True."""
    rows = _followers(sim, joints)
    if not rows:
        return joints, values
    more = [(0.0 if rate else offset) + multiplier * values[..., i] for _, i, offset, multiplier in rows]
    return (*joints, *(name for name, *_ in rows)), torch.cat((values, torch.stack(more, -1)), -1)


def with_joint_positions(sim: Simulation, world: TensorDict, joints: Sequence[str], values: Tensor) -> TensorDict:
    """Return worlds with the positions of the given joints set to `values`, `[*B, len(joints)]` (rad or m).

    Joints that follow one of these joints move with their leader.
    """
    names, values = _with_followers(sim, tuple(joints), values, False)
    first = _columns(sim, "QPOS").start
    return _write(sim, world, [first + i for i in _joints(sim, names)[0]], values)


def with_joint_velocities(sim: Simulation, world: TensorDict, joints: Sequence[str], values: Tensor) -> TensorDict:
    """Return worlds with the velocities of the given joints set to `values`, `[*B, len(joints)]` (rad/s or m/s).

    Joints that follow one of these joints move with their leader.
    """
    names, values = _with_followers(sim, tuple(joints), values, True)
    first = _columns(sim, "QVEL").start
    return _write(sim, world, [first + i for i in _joints(sim, names)[1]], values)


def sensor(sim: Simulation, world: TensorDict, name: str) -> Tensor:
    """Return the reading of a sensor, `[*B, dim]`.

    The sensor is read in the last substep or, before the first step, in the scene's initial state.
    """
    i = id_of(sim.model, "sensor", name)
    first = int(sim.model.sensor_adr[i])
    return world["sensors"][..., first : first + int(sim.model.sensor_dim[i])]


def _positions(sim: Simulation, world: TensorDict) -> Tensor:
    """Return the joint positions and the mocap poses of worlds in the layout that `kinematics.follow` takes."""
    parts = ("QPOS", "MOCAP_POS", "MOCAP_QUAT") if sim.model.nmocap else ("QPOS",)
    return torch.cat([_read(sim, world, part) for part in parts], -1) if len(parts) > 1 else qpos(sim, world)


@cache
def _to_body(sim: Simulation, name: str) -> kinematics.Chain:
    return kinematics.chain(sim.model, id_of(sim.model, "body", name))


@cache
def _to_site(sim: Simulation, name: str) -> kinematics.Chain:
    model, i = sim.model, id_of(sim.model, "site", name)
    offset = kinematics.constant_pose(model.site_pos[i], model.site_quat[i])
    return kinematics.chain(model, int(model.site_bodyid[i]), offset)


def body_pose(sim: Simulation, world: TensorDict, name: str) -> Tensor:
    """Return the pose of a body, `[*B, 4, 4]`. To get the pose of an object, pass its uid as `name`.

    The pose is computed from the joint positions and is therefore also correct right after a reset.
    """
    return kinematics.follow(_to_body(sim, name), _positions(sim, world))[0]


def body_position(sim: Simulation, world: TensorDict, name: str) -> Tensor:
    """Return the position of a body, `[*B, 3]` (m). For a free body, this function is faster than `body_pose`."""
    joint = _free_joint(sim, name)
    if joint is None:
        return body_pose(sim, world, name)[..., :3, 3]
    first = int(sim.model.jnt_qposadr[joint])
    return qpos(sim, world)[..., first : first + 3]


def site_pose(sim: Simulation, world: TensorDict, name: str) -> Tensor:
    """Return the pose of a site, such as the site with the name `sim.robot.tcp["arm"]`, `[*B, 4, 4]`.

    The pose is computed from the joint positions and is therefore also correct right after a reset.
    """
    return kinematics.follow(_to_site(sim, name), _positions(sim, world))[0]


def site_jacobian(sim: Simulation, world: TensorDict, name: str, joints: Sequence[str]) -> Tensor:
    """Return the Jacobian of a site's pose with respect to joint positions, `[*B, 6, len(joints)]`.

    Each column contains the site's translation (m) and rotation (rad) per rad or m of one joint. The column of a joint
    that does not move the site is 0. The column of a joint includes the motion of its follower joints.
    """
    names = (*joints, *(follower for follower, *_ in _followers(sim, tuple(joints))))
    columns = kinematics.jacobian(_to_site(sim, name), _positions(sim, world), _joints(sim, names)[1])
    return _with_columns_of_followers(sim, tuple(joints), columns)


def _with_columns_of_followers(sim: Simulation, joints: tuple[str, ...], columns: Tensor) -> Tensor:
    """Add the columns of follower joints, which come last, to the columns of their leaders."""
    rows = _followers(sim, joints)
    if not rows:
        return columns
    own = list(columns[..., : len(joints)].unbind(-1))
    for j, (_, i, _, multiplier) in enumerate(rows):
        own[i] = own[i] + multiplier * columns[..., len(joints) + j]
    return torch.stack(own, -1)


def site_motion(
    sim: Simulation, world: TensorDict, name: str, joints: Sequence[str], values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the pose `[*B, 4, 4]` and the Jacobian `[*B, 6, len(joints)]` of a site at given joint positions.

    `values` contains the positions of `joints`, `[*B, len(joints)]` (rad or m). Joints that follow one of these joints
    move with their leader. All other joints have the positions that they have in `world`.
    """
    names, values = _with_followers(sim, tuple(joints), values, False)
    indices, dofs = _joints(sim, names)
    end, columns = kinematics.motion(_to_site(sim, name), _replaced(_positions(sim, world), indices, values), dofs)
    return end, _with_columns_of_followers(sim, tuple(joints), columns)


def _free_joint(sim: Simulation, name: str) -> int | None:
    """Return the index of a body's free joint, or None if the body has no free joint."""
    body = id_of(sim.model, "body", name)
    first = int(sim.model.body_jntadr[body])
    free = first >= 0 and sim.model.jnt_type[first] == int(mujoco().mjtJoint.mjJNT_FREE)
    return first if free else None


def with_body_pose(
    sim: Simulation, world: TensorDict, name: str, position: Tensor | None = None, quaternion: Tensor | None = None
) -> TensorDict:
    """Return worlds with a dynamic or kinematic object moved to a new pose.

    `position` is `[*B, 3]` (m) and `quaternion` is `[*B, 4]`. If `position` is None, the object keeps its position. If
    `quaternion` is None, the object keeps its rotation. The linear velocity of the object does not change. Its angular
    velocity turns with the object, because MuJoCo stores the angular velocity in the frame of the object.

    Raises: ConfigError if the body is neither dynamic nor kinematic.
    """
    model, joint, body = sim.model, _free_joint(sim, name), id_of(sim.model, "body", name)
    mocap = int(model.body_mocapid[body])
    if joint is None and mocap < 0:
        raise ConfigError(f"body {name!r} cannot be moved, because the body is not free; make it dynamic or kinematic")
    if joint is not None:
        first = _columns(sim, "QPOS").start + int(model.jnt_qposadr[joint])
        targets = range(first, first + 3), range(first + 3, first + 7)
    else:
        firsts = _columns(sim, "MOCAP_POS").start + 3 * mocap, _columns(sim, "MOCAP_QUAT").start + 4 * mocap
        targets = range(firsts[0], firsts[0] + 3), range(firsts[1], firsts[1] + 4)
    for columns, values in zip(targets, (position, quaternion), strict=True):
        world = world if values is None else _write(sim, world, columns, values)
    return world


def movable_bodies(sim: Simulation) -> tuple[str, ...]:
    """Return the names of all dynamic and kinematic objects, without the bases of robots."""
    model = sim.model
    bases = {name.split("/")[0] for name in sim.robot.joints if "/" in name}
    names = (model.body(i).name for i in range(1, model.nbody))
    is_mocap = {model.body(i).name: int(model.body_mocapid[i]) >= 0 for i in range(1, model.nbody)}
    return tuple(n for n in names if n not in bases and (is_mocap[n] or _free_joint(sim, n) is not None))


def _first_dof(sim: Simulation, name: str) -> int:
    """Return the index of a free body's first degree of freedom. Raise ConfigError if the body is not free."""
    joint = _free_joint(sim, name)
    if joint is None and name in movable_bodies(sim):
        raise ConfigError(f"body {name!r} is kinematic, expected dynamic; choose another, or change its body_type")
    if joint is None:
        raise ConfigError(f"body {name!r} is not free, expected a dynamic object; choose another")
    return int(sim.model.jnt_dofadr[joint])


def body_velocity(sim: Simulation, world: TensorDict, name: str) -> tuple[Tensor, Tensor]:
    """Return the linear velocity (m/s) and the angular velocity (rad/s) of a dynamic object, each `[*B, 3]`.

    The velocities are in the world frame.
    """
    first, velocity = _first_dof(sim, name), qvel(sim, world)
    angular = body_pose(sim, world, name)[..., :3, :3] @ velocity[..., first + 3 : first + 6, None]
    return velocity[..., first : first + 3], angular.squeeze(-1)


def with_body_velocity(sim: Simulation, world: TensorDict, name: str, linear: Tensor, angular: Tensor) -> TensorDict:
    """Return worlds with the velocities of a dynamic object set to `linear` (m/s) and `angular` (rad/s).

    Each velocity is `[*B, 3]` and in the world frame.
    """
    first = _columns(sim, "QVEL").start + _first_dof(sim, name)
    local = body_pose(sim, world, name)[..., :3, :3].mT @ angular.unsqueeze(-1)
    local = local.squeeze(-1)
    return _write(sim, world, range(first, first + 6), torch.cat((linear.expand_as(local), local), -1))


def with_body_at_rest(sim: Simulation, world: TensorDict, name: str) -> TensorDict:
    """Return worlds with the linear and the angular velocity of a dynamic object set to 0."""
    first = _columns(sim, "QVEL").start + _first_dof(sim, name)
    return _write(sim, world, range(first, first + 6), world["physics"].new_zeros(torch.Size((6,))))


def with_robot_at_rest(sim: Simulation, world: TensorDict, base: str) -> TensorDict:
    """Return worlds with the velocities of all joints of a robot set to 0. `base` is the name of the robot's base."""
    root = id_of(sim.model, "body", base)
    dofs = (sim.model.body_rootid[sim.model.dof_bodyid] == root).nonzero()[0].tolist()
    first = _columns(sim, "QVEL").start
    return _write(sim, world, [first + dof for dof in dofs], world["physics"].new_zeros(torch.Size((len(dofs),))))


def push(sim: Simulation, name: str, force: Tensor) -> Tensor:
    """Convert a force at the origin of a dynamic object to forces along the degrees of freedom, `[*B, nv]`.

    The argument `force` is in N and in the world frame, `[*B, 3]`. Pass the result to `advance` as `force`.
    """
    first, batch = _first_dof(sim, name), force.shape[:-1]
    rest = sim.model.nv - first - 3
    return torch.cat((force.new_zeros(*batch, first), force, force.new_zeros(*batch, rest)), -1)


@cache
def joints_to(sim: Simulation, site: str) -> tuple[str, ...]:
    """Return the names of all joints between the world and a site, including joints that no action drives."""
    model, names = sim.model, []
    body = int(model.site_bodyid[id_of(model, "site", site)])
    while body:
        first = int(model.body_jntadr[body])
        names += [model.joint(i).name for i in range(first, first + int(model.body_jntnum[body]))]
        body = int(model.body_parentid[body])
    return tuple(names)


def push_site(sim: Simulation, world: TensorDict, name: str, force: Tensor) -> Tensor:
    """Convert a force on a site to forces along the degrees of freedom, `[*B, nv]`.

        result = J^T force

    The argument `force` is in N and in the world frame, `[*B, 3]`. The result is in N or N m. Pass the result to
    `advance` as `force`.

    Raises: ConfigError if a joint between the world and the site is not a hinge or slide.
    """
    dofs = _joints(sim, joints_to(sim, name))[1]
    columns = kinematics.jacobian(_to_site(sim, name), _positions(sim, world), dofs)
    along = (columns[..., :3, :] * force.unsqueeze(-1)).sum(-2)
    return _replaced(force.new_zeros(*force.shape[:-1], sim.nv), dofs, along)


@cache
def _parameter_columns(sim: Simulation, field: str, name: str) -> slice:
    at = 0
    for varied in sim.varied:
        size = len(rows_of(sim.model, *varied))
        if varied == (field, name):
            return slice(at, at + size)
        at += size
    raise ConfigError(f"{field} of {name!r} is the same in all environments; list it in varied")


def parameter(sim: Simulation, world: TensorDict, field: str, name: str) -> Tensor:
    """Return the values of a varied model field for one object, `[*B, size]`, in MuJoCo's units."""
    return world["parameters"][..., _parameter_columns(sim, field, name)].float()


def field_value(sim: Simulation, world: TensorDict, field: str, name: str) -> Tensor:
    """Return the values of a model field for one object, `[*B, size]`, in MuJoCo's units. The field need not vary."""
    if (field, name) in sim.varied:
        return parameter(sim, world, field, name)
    values = field_of(sim.model, field).ravel()[rows_of(sim.model, field, name)].tolist()
    return torch.tensor(values, device=world["physics"].device).expand(*world.batch_size, len(values))


def body_scale(sim: Simulation, world: TensorDict, name: str) -> Tensor:
    """Return the lengths of an object along x, y and z, divided by its lengths in the scene config, `[*B, 3]`."""
    kinds, geom = mujoco().mjtGeom, id_of(sim.model, "geom", name)
    home, size = sim.model.geom_size[geom].tolist(), field_value(sim, world, "geom_size", name)
    ratio = torch.where(size.new_tensor(home) == 0.0, 1.0, size / size.new_tensor([edge or 1.0 for edge in home]))
    round_about_z = dict.fromkeys((int(kinds.mjGEOM_CYLINDER), int(kinds.mjGEOM_CAPSULE)), (0, 0, 1))
    columns = round_about_z | {int(kinds.mjGEOM_SPHERE): (0, 0, 0)}
    return torch.stack([ratio[..., i] for i in columns.get(int(sim.model.geom_type[geom]), (0, 1, 2))], -1)


def with_parameter(sim: Simulation, world: TensorDict, field: str, name: str, values: Tensor) -> TensorDict:
    """Return worlds with the values of a varied model field for one object set to `values`.

    A new mass or size of a body does not change the body's inertia.
    """
    columns, row = _parameter_columns(sim, field, name), world["parameters"]
    values = values.double().expand(*world.batch_size, columns.stop - columns.start)
    parameters = torch.cat((row[..., : columns.start], values, row[..., columns.stop :]), -1)
    return world.copy().set("parameters", parameters)
