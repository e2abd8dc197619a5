"""PickCube, StackCube and OpenDrawer: their numbers, success and failure, and that a scripted arm succeeds."""

import pytest
import torch
from support.checks import assert_pure, close

from ecrl import rng
from ecrl.envs import make_env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.terms.joints import opening_of
from ecrl.envs.validate import check_fields
from ecrl.errors import ConfigError

STEP = 0.03  # m, motion of the end effector for an action of 1
N = 16


def keys(n=N, seed=0):
    return rng.split(rng.key(seed), n)


def tool(env, state):
    return world.site_pose(env.scene, state["world"], env.scene.robot.tcp["arm"])[..., :3, 3]


def place(env, state, uid):
    return world.body_position(env.scene, state["world"], uid)


def towards(offset, grip):
    """Return the action of a motion (m), and of the gripper: 1 opens it."""
    grip = torch.as_tensor(grip, dtype=torch.float32).expand(len(offset)).unsqueeze(-1)
    return torch.cat(((offset / STEP).clamp(-1.0, 1.0), grip), -1)


def grasping(env, state, then):
    """Return actions that grasp the cube from above, and then move it by `then`, m."""
    offset = place(env, state, "cube") - tool(env, state)
    above = torch.linalg.vector_norm(offset[:, :2], dim=-1, keepdim=True) > 0.015
    down = offset + above * offset.new_tensor([0.0, 0.0, 0.1])
    near, held = torch.linalg.vector_norm(offset, dim=-1) < 0.02, state["info", "metrics", "grasped"] > 0.0
    motion = torch.where(held.unsqueeze(-1), then, down)
    return towards(motion, torch.where(near | held, -1.0, 1.0))


def episode(env, act, steps=100):
    """Run one episode of each environment. Return its last states, and how many succeeded."""
    state, succeeded = env.reset(keys()), torch.zeros(N, dtype=torch.bool)
    ended = succeeded
    for t in range(steps):
        state = env.step(state, act(state), env.draw(rng.fold_in(keys(), t)))
        succeeded, ended = succeeded | (state["info", "success"] & ~ended), ended | state["terminated"]
    return state, int(succeeded.sum())


@pytest.mark.parametrize(("name", "width"), [("PickCubeRL", 66), ("StackCubeRL", 79), ("OpenDrawerRL", 60)])
def test_the_tasks_are_pure_environments(name, width):
    env = make_env(name)
    check_fields(env, name)
    assert env.observation_space.shape == (width,) and env.action_space.shape == (4,)
    assert env.scene.dt == pytest.approx(0.04)
    state = env.reset(keys(4))
    assert_pure(env.step, state, torch.full((4, 4), 0.5), env.draw(keys(4)))


def test_a_scripted_arm_picks_the_cube_up():
    env = make_env("PickCubeRL")

    def act(state):
        return grasping(env, state, state["targets", "goal_pose"] - place(env, state, "cube"))

    _, succeeded = episode(env, act, 80)
    assert succeeded >= N - 1


def test_a_cube_at_the_goal_without_a_grasp_is_no_success():
    env = make_env("PickCubeRL")
    state = env.reset(keys())
    assert (state["info", "metrics", "distance_to_goal"] >= 0.1).all()
    goal = place(env, state, "cube")
    state = state.copy().set("targets", state["targets"].copy().set("goal_pose", goal))
    after = env.step(state, torch.zeros(N, 4), env.draw(keys()))
    assert (after["info", "metrics", "distance_to_goal"] < 0.01).all() and not after["info", "success"].any()


@pytest.mark.parametrize("name", ["PickCubeRL", "StackCubeRL"])
def test_a_cube_that_falls_below_the_floor_is_a_failure(name):
    env = make_env(
        {"name": name, "cfg": {"mjcf": "<mujoco><option timestep='0.01'/><worldbody/></mujoco>"}}
    )  # without a floor
    state = env.reset(keys(2))
    for t in range(6):
        state = env.step(state, torch.zeros(2, 4), env.draw(keys(2, t)))
    assert (place(env, state, "cube")[:, 2] < -0.1).all() and state["info", "fail"].all() and state["terminated"].all()


