"""Sections of EmbodiChain's tutorial load unchanged in other configs, and their algorithms train."""

import copy
import json
import warnings

import pytest
import torch
from pydantic import Field
from support.config_files import with_warnings
from support.embodichain_files import place

from ecrl import registry
from ecrl.config import config_from_dict, load_config
from ecrl.config.model import ConfigModel, Positive
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.errors import ConfigError
from ecrl.loop.iteration import device_of, init_state, train_iter
from ecrl.registry import register_env, registered

PUSH_CUBE = """
"env": {
  "id": "PushCubeRL",
  "cfg": {
    "num_envs": 4,
    "actions": {
      "delta_qpos": {
        "func": "DeltaQposTerm",
        "params": { "scale": 0.1 }
      }
    },
    "extensions": {
      "success_threshold": 0.1
    }
  }
}
"""
MY_TASK = """
"env": {
  "id": "MyTaskRL",
  "cfg": {
    "num_envs": 4,
    "actions": {
      "delta_qpos": {
        "func": "DeltaQposTerm",
        "params": { "scale": 0.1 }
      }
    },
    "extensions": {
      "success_threshold": 0.05
    }
  }
}
"""
POLICY = """
"policy": {
  "name": "actor_critic",
  "actor": {
    "type": "mlp",
    "network_cfg": {
      "hidden_sizes": [256, 256],
      "activation": "relu"
    }
  },
  "critic": {
    "type": "mlp",
    "network_cfg": {
      "hidden_sizes": [256, 256],
      "activation": "relu"
    }
  }
}
"""
PPO = """
"algorithm": {
  "name": "ppo",
  "cfg": {
    "learning_rate": 0.0001,
    "n_epochs": 10,
    "batch_size": 64,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_coef": 0.2,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5
  }
}
"""
GRPO = """
"algorithm": {
  "name": "grpo",
  "cfg": {
    "learning_rate": 0.0001,
    "n_epochs": 10,
    "batch_size": 8192,
    "gamma": 0.99,
    "clip_coef": 0.2,
    "ent_coef": 0.001,
    "kl_coef": 0,
    "group_size": 4,
    "eps": 1e-8,
    "reset_every_rollout": true,
    "max_grad_norm": 0.5,
    "truncate_at_first_done": true
  }
}
"""
ACTOR_ONLY = {"name": "actor_only", "actor": json.loads(f"{{{POLICY}}}")["policy"]["actor"]}
SMALL = {"device": "cpu", "compile": "off", "num_envs": 8, "buffer_size": 16, "iterations": 2}


class Extensions(ConfigModel):
    success_threshold: Positive = Field(0.1, description="m")


class MyTaskConfig(TaskConfig):
    """A task of the user's own."""

    extensions: Extensions = Field(Extensions(), description="numbers of the task")


@pytest.fixture(autouse=True)
def _tasks(monkeypatch):
    known = registered("env")  # imports the built-in parts, which must not be undone
    monkeypatch.setitem(registry._ENTRIES, "env", dict(registry._ENTRIES["env"]))
    assert {"PushCubeRL", "CartPoleRL"} <= set(known)

    @register_env("MyTaskRL")
    def scene(cfg: MyTaskConfig) -> object:
        raise AssertionError("a config is checked without making its parts")


def _section(text):
    return json.loads(f"{{{text}}}")


def _around(section):
    """A whole config around a section; what is around fits the section."""
    algorithm = section.get("algorithm", {}).get("name", "ppo")
    policy = _section(POLICY) if algorithm == "ppo" else {"policy": copy.deepcopy(ACTOR_ONLY)}
    return {"trainer": dict(SMALL), "env": "cartpole", **policy, **_section(PPO), **section}


TRAIN, GYM = "tutorial/push_cube/train_config.json", "v0.2.0/push_cube/gym_config.json"


