"""Robots and scenes from MJCF files: SI units for every kind of actuator, and files that are refused."""

import pytest
import torch
from support.checks import close

pytest.importorskip("mujoco.batch")

import mujoco
import numpy as np
from support.fake_mujoco_task import keys_of, nothing_yet

from ecrl import registry
from ecrl.config.model import validate_section
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.make_task import task_env
from ecrl.envs.mujoco.physics.simulation import simulation, start
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.envs.mujoco.terms.term import tcp_of
from ecrl.errors import ConfigError
from ecrl.registry import lookup
from ecrl.spaces import Box

pytestmark = pytest.mark.usefixtures("mujoco_test_terms")
FILE = """<mujoco><compiler angle="radian"/><option integrator="implicitfast"/><worldbody>
<body name="cube" pos="0 5 1"/><body name="one" gravcomp="1">
<joint name="j1" axis="0 1 0" range="-1 1" armature="1"/><geom size=".1"/><body name="two" pos="0 0 .3" gravcomp="1">
<joint name="j2" axis="0 1 0" range="-1 1" armature="1"/><geom size=".1"/></body></body></worldbody>
<actuator>{}</actuator></mujoco>"""
FIRST = {"joint_ids": [0]}
SPRUNG = "<position joint='j2' kp='100' kv='20'/>"


def scene(actuators, func="QposTerm", params=FIRST, **changes):
    """Make a task of the file, or of the robot in `changes`."""
    mjcf = {} if "robot" in changes else {"mjcf": FILE.format(actuators)}
    actions = {"a": {"func": func, "params": params}}
    cfg = validate_section(TaskConfig, {"actions": actions, "physics": {"dt": 0.01}} | mjcf | changes, "env.cfg")
    return task_env(cfg, lambda sim, state: (*nothing_of(state), {}))


def nothing_of(state):
    no = torch.zeros_like(state["elapsed"], dtype=torch.bool)
    return no, no.clone()


def after(env, action, steps=1):
    state = env.reset(keys_of(1))
    for t in range(steps):
        state = env.step(state, torch.tensor([[action]]), keys_of(1, 1 + t))
    return state["world"]


POSITION = [
    "<position joint='j1' kp='100' kv='20'/>",
    "<position joint='j1' kp='100' kv='20' gear='5'/>",
    "<general joint='j1' gainprm='50' biastype='affine' biasprm='0 -100 -20'/>",
    "<position joint='j1' kp='100' kv='20' gear='-2' timeconst='0.05'/>",
]


@pytest.mark.parametrize("actuator", POSITION)
def test_a_target_position_is_one_whatever_gear_and_gains(actuator):
    env = scene(actuator)
    close(world.joint_positions(env.scene, after(env, 0.5, 200), ("j1",)), torch.tensor([[0.5]]), 1e-3)


@pytest.mark.parametrize("actuator", POSITION)
def test_an_arm_is_held_where_it_starts_whatever_gear_and_gains(actuator):
    robot = {"model": FILE.format(actuator + SPRUNG), "init_qpos": [0.4, 0.0], "init_pos": [0.0, 0.0, 1.0]}
    env = scene("", robot=robot, params={"joint_ids": [1]})
    close(world.joint_positions(env.scene, after(env, 0.0, 20), ("robot/j1",)), torch.tensor([[0.4]]), 1e-3)


def test_a_force_and_a_velocity_are_what_is_asked_for_whatever_the_gear():
    force = scene("<motor joint='j1' gear='50'/>", "QfTerm", FIRST | {"scale": 3.0})
    close(world.joint_forces(force.scene, after(force, 0.5), ("j1",)), torch.tensor([[1.5]]), 1e-6)
    velocity = scene("<velocity joint='j1' kv='50' gear='4'/>", "QvelTerm", FIRST)
    close(world.joint_velocities(velocity.scene, after(velocity, 0.25, 20), ("j1",)), torch.tensor([[0.25]]), 1e-3)


@pytest.mark.parametrize(("kind", "func"), [("motor", "QfTerm"), ("velocity", "QvelTerm")])
def test_a_robot_keeps_the_actuators_of_its_file_where_they_are_what_a_term_asks_for(kind, func):
    file = FILE.format(f"<{kind} joint='j1'/><{kind} joint='j2'/>")
    assert scene("", func, robot={"model": file}).action_space == Box((-1.0,), (1.0,), (1,))


