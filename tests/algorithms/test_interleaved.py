"""Turns of steps and learning as one loop: the same bits for any length of an iteration, from rows of a ring."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from support.checks import close
from support.graphs import traced_only
from support.replay_agent import N, T, replaying, stored
from support.replay_agent import turn as td_turn
from support.small_runs import NET, last_state, same
from tensordict import TensorDict

import ecrl
import ecrl.loop.build as build_module
from ecrl import rng
from ecrl.algorithms import interleaved
from ecrl.algorithms.core import counted_after
from ecrl.algorithms.interleaved import check_replay, take_steps
from ecrl.algorithms.state_kinds import Kind, merge
from ecrl.config import Config
from ecrl.config.model import ConfigModel
from ecrl.envs import Env, state_of, time_limit
from ecrl.errors import ConfigError
from ecrl.loop.buffers import borrowed_leaves, committed, kinds_of
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, iterations, make_iteration, phase_of, reopened, train_iter
from ecrl.pytree import flatten, mapped, replaced
from ecrl.registry import register_env
from ecrl.run.checkpoint import load, save
from ecrl.run.profiler import Times, with_timers
from ecrl.spaces import Discrete, box


def learnt(state: TensorDict) -> TensorDict:
    """The state without counts of iterations, and without slots of episodes that are not filled yet."""
    episode = cast(TensorDict, state["episode"])
    fields = {name: episode[name].where(episode["finished"], 0.0) for name in ("finished_return", "finished_length")}
    return replaced(state.exclude("update_step", "iterations"), {"episode": replaced(episode, fields)})


def weights(state: TensorDict) -> list[tuple[Any, torch.Tensor]]:
    """The parameters with their paths."""
    return [*cast(TensorDict, state["params"]).items(True, True)]


def of_length(size: int, steps: int, **changes) -> Config:
    """A run of so many steps of each environment, in iterations of `size` steps."""
    return replaying(**{"trainer.buffer_size": size, "trainer.iterations": steps // size, **changes})


LEARNING = {"algorithm.cfg.learning_starts": 16 * N, "algorithm.cfg.capacity": 8 * N + 5}


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, (1, 4, 8)),
        ({"policy.normalize_obs": True, "algorithm.cfg.gradient_steps": 2}, (1, 8)),
        ({"algorithm.cfg.train_freq": 4, "algorithm.cfg.lr_scheduler": {"name": "linear"}}, (4, 8)),
    ],
)
def test_the_length_of_an_iteration_changes_no_bit(changes, sizes):
    """The ring is overwritten several times, and learning starts in between."""
    first, *others = (last_state(of_length(size, 48, **LEARNING, **changes)).clone() for size in sizes)
    assert not same(first["params"], init_state(of_length(4, 48))["params"])
    assert int(first["replay", "cursor"]) == 48
    for other in others:
        assert same(learnt(first), learnt(other))


@pytest.fixture
def graphs():
    with traced_only() as names:
        yield names


def test_each_phase_is_one_graph_and_the_length_of_an_iteration_changes_no_bit_of_it(graphs):
    eager, states = last_state(of_length(8, 32, **LEARNING)), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # compiling the second graph must not warn
        for size in (1, 8):
            cfg = of_length(size, 32, **LEARNING, **{"trainer.compile": "on"})
            before = len(graphs)
            states.append(last_state(cfg).clone())
            assert graphs[before:] == ["_iteration_of_leaves"] * 2, "one for collecting, one for learning"
        last_state(
            cfg.replace(**{"trainer.seed": 7, "algorithm.cfg.epsilon": 0.3, "algorithm.cfg.learning_starts": 8 * N})
        )
        assert len(graphs) == 4, "another seed, epsilon and start of learning compile nothing"
    for name, weight in weights(eager):
        close(states[1]["params", *name], weight, tol=1e-5)
    assert same(learnt(states[0]), learnt(states[1]))


def noisy(params, exploration, out, noise):
    """Keep a noise process, noise' = 0.5 noise + coin, and report it as a field of the steps."""
    now = 0.5 * exploration["noise"]["x"] + noise["coin"]
    return replaced(exploration, {"noise": TensorDict({"x": now}, now.shape)}), out.copy().set("seen", now.clone())


def first_noise(params, num_envs):
    return TensorDict({"noise": TensorDict({"x": torch.full((num_envs,), 3.0)}, [num_envs])}, [num_envs])


