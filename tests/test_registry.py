"""The registry: registering, looking up, plugins, and faults with their messages."""

import os
import subprocess
import sys

import pytest
from pydantic import BaseModel, Field

import ecrl
from ecrl import registry
from ecrl.config.model import ConfigModel
from ecrl.registry import (
    did_you_mean,
    lookup,
    register_algorithm,
    register_env,
    register_event,
    register_network,
    register_policy,
    register_vla_backend,
    registered,
)

REGISTER = {
    "env": register_env,
    "policy": register_policy,
    "algorithm": register_algorithm,
    "network": register_network,
    "event": register_event,
    "vla_backend": register_vla_backend,
}
BUILTIN = {
    "env": {
        "cartpole",
        "gymnasium",
        "pendulum",
        "point_mass",
        "probe_action",
        "probe_constant",
        "probe_delay",
        "probe_match",
        "probe_observation",
    },
    "policy": {"actor_critic", "actor_only"},
    "algorithm": {"apg", "grpo", "ppo"},
    "network": {"mlp"},
    "event": set(),
    "vla_backend": {"builtin", "openvla", "pi0"},
}
MADE_EACH_TIME = ("network", "algorithm", "vla_backend")

pytestmark = pytest.mark.usefixtures("restored_registry")


class Settings(ConfigModel):
    size: int = Field(1, description="a number")


def _make(cfg: Settings) -> object:
    return object()


@pytest.mark.parametrize("kind", REGISTER)
def test_register_and_look_up(kind):
    assert REGISTER[kind]("mine")(_make) is _make  # the decorator hands the function back unchanged
    entry = lookup(kind, "mine")
    assert entry.config is Settings and "mine" in registered(kind)
    assert all("mine" not in registered(other) for other in REGISTER if other != kind)
    assert entry.make(Settings()) is not entry.make(Settings(size=2))
    # A network is made for every call, with new weights. Algorithms are compared by value. The policy `vla` remembers
    # what a backend made. The others are made once per config.
    assert (entry.make(Settings()) is entry.make(Settings(size=1))) == (kind not in MADE_EACH_TIME)


@pytest.mark.parametrize("kind", REGISTER)
def test_a_taken_name_raises_unless_overridden(kind):
    REGISTER[kind]("mine")(_make)
    first = lookup(kind, "mine").make(Settings())
    with pytest.raises(ValueError, match=f"{kind} 'mine' is already registered; pass override=True to replace it"):
        REGISTER[kind]("mine")(_make)
    assert kind in MADE_EACH_TIME or lookup(kind, "mine").make(Settings()) is first
    REGISTER[kind]("mine", override=True)(_make)
    assert lookup(kind, "mine").make(Settings()) is not first  # nothing is remembered of the one replaced


@pytest.mark.parametrize("kind", ["event", "action", "observation", "reward", "robot", "env"])
def test_environments_are_made_again_after_a_part_of_them_was_replaced(kind):
    register_env("mine")(_make)
    register = getattr(ecrl, f"register_{kind}")
    register("part")(_make)
    first = lookup("env", "mine").make(Settings())
    register("other_part")(_make)
    assert lookup("env", "mine").make(Settings()) is first
    register("part", override=True)(_make)
    assert lookup("env", "mine").make(Settings()) is not first


def test_a_wrapper_contains_the_environment_that_replaced_the_wrapped_one():
    def make_wrapped(cfg: Settings):
        return object()

    def make_wrapper(cfg: Settings):
        return "wrapper of", lookup("env", "wrapped").make(cfg)

    register_env("wrapped")(make_wrapped)
    register_env("wrapper")(make_wrapper)
    assert lookup("env", "wrapper").make(Settings())[1] is lookup("env", "wrapped").make(Settings())
    register_env("wrapped", override=True)(make_wrapped)
    assert lookup("env", "wrapper").make(Settings())[1] is lookup("env", "wrapped").make(Settings())


@pytest.mark.parametrize("kind", ["network", "vla_backend", "policy"])
def test_policies_are_made_again_after_a_part_of_them_was_replaced(kind):
    register_policy("mine")(_make)
    register = getattr(ecrl, f"register_{kind}")
    register("part")(_make)
    first = lookup("policy", "mine").make(Settings())
    assert lookup("policy", "mine").make(Settings()) is first
    register("part", override=True)(_make)
    assert lookup("policy", "mine").make(Settings()) is not first


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
        *((kind, "zzz", None) for kind in BUILTIN),
    ],
)
def test_an_unknown_name_names_the_known(kind, name, end):
    with pytest.raises(KeyError) as error:
        lookup(kind, name)
    end = end or f"known: {', '.join(registered(kind)) or 'none'}."
    hint = f"If the {kind} is your own, import its module first: import MODULE in Python, --import MODULE in a shell"
    assert error.value.args[0] == f"unknown {kind} {name!r}; {end} {hint}"


