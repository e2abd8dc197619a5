"""Robots of components (`robot.urdf_cfg`): EmbodiChain's arm with a gripper, and arms and hands from files."""

import numpy as np
import pytest
import torch
from support.checks import close
from support.urdf_robot import (
    ARM_JOINTS,
    ARM_LINKS,
    BALL,
    HAND_JOINTS,
    HAND_LINKS,
    JOINTS,
    LINKS,
    joint,
    link,
    robot,
)

from ecrl import rng
from ecrl.config.model import validate_section
from ecrl.envs import make_env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import advance
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.mujoco.scene.scene import build
from ecrl.errors import ConfigError

mujoco = pytest.importorskip("mujoco")

TCP = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.16], [0.0, 0.0, 0.0, 1.0]]
HAND = {"component_type": "hand", "urdf_path": "DH_PGI_140_80/DH_PGI_140_80.urdf"}
ARM = {"component_type": "arm", "urdf_path": "UniversalRobots/UR10/UR10.urdf"}
UPSTREAM = {
    "uid": "Manipulator",
    "urdf_cfg": {"components": [ARM, HAND]},
    "init_qpos": [0.0, -1.57, 1.57, -1.57, -1.57, 0.0, 0.04, 0.04],
    "drive_pros": {"stiffness": 1e5, "damping": 1e3, "max_effort": 500.0},
    "solver_cfg": {"arm": {"tcp": TCP}},
    "control_parts": {"arm": ["JOINT[1-6]"]},
}
"""The robot of PushCubeRL as in EmbodiChain v0.1.2."""
FINGERS = ("gripper_finger1_joint_1", "gripper_finger2_joint_1")


def scene(**cfg):
    return build(validate_section(SceneConfig, {"robot": {"uid": "r"} | cfg}, "scene"))


def components(*listed, **cfg):
    return scene(urdf_cfg={"components": list(listed)}, **cfg)


@pytest.mark.filterwarnings("ignore:robot.urdf_cfg:UserWarning")
def test_push_cube_has_the_actions_and_observations_of_embodichain():
    env = make_env({"name": "PushCubeRL", "cfg": {"robot": UPSTREAM}})
    assert env.observation_space.shape == (59,)
    arm = make_env({"name": "PushCubeRL", "cfg": {"robot": UPSTREAM | {"control_parts": {}}}})
    assert arm.scene.robot.parts == {
        "arm": arm.scene.robot.joints[:6],
        "hand": tuple(f"Manipulator/{name}" for name in FINGERS),
    }
    assert arm.action_space.shape == (8,) and arm.observation_space.shape == (59,)
    state = env.reset(rng.split(rng.key(0), 3))
    close(world.joint_positions(env.scene, state["world"], env.scene.robot.joints)[:, 6:], [[0.04, 0.04]] * 3, tol=1e-6)
    pose = world.site_pose(env.scene, state["world"], env.scene.robot.tcp["arm"])
    same = make_env({"name": "PushCubeRL", "cfg": {"robot": {"uid": "r"}}})
    other = world.site_pose(same.scene, same.reset(rng.split(rng.key(0), 3))["world"], "r/arm_tcp")
    close(pose, other, tol=1e-5)


def test_one_warning_for_each_file_that_a_built_in_part_replaces():
    with pytest.warns(UserWarning) as caught:
        scene(**UPSTREAM)
    assert [str(one.message).split(", so")[0] for one in caught] == [
        "robot.urdf_cfg.components[0].urdf_path: no file 'UniversalRobots/UR10/UR10.urdf'",
        "robot.urdf_cfg.components[1].urdf_path: no file 'DH_PGI_140_80/DH_PGI_140_80.urdf'",
    ]


@pytest.mark.filterwarnings("ignore:robot.urdf_cfg:UserWarning")
def test_the_gripper_has_its_opening_and_holds_a_cube_against_gravity():
    """The fingers are 0.08 m apart when open, and touch at 0.04 m."""
    cube = {"uid": "cube", "shape": {"shape_type": "Cube", "size": [0.05, 0.05, 0.05]}, "init_pos": [0.0, 0.0, 5.0]}
    cube["attrs"] = {"mass": 0.2, "static_friction": 1.0, "linear_damping": 0.0, "angular_damping": 0.0}
    cfg = {"robot": {"uid": "r", "urdf_cfg": {"components": [HAND]}}, "rigid_object": [cube]}
    made = build(validate_section(SceneConfig, cfg, "scene"))
    model, data = made.model, made.data
    mujoco.mj_forward(model, data)
    left, right = (data.body(f"r/hand/gripper_finger{i}_link") for i in (1, 2))
    assert np.linalg.norm(left.xpos - right.xpos) - 0.01 == pytest.approx(0.08)
    data.joint("cube").qpos[:3] = data.site("r/arm_tcp").xpos - np.array([0.0, 0.0, -0.01])
    data.joint("cube").qpos[3:] = [1.0, 0.0, 0.0, 0.0]
    model.opt.gravity[:] = 0.0
    for name in FINGERS:
        data.actuator(f"r/{name}").ctrl[0] = 0.025
    for _ in range(50):
        mujoco.mj_step(model, data)
    model.opt.gravity[:] = [0.0, 0.0, -9.81]
    start = data.body("cube").xpos.copy()
    for _ in range(200):  # two seconds
        mujoco.mj_step(model, data)
    assert np.linalg.norm(data.body("cube").xpos - start) < 0.01
    for name in FINGERS:
        data.actuator(f"r/{name}").ctrl[0] = 0.0
    for _ in range(50):
        mujoco.mj_step(model, data)
    assert data.body("cube").xpos[2] < start[2] - 0.1, "an open gripper lets go"


