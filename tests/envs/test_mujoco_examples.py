"""Robots of the package `example-robot-data`: kinematics equal to Pinocchio's, drives that hold, and a run."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from support.checks import close

from ecrl import rng
from ecrl.config.model import validate_section
from ecrl.envs import make_env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import advance
from ecrl.envs.mujoco.robots.examples import EXAMPLES, example_file
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.mujoco.scene.scene import build
from ecrl.errors import ConfigError, MissingExtraError

mujoco = pytest.importorskip("mujoco")
TARGET = {"position_range": [[0.2, -0.1, 0.2], [0.3, 0.1, 0.3]], "store_key": "target_pose"}


@pytest.fixture(autouse=True)
def _package():
    pytest.importorskip("cmeel", reason="the robots need the extra 'robots'")
    pytest.importorskip("collada", reason="the robots need the extra 'robots'")


GRIPPER = {"component_type": "hand", "urdf_path": "builtin:two_finger_gripper"}
BETWEEN_THE_FINGERS = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.14], [0.0, 0.0, 0.0, 1.0]]
HAND = {"urdf_cfg": {"components": [GRIPPER]}, "solver_cfg": {"arm": {"tcp": BETWEEN_THE_FINGERS}}}


def reaching(name, **changes):
    event = {"func": "randomize_target_pose", "mode": "reset", "params": TARGET}
    robot = {"uid": "r", "model": f"example:{name}"} | changes
    return make_env({"name": "ReachRL", "cfg": {"robot": robot, "events": {"goal": event}}})


@pytest.mark.ref
@pytest.mark.parametrize(("name", "hand"), [("panda", {}), ("so101", {}), ("ur10", {}), ("ur10", HAND)])
def test_kinematics_are_those_of_pinocchio(name, hand):
    pinocchio = pytest.importorskip("pinocchio")
    path = example_file(name, "robot.model")
    theirs = pinocchio.buildModelFromUrdf(str(path), mimic=True)
    data, frame = theirs.createData(), theirs.getFrameId(EXAMPLES[name].end_links["arm"])
    env = reaching(name, init_rot=[0.0, 0.0, 0.0], **hand)
    sim, n = env.scene, 1000
    joints = sim.robot.joints
    low, high = (torch.tensor(limits) for limits in world.joint_limits(sim, joints))
    positions = low + (high - low) * rng.uniform(rng.key(0), (n, len(joints)))
    state = env.reset(rng.split(rng.key(1), n))["world"]
    poses = world.site_pose(sim, world.with_joint_positions(sim, state, joints, positions), sim.robot.tcp["arm"])
    ours = mujoco.MjData(sim.model)
    for i, row in enumerate(positions.double().numpy()):
        q = pinocchio.neutral(theirs)
        for joint, x in zip(joints, row, strict=True):
            ours.joint(joint).qpos[0] = x
            if theirs.existJointName(other := joint.removeprefix("r/")):  # Pinocchio's UR10 has no hand
                q[theirs.joints[theirs.getJointId(other)].idx_q] = x
        pinocchio.framesForwardKinematics(theirs, data, q)
        expected = data.oMf[frame].homogeneous @ (hand["solver_cfg"]["arm"]["tcp"] if hand else np.eye(4))
        mujoco.mj_kinematics(sim.model, ours)
        site = ours.site(sim.robot.tcp["arm"])
        assert np.allclose(site.xpos, expected[:3, 3], rtol=0.0, atol=1e-9)
        assert np.allclose(site.xmat.reshape(3, 3), expected[:3, :3], rtol=0.0, atol=1e-9)
        close(poses[i], expected, tol=1e-6)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_drives_hold_the_home_position_and_move_to_another(name):
    env = reaching(name)
    sim, state = env.scene, env.reset(rng.split(rng.key(0), 2))
    joints, worlds = sim.robot.joints, state["world"]
    start = world.joint_positions(sim, worlds, joints)
    for _ in range(25):  # one second
        worlds, failed = advance(sim, worlds, world.hold_controls(sim, state["world"]))
    assert not failed.any()
    close(world.joint_positions(sim, worlds, joints), start, tol=2e-3)
    low, high = (torch.tensor(limits) for limits in world.joint_limits(sim, joints))
    target = (start + 0.1 * (high - low).clamp(max=2.0)).clamp(low, high)
    for _ in range(50):
        worlds, failed = advance(sim, worlds, target)
    assert not failed.any()
    close(world.joint_positions(sim, worlds, joints), target, tol=5e-3)


def test_the_hand_of_the_panda_is_a_part_and_its_second_finger_follows():
    env = reaching("panda")
    sim = env.scene
    assert sim.robot.parts == {
        "arm": tuple(f"r/panda_joint{i}" for i in range(1, 8)),
        "hand": ("r/panda_finger_joint1",),
    }
    assert env.action_space.shape == (8,)
    state = env.reset(rng.split(rng.key(0), 1))["world"]
    fingers = ("r/panda_finger_joint1", "r/panda_finger_joint2")
    close(world.joint_positions(sim, state, fingers), [[0.04, 0.04]], tol=1e-6)
    closed = world.hold_controls(sim, state).clone()
    closed[:, -1] = 0.01
    for _ in range(25):
        state, _ = advance(sim, state, closed)
    close(world.joint_positions(sim, state, fingers), [[0.01, 0.01]], tol=1e-3)


def test_robots_without_a_row_are_named_by_their_files():
    made = build(validate_section(SceneConfig, {"robot": {"uid": "r", "model": "example:go2"}}, "scene"))
    assert len(made.robot.joints) == 12 and made.robot.parts == {"arm": made.robot.joints}
    with pytest.raises(
        ConfigError, match=r"^robot.model: example-robot-data has no robot 'pandas'; did you mean 'panda'"
    ):
        build(validate_section(SceneConfig, {"robot": {"model": "example:pandas"}}, "scene"))


def test_a_missing_package_is_reported_with_its_extra(monkeypatch):
    import importlib.metadata as metadata

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("ecrl.envs.mujoco.robots.examples.distribution", missing)
    with pytest.raises(MissingExtraError, match=r"install it with: pip install 'ecrl\[robots\]'$"):
        example_file("panda", "robot.model")


@pytest.mark.parametrize(("name", "joints"), [("allegro_right_hand", 16), ("kinova", 6), ("g1_29dof_rev_1_0", 29)])
def test_more_robots_of_the_package_hold_still(name, joints):
    unbalanced = pytest.warns(UserWarning, match="links such as 'link_3.0' have moments of inertia that no body has")
    with unbalanced if "allegro" in name else nullcontext():
        made = build(validate_section(SceneConfig, {"robot": {"uid": "r", "model": f"example:{name}"}}, "scene"))
    assert len(made.robot.joints) == joints and made.model.nmesh > 0


def test_a_hand_of_the_package_is_attached_to_an_arm_of_the_package():
    hand = {"component_type": "hand", "urdf_path": "example:allegro_right_hand"}
    robot = {"uid": "r", "model": "example:ur10", "urdf_cfg": {"components": [hand]}}
    with pytest.warns(UserWarning, match="links such as 'link_3.0' have moments of inertia that no body has"):
        made = build(validate_section(SceneConfig, {"robot": robot}, "scene"))
    assert len(made.robot.parts["arm"]) == 6 and len(made.robot.parts["hand"]) == 16
    assert made.model.body("r/hand/palm_link").parentid == made.model.body("r/tool0").id


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("hand", "alegro_right_hand", "has no robot 'alegro_right_hand'; did you mean 'allegro_right_hand'"),
        ("arm", "panda", "an arm of example-robot-data cannot be a component; set robot.model to 'example:panda' and"),
    ],
)
def test_components_of_the_package_that_cannot_be_had_are_refused(kind, name, message):
    robot = {"uid": "r", "urdf_cfg": {"components": [{"component_type": kind, "urdf_path": f"example:{name}"}]}}
    if kind == "hand":
        robot["model"] = "example:ur10"
    with pytest.raises(ConfigError, match=rf"^robot.urdf_cfg.components\[0\].urdf_path: .*{message}"):
        build(validate_section(SceneConfig, {"robot": robot}, "scene"))
