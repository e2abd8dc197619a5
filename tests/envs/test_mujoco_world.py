"""Worlds: reads equal MuJoCo's numbers, writes change only their target, pushes obey Newton's law."""

import math

import pytest
import torch
from support.checks import Variant, assert_pure, close

pytest.importorskip("mujoco.batch")

import mujoco
import numpy as np
from tensordict import TensorDict

from ecrl.compile.trace import traced
from ecrl.config.model import validate_section
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import advance, simulation, start, to_data, with_current_sensors
from ecrl.envs.mujoco.robots import kinematics
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.errors import ConfigError
from ecrl.pytree import flatten

BALL = {"shape": {"shape_type": "Sphere", "radius": 0.05}}
STILL = {"mass": 2.0, "linear_damping": 0.0, "angular_damping": 0.0}
SCENE = {
    "robot": {"uid": "ur", "init_pos": [0.1, 0.2, 0.3], "init_rot": [0.0, 0.0, 30.0]},
    "rigid_object": [
        BALL | {"uid": "ball", "init_pos": [2.0, 0.0, 1.0], "attrs": STILL},
        BALL | {"uid": "damped", "init_pos": [2.0, 1.0, 1.0], "attrs": STILL | {"linear_damping": 3.0}},
        BALL | {"uid": "hand", "init_pos": [-2.0, 0.0, 1.0], "body_type": "kinematic"},
        BALL | {"uid": "rock", "init_pos": [-2.0, 1.0, 1.0], "body_type": "static"},
    ],
}
EVERY_JOINT = """<mujoco><compiler angle="degree"/><worldbody>
<body name="moved" mocap="true" pos="1 2 3" quat=".5 .5 .5 .5"><geom size=".1"/>
 <body name="on_it"  pos=".1 0 0"><joint name="m1" axis="0 0 1"/><geom size=".1"/></body></body>
<body name="free" pos="0 0 1"><freejoint/><geom size=".1"/>
 <body name="a" pos=".1 .2 .3" euler="30 40 50"><joint name="h1" axis="1 2 3" pos=".05 .1 0" ref="20"/>
  <joint name="s1" type="slide" axis="0 1 1" ref=".3"/><geom size=".1"/>
  <body name="b" pos=".3 0 .2" quat=".1 .2 .3 .4"><joint name="b1" type="ball" pos=".1 0 .2"/><geom size=".1"/>
   <body name="c" pos="0 0 .5"><joint name="h2" axis="0 1 0"/><joint name="h3" axis="0 0 1"/><geom size=".1"/>
    <site name="tip" pos=".1 -.2 .3" euler="10 20 30"/></body></body></body></body>
<body name="rail" pos="1 0 0"><joint name="s2" type="slide" axis="1 0 0"/><geom size=".1"/></body>
<body name="fixed" pos="1 2 0" euler="0 0 45"><geom size=".1"/></body>
</worldbody></mujoco>"""


@pytest.fixture(scope="module")
def sim():
    return simulation(validate_section(SceneConfig, SCENE, "scene"))


def shaken(sim, batch=(3,), steps=4):
    """Return worlds after a few steps with random controls."""
    home = torch.tensor(sim.home.ctrl).float()
    state, gen = start(sim, batch), torch.Generator().manual_seed(0)
    for _ in range(steps):
        control = home + 0.3 * torch.randn(*batch, sim.nu, generator=gen)
        state, bad = advance(sim, state, control)
        assert not bad.any()
    return state


