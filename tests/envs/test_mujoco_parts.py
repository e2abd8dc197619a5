"""Dict observations of MuJoCo tasks: images and named vectors, in resets, steps, vmap, compiled code and training."""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("mujoco.batch")

from support.camera_task import gl
from support.checks import assert_pure
from support.small_runs import same
from tensordict import TensorDict

import ecrl
from ecrl import rng
from ecrl.compile.jit import choose_form
from ecrl.compile.trace import traced
from ecrl.config import config_from_dict
from ecrl.config.config import EventConfig
from ecrl.envs import auto_reset, chunked, make_env
from ecrl.envs.events import with_events
from ecrl.envs.mujoco import render_op
from ecrl.envs.mujoco.terms.term import JointsConfig
from ecrl.envs.validate import check_fields
from ecrl.errors import ConfigError
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.pytree import flatten
from ecrl.registry import register_observation
from ecrl.spaces import box

VIEW = {"resolution": [16, 12], "intrinsics": [12, 12, 8, 6], "eye": [-1.4, 1.4, 2.0]}
CAMERA = {"func": "camera_image", "name": "camera", "params": VIEW}
TOOL = {"func": "get_robot_eef_pose", "name": "robot/ee_pos"}
TERMS = {
    "PushCubeRL": {
        "tool": TOOL,
        "cube": {"func": "get_rigid_object_pose", "name": "object/cube", "params": {"entity_cfg": {"uid": "cube"}}},
        "goal": {"func": "target_position", "name": "object/goal"},
    },
    "ReachRL": {
        "tool": TOOL,
        "goal": {"func": "target_position", "name": "object/goal", "params": {"target_pose_key": "target_pose"}},
    },
    "CartPoleRL": {"joints": {"func": "normalize_robot_joint_data", "mode": "modify", "name": "robot/qpos"}},
}
SIZES = {
    "PushCubeRL": {"object_cube": 16, "object_goal": 3, "robot_ee_pos": 16},
    "ReachRL": {"object_goal": 3, "robot_ee_pos": 16},
    "CartPoleRL": {},
}
ARMS = ("PushCubeRL", "ReachRL")


def _task(name, camera=True, **cfg):
    terms = TERMS[name] | ({"camera": CAMERA} if camera else {})
    return make_env({"name": name, "cfg": {"observations": terms, **cfg}})


def _keys(seed, *shape):
    return rng.split(rng.key(seed), torch.Size(shape).numel()).reshape(shape)


def _actions(env, *batch):
    return 0.8 * torch.sin(torch.arange(float(torch.Size((*batch, *env.action_space.shape)).numel()))).reshape(
        *batch, *env.action_space.shape
    )


def _steps(env, number, count=4):
    """Return the states of `auto_reset(env)` at the start and after each step, and the keys of the steps."""
    env, keys = auto_reset(env), _keys(1, number, count)
    states, noise = [env.reset(_keys(0, count))], env.draw(keys)
    for t in range(number):
        states.append(assert_pure(env.step, states[-1], _actions(env, count), noise[t]))
    return states, keys


@gl
@pytest.mark.parametrize("name", TERMS)
def test_every_task_observes_images_and_vectors_by_name(name):
    env = _task(name)
    joints = 2 if name == "CartPoleRL" else 6
    vectors = SIZES[name] | {f"robot_{entry}": joints for entry in ("qf", "qpos", "qvel")}
    parts = dict(env.observation_space.items)
    assert parts.pop("camera") == box(0, 255, 12, 16, 3, dtype=torch.uint8)
    assert {part: space.shape for part, space in parts.items()} == {part: (n,) for part, n in vectors.items()}
    check_fields(env, name)
    plain = _task(name, camera=False)
    states, flat_states = [env.reset(_keys(0, 3))], [plain.reset(_keys(0, 3))]
    for t in range(10):
        for task, past in ((env, states), (plain, flat_states)):
            past.append(task.step(past[-1], torch.ones(3, *task.action_space.shape), task.draw(_keys(t, 3))))
    for state, flat in zip(states, flat_states, strict=True):
        named = torch.cat([state["obs", part] for part in sorted(vectors)], -1)
        assert torch.equal(named, flat["obs"]) and torch.equal(state["reward"], flat["reward"])
    assert not torch.equal(states[0]["obs", "camera"], states[-1]["obs", "camera"])


def test_a_dict_of_vectors_needs_no_camera_and_a_vector_refuses_images():
    env = _task("ReachRL", camera=False, observation_form="parts")
    assert [part for part, _ in env.observation_space.items] == [
        "object_goal", "robot_ee_pos", "robot_qf", "robot_qpos", "robot_qvel"
    ]  # fmt: skip
    assert env.reset_unobserved is None
    assert _task("ReachRL", camera=False).observation_space.shape == (37,)


