"""Measured learning: the clock and the evaluations, with the learners of ecrl and of Stable-Baselines3."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks import learning
from benchmarks.minatar import SIZES
from benchmarks.other_libraries.zoo import ZOO, ReplaySettings
from benchmarks.pairs import ROOT
from benchmarks.tasks import CONFIGS, EPISODES, MINATAR_PPO, POINTS, TASKS
from ecrl.config import load_config, total_steps


def test_the_clock_stops_during_the_configured_number_of_evaluations(monkeypatch):
    episodes_run, now = [], [1000.0]
    monkeypatch.setattr(learning.time, "time", lambda: now[0])

    def evaluate(episodes):
        episodes_run.append(episodes)
        now[0] += 8.0
        return {"return": float(len(episodes_run))}

    def learn(report):
        for steps in range(10, 1001, 10):  # 100 updates, of half a second each
            now[0] += 0.5
            report(steps, evaluate)

    result = learning.followed(learn, TASKS["cartpole_ppo"], 1000, None)
    assert episodes_run == [20] * (POINTS - 1) + [100]
    assert [row["steps"] for row in result["curve"]][:3] == [30, 50, 80]  # 25, 50 and 75 were crossed
    assert result["curve"][-1] | {"seconds": 0} == {"steps": 1000, "seconds": 0, "episodes": 100, "return": 40.0}
    assert (result["train_s"], result["wall_s"]) == (50.0, 50.0 + 8.0 * POINTS)


def test_rare_updates_are_one_evaluation_each():
    result = learning.followed(
        lambda report: [report(steps, lambda n: {"return": 0.0}) for steps in (400, 800, 1200)],
        TASKS["cartpole_ppo"], 1000, None,
    )  # fmt: skip
    assert [(row["steps"], row["episodes"]) for row in result["curve"]] == [(400, 20), (800, 20), (1200, 100)]


@pytest.mark.long
@pytest.mark.ref
@pytest.mark.parametrize("config", ["cartpole_dqn", "pendulum_td3"])
def test_stable_baselines_learns_from_replay(tmp_path, config):
    pytest.importorskip("stable_baselines3")
    data = json.loads((CONFIGS / f"{config}.json").read_text())
    data["trainer"] |= {"iterations": 2}
    (path := tmp_path / f"{config}.json").write_text(json.dumps(data))
    code = "from benchmarks.tasks import EPISODES; EPISODES['return'] = (1, 2); "
    code += "from benchmarks.other_libraries.sb3_zoo import learn"
    result = learnt_apart(f"{code}; print(json.dumps(learn({str(path)!r}, 3)))")
    steps = [row["steps"] for row in result["curve"]]
    assert steps[-1] == total_steps(load_config(path), 1) and sorted(set(steps)) == steps
    assert [row["episodes"] for row in result["curve"]] == [1] * (len(steps) - 1) + [2]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """CartPole's config with 4 iterations of 2 environments, and few episodes."""
    data = json.loads((CONFIGS / "cartpole_ppo.json").read_text())
    data["trainer"] |= {"num_envs": 2, "buffer_size": 128, "iterations": 4, "compile": "off"}
    data["algorithm"]["cfg"]["batch_size"] = 64
    path = tmp_path / "cartpole_ppo.json"
    path.write_text(json.dumps(data))
    monkeypatch.setitem(EPISODES, "return", (2, 4))
    return path


def test_ecrl_learns_a_config_to_its_end(tiny):
    from benchmarks.ecrl_runs import learn

    result, again = learn(str(tiny), 3), learn(str(tiny), 3)
    assert [(row["steps"], row["episodes"]) for row in result["curve"]] == [(256, 2), (512, 2), (768, 2), (1024, 4)]
    assert all(8 <= row["return"] == row["length"] <= 500 for row in result["curve"])
    assert [row["return"] for row in result["curve"]] == [row["return"] for row in again["curve"]]
    assert 0 < result["train_s"] < result["wall_s"] and result["cpu_s"] > 0


