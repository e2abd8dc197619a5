"""Names of settings in other libraries are refused with ecrl's key."""

import pytest

from ecrl import ConfigError, load_config
from ecrl.config.aliases import COUNT_KEYS
from ecrl.config.config import TrainerConfig
from ecrl.config.other_libraries import KEYS
from ecrl.registry import lookup, registered


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("algorithm.cfg.lr", "set algorithm.cfg.learning_rate"),
        ("trainer.lr", "set algorithm.cfg.learning_rate"),
        ("algorithm.cfg.n_steps", "set trainer.buffer_size"),
        ("trainer.n_steps", "set trainer.buffer_size"),
        ("algorithm.cfg.clip_range", "set algorithm.cfg.clip_coef"),
        ("algorithm.cfg.kl_coef", "a key of grpo, not of this algorithm"),
        ("algorithm.cfg.policy_delay", "a key of fast_sac, fast_td3, sac, td3, not of this algorithm"),
        ("algorithm.cfg.gama", "did you mean 'gamma'?"),
        ("algorithm.cfg.total_timesteps", "set trainer.total_timesteps"),
        ("env.cfg.max_steps", "set env.cfg.max_episode_steps"),
        ("env.cfg.horizon", "set env.cfg.max_episode_steps"),
        ("env.max_episode_steps", "set env.cfg.max_episode_steps"),
        ("trainer.max_steps", "set trainer.total_timesteps"),
    ],
)
def test_an_unknown_key_of_ppo_names_the_right_one(key, message):
    with pytest.raises(ConfigError) as error:
        load_config("cartpole_ppo", {key: 1})
    assert str(error.value) == f"cartpole_ppo: {key}: unknown key; {message}"


def test_a_name_is_not_mapped_to_a_key_that_the_algorithm_does_not_have():
    with pytest.raises(ConfigError, match=r"algorithm\.cfg\.clip_range: unknown key; known: "):
        load_config("cartpole_dqn", {"algorithm.cfg.clip_range": 0.2})


def test_every_suggested_key_exists():
    algorithms = {key for name in registered("algorithm") for key in lookup("algorithm", name).config.model_fields}
    for target in set(KEYS.values()):
        section, _, key = target.rpartition(".")
        trainer = {*TrainerConfig.model_fields, *(key.removeprefix("trainer.") for key in COUNT_KEYS)}
        known = {"trainer": trainer, "algorithm.cfg": algorithms}
        assert key in known.get(section, {"normalize_obs", "id"}), target
