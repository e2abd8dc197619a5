"""abcdRL's flags set ecrl's keys, warn if they have no meaning, and are refused if they would change the result."""

import copy

import pytest
from support.config_files import with_warnings

from ecrl.config import TrainerConfig, config_from_dict, load_config
from ecrl.config.abcdrl import FLAGS
from ecrl.errors import ConfigError

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
POLICIES = {
    "dqn": {"name": "q_network", "critic": NET},
    "ddpg": {"name": "deterministic_actor_critic", "actor": NET, "critic": NET},
    "td3": {"name": "deterministic_actor_critic", "actor": NET, "critic": NET},
    "sac": {"name": "squashed_actor_critic", "actor": NET, "critic": NET},
    "ppo": {"name": "actor_critic", "actor": NET, "critic": NET},
}


def _data(algorithm, trainer=None, cfg=None, **sections):
    env = "cartpole" if algorithm == "dqn" else "pendulum"
    own = {"name": algorithm, "cfg": cfg or {}}
    data = {"trainer": trainer or {}, "env": env, "policy": POLICIES[algorithm], "algorithm": own, **sections}
    return copy.deepcopy({key: value for key, value in data.items() if value is not None})


def _faults(data, **overrides):
    with pytest.raises(ConfigError) as error:
        config_from_dict(data, "run", overrides)
    return [line.removeprefix("run: ") for line in str(error.value).split("\n")]