@pytest.mark.slow
@pytest.mark.ref
def test_stable_baselines_learns_the_same_budget(tiny):
    pytest.importorskip("stable_baselines3")
    code = "from benchmarks.tasks import EPISODES; EPISODES['return'] = (2, 4); "
    code += "from benchmarks.other_libraries.sb3_zoo import learn"
    result = learnt_apart(f"{code}; print(json.dumps(learn({str(tiny)!r}, 3)))")
    steps = [row["steps"] for row in result["curve"]]
    assert steps == [256, 512, 768, 1024] and total_steps(load_config(tiny), 1) == 1024
    assert [row["episodes"] for row in result["curve"]] == [2, 2, 2, 4]
    assert all(8 <= row["return"] <= 500 for row in result["curve"])


@pytest.mark.slow
@pytest.mark.ref
def test_rejax_learns_the_budget_of_a_config_on_the_same_game(tmp_path):
    pytest.importorskip("rejax")
    data = json.loads((CONFIGS / "minatar_breakout_ppo.json").read_text())
    data["trainer"] |= {"num_envs": 4, "buffer_size": 8, "iterations": 2}
    data["algorithm"]["cfg"]["batch_size"] = 16
    (path := tmp_path / "minatar_breakout_ppo.json").write_text(json.dumps(data))
    code = "from benchmarks.tasks import EPISODES; EPISODES['return'] = (1, 2); "
    code += "from benchmarks.other_libraries.rejax_learning import learn"
    result = learnt_apart(f"{code}; print(json.dumps(learn({str(path)!r}, 3)))")
    assert [(row["steps"], row["episodes"]) for row in result["curve"]] == [(32, 1), (64, 2)]
    assert all(row["return"] >= 0 for row in result["curve"])


@pytest.mark.slow
@pytest.mark.ref
def test_rejax_plays_the_steps_of_the_game():
    """150 steps of 5 environments through JAX's `vmap`, with resets, against the game itself."""
    pytest.importorskip("rejax")
    code = """
import jax, numpy as np, torch
from benchmarks.other_libraries.rejax_learning import HostGame
from ecrl.envs import auto_reset, make_env

env = make_env({"name": "minatar_asterix", "cfg": {"max_episode_steps": 40}})
game, own, equal = HostGame(env), auto_reset(env), []

def as_keys(keys):
    words = np.asarray(keys).astype(">u4")
    return torch.tensor([int.from_bytes(word.tobytes(), "big", signed=True) for word in words])

keys = jax.random.split(jax.random.PRNGKey(0), 5)
obs, state = jax.vmap(game.reset)(keys)
expected, dones = own.reset(as_keys(keys)), 0
for t in range(150):
    keys = jax.random.split(jax.random.PRNGKey(t + 1), 5)
    action = np.random.default_rng(t).integers(0, 5, 5)
    obs, state, reward, done, _ = jax.vmap(game.step)(keys, state, jax.numpy.asarray(action))
    expected = own.step(expected, torch.from_numpy(action), own.draw(as_keys(keys)))
    dones += int(done.sum())
    pairs = (obs, expected["obs"]), (reward, expected["reward"]), (state["final_obs"], expected["final_obs"])
    equal += [bool((np.asarray(one) == other.numpy()).all()) for one, other in pairs]
    equal.append(bool((np.asarray(done) == (expected["terminated"] | expected["truncated"]).numpy()).all()))
print(json.dumps([all(equal), dones]))
"""
    equal, dones = learnt_apart(code)
    assert equal and dones > 10


