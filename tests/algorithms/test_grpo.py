"""GRPO: what the members of a group share, which steps count, the reference policy, and that it learns."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.checks import assert_pure, close
from support.small_runs import same
from tensordict import TensorDict

from ecrl.algorithms.minibatch_sgd import pass_keys, shuffled, sizes_of
from ecrl.config import Config, config_from_dict
from ecrl.errors import ConfigError
from ecrl.kernels import transitions
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.policies.mlp import build_mlp
from ecrl.run.checkpoint import load, save, snapshot, write
from ecrl.run.resume import resume
from ecrl.run.train import train

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [16], "activation": "tanh"}}
ACTOR = {"name": "actor_only", "actor": NET}
BOTH = {"name": "actor_critic", "actor": NET, "critic": NET}
ALGORITHM = {"learning_rate": 0.01, "n_epochs": 2, "batch_size": 100, "gamma": 0.9, "kl_coef": 0.1}


def run(env: str = "cartpole", **changes: Any) -> Config:
    base = {
        "trainer": {"num_envs": 8, "buffer_size": 40, "iterations": 4, "compile": "off", "seed": 3},
        "env": {"name": env},
        "policy": ACTOR,
        "algorithm": {"name": "grpo", "cfg": ALGORITHM},
    }
    keys = {key if key.startswith(("trainer", "env", "policy")) else f"algorithm.cfg.{key}": key for key in changes}
    return config_from_dict(base).replace(**{dotted: changes[key] for dotted, key in keys.items()})


def collected(cfg: Config, rounds: int = 1, fixed: bool = False) -> tuple[TensorDict, list[TensorDict]]:
    """Return state and rollouts of some rounds without learning; `fixed` gives all members the same action noise."""
    parts, state, out = build(cfg), init_state(cfg), []
    if fixed:
        draw = parts.policy.draw
        parts = parts._replace(policy=replace(parts.policy, draw=lambda keys: draw(keys * 0 + keys[:, :1])))
    for _ in range(rounds):
        state, batch = assert_pure(parts.algorithm.iterate.collect, parts, state)
        out.append(batch["steps"])
        steps = cfg.trainer.buffer_size * cfg.trainer.num_envs
        counters = {"sample_step": state["sample_step"] + steps, "update_step": state["update_step"] + 1}
        state = state.copy().update(counters)
    return state, out


def iterations(cfg: Config, state: TensorDict | None = None) -> list[tuple[TensorDict, dict]]:
    """States after and logs of every iteration."""
    records = list(train_iter(init_state(cfg) if state is None else state, cfg))
    return [(r["state"], r["logs"]) for r in records if r["log_type"] == "train"]


def grouped(x: torch.Tensor, size: int = 4) -> torch.Tensor:
    return x.reshape(-1, size, *x.shape[1:])


# State that a group shares


@pytest.mark.parametrize("env", ["cartpole", "pendulum", "point_mass", "gymnasium:CartPole-v1"])
def test_groups_share_their_start_and_others_have_another(env):
    cfg = run(env)
    for state, obs in ((init_state(cfg), None), *((None, r["obs"][:, 0]) for r in collected(cfg, rounds=2)[1])):
        obs = state["env", "obs"] if state is not None else obs
        groups = grouped(obs if isinstance(obs, torch.Tensor) else torch.cat([obs[k] for k in sorted(obs.keys())], -1))
        assert torch.equal(groups, groups[:, :1].expand_as(groups))
        assert not torch.equal(groups[0, 0], groups[1, 0])


@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_members_with_equal_action_noise_live_equal_lives(env):
    """The rollout has several episodes. The members of a group share the world's noise, also for later starts."""
    _, (rollout,) = collected(run(env, **{"env.cfg.max_episode_steps": 7}), fixed=True)
    for name in ("obs", "action", "reward", "done"):
        groups = grouped(rollout[name])
        assert torch.equal(groups, groups[:, :1].expand_as(groups))
    assert not torch.equal(*grouped(rollout["obs"]))
    assert rollout["done"].sum() >= 8 * 5


def test_members_differ_in_their_actions():
    _, (rollout,) = collected(run())
    actions = rollout["action"][:, :-1]
    assert len({tuple(row.tolist()) for row in actions}) == 8


def test_envs_are_alike_for_any_number_of_groups():
    few, many = (collected(run(**{"trainer.num_envs": n}), rounds=2)[1] for n in (8, 16))
    for a, b in zip(few, many, strict=True):
        assert torch.equal(a["obs"][:, 0], b["obs"][:8, 0])
        assert torch.equal(a["action"], b["action"][:8])
        close(a["obs"], b["obs"][:8], tol=1e-4)  # the networks sum rows in another order