def exploring(form: str, first: Any = first_noise) -> tuple[Any, TensorDict, Any]:
    """A run of 30 steps with the noise process, its state, and the noise of its steps."""
    cfg = replaying(**{"trainer.compile": form, "trainer.buffer_size": 30, "algorithm.cfg.capacity": 200})
    run, state = build(cfg), init_state(cfg)
    run = run._replace(policy=replace(run.policy, explore=noisy, init_exploration=first))
    fields = {"epsilon": torch.linspace(0.1, 0.3, N), "noise": TensorDict({"x": torch.arange(float(N))}, [N])}
    noise = run.policy.draw(rng.split(rng.key(1), 30 * N).reshape(30, N)), run.env.draw(rng.split(rng.key(2), 30 * N))
    noise = noise[0], noise[1].reshape(30, N)
    return run, replaced(state, {"exploration": TensorDict(fields, [])}), noise


def test_a_noise_process_restarts_with_the_episode_and_numbers_do_not():
    run, state, noise = exploring("off")
    after, steps = take_steps(run, state, noise)
    assert steps["done"].any(0).all() and not steps["done"][-1].any()
    x = torch.arange(float(N))
    for t in range(30):
        x = 0.5 * x + noise[0]["coin"][t]
        close(steps["seen"][t], x)
        x = torch.where(steps["done"][t], torch.tensor(3.0), x)
    close(after["exploration", "noise", "x"], x)
    assert torch.equal(after["exploration", "epsilon"], state["exploration", "epsilon"])
    ended = int(steps["done"].any(1).nonzero()[0])
    for t in range(ended + 1):
        one = mapped(lambda x, t=t: x[t : t + 1], noise, batch=lambda size: (1, *size[1:]))
        state, _ = take_steps(run, state, one)
    expected = torch.where(steps["done"][ended], torch.tensor(3.0), steps["seen"][ended])
    assert torch.equal(state["exploration", "noise", "x"], expected), "the initial noise, bit for bit"


def test_the_restart_of_a_noise_process_in_a_graph_equals_the_eager_one(graphs):
    eager, compiled = (take_steps(*exploring(form)) for form in ("off", "on"))
    assert graphs == ["_take_steps"]
    for name in ("env", "exploration"):
        for one, other in zip(*(flatten(after[name])[0] for after, _ in (compiled, eager)), strict=True):
            close(one, other)
    close(compiled[1]["seen"], eager[1]["seen"])


def test_a_noise_process_that_the_state_lacks_is_refused():
    run, state, noise = exploring("off", lambda params, num_envs: TensorDict({"drift": torch.zeros(num_envs)}))
    message = "policy replay_q: init_exploration returns the field drift, which state['exploration'] lacks; add it in"
    with pytest.raises(ConfigError) as error:
        take_steps(run, state, noise)
    assert str(error.value).startswith(message)


WRONG_FIRST = {
    "rows": (TensorDict({"x": torch.ones(N, 1)}, [N]), "returns noise/x as float32 [3, 1], expected float32 [3]"),
    "dtype": (TensorDict({"x": torch.ones(N).double()}), "returns noise/x as float64 [3], expected float32 [3]"),
}


@pytest.mark.parametrize("case", WRONG_FIRST)
def test_a_noise_process_that_differs_from_the_one_of_the_state_is_refused(case):
    first, line = WRONG_FIRST[case]
    run, state, noise = exploring("off", lambda params, num_envs: TensorDict({"noise": first}))
    with pytest.raises(ConfigError) as error:
        take_steps(run, state, noise)
    assert (
        str(error.value)
        == f"policy replay_q: init_exploration {line}, as in state['exploration']; return such a tensor"
    )


def test_a_noise_process_without_one_of_its_parts_is_refused():
    run, state, noise = exploring("off")
    state = state.clone()
    state["exploration", "noise", "speed"] = torch.zeros(N)
    message = "policy replay_q: init_exploration does not return the field noise/speed, which state['exploration'] has"
    policy = replace(run.policy, explore=lambda params, exploration, out, noise: (exploration, out))
    with pytest.raises(ConfigError) as error:
        take_steps(run._replace(policy=policy), state, noise)
    assert str(error.value) == f"{message}; add it"


