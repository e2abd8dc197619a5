"""Terms of the reward: each by hand, every setting, refused settings, every variant, and slopes."""

from math import cos, exp, pi, sin, sqrt, tanh

import pytest
import torch
from support.checks import assert_pure, close

pytest.importorskip("mujoco.batch")

from support.mujoco_term_cases import (
    CART,
    SCENE,
    SIDEWAYS,
    STRETCHED,
    aimed,
    made,
    placed,
    posed,
    scene,
    shaken,
    task_state,
)

from ecrl.compile.jit import choose_form
from ecrl.compile.trace import traced
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.terms import rewards
from ecrl.errors import ConfigError
from ecrl.pytree import flatten
from ecrl.registry import lookup

CUBE, OTHER, MARK = {"uid": "cube"}, {"uid": "other"}, {"uid": "mark"}
PAIR = {"source_entity_cfg": CUBE, "target_entity_cfg": OTHER}
AIM = {"source_entity_cfg": CUBE, "target_pose_key": "goal_pose"}
PUSH = {"object_cfg": CUBE}


@pytest.fixture(scope="module")
def sim():
    return scene()


def paid(name, sim, before, after, **params):
    return made("reward", name, sim, **params)(before, after)


def test_distance_between_objects(sim):
    """3, 4 and 12 m apart: 13 m."""
    state = placed(sim, task_state(sim, (2,)), "cube", [[0.0, 0.0, 1.0], [1.0, 2.0, 3.0]])
    state = placed(sim, state, "other", [[3.0, 4.0, 13.0], [1.0, 2.0, 3.0]])
    start = task_state(sim, (2,))
    close(paid("distance_between_objects", sim, start, state, **PAIR), torch.tensor([-13.0, 0.0]))
    wide = paid("distance_between_objects", sim, start, state, exponential=True, sigma=6.5, **PAIR)
    close(wide, torch.tensor([exp(-2.0), 1.0]), 1e-6)
    usual = paid("distance_between_objects", sim, start, state, exponential=True, **PAIR)
    close(usual, torch.tensor([exp(-84.5), 1.0]), 1e-6)


def test_distance_to_target(sim):
    """The distance is 13 m, with a horizontal part of 5 m."""
    state = aimed(placed(sim, task_state(sim, (2,)), "cube", (0.0, 0.0, 1.0)), [[3.0, 4.0, 13.0], [0.0, 0.0, 1.0]])
    start = task_state(sim, (2,))
    close(paid("distance_to_target", sim, start, state, **AIM), torch.tensor([-13.0, 0.0]))
    close(paid("distance_to_target", sim, start, state, use_xy_only=True, **AIM), torch.tensor([-5.0, 0.0]))
    shaped = paid("distance_to_target", sim, start, state, exponential=True, sigma=2.5, use_xy_only=True, **AIM)
    close(shaped, torch.tensor([exp(-2.0), 1.0]), 1e-6)


def test_incremental_distance_to_target(sim):
    """From 0.5 m to 0.4 m and back: +-0.1 m; horizontally from 0.3 to 0 m."""
    near, far = ((0.4, 0.0, 0.0), (0.3, 0.0, 0.4))
    before = placed(sim, aimed(task_state(sim, (2,)), (0.0, 0.0, 0.0)), "cube", [far, near])
    after = placed(sim, before, "cube", [near, far])

    def progress(**params):
        return paid("incremental_distance_to_target", sim, before, after, **AIM, **params)

    close(progress(), torch.tensor([tanh(1.0), -tanh(1.0)]), 1e-6)
    close(progress(tanh_scale=5.0), torch.tensor([tanh(0.5), -tanh(0.5)]), 1e-6)
    close(progress(positive_weight=2.0, negative_weight=0.5), torch.tensor([2.0, -0.5]) * tanh(1.0), 1e-6)
    close(progress(use_xy_only=True), torch.tensor([-tanh(1.0), tanh(1.0)]), 1e-6)
    stays = paid("incremental_distance_to_target", sim, before, before, **AIM)
    close(stays, torch.zeros(2), 0.0)


