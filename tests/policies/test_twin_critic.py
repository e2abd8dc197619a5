"""Policies with several critics for bounded Box actions: values, gradients, noise and wrong spaces."""

from math import log
from typing import Any

import pytest
import torch
from support.checks import assert_pure, close
from support.graphs import graph_of
from support.small_runs import NET
from tensordict import TensorDict
from torch.distributions import Normal

import ecrl
from ecrl import rng
from ecrl.errors import ConfigError
from ecrl.policies import make_policy
from ecrl.spaces import Box, box, dict_space

SPACE = Box((-2.0, 0.0), (2.0, 1.0), (2,))
CENTRE, HALF = torch.tensor([0.0, 0.5]), torch.tensor([2.0, 0.5])
NAMES = ["deterministic_actor_critic", "squashed_actor_critic"]
B = 6


def policy_of(name: str, observation_space: Any = None, action_space: Any = SPACE, **settings: Any):
    """A policy with small networks."""
    cfg = {"name": name, "actor": NET, "critic": NET, **settings}
    return make_policy(cfg, observation_space or box(-1.0, 1.0, 3), action_space)


def given(policy):
    """Parameters, observations and noise."""
    torch.manual_seed(0)
    return policy.init(rng.key(0)), torch.randn(B, 3), policy.draw(rng.split(rng.key(1), B))


def acted(policy, params, obs, noise):
    """The output of `act`."""
    return assert_pure(policy.act, params, TensorDict({}, []), obs, noise)[1]


def by_hand(weights: Any, x: torch.Tensor) -> torch.Tensor:
    """The multilayer perceptron of NET in float64."""
    w = {name: weight.double() for name, weight in weights.items()}
    return torch.tanh(x.double() @ w["0.weight"].T + w["0.bias"]) @ w["2.weight"].T + w["2.bias"]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_each_of_the_critics_equals_a_network_of_its_own(name, count):
    policy = policy_of(name, num_critics=count)
    params, obs, noise = given(policy)
    action = acted(policy, params, obs, noise)["action"]
    q = assert_pure(policy.q, params, obs, action, None)
    assert q.shape == (count, B)
    for c in range(count):
        alone = params["critic"].apply(lambda w, c=c: w[c], batch_size=[])
        close(q[c], by_hand(alone, torch.cat(((action - CENTRE) / HALF, obs), -1))[:, 0])
    assert len({float(row[0]) for row in q}) == count, "critics start with their own weights"


@pytest.mark.parametrize("name", NAMES)
def test_critics_with_layer_normalisation(name):
    normed = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh", "use_layernorm": True}}
    policy = policy_of(name, critic=normed)
    params, obs, _ = given(policy)
    for weight in ("1.weight", "1.bias"):
        params["critic", weight] = torch.randn(2, 8)
    action = torch.rand(B, 2)
    q = assert_pure(policy.q, params, obs, action, None)
    for c in range(2):
        w = {key: weight[c].double() for key, weight in params["critic"].items()}
        x = torch.cat(((action - CENTRE) / HALF, obs), -1).double() @ w["0.weight"].T + w["0.bias"]
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        hidden = torch.tanh(x * w["1.weight"] + w["1.bias"])
        close(q[c], (hidden @ w["3.weight"].T + w["3.bias"])[:, 0])


C51 = {"distribution": "categorical", "num_atoms": 5, "v_min": -2.0, "v_max": 4.0}


@pytest.mark.parametrize("name", NAMES)
def test_critics_predict_the_logits_of_return_distributions(name):
    policy = policy_of(name, **C51)
    params, obs, noise = given(policy)
    action = acted(policy, params, obs, noise)["action"]
    logits = assert_pure(policy.q, params, obs, action, None)
    assert logits.shape == (2, B, 5) and policy.distribution.name == "categorical"
    for c in range(2):
        alone = params["critic"].apply(lambda w, c=c: w[c], batch_size=[])
        expected = by_hand(alone, torch.cat(((action - CENTRE) / HALF, obs), -1))
        close(logits[c], expected)
        support = torch.tensor([-2.0, -0.5, 1.0, 2.5, 4.0], dtype=torch.float64)
        close(policy.q_mean(logits)[c], (expected.softmax(-1) * support).sum(-1))
    assert policy == policy_of(name, **C51) != policy_of(name, **{**C51, "v_max": 5.0})
    assert policy_of(name).distribution is None


