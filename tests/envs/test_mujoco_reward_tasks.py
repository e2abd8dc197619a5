"""Reward terms inside a task: weights, modes, logs, separate episodes, and terms of a user."""

from math import pi

import pytest
import torch
from support.checks import close

pytest.importorskip("mujoco.batch")

from pydantic import Field
from support.mujoco_term_cases import SCENE

from ecrl import rng
from ecrl.config.model import ConfigModel
from ecrl.envs import auto_reset, make_env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.make_task import task_env
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.envs.mujoco.terms import observations, rewards
from ecrl.envs.mujoco.terms.term import ActionTerm, JointsConfig, joints_of
from ecrl.envs.validate import check_fields
from ecrl.errors import ConfigError
from ecrl.registry import register_action, register_env, register_event, register_reward

CUBE = {"uid": "cube"}
AIM = {"source_entity_cfg": CUBE, "target_pose_key": "goal_pose"}
PUSH = {"object_cfg": CUBE}
TERMS = observations, rewards  # importing them registers theirs


class NudgeConfig(JointsConfig):
    """Joints."""


class AimConfig(ConfigModel):
    """A new target."""

    @property
    def stores(self):
        return {"goal_pose": (0.0, 0.0, 0.0)}


class TossConfig(ConfigModel):
    """Another place for the cube."""

    by: float = Field(0.3, description="m")


class HighConfig(TaskConfig):
    """The tool is to be high."""

    success_height: float = Field(9.0, description="m")
    own_reward: float = Field(0.0, description="beside the terms")


def nudge(cfg: NudgeConfig, sim):
    joints = joints_of(cfg, sim)

    def control(state, action):
        return world.joint_positions(sim, state["world"], joints) + 0.05 * action

    return ActionTerm(joints, "position", (-1.0,) * len(joints), (1.0,) * len(joints), control)


def aim(cfg: AimConfig, sim):
    def apply(state, keys):
        place = rng.uniform(keys, (3,)) - 0.5
        return state.copy().set("targets", state["targets"].copy().set("goal_pose", place))

    return apply


def toss(cfg: TossConfig, sim):
    def apply(state, keys):
        place = torch.tensor([-0.6, -0.4, 0.05]) + cfg.by * (rng.uniform(keys, (3,)) - 0.5) * torch.tensor(
            [1.0, 1.0, 0]
        )
        return state.copy().set("world", world.with_body_pose(sim, state["world"], "cube", place))

    return apply


def high(cfg: HighConfig):
    def compute_task_state(sim, state):
        height = world.site_pose(sim, state["world"], sim.robot.tcp["arm"])[..., 2, 3]
        return height > cfg.success_height, torch.zeros_like(height, dtype=torch.bool), {"height": height}

    def own(sim, before, after):
        return torch.full_like(after["force"][..., 0], cfg.own_reward)

    return task_env(cfg, compute_task_state, get_reward=own if cfg.own_reward else None)


@pytest.fixture(autouse=True)
def _registered_parts(restored_registry):
    """Register the parts of these tests."""
    register_action("test_nudge")(nudge)
    register_event("test_aim")(aim)
    register_event("test_toss")(toss)
    register_env("test_high")(high)


NAMED = {
    "near": {"func": "distance_to_target", "weight": 0.8, "params": AIM | {"exponential": True, "sigma": 0.3}},
    "calm": {"func": "action_smoothness_penalty", "weight": 0.25, "params": {}},
    "slow": {"func": "joint_velocity_penalty", "weight": 0.5},
    "won": {"func": "success_reward", "mode": "add", "weight": 10.0, "params": {}},
}
EVENTS = {"aim": {"func": "test_aim", "mode": "reset"}, "toss": {"func": "test_toss", "mode": "reset"}}


def task(rewards=NAMED, events=EVENTS, **more):
    cfg = {"actions": {"nudge": {"func": "test_nudge"}}, "events": events, "rewards": rewards} | SCENE | more
    return make_env({"name": "test_high", "cfg": cfg})


COMPARED = ("reward", "info", "world", "targets", "elapsed")


def rollout(env, length=6, number=3, quiet=False):
    """States `[number, length + 1]`, from the reset on, under random actions or none."""
    keys = rng.split(rng.key(0), number * (length + 1)).reshape(length + 1, number)
    actions = 2.0 * rng.uniform(rng.key(1), (length, number, env.action_space.shape[0])) - 1.0
    states = [env.reset(keys[0])]
    with torch.no_grad():
        for t in range(length):
            action = torch.zeros_like(actions[t]) if quiet else actions[t]
            states.append(env.step(states[-1], action, env.draw(keys[t + 1])))
    return torch.stack([state.select(*COMPARED, strict=False) for state in states], 1)


def change(name, **keys):
    return NAMED | {name: NAMED[name] | keys}


