"""A MuJoCo task to be filmed, for tests: the built-in arm waves over a cube until the episode ends."""

import pytest
import torch
from pydantic import Field

from ecrl import rng
from ecrl.config import config_from_dict
from ecrl.config.model import ConfigModel
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.camera import backend
from ecrl.envs.mujoco.make_task import task_env
from ecrl.envs.mujoco.scene.config import RobotConfig
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.envs.mujoco.terms.term import ActionTerm, JointsConfig, joints_of
from ecrl.errors import UserError
from ecrl.registry import register_action, register_env, register_event


def opengl_works():
    try:
        return bool(backend())
    except UserError:
        return False


gl = pytest.mark.skipif(not opengl_works(), reason="cameras need EGL or OSMesa, and neither works on this machine")
NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
CUBE = {"uid": "cube", "shape": {"shape_type": "Cube", "size": [0.1, 0.1, 0.1]}, "init_pos": [-0.6, -0.4, 0.05]}
UPSTREAM = {"eye": [-1.4, 1.4, 2.0], "target": [0, 0, 0], "up": [0, 0, 1]}
SMALL = UPSTREAM | {"resolution": [64, 48], "intrinsics": [60, 60, 32, 24]}


class GoalConfig(ConfigModel):
    """A place on the floor."""

    @property
    def stores(self):
        return {"goal": (0.0, 0.0, 0.05)}


class WaveConfig(TaskConfig):
    """The arm and a cube."""

    robot: RobotConfig | None = Field(RobotConfig.model_construct(), description="the arm")


@register_action("film_wave")
def wave(cfg: JointsConfig, sim) -> ActionTerm:
    """Joint positions up to 0.2 rad from where they are."""
    joints = joints_of(cfg, sim)

    def control(state, action):
        return world.joint_positions(sim, state["world"], joints) + 0.2 * action

    return ActionTerm(joints, "position", (-1.0,) * len(joints), (1.0,) * len(joints), control)


@register_event("film_goal")
def goal(cfg: GoalConfig, sim):
    """Left or right of the cube."""

    def apply(state, keys):
        side = 1.0 - 2.0 * rng.randint(keys, low=0, high=2)
        place = torch.stack((-0.6 + 0.25 * side, torch.full_like(side, -0.2), torch.full_like(side, 0.05)), -1)
        return state.copy().set("targets", state["targets"].copy().set("goal", place))

    return apply


def ended(sim, state):
    """Success after 6 steps where the goal is on the left, after 9 where it is on the right."""
    last = 6 + 3 * (state["targets", "goal"][..., 0] > -0.6)
    success = state["elapsed"] >= last
    return success, torch.zeros_like(success), {"side": state["targets", "goal"][..., 0]}


@register_env("film_task")
def film_task(cfg: WaveConfig):
    """Reward is the height of the tool."""

    def height(sim, before, after):
        return world.site_pose(sim, after["world"], sim.robot.tcp["arm"])[..., 2, 3]

    return task_env(cfg, ended, get_reward=height)


TASK = {
    "name": "film_task",
    "cfg": {
        "rigid_object": [CUBE],
        "actions": {"wave": {"func": "film_wave"}},
        "events": {"goal": {"func": "film_goal", "mode": "reset"}},
    },
}


def film(func="record_camera_data", interval_step=1, **params):
    """A camera's event."""
    return {"func": func, "mode": "interval", "interval_step": interval_step, "params": SMALL | params}


def filmed_run(train=None, evaluation=None, **changes):
    """A short run with cameras."""
    events = {"train": train or {}, "eval": evaluation or {}}
    trainer = {"num_envs": 4, "buffer_size": 8, "iterations": 2, "compile": "off", "events": events}
    trainer |= {"enable_eval": True, "eval_freq": 32, "num_eval_envs": 4, "num_eval_episodes": 4, "eval_seed": 0}
    base = {
        "trainer": trainer,
        "env": TASK,
        "policy": {"name": "actor_critic", "actor": NET, "critic": NET},
        "algorithm": {"name": "ppo", "cfg": {"n_epochs": 1, "batch_size": 16}},
    }
    return config_from_dict(base).replace(**changes)
