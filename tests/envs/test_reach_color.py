"""ReachColorRL: starts, instructions, images, success and failure by hand, its expert, and faults of its config."""

import json
from math import hypot
from unittest.mock import patch

import pytest
import torch
from support.camera_task import gl
from support.checks import assert_pure, close
from support.small_runs import same

pytest.importorskip("mujoco.batch")

from ecrl import rng
from ecrl.compile.trace import traced
from ecrl.config import config_from_dict
from ecrl.envs import auto_reset, chunked, make_env, make_expert
from ecrl.envs.experts import open_loop
from ecrl.envs.mujoco import render_op, world
from ecrl.envs.validate import check_fields
from ecrl.envs.vocabulary import read_vocabulary
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.pytree import flatten
from ecrl.spaces import MultiDiscrete, box

COLORS, VERBS = ("red", "green", "blue"), ("reach", "touch", "go to", "move to")
PROPRIO = {"func": "get_robot_qpos", "name": "proprio", "params": {"range": [-1.0, 1.0]}}
JOINTS = ("finger/finger_x", "finger/finger_y")
WORD = {number: word for word, number in read_vocabulary().items()}


def _choice(**cfg):
    """Return the env section of the task without a camera."""
    return {"name": "ReachColorRL", "cfg": {"observations": {"proprio": PROPRIO}} | cfg}


def _keys(n, seed=0):
    return rng.split(rng.key(seed), n)


def _placed(env, finger, blocks, goal):
    """Return one environment with the finger and the blocks at places of the plane, and with this goal."""
    state = env.reset(_keys(1)).copy()
    worlds = world.with_joint_positions(env.scene, state["world"], JOINTS, torch.tensor([finger]))
    for color, place in blocks.items():
        worlds = world.with_body_pose(env.scene, worlds, color, torch.tensor([[*place, 0.03]]))
    draws = torch.tensor([[(COLORS.index(goal) + 0.5) / 3, 0.0]])
    state = state.set("world", worlds).set("targets", state["targets"].copy().set("instruction", draws))
    return state.set("obs", env.observe(state))


def _finger(env, state):
    return world.site_pose(env.scene, state["world"], env.scene.robot.tcp["arm"])[..., :2, 3]


def _blocks(env, state):
    return torch.stack([world.body_position(env.scene, state["world"], color)[..., :2] for color in COLORS], -2)


def _texts(state):
    return [" ".join(WORD[i] for i in row if i) for row in state["obs", "instruction"].tolist()]


def _goals(state):
    return (state["targets", "instruction"][:, 0] * 3).floor().long().tolist()


@gl
def test_observations_are_a_camera_the_finger_and_word_ids():
    env = make_env("ReachColorRL")
    parts = dict(env.observation_space.items)
    assert parts.pop("camera") == box(0, 255, 64, 64, 3, dtype=torch.uint8)
    assert parts.pop("instruction") == MultiDiscrete((20,) * 6) and parts.pop("proprio").shape == (2,) and not parts
    assert env.action_space == box(-1.0, 1.0, 2) and env.min_truncation_gap == 32
    check_fields(env, "ReachColorRL")


def test_starts_are_random_and_keep_their_distances():
    env = make_env(_choice())
    state = env.reset(_keys(4000))
    finger, blocks = _finger(env, state), _blocks(env, state)
    for places in (finger, *blocks.unbind(1)):
        assert places.abs().max() <= 0.3 and places.max() > 0.29 and places.min() < -0.29
    assert torch.linalg.vector_norm(blocks - finger.unsqueeze(1), dim=-1).min() >= 0.14
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert torch.linalg.vector_norm(blocks[:, i] - blocks[:, j], dim=-1).min() >= 0.16
    close(state["obs", "proprio"], finger / 0.4)
    assert torch.bincount(torch.tensor(_goals(state))).tolist() == pytest.approx([1333] * 3, abs=120)


