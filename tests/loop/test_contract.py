"""A faulty algorithm or policy is reported in one line, before compiling: its name, the field and its shape."""

from dataclasses import replace

import pytest
import torch
from support.replay_agent import replaying
from support.small_runs import last_state, small
from tensordict import TensorDict

import ecrl.loop.build
from ecrl.algorithms import collect, on_policy
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.pytree import replaced

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


def refused(cfg, monkeypatch, message, change_algorithm=None, change_policy=None):
    """Check that the first iteration raises this line, and that nothing was compiled."""
    for name, change in (("make_algorithm", change_algorithm), ("make_policy", change_policy)):
        make = getattr(ecrl.loop.build, name)
        if change is not None:
            monkeypatch.setattr(ecrl.loop.build, name, lambda *args, make=make, change=change: change(make(*args)))
    monkeypatch.setattr("ecrl.loop.build._COMPILING_S", 0.0)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", None)
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
    refused(cfg, monkeypatch, f"algorithm ppo: update {message}", lambda made: replace(made, iterate=faulty))


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


@pytest.mark.parametrize("form", FORMS)
def test_an_iterate_that_breaks_its_contract(form, monkeypatch):
    def widened(made):
        def iterate(run, state, borrowed):
            state, writes, logs = made.iterate(run, state, borrowed)
            return replaced(state, {"replay": TensorDict({"cursor": state["replay", "cursor"].double()})}), writes, logs

        return replace(made, iterate=iterate)

    message = "algorithm replay_td: iterate changes the state's replay/cursor from int64 [] to float64 []"
    refused(replaying(**{"trainer.compile": form}), monkeypatch, f"{message}; keep its shape and dtype", widened)


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
            f"returns the field {name}, which the rollout has itself; give it another name",
        )
        for name in RESERVED
    },
    "batch": (
        lambda out: TensorDict({**dict(out.items()), "tokens": torch.zeros(2, 4)}),
        "returns tokens as float32 [2, 4], expected [4, ...]; return one row per environment",
    ),
    "mask shape": (
        lambda out: out.copy().set("token_mask", torch.ones(4, 2).bool()),
        "returns token_mask as bool [4, 2], expected bool [4], the shape of sample_log_prob; return that",
    ),
    "mask dtype": (
        lambda out: out.copy().set("token_mask", torch.ones(4)),
        "returns token_mask as float32 [4], expected bool [4], the shape of sample_log_prob; return that",
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
    refused(cfg, monkeypatch, f"policy actor_critic: act {message}", change_policy=faulty)


def test_runs_of_one_config_are_equal_and_share_compiled_functions():
    assert build(small()) == build(small(**{"trainer.seed": 3})) and hash(build(small())) == hash(build(small()))
    assert int(last_state(small())["update_step"]) == 4
