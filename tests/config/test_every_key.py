"""Every key of the schema has an effect beyond the config; keys without meaning and evaluations have none."""

import json
from collections import Counter
from contextlib import nullcontext
from unittest.mock import patch

import gymnasium
import pytest
from support import demos, fake_parts
from support.key_effects import BASE, made, params
from support.key_rows import APG, TABLE, Row
from support.schema_keys import builtin_configs, path_of, walked
from support.small_runs import full_config, same, small

from ecrl import registry
from ecrl.config import Config, config_from_dict
from ecrl.config.abcdrl import FLAGS
from ecrl.config.embodichain import INERT, INERT_EVENTS
from ecrl.config.json_schema import KINDS, json_schema
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.registry import lookup, registered
from ecrl.run.train import consumers

ROWS = Counter(row.key for row in TABLE)


@pytest.fixture(scope="module", autouse=True)
def _parts():
    registered("env")  # imports the built-in parts, which must not be undone
    saved = {kind: registry._ENTRIES[kind] for kind in fake_parts.KINDS}
    fake_parts.register()
    for seed in (0, 1):
        demos.balancing(seed)
    demos.cues()
    for seed in (7, 8):
        demos.start(seed, BASE["policy"])
    with patch("ecrl.loop.iteration.checking", nullcontext):  # other tests check functions; hundreds of runs need not
        yield
    registry._ENTRIES.update(saved)
    del gymnasium.registry["Napping-v0"]


def test_every_key_has_a_row():
    """A new key fails here until it has a row that shows what it does; so does a row whose key is gone."""
    keys = {key for key, _, _ in walked()}
    some = {"trainer.seed", "trainer.events.eval.*.mode", "policy.actor_critic.critic.type", "network.mlp.activation"}
    assert len(keys) > 180 and some | {"algorithm.grpo.optimizer.kwargs.betas"} <= keys
    assert sorted(keys - set(ROWS)) == [], "keys without a row in key_rows.py"
    assert sorted(set(ROWS) - keys) == [], "rows of keys that are not there"


def test_keys_that_may_be_absent_have_a_row_between_two_values():
    """Otherwise a key whose value is ignored could pass, because its presence changes something."""
    absent = {key for key, model, name in walked() if model.model_fields[name].default is None}
    between = {row.key for row in TABLE if (row.path or path_of(row.key)) in row.base}
    names = ("actor_critic", "actor_only", "categorical_actor_critic", "deterministic_actor_critic")
    names += ("q_network", "recurrent", "squashed_actor_critic", "vla")
    only_one = {f"policy.{name}.action_dim" for name in names}  # all others are refused
    only_one.add("algorithm.pqn.segment_length")  # a policy with a Q-function has no sequences
    only_one |= {"vla_backend.builtin.model_path", "vla_backend.builtin.action_horizon"}  # others are refused
    only_one |= {"vla_backend.pi0.action_horizon", "vla_backend.openvla.action_horizon"}
    assert absent - between == only_one


def _name(row: Row) -> str:
    return row.key if ROWS[row.key] == 1 else f"{row.key}-{TABLE.index(row)}"


@pytest.mark.parametrize("row", TABLE, ids=_name)
def test_changing_a_key_changes_something(row):
    assert row.changed != row.base and set(row.changed) - set(row.base) <= {row.path or path_of(row.key)}
    same_again = row.see(row.changed) == row.see(row.base)
    assert not same_again, f"{row.key}: {row.value!r} changes nothing: {row.see.__name__}"


def _part(base, section):
    """Return the name of the environment, policy or algorithm of a base."""
    part = base.get(section, {})
    return base.get(f"{section}.name", part.get("name") if isinstance(part, dict) else part)


SECTIONS = ("env", "policy", "algorithm")
BASES = {(row.see.__name__, *(str(_part(row.base, section)) for section in SECTIONS)): row for row in TABLE}


@pytest.mark.parametrize("row", BASES.values(), ids=_name)
def test_changing_nothing_changes_nothing(row):
    """Otherwise a difference would not show the effect of a key."""
    same_again = row.see.again(row.base) == row.see(row.base)
    assert same_again, f"{row.see.__name__} of one config differ"


GYM_CONFIG = {"id": "pendulum", "env": {"gravity": 5.0}}
OTHER_PLACES = {  # key: value, the changes with the same meaning, the changes it needs, and the section that is absent
    "trainer.rollout_steps": (16, {"trainer.buffer_size": 16}, {}, ""),
    "trainer.update_horizon": (16, {"trainer.buffer_size": 16}, {}, ""),
    "trainer.total_timesteps": (3 * 64, {"trainer.iterations": 3}, {}, ""),
    "trainer.save_frequency_updates": (2, {"trainer.save_freq": 2 * 64}, {}, ""),
    "trainer.segment_length": (4, {"algorithm.cfg.segment_length": 4}, APG, ""),
    "trainer.deterministic_actions": (True, {"algorithm.cfg.deterministic_actions": True}, APG, ""),
    "algorithm.cfg.skip_nonfinite_updates": (True, {"trainer.finite_guard": "skip"}, APG, ""),
    "trainer.learning_env": ({"name": "pendulum"}, {"env": {"name": "pendulum"}}, {}, "env"),
    "trainer.gym_config": ("gym.json", {"env": {"name": "pendulum", "cfg": {"gravity": 5.0}}}, {}, "env"),
    "env.id": ("pendulum", {"env.name": "pendulum"}, {}, ""),
    "env.cfg.num_envs": (4, {"trainer.num_envs": 4}, {}, ""),
}


