"""Soft actor-critic for Discrete actions: one gradient step by hand, masks, and bits as for Box actions."""

from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
import torch
from support.checks import close
from support.continuous_agents import LEARNING, NORMALIZED, SGD, Nets, assert_step, descend, follow
from support.run_checks import assert_resumes, assert_same_for_lengths, assert_traced_equals_eager
from support.small_runs import NET, last_state, same
from tensordict import TensorDict

from ecrl.algorithms.sac import step, temperature_of
from ecrl.config import Config, config_from_dict
from ecrl.config.model import ConfigModel
from ecrl.envs import Env, make_env
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state
from ecrl.registry import register_env, register_policy
from ecrl.spaces import MultiDiscrete, dict_space

N, T, B = 3, 4, 16


def small(**changes: Any) -> Config:
    """A small run on CartPole, eager, with dotted keys changed."""
    cfg = {"capacity": 21, "batch_size": B, "learning_rate": 0.02, "learning_starts": N * T}
    base = {
        "trainer": {"num_envs": N, "buffer_size": T, "iterations": 5, "compile": "off", "enable_eval": False},
        "env": {"name": "cartpole", "cfg": {"max_episode_steps": 7}},
        "policy": {"name": "categorical_actor_critic", "actor": NET, "critic": NET},
        "algorithm": {"name": "sac", "cfg": cfg},
    }
    return config_from_dict(base).replace(**changes)


def transitions(seed: int = 0) -> TensorDict:
    """Random transitions of CartPole. One is terminated, and the last one is masked and holds NaN."""
    g = torch.Generator().manual_seed(seed)
    obs, following = torch.randn(2, B, 4, generator=g)
    fields = {"obs": obs, "next_obs": following, "reward": torch.randn(B, generator=g)}
    fields |= {"action": torch.randint(0, 2, (B,), generator=g), "discount": torch.rand(B, generator=g)}
    batch = TensorDict({**fields, "terminated": torch.arange(B) == 1, "mask": torch.arange(B) < B - 1}, [B])
    batch["reward"][-1] = torch.nan
    return batch


def by_hand(state, batch, rates, temperature):
    """One gradient step in float64 with plain modules. Return the networks, the targets and the logs."""
    nets, targets = Nets(state["params"]), Nets(state["target_params"])
    rows, x = batch["mask"], batch.apply(lambda t: t.double() if t.is_floating_point() else t)
    every, index = torch.arange(B), x["action"]
    p = torch.softmax(nets.actor(x["next_obs"]), -1)
    smallest = torch.stack([critic(x["next_obs"]) for critic in targets.critics]).amin(0)
    value = (p * (smallest - temperature * torch.log(p))).sum(-1)
    target = (x["reward"] + x["discount"] * ~x["terminated"] * value).detach()
    taken = torch.stack([critic(x["obs"])[every, index] for critic in nets.critics])
    errors = (taken - target)[:, rows]
    q_loss = 0.5 * errors.square().mean(1).sum()
    descend(q_loss, [*nets.critics], rates[1])
    p = torch.softmax(nets.actor(x["obs"]), -1)
    smallest = torch.stack([critic(x["obs"]) for critic in nets.critics]).amin(0).detach()
    policy_loss = (p * (temperature * torch.log(p) - smallest)).sum(-1)[rows].mean()
    descend(policy_loss, [nets.actor], rates[0])
    follow(targets, nets, 0.1)
    entropy = -(p * torch.log(p)).sum(-1)[rows].mean()
    return nets, targets, {"q_loss": q_loss, "policy_loss": policy_loss, "entropy": entropy}


@pytest.mark.parametrize("num_critics", [1, 2, 3])
@pytest.mark.parametrize("learns", [True, False])
def test_a_gradient_step_equals_the_equations_of_the_paper(learns, num_critics):
    changes = {"policy.num_critics": num_critics, "algorithm.cfg.tau": 0.1, "algorithm.cfg.max_grad_norm": 1e9}
    changes |= {"algorithm.cfg.temperature": 0.3, "algorithm.cfg.learn_temperature": learns}
    changes |= {"algorithm.cfg.critic_learning_rate": 0.1}
    own = {"algorithm.cfg.temperature_learning_rate": 0.2, "algorithm.cfg.target_entropy": 0.4} if learns else {}
    cfg = small(**SGD, **changes, **own)
    run, state, batch = build(cfg), init_state(cfg).clone(), transitions()
    for name in ("0.weight", "2.weight"):
        state["target_params", "critic", name].add_(0.1)  # so that the targets differ from the critics
    after, logs = step(run, state, batch, torch.tensor(5))
    nets, targets, expected = by_hand(state, batch, (0.05, 0.1), 0.3)
    assert_step(after, logs, (nets, targets, expected))
    entropy = float(expected["entropy"].detach())
    close(temperature_of(after), exp(log(0.3) - 0.2 * 0.3 * (entropy - 0.4)) if learns else 0.3)


def test_the_default_target_entropy_is_a_share_of_the_largest_entropy():
    close(init_state(small())["hyper", "target_entropy"], 0.5 * log(2.0))
    assert float(init_state(small(**{"algorithm.cfg.target_entropy": 0.25}))["hyper", "target_entropy"]) == 0.25