def test_poses_and_jacobians_are_mujocos_for_every_kind_of_joint():
    model = mujoco.MjModel.from_xml_string(EVERY_JOINT)
    data, rng = mujoco.MjData(model), np.random.default_rng(0)
    chains = [kinematics.chain(model, body) for body in range(model.nbody)]
    tip = kinematics.constant_pose(model.site("tip").pos, model.site("tip").quat)
    tip = kinematics.chain(model, int(model.site("tip").bodyid[0]), tip)
    for _ in range(5):
        data.qpos[:] = rng.normal(size=model.nq)
        data.mocap_pos[:], data.mocap_quat[:] = rng.normal(size=(1, 3)), rng.normal(size=(1, 4))
        positions = torch.tensor(np.concatenate([data.qpos, data.mocap_pos[0], data.mocap_quat[0]]))
        mujoco.mj_forward(model, data)
        for body, chain in enumerate(chains):
            pose, _ = kinematics.follow(chain, positions)
            close(pose[:3, 3], data.xpos[body], 1e-12)
            close(pose[:3, :3], data.xmat[body].reshape(3, 3), 1e-12)
            assert pose[3].tolist() == [0.0, 0.0, 0.0, 1.0]
        pose, _ = kinematics.follow(tip, positions)
        close(pose[:3, 3], data.site("tip").xpos, 1e-12)
        dofs = [int(model.joint(name).dofadr[0]) for name in ("h1", "s1", "h2", "h3", "s2")]
        linear, angular = np.zeros((3, model.nv)), np.zeros((3, model.nv))
        mujoco.mj_jacSite(model, data, linear, angular, 0)
        close(kinematics.jacobian(tip, positions, dofs), np.concatenate([linear, angular])[:, dofs], 1e-12)


def test_the_jacobian_is_the_slope_of_the_pose(sim):
    q = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chain = world._to_site(sim, sim.robot.tcp["arm"])

    def place(joints):
        rest = torch.tensor(sim.home.qpos[6:]).expand(*joints.shape[:-1], -1)
        mocap = rest.new_zeros(*joints.shape[:-1], 6)
        one = torch.ones_like(mocap[..., :1])
        return torch.cat((joints, rest, mocap[..., :3], one, mocap[..., 3:]), -1)

    slope = torch.func.vmap(torch.func.jacrev(lambda q: kinematics.follow(chain, place(q))[0][:3, 3]))(q)
    close(kinematics.jacobian(chain, place(q), list(range(6)))[:, :3], slope, 1e-9)


def test_what_is_read_is_mujocos(sim):
    state = shaken(sim)
    joints, tcp = sim.robot.joints, sim.robot.tcp["arm"]
    data = to_data(sim, state["physics"][1])
    close(world.qpos(sim, state)[1], data.qpos, 1e-6)
    close(world.qvel(sim, state)[1], data.qvel, 1e-5)
    close(world.time(sim, state), torch.full((3,), 4 * 0.04), 1e-6)
    close(world.joint_positions(sim, state, joints[::-1])[1], data.qpos[:6][::-1].copy(), 1e-6)
    close(world.joint_velocities(sim, state, joints[2:4])[1], data.qvel[2:4], 1e-5)
    pose = world.site_pose(sim, state, tcp)[1]
    close(pose[:3, 3], data.site(tcp).xpos, 2e-6)
    close(pose[:3, :3], data.site(tcp).xmat.reshape(3, 3), 2e-6)
    for name in ("ball", "hand", "rock", "ur/wrist_2_link", "ur"):
        close(world.body_pose(sim, state, name)[1, :3, 3], data.body(name).xpos, 2e-6)
    linear, angular = np.zeros((3, sim.model.nv)), np.zeros((3, sim.model.nv))
    mujoco.mj_jacSite(sim.model, data, linear, angular, sim.model.site(tcp).id)
    close(world.site_jacobian(sim, state, tcp, joints)[1], np.concatenate([linear, angular])[:, :6], 2e-6)
    low, high = world.joint_limits(sim, joints)
    assert low == tuple(-x for x in high) and high[2] == pytest.approx(math.pi)


def test_sensors_are_of_the_last_substep_and_sensed_ones_of_the_state(sim):
    control = torch.tensor(sim.home.ctrl).float().expand(2, -1) + 0.1
    joints = sim.robot.joints
    begin = start(sim, (2,))
    close(world.joint_forces(sim, begin, joints), torch.zeros(2, 6))  # held where it is
    first = world.joint_forces(sim, with_current_sensors(sim, begin, control), joints)
    close(first, torch.tensor([[330.0, 330.0, 150.0, 56.0, 56.0, 56.0]] * 2))  # 0.1 rad away: all but the limit
    data = to_data(sim, begin["physics"][0])
    data.ctrl[:] = control[0].numpy()
    for _ in range(sim.substeps):
        mujoco.mj_step(sim.model, data)
    after, _ = advance(sim, begin, control)
    close(world.joint_forces(sim, after, joints)[0], data.sensordata, 1e-5)
    close(world.sensor(sim, after, f"{joints[0]}_force")[0], data.sensordata[:1], 1e-5)


