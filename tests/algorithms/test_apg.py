"""APG: gradients by hand, by finite differences and by a tape; cuts, discounts, faults, resuming and compiling."""

from typing import Literal

import pytest
import torch
from pydantic import Field
from support.checks import assert_pure, close
from support.run_checks import assert_seeds_batch
from support.small_runs import same
from tensordict import TensorDict

from ecrl import rng
from ecrl.algorithms import core
from ecrl.algorithms.core import step_keys
from ecrl.config import Config, config_from_dict
from ecrl.config.model import ConfigModel, Count
from ecrl.envs.core import Env, state_of, time_limit
from ecrl.errors import ConfigError, NotFiniteError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.policies import acting_params
from ecrl.registry import register_env
from ecrl.spaces import box

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
PLAIN = {"optimizer": {"name": "sgd", "learning_rate": 1.0}, "max_grad_norm": 1e9}
"""Plain gradient ascent on the objective: the parameters move by exactly its gradient."""


class LineConfig(ConfigModel):
    """A line to walk on, with faults at chosen steps."""

    max_episode_steps: Count = Field(1000, description="time limit, steps")
    fault: Literal["none", "loss", "gradient"] = Field("none", description="what is not finite at steps 4 to 7")
    outside: Literal["", "unpaid", "masked"] = Field("", description="steps 4 to 7 pay 0, or pay 1000 and do not count")


@register_env("line")
def line(cfg: LineConfig) -> Env:
    """x' = x + a; reward = -x'^2 - a^2 / 2: linear dynamics, quadratic cost."""

    def reset(keys):
        start = state_of(rng.uniform(keys, (1,)), keys.shape, age=torch.zeros_like(keys))
        yes = torch.ones(keys.shape, dtype=torch.bool)
        return start.set("mask", yes) if cfg.outside == "masked" else start

    def step(state, action, noise):
        x = state["obs"] + action
        reward = -(x.square() + 0.5 * action.square())[..., 0]
        faulty = (state["age"] >= 4) & (state["age"] < 8)
        if cfg.fault == "loss":
            reward = torch.where(faulty, torch.nan, reward)
        if cfg.fault == "gradient":  # its value is 0, its derivative is not finite
            reward = reward + torch.sqrt(torch.where(faulty, 0.0, 1.0) * x[..., 0].square()) * 0.0
        if cfg.outside:
            reward = torch.where(faulty, 1000.0 * x[..., 0] if cfg.outside == "masked" else 0.0, reward)
            state = state.copy().set("mask", ~faulty) if cfg.outside == "masked" else state
        no = torch.zeros_like(state["terminated"])
        after = {"obs": x, "reward": reward, "terminated": no, "truncated": no.clone(), "age": state["age"] + 1}
        return state.copy().update(after)

    return time_limit(Env(reset, step, box(-9.0, 9.0, 1), box(-9.0, 9.0, 1)), cfg.max_episode_steps)


def run(**changes) -> Config:
    base = {
        "trainer": {"num_envs": 4, "buffer_size": 4, "iterations": 4, "compile": "off"},
        "env": {"name": "line"},
        "policy": {"name": "actor_only", "actor": NET, "initial_log_std": -1.0},
        "algorithm": {"name": "apg", "cfg": {"gamma": 0.9}},
    }
    return config_from_dict(base).replace(**changes)


def apg_cfg(**changes):
    return {f"algorithm.cfg.{key}": value for key, value in changes.items()}


LINEAR = {"policy.actor": {"type": "mlp", "network_cfg": {"hidden_sizes": []}}}


def states_of(cfg, state=None):
    records = train_iter(init_state(cfg) if state is None else state, cfg)
    return [r for r in records if r["log_type"] == "train"]


def gradient(cfg, state):
    """Return the gradient of the objective with entropy bonus, by one plain step, and the logs."""
    built = build(cfg)
    after, _, logs = built.algorithm.iterate(built, state, TensorDict({}, []))
    return after["params"].apply(lambda new, old: new - old, state["params"]), logs


def keys_of(cfg, state):
    return step_keys(build(cfg), state)


