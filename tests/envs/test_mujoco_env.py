"""MuJoCo end to end: environments that train, resume in mid-episode, and are alike compiled, by threads, by batch."""

import pytest
import torch
from support.checks import close

pytest.importorskip("mujoco.batch")

import numpy as np
from support import fake_mujoco_envs
from support.small_runs import last_state, same, small

from ecrl import registry, rng
from ecrl.compile.jit import choose_form
from ecrl.envs import auto_reset, make_env
from ecrl.envs.mujoco.physics.simulation import simulation
from ecrl.envs.mujoco.scene.models import STATE, size_of
from ecrl.envs.validate import check_fields
from ecrl.kernels import scan
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.registry import lookup
from ecrl.run.checkpoint import load, save

ENVS = ("mujoco_reach", "mujoco_pole")


@pytest.fixture(autouse=True, scope="module")
def registered():
    """The environments by name, while these tests run: others look at all there are."""
    for name, make in zip(ENVS, (fake_mujoco_envs.reach, fake_mujoco_envs.pole), strict=True):
        registry.register_env(name)(make)
    yield
    for name in ENVS:
        del registry._ENTRIES["env"][name]


CUBE = {"uid": "cube", "shape": {"shape_type": "Cube", "size": [0.1, 0.1, 0.1]}, "init_pos": [-0.6, -0.4, 0.05]}


def config(name, **changes):
    return small(**{"env": {"name": name}, "trainer.num_envs": 4, "trainer.buffer_size": 16} | changes)


def steps(env, loop, state, keys, actions):
    """T steps from `state`: what is seen, paid and ended."""

    def body(state, x):
        state = env.step(state, *x)
        return state, (state["obs"], state["reward"], state["terminated"])

    return loop(body, state, (actions, env.draw(keys)))


def rollout(env, number, length, loop=scan, seed=0):
    keys = rng.split(rng.key(seed), number * (length + 1)).reshape(length + 1, number)
    actions = rng.uniform(rng.key(9), (length, number, env.action_space.shape[0])) * 2.0 - 1.0
    with torch.no_grad():
        return steps(env, loop, env.reset(keys[0]), keys[1:], actions)


@pytest.mark.parametrize("name", ENVS)
def test_it_keeps_the_contract_and_restarts_inside_a_rollout(name):
    env = make_env(name)
    check_fields(env, name)
    state, (obs, _, ended) = rollout(auto_reset(env), 8, 60)
    assert obs.isfinite().all() and ended.any()
    assert (state["elapsed"] < 60).all()


@pytest.mark.parametrize("name", ENVS)
def test_an_env_behaves_alike_in_any_batch_and_on_any_threads(name):
    many = [auto_reset(make_env({"name": name, "cfg": {"physics": {"threads": n}}})) for n in (1, 2)]
    keys = rng.split(rng.key(0), 64 * 13).reshape(13, 64)
    actions = rng.uniform(rng.key(9), (12, 64, many[0].action_space.shape[0])) * 2.0 - 1.0
    with torch.no_grad():
        ends = [steps(env, scan, env.reset(keys[0]), keys[1:], actions) for env in many]
        for i in (0, 40):
            part = slice(i, i + 1)
            single, _ = steps(many[0], scan, many[0].reset(keys[0, part]), keys[1:, part], actions[:, part])
            close(single["obs"], ends[0][0]["obs"][part], 1e-6)  # reductions of the poses differ with the batch ...
            assert torch.equal(single["elapsed"], ends[0][0]["elapsed"][part])
    assert same(ends[0][0], ends[1][0])  # ... not with the threads


def test_the_physics_of_one_env_has_the_same_bits_in_any_batch():
    """Compare the same states and actions, without a network or a pose in between."""
    env = make_env("mujoco_pole")
    keys, actions = rng.split(rng.key(0), 64), rng.uniform(rng.key(1), (20, 64, 1))
    many, one = env.reset(keys), env.reset(keys[5:6])
    for action in actions:
        many, one = env.step(many, action, None), env.step(one, action[5:6], None)
    assert torch.equal(many["world", "physics"][5:6], one["world", "physics"])