def test_every_rollout_starts_from_a_new_start():
    state, (first, second) = collected(run(), rounds=2)
    starts = [r["obs"][:, 0] for r in (first, second)]
    assert all((s.abs() <= 0.05).all() for s in starts)
    assert not torch.equal(*starts)
    assert not torch.equal(second["obs"][:, 0], first["obs"][:, -1])
    assert (state["episode", "running_length"] <= 40).all()


def test_without_the_reset_episodes_go_on():
    cfg = run("pendulum", reset_every_rollout=False, **{"env.cfg.max_episode_steps": 25})
    _, (first, second) = collected(cfg, rounds=2)
    assert torch.equal(second["obs"][:, 0], first["obs"][:, -1])
    for rollout, ends in ((first, [24]), (second, [9, 34])):  # 25 steps each, over 40 and 40
        assert rollout["done"][0].nonzero().flatten().tolist() == ends
    starts = grouped(second["obs"][:, 10])  # an episode that starts inside a rollout is the group's too
    assert torch.equal(starts, starts[:, :1].expand_as(starts))


def test_steps_after_the_first_end_do_not_count():
    _, (rollout,) = collected(run())
    for mask, done in zip(rollout["mask"][:, :-1].tolist(), rollout["done"][:, :-1].tolist(), strict=True):
        ends = done.index(True) + 1 if True in done else 40
        assert mask == [True] * ends + [False] * (40 - ends)
    assert not rollout["mask"][:, :-1].all()
    lockstep = run("pendulum", truncate_at_first_done=False, **{"env.cfg.max_episode_steps": 7})
    assert "mask" not in collected(lockstep)[1][0]


@pytest.mark.parametrize("key", ["reset_every_rollout", "truncate_at_first_done"])
def test_both_keys_may_be_false_in_lockstep_and_then_matter(key):
    cfg = run("pendulum", **{"env.cfg.max_episode_steps": 15, "trainer.iterations": 2})
    on, off = (iterations(c)[-1][0] for c in (cfg, cfg.replace(**{f"algorithm.cfg.{key}": False})))
    assert not same(on["params"], off["params"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"reset_every_rollout": False},
            "algorithm.cfg.reset_every_rollout: false, but episodes of this environment end at different times, so the "
            "members of a group would no longer share an initial state; use true",
        ),
        (
            {"truncate_at_first_done": False},
            "algorithm.cfg.truncate_at_first_done: false, but episodes of this environment",
        ),
        ({"group_size": 3}, "algorithm.cfg.group_size: 3 does not divide trainer.num_envs 8"),
        ({"group_size": 16}, "algorithm.cfg.group_size: 16 does not divide trainer.num_envs 8"),
    ],
)
def test_what_would_tear_groups_apart_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=f"^{message}[^\n]*$"):
        init_state(run(**changes))


@pytest.mark.parametrize("size", [1, 0, -4, 2.5])
def test_groups_have_at_least_two_members(size):
    with pytest.raises(ConfigError, match=r"algorithm.cfg.group_size"):
        run(group_size=size)


# The update


def advantages(reward, done, mask, gamma, size, eps):
    """Returns to go, standardised at each time over the members that count, by plain loops."""
    n, length = reward.shape
    returns, out = np.zeros_like(reward), np.zeros_like(reward)
    for i in range(n):
        running = 0.0
        for t in reversed(range(length)):
            running = reward[i, t] + gamma * running * (not done[i, t])
            returns[i, t] = running
    for first in range(0, n, size):
        for t in range(length):
            who = [i for i in range(first, first + size) if mask[i, t]]
            x = returns[who, t]
            if len(who) > 1 and x.std() > 1e-6 * abs(x).mean():
                out[who, t] = (x - x.mean()) / (x.std() + eps)
    return out