def test_what_is_written_is_there_and_nowhere_else(sim):
    state = shaken(sim)
    joints, values = sim.robot.joints[4:1:-2], torch.tensor([0.5, -0.25])
    after = assert_pure(world.with_joint_positions, sim, state, joints, values)
    close(world.joint_positions(sim, after, joints), values.expand(3, 2), 1e-7)
    assert (after["physics"] != state["physics"]).sum(-1).tolist() == [2, 2, 2]
    after = world.with_joint_velocities(sim, state, joints, values)
    close(world.joint_velocities(sim, after, joints), values.expand(3, 2), 1e-7)
    place, quaternion = torch.tensor([[0.5, 1.5, 2.5]] * 3), torch.tensor([0.0, 0.0, 0.0, 1.0])
    for name in ("ball", "hand"):
        after = world.with_body_pose(sim, state, name, place, quaternion)
        close(world.body_pose(sim, after, name)[:, :3, 3], place, 1e-7)
        close(world.body_pose(sim, after, name)[:, 0, 0], -torch.ones(3), 1e-7)
        close(
            world.body_pose(sim, world.with_body_pose(sim, state, name, place), name)[:, :3, :3],
            torch.eye(3).repeat(3, 1, 1),
            1e-4,
        )
        assert (after["physics"] != state["physics"]).sum(-1).max() <= 7
    for name in ("rock", "ur/wrist_2_link", "world"):
        with pytest.raises(ConfigError, match=f"body '{name}' cannot be moved"):
            world.with_body_pose(sim, state, name, place)


def test_worlds_of_any_batch_shape_start_alike(sim):
    many = start(sim, (4, 3))
    assert many.batch_size == torch.Size([4, 3]) and sorted(many.keys()) == ["physics", "sensors"]
    assert (many["physics"] == start(sim, (1,))["physics"][0]).all()
    after, bad = advance(sim, many, torch.tensor(sim.home.ctrl).float().expand(4, 3, -1))
    assert after.batch_size == many.batch_size and bad.shape == (4, 3) and not bad.any()
    one, _ = advance(sim, many[0, 0], torch.tensor(sim.home.ctrl).float())
    assert torch.equal(one["physics"], after["physics"][2, 1])


def test_a_push_is_newtons_and_damping_takes_its_share(sim):
    """4 substeps of 0.01 s: v = (F/m - g) t; a damped velocity is divided by 1 + 3 dt in each."""
    begin = start(sim, (1,))
    force = world.push(sim, "ball", torch.tensor([[4.0, 0.0, 30.0]]))
    home = torch.tensor(sim.home.ctrl).float().expand(1, -1)
    after, _ = advance(sim, begin, home, force)
    close(world.body_velocity(sim, after, "ball")[0], torch.tensor([[0.08, 0.0, (15.0 - 9.81) * 0.04]]), 1e-6)
    after, _ = advance(sim, begin, home)  # a force acts for one step
    close(world.body_velocity(sim, after, "ball")[0], torch.tensor([[0.0, 0.0, -9.81 * 0.04]]), 1e-6)
    speed = 0.0
    for _ in range(4):
        speed = (speed - 9.81 * 0.01) / 1.03
    close(world.body_velocity(sim, after, "damped")[0][:, 2], torch.tensor([speed]), 1e-6)
    with pytest.raises(ConfigError, match="body 'rock' is not free"):
        world.push(sim, "rock", torch.zeros(1, 3))


def test_angular_velocity_is_in_the_world(sim):
    """MuJoCo keeps it in the frame of the body: turned by 90 degrees about x, its y is the world's z."""
    state, quaternion = start(sim, (1,)), torch.tensor([math.sqrt(0.5), math.sqrt(0.5), 0.0, 0.0])
    state = world.with_body_pose(sim, state, "ball", None, quaternion)
    first = world._columns(sim, "QVEL").start + int(sim.model.joint("ball").dofadr[0]) + 4
    state = world._write(sim, state, [first], torch.tensor([2.0]))
    close(world.body_velocity(sim, state, "ball")[1], torch.tensor([[0.0, 0.0, 2.0]]), 1e-6)


