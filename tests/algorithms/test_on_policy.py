"""State of an on-policy algorithm: its own fields, and borrowed fields, which are read-only."""

from functools import partial
from typing import Any

import pytest
import torch
from support.small_runs import last_state, small
from tensordict import TensorDict

from ecrl.algorithms import Algorithm, collect, on_policy
from ecrl.algorithms.core import LEARNER_KINDS, Run
from ecrl.algorithms.state_kinds import Kind
from ecrl.config.model import ConfigModel
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


def update(run: Run, state: TensorDict, rollout: TensorDict) -> tuple[TensorDict, dict]:
    """Add the sum of the demonstrations and of the buffer to `w`."""
    w = state["params", "w"] + state["demos", "x"].sum() + state["replay", "x"].sum()
    return replaced(state, {"params": replaced(state["params"], {"w": w})}), {"loss": w}


def update_of_demos(run: Run, state: TensorDict, rollout: TensorDict) -> tuple[TensorDict, dict]:
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
def test_a_compiled_update_reads_them_too():
    assert last_state(borrowed_run(**{"trainer.compile": "on"}))["params", "w"] == 21.0


def test_an_update_that_replaces_a_borrowed_field_is_refused():
    cfg = borrowed_run("writing")
    with pytest.raises(ValueError, match="writing replaced demos, which is borrowed; give it another kind"):
        make_iteration(cfg)(init_state(cfg))
