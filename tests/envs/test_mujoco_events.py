"""Events of scenes: their effect by hand and in MuJoCo's own motion, when they happen and to whom, what is refused."""

from math import sqrt

import pytest
import torch
from support.checks import Variant, assert_pure, close

pytest.importorskip("mujoco.batch")

import mujoco
from support.fake_mujoco_task import (
    ACTIONS,
    CUBE_MASS,
    DT,
    FORCED,
    SCENE,
    UNDAMPED,
    NothingConfig,
    cube,
    happening,
    keys_of,
    outside,
    rollout,
    task,
)
from support.small_runs import same, small
from tensordict import TensorDict

from ecrl import registry, rng
from ecrl.compile.jit import choose_form
from ecrl.compile.trace import traced
from ecrl.config.model import validate_section
from ecrl.envs import auto_reset, make_env, restart, with_events
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import advance, simulation, start
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.validate import check_fields
from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.pytree import flatten
from ecrl.registry import lookup

pytestmark = pytest.mark.usefixtures("mujoco_test_terms")
CUBE, SLIDER = {"entity_cfg": {"uid": "cube"}}, {"entity_cfg": {"uid": "slider"}}
MASS = CUBE_MASS
EVENTS = {
    "randomize_rigid_object_pose": {
        **CUBE,
        "position_range": [[-0.2, -0.1, 0.0], [0.2, 0.3, 0.0]],
        "rotation_range": [[0.0, 0.0, -90.0], [20.0, 0.0, 90.0]],
    },
    "randomize_target_pose": {"position_range": [[-0.3, -0.3, 0.05], [0.3, 0.3, 0.05]]},
    "randomize_robot_qpos": {"qpos_range": [-0.1, [0.1, 0.2]]},
    "randomize_rigid_object_mass": MASS,
    "randomize_rigid_object_friction": {**SLIDER, "friction_range": [0.2, 0.8]},
    "push_rigid_object": {**CUBE, "force_range": [[-5.0, 0.0, 0.0], [5.0, 0.0, 10.0]]},
}


def scene(varied=(), **changes):
    return simulation(validate_section(SceneConfig, SCENE | changes, "scene"), varied=varied)


def made(func, sim=None, **params):
    entry = lookup("event", func)
    cfg = validate_section(entry.config, params, "params")
    varied = getattr(cfg, "varied", lambda sim: ())
    sim = scene(varied(scene())) if sim is None else sim
    return sim, entry.make(cfg, sim)


def state_in(sim, batch=(3,)):
    """Cubes that turn and drift, with a push of 1 N on the first degree of freedom to come."""
    moving = start(sim, batch)
    for uid in ("cube", "slider"):
        moving = world.with_body_velocity(sim, moving, uid, torch.full((3,), 0.5), torch.ones(3))
    force = torch.zeros(*batch, sim.nv)
    force[..., 0] = 1.0
    fields = {"world": moving, "force": force, "action": torch.zeros(*batch, 1)}
    fields["targets"] = TensorDict({"goal_pose": torch.full((*batch, 3), 9.0)}, batch)
    return TensorDict(fields, batch)


def happened(func, batch=(3,), **params):
    """The simulation, and the states before and after an event; keys 0, 1, ..."""
    sim, apply = made(func, **params)
    before, keys = state_in(sim, batch), torch.arange(torch.Size(batch).numel()).reshape(batch)
    return sim, before, apply(before, keys)


def place(sim, state, uid="cube"):
    return world.body_pose(sim, state["world"], uid)


def uniform(low, high, numbers, keys):
    low, high = torch.tensor(low), torch.tensor(high)
    return low + (high - low) * rng.uniform(keys, (numbers,))


# what they do


def test_a_position_is_counted_from_the_scenes_or_from_the_origin():
    spans = [[-0.2, -0.1, 0.0], [0.2, 0.3, 0.0]]
    expected = uniform(*spans, 3, torch.arange(3))
    sim, _, after = happened("randomize_rigid_object_pose", **CUBE, position_range=spans)
    close(place(sim, after)[:, :3, 3], expected + torch.tensor([0.0, 0.0, 5.0]), 1e-6)
    sim, _, after = happened("randomize_rigid_object_pose", **CUBE, position_range=spans, relative_position=False)
    close(place(sim, after)[:, :3, 3], expected, 1e-6)
    assert len(expected.unique()) == 7  # x and y are drawn, z is certain


def test_a_put_object_is_at_rest_and_the_others_are_as_they_were():
    sim, before, after = happened("randomize_rigid_object_pose", **EVENTS["randomize_rigid_object_pose"])
    first, rest = (world.body_velocity(sim, after["world"], uid) for uid in ("cube", "slider"))
    assert all((x == 0.0).all() for x in first)
    close(torch.cat(rest, -1), [[0.5] * 3 + [1.0] * 3] * 3, 1e-6)
    close(place(sim, after, "slider"), place(sim, before, "slider"), 0.0)
    assert torch.equal(after["force"], before["force"]) and same(after["targets"], before["targets"])


X, Y, Z = ([[1.0 if i == j else 0.0 for j in range(3)] for i in range(3)][k] for k in range(3))


def turned(rotation, init_rot=(0.0, 0.0, 0.0), **params):
    sim = scene(rigid_object=[cube("cube", [1.0, 2.0, 3.0], init_rot=init_rot)])
    _, apply = made("randomize_rigid_object_pose", sim, **CUBE, rotation_range=[rotation] * 2, **params)
    after = apply(TensorDict({"world": start(sim, (2,))}, (2,)), torch.arange(2))
    close(place(sim, after)[:, :3, 3], [[1.0, 2.0, 3.0]] * 2, 1e-6)  # it is not moved
    return place(sim, after)[0, :3, :3]


