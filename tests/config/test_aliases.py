"""Other names of keys, and EmbodiChain's notation, become ecrl's keys; messages use the written names."""

import copy
import json
import re
import warnings

import pytest
from pydantic import Field

from ecrl.config import config_from_dict, load_config
from ecrl.config.model import ConfigModel
from ecrl.errors import ConfigError
from ecrl.registry import register_env

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
BASE = {"policy": {"name": "actor_critic", "actor": NET, "critic": NET}, "algorithm": {"name": "ppo"}}
APG = {"policy": {"name": "actor_only", "actor": NET}, "algorithm": {"name": "apg"}}


class PartConfig(ConfigModel):
    size: int = Field(1, description="a number")
    colour: str = Field("red", description="a word")


class SceneConfig(ConfigModel):
    max_episode_steps: int = Field(9, ge=1, description="time limit")
    actions: PartConfig = Field(PartConfig(), description="how actions are meant")
    robot: str = Field("arm", description="a key that is otherwise without meaning")


@pytest.fixture(autouse=True)
def _scene(restored_registry):
    @register_env("scene")
    def scene(cfg: SceneConfig) -> object:
        raise AssertionError("a config is checked without making its parts")


def _config(trainer=None, base=BASE, **sections):
    return config_from_dict(copy.deepcopy({**base, "trainer": trainer or {}, **sections}), "run")


def _faults(*args, **sections):
    with pytest.raises(ConfigError) as error:
        _config(*args, **sections)
    return [line.removeprefix("run: ") for line in str(error.value).split("\n")]


@pytest.mark.parametrize("env", ["scene", {"name": "scene"}, {"id": "scene"}])
def test_learning_env_is_env(env):
    assert _config({"learning_env": env}) == _config(env=env)
    settings = {"max_episode_steps": 5, "num_envs": 3}
    if isinstance(env, dict):
        there = _config({"learning_env": env | {"cfg": settings}})
        assert there == _config({"num_envs": 3}, env={"name": "scene", "cfg": {"max_episode_steps": 5}})
    assert _faults({"learning_env": env}, env="scene") == [
        "trainer.learning_env: another name of 'env', which is also given; keep one"
    ]


def test_faults_are_where_they_were_written():
    wrong = {"id": "scene", "cfg": {"sise": 1, "actions": {"size": "x"}, "num_envs": 0}}
    assert [fault.split(";")[0] for fault in _faults({"learning_env": wrong, "update_horizon": 0})] == [
        "trainer.learning_env.cfg.num_envs: must be at least 1, got 0",
        "trainer.update_horizon: must be at least 1, got 0",
        "trainer.learning_env.cfg.sise: unknown key",
        "trainer.learning_env.cfg.actions.size: expected an integer, got 'x'",
    ]
    (fault,) = _faults({"learning_env": {"id": "scen"}})
    assert fault.startswith("trainer.learning_env.id: unknown env 'scen'; did you mean 'scene'? If the env is your own")


def test_one_number_of_steps():
    for key in ("update_horizon", "rollout_steps", "buffer_size"):
        assert _config({key: 7}, env="scene").trainer.buffer_size == 7
    assert _faults({"update_horizon": 7, "rollout_steps": 7}, env="scene") == [
        "trainer.update_horizon: another name of 'buffer_size', which is also given; keep one"
    ]


def test_keys_of_the_algorithm_in_the_trainer():
    trainer = {"segment_length": 5, "deterministic_actions": True}
    cfg = _config({"buffer_size": 10, **trainer}, APG, env="point_mass")
    here = {"name": "apg", "cfg": trainer}
    assert cfg == _config({"buffer_size": 10}, APG, env="point_mass", algorithm=here)
    assert (cfg.algorithm.cfg.segment_length, cfg.algorithm.cfg.deterministic_actions) == (5, True)
    assert _config(trainer, APG, env="point_mass").trainer.buffer_size == 5  # EmbodiChain's default
    assert _config({}, APG, env="point_mass", algorithm=here).trainer.buffer_size == 2048  # ours
    assert _faults(trainer, APG, env="point_mass", algorithm=here) == [
        f"trainer.{key}: another name of 'algorithm.cfg.{key}', which is also given; keep one" for key in trainer
    ]
    assert _faults(trainer, env="scene") == [
        "trainer.deterministic_actions: algorithm 'ppo' has no deterministic_actions; remove it"
    ]
    assert _faults({"segment_length": "x", "buffer_size": 3}, APG, env="point_mass")[0].startswith(
        "trainer.segment_length: expected an integer, got 'x'"
    )


