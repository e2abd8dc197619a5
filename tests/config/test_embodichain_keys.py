"""Keys and values that EmbodiChain's configs may have are read with EmbodiChain's meaning, or noted in one line."""

import copy
import json
import re
from math import isnan

import pytest
import torch
from support.config_files import with_warnings
from support.paths import ROOT
from support.small_runs import small

from ecrl import registry
from ecrl.config import config_from_dict, load_config
from ecrl.config.embodichain_releases import NO_LIMIT
from ecrl.config.model import ConfigModel
from ecrl.envs import Env, make_env
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import crossed, init_state, train_iter
from ecrl.policies.mlp import ACTIVATIONS
from ecrl.registry import register_env, registered
from ecrl.run.evaluation import check_evaluation
from ecrl.run.train import train

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "relu"}}
CART_POLE = {
    "trainer": {"num_envs": 4},
    "env": {"id": "CartPoleRL"},
    "policy": {"name": "actor_critic", "actor": NET, "critic": NET},
    "algorithm": {"name": "ppo", "cfg": {"optimizer": {"name": "adam"}, "lr_scheduler": {"name": "linear"}}},
}
CUBE = {"uid": "cube", "shape": {"shape_type": "Cube", "size": [0.1, 0.1, 0.1]}}


def _with(path, value, base=CART_POLE):
    data = copy.deepcopy(base)
    *parents, last = path.split(".")
    section = data
    for key in parents:
        section = section.setdefault(key, {})
    section[last] = value
    return data


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("policy.name", "Actor_Critic"),
        ("policy.actor.type", "MLP"),
        ("policy.critic.type", "Mlp"),
        ("policy.actor.network_cfg.activation", "ReLU"),
        ("policy.critic.network_cfg.activation", "RELU"),
        ("algorithm.name", "PPO"),
        ("algorithm.cfg.optimizer.name", "Adam"),
        ("algorithm.cfg.lr_scheduler.name", "Linear"),
    ],
)
def test_names_in_any_case(path, name):
    plain = config_from_dict(CART_POLE)
    assert with_warnings(config_from_dict, _with(path, name)) == (plain, [])
    assert config_from_dict(CART_POLE, overrides={path: name}) == plain  # the settings of the component stay
    section, _, key = path.rpartition(".")
    assert plain.replace(**{path: name}) == plain and key in ("name", "type", "activation") and section


def test_names_in_any_case_in_a_whole_section():
    section = {"name": "GRPO", "cfg": {"group_size": 2}}
    cfg = config_from_dict(CART_POLE, overrides={"algorithm": section})
    assert (cfg.algorithm.name, cfg.algorithm.cfg.group_size, section["name"]) == ("grpo", 2, "GRPO")


def test_the_name_of_a_users_component_keeps_its_case(restored_registry):
    from ecrl.algorithms.ppo import PPOConfig
    from ecrl.registry import register_algorithm

    @register_algorithm("PPO")
    def mine(cfg: PPOConfig) -> object: ...

    assert config_from_dict(_with("algorithm.name", "PPO")).algorithm.name == "PPO"
    assert config_from_dict(_with("algorithm.name", "Ppo")).algorithm.name == "ppo"


@pytest.mark.parametrize(
    ("path", "name", "line"),
    [
        ("algorithm.name", "PPPO", "algorithm.name: unknown algorithm 'PPPO'; did you mean 'ppo'?"),
        ("algorithm.name", 3, "algorithm.name: expected a string, got 3"),
        ("policy.actor.network_cfg.activation", "ReLU6", "policy.actor.network_cfg.activation: expected 'relu', 'elu'"),
        (
            "policy.actor.network_cfg.activation",
            1,
            "policy.actor.network_cfg.activation: expected 'relu', 'elu', 'tanh'",
        ),
        ("algorithm.cfg.optimizer.name", "Adan", "algorithm.cfg.optimizer.name: expected 'adam', 'adamw'"),
    ],
)
def test_unknown_names(path, name, line):
    with pytest.raises(ConfigError, match="^config: " + re.escape(line)):
        config_from_dict(_with(path, name))


