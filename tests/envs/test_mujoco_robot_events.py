"""Events that move the robot's base or end effector, change velocities, push the robot or delay its actions."""

from dataclasses import replace

import pytest
import torch
from support.checks import assert_pure, close

pytest.importorskip("mujoco.batch")

import mujoco
from support.fake_mujoco_task import FORCED, SCENE, happening, keys_of, outside, rollout, task
from support.small_runs import same
from tensordict import TensorDict

from ecrl import rng
from ecrl.compile.trace import traced
from ecrl.config.model import validate_section
from ecrl.envs import auto_reset, with_events
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import advance, simulation, start, to_data
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.mujoco.scene.models import rows_of
from ecrl.errors import ConfigError
from ecrl.pytree import flatten
from ecrl.registry import lookup

pytestmark = pytest.mark.usefixtures("mujoco_test_terms")
UR = {"entity_cfg": {"uid": "ur"}}
ARM = FORCED | {"actions": {"all": {"func": "rig_drive"}}}
CUBE = {"entity_cfg": {"uid": "cube"}}
SPANS = {
    "position_range": [[-0.1, 0.0, 0.2], [0.1, 0.3, 0.2]],
    "rotation_range": [[0.0, 0.0, -90.0], [0.0, 10.0, 90.0]],
}
EVENTS = {
    "randomize_robot_eef_pose": {
        **UR,
        "position_range": [[-0.05] * 3, [0.05] * 3],
        "rotation_range": [[-9.0] * 3, [9.0] * 3],
    },
    "randomize_articulation_root_pose": UR | SPANS,
    "randomize_robot_qvel": {**UR, "qvel_range": [-0.3, 0.3]},
    "push_robot": {"force_range": [[-9.0, 0.0, 0.0], [9.0, 5.0, 0.0]]},
    "randomize_articulation_mass": {**UR, "mass_range": [1.0, 3.0]},
    "randomize_rigid_object_center_of_mass": {**CUBE, "com_pos_offset_range": [[-0.01] * 3, [0.01] * 3]},
    "randomize_rigid_object_scale": {**CUBE, "scale_factor_range": [[0.9], [1.1]]},
    "randomize_rigid_objects_scale": {"entity_cfgs": [{"uid": "cube"}], "scale_factor_range": [[0.9], [1.1]]},
    "randomize_gravity": {"gravity_range": [[0.0, 0.0, -9.9], [0.0, 0.0, -9.7]]},
    "randomize_rigid_object_velocity": {**CUBE, "linear_range": [[-1.0] * 3, [1.0] * 3], "relative": True},
}
DELAY = {"delay_range": [0, 3]}


def made(func, scene=SCENE | FORCED, **params):
    """The simulation, and the function of an event."""
    cfg = validate_section(lookup("event", func).config, params, "params")
    scene = validate_section(SceneConfig, scene, "scene")
    varied = getattr(cfg, "varied", lambda sim: ())(simulation(scene))
    sim = simulation(scene, (), varied, bool(getattr(cfg, "moved_bases", ())))
    return sim, lookup("event", func).make(cfg, sim)


def state_in(sim, batch=(3,)):
    return TensorDict({"world": start(sim, batch), "force": torch.zeros(*batch, sim.nv)}, batch)


def happened(func, batch=(3,), **params):
    sim, apply = made(func, **params)
    before, keys = state_in(sim, batch), torch.arange(torch.Size(batch).numel()).reshape(batch)
    return sim, before, apply(before, keys)


# the end effector


def test_the_end_effector_moves_by_the_draw_and_turns_about_its_own_axes():
    box, turn = [[0.05, -0.04, 0.03]] * 2, [[0.0, 0.0, 30.0]] * 2
    sim, before, after = happened("randomize_robot_eef_pose", **UR, position_range=box, rotation_range=turn)
    site = sim.robot.tcp["arm"]
    old, new = (world.site_pose(sim, state["world"], site) for state in (before, after))
    close(new[:, :3, 3] - old[:, :3, 3], torch.tensor(box[0]).expand(3, 3), 1.1e-3)
    rotation = old[:, :3, :3].mT @ new[:, :3, :3]
    c, s = torch.tensor(30.0).deg2rad().cos(), torch.tensor(30.0).deg2rad().sin()
    expected = torch.tensor([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])
    close(rotation, expected.expand(3, 3, 3), 0.011)
    data = to_data(sim, after["world", "physics"][0])  # MuJoCo's own kinematics
    close(torch.tensor(data.site(site).xpos), new[0, :3, 3], 1e-5)
    assert (world.joint_velocities(sim, after["world"], sim.robot.joints) == 0.0).all()