def test_the_noise_of_a_gradient_step_has_no_effect():
    """Targets and losses are expectations over the actions."""
    cfg = small()
    run, state, batch = build(cfg), init_state(cfg), transitions()
    first, second = (step(run, state, batch, torch.tensor(count))[0] for count in (0, 1))
    assert same(first["params"], second["params"])


class MaskedPoleConfig(ConfigModel):
    """No settings."""


@register_env("masked_pole", override=True)
def masked_pole(cfg: MaskedPoleConfig) -> Env:
    """CartPole, in which only the action 1 is allowed while the position is above 0."""
    env = make_env("cartpole")

    def with_mask(state: TensorDict) -> TensorDict:
        x = state["obs"] if isinstance(state["obs"], torch.Tensor) else state["obs", "x"]
        mask = torch.stack((x[..., 0] <= 0.0, torch.ones_like(x[..., 0], dtype=torch.bool)), -1)
        return state.copy().set("obs", TensorDict({"x": x, "action_mask": mask}, x.shape[:-1]))

    def step(state: Any, action: Any, noise: Any) -> Any:
        return with_mask(env.step(state.copy().set("obs", state["obs", "x"]), action, noise))

    space = dict_space({"x": env.observation_space, "action_mask": MultiDiscrete((2, 2))})
    return replace(env, reset=lambda keys: with_mask(env.reset(keys)), step=step, observation_space=space)


def test_actions_that_are_masked_are_never_taken_and_learning_stays_finite():
    state = last_state(
        small(**{"env": {"name": "masked_pole"}, "trainer.iterations": 10, "algorithm.cfg.capacity": 300})
    )
    steps = state["replay", "steps"][: 10 * T]
    assert steps["obs", "action_mask"].gather(-1, steps["action"].unsqueeze(-1)).all()
    assert (~steps["obs", "action_mask"]).any() and (steps["action"] == 0).any()
    assert all(x.isfinite().all() for x in state["params"].values(True, True))


def test_the_length_of_an_iteration_changes_no_bit():
    changes = {**NORMALIZED, "algorithm.cfg.gradient_steps": 2, "algorithm.cfg.n_step": 2}
    assert_same_for_lengths(small(**LEARNING, **changes), (1, 8))


@pytest.mark.long
def test_traced_graphs_equal_the_eager_run():
    traced, eager = assert_traced_equals_eager(small(**LEARNING))
    assert torch.equal(traced["replay", "steps", "action"], eager["replay", "steps", "action"])


def test_a_run_resumes_with_the_same_bits(tmp_path):
    assert_resumes(small(), 3, tmp_path)


BOTH = {"name": "actor_critic", "actor": NET, "critic": NET}
DISCRETE = (
    r"policy.name: sac needs a stochastic policy with a Q-function for Discrete actions, such as categorical_actor"
)
WRONG = {
    "no Q": ({"policy": BOTH}, DISCRETE),
    "no probabilities": ({"policy": {"name": "q_network", "critic": NET}}, DISCRETE),
    "Box": ({"env": {"name": "pendulum"}}, "policy.name: categorical_actor_critic needs Discrete actions, got Box"),
    "policy for Box": (
        {"policy.name": "squashed_actor_critic"},
        r"policy.name: squashed_actor_critic needs float32 Box actions with finite bounds, got Discrete\(n=2\); use",
    ),
    "Box without Q": (
        {"policy": BOTH, "env": {"name": "pendulum"}},
        "policy.name: sac needs a stochastic policy with a Q-function for bounded Box actions, such as squashed_actor",
    ),
    "dqn": (
        {"algorithm": {"name": "dqn", "cfg": {"learning_starts": 12}}},
        "policy.name: dqn needs a policy with a Q-function for Discrete actions, such as q_network; the environment",
    ),
    "td3": (
        {"algorithm": {"name": "td3", "cfg": {"learning_starts": 12}}},
        "policy.name: td3 needs a deterministic policy with a Q-function for bounded Box actions, such as",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mismatch_of_policy_and_actions_gives_one_line(case):
    changes, line = WRONG[case]
    with pytest.raises(ConfigError, match=line) as error:
        init_state(small(**changes))
    assert "\n" not in str(error.value)


def test_a_policy_that_returns_no_logits_is_refused():
    from ecrl.policies.twin_critic import TwinCriticConfig, categorical_actor_critic

    @register_policy("without_logits", override=True)
    def without_logits(cfg: TwinCriticConfig, observation_space, action_space):
        policy = categorical_actor_critic(cfg, observation_space, action_space)

        def act(*args):
            carry, out = policy.act(*args)
            return carry, out.exclude("logits")

        return replace(policy, act=act, explore=None)

    cfg = small(**{"policy.name": "without_logits", "algorithm.cfg.learning_starts": 0})
    line = "the act of policy without_logits returns no logits, only action, sample_log_prob; return the logits"
    with pytest.raises(ConfigError, match=f"^policy.name: sac needs the logits of Discrete actions, but {line}$"):
        last_state(cfg)
