"""`check_policy` finds nothing in sound policies, and reports each fault of others in one line with advice."""

import re
from dataclasses import replace
from typing import Any

import pytest
import support.custom_modules  # noqa: F401  # registers policies
import torch
from support.frozen_agent import freezing
from support.recurrent_agent import remembering
from support.replay_agent import replaying
from support.small_runs import NET, small
from support.token_agent import speaking
from tensordict import TensorDict

import ecrl
from ecrl import rng
from ecrl.config.presets import preset_names
from ecrl.envs import make_env
from ecrl.errors import ConfigError, UserError
from ecrl.loop import policy_check
from ecrl.loop.policy_check import check_policy, random_observations
from ecrl.policies import Policy, make_policy
from ecrl.policies.contract import checked_policy, checking
from ecrl.policies.networks import NetworkConfig, make_network, seeded
from ecrl.spaces import Discrete, MultiDiscrete, box, dict_space

ENV = {"recurrent": "remember_cue", "feed-forward": "cartpole"}
CONFIGS = {"recurrent": remembering, "feed-forward": small}


def spaces_of(cfg):
    env = make_env(cfg.env)
    return env.observation_space, env.action_space


def policy_of(kind):
    cfg = CONFIGS[kind]()
    return make_policy(cfg.policy, *spaces_of(cfg))


def findings(kind, **changes):
    """Findings of a policy with other functions."""
    return check_policy(replace(policy_of(kind), **changes), *spaces_of(CONFIGS[kind]())).findings


NUMBER = {"env": {"name": "remember_cue", "cfg": {"action": "number"}}}
MODULES = ("trunk", "acts", "acts_on_noise")
SOUND = {
    "actor_critic": small(),
    "actor_only": small(**{"policy": {"name": "actor_only", "actor": NET}, "algorithm": {"name": "grpo"}}),
    "normalized": small(**{"policy.normalize_obs": True}),
    "bf16": small(**{"policy.bf16": True}),
    "box": small(**{"env": "pendulum"}),
    "squashed": small(**{"env": "pendulum", "policy.squash": True}),
    **{name: small(**{"policy": {"name": name}}) for name in MODULES},
    "own_std": small(**{"env": "pendulum", "policy": {"name": "own_std"}}),
    "tokens": speaking(),
    "frozen": freezing(),
    "q": replaying(),
    "recurrent": remembering(),
    "recurrent box": remembering(**NUMBER),
    "recurrent normalized": remembering(**{"policy.normalize_obs": True}),
}


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_in_a_sound_policy(name):
    before = torch.get_rng_state()
    assert check_policy(SOUND[name]).findings == []
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", sorted(preset_names()))
def test_nothing_is_found_in_the_policies_of_the_shipped_configs(name):
    assert ecrl.check_policy(name).findings == []


def test_a_policy_with_its_spaces():
    for kind in CONFIGS:
        report = check_policy(policy_of(kind), *spaces_of(CONFIGS[kind]()))
        assert report.findings == [] and report.notes == ["56 steps compared, to a tolerance of 0.0001"]


CELL: Any = policy_of("recurrent")
PLAIN: Any = policy_of("feed-forward")


def without_restart(params, carry, steps, *final):
    steps = steps.copy().set("done", torch.zeros_like(steps["done"]))
    return params, carry, steps, *final


def without_carry(params, carry, steps, *final):
    return params, CELL.init_carry(params, len(carry)), steps, *final


def without_advance(params, carry, steps, *final):
    return params, carry, steps.copy().set("done", torch.ones_like(steps["done"])), *final


def with_first_memory(params, carry, steps, final):
    if final is not None:
        first = CELL.init_carry(params, final.shape.numel()).reshape(final.shape)
        final = final.copy().set("carry", first)
    return params, carry, steps, final


