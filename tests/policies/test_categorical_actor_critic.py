"""The policy with a categorical actor and several critics: values, probabilities, masks and random actions."""

from math import log
from typing import Any

import pytest
import torch
from support.checks import assert_pure, close
from support.graphs import graph_of
from support.small_runs import NET
from tensordict import TensorDict
from torch.distributions import Categorical

import ecrl
from ecrl import rng
from ecrl.errors import ConfigError
from ecrl.policies import make_policy
from ecrl.spaces import Discrete, MultiDiscrete, box, dict_space

OBS, ACTIONS, NONE = box(-1.0, 1.0, 3), Discrete(4), TensorDict({}, [])
MASKED = dict_space({"action_mask": MultiDiscrete((2, 2, 2, 2)), "x": OBS})
B = 6


def made(space: Any = OBS, action_space: Any = ACTIONS, **settings: Any):
    """A policy with its parameters."""
    cfg = {"name": "categorical_actor_critic", "actor": NET, "critic": NET, **settings}
    policy = make_policy(cfg, space, action_space)
    return policy, policy.init(rng.key(0))


def observations(count: int) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(0))


def masked(count: int, *allowed: bool) -> TensorDict:
    """Observations in which the same actions are allowed."""
    mask = torch.tensor(allowed).expand(count, 4)
    return TensorDict({"action_mask": mask, "x": observations(count)}, [count])


def by_hand(weights: Any, x: torch.Tensor) -> torch.Tensor:
    """The multilayer perceptron of NET in float64."""
    w = {name: weight.double() for name, weight in weights.items()}
    return torch.tanh(x.double() @ w["0.weight"].T + w["0.bias"]) @ w["2.weight"].T + w["2.bias"]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_of_the_critics_equals_a_network_of_its_own(count):
    policy, params = made(num_critics=count)
    obs, action = observations(B).reshape(2, 3, 3), torch.tensor([[0, 1, 2], [3, 2, 1]])
    every, taken = (assert_pure(policy.q, params, obs, a, None) for a in (None, action))
    assert every.shape == (count, 2, 3, 4) and taken.shape == (count, 2, 3)
    for c in range(count):
        close(every[c], by_hand(params["critic"].apply(lambda w, c=c: w[c], batch_size=[]), obs))
    close(taken, every.gather(-1, action.expand(count, 2, 3).unsqueeze(-1)).squeeze(-1))
    assert len({float(rows[0, 0, 0]) for rows in every}) == count, "critics start with their own weights"


def test_the_critics_are_one_batched_product_per_layer():
    policy, params = made()

    def values(params, obs):
        return policy.q(params, obs, None, None)

    products = [str(node.target) for node in graph_of(values, params, observations(B)).graph.nodes if "mm" in str(node)]
    assert len(products) == 2 and all("bmm" in product for product in products), products


def test_actions_and_their_probabilities():
    policy, params = made()
    obs, noise = observations(B), policy.draw(rng.split(rng.key(1), B))
    logits = by_hand(params["actor"], obs)
    for given, action in ((noise, (logits + noise).argmax(-1)), (None, logits.argmax(-1))):
        out = assert_pure(policy.act, params, NONE, obs, given)[1]
        assert torch.equal(out["action"], action)
        close(out["logits"], logits)
        close(out["sample_log_prob"], Categorical(logits=logits).log_prob(action))
        steps = TensorDict({"obs": obs, **dict(out.items())}, [B])
        log_prob, entropy = policy.evaluate(params, NONE, steps)
        close(log_prob, out["sample_log_prob"])
        close(entropy, Categorical(logits=logits).entropy())


def test_drawn_actions_have_the_probabilities_of_the_logits():
    policy, params = made()
    count, obs = 8000, observations(1)
    out = policy.act(params, NONE, obs.expand(count, 3), policy.draw(rng.split(rng.key(2), count)))[1]
    seen = torch.bincount(out["action"], minlength=4) / count
    close(seen, by_hand(params["actor"], obs)[0].softmax(-1), tol=0.03)


def test_a_masked_action_has_no_probability_and_is_never_taken():
    policy, params = made(MASKED)
    obs = masked(2000, True, False, True, False)
    noise = policy.draw(rng.split(rng.key(3), 2000))
    out = policy.act(params, NONE, obs, noise)[1]
    probs = out["logits"].softmax(-1)
    assert (probs[:, [1, 3]] == 0.0).all() and out["sample_log_prob"].isfinite().all()
    close(probs[:, [0, 2]], by_hand(params["actor"], obs["x"])[:, [0, 2]].softmax(-1))
    random = TensorDict({"random": torch.ones(2000, dtype=torch.bool)}, [2000])
    explored = policy.explore(params, random, out, noise)[1]
    greedy = policy.act(params, NONE, obs, None)[1]["action"]
    for action in (out["action"], explored["action"], greedy):
        assert not torch.bincount(action, minlength=4)[[1, 3]].any()
    close(explored["sample_log_prob"], torch.full((2000,), -log(2.0)))
    assert 890 < int((explored["action"] == 0).sum()) < 1110, "five standard deviations of 1000"


def test_exploration_is_uniform_where_it_is_random():
    policy, params = made()
    count = 8000
    obs, noise = observations(1).expand(count, 3), policy.draw(rng.split(rng.key(4), count))
    out = policy.act(params, NONE, obs, noise)[1]
    is_random = torch.arange(count) % 2 == 0
    explored = assert_pure(policy.explore, params, TensorDict({"random": is_random}, [count]), out, noise)[1]
    close(torch.bincount(explored["action"][is_random], minlength=4) / 4000, [0.25] * 4, tol=0.03)
    close(explored["sample_log_prob"][is_random], torch.full((4000,), -log(4.0)))
    for name in ("action", "sample_log_prob", "logits"):
        assert torch.equal(explored[name][~is_random], out[name][~is_random])


def test_actor_and_critics_may_read_other_observations():
    space = dict_space({"a": box(-1.0, 1.0, 2), "b": box(-1.0, 1.0, 3)})
    policy, params = made(space, actor_obs=["a"], critic_obs=["b"])
    assert params["actor", "0.weight"].shape == (8, 2) and params["critic", "0.weight"].shape == (2, 8, 3)
    obs = TensorDict({"a": torch.randn(B, 2), "b": torch.randn(B, 3)}, [B])
    close(policy.act(params, NONE, obs, None)[1]["logits"], by_hand(params["actor"], obs["a"]))
    first = params["critic"].apply(lambda w: w[0], batch_size=[])
    close(policy.q(params, obs, None, None)[0], by_hand(first, obs["b"]))


WRONG = {
    "box": (
        {"action_space": box(-1.0, 1.0, 2)},
        "policy.name: categorical_actor_critic needs Discrete actions, got Box",
    ),
    "clip": (
        {"clip_actions": False},
        "policy.clip_actions: categorical_actor_critic has no Box actions to clip; leave",
    ),
    "dim": ({"action_dim": 3}, "policy.action_dim: 3 does not match the environment's 4"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_give_one_line(case):
    settings, line = WRONG[case]
    with pytest.raises(ConfigError, match=line) as error:
        made(**settings)
    assert "\n" not in str(error.value)


def test_the_policy_keeps_the_contract():
    assert not ecrl.check_policy(made()[0], OBS, ACTIONS).findings
