"""Standardised observations: the numbers, when the statistics move, and who uses them."""

from typing import Any

import pytest
import torch
from support.checks import assert_pure, close
from support.small_runs import small, steps_of
from tensordict import TensorDict

from ecrl import rng
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.policies import acting_params, make_policy
from ecrl.run.evaluation import evaluate
from ecrl.spaces import Discrete, MultiDiscrete, box, dict_space

EMPTY = TensorDict({}, [])
NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
PARTS = dict_space({"x": box(-9.0, 9.0, 2), "gear": Discrete(3), "action_mask": MultiDiscrete((2,) * 4)})


def _policy(space, normalize=True, **more):
    block = {"name": "actor_critic", "actor": NET, "critic": NET, "normalize_obs": normalize, **more}
    return make_policy(block, space, Discrete(4))


def _parts(x):
    gear = torch.arange(len(x)) % 3
    mask = torch.tensor([True, True, False, True]).expand(len(x), 4)
    return TensorDict({"x": x, "gear": gear, "action_mask": mask}, [len(x)])


def _moments(count, mean, variance):
    fields = {"count": torch.tensor(count), "mean": torch.tensor(mean), "m2": torch.tensor(variance) * count}
    return TensorDict({name: field.double() for name, field in fields.items()}, [])


@pytest.mark.parametrize("kind", ["box", "dict"])
def test_it_is_the_plain_policy_on_standardised_numbers(variant, kind):
    # mean (1, -2), variance (4, 0.25): (x - mean) / std by hand; 1e3 is held at 10. Gears and masks pass as they are.
    x = torch.tensor([[3.0, -2.0], [1.0, -1.5], [1e3, -2.5]])
    z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [10.0, -1.0]])
    space, moments = (box(-9.0, 9.0, 2), PARTS)[kind == "dict"], _moments(7.0, [1.0, -2.0], [4.0, 0.25])
    norm = TensorDict({"x": moments}, []) if kind == "dict" else moments
    raw, standard = (_parts(x), _parts(z)) if kind == "dict" else (x, z)
    policy, plain = _policy(space), _policy(space, normalize=False)
    params = plain.init(rng.key(1))
    full, noise = params.copy().set("norm", norm), policy.draw(rng.split(rng.key(2), 3))
    out, expected = variant(policy.act)(full, EMPTY, raw, noise)[1], plain.act(params, EMPTY, standard, noise)[1]
    assert torch.equal(out["action"], expected["action"])
    close(out["sample_log_prob"], expected["sample_log_prob"].detach())
    judged = policy.evaluate(full, EMPTY, steps_of(raw, out["action"]))
    close(judged[0], expected["sample_log_prob"].detach())
    close(policy.value(full, EMPTY, raw), plain.value(params, EMPTY, standard).detach())


def test_statistics_start_empty_and_are_those_of_the_counted_rows():
    policy = _policy(PARTS)
    norm = policy.norm_init(torch.device("cpu"))
    assert list(norm.keys()) == ["x"] and float(norm["x", "count"]) == 0.0
    x = torch.tensor([[[1.0, 5.0], [3.0, 5.0], [99.0, 99.0]]])
    obs = TensorDict({"x": x, "gear": torch.zeros(1, 3, dtype=torch.int64)}, [1, 3])
    moved = assert_pure(policy.norm_update, norm, obs, torch.tensor([[True, True, False]]))
    assert moved["x", "count"].item() == 2.0
    assert moved["x", "mean"].tolist() == [2.0, 5.0] and moved["x", "m2"].tolist() == [2.0, 0.0]


IMAGE = box(0, 255, 4, 4, 1, dtype=torch.uint8)
NO_FLOATS = [Discrete(3), MultiDiscrete((2, 3)), dict_space({"a": Discrete(2)})]
NO_FLOATS += [IMAGE, dict_space({"camera": IMAGE}), dict_space({"in": dict_space({"camera": IMAGE})})]


@pytest.mark.parametrize("space", NO_FLOATS)
def test_observations_without_numbers_are_refused(space):
    with pytest.raises(ConfigError, match=r"policy\.normalize_obs: .* has no float Box to standardise; remove"):
        _policy(space)


def test_actor_only_can_be_normalized():
    block = {"name": "actor_only", "actor": NET, "normalize_obs": True}
    policy = make_policy(block, box(-1.0, 1.0, 3), Discrete(4))
    assert policy.value is None and policy.norm_init is not None
    assert policy == make_policy(block, box(-1.0, 1.0, 3), Discrete(4))


def test_frozen_during_an_iteration_and_moved_at_its_end():
    cfg = small(**{"policy.normalize_obs": True})
    parts = build(cfg)
    algorithm: Any = parts.algorithm.iterate
    iteration, first = make_iteration(cfg), init_state(cfg)
    second = iteration(first)[0]
    _, batch = algorithm.collect(parts, first.copy())
    observations = batch["steps", "obs"][:, :-1].reshape(-1, 4).double()
    close(second["norm", "obs", "mean"], observations.mean(0))
    close(second["norm", "obs", "m2"], (observations - observations.mean(0)).square().sum(0))
    assert float(second["norm", "obs", "count"]) == 32.0
    third = iteration(second)[0]
    later = algorithm.collect(parts, second.copy())[1]["steps"]
    both = torch.cat((observations, later["obs"][:, :-1].reshape(-1, 4).double()))
    close(third["norm", "obs", "mean"], both.mean(0))
    close(third["norm", "obs", "m2"], (both - both.mean(0)).square().sum(0))
    # The second rollout used the statistics after the first one, and stores raw observations.
    params = acting_params(second["params"], second["norm"])
    rows = later[:, :-1].reshape(-1)
    log_prob, _ = parts.policy.evaluate(params, EMPTY, rows)
    close(log_prob, rows["sample_log_prob"])


def test_learning_and_evaluation_use_the_statistics():
    cfg = small(**{"policy.normalize_obs": True, "trainer.num_eval_envs": 4, "env.name": "pendulum"})
    state = make_iteration(cfg)(init_state(cfg))[0]
    other = state.clone()
    other["norm", "obs", "mean"] += torch.tensor([3.0, -1.0, 0.5])
    one, two = (make_iteration(cfg)(s)[0]["params"] for s in (state, other))
    assert not torch.equal(one["actor", "0.weight"], two["actor", "0.weight"])
    first, second = (evaluate(s, cfg, num_episodes=4)["eval/avg_reward"] for s in (state, other))
    assert abs(first - second) > 0.1


def test_without_the_key_there_are_no_statistics():
    assert init_state(small())["norm"].is_empty()
