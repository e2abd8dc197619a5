"""Kinds of the leaves of a state, and a replay buffer: borrowed, committed in place, valid until the next iteration."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import cast

import pytest
import torch
from support.checks import assert_pure
from support.replay_agent import CAPACITY, KINDS, N, T, replaying
from support.small_runs import NET, same, small
from tensordict import TensorDict

import ecrl
from ecrl.algorithms.state_kinds import Kind, leaf_kinds, merge, split
from ecrl.config import Config
from ecrl.config.model import ConfigModel
from ecrl.envs import Env, state_of
from ecrl.errors import ConfigError, UserError
from ecrl.loop.buffers import kinds_of
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.registry import register_env
from ecrl.run import checkpoint
from ecrl.run.checkpoint import load, save
from ecrl.run.rank_shards import _per_rank_tensors
from ecrl.run.train import train
from ecrl.spaces import Discrete, box


class CountingConfig(ConfigModel):
    """No settings."""


@register_env("counting_with_a_fault")
def counting_with_a_fault(cfg: CountingConfig) -> Env:
    """The observation counts the steps; the reward of step 5, in the second iteration, is NaN."""

    def reset(keys):
        return state_of(torch.zeros(*keys.shape, 1), keys.shape)

    def step(state, action, noise):
        obs = state["obs"] + 1.0
        return state.copy().update({"obs": obs, "reward": torch.where(obs[..., 0] == 6.0, torch.nan, 1.0)})

    return Env(reset, step, box(0.0, 1e6, 1), Discrete(2))


def states(cfg: Config) -> list[TensorDict]:
    """Return copies of the states after each iteration."""
    return [r["state"].clone() for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]


def test_new_rows_are_in_the_ring_in_their_order():
    """12 steps per iteration in a ring of 21: the third iteration overwrites the oldest 15. The obs of step k is k."""
    cfg = replaying(**{"env": {"name": "counting_with_a_fault"}, "trainer.finite_guard": "off", "trainer.num_envs": 1})
    cfg = cfg.replace(**{"trainer.buffer_size": 12, "trainer.iterations": 3})
    for iteration, state in enumerate(states(cfg), 1):
        obs = state["replay", "steps", "obs"][:, 0, 0].tolist()
        taken = 12 * iteration
        newest = {k % CAPACITY: float(k) for k in range(max(0, taken - CAPACITY), taken)}
        assert [newest.get(i, 0.0) for i in range(CAPACITY)] == obs
        assert int(state["replay", "cursor"]) == int(state["replay", "written"]) == taken


def test_an_iteration_commits_to_a_copy_and_the_loop_in_place_with_the_same_bits():
    cfg = replaying()
    state, iteration = init_state(cfg), make_iteration(cfg)
    for by_loop in states(cfg):
        state, _ = assert_pure(iteration, state)
        assert same(state, by_loop)
    start = init_state(cfg)
    before = start.clone()
    records = train_iter(start, cfg)
    first, second = (next(r for r in records if r["log_type"] == "train")["state"] for _ in range(2))
    assert same(start, before), "the caller's buffer is copied once"
    assert first["replay", "steps", "obs"].data_ptr() == second["replay", "steps", "obs"].data_ptr()


def test_a_yielded_state_is_valid_until_the_next_iteration(tmp_path):
    cfg = replaying()
    records = train_iter(init_state(cfg), cfg)
    (_, first), copies = (next(records), next(records)), []
    copies.append(first["state"].clone())
    save(tmp_path / "now", first["state"], cfg)
    next(records)
    message = r"^state: the buffer replay was overwritten by a later iteration; use a yielded state before the next"
    for use in (
        lambda state: next(train_iter(state, cfg)),
        make_iteration(cfg),
        lambda state: save(tmp_path / "late", state, cfg),
    ):
        with pytest.raises(UserError, match=message):
            use(first["state"])
    assert same(load(tmp_path / "now")[0], copies[0])
    assert len(list(train_iter(copies[0], cfg))) == 8


def test_training_leaves_the_buffer_of_its_state_as_it_was_and_refuses_a_state_without_one():
    cfg = replaying()
    state = init_state(cfg)
    before = state.clone()
    end, _ = train(state, cfg, progress=False)
    assert same(state, before) and same(end, states(cfg)[-1])
    with pytest.raises(ConfigError, match=r"^state: replay/cursor is absent, the config makes it \[\]; use the config"):
        train(state.exclude("replay"), cfg, progress=False)


def test_a_run_goes_on_from_a_checkpoint_with_its_buffer(tmp_path):
    cfg = replaying()
    every = states(cfg)
    save(tmp_path / "half", every[1], cfg)
    state, again = load(tmp_path / "half")
    *_, last = train_iter(state, again)
    assert same(last["state"], every[-1])


def test_rows_of_a_skipped_iteration_are_not_committed():
    cfg = replaying(**{"env": {"name": "counting_with_a_fault"}, "trainer.finite_guard": "skip"})
    cfg = cfg.replace(**{"algorithm.cfg.capacity": 2 * T * N})
    with pytest.warns(UserWarning, match="NaN or infinity in reward"):
        one, two, three, *_ = states(cfg)
    rings = [state["replay"].exclude("written", ("steps", "mask")) for state in (one, two)]
    assert same(*rings) and same(one["params"], two["params"])
    counts = [(int(state["replay", "cursor"]), int(state["replay", "written"])) for state in (one, two, three)]
    assert counts == [(T, T), (T, 2 * T), (2 * T, 3 * T)], "a skipped iteration adds no steps, but it took steps"
    assert one["replay", "steps", "mask"][:T].all(), "every step so far is part of a transition"
    mask = three["replay", "steps", "mask"][: 2 * T]
    assert mask[:, 0].tolist() == [True] * (T - 1) + [False] + [True] * T, "nothing follows the step before the gap"
    assert two["env", "obs"].unique().tolist() == [8.0]
    pure, state = make_iteration(cfg), init_state(cfg)
    for expected in (one, two, three):
        state, _ = pure(state)
        assert same(state["replay"], expected["replay"])


def test_a_state_before_a_skipped_iteration_is_out_of_date(tmp_path, monkeypatch):
    """The steps of the second iteration are left out, and the buffer then has a gap that the first state lacks.

    The state after it is current, and can be saved.
    """
    cfg = replaying(**{"env": {"name": "counting_with_a_fault"}, "trainer.finite_guard": "skip"})
    with pytest.warns(UserWarning, match="NaN or infinity in reward"):
        records = train_iter(init_state(cfg), cfg)
        before, _, after, _ = (next(records)["state"] for _ in range(4))
    for use in (lambda state: train_iter(state, cfg), make_iteration(cfg), lambda state: save(tmp_path, state, cfg)):
        with pytest.raises(UserError, match=r"^state: the buffer replay was overwritten by a later iteration; use a"):
            use(before)
    assert make_iteration(cfg)(after)[0]["params"].isfinite().all()
    save(tmp_path / "now", after, cfg)
    monkeypatch.setattr(checkpoint, "check_current", lambda run, state: None)
    old = after.clone()
    old["replay", "written"].copy_(old["replay", "cursor"])  # as older versions of ecrl saved it
    save(tmp_path / "old", old, cfg)
    loaded = [load(tmp_path / name)[0] for name in ("now", "old")]
    assert same(loaded[0], after) and same(loaded[1], after)
    *_, end = records
    for state in loaded:
        *_, last = train_iter(state, cfg)
        assert same(last["state"], end["state"])


def test_a_fault_that_stops_leaves_the_buffer_as_it_was():
    cfg = replaying(**{"env": {"name": "counting_with_a_fault"}})
    (last,) = [r["state"] for r in train_iter_until_it_stops(cfg) if r["log_type"] == "train"]
    assert int(last["replay", "cursor"]) == int(last["replay", "written"]) == T
    assert same(last["replay"], states(cfg.replace(**{"trainer.iterations": 1}))[0]["replay"])


def train_iter_until_it_stops(cfg: Config):
    with pytest.raises(ecrl.errors.NotFiniteError, match="NaN or infinity in reward") as error:
        yield from train_iter(init_state(cfg), cfg)
    assert error.value.report["found"]["place"] == {"env": 0, "step": 1, "env_step": 5}


def test_every_leaf_has_a_kind():
    run = build(replaying())
    actual = leaf_kinds(init_state(replaying()), kinds_of(run))
    expected = {
        ("params", "critic", "0.bias"): Kind.LEARNED,
        ("opt", "step"): Kind.LEARNED,
        ("hyper", "gamma"): Kind.COUNTER,
        ("env", "obs"): Kind.ENVIRONMENT,
        ("episode", "finished"): Kind.ENVIRONMENT,
        ("replay", "steps", "obs"): Kind.BUFFER,
        ("replay", "written"): Kind.BUFFER,
        ("replay", "cursor"): Kind.COUNTER,
        ("key",): Kind.COUNTER,
    }
    assert {path: actual[path] for path in expected} == expected


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({"replay": None}, r"state: the kind of replay/.* is not declared \(declared: .*params.*\); add it to `kinds`"),
        ({("replay", "cursor"): Kind.BUFFER}, "the buffer replay needs the count replay/cursor of kind counter"),
    ],
)
def test_a_state_without_its_kinds_is_refused_in_one_line(monkeypatch, kinds, message):
    make, declared = ecrl.loop.build.make_algorithm, {**KINDS, **kinds}
    declared = {path: kind for path, kind in declared.items() if kind and ("replay" in kinds) <= ("replay" not in path)}
    monkeypatch.setattr("ecrl.loop.build.make_algorithm", lambda block: replace(make(block), kinds=declared))
    with pytest.raises(ConfigError, match=message):
        init_state(replaying())


def test_split_and_merge():
    kinds = kinds_of(build(replaying()))
    state = init_state(replaying())
    own, borrowed = split(state, kinds)
    assert list(borrowed.keys()) == ["replay"] and [*own.keys(True, True)].count(("replay", "cursor")) == 1
    assert "cursor" not in borrowed["replay"] and same(merge(own, borrowed), state)


def test_a_rank_has_its_environments_buffers_and_running_returns_of_its_own():
    policy = {"name": "actor_critic", "actor": NET, "critic": NET, "normalize_obs": True}
    changes = {"algorithm": {"name": "ppo", "cfg": {"normalize_reward": True}}, "policy": policy}
    for cfg, also in (
        (replaying(**changes), {"norm/reward/running"}),
        (replaying(), {"replay/steps/obs", "replay/written"}),
    ):
        state = init_state(cfg)
        names = set(_per_rank_tensors(state, kinds_of(build(cfg))))
        fields = {
            "/".join((name, str(key)))
            for name in ("env", "episode", "exploration")
            if name in state
            for key in cast(TensorDict, state[name]).keys(True, True)
        }
        assert fields | also <= names
        assert {name.split("/")[0] for name in names - fields} == {sorted(also)[0].split("/")[0]}
        assert not names & {"replay/cursor", "norm/reward/moments/count", "key", "sample_step"}


MEASURED = """
import json, sys, torch
sys.path.insert(0, "tests")
torch.set_num_threads(1)
from torch.profiler import ProfilerActivity, profile
from support.replay_agent import replaying
from support.small_runs import NET
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, iterations