def test_poses_differ_per_environment_and_fill_the_box():
    box = [[-0.05, 0.0, 0.0], [0.05, 0.0, 0.0]]
    sim, before, after = happened("randomize_robot_eef_pose", (64,), **UR, position_range=box)
    site = sim.robot.tcp["arm"]
    moved = [world.site_pose(sim, state["world"], site)[:, :3, 3] for state in (before, after)]
    shift = moved[1] - moved[0]
    assert len(shift[:, 0].unique()) == 64 and shift[:, 0].max() > 0.045 and shift[:, 0].min() < -0.045
    close(shift[:, 1:], torch.zeros(64, 2), 1.1e-3)


def test_a_pose_out_of_reach_leaves_the_joints_alone():
    far = [[5.0, 0.0, 0.0]] * 2
    sim, before, after = happened("randomize_robot_eef_pose", **UR, position_range=far)
    q = [world.joint_positions(sim, state["world"], sim.robot.joints) for state in (before, after)]
    assert torch.equal(*q)


# the base


def test_the_whole_arm_moves_with_its_base_and_stands_there():
    sim, before, after = happened("randomize_articulation_root_pose", **UR, **SPANS)
    base = world.body_pose(sim, after["world"], "ur")
    u = rng.uniform(torch.arange(3), (3,))
    low, high = map(torch.tensor, SPANS["position_range"])
    close(base[:, :3, 3], low + (high - low) * u, 1e-6)
    site = sim.robot.tcp["arm"]
    close(world.site_pose(sim, after["world"], site), base @ world.site_pose(sim, before["world"], site), 1e-5)
    moved = after["world"]
    for _ in range(10):
        moved, failed = advance(sim, moved, world.hold_controls(sim, moved))
        assert not failed.any()
    close(world.body_pose(sim, moved, "ur"), base, 0.0)
    close(world.site_pose(sim, moved, site), world.site_pose(sim, after["world"], site), 2e-3)
    data = to_data(sim, moved["physics"][1])
    close(torch.tensor(data.site(site).xpos), world.site_pose(sim, moved, site)[1, :3, 3], 1e-5)


def test_an_arm_on_a_movable_base_moves_as_one_on_a_fixed_base():
    scene = validate_section(SceneConfig, SCENE | FORCED, "scene")
    results = []
    for movable in (False, True):
        sim = simulation(scene, (), (), movable)
        worlds = world.with_joint_velocities(sim, start(sim, (1,)), sim.robot.joints, torch.full((6,), 0.5))
        for _ in range(10):
            worlds, _ = advance(sim, worlds, world.hold_controls(sim, start(sim, (1,))))
        results.append(world.joint_positions(sim, worlds, sim.robot.joints))
    close(*results, 1e-6)


def test_a_base_may_be_set_in_the_world_and_turned_from_the_scenes():
    there = {"position_range": [[1.0, 2.0, 0.5]] * 2, "relative_position": False}
    turned = {"rotation_range": [[0.0, 0.0, 90.0]] * 2, "relative_rotation": True}
    scene = SCENE | {"mjcf": None, "robot": {"uid": "ur", "init_rot": [90.0, 0.0, 0.0], "init_pos": [0.0, 0.0, 0.1]}}
    sim, _, after = happened("randomize_articulation_root_pose", scene=scene, **UR, **there, **turned)
    pose = world.body_pose(sim, after["world"], "ur")
    close(pose[:, :3, 3], [[1.0, 2.0, 0.5]] * 3, 1e-6)
    # its z points to -y: about it x turns to where its y was, to z, and its y to -x
    close(pose[0, :3, :3].T, [[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]], 1e-6)


