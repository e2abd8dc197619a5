"""The page on metrics has a row for each log of each algorithm and of the loop, and no other rows."""

import pytest
import torch
from support.doc_pages import table_of
from support.fake_envs import TellingConfig  # noqa: F401  (registers telling)
from support.logged_names import configs, logged_names
from support.paths import ROOT
from tensordict import TensorDict

import ecrl
from ecrl.kernels import episode_init
from ecrl.loop.metrics import collect_logs
from ecrl.registry import registered
from ecrl.run.loggers import scalar_name, with_scalars

ROWS = {row["log"].strip("`"): row for row in table_of((ROOT / "docs" / "metrics.md").read_text()) if "log" in row}
OF_TRAINING = {name: row["algorithms"].split(", ") for name, row in ROWS.items() if name.startswith("train/")}
ALGORITHMS = sorted({algorithm for algorithms in OF_TRAINING.values() for algorithm in algorithms})


def test_all_algorithms_have_logs_on_the_page():
    assert {*ALGORITHMS} <= {*registered("algorithm")} and len(ALGORITHMS) == 11


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_logs_of_an_algorithm_are_those_of_its_rows(algorithm):
    names = set().union(*map(logged_names, configs(algorithm)))
    logged = {name for name in names if name.startswith("train/")}
    assert logged == {name for name, algorithms in OF_TRAINING.items() if algorithm in algorithms}
    others = {name for name in names - logged if not name.startswith(("rewards/", "metrics/"))}
    assert others <= ROWS.keys()


def test_the_logs_of_episodes_are_those_of_the_page():
    flag, number = torch.zeros(2, 3, dtype=torch.bool), torch.ones(2, 3)
    info = {"success": flag, "fail": flag, "game_score": number}
    info |= {group: TensorDict({"reach": number}, [2, 3]) for group in ("rewards", "metrics")}
    steps = TensorDict({"done": flag, "info": TensorDict(info, [2, 3])}, [2, 3])
    names = {scalar_name("collect", name) for name in collect_logs(episode_init(2, 100, flag.device), steps)}
    names = {name.replace("/reach", "/<term>" if "rewards" in name else "/<name>") for name in names}
    (record,) = with_scalars(iter([{"log_type": "train", "sample_step": 1, "logs": {}}]))
    names |= record[1].keys()
    assert names == {name for name in ROWS if not name.startswith(("train/", "eval/"))}


def test_the_logs_of_evaluations_are_those_of_the_page():
    data = {"env": {"name": "telling"}, "algorithm": {"name": "ppo"}, "trainer": {"compile": "off", "num_envs": 2}}
    cfg = ecrl.load_config(data)
    names = {*ecrl.evaluate(ecrl.init_state(cfg), cfg, num_episodes=2)}
    cfg = ecrl.load_config(data | {"env": {"name": "point_mass", "cfg": {"max_episode_steps": 3}}})
    names |= {*ecrl.evaluate(ecrl.init_state(cfg), cfg, num_episodes=2)}
    assert "eval/metrics/slow" in names
    names = {"eval/metrics/<name>" if name.startswith("eval/metrics/") else name for name in names}
    assert names == {name for name in ROWS if name.startswith("eval/")}