@pytest.mark.filterwarnings("ignore:robot.urdf_cfg:UserWarning")
def test_names_of_embodichain_select_joints_and_drives():
    drives = {"JOINT[1-6]": 3e3, "GRIPPER_FINGER[1-2]_JOINT_1": 2e3}
    made = components(
        ARM, HAND, control_parts={"arm": ["joint[1-3]"], "hand": ["GRIPPER.*"]}, drive_pros={"stiffness": drives}
    )
    assert made.robot.parts == {
        "arm": ("r/shoulder_pan_joint", "r/shoulder_lift_joint", "r/elbow_joint"),
        "hand": tuple(f"r/{name}" for name in FINGERS),
    }
    assert made.model.actuator_gainprm[:, 0].tolist() == [3e3] * 6 + [2e3] * 2
    assert made.model.actuator_forcerange[6:, 1].tolist() == [140.0, 140.0]


@pytest.mark.filterwarnings("ignore:robot.urdf_cfg:UserWarning")
def test_the_wrist_follows_the_stiff_drives_of_embodichain():
    """Each step adds 0.1 rad to the target. Explicit integration moved the wrist backwards, or not at all."""
    env = make_env({"id": "PushCubeRL", "cfg": {"robot": UPSTREAM}})
    state = env.reset(rng.split(rng.key(0), 6))
    sim, wrist = env.scene, [3, 4, 5]
    before = world.joint_positions(sim, state["world"], sim.robot.joints)[:, :6]
    for _ in range(6):
        state = env.step(state, torch.eye(6, 8), env.draw(rng.split(rng.key(1), 6)))
    moved = (world.joint_positions(sim, state["world"], sim.robot.joints)[:, :6] - before).diagonal()
    assert ((moved[wrist] > 0.55) & (moved[wrist] < 0.66)).all()
    for _ in range(6):
        state = env.step(state, torch.zeros(6, 8), env.draw(rng.split(rng.key(1), 6)))
    rest = world.joint_velocities(sim, state["world"], sim.robot.joints)[:, :6].diagonal()
    assert (rest[wrist].abs() < 1e-2).all()


@pytest.mark.parametrize(("dt", "stiffness", "damping"), [(0.01, 1e6, 1e4), (0.01, 1e5, 0.0), (0.002, 1e7, 1e3)])
def test_a_stiff_drive_applies_the_force_of_the_end_of_the_step(dt, stiffness, damping):
    """I = 2 kg: the cart and the pole. The force is k (target - x') - c v' with v' = v + h F / I and x' = x + h v'."""
    drives = {"stiffness": {"slider.*": stiffness}, "damping": {"slider.*": damping}, "max_effort": 1e9}
    cfg = {"robot": {"uid": "r", "robot_type": "CartPole", "drive_pros": drives}, "physics": {"dt": dt}}
    made = build(validate_section(SceneConfig, cfg, "scene"))
    target, position, speed = 0.3, 0.1, 0.7
    made.data.qpos[0], made.data.qvel[0], made.data.ctrl[0] = position, speed, target
    mujoco.mj_forward(made.model, made.data)
    force = float(made.data.actuator("r/slider_to_cart").force[0])
    after = speed + dt * force / 2.0
    assert force == pytest.approx(stiffness * (target - position - dt * after) - damping * after, rel=1e-9)


@pytest.mark.parametrize("stiffness", [None, 79_000.0])
def test_the_drives_that_the_time_step_resolves_keep_their_gains(stiffness):
    """h^2 k / I is 3.95 at the cart: below 4."""
    made = scene(robot_type="CartPole", drive_pros={"stiffness": stiffness and {"slider.*": stiffness}, "damping": 3.0})
    assert made.model.actuator_gainprm[0, 0] == (stiffness or 10.0)
    assert made.model.actuator_biasprm[:, 1:3].tolist() == [[-(stiffness or 10.0), -3.0], [-0.01, -3.0]]


