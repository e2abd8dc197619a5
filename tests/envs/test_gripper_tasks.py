"""PickCube, StackCube and OpenDrawer: their numbers, success and failure, and their scripted experts."""

import pytest
import torch
from support.checks import assert_pure, close

from ecrl import rng
from ecrl.envs import make_env, make_expert
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.terms.joints import opening_of
from ecrl.envs.validate import check_fields
from ecrl.errors import ConfigError

N = 16


def keys(n=N, seed=0):
    return rng.split(rng.key(seed), n)


def tool(env, state):
    return world.site_pose(env.scene, state["world"], env.scene.robot.tcp["arm"])[..., :3, 3]


def place(env, state, uid):
    return world.body_position(env.scene, state["world"], uid)


@pytest.mark.parametrize(("name", "width"), [("PickCubeRL", 66), ("StackCubeRL", 79), ("OpenDrawerRL", 60)])
def test_the_tasks_are_pure_environments(name, width):
    env = make_env(name)
    check_fields(env, name)
    assert env.observation_space.shape == (width,) and env.action_space.shape == (4,)
    assert env.scene.dt == pytest.approx(0.04)
    state = env.reset(keys(4))
    assert_pure(env.step, state, torch.full((4, 4), 0.5), env.draw(keys(4)))


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


# experts


def success_rate(name, settings, n=50):
    """Return the success rate of the expert in one episode per environment, the environment and the last states."""
    env, expert = make_env(name), make_expert(name, settings)
    state, succeeded = env.reset(keys(n)), torch.zeros(n, dtype=torch.bool)
    ended = succeeded
    for t in range(100):
        state = env.step(state, expert(state, rng.fold_in(keys(n), t)), env.draw(rng.fold_in(keys(n), t)))
        succeeded, ended = succeeded | (state["info", "success"] & ~ended), ended | state["terminated"]
    return float(succeeded.float().mean()), env, state


@pytest.mark.parametrize("name", ["PickCubeRL", "StackCubeRL", "OpenDrawerRL"])
@pytest.mark.parametrize(("noise", "least"), [(0.0, 0.9), (0.1, 0.8)])
def test_the_expert_solves_the_task(name, noise, least):
    assert success_rate(name, {"noise": noise})[0] >= least


def test_a_bias_makes_the_expert_miss():
    assert success_rate("PickCubeRL", {"bias": 0.1})[0] == 0.0


def test_the_opening_that_the_expert_reaches_is_the_metric():
    _, env, state = success_rate("OpenDrawerRL", {}, 4)
    close(state["info", "metrics", "opening"], opening_of(env.scene, state["world"], "drawer_slide"))


APPROACH = {  # from the end effector to the cube, m: action of the arm, and of the gripper
    (0.3, 0.0, -0.3): (1.0, 0.0, -0.2 / 0.3, 1.0),  # to a place 0.1 m above the cube
    (0.006, 0.0, -0.09): (0.2 / 3.0, 0.0, -1.0, 1.0),  # down
    (0.0, 0.003, -0.015): (0.0, 0.1, -0.5, -1.0),  # closes on the way
}


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("name", ["PickCubeRL", "StackCubeRL"])
def test_approach_of_the_expert_by_hand(name, scale):
    choice = {"name": name, "cfg": {"scale": scale}}
    env, expert = make_env(choice), make_expert(choice)
    state = env.reset(keys(1)).expand(len(APPROACH)).clone()
    cube = tool(env, state) + scale * torch.tensor([*APPROACH])
    state = state.set("world", world.with_body_pose(env.scene, state["world"], "cube", cube))
    close(assert_pure(expert, state, keys(len(APPROACH))), torch.tensor([*APPROACH.values()]), tol=1e-4)


PULL = {  # from the end effector to the gap behind the handle, m: action
    (0.05, 0.0, -0.06): (1.0, 0.0, 0.4, -1.0),  # to a place 0.08 m above the gap
    (0.003, 0.0, -0.06): (0.05, 0.0, -1.0, -1.0),  # down
    (0.003, 0.0, -0.015): (1.0, 0.0, 0.0, -1.0),  # outwards
}


def test_phases_of_the_expert_of_the_drawer_by_hand():
    env, expert = make_env("OpenDrawerRL"), make_expert("OpenDrawerRL")
    state = env.reset(keys(1)).expand(len(PULL)).clone()
    gap = tool(env, state) + torch.tensor([*PULL])
    cabinet = gap - torch.tensor([0.22 - 0.03, 0.0, 0.15 + 0.09])  # the handle is at (0.22, 0, 0.24) of the cabinet
    upright = torch.tensor([1.0, 0.0, 0.0, 0.0])
    state = state.set("world", world.with_body_pose(env.scene, state["world"], "cabinet", cabinet, upright))
    close(assert_pure(expert, state, keys(len(PULL))), torch.tensor([*PULL.values()]), tol=1e-4)


def placed_on(shift):
    """Return actions of the expert of StackCubeRL with the cube at `shift` (m) from its place, and the tool at it."""
    env, expert = make_env("StackCubeRL"), make_expert("StackCubeRL")
    state = env.reset(keys(1))
    cube = tool(env, state)
    base = cube - torch.tensor([0.0, 0.0, 0.05]) - torch.tensor(shift)
    worlds = world.with_body_pose(env.scene, state["world"], "cube", cube)
    state = state.copy().set("world", world.with_body_pose(env.scene, worlds, "base", base))
    return expert(state, keys(1))[0]


def test_the_expert_lets_a_placed_cube_go_without_moving():
    close(placed_on((0.005, 0.0, 0.003)), [0.0, 0.0, 0.0, 1.0], tol=1e-4)
    assert placed_on((0.0, 0.0, 0.01))[3] == -1.0 and placed_on((0.02, 0.0, 0.0))[3] == -1.0


def test_the_expert_follows_the_order_and_the_step_of_the_actions():
    hand, arm = {"func": "GripperTerm"}, {"func": "DeltaEefPoseTerm", "params": {"scale": 0.06}}
    choice = {"name": "PickCubeRL", "cfg": {"actions": {"a": hand, "b": arm}}}
    env, expert = make_env(choice), make_expert(choice)
    state = env.reset(keys(1))
    cube = tool(env, state) + torch.tensor([0.006, 0.0, -0.09])
    state = state.copy().set("world", world.with_body_pose(env.scene, state["world"], "cube", cube))
    close(expert(state, keys(1)), [[1.0, 0.2 / 3.0, 0.0, -1.0]], tol=1e-4)


def test_a_task_that_an_expert_does_not_fit_is_refused_in_one_line():
    turning = {"arm": {"func": "DeltaEefPoseTerm", "params": {"pose_dim": 6}}, "gripper": {"func": "GripperTerm"}}
    message = (
        r"^env\.cfg\.actions: arm \(DeltaEefPoseTerm\), gripper \(GripperTerm\), but the expert needs two terms, D"
    )
    with pytest.raises(ConfigError, match=message):
        make_expert({"name": "PickCubeRL", "cfg": {"actions": turning}})
    slide = "<body><joint name='s' type='slide' range='0 1'/><geom size='.1'/></body>"
    mjcf = f"<mujoco><worldbody>{slide}</worldbody></mujoco>"
    cfg = {"mjcf": mjcf, "extensions": {"joint": "s"}, "observations": {}, "rewards": {}, "events": {}}
    with pytest.raises(ConfigError, match=r"^env\.cfg\.mjcf: body 'handle' is not in the scene; the scene has: "):
        make_expert({"name": "OpenDrawerRL", "cfg": cfg})