SETS = [  # algorithm, flag, value, own keys
    ("dqn", "trainer.cuda", True, {"trainer.device": "auto"}),
    ("dqn", "trainer.cuda", False, {"trainer.device": "cpu"}),
    ("dqn", "trainer.env_id", "Acrobot-v1", {"env": "gymnasium:Acrobot-v1"}),
    ("dqn", "trainer.gamma", 0.9, {"algorithm.cfg.gamma": 0.9}),
    ("dqn", "trainer.start_epsilon", 0.5, {"algorithm.cfg.initial_epsilon": 0.5}),
    ("dqn", "trainer.end_epsilon", 0.2, {"algorithm.cfg.final_epsilon": 0.2}),
    ("dqn", "trainer.exploration_fraction", 0.3, {"algorithm.cfg.exploration_fraction": 0.3}),
    ("ddpg", "trainer.exploration_noise", 0.3, {"algorithm.cfg.exploration_noise": 0.3}),
    ("dqn", "trainer.batch_size", 32, {"algorithm.cfg.batch_size": 32}),
    ("td3", "trainer.learning_rate", 0.01, {"algorithm.cfg.learning_rate": 0.01}),
    ("sac", "trainer.policy_lr", 0.01, {"algorithm.cfg.learning_rate": 0.01}),
    (
        "sac",
        "trainer.q_lr",
        0.02,
        {"algorithm.cfg.critic_learning_rate": 0.02, "algorithm.cfg.temperature_learning_rate": 0.02},
    ),
    ("sac", "trainer.autotune", False, {"algorithm.cfg.learn_temperature": False}),
    ("dqn", "trainer.alpha", 0.2, {"algorithm.cfg.prioritized.alpha": 0.4}),  # of squared errors
    (
        "dqn",
        "trainer.beta",
        0.5,
        {"algorithm.cfg.prioritized.beta": 0.5, "algorithm.cfg.prioritized.final_beta": 0.5},
    ),
    ("td3", "trainer.tau", 0.1, {"algorithm.cfg.tau": 0.1}),
    ("dqn", "trainer.train_frequency", 10, {"algorithm.cfg.train_freq": 10}),
    ("dqn", "trainer.learning_starts", 7, {"algorithm.cfg.learning_starts": 28}),  # times 4 environments
    ("dqn", "trainer.target_network_frequency", 10, {"algorithm.cfg.target_update_freq": 8}),
    ("dqn", "trainer.target_network_frequency", 3, {"algorithm.cfg.target_update_freq": 1}),
    ("sac", "trainer.target_network_frequency", 4, {}),
    ("td3", "trainer.policy_frequency", 12, {"algorithm.cfg.policy_delay": 3}),
    ("td3", "trainer.policy_frequency", 2, {"algorithm.cfg.policy_delay": 1}),
    ("ddpg", "trainer.policy_frequency", 2, {}),
    ("sac", "trainer.policy_frequency", 4, {"algorithm.cfg.policy_delay": 1}),
    ("ppo", "trainer.num_steps", 64, {"trainer.buffer_size": 64}),
    ("ppo", "trainer.anneal_lr", True, {"algorithm.cfg.lr_scheduler": {"name": "linear"}}),
    ("ppo", "trainer.anneal_lr", False, {}),
    ("ppo", "trainer.update_epochs", 3, {"algorithm.cfg.n_epochs": 3}),
    (
        "ppo",
        "trainer.num_minibatches",
        16,
        {"algorithm.cfg.num_minibatches": 16, "algorithm.cfg.batch_size": None},
    ),
    ("ppo", "trainer.norm_adv", True, {"algorithm.cfg.normalize_advantage": "minibatch"}),
    ("ppo", "trainer.norm_adv", False, {"algorithm.cfg.normalize_advantage": "none"}),
    ("ppo", "trainer.clip_coef", 0.1, {"algorithm.cfg.clip_coef": 0.1}),
    ("ppo", "trainer.clip_vloss", True, {"algorithm.cfg.clip_vloss": True}),
    ("ppo", "trainer.ent_coef", 0.1, {"algorithm.cfg.ent_coef": 0.1}),
    ("ppo", "trainer.vf_coef", 0.5, {"algorithm.cfg.vf_coef": 0.25}),
    ("ppo", "trainer.max_grad_norm", 0.1, {"algorithm.cfg.max_grad_norm": 0.1}),
    ("ppo", "trainer.target_kl", 0.1, {"algorithm.cfg.target_kl": 0.1}),
    ("ppo", "trainer.gae_lambda", 0.1, {"algorithm.cfg.gae_lambda": 0.1}),
    ("dqn", "logger.track", True, {"trainer.use_wandb": True}),
    ("dqn", "logger.wandb_project_name", "mine", {"trainer.wandb_project_name": "mine"}),
    ("dqn", "evaluator.eval_frequency", 9, {"trainer.eval_freq": 9, "trainer.enable_eval": True}),
    ("dqn", "evaluator.eval_env_seed", 9, {"trainer.eval_seed": 9, "trainer.enable_eval": True}),
    ("dqn", "saver.save_frequency", 9, {"trainer.save_freq": 9}),
]
INERT = {
    "trainer.capture_video": True,
    "trainer.alpha": 0.5,
    "logger.wandb_tags": ["a"],
    "logger.wandb_entity": "me",
    "evaluator.num_steps_eval": 500,
}
REFUSED = [
    ("td3", "trainer.policy_noise", 0.2, "is in units of the action; divide it by half the action range, and set"),
    ("td3", "trainer.noise_clip", 0.2, "is in units of the action; divide it by half the action range, and set"),
    ("sac", "trainer.policy_frequency", 8, "abcdRL updates the actor this many times in a row, but ecrl only once at"),
    ("ddpg", "trainer.policy_frequency", 8, "ddpg moves the actor in each gradient step; use td3 with"),
    ("sac", "trainer.target_network_frequency", 8, "sac moves the targets after each gradient step; leave it out"),
    ("ppo", "trainer.start_epsilon", 0.5, "algorithm 'ppo' has no initial_epsilon; remove it"),
    ("ppo", "trainer.target_network_frequency", 5, "algorithm 'ppo' has no target_update_freq; remove it"),
    ("dqn", "trainer.policy_frequency", 5, "algorithm 'dqn' has no policy_delay; remove it"),
    ("dqn", "trainer.policy_noise", 5, "algorithm 'dqn' has no policy_noise; remove it"),
    ("ddpg", "trainer.alpha", 5, "algorithm 'ddpg' has no temperature; remove it"),
    ("ddpg", "trainer.beta", 0.5, "algorithm 'ddpg' has no prioritized; remove it"),
]
INVALID = [
    ("dqn", "trainer.tau_", 8, "unknown key; known: "),
    ("dqn", "trainer.alpha", "x", "expected a number, got 'x'"),
    ("dqn", "trainer.gamma", 2, "must be at most 1.0, got 2"),
    ("dqn", "trainer.learning_starts", "x", "expected an integer, got 'x'"),
    ("dqn", "trainer.target_network_frequency", 0, "must be at least 1, got 0"),
    ("td3", "trainer.policy_frequency", True, "expected an integer, got true"),
    ("ppo", "trainer.vf_coef", "x", "expected a number, got 'x'"),
    ("ppo", "trainer.norm_adv", 3, "expected 'rollout', 'minibatch' or 'none', got 3"),
    ("dqn", "trainer.cuda", 1, "expected a string, got 1"),
]


ROW = " (see docs/migration.md#{})"


def _with_flag(data, flag, value):
    section, key = flag.split(".")
    return data | {section: data.get(section, {}) | {key: value}}


@pytest.mark.parametrize(("algorithm", "flag", "value", "own"), SETS, ids=[f"{a}-{f}" for a, f, *_ in SETS])
def test_flags_set_keys_in_a_file_and_on_the_command_line(algorithm, flag, value, own):
    plain = _data(algorithm, {"num_envs": 4})
    expected = config_from_dict(plain, overrides=own)
    file = plain | {"env": None} if flag == "trainer.env_id" else plain
    file = {key: part for key, part in file.items() if part is not None}
    assert config_from_dict(_with_flag(file, flag, value)) == expected
    assert config_from_dict(plain, overrides={flag: value}) == expected


