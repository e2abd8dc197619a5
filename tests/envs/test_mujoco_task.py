"""Tasks of MuJoCo: what is acted on, observed and rewarded, how episodes end, what the state keeps, what is refused."""

import pytest
import torch
from support.checks import Variant, assert_pure, close

pytest.importorskip("mujoco.batch")

from support.fake_mujoco_task import (
    ACTIONS,
    CUBE_MASS,
    DT,
    SCENE,
    happening,
    keys_of,
    nothing_yet,
    rollout,
    task,
)
from support.small_runs import last_state, same, small

from ecrl.config.model import validate_section
from ecrl.envs import auto_reset, make_env, restart
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.envs.validate import check_fields
from ecrl.errors import ConfigError
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.run.checkpoint import load, save

pytestmark = pytest.mark.usefixtures("mujoco_test_terms")
ARM = {"mjcf": None, "robot": {"uid": "ur"}}
HEIGHT = {"func": "rig_height", "name": "cube/height"}
BOTH = {
    "elbow": {"func": "rig_drive", "params": {"joint_ids": [1], "drive": "force"}},
    "rail": {"func": "rig_drive", "params": {"joint_ids": [0]}},
}


def stepped(env, number=3, action=0.0, steps=1):
    """The state after steps with one action."""
    state, action = env.reset(keys_of(number)), torch.as_tensor(action).expand(number, *env.action_space.shape)
    for t in range(steps):
        state = assert_pure(env.step, state, action, keys_of(number, 1 + t))
    return state


# acting


def test_the_action_is_a_bounded_box_of_all_terms_by_name():
    space = task(actions=BOTH).action_space
    assert (space.low, space.high, space.shape) == ((-1.0, -1.0), (1.0, 1.0), (2,))
    assert task().action_space.shape == (1,)


def test_each_term_is_given_its_part_of_the_action():
    # by name: elbow, a force of its motor, then rail, a target of its drive
    env = task(actions=BOTH)
    state = env.reset(keys_of(1))
    received = []
    for action in ([0.0, 0.0], [0.5, 0.0], [0.0, 0.5]):
        after = env.step(state, torch.tensor([action]), None)
        assert after["action"].tolist() == [action]
        received.append(world.joint_velocities(env.scene, after["world"], ("rail", "elbow"))[0])
    still, turned, slid = received
    assert turned[1] - still[1] > 0.1 and (turned[0] - still[0]).abs() < 0.05
    assert slid[0] - still[0] > 0.1


def test_targets_are_held_within_the_joints_limits_and_forces_are_not():
    env = task(actions=BOTH)
    for column, alike in ((1, True), (0, False)):  # the rail ends at 1 m
        ends = []
        for much in (1.0, 5.0):
            action = torch.zeros(3, 2)
            action[:, column] = much
            ends.append(env.step(env.reset(keys_of(3)), action, None)["world", "physics"])
        assert torch.equal(*ends) == alike


def test_joints_that_no_term_drives_are_held_where_they_started():
    first = {"pan": {"func": "rig_drive", "params": {"joint_ids": [0]}}}
    env = task(**ARM, actions=first)
    home = torch.tensor(env.scene.home.qpos[:6]).float()
    q = world.joint_positions(env.scene, stepped(env, action=0.8, steps=40)["world"], env.scene.robot.joints)
    close(q[:, 1:], home[1:].expand(3, 5), 0.02)
    close(q[:, 0], [0.8] * 3, 0.02)


def test_a_force_drives_a_joint_of_the_built_in_arm():
    first = {"pan": {"func": "rig_drive", "params": {"joint_ids": [0], "drive": "force"}}}
    env = task(**ARM, actions=first)
    pan = env.scene.robot.joints[0]
    after = stepped(env, action=0.5)
    close(world.joint_forces(env.scene, after["world"], (pan,)), [[0.5]] * 3, 1e-5)
    assert (world.joint_velocities(env.scene, after["world"], (pan,)) > 1e-4).all()
    assert env.scene.robot.joints == task(**ARM).scene.robot.joints


PARTS = {"upper": ["shoulder_pan_joint", "shoulder_lift_joint"], "lower": ["elbow_joint", "wrist_1_joint"]}


