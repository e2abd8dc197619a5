"""Vector envs of the user's own: the same rollout in all three autoreset modes, and one error per fault."""

import os
import signal
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from pydantic import Field
from support import fake_gymnasium_envs
from support.checks import close
from support.gymnasium_workers import (
    KEYS,
    SEEDS,
    expire_after,
    no_orphan,  # noqa: F401  (a fixture for every test here)
)
from support.small_runs import small
from tensordict import TensorDict

from ecrl.config.model import ConfigModel
from ecrl.envs import make_env
from ecrl.envs.gymnasium import from_vector
from ecrl.envs.gymnasium import handles as live
from ecrl.envs.gymnasium.vector_adapter import _final
from ecrl.errors import ConfigError, UserError
from ecrl.kernels import collect_rollout, compute_gae
from ecrl.loop.iteration import init_state, train_iter
from ecrl.registry import register_env
from ecrl.run.evaluation import evaluate

MODES = [mode.value for mode in AutoresetMode]
EMPTY = TensorDict({}, [])


class Dicts(gymnasium.ObservationWrapper):
    """Observations as a Dict with a Tuple in it."""

    def __init__(self, env):
        super().__init__(env)
        space = env.observation_space
        self.observation_space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Tuple((space, space)), "b": space})

    def observation(self, obs):
        return {"a": (obs.copy(), 2 * obs), "b": -obs}


def vectors(mode, kind=SyncVectorEnv, dicts=False, **kwargs):
    def one():
        env = fake_gymnasium_envs.Count(shared=False, **kwargs)
        return Dicts(env) if dicts else env

    return lambda num_envs: kind([one] * num_envs, autoreset_mode=mode)


def vector_of(obs):
    return obs if not isinstance(obs, TensorDict) else obs["b"] if "b" in obs else obs["observation"]


def by_obs(params, carry, obs, noise):
    x = vector_of(obs)
    action = (x[..., 0].abs() % 2).long()
    return carry, TensorDict({"action": action, "sample_log_prob": x[..., 0]}, x.shape[:1])


def value(params, carry, obs):
    return vector_of(obs)[..., 0].abs()


def rollout(env, length):
    policy = SimpleNamespace(act=by_obs, draw=lambda keys: keys, value=value)
    keys, start = torch.zeros(length, 4, dtype=torch.int64), env.reset(KEYS)
    return collect_rollout(policy, env, EMPTY, EMPTY, start, keys, keys)[2]["steps"]


def counted(x, mask, upto):
    """The first `upto` steps that count, of each env."""
    return torch.stack([row[keep][:upto] for row, keep in zip(x, mask, strict=True)])


