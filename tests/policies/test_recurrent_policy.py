"""The policy `recurrent`: every combination of its settings is sound, remembers, and runs in every form."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from support.checks import close
from support.graphs import graph_of, needs_cpu_compiler
from support.recurrent_agent import remembering
from support.small_runs import NET, last_state, same
from tensordict import TensorDict
from torch.func import vmap

import ecrl
from ecrl import rng, spaces
from ecrl.algorithms.core import collect
from ecrl.algorithms.rows import rows_of
from ecrl.compile.scan import scan_op
from ecrl.errors import ConfigError
from ecrl.loop.build import build, form_of
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.loop.policy_check import check_policy
from ecrl.policies import make_policy
from ecrl.run.export import export

CELLS, MEMORIES = ("gru", "lstm", "mingru"), ("shared", "separate", "actor", "critic")
SHORT = {"trainer.num_envs": 8, "trainer.iterations": 3}
VECTOR = spaces.box(-1.0, 1.0, 3)
MASKED = spaces.dict_space({"goal": VECTOR, "action_mask": spaces.box(0, 1, 4)})
BOX, CHOICE = spaces.box(-1.0, 1.0, 2), spaces.Discrete(4)


def recurrent(cell="gru", memory="shared", **changes):
    return {"name": "recurrent", "cell": {"type": cell, "hidden_size": 8}, "memory": memory, "actor": NET, **changes}


def with_critic(cell="gru", memory="shared", **changes):
    return recurrent(cell, memory, critic=NET, **changes)


def agent(*args, policy=with_critic, **changes):
    return remembering(**{"policy": policy(*args), **changes})


@pytest.mark.parametrize(("cell", "memory"), [*product(CELLS, MEMORIES)])
@pytest.mark.parametrize("encoder", [None, NET])
def test_nothing_is_found_in_any_combination(cell, memory, encoder):
    cases = [(MASKED, CHOICE, True)] if encoder else [(VECTOR, BOX, False), (VECTOR, CHOICE, True)]
    for observations, actions, normalize in cases:
        settings = with_critic(cell, memory, encoder=encoder, normalize_obs=normalize)
        policy = make_policy(settings, observations, actions)
        assert check_policy(policy, observations, actions).findings == []
    if memory in ("shared", "actor"):
        policy = make_policy(recurrent(cell, memory, encoder=encoder), VECTOR, BOX)
        assert policy.value is None and check_policy(policy, VECTOR, BOX).findings == []


def test_a_masked_action_is_never_taken():
    policy = make_policy(with_critic(), MASKED, CHOICE)
    params = policy.init(rng.key(0))
    mask = torch.tensor([True, False, True, False]).expand(500, 4)
    obs = TensorDict(
        {"goal": torch.randn(500, 3, generator=torch.Generator().manual_seed(0)), "action_mask": mask}, [500]
    )
    out = policy.act(params, policy.init_carry(params, 500), obs, policy.draw(rng.split(rng.key(1), 500)))[1]
    assert set(out["action"].tolist()) == {0, 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "memory"),
    [
        ("gru", "shared"),
        pytest.param("lstm", "separate", marks=pytest.mark.long),
        pytest.param("mingru", "actor", marks=pytest.mark.long),
    ],
)
def test_it_remembers_a_cue(cell, memory):
    cfg = agent(cell, memory)
    assert ecrl.evaluate(last_state(cfg), cfg)["eval/avg_reward"] >= 0.95


def test_grpo_learns_without_a_critic():
    grpo = {"name": "grpo", "cfg": {"group_size": 4, "n_epochs": 2, "batch_size": 64, "learning_rate": 0.02}}
    cfg = agent("mingru", policy=recurrent, algorithm=grpo, **{"trainer.iterations": 50})
    assert ecrl.evaluate(last_state(cfg), cfg)["eval/avg_reward"] >= 0.9


def test_only_what_remembers_has_memory():
    for memory, names in (
        ("shared", {"shared"}),
        ("separate", {"actor", "critic"}),
        ("actor", {"actor"}),
        ("critic", {"critic"}),
    ):
        cfg = agent("lstm", memory, **SHORT)
        carry = init_state(cfg)["carry"]
        assert set(carry.keys()) == names and all(set(carry[name].keys()) == {"h", "c"} for name in names)


def test_the_settings_of_the_critics_optimiser_reach_its_own_cell():
    own = {"algorithm.cfg.critic_learning_rate": 1e-8}
    for memory, still in (("separate", True), ("shared", False)):
        cfg = agent("gru", memory, **SHORT, **own)
        start, end = init_state(cfg)["params"], last_state(cfg)["params"]
        place = ("critic", "trunk", "cell", "hidden") if memory == "separate" else ("shared", "trunk", "cell", "hidden")
        assert torch.allclose(start[place], end[place], atol=1e-5) == still


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
@pytest.mark.parametrize(
    ("cell", "memory"),
    [("gru", "shared"), pytest.param("lstm", "separate", marks=pytest.mark.long), ("mingru", "critic")],
)
def test_a_compiled_run_equals_an_eager_one(cell, memory):
    changes = {**SHORT, "env": {"name": "remember_cue", "cfg": {"end": "truncated"}}}
    eager, compiled = (last_state(agent(cell, memory, **changes, **{"trainer.compile": c})) for c in ("off", "on"))
    for name in ("params", "carry"):
        for path, leaf in eager[name].items(True, True):
            close(compiled[name][path], leaf, tol=1e-4)


def test_a_resumed_run_continues_in_the_middle_of_an_episode(tmp_path):
    cfg = agent("lstm", "separate", **SHORT)
    first = last_state(cfg.replace(**{"trainer.iterations": 2}))
    assert first["env", "elapsed"].any(), "episodes cross the boundary"
    ecrl.save(tmp_path / "middle", first, cfg)
    state, loaded = ecrl.load(tmp_path / "middle")
    assert same(last_state(loaded, state), last_state(cfg))


@pytest.mark.parametrize("cell", CELLS)
def test_seeds_under_vmap_equal_single_runs(cell):
    cfg = agent(cell, **SHORT)
    iteration, keys = make_iteration(cfg), [rng.key(seed) for seed in range(3)]
    single = [iteration(iteration(init_state(cfg, key))[0])[0] for key in keys]
    together = torch.stack([init_state(cfg, key) for key in keys])
    together = vmap(iteration)(vmap(iteration)(together)[0])[0]
    for i, state in enumerate(single):
        for name in ("params", "carry"):
            for path, leaf in state[name].items(True, True):
                close(together[name][path][i].detach(), leaf.detach(), tol=1e-4)


def test_an_exported_policy_takes_and_gives_its_memory(tmp_path):
    cfg = agent("lstm", "separate", **{"trainer.iterations": 1})
    state = last_state(cfg)
    with torch.no_grad():
        export(state, cfg, tmp_path)
        names = [f"{side}_{part}" for side in ("actor", "critic") for part in ("c", "h")]
        about = json.loads((tmp_path / "policy.json").read_text())
        assert sorted(one["name"] for one in about["inputs"]) == sorted(
            ["obs", "is_first", *(f"carry_{n}" for n in names)]
        )
        module, policy = torch.export.load(tmp_path / "policy.pt2").module(), build(cfg).policy
        carry = policy.init_carry(state["params"], 5)
        given = {f"carry_{name}": torch.full((5, 8), 9.0) for name in names}
        for step in range(3):
            obs = torch.randn(5, 2, generator=torch.Generator().manual_seed(step))
            outputs = module(obs=obs, is_first=torch.tensor([step == 0] * 5), **given)
            results = dict(zip([one["name"] for one in about["outputs"]], outputs, strict=True))
            carry, out = policy.act(state["params"], carry, obs, None)
            assert torch.equal(results["action"], out["action"])
            given = {f"carry_{name}": results[f"next_carry_{name}"] for name in names}
            close(given["carry_critic_c"], carry["critic", "c"])


def loops_of_the_loss(cfg):
    """Return the number of loops in the graph of a loss's gradient."""
    run, state = build(cfg), init_state(cfg)
    rows = rows_of(run, collect(run, state)[1])

    def gradient(params, rows):
        return torch.func.grad(lambda params: sum(x.sum() for x in run.policy.evaluate_and_value_rows(params, rows)))(
            params
        )

    return len(graph_of(gradient, state["params"], rows).graph.find_nodes(op="call_function", target=scan_op))


