"""Configs: defaults, faults with their paths, overrides, and junk that is refused."""

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError
from support.config_files import write_file

from ecrl.config import Config, TrainerConfig, config_from_dict, diff, load_config, total_steps
from ecrl.config.model import ConfigModel
from ecrl.errors import ConfigError
from ecrl.registry import registered

NET = {
    "type": "mlp",
    "network_cfg": {"hidden_sizes": [8, 8], "activation": "tanh", "orthogonal_init": [1.0, 1.0, 0.01]},
}
VALID = {
    "trainer": {"exp_name": "test", "num_envs": 4, "eval_seed": None},
    "env": {"name": "cartpole", "cfg": {"gravity": 9.0}},
    "policy": {"name": "actor_critic", "action_dim": 2, "actor": NET, "critic": copy.deepcopy(NET)},
    "algorithm": {"name": "ppo", "cfg": {"learning_rate": 0.001, "n_epochs": 2, "batch_size": 64, "gamma": 0.9}},
}
REMOVED = object()
NAN, INF = float("nan"), float("inf")
ACTOR = "policy.actor.network_cfg"
GAINS = "expected a number above 0, or a list of such numbers, one per layer"


def _with(*edits):
    """VALID with dotted keys set, or taken away where GONE."""
    data = copy.deepcopy(VALID)
    for path, value in edits:
        *parents, last = path.split(".")
        section = data
        for key in parents:
            section = section[key]
        if value is REMOVED:
            del section[last]
        else:
            section[last] = value
    return data


def _faults(data):
    with pytest.raises(ConfigError) as error:
        config_from_dict(data, "run.json")
    lines = str(error.value).split("\n")
    assert all(line.startswith("run.json: ") for line in lines)
    return [line.removeprefix("run.json: ") for line in lines]


LOW, DRIVE = "trainer.events.train.a.params.low", "env.cfg.robot.drive_pros.damping"


def _event(low):
    params = {"field": "obs", "low": low, "high": 1.0}
    return {"train": {"a": {"func": "randomize_field", "params": params}}}


def _drive(damping):
    return {"name": "PushCubeRL", "cfg": {"robot": {"drive_pros": {"damping": damping}}}}


