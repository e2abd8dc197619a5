"""Sections of a config have `replace`, `copy`, `to_dict` and `validate`, and never change."""

import re
import warnings

import pytest
from pydantic import Field
from support.small_runs import small

from ecrl.config import Config, PolicyConfig, config_from_dict, load_config
from ecrl.config.model import ConfigModel, Count
from ecrl.envs.mujoco.task_config import ActionConfig
from ecrl.errors import ConfigError
from ecrl.policies.mlp import MLPConfig

CARTPOLE = load_config("cartpole_ppo")
PUSH_CUBE = load_config("push_cube_ppo")
SECTIONS = {
    "whole": lambda cfg: cfg,
    "trainer": lambda cfg: cfg.trainer,
    "events": lambda cfg: cfg.trainer.events,
    "env": lambda cfg: cfg.env,
    "env.cfg": lambda cfg: cfg.env.cfg,
    "policy": lambda cfg: cfg.policy,
    "policy.actor": lambda cfg: cfg.policy.actor,
    "policy.actor.network_cfg": lambda cfg: cfg.policy.actor.network_cfg,
    "algorithm": lambda cfg: cfg.algorithm,
    "algorithm.cfg": lambda cfg: cfg.algorithm.cfg,
}


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
@pytest.mark.parametrize("cfg", [CARTPOLE, PUSH_CUBE], ids=["cartpole", "push_cube"])
def test_a_section_equals_its_copies(cfg, section):
    part, before = section(cfg), section(cfg).model_dump(mode="json")
    data = part.to_dict()
    assert type(data) is dict and data == before
    again = [part.copy(), part.replace(), type(part).model_validate(data)]
    assert all(type(x) is type(part) and x == part and hash(x) == hash(part) for x in again)
    assert part.validate() is None
    for values in data.values():  # the dict has no part of the config
        if isinstance(values, dict):
            values.clear()
    assert section(cfg).model_dump(mode="json") == before


def test_replaced_values():
    trainer = CARTPOLE.trainer
    assert trainer.replace(seed=3).seed == 3 and trainer.copy(seed=4, num_envs=2).num_envs == 2
    assert trainer.replace(rollout_steps=5) == trainer.replace(buffer_size=5)  # by another name of the key
    assert trainer.seed == CARTPOLE.trainer.seed == load_config("cartpole_ppo").trainer.seed
    ppo = CARTPOLE.algorithm.cfg
    assert ppo.replace(gamma=0.5) == CARTPOLE.replace(**{"algorithm.cfg.gamma": 0.5}).algorithm.cfg
    adam = ppo.replace(learning_rate=None, optimizer={"name": "adam", "kwargs": {"eps": 1e-4}})
    sgd = adam.replace(**{"optimizer.name": "sgd", "optimizer.kwargs.momentum": 0.5}).optimizer
    assert (sgd.name, sgd.kwargs.momentum, adam.optimizer.kwargs.eps) == ("sgd", 0.5, 1e-4)  # eps goes with adam
    actor = CARTPOLE.policy.actor
    assert actor.replace(network_cfg=MLPConfig(hidden_sizes=(4,))).network_cfg.hidden_sizes == (4,)
    sizes = {"network_cfg.hidden_sizes": [4], "network_cfg.orthogonal_init": 1.0}
    assert actor.replace(**sizes).network_cfg == actor.network_cfg.replace(hidden_sizes=(4,), orthogonal_init=1.0)


def test_another_component():
    env = CARTPOLE.env.replace(name="pendulum")
    assert env == config_from_dict(small().to_dict() | {"env": "pendulum"}).env and type(env.cfg).__name__ != "dict"
    policy = PolicyConfig.model_validate({"name": "actor_only", "actor": "mlp", "normalize_obs": True})
    both = policy.replace(name="actor_critic", critic="mlp")
    assert type(both) is type(CARTPOLE.policy) and both.normalize_obs and not hasattr(policy, "critic")
    action = PUSH_CUBE.env.cfg.actions["delta_qpos"]
    other = action.replace(func="EefPoseTerm")
    assert other == ActionConfig.model_validate({"func": "EefPoseTerm"}) and action.func == "DeltaQposTerm"