@pytest.mark.parametrize("parts", [["upper"], ["lower", "upper"]])
def test_control_parts_are_what_is_acted_on_and_observed(parts):
    arm = ARM | {"robot": {"uid": "ur", "control_parts": PARTS}}
    env = task(**arm, actions={"all": {"func": "rig_drive"}}, control_parts=parts)
    count = 2 * len(parts)
    assert env.action_space.shape == (count,) and env.observation_space.shape == (3 * count,)
    names = [f"ur/{name}" for name in (PARTS["upper"] + PARTS["lower"])[:count]]  # in the robot's order
    state = stepped(env, action=0.3)
    expected = world.joint_positions(env.scene, state["world"], names)
    close(state["obs"][:, count : 2 * count], expected, 1e-6)  # after qf, before qvel


def test_actions_that_do_not_fit_are_refused():
    pan = {"func": "rig_drive", "params": {"joint_ids": [0]}}
    for changes, message in (
        ({"actions": {}}, r"env.cfg.actions: empty; add a term such as"),
        (
            {"actions": {"a": pan, "b": pan}},
            r"env.cfg.actions.b \(rig_drive\): drives joint 'rail', which 'a' also drives",
        ),
        (
            {"actions": {"a": {"func": "rig_drive", "params": {"joint_ids": [7]}}}},
            r"env.cfg.actions.a .*: params.jo",
        ),
        ({"actions": {"a": {"func": "rig_driv"}}}, r"env.cfg: actions.a.func: unknown action 'rig_driv'; did you mean"),
        (
            {"actions": {"a": pan | {"params": {"drov": 1}}}},
            "actions.a.params.drov: unknown key; did you mean 'drive'",
        ),
        (
            ARM
            | {"robot": {"uid": "ur", "control_parts": PARTS}, "control_parts": ["upper"]}
            | {"actions": {"a": {"func": "rig_drive", "params": {"part_name": "lower"}}}},
            r"^env.cfg.actions.a \(rig_drive\): drives joint 'ur/elbow_joint', which is not in env.cfg.control_parts:",
        ),
        ({"control_parts": ["leg"]}, r"env.cfg.control_parts: .*unknown part 'leg'; known: arm"),
        ({"control_parts": []}, r"control_parts: expected at least 1 entries"),
    ):
        with pytest.raises(ConfigError, match=message):
            task(**changes)


# observing


def test_an_observation_is_flat_and_by_name():
    tall = {"tall": HEIGHT, "twice": {"func": "rig_twice", "mode": "modify", "name": "cube/height"}}
    env = task(observations=tall | {"slow": {"func": "rig_twice", "mode": "modify", "name": "robot/qvel"}})
    state = stepped(env, action=0.5, steps=2)
    q, v = (
        read(env.scene, state["world"], ("rail", "elbow")) for read in (world.joint_positions, world.joint_velocities)
    )
    f = world.joint_forces(env.scene, state["world"], ("rail", "elbow"))
    z = world.body_pose(env.scene, state["world"], "cube")[:, 2:3, 3]
    close(state["obs"], torch.cat((2.0 * z, f, q, 2.0 * v), -1), 1e-6)
    assert env.observation_space.shape == (7,) and state["obs"].dtype == torch.float32
    assert (v.abs() > 0.01).any() and (f[:, 0].abs() > 0.1).all()
    assert torch.equal(env.observe(state), state["obs"])


def test_changes_of_an_entry_happen_by_name_after_all_that_are_added():
    names = {"a": "modify", "b": "add", "c": "modify"}
    terms = {n: {"func": "rig_height" if m == "add" else "rig_twice", "mode": m, "name": "z"} for n, m in names.items()}
    close(task(observations=terms).reset(keys_of(2))["obs"][:, -1], [20.0] * 2, 1e-6)


def test_observations_that_do_not_fit_are_refused():
    twice = {"func": "rig_twice", "mode": "modify"}
    for terms, message in (
        (
            {"a": HEIGHT, "b": HEIGHT},
            r"observations.b \(rig_height\): name: 'cube/height' exists already; use mode mod",
        ),
        ({"a": HEIGHT | {"name": "robot/qpos"}}, "name: 'robot/qpos' exists already; use mode modify"),
        (
            {"a": twice | {"name": "robot/qpo"}},
            "name: 'robot/qpo' does not exist; use mode add; entries: robot/qpos, r",
        ),
        ({"a": HEIGHT | {"name": "a//b"}}, r"observations.a.name: not allowed, got 'a//b'"),
        ({"a": {"func": "rig_high", "name": "z"}}, "unknown observation 'rig_high'; did you mean 'rig_height'"),
        ({"a": HEIGHT | {"mode": "replace"}}, "observations.a.mode: expected 'add' or 'modify', got 'replace'"),
    ):
        with pytest.raises(ConfigError, match=message):
            task(observations=terms)


