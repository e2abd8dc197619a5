"""FastTD3: one gradient step by hand, noise scales, and bits that do not depend on how the run is executed."""

from itertools import pairwise

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
    follow,
    projected,
    transitions,
)
from support.run_checks import (
    assert_compiled_equals_eager,
    assert_resumes,
    assert_same_for_lengths,
    assert_traced_equals_eager,
)
from support.small_runs import same

from ecrl import rng
from ecrl.algorithms.fast_td3 import step, with_new_scales
from ecrl.algorithms.replay_learning import noise_keys
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter


def by_hand(state, batch, noise, moves):
    """One gradient step in float64 with plain modules. Return the networks, the targets and the logs."""
    nets, targets = Nets(state["params"]), Nets(state["target_params"])
    rows, x = batch["mask"], batch.apply(lambda t: t.double().nan_to_num() if t.is_floating_point() else t)
    action = (torch.tanh(nets.actor(x["next_obs"])) + noise).clamp(-1.0, 1.0)
    probs = targets.logits(x["next_obs"], action).softmax(-1)
    probs = probs[(probs * SUPPORT).sum(-1).argmin(0), torch.arange(B)]
    discount = x["discount"] * ~x["terminated"]
    target = projected(probs, x["reward"].unsqueeze(-1) + discount.unsqueeze(-1) * SUPPORT).detach()
    log_probs = nets.logits(x["obs"], x["action"] / 2.0).log_softmax(-1)
    q_loss = -(target * log_probs).sum(-1)[:, rows].mean(1).sum()
    q_value = (log_probs.exp() * SUPPORT).sum(-1)[:, rows].mean()
    descend(q_loss, [*nets.critics], 0.1)
    values = (nets.logits(x["obs"], torch.tanh(nets.actor(x["obs"]))).softmax(-1) * SUPPORT).sum(-1)
    policy_loss = -values.amin(0)[rows].mean()
    if moves:
        descend(policy_loss, [nets.actor], 0.05)
    policy_loss = policy_loss if moves else torch.tensor(torch.nan)
    follow(targets, nets, 0.1)
    return nets, targets, {"q_loss": q_loss, "q_value": q_value, "policy_loss": policy_loss}


@pytest.mark.parametrize(("count", "num_critics"), [(4, 2), (5, 2), (5, 1), (5, 3)])
def test_a_gradient_step_equals_the_equations_of_the_paper(count, num_critics):
    changes = {"policy.num_critics": num_critics, "algorithm.cfg.max_grad_norm": 1e9, "algorithm.cfg.policy_noise": 0.3}
    cfg = continuous("fast_td3", **SGD, **changes, **{"algorithm.cfg.critic_learning_rate": 0.1})
    run, state, batch = build(cfg), init_state(cfg).clone(), transitions()
    state["target_params", "critic", "2.weight"].mul_(3.0)  # so that the targets differ from the critics
    noise = (0.3 * rng.normal(noise_keys(state, B, torch.tensor(count)), (1,)).double()).clamp(-0.5, 0.5)
    after, logs = step(run, state, batch, torch.tensor(count))
    nets, targets, expected = by_hand(state, batch, noise, count % 2 == 1)
    assert_step(after, logs, (nets, targets, expected))
    assert "actor" not in after["target_params"]


def test_the_noise_in_the_target_is_clipped():
    cfg = continuous("fast_td3", **{"algorithm.cfg.policy_noise": 1e6, "algorithm.cfg.noise_clip": 0.0})
    still = continuous("fast_td3", **{"algorithm.cfg.policy_noise": 0.0})
    one, other = (step(build(c), init_state(c), transitions(), torch.tensor(0))[0] for c in (cfg, still))
    assert same(one["params"], other["params"])


NOISE = {"algorithm.cfg.min_exploration_noise": 0.1, "algorithm.cfg.max_exploration_noise": 0.5}