@pytest.mark.parametrize("deterministic", [True, False])
def test_two_steps_of_the_line_by_hand(deterministic):
    cfg = run(**LINEAR, **apg_cfg(**PLAIN, ent_coef=0.3, deterministic_actions=deterministic))
    cfg = cfg.replace(**{"trainer.buffer_size": 2})
    state, parts = init_state(cfg), build(cfg)
    grads, logs = gradient(cfg, state)
    w, b = (state["params"]["actor"][f"0.{name}"].squeeze().double() for name in ("weight", "bias"))
    std = torch.exp(torch.tensor(-1.0).double())
    noise = parts.policy.draw(keys_of(cfg, state)[1])[..., 0].double()
    z0, z1 = noise * 0.0 if deterministic else noise
    x0, g = state["env"]["obs"][:, 0].double(), 0.9
    # a = w x + b + std z. By the chain rule with x1 = x0 + a0 and x2 = x1 + a1:
    a0 = w * x0 + b + std * z0
    x1 = x0 + a0
    a1 = w * x1 + b + std * z1
    x2 = x1 + a1
    objective = -(x1**2) - a0**2 / 2 + g * (-(x2**2) - a1**2 / 2)
    by_w = -2 * x1 * x0 - a0 * x0 + g * (-2 * x2 * (x0 + x1 + w * x0) - a1 * (x1 + w * x0))
    by_b = -2 * x1 - a0 + g * (-2 * x2 * (2 + w) - a1 * (1 + w))
    s0, s1 = std * z0, std * z1
    by_log_std = -2 * x1 * s0 - a0 * s0 + g * (-2 * x2 * (s0 + w * s0 + s1) - a1 * (w * s0 + s1))
    by_log_std = by_log_std + 0.3 * (1 + g)  # the entropy of each step grows by 1 with log_std
    close(grads["actor"]["0.weight"].squeeze(), by_w.mean())
    close(grads["actor"]["0.bias"].squeeze(), by_b.mean())
    close(grads["log_std"].squeeze(), by_log_std.mean())
    close(logs["objective"], objective.mean())
    entropy = (1 + g) * (-1.0 + 0.5 * torch.log(torch.tensor(2.0 * torch.pi)) + 0.5)
    close(logs["entropy"], entropy)
    close(logs["loss"], -objective.mean() - 0.3 * entropy)


def double(state):
    return state.apply(lambda x: x.double() if x.is_floating_point() else x)


POINT = {
    "trainer.buffer_size": 20,
    "env": {"name": "point_mass", "cfg": {"max_episode_steps": 8, "success_bonus": 1.0}},
    "policy.initial_log_std": -2.0,
}


@pytest.mark.parametrize("normalize_obs", [False, True])
def test_finite_differences_on_the_point_mass(normalize_obs):
    """Along random directions, through episodes that end and begin."""
    cfg = run(**POINT, **apg_cfg(**PLAIN, ent_coef=0.01), **{"policy.normalize_obs": normalize_obs})
    later = states_of(cfg.replace(**{"trainer.iterations": 1}))[0]["state"].select("env", "norm", "sample_step")
    state = double(init_state(cfg).copy().update(later))
    assert ("obs" in state["norm"]) == normalize_obs
    grads, _ = gradient(cfg, state)

    def negative_loss(params):
        return -gradient(cfg, state.copy().set("params", params))[1]["loss"]

    for seed in range(3):
        towards = grads.apply(lambda x, s=seed: rng.normal(rng.fold_in(rng.key(s), x.numel()), x.shape, x.dtype))
        high, low = (negative_loss(state["params"].apply(lambda p, v, e=e: p + e * v, towards)) for e in (1e-5, -1e-5))
        slope = sum((a * b).sum() for a, b in zip(grads.values(True, True), towards.values(True, True), strict=True))
        assert abs(slope) > 1e-3
        close(slope, (high - low) / 2e-5, tol=1e-5)


def tape(cfg, state, segment):
    """The same gradient from one autograd graph over the whole horizon, with the state detached between segments."""
    parts = build(cfg)
    env_keys, action_keys = keys_of(cfg, state)
    worlds, noises = parts.env.draw(env_keys), parts.policy.draw(action_keys)
    params = state["params"].apply(lambda p: p.clone().requires_grad_())
    acting, env, disc, total = acting_params(params, state["norm"]), state["env"], torch.ones(4), 0.0
    for t in range(cfg.trainer.buffer_size):
        if t % segment == 0:
            env = env.detach()
        _, out = parts.policy.act(acting, torch.empty(0), env["obs"], noises[t])
        env = parts.env.step(env, out["action"], worlds[t])
        total = total + (disc * env["reward"]).mean()
        done = env["terminated"] | env["truncated"]
        disc = torch.where(done, torch.ones(4), disc * 0.9)
    leaves = list(params.values(True, True))
    return total, torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("segment", [None, 10, 5, 1])