NUM = r"-?[\d.e-]+"
RESTART = (
    "; this step comes after the end of an episode: restart the memory from init_carry after each step with `done`"
)
RECURRENCES = {
    "evaluate without restart": ("evaluate", without_restart, RESTART),
    "evaluate without carry": ("evaluate", without_carry, "; start from the given carry"),
    "evaluate without advance": (
        "evaluate",
        without_advance,
        "; start from the given carry, and advance it as `act` does",
    ),
    "value without restart": ("value", without_restart, RESTART),
    "value without carry": ("value", without_carry, "; start from the given carry, and advance it as `act` does"),
    "V_final": ("value", with_first_memory, "; compute V_final from final['carry'], the memory after `act`"),
}


@pytest.mark.parametrize("case", RECURRENCES)
def test_a_recurrence_that_differs_from_acting(case):
    name, changed, advice = RECURRENCES[case]
    lines = findings("recurrent", **{name: lambda *args: getattr(CELL, name)(*changed(*args))})
    place = rf"{NUM} in env \d at step \d+"
    expected = {
        "evaluate": rf"evaluate returns log_prob {place}, but act returned {NUM}",
        "value": rf"value returns {place} if called with steps of shape \[4, 14\], but {NUM} if called with that step "
        "alone",
        "V_final": rf"value returns V_final {NUM}, but V {NUM}, for the observation in env \d at step \d+",
    }[case if case == "V_final" else name]
    assert re.fullmatch(expected + re.escape(advice), lines[0]), lines


def changed_out(made, **fields):
    """An `act` whose output has other fields, `fields` of functions of the output."""

    def act(*args):
        carry, out = made.act(*args)
        return carry, out.copy().update({name: fn(out) for name, fn in fields.items()})

    return act


def evaluate_of_half(params, carry, steps):
    log_prob, entropy = PLAIN.evaluate(params, carry, steps)
    return 0.5 * log_prob, entropy


def test_a_log_probability_that_differs_from_acting():
    (line,) = findings("feed-forward", evaluate=evaluate_of_half)
    advice = "; compute both from the same distribution"
    assert re.fullmatch(rf"evaluate returns log_prob {NUM} in env \d at step 0, but act returned {NUM}{advice}", line)


def test_a_log_probability_of_tokens_that_evaluate_sums():
    cfg = speaking()
    policy: Any = make_policy(cfg.policy, *spaces_of(cfg))

    def act(*args):
        carry, out = policy.act(*args)
        return carry, out.exclude("token_mask")

    def evaluate(*args):
        return tuple(x.sum(-1) for x in policy.evaluate(*args))

    (line,) = check_policy(replace(policy, act=act, evaluate=evaluate), *spaces_of(cfg)).findings
    assert line == (
        "evaluate returns log_prob [4, 14] for steps [4, 14], but act returned sample_log_prob [4, 14, 2]; return one "
        "entry per token from both, or sum in both"
    )


class Counter:
    """A function of a policy that depends on the number of its calls."""

    def __init__(self, fn):
        self.fn, self.calls = fn, 0

    def __call__(self, *args):
        self.calls += 1
        return self.fn(self.calls, *args)


@pytest.mark.parametrize(("first", "second"), [(torch.nan, 0.0), (torch.inf, torch.finfo().max), (0, False)])
def test_nan_and_infinity_are_no_numbers(first, second):
    one, other = torch.tensor([first]), torch.tensor([second])
    assert policy_check._is_same({"x": one}, {"x": one.clone()})
    assert not policy_check._is_same({"x": one}, {"x": other})
    assert not policy_check._is_same({"x": one}, {"x": one.repeat(2)})


def test_functions_that_depend_on_more_than_their_arguments():
    advice = "let it depend on its arguments alone, and draw random numbers in `draw`, from its keys"
    for name, fn in {
        "draw": lambda calls, keys: PLAIN.draw(keys + calls),
        "value": lambda calls, *args: PLAIN.value(*args) + calls,
    }.items():
        lines = findings("feed-forward", **{name: Counter(fn)})
        assert f"{name} returns other values when it is called again with the same arguments; {advice}" in lines

    def act(calls, params, carry, obs, noise):
        noise = PLAIN.draw(rng.split(rng.key(calls), len(obs))) if noise is None else noise
        return PLAIN.act(params, carry, obs, noise)

    lines = findings("feed-forward", act=Counter(act))
    assert lines == [
        f"act without noise returns other values when it is called again with the same arguments; {advice}"
    ]


