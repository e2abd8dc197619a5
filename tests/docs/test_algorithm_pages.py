"""Each algorithm has a page with its equations, spaces, keys, logs and results, and the page is right."""

import re

import pytest
import torch
from pydantic import Field
from support.doc_pages import table_of
from support.paths import ROOT
from tensordict import TensorDict

import ecrl
from ecrl.envs import NEVER, Env, state_of
from ecrl.errors import UserError
from ecrl.registry import lookup, registered
from ecrl.spaces import Discrete, MultiDiscrete, box, dict_space

ALGORITHMS = ("apg", "bc", "ddpg", "dqn", "fast_sac", "fast_td3", "grpo", "ppo", "pqn", "sac", "td3")
SECTIONS = ("Equations", "Spaces", "Settings", "Logs", "Results", "When to use it")
COLUMNS = ("config", "env steps", "seeds", "score", "interquartile mean", "95 % interval", "threshold", "reached by")
SPACES = {"Box": box(-1.0, 1.0, 2), "Discrete": Discrete(3), "MultiDiscrete": MultiDiscrete((2, 3))}
MASKS = {"Discrete": MultiDiscrete((2,) * 3), "MultiDiscrete": MultiDiscrete((2,) * 5)}


def section(algorithm, title):
    """Return the text of a section of an algorithm's page."""
    page = (ROOT / "docs" / "algorithms" / f"{algorithm}.md").read_text()
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)[1]


def test_every_algorithm_has_a_page():
    assert {path.stem for path in (ROOT / "docs" / "algorithms").glob("*.md")} == {*ALGORITHMS}
    assert {*ALGORITHMS} <= {*registered("algorithm")}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_page_has_all_sections_and_its_keys_exist(algorithm):
    texts = [section(algorithm, title) for title in SECTIONS]
    assert "```" in texts[0] and "Source" in texts[-1] and all("|" in text for text in texts[1:4])
    known = lookup("algorithm", algorithm).config.model_fields
    named = re.findall(r"`algorithm\.cfg\.(\w+)", texts[2])
    if "key of `algorithm.cfg`" in texts[2]:
        named += [key for row in table_of(texts[2]) for key in re.findall(r"`(\w+)`", row["key of `algorithm.cfg`"])]
    assert len(named) >= 3 and {*named} <= {*known}


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "bc"])
def test_the_results_are_those_of_the_leaderboard(algorithm):
    """After new measurements, copy the rows of `benchmarks/results/README.md`."""
    leaderboard = (ROOT / "benchmarks" / "results" / "README.md").read_text()
    measured = {row["config"]: row for row in table_of(leaderboard) if row["library"] == "ecrl"}
    rows = table_of(section(algorithm, "Results"))
    assert rows and any(row["config"].endswith(f"_{algorithm}`") for row in rows)
    for row in rows:
        assert row == {name: measured[row["config"]][name] for name in COLUMNS}


class ProbeConfig(ecrl.ConfigModel):
    actions: str = Field(description="a name in SPACES")
    masked: bool = Field(description="if true, observations have an action mask")


@pytest.fixture
def probe(restored_registry):
    """Register an environment with any action space, and with an action mask if requested."""

    @ecrl.register_env("space_probe", override=True)
    def space_probe(cfg: ProbeConfig) -> Env:
        def reset(keys):
            obs = {"sight": torch.zeros(*keys.shape, 2)}
            if cfg.masked:
                obs["action_mask"] = torch.ones(*keys.shape, len(MASKS[cfg.actions].nvec), dtype=torch.bool)
            return state_of(TensorDict(obs, keys.shape), keys.shape)

        def step(state, action, noise):
            reward = action.reshape(*state.shape, -1).float().sum(-1)
            return state.copy().update({"reward": reward, "terminated": torch.ones_like(state["terminated"])})

        parts = {"sight": box(-1.0, 1.0, 2)} | ({"action_mask": MASKS[cfg.actions]} if cfg.masked else {})
        return Env(reset, step, dict_space(parts), SPACES[cfg.actions], lockstep=True, min_truncation_gap=NEVER)


def accepts(algorithm, actions, masked):
    """Return True if a run of the algorithm with these actions takes two iterations."""
    few = {"batch_size": 8, "learning_starts": 4, "group_size": 2}
    known = lookup("algorithm", algorithm).config.model_fields
    policy = lookup("algorithm", algorithm).config.default_policy
    if algorithm == "sac" and actions == "Discrete":
        policy = {"name": "categorical_actor_critic"}
    data = {
        "trainer": {"num_envs": 4, "buffer_size": 4, "iterations": 2, "compile": "off"},
        "env": {"name": "space_probe", "cfg": {"actions": actions, "masked": masked}},
        "policy": policy | ({"v_min": -1.0, "v_max": 1.0} if algorithm.startswith("fast") else {}),
        "algorithm": {"name": algorithm, "cfg": {name: value for name, value in few.items() if name in known}},
    }
    try:
        cfg = ecrl.load_config(data)
        list(ecrl.train_iter(ecrl.init_state(cfg), cfg))
    except UserError:
        return False
    return True


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "bc"])
def test_the_spaces_are_those_that_a_run_accepts(algorithm, probe):
    support = {row["space"]: row["support"] for row in table_of(section(algorithm, "Spaces"))}
    for actions in SPACES:
        listed = f"`{actions}`" in support["actions"]
        assert accepts(algorithm, actions, masked=False) == listed, actions
        if actions in MASKS:
            masks = listed and support["action masks"].startswith("yes")
            assert accepts(algorithm, actions, masked=True) == masks, f"{actions} with a mask"