def with_noise(monkeypatch, **functions):
    """Give the policy of a run other functions, and its algorithm the noise process."""
    makes = build_module.make_policy, build_module.make_algorithm

    def algorithm(block):
        made = makes[1](block)

        def init(run, key):
            fields = made.init(run, key)
            process = first_noise(None, run.static.num_envs).apply(torch.zeros_like)
            return {**fields, "exploration": replaced(fields["exploration"], process)}

        def kept(run, state, noise, replay):
            state, steps = take_steps(run, state, noise)
            return state, stored(run, replay, steps, run.algorithm.choices.padding), steps, {}

        return replace(made, init=init, iterate=interleaved(kept), phase=None)

    monkeypatch.setattr(build_module, "make_policy", lambda *args: replace(makes[0](*args), **functions))
    monkeypatch.setattr(build_module, "make_algorithm", algorithm)
    return replaying(**{"trainer.enable_eval": False, "trainer.iterations": 2})


def test_a_run_whose_exploration_adds_a_field_to_the_output(monkeypatch):
    cfg = with_noise(monkeypatch, explore=noisy, init_exploration=first_noise)
    state, history = ecrl.train(init_state(cfg), cfg, None, progress=False)
    assert history[-1]["sample_step"] == 2 * N * T
    assert not torch.equal(state["exploration", "noise", "x"], torch.zeros(N))


EXPLORES = {
    "drops": (lambda out: out.exclude("action"), "drops fields of the output: action; return the fields that `act`"),
    "changes": (
        lambda out: out.copy().set("action", out["action"].int()),
        "changes the output's action from int64 [3] to int32 [3]; keep its shape and dtype",
    ),
    "rows": (
        lambda out: TensorDict({**dict(out.items()), "seen": torch.zeros(2)}),
        "returns seen as float32 [2], expected [3, ...]; return one entry per environment",
    ),
    "reserved": (
        lambda out: out.copy().set("reward", torch.zeros(N)),
        "returns the field reward, which is reserved for the rollout; give it another name",
    ),
    "none": (lambda out: None, "returns NoneType as the output, expected a TensorDict; return one"),
}


@pytest.mark.parametrize("case", EXPLORES)
def test_an_exploration_that_breaks_its_contract(case, monkeypatch):
    result, line = EXPLORES[case]
    cfg = with_noise(monkeypatch, explore=lambda params, exploration, out, noise: (exploration, result(out)))
    with pytest.raises(ConfigError) as error:
        next(train_iter(init_state(cfg), cfg))
    assert str(error.value).startswith(f"policy replay_q: explore {line}")


AXES = "for [steps of a turn, num_envs]; return such a tensor"
RESULTS = {  # other results of a turn, and the line
    "no replay": (
        lambda state, replay, steps, logs: (state, None, steps, logs),
        "NoneType None as the replay, expected the result of `store`; return it",
    ),
    "ring": (
        lambda state, replay, steps, logs: (state, replay.ring, steps, logs),
        "a TensorDict as the replay, expected the result of `store`; return it",
    ),
    "no steps": (
        lambda state, replay, steps, logs: (state, replay, None, logs),
        "NoneType None as the steps, expected a TensorDict; return one",
    ),
    "no reward": (
        lambda state, replay, steps, logs: (state, replay, steps.select("obs", "done"), logs),
        "steps without reward, only done, obs; add the field",
    ),
    "env-major": (
        lambda state, replay, steps, logs: (state, replay, steps.select("obs", "reward", "done").transpose(0, 1), logs),
        f"the steps' done as bool [3, 2], expected bool [2, 3] {AXES}",
    ),
    "float done": (
        lambda state, replay, steps, logs: (state, replay, steps.copy().set("done", steps["done"].float()), logs),
        f"the steps' done as float32 [2, 3], expected bool [2, 3] {AXES}",
    ),
    "integer log": (
        lambda state, replay, steps, logs: (state, replay, steps, {"taken": state["sample_step"]}),
        "the log taken as int64 [], expected a float for the mean over turns; convert it",
    ),
}


def with_turn(monkeypatch, change):
    """A run of turns of two steps with other results."""
    make = build_module.make_algorithm

    def turn(run, state, noise, replay):
        return change(*td_turn(run, state, noise, replay))

    monkeypatch.setattr(
        build_module, "make_algorithm", lambda block: replace(make(block), iterate=interleaved(turn, steps=2))
    )
    return replaying(**{"trainer.iterations": 1})


@pytest.mark.parametrize("case", RESULTS)
def test_a_turn_that_breaks_its_contract(case, monkeypatch):
    change, line = RESULTS[case]
    cfg = with_turn(monkeypatch, change)
    with pytest.raises(ConfigError) as error:
        next(train_iter(init_state(cfg), cfg))
    assert str(error.value) == f"algorithm replay_td: turn returns {line}"


