"""Soft actor-critic: one gradient step by hand, and bits that do not depend on how the run is executed."""

from math import exp, log

import pytest
import torch
from support.checks import close
from support.continuous_agents import (
    C51,
    LEARNING,
    NORMALIZED,
    SGD,
    B,
    N,
    Nets,
    T,
    assert_step,
    continuous,
    descend,
    drawn,
    follow,
    transitions,
)
from support.run_checks import (
    assert_compiled_equals_eager,
    assert_resumes,
    assert_same_for_lengths,
    assert_traced_equals_eager,
    states_of,
)
from support.small_runs import same

from ecrl import rng
from ecrl.algorithms.replay_learning import noise_keys
from ecrl.algorithms.sac import step, temperature_of
from ecrl.config import config_from_dict
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state

RATES = {"algorithm.cfg.critic_learning_rate": 0.1, "algorithm.cfg.temperature_learning_rate": 0.2}


def by_hand(state, batch, noise, next_noise, rates, temperature):
    """One gradient step in float64 with plain modules. Return the networks, the targets and the logs."""
    nets, targets = Nets(state["params"]), Nets(state["target_params"])
    rows, x = batch["mask"], batch.apply(lambda t: t.double() if t.is_floating_point() else t)
    action, log_prob = drawn(nets.actor, x["next_obs"], next_noise)
    value = targets.q(x["next_obs"], action).amin(0) - temperature * log_prob
    target = (x["reward"] + x["discount"] * ~x["terminated"] * value).detach()
    errors = (nets.q(x["obs"], x["action"] / 2.0) - target)[:, rows]
    q_loss = 0.5 * errors.square().mean(1).sum()
    descend(q_loss, [*nets.critics], rates[1])
    action, log_prob = drawn(nets.actor, x["obs"], noise)
    policy_loss = (temperature * log_prob - nets.q(x["obs"], action).amin(0))[rows].mean()
    descend(policy_loss, [nets.actor], rates[0])
    follow(targets, nets, 0.1)
    logs = {"q_loss": q_loss, "td_error": errors.abs().mean(), "policy_loss": policy_loss}
    return nets, targets, logs | {"entropy": -log_prob[rows].mean()}


@pytest.mark.parametrize("num_critics", [1, 2, 3])
@pytest.mark.parametrize("learns", [True, False])
def test_a_gradient_step_equals_the_equations_of_the_paper(learns, num_critics):
    changes = {"policy.num_critics": num_critics, "algorithm.cfg.tau": 0.1, "algorithm.cfg.max_grad_norm": 1e9}
    temperature = {"algorithm.cfg.temperature": 0.3, "algorithm.cfg.learn_temperature": learns}
    rates = RATES if learns else {"algorithm.cfg.critic_learning_rate": 0.1}
    cfg = continuous("sac", **SGD, **rates, **changes, **temperature)
    run, state, batch = build(cfg), init_state(cfg).clone(), transitions()
    for name in ("0.weight", "2.weight"):
        state["target_params", "critic", name].add_(0.1)  # so that the targets differ from the critics
    next_noise, noise = (rng.normal(k, (1,)).double() for k in rng.split(noise_keys(state, B, torch.tensor(5))))
    after, logs = step(run, state, batch, torch.tensor(5))
    nets, targets, expected = by_hand(state, batch, noise, next_noise, (0.05, 0.1), 0.3)
    assert_step(after, logs, (nets, targets, expected))
    entropy = float(expected["entropy"].detach())
    close(temperature_of(after), exp(log(0.3) - 0.2 * 0.3 * (entropy + 1.0)) if learns else 0.3)
    assert ("temperature_loss" in logs) == learns


def test_a_fixed_target_entropy_replaces_the_number_of_dimensions():
    cfg = continuous("sac", **{"algorithm.cfg.target_entropy": -3.5})
    assert float(init_state(cfg)["hyper", "target_entropy"]) == -3.5
    assert float(init_state(continuous("sac"))["hyper", "target_entropy"]) == -1.0


