"""Scaled tasks: every length is marked, and a small arm gets a small task."""

import re
import warnings
from typing import get_args

import pytest
import torch
from pydantic import BaseModel
from support.checks import close

from ecrl import rng
from ecrl.config import load_config
from ecrl.envs import make_env, make_expert
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.task_scale import scaled
from ecrl.envs.mujoco.tasks import PickCubeConfig, PushCubeConfig, ReachConfig, StackCubeConfig
from ecrl.envs.scaling import LENGTH, MASS, PER_LENGTH, ScalesWith
from ecrl.loop.build import with_training_wrappers
from ecrl.registry import lookup, registered
from ecrl.run.video_writer import cameras

TASKS = (PushCubeConfig, PickCubeConfig, StackCubeConfig, ReachConfig)
KEPT = {  # lengths that stay: of the robot, of its search for a posture, and of single joints
    ("RobotConfig", "init_pos"),
    ("SolverConfig", "tcp"),
    ("ComponentConfig", "transform"),
    ("EefSearchConfig", "position_tolerance"),
    ("ScaledConfig", "scale"),
    ("EefSearchConfig", "scale"),
    ("RandomizeEefPoseConfig", "position_tolerance"),
    ("RandomizeArticulationMassConfig", "mass_range"),
    ("ScalableTaskConfig", "scale"),
}
UNITS = {r"1/m$": PER_LENGTH, r"\bkg\b": MASS, r"\bm$|\bm[;,]|\bm/s(?!\^)\b": LENGTH}


