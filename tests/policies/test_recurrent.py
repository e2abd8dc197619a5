"""Policies with memory: a recurrent one learns what no other can, and its memory is the same wherever it is used."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.checks import close
from support.recurrent_agent import remembering
from support.small_runs import NET, last_state, same, small
from tensordict import TensorDict
from torch.func import vmap

import ecrl
from ecrl import rng
from ecrl.algorithms.core import collect, step_keys
from ecrl.algorithms.minibatch_sgd import sizes_of
from ecrl.algorithms.rows import rows_of
from ecrl.algorithms.state_kinds import Kind, leaf_kinds
from ecrl.compile.scan import scan_op
from ecrl.compile.trace import traced
from ecrl.errors import ConfigError
from ecrl.kernels import place_at_truncations
from ecrl.loop.buffers import kinds_of
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, reopened, train_iter
from ecrl.policies import acting_params
from ecrl.policies.core import Policy, no_carry
from ecrl.pytree import flatten
from ecrl.run.rank_shards import _per_rank_tensors
from ecrl.run.video import _first_envs

GRPO = {"name": "grpo", "cfg": {"group_size": 4, "n_epochs": 1, "batch_size": 64, "kl_coef": 0.1}}
END = torch.tensor([[[0.0, 1.0]]])  # the last observation of every episode
SHORT = {"trainer.num_envs": 8, "trainer.iterations": 3}


def mean_return(cfg):
    return ecrl.evaluate(last_state(cfg), cfg)["eval/avg_reward"]


def test_a_recurrent_policy_remembers_the_cue():
    assert mean_return(remembering()) >= 0.95


def test_a_policy_without_memory_cannot():
    feed_forward = {"name": "actor_critic", "actor": NET, "critic": NET}
    assert 0.3 < mean_return(remembering(**{"policy": feed_forward, "trainer.iterations": 8})) < 0.7


def test_memory_with_nan_restarts_if_updates_are_skipped():
    sizes = {"trainer.iterations": 3, "trainer.buffer_size": 1, "algorithm.cfg.batch_size": 16}
    cfg = remembering(**sizes, **{"trainer.finite_guard": "skip"})
    state = init_state(cfg).clone()
    memory = state["carry", "h"].clone()
    memory[1] = torch.nan
    state["carry", "h"] = memory
    with pytest.warns(UserWarning, match="NaN or infinity in action"):
        records = [r for r in train_iter(state, cfg) if r["log_type"] == "train"]
    assert [float(r["logs"]["skipped_updates"]) for r in records] == [1.0, 0.0, 0.0]
    assert all(r["state"]["carry", "h"].isfinite().all() for r in records)


def unrolled(policy, params, memory, rollout, env):
    """Log-probability, value and value at a time limit of each step of one environment, one step at a time."""
    initial, rows = policy.init_carry(params, 1), []
    for t in range(rollout.shape[1] - 1):
        step = rollout[env : env + 1, t : t + 1]
        one = TensorDict({name: step[name] for name in ("obs", "action", "done")}, [1, 1])
        log_prob, _ = policy.evaluate(params, memory, one)
        now, _ = policy.value(params, memory, one, None)
        memory, _ = policy.act(params, memory, step["obs"][:, 0], None)
        reached = one.copy().set("obs", END)
        rows.append((log_prob.item(), now.item(), policy.value(params, memory, reached, None)[0].item()))
        memory = initial if step["done"].item() else memory
    return torch.tensor(rows).unbind(1)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("normalize", [False, True])
def test_values_and_log_probabilities_follow_the_memory_of_acting(end, normalize):
    changes = {"env": {"name": "remember_cue", "cfg": {"end": end}}, "policy.normalize_obs": normalize}
    cfg = remembering(**SHORT, **changes)
    run, state = build(cfg), last_state(cfg)
    assert state["carry", "h"].abs().sum() > 0
    after, batch = collect(run, state)
    params, rollout = acting_params(state["params"], state["norm"]), batch["steps"]
    assert batch["carry"].shape == (8, 1) and torch.equal(batch["carry", "h"][:, 0], state["carry", "h"])
    rows = rows_of(run, batch)
    assert rows.shape == (8,) and rows["obs"].shape == (8, 8, 2)
    close(run.policy.evaluate_rows(params, rows)[0], rollout["sample_log_prob"][:, :-1])
    close(run.policy.value_rows(params, rows), rollout["value"][:, :-1])
    for env in range(8):
        memory = state["carry"][env : env + 1]
        log_prob, values, finals = unrolled(run.policy, params, memory, rollout, env)
        close(rollout["sample_log_prob"][env, :-1], log_prob)
        close(rollout["value"][env, :-1], values)
        expected = torch.where(rollout["truncated"][env, :-1], finals, 0.0)
        close(rollout["final_value"][env, :-1], expected)
    assert rollout["final_value"].any() == (end == "truncated")
    ended, initial = rollout["done"][:, -2], run.policy.init_carry(params, 8)["h"]
    assert torch.equal(after["carry", "h"][ended], initial[ended])


@pytest.mark.parametrize("length", [None, 2])
def test_final_states_have_the_memory_after_acting(length):
    """Episodes have 3 steps, so 8 steps have 3 slots. A loop of single steps computes memory and value of each."""
    ends = {"env": {"name": "remember_cue", "cfg": {"end": "truncated"}}, "algorithm.cfg.segment_length": length}
    cfg = remembering(**SHORT, **ends)
    run, state = build(cfg), last_state(cfg)
    _, batch = collect(run, state)
    params, steps, final = state["params"], batch["steps"], batch["final"]
    assert final.shape == (8, 3) and {*final.keys()} == {"obs", "carry", "value"}
    for env in range(8):
        memory, initial, slot = state["carry"][env : env + 1], run.policy.init_carry(params, 1), 0
        for t in range(8):
            memory, _ = run.policy.act(params, memory, steps["obs"][env : env + 1, t], None)
            if steps["truncated"][env, t]:
                end = TensorDict({"obs": END, "done": torch.zeros(1, 1).bool()}, [1, 1])
                close(final["obs"][env, slot], END[0, 0])
                close(final["carry", "h"][env, slot], memory["h"][0])
                close(final["value"][env, slot], run.policy.value(params, memory, end, None)[0][0, 0])
                memory, slot = initial, slot + 1
        assert slot >= 2
    assert torch.equal(place_at_truncations(final["value"], steps["truncated"]), steps["final_value"])


SEGMENTS = [(8, 4), (8, 2), (8, 1), (9, 3), (8, 8)]  # episodes have 3 steps: they end inside, or at every border


@pytest.mark.parametrize(("size", "length"), SEGMENTS)
@pytest.mark.parametrize("end", ["terminated", "truncated", "never"])
def test_segments_start_from_the_memory_of_acting(size, length, end):
    ends = {} if end == "never" else {"env": {"name": "remember_cue", "cfg": {"end": end}}}
    cfg = remembering(**{**SHORT, **ends, "trainer.buffer_size": size, "trainer.iterations": 2})
    cut, rows_per_env = cfg.replace(**{"algorithm.cfg.segment_length": length}), size // length
    whole, run, state = build(cfg), build(cut), last_state(cfg)
    if end == "never":
        whole, run = (x._replace(env=replace(x.env, step=partial(endless, x.env))) for x in (whole, run))
    params, memories = state["params"], []
    _, batch = collect(run, state)
    _, expected = collect(whole, state)
    rollout = batch["steps"]
    for name in ("sample_log_prob", "value", "final_value"):
        close(rollout[name], expected["steps", name])
    rows = rows_of(run, batch)
    assert rows.shape == (8 * rows_per_env,) and rows["obs"].shape == (8 * rows_per_env, length, 2)
    memory, initial = state["carry"], run.policy.init_carry(params, 8)["h"]
    for t in range(size):
        memories += [memory["h"]] if t % length == 0 else []
        memory, _ = run.policy.act(params, memory, rollout["obs"][:, t], None)
        memory = TensorDict({"h": torch.where(rollout["done"][:, t, None], initial, memory["h"])}, [8])
    assert batch["carry"].shape == (8, rows_per_env)
    close(batch["carry", "h"], torch.stack(memories, 1))
    close(rows["carry", "h"], torch.stack(memories, 1).flatten(0, 1))
    close(run.policy.evaluate_rows(params, rows)[0].reshape(8, size), rollout["sample_log_prob"][:, :-1])
    close(run.policy.value_rows(params, rows).reshape(8, size), rollout["value"][:, :-1])
    assert torch.equal(rows["action"].reshape(8, size), rollout["action"][:, :-1])


def endless(env, state, action, noise):
    after = env.step(state, action, noise)
    return after.update({name: torch.zeros_like(after[name]) for name in ("terminated", "truncated")})


def test_a_segment_after_the_end_of_an_episode_starts_from_a_new_memory():
    cfg = remembering(**{**SHORT, "trainer.buffer_size": 9, "algorithm.cfg.segment_length": 3, "trainer.iterations": 1})
    run, state = build(cfg), last_state(cfg)
    _, batch = collect(run, state)
    assert batch["steps", "done"][:, 2].all() and batch["steps", "done"][:, 5].all()
    initial = run.policy.init_carry(state["params"], 8)["h"]
    assert torch.equal(batch["carry", "h"], initial.unsqueeze(1).expand(8, 3, 8))


@pytest.mark.parametrize("length", [1, 2, 4])
def test_segments_are_the_rows_of_minibatches(length):
    cfg = remembering(**{**SHORT, "algorithm.cfg.segment_length": length})
    run = build(cfg)
    assert run.static.row_steps == length and run != build(remembering(**SHORT))
    few = cfg.replace(**{"algorithm.cfg.batch_size": 4})
    steps = build(few).algorithm.gradient_steps
    assert steps is not None and steps(build(few).static) == 4 * (8 * 8 // 4 if length < 4 else 16)
    assert not same(last_state(cfg)["params"], last_state(remembering(**SHORT))["params"])


def test_short_segments_solve_the_memory_probe_if_they_hold_the_cue():
    changes = {"trainer.buffer_size": 9, "algorithm.cfg.segment_length": 3}
    assert mean_return(remembering(**changes)) >= 0.95
    assert mean_return(remembering(**{"algorithm.cfg.segment_length": 4})) >= 0.95


def test_segments_that_do_not_fit_are_refused():
    key = "algorithm.cfg.segment_length"
    with pytest.raises(ConfigError, match=f"^{key}: 3 does not divide trainer.buffer_size 8; use a divisor$"):
        build(remembering(**{key: 3}))
    with pytest.raises(ConfigError, match=f"^{key}: 2, but policy actor_critic learns from single steps; leave it out"):
        build(small(**{key: 2}))
    run, state = build(remembering(**SHORT)), init_state(remembering(**SHORT))
    with pytest.raises(ValueError, match="segment_length is 5, expected a divisor of the 8 steps"):
        collect(run._replace(static=run.static._replace(row_steps=5)), state)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_a_compiled_run_with_segments_equals_an_eager_one():
    changes = {**SHORT, "algorithm.cfg.segment_length": 2, "env.cfg.end": "truncated"}
    eager, compiled = (last_state(remembering(**changes, **{"trainer.compile": form})) for form in ("off", "on"))
    for name, leaf in eager["params"].items():
        close(compiled["params", name], leaf, tol=1e-4)
    run = build(remembering(**changes, **{"trainer.compile": "on"}))
    _, batch = collect(run, eager)
    _, expected = collect(build(remembering(**changes)), eager)
    close(rows_of(run, batch)["carry", "h"], rows_of(run, expected)["carry", "h"])
    counts = batch["steps", "truncated"].sum(1)
    assert batch["final"].shape == (8, 3) and counts.min() >= 2, "episodes of 3 steps, 8 steps"
    for name in ("obs", ("carry", "h"), "value"):
        for env, count in enumerate(counts.tolist()):
            close(batch["final", name][env, :count], expected["final", name][env, :count])


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("limit", ["_CPU_ROWS", "_CPU_BYTES"])
def test_values_of_long_sequences_come_in_chunks_of_environments(end, limit, monkeypatch):
    """A sequence here has 9 steps, and 275 or 395 bytes. So 8 environments are 3 chunks of 3."""
    size = 27 if limit == "_CPU_ROWS" else 3 * (275 if end == "terminated" else 395)
    cfg = remembering(**SHORT, **{"env": {"name": "remember_cue", "cfg": {"end": end}}})
    run, state = build(cfg), last_state(cfg)
    whole, sizes = collect(run, state)[1]["steps"], []

    def watched(params, carry, steps, final):
        sizes.append(len(steps))
        assert len(carry["h"]) == len(steps) and (final is None or len(final) == len(steps))
        return run.policy.value(params, carry, steps, final)

    monkeypatch.setattr(f"ecrl.kernels.scan_loop.{limit}", size)
    in_chunks = collect(run._replace(policy=replace(run.policy, value=watched)), state)[1]["steps"]
    assert sizes == [3, 3, 3]
    for name in ("value", "final_value"):
        close(in_chunks[name], whole[name])
    assert whole["final_value"].any() == (end == "truncated")


def test_the_carry_is_of_kind_environment_and_absent_without_memory():
    cfg = remembering(**SHORT)
    kinds = leaf_kinds(init_state(cfg), kinds_of(build(cfg)))
    assert kinds["carry", "h"] is Kind.ENVIRONMENT
    assert "carry" not in init_state(small()) and "carry" not in collect(build(small()), init_state(small()))[1]


def test_each_rank_saves_the_memory_of_its_environments():
    cfg = remembering(**SHORT)
    assert "carry/h" in _per_rank_tensors(init_state(cfg), kinds_of(build(cfg)))


def test_a_repeated_rollout_starts_from_the_memory_of_its_environments(monkeypatch):
    monkeypatch.setattr(
        "ecrl.run.video._add_view", lambda after, before, many: after
    )  # this environment has nothing to draw
    cfg = remembering(**SHORT)
    run, state = build(cfg), last_state(cfg)
    first = _first_envs(state, cfg, 3)
    few = run._replace(static=run.static._replace(num_envs=3))
    close(collect(few, first)[1]["steps", "value"], collect(run, state)[1]["steps", "value"][:3])


def test_environments_that_start_again_have_a_new_memory():
    cfg = remembering(**{"env": "gymnasium:CartPole-v1", "trainer.num_envs": 2})
    run = build(cfg)
    state, _ = collect(run, init_state(cfg))
    ecrl.close(state, cfg)
    with pytest.warns(UserWarning, match="their episodes restart"):
        again = reopened(run, state)
    assert torch.equal(again["carry", "h"], run.policy.init_carry(state["params"], 2)["h"])
    assert not torch.equal(again["carry", "h"], state["carry", "h"])
    ecrl.close(again, cfg)


def test_a_resumed_run_keeps_its_memory(tmp_path):
    cfg = remembering(**SHORT)
    first = last_state(cfg.replace(**{"trainer.iterations": 2}))
    assert first["env", "elapsed"].any(), "episodes cross the boundary"
    ecrl.save(tmp_path / "middle", first, cfg)
    state, loaded = ecrl.load(tmp_path / "middle")
    assert same(last_state(loaded, state), last_state(cfg))
    forgotten = state.clone().update({"carry": init_state(cfg)["carry"]})
    assert not same(last_state(loaded, forgotten), last_state(cfg)), "the memory matters"


@pytest.mark.parametrize("length", [None, 4])
def test_the_first_minibatch_has_the_policy_that_acted(length):
    for algorithm in ({}, {"algorithm": GRPO}):
        own = {"algorithm.cfg.n_epochs": 1, "algorithm.cfg.segment_length": length}
        cfg = remembering(**{**SHORT, **algorithm}).replace(**own)
        logs = make_iteration(cfg)(make_iteration(cfg)(init_state(cfg))[0])[1]["train"]
        assert abs(float(logs["approx_kl"])) < 1e-6, algorithm or "ppo"


def test_minibatches_keep_sequences_whole():
    choices = build(remembering()).algorithm.choices.sgd
    assert sizes_of(choices, 16, 8) == [8, 8]
    assert sizes_of(choices._replace(batch_size=100), 5, 100) == [1, 1, 1, 1, 1]
    assert sizes_of(choices._replace(batch_size=None), 5, 100) == [1, 1, 1, 1, 1], "the default of 64 holds no sequence"
    cfg = remembering(**{"algorithm.cfg.normalize_advantage": "minibatch", **SHORT})
    assert last_state(cfg)["params", "W"].isfinite().all()


@pytest.mark.parametrize("algorithm", [{}, {"algorithm": GRPO}])
def test_a_minibatch_shorter_than_a_sequence_is_refused(algorithm):
    message = (
        "algorithm.cfg.batch_size: 5 is below 8, the length of the sequences that a minibatch "
        "keeps whole; use at least 8, or shorter sequences: set algorithm.cfg.segment_length for a policy with "
        "memory, or lower trainer.buffer_size if algorithm.cfg.ratio is sequence"
    )
    with pytest.raises(ConfigError) as error:
        init_state(remembering(**algorithm).replace(**{"algorithm.cfg.batch_size": 5}))
    assert str(error.value) == message


def test_a_run_with_memory_counts_its_gradient_steps_by_sequences():
    run = build(remembering(**{"algorithm.cfg.batch_size": 8, "algorithm.cfg.n_epochs": 2}))
    steps = run.algorithm.gradient_steps
    assert run.static.row_steps == 8 and steps is not None and steps(run.static) == 2 * 16
    assert build(small()).static.row_steps == 1


def test_grpo_starts_every_rollout_with_a_new_memory():
    cfg = remembering(**{"algorithm": GRPO, **SHORT})
    state = last_state(cfg)
    _, batch = build(cfg).algorithm.iterate.collect(build(cfg), state)
    initial = build(cfg).policy.init_carry(state["params"], 8)["h"]
    assert torch.equal(batch["carry", "h"][:, 0], initial) and not torch.equal(state["carry", "h"], initial)


def test_seeds_under_vmap_have_memories_of_their_own():
    cfg = remembering(**SHORT)
    iteration, keys = make_iteration(cfg), [rng.key(1), rng.key(2)]
    single = [iteration(iteration(init_state(cfg, key))[0])[0] for key in keys]
    both = torch.stack([init_state(cfg, key) for key in keys])
    both = vmap(iteration)(vmap(iteration)(both)[0])[0]
    for i, state in enumerate(single):
        close(both["carry", "h"][i], state["carry", "h"].detach(), tol=1e-4)
        close(both["params", "W"][i], state["params", "W"].detach(), tol=1e-4)


@pytest.mark.parametrize("length", [None, 10])
def test_memory_restarts_in_host_environments(length):
    sizes = {"trainer.num_envs": 2, "trainer.buffer_size": 40, "algorithm.cfg.segment_length": length}
    cfg = remembering(**{"env": "gymnasium:CartPole-v1", **sizes})
    run, state = build(cfg), init_state(cfg)
    after, batch = collect(run, state)
    assert batch["steps", "done"].any()
    rows = rows_of(run, batch)
    log_prob = run.policy.evaluate_rows(state["params"], rows)[0].reshape(2, 40)
    close(log_prob, batch["steps", "sample_log_prob"][:, :-1], tol=1e-4)
    assert not torch.equal(after["carry", "h"], state["carry", "h"])
    ecrl.close(after, cfg)


def test_memory_restarts_after_a_step_that_does_not_count():
    cfg = remembering(**SHORT)
    run, state = build(cfg), init_state(cfg)
    state = state.clone()
    state["env", "mask"] = torch.ones(8, dtype=torch.bool)

    def step(world, action, noise):
        after = run.env.step(world.exclude("mask"), action, noise)
        return after.set("mask", after["elapsed"] != 1)

    env = replace(run.env, step=step)
    _, batch = collect(run._replace(env=env), state)
    rows, rollout = rows_of(run, batch), batch["steps"]
    assert torch.equal(rows["done"], (rollout["done"] | ~rollout["mask"])[:, :-1])
    close(run.policy.evaluate_rows(state["params"], rows)[0], rollout["sample_log_prob"][:, :-1])


NUMBERS = {"env": {"name": "remember_cue", "cfg": {"action": "number"}}}
APG = {"name": "apg", "cfg": {"gamma": 1.0, "learning_rate": 0.05, "deterministic_actions": True}}


def test_apg_learns_what_to_remember():
    cfg = remembering(**{**NUMBERS, "algorithm": APG, "trainer.iterations": 60, "trainer.buffer_size": 9})
    assert mean_return(cfg) > -0.1


def by_tape(cfg, state, length):
    """The gradient of APG's objective, by one graph over all steps with memory and states detached between segments."""
    run, (world_keys, action_keys) = build(cfg), step_keys(build(cfg), state)
    params = state["params"].apply(lambda p: p.clone().requires_grad_())
    memory, world, total = state["carry"], state["env"], 0.0
    for t in range(cfg.trainer.buffer_size):
        if t % length == 0:
            memory, world = memory.detach(), world.detach()
        steps = TensorDict({"obs": world["obs"].unsqueeze(1), "done": torch.zeros(8, 1).bool()}, [8, 1])
        before = memory
        memory, out = run.policy.act(params, before, world["obs"], run.policy.draw(action_keys[t]))
        entropy = run.policy.evaluate(params, before, steps.set("action", out["action"].unsqueeze(1)))[1]
        world = run.env.step(world, out["action"], run.env.draw(world_keys[t]))
        total = total + world["reward"].mean() + 0.3 * entropy.mean()
        done = (world["terminated"] | world["truncated"]).unsqueeze(-1)
        first = run.policy.init_carry(params, 8)["h"]
        memory = TensorDict({"h": torch.where(done, first, memory["h"])}, [8])
    leaves = dict(params.items())
    grads = torch.autograd.grad(total, [*leaves.values()], allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(leaves.items(), grads, strict=True)}


