"""Findings of `check_env`: none for a sound environment, and one line with place and advice for each fault."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import gymnasium
import pytest
import torch
from support import (
    fake_envs,  # noqa: F401  (registers its environments)
    fake_gymnasium_envs,  # noqa: F401  (registers its environments)
)
from tensordict import TensorDict

import ecrl
from ecrl import rng
from ecrl.cli.main import main
from ecrl.env_check import check
from ecrl.env_check.check import check_env, random_actions, roll_out
from ecrl.envs import NEVER, Env, auto_reset, make_env, state_of, time_limit
from ecrl.errors import ConfigError, UserError
from ecrl.spaces import Discrete, MultiDiscrete, box, dict_space


def _reset(keys):
    return state_of(rng.uniform(keys, (3,)), keys.shape, age=torch.zeros_like(keys))


def _step(state, action, noise):
    age = state["age"] + 1
    after = {"age": age, "obs": rng.uniform(noise, (3,)), "reward": 1.0 * action, "terminated": age == 5}
    return state.copy().update(after)


GOOD = Env(_reset, _step, box(0.0, 1.0, 3), Discrete(2))


def _stepping(change):
    """Return a step whose result is changed by `change(state before, state after)`."""
    return {"step": lambda s, a, noise: (lambda after: after.update(change(s, after)))(_step(s, a, noise))}


def _writes(state, action, noise):
    state["age"] += 1
    return _step(state, action, noise)


def _sets(state, action, noise):
    state["last"] = action
    return _step(state, action, noise).exclude("last")


def _counting():
    calls = SimpleNamespace(number=0)

    def step(state, action, noise):
        calls.number += 1
        return _step(state, action, noise).update({"reward": torch.full_like(state["reward"], float(calls.number))})

    return step


def _at(age, value):
    """A value where an environment is of this age."""
    return lambda state, after: (after["age"] == age, value)


def _with(name, age, value):
    def change(state, after):
        x = after[name]
        there = (after["age"] == age).reshape(*after.batch_size, *[1] * (x.ndim - after.ndim))
        return {name: torch.where(there, value, x)}

    return change


def _reads_values(state, action, noise):
    return _step(state, action, noise) if bool(state["obs"].sum() > -1) else state


def _one_by_one(state, action, noise):
    return torch.stack([_step(state[i], action[i], noise[i]) for i in range(len(state))])


FAULTS = {
    "contract": (
        {"observation_space": box(0.0, 1.0, 4)},
        "reset returns field 'obs' as float32 [2, 3], expected float32",
    ),
    "high": (
        _stepping(_with("obs", 3, 7.5)),
        "obs[0] is 7.5 in env 0 after step 3, outside of 0 to 1; widen observation_space or clip",
    ),
    "last": (_stepping(_with("obs", 5, -1.0)), "final_obs[0] is -1 in env 0 after step 5, outside of 0 to 1"),
    "nan": (_stepping(_with("obs", 2, torch.nan)), "obs is nan in env 0 after step 2; a run would stop there"),
    "infinite": (_stepping(_with("reward", 4, torch.inf)), "reward is inf in env 0 after step 4; a run would stop"),
    "writes": ({"step": _writes}, "step modifies its input state.age; return new tensors"),
    "sets": ({"step": _sets}, "step modifies its input state.last; return new tensors"),
    "resets on keys": ({"reset": lambda keys: _reset(keys.add_(1))}, "reset modifies its input keys; return new"),
    "draws on keys": ({"draw": lambda keys: keys.mul_(3)}, "draw modifies its input keys; return new"),
    "global numbers": (
        {"reset": lambda keys: _reset(keys).set("age", torch.randint(0, 3, keys.shape))},
        "age differs in env",
    ),
    "hidden state": (
        {"step": _counting()},
        "reward differs in env 0 after step 1 when the rollout is repeated; draw only",
    ),
    "rows mixed": (
        _stepping(lambda s, after: {"reward": after["obs"][..., 0].sum(-1, keepdim=True).expand(after.shape)}),
        "step gives env 3 a different reward (by up to",
    ),
    "starts mixed": (
        {
            "reset": lambda keys: _reset(keys).update(
                {"obs": rng.uniform(keys[..., :1] * keys.shape[-1], (3,)).expand(*keys.shape, 3)}
            )
        },
        "reset gives env 3 a different",
    ),
    "noise mixed": (
        {"draw": lambda keys: rng.fold_in(keys, len(keys))},
        "draw gives env 3 a different step (by up to",
    ),
    "over": (
        {"reset": lambda keys: _reset(keys).set("truncated", torch.ones(keys.shape, dtype=torch.bool))},
        "truncated is true in env 0 at the start: the episode is over before its first step",
    ),
    "lockstep": (
        {"lockstep": True}
        | {"reset": lambda keys: _reset(keys).set("age", torch.arange(keys.shape[-1]).expand(keys.shape) % 3)},
        "episodes of envs 0 and 2 do not end together (step 3), but lockstep is set; leave lockstep out",
    ),
    "reward forgotten": (
        {"step": lambda s, a, noise: _step(s, a, noise).set("reward", s["reward"])},
        "step returns the reward of its input; set reward in every step",
    ),
    "reward copied": (
        {"step": lambda s, a, noise: _step(s, a, noise).set("reward", s["reward"].clone())},
        "step returns the reward of its input; set reward in every step",
    ),
    "terminated forgotten": (
        {"step": lambda s, a, noise: _step(s, a, noise).set("terminated", s["terminated"])},
        "step returns the terminated of its input; set terminated in every step, to False if no episode terminates",
    ),
    "five values": (
        {"step": lambda s, a, noise: (s["obs"], s["reward"], s["terminated"], s["truncated"], {})},
        "step returns tuple, expected a TensorDict with obs, reward, terminated and truncated",
    ),
    "nothing": ({"step": lambda s, a, noise: None}, "step returns NoneType, expected a TensorDict with obs"),
    "a float reward": (
        {"step": lambda s, a, noise: _step(s, a, noise).update({"reward": 1.0})},
        "<lambda> raises RuntimeError: ",
    ),
    "its own error": ({"reset": lambda keys: 1 / 0}, "<lambda> raises ZeroDivisionError: division by zero ("),
    "Gymnasium's space": (
        {"observation_space": gymnasium.spaces.Box(0.0, 1.0, (3,))},
        "observation_space is gymnasium.spaces.box.Box, expected a space of ecrl.spaces; from_gymnasium converts",
    ),
    "Gymnasium's actions": (
        {"action_space": gymnasium.spaces.Discrete(2)},
        "action_space is gymnasium.spaces.discrete.Discrete, expected a space of ecrl.spaces; from_gymnasium converts",
    ),
    "host read": ({"step": _reads_values}, "in _reads_values, reads values of a tensor"),
    "raises in graphs": (
        {"step": lambda s, a, noise: _step(s, torch.tensor(a.tolist()), noise)},
        "step cannot be compiled",
    ),
}


@pytest.fixture(autouse=True)
def equal_speed(monkeypatch):
    """A step takes a second for any number of environments, so that no finding depends on the machine."""
    monkeypatch.setattr(check, "_steps_per_second", lambda env, keys: float(len(keys)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": lambda s, a, noise: (s, s["reward"], {})}, "step returns tuple, expected a TensorDict"),
        ({"step": lambda s, a, noise: None}, "step returns NoneType, expected a TensorDict"),
        ({"step": lambda s, a, noise: {**_step(s, a, noise)}}, "step returns dict, expected a TensorDict"),
        ({"reset": lambda keys: (_reset(keys), {})}, "reset returns tuple, expected a TensorDict"),
    ],
)
def test_what_is_no_state_is_named_inside_a_time_limit_too(change, message):
    findings = check_env(time_limit(replace(GOOD, **change), 7), num_steps=12).findings
    assert len(findings) == 1 and message in findings[0], findings


def test_a_step_that_writes_is_one_finding():
    def writes(state, action, noise):
        state["obs"].mul_(0.5)
        return _step(state, action, noise)

    findings = check_env(replace(GOOD, step=writes), num_steps=12).findings
    assert findings == ["step modifies its input state.obs; return new tensors, as in state.copy().update(...)"]


def test_episodes_that_never_end_are_found(monkeypatch):
    endless = replace(GOOD, **_stepping(lambda _, after: {"terminated": after["age"] < 0}))
    monkeypatch.setattr(check, "_LONGEST", 50)
    message = "no episode ended in 12 steps, and none in up to 50 further steps; let step set terminated, wrap the env"
    assert check_env(endless, num_steps=12).findings[0].startswith(message)
    assert check_env(replace(endless, min_truncation_gap=NEVER), num_steps=12).findings[0].startswith(message)
    assert check_env(time_limit(endless, 40), num_steps=12).findings == []  # the limit is longer than the check
    late = replace(GOOD, **_stepping(lambda _, after: {"terminated": after["age"] == 30}))
    assert check_env(late, num_steps=12).findings == []
    monkeypatch.setattr(check, "_LONGEST_S", 0.0)
    assert len(check_env(late, num_steps=12).findings) == 1


def test_actions_that_are_a_dict_are_a_finding():
    report = check_env(replace(GOOD, action_space=dict_space({"a": Discrete(2)})))
    expected = "action_space is a Dict, expected a Box, Discrete or MultiDiscrete; join its parts into one action"
    assert report.findings == [expected]


def test_a_sound_environment_has_no_findings():
    report = check_env(GOOD, num_steps=12)
    assert report.findings == []
    assert report.notes[0] == "8 episodes ended in 12 steps of 4 envs"
    assert "env steps/s with one env" in report.notes[1]


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_one_line_with_its_place(name):
    change, message = FAULTS[name]
    findings = check_env(replace(GOOD, **change), num_steps=12).findings
    assert any(message in line for line in findings), findings
    assert all(line and "\n" not in line for line in findings)


@pytest.mark.parametrize(
    ("step", "rate", "expected"),
    [
        (_step, 256.0, []),
        (_one_by_one, 1.0, ["256 envs take 256 times as long as one; step all envs in one operation"]),
    ],
)
def test_an_environment_that_steps_its_rows_one_by_one_is_found(step, rate, expected, monkeypatch):
    monkeypatch.undo()
    clock = SimpleNamespace(now=0.0)

    def timed_step(*args):
        clock.now += len(args[0]) if step is _one_by_one else 1.0
        return _step(*args)

    monkeypatch.setattr(check.time, "perf_counter", lambda: clock.now)
    findings, note = check._check_speed(replace(GOOD, step=timed_step), rng.key(0))
    assert findings == expected
    assert note == f"1 env steps/s with one env, {rate:,.0f} with 256, eager"


@pytest.mark.parametrize("name", ["cartpole", "pendulum", "point_mass", "probe_match", "probe_delay"])
def test_environments_of_this_repository_are_sound(name):
    assert check_env(name, num_steps=20).findings == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PushCubeRL", "ReachRL", "CartPoleRL"])
def test_tasks_of_mujoco_are_sound(name):
    assert check_env(name, num_steps=60).findings == []


def test_an_environment_that_knows_its_place_and_how_often_it_began_is_found_out():
    assert any(line.startswith("reset gives env 3 a different limit") for line in check_env("ladder").findings)


def test_masks_and_parts_of_observations_are_honoured_and_checked():
    space = dict_space({"arm": box(0.0, 1.0, 2), "gear": Discrete(3), "action_mask": MultiDiscrete((2, 2, 2))})

    def parts(keys):
        mask = torch.tensor([False, True, False]).expand(*keys.shape, 3)
        arm = {"arm": rng.uniform(keys, (2,)), "gear": torch.zeros_like(keys), "action_mask": mask}
        return TensorDict(arm, keys.shape)

    def step(state, action, noise):
        ends = torch.zeros_like(state["terminated"])
        return state.copy().update({"obs": parts(noise), "reward": 1.0 * action, "terminated": ends})

    env = Env(
        lambda keys: state_of(torch.zeros(keys.shape), keys.shape).set("obs", parts(keys)), step, space, Discrete(3)
    )
    env = time_limit(env, 5)
    assert check_env(env, num_steps=8).findings == []
    played = roll_out(auto_reset(env), rng.split(rng.key(0), 4), 8)
    assert (played.actions == 1).all()
    wide = replace(env, step=lambda s, a, n: env.step(s, a, n).set(("obs", "gear"), torch.full_like(n, 3)))
    assert check_env(wide, num_steps=8).findings[0].startswith("obs.gear is 3 in env 0 after step 1, outside of 0 to 2")
    unseen = replace(env, observation_space=dict_space({"arm": box(0.0, 1.0, 2), "gear": Discrete(3)}))
    message = "obs.action_mask is not in observation_space, so a policy ignores it; add it to the space"
    assert message in check_env(unseen, num_steps=8).findings
    no = torch.zeros(3, dtype=torch.bool)

    def closed(state, action, noise):
        after = env.step(state, action, noise)
        mask = torch.where((after["elapsed"] == 2).unsqueeze(-1), no, after["obs", "action_mask"])
        return after.set(("obs", "action_mask"), mask)

    message = (
        "obs.action_mask allows no action in env 0 after step 2; "
        "allow at least one action, or one value per MultiDiscrete entry"
    )
    assert message in check_env(replace(env, step=closed), num_steps=8).findings


def test_a_mask_must_allow_an_action_of_each_choice():
    history = {"obs.action_mask": torch.tensor([[[1, 0, 1, 0]], [[1, 1, 0, 0]]])}
    assert [*check._empty_masks(MultiDiscrete((2, 2)), history)] == [
        "obs.action_mask allows no action in env 0 after step 1; "
        "allow at least one action, or one value per MultiDiscrete entry"
    ]
    assert [*check._empty_masks(Discrete(4), history)] == []


def test_random_actions_fill_their_space():
    keys = rng.split(rng.key(0), 4000)
    bounded = random_actions(box(-2.0, 3.0, 2), keys, None)
    assert bounded.shape == (4000, 2) and -2.0 <= bounded.min() < -1.95 and 2.95 < bounded.max() <= 3.0
    free = random_actions(box(-torch.inf, torch.inf, 1), keys, None)
    assert abs(float(free.mean())) < 0.1 and abs(float(free.std()) - 1.0) < 0.1
    several = random_actions(MultiDiscrete((2, 3)), keys, None)
    assert [several[:, i].bincount().tolist() for i in (0, 1)] == [
        pytest.approx([2000] * 2, rel=0.1),
        pytest.approx([1333] * 3, rel=0.1),
    ]


def test_gymnasium_environments_go_through_its_own_checker_too(recwarn):
    report = check_env("gymnasium:CartPole-v1", num_steps=40)
    assert report.findings == []
    assert (
        "Gymnasium's checker: A Box observation space maximum value is infinity. This is probably too high."
        in report.notes
    )
    assert not [w for w in recwarn if "Box observation" in str(w.message)]
    assert not check_env({"name": "gymnasium:CartPole-v1", "cfg": {"kwargs": {"max_episode_steps": 9}}}).findings
    broken = {"name": "gymnasium", "cfg": {"id": "Count-v0", "kwargs": {"fault": "nan"}}}
    findings = check_env(broken).findings
    assert len(findings) >= 1 and any("obs is nan in env 0 after step" in line for line in findings), findings


def test_what_it_is_asked_is_checked():
    with pytest.raises(ConfigError, match="did you mean 'cartpole'"):
        check_env("cartpol")
    with pytest.raises(UserError, match="num_steps: 1, expected at least 2"):
        check_env("cartpole", num_steps=1)
    assert ecrl.check_env is check_env and make_env("cartpole")


OWN = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
gymnasium.register("Own-v0", CartPoleEnv, max_episode_steps=5)
"""


