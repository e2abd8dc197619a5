"""The loop: purity, equal bits, resuming, streams by env index, vmapping over seeds, compiled and eager."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from support.checks import assert_pure, close
from support.run_checks import assert_seeds_batch
from support.small_runs import last_state, same, small

import ecrl.loop.iteration
from ecrl.algorithms import collect, on_policy
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.types import STATE_FIELDS


def test_records_come_in_pairs_with_the_step_and_the_state_after():
    cfg = small()
    records = list(train_iter(init_state(cfg), cfg))
    assert [r["log_type"] for r in records] == ["collect", "train"] * 4
    assert [r["sample_step"] for r in records] == [32, 32, 64, 64, 96, 96, 128, 128]
    assert all(int(r["state"]["sample_step"]) == r["sample_step"] for r in records)
    assert all(r["state"].is_locked for r in records)
    assert all(log.ndim == 0 for r in records for log in r["logs"].values())
    assert {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_frac", "explained_variance"} <= set(
        records[1]["logs"]
    )
    assert set(records[0]["logs"]) == {"episode_reward_avg_100", "episode_length_avg_100"}


def test_same_config_and_seed_give_the_same_bits_and_another_seed_does_not():
    assert same(last_state(small()), last_state(small()))
    assert not same(last_state(small())["params"], last_state(small(**{"trainer.seed": 2}))["params"])


def test_stopping_and_going_on_gives_the_same_bits():
    cfg = small()
    states = [r["state"] for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    assert same(last_state(cfg, states[1]), states[-1])


def test_an_iteration_is_pure_and_what_is_yielded_is_owned():
    cfg = small()
    state = init_state(cfg)
    assert_pure(make_iteration(cfg), state)
    plain = [r["state"] for r in train_iter(state, cfg) if r["log_type"] == "train"]
    spoilt = []
    for record in train_iter(state, cfg):
        if record["log_type"] == "collect":  # the train record of the iteration carries the same state
            continue
        spoilt.append(record["state"].clone())
        record["state"]["params"]["actor"]["0.weight"].zero_()
        record["state"]["env"]["obs"].zero_()
        for log in record["logs"].values():
            log.fill_(torch.nan)
    assert all(same(a, b) for a, b in zip(plain, spoilt, strict=True))


def test_training_does_not_use_the_global_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    last_state(small())
    assert torch.equal(torch.get_rng_state(), before)


def test_envs_0_to_7_are_alike_for_8_and_for_16():
    states = [init_state(small(**{"trainer.num_envs": n})) for n in (8, 16)]
    assert torch.equal(states[0]["env"]["obs"], states[1]["env"]["obs"][:8])
    frozen = {"trainer.buffer_size": 40, "trainer.iterations": 1, "algorithm.cfg.learning_rate": 1e-30}
    ends = [last_state(small(**frozen, **{"trainer.num_envs": n})) for n in (8, 16)]
    assert torch.equal(ends[0]["env"]["elapsed"], ends[1]["env"]["elapsed"][:8])
    close(ends[0]["env"]["obs"], ends[1]["env"]["obs"][:8], tol=1e-4)  # the networks sum rows in another order


def test_hyperparameters_are_read_from_the_state():
    cfg = small(**{"trainer.iterations": 1})
    state = init_state(cfg)
    hyper = state["hyper"].clone()
    hyper["learning_rate"] = torch.tensor(0.0)
    with pytest.warns(UserWarning, match=r"state's hyperparameters are used.*learning_rate 0 \(config 0.0003\)"):
        still = last_state(cfg, state.copy().update({"hyper": hyper}))
    assert same(still["params"], state["params"])


def test_vmapped_seeds_equal_single_ones():
    assert_seeds_batch(small(), tol=1e-4)


def test_a_state_of_another_config_is_refused_by_name():
    state = init_state(small())
    for key, name in (("trainer.num_envs", r"env/cart_mass is \[4\], the config makes it \[5\]"), ("env", "env/angle")):
        other = small(**{key: 5 if key == "trainer.num_envs" else {"name": "pendulum"}})
        with pytest.raises(ConfigError, match=f"state: {name}"):
            next(train_iter(state, other))


def test_a_leaf_of_another_dtype_is_refused_by_name():
    state = init_state(small())
    state = state.clone().set("params", state["params"].to(torch.float64))
    message = r"^state: params/actor/0.bias is float64, the config makes it float32; use the config of its run$"
    with pytest.raises(ConfigError, match=message):
        next(train_iter(state, small()))


def test_a_device_without_its_number_is_the_one_the_state_is_on(monkeypatch):
    monkeypatch.setattr(ecrl.loop.iteration, "device_of", lambda cfg: torch.device("cpu:0"))  # as cuda:0 is to cuda
    state = init_state(small())
    assert state["key"].device != torch.device("cpu:0")
    assert len(list(train_iter(state, small()))) == 8
    with pytest.raises(ConfigError, match=r"state: is on meta, the config sets cpu:0; use state.to\(...\)"):
        next(train_iter(state.to("meta"), small()))


def test_the_state_has_the_fields_of_the_table():
    assert set(init_state(small()).keys()) == set(STATE_FIELDS) - {
        "carry",
        "frozen_params",
        "exploration",
        "decision_step",
        "data_sha256",
    }, "of other policies and algorithms"


def test_streams_go_on_where_they_were_if_the_buffer_changes():
    """Steps already taken are never drawn again: 3 of 8 and then 2 of 4 visit 24 to 31, as 4 of 8 do."""
    frozen = {"algorithm.cfg.learning_rate": 1e-30}
    long, short = small(**frozen), small(**frozen, **{"trainer.buffer_size": 4, "trainer.iterations": 8})
    third = [r["state"] for r in train_iter(init_state(long), long) if r["log_type"] == "train"][2]
    assert torch.equal(last_state(short, third)["env"]["elapsed"], last_state(long)["env"]["elapsed"])


CALM = """
import sys, torch
sys.path.insert(0, "tests")
torch.set_num_threads(1)
from support.small_runs import small
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.run.evaluation import evaluate
cfg = small(**{"trainer.compile": "on"})
state, iteration = init_state(cfg), make_iteration(cfg)
state, _ = iteration(state)
with torch.compiler.set_stance("fail_on_recompile"):
    for _ in range(2):
        state, _ = iteration(state)