RECURRENT = 'for memory, set policy.name to "recurrent", and policy.cell.type to gru, lstm or mingru'
FAULTS = [  # key, value, the one line without its source
    ("trainer.sede", 3, "trainer.sede: unknown key; did you mean 'seed'?"),
    ("trainer.rollout_step", 3, "trainer.rollout_step: unknown key; did you mean 'rollout_steps'?"),
    ("polcy", {}, "polcy: unknown key; did you mean 'policy'?"),
    ("env.cfg.gravty", 1.0, "env.cfg.gravty: unknown key; did you mean 'gravity'?"),
    ("algorithm.cfg.lerning_rate", 1.0, "algorithm.cfg.lerning_rate: unknown key; did you mean 'learning_rate'?"),
    ("policy.actr", {}, "policy.actr: unknown key; did you mean 'actor'?"),
    (f"{ACTOR}.hidden", [], f"{ACTOR}.hidden: unknown key; did you mean 'hidden_sizes'?"),
    ("trainer.seed", "x", "trainer.seed: expected an integer, got 'x'; seed of all randomness in the run"),
    ("trainer.seed", 1.5, "trainer.seed: expected an integer, got 1.5;"),
    ("trainer.seed", True, "trainer.seed: expected an integer, got true;"),
    ("trainer.seed", [1], "trainer.seed: expected an integer, got a list;"),
    ("trainer.seed", None, "trainer.seed: expected an integer, got null;"),
    ("trainer.seed", -1, "trainer.seed: must be at least 0, got -1;"),
    ("trainer.seed", 2**62, f"trainer.seed: must be below {2**62}, got {2**62};"),
    ("trainer.num_envs", 0, "trainer.num_envs: must be at least 1, got 0; number of environments in each process"),
    ("trainer.iterations", 10**30, "trainer.iterations: must be below 2147483648, got a huge integer;"),
    ("trainer.enable_eval", 1, "trainer.enable_eval: expected true or false, got 1;"),
    ("trainer.enable_eval", "true", "trainer.enable_eval: expected true or false, got 'true';"),
    (
        "trainer.exp_name",
        "a/b",
        "trainer.exp_name: not allowed, got 'a/b'; name of the run and part of its folder's name; may contain letters",
    ),
    ("trainer.exp_name", "", "trainer.exp_name: not allowed, got '';"),
    ("trainer.exp_name", 3, "trainer.exp_name: expected a string, got 3;"),
    ("trainer.compile", "yes", "trainer.compile: expected 'auto', 'on', 'off' or 'background', got 'yes';"),
    ("trainer.device", "tpu", "trainer.device: not a device: 'tpu'; expected cpu, cuda, cuda:<index> or auto"),
    ("trainer.device", "cuda:x", "trainer.device: not a device: 'cuda:x'; expected cpu, cuda, cuda:<index> or auto"),
    (
        "trainer",
        None,
        "trainer: expected an object, got null; settings of the run: its length, device, number of environments, "
        "evaluations and checkpoints",
    ),
    ("trainer", [], "trainer: expected an object, got a list;"),
    ("env", None, 'env: expected an object, got null; the environment, such as {"name": "cartpole"}'),
    ("env", REMOVED, 'env: missing; the environment, such as {"name": "cartpole"}'),
    ("env", "cartpol", "env.name: unknown env 'cartpol'; did you mean 'cartpole'?"),
    ("env.name", "cartpol", "env.name: unknown env 'cartpol'; did you mean 'cartpole'?"),
    ("env.name", REMOVED, f"env.name: missing; known: {', '.join(registered('env')[:3])}"),
    ("env.name", None, f"env.name: expected a string, got null; known: {', '.join(registered('env')[:3])}"),
    ("env.id", "cartpole", "env.id: another name of 'name', which is also given; keep one"),
    ("env.cfg", None, "env.cfg: expected an object, got null"),
    ("env.cfg", [1], "env.cfg: expected an object, got a list"),
    ("env.cfg.gravity", NAN, "env.cfg.gravity: expected a finite number, got nan; gravitational acceleration, m/s^2"),
    ("env.cfg.gravity", 0.0, "env.cfg.gravity: must be above 0.0, got 0.0; gravitational acceleration, m/s^2"),
    ("env.cfg.gravity", "9", "env.cfg.gravity: expected a number, got '9';"),
    ("policy", [], "policy: expected an object, got a list; the policy, such as"),
    ("policy", {}, "policy.name: missing; known: actor_critic"),
    ("policy.name", "actor_critc", "policy.name: unknown policy 'actor_critc'; did you mean 'actor_critic'?"),
    ("policy.name", 3, "policy.name: expected a string, got 3; known: actor_critic"),
    ("policy.critic", None, "policy.critic: expected an object, got null; critic network,"),
    ("policy.action_dim", 0, "policy.action_dim: must be at least 1, got 0;"),
    ("policy.initial_log_std", 9.0, "policy.initial_log_std: must be at most 2.0, got 9.0;"),
    ("policy.actor.type", "mpl", "policy.actor.type: unknown network 'mpl'; did you mean 'mlp'?"),
    ("policy.actor.type", "rnn", f"policy.actor.type: ecrl has no network 'rnn'; {RECURRENT}"),
    ("policy.critic.type", "LSTM", f"policy.critic.type: ecrl has no network 'LSTM'; {RECURRENT}"),
    ("policy.name", "gru", f"policy.name: ecrl has no policy 'gru'; {RECURRENT}"),
    (ACTOR, [], f"{ACTOR}: expected an object, got a list"),
    (f"{ACTOR}.hidden_sizes", 64, f"{ACTOR}.hidden_sizes: expected a list, got 64; width of each hidden layer"),
    (
        f"{ACTOR}.hidden_sizes",
        [8, 0],
        f"{ACTOR}.hidden_sizes[1]: must be at least 1, got 0; width of each",
    ),
    (f"{ACTOR}.hidden_sizes", ["8", 8], f"{ACTOR}.hidden_sizes[0]: expected an integer, got '8';"),
    (f"{ACTOR}.orthogonal_init", "x", f"{ACTOR}.orthogonal_init: {GAINS}"),
    (f"{ACTOR}.orthogonal_init", [1.0, "a", -1], f"{ACTOR}.orthogonal_init: {GAINS}"),
    (f"{ACTOR}.orthogonal_init", [1.0], f"{ACTOR}.orthogonal_init: has 1 gains for 3 layers; give one number or 3"),
    (
        f"{ACTOR}.activation",
        "rleu",
        f"{ACTOR}.activation: expected 'relu', 'elu', 'tanh', 'gelu' or 'silu', got",
    ),
    (f"{ACTOR}.dropout_p", 0.1, f"{ACTOR}.dropout_p: dropout_p=0.1, expected 0: with dropout"),
    ("algorithm", "ppo", "algorithm: expected an object, got 'ppo';"),
    ("algorithm", {}, "algorithm.name: missing; known: "),
    ("algorithm.name", "pp", "algorithm.name: unknown algorithm 'pp'; did you mean 'ppo'?"),
    ("algorithm.cfg", [], "algorithm.cfg: expected an object, got a list"),
    ("algorithm.cfg.learning_rate", INF, "algorithm.cfg.learning_rate: expected a finite number, got inf;"),
    ("algorithm.cfg.gamma", 1.5, "algorithm.cfg.gamma: must be at most 1.0, got 1.5; discount"),
    ("algorithm.cfg.n_epochs", 10**5000, "algorithm.cfg.n_epochs: must be below 2147483648, got a huge integer;"),
    ("trainer.exp_name", "x" * 101, "trainer.exp_name: expected at most 100 characters, got 'xxx"),
    (
        "trainer.wandb_project_name",
        "a/b",
        "trainer.wandb_project_name: not allowed, got 'a/b'; name of the Weights & Biases project",
    ),
    (f"{ACTOR}.hidden_sizes", [8, 65537], f"{ACTOR}.hidden_sizes[1]: must be at most 65536, got 65537; width of each"),
    ("trainer.events", {"train": {"a\nb": 3}}, r"trainer.events.train.'a\nb': expected an object, got 3"),
    ("trainer.events", _event("x"), f"{LOW}: expected a number or a list of numbers, got 'x'; lowest draw"),
    ("trainer.events", _event([0.0, "x"]), f"{LOW}[1]: expected a number, got 'x'; lowest draw"),
    ("trainer.events", _event(["x"]), f"{LOW}[0]: expected a number, got 'x'; lowest draw"),
    ("trainer.events", _event([]), f"{LOW}: expected at least 1 entries, got a list; lowest draw"),
    (
        "env",
        _drive(True),
        f"{DRIVE}: expected a number, a list of numbers, or an object with a number for each joint name",
    ),
    ("env", _drive([1.0, None]), f"{DRIVE}[1]: expected a number, got null;"),
    ("env", _drive({"a b": -1.0}), f"{DRIVE}.'a b': must be at least 0.0, got -1.0"),
]
JARGON = re.compile(
    r"pydantic|tuple|dict|instance|constrained|validat|Value error|input should|\bNone\b|\bTrue\b|\[type="
)


