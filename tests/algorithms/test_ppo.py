"""PPO's own logic: preparing rows, minibatches, one update by hand, and the probes it must solve."""

from dataclasses import replace

import pytest
import torch
from conftest import close
from tensordict import TensorDict

from ecrl import rng
from ecrl.algorithms.minibatch import mean_logs, shuffled
from ecrl.algorithms.ppo import init
from ecrl.config import Config, config_from_dict
from ecrl.errors import ConfigError
from ecrl.kernels import compute_gae, transitions
from ecrl.loop import init_state, make_iteration, make_parts, train_iter
from ecrl.policies.core import Policy

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [16], "activation": "tanh"}}
ALGORITHM = {"learning_rate": 0.01, "n_epochs": 4, "batch_size": 64, "ent_coef": 0.0, "gamma": 0.9}


def run(env: str, **changes) -> Config:
    base = {
        "trainer": {"num_envs": 16, "buffer_size": 16, "iterations": 30, "compile": "off", "seed": 3},
        "env": {"name": env},
        "policy": {"name": "actor_critic", "actor": NET, "critic": NET},
        "algorithm": {"name": "ppo", "cfg": ALGORITHM},
    }
    return config_from_dict(base).replace(**changes)


def learnt(cfg: Config) -> tuple[Policy, TensorDict]:
    for record in train_iter(init_state(cfg), cfg):
        state = record["state"]
    return make_parts(cfg).policy, state["params"]


def value_at(policy: Policy, params: TensorDict, obs: list[float]) -> torch.Tensor:
    with torch.no_grad():
        return policy.value(params, TensorDict({}, []), torch.tensor(obs).unsqueeze(-1))


def action_at(policy: Policy, params: TensorDict, obs: list[float]) -> list[int]:
    out = policy.act(params, TensorDict({}, []), torch.tensor(obs).unsqueeze(-1), None)[1]
    return out["action"].tolist()


@pytest.mark.parametrize(
    ("env", "obs", "value", "action"),
    [
        ("probe_constant", [0.0], [1.0], None),
        ("probe_observation", [-1.0, 1.0], [-1.0, 1.0], None),
        ("probe_delay", [0.0, 1.0], [0.9, 1.0], None),
        ("probe_action", [0.0], [1.0], [1]),
        ("probe_match", [0.0, 1.0], [1.0, 1.0], [0, 1]),
    ],
)
def test_probes_reach_their_known_value(env, obs, value, action):
    policy, params = learnt(run(env))
    close(value_at(policy, params, obs), value, tol=0.1)
    assert action is None or action_at(policy, params, obs) == action


def test_shuffled_visits_every_row_once_per_epoch_and_pads_the_last_batch():
    index, real = shuffled(rng.key(0), rows=10, batch_size=4, n_epochs=3)
    assert index.shape == real.shape == (9, 4)
    for epoch in range(3):
        rows, counted = index[3 * epoch : 3 * epoch + 3], real[3 * epoch : 3 * epoch + 3]
        assert sorted(rows[counted].tolist()) == list(range(10))
        assert counted.sum() == 10
        assert not counted[-1, 2:].any()
        assert set(rows[-1, 2:].tolist()) == {int(rows[-1, 0])}  # a row of its own batch: nothing else can be let in
    assert index[:3].tolist() != index[3:6].tolist()


def test_mean_logs_weights_by_count():
    # 3 rows with loss 1 and 1 row with loss 5: (3 * 1 + 1 * 5) / 4
    steps = [
        {"loss": torch.tensor(1.0), "count": torch.tensor(3.0)},
        {"loss": torch.tensor(5.0), "count": torch.tensor(1.0)},
    ]
    assert mean_logs(steps) == {"loss": torch.tensor(2.0)}


def test_one_full_batch_epoch_is_one_step_of_torch_adam_on_the_papers_loss():
    """An independent PPO step: autograd through modules, torch.optim.Adam, clip_grad_norm_, the loss written out."""
    cfg = run(
        "cartpole", **{"algorithm.cfg.n_epochs": 1, "algorithm.cfg.batch_size": 256, "algorithm.cfg.ent_coef": 0.02}
    )
    parts, state = make_parts(cfg), init_state(cfg)
    from ecrl.algorithms import make_algorithm
    from ecrl.policies import build_mlp

    algorithm = make_algorithm(cfg.algorithm)
    state, rollout = algorithm.collect(parts, state)
    after, logs = algorithm.update(parts, state, rollout)

    actor, critic = (build_mlp(getattr(cfg.policy, n).network_cfg, 4, k) for n, k in (("actor", 2), ("critic", 1)))
    actor.load_state_dict(dict(state["params"]["actor"].items()))
    critic.load_state_dict(dict(state["params"]["critic"].items()))
    steps = transitions(rollout).reshape(-1)
    advantage, target = (x.reshape(-1) for x in compute_gae(rollout, 0.9, 0.95))
    advantage = (advantage - advantage.mean()) / advantage.std()
    dist = torch.distributions.Categorical(logits=actor(steps["obs"]))
    ratio = torch.exp(dist.log_prob(steps["action"]) - steps["sample_log_prob"])
    surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    error = (critic(steps["obs"]).squeeze(-1) - target).square().mean()
    loss = -surrogate + 0.5 * error - 0.02 * dist.entropy().mean()
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=0.01)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
    optimizer.step()

    close(logs["value_loss"], error.detach(), tol=1e-4)
    close(logs["grad_norm"], norm, tol=1e-4)
    for name, module in (("actor", actor), ("critic", critic)):
        for key, weight in module.state_dict().items():
            close(after["params"][name][key], weight, tol=1e-5)  # float32 sums in another order, then Adam


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 0.02),
        ("lr_scheduler", {"name": "exponential", "kwargs": {"gamma": 0.5}}),
        ("n_epochs", 5),
        ("batch_size", 32),
        ("gamma", 0.5),
        ("gae_lambda", 0.5),
        ("clip_coef", 0.01),
        ("ent_coef", 0.1),
        ("vf_coef", 0.1),
        ("max_grad_norm", 0.01),
    ],
)
def test_every_key_changes_the_parameters(key, value):
    base = run("cartpole", **{"trainer.iterations": 2})
    assert not same_params(base, base.replace(**{f"algorithm.cfg.{key}": value}))