def test_the_first_critics_do_not_depend_on_the_number_of_critics():
    few, many = (policy_of(NAMES[0], num_critics=count).init(rng.key(3)) for count in (2, 4))
    for name, weight in few["critic"].items():
        assert torch.equal(weight, many["critic", name][:2])


def test_the_critics_are_one_batched_product_per_layer():
    policy = policy_of(NAMES[1])
    params, obs, noise = given(policy)
    action = acted(policy, params, obs, noise)["action"]

    def values(params, obs, action):
        return policy.q(params, obs, action, None)

    products = [str(node.target) for node in graph_of(values, params, obs, action).graph.nodes if "mm" in str(node)]
    assert len(products) == 2 and all("bmm" in product for product in products), products


def test_deterministic_actions():
    policy = policy_of(NAMES[0])
    params, obs, noise = given(policy)
    out = acted(policy, params, obs, noise)
    close(out["action"], CENTRE + HALF * torch.tanh(by_hand(params["actor"], obs)))
    assert torch.equal(out["action"], acted(policy, params, obs, None)["action"])


def test_squashed_actions_and_their_log_probabilities():
    policy = policy_of(NAMES[1])
    params, obs, noise = given(policy)
    mean, log_std = by_hand(params["actor"], obs).chunk(2, -1)
    for given_noise in (noise, None):
        out = acted(policy, params, obs, given_noise)
        latent = mean + log_std.exp() * (0.0 if given_noise is None else noise.double())
        close(out["action"], CENTRE + HALF * torch.tanh(latent))
        log_prob = Normal(mean, log_std.exp()).log_prob(latent) - torch.log(1.0 - torch.tanh(latent) ** 2)
        close(out["sample_log_prob"], log_prob.sum(-1))
        again, entropy = policy.evaluate(params, TensorDict({}, []), TensorDict({"obs": obs, **dict(out.items())}, [B]))
        close(again, log_prob.sum(-1), tol=1e-4)
        assert entropy.shape == (B,) and bool((entropy <= 2 * log(2.0)).all()), "at most that of uniform actions"


def shifted(policy, mean: float, log_std: float):
    """Parameters whose actor returns this mean and log standard deviation for any observation."""
    params = policy.init(rng.key(0))
    params["actor", "2.weight"].zero_()
    params["actor", "2.bias"].copy_(torch.tensor([mean, mean, log_std, log_std]))
    return params


def test_the_gradient_of_the_log_probability_flows_where_tanh_saturates():
    """For a large mean, log_prob = const - log_std + 2 mean, and noise is 0."""
    policy = policy_of(NAMES[1])
    params = shifted(policy, 30.0, -1.0)

    def log_prob(bias):
        moved = params.clone()
        moved["actor", "2.bias"] = bias
        return policy.act(moved, TensorDict({}, []), torch.zeros(1, 3), torch.zeros(1, 2))[1]["sample_log_prob"][0]

    close(torch.func.grad(log_prob)(params["actor", "2.bias"]), [2.0, 2.0, -1.0, -1.0], tol=1e-4)


def test_the_log_standard_deviation_is_clamped_and_can_move_back():
    policy = policy_of(NAMES[1])
    for value, bound in ((-9.0, -5.0), (7.0, 2.0)):
        params, at_bound = shifted(policy, 0.0, value), shifted(policy, 0.0, bound)
        obs, noise = torch.zeros(1, 3), torch.full((1, 2), 0.3)
        one, other = (acted(policy, p, obs, noise) for p in (params, at_bound))
        close(one["action"], other["action"])
        close(one["sample_log_prob"], other["sample_log_prob"])

        def log_prob(own, obs=obs, noise=noise):
            return policy.act(own, TensorDict({}, []), obs, noise)[1]["sample_log_prob"].sum()

        assert bool((torch.func.grad(log_prob)(params)["actor", "2.bias"][2:] != 0.0).all())


def exploration(std: float, is_random: bool) -> TensorDict:
    """The exploration state of B environments."""
    return TensorDict({"std": torch.full((B,), std), "random": torch.full((B,), is_random)}, [B])


def test_gaussian_exploration_is_in_units_of_half_the_range_and_clipped():
    policy = policy_of(NAMES[0])
    params, obs, noise = given(policy)
    out = acted(policy, params, obs, noise)
    for std in (0.0, 0.1, 5.0):
        _, explored = policy.explore(params, exploration(std, False), out, noise)
        expected = (CENTRE + (out["action"] - CENTRE) + std * HALF * noise).clamp(CENTRE - HALF, CENTRE + HALF)
        close(explored["action"], expected)