def test_every_phrasing_names_every_goal_and_matches_it():
    state = make_env(_choice()).reset(_keys(600))
    texts = _texts(state)
    assert set(texts) == {f"{verb} the {color} block" for verb in VERBS for color in COLORS}
    assert all(COLORS[goal] in text.split() for goal, text in zip(_goals(state), texts, strict=True))


def test_swapped_instructions_never_name_the_goal():
    plain, swapped = (make_env(_choice(extensions={"swap_instructions": swap})) for swap in (False, True))
    start, other = plain.reset(_keys(300)), swapped.reset(_keys(300))
    assert same(start["world"], other["world"]) and same(start["targets"], other["targets"])
    for goal, text, wrong in zip(_goals(start), _texts(start), _texts(other), strict=True):
        assert wrong == text.replace(COLORS[goal], COLORS[(goal + 1) % 3]) != text


def test_own_words_and_phrasings(tmp_path):
    words = {"<pad>": 0, "finde": 9, "den": 2, "roten": 4, "blauen": 3}
    (tmp_path / "words.json").write_text(json.dumps(words))
    uids = ("roten", "blauen")
    blocks = [
        {"uid": uid, "shape": {"shape_type": "Cube", "size": [0.08] * 3}, "init_pos": [0.3 * i, 0.2, 0.04]}
        for i, uid in enumerate(uids)
    ]
    texts = {"blocks": uids, "phrasings": ["finde den {goal}"], "max_words": 3}
    drawn = {"instruction": {"func": "randomize_instruction", "mode": "reset"}}
    tokens = {"tokenizer": str(tmp_path / "words.json"), "extensions": texts}
    env = make_env(_choice(rigid_object=[b | {"body_type": "kinematic"} for b in blocks], events=drawn, **tokens))
    assert dict(env.observation_space.items)["instruction"] == MultiDiscrete((10,) * 3)
    rows = env.reset(_keys(20))["obs", "instruction"].tolist()
    assert {*map(tuple, rows)} == {(9, 2, 4), (9, 2, 3)}


FAR = {"red": (-0.3, 0.3), "green": (0.0, 0.3), "blue": (0.3, 0.3)}


def test_an_action_moves_the_finger_by_at_most_3_cm_per_axis():
    env = make_env(_choice())
    state = _placed(env, (0.1, -0.2), FAR, "red")
    for action, place in (((1.0, -0.5), (0.13, -0.215)), ((-0.1, 0.0), (0.127, -0.215)), ((0.0, 0.0), (0.127, -0.215))):
        state = assert_pure(env.step, state, torch.tensor([action]), _keys(1))
        close(_finger(env, state), [place], 2e-5)
        close(state["obs", "proprio"], [[place[0] / 0.4, place[1] / 0.4]], 5e-5)
    for _ in range(12):
        state = env.step(state, torch.ones(1, 2), _keys(1))
    close(_finger(env, state)[0, 0], 0.4, 2e-5)  # the edge of the square


