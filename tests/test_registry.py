import subprocess
import sys

import pytest
from pydantic import BaseModel, Field

from ecrl import registry
from ecrl.registry import did_you_mean, lookup, register_algorithm, register_env, register_policy, registered
from ecrl.strict import ConfigModel

REGISTER = {"env": register_env, "policy": register_policy, "algorithm": register_algorithm}
BUILTIN = {
    "env": {
        "cartpole",
        "pendulum",
        "probe_action",
        "probe_constant",
        "probe_delay",
        "probe_match",
        "probe_observation",
    },
    "policy": {"actor_critic"},
    "algorithm": {"ppo"},
}


class Settings(ConfigModel):
    size: int = Field(1, description="a number")


@pytest.fixture(autouse=True)
def _put_back(monkeypatch):
    registered("env")  # imports the built-in parts, which must not be undone
    monkeypatch.setattr(registry, "_ENTRIES", {kind: dict(known) for kind, known in registry._ENTRIES.items()})


def _make(cfg: Settings) -> object:
    return object()


@pytest.mark.parametrize("kind", REGISTER)
def test_register_and_look_up(kind):
    assert REGISTER[kind]("mine")(_make) is _make  # the decorator hands the function back unchanged
    entry = lookup(kind, "mine")
    assert entry.config is Settings and "mine" in registered(kind)
    assert all("mine" not in registered(other) for other in REGISTER if other != kind)
    assert entry.make(Settings()) is entry.make(Settings(size=1)) is not entry.make(Settings(size=2))


@pytest.mark.parametrize("kind", REGISTER)
def test_a_taken_name_raises_unless_overridden(kind):
    REGISTER[kind]("mine")(_make)
    first = lookup(kind, "mine").make(Settings())
    with pytest.raises(ValueError, match=f"{kind} 'mine' is already registered; pass override=True to replace it"):
        REGISTER[kind]("mine")(_make)
    assert lookup(kind, "mine").make(Settings()) is first
    REGISTER[kind]("mine", override=True)(_make)
    assert lookup(kind, "mine").make(Settings()) is not first  # nothing is remembered of the one replaced


def test_built_in_names_are_taken():
    with pytest.raises(ValueError, match="env 'cartpole' is already registered"):
        register_env("cartpole")(_make)


@pytest.mark.parametrize("kind", REGISTER)
def test_builtin(kind):
    assert set(registered(kind)) >= BUILTIN[kind] and list(registered(kind)) == sorted(registered(kind))


@pytest.mark.parametrize(
    ("kind", "name", "end"),
    [
        ("env", "cartpol", "did you mean 'cartpole'?"),
        ("policy", "actorcritic", "did you mean 'actor_critic'?"),
        ("env", "CartPole", "did you mean 'cartpole'?"),
        ("algorithm", "PPO", "did you mean 'ppo'?"),
        *((kind, "zzz", f"known: {', '.join(registered(kind))}") for kind in BUILTIN),
    ],
)
def test_an_unknown_name_names_the_known(kind, name, end):
    with pytest.raises(KeyError) as error:
        lookup(kind, name)
    assert error.value.args[0] == f"unknown {kind} {name!r}; {end}"


@pytest.mark.parametrize("look", [registered, lambda kind: lookup(kind, "cartpole")])
def test_an_unknown_kind_names_the_known(look):
    with pytest.raises(ValueError, match=r"no registry 'envs'; did you mean 'env'\?"):
        look("envs")


def _no_annotation(cfg):
    return cfg


def _no_parameter():
    return None


def _wrong_annotation(cfg: dict) -> dict:
    return cfg


class Unfrozen(BaseModel):
    size: int = 1


def _unfrozen(cfg: Unfrozen) -> object:
    return cfg


@pytest.mark.parametrize("make", [_no_annotation, _no_parameter, _wrong_annotation, _unfrozen])
def test_make_must_name_its_config(make):
    with pytest.raises(
        TypeError, match=f"env 'mine': annotate the first parameter of {make.__name__} with its .*Config"
    ):
        register_env("mine")(make)
    assert "mine" not in registered("env")


def test_did_you_mean():
    assert did_you_mean("lerning_rate", ["learning_rate", "gamma"]) == "did you mean 'learning_rate'?"
    assert did_you_mean("zzz", ["b", "a"]) == "known: a, b"
    assert did_you_mean("zzz", []) == "known: none"
    assert did_you_mean(3, ["a"]) == "known: a"  # keys of a dict made in Python need not be strings


def test_the_first_lookup_imports_the_builtin_parts():
    code = "from ecrl.registry import _ENTRIES, lookup; assert not _ENTRIES['env']; lookup('env', 'cartpole')"
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], check=True)
