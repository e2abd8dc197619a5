"""Gymnasium by id: equal to a loop over its environments, every kind of space trains, faults name env and step."""

import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from support import fake_gymnasium_envs
from support.checks import assert_pure, close
from support.gymnasium_workers import KEYS, SEEDS
from support.small_runs import NET, small

from ecrl import rng
from ecrl.config import EnvChoice, config_from_dict
from ecrl.envs import NEVER, auto_reset, clip_action, make_env
from ecrl.envs.experts import make_expert
from ecrl.envs.gymnasium import handles as live
from ecrl.envs.gymnasium.spaces import BadValue, action, collate
from ecrl.errors import ConfigError, UserError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, run_summary, train_iter
from ecrl.spaces import Box, Discrete, MultiDiscrete

FAST = {
    "trainer.num_envs": 64,
    "trainer.buffer_size": 8,
    "trainer.iterations": 8,
    "algorithm.cfg.learning_rate": 0.05,
    "algorithm.cfg.batch_size": 512,
    "algorithm.cfg.ent_coef": 0.0,
    "algorithm.cfg.n_epochs": 4,
}


@pytest.fixture(autouse=True)
def _nothing_stays_open():
    yield
    for one in list(live._LIVE.values()):
        one.close()


def count(**kwargs):
    return make_env({"name": "gymnasium:Count-v0", "cfg": {"kwargs": kwargs}})


def choice(*actions):
    return torch.tensor(actions)


# Names and settings


def test_every_way_to_name_one_is_the_same_config():
    cfg = {"id": "CartPole-v1", "max_episode_steps": 7}
    long = EnvChoice.model_validate({"name": "gymnasium", "cfg": cfg})
    short = {"name": "gymnasium:CartPole-v1", "cfg": {"max_episode_steps": 7}}
    assert (
        EnvChoice.model_validate(short) == EnvChoice.model_validate({"id": short["name"], "cfg": short["cfg"]}) == long
    )
    assert EnvChoice.model_validate(long.model_dump(mode="json")) == long
    assert EnvChoice.model_validate("gymnasium:CartPole-v1").cfg.id == "CartPole-v1"
    assert make_env(short) is make_env(long)
    whole = small(**{"env": short, "trainer.seed": 5})
    assert config_from_dict(whole.model_dump(mode="json")) == whole
    assert whole.replace(**{"env.name": "gymnasium:Acrobot-v1"}).env.cfg.id == "Acrobot-v1"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"name": "gymnasium:A-v0", "cfg": {"id": "B-v0"}}, r"env.cfg.id: also given in the name 'gymnasium:A-v0'"),
        ("gymnasium:", "env.cfg.id: "),
        ({"name": "gymnasium"}, "env.cfg.id: missing"),
        ({"name": "gymnasium:A-v0", "cfg": {"asinchronous": True}}, "did you mean 'asynchronous'"),
        ({"name": "gymnasium:A-v0", "cfg": {"timeout": 0.0}}, "env.cfg.timeout: must be above 0"),
    ],
)
def test_wrong_settings_are_refused_by_path(env, message):
    with pytest.raises(ConfigError, match=message):
        small(env=env)


