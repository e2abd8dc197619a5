"""Grasps: forces of fingers, the gripper's action, steps of the end effector, and the terms about grasped objects."""

from math import tanh

import pytest
import torch
from support.checks import close
from support.mujoco_term_cases import aimed, made, placed, scene, task_state
from support.urdf_robot import robot as urdf_robot

from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import advance, with_current_sensors
from ecrl.envs.mujoco.robots.components import GRIPPER
from ecrl.envs.mujoco.scene.scene import contact_sensor
from ecrl.envs.mujoco.tasks.gripper_arm import GRIPPER_ARM
from ecrl.envs.mujoco.terms.grasping import is_grasped, is_released
from ecrl.errors import ConfigError

CUBE = {"uid": "cube", "shape": {"shape_type": "Cube", "size": [0.05, 0.05, 0.05]}, "attrs": {"mass": 0.2}}
SCENE = {"robot": GRIPPER_ARM, "rigid_object": [CUBE, CUBE | {"uid": "other", "init_pos": [0.5, 0.5, 0.025]}]}
STIFFNESS = 1000.0  # N/m, of each finger in GRIPPER_ARM
HAND = ("Manipulator/gripper_finger1_joint_1", "Manipulator/gripper_finger2_joint_1")


@pytest.fixture(scope="module")
def sim():
    return scene(SCENE)


def tool(sim, state):
    return world.site_pose(sim, state["world"], sim.robot.tcp["arm"])


def held_for(sim, state, seconds, **targets):
    """Return the state after some time, with other targets of joints than the current positions."""
    control = world.hold_controls(sim, state["world"])
    for joint, value in targets.items():
        control[..., world.actuators_of(sim, (f"Manipulator/{joint}",))] = value
    worlds = state["world"]
    for _ in range(round(seconds / sim.dt)):
        worlds, failed = advance(sim, worlds, control)
        assert not failed.any()
    return state.copy().set("world", worlds)


def closed_on_cube(sim, seconds=0.4):
    """Return the state after the gripper has closed on a cube between its fingers."""
    start = task_state(sim, (2,))
    place = tool(sim, start)[..., :3, 3]
    start = start.copy().set("world", world.with_body_pose(sim, start["world"], "cube", place))
    return held_for(sim, start, seconds, gripper_finger1_joint_1=0.04, gripper_finger2_joint_1=0.04)


def test_fingers_press_with_the_forces_of_their_drives(sim):
    held = closed_on_cube(sim)
    assert is_grasped(sim, held["world"], "cube").all() and not is_grasped(sim, held["world"], "other").any()
    height = tool(sim, held)[..., 2, 3] - world.body_position(sim, held["world"], "cube")[..., 2]
    assert (height.abs() < 0.02).all()  # the cube falls until the fingers reach it, and no further
    across = tool(sim, held)[..., :3, 0]  # the fingers move along the x axis of the hand
    for finger, joint in zip(sim.robot.fingers, HAND, strict=True):
        q = world.joint_positions(sim, held["world"], (joint,))[..., 0]
        force = world.sensor(sim, held["world"], contact_sensor(finger, "cube"))
        close((force * across).sum(-1).abs(), STIFFNESS * (0.04 - q), tol=0.2)


def test_a_cube_under_the_fingers_or_between_open_fingers_is_not_grasped(sim):
    start = task_state(sim)
    between = placed(sim, start, "cube", tool(sim, start)[:3, 3].tolist())
    assert not is_grasped(sim, held_for(sim, between, 0.04)["world"], "cube")
    flat = scene(SCENE | {"rigid_object": [CUBE | {"shape": {"shape_type": "Cube", "size": [0.2, 0.2, 0.05]}}]})
    start = task_state(flat)
    x, y, z = tool(flat, start)[:3, 3].tolist()
    under = placed(flat, start, "cube", [x, y, z - 0.03])  # the tips reach 15 mm into the slab below them
    pressed = with_current_sensors(flat, under["world"], world.hold_controls(flat, under["world"]))
    forces = [world.sensor(flat, pressed, contact_sensor(f, "cube")) for f in flat.robot.fingers]
    assert all(force.norm() > 0.5 for force in forces) and not is_grasped(flat, pressed, "cube")