@pytest.mark.parametrize(("path", "value", "line"), FAULTS, ids=[f"{i}-{fault[0]}" for i, fault in enumerate(FAULTS)])
def test_one_line_per_fault(path, value, line):
    (fault,) = _faults(_with((path, value)))
    assert fault.startswith(line)
    assert not JARGON.search(fault)


def test_all_faults_at_once():
    first = {path: (value, line) for path, value, line in reversed(FAULTS)}
    deep = [path for path in first if path.startswith((f"{ACTOR}.", "algorithm.cfg.", "env.cfg."))]
    together = [*deep, "trainer.sede", "trainer.seed", "trainer.device", "policy.actr", "policy.critic", "polcy"]
    faults = sorted(_faults(_with(*((path, first[path][0]) for path in together))))
    expected = sorted(first[path][1] for path in together)
    assert len(expected) > 15
    assert all(fault.startswith(line) for fault, line in zip(faults, expected, strict=True))


def test_faults_beside_an_unknown_name():
    """The faults of the settings are those of the component with the most similar name, if there is one."""
    config = {
        "trainer": {"sede": 1, "events": {"train": {"a": {"func": "randomize_feild", "interval_step": 0}}}},
        "env": {"name": "cartpol", "frame_stack": 0, "cfg": {"gravty": 1.0}},
        "policy": {"name": "actor_critc", "actor": {"type": "mpl", "network_cfg": {"hidden": [8]}}, "critic": "mlp"},
        "algorithm": {"name": "pp0", "cgf": {}, "cfg": {"gama": 0.9, "clip_coef": -1.0}},
    }
    starts = (
        "trainer.sede: unknown key; did you mean 'seed'?",
        "trainer.events.train.a.func: unknown event 'randomize_feild'; did you mean 'randomize_field'?",
        "trainer.events.train.a.interval_step: must be at least 1, got 0; number of",
        "trainer.events.train.a.params.field: missing",
        "trainer.events.train.a.params.low: missing",
        "trainer.events.train.a.params.high: missing",
        "env.name: unknown env 'cartpol'; did you mean 'cartpole'?",
        "env.frame_stack: must be at least 1, got 0; number of latest",
        "env.cfg.gravty: unknown key; did you mean 'gravity'? (if the env is 'cartpole')",
        "policy.name: unknown policy 'actor_critc'; did you mean 'actor_critic'?",
        "policy.actor.type: unknown network 'mpl'; did you mean 'mlp'?",
        "policy.actor.network_cfg.hidden: unknown key; did you mean 'hidden_sizes'? (if the network is 'mlp')",
        "algorithm.name: unknown algorithm 'pp0'; did you mean 'ppo'?",
        "algorithm.cgf: unknown key; did you mean 'cfg'?",
        "algorithm.cfg.gama: unknown key; did you mean 'gamma'? (if the algorithm is 'ppo')",
        "algorithm.cfg.clip_coef: must be above 0.0, got -1.0; distance",
    )
    faults = _faults(config)
    assert all(sum(fault.startswith(start) for fault in faults) == 1 for start in starts), faults
    assert len(faults) == len(starts)