@pytest.mark.parametrize("kind", [{"info": True}, {"dicts": True}, {"masks": True}])
def test_all_three_modes_give_one_rollout(kind):
    same = rollout(from_vector(vectors("SameStep", **kind), timeout=600.0), 12)
    assert same["truncated"].any() and same["terminated"].any() and "mask" not in same
    assert same["final_value"][same["truncated"]].all()
    assert "info" not in kind or torch.equal(same["info", "success"][:, :-1], same["terminated"][:, :-1].float())
    assert "masks" not in kind or same["obs", "action_mask"].all()
    disabled = rollout(from_vector(vectors("Disabled", **kind), timeout=600.0), 12)
    for name, leaf in same.flatten_keys("/").items():
        torch.testing.assert_close(disabled.flatten_keys("/")[name], leaf, rtol=0, atol=0, equal_nan=True)
    apart = rollout(from_vector(vectors("NextStep", **kind), timeout=600.0), 24)
    mask = apart["mask"][:, :-1]
    assert mask.sum(1).min() >= 12 and not apart["done"][:, :-1][~mask].any()
    assert torch.equal(mask[:, 1:], ~apart["done"][:, :-2])  # the row after an end, no other
    for name, leaf in same[:, :-1].exclude("value").flatten_keys("/").items():
        torch.testing.assert_close(
            counted(apart.flatten_keys("/")[name][:, :-1], mask, 12), leaf, rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_the_last_observation_of_a_truncated_episode_has_its_own_mask(mode, kind):
    one = partial(fake_gymnasium_envs.OneAllowed, shared=False)
    env = from_vector(lambda num_envs: kind([one] * num_envs, autoreset_mode=mode), timeout=600.0)
    state = env.reset(KEYS)
    for at in range(3):
        state = env.step(state, torch.full((4,), at), None)
    assert state["truncated"].all()
    assert state["final_obs", "observation"].tolist() == [[3.0]] * 4
    assert state["final_obs", "action_mask"].int().tolist() == [[0, 0, 0, 1]] * 4
    first = [0, 0, 0, 1] if mode == "NextStep" else [1, 0, 0, 0]
    assert state["obs", "action_mask"].int().tolist() == [first] * 4
    env.close(state)


def test_masked_rows_do_not_leak_into_advantages():
    same, apart = (
        rollout(from_vector(vectors(mode), timeout=600.0), n) for mode, n in (("SameStep", 15), ("NextStep", 30))
    )
    spoilt = apart.clone()
    hidden = ~apart["mask"][:, :-1]
    spoilt["reward"][:, :-1][hidden] = 1e6  # nothing that happens in a masked row may be seen elsewhere
    (expected, _), (actual, _) = (compute_gae(r, 0.9, 0.8) for r in (same, spoilt))
    for i in range(4):
        last = int(same["done"][i, :-1].nonzero()[-1]) + 1  # the open end is cut at another step
        close(actual[i][~hidden[i]][:last], expected[i][:last])
        assert last >= 10


def test_it_is_the_same_environment_as_by_id():

    a, b = (
        rollout(env, 10) for env in (make_env("gymnasium:Count-v0"), from_vector(vectors("SameStep"), timeout=600.0))
    )
    for name, leaf in a.flatten_keys("/").items():
        torch.testing.assert_close(b.flatten_keys("/")[name], leaf, rtol=0, atol=0, equal_nan=True)


class VectorConfig(ConfigModel):
    """The autoreset mode of the vector environment."""

    mode: str = Field(description="when the vector env starts the next episode")


FINISHED = []


class Recorded(RecordEpisodeStatistics):
    """Record episodes of one environment; Gymnasium's vector wrapper loses running episodes in the mode DISABLED."""

    def step(self, action):
        out = super().step(action)
        if "episode" in out[4]:
            FINISHED.append((out[4]["episode"]["r"], out[4]["episode"]["l"]))
        return out


@register_env("recorded_cartpoles")
def recorded_cartpoles(cfg: VectorConfig):
    def make(num_envs):
        return SyncVectorEnv([lambda: Recorded(gymnasium.make("CartPole-v1"))] * num_envs, autoreset_mode=cfg.mode)

    return from_vector(make, timeout=600.0)


@pytest.mark.parametrize("mode", MODES)
def test_training_logs_the_statistics_that_gymnasium_records(mode):
    FINISHED.clear()
    env = {"name": "recorded_cartpoles", "cfg": {"mode": mode}}
    cfg = small(**{"env": env, "trainer.buffer_size": 40, "trainer.iterations": 3})
    state = init_state(cfg)
    *_, record, _ = train_iter(state, cfg)
    rewards, lengths = zip(*FINISHED, strict=True)
    assert 10 < len(FINISHED) < 100
    close(record["logs"]["episode_reward_avg_100"], np.mean(rewards))
    close(record["logs"]["episode_length_avg_100"], np.mean(lengths))


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_counts_the_same_in_every_mode(mode):
    cfg = small(**{"env": {"name": "recorded_cartpoles", "cfg": {"mode": mode}}, "trainer.num_eval_envs": 2})
    by_id = cfg.replace(**{"env": "gymnasium:CartPole-v1"})
    state = init_state(cfg)
    assert evaluate(state, cfg, num_episodes=6) == evaluate(state, by_id, num_episodes=6)


def test_one_seed_for_all_is_taken_where_a_vector_env_takes_no_more():
    env = from_vector(CartPoleVectorEnv, timeout=600.0)
    expected, _ = CartPoleVectorEnv(4).reset(seed=SEEDS[0])
    close(env.reset(KEYS)["obs"], expected)
    with pytest.raises(
        UserError, match=r"CartPoleVectorEnv takes one seed for all .*, so equal keys cannot give equal episodes"
    ):
        env.reset(KEYS[[0, 0, 1, 1]])


def test_a_vector_env_without_an_autoreset_mode_is_refused():
    def modeless(num_envs):
        made = CartPoleVectorEnv(num_envs)
        made.metadata = {}
        return made

    with pytest.raises(ConfigError, match=r"modeless: has no autoreset mode; set metadata\['autoreset_mode'\]"):
        from_vector(modeless, timeout=600.0)
    with pytest.raises(ConfigError, match="raised ZeroDivisionError"):
        from_vector(lambda num_envs: 1 // 0, timeout=600.0)


def test_an_end_without_its_observation_is_refused():
    class Silent(SyncVectorEnv):
        def step(self, actions):
            out = super().step(actions)
            out[4].pop("final_obs", None)
            return out

    env = from_vector(vectors("SameStep", kind=Silent), timeout=600.0)
    with pytest.raises(UserError, match=r"env [01] \(.*\) ended an episode without info\['final_obs'\], .*, in step 1"):
        env.step(env.reset(KEYS), torch.zeros(4).long(), None)


def test_final_observations_may_come_as_a_batch():
    class Batched(SyncVectorEnv):
        def step(self, actions):
            out = super().step(actions)
            if "final_obs" in out[4]:
                rows = [np.zeros(2, np.float32) if row is None else row for row in out[4]["final_obs"]]
                out[4]["final_obs"] = np.stack(rows)
            return out

    a, b = (
        rollout(from_vector(vectors("SameStep", kind=kind), timeout=600.0), 10) for kind in (SyncVectorEnv, Batched)
    )
    assert torch.equal(a["final_value"], b["final_value"]) and a["final_value"].any()


def test_of_a_batch_of_final_observations_only_those_of_ends_are_read():
    obs, space = torch.tensor([0, 1, 2]), gymnasium.spaces.Discrete(3, start=1)
    batch = np.array([0, 3, 0])  # where none ended there is anything, here nothing of the space
    assert _final(obs, [1], space, {"final_obs": batch}).tolist() == [0, 2, 2]
    both = gymnasium.spaces.Dict({"a": space})
    named = TensorDict({"a": obs}, [3])
    assert _final(named, [1], both, {"final_obs": {"a": batch}})["a"].tolist() == [0, 2, 2]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium warns about exceptions of its workers
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise in step", r"env 2 \(.*\) raised KeyError: .*, in step 3"),
        ("die in step", r"env 2 \(.*\) lost its worker, in step 3"),
        ("hang in step", r"env 2 \(.*\) did not answer within 500 s \(timeout\), in step 3"),
        ("hang in reset", r"env 2 \(.*\) did not answer within 500 s \(timeout\), in step 1"),
    ],
)
def test_gymnasiums_own_workers_end_in_one_error(fault, message, tmp_path):
    def make(num_envs):
        mark = tmp_path / "hangs"
        venv = vectors("SameStep", kind=AsyncVectorEnv, fault=fault, mark=mark)(num_envs)
        for pipe in venv.parent_pipes[2:3]:  # one environment is made first, for its spaces
            expire_after(pipe, mark)
        return venv

    env = from_vector(make, timeout=500.0)
    with pytest.raises(UserError, match=message) as error:
        state = env.reset(KEYS)
        for _ in range(4):
            state = env.step(state, torch.zeros(4).long(), None)
    assert "\n" not in str(error.value) and not live._LIVE


