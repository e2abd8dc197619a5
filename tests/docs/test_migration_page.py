"""The migration page: its first column has every name of EmbodiChain and abcdRL, and its second column is true."""

import ast
import json
import re
from importlib import import_module
from typing import Any

import pytest
from support.embodichain_files import FILES
from support.fake_envs import LadderConfig  # noqa: F401  (registers stand-in parts)
from support.migration_page import ABCDRL, CONFIGS, PAGE, ROWS, SCRIPTS, SECTIONS, config_of, rows_with, spans
from support.small_runs import NET, small

from ecrl.algorithms.apg import APGConfig
from ecrl.algorithms.dqn import DQNConfig
from ecrl.algorithms.grpo import GRPOConfig
from ecrl.algorithms.ppo import PPOConfig
from ecrl.algorithms.sac import SACConfig
from ecrl.algorithms.td3 import TD3Config
from ecrl.config import Config
from ecrl.config.abcdrl import FLAGS
from ecrl.config.files import parse_overrides
from ecrl.envs.mujoco.terms.embodichain_names import ABSENT
from ecrl.loop.iteration import init_state
from ecrl.policies import NetworkConfig
from ecrl.policies.actor_critic import ActorCriticConfig
from ecrl.policies.vla_builtin import BuiltinVLAConfig
from ecrl.registry import registered
from ecrl.run.train import train

NAMES = sorted({n for rows in ROWS.values() for row in rows for n in re.findall(r"`(ecrl(?:\.\w+)+)`", row[1])})
KEYS = sorted(
    {
        key
        for title in ("EmbodiChain: config keys", "abcdRL: flags")
        for row in ROWS[title]
        for key in spans(row[1])
        if not key.startswith("ecrl.")
    }
)
LOGS = sorted({name for row in ROWS["Log names"] for name in spans(row[1])})


@pytest.mark.parametrize("name", NAMES)
def test_every_name_on_the_right_is_there(name):
    module, _, attribute = name.rpartition(".")
    try:
        value = getattr(import_module(module), attribute)
    except ModuleNotFoundError:  # a field of a record, such as ecrl.Env.step
        home, _, record = module.rpartition(".")
        value = getattr(import_module(home), record).__dataclass_fields__[attribute]
    assert value is not None


@pytest.mark.parametrize("key", KEYS)
def test_every_key_on_the_right_is_in_the_schema(key):
    section, *rest = key.split(".")
    models = [Config]
    if key.startswith("algorithm.cfg."):
        models, rest = [PPOConfig, GRPOConfig, APGConfig, DQNConfig, TD3Config, SACConfig], rest[1:]
    elif key.startswith("policy.vla."):
        models, rest = [BuiltinVLAConfig], rest[1:]
    elif section == "policy" and rest[1:]:
        models, rest = [NetworkConfig], rest[1:]
    elif section == "policy":
        models = [ActorCriticConfig]
    elif section in Config.model_fields and rest:
        models = [Config.model_fields[section].annotation]
    else:
        rest = [section]
    assert not rest or any(rest[0] in model.model_fields for model in models), key


EMBODICHAIN = json.loads((FILES / "public_names.json").read_text())


def _on_the_left(title):
    return {name.partition("(")[0] for row in ROWS[title] for name in spans(row[0])}


def test_every_name_of_embodichain_has_a_row():
    """The second column of each row is checked by `test_every_name_on_the_right_is_there`."""
    early, late, elsewhere, _ = EMBODICHAIN.values()
    assert [len(part) for part in (early, late)] == [123, 36]
    expected = {
        "EmbodiChain: classes and functions": {*early, *elsewhere},
        "EmbodiChain: names since v0.3.0": {*late},
    }
    for title, names in expected.items():
        assert _on_the_left(title) == names
        assert all(name.startswith("ecrl.") for row in ROWS[title] for name in spans(row[1]))


def test_the_page_names_the_releases_whose_files_are_tested():
    releases = sorted(path.name for path in FILES.glob("v*"))
    assert f"the releases v0.1.2 to {releases[-1]}," in SECTIONS["The loop"]


def test_every_row_has_a_left_and_a_right():
    assert all(len(rows) > 5 for title, rows in ROWS.items() if title not in ("The loop", "What is fixed"))
    for rows in ROWS.values():
        for row in rows:
            assert len(row) == 3 and row[0] and (spans(row[1]) or (row[1] == "none" and row[2])), row


def test_every_functor_has_a_row_and_the_replacements_are_there():
    rows = ROWS["EmbodiChain: functors"]
    left = [name for row in rows for name in spans(row[0])]
    absent = {name: kind for kind, names in ABSENT.items() for name in names}
    kinds = ("action", "observation", "reward", "event")
    terms = {name for kind in kinds for name in registered(kind)}
    assert len(left) == len(set(left)) and set(absent) - {"randomize_camera"} <= set(left)
    for row in rows:
        for name in spans(row[0]):
            assert (name in terms) != (name in absent), name
            assert name not in terms or name in spans(row[1]), row
        assert all(name in terms | {"color", "init_pos", "startup", "mjcf"} for name in spans(row[1])), row


def test_every_name_of_abcdrl_has_a_row():
    """The second column of each row is checked by `test_every_name_on_the_right_is_there`."""
    names = ABCDRL["classes and functions"]
    assert len(names) == len(set(names)) == 72
    assert _on_the_left("abcdRL: classes and functions") == set(names)
    assert all(name.startswith("ecrl.") for row in ROWS["abcdRL: classes and functions"] for name in spans(row[1]))


