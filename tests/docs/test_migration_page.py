"""The migration page: every right-hand side exists, and its code runs."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
from support.embodichain_files import FILES
from support.fake_envs import LadderConfig  # noqa: F401  (registers stand-in parts)
from support.small_runs import NET, small

from ecrl.algorithms import APGConfig, DQNConfig, GRPOConfig, PPOConfig, SACConfig, TD3Config
from ecrl.config import Config
from ecrl.envs.mujoco.terms.embodichain_names import ABSENT
from ecrl.loop.iteration import init_state
from ecrl.policies import ActorCriticConfig, NetworkConfig
from ecrl.policies.vla_builtin import BuiltinVLAConfig
from ecrl.registry import registered
from ecrl.run.train import train

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
SECTIONS = {part.splitlines()[0]: part for part in PAGE.split("\n## ")[1:]}


def rows_of(part: str) -> list[list[str]]:
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


ROWS = {title: rows_of(part) for title, part in SECTIONS.items()}
NAMES = sorted({n for rows in ROWS.values() for row in rows for n in re.findall(r"`(ecrl(?:\.\w+)+)`", row[1])})


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


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


def _on_the_left(title):
    return {name.partition("(")[0] for row in ROWS[title] for name in spans(row[0])}


def test_every_name_of_embodichain_has_a_row():
    """The second column of each row is checked by `test_every_name_on_the_right_is_there`."""
    names = json.loads((FILES / "public_names.json").read_text())
    assert [len(part) for part in names.values()] == [123, 36]
    titles = ("EmbodiChain: classes and functions", "EmbodiChain: names since v0.3.0")
    for title, part in zip(titles, names.values(), strict=True):
        assert sorted(set(part) - _on_the_left(title)) == []
        assert all(name.startswith("ecrl.") for row in ROWS[title] for name in spans(row[1]))


def test_the_page_names_the_releases_whose_files_are_tested():
    releases = sorted(path.name for path in FILES.glob("v*"))
    assert f"the releases v0.1.2 to {releases[-1]}," in SECTIONS["The loop"]


def test_every_row_has_a_left_and_a_right():
    assert all(
        len(rows) > 5 for title, rows in ROWS.items() if title not in ("The loop", "abcdRL: scripts", "What is fixed")
    )
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


def test_every_log_name_on_the_right_is_logged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = set()
    few = {"trainer.iterations": 1, "trainer.enable_eval": True, "trainer.eval_freq": 1, "trainer.num_eval_episodes": 1}
    replay = {"learning_starts": 0, "batch_size": 4}
    runs = {
        "ppo": {"trainer.buffer_size": 128},
        "grpo": {"trainer.buffer_size": 128, "algorithm": {"name": "grpo", "cfg": {"group_size": 2}}},
        "dqn": {
            "env": {"name": "cartpole"},
            "policy": {"name": "q_network", "critic": NET},
            "algorithm": {"name": "dqn", "cfg": replay},
        },
        "sac": {
            "policy": {"name": "squashed_actor_critic", "actor": NET, "critic": NET},
            "algorithm": {"name": "sac", "cfg": replay},
        },
    }
    for name, changes in runs.items():
        cfg = small(**{"env": {"name": "point_mass"}, **changes, **few})
        train(init_state(cfg), cfg, tmp_path / name, progress=False)
        events = EventAccumulator(str(tmp_path / name / "logs"))
        events.Reload()
        logged |= set(events.Tags()["scalars"])
    for log in LOGS:
        pattern = re.compile(re.sub("<[a-z]+>", r"\\w+", log))
        assert any(pattern.fullmatch(name) for name in logged), f"{log} is not among {sorted(logged)}"
