"""Robots from URDF files: joints, drives, meshes, mimic joints, end effectors, and errors in one line."""

import struct
import warnings
from math import nan

import numpy as np
import pytest
import torch
from support.checks import close
from support.urdf_robot import BALL, INERTIA, JOINTS, LINKS, joint, link, robot

from ecrl import rng
from ecrl.config.model import validate_section
from ecrl.envs import make_env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import advance
from ecrl.envs.mujoco.robots.collada import collada_mesh
from ecrl.envs.mujoco.robots.inverse_kinematics import inverse_kinematics
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.mujoco.scene.scene import build
from ecrl.errors import ConfigError

mujoco = pytest.importorskip("mujoco")


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


FOLLOWING = [
    joint("a", "base", "upper", axis="0 1 0", limit='lower="-2" upper="2" effort="50"'),
    joint("b", "upper", "lower", axis="0 1 0", limit='lower="-4" upper="4" effort="50"', more='<mimic joint="a"/>'),
    joint("c", "lower", "tool", "fixed", limit=""),
]


def test_joints_that_follow_move_the_end_effector():
    """The tip is behind the joints a and b, and b turns by as much as a."""
    env = reaching(model=robot(LINKS[:4], FOLLOWING))
    sim, site = env.scene, env.scene.robot.tcp["arm"]
    state = env.reset(rng.split(rng.key(0), 3))["world"]
    angle = torch.tensor([[0.0], [0.3], [0.6]])
    moved = world.with_joint_positions(sim, state, ("r/a",), angle)
    close(world.joint_positions(sim, moved, ("r/b",)), angle, tol=1e-6)
    one, two = angle[:, 0].double(), 2.0 * angle[:, 0].double()
    x, z = 0.3 * (one.sin() + two.sin()), 0.3 + 0.3 * (one.cos() + two.cos())
    close(world.site_pose(sim, moved, site)[:, :3, 3], torch.stack((x, torch.zeros(3), z), -1), tol=1e-6)
    pose, jacobian = world.site_motion(sim, state, site, ("r/a",), angle)
    close(pose, world.site_pose(sim, moved, site), tol=1e-6)
    slope = torch.stack((0.3 * (one.cos() + 2.0 * two.cos()), -0.3 * (one.sin() + 2.0 * two.sin())), -1)
    close(jacobian[:, [0, 2], 0], slope, tol=1e-6)
    close(world.site_jacobian(sim, moved, site, ("r/a",)), jacobian, tol=1e-6)
    close(jacobian[:, 4, 0], [2.0] * 3, tol=1e-6)
    reached = inverse_kinematics(sim, state, site, ("r/a",), pose, iterations=50)
    close(reached.positions, angle, tol=1e-3)
    fast = world.with_joint_velocities(sim, moved, ("r/a",), torch.full((3, 1), 0.5))
    close(world.joint_velocities(sim, fast, ("r/b",)), [[0.5]] * 3, tol=1e-6)


def test_a_root_named_world_does_not_collide_with_the_robot():
    big = '<collision><geometry><sphere radius="0.5"/></geometry></collision>'
    joints = [joint("turn", "world", "upper"), *JOINTS[1:]]
    made = scene(robot([link("world", big), *LINKS[1:]], joints))
    mujoco.mj_forward(made.model, made.data)
    assert set(made.model.geom_contype[made.model.geom_bodyid > 0]) | {1} == {1, 2} and made.data.ncon == 0


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