def test_joint_velocity_penalty(sim):
    state = posed(sim, task_state(sim, (2,)), None, [[3.0, 0.0, -4.0, 0.0, 0.0, 12.0], [0.0] * 6])
    start = task_state(sim, (2,))
    close(paid("joint_velocity_penalty", sim, start, state), torch.tensor([-13.0, 0.0]))
    close(paid("joint_velocity_penalty", sim, start, state, joint_ids=[2, 0]), torch.tensor([-5.0, 0.0]))
    close(
        paid("joint_velocity_penalty", sim, start, state, part_name="arm", robot_uid="ur"), torch.tensor([-13.0, 0.0])
    )


def test_the_velocity_penalty_of_cart_pole_is_of_the_pole():
    sim = scene(CART)
    state = posed(sim, task_state(sim), None, [5.0, -2.0])
    close(paid("joint_velocity_penalty", sim, task_state(sim), state, robot_uid="Cart", part_name="hand"), -2.0)


def test_joint_limit_penalty(sim):
    """Elbow at 0.9 pi of +-pi: 0.05 of its range from a limit. Base at -1.92 pi of +-2 pi: 0.02. Wrist 0.05 beyond."""
    state = posed(sim, task_state(sim, (2,)), [[-1.92 * pi, 0.0, 0.9 * pi, 0.0, 0.0, 2.2 * pi], [0.0] * 6])
    start = task_state(sim, (2,))

    def near(**params):
        return paid("joint_limit_penalty", sim, start, state, **params)

    close(near(), torch.tensor([-(0.05 + 0.08 + 0.15), 0.0]), 1e-6)
    close(near(joint_ids=[2, 1]), torch.tensor([-0.05, 0.0]), 1e-6)
    close(near(margin=0.03), torch.tensor([-(0.01 + 0.08), 0.0]), 1e-6)
    close(near(margin=0.5, joint_ids=[1, 2]), torch.tensor([-0.45, 0.0]), 1e-6)


def test_a_joint_without_limits_is_never_near_them():
    """The slide of +-4 m is at 3.6 m, 0.05 of its range from the end; the pole turns freely."""
    sim = scene(CART)
    state = posed(sim, task_state(sim), [3.6, pi])
    close(paid("joint_limit_penalty", sim, task_state(sim), state), -0.05, 1e-6)
    with pytest.raises(ConfigError, match="params: none of these joints has limits: Cart/cart_to_pole"):
        made("reward", "joint_limit_penalty", sim, part_name="hand")


def test_action_smoothness_penalty(sim):
    before, after = task_state(sim, (3,), actions=2), task_state(sim, (3,), actions=2)
    before["action"] = torch.tensor([[1.0, -2.0], [1.0, -2.0], [0.5, 0.5]])
    after["action"] = torch.tensor([[4.0, 2.0], [4.0, 2.0], [0.5, 0.5]])
    before["elapsed"] = torch.tensor([1, 0, 7])
    close(paid("action_smoothness_penalty", sim, before, after), torch.tensor([-5.0, 0.0, 0.0]))


def test_orientation_alignment(sim):
    """The cosine of the angle between them: 0, 60, 90 and 180 degrees, and both turned alike."""
    quaternions = [(1.0, 0.0, 0.0, 0.0), (cos(pi / 6), 0.0, sin(pi / 6), 0.0), SIDEWAYS, (0.0, 0.0, 0.0, 1.0), SIDEWAYS]
    state = placed(sim, task_state(sim, (5,)), "cube", None, quaternions)
    state = placed(sim, state, "other", None, [(1.0, 0.0, 0.0, 0.0)] * 4 + [SIDEWAYS])
    alike = paid("orientation_alignment", sim, task_state(sim, (5,)), state, **PAIR)
    close(alike, torch.tensor([1.0, 0.5, 0.0, -1.0, 1.0]), 1e-6)
    quarter = (sqrt(0.5), 0.0, sqrt(0.5), 0.0)  # about x, then about y: a third of a turn about (1, 1, -1)
    both = placed(sim, placed(sim, task_state(sim), "cube", None, SIDEWAYS), "other", None, quarter)
    close(paid("orientation_alignment", sim, both, both, **PAIR), -0.5, 1e-6)


