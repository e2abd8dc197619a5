"""A faulty algorithm or policy is reported in one line, before compiling: its name, the field and its shape."""

from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import pytest
import torch
from support.recurrent_agent import remembering
from support.replay_agent import replaying
from support.small_runs import last_state, same, small
from tensordict import TensorDict

import ecrl.loop.build
import ecrl.policies.contract
from ecrl.algorithms import collect, interleaved, learn, on_policy
from ecrl.algorithms.core import OnPolicy
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.policies.core import no_carry, policy_params
from ecrl.pytree import replaced
from ecrl.registry import _ENTRIES

FORMS = ["off", "auto", "on"]


def changed(state, path, value):
    """The state with another leaf."""
    return state.clone().set(path, value)


BIAS = ("params", "actor", "0.bias")
UPDATES = {
    "dtype": (
        lambda s: (changed(s, BIAS, s[BIAS].double()), {}),
        "changes the state's params/actor/0.bias from float32 [8] to float64 [8]; keep its shape and dtype",
    ),
    "shape": (
        lambda s: (changed(s, BIAS, s[BIAS][:3]), {}),
        "changes the state's params/actor/0.bias from float32 [8] to float32 [3]; keep its shape and dtype",
    ),
    "drops": (
        lambda s: (s.exclude("key"), {}),
        "drops fields of the state: key; return the fields that `init` returns",
    ),
    "adds": (
        lambda s: (changed(s, ("params", "new"), s["key"]), {}),
        "adds fields of the state: params/new; return the fields that `init` returns",
    ),
    "no state": (lambda s: (None, {}), "returns NoneType as the state, expected a TensorDict; return one"),
    "no logs": (lambda s: (s, None), "returns NoneType None as logs, expected a dict of 0-d tensors; return one"),
    "vector log": (
        lambda s: (s, {"loss": torch.zeros(2)}),
        "returns the log loss as float32 [2]; make it a 0-d tensor",
    ),
    "float log": (lambda s: (s, {"loss": 0.5}), "returns the log loss as float 0.5; make it a 0-d tensor"),
}


def assert_refused(cfg, monkeypatch, message, change_algorithm=None, change_policy=None):
    """Check that the first iteration raises this line, and that nothing was compiled."""
    for name, change in (("make_algorithm", change_algorithm), ("make_policy", change_policy)):
        make = getattr(ecrl.loop.build, name)
        if change is not None:
            monkeypatch.setattr(ecrl.loop.build, name, lambda *args, make=make, change=change: change(make(*args)))
    monkeypatch.setattr("ecrl.loop.build._COMPILING_S", 0.0)
    monkeypatch.setattr("ecrl.compile.cpu.compile_fx", None)
    state = init_state(cfg)
    with pytest.raises(ConfigError) as error:
        next(train_iter(state, cfg))
    assert str(error.value) == message


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", UPDATES)
def test_an_update_that_breaks_its_contract(case, form, monkeypatch):
    result, message = UPDATES[case]
    faulty = on_policy(collect, lambda run, state, batch: result(state))
    cfg = small(**{"trainer.compile": form})
    assert_refused(cfg, monkeypatch, f"algorithm ppo: update {message}", lambda made: replace(made, iterate=faulty))


def test_a_collect_that_breaks_its_contract(monkeypatch):
    def faulty(run, state):
        state, batch = collect(run, state)
        return state.exclude("episode"), batch

    message = "algorithm ppo: collect drops fields of the state: "
    iterate = on_policy(faulty, lambda run, state, batch: (state, {}))
    monkeypatch.setattr(
        "ecrl.loop.build.make_algorithm",
        lambda block, make=ecrl.loop.build.make_algorithm: replace(make(block), iterate=iterate),
    )
    with pytest.raises(ConfigError, match=message + "episode/"):
        next(train_iter(init_state(small()), small()))