def independent(cfg: Config, state: TensorDict, rollout: TensorDict) -> tuple[dict, list[float]]:
    """Return weights and the KL of each step after an update by modules, autograd and torch.optim on counted rows."""
    c = cfg.algorithm.cfg
    net, ref = (build_mlp(cfg.policy.actor.network_cfg, 4, 2) for _ in range(2))
    net.load_state_dict(dict(state["params", "actor"].items()))
    ref.load_state_dict(dict(state["ref_params", "actor"].items()))
    steps = transitions(rollout)
    fields = (steps[k].double().numpy() for k in ("reward", "done", "mask"))
    advantage = torch.tensor(advantages(*fields, c.gamma, c.group_size, c.eps), dtype=torch.float32).reshape(-1)
    steps, optimizer, kls = steps.reshape(-1), torch.optim.Adam(net.parameters(), c.learning_rate), []
    sizes = sizes_of(c, len(steps))
    for index, real in zip(*shuffled(pass_keys(state, c.n_epochs), sizes, max(sizes)), strict=True):
        rows = index[real & steps["mask"][index]]
        batch, a = steps[rows], advantage[rows]
        dist, fixed = (torch.distributions.Categorical(logits=f(batch["obs"])) for f in (net, ref))
        log_prob = dist.log_prob(batch["action"])
        ratio = torch.exp(log_prob - batch["sample_log_prob"])
        surrogate = torch.min(ratio * a, ratio.clamp(1.0 - c.clip_coef, 1.0 + c.clip_coef) * a).mean()
        q = fixed.log_prob(batch["action"]).detach() - log_prob
        kl = (torch.exp(q) - 1.0 - q).mean()
        optimizer.zero_grad()
        (-surrogate + c.kl_coef * kl - c.ent_coef * dist.entropy().mean()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), c.max_grad_norm)
        optimizer.step()
        kls.append((float(kl.detach()), len(rows)))
    total = sum(count for _, count in kls)
    return dict(net.state_dict()), sum(kl * count for kl, count in kls) / total


