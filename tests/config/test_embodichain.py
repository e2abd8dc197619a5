"""Keys without meaning in ecrl: each warns once with its name and is never an error."""

import copy

import pytest
from pydantic import Field
from support.config_files import with_warnings

from ecrl import registry
from ecrl.config import TrainerConfig, config_from_dict
from ecrl.config.embodichain import INERT, INERT_EVENTS, inert_keys
from ecrl.config.model import ConfigModel
from ecrl.errors import ConfigError
from ecrl.registry import register_env, register_event, registered

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
BASE = {
    "trainer": {"seed": 3},
    "env": {"name": "cartpole", "cfg": {"gravity": 9.0}},
    "policy": {"name": "actor_critic", "actor": NET, "critic": NET},
    "algorithm": {"name": "ppo"},
}


def _with(path, value):
    data = copy.deepcopy(BASE)
    *parents, last = path.split(".")
    section = data
    for key in parents:
        section = section.setdefault(key, {})
    section[last] = value
    return data


@pytest.mark.parametrize("path", INERT)
@pytest.mark.parametrize("value", [True, 0, "x", None, [], {"uid": "cube"}])
def test_keys_without_meaning_warn_once_and_change_nothing(path, value):
    assert with_warnings(config_from_dict, _with(path, value)) == (
        config_from_dict(BASE),
        [f"{path} has no meaning here ({INERT[path]}); ignored"],
    )


@pytest.mark.parametrize("func", INERT_EVENTS)
@pytest.mark.parametrize("use", ["train", "eval"])
def test_events_without_meaning_warn(func, use, monkeypatch):
    event = {"func": func, "mode": "interval", "interval_step": 1, "params": {"name": "cam", "eye": [0, 0, 2]}}
    data = _with(f"trainer.events.{use}.film", event)
    message = f"trainer.events.{use}.film has no meaning here ({func}: {INERT_EVENTS[func]}); ignored"
    assert with_warnings(config_from_dict, data) == (config_from_dict(BASE), [message])
    data["trainer"]["events"][use]["push"] = {"func": "randomize_fied"}
    with pytest.raises(ConfigError, match=r"\.push\.func: unknown event .*; did you mean 'randomize_field'\?"):
        config_from_dict(data)

    class FilmConfig(ConfigModel):
        name: str = Field("", description="a word")
        eye: list[float] = Field([], description="m")

    monkeypatch.setitem(registry._ENTRIES, "event", dict(registry._ENTRIES["event"]))

    @register_event(func, override=True)
    def film(cfg: FilmConfig) -> object:
        raise AssertionError("a config is checked without making its parts")

    cfg, warned = with_warnings(
        config_from_dict, _with(f"trainer.events.{use}.film", event)
    )  # a user's event of that name has a meaning
    assert warned == [] and getattr(cfg.trainer.events, use)["film"].params == FilmConfig(
        name="cam", eye=[0.0, 0.0, 2.0]
    )


def test_all_keys_without_meaning_are_reported_together():
    data = copy.deepcopy(BASE)
    for path in INERT:
        section = data["trainer"] if path.startswith("trainer.") else data["env"]["cfg"]
        section[path.rpartition(".")[2]] = 1
    cfg, warned = with_warnings(config_from_dict, data)
    assert cfg == config_from_dict(BASE)
    assert sorted(warned) == sorted(f"{path} has no meaning here ({why}); ignored" for path, why in INERT.items())
    assert data["trainer"]["headless"] == 1  # the caller's dict does not change


def test_keys_an_environment_knows_have_a_meaning(monkeypatch):
    registered("env")
    monkeypatch.setitem(registry._ENTRIES, "env", dict(registry._ENTRIES["env"]))

    class RobotConfig(ConfigModel):
        robot: str = Field("arm", description="a word")

    @register_env("with_robot")
    def with_robot(cfg: RobotConfig) -> object:
        raise AssertionError("a config is checked without making its parts")

    data = BASE | {"env": {"name": "with_robot", "cfg": {"robot": "leg", "sensor": []}}}
    cfg, warned = with_warnings(config_from_dict, data)
    assert cfg.env.cfg == RobotConfig(robot="leg")
    assert warned == ["env.cfg.sensor has no meaning here (this environment has its own scene); ignored"]
    assert inert_keys({"env": {"name": "unknown", "cfg": {"robot": 1}}}) == []


def test_no_key_of_the_trainer_is_on_the_list():
    keys = {f"trainer.{name}" for name in (*TrainerConfig.model_fields, *TrainerConfig.other_names)}
    assert not keys & set(INERT)


@pytest.mark.parametrize(
    "path", ["env.cfg.actions", "env.cfg.extensions", "env.cfg.events", "env.cfg.rewards", "headless"]
)
def test_other_keys_are_refused(path):
    with pytest.raises(ConfigError, match=f"^config: {path}: unknown key; "):
        config_from_dict(_with(path, {}))


@pytest.mark.parametrize("junk", [3, None, [], "x", {"eval": 3}, {"eval": {"a": 3}}, {"eval": {"a": {"func": []}}}])
def test_junk_is_left_to_the_check(junk):
    with pytest.raises(ConfigError, match=r"^config: trainer\.events"):
        config_from_dict(_with("trainer.events", junk))