@pytest.mark.parametrize("look", [registered, lambda kind: lookup(kind, "cartpole")])
def test_an_unknown_kind_names_the_known(look):
    with pytest.raises(ValueError, match=r"unknown kind of component 'envs'; did you mean 'env'\?"):
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


def test_errors_of_a_user_module_are_raised_unchanged(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "has_a_wrong_number.py").write_text("int('x')")
    with pytest.raises(ValueError, match="invalid literal"):
        registry.import_user_module("has_a_wrong_number")
    with pytest.raises(ecrl.errors.UserError, match=r"^--import \(nothing\): the name is empty; expected the name"):
        registry.import_user_module("")


def test_the_first_lookup_imports_the_builtin_parts():
    code = "from ecrl.registry import _ENTRIES, lookup; assert not _ENTRIES['env']; lookup('env', 'cartpole')"
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], check=True)


def test_a_run_imports_only_the_components_that_it_needs():
    code = """
import sys
from ecrl import init_state, load_config, train_iter
from ecrl.registry import _ENTRIES, lookup, registered

cfg = load_config("cartpole_ppo", {"trainer.compile": "off", "trainer.num_envs": 2})
next(train_iter(init_state(cfg), cfg))
for kind in ("algorithm", "env", "policy", "network", "vla_backend"):
    registered(kind)
print(*[name for kind in ("algorithm", "env", "policy", "network") for name in _ENTRIES[kind]])
others = ("ecrl.envs.mujoco.tasks", "ecrl.envs.gymnasium", "ecrl.policies.vla", "ecrl.algorithms.sac")
print(*[name in sys.modules for name in others])
lookup("reward", "success_reward")
print("ecrl.envs.mujoco.tasks" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    expected = ["ppo cartpole actor_only actor_critic mlp fused", "False False False False", "True"]
    assert done.stdout.splitlines()[-3:] == expected


def test_a_built_in_function_can_take_the_name_of_another_component():
    code = """
from ecrl.algorithms.ppo import ppo
from ecrl.registry import lookup, register_algorithm

try:
    register_algorithm("sac")(ppo)
except ValueError as error:
    print(error)
register_algorithm("sac", override=True)(ppo)
print(lookup("algorithm", "sac").config.__name__)
"""
    assert _python(code).stdout.splitlines() == [
        "algorithm 'sac' is already registered; pass override=True to replace it",
        "PPOConfig",
    ]


def test_the_table_of_built_in_components_names_the_module_of_each():
    code = """
from ecrl import registry

registry._import_all_builtin()
for kind, modules in registry.BUILTIN.items():
    homes = {name: entry.make.__module__ for name, entry in registry._ENTRIES[kind].items()}
    assert homes.keys() == modules.keys(), (kind, homes.keys() ^ modules.keys())
    for name, home in homes.items():
        assert home == modules[name] or home.startswith(f"{modules[name]}."), (kind, name, home)
assert not registry.BUILTIN.keys() & {"event", "action", "observation", "reward"}
assert set(registry._KINDS) == registry.BUILTIN.keys() | {"event", "action", "observation", "reward"}
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_built_in_part_can_be_overridden_before_anything_was_looked_up():
    code = """
from ecrl.registry import lookup, register_env
from ecrl.config.model import ConfigModel

class Mine(ConfigModel): ...

try:
    @register_env("cartpole")
    def taken(cfg: Mine): ...
except ValueError as error:
    print(error)

@register_env("cartpole", override=True)
def cartpole(cfg: Mine):
    return "mine"

print(lookup("env", "cartpole").make(Mine()), lookup("env", "pendulum").config.__name__)
"""
    assert _python(code).stdout.splitlines() == [
        "env 'cartpole' is already registered; pass override=True to replace it",
        "mine PendulumConfig",
    ]


def _python(code, path=None, ok=True):
    env = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (done.returncode == 0) == ok, done.stderr
    return done


TINY = '''
import torch
from tensordict import TensorDict

from ecrl import ConfigModel, Env, register_env, registered
from ecrl.envs import state_of
from ecrl.spaces import Discrete, box

assert "cartpole" in registered("env"), "built-in parts come first"


class TinyConfig(ConfigModel):
    """No settings."""


@register_env("tiny")
def tiny(cfg: TinyConfig) -> Env:
    """Action 1 pays."""

    def step(state, action, noise):
        return state.copy().set("reward", action.float())

    return Env(lambda keys: state_of(torch.zeros(*keys.shape, 1), keys.shape), step, box(0.0, 1.0, 1), Discrete(2))
'''
TRAIN = """
import ecrl
from ecrl.config import config_from_dict
net = {"network_cfg": {"hidden_sizes": [4]}}
cfg = config_from_dict({
    "trainer": {"num_envs": 2, "buffer_size": 4, "iterations": 2, "compile": "off"},
    "env": "tiny", "policy": {"name": "actor_critic", "actor": net, "critic": net},
    "algorithm": {"name": "ppo", "cfg": {"batch_size": 8}},
})
print(int(ecrl.train(ecrl.init_state(cfg), cfg, progress=False)[0]["update_step"]))
"""