def test_a_segment_cuts_the_gradient_exactly_there(segment):
    cfg = run(**POINT, **apg_cfg(**PLAIN, segment_length=segment))
    state = init_state(cfg)
    grads, logs = gradient(cfg, state)
    total, expected = tape(cfg, state, segment or 20)
    close(logs["objective"], total.detach())
    names = list(state["params"].keys(True, True))
    scale = max(float(x.abs().max()) for x in expected)
    for name, by_tape in zip(names, expected, strict=True):
        close(grads[name] / scale, by_tape / scale)
    whole = tape(cfg, state, 20)[1]
    different = any(not torch.allclose(a, b, rtol=1e-3) for a, b in zip(whole, expected, strict=True))
    assert different == (segment is not None)


def test_the_discount_starts_again_with_every_episode_and_not_with_a_segment():
    cfg = run(**LINEAR, **{"env.cfg.max_episode_steps": 3, "trainer.buffer_size": 6}, **apg_cfg(segment_length=2))
    state, parts = init_state(cfg), build(cfg)
    _, writes, logs = parts.algorithm.iterate(parts, state, TensorDict({}, []))
    batch = writes["batch", "steps"]
    reward = batch["reward"][:, :-1]
    weights = torch.tensor([1.0, 0.9, 0.81, 1.0, 0.9, 0.81])
    close(logs["objective"], (reward * weights).sum(1).mean())
    assert batch["done"][0].tolist() == [False, False, True, False, False, True, False]


def test_masked_steps_do_not_count():
    changes = {"trainer.buffer_size": 12, **apg_cfg(**PLAIN)}
    masked, unpaid = (run(**changes, **{"env.cfg.outside": name}) for name in ("masked", "unpaid"))
    (grads, logs), (expected, expected_logs) = (gradient(cfg, init_state(cfg)) for cfg in (masked, unpaid))
    assert same(grads, expected) and torch.equal(logs["objective"], expected_logs["objective"])
    with_bonus = masked.replace(**{"algorithm.cfg.ent_coef": 1.0})
    entropy = gradient(with_bonus, init_state(with_bonus))[1]["entropy"]
    all_steps = gradient(unpaid, init_state(unpaid))[1]["entropy"]
    weights = 0.9 ** torch.arange(12)
    close(entropy / all_steps, (weights.sum() - weights[4:8].sum()) / weights.sum())


def test_gradients_do_not_cross_a_reset():
    """With episodes of one step, the gradient over many steps is the sum of the gradients of single steps."""
    cfg = run(**POINT, **apg_cfg(**PLAIN)).replace(**{"env.cfg.max_episode_steps": 1})
    state = init_state(cfg)
    cut = cfg.replace(**{"algorithm.cfg.segment_length": 1})
    assert same(gradient(cfg, state)[0], gradient(cut, state)[0])


def test_it_collects_what_every_algorithm_collects():
    cfg = run(**POINT)
    state, parts = init_state(cfg), build(cfg)
    after, writes, _ = parts.algorithm.iterate(parts, state, TensorDict({}, []))
    steps = writes["batch", "steps"]
    assert same(parts.algorithm.iterate.collect(parts, state)[1], writes["batch"]), "for a video"
    expected, batch = core.collect(parts, state)
    for name in ("obs", "reward", "done"):
        assert torch.equal(steps[name], batch["steps", name]), name
    assert same(steps["info"], batch["steps", "info"])
    for name in ("env", "episode"):
        assert same(after[name], expected[name]), name


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_an_update_that_is_not_finite_is_left_out_and_counted(fault):
    changes = {"env.cfg.fault": fault, "trainer.iterations": 4, "trainer.finite_guard": "skip"}
    cfg = run(**changes, **apg_cfg(lr_scheduler={"name": "linear"}, learning_rate=0.1))
    met = "reward, loss" if fault == "loss" else "gradient, parameters"
    with pytest.warns(
        UserWarning, match=f"^after 16 env steps: NaN or infinity in {met}: the update is left out"
    ) as caught:
        records = states_of(cfg)
    states = [r["state"] for r in records]
    assert len(caught) == 1 and [float(r["logs"]["skipped_updates"]) for r in records] == [0.0, 1.0, 0.0, 0.0]
    assert same(states[0]["params"], states[1]["params"]) and same(states[0]["opt"], states[1]["opt"])
    assert not same(states[1]["params"], states[2]["params"])
    assert all(x.isfinite().all() for s in states for x in s["params"].values(True, True))
    close(torch.stack([r["logs"]["learning_rate"] for r in records]), [0.1, 0.075, 0.075, 0.05])  # the schedule waits
    assert bool(records[1]["logs"]["loss"].isfinite()) == (fault == "gradient")
    assert [int(s["update_step"]) for s in states] == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ("loss", "reward, loss; first reward = nan in env 0, step 0 of the rollout"),
        ("gradient", r"gradient, parameters; first costate\.obs = nan in step 3 of the rollout, env 0"),
    ],
)
def test_or_it_stops_the_run(fault, place):
    cfg = run(**{"env.cfg.fault": fault})
    records = train_iter(init_state(cfg), cfg)
    next(records), next(records)
    with pytest.raises(NotFiniteError, match=rf"^iteration 1 \(after 16 env steps\): NaN or infinity in {place}"):
        next(records)


