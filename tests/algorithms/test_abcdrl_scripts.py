"""abcdRL's scripts with their default flags, on the config files of the migration page, learn in ecrl.

Only the budget and `learning_starts` are shorter. The flags are copied from the dataclasses of the scripts.
"""

import json
import re
from importlib.util import find_spec

import pytest
import torch
from support.config_files import with_warnings
from support.paths import ROOT

from ecrl.config import config_from_dict
from ecrl.envs import make_env
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.spaces import box

pytestmark = pytest.mark.filterwarnings("ignore:.*Hopper-v4 is out of date:DeprecationWarning")
PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'^```json title="(abcdrl_\w+\.json)"\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE))
COMMON = {"trainer.seed": 1, "trainer.cuda": False, "trainer.num_envs": 1, "trainer.gamma": 0.99}
DQN = COMMON | {
    "trainer.env_id": "CartPole-v1",
    "trainer.start_epsilon": 1.0,
    "trainer.end_epsilon": 0.05,
    "trainer.exploration_fraction": 0.5,
    "trainer.batch_size": 128,
    "trainer.learning_rate": 2.5e-4,
    "trainer.target_network_frequency": 500,
    "trainer.train_frequency": 10,
}
PDQN = DQN | {"trainer.alpha": 0.2, "trainer.beta": 0.6}
ATARI = COMMON | {
    "trainer.env_id": "ALE/Pong-v5",
    "trainer.start_epsilon": 1.0,
    "trainer.end_epsilon": 0.01,
    "trainer.exploration_fraction": 0.1,
    "trainer.batch_size": 32,
    "trainer.learning_rate": 1e-4,
    "trainer.target_network_frequency": 1000,
    "trainer.train_frequency": 4,
}
DDPG = COMMON | {
    "trainer.env_id": "Hopper-v4",
    "trainer.exploration_noise": 0.1,
    "trainer.batch_size": 256,
    "trainer.learning_rate": 3e-4,
    "trainer.tau": 0.005,
    "trainer.train_frequency": 1,
    "trainer.policy_frequency": 2,
}
SAC = COMMON | {
    "trainer.env_id": "Hopper-v4",
    "trainer.batch_size": 256,
    "trainer.q_lr": 1e-3,
    "trainer.policy_lr": 3e-4,
    "trainer.tau": 0.005,
    "trainer.alpha": 0.2,
    "trainer.autotune": True,
    "trainer.train_frequency": 1,
    "trainer.target_network_frequency": 1,
}
PPO = COMMON | {
    "trainer.env_id": "Hopper-v4",
    "trainer.num_steps": 2048,
    "trainer.learning_rate": 3e-4,
    "trainer.anneal_lr": True,
    "trainer.update_epochs": 10,
    "trainer.norm_adv": True,
    "trainer.clip_coef": 0.2,
    "trainer.clip_vloss": True,
    "trainer.ent_coef": 0.0,
    "trainer.vf_coef": 0.5,
    "trainer.max_grad_norm": 0.5,
    "trainer.target_kl": None,
    "trainer.num_minibatches": 32,
    "trainer.gae_lambda": 0.95,
}
PPO_ATARI = PPO | {"trainer.env_id": "ALE/Pong-v5", "trainer.num_envs": 8, "trainer.num_steps": 128}
SMALL_BUFFER = {"algorithm.cfg.capacity": 10_000}
PRIORITIES = {"algorithm.cfg.prioritized.eps": 0.001}
SCRIPTS = {  # script: config file, keys of the page, flags, environment steps of the test
    "dqn": ("abcdrl_dqn.json", {}, DQN, 10_200),
    "ddqn": ("abcdrl_dqn.json", {"algorithm.cfg.double": True}, DQN, 10_200),
    "pdqn": ("abcdrl_dqn.json", PRIORITIES, PDQN, 10_200),
    "dqn_atari": ("abcdrl_dqn_atari.json", SMALL_BUFFER, ATARI, 4_200),
    "ddqn_atari": ("abcdrl_dqn_atari.json", SMALL_BUFFER | {"algorithm.cfg.double": True}, ATARI, 4_200),
    "pdqn_atari": (
        "abcdrl_dqn_atari.json",
        SMALL_BUFFER | PRIORITIES,
        ATARI | {"trainer.alpha": 0.2, "trainer.beta": 0.6},
        4_200,
    ),
    "ppo_atari": ("abcdrl_ppo_atari.json", {}, PPO_ATARI, 4_096),
    "ddpg": ("abcdrl_td3.json", {"policy.num_critics": 1, "algorithm.cfg.policy_noise": 0.0}, DDPG, 1_200),
    "td3": ("abcdrl_td3.json", {}, DDPG, 1_200),
    "sac": ("abcdrl_sac.json", {}, SAC, 1_200),
    "ppo": ("abcdrl_ppo.json", {}, PPO, 8_192),
}
LEARNING_STARTS = 200


def _config(script, steps=None):
    file, keys, flags, few = SCRIPTS[script]
    short = {} if script.startswith("ppo") else {"trainer.learning_starts": LEARNING_STARTS}
    overrides = keys | flags | {"trainer.total_timesteps": steps or few} | short
    return with_warnings(config_from_dict, json.loads(FILES[file]), file, overrides)