def test_every_script_of_abcdrl_has_a_row_with_a_config():
    assert _on_the_left("abcdRL: scripts") == set(SCRIPTS) and len(SCRIPTS) == 13
    assert {name for row in ROWS["abcdRL: scripts"] for name in spans(row[1])} <= CONFIGS.keys()


def test_the_script_for_benchmark_files_has_the_configs_of_the_table():
    block = re.search(r'^```python title="benchmark.py"\n.*?^CONFIGS = ({.*?^})', PAGE, re.DOTALL | re.MULTILINE)
    assert block
    commands = ast.literal_eval(block[1])
    assert commands.keys() == {name for name in SCRIPTS if name.endswith("_torch.py")} - {"dqn_all_wrappers_torch.py"}
    for script, command in commands.items():
        file, *tokens = command.split()
        data, keys = config_of(script)
        keys = {key: value for key, value in keys.items() if key not in SCRIPTS[script]["flags"]}
        assert (json.loads(CONFIGS[file]), parse_overrides(tokens)) == (data, keys)


def _spellings(default: Any) -> set[str]:
    """Return the ways in which a note may write a default."""
    if default is None or default == []:
        return {"none"}
    if isinstance(default, bool | str):
        return {str(default) if isinstance(default, str) else str(default).lower()}
    return {f"{default:,}", str(default), f"{default:.1e}".replace(".0e", "e").replace("e-0", "e-")}


def _check_flags(title: str, flags: dict[str, list[Any]]) -> None:
    """Check that each flag has one row, whose note has its defaults, and that a section has no other rows."""
    left = [name for row in ROWS[title] for name in spans(row[0])]
    assert len(left) == len(ROWS[title]) and sorted(left) == sorted(f"--{flag}" for flag in flags)
    for flag, defaults in flags.items():
        ((_, _, notes),) = rows_with(title, f"--{flag}")
        words = {word.strip(".,:;()") for word in notes.split()}
        assert all(_spellings(default) & words for default in defaults), (flag, defaults, notes)


def test_every_flag_of_abcdrl_has_a_row_with_its_defaults_and_an_anchor():
    flags: dict[str, list[Any]] = {}
    for script in SCRIPTS.values():
        for flag, default in script["flags"].items():
            flags.setdefault(flag, []).append(default)
    _check_flags("abcdRL: flags", flags)
    anchors = re.findall(r'^\| <a id="([\w.]+)"></a>`--([\w.]+)`', SECTIONS["abcdRL: flags"], re.MULTILINE)
    assert sorted(anchors) == sorted((flag, flag) for flag in flags)
    own = {"trainer.exp_name", "trainer.seed", "trainer.num_envs", "trainer.total_timesteps", "trainer.buffer_size"}
    assert FLAGS.keys() == flags.keys() - own


def test_every_flag_of_the_evaluation_of_saved_models_has_a_row():
    flags = {flag: [default] for flag, default in ABCDRL["flags of example_eval_model.py"].items()}
    _check_flags("abcdRL: benchmarks, sweeps and saved models", flags)


REPLAY = {"learning_starts": 0, "batch_size": 4, "train_freq": 16}
ACTOR_CRITIC = {"actor": NET, "critic": NET}
RUNS = {
    "ppo": {},
    "grpo": {"algorithm": {"name": "grpo", "cfg": {"group_size": 2}}},
    "dqn": {
        "env": {"name": "cartpole"},
        "policy": {"name": "q_network", "critic": NET},
        "algorithm": {"name": "dqn", "cfg": REPLAY},
    },
    "td3": {
        "policy": {"name": "deterministic_actor_critic", **ACTOR_CRITIC},
        "algorithm": {"name": "td3", "cfg": REPLAY},
    },
    "sac": {"policy": {"name": "squashed_actor_critic", **ACTOR_CRITIC}, "algorithm": {"name": "sac", "cfg": REPLAY}},
}


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Run each algorithm for one iteration. Return the names in TensorBoard by algorithm."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    few = {"trainer.iterations": 1, "trainer.buffer_size": 128}
    few |= {"trainer.enable_eval": True, "trainer.eval_freq": 1, "trainer.num_eval_episodes": 1}
    names = {}
    for algorithm, changes in RUNS.items():
        cfg, folder = small(**{"env": {"name": "point_mass"}, **changes, **few}), tmp_path_factory.mktemp(algorithm)
        train(init_state(cfg), cfg, folder / "run", progress=False)
        events = EventAccumulator(str(folder / "run" / "logs"))
        events.Reload()
        names[algorithm] = set(events.Tags()["scalars"])
    return names


def test_every_log_name_on_the_right_is_logged(logged):
    every = set.union(*logged.values())
    for log in LOGS:
        pattern = re.compile(re.sub("<[a-z]+>", r"\\w+", log))
        assert any(pattern.fullmatch(name) for name in every), f"{log} is not among {sorted(every)}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_log_of_a_script_has_a_row_and_the_algorithm_logs_its_counterpart(script, logged):
    name, _, _ = script.partition("_")
    algorithm = {"ddqn": "dqn", "pdqn": "dqn", "ddpg": "td3"}.get(name, name)
    for log in SCRIPTS[script]["logs"]:
        ((_, ecrl_names, _),) = rows_with("Log names", log)
        assert spans(ecrl_names) and {*spans(ecrl_names)} <= logged[algorithm], (log, sorted(logged[algorithm]))


def test_the_table_of_logs_has_every_log_of_both_libraries_and_no_others():
    logs = {log for script in SCRIPTS.values() for log in script["logs"]}
    assert len(logs) == 20 and len(EMBODICHAIN["logs"]) == 14
    names = _on_the_left("Log names") - {"info"}  # EmbodiChain's dictionary with successes and failures
    assert names == logs | {*EMBODICHAIN["logs"]}
