"""Robots from URDF files: joints, drives, meshes, mimic joints, end effectors, and errors in one line."""

import struct
import warnings

import numpy as np
import pytest
import torch
from support.checks import close
from support.urdf_robot import JOINTS, LINKS, joint, link, robot

from ecrl import rng
from ecrl.config.model import validate_section
from ecrl.envs import make_env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import advance
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.mujoco.scene.scene import build
from ecrl.errors import ConfigError

pytest.importorskip("mujoco")


def scene(text=None, **cfg):
    settings = {"uid": "r", "model": robot() if text is None else text} | cfg
    return build(validate_section(SceneConfig, {"robot": settings}, "scene"))


def test_joints_that_follow_others_are_no_joints_of_the_robot():
    made = scene()
    assert made.robot.joints == ("r/turn", "r/bend", "r/grip_left")
    assert made.model.nu == 3 and made.model.njnt == 4
    assert made.data.joint("r/turn").qpos[0] == 0.0
    assert made.data.joint("r/bend").qpos[0] == 0.2, "the nearest position to 0 within the limits"
    assert made.data.joint("r/grip_right").qpos[0] == pytest.approx(0.01)
    moved = scene(init_qpos=[0.5, 1.0, 0.03]).data
    assert moved.joint("r/grip_right").qpos[0] == pytest.approx(0.01 - 0.03)


def test_drives_follow_from_the_efforts():
    model = scene().model
    effort = np.array([50.0, 30.0, 20.0])
    assert np.allclose(model.actuator_gainprm[:, 0], effort / 0.02)
    assert np.allclose(-model.actuator_biasprm[:, 2], effort / 0.02 / 20.0)
    assert np.allclose(model.actuator_forcerange, np.stack((-effort, effort), 1))
    assert np.allclose([model.joint(f"r/{name}").armature[0] for name in ("turn", "bend", "grip_left")], effort / 300.0)
    assert not model.jnt_actfrclimited[[0, 1, 2]].any(), "only the drives limit the forces"
    model = scene(drive_pros={"max_effort": {"bend": 60.0}, "damping": 7.0, "stiffness": [1.0, 2.0, 3.0]}).model
    assert model.actuator_forcerange[:, 1].tolist() == [50.0, 60.0, 20.0]
    assert model.actuator_gainprm[:, 0].tolist() == [1.0, 2.0, 3.0] and set(-model.actuator_biasprm[:, 2]) == {7.0}


TOOL = {"solver_cfg": {"arm": {"end_link_name": "tool"}}}
TARGET = {
    "func": "randomize_target_pose",
    "mode": "reset",
    "params": {"position_range": [[-0.1, -0.1, 0.8], [0.1, 0.1, 0.9]], "store_key": "target_pose"},
}


def reaching(**robot_cfg):
    settings = {"uid": "r", "model": robot()} | TOOL | robot_cfg
    return make_env({"name": "ReachRL", "cfg": {"robot": settings, "events": {"goal": TARGET}}})


def test_drives_hold_against_gravity_and_reach_their_targets():
    env = reaching(init_qpos=[0.0, 1.0, 0.0])
    sim, state = env.scene, env.reset(rng.split(rng.key(0), 2))
    assert env.action_space.shape == (3,) and env.observation_space.shape == (3 + 3 + 3 + 16 + 3,)
    joints, held = sim.robot.joints, state["world"]
    before = world.joint_positions(sim, held, joints)
    for _ in range(25):
        held, failed = advance(sim, held, world.hold_controls(sim, state["world"]))
    close(world.joint_positions(sim, held, joints), before, tol=1e-4)
    target = torch.tensor([0.5, 0.4, 0.02]).expand(2, 3)
    for _ in range(25):  # one second
        held, failed = advance(sim, held, target)
        assert not failed.any()
    close(world.joint_positions(sim, held, joints), target, tol=1e-3)
    right = world.joint_positions(sim, held, ("r/grip_right",))
    close(right, torch.full((2, 1), 0.01 - 0.02), tol=2e-3)