def test_settings_beside_a_name_with_advice_are_not_those_of_a_similar_name():
    faults = _faults(_with(("policy.actor", {"type": "rnn", "network_cfg": {"hidden_size": 8}})))
    assert [fault.split(";")[0] for fault in faults] == ["policy.actor.type: ecrl has no network 'rnn'"]


def test_a_policy_that_is_absent_is_no_fault_of_an_unknown_algorithm():
    for algorithm in ({"name": "pp0"}, {"name": "zzz"}, {"name": 3}, "ppo"):
        (fault,) = _faults({"env": {"name": "cartpole"}, "algorithm": algorithm})
        assert fault.startswith("algorithm")


@pytest.mark.parametrize(("top", "shown"), [(None, "null"), ([], "a list"), (3, "3"), ("x", "'x'"), (True, "true")])
def test_top_level_must_be_an_object(top, shown):
    assert _faults(top) == [f"expected an object, got {shown}"]


def test_keys_with_special_characters_stay_on_one_line():
    for key in ("a\nb", "\ud800", "", "a.b", 3, None):
        (fault,) = _faults({**VALID, "trainer": {key: 1}})
        assert fault.startswith(f"trainer.{key!r}: unknown key; known: best_eval_metric, best_eval_mode, buffer_size,")


FILES = [  # content, the message after the path
    (b"", ":1:1: not JSON: Expecting value"),
    (b'{"trainer": {\n  "seed": 1,,\n}}', ":2:13: not JSON: "),
    (b'{"trainer": "\xff"}', ":1: not UTF-8 text: invalid start byte at byte 13"),
    (b"[" * 100_000, ": not a config: "),
    (b'{"trainer": {"seed": ' + b"9" * 5000 + b"}}", ": not a config: "),
    (b"[]", ": expected an object, got a list"),
    (b"null", ": expected an object, got null"),
]


