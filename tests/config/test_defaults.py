"""A config with only an environment and an algorithm: the policy and its networks have defaults."""

import pytest

from ecrl import ConfigError, init_state, load_config, train_iter
from ecrl.config import config_from_dict
from ecrl.config.json_schema import json_schema
from ecrl.registry import lookup, registered

TASKS = {"pendulum": {"env": {"id": "pendulum"}}, "cartpole": {"env": "cartpole"}, "point_mass": {"env": "point_mass"}}
DISCRETE = ("dqn", "pqn")
BOUNDED = ("fast_sac", "fast_td3")  # their critics need bounds of the returns, which no default can know
# Other test modules register algorithms of their own in the same process.
BUILT_IN = [name for name in registered("algorithm") if lookup("algorithm", name).make.__module__.startswith("ecrl.")]


@pytest.mark.parametrize("algorithm", [name for name in BUILT_IN if name not in ("bc", *BOUNDED)])
def test_an_environment_and_an_algorithm_are_enough(algorithm):
    data = TASKS["cartpole" if algorithm in DISCRETE else "point_mass" if algorithm == "apg" else "pendulum"]
    small = {"trainer.num_envs": 4, "trainer.buffer_size": 8, "trainer.compile": "off", "trainer.iterations": 2}
    section = {"name": algorithm, "cfg": {}}
    fields = lookup("algorithm", algorithm).config.model_fields
    if "batch_size" in fields:
        section["cfg"] |= {"batch_size": 8}
    if "learning_starts" in fields:
        section["cfg"] |= {"learning_starts": 32, "capacity": 64}
    cfg = load_config(data | {"algorithm": section}, small)
    assert cfg.policy.name == lookup("algorithm", algorithm).config.default_policy["name"]
    for network in ("actor", "critic"):
        if hasattr(cfg.policy, network):
            assert getattr(cfg.policy, network).network_cfg.hidden_sizes == (64, 64)
    *_, record = train_iter(init_state(cfg), cfg)
    assert int(record["state"]["sample_step"]) == 64


@pytest.mark.parametrize("algorithm", BOUNDED)
def test_a_default_policy_asks_for_the_bounds_of_the_returns(algorithm):
    with pytest.raises(ConfigError, match="policy: distribution categorical needs v_min and v_max"):
        load_config({"env": "pendulum", "algorithm": {"name": algorithm}})


def test_a_policy_that_is_given_stays_and_only_missing_networks_are_filled_in():
    policy = {"name": "actor_critic", "actor": {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}}
    cfg = config_from_dict({"env": "cartpole", "policy": policy, "algorithm": {"name": "ppo"}})
    assert cfg.policy.actor.network_cfg.hidden_sizes == (8,) and cfg.policy.critic.network_cfg.hidden_sizes == (64, 64)


def test_an_algorithm_without_a_default_needs_a_policy(restored_registry):
    from ecrl import ConfigModel, register_algorithm

    class OwnConfig(ConfigModel):
        rate: float = 0.1

    @register_algorithm("own")
    def own(cfg: OwnConfig):
        raise NotImplementedError

    with pytest.raises(ConfigError, match="policy: missing; the policy, such as"):
        config_from_dict({"env": "cartpole", "algorithm": {"name": "own"}})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"algorithm": {"name": "pppo"}}, "algorithm.name: unknown algorithm 'pppo'"),
        ({"algorithm": {}}, "algorithm.name: missing"),
        ({"algorithm": "ppo"}, "algorithm: expected an object, got 'ppo'"),
        ({}, "algorithm: missing"),
    ],
)
def test_a_wrong_algorithm_is_the_only_fault_of_a_config_without_a_policy(section, message):
    with pytest.raises(ConfigError) as error:
        config_from_dict({"env": "cartpole"} | section)
    (line,) = str(error.value).splitlines()
    assert message in line


def test_the_schema_accepts_a_config_without_a_policy():
    import jsonschema

    schema = json_schema()
    jsonschema.validate({"env": {"id": "gymnasium:Pendulum-v1"}, "algorithm": {"name": "ppo"}}, schema)
    jsonschema.validate({"env": "cartpole", "policy": {"name": "actor_critic"}, "algorithm": {"name": "ppo"}}, schema)
    for wrong in ({"env": "cartpole"}, {"env": "cartpole", "policy": {"name": "actor"}, "algorithm": {"name": "ppo"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
