"""Scenes from JSON: what every key does, the arm at home, EmbodiChain's keys, MJCF files, faults by name."""

import copy

import pytest

pytest.importorskip("mujoco.batch")

import mujoco
import numpy as np

from ecrl.config.embodichain import inert_keys_in
from ecrl.config.model import validate_section
from ecrl.envs.mujoco.physics.simulation import simulation
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.mujoco.scene.scene import build
from ecrl.errors import ConfigError

CUBE = {"uid": "cube", "shape": {"shape_type": "Cube", "size": [0.1, 0.2, 0.3]}, "init_pos": [-0.6, -0.4, 0.15]}
TCP = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0.2], [0, 0, 0, 1]]
TCP = [[float(x) for x in row] for row in TCP]
ARM = """<mujoco><compiler angle="degree"/><worldbody><body name="link"><joint name="hip" axis="0 1 0" range="-90 45"/>
<geom type="capsule" size=".05" fromto="0 0 0 .5 0 0"/>
<body name="hand" pos=".5 0 0"><joint name="out" type="slide" axis="1 0 0"/>
<geom size=".05"/></body></body></worldbody>%s</mujoco>"""
MOTOR = '<actuator><motor name="push" joint="hip"/></actuator>'
DRIVES = {"stiffness": 100.0, "damping": [10.0, 20.0], "max_effort": {"hip": 5.0, "out": 6.0}}
SCENE = """<mujoco><option timestep="0.003" iterations="7" integrator="Euler"/><worldbody>
<body name="cart"><joint name="slide" type="slide" axis="1 0 0"/><geom size=".1"/></body></worldbody>
<actuator><position name="drive" joint="slide" kp="3"/></actuator>
<keyframe><key name="there" qpos="0.5" ctrl="0.7"/></keyframe></mujoco>"""


def scene(**keys):
    return validate_section(SceneConfig, keys, "scene")


def made(**keys):
    return build(scene(**keys))


def test_the_arm_stands_at_home_clear_of_the_cube_and_stays_there():
    s = made(robot={"uid": "ur"}, rigid_object=[CUBE])
    m, data = s.model, s.data
    assert (m.nq, m.nv, m.nu, m.nsensordata) == (13, 12, 6, 6)
    assert [name.removeprefix("ur/") for name in s.robot.joints] == [
        f"{part}_joint" for part in ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
    ]
    mujoco.mj_forward(m, data)
    tcp = data.site(s.robot.tcp["arm"])
    # at -90, 90, -90, -90 degrees: x = a3 - d5, y = -d4, z = d1 - a2 - d6 - 0.16, the tool down
    assert np.allclose(tcp.xpos, [-0.5723 - 0.1157, -0.163941, 0.1273 + 0.612 - 0.0922 - 0.16], atol=2e-3)
    assert np.allclose(tcp.xmat.reshape(3, 3)[:, 2], [0, 0, -1], atol=2e-3)
    assert tcp.xpos[2] > 0.4
    assert {tuple(sorted((m.geom(c.geom1).name, m.geom(c.geom2).name))) for c in data.contact} == {("cube", "floor")}
    for _ in range(300):
        mujoco.mj_step(m, data)
    assert np.allclose(data.qpos[:6], [0.0, -1.57, 1.57, -1.57, -1.57, 0.0], atol=1e-6)
    assert np.allclose(data.body("cube").xpos, [-0.6, -0.4, 0.15], atol=1e-3)


def test_the_arm_follows_its_targets_within_its_limits():
    s = made(robot={})
    m, data = s.model, s.data
    goal = np.array([0.5, -1.2, 1.2, -1.8, -1.0, 1.0])
    data.ctrl[:] = goal
    for _ in range(150):
        mujoco.mj_step(m, data)
        assert (np.abs(data.actuator_force) <= [330.0, 330.0, 150.0, 56.0, 56.0, 56.0]).all()
    assert np.allclose(data.qpos, goal, atol=2e-3)
    data.ctrl[:] = 100.0
    for _ in range(600):
        mujoco.mj_step(m, data)
    assert (data.qpos < [6.4, 6.4, 3.3, 6.4, 6.4, 6.4]).all()


def test_embodichains_drives_hold_the_arm_too():
    drive = {"stiffness": 1e5, "damping": 1e3, "max_effort": 500.0}
    s = made(robot={"drive_pros": drive, "init_qpos": [0.1, -1.57, 1.57, -1.57, -1.57, 0.0]})
    for _ in range(200):
        mujoco.mj_step(s.model, s.data)
    assert np.allclose(s.data.qpos, [0.1, -1.57, 1.57, -1.57, -1.57, 0.0], atol=1e-6)