def test_one_of_gymnasiums_own_workers_killed_from_outside():
    opened = []

    def make(num_envs):
        opened.append(AsyncVectorEnv([fake_gymnasium_envs.Count] * num_envs, autoreset_mode="Disabled"))
        return gymnasium.wrappers.vector.RecordEpisodeStatistics(opened[-1])

    env = from_vector(make, timeout=600.0)
    state = env.reset(KEYS)
    os.kill(opened[-1].processes[1].pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"env 1 \(.*\) lost its worker, in step 1"):
        env.step(state, torch.zeros(4).long(), None)


@pytest.mark.parametrize("killed", [False, True])
def test_closing_may_be_repeated_whatever_became_of_the_workers(killed):
    opened = []

    def make(num_envs):
        opened.append(AsyncVectorEnv([fake_gymnasium_envs.Count] * num_envs, autoreset_mode="SameStep"))
        return opened[-1]

    env = from_vector(make, timeout=600.0)
    state = env.reset(KEYS)
    processes = opened[-1].processes
    if killed:
        os.kill(processes[1].pid, signal.SIGKILL)
        processes[1].join()
    for _ in range(3):
        env.close(state)
        assert not any(process.is_alive() for process in processes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", r"env 2 .* reported info\['success'\] = 'yes', expected a bool, a number or None, in step 1"),
        (
            "array",
            r"env 2 .* reported info\['success'\] = array\(.*\), expected a bool, a number or None, in step 1",
        ),
    ],
)
def test_success_that_is_no_number_is_refused_by_key(mode, kind, message):
    env = from_vector(vectors(mode, success=kind), timeout=600.0)
    with pytest.raises(UserError, match=message):
        env.step(env.reset(KEYS), torch.zeros(4).long(), None)
    env = from_vector(vectors(mode, success="none"), timeout=600.0)
    assert env.step(env.reset(KEYS), torch.zeros(4).long(), None)["info", "success"].isnan().all()


def test_one_success_value_for_all_environments_is_refused_by_key():
    class Scalar(SyncVectorEnv):
        def step(self, actions):
            out = super().step(actions)
            out[4]["success"] = True
            return out

    env = from_vector(vectors("NextStep", kind=Scalar), timeout=600.0)
    with pytest.raises(
        UserError, match=r"reported info\['success'\] = True, expected one value for each of its 4 environments, in"
    ):
        env.step(env.reset(KEYS), torch.zeros(4).long(), None)