OBSERVED = {"observations": {"a": {"func": "target_position", "name": "z", "params": {"target_pose_key": "spot"}}}}
PAID = {"source_entity_cfg": {"uid": "cube"}, "target_pose_key": "spot"}
PAID = {"rewards": {"a": {"func": "distance_to_target", "params": PAID}}}


@pytest.mark.parametrize("changes", [OBSERVED, PAID], ids=["observation", "reward"])
def test_a_target_that_is_no_position_is_refused_when_the_task_is_made(changes):
    (kind,), (func,) = changes, (term["a"]["func"] for term in changes.values())
    place = rf"^env.cfg.{kind}.a \({func}\): params.target_pose_key"
    with pytest.raises(
        ConfigError, match=rf"{place}: target 'spot' has 2 elements, expected 3, the x, y and z of a position in m;"
    ):
        task(**changes, events={"e": {"func": "rig_spot", "mode": "reset"}})
    with pytest.raises(ConfigError, match=rf"{place}: no target 'spot'; an event such as"):
        task(**changes)
    quoted = rf"^env.cfg.{kind}.'my a' \({func}\): params"
    with pytest.raises(ConfigError, match=quoted):
        task(**{kind: {"my a": changes[kind]["a"]}})
    env = task(**changes, events={"e": {"func": "rig_spot", "mode": "reset", "params": {"size": 3}}})
    assert env.reset(keys_of(2))["targets", "spot"].dtype == torch.float32  # whole numbers before that, or not


# rewards

CUBE = {"entity_cfg": {"uid": "cube"}}
FALL, EFFORT = {"func": "rig_fall", "weight": 2.0}, {"func": "rig_effort", "weight": -0.5}
FELL = 9.81 * 0.005**2 * (1 + 2 + 3 + 4)  # four steps of 5 ms, each with the velocity after it


def test_rewards_are_added_by_their_weights():
    after = stepped(task(rewards={"fall": FALL, "effort": EFFORT}), action=-0.5)
    close(after["reward"], [2.0 * FELL - 0.5 * 0.5] * 3, 1e-5)
    reported = after["info", "rewards"]
    assert sorted(reported.keys()) == ["effort", "effort_weighted", "fall", "fall_weighted"]
    for name, value in (("fall", FELL), ("fall_weighted", 2.0 * FELL), ("effort", 0.5), ("effort_weighted", -0.25)):
        close(reported[name], [value] * 3, 1e-5)


def test_a_task_has_a_reward_of_its_own_and_replace_stands_for_all():
    def own(sim, before, after):
        return (after["elapsed"] - before["elapsed"]) * 7.0

    env = task(rewards={"fall": FALL}, get_reward=own)
    after = stepped(env)
    close(after["reward"], [7.0 + 2.0 * FELL] * 3, 1e-5)
    assert next(iter(after["info", "rewards"].keys())) == "task" and (after["info", "rewards", "task"] == 7.0).all()
    env = task(rewards={"a": EFFORT | {"mode": "replace"}, "fall": FALL}, get_reward=own)
    close(stepped(env, action=1.0)["reward"], [-0.5] * 3, 1e-5)
    assert (stepped(task())["reward"] == 0.0).all()


def test_rewards_that_do_not_fit_are_refused():
    for term, message in (
        ({"func": "rig_fal"}, r"rewards.a.func: unknown reward 'rig_fal'; did you mean 'rig_fall'"),
        (FALL | {"weight": "2"}, "rewards.a.weight: expected a number"),
        (FALL | {"mode": "modify"}, "rewards.a.mode: expected 'add' or 'replace'"),
    ):
        with pytest.raises(ConfigError, match=message):
            task(rewards={"a": term})


# ends


def at_step(name, when):
    """`compute_task_state` that raises a flag at a step."""

    def compute(sim, state):
        success, fail, metrics = nothing_yet(sim, state)
        hit = state["elapsed"] == when
        return (hit, fail, metrics) if name == "success" else (success, hit, metrics)

    return compute


