"""GRPO and PPO with ratios of tokens and of episodes: against plain loops in float64, and what each setting does."""

import math
from typing import Any, cast

import pytest
import torch
from support.checks import assert_pure, close
from support.dots import reaching
from support.long_cases import long_except
from support.small_runs import last_state, same
from support.token_agent import speaking
from tensordict import TensorDict

from ecrl.algorithms.core import collect
from ecrl.algorithms.minibatch_sgd import pass_keys, shuffled
from ecrl.config import Config
from ecrl.errors import ConfigError
from ecrl.kernels import compute_gae
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.run.checkpoint import load, save

N, T, SIZE = 16, 4, 4
TOL = 3e-7
"""The hyperparameters of the state are rounded to float32."""
SGD = {"name": "sgd", "learning_rate": 1.0}
ONE_STEP = {"n_epochs": 1, "batch_size": N * T, "optimizer": SGD, "max_grad_norm": 1e6, "gamma": 0.9}
FILTER: dict[str, Any] = {"min_group_score": 0.0, "max_group_score": 1.0}


def spelling(algorithm: str = "grpo", **cfg: Any) -> Config:
    """Episodes of 1 to 3 steps with 1 or 2 tokens each, with one gradient step per iteration by default."""
    own = {"group_size": SIZE, "kl_coef": 0.3, "ent_coef": 0.1} if algorithm == "grpo" else {}
    trainer = {"trainer.num_envs": N, "trainer.buffer_size": T, "trainer.iterations": 2}
    parts = {"env": {"name": "spelling"}, "algorithm": {"name": algorithm, "cfg": ONE_STEP | own | cfg}}
    return speaking(**parts, **{"trainer.seed": 4, **trainer})


def moved(params: TensorDict, size: float) -> TensorDict:
    return params.apply(lambda x: x + size * torch.sin(9.0 * x + torch.arange(x.numel()).reshape(x.shape)))


def collected(cfg: Config) -> tuple[Any, Any, Any]:
    """Run, state and batch in float64, from a policy that knows a little, which then moved, as has the reference."""
    run, state = build(cfg), cast(Any, init_state(cfg))
    knowing = state["params"].copy()
    knowing["first"] = torch.tensor([[-0.8, 0.8], [0.0, 0.0]])
    knowing["second"] = knowing["second"] + torch.tensor([0.0, 0.0, 1.0])
    state, batch = getattr(run.algorithm.iterate, "collect", collect)(run, state.copy().set("params", knowing))
    state = state.copy().set("params", moved(knowing, 0.4))
    if "ref_params" in state:
        state.set("ref_params", moved(knowing, -0.2))
    state, batch = (x.clone().apply(lambda y: y.double() if y.is_floating_point() else y) for x in (state, batch))
    return run, state, batch


# An independent policy, loss and baseline, token by token


