"""The Q-network: values, distributions, dueling streams, masks and exploration."""

import pytest
import torch
from support.checks import close
from support.small_runs import NET
from tensordict import TensorDict

from ecrl import rng
from ecrl.errors import ConfigError
from ecrl.policies import make_policy
from ecrl.policies.core import ReturnDistribution
from ecrl.spaces import Discrete, MultiDiscrete, box, dict_space

OBS, ACTIONS = box(-1.0, 1.0, 4), Discrete(3)
C51 = {"distribution": "categorical", "num_atoms": 5, "v_min": -2.0, "v_max": 2.0}
QUANTILES = {"distribution": "quantile", "num_atoms": 7}
NONE = TensorDict({}, [])


def made(space=OBS, **settings):
    """A policy with its parameters."""
    policy = make_policy({"name": "q_network", "critic": NET, **settings}, space, ACTIONS)
    return policy, policy.init(rng.key(0))


def observations(count: int) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, 4 * count).reshape(count, 4)


@pytest.mark.parametrize(("settings", "atoms"), [({}, None), (C51, 5), (QUANTILES, 7)])
@pytest.mark.parametrize("dueling", [False, True])
def test_values_of_taken_actions_are_those_of_all_actions(settings, atoms, dueling):
    policy, params = made(dueling=dueling, **settings)
    obs, action = observations(6).reshape(2, 3, 4), torch.tensor([[0, 1, 2], [2, 1, 0]])
    every, taken = policy.q(params, obs, None, None), policy.q(params, obs, action, None)
    tail = () if atoms is None else (atoms,)
    assert every.shape == (1, 2, 3, 3, *tail) and taken.shape == (1, 2, 3, *tail)
    for i in range(2):
        for j in range(3):
            assert torch.equal(taken[0, i, j], every[0, i, j, action[i, j]])
    values = policy.q_mean(every)[0]
    carry, out = policy.act(params, NONE, obs, None)
    close(out["q"], values)
    assert torch.equal(out["action"], values.argmax(-1)) and carry is NONE


def test_dueling_streams_by_hand():
    """The network has 4 outputs: V = 1 and the advantages 3, 0, 0, with mean 1."""
    policy, params = made(dueling=True)
    weights = {name: torch.zeros_like(x) for name, x in params["critic"].items()}
    last = max(name for name in weights if name.endswith("bias"))
    weights[last] = torch.tensor([1.0, 3.0, 0.0, 0.0])
    q = policy.q(TensorDict({"critic": TensorDict(weights, [])}, []), observations(1), None, None)
    assert q.tolist() == [[[3.0, 0.0, 0.0]]]


def test_means_of_distributions_by_hand():
    categorical = ReturnDistribution("categorical", 3, -1.0, 2.0)
    assert categorical.support(torch.zeros((), dtype=torch.float64)).tolist() == [-1.0, 0.5, 2.0]
    close(categorical.mean(torch.log(torch.tensor([0.25, 0.5, 0.25]))), 0.5)
    close(ReturnDistribution("quantile", 4).mean(torch.tensor([1.0, 2.0, 3.0, 6.0])), 3.0)


@pytest.mark.parametrize("settings", [{}, C51, QUANTILES])
def test_a_masked_action_is_taken_neither_greedily_nor_at_random(settings):
    space = dict_space({"action_mask": MultiDiscrete((2, 2, 2)), "x": OBS})
    policy, params = made(space, **settings)
    mask = torch.tensor([[True, False, True]]).expand(500, 3)
    obs = TensorDict({"action_mask": mask, "x": observations(500)}, [500])
    noise = policy.draw(rng.split(rng.key(1), 500))
    _, out = policy.act(params, NONE, obs, None)
    explored = policy.explore(params, TensorDict({"epsilon": torch.ones(500)}, [500]), out, noise)[1]["action"]
    assert (out["action"] != 1).all() and torch.bincount(explored, minlength=3).tolist()[1] == 0
    assert 190 < int((explored == 0).sum()) < 310, "five standard deviations of 250"


def test_exploration_takes_a_random_action_with_the_probability_epsilon():
    policy, params = made()
    _, out = policy.act(params, NONE, observations(3000), None)
    noise = policy.draw(rng.split(rng.key(2), 3000))
    never, often = (
        policy.explore(params, TensorDict({"epsilon": torch.full((3000,), epsilon)}, [3000]), out, noise)[1]["action"]
        for epsilon in (0.0, 0.6)
    )
    assert torch.equal(never, out["action"])
    assert 1050 < int((often != out["action"]).sum()) < 1350, "0.4 of 3000, and 5 standard deviations"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distribution": "categorical", "v_max": 1.0}, "distribution categorical needs v_min and v_max"),
        ({"distribution": "categorical", "v_min": 1.0, "v_max": 1.0}, "v_min 1 is not below v_max 1"),
        ({"v_min": 1.0}, "v_min and v_max are bounds of a categorical distribution; leave them out"),
        ({"num_atoms": 5}, "num_atoms needs a distribution; leave it out"),
        ({"distribution": "quantile", "num_atoms": 1}, "num_atoms is 1, but a distribution needs at least 2"),
        ({"clip_actions": False}, "policy.clip_actions: q_network has no Box actions to clip; leave it out"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        made(**settings)
    assert "\n" not in str(error.value)


def test_continuous_actions_are_refused():
    with pytest.raises(ConfigError, match=r"^policy.name: q_network needs Discrete actions, got Box"):
        make_policy({"name": "q_network", "critic": NET}, OBS, box(-1.0, 1.0, 2))
