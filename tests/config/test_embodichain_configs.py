"""Configs as EmbodiChain's tutorial and repository have them load unchanged, and their algorithms train."""

import copy
import json
import warnings

import pytest
import torch
from pydantic import Field
from support.config_files import with_warnings

from ecrl import registry
from ecrl.config import config_from_dict, load_config
from ecrl.config.model import ConfigModel, Positive
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.errors import ConfigError
from ecrl.loop.iteration import device_of, init_state, train_iter
from ecrl.registry import register_env, registered

TRAIN_CONFIG = """
{
  "trainer": {
    "exp_name": "push_cube_ppo",
    "gym_config": "configs/agents/rl/push_cube/gym_config.json",
    "seed": 42,
    "device": "cuda:0",
    "headless": true,
    "enable_rt": false,
    "gpu_id": 0,
    "num_envs": 64,
    "iterations": 1000,
    "buffer_size": 1024,
    "enable_eval": true,
    "num_eval_envs": 16,
    "num_eval_episodes": 3,
    "eval_freq": 100,
    "save_freq": 100,
    "use_wandb": true,
    "wandb_project_name": "embodichain-push_cube",
    "events": {
      "eval": {
        "record_camera": {
          "func": "record_camera_data_async",
          "mode": "interval",
          "interval_step": 1,
          "params": {
            "name": "main_cam",
            "resolution": [640, 480],
            "eye": [-1.4, 1.4, 2.0],
            "target": [0, 0, 0],
            "up": [0, 0, 1],
            "intrinsics": [600, 600, 320, 240],
            "save_path": "./outputs/videos_ppo1/eval"
          }
        }
      }
    }
  },
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
  },
  "algorithm": {
    "name": "ppo",
    "cfg": {
      "learning_rate": 0.0001,
      "n_epochs": 10,
      "batch_size": 8192,
      "gamma": 0.99,
      "gae_lambda": 0.95,
      "clip_coef": 0.2,
      "ent_coef": 0.01,
      "vf_coef": 0.5,
      "max_grad_norm": 0.5
    }
  }
}
"""
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
ENTITY, GOAL = {"entity_cfg": {"uid": "cube"}}, {"target_pose_key": "goal_pose"}
TCP = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.16], [0.0, 0.0, 0.0, 1.0]]
GYM_CONFIG = {  # the shape of the file that `trainer.gym_config` names
    "id": "PushCubeRL",
    "max_episodes": 5,
    "max_episode_steps": 100,
    "env": {
        "events": {
            "randomize_cube": {
                "func": "randomize_rigid_object_pose",
                "mode": "reset",
                "params": {
                    **ENTITY,
                    "position_range": [[-0.2, -0.2, 0.0], [0.2, 0.2, 0.0]],
                    "relative_position": True,
                },
            },
            "randomize_goal": {
                "func": "randomize_target_pose",
                "mode": "reset",
                "params": {
                    "position_range": [[-0.3, -0.3, 0.05], [0.3, 0.3, 0.05]],
                    "relative_position": False,
                    "store_key": "goal_pose",
                },
            },
        },
        "observations": {
            "robot_qpos": {
                "func": "normalize_robot_joint_data",
                "mode": "modify",
                "name": "robot/qpos",
                "params": {"joint_ids": [0, 1, 2, 3, 4, 5]},
            },
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
                "params": ENTITY,
            },
            "goal_pos": {"func": "target_position", "mode": "add", "name": "object/goal_pos", "params": GOAL},
        },
        "rewards": {
            "reaching_reward": {
                "func": "reaching_behind_object",
                "mode": "add",
                "weight": 0.03,
                "params": {
                    "object_cfg": {"uid": "cube"},
                    **GOAL,
                    "behind_offset": 0.03,
                    "height_offset": 0.015,
                    "distance_scale": 8.0,
                    "part_name": "arm",
                },
            },
            "goal_distance_reward": {
                "func": "distance_to_target",
                "mode": "add",
                "weight": 0.8,
                "params": {
                    "source_entity_cfg": {"uid": "cube"},
                    **GOAL,
                    "exponential": True,
                    "sigma": 0.12,
                    "use_xy_only": True,
                },
            },
            "action_penalty": {"func": "action_smoothness_penalty", "mode": "add", "weight": 0.01, "params": {}},
            "success_bonus": {"func": "success_reward", "mode": "add", "weight": 10.0, "params": {}},
        },
        "actions": {"delta_qpos": {"func": "DeltaQposTerm", "params": {"scale": 0.1}}},
        "extensions": {"success_threshold": 0.1},
    },
    "robot": {
        "robot_type": "URRobot",
        "uid": "Manipulator",
        "urdf_cfg": {"components": [{"component_type": "hand", "urdf_path": "DH_PGI_140_80/DH_PGI_140_80.urdf"}]},
        "init_pos": [0.0, 0.0, 0.0],
        "init_rot": [0.0, 0.0, 0.0],
        "init_qpos": [0.0, -1.57, 1.57, -1.57, -1.57, 0.0, 0.04, 0.04],
        "drive_pros": {
            "drive_type": "force",
            "stiffness": 100000.0,
            "damping": 1000.0,
            "max_velocity": 2.0,
            "max_effort": 500.0,
        },
        "solver_cfg": {"arm": {"tcp": TCP}},
    },
    "sensor": [],
    "light": {},
    "background": [],
    "rigid_object": [
        {
            "uid": "cube",
            "shape": {"shape_type": "Cube", "size": [0.1, 0.1, 0.1]},
            "body_type": "dynamic",
            "init_pos": [-0.6, -0.4, 0.05],
            "attrs": {
                "mass": 2.0,
                "static_friction": 1.0,
                "dynamic_friction": 0.8,
                "linear_damping": 2.0,
                "angular_damping": 2.0,
                "contact_offset": 0.003,
                "restitution": 0.1,
                "max_linear_velocity": 1.0,
            },
        }
    ],
    "rigid_object_group": [],
    "articulation": [],
}
CART_POLE_GYM = {
    "id": "CartPoleRL",
    "max_episodes": 5,
    "max_episode_steps": 500,
    "env": {
        "events": {},
        "observations": {
            "robot_qpos": {
                "func": "normalize_robot_joint_data",
                "mode": "modify",
                "name": "robot/qpos",
                "params": {"joint_ids": [0, 1]},
            }
        },
        "rewards": {
            "velocity_penalty": {
                "func": "joint_velocity_penalty",
                "mode": "add",
                "weight": 0.005,
                "params": {"robot_uid": "Cart", "part_name": "hand"},
            }
        },
        "actions": {"delta_qpos": {"func": "DeltaQposTerm", "params": {"scale": 0.1}}},
        "extensions": {},
    },
    "robot": {
        "uid": "Cart",
        "urdf_cfg": {"components": [{"component_type": "arm", "urdf_path": "CartPole/cart_pole.urdf"}]},
        "init_pos": [0.0, 0.0, 0.5],
        "init_rot": [0.0, 0.0, 0.0],
        "init_qpos": [-0.2, 0.07],
        "drive_pros": {
            "stiffness": {"slider_to_cart": 1e1, "cart_to_pole": 1e-2},
            "damping": {"slider_to_cart": 1e0, "cart_to_pole": 1e-3},
            "max_effort": {"slider_to_cart": 1e2, "cart_to_pole": 1e-1},
        },
        "control_parts": {"arm": ["slider_to_cart"], "hand": ["cart_to_pole"]},
    },
    "sensor": [],
    "light": {},
    "background": [],
    "rigid_object": [],
    "rigid_object_group": [],
    "articulation": [],
}
GYM = {"push_cube": GYM_CONFIG, "cart_pole": CART_POLE_GYM}
OF_ITS_SIMULATOR = {  # keys of the files above that mean nothing here
    "push_cube": (
        "max_episodes",
        "sensor",
        "rigid_object_group",
        "articulation",
        "robot.drive_pros.drive_type",
        "robot.drive_pros.max_velocity",
        *(
            f"rigid_object[0].attrs.{name}"
            for name in ("dynamic_friction", "contact_offset", "restitution", "max_linear_velocity")
        ),
    ),
    "cart_pole": ("max_episodes", "sensor", "rigid_object_group", "articulation"),
}
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