TWICE = "<position name='p' joint='j1' kp='9'/><position name='q' joint='j1' kp='9'/>"
DRIVES = {"stiffness": 10.0, "damping": 1.0}
BARE = FILE.format("")
NAMELESS = {"model": BARE.replace('name="j2"', ""), "drive_pros": DRIVES | {"max_effort": 1.0}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"actuators": TWICE}, "joint 'j1' has 2 actuators, expected one"),
        ({"actuators": "<intvelocity joint='j1' kp='9' actrange='-1 1'/>"}, "has an actuator of kind other, expected"),
        ({"actuators": SPRUNG, "params": {"joint_ids": [0, 0]}}, r"\[0, 0\] names a joint twice; name each joint once"),
        (
            {"actuators": "", "robot": {"model": BARE, "drive_pros": DRIVES | {"max_effort": {"j1": 5.0}}}},
            "robot.drive_pros.max_effort: has values for j1, but not for j2; give one for each joint",
        ),
        (
            {"actuators": "", "func": "QvelTerm", "robot": {"model": FILE.format(POSITION[0] + SPRUNG)}},
            "robot.drive_pros: is not set, but env.cfg.actions needs a velocity drive at joint 'j1', which the file "
            "lacks; give stiffness, damping, max_effort",
        ),
        (
            {"actuators": "", "robot": NAMELESS},
            "robot.model: a hinge or slide of body 'two' has no name; name each joint of the file",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        scene(**settings)


JOINTS = [f"{name}_joint" for name in ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")]


def tcp(height):
    return {"tcp": [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, height], [0.0, 0.0, 0.0, 1.0]]}


def arm(robot):
    """The simulation of the built-in arm."""
    return simulation(validate_section(SceneConfig, {"robot": {"uid": "ur"} | robot}, "scene"))


def place(robot, part):
    """Return the position of a part's end effector at the start."""
    sim = arm(robot)
    return world.site_pose(sim, start(sim, ()), sim.robot.tcp[part])[:3, 3]


def test_the_end_effector_is_that_of_the_tool_whatever_a_part_is_called():
    renamed = {"control_parts": {"left": JOINTS}, "solver_cfg": {"left": tcp(0.16)}}
    close(place(renamed, "left"), place({}, "arm"), 1e-6)


def test_the_tool_stays_at_the_end_of_the_arm_whichever_joints_its_part_has():
    # at home: x = a3 - d5, y = -d4, z = d1 - a2 - d6 - 0.16
    end = torch.tensor([-0.5723 - 0.1157, -0.163941, 0.1273 + 0.612 - 0.0922 - 0.16])
    for joints in (JOINTS, JOINTS[:3], JOINTS[1:2], JOINTS[::-1]):
        close(place({"control_parts": {"arm": joints}}, "arm"), end, 2e-3)
    elbow = torch.tensor([0.0, 0.0, 0.1273 + 0.612])  # above the shoulder by a2
    upper = {"control_parts": {"upper": JOINTS[:3]}, "solver_cfg": {"upper": tcp(0.0)}}
    close(place(upper, "upper"), elbow, 2e-3)


@pytest.mark.parametrize("part", ["arm", "left"])
def test_the_touching_tool_is_as_long_as_its_end_effector(part):
    model = arm({"control_parts": {part: JOINTS}, "solver_cfg": {part: tcp(0.3)}}).model
    on_tool = model.geom_bodyid == model.body("ur/wrist_3_link").id
    assert model.geom_size[on_tool, 1].max() == pytest.approx((0.3 - 0.02 - 0.02) / 2)  # half a capsule's length


def test_inverse_kinematics_of_fewer_joints_bring_the_tool_where_they_can():
    sim = arm({"control_parts": {"arm": JOINTS[:3]}})
    begin = {"world": start(sim, (1,))}
    home = world.joint_positions(sim, begin["world"], sim.robot.joints)
    expected = home + torch.tensor([0.2, -0.1, 0.15, 0.0, 0.0, 0.0])
    data = mujoco.MjData(sim.model)  # MuJoCo's own pose of the tool
    data.qpos[:] = expected[0].numpy()
    mujoco.mj_kinematics(sim.model, data)
    hand, quaternion = data.body("ur/wrist_3_link"), np.zeros(4)
    mujoco.mju_mat2Quat(quaternion, hand.xmat)
    there = hand.xpos + (0.0922 + 0.16) * hand.xmat.reshape(3, 3)[:, 2]  # past the flange along its z
    term = lookup("action", "EefPoseTerm")
    reach = term.make(validate_section(term.config, {}, "params"), sim)
    action = torch.tensor(np.concatenate((there, quaternion))).float().unsqueeze(0)
    assert reach.joints == tuple(f"ur/{name}" for name in JOINTS[:3])
    close(reach.control(begin, action), expected[:, :3], 2e-3)
    beside = action + torch.tensor([[0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0]])  # turned as three joints cannot
    close(reach.control(begin, beside), home[:, :3], 1e-6)


def test_an_unknown_end_effector_is_reported_with_its_key():
    with pytest.raises(ConfigError, match=r"no end effector of 'left'; known: none; robot.solver_cfg"):
        tcp_of(arm({"control_parts": {"left": JOINTS}}), "left")


EFFORT = {"func": "rig_effort"}


@pytest.mark.parametrize(
    ("rewards", "hooks", "message"),
    [
        (
            {"task": EFFORT},
            {"get_reward": lambda sim, a, b: b["elapsed"].float()},
            "env.cfg.rewards: .*have the log name 'task'; rename",
        ),
        ({"a": EFFORT, "a_weighted": EFFORT}, {}, "env.cfg.rewards: .*have the log name 'a_weighted'; rename"),
        ({"a": EFFORT, "a/b": EFFORT}, {}, "env.cfg.rewards: the log name 'a/b' is a path below the log name 'a'"),
    ],
)
def test_rewards_with_equal_log_names_are_refused(rewards, hooks, message):
    cfg = validate_section(
        TaskConfig,
        {"mjcf": FILE.format(SPRUNG), "rewards": rewards, "actions": {"a": {"func": "QposTerm", "params": {}}}},
        "env.cfg",
    )
    with pytest.raises(ConfigError, match=message):
        task_env(cfg, nothing_yet, **hooks)


def test_unknown_names_that_a_task_reads_are_refused_at_construction():
    def misspelt(sim, state):
        return (*nothing_of(state), {"x": world.body_pose(sim, state["world"], "cub")[..., 0, 3]})

    cfg = validate_section(TaskConfig, {"mjcf": FILE.format(SPRUNG), "actions": {"a": {"func": "QposTerm"}}}, "env.cfg")
    with pytest.raises(ConfigError, match=r"env.cfg \(compute_task_state\): body 'cub' is not in the scene"):
        task_env(cfg, misspelt)


def paying(reward):
    """Return a reward function of a user, which computes `reward(before, after)`."""
    return lambda cfg, sim: reward


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda before, after: after["action"], r"float32 \[2, 2\]"),
        (lambda before, after: 1.0, "float"),
        (lambda before, after: after["success"], r"bool \[2\]"),
    ],
)
def test_a_reward_that_is_not_one_number_each_is_refused_by_its_place(monkeypatch, reward, message):
    entry = registry.lookup("reward", "rig_effort")
    monkeypatch.setitem(registry._ENTRIES["reward"], "rig_effort", entry._replace(make=paying(reward)))
    cfg = {"mjcf": FILE.format(POSITION[0] + SPRUNG), "rewards": {"a": EFFORT}, "actions": {"a": {"func": "QposTerm"}}}
    expected = rf"^env.cfg.rewards.a \(rig_effort\): the reward is {message}, expected float32 \[2\]"
    with pytest.raises(ConfigError, match=expected):
        task_env(validate_section(TaskConfig, cfg, "env.cfg"), nothing_yet)