@pytest.mark.parametrize("name", ["swish", "Swish", "SiLU"])
def test_swish_is_another_name_of_silu(name):
    path = "policy.actor.network_cfg.activation"
    cfg, messages = with_warnings(config_from_dict, _with(path, name))
    assert messages == [] and cfg == config_from_dict(_with(path, "silu"))
    assert cfg.policy.actor.network_cfg.activation == "silu" and ACTIVATIONS["silu"] is torch.nn.SiLU


def test_the_schema_accepts_the_same_values():
    jsonschema = pytest.importorskip("jsonschema")
    from ecrl.config.json_schema import json_schema

    check = jsonschema.Draft202012Validator(json_schema())
    check.validate(_with("policy.actor.network_cfg.activation", "swish"))
    check.validate(_with("trainer.save_frequency_updates", 0) | {"env": {"name": "cartpole"}})
    check.validate(_with("env.cfg.max_episode_steps", -1))
    assert not check.is_valid(_with("env.cfg.max_episode_steps", -2))


# --- noted keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "policy", "reason"),
    [
        ("grpo", "actor_only", "GRPO compares the returns of a group, without a generalised advantage estimate"),
        ("apg", "actor_only", "APG differentiates the returns, without a generalised advantage estimate"),
    ],
)
def test_gae_lambda_of_algorithms_without_it(algorithm, policy, reason):
    data = {
        "trainer": {},
        "env": "point_mass",
        "policy": {"name": policy, "actor": NET},
        "algorithm": {"name": algorithm},
    }
    plain = config_from_dict(data)
    message = f"algorithm.cfg.gae_lambda has no meaning here ({reason}); ignored"
    assert with_warnings(config_from_dict, _with("algorithm.cfg.gae_lambda", 0.95, data)) == (plain, [message])


def test_gae_lambda_of_ppo_has_its_meaning():
    cfg, messages = with_warnings(config_from_dict, _with("algorithm.cfg.gae_lambda", 0.5))
    assert (cfg.algorithm.cfg.gae_lambda, messages) == (0.5, [])


def test_the_device_of_an_algorithm():
    cfg, messages = with_warnings(config_from_dict, _with("algorithm.cfg.device", "cuda:0"))
    reason = "trainer.device is also the device of the algorithm"
    assert cfg == config_from_dict(CART_POLE) and cfg.trainer.device == "cpu"
    assert messages == [f"algorithm.cfg.device has no meaning here ({reason}); ignored"]


# --- 0 and -1 -----------------------------------------------------------------------------------------------------


def test_a_frequency_of_zero_means_never(tmp_path):
    assert not any(crossed(step, 4, 0) for step in range(0, 40, 4))
    often = {"trainer.iterations": 3, "trainer.save_freq": 1, "trainer.enable_eval": True, "trainer.eval_freq": 1}
    often |= {"trainer.num_eval_episodes": 1, "env": {"name": "pendulum", "cfg": {"max_episode_steps": 5}}}
    counts = {}
    for name, zero in {"often": {}, "saves": {"trainer.save_freq": 0}, "evals": {"trainer.eval_freq": 0}}.items():
        cfg = small(**{**often, **zero})
        _, history = train(init_state(cfg), cfg, tmp_path / name, progress=False)
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        evaluations = sum(row["log_type"] == "evaluate" for row in rows)
        counts[name] = len(list((tmp_path / name / "checkpoints").glob("step_*"))), evaluations
        assert len(history) == 3
    assert counts == {"often": (3, 3), "saves": (1, 3), "evals": (3, 0)}  # the last state is always saved


@pytest.mark.parametrize("key", ["save_freq", "eval_freq"])
def test_other_frequencies_are_refused(key):
    with pytest.raises(ConfigError, match=rf"^config: trainer.{key}: must be at least 0, got -1; .*0: (never|only at)"):
        config_from_dict(_with(f"trainer.{key}", -1))


