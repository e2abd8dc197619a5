"""PQN: its targets and updates equal plain autograd, and its runs have the properties of every run."""

import json
import shutil
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.checks import assert_pure, close
from support.command_line import called
from support.continuous_agents import NORMALIZED
from support.graphs import traced_only
from support.run_checks import assert_compiled_equals_eager, assert_resumes, assert_seeds_batch
from support.small_runs import NET, last_state, same
from tensordict import TensorDict
from torch import nn

import ecrl
from ecrl import rng
from ecrl.algorithms.core import learn
from ecrl.algorithms.pqn import collect, targets, update
from ecrl.config import Config, config_from_dict
from ecrl.config.model import ConfigModel
from ecrl.envs import Env, state_of, time_limit
from ecrl.envs.gymnasium import from_vector
from ecrl.errors import ConfigError, NotFiniteError
from ecrl.kernels import moments_variance
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.pytree import flatten, replaced
from ecrl.registry import register_env
from ecrl.run.checkpoint import load
from ecrl.spaces import Discrete, MultiDiscrete, box, dict_space

N, T = 3, 8
NORMED = {"type": "mlp", "network_cfg": {"hidden_sizes": [8, 6], "activation": "relu", "use_layernorm": True}}


class GatedConfig(ConfigModel):
    """No settings."""


@register_env("gated", override=True)
def gated(cfg: GatedConfig) -> Env:
    """Three actions. The sign of `x` excludes the first or the last one. Episodes have a limit of five steps."""

    def observed(x):
        up = x > 0
        mask = torch.stack((up, torch.ones_like(up), ~up), -1)
        return TensorDict({"x": x.unsqueeze(-1), "action_mask": mask}, x.shape)

    def reset(keys):
        x = 2.0 * rng.uniform(keys) - 1.0
        return state_of(observed(x), x.shape, x=x)

    def step(state, action, noise):
        x = torch.sin(7.0 * state["x"] + action)
        allowed = state["obs", "action_mask"].gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return state.copy().update(
            {"x": x, "obs": observed(x), "reward": torch.where(allowed, x, -100.0), "terminated": x > 0.98}
        )

    space = dict_space({"x": box(-1.0, 1.0, 1), "action_mask": MultiDiscrete((2, 2, 2))})
    return time_limit(Env(reset, step, space, Discrete(3)), 5)


def small_pqn(**changes) -> Config:
    """A small run of PQN on CartPole, eager, with dotted keys changed."""
    cfg = {"n_epochs": 2, "batch_size": 7, "learning_rate": 1e-2, "exploration_fraction": 0.5}
    base = {
        "trainer": {"num_envs": N, "buffer_size": T, "iterations": 6, "compile": "off", "enable_eval": False},
        "env": {"name": "cartpole", "cfg": {"max_episode_steps": 13}},
        "policy": {"name": "q_network", "critic": NORMED},
        "algorithm": {"name": "pqn", "cfg": cfg},
    }
    return config_from_dict(base).replace(**changes)


GATED = {"env": {"name": "gated"}}
WHOLE = {"algorithm.cfg.batch_size": N * T, "algorithm.cfg.max_grad_norm": 1e9}


def module_of(weights: Any) -> nn.Sequential:
    """A plain module with the weights of the Q-network, in float64."""
    inputs, outputs = weights["0.weight"].shape[1], len(weights["6.bias"])
    layers = [nn.Linear(inputs, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 6), nn.LayerNorm(6), nn.ReLU()]
    module = nn.Sequential(*layers, nn.Linear(6, outputs))
    module.load_state_dict(dict(weights.items()))
    return module.double()