_NO_GAMES = pytest.mark.skipif(find_spec("ale_py") is None, reason="needs the extra atari")
EVERY = [pytest.param(script, marks=_NO_GAMES if script.endswith("_atari") else ()) for script in SCRIPTS]


@pytest.mark.parametrize("script", EVERY)
def test_the_flags_are_accepted_and_mean_what_they_say(script):
    cfg, warned = _config(script)
    assert [text.split()[0] for text in warned] == (["trainer.alpha"] if script == "sac" else [])
    own, trainer = cfg.algorithm.cfg, cfg.trainer
    assert (trainer.num_envs, trainer.device, own.gamma) == (8 if script == "ppo_atari" else 1, "cpu", 0.99)
    if script.endswith("_atari"):
        env = make_env(cfg.env)
        assert cfg.env.cfg.id == "ALE/Pong-v5" and env.frame_stack == 4
        assert env.observation_space == box(0, 255, 84, 84, 1, dtype=torch.uint8)
    if script.endswith("dqn_atari"):
        assert (own.double, own.capacity, own.train_freq) == (script == "ddqn_atari", 10_000, 4)
        assert (own.initial_epsilon, own.final_epsilon, own.exploration_fraction) == (1.0, 0.01, 0.1)
        assert (own.batch_size, own.learning_rate, own.target_update_freq) == (32, 1e-4, 1000)
    elif script == "ppo_atari":
        assert (trainer.buffer_size, own.n_epochs, own.num_minibatches, own.segment_length) == (128, 10, 32, 16)
    elif script in ("dqn", "ddqn", "pdqn"):
        assert (own.double, own.capacity, own.train_freq, own.target_update_freq) == (script == "ddqn", 10_000, 10, 500)
        assert (own.initial_epsilon, own.final_epsilon, own.exploration_fraction) == (1.0, 0.05, 0.5)
        assert (own.batch_size, own.learning_rate, own.gradient_steps, own.tau) == (128, 2.5e-4, 1, 1.0)
        chance = {"alpha": 0.4, "beta": 0.6, "final_beta": 0.6, "eps": 0.001} if script == "pdqn" else None
        assert (own.prioritized and own.prioritized.model_dump()) == chance
    elif script == "ppo":
        assert (trainer.buffer_size, own.n_epochs, own.num_minibatches, own.batch_size) == (2048, 10, 32, None)
        assert (own.vf_coef, own.normalize_advantage, own.clip_vloss) == (0.25, "minibatch", True)
        assert own.lr_scheduler.name == "linear"
    else:
        assert (own.capacity, own.batch_size, own.tau, own.train_freq) == (1_000_000, 256, 0.005, 1)
        assert own.policy_delay == (1 if script == "sac" else 2)
    if script == "sac":
        assert (own.learning_rate, own.critic_learning_rate, own.temperature_learning_rate) == (3e-4, 1e-3, 1e-3)
        assert (own.learn_temperature, own.temperature) == (True, 1.0)


@pytest.mark.parametrize(("script", "starts"), [("dqn", 10_000), ("td3", 25_000), ("ddpg", 25_000), ("sac", 25_000)])
def test_the_whole_budget_has_as_many_updates_as_in_abcdrl(script, starts):
    """Count gradient steps of a run with abcdRL's own budget and `learning_starts`, without running it."""
    if script != "dqn":
        pytest.importorskip("mujoco")
    budget = 500_000 if script == "dqn" else 1_000_000
    file, keys, flags, _ = SCRIPTS[script]
    whole = keys | flags | {"trainer.total_timesteps": budget, "trainer.learning_starts": starts}
    cfg, _ = with_warnings(config_from_dict, json.loads(FILES[file]), file, whole)
    run = build(cfg)
    number = run.algorithm.gradient_steps(run.static._replace(phase="learn"))
    learning = cfg.trainer.iterations - -(-starts // cfg.trainer.buffer_size)
    assert learning * number == (budget - starts) // flags["trainer.train_frequency"]


@pytest.mark.long
@pytest.mark.parametrize("script", EVERY)
def test_a_short_run_takes_a_thousand_gradient_steps(script):
    if script in ("ddpg", "td3", "sac", "ppo"):
        pytest.importorskip("mujoco")
    cfg, _ = _config(script)
    before = state = init_state(cfg)
    for record in train_iter(before, cfg):
        state = record["state"]
    counts = {name: int(x) for name, x in state["opt"].flatten_keys(".").items() if name.split(".")[-1] == "step"}
    steps = {name.removesuffix("step").rstrip("."): count for name, count in counts.items()}
    assert max(steps.values()) >= 1_000, steps
    if script in ("ddpg", "td3"):
        assert steps == {"actor": 500, "critic": 1_000}
    if script == "sac":
        assert steps == {"actor": 1_000, "critic": 1_000, "temperature": 1_000}
    first, last = (dict(s["params"].flatten_keys(".").items()) for s in (before, state))
    assert all((first[name] != last[name]).any() and last[name].isfinite().all() for name in first)