def test_the_end_effector_is_at_its_link():
    """The flange, 0.3 m above the bent joint, is a link of its own."""
    tip = scene(init_qpos=[0.0, 0.5, 0.0], **TOOL).robot.tcp["arm"]
    env = reaching(init_qpos=[0.0, 0.5, 0.0])
    pose = world.site_pose(env.scene, env.reset(rng.split(rng.key(0), 1))["world"], tip)[0]
    close(pose[:3, 3], [0.3 * np.sin(0.5), 0.0, 0.6 + 0.3 * np.cos(0.5)], tol=1e-5)
    lifted = {"end_link_name": "tool", "tcp": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0.1], [0, 0, 0, 1]]}
    env = reaching(init_qpos=[0.0, 0.5, 0.0], solver_cfg={"arm": lifted})
    pose = world.site_pose(env.scene, env.reset(rng.split(rng.key(0), 1))["world"], tip)[0]
    close(pose[:3, 3], [0.4 * np.sin(0.5), 0.0, 0.6 + 0.4 * np.cos(0.5)], tol=1e-5)


def test_parts_are_patterns_of_joint_names():
    made = scene(control_parts={"arm": ["turn|bend"], "hand": ["grip_.*"], "turns": ["t[a-z]+"]})
    assert made.robot.parts == {
        "arm": ("r/turn", "r/bend"),
        "hand": ("r/grip_left",),
        "turns": ("r/turn",),
    }
    assert scene(control_parts={"arm": ["bend", "turn"]}).robot.parts["arm"] == ("r/bend", "r/turn")


CORNERS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], float)


def write_mesh(path):
    """Write a tetrahedron as binary STL."""
    faces = CORNERS[[[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]]]
    rows = b"".join(struct.pack("<12fH", 0, 0, 0, *face.flatten(), 0) for face in faces)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b" " * 80 + struct.pack("<I", len(faces)) + rows)


def meshed(visual, collision):
    shapes = "".join(
        f'<{tag}><geometry><mesh filename="{name}" scale="0.1 0.1 0.1"/></geometry></{tag}>'
        for tag, name in (("visual", visual), ("collision", collision))
        if name
    )
    return robot([link("base", shapes), *LINKS[1:]])


@pytest.fixture
def package(tmp_path):
    """Write a ROS package `my_arm` with a mesh, and return the folder of its URDF files."""
    write_mesh(tmp_path / "my_arm" / "meshes" / "tip.stl")
    (tmp_path / "my_arm" / "urdf").mkdir()
    return tmp_path / "my_arm" / "urdf"


@pytest.mark.parametrize("name", ["package://my_arm/meshes/tip.stl", "../meshes/tip.stl"])
def test_meshes_are_found_and_collide_as_convex_hulls(name, package, monkeypatch):
    (package / "arm.urdf").write_text(meshed(name, name))
    model = scene(str(package / "arm.urdf")).model
    assert model.nmesh in (1, 2) and np.isclose(model.mesh_vert.max(), 0.1, atol=0.05)
    shapes = {int(kind): int(group) for kind, group in zip(model.geom_contype, model.geom_group, strict=True)}
    assert shapes[0] == 1 and shapes[2] in (0, 3)
    hidden = [i for i in range(model.ngeom) if model.geom_group[i] == 3]
    assert [model.geom_contype[i] for i in hidden] == [2], "the shape for collisions of the link with a visual"
    elsewhere = package.parents[1] / "elsewhere" / "arm.urdf"
    elsewhere.parent.mkdir()
    elsewhere.write_text(meshed("", "package://my_arm/meshes/tip.stl"))
    assert scene(str(elsewhere)).model.nmesh == 1, "a folder above has the package"
    monkeypatch.setenv("ROS_PACKAGE_PATH", str(package.parents[1]))
    assert scene(meshed("", "package://my_arm/meshes/tip.stl")).model.nmesh == 1


def test_the_environment_variable_of_models_has_urdf_files_too(package, monkeypatch):
    (package / "arm.urdf").write_text(robot())
    monkeypatch.setenv("MENAGERIE_ROOT", str(package.parents[1]))
    assert scene("my_arm/urdf/arm.urdf").robot.joints == scene().robot.joints


