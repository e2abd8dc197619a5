"""Controls under which a robot stays where it is."""

from functools import cache

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.scene.models import id_of, mujoco


@cache
def _followers(sim: Simulation) -> tuple[str, ...]:
    """The robot's joints that have one actuator, whose control is a target position."""
    kind, targets = int(mujoco().mjtTrn.mjTRN_JOINT), sim.model.actuator_trnid[:, 0]
    driven = targets[sim.model.actuator_trntype == kind].tolist()
    alone = (joint for joint in sim.robot.joints if driven.count(id_of(sim.model, "jnt", joint)) == 1)
    return tuple(joint for joint in alone if world.drive_of(sim, joint) == "position")


def holding(sim: Simulation, moving: TensorDict) -> Tensor:
    """Controls that hold the robot where it is, `[*B, nu]`; those that are no target positions are as at the start."""
    home = torch.from_numpy(sim.home.ctrl).to(moving["physics"])
    columns = list(home.float().expand(*moving.batch_size, -1).unbind(-1))
    held = _followers(sim)
    if not held:
        return home.float().expand(*moving.batch_size, -1).clone()
    targets = world.joint_positions(sim, moving, held).unbind(-1)
    driven = zip(world.actuators_of(sim, held), world.controls_per_target(sim, held), targets, strict=True)
    for at, factor, target in driven:
        columns[at] = factor * target
    return torch.stack(columns, -1)