def writing(fn, write):
    def wrapped(*args):
        write(*args)
        return fn(*args)

    return wrapped


WRITES = {
    "act": ("recurrent", lambda params, carry, obs, noise: carry["h"].add_(1.0)),
    "evaluate": ("recurrent", lambda params, carry, steps: steps["sample_log_prob"].zero_()),
    "value": ("feed-forward", lambda params, carry, obs: obs.mul_(1.0)),
    "draw": ("feed-forward", lambda keys: keys.add_(1)),
}


@pytest.mark.parametrize("name", WRITES)
def test_functions_that_write_on_their_arguments(name):
    kind, write = WRITES[name]
    lines = findings(kind, **{name: writing(getattr(policy_of(kind), name), write)})
    assert f"{name} writes to its arguments; return new tensors instead" in lines


def constant(key):
    return PLAIN.init(rng.key(3))


def test_an_init_that_does_not_depend_on_its_key_alone():
    line = "init returns the same params for two keys; draw them from the key with ecrl.rng"
    assert findings("feed-forward", init=constant) == [line]
    changing = Counter(lambda calls, key: PLAIN.init(rng.fold_in(key, calls)))
    line = "init returns other params for the same key; draw all numbers from the key with ecrl.rng"
    assert findings("feed-forward", init=changing) == [line]


MASKS = {
    "choices": (MultiDiscrete((2,) * 5), Discrete(5)),
    "groups": (MultiDiscrete((2,) * 5), MultiDiscrete((2, 3))),
    "numbers": (box(0.0, 1.0, 5), Discrete(5)),
}


@pytest.mark.parametrize("case", MASKS)
def test_nothing_is_found_in_a_policy_with_an_action_mask(case):
    mask, action_space = MASKS[case]
    space = dict_space({"angle": box(-1.0, 1.0, 3), "action_mask": mask})
    policy = make_policy(small().policy, space, action_space)
    assert check_policy(policy, space, action_space).findings == []


def test_a_mask_beside_continuous_actions_is_another_observation():
    space = dict_space({"angle": box(-1.0, 1.0, 3), "action_mask": MultiDiscrete((2, 2))})
    policy = make_policy(small().policy, dict_space({"angle": box(-1.0, 1.0, 3)}), TORQUE)
    assert check_policy(policy, space, TORQUE).findings == []


SPACE, TORQUE = box(-1.0, 1.0, 3), box(-1.0, 1.0, 2)


def deterministic(stop=lambda x: x, **functions):
    """A deterministic actor with a critic of actions, as in DDPG; `stop` changes the action."""
    net = NetworkConfig(network_cfg={"hidden_sizes": [8]})  # pyright: ignore
    actor, critic = make_network(net, SPACE, 2, False), make_network(net, box(-1.0, 1.0, 5), 1, False)

    def init(key):
        with seeded(key):
            return TensorDict({"actor": actor.init(), "critic": critic.init()}, [])

    def act(params, carry, obs, noise):
        action = stop(torch.tanh(actor.forward(params["actor"], obs)))
        return carry, TensorDict({"action": action}, action.shape[:-1])

    def q(params, obs, action, noise):
        return critic.forward(params["critic"], torch.cat((obs, action), -1))[..., 0].unsqueeze(0)

    return Policy(init, lambda keys: rng.normal(keys, (2,)), act, None, None, q=q, **functions)


def test_the_gradient_of_a_deterministic_actor_goes_through_q():
    assert check_policy(deterministic(), SPACE, TORQUE).findings == []
    lines = check_policy(deterministic(lambda x: x.detach()), SPACE, TORQUE).findings
    assert len(lines) == 4
    line = "no gradient reaches the parameter actor.0.bias from evaluate, value and q; use it there without detach, or"
    assert lines[0].startswith(line)