def test_a_turn_without_the_executed_steps_of_the_environment_is_refused():
    def turn(run, state, noise, replay):
        state, replay, steps, logs = td_turn(run, state, noise, replay)
        return state, replay, steps.exclude("executed"), logs

    cfg = replaying(**{"trainer.iterations": 1})
    run, state = counting(build(cfg)), counted(init_state(cfg))
    with pytest.raises(ConfigError, match="takes several steps, but the replay buffer has no field executed; create"):
        next(iterations(run, replaced(state, {"replay": init_state(cfg)["replay"]}), cfg))
    run = run._replace(algorithm=replace(run.algorithm, iterate=interleaved(turn)))
    with pytest.raises(ConfigError, match=r"^algorithm replay_td: turn returns steps without executed, only action, "):
        next(iterations(run, state, cfg))


def test_a_turn_may_count_skipped_steps_as_integers(monkeypatch):
    cfg = with_turn(monkeypatch, lambda *out: (*out[:3], {"skipped_steps": torch.ones_like(out[0]["key"])}))
    *_, record = train_iter(init_state(cfg), cfg)
    assert int(record["logs"]["skipped_steps"]) == T // 2


@pytest.mark.parametrize("kinds", [{}, {"replay": Kind.ENVIRONMENT}])
def test_turns_without_a_replay_buffer_are_refused(kinds, monkeypatch):
    """The state has no buffer, or its field `replay` is declared as another kind."""
    make = build_module.make_algorithm

    def change(made):
        init = made.init if kinds else lambda run, key: {k: v for k, v in made.init(run, key).items() if k != "replay"}
        return replace(made, init=init, kinds={**made.kinds, **kinds})

    monkeypatch.setattr(build_module, "make_algorithm", lambda block: change(make(block)))
    cfg = replaying()
    with pytest.raises(ConfigError) as error:
        next(train_iter(init_state(cfg), cfg))
    assert str(error.value) == (
        "algorithm replay_td: the state lacks replay, a field of kind buffer; return the "
        "result of `new_replay` as `replay` from `init`, and add REPLAY_KINDS to `kinds`"
    )


FIRSTS = {
    "scalar": (
        lambda params, num_envs: TensorDict({"epsilon": torch.ones(())}, []),
        "returns epsilon as float32 [], expected [3, ...]; return one entry per environment",
    ),
    "tensor": (
        lambda params, num_envs: torch.ones(num_envs),
        "returns float32 [3], expected the exploration as a TensorDict; return one",
    ),
    "draws": (  # the fault under test: a draw from the global generator
        lambda params, num_envs: TensorDict({"epsilon": torch.rand(num_envs)}, [num_envs]),
        "draws random numbers from a generator of torch, so equal states give unequal results; draw them from",
    ),
}


@pytest.mark.parametrize("case", FIRSTS)
def test_a_first_exploration_that_breaks_its_contract(case, monkeypatch):
    first, line = FIRSTS[case]
    cfg = with_noise(monkeypatch, init_exploration=first)
    with pytest.raises(ConfigError) as error:
        next(train_iter(init_state(cfg), cfg))
    assert str(error.value).startswith(f"policy replay_q: init_exploration {line}")


def test_a_noise_process_restarts_with_environments_that_start_again():
    cfg = replaying(**{"env": "gymnasium:CartPole-v1"})
    run, state = build(cfg), init_state(cfg)
    policy = replace(run.policy, explore=noisy, init_exploration=first_noise)
    state = replaced(
        state,
        {
            "exploration": TensorDict(
                {"epsilon": torch.linspace(0.1, 0.3, N), **first_noise(None, N).apply(torch.zeros_like)}
            )
        },
    )
    ecrl.close(state, cfg)
    with pytest.warns(UserWarning, match="their episodes restart"):
        again = reopened(run._replace(policy=policy), state)
    assert again["exploration", "noise", "x"].tolist() == [3.0] * N
    assert torch.equal(again["exploration", "epsilon"], state["exploration", "epsilon"])
    ecrl.close(again, cfg)


