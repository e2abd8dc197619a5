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
from ecrl.policies import VLAConfig
from ecrl.registry import register_env, register_event, register_vla_backend, registered

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
        *parents, key = path.split(".")
        section = data
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = 1
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


VLA = {"trainer": {}, "env": {"name": "cartpole"}, "policy": {"name": "vla"}, "algorithm": {"name": "grpo"}}


def _vla(section, **more):
    return {**VLA, "policy": {"name": "vla", **({} if section is None else {"vla": section}), **more}}


def test_the_width_of_gaussian_actions_has_no_meaning_for_tokens():
    config, messages = with_warnings(config_from_dict, _vla({"backend": "builtin", "gaussian_sigma": 0.1}))
    assert config == config_from_dict(_vla(None))
    reason = "actions are sampled as tokens; policy.vla.temperature sets their randomness"
    assert messages == [f"policy.vla.gaussian_sigma has no meaning here ({reason}); ignored"]


def test_other_policies_do_not_know_the_keys_of_vla():
    data = copy.deepcopy(BASE)
    data["policy"]["vla_config"] = {"model_path": "weights"}
    with pytest.raises(ConfigError, match=r"^config: policy.vla_config: unknown key; "):
        config_from_dict(data)


class _ReadsConfig(VLAConfig):
    """A backend that reads weights."""

    gaussian_sigma: float = Field(0.1, description="standard deviation")


@pytest.mark.usefixtures("restored_registry")
def test_the_path_of_a_model_has_another_place():
    @register_vla_backend("reads")
    def reads(cfg: _ReadsConfig, observation_space: object, action_space: object, policy_cfg: object) -> object: ...

    data = _vla({"backend": "reads", "gaussian_sigma": 0.2}, vla_config={"model_path": "weights"})
    config, messages = with_warnings(config_from_dict, data)
    expected = _vla({"backend": "reads", "gaussian_sigma": 0.2, "model_path": "weights"})
    assert config == config_from_dict(expected) and messages == []
    twice = _vla({"backend": "reads", "model_path": "a"}, vla_config={"model_path": "b"})
    message = r"^config: policy.vla_config.model_path: another name of 'policy.vla.model_path', which is also given"
    with pytest.raises(ConfigError, match=message):
        config_from_dict(twice)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"model_class": "a.B"},
            "policy.vla_config.model_class: a config cannot import a class; register a backend",
        ),
        (
            {"model_config": {}},
            "policy.vla_config.model_config: a config cannot import a class; register a backend",
        ),
        ({"path": "x"}, "policy.vla_config.path: unknown key; known: model_path"),
        ({"model_path": "x"}, "policy.vla: model_path is given, but backend builtin begins with new weights"),
        (["x"], "policy.vla_config: expected an object, got a list"),
    ],
)
def test_a_section_of_a_model_that_cannot_be_read(section, message):
    with pytest.raises(ConfigError) as caught:
        config_from_dict(_vla(None, vla_config=section))
    assert str(caught.value).startswith(f"config: {message}") and "\n" not in str(caught.value)
