"""EmbodiChain's functors: further observations, actions and events by hand, and advice for those that are absent."""

from math import pi

import pytest
import torch
from support import urdf_robot
from support.checks import assert_pure, close

pytest.importorskip("mujoco.batch")

from support.fake_mujoco_task import SCENE, cube, happening, keys_of, task
from support.small_runs import same
from tensordict import TensorDict

from ecrl import rng
from ecrl.config import config_from_dict
from ecrl.config.model import validate_section
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import advance, simulation, start
from ecrl.envs.mujoco.robots import kinematics
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.mujoco.terms.embodichain_names import ABSENT
from ecrl.errors import ConfigError
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.registry import lookup, registered
from ecrl.run.checkpoint import load, save

pytestmark = pytest.mark.usefixtures("mujoco_test_terms")
CUBE = {"entity_cfg": {"uid": "cube"}}
ARM_PART = {"component_type": "arm", "urdf_path": urdf_robot.robot(urdf_robot.ARM_LINKS, urdf_robot.ARM_JOINTS)}
HAND_PART = {"component_type": "hand", "urdf_path": urdf_robot.robot(urdf_robot.HAND_LINKS, urdf_robot.HAND_JOINTS)}


def scene_of(**changes):
    return simulation(validate_section(SceneConfig, SCENE | changes, "scene"))


def term(kind, func, sim, **params):
    entry = lookup(kind, func)
    return entry.make(validate_section(entry.config, params, "params"), sim)


def state_in(sim, batch=(3,)):
    return TensorDict({"world": start(sim, batch)}, batch)


# observations


@pytest.mark.parametrize("func", ["get_object_pose", "get_rigid_object_pose"])
def test_a_pose_as_a_position_and_a_quaternion(func):
    sim, half = scene_of(), 0.5**0.5
    turned = world.with_body_pose(sim, start(sim, (2,)), "cube", torch.ones(3), torch.tensor([-half, 0.0, half, 0.0]))
    entry = assert_pure(
        term("observation", func, sim, **CUBE, to_matrix=False), TensorDict({"world": turned}, (2,)), None
    )
    close(entry, [[1.0, 1.0, 1.0, half, 0.0, -half, 0.0]] * 2, 1e-6)
    assert term("observation", func, sim, **CUBE)(TensorDict({"world": turned}, (2,)), None).shape == (2, 4, 4)


def test_the_quaternion_of_any_rotation():
    u = rng.uniform(rng.split(rng.key(0), 500), (4,)) * 2.0 - 1.0
    half_turns = torch.cat((torch.zeros(4, 1), torch.cat((torch.eye(3), torch.tensor([[0.6, -0.8, 0.0]])))), -1)
    for q in (u / u.norm(dim=-1, keepdim=True), half_turns):
        back = kinematics.quaternion_of(kinematics.pose(None, q))
        close((back * q).sum(-1).abs(), torch.ones(len(q)), 1e-6)
        assert (back[:, 0] >= 0.0).all()
    leaf = u.clone().requires_grad_()
    kinematics.quaternion_of(kinematics.pose(None, leaf)).sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()


def test_the_base_and_a_link_of_the_robot_have_poses():
    sim = scene_of(mjcf=None, robot={"uid": "ur", "init_pos": [0.1, 0.2, 0.3]})
    base = term("observation", "get_object_pose", sim, entity_cfg={"uid": "ur"}, position_only=True)
    close(base(state_in(sim), None), [[0.1, 0.2, 0.3]] * 3, 1e-6)
    link = term("observation", "get_object_pose", sim, entity_cfg={"uid": "ur/elbow_link"})
    close(link(state_in(sim), None), world.body_pose(sim, start(sim, (3,)), "ur/elbow_link"), 0.0)