def with_pads(urdf):
    """Return the text of the built-in gripper with the shapes of its fingers on links of their own."""
    for number in (1, 2):
        start = urdf.index(f'<link name="gripper_finger{number}_link">')
        shapes = slice(urdf.index("<visual>", start), urdf.index("</link>", start))
        pad = f'<link name="pad{number}">{urdf[shapes]}</link><joint name="pad{number}_joint" type="fixed">'
        pad += f'<parent link="gripper_finger{number}_link"/><child link="pad{number}"/></joint>'
        urdf = urdf[: shapes.start] + urdf[shapes.stop :].replace("</robot>", f"{pad}</robot>")
    return urdf


def test_pads_that_move_with_the_fingers_grasp():
    hand = {"component_type": "hand", "urdf_path": with_pads(GRIPPER)}
    padded = scene(SCENE | {"robot": GRIPPER_ARM | {"urdf_cfg": {"components": [hand]}}})
    held = closed_on_cube(padded)
    assert is_grasped(padded, held["world"], "cube").all() and not is_released(padded, held["world"], "cube").any()


def test_a_weak_touch_is_neither_a_grasp_nor_a_release(sim):
    """A grasp needs a force of the weight of 2 N from each finger, and a release has no force at all."""
    grasped, released = [], []
    for force in (0.0, 0.5, 1.9, 2.1):
        worlds = task_state(sim)["world"].copy()
        for finger, sign in zip(sim.robot.fingers, (1.0, -1.0), strict=True):
            i = sim.model.sensor(contact_sensor(finger, "cube")).adr[0]
            sensors = worlds["sensors"].clone()
            sensors[i] = sign * force
            worlds["sensors"] = sensors
        grasped.append(bool(is_grasped(sim, worlds, "cube")))
        released.append(bool(is_released(sim, worlds, "cube")))
    assert grasped == [False, False, False, True] and released == [True, False, False, False]


def test_the_gripper_opens_and_closes(sim):
    term, state = made("action", "GripperTerm", sim), task_state(sim, (3,), 1)
    assert term.joints == HAND and (term.low, term.high, term.drive) == ((-1.0,), (1.0,), "position")
    close(term.control(state, torch.tensor([[-1.0], [0.0], [1.0]])), [[0.04, 0.04], [0.02, 0.02], [0.0, 0.0]])
    other = made("action", "GripperTerm", sim, open_qpos=[0.01, 0.0], closed_qpos=[0.03, 0.02])
    close(other.control(state[:1], torch.tensor([[0.5]])), [[0.015, 0.005]])


@pytest.mark.parametrize(
    ("cfg", "params", "message"),
    [
        (SCENE, {"part_name": "arm"}, "params: the robot does not define how joint .* give open_qpos and closed_qpos"),
        (SCENE, {"part_name": "foot"}, "params.part_name: unknown part 'foot'"),
        (SCENE, {"open_qpos": [0.0], "closed_qpos": [0.04]}, "params.open_qpos: 1 values for 2 joints"),
        (SCENE, {"open_qpos": [0.0]}, "open_qpos and closed_qpos belong together; give both or none"),
    ],
)
def test_wrong_grippers(cfg, params, message):
    with pytest.raises(ConfigError, match=message):
        made("action", "GripperTerm", scene(cfg), **params)


def test_grasps_need_a_gripper_and_an_object_that_moves(sim):
    bare = scene({"robot": {"uid": "ur"}, "rigid_object": [CUBE]})
    with pytest.raises(ConfigError, match=r"params\.object_cfg\.uid: the robot has no gripper; add a component hand"):
        made("reward", "grasp_reward", bare, object_cfg={"uid": "cube"})
    still = scene(SCENE | {"rigid_object": [CUBE | {"body_type": "kinematic"}]})
    with pytest.raises(ConfigError, match=r"params\.object_cfg\.uid: 'cube' is not a dynamic object of the scene"):
        made("observation", "get_object_grasped", still, object_cfg={"uid": "cube"})


def test_one_moving_jaw_grasps_against_its_parent():
    """The gripper of the file has one joint that leads and one that follows; without the follower, the tool counts."""
    cfg = {"robot": {"uid": "r", "model": urdf_robot(), "control_parts": {"hand": ["grip_left"]}}}
    assert scene(cfg).robot.fingers == ("r/left", "r/right")
    lone = urdf_robot().replace('<mimic joint="grip_left" multiplier="-1.0" offset="0.01"/>', "")
    assert scene({"robot": cfg["robot"] | {"model": lone}}).robot.fingers == ("r/left", "r/tool")