def test_the_key_of_embodichain_is_the_guard():
    for skip, guard in ((True, "skip"), (False, "stop")):
        assert run(**apg_cfg(skip_nonfinite_updates=skip)).trainer.finite_guard == guard
    with pytest.raises(ConfigError, match=r"skip_nonfinite_updates: expected true or false"):
        run(**apg_cfg(skip_nonfinite_updates="no"))
    data = run().model_dump(mode="json")
    data["algorithm"]["cfg"]["skip_nonfinite_updates"] = True
    with pytest.raises(ConfigError, match=r"skip_nonfinite_updates: sets 'trainer.finite_guard', which is also given"):
        config_from_dict(data)
    assert config_from_dict(data, overrides={"trainer.finite_guard": "off"}).trainer.finite_guard == "off"


def test_numbers_are_read_from_the_state():
    cfg = run(**{"trainer.iterations": 1})
    state = init_state(cfg).clone()
    assert set(state["hyper"].keys()) == {"gamma", "ent_coef", "learning_rate", "max_grad_norm", "optimizer"}
    state["hyper", "learning_rate"] = torch.tensor(0.0)
    with pytest.warns(UserWarning, match="state's hyperparameters are used"):
        assert same(states_of(cfg, state)[-1]["state"]["params"], state["params"])


SCHEDULED = {"policy.normalize_obs": True, **apg_cfg(lr_scheduler={"name": "linear"}, segment_length=10)}


def test_training_is_pure_and_the_same_bits_stopped_or_not():
    cfg = run(**POINT, **SCHEDULED).replace(**{"trainer.buffer_size": 10, "algorithm.cfg.segment_length": 5})
    state = init_state(cfg)
    assert_pure(make_iteration(cfg), state)
    states = [r["state"] for r in states_of(cfg, state)]
    assert same(states_of(cfg, states[1])[-1]["state"], states[-1])
    assert same(states_of(cfg)[-1]["state"], states[-1])
    other = cfg.replace(**{"trainer.seed": 9, "trainer.iterations": 1})
    assert not same(states_of(other)[0]["state"]["params"], states[0]["params"])
    assert not any(x.requires_grad for x in states[-1].values(True, True))


def test_the_environments_own_figures_are_logged():
    cfg = run(**POINT)
    logs = next(train_iter(init_state(cfg), cfg))["logs"]
    assert {"rewards/distance", "rewards/success", "metrics/final_distance", "metrics/path_length"} <= set(logs)


def test_vmapped_seeds_equal_single_ones():
    assert_seeds_batch(run(**POINT), tol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_compiled_equals_eager_and_compiles_in_its_first_iteration():
    cfg = run(**POINT, **SCHEDULED, **{"trainer.iterations": 3})
    eager, compiled = states_of(cfg)[-1]["state"], cfg.replace(**{"trainer.compile": "on"})
    records = train_iter(init_state(compiled), compiled)
    next(records), next(records)
    with torch.compiler.set_stance("fail_on_recompile"):
        *_, last = records
        again = states_of(compiled.replace(**{"trainer.seed": 1, "trainer.exp_name": "other"}))[-1]["state"]
    for name, leaf in eager.flatten_keys("/").items():
        close(last["state"].flatten_keys("/")[name], leaf, tol=1e-5)
    assert same(again, last["state"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": "cartpole"}, r"^env: apg needs Box actions, but this environment has Discrete\(n=2\); use another"),
        (apg_cfg(segment_length=3), r"^algorithm.cfg.segment_length: 3 does not divide trainer.buffer_size 4; use a"),
    ],
)
def test_what_it_cannot_learn_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        init_state(run(**changes))


def test_an_env_without_gradients_is_refused():
    cfg = run()
    parts = build(cfg)
    for fault in ({"is_pure": False}, {"scene": "of a MuJoCo task"}):
        host = parts._replace(env=Env(parts.env.reset, parts.env.step, box(0.0, 1.0), box(0.0, 1.0), **fault))
        with pytest.raises(ConfigError, match=r"^env: apg differentiates through the environment, which this env"):
            parts.algorithm.init(host, rng.key(0))


def test_an_adaptive_rate_is_refused():
    with pytest.raises(ConfigError, match="lr_scheduler adaptive needs the KL of a minibatch step"):
        run(**apg_cfg(lr_scheduler={"name": "adaptive"}))