def test_a_shared_cell_runs_once_per_gradient_step():
    assert loops_of_the_loss(agent("gru", "shared", **SHORT)) == 2, "forwards and backwards"
    assert loops_of_the_loss(agent("gru", "separate", **SHORT)) == 4


def test_a_loss_with_a_shared_cell_is_the_loss_of_separate_calls(monkeypatch):
    cfg = agent("gru", "shared", **SHORT)
    together = last_state(cfg)
    make = ecrl.loop.build.make_policy
    apart = lambda *args: replace(make(*args), evaluate_and_value=None)  # noqa: E731
    monkeypatch.setattr(ecrl.loop.build, "make_policy", apart)
    for path, leaf in last_state(cfg)["params"].items(True, True):
        close(leaf, together["params"][path])


@needs_cpu_compiler
def test_a_long_enough_run_with_memory_is_compiled():
    """An eager gradient step takes time for each step of a sequence, so compiling pays off earlier."""
    sizes = {"trainer.iterations": 60, "trainer.buffer_size": 128, "algorithm.cfg.batch_size": 512}
    cfg = agent(**{"trainer.compile": "auto"}, **sizes)
    feed_forward = {"name": "actor_critic", "actor": NET, "critic": NET}
    assert form_of(cfg).name == "compiled"
    assert form_of(cfg.replace(**{"policy.cell.type": "mingru"})).name == "eager", "it runs no loop over the steps"
    assert form_of(cfg.replace(**{"policy": feed_forward})).name == "eager"


