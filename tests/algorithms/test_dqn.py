"""DQN: its targets and losses equal plain autograd, and its runs have the properties of every run."""

from typing import Any, cast

import pytest
import torch
from support.checks import close
from support.long_cases import long_except
from support.run_checks import assert_resumes, assert_same_for_lengths, assert_seeds_batch, assert_traced_equals_eager
from support.small_runs import NET, last_state, same
from tensordict import TensorDict
from torch import nn

from ecrl.algorithms.core import learn, step_keys
from ecrl.algorithms.dqn import step, update, with_target
from ecrl.algorithms.prioritized import beta_of
from ecrl.algorithms.replay_learning import noise_keys
from ecrl.config import Config, config_from_dict
from ecrl.config.model import ConfigModel
from ecrl.envs import Env
from ecrl.envs.gymnasium import from_vector
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.pytree import replaced
from ecrl.registry import register_env

N = 3
DISTRIBUTIONS = {
    "values": {},
    "categorical": {"distribution": "categorical", "num_atoms": 5, "v_min": -2.0, "v_max": 2.0},
    "quantiles": {"distribution": "quantile", "num_atoms": 4},
}
FORMS = {
    "values": {},
    "categorical": DISTRIBUTIONS["categorical"],
    "noisy": {**DISTRIBUTIONS["quantiles"], "noisy": True, "dueling": True},
}


PRIORITIZED = {"algorithm.cfg.prioritized": {"alpha": 0.7, "beta": 0.5, "eps": 0.01}}
SCALED = PRIORITIZED | {"algorithm.cfg.normalize_reward": True}
KINDS = [(kind, {}) for kind in FORMS] + [("values", SCALED)]


def small_dqn(policy: dict | None = None, **changes) -> Config:
    """A small run of DQN on CartPole, eager, with dotted keys changed."""
    cfg = {"capacity": 20 * N, "batch_size": 8, "learning_starts": 0, "learning_rate": 1e-2, "target_update_freq": 6}
    base = {
        "trainer": {"num_envs": N, "buffer_size": 4, "iterations": 6, "compile": "off", "enable_eval": False},
        "env": {"name": "cartpole"},
        "policy": {"name": "q_network", "critic": NET, **(policy or {})},
        "algorithm": {"name": "dqn", "cfg": cfg},
    }
    return config_from_dict(base).replace(**changes)


def module_of(weights: TensorDict) -> nn.Sequential:
    """A plain module with the weights of a network."""
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, weights["2.bias"].numel())]
    module = nn.Sequential(*layers)
    module.load_state_dict(dict(weights.items()))
    return module.double()


