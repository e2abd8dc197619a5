"""Robots that users register: their files, parts, starts and grippers."""

import pytest
import torch
from support.checks import close
from support.urdf_robot import ARM_JOINTS, ARM_LINKS, HAND_JOINTS, HAND_LINKS
from support.urdf_robot import robot as urdf_robot

from ecrl import registered, registry
from ecrl.config.model import validate_section
from ecrl.envs import make_env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import simulation, start
from ecrl.envs.mujoco.robots.model import RobotModel
from ecrl.envs.mujoco.robots.robot import described, robot_function
from ecrl.envs.mujoco.scene.config import RobotConfig, SceneConfig
from ecrl.errors import ConfigError
from ecrl.registry import register_robot, user_modules

MJCF = """<mujoco><worldbody><body name="upper" pos="0 0 0.2"><joint name="turn" axis="0 0 1" range="-90 90"/>
<geom size="0.05" mass="1"/><body name="tip" pos="0.3 0 0"><geom size="0.02" mass="0.1"/></body></body></worldbody>
<actuator><position joint="turn" kp="10" kv="1"/></actuator></mujoco>"""


@pytest.fixture
def robots(monkeypatch):
    registered("env")  # imports the built-in parts first
    monkeypatch.setitem(registry._ENTRIES, "robot", dict(registry._ENTRIES["robot"]))


def scene(**robot):
    return simulation(validate_section(SceneConfig, {"robot": robot}, "scene"))


def two_links(**changes):
    @register_robot("two_links", override=True)
    def make(cfg: RobotConfig) -> RobotModel:
        parts = {"arm": ("turn", "bend"), "hand": ("grip_left",)}
        model = RobotModel(urdf_robot(), parts, {"arm": "tool"}, (0.5, 0.3, 0.0), 0.65)
        return model._replace(init_rot=(0.0, 0.0, 90.0), grip={"grip_left": (0.0, 0.04)})._replace(**changes)


def test_a_registered_robot_has_the_parts_start_and_gripper_of_its_description(robots):
    two_links()
    sim = scene(robot_type="two_links", uid="r")
    assert sim.robot.parts == {"arm": ("r/turn", "r/bend"), "hand": ("r/grip_left",)}
    assert sim.robot.grip == {"r/grip_left": (0.0, 0.04)} and sim.robot.fingers == ("r/left", "r/right")
    close(world.joint_positions(sim, start(sim, ()), sim.robot.joints), [0.5, 0.3, 0.0])
    plain = scene(robot_type="two_links", uid="r", init_rot=[0.0, 0.0, 0.0])
    turned, straight = (world.site_pose(s, start(s, ()), "r/arm_tcp")[:3, 3] for s in (sim, plain))
    close(turned, torch.stack((-straight[1], straight[0], straight[2])))  # a quarter turn about z


def test_a_new_function_for_a_name_makes_new_environments(robots):
    somewhere = {"position_range": [[0.2, 0.0, 0.5], [0.3, 0.1, 0.6]], "store_key": "target_pose"}
    reach = {"func": "randomize_target_pose", "mode": "reset", "params": somewhere}
    cfg = {"robot": {"uid": "r", "robot_type": "two_links"}, "events": {"goal": reach}}
    starts = []
    for home in ((0.5, 0.3, 0.0), (0.5, 0.4, 0.0)):
        two_links(home=home)
        env = make_env({"name": "ReachRL", "cfg": cfg})
        assert make_env({"name": "ReachRL", "cfg": cfg}) is env
        starts.append(world.joint_positions(env.scene, start(env.scene, ()), ("r/bend",)))
    close(torch.cat(starts), [0.3, 0.4])


def test_an_arm_of_urdf_cfg_replaces_the_registered_arm(robots):
    two_links(reach=0.2)
    arm = {"component_type": "arm", "urdf_path": urdf_robot(ARM_LINKS, ARM_JOINTS)}
    replaced = {"robot_type": "two_links", "urdf_cfg": {"components": [arm]}}
    cfg = validate_section(SceneConfig, {"robot": replaced}, "scene").robot
    assert described(cfg) is None and robot_function(cfg) is None
    plain = validate_section(SceneConfig, {"robot": {"robot_type": "two_links"}}, "scene").robot
    assert described(plain).reach == 0.2 and robot_function(plain) is not None


def test_a_registered_robot_can_have_an_mjcf_file(robots):
    @register_robot("one_link")
    def make(cfg: RobotConfig) -> RobotModel:
        return RobotModel(MJCF, end_links={"arm": "tip"}, home=(1.0,))

    sim = scene(robot_type="one_link", uid="r")
    assert sim.robot.joints == ("r/turn",)

    @register_robot("no_motor")
    def make_without_actuators(cfg: RobotConfig) -> RobotModel:
        return RobotModel(MJCF[: MJCF.index("<actuator>")] + "</mujoco>", end_links={"arm": "tip"}, home=(1.0,))

    with pytest.raises(ConfigError, match=r"^robot.robot_type 'no_motor': the file has no actuators, and"):
        scene(robot_type="no_motor", uid="r")
    tip = world.site_pose(sim, start(sim, ()), sim.robot.tcp["arm"])[:3, 3]
    close(tip, [0.3 * torch.cos(torch.tensor(1.0)), 0.3 * torch.sin(torch.tensor(1.0)), 0.2])


