"""PushCube, Reach and CartPole on MuJoCo: their numbers, starts, success and failure."""

from math import exp, pi
from pathlib import Path

import pytest
import torch
from support.checks import assert_pure, close

import ecrl
import ecrl.loop.build
from ecrl import rng
from ecrl.config import load_config
from ecrl.envs import auto_reset, make_env, make_expert
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics import step_op as physics
from ecrl.envs.mujoco.physics.simulation import advance
from ecrl.envs.validate import check_fields

CONFIG = Path(__file__).parents[2] / "configs" / "push_cube_ppo.json"


def _keys(n, seed=0):
    return rng.split(rng.key(seed), n)


def _put(env, state, cube=None, goal=None):
    """States with the cube and the goal at places of the plane."""
    state = state.copy()
    if cube is not None:
        place = torch.tensor([*cube, 0.05]).expand(*state.batch_size, 3)
        state["world"] = world.with_body_pose(env.scene, state["world"], "cube", place)
    if goal is not None:
        targets = state["targets"].copy()
        state["targets"] = targets.set("goal_pose", torch.tensor([*goal, 0.05]).expand(*state.batch_size, 3).clone())
    return state


@pytest.mark.parametrize("name", ["PushCubeRL", "ReachRL", "CartPoleRL"])
def test_registered_tasks_are_environments(name):
    check_fields(make_env(name), name)


def test_numbers_of_push_cube():
    env = make_env("PushCubeRL")
    assert env.observation_space.shape == (16 + 3 + 16 + 6 + 6 + 6,) and env.action_space.shape == (6,)
    state = env.reset(_keys(4000))
    cube = world.body_pose(env.scene, state["world"], "cube")[..., :3, 3]
    goal = state["targets", "goal_pose"]
    for i, (low, high) in enumerate(((-0.8, -0.4), (-0.6, -0.2))):
        assert low <= cube[:, i].min() < low + 0.02 and high - 0.02 < cube[:, i].max() <= high
    assert (goal[:, :2].abs() <= 0.3).all() and goal[:, :2].abs().max() > 0.29
    close(cube[:, 2], torch.full((4000,), 0.05))
    close(goal[:, 2], torch.full((4000,), 0.05))
    model = env.scene.model
    close(torch.tensor(model.body("cube").mass), [2.0])
    assert model.opt.timestep * env.scene.substeps == pytest.approx(0.04)  # 25 Hz


def test_no_episode_starts_near_its_goal():
    near = {
        "randomize_goal": {
            "func": "randomize_target_pose",
            "mode": "reset",
            "params": {"position_range": [[-0.8, -0.6, 0.05], [-0.4, -0.2, 0.05]]},
        }
    }  # where the cube is
    cube = {
        "randomize_cube": {
            "func": "randomize_rigid_object_pose",
            "mode": "reset",
            "params": {"entity_cfg": {"uid": "cube"}, "position_range": [[-0.2, -0.2, 0.0], [0.2, 0.2, 0.0]]},
        }
    }
    env = make_env({"name": "PushCubeRL", "cfg": {"events": near | cube}})
    assert env.reset(_keys(20_000))["info", "metrics", "distance_to_goal"].min() >= 0.15
    wide = make_env({"name": "PushCubeRL", "cfg": {"events": near | cube, "extensions": {"start_distance": 0.05}}})
    distances = wide.reset(_keys(20_000))["info", "metrics", "distance_to_goal"]
    assert 0.05 <= distances.min() < 0.06


def test_not_even_one_episode_of_very_many_starts_near_its_goal():
    """Half of the drawn starts are too near. Once in a few thousand episodes, all twelve draws are too near."""
    low, high = [-0.75, -0.55, 0.05], [-0.45, -0.25, 0.05]
    put = {"entity_cfg": {"uid": "cube"}, "position_range": [low, high], "relative_position": False}
    events = {
        "cube": {"func": "randomize_rigid_object_pose", "mode": "reset", "params": put},
        "goal": {"func": "randomize_target_pose", "mode": "reset", "params": {"position_range": [low, high]}},
    }
    free, env = (
        make_env({"name": "PushCubeRL", "cfg": {"events": events, "extensions": {"start_distance": d}}})
        for d in (0.0, 0.15)
    )
    drawn, taken = (e.reset(_keys(40_000))["info", "metrics", "distance_to_goal"] for e in (free, env))
    assert 0.45 < (drawn < 0.15).float().mean() < 0.52
    assert taken.min() >= 0.15
    tenths = torch.linspace(0.1, 0.9, 9)  # starts follow the drawn distribution, without the draws that are too near
    close(taken.quantile(tenths), drawn[drawn >= 0.15].quantile(tenths), 3e-3)


