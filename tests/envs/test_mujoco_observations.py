"""Terms of the observation: each by hand, every setting, refused settings, and equal numbers in every variant."""

from dataclasses import replace
from math import pi

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
    spun,
    task_state,
)

from ecrl.compile.jit import choose_form
from ecrl.compile.trace import traced
from ecrl.config.model import validate_section
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import simulation
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.mujoco.terms import observations
from ecrl.errors import ConfigError
from ecrl.pytree import flatten
from ecrl.registry import lookup

CUBE = {"entity_cfg": {"uid": "cube"}}


@pytest.fixture(scope="module")
def sim():
    return scene()


def observed(name, sim, state, value=None, **params):
    return made("observation", name, sim, **params)(state, value)


def test_a_joint_in_its_range(sim):
    """The elbow may turn by +-pi, the others by +-2 pi: (pi/2 + pi) / (2 pi) = (pi + 2 pi) / (4 pi) = 0.75."""
    state = task_state(sim, (2,))
    qpos = torch.tensor([[pi, 0.0, pi / 2, -pi, -2 * pi, 2 * pi], [0.0] * 6])
    expected = torch.tensor([[0.75, 0.5, 0.75, 0.25, 0.0, 1.0], [0.5] * 6])
    name = "normalize_robot_joint_data"
    close(observed(name, sim, state, qpos), expected, 1e-6)
    some = torch.tensor([[0.75, 0.0, 0.75, -pi, -2 * pi, 2 * pi], [0.5, 0.0, 0.5, 0.0, 0.0, 0.0]])
    close(observed(name, sim, state, qpos, joint_ids=[2, 0]), some, 1e-6)
    close(observed(name, sim, state, qpos, range=[-1.0, 1.0], part_name="arm"), 2.0 * expected - 1.0, 1e-6)


def test_limits_become_the_ends_of_the_range_exactly():
    """A slide of +-4 m: (1 + 4) / 8; a hinge without limits as if +-pi: (0.5 + pi) / (2 pi)."""
    sim = scene(CART)
    qpos = torch.tensor([[1.0, 0.5], [-4.0, -pi], [4.0, pi]])
    actual = observed("normalize_robot_joint_data", sim, task_state(sim, (3,)), qpos)
    close(actual, torch.tensor([[0.625, 0.5795775], [0.0, 0.0], [1.0, 1.0]]), 1e-7)


def test_the_pose_of_the_tool(sim):
    """By the arm's Denavit-Hartenberg table: stretched along -x, its tool points to -y."""
    state = posed(sim, task_state(sim, (2,)), [0.0] * 6)
    x, y, z = STRETCHED
    expected = torch.tensor([[1.0, 0.0, 0.0, x], [0.0, 0.0, -1.0, y], [0.0, 1.0, 0.0, z], [0.0, 0.0, 0.0, 1.0]])
    close(observed("get_robot_eef_pose", sim, state, part_name="arm"), expected.expand(2, 4, 4), 1e-6)
    close(observed("get_robot_eef_pose", sim, state, position_only=True), expected[:3, 3].expand(2, 3), 1e-6)
    turned = posed(sim, state, [pi / 2, 0.0, 0.0, 0.0, 0.0, 0.0])  # a quarter turn of the base: x, y become -y, x
    close(observed("get_robot_eef_pose", sim, turned, position_only=True), torch.tensor([[-y, x, z]] * 2), 1e-6)


def test_the_pose_of_an_object(sim):
    state = placed(sim, task_state(sim, (2,)), "cube", (1.0, 2.0, 3.0), SIDEWAYS)
    expected = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, -1.0, 2.0], [0.0, 1.0, 0.0, 3.0], [0.0, 0.0, 0.0, 1.0]])
    close(observed("get_rigid_object_pose", sim, state, **CUBE), expected.expand(2, 4, 4), 1e-6)
    close(observed("get_rigid_object_pose", sim, state, position_only=True, **CUBE), expected[:3, 3].expand(2, 3), 1e-6)
    mark = observed("get_rigid_object_pose", sim, state, entity_cfg={"uid": "mark"}, position_only=True)
    close(mark, torch.tensor([[0.0, 1.0, 0.05]] * 2), 1e-6)


