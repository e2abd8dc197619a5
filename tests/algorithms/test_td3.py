"""DDPG and TD3: one gradient step by hand, and bits that do not depend on how the run is executed."""

from functools import partial

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
    follow,
    transitions,
)
from support.graphs import traced_only
from support.long_cases import long_except
from support.run_checks import (
    assert_compiled_equals_eager,
    assert_resumes,
    assert_same_for_lengths,
    assert_traced_equals_eager,
)
from support.small_runs import last_state, same

from ecrl import rng
from ecrl.algorithms.ddpg import actor_loss
from ecrl.algorithms.ddpg import step as ddpg_step
from ecrl.algorithms.gradient_step import gradient_step
from ecrl.algorithms.replay_learning import noise_keys
from ecrl.algorithms.td3 import step as td3_step
from ecrl.compile.jit import Jit
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state

STEPS = {"ddpg": ddpg_step, "td3": td3_step}


def by_hand(state, batch, noise, moves):
    """One gradient step in float64 with plain modules. Return the networks, the targets and the logs.

    The log of the actor is NaN in a step without the actor.
    """
    nets, targets = Nets(state["params"]), Nets(state["target_params"])
    rows, x = batch["mask"], batch.apply(lambda t: t.double() if t.is_floating_point() else t)
    action = (torch.tanh(targets.actor(x["next_obs"])) + noise).clamp(-1.0, 1.0)
    value = targets.q(x["next_obs"], action).amin(0)
    target = (x["reward"] + x["discount"] * ~x["terminated"] * value).detach()
    errors = (nets.q(x["obs"], x["action"] / 2.0) - target)[:, rows]
    q_loss = 0.5 * errors.square().mean(1).sum()
    descend(q_loss, [*nets.critics], 0.1)
    policy_loss = -nets.q(x["obs"], torch.tanh(nets.actor(x["obs"])))[0, rows].mean()
    if moves:
        descend(policy_loss, [nets.actor], 0.05)
        follow(targets, nets, 0.1)
    policy_loss = policy_loss if moves else torch.tensor(torch.nan)
    return nets, targets, {"q_loss": q_loss, "td_error": errors.abs().mean(), "policy_loss": policy_loss}


@pytest.mark.parametrize(
    ("name", "count", "num_critics"), [("ddpg", 4, 1), ("ddpg", 4, 2), ("td3", 4, 2), ("td3", 5, 2), ("td3", 5, 1)]
)
def test_a_gradient_step_equals_the_equations_of_the_paper(name, count, num_critics):
    changes = {"policy.num_critics": num_critics, "algorithm.cfg.tau": 0.1, "algorithm.cfg.max_grad_norm": 1e9}
    cfg = continuous(name, **SGD, **changes, **{"algorithm.cfg.critic_learning_rate": 0.1})
    run, state, batch = build(cfg), init_state(cfg).clone(), transitions()
    for network in ("actor", "critic"):
        state["target_params", network, "2.weight"].add_(0.1)  # so that the targets differ from the networks
    noise = torch.zeros(B, 1).double()
    if name == "td3":
        noise = (0.2 * rng.normal(noise_keys(state, B, torch.tensor(count)), (1,)).double()).clamp(-0.5, 0.5)
    after, logs = STEPS[name](run, state, batch, torch.tensor(count))
    nets, targets, expected = by_hand(state, batch, noise, name == "ddpg" or count % 2 == 1)
    assert_step(after, logs, (nets, targets, expected))


def counted_loss(run, params, batch):
    """The loss of the actor, with an integer log."""
    value, logs = actor_loss(run, params, batch)
    return value, logs | {"rows": batch["mask"].sum()}


def step_of_actor(run, state, batch, moves):
    return gradient_step(run, state, run.algorithm.choices.actor, counted_loss, batch, moves=moves)


def test_a_step_that_is_not_due_changes_nothing_and_logs_nan_also_for_integers():
    cfg = continuous("td3", **SGD)
    run, state, batch = build(cfg), init_state(cfg).clone(), transitions()
    with traced_only():
        for step in (partial(step_of_actor, run), Jit(strict=True)(step_of_actor, run)):
            after, logs = step(state, batch, torch.tensor(True))
            assert not same(after["params", "actor"], state["params", "actor"])
            assert int(logs["rows"]) == int(batch["mask"].sum())
            after, logs = step(state, batch, torch.tensor(False))
            assert same(after, state)
            assert {name for name, log in logs.items() if log.isnan()} == {"rows", "policy_loss", "grad_norm"}