def test_messages_name_the_id():
    cfg = small(env="gymnasium:CartPole-v1")
    assert cfg.env.label == "gymnasium:CartPole-v1" and small().env.label == "cartpole"
    assert run_summary(build(cfg), cfg, 1)[0].startswith("task     gymnasium:CartPole-v1, ")
    with pytest.raises(ConfigError, match=r"^env\.name: 'gymnasium:CartPole-v1' has no scripted expert"):
        make_expert("gymnasium:CartPole-v1")
    with pytest.raises(ConfigError, match=r"^state: it has no environments of gymnasium:CartPole-v1; use the config"):
        next(train_iter(init_state(small()), cfg))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            "gymnasium:Zq-v0",
            "^env: gymnasium:Zq-v0: not registered in Gymnasium; no registered id is similar. If the env is your own, "
            "import its module first: import MODULE in Python, --import MODULE in a shell$",
        ),
        (
            {"name": "gymnasium:cartpol-v1", "cfg": {"asynchronous": True}},
            r"^env: gymnasium:cartpol-v1: not registered in Gymnasium; did you mean 'gymnasium:CartPole-v1'\? If",
        ),
        (
            "gymnasium:CartPole-v9",
            "^env: gymnasium:CartPole-v9: not registered in Gymnasium, which has CartPole-v0, CartPole-v1; use one of",
        ),
        ("Pendulum-v1", "ecrl has no env 'Pendulum-v1'; Gymnasium has it: use 'gymnasium:Pendulum-v1'$"),
        ({"name": "gymnasium:CartPole-v1", "cfg": {"kwargs": {"mass": 1}}}, "unexpected keyword argument 'mass'"),
        ({"name": "gymnasium:Count-v0", "cfg": {"kwargs": {"fault": "make"}}}, "RuntimeError: cannot be made"),
        ("gymnasium:Text-v0", r"env: gymnasium:Text-v0: space Text\(.* known: Box, Discrete, MultiDiscrete"),
        ("gymnasium:DictAction-v0", r"actions Dict\(.* expected Box, Discrete, MultiDiscrete or MultiBinary"),
    ],
)
def test_an_environment_that_cannot_be_made_is_one_line(env, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_env(env)
    assert "\n" not in str(error.value)


def test_an_id_without_a_version_is_the_newest():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium recommends an id with a version
        assert make_env("gymnasium:CartPole").action_space == Discrete(2)
        with pytest.raises(ConfigError, match=r"CartPole: .*unexpected keyword argument 'mass'"):
            make_env({"name": "gymnasium:CartPole", "cfg": {"kwargs": {"mass": 1}}})


MISSING = [
    ("Box2D", "LunarLander-v3", "box2d"),
    ("mujoco", "HalfCheetah-v5", "mujoco"),
    ("imageio", "HalfCheetah-v5", "mujoco"),
    ("ale_py", "ALE/Pong-v5", "atari"),
]
WITHOUT = f"""
import os, sys
import gymnasium
import ecrl
from ecrl.errors import UserError

ecrl.make_env("gymnasium:CartPole-v1")
for package, gym_id, _ in {MISSING}:
    if not (child := os.fork()):
        sys.modules[package] = None
        try:
            ecrl.make_env(f"gymnasium:{{gym_id}}")
        except UserError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_missing_package_is_reported_with_its_extra():
    pytest.importorskip("mujoco")  # which is missed before imageio
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        f"env: gymnasium:{gym_id}: ModuleNotFoundError: No module named {package!r}: "
        f"install it with: pip install 'ecrl[{extra}]'"
        for package, gym_id, extra in MISSING
    ], done.stderr


def test_kwargs_and_time_limit_reach_the_environment():
    env = make_env({"name": "gymnasium:Pendulum-v1", "cfg": {"kwargs": {"g": 1.0}, "max_episode_steps": 2}})
    state, bare = env.reset(KEYS[:1]), gymnasium.make("Pendulum-v1", g=1.0)
    bare.reset(seed=SEEDS[0])
    for expected in (False, True):
        state = env.step(state, torch.ones(1, 1), None)
        close(state["final_obs"][0], bare.step(np.ones(1, np.float32))[0])
        assert bool(state["truncated"]) is expected
    assert make_env("gymnasium:Pendulum-v1") is not env


# Values against a plain Gymnasium loop


@pytest.mark.parametrize("gym_id", ["CartPole-v1", "MountainCarContinuous-v0"])
def test_it_is_a_loop_over_environments_seeded_one_by_one(gym_id):
    limit = {} if gym_id == "CartPole-v1" else {"max_episode_steps": 40}
    env = make_env({"name": f"gymnasium:{gym_id}", "cfg": limit})
    bare = [gymnasium.make(gym_id, **limit) for _ in SEEDS]
    state, ends = env.reset(KEYS), 0
    expected = [one.reset(seed=seed)[0] for one, seed in zip(bare, SEEDS, strict=True)]
    assert torch.equal(state["obs"], torch.tensor(np.array(expected)))
    assert torch.equal(state["final_obs"], state["obs"]) and not state["reward"].any()
    for t in range(90):
        bits = rng.bits(rng.fold_in(KEYS, t)) % 2
        action = bits if isinstance(env.action_space, Discrete) else bits.float().unsqueeze(-1) * 2 - 1
        state = env.step(state, action, None)
        for i, one in enumerate(bare):
            obs, reward, terminated, truncated, _ = one.step(action[i].numpy())
            close(state["final_obs"][i], obs)
            assert (float(state["reward"][i]), bool(state["terminated"][i])) == (pytest.approx(reward), terminated)
            assert bool(state["truncated"][i]) is truncated
            ends += terminated or truncated
            close(state["obs"][i], one.reset()[0] if terminated or truncated else obs)
    assert ends >= 8
    assert state["step"].tolist() == [90] * 4 and state["obs"].dtype == torch.float32


def test_equal_keys_give_equal_episodes_and_others_do_not():
    env, keys = make_env("gymnasium:CartPole-v1"), KEYS[[0, 0, 1]]
    runs = []
    for _ in range(2):
        state = env.reset(keys)
        runs.append([state["obs"]])
        for t in range(60):
            state = env.step(state, choice(*[t // 3 % 2] * 3), None)
            runs[-1].append(state["obs"])
    first, second = (torch.stack(run) for run in runs)
    assert torch.equal(first, second)
    assert torch.equal(first[:, 0], first[:, 1]) and not torch.equal(first[:, 0], first[:, 2])


def test_a_reset_of_open_environments_keeps_them_and_is_a_fresh_start():
    env = make_env("gymnasium:CartPole-v1")
    state = env.step(env.reset(KEYS), choice(0, 1, 0, 1), None)
    again = env.reset(KEYS, state)
    assert torch.equal(again["obs"], env.reset(KEYS)["obs"]) and torch.equal(again["token"], state["token"])
    with pytest.raises(UserError, match="1 steps or resets behind"):
        env.step(state, choice(0, 1, 0, 1), None)


def test_the_final_observation_is_not_overwritten_by_the_reset():
    # Count writes every observation into one memory; it is cut after 3 steps and ends at a multiple of 5.
    env = count()
    state, starts = env.reset(KEYS), [int(np.random.default_rng(seed).integers(100)) for seed in SEEDS]
    for steps in range(1, 4):
        before, state = state, env.step(state, choice(0, 0, 0, 0), None)
        reached = before["obs"][:, 0] + 1
        assert torch.equal(state["final_obs"][:, 0], reached) and torch.equal(state["reward"], reached)
        assert torch.equal(state["terminated"], reached % 5 == 0)
        done = state["terminated"] | state["truncated"]
        assert torch.equal(state["obs"][~done], state["final_obs"][~done]) and not state["obs"][done, 1].any()
        if steps == 1:
            assert reached.tolist() == [s + 1 for s in starts]


def test_states_are_inputs_only():
    env = make_env({"name": "gymnasium:Bandit-v0", "cfg": {"kwargs": {"acts": "box"}}})
    state, action = env.reset(KEYS), torch.full((4, 1, 2), 0.3)
    assert_pure(env.step, state.lock_(), action, None)
    assert (action == 0.3).all()  # Bandit multiplies its action by 0 in place, which no version counter sees


# Spaces


@pytest.mark.parametrize("sees", fake_gymnasium_envs.OBSERVATIONS)
def test_observations_of_every_kind(sees):
    env = make_env({"name": "gymnasium:Bandit-v0", "cfg": {"kwargs": {"sees": sees}}})
    state = env.reset(KEYS)
    bit = [int(np.random.default_rng(seed).integers(2)) for seed in SEEDS]
    assert 0 < sum(bit) < 4
    b = torch.tensor(bit)
    expected = {
        "box": lambda: torch.stack((b, 1 - b), -1).unsqueeze(-1).float(),
        "uint8": lambda: (3 * b).to(torch.uint8).reshape(4, 1, 1).expand(4, 2, 2),
        "discrete": lambda: b,
        "multi_discrete": lambda: torch.stack((b, torch.full_like(b, 2)), -1),
        "multi_binary": lambda: torch.stack((b, 1 - b), -1),
    }
    if sees in expected:
        assert torch.equal(state["obs"], expected[sees]()) and state["obs"].dtype == expected[sees]().dtype
    elif sees == "dict":
        assert torch.equal(state["obs", "in", "d"], b) and state["obs", "z"].shape == (4, 1)
    else:
        assert torch.equal(state["obs", "1"], b) and torch.equal(state["obs", "0"], 1.0 - b.unsqueeze(-1))


def _learns(**kwargs):
    """Mean reward in the first iteration and in the last, each of 512 episodes."""
    cfg = small(**{"env": {"name": "gymnasium:Bandit-v0", "cfg": {"kwargs": kwargs}}}, **FAST)
    state = init_state(cfg)
    logs = [float(r["logs"]["episode_reward_avg_100"]) for r in train_iter(state, cfg) if r["log_type"] == "collect"]
    return logs[0], logs[-1]


@pytest.mark.parametrize("sees", fake_gymnasium_envs.OBSERVATIONS)
def test_every_kind_of_observation_trains(sees):
    first, last = _learns(sees=sees)
    assert first < 0.75 and last > 0.95  # guessing pays 0.5, being right 1


@pytest.mark.parametrize("acts", fake_gymnasium_envs.ACTIONS)
def test_every_kind_of_action_trains(acts):
    first, last = _learns(acts=acts)
    assert first < 0.7 and last > (0.65 if acts == "box" else 0.95)  # a Gaussian keeps some of its spread


@pytest.mark.parametrize(("sees", "acts"), [("box", "choice"), ("dict", "choice"), ("tuple", "multi_discrete")])
def test_action_masks_from_info_are_obeyed_and_train(sees, acts):
    first, last = _learns(sees=sees, acts=acts, masked=True)  # Bandit raises where a forbidden action comes
    assert first < 0.85 and last > 0.95
    env = make_env({"name": "gymnasium:Bandit-v0", "cfg": {"kwargs": {"sees": sees, "acts": acts, "masked": True}}})
    parts = dict(env.observation_space.items)
    assert parts["action_mask"] == MultiDiscrete((2,) * (4 if acts == "choice" else 5))
    assert set(parts) == {"box": {"observation"}, "dict": {"z", "in"}, "tuple": {"0", "1"}}[sees] | {"action_mask"}
    assert env.reset(KEYS)["obs", "action_mask"].dtype == torch.bool


def test_a_mask_of_several_actions_is_their_concatenation():
    env = make_env({"name": "gymnasium:Bandit-v0", "cfg": {"kwargs": {"acts": "multi_discrete", "masked": True}}})
    state = env.reset(KEYS)
    bit = state["obs", "observation"][:, 0, 0] > 0
    for row, b in zip(state["obs", "action_mask"].tolist(), bit.tolist(), strict=True):
        assert row == [True, True, not b, True, b]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_observation_of_a_truncated_episode_has_its_own_mask(asynchronous):
    env = make_env({"name": "gymnasium:OneAllowed-v0", "cfg": {"asynchronous": asynchronous}})
    state = env.reset(KEYS)
    for at in range(3):
        state = env.step(state, choice(at, at, at, at), None)
    assert state["truncated"].all()
    assert state["obs", "action_mask"].int().tolist() == [[1, 0, 0, 0]] * 4
    assert state["final_obs", "observation"].tolist() == [[3.0]] * 4
    assert state["final_obs", "action_mask"].int().tolist() == [[0, 0, 0, 1]] * 4


def test_a_truncated_episode_without_a_last_mask_is_refused():
    env = make_env({"name": "gymnasium:OneAllowed-v0", "cfg": {"kwargs": {"has_last_mask": False}}})
    state = env.reset(KEYS)
    with pytest.raises(UserError, match="returned no action_mask in its info, expected 4 entries, in step 3"):
        for at in range(3):
            state = env.step(state, choice(at, at, at, at), None)


def test_rewards_and_flags_may_be_arrays_with_one_element():
    arrays, numbers = count(fault="arrays"), count()
    states = [env.step(env.reset(KEYS), choice(0, 0, 0, 0), None) for env in (arrays, numbers)]
    for name in ("reward", "terminated", "truncated"):
        assert torch.equal(*(state[name] for state in states)) and states[0][name].shape == (4,)


def test_only_the_loop_clips_actions():
    env = make_env("gymnasium:Pendulum-v1")
    assert isinstance(env.action_space, Box) and auto_reset(env) is env and not env.is_pure
    wild, clipped = torch.full((4, 1), 50.0), torch.full((4, 1), 2.0)
    obs = [one.step(one.reset(KEYS), a, None)["obs"] for one, a in ((clip_action(env), wild), (env, clipped))]
    assert torch.equal(*obs)


def test_success_is_reported_if_the_environment_reports_it():
    state = count(info=True).reset(KEYS)
    assert state["info", "success"].isnan().all()
    env = count(info=True)
    state = env.step(env.reset(KEYS), choice(0, 0, 0, 0), None)
    assert torch.equal(state["info", "success"], state["terminated"].float())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_success_of_none_is_missing_and_success_that_is_no_number_is_refused(asynchronous):
    def stepped(success):
        env = {"name": "gymnasium:Count-v0", "cfg": {"asynchronous": asynchronous, "kwargs": {"success": success}}}
        env = make_env(env)
        return env.step(env.reset(KEYS), choice(0, 0, 0, 0), None)["info", "success"]

    assert stepped("none").isnan().all()
    assert stepped("numpy").nan_to_num(-1.0).tolist() == [-1.0, -1.0, 1.0, -1.0]
    for success, message in (
        ("text", "'yes'"),
        ("array", r"array\(\[\[1., 1.\], \[1., 1.\]\]\)"),
        ("object", "<class 'o.*'>"),
    ):
        what = rf"reported info\['success'\] = {message}, expected a bool, a number or None, in step 1"
        with pytest.raises(UserError, match=rf"^env 2 \(gymnasium:Count-v0\) {what}$"):
            stepped(success)


def test_groups_share_their_starts_and_restart_the_environments_they_have():
    policy = {"name": "actor_only", "actor": NET}
    cfg = {"group_size": 2, "batch_size": 16, "n_epochs": 1}
    cfg = small(env="gymnasium:CartPole-v1", policy=policy, algorithm={"name": "grpo", "cfg": cfg})
    *_, record = train_iter(init_state(cfg), cfg)
    env = record["state"]["env"]
    assert len(live._LIVE) == 1
    assert env["step"].tolist() == [4 * (8 + 1)] * 4  # each of four rollouts resets first
    again = make_env(cfg.env).reset(KEYS[[0, 0, 1, 1]], env)
    assert torch.equal(again["obs"][0::2], again["obs"][1::2])


# States of the host


def test_a_state_that_is_behind_is_refused_by_name():
    env = make_env("gymnasium:CartPole-v1")
    first = env.reset(KEYS)
    second = env.step(first, choice(0, 1, 0, 1), None)
    env.step(second, choice(0, 1, 0, 1), None)
    message = r"gymnasium:CartPole-v1: this state is 2 steps or resets behind its Gymnasium envs"
    with pytest.raises(UserError, match=message):
        env.step(first, choice(0, 1, 0, 1), None)


def test_states_of_closed_other_or_loaded_environments_are_refused_by_name():
    env, other = make_env("gymnasium:CartPole-v1"), make_env("gymnasium:Acrobot-v1")
    state = env.reset(KEYS)
    loaded = state.clone().set("token", torch.zeros_like(state["token"]))
    for refusing, wrong_state in ((other, state), (env, loaded)):
        with pytest.raises(UserError, match="the envs are not open in this process"):
            refusing.step(wrong_state, choice(0, 1, 0, 1), None)
    other.close(state)  # not its own: nothing happens
    state = env.step(state, choice(0, 1, 0, 1), None)
    env.close(state)
    env.close(state)
    with pytest.raises(UserError, match="the envs are not open in this process"):
        env.step(state, choice(0, 1, 0, 1), None)


def test_only_the_newest_state_of_open_environments_of_the_same_env_is_current():
    env, other = make_env("gymnasium:CartPole-v1"), make_env("gymnasium:Acrobot-v1")
    first = env.reset(KEYS)
    assert env.is_current(first) and env.is_current(first.clone()) and not other.is_current(first)
    second = env.step(first, choice(0, 1, 0, 1), None)
    assert env.is_current(second) and not env.is_current(first)
    third = env.reset(KEYS, second)
    assert env.is_current(third) and not env.is_current(second)
    assert not env.is_current(third.clone().set("token", torch.zeros_like(third["token"])))
    env.close(third)
    assert not env.is_current(third)
    pure = make_env("cartpole")
    assert pure.is_current(pure.reset(KEYS)) and auto_reset(pure).is_current(first)


def test_vmap_is_refused():
    env = make_env("gymnasium:CartPole-v1")
    with pytest.raises(UserError, match="cannot be vmapped"):
        torch.vmap(env.reset)(torch.stack((KEYS, KEYS)))


# Faults


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise in step", r"raised KeyError: 'step.nfailed' \(fake_gymnasium_envs.py:\d+\), in step 3"),
        ("shape", r"returned an observation of shape \[1\], expected a value of Box.*, in step 3"),
        ("words", "returned no numbers, expected Box.*, in step 3"),
        ("two rewards", r"returned reward = array\(\[1., 2.\]\), expected one number, in step 3"),
        ("no reward", "returned reward = None, expected one number, in step 3"),
        ("no flag", "returned terminated = None, expected one number, in step 3"),
        ("no mask", "returned no action_mask in its info, .*in step 3"),
        ("dead mask", "returned an action_mask that allows no choice for a discrete action, in step 3"),
    ],
)
def test_a_fault_names_env_and_step_and_closes_all(fault, message):
    env = count(fault=fault, masks="mask" in fault)
    state, action = env.reset(KEYS), choice(0, 0, 0, 0)
    for _ in range(2):
        state = env.step(state, action, None)
    with pytest.raises(UserError, match=message) as error:
        while True:
            state = env.step(state, action, None)
    assert str(error.value).startswith("env 2 (gymnasium:Count-v0) ") and "\n" not in str(error.value)
    assert not live._LIVE


@pytest.mark.parametrize(
    ("space", "rows", "missing"),
    [
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)}), [{"a": 0, "b": 0}, {"a": 0}], "'b'"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))), [(0, 1), (0,)], "1"),
        (spaces.Dict({"a": spaces.Discrete(2)}), [{"a": 0}, None], "'a'"),
    ],
)
def test_an_observation_that_lacks_a_part_is_named(space, rows, missing):
    with pytest.raises(BadValue, match=f"returned an observation without {missing}, an entry of its space") as error:
        collate(space, rows)
    assert error.value.env == 1


@pytest.mark.parametrize("wrong", [[0.0, [1.0, 2.0]], [0.0]], ids=["ragged", "short"])
def test_an_observation_of_a_wrong_shape_is_named(wrong):
    with pytest.raises(BadValue, match=r"^returned .*, expected a value of Box\(0.0, 1.0, \(2,\), float32\)$") as error:
        collate(spaces.Box(0, 1, (2,)), [[0.0, 1.0], wrong])
    assert error.value.env == 1


def test_a_failing_reset_is_reported_with_its_step():
    env, state = count(fault="raise in reset"), None
    with pytest.raises(
        UserError, match=r"env 2 \(gymnasium:Count-v0\) raised KeyError: .*reset.*, in step [123]"
    ) as error:
        state = env.reset(KEYS)
        for _ in range(4):
            state = env.step(state, choice(0, 0, 0, 0), None)
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.filterwarnings("ignore:.*Overriding environment:UserWarning")
def test_an_id_registered_again_with_other_spaces_is_refused_by_name():
    def registered(size, actions):
        class Sized(gymnasium.Env):
            observation_space, action_space = gymnasium.spaces.Box(-1, 1, (size,)), gymnasium.spaces.Discrete(actions)

            def reset(self, *, seed=None, options=None):
                return np.zeros(size, np.float32), {}

            def close(self):
                closed.append(size)

        gymnasium.register("Sized-v0", Sized)

    closed = []
    for size, actions in ((3, 2), (3, 2), (4, 2), (3, 5)):
        registered(size, actions)
        env = make_env("gymnasium:Sized-v0")
        if (size, actions) == (3, 2):  # new code with the old spaces is fine
            assert env.reset(KEYS)["obs"].shape == (4, 3)
            continue
        closed.clear()
        now = rf"has spaces Box.*\({size},\).* and Discrete\({actions}\), but had Box.*\(3,\).* and Discrete\(2\) when"
        with pytest.raises(ConfigError, match=f"^env: gymnasium:Sized-v0: {now} .*id, start a new process$"):
            env.reset(KEYS)
        assert closed == [size] * 4


def test_an_integer_outside_its_space_is_refused():
    class Wrong(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Discrete(3, start=1), gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return 4 if seed else 3, {}

    gymnasium.register("Wrong-v0", Wrong)
    with pytest.raises(
        UserError,
        match=r"env 0 \(gymnasium:Wrong-v0\) returned an observation with an integer outside Discrete.*, in reset",
    ):
        make_env("gymnasium:Wrong-v0").reset(KEYS)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nan_passes_either_way_for_the_finite_guard_to_judge(asynchronous):
    def stepped(fault):
        env = {"id": "Drift-v0", "kwargs": {"fault": fault}, "asynchronous": asynchronous}
        env = make_env({"name": "gymnasium", "cfg": env})
        state = env.reset(KEYS)
        for _ in range(3):
            state = env.step(state, torch.full((4, 1), torch.nan), None)
        env.close(state)
        return state

    assert stepped("obs")["obs"].isnan().squeeze(1).tolist() == [False, False, True, False]
    assert stepped("reward")["reward"].isinf().tolist() == [False, False, True, False]


def test_no_integer_is_nan():
    space = gymnasium.spaces.Box(0, 9, (1,), np.int64)
    with pytest.raises(BadValue, match=r"^got NaN or infinity as an action, expected integers$"):
        action(gymnasium.spaces.Discrete(9), torch.tensor([1.0, torch.inf]))
    with pytest.raises(BadValue, match=r"^got NaN or infinity as an action, expected integers$") as error:
        action(space, torch.tensor([[1.0], [torch.nan]]))
    assert error.value.env == 1 and action(space, torch.tensor([[1.4]])).tolist() == [[1]]


def test_the_truncation_gap_is_the_limit_of_an_environment_of_gymnasium_itself():
    # CartPole-v1 is registered with 500 steps, CliffWalking-v1 with no limit; the fake ones may truncate by themselves.
    limit = {"max_episode_steps": 7}
    assert make_env("gymnasium:CartPole-v1").min_truncation_gap == 500
    assert make_env({"name": "gymnasium", "cfg": {"id": "CartPole-v1"} | limit}).min_truncation_gap == 7
    assert make_env("gymnasium:CliffWalking-v1").min_truncation_gap == NEVER
    assert make_env({"name": "gymnasium", "cfg": {"id": "Count-v0"} | limit}).min_truncation_gap == 1