@pytest.mark.parametrize("key", OTHER_PLACES)
def test_another_place_of_a_key_is_that_key(key, tmp_path, monkeypatch):
    value, meant, under, absent = OTHER_PLACES[key]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gym.json").write_text(json.dumps(GYM_CONFIG))
    data = {section: settings for section, settings in BASE.items() if section != absent}
    assert config_from_dict(data, "here", under | {key: value}) == made(under | meant) != made(under)


def test_the_schema_has_no_other_keys():
    """The JSON schema has the walked keys and the other places above, and no more."""
    strangers = {lookup(kind, name).config.__name__ for kind in KINDS for name in registered(kind)}
    strangers |= {"PolicyConfig", "PolicyConfig-plain"}  # of policies without own keys, which other tests register
    strangers |= {"VLAConfig", "VLAConfig-plain"}  # of backends, in the same way
    mine = {config.__name__: config for config in builtin_configs().values()}
    mine |= {model.__name__: model for _, model, _ in walked()}
    sections = {
        name: section.get("properties", {})
        for name, section in json_schema()["$defs"].items()
        if name in mine or name not in strangers
    }
    without_keys = {"BaseModel", "JsonValue", "EventsConfig"}  # the last one's are walked by use
    assert set(sections) == set(mine) | without_keys
    prefix = {"TrainerConfig": "trainer", "EnvChoice": "env", "APGConfig": "algorithm.cfg"}
    other = {
        f"{prefix.get(name, 'env.cfg')}.{key}"
        for name, keys in sections.items()
        for key in keys
        if name in mine and key not in mine[name].model_fields
    }
    assert other == set(OTHER_PLACES) | {flag for flag in FLAGS if flag.startswith("trainer.")}


INERT_CHANGES = {key: True for key in INERT} | {
    f"trainer.events.{use}.{func}": {"func": func, "params": {"name": "cam"}}
    for func in INERT_EVENTS
    for use in ("train", "eval")
}


@pytest.mark.parametrize("key", INERT_CHANGES)
def test_a_key_without_meaning_warns_once_and_changes_nothing(key):
    with pytest.warns(UserWarning, match=f"^{key} has no meaning here") as caught:
        result = params({key: INERT_CHANGES[key]})
    assert len(caught) == 1
    assert (result == params({})) is True


def watched(cfg: Config, events: dict) -> Config:
    """The config with an evaluation after every iteration."""
    changes = {"enable_eval": True, "eval_freq": 1, "num_eval_envs": 2, "num_eval_episodes": 2, "events.eval": events}
    return cfg.replace(**{f"trainer.{key}": value for key, value in changes.items()})


def states(cfg: Config, folder, evaluations: int) -> list:
    """Return the states after each iteration of a run with all consumers, and check the number of evaluations."""
    folder.mkdir()
    records = list(consumers(train_iter(init_state(cfg), cfg), build(cfg), init_state(cfg), cfg, folder, 0, False))
    assert sum(r["log_type"] == "evaluate" for r in records) == evaluations
    assert (folder / "checkpoints" / "best").exists() == (evaluations > 0)
    build(cfg).env.close(records[-1]["state"]["env"])
    return [r["state"] for r in records if r["log_type"] == "train"]


@pytest.mark.parametrize(
    ("algorithm", "form"),
    [
        *((name, "off") for name in ("ppo", "grpo", "apg")),
        pytest.param("ppo", "on", marks=[pytest.mark.slow, pytest.mark.traced], id="ppo-traced"),
        *(pytest.param(name, "on", marks=pytest.mark.long) for name in ("ppo", "grpo", "apg")),
    ],
)
def test_evaluating_every_iteration_does_not_change_training(algorithm, form, tmp_path, monkeypatch):
    monkeypatch.setattr("ecrl.run.evaluation._CHUNK", 10)
    cfg = full_config(algorithm, form).replace(**{"trainer.iterations": 4, "env.cfg.max_episode_steps": 10})
    assert cfg.policy.normalize_obs and len(cfg.trainer.events.train) == 3
    events = {name: cfg.trainer.events.train[name].model_dump() for name in ("tilt", "push")}
    pairs = zip(states(cfg, tmp_path / "a", 0), states(watched(cfg, events), tmp_path / "b", 4), strict=True)
    assert [same(a, b) for a, b in pairs] == [True] * 4


def test_evaluating_every_iteration_does_not_change_training_on_gymnasium(tmp_path):
    on = {"policy.normalize_obs": True, "algorithm.cfg.normalize_reward": True}
    cfg = small(**{"env": "gymnasium:CartPole-v1", **on})
    pairs = list(zip(states(cfg, tmp_path / "a", 0), states(watched(cfg, {}), tmp_path / "b", 4), strict=True))
    excluded = [("env", "token"), ("env", "info")]  # they name the open environments; a success not reported is NaN
    assert [same(a.exclude(*excluded), b.exclude(*excluded)) for a, b in pairs] == [True] * 4