@pytest.mark.parametrize(
    "changes",
    [
        {"n_epochs": 1, "batch_size": 320},
        {"ent_coef": 0.05, "kl_coef": 2.0},
        {"group_size": 2, "gamma": 0.5, "eps": 1.0, "clip_coef": 0.02},
        {"batch_size": None, "num_minibatches": 3, "group_size": 8},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_an_update_is_that_of_an_independent_grpo(changes):
    """From a state whose reference is another policy; the same weights, and the same distance from the reference."""
    cfg = run(**changes)
    parts, state = build(cfg), init_state(cfg)
    algorithm: Any = parts.algorithm.iterate
    ref = state["ref_params"].apply(lambda x: x + 0.2 * torch.sin(7.0 * x))
    state, batch = algorithm.collect(parts, state.copy().set("ref_params", ref))
    after, logs = algorithm.update(parts, state, batch)
    weights, kl = independent(cfg, state, batch["steps"])
    close(logs["kl_ref"], kl, tol=1e-4)
    assert logs["kl_ref"] > 1e-3
    for key, weight in weights.items():
        close(after["params", "actor"][key], weight, tol=2e-5)  # float32 sums in another order, then Adam
    assert not same(after["params"], state["params"])


def test_masked_steps_may_hold_anything():
    cfg = run()
    parts = build(cfg)
    algorithm: Any = parts.algorithm.iterate
    state, batch = algorithm.collect(parts, init_state(cfg))
    hidden, ends = ~batch["steps", "mask"], []
    for junk in (0.0, torch.nan, torch.inf):
        dirty = batch.clone()
        for name in ("reward", "sample_log_prob"):
            dirty["steps", name][hidden] = junk
        ends.append(algorithm.update(parts, state, dirty))
    for after, logs in ends[1:]:
        assert same(after["params"], ends[0][0]["params"])
        assert all(torch.equal(logs[name], log) for name, log in ends[0][1].items())


def test_the_reference_stays_the_first_policy():
    cfg = run()
    first = init_state(cfg)
    (one, logs), *_, (last, far) = iterations(cfg)
    assert same(first["ref_params"], first["params"])
    assert same(last["ref_params"], first["params"])
    assert not same(one["params"], first["params"])
    assert 0.0 <= logs["kl_ref"] < far["kl_ref"]


def test_the_reference_is_refreshed_after_so_many_iterations():
    cfg = run(ref_update_freq=3, **{"trainer.iterations": 7})
    states = [init_state(cfg), *(state for state, _ in iterations(cfg))]
    for k, state in enumerate(states):
        assert same(state["ref_params"], states[k - k % 3]["params"]), k
    assert len({float(s["params", "actor", "2.bias"][0]) for s in states}) == 8  # every iteration moved


def test_a_run_that_is_resumed_with_another_frequency_refreshes_at_its_multiples(tmp_path):
    cfg = run(ref_update_freq=3, **{"trainer.iterations": 3, "trainer.save_freq": 320, "trainer.enable_eval": False})
    train(init_state(cfg), cfg, tmp_path, progress=False)
    changes = {"algorithm.cfg.ref_update_freq": 2, "trainer.iterations": 6}
    state, longer = resume(tmp_path, overrides=changes, force=True)
    assert state["hyper", "ref_update_freq"] == 2 and same(state["ref_params"], state["params"])
    states = [state, *(state for state, _ in iterations(longer, state))]  # after 3 to 6 iterations
    for k, source in ((1, 1), (2, 1), (3, 3)):
        assert same(states[k]["ref_params"], states[source]["params"]), k


def test_a_checkpoint_from_before_the_frequency_was_in_the_state_is_loaded(tmp_path):
    cfg = run(ref_update_freq=3)
    state = iterations(cfg)[1][0]
    tensors = {name: x for name, x in state.flatten_keys("/").items() if name != "hyper/ref_update_freq"}
    assert len(tensors) == len(state.flatten_keys("/").keys()) - 1
    write(tmp_path / "older", snapshot(build(cfg), state, cfg)._replace(tensors=tensors))
    assert same(load(tmp_path / "older")[0], state)


def test_the_reference_keeps_the_observation_statistics_of_its_time():
    normal = {"policy.normalize_obs": True, "kl_coef": 0.1}
    state = iterations(run(**normal))[-1][0]
    assert float(state["ref_params", "norm", "count"]) == 0.0 < float(state["norm", "obs", "count"])
    states = [state for state, _ in iterations(run(**normal, ref_update_freq=1))]
    assert same(states[1]["ref_params", "norm"], states[0]["norm", "obs"]), "those it acted with, not the moved ones"


def test_a_fresh_reference_is_no_distance_away():
    cfg = run(ref_update_freq=1, n_epochs=1, batch_size=320)
    assert all(abs(float(logs["kl_ref"])) < 1e-7 for _, logs in iterations(cfg))


def test_without_a_penalty_there_is_no_reference():
    cfg = run(kl_coef=0.0)
    state, logs = iterations(cfg)[-1]
    assert "ref_params" not in state
    assert logs["kl_ref"] == 0.0
    with pytest.raises(ConfigError, match=r"state: hyper/kl_coef is absent, the config makes it"):
        next(train_iter(state, run()))


def test_a_group_with_equal_returns_changes_nothing():
    cfg = run("probe_constant", kl_coef=0.0, ent_coef=0.0)
    assert same(iterations(cfg)[-1][0]["params"], init_state(cfg)["params"])


# As any algorithm


@pytest.mark.parametrize("policy", [ACTOR, BOTH], ids=lambda policy: policy["name"])
@pytest.mark.parametrize(("env", "obs", "action"), [("probe_action", [0.0], [1]), ("probe_match", [0.0, 1.0], [0, 1])])
def test_probes_are_solved(policy, env, obs, action):
    """Groups of a probe share their observation; the members that took the right action are better than the others."""
    sizes = {"trainer.num_envs": 32, "trainer.buffer_size": 1, "trainer.iterations": 40}
    cfg = run(env, policy=policy, learning_rate=0.03, batch_size=32, **sizes)
    state, _ = iterations(cfg)[-1]
    out = build(cfg).policy.act(state["params"], TensorDict({}, []), torch.tensor(obs).unsqueeze(-1), None)[1]
    assert out["action"].tolist() == action
    if policy is BOTH:
        assert same(state["params", "critic"], init_state(cfg)["params", "critic"])


@pytest.mark.parametrize("policy", [ACTOR, BOTH], ids=lambda policy: policy["name"])
def test_a_resumed_run_equals_an_uninterrupted_one(policy, tmp_path):
    """Reference, schedule, observation statistics and adaptive rate included."""
    schedule = {"name": "adaptive", "kwargs": {"desired_kl": 1e-3, "min_rate": 1e-4}}
    cfg = run(policy=policy, ref_update_freq=3, lr_scheduler=schedule).replace(**{"policy.normalize_obs": True})
    through = [state for state, _ in iterations(cfg)]
    save(tmp_path / "half", through[1], cfg)
    state, loaded = load(tmp_path / "half")
    assert loaded == cfg
    assert same(iterations(loaded, state)[-1][0], through[-1])


def test_an_iteration_is_pure_and_vmaps_over_seeds():
    cfg = run()
    states, iteration = [init_state(cfg, key=torch.tensor(seed)) for seed in (1, 2)], make_iteration(cfg)
    single = [assert_pure(iteration, state)[0] for state in states]
    stacked, _ = torch.vmap(iteration, randomness="error")(torch.stack([s.clone() for s in states]))
    for i, state in enumerate(single):
        for name, leaf in state.flatten_keys("/").items():
            close(stacked.flatten_keys("/")[name][i], leaf, tol=1e-4)


def test_it_trains_on_a_gymnasium_vector_env():
    _, (state, logs) = iterations(run("gymnasium:CartPole-v1", **{"trainer.iterations": 2}))
    assert torch.isfinite(torch.stack(list(logs.values()))).all()
    assert not same(state["params"], state["ref_params"])


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_compiled_equals_eager():
    first, second = (iterations(run(ref_update_freq=2, **{"trainer.compile": c}))[-1][0] for c in ("off", "on"))
    for name, leaf in first.flatten_keys("/").items():
        close(second.flatten_keys("/")[name], leaf, tol=1e-3)