CASES = {  # place of the finger after a step without motion, success, failure
    "at nothing": ((0.0, -0.2), False, False),
    "at the goal": ((0.0, 0.256), True, False),
    "just outside the goal": ((0.0, 0.254), False, False),
    "at another block": ((0.3, 0.256), False, True),
    "just outside another block": ((0.3, 0.254), False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_success_failure_and_reward_by_hand(case):
    finger, success, fail = CASES[case]
    env = make_env(_choice())
    state = env.step(_placed(env, finger, FAR, "green"), torch.zeros(1, 2), _keys(1))
    assert state["info", "success"].item() is success and state["info", "fail"].item() is fail
    assert state["reward"].item() == float(success) and state["terminated"].item() is (success or fail)
    close(state["info", "metrics", "distance_to_goal"], [hypot(finger[0], finger[1] - 0.3)], 5e-5)


def test_reaching_the_goal_and_another_block_at_once_is_a_success():
    env = make_env(_choice())
    blocks = FAR | {"green": (0.0, 0.0), "blue": (0.06, 0.0)}
    state = env.step(_placed(env, (0.03, 0.0), blocks, "blue"), torch.zeros(1, 2), _keys(1))
    assert state["info", "success"].item() and not state["info", "fail"].item() and state["reward"].item() == 1.0


def test_an_episode_ends_after_32_steps_without_reward():
    env = make_env(_choice())
    state = _placed(env, (0.0, -0.3), FAR, "red")
    for t in range(32):
        assert not state["truncated"].item()
        state = env.step(state, torch.zeros(1, 2), _keys(1, t))
    assert state["truncated"].item() and not state["terminated"].item() and state["reward"].item() == 0.0


@gl
def test_the_camera_shows_the_three_colors_and_nothing_of_the_goal():
    env = make_env("ReachColorRL")
    blocks = {"red": (-0.25, 0.2), "green": (0.0, 0.0), "blue": (0.25, -0.2)}
    images = [_placed(env, (0.3, 0.3), blocks, goal)["obs", "camera"][0] for goal in COLORS]
    assert all(torch.equal(image, images[0]) for image in images)
    distance, up = hypot(0.9, 1.1), (1.1 / hypot(0.9, 1.1), 0.9 / hypot(0.9, 1.1))
    for channel, (x, y) in enumerate(blocks.values()):
        top = 0.06  # height of the block
        depth = distance - y * -up[1] - top * up[0]
        column, row = 88 * x / depth + 32, 32 - 88 * (y * up[0] + top * up[1]) / depth
        pixel = images[0][int(row), int(column)].tolist()
        assert pixel[channel] > 100 and max(pixel[:channel] + pixel[channel + 1 :]) < 80, (channel, pixel)


@gl
def test_images_are_the_same_bits_for_any_number_of_threads():
    states = []
    for threads in (1, 2, 5):
        env = make_env({"name": "ReachColorRL", "cfg": {"physics": {"threads": threads}}})
        state = env.reset(_keys(7))
        states.append(env.step(state, torch.full((7, 2), 0.3), _keys(7)))
    assert same(states[0], states[1]) and same(states[0], states[2])


@gl
def test_vmap_traced_and_reset_steps_give_the_same_bits():
    env = auto_reset(make_env({"name": "ReachColorRL", "cfg": {"max_episode_steps": 2}}))
    start, keys = env.reset(_keys(4)), _keys(4, 1)

    def two_steps(state, keys):
        for i in (0, 1):
            state = env.step(state, torch.full((*keys.shape, 2), 0.5), env.draw(rng.fold_in(keys, i)))
        return state

    expected = two_steps(start, keys)
    assert expected["truncated"].all() and not same(expected["obs"], expected["final_obs"])
    assert same(expected["obs"], env.observe(expected)) and same(torch.vmap(two_steps)(start, keys), expected)
    leaves, structure = flatten((start, keys))
    graph, _ = traced(two_steps, structure, leaves)
    assert all(torch.equal(a, b) for a, b in zip(graph(*leaves), flatten(expected)[0], strict=True))


def test_a_group_of_grpo_shares_start_and_instruction():
    net = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
    cfg = config_from_dict({
        "trainer": {"num_envs": 12, "buffer_size": 8, "iterations": 1, "compile": "off", "enable_eval": False},
        "env": _choice(),
        "policy": {"name": "actor_only", "actor": net, "actor_obs": ["proprio", "instruction"]},
        "algorithm": {"name": "grpo", "cfg": {"n_epochs": 1, "batch_size": 16, "group_size": 4}},
    })  # fmt: skip
    state = init_state(cfg)["env"]
    for field in ("instruction", "proprio"):
        groups = state["obs", field].unflatten(0, (3, 4))
        assert (groups == groups[:, :1]).all() and not (groups[0] == groups[1]).all()
    physics = state["world", "physics"].unflatten(0, (3, 4))
    assert (physics == physics[:, :1]).all()


def test_a_group_of_grpo_shares_start_and_instruction_in_each_rollout():
    net = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
    cfg = config_from_dict({
        "trainer": {"num_envs": 12, "buffer_size": 3, "iterations": 2, "compile": "off", "enable_eval": False},
        "env": _choice() | {"action_chunk": 4},
        "policy": {"name": "actor_only", "actor": net, "actor_obs": ["proprio", "instruction"]},
        "algorithm": {"name": "grpo", "cfg": {"n_epochs": 1, "batch_size": 16, "group_size": 4}},
    })  # fmt: skip
    run, begin, starts = build(cfg), init_state(cfg), []
    for state in (begin, make_iteration(cfg)(begin)[0]):
        _, batch = run.algorithm.iterate.collect(run, state)
        for field in ("instruction", "proprio"):
            first = batch["steps", "obs", field][:, 0].unflatten(0, (3, 4))
            assert (first == first[:, :1]).all() and not (first[0] == first[1]).all()
        starts.append(batch["steps", "obs", "proprio"][:, 0])
    assert not torch.equal(*starts)


def _success(env, expert, count, seed=1):
    """Return the success rate of an expert, one episode per environment."""
    state, running = env.reset(_keys(count, seed)), torch.ones(count, dtype=torch.bool)
    reached = torch.zeros(count, dtype=torch.bool)
    for t in range(60):
        state = env.step(state, expert(state, _keys(count, 100 + t)), _keys(count, 200 + t))
        reached |= running & state["info", "success"]
        running &= ~(state["terminated"] | state["truncated"])
    assert not running.any()
    return reached.float().mean().item()


def test_the_expert_reaches_the_goal_and_a_bias_makes_it_miss():
    env, choice = make_env(_choice()), _choice()
    assert _success(env, make_expert(choice), 1000) >= 0.97
    assert _success(env, make_expert(choice, {"noise": 0.1}), 1000) >= 0.97
    assert 0.2 < _success(env, make_expert(choice, {"bias": 0.05}), 1000) < 0.6


def test_the_expert_ignores_the_text_of_the_instruction():
    swapped = _choice(extensions={"swap_instructions": True})
    assert _success(make_env(swapped), make_expert(swapped), 300) >= 0.97


def test_actions_of_the_expert_by_hand():
    choice, env = _choice(), make_env(_choice())
    state, keys = _placed(env, (0.0, 0.0), FAR, "blue"), _keys(1)
    close(assert_pure(make_expert(choice), state, keys), [[1.0, 1.0]])  # 0.3 m in x and in y
    close(make_expert(choice, {"bias": 0.3})(state, keys), [[1.0, 0.5]])
    near = _placed(env, (0.3, 0.288), FAR, "blue")
    close(make_expert(choice)(near, keys), [[0.0, 0.4]], 1e-4)  # 12 mm of 30 mm
    noise = rng.normal(keys, (2,))
    noisy = make_expert(choice, {"noise": 0.2})(near, keys)
    close(noisy, (torch.tensor([[0.0, 0.4]]) + 0.2 * noise).clamp(-1.0, 1.0), 1e-4)
    behind = _placed(env, (0.0, 0.0), FAR | {"green": (0.0, 0.1), "red": (0.02, 0.3)}, "red")
    # motion (0.02, 0.3) + 0.12 (1, 0) + 2 (0.14 - 0.1) (0, -1) = (0.14, 0.22)
    close(make_expert(choice)(behind, keys), [[0.14 / 0.22, 1.0]], 1e-4)


def test_a_plan_is_what_the_expert_does_step_by_step():
    choice, env = _choice(), make_env(_choice())
    expert, state, keys = make_expert(choice), env.reset(_keys(50)), _keys(50, 1)
    plan = assert_pure(open_loop(env, expert, 4), state, keys)
    assert plan.shape == (50, 4, 2)
    for i in range(4):
        assert torch.equal(plan[:, i], expert(state, keys))
        state = env.step(state, plan[:, i], keys)


def test_the_expert_reaches_the_goal_with_plans_of_four_actions():
    env, expert = make_env(_choice()), make_expert(_choice(), {"noise": 0.1})
    chunks = chunked(env, 4, gamma=1.0)
    plan = open_loop(env, expert, 4)
    state, reached = chunks.reset(_keys(500)), torch.zeros(500, dtype=torch.bool)
    running = ~reached
    for t in range(8):
        state = chunks.step(state, plan(state, _keys(500, 100 + t)), chunks.draw(_keys(500, 200 + t)))
        reached |= running & state["info", "success"]
        running &= ~(state["terminated"] | state["truncated"])
    assert not running.any() and reached.float().mean() >= 0.97


@gl
def test_plans_draw_no_images():
    env, drawn = make_env("ReachColorRL"), []
    state = env.reset(_keys(3))
    with patch.object(render_op, "_draw_rows", lambda *args: drawn.append(args)):
        assert open_loop(env, make_expert("ReachColorRL"), 4)(state, _keys(3)).shape == (3, 4, 2)
    assert not drawn


def test_the_expert_of_reach_reaches_the_target():
    assert _success(make_env("ReachRL"), make_expert("ReachRL"), 200) >= 0.97
    assert _success(make_env("ReachRL"), make_expert("ReachRL", {"bias": 0.08}), 200) < 0.7


FAULTS = {
    "pink": (
        {"extensions": {"phrasings": ["reach the pink {goal}"]}},
        r"^env\.cfg\.extensions: instruction 'reach the pink red': 'pi",
    ),
    "cyan": ({"extensions": {"blocks": ["red", "cyan"]}}, "'cyan' is not in the vocabulary"),
    "file": ({"tokenizer": "absent.json"}, r"^env\.cfg: tokenizer: no such file 'absent\.json'"),
    "length": ({"extensions": {"max_words": 4}}, r"'go to the red block' has 5 words, expected 1 to 4 \(max_words\)$"),
    "goal": (
        {"extensions": {"phrasings": ["reach it"]}},
        r"^env\.cfg\.extensions: phrasings: 'reach it' does not name the goal; add \{goal\}",
    ),
    "block": ({"extensions": {"blocks": ["red", "yellow"]}}, "'yellow' is not in the scene"),
    "twice": ({"extensions": {"blocks": ["red", "red"]}}, "names a block twice"),
    "event": ({"events": {}}, "no instruction 'instruction'; add an event randomize_instruction"),
    "vector": ({"observation_form": "vector"}, "'vector', but 'instruction' has integers, which cannot be part of a"),
    "start": (
        {"extensions": {"hit_distance": 0.2}},
        r"^env\.cfg\.events: \d+ of 256 episodes start within extensions\.hit_distance of a block; increase min_tool",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_config_is_refused_in_one_line(fault, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg, message = FAULTS[fault]
    with pytest.raises(ConfigError, match=message) as caught:
        make_env(_choice(**cfg))
    assert "\n" not in str(caught.value)


def test_an_expert_that_does_not_fit_is_refused():
    with pytest.raises(
        ConfigError, match=r"^env\.name: 'pendulum' has no scripted expert; known: .*ReachColorRL, ReachRL"
    ):
        make_expert("pendulum")
    with pytest.raises(ConfigError, match=r"^expert: noize: unknown key"):
        make_expert("ReachRL", {"noize": 0.1})
    absolute = _choice(actions={"a": {"func": "QposTerm"}})
    with pytest.raises(
        ConfigError, match=r"^env\.cfg\.actions: a \(QposTerm\), but the expert needs one term, DeltaQposTerm"
    ):
        make_expert(absolute)