def models_in(annotation):
    """Yield the Config models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def all_models():
    kinds = ("action", "observation", "reward", "event")
    todo = [*TASKS, *(lookup(kind, name).config for kind in kinds for name in registered(kind))]
    seen = {}
    while todo:
        model = todo.pop()
        if model.__name__ not in seen:
            seen[model.__name__] = model
            todo += [other for info in model.model_fields.values() for other in models_in(info.annotation)]
    return [model for model in seen.values() if model.__module__.startswith("ecrl.envs.mujoco")]


def test_every_length_mass_and_inverse_length_is_marked():
    checked = 0
    for model in all_models():
        for name, info in model.model_fields.items():
            text = re.sub(r"N m|by default.*|rad or m.*|m or rad.*|m/s or.*|rad/s or m/s.*", "", info.description or "")
            if info.annotation is bool:
                continue
            expected = next((unit for pattern, unit in UNITS.items() if re.search(pattern, text)), None)
            marked = next((x for x in info.metadata if isinstance(x, ScalesWith)), None)
            where = next(cls.__name__ for cls in reversed(model.__mro__) if name in getattr(cls, "model_fields", {}))
            if (where, name) in KEPT:
                assert marked is None
            elif expected is not None:
                assert marked == expected, f"{model.__name__}.{name}: {info.description}"
                checked += 1
    assert checked > 25


def test_a_scale_of_one_changes_nothing():
    cfg = PushCubeConfig()
    assert scaled(cfg) is cfg and scaled(cfg.model_copy(update={"scale": 1.0})) is not None


def test_lengths_masses_and_thresholds_are_multiplied():
    cfg = scaled(PushCubeConfig.model_validate({"scale": 0.5}))
    (cube,) = cfg.rigid_object
    assert cube.shape.size == (0.05,) * 3 and cube.init_pos == (-0.3, -0.2, 0.025)
    assert cube.attrs.mass == 0.25 and cube.attrs.static_friction == 1.0
    assert cfg.events["randomize_goal"].params.position_range == ((-0.15, -0.15, 0.025), (0.15, 0.15, 0.025))
    reach = cfg.rewards["reaching_reward"].params
    assert (reach.behind_offset, reach.distance_scale) == (0.015, 16.0)
    assert cfg.extensions.success_threshold == 0.05 and cfg.extensions.start_distance == 0.075
    assert cfg.actions["delta_qpos"].params.scale == 0.1 and cfg.robot == PushCubeConfig().robot


def test_thresholds_and_places_of_a_scaled_environment():
    env = make_env({"name": "PickCubeRL", "cfg": {"scale": 2.0}})
    cube = world.body_position(env.scene, env.reset(rng.split(rng.key(0), 2000))["world"], "cube")
    assert -1.6 <= cube[:, 0].min() < -1.55 and -1.05 < cube[:, 0].max() <= -1.0
    close(cube[:, 2], torch.full((2000,), 0.05))
    close(torch.tensor(env.scene.model.body("cube").mass), [1.6])


GOAL = {
    "func": "randomize_target_pose",
    "mode": "reset",
    "params": {"position_range": [[0.2, -0.4, 0.1], [0.2, -0.4, 0.1]], "store_key": "goal_pose"},
}


@pytest.mark.parametrize("use", ["train", "eval"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_events_of_the_trainer_scale_as_events_of_the_task_do(use, scale):
    keys = rng.split(rng.key(0), 4)
    cfg = load_config("push_cube_ppo").replace(**{"env.cfg.scale": scale})
    of_task = make_env(cfg.replace(**{"env.cfg.events.randomize_goal": GOAL}).env).reset(keys)["targets", "goal_pose"]
    cfg = cfg.replace(**{f"trainer.events.{use}": {"goal": GOAL}})
    of_trainer = with_training_wrappers(make_env(cfg.env), cfg, use).reset(keys)["targets", "goal_pose"]
    close(of_trainer, of_task)
    close(of_trainer, torch.tensor([[0.2, -0.4, 0.1]] * 4) * scale)


def test_cameras_of_the_trainer_scale_with_the_task():
    camera = {"func": "record_camera_data", "mode": "interval", "params": {"eye": [1.0, 2.0, 3.0], "up": [0, 0, 1]}}
    cfg = load_config("push_cube_ppo").replace(**{"env.cfg.scale": 0.5, "trainer.events.eval": {"camera": camera}})
    (seen,) = cameras(cfg, "eval")
    assert (seen.params.eye, seen.params.up) == ((0.5, 1.0, 1.5), (0.0, 0.0, 1.0))
    assert seen.params.intrinsics == cfg.trainer.events.eval["camera"].params.intrinsics


FALLING = {  # name of the task, and an object that falls
    "PushCubeRL": "cube",
    "PickCubeRL": "cube",
    "StackCubeRL": "base",
}


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_failure_height_scales_with_the_task(name, scale):
    env = make_env({"name": name, "cfg": {"mjcf": "<mujoco><worldbody/></mujoco>", "scale": scale}})  # without a floor
    keys = rng.split(rng.key(0), 2)
    state = env.reset(keys)
    for height, fails in ((-0.09, False), (-0.15, True)):
        at = torch.tensor([-0.3, -0.3, height]) * scale
        moved = world.with_body_pose(env.scene, state["world"], FALLING[name], at.expand(2, 3))
        moved = world.with_body_at_rest(env.scene, moved, FALLING[name])
        after = env.step(state.copy().set("world", moved), torch.zeros(2, *env.action_space.shape), env.draw(keys))
        z = world.body_position(env.scene, after["world"], FALLING[name])[:, 2]
        assert ((z < -0.1 * scale) == fails).all() and (after["info", "fail"] == fails).all()


@pytest.mark.parametrize(("name", "reach"), [("panda", 0.855), ("so101", 0.42), ("ur10", 1.3)])
def test_one_line_gives_push_cube_to_an_arm_of_another_size(name, reach):
    pytest.importorskip("cmeel", reason="the robots need the extra 'robots'")
    cfg = load_config("push_cube_ppo").replace(**{"env.cfg.robot": {"model": f"example:{name}"}})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*visual meshes")
        env = make_env(cfg.env)
    sim, state = env.scene, env.reset(rng.split(rng.key(0), 64))
    close(torch.tensor(sim.model.geom("cube").size), torch.full((3,), 0.05 * reach / 1.3))
    tool = world.site_pose(sim, state["world"], sim.robot.tcp["arm"])
    assert (tool[:, 0, 3] < -0.1).all()  # all arms face -x
    close(tool[:, 2, 2], torch.full((64,), -1.0), tol=1e-3)  # and their tools point down
    cube = world.body_position(sim, state["world"], "cube")
    assert (cube[:, :2].norm(dim=-1) < reach).all()


def test_the_expert_of_push_cube_scales_with_the_task():
    pytest.importorskip("cmeel", reason="the robots need the extra 'robots'")
    cfg = load_config("push_cube_ppo").replace(**{"env.cfg.robot": {"model": "example:panda"}})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*visual meshes")
        env, expert = make_env(cfg.env), make_expert(cfg.env, {})
    keys = rng.split(rng.key(0), 16)
    state = env.reset(keys)
    succeeded = ended = torch.zeros(16, dtype=torch.bool)
    for t in range(100):
        state = env.step(state, expert(state, rng.fold_in(keys, t)), env.draw(rng.fold_in(keys, t)))
        succeeded, ended = succeeded | (state["info", "success"] & ~ended), ended | state["terminated"]
    assert int(succeeded.sum()) >= 8