def test_noise_scales_are_uniform_between_their_bounds():
    cfg = continuous("fast_td3", **NOISE, **{"trainer.num_envs": 2000, "algorithm.cfg.capacity": 8000})
    state = init_state(cfg)
    scales = state["exploration", "std"]
    assert len(scales.unique()) > 1990
    close(torch.histc(scales, 4, 0.1, 0.5) / 2000, [0.25] * 4, tol=0.04)
    few = init_state(continuous("fast_td3", **NOISE))["exploration", "std"]
    assert torch.equal(few, scales[:N]), "the scale of an environment does not depend on their number"


def test_an_environment_draws_a_new_scale_when_its_episode_ends():
    cfg = continuous("fast_td3", **NOISE)
    run, state = build(cfg), init_state(cfg)
    old = state["exploration", "std"]
    done = torch.tensor([[False, False, True], [True, False, False]])
    seen = [with_new_scales(run, state, torch.tensor(t), done)["exploration", "std"] for t in range(3)]
    for new in seen:
        assert torch.equal(new == old, torch.tensor([False, True, False]))
        assert bool(((new >= 0.1) & (new <= 0.5)).all())
    assert len(torch.stack(seen)[:, 0].unique()) == 3, "every step has numbers of its own"


def test_scales_last_for_an_episode():
    cfg = continuous("fast_td3", **NOISE, **{"trainer.buffer_size": 1, "trainer.iterations": 15})
    records = train_iter(init_state(cfg), cfg)
    scales = [r["state"]["exploration", "std"].clone() for r in records if r["log_type"] == "train"]
    changes = [not torch.equal(a, b) for a, b in pairwise(scales)]
    assert [t + 2 for t, changed in enumerate(changes) if changed] == [7, 14], "episodes have 7 steps"


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({**NORMALIZED, "algorithm.cfg.gradient_steps": 3}, (1, 8)),
        ({"algorithm.cfg.train_freq": 4, "algorithm.cfg.n_step": 3}, (4, 8)),
    ],
)
def test_the_length_of_an_iteration_changes_no_bit(changes, sizes):
    assert_same_for_lengths(continuous("fast_td3", **LEARNING, **changes), sizes)


def test_traced_graphs_equal_the_eager_run():
    traced, eager = assert_traced_equals_eager(continuous("fast_td3", **LEARNING, **NORMALIZED))
    assert torch.equal(traced["exploration", "std"], eager["exploration", "std"])


@pytest.mark.long
def test_compiled_graphs_equal_the_eager_run():
    assert_compiled_equals_eager(continuous("fast_td3", **LEARNING))


@pytest.mark.parametrize("saved", [1, 3])
def test_a_run_resumes_with_the_same_bits(saved, tmp_path):
    cfg = continuous("fast_td3", **{"algorithm.cfg.learning_starts": 2 * N * T})
    assert_resumes(cfg, saved, tmp_path)


WRONG = {
    "values": (
        {"policy.distribution": None, "policy.num_atoms": None, "policy.v_min": None, "policy.v_max": None},
        'policy.distribution: fast_td3 needs the distribution "categorical", got null',
    ),
    "stochastic": (
        {"policy.name": "squashed_actor_critic"},
        "policy.name: fast_td3 needs a deterministic policy with a Q-function for bounded Box actions, such as determi",
    ),
    "scales": (
        {"algorithm.cfg.min_exploration_noise": 0.5},
        "algorithm.cfg: min_exploration_noise 0.5 is above max_exploration_noise 0.4; swap them",
    ),
    "n_step": (
        {"algorithm.cfg.n_step": 7},
        "algorithm.cfg.capacity: 21 has room for 7 steps of each environment, but a transition of n_step 7 needs 8",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_give_one_line(case):
    changes, line = WRONG[case]
    with pytest.raises(ConfigError, match=line) as error:
        init_state(continuous("fast_td3", **changes))
    assert "\n" not in str(error.value)