VALUES = {  # Q for observations [2, 5] without an action, and its description; None for sound values
    "actions": ((3, 2, 5, 4), None),
    "atoms": ((1, 2, 5, 4, 51), None),
    "no critics": ((2, 5, 4), "float32 [2, 5, 4]"),
    "no actions": ((3, 2, 5), "float32 [3, 2, 5]"),
    "other actions": ((3, 2, 5, 3), "float32 [3, 2, 5, 3]"),
    "critics last": ((2, 5, 4, 3), "float32 [2, 5, 4, 3]"),
    "more axes": ((3, 2, 5, 4, 51, 1), "float32 [3, 2, 5, 4, 51, 1]"),
    "scalar": ((), "float32 []"),
}


@pytest.mark.parametrize("case", VALUES)
def test_the_axes_of_q_of_all_actions(case):
    shape, given = VALUES[case]
    policy = checked_policy(replace(deterministic(), q=lambda *args: torch.zeros(shape)), SPACE, Discrete(4))
    q: Any = policy.q
    with checking():
        if given is None:
            assert q(TensorDict({}, []), torch.zeros(2, 5, 3), None, None).shape == shape
            return
        with pytest.raises(ConfigError) as error:
            q(TensorDict({}, []), torch.zeros(2, 5, 3), None, None)
    expected = "float [critics, 2, 5, 4] with an optional last axis of atoms; return such a tensor"
    assert str(error.value) == f"the policy: q returns {given}, expected {expected}"


def test_the_axes_of_q_of_an_action():
    policy = deterministic()
    q: Any = policy.q
    for change, given in (
        (lambda x: x[0], "float32 [4, 14]"),
        (lambda x: x.squeeze(0).unsqueeze(-1), "float32 [4, 14, 1]"),
        (lambda x: x.mean((1, 2)), "float32 [1]"),
        (lambda x: x > 0.0, "bool [1, 4, 14]"),
    ):
        other = replace(policy, q=lambda *args, change=change: change(q(*args)))
        expected = "float [critics, 4, 14] with an optional last axis of atoms; return such a tensor"
        assert check_policy(other, SPACE, TORQUE).findings == [f"q returns {given}, expected {expected}"]


def drifted(params, exploration, out, noise):
    return exploration, out.copy().set("action", out["action"] + exploration["drift"].unsqueeze(-1))


def first_drift(params, num_envs):
    return TensorDict({"drift": torch.full((num_envs,), 0.1)}, [num_envs])


EXPLORES = {
    "sound": ({}, []),
    "explore draws": (
        {"explore": lambda params, exploration, out, noise: (exploration, out.apply(torch.rand_like))},
        ["explore draws random numbers from a generator of torch, so equal states give unequal results; draw"],
    ),
    "explore writes": (
        {"explore": lambda *args: (args[1], args[2].copy().set("action", args[2]["action"].mul_(2.0)))},
        ["explore writes to its arguments; return new tensors instead"],
    ),
    "the first exploration draws": (
        {"init_exploration": lambda params, num_envs: first_drift(params, num_envs).apply(torch.rand_like)},
        ["init_exploration draws random numbers from a generator of torch, so equal states give unequal results"],
    ),
    "rows": (
        {"init_exploration": lambda params, num_envs: first_drift(params, 1)},
        ["init_exploration returns drift as float32 [1], expected [4, ...]; return one entry per environment"],
    ),
}


@pytest.mark.parametrize("case", EXPLORES)
def test_the_functions_of_an_exploration_are_called(case):
    functions, lines = EXPLORES[case]
    policy = deterministic(**{"explore": drifted, "init_exploration": first_drift, **functions})
    found = check_policy(policy, SPACE, TORQUE).findings
    assert len(found) == len(lines) and all(map(str.startswith, found, lines)), found


def test_an_exploration_whose_numbers_the_algorithm_makes_is_noted():
    report = check_policy(replaying())
    assert report.findings == [] and len(report.notes) == 2
    assert report.notes[1].startswith("explore is not checked, because it raised KeyError(")


def detached(params, carry, steps):
    return tuple(x.detach() for x in PLAIN.evaluate(params, carry, steps))


