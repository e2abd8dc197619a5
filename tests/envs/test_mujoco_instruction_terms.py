"""Terms for instructions in any task: scattered objects, drawn instructions, word ids, and observed joints."""

import pytest
import torch
from support.checks import assert_pure, close

pytest.importorskip("mujoco.batch")

from ecrl import rng
from ecrl.envs import make_env
from ecrl.envs.mujoco import world
from ecrl.envs.vocabulary import read_vocabulary
from ecrl.errors import ConfigError
from ecrl.spaces import MultiDiscrete

BOX = [[-0.8, -0.6, 0.05], [-0.4, -0.2, 0.25]]
GOAL = {"func": "randomize_target_pose", "mode": "reset", "params": {"position_range": BOX, "store_key": "target_pose"}}


def _keys(n, seed=0):
    return rng.split(rng.key(seed), n)


def _cube(uid, x, **more):
    return {"uid": uid, "shape": {"shape_type": "Cube", "size": [0.05] * 3}, "init_pos": [x, -0.4, 0.05]} | more


SCENE = {"rigid_object": [_cube("a", -0.5), _cube("b", -0.7, body_type="kinematic"), _cube("c", -0.9)]}


def _scattering(count=3, **params):
    entities = [{"uid": uid} for uid in "abc"[:count]]
    event = {"func": "scatter_rigid_objects", "mode": "reset"}
    event["params"] = {"entity_cfgs": entities, "position_range": BOX} | params
    return make_env({"name": "ReachRL", "cfg": SCENE | {"events": {"goal": GOAL, "scatter": event}}})


def _places(env, state):
    return torch.stack([world.body_position(env.scene, state["world"], uid) for uid in "abc"], 1)


def test_objects_are_scattered_in_the_range_and_apart():
    env = _scattering(min_distance=0.15)
    state = assert_pure(env.reset, _keys(2000))
    places = _places(env, state)
    for low, high, x in zip(*BOX, places.flatten(0, 1).unbind(-1), strict=True):
        assert low <= x.min() < low + 0.01 and high - 0.01 < x.max() <= high
    for i, j in ((0, 1), (0, 2), (1, 2)):
        apart = torch.linalg.vector_norm((places[:, i] - places[:, j])[:, :2], dim=-1)
        assert 0.15 <= apart.min() < 0.16
    close(torch.cat(world.body_velocity(env.scene, state["world"], "a"), -1), torch.zeros(2000, 6))
    free = _scattering()
    assert torch.linalg.vector_norm((_places(free, free.reset(_keys(2000)))[:, 0, :2]) + 0.5, dim=-1).std() > 0.05


def test_objects_keep_away_from_the_end_effector():
    env = _scattering(1, min_tool_distance=0.3)
    state = env.reset(_keys(500))
    tool = world.site_pose(env.scene, state["world"], env.scene.robot.tcp["arm"])[:, :2, 3]
    assert torch.linalg.vector_norm(_places(env, state)[:, 0, :2] - tool, dim=-1).min() >= 0.3


def test_impossible_distances_and_wrong_objects_are_refused():
    with pytest.raises(
        ConfigError, match=r"in \d+ of 256 tests, an object found no place in 32 draws; widen position_r"
    ):
        _scattering(min_distance=0.5)
    with pytest.raises(ConfigError, match="no end effector of 'leg'"):
        _scattering(min_tool_distance=0.1, part_name="leg")
    scene = {"rigid_object": [_cube("a", -0.5, body_type="static"), _cube("b", -0.7), _cube("c", -0.9)]}
    event = {"func": "scatter_rigid_objects", "mode": "reset"}
    for uid, fault in (("a", "make it dynamic or kinematic"), ("z", "unknown object 'z'")):
        event["params"] = {"entity_cfgs": [{"uid": uid}], "position_range": BOX}
        with pytest.raises(ConfigError, match=fault):
            make_env({"name": "ReachRL", "cfg": scene | {"events": {"goal": GOAL, "scatter": event}}})


def _instructed(params, draw=True, **cfg):
    terms = {"text": {"func": "instruction", "name": "text", "params": params}}
    events = {"goal": GOAL} | ({"say": {"func": "randomize_instruction", "mode": "reset"}} if draw else {})
    return make_env({"name": "ReachRL", "cfg": {"observations": terms, "events": events} | cfg})


def test_any_task_may_observe_an_instruction():
    env = _instructed({"phrasings": ["push the cube to the goal", "move the cube"], "max_words": 7})
    parts = dict(env.observation_space.items)
    assert parts["text"] == MultiDiscrete((20,) * 7) and parts["robot_qpos"].shape == (6,)
    rows, words = env.reset(_keys(50))["obs", "text"], read_vocabulary()
    assert rows.dtype == torch.int64
    texts = [[words[word] for word in text.split()] for text in ("push the cube to the goal", "move the cube")]
    assert {*map(tuple, rows.tolist())} == {tuple(text + [0] * (7 - len(text))) for text in texts}


def test_instructions_that_do_not_fit_are_refused():
    for params, fault in (
        ({"phrasings": ["reach the {goal}"]}, r"phrasings: 'reach the {goal}' has {goal}, but there are no goals"),
        ({"phrasings": ["reach the goal"], "swap": True}, "swap: there is no other goal; give two goals or more"),
        ({"phrasings": []}, "phrasings"),
    ):
        with pytest.raises(ConfigError, match=fault):
            _instructed(params)
    with pytest.raises(ConfigError, match="no instruction 'instruction'; add an event randomize_instruction"):
        _instructed({"phrasings": ["reach the goal"]}, draw=False)


def test_joints_are_observed_scaled_or_not_and_only_if_wanted():
    terms = {
        "a": {"func": "get_robot_qpos", "name": "plain"},
        "b": {"func": "get_robot_qpos", "name": "scaled", "params": {"range": [0.0, 1.0], "joint_ids": [2]}},
    }
    cfg = {"observations": terms, "observation_form": "parts", "observe_joints": False}
    env = make_env({"name": "ReachRL", "cfg": cfg})
    assert [name for name, _ in env.observation_space.items] == ["plain", "scaled"]
    state = env.reset(_keys(2))
    close(state["obs", "plain"], [[0.0, -1.57, 1.57, -1.57, -1.57, 0.0]] * 2)
    close(state["obs", "scaled"], [[0.5 + 1.57 / (2 * torch.pi)]] * 2)  # the elbow's limits are -pi and pi
    with pytest.raises(
        ConfigError, match=r"env\.cfg\.observations: nothing is observed; add a term, or set observe_jo"
    ):
        make_env({"name": "ReachRL", "cfg": {"observations": {}, "observe_joints": False}})
    with pytest.raises(ConfigError, match=r"range: 1\.0 is not below 0\.0"):
        make_env({"name": "ReachRL", "cfg": {"observations": {"a": terms["a"] | {"params": {"range": [1.0, 0.0]}}}}})