def test_physics_attributes_are_the_drawn_ones():
    """[damping rate, friction, inertia, mass]: 2 kg and edges of 0.1 m give 2 * 0.01 / 6, and the event scales it."""
    objects = [cube("cube", [0.0, 0.0, 5.0], attrs={"mass": 2.0, "static_friction": 0.5, "linear_damping": 1.5})]
    plain = scene_of(rigid_object=objects)
    inertia = 2.0 * 0.01 / 6.0
    entry = term("observation", "get_rigid_object_physics_attributes", plain, **CUBE)
    close(entry(state_in(plain), None), [[1.5, 0.5, *[inertia] * 3, 2.0]] * 3, 1e-6)
    attributes = {"it": {"func": "get_rigid_object_physics_attributes", "name": "a", "params": CUBE}}
    scales = {"it": {"func": "get_object_body_scale", "name": "b", "params": CUBE}}
    events = {
        "a": happening("randomize_rigid_object_mass", **CUBE, mass_range=[1.0, 3.0]),
        "b": happening("randomize_rigid_object_scale", **CUBE, scale_factor_range=[[0.5], [2.0]]),
        "c": happening("randomize_rigid_object_friction", **CUBE, friction_range=[0.1, 0.9]),
    }
    observed = {"x": attributes["it"], "y": scales["it"]}
    env = task(rigid_object=objects, events=events, observations=observed, observe_joints=False)
    obs = env.reset(keys_of(5))["obs"]
    damping, friction, inertias, mass, factor = obs.split((1, 1, 3, 1, 3), -1)
    assert all(len(x[:, 0].unique()) == 5 for x in (friction, mass, factor))
    close(damping, torch.full((5, 1), 1.5), 1e-5)
    close(inertias, mass * (0.1 * factor) ** 2 / 6.0, 1e-5)
    assert ((factor >= 0.5) & (factor <= 2.0)).all() and torch.equal(factor[:, 0], factor[:, 2])


# actions


def hand_scene():
    parts = {"uid": "arm", "urdf_cfg": {"components": [ARM_PART, HAND_PART]}, "solver_cfg": {"arm": {}}}
    return scene_of(mjcf=None, robot=parts)


def test_one_action_moves_all_fingers():
    sim = hand_scene()
    gripper = term("action", "JointPositionGripperTerm", sim)
    arm, hand = sim.robot.parts["arm"], sim.robot.parts["hand"]
    assert gripper.joints == (*arm, *hand) and gripper.drive == "position"
    assert len(gripper.low) == len(arm) + 1 and gripper.low[-1] == -1.0 and gripper.high[-1] == 1.0
    low, high = (torch.tensor(x) for x in world.joint_limits(sim, hand))
    for value, expected in ((-1.0, low), (1.0, high), (0.0, 0.5 * (low + high))):
        action = torch.full((3, len(arm) + 1), 0.25)
        action[:, -1] = value
        control = assert_pure(gripper.control, state_in(sim), action)
        close(control[:, : len(arm)], torch.full((3, len(arm)), 0.25), 1e-6)
        close(control[:, len(arm) :], expected.expand(3, len(hand)), 1e-6)


def test_the_fingers_reach_their_target_in_physics():
    sim = hand_scene()
    gripper, hand = term("action", "JointPositionGripperTerm", sim), sim.robot.parts["hand"]
    state, (low, high) = start(sim, (1,)), (torch.tensor(x) for x in world.joint_limits(sim, hand))
    home = world.joint_positions(sim, state, sim.robot.parts["arm"])
    action = torch.cat((home, torch.full((1, 1), 0.5)), -1)
    for _ in range(100):
        control = gripper.control(TensorDict({"world": state}, (1,)), action)
        controls = world.hold_controls(sim, state)
        columns = list(controls.unbind(-1))
        for actuator, value in zip(world.actuators_of(sim, gripper.joints), control.unbind(-1), strict=True):
            columns[actuator] = value
        state, _ = advance(sim, state, torch.stack(columns, -1))
    close(world.joint_positions(sim, state, hand), (low + 0.75 * (high - low)).unsqueeze(0), 0.02)