@pytest.mark.parametrize(("total", "iterations"), [(1, 1), (35, 1), (36, 2), (70, 2), (71, 3)])
def test_total_timesteps(total, iterations):
    trainer = {"buffer_size": 5, "num_envs": 7, "total_timesteps": total}  # 35 steps per iteration
    assert _config(trainer, env="scene").trainer.iterations == iterations
    elsewhere = {"rollout_steps": 5, "total_timesteps": total}
    assert _config(elsewhere, env={"name": "scene", "cfg": {"num_envs": 7}}).trainer.iterations == iterations


def test_overrides_in_two_units_are_refused():
    message = "trainer.total_timesteps: sets 'iterations' in another unit, and 'iterations' is also given; keep one"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config("cartpole_ppo", {"trainer.total_timesteps": 10_000, "trainer.iterations": 5})
    assert load_config("cartpole_ppo", {"trainer.total_timesteps": 10_240}).trainer.iterations == 20


def test_defaults_count_too():
    trainer = _config({"total_timesteps": 64 * 2048 * 3, "save_frequency_updates": 2}, env="scene").trainer
    assert (trainer.iterations, trainer.save_freq) == (3, 64 * 2048 * 2)


@pytest.mark.parametrize(
    ("key", "expected", "least"), [("total_timesteps", "iterations", 1), ("save_frequency_updates", "save_freq", 0)]
)
def test_other_units_refuse(key, expected, least):
    assert _faults({key: 9, expected: 9}, env="scene") == [
        f"trainer.{key}: sets '{expected}' in another unit, and '{expected}' is also given; keep one"
    ]
    assert _faults({key: 9, "distributed": True}, env="scene") == [
        f"trainer.{key}: is only for runs of one process; in a distributed run, set '{expected}'"
    ]
    too_small = (least - 1, f"must be at least {least}, got {least - 1}")
    for value, text in (("x", "expected an integer, got 'x'"), too_small, (True, "expected")):
        (fault,) = _faults({key: value}, env="scene")
        assert fault.startswith(f"trainer.{key}: {text}")
    (fault,) = _faults({key: 9, "num_envs": "x"}, env="scene")
    assert fault.startswith("trainer.num_envs: expected an integer, got 'x'")


def test_save_frequency_updates():
    trainer = {"buffer_size": 5, "num_envs": 7, "save_frequency_updates": 3}
    assert _config(trainer, env="scene").trainer.save_freq == 105
    assert config_from_dict({**BASE, "trainer": trainer, "env": "scene"}, "run", {"trainer.save_freq": 9}) == _config(
        {"buffer_size": 5, "num_envs": 7, "save_freq": 9}, env="scene"
    )