ROBOT = {"uid": "r", "robot_type": "CartPole"}
CHANGES = [  # every key: a scene, and the same with one thing changed
    ({}, {"mjcf": SCENE}),
    ({"mjcf": SCENE}, {"mjcf": SCENE, "keyframe": "there"}),
    ({}, {"robot": ROBOT}),
    ({"robot": ROBOT}, {"robot": ROBOT | {"uid": "s"}}),
    ({"robot": ROBOT}, {"robot": ROBOT | {"robot_type": "URRobot"}}),
    ({"robot": ROBOT}, {"robot": ROBOT | {"model": ARM % MOTOR}}),
    ({"robot": ROBOT}, {"robot": ROBOT | {"init_pos": [0.0, 0.0, 1.0]}}),
    ({"robot": ROBOT}, {"robot": ROBOT | {"init_rot": [0.0, 0.0, 90.0]}}),
    ({"robot": ROBOT}, {"robot": ROBOT | {"init_qpos": [0.1, 0.0]}}),
    ({"robot": ROBOT}, {"robot": ROBOT | {"solver_cfg": {"arm": {"tcp": TCP}}}}),
    *(
        ({"robot": ROBOT}, {"robot": ROBOT | {"drive_pros": {key: 3.0}}})
        for key in ("stiffness", "damping", "max_effort")
    ),
    ({}, {"rigid_object": [CUBE]}),
    ({}, {"background": [CUBE]}),
    ({}, {"light": {"direction": [1.0, 0.0, -1.0]}}),
    ({}, {"light": {"color": [1.0, 0.0, 1.0]}}),
    ({}, {"light": {"ambient": [1.0, 0.0, 1.0]}}),
    ({}, {"physics": {"dt": 0.002}}),
    ({}, {"physics": {"iterations": 3}}),
    ({}, {"physics": {"threads": 3}}),
    *(
        ({"rigid_object": [CUBE]}, {"rigid_object": [CUBE | change]})
        for change in (
            {"uid": "box"},
            {"init_pos": [0.0, 0.0, 0.2]},
            {"init_rot": [0.0, 0.0, 45.0]},
            {"body_type": "kinematic"},
            {"body_type": "static"},
            {"color": [0.0, 0.0, 1.0, 1.0]},
            {"shape": {"shape_type": "Cube", "size": [0.1, 0.1, 0.1]}},
            {"shape": {"shape_type": "Sphere", "radius": 0.1}},
            {"shape": {"shape_type": "Cylinder", "radius": 0.1, "height": 0.3}},
            {"attrs": {"mass": 2.0}},
            {"attrs": {"static_friction": 0.7}},
            {"attrs": {"linear_damping": 0.2}},
            {"attrs": {"angular_damping": 0.2}},
            {"attrs": {"has_gravity": False}},
        )
    ),
]


@pytest.mark.parametrize("pair", CHANGES, ids=str)
def test_every_key_changes_the_simulation(pair):
    a, b = (simulation(scene(**keys)) for keys in pair)
    assert a.handle != b.handle or not np.array_equal(a.row, b.row)
    assert simulation(scene(**copy.deepcopy(pair[1]))) is b


def test_steps_per_control_set_the_length_of_a_step():
    assert simulation(scene()).dt == pytest.approx(0.04)
    assert simulation(scene(sim_steps_per_control=10, physics={"dt": 0.002})).dt == pytest.approx(0.02)


def test_objects_are_what_they_say():
    objects = [
        CUBE | {"attrs": {"mass": 3.0, "static_friction": 0.8, "linear_damping": 2.0, "angular_damping": 0.5}},
        {"uid": "ball", "shape": {"shape_type": "Sphere", "radius": 0.05}, "init_pos": [1.0, 0.0, 0.05]},
        {"uid": "can", "shape": {"shape_type": "Cylinder", "radius": 0.05, "height": 0.3}, "body_type": "static"},
        CUBE | {"uid": "hand", "body_type": "kinematic", "init_rot": [0.0, 0.0, 90.0]},
    ]
    m = made(rigid_object=objects[:2], background=objects[2:]).model
    assert m.geom("cube").size.tolist() == [0.05, 0.1, 0.15] and m.geom("can").size[:2].tolist() == [0.05, 0.15]
    assert m.body("cube").mass[0] == 3.0 and m.geom("cube").friction[0] == 0.8
    inertia = 3.0 / 12.0 * np.array([0.2**2 + 0.3**2, 0.1**2 + 0.3**2, 0.1**2 + 0.2**2])  # of a box
    assert np.allclose(m.body("cube").inertia, inertia)
    assert np.allclose(m.dof_damping[:6], [6.0, 6.0, 6.0, *(0.5 * inertia)])
    assert m.nmocap == 1 and m.body("hand").mocapid[0] == 0 and m.body("can").dofnum[0] == 0
    assert np.allclose(m.body("hand").quat, [np.sqrt(0.5), 0.0, 0.0, np.sqrt(0.5)])


