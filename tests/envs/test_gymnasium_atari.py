"""Atari's preprocessing: equal to Stable-Baselines3's wrappers, the same in workers, and whole games are scored."""

import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from support import fake_atari
from support.checks import close
from support.gymnasium_workers import KEYS, SEEDS
from support.small_runs import small

from ecrl import rng
from ecrl.env_check.check import check_env
from ecrl.envs import NEVER, make_env
from ecrl.envs.gymnasium import AtariConfig, worker
from ecrl.envs.gymnasium import handles as live
from ecrl.envs.gymnasium.atari import base_kwargs, truncation_gap
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.policies import policy_params
from ecrl.run.evaluation import evaluate

sb3 = pytest.importorskip("stable_baselines3.common.atari_wrappers", reason="the reference of the wrappers")
FAKE = "FakeAtari-v0"
SEED = 5


@pytest.fixture(autouse=True)
def _with_cv2():
    with fake_atari.with_cv2():
        yield
        for one in list(live._LIVE.values()):
            one.close()


def game(gym_id=FAKE, kwargs=None, **cfg):
    atari = {key: cfg.pop(key) for key in [*cfg] if key in AtariConfig.model_fields}
    return make_env({"name": f"gymnasium:{gym_id}", "cfg": {"atari": atari, "kwargs": kwargs or {}, **cfg}})


class Scores(gymnasium.Wrapper):
    """The scores of all games that ended, counted below the reference's wrappers, as Monitor does."""

    def __init__(self, env):
        super().__init__(env)
        self.games = []

    def reset(self, **kwargs):
        self.games.append(0.0)
        return self.env.reset(**kwargs)

    def step(self, action):
        result = self.env.step(action)
        self.games[-1] += result[1]
        return result


def reference(bare, cfg):
    """Return the chain of AtariWrapper without WarpFrame, which changes only the images, and its scores."""
    scores = Scores(bare)
    env = sb3.NoopResetEnv(scores, cfg.noop_max) if cfg.noop_max else scores
    env = sb3.MaxAndSkipEnv(env, cfg.frame_skip) if cfg.frame_skip > 1 else env
    env = sb3.EpisodicLifeEnv(env) if cfg.terminal_on_life_loss else env
    env = sb3.FireResetEnv(env) if cfg.fire_on_reset else env
    return (sb3.ClipRewardEnv(env) if cfg.clip_reward else env), scores


def image(obs):
    """The image that the agent sees, of the reference's grey observation."""
    import cv2

    size = (fake_atari.SIZE, fake_atari.SIZE)
    return cv2.resize(obs, size, interpolation=cv2.INTER_AREA)[..., None]


def assert_same_games(gym_id, kwargs, cfg, steps, same_start=True):
    """Take random actions in the reference and in ecrl. Return the numbers of episodes and games that ended.

    If the second action after FIRE ends an episode, the reference returns the image of its end as the start of the next
    episode. `same_start` is then False.
    """
    cfg, draws = AtariConfig(**cfg), np.random.default_rng(0)
    theirs, scores = reference(gymnasium.make(gym_id, **base_kwargs(cfg), **kwargs), cfg)
    ours = worker.make(gym_id, base_kwargs(cfg) | kwargs, cfg.model_dump())
    obs, row = theirs.reset(seed=SEED)[0], worker.reset(ours, SEED)
    assert np.isnan(row.score)
    episodes, games, start = 0, 0, True
    for _ in range(steps):
        assert np.array_equal(row.obs, image(obs)) or (start and not same_start)
        action, ended = int(draws.integers(theirs.action_space.n)), len(scores.games)
        row, (obs, reward, terminated, truncated, _) = worker.step(ours, action), theirs.step(action)
        assert (row.reward, row.terminated, row.truncated) == (reward, terminated, truncated)
        last, start = obs, terminated or truncated
        if start:
            obs, episodes = theirs.reset()[0], episodes + 1
        over = len(scores.games) > ended
        assert row.score == scores.games[ended - 1] if over else np.isnan(row.score)
        assert (row.final is not None) == start
        # when a game is over, the skipped frames are incomplete, and both return an older image
        assert not start or over or np.array_equal(row.final, image(last))
        games += over
    return episodes, games


SETTINGS = [
    {},
    {"noop_max": 0},
    {"frame_skip": 1},
    {"frame_skip": 3},
    {"terminal_on_life_loss": False},
    {"fire_on_reset": False},
    {"clip_reward": False},
    {"terminal_on_life_loss": False, "fire_on_reset": False, "noop_max": 3, "clip_reward": False},
]


@pytest.mark.parametrize("cfg", SETTINGS, ids=str)
@pytest.mark.parametrize("kwargs", [{}, {"max_num_frames_per_episode": 61}], ids=["lives", "limit"])
def test_it_is_the_usual_chain_of_wrappers(cfg, kwargs):
    episodes, games = assert_same_games(FAKE, kwargs, cfg, 600, same_start=not kwargs)
    assert episodes > games > 4 if cfg.get("terminal_on_life_loss", True) else episodes == games > 4