def test_overrides_reach_keys_under_other_names():
    data = {**BASE, "trainer": {"learning_env": {"id": "scene", "cfg": {"max_episode_steps": 5}}, "iterations": 3}}
    changes = {"env.cfg.actions.size": 2, "trainer.learning_env.cfg.robot": "hand", "trainer.total_timesteps": 1}
    cfg = config_from_dict(data, "run", changes)
    assert cfg.env.cfg == SceneConfig(max_episode_steps=5, actions=PartConfig(size=2), robot="hand")
    assert cfg.trainer.iterations == 1
    assert config_from_dict(data, "run", {"env": "cartpole"}).env.name == "cartpole"
    assert config_from_dict(data, "run", {"env.id": "cartpole"}).env.name == "cartpole"  # without max_episode_steps: 5
    assert config_from_dict(data, "run", {"env.id": "cartpole"}).env.cfg.max_episode_steps == 500
    with pytest.raises(ConfigError) as error:
        config_from_dict(data, "run", {"trainer.learning_env.cfg.actions.sise": 2, "env.cfg.sise": 1})
    assert str(error.value).split("\n") == [
        "run: env.cfg.sise: unknown key; known: actions, max_episode_steps, robot",
        "run: trainer.learning_env.cfg.actions.sise: unknown key; did you mean 'size'?",
    ]
    assert data["trainer"]["learning_env"] == {"id": "scene", "cfg": {"max_episode_steps": 5}}  # unchanged


GYM = {
    "id": "scene",
    "max_episode_steps": 50,
    "num_envs": 3,
    "robot": "leg",
    "env": {"actions": {"size": 4, "colour": "blue"}},
}


def _gym_config(folder, gym=GYM, name="gym.json", **sections):
    (folder / name).write_text(json.dumps(gym) if isinstance(gym, dict) else gym)
    data = {"trainer": {"gym_config": name}, **BASE, **sections}
    (folder / "run.json").write_text(json.dumps(data))
    return folder / "run.json"


def _file_faults(path, **overrides):
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return [line.removeprefix(f"{path}: ") for line in str(error.value).split("\n")]


def test_gym_config(tmp_path):
    cfg = load_config(_gym_config(tmp_path))
    assert (cfg.env.name, cfg.trainer.num_envs) == ("scene", 3)
    expected = {"max_episode_steps": 50, "actions": {"size": 4, "colour": "blue"}, "robot": "leg"}
    assert cfg.env.cfg.model_dump() == expected
    assert config_from_dict(cfg.model_dump(mode="json")) == cfg  # a saved config needs no second file
    text = "id: scene\nmax_episode_steps: 50\nnum_envs: 3\nrobot: leg\nenv: {actions: {size: 4, colour: blue}}\n"
    assert load_config(_gym_config(tmp_path, text, "gym.yaml")) == cfg


def test_inline_env_wins_key_by_key(tmp_path):
    inline = {"name": "scene", "cfg": {"actions": {"size": 8}, "num_envs": 2}}
    cfg = load_config(_gym_config(tmp_path, env=inline))
    assert cfg.env.cfg == SceneConfig(max_episode_steps=50, actions=PartConfig(size=8, colour="blue"), robot="leg")
    assert cfg.trainer.num_envs == 2
    path = _gym_config(
        tmp_path, env={"cfg": {"actions": {"size": 8}}}, trainer={"gym_config": "gym.json", "num_envs": 4}
    )
    assert load_config(path).env == cfg.env and load_config(path).trainer.num_envs == 4
    assert load_config(path, {"env.cfg.actions.size": 9}).env.cfg.actions == PartConfig(size=9, colour="blue")


