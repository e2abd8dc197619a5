"""Where the parts of a scene are, as tensors of the joint positions: poses and Jacobians, exact and differentiable.

They need no pass through MuJoCo, so the start of an episode is observed like any other state. A pose is a homogeneous
4x4 matrix, rotation and position, in m. With a constant matrix each, a joint and what is fixed before it are linear in
two functions of its position, so all joints of a chain are worked out at once and then multiplied:

    hinge  A + sin(q) B + (1 - cos(q)) C        slide  A + q B
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ecrl.envs.mujoco.scene.models import mujoco


class Joint(NamedTuple):
    """A hinge or slide: where its position is, its zero, degree of freedom, axis, anchor, and the matrices A, B, C."""

    at: int
    zero: float
    dof: int
    hinge: bool
    axis: np.ndarray
    anchor: np.ndarray
    terms: np.ndarray


class Loose(NamedTuple):
    """A body that turns freely: a ball joint, a free body or one moved from outside; what is fixed before and after.

    `place` is where its position is, absent for a ball; `turn` where its quaternion is; both in the positions of
    joints followed by those and the quaternions of bodies moved from outside.
    """

    place: int | None
    turn: int
    before: np.ndarray
    after: np.ndarray


class Chain(NamedTuple):
    """What leads from the world to a part of the scene, and what is fixed after the last joint."""

    steps: tuple[Joint | Loose, ...]
    end: np.ndarray


def _quaternion_terms() -> np.ndarray:
    """`[16, 16]`: a pose's rotation, row by row, is linear in the products of a quaternion's numbers."""
    terms = np.zeros((4, 4, 4, 4))
    for i in range(3):
        j, k = (i + 1) % 3, (i + 2) % 3
        a, b, c = i + 1, j + 1, k + 1
        terms[i, i, 0, 0] = terms[i, i, a, a] = 1.0
        terms[i, i, b, b] = terms[i, i, c, c] = -1.0
        terms[i, j, a, b] = terms[j, i, a, b] = terms[j, i, 0, c] = 2.0
        terms[i, j, 0, c] = -2.0
    return terms.reshape(16, 16).T.copy()


_TURN = _quaternion_terms()
_PLACE, _ONE = np.eye(16)[[3, 7, 11]], np.eye(16)[15]  # of a position in a pose, and of its last number


def pose(position: Tensor | None, quaternion: Tensor) -> Tensor:
    """The pose `[*B, 4, 4]` at a position `[*B, 3]` (None: the origin), turned by a quaternion `[*B, 4]`, w x y z.

    The quaternion need not be of length 1, but not 0.

    >>> pose(None, torch.tensor([0.0, 0.0, 0.0, 2.0]))[:3, :3]  # half a turn about z
    tensor([[-1.,  0.,  0.],
            [ 0., -1.,  0.],
            [ 0.,  0.,  1.]])
    """
    unit = quaternion / torch.linalg.vector_norm(quaternion, dim=-1, keepdim=True)
    products = (unit.unsqueeze(-1) * unit.unsqueeze(-2)).flatten(-2)
    out = products @ unit.new_tensor(_TURN) + unit.new_tensor(_ONE)
    out = out if position is None else out + position @ unit.new_tensor(_PLACE)
    return out.unflatten(-1, (4, 4))


def fixed(position: Any, quaternion: Any) -> np.ndarray:
    """A constant pose."""
    out, matrix = np.eye(4), np.zeros(9)
    mujoco().mju_quat2Mat(matrix, np.asarray(quaternion, float))
    out[:3, :3], out[:3, 3] = matrix.reshape(3, 3), position
    return out


def _shift(by: Any) -> np.ndarray:
    return fixed(by, (1.0, 0.0, 0.0, 0.0))


def _joint(model: Any, joint: int, before: np.ndarray) -> Joint | Loose:
    kinds, kind = mujoco().mjtJoint, int(model.jnt_type[joint])
    at, dof = int(model.jnt_qposadr[joint]), int(model.jnt_dofadr[joint])
    anchor, axis = np.array(model.jnt_pos[joint]), np.array(model.jnt_axis[joint])
    if kind == int(kinds.mjJNT_FREE):
        return Loose(at, at + 3, np.eye(4), np.eye(4))
    if kind == int(kinds.mjJNT_BALL):
        return Loose(None, at, before @ _shift(anchor), _shift(-anchor))
    once, twice = np.zeros((4, 4)), np.zeros((4, 4))
    hinge = kind == int(kinds.mjJNT_HINGE)
    if hinge:
        x, y, z = axis
        once[:3, :3] = [[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]]
        once, twice = (_shift(anchor) @ m @ _shift(-anchor) for m in (once, once @ once))
    else:
        once[:3, 3] = axis
    terms = np.stack([before, before @ once, before @ twice])
    return Joint(at, float(model.qpos0[at]), dof, hinge, axis, anchor, terms)


def chain(model: Any, body: int, end: np.ndarray | None = None) -> Chain:
    """What leads to a body of a model, or to what is fixed to it by the pose `end`."""
    bodies, before = [], np.eye(4)
    steps: list[Joint | Loose] = []
    while body:
        bodies.insert(0, body)
        body = int(model.body_parentid[body])
    for part in bodies:
        before = before @ fixed(model.body_pos[part], model.body_quat[part])
        if (which := int(model.body_mocapid[part])) >= 0:
            first = model.nq + 3 * which, model.nq + 3 * model.nmocap + 4 * which
            steps[:], before = [Loose(*first, np.eye(4), np.eye(4))], np.eye(4)
        first = int(model.body_jntadr[part])
        for joint in range(first, first + int(model.body_jntnum[part])):
            steps.append(_joint(model, joint, before))
            before = np.eye(4)
    return Chain(tuple(steps), before if end is None else before @ end)


def columns(values: Tensor, at: list[int]) -> Tensor:
    """Some of the last axis, as one slice where they follow each other."""
    if at == list(range(at[0], at[0] + len(at))):
        return values[..., at[0] : at[0] + len(at)]
    return torch.stack([values[..., i] for i in at], -1)


def _turned(joints: list[Joint], positions: Tensor) -> Tensor:
    """Poses of joints in the frames before them, `[*B, J, 4, 4]`."""
    q = columns(positions, [joint.at for joint in joints])
    if any(joint.zero for joint in joints):
        q = q - q.new_tensor([joint.zero for joint in joints])
    hinges = [joint.hinge for joint in joints]
    once = torch.sin(q) if all(hinges) else torch.where(torch.tensor(hinges, device=q.device), torch.sin(q), q)
    a, b, c = (q.new_tensor(np.stack([joint.terms[i] for joint in joints])) for i in range(3))
    if not any(hinges):
        return a + q[..., None, None] * b
    return a + once[..., None, None] * b + (1.0 - torch.cos(q))[..., None, None] * c


def follow(chain: Chain, positions: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """The pose at the end of a chain, and the pose after each hinge or slide by degree of freedom, all `[*B, 4, 4]`.

    Args:
        chain: what leads there.
        positions: `[*B, nq + 7 nmocap]` float: of the joints as MuJoCo lays them out, then the positions and the
            quaternions of bodies moved from outside.
    """
    joints = [step for step in chain.steps if isinstance(step, Joint)]
    turned = dict(zip([j.dof for j in joints], _turned(joints, positions).unbind(-3), strict=True)) if joints else {}
    after: dict[int, Tensor] = {}
    now = None
    for step in chain.steps:
        if isinstance(step, Joint):
            now = turned[step.dof] if now is None else now @ turned[step.dof]
            after[step.dof] = now
            continue
        place = None if step.place is None else positions[..., step.place : step.place + 3]
        loose = pose(place, positions[..., step.turn : step.turn + 4])
        if step.place is None:
            loose = loose.new_tensor(step.before) @ loose @ loose.new_tensor(step.after)
        now = loose if now is None or step.place is not None else now @ loose
    end = positions.new_tensor(chain.end)
    if now is None:
        return end.expand(*positions.shape[:-1], 4, 4), after
    return now if np.array_equal(chain.end, np.eye(4)) else now @ end, after


def motion(chain: Chain, positions: Tensor, dofs: list[int]) -> tuple[Tensor, Tensor]:
    """The pose at the end of a chain, `[*B, 4, 4]`, and how it moves and turns with hinges and slides.

    The latter is `[*B, 6, len(dofs)]`, m/rad or m/m, and rad/rad. Its first three rows are `axis x (end - anchor)` for
    a hinge and `axis` for a slide, the last three `axis` and 0; all are 0 for a degree of freedom that the end does not
    move with.
    """
    end, after = follow(chain, positions)
    joints = [step for step in chain.steps if isinstance(step, Joint) and step.dof in dofs]
    if not joints:
        return end, end.new_zeros(torch.Size((*end.shape[:-2], 6, len(dofs))))
    frames = torch.stack([after[joint.dof] for joint in joints], -3)[..., :3, :]
    axis = (frames[..., :3] * end.new_tensor(np.stack([joint.axis for joint in joints]))[:, None]).sum(-1)
    anchor = (frames[..., :3] * end.new_tensor(np.stack([joint.anchor for joint in joints]))[:, None]).sum(-1)
    moved = torch.linalg.cross(axis, end[..., None, :3, 3] - anchor - frames[..., 3])
    columns = torch.cat((moved, axis), -1)
    if not all(joint.hinge for joint in joints):
        hinges = torch.tensor([joint.hinge for joint in joints], device=end.device)[:, None]
        columns = torch.where(hinges, columns, torch.cat((axis, torch.zeros_like(axis)), -1))
    if [joint.dof for joint in joints] == dofs:
        return end, columns.mT
    found = dict(zip([joint.dof for joint in joints], columns.unbind(-2), strict=True))
    none = torch.zeros_like(columns[..., 0, :])
    return end, torch.stack([found.get(dof, none) for dof in dofs], -1)


def jacobian(chain: Chain, positions: Tensor, dofs: list[int]) -> Tensor:
    """How the end of a chain moves and turns with hinges and slides, `[*B, 6, len(dofs)]`; see `motion`."""
    return motion(chain, positions, dofs)[1]