def test_a_target(sim):
    goal = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    state = aimed(task_state(sim, (2,)), goal)
    close(observed("target_position", sim, state), goal, 0.0)
    state["targets", "home"] = -goal
    close(observed("target_position", sim, state, target_pose_key="home"), -goal, 0.0)


def test_the_velocity_of_an_object(sim):
    """The tool turns about its own y axis, which a rotation by 90 degrees about x makes the world's z axis."""
    state = placed(sim, task_state(sim, (2,)), "cube", None, SIDEWAYS)
    state = spun(sim, state, "cube", [[1.0, 2.0, 3.0, 0.0, 4.0, 0.0], [0.0, 0.0, 0.0, 5.0, 0.0, 0.0]])
    expected = torch.tensor([[1.0, 2.0, 3.0, 0.0, 0.0, 4.0], [0.0, 0.0, 0.0, 5.0, 0.0, 0.0]])
    close(observed("get_rigid_object_velocity", sim, state, **CUBE), expected, 1e-6)


def test_the_velocity_of_the_tool(sim):
    """Stretched out, at (x, y, z): the base turns about z, v = 2 (-y, x, 0); the shoulder, d1 = 0.1273 up, about -y."""
    x, y, z = STRETCHED
    turning = [[2.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0, 0.0, 0.0]]
    state = posed(sim, task_state(sim, (2,)), [0.0] * 6, turning)
    base = [-2.0 * y, 2.0 * x, 0.0, 0.0, 0.0, 2.0]
    shoulder = [-3.0 * (z - 0.1273), 0.0, 3.0 * x, 0.0, -3.0, 0.0]
    close(observed("get_robot_eef_velocity", sim, state, part_name="arm"), torch.tensor([base, shoulder]), 1e-5)


def only(sim, count):
    """Return the simulation of a task that acts only on the first joints."""
    return replace(sim, robot=sim.robot._replace(joints=sim.robot.joints[:count]))


def test_the_tool_moves_with_joints_that_are_not_acted_on_too(sim):
    state, name = shaken(sim, (3,)), "get_robot_eef_velocity"
    close(observed(name, only(sim, 2), state), observed(name, sim, state), 0.0)


def test_what_is_not_observed_cannot_be_scaled(sim):
    with pytest.raises(ConfigError, match=r"params.part_name: ur/wrist_2_joint, ur/wrist_3_joint are not among"):
        made("observation", "normalize_robot_joint_data", only(sim, 4), part_name="arm")


def test_the_velocity_of_the_tool_is_the_slope_of_its_pose(sim):
    """A millisecond either side, in all joints at once."""
    state = shaken(sim, (3,))
    observe = made("observation", "get_robot_eef_velocity", sim)
    q, qdot = (read(sim, state["world"], sim.robot.joints) for read in (world.joint_positions, world.joint_velocities))
    step = 1e-3
    ends = [observed("get_robot_eef_pose", sim, posed(sim, state, q + sign * step * qdot)) for sign in (1.0, -1.0)]
    slope = (ends[0] - ends[1])[..., :3, 3] / (2.0 * step)
    close(observe(state, None)[..., :3], slope, 2e-3)
    rate = (ends[0] - ends[1])[..., :3, :3] / (2.0 * step) @ observed("get_robot_eef_pose", sim, state)[..., :3, :3].mT
    spin = torch.stack((rate[..., 2, 1], rate[..., 0, 2], rate[..., 1, 0]), -1)
    close(observe(state, None)[..., 3:], spin, 2e-3)


ADDED = {
    "get_robot_eef_pose": {},
    "get_rigid_object_pose": CUBE,
    "target_position": {},
    "get_rigid_object_velocity": CUBE,
    "get_robot_eef_velocity": {},
}


@pytest.mark.parametrize("name", ADDED)
def test_a_term_that_adds_changes_nothing(sim, name):
    with pytest.raises(ConfigError, match=r"^mode: this term makes a new entry; use mode add$"):
        observed(name, sim, task_state(sim, (2,)), torch.zeros(2, 6), **ADDED[name])