def allocated(fn):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out = fn()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    now = most = 0
    for size in sizes:
        now += size
        most = max(most, now)
    return out, sum(size for size in sizes if size > 0), most

cfg = replaying(**{"trainer.compile": sys.argv[1], "trainer.iterations": 6})
if sys.argv[2] == "uniform":
    cfg = cfg.replace(**{"algorithm.cfg.capacity": 1_000_000, "algorithm.cfg.padding": 1100})
else:
    dqn = {"capacity": 1_000_000, "batch_size": 128, "learning_starts": 0, "n_step": 3, "prioritized": {}}
    cfg = cfg.replace(algorithm={"name": "dqn", "cfg": dqn}, policy={"name": "q_network", "critic": NET})
"""

ITERATED = (
    MEASURED
    + """
records = iterations(build(cfg), init_state(cfg), cfg)
for _ in range(4):  # compiles, and settles
    state = next(records)["state"]
size = sum(x.numel() * x.element_size() for x in state["replay"].values(True, True))
taken = [allocated(lambda: next(records))[1:] for _ in range(8)]
(_, copied, _) = allocated(lambda: state["replay"].clone())
print(json.dumps([size, *map(max, zip(*taken)), copied]))
"""
)


CHECKED = (
    MEASURED
    + """
from ecrl.loop.iteration import check_state
state, run = init_state(cfg), build(cfg)
print(allocated(lambda: check_state(run, state, cfg))[1])
other = build(cfg.replace(**{"algorithm.cfg.capacity": 2_000_000}))
try:
    check_state(other, state, cfg)