@pytest.mark.slow
@pytest.mark.ref
def test_stable_baselines_learns_the_budget_of_a_config_on_the_package_minatar(tmp_path):
    for package in ("stable_baselines3", "minatar"):
        pytest.importorskip(package)
    data = json.loads((CONFIGS / "minatar_seaquest_ppo.json").read_text())
    data["env"]["cfg"]["max_episode_steps"] = 100  # a player who stays at the surface never dies
    data["trainer"] |= {"num_envs": 4, "buffer_size": 8, "iterations": 2}
    data["algorithm"]["cfg"]["batch_size"] = 16
    (path := tmp_path / "minatar_seaquest_ppo.json").write_text(json.dumps(data))
    code = f"""
from benchmarks.tasks import EPISODES; EPISODES['return'] = (1, 2)
from benchmarks.other_libraries import sb3_minatar as m
from ecrl import init_state, load_config
cfg = load_config({str(path)!r})
policy = m.make_model(cfg, 0).policy
assert policy.pi_features_extractor is not policy.vf_features_extractor
changed = {{"max_episode_steps": 7, "sticky_action_prob": 0.0}}
other = cfg.replace(**{{"env.name": "minatar_breakout", "env.cfg": changed}})
games = [m.game(cfg), m.game(other)]
played = [one.unwrapped.game for one in games]
about = [played[0].env.__class__.__module__, *(one.sticky_action_prob for one in played)]
spaces = [int(games[0].action_space.n), int(games[1].action_space.n), games[1]._max_episode_steps]
own = init_state(cfg)["params"].values(True, True)
sizes = [sum(p.numel() for p in parameters) for parameters in (policy.parameters(), own)]
print(json.dumps([m.learn({str(path)!r}, 3), about, spaces, sizes]))
"""
    result, about, spaces, (size, own_size) = learnt_apart(code)
    assert [(row["steps"], row["episodes"]) for row in result["curve"]] == [(32, 1), (64, 2)]
    assert about == ["minatar.environments.seaquest", 0.1, 0.0] and spaces == [6, 3, 7]
    assert size == own_size


def test_rejaxs_networks_have_the_sizes_of_the_configs():
    for name in MINATAR_PPO:
        policy = json.loads((CONFIGS / f"{name}.json").read_text())["policy"]
        for part in ("actor", "critic"):
            layers = policy[part]["network_cfg"]
            assert (layers["channels"], layers["kernel_sizes"]) == ([SIZES.channels], [SIZES.kernel])
            assert (layers["strides"], layers["hidden_sizes"]) == ([1], [SIZES.features])


def learnt_apart(code):
    """Return what another process prints as JSON; its warnings do not reach this process."""
    command = [sys.executable, "-W", "ignore", "-c", f"import json\n{code}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.ref
def test_stable_baselines_takes_the_zoos_settings():
    """Evaluations use the statistics of training and do not change them; their rewards are not normalised."""
    pytest.importorskip("stable_baselines3")
    configs = [config for config in ZOO if not config.startswith("lunar_lander") or find_spec("Box2D")]
    code = f"""
from benchmarks.other_libraries import sb3_zoo as z
found = {{}}
for config in {configs}:
    s = z.ZOO[config]
    model = z.make_model(s, 0)
    envs = model.env
    envs.reset()
    envs.step([envs.action_space.sample() for _ in range(envs.num_envs)])
    mean = lambda: envs.obs_rms.mean.tolist() if getattr(s, "normalize", False) else None
    before, score = mean(), z.evaluated(model, s.env, 1, 2)["return"]
    found[config] = [before == mean(), score, model.lr_schedule(1.0), model.lr_schedule(0.5), envs.num_envs]
    if isinstance(s, z.Settings):
        found[config] += [model.clip_range(1.0), model.clip_range(0.5), model.n_steps, model.use_sde]
    else:
        noise = None if model.action_noise is None else model.action_noise._sigma.tolist()
        found[config] += [type(model).__name__, model.batch_size, model.gradient_steps, model.gamma]
        found[config] += [noise, envs.action_space.shape]
print(json.dumps(found))
"""
    for config, (still, score, rate, later_rate, num_envs, *others) in learnt_apart(code).items():
        settings = ZOO[config]
        assert still and -4000 < score < 600 and ("acrobot" not in config or score < -50), f"{config} is not scaled"
        if isinstance(settings, ReplaySettings):
            arguments, noise = settings.arguments, settings.noise_std
            expected = [settings.algorithm, arguments.get("batch_size", 256), arguments.get("gradient_steps", 1)]
            *others, shape = others
            expected += [arguments.get("gamma", 0.99), None if noise is None else [noise] * shape[0]]
            assert (num_envs, others) == (1, expected), config
            assert rate == later_rate == arguments["learning_rate"], config
        else:
            clip, later_clip, n_steps, use_sde = others
            ppo, share = settings.ppo, 0.5 if config == "cartpole_ppo" else 1.0  # left after half of the budget
            assert (num_envs, n_steps) == (settings.n_envs, ppo["n_steps"]), config
            assert use_sde == ppo.get("use_sde", False), config
            assert [later_rate, later_clip] == pytest.approx([share * rate, share * clip]), config