@pytest.mark.parametrize("name", ENVS)
def test_resume_in_mid_episode_is_bit_identical(name, tmp_path):
    cfg = config(name)
    states = [r["state"] for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    assert (states[1]["env", "elapsed"] > 0).any()
    assert same(last_state(cfg, states[1]), states[-1])
    save(tmp_path / "half", states[1], cfg)
    state, read = load(tmp_path / "half")
    assert state["env", "world", "physics"].dtype == torch.float64
    assert same(last_state(read, state), states[-1])


def test_seeds_run_side_by_side_under_vmap():
    cfg = config("mujoco_reach", **{"trainer.buffer_size": 4})
    states = [init_state(cfg, key=torch.tensor(seed)) for seed in (1, 2)]
    iteration = make_iteration(cfg)
    stacked, _ = torch.vmap(iteration, randomness="error")(torch.stack([s.clone() for s in states]))
    for i, state in enumerate(states):
        single, _ = iteration(state)
        close(stacked["env", "obs"][i], single["env", "obs"], 1e-4)
        close(stacked["env", "world", "physics"][i][:, :7], single["env", "world", "physics"][:, :7], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVS)
def test_compiled_equals_eager(name):
    env, form = auto_reset(make_env(name)), choose_form("on", "cpu")
    keys = rng.split(rng.key(0), 8 * 41).reshape(41, 8)
    actions = rng.uniform(rng.key(9), (40, 8, env.action_space.shape[0])) * 2.0 - 1.0
    begin = env.reset(keys[0])
    with torch.no_grad():
        eager, rows = steps(env, scan, begin, keys[1:], actions)
        compiled, result = form.jit(steps, env, form.scan)(begin, keys[1:], actions)
    assert rows[2].any()
    for a, b in zip(result, rows, strict=True):
        close(a, b, 1e-5)
    for key in ("obs", "elapsed", "reward"):
        close(compiled[key], eager[key], 1e-5)
    moving = size_of(simulation(lookup("env", name).config()).model, *STATE[:3])
    close(compiled["world", "physics"][:, :moving], eager["world", "physics"][:, :moving], 1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_training_compiled_equals_training_eager_and_resumes():
    eager = config("mujoco_pole", **{"trainer.iterations": 2})
    compiled = eager.replace(**{"trainer.compile": "on"})
    states = [r["state"] for r in train_iter(init_state(compiled), compiled) if r["log_type"] == "train"]
    assert same(last_state(compiled, states[0]), states[-1])
    for key, leaf in last_state(eager)["params"].flatten_keys("/").items():
        close(states[-1]["params"].flatten_keys("/")[key], leaf, 1e-5)


@pytest.mark.long
def test_ppo_learns_to_reach_and_to_balance():
    """Random actions take 24 steps to the target, of 25 at most, and drop the pole after some 30; learned in 20 s."""
    net = {"type": "mlp", "network_cfg": {"hidden_sizes": [32, 32], "activation": "tanh"}}
    fast = {
        "trainer.num_envs": 64,
        "trainer.buffer_size": 32,
        "trainer.iterations": 20,
        "policy": {"name": "actor_critic", "actor": net, "critic": net, "initial_log_std": -1.0},
        "algorithm.cfg": {"n_epochs": 6, "batch_size": 256, "learning_rate": 3e-3, "gamma": 0.95, "ent_coef": 0.0},
    }
    for name in ENVS:
        cfg = config(name, **fast)
        logs = [r["logs"] for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "collect"]
        lengths = [float(log["episode_length_avg_100"]) for log in logs]
        early, late = np.nanmean(lengths[:2]), lengths[-1]
        assert early > 22.0 and late < 8.0 if name == "mujoco_reach" else late > 1.5 * early, (name, early, late)