REFUSED = [
    (recurrent(memory="separate"), "memory='separate' needs a critic; give critic, or use memory=\"actor\""),
    (recurrent(memory="critic"), "memory='critic' needs a critic"),
    (recurrent(critic_obs=["goal"]), "critic_obs is given, but critic is not; leave critic_obs out"),
    (with_critic(critic_obs=["goal"]), "critic_obs: actor and critic share a cell, so both read the observations of"),
    (with_critic(memory="both"), "memory: expected 'shared', 'separate', 'actor' or 'critic', got 'both'"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        make_policy(settings, VECTOR, CHOICE)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("memory", MEMORIES)
def test_observations_without_features_are_refused(memory):
    space = spaces.dict_space({"action_mask": spaces.box(0, 1, 4)})
    with pytest.raises(ConfigError, match="the observations have nothing that a network reads; add"):
        make_policy(with_critic(memory=memory), space, CHOICE)


def test_acting_leaves_out_a_critic_without_memory():
    """An error in the weights of the critic's encoder shows whether `act` reads them."""
    for memory, reads in (("actor", False), ("separate", True)):
        policy = make_policy(with_critic(memory=memory, encoder=NET), VECTOR, CHOICE)
        params = policy.init(rng.key(0))
        carry = policy.init_carry(params, 2)
        params["critic", "trunk"] = params["critic", "trunk"].exclude("encoder")
        with pytest.raises(KeyError) if reads else nullcontext():
            policy.act(params, carry, torch.zeros(2, 3), None)


def test_ppo_needs_a_critic():
    with pytest.raises(ConfigError, match="no critic, which ppo needs; use actor_critic, or recurrent with a critic"):
        init_state(agent(policy=recurrent))


def broken(change):
    policy = make_policy(with_critic(), VECTOR, CHOICE)
    return replace(policy, evaluate_and_value=partial(change, policy.evaluate_and_value))


def unrecorded(fn, *args):
    with torch.no_grad():
        return fn(*args)


def half_recorded(fn, *args):
    log_prob, entropy, value = fn(*args)
    return log_prob, entropy, value.detach()


def test_a_wrong_evaluate_and_value_is_found():
    def found(change):
        (line,) = check_policy(broken(change), VECTOR, CHOICE).findings
        return line

    assert "evaluate_and_value returns V" in found(lambda fn, *args: (*fn(*args)[:2], fn(*args)[2] + 1.0))
    assert "evaluate_and_value returns log_prob" in found(lambda fn, *args: (fn(*args)[0] * 2.0, *fn(*args)[1:]))
    assert found(unrecorded).startswith("no gradient reaches the params from evaluate_and_value")
    (line, *_) = check_policy(broken(half_recorded), VECTOR, CHOICE).findings
    assert line.startswith("evaluate_and_value gives the parameter critic.network") and "another gradient" in line
    assert "evaluate_and_value returns 2 values, expected 3: (log_prob, entropy, V)" in found(
        lambda fn, *args: fn(*args)[:2]
    )


def test_evaluate_and_value_needs_both_functions():
    policy = make_policy(with_critic(), VECTOR, CHOICE)
    (line,) = check_policy(replace(policy, value=None), VECTOR, CHOICE).findings
    assert line == "has evaluate_and_value, but no value; pass value too"


def test_apg_learns_what_to_remember():
    apg = {"name": "apg", "cfg": {"gamma": 1.0, "learning_rate": 0.02, "deterministic_actions": True}}
    numbers = {"env": {"name": "remember_cue", "cfg": {"action": "number"}}}
    cfg = agent(policy=recurrent, algorithm=apg, **numbers, **{"trainer.iterations": 60, "trainer.buffer_size": 9})
    assert ecrl.evaluate(last_state(cfg), cfg)["eval/avg_reward"] > -0.1


def test_a_memory_that_is_not_there_is_refused():
    policy = make_policy(with_critic(encoder=NET), VECTOR, CHOICE)
    params, obs = policy.init(rng.key(0)), torch.zeros(5, 3)
    with pytest.raises(ConfigError, match=r"the carry has no 'shared'; pass init_carry\(params, num_envs\)"):
        policy.act(params, TensorDict({}, [5]), obs, None)
    steps = TensorDict({"obs": torch.zeros(5, 2, 3), "done": torch.zeros(5, 2).bool()}, [5, 2])
    final = TensorDict({"obs": torch.zeros(5, 1, 3)}, [5, 1])
    with pytest.raises(ConfigError, match="the carry has no 'shared'"):
        policy.value(params, policy.init_carry(params, 5), steps, final)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"type": "gru", "hidden_size": 6}, r"the carry 'shared' has h \[6\], expected h \[8\]; pass a carry of this"),
        ({"type": "lstm", "hidden_size": 8}, r"the carry 'shared' has h \[8\], c \[8\], expected h \[8\]"),
    ],
)
def test_a_memory_of_another_network_is_refused(other, message):
    policy = make_policy(with_critic(), VECTOR, CHOICE)
    another = make_policy({**with_critic(), "cell": other}, VECTOR, CHOICE)
    carry = another.init_carry(another.init(rng.key(0)), 5)
    with pytest.raises(ConfigError, match=message):
        policy.act(policy.init(rng.key(0)), carry, torch.zeros(5, 3), None)


