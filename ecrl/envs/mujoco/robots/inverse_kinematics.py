"""Inverse kinematics by damped least squares, for a batch of poses at once.

Each step adds a change dq to the joint positions, to reduce the pose error e that `pose_error` returns. J is the
Jacobian of the pose. The damping lambda keeps dq bounded if J loses rank:

    dq = J^T (J J^T + lambda I)^-1 e = (J^T J + lambda I)^-1 J^T e,        lambda = 0.05 e.e + 1e-4

The damping grows with the error, so the first steps are small and the last steps approach Gauss-Newton steps.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.kernels.scan_loop import loop

_DAMPING, _MIN_DAMPING = 0.05, 1e-4
_MAX_STEP = 1.0  # largest change (rad or m) of a joint position in one step
_MIN_SINE = 1e-6


class Reached(NamedTuple):
    """Result of inverse kinematics: joint positions `[*B, J]`, and the remaining pose error.

    The pose error consists of a `distance` (m) and an `angle` (rad), each `[*B]`.
    """

    positions: Tensor
    distance: Tensor
    angle: Tensor


def _axis_trace_terms() -> list[list[float]]:
    """Return the matrix `[9, 4]` that maps a flattened rotation matrix to axis * sin(angle) and to the trace."""
    terms = np.zeros((3, 3, 4))
    for i in range(3):
        terms[(i + 2) % 3, (i + 1) % 3, i], terms[(i + 1) % 3, (i + 2) % 3, i] = 0.5, -0.5
        terms[i, i, 3] = 1.0
    return terms.reshape(9, 4).tolist()


_AXIS_TRACE = _axis_trace_terms()


def _rotation_between(pose: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return axis * sin(angle), sin(angle) and angle (rad) of the rotation from `pose` to `target`.

    The three results have the shapes `[*B, 3]`, `[*B, 1]` and `[*B, 1]`.
    """
    rotation = target[..., :3, :3] @ pose[..., :3, :3].mT
    terms = (rotation.flatten(-2).unsqueeze(-1) * rotation.new_tensor(_AXIS_TRACE)).sum(-2)
    sine = torch.linalg.vector_norm(terms[..., :3], dim=-1, keepdim=True)
    return terms[..., :3], sine, torch.atan2(sine, 0.5 * (terms[..., 3:] - 1.0))


def pose_error(pose: Tensor, target: Tensor) -> Tensor:
    """Return the translation (m) and the rotation (axis * angle, rad) from `pose` to `target`, `[*B, 6]`.

    `pose` and `target` are `[*B, 4, 4]`. If the angle is within 1e-6 rad of half a turn, the axis is not well defined.
    For such an angle, the returned rotation is smaller than pi, or even 0.

    >>> target = torch.tensor([[0.0, -1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 2.0], [0.0, 0.0, 1.0, 3.0], [0.0, 0.0, 0.0, 1.0]])
    >>> pose_error(torch.eye(4), target)  # a quarter turn about z
    tensor([1.0000, 2.0000, 3.0000, 0.0000, 0.0000, 1.5708])
    """
    axis, sine, angle = _rotation_between(pose, target)
    return torch.cat((target[..., :3, 3] - pose[..., :3, 3], axis * (angle / sine.clamp_min(_MIN_SINE))), -1)


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve `matrix x = right` for small symmetric positive definite matrices `[*B, n, n]` and vectors `[*B, n]`.

    The method is Gauss-Jordan elimination, vectorised over the batch. Positive definite matrices need no pivoting.

    >>> solve(torch.tensor([[4.0, 2.0], [2.0, 3.0]]), torch.tensor([2.0, 5.0]))
    tensor([-0.5000,  2.0000])
    """
    size, augmented = matrix.shape[-1], torch.cat((matrix, right.unsqueeze(-1)), -1)
    unit = torch.eye(size, dtype=augmented.dtype, device=augmented.device)
    for k in range(size):
        row, column = augmented[..., k : k + 1, :], augmented[..., k : k + 1] - unit[:, k : k + 1]
        augmented = augmented - column * (row / row[..., k : k + 1])
    return augmented[..., -1]


def _step(chain: tuple, positions: Tensor, _: Tensor, target: Tensor, worlds: TensorDict) -> tuple[Tensor, None]:
    sim, site, joints = chain
    low, high = (positions.new_tensor(limits) for limits in world.joint_limits(sim, joints))
    pose, jacobian = world.site_motion(sim, worlds, site, joints, positions)
    error = pose_error(pose, target)
    damping = _DAMPING * error.square().sum(-1) + _MIN_DAMPING
    square = (jacobian.unsqueeze(-2) * jacobian.unsqueeze(-3)).sum(-1)
    unit = torch.eye(6, dtype=square.dtype, device=square.device)
    right = solve(square + damping[..., None, None] * unit, error)
    step = (jacobian * right.unsqueeze(-1)).sum(-2)
    scale = _MAX_STEP / step.abs().amax(-1, keepdim=True).clamp_min(_MAX_STEP)
    return (positions + scale * step).clamp(low, high), None


def inverse_kinematics(
    sim: Simulation, worlds: TensorDict, site: str, joints: tuple[str, ...], target: Tensor, *, iterations: int
) -> Reached:
    """Search for joint positions that move a site to a target pose, starting from the current joint positions.

        positions = clamp(positions + scaled(dq), lowest, highest),        dq as in the module's description

    A step is scaled down if a joint would move by more than 1 rad or 1 m. The target may be out of reach, or the search
    may end before the site reaches the target. The caller must therefore check the `distance` and the `angle` of the
    result.

    Args:
        sim: the simulation.
        worlds: worlds `[*B]` with the current joint positions. Joints that are not in `joints` keep these positions,
            unless they follow one of `joints`.
        site: name of the site, such as `sim.robot.tcp["arm"]`.
        joints: names of the hinge and slide joints to move.
        target: target pose in the world frame, `[*B, 4, 4]` float32, with the position in m.
        iterations: number of steps of the search.

    Returns: the joint positions and the remaining error, as a `Reached`. If a target is not finite, the results are not
        finite.
    Gradient: flows through `target` and the joint positions in `worlds`, except where a joint limit clamps a position.
    Source: damped least squares by Wampler 1986, "Manipulator inverse kinematic solutions based on vector formulations
        and damped least-squares methods", and Nakamura and Hanafusa 1986, "Inverse kinematic solutions with singularity
        robustness for robot manipulator control"; damping by the error as in Sugihara 2011, "Solvability-unconcerned
        inverse kinematics by the Levenberg-Marquardt method".
    """
    step, counter = partial(_step, (sim, site, joints)), target.new_zeros(iterations)
    positions, _ = loop(step, world.joint_positions(sim, worlds, joints), counter, target, worlds)
    pose = world.site_motion(sim, worlds, site, joints, positions)[0]
    distance = torch.linalg.vector_norm((target - pose)[..., :3, 3], dim=-1)
    return Reached(positions, distance, _rotation_between(pose, target)[2].squeeze(-1))