def _install(folder, package, text, points, group="ecrl.plugins"):
    """Write a package as pip installs it: its code, and a dist-info with its entry points."""
    (folder / f"{package}.py").write_text(text)
    info = folder / f"{package}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{point}\n" for point in points))


def test_the_parts_of_an_installed_package_are_known(tmp_path):
    _install(tmp_path, "tiny_parts", TINY, ["tiny = tiny_parts"])
    done = _python(TRAIN, tmp_path)
    assert done.stdout.strip() == "2" and done.stderr == ""
    error = _python("from ecrl.registry import lookup; lookup('env', 'tiny')", ok=False)
    assert "unknown env 'tiny'" in error.stderr, "only where it is installed"


BACKEND = """
from ecrl.policies import Policy, VLAConfig
from ecrl.registry import register_vla_backend

class TinyConfig(VLAConfig):
    "No settings."

@register_vla_backend("tiny_model")
def tiny_model(cfg: TinyConfig, observation_space, action_space, policy_cfg) -> Policy: ...
"""


def test_packages_have_entry_points_for_backends_of_the_policy_vla(tmp_path):
    _install(tmp_path, "tiny_backend", BACKEND, ["tiny = tiny_backend"], "ecrl.vla_backends")
    _install(tmp_path, "tiny_parts", TINY, ["tiny = tiny_parts"])
    names = "from ecrl.registry import registered; print(*registered('vla_backend'), 'tiny' in registered('env'))"
    done = _python(names, tmp_path)
    assert done.stdout.split() == ["builtin", "openvla", "pi0", "tiny_model", "True"] and done.stderr == ""


BROKEN = "import ecrl_parts_that_nobody_has"


def test_a_failing_plugin_warns_once_and_breaks_nothing_else(tmp_path):
    _install(tmp_path, "a_broken_one", BROKEN, ["broken = a_broken_one"])
    _install(tmp_path, "tiny_parts", TINY, ["tiny = tiny_parts"])
    done = _python(TRAIN, tmp_path)
    assert done.stdout.strip() == "2"
    message = "plugin 'broken' (a_broken_one, from a_broken_one 1.2) cannot be imported: "
    message += "ModuleNotFoundError: No module named 'ecrl_parts_that_nobody_has'"
    assert done.stderr.count(f"RuntimeWarning: {message}; fix or uninstall it") == 1
    assert done.stderr.count("cannot be imported") == 1
    unknown = _python("from ecrl.registry import lookup; lookup('env', 'zzz')", tmp_path, ok=False)
    assert "unknown env 'zzz'; known: " in unknown.stderr
    assert unknown.stderr.count("cannot be imported") == 2, "once as a warning, once beside the unknown name"


def test_a_plugin_may_not_take_a_built_in_name_unasked(tmp_path):
    _install(tmp_path, "tiny_parts", TINY.replace('"tiny"', '"cartpole"'), ["tiny = tiny_parts"])
    done = _python("from ecrl.registry import lookup; print(lookup('env', 'cartpole').config.__name__)", tmp_path)
    assert done.stdout.strip() == "CartPoleConfig"
    assert "ValueError: env 'cartpole' is already registered; pass override=True" in done.stderr


class NetConfig(ConfigModel):
    """No settings."""


def test_a_policy_forgets_a_network_that_was_replaced():
    import torch

    from ecrl import rng
    from ecrl.policies import make_policy
    from ecrl.spaces import Discrete, Space, box, flat_dim

    def outputs(width):
        def net(cfg: NetConfig, space: Space, outputs: int) -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(flat_dim(space), width), torch.nn.Linear(width, outputs))

        return net

    def weights():
        policy = make_policy({"name": "actor_only", "actor": {"type": "mine"}}, box(-1.0, 1.0, 3), Discrete(2))
        return policy, sum(x.numel() for x in policy.init(rng.key(0)).values(True, True))

    register_network("mine")(outputs(5))
    first, count = weights()
    assert count == 3 * 5 + 5 + 5 * 2 + 2 and weights()[0] is first
    register_network("mine", override=True)(outputs(7))
    second, count = weights()
    assert count == 3 * 7 + 7 + 7 * 2 + 2 and second is not first