def test_a_term_that_changes_adds_nothing(sim):
    name, state = "normalize_robot_joint_data", task_state(sim, (2,))
    with pytest.raises(ConfigError, match=r"^mode: this term changes an existing entry; use mode modify$"):
        observed(name, sim, state)
    for shape in ((2, 7), (2, 4, 4), (2, 6, 1)):
        message = r"^name: expected an entry with one value for each joint: ur/shoulder_pan_joint, .*; this one has"
        with pytest.raises(ConfigError, match=message):
            observed(name, sim, state, torch.zeros(shape))


OTHER = {"entity_cfg": {"uid": "other"}}
REFUSED = [
    ("normalize_robot_joint_data", {"joint_ids": [0, 7]}, "params.joint_ids: 7, but there are 6 joints: ur/shoulder_p"),
    ("normalize_robot_joint_data", {"robot_uid": "panda"}, "params.robot_uid: no robot 'panda'; known joints: ur/sho"),
    ("normalize_robot_joint_data", {"part_name": "hand"}, "params.part_name: unknown part 'hand'; known: arm"),
    ("normalize_robot_joint_data", {"part_name": "arm", "joint_ids": [0]}, "part_name and joint_ids both select"),
    ("normalize_robot_joint_data", {"range": [1.0, 1.0]}, "range: 1.0 is not below 1.0"),
    ("get_robot_eef_pose", {"part_name": "arms"}, "params.part_name: no end effector of 'arms'; did you mean 'arm'"),
    ("get_robot_eef_velocity", {"part_name": "leg"}, "params.part_name: no end effector of 'leg'; known: arm"),
    ("get_rigid_object_pose", {"entity_cfg": {"uid": "cub"}}, "params.entity_cfg.uid: unknown object 'cub'; did you"),
    ("get_rigid_object_pose", {}, "params: entity_cfg: missing"),
    ("get_rigid_object_velocity", {"entity_cfg": {"uid": "cub"}}, "params.entity_cfg.uid: unknown object 'cub'; did"),
    (
        "get_rigid_object_velocity",
        {"entity_cfg": {"uid": "mark"}},
        "params.entity_cfg.uid: body 'mark' is kinematic, expected dynamic",
    ),
]


@pytest.mark.parametrize(("name", "params", "message"), REFUSED)
def test_what_the_scene_has_not_is_refused_when_the_term_is_made(sim, name, params, message):
    with pytest.raises(ConfigError) as error:
        made("observation", name, sim, **params)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_target_that_no_event_stores_is_refused(sim):
    message = "params.target_pose_key: no target 'goal'; an event such as .*; did you mean 'goal_pose'?"
    with pytest.raises(ConfigError, match=message):
        observed("target_position", sim, task_state(sim, (2,)), target_pose_key="goal")


def test_joints_need_a_robot():
    sim = scene({"rigid_object": SCENE["rigid_object"]})
    with pytest.raises(ConfigError, match="this term needs a robot's joints, but the scene has no robot"):
        made("observation", "normalize_robot_joint_data", sim)