def test_angles_turn_about_x_and_then_what_is_turned_with_it():
    m = made(rigid_object=[CUBE | {"init_rot": [90.0, 0.0, 90.0]}]).model
    out = np.zeros(3)
    mujoco.mju_rotVecQuat(out, np.array([0.0, 1.0, 0.0]), m.body("cube").quat)
    assert np.allclose(out, [-1.0, 0.0, 0.0])  # its z points to -y of the world, about which its y, at z, goes to -x


def test_objects_of_the_background_do_not_move():
    assert made(background=[CUBE]).model.body("cube").dofnum[0] == 0
    assert made(background=[CUBE | {"body_type": "dynamic"}]).model.body("cube").dofnum[0] == 6
    assert made(rigid_object=[CUBE]).model.body("cube").dofnum[0] == 6


def test_friction_is_the_objects_and_holds_until_mu_m_g():
    attrs = {"mass": 2.0, "static_friction": 0.6, "linear_damping": 0.0}
    flat = {"shape": {"shape_type": "Cube", "size": [0.3, 0.3, 0.1]}, "init_pos": [0.0, 0.0, 0.05]}
    s = made(rigid_object=[CUBE | flat | {"attrs": attrs}])
    moved = []
    for share in (0.8, 1.2):
        data = copy.copy(s.data)
        data.qfrc_applied[0] = share * 0.6 * 2.0 * 9.81
        for _ in range(100):
            mujoco.mj_step(s.model, data)
        moved.append(data.qpos[0])
    assert moved[0] < 0.02 and moved[1] == pytest.approx(0.5 * 0.2 * 0.6 * 9.81, rel=0.1)  # s = a t^2 / 2


def test_an_object_without_gravity_floats():
    attrs, height = {"mass": 2.0, "linear_damping": 0.0}, []
    for has_gravity in (True, False):
        s = made(rigid_object=[CUBE | {"init_pos": [0.0, 0.0, 3.0], "attrs": attrs | {"has_gravity": has_gravity}}])
        data = copy.copy(s.data)
        for _ in range(50):
            mujoco.mj_step(s.model, data)
        height.append(data.qpos[2])
    fallen = 0.5 * 9.81 * (50 * s.model.opt.timestep) ** 2
    assert height == [pytest.approx(3.0 - fallen, rel=0.02), 3.0]


def test_a_scene_from_a_file_keeps_its_own_physics(tmp_path):
    (tmp_path / "scene.xml").write_text(SCENE)
    for source in (SCENE, str(tmp_path / "scene.xml")):
        s = made(mjcf=source, rigid_object=[CUBE])
        option = s.model.opt
        assert (option.timestep, option.iterations, option.integrator) == (0.003, 7, 0)
        assert s.robot.joints == ("slide",) and s.model.nsensordata == 1 and s.model.body("cube").id == 2
    assert made(mjcf=SCENE, physics={"dt": 0.001, "iterations": 9}).model.opt.iterations == 9
    s = made(mjcf=SCENE, keyframe="there")
    assert s.data.qpos[0] == 0.5 and s.data.ctrl[0] == 0.7
    bent = (
        ARM.replace('axis="1 0 0"/>', 'axis="1 0 0" ref="0.2"/>')
        % '<actuator><position joint="out" kp="9"/></actuator>'
    )
    for robot, qpos in (({}, [0.0, -1.57, 1.57, -1.57, -1.57, 0.0]), ({"model": bent}, [0.0, 0.2])):
        s = made(mjcf=SCENE, keyframe="there", robot=robot)  # the robot is held, the rest is the keyframe's
        assert s.data.qpos.tolist() == [0.5, *qpos] and s.data.ctrl.tolist() == [0.7, *qpos[-s.model.nu + 1 :]]