@pytest.mark.parametrize(("content", "message"), FILES, ids=range(len(FILES)))
def test_bad_files(tmp_path, content, message):
    path = write_file(tmp_path, content, "run.json")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).startswith(f"{path}{message}") and "\n" not in str(error.value)


def test_missing_files(tmp_path):
    write_file(tmp_path, "{}", "cartpole_ppo.json")
    for name, end in (("cartpol_ppo.json", "did you mean 'cartpole_ppo.json'?"), ("x", "known: cartpole_ppo.json")):
        with pytest.raises(ConfigError) as error:
            load_config(tmp_path / name)
        assert str(error.value) == f"{tmp_path / name}: no such file; {end}"
    for path, end in (
        (tmp_path / "no" / "x.json", f"no such file; no .json or .yaml files in {tmp_path / 'no'}"),
        (tmp_path, ""),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"{path}: {end or 'cannot be read: Is a directory'}")):
            load_config(path)
    with pytest.raises(ConfigError, match="null"):
        load_config("a\0b")


def test_keys_given_twice_are_named_by_path(tmp_path):
    text = json.dumps(_with((f"{ACTOR}.hidden_sizes", [8]), (f"{ACTOR}.orthogonal_init", None)))
    text = text.replace('"activation": "tanh",', '"activation": "tanh", "activation": "elu",', 1)
    text = text.replace('"trainer": {', '"trainer": {"num_envs": 3, "x": [1, {"a": 1, "a": 2}], ', 1)
    with pytest.raises(ConfigError) as error:
        load_config(write_file(tmp_path, text, "run.json"))
    lines = [line.split(".json: ")[1] for line in str(error.value).split("\n")]
    twice = {line.removesuffix(": given twice; keep one") for line in lines if line.endswith("given twice; keep one")}
    assert twice == {"trainer.num_envs", "trainer.x[1].a", f"{ACTOR}.activation"}
    assert next(line for line in lines if "given twice" not in line).startswith("trainer.x: unknown key")


def test_rollout_steps_is_buffer_size():
    assert config_from_dict(_with(("trainer", {"rollout_steps": 16}))).trainer.buffer_size == 16
    both = {"rollout_steps": 16, "buffer_size": 16}
    assert _faults(_with(("trainer", both))) == [
        "trainer.rollout_steps: another name of 'buffer_size', which is also given; keep one"
    ]
    assert _faults(_with(("trainer", {"rollout_steps": 0})))[0].startswith("trainer.rollout_steps: must be at least 1")


def test_two_other_names_of_one_key():
    with pytest.raises(ValidationError, match="update_horizon\n  another name of 'buffer_size', which is also given"):
        TrainerConfig.model_validate({"rollout_steps": 16, "update_horizon": 32})


def test_num_envs_in_the_env_section():
    apart = _with(("env.cfg.num_envs", 7), ("trainer.num_envs", REMOVED))
    assert config_from_dict(apart).trainer.num_envs == 7
    assert config_from_dict(_with(("env.cfg.num_envs", 7))).trainer.num_envs == 4
    assert config_from_dict(_with(("env.cfg.num_envs", 7), ("trainer", REMOVED))).trainer.num_envs == 7
    assert "num_envs" not in config_from_dict(apart).env.cfg.model_dump()
    assert _faults(_with(("env.cfg.num_envs", 7), ("trainer", None)))[0].startswith("trainer: expected an object")
    assert apart["env"]["cfg"]["num_envs"] == 7  # the caller's dict does not change


def test_env_by_id_or_only_by_name():
    expected = config_from_dict(_with(("env.cfg", {})))
    assert config_from_dict(_with(("env", "cartpole"))) == expected
    assert config_from_dict(_with(("env", {"id": "cartpole"}))) == expected
    assert _faults(_with(("env", {"id": "cartpol"})))[0].startswith("env.id: unknown env 'cartpol'")


