"""On-policy algorithms: their own fields of the state, borrowed fields, and final states of a batch."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.checks import close
from support.recurrent_agent import remembering
from support.small_runs import last_state, small
from tensordict import TensorDict

import ecrl
from ecrl.algorithms import Algorithm, collect, on_policy
from ecrl.algorithms.core import LEARNER_KINDS, Run
from ecrl.algorithms.state_kinds import Kind
from ecrl.config import Config
from ecrl.config.model import ConfigModel
from ecrl.kernels import compute_gae, place_at_truncations
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.pytree import replaced
from ecrl.registry import register_algorithm

BUFFER = {"replay": Kind.BUFFER, ("replay", "cursor"): Kind.COUNTER}


class BorrowingConfig(ConfigModel):
    """No settings."""


def init(cfg: BorrowingConfig, run: Run, key: torch.Tensor) -> dict[str, Any]:
    zero = torch.zeros((), dtype=torch.int64)
    replay = TensorDict({"x": torch.tensor([4.0]), "cursor": zero, "written": zero.clone()}, [])
    params, hyper = TensorDict({"w": torch.tensor(0.0)}, []), TensorDict({}, [])
    fields = {"params": run.policy.init(key).update(params), "opt": hyper, "hyper": hyper}
    return fields | {"demos": TensorDict({"x": torch.tensor([1.0, 2.0])}, []), "replay": replay}


def update(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, dict]:
    """Add the sum of the demonstrations and of the buffer to `w`."""
    w = state["params", "w"] + state["demos", "x"].sum() + state["replay", "x"].sum()
    return replaced(state, {"params": replaced(state["params"], {"w": w})}), {"loss": w}


def update_of_demos(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, dict]:
    """Change what is frozen."""
    return replaced(state, {"demos": TensorDict({"x": state["demos", "x"] + 1.0}, [])}), {}


@register_algorithm("borrowing", override=True)
def borrowing(cfg: BorrowingConfig) -> Algorithm:
    kinds = {**LEARNER_KINDS, **BUFFER, "demos": Kind.FROZEN}
    return Algorithm((), partial(init, cfg), on_policy(collect, update), kinds, as_one=True)


@register_algorithm("writing", override=True)
def writing(cfg: BorrowingConfig) -> Algorithm:
    kinds = {**LEARNER_KINDS, **BUFFER, "demos": Kind.FROZEN}
    return Algorithm((), partial(init, cfg), on_policy(collect, update_of_demos), kinds)


def borrowed_run(name: str = "borrowing", **changes: Any) -> Any:
    return small(**{"algorithm": {"name": name}, "trainer.iterations": 3, **changes})


@pytest.mark.parametrize("env", ["cartpole", "gymnasium:CartPole-v1"])
def test_an_update_reads_frozen_and_buffer_fields_of_its_own(env):
    cfg = borrowed_run(env=env)
    state = init_state(cfg)
    after = last_state(cfg, state)
    assert after["params", "w"] == 3 * (1.0 + 2.0 + 4.0)
    assert after["demos", "x"].data_ptr() == state["demos", "x"].data_ptr(), "it is borrowed, not copied"
    assert set(after.keys()) == set(state.keys()) and set(after["replay"].keys()) == set(state["replay"].keys())


@pytest.mark.slow
def test_a_compiled_update_reads_them_too(traced_or_compiled):
    assert last_state(borrowed_run(**{"trainer.compile": "on"}))["params", "w"] == 21.0


def test_an_update_that_replaces_a_borrowed_field_is_refused():
    cfg = borrowed_run("writing")
    with pytest.raises(ValueError, match="writing replaced demos, which is read-only; give it another kind"):
        make_iteration(cfg)(init_state(cfg))


class TargetCriticConfig(ConfigModel):
    """No settings."""


def target_init(cfg: TargetCriticConfig, run: Run, key: torch.Tensor) -> dict[str, Any]:
    params = run.policy.init(key)
    slow = params.apply(lambda x: 0.5 * x + 0.25)
    return {"params": params, "opt": TensorDict({}, []), "hyper": TensorDict({}, []), "target_params": slow}


def target_update(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, dict]:
    """Compute advantages with the values of a target critic, also those of the states at time limits."""
    value: Any = run.policy.value
    steps, final, params, no_memory = batch["steps"], batch["final"], state["target_params"], TensorDict({}, [])
    if run.policy.unit == "sequence":
        values, final_values = value(params, batch["carry"][:, 0], steps, final)
    else:
        values, final_values = (value(params, no_memory, part["obs"]) for part in (steps, final))
    fields = {"value": values, "final_value": place_at_truncations(final_values, steps["truncated"])}
    advantage, target = compute_gae(replaced(steps, fields), 0.9, 0.8)
    return state, {"loss": target.square().mean(), "advantage": advantage.square().mean()}


@register_algorithm("target_critic", override=True)
def target_critic(cfg: TargetCriticConfig) -> Algorithm:
    kinds = {**LEARNER_KINDS, "target_params": Kind.LEARNED}
    return Algorithm((), partial(target_init, cfg), on_policy(collect, target_update), kinds, as_one=True)


def advantages_by_the_collector(cfg: Config, state: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and value targets of steps whose values the collector computed, with the target critic."""
    run, slow = build(cfg), state["target_params"]
    value: Any = run.policy.value
    policy = replace(run.policy, value=lambda params, *args: value(slow, *args))
    _, batch = collect(run._replace(policy=policy), state)
    assert batch["steps", "final_value"].count_nonzero() >= 4
    return compute_gae(batch["steps"], 0.9, 0.8)


POLE = {"name": "gymnasium", "cfg": {"id": "CartPole-v1", "max_episode_steps": 5}}
TARGETS = {"algorithm": {"name": "target_critic"}, "trainer.num_envs": 4, "trainer.buffer_size": 12}
RUNS = {
    "a slot for each time limit": partial(small, **TARGETS, **{"env.cfg.max_episode_steps": 5}),
    "memory": partial(remembering, **TARGETS, **{"env": {"name": "remember_cue", "cfg": {"end": "truncated"}}}),
    "a slot for each step": partial(small, **TARGETS, env=POLE),
}
FORMS = [
    "off",
    pytest.param("on", marks=[pytest.mark.slow, pytest.mark.traced], id="traced"),
    pytest.param("on", marks=pytest.mark.long),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", RUNS)
def test_an_algorithm_computes_values_at_time_limits_with_other_parameters(case, form):
    """On Gymnasium, the environment steps in Python, and only the update is a graph."""
    cfg = RUNS[case](**{"trainer.compile": form})
    state = init_state(cfg)
    after, logs = make_iteration(cfg)(state)
    ecrl.close(after, cfg)
    eager = cfg.replace(**{"trainer.compile": "off"})
    start = init_state(eager)
    advantage, target = advantages_by_the_collector(eager, start)
    ecrl.close(start, eager)
    close(logs["train"]["loss"], target.square().mean(), tol=1e-4)
    close(logs["train"]["advantage"], advantage.square().mean(), tol=1e-4)