def test_rewards_and_observations_of_a_grasp(sim):
    start, goal = task_state(sim, (2,)), [-0.6, -0.1, 0.3]
    held, cube = closed_on_cube(sim), {"object_cfg": {"uid": "cube"}}
    held = aimed(held, goal)
    close(made("reward", "grasp_reward", sim, **cube)(start, held), [1.0, 1.0])
    close(made("reward", "grasp_reward", sim, **cube)(held, start), [0.0, 0.0])
    close(made("observation", "get_object_grasped", sim, **cube)(held, None), [[1.0], [1.0]])
    position, eef = world.body_position(sim, held["world"], "cube"), tool(sim, held)[..., :3, 3]
    close(made("observation", "get_eef_to_object", sim, **cube)(held, None), position - eef)
    to_goal = torch.tensor(goal) - position
    close(made("observation", "get_object_to_target", sim, **cube)(held, None), to_goal)
    lift = made("reward", "grasped_object_to_target", sim, distance_scale=3.0, **cube)
    close(lift(start, held), [1.0 - tanh(3.0 * float(row.norm())) for row in to_goal])
    close(lift(held, aimed(start, goal)), [0.0, 0.0])
    near = made("reward", "object_near_target", sim, distance_scale=3.0, **cube)
    close(near(start, held), lift(start, held))
    ungrasped = torch.tensor(goal) - world.body_position(sim, start["world"], "cube")
    close(near(held, aimed(start, goal)), [1.0 - tanh(3.0 * float(row.norm())) for row in ungrasped])
    reach = made("reward", "reaching_object", sim, distance_scale=2.0, **cube)
    away = placed(sim, held, "cube", [0.3, 0.0, 0.0])
    distance = float((torch.tensor([0.3, 0.0, 0.0]) - eef[0]).norm())
    close(reach(held, away), [1.0 - tanh(2.0 * distance)] * 2)


def test_a_target_can_be_a_place_above_another_object(sim):
    state = placed(sim, task_state(sim), "cube", [0.1, 0.2, 0.3])
    params = {"object_cfg": {"uid": "cube"}, "target_cfg": {"uid": "other"}, "offset": [0.0, 0.0, 0.05]}
    close(made("observation", "get_object_to_target", sim, **params)(state, None), [0.4, 0.3, -0.225])


def test_the_end_effector_takes_small_steps_and_keeps_its_axis(sim):
    term, state = made("action", "DeltaEefPoseTerm", sim, scale=0.02), task_state(sim, (4,), 3)
    assert len(term.low) == 3 and term.joints == sim.robot.parts["arm"]
    action = torch.tensor([[1.0, 0.0, 0.0], [0.0, -0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    target = term.control(state, action)
    before = tool(sim, state)
    pose, _ = world.site_motion(sim, state["world"], sim.robot.tcp["arm"], term.joints, target)
    close(pose[..., :3, 3] - before[..., :3, 3], 0.02 * action, tol=1e-3)
    close(pose[..., :3, 2], before[..., :3, 2], tol=1e-3)
    q = world.joint_positions(sim, state["world"], term.joints)
    tilted = world.with_joint_positions(sim, state["world"], term.joints, q + torch.tensor([0.2, 0, 0, 0, 0.3, 0.5]))
    worlds, home = tilted, before[..., :3, 2]
    for _ in range(5):  # the axis returns, and the rotation about it is free
        q = term.control(state.copy().set("world", worlds), torch.zeros(4, 3))
        worlds = world.with_joint_positions(sim, worlds, term.joints, q)
    axis = world.site_pose(sim, worlds, sim.robot.tcp["arm"])[..., :3, 2]
    close(axis, home, tol=1e-3)
    turned = world.site_pose(sim, worlds, sim.robot.tcp["arm"])[..., :3, 0]
    assert ((turned * before[..., :3, 0]).sum(-1) < 0.985).all()


def test_steps_of_the_end_effector_can_turn_it(sim):
    term = made("action", "DeltaEefPoseTerm", sim, pose_dim=6, scale=0.02, rotation_scale=0.1)
    state = task_state(sim, (), 6)
    assert len(term.low) == 6
    target = term.control(state, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]))
    pose, _ = world.site_motion(sim, state["world"], sim.robot.tcp["arm"], term.joints, target)
    turn = pose[:3, :3] @ tool(sim, state)[:3, :3].mT  # by 0.1 rad about the vertical
    close(torch.atan2(turn[1, 0], turn[0, 0]), torch.tensor(0.1), tol=2e-3)
    close(pose[:3, 3], tool(sim, state)[:3, 3], tol=2e-3)
    far = made("action", "DeltaEefPoseTerm", sim, scale=100.0).control(state, torch.ones(3))
    close((far - world.joint_positions(sim, state["world"], term.joints)).abs().max(), torch.tensor(0.5))