@gl
def test_a_vector_refuses_images():
    message = r"env\.cfg\.observation_form: 'vector', but 'camera' is an image, .*; use \"parts\", or remove the image$"
    with pytest.raises(ConfigError, match=message):
        _task("ReachRL", observation_form="vector")


@pytest.mark.parametrize("form", ["parts", "vector", "auto"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool], ids=str)
def test_entries_of_other_dtypes_are_refused(form, dtype):
    @register_observation("dtype_probe", override=True)
    def probe(cfg: JointsConfig, sim):
        return lambda state, value: torch.zeros(*state.batch_size, 2, dtype=dtype)

    terms = {"a": {"func": "dtype_probe", "name": "count"}}
    kind = str(dtype).removeprefix("torch.")
    message = rf"'count' is {kind} \[2\], expected float32, or an image uint8 \[h, w, c\]"
    with pytest.raises(ConfigError, match=message):
        make_env({"name": "ReachRL", "cfg": {"observations": terms, "observation_form": form}})


def test_entries_that_a_dict_cannot_hold_are_refused():
    same_name = {"a": TOOL, "b": TOOL | {"name": "robot_ee_pos"}}
    with pytest.raises(ConfigError, match=r"two entries have the name 'robot_ee_pos' in the observation; rename one"):
        make_env({"name": "ReachRL", "cfg": {"observations": same_name, "observation_form": "parts"}})


@gl
@pytest.mark.parametrize("name", ARMS)
def test_episodes_end_with_their_last_image_and_begin_with_their_first(name):
    env = _task(name, max_episode_steps=2)
    states, keys = _steps(env, 5)
    for t, (before, after) in enumerate(pairwise(states)):
        ended = after["terminated"] | after["truncated"]
        assert ended.all() == (t % 2 == 1)
        fresh = {key: torch.zeros_like(before[key]) for key in ("terminated", "truncated")}
        bare = env.step(before.exclude("final_obs").update(fresh), _actions(env, 4), env.draw(keys[t]))
        assert same(after["final_obs"], bare["obs"]) and same(after["obs"], env.observe(after))
        start = env.reset(rng.fold_in(keys[t], rng.START))
        assert same(after["obs"], start["obs"] if ended.all() else bare["obs"])


@gl
def test_a_chunk_draws_one_image():
    drawn = []

    def count(out, physics, vectors, rows, camera):
        drawn.append(len(rows))
        return draw(out, physics, vectors, rows, camera)

    draw, base, keys = render_op._draw_rows, _task("ReachRL", max_episode_steps=5), _keys(1, 4)
    env = auto_reset(chunked(base, 3, gamma=0.9))
    state, noise, actions = env.reset(_keys(0, 4)), env.draw(keys), _actions(base, 4, 3)
    with patch.object(render_op, "_draw_rows", count):
        state = env.step(state, actions, noise)
        assert drawn == [4]
        ended = env.step(state, actions, noise)
        assert ended["truncated"].all() and ended["executed"].tolist() == [2] * 4 and drawn == [4] * 3
    bare = base.reset(_keys(0, 4))
    for i in range(3):
        bare = base.step(bare, actions[:, i], noise["step"][:, i])
    assert same(state["obs"], bare["obs"])


@gl
def test_only_the_starts_that_are_used_are_drawn():
    drawn = []

    def count(out, physics, vectors, rows, camera):
        drawn.append(len(rows))
        return draw(out, physics, vectors, rows, camera)

    draw, env = render_op._draw_rows, auto_reset(_task("ReachRL", max_episode_steps=2))
    with patch.object(render_op, "_draw_rows", count):
        state = env.reset(_keys(0, 4))
        assert sum(drawn) == 4
        drawn.clear()
        noise = env.draw(_keys(1, 3, 4))
        assert not drawn and "obs" not in noise["start"]
        state = state.copy().set("elapsed", torch.tensor([0, 1, 0, 1]))
        for expected in (6, 6):  # four images after the step, and two of new episodes
            state = env.step(state, _actions(env, 4), noise[0])
            assert sum(drawn) == expected
            drawn.clear()


@gl
def test_startup_events_last_and_their_episodes_are_drawn():
    ranges = {"eye_range": [[-0.3, -0.3, -0.3], [0.3, 0.3, 0.3]]}
    moved = {"z": {"func": "randomize_camera_extrinsics", "mode": "startup", "params": ranges}}
    goal = {"func": "randomize_target_pose", "mode": "reset"}
    goal |= {"params": {"position_range": [[-0.9, -0.4, 0.2], [-0.5, 0.1, 0.7]], "store_key": "target_pose"}}
    env = _task("ReachRL", max_episode_steps=2, events=moved | {"goal": goal})
    states, _ = _steps(env, 4)
    eyes = [state["targets", "camera_eye_offset"] for state in states]
    assert all(torch.equal(eye, eyes[0]) for eye in eyes) and not torch.equal(eyes[0][0], eyes[0][1])
    for state in states:
        assert same(state["obs"], env.observe(state))
    assert not torch.equal(states[1]["obs", "camera"], states[2]["obs", "camera"])


