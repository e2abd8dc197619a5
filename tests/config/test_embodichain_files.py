"""The config files of EmbodiChain's releases from v0.1.2 on load unchanged with the expected notes, and train."""

import json
import re
import warnings

import pytest
import torch

pytest.importorskip("mujoco.batch")

from support.command_line import called
from support.config_files import with_warnings
from support.embodichain_files import ENV_NAMES, FILES, gym_file_of, place, plain

from ecrl.config import config_from_dict, load_config
from ecrl.config.aliases import MISSING, get_path
from ecrl.envs.mujoco.physics.simulation import _simulation
from ecrl.errors import ConfigError
from ecrl.loop.iteration import init_state, train_iter
from ecrl.registry import lookup

TRAINS = sorted(
    path.relative_to(FILES).as_posix()
    for path in FILES.glob("v*/*/*")
    if path.suffix in (".json", ".yaml") and path.name not in ENV_NAMES
)
PAIRS = [(train, gym_file_of(train)) for train in TRAINS]
PAIRS += [
    ("v0.2.0/push_cube/train_config.json", "v0.2.3/push_cube/gym_config.json"),
    ("v0.2.0/push_cube/train_config_grpo.json", "v0.2.3/push_cube/gym_config.json"),
    ("v0.3.0/push_cube/ppo.json", "v0.3.1/push_cube/env.json"),
    ("v0.3.0/cart_pole/ppo.json", "v0.3.1/cart_pole/env.json"),
    ("tutorial/push_cube/train_config.json", "v0.2.0/push_cube/gym_config.json"),
    ("tutorial/push_cube/train_config_grpo.json", "v0.2.0/push_cube/gym_config.json"),
    ("tutorial/push_cube/inline_env.json", None),
]
IDS = [f"{train}-{gym.split('/')[0]}" if gym else train for train, gym in PAIRS]
TRAINED = {  # each environment file with one train file; the `long` tests train the other pairs
    ("tutorial/push_cube/train_config.json", "v0.2.0/push_cube/gym_config.json"),
    ("tutorial/push_cube/inline_env.json", None),
    ("v0.1.3/push_cube/train_config.json", "v0.1.3/push_cube/gym_config.json"),
    ("v0.2.4/push_cube/train_config_grpo.json", "v0.2.3/push_cube/gym_config.json"),
    ("v0.3.0/push_cube/grpo.json", "v0.3.0/push_cube/env.json"),
    ("v0.3.2/push_cube/ppo.json", "v0.3.1/push_cube/env.json"),
    ("v0.1.3/cart_pole/train_config.json", "v0.1.3/cart_pole/gym_config.json"),
    ("v0.2.2/cart_pole/train_config_grpo.yaml", "v0.1.3/cart_pole/gym_config.json"),
    ("v0.3.0/cart_pole/ppo.json", "v0.3.0/cart_pole/env.json"),
    ("v0.3.2/cart_pole/grpo.yaml", "v0.3.1/cart_pole/env.json"),
    ("v0.2.4/point_mass/train_apg.yaml", None),
    ("v0.2.4/point_mass/train_ppo.yaml", None),
}
NOTED_TRAINER = ("headless", "enable_rt", "gpu_id", "renderer")
CONTACTS = ("contact_offset", "rest_offset")
MATERIAL = ("dynamic_friction", "restitution")
NOTED_GYM = (  # every key that may be noted, without those that the file does not have
    *("max_episodes", "physics", "sensor", "rigid_object_group", "articulation", "light.direct"),
    *(f"robot.{drives}.drive_type" for drives in ("drive_pros", "joint_drive_props")),
    *(f"robot.solver_cfg.arm.{key}" for key in ("class_type", "root_link_name")),
    *(f"rigid_object[0].attrs.{key}" for key in (*MATERIAL, *CONTACTS, "max_depenetration_velocity")),
    "rigid_object[0].attrs.rigid_props.max_depenetration_velocity",
    *(f"rigid_object[0].attrs.collision_props.{key}" for key in CONTACTS),
    *(f"rigid_object[0].attrs.material_props.{key}" for key in MATERIAL),
)
SMALL = {"trainer.device": "cpu", "trainer.compile": "off", "trainer.num_envs": 4, "trainer.buffer_size": 8}
SMALL |= {"trainer.iterations": 2, "trainer.enable_eval": False, "trainer.use_wandb": False}


def _has(data, key):
    """Return True if the data has the key, such as `rigid_object[0].attrs.mass`."""
    for part in re.findall(r"\w+", key):
        index = int(part) if part.isdigit() else part
        in_list = isinstance(data, list) and isinstance(index, int) and index < len(data)
        data = data[index] if in_list else get_path(data, (index,))
        if data is MISSING:
            return False
    return True


def _expected_notes(train, gym):
    """Names of the keys that a warning names, once each."""
    trainer = plain(train)["trainer"]
    notes = [f"trainer.{key}" for key in NOTED_TRAINER if key in trainer]
    return notes + [f"{trainer['gym_config']}: {key}" for key in NOTED_GYM if gym and _has(plain(gym), key)]