def test_lives_and_games_that_end_between_two_episodes_are_counted():
    """With lives this short, FIRE and the no-op after a lost life lose further lives, and the game."""
    episodes, games = assert_same_games(FAKE, {"life": (2, 7)}, {"clip_reward": False}, 400, same_start=False)
    assert episodes > games > 20


@pytest.mark.parametrize("gym_id", ["ALE/Breakout-v5", "ALE/Pong-v5", "ALE/Qbert-v5", "SpaceInvadersNoFrameskip-v4"])
def test_atari_games_are_the_usual_chain_of_wrappers(gym_id, monkeypatch):
    pytest.importorskip("ale_py", reason="the extra 'atari'")
    worker.register_atari(gym_id, True)
    episodes, games = assert_same_games(gym_id, {"max_num_frames_per_episode": 1000}, {}, 400)
    assert episodes >= games >= 1


def test_an_episode_continues_the_game_until_the_game_is_over():
    env = game(noop_max=0, fire_on_reset=False)
    state, lives = env.reset(KEYS[:1]), 1
    assert env.observation_space.shape == (84, 84, 1) and state["obs"].dtype == torch.uint8
    assert state["info", "game_score"].isnan().all()
    for _ in range(60):
        frame = int(state["obs"][0, 0, 0, 0]) // 4
        state = env.step(state, torch.tensor([1]), None)
        if state["terminated"]:
            lives += 1
            over = not state["info", "game_score"].isnan().any()
            assert over == (lives % 4 == 1)  # three lives and the extra one
            assert (int(state["obs"][0, 0, 0, 0]) // 4 <= 4) == over  # another game; otherwise the frame after a no-op
            assert frame or over
    assert lives > 5


def test_a_limit_of_steps_counts_the_steps_of_a_game():
    env = game(noop_max=0, fire_on_reset=False, max_episode_steps=6)
    state, lives, steps = env.reset(KEYS[:1]), 0, []
    for t in range(1, 60):
        state = env.step(state, torch.tensor([2]), None)  # nobody presses FIRE, so no life is lost
        lives += int(state["terminated"])
        steps += [t] if state["truncated"] else []
    assert lives == 0 and steps == [6 * i for i in range(1, 10)]
    assert env.min_truncation_gap == 1  # the game's own code may truncate at any step


@pytest.mark.parametrize("cfg", SETTINGS, ids=str)
@pytest.mark.parametrize("limits", [{"max_num_frames_per_episode": 120}, {"max_episode_steps": 19}], ids=str)
def test_the_truncation_gap_is_a_lower_bound(cfg, limits):
    atari = AtariConfig(**cfg)
    gap = truncation_gap(EnvSpec("X-v0", entry_point="ale_py.env:AtariEnv", kwargs={"game": "x"}), limits, atari)
    env, row = worker.make(FAKE, base_kwargs(atari) | limits | {"life": (30, 45)}, atari.model_dump()), None
    worker.reset(env, SEED)
    times, draws = [0], np.random.default_rng(1)
    for t in range(1, 1500):
        row = worker.step(env, int(draws.integers(4)) if t < 700 else 2)
        times += [t] if row.truncated else []
    assert len(times) > 5 and np.diff(times).min() >= gap >= 2
    if not cfg.get("terminal_on_life_loss", True) and not atari.fire_on_reset and "max_episode_steps" in limits:
        assert np.diff(times).min() == gap == 19


def test_the_truncation_gap_of_registered_games():
    spec = EnvSpec("ALE/X-v5", entry_point="ale_py.env:AtariEnv", kwargs={"max_num_frames_per_episode": 108_000})
    whole = AtariConfig(terminal_on_life_loss=False)
    assert truncation_gap(spec, {}, whole) == (108_000 - 30) // 4 - 4
    assert truncation_gap(spec, {}, AtariConfig()) == ((108_000 - 30) // 4 - 4) // 6
    assert truncation_gap(spec, {"max_num_frames_per_episode": None}, whole) == NEVER
    assert truncation_gap(spec, {"max_num_frames_per_episode": 8}, whole) == 1
    assert truncation_gap(spec, {"max_episode_steps": 104}, whole) == 100


def test_the_registered_games_have_a_gap():
    pytest.importorskip("ale_py", reason="the extra 'atari'")
    assert game("ALE/Pong-v5").min_truncation_gap == ((108_000 - 30) // 4 - 4) // 6
    assert make_env("gymnasium:ALE/Pong-v5").min_truncation_gap == 1


def played(env, steps=80):
    state, rows = env.reset(KEYS), []
    for t in range(steps):
        state = env.step(state, torch.tensor([t % 4, 1, 3, t // 2 % 4]), None)
        rows.append(state.exclude("token", "step"))
    env.close(state)
    return torch.stack(rows)


@pytest.mark.parametrize("gym_id", [FAKE, "ALE/Breakout-v5"])
def test_workers_give_the_same_games(gym_id):
    if gym_id != FAKE:
        pytest.importorskip("ale_py", reason="the extra 'atari'")
    here, there = played(game(gym_id)), played(game(gym_id, asynchronous=True, timeout=600.0))
    assert here["terminated"].any() and here["reward"].abs().max() == 1.0
    for name, x in here.flatten_keys(".").items():
        assert torch.equal(x.nan_to_num(-99.0), there.flatten_keys(".")[name].nan_to_num(-99.0)), name


def test_equal_keys_give_equal_games_although_a_game_was_interrupted():
    env = game()
    first = env.reset(KEYS)
    state = first
    for _ in range(12):
        state = env.step(state, torch.ones(4, dtype=torch.int64), None)
    again = env.reset(KEYS, state)
    assert torch.equal(first["obs"], again["obs"]) and again["info", "game_score"].isnan().all()
    assert len(SEEDS) == len(again)


def test_colors_and_sizes():
    env = game(grayscale_obs=False, screen_size=42, noop_max=0, fire_on_reset=False)
    state = env.reset(KEYS[:1])
    assert state["obs"].shape == (1, 42, 42, 3) and state["obs"][0, 0, 0, 1:].tolist() == [7, 9]
    env = game(kwargs={"meanings": ["NOOP", "UP", "DOWN", "FIRE"]}, noop_max=0)
    assert not env.reset(KEYS[:1])["obs"].any()  # FIRE is not the second action, so the game starts without it


def test_evaluations_count_whole_games_and_their_scores():
    env = {"name": f"gymnasium:{FAKE}", "cfg": {"atari": {}, "kwargs": {"life": [9, 12]}}}
    cfg = small(env=env, **{"trainer.num_eval_envs": 2, "trainer.eval_seed": 3})
    state, policy = init_state(cfg), build(cfg).policy
    logs = evaluate(state, cfg, 4)
    made, params, steps, games = make_env(env), policy_params(state), [0, 0], [[], []]
    now = made.reset(rng.stream(rng.fold_in(rng.key(3), rng.EVAL), rng.START, torch.arange(2), 0))
    while min(map(len, games)) < 2:
        _, out = policy.act(params, policy.init_carry(params, 2), now["obs"], None)
        now = made.step(now, out["action"], None)
        for i, score in enumerate(now["info", "game_score"].tolist()):
            steps[i] += 1
            if not np.isnan(score):
                games[i].append((score, steps[i]))
                steps[i] = 0
    scores, lengths = zip(*games[0][:2], *games[1][:2], strict=True)
    assert logs["eval/avg_reward"] == pytest.approx(np.mean(scores)) and np.abs(scores).max() > 10
    assert logs["eval/avg_length"] == pytest.approx(np.mean(lengths))


def test_training_logs_the_scores_of_games():
    env = {"name": f"gymnasium:{FAKE}", "cfg": {"atari": {"noop_max": 0}, "kwargs": {"life": [9, 12]}}}
    cfg = small(env={**env, "frame_stack": 1}, **{"trainer.buffer_size": 32})
    collected = [record["logs"] for record in train_iter(init_state(cfg), cfg) if record["log_type"] == "collect"]
    scores = [float(logs["game_score"]) for logs in collected if not logs["game_score"].isnan()]
    assert scores and min(scores) > max(float(logs["episode_reward_avg_100"].nan_to_num()) for logs in collected)


def test_check_env_finds_no_fault_with_lives_cut_by_a_limit():
    cfg = {"atari": {"noop_max": 0, "fire_on_reset": False}, "kwargs": {"max_num_frames_per_episode": 60}}
    assert check_env({"name": f"gymnasium:{FAKE}", "cfg": cfg}).findings == []


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (
            {"kwargs": {"frameskip": 4}},
            r"kwargs.frameskip is 4, but atari needs 1; remove it, and set atari.fr",
        ),
        (
            {"kwargs": {"obs_type": "ram"}},
            r"kwargs.obs_type is 'ram', but .* 'grayscale'; remove it, and set atari",
        ),
        (
            {"kwargs": {"continuous": True}},
            r"kwargs.continuous is true, but atari needs false; remove it, or remove",
        ),
        ({"atari": {"frame_skip": 0}}, r"atari.frame_skip: must be at least 1, got 0"),
        ({"atari": {"noops": 3}}, r"atari.noops: unknown key; did you mean 'noop_max'\?"),
    ],
)
def test_wrong_settings_are_refused(cfg, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_env({"name": f"gymnasium:{FAKE}", "cfg": {"atari": {}} | cfg})
    assert "\n" not in str(error.value)


def test_an_environment_that_is_no_atari_game_is_refused():
    with pytest.raises(ConfigError, match="CartPoleEnv has no argument frameskip, so it is not an Atari game"):
        game("CartPole-v1")


def test_a_missing_package_is_reported_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    message = r"FakeAtari-v0: ModuleNotFoundError: No module named 'cv2': install it with: pip install 'ecrl\[atari\]'"
    with pytest.raises(ConfigError, match=message):
        game(noop_max=7)


def test_rewards_keep_their_size_without_clipping():
    rewards = played(game(clip_reward=False))["reward"]
    assert rewards.max() > 5.0
    close(rewards.sign(), played(game())["reward"])
