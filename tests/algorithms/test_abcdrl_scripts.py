"""abcdRL's scripts with their default flags, on the config files of the migration page, learn in ecrl.

Only the budget and `learning_starts` are shorter. `tests/config/abcdrl_names` lists the flags.
"""

import json
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from support.config_files import with_warnings
from support.migration_page import CONFIGS, SCRIPTS, config_of, rows_with, spans
from support.small_runs import same

from ecrl.config import config_from_dict, diff
from ecrl.config.files import parse_overrides
from ecrl.envs import make_env
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.run.checkpoint import latest, load
from ecrl.run.train import train
from ecrl.spaces import box

pytestmark = pytest.mark.filterwarnings("ignore:.*Hopper-v4 is out of date:DeprecationWarning")
LEFT_OUT = {"trainer.exp_name", "trainer.cuda", "trainer.capture_video", "trainer.total_timesteps"}
LEFT_OUT |= {"trainer.learning_starts", "trainer.buffer_size", "trainer.policy_noise", "trainer.noise_clip"}
"""Flags that the runs below do not pass: shorter values, values of the machine, and values that ecrl refuses."""
SMALL_BUFFER = {"algorithm.cfg.capacity": 10_000}
DOUBLE, PRIORITIZED = "ddqn_torch.py", "pdqn_torch.py"
RUNS = {  # name: script, keys besides those of the page, environment steps of the test
    "dqn": ("dqn_torch.py", {}, 10_200),
    "ddqn": (DOUBLE, {}, 10_200),
    "pdqn": (PRIORITIZED, {}, 10_200),
    "dqn_atari": ("dqn_atari_torch.py", SMALL_BUFFER, 4_200),
    "ddqn_atari": ("dqn_atari_torch.py", SMALL_BUFFER | config_of(DOUBLE)[1], 4_200),
    "pdqn_atari": ("dqn_atari_torch.py", SMALL_BUFFER | config_of(PRIORITIZED)[1], 4_200),
    "ppo_atari": ("ppo_torch.py", {}, 4_096),
    "ddpg": ("ddpg_torch.py", {}, 1_200),
    "td3": ("td3_torch.py", {}, 1_200),
    "sac": ("sac_torch.py", {}, 1_200),
    "ppo": ("ppo_torch.py", {}, 8_192),
}
LEARNING_STARTS = 200


def _flags_of(script: str) -> dict[str, Any]:
    """Return the flags of a script with their defaults, without `LEFT_OUT` and the flags of the logger."""
    flags = SCRIPTS[script]["flags"]
    flags = {flag: value for flag, value in flags.items() if flag.startswith("trainer.") and flag not in LEFT_OUT}
    if script == "sac_torch.py":
        del flags["trainer.policy_frequency"]  # refused
    return flags | {"trainer.cuda": False}


def _config(name, **changes):
    script, own_keys, few = RUNS[name]
    data, keys = config_of(script)
    flags = _flags_of(script)
    if name == "ppo_atari":  # abcdRL has no such script
        data = json.loads(CONFIGS["abcdrl_ppo_atari.json"])
        flags |= {"trainer.env_id": "ALE/Pong-v5", "trainer.num_envs": 8, "trainer.num_steps": 128}
    short = {} if name.startswith("ppo") else {"trainer.learning_starts": LEARNING_STARTS}
    overrides = flags | keys | own_keys | short | {"trainer.total_timesteps": few} | changes
    return with_warnings(config_from_dict, data, name, overrides)


_NO_GAMES = pytest.mark.skipif(find_spec("ale_py") is None, reason="needs the extra atari")
EVERY = [pytest.param(script, marks=_NO_GAMES if script.endswith("_atari") else ()) for script in RUNS]


@pytest.mark.parametrize("script", EVERY)
def test_the_flags_are_accepted_and_mean_what_they_say(script):
    cfg, warned = _config(script)
    assert [text.split()[0] for text in warned] == (["trainer.alpha"] if script == "sac" else [])
    own, trainer = cfg.algorithm.cfg, cfg.trainer
    assert (trainer.num_envs, trainer.device, own.gamma) == (8 if script == "ppo_atari" else 1, "cpu", 0.99)
    if script.endswith("_atari"):
        env = make_env(cfg.env)
        assert cfg.env.cfg.id == ("ALE/Pong-v5" if script == "ppo_atari" else "BreakoutNoFrameskip-v4")
        assert env.frame_stack == 4
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


def _other(value: Any) -> Any:
    """Return another valid value of a flag."""
    match value:
        case bool():
            return not value
        case int():
            return 2 * value
        case float():
            return 0.5 * value if value else 0.5
        case list():
            return ["a", "b"]
    return 0.5 if value is None else f"{value}x"


def _tokens(flag: str, value: Any) -> list[str]:
    """Return a flag as a command of abcdRL has it."""
    section, _, name = flag.replace("_", "-").partition(".")
    if isinstance(value, bool):
        return [f"--{section}.{'' if value else 'no-'}{name}"]
    return [f"--{section}.{name}", *(value if isinstance(value, list) else [str(value)])]