def test_gym_config_starts_from_the_working_directory(tmp_path, monkeypatch):
    path = _gym_config(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert load_config(path).env.cfg.max_episode_steps == 50  # next to the config
    (tmp_path / "here" / "gym.json").write_text(json.dumps(GYM | {"max_episode_steps": 20}))
    assert load_config(path).env.cfg.max_episode_steps == 20


def test_gym_config_for_another_env_is_left_aside(tmp_path):
    path = _gym_config(tmp_path, env="cartpole")
    message = "trainer.gym_config has no meaning here ({} is for 'scene', but env names 'cartpole'); ignored"
    for overrides in ({}, {"env.cfg.gravity": 9.0}):
        with pytest.warns(UserWarning) as caught:
            cfg = load_config(path, overrides)
        assert [str(w.message) for w in caught] == [message.format(tmp_path / "gym.json")]
        assert (cfg.env.name, cfg.env.cfg.max_episode_steps, cfg.trainer.num_envs) == ("cartpole", 500, 64)
    with pytest.warns(UserWarning, match="is for 'scene', but env names 'cartpole'"):
        assert load_config(_gym_config(tmp_path), {"env.name": "cartpole"}).env == cfg.env.model_copy(
            update={"cfg": type(cfg.env.cfg)()}
        )


@pytest.mark.parametrize(
    ("gym", "line"),
    [
        (GYM | {"id": "scen"}, "{}: id: unknown env 'scen'; did you mean 'scene'?"),
        ({"env": {}}, "trainer.gym_config: {}: id: expected the name of an environment"),
        (GYM | {"max_episode_steps": 0}, "{}: max_episode_steps: must be at least 1, got 0; time limit"),
        (GYM | {"num_envs": 0}, "{}: num_envs: must be at least 1, got 0; number of environments in each process"),
        (GYM | {"env": {"actoins": 1}}, "{}: env.actoins: unknown key; did you mean 'actions'?"),
        (GYM | {"env": {"actions": {"sise": 1}}}, "{}: env.actions.sise: unknown key; did you mean 'size'?"),
        (GYM | {"env": []}, "trainer.gym_config: {}: env: expected an object, got a list"),
        (GYM | {"env": {"robot": "x"}}, "trainer.gym_config: {}: env.robot: also given outside of 'env'; keep one"),
        ("[]", "trainer.gym_config: {}: expected an object, got a list"),
        ('{"id": "scene",}', "trainer.gym_config: {}:1:16: not JSON: "),
        ('{"id": "scene", "id": "scene"}', "trainer.gym_config: {}: id: given twice; keep one"),
    ],
)
def test_faults_of_a_gym_config_name_its_file(tmp_path, gym, line):
    (fault,) = _file_faults(_gym_config(tmp_path, gym))
    assert fault.startswith(line.format(tmp_path / "gym.json"))


def test_faults_elsewhere_do_not_hide_a_gym_config(tmp_path):
    text = json.dumps({"trainer": {"gym_config": "gym.json", "seed": 1}, **BASE}).replace('"seed"', '"seed": 2, "seed"')
    path = _gym_config(tmp_path)
    path.write_text(text)
    assert _file_faults(path) == ["trainer.seed: given twice; keep one"]  # and not that env is missing


def test_inline_faults_beside_a_gym_config(tmp_path):
    path = _gym_config(tmp_path, env={"cfg": {"actions": {"size": "x"}, "max_episode_steps": 0}})
    assert [fault.split(";")[0] for fault in _file_faults(path)] == [
        "env.cfg.max_episode_steps: must be at least 1, got 0",
        "env.cfg.actions.size: expected an integer, got 'x'",
    ]


@pytest.mark.parametrize("value", ["no.json", "\ud800", "a\0b", "x" * 5000, "", 3, None, ["gym.json"], "."])
def test_gym_config_must_be_a_file(tmp_path, value):
    path = _gym_config(tmp_path, trainer={"gym_config": value})
    (fault,) = _file_faults(path)  # and not that env is missing
    for env in ({"cfg": {"robot": "hand"}}, "scene"):
        assert _file_faults(_gym_config(tmp_path, trainer={"gym_config": value}, env=env)) == [fault]
    if isinstance(value, str) and value not in ("", "."):
        assert fault.startswith("trainer.gym_config: no such file '") and str(tmp_path) in fault
    else:
        assert fault.startswith("trainer.gym_config: ") and ("cannot be read" in fault or "expected the path" in fault)
    assert "\n" not in fault


def test_plain_configs_are_read_without_a_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cfg = _config(env={"name": "scene", "cfg": {"robot": "hand"}})
    assert caught == [] and (cfg.env.name, cfg.env.cfg.robot) == ("scene", "hand")


def test_settings_go_with_a_bare_name_of_an_environment():
    cfg = load_config("configs/pendulum_ppo.json", {"env": "pendulum", "env.cfg.gravity": 5.0})
    assert (cfg.env.name, cfg.env.cfg.gravity) == ("pendulum", 5.0)
