"""Terms of the action: each target and bound by hand, drives that act on the joints, inverse kinematics that arrive."""

from math import inf, pi, sqrt
from typing import Any

import pytest
import torch
from support.checks import Variant, assert_pure, close

pytest.importorskip("mujoco.batch")

from tensordict import TensorDict
from torch._higher_order_ops.scan import scan_op

from ecrl import rng
from ecrl.compile.jit import choose_form
from ecrl.compile.trace import traced
from ecrl.config.model import validate_section
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.make_task import task_env
from ecrl.envs.mujoco.physics.simulation import simulation, start
from ecrl.envs.mujoco.robots.inverse_kinematics import inverse_kinematics, pose_error, solve
from ecrl.envs.mujoco.scene import scene
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.envs.mujoco.terms import actions
from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.pytree import flatten
from ecrl.registry import lookup
from ecrl.spaces import Box

HOME = [0.0, -1.57, 1.57, -1.57, -1.57, 0.0]
# All joints at right angles: the upper arm up, 0.1273 + 0.612, the forearm along -x, 0.5723, and on by 0.1157, beside
# the plane of both by 0.163941, and the tool, 0.0922 + 0.16, down.
SQUARE = [0.0, -pi / 2, pi / 2, -pi / 2, -pi / 2, 0.0]
PLACE, DOWN = [-0.688, -0.163941, 0.4871], [0.0, sqrt(0.5), sqrt(0.5), 0.0]  # half a turn about x, a quarter about z
CUBE = {"uid": "cube", "shape": {"shape_type": "Cube", "size": [0.1, 0.1, 0.1]}, "init_pos": [-0.6, -0.4, 0.05]}
POLE = {"robot_type": "CartPole", "init_pos": [0.0, 0.0, 1.0]}
UNDRIVEN_JOINT = """<mujoco><worldbody><body><joint name="rail" type="slide" axis="1 0 0"/><geom size=".1"/><body>
<joint name="free" axis="0 0 1"/><geom size=".1"/><body><joint name="slack" axis="0 1 0"/><geom size=".1" pos=".1 0 0"/>
</body></body></body></worldbody>
<actuator><position joint="rail" kp="9"/><position joint="free" kp="9"/></actuator></mujoco>"""


def made(robot=None, **more):
    cfg: Any = validate_section(SceneConfig, {"robot": robot or {}, "rigid_object": [CUBE]} | more, "scene")
    return simulation(cfg)


SLOW = {"drive_pros": {"damping": 100.0, "max_effort": 60.0}}
FIRST = {"joint_ids": [0, 1, 2], "scale": 0.01}
RELATIVE = "RelativeJointPositionAction"


@pytest.fixture(scope="module")
def sim():
    return made()


def term(func, sim, **params):
    entry = lookup("action", func)
    return entry.make(validate_section(entry.config, params, "params"), sim)


def state_at(sim, joints, batch=()):
    """A state with the joints of the arm somewhere, `[6]` or `[*batch, 6]`."""
    values = torch.as_tensor(joints, dtype=torch.float32).expand(*batch, 6)
    moving = world.with_joint_positions(sim, start(sim, batch), sim.robot.joints, values)
    return TensorDict({"world": moving}, batch)