def test_names_in_any_case():
    """A name in upper case keeps the settings of the component, as in `Config.replace`."""
    ppo = CARTPOLE.algorithm.replace(**{"cfg.gamma": 0.5})
    assert ppo.replace(name="PPO") == ppo and ppo.replace(name="GRPO").name == "grpo"
    assert CARTPOLE.policy.replace(name="Actor_Critic") == CARTPOLE.policy
    assert CARTPOLE.policy.replace(**{"actor.type": "MLP"}) == CARTPOLE.policy
    assert CARTPOLE.policy.actor.replace(type="MLP") == CARTPOLE.policy.actor
    encoder = {"encoder.type": "Mlp", "encoder.network_cfg": {"hidden_sizes": [8]}}
    assert CARTPOLE.policy.replace(**encoder).encoder.type == "mlp"


def test_a_section_says_which_key_only_the_whole_config_translates():
    with pytest.raises(ConfigError, match=r"total_timesteps: unknown key; set iterations, or change the whole config"):
        CARTPOLE.trainer.replace(total_timesteps=1000)
    assert CARTPOLE.replace(**{"trainer.total_timesteps": 1}).trainer.iterations == 1


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda: CARTPOLE.trainer.replace(sede=3), "replace: sede: unknown key; did you mean 'seed'?"),
        (lambda: CARTPOLE.trainer.copy(sede=3), "replace: sede: unknown key; did you mean 'seed'?"),
        (lambda: CARTPOLE.trainer.replace(seed="3"), "replace: seed: expected an integer, got '3'; seed of all rand"),
        (
            lambda: CARTPOLE.trainer.replace(rollout_steps=3, buffer_size=4),
            "replace: rollout_steps: another name of 'buffer_size', which is also given; keep one",
        ),
        (lambda: CARTPOLE.algorithm.cfg.replace(gama=0.5), "replace: gama: unknown key; did you mean 'gamma'?"),
        (
            lambda: CARTPOLE.env.replace(**{"cfg.gravty": 1.0}),
            "replace: cfg.gravty: unknown key; did you mean 'gravity'?",
        ),
        (lambda: CARTPOLE.env.cfg.replace(gravity=-1.0), "replace: gravity: must be"),
        (
            lambda: CARTPOLE.policy.replace(name="actor_crtic"),
            "replace: name: unknown policy 'actor_crtic'; did you mean",
        ),
        (lambda: CARTPOLE.policy.replace(normalise_obs=True), "replace: normalise_obs: unknown key; did you mean"),
    ],
)
def test_faults(change, line):
    with pytest.raises(ConfigError, match="^" + re.escape(line)) as error:
        change()
    assert "\n" not in str(error.value)


def test_validate_finds_what_was_not_checked():
    class Size(ConfigModel):
        width: Count = Field(1, description="width, m")
        name: str = Field(description="a word")

    wrong = Size(name="a").model_copy(update={"width": -1})
    with pytest.raises(ConfigError, match=r"^Size: width: must be at least 1, got -1; width, m$"):
        wrong.validate()
    with pytest.raises(ConfigError, match=r"^Size: name: missing; a word$"):
        Size.model_construct().validate()
    with pytest.raises(ConfigError, match=r"^Config: trainer.seed: expected an integer, got 'x'; "):
        CARTPOLE.model_copy(update={"trainer": CARTPOLE.trainer.model_copy(update={"seed": "x"})}).validate()
    assert Size(name="a").replace(width=2).validate() is None


def test_pydantic_still_works_on_sections():
    """The methods have names that pydantic deprecates for its own methods."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cfg = Config.model_validate(CARTPOLE.to_dict())
        changed = cfg.model_copy(update={"trainer": cfg.trainer.copy(seed=9)}, deep=True)
        assert (changed.trainer.seed, cfg.trainer.seed) == (9, CARTPOLE.trainer.seed)
        assert Config.model_validate_json(cfg.model_dump_json()) == cfg
        cfg.trainer.validate()
    with pytest.raises(
        AttributeError, match=r"^seed: a config cannot be changed; make a changed copy with cfg\.replace"
    ):
        cfg.trainer.seed = 3