def test_visual_meshes_of_other_formats_are_left_out_with_one_warning(package):
    (package / "arm.urdf").write_text(meshed("package://my_arm/meshes/tip.dae", "../meshes/tip.stl"))
    text = r"^robot.model: 1 visual meshes such as 'package://my_arm/meshes/tip.dae' are not files of MuJoCo, so images"
    with pytest.warns(UserWarning, match=text) as caught:
        model = scene(str(package / "arm.urdf")).model
    assert len(caught) == 1 and model.nmesh == 1 and not (model.geom_group == 3).any()


TWO_PARENTS = joint("second", "upper", "tool", "fixed", limit="")
LOOP = [joint("a", "base", "upper", "fixed", limit=""), joint("b", "upper", "base", "fixed", limit="")]
WEAK = joint("turn", "base", "upper", limit='lower="-1" upper="2" effort="0"')
REFUSED = {
    "no file": ("arm.urdf", {}, r"no such file 'arm.urdf'$"),
    "no XML": ("<robot name='a'>", {}, r"not a URDF file: no element found: line 1, column 16$"),
    "another file": (
        "<?xml version='1.0'?><model><robot/></model>",
        {},
        r"the first element is <model>, expected <robot",
    ),
    "a document type": ("<!DOCTYPE robot><robot name='a'/>", {}, r"has a document type, which ecrl does not read"),
    "no link": (
        robot(joints=[joint("turn", "base", "uper")]),
        {},
        r"joint 'turn' has the child 'uper', which is no link$",
    ),
    "two parents": (
        robot(joints=[*JOINTS, TWO_PARENTS]),
        {},
        r"link 'tool' has two parents, but the links of a URDF are",
    ),
    "a loop": (robot(LINKS[:2], LOOP), {}, r"link 'base' is in a loop, but the links of a URDF are a tree$"),
    "no mesh": (
        meshed("", "package://my_arm/tip.stl"),
        {},
        r"no such mesh 'package://my_arm/tip.stl'; expected the package",
    ),
    "no file of a mesh": (meshed("", "tip.stl"), {}, r"no such mesh '.*tip.stl'$"),
    "a collada file": (
        meshed("", "tip.dae"),
        {},
        r"the collision mesh 'tip.dae' is not a file of MuJoCo; convert it to one",
    ),
    "no effort": (
        robot(joints=[WEAK, *JOINTS[1:]]),
        {},
        r"joint 'turn' has no effort in the file; give robot.drive_pros",
    ),
    "no such link": (robot(), {"solver_cfg": {"arm": {"end_link_name": "tol"}}}, r"unknown 'tol'; did you mean 'tool'"),
    "no such joints": (
        robot(),
        {"control_parts": {"arm": ["JOINT[1-6]"]}},
        r"control_parts.arm: unknown joint 'JOINT\[1-6\]'",
    ),
    "no pattern": (robot(), {"control_parts": {"arm": ["turn["]}}, r"'turn\[' is neither a joint nor a pattern"),
    "twice": (robot(), {"control_parts": {"arm": ["turn", "t.*"]}}, r"names joint 'turn' twice"),
    "too few positions": (robot(), {"init_qpos": [0.0, 1.0]}, r"robot.init_qpos: 2 values for 3 joints"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_clear_line(name):
    text, cfg, message = REFUSED[name]
    with warnings.catch_warnings(), pytest.raises(ConfigError, match=message) as error:
        warnings.simplefilter("error")
        scene(text, **cfg)
    assert "\n" not in str(error.value) and str(error.value).startswith("robot.")


def test_the_effort_of_a_joint_may_come_from_the_config():
    model = scene(robot(joints=[WEAK, *JOINTS[1:]]), drive_pros={"max_effort": {"turn": 5.0}}).model
    assert model.actuator_forcerange[:, 1].tolist() == [5.0, 30.0, 20.0]


def test_a_link_of_a_built_in_robot_has_no_meaning():
    with pytest.warns(UserWarning, match=r"^robot.solver_cfg.arm.end_link_name: has no meaning for a built-in robot"):
        build(validate_section(SceneConfig, {"robot": {"solver_cfg": {"arm": {"end_link_name": "ee_link"}}}}, "scene"))