@gl
def test_events_of_the_trainer_draw_the_environments_that_they_change():
    push = {"func": "randomize_field", "mode": "reset"}
    push |= {"params": {"field": "targets.target_pose", "low": [-0.6, 0.0, 0.3], "high": [-0.5, 0.1, 0.4]}}
    env = _task("ReachRL", max_episode_steps=2)
    both = with_events(auto_reset(env), {"push": EventConfig.model_validate(push)})
    state = both.reset(_keys(0, 4))
    for t in range(3):
        assert same(state["obs"], env.observe(state)) and state["obs", "camera"].flatten(1).any(-1).all()
        assert (state["targets", "target_pose"][:, 0] >= -0.6).all()
        state = both.step(state, _actions(env, 4), both.draw(_keys(t, 4)))


@gl
@pytest.mark.parametrize("name", ARMS)
def test_vmap_and_traced_steps_give_the_same_bits(name):
    env = auto_reset(_task(name, max_episode_steps=2))
    start, keys = env.reset(_keys(0, 4)), _keys(1, 4)

    def two_steps(state, keys):
        for i in (0, 1):
            state = env.step(state, _actions(env), env.draw(rng.fold_in(keys, i)))
        return state

    def batched(state, keys):
        for i in (0, 1):
            state = env.step(state, _actions(env).expand(4, -1), env.draw(rng.fold_in(keys, i)))
        return state

    expected = batched(start, keys)
    assert expected["truncated"].all() and same(torch.vmap(two_steps)(start, keys), expected)
    leaves, structure = flatten((start, keys))
    graph, _ = traced(batched, structure, leaves)
    assert all(torch.equal(a, b) for a, b in zip(graph(*leaves), flatten(expected)[0], strict=True))


@gl
@pytest.mark.slow
@pytest.mark.parametrize("name", ARMS)
def test_compiled_steps_equal_eager_ones(name, traced_or_compiled):
    env = auto_reset(_task(name, max_episode_steps=2))
    state, keys = env.reset(_keys(0, 4)), _keys(1, 4)

    def step(state, keys):
        return env.step(state, _actions(env).expand(4, -1), env.draw(keys))

    compiled = choose_form("on", "cpu").jit(step)
    for t in range(3):
        after, again = step(state, rng.fold_in(keys, t)), compiled(state, rng.fold_in(keys, t))
        assert torch.equal(after["obs", "camera"], again["obs", "camera"])
        assert torch.equal(after["final_obs", "camera"], again["final_obs", "camera"])
        for part in ("robot_qpos", "object_goal"):
            torch.testing.assert_close(after["obs", part], again["obs", part], atol=1e-5, rtol=0.0)
        state = after


@gl
@pytest.mark.parametrize("name", ARMS)
def test_actor_and_critic_read_observations_by_name(name):
    net = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
    seen = {"actor_obs": ["camera", "robot_qpos"], "critic_obs": ["robot_qpos", "object_goal"]}
    cfg = config_from_dict({
        "trainer": {"num_envs": 4, "buffer_size": 8, "iterations": 2, "compile": "off", "enable_eval": False},
        "env": {"name": name, "cfg": {"observations": TERMS[name] | {"camera": CAMERA}, "max_episode_steps": 3}},
        "policy": {"name": "actor_critic", "actor": net, "critic": net, "normalize_obs": True} | seen,
        "algorithm": {"name": "ppo", "cfg": {"n_epochs": 1, "batch_size": 16}},
    })  # fmt: skip
    state = init_state(cfg)
    for side, inputs in (("actor", 12 * 16 * 3 + 6), ("critic", 6 + 3)):
        assert max(x.shape[-1] for x in state["params", side].values(True, True)) == inputs
    assert {*state["norm", "obs"].keys()} == {name for name, _ in make_env(cfg.env).observation_space.items} - {
        "camera"
    }
    after, _ = make_iteration(cfg)(state)
    assert after["env", "obs", "camera"].dtype == torch.uint8
    assert ecrl.evaluate(after, cfg, num_episodes=4)["eval/avg_length"] <= 3


def test_an_unobserved_reset_that_differs_from_reset_is_refused():
    env = make_env("cartpole")

    def unobserved(keys):
        return TensorDict({"wrong": env.reset(keys)["reward"]}, keys.shape)

    wrong = replace(env, reset_unobserved=unobserved, observe_where=lambda state, mask: env.observe(state))
    message = r"^env e: reset_unobserved must return the fields of reset without obs; these differ: .*wrong"
    with pytest.raises(ConfigError, match=message):
        check_fields(wrong, "e")
    with pytest.raises(ValueError, match="needs observe_where"):
        replace(env, reset_unobserved=env.reset)