def test_a_weight_in_the_config_changes_the_return_accordingly():
    states = rollout(task())
    terms = states["info", "rewards"]
    names = ["calm", "near", "slow", "won"]
    assert sorted(terms.keys()) == sorted(name + end for name in names for end in ("", "_weighted"))
    for name in names:
        close(terms[f"{name}_weighted"], NAMED[name]["weight"] * terms[name], 1e-6)
    close(states["reward"], sum(terms[f"{name}_weighted"] for name in names), 1e-6)
    for name in ("near", "calm", "slow"):
        assert (terms[name][:, 1:].sum(-1) != 0.0).all()
        heavy = rollout(task(change(name, weight=NAMED[name]["weight"] + 2.0)))
        assert torch.equal(heavy["info", "rewards", name], terms[name])  # raw terms know no weight
        close(heavy["reward"].sum(-1) - states["reward"].sum(-1), 2.0 * terms[name].sum(-1), 1e-4)


def test_success_is_paid_in_the_step_that_succeeds():
    states = rollout(task(success_height=0.3))
    paid = states["info", "rewards", "won_weighted"]
    assert (paid[:, 1:] == 10.0).all() and (paid[:, 0] == 0.0).all() and states["info", "success"][:, 1:].all()


def test_replace_is_instead_of_what_is_added():
    plain = rollout(task())
    instead = rollout(task(change("slow", mode="replace")))
    assert torch.equal(instead["reward"], instead["info", "rewards", "slow_weighted"])
    assert torch.equal(
        instead["info", "rewards", "near"], plain["info", "rewards", "near"]
    )  # logged, but not part of the reward
    own = rollout(task(own_reward=5.0))
    close(own["reward"][:, 1:], plain["reward"][:, 1:] + 5.0, 1e-6)
    assert (own["info", "rewards", "task"][:, 1:] == 5.0).all()
    assert torch.equal(rollout(task(change("slow", mode="replace"), own_reward=5.0))["reward"], instead["reward"])
    last = rollout(task(change("near", mode="replace") | {"slow": NAMED["slow"] | {"mode": "replace"}}))
    assert torch.equal(last["reward"], instead["reward"])  # of two the last by name


def test_the_order_of_terms_in_the_config_does_not_matter():
    mirrored = dict(reversed(NAMED.items()))
    assert list(mirrored) != list(NAMED)
    assert torch.equal(rollout(task(mirrored))["reward"], rollout(task())["reward"])


def test_a_term_of_the_users_own_and_one_in_place_of_a_built_in_one():
    class OwnConfig(ConfigModel):
        """Own."""

        per_metre: float = Field(1.0, description="1/m")

    @register_reward("test_own")
    def own(cfg: OwnConfig, sim):
        site = sim.robot.tcp["arm"]
        return lambda before, after: cfg.per_metre * world.site_pose(sim, after["world"], site)[..., 2, 3]

    @register_reward("success_reward", override=True)
    def unlucky(cfg: OwnConfig, sim):
        return lambda before, after: torch.full_like(after["force"][..., 0], -7.0 * cfg.per_metre)

    mine = {
        "high": {"func": "test_own", "weight": 2.0, "params": {"per_metre": 3.0}},
        "won": {"func": "success_reward"},
    }
    states = rollout(task(mine))
    close(states["reward"][:, 1:], 6.0 * states["info", "metrics", "height"][:, 1:] - 7.0, 1e-5)
    with pytest.raises(ValueError, match="reward 'test_own' is already registered; pass override=True"):
        register_reward("test_own")(own)


def test_progress_is_of_one_step_and_never_of_two_episodes():
    """Nothing moves but at a start, where events throw cube and target about: no step has any progress to pay."""
    progress = {"on": {"func": "incremental_distance_to_target", "params": AIM | {"tanh_scale": 1.0}}}
    env = auto_reset(task(progress, max_episode_steps=2))
    states = rollout(env, quiet=True, length=8)
    assert states["elapsed"][0].tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    place = world.body_pose(env.scene, states["world"], "cube")[..., :3, 3]
    distance = (states["targets", "goal_pose"] - place).norm(dim=-1)
    assert ((distance[:, 2::2] - distance[:, :-1:2]).abs() > 1e-2).float().mean() > 0.8
    assert (states["reward"].abs() < 1e-3).all()  # a resting cube sinks a little into the floor
    often = EVENTS | {"again": {"func": "test_aim", "mode": "interval", "interval_step": 1}}
    states = rollout(auto_reset(task(progress, often, max_episode_steps=3)), quiet=True)
    assert (states["targets", "goal_pose"].diff(dim=1).norm(dim=-1) > 1e-2).all()
    assert (states["reward"].abs() < 1e-3).all()


def test_progress_is_paid_where_there_is_some():
    """A cube falls 0.5 m from above its target: the distances' difference, step by step."""
    progress = {"on": {"func": "incremental_distance_to_target", "params": AIM | {"tanh_scale": 2.0}}}
    cube = SCENE["rigid_object"][0] | {"init_pos": [-0.6, -0.4, 1.0]}
    env = task(progress, {"aim": EVENTS["aim"]}, rigid_object=[cube])
    states = rollout(env, quiet=True)
    place = world.body_pose(env.scene, states["world"], "cube")[..., :3, 3]
    distance = (states["targets", "goal_pose"] - place).norm(dim=-1)
    close(states["reward"][:, 1:], torch.tanh(-2.0 * distance.diff(dim=-1)), 1e-5)
    assert (states["reward"][:, 2:] > 1e-3).all()


