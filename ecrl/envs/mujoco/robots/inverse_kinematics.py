"""Joint positions that bring a site to a pose: damped least squares for many rows at once.

A step follows the Jacobian J towards what is missing, e, and is held back where J loses rank:

    dq = J^T (J J^T + lambda I)^-1 e = (J^T J + lambda I)^-1 J^T e,        lambda = 0.05 e.e + 1e-4

The damping that grows with the error makes the first steps cautious and the last ones those of Gauss and Newton.
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

_DAMPING, _LEAST = 0.05, 1e-4
_LONGEST = 1.0  # step of a joint, rad or m
_TINY = 1e-6


class Reached(NamedTuple):
    """Joint positions `[*B, J]`, and how far from the pose they leave the end, `[*B]`: m, and rad."""

    positions: Tensor
    distance: Tensor
    angle: Tensor


def _turning() -> list[list[float]]:
    """`[9, 4]`: the axis of a rotation times the sine of its angle, and its trace, are linear in its numbers."""
    terms = np.zeros((3, 3, 4))
    for i in range(3):
        terms[(i + 2) % 3, (i + 1) % 3, i], terms[(i + 1) % 3, (i + 2) % 3, i] = 0.5, -0.5
        terms[i, i, 3] = 1.0
    return terms.reshape(9, 4).tolist()


_TURNING = _turning()


def _turn(pose: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Axis times sine, sine, and angle of the rotation between two poses, `[*B, 3]`, `[*B, 1]` and `[*B, 1]`."""
    turn = target[..., :3, :3] @ pose[..., :3, :3].mT
    terms = (turn.flatten(-2).unsqueeze(-1) * turn.new_tensor(_TURNING)).sum(-2)
    sine = torch.linalg.vector_norm(terms[..., :3], dim=-1, keepdim=True)
    return terms[..., :3], sine, torch.atan2(sine, 0.5 * (terms[..., 3:] - 1.0))


def missing(pose: Tensor, target: Tensor) -> Tensor:
    """What leads from one pose to another, both `[*B, 4, 4]`: the way, m, and the turn, axis times angle, `[*B, 6]`.

    Of half a turn, up to 1e-6 rad, the axis is not known; then some turn below pi or none is given.

    >>> turned = torch.tensor([[0.0, -1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 2.0], [0.0, 0.0, 1.0, 3.0], [0.0, 0.0, 0.0, 1.0]])
    >>> missing(torch.eye(4), turned)  # a quarter about z
    tensor([1.0000, 2.0000, 3.0000, 0.0000, 0.0000, 1.5708])
    """
    axis, sine, angle = _turn(pose, target)
    return torch.cat((target[..., :3, 3] - pose[..., :3, 3], axis * (angle / sine.clamp_min(_TINY))), -1)


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """`matrix^-1 right` for symmetric positive definite matrices `[*B, n, n]` of small n, and `[*B, n]`.

    By Gauss and Jordan, each step one expression for all rows; such matrices need no pivots.

    >>> solve(torch.tensor([[4.0, 2.0], [2.0, 3.0]]), torch.tensor([2.0, 5.0]))
    tensor([-0.5000,  2.0000])
    """
    many, both = matrix.shape[-1], torch.cat((matrix, right.unsqueeze(-1)), -1)
    unit = torch.eye(many, dtype=both.dtype, device=both.device)
    for k in range(many):
        row, column = both[..., k : k + 1, :], both[..., k : k + 1] - unit[:, k : k + 1]
        both = both - column * (row / row[..., k : k + 1])
    return both[..., -1]


def _step(where: tuple, positions: Tensor, _: Tensor, target: Tensor, moving: TensorDict) -> tuple[Tensor, None]:
    sim, site, joints = where
    low, high = (positions.new_tensor(limits) for limits in world.joint_limits(sim, joints))
    pose, jacobian = world.site_motion(sim, moving, site, joints, positions)
    error = missing(pose, target)
    damping = _DAMPING * error.square().sum(-1) + _LEAST
    square = (jacobian.unsqueeze(-2) * jacobian.unsqueeze(-3)).sum(-1)
    unit = torch.eye(6, dtype=square.dtype, device=square.device)
    right = solve(square + damping[..., None, None] * unit, error)
    step = (jacobian * right.unsqueeze(-1)).sum(-2)
    shorter = _LONGEST / step.abs().amax(-1, keepdim=True).clamp_min(_LONGEST)
    return (positions + shorter * step).clamp(low, high), None


def inverse_kinematics(
    sim: Simulation, moving: TensorDict, site: str, joints: tuple[str, ...], target: Tensor, *, iterations: int
) -> Reached:
    """Positions of joints that bring a site to a pose, as far as some steps lead from where they are.

        positions = clamp(positions + shortened(dq), lowest, highest),        dq as at the top of this file

    A step is shortened so that no joint goes further than 1 rad or 1 m. There may be no such positions, and where
    there are the steps may end elsewhere: look at `distance` and `angle`.

    Args:
        sim: the simulation.
        moving: worlds `[*B]`; the other joints are where they are there.
        site: its name, such as `sim.robot.tcp["arm"]`.
        joints: names of hinges and slides.
        target: `[*B, 4, 4]` float32, the pose wanted, in the world, m.
        iterations: steps.

    Returns: `Reached`. A target that is not finite gives numbers that are not.
    Gradient: flows, but not through the shortening or beyond a limit.
    Source: damped least squares by Wampler 1986, "Manipulator inverse kinematic solutions based on vector formulations
        and damped least-squares methods", and Nakamura and Hanafusa 1986, "Inverse kinematic solutions with singularity
        robustness for robot manipulator control"; damping by the error as in Sugihara 2011, "Solvability-unconcerned
        inverse kinematics by the Levenberg-Marquardt method".
    """
    step, turns = partial(_step, (sim, site, joints)), target.new_zeros(iterations)
    positions, _ = loop(step, world.joint_positions(sim, moving, joints), turns, target, moving)
    pose = world.site_motion(sim, moving, site, joints, positions)[0]
    distance = torch.linalg.vector_norm((target - pose)[..., :3, 3], dim=-1)
    return Reached(positions, distance, _turn(pose, target)[2].squeeze(-1))