def test_reaching_behind_object(sim):
    """The goal is 3, 4 apart horizontally, so behind is 0.05 (0.6, 0.8) before the cube, and 0.02 above; at 1 m."""
    x, y, z = STRETCHED
    start = task_state(sim)
    state = posed(sim, start, [0.0] * 6)
    cube = (x - 0.12 + 0.05 * 0.6, y + 0.05 * 0.8, z - 0.02)
    state = aimed(placed(sim, state, "cube", cube), (cube[0] + 0.3, cube[1] + 0.4, 7.0))
    offsets = {"behind_offset": 0.05, "height_offset": 0.02}

    def reach(state=state, **params):
        return paid("reaching_behind_object", sim, start, state, **PUSH, **params)

    close(reach(**offsets), 1.0 - tanh(5.0 * 0.12), 1e-5)
    close(reach(**offsets, distance_scale=8.0), 1.0 - tanh(8.0 * 0.12), 1e-5)
    there = placed(sim, state, "cube", (cube[0] + 0.12, *cube[1:]))
    there = aimed(there, (cube[0] + 0.42, cube[1] + 0.4, -7.0))
    close(reach(there, **offsets), 1.0, 1e-5)
    close(reach(there), 1.0 - tanh(5.0 * sqrt(0.035**2 + 0.005**2)), 1e-5)  # 0.015 each: 0.035 and 0.005 short
    above = aimed(state, (*cube[:2], 7.0))  # no direction: no offset, so 0.12 - 0.03, 0.04 and 0 are left
    close(reach(above, **offsets), 1.0 - tanh(5.0 * sqrt(0.09**2 + 0.04**2)), 1e-5)


def test_success_reward(sim):
    state = task_state(sim, (2,)).set("success", torch.tensor([True, False]))
    result = paid("success_reward", sim, task_state(sim, (2,)), state)
    assert result.dtype == torch.float32 and result.tolist() == [1.0, 0.0]


def test_where_a_distance_is_0_value_and_slope_are_finite(sim):
    """Cube, other, goal and tool at one place, nothing moves: each term is at its best, and no slope is nan."""
    q = torch.linspace(-1.0, 1.0, 6)
    state = posed(sim, task_state(sim), q, [0.0] * 6)
    place = world.site_pose(sim, state["world"], sim.robot.tcp["arm"])[:3, 3].tolist()
    state = aimed(placed(sim, placed(sim, state, "cube", place), "other", place), place)
    state = state.set("elapsed", torch.tensor(3))
    at = {"behind_offset": 0.0, "height_offset": 0.0}
    cases = {
        "distance_between_objects": (PAIR, 0.0),
        "distance_to_target": (AIM, 0.0),
        "incremental_distance_to_target": (AIM, 0.0),
        "joint_velocity_penalty": ({}, 0.0),
        "action_smoothness_penalty": ({}, 0.0),
        "reaching_behind_object": (PUSH | at, 1.0),
    }
    for name, (params, best) in cases.items():
        term = made("reward", name, sim, **params)

        def value(physics, action, goal, term=term):
            moved = state["world"].copy().set("physics", physics)
            after = aimed(state, torch.zeros(3)).set("action", action).set("world", moved)
            after["targets", "goal_pose"] = goal
            return term(state, after)

        inputs = state["world", "physics"], state["action"], state["targets", "goal_pose"]
        slopes, rewards = torch.func.grad_and_value(value, argnums=(0, 1, 2))(*inputs)
        assert rewards == best, name
        assert all(slope.isfinite().all() for slope in slopes), name
    behind = made("reward", "reaching_behind_object", sim, **PUSH)  # an offset, but no direction
    slope = torch.func.grad(lambda goal: behind(state, aimed(state, goal)))(state["targets", "goal_pose"])
    assert slope.isfinite().all()