COLLADA = """<?xml version="1.0"?><COLLADA xmlns="http://www.collada.org/2005/11/COLLADASchema" version="1.4.1">
<asset><created>2026-01-01</created><modified>2026-01-01</modified><unit meter="{unit}"/><up_axis>Y_UP</up_axis></asset>
<library_geometries><geometry id="g"><mesh>
<source id="p"><float_array id="a" count="15">0 0 0 2 0 0 2 2 0 0 2 0 1 1 3</float_array><technique_common>
<accessor source="#a" count="5" stride="3"><param name="X" type="float"/><param name="Y" type="float"/>
<param name="Z" type="float"/></accessor></technique_common></source>
<vertices id="v"><input semantic="POSITION" source="#p"/></vertices>
{faces}</mesh></geometry></library_geometries>
<library_visual_scenes><visual_scene id="s"><node id="n"><translate>0 0 1</translate>
<instance_geometry url="#g"/></node>
</visual_scene></library_visual_scenes><scene><instance_visual_scene url="#s"/></scene></COLLADA>"""
PYRAMID = """<polylist count="5"><input semantic="VERTEX" source="#v" offset="0"/><vcount>4 3 3 3 3</vcount>
<p>0 3 2 1 0 1 4 1 2 4 2 3 4 3 0 4</p></polylist>"""