@pytest.mark.parametrize("length", [None, 4, 2, 1])
def test_the_gradient_of_apg_crosses_memory_within_a_segment(length):
    plain = {"optimizer": {"name": "sgd", "learning_rate": 1.0}, "max_grad_norm": 1e9, "ent_coef": 0.3, "gamma": 1.0}
    algorithm = {"name": "apg", "cfg": {**plain, "segment_length": length}}
    cfg = remembering(**{**SHORT, **NUMBERS, "algorithm": algorithm})
    run = build(cfg)
    state, _ = collect(run, init_state(cfg))
    assert state["carry", "h"].any() and state["env", "elapsed"].any(), "an episode crosses the boundary"
    after, _, _ = run.algorithm.iterate(run, state, TensorDict({}, []))
    expected = by_tape(cfg, state, length or 8)
    assert expected["U"].any() and expected["h0"].any() == (length in (None, 4))
    for name, gradient in expected.items():
        close(after["params", name] - state["params", name], gradient)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_apg_with_memory_compiled_equals_eager():
    cfg = remembering(**{**SHORT, **NUMBERS, "algorithm": APG})
    for name, leaf in last_state(cfg)["params"].items():
        close(last_state(cfg.replace(**{"trainer.compile": "on"}))["params", name], leaf, tol=1e-4)