def test_slopes_are_those_of_the_numbers(sim):
    """The slope of the distance of 5 m along (3, 4, 0) is (0.6, 0.8, 0)."""
    state = placed(sim, task_state(sim), "cube", (0.0, 0.0, 0.0))
    term = made("reward", "distance_to_target", sim, **AIM)
    slope = torch.func.grad(lambda goal: term(state, aimed(state, goal)))(torch.tensor([3.0, 4.0, 0.0]))
    close(slope, torch.tensor([-0.6, -0.8, 0.0]), 1e-6)


SETTINGS = {
    "distance_between_objects": (
        PAIR | {"exponential": True},
        {
            "source_entity_cfg": {"uid": "mark"},
            "target_entity_cfg": {"uid": "mark"},
            "exponential": False,
            "sigma": 2.0,
        },
    ),
    "distance_to_target": (
        AIM | {"exponential": True},
        {
            "source_entity_cfg": OTHER,
            "target_pose_key": "target_pose",
            "exponential": False,
            "sigma": 2.0,
            "use_xy_only": True,
        },
    ),
    "incremental_distance_to_target": (
        AIM,
        {
            "source_entity_cfg": OTHER,
            "target_pose_key": "target_pose",
            "use_xy_only": True,
            "tanh_scale": 1.0,
            "positive_weight": 2.0,
            "negative_weight": 2.0,
        },
    ),
    "joint_velocity_penalty": ({}, {"joint_ids": [0]}),
    "joint_limit_penalty": ({"margin": 0.6}, {"joint_ids": [0], "margin": 0.5}),
    "action_smoothness_penalty": ({}, {}),
    "orientation_alignment": (PAIR, {"source_entity_cfg": MARK, "target_entity_cfg": MARK}),
    "reaching_behind_object": (
        PUSH,
        {
            "object_cfg": OTHER,
            "target_pose_key": "target_pose",
            "behind_offset": 0.5,
            "height_offset": 0.5,
            "distance_scale": 1.0,
        },
    ),
    "success_reward": ({}, {}),
}
"""By term: settings that it works with, and another value of every one that can have one in this scene."""


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_changes_the_reward_or_is_refused_where_it_is_wrong(sim, name):
    base, changes = SETTINGS[name]
    refused = lookup("reward", name).config.model_fields.keys() - changes.keys()
    assert refused <= {"robot_uid", "part_name"} and base.keys() <= changes.keys()
    states = shaken(sim, (8,), 0), shaken(sim, (8,), 1)
    usual = paid(name, sim, *states, **base)
    for key, change in changes.items():
        assert (paid(name, sim, *states, **(base | {key: change})) != usual).any(), key
    for key in refused:
        with pytest.raises(ConfigError, match=f"^params.{key}: "):
            made("reward", name, sim, **(base | {key: "nothing"}))


NEAR = {"source_entity_cfg": {"uid": "cub"}, "target_entity_cfg": OTHER}
REFUSED = [
    ("distance_between_objects", NEAR, "params.source_entity_cfg.uid: unknown object 'cub'; did you mean 'cube'?"),
    (
        "orientation_alignment",
        PAIR | {"target_entity_cfg": {"uid": "cub"}},
        "params.target_entity_cfg.uid: unknown obj",
    ),
    ("orientation_alignment", NEAR, "params.source_entity_cfg.uid: unknown object 'cub'"),
    ("distance_between_objects", PAIR | {"target_entity_cfg": {"uid": "cub"}}, "params.target_entity_cfg.uid: unknown"),
    ("distance_to_target", {"source_entity_cfg": {"uid": "cub"}}, "params.source_entity_cfg.uid: unknown object 'cub'"),
    ("incremental_distance_to_target", {"source_entity_cfg": {"uid": "x"}}, "params.source_entity_cfg.uid: unknown"),
    ("reaching_behind_object", {"object_cfg": {"uid": "cub"}}, "params.object_cfg.uid: unknown object 'cub'"),
    ("reaching_behind_object", PUSH | {"part_name": "leg"}, "params.part_name: no end effector of 'leg'; known: arm"),
    (
        "joint_velocity_penalty",
        {"joint_ids": [6]},
        "params.joint_ids: 6, but there are 6 joints: ur/shoulder",
    ),
    ("joint_limit_penalty", {"joint_ids": [6]}, "params.joint_ids: 6, but there are 6 joints: ur/shoulder"),
    ("joint_limit_penalty", {"margin": 1.5}, "params: margin: must be at most 1.0, got 1.5"),
    ("distance_to_target", AIM | {"sigma": 0.0}, "params: sigma: must be at least 1e-06, got 0.0; width of the exp"),
    ("distance_to_target", AIM | {"use_xy": True}, "params: use_xy: unknown key; did you mean 'use_xy_only'?"),
    ("success_reward", {"value": 1.0}, "params: value: unknown key; known: none"),
]


