"""PPO's own logic: preparing rows, minibatches, one update by hand, and the probes it must solve."""

import json
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers.vector import NormalizeReward
from support import fake_envs, numpy_ppo  # noqa: F401  (the first registers environments)
from support.checks import close
from tensordict import TensorDict

from ecrl import rng
from ecrl.algorithms.minibatch_sgd import _at_most, pass_keys
from ecrl.config import Config, config_from_dict
from ecrl.errors import ConfigError
from ecrl.kernels import moments_variance, transitions
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.policies import acting_params
from ecrl.policies.core import Policy
from ecrl.run.checkpoint import load, save

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
    return build(cfg).policy, state["params"]


def value_at(policy: Policy, params: TensorDict, obs: list[float]) -> torch.Tensor:
    with torch.no_grad():
        return policy.value(params, TensorDict({}, []), torch.tensor(obs).unsqueeze(-1))


def action_at(policy: Policy, params: TensorDict, obs: list[float]) -> list[int]:
    out = policy.act(params, TensorDict({}, []), torch.tensor(obs).unsqueeze(-1), None)[1]
    return out["action"].tolist()


@pytest.mark.parametrize(
    ("env", "obs", "value", "action"),
    [
        pytest.param("probe_constant", [0.0], [1.0], None, marks=pytest.mark.long),
        pytest.param("probe_observation", [-1.0, 1.0], [-1.0, 1.0], None, marks=pytest.mark.long),
        ("probe_delay", [0.0, 1.0], [0.9, 1.0], None),
        ("probe_action", [0.0], [1.0], [1]),
        ("probe_match", [0.0, 1.0], [1.0, 1.0], [0, 1]),
    ],
)
def test_probes_reach_their_known_value(env, obs, value, action):
    policy, params = learnt(run(env))
    close(value_at(policy, params, obs), value, tol=0.1)
    assert action is None or action_at(policy, params, obs) == action


STEP_FIELDS = ("obs", "action", "sample_log_prob", "value", "final_value", "reward")
STEP_FIELDS += ("terminated", "truncated", "done")


def collected(cfg: Config) -> tuple[Any, TensorDict, TensorDict]:
    """Run, state and batch before the first update."""
    built = build(cfg)
    return built, *built.algorithm.iterate.collect(built, init_state(cfg))


def independent(cfg: Config, state: TensorDict, rollout: TensorDict) -> tuple[dict, list[float]]:
    """Weights and errors by `support.numpy_ppo`; of ecrl it takes the data and the order of the rows in each pass."""
    c: Any = cfg.algorithm.cfg
    block = c.optimizer.model_dump() if c.optimizer else {"name": "adam", "learning_rate": c.learning_rate}
    choices = {"optimizer": block["name"], "learning_rate": block["learning_rate"]}
    numbers = {name: getattr(c, name) for name in numpy_ppo.Numbers._fields if name not in choices}
    weights = {n: {k: w.double().numpy() for k, w in state["params"][n].items()} for n in ("actor", "critic")}
    names = set(rollout.keys()) & {*STEP_FIELDS, "mask"}
    fields = {n: (x.double() if x.is_floating_point() else x).numpy() for n, x in rollout.select(*names).items()}
    orders = rng.permutation(pass_keys(state, c.n_epochs), transitions(rollout).numel()).numpy()
    return numpy_ppo.update(weights, fields, orders, numpy_ppo.Numbers(**numbers, **choices))


def like_the_independent_one(cfg: Config, state: TensorDict, batch: TensorDict, parts: Any) -> TensorDict:
    """Return the parameters after `update`, and check that they equal the parameters of `independent`."""
    after, logs = parts.algorithm.iterate.update(parts, state, batch)
    expected, errors = independent(cfg, state, batch["steps"])
    assert torch.isfinite(torch.stack(list(logs.values()))).all()
    if cfg.algorithm.cfg.n_epochs == 1 and cfg.algorithm.cfg.batch_size == 256:
        close(logs["value_loss"], errors[0], tol=1e-4)
    for name, weights in expected.items():
        for key, weight in weights.items():
            close(after["params"][name][key], weight, tol=2e-5)  # float32 against float64, then Adam
    return after["params"]