def test_a_robot_from_a_file_keeps_its_actuators_or_gets_drives(tmp_path, monkeypatch):
    (tmp_path / "arm.xml").write_text(ARM % MOTOR)
    monkeypatch.setenv("MENAGERIE_ROOT", str(tmp_path))
    s = made(robot={"uid": "r", "model": "arm.xml", "solver_cfg": {"arm": {"tcp": TCP}}})
    assert s.robot[:4] == (("r/hip", "r/out"), {"arm": ("r/hip", "r/out")}, {"arm": "r/arm_tcp"}, ())
    assert s.model.actuator(0).name == "r/push" and s.model.actuator_biastype[0] == 0
    assert np.allclose(s.model.joint("r/hip").range, np.radians([-90, 45]))
    assert s.model.site("r/arm_tcp").pos.tolist() == [0.0, 0.0, 0.2]
    s = made(robot={"uid": "r", "model": ARM % MOTOR, "drive_pros": DRIVES, "init_qpos": [0.1, 0.2]})
    assert [s.model.actuator(i).name for i in range(s.model.nu)] == ["r/hip", "r/out"]
    assert s.model.actuator_biasprm[:, 1:3].tolist() == [[-100.0, -10.0], [-100.0, -20.0]]
    assert s.model.actuator_forcerange[:, 1].tolist() == [5.0, 6.0]
    assert s.data.qpos.tolist() == [0.1, 0.2] == s.data.ctrl.tolist()
    patterns = {"stiffness": {"h.*": 100.0, "OUT": 100.0}, "damping": 1.0, "max_effort": {".*": 5.0}}
    s = made(robot={"uid": "r", "model": ARM % MOTOR, "drive_pros": patterns})
    assert s.model.actuator_gainprm[:, 0].tolist() == [100.0, 100.0]
    assert s.model.actuator_forcerange[:, 1].tolist() == [5.0, 5.0]


def test_a_robot_may_start_at_the_limit_of_its_file():
    assert made(robot={"model": ARM % MOTOR, "init_qpos": [0.785398163, 9.0]}).data.qpos[0] == 0.785398163
    assert made(robot={"init_qpos": [0.0, -6.2831855, 3.1415927, 0.0, 0.0, 0.0]}).data.qpos[2] == 3.1415927


def test_a_file_may_have_the_sensor_of_a_drive_itself():
    file = ARM % (MOTOR + HOLDER % "jointactuatorfrc")
    m = made(robot={"uid": "r", "model": file}).model
    assert [m.sensor(i).name for i in range(m.nsensor)] == ["r/hip_force", "r/out_force"]
    m = made(mjcf=file).model
    assert [m.sensor(i).name for i in range(m.nsensor)] == ["hip_force"]


def test_a_light_of_the_config_replaces_all_others():
    lit = ARM.replace("<worldbody>", '<worldbody><light name="one"/><light name="two"/>') % MOTOR
    for settings, colors in (
        ({"mjcf": lit}, [[0.7] * 3] * 2),  # MuJoCo's own
        ({"mjcf": lit, "light": {"color": [1.0, 0.0, 0.5]}}, [[1.0, 0.0, 0.5]]),
        ({"robot": {"model": lit}}, [[0.7] * 3]),
        ({"robot": {"model": lit}, "light": {"color": [1.0, 0.0, 0.5]}}, [[1.0, 0.0, 0.5]]),
    ):
        assert np.allclose(made(**settings).model.light_diffuse, colors)


def test_joints_of_a_scenes_file_are_the_driven_hinges_and_slides():
    loose = '<body name="ball" pos="0 2 0"><joint name="round" type="ball"/><geom size=".1"/></body>'
    motors = '<motor joint="round"/><motor joint="out"/><motor joint="hip"/>'
    file = ARM.replace("</worldbody>", f"{loose}</worldbody>") % f"<actuator>{motors}</actuator>"
    assert made(mjcf=file).robot.joints == ("out", "hip")  # in the order of their drives


def test_drives_take_positions_velocities_or_forces():
    kinds = {"slider_to_cart": "velocity", "cart_to_pole": "force"}
    s = build(scene(robot=ROBOT | {"init_pos": [0.0, 0.0, 1.0], "drive_pros": {"damping": 50.0}}), kinds)
    m = s.model
    assert m.actuator_gainprm[:, 0].tolist() == [50.0, 1.0] and m.actuator_biasprm[:, 2].tolist() == [-50.0, 0.0]
    m.opt.gravity[:] = 0.0
    s.data.ctrl[:] = [0.5, 0.05]
    for _ in range(50):
        mujoco.mj_step(m, s.data)
    assert s.data.joint("r/slider_to_cart").qvel[0] == pytest.approx(0.5, abs=0.02)
    assert s.data.actuator_force[1] == pytest.approx(0.05)
    with pytest.raises(ConfigError, match="actions: the robot has no joint 'slider'; did you mean 'slider_to_cart'"):
        build(scene(robot=ROBOT), {"slider": "force"})


