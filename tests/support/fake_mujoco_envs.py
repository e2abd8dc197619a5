"""Two small environments of MuJoCo that only tests need: an arm that reaches, and a cart-pole from an MJCF text."""

from math import inf

import torch
from pydantic import Field

from ecrl import rng
from ecrl.envs import Env, state_of, time_limit
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import advance, simulation, start
from ecrl.envs.mujoco.scene.config import RobotConfig, SceneConfig
from ecrl.spaces import box

POLE = """<mujoco><option timestep="0.02" integrator="implicitfast"/><worldbody><body name="cart">
<joint name="slide" type="slide" axis="1 0 0" range="-1 1" damping="1"/><geom type="box" size=".1 .1 .05" mass="2"/>
<body name="pole"><joint name="hinge" axis="0 1 0" damping=".01"/>
<geom type="capsule" size=".03" fromto="0 0 0 0 0 .6" mass="1" contype="0" conaffinity="0"/>
</body></body></worldbody><actuator><motor name="push" joint="slide" gear="30"/></actuator></mujoco>"""


class ReachConfig(SceneConfig):
    """The arm."""

    robot: RobotConfig | None = Field(RobotConfig.model_construct(), description="the arm")
    max_episode_steps: int = Field(25, description="steps")


def reach(cfg: ReachConfig) -> Env:
    """Task: bring the tool to a target within 0.2 m. The reward is -5 d, and 1 within 5 cm, which ends the episode."""
    sim = simulation(cfg)
    joints, tcp = sim.robot.joints, sim.robot.tcp["arm"]
    home = torch.tensor(sim.home.qpos[:6]).float()

    def observe(state):
        place = world.site_pose(sim, state["world"], tcp)[..., :3, 3]
        parts = world.joint_positions(sim, state["world"], joints), world.joint_velocities(sim, state["world"], joints)
        return torch.cat((parts[0] - home, 0.2 * parts[1], 5.0 * (state["target"] - place)), -1)

    def reset(keys):
        words = rng.uniform(keys, (9,)) * 2.0 - 1.0
        begin = start(sim, keys.shape, keys.device)
        begin = world.with_joint_positions(sim, begin, joints, home + 0.1 * words[..., :6])
        target = torch.tensor([-0.688, -0.164, 0.487]) + 0.2 * words[..., 6:]
        fields = {"world": begin, "target": target}
        return state_of(observe(fields), keys.shape, **fields)

    def step(state, action, noise):
        goal = world.joint_positions(sim, state["world"], joints) + 0.1 * action
        after, bad = advance(sim, state["world"], goal)
        distance = torch.linalg.vector_norm(world.site_pose(sim, after, tcp)[..., :3, 3] - state["target"], dim=-1)
        near = distance < 0.05
        reward = 1.0 * near - 5.0 * distance
        moved = state.copy().update({"world": after, "reward": reward, "terminated": near | bad})
        return moved.set("obs", observe(moved))

    env = Env(reset, step, box(-inf, inf, 15), box(-1.0, 1.0, 6), observe=observe)
    return time_limit(env, cfg.max_episode_steps)


class PoleConfig(SceneConfig):
    """The cart-pole."""

    mjcf: str | None = Field(POLE, description="the scene")
    sim_steps_per_control: int = Field(2, description="physics steps per step")
    max_episode_steps: int = Field(100, description="steps")


def pole(cfg: PoleConfig) -> Env:
    """Keep the pole up: reward 1 per step, the end at 0.3 rad."""
    sim = simulation(cfg)

    def observe(state):
        return torch.cat((world.qpos(sim, state["world"]), world.qvel(sim, state["world"])), -1)

    def reset(keys):
        tilt = 0.1 * (rng.uniform(keys, (2,)) * 2.0 - 1.0)
        begin = world.with_joint_positions(sim, start(sim, keys.shape, keys.device), ("slide", "hinge"), tilt)
        return state_of(observe({"world": begin}), keys.shape, world=begin)

    def step(state, action, noise):
        after, bad = advance(sim, state["world"], action)
        fallen = (world.joint_positions(sim, after, ("hinge",))[..., 0].abs() > 0.3) | bad
        moved = state.copy().update({"world": after, "reward": torch.ones_like(state["reward"]), "terminated": fallen})
        return moved.set("obs", observe(moved))

    env = Env(reset, step, box(-inf, inf, 4), box(-1.0, 1.0, 1), observe=observe)
    return time_limit(env, cfg.max_episode_steps)