def test_the_noise_in_the_target_is_clipped():
    cfg = continuous("td3", **{"algorithm.cfg.policy_noise": 1e6, "algorithm.cfg.noise_clip": 0.0})
    still = continuous("td3", **{"algorithm.cfg.policy_noise": 0.0})
    one, other = (td3_step(build(c), init_state(c), transitions(), torch.tensor(0))[0] for c in (cfg, still))
    assert same(one["params"], other["params"])


@pytest.mark.parametrize(
    ("name", "changes", "sizes"),
    [
        ("td3", {**NORMALIZED, "algorithm.cfg.gradient_steps": 3}, (1, 8)),
        ("td3", {"algorithm.cfg.train_freq": 4, "algorithm.cfg.n_step": 3}, (4, 8)),
        ("ddpg", {}, (1, 8)),
    ],
)
def test_the_length_of_an_iteration_changes_no_bit(name, changes, sizes):
    assert_same_for_lengths(continuous(name, **LEARNING, **changes), sizes)


@pytest.mark.parametrize("name", long_except(["td3"], STEPS))
def test_traced_graphs_equal_the_eager_run(name):
    assert_traced_equals_eager(continuous(name, **LEARNING, **{"algorithm.cfg.gradient_steps": 2}))


@pytest.mark.long
def test_compiled_graphs_equal_the_eager_run():
    assert_compiled_equals_eager(continuous("td3", **LEARNING))


@pytest.mark.parametrize(("name", "saved"), [("td3", 1), ("td3", 3), ("ddpg", 3)])
def test_a_run_resumes_with_the_same_bits(name, saved, tmp_path):
    cfg = continuous(name, **{"algorithm.cfg.learning_starts": 2 * N * T})
    assert_resumes(cfg, saved, tmp_path)


def test_the_exploration_noise_has_the_configured_size():
    sizes = {"trainer.num_envs": 100, "trainer.buffer_size": 20, "trainer.iterations": 2}
    starts = {"algorithm.cfg.capacity": 4000, "algorithm.cfg.learning_starts": 2000}
    rate = {"algorithm.cfg.learning_rate": 1e-12, "algorithm.cfg.exploration_noise": 0.05}
    cfg = continuous("td3", **sizes, **starts, **rate)
    run, state = build(cfg), last_state(cfg)
    steps = state["replay", "steps"]
    close(torch.histc(steps["action"].reshape(40, 100)[:20], 4, -2.0, 2.0) / 2000, [0.25] * 4, tol=0.04)
    assert state["exploration", "std"].tolist() == [torch.tensor(0.05).item()] * 100
    seen = torch.randn(4000, 3)
    out = run.policy.act(state["params"], state.empty(), seen, None)[1]
    noise = run.policy.draw(rng.split(rng.key(0), 4000))
    fields = {"std": torch.full((4000,), 0.05), "random": torch.zeros(4000, dtype=torch.bool)}
    _, explored = run.policy.explore(state["params"], state.empty().update(fields), out, noise)
    close((explored["action"] - out["action"]).std(), 2.0 * 0.05, tol=0.004)


WRONG = {
    "discrete": (
        {"env": {"name": "cartpole"}},
        r"policy.name: deterministic_actor_critic needs float32 Box actions with finite bounds, got Discrete\(n=2\); u",
    ),
    "stochastic": (
        {"policy.name": "squashed_actor_critic"},
        "policy.name: td3 needs a deterministic policy with a Q-function for bounded Box actions, such as determin",
    ),
    "distribution": (
        {f"policy.{name}": value for name, value in C51.items()},
        "policy.distribution: td3 needs critics that predict values; leave it out, or use fast_td3",
    ),
    "capacity": ({"algorithm.cfg.capacity": 8}, "algorithm.cfg: batch_size 16 is above capacity 8; change one of them"),
    "n_step": (
        {"algorithm.cfg.n_step": 7},
        "algorithm.cfg.capacity: 21 has room for 7 steps of each environment, but a transition of n_step 7 needs 8",
    ),
    "adaptive": (
        {"algorithm.cfg.lr_scheduler": {"name": "adaptive"}, "algorithm.cfg.learning_rate": 0.001},
        "lr_scheduler adaptive needs the KL to the policy that collected",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_give_one_line(case):
    changes, line = WRONG[case]
    with pytest.raises(ConfigError, match=line) as error:
        init_state(continuous("td3", **changes))
    assert "\n" not in str(error.value)