def test_the_command_line(monkeypatch, capsys, tmp_path):
    def check_env_cli(*args):
        monkeypatch.setattr(sys, "argv", ["ecrl", "check-env", *args])
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    status, out, _ = check_env_cli("cartpole", "--num-steps", "16", "--env.cfg.max_episode_steps", "5")
    assert status == 0 and out.startswith("cartpole: 12 episodes ended in 16 steps") and out.endswith("cartpole: ok\n")
    status, out, _ = check_env_cli("configs/pendulum_ppo.json", "--num-steps", "4")
    assert status == 0 and out.endswith("configs/pendulum_ppo.json: ok\n")
    status, out, _ = check_env_cli("pendulum_ppo", "--num-steps", "4")
    assert status == 0 and out.endswith("pendulum_ppo: ok\n")
    status, out, _ = check_env_cli("ladder", "--num-steps", "4")
    assert status == 1 and out.startswith("ladder: reset gives env 3 a different limit") and "ok" not in out
    status, _, err = check_env_cli("cartpole", "--env.cfg.gravit", "3")
    assert (status, err) == (2, "env.cfg.gravit: unknown key; did you mean 'gravity'?\n")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one_of_my_own.py").write_text(OWN)
    own = ("gymnasium:one_of_my_own:Own-v0", "--num-steps", "8")
    status, _, err = check_env_cli(*own)
    assert status == 2 and "belongs to module 'one_of_my_own', which is not imported" in err
    status, out, err = check_env_cli(*own, "--import", "one_of_my_own")
    assert status == 0 and "Own-v0: ok" in out, out + err
    status, _, err = check_env_cli(*own, "--import=two_of_my_own")
    assert status == 2 and err.startswith("--import two_of_my_own: No module named")
    status, _, err = check_env_cli("cartpole", "--trainer.seed", "3")
    assert status == 2 and err.startswith("trainer.seed: expected a key of the environment")


@pytest.mark.parametrize(("gap", "declared"), [(9, "no truncation before step 9"), (NEVER, "no truncation")])
def test_a_truncation_before_the_declared_gap_is_found(gap, declared):
    cut = _stepping(lambda _, after: {"terminated": after["age"] < 0, "truncated": after["age"] == 5})
    findings = check_env(replace(GOOD, **cut, min_truncation_gap=gap), num_steps=8).findings
    assert findings == [
        "truncated is true in env 0 after step 5, at step 5 of the episode, but min_truncation_gap declares "
        f"{declared}; lower this gap"
    ]
    assert not check_env(replace(GOOD, **cut, min_truncation_gap=5), num_steps=8).findings