PLAIN = {"n_epochs": 2, "batch_size": 100, "ent_coef": 0.02}
CHANGES = {
    "one full batch": {"n_epochs": 1, "batch_size": 256},
    "ragged": {},
    "by number": {"batch_size": None, "num_minibatches": 3},
    "advantages per minibatch": {"normalize_advantage": "minibatch"},
    "advantages as they are": {"normalize_advantage": "none"},
    "clipped value loss": {"clip_vloss": True, "clip_coef": 0.01, "learning_rate": 0.05},
    "clipped apart": {"critic_max_grad_norm": 0.05, "max_grad_norm": 0.02, **{"optimizer": {"name": "sgd"}}},
    "adamw": {"optimizer": {"name": "adamw", "learning_rate": 0.01}},
    "sgd": {"optimizer": {"name": "sgd", "learning_rate": 0.1}},
    "rmsprop": {"optimizer": {"name": "rmsprop", "learning_rate": 0.001}},
}


def changed(change: dict) -> Config:
    cfg = PLAIN | ({"learning_rate": None} if "optimizer" in change else {}) | change
    return run("cartpole", **{f"algorithm.cfg.{key}": value for key, value in cfg.items()})


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_update_is_that_of_an_independent_ppo(change):
    """The weights equal the weights of NumPy in float64, with gradients by hand."""
    cfg = changed(change)
    parts, state, batch = collected(cfg)
    # targets on both sides of the values
    batch["steps", "reward"].normal_(generator=torch.Generator().manual_seed(0))
    learnt = like_the_independent_one(cfg, state, batch, parts)
    if change and "optimizer" not in change:
        other, _ = independent(changed({}), state, batch["steps"])
        assert not all(np.allclose(learnt[n]["0.weight"], other[n]["0.weight"], atol=1e-4) for n in other)


def test_rows_that_do_not_count_are_as_if_absent():
    """A third of the rows is masked and holds NaN; advantages are standardised over the other rows."""
    for change in ({}, {"normalize_advantage": "minibatch"}, {"clip_vloss": True}):
        cfg = changed(change)
        parts, state, batch = collected(cfg)
        rollout = batch["steps"]
        hidden = torch.rand(rollout.shape, generator=torch.Generator().manual_seed(0)) < 0.3
        cut = hidden.roll(1, 1) | hidden | hidden.roll(-1, 1)  # traces end before and after, so that no NaN leaks
        flags = {"mask": ~hidden, "done": cut, "terminated": cut, "truncated": cut & ~cut}
        rollout.update({k: v.clone() for k, v in flags.items()})
        clean = batch.clone()
        for name in ("reward", "value", "sample_log_prob"):
            rollout[name][hidden] = torch.nan
        results = [like_the_independent_one(cfg, state, b, parts) for b in (clean, batch)]
        assert (results[0] == results[1]).all()


def iterations(cfg: Config, state: TensorDict | None = None) -> list[tuple[TensorDict, dict]]:
    """States after and logs of every iteration."""
    records = list(train_iter(init_state(cfg) if state is None else state, cfg))
    pairs = zip(records[::2], records[1::2], strict=True)
    return [(last["state"], first["logs"] | last["logs"]) for first, last in pairs]


def test_steps_that_do_not_count_are_in_no_statistic():
    """Every fourth step pays 1000 at an observation of 1000: neither moments nor episodes nor the critic see it."""
    quiet = {"trainer.iterations": 12, "trainer.buffer_size": 8, "algorithm.cfg.normalize_reward": True}
    cfg = run("pausing", **quiet, **{"policy.normalize_obs": True, "algorithm.cfg.learning_rate": 0.05})
    *_, (state, logs) = iterations(cfg)
    assert (logs["episode_reward_avg_100"], logs["episode_length_avg_100"]) == (3.0, 3.0)
    moments = state["norm", "obs"]  # 1, 2, 3 over and over
    close(moments_variance(moments), [2 / 3])
    close(moments["mean"], [2.0])
    assert moments["count"] == 12 * 16 * 6
    paid = state["norm", "reward", "moments"]  # 1, 1 + 0.9 and 1 + 0.9 + 0.81
    close(paid["mean"], (1.0 + 1.9 + 2.71) / 3)
    assert paid["count"] == 12 * 16 * 6
    value = value_at(build(cfg).policy, acting_params(state["params"], state["norm"]), [2.0])
    close(value, [1.9 / float(moments_variance(paid).sqrt())], tol=0.2)  # of the second of three steps