def row(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


def going_on(sim, state):
    no = torch.zeros_like(state["elapsed"], dtype=torch.bool)
    return no, no.clone(), {}


def task(terms, robot=None, **more):
    cfg = {"robot": robot or {}, "actions": {name: {"func": f, "params": p} for name, (f, p) in terms.items()}}
    return task_env(validate_section(TaskConfig, cfg | more, "env.cfg"), going_on)


def run(env, state, action, steps):
    for _ in range(steps):
        state = env.step(state, action, env.draw(rng.split(rng.key(0), len(action))))
        assert not state["terminated"].any()
    return state


# --- targets and bounds -------------------------------------------------------------------------------------------


def test_changes_of_positions(sim):
    result = term("DeltaQposTerm", sim, scale=0.1)
    assert (result.joints, result.drive, result.low, result.high) == (
        sim.robot.joints,
        "position",
        (-1.0,) * 6,
        (1.0,) * 6,
    )
    state, action = state_at(sim, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), row(1, -1, 0, 0.5, -0.5, 2)
    close(result.control(state, action), row(0.2, 0.1, 0.3, 0.45, 0.45, 0.8))
    close(term("DeltaQposTerm", sim).control(state, action), row(1.1, -0.8, 0.3, 0.9, 0.0, 2.6))  # scale 1
    some = term("DeltaQposTerm", sim, scale=2.0, joint_ids=[4, 1])
    assert some.joints == ("robot/wrist_2_joint", "robot/shoulder_lift_joint") and some.low == (-1.0, -1.0)
    close(some.control(state, row(1, -1)), row(2.5, -1.8))


def test_changes_of_the_positions_of_named_joints(sim):
    state = state_at(sim, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    whole = term(RELATIVE, sim, part_name="arm", scale=0.1)
    assert (whole.joints, whole.drive, whole.low, whole.high) == (
        sim.robot.joints,
        "position",
        (-1.0,) * 6,
        (1.0,) * 6,
    )
    close(whole.control(state, row(1, -1, 0, 0.5, -0.5, 2)), row(0.2, 0.1, 0.3, 0.45, 0.45, 0.8))
    names = {"joint_names": ["wrist_2_joint", "shoulder_lift_joint"], "scale": [2.0, 1.0]}
    ordered = term(RELATIVE, sim, **names)
    assert ordered.joints == ("robot/shoulder_lift_joint", "robot/wrist_2_joint")  # as in the robot
    close(ordered.control(state, row(1, -1)), row(2.2, -0.5))
    listed = term(RELATIVE, sim, **names, preserve_order=True, clip=0.25)
    assert listed.joints == ("robot/wrist_2_joint", "robot/shoulder_lift_joint")
    assert (listed.low, listed.high) == ((-0.25, -0.25), (0.25, 0.25))
    close(listed.control(state, row(1, -0.1)), row(1.0, 0.1))  # 0.5 + 2 * 0.25, 0.2 - 0.1


def test_positions(sim):
    result = term("QposTerm", sim, scale=0.5)
    limits = [2 * pi, 2 * pi, pi, 2 * pi, 2 * pi, 2 * pi]
    close(torch.tensor(result.high), torch.tensor([2 * x for x in limits]))
    close(torch.tensor(result.low), torch.tensor([-2 * x for x in limits]))
    close(result.control(state_at(sim, HOME), row(2, -2, 1, 0, 0.5, 6)), row(1, -1, 0.5, 0, 0.25, 3))
    assert term("QposTerm", sim, joint_ids=[2]).high == pytest.approx((pi,))
    cart = made(POLE)
    both = term("QposTerm", cart, scale=2.0)  # the slide has 4 m, the pole turns freely
    close(torch.tensor(both.high), row(2.0, pi / 2))
    assert term("QposTerm", cart, part_name="hand").joints == ("robot/cart_to_pole",)


def test_places_between_the_limits(sim):
    """The elbow has -pi to pi: a quarter of the way up from the lowest is -pi/2."""
    state = state_at(sim, HOME)
    elbow = {"joint_ids": [2]}
    result = term("QposDenormalizedTerm", sim, **elbow)
    assert (result.low, result.high, result.drive) == ((-1.0,), (1.0,), "position")
    close(result.control(state, row(-0.5)), row(-pi / 2))
    close(result.control(state, row(1)), row(pi))
    scaled = term("QposDenormalizedTerm", sim, **elbow, scale=0.5)
    assert (scaled.low, scaled.high) == ((-2.0,), (2.0,))
    close(scaled.control(state, row(-1)), row(-pi / 2))
    ranged = term("QposDenormalizedTerm", sim, **elbow, range=[10, 30], scale=2.0)
    assert (ranged.low, ranged.high) == ((5.0,), (15.0,))
    close(ranged.control(state, row(7.5)), row(-pi / 2))
    both = term("QposDenormalizedTerm", made(POLE))  # the slide has -4 to 4 m
    close(both.control(state, row(0.25, 0.25)), row(1.0, pi / 4))


def test_normalized_positions_are_given_by_the_policy(sim):
    state, elbow = state_at(sim, HOME), {"joint_ids": [2]}
    result = term("QposNormalizedTerm", sim, **elbow)
    assert (result.low, result.high) == ((0.0,), (1.0,))
    close(result.control(state, row(0.25)), row(-pi / 2))
    scaled = term("QposNormalizedTerm", sim, **elbow, scale=0.25, range=[0.0, 2.0])
    assert scaled.high == (8.0,)
    close(scaled.control(state, row(2)), row(-pi / 2))


def test_velocities_and_forces(sim):
    for func, drive in (("QvelTerm", "velocity"), ("QfTerm", "force")):
        result = term(func, sim, scale=3.0, joint_ids=[0, 5])
        assert (result.drive, result.low, result.high) == (drive, (-1.0, -1.0), (1.0, 1.0))
        close(result.control(state_at(sim, HOME), row(0.5, -1)), row(1.5, -3.0))
        close(term(func, sim, joint_ids=[0]).control(state_at(sim, HOME), row(0.5)), row(0.5))


# --- poses --------------------------------------------------------------------------------------------------------


# upside down about x, and a quarter back about the z that points down then
@pytest.mark.parametrize("action", [(*PLACE, *DOWN), (*PLACE, pi, 0.0, -pi / 2)])
def test_a_pose_by_hand_is_reached(sim, action):
    result = term("EefPoseTerm", sim, pose_dim=len(action))
    turned = (1.0,) * 4 if len(action) == 7 else (pi,) * 3
    assert result.high == (1.5, 1.5, 1.5, *turned) and result.low == tuple(-x for x in result.high)
    assert (result.joints, result.drive) == (sim.robot.joints, "position")
    for begin in (HOME, [0.2, -1.3, 1.8, -1.9, -1.2, 0.3]):
        close(result.control(state_at(sim, begin), row(*action)), row(*SQUARE), 1e-4)


def test_a_pose_is_of_the_world():
    """The base is rotated by 90 degrees about z, which maps (x, y) to (-y, x), and moved by (0.1, 0.2, 0.3)."""
    moved = made({"init_pos": [0.1, 0.2, 0.3], "init_rot": [0.0, 0.0, 90.0]})
    x, y, z = PLACE
    action = row(0.1 - y, 0.2 + x, 0.3 + z, pi, 0.0, pi)
    close(term("EefPoseTerm", moved, pose_dim=6).control(state_at(moved, HOME), action), row(*SQUARE), 1e-4)


def test_scale_is_of_place_and_angles_but_not_of_a_quaternion(sim):
    state = state_at(sim, HOME)
    angles = term("EefPoseTerm", sim, pose_dim=6, scale=0.5, reach=0.8)
    assert angles.high == (1.6, 1.6, 1.6, 2 * pi, 2 * pi, 2 * pi)
    close(angles.control(state, 2 * row(*PLACE, pi, 0.0, -pi / 2)), row(*SQUARE), 1e-4)
    turned = term("EefPoseTerm", sim, scale=2.0)
    assert turned.high == (0.75, 0.75, 0.75, 1.0, 1.0, 1.0, 1.0)
    close(turned.control(state, torch.cat((row(*PLACE) / 2, 0.1 * row(*DOWN)))), row(*SQUARE), 1e-4)


def test_what_cannot_be_reached_is_not_gone_to(sim):
    begin = torch.tensor([HOME] * 4) + row(0, 0.1, 0.2, 0.3)[:, None]
    result = term("EefPoseTerm", sim)
    far, none = (1.4, 1.4, 1.4, *DOWN), (*PLACE, 0.0, 0.0, 0.0, 0.0)
    target = result.control(
        state_at(sim, begin, (4,)), torch.stack([row(*x) for x in (far, (*PLACE, *DOWN), none, far)])
    )
    assert torch.equal(target[[0, 2, 3]], begin[[0, 2, 3]])
    close(target[1], row(*SQUARE), 1e-4)
    broken = result.control(state_at(sim, HOME), row(inf, 0, 0, 1, 0, 0, 0))
    assert broken.isnan().all()  # and ends the episode, rather than standing still


def test_exactly_half_a_turn_off_is_not_there(sim):
    """The Jacobian's way is then unknown, and none is taken: that is not to have arrived."""
    state, tcp = state_at(sim, SQUARE), sim.robot.tcp["arm"]
    target = world.site_pose(sim, state["world"], tcp) * row(-1, -1, 1, 1)  # about the tool
    solution = inverse_kinematics(sim, state["world"], tcp, sim.robot.joints, target, iterations=1)
    assert solution.angle > 1.0 or (solution.positions - row(*SQUARE)).abs().max() > 0.1


def test_tolerances_and_steps_say_what_is_reached(sim):
    """The tool is to be 1.46 m from the shoulder's axis, along the arm: 1.1843 + 0.1157 + 0.16 at the very most."""
    begin = [0.0, -0.3, 0.6, -0.3, -pi / 2, 0.0]
    state, near = state_at(sim, begin), torch.cat((row(*PLACE) + 0.02, row(*DOWN)))
    few = term("EefPoseTerm", sim, iterations=2).control(state, near)
    close(few, row(*begin))
    assert (term("EefPoseTerm", sim).control(state, near) - row(*begin)).abs().max() > 0.5
    coarse = {"iterations": 2, "position_tolerance": 2.0}
    close(term("EefPoseTerm", sim, **coarse).control(state, near), row(*begin))  # still turned
    coarse["rotation_tolerance"] = 4.0
    assert (term("EefPoseTerm", sim, **coarse).control(state, near) - row(*begin)).abs().max() > 0.5
    coarse["position_tolerance"] = 1e-3
    close(term("EefPoseTerm", sim, **coarse).control(state, near), row(*begin))


def test_most_poses_are_found_and_exactly(sim):
    gen = torch.Generator().manual_seed(0)
    many = 1000
    state, joints, tcp = state_at(sim, HOME, (many,)), sim.robot.joints, sim.robot.tcp["arm"]
    shares = []
    for spread in (0.5, 1.0, pi):
        there = row(*HOME) + spread * (2 * torch.rand(many, 6, generator=gen) - 1)
        there[:, 2].clamp_(-pi, pi)
        target = world.site_pose(sim, state_at(sim, there, (many,))["world"], tcp)
        solved = inverse_kinematics(sim, state["world"], tcp, joints, target, iterations=15)
        reached = (solved.distance < 1e-3) & (solved.angle < 1e-2)
        shares.append(reached.float().mean().item())
        at = world.site_pose(sim, state_at(sim, solved.positions, (many,))["world"], tcp)
        close((at - target)[:, :3, 3].norm(dim=-1), solved.distance, 1e-6)
        exact = at[reached] - target[reached]
        assert exact.abs().median() < 1e-6 and exact[:, :3, 3].norm(dim=-1).max() < 1e-3
        low, high = world.joint_limits(sim, joints)
        assert (solved.positions >= torch.tensor(low)).all() and (solved.positions <= torch.tensor(high)).all()
    assert shares[0] == 1.0 and shares[1] > 0.99 and shares[2] > 0.65, shares


def test_linear_equations_are_solved(variant: Variant):
    gen = torch.Generator().manual_seed(0)
    slope, right = torch.randn(5, 6, 7, generator=gen), torch.randn(5, 6, generator=gen)
    square = slope @ slope.mT + 1e-3 * torch.eye(6)
    expected = torch.linalg.solve(square.double(), right.double())
    close(variant(solve)(square, right), expected, 1e-3)
    close(solve(square.double(), right.double()), expected, 1e-9)


def test_the_way_between_poses_is_the_vector_of_its_rotation(variant: Variant):
    axes = torch.nn.functional.normalize(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    angles = torch.linspace(0.0, 3.1, 16)
    pose = torch.eye(4).repeat(16, 1, 1)
    spin = torch.linalg.cross((axes * angles[:, None])[:, None], torch.eye(3)[None]).mT  # spin @ v is axis x v
    pose[:, :3, :3] = torch.linalg.matrix_exp(spin)
    pose[:, :3, 3] = axes
    close(variant(pose_error)(torch.eye(4).repeat(16, 1, 1), pose)[:, :3], axes, 1e-6)
    actual = pose_error(torch.eye(4).repeat(16, 1, 1), pose)[:, 3:]
    close(actual.norm(dim=-1), angles, 1e-5)
    close((actual * axes).sum(-1), angles, 1e-4)
    close(pose_error(pose, pose), torch.zeros(16, 6), 1e-6)
    close(pose_error(pose, torch.eye(4).repeat(16, 1, 1)), -torch.cat((axes, actual), -1), 1e-6)


def test_angles_are_those_of_the_scene():
    degrees = 180.0 * (2 * torch.rand(20, 3, generator=torch.Generator().manual_seed(0)) - 1)
    for angles, quaternion in zip(degrees.tolist(), actions._quaternion(torch.deg2rad(degrees)), strict=True):
        close(quaternion, torch.tensor(scene._quaternion(tuple(angles))), 1e-6)


# --- any batch, any form ------------------------------------------------------------------------------------------

TERMS = [
    ("DeltaQposTerm", {"scale": 0.1}),
    ("QposTerm", {"scale": 0.7}),
    ("QposDenormalizedTerm", {}),
    ("QposNormalizedTerm", {}),
    ("EefPoseTerm", {"pose_dim": 6}),
    ("EefPoseTerm", {"iterations": 8}),
    ("QvelTerm", {"scale": 2.0}),
    ("QfTerm", {"scale": 2.0}),
    ("RelativeJointPositionAction", {"part_name": "arm", "scale": 0.1, "clip": 0.5}),
]


def some(sim, action_term, batch):
    """Return states and actions; actions of poses are near the tool's pose."""
    gen = torch.Generator().manual_seed(1)
    state = state_at(sim, row(*HOME) + 0.2 * torch.randn(*batch, 6, generator=gen), batch)
    middle = (
        {6: (*PLACE, 2.9, 0.1, 1.3), 7: (*PLACE, *DOWN)}[len(action_term.low)] if action_term.low[0] == -1.5 else 0.0
    )
    return state, torch.as_tensor(middle) + 0.05 * torch.randn(*batch, len(action_term.low), generator=gen)


@pytest.mark.parametrize(("func", "params"), TERMS)
def test_every_batch_gives_the_same(sim, func, params):
    result = term(func, sim, **params)
    state, action = some(sim, result, (2, 3))
    target = assert_pure(result.control, state, action)
    assert target.shape == (2, 3, len(result.joints)) and target.dtype == torch.float32
    assert (target != world.joint_positions(sim, state["world"], result.joints)).any(-1).all()
    close(result.control(state.reshape(6), action.reshape(6, -1)).reshape(2, 3, -1), target, 1e-6)
    close(result.control(state[1, 2], action[1, 2]), target[1, 2], 1e-6)
    close(torch.func.vmap(torch.func.vmap(result.control))(state, action), target, 1e-6)


@pytest.mark.parametrize(("func", "params"), TERMS)
def test_a_graph_of_a_term_gives_the_same(sim, func, params):
    result = term(func, sim, **params)
    inputs = some(sim, result, (3,))
    leaves, structure = flatten(inputs)
    graph, _ = traced(result.control, structure, leaves)
    loops = len(graph.graph.find_nodes(op="call_function", target=scan_op))
    assert loops == (func == "EefPoseTerm") and len(graph.graph.nodes) < 300  # however many iterations
    close(graph(*leaves)[0], result.control(*inputs), 1e-5)


def steps(env, scan, state, keys, actions):
    def one(state, row):
        state = env.step(state, row[1], env.draw(row[0]))
        return state, (state["obs"], state["terminated"])

    return scan(one, state, (keys, actions))


@pytest.mark.slow
def test_compiled_steps_are_the_eager_ones(traced_or_compiled):
    env = task({"pose": ("EefPoseTerm", {"pose_dim": 6})})
    form, keys = choose_form("on", "cpu"), rng.split(rng.key(0), 4 * 17).reshape(17, 4)
    chosen = row(*PLACE, 2.9, 0.1, 1.3) + 0.2 * (rng.uniform(rng.key(9), (16, 4, 6)) * 2.0 - 1.0)
    begin = env.reset(keys[0])
    with torch.no_grad():
        _, expected = steps(env, scan, begin, keys[1:], chosen)
        _, actual = form.jit(steps, env, form.scan)(begin, keys[1:], chosen)
        vmapped = torch.func.vmap(form.jit(steps, env, form.scan), (None, 1, 1))
        apart = vmapped(begin[:1], keys[1:, :, None], chosen[:, :, None])[1][0]
    for rows in (actual[0], apart[:, :, 0].transpose(0, 1)):  # forces of stiff drives, then positions and velocities
        close(rows[..., :6], expected[0][..., :6], 1e-2)
        close(rows[..., 6:], expected[0][..., 6:], 1e-4)
    assert not expected[1].any() and (expected[0][5:, :, 6:12].std(0) > 0.01).any()


# --- through a task -----------------------------------------------------------------------------------------------


def test_two_terms_share_the_joints_and_the_action():
    """`a_move` drives the first three to where they are and 0.01 rad on, `b_spin` turns the last three at a speed."""
    env = task({"b_spin": ("QvelTerm", {"joint_ids": [3, 4, 5], "scale": 0.5}), "a_move": ("DeltaQposTerm", FIRST)})
    assert isinstance(env.action_space, Box) and env.action_space.shape == (6,)
    action = row(1, 0, -1, 1, -0.5, 0.2).repeat(2, 1)
    begin = env.reset(rng.split(rng.key(0), 2))
    after = run(env, begin, action, 20)
    sim = env.scene
    speed = world.joint_velocities(sim, after["world"], sim.robot.joints)
    close(speed[:, 3:], row(0.5, -0.25, 0.1).repeat(2, 1), 1.5e-2)  # the arm below them speeds up
    way = world.joint_positions(sim, after["world"], sim.robot.joints) - row(*HOME)
    close(way[:, 3:], 0.8 * row(0.5, -0.25, 0.1).repeat(2, 1), 2e-2)  # 20 steps of 0.04 s
    assert (way[:, 0] > 0.1).all() and (way[:, 1].abs() < 2e-3).all() and (way[:, 2] < -0.1).all()
    close(after["action"], action)


def test_the_order_of_terms_is_that_of_their_names():
    env = task({"b": ("QvelTerm", {"joint_ids": [0], "scale": 0.4}), "a": ("QfTerm", {"joint_ids": [5], "scale": 0.2})})
    after = run(env, env.reset(rng.split(rng.key(0), 1)), row(1, 0.5)[None], 10)
    sim = env.scene
    force = world.joint_forces(sim, after["world"], sim.robot.joints)
    close(force[:, 5], row(0.2))
    close(world.joint_velocities(sim, after["world"], sim.robot.joints)[:, 0], row(0.2), 5e-3)


def test_a_force_accelerates_the_cart_by_newtons_law():
    """With the pole upright and free, `F = (M + m - (m l)^2 / (I + m l^2)) a`.

    M = m = 1, l = 0.47, I = (0.03^2 + 0.5^2) / 3: the pole counts 1 - 0.72537 of its mass.
    """
    env = task({"push": ("QfTerm", {"joint_ids": [0], "scale": 20.0})}, POLE, sim_steps_per_control=1)
    sim, joints = env.scene, env.scene.robot.joints
    begin = env.reset(rng.split(rng.key(0), 3))
    after = run(env, begin, row(0.5, 1, -0.25)[:, None], 1)
    mass = 2.0 - 0.47**2 / ((0.03**2 + 0.5**2) / 3 + 0.47**2)
    close(world.joint_velocities(sim, after["world"], joints)[:, 0], 0.01 / mass * row(10, 20, -5), 1e-4)
    close(world.joint_forces(sim, after["world"], joints)[:, 0], row(10, 20, -5))
    strong = task({"push": ("QfTerm", {"joint_ids": [0], "scale": 1000.0})}, POLE, sim_steps_per_control=1)
    after = run(strong, strong.reset(rng.split(rng.key(0), 1)), row(1)[:, None], 1)
    close(world.joint_forces(sim, after["world"], joints)[:, 0], row(100))  # max_effort


def test_a_velocity_drive_is_a_damper_towards_its_target():
    """The first step's force is damping * target, 200 N s/m * 0.5 m/s; the drive holds its speed, not its place."""
    robot = POLE | {"drive_pros": {"damping": {"slider_to_cart": 200.0}, "max_effort": 200.0}}
    env = task({"go": ("QvelTerm", {"joint_ids": [0], "scale": 0.5})}, robot, sim_steps_per_control=1)
    sim, joints = env.scene, env.scene.robot.joints
    begin = env.reset(rng.split(rng.key(0), 1))
    after = run(env, begin, row(1)[:, None], 1)
    mass = 2.0 - 0.47**2 / ((0.03**2 + 0.5**2) / 3 + 0.47**2)
    speed = world.joint_velocities(sim, after["world"], joints)[:, 0]
    close(speed, row(0.01 * 100 / (mass + 0.01 * 200)), 1e-3)  # the damper is integrated implicitly
    close(world.joint_forces(sim, run(env, after, row(1)[:, None], 1)["world"], joints)[:, 0], 100 - 200 * speed, 1e-3)
    after = run(env, after, row(1)[:, None], 40)
    close(world.joint_velocities(sim, after["world"], joints)[:, 0], row(0.5), 2e-2)
    stopped = run(env, after, row(0)[:, None], 60)
    assert (world.joint_velocities(sim, stopped["world"], joints)[:, 0].abs() < 0.1).all()
    assert (world.joint_positions(sim, stopped["world"], joints)[:, 0] > 0.15).all()


def test_a_saturated_velocity_drive_arrives_where_its_damping_suits_the_time_step():
    """From rest to 1 rad/s with 100 N m s/rad and at most 60 N m, and an inertia about z of about 3.5 kg m^2."""
    env = task({"go": ("QvelTerm", {"joint_ids": [0]})}, SLOW, sim_steps_per_control=1)
    sim, joints = env.scene, env.scene.robot.joints
    begin = env.reset(rng.split(rng.key(0), 1))
    close(world.joint_forces(sim, run(env, begin, row(1)[:, None], 1)["world"], joints)[:, 0], row(60))
    after = run(env, begin, row(1)[:, None], 100)
    close(world.joint_velocities(sim, after["world"], joints)[:, 0], row(1), 1e-2)


def test_a_pose_is_gone_to_in_a_task():
    env = task({"pose": ("EefPoseTerm", {})}, max_episode_steps=50)
    action = row(*PLACE, *DOWN).repeat(2, 1) + row(0.1, 0.2, -0.2, 0, 0, 0, 0) * row(0, 1)[:, None]
    after = run(env, env.reset(rng.split(rng.key(0), 2)), action, 30)
    place = world.site_pose(env.scene, after["world"], env.scene.robot.tcp["arm"])
    close(place[:, :3, 3], action[:, :3], 2e-3)
    close(place[0, :3, :3], row(0, 1, 0, 1, 0, 0, 0, 0, -1).reshape(3, 3), 5e-3)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("func", "params", "message"),
    [
        ("DeltaQposTerm", {"robot_uid": "ur"}, "params.robot_uid: no robot 'ur'"),
        ("QposTerm", {"part_name": "amr"}, "params.part_name: unknown part 'amr'; did you mean 'arm'"),
        ("QvelTerm", {"joint_ids": [6]}, "params.joint_ids: 6, but there are 6 joints"),
        ("EefPoseTerm", {"robot_uid": "ur"}, "params.robot_uid: no robot 'ur'"),
        ("EefPoseTerm", {"part_name": "hand"}, "params.part_name: unknown part 'hand'"),
        ("EefPoseTerm", {"pose_dim": 5}, "params: pose_dim: expected 6 or 7"),
        ("QfTerm", {"scale": 0.0}, "params: scale: must be at least 1e-06"),
        ("QposNormalizedTerm", {"range": [1.0, 1.0]}, r"range: \[1.0, 1.0\], expected the lower value first"),
        ("QfTerm", {"scal": 1.0}, "params: scal: unknown key; did you mean 'scale'"),
        ("EefPoseTerm", {"joint_ids": [0]}, "params: joint_ids: unknown key"),
        (RELATIVE, {}, "params: give either part_name or joint_names"),
        (RELATIVE, {"part_name": "arm", "joint_names": ["elbow_joint"]}, "params: give either part_name or joint_na"),
        (RELATIVE, {"part_name": "hand"}, "params.part_name: unknown part 'hand'; did you mean 'arm'|known: arm"),
        (RELATIVE, {"joint_names": ["elbow"]}, "params.joint_names: unknown joint 'elbow'; did you mean 'elbow_joint'"),
        (RELATIVE, {"joint_names": ["elbow_joint"] * 2}, "params.joint_names: names joint 'elbow_joint' twice"),
        (RELATIVE, {"part_name": "arm", "scale": [1.0]}, "params.scale: 1 numbers for 6 joints; give one per joint"),
        (RELATIVE, {"part_name": "arm", "clip": 0.0}, "params: clip: must be above 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(sim, func, params, message):
    with pytest.raises(ConfigError, match=message):
        term(func, sim, **params)


def test_robots_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="no end effector of 'arm'; known: none"):
        term("EefPoseTerm", made(POLE))
    simulated = made({"model": UNDRIVEN_JOINT})
    with pytest.raises(ConfigError, match="joint 'robot/slack' has no actuator"):
        term("DeltaQposTerm", simulated)
    assert len(term("DeltaQposTerm", simulated, joint_ids=[0, 1]).low) == 2
    with pytest.raises(ConfigError, match="joint 'robot/rail' has no limits, which this term needs; give the joint a"):
        term("QposTerm", simulated, joint_ids=[0])
    assert term("QposTerm", simulated, joint_ids=[1]).high == (pi,)
    with pytest.raises(ConfigError, match="drives joint 'robot/elbow_joint', which 'a' also drives"):
        task({"a": ("DeltaQposTerm", {"joint_ids": [2]}), "b": ("QfTerm", {"joint_ids": [1, 2]})})