def test_a_diverged_world_is_returned_with_a_flag(sim):
    state = shaken(sim)
    control = torch.tensor(sim.home.ctrl).float().repeat(3, 1)
    fine, bad = advance(sim, state, control)
    assert bad.tolist() == [False] * 3
    for wrong in (torch.nan, torch.inf, 1e12):
        control[1, 2] = wrong
        after, bad = advance(sim, state, control)
        assert bad.tolist() == [False, True, False]
        assert torch.equal(after["physics"][1], state["physics"][1])
        assert torch.equal(after["sensors"][1], state["sensors"][1])
        assert torch.equal(after["physics"][::2], fine["physics"][::2])


def test_numbers_of_the_model_differ_between_worlds():
    varied = (("body_mass", "ball"), ("body_inertia", "ball"))
    sim = simulation(validate_section(SceneConfig, SCENE, "scene"), (), varied)
    state = start(sim, (3,))
    close(world.parameter(sim, state, "body_mass", "ball"), torch.full((3, 1), 2.0))
    masses = torch.tensor([[1.0], [2.0], [4.0]])
    state = assert_pure(world.with_parameter, sim, state, "body_mass", "ball", masses)
    inertia = world.parameter(sim, state, "body_inertia", "ball")
    state = world.with_parameter(sim, state, "body_inertia", "ball", inertia * masses / 2.0)
    force = world.push(sim, "ball", torch.tensor([[8.0, 0.0, 0.0]]).expand(3, 3))
    after, _ = advance(sim, state, torch.tensor(sim.home.ctrl).float().expand(3, -1), force)
    close(world.body_velocity(sim, after, "ball")[0][:, 0], torch.tensor([0.32, 0.16, 0.08]), 1e-6)
    with pytest.raises(ConfigError, match="geom_friction of 'ball' is the same in all environments"):
        world.parameter(sim, state, "geom_friction", "ball")


def test_a_scene_needs_neither_robot_nor_sensors():
    ball = BALL | {"uid": "ball", "init_pos": [0.0, 0.0, 3.0], "attrs": STILL}
    sim = simulation(validate_section(SceneConfig, {"rigid_object": [ball]}, "scene"))
    begin = start(sim, (2,))
    assert list(begin.keys()) == ["physics"] and sim.robot.joints == () and (sim.nu, sim.nv) == (0, 6)
    after, bad = advance(sim, begin, torch.zeros(2, 0))
    close(world.body_velocity(sim, after, "ball")[0][:, 2], torch.full((2,), -9.81 * 0.04), 1e-6)
    assert not bad.any()


def test_the_arm_pushes_a_cube_in_any_direction():
    """Move the tool behind the cube and 0.3 m further, by inverse kinematics from poses and Jacobians."""
    cube = {"uid": "cube", "shape": {"shape_type": "Cube", "size": [0.1, 0.1, 0.1]}, "init_pos": [-0.6, -0.4, 0.05]}
    cube["attrs"] = {"mass": 2.0, "static_friction": 1.0, "linear_damping": 2.0, "angular_damping": 2.0}
    sim = simulation(validate_section(SceneConfig, {"robot": {}, "rigid_object": [cube]}, "scene"))
    joints, tcp, down = sim.robot.joints, sim.robot.tcp["arm"], torch.tensor([0.0, 0.0, -1.0])
    angles, there = torch.arange(4) * (math.pi / 2), torch.tensor([-0.6, -0.4, 0.05])
    along = torch.stack((angles.cos(), angles.sin(), torch.zeros(4)), -1)

    def solved(state, place):
        for _ in range(20):
            pose, slope = world.site_pose(sim, state, tcp), world.site_jacobian(sim, state, tcp, joints)
            rotation = torch.linalg.cross(pose[..., :3, 2], down.expand(4, 3))
            error = torch.cat((place - pose[..., :3, 3], rotation), -1).unsqueeze(-1)
            change = slope.mT @ torch.linalg.solve(slope @ slope.mT + 1e-3 * torch.eye(6), error)
            q = world.joint_positions(sim, state, joints) + change.squeeze(-1)
            state = world.with_joint_positions(sim, state, joints, q)
        return q

    def moved(state, place, steps):
        begin, end = world.joint_positions(sim, state, joints), solved(state, place)
        for i in range(steps):
            state, bad = advance(sim, state, begin + (end - begin) * min(1.0, (i + 1) / (steps - 5)))
            assert not bad.any()
        close(world.site_pose(sim, state, tcp)[..., :3, 3], place, 5e-3)
        return state

    state = moved(start(sim, (4,)), there - 0.15 * along + torch.tensor([0.0, 0.0, 0.2]), 30)
    state = moved(state, there - 0.15 * along, 20)
    close(world.body_pose(sim, state, "cube")[:, :3, 3], there.expand(4, 3), 1e-3)
    for part in range(5):
        state = moved(state, there - 0.15 * along + 0.06 * (part + 1) * along, 10)
    way = world.body_pose(sim, state, "cube")[:, :3, 3] - there
    assert ((way * along).sum(-1) > 0.18).all() and (way[:, 2].abs() < 2e-3).all()
    assert (world.body_pose(sim, state, "cube")[:, 2, 2] > 0.999).all()  # upright