except ValueError as error:
    print(error)
"""
)


def test_a_state_with_a_buffer_is_checked_without_another_buffer():
    done = subprocess.run([sys.executable, "-c", CHECKED, "off", "uniform"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    taken, message = done.stdout.splitlines()
    assert 0 < int(taken) < 2**22
    assert message.startswith("state: replay/final/obs is [668, 3, 4], the config makes it [1335, 3, 4]; ")


MEBIBYTE = 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "draws"),
    [
        ("off", "prioritized"),
        pytest.param("off", "uniform", marks=pytest.mark.long),
        pytest.param("on", "prioritized", marks=pytest.mark.long),
        pytest.param("on", "uniform", marks=pytest.mark.long),
    ],
)
def test_an_iteration_with_a_million_steps_in_the_buffer_allocates_little(form, draws):
    """With uniform draws, the buffer has more than a GiB. A compiled iteration allocates one new sum tree of 16 MiB.

    An eager iteration copies the tree in each call of `tree_set`. At most three copies exist at once.
    """
    done = subprocess.run([sys.executable, "-c", ITERATED, form, draws], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    size, total, most, copied = json.loads(done.stdout.splitlines()[-1])
    assert size > (2**30 if draws == "uniform" else 2**25)
    assert copied >= 0.99 * size, "a copy of the buffer is seen by this measurement"
    if (form, draws) == ("off", "prioritized"):
        assert 0 < most < 3 * 16 * MEBIBYTE + MEBIBYTE
    else:
        assert 0 < total < 20 * MEBIBYTE


@pytest.mark.parametrize("gain", [None, 1.0])
def test_a_layer_of_more_than_a_mebibyte_is_trained(gain):
    """The state that a run is checked against has no memory for large tensors, so their initial values are skipped."""
    wide = {"network_cfg": {"hidden_sizes": [500, 700, 500], "orthogonal_init": gain}}
    cfg = small(**{"policy.actor": wide, "trainer.iterations": 1})
    start = init_state(cfg)
    record = list(train_iter(start, cfg))[-1]
    assert any(x.numel() == 350_000 for x in start["params"].values(True, True))
    assert not same(start["params"], record["state"]["params"])