def test_the_first_action_of_an_episode_is_no_change():
    env = task({"calm": NAMED["calm"]}, {}, max_episode_steps=3)
    states = rollout(auto_reset(env), length=6)
    drawn = 2.0 * rng.uniform(rng.key(1), (6, 3, 6)) - 1.0
    change = -0.25 * (drawn[1:] - drawn[:-1]).norm(dim=-1).T
    change[:, 2] = 0.0
    close(states["reward"], torch.cat((torch.zeros(3, 2), change), -1), 1e-5)
    bare = rollout(env, length=3)  # as evaluation and users of the bare task see it
    close(bare["reward"], states["reward"][:, :4], 0.0)


def test_the_terms_of_push_cube_as_upstream_writes_them():
    """Observations and rewards of EmbodiChain's own config; 6 joints where its arm with a gripper has 8."""
    joints = {"joint_ids": [0, 1, 2, 3, 4, 5]}
    seen = {
        "robot_qpos": {"func": "normalize_robot_joint_data", "mode": "modify", "name": "robot/qpos", "params": joints},
        "robot_ee_pos": {
            "func": "get_robot_eef_pose",
            "mode": "add",
            "name": "robot/ee_pos",
            "params": {"part_name": "arm"},
        },
        "cube_pos": {
            "func": "get_rigid_object_pose",
            "mode": "add",
            "name": "object/cube_pos",
            "params": {"entity_cfg": {"uid": "cube"}},
        },
        "goal_pos": {
            "func": "target_position",
            "mode": "add",
            "name": "object/goal_pos",
            "params": {"target_pose_key": "goal_pose"},
        },
    }
    pushing = PUSH | {"target_pose_key": "goal_pose", "behind_offset": 0.03, "height_offset": 0.015}
    pushing |= {"distance_scale": 8.0, "part_name": "arm"}
    close_to = AIM | {"exponential": True, "sigma": 0.12, "use_xy_only": True}
    terms = {
        "reaching_reward": {"func": "reaching_behind_object", "mode": "add", "weight": 0.03, "params": pushing},
        "goal_distance_reward": {"func": "distance_to_target", "mode": "add", "weight": 0.8, "params": close_to},
        "action_penalty": {"func": "action_smoothness_penalty", "mode": "add", "weight": 0.01, "params": {}},
        "success_bonus": {"func": "success_reward", "mode": "add", "weight": 10.0, "params": {}},
    }
    env = task(terms, observations=seen, max_episode_steps=100)
    assert env.observation_space.shape == (16 + 3 + 16 + 6 + 6 + 6,)
    check_fields(env, "test_high")
    begin = env.reset(rng.split(rng.key(0), 2))
    cube, goal, tool, qpos = (
        begin["obs"][:, :16],
        begin["obs"][:, 16:19],
        begin["obs"][:, 19:35],
        begin["obs"][:, 41:47],
    )
    close(cube.unflatten(-1, (4, 4)), world.body_pose(env.scene, begin["world"], "cube"), 0.0)
    close(goal, begin["targets", "goal_pose"], 0.0)
    close(tool.unflatten(-1, (4, 4)), world.site_pose(env.scene, begin["world"], "ur/arm_tcp"), 0.0)
    home = torch.tensor([0.0, -1.57, 1.57, -1.57, -1.57, 0.0])
    close(qpos, (home / torch.tensor([2.0, 2.0, 1.0, 2.0, 2.0, 2.0]) / pi + 1.0).expand(2, 6) / 2.0, 1e-5)
    assert (rollout(env)["reward"][:, 1:] != 0.0).all()


@pytest.mark.parametrize(
    ("name", "mode", "params", "message"),
    [
        ("normalize_robot_joint_data", "add", {}, "mode: this term changes an existing entry; use mode modify"),
        ("get_robot_eef_pose", "modify", {}, "mode: this term makes a new entry; use mode add"),
        ("get_rigid_object_pose", "modify", {"entity_cfg": CUBE}, "mode: this term makes a new entry; use mode add"),
    ],
)
def test_an_observation_in_the_wrong_mode_is_refused_where_it_stands(name, mode, params, message):
    entry = {"func": name, "mode": mode, "name": "robot/qpos" if mode == "modify" else "robot/new", "params": params}
    with pytest.raises(ConfigError) as error:
        task(observations={"mine": entry})
    assert str(error.value) == f"env.cfg.observations.mine ({name}): {message}"


def test_a_reward_without_its_target_is_refused_before_training():
    with pytest.raises(ConfigError) as error:
        check_fields(task(events={}), "test_high")
    message = (
        "env.cfg.rewards.near (distance_to_target): params.target_pose_key: no target 'goal_pose'; an event such as "
    )
    assert str(error.value).startswith(message)