GYM = {
    "robot": {
        "robot_type": "URRobot",
        "uid": "Manipulator",
        "urdf_cfg": {"components": []},
        "drive_pros": {"drive_type": "force", "stiffness": 1e5, "max_velocity": 2.0},
        "solver_cfg": {"arm": {"tcp": TCP, "class_type": "x"}},
    },
    "rigid_object": [CUBE | {"attrs": {"mass": 2.0, "dynamic_friction": 0.8, "restitution": 0.1}}],
    "rigid_object_group": [],
}


def test_keys_of_other_simulators_are_listed_with_a_reason():
    keys = inert_keys_in(SceneConfig, GYM)
    assert [path for path, _ in keys] == [
        ("rigid_object_group",),
        ("robot", "drive_pros", "drive_type"),
        ("robot", "solver_cfg", "arm", "class_type"),
        ("rigid_object", 0, "attrs", "dynamic_friction"),
        ("rigid_object", 0, "attrs", "restitution"),
    ]
    assert all(len(why) > 10 for _, why in keys)
    remaining = copy.deepcopy(GYM)
    for path, _ in keys:
        part = remaining
        for key in path[:-1]:
            part = part[key]
        del part[path[-1]]
    assert build(validate_section(SceneConfig, remaining, "gym")).robot.tcp == {"arm": "Manipulator/arm_tcp"}
    assert inert_keys_in(SceneConfig, {"robot": None, "rigid_object": 3, "light": []}) == []