def test_without_a_gripper_the_arm_is_as_before():
    one, other = scene(), scene(urdf_cfg={"components": []})
    assert one.model.ngeom == other.model.ngeom and one.robot == other.robot


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "arm.urdf").write_text(robot(ARM_LINKS, ARM_JOINTS))
    (tmp_path / "hand.urdf").write_text(robot(HAND_LINKS, HAND_JOINTS))
    (tmp_path / "two_ends.urdf").write_text(robot(LINKS, JOINTS))
    (tmp_path / "stiff.urdf").write_text(robot(ARM_LINKS[:1], []))
    monkeypatch.chdir(tmp_path)


def of_files(arm, hand=None, **more):
    parts = [{"component_type": "arm", "urdf_path": arm}]
    return parts if hand is None else [*parts, {"component_type": "hand", "urdf_path": hand} | more]


@pytest.mark.usefixtures("files")
def test_a_hand_of_a_file_is_at_the_flange_of_an_arm_of_a_file():
    moved = [[1.0, 0.0, 0.0, 0.1], [0.0, 0.0, -1.0, 0.0], [0.0, 1.0, 0.0, 0.2], [0.0, 0.0, 0.0, 1.0]]
    made = components(*of_files("arm.urdf", "hand.urdf", transform=moved), init_qpos=[0.0, 0.02])
    assert made.robot.joints == ("r/turn", "r/grip_left")
    assert made.robot.parts == {"arm": ("r/turn",), "hand": ("r/grip_left",)}
    model, data = made.model, made.data
    assert data.joint("r/grip_right").qpos[0] == pytest.approx(0.01 - 0.02)
    mujoco.mj_forward(model, data)
    assert np.allclose(data.body("r/hand/base").xpos, [0.1, 0.0, 0.3 + 0.3 + 0.2])
    assert np.allclose(data.body("r/hand/base").xmat.reshape(3, 3), np.array(moved)[:3, :3], atol=1e-12)
    assert model.actuator_forcerange[:, 1].tolist() == [50.0, 20.0]
    texts = robot(ARM_LINKS, ARM_JOINTS), robot(HAND_LINKS, HAND_JOINTS)
    assert components(*of_files(*texts)).robot == made.robot, "texts in place of paths"
    named = {"solver_cfg": {"arm": {"end_link_name": "tool"}}}
    made = components(*of_files("two_ends.urdf", "hand.urdf")[:1], **named)
    assert made.robot.tcp == {"arm": "r/arm_tcp"}


@pytest.mark.usefixtures("files")
def test_the_drives_of_a_hand_reach_their_targets():
    cfg = {"urdf_cfg": {"components": of_files("arm.urdf", "hand.urdf")}, "solver_cfg": {"arm": {}}}
    target = {"position_range": [[-0.1, -0.1, 0.5], [0.1, 0.1, 0.6]], "store_key": "target_pose"}
    event = {"func": "randomize_target_pose", "mode": "reset", "params": target}
    env = make_env({"name": "ReachRL", "cfg": {"robot": {"uid": "r"} | cfg, "events": {"goal": event}}})
    worlds, sim = env.reset(rng.split(rng.key(0), 2))["world"], env.scene
    for _ in range(25):
        worlds, _ = advance(sim, worlds, torch.tensor([[0.5, 0.03]] * 2))
    close(world.joint_positions(sim, worlds, sim.robot.joints), [[0.5, 0.03]] * 2, tol=2e-3)


def listed_texts(arm_links, arm_joints):
    return of_files(robot(arm_links, arm_joints), robot(HAND_LINKS, HAND_JOINTS))


def test_a_hand_leaves_the_following_joints_of_the_arm_as_they_are():
    follows = joint("hand_turn", "base", "extra", more='<mimic joint="turn"/>')
    listed = listed_texts([*ARM_LINKS, link("extra", BALL)], [*ARM_JOINTS, follows])
    made = components(*listed, solver_cfg={"arm": {"end_link_name": "flange"}})
    pairs = {(one.name, one.leader, one.offset, one.multiplier) for one in made.robot.followers}
    assert pairs == {("r/hand_turn", "r/turn", 0.0, 1.0), ("r/grip_right", "r/grip_left", 0.01, -1.0)}
    names = {made.model.joint(i).name for i in made.model.eq_obj1id}
    assert names == {"r/hand_turn", "r/grip_right"} and made.model.neq == 2


def test_end_effectors_are_at_the_flange_and_at_links_of_the_hand():
    both = of_files(robot(ARM_LINKS, ARM_JOINTS), robot(HAND_LINKS, HAND_JOINTS))
    made = components(*both, solver_cfg={"arm": {}, "hand": {"end_link_name": "left"}})
    bodies = {part: made.model.body(int(made.model.site(site).bodyid[0])).name for part, site in made.robot.tcp.items()}
    assert bodies == {"arm": "r/flange", "hand": "r/hand/left"}
    made = components(both[1], solver_cfg={"hand": {"end_link_name": "base"}})
    assert made.model.body(int(made.model.site("r/hand_tcp").bodyid[0])).name == "r/hand/base"