def _write(folder, **files):
    for name, data in files.items():
        path = folder / name.replace("__", "/").replace("_json", ".json").replace("_yaml", ".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data if isinstance(data, str) else json.dumps(data))


def test_the_whole_train_config(tmp_path, monkeypatch):
    _write(tmp_path, train_config_json=TRAIN_CONFIG, configs__agents__rl__push_cube__gym_config_json=GYM_CONFIG)
    monkeypatch.chdir(tmp_path)
    cfg, warned = with_warnings(load_config, "train_config.json")
    trainer, written = cfg.trainer, json.loads(TRAIN_CONFIG)
    same = set(written["trainer"]) - {"gym_config", "headless", "enable_rt", "gpu_id", "events"}
    assert len(same) == 13
    assert {key: getattr(trainer, key) for key in same} == {key: written["trainer"][key] for key in same}
    assert (cfg.env.name, cfg.env.cfg.max_episode_steps, cfg.env.cfg.extensions.success_threshold) == (
        "PushCubeRL",
        100,
        0.1,
    )
    assert cfg.env.cfg.rewards["success_bonus"].weight == 10.0
    assert cfg.trainer.events.eval["record_camera"].params.eye == (-1.4, 1.4, 2.0)
    assert cfg.policy.actor.network_cfg.hidden_sizes == cfg.policy.critic.network_cfg.hidden_sizes == (256, 256)
    assert written["algorithm"]["cfg"].items() <= cfg.algorithm.cfg.model_dump().items()
    inert = ["trainer.headless", "trainer.enable_rt", "trainer.gpu_id"]
    inert += [f"configs/agents/rl/push_cube/gym_config.json: {key}" for key in OF_ITS_SIMULATOR["push_cube"]]
    assert sorted(line.split(" has no meaning here (")[0] for line in warned) == sorted(inert)  # each once, by name
    assert config_from_dict(cfg.model_dump(mode="json")) == cfg


def test_the_device_is_looked_for_when_used(tmp_path):
    _write(tmp_path, run_json=TRAIN_CONFIG, configs__agents__rl__push_cube__gym_config_json=GYM_CONFIG)
    cfg, _ = with_warnings(load_config, tmp_path / "run.json")  # the second file is next to the first
    if torch.cuda.is_available():
        assert device_of(cfg) == torch.device("cuda:0")
    else:
        with pytest.raises(ConfigError, match=r"^trainer.device: cuda:0 is not available; available: cpu"):
            device_of(cfg)


def test_the_train_config_without_its_second_file(tmp_path):
    _write(tmp_path, run_json=TRAIN_CONFIG)
    with pytest.raises(
        ConfigError, match=r"trainer.gym_config: no such file 'configs/agents.*gym_config.json'"
    ) as error:
        load_config(tmp_path / "run.json")
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
    _write(tmp_path, run_json=TRAIN_CONFIG, configs__agents__rl__push_cube__gym_config_json=GYM_CONFIG)
    overrides = {f"trainer.{key}": value for key, value in SMALL.items()} | {"env.name": "cartpole"}
    overrides |= {"trainer.enable_eval": False, "trainer.use_wandb": False, "algorithm.cfg.batch_size": 64}
    cfg, warned = with_warnings(load_config, tmp_path / "run.json", overrides)
    assert warned[0].startswith("trainer.gym_config has no meaning here (") and "is for 'PushCubeRL'" in warned[0]
    assert len(list(train_iter(init_state(cfg), cfg))) == 4


MLP = {
    "hidden_sizes": [64, 64],
    "activation": "tanh",
    "last_activation": "tanh",
    "orthogonal_init": [1.414, 1.414, 0.01],
}
OPTIMIZER = {"name": "adam", "learning_rate": 0.0001}
PPO_NUMBERS = {"n_epochs": 10, "gamma": 0.99, "gae_lambda": 0.95, "clip_coef": 0.2, "ent_coef": 0.01, "vf_coef": 0.5}
GRPO_CFG = {"optimizer": OPTIMIZER, **_section(GRPO)["algorithm"]["cfg"], "ent_coef": 0.01, "kl_coef": 0.0}
del GRPO_CFG["learning_rate"]
CAMERA = json.loads(TRAIN_CONFIG)["trainer"]["events"]


def _task(task, algorithm, **trainer):
    """A train config of EmbodiChain's repository for one of its simulated tasks."""
    ppo = {"optimizer": OPTIMIZER, "batch_size": 8192, **PPO_NUMBERS, "max_grad_norm": 0.5}
    return {
        "trainer": {
            "exp_name": f"{task}_{algorithm}",
            "gym_config": f"{task}.json",
            "seed": 42,
            "device": "cuda:0",
            "headless": True,
            "gpu_id": 0,
            "num_envs": 64,
            "events": CAMERA,
            **trainer,
        },
        "policy": _section(POLICY)["policy"] if algorithm == "ppo" else ACTOR_ONLY,
        "algorithm": {"name": algorithm, "cfg": ppo if algorithm == "ppo" else GRPO_CFG},
    }


@pytest.mark.parametrize("task", ["push_cube", "cart_pole"])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("renderer", ["hybrid", "fast-rt", None])
def test_train_configs_of_simulated_tasks(tmp_path, task, algorithm, renderer):
    gym = GYM[task] | {"max_episode_steps": 400}
    train = _task(task, algorithm, **({"renderer": renderer} if renderer else {}))
    _write(tmp_path, **{"run_json": train, f"{task}_json": gym})
    cfg, warned = with_warnings(load_config, tmp_path / "run.json")
    assert (cfg.env.name, cfg.env.cfg.max_episode_steps, cfg.algorithm.name) == (gym["id"], 400, algorithm)
    assert cfg.algorithm.cfg.optimizer.learning_rate == 0.0001 and cfg.trainer.num_envs == 64
    inert = {"trainer.headless", "trainer.gpu_id"}
    inert |= {"trainer.renderer"} if renderer else set()
    inert |= {f"{tmp_path / f'{task}.json'}: {key}" for key in OF_ITS_SIMULATOR[task]}
    assert len(warned) == len(inert) and {line.split(" has no meaning here (")[0] for line in warned} == inert


POINT_MASS = """
trainer:
  exp_name: point_mass_apg
  learning_env:
    name: PointMassRL
    cfg:
      max_episode_steps: 100
      success_threshold: 0.03
  seed: 42
  device: cuda:0
  num_envs: 64
  iterations: 500
  segment_length: 100
  update_horizon: 100
  enable_eval: true
  eval_freq: 32000
  num_eval_envs: 32
  num_eval_episodes: 128
  eval_seed: 10042
  best_eval_metric: eval/success_rate
  best_eval_mode: max
  save_frequency_updates: 50
  use_wandb: false
policy:
  name: actor_only
  initial_log_std: -2.0
  actor: {type: mlp, network_cfg: %s}
algorithm:
  name: apg
  cfg:
    optimizer: {name: adam, learning_rate: 25e-5}
    gamma: 0.99
    max_grad_norm: 0.5
    ent_coef: 0.0
"""


def test_train_configs_of_the_point_mass(tmp_path):
    _write(tmp_path, run_yaml=POINT_MASS % json.dumps(MLP))
    cfg, warned = with_warnings(load_config, tmp_path / "run.yaml")
    assert warned == [] and cfg.env.name == "PointMassRL" and cfg.env.cfg.success_threshold == 0.03
    assert (cfg.trainer.buffer_size, cfg.algorithm.cfg.segment_length) == (100, 100)
    assert cfg.trainer.save_freq == 50 * 100 * 64 and cfg.trainer.best_eval_metric == "eval/success_rate"
    assert cfg.algorithm.cfg.optimizer.learning_rate == 0.00025 and cfg.policy.initial_log_std == -2.0
    ppo = {"optimizer": OPTIMIZER, "lr_scheduler": {"name": "linear", "kwargs": {"end_factor": 0.4}}, **PPO_NUMBERS}
    trainer = {"learning_env": {"name": "PointMassRL", "cfg": {"success_bonus": 5.0}}, "save_freq": 262144}
    policy = {"name": "actor_critic", "initial_log_std": -1.0}
    policy |= {net: {"type": "mlp", "network_cfg": MLP} for net in ("actor", "critic")}
    cfg, warned = with_warnings(
        lambda: config_from_dict({"trainer": trainer, "policy": policy, "algorithm": {"name": "ppo", "cfg": ppo}})
    )
    assert warned == [] and cfg.env.cfg.success_bonus == 5.0 and cfg.algorithm.cfg.lr_scheduler.kwargs.end_factor == 0.4


@pytest.mark.filterwarnings("ignore:robot.urdf_cfg.components.* takes its place:UserWarning")
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("task", ["push_cube", "cart_pole"])
def test_simulated_tasks_train_from_their_two_files(tmp_path, task, algorithm):
    train = _task(task, algorithm)
    train["trainer"] = {k: v for k, v in train["trainer"].items() if k not in ("headless", "gpu_id", "events")} | SMALL
    train["algorithm"]["cfg"] = train["algorithm"]["cfg"] | {"batch_size": 64}
    _write(tmp_path, **{"run_json": train, f"{task}_json": GYM[task]})
    cfg, _ = with_warnings(load_config, tmp_path / "run.json")
    (*_, collected, learned) = train_iter(init_state(cfg), cfg)
    rewards = {name for name in collected["logs"] if name.startswith("rewards/") and not name.endswith("_weighted")}
    own = {"cart_pole": {"rewards/task"}, "push_cube": set()}[task]
    assert rewards == {f"rewards/{name}" for name in GYM[task]["env"]["rewards"]} | own
    assert all(torch.isfinite(value).all() for value in learned["logs"].values())
