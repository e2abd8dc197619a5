"""Parameters that do not learn: in the state once, read where they are, and never touched."""

from dataclasses import replace

import pytest
import torch
from support.checks import close
from support.frozen_agent import FEATURES, body_for, freezing
from support.small_runs import last_state, same, small
from torch.func import vmap

import ecrl
from ecrl import rng
from ecrl.algorithms.state_kinds import Kind, leaf_kinds, merge, split
from ecrl.errors import ConfigError
from ecrl.loop.buffers import kinds_of
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, train_iter

GRPO = {
    "trainer.buffer_size": 40,
    "algorithm": {"name": "grpo", "cfg": {"group_size": 2, "n_epochs": 2, "batch_size": 16}},
}
BODY = ("frozen_params", "body", "weight")


@pytest.mark.parametrize("changes", [{}, GRPO, {"policy.normalize_obs": True}, {"trainer.finite_guard": "skip"}])
def test_only_the_other_parameters_learn(changes):
    cfg = freezing(**changes)
    first = init_state(cfg)
    *_, record = train_iter(first, cfg)
    last = record["state"]
    assert set(first["params"].keys()) == {"actor", "critic"} == set(last["params"].keys())
    assert last[BODY].data_ptr() == first[BODY].data_ptr(), "no copy is made"
    assert torch.equal(last[BODY], body_for(4, torch.device("cpu"))["body", "weight"])
    assert not torch.equal(first["params", "actor"], last["params", "actor"])
    learnt = last.select("opt", "params", "ref_params", strict=False)
    assert not any("body" in name for name in learnt.flatten_keys("/").keys())  # noqa: SIM118


def test_its_kind_is_frozen_and_other_policies_have_none():
    cfg = freezing()
    assert leaf_kinds(init_state(cfg), kinds_of(build(cfg)))[BODY] is Kind.FROZEN
    assert "frozen_params" not in init_state(small()) and "frozen_params" not in kinds_of(build(small()))


def test_the_frozen_features_matter_in_every_use():
    cfg = freezing(**{"trainer.num_eval_episodes": 4, "trainer.num_eval_envs": 4})
    state = last_state(cfg)
    other = state.clone()
    other[BODY] = -other[BODY]
    assert ecrl.evaluate(state, cfg) != ecrl.evaluate(other, cfg)
    one, two = (make_iteration(cfg)(s)[0]["params", "actor"] for s in (state, other))
    assert not torch.equal(one, two)


def test_a_resumed_run_has_the_same_bits(tmp_path):
    cfg = freezing()
    ecrl.save(tmp_path / "middle", last_state(cfg.replace(**{"trainer.iterations": 2})), cfg)
    state, loaded = ecrl.load(tmp_path / "middle")
    assert same(last_state(loaded, state), last_state(cfg))


def test_seeds_under_vmap_share_them():
    cfg = freezing()
    iteration, kinds = make_iteration(cfg), kinds_of(build(cfg))
    owns = [split(init_state(cfg, rng.key(seed)), kinds) for seed in (1, 2)]
    frozen = owns[0][1]

    def own_iteration(own):
        return split(iteration(merge(own, frozen))[0], kinds)[0]

    both = vmap(own_iteration)(torch.stack([own for own, _ in owns]))
    for i, (own, _) in enumerate(owns):
        close(both["params", "actor"][i], own_iteration(own)["params", "actor"].detach())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("actor", "init and init_frozen both return actor; give them different names"),
        ("norm", "init_frozen returns norm, which is reserved for observation statistics; give it another name"),
    ],
)
def test_names_of_frozen_parameters_are_not_taken(name, line):
    cfg = freezing()
    run = build(cfg)
    body = run.policy.init_frozen(torch.device("cpu"))
    policy = replace(run.policy, init_frozen=lambda device: body.copy().set(name, torch.zeros(1)))
    with pytest.raises(ConfigError, match=f"^policy frozen_body: {line}$"):
        ecrl.loop.iteration._state_without_env(run._replace(policy=policy), cfg, rng.key(0))
    assert ecrl.check_policy(policy, run.env.observation_space, run.env.action_space).findings == [line]


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_compiled_equals_eager():
    states = [last_state(freezing(**{"trainer.compile": form})) for form in ("off", "on")]
    assert states[1][BODY].shape == (4, FEATURES)
    close(states[1]["params", "actor"], states[0]["params", "actor"], tol=1e-4)