def test_unknown_names_are_refused(sim):
    state = start(sim, (1,))
    for read, name, message in (
        (world.body_pose, "bal", "body 'bal' is not in the scene; the scene has: world, ur, ur/shoulder_pan_link"),
        (world.site_pose, "tcp", "site 'tcp' is not in the scene; the scene has: ur/arm_tcp"),
        (world.sensor, "touch", "sensor 'touch' is not in the scene; the scene has: ur/shoulder_pan_joint_force"),
        (world.joint_positions, ("elbow",), "joint 'elbow' is not in the scene; the scene has: ur/shoulder_pan_joint"),
        (world.joint_velocities, ("ball",), "joint 'ball' is not a hinge or slide; use the pose of its body"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(sim, state, name)


@pytest.mark.parametrize("form", ["eager", "compiled", "vmapped"])
def test_a_step_is_equal_in_every_variant(sim, form):
    state = shaken(sim)

    def step(physics, sensors, control):
        world = TensorDict({"physics": physics, "sensors": sensors}, physics.shape[:-1])
        after, bad = advance(sim, world, control)
        return after["physics"], after["sensors"], bad

    inputs = state["physics"], state["sensors"], torch.tensor(sim.home.ctrl).float().repeat(3, 1)
    for a, b in zip(Variant(form)(step)(*inputs), step(*inputs), strict=True):
        assert torch.equal(a, b)


def test_what_is_read_and_written_is_the_same_in_a_graph(sim):
    def steps(state, control):
        state = world.with_body_pose(sim, state, "ball", control[:, :3])
        after, bad = advance(sim, state, control, world.push(sim, "ball", control[:, :3]))
        tcp = sim.robot.tcp["arm"]
        actual = world.site_pose(sim, after, tcp), world.site_jacobian(sim, after, tcp, sim.robot.joints)
        return (
            after,
            bad,
            actual,
            world.body_velocity(sim, after, "ball"),
            world.joint_forces(sim, after, sim.robot.joints),
        )

    inputs = shaken(sim), torch.tensor(sim.home.ctrl).float().repeat(3, 1)
    leaves, structure = flatten(inputs)
    graph, out = traced(steps, structure, leaves)
    expected, same = flatten(steps(*inputs))
    assert out == same and any("mujoco_step" in str(node.target) for node in graph.graph.nodes)
    for a, b in zip(graph(*leaves), expected, strict=True):
        close(a, b, 1e-6)


def test_hold_controls_keep_the_robot_in_place():
    """A geared position drive gets gear * q. A motor and a velocity drive keep their control of the start."""
    ball = '<geom size=".1" contype="0" conaffinity="0"/>'
    slides = "".join(f'<body name="{n}"><joint name="{n}" type="slide"/>{ball}</body>' for n in "abcd")
    drives = '<position joint="a" kp="50" kv="9" gear="2"/><motor joint="b"/><velocity joint="d" kv="5"/>'
    xml = f'<mujoco><option gravity="0 0 0"/><worldbody>{slides}</worldbody><actuator>{drives}</actuator></mujoco>'
    sim = simulation(validate_section(SceneConfig, {"mjcf": xml}, "scene"))
    now = world.with_joint_positions(sim, start(sim, (2,)), "abcd", torch.tensor([[0.3, 0.4, 0.5, 0.6]] * 2))
    control = assert_pure(world.hold_controls, sim, now)
    close(control, [[0.6, 0.0, 0.0]] * 2)
    after, failed = advance(sim, now, control)
    assert not failed.any()
    close(world.joint_positions(sim, after, "a"), [[0.3]] * 2, 1e-6)
