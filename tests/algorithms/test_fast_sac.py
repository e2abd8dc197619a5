"""FastSAC: one gradient step by hand, and bits that do not depend on how the run is executed."""

from math import exp, log

import pytest
import torch
from support.checks import close
from support.continuous_agents import (
    LEARNING,
    NORMALIZED,
    SGD,
    SUPPORT,
    B,
    N,
    Nets,
    T,
    assert_step,
    continuous,
    descend,
    drawn,
    follow,
    projected,
    transitions,
)
from support.long_cases import long_except
from support.run_checks import (
    assert_compiled_equals_eager,
    assert_resumes,
    assert_same_for_lengths,
    assert_traced_equals_eager,
)

from ecrl import rng
from ecrl.algorithms.fast_sac import step
from ecrl.algorithms.replay_learning import noise_keys
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state

RATES = {"algorithm.cfg.critic_learning_rate": 0.1, "algorithm.cfg.temperature_learning_rate": 0.2}


def by_hand(state, batch, noise, next_noise, temperature, moves):
    """One gradient step in float64 with plain modules. Return the networks, the targets, the temperature and logs."""
    nets, targets = Nets(state["params"]), Nets(state["target_params"])
    rows, x = batch["mask"], batch.apply(lambda t: t.double().nan_to_num() if t.is_floating_point() else t)
    action, log_prob = drawn(nets.actor, x["next_obs"], next_noise)
    discount, entropy = x["discount"] * ~x["terminated"], -log_prob[rows].mean().detach()
    shifted = SUPPORT - temperature * log_prob.unsqueeze(-1)
    atoms = x["reward"].unsqueeze(-1) + discount.unsqueeze(-1) * shifted
    probs = targets.logits(x["next_obs"], action).softmax(-1)
    wanted = torch.stack([projected(one, atoms) for one in probs]).detach()
    log_probs = nets.logits(x["obs"], x["action"] / 2.0).log_softmax(-1)
    q_loss = -(wanted * log_probs).sum(-1)[:, rows].mean(1).sum()
    q_value = (log_probs.exp() * SUPPORT).sum(-1)[:, rows].mean()
    descend(q_loss, [*nets.critics], 0.1)
    temperature = exp(log(temperature) - 0.2 * temperature * (float(entropy) - 0.7))
    action, log_prob = drawn(nets.actor, x["obs"], noise)
    values = (nets.logits(x["obs"], action).softmax(-1) * SUPPORT).sum(-1)
    policy_loss = (temperature * log_prob - values.mean(0))[rows].mean()
    if moves:
        descend(policy_loss, [nets.actor], 0.05)
    policy_loss = policy_loss if moves else torch.tensor(torch.nan)
    follow(targets, nets, 0.125)
    return nets, targets, temperature, {"q_loss": q_loss, "q_value": q_value, "policy_loss": policy_loss}


@pytest.mark.parametrize(("count", "num_critics"), [(2, 2), (3, 2), (3, 1), (3, 3)])
def test_a_gradient_step_equals_the_equations_of_the_paper(count, num_critics):
    changes = {"policy.num_critics": num_critics, "algorithm.cfg.max_grad_norm": 1e9, "algorithm.cfg.temperature": 0.3}
    cfg = continuous("fast_sac", **SGD, **RATES, **changes, **{"algorithm.cfg.target_entropy": 0.7})
    run, state, batch = build(cfg), init_state(cfg).clone(), transitions()
    state["target_params", "critic", "2.weight"].mul_(3.0)  # so that the targets differ from the critics
    next_noise, noise = (rng.normal(k, (1,)).double() for k in rng.split(noise_keys(state, B, torch.tensor(count))))
    after, logs = step(run, state, batch, torch.tensor(count))
    nets, targets, temperature, expected = by_hand(state, batch, noise, next_noise, 0.3, count == 3)
    assert_step(after, logs, (nets, targets, expected))
    close(after["params", "log_temperature"], log(temperature))


def test_defaults_of_the_temperature():
    state = init_state(continuous("fast_sac"))
    close(state["params", "log_temperature"], log(0.001))
    assert float(state["hyper", "target_entropy"]) == 0.0
    assert not bool(state["exploration", "random"].any())


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        (
            {
                "policy.normalize_obs": True,
                **NORMALIZED,
                "algorithm.cfg.gradient_steps": 3,
                "algorithm.cfg.policy_delay": 2,
            },
            (1, 8),
        ),
        ({"algorithm.cfg.train_freq": 4, "algorithm.cfg.n_step": 3}, (4, 8)),
    ],
)
def test_the_length_of_an_iteration_changes_no_bit(changes, sizes):
    assert_same_for_lengths(continuous("fast_sac", **LEARNING, **changes), sizes)


@pytest.mark.long
def test_traced_graphs_equal_the_eager_run():
    assert_traced_equals_eager(
        continuous("fast_sac", **LEARNING, **{"algorithm.cfg.gradient_steps": 2, "algorithm.cfg.policy_delay": 2})
    )


@pytest.mark.long
def test_compiled_graphs_equal_the_eager_run():
    assert_compiled_equals_eager(continuous("fast_sac", **LEARNING))


@pytest.mark.parametrize("saved", long_except([3], [1, 3]))
def test_a_run_resumes_with_the_same_bits(saved, tmp_path):
    cfg = continuous("fast_sac", **{"algorithm.cfg.learning_starts": 2 * N * T, "algorithm.cfg.gradient_steps": 4})
    assert_resumes(cfg, saved, tmp_path)


WRONG = {
    "values": (
        {"policy.distribution": None, "policy.num_atoms": None, "policy.v_min": None, "policy.v_max": None},
        'policy.distribution: fast_sac needs the distribution "categorical", got null',
    ),
    "deterministic": (
        {"policy.name": "deterministic_actor_critic"},
        "policy.name: fast_sac needs a stochastic policy with a Q-function for bounded Box actions, such as squashed_",
    ),
    "temperature": ({"algorithm.cfg.temperature": 0.0}, "algorithm.cfg.temperature: must be above 0.0, got 0.0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_give_one_line(case):
    changes, line = WRONG[case]
    with pytest.raises(ConfigError, match=line) as error:
        init_state(continuous("fast_sac", **changes))
    assert "\n" not in str(error.value)