def features(obs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The inputs of the network, in float64, and the action mask."""
    if isinstance(obs, torch.Tensor):
        return obs.double(), None
    return obs["x"].double(), obs["action_mask"]


def expected_targets(net: nn.Module, steps: TensorDict, gamma: float, trace: float) -> torch.Tensor:
    """The targets of the paper, one environment and one step after the other, in float64."""
    found = torch.zeros(N, T, dtype=torch.float64)
    for i in range(N):
        later = 0.0
        for t in reversed(range(T)):
            obs, mask = features(steps["final_obs"][i, t])
            with torch.no_grad():
                q = net(obs)
            value = float(max(q[a] for a in range(len(q)) if mask is None or mask[a]))
            if steps["done"][i, t] or t == T - 1:
                boot = 0.0 if steps["terminated"][i, t] else value
            else:
                boot = (1 - trace) * value + trace * later
            later = float(steps["reward"][i, t]) + gamma * boot
            found[i, t] = later
    return found


def a_batch(cfg: Config) -> tuple[Any, TensorDict, TensorDict]:
    """A run, a batch with all kinds of ends, and a state with other parameters than the batch was collected with."""
    run, state = build(cfg), init_state(cfg)
    for _ in range(2):
        state, batch = collect(run, state)
    steps = cast(TensorDict, batch["steps"]).clone()
    ended = steps["terminated"][:, :-1].any() and steps["truncated"][:, :-1].any()
    assert ended and not steps["done"][:, T - 1].all(), "the batch has terminations, time limits and open episodes"
    other = init_state(cfg.replace(**{"trainer.seed": 5}))
    return run, replaced(state, {"params": other["params"]}), replaced(batch, {"steps": steps})


@pytest.mark.parametrize("changes", [{"trainer.seed": 3}, {**GATED, "trainer.seed": 1}], ids=["cartpole", "masks"])
def test_an_update_is_steps_of_adam_on_the_loss_of_the_paper(changes):
    """The targets come from the parameters before the first of three steps. A masked step does not count."""
    cfg = small_pqn(**WHOLE, **{"algorithm.cfg.n_epochs": 3, **changes})
    run, state, batch = a_batch(cfg)
    steps = batch["steps"]
    mask = torch.ones(N, T + 1, dtype=torch.bool)
    mask[1, 4] = False
    steps["mask"] = mask
    net = module_of(state["params", "critic"])
    target, counted = expected_targets(net, steps, 0.99, 0.65), mask[:, :-1]
    adam, losses = torch.optim.Adam(net.parameters(), lr=1e-2), []
    for _ in range(3):
        obs, _ = features(steps["obs"][:, :-1])
        q = net(obs).gather(-1, steps["action"][:, :-1].unsqueeze(-1)).squeeze(-1)
        loss = ((q - target)[counted] ** 2).mean() / 2
        losses.append(float(loss.detach()))
        adam.zero_grad()
        loss.backward()
        adam.step()
    after, logs = assert_pure(learn, update, run, state, batch)
    close(logs["q_loss"], sum(losses) / 3, tol=1e-5)
    for name, weight in net.state_dict().items():
        close(after["params", "critic", name], weight.float(), tol=1e-5)


def test_what_a_masked_step_holds_changes_nothing():
    """A masked step follows the end of an episode, as a reset of Gymnasium does."""
    run, state, batch = a_batch(small_pqn(**{"trainer.seed": 3}))
    steps = batch["steps"]
    env, t = (int(x[0]) for x in steps["done"][:, : T - 1].nonzero(as_tuple=True))
    steps["mask"] = torch.ones(N, T + 1, dtype=torch.bool)
    steps["mask"][env, t + 1] = False
    expected, _ = learn(update, run, state, batch)
    steps = steps.clone()
    steps["reward"][env, t + 1], steps["obs"][env, t + 1] = torch.nan, 9.0
    actual, _ = learn(update, run, state, replaced(batch, {"steps": steps}))
    assert same(actual["params"], expected["params"]) and not same(actual["params"], state["params"])


def test_an_action_that_takes_several_steps_discounts_by_all_of_them():
    run, state, batch = a_batch(small_pqn(**{"trainer.seed": 3, **WHOLE}))
    once, _ = learn(update, run, state, batch)
    twice = replaced(batch, {"steps": batch["steps"].clone().set("executed", torch.full((N, T + 1), 2))})
    squared = state.clone()
    squared["hyper", "gamma"] = state["hyper", "gamma"] ** 2
    actual, expected = (learn(update, run, *case)[0]["params"] for case in ((state, twice), (squared, batch)))
    for path, weight in expected.items(True, True):
        close(actual[path], weight, tol=1e-6)
    assert not same(actual, once["params"])


def test_collected_steps_explore_with_epsilon_and_know_what_they_reached():
    cfg = small_pqn(**{"trainer.num_envs": 400, "algorithm.cfg.initial_epsilon": 0.5})
    run, state = build(cfg), init_state(cfg)
    after, batch = assert_pure(collect, run, state)
    steps = batch["steps"]
    taken, ended = steps[:, :-1], steps["done"][:, :-1]
    obs, reached = steps["obs"], taken["final_obs"]
    assert torch.equal(reached[~ended], obs[:, 1:][~ended]) and ended.any()
    assert (reached != obs[:, 1:]).any(-1)[ended].all()
    assert torch.equal(after["env", "obs"], obs[:, -1])
    greedy = run.policy.act(state["params"], TensorDict({}, []), taken["obs"], None)[1]["action"]
    share = float((taken["action"] != greedy).float().mean())
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 3200) ** 0.5
    assert int(after["episode", "finished"].sum()) == min(100, int(ended.sum()))


def test_no_excluded_action_is_taken():
    cfg = small_pqn(**GATED, **{"trainer.num_envs": 50})
    run, state = build(cfg), init_state(cfg)
    steps = collect(run, state)[1]["steps"][:, :-1]
    assert steps["obs", "action_mask"].gather(-1, steps["action"].unsqueeze(-1)).all()
    assert torch.bincount(steps["action"].flatten(), minlength=3).min() > 30
    assert float(steps["reward"].min()) >= -1.0


def test_targets_have_rewards_in_standard_deviations_of_the_returns_of_earlier_iterations(monkeypatch):
    cfg, rollouts = small_pqn(**NORMALIZED, **{"algorithm.cfg.gamma": 0.9}), []

    def watched(run, state, steps):
        rollouts.append(steps[:, :-1])
        return targets(run, state, steps)

    monkeypatch.setattr(import_module("ecrl.algorithms.pqn"), "targets", watched)
    state, returns, running = last_state(cfg), [], [0.0] * N
    for rollout in rollouts:
        variance = np.var(returns) if returns else 1.0
        close(rollout["reward"], torch.full((N, T), 1.0 / np.sqrt(variance + 1e-8)), tol=1e-4)  # CartPole pays 1
        for t in range(T):
            running = [1.0 + 0.9 * before for before in running]
            returns += running
            running = [0.0 if rollout["done"][e, t] else running[e] for e in range(N)]
    close(moments_variance(state["norm", "reward", "moments"]), np.var(returns))
    close(state["norm", "reward", "running"], running)


def test_epsilon_falls_linearly():
    cfg = small_pqn(**{"algorithm.cfg.final_epsilon": 0.2})
    logs = [float(r["logs"]["epsilon"]) for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    close(torch.tensor(logs), torch.tensor([1.0 - 0.8 * min(1.0, iteration / 3) for iteration in range(6)]))


def test_a_compiled_iteration_is_one_graph_and_equals_an_eager_one():
    cfg = small_pqn(**GATED, **NORMALIZED)
    eager = last_state(cfg)
    with traced_only() as graphs:
        compiled = last_state(cfg.replace(**{"trainer.compile": "on"}))
        others = {"learning_rate": 1e-3, "final_epsilon": 0.3, "q_lambda": 0.2, "gamma": 0.5}
        others = {f"algorithm.cfg.{name}": number for name, number in others.items()}
        last_state(cfg.replace(**{"trainer.compile": "on", "trainer.seed": 9, **others}))
        assert graphs == ["_iteration_of_leaves"], "other numbers and another seed compile nothing"
    for path, weight in cast(TensorDict, eager["params"]).items(True, True):
        close(compiled["params"][path], weight, tol=1e-4)
    for name in ("env", "exploration"):
        for one, other in zip(flatten(eager[name])[0], flatten(compiled[name])[0], strict=True):
            close(other, one, tol=1e-4)


@pytest.mark.long
def test_a_compiled_run_equals_an_eager_one():
    assert_compiled_equals_eager(small_pqn())


def test_a_run_resumes_with_the_same_bits(tmp_path):
    cfg = small_pqn(**NORMALIZED, **{"algorithm.cfg.lr_scheduler": {"name": "linear"}})
    assert_resumes(cfg, 3, tmp_path)


def test_the_commands_train_resume_and_evaluate_a_run(tmp_path, monkeypatch, capsys):
    cfg = small_pqn(**{"trainer.save_freq": N * T, "trainer.keep_checkpoints": 9})
    (tmp_path / "pqn.json").write_text(json.dumps(cfg.model_dump(mode="json")))
    folder = tmp_path / "run"
    assert called(monkeypatch, "train", tmp_path / "pqn.json", "--run-dir", folder) == 0
    newest = folder / "checkpoints" / f"step_{6 * N * T}"
    whole = (newest / "state.safetensors").read_bytes()
    for step in (4, 5, 6):
        shutil.rmtree(folder / "checkpoints" / f"step_{step * N * T}")
    assert called(monkeypatch, "train", "--resume", folder) == 0
    assert (newest / "state.safetensors").read_bytes() == whole
    capsys.readouterr()
    state, _ = load(newest)
    assert called(monkeypatch, "eval", folder, "--num-episodes", "4") == 0
    expected = ecrl.evaluate(state, cfg, num_episodes=4)["eval/avg_reward"]
    assert f"avg_reward    {expected:.2f}" in capsys.readouterr().out, "a deterministic evaluation of the same weights"


class SlowResetConfig(ConfigModel):
    """No settings."""


@register_env("pole_with_reset_steps", override=True)
def pole_with_reset_steps(cfg: SlowResetConfig) -> Env:
    """CartPole of Gymnasium, whose resets take a step of their own."""
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    return from_vector(lambda num_envs: CartPoleVectorEnv(num_envs), timeout=60.0)


@pytest.mark.parametrize(("env", "form"), [("gymnasium:CartPole-v1", "on"), ("pole_with_reset_steps", "off")])
def test_it_learns_from_environments_of_gymnasium(env, form):
    pytest.importorskip("gymnasium")
    cfg = small_pqn(**{"env": {"name": env}, "trainer.buffer_size": 40, "trainer.compile": form})
    with traced_only() as graphs:
        run, state = build(cfg), init_state(cfg)
        after, batch = collect(run, state)
        steps = batch["steps"][:, :-1]
        assert steps["done"].any() and torch.equal(after["env", "obs"], batch["steps", "obs"][:, -1])
        if env == "pole_with_reset_steps":
            resets, after_end = ~steps["mask"][:, 1:], steps["done"][:, :-1]
            assert resets.any() and torch.equal(resets, after_end)
        learnt, logs = learn(update, run, after, batch)
    assert graphs == (["draw", "act", "explore", "_learn"] if form == "on" else [])
    assert not same(learnt["params"], state["params"]) and logs["q_loss"].isfinite()
    ecrl.close(after, cfg)


def test_several_seeds_run_as_one_batch():
    assert_seeds_batch(small_pqn(**NORMALIZED))


def test_a_gradient_step_with_nan_is_left_out_and_counted():
    cfg = small_pqn(**{"trainer.finite_guard": "skip", "algorithm.cfg.n_epochs": 1, "algorithm.cfg.batch_size": 1})
    run, state, batch = a_batch(cfg.replace(**{"trainer.seed": 3}))
    steps = batch["steps"]
    steps["reward"][0, T - 1] = torch.nan  # the targets back to the last end of an episode are NaN too
    ends = steps["done"][0, : T - 1].nonzero()
    wrong = T - 1 - int(ends.max()) if len(ends) else T
    after, logs = learn(update, run, state, batch)
    assert int(logs["skipped_steps"]) == wrong and logs["q_loss"].isfinite()
    assert all(x.isfinite().all() for x in after["params"].values(True, True))


def test_nan_ends_the_run_with_its_place():
    state = init_state(small_pqn()).clone()
    state["env", "obs"][1] = torch.nan
    line = r"^iteration 0 \(after 0 env steps\): NaN or infinity in observation, .*in env 1, step 0 of the rollout"
    with pytest.raises(NotFiniteError, match=line):
        next(train_iter(state, small_pqn()))


@pytest.mark.parametrize(("guard", "skipped"), [("skip", 1), ("off", 0)])
def test_an_iteration_with_nan_is_left_out(guard, skipped):
    cfg = small_pqn(**{"trainer.finite_guard": guard})
    state = init_state(cfg).clone()
    state["env", "obs"][0] = torch.nan
    after, logs = ecrl.make_iteration(cfg)(state)
    assert (guard == "skip") == same(after["params"], state["params"])
    assert int(logs["train"].get("skipped_updates", torch.tensor(0))) == skipped


WRONG = {
    "box": ({"env": {"name": "pendulum"}}, "q_network needs Discrete actions, got Box"),
    "no q": (
        {"policy": {"name": "actor_critic", "actor": NET, "critic": NET}},
        "^policy.name: pqn needs a policy with a Q-function for Discrete actions, such as q_network; the environment",
    ),
    "noise": (
        {"policy.noisy": True},
        "^policy.noisy: pqn explores with epsilon only, so the noise is not learnt; leave it out",
    ),
    "distribution": (
        {"policy.distribution": "quantile"},
        "^policy.distribution: quantile, but pqn learns values, not distributions; leave it out",
    ),
    "adaptive": (
        {"algorithm.cfg.lr_scheduler": {"name": "adaptive"}},
        "algorithm.cfg: lr_scheduler adaptive needs the KL to the policy that collected the steps, which pqn does not",
    ),
    "segments": (
        {"algorithm.cfg.segment_length": 4},
        "^algorithm.cfg.segment_length: 4, but policy q_network learns from single steps; leave it out",
    ),
    "epsilon": ({"algorithm.cfg.final_epsilon": 1.5}, "algorithm.cfg.final_epsilon: must be at most 1.0, got 1.5"),
}


def test_a_policy_with_memory_is_refused():
    cfg = small_pqn()
    run = build(cfg)
    policy = replace(run.policy, unit="sequence")
    with pytest.raises(ConfigError, match=r"^policy.name: this policy has memory, but pqn .*; use q_network$"):
        run.algorithm.init(run._replace(policy=policy), rng.key(0))


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_give_one_line(case):
    changes, line = WRONG[case]
    with pytest.raises(ConfigError, match=line) as error:
        init_state(small_pqn(**changes))
    assert "\n" not in str(error.value)