@pytest.mark.usefixtures("files")
def test_a_part_that_ends_before_the_flange_has_its_end_effector_at_its_own_last_joint():
    arm = [link("base", BALL), link("upper", BALL), link("lower", BALL), link("flange")]
    joints = [joint("turn", "base", "upper"), joint("bend", "upper", "lower", axis="0 1 0")]
    joints.append(joint("fixed", "lower", "flange", "fixed", limit=""))
    made = components(
        *of_files(robot(arm, joints), "hand.urdf"),
        control_parts={"all": ["turn", "bend"], "shoulder": ["turn"], "hand": ["grip_left"]},
        solver_cfg={"all": {}, "shoulder": {}},
    )
    bodies = {part: made.model.body(int(made.model.site(site).bodyid[0])).name for part, site in made.robot.tcp.items()}
    assert bodies == {"all": "r/flange", "shoulder": "r/upper"}


MJCF = "<mujoco><worldbody><body><joint name='j'/><geom size='.1'/></body></worldbody>"
MJCF += "<actuator><position joint='j' kp='1'/></actuator></mujoco>"
MOVED = [[1.0, 0.0, 0.0, 0.1], *TCP[1:3], [0.0, 0.0, 0.0, 1.0]]
WITH_JOINT = of_files("arm.urdf", "arm.urdf")
REFUSED = {
    "another arm": (
        {},
        of_files("Franka/Panda/Panda.urdf"),
        r"\[0\].urdf_path: no such file 'Franka/",
    ),
    "another hand": (
        {},
        [{**HAND, "urdf_path": "x/BrainCo.urdf"}],
        r"no such file 'x/BrainCo.urdf', expected a file or one of ",
    ),
    "two arms": (
        {},
        [ARM, ARM],
        r"^robot.urdf_cfg.components: 2 components of the type arm, expected at most one; keep one",
    ),
    "a moved arm": ({}, [{**ARM, "transform": MOVED}], r"\[0\].transform: is only for a hand; place the arm with"),
    "a model too": (
        {"model": "example:panda"},
        [ARM],
        r"robot.model also names an arm; remove robot.model or this component$",
    ),
    "no flange": ({"robot_type": "CartPole"}, [HAND], r"the built-in CartPole has no flange for a hand; leave"),
    "an MJCF file": ({"model": MJCF}, [HAND], r"an MJCF file cannot get a hand; add the hand to the file of the arm$"),
    "two ends": (
        {},
        of_files("two_ends.urdf", "hand.urdf"),
        r"the arm has 2 links at its ends, left, right, expected one, which holds the hand; name the ",
    ),
    "an unknown flange": (
        {"solver_cfg": {"arm": {"end_link_name": "flang"}}},
        of_files("two_ends.urdf", "hand.urdf"),
        r"^robot.solver_cfg.arm.end_link_name: unknown link 'flang', which should hold the hand robot.urdf_cfg.compon",
    ),
    "the world as flange": (
        {"solver_cfg": {"arm": {"end_link_name": "world"}}},
        of_files("arm.urdf", "hand.urdf"),
        r"unknown link 'world', which should hold the hand robot.urdf_cfg.components\[1\]; known: base, flange, upper$",
    ),
    "one joint twice": ({}, WITH_JOINT, r"joint 'turn' is in the arm and in the hand; rename it"),
    "no joint": ({}, of_files("stiff.urdf"), r"^robot: the URDF file of the arm has no joint that moves; use another"),
    "no pose": (
        {},
        [{**HAND, "transform": [[2.0, 0.0, 0.0, 0.0], *TCP[1:]]}],
        r"transform: the first three",
    ),
    "a long path": ({}, of_files("a" * 5000 + ".urdf"), r"urdf_path: no such file 'aaa"),
    "a broken arm": ({}, of_files("<robot"), r"^robot.urdf_cfg.components\[0\].urdf_path: not a URDF file"),
    "no link of the hand": (
        {"solver_cfg": {"hand": {"end_link_name": "lef"}}},
        [HAND],
        r"unknown 'lef'; known",
    ),
    "too few positions": ({"init_qpos": [0.0] * 6}, [HAND], r"robot.init_qpos: 6 values for 8 joints"),
}


@pytest.mark.usefixtures("files")
@pytest.mark.filterwarnings("ignore:robot.urdf_cfg:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_one_clear_line(name):
    cfg, listed, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as error:
        components(*listed, **cfg)
    assert "\n" not in str(error.value)