def write_collada(path, unit="0.5", faces=PYRAMID):
    """Write a pyramid with a square base of 1 m and a tip at 2 m, 0.5 m above the origin, without the unit 2 and 3."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(COLLADA.format(unit=unit, faces=faces))
    return path


def test_collada_meshes_have_the_unit_of_the_file_and_keep_their_axes(tmp_path):
    pytest.importorskip("collada", reason="needs the extra 'robots'")
    vertices, faces = collada_mesh(write_collada(tmp_path / "a.dae"), "robot.model")
    close(torch.tensor(vertices), [[0, 0, 0.5], [1, 0, 0.5], [1, 1, 0.5], [0, 1, 0.5], [0.5, 0.5, 2.0]])
    assert faces.shape == (6, 3) and vertices.dtype == np.float32 and faces.dtype == np.int32
    a, b, c = vertices[faces].astype(float).swapaxes(0, 1)
    assert np.isclose(np.einsum("fi,fi->", a, np.cross(b, c)) / 6.0, 1.0 * 1.5 / 3.0), (
        "all faces are there, and face out"
    )
    lines = "<lines count='1'><input semantic='VERTEX' source='#v' offset='0'/><p>0 1</p></lines>"
    for text, message in ((COLLADA.format(unit="1", faces=lines), "has no triangles"), ("<a></b>", ": mismatched tag")):
        (tmp_path / "b.dae").write_text(text)
        with pytest.raises(ConfigError, match=rf"^robot.model: .*mesh '.*b.dae'.*{message}"):
            collada_mesh(tmp_path / "b.dae", "robot.model")


def test_collada_meshes_collide_and_are_seen(package):
    pytest.importorskip("collada", reason="needs the extra 'robots'")
    write_collada(package.parent / "meshes" / "tip.dae")
    stl, dae = "../meshes/tip.stl", "../meshes/tip.dae"
    seen, unseen = (scene(urdf_in(package, meshed(visual, stl))).model for visual in (dae, ""))
    assert (seen.ngeom, seen.nmesh) == (unseen.ngeom + 1, 2)
    assert np.array_equal(seen.body_mass, unseen.body_mass) and np.array_equal(seen.body_inertia, unseen.body_inertia)
    solid = scene(urdf_in(package, meshed("", dae))).model
    (shape,) = [i for i in range(solid.ngeom) if solid.geom_type[i] == mujoco.mjtGeom.mjGEOM_MESH]
    assert solid.geom_contype[shape] == 2 and np.isclose(np.ptp(solid.mesh_vert[:, 2]), 0.15)


def test_meshes_that_are_only_seen_may_be_flat_or_damaged(package):
    pytest.importorskip("collada", reason="needs the extra 'robots'")
    stl, path = "../meshes/tip.stl", package.parent / "meshes" / "tip.dae"
    square = PYRAMID.replace('count="5"', 'count="1"').replace("4 3 3 3 3", "4").replace(" 0 1 4 1 2 4 2 3 4 3 0 4", "")
    write_collada(path, faces=square)
    assert scene(urdf_in(package, meshed("../meshes/tip.dae", stl))).model.nmesh == 2
    damaged = {
        "a short list": PYRAMID.replace("4 3 3 3 3", "4 3 3 3 99"),
        "no such vertex": PYRAMID.replace("0 3 2 1", "0 3 2 -1"),
        "no offset": PYRAMID.replace(' offset="0"', ""),
    }
    for faces in damaged.values():
        write_collada(path, faces=faces)
        with pytest.warns(
            UserWarning, match=r"^robot.model: 1 visual meshes such as '../meshes/tip.dae' cannot be read"
        ):
            assert scene(urdf_in(package, meshed("../meshes/tip.dae", stl))).model.nmesh == 1
        with pytest.raises(ConfigError, match=r"^robot.model: (cannot read )?the mesh '.*tip.dae'"):
            scene(urdf_in(package, meshed("", "../meshes/tip.dae")))
    for unit in ("nan", "-1", "0"):
        with pytest.raises(ConfigError, match=rf"^robot.model: the mesh '.*tip.dae' has the unit {unit}.* m, expected"):
            collada_mesh(write_collada(path, unit), "robot.model")


def urdf_in(package, text):
    """Write a URDF file, and return its path."""
    (package / "arm.urdf").write_text(text)
    return str(package / "arm.urdf")


def test_moments_of_inertia_that_no_body_has_become_their_mean_with_one_warning():
    long = '<inertia ixx="0.01" iyy="0.01" izz="0.04" ixy="0" ixz="0" iyz="0"/>'
    text = robot().replace(link("upper", BALL), link("upper", BALL).replace(INERTIA, long))
    message = (
        r"^robot.model: 1 links such as 'upper' have moments of inertia that no body has \(principal moments with A "
    )
    with pytest.warns(UserWarning, match=message) as caught:
        model = scene(text).model
    assert len(caught) == 1 and np.allclose(model.body("r/upper").inertia, 0.02)
    edge = long.replace("0.04", "0.019")
    assert np.allclose(scene(text.replace(long, edge)).model.body("r/upper").inertia, [0.019, 0.01, 0.01])


def test_the_moments_of_a_plate_stay_whatever_their_rounding():
    """A + B = C for a plate. In a third of these frames, MuJoCo would refuse the rounded moments."""
    turn = np.random.default_rng(0)
    for _ in range(30):
        axes = np.linalg.qr(turn.normal(size=(3, 3)))[0]
        moments = axes @ np.diag([0.01, 0.06, 0.07]) @ axes.T
        names = {"ixx": (0, 0), "iyy": (1, 1), "izz": (2, 2), "ixy": (0, 1), "ixz": (0, 2), "iyz": (1, 2)}
        plate = " ".join(f'{name}="{float(moments[place])!r}"' for name, place in names.items())
        text = robot().replace(link("upper", BALL), link("upper", BALL).replace(INERTIA, f"<inertia {plate}/>"))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            inertia = scene(text).model.body("r/upper").inertia
        assert not warned and np.allclose(inertia, [0.07, 0.06, 0.01], rtol=1e-5)


def test_without_pycollada_visual_meshes_are_left_out_with_one_warning(package, monkeypatch):
    monkeypatch.setattr("ecrl.envs.mujoco.robots.urdf.can_read_collada", lambda: False)
    (package / "arm.urdf").write_text(meshed("package://my_arm/meshes/tip.dae", "../meshes/tip.stl"))
    text = r"^robot.model: 1 visual meshes such as 'package://my_arm/meshes/tip.dae' cannot be read, so images"
    with pytest.warns(UserWarning, match=text) as caught:
        model = scene(str(package / "arm.urdf")).model
    assert len(caught) == 1 and model.nmesh == 1 and not (model.geom_group == 3).any()
    advice = r"convert it to one of .stl, .obj, .msh, or install pycollada with pip install \"ecrl\[robots\]\"$"
    with pytest.raises(ConfigError, match=rf"^robot.model: the collision mesh 'tip.dae' has a format .*; {advice}"):
        scene(meshed("", "tip.dae"))


TWO_PARENTS = joint("second", "upper", "tool", "fixed", limit="")
LOOP = [joint("a", "base", "upper", "fixed", limit=""), joint("b", "upper", "base", "fixed", limit="")]
WEAK = joint("turn", "base", "upper", limit='lower="-1" upper="2" effort="0"')


def with_turn(**changes):
    return robot(joints=[joint("turn", "base", "upper", **changes), *JOINTS[1:]])


def with_mimic(name, leader, **changes):
    more = f'<mimic joint="{leader}" multiplier="3"/>'
    return robot(LINKS[:4], [JOINTS[0], joint(name, "upper", "lower", more=more, **changes), JOINTS[2]])


CHAIN = [JOINTS[0], joint("m1", "upper", "lower", more='<mimic joint="turn"/>')]
CHAIN.append(joint("m2", "lower", "tool", more='<mimic joint="m1"/>'))
REFUSED = {
    "a mimic of nothing": (
        with_mimic("m", "nope"),
        {},
        r"joint 'm' follows 'nope', expected a joint that moves and has no mimic",
    ),
    "a mimic of itself": (
        with_mimic("m", "m"),
        {},
        r"joint 'm' follows 'm', expected a joint that moves and has no mimic; known",
    ),
    "a mimic of a mimic": (
        robot(LINKS[:4], CHAIN),
        {},
        r"joint 'm2' follows 'm1', expected a joint that moves and has no mimic",
    ),
    "a start beyond limits": (
        with_mimic("m", "turn"),
        {"init_qpos": [1.0]},
        r"joint 'r/m' follows 'r/turn' to 3, beyond",
    ),
    "limits in turn": (
        with_turn(limit='lower="1" upper="-1" effort="5"'),
        {},
        r"'turn' has the limits 1 to -1, expected",
    ),
    "a limit of nan": (
        with_turn(limit='lower="-1" upper="nan" effort="5"'),
        {},
        r"'turn' has the upper 'nan', expected a",
    ),
    "a mass of nan": (
        robot([link("base", BALL, nan), *LINKS[1:]]),
        {},
        r"the mass of link 'base' has the value 'nan', expected finite numbers$",
    ),
    "an infinite axis": (
        with_turn(axis="0 0 -Inf"),
        {},
        r"the axis of joint 'turn' has the xyz '0 0 -Inf', expected finite numbers$",
    ),
    "an endless effort": (with_turn(limit='lower="-1" upper="1" effort="inf"'), {}, r"'turn' has the effort 'inf'"),
    "a negative effort": (
        with_turn(limit='lower="-1" upper="1" effort="-5"'),
        {},
        r"'turn' has the effort -5, expected",
    ),
    "a floating joint": (with_turn(kind="floating"), {}, r"joint 'turn' has the type 'floating', expected one of"),
    "a joint twice": (robot(joints=[*JOINTS, JOINTS[0]]), {}, r"the URDF file has two joints 'turn'"),
    "a link without a name": (robot([*LINKS, link("")]), {}, r"the URDF file has a link without a name; give each"),
    "a long path": (meshed("", "x" * 5000 + ".stl"), {}, r"no such mesh '"),
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
        r"joint 'turn' has the child 'uper', but no link has this name$",
    ),
    "two parents": (
        robot(joints=[*JOINTS, TWO_PARENTS]),
        {},
        r"link 'tool' has two parents; remove one of the two joints$",
    ),
    "a loop": (robot(LINKS[:2], LOOP), {}, r"the parents of link 'base' form a loop; remove a joint of the loop$"),
    "no mesh": (
        meshed("", "package://my_arm/tip.stl"),
        {},
        r"no such mesh 'package://my_arm/tip.stl'; expected the package",
    ),
    "no file of a mesh": (meshed("", "tip.stl"), {}, r"no such mesh '.*tip.stl'$"),
    "a mesh of a game": (
        meshed("", "tip.fbx"),
        {},
        r"the collision mesh 'tip.fbx' has a format that MuJoCo cannot read; convert it to one of .stl, .obj, .msh$",
    ),
    "no effort": (
        robot(joints=[WEAK, *JOINTS[1:]]),
        {},
        r"joint 'turn' has no effort above 0; give one in robot.drive_pros",
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