REFUSED = {
    "td3_torch.py": {"trainer.policy_noise", "trainer.noise_clip"},
    "sac_torch.py": {"trainer.policy_frequency", "trainer.target_network_frequency"},
}
"""Flags that ecrl refuses if their values differ from the defaults; `buffer_size` is refused beside other flags."""
IGNORED = {"trainer.capture_video", "logger.wandb_tags", "logger.wandb_entity"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_flag_changes_the_keys_of_its_row_or_is_refused_with_its_row(script):
    data, keys = config_of(script)
    base = config_from_dict(data, script, keys)
    for flag, default in SCRIPTS[script]["flags"].items():
        ((_, column, _),) = rows_with("abcdRL: flags", f"--{flag}")
        if flag in REFUSED.get(script, ()) or flag == "trainer.buffer_size":
            tokens = [*_tokens(flag, _other(default)), "--trainer.gamma", "0.9"]
            with pytest.raises(ConfigError) as error:
                config_from_dict(data, script, keys | parse_overrides(tokens))
            message = str(error.value)
            assert message.startswith(f"{script}: {flag}: ") and message.endswith(f"(see docs/migration.md#{flag})")
            assert spans(column)[0] in message or "leave it out" in message
            continue
        changed, warned = set(), set()
        text_or_none = flag in ("trainer.exp_name", "logger.wandb_entity")
        for value in ("x",) if text_or_none else (default, _other(default)):
            overrides = keys | parse_overrides(_tokens(flag, value))
            cfg, warnings = with_warnings(config_from_dict, data, script, overrides)
            changed |= {line.partition(":")[0].replace("env.cfg.id", "env.name") for line in diff(base, cfg)}
            warned |= {*warnings}
        assert all(key.startswith(tuple(spans(column))) for key in changed), (flag, changed)
        ignored = flag in IGNORED or (script, flag) == ("sac_torch.py", "trainer.alpha")
        warns = ignored or flag == "evaluator.num_steps_eval"  # switches evaluations on
        assert bool(changed) != ignored and len(warned) == int(warns), (flag, changed, warned)
        assert all(text.startswith(flag) and f"; see docs/migration.md#{flag})" in text for text in warned)


@pytest.mark.parametrize(("script", "starts"), [("dqn", 10_000), ("td3", 25_000), ("ddpg", 25_000), ("sac", 25_000)])
def test_the_whole_budget_has_as_many_updates_as_in_abcdrl(script, starts):
    """Count gradient steps of a run with abcdRL's own budget and `learning_starts`, without running it."""
    if script != "dqn":
        pytest.importorskip("mujoco")
    flags = SCRIPTS[RUNS[script][0]]["flags"]
    budget = flags["trainer.total_timesteps"]
    assert flags["trainer.learning_starts"] == starts
    cfg, _ = _config(script, **{"trainer.total_timesteps": budget, "trainer.learning_starts": starts})
    run = build(cfg)
    number = run.algorithm.gradient_steps(run.static._replace(phase="learn"))
    learning = cfg.trainer.iterations - -(-starts // cfg.trainer.buffer_size)
    assert learning * number == (budget - starts) // flags["trainer.train_frequency"]


@pytest.mark.parametrize("script", ["dqn", "pdqn", "ddpg", "td3", "sac", "ppo"])
def test_a_run_with_one_environment_as_in_abcdrl_is_saved_and_loads(script, tmp_path):
    few = {"trainer.total_timesteps": 200, "trainer.compile": "off"}
    if script == "ppo":
        few |= {"trainer.num_steps": 100, "trainer.update_epochs": 1}
    else:
        few |= {"trainer.learning_starts": 100, "trainer.train_frequency": 20, "trainer.batch_size": 16}
        few |= {"algorithm.cfg.capacity": 150}
    if not script.endswith("dqn"):
        few |= {"trainer.env_id": "Pendulum-v1"}
    if script in ("ddpg", "td3"):
        few |= {"trainer.policy_frequency": 1}
    cfg, _ = _config(script, **few)
    state, _ = train(init_state(cfg), cfg, tmp_path / "run", progress=False)
    loaded, same_cfg = load(latest(tmp_path / "run"))
    assert same_cfg == cfg and int(loaded["update_step"]) > 0
    assert all(same(loaded[part], state[part]) for part in ("params", "opt", "replay") if part in state)


@pytest.mark.long
@pytest.mark.parametrize("script", EVERY)
def test_a_short_run_takes_a_thousand_gradient_steps(script):
    if script in ("ddpg", "td3", "sac", "ppo"):
        pytest.importorskip("mujoco")
    cfg, _ = _config(script, **({"trainer.env_id": "ALE/Pong-v5"} if script.endswith("_atari") else {}))
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