def test_rotations_by_hand():
    # columns are where x, y and z of the object point to
    close(turned([90.0, 0.0, 0.0]).T, [X, Z, [0.0, -1.0, 0.0]], 1e-6)
    # its z points to -y then: about it x turns to where its y was, to z, and its y to -x
    close(turned([90.0, 0.0, 90.0]).T, [Z, [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]], 1e-6)
    close(turned([0.0, 90.0, 90.0]).T, [Y, Z, X], 1e-6)  # its z points to x: y turns from there to z
    close(turned([0.0, 0.0, 90.0], [90.0, 0.0, 0.0]).T, [Y, [-1.0, 0.0, 0.0], Z], 1e-6)  # independent of its old value
    # about its own z, which points to -y: its x turns to where its y was, to z
    close(turned([0.0, 0.0, 90.0], [90.0, 0.0, 0.0], relative_rotation=True).T, [Z, [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])


def test_a_rotation_reads_as_the_scenes_init_rot():
    sim = scene(rigid_object=[cube("cube", [0.0] * 3, init_rot=[30.0, 40.0, 50.0])])
    close(turned([30.0, 40.0, 50.0]), world.body_pose(sim, start(sim, ()), "cube")[:3, :3], 1e-6)
    own, matrix = torch.zeros(4).double().numpy(), torch.zeros(9).double().numpy()
    mujoco.mju_euler2Quat(own, torch.deg2rad(torch.tensor([30.0, 40.0, 50.0]).double()).numpy(), "xyz")
    mujoco.mju_quat2Mat(matrix, own)
    close(turned([30.0, 40.0, 50.0]), matrix.reshape(3, 3), 1e-6)


def test_what_is_not_drawn_stays_as_it_is():
    sim, apply = made("randomize_rigid_object_pose", **CUBE, rotation_range=[[0.0] * 3, [0.0, 0.0, 90.0]])
    moved = torch.tensor([[7.0, 8.0, 9.0]])
    before = world.with_body_pose(sim, start(sim, (1,)), "cube", moved, torch.tensor([[0.0, 1.0, 0.0, 0.0]]))
    after = apply(TensorDict({"world": before}, (1,)), torch.arange(1))
    close(place(sim, after)[:, :3, 3], moved, 0.0)
    sim, apply = made("randomize_rigid_object_pose", **CUBE, position_range=[[0.0] * 3, [1.0] * 3])
    after = apply(TensorDict({"world": before}, (1,)), torch.arange(1))
    close(place(sim, after)[0, :3, :3], torch.diag(torch.tensor([1.0, -1.0, -1.0])), 1e-6)


def test_position_and_rotation_have_noise_of_their_own():
    both = {"position_range": [[0.0] * 3, [1.0] * 3], "rotation_range": [[0.0] * 3, [1.0] * 3]}
    sim, _, after = happened("randomize_rigid_object_pose", (9,), **CUBE, **both, relative_position=False)
    drawn = place(sim, after)
    angle = torch.rad2deg(drawn[:, 1, 0])  # about z, small
    assert not torch.isclose(drawn[:, 2, 3], angle, atol=0.02).all()
    position_only = happened("randomize_rigid_object_pose", (9,), **CUBE, position_range=both["position_range"])[2]
    close(place(sim, position_only)[:, 0, 3], drawn[:, 0, 3], 1e-6)


def test_a_kinematic_object_is_put_and_stays():
    hand = {"entity_cfg": {"uid": "hand"}}
    sim, _, after = happened("randomize_rigid_object_pose", **hand, position_range=[[1.0, 2.0, 3.0]] * 2)
    close(place(sim, after, "hand")[:, :3, 3], [[-1.0, 2.0, 4.0]] * 3, 1e-6)
    moved, _ = advance(sim, after["world"], torch.zeros(3, sim.nu))
    close(world.body_pose(sim, moved, "hand"), place(sim, after, "hand"), 0.0)


def test_targets_are_absolute_or_beside_where_an_object_is_now():
    spans = [[-0.3, -0.2, 0.05], [0.3, 0.2, 0.05]]
    expected = uniform(*spans, 3, torch.arange(3))
    _, before, after = happened("randomize_target_pose", position_range=spans)
    close(after["targets", "goal_pose"], expected, 1e-7)
    assert same(after["world"], before["world"]) and torch.equal(after["force"], before["force"])
    beside = {"relative_position": True, "reference_entity_cfg": {"uid": "cube"}}
    sim, apply = made("randomize_target_pose", position_range=spans, **beside)
    there = world.with_body_pose(sim, before["world"], "cube", torch.tensor([1.0, 2.0, 3.0]))
    after = apply(before.copy().set("world", there), torch.arange(3))
    close(after["targets", "goal_pose"], expected + torch.tensor([1.0, 2.0, 3.0]), 1e-6)


def test_targets_have_names():
    env = task(events={name: happening("randomize_target_pose", position_range=[at, at], store_key=name)
                       for name, at in (("a", [1.0, 2.0, 3.0]), ("b", [4.0, 5.0, 6.0]))})  # fmt: skip
    targets = env.reset(keys_of(2))["targets"]
    assert targets["a"].tolist() == [[1.0, 2.0, 3.0]] * 2 and targets["b"].tolist() == [[4.0, 5.0, 6.0]] * 2


def joints_after(**params):
    """Rail and elbow at 0.5 and 2, moving, then the event."""
    sim, apply = made("randomize_robot_qpos", **params)
    at = world.with_joint_positions(sim, start(sim, (3,)), sim.robot.joints, torch.tensor([0.5, 2.0]))
    at = world.with_joint_velocities(sim, at, sim.robot.joints, torch.tensor([3.0, 4.0]))
    after = apply(TensorDict({"world": at}, (3,)), torch.arange(3))["world"]
    return [read(sim, after, sim.robot.joints) for read in (world.joint_positions, world.joint_velocities)]


def test_joints_are_put_beside_where_they_are_or_somewhere():
    u = rng.uniform(torch.arange(3), (2,))
    q, v = joints_after(qpos_range=[[-0.1, 0.0], [0.1, 1.0]])
    close(q, torch.stack((0.4 + 0.2 * u[:, 0], 2.0 + u[:, 1]), -1), 1e-6)
    assert (v == 0.0).all()
    q, _ = joints_after(qpos_range=[-0.1, 0.3], relative_qpos=False)
    close(q, -0.1 + 0.4 * u, 1e-6)


def test_joints_that_are_not_meant_stay_and_move_on():
    q, v = joints_after(qpos_range=[0.1, 0.1], joint_ids=[1])
    close(q, [[0.5, 2.1]] * 3, 1e-6)
    assert v.tolist() == [[3.0, 0.0]] * 3
    q, v = joints_after(qpos_range=[[0.2, 0.3], [0.2, 0.3]], part_name="arm")
    close(q, [[0.7, 2.3]] * 3, 1e-6)


def test_joints_stay_within_their_limits():
    q, _ = joints_after(qpos_range=[[2.0, 50.0], [3.0, 50.0]])
    close(q, [[1.0, 52.0]] * 3, 1e-6)  # the elbow turns freely
    q, _ = joints_after(qpos_range=[-9.0, -9.0], joint_ids=[0], relative_qpos=False)
    close(q[:, 0], [-1.0] * 3, 1e-6)


def test_a_mass_moves_under_force_and_torque_by_newtons_law():
    # F = 6 N during 0.02 s gives m v = 0.12; a torque of 0.01 N m about z gives I w = 0.0002, I = m 0.1^2 / 6
    sim, _, after = happened("randomize_rigid_object_mass", **MASS)
    mass = uniform([1.0], [3.0], 1, torch.arange(3))
    close(world.parameter(sim, after["world"], "body_mass", "cube"), mass, 1e-6)
    force = world.push(sim, "cube", torch.tensor([6.0, 0.0, 0.0]).expand(3, 3))
    force[:, sim.model.joint("cube").dofadr[0] + 5] = 0.01
    begin = start(sim, (3,)).set("parameters", after["world", "parameters"])
    moved, _ = advance(sim, begin, torch.zeros(3, sim.nu), force)
    linear, angular = world.body_velocity(sim, moved, "cube")
    close(linear[:, 0] * mass[:, 0], [6.0 * DT] * 3, 1e-5)
    close(angular[:, 2] * mass[:, 0] * 0.01 / 6.0, [0.01 * DT] * 3, 1e-5)
    close(linear[:, 2], [-9.81 * DT] * 3, 1e-5)  # all fall alike


def test_damping_takes_the_same_share_of_a_velocity_whatever_the_mass():
    damped = UNDAMPED | {"linear_damping": 1.5, "angular_damping": 3.0}
    objects = [cube("cube", [0.0, 0.0, 5.0], attrs=damped)]
    fields = tuple((field, "cube") for field in ("body_mass", "body_inertia", "dof_damping"))
    sim = scene(fields, rigid_object=objects)
    _, apply = made("randomize_rigid_object_mass", sim, **CUBE, mass_range=[0.5, 9.0])
    after = apply(TensorDict({"world": start(sim, (4,))}, (4,)), torch.arange(4))["world"]
    assert len(world.parameter(sim, after, "body_mass", "cube").unique()) == 4
    moving = world.with_body_velocity(sim, after, "cube", *torch.tensor([X, Z]).unbind())
    moved, _ = advance(sim, moving, torch.zeros(4, sim.nu))
    linear, angular = world.body_velocity(sim, moved, "cube")
    close(linear[:, 0], [(1.0 + 1.5 * 0.005) ** -4] * 4, 1e-5)  # four implicit steps of 5 ms
    close(angular[:, 2], [(1.0 + 3.0 * 0.005) ** -4] * 4, 1e-5)


def test_masses_may_be_counted_from_the_scenes():
    sim, _, after = happened("randomize_rigid_object_mass", **CUBE, mass_range=[-1.0, 0.5], relative=True)
    mass = world.parameter(sim, after["world"], "body_mass", "cube")
    close(mass, uniform([1.0], [2.5], 1, torch.arange(3)), 1e-6)
    inertia = world.parameter(sim, after["world"], "body_inertia", "cube")
    close(inertia, (mass * 0.01 / 6.0).expand(3, 3), 1e-6)


def test_masses_drawn_again_and_again_do_not_add_up():
    sim, apply = made("randomize_rigid_object_mass", **MASS)
    state = state_in(sim)
    for i in range(20):
        state = apply(state, torch.arange(3) + i)
    once = apply(state_in(sim), torch.arange(3) + 19)
    assert torch.equal(state["world", "parameters"], once["world", "parameters"])


def test_a_body_of_a_scenes_file_has_a_mass_too():
    pebble = '<body name="pebble" pos="0 0 3"><freejoint/><geom size=".1"/></body>'
    text = SCENE["mjcf"].replace("</worldbody>", f"{pebble}</worldbody>")
    fields = tuple((field, "pebble") for field in ("body_mass", "body_inertia", "dof_damping"))
    sim = scene(fields, mjcf=text)
    _, apply = made("randomize_rigid_object_mass", sim, entity_cfg={"uid": "pebble"}, mass_range=[7.0, 7.0])
    after = apply(TensorDict({"world": start(sim, (2,))}, (2,)), torch.arange(2))["world"]
    close(world.parameter(sim, after, "body_mass", "pebble"), [[7.0]] * 2, 1e-6)


def test_an_object_slides_as_far_as_its_friction_lets_it():
    # v = 1.5 m/s, v^2 / (2 mu g): 0.57 m at mu = 0.2
    sim, _, after = happened("randomize_rigid_object_friction", (4,), **SLIDER, friction_range=[0.2, 0.8])
    mu = uniform([0.2], [0.8], 1, torch.arange(4))[:, 0]
    numbers = world.parameter(sim, after["world"], "geom_friction", "slider")
    close(numbers, torch.stack((mu, torch.full((4,), 0.005), torch.full((4,), 1e-4)), -1), 1e-6)
    state, fast = start(sim, (4,)).set("parameters", after["world", "parameters"]), torch.tensor([1.5, 0.0, 0.0])
    for _ in range(10):
        state, _ = advance(sim, state, torch.zeros(4, sim.nu))  # it settles
    state = world.with_body_velocity(sim, state, "slider", fast, torch.zeros(3))
    begin = world.body_pose(sim, state, "slider")[:, 0, 3]
    for _ in range(60):
        state, _ = advance(sim, state, torch.zeros(4, sim.nu))
    distance = world.body_pose(sim, state, "slider")[:, 0, 3] - begin
    assert distance.max() > 1.5 * distance.min()
    close(distance, 1.5**2 / (2.0 * mu * 9.81), 0.03)


def test_a_push_changes_the_momentum_by_force_times_time_and_is_gone():
    # 2 kg in the air: v' = v + F dt / m, and g dt downwards; the next step adds nothing but gravity
    pushed = {"p": happening("push_rigid_object", "interval", 3, **CUBE, force_range=[[10.0, -4.0, 6.0]] * 2)}
    env = auto_reset(task(events=pushed))
    states = rollout(env, 2, 6)
    linear, angular = world.body_velocity(env.scene, states["world"], "cube")
    kicks = [0, 0, 0, 1, 1, 1, 2]
    close(linear[..., 0], [[10.0 * DT / 2.0 * n for n in kicks]] * 2, 1e-6)
    close(linear[..., 1], [[-4.0 * DT / 2.0 * n for n in kicks]] * 2, 1e-6)
    close(linear[..., 2], [[6.0 * DT / 2.0 * n - 9.81 * DT * t for t, n in enumerate(kicks)]] * 2, 1e-5)
    assert (states["force"] == 0.0).all() and (angular.abs() < 1e-6).all()
    close(world.body_velocity(env.scene, states["world"], "slider")[0][..., :2], torch.zeros(2, 7, 2), 1e-6)


def test_pushes_add_up():
    one = happening("push_rigid_object", "reset", **CUBE, force_range=[[1.0, 2.0, 0.0]] * 2)
    env = task(events={"a": one, "b": one})
    state = env.reset(keys_of(2))
    first = env.scene.model.joint("cube").dofadr[0]
    close(state["force"][:, first : first + 3], [[2.0, 4.0, 0.0]] * 2, 0.0)
    assert state["force"].count_nonzero() == 4
    after = env.step(state, torch.zeros(2, 1), keys_of(2))
    close(world.body_velocity(env.scene, after["world"], "cube")[0][:, 0], [2.0 * DT / 2.0] * 2, 1e-6)


# all of them alike


@pytest.mark.parametrize("form", ["eager", "vmapped", "strided"])
@pytest.mark.parametrize("func", EVENTS)
def test_an_event_is_pure_and_equal_in_every_variant(func, form):
    sim, apply = made(func, **EVENTS[func])
    state, keys = state_in(sim), torch.arange(3)
    expected = apply(state, keys).flatten_keys("/")
    for name, leaf in Variant(form)(apply)(state, keys).flatten_keys("/").items():
        close(leaf, expected[name], 1e-6)


@pytest.mark.parametrize("func", EVENTS)
def test_an_event_is_the_same_in_a_graph(func):
    sim, apply = made(func, **EVENTS[func])
    leaves, structure = flatten((state_in(sim), torch.arange(3)))
    graph, _ = traced(apply, structure, leaves)
    other, _ = flatten((state_in(sim), torch.arange(3) + 7))  # it draws from its keys
    expected, _ = flatten(apply(state_in(sim), torch.arange(3) + 7))
    for a, b in zip(graph(*other), expected, strict=True):
        close(a, b, 1e-6)


@pytest.mark.parametrize("func", EVENTS)
def test_an_event_draws_within_its_bounds_and_only_from_keys_for_any_batch(func):
    sim, apply = made(func, **EVENTS[func])
    many, none = apply(state_in(sim, (2, 3)), torch.arange(6).reshape(2, 3)), state_in(sim, ())
    for i in range(6):
        single = assert_pure(apply, none, torch.tensor(i))
        assert same(single, many.reshape(6)[i])
    changed = [k for k, leaf in many.flatten_keys("/").items() if not (leaf[0, 0] == leaf[1, 0]).all()]
    assert changed, "the draws are all the same"


@pytest.mark.parametrize(
    ("func", "read", "low", "high"),
    [
        ("randomize_rigid_object_pose", lambda sim, s: place(sim, s)[:, 0, 3], -0.2, 0.2),
        ("randomize_target_pose", lambda sim, s: s["targets", "goal_pose"][:, 1], -0.3, 0.3),
        ("randomize_robot_qpos", lambda sim, s: world.joint_positions(sim, s["world"], ("elbow",))[:, 0], -0.1, 0.2),
        ("randomize_rigid_object_mass", lambda sim, s: s["world", "parameters"][:, 0], 1.0, 3.0),
        ("randomize_rigid_object_friction", lambda sim, s: s["world", "parameters"][:, 0], 0.2, 0.8),
        ("push_rigid_object", lambda sim, s: s["force"][:, sim.model.joint("cube").dofadr[0] + 2], 0.0, 10.0),
    ],
)
def test_draws_fill_their_interval_evenly(func, read, low, high):
    sim, _, after = happened(func, (4000,), **EVENTS[func])
    drawn, width = read(sim, after), high - low
    assert low <= drawn.min() < low + 0.01 * width and high - 0.01 * width < drawn.max() <= high
    assert abs(drawn.mean() - (low + high) / 2.0) < 0.025 * width  # five standard errors
    assert abs(drawn.std() - width / sqrt(12.0)) < 0.02 * width


# when they happen

LASTING = {"heavy": happening("randomize_rigid_object_mass", "startup", **MASS)}
ANEW = {"put": happening("randomize_rigid_object_pose", **EVENTS["randomize_rigid_object_pose"])}
NOW = {"push": happening("push_rigid_object", "interval", 3, **EVENTS["push_rigid_object"])}
ALL = LASTING | ANEW | NOW | {"goal": happening("randomize_target_pose", **EVENTS["randomize_target_pose"])}


def mass_of(env, states):
    return world.parameter(env.scene, states["world"], "body_mass", "cube")[..., 0]


def height_of(env, states):
    return place(env.scene, states)[..., 2, 3]


def test_startup_happens_once_in_a_life():
    env = auto_reset(task(events=LASTING, max_episode_steps=3))
    states = rollout(env, 4, 8)
    mass = mass_of(env, states)
    assert len(mass[:, 0].unique()) == 4 and torch.equal(mass, mass[:, :1].expand_as(mass))
    assert ((mass >= 1.0) & (mass < 3.0)).all()
    assert states["elapsed"][0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert states["life", "count"][0].tolist() == list(range(9))
    again = assert_pure(restart, env, states[:, -1], keys_of(4, 7))
    assert torch.equal(mass_of(env, again), mass[:, 0]) and (again["elapsed"] == 0).all()
    assert not (mass_of(env, env.reset(keys_of(4, 7))) == mass[:, 0]).any()  # a new life
    assert again["life", "count"].tolist() == [8] * 4
    assert torch.equal(again["life", "key"], states["life", "key"][:, -1])


def test_reset_happens_at_every_start_and_only_there():
    env = auto_reset(task(events=ANEW, max_episode_steps=3))
    states = rollout(env, 4, 8)
    x = place(env.scene, states)[..., 0, 3]
    starts = x[:, [0, 3, 6]]
    assert len(starts.unique()) == 12 and "life" not in states
    close(x, starts.repeat_interleave(3, 1), 1e-6)  # it falls straight down
    close(height_of(env, states)[:, [0, 3, 6]], torch.full((4, 3), 5.0), 1e-6)
    assert len(place(env.scene, restart(env, states[:, -1], keys_of(4, 7)))[:, 0, 3].unique()) == 4


def test_the_observation_is_of_the_state_after_the_events():
    height_term = {"height": {"func": "rig_height", "name": "cube/height"}}
    up = [[0.0, 0.0, 0.0], [0.0, 0.0, 3.0]]
    events_by_mode = {
        m: happening("randomize_rigid_object_pose", m, **CUBE, position_range=up) for m in ("startup", "reset")
    }
    for events in ({"put": events_by_mode["startup"]}, {"put": events_by_mode["reset"]}, events_by_mode | LASTING):
        env = auto_reset(task(events=events, observations=height_term, max_episode_steps=2))
        states = rollout(env, 4, 5)
        close(states["obs"][..., 0], height_of(env, states), 1e-6)
        assert len(states["obs"][:, 0, 0].unique()) == 4
        close(states["final_obs"][:, 2, 0], states["obs"][:, 0, 0] - 9.81 * 0.005**2 * 8 * 9 / 2, 1e-5)
        again = restart(env, states[:, -1], keys_of(4, 7))
        close(again["obs"][:, 0], height_of(env, again), 1e-6)


@pytest.mark.parametrize("many", [1, 2, 5])
def test_interval_counts_the_steps_of_a_life(many):
    force = {"force_range": [[1.0, 0.0, 0.0]] * 2}
    env = auto_reset(task(events={"p": happening("push_rigid_object", "interval", many, **CUBE, **force)},
                          max_episode_steps=7))  # fmt: skip
    states = rollout(env, 2, 20)
    vx = world.body_velocity(env.scene, states["world"], "cube")[0][..., 0]
    vx = torch.where(states["elapsed"] == 0, 0.0, vx)
    pushed = vx.diff(dim=1) > 0.005
    steps, ended = torch.arange(1, 21), states["elapsed"][0, 1:] == 0
    assert torch.equal(pushed[:, ~ended], (steps % many == 0)[~ended].expand(2, -1))
    again = restart(env, states[:, -1], keys_of(2, 7))
    after = env.step(again, torch.zeros(2, 1), env.draw(keys_of(2, 8)))  # the 21st
    moved = world.body_velocity(env.scene, after["world"], "cube")[0][:, 0] > 0.005
    assert moved.tolist() == [21 % many == 0] * 2


def test_every_environment_counts_its_own_steps():
    env = task(events={"p": happening("push_rigid_object", "interval", 3, **CUBE, force_range=[[9.0, 0.0, 0.0]] * 2)})
    state = env.reset(keys_of(5)).set(("life", "count"), torch.tensor([0, 1, 2, 4, 5]))
    after = assert_pure(env.step, state, torch.zeros(5, 1), keys_of(5, 1))
    moved = world.body_velocity(env.scene, after["world"], "cube")[0][:, 0] > 0.01
    assert moved.tolist() == [False, False, True, False, True]
    assert after["life", "count"].tolist() == [1, 2, 3, 5, 6]


def test_an_interval_event_comes_before_the_step_and_its_reward():
    """A reward does not count movements that an event causes."""
    lift = happening("randomize_rigid_object_pose", "interval", 2, **CUBE, position_range=[[0.0, 0.0, 2.0]] * 2)
    env = auto_reset(task(events={"lift": lift}, rewards={"fall": {"func": "rig_fall"}}))
    states = rollout(env, 2, 4)
    z = height_of(env, states)[0]
    assert z[1] < 5.0 < 6.9 < z[2] < 7.0
    assert (states["reward"][:, 1:] > 0.0).all() and (states["reward"] < 0.02).all()


def test_events_of_one_moment_happen_by_name_and_startup_before_reset():
    beside = {"position_range": [[0.0] * 3] * 2, "relative_position": True, "reference_entity_cfg": {"uid": "cube"}}
    goal = happening("randomize_target_pose", **beside)
    for first, second, same_place in (("a", "b", True), ("b", "a", False)):
        env = task(events={first: ANEW["put"], second: goal})
        state = env.reset(keys_of())
        assert torch.equal(state["targets", "goal_pose"], place(env.scene, state)[:, :3, 3]) == same_place
    env = task(events={"z": ANEW["put"] | {"mode": "startup"}, "a": goal})
    state = env.reset(keys_of())
    assert torch.equal(state["targets", "goal_pose"], place(env.scene, state)[:, :3, 3])


def test_an_environment_is_the_same_among_any_number():
    env = auto_reset(task(events=ALL, max_episode_steps=4))
    few, many = rollout(env, 4, 9), rollout(env, 64, 9)
    assert same(few["world"], many["world"][:4]) and same(few["targets"], many["targets"][:4])
    for what in (mass_of(env, many)[:, 0], many["targets", "goal_pose"][:, 5, 0], place(env.scene, many)[:, 9, 0, 3]):
        assert len(what.unique()) == 64


def test_members_of_a_group_share_their_starts_and_disturbances():
    env = auto_reset(task(events=ALL, max_episode_steps=4))
    states = rollout(env, index=torch.tensor([0, 0, 1, 1]), length=9)
    assert same(states[0].exclude("info"), states[1].exclude("info")) and same(states[2]["world"], states[3]["world"])
    for key in (("targets", "goal_pose"), ("world", "parameters"), ("world", "physics")):
        assert not torch.equal(states[0][key], states[2][key])


def test_two_events_alike_have_noise_of_their_own_and_so_have_those_of_the_trainer():
    for mode in ("startup", "reset"):
        one = happening("push_rigid_object", mode, **CUBE, force_range=[[0.0] * 3, [1.0, 0.0, 0.0]])
        plain, twice = auto_reset(task(events={"a": one})), auto_reset(task(events={"a": one, "b": one}))
        wrapped = with_events(plain, outside({"a": one}))
        first = plain.scene.model.joint("cube").dofadr[0]
        once, both, more = (env.reset(keys_of())["force"][:, first] for env in (plain, twice, wrapped))
        assert not torch.isclose(both - once, once).any() and not torch.isclose(more - once, once).any()


def test_a_start_that_is_refused_is_drawn_again():
    events = {"goal": happening("randomize_target_pose", position_range=[[0.0] * 3, [1.0, 0.0, 0.0]])}

    def far(sim, state):
        return state["targets", "goal_pose"][..., 0] > 0.3

    free, choosy = task(events=events), task(events=events, acceptable=far)
    keys = rng.split(rng.key(1), 10_000)
    drawn, chosen = (env.reset(keys)["targets", "goal_pose"][:, 0] for env in (free, choosy))
    refused = drawn <= 0.3
    assert 2800 < refused.sum() < 3200
    assert (chosen > 0.3).all() and torch.equal(chosen[~refused], drawn[~refused])
    assert abs(chosen.mean() - 0.65) < 0.011 and len(chosen[refused].unique()) > 2700
    lasting = task(events=events | LASTING, acceptable=far, max_episode_steps=1)
    states = rollout(auto_reset(lasting), 64, 5)
    assert (states["targets", "goal_pose"][..., 0] > 0.3).all()
    assert (restart(auto_reset(lasting), states[:, -1], keys_of(64, 3))["targets", "goal_pose"][:, 0] > 0.3).all()


def test_a_start_is_chosen_again_only_where_startup_events_have_a_say():
    """A mass drawn at startup does not change the starts; a goal drawn at startup does."""
    calls = []

    def far(sim, state):
        calls.append(len(state))
        between = world.body_pose(sim, state["world"], "cube")[..., 0, 3] - state["targets", "goal_pose"][..., 0]
        return between.abs() > 0.05

    goal = {"position_range": [[-0.2, 0.0, 0.0], [0.2, 0.0, 0.0]]}
    for mode, again in (("reset", False), ("startup", True)):
        events = LASTING | ANEW | {"goal": happening("randomize_target_pose", mode, **goal)}
        env = auto_reset(task(events=events, acceptable=far, max_episode_steps=2))
        state, noise = env.reset(keys_of(64)), env.draw(rng.split(rng.key(7), 8 * 64).reshape(8, 64))
        calls.clear()
        states = [state := env.step(state, torch.zeros(64, 1), noise[t]) for t in range(8)]
        assert bool(calls) == again
        assert all(far(env.scene, state).all() for state in states)
        assert (
            torch.equal(mass_of(env, states[-1]), mass_of(env, states[0])) and len(mass_of(env, state).unique()) == 64
        )
        assert len(place(env.scene, states[-1])[:, 0, 3].unique()) == 64
        same_goal = torch.equal(states[-1]["targets", "goal_pose"], states[0]["targets", "goal_pose"])
        assert same_goal == again


@pytest.mark.parametrize(
    ("which", "moved"), [({}, (2, 3)), ({"joint_ids": [0]}, (2,)), ({"part_name": "upper"}, (0, 1))]
)
def test_joints_are_counted_among_those_of_the_parts_that_are_controlled(which, moved):
    parts = {
        "upper": ["shoulder_pan_joint", "shoulder_lift_joint"],
        "lower": ["elbow_joint", "wrist_1_joint"],
    }
    put = happening("randomize_robot_qpos", qpos_range=[0.1, 0.2], **which)
    arm = FORCED | {"robot": {"uid": "ur", "control_parts": parts}, "control_parts": ["lower"]}
    env = task(**arm, actions={"all": {"func": "rig_drive"}}, events={"put": put})
    names = [f"ur/{name}" for part in parts.values() for name in part]
    home = world.joint_positions(env.scene, start(env.scene, (4,)), names)
    change = world.joint_positions(env.scene, env.reset(keys_of())["world"], names) - home
    assert tuple(i for i in range(4) if (change[:, i] > 0.05).all()) == moved
    assert (change[:, [i for i in range(4) if i not in moved]] == 0.0).all()


def test_an_event_may_write_on_what_it_is_given_and_sees_no_outcome():
    @registry.register_event("careless")
    def careless(cfg: NothingConfig):
        def apply(state, keys):
            keys_received.append(sorted(state.keys()))
            state["force"] += 1.0
            return state

        return apply

    keys_received = []
    try:
        env = task(events={"c": {"func": "careless", "mode": "interval", "interval_step": 2}})
        state = env.reset(keys_of(2)).set(("life", "count"), torch.tensor([0, 1]))
        after = assert_pure(env.step, state, torch.zeros(2, 1), keys_of(2))
    finally:
        del registry._ENTRIES["event"]["careless"]
    assert keys_received[-1] == ["action", "force", "world"]
    vx = world.body_velocity(env.scene, after["world"], "cube")[0][:, 0]
    close(vx, [0.0, DT / 2.0], 1e-6)


# under trainer.events, in training


def config(train=None, **changes):
    chosen = SCENE | {"actions": ACTIONS, "max_episode_steps": 3} | changes.pop("env", {})
    return small(**{"env": {"name": "rig_task", "cfg": chosen}, "trainer.events.train": train or {}} | changes)


def test_the_same_events_happen_under_trainer_events():
    inside = auto_reset(task(events=NOW | ANEW, max_episode_steps=4))
    env = with_events(auto_reset(task(max_episode_steps=4)), outside(NOW | ANEW))
    for wrapped in (inside, env):
        states = rollout(wrapped, 4, 9)
        x, vx = place(wrapped.scene, states)[..., 0, 3], world.body_velocity(wrapped.scene, states["world"], "cube")[0]
        assert len(x[:, 0].unique()) == 4 and len(x[0, [0, 4, 8]].unique()) == 3
        assert [t for t in range(10) if vx[0, t, 0].abs() > 1e-4] == [3, 6, 7, 9]  # an episode ends at 4 and 8


@pytest.mark.parametrize("where", ["env", "trainer"])
def test_training_with_every_mode_keeps_masses_and_draws_starts(where):
    events = LASTING | ANEW | NOW if where == "env" else ANEW | NOW
    cfg = config(**({"env": {"events": events}} if where == "env" else {"train": events}))
    check_fields(make_env(cfg.env), "rig_task")
    state = init_state(cfg)
    after, _ = assert_pure(make_iteration(cfg), state)
    sim = make_env(cfg.env).scene
    assert len(world.body_pose(sim, state["env", "world"], "cube")[:, 0, 3].unique()) == 4
    if where == "env":
        assert torch.equal(after["env", "world", "parameters"], state["env", "world", "parameters"])
        assert len(state["env", "world", "parameters"][:, 0].unique()) == 4
        assert after["env", "life", "count"].tolist() == [8] * 4
    else:
        assert after["env", "events", "count"].tolist() == [8] * 4
    assert same(make_iteration(cfg)(state)[0], after)


def test_a_grpo_rollout_restarts_with_the_same_masses():
    net = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
    grpo = {"algorithm": {"name": "grpo", "cfg": {"group_size": 2, "batch_size": 8}}}
    cfg = config(env={"events": ALL}, **grpo, **{"policy": {"name": "actor_only", "actor": net}})
    state = init_state(cfg)
    after, _ = make_iteration(cfg)(state)
    again, _ = make_iteration(cfg)(after)
    mass = state["env", "world", "parameters"]
    assert torch.equal(mass[0], mass[1]) and torch.equal(mass[2], mass[3]) and not torch.equal(mass[0], mass[2])
    assert torch.equal(again["env", "world", "parameters"], mass) and again["env", "life", "count"].tolist() == [16] * 4
    goal = state["env", "targets", "goal_pose"]
    assert torch.equal(goal[0], goal[1]) and not torch.equal(goal[0], goal[2])


def test_seeds_run_side_by_side_under_vmap():
    cfg = config(env={"events": ALL})
    states = [init_state(cfg, key=torch.tensor(seed)) for seed in (1, 2)]
    stacked, _ = torch.vmap(make_iteration(cfg), randomness="error")(torch.stack([s.clone() for s in states]))
    for i, state in enumerate(states):
        single, _ = make_iteration(cfg)(state)
        for key in (("world", "parameters"), ("world", "physics"), ("targets", "goal_pose"), "obs", ("life", "key")):
            close(stacked["env"][key][i], single["env"][key], 1e-4)


@pytest.mark.slow
def test_a_compiled_rollout_with_every_mode_equals_the_eager_one(traced_or_compiled):
    env = with_events(auto_reset(task(events=ALL, max_episode_steps=5)), outside(NOW | ANEW))
    form = choose_form("on", "cpu")

    def steps(loop, state, noise, actions):
        def body(state, x):
            state = env.step(state, *x)
            return state, (state["obs"], state["world", "parameters"], state["force"])

        return loop(body, state, (actions, noise))

    noise = env.draw(rng.split(rng.key(3), 160).reshape(20, 8))
    actions = rng.uniform(rng.key(9), (20, 8, 1)) * 2.0 - 1.0
    with torch.no_grad():
        begin = env.reset(keys_of(8))
        eager, rows = steps(scan, begin, noise, actions)
        compiled, result = form.jit(steps, form.scan)(begin, noise, actions)
    for a, b in zip(result, rows, strict=True):
        close(a, b, 1e-5)
    for key in ("obs", ("targets", "goal_pose"), ("life", "count"), ("world", "parameters"), "elapsed"):
        close(compiled[key], eager[key], 1e-5)


# what is refused


@pytest.mark.parametrize(
    ("func", "params", "message"),
    [
        ("randomize_rigid_object_pose", {"position_range": [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]}, "lowest 1.0 is above"),
        ("randomize_rigid_object_pose", {}, "give position_range, rotation_range or both"),
        ("randomize_rigid_object_pose", {"position_range": [[0.0] * 2] * 2}, r"position_range\[0\]\[2\]: missing"),
        ("randomize_target_pose", {"position_range": [[0.0] * 3] * 2, "relative_position": True}, "go together"),
        (
            "randomize_target_pose",
            {"position_range": [[0.0] * 3] * 2, "reference_entity_cfg": {"uid": "cube"}},
            "go together",
        ),
        ("randomize_target_pose", {"position_range": [[0.0] * 3] * 2, "store_key": "a b"}, "store_key: not allowed"),
        ("randomize_robot_qpos", {"qpos_range": [0.2, 0.1]}, "lowest 0.2 is above highest 0.1"),
        ("randomize_robot_qpos", {"qpos_range": [[0.0, 0.0], [1.0] * 3]}, "2 lowest values, but 3 highest values"),
        ("randomize_robot_qpos", {"qpos_range": [0, 1], "joint_ids": [0], "part_name": "arm"}, "both select"),
        ("randomize_rigid_object_mass", {"mass_range": [3.0, 1.0]}, "lowest 3.0 is above highest 1.0"),
        ("randomize_rigid_object_friction", {"friction_range": [-0.1, 1.0]}, "must be at least 0"),
        ("push_rigid_object", {"force_range": [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]}, "lowest 1.0 is above highest 0.0"),
    ],
)
def test_bounds_that_make_no_sense_are_refused_by_the_config(func, params, message):
    entity = CUBE if "entity_cfg" in lookup("event", func).config.model_fields and "robot" not in func else {}
    with pytest.raises(ConfigError, match=message):
        validate_section(lookup("event", func).config, entity | params, "params")


SPOT = {"position_range": [[0.0] * 3] * 2}
POSE, WEIGH = "randomize_rigid_object_pose", "randomize_rigid_object_mass"


def of(uid):
    return {"entity_cfg": {"uid": uid}}


@pytest.mark.parametrize(
    ("func", "params", "message"),
    [
        (POSE, {**of("cub"), **SPOT}, r"entity_cfg.uid: body 'cub' is not in the scene; the scene has: .*cube"),
        (POSE, {**of("wall"), **SPOT}, "entity_cfg.uid: body 'wall' cannot be moved"),
        (
            "randomize_target_pose",
            {**SPOT, "relative_position": True, "reference_entity_cfg": {"uid": "x"}},
            "reference_entity_cfg.uid: body 'x' is not in",
        ),
        ("randomize_robot_qpos", {"qpos_range": [[0.0] * 3, 1.0]}, r"qpos_range: 3 values for 2 joints: rail, elbow"),
        ("randomize_robot_qpos", {"qpos_range": [0.0, 1.0], "joint_ids": [2]}, "joint_ids: 2, but there are 2 joints"),
        ("randomize_robot_qpos", {"qpos_range": [0.0, 1.0], "part_name": "leg"}, "part_name: unknown part 'leg'"),
        (
            "randomize_robot_qpos",
            {"qpos_range": [0.0, 1.0], "entity_cfg": {"uid": "ur"}},
            "entity_cfg.uid: no robot 'ur'",
        ),
        (
            "push_rigid_object",
            {**of("hand"), "force_range": [[0.0] * 3] * 2},
            "entity_cfg.uid: body 'hand' is kinematic, expected dynamic",
        ),
    ],
)
def test_what_is_not_in_the_scene_is_refused_when_the_event_is_made(func, params, message):
    with pytest.raises(ConfigError, match=rf"^params.{message}"):
        made(func, **params)
    with pytest.raises(ConfigError, match=rf"^env.cfg.events.it \({func}\): params.{message}"):
        task(events={"it": happening(func, **params)})


@pytest.mark.parametrize(
    ("func", "params", "message"),
    [
        (
            WEIGH,
            {**of("cub"), "mass_range": [1, 2]},
            "params.entity_cfg.uid: unknown object 'cub'; did you mean 'cube'",
        ),
        (
            WEIGH,
            {**of("hand"), "mass_range": [1, 2]},
            "params.entity_cfg.uid: body 'hand' is kinematic, expected dynamic",
        ),
        (WEIGH, {**CUBE, "mass_range": [0.0, 2.0]}, "params.mass_range: the lowest mass is 0.0 kg"),
        (
            WEIGH,
            {**CUBE, "mass_range": [-3.0, 2.0], "relative": True},
            "params.mass_range: the lowest mass is -1.0 kg",
        ),
        (
            "randomize_rigid_object_friction",
            {**of("cart"), "friction_range": [0, 1]},
            "params.entity_cfg.uid: geom 'cart' is not in the scene",
        ),
    ],
)
def test_masses_and_frictions_that_cannot_be_are_refused(func, params, message):
    with pytest.raises(ConfigError, match=rf"^env.cfg.events.it \({func}\): {message}"):
        task(events={"it": happening(func, **params)})


@pytest.mark.parametrize("func", ["randomize_rigid_object_mass", "randomize_rigid_object_friction"])
def test_masses_and_frictions_belong_to_the_events_of_the_task(func):
    its = outside({"it": happening(func, "startup", **EVENTS[func])})
    with pytest.raises(ConfigError) as error:
        with_events(auto_reset(task()), its)
    assert str(error.value).startswith(f"trainer.events.it ({func}): ") and "\n" not in str(error.value)
    assert ", so this event cannot vary it; put the event under env.cfg.events" in str(error.value)
    known = with_events(auto_reset(task(events={"own": happening(func, **EVENTS[func])})), its)
    assert len(known.reset(keys_of())["world", "parameters"][:, 0].unique()) == 4  # there it may vary


def test_a_target_that_the_task_does_not_have_is_refused():
    its = outside({"it": happening("randomize_target_pose", **SPOT, store_key="gaol_pose")})
    env = auto_reset(task(events={"goal": happening("randomize_target_pose", **SPOT)}))
    message = "trainer.events.it (randomize_target_pose): params.store_key: no target 'gaol_pose' in the task"
    with pytest.raises(ConfigError) as error:
        with_events(env, its).reset(keys_of())
    assert str(error.value) == f"{message}; did you mean 'goal_pose'?; an event under env.cfg.events adds one"
    with pytest.raises(ConfigError, match="known: none"):
        with_events(auto_reset(task()), its).reset(keys_of())


@pytest.mark.parametrize("func", EVENTS)
def test_scene_events_of_an_environment_without_a_scene_are_refused(func):
    with pytest.raises(ConfigError) as error:
        with_events(auto_reset(make_env("cartpole")), outside({"it": happening(func, **EVENTS[func])}))
    message = "changes the scene of a MuJoCo task, but this environment has no scene; remove the event"
    assert str(error.value) == f"trainer.events.it ({func}): {message}"


def test_the_built_in_arm_is_put_by_name_and_by_part():
    sim = scene(**FORCED)
    home = torch.tensor(sim.home.qpos[:6]).float()
    for params in ({"entity_cfg": {"uid": "ur"}}, {"robot_uid": "ur"}, {"part_name": "arm"}):
        _, apply = made("randomize_robot_qpos", sim, qpos_range=[[-0.1] * 6, [0.1] * 6], **params)
        after = apply(TensorDict({"world": start(sim, (3,))}, (3,)), torch.arange(3))["world"]
        expected = home + uniform([-0.1] * 6, [0.1] * 6, 6, torch.arange(3))
        close(world.joint_positions(sim, after, sim.robot.joints), expected, 1e-5)
