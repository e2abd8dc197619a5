"""A small scene whose numbers are known by hand, states of it, and terms made by name, for the tests of terms."""

from math import sqrt

import torch
from tensordict import TensorDict

from ecrl.config.model import validate_section
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import simulation, start
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.registry import lookup

CUBE = {"shape": {"shape_type": "Cube", "size": [0.1, 0.1, 0.1]}}
SCENE = {
    "robot": {"uid": "ur"},
    "rigid_object": [
        CUBE | {"uid": "cube", "init_pos": [-0.6, -0.4, 0.05]},
        CUBE | {"uid": "other", "init_pos": [0.6, 0.4, 0.05]},
        CUBE | {"uid": "mark", "init_pos": [0.0, 1.0, 0.05], "body_type": "kinematic"},
    ],
}
CART = {"robot": {"uid": "Cart", "robot_type": "CartPole"}}
STRETCHED = (-1.1843, -0.416141, 0.0116)
"""The position of the tool with all joints at 0: a2 + a3, -(d4 + d6 + 0.16), d1 - d5 of a UR10; its z axis is -y."""
SIDEWAYS = (sqrt(0.5), sqrt(0.5), 0.0, 0.0)
"""A quarter turn about x."""


def scene(cfg=SCENE):
    return simulation(validate_section(SceneConfig, cfg, "scene"))


def made(kind, name, sim, **params):
    """Make the term registered under a name, with settings as in JSON."""
    entry = lookup(kind, name)
    return entry.make(validate_section(entry.config, params, "params"), sim)


def task_state(sim, batch=(), actions=6):
    """Return the state of a task at the start."""
    state = TensorDict({"world": start(sim, batch)}, batch)
    state["targets"] = TensorDict({"goal_pose": torch.zeros(*batch, 3)}, batch)
    state["action"] = torch.zeros(*batch, actions)
    state["elapsed"] = torch.zeros(batch, dtype=torch.int64)
    for flag in ("success", "fail"):
        state[flag] = torch.zeros(batch, dtype=torch.bool)
    return state


def placed(sim, state, body, position=None, quaternion=None):
    """Return the state with an object at another pose."""
    parts = (None if x is None else torch.tensor(x).expand(*state.batch_size, -1) for x in (position, quaternion))
    return state.copy().set("world", world.with_body_pose(sim, state["world"], body, *parts))


def posed(sim, state, q=None, qdot=None):
    """Return the state with other positions or velocities of the robot's joints."""
    joints, moved = sim.robot.joints, state["world"]
    if q is not None:
        moved = world.with_joint_positions(sim, moved, joints, torch.as_tensor(q))
    if qdot is not None:
        moved = world.with_joint_velocities(sim, moved, joints, torch.as_tensor(qdot))
    return state.copy().set("world", moved)


def aimed(state, goal):
    """Return the state with another target."""
    goal = torch.as_tensor(goal).expand(*state.batch_size, 3).clone()
    return state.copy().set("targets", TensorDict({"goal_pose": goal}, state.batch_size))


def spun(sim, state, body, velocity):
    """Return the state with a moving object: linear velocity in the world's axes, angular velocity in its own axes."""
    first = world._columns(sim, "QVEL").start + world._first_dof(sim, body)
    velocity = torch.as_tensor(velocity)
    return state.copy().set("world", world._write(sim, state["world"], list(range(first, first + 6)), velocity))


def shaken(sim, batch, seed=0):
    """Return a random state without zeros, different in every environment."""
    gen = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*batch, *shape, generator=gen)

    state = posed(sim, task_state(sim, batch), noise(6), noise(6))
    for body in ("cube", "other", "mark"):
        quaternion = noise(4)
        moved = world.with_body_pose(
            sim, state["world"], body, 0.5 * noise(3), quaternion / quaternion.norm(dim=-1, keepdim=True)
        )
        state = state.set("world", moved)
    for body in ("cube", "other"):
        state = spun(sim, state, body, noise(6))
    state = aimed(state, 0.5 * noise(3)).set("action", noise(6)).set("success", noise() > 0.0)
    state["targets", "target_pose"] = 0.5 * noise(3)
    return state.set("elapsed", (noise() > 0.0).long())