def test_no_transition_leads_from_the_newest_step_to_environments_that_start_again():
    cfg = replaying(**{"env": "gymnasium:CartPole-v1", "trainer.iterations": 1})
    state = last_state(cfg).clone()
    ecrl.close(state, cfg)
    with pytest.warns(UserWarning, match="their episodes restart"):
        again = reopened(build(cfg), state)
    steps, kept = (s["replay", "steps"] for s in (state, again))
    newest = int(state["replay", "cursor"]) - 1
    ended = steps["terminated"][newest] | steps["truncated"][newest]
    assert torch.equal(kept["mask"][newest], steps["mask"][newest] & ended) and not ended.all()
    assert torch.equal(kept["mask"][:newest], steps["mask"][:newest])
    ecrl.close(again, cfg)


def test_a_noise_process_with_nan_restarts_if_the_update_is_left_out():
    def turn(run, state, noise, replay):
        state, steps = take_steps(run, state, noise)
        return state, stored(run, replay, steps, 1), steps, {"loss": torch.tensor(torch.nan)}

    def unseen_noise(params, exploration, out, noise):
        return noisy(params, exploration, out, noise)[0], out

    cfg = replaying(**{"trainer.finite_guard": "skip", "trainer.iterations": 1})
    run, first, _ = exploring("off")
    policy = replace(run.policy, explore=unseen_noise)
    run = build(cfg)._replace(policy=policy, algorithm=replace(run.algorithm, iterate=interleaved(turn)))
    state = replaced(init_state(cfg), {"exploration": first["exploration"].clone()})
    state["exploration", "noise", "x"][1] = torch.nan
    with pytest.warns(UserWarning, match="NaN or infinity in loss: the update is left out"):
        *_, record = iterations(run, state, cfg)
    noise = record["state"]["exploration", "noise", "x"]
    assert noise[1] == 3.0 and 3.0 not in noise[[0, 2]].tolist() and noise.isfinite().all()
    assert torch.equal(record["state"]["exploration", "epsilon"], first["exploration", "epsilon"])


def counted(state):
    """The state of a run whose environment reports `executed`."""
    state, steps = state.clone(), state["replay", "steps"]
    state["env", "executed"] = torch.zeros(N, dtype=torch.int64)
    state["replay", "steps", "executed"] = torch.zeros(steps.shape, dtype=torch.int64)
    return state.set("decision_step", torch.tensor(0))


def counting(run):
    """Let the steps of the environment report `executed`, by turns 1 to 3."""

    def step(state, action, noise):
        before = state["executed"]
        return run.env.step(state.exclude("executed"), action, noise).set("executed", before % 3 + 1)

    return run._replace(env=replace(run.env, step=step))


