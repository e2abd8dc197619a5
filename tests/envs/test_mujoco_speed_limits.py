"""Speed limits of joints (`max_velocity`) and of objects (`max_linear_velocity`, `max_angular_velocity`)."""

import pytest
import torch
from support.checks import assert_pure, close

from ecrl.config.model import validate_section
from ecrl.envs import make_env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import advance, simulation, start
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.mujoco.task_scale import scaled
from ecrl.envs.mujoco.tasks.push_cube import PushCubeConfig
from ecrl.errors import ConfigError

pytest.importorskip("mujoco.batch")

FLOATING = {"mass": 2.0, "has_gravity": False, "linear_damping": 0.0, "angular_damping": 0.0}
FAST, SPIN = torch.tensor([[3.0, 0.0, 4.0], [0.3, 0.0, 0.4]]), torch.tensor([[0.0, 6.0, 0.0], [0.0, 0.5, 0.0]])


def scene(attrs=None, backend="mujoco", **robot):
    cube = {"uid": "cube", "shape": {"shape_type": "Cube", "size": [0.1] * 3}, "init_pos": [1.5, 0.0, 1.0]}
    objects = [cube | {"attrs": FLOATING | (attrs or {})}]
    cfg = {"robot": {"uid": "r"} | robot, "rigid_object": objects, "physics": {"backend": backend}}
    return simulation(validate_section(SceneConfig, cfg, "scene"))


def thrown(sim):
    """Two worlds after one environment step, in which the cube started at 5 m/s and 6 rad/s, or at a tenth of this."""
    begin = world.with_body_velocity(sim, start(sim, [2]), "cube", FAST, SPIN)
    after, failed = advance(sim, begin, world.hold_controls(sim, begin))
    assert not failed.any()
    return begin, after


@pytest.mark.parametrize("backend", ["mujoco", pytest.param("warp", marks=pytest.mark.long)])
def test_an_object_flies_at_its_largest_speed_along_its_direction(backend):
    if backend == "warp":
        pytest.importorskip("mujoco_warp", reason="needs the extra warp")
    sim = scene({"max_linear_velocity": 1.0, "max_angular_velocity": 2.0}, backend)
    begin, after = thrown(sim)
    linear, angular = world.body_velocity(sim, after, "cube")
    close(linear, torch.tensor([[0.6, 0.0, 0.8], [0.3, 0.0, 0.4]]), 1e-6)
    close(angular, torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.5, 0.0]]), 1e-6)
    moved = world.body_position(sim, after, "cube") - world.body_position(sim, begin, "cube")
    close(moved, 0.04 * linear, 1e-6)


@pytest.mark.parametrize("name", ["max_linear_velocity", "max_angular_velocity"])
def test_each_limit_of_an_object_is_of_its_own_velocity(name):
    sim = scene({name: 1.0})
    linear, angular = world.body_velocity(sim, thrown(sim)[1], "cube")
    speeds = torch.linalg.vector_norm(linear, dim=-1), torch.linalg.vector_norm(angular, dim=-1)
    limits = (1.0, 6.0) if name == "max_linear_velocity" else (5.0, 1.0)
    close(torch.stack([speed[0] for speed in speeds]), torch.tensor(limits), 1e-5)


def test_limits_that_are_not_reached_change_no_bit():
    free = scene(drive_pros={"stiffness": 900.0})
    limited = scene(
        {"max_linear_velocity": 50.0, "max_angular_velocity": 60.0},
        drive_pros={"stiffness": 900.0, "max_velocity": 40.0},
    )
    rows = []
    for sim in (free, limited):
        at, control = thrown(sim)[1], world.hold_controls(sim, start(sim, [2])) + 0.1
        for _ in range(5):
            at, _ = advance(sim, at, control)
        rows.append(at["physics"])
    assert torch.equal(*rows)


def test_joints_turn_at_most_at_their_largest_speed():
    """The wrist's targets are 1 rad away: in a step of 0.04 s, a limited joint turns by 0.04 s times the limit."""
    sim = scene(drive_pros={"max_velocity": {"wrist_[12].*": 0.5}})
    begin = start(sim, [3])
    after, _ = advance(sim, begin, world.hold_controls(sim, begin) + torch.tensor([0.0, 0.0, 0.0, 1.0, -1.0, 1.0]))
    joints = sim.robot.joints
    turned = world.joint_positions(sim, after, joints) - world.joint_positions(sim, begin, joints)
    close(turned[:, 3:5], 0.04 * torch.tensor([0.5, -0.5]).expand(3, 2), 1e-6)
    assert (turned[:, 5] > 0.05).all(), "the last joint has no limit"
    close(world.joint_velocities(sim, after, joints)[:, 3:5], torch.tensor([0.5, -0.5]).expand(3, 2), 1e-6)
    assert_pure(lambda at: advance(sim, at, world.hold_controls(sim, at))[0], after)


def test_a_task_limits_the_speeds_of_its_robot():
    env = make_env({"id": "PushCubeRL", "cfg": {"robot": {"uid": "r", "drive_pros": {"max_velocity": 0.5}}}})
    state = env.reset(torch.arange(2))
    for _ in range(3):
        state = env.step(state, torch.ones(2, 6), env.draw(torch.arange(2)))
    speeds = world.joint_velocities(env.scene, state["world"], env.scene.robot.joints)
    assert (speeds <= 0.5 + 1e-6).all() and (speeds > 0.49).any()


def test_the_largest_speed_of_an_object_scales_with_the_lengths():
    cube = {"uid": "cube", "shape": {"shape_type": "Cube", "size": [0.1] * 3}, "attrs": {"max_linear_velocity": 1.0}}
    cfg = validate_section(PushCubeConfig, {"scale": 0.5, "rigid_object": [cube]}, "env.cfg")
    assert scaled(cfg).rigid_object[0].attrs.max_linear_velocity == 0.5


@pytest.mark.parametrize(
    ("speed", "line"),
    [
        (0.0, "robot.drive_pros.max_velocity: 0.0 of joint 'shoulder_pan_joint', expected more than 0"),
        ({"hip": 1.0}, "robot.drive_pros.max_velocity: unknown joint 'hip'; "),
        ([1.0], "robot.drive_pros.max_velocity: 1 values for 6 joints: "),
    ],
)
def test_one_clear_line(speed, line):
    with pytest.raises(ConfigError) as raised:
        scene(drive_pros={"max_velocity": speed})
    assert line in str(raised.value) and "\n" not in str(raised.value)
