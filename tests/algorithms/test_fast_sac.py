"""FastSAC: one gradient step by hand, and bits that do not depend on how the run is executed."""

from math import exp, log

import pytest
import torch
from support.checks import close
from support.continuous_agents import (
    SUPPORT,
    B,
    N,
    Nets,
    T,
    continuous,
    descend,
    follow,
    learnt,
    projected,
    transitions,
    weights_of,
)
from support.graphs import traced_only
from support.small_runs import last_state, same
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from ecrl import rng
from ecrl.algorithms.fast_sac import step
from ecrl.algorithms.replay_learning import noise_keys
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.run.checkpoint import load, save

SGD = {"algorithm.cfg.learning_rate": None, "algorithm.cfg.optimizer": {"name": "sgd", "learning_rate": 0.05}}
RATES = {"algorithm.cfg.critic_learning_rate": 0.1, "algorithm.cfg.temperature_learning_rate": 0.2}


def drawn(net, obs, noise):
    """Actions of the squashed Gaussian in [-1, 1], and their log-probabilities by torch.distributions."""
    mean, log_std = net(obs).chunk(2, -1)
    normal = Normal(mean, log_std.clamp(-5.0, 2.0).exp())
    action = torch.tanh(normal.mean + normal.stddev * noise)
    squashed = TransformedDistribution(normal, TanhTransform(cache_size=1))
    return action, squashed.log_prob(action).sum(-1)


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
    for name, log_value in expected.items():
        close(logs[name], log_value.detach(), tol=1e-4)
    for params, modules in ((after["params"], nets), (after["target_params"], targets)):
        for name, weight in weights_of(modules).items():
            close(params[tuple(name.split("/"))], weight, tol=1e-5)
    close(after["params", "log_temperature"], log(temperature))


def test_defaults_of_the_temperature():
    state = init_state(continuous("fast_sac"))
    close(state["params", "log_temperature"], log(0.001))
    assert float(state["hyper", "target_entropy"]) == 0.0
    assert not bool(state["exploration", "random"].any())


def of_length(size: int, steps: int, **changes):
    """A run of so many steps of each environment, in iterations of `size` steps."""
    return continuous("fast_sac", **{"trainer.buffer_size": size, "trainer.iterations": steps // size, **changes})


LEARNING = {"algorithm.cfg.learning_starts": 8 * N, "algorithm.cfg.capacity": 8 * N + 5}


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"policy.normalize_obs": True, "algorithm.cfg.gradient_steps": 3, "algorithm.cfg.policy_delay": 2}, (1, 8)),
        ({"algorithm.cfg.train_freq": 4, "algorithm.cfg.n_step": 3}, (4, 8)),
    ],
)
def test_the_length_of_an_iteration_changes_no_bit(changes, sizes):
    first, other = (last_state(of_length(size, 24, **LEARNING, **changes)).clone() for size in sizes)
    assert not same(first["params"], init_state(of_length(4, 24, **changes))["params"])
    assert same(learnt(first), learnt(other))


def test_traced_graphs_equal_the_eager_run():
    cfg = of_length(4, 16, **LEARNING, **{"algorithm.cfg.gradient_steps": 2, "algorithm.cfg.policy_delay": 2})
    eager = last_state(cfg).clone()
    with traced_only() as graphs:
        compiled = last_state(cfg.replace(**{"trainer.compile": "on"}))
    assert graphs == ["_iteration_of_leaves"] * 2, "one for collecting, one for learning"
    for name, value in eager["params"].items(True, True):
        close(compiled["params"][name], value, tol=1e-4)
    close(compiled["replay", "steps", "action"], eager["replay", "steps", "action"], tol=1e-4)


@pytest.mark.long
def test_compiled_graphs_equal_the_eager_run():
    cfg = of_length(4, 16, **LEARNING)
    eager, compiled = (last_state(cfg.replace(**{"trainer.compile": form})).clone() for form in ("off", "on"))
    for name, value in eager["params"].items(True, True):
        close(compiled["params"][name], value, tol=1e-4)


@pytest.mark.parametrize("saved", [1, 3])
def test_a_run_resumes_with_the_same_bits(saved, tmp_path):
    cfg = continuous("fast_sac", **{"algorithm.cfg.learning_starts": 2 * N * T, "algorithm.cfg.gradient_steps": 4})
    every = [r["state"].clone() for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    save(tmp_path / "now", every[saved - 1], cfg)
    *_, last = train_iter(*load(tmp_path / "now"))
    assert same(last["state"], every[-1])


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