@pytest.mark.parametrize("name", ["success", "fail"])
def test_success_and_failure_are_terminations(name):
    states = rollout(auto_reset(task(at_step(name, 3), max_episode_steps=9)), 2, 7)
    assert states["terminated"][0].tolist() == [t in (3, 6) for t in range(8)]
    assert not states["truncated"].any()
    assert torch.equal(states["info", name], states["terminated"])
    assert not states["info", "fail" if name == "success" else "success"].any()
    assert states["elapsed"][0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_the_time_limit_truncates():
    states = rollout(auto_reset(task(max_episode_steps=3)), 2, 7)
    assert states["truncated"][0].tolist() == [t in (3, 6) for t in range(8)] and not states["terminated"].any()
    both = stepped(task(at_step("success", 3), max_episode_steps=3), steps=3)
    assert both["truncated"].all() and both["terminated"].all() and both["info", "success"].all()
    assert TaskConfig.model_validate(SCENE).max_episode_steps == 300


def test_a_task_may_break_an_episode_off():
    env = task(check_truncated=lambda sim, state: state["elapsed"] == 2)
    assert not stepped(env)["truncated"].any()
    after = stepped(env, steps=2)
    assert after["truncated"].all() and not after["terminated"].any()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 1e20])
def test_physics_that_is_lost_is_a_failure_and_nothing_else_is_spoilt(wrong):
    env = task(
        at_step("success", 3), actions=BOTH, rewards={"effort": EFFORT, "fall": FALL}, observations={"z": HEIGHT}
    )
    state = stepped(env, steps=2)
    action = torch.zeros(3, 2)
    fine = env.step(state, action, None)
    action[1, 0] = wrong  # the force of a motor: no limit holds it
    after = assert_pure(env.step, state, action, None)
    assert after["info", "fail"].tolist() == [False, True, False]
    assert after["info", "success"].tolist() == [True, False, True] and after["terminated"].all()
    assert not after["truncated"].any()
    assert torch.equal(after["world", "physics"][1], state["world", "physics"][1])
    assert all(leaf.isfinite().all() for leaf in after.flatten_keys("/").values() if leaf.is_floating_point())
    assert same(after[::2].exclude("info"), fine[::2].exclude("info"))
    begun = auto_reset(env).step(auto_reset(env).reset(keys_of(3)), action, auto_reset(env).draw(keys_of(3, 2)))
    assert begun["elapsed"].tolist() == [1, 0, 1] and begun["obs"].isfinite().all()


def test_metrics_are_of_the_state_after_the_step():
    states = rollout(auto_reset(task(max_episode_steps=2)), 2, 4)
    close(states["info", "metrics", "height"][0, 1:3], [5.0 - FELL, 5.0 - 9.81 * 0.005**2 * 36], 1e-5)
    close(states["info", "metrics", "height"][:, 0], [5.0] * 2, 1e-6)


# the state


def test_a_start_is_the_scene_as_the_config_has_it():
    state = task(observations={"z": HEIGHT}).reset(keys_of(2))
    assert sorted(state.keys()) == [
        "action", "elapsed", "force", "info", "obs", "reward", "terminated", "truncated", "world"
    ]  # fmt: skip
    for key in ("action", "elapsed", "force", "reward", "terminated", "truncated"):
        assert (state[key] == 0).all()
    close(state["obs"], [[5.0, *[0.0] * 6]] * 2, 1e-6)
    assert state["world", "physics"].dtype == torch.float64 and "parameters" not in state["world"]


def test_elapsed_counts_the_steps_of_the_episode_and_physics_its_seconds():
    env = task()
    state = stepped(env, steps=5)
    assert state["elapsed"].tolist() == [5] * 3
    close(world.time(env.scene, state["world"]), [5 * DT] * 3, 1e-6)
    assert restart(auto_reset(env), auto_reset(env).reset(keys_of(3)), keys_of(3))["elapsed"].tolist() == [0] * 3


