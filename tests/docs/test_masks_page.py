"""The grid world of the page on masks: it learns, and no run ever takes a masked action."""

import json

import pytest
import torch
from support.doc_pages import blocks
from support.off_policy_agents import agent
from support.small_runs import small

import ecrl
from ecrl.algorithms import collect
from ecrl.loop.build import build
from ecrl.run.demonstrations import record_demonstrations


@pytest.fixture
def world(restored_registry):
    """Return the names that the page's module defines, and the page's config as a dict."""
    module, config = (block.text for block in blocks("docs/masks.md") if block.title)
    names: dict = {}
    exec(module, names)  # text of this repository's own page
    return names, json.loads(config)


def eager(data, **changes):
    return ecrl.load_config(data, {"trainer.compile": "off", **changes})


def test_the_mask_is_that_of_the_map(world):
    names, _ = world
    cells, free = names["FREE_CELLS"].tolist(), {tuple(cell) for cell in names["FREE_CELLS"].tolist()}
    assert free == {(r, c) for r, row in enumerate(names["MAP"]) for c, symbol in enumerate(row) if symbol == "."}
    for (row, column), mask in zip(cells, names["allowed_moves"](names["FREE_CELLS"]).tolist(), strict=True):
        moved = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        assert mask == [cell in free for cell in moved] and any(mask)


def test_the_environment_has_no_faults_and_notices_masked_actions(world):
    names, data = world
    report = ecrl.check_env(eager(data).env, num_steps=64)
    assert report.findings == []
    env = names["grid_world"](names["GridWorldConfig"]())
    start = env.reset(ecrl.rng.split(ecrl.rng.key(0), 200))
    action = start["obs", "action_mask"].int().argmin(-1)  # a masked action, if there is one
    after = env.step(start, action, None)
    masked = ~start["obs", "action_mask"].gather(-1, action.unsqueeze(-1)).squeeze(-1)
    assert masked.sum() > 100 and torch.equal(after["info", "metrics", "masked"], masked.float())
    assert torch.equal(after["obs", "cell"][masked], start["obs", "cell"][masked])
    assert not (start["obs", "cell"] == start["obs", "goal"]).all(-1).any()


def test_a_short_run_takes_no_masked_action(world):
    _, data = world
    cfg = eager(data, **{"trainer.iterations": 3})
    _, history = ecrl.train(ecrl.init_state(cfg), cfg, progress=False)
    assert [row["metrics/masked"] for row in history] == [0.0] * 3


@pytest.mark.long
def test_the_policy_learns_and_takes_no_masked_action(world):
    _, data = world
    cfg = eager(data)
    start = ecrl.init_state(cfg)
    assert ecrl.evaluate(start, cfg, num_episodes=200)["eval/success_rate"] < 0.5
    state, history = ecrl.train(start, cfg, progress=False)
    assert [row["metrics/masked"] for row in history] == [0.0] * cfg.trainer.iterations
    logs = ecrl.evaluate(state, cfg, num_episodes=200)
    assert logs["eval/success_rate"] >= 0.99 and logs["eval/metrics/masked"] == 0.0
    _, batch = collect(build(cfg), state)
    steps = batch["steps"][:, :-1]
    assert steps["obs", "action_mask"].gather(-1, steps["action"].unsqueeze(-1)).all()


def test_random_actions_without_the_mask_do_hit_walls(world):
    """The zeros above are not those of a metric that never counts."""
    names, _ = world
    env = names["grid_world"](names["GridWorldConfig"]())
    keys = ecrl.rng.split(ecrl.rng.key(0), 500)
    after = env.step(env.reset(keys), ecrl.rng.randint(keys, low=0, high=4), None)
    assert 0.3 < after["info", "metrics", "masked"].mean() < 0.7


def test_a_clone_learns_from_demonstrations_with_masks(world, tmp_path):
    _, data = world
    cfg, path = eager(data), tmp_path / "demos.safetensors"
    record_demonstrations(cfg, path, 4, state=ecrl.init_state(cfg), sample=True)
    clone = ecrl.load_config(data | {"algorithm": {"name": "bc", "cfg": {"demos": str(path), "batch_size": 8}}})
    clone = clone.replace(**{"trainer.compile": "off", "trainer.iterations": 2})
    _, history = ecrl.train(ecrl.init_state(clone), clone, progress=False)
    assert len(list(history)) == 2 and all(torch.isfinite(torch.tensor(row["loss"])) for row in history)


@pytest.mark.parametrize("name", ["ppo", "dqn", "pqn", "discrete sac"])
def test_algorithms_obey_the_mask(world, name):
    cfg = small() if name == "ppo" else agent(name)
    data = {
        "trainer": {"num_envs": 8, "buffer_size": 16, "iterations": 6, "compile": "off"},
        "env": {"name": "grid_world"},
        "policy": cfg.policy.model_dump(exclude_unset=True),
        "algorithm": cfg.algorithm.model_dump(exclude_unset=True),
    }
    capacity = {"algorithm.cfg.capacity": 400} if "capacity" in type(cfg.algorithm.cfg).model_fields else {}
    cfg = ecrl.load_config(data, capacity)
    _, history = ecrl.train(ecrl.init_state(cfg), cfg, progress=False)
    assert [row["metrics/masked"] for row in history] == [0.0] * 6