def test_parameters_that_no_gradient_reaches():
    advice = "use it there without detach, or return it from init_frozen"
    lines = findings("feed-forward", evaluate=detached)
    assert f"no gradient reaches the parameter actor.0.bias from evaluate and value; {advice}" in lines
    assert len(lines) == 4 and all(line.startswith("no gradient reaches the parameter actor.") for line in lines)

    def init(key):
        return PLAIN.init(key).set("unused", rng.normal(key, (3,)))

    line = f"no gradient reaches the parameter unused from evaluate and value; {advice}"
    assert findings("feed-forward", init=init) == [line]
    no_value = replace(PLAIN, evaluate=detached, value=None)
    (line,) = check_policy(no_value, *spaces_of(small())).findings
    assert line == "no gradient reaches the params from evaluate and value; leave out detach and torch.no_grad"


def test_a_gradient_of_nan():
    def value(params, carry, obs):
        return PLAIN.value(params, carry, obs) + (params["actor", "0.bias"] * 0.0).sum().sqrt()

    lines = findings("feed-forward", value=value)
    assert lines == ["the gradient of the parameter actor.0.bias holds NaN or infinity; mend evaluate or value"]


def test_an_entropy_of_nan():
    def evaluate(params, carry, steps):
        log_prob, entropy = PLAIN.evaluate(params, carry, steps)
        return log_prob, entropy * torch.nan

    lines = findings("feed-forward", evaluate=evaluate)
    assert lines[0] == "evaluate returns an entropy of NaN or infinity; mend its computation"


def test_a_value_of_several_rows_that_depends_on_the_others():
    lines = findings("feed-forward", value=lambda *args: (v := PLAIN.value(*args)) - v.mean())
    together = rf"value returns {NUM} in env \d at step \d if called with steps of shape \[4, 14\]"
    by_itself = rf"{together}, but {NUM} if called with that step alone"
    assert re.fullmatch(by_itself + "; compute each row independently", lines[0])


CONTRACT = {  # the changed functions, the line
    "arguments": ({"value": lambda params, obs: obs}, "value takes (params, obs), expected (params, carry, obs); take"),
    "action": (
        {"act": changed_out(PLAIN, action=lambda out: out["action"].float())},
        "act returns action as float32 [4], expected int64 [4] for a Discrete action space; return such a tensor",
    ),
    "log-probability": (
        {"evaluate": lambda *args: PLAIN.evaluate(*args)[0]},
        "evaluate returns float32 [4, 14], expected 2: (log_prob, entropy); return these values",
    ),
    "entropy": (
        {"evaluate": lambda *args: (PLAIN.evaluate(*args)[0], torch.zeros(()))},
        "evaluate returns entropy as float32 [], expected float [4, 14] with optional token axes; return such a tensor",
    ),
    "value": (
        {"value": lambda *args: PLAIN.value(*args).unsqueeze(-1)},
        "value returns V as float32 [4, 14, 1], expected float [4, 14]; return such a tensor",
    ),
    "global generator": (
        {"act": writing(PLAIN.act, lambda *args: torch.rand(1))},
        "act draws random numbers from a generator of torch, so equal states give unequal results; draw them from",
    ),
}


@pytest.mark.parametrize("case", CONTRACT)
def test_a_function_that_breaks_the_contract(case):
    changes, line = CONTRACT[case]
    lines = findings("feed-forward", **changes)
    assert lines[-1].startswith(line), lines


NORMALIZED: Any = make_policy(small(**{"policy.normalize_obs": True}).policy, *spaces_of(small()))
FROZEN: Any = make_policy(freezing().policy, *spaces_of(freezing()))
DRAWS = "draws random numbers from a generator of torch, so equal states give unequal results; draw them from a"


def updated(change):
    """Changed functions: `norm_update` returns other statistics."""
    return {"norm_update": lambda *args: change(NORMALIZED.norm_update(*args))}