def test_tasks_scale_with_the_reach_of_a_registered_robot(robots):
    two_links()
    env = make_env({"name": "PushCubeRL", "cfg": {"robot": {"robot_type": "two_links"}}})
    close(torch.tensor(env.scene.model.geom("cube").size), torch.full((3,), 0.025))


def test_the_maker_reads_the_config(robots):
    @register_robot("turned")
    def make(cfg: RobotConfig) -> RobotModel:
        return RobotModel(urdf_robot(), home=(0.1 * cfg.init_pos[2], 0.3, 0.0))

    sim = scene(robot_type="turned", init_pos=[0.0, 0.0, 2.0])
    close(world.joint_positions(sim, start(sim, ()), sim.robot.joints)[0], torch.tensor(0.2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"home": (0.0,)}, "robot: home has 1 values for 3 joints: turn, bend, grip_left"),
        ({"parts": {"arm": ("spin",)}}, "robot: unknown joint 'spin'"),
        ({"end_links": {"arm": "foot"}}, "^robot.robot_type 'two_links', end_links: unknown 'foot'"),
        ({"source": "absent.urdf"}, "no such file 'absent.urdf'"),
        ({"source": 3}, "has a source of type int, expected a str"),
        ({"reach": 0.0}, "has the reach 0.0, expected a number above 0, in m"),
        ({"reach": float("nan")}, "has the reach nan"),
        ({"init_rot": (0.0, 1.0)}, r"has the init_rot \(0.0, 1.0\), expected 3 angles in degrees"),
        ({"init_rot": ("0", "0", "90")}, "has the init_rot .*, expected 3 angles in degrees"),
        ({"home": ("0.5", "0.3", "0")}, "has the home .*, expected a tuple of finite numbers"),
        ({"home": 0.5}, "has the home 0.5, expected a tuple of finite numbers"),
        ({"grip": {"grip_left": 0.04}}, "has the grip 0.04 of joint 'grip_left', expected its positions in the open"),
        ({"parts": {"arm": "turn"}}, "has a str as joints of the part 'arm', expected a tuple of names"),
        ({"end_links": {"leg": "tool"}}, "has an end_link of 'leg', but no such part; name one of its parts"),
        ({"grip": {"thumb": (0.0, 1.0)}}, "robot: grip has the unknown joint 'thumb'"),
    ],
)
def test_wrong_descriptions(robots, changes, message):
    two_links(**changes)
    with pytest.raises(ConfigError, match=message):
        scene(robot_type="two_links")


def test_an_arm_without_the_link_of_its_description_gets_no_hand_at_another_link(robots):
    @register_robot("bare")
    def make(cfg: RobotConfig) -> RobotModel:
        return RobotModel(urdf_robot(ARM_LINKS, ARM_JOINTS), end_links={"arm": "flang"}, reach=0.6)

    hand = {"component_type": "hand", "urdf_path": urdf_robot(HAND_LINKS, HAND_JOINTS)}
    parts = {"control_parts": {"main": ["turn"]}, "urdf_cfg": {"components": [hand]}}
    message = r"^robot.robot_type 'bare', end_links: unknown link 'flang', which should hold the hand .*mean 'flange'"
    with pytest.raises(ConfigError, match=message):
        scene(robot_type="bare", **parts)


def test_an_arm_with_a_hand_of_its_own_gets_no_other_hand(robots):
    two_links()
    hand = {"component_type": "hand", "urdf_path": "builtin:two_finger_gripper"}
    message = r"^robot.urdf_cfg.components\[0\]: the arm has a hand of its own, with the joints grip_left; remove"
    with pytest.raises(ConfigError, match=message):
        scene(robot_type="two_links", urdf_cfg={"components": [hand]})


def test_a_function_that_returns_no_description_is_refused(robots):
    @register_robot("forgotten")
    def make(cfg: RobotConfig) -> RobotModel:
        return None  # pyright: ignore[reportReturnType]

    with pytest.raises(ConfigError, match="'forgotten' is a NoneType, expected a RobotModel"):
        scene(robot_type="forgotten")


def test_the_name_of_a_built_in_robot_is_refused(robots):
    @register_robot("URRobot")
    def make(cfg: RobotConfig) -> RobotModel:
        return RobotModel(urdf_robot())

    with pytest.raises(ConfigError, match="'URRobot' is built in; register your robot under another name"):
        scene(robot_type="URRobot", uid="mine")


def test_an_unknown_robot_is_refused_with_all_names(robots):
    two_links()
    with pytest.raises(ConfigError, match=r"robot\.robot_type: unknown 'two_link'; did you mean 'two_links'\?"):
        scene(robot_type="two_link")


def test_other_processes_import_the_module_of_a_robot(robots):
    two_links()
    assert user_modules('{"robot_type": "two_links"}') == [__name__]