class NoisyLayer(nn.Module):
    """A linear layer whose weights are given as means and scales, with the noise of the paper."""

    def __init__(self, weights: dict[str, torch.Tensor], noise_in: torch.Tensor, noise_out: torch.Tensor):
        super().__init__()
        names = ("weight", "bias", "weight_std", "bias_std")
        self.mean, self.bias, self.std, self.bias_std = (nn.Parameter(weights[name].double()) for name in names)
        self.into, self.out = (x.double().sign() * x.double().abs().sqrt() for x in (noise_in, noise_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.mean + self.std * torch.outer(self.out, self.into), self.bias + self.bias_std * self.out
        return nn.functional.linear(x, weight, bias)


def noisy_module_of(weights: TensorDict, noise: torch.Tensor) -> nn.Sequential:
    """A plain module with the weights and the noise of a noisy network."""
    parts = noise.split([4, 8, 8, weights["2.bias"].numel()])
    layers = []
    for layer, pair in (("0", parts[:2]), ("2", parts[2:])):
        own = {name[2:]: weight for name, weight in weights.items() if name[0] == layer}
        layers.append(NoisyLayer(own, *pair))
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def transitions(count: int) -> TensorDict:
    """A minibatch. The third transition is the end of an episode, and the last is none."""
    generator = torch.Generator().manual_seed(0)
    obs, following = torch.randn(2, count, 4, generator=generator)
    terminated = torch.arange(count) == 2
    fields = {
        "obs": obs,
        "next_obs": following,
        "action": torch.randint(0, 2, (count,), generator=generator),
        "reward": torch.randn(count, generator=generator),
        "terminated": terminated,
        "discount": torch.where(terminated, 0.0, torch.linspace(0.5, 0.9, count)),
        "mask": torch.arange(count) < count - 1,
    }
    return TensorDict(fields, [count])


def project(probs: torch.Tensor, atoms: torch.Tensor, support: torch.Tensor) -> torch.Tensor:
    """The projection of C51, atom by atom."""
    out, gap = torch.zeros_like(support), float(support[1] - support[0])
    for p, x in zip(probs, atoms.clamp(support[0], support[-1]), strict=True):
        place = float((x - support[0]) / gap)
        low = min(int(place), len(support) - 2)
        out[low] += p * (low + 1 - place)
        out[low + 1] += p * (place - low)
    return out


def expected_loss(
    kind: str, online: nn.Module, slow: nn.Module, batch: TensorDict, chooser_of: nn.Module
) -> torch.Tensor:
    """The loss of the paper, one transition after the other, in float64. `chooser_of` chooses the next action."""
    losses = []
    for row in batch[batch["mask"]]:
        obs, following, action = row["obs"].double(), row["next_obs"].double(), int(row["action"])
        reward, discount = float(row["reward"]), float(row["discount"])
        with torch.no_grad():
            chooser = chooser_of(following)
            after = slow(following)
        if kind == "values":
            target = reward + discount * after[chooser.argmax()]
            error = online(obs)[action] - target
            losses.append(torch.where(error.abs() < 1.0, error**2 / 2, error.abs() - 0.5))
            continue
        q, after, chooser = (x.reshape(2, -1) for x in (online(obs), after, chooser))
        if kind == "categorical":
            support = torch.linspace(-2.0, 2.0, 5).double()
            best = int((chooser.softmax(-1) * support).sum(-1).argmax())
            target = project(after[best].softmax(-1), reward + discount * support, support)
            losses.append(-(target * q[action].log_softmax(-1)).sum())
        else:
            target = reward + discount * after[int(chooser.mean(-1).argmax())]
            total = torch.zeros(()).double()
            for i, quantile in enumerate(q[action]):
                for value in target:
                    error = value - quantile
                    huber = torch.where(error.abs() < 1.0, error**2 / 2, error.abs() - 0.5)
                    total = total + abs((2 * i + 1) / 8 - float(error < 0)) * huber / 4
            losses.append(total)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_an_update_is_one_step_of_adam_on_the_loss_of_the_paper(kind, double):
    cfg = small_dqn(DISTRIBUTIONS[kind], **{"algorithm.cfg.double": double, "algorithm.cfg.max_grad_norm": 1e9})
    run, state, batch = build(cfg), init_state(cfg), transitions(9)
    other = init_state(cfg.replace(**{"trainer.seed": 5}))
    state = replaced(state, {"target_params": other["params"]})
    online, slow = (module_of(cast(Any, tree)["critic"]) for tree in (state["params"], state["target_params"]))
    loss = expected_loss(kind, online, slow, batch, online if double else slow)
    loss.backward()
    adam = torch.optim.Adam(online.parameters(), lr=1e-2)
    adam.step()
    after, logs = learn(update, run, state, batch)
    close(logs["q_loss"], float(loss.detach()))
    for name, weight in online.state_dict().items():
        close(after["params", "critic", name], weight.float(), tol=1e-5)


def errors_of(kind: str, online: nn.Module, slow: nn.Module, batch: TensorDict) -> list[float]:
    """The error of each transition by which prioritised replay draws, with the choices of Double DQN."""
    errors = []
    with torch.no_grad():
        for row in batch:
            reward, discount, action = float(row["reward"]), float(row["discount"]), int(row["action"])
            q, after, chooser = online(row["obs"].double()), *(net(row["next_obs"].double()) for net in (slow, online))
            if kind == "values":
                errors.append(float(reward + discount * after[chooser.argmax()] - q[action]))
                continue
            q, after, chooser = (x.reshape(2, -1) for x in (q, after, chooser))
            if kind == "categorical":
                support = torch.linspace(-2.0, 2.0, 5).double()
                best = int((chooser.softmax(-1) * support).sum(-1).argmax())
                target = project(after[best].softmax(-1), reward + discount * support, support)
                errors.append(float(torch.xlogy(target, target).sum() - (target * q[action].log_softmax(-1)).sum()))
            else:
                best = int(chooser.mean(-1).argmax())
                errors.append(float(reward + discount * after[best].mean() - q[action].mean()))
    return errors


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_weights_scale_the_loss_and_errors_are_reported(kind):
    """A weight of 2 counts a transition twice. The transition that is none has no effect."""
    cfg = small_dqn(DISTRIBUTIONS[kind], **PRIORITIZED)
    run, state, batch = build(cfg), init_state(cfg), transitions(9)
    state = replaced(state, {"target_params": init_state(cfg.replace(**{"trainer.seed": 5}))["params"]})
    online, slow = (module_of(cast(Any, tree)["critic"]) for tree in (state["params"], state["target_params"]))
    twice = torch.cat((batch[:8], batch[:2]))  # a mean over 10 transitions, so 8 weights of a mean over 8
    expected = float(expected_loss(kind, online, slow, twice, online).detach()) * 10 / 8
    weight = torch.tensor([2.0, 2.0, *[1.0] * 6, 9.0], dtype=torch.float64)
    _, logs = learn(update, run, state, replaced(batch, {"weight": weight}))
    close(logs["q_loss"], expected)
    close(logs["row_error"].double(), torch.tensor(errors_of(kind, online, slow, batch)).double(), tol=1e-5)


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_nan_in_a_row_without_a_transition_has_no_effect(kind):
    """If no row can be drawn yet, the weights are NaN. An overwritten final observation makes a discount NaN."""
    cfg = small_dqn(DISTRIBUTIONS[kind], **PRIORITIZED)
    run, state, batch = build(cfg), init_state(cfg), transitions(9)
    batch["weight"] = torch.ones(9, dtype=torch.float64)
    expected, _ = learn(update, run, state, batch)
    broken = batch.clone()
    for name in ("weight", "reward", "discount"):
        broken[name][-1] = torch.nan
    after, logs = learn(update, run, state, broken)
    assert logs["q_loss"].isfinite() and logs["grad_norm"].isfinite()
    assert same(after["params"], expected["params"])


def test_a_turn_sets_the_priorities_of_the_transitions_that_it_drew():
    changes = {"trainer.buffer_size": 1, "trainer.iterations": 40, "trainer.num_envs": 1, "algorithm.cfg.capacity": 30}
    cfg = small_dqn(**PRIORITIZED, **changes)
    before, counts = None, set()
    for record in train_iter(init_state(cfg), cfg):
        if record["log_type"] == "collect":
            continue
        state = record["state"].clone()
        if before is not None:
            steps, cursor, rows = state["replay", "steps"], int(state["replay", "cursor"]), []
            leaves, old = (one["replay", "tree"][32:62].tolist() for one in (state, before))
            # The step before the newest can be drawn since this turn, and the newest cannot be drawn yet.
            old[(cursor - 2) % 30], old[(cursor - 1) % 30] = float(before["replay", "largest"]), 0.0
            drawn = [i for i in range(30) if leaves[i] != old[i]]
            for i in drawn:
                row, following = steps[i, 0], steps["obs"][(i + 1) % 30, 0]
                final = state["replay", "final", "obs"][(i // 16) % 3, 0]
                after = final if row["truncated"] else following
                discount = 0.0 if row["terminated"] else 0.99
                new = {"obs": row["obs"], "action": row["action"], "reward": row["reward"], "next_obs": after}
                rows.append(TensorDict({**new, "discount": torch.tensor(discount)}, []))
            nets = (module_of(cast(Any, tree)["critic"]) for tree in (before["params"], before["target_params"]))
            errors = errors_of("values", *nets, torch.stack(rows)) if rows else []
            for i, error in zip(drawn, errors, strict=True):
                assert abs(leaves[i] - (abs(error) + 0.01) ** 0.7) < 1e-5
            counts.add(len(drawn))
            assert float(state["replay", "largest"]) == max(float(before["replay", "largest"]), *leaves)
        before = state
    assert max(counts) > 4, "a minibatch of 8 sets at most 8 priorities"


def test_beta_rises_linearly():
    cfg = small_dqn(**{"algorithm.cfg.prioritized": {"beta": 0.2, "final_beta": 0.8}})
    state = init_state(cfg)
    states = [replaced(state, {"update_step": torch.tensor(step)}) for step in (0, 3, 6, 9)]
    close(torch.stack([beta_of(one) for one in states]), torch.tensor([0.2, 0.5, 0.8, 0.8]))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_an_update_of_a_noisy_network_is_one_step_on_the_loss_of_the_paper(kind, double):
    """The online network, the target network and the choice of the next action have a sample of the noise each."""
    changes = {"algorithm.cfg.double": double, "algorithm.cfg.max_grad_norm": 1e9}
    cfg = small_dqn({**DISTRIBUTIONS[kind], "noisy": True, "noisy_std": 1.0}, **changes)
    run, state, batch = build(cfg), init_state(cfg), transitions(9)
    state = replaced(state, {"target_params": init_state(cfg.replace(**{"trainer.seed": 5}))["params"]})
    weights, slow_weights = (cast(Any, state[name])["critic"] for name in ("params", "target_params"))
    for_online, for_slow, for_choice = cast(Any, run.policy.draw(noise_keys(state, 3, torch.tensor(0))))["network"]
    online, slow = noisy_module_of(weights, for_online), noisy_module_of(slow_weights, for_slow)
    chooser = noisy_module_of(weights, for_choice) if double else slow
    loss = expected_loss(kind, online, slow, batch, chooser)
    loss.backward()
    torch.optim.Adam(online.parameters(), lr=1e-2).step()
    after, logs = learn(update, run, state, batch)
    close(logs["q_loss"], float(loss.detach()))
    for layer in (0, 2):
        expected: Any = online[layer]
        for name, weight in (("weight", expected.mean), ("weight_std", expected.std), ("bias", expected.bias)):
            close(after["params", "critic", f"{layer}.{name}"], weight.detach().float(), tol=1e-5)
        close(after["params", "critic", f"{layer}.bias_std"], expected.bias_std.detach().float(), tol=1e-5)


def test_each_gradient_step_has_its_own_noise():
    """With a discount of 0, the loss of a batch depends on the noise of the online network alone."""
    cfg = small_dqn({"noisy": True})
    run, state, batch = build(cfg), init_state(cfg), transitions(9)
    batch["discount"].zero_()
    counts = torch.tensor([0, 1, 2, 3, 4, 3])
    *losses, again = (float(step(run, state, batch, count)[1]["q_loss"]) for count in counts)
    assert len(set(losses)) == 5 and again == losses[3]


def test_each_environment_acts_with_its_own_noise_in_each_step():
    greedy = {"algorithm.cfg.initial_epsilon": 0.0, "algorithm.cfg.final_epsilon": 0.0}
    cfg = small_dqn({"noisy": True, "noisy_std": 3.0}, **greedy, **{"algorithm.cfg.learning_starts": 4 * N})
    run, state = build(cfg), init_state(cfg)
    noise = run.policy.draw(step_keys(run, state)[1])
    assert len(noise["network"].flatten(0, 1).unique(dim=0)) == 4 * N
    params = state["params"].clone()
    after = next(r["state"] for r in train_iter(state, cfg) if r["log_type"] == "train")
    steps = after["replay", "steps"][:4]
    with_noise, without = (run.policy.act(params, TensorDict({}, []), steps["obs"], x)[1] for x in (noise, None))
    assert torch.equal(steps["action"], with_noise["action"])
    assert not torch.equal(steps["action"], without["action"])


def test_the_target_network_follows_every_few_steps():
    """Each turn takes 3 environment steps, so an update is due in every second turn."""
    cfg = small_dqn(**{"trainer.buffer_size": 1, "algorithm.cfg.tau": 0.25, "trainer.iterations": 5})
    before, moved = init_state(cfg)["target_params", "critic"].clone(), []
    for record in train_iter(init_state(cfg), cfg):
        if record["log_type"] == "train":
            state = record["state"]
            after = state["target_params", "critic"]
            moved.append(not same(after, before))
            if moved[-1]:
                close(after["0.weight"], 0.25 * state["params", "critic", "0.weight"] + 0.75 * before["0.weight"])
            before = after.clone()
    assert moved == [False, True, False, True, False]


@pytest.mark.parametrize(("executed", "moves"), [([1, 1, 1], False), ([2, 1, 2], True)])
def test_the_target_network_counts_the_steps_of_actions_that_take_several(executed, moves):
    """After 4 environment steps, an update is due at step 8."""
    cfg = small_dqn(**{"trainer.buffer_size": 1, "algorithm.cfg.target_update_freq": 8})
    run, state = build(cfg), init_state(cfg).clone()
    state.set("decision_step", torch.tensor(3)).set("sample_step", torch.tensor(4))
    state["params"] = state["params"].apply(lambda weight: weight + 1.0)
    steps = TensorDict({"executed": torch.tensor([executed])}, [1, N])
    after = with_target(run, state, steps)["target_params"]
    assert same(after, state["params" if moves else "target_params"])


def test_epsilon_falls_linearly():
    cfg = small_dqn(**{"algorithm.cfg.exploration_fraction": 0.5, "algorithm.cfg.final_epsilon": 0.2})
    logs = [float(r["logs"]["epsilon"]) for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    turns = [1.0 - 0.8 * min(1.0, turn / 12) for turn in range(24)]
    close(torch.tensor(logs), torch.tensor(turns).reshape(6, 4).mean(1))


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_the_length_of_an_iteration_changes_no_bit(kind, changes):
    changes = changes | {
        "algorithm.cfg.n_step": 2,
        "algorithm.cfg.gradient_steps": 2,
        "algorithm.cfg.learning_starts": 8 * N,
    }
    assert_same_for_lengths(small_dqn(FORMS[kind], **changes), (1, 4, 8), steps=32)


@pytest.mark.parametrize(("kind", "changes"), long_except(KINDS[-1:], KINDS))
def test_a_compiled_run_equals_an_eager_one(kind, changes):
    changes = changes | {"algorithm.cfg.gradient_steps": 2, "algorithm.cfg.learning_starts": 8 * N}
    traced, eager = assert_traced_equals_eager(small_dqn(FORMS[kind], **changes), tol=1e-5)
    for path, weight in eager["target_params"].items(True, True):
        close(traced["target_params"][path], weight, tol=1e-5)
    if "tree" in eager["replay"].keys():  # noqa: SIM118
        close(traced["replay", "tree"], eager["replay", "tree"], tol=1e-4)


@pytest.mark.parametrize(("kind", "changes"), [("values", {}), ("noisy", {}), ("values", SCALED)])
def test_a_run_resumes_with_the_same_bits(kind, changes, tmp_path):
    assert_resumes(small_dqn(FORMS[kind], **changes), 3, tmp_path)


class VectorPoleConfig(ConfigModel):
    """No settings."""


@register_env("vector_pole", override=True)
def vector_pole(cfg: VectorPoleConfig) -> Env:
    """CartPole of Gymnasium, whose resets take a step of their own."""
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    return from_vector(lambda num_envs: CartPoleVectorEnv(num_envs), timeout=60.0)


def test_steps_that_only_reset_an_environment_are_no_transitions():
    pytest.importorskip("gymnasium")
    cfg = small_dqn(**{"env": {"name": "vector_pole"}, "trainer.iterations": 20})
    state = last_state(cfg)
    steps = state["replay", "steps"]
    resets, ended = ~steps["mask"], steps["terminated"] | steps["truncated"]
    newest = (int(state["replay", "cursor"]) - 1) % len(ended)
    after = ended.roll(1, 0)
    after[(newest + 1) % len(ended)] = resets[(newest + 1) % len(ended)]  # the step before the oldest is gone
    assert resets.any() and torch.equal(resets, after)
    assert all(x.isfinite().all() for x in state["params"].values(True, True))


@pytest.mark.parametrize(("kind", "changes"), [("values", {}), ("noisy", {}), ("values", SCALED)])
def test_several_seeds_run_as_one_batch(kind, changes):
    assert_seeds_batch(small_dqn(FORMS[kind], **changes))


def test_an_update_with_nan_is_left_out_and_counted():
    cfg = small_dqn(**{"trainer.finite_guard": "skip", "trainer.iterations": 2, "algorithm.cfg.gradient_steps": 2})
    run, state = build(cfg), init_state(cfg)
    batch = transitions(16)
    batch["reward"][8:] = torch.nan
    after, logs = learn(update, run, state, batch)
    assert int(logs["skipped_steps"]) == 1 and logs["q_loss"].isfinite()
    assert all(x.isfinite().all() for x in after["params"].values(True, True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm.cfg.batch_size": 100}, "batch_size 100 is above capacity 60; change one of them"),
        ({"algorithm.cfg.capacity": 9}, "trainer.buffer_size: 4 is more than 3, the steps of each environment"),
        ({"algorithm.cfg.n_step": 20}, "algorithm.cfg.capacity: 60 has room for 20 steps of each environment, but"),
        (
            {"algorithm.cfg.learning_starts": 61},
            "algorithm.cfg.learning_starts: 61 is above 60, the env steps before the last iteration of this run of 72",
        ),
        (
            PRIORITIZED | {"algorithm.cfg.n_step": 10, "algorithm.cfg.train_freq": 10, "trainer.buffer_size": 10},
            "60 has room for 20 steps of each environment, but prioritized replay with train_freq 10 and n_step 10 "
            "needs 21; make it larger",
        ),
        ({"env": {"name": "pendulum"}}, "q_network needs Discrete actions, got Box"),
        (
            {
                "policy.distribution": "categorical",
                "policy.v_min": -1.0,
                "policy.v_max": 9.0,
                "algorithm.cfg.huber_delta": 2.0,
            },
            "algorithm.cfg.huber_delta: the loss of categorical distributions has no Huber loss; leave it out",
        ),
        ({"algorithm.cfg.lr_scheduler": {"name": "adaptive"}}, "lr_scheduler adaptive needs the KL to the policy"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        init_state(small_dqn(**changes))
    assert "\n" not in str(error.value)


def test_a_policy_without_a_q_function_is_refused():
    policy = {"name": "actor_critic", "actor": NET, "critic": NET}
    with pytest.raises(ConfigError, match=r"^policy.name: dqn needs a policy with a Q-function for Discrete actions"):
        init_state(small_dqn(**{"policy": policy}))