def test_the_velocity_of_a_tool_beyond_a_ball_joint_is_refused():
    """The velocity also depends on a ball joint, which is not a hinge or slide."""
    shoulder = """<mujoco><worldbody><body name="upper" pos="0 0 1"><joint type="ball" name="roll"/><geom size=".1"/>
    <body name="lower"><joint name="bend" axis="0 1 0"/><geom size=".05" pos=".3 0 0"/></body></body></worldbody>
    </mujoco>"""
    drives = {"stiffness": 10.0, "damping": 1.0, "max_effort": 5.0}
    tcp = [[1.0, 0.0, 0.0, 0.5], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    robot = {"uid": "d", "model": shoulder, "drive_pros": drives, "solver_cfg": {"arm": {"tcp": tcp}}}
    sim = simulation(validate_section(SceneConfig, {"robot": robot}, "scene"))
    made("observation", "get_robot_eef_pose", sim)
    with pytest.raises(ConfigError, match="joint 'd/roll' is not a hinge or slide"):
        made("observation", "get_robot_eef_velocity", sim)


SETTINGS = {
    "normalize_robot_joint_data": (
        {},
        {"joint_ids": [0, 1], "range": [-1.0, 1.0]},
        {"robot_uid", "part_name"},  # settings that name the robot and a part, here the whole robot
    ),
    "get_robot_eef_pose": ({}, {"position_only": True}, {"part_name"}),
    "get_object_pose": (CUBE, {"position_only": True, "to_matrix": False} | OTHER, set()),
    "target_position": ({}, {"target_pose_key": "target_pose"}, set()),
    "get_rigid_object_velocity": (CUBE, OTHER, set()),
    "get_robot_eef_velocity": ({}, {}, {"part_name"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_changes_the_entry_or_is_refused_where_it_is_wrong(sim, name):
    base, changes, refused = SETTINGS[name]
    assert lookup("observation", name).config.model_fields.keys() == changes.keys() | refused
    state, value = shaken(sim, (3,)), torch.linspace(0.1, 0.9, 18).reshape(3, 6) if name.startswith("norm") else None
    before = observed(name, sim, state, value, **base)
    for key, change in changes.items():
        after = observed(name, sim, state, value, **(base | {key: change}))
        assert after.shape != before.shape or (after != before).any(), key
    for key in refused:
        with pytest.raises(ConfigError, match=f"params.{key}"):
            made("observation", name, sim, **(base | {key: "nothing"}))


def test_a_part_is_chosen_by_its_name():
    """Cart and pole are a part each: if one is scaled, the other's number stays."""
    sim = scene(CART)
    qpos = torch.tensor([1.0, 0.5])
    for part, expected in (("arm", [0.625, 0.5]), ("hand", [1.0, 0.5795775])):
        actual = observed("normalize_robot_joint_data", sim, task_state(sim), qpos, part_name=part, robot_uid="Cart")
        close(actual, torch.tensor(expected), 1e-6)


def every(sim):
    """Return a function that computes all terms of a state, each with valid settings."""
    terms = [made("observation", name, sim, **SETTINGS[name][0]) for name in SETTINGS]

    def entries(state):
        qpos = world.joint_positions(sim, state["world"], sim.robot.joints)
        return [term(state, qpos if i == 0 else None) for i, term in enumerate(terms)]

    return entries


def test_terms_are_pure_and_take_any_batch_shape(sim):
    entries, state = every(sim), shaken(sim, (2, 3))
    result = assert_pure(entries, state)
    shapes = [6], [4, 4], [4, 4], [3], [6], [6]
    assert [list(x.shape) for x in result] == [[2, 3, *shape] for shape in shapes]
    assert all(x.dtype == torch.float32 for x in result)
    for x, flat, one in zip(result, entries(state.reshape(6)), entries(state[1, 2]), strict=True):
        close(flat, x.flatten(0, 1), 1e-6)
        close(one, x[1, 2], 1e-6)


def test_terms_run_under_vmap_and_as_one_graph(sim):
    entries, state = every(sim), shaken(sim, (2, 3))
    expected = entries(state)
    for x, e in zip(torch.func.vmap(entries)(state), expected, strict=True):
        close(x, e, 1e-6)
    leaves, structure = flatten((state,))
    graph, _ = traced(entries, structure, leaves)
    for x, e in zip(graph(*leaves), expected, strict=True):
        close(x, e, 1e-6)


@pytest.mark.slow
def test_compiled_entries_equal_eager_ones(sim, traced_or_compiled):
    entries, state = every(sim), shaken(sim, (4,))
    for x, e in zip(choose_form("on", "cpu").jit(entries)(state), entries(state), strict=True):
        close(x, e, 1e-5)


def test_the_docstring_of_every_term_states_its_result():
    names = [name for name in vars(observations) if name in SETTINGS]
    assert sorted(names) == sorted(SETTINGS)
    for name in names:
        text = getattr(observations, name).__doc__
        assert "[*B, " in text and "`mode: " in text