@pytest.mark.parametrize("flag", INERT)
def test_flags_without_meaning_warn_once(flag):
    cfg, warned = with_warnings(config_from_dict, _with_flag(_data("sac"), flag, INERT[flag]))
    evaluates = {"trainer.enable_eval": True} if flag.startswith("evaluator.") else {}
    assert cfg == config_from_dict(_data("sac"), overrides=evaluates)
    (message,) = warned
    assert message.startswith(f"{flag} has no meaning here (")
    assert message.endswith(f"; see docs/migration.md#{flag}); ignored")


@pytest.mark.parametrize(("algorithm", "flag", "value", "text"), REFUSED, ids=[f"{a}-{f}" for a, f, *_ in REFUSED])
def test_flags_that_would_change_the_result_are_refused(algorithm, flag, value, text):
    data = _data(algorithm, {"num_envs": 4})
    (fault,) = _faults(_with_flag(data, flag, value))
    assert fault.startswith(f"{flag}: {text}") and fault.endswith(ROW.format(flag))
    assert _faults(data, **{flag: value}) == [fault]


@pytest.mark.parametrize(("algorithm", "flag", "value", "text"), INVALID, ids=[f"{a}-{f}" for a, f, *_ in INVALID])
def test_invalid_values_are_reported_under_the_name_of_the_flag(algorithm, flag, value, text):
    data = _data(algorithm, {"num_envs": 4})
    (fault,) = _faults(_with_flag(data, flag, value))
    assert fault.startswith(f"{flag}: {text}")
    assert _faults(data, **{flag: value}) == [fault]


def test_unknown_flags_name_the_table_of_flags():
    known = "unknown key; known: track, wandb_project_name, wandb_tags, wandb_entity"
    expected = [f"logger.trak: {known}{ROW.format('abcdrl-flags')}"]
    assert _faults(_with_flag(_data("dqn"), "logger.trak", True)) == expected
    assert _faults(_data("dqn"), **{"logger.trak": True}) == expected


def test_a_new_environment_keeps_the_preprocessing_of_games():
    cfg = {"atari": {"noop_max": 5}, "asynchronous": True, "kwargs": {"mode": 1}, "max_episode_steps": 9}
    data = _data("dqn", env={"name": "gymnasium:ALE/Pong-v5", "cfg": cfg})
    for flag, value in (("trainer.env_id", "BreakoutNoFrameskip-v4"), ("env.name", "gymnasium:BreakoutNoFrameskip-v4")):
        env = config_from_dict(data, "run", {flag: value}).env.cfg
        assert (env.id, env.atari.noop_max, env.asynchronous) == ("BreakoutNoFrameskip-v4", 5, True)
        assert (env.kwargs, env.max_episode_steps) == ({}, None)  # those of the other environment
    assert config_from_dict(data).replace(**{"env.name": "gymnasium:BreakoutNoFrameskip-v4"}).env.cfg == env
    assert config_from_dict(data, "run", {"env.name": "cartpole"}).env.name == "cartpole"


def test_every_flag_is_tried():
    assert {flag for _, flag, *_ in (*SETS, *REFUSED, *INVALID)} | INERT.keys() >= FLAGS.keys()
    assert not FLAGS.keys() & {f"trainer.{key}" for key in (*TrainerConfig.model_fields, *TrainerConfig.other_names)}


def test_the_replay_capacity_is_not_the_length_of_an_iteration():
    text = "trainer.buffer_size: next to abcdRL's trainer.tau, it may mean the capacity of the replay buffer; set"
    flags = {"buffer_size": 1_000_000, "tau": 0.1}
    (fault,) = _faults(_data("sac", flags))
    assert fault.startswith(text) and fault.endswith(ROW.format("trainer.buffer_size"))
    assert _faults(_data("sac"), **{f"trainer.{key}": value for key, value in flags.items()}) == [fault]
    own = config_from_dict(_data("sac", {"buffer_size": 64}), overrides={"trainer.tau": 0.1})
    assert (own.trainer.buffer_size, own.algorithm.cfg.tau) == (64, 0.1)  # from different sources
    assert config_from_dict(_data("ppo", {"buffer_size": 64, "gae_lambda": 0.5})).trainer.buffer_size == 64