@pytest.mark.parametrize(("train", "gym"), PAIRS, ids=IDS)
def test_a_file_loads_unchanged_with_the_expected_notes(tmp_path, monkeypatch, train, gym):
    path, written = place(tmp_path, train, gym), plain(train)
    monkeypatch.chdir(tmp_path)
    cfg, messages = with_warnings(load_config, path.name)
    assert sorted(line.split(" has no meaning here (")[0] for line in messages) == sorted(_expected_notes(train, gym))
    assert all(line.endswith("); ignored") for line in messages)
    same = set(written["trainer"]) & set(type(cfg.trainer).model_fields) - {"events"}
    assert {key: getattr(cfg.trainer, key) for key in same} == {key: written["trainer"][key] for key in same}
    assert len(same) > 4
    algorithm = written["algorithm"]["cfg"]
    plain_keys = {key: value for key, value in algorithm.items() if not isinstance(value, dict)}
    assert plain_keys.items() <= cfg.algorithm.cfg.to_dict().items()
    if "optimizer" in algorithm:
        assert cfg.algorithm.cfg.optimizer.learning_rate == algorithm["optimizer"]["learning_rate"]
    for net in {"actor", "critic"} & set(written["policy"]):
        assert getattr(cfg.policy, net).network_cfg.to_dict() | written["policy"][net]["network_cfg"] == (
            getattr(cfg.policy, net).network_cfg.to_dict()
        )
    if gym:
        task = plain(gym)
        assert (cfg.env.name, cfg.env.cfg.max_episode_steps) == (task["id"], task["max_episode_steps"])
        weights = {name: term["weight"] for name, term in task["env"]["rewards"].items()}
        assert {name: term.weight for name, term in cfg.env.cfg.rewards.items()} == weights
        assert set(cfg.env.cfg.observations) == set(task["env"]["observations"])
        assert set(cfg.trainer.events.eval) == {"record_camera"}
    assert config_from_dict(cfg.to_dict()) == cfg


@pytest.mark.parametrize(
    ("train", "gym"),
    [
        pytest.param(*pair, id=name, marks=() if pair in TRAINED else pytest.mark.long)
        for pair, name in zip(PAIRS, IDS, strict=True)
    ],
)
def test_a_file_trains(tmp_path, monkeypatch, train, gym):
    path = place(tmp_path, train, gym)
    monkeypatch.chdir(tmp_path)
    batch = {"segment_length": 8} if "apg" in train else {"batch_size": 16}
    changes = SMALL | {f"algorithm.cfg.{key}": value for key, value in batch.items()}
    cfg, _ = with_warnings(load_config, path.name, changes)
    lookup("env", cfg.env.name).make.cache_clear()
    _simulation.cache_clear()  # a robot warns only when it is built
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = list(train_iter(init_state(cfg), cfg))
    components = plain(gym)["robot"]["urdf_cfg"]["components"] if gym else []
    stand_ins = {
        f"robot.urdf_cfg.components[{i}].urdf_path: no file {part['urdf_path']!r}, so the built-in"
        for i, part in enumerate(components)
    }
    if "end_link_name" in json.dumps(plain(gym) if gym else {}):
        stand_ins.add("robot.solver_cfg.arm.end_link_name: has no meaning for a built-in")
    assert {str(w.message).partition(" built-in")[0] + " built-in" for w in caught} == stand_ins
    assert [record["log_type"] for record in records] == ["collect", "train"] * 2
    assert all(torch.isfinite(value).all() for value in records[-1]["logs"].values())
    if gym:
        logged = {
            name for name in records[-2]["logs"] if name.startswith("rewards/") and not name.endswith("_weighted")
        }
        own = {"rewards/task"} if "cart_pole" in gym else set()
        assert logged == {f"rewards/{name}" for name in plain(gym)["env"]["rewards"]} | own


def test_the_trained_pairs_are_among_the_files():
    assert set(PAIRS) >= TRAINED and {gym for _, gym in TRAINED} == {gym for _, gym in PAIRS}


def test_every_environment_file_is_loaded():
    files = {path.relative_to(FILES).as_posix() for name in ENV_NAMES for path in FILES.glob(f"v*/*/{name}")}
    assert {gym for _, gym in PAIRS if gym} == files and len(files) == 8


def test_the_command_of_the_tutorial(tmp_path, monkeypatch, capsys):
    """`python -m embodichain.agents.rl.train --config P` and `embodichain train-rl --config P` become `ecrl train`."""
    train = "tutorial/push_cube/train_config.json"
    place(tmp_path, train, "v0.2.0/push_cube/gym_config.json")
    folder = tmp_path / "configs/agents/rl/push_cube"
    (tmp_path / "train_config.json").rename(folder / "train_config.json")
    monkeypatch.chdir(tmp_path)
    changes = SMALL | {"algorithm.cfg.batch_size": 16}
    arguments = [text for key, value in changes.items() for text in (f"--{key}", json.dumps(value).strip('"'))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        code = called(monkeypatch, "train", "--config", "configs/agents/rl/push_cube/train_config.json", *arguments)
    assert code == 0, capsys.readouterr()
    (run,) = (tmp_path / "outputs").glob("push_cube_ppo_*")
    assert (run / "checkpoints" / "step_64" / "config.json").is_file()


OLD = [
    ("push_cube/train_config.json", "push_cube/gym_config.json"),
    ("push_cube/train_config.json", "push_cube/gym_config_with_rewards.json"),
    ("cart_pole/train_config.json", "cart_pole/gym_config.json"),
    ("push_cube/inline_env.json", None),
]


@pytest.mark.parametrize(("train", "gym"), OLD, ids=[gym or train for train, gym in OLD])
def test_files_before_v0_1_2_are_refused_in_one_line(tmp_path, monkeypatch, train, gym):
    path = place(tmp_path, f"before_v0.1.2/{train}", gym and f"before_v0.1.2/{gym}")
    monkeypatch.chdir(tmp_path)
    name = plain(f"before_v0.1.2/{train}")["trainer"].get("gym_config")
    at = f"{name}: env.extensions" if name else "env.cfg"
    with pytest.raises(ConfigError) as error:
        load_config(path.name)
    assert str(error.value) == (
        f"{path.name}: {at}.episode_length: a key of EmbodiChain before v0.1.2, but ecrl reads only files of v0.1.2 "
        "and later; set the keys actions and max_episode_steps instead"
    )
