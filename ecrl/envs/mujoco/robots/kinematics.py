"""Forward kinematics: compute exact, differentiable poses and Jacobians from joint positions with tensor functions.

The tensor functions do not call MuJoCo, so they also work for a state that MuJoCo has not stepped yet. A pose is a
homogeneous 4x4 matrix whose position is in m. The local pose of a joint is its pose in the frame of the preceding
joint, including the fixed transform between the two joints. The local pose depends on the joint's displacement q and on
constant matrices A, B and C:

    hinge  A + sin(q) B + (1 - cos(q)) C        slide  A + q B

The local poses of all joints in a chain are therefore computed at once, and are then multiplied.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ecrl.envs.mujoco.scene.models import mujoco


class Joint(NamedTuple):
    """A hinge or slide joint.

    `index` is the column of the joint's position in the argument `positions` of `follow`. The displacement q is the
    position minus `zero`. `dof` is the index of the joint's degree of freedom. `terms` stacks the matrices A, B and C.
    """

    index: int
    zero: float
    dof: int
    hinge: bool
    axis: np.ndarray
    anchor: np.ndarray
    terms: np.ndarray


class FreeRotation(NamedTuple):
    """A ball joint, free body or mocap body, with the fixed transforms before and after its rotation.

    `position` and `quaternion` are the indices of the first column of the position and of the quaternion in the
    argument `positions` of `follow`. `position` is None for a ball joint.
    """

    position: int | None
    quaternion: int
    before: np.ndarray
    after: np.ndarray


class Chain(NamedTuple):
    """A kinematic chain: the joints from the world to a body or site, and the fixed transform after the last joint."""

    steps: tuple[Joint | FreeRotation, ...]
    end: np.ndarray


def _quaternion_terms() -> np.ndarray:
    """Return the matrix `[16, 16]` that maps products of a quaternion's components to a pose, flattened row by row."""
    terms = np.zeros((4, 4, 4, 4))
    for i in range(3):
        j, k = (i + 1) % 3, (i + 2) % 3
        a, b, c = i + 1, j + 1, k + 1
        terms[i, i, 0, 0] = terms[i, i, a, a] = 1.0
        terms[i, i, b, b] = terms[i, i, c, c] = -1.0
        terms[i, j, a, b] = terms[j, i, a, b] = terms[j, i, 0, c] = 2.0
        terms[i, j, 0, c] = -2.0
    return terms.reshape(16, 16).T.copy()


_ROTATION = _quaternion_terms()
_POSITION, _ONE = np.eye(16)[[3, 7, 11]], np.eye(16)[15]  # masks of a flattened pose's position and last entry


def pose(position: Tensor | None, quaternion: Tensor) -> Tensor:
    """Convert a position `[*B, 3]` and a quaternion `[*B, 4]` in the order w, x, y, z to a pose `[*B, 4, 4]`.

    If `position` is None, the pose is at the origin. The quaternion is normalised, so its length must not be 0.

    >>> pose(None, torch.tensor([0.0, 0.0, 0.0, 2.0]))[:3, :3]  # half a turn about z
    tensor([[-1.,  0.,  0.],
            [ 0., -1.,  0.],
            [ 0.,  0.,  1.]])
    """
    unit = quaternion / torch.linalg.vector_norm(quaternion, dim=-1, keepdim=True)
    products = (unit.unsqueeze(-1) * unit.unsqueeze(-2)).flatten(-2)
    out = products @ unit.new_tensor(_ROTATION) + unit.new_tensor(_ONE)
    out = out if position is None else out + position @ unit.new_tensor(_POSITION)
    return out.unflatten(-1, (4, 4))