def test_joints_outside_of_control_parts_stop_with_the_base_and_objects_do_not():
    func, params = "randomize_articulation_root_pose", UR | SPANS
    sim, _ = made(func, **params)
    fast = world.with_joint_velocities(sim, start(sim, (3,)), sim.robot.joints, torch.ones(6))
    fast = world.with_body_velocity(sim, fast, "cube", torch.ones(3), torch.ones(3))
    some = replace(sim, robot=sim.robot._replace(joints=sim.robot.joints[3:]))  # as control_parts does
    apply = lookup("event", func).make(validate_section(lookup("event", func).config, params, "params"), some)
    after = apply(state_in(sim).set("world", fast), torch.arange(3))["world"]
    assert (world.joint_velocities(sim, after, sim.robot.joints) == 0.0).all()
    assert (world.body_velocity(sim, after, "cube")[0] == 1.0).all()


def test_a_base_event_of_the_task_places_every_episode_elsewhere():
    put = happening("randomize_articulation_root_pose", **UR, **SPANS)
    env = auto_reset(task(**ARM, events={"put": put}, max_episode_steps=2))
    states = rollout(env, 3, 4)
    x = world.body_pose(env.scene, states["world"], "ur")[..., 1, 3]
    assert len(x[:, [0, 2, 4]].unique()) == 9 and torch.equal(x[:, 0], x[:, 1])


# velocities and pushes


def test_joint_velocities_are_set_or_added():
    sim, apply = made("randomize_robot_qvel", **UR, qvel_range=[[0.1] * 6, [0.3] * 6], relative_qvel=False)
    before = state_in(sim)
    fast = world.with_joint_velocities(sim, before["world"], sim.robot.joints, torch.ones(6))
    u = rng.uniform(torch.arange(3), (6,))
    after = apply(before.copy().set("world", fast), torch.arange(3))
    close(world.joint_velocities(sim, after["world"], sim.robot.joints), 0.1 + 0.2 * u, 1e-6)
    _, add = made("randomize_robot_qvel", **UR, qvel_range=[0.1, 0.3], joint_ids=[2])
    after = add(before.copy().set("world", fast), torch.arange(3))
    expected = torch.ones(3, 6)
    expected[:, 2] += 0.1 + 0.2 * rng.uniform(torch.arange(3), (1,))[:, 0]
    close(world.joint_velocities(sim, after["world"], sim.robot.joints), expected, 1e-6)


def test_a_push_at_the_end_effector_is_what_mujoco_computes_from_the_same_force():
    force = [20.0, -10.0, 5.0]
    sim, before, after = happened("push_robot", force_range=[force, force])
    data, site = to_data(sim, before["world", "physics"][0]), sim.robot.tcp["arm"]
    expected = torch.zeros(sim.nv).double().numpy()
    body = int(sim.model.site(site).bodyid[0])
    point = data.site(site).xpos
    mujoco.mj_applyFT(sim.model, data, force, [0.0] * 3, point, body, expected)
    close(after["force"], torch.from_numpy(expected).float().expand(3, sim.nv), 1e-3)
    control = world.hold_controls(sim, before["world"])
    free, _ = advance(sim, before["world"], control)
    pushed, _ = advance(sim, before["world"], control, after["force"])
    shift = [world.site_pose(sim, worlds, site)[0, :3, 3] for worlds in (free, pushed)]
    assert (shift[1] - shift[0]) @ torch.tensor(force) > 1e-4  # it moves along the force


# delay


def rail(events=None, steps=50, **changes):
    return task(max_episode_steps=steps, events=events or {}, **changes)


def driven(env, actions, number=4):
    """The positions of the rail after each step, `[number, T]`."""
    state, rows = env.reset(keys_of(number)), []
    for t, action in enumerate(actions):
        state = env.step(state, torch.full((number, 1), action), env.draw(rng.fold_in(keys_of(number), t)))
        rows.append(world.joint_positions(env.scene, state["world"], ("rail",))[:, 0])
    return torch.stack(rows, -1), state


ACTIONS = [0.5, -0.3, 0.8, 0.1, -0.9, 0.4, 0.4, -0.2, 0.6, 0.0]


