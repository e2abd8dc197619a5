"""The Q-network: values, distributions, dueling streams, noise, masks and exploration."""

import pytest
import torch
from support.checks import assert_pure, close
from support.small_runs import NET
from tensordict import TensorDict
from torch import nn

import ecrl
from ecrl import rng
from ecrl.config.model import ConfigModel
from ecrl.errors import ConfigError
from ecrl.policies import make_policy
from ecrl.policies.core import ReturnDistribution
from ecrl.registry import register_network
from ecrl.spaces import Discrete, MultiDiscrete, box, dict_space

OBS, ACTIONS = box(-1.0, 1.0, 4), Discrete(3)
C51 = {"distribution": "categorical", "num_atoms": 5, "v_min": -2.0, "v_max": 2.0}
QUANTILES = {"distribution": "quantile", "num_atoms": 7}
NONE = TensorDict({}, [])


def made(space=OBS, **settings):
    """A policy with its parameters."""
    policy = make_policy({"name": "q_network", **{"critic": NET, **settings}}, space, ACTIONS)
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


def test_noisy_values_by_hand():
    """Each row has its own noise: mean + std * outer(f(out), f(in)) for the weights, in order of the layers."""
    policy, params = made(noisy=True, noisy_std=2.0)
    obs, noise = observations(5), policy.draw(rng.split(rng.key(3), 5))
    weights = {name: x.double() for name, x in params["critic"].items()}
    for layer, inputs in (("0", 4), ("2", 8)):
        close(weights[f"{layer}.weight_std"], torch.full_like(weights[f"{layer}.weight"], 2.0 / inputs**0.5))
        close(weights[f"{layer}.bias_std"], torch.full_like(weights[f"{layer}.bias"], 2.0 / inputs**0.5))
    expected = []
    for row, x in zip(noise["network"].double(), obs.double(), strict=True):
        assert row.shape == (4 + 8 + 8 + 3,)
        first, hidden, second, last = (e.sign() * e.abs().sqrt() for e in row.split([4, 8, 8, 3]))
        for layer, into, out in (("0", first, hidden), ("2", second, last)):
            w = weights[f"{layer}.weight"] + weights[f"{layer}.weight_std"] * torch.outer(out, into)
            x = w @ x + weights[f"{layer}.bias"] + weights[f"{layer}.bias_std"] * out
            x = torch.tanh(x) if layer == "0" else x
        expected.append(x)
    out = assert_pure(policy.act, params, NONE, obs, noise)[1]
    close(out["q"], torch.stack(expected))
    close(assert_pure(policy.q, params, obs, None, noise)[0], torch.stack(expected))
    one = TensorDict({"action": noise["action"][2], "network": noise["network"][2]}, [])
    close(policy.q(params, obs, None, one)[0, 2], expected[2])


def test_without_noise_a_noisy_network_is_a_plain_one():
    noisy, params = made(noisy=True)
    plain, of_plain = made()
    for name, weight in of_plain["critic"].items():
        assert torch.equal(weight, params["critic", name]), "the means start like the weights of the plain network"
    obs = observations(4)
    assert torch.equal(noisy.q(params, obs, None, None), plain.q(of_plain, obs, None, None))
    assert torch.equal(
        noisy.act(params, NONE, obs, None)[1]["action"], plain.act(of_plain, NONE, obs, None)[1]["action"]
    )