def test_a_config_whose_starts_are_too_near_is_refused():
    events = {"goal": {"func": "randomize_target_pose", "mode": "reset"}}
    for half, refused in ((0.07, True), (0.4, False)):
        low, high = ([x + half * sign for x in (-0.6, -0.4)] + [0.05] for sign in (-1, 1))
        events["goal"]["params"] = {"position_range": [low, high]}
        if refused:
            with pytest.raises(
                ecrl.ConfigError, match=r"^env.cfg.events: 256 of 256 episodes found no acceptable start"
            ):
                make_env({"name": "PushCubeRL", "cfg": {"events": events}})
        else:
            make_env({"name": "PushCubeRL", "cfg": {"events": events}})


def test_a_success_is_looked_at_again_later():
    """A cube at rest stays inside and a sliding cube leaves. The arm does not move, and no other number changes."""
    plain, env = (make_env({"name": "PushCubeRL", "cfg": {"extensions": {"hold_time": t}}}) for t in (0.0, 1.0))
    state = _put(env, env.reset(_keys(3)), cube=(-0.6, -0.4), goal=(-0.6, -0.4))
    speed = torch.tensor([[0.0, 0.0, 0.0], [2.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    moving = world.with_body_velocity(env.scene, state["world"], "cube", speed, torch.zeros(3, 3))
    far = torch.tensor([[-0.6, -0.4, 0.05], [-0.6, -0.4, 0.05], [0.0, 0.0, 0.05]])
    state = state.copy().set("world", moving)
    state["targets"] = state["targets"].copy().set("goal_pose", far)
    after, usual = (e.step(state, torch.zeros(3, 6), e.draw(_keys(3))) for e in (env, plain))
    assert after["info", "success"].tolist() == [True, True, False]
    still_inside = after["info", "metrics", "still_inside"]
    assert still_inside[:2].tolist() == [1.0, 0.0] and still_inside[2].isnan()
    assert (after["obs"] == usual["obs"]).all() and (after["reward"] == usual["reward"]).all()
    later = after["world"]
    for _ in range(25):
        later = advance(env.scene, later, world.hold_controls(env.scene, after["world"]))[0]
    pose = [world.site_pose(env.scene, w, env.scene.robot.tcp["arm"])[:, :3, 3] for w in (after["world"], later)]
    close(pose[1], pose[0], 0.02)


@pytest.mark.parametrize("func", ["QvelTerm", "QfTerm"])
def test_a_success_of_a_robot_without_target_positions_is_looked_at_too(func):
    cfg = {"extensions": {"hold_time": 0.2}, "actions": {"only": {"func": func}}}
    env = make_env({"name": "PushCubeRL", "cfg": cfg})
    state = _put(env, env.reset(_keys(2)), cube=(-0.6, -0.4), goal=(-0.6, -0.4))
    after = env.step(state, torch.zeros(2, 6), env.draw(_keys(2)))
    assert after["info", "success"].all() and after["info", "metrics", "still_inside"].isfinite().all()


def test_a_cube_stays_inside_as_far_as_it_slides():
    """The cube slides v / k - mu g / k^2 ln(1 + k v / (mu g)) m, with damping k = 2 / s and friction mu = 1."""
    env = make_env({"name": "PushCubeRL", "cfg": {"extensions": {"hold_time": 1.0}}})
    speed = torch.tensor([0.6, 1.4, 1.75, 2.2])
    slides = speed / 2.0 - 9.81 / 4.0 * torch.log1p(2.0 * speed / 9.81)
    close(slides, torch.tensor([0.017, 0.084, 0.127, 0.191]), 1e-3)
    state, none = _put(env, env.reset(_keys(4)), cube=(-0.6, -0.4), goal=(-0.6, -0.4)), torch.zeros(4)
    along = torch.stack((speed, none, none), -1)
    state["world"] = world.with_body_velocity(env.scene, state["world"], "cube", along, torch.zeros(4, 3))
    after = assert_pure(env.step, state, torch.zeros(4, 6), env.draw(_keys(4)))
    assert after["info", "success"].all() and after["terminated"].all()
    assert after["info", "metrics", "still_inside"].tolist() == (slides < 0.1).float().tolist()


def test_looking_again_costs_a_start_nothing(monkeypatch):
    """Starts are drawn for every step; none of them is a success."""
    env = auto_reset(make_env({"name": "PushCubeRL", "cfg": {"extensions": {"hold_time": 1.0}}}))
    monkeypatch.setattr(physics, "step", lambda *args, **kwargs: pytest.fail("physics of a start"))
    for state in (env.reset(_keys(2)), env.draw(_keys(6).reshape(3, 2))["start"]):
        assert state["info", "metrics", "still_inside"].isnan().all()


def test_where_mujoco_fails_meanwhile_the_cube_is_not_inside(monkeypatch):
    env, real = make_env({"name": "PushCubeRL", "cfg": {"extensions": {"hold_time": 1.0}}}), physics.step

    def failing(*rows, handle, substeps):
        after, sensors = real(*rows, handle=handle, substeps=substeps)
        after[0] = torch.nan if substeps == 100 else after[0]
        return after, sensors

    state = _put(env, env.reset(_keys(2)), cube=(-0.6, -0.4), goal=(-0.6, -0.4))
    monkeypatch.setattr(physics, "step", failing)
    after = env.step(state, torch.zeros(2, 6), env.draw(_keys(2)))
    assert after["info", "metrics", "still_inside"].tolist() == [0.0, 1.0]


def test_the_share_still_inside_is_of_successes_in_logs_and_evaluation(tmp_path):
    """And training is the same with it, in one piece or resumed."""
    easy = {"success_threshold": 0.5, "start_distance": 0.0}
    sizes = {"num_envs": 4, "buffer_size": 8, "iterations": 2, "compile": "off", "num_eval_episodes": 4}
    small = {f"trainer.{name}": value for name, value in sizes.items()} | {"algorithm.cfg.batch_size": 16}
    plain, cfg = (
        ecrl.load_config(CONFIG).replace(**small, **{"env.cfg.extensions": easy | {"hold_time": t}})
        for t in (0.0, 0.05)
    )
    (state, usual), (ended, history) = (ecrl.train(ecrl.init_state(c), c) for c in (plain, cfg))
    assert all(torch.equal(ended["params"].get(k), x) for k, x in state["params"].items(True, True))
    assert 0.0 < history[-1]["metrics/still_inside"] <= 1.0 and "metrics/still_inside" not in usual[-1]
    half, _ = ecrl.train(ecrl.init_state(cfg), cfg.replace(**{"trainer.iterations": 1}))
    ecrl.save(tmp_path / "half", half, cfg)
    again, _ = ecrl.train(ecrl.load(tmp_path / "half")[0], cfg)
    assert all(torch.equal(again["params"].get(k), x) for k, x in state["params"].items(True, True))
    before, logs = (ecrl.evaluate(state, c) for c in (plain, cfg))
    assert {k: x for k, x in logs.items() if k != "eval/metrics/still_inside"} == before
    assert logs["eval/success_rate"] > 0.0 and 0.0 <= logs["eval/metrics/still_inside"] <= 1.0


def test_success_ends_an_episode_and_pays():
    env = make_env("PushCubeRL")
    state = _put(env, env.reset(_keys(2)), cube=(-0.6, -0.4))
    hold, noise = torch.zeros(2, 6), env.draw(_keys(2))
    for distance, inside in ((0.101, False), (0.099, True)):
        after = env.step(_put(env, state, goal=(-0.6 + distance, -0.4)), hold, noise)
        assert after["info", "success"].tolist() == after["terminated"].tolist() == [inside] * 2
        assert not after["truncated"].any() and not after["info", "fail"].any()
        close(after["info", "metrics", "distance_to_goal"], torch.full((2,), distance), 1e-4)
        near = 0.8 * exp(-(distance**2) / (2 * 0.12**2))
        rewards = after["info", "rewards"]
        close(rewards["goal_distance_reward_weighted"], torch.full((2,), near), 1e-3)
        expected = rewards["reaching_reward_weighted"] + near + 10.0 * inside
        close(after["reward"], expected, 1e-3)


def test_threshold_and_names_of_the_extensions_count():
    strict = make_env({"name": "PushCubeRL", "cfg": {"extensions": {"success_threshold": 0.02}}})
    state = _put(strict, strict.reset(_keys(1)), cube=(-0.6, -0.4), goal=(-0.55, -0.4))
    assert not strict.step(state, torch.zeros(1, 6), strict.draw(_keys(1)))["terminated"].any()
    with pytest.raises(ecrl.ConfigError, match="body 'dice' is not in the scene"):
        make_env({"name": "PushCubeRL", "cfg": {"extensions": {"object_uid": "dice"}}}).reset(_keys(1))
    with pytest.raises(ecrl.ConfigError, match="no target 'home'"):
        make_env({"name": "PushCubeRL", "cfg": {"extensions": {"target_pose_key": "home"}}}).reset(_keys(1))


def test_a_cube_that_falls_is_a_failure_and_time_is_not():
    env = make_env({"name": "PushCubeRL", "cfg": {"mjcf": "<mujoco><option timestep='0.01'/></mujoco>"}})  # no floor
    after = env.reset(_keys(1))
    for step in range(1, 6):  # 0.05 m - g t^2 / 2 is below -0.1 m after 0.175 s
        after = env.step(after, torch.zeros(1, 6), env.draw(_keys(1)))
        fallen = [after["terminated"].all(), after["info", "fail"].all()]
        assert fallen == [step == 5] * 2 and not after["truncated"].any()
    env = auto_reset(make_env("PushCubeRL"))
    state = env.reset(_keys(1))
    late = state.copy().set("elapsed", torch.full((1,), 99))
    after = env.step(late, torch.zeros(1, 6), env.draw(_keys(1)))
    assert after["truncated"].all() and not after["terminated"].any() and not after["info", "fail"].any()


def test_the_arm_pushes_the_cube():
    """Led behind the cube, down, and along the floor, the tool takes the cube with it."""
    actions = {"pose": {"func": "EefPoseTerm", "params": {"pose_dim": 7}}}
    env = make_env({"name": "PushCubeRL", "cfg": {"actions": actions}})
    state = _put(env, env.reset(_keys(1)), cube=(-0.6, -0.4), goal=(0.9, 0.9))
    way = [(-0.6, -0.6, 0.3)] * 15 + [(-0.6, -0.6, 0.06)] * 15 + [(-0.6, -0.6 + 0.02 * i, 0.06) for i in range(20)]
    down = (0.0, 1.0, 0.0, 0.0)  # the quaternion of a tool that points down
    for place in way:
        state = env.step(state, torch.tensor([[*place, *down]]), env.draw(_keys(1)))
    x, y, z = world.body_pose(env.scene, state["world"], "cube")[0, :3, 3].tolist()
    assert y > -0.2 and abs(x + 0.6) < 0.1 and abs(z - 0.05) < 0.01


def test_reach_pays_the_distance_and_ends_there():
    env = make_env("ReachRL")
    state = env.reset(_keys(3))
    tcp = env.scene.robot.tcp["arm"]
    after = env.step(state, torch.zeros(3, 6), env.draw(_keys(3)))
    place = world.site_pose(env.scene, after["world"], tcp)[..., :3, 3]
    distance = torch.linalg.vector_norm(place - state["targets", "target_pose"], dim=-1)
    close(after["info", "metrics", "distance_to_target"], distance)
    close(after["reward"], -distance + 10.0 * (distance < 0.05))
    there = state.copy().set("targets", state["targets"].copy().set("target_pose", place))
    assert env.step(there, torch.zeros(3, 6), env.draw(_keys(3)))["info", "success"].all()


def test_cart_pole_pays_the_angle_fails_when_it_lies_and_succeeds_at_the_end():
    env = make_env("CartPoleRL")
    state = env.reset(_keys(2))
    joints = env.scene.robot.joints
    close(world.joint_positions(env.scene, state["world"], joints), torch.tensor([[-0.2, 0.07]] * 2))

    def at(angle, velocity=0.0, elapsed=0):
        moved = world.with_joint_positions(env.scene, state["world"], joints[1:], torch.full((2, 1), angle))
        moved = world.with_joint_velocities(env.scene, moved, joints[1:], torch.full((2, 1), velocity))
        inputs = state.copy().update({"world": moved, "elapsed": torch.full((2,), elapsed)})
        return env.step(inputs, torch.zeros(2, 2), env.draw(_keys(2)))

    after = at(0.5)
    angle = world.joint_positions(env.scene, after["world"], joints[1:])[..., 0].abs()
    velocity = world.joint_velocities(env.scene, after["world"], joints[1:])[..., 0].abs()
    close(after["reward"], 1.0 - angle / pi - 0.005 * velocity)
    assert not after["terminated"].any()
    assert at(1.65)["info", "fail"].all() and at(1.65)["terminated"].all() and not at(1.65)["truncated"].any()
    assert at(0.0, elapsed=499)["info", "success"].all() and not at(0.0, elapsed=498)["info", "success"].any()
    assert not at(0.1, elapsed=499)["info", "success"].any() and not at(0.0, 0.2, 499)["info", "success"].any()
    for end in (at(0.0, elapsed=499), at(0.1, elapsed=499)):  # the time limit, with and without success
        assert end["truncated"].all() and not end["terminated"].any()
    loose = {"angle_threshold": 1.0, "velocity_threshold": 10.0}
    for key, inputs in (("angle_threshold", (0.1, 0.0)), ("velocity_threshold", (0.0, 0.2))):
        env = make_env({"name": "CartPoleRL", "cfg": {"extensions": {key: loose[key]}}})
        if key == "angle_threshold":
            env = make_env({"name": "CartPoleRL", "cfg": {"extensions": loose}})
        assert at(*inputs, elapsed=499)["info", "success"].all()


def test_a_gpu_is_refused_in_one_line(monkeypatch):
    cfg = ecrl.load_config(CONFIG)
    monkeypatch.setattr("ecrl.loop.build.device_of", lambda cfg: torch.device("cuda:0"))
    with pytest.raises(ecrl.ConfigError, match=r"^trainer.device: cuda:0, but PushCubeRL steps in MuJoCo on the CPU"):
        ecrl.loop.build.build(cfg)


def test_faults_of_the_scene_and_of_action_modes_name_their_key():
    with pytest.raises(ecrl.ConfigError, match=r"^env.cfg: robot.init_qpos: 2 values for 6 joints"):
        make_env({"name": "PushCubeRL", "cfg": {"robot": {"init_qpos": [0.0, 0.0]}}})
    term = {"func": "DeltaQposTerm", "mode": "pre", "params": {"scale": 0.1}}
    with pytest.warns(UserWarning, match=r"^env.cfg.actions.a.mode has no meaning here"):
        cfg = ecrl.load_config(CONFIG, {"env.cfg.actions": {"a": term}})
    assert cfg.env.cfg.actions["a"].params.scale == 0.1


def _choice():
    return {"name": "PushCubeRL", "cfg": load_config(CONFIG).env.cfg.model_dump(mode="json", exclude_unset=True)}


def _pushed(settings, count=100):
    """Return the success rate of the expert, one episode per environment."""
    env, expert = make_env(_choice()), make_expert(_choice(), settings)
    state = env.reset(_keys(count))
    ended, succeeded = torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)
    for t in range(100):
        state = env.step(state, expert(state, _keys(count, 100 + t)), env.draw(_keys(count, 300 + t)))
        succeeded |= ~ended & state["info", "success"]
        ended |= state["terminated"] | state["truncated"]
    return succeeded.float().mean()


def test_the_expert_pushes_the_cube_to_the_goal_and_a_bias_makes_it_miss():
    assert _pushed({}) >= 0.9
    assert _pushed({"noise": 0.1}) >= 0.85
    assert _pushed({"bias": 0.1}) < 0.8


def test_actions_of_the_expert_move_the_tool_towards_the_start_of_a_push():
    """The tool is near this place after 12 steps, and was not before."""
    env, expert = make_env(_choice()), make_expert(_choice())
    state = _put(env, env.reset(_keys(4)), cube=(-0.6, -0.4), goal=(-0.8, -0.4))
    start = torch.tensor([-0.6 + 0.13, -0.4])
    distances = []
    for t in range(12):
        tool = world.site_pose(env.scene, state["world"], env.scene.robot.tcp["arm"])[..., :2, 3]
        distances.append(torch.linalg.vector_norm(tool - start, dim=-1))
        action = assert_pure(expert, state, _keys(4, t))
        assert action.shape == (4, 6) and action.abs().max() <= 1.0
        state = env.step(state, action, env.draw(_keys(4, t)))
    assert (distances[-1] < 0.05).all() and (distances[0] > 0.1).all()
