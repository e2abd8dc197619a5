"""All fields that a policy's `act` returns reach `evaluate`; token log-probabilities sum to one action."""

from dataclasses import replace

import pytest
import torch
from support.checks import close
from support.small_runs import last_state
from support.token_agent import speaking
from tensordict import TensorDict

import ecrl
from ecrl.algorithms.core import collect
from ecrl.algorithms.ppo import advantages
from ecrl.algorithms.rows import rows_of
from ecrl.errors import ConfigError
from ecrl.kernels import act_and_step
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.policies import sum_tokens

# GRPO compares the members of a group, which start alike: with episodes of one step only the first step counts.
GRPO = {"group_size": 8, "n_epochs": 4, "batch_size": 32, "learning_rate": 0.1, "kl_coef": 0.001}
ALGORITHMS = {"ppo": {}, "grpo": {"algorithm": {"name": "grpo", "cfg": GRPO}, "trainer.iterations": 60}}


def test_tokens_are_stored_as_returned_and_summed_to_one_action():
    cfg = speaking()
    run, state = build(cfg), init_state(cfg)
    _, batch = collect(run, state)
    rollout = batch["steps"]
    assert rollout["tokens"].shape == rollout["sample_log_prob"].shape == rollout["token_mask"].shape == (32, 5, 2)
    assert not rollout["token_mask"].all() and rollout["token_mask"][:, :-1].any()
    rows = rows_of(run, batch, **advantages(run, state["hyper"], rollout))
    assert {"tokens", "token_mask", "sample_log_prob", "action", "obs"} <= set(rows.keys())
    assert {"reward", "terminated", "truncated", "final_value"}.isdisjoint(rows.keys())
    log_prob, entropy = run.policy.evaluate_rows(state["params"], rows)
    first, second = rollout["sample_log_prob"][:, :-1].flatten(0, 1).unbind(-1)
    expected = first + torch.where(rows["token_mask"][:, 1], second, 0.0)
    close(log_prob, expected.detach())
    close(rows["sample_log_prob"], expected)
    assert entropy.shape == log_prob.shape == (128,)


def test_tokens_that_do_not_count_may_hold_anything():
    rows = TensorDict({"done": torch.zeros(2).bool(), "token_mask": torch.tensor([[True, False]] * 2)}, [2])
    x = torch.tensor([[-1.0, torch.nan], [-2.0, torch.inf]], requires_grad=True)
    sum_tokens(x, rows).sum().backward()
    close(sum_tokens(x, rows).detach(), [-1.0, -2.0])
    close(x.grad, [[1.0, 0.0], [1.0, 0.0]])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_agent_of_tokens_learns(name):
    cfg = speaking(**ALGORITHMS[name])
    assert ecrl.evaluate(last_state(cfg), cfg)["eval/avg_reward"] >= 0.95


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_first_minibatch_has_the_log_probabilities_of_acting(name):
    cfg = speaking(**ALGORITHMS[name])
    cfg = cfg.replace(**{"algorithm.cfg.n_epochs": 1, "algorithm.cfg.batch_size": 128})
    assert abs(float(make_iteration(cfg)(init_state(cfg))[1]["train"]["approx_kl"])) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.usefixtures("traced_or_compiled")
def test_compiled_tokens_equal_eager_ones(name):
    cfg = speaking(**ALGORITHMS[name]).replace(**{"trainer.iterations": 2})
    eager, compiled = (last_state(cfg.replace(**{"trainer.compile": form})) for form in ("off", "on"))
    for path, weight in eager["params"].items():
        close(compiled["params", path], weight, tol=1e-4)


COLLISIONS = [("ppo", "advantage"), ("ppo", "value_target"), ("grpo", "advantage"), ("grpo", "ref_log_prob")]


@pytest.mark.parametrize(("name", "field"), COLLISIONS)
def test_a_field_of_the_algorithm_cannot_be_declared(name, field):
    cfg = speaking(**ALGORITHMS[name])
    made = build(cfg)

    def act(params, carry, obs, noise):
        carry, out = made.policy.act(params, carry, obs, noise)
        return carry, out.set(field, obs[..., 0])

    run = made._replace(policy=replace(made.policy, act=act))
    message = rf"^policy.name: act of two_tokens returns the field '{field}', which {name} computes itself; give it an"
    with pytest.raises(ConfigError, match=message):
        run.algorithm.iterate(run, init_state(cfg), TensorDict({}, []))


def test_a_field_of_the_environment_cannot_be_declared():
    def act(params, carry, obs, noise):
        return carry, TensorDict({"action": obs, "reward": obs}, obs.shape)

    message = r"act returns the field 'reward', which the collector sets itself; give it another name"
    with pytest.raises(ValueError, match=message):
        act_and_step(act, None, None, None, {"obs": torch.zeros(2)}, None, None)  # pyright: ignore