def test_success_is_a_flag_for_each_environment():
    def counted(sim, state):
        return state["elapsed"].float(), *nothing_of(state)[1:], {}

    cfg = validate_section(TaskConfig, {"mjcf": FILE.format(SPRUNG), "actions": {"a": {"func": "QposTerm"}}}, "env.cfg")
    with pytest.raises(ConfigError, match=r"\(compute_task_state\): success is float32 \[2\], expected bool \[2\]"):
        task_env(cfg, counted)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (
            {"check_truncated": lambda sim, state: state["action"] > 1.0},
            r"\(check_truncated\): the result is bool \[2, 2\]",
        ),
        (
            {"check_truncated": lambda sim, state: False},
            r"\(check_truncated\): the result is bool, expected bool \[2\]",
        ),
        ({"get_reward": lambda sim, before, after: after["action"]}, r"\(get_reward\): the reward is float32 \[2, 2\]"),
        (
            {"get_reward": lambda sim, before, after: after["fail"]},
            r"\(get_reward\): the reward is bool \[2\], expected fl",
        ),
    ],
)
def test_a_task_returns_one_value_per_environment(hooks, message):
    cfg = {"mjcf": FILE.format(POSITION[0] + SPRUNG), "actions": {"a": {"func": "QposTerm"}}}
    with pytest.raises(ConfigError, match=rf"^env.cfg {message}"):
        task_env(validate_section(TaskConfig, cfg, "env.cfg"), nothing_yet, **hooks)


def test_an_infinite_action_spoils_no_reward():
    cfg = {"mjcf": FILE.format(SPRUNG), "rewards": {"a": EFFORT}, "actions": {"a": {"func": "QposTerm"}}}
    env = task_env(validate_section(TaskConfig, cfg, "env.cfg"), nothing_yet)
    state = env.step(env.reset(keys_of(1)), torch.tensor([[torch.inf]]), keys_of(1, 1))
    assert state["reward"].tolist() == [0.0]
    assert state["action"].tolist() == [[0.0]]


def test_a_task_that_truncates_by_itself_has_no_truncation_gap():
    cfg = {"mjcf": FILE.format(SPRUNG), "actions": {"a": {"func": "QposTerm"}}, "max_episode_steps": 30}
    cfg = validate_section(TaskConfig, cfg, "env.cfg")
    assert task_env(cfg, nothing_yet).min_truncation_gap == 30
    own = task_env(cfg, nothing_yet, check_truncated=lambda sim, state: state["elapsed"] >= 4)
    assert own.min_truncation_gap == 1