def tokens_of(params: Any, obs: torch.Tensor, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probability and entropy of each token that counts."""
    x = torch.stack((obs[0], torch.ones_like(obs[0])))
    first, second = (int(token) for token in tokens)
    chosen = [(x @ params["first"], first)] + ([(x @ params["second"][:, 1], second)] if first == 1 else [])
    logs = [(z - z.logsumexp(0), token) for z, token in chosen]
    return [(log[token], -(log.exp() * log).sum()) for log, token in logs]


def scores(cfg: Any, steps: TensorDict) -> tuple[dict, dict, list[int]]:
    """Advantages by (environment, step), the sum of rewards of each episode, and the lengths of the episodes."""
    lengths, returns, total = [], {}, {}
    for n in range(N):
        ends = [t for t in range(T) if steps["done"][n, t]]
        lengths.append(ends[0] + 1 if ends else T)
        running = 0.0
        for t in reversed(range(lengths[n])):
            running = float(steps["reward"][n, t]) + cfg.gamma * running
            returns[n, t] = running
        total[n] = sum(float(steps["reward"][n, t]) for t in range(lengths[n]))
    advantage = {}
    for n, t in returns:
        group = [m for m in range(n - n % SIZE, n - n % SIZE + SIZE) if cfg.advantage == "episode" or t < lengths[m]]
        at = 0 if cfg.advantage == "episode" else t
        x = [returns[m, at] for m in group]
        mean = sum(x) / len(x)
        std = math.sqrt(sum((y - mean) ** 2 for y in x) / len(x))
        centred = returns[n, at] - mean
        out = {"centered": centred, "standardized": centred / (std + cfg.eps)}
        out["leave_one_out"] = centred * len(x) / max(1, len(x) - 1)
        advantage[n, t] = out[cfg.baseline] if std > 0 else 0.0
    return advantage, total, lengths


def oracle(cfg: Any, params: Any, ref: Any, steps: TensorDict) -> Any:
    """Return the loss of a whole batch."""
    advantage, total, lengths = scores(cfg, steps)
    kept = [
        n
        for n in range(N)
        if cfg.min_group_score is None or 0.0 < sum(total[m] for m in range(n - n % SIZE, n - n % SIZE + SIZE)) < SIZE
    ]
    low = cfg.clip_coef
    high = low if cfg.clip_coef_high is None else cfg.clip_coef_high
    episodes = []
    for n in kept:
        elements = []
        for t in range(lengths[n]):
            now = tokens_of(params, steps["obs"][n, t], steps["tokens"][n, t])
            fixed = tokens_of(ref, steps["obs"][n, t], steps["tokens"][n, t])
            old = [float(x) for x in steps["sample_log_prob"][n, t]][: len(now)]
            if cfg.ratio == "action":
                now, old = [(sum(x for x, _ in now), sum(h for _, h in now))], [sum(old)]
                fixed = [(sum(x for x, _ in fixed), None)]
            elements += [(advantage[n, t], p, o, r, h) for (p, h), o, (r, _) in zip(now, old, fixed, strict=True)]
        mean_log_ratio: Any = sum(p - o for _, p, o, _, _ in elements) / len(elements)
        losses = []
        for a, p, o, r, entropy in elements:
            ratio = torch.exp(mean_log_ratio if cfg.ratio == "sequence" else p - o)
            objective = torch.min(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
            if cfg.dual_clip is not None and a < 0:
                objective = torch.clamp(objective, min=cfg.dual_clip * a)
            kl = torch.exp(r.detach() - p) - 1 - (r.detach() - p)
            losses.append(-objective + cfg.kl_coef * kl - cfg.ent_coef * entropy)
        episodes.append(losses)
    sums = [sum(x) for x in episodes]
    longest = T if cfg.ratio == "action" else 2 * T
    if cfg.loss_mean == "token":
        return sum(sums) / sum(len(x) for x in episodes)
    if cfg.loss_mean == "sequence":
        return sum(s / len(x) for s, x in zip(sums, episodes, strict=True)) / len(episodes)
    return sum(sums) / len(episodes) / longest


SETTINGS = [
    {"ratio": "token"},
    {"ratio": "token", "loss_mean": "sequence", "advantage": "episode", **FILTER},
    {"ratio": "token", "loss_mean": "fixed_length", "baseline": "centered", "clip_coef_high": 0.28, "dual_clip": 1.3},
    {"ratio": "action", "loss_mean": "sequence", "baseline": "leave_one_out", "clip_coef_high": 0.4},
    {"ratio": "action", "loss_mean": "fixed_length", "advantage": "episode", "clip_coef": 0.05},
    {"ratio": "action", "advantage": "episode", "baseline": "leave_one_out", "kl_coef": 0.0, **FILTER},
    {"ratio": "sequence", "loss_mean": "sequence", "advantage": "episode", "clip_coef": 0.03, "clip_coef_high": 0.05},
    {"ratio": "sequence", "loss_mean": "token", "advantage": "episode", **FILTER},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(map(str, settings.values())))
def test_a_step_of_grpo_follows_the_gradient_of_an_independent_loss(settings):
    cfg = spelling(**settings)
    run, state, batch = collected(cfg)
    after, logs = run.algorithm.iterate.update(run, state, batch)
    params = {name: x.clone().requires_grad_() for name, x in state["params"].items()}
    ref = state.get("ref_params", params)
    loss = oracle(cfg.algorithm.cfg, params, ref, batch["steps"])
    loss.backward()
    close(logs["loss"], loss.detach(), tol=TOL)
    assert logs["policy_loss"].abs() > 1e-3 and logs["clip_frac"] > 0.0
    for name in ("first", "second"):
        assert params[name].grad.abs().max() > 1e-3
        close(state["params", name] - after["params", name], params[name].grad, tol=TOL)


@pytest.mark.parametrize("clips", [{}, {"clip_coef_high": 0.28, "dual_clip": 1.4}, {"clip_vloss": True}])
def test_a_step_of_ppo_with_token_ratios_follows_an_independent_loss(clips):
    cfg = spelling("ppo", ratio="token", normalize_advantage="none", ent_coef=0.1, vf_coef=0.7, **clips)
    c: Any = cfg.algorithm.cfg
    run, state, batch = collected(cfg)
    after, _ = run.algorithm.iterate.update(run, state, batch)
    advantage, target = compute_gae(batch["steps"], c.gamma, c.gae_lambda)
    params = {name: x.clone().requires_grad_() for name, x in state["params"].items()}
    policy, count, critic = torch.zeros(()), 0, torch.zeros(())
    high = c.clip_coef if c.clip_coef_high is None else c.clip_coef_high
    for n in range(N):
        for t in range(T):
            obs, a = batch["steps", "obs"][n, t], advantage[n, t]
            value = torch.stack((obs[0], torch.ones_like(obs[0]))) @ params["critic"][:, 0]
            errors = [(value - target[n, t]) ** 2]
            if c.clip_vloss:
                old = batch["steps", "value"][n, t]
                errors.append((old + (value - old).clamp(-c.clip_coef, c.clip_coef) - target[n, t]) ** 2)
            critic = critic + torch.stack(errors).max()
            now = tokens_of(params, obs, batch["steps", "tokens"][n, t])
            for (p, entropy), o in zip(now, batch["steps", "sample_log_prob"][n, t], strict=False):
                ratio = torch.exp(p - o)
                objective = torch.min(ratio * a, ratio.clamp(1 - c.clip_coef, 1 + high) * a)
                if c.dual_clip is not None and a < 0:
                    objective = torch.max(objective, c.dual_clip * a)
                policy, count = policy - objective - c.ent_coef * entropy, count + 1
    (policy / count + c.vf_coef * critic / (N * T)).backward()
    for name, x in params.items():
        close(state["params", name] - after["params", name], x.grad, tol=TOL)


# Minibatches


@pytest.mark.parametrize("settings", [SETTINGS[1], SETTINGS[7]], ids=["token", "sequence"])
def test_the_share_of_kept_groups_is_logged_and_other_groups_change_nothing(settings):
    run, state, batch = collected(spelling(**settings))
    after, logs = run.algorithm.iterate.update(run, state, batch)
    first = batch["steps", "mask"][:, :-1]
    total = (batch["steps", "reward"][:, :-1] * first).sum(-1).reshape(-1, SIZE).sum(-1)
    kept = (total > 0) & (total < SIZE)
    assert 0 < kept.sum() < len(kept)
    close(logs["kept_groups"], kept.double().mean())
    assert "kept_groups" not in run.algorithm.iterate.update(*collected(spelling()))[1]
    dirty = batch.clone()
    others = ~kept.repeat_interleave(SIZE)
    dirty["steps", "sample_log_prob"][others] = torch.nan
    dirty["steps", "obs"][others] = 0.5
    assert same(run.algorithm.iterate.update(run, state, dirty)[0]["params"], after["params"])


def test_masked_tokens_may_hold_anything():
    run, state, batch = collected(spelling(ratio="token", loss_mean="sequence"))
    after, logs = run.algorithm.iterate.update(run, state, batch)
    dirty = batch.clone()
    dirty["steps", "sample_log_prob"].masked_fill_(~batch["steps", "token_mask"], torch.nan)
    same_after, same_logs = run.algorithm.iterate.update(run, state, dirty)
    assert same(same_after["params"], after["params"]) and same_logs["loss"] == logs["loss"]


@pytest.mark.parametrize(("algorithm", "ratio"), [("grpo", "token"), ("grpo", "sequence"), ("ppo", "token")])
def test_tokens_of_steps_that_were_not_taken_may_hold_anything(algorithm, ratio):
    """Chunks of three actions, of which an episode may take fewer."""
    cfg = reaching(algorithm, **{"algorithm.cfg.ratio": ratio})
    run, state = build(cfg), init_state(cfg)
    state, batch = getattr(run.algorithm.iterate, "collect", collect)(run, state)
    taken = torch.arange(3) < batch["steps", "executed"].unsqueeze(-1)
    assert 0 < (~taken[:, :-1]).sum() < taken[:, :-1].sum()
    clean = run.algorithm.iterate.update(run, state, batch)[0]
    dirty = batch.clone()
    dirty["steps", "sample_log_prob"][~taken] = torch.nan
    assert same(run.algorithm.iterate.update(run, state, dirty)[0]["params"], clean["params"])
    assert not same(clean["params"], state["params"])


@pytest.mark.parametrize("mean", ["token", "sequence", "fixed_length"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_minibatches_have_the_gradient_of_the_batch_on_average(ratio, mean):
    """At a rate of almost 0, the steps of a pass add up to the number of minibatches times the step of the batch."""
    settings = {"ratio": ratio, "loss_mean": mean, "optimizer": {"name": "sgd", "learning_rate": 1e-5}}
    size = T if ratio == "sequence" else 1
    run, state, batch = collected(spelling(**settings))
    whole = run.algorithm.iterate.update(run, state, batch)[0]
    run = build(spelling(**settings, batch_size=size))
    parts = run.algorithm.iterate.update(run, state, batch)[0]
    mask = batch["steps", "mask"][:, :-1]
    rows = mask.any(-1).sum() if ratio == "sequence" else mask.sum()
    for name in ("first", "second"):
        moved_by = [(after["params", name] - state["params", name]) for after in (whole, parts)]
        assert moved_by[0].abs().max() > 1e-8
        close(moved_by[1] / rows, moved_by[0], tol=1e-2 * moved_by[0].abs().max())


def test_rows_that_count_come_first_in_a_random_order():
    keys = pass_keys(TensorDict({"key": torch.tensor(3), "update_step": torch.tensor(0)}, []), 2)
    first = torch.tensor([True, False, True, True, False, False, False])
    index, real = shuffled(keys, [3, 3, 1], 4, first)
    for rows, counted in zip(index.split(3), real.split(3), strict=True):
        order = torch.cat([row[mask] for row, mask in zip(rows, counted, strict=True)]).tolist()
        assert sorted(order[:3]) == [0, 2, 3] and sorted(order) == list(range(7))
    assert index[0].tolist() != index[3].tolist()


@pytest.mark.parametrize("settings", [{}, *(SETTINGS[i] for i in (1, 3, 7))])
def test_dropping_masked_steps_does_not_change_a_minibatch_of_all_steps(settings):
    run, state, batch = collected(spelling(**settings))
    plain, logs = run.algorithm.iterate.update(run, state, batch)
    run = build(spelling(drop_masked=True, **settings))
    dropped, dropped_logs = run.algorithm.iterate.update(run, state, batch)
    for name, x in plain["params"].items():
        close(dropped["params", name], x, tol=1e-12)
    for name, x in logs.items():
        close(dropped_logs[name], x, tol=1e-12)


def test_minibatches_without_masked_steps_are_fewer_and_count_alike():
    """With the gradient of one step at a rate of almost 0, the steps add up to the number of minibatches."""
    taken = {}
    for drop in (False, True):
        cfg = spelling(drop_masked=drop, batch_size=8, optimizer={"name": "adam", "learning_rate": 1e-3}, **FILTER)
        run, state, batch = collected(cfg)
        after, _ = run.algorithm.iterate.update(run, state, batch)
        taken[drop] = int(after["opt", "step"].max()) if "step" in after["opt"] else None
    score = (batch["steps", "reward"] * batch["steps", "mask"])[:, :-1].sum(-1).reshape(-1, SIZE).sum(-1)
    kept = ((score > 0) & (score < SIZE)).repeat_interleave(SIZE)
    counted = int(batch["steps", "mask"][kept][:, :-1].sum())
    assert taken == {False: N * T // 8, True: -(-counted // 8)}
    assert taken[True] < taken[False]


@pytest.mark.parametrize("guard", ["off", "skip"])
def test_without_a_kept_group_nothing_moves(guard):
    cfg = spelling(drop_masked=True, min_group_score=9.0, target_kl=0.1, batch_size=8).replace(
        **{"trainer.finite_guard": guard}
    )
    run, state, batch = collected(cfg)
    after, logs = run.algorithm.iterate.update(run, state, batch)
    assert same(after["params"], state["params"]) and same(after["opt"], state["opt"])
    assert logs["kept_groups"] == 0.0 and all(log.isfinite() for log in logs.values())


# As any algorithm

RUNS = {
    "token": SETTINGS[1] | {"drop_masked": True, "batch_size": 8, "n_epochs": 2},
    "sequence": SETTINGS[7] | {"drop_masked": True, "batch_size": 16, "n_epochs": 2},
    "action": SETTINGS[3] | {"batch_size": 8, "n_epochs": 2},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_an_uninterrupted_one(name, tmp_path):
    cfg = spelling(**RUNS[name]).replace(**{"trainer.iterations": 4})
    states = [r["state"] for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    save(tmp_path / "half", states[1], cfg)
    state, loaded = load(tmp_path / "half")
    assert loaded == cfg and same(last_state(loaded, state), states[-1])


@pytest.mark.parametrize("name", RUNS)
def test_an_iteration_is_pure_and_vmaps_over_seeds(name):
    cfg = spelling(**RUNS[name])
    states, iteration = [init_state(cfg, key=torch.tensor(seed)) for seed in (1, 2)], make_iteration(cfg)
    single = [assert_pure(iteration, state)[0] for state in states]
    stacked, _ = torch.vmap(iteration, randomness="error")(cast(Any, torch.stack([s.clone() for s in states])))
    for i, state in enumerate(single):
        for path, leaf in state.flatten_keys("/").items():
            close(stacked.flatten_keys("/")[path][i], leaf, tol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_except(["sequence", "ppo"], [*RUNS, "ppo"]))
@pytest.mark.usefixtures("traced_or_compiled")
def test_compiled_equals_eager(name):
    ppo = {"ratio": "token", "batch_size": 16, "n_epochs": 2}
    cfg = spelling("ppo", **ppo) if name == "ppo" else spelling(**RUNS[name])
    eager, compiled = (last_state(cfg.replace(**{"trainer.compile": form})) for form in ("off", "on"))
    for path, leaf in eager.flatten_keys("/").items():
        close(compiled.flatten_keys("/")[path], leaf, tol=1e-4)


# Settings that do not fit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": "sequence", "reset_every_rollout": False}, "ratio 'sequence' needs one whole episode per"),
        ({"advantage": "episode", "truncate_at_first_done": False}, "advantage 'episode' needs one whole episode per"),
        ({"ratio": "sequence", "dual_clip": 3.0}, "dual_clip is for the ratios action and token; leave it out with"),
        ({"min_group_score": 1.0, "max_group_score": 0.0}, "min_group_score 1.0 is not below max_group_score 0.0"),
        ({"dual_clip": 1.25, "clip_coef_high": 0.28}, "dual_clip 1.25 is not above the largest clipped ratio, 1.28"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_in_one_line(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        spelling(**settings)
    assert "\n" not in str(caught.value)


def test_token_ratios_need_tokens_and_episodes_need_large_minibatches():
    plain = {"name": "actor_only", "actor": {"network_cfg": {"hidden_sizes": [4]}}}
    cfg = spelling(ratio="token").replace(policy=plain)
    message = "algorithm.cfg.ratio: token, but policy actor_only has one log-probability per action; use action"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        last_state(cfg)
    message = "algorithm.cfg.batch_size: 3 is below 4, the length of the sequences that a minibatch keeps whole"
    with pytest.raises(ConfigError, match=f"^{message}"):
        init_state(spelling(ratio="sequence", batch_size=3))
    last_state(spelling(ratio="sequence").replace(policy=plain))