def test_zero_updates_between_checkpoints():
    assert config_from_dict(_with("trainer.save_frequency_updates", 0)).trainer.save_freq == 0


def test_no_time_limit():
    path = "env.cfg.max_episode_steps"
    for cfg in (
        config_from_dict(_with(path, -1)),
        config_from_dict(CART_POLE, overrides={path: -1}),
        config_from_dict(CART_POLE).replace(**{path: -1}),
    ):
        assert cfg.env.cfg.max_episode_steps == NO_LIMIT == 2**31 - 1
        assert config_from_dict(cfg.to_dict()) == cfg
    with pytest.raises(ConfigError, match=r"^config: env.cfg.max_episode_steps: must be at least 1, got 0; time limit"):
        config_from_dict(_with(path, 0))


def test_an_episode_without_a_time_limit_goes_on():
    trainer = {"compile": "off", "num_envs": 2, "buffer_size": 210, "iterations": 1}
    algorithm = {"name": "ppo", "cfg": {"batch_size": 420, "n_epochs": 1}}
    episodes = {}
    for limit in (-1, 200):
        env = {"name": "pendulum", "cfg": {"max_episode_steps": limit}}
        cfg = config_from_dict({"trainer": trainer, "env": env, "policy": CART_POLE["policy"], "algorithm": algorithm})
        record = next(train_iter(init_state(cfg), cfg))
        episodes[limit] = float(record["logs"]["episode_length_avg_100"])
    assert isnan(episodes[-1]) and episodes[200] == 200.0


# --- objects of v0.3.0 and later ----------------------------------------------------------------------------------

GROUPED = {
    "mass_props": {"mass": 3.0},
    "rigid_props": {"linear_damping": 0.5, "max_linear_velocity": 1.0},
    "collision_props": {"contact_offset": 0.003},
    "material_props": {"static_friction": 0.9, "restitution": 0.1},
}


def _cubes(attrs, section="rigid_object"):
    return {**CART_POLE, "env": {"id": "PushCubeRL", "cfg": {section: [CUBE | {"attrs": attrs}]}}}


@pytest.mark.parametrize("section", ["rigid_object", "background"])
def test_groups_of_the_properties_of_an_object(section):
    flat = {"mass": 3.0, "linear_damping": 0.5, "max_linear_velocity": 1.0, "static_friction": 0.9}
    cfg, messages = with_warnings(config_from_dict, _cubes(GROUPED | {"angular_damping": 0.25}, section))
    assert cfg == config_from_dict(_cubes(flat | {"angular_damping": 0.25}, section))
    place = f"env.cfg.{section}[0].attrs"
    noted = ["collision_props.contact_offset", "material_props.restitution"]
    assert [line.split(" has no meaning")[0] for line in messages] == [f"{place}.{name}" for name in noted]


@pytest.mark.parametrize(
    ("attrs", "line"),
    [
        (GROUPED | {"mass": 2.0}, "mass_props.mass: another name of 'mass', which is also given; keep one"),
        ({"mass_props": {"mass": -1.0}}, "mass_props.mass: must be above 0.0, got -1.0; mass, kg"),
        ({"mass_props": {"mas": 1.0}}, "mass_props.mas: unknown key; did you mean 'mass'?"),
        ({"mass_props": 3}, "mass_props: expected an object, got 3"),
        ({"mass_prop": {}}, "mass_prop: unknown key; "),
    ],
)
def test_wrong_groups(attrs, line):
    with pytest.raises(ConfigError, match="^" + re.escape(f"config: env.cfg.rigid_object[0].attrs.{line}")) as error:
        config_from_dict(_cubes(attrs))
    assert "\n" not in str(error.value)