def test_values_of_the_two_files(tmp_path):
    cfg, _ = with_warnings(load_config, place(tmp_path, TRAIN, GYM))  # the second file is below the first one's folder
    assert (cfg.env.cfg.extensions.success_threshold, cfg.trainer.num_envs) == (0.1, 64)
    assert cfg.trainer.events.eval["record_camera"].params.eye == (-1.4, 1.4, 2.0)
    cfg, messages = with_warnings(load_config, place(tmp_path, "v0.2.4/point_mass/train_apg.yaml", None))
    assert messages == [] and (cfg.trainer.buffer_size, cfg.algorithm.cfg.segment_length) == (100, 100)
    assert cfg.trainer.save_freq == 50 * 100 * 64 and cfg.env.cfg.success_threshold == 0.03
    assert cfg.policy.initial_log_std == -2.0
    cfg, messages = with_warnings(load_config, place(tmp_path, "v0.2.4/point_mass/train_ppo.yaml", None))
    assert (
        messages == [] and cfg.env.cfg.success_bonus == 5.0 and cfg.algorithm.cfg.lr_scheduler.kwargs.end_factor == 0.4
    )


def test_the_device_is_looked_for_when_used(tmp_path):
    cfg, _ = with_warnings(load_config, place(tmp_path, TRAIN, GYM))
    if torch.cuda.is_available():
        assert device_of(cfg) == torch.device("cuda:0")
    else:
        with pytest.raises(ConfigError, match=r"^trainer.device: cuda:0 is not available; available: cpu"):
            device_of(cfg)


def test_the_train_config_without_its_second_file(tmp_path):
    path = place(tmp_path, TRAIN, None)
    with pytest.raises(
        ConfigError, match=r"trainer.gym_config: no such file 'configs/agents.*gym_config.json'"
    ) as error:
        load_config(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "name", "threshold"), [(PUSH_CUBE, "PushCubeRL", 0.1), (MY_TASK, "MyTaskRL", 0.05)])
def test_env_sections(text, name, threshold):
    section = _section(text)
    cfg, warned = with_warnings(config_from_dict, _around(section) | {"trainer": {}})
    assert (cfg.env.name, cfg.trainer.num_envs, warned) == (name, 4, [])
    assert set(cfg.env.cfg.actions) == {"delta_qpos"} and cfg.env.cfg.actions["delta_qpos"].params.scale == 0.1
    assert cfg.env.cfg.extensions.success_threshold == threshold
    assert config_from_dict(_around(section)).trainer.num_envs == 8  # the trainer's number, if it sets one


@pytest.mark.parametrize("text", [POLICY, PPO, GRPO])
def test_policy_and_algorithm_sections(text):
    section = _section(text)
    cfg, warned = with_warnings(config_from_dict, _around(section))
    assert warned == []
    (name, written), loaded = section.popitem(), cfg.model_dump(mode="json")
    assert loaded[name]["name"] == written["name"]
    if name == "algorithm":
        assert written["cfg"].items() <= loaded[name]["cfg"].items()
    else:
        for net in ("actor", "critic"):
            assert written[net]["network_cfg"].items() <= loaded[name][net]["network_cfg"].items()


@pytest.mark.parametrize("text", [PPO, GRPO], ids=["ppo", "grpo"])
@pytest.mark.parametrize("keys", [{}, {"headless": True, "enable_rt": False, "gpu_id": 0}], ids=["plain", "inert"])
def test_sections_train_around_cartpole(text, keys):
    data = _around(_section(text))
    data["trainer"] |= keys
    cfg, warned = with_warnings(config_from_dict, data)
    assert [line.split()[0] for line in warned] == [f"trainer.{key}" for key in keys]
    state = init_state(cfg)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = list(train_iter(state, cfg))
    above = ["algorithm.cfg.batch_size"] * ("8192" in text)  # above the small rollout
    assert {str(w.message).split()[0] for w in caught} <= set(above)  # each warning is printed once per process
    assert [record["log_type"] for record in records] == ["collect", "train"] * 2
    assert [record["sample_step"] for record in records] == [128, 128, 256, 256]
    assert all(torch.isfinite(value).all() for name, value in records[-1]["logs"].items() if "episode" not in name)
    before, after = (dict(s["params"].flatten_keys(".").items()) for s in (state, records[-1]["state"]))
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_the_train_config_around_cartpole_by_overrides(tmp_path):
    path = place(tmp_path, TRAIN, GYM)
    overrides = {f"trainer.{key}": value for key, value in SMALL.items()} | {"env.name": "cartpole"}
    overrides |= {"trainer.enable_eval": False, "trainer.use_wandb": False, "algorithm.cfg.batch_size": 64}
    cfg, warned = with_warnings(load_config, path, overrides)
    assert warned[0].startswith("trainer.gym_config has no meaning here (") and "is for 'PushCubeRL'" in warned[0]
    assert len(list(train_iter(init_state(cfg), cfg))) == 4