def test_defaults():
    trainer = config_from_dict(_with(("trainer", REMOVED))).trainer
    expected = {"exp_name": "generic_exp", "seed": 1, "device": "cpu", "iterations": 250, "buffer_size": 2048}
    expected |= {"eval_freq": 10_000, "save_freq": 50_000, "num_eval_episodes": 5, "num_eval_envs": 4}
    expected |= {"enable_eval": False, "distributed": False, "compile": "auto", "eval_seed": None}
    assert trainer == TrainerConfig() and expected.items() <= trainer.model_dump().items()


def test_frozen_and_hashable():
    cfg, again = config_from_dict(VALID), config_from_dict(copy.deepcopy(VALID))
    assert cfg == again and hash(cfg) == hash(again) and len({cfg, again}) == 1
    assert cfg != config_from_dict(_with(("env.cfg.gravity", 9.5)))
    for section, name in ((cfg, "env"), (cfg.trainer, "seed"), (cfg.env.cfg, "gravity"), (cfg.policy.actor, "type")):
        with pytest.raises(
            AttributeError, match=f"{name}: a config cannot be changed; make a changed copy with cfg.replace"
        ):
            setattr(section, name, getattr(section, name))


def test_dumps_reload(tmp_path):
    cfg = config_from_dict(VALID)
    text = json.dumps(cfg.model_dump(mode="json"))
    assert config_from_dict(json.loads(text)) == cfg and hash(config_from_dict(json.loads(text))) == hash(cfg)
    assert (
        load_config(write_file(tmp_path, text, "run.json"))
        == load_config(str(write_file(tmp_path, "\ufeff" + text, "run.json")))
        == cfg
    )
    assert config_from_dict(cfg) == cfg


def test_replace():
    cfg = config_from_dict(VALID)
    changed = cfg.replace(**{"trainer.seed": 3, "env.cfg.gravity": 9.5, f"{ACTOR}.hidden_sizes": [4, 4]})
    assert (changed.trainer.seed, changed.env.cfg.gravity) == (3, 9.5)
    assert changed.policy.actor.network_cfg.hidden_sizes == (4, 4) and changed.trainer.num_envs == 4
    assert cfg == config_from_dict(VALID) and cfg.replace() == cfg
    assert cfg.replace(**{"env.cfg.num_envs": 9, "trainer.rollout_steps": 5}).trainer.num_envs == 9
    assert cfg.replace(**{"trainer.rollout_steps": 5}).trainer.buffer_size == 5
    assert cfg.replace(**{"env": {"id": "pendulum"}}).env.name == "pendulum"
    other = cfg.replace(**{"env.name": "pendulum", "env.cfg.mass": 2.0})  # settings of cartpole go with its name
    assert (other.env.name, other.env.cfg.mass) == ("pendulum", 2.0)


def test_replace_makes_room():
    cfg = config_from_dict(_with(("algorithm.cfg", {"optimizer": {"name": "adam", "kwargs": {"eps": 1e-3}}})))
    changed = cfg.replace(**{"algorithm.cfg.optimizer.name": "sgd", "algorithm.cfg.lr_scheduler.name": "linear"})
    assert changed.algorithm.cfg.optimizer.name == "sgd"  # with its own settings, which have no eps
    assert changed.algorithm.cfg.lr_scheduler.name == "linear"  # null before
    assert cfg.replace(**{"trainer.total_timesteps": 2048 * 4 * 7}).trainer.iterations == 7
    assert cfg.replace(**{"trainer.update_horizon": 5}).trainer.buffer_size == 5


def test_overrides_of_a_file(tmp_path):
    path = write_file(
        tmp_path, json.dumps(_with(("trainer", {"rollout_steps": 16, "seed": 5}), ("env.cfg.num_envs", 3))), "run.json"
    )
    changed = load_config(path, {"trainer.buffer_size": 8, "trainer.num_envs": 2, "algorithm.cfg.gamma": 0.5})
    assert changed == load_config(path).replace(
        **{"trainer.buffer_size": 8, "trainer.num_envs": 2, "algorithm.cfg.gamma": 0.5}
    )
    assert (changed.trainer.buffer_size, changed.trainer.num_envs, changed.trainer.seed) == (8, 2, 5)
    assert load_config(path, {"env.name": "pendulum"}).env == config_from_dict(_with(("env", "pendulum"))).env
    with pytest.raises(ConfigError) as error:
        load_config(path, {"trainer.sede": 3, "trainer.seed": "x", "env.cfg.gravity.x": 1})
    assert sorted(line.removeprefix(f"{path}: ").split(";")[0] for line in str(error.value).split("\n")) == [
        "env.cfg.gravity.x: 'gravity' is not a section",
        "trainer.sede: unknown key",
        "trainer.seed: expected an integer, got 'x'",
    ]
    with pytest.raises(ConfigError, match=r"trainer.rollout_steps: another name of 'trainer.buffer_size', which is"):
        load_config(path, {"trainer.buffer_size": 8, "trainer.rollout_steps": 8})