def test_a_pose_with_fingers_is_the_pose_and_the_fingers():
    sim = hand_scene()
    both, pose = term("action", "EefPoseGripperTerm", sim), term("action", "EefPoseTerm", sim, pose_dim=6)
    assert both.low == (*pose.low, -1.0) and len(both.low) == 7
    action = rng.uniform(keys_of(3), (7,))
    control = both.control(state_in(sim), action)
    arm = len(sim.robot.parts["arm"])
    close(control[:, :arm], pose.control(state_in(sim), action[:, :6]), 1e-6)
    close(control[:, arm:], term("action", "JointPositionGripperTerm", sim).control(
        state_in(sim), torch.cat((torch.zeros(3, arm), action[:, 6:]), -1))[:, arm:], 1e-6)  # fmt: skip


def test_a_default_posture_with_offsets():
    sim = scene_of(mjcf=None, robot={"uid": "ur"})
    home = torch.tensor(sim.home.qpos[:6]).float()
    plain = term("action", "DefaultJointPositionTerm", sim, scale=0.5)
    action = torch.full((3, 6), 0.2)
    close(plain.control(state_in(sim), action), (home + 0.1).expand(3, 6), 1e-6)
    assert plain.high == (1.0,) * 6
    names = ["elbow_joint", "shoulder_pan_joint"]
    some = term(
        "action", "DefaultJointPositionTerm", sim, joint_names=names, offset=[1.0, -1.0], scale=[1.0, 2.0], clip=3.0
    )
    assert some.joints == ("ur/elbow_joint", "ur/shoulder_pan_joint") and some.low == (-3.0, -3.0)
    close(some.control(state_in(sim), action[:, :2]), [[1.2, -0.6]] * 3, 1e-6)
    far = torch.tensor([[5.0, -5.0]] * 3)
    close(some.control(state_in(sim), far), [[4.0, -7.0]] * 3, 1e-6)
    free = term("action", "DefaultJointPositionTerm", sim, joint_names=names, offset=0.0)
    assert free.high == (1.0, 1.0)
    close(free.control(state_in(sim), far), far, 1e-6)
    for params, message in (
        ({"joint_names": ["elbow"]}, "params.joint_names: unknown joint 'elbow'; did you mean 'elbow_joint'"),
        ({"offset": [1.0]}, "params.offset: 1 values for 6 joints"),
        ({"joint_names": names, "joint_ids": [0]}, "both select joints; keep one"),
        ({"joint_names": names[:1] * 2}, "params.joint_names: names joint 'elbow_joint' twice; name each joint once"),
        ({"clip": 0.0}, "params: clip: must be above 0.0, got 0.0"),
        ({"clip": [1.0, 2.0]}, "params: clip: .*got a list"),
        ({"scale": 0.0}, "params: scale: 0 ignores the action of a joint; give another factor"),
        ({"scale": [1.0, 0.0]}, "params: scale: 0 ignores the action of a joint"),
    ):
        with pytest.raises(ConfigError, match=message):
            term("action", "DefaultJointPositionTerm", sim, **params)


@pytest.mark.parametrize("func", ["DefaultJointPositionTerm", "RelativeJointPositionAction"])
def test_joints_of_a_scene_without_a_robot_have_names(func):
    assert term("action", func, scene_of(), joint_names=["rail"]).joints == ("rail",)
    with pytest.raises(ConfigError, match=r"params.joint_names: unknown joint 'rails'; did you mean 'rail'"):
        term("action", func, scene_of(), joint_names=["rails"])


# events


def happened(func, batch=(3,), sim=None, **params):
    sim = sim or scene_of()
    keys = torch.arange(torch.Size(batch).numel()).reshape(batch)
    return sim, assert_pure(term("event", func, sim, **params), state_in(sim, batch), keys)