@pytest.mark.parametrize(("name", "params", "message"), REFUSED)
def test_what_cannot_be_is_refused_when_the_term_is_made(sim, name, params, message):
    with pytest.raises(ConfigError) as error:
        made("reward", name, sim, **params)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["distance_to_target", "incremental_distance_to_target", "reaching_behind_object"])
def test_a_target_that_no_event_stores_is_refused(sim, name):
    params, state = SETTINGS[name][0] | {"target_pose_key": "goal"}, task_state(sim, (2,))
    with pytest.raises(ConfigError, match=r"params.target_pose_key: no target 'goal'; an event .* 'goal_pose'?"):
        paid(name, sim, state, state, **params)


@pytest.mark.parametrize("name", ["joint_velocity_penalty", "joint_limit_penalty"])
def test_joints_need_a_robot(name):
    with pytest.raises(ConfigError, match="this term needs a robot's joints, but the scene has no robot"):
        made("reward", name, scene({"rigid_object": SCENE["rigid_object"]}))


def every(sim):
    """Return a function that computes all terms of two states, each with valid settings."""
    terms = [made("reward", name, sim, **SETTINGS[name][0]) for name in SETTINGS]
    return lambda before, after: [term(before, after) for term in terms]


def test_terms_are_pure_and_take_any_batch_shape(sim):
    terms, states = every(sim), (shaken(sim, (2, 3), 0), shaken(sim, (2, 3), 1))
    result = assert_pure(terms, *states)
    assert all(x.shape == (2, 3) and x.dtype == torch.float32 and x.isfinite().all() for x in result)
    flat, one = terms(*(s.reshape(6) for s in states)), terms(*(s[1, 2] for s in states))
    for x, rows, row in zip(result, flat, one, strict=True):
        close(rows, x.flatten(), 1e-6)
        close(row, x[1, 2], 1e-6)


def test_terms_run_under_vmap_and_as_one_graph(sim):
    terms, states = every(sim), (shaken(sim, (2, 3), 0), shaken(sim, (2, 3), 1))
    expected = terms(*states)
    for x, e in zip(torch.func.vmap(terms)(*states), expected, strict=True):
        close(x, e, 1e-6)
    leaves, structure = flatten(states)
    graph, _ = traced(terms, structure, leaves)
    for x, e in zip(graph(*leaves), expected, strict=True):
        close(x, e, 1e-6)


@pytest.mark.slow
def test_compiled_rewards_equal_eager_ones(sim):
    terms, states = every(sim), (shaken(sim, (4,), 0), shaken(sim, (4,), 1))
    for x, e in zip(choose_form("on", "cpu").jit(terms)(*states), terms(*states), strict=True):
        close(x, e, 1e-5)


def test_the_docstring_of_every_term_states_its_result():
    names = [name for name in vars(rewards) if name in SETTINGS]
    assert sorted(names) == sorted(SETTINGS)
    assert all("`[*B]`" in getattr(rewards, name).__doc__ for name in names)