def test_null_in_place_of_a_property_is_the_default():
    """EmbodiChain's groups are null, and so are their values, unless a file sets them."""
    expected = config_from_dict(_cubes({"static_friction": 0.9}))
    nulls = {"mass_props": None, "rigid_props": {"linear_damping": None}, "material_props": {"static_friction": 0.9}}
    assert with_warnings(config_from_dict, _cubes(nulls)) == (expected, [])
    with pytest.raises(ConfigError, match=r"attrs.mass: expected a number, got null; mass, kg$"):
        config_from_dict(_cubes({"mass": None}))


def test_gravity_and_inertia_of_an_object():
    grouped = {"rigid_props": {"has_gravity": False}, "mass_props": {"mass": 3.0, "recompute_inertia": True}}
    cfg, (message,) = with_warnings(config_from_dict, _cubes(grouped))
    assert cfg == config_from_dict(_cubes({"mass": 3.0, "has_gravity": False}))
    assert message == (
        "env.cfg.rigid_object[0].attrs.mass_props.recompute_inertia has no meaning here (the inertia always follows "
        "from the shape and the mass); ignored"
    )


@pytest.mark.parametrize(
    ("key", "params", "reason"),
    [
        (
            "physics_update_step",
            {"entity_cfg": {"uid": "cube"}},
            "an event does not step the physics; remove the key, and",
        ),
        ("recompute_inertia", {"entity_cfg": {"uid": "cube"}}, "the inertia always follows from the mass; remove the"),
        ("min_mass", {"entity_cfg": {"uid": "cube"}}, "the lower end of mass_range is the smallest mass; remove the"),
    ],
)
def test_params_of_events_that_ecrl_does_not_have(key, params, reason):
    pose = key == "physics_update_step"
    own = {"position_range": [[0.0] * 3, [0.1] * 3]} if pose else {"mass_range": [1.0, 2.0]}
    event = {"func": f"randomize_rigid_object_{'pose' if pose else 'mass'}", "params": params | own | {key: 1}}
    data = _cubes({})
    data["env"]["cfg"]["events"] = {"vary": event | {"mode": "reset"}}
    with pytest.raises(ConfigError) as error:
        config_from_dict(data)
    assert str(error.value).startswith(f"config: env.cfg.events.vary.params.{key}: unknown key; {reason}")
    assert f"`{key}`" in (ROOT / "docs" / "migration.md").read_text()


def test_attrs_of_a_robot():
    data = _cubes({})
    data["env"]["cfg"]["robot"] = {"attrs": {"has_gravity": False}}
    reason = "the robot's URDF or MJCF file defines its masses, frictions and gravity; remove the key"
    with pytest.raises(ConfigError, match=rf"^config: env.cfg.robot.attrs: unknown key; {reason}$"):
        config_from_dict(data)


@pytest.mark.parametrize("name", ["default", "newton"])
def test_the_name_of_a_simulator(name):
    cfg, messages = with_warnings(config_from_dict, _with("env.cfg.physics", name))
    reason = "this names EmbodiChain's simulator, but MuJoCo simulates the physics"
    assert cfg == config_from_dict(CART_POLE)
    assert messages == [f"env.cfg.physics has no meaning here ({reason}); ignored"]
    with pytest.raises(ConfigError, match=r"^config: env.cfg.physics: expected an object, got 'dart'; time step"):
        config_from_dict(_with("env.cfg.physics", "dart"))


def test_another_name_of_the_drives():
    drives = {"stiffness": 5.0, "drive_type": "force"}
    cfg, messages = with_warnings(config_from_dict, _with("env.cfg.robot", {"joint_drive_props": drives}))
    assert cfg.env.cfg.robot.drive_pros.stiffness == 5.0
    assert [line.split(" has no")[0] for line in messages] == ["env.cfg.robot.joint_drive_props.drive_type"]
    both = {"joint_drive_props": {"stiffness": 5.0}, "drive_pros": {"stiffness": 5.0}}
    with pytest.raises(
        ConfigError, match=r"robot.joint_drive_props: another name of 'drive_pros', which is also given"
    ):
        config_from_dict(_with("env.cfg.robot", both))