def test_objects_get_cells_of_their_own_in_a_grid():
    grid = {"position_range": [[0.0, -1.0], [3.0, 1.0]], "reference_height": 0.5, "grid_size": [3, 2]}
    sim, after = happened("planner_grid_cell_sampler", (400,), object_uid_list=["cube", "slider", "hand"], **grid)
    places = torch.stack([world.body_position(sim, after["world"], uid) for uid in ("cube", "slider", "hand")], 1)
    close(places[..., 2], torch.full((400, 3), 0.5), 1e-6)
    column, row = (places[..., 0] - 0.5).round(), (places[..., 1] + 0.5).round()
    close(places[..., 0], column + 0.5, 1e-5)
    close(places[..., 1], row - 0.5, 1e-5)
    cell = (column + 3 * row).long()
    assert (cell.sort(-1).values.diff(dim=-1) > 0).all()  # no two objects in a cell
    counts = torch.bincount(cell[:, 0], minlength=6)
    assert (counts > 35).all()  # 67 on average


def test_a_table_and_what_stands_on_it_move_by_the_same_height():
    objects = [
        cube("table", [0.0, 0.0, 0.4], body_type="kinematic"),
        cube("cube", [0.0, 0.0, 0.5]),
        cube("lamp", [2.0, 0.0, 0.9], body_type="kinematic"),
    ]
    sim = scene_of(rigid_object=objects)
    span = {"height_delta_range": [[-0.1], [0.2]]}
    _, after = happened("randomize_anchor_height", (5,), sim, anchor_uid="table", exclude_uids=["lamp"], **span)
    delta = -0.1 + 0.3 * rng.uniform(torch.arange(5), (1,))[:, 0]
    for uid, z in (("table", 0.4), ("cube", 0.5)):
        close(world.body_position(sim, after["world"], uid)[:, 2], z + delta, 1e-6)
    close(world.body_position(sim, after["world"], "lamp")[:, 2], torch.full((5,), 0.9), 1e-6)
    again = term("event", "randomize_anchor_height", sim, anchor_uid="table", **span)(after, torch.arange(5))
    gap = (
        world.body_position(sim, again["world"], "cube")[:, 2] - world.body_position(sim, again["world"], "table")[:, 2]
    )
    close(gap, torch.full((5,), 0.1), 1e-6)  # a second time, heights do not add up
    _, chosen = happened(
        "randomize_anchor_height", (64,), sim, anchor_uid="table", height_delta_candidates=[0.0, 0.1, 0.3]
    )
    heights = world.body_position(sim, chosen["world"], "table")[:, 2]
    assert [round(x, 4) for x in heights.unique().tolist()] == [0.4, 0.5, 0.7]