def test_a_scripted_arm_stacks_the_cubes():
    env = make_env("StackCubeRL")

    def act(state):
        error = place(env, state, "base") + torch.tensor([0.0, 0.0, 0.052]) - place(env, state, "cube")
        level = torch.linalg.vector_norm(error[:, :2], dim=-1, keepdim=True) < 0.012
        lift = error + ~level * torch.tensor([0.0, 0.0, 0.06])
        actions = grasping(env, state, lift)
        done = level[:, 0] & (error[:, 2].abs() < 0.006)
        return torch.where(done.unsqueeze(-1), torch.tensor([0.0, 0.0, 0.0, 1.0]), actions)

    _, succeeded = episode(env, act)
    assert succeeded >= N - 4


def test_cubes_on_each_other_are_a_success_only_at_rest_and_released():
    env = make_env("StackCubeRL")
    state = env.reset(keys())
    on_top = place(env, state, "base") + torch.tensor([0.0, 0.0, 0.05])
    placed = state.copy().set("world", world.with_body_pose(env.scene, state["world"], "cube", on_top))
    after = env.step(placed, torch.zeros(N, 4), env.draw(keys()))
    assert after["info", "success"].all()
    for shift in ([0.0, 0.0, 0.04], [0.03, 0.0, 0.0]):  # falling, and beside the place
        moved = world.with_body_pose(env.scene, state["world"], "cube", on_top + torch.tensor(shift))
        after = env.step(state.copy().set("world", moved), torch.zeros(N, 4), env.draw(keys()))
        assert not after["info", "success"].any()


def test_a_scripted_arm_opens_the_drawer():
    env = make_env("OpenDrawerRL")

    def act(state):
        outwards = world.body_pose(env.scene, state["world"], "handle")[:, :3, 0]
        offset = place(env, state, "handle") - 0.03 * outwards - tool(env, state)  # to the gap behind the handle
        above = torch.linalg.vector_norm(offset[:, :2], dim=-1, keepdim=True) > 0.01
        down = offset + above * offset.new_tensor([0.0, 0.0, 0.08])
        is_low = offset[:, 2:].abs() < 0.02
        return towards(torch.where(is_low, 0.03 * outwards, down), -1.0)

    state, succeeded = episode(env, act)
    assert succeeded >= N - 3
    close(state["info", "metrics", "opening"], opening_of(env.scene, state["world"], "drawer_slide"))


def test_the_opening_is_measured_between_the_limits_of_the_joint():
    env = make_env("OpenDrawerRL")
    state = env.reset(keys(2))
    close(opening_of(env.scene, state["world"], "drawer_slide"), torch.zeros(2), tol=1e-3)
    slide = torch.tensor([[0.1], [0.225]])  # of 0.25 m
    moved = world.with_joint_positions(env.scene, state["world"], ("drawer_slide",), slide)
    close(opening_of(env.scene, moved, "drawer_slide"), [0.4, 0.9])
    after = env.step(state.copy().set("world", moved), torch.zeros(2, 4), env.draw(keys(2)))
    assert after["info", "success"].tolist() == [False, True]
    close(after["info", "rewards", "opening_reward"], after["info", "metrics", "opening"] - torch.tensor([0.4, 0.9]))


def test_a_joint_without_limits_has_no_opening():
    wheel = """<mujoco><worldbody><body><joint name="wheel"/><geom size="0.1"/></body></worldbody></mujoco>"""
    cfg = {"mjcf": wheel, "extensions": {"joint": "wheel"}, "observations": {}, "rewards": {}, "events": {}}
    with pytest.raises(ConfigError, match="joint 'wheel' has no limits"):
        make_env({"name": "OpenDrawerRL", "cfg": cfg})


def test_an_arm_that_does_not_reach_the_drawer_is_refused():
    pytest.importorskip("cmeel", reason="the robots need the extra 'robots'")
    robot = {"model": "example:so101"}
    with pytest.raises(ConfigError, match=r"env\.cfg: robot: reaches 0\.42 m, but the drawer is up to 1 m away"):
        make_env({"name": "OpenDrawerRL", "cfg": {"robot": robot}})


@pytest.mark.parametrize("name", ["PickCubeRL", "StackCubeRL"])
def test_a_robot_without_a_gripper_is_refused_in_one_line(name):
    bare = {"robot": {"uid": "r"}, "actions": {"a": {"func": "DeltaQposTerm"}}, "observations": {}, "rewards": {}}
    with pytest.raises(ConfigError, match="the robot has no gripper; add a component hand"):
        make_env({"name": name, "cfg": bare})


def test_the_same_cube_twice_is_refused():
    with pytest.raises(ConfigError, match="object_uid and base_uid are both 'cube'; name two objects"):
        make_env({"name": "StackCubeRL", "cfg": {"extensions": {"base_uid": "cube"}}})