def test_diff():
    cfg = config_from_dict(VALID)
    assert diff(cfg, cfg) == diff(cfg, config_from_dict(copy.deepcopy(VALID))) == []
    changed = cfg.replace(**{"trainer.seed": 3, "trainer.exp_name": "b", f"{ACTOR}.hidden_sizes": [4, 8]})
    assert diff(cfg, changed) == [
        'trainer.exp_name: "test" -> "b"',
        "trainer.seed: 1 -> 3",
        f"{ACTOR}.hidden_sizes: [8, 8] -> [4, 8]",
    ]
    assert diff(cfg, cfg.replace(**{"trainer.eval_seed": 2})) == ["trainer.eval_seed: null -> 2"]
    event = {"func": "randomize_field", "mode": "reset", "params": {"field": "obs", "low": 0.0, "high": 1.0}}
    at, grown = "trainer.events.train.start", cfg.replace(**{"trainer.events.train.start": event})
    expected = {"func": '"randomize_field"', "mode": '"reset"', "interval_step": "1", "params.operation": '"set"'}
    expected |= {"params.field": '"obs"', "params.low": "0.0", "params.high": "1.0"}
    assert sorted(diff(cfg, grown)) == sorted(f"{at}.{key}: absent -> {value}" for key, value in expected.items())
    assert sorted(diff(grown, cfg)) == sorted(f"{at}.{key}: {value} -> absent" for key, value in expected.items())
    assert diff(cfg, cfg.replace(**{"env.name": "pendulum"}))[0] == 'env.name: "cartpole" -> "pendulum"'


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("trainer.seed", "x", "trainer.seed: expected an integer, got 'x';"),
        ("trainer.sede", 3, "trainer.sede: unknown key; did you mean 'seed'?"),
        ("trianer.seed", 3, "trianer: unknown key; did you mean 'trainer'?"),
        ("trainer.seed.x", 3, "trainer.seed.x: 'seed' is not a section"),
        ("policy.actor.network.hidden_sizes", [3], "policy.actor.network: unknown key; did you mean 'network_cfg'?"),
    ],
)
def test_replace_refuses(path, value, line):
    with pytest.raises(ConfigError, match=re.escape(f"replace: {line}")):
        config_from_dict(VALID).replace(**{path: value})


def test_total_steps():
    cfg = config_from_dict(_with(("trainer", {"iterations": 3, "buffer_size": 5, "num_envs": 7})))
    assert total_steps(cfg, 1) == 105 and total_steps(cfg, 2) == 210


WORDS = [
    "trainer",
    "env",
    "policy",
    "algorithm",
    "name",
    "cfg",
    "id",
    "seed",
    "num_envs",
    "actor",
    "rollout_steps",
    "type",
    "learning_env",
    "gym_config",
    "segment_length",
    "total_timesteps",
    "events",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["cartpole", "pendulum", "ppo", "actor_critic", "mlp", "\ud800", 10**400, NAN, INF, -0.0])
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=15,
)


def _paths(data, path=()):
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(deeper for key, child in children for deeper in _paths(child, (*path, key)))]


def _only_config_error(data):
    try:
        cfg = config_from_dict(data)
    except ConfigError as error:
        assert str(error) and all(re.match(r"config: .", line) for line in str(error).split("\n"))
        assert not JARGON.search(re.sub(r"'.*?'", "", str(error)))
        return
    assert isinstance(cfg, Config) and hash(cfg) == hash(config_from_dict(cfg.model_dump(mode="json")))