@pytest.mark.parametrize(
    ("robot", "message"),
    [
        ({"fpath": "Franka/Panda.urdf"}, "robot.model: no such file 'Franka/Panda.urdf'"),
        ({"class_type": "FrankaPanda"}, "robot.robot_type: unknown 'FrankaPanda'; known: CartPole, Finger, URRobot"),
    ],
)
def test_a_robot_under_another_name_of_the_key_is_not_replaced_by_the_built_in_robot(robot, message):
    cfg, messages = with_warnings(config_from_dict, _with("env.cfg.robot", robot))
    assert messages == []
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_env(cfg.env)


@pytest.mark.parametrize("key", ["sensor", "articulation", "rigid_object_group"])
def test_parts_of_a_scene_that_ecrl_does_not_build(key):
    with pytest.raises(ConfigError, match=rf"^config: env.cfg.{key}: unknown key; .*, and remove the key"):
        config_from_dict(_with(f"env.cfg.{key}", [{"uid": "part"}]))
    cfg, messages = with_warnings(config_from_dict, _with(f"env.cfg.{key}", []))
    assert cfg == config_from_dict(CART_POLE) and len(messages) == 1


# --- releases before v0.1.2 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "cfg"),
    [
        (
            "extensions.episode_length",
            {"extensions": {"success_threshold": 0.1, "episode_length": 9, "action_scale": 1.0}},
        ),
        ("extensions.action_type", {"extensions": {"action_type": "delta_qpos"}, "no_such_key": 1}),
        ("episode_length", {"obs_mode": "state", "episode_length": 9, "success_threshold": 0.1}),
    ],
)
def test_keys_of_older_releases(path, cfg):
    with pytest.raises(ConfigError) as error:
        config_from_dict({**CART_POLE, "env": {"id": "PushCubeRL", "cfg": cfg}})
    assert str(error.value) == (
        f"config: env.cfg.{path}: a key of EmbodiChain before v0.1.2, but ecrl reads only files of v0.1.2 and later; "
        "set the keys actions and max_episode_steps instead"
    )


def test_keys_of_older_releases_beside_actions_are_plain_faults():
    cfg = load_config("push_cube_ppo").env.to_dict()["cfg"]
    cfg["extensions"] = cfg["extensions"] | {"episode_length": 9}
    with pytest.raises(ConfigError, match=r"^config: env.cfg.extensions.episode_length: unknown key; known: "):
        config_from_dict({**CART_POLE, "env": {"id": "PushCubeRL", "cfg": cfg}})
    with pytest.raises(ConfigError, match=r"^config: env.cfg.episode_length: unknown key; "):
        config_from_dict({**CART_POLE, "env": {"name": "cartpole", "cfg": {"episode_length": 9}}})


# --- keys of a user's own environment ------------------------------------------------------------------------------


class OwnConfig(ConfigModel):
    """An environment whose keys have the names of EmbodiChain's keys, but other meanings."""

    physics: str = "euler"
    max_episode_steps: int = 5


def test_keys_of_ones_own_environment_keep_their_values(monkeypatch):
    registered("env")
    monkeypatch.setitem(registry._ENTRIES, "env", dict(registry._ENTRIES["env"]))

    @register_env("own")
    def own(cfg: OwnConfig) -> Env:
        raise AssertionError

    cfg = config_from_dict({**CART_POLE, "env": {"name": "own", "cfg": {"physics": "newton", "max_episode_steps": -1}}})
    assert cfg.env.cfg == OwnConfig(physics="newton", max_episode_steps=-1)


def test_an_evaluation_of_episodes_without_a_limit_warns():
    changes = {"trainer.enable_eval": True, "env.cfg.max_episode_steps": -1, "trainer.iterations": 1}
    cfg = small().replace(**changes)
    with pytest.warns(UserWarning, match=r"env\.cfg\.max_episode_steps: episodes have no time limit, so an evaluation"):
        check_evaluation(build(cfg), cfg)