ALL = {
    "actions": BOTH,
    "observations": {"z": HEIGHT, "goal": {"func": "rig_target", "name": "goal"}},
    "rewards": {"fall": FALL},
    "events": {
        "goal": happening("randomize_target_pose", position_range=[[0.0] * 3, [1.0] * 3]),
        "heavy": happening("randomize_rigid_object_mass", "startup", **CUBE_MASS),
        "push": happening("push_rigid_object", "interval", 2, **CUBE, force_range=[[0.0] * 3, [9.0] * 3]),
    },
}


def test_it_keeps_the_contract():
    for changes in ({}, ALL):
        check_fields(task(**changes), "rig")


def test_any_batch_gives_the_same():
    env = auto_reset(task(**ALL, max_episode_steps=2))
    keys = keys_of(6).reshape(2, 3)
    many, one = env.reset(keys), [env.reset(key) for key in keys.flatten()]
    for t in range(3):
        noise, actions = keys_of(6, 9 + t).reshape(2, 3), torch.linspace(-1.0, 1.0, 12).reshape(2, 3, 2)
        many = assert_pure(env.step, many, actions, env.draw(noise))
        pairs = zip(actions.flatten(0, 1), noise.flatten(), strict=True)
        one = [env.step(state, action, env.draw(key)) for state, (action, key) in zip(one, pairs, strict=True)]
    for state, single in zip(many.reshape(6), one, strict=True):
        assert torch.equal(state["world", "physics"], single["world", "physics"])
        for name, leaf in state.flatten_keys("/").items():
            close(leaf, single.flatten_keys("/")[name], 1e-5)  # sums of poses and rewards differ with the batch


@pytest.mark.parametrize("form", ["eager", "vmapped", "strided"])
def test_a_step_is_pure_and_equal_in_every_variant(form):
    env = auto_reset(task(**ALL, max_episode_steps=2))
    state, action = env.reset(keys_of(3)), torch.full((3, 2), 0.3)
    for t in range(2):
        noise = env.draw(keys_of(3, 1 + t))
        after = env.step(state, action, noise)
        result = Variant(form)(env.step)(state, action, noise)
        for name, leaf in result.flatten_keys("/").items():
            close(leaf, after.flatten_keys("/")[name], 1e-5)
        state = after


def test_equal_keys_and_actions_give_equal_bits_whatever_the_threads():
    ends = []
    for threads in (1, 2):
        env = auto_reset(task(**ALL, physics={"threads": threads}, max_episode_steps=5))
        ends.append(rollout(env, 8, 12, action=0.5))
    assert same(*ends)


def config(**changes):
    cfg = SCENE | ALL | {"max_episode_steps": 7}
    return small(**{"env": {"name": "rig_task", "cfg": cfg}} | changes)


def test_training_resumes_in_mid_episode_with_the_same_bits(tmp_path):
    cfg = config()
    states = [r["state"] for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    assert (states[1]["env", "elapsed"] > 0).any() and (states[1]["env", "life", "count"] == 16).all()
    save(tmp_path / "half", states[1], cfg)
    state, read = load(tmp_path / "half")
    assert read == cfg and same(state, states[1])
    assert same(last_state(read, state), states[-1])
    assert torch.equal(states[-1]["env", "world", "parameters"], init_state(cfg)["env", "world", "parameters"])


def test_a_weight_in_the_config_changes_the_return_accordingly():
    logs = []
    for weight in (2.0, 4.0):
        cfg = config().replace(
            **{"env.cfg.rewards.fall.weight": weight, "env.cfg.events": {}, "env.cfg.observations": {}}
        )
        _, log = make_iteration(cfg)(init_state(cfg))
        logs.append(log["collect"]["episode_reward_avg_100"])
    close(logs[1], 2.0 * logs[0], 1e-5)
    close(logs[0], 2.0 * 9.81 * 0.005**2 * 28 * 29 / 2, 1e-4)  # seven steps of four


def test_equal_settings_give_the_same_environment():
    made = make_env(config().env)
    assert made is make_env(config().env)
    assert made is not make_env(config().replace(**{"env.cfg.max_episode_steps": 8}).env)


def test_steps_between_events_are_ten_by_default():
    event = {"func": "push_rigid_object", "params": {**CUBE, "force_range": [[0.0] * 3] * 2}}
    cfg = validate_section(TaskConfig, SCENE | {"actions": ACTIONS, "events": {"p": event}}, "env.cfg")
    assert (cfg.events["p"].mode, cfg.events["p"].interval_step) == ("interval", 10)