class Replay(gymnasium.vector.VectorEnv):
    """A vector environment that pays what a rollout `[N, T + 1]` paid and ends where it ended."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, rollouts: list[TensorDict]):
        self.num_envs = rollouts[0].shape[0]
        self.rows = [row for r in rollouts for row in r[:, :-1].unbind(1)]

    def step(self, actions):
        row = self.rows.pop(0)
        return None, *(row[k].numpy() for k in ("reward", "terminated", "truncated")), {}


def gae_loop(reward, value, next_value, done, gamma, gae_lambda):
    """Value targets where nothing terminates, by a plain loop."""
    out = np.zeros_like(reward)
    for n in range(reward.shape[0]):
        running = 0.0
        for t in reversed(range(reward.shape[1])):
            delta = reward[n, t] + gamma * next_value[n, t] - value[n, t]
            running = delta + gamma * gae_lambda * running * (not done[n, t])
            out[n, t] = running + value[n, t]
    return out


def test_rewards_are_normalised_as_by_gymnasium_but_for_the_freezing():
    """Three iterations with time limits inside and at an end: moments, and value targets in scaled units."""
    base = {"trainer.num_envs": 3, "trainer.buffer_size": 9, "env.cfg.max_episode_steps": 6, "trainer.iterations": 3}
    one_step = {"algorithm.cfg.n_epochs": 1, "algorithm.cfg.batch_size": 27, "algorithm.cfg.gae_lambda": 0.8}
    cfg = run("pendulum", **base, **one_step, **{"algorithm.cfg.normalize_reward": True})
    built, state, rollouts = build(cfg), init_state(cfg), []
    algorithm = built.algorithm.iterate
    variance = 1.0
    for iteration, ends in enumerate((3, 6, 3)):  # 3 envs: episodes end after step 6, then 12 and 18, then 24 of 27
        state, batch = algorithm.collect(built, state)
        rollout, before = batch["steps"], batch["steps"].clone()
        state, logs = algorithm.update(built, state, batch)
        assert (rollout == before).all(), "the batch keeps raw rewards"
        rollouts.append(rollout)

        wrapper = NormalizeReward(Replay(rollouts), gamma=0.9, epsilon=1e-8)
        wrapper.return_rms.count = 0.0  # it starts with a ten-thousandth of a sample
        for _ in range(9 * (iteration + 1)):
            wrapper.step(None)
        moments = state["norm", "reward", "moments"]
        close(moments["mean"], wrapper.return_rms.mean, tol=1e-5)  # its sums are float32
        close(moments_variance(moments), wrapper.return_rms.var, tol=1e-5)
        close(state["norm", "reward", "running"], torch.tensor(wrapper.accumulated_reward), tol=1e-5)
        assert rollout["truncated"].sum() == ends

        # Targets are of these rewards over the spread known before them; V of a time limit is in their units already.
        s = {k: v.double().numpy() for k, v in transitions(rollout).items() if k in ("reward", "value", "next_value")}
        scaled = np.clip(s["reward"] / np.sqrt(variance + 1e-8), -10.0, 10.0)
        target = gae_loop(scaled, s["value"], s["next_value"], rollout["done"].numpy(), 0.9, 0.8)
        close(logs["value_loss"], np.mean((s["value"] - target) ** 2), tol=1e-5)
        variance = float(wrapper.return_rms.var)
        state = state.copy().update({"update_step": state["update_step"] + 1, "sample_step": state["sample_step"] + 27})


def test_normalised_rewards_are_not_what_is_logged():
    plain, normalised = (
        run("cartpole", **{"algorithm.cfg.normalize_reward": on, "trainer.iterations": 1}) for on in (False, True)
    )
    (a, logs), (b, scaled) = iterations(plain)[0], iterations(normalised)[0]
    assert (a["episode"] == b["episode"]).all()
    assert torch.equal(logs["episode_reward_avg_100"], scaled["episode_reward_avg_100"])


def test_the_adaptive_rate_lives_in_the_state():
    """The rate stays within its bounds and continues from its last value; a resumed state does not warn."""
    block = {"name": "adaptive", "kwargs": {"desired_kl": 0.002, "factor": 1.25, "min_rate": 1e-4}}
    cfg = run("cartpole", **{"algorithm.cfg.lr_scheduler": block, "trainer.iterations": 4})
    through = iterations(cfg)
    rates = [float(state["learning_rate"]) for state, _ in through]
    assert len({0.01, *rates}) > 3
    assert all(1e-4 <= rate <= 0.01 for rate in rates)
    assert rates == [float(logs["learning_rate"]) for _, logs in through]
    again = iterations(cfg, through[1][0])  # warnings are errors here
    assert [float(state["learning_rate"]) for state, _ in again] == rates[2:]
    assert (again[-1][0] == through[-1][0]).all()


def test_a_target_kl_ends_the_passes_early():
    cfg = run(
        "cartpole", **{"trainer.iterations": 2, "algorithm.cfg.n_epochs": 20, "algorithm.cfg.learning_rate": 0.01}
    )
    long, short = (iterations(c) for c in (cfg, cfg.replace(**{"algorithm.cfg.target_kl": 0.005})))
    for _, logs in short:
        assert 0.1 < logs["skipped_frac"] < 1.0
        assert logs["approx_kl"] < 0.005
    assert "skipped_frac" not in long[0][1]
    assert short[0][0]["opt", "step"] < 80 == long[0][0]["opt", "step"]
    taken = round(80 * (1 - float(short[0][1]["skipped_frac"])))
    assert short[0][0]["opt", "step"] == taken


BLOCKS = [
    {"lr_scheduler": {"name": "adaptive", "kwargs": {"desired_kl": 0.02, "factor": 2.0}}},
    {"lr_scheduler": {"name": "cosine", "kwargs": {"eta_min": 1e-5, "T_max": 3}}},
    {"lr_scheduler": {"name": "linear"}, "learning_rate": None, "optimizer": {"name": "adamw"}},
    {"batch_size": None, "num_minibatches": 3, "target_kl": 0.02},
    {"clip_vloss": True, "critic_max_grad_norm": 0.3, "normalize_advantage": "none", "normalize_reward": True},
    {"learning_rate": None, "optimizer": {"name": "sgd", "learning_rate": 0.1, "kwargs": {"momentum": 0.5}}},
    {"critic_learning_rate": 0.002, "lr_scheduler": {"name": "adaptive", "kwargs": {"factor": 2.0}}},
    {"critic_learning_rate": 0.002, "lr_scheduler": {"name": "linear"}},
    {"learning_rate": None, "optimizer": {"name": "adamw", "kwargs": {"amsgrad": True}}},
    {"learning_rate": None, "optimizer": {"name": "rmsprop", "kwargs": {"centered": True, "weight_decay": 0.1}}},
    {"lr_scheduler": {"name": "warmup_cosine", "kwargs": {"warmup_iters": 1}}},
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: ",".join(block))
def test_configs_survive_their_file_and_their_states_the_disk(block, tmp_path):
    cfg = run(
        "cartpole", **{f"algorithm.cfg.{key}": value for key, value in block.items()}, **{"trainer.iterations": 2}
    )
    assert config_from_dict(json.loads(json.dumps(cfg.model_dump(mode="json")))) == cfg
    through = [state for state, _ in iterations(cfg)]
    save(tmp_path / "half", through[0], cfg)
    state, loaded = load(tmp_path / "half")
    assert loaded == cfg
    assert (iterations(loaded, state)[-1][0] == through[-1]).all()


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_compiled_learning_with_everything_on_equals_eager():
    """Adaptive rate, early stop, clipped values, apart norms and reward statistics inside the compiled minibatch."""
    block = {"name": "adaptive", "kwargs": {"desired_kl": 0.004, "min_rate": 1e-4}}
    on = {"clip_vloss": True, "critic_max_grad_norm": 0.3, "normalize_reward": True, "target_kl": 0.02}
    changes = {f"algorithm.cfg.{k}": v for k, v in (on | {"lr_scheduler": block, "batch_size": 100}).items()}
    eager = run("cartpole", **changes, **{"trainer.iterations": 2, "policy.normalize_obs": True})
    first, second = (iterations(c)[-1][0] for c in (eager, eager.replace(**{"trainer.compile": "on"})))
    for name, leaf in first.flatten_keys("/").items():
        close(second.flatten_keys("/")[name], leaf, tol=1e-3)


def test_the_critic_moves_at_a_rate_of_its_own():
    """One step of SGD without clipping: the critic's move grows with its own rate, the actor's stays."""
    sgd = {"learning_rate": None, "optimizer": {"name": "sgd", "learning_rate": 0.1}, "max_grad_norm": 1e6}
    one = sgd | {"n_epochs": 1, "batch_size": 256}
    cfg = run("cartpole", **{f"algorithm.cfg.{key}": value for key, value in one.items()}, **{"trainer.iterations": 1})
    start = init_state(cfg)["params"]
    (plain, _), (own, logs) = (
        iterations(c)[0] for c in (cfg, cfg.replace(**{"algorithm.cfg.critic_learning_rate": 0.3}))
    )
    assert (own["params", "actor"] == plain["params", "actor"]).all()
    for name, weight in start["critic"].items():
        close(own["params", "critic", name] - weight, 3.0 * (plain["params", "critic", name] - weight), tol=1e-4)
    close(logs["learning_rate"], 0.1)
    close(logs["critic_learning_rate"], 0.3)


def test_an_adaptive_rate_of_the_critic_is_held_in_the_bounds_from_the_start():
    block = {"name": "adaptive", "kwargs": {"max_rate": 0.02}}
    with pytest.raises(ConfigError, match=r"critic_learning_rate 0.5 is outside the min_rate 1e-05 to max_rate 0.02"):
        run("cartpole", **{"algorithm.cfg.lr_scheduler": block, "algorithm.cfg.critic_learning_rate": 0.5})


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
    built = build(cfg)
    with pytest.raises(ConfigError, match=r"policy.name: this policy has no critic, which ppo needs; use actor_critic"):
        built.algorithm.init(built._replace(policy=replace(built.policy, value=None)), rng.key(0))


def test_a_batch_above_the_rollout_is_clamped_with_one_warning():
    _at_most.cache_clear()  # the warning appears once in a process
    big, whole = (run("cartpole", **{"algorithm.cfg.batch_size": n, "trainer.iterations": 2}) for n in (1000, 256))
    with pytest.warns(UserWarning, match=r"algorithm.cfg.batch_size 1000 is above the rollout's 256") as caught:
        assert same_params(big, whole)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"optimizer": {"name": "sgd", "kwargs": {"alpha": 0.5}}},
            "optimizer: sgd does not use 'alpha'; known: momentum, nesterov, weight_decay",
        ),
        ({"lr_scheduler": {"name": "cosine", "kwargs": {"gamma": 0.5}}}, "cosine does not use 'gamma'"),
        ({"optimizer": {"name": "sgd", "kwargs": {"eps": 1e-8}}}, "sgd does not use 'eps'"),
        ({"optimizer": {"name": "adam", "kwargs": {"betas": [0.9, 1.0]}}}, r"kwargs.betas\[1\]: must be below 1.0"),
        (
            {"learning_rate": 1e300},
            r"algorithm.cfg.learning_rate: is 1e\+300, but positive float32 numbers "
            r"are between 1.4e-45 and 3.4e38; use one of these",
        ),
        (
            {"optimizer": {"name": "adam"}, "learning_rate": 0.1},
            "learning_rate and optimizer exclude each other; keep one",
        ),
        ({"optimizer": {"name": "lion"}}, "algorithm.cfg.optimizer.name"),
    ],
)
def test_faults_in_optimizer_blocks_are_refused(block, message):
    data = run("cartpole").model_dump(mode="json")
    data["algorithm"]["cfg"] = block
    with pytest.raises(ConfigError, match=message):
        config_from_dict(data)