HOLDER = '<sensor><%s name="hip_force" joint="hip"/></sensor>'
LOOSE = ARM.replace('<joint name="hip" axis="0 1 0" range="-90 45"/>', "<freejoint/>")
SITED = ARM.replace('<geom size=".05"/>', '<geom size=".05"/><site name="arm_tcp"/>')
SKEWED = [*TCP[:3], [0.0, 0.0, 0.1, 1.0]]
FAULTS = [
    ({"mjcf": "nowhere.xml"}, "mjcf: no such file 'nowhere.xml'"),
    ({"mjcf": "<mujoco><bodi/></mujoco>"}, "mjcf: .*bodi"),
    ({"mjcf": SCENE, "keyframe": "ther"}, "keyframe: unknown 'ther'; did you mean 'there'"),
    ({"robot": {"robot_type": "URobot"}}, "robot.robot_type: unknown 'URobot'; did you mean 'URRobot'"),
    ({"robot": {"init_qpos": [0.0, 1.0]}}, "robot.init_qpos: 2 values for 6 joints"),
    ({"robot": {"init_qpos": []}}, "robot.init_qpos: 0 values for 6 joints"),
    ({"robot": {"init_qpos": [0.0] * 8}}, "robot.init_qpos: 8 values for 6 joints: shoulder_pan_joint, "),
    ({"robot": {"drive_pros": {"damping": [1.0] * 7}}}, "robot.drive_pros.damping: 7 values for 6 joints: shoulder"),
    ({"robot": {"drive_pros": {"damping": [1.0]}}}, "robot.drive_pros.damping: 1 values for 6 joints: shoulder_pan"),
    ({"robot": {"drive_pros": {"damping": {"elbo": 1.0}}}}, "robot.drive_pros.damping: unknown joint 'elbo'"),
    ({"robot": {"control_parts": {"arm": ["x"]}}}, "robot.control_parts.arm: unknown joint 'x'"),
    ({"robot": {"solver_cfg": {"hand": {"tcp": TCP}}}}, "robot.solver_cfg: unknown part 'hand'"),
    ({"robot": {"solver_cfg": {"arm": {"tcp": [TCP[0]] * 4}}}}, "robot.solver_cfg.arm.tcp: the first three rows"),
    (
        {"robot": {"init_qpos": [0.0, 0.0, 3.2, 0.0, 0.0, 0.0]}},
        "robot.init_qpos: 3.2 of joint 'robot/elbow_joint' is bey",
    ),
    (
        {"robot": {"model": ARM % MOTOR, "init_qpos": [-1.6, 0.0]}},
        "robot.init_qpos: -1.6 of joint 'robot/hip' is beyond its limits, -1.5708 to 0.785398; start within the limits",
    ),
    (
        {"robot": {"control_parts": {"arm": ["elbow_joint", "wrist_1_joint", "elbow_joint"]}}},
        "robot.control_parts.arm: names joint 'elbow_joint' twice; name the joint once",
    ),
    (
        {"robot": {"solver_cfg": {"arm": {"tcp": SKEWED}}}},
        r"robot.solver_cfg.arm.tcp: the last row is \[0.0, 0.0, 0.1,",
    ),
    ({"robot": {"drive_pros": {"max_effort": {"elbow_joint": 0.0}}}}, "max_effort: 0.0 of joint 'elbow_joint', expec"),
    (
        {"robot": {"model": LOOSE % MOTOR}},
        "robot.model: body '.*' has a free joint, but the robot's base is fixed",
    ),
    (
        {"robot": {"model": ARM % (MOTOR + HOLDER % "jointpos")}},
        "robot.model: sensor 'hip_force' is not a jointactuatorfrc sensor of joint 'hip' without .*; rename the sensor",
    ),
    (
        {"mjcf": ARM % (MOTOR + (HOLDER % "jointactuatorfrc").replace("/>", ' cutoff="1"/>'))},
        "^mjcf: sensor 'hip_force' is not a jointactuatorfrc sensor of joint 'hip' without cutoff; rename the sensor",
    ),
    (
        {"robot": {"model": SITED % MOTOR, "solver_cfg": {"arm": {"tcp": TCP}}}},
        "robot.model: the file has a site 'arm_tcp', the name of the end effector; rename the site",
    ),
    (
        {"robot": {"model": ARM % ""}},
        "robot.model: the file has no actuators, and robot.drive_pros is not set; give stiffness, damping, max_effort",
    ),
    (
        {"robot": {"model": ARM % MOTOR, "drive_pros": {"damping": 1.0}}},
        "robot.drive_pros: has damping, but no stiffness and no max_effort; give all three, or none to use",
    ),
    ({"rigid_object": [CUBE | {"color": [255.0, 0.0, 0.0, 1.0]}]}, r"rigid_object\[0\].color\[0\]: .* 255"),
    ({"light": {"color": [0.0, 0.0, 9.0]}}, r"light.color\[2\]: .* 9"),
    ({"light": {"ambient": [-1.0, 0.0, 0.0]}}, r"light.ambient\[0\]: .* -1"),
    ({"light": {"direction": [0.0, 0.0, 0.0]}}, "light: direction is 0; give the direction in which the light shines"),
    (
        {"rigid_object": [CUBE | {"uid": "a\0b"}]},
        r"rigid_object\[0\].uid: not allowed, got 'a.x00b'; .*without NUL",
    ),
    ({"rigid_object": [CUBE, CUBE]}, "scene: .*repeated name 'cube'"),
    (
        {"rigid_object": [CUBE | {"shape": {"shape_type": "Cube", "radius": 1.0}}]},
        "Cube needs exactly size, got radius",
    ),
    ({"rigid_object": [CUBE | {"attrs": {"masss": 1.0}}]}, r"rigid_object\[0\].attrs.masss: unknown key; did you mean"),
]


@pytest.mark.parametrize("keys, message", FAULTS, ids=[message for _, message in FAULTS])
def test_a_fault_is_reported_with_its_key(keys, message):
    with pytest.raises(ConfigError, match=message) as raised:
        made(**keys)
    assert "\n" not in str(raised.value)


def test_frequency_of_control_stands_for_steps_per_control():
    from ecrl.envs.mujoco.physics.simulation import simulation

    assert simulation(validate_section(SceneConfig, {}, "x")).substeps == 4
    assert simulation(validate_section(SceneConfig, {"target_control_frequency": 50.0}, "x")).substeps == 2
    dt = {"physics": {"dt": 0.002}}
    assert simulation(validate_section(SceneConfig, {"target_control_frequency": 50.0} | dt, "x")).substeps == 10
    with pytest.raises(ConfigError, match=r"a step at 30.0 Hz takes 3.33333 physics steps of 0.01 s"):
        simulation(validate_section(SceneConfig, {"target_control_frequency": 30.0}, "x"))
    with pytest.raises(ConfigError, match="set the same quantity; keep one"):
        validate_section(SceneConfig, {"target_control_frequency": 50.0, "sim_steps_per_control": 2}, "x")