alone = cfg.replace(**{"trainer.num_eval_envs": 1})
evaluate(state, alone, num_episodes=1)
with torch.compiler.set_stance("fail_on_recompile"):
    logs = [evaluate(state, alone, num_episodes=n) for n in (2, 3, 5)]
print("calm", len(logs))
"""


@pytest.mark.slow
def test_a_fresh_process_compiles_everything_in_its_first_iteration():
    done = subprocess.run([sys.executable, "-c", CALM], capture_output=True, text=True)
    assert done.stdout.strip() == "calm 3", done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_compiled_equals_eager_and_a_second_seed_compiles_nothing():
    eager, compiled = small(), small(**{"trainer.compile": "on"})
    first, second = last_state(eager), last_state(compiled)
    for name, leaf in first.flatten_keys("/").items():
        close(second.flatten_keys("/")[name], leaf, tol=1e-4)
    assert same(last_state(compiled), second)
    other = {"trainer.seed": 9, "trainer.exp_name": "other", "algorithm.cfg.learning_rate": 0.5}
    other |= {"algorithm.cfg.gamma": 0.5, "trainer.eval_freq": 7}
    runs = []
    moved = last_state(compiled.replace(**other), watch=lambda run: runs.append(run) or run)
    assert runs[0].jit.compilations == [], "the second run compiles nothing"
    eager_moved = last_state(eager.replace(**other))
    for name, leaf in eager_moved["params"].flatten_keys("/").items():
        close(moved["params"].flatten_keys("/")[name], leaf, tol=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_several_time_limits_in_a_rollout_compile():
    cfg = small(**{"env": {"name": "cartpole", "cfg": {"max_episode_steps": 3}}})
    eager, compiled = (last_state(cfg.replace(**{"trainer.compile": form})) for form in ("off", "on"))
    for name, weight in eager["params"].flatten_keys("/").items():
        close(compiled["params"].flatten_keys("/")[name], weight, tol=1e-5)


@pytest.mark.slow
def test_a_compiled_run_owns_its_tensors(traced_or_compiled):
    cfg = small(**{"trainer.compile": "on"})
    plain, spoilt = last_state(cfg), None
    for record in train_iter(init_state(cfg), cfg):
        spoilt = record["state"].clone()
        if record["log_type"] == "train":
            for leaf in record["state"].values(True, True):
                leaf.zero_()
    assert same(plain, spoilt)


def test_an_iteration_keeps_the_fields_of_the_state(monkeypatch):
    make = ecrl.loop.build.make_algorithm
    adds = on_policy(collect, lambda run, state, batch: (state.copy().set("new", state["key"]), {}))
    monkeypatch.setattr("ecrl.loop.build.make_algorithm", lambda block: replace(make(block), iterate=adds))
    with pytest.raises(ConfigError, match=r"^algorithm ppo: update adds fields of the state: new; return"):
        next(train_iter(init_state(small()), small()))


ALIKE = {"trainer.seed": 9, "trainer.exp_name": "other", "trainer.eval_freq": 7}
ALIKE |= {f"algorithm.cfg.{name}": number for name, number in (("gamma", 0.5), ("clip_coef", 0.4), ("target_kl", 0.2))}
ALIKE |= {"algorithm.cfg.learning_rate": 0.5, "algorithm.cfg.max_grad_norm": 9.0}
SHAPING = {"trainer.num_envs": 5, "trainer.buffer_size": 9, "algorithm.cfg.n_epochs": 3, "algorithm.cfg.batch_size": 5}
SHAPING |= {"algorithm.cfg.clip_vloss": True, "algorithm.cfg.normalize_advantage": "none", "policy.normalize_obs": True}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "apg"])
def test_runs_are_compared_by_the_choices_that_shape_their_graphs(algorithm):
    """Equal runs are one key of compiled functions."""
    kinds = {"grpo": {"group_size": 2}, "apg": {}, "ppo": {"lr_scheduler": {"name": "step", "kwargs": {"gamma": 0.5}}}}
    env = {"name": "point_mass"} if algorithm == "apg" else {"name": "cartpole"}
    cfg = small(**{"env": env, "algorithm": {"name": algorithm, "cfg": kinds[algorithm]}})
    fields = type(cfg.algorithm.cfg).model_fields
    changes = {
        key: value for key, value in ALIKE.items() if not key.startswith("algorithm") or key.split(".")[-1] in fields
    }
    if algorithm == "ppo":
        changes["algorithm.cfg.lr_scheduler"] = {"name": "step", "kwargs": {"gamma": 0.9}}
    runs = build(cfg), build(cfg.replace(**changes))
    assert runs[0] == runs[1] and hash(runs[0]) == hash(runs[1])
    for key, value in SHAPING.items():
        if not key.startswith("algorithm") or key.split(".")[-1] in fields:
            assert build(cfg.replace(**{key: 6 if key == "trainer.num_envs" else value})) != runs[0], key


THREADS = """
import hashlib, sys, torch
sys.path.insert(0, "tests")
from support.small_runs import last_state, small
from ecrl import rng
for threads in (1, 2):
    torch.set_num_threads(threads)
    state = last_state(small(**{"trainer.num_envs": 64, "trainer.iterations": 2, "algorithm.cfg.batch_size": 128}))
    keys = rng.split(rng.key(1), 100_000)
    drawn = rng.bits(keys, (4,)), rng.uniform(keys, (3,)), rng.permutation(rng.key(2), 50_000), state["env", "elapsed"]
    print(torch.get_num_threads(), *[hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in drawn])
    print([float(p.double().sum()) for p in state["params"].values(True, True)])
"""


@pytest.mark.slow
def test_threads_do_not_change_the_streams_and_a_process_repeats_its_bits():
    def run() -> list[str]:
        done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    first, again = run(), run()
    assert first[:2] == again[:2] and len(first) == 4
    one, two = first[0].split(), first[2].split()
    assert (one[0], two[0]) == ("1", "2")
    assert one[1:] == two[1:] and len(one) == 5
