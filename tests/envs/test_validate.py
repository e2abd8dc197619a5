"""Checks of a user's environment before the first step: each fault is one line with the field."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from pydantic import Field
from support import (
    fake_envs,  # noqa: F401  (registers its environments)
    fake_parts,
)
from support.small_runs import small
from tensordict import TensorDict

from ecrl import rng
from ecrl.config.model import ConfigModel
from ecrl.envs import Env, make_env, state_of
from ecrl.envs.validate import check_fields
from ecrl.errors import ConfigError
from ecrl.loop.iteration import init_state
from ecrl.registry import lookup, register_env
from ecrl.spaces import Discrete, MultiDiscrete, box, dict_space


class NothingConfig(ConfigModel):
    """No settings."""


def _reset(keys):
    return state_of(rng.uniform(keys, (3,)), keys.shape, place=torch.zeros(*keys.shape, 2))


def _step(state, action, noise):
    return state.copy().update({"reward": state["place"].sum(-1)})


GOOD = Env(_reset, _step, box(-1.0, 1.0, 3), Discrete(2))


def _both(change):
    """Return reset and step that both return a field of the wrong kind."""
    return {"reset": lambda keys: change(_reset(keys)), "step": lambda s, a, noise: s}


def _stepping(change):
    return {"step": lambda state, action, noise: change(_step(state, action, noise))}


def _info(state):
    ended = TensorDict({"success": torch.zeros(2, dtype=torch.bool)}, [2])
    return state.set("info", ended)


SAME = "; both must return the same fields"
BAD = {
    "step adds": (
        _stepping(_info),
        f"step returns field 'info.success' as bool [2], but reset does not{SAME}",
    ),
    "step drops": (
        _stepping(lambda s: s.exclude("place")),
        f"reset returns field 'place' as float32 [2, 2], but step does not{SAME}",
    ),
    "step retypes": (
        _stepping(lambda s: s.set("place", s["place"].double())),
        f"step returns field 'place' as float64 [2, 2], but reset as float32 [2, 2]{SAME}",
    ),
    "step reshapes": (
        _stepping(lambda s: s.set("reward", s["reward"].unsqueeze(-1))),
        f"step returns field 'reward' as float32 [2, 1], but reset as float32 [2]{SAME}",
    ),
    "step of gymnasium": (
        _stepping(lambda s: (s["obs"], s["reward"])),
        "step returns tuple, expected a TensorDict with obs, reward, terminated and truncated",
    ),
    "reset of a tensor": (
        {"reset": lambda keys: torch.zeros(*keys.shape, 3)},
        "reset returns Tensor, expected a TensorDict with obs, reward, terminated and truncated",
    ),
    "no batch": (
        _both(lambda s: TensorDict(dict(s.items()), [])),
        "reset returns batch size [], expected the batch size of the keys, [2]",
    ),
    "wide obs": (
        {"observation_space": box(-1.0, 1.0, 4)},
        "reset returns field 'obs' as float32 [2, 3], expected float32 [2, 4] (see observation_space)",
    ),
    "double obs": (
        _both(lambda s: s.set("obs", s["obs"].double())),
        "reset returns field 'obs' as float64 [2, 3], expected float32 [2, 3] (see observation_space)",
    ),
    "float choice": (
        {"observation_space": MultiDiscrete((2, 2, 2))},
        "reset returns field 'obs' as float32 [2, 3], expected int64 [2, 3] (see observation_space)",
    ),
    "missing part": (
        {"observation_space": dict_space({"arm": box(-1.0, 1.0, 3)})},
        "reset returns no field 'obs.arm', expected float32 [2, 3] (see observation_space)",
    ),
    "nested obs": (
        _both(lambda s: s.set("obs", TensorDict({"arm": s["obs"]}, [2]))),
        "reset returns field 'obs' as a TensorDict, expected float32 [2, 3] (see observation_space)",
    ),
    "no reward": (
        _both(lambda s: s.exclude("reward")),
        "reset returns no field 'reward', expected float32 [2]",
    ),
    "double reward": (
        _both(lambda s: s.set("reward", s["reward"].double())),
        "reset returns field 'reward' as float64 [2], expected float32 [2]",
    ),
    "number flag": (
        _both(lambda s: s.set("terminated", s["reward"])),
        "reset returns field 'terminated' as float32 [2], expected bool [2]",
    ),
    "one flag for all": (
        _both(lambda s: s.set("truncated", torch.zeros(2, 1, dtype=torch.bool))),
        "reset returns field 'truncated' as bool [2, 1], expected bool [2]",
    ),
    "one axis alone": (
        {"reset": lambda keys: _reset(keys.reshape(-1))},
        "reset of keys [3, 2] returns batch size [6], expected the batch size of the keys, [3, 2]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_state_that_does_not_fit_is_refused_in_one_line(name):
    change, message = BAD[name]
    check_fields(GOOD, "my_task")
    with pytest.raises(ConfigError) as error:
        check_fields(replace(GOOD, **change), "my_task")
    assert str(error.value) == f"env my_task: {message}"


def test_a_run_refuses_it_before_its_first_step(restored_registry):
    @register_env("my_task")
    def my_task(cfg: NothingConfig) -> Env:
        return replace(GOOD, **_stepping(_info))

    with pytest.raises(ConfigError, match=r"^env my_task: step returns field 'info.success' as bool \[2\], but reset"):
        init_state(small(env="my_task"))


@pytest.mark.parametrize("where", ["reset", "step", "draw"])
def test_what_the_code_of_an_environment_raises_passes_as_it_is(where):
    fault = RuntimeError("motors are off")

    def broken(*args):
        raise fault

    with pytest.raises(RuntimeError) as error:
        check_fields(replace(GOOD, **{where: broken}), "my_task")
    assert error.value is fault


def test_it_looks_once_without_gradient_at_an_action_within_bounds():
    checked = []

    def step(state, action, noise):
        checked.append((action, torch.is_grad_enabled(), noise.shape))
        return _step(state, action, noise)

    env = replace(GOOD, step=step, action_space=box(0.5, 2.0, 2))
    for _ in range(3):
        check_fields(env, "my_task")
    ((action, grad, shape),) = checked
    assert action.tolist() == [[0.5, 0.5]] * 2 and action.dtype == torch.float32 and not grad and shape == (2,)


def test_an_environment_that_is_not_pure_is_not_checked():
    assert check_fields(replace(GOOD, is_pure=False, reset=lambda keys: 1 / 0), "gym") is None


PASS = ["cartpole", "pendulum", "point_mass", "probe_action", "probe_constant", "probe_delay", "probe_match"]
PASS += ["probe_observation", "ladder", "endless", "pausing"]


@pytest.mark.parametrize("name", PASS)
def test_environments_of_this_repository_pass(name):
    assert check_fields(make_env(name), name) is None


def test_nested_observations_and_masks_pass(restored_registry):
    two = fake_parts.two_parts(fake_parts.TwoPartsConfig())
    assert check_fields(two, "two_parts") is None
    space = dict_space({"arm": box(-1.0, 1.0, 3), "gear": Discrete(3), "action_mask": MultiDiscrete((2, 2))})

    def reset(keys, dtype=torch.bool):
        mask = torch.ones(*keys.shape, 2, dtype=dtype)
        parts = {"arm": rng.uniform(keys, (3,)), "gear": torch.zeros_like(keys), "action_mask": mask}
        return state_of(torch.zeros(keys.shape), keys.shape).set("obs", TensorDict(parts, keys.shape))

    assert check_fields(Env(reset, lambda s, a, noise: s, space, Discrete(2)), "masked") is None
    integers = Env(partial(reset, dtype=torch.int64), lambda s, a, noise: s, space, Discrete(2))
    with pytest.raises(ConfigError, match=r"field 'obs\.action_mask' as int64 \[.*, 2\], expected bool \["):
        check_fields(integers, "masked")


class WeightsConfig(ConfigModel):
    weights: list[float] = Field(default=[1.0, 2.0], description="of the reward")
    named: dict[str, list[float]] = Field(default={}, description="weights by name")


def test_an_environment_whose_settings_are_lists_and_dicts_is_made_once_per_setting(restored_registry):
    @register_env("weighed")
    def weighed(cfg: WeightsConfig) -> Env:
        return replace(GOOD, step=lambda state, action, noise: state.copy())

    make = lookup("env", "weighed").make
    assert make(WeightsConfig(named={"a": [1.0], "b": []})) is make(WeightsConfig(named={"b": [], "a": [1.0]}))
    assert make(WeightsConfig(weights=[1.0])) is not make(WeightsConfig())
    cfg = small(env={"name": "weighed", "cfg": {"weights": [3.0], "named": {"a": [1.0]}}})
    assert int(init_state(cfg)["update_step"]) == 0