@pytest.mark.parametrize(("settings", "atoms"), [({}, None), (C51, 5), (QUANTILES, 7)])
@pytest.mark.parametrize("dueling", [False, True])
def test_noise_works_with_all_forms_of_the_values(settings, atoms, dueling):
    space = dict_space({"action_mask": MultiDiscrete((2, 2, 2)), "x": OBS})
    policy, params = made(space, noisy=True, dueling=dueling, **settings)
    mask = torch.tensor([[True, False, True]]).expand(500, 3)
    obs = TensorDict({"action_mask": mask, "x": observations(1).expand(500, 4)}, [500])
    noise, action = policy.draw(rng.split(rng.key(1), 500)), torch.arange(500) % 3
    every, taken = policy.q(params, obs, None, noise), policy.q(params, obs, action, noise)
    assert every.shape == (1, 500, 3, *(() if atoms is None else (atoms,)))
    assert torch.equal(taken[0], every[0, torch.arange(500), action])
    _, out = policy.act(params, NONE, obs, noise)
    explored = policy.explore(params, TensorDict({"epsilon": torch.zeros(500)}, [500]), out, noise)[1]["action"]
    assert torch.equal(explored, out["action"]), "with an epsilon of 0, only the network is noisy"
    counts = torch.bincount(explored, minlength=3)
    assert counts[1] == 0 and counts[[0, 2]].min() > 20, "environments with the same observation explore differently"


def test_noise_of_layers_with_more_axes_is_that_of_the_observation():
    class PerToken(nn.Module):
        def __init__(self, merges: bool):
            super().__init__()
            self.merges, self.first, self.second = merges, nn.Linear(2, 5, bias=False), nn.Linear(5, 3)

        def forward(self, obs):
            tokens = obs.unflatten(-1, (2, 2))
            hidden = self.first(tokens.flatten(0, 1)).unflatten(0, (-1, 2)) if self.merges else self.first(tokens)
            return self.second(torch.relu(hidden).sum(-2))

    class PerTokenConfig(ConfigModel):
        merges: bool

    def per_token(cfg: PerTokenConfig, space, outputs):
        return PerToken(cfg.merges)

    register_network("per_token", override=True)(per_token)
    policy, params = made(noisy=True, critic={"type": "per_token", "network_cfg": {"merges": False}})
    obs, noise = observations(6), policy.draw(rng.split(rng.key(1), 6))
    many = policy.q(params, obs.reshape(2, 3, 4), None, noise.reshape(2, 3))
    for i in range(6):
        close(many[0].reshape(6, 3)[i], policy.q(params, obs[i : i + 1], None, noise[i])[0, 0])
    with pytest.raises(
        ConfigError, match=r"^policy.critic \(per_token\): the inputs of its linear layers do not have one"
    ):
        made(noisy=True, critic={"type": "per_token", "network_cfg": {"merges": True}})


def test_a_network_without_linear_layers_is_refused():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.zeros(3))

        def forward(self, obs):
            return obs[:, :3] + self.by

    class ShiftConfig(ConfigModel):
        """No settings."""

    def shift(cfg: ShiftConfig, space, outputs):
        return Shift()

    register_network("shift", override=True)(shift)
    with pytest.raises(
        ConfigError, match=r"policy.critic \(shift\): a noisy network needs layers of type nn.Linear, but"
    ):
        made(noisy=True, critic={"type": "shift", "network_cfg": {}})


def test_a_noisy_policy_keeps_the_contract():
    policy, _ = made(noisy=True, dueling=True)
    assert not ecrl.check_policy(policy, OBS, ACTIONS).findings


def test_another_initial_scale_shares_all_functions():
    assert made(noisy=True, noisy_std=0.1)[0] == made(noisy=True)[0] != made()[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noisy_std": 0.5}, "noisy_std has no effect, because noisy is false; leave it out"),
        ({"noisy": True, "noisy_std": 0.0}, "noisy_std: must be above 0.0, got 0.0"),
        ({"distribution": "categorical", "v_max": 1.0}, "distribution categorical needs v_min and v_max"),
        ({"distribution": "categorical", "v_min": 1.0, "v_max": 1.0}, "v_min 1 is not below v_max 1"),
        ({"v_min": 1.0}, "v_min and v_max are bounds of a categorical distribution; leave them out"),
        ({"num_atoms": 5}, "num_atoms has no effect, because distribution is absent; leave it out"),
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