def quaternion_of(pose: Tensor) -> Tensor:
    """Return the quaternion `[*B, 4]` (w, x, y, z) of a pose `[*B, 4, 4]`. The first component is >= 0.

        4 w^2 = 1 + R00 + R11 + R22,  4 w x = R21 - R12, and so on

    Row i of `rows` is 4 q[i] q, where q is the quaternion. The row of the largest component of q is the most precise.

    >>> quaternion_of(torch.tensor([[0.0, -1.0, 0.0, 7.0], [1.0, 0.0, 0.0, 8.0], [0.0, 0.0, 1.0, 9.0], [0.0] * 4]))
    tensor([0.7071, 0.0000, 0.0000, 0.7071])
    """
    (a, b, c), (d, e, f), (g, h, i) = (row.unbind(-1) for row in pose[..., :3, :3].unbind(-2))
    rows = [
        [1.0 + a + e + i, h - f, c - g, d - b],
        [h - f, 1.0 + a - e - i, b + d, c + g],
        [c - g, b + d, 1.0 - a + e - i, f + h],
        [d - b, c + g, f + h, 1.0 - a - e + i],
    ]
    products = torch.stack([torch.stack(row, -1) for row in rows], -2)
    largest = products.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None].expand(*products.shape[:-2], 1, 4)
    row = products.gather(-2, largest).squeeze(-2)
    unit = row / torch.linalg.vector_norm(row, dim=-1, keepdim=True)
    return torch.where(unit[..., :1] < 0.0, -unit, unit)


def constant_pose(position: Any, quaternion: Any) -> np.ndarray:
    """Convert a position and a quaternion to a pose, and return the pose as a NumPy array `[4, 4]`."""
    out, matrix = np.eye(4), np.zeros(9)
    mujoco().mju_quat2Mat(matrix, np.asarray(quaternion, float))
    out[:3, :3], out[:3, 3] = matrix.reshape(3, 3), position
    return out


def _translation(offset: Any) -> np.ndarray:
    return constant_pose(offset, (1.0, 0.0, 0.0, 0.0))


def _joint(model: Any, joint: int, before: np.ndarray) -> Joint | FreeRotation:
    kinds, kind = mujoco().mjtJoint, int(model.jnt_type[joint])
    index, dof = int(model.jnt_qposadr[joint]), int(model.jnt_dofadr[joint])
    anchor, axis = np.array(model.jnt_pos[joint]), np.array(model.jnt_axis[joint])
    if kind == int(kinds.mjJNT_FREE):
        return FreeRotation(index, index + 3, np.eye(4), np.eye(4))
    if kind == int(kinds.mjJNT_BALL):
        return FreeRotation(None, index, before @ _translation(anchor), _translation(-anchor))
    b, c = np.zeros((4, 4)), np.zeros((4, 4))
    hinge = kind == int(kinds.mjJNT_HINGE)
    if hinge:
        x, y, z = axis
        b[:3, :3] = [[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]]  # cross product with the axis, as in Rodrigues' formula
        b, c = (_translation(anchor) @ m @ _translation(-anchor) for m in (b, b @ b))
    else:
        b[:3, 3] = axis
    terms = np.stack([before, before @ b, before @ c])
    return Joint(index, float(model.qpos0[index]), dof, hinge, axis, anchor, terms)


def chain(model: Any, body: int, end: np.ndarray | None = None) -> Chain:
    """Return the chain from the world to a body of a model, or to the pose `end` in the frame of that body."""
    bodies, before = [], np.eye(4)
    steps: list[Joint | FreeRotation] = []
    while body:
        bodies.insert(0, body)
        body = int(model.body_parentid[body])
    for part in bodies:
        before = before @ constant_pose(model.body_pos[part], model.body_quat[part])
        if (mocap := int(model.body_mocapid[part])) >= 0:
            first = model.nq + 3 * mocap, model.nq + 3 * model.nmocap + 4 * mocap
            steps[:], before = [FreeRotation(*first, np.eye(4), np.eye(4))], np.eye(4)
        first = int(model.body_jntadr[part])
        for joint in range(first, first + int(model.body_jntnum[part])):
            steps.append(_joint(model, joint, before))
            before = np.eye(4)
    return Chain(tuple(steps), before if end is None else before @ end)


def columns(values: Tensor, indices: list[int]) -> Tensor:
    """Select columns of the last axis.

    Contiguous columns are read by one slice, because a slice is faster than separate reads.
    """
    if indices == list(range(indices[0], indices[0] + len(indices))):
        return values[..., indices[0] : indices[0] + len(indices)]
    return torch.stack([values[..., i] for i in indices], -1)


