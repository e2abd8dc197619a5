"""The JSON schema: valid itself, lets every config through, and finds what the config check finds."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field

from ecrl import registry
from ecrl.config import PolicyConfig, config_from_dict
from ecrl.config.json_schema import KINDS, json_schema
from ecrl.config.model import ConfigModel
from ecrl.errors import ConfigError
from ecrl.registry import register_env, registered

jsonschema = pytest.importorskip("jsonschema")
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))
CARTPOLE = json.loads((CONFIGS[0].parent / "cartpole_ppo.json").read_text())
EVENT = {"func": "randomize_field", "params": {"field": "obs", "low": 0, "high": [1, 2]}}


@pytest.fixture(scope="module")
def check():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def _with(path, value):
    data = copy.deepcopy(CARTPOLE)
    *parents, last = path.split(".")
    section = data
    for key in parents:
        section = section.setdefault(key, {})
    section[last] = value
    return data


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_valid(check, path):
    check.validate(json.loads(path.read_text()))
    check.validate(config_from_dict(json.loads(path.read_text())).model_dump(mode="json"))


GOOD = [
    ("env", "cartpole"),
    ("env", {"id": "cartpole"}),
    ("env.cfg", {"gravity": 9, "num_envs": 4}),
    ("env", "gymnasium:CartPole-v1"),
    ("env", {"name": "gymnasium:CartPole-v1"}),
    ("env", {"name": "gymnasium", "cfg": {"id": "CartPole-v1"}}),
    ("trainer", {"rollout_steps": 4}),
    ("trainer", {"update_horizon": 4, "total_timesteps": 9, "save_frequency_updates": 2}),
    ("trainer.events", {"train": {"push": EVENT}}),
    ("trainer.eval_seed", None),
    ("algorithm.cfg", {"optimizer": {"name": "sgd", "learning_rate": 1}}),
    ("algorithm.cfg.lr_scheduler", None),
    ("policy.actor", {"network_cfg": {"hidden_sizes": []}}),
    ("policy.actor", {}),
    ("policy.actor", "mlp"),
]
BAD = [
    ("trainer.sede", 1),
    ("trainer.seed", "x"),
    ("trainer.num_envs", 0),
    ("trainer.compile", "yes"),
    ("polcy", {}),
    ("env", "cartpol"),
    ("env", {}),
    ("env", {"name": "cartpole", "id": "cartpole"}),
    ("env", {"name": "gymnasium"}),
    ("env", "gymnasium:"),
    ("env", {"name": "gymnasium:CartPole-v1", "cfg": {"id": "CartPole-v1"}}),
    ("env.cfg", {"gravty": 1}),
    ("env.cfg", {"gravity": 0}),
    ("trainer.events", {"train": {"push": {"func": "randomize_field"}}}),
    ("trainer.events", {"train": {"push": EVENT | {"func": "randomise"}}}),
    ("trainer.events", {"tran": {}}),
    ("policy.name", "actor_only"),  # which has no critic
    ("policy.name", "x"),
    ("policy.actor", "rnn"),
    ("policy.actor", 3),
    ("policy.actor.type", "rnn"),
    ("policy.actor.network_cfg.activation", "rleu"),
    ("algorithm.name", "pp"),
    ("algorithm.cfg.gamma", 2),
    ("algorithm.cfg.optimizer", {"name": "adan"}),
]


@pytest.mark.parametrize(("path", "value"), GOOD, ids=[f"{i}-{path}" for i, (path, _) in enumerate(GOOD)])
def test_good_configs_are_valid(check, path, value):
    config_from_dict(_with(path, value))
    check.validate(_with(path, value))


@pytest.mark.parametrize(("path", "value"), BAD, ids=[f"{i}-{path}" for i, (path, _) in enumerate(BAD)])
def test_bad_configs_are_not(check, path, value):
    with pytest.raises(ConfigError):
        config_from_dict(_with(path, value))
    assert not check.is_valid(_with(path, value))


def test_the_environment_may_stand_elsewhere(check):
    data = {key: value for key, value in CARTPOLE.items() if key != "env"}
    assert not check.is_valid(data) and not check.is_valid({key: data[key] for key in ("policy", "algorithm")})
    for env in ("cartpole", {"id": "cartpole", "cfg": {"gravity": 9.0}}):
        check.validate(data | {"trainer": {"learning_env": env}})
    assert not check.is_valid(data | {"trainer": {"learning_env": "cartpol"}})
    check.validate(data | {"trainer": {"gym_config": "gym.json"}})


def _leaves(section, defs, path=()):
    """Every described key below a section."""
    section = defs[section["$ref"].rpartition("/")[2]] if "$ref" in section else section
    for key, value in section.get("properties", {}).items():
        yield (*path, key), value
        if "$ref" in value:
            yield from _leaves(value, defs, (*path, key))


def test_every_key_has_a_description_and_every_part_its_settings():
    schema = json_schema()
    for name, section in schema["$defs"].items():
        for path, value in _leaves(section, schema["$defs"]):
            assert value is False or value.get("description"), f"{name}.{'.'.join(path)}"
    for kind in KINDS:
        for name in registered(kind):
            config = registry.lookup(kind, name).config
            shown = "PolicyConfig-plain" if config is PolicyConfig else config.__name__
            assert shown in schema["$defs"]
            for key, field in config.model_fields.items():
                assert schema["$defs"][shown]["properties"][key]["description"] == field.description
    trainer = schema["$defs"]["TrainerConfig"]["properties"]
    assert (trainer["seed"]["default"], trainer["exp_name"]["default"]) == (1, "generic_exp")


def test_users_parts_are_filled_in(monkeypatch):
    monkeypatch.setitem(registry._ENTRIES, "env", dict(registry._ENTRIES["env"]))

    class Config(ConfigModel):  # a name that ecrl also has, as may happen in a notebook
        size: int = Field(description="a number")

    @register_env("mine")
    def mine(cfg: Config) -> object:
        raise AssertionError("the schema needs no parts made")

    check = jsonschema.Draft202012Validator(json_schema())
    check.validate(_with("env", {"name": "mine", "cfg": {"size": 3}}))
    for cfg in ({}, {"size": "x"}, {"sise": 3}):
        assert not check.is_valid(_with("env", {"name": "mine", "cfg": cfg}))
    check.validate(CARTPOLE)


def test_a_policy_without_keys_of_its_own_is_no_endless_schema(monkeypatch):
    monkeypatch.setitem(registry._ENTRIES["policy"], "plain", registry.Entry(PolicyConfig, print))
    check = jsonschema.Draft202012Validator(json_schema())
    data = {"env": "cartpole", "policy": {"name": "plain", "normalize_obs": True}, "algorithm": {"name": "grpo"}}
    check.validate(data)
    assert not check.is_valid(data | {"policy": {"name": "plain", "normalise": True}})
    test_every_key_has_a_description_and_every_part_its_settings()


@pytest.mark.parametrize("arguments", [["schema"], ["--help"]], ids=" ".join)
def test_a_command_ends_quietly_if_the_reader_of_its_output_ends_first(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "ecrl", *arguments]
        result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (128 + 13, "")  # 13 is SIGPIPE
