"""Controls that hold a robot at its current position."""

from functools import cache

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.scene.models import id_of, mujoco


@cache
def _position_joints(sim: Simulation) -> tuple[str, ...]:
    """Return the robot's joints that have exactly one actuator, a position drive."""
    kind, targets = int(mujoco().mjtTrn.mjTRN_JOINT), sim.model.actuator_trnid[:, 0]
    driven = targets[sim.model.actuator_trntype == kind].tolist()
    single = (joint for joint in sim.robot.joints if driven.count(id_of(sim.model, "jnt", joint)) == 1)
    return tuple(joint for joint in single if world.drive_of(sim, joint) == "position")


def hold_controls(sim: Simulation, worlds: TensorDict) -> Tensor:
    """Return controls `[*B, nu]` that hold the robot's position drives at their current positions.

    All other controls have their values of the start.
    """
    home = torch.from_numpy(sim.home.ctrl).to(worlds["physics"])
    columns = list(home.float().expand(*worlds.batch_size, -1).unbind(-1))
    joints = _position_joints(sim)
    if not joints:
        return home.float().expand(*worlds.batch_size, -1).clone()
    targets = world.joint_positions(sim, worlds, joints).unbind(-1)
    drives = zip(world.actuators_of(sim, joints), world.controls_per_target(sim, joints), targets, strict=True)
    for actuator, factor, target in drives:
        columns[actuator] = factor * target
    return torch.stack(columns, -1)