@pytest.mark.parametrize("size", [2, 4])
def test_a_turn_sees_the_steps_of_the_environment_so_far(size):
    """Each environment executes 1, 2, 3, 1, ... steps, so the first turns see 0, 3, 9, 12 for 3 environments."""
    seen = []

    def turn(run, state, noise, replay):
        seen.append((int(state["sample_step"]), int(state["decision_step"])))
        return td_turn(run, state, noise, replay)

    cfg = replaying(**{"trainer.buffer_size": size})
    run, state = counting(build(cfg)), counted(init_state(cfg))
    kinds = kinds_of(run)
    for _ in range(4 // size):
        own, borrowed = borrowed_leaves(state, kinds)
        after, writes, _ = interleaved(turn)(run, own, borrowed)
        counters = counted_after(run, own, writes["batch", "steps", "executed"])
        after = replaced(after, {**counters, "update_step": after["update_step"] + 1})
        state = merge(after, committed(run, borrowed, writes.exclude("batch"), after, torch.tensor(False)))
    assert seen == [(0, 0), (3, 3), (9, 6), (18, 9)]
    assert (int(state["sample_step"]), int(state["decision_step"])) == (21, 12)
    assert state["episode", "running_length"].tolist() == [7.0] * N


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_compiled_turns_have_the_same_bits_for_any_length_of_an_iteration():
    changes = {**LEARNING, "trainer.compile": "on"}
    first, second = (last_state(of_length(size, 48, **changes)).clone() for size in (1, 8))
    assert same(learnt(first), learnt(second))
    eager = last_state(of_length(8, 48, **LEARNING))
    for name, weight in weights(eager):
        close(second["params", *name], weight, tol=1e-5)


@pytest.mark.parametrize("saved", [1, 3])
def test_a_run_resumes_with_the_same_bits_in_either_phase(saved: int, tmp_path):
    cfg = replaying(**{"trainer.iterations": 6, "algorithm.cfg.learning_starts": 2 * N * T})
    every = [r["state"].clone() for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    logs = [set(r["logs"]) for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    assert [bool(names) for names in logs] == [False] * 2 + [True] * 4, "nothing is learnt while collecting"
    assert same(every[1]["params"], init_state(cfg)["params"]) and not same(every[2]["params"], every[1]["params"])
    save(tmp_path / "now", every[saved - 1], cfg)
    state, again = load(tmp_path / "now")
    *_, last = train_iter(state, again)
    assert same(last["state"], every[-1])


def test_vmapped_seeds_equal_single_ones_and_share_a_phase():
    cfg = replaying(**{"algorithm.cfg.learning_starts": N * T})
    iteration = make_iteration(cfg)
    states = [init_state(cfg.replace(**{"trainer.seed": seed})) for seed in range(2)]
    single: TensorDict = states[1]
    many: Any = torch.stack([state.clone() for state in states])
    for _ in range(2):
        many, _ = torch.func.vmap(iteration, randomness="error")(many)
        single, _ = iteration(single)
    one = many[1]
    assert torch.equal(one["replay", "steps", "action"], single["replay", "steps", "action"])
    for name, weight in weights(single):
        close(one["params", *name], weight)
    run, cursors = build(cfg), many["replay", "cursor"]
    assert phase_of(run, many) == "learn"
    many["replay", "cursor"] = cursors * torch.tensor([0, 1])
    assert phase_of(run, many) == "collect", "all seeds wait for the seed with the fewest steps"
    many["sample_step"], many["replay", "cursor"] = torch.tensor([0, 24]), torch.tensor([0, 24 // N])
    phases = r"^state: the seeds are in the phases \['collect', 'learn'\]; give all seeds the same sample_step"
    with pytest.raises(ConfigError, match=phases):
        torch.func.vmap(iteration)(many)


def test_a_turn_stores_its_steps_once_and_changes_no_fixed_field():
    def twice(run, state, noise, replay):
        state, replay, steps, logs = td_turn(run, state, noise, replay)
        return state, stored(run, replay, steps.set("final_obs", steps["obs"]), 1), steps, logs

    def never(run, state, noise, replay):
        state, _, steps, logs = td_turn(run, state, noise, replay)
        return state, replay, steps, logs

    def other_steps(run, state, noise, replay):
        _, _, steps, logs = td_turn(run, state, noise, replay)
        both = torch.cat([steps, steps]).set("final_obs", torch.cat([steps["obs"], steps["obs"]]))
        return state, stored(run, replay, both, 1), steps, logs

    def other_key(run, state, noise, replay):
        state, replay, steps, logs = td_turn(run, state, noise, replay)
        return replaced(state, {"key": state["key"] + 1}), replay, steps, logs

    run = build(replaying())
    own, borrowed = borrowed_leaves(init_state(replaying()), kinds_of(run))
    for turn, message in (
        (twice, "store was called twice in a turn; call it once"),
        (never, "a turn returned a replay buffer without its steps; call `store`, and return its result"),
        (other_steps, "store got 2 steps, expected the 1 steps of the turn"),
        (other_key, "field key"),
    ):
        with pytest.raises(ValueError, match=message):
            interleaved(turn)(run, own, borrowed)
    with pytest.raises(ValueError, match="interleaved needs steps >= 1, got 0"):
        interleaved(td_turn, 0)


def test_segments_that_do_not_divide_a_turn_are_refused():
    run = build(replaying(**{"trainer.buffer_size": 12, "algorithm.cfg.train_freq": 6, "algorithm.cfg.capacity": 99}))
    for length in (1, 2, 3, 6, 12):
        check_replay(run._replace(static=run.static._replace(row_steps=length)), 99)
    with pytest.raises(
        ConfigError, match=r"^algorithm.cfg.segment_length: 4 does not divide 6, the steps of a turn; use"
    ):
        check_replay(run._replace(static=run.static._replace(row_steps=4)), 99)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"algorithm.cfg.capacity": 11},
            r"^trainer.buffer_size: 4 is more than 3, the steps of each environment in a replay buffer of "
            r"capacity 11; lower it or make the capacity larger$",
        ),
        ({"algorithm.cfg.train_freq": 3}, r"^trainer.buffer_size: 4 is not a multiple of 3, the steps of a turn"),
        (
            {"algorithm.cfg.capacity": 10**9, "algorithm.cfg.padding": 10**7},
            r"^the replay buffer: 1,000,000,000 steps take",
        ),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused_before_anything_is_allocated(changes, message):
    with pytest.raises(ConfigError, match=message):
        init_state(replaying(**changes))


class ChainConfig(ConfigModel):
    """No settings."""


@register_env("endless_chain", override=True)
def endless_chain(cfg: ChainConfig) -> Env:
    """Reward 1 from the second step on, without an end. A time limit cuts it after 3 steps: V(0) = gamma V(1)."""

    def reset(keys):
        return state_of(torch.zeros(*keys.shape, 1), keys.shape)

    def step(state, action, noise):
        return state.copy().update({"obs": torch.ones_like(state["obs"]), "reward": state["obs"][..., 0].clone()})

    return time_limit(Env(reset, step, box(0.0, 1.0, 1), Discrete(2)), 3)


PROBES = {  # observations, and Q of each action
    "probe_observation": ([-1.0, 1.0], [[-1.0, -1.0], [1.0, 1.0]], 0.9),
    "probe_delay": ([0.0, 1.0], [[0.9, 0.9], [1.0, 1.0]], 0.9),
    "probe_match": ([0.0, 1.0], [[1.0, -1.0], [-1.0, 1.0]], 0.9),
    "endless_chain": ([0.0, 1.0], [[1.0, 1.0], [2.0, 2.0]], 0.5),  # 1 / (1 - 0.5) from the second step on
}


@pytest.mark.parametrize("name", PROBES)
def test_q_reaches_its_known_value(name):
    obs, expected, gamma = PROBES[name]
    changes = {"trainer.num_envs": 8, "trainer.buffer_size": 8, "trainer.iterations": 20, "algorithm.cfg.gamma": gamma}
    cfg = replaying(**changes, **{"env": {"name": name}, "algorithm.cfg.capacity": 256})
    params = last_state(cfg)["params"]
    q: Any = build(cfg).policy.q
    close(q(params, torch.tensor(obs).unsqueeze(-1), None, None)[0], expected, tol=0.05)
    first = torch.zeros(2, dtype=torch.int64)
    close(q(params, torch.tensor(obs).unsqueeze(-1), first, None)[0], [row[0] for row in expected], tol=0.05)


@register_env("corridor", override=True)
def corridor(cfg: ChainConfig) -> Env:
    """Six cells. Action 1 goes right, action 0 goes left. The last cell ends the episode with reward 1."""

    def shown(cell):
        return (cell.unsqueeze(-1) == torch.arange(6, device=cell.device)).to(torch.float32)

    def reset(keys):
        cell = torch.zeros_like(keys)
        return state_of(shown(cell), keys.shape, cell=cell)

    def step(state, action, noise):
        cell = (state["cell"] + 2 * action - 1).clamp(0, 5)
        end = cell == 5
        return state.copy().update({"cell": cell, "obs": shown(cell), "reward": end.float(), "terminated": end})

    return time_limit(Env(reset, step, box(0.0, 1.0, 6), Discrete(2)), 20)


def test_the_agent_finds_the_end_of_a_corridor():
    changes = {"trainer.num_envs": 8, "trainer.buffer_size": 8, "trainer.iterations": 25, "env": {"name": "corridor"}}
    cfg = replaying(**changes, **{"algorithm.cfg.capacity": 1600, "algorithm.cfg.exploration_steps": 800})
    state = init_state(cfg)
    assert ecrl.evaluate(state, cfg, num_episodes=4)["eval/avg_reward"] == 0.0
    logs = ecrl.evaluate(last_state(cfg, state), cfg, num_episodes=4)
    assert logs["eval/avg_reward"] == 1.0 and logs["eval/avg_length"] == 5.0


def test_a_policy_without_log_probabilities_is_refused_by_algorithms_that_need_them():
    for changes in (
        {"algorithm": {"name": "grpo", "cfg": {"group_size": 3}}},
        {"algorithm": {"name": "apg"}, "env": {"name": "pendulum"}, "policy": {"name": "actor_only", "actor": NET}},
    ):
        cfg = replaying(**changes)
        run = build(cfg)
        run = run._replace(policy=replace(run.policy, evaluate=None))
        with pytest.raises(ConfigError, match=r"^policy.name: this policy has no log-probabilities, which .*"):
            run.algorithm.init(run, rng.key(0))


def test_a_profiled_run_times_its_turns_and_has_the_same_bits():
    cfg, times = replaying(**{"trainer.iterations": 2, "policy.normalize_obs": True}), Times()
    assert same(last_state(cfg, watch=partial(with_timers, times)), last_state(cfg))
    assert len(times.seconds["turn",]) == 2 * T


def test_a_host_environment_runs_its_turns_from_python_with_compiled_functions(graphs):
    pytest.importorskip("gymnasium")
    changes = {"env": {"name": "gymnasium:CartPole-v1"}, **LEARNING}
    eager = last_state(of_length(8, 48, **changes)).clone()
    states = [last_state(of_length(size, 48, **changes, **{"trainer.compile": "on"})).clone() for size in (4, 8)]
    assert graphs.count("_rest_of_turn") == 2 * 2, "one for collecting and one for learning, in each run"
    assert not {"_iteration_of_leaves", "_learn"} & {*graphs}
    for name in ("params", "opt", "replay"):
        assert same(states[0][name], states[1][name])
    for name, weight in weights(eager):
        close(states[1]["params", *name], weight, tol=1e-5)


def test_a_turn_in_python_takes_its_steps_with_the_run_that_the_turn_chose(graphs):
    pytest.importorskip("gymnasium")
    cfg = replaying(**{"env": {"name": "gymnasium:CartPole-v1"}, "trainer.compile": "on", "trainer.iterations": 1})

    def first_action(params, carry, obs, noise):
        carry, out = policy.act(params, carry, obs, noise)
        return carry, replaced(out, {"action": torch.zeros_like(out["action"])})

    def turn(own, state, noise, replay):
        state, steps = take_steps(own._replace(policy=replace(policy, act=first_action, explore=None)), state, noise)
        return state, stored(own, replay, steps, 1), steps, {}

    run = build(cfg)
    policy = run.policy
    run = run._replace(algorithm=replace(run.algorithm, iterate=interleaved(turn)))
    _, writes, _ = run.algorithm.iterate(run, *borrowed_leaves(init_state(cfg), kinds_of(run)))
    assert "_rest_of_turn" in graphs
    assert not writes["batch", "steps", "action"][:, :-1].any()


def _handled(own, state, noise, replay):
    try:
        state, steps = take_steps(own, state, noise)
    except Exception as error:
        raise RuntimeError("the environment failed") from error
    return state, stored(own, replay, steps, 1), steps, {}


def _dropped(own, state, noise, replay):
    state, steps = take_steps(own, state, noise)
    return state.exclude("opt"), stored(own, replay, steps, 1), steps, {}


def _unpacked(own, state, noise, replay):
    actions, envs = noise
    state, steps = take_steps(own, state, (actions, envs))
    return state, stored(own, replay, steps, 1), steps, {}


def _indexed(own, state, noise, replay):
    state, steps = take_steps(own, state, (noise[0], noise[1]))
    return state, stored(own, replay, steps, 1), steps, {}


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (_handled, None),
        (_dropped, "a turn added or dropped fields of the state: opt; keep all fields"),
        (_unpacked, "a turn may not use its noise; pass it to take_steps unchanged"),
        (_indexed, "a turn may not use its noise; pass it to take_steps unchanged"),
    ],
)
def test_a_compiled_turn_in_python_that_does_something_unusual(turn, message):
    pytest.importorskip("gymnasium")
    cfg = replaying(**{"env": {"name": "gymnasium:CartPole-v1"}, "trainer.compile": "on", "trainer.iterations": 1})
    run = build(cfg)
    run = run._replace(algorithm=replace(run.algorithm, iterate=interleaved(turn)))
    own, borrowed = borrowed_leaves(init_state(cfg), kinds_of(run))
    if message is None:
        _, writes, _ = run.algorithm.iterate(run, own, borrowed)
        assert writes["batch", "steps"].shape == (N, T + 1)
    else:
        with pytest.raises(ValueError, match=message):
            run.algorithm.iterate(run, own, borrowed)


def test_an_error_of_the_environment_mentions_no_stop_of_the_turn(graphs):
    pytest.importorskip("gymnasium")
    cfg = replaying(**{"env": {"name": "gymnasium:CartPole-v1"}, "trainer.compile": "on", "trainer.iterations": 1})

    def fall(state, action, noise):
        raise ValueError("the robot fell")

    run = build(cfg)
    run = run._replace(env=replace(run.env, step=fall))
    with pytest.raises(ValueError, match="the robot fell") as raised:
        run.algorithm.iterate(run, *borrowed_leaves(init_state(cfg), kinds_of(run)))
    assert raised.value.__context__ is None