STATISTICS = {  # the changed functions, the line
    "no first": (
        {"norm_init": lambda device: None},
        "norm_init returns NoneType None, expected the norm as a TensorDict",
    ),
    "dict": (
        {"norm_init": lambda device: {}},
        "norm_init returns a dict, expected the norm as a TensorDict; return one",
    ),
    "none": (updated(lambda norm: None), "norm_update returns NoneType as the norm, expected a TensorDict; return one"),
    "tensors": (updated(dict), "norm_update returns dict as the norm, expected a TensorDict; return one"),
    "dtype": (
        updated(lambda norm: norm.copy().set("count", norm["count"].half())),
        "norm_update changes the norm's count from float64 [] to float16 []; keep its shape and dtype",
    ),
    "fields": (
        updated(lambda norm: norm.copy().set("last", norm["count"])),
        "norm_update adds fields of the norm: last; return the fields that `norm_init` returns",
    ),
    "draws": ({"norm_update": writing(NORMALIZED.norm_update, lambda *args: torch.rand(1))}, f"norm_update {DRAWS}"),
}


@pytest.mark.parametrize("case", STATISTICS)
def test_statistics_of_observations_that_break_the_contract(case):
    changes, line = STATISTICS[case]
    lines = check_policy(replace(NORMALIZED, **changes), *spaces_of(small())).findings
    assert len(lines) == 1 and lines[0].startswith(line), lines


FROZEN_PARAMS = {
    "none": (lambda device: None, "init_frozen returns NoneType None, expected the frozen params as a TensorDict"),
    "dict": (lambda device: {}, "init_frozen returns a dict, expected the frozen params as a TensorDict; return one"),
}


@pytest.mark.parametrize("case", FROZEN_PARAMS)
def test_frozen_parameters_that_break_the_contract(case):
    fn, line = FROZEN_PARAMS[case]
    lines = check_policy(replace(FROZEN, init_frozen=fn), *spaces_of(freezing())).findings
    assert len(lines) == 1 and lines[0].startswith(line), lines


def test_frozen_parameters_may_be_drawn_before_the_pretrained_ones_replace_them():
    fn = writing(FROZEN.init_frozen, lambda device: torch.rand(1))
    assert check_policy(replace(FROZEN, init_frozen=fn), *spaces_of(freezing())).findings == []


def test_a_memory_that_breaks_the_contract():
    def act(*args):
        carry, out = CELL.act(*args)
        return carry.double(), out

    message = "act changes the carry's h from float32 [4, 8] to float64 [4, 8]; keep its shape and dtype"
    assert findings("recurrent", act=act) == [message]


def test_arguments_of_the_check():
    with pytest.raises(UserError, match=r"^num_steps: 7, expected at least 8, so that"):
        check_policy("cartpole_ppo", num_steps=7)
    with pytest.raises(UserError, match="got a policy without its spaces; pass observation_space and action_space"):
        check_policy(PLAIN)
    with pytest.raises(UserError, match="got spaces and a config, which has its own; pass a policy, or the config"):
        check_policy(small(), *spaces_of(small()))
    with pytest.raises(ConfigError, match="did you mean 'cartpole_ppo'"):
        check_policy("cartpol_ppo")


def test_observations_are_in_their_space():
    image, mask = box(0, 255, 2, 2, 3, dtype=torch.uint8), MultiDiscrete((2,) * 5)
    parts = {
        "image": image,
        "gear": Discrete(3),
        "way": MultiDiscrete((2, 5)),
        "x": box(3.0, 4.0, 2),
        "action_mask": mask,
    }
    obs = random_observations(dict_space(parts), rng.split(rng.key(0), 64), (2, 3))
    assert obs["image"].dtype == torch.uint8 and obs["image"].shape == (64, 2, 2, 3) and obs["image"].max() > 200
    assert obs["gear"].unique().tolist() == [0, 1, 2] and obs["way"].amax(0).tolist() == [1, 4]
    assert (obs["x"] >= 3.0).all() and (obs["x"] <= 4.0).all() and obs["x"].std() > 0.1
    first, second = obs["action_mask"].split((2, 3), -1)
    assert first.any(-1).all() and second.any(-1).all() and not first.all() and not second.all()
    assert obs["action_mask"].unique().tolist() == [0, 1]
    wide = random_observations(box(-torch.inf, torch.inf, 2), rng.split(rng.key(0), 64))
    assert wide.isfinite().all() and 0.5 < wide.std() < 2.0
    assert isinstance(obs, TensorDict) and obs.batch_size == (64,)