def _joint_poses(joints: list[Joint], positions: Tensor) -> Tensor:
    """Return the pose of each joint in the frame of the preceding joint, `[*B, J, 4, 4]`."""
    q = columns(positions, [joint.index for joint in joints])
    if any(joint.zero for joint in joints):
        q = q - q.new_tensor([joint.zero for joint in joints])
    hinges = [joint.hinge for joint in joints]
    sin_or_q = torch.sin(q) if all(hinges) else torch.where(torch.tensor(hinges, device=q.device), torch.sin(q), q)
    a, b, c = (q.new_tensor(np.stack([joint.terms[i] for joint in joints])) for i in range(3))
    if not any(hinges):
        return a + q[..., None, None] * b
    return a + sin_or_q[..., None, None] * b + (1.0 - torch.cos(q))[..., None, None] * c


def follow(chain: Chain, positions: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Compute the pose at the end of a chain, and the pose after each hinge or slide of the chain.

    Args:
        chain: the chain to follow.
        positions: `[*B, nq + 7 nmocap]` float: joint positions in MuJoCo's layout, then the positions and then the
            quaternions of mocap bodies.

    Returns: the pose at the end, and the poses after the hinges and slides, in a dictionary by degree of freedom. All
        poses are `[*B, 4, 4]`.
    """
    joints = [step for step in chain.steps if isinstance(step, Joint)]
    local: dict[int, Tensor] = {}
    if joints:
        local = dict(zip([joint.dof for joint in joints], _joint_poses(joints, positions).unbind(-3), strict=True))
    after: dict[int, Tensor] = {}
    current = None
    for step in chain.steps:
        if isinstance(step, Joint):
            current = local[step.dof] if current is None else current @ local[step.dof]
            after[step.dof] = current
            continue
        position = None if step.position is None else positions[..., step.position : step.position + 3]
        body = pose(position, positions[..., step.quaternion : step.quaternion + 4])
        if step.position is None:
            body = body.new_tensor(step.before) @ body @ body.new_tensor(step.after)
        current = body if current is None or step.position is not None else current @ body
    end = positions.new_tensor(chain.end)
    if current is None:
        return end.expand(*positions.shape[:-1], 4, 4), after
    return current if np.array_equal(chain.end, np.eye(4)) else current @ end, after


def motion(chain: Chain, positions: Tensor, dofs: list[int]) -> tuple[Tensor, Tensor]:
    """Return the pose at the end of a chain, `[*B, 4, 4]`, and its Jacobian `[*B, 6, len(dofs)]`.

    The first three rows of the Jacobian are the translation: `axis x (end - anchor)` for a hinge (m/rad) and `axis` for
    a slide (m/m). The last three rows of the Jacobian are the rotation: `axis` for a hinge (rad/rad) and 0 for a slide.
    The column of a degree of freedom that does not move the end of the chain is 0.
    """
    end, after = follow(chain, positions)
    joints = [step for step in chain.steps if isinstance(step, Joint) and step.dof in dofs]
    if not joints:
        return end, end.new_zeros(torch.Size((*end.shape[:-2], 6, len(dofs))))
    frames = torch.stack([after[joint.dof] for joint in joints], -3)[..., :3, :]
    axis = (frames[..., :3] * end.new_tensor(np.stack([joint.axis for joint in joints]))[:, None]).sum(-1)
    anchor = (frames[..., :3] * end.new_tensor(np.stack([joint.anchor for joint in joints]))[:, None]).sum(-1)
    translation = torch.linalg.cross(axis, end[..., None, :3, 3] - anchor - frames[..., 3])
    columns = torch.cat((translation, axis), -1)
    if not all(joint.hinge for joint in joints):
        hinges = torch.tensor([joint.hinge for joint in joints], device=end.device)[:, None]
        columns = torch.where(hinges, columns, torch.cat((axis, torch.zeros_like(axis)), -1))
    if [joint.dof for joint in joints] == dofs:
        return end, columns.mT
    by_dof = dict(zip([joint.dof for joint in joints], columns.unbind(-2), strict=True))
    zero = torch.zeros_like(columns[..., 0, :])
    return end, torch.stack([by_dof.get(dof, zero) for dof in dofs], -1)


def jacobian(chain: Chain, positions: Tensor, dofs: list[int]) -> Tensor:
    """Return the Jacobian of the end of a chain, `[*B, 6, len(dofs)]`; see `motion`."""
    return motion(chain, positions, dofs)[1]