OPTIMIZERS = [
    ("adam", {"betas": [0.5, 0.999]}),
    ("adam", {"betas": [0.9, 0.5]}),
    ("adam", {"eps": 0.1}),
    ("adamw", {"weight_decay": 0.5}),
    ("sgd", {"momentum": 0.5}),
    ("rmsprop", {"alpha": 0.5}),
    ("rmsprop", {"eps": 0.1}),
]


@pytest.mark.parametrize(("name", "kwargs"), OPTIMIZERS)
def test_every_optimizer_number_changes_the_parameters(name, kwargs):
    plain = run("cartpole", **{"trainer.iterations": 2, "algorithm.cfg.learning_rate": None}).replace(
        **{"algorithm.cfg.optimizer": {"name": name, "learning_rate": 0.01}}
    )
    changed = plain.replace(**{"algorithm.cfg.optimizer": {"name": name, "learning_rate": 0.01, "kwargs": kwargs}})
    assert not same_params(plain, changed)


SCHEDULES = [
    ("linear", {"start_factor": 0.5}, [0.5, 0.375, 0.25]),
    ("linear", {"end_factor": 0.5}, [1.0, 0.875, 0.75]),
    ("linear", {"total_iters": 2}, [1.0, 0.5, 0.0]),
    ("cosine", {"eta_min": 0.005}, [1.0, 0.5 + 0.5 * 0.853553, 0.75]),
    ("cosine", {"T_max": 2}, [1.0, 0.5, 0.0]),
    ("step", {"step_size": 2, "gamma": 0.5}, [1.0, 1.0, 0.5]),
    ("exponential", {"gamma": 0.5}, [1.0, 0.5, 0.25]),
]


@pytest.mark.parametrize(("name", "kwargs", "factors"), SCHEDULES)
def test_schedules_move_once_per_iteration(name, kwargs, factors):
    cfg = run(
        "probe_constant", **{"trainer.iterations": 4, "algorithm.cfg.lr_scheduler": {"name": name, "kwargs": kwargs}}
    )
    state, iteration = init_state(cfg), make_iteration(cfg)
    for factor in factors:
        state, logs = iteration(state)
        close(logs["train"]["learning_rate"], 0.01 * factor)


def same_params(first: Config, second: Config) -> bool:
    ends = []
    for cfg in (first, second):
        *_, last = train_iter(init_state(cfg), cfg)
        ends.append(last["state"]["params"])
    return bool((ends[0] == ends[1]).all())


def test_a_policy_without_a_critic_is_refused():
    cfg = run("cartpole")
    parts = make_parts(cfg)
    with pytest.raises(ConfigError, match=r"policy.name: actor_critic has no critic, which ppo needs"):
        init(parts._replace(policy=replace(parts.policy, value=None)), rng.key(0))


def test_a_batch_above_the_rollout_is_clamped_and_said():
    big, whole = (run("cartpole", **{"algorithm.cfg.batch_size": n, "trainer.iterations": 2}) for n in (1000, 256))
    with pytest.warns(UserWarning, match=r"algorithm.cfg.batch_size 1000 is above the rollout's 256; using 256"):
        assert same_params(big, whole)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"optimizer": {"name": "sgd", "kwargs": {"alpha": 0.5}}},
            "optimizer: sgd does not use 'alpha'; known: momentum",
        ),
        ({"lr_scheduler": {"name": "cosine", "kwargs": {"gamma": 0.5}}}, "cosine does not use 'gamma'"),
        ({"optimizer": {"name": "sgd", "kwargs": {"eps": 1e-8}}}, "sgd does not use 'eps'"),
        ({"optimizer": {"name": "adam", "kwargs": {"betas": [0.9, 1.0]}}}, r"kwargs.betas\[1\]: must be below 1.0"),
        ({"learning_rate": 1e300}, r"algorithm.cfg.learning_rate: must be between 1.4e-45 and 3.4e38, got 1e\+300"),
        ({"optimizer": {"name": "adam"}, "learning_rate": 0.1}, "learning_rate stands beside optimizer.learning_rate"),
        ({"optimizer": {"name": "lion"}}, "algorithm.cfg.optimizer.name"),
    ],
)
def test_faults_in_optimizer_blocks_are_refused(block, message):
    data = run("cartpole").model_dump(mode="json")
    data["algorithm"]["cfg"] = block
    with pytest.raises(ConfigError, match=message):
        config_from_dict(data)