@settings(max_examples=200)
@given(JUNK)
@example({"env": {"name": "\ud800"}, "\ud800": 1})
def test_junk_gives_only_config_errors(data):
    _only_config_error(data)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(_paths(VALID)), JUNK, st.sampled_from(["set", "add", "drop"])), max_size=4))
def test_mutations_give_a_config_or_config_errors(edits):
    data = copy.deepcopy(VALID)
    for path, value, how in edits:
        try:
            section = data
            for key in path[:-1]:
                section = section[key]
            if not path or how == "set":
                section[path[-1] if path else "trainer"] = value
            elif how == "drop":
                del section[path[-1]]
            else:
                section[path[-1]] = {"junk": value, **section[path[-1]]}
        except (KeyError, IndexError, TypeError):
            continue  # an earlier edit took the place away
    _only_config_error(data)


class _Inner(BaseModel):  # a plain model of pydantic's, as a user may nest
    rows: list[int] = [1]


class _Listed(ConfigModel):
    numbers: list[float] = Field([], description="numbers")
    named: dict[str, Any] = Field({}, description="anything")
    tags: set[str] = Field(set(), description="words")
    inner: _Inner = Field(_Inner(), description="more")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"named": {"a": 1, "b": [2]}}, {"named": {"b": [2.0], "a": True}}),
        ({"numbers": [0.0]}, {"numbers": [-0.0]}),
        ({"tags": {"x", "y"}}, {"tags": {"y", "x"}}),
        ({"inner": _Inner(rows=[1])}, {}),
    ],
)
def test_configs_of_lists_and_dicts_that_are_equal_hash_equal(one, other):
    one, other = _Listed(**one), _Listed(**other)
    assert one == other and hash(one) == hash(other) and len({one, other}) == 1


def test_configs_of_lists_and_dicts_that_differ_are_two():
    settings = [{}, {"numbers": [1.0]}, {"named": {"a": 1}}, {"named": {"a": {"b": [1]}}}, {"inner": _Inner(rows=[2])}]
    assert len({_Listed(**x) for x in settings}) == len({hash(_Listed(**x)) for x in settings}) == len(settings)


@pytest.mark.parametrize("depth", [100, 400, 900])
@pytest.mark.parametrize("place", ["trainer", "policy.actor", "env.cfg.kwargs", "trainer.events.train"])
def test_what_is_nested_deeply_is_refused(depth, place):
    nested = 1
    for _ in range(depth):
        nested = [{"a": nested}]
    with pytest.raises(ConfigError, match=r"^replace: ") as error:
        config_from_dict(VALID, "replace", {place: nested})
    assert all(line.startswith("replace: ") for line in str(error.value).split("\n"))


def test_deep_nesting_in_a_free_field_is_reported_with_its_key():
    nested = {}
    for _ in range(400):
        nested = {"a": nested}
    gym = {"name": "gymnasium", "cfg": {"id": "CartPole-v1", "kwargs": nested}}
    with pytest.raises(ConfigError, match=r"^replace: env.cfg.kwargs: nested too deeply, got an object; further arg"):
        config_from_dict(VALID, "replace", {"env": gym})


def test_a_list_for_a_strict_tuple_names_the_declaration_that_accepts_it():
    class Strict(ConfigModel):
        sizes: tuple[int, ...] = Field(description="sizes")

    with pytest.raises(ValidationError, match=r"a strict tuple accepts no list; declare the field as Annotated"):
        Strict.model_validate({"sizes": [1, 2]})


@pytest.mark.parametrize("name", ["constant", "Constant", "none"])
def test_a_constant_rate_has_no_schedule(name):
    message = "lr_scheduler.*: for a constant learning rate, set lr_scheduler to null or leave it out$"
    with pytest.raises(ConfigError, match=message) as error:
        load_config("cartpole_ppo", {"algorithm.cfg.lr_scheduler": {"name": name}})
    assert "\n" not in str(error.value)
    assert load_config("cartpole_ppo", {"algorithm.cfg.lr_scheduler": None}).algorithm.cfg.lr_scheduler is None