def test_a_policy_with_memory_needs_the_unit_sequence():
    parts = dict.fromkeys(("init", "draw", "act", "evaluate", "value"), no_carry)
    with pytest.raises(ValueError, match="a policy with init_carry has memory; set its unit to 'sequence'"):
        Policy(**parts, init_carry=lambda params, num_envs: TensorDict({}, []))
    with pytest.raises(ValueError, match="unit is 'episode', expected 'step' or 'sequence'"):
        Policy(**parts, unit="episode")  # pyright: ignore


def graph_of_gradient(length):
    """Trace the gradient of the log-probabilities of `length` steps, as an algorithm's loss takes it."""
    cfg = remembering(**SHORT, **{"trainer.buffer_size": length})
    run, state = build(cfg), init_state(cfg)
    rows = rows_of(run, collect(run, state)[1])

    def gradient(params, rows):
        return torch.func.grad(lambda params: run.policy.evaluate_rows(params, rows)[0].sum())(params)

    leaves, structure = flatten((state["params"], rows))
    return traced(gradient, structure, leaves)[0], gradient, state["params"], rows


def test_the_gradient_of_a_sequence_is_a_loop_of_any_length():
    graph, gradient, params, rows = graph_of_gradient(6)
    longer = graph_of_gradient(48)[0].graph
    assert abs(len(longer.nodes) - len(graph.graph.nodes)) < 6  # more numbers are stored for more readers
    assert len(longer.find_nodes(op="call_function", target=scan_op)) == 2  # forward and backward
    leaves, _ = flatten(gradient(params, rows))
    for actual, expected in zip(graph(*flatten((params, rows))[0]), leaves, strict=True):
        close(actual, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_a_compiled_run_equals_an_eager_one_and_learns():
    eager, compiled = (remembering(**{"trainer.compile": form}) for form in ("off", "on"))
    states = [[record["state"] for record in train_iter(init_state(cfg), cfg)] for cfg in (eager, compiled)]
    for one, other in zip(*(states_of_run[:4] for states_of_run in states), strict=True):
        close(other["params", "W"], one["params", "W"], tol=1e-4)
        close(other["carry", "h"], one["carry", "h"], tol=1e-4)
    assert ecrl.evaluate(states[1][-1], eager)["eval/avg_reward"] >= 0.95