def test_actor_and_temperature_move_at_every_third_gradient_step():
    cfg = continuous("sac", **{"algorithm.cfg.policy_delay": 3})
    run, state = build(cfg), init_state(cfg)
    for count in range(6):
        after, _ = step(run, state, transitions(count), torch.tensor(count))
        is_due = count % 3 == 2
        assert same(after["params", "actor"], state["params", "actor"]) != is_due
        assert torch.equal(after["params", "log_temperature"], state["params", "log_temperature"]) != is_due
        assert not same(after["params", "critic"], state["params", "critic"])
        assert not same(after["target_params"], state["target_params"])
        state = after


def test_the_noise_of_a_gradient_step_is_its_own():
    state = init_state(continuous("sac"))
    keys = torch.stack([noise_keys(state, B, torch.tensor(count)) for count in range(5)])
    assert len(keys.unique()) == keys.numel()


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        (
            {
                "policy.normalize_obs": True,
                **NORMALIZED,
                "algorithm.cfg.gradient_steps": 2,
                "algorithm.cfg.policy_delay": 3,
            },
            (1, 8),
        ),
        ({"algorithm.cfg.train_freq": 4, "algorithm.cfg.lr_scheduler": {"name": "linear"}}, (4, 8)),
    ],
)
def test_the_length_of_an_iteration_changes_no_bit(changes, sizes):
    assert_same_for_lengths(continuous("sac", **LEARNING, **changes), sizes)


def test_traced_graphs_equal_the_eager_run():
    assert_traced_equals_eager(continuous("sac", **LEARNING, **NORMALIZED, **{"algorithm.cfg.gradient_steps": 2}))


@pytest.mark.long
def test_compiled_graphs_equal_the_eager_run():
    assert_compiled_equals_eager(continuous("sac", **LEARNING))


@pytest.mark.parametrize("saved", [1, 3])
def test_a_run_resumes_with_the_same_bits(saved, tmp_path):
    cfg = continuous("sac", **{"algorithm.cfg.learning_starts": 2 * N * T})
    assert_resumes(cfg, saved, tmp_path)


def test_actions_are_uniformly_random_until_learning_starts():
    cfg = continuous(
        "sac",
        **{"trainer.num_envs": 100, "trainer.buffer_size": 20, "trainer.iterations": 2},
        **{"algorithm.cfg.capacity": 4000, "algorithm.cfg.learning_starts": 2000},
    )
    for state, is_random in zip(states_of(cfg), (True, False), strict=True):
        assert state["exploration", "random"].tolist() == [is_random] * 100
    actions = state["replay", "steps", "action"].reshape(40, 100)
    close(torch.histc(actions[:20], 4, -2.0, 2.0) / 2000, [0.25] * 4, tol=0.04)


WRONG = {
    "discrete": (
        {"env": {"name": "cartpole"}},
        r"policy.name: squashed_actor_critic needs float32 Box actions with finite bounds, got Discrete\(n=2\); use",
    ),
    "deterministic": (
        {"policy.name": "deterministic_actor_critic"},
        "policy.name: sac needs a stochastic policy with a Q-function for bounded Box actions, such as squashed_actor",
    ),
    "distribution": (
        {f"policy.{name}": value for name, value in C51.items()},
        "policy.distribution: sac needs critics that predict values; leave it out, or use fast_sac",
    ),
    "capacity": ({"algorithm.cfg.capacity": 8}, "algorithm.cfg: batch_size 16 is above capacity 8; change one of them"),
    "temperature": ({"algorithm.cfg.temperature": 0.0}, "algorithm.cfg.temperature: must be above 0.0, got 0.0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_give_one_line(case):
    changes, line = WRONG[case]
    with pytest.raises(ConfigError, match=line) as error:
        init_state(continuous("sac", **changes))
    assert "\n" not in str(error.value)


def test_settings_of_a_temperature_that_is_not_learnt_are_refused():
    for name, value in (("target_entropy", -1.0), ("temperature_learning_rate", 0.1)):
        with pytest.raises(
            ConfigError, match=f"{name} has no effect, because learn_temperature is false; leave it out"
        ):
            continuous("sac", **{"algorithm.cfg.learn_temperature": False, f"algorithm.cfg.{name}": value})
    assert config_from_dict(continuous("sac").model_dump()) == continuous("sac")