def test_an_override_replaces_the_flag_or_the_key_of_a_file():
    data = _data("dqn", {"gamma": 0.5, "num_envs": 4, "learning_starts": 5}, {"train_freq": 2})
    changes = {"algorithm.cfg.gamma": 0.7, "trainer.train_frequency": 3, "trainer.num_envs": 2}
    cfg = config_from_dict(data, overrides=changes).algorithm.cfg
    assert (cfg.gamma, cfg.train_freq, cfg.learning_starts) == (0.7, 3, 10)
    assert data["trainer"] == {"gamma": 0.5, "num_envs": 4, "learning_starts": 5}  # unchanged
    env = config_from_dict(
        _data("dqn", env={"name": "cartpole", "cfg": {"gravity": 9.0}}), "run", {"trainer.env_id": "A"}
    )
    assert env.env.cfg.model_dump(exclude_defaults=True) == {"id": "A"}


def test_one_key_has_one_name():
    both = f"trainer.gamma: sets 'algorithm.cfg.gamma', which is also given; keep one{ROW.format('trainer.gamma')}"
    assert _faults(_data("dqn", {"gamma": 0.5}, {"gamma": 0.5})) == [both]
    assert _faults(_data("dqn"), **{"trainer.gamma": 0.5, "algorithm.cfg.gamma": 0.5}) == [both]
    (fault,) = _faults(_data("sac", {"learning_rate": 0.5, "policy_lr": 0.5}))
    text = ": sets 'algorithm.cfg.learning_rate', which trainer.learning_rate also sets; keep one"
    assert fault.endswith(text + ROW.format("trainer.policy_lr"))
    null = {"name": "dqn", "cfg": {"prioritized": None}}
    (fault,) = _faults(_data("dqn", {"alpha": 0.5}) | {"algorithm": null})
    text = "trainer.alpha: sets 'algorithm.cfg.prioritized.alpha', but 'prioritized' is not a section"
    assert fault == text + ROW.format("trainer.alpha")
    assert config_from_dict(_data("dqn") | {"algorithm": null}, "run", {"trainer.alpha": 0.5}).algorithm.cfg.prioritized
    (fault,) = _faults(_data("sac", {"tau": 0.5}) | {"algorithm": {"name": "sack"}})
    assert fault.startswith("algorithm.name: unknown algorithm 'sack'")


def test_flags_of_sac_depend_on_each_other():
    cfg = config_from_dict(_data("sac", {"autotune": False, "alpha": 0.3, "q_lr": 0.1})).algorithm.cfg
    assert (cfg.temperature, cfg.learn_temperature, cfg.temperature_learning_rate) == (0.3, False, None)
    assert cfg.critic_learning_rate == 0.1
    assert config_from_dict(_data("td3", {"q_lr": 0.1})).algorithm.cfg.critic_learning_rate == 0.1
    cfg = config_from_dict(_data("sac", {"alpha": 0.3}, {"learn_temperature": False})).algorithm.cfg
    assert cfg.temperature == 0.3


def test_the_delay_of_the_actor_counts_gradient_steps():
    trainer = {"num_envs": 1, "policy_frequency": 2, "train_frequency": 2}
    text = "trainer.policy_frequency: counts environment steps; set algorithm.cfg.policy_delay, which counts gradient "
    assert _faults(_data("td3", trainer)) == [f"{text}steps{ROW.format('trainer.policy_frequency')}"]
    assert config_from_dict(_data("td3", trainer | {"train_frequency": 1})).algorithm.cfg.policy_delay == 2


def test_evaluations_can_stay_off():
    data = _data("dqn", {"enable_eval": False}, evaluator={"eval_frequency": 5})
    assert not config_from_dict(data).trainer.enable_eval
    (fault,) = _faults(_data("dqn", evaluator={"eval_seed": 5}))
    text = "evaluator.eval_seed: unknown key; known: eval_frequency, num_steps_eval, eval_env_seed"
    assert fault == text + ROW.format("abcdrl-flags")
    faults = _faults(_data("dqn") | {"trainer": 5, "evaluator": {"eval_frequency": 5}})
    assert "trainer: expected an object, got 5" in [fault.split(";")[0] for fault in faults]


def test_duplicate_keys_are_still_found(tmp_path):
    (tmp_path / "run.json").write_text('{"trainer": {"seed": 1, "seed": 2, "tau": 0.1}, "algorithm": {"name": "sac"}}')
    with pytest.raises(ConfigError, match=r"trainer\.seed: given twice; keep one"):
        load_config(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("section", "near"),
    [("evaluater", "evaluator"), ("network", None), ("loggr", "logger"), ("save", "saver"), ("trianer", "trainer")],
)
def test_a_misspelt_section_of_flags_suggests_the_section(section, near):
    known = "known: algorithm, env, policy, trainer" if near is None else f"did you mean {near!r}?"
    line = [f"{section}: unknown key; {known}"]
    assert _faults(_data("dqn"), **{f"{section}.eval_frequency": 3, f"{section}.seed": 3}) == line
    assert _faults(_data("dqn", **{section: {"eval_frequency": 3}})) == line