BATCHES = {
    "no TensorDict": (lambda batch: batch["steps", "reward"], "float32 [4, 9] as the batch, expected a TensorDict"),
    "a rollout": (
        lambda batch: batch["steps"].select("obs", "reward"),
        "a batch without steps, only obs, reward; return TensorDict({'steps': ...})",
    ),
    "nothing": (lambda batch: TensorDict({}, []), "a batch without steps, only no fields"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_a_collect_whose_batch_has_no_steps(case, monkeypatch):
    change, message = BATCHES[case]

    def faulty(run, state):
        state, batch = collect(run, state)
        return state, change(batch)

    iterate = on_policy(faulty, lambda run, state, batch: (state, {}))
    monkeypatch.setattr(
        "ecrl.loop.build.make_algorithm",
        lambda block, make=ecrl.loop.build.make_algorithm: replace(make(block), iterate=iterate),
    )
    with pytest.raises(ConfigError) as error:
        next(train_iter(init_state(small()), small()))
    assert str(error.value).startswith(f"algorithm ppo: collect returns {message}")


@pytest.mark.parametrize("form", FORMS)
def test_an_iterate_that_breaks_its_contract(form, monkeypatch):
    def widened(made):
        def iterate(run, state, borrowed):
            state, writes, logs = made.iterate(run, state, borrowed)
            return replaced(state, {"replay": TensorDict({"cursor": state["replay", "cursor"].double()})}), writes, logs

        return replace(made, iterate=iterate)

    message = "algorithm replay_td: iterate changes the state's replay/cursor from int64 [] to float64 []"
    assert_refused(replaying(**{"trainer.compile": form}), monkeypatch, f"{message}; keep its shape and dtype", widened)


def with_rows(change):
    """A change of `writes` that gives the buffer other rows."""
    return lambda writes: changed(writes, ("replay", "steps", "rows"), change(writes["replay", "steps", "rows"]))


def with_index(change):
    """A change of `writes` that gives the rows another index."""
    return lambda writes: changed(writes, ("replay", "steps", "index"), change(writes["replay", "steps", "index"]))


RING = "action, mask, obs, padding, reward, terminated, truncated"
WRITES = {
    "none": (lambda w: None, "NoneType None as writes, expected a TensorDict; return one"),
    "dict": (lambda w: {}, "a dict as writes, expected a TensorDict; return one"),
    "unknown": (
        lambda w: w.copy().set("params", torch.zeros(2)),
        "the field params of writes, expected batch or replay; remove or rename it",
    ),
    "no steps": (
        lambda w: changed(w, "batch", TensorDict({}, [])),
        "a batch without steps, only no fields; return TensorDict({'steps': ...})",
    ),
    "tensor": (
        lambda w: changed(w, "replay", torch.zeros(12)),
        "the writes of replay as float32 [12], expected a TensorDict with the rows and the index of each part; "
        "return one",
    ),
    "unknown part": (
        lambda w: changed(w, ("replay", "tree"), w["replay", "steps"]),
        "the field tree of the writes of replay, expected final or steps; rename or remove it",
    ),
    "count": (
        lambda w: changed(w, ("replay", "cursor"), w["replay", "steps"]),
        "the field cursor of the writes of replay, expected final or steps; rename or remove it",
    ),
    "part": (
        lambda w: changed(w, ("replay", "steps"), torch.zeros(4)),
        "the writes of replay/steps as float32 [4], expected a TensorDict; return one",
    ),
    "no index": (
        lambda w: changed(w, ("replay", "steps"), w["replay", "steps"].exclude("index")),
        "the writes of replay/steps without index, only rows; add int64 [B], one entry per row",
    ),
    "no rows": (
        lambda w: changed(w, ("replay", "steps"), w["replay", "steps"].exclude("rows")),
        "the writes of replay/steps without rows, only index; add the new entries of the part",
    ),
    "a tensor of rows": (
        with_rows(lambda rows: rows["obs"]),
        f"rows of replay/steps without {RING}, expected {RING}; return these fields",
    ),
    "stale": (
        with_rows(lambda rows: rows.exclude("reward", "mask")),
        f"rows of replay/steps without mask, reward, expected {RING}; return these fields",
    ),
    "unknown row": (
        with_rows(lambda rows: rows.copy().set("value", rows["reward"])),
        f"rows of replay/steps with the unknown value, expected {RING}; return these fields",
    ),
    "row dtype": (
        with_rows(lambda rows: changed(rows, "reward", rows["reward"].double())),
        "the rows of reward of replay/steps as float64 [4, 3], expected float32 [4, 3] for an index [4]; return such a "
        "tensor",
    ),
    "row shape": (
        with_rows(lambda rows: changed(rows, "obs", rows["obs"][..., :3])),
        "the rows of obs of replay/steps as float32 [4, 3, 3], expected float32 [4, 3, 4] for an index [4]; return "
        "such a tensor",
    ),
    "index dtype": (
        with_index(lambda index: index.int()),
        "the index of replay/steps as int32 [4], expected int64 [B], one entry per row; return such a tensor",
    ),
    "index axes": (
        with_index(lambda index: index.unsqueeze(-1)),
        "the index of replay/steps as int64 [4, 1], expected int64 [B], one entry per row; return such a tensor",
    ),
    "index size": (
        with_index(lambda index: index[:2]),
        "the rows of action of replay/steps as int64 [4, 3], expected int64 [2, 3] for an index [2]; return such a "
        "tensor",
    ),
}


@pytest.mark.parametrize("case", WRITES)
def test_writes_that_break_their_contract_are_refused_before_anything_is_written(case, monkeypatch):
    change, line = WRITES[case]

    def faulty(made):
        def iterate(run, state, borrowed):
            state, writes, logs = made.iterate(run, state, borrowed)
            return state, change(writes), logs

        return replace(made, iterate=iterate)

    monkeypatch.setattr("ecrl.loop.iteration.commit", lambda *args: pytest.fail("rows were written"))
    assert_refused(replaying(), monkeypatch, f"algorithm replay_td: iterate returns {line}", faulty)


def test_sound_writes_of_an_iterate_are_written(monkeypatch):
    make, expected = ecrl.loop.build.make_algorithm, last_state(replaying())
    wrapped = lambda made: replace(made, iterate=lambda *args: made.iterate(*args))  # noqa: E731
    monkeypatch.setattr("ecrl.loop.build.make_algorithm", lambda block: wrapped(make(block)))
    assert same(last_state(replaying()), expected)


STEPS = {
    "no TensorDict": (lambda steps: steps["reward"], "float32 [4, 9] as the steps, expected a TensorDict; return one"),
    **{
        f"no {name}": (
            lambda steps, name=name: steps.select("obs", "reward", "done").exclude(name),
            f"steps without {name}, only {', '.join(sorted({'obs', 'reward', 'done'} - {name}))}; add the field",
        )
        for name in ("obs", "reward", "done")
    },
    "no last step": (
        lambda steps: steps.select("obs", "reward", "done")[:, :-1],
        "the steps' done as bool [4, 8], expected bool [4, 9] for [num_envs, buffer_size + 1]; return such a tensor",
    ),
    "time first": (
        lambda steps: TensorDict({**dict(steps.items()), "action": steps["action"].t()}, []),
        "the steps' action as int64 [9, 4], expected [4, 9, ...] for [num_envs, buffer_size + 1]; return such a tensor",
    ),
    "float done": (
        lambda steps: changed(steps, "done", steps["done"].float()),
        "the steps' done as float32 [4, 9], expected bool [4, 9] for [num_envs, buffer_size + 1]; return such a tensor",
    ),
    "float mask": (
        lambda steps: changed(steps, "mask", torch.ones(4, 9)),
        "the steps' mask as float32 [4, 9], expected bool [4, 9, ...] for [num_envs, buffer_size + 1]; return such a "
        "tensor",
    ),
    "rewards": (
        lambda steps: changed(steps, "reward", steps["reward"].unsqueeze(-1)),
        "the steps' reward as float32 [4, 9, 1], expected [4, 9] for [num_envs, buffer_size + 1]; return such a tensor",
    ),
}


@pytest.mark.parametrize("name", ["collect", "iterate"])
@pytest.mark.parametrize("case", STEPS)
def test_a_batch_with_other_steps_than_those_of_a_rollout(case, name, monkeypatch):
    change, line = STEPS[case]

    def faulty(run, state):
        state, batch = collect(run, state)
        return state, TensorDict({"steps": change(batch["steps"])}, [])

    def iterate(run, state, borrowed):
        state, batch = faulty(run, state)
        return state, TensorDict({"batch": batch}, []), {}

    chosen = iterate if name == "iterate" else on_policy(faulty, lambda run, state, batch: (state, {}))
    change_algorithm = lambda made: replace(made, iterate=chosen)  # noqa: E731
    assert_refused(small(), monkeypatch, f"algorithm ppo: {name} returns {line}", change_algorithm)


RESERVED = ["reward", "next_value", "value", "final_value", "terminated", "truncated", "done", "mask"]
RESERVED += ["carry", "info", "obs", "executed"]
ACTS = {
    "no action": (lambda out: out.exclude("action"), "returns no action, only sample_log_prob; add the field"),
    "no log-probability": (
        lambda out: out.exclude("sample_log_prob"),
        "returns no sample_log_prob, only action; add the field",
    ),
    "no TensorDict": (lambda out: dict(out), "returns dict as its output, expected a TensorDict; return one"),
    **{
        name: (
            lambda out, name=name: out.copy().set(name, torch.zeros(4)),
            f"returns the field {name}, which is reserved for the rollout; give it another name",
        )
        for name in RESERVED
    },
    "batch": (
        lambda out: TensorDict({**dict(out.items()), "tokens": torch.zeros(2, 4)}),
        "returns tokens as float32 [2, 4], expected [4, ...]; return one entry per environment",
    ),
    "mask shape": (
        lambda out: out.copy().set("token_mask", torch.ones(4, 2).bool()),
        "returns token_mask as bool [4, 2], expected bool [4], the shape of sample_log_prob; return such a tensor",
    ),
    "mask dtype": (
        lambda out: out.copy().set("token_mask", torch.ones(4)),
        "returns token_mask as float32 [4], expected bool [4], the shape of sample_log_prob; return such a tensor",
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ACTS)
def test_an_act_that_breaks_its_contract(case, form, monkeypatch):
    result, message = ACTS[case]

    def faulty(made):
        def act(*args):
            carry, out = made.act(*args)
            return carry, result(out)

        return replace(made, act=act)

    cfg = small(**{"trainer.compile": form})
    assert_refused(cfg, monkeypatch, f"policy actor_critic: act {message}", change_policy=faulty)


def test_runs_of_one_config_are_equal_and_share_compiled_functions():
    assert build(small()) == build(small(**{"trainer.seed": 3})) and hash(build(small())) == hash(build(small()))
    assert int(last_state(small())["update_step"]) == 4


of_any: Any = on_policy
of_turn: Any = interleaved


def with_act(change, result="out"):
    """A change of the policy whose `act` changes one of its two results, the carry or the output."""

    def faulty(made):
        def act(*args):
            carry, out = made.act(*args)
            return (change(carry), out) if result == "carry" else (carry, change(out))

        return replace(made, act=act)

    return faulty


ACTIONS = {
    "float": (lambda a: a.float(), "float32 [4], expected int64 [4]"),
    "int32": (lambda a: a.int(), "int32 [4], expected int64 [4]"),
    "shape": (lambda a: a.unsqueeze(-1), "int64 [4, 1], expected int64 [4]"),
}


@pytest.mark.parametrize("case", ACTIONS)
def test_an_action_of_another_dtype_or_shape_than_its_space(case, monkeypatch):
    change, line = ACTIONS[case]
    message = f"policy actor_critic: act returns action as {line} for a Discrete action space; return such a tensor"
    assert_refused(
        small(),
        monkeypatch,
        message,
        change_policy=with_act(lambda out: out.copy().set("action", change(out["action"]))),
    )


@pytest.mark.parametrize("form", FORMS)
def test_an_action_of_integers_for_a_box(form, monkeypatch):
    cfg = small(**{"env": {"name": "pendulum"}, "trainer.compile": form})
    message = "policy actor_critic: act returns action as int64 [4, 1], expected float32 [4, 1] for a Box action space"
    faulty = with_act(lambda out: out.copy().set("action", out["action"].long()))
    assert_refused(cfg, monkeypatch, f"{message}; return such a tensor", change_policy=faulty)


NO_MEMORY = TensorDict({}, [])
LEADING_AXES = {  # calls of `act` for observations [N, T, ...]
    "two": lambda act, obs: act(obs),
    "one": lambda act, obs: act(obs.flatten(0, 1)),
    "none": lambda act, obs: torch.func.vmap(act)(obs[:, 0]),
}


@pytest.mark.parametrize("case", LEADING_AXES)
def test_an_algorithm_acts_on_observations_with_any_leading_axes(case, monkeypatch):
    shapes = {"two": [4, 8], "one": [32], "none": [4]}

    def acting(made):
        def update(run, state, batch):
            def act(obs):
                return run.policy.act(policy_params(state), NO_MEMORY, obs, None)[1]["action"]

            action = LEADING_AXES[case](act, batch["steps", "obs"][:, :-1])
            assert list(action.shape) == shapes[case]
            return state, {"action": action.double().mean()}

        return replace(made, iterate=on_policy(collect, update), as_one=False)

    make = ecrl.loop.build.make_algorithm
    monkeypatch.setattr("ecrl.loop.build.make_algorithm", lambda block: acting(make(block)))
    assert int(last_state(small(**{"trainer.iterations": 1}))["update_step"]) == 1


def test_an_action_with_other_leading_axes_than_its_observations(monkeypatch):
    def acting(made):
        def update(run, state, batch):
            return state, {
                "n": run.policy.act(policy_params(state), NO_MEMORY, batch["steps", "obs"], None)[1]["action"].sum()
            }

        return replace(made, iterate=on_policy(collect, update))

    message = "policy actor_critic: act returns action as int64 [36], expected int64 [4, 9] for a Discrete action space"
    flat = with_act(lambda out: out.reshape(-1))
    assert_refused(small(), monkeypatch, f"{message}; return such a tensor", acting, flat)


@dataclass(frozen=True)
class Counted(OnPolicy):
    """An `iterate` that also logs the number of its calls."""

    def __call__(self, run, state, borrowed):
        """Run one iteration, and log its number."""
        state, writes, logs = super().__call__(run, state, borrowed)
        return state, writes, {**logs, "calls": torch.ones(())}


def test_a_subclass_of_on_policy_runs_in_the_first_iteration_too(monkeypatch):
    make = ecrl.loop.build.make_algorithm

    def counted(block):
        made: Any = make(block)
        return replace(made, iterate=Counted(made.iterate.collect, made.iterate.update))

    monkeypatch.setattr("ecrl.loop.build.make_algorithm", counted)
    logs = [record["logs"] for record in train_iter(init_state(small()), small()) if record["log_type"] == "train"]
    assert len(logs) == 4 and all("calls" in log for log in logs)


CARRIES = {
    "dtype": (
        lambda carry: carry.double(),
        "changes the carry's h from float32 [16, 8] to float64 [16, 8]; keep its shape and dtype",
    ),
    "shape": (
        lambda carry: TensorDict({"h": carry["h"][:, :3]}, [16]),
        "changes the carry's h from float32 [16, 8] to float32 [16, 3]; keep its shape and dtype",
    ),
    "name": (
        lambda carry: TensorDict({"g": carry["h"]}, [16]),
        "drops fields of the carry: h; return the fields that `init_carry` returns",
    ),
    "more": (
        lambda carry: carry.copy().set("g", carry["h"]),
        "adds fields of the carry: g; return the fields that `init_carry` returns",
    ),
    "batch": (
        lambda carry: TensorDict({"h": carry["h"]}, []),
        "changes the batch size of the carry from [16] to []; keep it",
    ),
    "empty": (
        lambda carry: carry.copy().set("g", TensorDict({}, [16])),
        "changes empty TensorDicts or values that are not tensors in the carry; keep them",
    ),
    "none": (lambda carry: None, "returns NoneType as the carry, expected a TensorDict; return one"),
}


@pytest.mark.parametrize("case", CARRIES)
def test_a_carry_that_changes(case, monkeypatch):
    change, line = CARRIES[case]
    assert_refused(remembering(), monkeypatch, f"policy tanh_cell: act {line}", change_policy=with_act(change, "carry"))


def at_start(cfg, monkeypatch, message, **changes):
    """Check that a run with a changed policy or algorithm is refused with this line before its first step."""
    for kind, change in changes.items():
        for name, entry in list(_ENTRIES[kind].items()):
            made = entry._replace(make=lambda *args, make=entry.make, change=change: change(make(*args)))
            monkeypatch.setitem(_ENTRIES[kind], name, made)
    with pytest.raises(ConfigError) as error:
        init_state(cfg)
    assert str(error.value) == message


TAKES = [
    ("init", lambda: None, "takes (), expected (key)"),
    ("draw", lambda keys, shape: keys, "takes (keys, shape), expected (keys)"),
    ("act", lambda params, obs, noise: None, "takes (params, obs, noise), expected (params, carry, obs, noise)"),
    ("evaluate", lambda params, steps: None, "takes (params, steps), expected (params, carry, steps)"),
    ("value", lambda params, obs: None, "takes (params, obs), expected (params, carry, obs)"),
    (
        "explore",
        lambda params, out, noise: None,
        "takes (params, out, noise), expected (params, exploration, out, noise)",
    ),
    ("init_exploration", lambda params: None, "takes (params), expected (params, num_envs)"),
    ("q", lambda params, obs, action: None, "takes (params, obs, action), expected (params, obs, action, noise)"),
]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("name", "fn", "line"), TAKES, ids=[row[0] for row in TAKES])
def test_a_function_of_a_policy_with_other_arguments(name, fn, line, normalize, monkeypatch):
    message = f"policy actor_critic: {name} {line}; take these arguments by position"
    cfg = small(**{"policy.normalize_obs": normalize})
    at_start(cfg, monkeypatch, message, policy=lambda made: replace(made, **{name: fn}))


def test_a_value_of_sequences_takes_steps_and_final(monkeypatch):
    expected = "expected (params, carry, steps, final) for unit 'sequence'; take these arguments by position"
    message = f"policy tanh_cell: value takes (params, carry, obs), {expected}"
    value = lambda params, carry, obs: None  # noqa: E731
    at_start(remembering(), monkeypatch, message, policy=lambda made: replace(made, value=value))


def test_a_policy_of_sequences_without_memory(monkeypatch):
    message = (
        "policy tanh_cell: unit is 'sequence', but there is no init_carry, expected (params, num_envs) -> carry; pass "
        "init_carry, or set unit to 'step' for a policy without memory"
    )
    at_start(remembering(), monkeypatch, message, policy=lambda made: replace(made, init_carry=no_carry))


FIRST = {
    "carry": ("init_carry", {"h": torch.zeros(16, 8)}, "a dict, expected the carry as a TensorDict; return one"),
    "params": ("init", (), "tuple (), expected the params as a TensorDict; return one"),
    "rows": (
        "init_carry",
        TensorDict({"h": torch.zeros(1, 8)}, []),
        "h as float32 [1, 8], expected [16, ...]; return one entry per environment",
    ),
    "noise": ("draw", torch.zeros(3), "noise float32 [3], expected [8, 16, ...]; return one entry per key"),
}


@pytest.mark.parametrize("case", FIRST)
def test_the_first_memory_the_parameters_and_the_noise(case, monkeypatch):
    name, result, line = FIRST[case]
    make = ecrl.loop.build.make_policy
    change = {name: lambda *_: result}
    monkeypatch.setattr("ecrl.loop.build.make_policy", lambda *args: replace(make(*args), **change))
    with pytest.raises(ConfigError) as error:
        next(train_iter(init_state(remembering()), remembering()))
    assert str(error.value) == f"policy tanh_cell: {name} returns {line}"


def _without(name):
    def change(made):
        return replace(made, init=lambda run, key: {k: v for k, v in made.init(run, key).items() if k != name})

    return change


INITS = {
    "params": (
        _without("params"),
        "returns no params, only hyper, opt; add it, a TensorDict, possibly empty, of policy parameters, nested",
    ),
    "hyper": (
        _without("hyper"),
        "returns no hyper, only opt, params; add it, a TensorDict, possibly empty, of each hyperparameter",
    ),
    "key": (
        lambda made: replace(made, init=lambda run, key: {**made.init(run, key), "key": key}),
        "returns the field key, which the loop sets itself; give it another name",
    ),
    **{
        name: (
            lambda made, name=name: replace(made, init=lambda run, key: {**made.init(run, key), name: key}),
            f"returns the field {name}, which the loop sets itself; give it another name",
        )
        for name in ("iterations", "decision_step")
    },
    "number": (
        lambda made: replace(made, init=lambda run, key: {**made.init(run, key), "hyper": 0.5}),
        "returns hyper as float 0.5, expected a TensorDict; return one",
    ),
    "tuple": (
        lambda made: replace(made, init=lambda run, key: ("params",)),
        "returns tuple ('params',), expected a dict of fields of the state; return one",
    ),
}


@pytest.mark.parametrize("case", INITS)
def test_an_init_that_breaks_its_contract(case, monkeypatch):
    change, line = INITS[case]
    make = ecrl.loop.build.make_algorithm
    monkeypatch.setattr("ecrl.loop.build.make_algorithm", lambda block: change(make(block)))
    with pytest.raises(ConfigError) as error:
        init_state(small())
    assert str(error.value).startswith(f"algorithm ppo: init {line}")


WRONG_ARGUMENTS = {
    "init": (
        lambda made: replace(made, init=lambda cfg, run, key: {}),
        "init takes (cfg, run, key), expected (run, key)",
    ),
    "update": (
        lambda made: replace(made, iterate=of_any(collect, lambda state, batch: (state, {}))),
        "update takes (state, batch), expected (run, state, batch)",
    ),
    "collect": (
        lambda made: replace(made, iterate=of_any(lambda state: state, lambda run, state, batch: (state, {}))),
        "collect takes (state), expected (run, state)",
    ),
    "iterate": (
        lambda made: replace(made, iterate=lambda run, state: (state, {})),
        "iterate takes (run, state), expected (run, state, borrowed)",
    ),
    "turn": (
        lambda made: replace(made, iterate=of_turn(lambda run, state, noise: state)),
        "turn takes (run, state, noise), expected (run, state, noise, replay)",
    ),
    "phase": (lambda made: replace(made, phase=lambda: "learn"), "phase takes (), expected (sample_step)"),
    "gradient_steps": (
        lambda made: replace(made, gradient_steps=3),
        "gradient_steps is int 3, expected a function (static); pass one",
    ),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_a_function_of_an_algorithm_with_other_arguments(case, monkeypatch):
    change, line = WRONG_ARGUMENTS[case]
    advice = "" if "pass one" in line else "; take these arguments by position"
    at_start(small(), monkeypatch, f"algorithm ppo: {line}{advice}", algorithm=change)


COUNTS = {
    "update": (
        lambda made: replace(made, iterate=of_any(collect, lambda run, state, batch: (state, {}, 3))),
        "update returns 3 values, expected 2: (state, logs); return these values",
    ),
    "no tuple": (
        lambda made: replace(made, iterate=on_policy(collect, lambda run, state, batch: state)),
        "update returns a TensorDict, expected 2: (state, logs); return these values",
    ),
    "collect": (
        lambda made: replace(made, iterate=on_policy(lambda run, state: state, lambda run, state, batch: (state, {}))),
        "collect returns a TensorDict, expected 2: (state, batch); return these values",
    ),
    "batch": (
        lambda made: replace(made, iterate=of_any(lambda run, s: (s, None), lambda run, state, batch: (state, {}))),
        "collect returns NoneType None as the batch, expected a TensorDict; return one",
    ),
    "iterate": (
        lambda made: replace(made, iterate=lambda run, state, borrowed: (state, {})),
        "iterate returns 2 values, expected 3: (state, writes, logs); return these values",
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", COUNTS)
def test_another_number_of_results(case, form, monkeypatch):
    change, line = COUNTS[case]
    assert_refused(small(**{"trainer.compile": form}), monkeypatch, f"algorithm ppo: {line}", change)


@pytest.mark.parametrize("form", FORMS)
def test_a_turn_with_another_number_of_results(form, monkeypatch):
    def turn(run, state, noise, replay):
        return state, replay

    message = (
        "algorithm replay_td: turn returns 2 values, expected 4: (state, replay, steps, logs); return these values"
    )
    cfg = replaying(**{"trainer.compile": form})
    assert_refused(cfg, monkeypatch, message, lambda made: replace(made, iterate=of_turn(turn)))


@pytest.mark.parametrize("form", FORMS)
def test_an_update_inside_a_turn_with_another_number_of_results(form, monkeypatch):
    def td_update(run, state, batch) -> Any:
        return state, {}, 3

    def turn(run, state, noise, replay):
        return learn(td_update, run, state, replay.ring)

    message = "algorithm replay_td: td_update returns 3 values, expected 2: (state, logs); return these values"
    cfg = replaying(**{"trainer.compile": form})
    assert_refused(cfg, monkeypatch, message, lambda made: replace(made, iterate=of_turn(turn)))


VALUES = {  # the function, its result instead, the line
    "evaluate": (
        lambda made, *args: made.evaluate(*args)[0],
        "float32 [10], expected 2: (log_prob, entropy); return these values",
    ),
    "log_prob": (
        lambda made, *args: (0.0, made.evaluate(*args)[1]),
        "log_prob as float 0.0, expected float [10] with optional token axes",
    ),
    "entropy": (
        lambda made, *args: (made.evaluate(*args)[0], torch.zeros(())),
        "entropy as float32 [], expected float [10]",
    ),
    "value": (
        lambda made, *args: made.value(*args).unsqueeze(-1),
        "V as float32 [40, 1], expected float [40]; return such a tensor",
    ),
}


@pytest.mark.parametrize("case", VALUES)
def test_results_of_evaluate_and_value(case, monkeypatch):
    result, line = VALUES[case]
    name = "value" if case == "value" else "evaluate"

    def change(made):
        return replace(made, **{name: lambda *args: result(made, *args)})

    make = ecrl.loop.build.make_policy
    monkeypatch.setattr("ecrl.loop.build.make_policy", lambda *args: change(make(*args)))
    with pytest.raises(ConfigError) as error:
        next(train_iter(init_state(small()), small()))
    assert str(error.value).startswith(f"policy actor_critic: {name} returns {line}")


def test_values_of_sequences(monkeypatch):
    make = ecrl.loop.build.make_policy
    for result, line in (
        (lambda value, final: value, "returns float32 [16, 9], expected 2: (V, V_final); return these values"),
        (
            lambda value, final: (value[:, :-1], final),
            "returns V as float32 [16, 8], expected float [16, 9]; return such a tensor",
        ),
    ):
        with monkeypatch.context() as patch:

            def change(made, result=result):
                return replace(made, value=lambda *args: result(*made.value(*args)))

            patch.setattr("ecrl.loop.build.make_policy", lambda *args, change=change: change(make(*args)))
            with pytest.raises(ConfigError) as error:
                next(train_iter(init_state(remembering()), remembering()))
            assert str(error.value) == f"policy tanh_cell: value {line}"


def drawing(fn):
    """The function, after a draw from torch's global generator."""

    def wrapped(*args):
        torch.rand(1)
        return fn(*args)

    return wrapped


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["draw", "act", "value", "evaluate"])
def test_a_policy_that_draws_from_the_global_generator(name, form, monkeypatch):
    problem = f"policy actor_critic: {name} draws random numbers from a generator of torch, so equal states give"
    message = f"{problem} unequal results; draw them from {'its keys' if name == 'draw' else 'the keys of `draw`'} with"
    cfg = small(**{"trainer.compile": form})
    change = lambda made: replace(made, **{name: drawing(getattr(made, name))})  # noqa: E731
    assert_refused(cfg, monkeypatch, f"{message} ecrl.rng", change_policy=change)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["collect", "update"])
def test_an_algorithm_that_draws_from_the_global_generator(name, form, monkeypatch):
    def change(made):
        return replace(made, iterate=replace(made.iterate, **{name: drawing(getattr(made.iterate, name))}))

    problem = f"algorithm ppo: {name} draws random numbers from a generator of torch, so equal states give unequal"
    message = f'{problem} results; draw them from `state["key"]` with ecrl.rng'
    assert_refused(small(**{"trainer.compile": form}), monkeypatch, message, change)


def test_an_init_that_draws_from_the_global_generator(monkeypatch):
    problem = "init draws random numbers from a generator of torch, so equal states give unequal results"
    for kind, name in (("policy", "policy actor_critic"), ("algorithm", "algorithm ppo")):
        message = f"{name}: {problem}; draw them from its key with ecrl.rng"
        with monkeypatch.context() as patch:
            at_start(small(), patch, message, **{kind: lambda made: replace(made, init=drawing(made.init))})


def test_a_policy_may_draw_from_a_generator_whose_state_it_restores(monkeypatch):
    make = ecrl.loop.build.make_policy

    def restoring(made):
        def init(key):
            with torch.random.fork_rng():
                torch.manual_seed(int(key))
                return made.init(key).apply(lambda x: x + torch.rand_like(x))

        return replace(made, init=init)

    monkeypatch.setattr("ecrl.loop.build.make_policy", lambda *args: restoring(make(*args)))
    assert int(last_state(small(**{"trainer.iterations": 1}))["update_step"]) == 1


def test_another_thread_may_draw_from_the_global_generator(monkeypatch):
    def beside(fn):
        def wrapped(*args):
            thread = Thread(target=lambda: torch.rand(1))
            thread.start()
            thread.join()
            return fn(*args)

        return wrapped

    make = ecrl.loop.build.make_policy
    names = ("init", "draw", "act", "value", "evaluate")
    monkeypatch.setattr(
        "ecrl.loop.build.make_policy",
        lambda *args: replace(made := make(*args), **{name: beside(getattr(made, name)) for name in names}),
    )
    assert int(last_state(small(**{"trainer.iterations": 1}))["update_step"]) == 1


def test_the_draws_of_an_environment_are_not_those_of_the_algorithm(monkeypatch):
    make = ecrl.loop.build.make_env

    def noisy(choice, **kwargs):
        env = make(choice, **kwargs)
        return replace(env, step=drawing(env.step), reset=drawing(env.reset))

    monkeypatch.setattr("ecrl.loop.build.make_env", noisy)
    for cfg in (small(), replaying(), small(**{"algorithm": {"name": "grpo", "cfg": {"batch_size": 8}}})):
        assert int(last_state(cfg.replace(**{"trainer.iterations": 1}))["update_step"]) == 1


def test_an_eager_run_is_checked_in_its_first_iteration_only(monkeypatch):
    calls = []
    original = ecrl.policies.contract._check_act
    monkeypatch.setattr("ecrl.policies.contract._check_act", lambda *args: calls.append(1) or original(*args))
    wrapped = []
    call = ecrl.policies.contract.Checked.__call__
    monkeypatch.setattr(
        "ecrl.policies.contract.Checked.__call__", lambda self, *args: wrapped.append(1) or call(self, *args)
    )
    records = train_iter(init_state(small()), small())
    next(records)
    first = len(wrapped)
    assert len(calls) == 8, "one for each step"
    list(records)
    assert len(calls) == 8 and len(wrapped) == first


def test_every_phase_is_checked_in_its_first_iteration(monkeypatch):
    cfg = replaying(**{"algorithm.cfg.learning_starts": 24})
    make = ecrl.loop.build.make_algorithm

    def change(made):
        def turn(run, state, noise, replay):
            state, replay, steps, logs = made.iterate.turn(run, state, noise, replay)
            return state, replay, steps, {"loss": 0.5} if run.static.phase == "learn" else logs

        return replace(made, iterate=of_turn(turn))

    monkeypatch.setattr("ecrl.loop.build.make_algorithm", lambda block: change(make(block)))
    records = train_iter(init_state(cfg), cfg)
    assert [next(records)["sample_step"] for _ in range(4)] == [12, 12, 24, 24]
    with pytest.raises(
        ConfigError, match=r"^algorithm replay_td: turn returns the log loss as float 0.5; make it a 0-d"
    ):
        next(records)
