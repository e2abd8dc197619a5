"""The probe environments, by hand-computed tables."""

import pytest
import torch
from support.checks import close

from ecrl import rng
from ecrl.envs import auto_reset, make_env, state_of
from ecrl.registry import registered
from ecrl.spaces import Discrete

NAMES = ["probe_action", "probe_constant", "probe_delay", "probe_match", "probe_observation"]
TABLE = [  # name, observation, action, reward, ends, observation reached
    ("probe_constant", 0.0, 0, 1.0, True, 0.0),
    ("probe_constant", 0.0, 1, 1.0, True, 0.0),
    ("probe_observation", -1.0, 0, -1.0, True, -1.0),
    ("probe_observation", 1.0, 1, 1.0, True, 1.0),
    ("probe_delay", 0.0, 0, 0.0, False, 1.0),
    ("probe_delay", 1.0, 1, 1.0, True, 1.0),
    ("probe_action", 0.0, 0, -1.0, True, 0.0),
    ("probe_action", 0.0, 1, 1.0, True, 0.0),
    ("probe_match", 0.0, 0, 1.0, True, 0.0),
    ("probe_match", 0.0, 1, -1.0, True, 0.0),
    ("probe_match", 1.0, 0, -1.0, True, 1.0),
    ("probe_match", 1.0, 1, 1.0, True, 1.0),
]
STARTS = {name: [0.0] for name in NAMES} | {"probe_observation": [-1.0, 1.0], "probe_match": [0.0, 1.0]}


@pytest.mark.parametrize("name", NAMES)
def test_step_by_table(variant, name):
    rows = [row[1:] for row in TABLE if row[0] == name]
    obs, action, reward, ends, reached = zip(*rows, strict=True)
    state = state_of(torch.tensor(obs).unsqueeze(-1), torch.Size([len(rows)]))
    state["truncated"] = ~state["truncated"]  # a hand-made state's flags are not the step's
    after = variant(make_env(name).step)(state, torch.tensor(action), torch.arange(len(rows)))
    close(after["obs"], torch.tensor(reached).unsqueeze(-1))
    close(after["reward"], reward)
    assert after["terminated"].tolist() == list(ends)
    assert not after["truncated"].any()


@pytest.mark.parametrize("name", NAMES)
def test_starts(variant, name):
    start = variant(make_env(name).reset)(rng.split(rng.key(1), 1000))
    assert start["obs"].unique().tolist() == STARTS[name]
    assert start["obs"].shape == (1000, 1)
    if len(STARTS[name]) == 2:  # a fair coin: five standard deviations are 0.08
        assert abs(float((start["obs"] == STARTS[name][1]).float().mean()) - 0.5) < 0.08


@pytest.mark.parametrize("name", NAMES)
def test_returns_with_auto_reset(name):
    # Action 1 throughout: the mean reward per episode is the value the table promises, at gamma = 1.
    env = auto_reset(make_env(name))
    state, action, paid, ended = env.reset(rng.split(rng.key(2), 500)), torch.ones(500).long(), 0.0, 0
    for t in range(4):
        state = env.step(state, action, env.draw(rng.stream(rng.key(2), rng.ENV, torch.arange(500), t)))
        paid, ended = paid + state["reward"].sum(), ended + state["terminated"].sum()
    assert ended == (1000 if name == "probe_delay" else 2000)
    mean = {"probe_observation": 0.0, "probe_match": 0.0}.get(name, 1.0)
    assert abs(float(paid / ended) - mean) < (0.12 if mean == 0.0 else 1e-6)  # five standard deviations of 2,000 coins


def test_all_probes_are_here():
    assert [name for name in registered("env") if name.startswith("probe_")] == NAMES
    for name in NAMES:
        assert make_env(name).action_space == Discrete(2)