@pytest.mark.parametrize("name", NAMES)
def test_random_actions_are_uniform_in_the_space(name):
    policy = policy_of(name)
    params, many = policy.init(rng.key(0)), 4000
    obs, noise = torch.zeros(many, 3), policy.draw(rng.split(rng.key(5), many))
    fields = {"std": torch.zeros(many), "random": torch.arange(many) % 2 == 0}
    out = acted(policy, params, obs, noise)
    _, explored = policy.explore(params, TensorDict(fields, [many]), out, noise)
    unit = (explored["action"][::2] - CENTRE) / HALF
    for axis in range(2):
        close(torch.histc(unit[:, axis], 5, -1.0, 1.0) / len(unit), [0.2] * 5, tol=0.03)
    assert abs(float(torch.corrcoef(unit.T)[0, 1])) < 0.06
    close(explored["action"][1::2], out["action"][1::2])
    if "sample_log_prob" in out:
        assert explored["sample_log_prob"][0] == torch.tensor(-2.0 * log(2.0))
        assert torch.equal(explored["sample_log_prob"][1::2], out["sample_log_prob"][1::2])
        close((torch.tanh(explored["latent"]) * HALF + CENTRE)[::2], explored["action"][::2], tol=1e-5)
        assert torch.equal(explored["latent"][1::2], out["latent"][1::2])


@pytest.mark.parametrize("name", NAMES)
def test_observations_of_a_dict_and_actions_of_a_matrix(name):
    space = dict_space({"a": box(-1.0, 1.0, 2), "b": box(-1.0, 1.0), "secret": box(-1.0, 1.0, 3)})
    policy = policy_of(name, space, box(-2.0, 2.0, 2, 2), actor_obs=["a", "b"])
    params = policy.init(rng.key(0))
    obs = TensorDict({"a": torch.randn(B, 2), "b": torch.randn(B), "secret": torch.randn(B, 3)}, [B])
    out = acted(policy, params, obs, policy.draw(rng.split(rng.key(1), B)))
    assert out["action"].shape == (B, 2, 2)
    unit = out["action"].flatten(1) / 2.0
    first = params["critic"].apply(lambda w: w[0], batch_size=[])
    features = torch.cat((obs["a"], unit, obs["b"].unsqueeze(-1), obs["secret"]), -1)  # in order of name
    close(policy.q(params, obs, out["action"], None)[0], by_hand(first, features)[:, 0])
    assert params["actor", "0.weight"].shape == (8, 3)


WRONG = {
    "unbounded": (box(-float("inf"), float("inf"), 1), {}, "needs float32 Box actions with finite bounds, got Box"),
    "one side": (Box((0.0,), (float("inf"),), (1,)), {}, "needs float32 Box actions with finite bounds, got Box"),
    "dtype": (box(0, 3, 1, dtype=torch.int64), {}, "needs float32 Box actions with finite bounds, got Box"),
    "dim": (SPACE, {"action_dim": 3}, "policy.action_dim: 3 does not match the environment's 2"),
    "quantile": (SPACE, {"distribution": "quantile"}, "policy: distribution: expected 'categorical', got 'quantile'"),
    "obs": (SPACE, {"critic_obs": ["a"]}, "policy.critic_obs: expected a Dict observation space, got Box; leave c"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_spaces_give_one_line(name, case):
    space, settings, line = WRONG[case]
    with pytest.raises(ConfigError, match=line) as error:
        policy_of(name, None, space, **settings)
    assert "\n" not in str(error.value)


def test_an_observation_called_action_is_refused():
    with pytest.raises(ConfigError, match="a critic adds the entry 'action' to the observations; rename the ob"):
        policy_of(NAMES[0], dict_space({"action": box(-1.0, 1.0, 2)}))


def test_a_critic_needs_an_action():
    policy = policy_of(NAMES[0])
    params, obs, _ = given(policy)
    with pytest.raises(ValueError, match="the critics of deterministic_actor_critic need an action"):
        policy.q(params, obs, None, None)


@pytest.mark.parametrize("name", NAMES)
def test_the_policies_keep_the_contract(name):
    assert not ecrl.check_policy(policy_of(name), box(-1.0, 1.0, 3), SPACE).findings