@pytest.mark.parametrize(
    ("func", "params", "message"),
    [
        ("planner_grid_cell_sampler", {"object_uid_list": ["wall"]}, "params.object_uid_list: body 'wall' cannot be"),
        ("planner_grid_cell_sampler", {"object_uid_list": ["cube", "cube"]}, "names an object twice"),
        (
            "planner_grid_cell_sampler",
            {"object_uid_list": ["cube", "hand"], "grid_size": [1, 1]},
            "1 cells for 2 objects",
        ),
        ("randomize_anchor_height", {"anchor_uid": "cube"}, "give height_delta_range or height_delta_candidates"),
        (
            "randomize_anchor_height",
            {"anchor_uid": "cube", "height_delta_range": [[0, 1], [1, 2]]},
            "give one lowest and one highest",
        ),
        (
            "randomize_anchor_height",
            {"anchor_uid": "wall", "height_delta_candidates": [1]},
            "params.anchor_uid: .*wall",
        ),
        (
            "randomize_anchor_height",
            {"anchor_uid": "cube", "height_delta_candidates": [1], "exclude_uids": ["hnd"]},
            "params.exclude_uids: no movable object 'hnd'; did you mean 'hand'",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(func, params, message):
    grid = {"position_range": [[0.0, 0.0], [1.0, 1.0]], "reference_height": 0.5, "grid_size": [2, 2]}
    params = grid | params if func == "planner_grid_cell_sampler" else params
    with pytest.raises(ConfigError, match=message):
        task(events={"it": happening(func, **params)})


# names that are absent


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in ABSENT.items() for name in names])
def test_a_functor_that_is_absent_is_refused_with_advice(kind, name):
    with pytest.raises(KeyError) as error:
        lookup(kind, name)
    message, advice = error.value.args[0], ABSENT[kind][name]
    assert message == f"ecrl has no {kind} {name!r}; {advice}" and "\n" not in message
    named = {word for words in map(registered, ("action", "observation", "reward", "event")) for word in words}
    words = {word.strip(",;.") for word in advice.split()}
    assert name not in registered(kind)
    if advice.startswith("use "):
        assert words & named, advice


def test_the_advice_reaches_whoever_writes_the_config():
    event = {"func": "replace_assets_from_group", "params": {"folder_path": "cups"}}
    for place, data in (
        ("env.cfg.events.swap.func", {"env": {"name": "PushCubeRL", "cfg": {"events": {"swap": event}}}}),
        (
            "trainer.events.train.swap.func",
            {"env": {"name": "PushCubeRL"}, "trainer": {"events": {"train": {"swap": event}}}},
        ),
    ):
        with pytest.raises(ConfigError) as error:
            config_from_dict(data | {"policy": {"name": "actor_critic"}, "algorithm": {"name": "ppo"}})
        assert f"{place}: ecrl has no event 'replace_assets_from_group'; every environment has" in str(error.value)


def test_angles_are_in_degrees():
    """A quick check of units: 180 degrees is half a turn."""
    half = [[0.0, 0.0, 180.0]] * 2
    sim, after = happened("randomize_rigid_object_pose", **CUBE, rotation_range=half)
    pose = world.body_pose(sim, after["world"], "cube")
    angle = torch.acos(((pose[:, :3, :3].diagonal(dim1=-2, dim2=-1).sum(-1) - 1.0) / 2.0).clamp(-1.0, 1.0))
    close(angle, torch.full((3,), pi), 2e-3)


def test_a_run_with_all_kinds_of_changes_goes_on_from_a_checkpoint_bit_by_bit(tmp_path):
    com = {**CUBE, "com_pos_offset_range": [[-0.01] * 3, [0.01] * 3]}
    base = {"entity_cfg": {"uid": "Manipulator"}, "position_range": [[-0.01, -0.01, 0.0], [0.01, 0.01, 0.0]]}
    events = {
        "base": happening("randomize_articulation_root_pose", **base),
        "color": happening("randomize_visual_material", **CUBE),
        "com": happening("randomize_rigid_object_center_of_mass", "startup", **com),
        "delay": happening("randomize_action_delay", delay_range=[0, 3]),
        "goal": happening("randomize_target_pose", position_range=[[-0.9, -0.7, 0.05], [-0.3, -0.1, 0.05]]),
        "gravity": happening("randomize_gravity", "interval", 2, gravity_range=[[0.0, 0.0, -9.9], [0.0, 0.0, -9.7]]),
    }
    net = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
    cfg = config_from_dict(
        {
            "trainer": {"num_envs": 2, "buffer_size": 8, "iterations": 2, "compile": "off"},
            "env": {"name": "PushCubeRL", "cfg": {"events": events, "max_episode_steps": 5}},
            "policy": {"name": "actor_critic", "actor": net, "critic": net},
            "algorithm": {"name": "ppo", "cfg": {"batch_size": 8}},
        }
    )
    iterate = make_iteration(cfg)
    once = iterate(init_state(cfg))[0]
    save(tmp_path / "saved", once, cfg)
    assert same(iterate(once)[0], iterate(load(tmp_path / "saved")[0])[0])