@pytest.mark.parametrize("delay", [1, 3])
def test_a_delayed_action_acts_that_many_steps_later(delay):
    late = happening("randomize_action_delay", delay_range=[delay, delay])
    moved, state = driven(rail({"late": late}), ACTIONS)
    expected, _ = driven(rail(), ACTIONS)
    assert (moved[:, :delay] == 0.0).all()  # the drive holds the rail
    close(moved[:, delay:], expected[:, :-delay], 1e-6)
    assert (state["delay", "steps"] == delay).all() and (state["action"] == ACTIONS[-1]).all()


def test_delays_differ_per_environment_and_zero_is_no_delay():
    late = happening("randomize_action_delay", delay_range=[0, 2])
    moved, state = driven(rail({"late": late}), ACTIONS, 32)
    expected, _ = driven(rail(), ACTIONS, 32)
    for delay in (0, 1, 2):
        chosen = state["delay", "steps"] == delay
        assert chosen.sum() > 3
        close(moved[chosen][:, delay:], expected[chosen][:, : len(ACTIONS) - delay], 1e-6)


def test_a_new_episode_forgets_the_actions_of_the_last_and_holds_where_it_starts():
    late = happening("randomize_action_delay", delay_range=[2, 2])
    put = happening("randomize_robot_qpos", qpos_range=[0.2, 0.4], joint_ids=[0])
    env = auto_reset(rail({"late": late, "put": put}, steps=3))
    states = rollout(env, 3, 7, action=-1.0)
    x = world.joint_positions(env.scene, states["world"], ("rail",))[..., 0]
    assert states["elapsed"][0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    for first in (0, 3):
        close(x[:, first + 1 : first + 3], x[:, first : first + 1].expand(3, 2), 1e-6)
    assert len(x[:, [0, 3, 6]].unique()) == 9


def test_delays_of_a_startup_last_and_those_of_an_interval_change():
    def steps_of(mode, interval=1):
        late = happening("randomize_action_delay", mode, interval, delay_range=[0, 200])
        return rollout(auto_reset(rail({"late": late}, steps=3)), 4, 8)["delay", "steps"]

    lasting, changing = steps_of("startup"), steps_of("interval", 4)
    assert torch.equal(lasting, lasting[:, :1].expand_as(lasting)) and len(lasting[:, 0].unique()) == 4
    assert len(changing[:, 4].unique()) == 4 and torch.equal(changing[:, 4], changing[:, 5])


def test_a_rollout_with_delays_goes_on_from_a_copy_of_its_state_bit_by_bit():
    late = happening("randomize_action_delay", **DELAY)
    masses = happening("randomize_rigid_object_scale", "startup", **CUBE, scale_factor_range=[[0.9], [1.1]])
    env = auto_reset(rail({"late": late, "size": masses}, steps=4))
    whole = rollout(env, 4, 8, action=0.7)
    saved, noise = (
        whole[:, 5].clone(),
        env.draw(rng.stream(rng.key(0), rng.ENV, torch.arange(4), torch.arange(8).unsqueeze(1))),
    )
    for t in range(5, 8):
        saved = env.step(saved, torch.full((4, 1), 0.7), noise[t])
    assert same(saved, whole[:, 8])


def test_a_step_with_delays_is_pure_and_the_same_in_a_graph():
    env = rail({"late": happening("randomize_action_delay", **DELAY)})
    state, action, noise = env.reset(keys_of(4)), torch.full((4, 1), 0.3), keys_of(4, 1)
    expected = assert_pure(env.step, state, action, noise)
    leaves, structure = flatten((state, action, noise))
    graph, _ = traced(env.step, structure, leaves)
    other = env.step(expected, -action, noise)
    again, _ = flatten((expected, -action, noise))
    for a, b in zip(graph(*again), flatten(other)[0], strict=True):
        close(a, b, 1e-6)


# all of them alike


@pytest.mark.parametrize("func", EVENTS)
def test_an_event_is_pure_equal_for_any_batch_and_the_same_in_a_graph(func):
    sim, apply = made(func, **EVENTS[func])
    many = apply(state_in(sim, (2, 2)), torch.arange(4).reshape(2, 2))
    single = assert_pure(apply, state_in(sim, ()), torch.tensor(3))
    for name, leaf in single.flatten_keys("/").items():
        close(leaf, many[1, 1].flatten_keys("/")[name], 1e-6)
    changed = [k for k, leaf in many.flatten_keys("/").items() if not (leaf[0, 0] == leaf[1, 0]).all()]
    assert changed, "the draws are all the same"
    leaves, structure = flatten((state_in(sim), torch.arange(3)))
    graph, _ = traced(apply, structure, leaves)
    other, _ = flatten((state_in(sim), torch.arange(3) + 7))
    for a, b in zip(graph(*other), flatten(apply(state_in(sim), torch.arange(3) + 7))[0], strict=True):
        close(a, b, 1e-6)


EVERYWHERE = {"randomize_robot_eef_pose", "randomize_robot_qvel", "push_robot", "randomize_rigid_object_velocity"}


@pytest.mark.parametrize("func", [*EVENTS, "randomize_action_delay"])
def test_under_trainer_events_an_event_happens_or_the_error_names_the_right_place(func):
    params = EVENTS.get(func, DELAY)
    event, plain = happening(func, **params), auto_reset(task(**ARM))
    if func in EVERYWHERE:
        state = with_events(plain, outside({"it": event})).reset(keys_of(2))
        before = plain.reset(keys_of(2))
        assert not torch.equal(state["world", "physics"], before["world", "physics"]) or (state["force"] != 0.0).any()
        return
    with pytest.raises(ConfigError) as error:
        with_events(plain, outside({"it": event})).reset(keys_of(2))
    message = str(error.value)
    assert message.startswith(f"trainer.events.it ({func}): ") and "\n" not in message
    assert message.endswith("put the event under env.cfg.events")
    # where the task has the same event, the trainer's may change its values
    own = auto_reset(task(**ARM, events={"own": event}))
    ours, theirs = own.reset(keys_of(8)), with_events(own, outside({"it": event})).reset(keys_of(8))
    assert not all(
        torch.equal(a, b) for a, b in zip(flatten(ours)[0], flatten(theirs.exclude("events"))[0], strict=True)
    )


@pytest.mark.parametrize(
    ("func", "params", "message"),
    [
        ("randomize_robot_eef_pose", UR, "give position_range, rotation_range or both"),
        ("randomize_robot_eef_pose", {"entity_cfg": {"uid": "tom"}, **SPANS}, "params.entity_cfg.uid: no robot 'tom'"),
        (
            "randomize_robot_eef_pose",
            {"entity_cfg": {"uid": "ur", "control_parts": ["leg"]}, **SPANS},
            "params.entity_cfg.control_parts: .*unknown part 'leg'",
        ),
        ("randomize_articulation_root_pose", {"entity_cfg": {"uid": "tom"}, **SPANS}, "no robot 'tom'"),
        ("randomize_robot_qvel", {**UR, "qvel_range": [[0.0] * 2, 1.0]}, "params.qvel_range: 2 values for 6 joints"),
        ("push_robot", {"part_name": "leg", "force_range": [[0.0] * 3] * 2}, "params.part_name: no end effector of"),
        (
            "randomize_rigid_object_scale",
            {**UR, "scale_factor_range": [[1.0], [2.0]]},
            "params.entity_cfg.uid: body 'ur' has 0 geoms, expected one geom: a box, sphere, cylinder or capsule",
        ),
        ("randomize_action_delay", {"delay_range": [2, 1]}, "lowest 2 is above highest 1"),
        ("randomize_action_delay", {"delay_range": [0, 0]}, "the longest delay is 0, which delays nothing"),
        ("randomize_action_delay", {"delay_range": [0, 2000]}, "must be at most 1000"),
    ],
)
def test_settings_that_do_not_fit_are_refused(func, params, message):
    with pytest.raises(ConfigError, match=message):
        task(**ARM, events={"it": happening(func, **params)})


def test_the_rows_of_gravity_belong_to_no_object():
    assert list(rows_of(simulation(validate_section(SceneConfig, SCENE, "scene")).model, "opt.gravity", "")) == [
        0,
        1,
        2,
    ]