@pytest.mark.parametrize("cell", CELLS)
def test_a_memory_of_other_environments_is_refused(cell):
    policy = make_policy({**with_critic(), "cell": {"type": cell, "hidden_size": 8}}, VECTOR, CHOICE)
    params = policy.init(rng.key(0))
    carry = policy.init_carry(params, 3)
    message = r"^policy recurrent: the carry has the batch shape \[3\], but the observations have \[5\]; pass one"
    with pytest.raises(ConfigError, match=message):
        policy.act(params, carry, torch.zeros(5, 3), None)
    steps = TensorDict({"obs": torch.zeros(5, 2, 3), "done": torch.zeros(5, 2).bool()}, [5, 2])
    with pytest.raises(ConfigError, match=message):
        policy.value(params, carry, steps, None)


def test_actor_and_critic_that_share_a_cell_read_the_same_observations():
    space = spaces.dict_space({"a": VECTOR, "b": VECTOR})
    policies = [
        make_policy(with_critic(**settings), space, CHOICE)
        for settings in (
            {"actor_obs": ["a"]},
            {"actor_obs": ["a"], "critic_obs": ["a"]},
            {"actor_obs": ["a", "b"], "critic_obs": ["b", "a"]},
        )
    ]
    inputs = [policy.init(rng.key(0))["shared", "trunk", "cell", "input"].shape[0] for policy in policies]
    assert inputs == [3, 3, 6]
